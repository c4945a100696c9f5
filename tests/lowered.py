"""The lists of `parallel.lowering.lowered` as a reader writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paralab.parallel.lowering import RECV, SEND, lowered
from paralab.parallel.schedules import Action
from paralab.theory.schedule_check import checked

ENDS = {SEND: "send", RECV: "recv"}


class Transfer(NamedTuple):
    """One end of a message: ``str`` is "1RECV_F0", stage 1 receives micro-batch 0's activations.

    kind        "send" or "recv"
    what        "F": activations, to the next stage; "B": their gradient, to the stage before
    stage       this rank's stage, from which it is sent or which receives it
    microbatch  0 .. m-1
    peer        pipeline rank at the other end
    """

    kind: str
    what: str
    stage: int
    microbatch: int
    peer: int

    @property
    def other_stage(self) -> int:
        to_next = (self.what == "F") == (self.kind == "send")
        return self.stage + 1 if to_next else self.stage - 1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.upper()}_{self.what}{self.microbatch}"


def lower(schedule: Sequence[Sequence[Action | str]]) -> list[list[Action | Transfer]]:
    """Per rank its actions and the transfers that they need, in order."""
    schedule, order = checked(schedule)
    arrays = lowered(order)
    lists = []
    for r, row in enumerate(schedule):
        own_steps, actions = slice(*arrays.first[r : r + 2]), iter(row)
        columns = (column[own_steps].tolist() for column in arrays[1:])
        lists.append(
            [
                Transfer(ENDS[kind], "FB"[what], stage, k, peer) if kind in ENDS else next(actions)
                for kind, what, stage, k, peer in zip(*columns, strict=True)
            ]
        )
    return lists
