"""The lists of all ranks of a deep pipeline, as arrays: for the graph of its moments (pipeline.py).

A list is the actions and messages of a schedule, in order. Each of these is a few instructions, and
the same ones in every micro-batch but the first and the last: a piece. NumPy puts all lists
together from pieces at once, and finds which call every WAIT is for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from paralab.interpret.walk import CALL, JOB, WAIT, WORK, Item
from paralab.parallel.lowering import SEND, Lowered
from paralab.programs import instructions
from paralab.programs.fold import END, FEW, LIKE_ALL
from paralab.programs.instructions import RECEIVE
from paralab.theory.order import CODE, B, F

# What stands between actions: messages, and WAITs for those that were sent. The WAIT for an
# ARRIVAL, of what was received, stands inside an action.
SENT, ARRIVAL = "SENT", "ARRIVAL"
WAYS = (instructions.SEND, RECEIVE, SENT, ARRIVAL)
OP = {WORK: 0, WAIT: 1, CALL: 2, JOB: 3}
RECEIVED, LEFT = -1, -2  # in place of names: that of the message, that of where it is sent to

Shape = tuple[tuple[Any, tuple[Item, ...]], ...]  # what a kind of rank does in its actions


def way(op: str, state: str, chunk: int, v: int) -> int:
    """The number in a rank's table of one of `WAYS`: of "x" or "g", of one of its v stages."""
    return (2 * WAYS.index(op) + (state == "g")) * v + chunk


class Lists:
    """n instructions, rank after rank.

    first      where each rank's begin, and at last n                               (ranks + 1,)
    rank, op, takes, before, members, lane  of each, as in `Item`: ``takes`` and ``before`` numbers
               in the rank's table, -1 being none; of lanes no other rank has the same number (n,)
    waits, of  every WAIT, and the call or job that it is for
    sends, receives  the two calls of every message
    met        the calls of several ranks: per lane, one after the other, its members' calls
    actions    per rank letter, chunk, which of FEW, micro-batch and first instruction of each
    sizes      of the ranks' tables
    """

    def __init__(
        self, rows: Lowered, m: int, v: int, shapes: Sequence[Shape], kinds: Sequence[int]
    ) -> None:
        # Which instruction of which piece stands where.
        pp, pieces = len(kinds), _Pieces(shapes, len(kinds), v)
        ranks, ends = np.repeat(np.arange(pp), np.diff(rows.first)), rows.first[1:]
        number = pieces.number(rows, ranks, m)
        piece = np.insert(number, ends, pieces.each - 1)  # each list has its END
        steps = np.insert(np.arange(len(ranks)), ends, 0)
        ranks = np.insert(ranks, ends, np.arange(pp))
        piece += np.array(kinds)[ranks] * pieces.each
        size = pieces.size[piece]
        begin = np.cumsum(size) - size
        at = np.repeat(pieces.begin[piece] - begin, size) + np.arange(size.sum())
        self.rank, step = np.repeat(ranks, size), np.repeat(steps, size)
        self.first = np.searchsorted(self.rank, np.arange(pp + 1))
        self.op, self.takes, self.before, self.members, name, lane = pieces.columns[:, at]
        self.lane, self.sizes = self.rank * pieces.lanes + lane, pieces.tables[list(kinds)]
        self._items = pieces.items, at

        # A message has the name that it has where it arrives; what was sent, that of its direction.
        calls, into, out = self.op == OP[CALL], name == RECEIVED, name == LEFT
        back = np.where(rows.kind < SEND, rows.kind != F, rows.what == B)[step]
        stage = rows.stage[step] + (out & calls) * (1 - 2 * back)
        message = (back * pp * v + stage) * m + rows.microbatch[step]
        ends = (np.flatnonzero(calls & some) for some in (out, into))
        self.sends, self.receives = (some[np.argsort(message[some])] for some in ends)
        self.met = self._met(np.flatnonzero(calls & (self.members > 0) & ~out & ~into), lane)
        name = np.where(out, (rows.peer[step] - self.rank) % pp, name) + self.rank * pieces.names
        name[into] = pp * pieces.names + message[into]
        self._match(name)
        late = (calls & out)[self.of]
        self.takes[self.waits[late]] = self.takes[self.of[late]] + way(SENT, "x", 0, v)

        action = np.flatnonzero(np.insert(rows.kind < SEND, rows.first[1:], False))
        told = np.stack([number // (FEW * v), number // FEW % v, number % FEW, rows.microbatch])
        told = np.vstack([told[:, steps[action]], (begin - self.first[ranks])[action]])
        self.actions = [told[:, ranks[action] == r] for r in range(pp)]

    def of_rank(self, r: int, ops: Iterable[str]) -> Iterator[tuple[int, Item]]:
        """What a rank's list has of these ops: where, and what."""
        items, at = self._items
        mine = np.arange(self.first[r], self.first[r + 1])
        for here in mine[np.isin(self.op[mine], [OP[op] for op in ops])].tolist():
            yield here, items[at[here]]

    def _match(self, name: np.ndarray) -> None:
        """A WAIT is for the latest call or job that has its name."""
        named = np.flatnonzero(self.op != OP[WORK])
        named = named[np.argsort(name[named], kind="stable")]
        waits = self.op[named] == OP[WAIT]
        begun = named[np.maximum.accumulate(np.where(waits, 0, np.arange(len(named))))]
        self.waits, self.of = named[waits], begun[waits]

    def _met(self, calls: np.ndarray, lane: np.ndarray) -> list[list[list[int]]]:
        count, met = Counter(), defaultdict(lambda: defaultdict(list))
        for call, at, rank in np.stack([calls, lane[calls], self.rank[calls]], 1).tolist():
            met[at][count[at, rank]].append(call)
            count[at, rank] += 1
        return [list(turns.values()) for turns in met.values()]


class _Pieces:
    """What lists are put together from: of every kind of rank each action, message, and `END`. The
    WAIT for what was sent before is a part of the message that has its place.

    items, columns  the instructions, piece after piece; op, takes, before, members, name and lane
                    of each
    begin, size     of each piece; ``each``: how many a kind of rank has
    names, lanes    how many there are; numbers of what is SENT come first, by distance
    tables          size of each kind's
    """

    def __init__(self, shapes: Sequence[Shape], pp: int, v: int) -> None:
        self.v = v
        kinds = [self._of(dict(shape)) for shape in shapes]
        pieces = [piece for kind in kinds for piece in kind]
        self.each, self.size = len(kinds[0]), np.array([len(piece) for piece in pieces])
        self.begin = np.cumsum(self.size) - self.size
        self.items = [item for piece in pieces for item in piece]
        names: dict[Any, int] = defaultdict(lambda: pp + len(names))
        lanes: dict[Any, int] = defaultdict(lambda: len(lanes))

        def name(item: Item) -> int:
            if item.op == WORK or item.name in (RECEIVED, LEFT):
                return item.name or 0
            if item.name == ARRIVAL:
                return RECEIVED
            if item.name[0] == SENT:
                return item.name[1]
            return names[item.name.writes if item.op == JOB else item.name]

        def row(item: Item) -> tuple[int, ...]:
            before = -1 if item.before is None else item.before
            return OP[item.op], item.takes, before, item.members, name(item), lanes[item.lane]

        self.columns = np.array([row(item) for item in self.items]).T
        self.names, self.lanes = pp + len(names), len(lanes)
        most = self.columns[1:3].max(0)
        ends = np.cumsum([sum(map(len, kind)) for kind in kinds])
        self.tables = 1 + np.array([some.max() for some in np.split(most, ends[:-1])])

    def _of(self, shape: dict[Any, tuple[Item, ...]]) -> list[tuple[Item, ...]]:
        """A kind of rank's: actions, what is received, sent first, sent later, the `END`."""
        v, few = range(self.v), range(FEW)
        actions = [shape.get((kind, chunk, n), ()) for kind in CODE for chunk in v for n in few]
        ways = [(state, chunk) for state in "xg" for chunk in v]
        into = [Item(CALL, way(RECEIVE, *one, self.v), RECEIVED, members=2) for one in ways]
        out = [Item(CALL, way(instructions.SEND, *one, self.v), LEFT, members=2) for one in ways]
        wait = Item(WAIT, 0, LEFT)
        messages = [(call,) for call in (*into, *out)] + [(wait, call) for call in out]
        return [*actions, *messages, shape[END]]

    def number(self, rows: Lowered, ranks: np.ndarray, m: int) -> np.ndarray:
        """Of the piece that each step is, among those of its kind of rank."""
        v, pp = self.v, len(rows.first) - 1
        chunk, found = rows.stage // pp, np.empty(len(ranks), int)
        action = rows.kind < SEND
        alike = (rows.kind * pp * v + rows.stage)[action]  # micro-batches of the same
        order = np.argsort(alike, kind="stable")
        turn = np.empty(len(order), int)
        turn[order] = np.arange(len(order)) - np.searchsorted(alike[order], alike[order])
        few = np.where(turn == m - 1, FEW - 1, np.minimum(turn, LIKE_ALL))
        found[action] = (rows.kind * v + chunk)[action] * FEW + few
        to = ranks * pp + (rows.peer - ranks) % pp
        sends = np.flatnonzero(rows.kind == SEND)
        later = np.ones(len(ranks), int)
        later[sends[np.unique(to[sends], return_index=True)[1]]] = 0
        which = np.where(rows.kind == SEND, 1 + later, 0)
        message = len(CODE) * v * FEW + (2 * which + (rows.what == B)) * v + chunk
        return np.where(action, found, message)
