"""What a rank holds in a timed step, in samples; and of a folded program without its list.

Every action and every message adds some bytes and ends others, and has more meanwhile. That is
worked out once, from the few micro-batches of programs/fold.py, and summed up along the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
Step = tuple[Any, Held, Held, Held]  # its key; what there is before it, at its peak, and behind it


def samples(
    behind: Array, most: Array, top: Callable, leave: Array, actions: Array, device: Array
) -> list[tuple[float, Array]]:
    """Of a rank in a step: at the start, behind some actions, at each tier's peak, at the end.

    behind     bytes of every kind before the first instruction, and behind each    (1 + n, kinds)
    most, top  on the device at its peak within each; called with one, of every kind then
    leave      when the rank goes on behind it                                                (n,)
    actions    the last instruction of each
    device     which kinds are on the device
    """
    before, behind = behind[0], behind[1:]
    some = actions[np.unique(np.linspace(0, len(actions) - 1, SAMPLES).astype(int))]
    found = {0.0: before} | {float(leave[at]): behind[at] for at in some.tolist()}
    other = behind[:, ~device].sum(1)
    for sizes, held, first in (
        (most, top, before[device].sum()),
        (other, behind.__getitem__, before[~device].sum()),
    ):
        at = int(sizes.argmax())
        if sizes[at] > first:
            found[float((leave[at] + (leave[at - 1] if at else 0.0)) / 2)] = held(at)
    found[float(leave[-1])] = behind[-1]
    return [(moment, found[moment]) for moment in sorted(found)]


class Effects:
    """What k instructions do to the memory of a kind of rank; an action as a whole, by its last.

    before      bytes of every kind before the first                                     (kinds,)
    added, top  what each adds, and has at its peak beyond what there was before it      (k, kinds)
    """

    def __init__(
        self, walk: Sequence[Step], symbols: Iterable[int], k: int, kinds: Sequence[Kind]
    ) -> None:
        """walk: `steps` of a list; symbols: the number of each one's instruction."""
        self.device = np.array([tier == "device" for tier, _ in kinds])
        self.there, self.actions = np.zeros((2, k), bool)
        self.added, self.top = np.zeros((2, k, len(kinds)), int)
        (_, before, *_), *rest = walk
        self.before = np.array([before.get(kind, 0) for kind in kinds])
        # Of messages the first counts, which all but the last are like.
        for at, (key, *three) in reversed(list(zip(symbols, rest, strict=True))):
            here, most, behind = (np.array([held.get(kind, 0) for kind in kinds]) for held in three)
            self.added[at], self.top[at] = behind - here, most - here
            self.there[at], self.actions[at] = True, key[0] in CODE

    def samples(self, line: Line) -> list[tuple[float, np.ndarray]]:
        """Of a rank of this kind, and in addition where most is behind its actions."""
        at = np.flatnonzero(self.there[line.symbol])
        symbol, leave = line.symbol[at], line.left[at]
        behind = np.vstack([self.before, self.added[symbol]]).cumsum(0)
        beyond, actions = self.top - self.added, np.flatnonzero(self.actions[symbol])
        most = self._most(symbol)

        def top(n: int) -> np.ndarray:
            return behind[n + 1] + beyond[symbol[n]]

        found = dict(samples(behind, most, top, leave, actions, self.device))
        end = actions[-1] + 1
        found.setdefault((leave[end - 1] + line.end) / 2, top(end + int(most[end:].argmax())))
        return sorted(found.items(), key=lambda sample: sample[0])

    def peak(self, symbol: np.ndarray) -> int:
        """Bytes on the device at most, of a rank that goes through these instructions."""
        most = self._most(symbol[self.there[symbol]])
        return int(max(self.before[self.device].sum(), most.max()))

    def _most(self, symbol: np.ndarray) -> np.ndarray:
        """Bytes on the device at its peak within each of these instructions."""
        added, top = (some[:, self.device].sum(1)[symbol] for some in (self.added, self.top))
        return self.before[self.device].sum() + added.cumsum() - added + top


def steps(found: Lists, gloo: bool) -> Iterator[Step]:
    """A walk through the list of a few micro-batches, in steps: an action, a message, the wait for
    one, or an instruction of the end. Of each its key, what there is before it, at the device's
    peak, and behind it. First what there is before the list.
    """
    pairs = pairwise([*found.labels, ""])
    ends = [key != after or key[0] not in CODE for key, after in pairs]
    walk = moments(found.program, found.rank, gloo=gloo, ends=ends)
    _, before, here = next(walk)
    yield "", before, before, before
    for (_, top, behind), key in zip(walk, compress(found.labels, ends), strict=True):
        yield key, here, top, behind
        here = behind
