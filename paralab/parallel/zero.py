"""ZeRO: data parallelism in which every rank keeps one N-th of what plain data parallelism copies.

N ranks train on N shares of the batch. Plain data parallelism keeps all parameters, gradients and
optimizer states N times over. ZeRO deals them out, one kind after the other (Rajbhandari+ 2020,
arXiv:1910.02054, sec. 5); with w bytes per element and K for the optimizer (AdamW in fp32: 8),

    stage                  bytes of model states per rank   elements sent per step, / ((N-1)/N)
    0  data parallelism    (w + w + K) Psi                  2 Psi
    1  optimizer states    (w + w + K/N) Psi                2 Psi
    2  + gradients         (w + (w + K)/N) Psi              (m+1) Psi with m micro-batches
    3  + parameters        (w + w + K)/N Psi                3m Psi

An all-reduce is a reduce-scatter and an all-gather; ZeRO puts the optimizer
between the two:

    reduce-scatter of the gradients -> rank i updates part i -> all-gather of the parameters

Parameters lie in flat buffers (flat.py; which of them together, buckets.py), cut into N equal parts
wherever that falls, for AdamW and SGD treat every element alike. Stage 1 reduces each buffer once,
after its last micro-batch; stage 2 as backward produces it, so that whole gradients never exist
together; stage 3 keeps parameters in parts too and gathers each block's just before it computes.
Lab 05.

Each stage has the moments of data_parallel.py, `grad_ready`, `finish` and `reset`, and more:
`targets`, what this rank's optimizer updates, `updated`, called when it has, and `summed`, called
when shared_gradients.py has added up what other axes of the plan share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paralab.comm import Group
from paralab.model import GPT
from paralab.parallel.buckets import IN_FLIGHT, Unit
from paralab.parallel.flat import Flat
from paralab.pending import Pending


class Stage1:
    """Optimizer states in N parts.

    named     {name: parameter} of everything this rank's stages hold
    units     how they lie in flat buffers; what is in none stays by itself
    group     the N ranks that share the states out; ``replicas``, if there is one, the ranks of
              other such groups that hold the same part (HSDP: shares inside a node, copies across)
    dtype     of parameters and gradients; what they were in fp32 is in ``masters``
    initialize  called as initialize(parameter, name=...), where the model was made without its
              parameters' bytes: gives them what training starts from
    """

    every_microbatch = False  # whether grad_ready comes for each micro-batch, or for all together

    def __init__(
        self, named: Mapping[str, Tensor], units: Sequence[Unit], *, group: Group,
        replicas: Group | None = None, dtype: torch.dtype = torch.float32,
        initialize: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        self.group, self.replicas, self.dtype = group, replicas, dtype
        self.initialize = initialize
        self.flats = [self.lay_out(unit, [named[n] for n in unit.names]) for unit in units]
        self.trained = [flat for flat in self.flats if not flat.unit.frozen]
        self.flat_of = {p: flat for flat in self.trained for p in flat.parameters}
        self.pending: list[tuple[Flat, Tensor, Pending]] = []
        self.ready: list[Flat] = []
        for name in set(named).difference(*(unit.names for unit in units)):
            if initialize is not None:
                named[name].data = named[name].new_zeros(named[name].shape)
                initialize(named[name], name=name)
            named[name].data = named[name].data.to(dtype)
        self.reset()

    def lay_out(self, unit: Unit, parameters: list[Tensor]) -> Flat:
        return Flat(
            unit, parameters, group=self.group, dtype=self.dtype, initialize=self.initialize
        )

    @property
    def targets(self) -> list[Tensor]:
        """What the optimizer updates: this rank's part of every unit, (numel / N,) each."""
        return [flat.own for flat in self.trained]

    @property
    def masters(self) -> list[Tensor] | None:
        """Of each target the fp32 values that it was rounded from; None in fp32."""
        return None if self.dtype == torch.float32 else [flat.master for flat in self.trained]

    # ---- gradients -----------------------------------------------------------------------------
    def grad_ready(self, parameter: Tensor) -> None:
        flat = self.flat_of[parameter]
        flat.missing -= 1
        if flat.missing == 0:
            flat.missing = len(flat.parameters)
            self.reduce(flat)

    def reduce(self, flat: Flat) -> None:
        """The unit's gradients leave; of their sum over the ranks this one gets its part."""
        self.settle(keep=IN_FLIGHT - 1)
        gradients = flat.pack()
        if self.group.size == 1:  # nobody to add up with
            self.keep(flat, gradients)
            return
        part = gradients.new_empty(flat.own.numel())
        self.group.recorder.owns("buffers", part)
        call = self.group.reduce_scatter(part, gradients, phase="grad_sync")
        self.pending.append((flat, part, call))

    def settle(self, *, keep: int) -> None:
        """Wait for all but the last ``keep`` reduce-scatters, and add what they brought."""
        while len(self.pending) > keep:
            flat, part, call = self.pending.pop(0)
            call.wait()
            self.keep(flat, part)

    def keep(self, flat: Flat, part: Tensor) -> None:
        """This rank's part of the sum is there, for one micro-batch or for all."""
        if flat.own.grad is None:
            flat.own.grad = part
            self.group.recorder.owns("gradients", part)
        else:
            flat.own.grad += part

    def finish(self) -> None:
        """After backward: every part's gradient is the sum over all ranks."""
        self.settle(keep=0)
        if self.replicas is not None:
            parts = map(self.gradient, self.targets)
            calls = [self.replicas.all_reduce(part, phase="grad_sync") for part in parts]
            for call in calls:
                call.wait()

    def summed(self) -> None:
        """After `finish`: what others have a part of too is summed over them as well."""

    def gradient(self, target: Tensor) -> Tensor:
        """This rank's part of the gradient, (numel / N,), of one of the ``targets``."""
        return target.grad

    # ---- parameters ----------------------------------------------------------------------------
    def updated(self) -> None:
        """After the optimizer: everybody gets everybody's part."""
        if self.group.size == 1:  # its part is everything
            return
        calls = [flat.gather() for flat in self.trained]
        for call in calls:
            call.wait()

    def reset(self) -> None:
        for flat in self.trained:
            flat.own.grad = None

    # ---- for who looks at the result -------------------------------------------------------------
    def whole(self, *, gradients: bool = False) -> dict[str, Tensor]:
        """{name: full tensor} of all parameters in units, or of their gradients.

        Every rank of the group has to call it.
        """
        found = {}
        for flat in self.trained if gradients else self.flats:
            part = self.part(flat, gradients=gradients)
            found.update(zip(flat.unit.names, flat.whole(part), strict=True))
        return found

    def part(self, flat: Flat, *, gradients: bool) -> Tensor:
        """This rank's part of the unit, or of its gradient."""
        return self.gradient(flat.own) if gradients else flat.own


class Stage2(Stage1):
    """Gradients in N parts too: they leave as backward produces them, in every micro-batch.

    In place of all gradients there are this rank's part and the buffers under way.
    """

    every_microbatch = True


class Stage3(Stage2):
    """Parameters in N parts too: each part of the model is gathered just before it computes.

    models      this rank's stages, whose parameters have no bytes yet
    prefetch    how many units may be gathered ahead of the ones in use

    Gathered are, at most, the parts in use, ``prefetch`` units more, and a tied embedding from the
    first part to the last. Freed memory is given back at once: a parameter keeps its shape, and its
    storage has no bytes.

    ``stays`` says that the part that computes forward is needed again at once: by its next
    micro-batch, or by its own backward (relay.py).
    """

    def __init__(
        self, named: Mapping[str, Tensor], units: Sequence[Unit], *, group: Group,
        replicas: Group | None = None, dtype: torch.dtype = torch.float32, models: Sequence[GPT],
        initialize: Callable[..., None], prefetch: int,
    ) -> None:  # fmt: skip
        self.prefetch, self.stays = prefetch, False
        self.arriving: dict[Flat, Pending | None] = {}  # gathered: None once it is all there
        super().__init__(
            named, units, group=group, replicas=replicas, dtype=dtype, initialize=initialize
        )
        self.needs: dict[str, list[Flat]] = {}
        self.backwards: set[str] = set()  # parts that have a backward: not below all that trains
        for model in models:
            for at, part in enumerate(model.parts):
                tied = {"embedding.token.weight"} if part == "head" and model.tied else set()
                self.needs[part] = [
                    f for f in self.flats if f.unit.part == part or tied & set(f.unit.names)
                ]
                self.watch(model, at)

    def watch(self, model: GPT, at: int) -> None:
        """Be told when part number ``at`` of ``model`` begins and ends its forward."""
        done, after = model.parts[: at + 1], model.parts[at + 1 :]
        module = model.get_submodule(done[-1])
        module.register_forward_pre_hook(lambda *_: self.enter((done[-1], *after)))
        module.register_forward_hook(lambda _, __, output: self.leave(done, output, after))

    def lay_out(self, unit: Unit, parameters: list[Tensor]) -> Flat:
        flat = super().lay_out(unit, parameters)
        flat.own = flat.own.clone()
        self.group.recorder.owns("parameters", flat.own)
        self.free(flat)
        return flat

    def free(self, flat: Flat) -> None:
        flat.full.untyped_storage().resize_(0)
        self.group.recorder.resized(flat.full)

    def unfree(self, flat: Flat) -> None:
        flat.full.untyped_storage().resize_(flat.full.numel() * flat.full.element_size())
        self.group.recorder.resized(flat.full)

    def fetch(self, flat: Flat) -> None:
        """Start to gather a unit, unless it is there or on its way."""
        if flat not in self.arriving:
            self.unfree(flat)
            self.arriving[flat] = flat.gather()

    def arrive(self, flat: Flat) -> None:
        """Wait until a unit that is on its way is there."""
        if self.arriving[flat] is not None:
            self.arriving[flat].wait()
            self.arriving[flat] = None

    def release(self, flats: Sequence[Flat]) -> None:
        for flat in flats:
            if flat in self.arriving:
                self.arrive(flat)
                del self.arriving[flat]
                self.free(flat)

    def enter(self, parts: Sequence[str]) -> None:
        """The first of ``parts`` is about to compute, forward or backward; the others follow."""
        units = list(dict.fromkeys(flat for part in parts for flat in self.needs[part]))
        now = len(self.needs[parts[0]])
        for flat in units[: now + self.prefetch]:
            self.fetch(flat)
        for flat in units[:now]:
            self.arrive(flat)

    def leave(self, done: Sequence[str], output: Tensor, after: Sequence[str]) -> None:
        """The last of ``done`` has computed forward; its backward begins at ``output``."""
        later = {flat for part in after for flat in self.needs[part]}
        if not self.stays:
            self.release([flat for flat in self.needs[done[-1]] if flat not in later])
        if output.requires_grad:
            self.backwards.add(done[-1])
            parts = [part for part in done if part in self.backwards]
            output.register_hook(lambda _: self.enter_backward(parts[::-1]))

    def enter_backward(self, parts: Sequence[str]) -> None:
        wanted = {flat for part in parts for flat in self.needs[part]}
        self.release([flat for flat in self.arriving if flat not in wanted])
        self.enter(parts)

    def reduce(self, flat: Flat) -> None:
        super().reduce(flat)
        self.release([flat])

    def finish(self) -> None:
        self.release(list(self.arriving))
        super().finish()

    def updated(self) -> None:
        pass  # whoever needs a parameter gathers it


STAGES = {1: Stage1, 2: Stage2, 3: Stage3}
