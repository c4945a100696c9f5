"""Lab 11: what training a model costs: days and MFU from the seconds of a step, and by formulas.

    step_flops      PTD-P (Narayanan+ 2021, arXiv:2104.04473) eq. 3, with recomputation
    training_days   tokens times FLOPs per token over what the devices do per day
    utilisation     MFU, the model's FLOPs over what the devices could do (PaLM, Chowdhery+ 2022,
                    arXiv:2204.02311, appendix B), and HFU, which counts what is recomputed too
                    (Korthikanti+ 2022, arXiv:2205.05198, sec. 6.3)

The checker's models have 12 to 128 layers, so that every known mistake gives a number of its own,
by which the checker can name it.
"""

from __future__ import annotations

from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import Mistakes, ask
from paralab.exercises.unaided import UNAIDED
from paralab.spec import ModelSpec
from paralab.theory import needs, training
from paralab.theory.flops import block_flops, head_flops

FLOPS, DAYS, MFU, HFU = "FLOPs of a step", "days", "MFU", "HFU"
WARM_REQUIRED = {DAYS: "of two trainings", MFU: "of the same two: a share from 0 to 1"}
WHOLE_STEPS = 1e-4  # relative: days may count the last step as a whole one
WARM_CASES = (  # FLOPs, samples and seconds of a step, samples in all, devices, FLOP/s of each
    (1.9278e19, 1536, 51.4, 219_726_562, 3072, 312e12),
    (6.1e15, 512, 3.7, 4_000_000, 64, 989e12),
)
DAYS_TOLERANCE = 1e-3  # the approximation of eq. 4 is off by at least ten times that
WITHOUT = "nothing is recomputed, and the scores are missing"
EXACT = 1e-9  # relative, for rounding

FLOP_CASES = (("gpt2", 8), ("ptdp-7.5b", 512), ("ptdp-145b", 2304), ("ptdp-1t", 3072))
DAY_CASES = (  # model, tokens, devices, FLOP/s of each: PTD-P sec. 5.1, Table 2, and a small one
    ("gpt3-175b", 300e9, 1024, 140e12),
    ("ptdp-1t", 450e9, 3072, 163e12),
    ("gpt2", 10e9, 8, 60e12),
)
SHARE_CASES = (  # model, samples, seconds of the step, devices, FLOP/s by the data sheet
    ("ptdp-1t", 3072, 102.6, 3072, 312e12),
    ("gpt3-175b", 1536, 13.2, 1024, 989e12),
    ("gpt2", 512, 5.5, 8, 312e12),
)
REQUIRED = {
    FLOPS: "four models of 0.1 billion to 1 trillion parameters: to nine digits",
    DAYS: "three trainings, two of them PTD-P's: to 0.1 %",
    MFU: "three measured steps, from 0 to 1: to nine digits",
    HFU: "the same steps, with the blocks recomputed",
}


# ---- days and MFU --------------------------------------------------------------------------------
@exercise(
    Takes("days_and_mfu(flops, samples, seconds, total, devices, peak)"), required=WARM_REQUIRED
)
def days_and_mfu(tries: Tries) -> None:
    for notes, case, reply in ask(tries, WARM_CASES):
        flops, samples, seconds, total, devices, peak = case
        notes.where = f"{devices:,} devices"
        days = total / samples * seconds / needs.SECONDS_PER_DAY
        mfu = flops / (seconds * devices * peak)
        shared = "all devices work on the same step: its seconds are not divided by their number"
        at_peak = "yours assumes that every device runs at its peak; the seconds are given"
        of_days = [
            ("those are seconds", days * needs.SECONDS_PER_DAY),
            ("those are hours", days * 24),
            ("yours counts a step per sample: a step trains several samples", days * samples),
            (shared, days / devices),
            ("those are device days", days * devices),
            (at_peak, days * mfu),
        ]
        all_samples = "the FLOPs that are given are those of all samples of a step already"
        of_mfu = [*known_shares(mfu, samples, seconds, devices), (all_samples, mfu * samples)]
        right = {DAYS: (days, of_days), MFU: (mfu, of_mfu)}
        for limit, wrong in reply.numbers(right, WHOLE_STEPS):
            notes.each(limit, wrong, "right")


def known_shares(right: float, samples: int, seconds: float, devices: int) -> list:
    return [
        ("that is in per cent", 100 * right),
        ("yours divides by the peak of one device, not of all", right * devices),
        ("yours counts one sample", right / samples),
        ("the FLOPs are not divided by the seconds of the step", right * seconds),
    ]


# ---- by formulas ---------------------------------------------------------------------------------
@exercise(
    Takes("step_flops(model, samples)"),
    Takes("training_days(model, tokens, devices, flops)"),
    Takes("utilisation(model, samples, seconds, devices, peak)"),
    required=REQUIRED,
)
def training_cost(tries: Tries) -> None:
    parts = enumerate((FLOP_CASES, DAY_CASES, SHARE_CASES))
    cases = [(part, name, rest) for part, some in parts for name, *rest in some]
    questions = [(part, (ModelSpec.preset(name), *rest)) for part, name, rest in cases]
    for notes, (part, name, rest), reply in ask(tries, cases, questions, *UNAIDED):
        model, count = ModelSpec.preset(name), rest[0]
        notes.where = f"{name}, {count:,} samples"
        if part == 0:
            right, show = needs.step_flops(model, count, recompute=True), "{:,.6g} FLOPs".format
            wrong = reply.number(right, known_flops(model, count), show, " of FLOPs", EXACT)
            notes.look(FLOPS, wrong, show(right))
        elif part == 1:
            right, show = _days(model, *rest), "{:,.6g} days".format
            devices, rate = f"{rest[1]:,} devices", f"{rest[2] / 1e12:g} TFLOP/s"
            notes.where = f"{name}, {count / 1e9:g} B tokens on {devices} of {rate}"
            known = known_days(model, *rest)
            wrong = reply.number(right, known, show, " of days", DAYS_TOLERANCE)
            notes.look(DAYS, wrong, show(right))
        else:
            both = shares(model, *rest)
            for limit, wrong in reply.numbers(both, EXACT):
                notes.look(limit, wrong, f"{both[limit][0]:.1%}")


def _days(model: ModelSpec, tokens: float, devices: int, flops: float, **how: bool) -> float:
    return needs.training_days(model, tokens=tokens, devices=devices, flops=flops, **how)


def known_flops(model: ModelSpec, samples: int) -> Mistakes:
    blocks, head = model.layers * block_flops(model, samples), head_flops(model, samples)
    linear = 24 * samples * model.seq_len * model.hidden**2 * model.layers
    right, without_scores = 4 * blocks + 3 * head, 4 * linear + 3 * head
    per_token, once = model.num_params * samples * model.seq_len, 3 * (blocks + head)
    yield "yours recomputes nothing: with recomputation a block's forward runs twice", once
    yield "yours recomputes the head too, whose forward runs once", 4 * (blocks + head)
    yield "yours counts forward alone", blocks + head
    yield "backward makes two products for each product of forward", 3 * blocks + 2 * head
    yield "yours counts a multiply-add as one FLOP, and it is two", right / 2
    yield "yours counts one sample", right / samples
    yield "yours counts one token per sample", right / model.seq_len
    yield "yours counts the linear layers alone: attention and the head are missing", 4 * linear
    yield "the head is missing", 4 * blocks
    yield "attention's scores are missing", without_scores
    scores = (right - without_scores) / model.heads
    yield "yours counts attention's scores of one head", without_scores + scores
    said = "attention makes two products, each for all pairs of tokens, masked or not"
    yield said, (right + without_scores) / 2
    yield "that is 8 Ψ per token: an approximation, not the count", 8 * per_token
    yield f"that is 6 Ψ per token: {WITHOUT}", 6 * per_token


def known_days(model: ModelSpec, tokens: float, devices: int, flops: float) -> Mistakes:
    settings = model, tokens, devices, flops
    right = _days(*settings)
    eq4 = 8 * tokens * model.num_params / (devices * flops) / needs.SECONDS_PER_DAY
    low = f"{100 * (1 - eq4 / right):.1f} % too low"
    said = f"that is 8 Ψ per token, {low}: it leaves out attention's scores and counts the "
    yield f"{said}head as if it were a block", eq4
    yield "yours recomputes nothing", _days(*settings, recompute=False)
    yield f"that is 6 Ψ per token: {WITHOUT}", 0.75 * eq4
    yield "those are seconds", right * needs.SECONDS_PER_DAY
    yield "those are hours", right * 24
    yield "that is for one device", right * devices
    yield "tokens are not samples: a sample has model.seq_len of them", right * model.seq_len


def shares(
    model: ModelSpec, samples: int, seconds: float, devices: int, peak: float
) -> dict[str, tuple[float, Mistakes]]:
    """{limit: (right share, known mistakes)} of a step with its blocks recomputed."""
    settings = {"seconds": seconds, "devices": devices, "peak": peak}
    mfu, hfu = training.utilisation(model, samples, recompute="full", **settings)
    per_token = model.num_params * samples * model.seq_len / (seconds * devices * peak)
    known = {
        MFU: [
            ("that is HFU: MFU does not count what is recomputed", hfu),
            ("that is 3/4 of HFU: the head is not recomputed", 3 / 4 * hfu),
            ("that is 6 Ψ per token: attention's scores are missing", 6 * per_token),
        ],
        HFU: [
            ("that is MFU: HFU counts the second forward of the blocks too", mfu),
            ("that is 4/3 of MFU: the head is not recomputed", 4 / 3 * mfu),
            ("that is 8 Ψ per token: attention's scores are missing", 8 * per_token),
        ],
    }
    right = {MFU: mfu, HFU: hfu}
    return {n: (x, known[n] + known_shares(x, samples, seconds, devices)) for n, x in right.items()}
