"""Lab 08's exercises: right answers pass, wrong ones are refused by the limits they break."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import bad_answers_08 as bad
import paralab as pl
from judged import assert_reads_the_same_alone, judged, missed
from paralab.exercises import sources

SUMMA = pl.exercises.summa
summa = importlib.import_module("paralab.exercises.summa")
ALONE = "it is the one term "
WRONG = [  # answer, limits it breaks, words of the verdict
    (bad.GathersAll, {"memory forward"}, "a whole row is 4"),
    (bad.GathersTheColumn, {"memory forward"}, "of W in addition to its own, a whole column"),
    (bad.ColumnFirst, {"memory forward"}, "holds 3.4 blocks of W in addition to its own, a whole"),
    (bad.LastTermOnly, {"Y"}, f"{ALONE}X_01 W_10, to which no other"),
    (bad.OwnBlocksOnly, {"Y", "elements forward"}, "nothing is sent in row and column"),
    (bad.RowForColumn, {"Y"}, "; X went along the columns and W along the rows"),
    (bad.RootIsTheStep, {"Y"}, "raised ValueError: rank=0: no member of the group; legal"),
    (bad.NoWait, {"Y"}, "q=2: rank 0 never waits for broadcast #0"),
    (bad.SendsTwice, {"elements forward"}, "35,328 elements, required: 17,664, 2 times as many"),
    (bad.OverwritesItsOwn, {"Y", "gradients"}, "; forward overwrites its x or w, which"),
    (bad.NoReduce, {"gradients", "elements backward"}, f"{ALONE}dY_00 (W_00)ᵀ"),
    (bad.AllReduces, {"elements backward"}, "52,992 elements, required: 35,328, 1.5 times"),
    (bad.WeightTransposed, {"gradients"}, "of dW has shape (6, 48), required: (48, 6)"),
    (bad.ForgetsAGradient, {"gradients", "elements backward"}, f"{ALONE}(X_00)ᵀ dY_00"),
    (bad.GivesOneGradient, {"Y"}, "q=2: rank 0 raised ValueError: too many values to unpack"),
    (bad.ForwardOnly, {"Y"}, "cannot unpack non-iterable NoneType"),
    (bad.HalfOfThemWait, {"Y"}, "every member has to make the same calls in the same order"),
    (bad.Raises, {"Y"}, "q=2: rank 0 raised KeyError: 'block 7'"),
    (bad.NoForward, {"Y"}, "no method forward and no backward"),
    (bad.of_three, {"Y"}, "missing a required argument: 'column'"),
    (bad.Sleeps, {"Y"}, "q=2: rank 0 never waits for broadcast #0"),
    (bad.NumpyRows, {"memory forward"}, "q=4: rank "),
    ("summa", {"Y"}, "required: a class, yours is 'summa'"),
]  # fmt: skip


def stored(name, *parts):
    """The parts of an answer of answers/."""
    names = {"__name__": "__main__"}
    exec(sources.solution(sources.answer(name)), names)
    return tuple(names[part] for part in parts)


RIGHT = [bad.Good, bad.OneBuffer, stored("summa", "MySumma"), stored("summa_other", "MySumma")]
LARGE = [*(answer for answer, limits, _ in WRONG if "memory forward" in limits), *RIGHT]
SMALL = [row[0] for row in WRONG if row[0] not in LARGE]  # they show on the smallest grid


@pytest.mark.parametrize("answer, limits, words", WRONG)
def test_a_wrong_summa_is_refused_by_the_limits_it_breaks(answer, limits, words, monkeypatch):
    if answer not in LARGE:
        monkeypatch.setattr(summa, "GRIDS", (2,))
    table = LARGE if answer in LARGE else SMALL
    verdict = judged(SUMMA, answer, table, alone=(bad.RootIsTheStep, bad.HalfOfThemWait))
    assert not verdict and verdict.started and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", RIGHT)
def test_a_right_summa_passes(answer):
    verdict = judged(SUMMA, answer, LARGE)
    assert verdict.passed, repr(verdict)


def test_two_verdicts_on_one_answer_are_the_same():
    assert_reads_the_same_alone(SUMMA, bad.GathersAll, LARGE)


def test_the_right_blocks_are_those_of_the_whole_matrices():
    """The checker's own reference against NumPy's product."""
    q, number = 3, 0
    parts = summa.blocks(7, q, number)
    x, w, dy = (np.block([list(row) for row in one.astype(float)]) for one in parts)
    for name, whole in (("y", x @ w), ("dx", dy @ w.T), ("dw", x.T @ dy)):
        rows = [np.split(row, q, axis=1) for row in np.split(whole, q, axis=0)]
        results = [{"seed": 7, name: [block]} for row in rows for block in row]
        assert summa._wrong(results, name, number, q) == ""
        results[4][name][0] = 2 * results[4][name][0]
        assert "rank (1, 1): block of" in summa._wrong(results, name, number, q)


# ---- groups of rows and columns, and Cannon's algorithm ------------------------------------------
GROUPS, CANNON = "grid_groups", "cannon"
MORE = {  # exercise: [(answer, limits it breaks, words of the verdict)]
    GROUPS: [
        (bad.groups_swapped, {"row", "column"}, "[0, 2], required: [0, 1]; it is its column"),
        (bad.groups_rows_twice, {"column"}, "[0, 1], required: [0, 2]; it is its row"),
        (bad.groups_diagonals, {"column"}, "the column has the ranks [0, 3], required: [0, 2]"),
        (bad.groups_of_all, {"row"}, "the row has the ranks [0, 1, 2, 3], required: [0, 1]"),
        (bad.groups_lists, {"row"}, "unknown here; legal: one that dist.new_group(ranks) has"),
        (bad.groups_row_alone, {"row"}, "a row and a column, two groups, this is 1 of them"),
        (bad.groups_first_row, {"row"}, " raised ValueError: group=-100: no member of it"),
        (bad.groups_none, {"row"}, "a row and a column, two groups, this is NoneType"),
        (bad.groups_raise, {"row"}, "q=2: rank 0 raised KeyError: 'row'"),
        (bad.groups_of_none, {"row"}, "yours cannot be called so: too many positional"),
        ("rows", {"row"}, "required: a function, yours is 'rows'"),
    ],
    CANNON: [
        (bad.cannon_no_skew, {"Y"}, "; nothing was moved before the first product"),
        (bad.cannon_skews_x, {"Y"}, "; W was not moved before the first product"),
        (bad.cannon_skews_w, {"Y"}, "; X was not moved before the first product"),
        (bad.cannon_wrong_way_first, {"Y"}, "; X was moved to the right and W down before the "),
        (bad.cannon_x_wrong_way_first, {"Y"}, "; X was moved to the right before the first"),
        (bad.cannon_w_wrong_way_first, {"Y"}, "; W was moved down before the first product"),
        (bad.cannon_crossed, {"Y"}, "q=4: rank (0, 0): block of Y, element (0, 0): "),
        (bad.cannon_crossed, {"Y"}, "; X goes left and W goes down in between, or X right and W "),
        (bad.cannon_crossed_too, {"Y"}, "; X goes left and W goes down in between, or X right "),
        (bad.cannon_one_step_short, {"Y"}, "; the last of the q products is missing"),
        (bad.cannon_last_term, {"Y"}, f"{ALONE}X_01 W_10, to which no other was added"),
        (bad.cannon_own_blocks, {"Y"}, "; nothing was moved, it is the product of the rank's own "),
        (bad.cannon_by_steps_of_one, {"blocks sent", "memory"},
         "q=4: rank (3, 3) sends 52,992 bytes, 4 blocks of X and of W are 35,328"),
        (bad.cannon_by_broadcasts, {"calls", "blocks sent"}, "q=2: calls broadcast"),
        (bad.cannon_moves_back, {"blocks sent"}, "q=2: rank (1, 1) sends 33,024 bytes, 2 blocks"),
        (bad.cannon_gathers, {"memory"}, "holds 29,376 bytes in addition to x and w, required: at"),
        (bad.cannon_gathers_w, {"memory"}, "holds 27,072 bytes in addition to x and w, required:"),
        (bad.cannon_overwrites, {"Y"}, "a tensor of send #0 was changed before it was waited for"),
        (bad.cannon_does_not_wait, {"Y"}, "q=2: rank 0 never waits for recv #0"),
        (bad.cannon_receives_first, {"Y"}, "q=2: nothing moves any more: rank 0 in recv #0"),
        (bad.cannon_raises, {"Y"}, "q=2: rank 0 raised KeyError: 'block 7'"),
        (bad.cannon_of_two, {"Y"}, "required: cannon(x, w, q), yours cannot be called so: too"),
        ("cannon", {"Y"}, "required: a function, yours is 'cannon'"),
    ],
}  # fmt: skip
# Some ranks of the first one fail, and the others wait for them; all ranks of the second one wait.
HANGS = [bad.groups_first_row, bad.cannon_receives_first]
RIGHT_TOO = {
    GROUPS: [bad.groups_good, bad.groups_columns_first],
    CANNON: [bad.cannon_good, bad.cannon_other_way],
}
for name, part in ((GROUPS, "row_and_column"), (CANNON, "cannon")):
    RIGHT_TOO[name] += [stored(name, part), stored(f"{name}_other", part)]
# Those judged by memory go first. Each answer's messages have threads of their own, and Python's
# set of a process's threads is counted as memory once it has 4 KiB, late in a long table.
FULL = [bad.cannon_gathers, bad.cannon_gathers_w]
TABLES = {name: [*{id(one): one for one in (
    *RIGHT_TOO[name], *(FULL if name == CANNON else ()), *(row[0] for row in rows)
)}.values()] for name, rows in MORE.items()}  # fmt: skip


@pytest.mark.parametrize(
    "name, answer, limits, words", [(name, *row) for name, rows in MORE.items() for row in rows]
)
def test_wrong_groups_and_a_wrong_cannon_are_refused_by_the_limits_they_break(
    name, answer, limits, words
):
    verdict = judged(pl.exercises.ALL[name], answer, TABLES[name], alone=HANGS)
    assert not verdict and verdict.started and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize(
    "name, answer", [(name, one) for name, some in RIGHT_TOO.items() for one in some]
)
def test_right_groups_and_a_right_cannon_pass(name, answer):
    verdict = judged(pl.exercises.ALL[name], answer, TABLES[name], alone=HANGS)
    assert verdict.passed, repr(verdict)
