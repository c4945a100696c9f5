"""Lab 04's deadlock clinic: three schedules that deadlock, to be diagnosed and repaired.

    patient = pl.exercises.deadlock_clinic.patients["two ranks"]
    patient.diagnosis      # the validator's sentence: the cycle of waits
    patient.chart()        # how far the schedule gets, and where each rank waits
    pl.exercises.deadlock_clinic.check(fixed)

Each list alone could be part of a schedule that runs; together they deadlock. The learner repairs a
schedule by moving actions within a rank's list, and the checker counts the moves: the actions that
are not in the longest common subsequence of the list before and after. No rank is started.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paralab.checks import count_of, reason
from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import Takes, Text, Tries, exercise
from paralab.exercises.questions import plain_answers
from paralab.exercises.verdict import NOT_STARTED
from paralab.parallel.schedules import Action, Schedule, actions

if TYPE_CHECKING:
    from paralab.view.chart import Chart


@dataclass(frozen=True, kw_only=True, repr=False)
class Patient:
    """A schedule that deadlocks.

    lists   the actions of each rank, in order, as text
    moves   the number of moves that is enough to repair it
    story   the schedule that was meant, in words
    """

    name: str
    lists: tuple[str, ...]
    moves: int
    story: str

    @property
    def diagnosis(self) -> Text:
        """The validator's message, before a process starts: which actions wait for each other."""
        lists = actions(self.lists)
        return Text(_fault(lists, lists) or "nothing is wrong: it runs to its end")

    def chart(self) -> Chart:
        """A drawing of how far the schedule gets, and at which action each rank then waits."""
        from paralab.view.standstill import stuck

        return stuck(self.lists, name=self.name)

    def __repr__(self) -> str:
        rows = "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(self.lists))
        return f"{self.name}: {self.story}\n{rows}"


PATIENTS = (
    Patient(
        name="two ranks",
        moves=1,
        story="1F1B, but rank 0 has its first backward too early in its list",
        lists=("0F0 0B0 0F1 0F2 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2"),
    ),
    Patient(
        name="two chunks",
        moves=2,
        story="each rank has two chunks: rank 0 has stages 0 and 2, rank 1 has stages 1 and 3",
        lists=("0F0 0F1 2F0 2F1 0B0 0B1 2B0 2B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"),
    ),
    Patient(
        name="three ranks",
        moves=4,
        story="1F1B on three ranks; the first cycle of waits that the validator finds is between "
        "two of them",
        lists=("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1F1 1B0 1F2 1B1 1B2", "2F0 2F1 2F2 2B0 2B1 2B2"),
    ),
)
WORK, MOVES = "same work", "moves"

REQUIRED = {
    **{patient.name: "every rank gets to the end of its list" for patient in PATIENTS},
    WORK: "every rank has the actions that it had before",
    MOVES: "at most " + ", ".join(f"{p.moves} ({p.name})" for p in PATIENTS),
}


@exercise(Takes(kind="a dict {patient: lists}"), required=REQUIRED, patients=PATIENTS)
def deadlock_clinic(tries: Tries) -> None:
    for notes, fixed in plain_answers(tries):
        schedules = [_lists(fixed.get(patient.name)) for patient in PATIENTS]
        if [lists for lists, _ in schedules] == [actions(patient.lists) for patient in PATIENTS]:
            notes.end(NOT_STARTED)
            continue
        for patient, (lists, wrong) in zip(PATIENTS, schedules, strict=True):
            notes.where, before = patient.name, actions(patient.lists)
            if lists is not None and len(lists) != len(before):
                count = count_of(len(lists), "list")
                lists, wrong = None, f"{count}, required: {len(before)}, one per rank"
            notes.look(patient.name, wrong or _fault(lists, before), "it runs")
            if lists is None:
                continue
            for rank, (old, new) in enumerate(zip(before, lists, strict=True)):
                lost, added = Counter(old) - Counter(new), Counter(new) - Counter(old)
                wrong = f"{next(iter(added))} is added to the list of rank {rank}" if added else ""
                if lost:
                    wrong = f"{next(iter(lost))} is missing from the list of rank {rank}"
                notes.each(WORK, wrong, "nothing added or lost")
            if not notes.broke((WORK,)):
                count = sum(map(moves, before, lists))
                said = f"{count} moves, required: at most {patient.moves}"
                notes.each(MOVES, said if count > patient.moves else "", "no more than that")


def moves(before: Sequence[Action], after: Sequence[Action]) -> int:
    """The number of actions of a list that were moved elsewhere in it.

    Both lists have the same actions, so their longest common subsequence is the longest increasing
    subsequence of the old positions, in the new order. Raises KeyError for an action that is new.
    """
    old_position = {action: i for i, action in enumerate(before)}
    ends: list[int] = []  # smallest last position of an increasing subsequence of length 1, 2, ...
    for action in after:
        slot = bisect_left(ends, old_position[action])
        ends[slot : slot + 1] = [old_position[action]]
    return len(after) - len(ends)


def _lists(lists: Any) -> tuple[Schedule | None, str]:
    return attempt(lambda: actions(lists)) if lists is not None else (None, "its lists are missing")


def _fault(lists: Schedule, before: Schedule) -> str:
    """The validator's objection to lists that have to do the work of ``before``, or "". How to mend
    them is left out of its message: that is the exercise.
    """
    from paralab.theory.schedule_check import validate

    work = [action for row in before for action in row]
    needed = {
        "microbatches": 1 + max(action.microbatch for action in work),
        "stages": 1 + max(action.stage for action in work),
    }
    return reason(attempt(lambda: validate(lists, **needed))[1])
