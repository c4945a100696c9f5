"""What the core predicted, held and trained before it was rewritten, frozen as data.

`plans.json.gz` has legal plans, each with the messages, the copies, the bytes and the step time
that belong to it. It was written once, by the core that it describes, which is gone. A new core is
held against it, so it is data to keep.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paralab as pl

FOLDER = Path(__file__).parent
PLANS = FOLDER / "plans.json.gz"

# Nodes of two devices: a plan's groups are inside a node, or reach over two, or over four. The five
# links differ in both numbers, so that no time can come from the wrong one.
MACHINE = pl.Cluster(
    name="oracles",
    nodes=4,
    devices_per_node=2,
    flops=1e11,
    memory_bandwidth=3e10,
    op_overhead=1e-6,
    intra=pl.Link(alpha=1e-5, bandwidth=4e9),
    inter=pl.Link(alpha=5e-5, bandwidth=1e9),
    host=pl.Link(alpha=2e-5, bandwidth=2e9),
    disk=pl.Link(alpha=1e-4, bandwidth=5e8),
    host_bandwidth=1e10,
)

Call = tuple[str, str, str, int, int, str, int, tuple[int, ...]]
Copy = tuple[str, str, str, int]


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """One plan and what the old core said of one step of it.

    name       what is not plain in a plan of `pairwise.py`, or a drawn plan's number
    source     "pairwise" or "drawn"
    clip_norm  what the dry runs were told besides; predictions do not know of it
    calls      of every rank (op, axis, phase, payload_bytes, wire_bytes, level, peer, ranks) of
               each message in launch order, without the phases "control" and "setup"
    copies     of every rank (lane, op, category, bytes) of each copy between tiers, in order
    memory     {rank: its bytes in a dry run on fake tensors} of the first rank and the last
    step_time  seconds on MACHINE
    """

    name: str
    source: str
    model: pl.ModelSpec
    plan: pl.Plan
    clip_norm: float | None
    optimizer: str
    calls: list[list[Call]]
    copies: list[list[Copy]]
    memory: dict[int, dict[str, Any]]
    step_time: float


def load() -> list[Oracle]:
    """All frozen plans, those of `pairwise.py` first."""
    return [_oracle(entry) for entry in json.loads(gzip.decompress(PLANS.read_bytes()))]


def unfolded(table: list[list[Any]], rows: list[list[int]]) -> list[list[tuple[Any, ...]]]:
    """Of every rank its rows, each of which was kept as a number in a table of distinct ones."""
    made = [tuple(tuple(x) if isinstance(x, list) else x for x in row) for row in table]
    return [[made[number] for number in rank] for rank in rows]


def _oracle(entry: dict[str, Any]) -> Oracle:
    calls = unfolded(entry["calls"], entry["rows"])
    copies = unfolded(entry["moves"], entry["copies"])
    return Oracle(
        name=entry["name"],
        source=entry["source"],
        model=pl.ModelSpec(**entry["model"]),
        plan=pl.Plan(**entry["plan"]),
        clip_norm=entry["clip_norm"],
        optimizer=entry["optimizer"],
        calls=calls,
        copies=copies,
        memory={int(rank): held for rank, held in entry["memory"].items()},
        step_time=entry["step_time"],
    )
