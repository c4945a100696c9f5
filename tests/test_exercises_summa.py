"""Lab 08's exercise: right answers pass, wrong ones are refused by the limits they break."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import bad_answers_summa as bad
import paralab as pl
from test_exercises_zero import defined, missed

SUMMA = pl.exercises.summa
summa = importlib.import_module("paralab.exercises.summa")
ALONE = "it is the one term "
WRONG = [  # answer, limits it breaks, words of the verdict
    (bad.GathersAll, {"memory forward"}, "a whole row is 4"),
    (bad.GathersTheColumn, {"memory forward"}, "blocks of W beside its own, a whole column is 4"),
    (bad.KeepsWhatCame, {"memory forward"}, "blocks of X beside its own, a whole row is 4"),
    (bad.LastTermOnly, {"Y"}, f"q=2, rank (0, 0), block (0, 0) of Y: element (0, 0) is 6.414, "
     f"asked 3.947; {ALONE}X_01 W_10"),
    (bad.OwnBlocksOnly, {"Y", "elements forward"}, "nothing goes through row and column"),
    (bad.ForgetsTheLastStep, {"Y", "elements forward"}, f"{ALONE}X_00 W_00"),
    (bad.RowForColumn, {"Y"}, "q=2, rank (0, 0), block (0, 0) of Y: element (0, 0) is -9.552"),
    (bad.RootIsTheStep, {"Y"}, "q=2: rank 1 raised ValueError: Global rank 0 is not part"),
    (bad.NoWait, {"Y"}, f"{ALONE}X_00 W_00"),
    (bad.SendsTwice, {"elements forward"}, "35,328 elements, asked are 17,664, 2 times as many"),
    (bad.InDouble, {"elements forward"}, "35,328 elements, asked are 17,664, 2 times as many"),
    (bad.OverwritesItsOwn, {"Y", "gradients"}, "q=2, rank (0, 0), block (0, 0) of Y: "),
    (bad.NoReduce, {"gradients", "elements backward"}, f"{ALONE}Y'_00 (W_00)^T"),
    (bad.AllReduces, {"elements backward"}, "52,992 elements, asked are 35,328, 1.5 times"),
    (bad.KeepsTheLastTerm, {"gradients"}, "q=2, rank (0, 0), block (0, 0) of X': "),
    (bad.WeightTransposed, {"gradients"}, "of W': its shape is (6, 48), asked (48, 6)"),
    (bad.ForgetsAGradient, {"gradients", "elements backward"}, f"{ALONE}(X_00)^T Y'_00"),
    (bad.GivesOneGradient, {"Y"}, "q=2: rank 0 raised ValueError: too many values to unpack"),
    (bad.ForwardOnly, {"Y"}, "cannot unpack non-iterable NoneType"),
    (bad.HalfOfThemWait, {"Y"}, "every member has to make the same calls in the same order"),
    (bad.Raises, {"Y"}, "q=2: rank 0 raised KeyError: 'block 7'"),
    (bad.NoForward, {"Y"}, "no attribute 'forward'"),
    (bad.of_three, {"Y"}, "missing 1 required positional argument: 'column'"),
    ("summa", {"Y"}, "asked is a class, yours is 'summa'"),
]  # fmt: skip


@pytest.mark.parametrize("answer, limits, words", WRONG)
def test_a_wrong_summa_is_refused_by_the_limits_it_breaks(answer, limits, words, monkeypatch):
    if "memory forward" not in limits:  # all others show on the smallest grid
        monkeypatch.setattr(summa, "GRIDS", (2,))
    verdict = SUMMA.check(answer, timeout=5)
    assert not verdict and verdict.started and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", [bad.Good, bad.OneBuffer])
def test_a_right_summa_passes_and_says_the_same_twice(answer):
    first, second = SUMMA.check(answer), SUMMA.check(answer)
    assert first.passed, repr(first)
    assert first == second and first._repr_html_() == second._repr_html_()


def test_a_refusal_reads_the_same_twice():
    first, second = (SUMMA.check(bad.AllReduces) for _ in range(2))
    assert first == second and not first


def test_a_class_that_is_not_written_is_not_started_and_neither_is_half_of_one():
    stub = SUMMA.check(defined(SUMMA.stub, "MySumma"))
    assert not stub and not stub.started


def test_the_checkers_blocks_make_the_matrices_again():
    parts = summa.blocks(3, 0)
    for some, (rows, columns) in zip(parts, ((40, 48), (48, 6), (40, 6)), strict=True):
        whole = summa.whole(some)
        assert whole.shape == (3 * rows, 3 * columns)
        assert np.array_equal(whole[rows : 2 * rows, :columns], some[1, 0])
        assert np.array_equal(summa.cut(whole, 3), some)
