"""The instruction lists of all ranks of a deep pipeline, as arrays; pipeline.py times them.

A list consists of the actions and messages of a schedule, in order. Each is a *piece*: a few
instructions, which are the same in every micro-batch but the first two and the last. NumPy
assembles all lists from their pieces at once, and finds the call that each WAIT is for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, count, product
from typing import Any

import numpy as np

from paralab.interpret.walk import CALL, JOB, WAIT, WORK, Item
from paralab.parallel.lowering import SEND, Lowered
from paralab.programs import instructions
from paralab.programs.fold import END, FEW, LIKE_ALL
from paralab.programs.instructions import RECEIVE
from paralab.theory.order import CODE, F

# The WAITs of messages: for a SEND between actions, for a RECEIVE inside the action that needs it.
SENT, ARRIVAL = "SENT", "ARRIVAL"
MESSAGE_OPS = (instructions.SEND, RECEIVE, SENT, ARRIVAL)
# What a piece is, as a number: 0 to 3 the letters of an action, as in `CODE`; then a SEND of an
# activation, a SEND of a gradient, a RECEIVE of an activation, a RECEIVE of a gradient; `END`.
SENDS = (SEND, SEND + 1)
# Name of a RECEIVE and its WAIT, until `Lists` knows which message it is. A SEND and its WAIT are
# named by how far away the other rank is, because at most one message to each rank is in flight.
RECEIVED = -1

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
    items, at  the `Item`s of all pieces, and the index of each instruction among them
    """

    def __init__(
        self, rows: Lowered, m: int, v: int, shapes: Sequence[Shape], kinds: Sequence[int]
    ) -> None:
        # The pieces of all kinds of ranks, of each kind ``each``, one kind after the other.
        pp = len(kinds)
        pieces = [piece for shape in shapes for piece in _pieces(shape, v, pp)]
        each, length = len(pieces) // len(shapes), np.array([len(piece) for piece in pieces])
        self.items = list(chain(*pieces))
        columns, names, lanes = _columns(self.items, pp)
        of_kinds = [chain(*(items for _, items in shape)) for shape in shapes]
        highest = [max(max(item.takes, item.before or 0) for item in items) for items in of_kinds]
        self.sizes = 1 + np.array(highest)[list(kinds)]

        # Expand every step of the schedule into the instructions of its piece.
        ranks, ends = np.repeat(np.arange(pp), np.diff(rows.first)), rows.first[1:]
        piece = np.insert(_numbers(rows, ranks, m, v), ends, each - 1)  # each list has its END
        steps = np.insert(np.arange(len(ranks)), ends, 0)
        ranks = np.insert(ranks, ends, np.arange(pp))
        what, chunk, few = piece // (FEW * v), piece // FEW % v, piece % FEW
        piece += np.array(kinds)[ranks] * each
        size, first_item = length[piece], np.cumsum(length) - length
        begin = np.cumsum(size) - size
        self.at = np.repeat(first_item[piece] - begin, size) + np.arange(size.sum())
        self.rank, step = np.repeat(ranks, size), np.repeat(steps, size)
        self.first = np.searchsorted(self.rank, np.arange(pp + 1))
        self.op, self.takes, self.before, self.members, name, lane = columns[:, self.at]
        self.lane = self.rank * lanes + lane
        action = np.flatnonzero(what < SEND)
        fields = np.stack([what, chunk, few, rows.microbatch[steps], begin - self.first[ranks]])
        self.actions = [fields[:, action[ranks[action] == r]] for r in range(pp)]

        # Find both ends of each message, and the call that each WAIT is for.
        calls, into = self.op == CALL, name == RECEIVED
        out = calls & np.isin(np.repeat(what, size), SENDS)
        back = (rows.what != F)[step]
        stage = rows.stage[step] + out * (1 - 2 * back)
        message = (back * pp * v + stage) * m + rows.microbatch[step]
        self.sends, self.receives = (
            end[np.argsort(message[end])] for end in map(np.flatnonzero, (out, calls & into))
        )
        self.met = self._met(np.flatnonzero(calls & (self.members > 0) & ~out & ~into), lane)
        name += self.rank * names
        name[into] = pp * names + message[into]
        self._match(name)
        sent = out[self.of]
        self.takes[self.waits[sent]] = self.takes[self.of[sent]] + message_index(SENT, "x", 0, v)

    def _match(self, name: np.ndarray) -> None:
        """Set `waits` and `of`: a WAIT is for the latest call or job that has its name."""
        named = np.flatnonzero(self.op != WORK)
        named = named[np.argsort(name[named], kind="stable")]
        waits = self.op[named] == WAIT
        begun = named[np.maximum.accumulate(np.where(waits, 0, np.arange(len(named))))]
        self.waits, self.of = named[waits], begun[waits]

    def _met(self, calls: np.ndarray, lane: np.ndarray) -> list[tuple[tuple, list[int]]]:
        numbers, members = defaultdict(count), defaultdict(list)
        for call, lane_number, rank in np.stack([calls, lane[calls], self.rank[calls]], 1).tolist():
            members[lane_number, next(numbers[lane_number, rank])].append(call)
        return list(members.items())


def _columns(items: Sequence[Item], pp: int) -> tuple[np.ndarray, int, int]:
    """(rows op, takes, before, members, name and lane, with a column per item; how many names and
    lanes there are). The first names are the distances of ranks.
    """
    names: dict[Any, int] = defaultdict(lambda: pp + len(names))
    lanes: dict[Any, int] = defaultdict(lambda: len(lanes))

    def row(item: Item) -> tuple[int, ...]:
        name = item.name.writes if item.op == JOB else item.name
        name = name if isinstance(name, int) else names[name]
        before = -1 if item.before is None else item.before
        return item.op, item.takes, before, item.members, name, lanes[item.lane]

    return np.array(list(map(row, items))).T, pp + len(names), len(lanes)


def _pieces(shape: Shape, v: int, pp: int) -> Iterator[tuple[Item, ...]]:
    """The pieces of a kind of rank, `FEW` for each action and message, and `END`. Of a SEND the
    second begins with the WAIT for the one before it to the same rank; the rest are empty.
    """
    of, chunks = dict(shape), range(v)
    for key in product(CODE, chunks, range(FEW)):
        yield of.get(key, ())
    for op in (instructions.SEND, RECEIVE):
        for state, way in (("x", 1), ("g", -1)):
            name = RECEIVED if op == RECEIVE else way % pp
            for chunk in chunks:
                call = Item(CALL, message_index(op, state, chunk, v), name, members=2)
                yield from [(call,), (Item(WAIT, 0, name), call), *[()] * (FEW - 2)]
    yield of[END]


def _numbers(rows: Lowered, ranks: np.ndarray, m: int, v: int) -> np.ndarray:
    """Per step of the schedule the number of its piece, among those of its kind of rank:
    (what it is * v + chunk) * `FEW` + which of the few, in the order of `_pieces`.
    """
    pp, action, sends = len(rows.first) - 1, rows.kind < SEND, rows.kind == SEND
    # Which of those alike it is: of actions that differ in the micro-batch, of sends to a rank.
    alike = rows.kind * pp * pp * v + np.where(action, rows.stage, ranks * pp + rows.peer)
    order, turn = np.argsort(alike, kind="stable"), np.empty(len(alike), int)
    turn[order] = np.arange(len(order)) - np.searchsorted(alike[order], alike[order])
    few = np.where(turn == m - 1, FEW - 1, np.minimum(turn, LIKE_ALL))
    few = np.where(action, few, sends & (turn > 0))
    what = np.where(action, rows.kind, 2 * rows.kind - SEND + (rows.what != F))
    return (what * v + rows.stage // pp) * FEW + few
