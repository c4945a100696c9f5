"""Lab 03's exercise: one step of a pipeline stage, in plain PyTorch."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def pipeline_step(
    stage: nn.Module,
    actions: list[str],
    previous: int | None,
    following: int | None,
    batches: list[tuple[Tensor, Tensor]],
    shape: tuple[int, int, int],
) -> float:
    """Run this rank's list once; the mean loss on the last stage, 0.0 on the others."""
    ### BEGIN SOLUTION
    in_flight: dict[int, tuple[Tensor, Tensor]] = {}  # micro-batch: input and output
    sent, total = [], 0.0
    for action in actions:
        kind, k = action[0], int(action[1:])
        tokens, targets = batches[k]
        if kind == "F":
            x = tokens
            if previous is not None:
                x = torch.empty(shape, device=tokens.device)
                dist.recv(x, previous)
                x.requires_grad_()  # a leaf: backward leaves its gradient in x.grad
            if following is not None:
                y = stage(x)
                sent.append(dist.isend(y.detach(), following))
            else:
                y = stage(x, targets) / len(batches)
                total = total + y.detach()
            in_flight[k] = x, y
        else:
            x, y = in_flight.pop(k)
            gradient = None
            if following is not None:
                gradient = torch.empty_like(y)
                dist.recv(gradient, following)
            y.backward(gradient)
            if previous is not None:
                sent.append(dist.isend(x.grad, previous))
            del x, y
    for work in sent:
        work.wait()
    return float(total)
    ### END SOLUTION
