"""A timed step as actions: what outline.py makes its tables of.

When each action begins and ends, and what its rank computes of that time, are arrays; the end of a
step, which belongs to no action, is rows of its own; calls and copies are summed up, and what is
held is sampled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LETTERS = "FBIW"


class Turns(NamedTuple):
    """The actions in a rank's list, in order; letter: its number in LETTERS; first and last
    instruction of compute. (n,) each.
    """

    stage: np.ndarray
    letter: np.ndarray
    microbatch: np.ndarray
    first: np.ndarray
    last: np.ndarray

    @property
    def since(self) -> int:
        """Where the first action of a stage's last micro-batch begins."""
        _, at = np.unique((self.stage * len(LETTERS) + self.letter)[::-1], return_index=True)
        return int(self.first[::-1][at].min())

    @property
    def behind(self) -> int:
        """What is behind all actions."""
        return int(self.last.max()) + 1


class Box(NamedTuple):
    """What is drawn and belongs to no action."""

    pp: int
    lane: str
    kind: str
    start: float
    end: float
    cost: float


class Step(NamedTuple):
    """Seconds from the start of the step, and bytes; n actions, rank after rank, in order.

    pp, stage, letter, microbatch  of actions; as in `Turns`                               (n,)
    start, end     (n,)
    cost, copies   what the rank does in that time, and of it what it adds up and copies      (n,)
    more           what it adds up and copies behind it, before the next one                  (n,)
    boxes      of no action
    sums       {(pipeline rank, what a row of a table says): [payload, bytes sent, seconds, begin]}
               of all calls of a rank that a table has in one row, or copies
    ends       of every rank's step                                                       (ranks,)
    moving     seconds that calls are in flight, and of these during forward and backward; that
               copies between tiers are, and of these during any work: of all ranks           (4,)
    kinds      (tier, category) of bytes
    held       per rank (moment, bytes of every kind), the peaks among them
    """

    pp: np.ndarray
    stage: np.ndarray
    letter: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray
    end: np.ndarray
    cost: np.ndarray
    copies: np.ndarray
    more: np.ndarray
    boxes: list[Box]
    sums: dict[tuple, list]
    ends: np.ndarray
    moving: np.ndarray
    kinds: list[tuple[str, str]]
    held: list[list[tuple[float, np.ndarray]]]
