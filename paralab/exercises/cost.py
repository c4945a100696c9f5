"""Lab 11: what training a model costs: FLOPs of a step, days, bytes of states on one device.

    step_flops          PTD-P (Narayanan+ 2021, arXiv:2104.04473) eq. 3, with recomputation: forward
                        of the blocks twice, of the head once, backward twice forward
    training_days       tokens times FLOPs per token over what the devices do per day
    states_per_device   Psi / (tp pp) of every state, ZeRO's share of it (arXiv:1910.02054, sec. 5)

The checker asks about models from 12 to 128 layers and plans with degrees that are all different,
so that every known mistake has a number of its own; it then says which mistake that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paralab.exercises.exercise import Exercise
from paralab.exercises.states import RECIPES, is_number, size_text
from paralab.exercises.verdict import NOT_STARTED, Notes, Verdict, attempt
from paralab.spec import ModelSpec
from paralab.theory import needs
from paralab.theory.flops import block_flops, head_flops

FLOPS, DAYS, SPLIT, ZERO = "FLOPs of a step", "days", "split over tp and pp", "shared by ZeRO"
DAYS_TOLERANCE = 1e-3  # eq. 4 is off by ten times that and more
EXACT = 1e-9  # of what is whole numbers, computed in floats

FLOP_CASES = (("gpt2", 8), ("ptdp-7.5b", 512), ("ptdp-145b", 2304), ("ptdp-1t", 3072))
DAY_CASES = (  # model, tokens, devices, FLOP/s of each: PTD-P sec. 5.1, Table 2, and a small one
    ("gpt3-175b", 300e9, 1024, 140e12),
    ("ptdp-1t", 450e9, 3072, 163e12),
    ("gpt2", 10e9, 8, 60e12),
)
STATE_CASES = (  # model, recipe, tp, pp, dp, ZeRO's stage
    ("ptdp-7.5b", "fp32", 4, 1, 32, 0),
    ("gpt3-175b", "mixed", 8, 12, 5, 0),
    ("ptdp-1t", "mixed, fp32 gradients", 8, 64, 6, 0),
    ("ptdp-1t", "mixed", 8, 64, 6, 1),
    ("ptdp-145b", "mixed, fp32 gradients", 8, 5, 24, 2),
    ("gpt3-175b", "mixed", 8, 1, 48, 3),
    ("ptdp-1t", "mixed", 1, 1, 1024, 1),
    ("ptdp-1t", "mixed", 1, 1, 1024, 3),
)
SHARED_FROM = {"parameters": 3, "gradients": 2, "master": 1, "moments": 1}  # ZeRO's stage
SHARED = (
    "data parallelism without ZeRO copies everything",
    "stage 1 shares the optimizer's states, master weights and moments",
    "stage 2 shares the optimizer's states and gradients",
    "stage 3 shares everything, parameters too",
)

TASK = """
**Your turn.** What does a training cost? Three functions, for any model and plan:

`step_flops(model, samples)`: FLOPs of one step over `samples` samples of `model.seq_len` tokens
each, matrix products alone, a multiply-add being two. Activations are recomputed: every block makes
its forward twice, the head once.

`training_days(model, tokens, devices, flops)`: days for that many tokens, every device making
`flops` of them per second.

`states_per_device(model, recipe, tp, pp, dp, zero_stage)`: what one device holds, `{state: bytes}`,
if tp and pp deal the parameters out evenly and `dp` devices run ZeRO. `recipe` has bytes per
parameter: `{"parameters": 2, "gradients": 2, "master": 4, "moments": 8}`; master weights and
moments are the optimizer's.

`pl.exercises.training_cost.check(step_flops, training_days, states_per_device)`
"""

ASKED = (
    (FLOPS, "four models from 0.1 B to 1 T: to nine digits"),
    (DAYS, "three trainings, two of them PTD-P's: to 0.1 %"),
    (SPLIT, "three plans without ZeRO: every state to nine digits"),
    (ZERO, "five plans, stages 1 to 3: every state to nine digits"),
)

HINTS = (
    "count matrix products: one of (m, k) and (k, n) is 2 m k n FLOPs. A block has 24 s h² of them "
    "per sample in its linear layers and 4 s² h in attention; the head has 2 s h V. Backward is "
    "twice forward.",
    "so a sample is 4 (blocks) or 3 (head) times its forward: 96 s l h² (1 + s/(6h) + V/(16 l h)), "
    "eq. 3 of PTD-P. Per token that is divided by s; a day has 86,400 seconds.",
    "states: model.num_params * recipe[state] / (tp * pp) is what a device holds without ZeRO. "
    "Divide by dp, too, what the stage shares: master and moments from stage 1 on, gradients from "
    "2, parameters from 3.",
)


def check(
    step_flops: Callable[..., Any],
    training_days: Callable[..., Any] | None = None,
    states_per_device: Callable[..., Any] | None = None,
) -> Verdict:
    """Ask the functions about trainings of 0.1 B to 1 T parameters. No time, no ranks.

    step_flops         called as (ModelSpec, samples)
    training_days      called as (ModelSpec, tokens, devices, FLOP/s)
    states_per_device  called as (ModelSpec, {state: bytes per parameter}, tp, pp, dp, stage)
    A function that is not given, or not yet written, leaves its limits open.
    """
    notes, started = Notes("training_cost", ASKED), False
    for limit, where, call, judge, right in _questions(
        step_flops, training_days, states_per_device
    ):
        found, trouble = attempt(call)
        if trouble == NOT_STARTED:
            continue
        started = True
        wrong = trouble or judge(found)
        notes.note(limit, f"{where}: {wrong or right}", not wrong, f"{where}: {wrong}")
    if started and not notes.said:
        notes.said = "there is one more function to write"  # read only where a row stayed open
    return notes.verdict()


Question = tuple[str, str, Callable[[], Any], Callable[[Any], str], str]


def _questions(step_flops: Any, training_days: Any, states_per_device: Any) -> Iterable[Question]:
    """(limit, about what, the call, answer -> what is wrong with it, the right answer as text)."""
    for name, samples in FLOP_CASES:
        model = ModelSpec.preset(name)
        right = needs.step_flops(model, samples, recompute=True)
        yield (
            FLOPS,
            f"{name}, {samples:,} samples",
            lambda m=model, n=samples: step_flops(m, n),
            lambda found, m=model, n=samples: _wrong_flops(m, n, found),
            f"{right:,.5g} FLOPs",
        )
    for name, *asked in DAY_CASES if training_days else ():
        model = ModelSpec.preset(name)
        tokens, devices, flops = asked
        yield (
            DAYS,
            f"{name}, {tokens / 1e9:g} B tokens on {devices:,} devices of {flops / 1e12:g} TFLOP/s",
            lambda m=model, a=asked: training_days(m, *a),
            lambda found, m=model, a=asked: _wrong_days(m, *a, found),
            f"{_days(model, *asked):.2f} days",
        )
    for name, recipe, *degrees in STATE_CASES if states_per_device else ():
        model, (tp, pp, dp, stage) = ModelSpec.preset(name), degrees
        total = sum(right_states(model, RECIPES[recipe], *degrees).values())
        yield (
            ZERO if stage else SPLIT,
            f"{name}, {recipe}, tp={tp} pp={pp} dp={dp} zero_stage={stage}",
            lambda m=model, r=recipe, d=degrees: states_per_device(m, dict(RECIPES[r]), *d),
            lambda found, m=model, r=recipe, d=degrees: _wrong_states(m, RECIPES[r], *d, found),
            size_text(total),
        )


def known_flops(model: ModelSpec, samples: int) -> dict[str, float]:
    """{what was done: the FLOPs it gives} of the mistakes that are made with eq. 3."""
    blocks, head = model.layers * block_flops(model, samples), head_flops(model, samples)
    linear = 24 * samples * model.seq_len * model.hidden**2 * model.layers
    right, per_token = 4 * blocks + 3 * head, model.num_params * samples * model.seq_len
    return {
        "nothing is recomputed there: with recomputation a block's forward is made twice": 3
        * (blocks + head),
        "the head is recomputed there too; it is made once": 4 * (blocks + head),
        "that is forward alone": blocks + head,
        "that is forward twice; backward is twice as much again": 2 * blocks + head,
        "a multiply-add is two FLOPs": right / 2,
        "that is one sample": right / samples,
        "that is one token per sample": right / model.seq_len,
        "that is the term before the bracket; attention and the head are missing": 4 * linear,
        "the head is missing, V/(16 l h) of eq. 3": 4 * blocks,
        "attention's scores are missing, s/(6h) of eq. 3": 4 * linear + 3 * head,
        "that is eq. 4, 8 Ψ for every token: a good guess, but not the count": 8 * per_token,
        "that is 6 Ψ for every token: nothing is recomputed, and the scores are missing": 6
        * per_token,
    }


def known_days(model: ModelSpec, tokens: float, devices: int, flops: float) -> dict[str, float]:
    """{what was done: the days it gives} of the mistakes that are made on the way to days."""
    right = _days(model, tokens, devices, flops)
    eq4 = 8 * tokens * model.num_params / (devices * flops) / needs.SECONDS_PER_DAY
    spared = needs.training_days(
        model, tokens=tokens, devices=devices, flops=flops, recompute=False
    )
    return {
        f"that is eq. 4, {100 * (1 - eq4 / right):.1f} % too low: it leaves out attention's scores "
        "and counts the head as if it were a block": eq4,
        "nothing is recomputed there": spared,
        "that is 6 Ψ for every token: nothing is recomputed, and the scores are missing": 0.75
        * eq4,
        "those are seconds": right * needs.SECONDS_PER_DAY,
        "those are hours": right * 24,
        "those are minutes": right * 24 * 60,
        "that is one device": right * devices,
        "tokens are not samples: a sample has model.seq_len of them": right * model.seq_len,
        "divided by the number of devices twice": right / devices,
    }


def known_states(
    model: ModelSpec, width: int, tp: int, pp: int, dp: int, stage: int
) -> list[tuple[str, float]]:
    """(what was done, the bytes it gives) of the mistakes that are made with one state."""
    whole = model.num_params * width
    cut, blocks = whole / (tp * pp), 12 * model.layers * model.hidden**2 * width / (tp * pp)
    return [
        (SHARED[stage], cut),
        (SHARED[stage], cut / dp),
        ("that is the whole model's; tp and pp deal it out", whole),
        ("pp deals it out too", whole / tp),
        ("tp deals it out too", whole / pp),
        ("ZeRO shares what tp and pp have left", whole / dp),
        ("pp deals it out too", whole / tp / dp),
        ("tp deals it out too", whole / pp / dp),
        ("ZeRO's N is dp, not all devices", cut / (tp * pp * dp)),
        *(
            ("12 l h² are the blocks' matrices alone; model.num_params has them all", blocks / n)
            for n in (1, dp)
        ),
    ]


def right_states(
    model: ModelSpec, recipe: Mapping[str, int], tp: int, pp: int, dp: int, stage: int
) -> dict[str, float]:
    """{state: bytes} on one device."""
    cut = model.num_params / (tp * pp)
    return {
        state: width * cut / (dp if stage >= SHARED_FROM[state] else 1)
        for state, width in recipe.items()
    }


def _days(model: ModelSpec, tokens: float, devices: int, flops: float) -> float:
    return needs.training_days(model, tokens=tokens, devices=devices, flops=flops)


def _wrong_flops(model: ModelSpec, samples: int, found: Any) -> str:
    right = needs.step_flops(model, samples, recompute=True)
    if not is_number(found):
        return f"asked is a number of FLOPs, yours is {found!r}"
    if _close(found, right):
        return ""
    return f"{right:,.5g} FLOPs, yours {float(found):,.5g}" + _why(
        found, right, known_flops(model, samples).items()
    )


def _wrong_days(model: ModelSpec, tokens: float, devices: int, flops: float, found: Any) -> str:
    right = _days(model, tokens, devices, flops)
    if not is_number(found):
        return f"asked is a number of days, yours is {found!r}"
    if _close(found, right, DAYS_TOLERANCE):
        return ""
    return f"{right:.2f} days, yours {float(found):,.6g}" + _why(
        found, right, known_days(model, tokens, devices, flops).items(), DAYS_TOLERANCE
    )


def _wrong_states(
    model: ModelSpec, recipe: Mapping[str, int], tp: int, pp: int, dp: int, stage: int, found: Any
) -> str:
    """What is wrong with the first wrong state, or ""."""
    if not isinstance(found, Mapping):
        return f"asked is a dict, {{state: bytes}}, yours is a {type(found).__name__}"
    right = right_states(model, recipe, tp, pp, dp, stage)
    for state in (*right, *found):
        if state not in found:
            return f"the state {state!r} is missing"
        if state not in right:
            return f"{state!r} is not in the recipe"
    for state, size in right.items():
        yours = found[state]
        if not is_number(yours):
            return f"{state!r} is {yours!r}, not a number of bytes"
        if not _close(yours, size):
            known = [
                *known_states(model, recipe[state], tp, pp, dp, stage),
                ("those are GB, asked are bytes", size / 1e9),
                ("those are GiB, asked are bytes", size / 2**30),
                (
                    "that is the number of parameters, each of which takes some bytes",
                    size / recipe[state],
                ),
            ]
            said = _why(yours, size, known)
            return f"{state!r} is {size_text(size)}, yours {size_text(float(yours))}{said}"
    return ""


def _close(found: Any, right: float, tolerance: float = EXACT) -> bool:
    return math.isclose(float(found), right, rel_tol=tolerance)


def _why(
    found: Any, right: float, known: Iterable[tuple[str, float]], tolerance: float = EXACT
) -> str:
    """The mistake that gives this number, if it is a known one; else how far off it is."""
    for said, number in known:
        if _close(found, number, tolerance):
            return f" ({said})"
    times = float(found) / right
    return f" ({times:.3g} times as much)" if 0 < times < math.inf else ""


training_cost = Exercise(
    name="training_cost", lab="11", task=TASK, asked=ASKED, hints=HINTS, checker=check
)
