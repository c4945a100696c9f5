"""The memory of a rank in a timed step, as samples; for a folded program without its whole list.

Every action and every message allocates some bytes and frees others, and holds more in between.
These changes are worked out once, from the few micro-batches of programs/fold.py, and added up
along the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, pairwise
from typing import Any

import numpy as np

from paralab.interpret.lines import Line
from paralab.interpret.memory import Kind, moments
from paralab.programs.fold import Lists
from paralab.theory.order import CODE

SAMPLES = 12  # in addition to the peaks
Array = np.ndarray
Held = dict[Kind, int]
Step = tuple[Any, Held, Held, Held]  # key of an action or message; memory before it, peak, after it


def samples(
    behind: Array, tops: Array, leave: Array, actions: Array, device: Array
) -> list[tuple[float, Array]]:
    """(moment, bytes of every kind) of a rank: at the start of the step, after some actions, at the
    peak of the device and of the other tiers, and at the end.

    behind   bytes of every kind before the first instruction and after each        (kinds, 1 + n)
    tops     the same at the peak of each instruction                                   (kinds, n)
    leave    when the rank goes on to the next instruction                                    (n,)
    actions  positions of each action's last instruction
    device   whether a kind is on the device                                              (kinds,)
    """
    before, behind = behind[:, 0], behind[:, 1:]
    chosen = actions[np.unique(np.linspace(0, len(actions) - 1, SAMPLES).astype(int))]
    taken = {0.0: before} | {float(leave[at]): behind[:, at] for at in chosen.tolist()}
    for sizes, tier in ((tops, device), (behind, ~device)):
        held = sizes[tier].sum(0)
        at = int(held.argmax())
        if held[at] > before[tier].sum():
            taken[float((leave[at] + (leave[at - 1] if at else 0.0)) / 2)] = sizes[:, at]
    taken[float(leave[-1])] = behind[:, -1]
    return [(moment, taken[moment]) for moment in sorted(taken)]


def kinds_of(walks: Iterable[Iterable[tuple]]) -> list[Kind]:
    """The kinds of memory in these walks; of an entry of a walk all but the first are `Held`."""
    return sorted({kind for walk in walks for _, *helds in walk for held in helds for kind in held})


def sizes_of(helds: Iterable[Held], kinds: Sequence[Kind]) -> Array:
    """Bytes of every kind, (helds, kinds)."""
    return np.array([[held.get(kind, 0) for kind in kinds] for held in helds])


class Effects:
    """What the k instructions of a kind of rank's table do to memory; an action's effect stands at
    the index of its last instruction.

    before      bytes of every kind before the first instruction                         (kinds,)
    added, top  bytes that each adds; its peak beyond what there was before it           (k, kinds)
    """

    def __init__(
        self, walk: Sequence[Step], symbols: Iterable[int], k: int, kinds: Sequence[Kind]
    ) -> None:
        """walk: `steps` of a list; symbols: the index of each step but the first in the table."""
        self.device = np.array([tier == "device" for tier, _ in kinds])
        self.there, self.actions = np.zeros((2, k), bool)  # has an effect; is an action
        self.added, self.top = np.zeros((2, k, len(kinds)), int)
        (_, *start), *rest = walk
        self.before = sizes_of(start, kinds)[0]
        # A message stands in the list several times. All but the last have the effect of the first,
        # which is written last.
        for at, (key, *helds) in reversed(list(zip(symbols, rest, strict=True))):
            before, most, behind = sizes_of(helds, kinds)
            self.added[at], self.top[at] = behind - before, most - before
            self.there[at], self.actions[at] = True, key[0] in CODE

    def samples(self, line: Line) -> list[tuple[float, np.ndarray]]:
        """`samples` of a rank of this kind, and the highest peak after its last action."""
        at = np.flatnonzero(self.there[line.symbol])
        symbol, leave = line.symbol[at], line.left[at]
        # A kind's bytes lie next to each other, which makes the sums several times as quick.
        added, top = self.added.T.take(symbol, 1), self.top.T.take(symbol, 1)
        behind = np.column_stack([self.before, added]).cumsum(1)
        tops, actions = behind[:, :-1] + top, np.flatnonzero(self.actions[symbol])
        taken = dict(samples(behind, tops, leave, actions, self.device))
        end = actions[-1] + 1
        highest = end + tops[self.device, end:].sum(0).argmax()
        taken.setdefault((leave[end - 1] + line.left[-1]) / 2, tops[:, highest])
        return sorted(taken.items(), key=lambda sample: sample[0])

    def peak(self, symbol: np.ndarray) -> int:
        """Bytes on the device at the peak of a rank that runs these instructions."""
        symbol = symbol[self.there[symbol]]
        added, top = (sizes[:, self.device].sum(1)[symbol] for sizes in (self.added, self.top))
        beyond = added.cumsum() - added + top  # what there was before the first
        return int(self.before[self.device].sum() + max(0, beyond.max()))


def steps(folded: Lists, gloo: bool) -> Iterator[Step]:
    """Go through the list of a few micro-batches. A step is an action, a message, the WAIT for one,
    or an instruction after the last action. The first step yielded is the memory before the list.
    """
    pairs = pairwise([*folded.labels, ""])
    ends = [key != after or key[0] not in CODE for key, after in pairs]
    walk = moments(folded.program, folded.rank, gloo=gloo, ends=ends)
    _, start, before = next(walk)
    yield "", start, start, start
    for (_, top, behind), key in zip(walk, compress(folded.labels, ends), strict=True):
        yield key, before, top, behind
        before = behind
