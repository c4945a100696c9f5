"""The event engine: when does everything happen, if every rank had a device of its own?

Each rank is one compute lane and one first-in-first-out lane per group it talks to (and per copy
path). A rank's program lists what it does in launch order. Nothing in it is decided by the clock,
so the moment of every item is a longest path through a graph: one pass in topological order, no
simulation steps, and the answer does not depend on the order of visiting. Cost: O(items), about 2
microseconds each. One rule holds for all items:

    An item starts when the last item before it on the compute lane has ended, its own lane is free,
    and what it comes ``after`` has ended; a call when this is so on all its members.

Work on the compute lane is such an item. A wait is one that takes no time and comes after what it
waits for. Copies and calls are launched and go on next to the compute lane; a call takes as long
as its slowest member says, and a send and its receive are one call. `report.replay` times what was
recorded so. Programs, which know more of what they do, are timed by interpret/time.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """What a rank does: ``seconds`` on a lane.

    lane     "compute", or one that works at the same time
    after    positions of earlier items of this rank
    call     of a call the key that its members launch, each once; None for what one rank does
    members  of a call the ranks that launch it
    """

    lane: str
    seconds: float
    after: tuple[int, ...] = ()
    call: Hashable = None
    members: tuple[int, ...] = ()


class Times(NamedTuple):
    """``start[rank][position]`` and ``end[rank][position]`` of every item, in seconds."""

    start: list[list[float]]
    end: list[list[float]]


def simulate(programs: Sequence[Sequence[Item]]) -> Times:
    """When every item of every rank starts and ends. ``programs[rank]`` is in launch order.

    Raises ValueError if no rank can go on: a member never launches a call, or launches it in
    another order on the same lane.
    """
    seconds: list[float] = []  # of every node: an item, or a call with all its members
    missing: list[int] = []  # how many nodes each has to wait for
    following: list[list[int]] = []  # the nodes that wait for each
    nodes: list[list[int]] = []  # [rank][position] -> node
    calls: dict[Hashable, int] = {}  # -> node
    launched: dict[Hashable, list[int]] = {}  # by which ranks
    for rank, program in enumerate(programs):
        mine: list[int] = []
        lanes: dict[str, int] = {}  # the last node of each
        for item in program:
            node = len(seconds) if item.call is None else calls.setdefault(item.call, len(seconds))
            if node == len(seconds):
                seconds.append(item.seconds)
                missing.append(0 if item.call is None else len(item.members))
                following.append([])
            if item.call is not None:
                launched.setdefault(item.call, []).append(rank)
                missing[node] -= 1  # a member that never launches is missing for ever
                seconds[node] = max(seconds[node], item.seconds)
            before = {lanes.get("compute"), lanes.get(item.lane), *(mine[i] for i in item.after)}
            for other in before - {None}:
                following[other].append(node)
                missing[node] += 1
            lanes[item.lane] = node
            mine.append(node)
        nodes.append(mine)

    start, end = [0.0] * len(seconds), [0.0] * len(seconds)
    frontier = [node for node, count in enumerate(missing) if not count]
    while frontier:
        node = frontier.pop()
        finish = end[node] = start[node] + seconds[node]
        for other in following[node]:
            if finish > start[other]:
                start[other] = finish
            missing[other] -= 1
            if not missing[other]:
                frontier.append(other)
    if any(missing):
        raise ValueError(f"no rank can go on: {_why(programs, launched)}")
    return Times(
        [[start[n] for n in row] for row in nodes], [[end[n] for n in row] for row in nodes]
    )


def _why(programs: Iterable[Iterable[Item]], launched: dict[Hashable, list[int]]) -> str:
    """Which call lacks a member; if none does, ranks launch their calls in different orders."""
    for item in (item for program in programs for item in program if item.call is not None):
        there = launched[item.call]
        never = [str(rank) for rank in item.members if rank not in there]
        if never:
            return (
                f"rank {there[0]} waits for {item.call}, which rank "
                f"{', '.join(never)} never launches"
            )
    return "the members of a group launch its calls in different orders"
