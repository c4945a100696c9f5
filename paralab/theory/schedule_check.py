"""Proof that a pipeline schedule can run, or its first fault, before a process starts.

A schedule is valid if

    every rank's list holds only actions of its own stages, and for every stage and micro-batch
    exactly one F and one backward, either whole (B) or as both halves (I and W);
    within a list F comes before B or I, and I before W;
    and no waits form a cycle: if every rank works through its list in order and waits for what
    each action needs, all ranks reach the end of their lists.

The last condition says that the happens-before relation of Lamport (1978), "Time, Clocks, and the
Ordering of Events", has no cycle; the walk of order.py finds one if there is one. A valid schedule
has an order of sends and receives on which no backend can deadlock, even one that buffers nothing
and matches messages by order alone (parallel/lowering.py). Lab 04.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from numbers import Integral
from typing import Any

import numpy as np

from paralab.checks import count_of, illegal, whole
from paralab.parallel.schedules import KINDS, Action, Schedule, actions
from paralab.theory.order import Order, home, order, walk


def validate(
    schedule: Sequence[Sequence[Action | str]],
    *,
    microbatches: int | None = None,
    stages: int | None = None,
) -> None:
    """Return if ``schedule`` can run; raise ``ValueError`` for its first fault, with the rank, the
    position in its list and the action.

    schedule      one list of actions (or of their text) per rank; stage s belongs on rank s % p
    microbatches  required number of micro-batches; default: as many as the lists mention
    stages        required number of stages, a multiple of the ranks; default likewise
    """
    _, arrays = checked(schedule, microbatches=microbatches, stages=stages)
    timed(arrays, np.zeros(len(arrays.rank)))


def checked(
    schedule: Sequence[Sequence[Action | str]],
    *,
    microbatches: int | None = None,
    stages: int | None = None,
    folded: bool = False,
) -> tuple[Schedule, Order]:
    """(the lists of actions, their `Order`) of a schedule without a fault; it may still deadlock.

    folded  as in `order.home`, which assigns stages to ranks

    Raises ``ValueError`` for the first fault.
    """
    lists = actions(schedule)
    if not lists:
        raise illegal("schedule", schedule, "it has no list", "one list of actions per rank")
    busy = sum(map(bool, lists))
    for rank, row in enumerate(lists):
        if not row:
            fewer = f", or {count_of(busy, 'list')}" * (busy > 0)
            legal = f"at least one action for every rank{fewer}"
            raise _fault(rank, -1, "everything", f"rank {rank} has nothing to do", legal)
    if stages is not None and whole("stages", stages, at_least=1) % len(lists):
        why = f"{len(lists)} ranks cannot have the same number of stages each"
        raise illegal("stages", stages, why, f"a multiple of {len(lists)}")
    if microbatches is not None:
        whole("microbatches", microbatches, at_least=1)
    arrays = order(lists, stages, microbatches, folded)
    if arrays is None:
        raise _first_fault(lists, stages, microbatches, folded)
    return lists, arrays


def peak_live(schedule: Sequence[Sequence[Action | str]]) -> list[int]:
    """Per rank, the most micro-batches whose activations are alive at once; see `live`."""
    return [max(counts, default=0) for counts in live(actions(schedule))]


def live(schedule: Iterable[Iterable[Action]]) -> list[list[int]]:
    """Per rank, the number of micro-batches whose activations are alive during each action.

    A forward allocates them and a whole backward frees them; a split backward needs the inputs of
    its weight gradients until W. With v stages per rank the unit is a micro-batch's activations in
    one chunk, 1/v of the rank's layers.
    """
    per_rank = []
    for row in schedule:
        alive, counts = 0, []
        for _, kind, _ in row:
            alive += kind == "F"
            counts.append(alive)  # during a backward its activations are still alive
            alive -= kind in "BW"
        per_rank.append(counts)
    return per_rank


def timed(
    order: Order,
    seconds: np.ndarray,
    comm: np.ndarray | None = None,
    pairs: Mapping[int, int] | None = None,
) -> tuple[list[float], list[float]]:
    """(start, end) of every action by `walk`; raises ``ValueError`` if waits form a cycle."""
    start, end = walk(order, seconds, comm, pairs)
    if inf in end:
        raise _deadlock(order, end)
    return start, end


def standing(order: Order, end: Sequence[float]) -> dict[int, int]:
    """{rank: number of the action that it waits at} of the ranks that do not reach the end of their
    list. end: of every action by `walk`, infinity if the action is never reached.
    """
    stuck: dict[int, int] = {}
    for node in np.flatnonzero(np.isinf(end)).tolist():
        need = order.source[node]
        second = need < 0 or end[need] < inf  # of a pair, it has what it needs, its successor not
        stuck.setdefault(int(order.rank[node]), int(node + second))
    return stuck


def _fault(rank: int, position: int, action: str, why: str, legal: str) -> ValueError:
    """The error for an action in a rank's list; position -1: it is missing there."""
    where = f"schedule[{rank}][{position}]" if position >= 0 else f"missing in schedule[{rank}]"
    return illegal(where, action, why, legal)


def _deadlock(order: Order, end: Sequence[float]) -> ValueError:
    """The error that names a cycle of waits. end: as in `standing`."""
    stuck = standing(order, end)
    rank, path = min(stuck), []
    while rank not in path:
        path.append(rank)
        rank = int(order.rank[order.source[stuck[rank]]])
    cycle = path[path.index(rank) :]
    sentences, fix = [], ""
    for rank in cycle:
        needed = order.source[stuck[rank]]
        other = int(order.rank[needed])
        action, need, blocked = map(order.action, (stuck[rank], needed, stuck[other]))
        sentences.append(f"rank {rank} waits at {action}, which needs {need} of rank {other}")
        if needed < stuck[other]:  # the first of a pair, and that rank waits at the second
            sentences[-1] += f", but there {need} starts together with {blocked}"
        elif need != blocked:
            sentences[-1] += f", but there {need} comes after {blocked}"
            later = map(order.action, range(stuck[other], needed + 1))
            moved = [str(a) for a in later if a[::2] == need[::2]]  # its forward too, if there
            fix = fix or f"{' and '.join(moved)} before {blocked} on rank {other}"
    why = f"deadlock, the waits form a cycle: {'; '.join(sentences)}"
    legal = f"an order without the cycle{', for instance ' * bool(fix)}{fix}"
    node, first = stuck[cycle[0]], int(order.first[cycle[0]])
    return _fault(cycle[0], node - first, str(order.action(node)), why, legal)


def _first_fault(
    lists: Schedule, stages: int | None, microbatches: int | None, folded: bool
) -> ValueError:
    """The error for a schedule that has no `Order`: the first faulty action in reading order, or
    else the first missing one.
    """
    p = len(lists)
    flat = [action for row in lists for action in row]
    if stages is None:
        last = max((a.stage for a in flat if _is_number(a.stage)), default=0)
        stages = -(-(last + 1) // p) * p
    if microbatches is None:
        microbatches = 1 + max((a.microbatch for a in flat if _is_number(a.microbatch)), default=0)
    seen = {}
    for rank, row in enumerate(lists):
        for position, action in enumerate(row):
            fault = _fault_of(action, rank, p, stages, microbatches, folded)
            if fault := fault or _fault_within(action, seen):
                return _fault(rank, position, str(action), *fault)
            seen[action] = (rank, position)
    for microbatch in range(microbatches):
        for stage in range(stages):
            by_kind = {kind: Action(stage, kind, microbatch) for kind in KINDS}
            missing = "F" if by_kind["F"] not in seen else ""
            if not missing and by_kind["B"] not in seen:
                missing = "W" if by_kind["I"] in seen else "B"
            if missing:
                rank, name = home(stage, p, folded), KINDS[missing]
                why = f"the {name} of stage {stage}, micro-batch {microbatch}, is in no list"
                halves = " (or both halves, I and W)" if missing == "B" else ""
                legal = f"{by_kind[missing]}{halves} in the list of rank {rank}"
                return _fault(rank, -1, str(by_kind[missing]), why, legal)
    raise AssertionError("no fault in a schedule without an order")


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a whole number, Python's or NumPy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _fault_of(
    action: Action, rank: int, p: int, stages: int, microbatches: int, folded: bool
) -> tuple[str, str] | None:
    """(why an action cannot be in this rank's list at all, what could); None if it can."""
    stage, kind, microbatch = action
    if type(kind) is not str or kind not in KINDS:
        return f"kind {kind!r} is unknown", ", ".join(f"{k} ({v})" for k, v in KINDS.items())
    for name, value, count in (("stage", stage, stages), ("micro-batch", microbatch, microbatches)):
        if not _is_number(value) or not 0 <= value < count:
            legal = f"{name} 0 to {count - 1}" if count > 1 else f"{name} 0"
            return f"there is no {name} {value}", legal
    place = home(stage, p, folded)
    if place != rank:
        own = [str(s) for s in range(stages) if home(s, p, folded) == rank][:4]
        legal = f"on rank {rank} stage{'s' * (len(own) != 1)} {', '.join(own)}"
        rule = "" if folded else f" (stage % {p})"
        return f"stage {stage} belongs on rank {place}{rule}", legal
    return None


def _fault_within(action: Action, done: Mapping[Action, tuple[int, int]]) -> tuple[str, str] | None:
    """(why an action cannot come after the earlier ones, what would be legal); None if it can.

    done  {earlier action: (rank, position)}
    """
    stage, kind, microbatch = action
    if action in done:
        where = "{}, position {}".format(*done[action])
        return f"it occurs twice; the first time on rank {where}", "each action once"
    f, b, i, w = (Action(stage, k, microbatch) for k in "FBIW")
    for other in {"F": (), "B": (i, w)}.get(kind, (b,)):
        if other in done:
            why = f"{other} comes before it, so this backward runs twice"
            return why, f"either {b}, or {i} and {w}"
    needed, results = (i, "gradients") if kind == "W" else (f, "activations")
    if kind != "F" and needed not in done:
        return (
            f"it comes before {needed}, whose {results} it needs",
            f"{needed} earlier in this list",
        )
    return None
