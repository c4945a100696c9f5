"""Lab 04's deadlock clinic: three schedules that stand still, to be diagnosed and repaired.

    patient = pl.exercises.deadlock_clinic.patients["too early"]
    patient.diagnosis      # the validator's sentence: the circle of waits
    patient.chart()        # how far it gets, and who stands where
    pl.exercises.deadlock_clinic.check(fixed)

Each list for itself could be part of a good schedule; together they cannot run. Their cure is to
move actions within a rank's list, and the checker counts the moves: those are the actions outside
the longest common subsequence of a list before and after. No rank is started.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paralab.exercises.exercise import Exercise, Text
from paralab.exercises.verdict import NOT_STARTED, Notes, Verdict, first_line
from paralab.parallel.schedules import Action, Schedule, actions

if TYPE_CHECKING:
    from paralab.view.chart import Chart


@dataclass(frozen=True, kw_only=True, repr=False)
class Patient:
    """A schedule that deadlocks.

    lists   what each rank does, in order, as text
    moves   so many are enough to repair it
    story   what it was meant to be
    """

    name: str
    lists: tuple[str, ...]
    moves: int
    story: str

    @property
    def diagnosis(self) -> Text:
        """What the validator says of it, before a process starts."""
        from paralab.theory.schedule_check import validate

        try:
            validate(self.lists)
        except ValueError as error:
            return Text(first_line(error))
        return Text("nothing is wrong: it runs to its end")

    def chart(self) -> Chart:
        """How far it gets, and where each rank then stands."""
        from paralab.view.standstill import stuck

        return stuck(self.lists, name=self.name)

    def __repr__(self) -> str:
        rows = "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(self.lists))
        return f"{self.name}: {self.story}\n{rows}"


PATIENTS = (
    Patient(
        name="too early",
        moves=1,
        story="1F1B on two ranks, meant to be quick on the way back",
        lists=("0F0 0B0 0F1 0F2 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2"),
    ),
    Patient(
        name="two chunks",
        moves=2,
        story="two stages per rank: rank 0 has 0 and 2, rank 1 1 and 3",
        lists=("0F0 0F1 2F0 2F1 0B0 0B1 2B0 2B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"),
    ),
    Patient(
        name="upside down",
        moves=4,
        story="1F1B on three ranks, each list fine in other company",
        lists=("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1F1 1B0 1F2 1B1 1B2", "2F0 2F1 2F2 2B0 2B1 2B2"),
    ),
)
WORK, MOVES = "same work", "moves"

TASK = """
**Your turn.** Three schedules stand still before they are done. For each, look at the picture,
`pl.exercises.deadlock_clinic.patients["too early"].chart()`, and find the circle: who waits for
whom? `.diagnosis` is what the validator says. Then repair the lists: move actions within a rank's
list, no more than the limits allow. Nothing is added, nothing lost, nothing changes its rank.

`pl.exercises.deadlock_clinic.check(fixed)`
"""

ASKED = (
    *((patient.name, "every rank gets to the end of its list") for patient in PATIENTS),
    (WORK, "every rank has the actions it had"),
    (MOVES, "at most " + ", ".join(f"{p.moves} ({p.name})" for p in PATIENTS)),
)

HINTS = (
    "start at any rank that stands still, go to the rank that has what it needs, and see where "
    "that one stands. You come round to where you began: one of these waits has to go.",
    "a backward comes from the last stage to the first. Where a rank waits for a gradient, ask "
    "whether it has sent on all the forwards that the ranks after it want first.",
    "too early: rank 0 has to send a second forward before it waits for 1B0. Two chunks: backward "
    "meets stage 2 before stage 0. Upside down: the first rank needs the longest warm-up and the "
    "last one none.",
)


class Clinic(Exercise):
    """An exercise that has patients."""

    @property
    def patients(self) -> dict[str, Patient]:
        """{name: patient}, the easiest first."""
        return {patient.name: patient for patient in PATIENTS}


def check(fixed: Mapping[str, Sequence[str | Sequence[Action | str]]]) -> Verdict:
    """Prove the repaired lists and count what was moved. Takes no time, starts no ranks.

    fixed   {name of the patient: its lists, rank by rank}
    """
    notes = Notes("deadlock_clinic", ASKED)
    if not isinstance(fixed, Mapping):
        first = PATIENTS[0].name
        notes.note(
            first,
            "no lists",
            False,
            f"asked is a dict {{patient: lists}}, yours is {type(fixed).__name__}",
        )
        return notes.verdict()
    if all(_lists(fixed.get(p.name))[0] == actions(p.lists) for p in PATIENTS):
        notes.said = NOT_STARTED
        return notes.verdict()
    count: dict[str, int] = {}
    for patient in PATIENTS:
        lists, wrong = _lists(fixed.get(patient.name))
        if not wrong:
            wrong = _fault(patient, lists)
        notes.note(patient.name, wrong or "it runs", not wrong, f"{patient.name}: {wrong}")
        if lists is None or len(lists) != len(patient.lists):
            continue
        before = actions(patient.lists)
        changed = _changed(before, lists)
        notes.note(
            WORK, changed or "nothing added or lost", not changed, f"{patient.name}: {changed}"
        )
        if not changed:
            count[patient.name] = sum(map(moves, before, lists))
    _count(notes, count)
    return notes.verdict()


def _count(notes: Notes, count: Mapping[str, int]) -> None:
    """Hold the moves of every patient against what is enough; open while one cannot be counted."""
    for patient in PATIENTS:
        if (made := count.get(patient.name, 0)) > patient.moves:
            said = f"{patient.name}: {made} moves, {patient.moves} would do"
            notes.note(MOVES, said, False, said)
    if len(count) == len(PATIENTS):
        notes.note(MOVES, ", ".join(f"{made} ({name})" for name, made in count.items()), True)


def moves(before: Sequence[Action], after: Sequence[Action]) -> int:
    """How many actions of a list were moved elsewhere in it: those that could not stay in order.

    Both have the same actions, so the longest common subsequence is the longest rise of the old
    places in the new order. Raises KeyError on an action that was not there.
    """
    place = {action: i for i, action in enumerate(before)}
    ends: list[int] = []  # the smallest last place of a rise of length 1, 2, ...
    for action in after:
        at = bisect_left(ends, place[action])
        ends[at : at + 1] = [place[action]]
    return len(after) - len(ends)


def _lists(found: Any) -> tuple[Schedule | None, str]:
    """The lists as actions, or why they are none."""
    if found is None:
        return None, "its lists are missing"
    try:
        return actions(found), ""
    except ValueError as error:
        return None, first_line(error)


def _fault(patient: Patient, lists: Schedule) -> str:
    """What the validator has against these lists; "" if they run."""
    from paralab.theory.schedule_check import validate

    before = actions(patient.lists)
    if len(lists) != len(before):
        return f"{len(lists)} lists, asked are {len(before)}, one per rank"
    everything = [action for row in before for action in row]
    try:
        validate(
            lists,
            microbatches=1 + max(action.microbatch for action in everything),
            stages=1 + max(action.stage for action in everything),
        )
    except ValueError as error:
        return first_line(error)
    return ""


def _changed(before: Schedule, after: Schedule) -> str:
    """The first action that was lost or added, in words; "" if there is none."""
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        lost, added = Counter(old) - Counter(new), Counter(new) - Counter(old)
        if lost:
            return f"rank {rank} has lost {next(iter(lost))}"
        if added:
            return f"rank {rank} has {next(iter(added))}, which was not in its list"
    return ""


deadlock_clinic = Clinic(
    name="deadlock_clinic", lab="04", task=TASK, asked=ASKED, hints=HINTS, checker=check
)
