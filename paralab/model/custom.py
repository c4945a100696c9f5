"""A block of the user's own: an op with autograd inside.

``ModelSpec(block=f)`` trains the module that ``f(spec)`` returns in place of the standard block.
`facts.facts` measures what predictions have to know about it.

[Note: saved weights] Autograd saves the weights that backward needs, and so under ZeRO-3 it would
keep alive every unit that was gathered for forward. Therefore a hook replaces each saved weight by
its place, a name and an offset, and backward reads that place in the weights that it is given,
which were gathered again.

[Note: retyped weights] torch views n numbers as a wider one, say pairs of real numbers as complex
ones, only if the view begins at a multiple of n in its storage. A module's parameter has a storage
of its own; on a rank it lies anywhere in its unit's flat buffer. At another offset the module views
a copy instead, as backward does. No prediction counts that copy.
"""

from __future__ import annotations

from typing import Any

from paralab.model.facts import called, compact, facts, gradients
from paralab.model.ops import Op
from paralab.spec.forms import block_shapes
from paralab.spec.model import ModelSpec


class Custom(Op):
    """One block: (x,) to (y,), (T, h) each, through the user's module as (b, s, h)."""

    def __init__(self, name: str, spec: ModelSpec, batch: int, precision: str) -> None:
        super().__init__(name)
        vars(self).update(facts(spec, batch, precision))
        self.spec, self.params = spec, block_shapes(spec.block, spec)
        self.out = batch * spec.seq_len * spec.hidden

    def forward(self, weights, state, env):
        import torch
        from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

        (x,) = state
        module, shape = self._module(env), (-1, self.spec.seq_len, self.spec.hidden)
        for name, n in self.retyped.items():  # see [Note: retyped weights]
            if weights[name].storage_offset() % n:
                weights = weights | {name: weights[name].clone()}
        if not env.keeping:
            with env.drawing(self.name, 1.0):
                y = called(module, weights, x.view(shape))
            return (compact(y.reshape(x.shape)),), None
        leaf = x.detach().view(shape).requires_grad_()
        leaves = {name: weights[name].detach().requires_grad_() for name in self.params}
        for_backward: dict[str, Any] = {}  # the weights that `input_grad` is given, while it runs
        places = {  # of the weights, by storage: (name, offset in bytes)
            w.untyped_storage()._cdata: (name, w.storage_offset() * w.itemsize)
            for name, w in leaves.items()
        }
        not_activations = {t.untyped_storage()._cdata for t in (leaf, *module.buffers())}

        def pack(saved):  # see [Note: saved weights]; the graph keeps alive what this closes over
            storage = saved.untyped_storage()._cdata
            if storage in places and not (saved.is_conj() or saved.is_neg()):
                name, begin = places[storage]
                # In bytes, because the module may view the weight as complex numbers.
                offset = saved.storage_offset() * saved.itemsize - begin
                return name, saved.dtype, saved.shape, saved.stride(), offset
            if storage not in not_activations:
                env.recorder.owns("activations", saved)
            return saved

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            name, dtype, size, stride, offset = packed
            w = for_backward[name]
            offset += w.storage_offset() * w.itemsize
            if dtype == w.dtype:
                return w.as_strided(size, stride, offset // w.itemsize)
            view = torch.empty(0, dtype=dtype, device=w.device)
            if offset % view.itemsize:  # see [Note: retyped weights]
                last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
                count = (last + 1) * view.itemsize // w.itemsize
                flat = w.as_strided((count,), (1,), offset // w.itemsize)
                return flat.clone().view(dtype).as_strided(size, stride)
            return view.set_(w.untyped_storage(), offset // view.itemsize, size, stride)

        hooks = saved_tensors_hooks(pack, unpack)
        with torch.enable_grad(), hooks, env.drawing(self.name, 1.0):
            y = called(module, leaves, leaf)
        for w in leaves.values():  # the graph refers to the leaves, but needs none of their values
            w.data = w.new_empty(0)
        kept = (leaf, tuple(leaves.values()), get_gradient_edge(y), for_backward)
        return (compact(y.detach().reshape(x.shape)),), kept

    def input_grad(self, weights, kept, grads, env):
        leaf, leaves, edge, for_backward = kept
        for_backward.update(weights)
        g, shapes = grads[0].view(leaf.shape), self.params.values()
        gx, weight_grads = gradients(edge, leaf, leaves, shapes, g)
        for_backward.clear()
        return (gx.view(grads[0].shape),), weight_grads

    def weight_grad(self, deferred, into, env):
        for name, g in zip(self.params, deferred, strict=True):
            into.add(name, g)

    def _module(self, env):
        """The rank's module, made once and without parameters: every call passes them to it."""
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
