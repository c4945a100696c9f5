"""Lab 11's exercises: days and MFU of a log, a fit, and what a training costs."""

import importlib
import itertools
import math

import paralab as pl
from judged import Table, altered, stored
from paralab.theory import needs

WARM = pl.exercises.days_and_mfu
WRONG = [  # text, what stands there instead, limits it breaks, words of the verdict
    (" / 86_400", "", {"days"}, "those are seconds"),
    (" / 86_400", " * devices / 86_400", {"days"}, "those are device days"),
    ("* seconds / 86_400", "* flops / (devices * peak) / 86_400", {"days"},
     "yours assumes that every device runs at its peak; the seconds are given"),
    ("total / samples", "total", {"days"}, "a step trains several samples"),
    ("return days, ", "return days, 100 * ", {"MFU"}, "that is in per cent"),
    ("devices * peak", "peak", {"MFU"}, "yours divides by the peak of one device, not of all"),
    ("return days, ", "return days, 1.01 * ", {"MFU"}, "(1.01 times as much)"),
    ("return days, flops / (seconds * devices * peak)",
     "return flops / (seconds * devices * peak), days", {"days", "MFU"},
     "(that is the number for MFU)"),
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
COST = pl.exercises.training_cost
cost = importlib.import_module("paralab.exercises.cost")
FLOPS, DAYS, MFU, HFU = COST.required
PARTS = ("step_flops", "training_days", "utilisation")
COUNTED = stored("training_cost", *PARTS)


def with_part(place, answer):
    return (*COUNTED[:place], answer, *COUNTED[place + 1 :])


# ---- FLOPs of a step -----------------------------------------------------------------------------
def eq3(m, n, head=1.0):
    """Narayanan et al., Eq. 3. head: factor on the FLOPs of the output matrix."""
    s, h, layers = m.seq_len, m.hidden, m.layers
    return 96 * n * s * layers * h**2 * (1 + s / (6 * h) + head * m.vocab / (16 * layers * h))


WRONG_FLOPS = [  # answer, words of the verdict
    (lambda m, n: 0.75 * eq3(m, n, head=4 / 3), "(yours recomputes nothing: with recomputation"),
    (lambda m, n: eq3(m, n, head=4 / 3), "yours recomputes the head too"),
    (lambda m, n: eq3(m, n) / 2, "yours counts a multiply-add as one FLOP"),
    (lambda m, n: eq3(m, n, head=0), "(the head is missing)"),
    (lambda m, n: eq3(m, n) - 8 * n * m.layers * m.seq_len**2 * m.hidden,
     "attention makes two products, each for all pairs of tokens, masked or not"),
    (lambda m, n: 8 * m.num_params * n * m.seq_len, "that is 8 Ψ per token"),
    (lambda m, n: eq3(m, n) * 1.001, "(1.001 times as much)"),
    (lambda m, n: math.nan, "yours nan FLOPs"),
    (lambda m, n: needs.step_flops(m, n, recompute=True),
     "so this function of it may not be called"),
]  # fmt: skip


# ---- days ----------------------------------------------------------------------------------------
def days(m, tokens, devices, flops, per_token=None):
    per_token = eq3(m, 1) / m.seq_len if per_token is None else per_token(m)
    return tokens * per_token / (devices * flops) / 86_400


WRONG_DAYS = [
    (lambda *a: days(*a, lambda m: 8 * m.num_params), "8 Ψ per token, 2.6 % too low"),
    (lambda m, t, n, x: days(m, t * m.seq_len, n, x), "tokens are not samples"),
    (lambda *a: 1.002 * days(*a), "34.7319 days, yours 34.8013"),
    (lambda *a: "35 days", "required: a number of days, yours is '35 days'"),
]


# ---- utilisation ---------------------------------------------------------------------------------
def mfu_hfu(change):
    """An answer: what ``change`` makes of the right pair and of what was asked."""
    return lambda *asked: change(*COUNTED[2](*asked), *asked)


WRONG_SHARES = [  # answer, limits it breaks, words of the verdict
    (
        mfu_hfu(lambda mfu, hfu, *_: (hfu, hfu)),
        {MFU},
        "that is HFU: MFU does not count what is",
    ),
    (mfu_hfu(lambda mfu, hfu, *_: (mfu, mfu)), {HFU}, "that is MFU: HFU counts the second forward"),
    (mfu_hfu(lambda mfu, hfu, *_: (mfu, 4 / 3 * mfu)), {HFU}, "the head is not recomputed"),
    (
        mfu_hfu(lambda mfu, hfu, *_: (3 / 4 * hfu, hfu)),
        {MFU},
        "that is 3/4 of HFU: the head is",
    ),
    (mfu_hfu(lambda mfu, hfu, *_: (100 * mfu, 100 * hfu)), {MFU, HFU}, "that is in per cent"),
    (mfu_hfu(lambda mfu, hfu, m, n, t, d, x: (mfu * d, hfu * d)), {MFU, HFU}, "of one device"),
    (mfu_hfu(lambda mfu, hfu, *_: mfu), {MFU, HFU}, "required: (MFU, HFU), yours is a float"),
    (mfu_hfu(lambda mfu, hfu, m, *_: (m.flops, hfu)), {MFU, HFU}, "raised AttributeError: 'ModelS"),
]

WRONG_COSTS = [
    *((with_part(0, answer), {FLOPS}, words) for answer, words in WRONG_FLOPS),
    *((with_part(1, answer), {DAYS}, words) for answer, words in WRONG_DAYS),
    *((with_part(2, answer), *row) for answer, *row in WRONG_SHARES),
]
ROUNDED = [
    with_part(0, eq3),
    with_part(1, lambda *a: float(f"{days(*a):.4g}")),
]
COSTS = Table(COST, WRONG_COSTS, ROUNDED, exact=True)
test_a_wrong_cost_is_refused, test_a_right_cost_passes, test_the_stub_of_a_cost = COSTS.tests()


# ---- the checker itself --------------------------------------------------------------------------
def test_every_known_mistake_has_a_number_of_its_own():
    """Two mistakes that gave one number, or one that gave the right one, would be named wrongly."""
    for name, samples in cost.FLOP_CASES:
        model = pl.ModelSpec.preset(name)
        right = needs.step_flops(model, samples, recompute=True)
        apart(right, cost.known_flops(model, samples), cost.EXACT)
    for name, *asked in cost.DAY_CASES:
        model = pl.ModelSpec.preset(name)
        apart(days(model, *asked), cost.known_days(model, *asked), cost.DAYS_TOLERANCE)
    for name, *asked in cost.SHARE_CASES:
        for right, known in cost.shares(pl.ModelSpec.preset(name), *asked).values():
            apart(right, known, cost.EXACT)


def apart(right, known, tolerance):
    for a, b in itertools.combinations([right, *(number for _, number in known)], 2):
        assert not math.isclose(a, b, rel_tol=2 * tolerance), (a, b)


def test_functions_that_are_not_written_yet_leave_their_limits_open():
    def later(*asked):
        raise NotImplementedError

    assert not COST.check(later, later, later).started
    two = "there are 2 more functions to write"
    for verdict in (COST.check(COUNTED[0]), COST.check(COUNTED[0], later, later)):
        assert not verdict and [row.ok for row in verdict.rows] == [True, *[None] * 3]
        assert two in repr(verdict)
    assert "there is one more function to write" in repr(COST.check(*COUNTED[:2], later))
    alone = COST.check(later, later, COUNTED[2])
    assert [row.ok for row in alone.rows] == [None, None, True, True]
    assert alone.started
