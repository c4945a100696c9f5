"""What predictions have to know of a block of the user's own, ``ModelSpec(block=f)``.

How many bytes it keeps for backward, and what it computes, is not written down anywhere. `facts`
finds it by one forward and one backward on fake tensors, which have shapes and no values: kept is
what autograd saves, each storage once; computed are the FLOPs of its matrix products, and the bytes
that its other kernels read and write.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from functools import lru_cache
from typing import Any, NamedTuple

from paralab.checks import illegal
from paralab.spec.forms import block_shapes, form_name
from paralab.spec.model import ModelSpec
from paralab.theory.work import ITEM, Work, elementwise

# Elements that need arithmetic, of kernels that are no products, by the beginning of their names.
ARITHMETIC = {
    "gelu_backward": "gelu_backward",
    "gelu": "gelu",
    "_softmax_backward": "",
    **dict.fromkeys(("_softmax", "exp", "silu", "sigmoid", "tanh", "softplus"), "exp"),
    **dict.fromkeys(("bernoulli", "native_dropout", "rand", "normal"), "draw"),
}


MAPS = "a module that maps (b, s, h) to (b, s, h)"


class Facts(NamedTuple):
    """Of one block and micro-batch.

    keeps         bytes that stay for backward besides input, parameters, buffers and result
    keeps_result  whether the result stays too
    passes        whether the result is the input, or a view of it; and so backward, its gradient
    constant      bytes of its buffers
    scratch       (forward, backward): bytes that exist meanwhile, at most, besides what comes in,
                  what goes out and what is kept; less than 0 where backward lets go of more of
                  what was kept than it has made
    forward, backward  `Work`
    """

    keeps: int
    keeps_result: bool
    passes: tuple[bool, bool]
    constant: int
    scratch: tuple[int, int]
    forward: Work
    backward: Work


@lru_cache(maxsize=64)
def facts(spec: ModelSpec, batch: int, precision: str = "fp32") -> Facts:
    """What ``spec.block`` keeps and computes for ``batch`` samples.

    Raises ``ValueError`` where it does not map (b, s, h) to (b, s, h) of the same precision, cannot
    run on tensors without values, changes in place what its backward needs, or has a state that
    changes from call to call: that would be no part of a training, and not the same on all ranks.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd.graph import saved_tensors_hooks

    block_shapes(spec.block, spec)  # refuses what is no module
    name = form_name(spec.block)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    shape = (batch, spec.seq_len, spec.hidden)
    saved: dict[int, Any] = {}  # storages by address; backward lets go of them, one by one
    backward, weights = False, set[int]()  # whether forward is over; the parameters' storages
    changed: list[Any] = []  # tensors that backward needs and forward has changed meanwhile

    def save(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = weakref.ref(storage)
        # Of a weight another tensor on the same storage: the weight itself is emptied, see below.
        return tensor.detach() if storage._cdata in weights else tensor, tensor._version

    def find(packed: Any) -> Any:  # torch compares versions too, but not of what a hook has saved
        tensor, version = packed
        if tensor._version != version:
            changed.append(tuple(tensor.shape))
        return tensor

    try:
        with FakeTensorMode():
            module = spec.block(spec)  # type: ignore[misc]
            x = torch.empty(shape, dtype=dtype, requires_grad=True)
            named = {n: p.detach().to(dtype) for n, p in module.named_parameters()}
            parameters = [p.requires_grad_() for p in named.values()]
            for parameter in module.parameters():  # a rank's module has none of its own either
                parameter.data = parameter.new_empty(0)
            for local, b in module.named_buffers():
                named[local] = b.to(dtype) if b.is_floating_point() else b
            buffers = list(named.values())[len(parameters) :]
            weights.update(p.untyped_storage()._cdata for p in parameters)
            versions, given = [buffer._version for buffer in buffers], dict(named)
            counter = _counter()
            with saved_tensors_hooks(save, find), counter:
                y = called(module, named, x)
                if fits := isinstance(y, torch.Tensor) and (y.shape, y.dtype) == (x.shape, dtype):
                    rows = y.detach().reshape(-1, spec.hidden)  # as the op hands it on
            if fits:
                result = rows.untyped_storage()
                own = [t.untyped_storage()._cdata for t in (x, rows, *parameters, *buffers)]
                passes_input = own[0] == own[1]
                kept = {at: found() for at, found in saved.items() if found() is not None}
                keeps = sum(found.nbytes() for at, found in kept.items() if at not in own)
                came = 0 if passes_input else result.nbytes()
                forward, above = counter.work, counter.peak - keeps - came
                keeps_result = result._cdata in kept
                del kept
                counter.backward()
                g = torch.empty_like(y)
                # Backward without the weights, as on a rank: see custom.py's [Note: saved weights].
                backward, whole = True, [parameter.detach() for parameter in parameters]
                for parameter in parameters:
                    parameter.data = parameter.new_empty(0)
                with counter:
                    found = torch.autograd.grad(y, (x, *parameters), g, allow_unused=True)
                    back = [t.untyped_storage() for t in found if t is not None]
                    known = g.untyped_storage()._cdata
                    passes_grad = found[0] is not None and back[0]._cdata == known
                    made = sum(one.nbytes() for one in back if one._cdata != known)
                for parameter, values in zip(parameters, whole, strict=True):
                    parameter.data = values
                del g, found, back  # a rank's recorder counts what is alive here, fake or not
                # A second call tells what every call changes: the first may note its shapes, say.
                before, numbers = _state(module), _generators()
                with torch.no_grad():
                    called(module, dict(given), x)
                states = [n for n, value in _state(module).items() if before.get(n) != value]
                drew = [n for n, value in _generators().items() if numbers[n] != value]
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        why = f"run on tensors without values, in {precision}, it raised {said}"
        legal = f"{MAPS}, whose shapes do not depend on values, and which recomputes nothing "
        legal += 'itself (Plan(recompute="full") does that)'
        if backward:
            legal += "; an autograd.Function of yours saves weights with ctx.save_for_backward(...)"
            legal += ", not as attributes of ctx, because backward uses other copies of them"
        raise illegal("block", name, why, legal) from error
    if not fits:
        made = f"{tuple(y.shape)} in {y.dtype}" if isinstance(y, torch.Tensor) else type(y).__name__
        raise illegal("block", name, f"it maps {shape} in {dtype} to {made}", MAPS)
    for local, part in module.named_modules():
        for attribute, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                place = f"{local}.{attribute}".lstrip(".")
                why = (
                    f"its attribute {place} is a tensor, but no parameter and no registered buffer"
                )
                raise illegal("block", name, why, "a local variable, or register_buffer(...)")
    replaced = [n for n, tensor in given.items() if named[n] is not tensor]
    if replaced or versions != [buffer._version for buffer in buffers]:
        why = "its forward changes a buffer, which would then differ between ranks"
        legal = "a module whose buffers do not change: for example LayerNorm instead of BatchNorm"
        raise illegal("block", name, why, legal)
    if states:
        why = f"every call of its forward changes {states[0]}, so its result may depend on the "
        why += "number of calls on a rank, which differs between plans"
        legal = "a module whose attributes do not change; count outside the model"
        raise illegal("block", name, why, legal)
    if drew:
        why = f"its forward draws with {drew[0]}, and each rank would draw different numbers"
        raise illegal("block", name, why, "torch.rand(...), which is seeded alike on all ranks")
    if changed:
        why = f"its forward changes in place a tensor of shape {changed[0]} that its backward needs"
        raise illegal("block", name, why, "a new tensor, such as y = y + x instead of y += x")
    constant = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
    scratch = above, counter.peak - made
    passes = passes_input, passes_grad
    return Facts(keeps, keeps_result, passes, constant, scratch, forward, counter.work)


def called(module: Any, tensors: dict[str, Any], x: Any) -> Any:
    """``module(x)`` with ``tensors`` for its parameters and buffers, and only for this call: in a
    part that has two names torch leaves them behind, and next time takes it for tied no longer.
    """
    import torch

    own = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    try:
        return torch.func.functional_call(module, tensors, (x,))
    finally:
        for part, parameters, buffers in own:
            part._parameters.update(parameters)
            part._buffers.update(buffers)


def _state(module: Any) -> dict[str, Any]:
    """What the attributes of a module and of its parts are, as far as they can be compared."""
    from torch import nn

    torchs = vars(nn.Module()).keys() - {"training"}  # among them its parameters and its hooks
    return {
        f"{local}.{attribute}".lstrip("."): _plain(value)
        for local, part in module.named_modules()
        for attribute, value in vars(part).items()
        if attribute not in torchs
    }


def _plain(value: Any) -> Any:
    """``value`` as something that stays as it is now; None for what is not understood."""
    import numpy as np
    from torch import Tensor

    if isinstance(value, (bool, int, float, complex, str, np.generic)):
        return repr(value)  # a nan is equal to itself as text alone
    if isinstance(value, dict):
        return [(repr(key), _plain(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [_plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return None


def _generators() -> dict[str, Any]:
    """The states of the generators that are one for the whole process, besides torch's."""
    import numpy as np

    return {"random": random.getstate(), "numpy.random": repr(np.random.get_state(legacy=False))}


def _counter() -> Any:
    """A context in which torch's operations add up to ``work``, of forward and then of backward;
    and ``peak``: the most bytes that were alive at once of what they made, in backward beyond what
    was alive when it began.
    """
    from torch.utils.flop_counter import flop_registry

    from paralab.instruments.memory import Storages, tensors

    formulas = {str(packet): formula for packet, formula in flop_registry.items()}

    class Counter(Storages):
        def __init__(self) -> None:
            super().__init__("cpu")
            self.work, self.peak, self.made = Work(), 0, False
            self.kinds = (1.0, 0.0, 0.0)  # of matrix products: see `Work.products`

        def backward(self) -> None:
            self._settle()
            self.work, self.live, self.peak, self.kinds = Work(), 0, 0, (0.0, 0.5, 0.5)

        def _born(self, storage: Any) -> str | None:
            return "other" if self.made else None

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            self._settle()
            result = func(*args, **(kwargs or {}))
            for self.made, values in ((False, args), (True, result)):
                for tensor in tensors(values):
                    self._meet(tensor)
            self.peak = max(self.peak, self.live)
            namespace, _, kernel = str(func._overloadpacket).partition(".")
            if func.is_view or namespace == "prim" or kernel in ("detach", "empty", "empty_like"):
                return result  # nothing is computed
            formula = formulas.get(f"aten.{kernel.replace('_for_cpu', '')}")
            if formula is not None:
                flops = formula(*args, **(kwargs or {}), out_val=result)
                moved = ITEM * sum(t.numel() for t in tensors((args, result)))
                kinds = tuple(flops * kind for kind in self.kinds)
                self.work += Work(flops, 0, 1, kinds, operands=moved)
            else:
                name = next((n for at, n in ARITHMETIC.items() if kernel.startswith(at)), "")
                made, read = (sum(t.numel() for t in tensors(some)) for some in (result, args))
                self.work += Work(0, ITEM * (made + read), 1)
                self.work += elementwise(**({name: made} if name else {}))
            return result

    return Counter()
