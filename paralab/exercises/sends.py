"""Lab 12: what a rank of a large plan sends per step, axis by axis, without running it.

The answer is three sums (Narayanan+ 2021, arXiv:2104.04473, sec. 3): all-reduces of activations in
every block and micro-batch, messages to the stages before and after, and the gradients. It is held
against the compiled program (`pl.dry_run`) of plans with 16 to 384 ranks, on the first stage and on
one in the middle. The last stage, whose head sends more, is not asked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paralab.exercises.exercise import Exercise
from paralab.exercises.questions import asked, kind_of, replies, size_text, wrong_number
from paralab.exercises.tries import Takes, Try
from paralab.spec import ModelSpec, Plan

EXACT = 1e-9
ASKED = {
    "tp": "bytes of all-reduces in forward, backward and what is recomputed: to nine digits",
    "pp": "bytes of activations and their gradients: to nine digits",
    "dp": "bytes of the gradients' all-reduce: to nine digits",
}


class Case(NamedTuple):
    """A rank of a plan, and the stage that it is in."""

    model: ModelSpec
    plan: Plan
    rank: int


def _case(name: str, rank: int, **settings: Any) -> Case:
    model = ModelSpec.preset(name).replace(tied=False)
    return Case(model, Plan(**{"precision": "bf16", **settings}), rank)


CASES = (
    _case("ptdp-7.5b", 0, tp=4, pp=3, dp=2, microbatches=6, recompute="full"),
    _case("ptdp-7.5b", 9, tp=4, pp=3, dp=2, microbatches=6, microbatch_size=2),
    _case("ptdp-39b", 5, tp=8, pp=6, dp=4, microbatches=7, precision="fp32"),
    _case("gpt3-175b", 200, tp=8, pp=12, dp=4, microbatches=16, recompute="full"),
)


def check(tries: Sequence[Try], timeout: float) -> None:
    for notes, case, reply in replies(tries, CASES, 2 * timeout, alone):
        where = f"{_said(case)}, rank {case.rank}"
        for axis in ASKED:
            wrong = reply.trouble or _wrong(reply.value, axis, case)
            notes.look(axis, where if wrong else "", wrong, "right in all plans")


def alone(watch: Any, answer: tuple, seed: int) -> list[Any]:
    """What one rank runs. The library's own count is the answer: here it cannot be asked."""
    for name in ("dry_run", "predict", "program", "run"):
        setattr(sys.modules["paralab"], name, _refused)  # only on this rank, which ends here
    return asked(watch, answer, seed, [(0, tuple(case)) for case in CASES])


def _refused(*_: Any, **__: Any) -> None:
    raise RuntimeError("the compiled program is the answer: here it cannot be asked")


def _said(case: Case) -> str:
    plan = case.plan
    return f"L={case.model.layers}, dp={plan.dp}, pp={plan.pp}, tp={plan.tp}, m={plan.microbatches}"


@functools.cache
def right(case: Case) -> dict[str, int]:
    """{axis: bytes} of the compiled program."""
    from paralab.dry_run import dry_run

    sent = dry_run(case.model, case.plan, rank=case.rank).traffic(by="axis")
    return dict(zip(sent["axis"], sent["bytes"].tolist(), strict=True))


def _wrong(found: Any, axis: str, case: Case) -> str:
    if not isinstance(found, Mapping):
        return f"required: a dict, {{axis: bytes}}, yours is a {kind_of(found)}"
    if axis not in found:
        return f"there is no {axis!r} in it"
    known = known_bytes(axis, case).items()
    what = f"required: a number of bytes along {axis}"
    return wrong_number(
        found[axis], right(case)[axis], size_text, known, what=what, tolerance=EXACT
    )


def known_bytes(axis: str, case: Case) -> dict[str, float]:
    """{what was done: the bytes it gives} of the mistakes that are made."""
    model, plan, rank = case
    size, d, t, m = right(case)[axis], plan.dp, plan.tp, plan.microbatches
    w, inner = 4 if plan.precision == "fp32" else 2, plan.place(rank).pp > 0
    S = w * plan.microbatch_size * model.seq_len * model.hidden
    calls, call = m * model.layers // plan.pp, 2 * (t - 1) / t * S
    again = plan.recompute == "full"
    common = {"that is one micro-batch": size / m} if axis != "dp" else {}
    if axis == "tp":
        return common | {
            "forward is made twice, and its two all-reduces too"
            if again
            else "nothing is recomputed there": size + (-2 if again else 2) * calls * call,
            "the embedding's all-reduce is missing"
            if not inner
            else "there is no embedding on this stage": size + (1 if inner else -1) * m * call,
            "an all-reduce sends 2 (t-1)/t of its tensor": size * t / (2 * (t - 1)),
            "that is half of an all-reduce": size / 2,
            "that is the whole model; a stage has L/p blocks": size * plan.pp,
        }
    if axis == "pp":
        return common | {
            "a stage in the middle sends gradients back, too"
            if inner
            else "the first stage has none to send gradients to": size * (0.5 if inner else 2),
            "every tensor-parallel rank sends the whole activation here": size / t,
            f"a number has {w} bytes": size * (2 / w if w == 4 else 2),
        }
    return {
        "an all-reduce sends 2 (d-1)/d of its tensor": size * d / (2 * (d - 1)),
        "that is half of an all-reduce": size / 2,
        "gradients are summed once per step, not per micro-batch": size * m,
        "a rank holds the parameters of its stage and its part of them": 2
        * (d - 1)
        / d
        * w
        * model.num_params,
        "an N-th of the parameters: stages and embedding are not equal": 2
        * (d - 1)
        / d
        * w
        * model.num_params
        / (t * plan.pp),
        "biases after a row-parallel layer and norms are not sharded": size
        - 2 * (d - 1) / d * w * model.layers / plan.pp * 6 * model.hidden * (1 - 1 / t),
    }


rank_sends = Exercise(
    name="rank_sends",
    lab="12",
    asked=ASKED,
    takes=(Takes("a function", "rank_sends(model, plan, rank)"),),
    checker=check,
)
