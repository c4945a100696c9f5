"""The instruction lists of all ranks of a deep pipeline, as arrays; pipeline.py times them.

A list consists of the actions and messages of a schedule, in order. Each is a *piece*: a few
instructions, which are the same in every micro-batch but the first two and the last. NumPy
assembles all lists from their pieces at once, and finds the call that each WAIT is for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paralab.interpret.walk import CALL, JOB, WAIT, WORK, Item
from paralab.parallel.lowering import SEND, Lowered
from paralab.programs import instructions
from paralab.programs.fold import END, FEW, LIKE_ALL
from paralab.programs.instructions import RECEIVE
from paralab.theory.order import CODE, B, F

# The WAITs of messages: for a SEND between actions, for a RECEIVE inside the action that needs it.
SENT, ARRIVAL = "SENT", "ARRIVAL"
MESSAGE_OPS = (instructions.SEND, RECEIVE, SENT, ARRIVAL)
# Names of an item until `Lists` knows the message: RECEIVED stands for the message itself, LEFT for
# the rank that it is sent to, and a WAIT between actions is named by the distance of that rank.
RECEIVED, LEFT = -1, -2

Shape = tuple[tuple[Any, tuple[Item, ...]], ...]  # per action of a kind of rank, and END, its items


def message_index(op: str, state: str, chunk: int, v: int) -> int:
    """Index in a rank's table of one of `MESSAGE_OPS`, for an activation "x" or a gradient "g" of
    one of the rank's v stages.
    """
    return (2 * MESSAGE_OPS.index(op) + (state == "g")) * v + chunk


class Lists:
    """The lists of all ranks, one after the other: n instructions.

    first      position of each rank's first instruction, and n at the end           (ranks + 1,)
    rank, op, takes, before, members, lane  as in `Item`, but ``takes`` and ``before`` are indices
               in the rank's table (-1: none), and each rank numbers its lanes apart        (n,)
    waits, of  positions of the WAITs, and of the call or job that each is for
    sends, receives  positions of the two ends of each message, in the same order
    met        collectives of several pipeline ranks: (lane, number on it), the members' calls
    actions    per rank the rows letter, chunk, number among the FEW micro-batches, micro-batch and
               first instruction, with a column per action
    sizes      of the ranks' tables
    """

    def __init__(
        self, rows: Lowered, m: int, v: int, shapes: Sequence[Shape], kinds: Sequence[int]
    ) -> None:
        # Expand every step of the schedule into the instructions of its piece.
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

        # A RECEIVE is named by its message. A SEND is named by the rank that it is sent to, because
        # at most one message to each rank is in flight.
        calls, into, out = self.op == CALL, name == RECEIVED, name == LEFT
        back = np.where(rows.kind < SEND, rows.kind != F, rows.what == B)[step]
        stage = rows.stage[step] + (out & calls) * (1 - 2 * back)
        message = (back * pp * v + stage) * m + rows.microbatch[step]
        ends = (np.flatnonzero(calls & side) for side in (out, into))
        self.sends, self.receives = (end[np.argsort(message[end])] for end in ends)
        self.met = self._met(np.flatnonzero(calls & (self.members > 0) & ~out & ~into), lane)
        name = np.where(out, (rows.peer[step] - self.rank) % pp, name) + self.rank * pieces.names
        name[into] = pp * pieces.names + message[into]
        self._match(name)
        sent = (calls & out)[self.of]
        self.takes[self.waits[sent]] = self.takes[self.of[sent]] + message_index(SENT, "x", 0, v)

        action = np.flatnonzero(np.insert(rows.kind < SEND, rows.first[1:], False))
        fields = np.stack([number // (FEW * v), number // FEW % v, number % FEW, rows.microbatch])
        fields = np.vstack([fields[:, steps[action]], (begin - self.first[ranks])[action]])
        self.actions = [fields[:, ranks[action] == r] for r in range(pp)]

    def of_rank(self, r: int, ops: Sequence[int]) -> Iterator[tuple[int, Item]]:
        """(position, item) of every instruction of a rank's list that is one of these ops."""
        items, at = self._items
        mine = np.arange(self.first[r], self.first[r + 1])
        for position in mine[np.isin(self.op[mine], ops)].tolist():
            yield position, items[at[position]]

    def _match(self, name: np.ndarray) -> None:
        """Set `waits` and `of`: a WAIT is for the latest call or job that has its name."""
        named = np.flatnonzero(self.op != WORK)
        named = named[np.argsort(name[named], kind="stable")]
        waits = self.op[named] == WAIT
        begun = named[np.maximum.accumulate(np.where(waits, 0, np.arange(len(named))))]
        self.waits, self.of = named[waits], begun[waits]

    def _met(self, calls: np.ndarray, lane: np.ndarray) -> list[tuple[tuple, list[int]]]:
        count, members = Counter(), defaultdict(list)
        for call, lane_number, rank in np.stack([calls, lane[calls], self.rank[calls]], 1).tolist():
            count[lane_number, rank] += 1
            members[lane_number, count[lane_number, rank]].append(call)
        return list(members.items())


class _Pieces:
    """The pieces of all kinds of ranks: their actions, their messages, and `END`. A message that
    is sent begins with the WAIT for the one before it to the same rank, if there was one.

    items, columns  the instructions, piece after piece, as `Item`s; and the rows op, takes, before,
                    members, name and lane
    begin, size     first instruction and length of each piece; ``each``: pieces of a kind of rank
    names, lanes    how many there are; the first are the distances of ranks
    tables          size of the table of each kind
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
            if item.op == WORK or isinstance(item.name, int):
                return item.name or 0
            return names[item.name.writes if item.op == JOB else item.name]

        def row(item: Item) -> tuple[int, ...]:
            before = -1 if item.before is None else item.before
            return item.op, item.takes, before, item.members, name(item), lanes[item.lane]

        self.columns = np.array([row(item) for item in self.items]).T
        self.names, self.lanes = pp + len(names), len(lanes)
        most = ([max(i.takes, i.before or 0) for piece in kind for i in piece] for kind in kinds)
        self.tables = 1 + np.array(list(map(max, most)))

    def _of(self, shape: dict[Any, tuple[Item, ...]]) -> list[tuple[Item, ...]]:
        """The pieces of a kind of rank: actions, receives, each first send to a rank, later sends,
        `END`.
        """
        v, few = range(self.v), range(FEW)
        actions = [shape.get((kind, chunk, n), ()) for kind in CODE for chunk in v for n in few]
        receive, send = (
            [message_index(op, state, chunk, self.v) for state in "xg" for chunk in v]
            for op in (RECEIVE, instructions.SEND)
        )
        into = [Item(CALL, index, RECEIVED, members=2) for index in receive]
        out = [Item(CALL, index, LEFT, members=2) for index in send]
        wait = Item(WAIT, 0, LEFT)
        messages = [(call,) for call in (*into, *out)] + [(wait, call) for call in out]
        return [*actions, *messages, shape[END]]

    def number(self, rows: Lowered, ranks: np.ndarray, m: int) -> np.ndarray:
        """Per step of the schedule the number of its piece, among those of its kind of rank."""
        v, pp = self.v, len(rows.first) - 1
        chunk, piece = rows.stage // pp, np.empty(len(ranks), int)
        action = rows.kind < SEND
        alike = (rows.kind * pp * v + rows.stage)[action]  # equal but for the micro-batch
        order = np.argsort(alike, kind="stable")
        turn = np.empty(len(order), int)
        turn[order] = np.arange(len(order)) - np.searchsorted(alike[order], alike[order])
        few = np.where(turn == m - 1, FEW - 1, np.minimum(turn, LIKE_ALL))
        piece[action] = (rows.kind * v + chunk)[action] * FEW + few
        to = ranks * pp + (rows.peer - ranks) % pp
        sends = np.flatnonzero(rows.kind == SEND)
        later = np.ones(len(ranks), int)
        later[sends[np.unique(to[sends], return_index=True)[1]]] = 0
        which = np.where(rows.kind == SEND, 1 + later, 0)  # 0 receive, 1 first send, 2 later send
        message = len(CODE) * v * FEW + (2 * which + (rows.what == B)) * v + chunk
        return np.where(action, piece, message)
