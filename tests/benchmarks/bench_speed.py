"""How long it takes to compile, interpret and draw a plan, each apart, beside what is asked.

    laptop     8 blocks, 8 micro-batches, 4 ranks: compile, and all four interpreters
    explorer   a move of a slider, median of sixteen, on a trillion parameters

Processor seconds of one process that has nothing else to do; the "peer" is the bar. What is held:
claims.py.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import paralab as pl
from paralab.interpret.memory import memory
from paralab.interpret.time import time as timed
from paralab.interpret.traffic import Calls, Member
from paralab.programs.compile import compiled

LAPTOP = pl.ModelSpec(layers=8, hidden=256, heads=8, seq_len=128)
LINK = pl.Link(alpha=2e-4, bandwidth=1e9)
HERE = pl.Cluster(name="stated", devices_per_node=16, flops=1e11, memory_bandwidth=2e10,
                  op_overhead=1e-5, intra=LINK, cores=2)  # fmt: skip
PLANS = {
    "1F1B": pl.Plan(pp=4, microbatches=8),
    "ZeRO-3": pl.Plan(dp=4, zero_stage=3, microbatches=8),
    "tp=2, pp=2": pl.Plan(tp=2, pp=2, microbatches=8),
}
LARGE = pl.Plan(pp=64, tp=8, dp=6, microbatches=512, microbatch_size=1, precision="bf16",
                recompute="full")  # fmt: skip


def seconds(work: Callable[[], Any], times: int = 9) -> tuple[float, Any]:
    """Median processor seconds, and what the last call returned."""
    found, spent = None, []
    for _ in range(times):
        began = time.process_time()
        found = work()
        spent.append(time.process_time() - began)
    return statistics.median(spent), found


def calls_of(program: Any, rank: int) -> list:
    member, calls, pp = Member(program, rank), Calls(program), program.plan.place(rank).pp
    return [member.row(call) for ins in program.codes[pp] for call in calls.of(pp, ins)]


def laptop(name: str, plan: pl.Plan) -> dict:
    compiling, program = seconds(lambda: compiled(LAPTOP, plan))
    parts = {"compile": compiling}
    parts["time"], _ = seconds(lambda: timed(program, HERE))
    parts["memory"], _ = seconds(lambda: [memory(program, pp) for pp in range(plan.pp)])
    ranks = range(plan.world_size)
    parts["traffic"], _ = seconds(lambda: [calls_of(program, rank) for rank in ranks])
    tables, report = seconds(lambda: pl.predict(LAPTOP, plan, HERE, steps=1))
    drawing, _ = seconds(lambda: (report.timeline(), report.memory_chart()), 3)
    said = ", ".join(f"{what} {1e3 * some:.1f}" for what, some in parts.items())
    note = f"ms: {said}; with the report's tables {1e3 * tables:.1f}, drawn {1e3 * drawing:.0f}"
    return _row(f"laptop plan, {name}", sum(parts.values()), 0.025, note)


def explorer() -> dict:
    a100 = pl.Cluster.preset("dgx-a100", nodes=384)
    bench = pl.explore(pl.ModelSpec.preset("ptdp-1t"), LARGE, a100)
    moves = itertools.cycle(("none", "full"))

    def move() -> None:
        bench.knobs["recompute"].value = next(moves)

    seconds(move, 2)  # the first of each is not counted
    spent, _ = seconds(move, 16)
    bench.close()
    return _row("explorer's move, 10^12 parameters", spent, 0.150, "median of sixteen")


def measure() -> list[dict]:
    return [*(laptop(name, plan) for name, plan in PLANS.items()), explorer()]


def _row(name: str, spent: float, bar: float, note: str) -> dict:
    return {"name": name, "peer": "what is asked", "paralab_s": spent, "peer_s": bar,
            "ratio": spent / bar, "note": f"processor seconds; {note}"}  # fmt: skip
