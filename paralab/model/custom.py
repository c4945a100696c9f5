"""A block of the user's own: an op with autograd inside, and what predictions have to know of it.

``ModelSpec(block=f)`` trains the module that ``f(spec)`` makes in place of the standard block. How
many bytes it keeps for backward, and what it computes, is not written down anywhere. `facts` finds
it by one forward and one backward on fake tensors, which have shapes and no values: kept is what
autograd saves, each storage once; computed are the FLOPs of its matrix products, and the bytes that
its other kernels read and write.

[Note: saved weights] Autograd saves the weights that backward needs, and under ZeRO-3 it would so
keep every unit that was gathered for forward. Therefore of a saved weight only its place is kept,
and backward takes what lies there in the weights that it is given, which were gathered again.
"""

from __future__ import annotations

import math
import weakref
from functools import lru_cache
from typing import Any, NamedTuple

from paralab.checks import illegal
from paralab.model.ops import DRAW_FLOPS, EXP_FLOPS, GELU_FLOPS, Op
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec
from paralab.spec.forms import block_shapes, form_name
from paralab.theory.work import ITEM, Work

# Arithmetic per element of kernels that are no matrix products, by the beginning of their names.
ARITHMETIC = {
    "gelu_backward": GELU_FLOPS[1],
    "gelu": GELU_FLOPS[0],
    "_softmax_backward": 0,
    **dict.fromkeys(("_softmax", "exp", "silu", "sigmoid", "tanh", "softplus"), EXP_FLOPS),
    **dict.fromkeys(("bernoulli", "native_dropout", "rand", "normal"), DRAW_FLOPS),
}


MAPS = "a module that maps (b, s, h) to (b, s, h)"


class Custom(Op):
    """One block: (x,) to (y,), (T, h) each, through the user's module as (b, s, h)."""

    def __init__(self, name: str, spec: ModelSpec, batch: int, precision: str) -> None:
        super().__init__(name)
        found, item = facts(spec, batch, precision), BYTES_PER_ELEMENT[precision]
        self.spec, self.params = spec, block_shapes(spec.block, spec)
        self.out = batch * spec.seq_len * spec.hidden
        self.keeps, self.keeps_result = found.keeps, found.keeps_result
        self.constant = found.constant
        self.deferred = item * sum(map(math.prod, self.params.values()))
        self.scratch = (found.scratch[0], found.scratch[1], 0)
        self.work = (found.forward, found.backward, Work())

    def forward(self, weights, state, env):
        import torch
        from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

        (x,) = state
        module, shape = self._module(env), (-1, self.spec.seq_len, self.spec.hidden)
        if not env.keeping:
            with env.drawing(self.name, 1.0):
                y = torch.func.functional_call(module, dict(weights), (x.view(shape),))
            return (y.reshape(x.shape),), None
        leaf = x.detach().view(shape).requires_grad_()
        leaves = {name: weights[name].detach().requires_grad_() for name in self.params}
        now: dict[str, Any] = {}  # the weights that backward is given
        place = {
            w.untyped_storage()._cdata: (name, w.storage_offset()) for name, w in leaves.items()
        }
        known = {t.untyped_storage()._cdata for t in (leaf, *module.buffers())}

        def save(saved):  # see [Note: saved weights]; the graph keeps what this function refers to
            storage = saved.untyped_storage()._cdata
            if storage in place and saved.dtype == x.dtype:
                name, begin = place[storage]
                return name, saved.shape, saved.stride(), saved.storage_offset() - begin
            if storage not in known:
                env.recorder.owns("activations", saved)
            return saved

        def find(saved):
            if isinstance(saved, torch.Tensor):
                return saved
            name, size, stride, offset = saved
            return now[name].as_strided(size, stride, now[name].storage_offset() + offset)

        with torch.enable_grad(), saved_tensors_hooks(save, find), env.drawing(self.name, 1.0):
            y = torch.func.functional_call(module, leaves, (leaf,))
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


class Facts(NamedTuple):
    """Of one block and micro-batch.

    keeps         bytes that stay for backward besides input, parameters, buffers and result
    keeps_result  whether the result stays too
    constant      bytes of its buffers
    scratch       (forward, backward): bytes that exist meanwhile, at most, besides what comes in,
                  what goes out and what is kept; less than 0 where backward lets go of more of
                  what was kept than it has made
    forward, backward  `Work`
    """

    keeps: int
    keeps_result: bool
    constant: int
    scratch: tuple[int, int]
    forward: Work
    backward: Work


@lru_cache(maxsize=64)
def facts(spec: ModelSpec, batch: int, precision: str = "fp32") -> Facts:
    """What ``spec.block`` keeps and computes for ``batch`` samples.

    Raises ``ValueError`` where it does not map (b, s, h) to (b, s, h) of the same precision, cannot
    run on tensors without values, or changes a buffer: such a state would be no part of a training,
    and not the same on all ranks.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd.graph import saved_tensors_hooks

    block_shapes(spec.block, spec)  # refuses what is no module
    name = form_name(spec.block)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    shape = (batch, spec.seq_len, spec.hidden)
    saved: dict[int, Any] = {}  # storages by address; backward lets go of them, one by one

    def save(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = weakref.ref(storage)
        return tensor

    try:
        with FakeTensorMode():
            module = spec.block(spec)  # type: ignore[misc]
            x = torch.empty(shape, dtype=dtype, requires_grad=True)
            named = {n: p.detach().to(dtype) for n, p in module.named_parameters()}
            parameters = [p.requires_grad_() for p in named.values()]
            for local, b in module.named_buffers():
                named[local] = b.to(dtype) if b.is_floating_point() else b
            buffers = list(named.values())[len(parameters) :]
            versions = [buffer._version for buffer in buffers]
            counter = _counter()
            with saved_tensors_hooks(save, lambda tensor: tensor), counter:
                y = torch.func.functional_call(module, named, (x,))
            if isinstance(y, torch.Tensor) and (y.shape, y.dtype) == (x.shape, dtype):
                result = y.untyped_storage()
                own = [t.untyped_storage()._cdata for t in (x, y, *parameters, *buffers)]
                kept = {at: found() for at, found in saved.items() if found() is not None}
                keeps = sum(found.nbytes() for at, found in kept.items() if at not in own)
                forward, above = counter.work, counter.peak - keeps - result.nbytes()
                keeps_result = result._cdata in kept
                del kept
                counter.backward()
                g = torch.empty_like(y)
                with counter:
                    found = torch.autograd.grad(y, (x, *parameters), g, allow_unused=True)
                    made = sum(t.untyped_storage().nbytes() for t in found if t is not None)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        why = f"run on tensors without values, in {precision}, it raised {said}"
        legal = f"{MAPS}, and whose shapes do not depend on values"
        raise illegal("block", name, why, legal) from error
    if not isinstance(y, torch.Tensor) or (y.shape, y.dtype) != (x.shape, dtype):
        made = f"{tuple(y.shape)} in {y.dtype}" if isinstance(y, torch.Tensor) else type(y).__name__
        raise illegal("block", name, f"it makes {made} of {shape} in {dtype}", MAPS)
    if versions != [buffer._version for buffer in buffers]:
        why = "its forward changes a buffer, and such a state would not be the same on all ranks"
        legal = "a module whose buffers stay as they are: a LayerNorm in place of a BatchNorm, say"
        raise illegal("block", name, why, legal)
    constant = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
    scratch = above, counter.peak - made
    return Facts(keeps, keeps_result, constant, scratch, forward, counter.work)


def _counter() -> Any:
    """A context in which torch's operations add up to ``work``, of forward and then of backward;
    and ``peak``: the most bytes that were alive at once of what they made, in backward beyond what
    was alive when it began.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    formulas = {str(packet): formula for packet, formula in flop_registry.items()}

    def tensors(values: Any) -> list[Any]:
        return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]

    def storages(values: Any) -> dict[int, Any]:
        return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors(values)}

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.work, self.live, self.peak = Work(), 0, 0
            self.kinds = (1.0, 0.0, 0.0)  # of matrix products: see `Work.products`
            self.alive: dict[int, Any] = {}  # what was made here: weak references, by address

        def backward(self) -> None:
            self.work, self.live, self.peak, self.kinds = Work(), 0, 0, (0.0, 0.5, 0.5)

        def meet(self, result: Any, given: Any) -> None:
            before = storages(given)
            for address, storage in storages(result).items():
                if address in self.alive or address in before:
                    continue

                def gone(_: Any, address: int = address, size: int = storage.nbytes()) -> None:
                    del self.alive[address]
                    self.live -= size

                self.alive[address] = weakref.ref(storage, gone)
                self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            self.meet(result, args)
            namespace, _, kernel = str(func._overloadpacket).partition(".")
            if func.is_view or namespace == "prim" or kernel in ("detach", "empty", "empty_like"):
                return result  # nothing is computed
            formula = formulas.get(f"aten.{kernel.replace('_for_cpu', '')}")
            if formula is not None:
                flops = formula(*args, **(kwargs or {}), out_val=result)
                self.work += Work(flops, 0, 1, tuple(flops * kind for kind in self.kinds))
            else:
                each = next((n for at, n in ARITHMETIC.items() if kernel.startswith(at)), 0)
                made, read = (sum(t.numel() for t in tensors(some)) for some in (result, args))
                self.work += Work(each * made, ITEM * (made + read), 1)
            return result

    return Counter()
