"""A flat parameter: several tensors as views into one buffer, which N ranks own in N equal parts.

One collective moves the whole buffer, wherever the cuts between the ranks fall: a message per unit
in place of one per parameter, and no parameter has to be divisible by N. ZeRO (zero.py) shares them
out, offload.py moves the parts. FSDP calls it FlatParameter (Zhao+ 2023, arXiv:2304.11277, sec.
3.2.1); which parameters lie together is in buckets.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paralab.comm import Group
from paralab.parallel.buckets import Unit
from paralab.pending import Pending


class Flat:
    """One unit's parameters as views into a flat buffer, and this rank's part of that.

    full  (numel,)      what the parameters are views into
    own   (numel / N,)  this rank's part, which its optimizer updates; ``own.grad`` is its part of
                        the gradient summed over the ranks
    master              what ``own`` was rounded from, where ``dtype`` is not fp32; else None

    initialize  fills in parameters that have no bytes yet: so they never exist twice
    """

    def __init__(
        self, unit: Unit, parameters: Sequence[Tensor], *, group: Group, dtype: torch.dtype,
        initialize: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        self.unit, self.parameters, self.group = unit, list(parameters), group
        self.shapes = [p.shape for p in self.parameters]
        self.missing = len(self.parameters)  # gradients that are not there yet
        first, used = self.parameters[0], sum(p.numel() for p in self.parameters)
        self.padding = first.new_zeros(unit.numel - used, dtype=dtype)
        if initialize is None:
            whole = torch.cat([*(p.detach().flatten() for p in self.parameters), self.padding])
        else:
            whole = first.new_zeros(unit.numel)
            for name, parameter, view in zip(
                unit.names, self.parameters, self.views(whole), strict=True
            ):
                parameter.data = view
                initialize(parameter, name=name)
        self.full = whole.to(dtype)
        for parameter, view in zip(self.parameters, self.views(self.full), strict=True):
            parameter.data = view
        self.own = self.full.chunk(group.size)[group.index]
        self.master = None
        if self.own.dtype != whole.dtype and not unit.frozen:
            mine = whole.chunk(group.size)[group.index]
            self.master = mine if group.size == 1 else mine.clone()
        group.recorder.owns("parameters", self.full)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The unit's tensors in a flat one, (numel,), each in its parameter's shape."""
        parts = flat.split([*(shape.numel() for shape in self.shapes), self.padding.numel()])
        return [p.view(shape) for p, shape in zip(parts, self.shapes, strict=False)]

    def pack(self) -> Tensor:
        """The unit's gradients as one flat tensor, (numel,); their own memory is given back."""
        with self.group.recorder.span("copy"):
            flat = torch.cat([*(p.grad.flatten() for p in self.parameters), self.padding])
            for parameter in self.parameters:
                parameter.grad = None
        return flat

    def gather(self, part: Tensor | None = None) -> Pending:
        """``full`` becomes every rank's part, in order; of this rank ``own``, or ``part``."""
        part = self.own if part is None else part
        return self.group.all_gather(self.full, part, phase="param_gather")

    def whole(self, part: Tensor) -> list[Tensor]:
        """What the ranks hold as ``part``, (numel / N,) each, put together, parameter by parameter.

        For looking at results; not part of a training step.
        """
        flat = part.new_empty(self.unit.numel)
        self.group.all_gather(flat, part, phase="control").wait()
        return self.views(flat)
