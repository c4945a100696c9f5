"""Lab 09, a second solution: a file per unit, read and written, and torch's AdamW on each unit."""

from pathlib import Path

import numpy as np
import torch


class MyStreamedAdamW:
    def __init__(self, parameters, folder, *, lr, betas, eps, weight_decay, unit):
        self.settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.units, self.steps = [], 0
        for parameter in parameters:
            for first in range(0, parameter.numel(), unit):
                part = slice(first, min(first + unit, parameter.numel()))
                path = Path(folder) / f"{len(self.units)}.f32"
                np.zeros(2 * (part.stop - part.start), np.float32).tofile(path)
                self.units.append((parameter, part, path))

    def step(self):
        for parameter, part, path in self.units:
            m, v = torch.from_numpy(np.fromfile(path, np.float32)).chunk(2)
            piece = torch.nn.Parameter(parameter.detach().view(-1)[part])  # shares its memory
            piece.grad = parameter.grad.view(-1)[part]
            adam = torch.optim.AdamW([piece], foreach=False, **self.settings)
            count = torch.tensor(float(self.steps))
            adam.state[piece] = {"step": count, "exp_avg": m, "exp_avg_sq": v}
            adam.step()
            torch.cat([m, v]).numpy().tofile(path)
        self.steps += 1
