"""The actions in a rank's list, of which a step in outline consists, and what belongs to none."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paralab.theory.order import CODE


class Turns(NamedTuple):
    """The actions in a rank's list, in order; letter: as in `CODE`; first and last
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
        _, at = np.unique((self.stage * len(CODE) + self.letter)[::-1], return_index=True)
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
