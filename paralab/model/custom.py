"""A block of the user's own: an op with autograd inside.

``ModelSpec(block=f)`` trains the module that ``f(spec)`` makes in place of the standard block. What
predictions have to know of it is found by `facts.facts`.

[Note: saved weights] Autograd saves the weights that backward needs, and under ZeRO-3 it would so
keep every unit that was gathered for forward. Therefore of a saved weight only its place is kept,
and backward takes what lies there in the weights that it is given, which were gathered again.
"""

from __future__ import annotations

import math
from typing import Any

from paralab.model.facts import called, facts
from paralab.model.ops import Op
from paralab.spec.forms import block_shapes
from paralab.spec.model import BYTES_PER_ELEMENT, ModelSpec
from paralab.theory.work import Work


class Custom(Op):
    """One block: (x,) to (y,), (T, h) each, through the user's module as (b, s, h)."""

    def __init__(self, name: str, spec: ModelSpec, batch: int, precision: str) -> None:
        super().__init__(name)
        found, item = facts(spec, batch, precision), BYTES_PER_ELEMENT[precision]
        self.spec, self.params = spec, block_shapes(spec.block, spec)
        self.out = batch * spec.seq_len * spec.hidden
        self.keeps, self.keeps_result = found.keeps, found.keeps_result
        self.passes_input, self.passes_grad = found.passes
        self.constant = found.constant
        self.deferred = item * sum(map(math.prod, self.params.values()))
        self.scratch = (found.scratch[0], found.scratch[1], 0)
        self.work = (found.forward, found.backward, Work())

    def forward(self, weights, state, env):
        import torch
        from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

        from paralab.model.wide_views import wide_views

        (x,) = state
        module, shape = self._module(env), (-1, self.spec.seq_len, self.spec.hidden)
        if not env.keeping:
            with env.drawing(self.name, 1.0), wide_views(weights.values()):
                y = called(module, dict(weights), x.view(shape))
            return (y.reshape(x.shape),), None
        leaf = x.detach().view(shape).requires_grad_()
        leaves = {name: weights[name].detach().requires_grad_() for name in self.params}
        now: dict[str, Any] = {}  # the weights that backward is given
        place = {
            w.untyped_storage()._cdata: (name, w.storage_offset() * w.itemsize)
            for name, w in leaves.items()
        }
        known = {t.untyped_storage()._cdata for t in (leaf, *module.buffers())}

        def save(saved):  # see [Note: saved weights]; the graph keeps what this function refers to
            storage = saved.untyped_storage()._cdata
            if storage in place and not (saved.is_conj() or saved.is_neg()):
                name, begin = place[storage]  # in bytes: it may be seen as complex numbers
                begin = saved.storage_offset() * saved.itemsize - begin
                return name, saved.dtype, saved.shape, saved.stride(), begin
            if storage not in known:
                env.recorder.owns("activations", saved)
            return saved

        def find(saved):
            if isinstance(saved, torch.Tensor):
                return saved
            name, dtype, size, stride, offset = saved
            w = now[name]
            offset += w.storage_offset() * w.itemsize
            if dtype == w.dtype:
                return w.as_strided(size, stride, offset // w.itemsize)
            seen = torch.empty(0, dtype=dtype, device=w.device)
            if offset % seen.itemsize:  # these weights begin where no such number can
                last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
                count = (last + 1) * seen.itemsize // w.itemsize
                flat = w.as_strided((count,), (1,), offset // w.itemsize)
                return flat.clone().view(dtype).as_strided(size, stride)
            return seen.set_(w.untyped_storage(), offset // seen.itemsize, size, stride)

        views, hooks = wide_views(leaves.values()), saved_tensors_hooks(save, find)
        with torch.enable_grad(), hooks, env.drawing(self.name, 1.0), views:
            y = called(module, leaves, leaf)
        for w in leaves.values():  # the graph knows them, and their values are not needed
            w.data = w.new_empty(0)
        kept = (leaf, tuple(leaves.values()), get_gradient_edge(y), now)
        return (y.detach().reshape(x.shape),), kept

    def input_grad(self, weights, kept, grads, env):
        import torch

        leaf, leaves, edge, now = kept
        now.update(weights)
        gx, *rest = torch.autograd.grad(
            (edge,), (leaf, *leaves), (grads[0].view(leaf.shape),), allow_unused=True
        )
        now.clear()
        gx = torch.zeros_like(leaf) if gx is None else gx
        for at, shape in enumerate(self.params.values()):
            if rest[at] is None:  # forward did not use it
                rest[at] = leaf.new_zeros(shape)
        return (gx.reshape(grads[0].shape),), rest

    def weight_grad(self, deferred, into, env):
        for name, g in zip(self.params, deferred, strict=True):
            into.add(name, g)

    def _module(self, env):
        """The module on this rank, made once; its parameters are given to it at every call."""
        if self.name not in env.modules:
            from paralab.model import draws

            seed = draws.name_seed(env.seed, self.name)
            with env.recorder.unwatched(), draws.drawing(seed):
                module = self.spec.block(self.spec)
                for parameter in module.parameters():
                    parameter.data = parameter.new_empty(0)
                env.modules[self.name] = module = module.to(env.device, env.dtype)
            env.recorder.owns("buffers", *module.buffers())
        return env.modules[self.name]
