"""The proof of `parallel.lowering.lowered`: its lists run under the rules of NCCL's messages."""

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


Step = Action | Transfer


def lower(schedule: Sequence[Sequence[Action | str]]) -> list[list[Step]]:
    """Per rank its actions and the transfers that they need, in order."""
    schedule, order = checked(schedule)
    arrays = lowered(order)
    lists: list[list[Step]] = []
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


def check_lowered(lists: Sequence[Sequence[Step]]) -> None:
    """Run the lists where a transfer holds up both ends until it is over, matched by order alone.

    Raises ValueError at an action or a send whose input is not there yet, at a receive that does
    not fit the send it meets, and if no rank can go on.
    """
    p = len(lists)
    stages = 1 + max((step.stage for row in lists for step in row), default=0)
    at = [0] * p
    there: list[set[tuple]] = [set() for _ in range(p)]  # what each rank has: see `_result`
    ready = list(range(p))
    while ready:
        rank = ready.pop()
        while at[rank] < len(lists[rank]):
            step = lists[rank][at[rank]]
            if isinstance(step, Transfer):
                peer = step.peer
                other = lists[peer][at[peer]] if at[peer] < len(lists[peer]) else None
                if not isinstance(other, Transfer) or other.peer != rank:
                    break  # the peer will come to it, and then go on with this rank
                sent, taken = (step, other) if step.kind == "send" else (other, step)
                message = (sent.what, sent.other_stage, sent.microbatch)
                if sent.kind == taken.kind or message != (
                    taken.what,
                    taken.stage,
                    taken.microbatch,
                ):
                    raise ValueError(f"{step} of rank {rank} meets {other} of rank {peer}")
                result = (sent.what, sent.stage, sent.microbatch)
                sender = rank if sent is step else peer
                if result not in there[sender]:
                    raise ValueError(f"rank {sender}: {sent} needs a send after its action")
                there[rank + peer - sender].add(result)
                at[peer] += 1
                ready.append(peer)
            elif _needs(step, stages) <= there[rank]:
                there[rank].add(_result(step))
            else:
                raise ValueError(f"rank {rank}: what {step} needs is not there yet")
            at[rank] += 1
    waiting = {r: row[at[r]] for r, row in enumerate(lists) if at[r] < len(row)}
    if waiting:
        told = (f"rank {r} waits at {step}, for rank {step.peer}" for r, step in waiting.items())
        raise ValueError(f"no rank can go on: {'; '.join(told)}")


def _result(action: Action) -> tuple:
    """What an action leaves: ("F" | "B", stage, micro-batch); I leaves what B does, W nothing."""
    return ("B" if action.kind == "I" else action.kind, action.stage, action.microbatch)


def _needs(action: Action, stages: int) -> set[tuple]:
    """The results that have to be on an action's rank when it starts."""
    stage, kind, microbatch = action
    if kind == "F":
        return {("F", stage - 1, microbatch)} if stage else set()
    own = {("F", stage, microbatch)}
    if kind == "W":
        return own | {("B", stage, microbatch)}
    return own | ({("B", stage + 1, microbatch)} if stage < stages - 1 else set())
