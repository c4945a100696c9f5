"""Lab 11's warm-up; training_cost has a file of its own."""

import paralab as pl
from judged import Table, altered

WARM = pl.exercises.days_and_mfu
DAYS, MFU = "days", "MFU"
WRONG = [  # text, what stands there instead, limits it breaks, words of the verdict
    (" / 86_400", "", {DAYS}, "those are seconds"),
    ("total / samples", "total", {DAYS}, "a step trains several samples"),
    ("return days, ", "return days, 100 * ", {MFU}, "that is in per cent"),
    ("devices * peak", "peak", {MFU}, "yours divides by the peak of one device, not of all"),
    ("return days, ", "return days, 1.01 * ", {MFU}, "(1.01 times as much)"),
    ("return days, flops / (seconds * devices * peak)",
     "return flops / (seconds * devices * peak), days", {DAYS, MFU},
     "(that is the number for MFU)"),
    ("return days, ", "return days + ", {DAYS, MFU}, "required: (days, MFU), yours is a float"),
    ("* peak)", "* peaks)", {DAYS, MFU}, "raised NameError"),
]  # fmt: skip


def by_steps(flops, samples, seconds, total, devices, peak):
    rate = flops / seconds / devices
    return [seconds * -(-total // samples) / (24 * 60 * 60), rate / peak]  # whole steps


BAD = [(altered("days_and_mfu")((old, new)), limits, words) for old, new, limits, words in WRONG]
TABLE = Table(WARM, BAD, [by_steps], exact=True)
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
    ([("abs(predicted / seconds - 1)", "predicted / seconds - 1")], {INSIDE, OUTSIDE}, "cancel"),
    ([("abs(predicted / seconds - 1)", "abs(seconds / predicted - 1)")], {INSIDE, OUTSIDE},
     "of the rate, not of the seconds"),
    ([("fitted(rows[:i] + rows[i + 1 :])", "rate")], {OUTSIDE}, "in sample: the row"),
    ([("- 1)", "- 1) * 100")], {INSIDE, OUTSIDE}, "(that is in per cent)"),
    ([("return rate, sum(seen) / len(seen), ", "return rate, "),
      ("sum(unseen) / len(unseen)", "sum(unseen) / len(unseen), sum(seen) / len(seen)")],
     {INSIDE, OUTSIDE}, "yours 0.696315 (that is the error out of sample)"),
    ([("return rate, ", "return ")], EVERY,
     "required: (rate, error in sample, error out of sample), yours is a tuple of length 2"),
    ([("rows[:i] + rows[i + 1 :]", "[other for other in rows if other != rows[i]]")], {OUTSIDE},
     "yours leaves out all rows that equal the predicted one"),
    ([(MEAN, "return math.prod(map(math.exp, logs)) ** (1 / len(logs))")], EVERY,
     "40 rows: required: 1.00841e+14, yours inf (the product of many rates overflows"),
]  # fmt: skip


BAD_FITS = [(altered("own_fit")(*pairs), *row) for pairs, *row in WRONG_FITS]
FITS = Table(FIT, BAD_FITS, exact=True)
test_a_wrong_fit_is_refused, test_a_right_fit_passes, test_the_stub_of_a_fit = FITS.tests()
