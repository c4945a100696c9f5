"""Lab 11's warm-up; training_cost has a file of its own."""

from __future__ import annotations

import pytest

import paralab as pl
from judged import defined, judged, missed

WARM = pl.exercises.days_and_mfu
TEXT = str(WARM.solution())
DAYS, MFU = "days", "MFU"
WRONG = [  # text, what stands there instead, limits it breaks, words of the verdict
    (" / 86_400", "", {DAYS}, "those are seconds"),
    (" / 86_400", " / 3_600", {DAYS}, "those are hours"),
    ("total / samples", "total", {DAYS}, "a step trains several samples"),
    ("seconds / 86_400", "seconds / 86_400 / devices", {DAYS}, "the seconds are not divided"),
    ("seconds / 86_400", "seconds / 86_400 * devices", {DAYS}, "those are device days"),
    ("return days, ", "return days, 100 * ", {MFU}, "that is in per cent"),
    ("devices * peak", "peak", {MFU}, "that is the peak of one device"),
    ("return days, ", "return days, samples * ", {MFU}, "are of all its samples already"),
    ("(seconds * devices", "(devices", {MFU}, "that is per step, not per second"),
    ("return days, ", "return days, 4 / 3 * ", {MFU}, "with everything recomputed, HFU"),
    ("return days, ", "return days, 1.01 * ", {MFU}, "(1.01 times as much)"),
    ("return days, ", "return days + ", {DAYS, MFU}, "required: (days, mfu), yours is a float"),
    ("* peak)", "* peaks)", {DAYS, MFU}, "raised NameError"),
]
BAD = [defined(TEXT.replace(old, new), "days_and_mfu") for old, new, *_ in WRONG]


def by_steps(flops, samples, seconds, total, devices, peak):
    rate = flops / seconds / devices
    return [seconds * (total / samples) / (24 * 60 * 60), rate / peak]


def by_throughput(flops, samples, seconds, total, devices, peak):
    per_day = samples / seconds * 86_400
    return total / per_day, samples / seconds * (flops / samples) / (devices * peak)


RIGHT = [defined(TEXT, "days_and_mfu"), by_steps, by_throughput]
ALL = [*BAD, *RIGHT, defined(WARM.stub, "days_and_mfu")]


@pytest.mark.parametrize("at", range(len(WRONG)))
def test_a_wrong_answer_is_refused_and_its_mistake_is_named(at):
    verdict = judged(WARM, BAD[at], ALL)
    assert missed(verdict) == WRONG[at][2], verdict.table.to_string()
    assert WRONG[at][3] in verdict.said, verdict.said


def test_right_answers_pass_and_the_stub_is_not_started():
    assert all(judged(WARM, answer, ALL).passed for answer in RIGHT)
    assert not judged(WARM, ALL[-1], ALL).started
