"""How long it takes to compile, interpret and draw a plan, each apart, beside what is asked.

    laptop     8 blocks, 8 micro-batches, 4 ranks: compile, and all four interpreters
    explorer   a move of a slider, median of sixteen, on laptop models and on a trillion parameters
    search     39.1 B parameters on 64 devices
    dry run    one rank of a trillion parameters

Processor seconds of one process that has nothing else to do; the "peer" is the bar.
"""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import paralab as pl
from paralab.interpret.memory import memory
from paralab.interpret.time import time as timed
from paralab.interpret.traffic import rows
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
TRILLION = pl.ModelSpec.preset("ptdp-1t")
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


def laptop(name: str, plan: pl.Plan) -> dict:
    compiling, program = seconds(lambda: compiled(LAPTOP, plan))
    parts = {"compile": compiling}
    parts["time"], _ = seconds(lambda: timed(program, HERE))
    parts["memory"], _ = seconds(lambda: [memory(program, pp) for pp in range(plan.pp)])
    ranks = range(plan.world_size)
    parts["traffic"], _ = seconds(lambda: [list(rows(program, rank)) for rank in ranks])
    tables, report = seconds(lambda: pl.predict(LAPTOP, plan, HERE, steps=1))
    drawing, _ = seconds(lambda: (report.timeline(), report.memory_chart()), 3)
    said = ", ".join(f"{what} {1e3 * some:.1f}" for what, some in parts.items())
    note = f"ms: {said}; with the report's tables {1e3 * tables:.1f}, drawn {1e3 * drawing:.0f}"
    return _row(f"laptop plan, {name}", sum(parts.values()), 0.025, note)


def explorer(name: str, bench: Any, knobs: dict[str, tuple], bar: float) -> dict:
    """A move of one slider after the other; the first of each is not counted."""
    spent = []
    moves = itertools.islice(itertools.cycle(itertools.product(knobs, (0, 1))), 18)
    for knob, at in moves:
        began = time.process_time()
        bench.knobs[knob].value = knobs[knob][at]
        spent.append(time.process_time() - began)
    bench.close()
    note = f"fastest {1e3 * min(spent[2:]):.0f} ms, slowest {1e3 * max(spent[2:]):.0f} ms"
    return _row(f"explorer's move, {name}", statistics.median(spent[2:]), bar, note)


def measure() -> list[dict]:
    warnings.simplefilter("ignore")
    made = [laptop(name, plan) for name, plan in PLANS.items()]
    small = pl.explore(LAPTOP, pl.Plan(dp=2, pp=2, microbatches=8), HERE)
    knobs = {"microbatches": (4, 8), "zero_stage": (1, 0), "recompute": ("full", "none")}
    made.append(explorer("laptop", small, knobs, 0.070))
    a100 = pl.Cluster.preset("dgx-a100", nodes=384)
    large = pl.explore(TRILLION, LARGE, a100)
    made.append(explorer("10^12 parameters", large, {"recompute": ("none", "full")}, 0.150))
    model = pl.ModelSpec.preset("ptdp-39b")
    nodes = pl.Cluster.preset("dgx-a100", nodes=8)
    spent, _ = seconds(
        lambda: pl.plan_search(model, nodes, global_batch=128, precision="bf16"), times=3
    )
    made.append(_row("search, 39.1 B on 64 devices", spent, 0.8, "median of three"))
    spent, _ = seconds(lambda: pl.dry_run(TRILLION, LARGE, rank=1536, cluster=a100), times=3)
    made.append(_row("dry run, one rank of 10^12 parameters", spent, 2.0, "median of three"))
    return made


def _row(name: str, spent: float, bar: float, note: str) -> dict:
    return {"name": name, "peer": "what is asked", "paralab_s": spent, "peer_s": bar,
            "ratio": spent / bar, "note": f"processor seconds; {note}"}  # fmt: skip


if __name__ == "__main__":
    for r in measure():
        print(f"{r['name']}: {1e3 * r['paralab_s']:.1f} ms, asked {1e3 * r['peer_s']:.0f}  "
              f"{r['note']}")  # fmt: skip
