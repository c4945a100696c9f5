"""Lab 11's warm-up: days of a training and MFU, from the seconds of a step.

MFU is the model's FLOPs over what the devices could do in that time (Chowdhery+ 2022,
arXiv:2204.02311, appendix B); days are steps times seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from paralab.exercises.exercise import exercise
from paralab.exercises.questions import Mistakes, asked, replies, wrong_numbers
from paralab.exercises.tries import Takes, Try

DAYS, MFU = "days", "MFU"
ASKED = {DAYS: "of two trainings", MFU: "of the same: a share from 0 to 1"}
CASES = (  # FLOPs, samples and seconds of a step, samples in all, devices, FLOP/s of each
    (1.9278e19, 1536, 51.4, 219_726_562, 3072, 312e12),
    (6.1e15, 512, 3.7, 4_000_000, 64, 989e12),
)


@exercise(
    Takes("a function", "days_and_mfu(flops, samples, seconds, total, devices, peak)"),
    lab="11",
    asked=ASKED,
)
def days_and_mfu(tries: Sequence[Try], timeout: float) -> None:
    for notes, case, reply in replies(tries, CASES, timeout, asked, [(0, case) for case in CASES]):
        flops, samples, seconds, total, devices, peak = case
        days = total / samples * seconds / 86_400
        mfu = flops / (seconds * devices * peak)
        right = {
            DAYS: (days, _known_days(days, samples, devices)),
            MFU: (mfu, _known_mfu(mfu, devices, samples, seconds)),
        }
        for limit, wrong in wrong_numbers(reply, right, 1e-6):
            notes.look(limit, f"{devices:,} devices" if wrong else "", wrong, "right")


def _known_days(days: float, samples: int, devices: int) -> Mistakes:
    return [
        ("those are seconds", days * 86_400),
        ("those are hours", days * 24),
        ("a step trains several samples", days * samples),
        ("all devices work on the same step: the seconds are not divided by them", days / devices),
        ("those are device days", days * devices),
    ]


def _known_mfu(mfu: float, devices: int, samples: int, seconds: float) -> Mistakes:
    return [
        ("that is in per cent", 100 * mfu),
        ("that is the peak of one device", mfu * devices),
        ("a step's FLOPs are of all its samples already", mfu * samples),
        ("that is per step, not per second", mfu * seconds),
        ("that is its inverse", 1 / mfu),
        ("that is with everything recomputed, HFU", mfu * 4 / 3),
    ]
