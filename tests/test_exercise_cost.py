"""Lab 11's exercise: right answers pass, a wrong one is refused and told which mistake it is."""

import importlib
import itertools
import math

import paralab as pl
from judged import Table, stored
from paralab.theory import needs

COST = pl.exercises.training_cost
cost = importlib.import_module("paralab.exercises.cost")
FLOPS, DAYS, MFU, HFU = COST.required
PARTS = ("step_flops", "training_days", "utilisation")
RIGHT = stored("training_cost", *PARTS)


def with_part(place, answer):
    return (*RIGHT[:place], answer, *RIGHT[place + 1 :])


# ---- FLOPs of a step -----------------------------------------------------------------------------
def eq3(m, n, head=1.0):
    """Narayanan et al., Eq. 3. head: factor on the FLOPs of the output matrix."""
    s, h, layers = m.seq_len, m.hidden, m.layers
    return 96 * n * s * layers * h**2 * (1 + s / (6 * h) + head * m.vocab / (16 * layers * h))


def raises(m, n):
    return m.width


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
    (raises, ("gpt2, 8 samples: raised AttributeError: 'ModelSpec' object has no",
              "of test_exercise_cost.py in raises: return m.width")),
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
    return lambda *asked: change(*RIGHT[2](*asked), *asked)


WRONG_SHARES = [  # answer, limits it breaks, words of the verdict
    (mfu_hfu(lambda mfu, hfu, *_: (hfu, hfu)), {MFU}, "that is HFU: MFU does not count what is"),
    (mfu_hfu(lambda mfu, hfu, *_: (mfu, mfu)), {HFU}, "that is MFU: HFU counts the second forward"),
    (mfu_hfu(lambda mfu, hfu, *_: (mfu, 4 / 3 * mfu)), {HFU}, "the head is not recomputed"),
    (mfu_hfu(lambda mfu, hfu, *_: (3 / 4 * hfu, hfu)), {MFU}, "that is 3/4 of HFU: the head is"),
    (mfu_hfu(lambda mfu, hfu, *_: (100 * mfu, 100 * hfu)), {MFU, HFU}, "that is in per cent"),
    (mfu_hfu(lambda mfu, hfu, m, n, t, d, x: (mfu * d, hfu * d)), {MFU, HFU}, "of one device"),
    (mfu_hfu(lambda mfu, hfu, *_: (mfu, 1.01 * hfu)), {HFU}, "(1.01 times as much)"),
    (mfu_hfu(lambda mfu, hfu, *_: mfu), {MFU, HFU}, "required: (MFU, HFU), yours is a float"),
    (mfu_hfu(lambda mfu, hfu, m, *_: (m.flops, hfu)), {MFU, HFU}, "raised AttributeError"),
]

WRONG = [
    *((with_part(0, answer), {FLOPS}, words) for answer, words in WRONG_FLOPS),
    *((with_part(1, answer), {DAYS}, words) for answer, words in WRONG_DAYS),
    *((with_part(2, answer), *row) for answer, *row in WRONG_SHARES),
]
ROUNDED = [
    with_part(0, eq3),
    with_part(1, lambda *a: float(f"{days(*a):.4g}")),
]
TABLE = Table(COST, WRONG, ROUNDED, exact=True)
test_a_wrong_cost_is_refused, test_a_right_cost_passes, test_its_stub = TABLE.tests()


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
    for verdict in (COST.check(RIGHT[0]), COST.check(RIGHT[0], later, later)):
        assert not verdict and [row.ok for row in verdict.rows] == [True, *[None] * 3]
        assert two in repr(verdict)
    assert "there is one more function to write" in repr(COST.check(*RIGHT[:2], later))
    alone = COST.check(later, later, RIGHT[2])
    assert [row.ok for row in alone.rows] == [None, None, True, True]
    assert alone.started
