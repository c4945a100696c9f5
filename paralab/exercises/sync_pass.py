"""Lab 02: the gradient sums of data parallelism as a pass, a function from a program to a program.

The program's own checks come first: they name a gradient that is not summed, or is summed twice or
too early. A program that they accept runs on real ranks. Its step is predicted on a stated cluster,
where only sums that overlap with backward keep the limit (Li+ 2020, arXiv:2006.15704, sec. 3.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paralab.exercises.ddp import CLUSTER as NETWORK
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.one_process import look_at_run
from paralab.exercises.sync import PADDING, RANKS
from paralab.exercises.unaided import bounded
from paralab.exercises.verdict import ms
from paralab.interpret.predict import predict
from paralab.programs.instructions import BACKWARD, COLLECTIVES, WAIT
from paralab.spec import ModelSpec, Plan
from paralab.theory.work import on_processor

if TYPE_CHECKING:
    from paralab.interpret.text import ProgramText

MODEL = ModelSpec.preset("laptop").replace(attention="explicit")  # the limits are of that step
BATCH = {"microbatches": 2, "microbatch_size": 2}
PLAN = Plan(dp=RANKS, grad_sync=None, bucket_bytes=512 * 1024, **BATCH)
OTHER = {"microbatches": 3, "bucket_bytes": 1024}  # of a second plan, which is not run
STEPS = 3
CLUSTER = NETWORK.replace(flops=60e9, elements=on_processor(60e9))
LIMIT_S = 37e-3  # sums behind backward take 42 ms, halves that wait for each other 40 ms

REQUIRED = {
    "program": "every gradient is summed once, when it is complete and before its UPDATE",
    "gradients": f"of the last of {STEPS} steps on {RANKS} ranks: those of one process",
    "weights": f"after {STEPS} steps of SGD: those of one process",
    "bytes per rank": "at most 2(N-1)/N · 4Ψ in a step (and 0.1 % for padding)",
    "predicted step": f"at most {1e3 * LIMIT_S:.0f} ms",
}
PROGRAM, GRADIENTS, WEIGHTS, BYTES, TIME = REQUIRED


@exercise(Takes("my_pass(program)"), required=REQUIRED)
def sync_pass(tries: Tries) -> None:
    for notes, outcome in tries.run(compiled, 1):
        result = outcome.results[0]
        if result["refusal"]:
            notes.end(result["refusal"], yours="refused")
            continue
        notes.look(PROGRAM, "", f"{result['length']} instructions")
        plan = PLAN.replace(passes=outcome.answer)
        settings = {"steps": STEPS, "timeout": tries.timeout}
        report = look_at_run(notes, (GRADIENTS, WEIGHTS), MODEL, plan, **settings)
        if report is None:
            continue
        most = int(PADDING * 2 * (RANKS - 1) / RANKS * 4 * MODEL.num_params)
        notes.bytes(BYTES, list(report.traffic()["bytes"]), most, "in a step", least=0)
        notes.at_most(TIME, result["seconds"], LIMIT_S, ms, f": {result['why']}")


def compiled(watch: Any, answer: tuple, seed: int) -> dict[str, Any]:
    """What one rank runs: it compiles two plans with the pass, and predicts the first."""
    from paralab.interpret.text import program

    plan = PLAN.replace(passes=answer)
    text, trouble = bounded(lambda: program(MODEL, plan))
    if trouble or text.refusal:
        return {"refusal": trouble or text.refusal}
    other, trouble = bounded(lambda: program(MODEL, plan.replace(**OTHER)))
    if trouble or other.refusal:
        settings = ", ".join(f"{name}={value}" for name, value in OTHER.items())
        return {"refusal": f"with {settings}: {trouble or other.refusal}"}
    seconds = predict(MODEL, plan, cluster=CLUSTER).step_time
    return {"refusal": "", "length": len(text), "seconds": seconds, "why": _why_slow(text)}


def _why_slow(program: ProgramText) -> str:
    """The reason for a long step, in words: a wait during backward, or calls after it."""
    lines = list(program)
    over = max(position for position, ins in lines if ins.op == BACKWARD)
    for position, ins in lines[:over]:
        if ins.op == WAIT:
            said = program.names.instruction(ins)
            return f"the rank is idle at instruction {position}, {said!r}, before backward is over"
    calls = [position for position, ins in lines if ins.op in COLLECTIVES]
    late = sum(position > over for position in calls)
    if not late:
        return f"all {len(calls)} calls begin before backward is over, and take longer than it"
    return f"{late} of {len(calls)} calls begin when backward is over, so nothing hides them"
