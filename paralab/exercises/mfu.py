"""Lab 11's warm-up: days of a training and MFU, from the seconds of a step.

MFU is the model's FLOPs divided by those that the devices could do in that time (Chowdhery+ 2022,
arXiv:2204.02311, appendix B); days are steps times seconds.
"""

from __future__ import annotations

from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import ask

DAYS, MFU = "days", "MFU"
REQUIRED = {DAYS: "of two trainings", MFU: "of the same two: a share from 0 to 1"}
TOLERANCE = 1e-4  # relative: days may count the last step as a whole one
CASES = (  # FLOPs, samples and seconds of a step, samples in all, devices, FLOP/s of each
    (1.9278e19, 1536, 51.4, 219_726_562, 3072, 312e12),
    (6.1e15, 512, 3.7, 4_000_000, 64, 989e12),
)


@exercise(Takes("days_and_mfu(flops, samples, seconds, total, devices, peak)"), required=REQUIRED)
def days_and_mfu(tries: Tries) -> None:
    for notes, case, reply in ask(tries, CASES):
        flops, samples, seconds, total, devices, peak = case
        notes.where = f"{devices:,} devices"
        days = total / samples * seconds / 86_400
        mfu = flops / (seconds * devices * peak)
        shared = "all devices work on the same step: its seconds are not divided by their number"
        known_days = [
            ("those are seconds", days * 86_400),
            ("those are hours", days * 24),
            ("yours counts a step per sample: a step trains several samples", days * samples),
            (shared, days / devices),
            ("those are device days", days * devices),
            ("yours assumes that every device runs at its peak; the seconds are given", days * mfu),
        ]
        known_mfu = [
            *known_shares(mfu, samples, seconds, devices),
            ("the FLOPs that are given are those of all samples of a step already", mfu * samples),
        ]
        right = {DAYS: (days, known_days), MFU: (mfu, known_mfu)}
        for limit, wrong in reply.numbers(right, TOLERANCE):
            notes.each(limit, wrong, "right")


def known_shares(right: float, samples: int, seconds: float, devices: int) -> list:
    """(words, share) of the known mistakes with MFU and HFU."""
    return [
        ("that is in per cent", 100 * right),
        ("yours divides by the peak of one device, not of all", right * devices),
        ("yours counts one sample", right / samples),
        ("the FLOPs are not divided by the seconds of the step", right * seconds),
    ]
