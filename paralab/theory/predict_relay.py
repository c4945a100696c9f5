"""The layer relay's rows of a step: the counterpart of parallel/relay.py, for predict_step.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.parallel.schedules import Action
from paralab.theory.predict_rows import Pieces
from paralab.theory.predict_step import Stage

if TYPE_CHECKING:
    from paralab.theory.predict_offload import OffloadRows
    from paralab.theory.predict_rows import RankRows


class RelayStage(Stage):
    """The whole model on one rank, part by part."""

    def act(self, action: Action, rank: RankRows, sync: OffloadRows) -> None:
        """Append the rows of one action, whose stage is the part's number."""
        at, kind, k = action
        part, turns = self.parts[at], at == len(self.parts) - 1
        final = k == self.microbatches - 1
        if kind == "F":
            pieces = Pieces(rank, "forward", k, 0)
            sync.forward(self.parts, at, pieces)
            if self.inputs is not None and part in self.blocks:
                self.inputs.leave(k, part, pieces)
            self._forward(part, pieces)
            if final and not turns:
                sync.leave(self.parts, at, pieces)
            pieces.cut()
            return
        halves = [half for half in self.halves[k > 0] if half.part == part]
        if not halves:  # nothing trains here or below
            return
        pieces = Pieces(rank, "backward", k, 0)
        sync.backward(self.parts, at, pieces)
        if part in self.blocks:
            if self.inputs is not None:
                self.inputs.come(self._next(k, part), pieces)
            self._again(part, pieces)
        for half in halves:
            self._backward(half, "IW", pieces)
            if final:
                sync.complete(half.names + half.weight_names, pieces)
        pieces.cut()

    def _next(self, k: int, part: str) -> list[tuple[int, str]]:
        """Whose inputs backward needs, from this one on: two of them at most."""
        if k < self.microbatches - 1:
            return [(k, part), (k + 1, part)]
        below = self.blocks[: self.blocks.index(part)][-1:]
        return [(k, part), *((0, name) for name in below)]
