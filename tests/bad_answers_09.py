"""Answers to lab 09's exercises: some that are right in another way, and many that are wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch


# ---- the bandwidth -------------------------------------------------------------------------------
def share_of_time(tokens, moved, peak, efficiency):
    """Right: seconds of a step in which one parameter's bytes have to pass."""
    step = 8 * tokens / peak / efficiency
    return moved / (step * (1 - efficiency))


def without_recomputation(tokens, moved, peak, efficiency):
    return share_of_time(tokens, moved, peak, efficiency) * 8 / 6


def forward_alone(tokens, moved, peak, efficiency):
    return share_of_time(tokens, moved, peak, efficiency) * 4


def one_flop(tokens, moved, peak, efficiency):
    return share_of_time(tokens, moved, peak, efficiency) * 2


def one_token(tokens, moved, peak, efficiency):
    return share_of_time(1, moved, peak, efficiency)


def one_byte(tokens, moved, peak, efficiency):
    return share_of_time(tokens, 1, peak, efficiency)


def without_the_rest(tokens, moved, peak, efficiency):
    return efficiency * peak * moved / (8 * tokens)


def exchanged(tokens, moved, peak, efficiency):
    return share_of_time(tokens, moved, peak, 1 - efficiency)


def intensity_alone(tokens, moved, peak, efficiency):
    return peak * moved / (8 * tokens)


def in_gigabytes(tokens, moved, peak, efficiency):
    return share_of_time(tokens, moved, peak, efficiency) / 1e9


def as_text(tokens, moved, peak, efficiency):
    return f"{share_of_time(tokens, moved, peak, efficiency)} B/s"


def of_three(tokens, moved, peak):
    return 0.0


# ---- the streamed optimizer ----------------------------------------------------------------------
class Good:
    """Right: one file per parameter, mapped unit by unit with an offset."""

    fold = staticmethod(lambda p: p.view(-1))

    def __init__(self, parameters, folder, *, lr, betas, eps, weight_decay, unit):
        self.parameters, self.folder, self.unit, self.steps = parameters, Path(folder), unit, 0
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        for i, p in enumerate(parameters):
            with open(self.folder / f"{i}", "wb") as file:
                file.truncate(8 * p.numel())
        self.made()

    def made(self):
        pass

    def states(self, i, first, size, total):
        kept = {"dtype": np.float32, "mode": "r+", "shape": (size,)}
        path = self.folder / f"{i}"
        m = np.memmap(path, offset=4 * first, **kept)
        return m, np.memmap(path, offset=4 * (total + first), **kept)

    def write(self, i, first, total, m, v):
        pass  # mapped

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for i, parameter in enumerate(self.parameters):
            p, g = parameter.view(-1), parameter.grad.view(-1)
            for first in range(0, len(p), self.unit):
                last = min(first + self.unit, len(p))
                m, v = map(torch.from_numpy, self.states(i, first, last - first, len(p)))
                self.update(p[first:last], g[first:last], m, v)
                self.write(i, first, len(p), m.numpy(), v.numpy())

    def update(self, p, g, m, v):
        b1, b2 = self.betas
        p.mul_(1 - self.lr * self.weight_decay)
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        denominator = (v.sqrt() / (1 - b2**self.steps) ** 0.5).add_(self.eps)
        p.addcdiv_(m, denominator, value=-self.lr / (1 - b1**self.steps))


class InMemory(Good):
    """The states are where torch has them."""

    def made(self):
        self.adam = torch.optim.AdamW(
            self.parameters, lr=self.lr, betas=self.betas, eps=self.eps,
            weight_decay=self.weight_decay, foreach=False,
        )  # fmt: skip

    def step(self):
        self.adam.step()


class Everything(Good):
    """Reads all the states, updates them, and writes them."""

    def step(self):
        self.all = [np.fromfile(self.folder / f"{i}", np.float32) for i in range(self.count)]
        super().step()
        for i, one in enumerate(self.all):
            one.tofile(self.folder / f"{i}")
        del self.all

    def made(self):
        self.count = len(self.parameters)

    def states(self, i, first, size, total):
        return self.all[i][first : first + size], self.all[i][total + first : total + first + size]


class Kept(Everything):
    """Reads the states once and keeps them."""

    def step(self):
        if not self.steps:
            self.all = [np.fromfile(self.folder / f"{i}", np.float32) for i in range(self.count)]
        Good.step(self)


class NeverWritten(Good):
    def states(self, i, first, size, total):
        return [np.array(one) for one in super().states(i, first, size, total)]


class NoCount(Good):
    def update(self, p, g, m, v):
        self.steps, steps = 1, self.steps
        super().update(p, g, m, v)
        self.steps = steps


class CountsUnits(Good):
    def update(self, p, g, m, v):
        super().update(p, g, m, v)
        self.steps += 1


class NoDecay(Good):
    def made(self):
        self.weight_decay = 0.0


class L2(Good):
    """Adam with decay in the gradient."""

    def update(self, p, g, m, v):
        self.weight_decay, decay = 0.0, self.weight_decay
        super().update(p, g + decay * p, m, v)
        self.weight_decay = decay


class FirstUnitOnly(Good):
    def update(self, p, g, m, v):
        if p.storage_offset() == 0:
            super().update(p, g, m, v)


class SameStates(Good):
    """Every unit of a parameter uses the states of its first."""

    def states(self, i, first, size, total):
        return super().states(i, 0, size, total)


class Doubled(Good):
    """Files for twice as much."""

    def made(self):
        for i, p in enumerate(self.parameters):
            with open(self.folder / f"{i}", "r+b") as file:
                file.truncate(16 * p.numel())


class HalfPrecision(Good):
    def update(self, p, g, m, v):
        super().update(p, g, m, v)
        m.copy_(m.bfloat16().float())


class OtherOrder(Good):
    """The textbook's order of operations, which rounds in other places."""

    def update(self, p, g, m, v):
        b1, b2 = self.betas
        m.mul_(b1).add_((1 - b1) * g)
        v.mul_(b2).add_((1 - b2) * g * g)
        mean, square = m / (1 - b1**self.steps), v / (1 - b2**self.steps)
        p.sub_(self.lr * (mean / (square.sqrt() + self.eps) + self.weight_decay * p))


class Raises(Good):
    def step(self):
        raise KeyError("unit 3")


class NoStep:
    def __init__(self, parameters, folder, *, lr, betas, eps, weight_decay, unit):
        pass
