"""A block of the user's own: an op with autograd inside.

``ModelSpec(block=f)`` trains the module that ``f(spec)`` returns in place of the standard block.
`facts.facts` measures what predictions have to know about it.

[Note: saved weights] Autograd saves the weights that backward needs, and so under ZeRO-3 it would
keep alive every unit that was gathered for forward. Therefore a hook replaces each saved weight by
its place, a name and an offset, and backward reads that place in the weights that it is given,
which were gathered again.
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
        if not env.keeping:
            with env.drawing(self.name, 1.0):
                y = called(module, weights, x.view(shape))
            return (compact(y.reshape(x.shape)),), None
        leaf = x.detach().view(shape).requires_grad_()
        leaves = {name: weights[name].detach().requires_grad_() for name in self.params}
        for_backward: dict[str, Any] = {}  # the weights that `input_grad` is given, while it runs
        places = {  # of the weights, by storage: (name, offset)
            w.untyped_storage()._cdata: (name, w.storage_offset()) for name, w in leaves.items()
        }
        not_activations = {t.untyped_storage()._cdata for t in (leaf, *module.buffers())}

        def pack(saved):  # see [Note: saved weights]; the graph keeps alive what this closes over
            storage = saved.untyped_storage()._cdata
            if storage in places:
                name, begin = places[storage]
                return name, saved.shape, saved.stride(), saved.storage_offset() - begin
            if storage not in not_activations:
                env.recorder.owns("activations", saved)
            return saved

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            name, size, stride, offset = packed
            w = for_backward[name]
            return w.as_strided(size, stride, w.storage_offset() + offset)

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
