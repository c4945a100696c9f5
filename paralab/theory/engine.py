"""The event engine: when does everything happen, if every rank had a device of its own?

Each rank is one compute lane and one first-in-first-out lane per group it talks to (and per copy
path). A rank's program lists what it does in launch order. Nothing in it is decided by the clock,
so the moment of every item is a longest path through a graph: one pass in topological order, no
simulation steps, and the answer does not depend on the order of visiting. Cost: O(items), about 2
microseconds each.

    compute     starts when the item before it on the compute lane has ended
    collective  starts at the latest, over its members, of launch and free lane;
                lasts cost(op, level, wire bytes), the slowest member's
    wait        ends at max(now, the end of what it waits for)
    copy        like a collective of one member, with its own seconds

The same code answers `predict` (modelled costs), `report.replay` (recorded costs) and, on a bare
schedule, theory/pipeline.py; it is the alpha-beta model of Hockney (1994) on top of the order of
execution. Times are seconds from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from paralab.spec import Cluster

Cost = Callable[[str, str, int], float]  # (op, level, wire bytes) -> seconds


class Compute(NamedTuple):
    """``seconds`` of work on the rank's compute lane."""

    seconds: float


class Collective(NamedTuple):
    """A launch that does not block. All ``ranks`` launch the same ``key`` once, each on its lane.

    A send and its receive are a collective of two: same key, ops "send" and "recv".
    ``after`` are positions of earlier items of this rank that must have ended before it starts.
    """

    key: Hashable
    lane: str
    ranks: tuple[int, ...]
    op: str
    wire_bytes: int
    level: str = "intra"
    after: tuple[int, ...] = ()


class Copy(NamedTuple):
    """A launch that does not block: ``seconds`` on a copy lane ("h2d", "d2h", "disk")."""

    lane: str
    seconds: float
    after: tuple[int, ...] = ()


class Wait(NamedTuple):
    """The compute lane stops until the items at positions ``on`` of this rank have ended."""

    on: tuple[int, ...]


Item = Compute | Collective | Copy | Wait
Program = Sequence[Item]


class Times(NamedTuple):
    """``start[rank][position]`` and ``end[rank][position]`` of every item, in seconds."""

    start: list[list[float]]
    end: list[list[float]]


def link_cost(cluster: Cluster) -> Cost:
    """alpha + wire bytes / bandwidth, of the link that an op uses at a level of ``cluster``."""
    links: dict[tuple[str, str], tuple[float, float]] = {}

    def cost(op: str, level: str, wire_bytes: int) -> float:
        if op == "recv":  # the sender's side is the one that moves the bytes
            return 0.0
        link = links.get((op, level))
        if link is None:
            found = cluster.link(op, level)
            link = links[op, level] = (found.alpha, found.bandwidth)
        return link[0] + wire_bytes / link[1]

    return cost


def simulate(programs: Sequence[Program], cost: Cost) -> Times:
    """When every item of every rank starts and ends. ``programs[rank]`` is in launch order.

    Raises ValueError naming what each rank waits for, if no rank can go on (a collective that a
    member never launches, or launches in another order on the same lane), and on a malformed
    program.
    """
    graph = _Graph(programs, cost)
    ready = graph.ready
    end, done = longest_path(graph.seconds, graph.missing, graph.following, ready)
    if done < len(ready):
        raise ValueError(_explain(programs, graph))
    starts, ends = [], []
    for program, nodes in zip(programs, graph.nodes, strict=True):
        rank_start, rank_end, now = [], [], 0.0
        for item, node in zip(program, nodes, strict=True):
            finish = end[node]
            kind = type(item)
            if kind is Compute or kind is Wait:
                # A wait is ready when it ends; it starts as its lane is free.
                rank_start.append(now)
                now = finish
            else:
                rank_start.append(ready[node])
            rank_end.append(finish)
        starts.append(rank_start)
        ends.append(rank_end)
    return Times(starts, ends)


def longest_path(
    seconds: Sequence[float],
    missing: list[int],
    following: Sequence[Sequence[int]],
    ready: list[float],
) -> tuple[list[float], int]:
    """The heart of the engine: when every node of a graph ends, and how many ever do.

    seconds    what each node takes
    missing    how many nodes each has to wait for; counted down, so what is above 0 afterwards is
               a node that cannot start, because it waits for itself by way of others
    following  the nodes that wait for each
    ready      the earliest start of each, 0.0 as a rule; afterwards its start

    A node starts when the last of those it waits for has ended.
    """
    frontier = [node for node, count in enumerate(missing) if not count]
    done = 0
    end = [0.0] * len(ready)
    while frontier:
        node = frontier.pop()
        done += 1
        finish = end[node] = ready[node] + seconds[node]
        for other in following[node]:
            if finish > ready[other]:
                ready[other] = finish
            missing[other] -= 1
            if not missing[other]:
                frontier.append(other)
    return end, done


class _Graph:
    """Every item as a node (a collective's members share one), with what must end before it."""

    def __init__(self, programs: Sequence[Program], cost: Cost) -> None:
        self.ready: list[
            float
        ] = []  # latest end of what came before; the start once nothing is missing
        self.missing: list[int] = []  # how many of those have not ended
        self.seconds: list[float] = []
        self.following: list[list[int]] = []
        self.nodes: list[list[int]] = []  # [rank][position] -> node
        self.shared: dict[Hashable, int] = {}
        self.launched: dict[Hashable, dict[int, Collective]] = {}
        for rank, program in enumerate(programs):
            self._add_rank(rank, program, cost)
        for key, members in self.launched.items():
            # A member that never launches is a dependency that never ends.
            self.missing[self.shared[key]] += len(next(iter(members.values())).ranks) - len(members)

    def _new(self, seconds: float) -> int:
        self.ready.append(0.0)
        self.missing.append(0)
        self.seconds.append(seconds)
        self.following.append([])
        return len(self.ready) - 1

    def _join(self, rank: int, item: Collective, seconds: float) -> int:
        """The node of a collective, one more member of which has been met."""
        members = self.launched.setdefault(item.key, {})
        if not members:
            self.shared[item.key] = self._new(seconds)
        else:
            other_rank, other = next(iter(members.items()))
            paired = {item.op, other.op} == {"send", "recv"}
            if other.ranks != item.ranks or (other.op != item.op and not paired):
                raise ValueError(
                    f"{_name(item)} of rank {rank} does not match {_name(other)} of rank "
                    f"{other_rank}: members of one collective name the same operation and ranks"
                )
        if rank in members:
            raise ValueError(
                f"rank {rank} launches {_name(item)} twice; give each call its own key"
            )
        if rank not in item.ranks:
            raise ValueError(f"rank {rank} launches {_name(item)}, but is not one of its ranks")
        members[rank] = item
        node = self.shared[item.key]
        if seconds > self.seconds[node]:
            self.seconds[node] = seconds
        return node

    def _add_rank(self, rank: int, program: Program, cost: Cost) -> None:
        nodes: list[int] = []
        compute = -1  # the last node of the compute lane
        lanes: dict[str, int] = {}  # the last node of every other lane
        missing, following = self.missing, self.following
        for position, item in enumerate(program):
            kind = type(item)
            if kind is Compute:
                node, needs = self._new(item.seconds), ()
            elif kind is Wait:
                node, needs = self._new(0.0), item.on
            elif kind is Collective:
                node = self._join(rank, item, cost(item.op, item.level, item.wire_bytes))
                needs = item.after
            elif kind is Copy:
                node, needs = self._new(item.seconds), item.after
            else:
                raise ValueError(
                    f"rank {rank}, position {position}: {item!r} is not an engine item"
                )
            if compute >= 0:
                following[compute].append(node)
                missing[node] += 1
            if kind is Compute or kind is Wait:
                compute = node
            else:
                previous = lanes.get(item.lane, -1)
                if previous >= 0:
                    following[previous].append(node)
                    missing[node] += 1
                lanes[item.lane] = node
            for earlier in needs:
                if not 0 <= earlier < position:
                    raise ValueError(
                        f"rank {rank}, position {position}: waits for position {earlier}; "
                        "only an earlier item of the same rank can be waited for"
                    )
                following[nodes[earlier]].append(node)
                missing[node] += 1
            nodes.append(node)
        self.nodes.append(nodes)


def _name(item: Item) -> str:
    if isinstance(item, Collective):
        return f"{item.op} {item.key!r} on {item.lane} of ranks {item.ranks}"
    return f"{type(item).__name__.lower()} on {getattr(item, 'lane', 'the compute lane')}"


def _explain(programs: Sequence[Program], graph: _Graph) -> str:
    """Who waits for whom, once nobody can go on."""
    lines = []
    for rank, program in enumerate(programs):
        nodes = graph.nodes[rank]
        stuck = [i for i, node in enumerate(nodes) if graph.missing[node] > 0]
        if not stuck:
            continue
        waits = [i for i in stuck if isinstance(program[i], Wait)]
        blamed = stuck[0]  # nothing waits for it, yet it never starts
        if waits:
            blamed = next(j for j in program[waits[0]].on if graph.missing[nodes[j]] > 0)
        item = program[blamed]
        why = "which cannot start"
        if isinstance(item, Collective):
            why = _who_is_missing(programs, graph, item)
        lines.append(f"rank {rank} {'waits for' if waits else 'launched'} {_name(item)}, {why}")
    return "no rank can go on: " + "; ".join(lines)


def _who_is_missing(programs: Sequence[Program], graph: _Graph, item: Collective) -> str:
    members = graph.launched[item.key]
    never = [r for r in item.ranks if r not in members]
    if never:
        return f"which rank {', '.join(map(str, never))} never launches"
    late = []
    for rank in item.ranks:
        program, nodes = programs[rank], graph.nodes[rank]
        position = nodes.index(graph.shared[item.key])
        if any(
            graph.missing[node] > 0 and isinstance(program[i], (Compute, Wait))
            for i, node in enumerate(nodes[:position])
        ):
            late.append(rank)
    if late:
        return f"which rank {', '.join(map(str, late))} has not reached"
    return "which is queued behind another call on a member's lane"
