"""Lab 11's warm-up; training_cost has a file of its own."""

from __future__ import annotations

import pytest

import paralab as pl
from judged import defined, judged, missed
from paralab.exercises import sources

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
    ("return days, ", "return days + ", {DAYS, MFU}, "required: (days, MFU), yours is a float"),
    ("* peak)", "* peaks)", {DAYS, MFU}, "raised NameError"),
]


def second(name):
    return defined(sources.solution(sources.answer(f"{name}_other")), name)


BAD = [defined(TEXT.replace(old, new), "days_and_mfu") for old, new, *_ in WRONG]


def by_steps(flops, samples, seconds, total, devices, peak):
    rate = flops / seconds / devices
    return [seconds * (total / samples) / (24 * 60 * 60), rate / peak]


RIGHT = [defined(TEXT, "days_and_mfu"), second("days_and_mfu"), by_steps]
ALL = [*BAD, *RIGHT, defined(WARM.stub, "days_and_mfu")]


@pytest.mark.parametrize("at", range(len(WRONG)))
def test_a_wrong_answer_is_refused_and_its_mistake_is_named(at):
    verdict = judged(WARM, BAD[at], ALL)
    assert missed(verdict) == WRONG[at][2], verdict.table.to_string()
    assert WRONG[at][3] in verdict.said, verdict.said


def test_right_answers_pass_and_the_stub_is_not_started():
    assert all(judged(WARM, answer, ALL).passed for answer in RIGHT)
    assert not judged(WARM, ALL[-1], ALL).started


# ---- go further: a fit of one's own --------------------------------------------------------------
FIT = pl.exercises.own_fit
FITTED = str(FIT.solution())
RATE, INSIDE, OUTSIDE = "rate", "error in sample", "error out of sample"
MEAN = "return math.exp(sum(logs) / len(logs))"
LOGS = "math.log(flops / (devices * seconds))"
WRONG_FITS = {  # text, what stands there instead, limits it breaks, words of the verdict
    "arithmetic": (
        [(LOGS, "flops / (devices * seconds)"), (MEAN, "return sum(logs) / len(logs)")],
        {RATE, INSIDE, OUTSIDE},
        "the arithmetic mean of the rates",
    ),
    "all together": (
        [(MEAN, "return sum(r[0] for r in some) / sum(r[1] * r[2] for r in some)")],
        {RATE, INSIDE, OUTSIDE},
        "all FLOPs over all device seconds",
    ),
    "median": (
        [(MEAN, "import statistics; return math.exp(statistics.median(logs))")],
        {RATE, INSIDE, OUTSIDE},
        "yours ",
    ),
    "no devices": (
        [("(devices * seconds)", "seconds"), ("(devices * rate)", "rate")],
        {RATE, INSIDE, OUTSIDE},
        "the rate of all devices together",
    ),
    "signs": (
        [("abs(predicted / seconds - 1)", "predicted / seconds - 1")],
        {INSIDE, OUTSIDE},
        "cancel",
    ),
    "of the rate": (
        [("abs(predicted / seconds - 1)", "abs(seconds / predicted - 1)")],
        {INSIDE, OUTSIDE},
        "of the rate, not of the seconds",
    ),
    "never left out": (
        [("fitted(rows[:i] + rows[i + 1 :])", "rate")],
        {OUTSIDE},
        "in sample: the row",
    ),
    "left out one too many": (
        [("rows[i + 1 :]", "rows[i + 2 :]")],
        {RATE, INSIDE, OUTSIDE},
        "ZeroDivisionError",
    ),
    "per cent": ([("- 1)", "- 1) * 100")], {INSIDE, OUTSIDE}, "per cent"),
    "teraflops": ([("return rate,", "return rate / 1e12,")], {RATE}, "TFLOP/s"),
    "largest": ([("sum(unseen) / len(unseen)", "max(unseen)")], {OUTSIDE}, "the largest error"),
    "two numbers": ([("return rate, ", "return ")], {RATE, INSIDE, OUTSIDE}, "required: (rate, "),
    "raises": ([("rate = fitted(rows)", "rate = fit(rows)")], {RATE, INSIDE, OUTSIDE}, "NameError"),
}


def changed(changes):
    text = FITTED
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return defined(text, "own_fit")


def by_statistics(rows):
    """An unusual answer: the standard library's geometric mean."""
    import statistics

    def rate(some):
        return statistics.geometric_mean([c / (n * t) for c, n, t in some])

    def off(left_out):
        kept = (lambda i: [r for k, r in enumerate(rows) if k != i]) if left_out else lambda i: rows
        return statistics.fmean(
            abs(c / (n * rate(kept(i))) / t - 1) for i, (c, n, t) in enumerate(rows)
        )

    return rate(rows), off(False), off(True)


RIGHT_FITS = [defined(FITTED, "own_fit"), second("own_fit"), by_statistics]
BAD_FITS = {name: changed(row[0]) for name, row in WRONG_FITS.items()}
FITS = [*BAD_FITS.values(), *RIGHT_FITS, defined(FIT.stub, "own_fit")]


@pytest.mark.parametrize("name", WRONG_FITS)
def test_a_wrong_fit_is_refused_and_its_mistake_is_named(name):
    _, limits, words = WRONG_FITS[name]
    verdict = judged(FIT, BAD_FITS[name], FITS)
    assert missed(verdict) == limits, verdict.table.to_string()
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


def test_right_fits_pass_and_the_stub_is_not_started():
    assert all(judged(FIT, answer, FITS).passed for answer in RIGHT_FITS)
    assert not judged(FIT, FITS[-1], FITS).started
