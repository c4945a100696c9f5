"""What every rank of `pl.run` executes: the training steps of a compiled program, recorded.

Losses and other scalars are read once, at the end of a step: inside a step the host never waits
for a number from the device.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paralab import checkpoint
from paralab.agree import agree
from paralab.batches import as_numpy, load_batches, read_scalars
from paralab.comm import Group
from paralab.data import Corpus
from paralab.grid import Grid
from paralab.instruments.advice import advice
from paralab.instruments.clocks import measure_offset
from paralab.instruments.ledger import Ledger
from paralab.instruments.recorder import Recorder
from paralab.interpret.flat import Flat
from paralab.interpret.host import Host
from paralab.interpret.run import Rank
from paralab.interpret.state import State
from paralab.model.build import loss_share
from paralab.parallel.layouts import reports_loss
from paralab.programs.compile import compiled
from paralab.spec import ModelSpec, Plan
from paralab.version import __version__

# What a report's wire bytes are, by backend: see theory/traffic.py.
WIRE = {"gloo": "as the kernel counts them", "nccl": "a model: of rings, not of a counter"}


class Trainer:
    """One rank of a program, its state and its groups.

    context  who this rank is: rank, world_size, nodes, device, backend, store, strict, note,
             progress. The other arguments are those of `pl.run`, checked.
    what     all of them as text, for ranks to `agree` on; "" if there is no need
    """

    def __init__(
        self,
        context: Any,
        model: ModelSpec,
        plan: Plan,
        *,
        optimizer: str = "adamw",
        lr: float = 1e-3,
        clip_norm: float | None = None,
        data: str | None = None,
        seed: int = 0,
        recorder: Recorder | None = None,
        offload_folder: str | None = None,
        what: str = "",
    ) -> None:
        self.context, self.model, self.plan, self.seed = context, model, plan, seed
        self.scaling: dict[str, float] = {}  # fp16: steps skipped so far, and the loss scale now
        self.first_step = 0  # steps done before the checkpoint; batches go on from there
        self.recorder = recorder or Recorder(
            rank=context.rank, world_size=context.world_size, device=context.device
        )
        if context.device.startswith("cuda"):
            torch.backends.cuda.matmul.allow_tf32 = plan.tf32
        at = plan.place(context.rank)
        self.corpus = Corpus(data)
        self.reports_loss = reports_loss(plan, at.tp)  # one of the ranks with the same tokens
        self.program = compiled(
            model, plan, optimizer=optimizer, clips=clip_norm is not None, only=at.pp
        )
        everyone = range(context.world_size)
        world = Group(everyone, axis="world", context=context, recorder=self.recorder)
        if what:  # before ranks with other plans make other groups
            agree(world, what=what, corpus=self.corpus, program=self.program)
        self.grid = grid = Grid(plan, world)
        self.groups = {
            "dp": grid.shard,
            "replica": grid.replica,
            "secondary": grid.secondary,
            "pp": grid.pp,
            "ends": grid.ends,
            **grid.tp,
        }
        self.host = None
        if plan.tiers is not None:
            folder = Path(offload_folder or ".") / f"rank-{context.rank}"
            self.host = Host(plan.tiers, context=context, recorder=self.recorder, folder=folder)
        self.state = State(
            self.program,
            context.rank,
            lr=lr,
            clip_norm=clip_norm,
            seed=seed,
            recorder=self.recorder,
            device=context.device,
            host=self.host,
        )
        self.rank = Rank(self.state, self.groups)
        self.gradients: dict[str, np.ndarray] | None = None  # set on the first data-parallel rank

    @torch.no_grad()
    def step(self, step: int, *, keep_gradients: bool = False) -> list[float]:
        """One optimizer update. Returns the losses of this rank's micro-batches."""
        recorder, plan, rank = self.recorder, self.plan, self.rank
        number = self.first_step + step
        batches = load_batches(
            self.corpus,
            self.model,
            plan,
            step=number,
            rank=self.grid.dp.index,
            seed=self.seed,
            pinned=self.context.device.startswith("cuda"),
        )

        def batch(k: int) -> Tensor:
            return batches[k].to(self.context.device, non_blocking=True)

        # The loss is divided once, so that the sum over micro-batches and ranks is the mean over
        # the global batch.
        rank.env.share = self.state.scaled(loss_share(plan))
        rank.env.step, rank.first_sample = number, self.grid.dp.index * plan.microbatches
        if keep_gradients:
            rank.before_update, self.gradients = self._look_at_gradients, {}
        recorder.begin_step(step)
        try:
            losses = rank.step(batch)
        except Exception as error:
            error.add_note(f"(in {rank.where(error)})")
            raise
        rank.before_update = None
        losses, scaling = losses if self.reports_loss else [], self.state.scaling()
        values = read_scalars([*losses, *scaling], device=self.context.device)
        recorder.end_step()
        if scaling and values:  # on "meta" there are none
            *_, overflow, scale = values
            skipped = self.scaling.get("skipped_steps", 0) + int(overflow)
            self.scaling = {"skipped_steps": skipped, "loss_scale": scale}
        return values[: len(losses)]

    # ---- for checkpoints -------------------------------------------------------------------------
    def restored(self, step: int, counters: dict[str, float]) -> None:
        """Go on after ``step`` steps; the pieces have been filled with the state of that step."""
        self.first_step = step
        self.state.restored(counters)
        if self.plan.zero_stage in (1, 2):
            for u in range(len(self.program.units[self.rank.pp])):
                whole, shard = (self.state.store[kind, u, 0] for kind in ("w", "shard"))
                self.grid.shard.all_gather(whole.flat, shard, phase="setup").wait()

    def _look_at_gradients(self, unit: int) -> None:
        if self.host is not None:
            self.host.settle()
        of_unit = self.whole(unit, gradients=True)
        self.gradients = None if of_unit is None else self._ordered(self.gradients | of_unit)

    def whole(self, *units: int, gradients: bool = False) -> dict[str, np.ndarray] | None:
        """{name in the single-device model: weight, or gradient} of these units of the rank
        (default: all of them), without a tied embedding's copy; None on all data-parallel ranks but
        the first. With ZeRO it is a collective: each rank has a shard.
        """
        views: dict[str, Tensor] = {}
        weights = "shard" if self.plan.zero_stage == 3 else "w"
        kind = self.state.summed if gradients else weights
        mine = self.program.units[self.rank.pp]
        for u in units or range(len(mine)):
            unit, value = mine[u], self.state.look(kind, u)
            if not isinstance(value, Flat):
                value = value.to(self.context.device)
                flat = value.new_empty(unit.numel)
                self.grid.shard.all_gather(flat, value, phase="control").wait()
                value = Flat(unit, flat, self.program.model)
            views |= value.views
        if self.grid.dp.index > 0:
            return None
        read = self.state.unscaled if gradients else Tensor.float
        return self._ordered({name: as_numpy(read(view)) for name, view in views.items()})

    def _ordered(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The same in the order in which the model registers its parameters."""
        return {name: arrays[name] for name in self.model.parameter_shapes() if name in arrays}


def train(
    context: Any,
    model: ModelSpec,
    plan: Plan,
    *,
    steps: int,
    keep_state: bool,
    memory_limit: int | None = None,
    save: str | None = None,
    save_every: int | None = None,
    resume: str | None = None,
    newest: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train ``steps`` steps on this rank; returns the rank's part of the report as plain columns.

    keep_state    ranks with data-parallel index 0 add their weights after the last step, and the
                  gradients of the last step (mean over the global batch, before clipping), under
                  the names of the single-device model
    memory_limit  bytes; the memory ledger is then on throughout and enforces them. Without a limit
                  it is on while the model is built and in step 0
    resume        the checkpoint to go on from
    newest        the caller named its folder only, of which it was the newest
    save          folder for checkpoints: written after the last step, and whenever ``save_every``
                  divides the number of steps that the training has done
    """
    recorder = Recorder(rank=context.rank, world_size=context.world_size, device=context.device)
    facts = {"limit": memory_limit, "gloo": context.backend != "nccl"}
    facts["clips"] = settings.get("clip_norm") is not None
    facts["optimizer"] = settings.get("optimizer", "adamw")
    help_with = functools.partial(advice, model, plan, **facts)
    of_all = {  # equal on all ranks; paths may differ, but not the files' contents
        **settings,
        "memory_limit": memory_limit,
        "steps": steps,
        "data": None,
        "offload_folder": None,
        "save": (save is None, save_every),
        "resume": resume and Path(resume).name,
    }
    every = [__version__, model.to_dict(), plan.to_dict(), sorted(of_all.items()), plan.actions()]
    losses = []
    ledger = Ledger(recorder, device=context.device, limit=memory_limit, advise=help_with)
    with contextlib.ExitStack() as ledger_on:
        ledger_on.enter_context(ledger)
        trainer = Trainer(context, model, plan, recorder=recorder, what=repr(every), **settings)
        offset, uncertainty = measure_offset(trainer.grid.world)
        if resume is not None:
            checkpoint.load(trainer, resume)
        when = {"every": save_every, "steps": steps, "resume": resume, "newest": newest}
        with checkpoint.saving(trainer, save, **when) as save_if_due:
            for step in range(steps):
                losses.append(trainer.step(step, keep_gradients=keep_state and step == steps - 1))
                if memory_limit is None:
                    ledger_on.close()
                with recorder.unwatched():
                    save_if_due(step + 1)
                context.progress(step + 1, steps)
    trainer.rank.settle()
    weights = trainer.whole() if keep_state else None
    if trainer.host is not None:
        trainer.host.close()
    return {
        "rank": context.rank,
        "clock_offset": offset,
        "clock_uncertainty": uncertainty,
        **recorder.tables(),
        "losses": losses,
        "weights": weights,
        "gradients": trainer.gradients,
        "num_params": sum(unit.numel for unit in trainer.program.units[trainer.rank.pp]),
        "meta": {
            "device": context.device,
            "backend": context.backend,
            "wire_bytes": WIRE[context.backend],
            "shared_gpu": context.shared,
            "nodes": list(context.nodes),
            "torch": str(torch.__version__),  # its own class would bring torch to the caller
            **trainer.scaling,
            "text_bytes": trainer.corpus.num_bytes,
            "first_step": trainer.first_step,
        },
    }
