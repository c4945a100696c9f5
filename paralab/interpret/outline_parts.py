"""What a step in outline consists of: the actions in a rank's list, and boxes outside them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paralab.theory.order import CODE


class Actions(NamedTuple):
    """The actions in a rank's list, in order, (n,) each. letter: as in `CODE`; first, last:
    positions of the first and the last compute.
    """

    stage: np.ndarray
    letter: np.ndarray
    microbatch: np.ndarray
    first: np.ndarray
    last: np.ndarray

    @property
    def since(self) -> int:
        """Where the earliest of the last actions begins; each stage has a last one per letter."""
        _, at = np.unique((self.stage * len(CODE) + self.letter)[::-1], return_index=True)
        return int(self.first[::-1][at].min())

    @property
    def after_all(self) -> int:
        """Position of the first instruction after all actions."""
        return int(self.last.max()) + 1


class Box(NamedTuple):
    """What is drawn, and belongs to no action."""

    pp: int
    lane: str
    kind: str
    start: float
    end: float
    cost: float
