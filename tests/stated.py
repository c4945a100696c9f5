"""A small model, machines whose numbers are stated, and predictions that pass for measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import paralab as pl

MODEL = pl.ModelSpec(layers=2, hidden=40, heads=4, seq_len=24, vocab=257)  # 3 divides no size of it
FORMS = ("naive", "bucketed", "overlapped")
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")
FREE = pl.Link(alpha=0.0, bandwidth=1e30)
LINK = pl.Link(alpha=1e-5, bandwidth=1e9)
NODES = pl.Cluster(
    flops=1e12, memory_bandwidth=1e11, intra=LINK, inter=pl.Link(alpha=1e-3, bandwidth=1e8)
)
# With a host and a disk that a plan can offload to.
TIERS = pl.Cluster(flops=1e11, memory_bandwidth=3e10, devices_per_node=16, intra=LINK, host=LINK,
                   disk=LINK, host_bandwidth=1e10)  # fmt: skip


def cluster(**changes: Any) -> pl.Cluster:
    """A machine of 64 devices, on whose links a message takes longer than its compute."""
    settings = {
        "name": "stated",
        "devices_per_node": 64,
        "flops": 1e11,
        "memory_bandwidth": 3e10,
        "op_overhead": 5e-6,
        "intra": pl.Link(alpha=3e-4, bandwidth=1e9),
        "inter": pl.Link(alpha=1e-3, bandwidth=1e8),
    }
    return pl.Cluster(**{**settings, **changes})


def plan_of(schedule: Any, pp: int = 2, microbatches: int = 4, **settings: Any) -> pl.Plan:
    """A pipeline; two stages per rank if they are interleaved."""
    v = 2 if schedule == "interleaved" else 1
    return pl.Plan(
        pp=pp, schedule=schedule, microbatches=microbatches, virtual_stages=v, **settings
    )


def mixed(pp: int, microbatches: int) -> list[str]:
    """1F1B whose last backward alone is made in halves."""
    last, lists = microbatches - 1, plan_of("1f1b", pp, microbatches).actions()
    texts = [" ".join(map(str, rank)) for rank in lists]
    return [f"{t.replace(f'B{last}', f'I{last}')} {r}W{last}" for r, t in enumerate(texts)]


def as_measured(
    report: pl.Report,
    *,
    wall: float = 1.0,
    cost: float = 1.0,
    cores: int = 2,
    idle: float = 0.0,
    beside: float = 0.0,
    nodes: Sequence[int] = (),
) -> pl.Report:
    """What a machine would have measured whose wall clock runs ``wall`` times slower.

    cost  of every computation over the predicted;  idle  seconds outside spans in every step;
    beside  processor seconds of each rank's other threads in every step;  nodes  of the ranks
    """
    tables = {}
    for name in ("spans", "collectives", "steps"):
        table = getattr(report, name)
        shift = table["step"] * idle
        tables[name] = table.assign(
            start=table["start"] * wall + shift, end=table["end"] * wall + shift
        )
    tables["steps"]["end"] += idle
    tables["steps"]["beside"] = beside
    tables["spans"]["cost"] *= cost
    meta = {"cores": cores, "optimizer": "adamw", "device": "cpu", "nodes": list(nodes)}
    return dataclasses.replace(
        report, clock="measured", cluster=None, memory=None, meta=meta, **tables
    )
