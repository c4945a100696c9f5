"""Lab 00: the peak memory of a training step on one device, by formulas.

The right value is the peak of the compiled program, which a run reaches to the byte
(tests/test_memory.py). The peak is at one of four moments, each in at least one case: the backward
of the output matrix, of a block's MLP, of its attention scores, or of the embedding's lookup.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace

from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import Mistakes, ask, size_text
from paralab.interpret import quick
from paralab.spec import ModelSpec, Plan

TOLERANCE = 0.05
FIELDS = ("layers", "hidden", "heads", "seq_len", "vocab")
REQUIRED = {
    "the lab's model": "4 blocks, h = 256, 8 samples of 128 tokens, and two more: within 5 %",
    "large vocabularies": "V = 8,192 to 65,536",
    "long sequences": "s = 512 and 1024, up to 16 heads",
    "wide models, few tokens": "up to h = 4096 and 48 blocks, one sample",
    "several micro-batches": "m = 2, 3 and 4",
}
SMALL, WORDS, LONG, WIDE, SEVERAL = REQUIRED
CASES = (  # limit, the model's fields, samples of a micro-batch, micro-batches
    (SMALL, (4, 256, 4, 128, 256), 8, 1),
    (SMALL, (6, 192, 6, 96, 256), 12, 1),
    (SMALL, (1, 256, 4, 32, 64), 64, 1),
    (WORDS, (12, 768, 12, 1024, 50304), 4, 1),
    (WORDS, (6, 384, 6, 256, 65536), 2, 1),
    (WORDS, (12, 768, 12, 128, 50304), 1, 1),
    (WORDS, (1, 128, 2, 128, 8192), 32, 1),
    (LONG, (2, 256, 16, 1024, 256), 2, 1),
    (LONG, (4, 128, 8, 512, 256), 4, 1),
    (WIDE, (32, 4096, 32, 128, 32000), 1, 1),
    (WIDE, (48, 128, 2, 64, 256), 1, 1),
    (SEVERAL, (4, 256, 4, 128, 256), 8, 4),
    (SEVERAL, (12, 768, 12, 1024, 50304), 8, 4),
    (SEVERAL, (2, 1024, 16, 64, 256), 1, 3),
    (SEVERAL, (4, 256, 2, 256, 1024), 2, 2),
)


@exercise(Takes("peak_estimate(model, batch, microbatches)"), required=REQUIRED)
def peak_estimate(tries: Tries) -> None:
    why = "the estimate asks paralab; required: formulas of your own"
    questions = [(0, (SimpleNamespace(**_named(sizes)), b, m)) for _, sizes, b, m in CASES]
    for notes, (limit, sizes, b, m), reply in ask(tries, CASES, questions, why):
        notes.where = f"{', '.join(f'{k}={v}' for k, v in _named(sizes).items())}, b={b}, m={m}"
        model = ModelSpec(**_named(sizes), attention="explicit")
        peak, of_one = (at_peak(model, b, count) for count in (m, 1))
        right = sum(peak.values())
        known = _mistakes(model, b, m, right, sum(of_one.values()))
        parts = ", ".join(f"{name} {size_text(n)}" for name, n in peak.items())
        how = size_text, " of bytes", TOLERANCE, f"required at the peak: {parts}"
        wrong = reply.number(right, known, *how)
        notes.look(limit, wrong, "" if wrong else f"{100 * (reply.value / right - 1):+.1f} %")


@functools.cache  # the same for every answer
def at_peak(model: ModelSpec, batch: int, microbatches: int) -> dict[str, int]:
    """{category: bytes} at the peak of the compiled program."""
    plan = Plan(microbatch_size=batch, microbatches=microbatches)
    return {name: size for name, size in quick.fullest(model, plan)[1].items() if size}


def _named(sizes: Sequence[int]) -> dict[str, int]:
    return dict(zip(FIELDS, sizes, strict=True))


def _mistakes(model: ModelSpec, b: int, m: int, right: float, of_one: float) -> Mistakes:
    """of_one: the peak with a single micro-batch"""
    psi, s, h = model.num_params, model.seq_len, model.hidden
    sbh, scores = s * b * h, model.heads * s * s * b
    block, head = 64 * sbh + 4 * scores, 8 * sbh + 4 * s * b * model.vocab
    saved = model.layers * block + head
    all_at_once = 16 * psi + saved
    why = "which are not there at once" if all_at_once > right else "but no temporary tensors"
    yield f"model states and all activations, {why}", all_at_once
    yield "the model states alone; temporary tensors are missing", 16 * psi
    yield "from the second micro-batch on all gradients are there", of_one
    yield "that is m times the peak; micro-batches run one after the other", m * right
    yield "weights and moments alone", 12 * psi
    blocks = 12 * psi + model.layers * block
    yield "weights, moments and the blocks' activations; what else is alive?", blocks
    yield "all model states and the blocks' activations; when are both there?", blocks + 4 * psi
    if of_one == right:
        logits, gradient = 4 * s * b * model.vocab, 4 * model.vocab * h
        at_output = 12 * psi + saved + logits + gradient
        in_block = gradient + 4 * (12 * h**2 + 13 * h) + max(20 * sbh, 8 * scores - 40 * sbh)
        at_block = blocks + in_block
        without = "without the logits and their gradient"
        if at_output < (1 - TOLERANCE) * right:
            yield "that is at the backward of the output matrix; a later moment has more", at_output
            without = "that is at the backward of the last block; a later moment has more"
        if at_block < (1 - TOLERANCE) * right:
            yield without, at_block
    halves = model.layers * (34 * sbh + 5 * scores)
    yield "34 and 5 are of 16-bit activations with dropout; this is fp32 without", 16 * psi + halves
