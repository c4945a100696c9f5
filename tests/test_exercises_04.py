"""Lab 04: schedules that are wrong, slow or large do not pass, and are told why and by how much."""

import re
from itertools import product, repeat

import numpy as np
import pytest
import torch

import paralab as pl
from judged import Table, defined, missed, stored
from paralab.exercises import clinic, one_process
from paralab.exercises.schedule import MICROBATCHES, PP, SIZES, TARGETS_REQUIRED
from paralab.parallel.schedules import SCHEDULES, actions
from paralab.theory.schedule_check import validate
from paralab.view import stuck

CLINIC, OWN = pl.exercises.deadlock_clinic, pl.exercises.own_schedule
FIXED = {
    "two ranks": ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2"],
    "two chunks": ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"],
    "three ranks": [" ".join(map(str, row)) for row in SCHEDULES["1f1b"](3, 3)],
}


# ---- a schedule of one's own ---------------------------------------------------------------------
def one_f_one_b(pp, m, warmup=None):
    """1F1B as text, with ``warmup(rank)`` forwards before the first pair."""
    schedule = []
    for rank in range(pp):
        first = min(warmup(rank) if warmup else pp - rank - 1, m)
        row = [f"{rank}F{i}" for i in range(first)]
        for i in range(m):
            row += [f"{rank}F{first + i}"] * (first + i < m) + [f"{rank}B{i}"]
        schedule.append(row)
    return schedule


def schedule_good(pp, microbatches):
    """A right answer, one text per rank."""
    return [" ".join(row) for row in one_f_one_b(pp, microbatches)]


def schedule_halves(pp, microbatches):
    """A right answer, and a faster one: rank r's weight halves wait for r backwards."""
    schedule = []
    for rank, row in enumerate(one_f_one_b(pp, microbatches)):
        split = []
        for action in row:
            split.append(action.replace("B", "I"))
            done = int(action.partition("B")[2] or -1) - rank
            split += [f"{rank}W{done}"] * (done >= 0)
        late = range(max(microbatches - rank, 0), microbatches)
        schedule.append(split + [f"{rank}W{i}" for i in late])
    return schedule


WRONG = [  # answer, limits it breaks, words of the verdict
    (lambda p, m: [[f"{r}{k}{i}" for k in "FB" for i in torch.arange(m)] for r in range(p)],
     {"live micro-batches", "other sizes"},
     "rank 0 holds 6 micro-batches, required: at most 4: 0F4, action 5 of its list"),
    (lambda p, m: [[f"{r}{k}{i}" for i in range(m) for k in "FB"] for r in range(p)],
     {"simulated step", "other sizes"},
     "720 ms, required: at most 270 ms: rank 0 starts 0F1, action 3 of its list, at 120"),
    (lambda p, m: one_f_one_b(p, m, lambda r: p - r), {"live micro-batches", "other sizes"},
     "rank 0 holds 5 micro-batches"),
    # The warm-up counted from the wrong end: every list is fine, together they stand still.
    (lambda p, m: one_f_one_b(p, m, lambda r: r), {"schedule"},
     "rank 0 waits at 0B0, which needs 1B0 of rank 1"),
    # What any wrong list is told: test_schedule_check.py.
    (lambda p, m: [row[:-1] for row in schedule_halves(p, m)], {"schedule"},
     "the weight half of the backward of stage"),
    (lambda p, m: one_f_one_b(p, 6), {"other sizes"},
     "p=2, m=1: schedule[0][1]='0F1': there is no micro-"),
    (lambda p, m: one_f_one_b(p, m, lambda r: max(3 - r, 0)), {"other sizes"},
     "p=2, m=5: rank 0 holds 4 micro-batches"),
    (lambda p, m: one_f_one_b(p, m, lambda r: max(p - r - 1 - (p == 5), 0)), {"other sizes"},
     "p=5, m=3: takes 270 ms, required: at most 210 ms: rank 2 starts 2F2, action 4 of its list"),
    (lambda p, m: np.array(one_f_one_b(p, m), dtype=object), {"schedule"},
     ("schedule=array([['0F0', ", ": not a schedule; legal: a list of actions per")),
    (lambda p, m: None, {"schedule"}, "p=4, m=6: the function returned None, required: a list of"),
    (lambda p, m: one_f_one_b(p, m)[99], {"schedule"}, "p=4, m=6: raised IndexError"),
    (lambda p, m: [0 for _ in iter(int, 1)], {"schedule"},
     "2,000,000 lines of the answer were run, and it has not ended"),
    (lambda p, m: schedule_good(p, 1 if (p, m) == (4, 2) else m), {"other sizes"},
     "p=4, m=2: "),
    (SCHEDULES["1f1b"], {"schedule"}, "is the library's own; required: one that you have written"),
    (lambda p, m: SCHEDULES["1f1b"](p, m), {"schedule"}, "paralab knows the answer: here it cann"),
]  # fmt: skip


def my_own(name):
    """An answer with the lists of one of the library's schedules, which asks nobody for them."""
    sizes = ((PP, MICROBATCHES), *SIZES)
    lists = {size: [list(map(str, row)) for row in SCHEDULES[name](*size)] for size in sizes}
    return lambda pp, microbatches: lists[pp, microbatches]


RIGHT = [schedule_good, schedule_halves, lambda *asked: schedule_good(*asked)]
HALF = [  # GPipe keeps the time and naive the memory, and neither both
    (my_own("gpipe"), {"live micro-batches", "other sizes"}, "2 of 4 limits kept, 1 not looked at"),
    (my_own("naive"), {"simulated step", "other sizes"}, "2 of 4 limits kept, 1 not looked at"),
]
TABLE = Table(OWN, WRONG + HALF, RIGHT, exact=True)
test_a_wrong_schedule_is_refused, test_a_right_schedule_passes, test_its_stub = TABLE.tests()


def test_gradients_of_a_run_are_compared_with_one_process(monkeypatch):
    """Whatever a schedule says, a gradient that is off by a factor is seen."""
    right = one_process.of_one_process

    def other(model, **batch):
        return [one._replace(gradients={n: 6 * g for n, g in one.gradients.items()})
                for one in right(model, **batch)]  # fmt: skip

    monkeypatch.setattr(one_process, "of_one_process", other)
    verdict = OWN.check(schedule_good)
    assert missed(verdict) == {"gradients"}
    assert "embedding.token.weight, element" in repr(verdict)
    assert "it is 0.167 times what is required" in repr(verdict)


# ---- three targets -------------------------------------------------------------------------------
TASK = pl.exercises.better_schedules
ONE, TWO, THREE = TARGETS_REQUIRED


def listed(name: str):
    return lambda pp, microbatches: SCHEDULES[name](pp, microbatches)


FIRST, SECOND, THIRD, DELAYED = stored(TASK.name, "first", "second", "third", "delayed")
MISSES = [  # answer, limits it breaks, words of the verdict
    ((listed("1f1b"), SECOND, THIRD), {ONE},
     "(p=4, m=8): takes 330 ms, required: at most 270 ms: rank 2 starts 2B0, action 3 of its list, "
     "at 60 ms; in ZB-H1, which splits every backward, it starts at 50 ms"),
    ((SECOND, SECOND, THIRD), {ONE}, "rank 0 holds 7 micro-batches, required: at most 4: 0F4"),
    ((lambda pp, m: DELAYED(pp, m, lambda r: pp - r - 1, lambda r: 9), SECOND, THIRD), {ONE},
     "p=4, m=8: takes 300 ms"),
    ((FIRST, FIRST, THIRD), {TWO},
     "p=4, m=8: takes 270 ms, required: at most 240 ms: rank 0 is idle from 40 ms to 70 ms, before "
     "0I0, action 5 of its list"),
    ((FIRST, SECOND, FIRST), {THREE}, "rank 0 holds 4 micro-batches, required: at most 3"),
    ((listed("naive"), listed("naive"), listed("naive")), {ONE, TWO, THREE}, "takes 960 ms"),
    ((FIRST, SECOND, lambda pp, m: one_f_one_b(pp, 6)), {THREE}, "p=4, m=8: "),
]  # fmt: skip
REACH = listed("zb-h1"), listed("zb-h2"), lambda pp, m: map(" ".join, THIRD(pp, m))
TARGETS = Table(TASK, MISSES, [REACH], exact=True)
test_what_misses_a_target_is_refused, test_right_ones_pass, test_the_stub = TARGETS.tests()


# ---- the clinic ----------------------------------------------------------------------------------
def without(lists: list[str], action: str) -> list[str]:
    return [" ".join(a for a in row.split() if a != action) for row in lists]


def patients() -> dict[str, list[str]]:
    return {name: list(patient.lists) for name, patient in CLINIC.patients.items()}


CURES = [  # what is handed in for one patient, limits it breaks, words of the verdict
    ("two ranks", patients()["two ranks"], {"two ranks"}, "two ranks: schedule[0][1]='0B0': dead"),
    ("two ranks", without(FIXED["two ranks"], "1B2"), {"two ranks", "same work"},
     "1B2 is missing from the list of rank 1"),
    ("two ranks", ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"], {"moves"},
     "two ranks: 2 moves, required: at most 1"),
    ("two chunks", FIXED["two chunks"][:1], {"two chunks"}, "1 list, required: 2, one per rank"),
    ("two chunks", None, {"two chunks"}, "its lists are missing"),
    ("two ranks", ["0B0 0F0 0F1 0F2 0B1 0B2", FIXED["two ranks"][1]], {"two ranks"},
     "schedule[0][0]='0B0': it comes before 0F0"),
    ("three ranks", [FIXED["three ranks"][i] for i in (1, 0, 2)], {"three ranks", "same work"},
     "0F0 is missing from the list of rank 0"),
    ("three ranks", repeat(repeat("0F0")), {"two ranks"}, "more than 20,000 entries"),
]  # fmt: skip


@pytest.mark.parametrize("name, lists, limits, words", CURES)
def test_a_cure_that_does_not_cure_or_changes_the_work_is_refused(name, lists, limits, words):
    verdict = CLINIC.check({**FIXED, name: lists})
    assert missed(verdict) == limits, verdict.table.to_string()
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


def test_patients_as_they_are_count_as_not_started_and_anything_but_a_dict_is_told_so():
    assert not CLINIC.check(patients()).started
    verdict = CLINIC.check(list(FIXED.values()))
    assert verdict.started and "required: a dict" in repr(verdict)
    assert CLINIC.check(FIXED).passed
    assert CLINIC.check(defined(str(CLINIC.solution()), "fixed")).passed
    assert CLINIC.check({name: (row for row in lists) for name, lists in FIXED.items()}).passed
    order = ["F0", "F1", "F2", "B0", "B1", "B2"]
    gpipe = [" ".join(f"{rank}{action}" for action in order) for rank in range(3)]
    assert CLINIC.check({**FIXED, "three ranks": gpipe}).passed


def test_the_stub_holds_the_patients_themselves():
    names: dict = {}
    exec(CLINIC.stub, names)
    assert names["fixed"] == patients()


@pytest.mark.parametrize("patient", CLINIC.patients.values(), ids=lambda p: p.name)
def test_a_patient_deadlocks_and_its_picture_says_the_same_as_the_validator(patient):
    with pytest.raises(ValueError, match="deadlock") as found:
        validate(patient.lists)
    assert repr(patient.diagnosis) == str(found.value).partition("; legal: ")[0]
    chart = patient.chart()
    said = {note.text for note in chart.layout.annotations}
    waits = re.findall(r"waits at (\w+), which needs (\w+) of rank (\d)", str(found.value))
    for action, need, other in waits:
        assert f"<b>{action}</b> needs <b>{need}</b> of rank {other}" in said
    assert f"{len(patient.lists)} of {len(patient.lists)} ranks wait for ever" in repr(chart)
    done = (chart.table["kind"] != "wait").sum()
    assert 0 < done < sum(map(len, actions(patient.lists)))
    assert patient.story in repr(patient) and patient.lists[0] in repr(patient)


def test_the_patient_of_two_chunks_runs_after_no_single_move():
    patient = CLINIC.patients["two chunks"]
    assert patient.moves == 2
    lists = actions(patient.lists)
    for rank, row in enumerate(lists):
        for moved in _one_move(row):
            with pytest.raises(ValueError, match="schedule"):
                validate([*lists[:rank], moved, *lists[rank + 1 :]])


def _one_move(row: list) -> list[list]:
    found = []
    for i, j in product(range(len(row)), repeat=2):
        rest = row[:i] + row[i + 1 :]
        found.append(rest[:j] + [row[i]] + rest[j:])
    return found


def test_moves_are_the_fewest_that_turn_one_list_into_the_other():
    row = list("abcde")
    assert [clinic.moves(row, list(to)) for to in ("abcde", "bcdea", "eabcd", "edcba", "badce")] \
        == [0, 1, 1, 4, 2]  # fmt: skip
    for to in _one_move(row):
        assert clinic.moves(row, to) <= 1


def test_a_rank_that_waits_before_it_is_stuck_is_drawn_waiting():
    first, *others = SCHEDULES["1f1b"](3, 4)
    late = [*(action for action in first if str(action) not in ("0F3", "0B3")), "0F3", "0B3"]
    table = stuck([[str(action) for action in row] for row in (late, *others)]).table
    waits = table[table["kind"] == "wait"].groupby("rank").size()
    assert waits.tolist() == [3, 3, 2]  # each before an action that is done, and then for ever
    for _, boxes in table.sort_values("start").groupby("rank"):
        assert boxes["start"].tolist()[1:] == pytest.approx(boxes["end"].tolist()[:-1])


def test_a_schedule_that_runs_is_drawn_to_its_end_and_a_wrong_one_is_refused():
    chart = stuck(SCHEDULES["zb-h1"](3, 4), name="whole")
    assert "paler" not in chart.below
    assert "later stages are paler" in stuck(SCHEDULES["interleaved"](2, 2, 2)).below
    assert "all 36 actions are done" in chart.finding
    with pytest.raises(ValueError, match="comes before 0F0"):
        stuck(["0B0 0F0"])
