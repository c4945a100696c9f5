"""The rank program: training steps under a plan, each of them written down.

Every rank runs `train`. The axes of the plan meet here and nowhere else. Scalars are read once, at
the end of a step; nothing inside a step asks the device for a number.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from paralab.comm import Group
from paralab.data import Corpus
from paralab.grid import Grid
from paralab.model import GPT
from paralab.observe.clocks import measure_offset
from paralab.observe.recorder import Recorder
from paralab.parallel import data_parallel, pipeline
from paralab.spec import GRAD_SYNC_MOMENTS, ModelSpec, Plan


class GradientSignal:
    """Says once per step and parameter that its gradient is complete: ``grad_ready(parameter)``.

    Counts the micro-batches that added to each parameter, so that whoever listens (data
    parallelism, ZeRO) need not know how backward is scheduled. Autograd's accumulate hooks come in
    here; a gradient that is computed outside autograd calls `accumulated` itself.
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, microbatches: int, listener: Callable[[Tensor], None]
    ) -> None:
        self.parameters, self.microbatches, self.listener = list(parameters), microbatches, listener
        self.reset()
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.accumulated)

    def reset(self) -> None:
        self.seen = dict.fromkeys(self.parameters, 0)

    def check_complete(self) -> None:
        """Raise ``RuntimeError`` if backward is over and a gradient is not complete.

        Whoever listens would synchronise nothing for it, and the ranks' weights would drift apart.
        """
        missing = sum(count != self.microbatches for count in self.seen.values())
        if missing:
            raise RuntimeError(
                f"{missing} of {len(self.parameters)} gradients were never complete: their "
                "parameters took no part in the loss of every micro-batch; use them, or leave them "
                "out of the model"
            )

    def accumulated(self, parameter: Tensor) -> None:
        self.seen[parameter] += 1
        if self.seen[parameter] == self.microbatches:
            self.listener(parameter)


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
    ) -> None:
        self.context, self.model, self.plan, self.seed = context, model, plan, seed
        self.clip_norm = clip_norm
        self.recorder = recorder or Recorder(
            rank=context.rank, world_size=context.world_size, device=context.device
        )
        self.grid = Grid(plan, context, self.recorder)
        self.group = self.grid.dp
        self.corpus = Corpus(data)
        self.schedule = plan.actions()
        self.pipeline = pipeline.Pipeline(
            functools.partial(GPT, model, seed=seed), model, plan, self.schedule, group=self.grid.pp
        )
        self.named = self.pipeline.named_parameters()
        self.parameters = list(self.named.values())
        self.tied = None
        if model.tied and self.grid.ends is not None:
            self.tied = pipeline.TiedEmbedding(self.named, group=self.grid.ends)
        self.sync = self.signal = None
        if plan.dp > 1:
            self.sync = gradient_sync(plan, self.parameters, self.group)
            self.signal = GradientSignal(
                self.parameters, microbatches=plan.microbatches, listener=self.sync.grad_ready
            )
            self.pipeline.accumulated = self.signal.accumulated
        self.optimizer = make_optimizer(self.parameters, optimizer, lr)
        self.gradients: dict[str, np.ndarray] | None = None

    def step(self, step: int, *, keep_gradients: bool = False) -> list[float]:
        """One optimizer update. Returns the losses of this rank's micro-batches."""
        recorder, plan = self.recorder, self.plan
        batches = load_batches(
            self.corpus, self.model, plan, step=step, rank=self.group.index, seed=self.seed
        )

        def batch(k: int) -> tuple[Tensor, Tensor]:
            return to_device(batches[k], self.context.device)

        def share(loss: Tensor) -> Tensor:
            # One division makes the mean over the global batch: micro-batches and ranks add up.
            return loss / (self.plan.microbatches * self.plan.dp)

        recorder.begin_step(step)
        losses = self.pipeline.step(batch, share, before=self._seeding(step))
        if self.sync is not None:
            self.signal.check_complete()
            self.sync.finish()
        if self.tied is not None:
            self.tied.add_up()
        if keep_gradients:
            self.gradients = {name: as_numpy(p.grad) for name, p in self.state().items()}
        with recorder.span("optimizer"):
            if self.clip_norm is not None:
                self._clip(self.clip_norm)
            self.optimizer.step()
            if self.sync is None:
                self.optimizer.zero_grad(set_to_none=True)
            else:
                self.sync.reset()
                self.signal.reset()
        values = read_scalars(losses, device=self.context.device)
        recorder.end_step()
        return values

    def state(self) -> dict[str, Tensor]:
        """This rank's parameters that the single-device model has; a tied copy is none of them."""
        names = self.model.parameter_shapes()
        return {name: p for name, p in self.named.items() if name in names}

    def _clip(self, norm: float) -> None:
        """Scale the gradients of the whole model to an L2 norm of at most ``norm``."""
        copy = self.tied.copy if self.tied is not None else None
        total = get_total_norm([p.grad for p in self.parameters if p is not copy])
        if self.plan.pp > 1:  # what is tied counts once
            squares = total**2
            self.grid.pp.all_reduce(squares, phase="control").wait()
            total = squares.sqrt()
        clip_grads_with_norm_(self.parameters, norm, total)

    def _seeding(self, step: int) -> Callable[[int, str], None] | None:
        """What draws the dropout masks: they depend on sample and part, not on who computes it."""
        if not self.model.dropout:
            return None
        first = self.group.index * self.plan.microbatches

        def before(k: int, part: str) -> None:
            torch.manual_seed(zlib.crc32(f"{self.seed} {step} {first + k} {part}".encode()))

        return before


def train(
    context: Any, model: ModelSpec, plan: Plan, *, steps: int, keep_state: bool, **settings: Any
) -> dict[str, Any]:
    """Train ``steps`` steps on this rank; returns the rank's part of the report, plain columns.

    With ``keep_state`` the ranks of the first data-parallel group add their stages' weights after
    the last step and the last step's gradients (mean over the global batch, before clipping) under
    the names of the single-device model.
    """
    trainer = Trainer(context, model, plan, **settings)
    asked = {**settings, "data": None, "steps": steps}  # paths may differ, what lies there may not
    what = f"{model} {plan.to_dict()} {sorted(asked.items())} {trainer.schedule}"
    agree(trainer.grid.world, what=what, corpus=trainer.corpus)
    several_nodes = len(set(context.nodes)) > 1
    offset, uncertainty = measure_offset(trainer.grid.world) if several_nodes else (0.0, 0.0)
    keep_state = keep_state and trainer.group.index == 0
    losses = []
    for step in range(steps):
        losses.append(trainer.step(step, keep_gradients=keep_state and step == steps - 1))
        context.progress(step + 1, steps)
    weights = {n: as_numpy(p) for n, p in trainer.state().items()} if keep_state else None
    return {
        "rank": context.rank,
        "clock_offset": offset,
        "clock_uncertainty": uncertainty,
        **trainer.recorder.tables(),
        "losses": losses,
        "weights": weights,
        "gradients": trainer.gradients,
        "meta": {
            "device": context.device,
            "backend": context.backend,
            "nodes": list(context.nodes),
            "torch": torch.__version__,
            "text_bytes": trainer.corpus.num_bytes,
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
        return torch.optim.SGD(parameters, lr=lr, fused=True)
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def load_batches(
    corpus: Corpus, model: ModelSpec, plan: Plan, *, step: int, rank: int, seed: int
) -> list[Tensor]:
    """This rank's micro-batches of one step, (b, s + 1) each; data.py's [Note: same batches]."""
    first = rank * plan.microbatches
    texts = [
        corpus.microbatch(step=step, index=first + k, size=plan.microbatch_size,
                          global_batch=plan.global_batch, length=model.seq_len, seed=seed)
        for k in range(plan.microbatches)
    ]  # fmt: skip
    return [
        torch.frombuffer(bytearray(text), dtype=torch.uint8).view(plan.microbatch_size, -1)
        for text in texts
    ]


def to_device(batch: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """(tokens, targets), both (b, s) int64: each byte's target is the byte after it."""
    batch = batch.to(device, non_blocking=True).long()
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def read_scalars(scalars: list[Tensor], *, device: str = "cpu") -> list[float]:
    """The one place where numbers come back from the device, once per step.

    Whoever has none to read waits for ``device`` all the same: the step is over when it is done.
    """
    values = torch.stack(scalars or [torch.zeros((), device=device)]).double().tolist()
    return values[: len(scalars)]


def as_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", copy=True).numpy()


def agree(group: Group, *, what: str, corpus: Corpus) -> None:
    """Raise on every rank if the ranks were not started with the same model, plan, settings and
    text.

    On several machines each is started by its own command line and reads its own files.
    """
    context = group.context
    if group.size == 1:
        return
    facts = [zlib.crc32(what.encode()), int(corpus.fingerprint, 16) % 2**31]
    mine = torch.tensor(facts, dtype=torch.int64, device=context.device)
    everyone = mine.new_empty(2 * group.size)
    group.all_gather(everyone, mine, phase="setup").wait()
    for rank, theirs in enumerate(everyone.view(-1, 2).tolist()):
        if theirs[0] != facts[0]:
            raise ValueError(
                f"rank {rank} was started with another model, plan or settings than rank "
                f"{context.rank}; give every machine the same command line"
            )
        if theirs[1] != facts[1]:
            raise ValueError(
                f"rank {rank} reads another text than rank {context.rank} ({corpus.root}, "
                f"{corpus.num_bytes} bytes); give every machine the same files with data="
            )
