"""Lab 06: an estimator of a training step's memory by category, right to the byte.

The right values come from the compiled program: states at the update, activations at their own
peak. Models and numbers of ranks are chosen so that padding is not zero and every known mistake
gives a number of its own.
"""

from __future__ import annotations

import functools

from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import Mistakes, ask
from paralab.interpret import quick
from paralab.spec import ModelSpec, Plan

SMALL = ModelSpec(layers=3, hidden=45, heads=5, seq_len=14, vocab=259, attention="explicit")
WIDE = ModelSpec(layers=2, hidden=96, heads=3, seq_len=40, vocab=301, attention="explicit")
REQUIRED = {
    "one device": "two models without ZeRO: every category to the byte",
    "ZeRO-1 and ZeRO-2": "4 and 7 ranks, which do not divide Ψ",
    "ZeRO-3": "the same, unit by unit",
    "bf16": "three plans in 16 bits",
}
ONE, SHARED, UNITS, SHORT = REQUIRED
CASES = (  # limit, model, b, n, stage, precision
    (ONE, SMALL, 1, 1, 0, "fp32"),
    (ONE, WIDE, 3, 1, 0, "fp32"),
    (SHARED, SMALL, 2, 4, 1, "fp32"),
    (SHARED, WIDE, 1, 7, 2, "fp32"),
    (UNITS, SMALL, 2, 4, 3, "fp32"),
    (UNITS, WIDE, 1, 7, 3, "fp32"),
    (SHORT, WIDE, 3, 1, 0, "bf16"),
    (SHORT, SMALL, 2, 4, 2, "bf16"),
    (SHORT, SMALL, 1, 7, 3, "bf16"),
)


@exercise(Takes("my_estimate(spec, b, n, zero_stage, precision)"), required=REQUIRED)
def memory_estimator(tries: Tries) -> None:
    questions = [(0, case[1:]) for case in CASES]
    why = "paralab is asked: count the bytes yourself"
    for notes, case, reply in ask(tries, CASES, questions, why, ("spec/model.py",)):
        limit, spec, b, n, stage, precision = case
        notes.where = f"hidden={spec.hidden}, b={b}, n={n}, stage {stage}, {precision}"
        right = right_bytes(*case[1:])
        wrong = reply.states(right, lambda state, case=case: known(state, *case[1:]))
        notes.look(limit, wrong, f"{sum(right.values()):,} bytes")


@functools.cache
def right_bytes(spec: ModelSpec, b: int, n: int, zero_stage: int, precision: str) -> dict[str, int]:
    """{category: bytes} of a rank in the plan's program."""
    plan = Plan(
        dp=n,
        zero_stage=zero_stage + (zero_stage == 1),  # at the update both have the same states
        precision=precision,
        microbatch_size=b,
        bucket_bytes=2**40,  # one bucket: one unit of ZeRO-1 and ZeRO-2
    )
    states = quick.states(quick.program_of(spec, plan, "adamw", 0), 0)
    return states | {"activations": quick.most(spec, plan)["activations"]}


def known(state: str, spec: ModelSpec, b: int, n: int, stage: int, precision: str) -> Mistakes:
    right = right_bytes(spec, b, n, stage, precision)[state]
    psi, w, tensors = spec.num_params, 4 if precision == "fp32" else 2, len(spec.parameter_shapes())
    if state == "activations":
        if n > 1:
            yield "ZeRO does not shard activations", right // n
        yield from known_activations(right, spec, b, w)
        return
    width = w if state != "optimizer" else 8 if w == 4 else 12
    units = {0: tensors, 1: 1, 2: 1, 3: spec.layers + 2}[stage]
    shared = stage >= {"parameters": 3, "gradients": 1, "optimizer": 1}[state]
    if state == "optimizer":
        part = (right - 4 * units) // width
        yield "AdamW's step counts are missing, 4 bytes per unit", width * part
        each = "that has a step count per tensor; with ZeRO there is one per unit"
        yield each, width * part + 4 * tensors
        yield "in bf16 the master weights belong to the optimizer, 4 Ψ more", 8 * part + 4 * units
        yield "only 16-bit training has master weights", 12 * part + 4 * units
    kept = f"the {state}: every rank keeps"
    if shared:
        counts = 4 * units * (state == "optimizer")
        for whole in (psi, -(-psi // n) * n, (right - counts) // width * n):
            for more in (0, counts):
                yield f"stage {stage} shards {kept} an n-th", width * whole + more
        yield "that is not padded to n equal parts", width * psi / n
        yield "that is not padded to n equal parts", width * psi // n
        yield "the model is padded once, but every unit is padded by itself", width * -(-psi // n)
    elif stage:
        for part in (psi / n, psi // n, -(-psi // n)):
            yield f"stage {stage} does not shard {kept} all n parts", width * part
        yield "that is not padded: Ψ is rounded up to n parts", width * psi
    for short in range(1, units + 1) if stage else ():  # units whose size n does not divide
        less = right - width * short * (1 if shared else n)
        yield "parts are rounded down, and padding rounds them up", less
    yield f"w is {w} bytes in {precision}", right * (2 if w == 2 else 0.5)


def known_activations(right: int, spec: ModelSpec, b: int, w: int) -> Mistakes:
    s, h, a = spec.seq_len, spec.hidden, spec.heads
    scores, loss = w * a * b * s * s * spec.layers, 4 * b * s * spec.vocab
    ends = 2 * w * b * s * h + 2 * w * b * s + loss + 16 * b * s
    yield "the embedding and the head are missing", right - ends
    yield "the probabilities of the loss are missing, 4 b s V bytes", right - loss
    yield "the probabilities of the loss have 4 bytes in bf16 too", right - loss / 2
    width = "in bf16 token numbers, targets and probabilities keep their width"
    yield width, right - (loss / 2 + 8 * b * s) * (w == 2)
    absent = {  # some have equally many bytes
        "token numbers or targets, 8 b s bytes": 8 * b * s,
        "token numbers and targets, 16 b s bytes": 16 * b * s,
        "the head's mean and deviation, 2 w b s": 2 * w * b * s,
        "mean and deviation of a norm in each block, 2 w b s": 2 * w * b * s * spec.layers,
        "mean and deviation of both norms in each block, 4 w b s": 4 * w * b * s * spec.layers,
    }
    for size in absent.values():
        alike = ", or ".join(words for words, other in absent.items() if other == size)
        yield f"missing: {alike}", right - size
    yield "the softmax's result is missing, w a b s² per block", right - scores
    yield "only one copy of the scores is kept, the softmax's result", right + scores
    yield "that is for one sample, not for b", right / b
    block = (right - ends) // spec.layers
    yield "that is with one block, not with all", block + ends
    full = spec.layers * b * s * h * (34 + 5 * a * s / h)
    yield "that is Korthikanti's formula: with dropout, without embedding and head", full
    wide = 4 * (right - loss - 16 * b * s) // w + loss + 16 * b * s
    yield f"w is {w} bytes, not {6 - w}", wide if w == 2 else (right + loss + 16 * b * s) // 2
