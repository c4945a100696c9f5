"""Lab 11's warm-up; training_cost has a file of its own."""

import statistics

import paralab as pl
from judged import Table, altered

WARM = pl.exercises.days_and_mfu
DAYS, MFU = "days", "MFU"
WRONG = [  # text, what stands there instead, limits it breaks, words of the verdict
    (" / 86_400", "", {DAYS}, "those are seconds"),
    (" / 86_400", " / 3_600", {DAYS}, "those are hours"),
    ("total / samples", "total", {DAYS}, "a step trains several samples"),
    ("seconds / 86_400", "seconds / 86_400 / devices", {DAYS}, "its seconds are not divided"),
    ("seconds / 86_400", "seconds / 86_400 * devices", {DAYS}, "those are device days"),
    ("return days, ", "return days, 100 * ", {MFU}, "that is in per cent"),
    ("devices * peak", "peak", {MFU}, "yours divides by the peak of one device, not of all"),
    ("return days, ", "return days, samples * ", {MFU},
     "are those of all samples of a step already"),
    ("(seconds * devices", "(devices", {MFU},
     "the FLOPs are not divided by the seconds of the step"),
    ("return days, ", "return days * flops / (seconds * devices * peak), ", {DAYS},
     "yours assumes that every device runs at its peak"),
    ("return days, ", "return days, 1.01 * ", {MFU}, "(1.01 times as much)"),
    ("return days, flops / (seconds * devices * peak)",
     "return flops / (seconds * devices * peak), days", {DAYS, MFU},
     "(that is the number for MFU)"),
    ("return days, ", "return days + ", {DAYS, MFU}, "required: (days, MFU), yours is a float"),
    ("* peak)", "* peaks)", {DAYS, MFU}, "raised NameError"),
]  # fmt: skip


def by_steps(flops, samples, seconds, total, devices, peak):
    rate = flops / seconds / devices
    return [seconds * (total / samples) / (24 * 60 * 60), rate / peak]


def in_whole_steps(flops, samples, seconds, total, devices, peak):
    return -(-total // samples) * seconds / 86_400, flops / seconds / devices / peak


BAD = [(altered("days_and_mfu")((old, new)), limits, words) for old, new, limits, words in WRONG]
TABLE = Table(WARM, BAD, [by_steps, in_whole_steps], exact=True)
test_a_wrong_answer_is_refused, test_a_right_answer_passes, test_its_stub = TABLE.tests()


# ---- go further: a fit of one's own --------------------------------------------------------------
FIT = pl.exercises.own_fit
RATE, INSIDE, OUTSIDE = "rate", "error in sample", "error out of sample"
MEAN = "return math.exp(sum(logs) / len(logs))"
LOGS = "math.log(flops / (devices * seconds))"
EVERY = {RATE, INSIDE, OUTSIDE}
WRONG_FITS = [  # changes of the answer, limits it breaks, words of the verdict
    ([(LOGS, "flops / (devices * seconds)"), (MEAN, "return sum(logs) / len(logs)")], EVERY,
     "the arithmetic mean of the rates"),
    ([(MEAN, "return sum(r[0] for r in some) / sum(r[1] * r[2] for r in some)")], EVERY,
     "all FLOPs over all device seconds"),
    ([("(devices * seconds)", "seconds"), ("(devices * rate)", "rate")], EVERY,
     "the rate of all devices together"),
    ([("abs(predicted / seconds - 1)", "predicted / seconds - 1")], {INSIDE, OUTSIDE}, "cancel"),
    ([("abs(predicted / seconds - 1)", "abs(seconds / predicted - 1)")], {INSIDE, OUTSIDE},
     "of the rate, not of the seconds"),
    ([("fitted(rows[:i] + rows[i + 1 :])", "rate")], {OUTSIDE}, "in sample: the row"),
    ([("rows[i + 1 :]", "rows[i + 2 :]")], EVERY, "ZeroDivisionError"),
    ([("- 1)", "- 1) * 100")], {INSIDE, OUTSIDE}, "(that is in per cent)"),
    ([(MEAN, "return len(logs) / sum(math.exp(-one) for one in logs)")], EVERY, "the harmonic"),
    ([("return rate,", "return rate / 1e12,")], {RATE}, "(that is in TFLOP/s)"),
    ([("return rate,", "return math.log(rate),")], {RATE}, "(that is the logarithm of the rate)"),
    ([("return rate, sum(seen) / len(seen), ", "return rate, "),
      ("sum(unseen) / len(unseen)", "sum(unseen) / len(unseen), sum(seen) / len(seen)")],
     {INSIDE, OUTSIDE}, "yours 0.696315 (that is the error out of sample)"),
    ([("return rate, ", "return ")], EVERY,
     "required: (rate, error in sample, error out of sample), yours is a tuple of length 2"),
    ([("rate = fitted(rows)", "rate = fit(rows)")], EVERY, "NameError"),
    ([("rows[:i] + rows[i + 1 :]", "[other for other in rows if other != rows[i]]")], {OUTSIDE},
     "yours leaves out all rows that equal the predicted one"),
    ([(MEAN, "return math.prod(map(math.exp, logs)) ** (1 / len(logs))")], EVERY,
     "40 rows: required: 1.00841e+14, yours inf (the product of many rates overflows"),
]  # fmt: skip


def by_statistics(rows):
    """An unusual answer: the standard library's geometric mean."""

    def rate(some):
        return statistics.geometric_mean([c / (n * t) for c, n, t in some])

    def off(left_out):
        kept = (lambda i: [r for k, r in enumerate(rows) if k != i]) if left_out else lambda i: rows
        return statistics.fmean(
            abs(c / (n * rate(kept(i))) / t - 1) for i, (c, n, t) in enumerate(rows)
        )

    return rate(rows), off(False), off(True)


BAD_FITS = [(altered("own_fit")(*pairs), *row) for pairs, *row in WRONG_FITS]
FITS = Table(FIT, BAD_FITS, [by_statistics], exact=True)
test_a_wrong_fit_is_refused, test_a_right_fit_passes, test_the_stub_of_a_fit = FITS.tests()
