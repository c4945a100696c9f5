"""Offload with sliders: how fast an NVMe do I need?

The picture follows the sliders (offload_curves.py): how busy the device is over the disk's
bandwidth, by ZeRO-Infinity's formula and as predicted, and what moves over each link.
«Run it» trains for real with states on the host and in files, its links held down to what the
sliders say; the replay of that run on such links, and the wall clock, are points of the picture
then. They stay: a few runs at several bandwidths give a curve of their own.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from paralab.interpret import quick
from paralab.interpret.predict import check_cluster
from paralab.report.report import Report
from paralab.spec import Cluster, Link, ModelSpec, Plan
from paralab.theory.offload import tier_bytes
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.disk_bandwidth import FASTEST, SLOWEST, Foreseen, Point, points
from paralab.view.offload_curves import SHARE, chart
from paralab.view.pipeline import percent
from paralab.view.widget_bench import Bench, Progress
from paralab.view.widget_parts import Knob, Sketch, given
from paralab.view.widget_shared import check_real, count, link_knob

RANKS = (1, 2, 4)
SAMPLES = (1, 2, 4, 8, 16, 32)
MICROBATCHES = (1, 2, 4, 8)
DISKS = (SLOWEST, 7e7, *(m * 10.0**e for e in (8, 9) for m in (1, 1.5, 2, 3, 5, 7)), FASTEST)
HOSTS = tuple(m * 10.0**e for e in (8, 9, 10) for m in (1, 3))  # 100 MB/s to 30 GB/s
UNSTATED = 10**9  # bytes/s, where the slider starts if the cluster has no disk
MODEL = ModelSpec(layers=4, hidden=256, heads=8, seq_len=64)
PLACES = (("host's memory", "cpu"), ("files", "nvme"))
STEPS = 3
LONGEST = 20.0  # seconds of a step that «Run it» takes on


class Offload(Bench):
    """Disk, link to the host, micro-batch size and count, where parameters and optimizer states
    lie, devices. Gradients lie on the host, whatever else is where (ZeRO-3). In fp32: 16 bits are
    slow on most processors, whatever moves.

    model    what is trained; default: 4 layers of width 256
    cluster  what is predicted and replayed on; default ``Cluster.local()``, this machine
    """

    name = "offload"

    def __init__(self, model: ModelSpec | None = None, cluster: Cluster | None = None) -> None:
        self.model = given("model", model, MODEL)
        self.cluster = given("cluster", cluster, Cluster.local)
        check_cluster(Plan(zero_stage=3, offload="cpu"), self.cluster)
        self._known: dict[Any, Foreseen] = {}
        self._points: dict[Any, list[Point]] = {}
        super().__init__(
            {
                "bandwidth": _disk_knob(self.cluster.disk),
                "host": replace(
                    link_knob(self.cluster.host, HOSTS),
                    label="host link",
                    tip="between device and host, each way",
                ),
                "microbatch_size": _slider("micro-batch", SAMPLES, 8, "sample"),
                "microbatches": _slider("micro-batches", MICROBATCHES, 1, "micro-batch", "es"),
                "parameters": Knob(
                    label="parameters",
                    options=PLACES,
                    value="nvme",
                    buttons=True,
                    tip="read for every forward and backward of every micro-batch",
                ),
                "optimizer": Knob(
                    label="optimizer",
                    options=PLACES,
                    value="nvme",
                    buttons=True,
                    tip="its states, read and written once in a step",
                ),
                "ranks": _slider(
                    "devices", tuple(n for n in RANKS if n <= self.cluster.num_devices), 1, "device"
                ),
            }
        )

    # ---- settings as descriptions --------------------------------------------------------------
    def plan_of(self, knobs: dict[str, Any], *, held: bool = False) -> Plan:
        """The plan that these settings mean; ``held``: links are no faster than the sliders."""
        limits = {"disk": round(knobs["bandwidth"])} if held else {}
        if held and knobs["host"] < self.cluster.host.bandwidth:
            limits["h2d"] = limits["d2h"] = round(knobs["host"])
        offload = {
            "parameters": knobs["parameters"],
            "gradients": "cpu",
            "optimizer": knobs["optimizer"],
            "bandwidth": limits,
        }
        return Plan(
            dp=knobs["ranks"],
            zero_stage=3,
            offload=offload,
            microbatches=knobs["microbatches"],
            microbatch_size=knobs["microbatch_size"],
        )

    def cluster_of(self, knobs: dict[str, Any]) -> Cluster:
        """The cluster with its link to the host at the chosen speed; latency stays."""
        return self.cluster.replace(host=self.cluster.host.replace(bandwidth=knobs["host"]))

    # ---- the bench ------------------------------------------------------------------------------
    def _steady(self, chart: Chart) -> Chart:
        return chart  # its axis is the slider's

    def _predict(self, knobs: dict[str, Any]) -> Sketch:
        return Sketch(chart=self._drawn(knobs), rows=self._rows(knobs))

    def _measure(
        self, knobs: dict[str, Any], *, stop: threading.Event, progress: Progress
    ) -> Report:
        from paralab.experiment import run

        plan, local = self.plan_of(knobs, held=True), Cluster.local()
        kept = [quick.peak(self.model, plan), tier_bytes(self.model, plan)["host"]]
        check_real(knobs["ranks"], sum(sum(parts.values()) for parts in kept), "devices")
        here = local.replace(devices_per_node=max(local.devices_per_node, plan.dp))
        seconds = Foreseen(self.model, plan, here).seconds(knobs["bandwidth"])
        if seconds > LONGEST:
            raise ValueError(
                f"a step would take about {seconds:,.0f} s on this machine with a disk of "
                f"{theme.scaled(knobs['bandwidth'], 'B/s')}: a faster disk, fewer samples or a "
                "smaller model would be done in seconds"
            )
        return run(self.model, plan, steps=STEPS, progress=progress, stop=stop)

    def _compare(self, knobs: dict[str, Any], found: Report) -> Sketch:
        replayed, measured = self._points_of(knobs, found)
        expect = self._foreseen(knobs).share("predicted", knobs["bandwidth"])
        said = (
            f"Done, {count(knobs['ranks'], 'real process', 'es')}: replayed on these links the "
            f"device computes {percent(replayed.share)} of a step, predicted "
            f"{percent(expect)}; by the wall clock {percent(measured.share)}."
        )
        return Sketch(chart=self._drawn(knobs), rows=self._rows(knobs, found), said=said)

    def _needs(self, knobs: dict[str, Any]) -> Any:
        return self.plan_of(knobs), knobs["host"], knobs["bandwidth"]

    def _hint(self, knobs: dict[str, Any]) -> str:
        said = f"«Run it» trains {STEPS} steps on {count(knobs['ranks'], 'real process', 'es')}"
        if "nvme" not in (knobs["parameters"], knobs["optimizer"]):
            return f"{said}, without the disk."
        disk = self.cluster.disk
        if disk is not None and knobs["bandwidth"] > disk.bandwidth:
            return f"{said}; the disk stays as slow as it is."
        return f"{said}, with a disk held down to {theme.scaled(knobs['bandwidth'], 'B/s')}."

    # ---- what is shown --------------------------------------------------------------------------
    def _foreseen(self, knobs: dict[str, Any]) -> Foreseen:
        """What is predicted, whatever the disk; kept, so that its slider costs next to nothing."""
        key = self.plan_of(knobs), knobs["host"]
        if key not in self._known:
            self._known[key] = Foreseen(self.model, key[0], self.cluster_of(knobs))
        return self._known[key]

    def _points_of(self, knobs: dict[str, Any], found: Report) -> list[Point]:
        key = found.meta["run_id"]
        if key not in self._points:
            self._points[key] = points(found, self._foreseen(knobs))
        return self._points[key]

    def _drawn(self, knobs: dict[str, Any]) -> Chart:
        """The curves, and all that was run with these settings, on whatever disk."""
        mine = self._needs(knobs)[:-1]
        runs = [found for needs, found in self._results.items() if needs[:-1] == mine]
        every = [point for found in runs for point in self._points_of(knobs, found)]
        if knobs["host"] > self.cluster.host.bandwidth:  # no clock on the wall had such a link
            every = [point for point in every if point.clock != "measured"]
        return chart(self._foreseen(knobs), knobs["bandwidth"], SHARE, every)

    def _rows(self, knobs: dict[str, Any], found: Report | None = None) -> list[dict[str, str]]:
        """A column for every formula and clock."""
        foreseen, at = self._foreseen(knobs), knobs["bandwidth"]
        shares = {
            name: foreseen.share(name, at)
            for name in ("no overlap", "perfect overlap", "predicted")
        }
        seconds = {name: foreseen.work / share for name, share in shares.items()}
        for point in [] if found is None else self._points_of(knobs, found):
            shares[point.clock], seconds[point.clock] = point.share, point.seconds
        head = f"disk of {theme.scaled(at, 'B/s')}"
        return [
            {head: "device computes", **{name: percent(s) for name, s in shares.items()}},
            {head: "time per step", **{name: f"{s * 1e3:.1f} ms" for name, s in seconds.items()}},
        ]


def _disk_knob(disk: Link | None) -> Knob:
    if disk is not None:
        return replace(link_knob(disk, DISKS), label="disk", brief={disk.bandwidth: "own disk"})
    return Knob(label="disk", value=UNSTATED, options=[(theme.scaled(b, "B/s"), b) for b in DISKS])


def _slider(label: str, usual: tuple[int, ...], value: int, what: str, plural: str = "s") -> Knob:
    return Knob(label=label, value=value, options=[(count(n, what, plural), n) for n in usual])
