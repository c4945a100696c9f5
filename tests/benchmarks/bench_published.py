"""How far predictions are from iterations that others measured on A100s.

    python tests/benchmarks/bench_published.py

published.csv has the rows: 88 of 3.6, 18.4 and 39.1 B parameters on 64 to 512 GPUs, and 300 of
models of 24 layers and fewer inside one node. Their authors used Megatron-DeepSpeed, and say in
their repository: every block recomputed, 1F1B, no buckets, nodes of eight with 800 Gbit/s between
them, which is four ports. DeepSpeed's pipeline engine sends each tp rank's part of a message
(deepspeed/runtime/pipe/engine.py, `is_pipe_partitioned`). Assumed here: 16 bits, dropout 0.1,
vocabulary 51200.

Every error is out of sample. A cluster is fitted (`pl.fit_cluster`) from what data sheets and other
measurements say (`STATED`), and the rows that are predicted are left out: a model's
size of those on several nodes; of those inside one node a hidden size, in turn. The preset itself
has two figures that were fitted to these rows, so its errors are given on PTD-P's table 1 and on
Korthikanti's table 5, which no figure was fitted to. The null model is one rate of FLOP/s per GPU
for everything.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import paralab as pl
from paralab.interpret.totals import Totals
from paralab.theory.fit_cluster import Run, summary
from paralab.theory.needs import step_flops
from paralab.theory.papers import korthikanti, ptdp

PRESET = pl.Cluster.preset("dgx-a100", nodes=64).replace(ports=4)
# Without what was fitted to these rows: 80 % of the memory's bandwidth, 10 us for a launch.
STATED = PRESET.replace(
    memory_bandwidth=0.8 * 2039e9, operand_bandwidth=0.8 * 2039e9, launch_overhead=10e-6
)


class Setting(NamedTuple):
    """How a row of Korthikanti's table 5 was split: table 3, and the text of sec. 6 for ``chunks``
    per rank.
    """

    row: korthikanti.Measured
    tp: int
    pp: int
    micro: int
    chunks: int

    @property
    def model(self) -> pl.ModelSpec:
        return self.row.model


SPLITS = (8, 1, 4, 1), (8, 8, 1, 3), (8, 35, 1, 3), (8, 64, 1, 1)
SETTINGS = {
    row.name: Setting(row, *split)
    for row, split in zip(korthikanti.TABLE_5[:4], SPLITS, strict=True)
}


@cache
def rows(where: str) -> tuple[Run, ...]:
    """The runs on several "nodes", or inside one "node"."""
    lines = Path(__file__).with_name("published.csv").read_text().splitlines()
    found = csv.DictReader(line for line in lines if not line.startswith("#"))
    return tuple(_run(row) for row in found if row["where"] == where)


def _run(row: dict[str, str]) -> Run:
    size = {name: int(row[name]) for name in ("hidden", "heads", "layers", "seq_len")}
    cut = {name: int(row[name]) for name in ("microbatch_size", "tp", "dp", "pp")}
    model = pl.ModelSpec(**size, vocab=51200, dropout=0.1, attention="explicit")
    plan = pl.Plan(
        **cut,
        microbatches=int(row["batch"]) // (cut["dp"] * cut["microbatch_size"]),
        recompute="full",
        precision="fp16",
        grad_sync="bucketed",
        bucket_bytes=2**40,
        partition_messages=min(cut["tp"], cut["pp"]) > 1,
    )
    return Run(model, plan, float(row["milliseconds"]) / 1e3)


def papers() -> dict[str, list[Run]]:
    """The rows of papers that nothing was fitted to, by the paper; dropout as they had it."""
    table_1 = []
    for row in ptdp.TABLE_1:
        flops = step_flops(row.model, row.plan.global_batch, recompute="full")
        seconds = flops / (row.plan.world_size * row.tflops * 1e12)
        table_1.append(Run(row.model.replace(dropout=0.1), row.plan, seconds))
    table_5 = []
    for at in SETTINGS.values():
        for full, seconds in ((True, at.row.full), (False, at.row.present)):
            plan = pl.Plan(
                tp=at.tp,
                pp=at.pp,
                microbatches=at.row.batch // at.micro,
                microbatch_size=at.micro,
                virtual_stages=at.chunks,
                schedule="interleaved" if at.chunks > 1 else "1f1b",
                recompute="full" if full else "selective",
                sequence_parallel=not full,
                precision="fp16",
            )
            table_5.append(Run(at.model, plan, seconds))
    return {"PTD-P, table 1": table_1, "Korthikanti+, table 5": table_5}


def seconds(run: Run, cluster: pl.Cluster) -> float:
    nodes = -(-run.plan.world_size // cluster.devices_per_node)
    return Totals(run.model, run.plan, cluster.replace(nodes=nodes), "adamw").seconds()


def errors(runs: Sequence[Run], cluster: pl.Cluster) -> list[float]:
    """Relative, of every run: above zero where the prediction is too slow."""
    return [seconds(run, cluster) / run.seconds - 1 for run in runs]


def one_rate(runs: Sequence[Run], rate: float) -> list[float]:
    """The errors of so many FLOP/s per GPU, whatever the plan."""
    found = []
    for model, plan, took, _ in runs:
        flops = step_flops(model, plan.global_batch, recompute=plan.recompute)
        found.append(flops / plan.world_size / rate / took - 1)
    return found


def main() -> None:
    for name, runs in papers().items():
        found = errors(runs, PRESET.replace(ports=None))
        print(f"{name}, preset: {summary(found)}")
        print("   ", " ".join(f"{100 * one:+.1f}" for one in found))
        print(f"    146 TFLOP/s for everything: {summary(one_rate(runs, 146e12))}")
    for where, by in (("nodes", None), ("node", lambda run: run.model.hidden)):
        runs = rows(where)
        print(f"{where}, preset (two of its figures fitted to these rows): ", end="")
        print(summary(errors(runs, PRESET)))
        fit = pl.fit_cluster(runs, STATED, by=by)
        print(f"{where}, fitted: {fit!r}")
        for group in dict.fromkeys(run.model.hidden for run in runs):
            some = [e for e, run in zip(fit.errors, runs, strict=True) if run.model.hidden == group]
            print(f"    hidden {group}: {summary(some)}")
        for run, off in zip(runs, fit.errors, strict=True):
            if abs(off) > 0.35 or run.plan.tp == 16:
                plan = run.plan
                print(
                    f"    {100 * off:+.1f} %  hidden={run.model.hidden} dp={plan.dp} tp={plan.tp} "
                    f"pp={plan.pp} micro-batch {plan.microbatch_size}: {run.seconds:.2f} s"
                )


if __name__ == "__main__":
    main()
