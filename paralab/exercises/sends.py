"""Lab 12: what a rank of a large plan sends per step, axis by axis, without running it.

The answer is three sums (Narayanan+ 2021, arXiv:2104.04473, sec. 3): all-reduces of activations in
every block and micro-batch, messages to the stages before and after, and the gradients. It is
compared with the compiled programs (`pl.dry_run`) of plans with 16 to 384 ranks, on the first stage
and on one in the middle, not on the last stage, whose head sends more.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from paralab.dry_run import dry_run
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import Mistakes, Reply, ask, kind_of, size_text
from paralab.exercises.unaided import UNAIDED
from paralab.spec import ModelSpec, Plan

EXACT = 1e-9  # relative, for rounding
REQUIRED = {
    "tp": "bytes of all-reduces in forward, backward and recomputation: to nine digits",
    "pp": "bytes of activations and their gradients: to nine digits",
    "dp": "bytes of the gradients' all-reduce: to nine digits",
}


def _case(name: str, rank: int, **settings: Any) -> tuple[ModelSpec, Plan, int]:
    model = ModelSpec.preset(name).replace(tied=False)
    return model, Plan(**{"precision": "bf16", "microbatch_size": 3, **settings}), rank


CASES = (  # rank 192 is on stage 6; an order of the axes with pp not outermost puts it on stage 0
    _case("ptdp-7.5b", 0, tp=4, pp=3, dp=2, microbatches=6, recompute="full"),
    _case("ptdp-7.5b", 9, tp=4, pp=3, dp=2, microbatches=6),
    _case("ptdp-39b", 12, tp=8, pp=6, dp=4, microbatches=7, precision="fp32"),
    _case("gpt3-175b", 192, tp=8, pp=12, dp=4, microbatches=16, recompute="full"),
)


@exercise(Takes("rank_sends(model, plan, rank)"), required=REQUIRED)
def rank_sends(tries: Tries) -> None:
    for notes, case, reply in ask(tries, CASES, (), *UNAIDED):
        model, plan, rank = case
        notes.where = f"L={model.layers}, dp={plan.dp}, pp={plan.pp}, tp={plan.tp}, "
        notes.where += f"m={plan.microbatches}, rank {rank}"
        sent, wrong = reply.value, reply.trouble
        if not wrong and not isinstance(sent, Mapping):
            wrong = f"required: a dict, {{axis: bytes}}, yours is {kind_of(sent)}"
        for axis, size in right(*case).items():
            missing = wrong or f"the dict has no entry {axis!r}"
            entry = Reply(sent[axis], "") if not wrong and axis in sent else Reply(None, missing)
            known, what = known_bytes(axis, size, *case), f" of bytes along {axis}"
            notes.each(
                axis, entry.number(size, known, size_text, what, EXACT), "right in all plans"
            )


@functools.cache
def right(model: ModelSpec, plan: Plan, rank: int) -> dict[str, int]:
    """{axis: bytes} that the compiled program sends, in the order of the limits."""
    sent = dry_run(model, plan, rank=rank).traffic(by="axis").set_index("axis")["bytes"]
    return {axis: int(sent[axis]) for axis in REQUIRED}


def known_bytes(axis: str, size: int, model: ModelSpec, plan: Plan, rank: int) -> Mistakes:
    """(words, bytes) of the known mistakes. size: the right bytes"""
    d, t, m = plan.dp, plan.tp, plan.microbatches
    w, first = 4 if plan.precision == "fp32" else 2, plan.place(rank).pp == 0
    a_number = f"in {plan.precision} a number has {w} bytes"
    half = "that is half of an all-reduce" + f", or {a_number}" * (w == 4)
    if axis != "dp":
        yield "yours counts one micro-batch", size / m
        yield "yours counts one sample per micro-batch", size / plan.microbatch_size
    if axis == "tp":
        activation = w * plan.microbatch_size * model.seq_len * model.hidden
        once = m * 2 * (t - 1) / t * activation  # bytes of an all-reduce in every micro-batch
        again = 2 * model.layers // plan.pp * once
        if plan.recompute == "full":
            said = "with recomputation forward runs twice, and so do its two all-reduces"
            yield said, size - again
        else:
            yield "yours counts recomputation, which this plan does not use", size + again
        order = ", or the rank is on another stage: tp is innermost, then dp, then pp"
        if first:
            yield f"the embedding's all-reduce is missing{order}", size - once
        else:
            yield f"there is no embedding on this stage{order}", size + once
        yield "an all-reduce sends 2 (t-1)/t of its tensor", size * t / (2 * (t - 1))
        yield half, size / 2
        yield "yours counts the whole model; a stage has L/p blocks", size * plan.pp
    elif axis == "pp":
        if first:
            said = "the first stage has no stage before it to send gradients to"
            yield said + f", or {a_number}" * (w == 2), size * 2
        else:
            yield "a stage in the middle also sends gradients back", size / 2
        yield "every tensor-parallel rank sends the whole activation, not a t-th of it", size / t
        yield a_number, size / 2
    else:
        per_element = 2 * (d - 1) / d * w  # bytes that an element costs
        whole, norms = per_element * model.num_params, model.layers / plan.pp * 6 * model.hidden
        yield "an all-reduce sends 2 (d-1)/d of its tensor", size * d / (2 * (d - 1))
        yield half, size / 2
        yield "gradients are summed once per step, not per micro-batch", size * m
        yield "yours counts the whole model; a rank holds its part of one stage", whole
        part = whole / (t * plan.pp)
        yield "yours is an equal part of all parameters, but stages differ", part
        sharded = size - per_element * norms * (1 - 1 / t)
        yield "biases after a row-parallel layer and norms are not sharded", sharded
    yield a_number, size * 2
