"""What predictions have to know of a block of the user's own, ``ModelSpec(block=f)``.

No formula says how many bytes such a block saves for backward, or what it computes. `facts`
measures it with one forward and one backward on fake tensors, which have shapes and no values. The
saved bytes are those of the storages that autograd saves, each counted once; the work is the FLOPs
of the matrix products and the bytes that other kernels read and write.
"""

from __future__ import annotations

import logging
import random
import weakref
from functools import lru_cache
from typing import Any

from paralab.checks import illegal
from paralab.spec.forms import block_shapes, form_name
from paralab.spec.model import ModelSpec
from paralab.theory.work import ITEM, Work, elementwise

# {beginning of a kernel's name: the arithmetic of each of its elements, a name in ELEMENTS}. The
# first match counts; "" is none. Matrix products are not here.
ARITHMETIC = {
    "gelu_backward": "gelu_backward",
    "gelu": "gelu",
    "_softmax_backward": "",
    **dict.fromkeys(("_softmax", "exp", "silu", "sigmoid", "tanh", "softplus"), "exp"),
    **dict.fromkeys(("bernoulli", "native_dropout", "rand", "normal"), "draw"),
}

MAPS = "a module that maps (b, s, h) to (b, s, h)"


@lru_cache(maxsize=64)
def facts(spec: ModelSpec, batch: int, precision: str) -> dict[str, Any]:
    """What ``spec.block`` saves for backward and computes for ``batch`` samples: the fields of its
    `Op`, with the names that they have there. The input half of backward includes the weight half;
    its scratch is negative where it has freed more of what was saved than it has allocated.

    Raises ``ValueError`` for a block that does not map (b, s, h) to (b, s, h) in the same
    precision, cannot run on tensors without values, changes in place what its backward needs, views
    a weight in another type, or has a state that changes from call to call: such a state would
    differ between ranks and plans.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

    block_shapes(spec.block, spec)  # refuses what is no module
    name = form_name(spec.block)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    shape = (batch, spec.seq_len, spec.hidden)
    saved: dict[int, Any] = {}  # {address: weak reference to a storage}: backward frees them
    in_backward, weights = False, dict[int, str]()  # {address of a weight's storage: its name}
    changed: list[Any] = []  # shapes of saved tensors that forward changed in place afterwards
    retyped: list[str] = []  # weights that are saved as another type: no place of a rank's unit is

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = weakref.ref(storage)
        # A weight is emptied before backward, see below, so save another tensor on its storage.
        own = tensor.detach() if storage._cdata in weights else tensor
        if own is not tensor and tensor.dtype != dtype:
            retyped.append(weights[storage._cdata])
        return own, tensor._version

    def unpack(packed: Any) -> Any:  # torch does not compare versions of what a hook has saved
        tensor, version = packed
        if tensor._version != version:
            changed.append(tuple(tensor.shape))
        return tensor

    log = logging.getLogger("torch._subclasses.fake_tensor")  # of the traceback of what it raises
    log.disabled, was_disabled = True, log.disabled
    try:
        with FakeTensorMode():
            module = spec.block(spec)  # type: ignore[misc]
            x = torch.empty(shape, dtype=dtype, requires_grad=True)
            tensors = {n: p.detach().to(dtype) for n, p in module.named_parameters()}
            parameters = [p.requires_grad_() for p in tensors.values()]
            weights.update({p.untyped_storage()._cdata: n for n, p in tensors.items()})
            for parameter in module.parameters():  # a rank's module has none of its own either
                parameter.data = parameter.new_empty(0)
            for local, b in module.named_buffers():
                tensors[local] = b.to(dtype) if b.is_floating_point() else b
            buffers = list(tensors.values())[len(parameters) :]
            constant = [buffer.untyped_storage() for buffer in buffers]
            constant = sum({s._cdata: s.nbytes() for s in constant}.values())  # each once
            versions, originals = [buffer._version for buffer in buffers], dict(tensors)
            counter = _counter()
            with saved_tensors_hooks(pack, unpack), counter:
                y = called(module, tensors, x)
                if fits := isinstance(y, torch.Tensor) and (y.shape, y.dtype) == (x.shape, dtype):
                    rows = compact(y.detach().reshape(-1, spec.hidden))  # as the op returns it
            if fits:
                result = rows.untyped_storage()
                others = {t.untyped_storage()._cdata for t in (x, rows, *parameters, *buffers)}
                kept = {at: storage() for at, storage in saved.items() if storage() is not None}
                keeps = sum(storage.nbytes() for at, storage in kept.items() if at not in others)
                forward, forward_scratch = counter.work, counter.peak - keeps - result.nbytes()
                keeps_result = result._cdata in kept
                del kept
                edge, g = get_gradient_edge(y), torch.empty_like(x)
                del y, rows  # as on a rank: of these only the result is alive when backward begins
                counter.backward(result)
                del result
                # Backward without the weights, as on a rank: see custom.py's [Note: saved weights].
                in_backward, values = True, [parameter.detach() for parameter in parameters]
                for parameter in parameters:
                    parameter.data = parameter.new_empty(0)
                with counter:
                    gx, grads = gradients(edge, x, parameters, [v.shape for v in values], g)
                storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in grads)}
                deferred, made = sum(storages.values()), gx.nbytes
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.data = value
                del g, gx, grads  # else a rank's recorder would count them as alive
                # Compare around a second call: the first may set attributes that then stay.
                state, generators = _state(module), _generators()
                with torch.no_grad():
                    called(module, dict(originals), x)
                varies = [n for n, value in _state(module).items() if state.get(n) != value]
                drew = [n for n, value in _generators().items() if generators[n] != value]
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        why = f"run on tensors without values, in {precision}, it raised {cause}"
        legal = f"{MAPS}, whose shapes do not depend on values, and which recomputes nothing "
        legal += 'itself (Plan(recompute="full") does that)'
        if in_backward:
            legal += "; an autograd.Function of yours saves weights with ctx.save_for_backward(...)"
            legal += ", not as attributes of ctx, because backward uses other copies of them"
        raise illegal("block", name, why, legal) from error
    finally:
        log.disabled = was_disabled
    if not fits:
        made = f"{tuple(y.shape)} in {y.dtype}" if isinstance(y, torch.Tensor) else type(y).__name__
        raise illegal("block", name, f"it maps {shape} in {dtype} to {made}", MAPS)
    for local, part in module.named_modules():
        for attribute, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                place = f"{local}.{attribute}".lstrip(".")
                why = f"its attribute {place} is a tensor, but no parameter and no registered "
                legal = "a local variable, or register_buffer(...)"
                raise illegal("block", name, why + "buffer", legal)
    replaced = [n for n, tensor in originals.items() if tensors[n] is not tensor]
    if replaced or versions != [buffer._version for buffer in buffers]:
        why = "its forward changes a buffer, which would then differ between ranks"
        legal = "a module whose buffers do not change: for example LayerNorm instead of BatchNorm"
        raise illegal("block", name, why, legal)
    if varies:
        why = f"every call of its forward changes {varies[0]}, so its result may depend on the "
        why += "number of calls on a rank, which differs between plans"
        legal = "a module whose attributes do not change; count outside the model"
        raise illegal("block", name, why, legal)
    if drew:
        why = f"its forward draws with {drew[0]}, and each rank would draw different numbers"
        raise illegal("block", name, why, "torch.rand(...), which is seeded alike on all ranks")
    if changed:
        why = f"its forward changes in place a tensor of shape {changed[0]} that its backward needs"
        raise illegal("block", name, why, "a new tensor, such as y = y + x instead of y += x")
    if retyped:
        why = f"its forward views the weight {retyped[0]} in another type"
        legal = "a new tensor, such as torch.complex(w[..., 0], w[..., 1])"
        raise illegal("block", name, why, legal)
    return {
        "keeps": keeps,
        "keeps_result": keeps_result,
        "frees_result": counter.with_result - counter.peak,
        "deferred": deferred,
        "constant": constant,
        "scratch": (forward_scratch, counter.with_result - deferred - made, 0),
        "work": (forward, counter.work, Work()),
    }


def called(module: Any, tensors: dict[str, Any], x: Any) -> Any:
    """``module(x)`` with ``tensors`` for its parameters and buffers during this call only.

    torch.func.functional_call leaves them in a submodule that has two names, and then no longer
    takes that submodule for tied; so the module's own tensors are restored.
    """
    import torch

    own = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    # oneDNN's LSTM saves a workspace whose size fake tensors do not know; torch's own saves none.
    lstm = any(isinstance(part, torch.nn.LSTM) for part, *_ in own)
    flags = torch.backends.mkldnn.set_flags(False if lstm else None, _fp32_precision=None)
    try:
        return torch.func.functional_call(module, tensors, (x,))
    finally:
        torch.backends.mkldnn.set_flags(flags[0], _fp32_precision=None)
        for part, parameters, buffers in own:
            part._parameters.update(parameters)
            part._buffers.update(buffers)
            if isinstance(part, torch.nn.RNNBase):  # has a list of the weights of this call
                part._init_flat_weights()


def compact(tensor: Any) -> Any:
    """``tensor``, or a copy, in order as a message must be and in a storage of its size: else, what
    is handed on might keep alive a larger tensor that it is a part of.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def gradients(edge: Any, x: Any, weights: Any, shapes: Any, g: Any) -> tuple[Any, list]:
    """The gradients of a block's input and of its weights, 0 where forward did not use them.

    edge    of the result in autograd's graph; g: the result's gradient
    shapes  of the weights, whose own values are gone
    """
    import torch

    gx, *of_weights = torch.autograd.grad((edge,), (x, *weights), (g,), allow_unused=True)
    pairs = zip(of_weights, shapes, strict=True)
    of_weights = [x.new_zeros(shape) if found is None else found for found, shape in pairs]
    return compact(torch.zeros_like(x) if gx is None else gx), of_weights


def _state(module: Any) -> dict[str, Any]:
    """{name: text} of the attributes of a module and its submodules, if the text has a value, not
    an address.
    """
    from torch import nn

    of_torch = vars(nn.Module()).keys() - {"training"}  # among them its parameters and its hooks
    return {
        f"{local}.{attribute}".lstrip("."): text
        for local, part in module.named_modules()
        for attribute, value in vars(part).items()
        if attribute not in of_torch and " at 0x" not in (text := repr(value))
    }


def _generators() -> dict[str, Any]:
    """{name: state} of the process's global random generators, torch's excepted."""
    import numpy as np

    return {"random": random.getstate(), "numpy.random": repr(np.random.get_state(legacy=False))}


def _counter() -> Any:
    """A context that counts torch's operations, of forward or, after ``backward()``, of backward.

    Its ``work`` is the sum of their `Work`; its ``peak`` the most bytes alive at once of the
    tensors that they made, in backward less the bytes alive at its start; ``with_result`` the same
    if forward's result were never freed.
    """
    from torch.utils.flop_counter import flop_registry

    from paralab.instruments.memory import Storages, tensors

    formulas = {str(packet): formula for packet, formula in flop_registry.items()}

    class Counter(Storages):
        def __init__(self) -> None:
            super().__init__("cpu")
            self.work, self.peak, self.with_result = Work(), 0, 0
            self.is_result, self.result = False, (lambda: None, 0)
            self.kinds = (1.0, 0.0, 0.0)  # share of each kind of matrix product: `Work.products`

        def backward(self, result: Any) -> None:
            self._settle()
            self.work, self.live, self.peak, self.kinds = Work(), 0, 0, (0.0, 0.5, 0.5)
            self.with_result, self.result = 0, (weakref.ref(result), result.nbytes())

        def _born(self, storage: Any) -> str | None:
            return "other" if self.is_result else None

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            self._settle()
            result = func(*args, **(kwargs or {}))
            for self.is_result, values in ((False, args), (True, result)):
                for tensor in tensors(values):
                    self._meet(tensor)
            self.peak = max(self.peak, self.live)
            gone = self.result[1] if self.result[0]() is None else 0
            self.with_result = max(self.with_result, self.live + gone)
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
                written, read = (sum(t.numel() for t in tensors(v)) for v in (result, args))
                self.work += Work(0, ITEM * (written + read), 1)
                self.work += elementwise(**({name: written} if name else {}))
            return result

    return Counter()
