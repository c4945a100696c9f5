"""A step that offloads, foreseen for a disk of any bandwidth; and what runs of it gave.

Two formulas and a prediction of the share of a step in which the device computes:

    no overlap       compute / (compute + bytes / bandwidth), ZeRO-Infinity's formula (Rajbhandari+
                     2021, arXiv:2104.07857, eq. 6), with the bytes that files are read and written
    perfect overlap  compute / max(compute, bytes / bandwidth)
    predicted        the step of `predict`, which has also the host's link, its processor, latencies
                     and messages, and an order in which things can be done

Compute is forward and backward of a device that waits for nothing. offload_curves.py draws them.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import NamedTuple

from paralab.checks import illegal
from paralab.interpret.predict import predict
from paralab.interpret.time import time
from paralab.programs.compile import compiled
from paralab.report import metrics
from paralab.report.tables import Tables
from paralab.spec import Cluster, Link, ModelSpec, Plan
from paralab.theory.flops import forward_flops
from paralab.theory.offload import link_bytes
from paralab.theory.offload_costs import bandwidth_needed, efficiency, efficiency_overlapped
from paralab.view import naming

SLOWEST, FASTEST = 50e6, 10e9  # bytes/s: an old hard disk, a fast NVMe
LATENCY = 1e-4  # seconds, of a disk that a cluster does not state
FORMULAS = {"no overlap": efficiency, "perfect overlap": efficiency_overlapped}


class Foreseen:
    """A step of a plan that offloads, as `predict` has it, for a disk of any bandwidth.

    own    bytes/s of the cluster's disk; None: it does not state one
    work   seconds in which a device computes forward and backward
    flops  of them; with ``peak`` a second
    moved  {link: {category: bytes}} of a device and step; ``on_disk`` those of files

    Ranks do alike, so one stands for all, and the disk's speed changes nothing but how long its
    copies take: a bandwidth more costs a walk through the program. The plan's own limit of it is
    left out.
    """

    def __init__(self, model: ModelSpec, plan: Plan, cluster: Cluster) -> None:
        if plan.tiers is None or plan.pp * plan.tp > 1:
            why = "these curves are of data-parallel training that offloads"
            legal = "pl.Plan(zero_stage=3, offload='nvme', ...), tp=1, pp=1"
            raise illegal("plan", naming.plan_name(plan), why, legal)
        self.disk = cluster.disk or Link(alpha=LATENCY, bandwidth=FASTEST)
        self.plan, self.cluster = plan, cluster.replace(disk=self.disk)
        limits = {link: most for link, most in plan.tiers.limits.items() if link != "disk"}
        free = plan.replace(offload=plan.tiers.replace(bandwidth=limits))
        expect = predict(model, free, self.cluster, steps=1)
        self.work, model = metrics.shares(expect, 0)["work"], expect.model
        self._program = compiled(model, free)
        self.own = None if cluster.disk is None else cluster.disk.bandwidth
        own = [] if self.own is None else [self.own]
        self.ends = (min([SLOWEST, *own]), max([FASTEST, *own]))
        passes = 4 if plan.recompute == "full" else 3  # backward counts twice
        self.flops = passes * plan.microbatches * forward_flops(model, plan.microbatch_size)
        self.peak, self.moved = self.flops / self.work, link_bytes(model, plan)
        self.on_disk = sum(sum(self.moved[f"disk {way}"].values()) for way in ("read", "write"))

    def seconds(self, bandwidth: float) -> float:
        """The predicted step's."""
        disk = self.disk.replace(bandwidth=bandwidth)
        return time(self._program, self.cluster.replace(disk=disk)).seconds

    def share(self, curve: str, bandwidth: float) -> float:
        """Of the step in which the device computes; "predicted", or one of `FORMULAS`."""
        if curve == "predicted":
            return self.work / self.seconds(bandwidth)
        return FORMULAS[curve](self.flops, self.on_disk, self.peak, bandwidth)

    def needed(self, share: float) -> float | None:
        """Bytes/s at which the formula without overlap gives ``share``; None: any will do."""
        if not self.on_disk:
            return None
        return bandwidth_needed(share, self.flops / self.on_disk, self.peak)

    @cached_property
    def curve(self) -> list[tuple[float, float]]:
        """[(bandwidth, predicted share)], three a decade."""
        low, high = self.ends
        inner = [m * 10.0**e for e in range(15) for m in (1, 2, 5) if low < m * 10.0**e < high]
        return [(b, self.share("predicted", b)) for b in (low, *inner, high)]

    @cached_property
    def most(self) -> float:
        """The predicted share where a file costs its latency alone."""
        return self.share("predicted", 1e18)

    def reaches(self, share: float) -> float | None:
        """About the bandwidth from which ``share`` is predicted; None: no disk is fast enough."""
        if self.most <= share:
            return None
        slow, less = self.curve[0]
        beyond = (self.ends[1] * 2.0**n for n in range(1, 30))
        for fast, more in chain(self.curve, ((b, self.share("predicted", b)) for b in beyond)):
            if more >= share:
                return slow * (fast / slow) ** ((share - less) / (more - less or 1.0))
            slow, less = fast, more
        return slow


class Point(NamedTuple):
    """What a run gave: on which clock, for which disk."""

    clock: str
    bandwidth: float
    share: float
    seconds: float


def points(run: Tables, foreseen: Foreseen) -> list[Point]:
    """A run's step, replayed on the disk that its plan's ``bandwidth`` asked for (default: the
    cluster's), and by the wall clock, for which no disk is faster than the machine's.
    """
    own = foreseen.own
    at = run.plan.tiers.limits.get("disk", own)
    if at is None:
        why = "neither the run's plan nor the cluster says how fast the disk is"
        raise illegal("offload['bandwidth']", {}, why, '{"disk": "500MB"}')
    disk = foreseen.disk.replace(bandwidth=at)
    replayed = run.replay(foreseen.cluster.replace(disk=disk))
    made = []
    for clock, x, report in (("replayed", at, replayed), ("measured", min(at, own or at), run)):
        work = metrics.shares(report, metrics.typical_step(report))["work"]
        made.append(Point(clock, x, work / report.step_time, report.step_time))
    return made
