"""Lab 03's last exercise: a pipeline step with several stages per rank, in plain PyTorch."""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn


def interleaved_step(
    stages: dict[int, nn.Module],
    lists: list[list[str]],
    batches: list[tuple[Tensor, Tensor]],
    shape: tuple[int, int, int],
) -> float:
    """Run this rank's list once; the mean loss on the rank of the last stage, 0.0 on the others."""
    ### BEGIN SOLUTION
    rank, p = dist.get_rank(), dist.get_world_size()
    last = p * len(stages) - 1

    def parts(action: str) -> tuple[int, str, int]:
        kind = "F" if "F" in action else "B"
        stage, k = action.split(kind)
        return int(stage), kind, int(k)

    def reaches(action: str) -> str:
        """The action that needs what this one sends; "" if nothing is sent."""
        stage, kind, k = parts(action)
        to = stage + 1 if kind == "F" else stage - 1
        return f"{to}{kind}{k}" if 0 <= to <= last else ""

    queue: dict[int, deque[str]] = {}  # by sender: what it sends here, in its order
    for sender, actions in enumerate(lists):
        needs = [reaches(action) for action in actions]
        queue[sender] = deque(need for need in needs if need and parts(need)[0] % p == rank)
    inbox: dict[str, Tensor] = {}

    def get(action: str, sender: int) -> Tensor:
        while action not in inbox:
            message = torch.empty(shape, device=batches[0][0].device)
            dist.recv(message, sender)
            inbox[queue[sender].popleft()] = message
        return inbox.pop(action)

    in_flight: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    sent, total = [], 0.0
    for action in lists[rank]:
        stage, kind, k = parts(action)
        tokens, targets = batches[k]
        if kind == "F":
            x = get(action, (stage - 1) % p).requires_grad_() if stage else tokens
            y = stages[stage](x, targets)
            if stage == last:
                y = y / len(batches)
                total += y.item()
            else:
                sent.append(dist.isend(y.detach(), (stage + 1) % p))
            in_flight[stage, k] = x, y
        else:
            x, y = in_flight.pop((stage, k))
            y.backward(get(action, (stage + 1) % p) if stage < last else None)
            if stage:
                sent.append(dist.isend(x.grad, (stage - 1) % p))
            del x, y
    for work in sent:
        work.wait()
    return total
    ### END SOLUTION
