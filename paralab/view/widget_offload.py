"""Offload with sliders: how fast an NVMe do I need?

Two pictures follow the sliders: a step on a time axis, with the copies on every link, and the time
of that step over the bandwidth of the disk, predicted and by ZeRO-Infinity's formula (Rajbhandari+
2021, arXiv:2104.07857, eq. 6), without any overlap and with full overlap:

    no overlap     compute + bytes / bandwidth, with the bytes read from files and written
    full overlap   max(compute, bytes / bandwidth)

The formula has only the device and the disk. What the host computes comes on top, so with a fast
disk the prediction is above both.

“Run it” trains on real processes with states on the host and in files, on links that are limited to
the speeds of the sliders. The step then has the replay of that run below the prediction.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from paralab.interpret.predict import check_cluster, predict
from paralab.interpret.time import time
from paralab.programs.compile import compiled
from paralab.report import metrics
from paralab.report.tables import Tables
from paralab.spec import Cluster, Link, ModelSpec, Plan
from paralab.theory.offload import link_bytes
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.links import Axes, algorithms
from paralab.view.marks.curves import drop, rings
from paralab.view.theme import in_speed
from paralab.view.widget import At
from paralab.view.widget_parts import buttons, no_room, processes, slider, this_machine
from paralab.view.widget_steps import Steps, share_of_step, step_time

DISKS = (5e7, 7e7, *(m * 10.0**e for e in (8, 9) for m in (1, 1.5, 2, 3, 5, 7)), 1e10)
HOSTS = tuple(m * 10.0**e for e in (8, 9, 10) for m in (1, 3))  # 100 MB/s to 30 GB/s
LATENCY = 1e-4  # seconds, of the disk, if the cluster states none
PLACES = {"host memory": "cpu", "files": "nvme"}
EACH, ONCE = "read for every forward and every backward", "read and written once per step"
SHARE = 0.9  # the title says which bandwidth lets the device compute for this share of a step
AXES = Axes("bandwidth of the disk", "B/s", "step time", "s", "is fastest")


class Offload(Steps):
    """Knobs: disk, link to the host, micro-batch size and count, places of parameters and optimizer
    states, devices. Gradients are always on the host (ZeRO-3). Training is in fp32, as 16 bits are
    slow on most processors.

    model    what is trained; default: 4 layers of width 256
    cluster  what is predicted and replayed on; default: this machine

    ``chart`` is the step, ``charts`` are the step and its time over the disk's bandwidth.
    """

    name, steps, longest, drawn = "offload", 3, 60.0, (1, 1)
    model = ModelSpec(layers=4, hidden=256, heads=8, seq_len=64)
    plan = Plan(zero_stage=3, offload="cpu", microbatch_size=8)
    board = {
        # If the cluster states no disk, the slider starts with 1 GB/s.
        "bandwidth": slider("disk", DISKS, in_speed, start=10**9, link=lambda c: c.disk),
        "host": slider("host link", HOSTS, in_speed, link=lambda c: c.host),
        "microbatch_size": slider("micro-batch", (1, 2, 4, 8, 16, 32), "sample"),
        "microbatches": slider("micro-batches", (1, 2, 4, 8), "micro-batch"),
        "parameters": buttons("parameters", PLACES, start="nvme", tip=EACH),
        "optimizer": buttons("optimizer", PLACES, start="nvme", tip=ONCE),
        "ranks": slider("devices", (1, 2, 4), "device", sets="dp"),
    }
    columns = {
        "time per step": step_time,
        "device computes": partial(share_of_step, part="work"),
    }

    def __init__(self, model: ModelSpec | None = None, cluster: Cluster | None = None) -> None:
        super().__init__(model, None, cluster)

    def _check(self) -> None:
        check_cluster(self.plan, self._machine(1))

    def _plan(self, at: At, **limits: int) -> Plan:
        """The plan; ``limits``: {link: bytes/s} to which a run slows its links down."""
        places = {name: at[name] for name in ("parameters", "optimizer")}
        offload = {**places, "gradients": "cpu", "bandwidth": limits}
        return super()._plan(at).replace(offload=offload)

    def _cluster(self, at: At) -> Cluster:
        """The cluster, with a disk and a host link as fast as the sliders say; latencies stay."""
        own = self._machine(at["ranks"])
        disk = own.disk or Link(alpha=LATENCY, bandwidth=at["bandwidth"])
        host = own.host.replace(bandwidth=at["host"])
        return own.replace(disk=disk.replace(bandwidth=at["bandwidth"]), host=host)

    def _measure(self, at: At, **how: Any) -> Tables:
        """Train with links that are no faster than the sliders say."""
        from paralab.experiment import run

        limits = {"disk": round(at["bandwidth"])}
        if at["host"] < self._machine(at["ranks"]).host.bandwidth:
            limits["h2d"] = limits["d2h"] = round(at["host"])
        return run(at.model, self._plan(at, **limits), steps=self.steps, **how)

    def _refused(self, at: At) -> str:
        """By a prediction for this machine, with a disk as fast as the slider says."""
        local = this_machine(at["ranks"])
        devices = max(local.devices_per_node, at["ranks"])
        local = local.replace(devices_per_node=devices, disk=at.cluster.disk)
        return no_room(predict(at.model, at.plan, local, steps=1), local, self.steps, self.longest)

    def _depends_on(self, at: At) -> Any:
        return at.plan, at["host"], at["bandwidth"]

    def _hint(self, at: At) -> str:
        how = f"{self.steps} steps on {processes(at['ranks'])}"
        return f"“Run it” trains {how}, with a disk and a host link no faster than the sliders say."

    # ---- what is shown -----------------------------------------------------------------------
    def _charts(self, at: At) -> list[Chart]:
        return [*super()._charts(at), self._over_disks(at)]

    def _parts(self, at: At) -> tuple[float, int]:
        """Seconds that a device computes in a step, and the bytes read from files and written."""
        links = link_bytes(at.model, at.plan)
        moved = sum(sum(links[f"disk {way}"].values()) for way in ("read", "write"))
        return metrics.shares(at.predicted, 0)["work"], moved

    def _seconds(self, at: At) -> dict[float, float]:
        """{each bandwidth of the disk's slider: predicted seconds of a step}. They are kept, so
        moving that slider costs next to nothing.
        """
        disks = [disk for _, disk in self._declared["bandwidth"].options]

        def compute() -> dict[float, float]:
            program = compiled(at.model, at.plan)
            return {disk: time(program, at.but(bandwidth=disk).cluster).seconds for disk in disks}

        return self._cached("over disks", (at.plan, at["host"]), compute)

    def _over_disks(self, at: At) -> Chart:
        (work, moved), disk, predicted = self._parts(at), at["bandwidth"], self._seconds(at)
        equal = moved / work  # the bandwidth at which copies take as long as compute
        corner = min(max(equal, min(predicted)), max(predicted))
        every = [*predicted, corner]
        curves = {
            "full overlap": {b: max(work, moved / b) for b in every},
            "predicted": predicted,
            "no overlap": {b: work + moved / b for b in every},
        }
        runs = {} if at.measured is None else {"this run": {disk: at.replayed.step_time}}
        busy = theme.share(work / predicted[disk])
        title = f"With a {in_speed(disk)} disk the device computes for {busy} of a step"
        if moved:  # SHARE = work / (work + moved / needed)
            needed = SHARE / (1 - SHARE) * moved / work
            title += f"; by the formula, {theme.percent(SHARE)} needs {in_speed(needed)}"
        chart = algorithms(curves, runs, title=title, axes=AXES)
        if moved:
            words = "ZeRO-Infinity, eq. 6, for the disk alone; predicted: all links, and the host"
            chart.said_below(f"full and no overlap: {words}")
        axes = chart.layout.xaxis, chart.layout.yaxis
        ends, (low, _) = (tuple(10**at for at in axis.range) for axis in axes)
        word, line = drop(disk, low, predicted[disk], in_speed(disk), ends)
        return chart.draw([rings("chosen", [(disk, predicted[disk])])], [word], [line])

    def _rows(self, at: At) -> list[dict[str, str]]:
        """A row for each of the formulas and each clock."""
        work, moved = self._parts(at)
        copy = moved / at["bandwidth"]
        formulas = {"no overlap": work + copy, "full overlap": max(work, copy)}
        rows = []
        for name, seconds in formulas.items():
            cells = f"formula, {name}", f"{seconds * 1e3:.1f} ms", f"{100 * work / seconds:.0f} %"
            rows.append(dict(zip(("clock", *self.columns), cells, strict=True)))
        return [*rows, *super()._rows(at)]
