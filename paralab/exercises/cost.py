"""Lab 11: what training a model costs: FLOPs of a step, days, bytes of states, MFU and HFU.

    step_flops          PTD-P (Narayanan+ 2021, arXiv:2104.04473) eq. 3, with recomputation: forward
                        of the blocks twice, of the head once, backward twice forward
    training_days       tokens times FLOPs per token over what the devices do per day
    states_per_device   Psi / (tp pp) of every state, ZeRO's part of it (arXiv:1910.02054, sec. 5)
    utilisation         MFU, the model's FLOPs over what the devices could do (PaLM, Chowdhery+
                        2022, arXiv:2204.02311, appendix B), and HFU, which counts what is
                        recomputed too (Korthikanti+ 2022, arXiv:2205.05198, sec. 6.3)

The checker asks about models from 12 to 128 layers and plans with degrees that are all different,
so that every known mistake has a number of its own; it then says which mistake that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.mfu import known_shares
from paralab.exercises.questions import Mistakes, Reply, ask, size_text
from paralab.exercises.states import RECIPES, known_units
from paralab.spec import ModelSpec
from paralab.theory import needs, training
from paralab.theory.flops import block_flops, head_flops

FLOPS, DAYS, SPLIT, ZERO = "FLOPs of a step", "days", "split over tp and pp", "sharded by ZeRO"
MFU, HFU = "MFU", "HFU"
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
SHARE_CASES = (  # model, samples, seconds of the step, devices, FLOP/s by the data sheet
    ("ptdp-1t", 3072, 102.6, 3072, 312e12),
    ("gpt3-175b", 1536, 13.2, 1024, 989e12),
    ("gpt2", 512, 5.5, 8, 312e12),
)
FROM_STAGE = {"parameters": 3, "gradients": 2, "master": 1, "moments": 1}  # ZeRO's stage
SHARDED = (
    "data parallelism without ZeRO replicates everything",
    "stage 1 shards the optimizer's states, master weights and moments",
    "stage 2 shards the optimizer's states and gradients",
    "stage 3 shards everything, parameters too",
)
ASKED = {
    FLOPS: "four models from 0.1 B to 1 T: to nine digits",
    DAYS: "three trainings, two of them PTD-P's: to 0.1 %",
    SPLIT: "three plans without ZeRO: every state to nine digits",
    ZERO: "five plans, stages 1 to 3: every state to nine digits",
    MFU: "three measured steps, from 0 to 1: to nine digits",
    HFU: "the same steps, with the blocks recomputed",
}


@exercise(
    Takes("step_flops(model, samples)"),
    Takes("training_days(model, tokens, devices, flops)"),
    Takes("states_per_device(model, recipe, tp, pp, dp, zero_stage)"),
    Takes("utilisation(model, samples, seconds, devices, peak)"),
    lab="11",
    asked=ASKED,
)
def training_cost(tries: Tries) -> None:
    parts = (FLOP_CASES, _flops), (DAY_CASES, _days), (STATE_CASES, _states), (SHARE_CASES, _shares)
    cases = [(part, case) for part, (some, _) in enumerate(parts) for case in some]
    questions = [(part, _given(*case)) for part, case in cases]
    for notes, (part, case), reply in ask(tries, cases, questions):
        for limit, notes.where, wrong, right in parts[part][1](reply, *case):
            notes.look(limit, wrong, right)


def _given(name: str, *rest: Any) -> tuple:
    """The arguments of a case, whose model and recipe are there by name."""
    return ModelSpec.preset(name), *(RECIPES.get(one, one) for one in rest)


Judged = Iterator[tuple[str, str, str, str]]  # limit, where, what is wrong, what is right


def _flops(reply: Reply, name: str, samples: int) -> Judged:
    args, show = _given(name, samples), "{:,.6g} FLOPs".format
    right = needs.step_flops(*args, recompute=True)
    wrong = reply.number(right, known_flops(*args).items(), show, " of FLOPs", EXACT)
    yield FLOPS, f"{name}, {samples:,} samples", wrong, show(right)


def _days(reply: Reply, name: str, tokens: float, devices: int, rate: float) -> Judged:
    args, show = _given(name, tokens, devices, rate), "{:,.6g} days".format
    known, right = known_days(*args).items(), right_days(*args)
    where = f"{name}, {tokens / 1e9:g} B tokens on {devices:,} devices of {rate / 1e12:g} TFLOP/s"
    yield DAYS, where, reply.number(right, known, show, " of days", DAYS_TOLERANCE), show(right)


def _states(reply: Reply, name: str, recipe: str, tp: int, pp: int, dp: int, stage: int) -> Judged:
    args = _given(name, recipe, tp, pp, dp, stage)
    right = right_states(*args)
    wrong = reply.states(right, lambda state: known_states(state, *args), EXACT)
    where = f"{name}, {recipe}, tp={tp} pp={pp} dp={dp} zero_stage={stage}"
    yield ZERO if stage else SPLIT, where, wrong, size_text(sum(right.values()))


def _shares(reply: Reply, name: str, samples: int, *rest: Any) -> Judged:
    right = shares(*_given(name, samples, *rest))
    for limit, wrong in reply.numbers(right, EXACT):
        yield limit, f"{name}, {samples:,} samples", wrong, f"{right[limit][0]:.1%}"


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


def right_days(model: ModelSpec, tokens: float, devices: int, flops: float) -> float:
    return needs.training_days(model, tokens=tokens, devices=devices, flops=flops)


def known_days(model: ModelSpec, tokens: float, devices: int, flops: float) -> dict[str, float]:
    """{what was done: the days it gives} of the mistakes that are made on the way to days."""
    right = right_days(model, tokens, devices, flops)
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


def right_states(
    model: ModelSpec, recipe: Mapping[str, int], tp: int, pp: int, dp: int, stage: int
) -> dict[str, float]:
    """{state: bytes} on one device."""
    cut = model.num_params / (tp * pp)
    return {
        state: width * cut / (dp if stage >= FROM_STAGE[state] else 1)
        for state, width in recipe.items()
    }


def known_states(
    state: str, model: ModelSpec, recipe: Mapping[str, int], tp: int, pp: int, dp: int, stage: int
) -> Mistakes:
    """(what was done, the bytes it gives) of the mistakes that are made with one state."""
    whole = model.num_params * recipe[state]
    cut, blocks = whole / (tp * pp), 12 * model.layers * model.hidden**2 * recipe[state]
    return [
        (SHARDED[stage], cut),
        (SHARDED[stage], cut / dp),
        ("that is the whole model's; tp and pp divide it", whole),
        ("pp divides it too", whole / tp),
        ("tp divides it too", whole / pp),
        ("ZeRO shards what tp and pp have left", whole / dp),
        ("pp divides it too", whole / tp / dp),
        ("tp divides it too", whole / pp / dp),
        ("ZeRO's N is dp, not all devices", cut / (tp * pp * dp)),
        *(
            ("12 l h² are the blocks' matrices alone; model.num_params has them all", part)
            for part in (blocks / (tp * pp), blocks / (tp * pp) / dp)
        ),
        *known_units(right_states(model, recipe, tp, pp, dp, stage)[state], recipe[state]),
    ]


def shares(
    model: ModelSpec, samples: int, seconds: float, devices: int, peak: float
) -> dict[str, tuple[float, Mistakes]]:
    """{limit: (the share, the mistakes that are made with it)} of a step with its blocks
    recomputed.
    """
    of = {"seconds": seconds, "devices": devices, "peak": peak}
    mfu, hfu = training.utilisation(model, samples, recompute="full", **of)
    per_token = model.num_params * samples * model.seq_len / (seconds * devices * peak)
    known = (
        (
            ("that is HFU: recomputed FLOPs bring the training no further", hfu),
            ("that is 6 Ψ for every token: attention's scores are missing", 6 * per_token),
        ),
        (
            ("that is MFU: the device makes the forward of the blocks twice", mfu),
            ("that is 4/3 of MFU: the head is not recomputed", 4 / 3 * mfu),
            ("that is 8 Ψ for every token: attention's scores are missing", 8 * per_token),
        ),
    )
    return {
        limit: (right, [*own, *known_shares(right, samples, seconds, devices)])
        for limit, right, own in zip((MFU, HFU), (mfu, hfu), known, strict=True)
    }
