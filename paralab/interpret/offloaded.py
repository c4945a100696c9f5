"""Offloaded states: what a rank keeps from step to step off its device, and its update on the host.

A rank's shard of a unit has, on the tiers that the plan says, its parameters in the model's dtype,
room for its gradient, and rows of fp32, (k, c): AdamW's two moments, then the master weights. fp32
parameters off the device are their own master weights and need no row. In addition the host has a
step count and a norm for each unit.

The update is that of `state.Optimizer`: the same kernels on the same numbers, so the same bits.
With tensor parallelism units may be others, at whose ends the kernels round in another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, float32

from paralab.interpret.flat import DTYPES
from paralab.interpret.host import Host, plain
from paralab.programs.program import Program
from paralab.programs.tiers import CATEGORY, own_master, rows, tier_of

_FILES = {"shard": "parameters", "gshard": "gradient", "opt": "states"}


class Offloaded:
    """The states of one rank that its plan offloads.

    store    {value of the rank: a tensor on the host, or the name of a file}
    """

    def __init__(self, program: Program, host: Host, store: dict[tuple, Any]) -> None:
        self.lives = partial(tier_of, program.plan.tiers)  # {kind of state: its tier}, a function
        self.host, self.store = host, store
        self.precision_of = program.precision_of
        self.rows, self.master = rows(program), own_master(program.plan)
        self.adamw = program.optimizer == "adamw"

    def lay_out(self, u: int, shard: Tensor, weights: Tensor) -> None:
        """Make the initial states of unit ``u``. shard: its parameters; weights: these in fp32."""
        count = shard.numel()

        def first(states: Tensor) -> None:
            states.zero_()
            if self.master:
                states[-1] = weights

        with self.host.recorder.unwatched():
            if self.lives("shard"):
                self._place("shard", u, (count,), lambda held: held.copy_(shard))
            if self.lives("gshard"):
                self._place("gshard", u, (count,))
            if self.rows:
                self._place("opt", u, (self.rows, count), first)
            for kind in ("host.count", "host.norm"):
                self.store[kind, u, 0] = self.host.empty((), float32, "optimizer").zero_()

    def dtype_of(self, kind: str) -> torch.dtype:
        return float32 if kind == "opt" else DTYPES[self.precision_of(kind)]

    def _place(
        self, kind: str, u: int, shape: tuple[int, ...], fill: Callable[[Tensor], Any] | None = None
    ) -> None:
        """Make a state on its tier. fill: writes the initial values into a tensor on the host."""
        tier, category = self.lives(kind), CATEGORY[kind]
        dtype = self.dtype_of(kind)
        if tier == "host.":
            held = values = self.host.empty(shape, dtype, category)
        else:
            held = self.host.create(_FILES[kind], dtype.itemsize * math.prod(shape), category)
            values = plain(shape, dtype)
        if fill is not None:
            fill(values)
            if tier == "file.":
                self.host.files.write(held, values)
        self.store[tier + kind, u, 0] = held

    # ---- on the host's own thread ----------------------------------------------------------------
    def update(
        self, optimizer: Any, held: Mapping[str, Any], gradient: Tensor, arrived: Any
    ) -> Callable[[], None]:
        """A function that makes one optimizer step of a unit on the host's processor.

        held     {kind: value} of the values that it reads and writes. "host.shard", parameters off
                 the device, are the weights themselves, or these rounded
        arrived  the event after which the verdict is on the host, or None
        """
        states, shard, count = (held.get(kind) for kind in ("host.opt", "host.shard", "host.count"))
        weights = states[-1] if self.master else shard
        moments = {}
        if self.adamw:
            moments = {"exp_avg": [states[0]], "exp_avg_sq": [states[1]], "step": [count]}
        verdict = held.get("host.verdict", (None, None))

        def step() -> None:
            if arrived is not None:
                arrived.synchronize()
            grads = [gradient.float()]  # 16 bits become 32; fp32 stays as it is
            optimizer.step([weights], grads, moments, verdict)
            if shard is not None and self.master:
                shard.copy_(weights)

        return step

    # ---- for results and checkpoints -------------------------------------------------------------
    def look(self, kind: str, u: int) -> Tensor:
        """A state as a tensor, a file's mapped into memory; filling it changes the training."""
        held = self.store[self.lives(kind) + kind, u, 0]
        if isinstance(held, str):
            held = self.host.files.mapped(held, self.dtype_of(kind))
        return held.view(self.rows, -1) if kind == "opt" else held

    def states(self, u: int) -> dict[str, Tensor]:
        """{"exp_avg", "exp_avg_sq", "master"} of a shard, as far as there are any."""
        if not self.rows:
            return {}
        names = ("exp_avg", "exp_avg_sq") * self.adamw + ("master",) * self.master
        return dict(zip(names, self.look("opt", u), strict=True))
