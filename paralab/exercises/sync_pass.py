"""Lab 02: the sums of data parallelism as a pass, a function from a program to a program.

The checker compiles the plan with the learner's pass and lets the program's own checks speak: they
name a gradient that is not summed, or is summed twice or too early. What they accept runs on four
real ranks, one step for gradients and three for weights with SGD, against one process of the
reference. Bytes are what these ranks record. The step is predicted on a stated cluster, where only
sums that overlap with backward keep the limit (Li+ 2020, arXiv:2006.15704, sec. 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paralab.checks import real
from paralab.exercises.exercise import Exercise
from paralab.exercises.sync import LR, PADDING, RANKS, STEPS, first_wrong, of_one_process
from paralab.exercises.verdict import NOT_STARTED, Notes, Verdict, attempt
from paralab.spec import Cluster, Link, ModelSpec, Plan

if TYPE_CHECKING:
    from paralab.interpret.text import ProgramText

MODEL = ModelSpec.preset("laptop").replace(attention="explicit")  # the limits are of that step
BATCH = {"microbatches": 2, "microbatch_size": 2}
PLAN = Plan(dp=RANKS, grad_sync=None, bucket_bytes=512 * 1024, **BATCH)
CLUSTER = Cluster(
    name="5 Gbit/s", flops=60e9, memory_bandwidth=1e11, intra=Link(alpha=0.25e-3, bandwidth=625e6)
)
LIMIT_S = 37e-3  # sums behind backward take 42 ms, halves that wait for each other 40 ms
TIMEOUT_S = 20.0

PROGRAM, GRADIENTS, WEIGHTS, BYTES, TIME = (
    "program",
    "gradients",
    "weights",
    "bytes per rank",
    "predicted step",
)

TASK = """
**Your turn.** Write `my_pass(program)`, a pass for
`Plan(dp=4, grad_sync=None, passes=(my_pass,))`. `program.code` is the list of instructions of a
rank. The pass returns `program.replace(code)`, where `code` is this list with the sums of the
gradients in it. A *unit* is a bucket of parameters, known by its number. The checker's plan has two
micro-batches per step and buckets of 512 KiB. `paralab.programs` has what you need:

* `completed(program.code)` is `{position: [units]}`: after this position of the list, nothing more
  is added to the gradients of these units.
* `insert(program.code, {position: [instructions]})` is the list with more instructions after some
  positions.
* `all_reduce(unit)` is an instruction that begins to sum the gradient of a unit over the ranks; the
  rank goes on at once. `reduce_scatter(unit)` and `all_gather(unit)` are its two halves.
* `wait(call)` is an instruction at which the rank waits for such a call. Without one, the rank
  waits where it first uses the result.

The loss of every rank is already divided by the samples of all ranks, so the sum needs no division.
The step is predicted for devices with a link of 0.25 ms per call and 625 MB/s. There, forward and
backward of both micro-batches take 32.6 ms and the sums take 9.8 ms.

`pl.exercises.sync_pass.check(my_pass)`
"""

ASKED = (
    (PROGRAM, "every gradient is summed once, when it is complete and before its UPDATE"),
    (GRADIENTS, f"of one step on {RANKS} ranks: those of one process"),
    (WEIGHTS, "after 3 steps of SGD: those of one process"),
    (BYTES, "at most 2(N-1)/N Ψ (and 0.1 % for padding)"),
    (TIME, f"at most {1e3 * LIMIT_S:.0f} ms"),
)

HINTS = (
    "look at pl.program(model, pl.Plan(dp=4, grad_sync=None)). The last line names a sum that is "
    "missing, and the position behind (after) which it may stand.",
    "backward hides only those sums that begin before it is over. completed(program.code) gives "
    "the first position at which the sum of each unit may stand.",
    "make a dict with an all_reduce(unit) for every unit at each position that completed() gives, "
    "pass it to insert(), and return program.replace() of the result. No wait() is needed.",
)


def check(form: Callable[[Any], Any], *, timeout: float = TIMEOUT_S) -> Verdict:
    """Compile, run and predict `PLAN` with the pass ``form``; about two seconds on warm ranks.

    timeout  seconds without a sign of life until a run is called off

    Raises ValueError for a wrong timeout; an answer that is wrong or fails is a Verdict.
    """
    from paralab.experiment import run
    from paralab.interpret.predict import predict
    from paralab.interpret.text import program

    timeout = real("timeout", timeout, above=0.0)
    notes = Notes("sync_pass", ASKED)
    compiled, trouble = attempt(lambda: program(MODEL, PLAN.replace(passes=(form,))))
    if trouble == NOT_STARTED:
        return notes.verdict()
    trouble = trouble or compiled.refusal
    if trouble:
        notes.note(PROGRAM, "refused", False, trouble)
        return notes.verdict()
    notes.note(PROGRAM, f"{len(compiled)} instructions", True)

    plan = PLAN.replace(passes=(form,))
    for limit, steps in STEPS.items():
        report, trouble = attempt(
            lambda steps=steps: run(
                MODEL,
                plan,
                steps=steps,
                optimizer="sgd",
                lr=LR,
                keep_state=True,
                strict=True,
                timeout=timeout,
                progress=False,
            )
        )
        if trouble:
            notes.note(limit, "failed", False, trouble)
            return notes.verdict()
        right = of_one_process(MODEL, steps, **BATCH)[limit]
        wrong = first_wrong(right, getattr(report, limit))
        notes.note(
            limit, wrong or f"{len(right)} tensors, all equal", not wrong, f"{limit}: {wrong}"
        )

    most = 2 * (RANKS - 1) / RANKS * 4 * MODEL.num_params
    sent = int(report.traffic()["bytes"].max())
    notes.note(
        BYTES,
        f"{sent / 1e6:.2f} MB of {most / 1e6:.2f} MB",
        sent <= PADDING * most,
        f"a rank sends {sent / 1e6:.2f} MB in a step, and 2(N-1)/N Ψ is {most / 1e6:.2f} MB",
    )
    seconds = predict(MODEL, plan, cluster=CLUSTER).step_time
    said = f"{1e3 * seconds:.1f} ms"
    notes.note(
        TIME,
        said,
        seconds <= LIMIT_S,
        f"a step takes {said}, and at most {1e3 * LIMIT_S:.0f} ms are asked: {_why_slow(compiled)}",
    )
    return notes.verdict()


def _why_slow(program: ProgramText) -> str:
    """What costs the time, read off the list: a wait inside backward, or calls behind it."""
    from paralab.programs.instructions import BACKWARD, COLLECTIVES, WAIT

    lines = list(program)
    over = max(position for position, ins in lines if ins.op == BACKWARD)
    for position, ins in lines[:over]:
        if ins.op == WAIT:
            said = program.names.instruction(ins)
            return f"the rank is idle at instruction {position}, {said!r}, and backward is not over"
    calls = [position for position, ins in lines if ins.op in COLLECTIVES]
    late = sum(position > over for position in calls)
    return f"{late} of {len(calls)} calls begin when backward is over, and nothing hides them"


sync_pass = Exercise(name="sync_pass", lab="02", task=TASK, asked=ASKED, hints=HINTS, checker=check)
