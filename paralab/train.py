"""The rank program: training steps under a plan, each of them written down.

Every rank runs `train`. The axes of the plan meet here and nowhere else. Scalars are read once, at
the end of a step; nothing inside a step asks the device for a number.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paralab import checkpoint
from paralab.agree import agree
from paralab.batches import as_numpy, load_batches, read_scalars, to_device
from paralab.comm import Group
from paralab.data import Corpus
from paralab.grid import Grid
from paralab.model import GPT, initialize
from paralab.observe.advice import advice
from paralab.observe.clocks import measure_offset
from paralab.observe.ledger import watch
from paralab.observe.recorder import Recorder
from paralab.parallel import (
    data_parallel,
    offload,
    offload_inputs,
    pipeline,
    precision,
    relay,
    zero,
)
from paralab.parallel.buckets import units
from paralab.parallel.gradient_signal import GradientSignal
from paralab.parallel.host import Host
from paralab.parallel.host_update import HostUpdate
from paralab.parallel.layouts import (
    SHARED_PHASE,
    Holding,
    holding,
    kind_of,
    loss_parts,
    says_loss,
)
from paralab.parallel.modes import make_layers
from paralab.parallel.shared_gradients import SharedGradients
from paralab.pieces import Place, places
from paralab.spec import GRAD_SYNC_MOMENTS, ModelSpec, Plan


class Trainer:
    """One rank's stages, optimizer and gradient synchronisation, and the step they make together.

    context   who this rank is: rank, world_size, nodes, device, backend, store, strict, note,
              progress
    The other arguments are those of `pl.run`, checked.
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
    ) -> None:
        self.context, self.model, self.plan, self.seed = context, model, plan, seed
        self.clip_norm, self.optimizer_name = clip_norm, optimizer
        self.first_step = 0  # steps that a checkpoint had done: batches go on from there
        self.recorder = recorder or Recorder(
            rank=context.rank, world_size=context.world_size, device=context.device
        )
        self.grid = Grid(plan, context, self.recorder)
        self.group = self.grid.dp
        self.corpus = Corpus(data)
        self.schedule = plan.actions()
        self.tp = self.grid.tp["tp"].index
        self.host = self._host(offload_folder)
        inputs = None
        if self.host is not None and plan.tiers.activations != "device":
            kind = relay.Activations if plan.relays else offload_inputs.Activations
            inputs = kind(self.host, plan.tiers.activations)
        self.pipeline = (relay.Relay if plan.relays else pipeline.Pipeline)(
            functools.partial(GPT, model, seed=seed, recompute=plan.recompute,
                              holding=self.holding if plan.tp > 1 else None,
                              empty=self._empty()),
            model, plan, self.schedule, group=self.grid.pp,
            layers=functools.partial(make_layers, model, plan, self.grid.tp, inputs),
        )  # fmt: skip
        if inputs is not None:
            for stage in self.pipeline.stages.values():
                stage.model.register_forward_pre_hook(inputs.begin)
        self.named = self.pipeline.named_parameters()
        self.recorder.owns("parameters", *self.named.values(), *self.pipeline.buffers())
        trained = [p for p in self.named.values() if p.requires_grad]
        self.sync = self.signal = masters = None
        if plan.zero_stage:
            self.sync = self._zero()
            masters = self.sync.masters
        elif plan.precision != "fp32":
            before = precision.lower(self.named.values(), plan.precision)
            self.recorder.owns("parameters", *self.named.values())  # rounded, they lie elsewhere
            masters = [m for m, p in zip(before, self.named.values(), strict=True)
                       if p.requires_grad]  # fmt: skip
        if plan.dp > 1 and not plan.zero_stage:
            self.sync = gradient_sync(plan, trained, self.group)
        if self.sync is not None:
            twice = []
            if plan.relays:
                self.pipeline.sync, self.pipeline.inputs = self.sync, inputs
                twice = self.pipeline.shared()
            self.signal = GradientSignal(trained, microbatches=plan.microbatches, twice=twice,
                                         every=plan.reduces_often,
                                         listener=self.sync.grad_ready)  # fmt: skip
            self.pipeline.accumulated = self.signal.accumulated
        self.targets = self.sync.targets if plan.zero_stage else trained
        self.places = places(self.named, self.sync.flats if plan.zero_stage else ())
        self.shared = self._shared()
        over = [self.grid.pp, self.grid.tp["tp"]] + [self.grid.shard] * (plan.zero_stage > 0)

        def made(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
            with self.recorder.making("optimizer"):
                return make_optimizer(parameters, optimizer, lr)

        if plan.tiers is not None and plan.tiers.optimizer != "device":
            self.update = HostUpdate(
                self.sync, optimizer=optimizer, lr=lr, clips=clip_norm is not None,
                mixed=plan.precision, groups=over, counted=self._counted(),
            )  # fmt: skip
        else:
            self.update = precision.Update(
                self.targets, made, precision=plan.precision, masters=masters, groups=over,
                counted=self._counted(),
            )  # fmt: skip
        self.recorder.owns("optimizer", *self.update.states)
        self.gradients: dict[str, np.ndarray] | None = None

    def holding(self, name: str) -> Holding:
        """Which block of a parameter this rank holds under tensor parallelism."""
        return holding(self.model, self.plan, name, self.tp)

    def _shared(self) -> list[SharedGradients]:
        """What other ranks hold too and see another part of the gradient of."""
        found: dict[tuple[str, str], list] = {}
        trained = set(self.targets)
        more = {"gradient": self.sync.gradient} if self.plan.zero_stage else {}
        for name, _, where, kept in self.places if self.plan.tp > 1 else ():
            held = self.holding(name)
            if held.partial and kept in trained:
                phase = SHARED_PHASE.get(kind_of(name), "shared")
                found.setdefault((held.copies, phase), []).append((kept, where))
        shared = [
            SharedGradients(some, group=self.grid.tp[axis], phase=phase, **more)
            for (axis, phase), some in found.items()
        ]
        if self.model.tied and self.grid.ends is not None:
            tied = ("embedding.token.weight", "head.output.weight")
            kept = next(p for name, p in self.named.items() if name in tied)
            if self.plan.zero_stage:
                kept = self.sync.flat_of[kept].own  # it is alone in its unit
            everything = [(kept, slice(0, kept.numel()))]
            shared.append(SharedGradients(everything, group=self.grid.ends, phase="tied", **more))
        return shared

    def _counted(self) -> list[tuple[Tensor, slice]] | None:
        """What this rank counts of the gradients' norm; None: all of it.

        Others count a tied embedding's copy, and what tp ranks hold the same.
        """

        def first(place: Place) -> bool:
            axis = self.holding(place.name).copies if self.plan.tp > 1 else ""
            copy = self.model.tied and place.name == "head.output.weight"
            return not copy and (not axis or self.grid.tp[axis].index == 0)

        if all(map(first, self.places)):
            return None
        trained = set(self.targets)
        return [(p.kept, p.where) for p in self.places if p.kept in trained and first(p)]

    def _host(self, folder: str | None) -> Host | None:
        """What this rank has beside its device's memory, if the plan uses it."""
        plan = self.plan
        if plan.tiers is None:
            return None
        return Host(plan.tiers, context=self.context, recorder=self.recorder,
                    folder=Path(folder or ".") / f"rank-{self.context.rank}")  # fmt: skip

    def _empty(self) -> bool:
        """Whether the model is made without its parameters' bytes, and gets them unit by unit."""
        tiers = self.plan.tiers
        return self.plan.zero_stage == 3 or (tiers is not None and tiers.states)

    def _zero(self) -> zero.Stage1:
        """The plan's stage of ZeRO over this rank's data-parallel group."""
        plan, grid, more = self.plan, self.grid, {}
        sizes = {name: p.numel() for name, p in self.named.items()}
        if self._empty():
            more["initialize"] = functools.partial(
                initialize, spec=self.model, seed=self.seed, holding=self.holding
            )
        if plan.zero_stage == 3:
            models = [stage.model for stage in self.pipeline.stages.values()]
            more |= {"models": models, "prefetch": plan.prefetch}
        stages = zero.STAGES
        if plan.tiers is not None and plan.tiers.states:
            moments = 2 if self.optimizer_name == "adamw" else 0
            more |= {"host": self.host, "tiers": plan.tiers, "moments": moments}
            stages = offload.STAGES
        return stages[plan.zero_stage](
            self.named, units(sizes, self.model, plan), group=grid.shard, replicas=grid.replica,
            dtype=precision.DTYPES[plan.precision], **more,
        )  # fmt: skip

    def step(self, step: int, *, keep_gradients: bool = False) -> list[float]:
        """One optimizer update. Returns the losses of this rank's micro-batches."""
        recorder, plan = self.recorder, self.plan
        number = self.first_step + step
        batches = load_batches(
            self.corpus, self.model, plan, step=number, rank=self.group.index, seed=self.seed
        )

        def batch(k: int) -> tuple[Tensor, Tensor]:
            return to_device(batches[k], self.context.device)

        def share(loss: Tensor) -> Tensor:
            # One division makes the mean over the global batch: micro-batches and ranks add up.
            # So do tp ranks with tokens of their own; those with the same tokens each differentiate
            # their part of the model.
            return self.update.scale(loss / (plan.microbatches * plan.dp * loss_parts(plan)))

        recorder.begin_step(step)
        losses = self.pipeline.step(batch, share, before=self._seeding(number))
        if self.sync is not None:
            self.signal.check_complete()
            self.sync.finish()
        for shared in self.shared:
            shared.add_up()
        if plan.zero_stage:
            self.sync.summed()
        if keep_gradients:
            with recorder.unwatched():
                self.gradients = self.whole(gradients=True)
        with recorder.span("optimizer"):
            self.update.step(clip_norm=self.clip_norm)
        if self.sync is None:
            self.update.optimizer.zero_grad(set_to_none=True)
        else:
            self.sync.reset()
            self.signal.reset()
        if plan.zero_stage:
            self.sync.updated()
        says = says_loss(plan, self.tp)  # one rank for all that have the same tokens
        values = read_scalars(losses if says else [], device=self.context.device)
        recorder.end_step()
        return values

    def settle(self) -> None:
        """What a delayed update has left to be done is done: the training's state is one."""
        if self.host is not None:
            with self.recorder.unwatched(), self.recorder.unwritten():
                if getattr(self.update, "late", ()):
                    self.update.complete()
                    self.sync.updated()
                self.host.settle()

    def whole(self, *, gradients: bool = False) -> dict[str, np.ndarray] | None:
        """Weights, or gradients, of this rank's stages under their names in the single-device
        model; a tied copy is none of them. None on all data-parallel ranks but the first.

        With ZeRO every rank has to call it: each has a part.
        """
        found = {n: p.grad if gradients else p for n, p in self.named.items()
                 if p.requires_grad or not gradients}  # fmt: skip
        if self.plan.zero_stage:
            found |= self.sync.whole(gradients=gradients)
        if self.group.index > 0:
            return None
        read = self.update.unscaled if gradients else Tensor.float
        return {name: as_numpy(read(found[name])) for name in self.model.parameter_shapes()
                if name in found}  # fmt: skip

    def _seeding(self, step: int) -> Callable[[int, str], None] | None:
        """What draws the dropout masks: they depend on sample and part, not on who computes it."""
        if not self.model.dropout:
            return None
        first = self.group.index * self.plan.microbatches

        def before(k: int, part: str) -> None:
            torch.manual_seed(zlib.crc32(f"{self.seed} {step} {first + k} {part}".encode()))

        return before


def train(
    context: Any, model: ModelSpec, plan: Plan, *, steps: int, keep_state: bool,
    memory_limit: int | None = None, save: str | None = None, save_every: int | None = None,
    resume: str | None = None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train ``steps`` steps on this rank; returns the rank's part of the report, plain columns.

    With ``keep_state`` the ranks of the first data-parallel group add their stages' weights after
    the last step and the last step's gradients (mean over the global batch, before clipping) under
    the names of the single-device model.

    The memory ledger is on while the model is built and in step 0; with ``memory_limit``, in bytes,
    it is on throughout and enforces it.

    ``resume`` is the checkpoint to go on from, ``save`` the folder to write checkpoints into: after
    the last step, and whenever ``save_every`` divides the number of steps the training has done.
    """
    recorder = Recorder(rank=context.rank, world_size=context.world_size, device=context.device)
    help_with = functools.partial(advice, model, plan, limit=memory_limit, rank=context.rank,
                                  optimizer=settings.get("optimizer", "adamw"))  # fmt: skip
    with watch(recorder, device=context.device, limit=memory_limit, advise=help_with) as watched:
        return _train(context, model, plan, recorder, watched, steps=steps, keep_state=keep_state,
                      memory_limit=memory_limit, save=save, save_every=save_every, resume=resume,
                      **settings)  # fmt: skip


def _train(
    context: Any, model: ModelSpec, plan: Plan, recorder: Recorder,
    watched: contextlib.ExitStack, *, steps: int, keep_state: bool, memory_limit: int | None,
    save: str | None, save_every: int | None, resume: str | None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """`train`, with a ledger on until ``watched`` is closed."""
    trainer = Trainer(context, model, plan, recorder=recorder, **settings)
    asked = {  # paths may differ, what lies there may not
        **settings, "memory_limit": memory_limit, "steps": steps,
        "data": None, "offload_folder": None,
        "save": (save is None, save_every), "resume": resume and Path(resume).name,
    }  # fmt: skip
    dry = context.backend == "fake"  # nobody to agree with, and no clocks
    if not dry:
        what = f"{model} {plan.to_dict()} {sorted(asked.items())} {trainer.schedule}"
        agree(trainer.grid.world, what=what, corpus=trainer.corpus)
    several_nodes = len(set(context.nodes)) > 1 and not dry
    offset, uncertainty = measure_offset(trainer.grid.world) if several_nodes else (0.0, 0.0)
    if resume is not None:
        checkpoint.load(trainer, resume)
    losses = []
    with checkpoint.saving(trainer, save, every=save_every, steps=steps) as save_if_due:
        for step in range(steps):
            losses.append(trainer.step(step, keep_gradients=keep_state and step == steps - 1))
            if memory_limit is None and not dry:  # which has nothing else to show, and is slow
                watched.close()
            with recorder.unwatched():
                save_if_due(step + 1)
            context.progress(step + 1, steps)
    watched.close()
    trainer.settle()
    weights = trainer.whole() if keep_state else None
    if trainer.host is not None:
        trainer.host.close()
    return {
        "rank": context.rank,
        "clock_offset": offset,
        "clock_uncertainty": uncertainty,
        **trainer.recorder.tables(),
        "losses": losses,
        "weights": weights,
        "gradients": trainer.gradients,
        "num_params": sum(p.numel() for p in trainer.named.values()),
        "meta": {
            "device": context.device,
            "backend": context.backend,
            "nodes": list(context.nodes),
            "torch": str(torch.__version__),  # its own class would bring torch to the caller
            "text_bytes": trainer.corpus.num_bytes,
            "first_step": trainer.first_step,
        },  # fmt: skip
    }


def gradient_sync(plan: Plan, parameters: Sequence[Tensor], group: Group) -> Any:
    """The plan's form of gradient synchronisation over ``group``, a learner's own form included."""
    own = callable(plan.grad_sync)
    form = plan.grad_sync if own else data_parallel.FORMS[plan.grad_sync]
    sync = form(parameters, group=group, bucket_bytes=plan.bucket_bytes)
    missing = [m for m in GRAD_SYNC_MOMENTS if not callable(getattr(sync, m, None))]
    if missing:  # a function is asked for its result: what a class has was seen by the plan
        raise TypeError(
            f"grad_sync made a {type(sync).__name__}, which has no {' and no '.join(missing)}; "
            f"what it makes needs the methods {', '.join(GRAD_SYNC_MOMENTS)}"
        )
    return sync


def make_optimizer(parameters: Sequence[Tensor], name: str, lr: float) -> torch.optim.Optimizer:
    """AdamW with torch's defaults, or plain SGD, w <- w - lr g, which hides no wrong factor."""
    if name == "sgd":
        # Torch refuses its fused kernel to a dry run's tensors; either has no temporaries.
        return torch.optim.SGD(parameters, lr=lr, fused=not parameters[0].is_meta)
    made = torch.optim.AdamW(parameters, lr=lr, fused=True)
    for parameter in parameters:  # what its first step would make: now, so that all steps are alike
        made.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter),
        }  # fmt: skip
    return made
