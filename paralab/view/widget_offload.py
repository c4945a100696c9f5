"""Offload with sliders: how fast an NVMe do I need?

The picture follows the sliders (offload_curves.py): how busy the device is over the disk's
bandwidth, by ZeRO-Infinity's formula and as predicted, and what moves over each link.
“Run it” trains for real with states on the host and in files, its links held down to what the
sliders say; the replay of that run on such links, and the wall clock, are points of the picture
then. They stay: a few runs at several bandwidths give a curve of their own.
"""

from __future__ import annotations

from typing import Any

from paralab.interpret import quick
from paralab.interpret.predict import check_cluster
from paralab.report.tables import Tables
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory.offload import tier_bytes
from paralab.view.chart import Chart
from paralab.view.disk_bandwidth import FASTEST, FORMULAS, SLOWEST, Foreseen, Point, points
from paralab.view.offload_curves import SHARE, chart
from paralab.view.pipeline import percent
from paralab.view.widget import At, Widget
from paralab.view.widget_parts import buttons, here, in_speed, no_room, processes, slider

DISKS = (SLOWEST, 7e7, *(m * 10.0**e for e in (8, 9) for m in (1, 1.5, 2, 3, 5, 7)), FASTEST)
HOSTS = tuple(m * 10.0**e for e in (8, 9, 10) for m in (1, 3))  # 100 MB/s to 30 GB/s
PLACES = {"host's memory": "cpu", "files": "nvme"}
EACH, ONCE = "read for each forward and backward", "read and written once in a step"
LONGEST = 20.0  # seconds of a step that “Run it” takes on


class Offload(Widget):
    """Disk, link to the host, micro-batch size and count, where parameters and optimizer states
    are, devices. Gradients are on the host in any case (ZeRO-3). In fp32: 16 bits are slow on most
    processors, whatever moves.

    model    what is trained; default: 4 layers of width 256
    cluster  what is predicted and replayed on; default: this machine
    """

    name, steps = "offload", 3
    model = ModelSpec(layers=4, hidden=256, heads=8, seq_len=64)
    plan = Plan(zero_stage=3, offload="cpu", microbatch_size=8)
    board = {
        # A cluster that states no disk: the slider starts with 1 GB/s.
        "bandwidth": slider("disk", DISKS, in_speed, start=10**9, link=lambda c: c.disk),
        "host": slider("host link", HOSTS, in_speed, link=lambda c: c.host),
        "microbatch_size": slider("micro-batch", (1, 2, 4, 8, 16, 32), "{} sample", "s"),
        "microbatches": slider("micro-batches", (1, 2, 4, 8), "{} micro-batch", "es"),
        "parameters": buttons("parameters", PLACES, start="nvme", tip=EACH),
        "optimizer": buttons("optimizer", PLACES, start="nvme", tip=ONCE),
        "ranks": slider("devices", (1, 2, 4), "{} device", "s", sets="dp"),
    }

    def __init__(self, model: ModelSpec | None = None, cluster: Cluster | None = None) -> None:
        super().__init__(model, None, cluster)

    def _check(self) -> None:
        check_cluster(self.plan, self.cluster or self._here(1))

    def _offered(self, name: str, value: Any) -> bool:
        return name != "ranks" or self.cluster is None or value <= self.cluster.num_devices

    def _plan(self, at: At, **limits: int) -> Plan:
        """With ``limits`` of {link: bytes/s}."""
        places = {name: at[name] for name in ("parameters", "optimizer")}
        offload = {**places, "gradients": "cpu", "bandwidth": limits}
        return super()._plan(at).replace(offload=offload)

    def _cluster(self, at: At) -> Cluster:
        """Its link to the host is as fast as the slider says; latency stays."""
        own = self._own(at)
        return own.replace(host=own.host.replace(bandwidth=at["host"]))

    def _measure(self, at: At, **how: Any) -> Tables:
        """Trained with links that are no faster than the sliders."""
        from paralab.experiment import run

        limits = {"disk": round(at["bandwidth"])}
        if at["host"] < self._own(at).host.bandwidth:
            limits["h2d"] = limits["d2h"] = round(at["host"])
        return run(at.model, self._plan(at, **limits), steps=self.steps, **how)

    def _own(self, at: At) -> Cluster:
        return self.cluster or self._here(at["ranks"])

    def _refused(self, at: At) -> str:
        plan, local = at.plan, here(at["ranks"])
        kept = quick.peak(at.model, plan), tier_bytes(at.model, plan)["host"]
        each = sum(sum(parts.values()) for parts in kept)
        if why := no_room(plan.dp, each, local):
            return why
        room = local.replace(devices_per_node=max(local.devices_per_node, plan.dp))
        seconds = Foreseen(at.model, plan, room).seconds(at["bandwidth"])
        return no_room(1, 0, local, seconds, LONGEST)

    def _needs(self, at: At) -> Any:
        return at.plan, at["host"], at["bandwidth"]

    def _hint(self, at: At) -> str:
        said = f"“Run it” trains {self.steps} steps on {processes(at['ranks'])}"
        if "nvme" not in (at["parameters"], at["optimizer"]):
            return f"{said}, without the disk."
        if at.cluster.disk is not None and at["bandwidth"] > at.cluster.disk.bandwidth:
            return f"{said}; the disk stays as slow as it is."
        return f"{said}, with a disk held down to {in_speed(at['bandwidth'])}."

    def _foreseen(self, at: At) -> Foreseen:
        """What is predicted for any disk; kept, so that its slider costs next to nothing."""
        make = lambda: Foreseen(at.model, at.plan, at.cluster)  # noqa: E731
        return self._once(("foreseen", at.plan, at["host"]), 0, make)

    def _points(self, at: At, run: Tables) -> list[Point]:
        return self._once(("points", id(run)), 0, lambda: points(run, self._foreseen(at)))

    def _charts(self, at: At) -> list[Chart]:
        """The curves, and all that was run with these settings, on whatever disk."""
        mine = self._needs(at)[:-1]
        runs = [run for needs, run in list(self._results.items()) if needs[:-1] == mine]
        every = [point for run in runs for point in self._points(at, run)]
        if at["host"] > self._own(at).host.bandwidth:  # the wall clock knows no such link
            every = [point for point in every if point.clock != "measured"]
        return [chart(self._foreseen(at), at["bandwidth"], SHARE, every)]

    def _rows(self, at: At) -> list[dict[str, str]]:
        """A column for each formula and clock."""
        foreseen, disk = self._foreseen(at), at["bandwidth"]
        shares = {name: foreseen.share(name, disk) for name in (*FORMULAS, "predicted")}
        seconds = {name: foreseen.work / share for name, share in shares.items()}
        for point in () if at.found is None else self._points(at, at.found):
            shares[point.clock], seconds[point.clock] = point.share, point.seconds
        head = f"disk of {in_speed(disk)}"
        return [
            {head: "device computes", **{name: percent(s) for name, s in shares.items()}},
            {head: "time per step", **{name: f"{s * 1e3:.1f} ms" for name, s in seconds.items()}},
        ]

    def _done(self, at: At) -> str:
        replayed, measured = self._points(at, at.found)
        expect = self._foreseen(at).share("predicted", at["bandwidth"])
        said = f"replayed on these links the device computes {percent(replayed.share)} of a step"
        return f"{said}, predicted {percent(expect)}; by the wall clock {percent(measured.share)}"
