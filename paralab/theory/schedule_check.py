"""Proof that a pipeline schedule can run, or what is wrong with it, before a process starts.

A schedule is valid if

    every rank's list holds only its own stages, and every stage's F of every micro-batch once,
    its backward once, either whole (B) or as both halves (I and W);
    within a list F comes before B or I, and I before W;
    and no waits form a cycle: with every rank going through its list in order, waiting for what
    each action needs, all lists come to their end.

The last is the happens-before relation of Lamport (1978), "Time, Clocks, and the Ordering of
Events", having no cycle; a walk that lets every rank go on as far as it can finds one if there is.
What passes has an order of sends and receives that no backend can deadlock on, even one that
buffers nothing and matches by order alone (parallel/lowering.py). Lab 04's deadlock clinic reads
the messages. Cost: about 1 microsecond per action.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from numbers import Integral
from typing import Any

import numpy as np

from paralab.checks import illegal, whole
from paralab.parallel.schedules import KINDS, Action, Schedule, actions
from paralab.theory.order import Order, home, order, walk


class ScheduleError(ValueError):
    """A schedule that cannot run, and the first reason.

    rank, position  where in the lists; position -1: something is missing from the rank's list
    action          what is there, or is missing, as text: "4F0"
    waits           of a deadlock, the cycle: (rank, action it waits at, action that it needs, and
                    the rank that has that one further down its list) of each rank in it
    """

    def __init__(
        self,
        rank: int,
        position: int,
        action: str,
        why: str,
        legal: str,
        waits: Sequence[tuple[int, str, str, int]] = (),
    ) -> None:
        where = f"schedule[{rank}][{position}]" if position >= 0 else f"missing in schedule[{rank}]"
        super().__init__(str(illegal(where, action, why, legal)))
        self.rank, self.position, self.action = rank, position, action
        self.waits = tuple(waits)


def validate(
    schedule: Sequence[Sequence[Action | str]],
    *,
    microbatches: int | None = None,
    stages: int | None = None,
) -> None:
    """Raise ScheduleError, a ValueError, at the first fault of ``schedule``; else it can run.

    Lists that do not hold actions are a plain ValueError.

    schedule      one list of actions (or of their text) per rank; stage s belongs on rank s % p
    microbatches  how many there have to be; default: as many as the lists mention
    stages        likewise, a multiple of the ranks
    """
    _, found = checked(schedule, microbatches=microbatches, stages=stages)
    timed(found, np.zeros(len(found.rank)))


def checked(
    schedule: Sequence[Sequence[Action | str]],
    *,
    microbatches: int | None = None,
    stages: int | None = None,
    folded: bool = False,
) -> tuple[Schedule, Order]:
    """The lists and their arrays, if all is right but, perhaps, a deadlock; else ScheduleError.

    folded  where the stages are: see `order.home`
    """
    lists = actions(schedule)
    if not lists:
        raise illegal("schedule", schedule, "no rank does anything", "one list per rank")
    busy = sum(map(bool, lists))
    for rank, row in enumerate(lists):
        if not row:
            legal = "an action for every rank" + f", or {busy} lists" * (busy > 0)
            raise ScheduleError(rank, -1, "everything", f"rank {rank} has nothing to do", legal)
    if stages is not None and whole("stages", stages, at_least=1) % len(lists):
        why = f"{len(lists)} ranks do not have equally many"
        raise illegal("stages", stages, why, f"a multiple of {len(lists)}")
    if microbatches is not None:
        whole("microbatches", microbatches, at_least=1)
    found = order(lists, stages, microbatches, folded)
    if found is None:
        raise _first_fault(lists, stages, microbatches, folded)
    return lists, found


def peak_live(schedule: Sequence[Sequence[Action | str]]) -> list[int]:
    """Per rank: the most micro-batches whose activations are alive at once; see `live`."""
    return [max(counts, default=0) for counts in live(actions(schedule))]


def live(schedule: Iterable[Iterable[Action]]) -> list[list[int]]:
    """Per rank, during each of its actions: how many micro-batches' activations are alive.

    A forward makes them, a whole backward frees them; a split one keeps the inputs of its weight
    gradients, so it counts until W. With v stages per rank these are chunks, of 1/v of its layers.
    """
    counted = []
    for row in schedule:
        alive, counts = 0, []
        for _, kind, _ in row:
            alive += kind == "F"
            counts.append(alive)  # a backward still holds what it goes through
            alive -= kind in "BW"
        counted.append(counts)
    return counted


def timed(order: Order, seconds: np.ndarray, *more: Any) -> tuple[list[float], list[float]]:
    """(start, end) of every action, as `walk` has it; ScheduleError if waits form a cycle."""
    start, end = walk(order, seconds, *more)
    if inf in end:
        raise _deadlock(order, end)
    return start, end


def standing(order: Order, end: Sequence[float]) -> dict[int, tuple[int, str, str, int]]:
    """Of each rank that does not come to the ``end`` of its list: the action that it waits at, as
    a number and as text, the one that it needs, and the rank that has that one.
    """
    found: dict[int, tuple[int, str, str, int]] = {}
    for node in np.flatnonzero(np.isinf(end)).tolist():
        rank, need = int(order.rank[node]), order.source[node]
        if rank not in found:
            both = str(order.action(node)), str(order.action(need))
            found[rank] = (node, *both, int(order.rank[need]))
    return found


def _deadlock(order: Order, end: Sequence[float]) -> ScheduleError:
    """The cycle of waits among the actions that never ``end``."""
    stands = standing(order, end)
    rank, path = min(stands), []
    while rank not in path:
        path.append(rank)
        *_, rank = stands[rank]
    waits = [(rank, *stands[rank][1:]) for rank in path[path.index(rank) :]]
    said, fix = [], ""
    for i, (rank, action, need, other) in enumerate(waits):
        there = waits[(i + 1) % len(waits)][1]  # what the other one waits at
        said.append(f"rank {rank} waits at {action}, which needs {need} of rank {other}")
        if need != there:
            said[-1] += f", but there {need} comes after {there}"
            fix = fix or f"{need} before {there} on rank {other}"
    rank, action = waits[0][:2]
    why = f"deadlock, the waits form a cycle: {'; '.join(said)}"
    legal = f"an order without the cycle, for instance {fix}"
    position = stands[rank][0] - int(order.first[rank])
    return ScheduleError(rank, position, action, why, legal, waits)


def _first_fault(
    lists: Schedule, stages: int | None, microbatches: int | None, folded: bool
) -> ScheduleError:
    """What `order` found wrong, in words: the first in reading order, then what is missing."""
    p = len(lists)
    every = [action for row in lists for action in row]
    if stages is None:
        last = max((a.stage for a in every if _is_number(a.stage)), default=0)
        stages = -(-(last + 1) // p) * p
    if microbatches is None:
        microbatches = 1 + max((a.microbatch for a in every if _is_number(a.microbatch)), default=0)
    seen: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(lists):
        for at, action in enumerate(row):
            fault = _fault_of(action, rank, p, stages, microbatches, folded)
            if fault := fault or _fault_within(action, seen):
                return ScheduleError(rank, at, str(action), *fault)
            seen[action] = (rank, at)
    for microbatch in range(microbatches):
        for stage in range(stages):
            names = {k: Action(stage, k, microbatch) for k in KINDS}
            lacks = "F" if names["F"] not in seen else ""
            if not lacks and names["B"] not in seen:
                lacks = "W" if names["I"] in seen else "B"
            if lacks:
                place, what = home(stage, p, folded), KINDS[lacks]
                why = f"the {what} of stage {stage}, micro-batch {microbatch}, is in no list"
                also = " (or both halves, I and W)" if lacks == "B" else ""
                legal = f"{names[lacks]}{also} in the list of rank {place}"
                return ScheduleError(place, -1, str(names[lacks]), why, legal)
    raise AssertionError("no fault in a schedule without an order")


def _is_number(value: Any) -> bool:
    """A schedule may be made with NumPy's whole numbers, too."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _fault_of(
    action: Action, rank: int, p: int, stages: int, microbatches: int, folded: bool
) -> tuple[str, str] | None:
    """Why an action, by itself, cannot be in this rank's list, and what could."""
    stage, kind, microbatch = action
    if type(kind) is not str or kind not in KINDS:
        return f"kind {kind!r} is unknown", ", ".join(f"{k} ({v})" for k, v in KINDS.items())
    for name, value, count in (("stage", stage, stages), ("micro-batch", microbatch, microbatches)):
        if not _is_number(value) or not 0 <= value < count:
            return f"there is no {name} {value}", f"{name} 0 to {count - 1}"
    place = home(stage, p, folded)
    if place != rank:
        mine = ", ".join([str(s) for s in range(stages) if home(s, p, folded) == rank][:4])
        rule = "" if folded else f" (stage % {p})"
        return f"stage {stage} lives on rank {place}{rule}", f"on rank {rank} stage {mine}"
    return None


def _fault_within(action: Action, done: Mapping[Action, tuple[int, int]]) -> tuple[str, str] | None:
    """Why an action cannot come after those in ``done``, {action: (rank, position)}, and what would
    be legal.
    """
    stage, kind, microbatch = action
    if action in done:
        where = "{}, position {}".format(*done[action])
        return f"is there twice; the first is on rank {where}", "each action once"
    f, b, i, w = (Action(stage, k, microbatch) for k in "FBIW")
    if kind == "B" and (i in done or w in done):
        return (
            f"{i if i in done else w} is there too, so this backward runs twice",
            f"either {b}, or {i} and {w}",
        )
    if kind in "IW" and b in done:
        return f"{b} is there too, so this backward runs twice", f"either {b}, or {i} and {w}"
    if kind in "BI" and f not in done:
        return f"comes before {f}, whose activations it needs", f"{f} earlier in this list"
    if kind == "W" and i not in done:
        return f"comes before {i}, whose gradients it needs", f"{i} earlier in this list"
    return None
