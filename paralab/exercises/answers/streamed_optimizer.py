"""Lab 09: AdamW whose moments are in a file and pass through memory unit by unit."""

from pathlib import Path

import numpy as np
import torch


class MyStreamedAdamW:
    """AdamW; no state is in memory between steps, and that of `unit` elements within one."""

    def __init__(self, parameters, folder, *, lr, betas, eps, weight_decay, unit):
        # parameters: list of float32 tensors with .grad at a step; folder: where files may be
        # unit: elements whose states may be in memory at a time
        self.parameters, self.path = list(parameters), Path(folder) / "moments"
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.unit, self.steps = unit, 0
        ### BEGIN SOLUTION
        ### STUB: # make the file: two float32 numbers per parameter, all zero
        count = sum(p.numel() for p in self.parameters)
        with open(self.path, "wb") as file:
            file.truncate(8 * count)  # zeros, without a byte in memory
        ### END SOLUTION

    @torch.no_grad()
    def step(self):
        """One update of all parameters, in place."""
        ### BEGIN SOLUTION
        self.steps += 1
        moments = np.memmap(self.path, dtype=np.float32, mode="r+")
        at = 0  # first number of the unit in the file: first moments, behind them the second
        for parameter in self.parameters:
            p, g = parameter.view(-1), parameter.grad.view(-1)
            for first in range(0, p.numel(), self.unit):
                part = slice(first, first + self.unit)
                size = p[part].numel()
                m = torch.from_numpy(moments[at : at + size])
                v = torch.from_numpy(moments[at + size : at + 2 * size])
                self.update(p[part], g[part], m, v)  # in place, in the mapped pages
                at += 2 * size
        moments.flush()
        ### END SOLUTION

    def update(self, p, g, m, v):
        """AdamW on four tensors of one size, in torch's own order of operations."""
        b1, b2 = self.betas
        p.mul_(1 - self.lr * self.weight_decay)
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        denominator = (v.sqrt() / (1 - b2**self.steps) ** 0.5).add_(self.eps)
        p.addcdiv_(m, denominator, value=-self.lr / (1 - b1**self.steps))
