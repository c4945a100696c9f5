"""Small trainings in plain PyTorch, for `pl.observe` to watch."""

import torch
from torch import nn


def trained(model, x, *, update=None, steps=3, backwards=1, behind=lambda: None):
    """The losses. x: the model's input, or how many ones a row of it has. ``behind()``: between
    what computes a step's gradients and their update.
    """
    torch.manual_seed(0)
    x = torch.ones(8, x) if isinstance(x, int) else x
    update = update or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    losses = []
    for _ in range(steps):
        for _ in range(backwards):
            loss = model(x).float().square().mean()
            loss.backward()
        behind()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


def layers(count, width=256, **more):
    return nn.Sequential(*(nn.Linear(width, width, **more) for _ in range(count)))


def sharded(model, **how):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer, **how)
    return fully_shard(model, **how)
