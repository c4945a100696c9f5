"""Count on the ranks' connections what calls, training steps and foreign programs really move.

    python tests/wire_witness.py    prints a JSON object of
        table       what `witness` says of torch's own reduce-scatter and of paralab's
        calls       {name: {ledger, kernel, payload}} in bytes, group totals, on 4 ranks
        steps       the same of training steps, on 4 and on 8 ranks
        programs    {name: [{"op phase": recorded bytes}, the kernel's]} of foreign_programs.py

Each is counted as often as `witness` counts a call.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from typing import Any

import cloudpickle

import foreign_programs
import paralab as pl
from foreign_programs import PROGRAMS
from paralab.instruments import witness
from paralab.theory.traffic import BOOKKEEPING

cloudpickle.register_pickle_by_value(foreign_programs)
PAYLOAD = 2 * 2**20  # bytes: overhead of a few kB per call is then far below 1 %
OPS = [op for op in witness.OPS if op != witness.NATIVE]
MODEL = pl.ModelSpec(layers=2, hidden=256, heads=4, seq_len=16)
# Messages of 150 kB and more, the norms' and the loss's few numbers per token aside.
WIDE = pl.ModelSpec(layers=1, hidden=512, heads=8, seq_len=128)
MODES = {4: ({}, {"sequence_parallel": True}, {"tp_mode": "2d"}),
         8: ({"tp_mode": "2.5d"}, {"tp_mode": "3d"})}  # fmt: skip


def steps_of(n: int) -> dict[str, tuple[pl.ModelSpec, pl.Plan]]:
    """Training steps to count on n ranks."""
    zero = pl.Plan(dp=n, microbatch_size=1, bucket_bytes=2**20)
    stages = range(4) if n == 4 else ()
    found = {f"ZeRO stage {stage}": (MODEL, zero.replace(zero_stage=stage)) for stage in stages}
    for mode in MODES[n]:
        plan = pl.Plan(tp=n, microbatch_size=4, **mode)
        found[f"tensor parallel {mode}"] = WIDE, plan
    if n == 4:  # messages of 2 MiB between stages
        plan = pl.Plan(pp=n, microbatches=2, microbatch_size=8)
        found["pipeline"] = WIDE.replace(layers=n), plan
    return found


def calls_and_steps(context: Any, gate: witness.Gate, ops: list[str]) -> list[int]:
    """Each op between gates, then training steps; this rank's ledger bytes of each."""
    from paralab.comm import everyone
    from paralab.interpret.train import Trainer

    group = everyone(context)
    recorder = group.recorder
    calls = [witness.one_call(group, op, PAYLOAD) for op in ops]
    sent = [witness.repeated(call, gate, recorder) for call in calls]
    for model, plan in steps_of(context.world_size).values():
        trainer = Trainer(context, model, plan, recorder=recorder)
        sent.append(witness.repeated(functools.partial(trainer.step, 0), gate, recorder))
    return sent


def programs(context: Any, gate: witness.Gate) -> list[dict[str, int]]:
    """Steps of each program between gates; this rank's recorded bytes of one step of each."""
    from paralab.observing import _observed

    sent = []
    for make in PROGRAMS.values():
        with _observed(context, {"marked": True, "memory_steps": 0}) as observer:
            step = make(context.world_size)
            for number in range(2 + witness.REPEATS):
                step()
                observer.end_step()
                if number:
                    gate()
            calls = observer.part()["collectives"]
        rows = zip(*(calls[c] for c in ("step", "op", "phase", "wire_bytes")), strict=True)
        last, found = max(calls["step"]), Counter()
        for at, op, phase, size in rows:
            if at == last and phase not in BOOKKEEPING and size:
                found[f"{op} {phase}"] += size
        sent.append(dict(found))
    return sent


def counted(program: Any, ranks: int, names: list[str], *args: Any) -> list[tuple]:
    """Of each name what every rank says, and the kernel's bytes."""
    parts, counts = witness.between_gates(program, ranks, args)
    return [
        (name, [part[i] for part in parts], min(witness.per_call(counts, i)))
        for i, name in enumerate(names)
    ]


def main() -> None:
    table = witness.witness(4, ("reduce_scatter", witness.NATIVE), nbytes=2 * 2**20)
    found: dict[str, Any] = {"calls": {}, "steps": {}, "programs": {}}
    for ranks, ops in ((4, OPS), (8, [])):
        names = [*ops, *steps_of(ranks)]
        for name, said, kernel in counted(calls_and_steps, ranks, names, ops):
            kind = found["calls" if name in ops else "steps"]
            kind[name] = {"ledger": sum(said), "kernel": kernel, "payload": PAYLOAD}
    for name, said, kernel in counted(programs, 3, list(PROGRAMS)):
        total: Counter[str] = Counter()
        for one in said:
            total.update(one)
        found["programs"][name] = [total, kernel]
    print(json.dumps({**found, "table": json.loads(table.to_json())}))


if __name__ == "__main__":
    main()
