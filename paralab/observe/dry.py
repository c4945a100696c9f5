"""The ledger of a dry run: tensors on torch's "meta" device, which have sizes and no bytes.

The rank program runs as ever; every operation says what its result would look like, and the ledger
counts that. What would lie on the device is on "meta", and it alone is counted.

[Note: remembered shapes] On "meta" many operations work out the result's shape in Python, for 0.2
ms each. A step repeats some hundred different ones, micro-batch after micro-batch: so what came out
for the same operation and the same shapes is remembered, and the next time an empty tensor of that
shape is made, in 10 us. Every operation that can make memory is seen and counted, each time; what
shares memory with an argument is made anew, what writes into an argument hands it back.

[Note: views] Half of all operations are views, and none of them makes memory. Seen once, an
operation of that kind goes past the ledger, straight to torch's kernel for it: its way through
Python and back took 10 to 20 us, a fifth of a dry run. What has died since is taken back when the
next operation comes or autograd saves something, so the bytes are those of a ledger that sees all.

[Note: as a CPU] A dry run's bytes are those of a run on CPUs. Where these depend on the device the
CPU's way is taken: its fused attention keeps no scores, and its layer norm keeps mean and deviation
in the type of what it is given, where a GPU keeps them in fp32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paralab.observe.ledger import GRAIN, Ledger
from paralab.observe.memory import Life

_TENSORS = (Tensor, torch.nn.Parameter)
_META = torch.device("meta")  # a name would be read each time
_DETACH = torch.ops.aten.detach.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # a view that autograd does not know of


class DryLedger(Ledger):
    """`Ledger` of tensors without bytes, as quick as one of tensors with them."""

    def __enter__(self) -> DryLedger:
        self._views = torch.library.Library("aten", "IMPL")
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._views._destroy()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._dead:
            self._settle()
        if func is _DETACH:  # autograd's own for what it saves, which no kernel is asked for
            return args[0].detach()
        if func.is_view or func is _UNSAFE_VIEW:
            if func.namespace == "aten":  # for the first and last time
                for key in ("Python", "PythonTLSSnapshot"):
                    self._views.impl(func, torch.library.fallthrough_kernel, key)
            return func(*args, **kwargs) if kwargs else func(*args)
        remembered = _OPERATIONS.get(func.__qualname__) or _operation(func)
        result = remembered(self, args, kwargs or {})
        if self.recorder.samples and abs(self.live - self._noted) > self._most // GRAIN:
            self._note()
        return result

    def _saved(self, tensor: Tensor) -> Tensor:
        if self._dead:
            self._settle()
        return super()._saved(tensor)

    def add(self, tensor: Tensor, size: int) -> None:
        """A tensor was made, with ``size`` bytes of its own: `_meet`, where nothing is in doubt."""
        storage = tensor.untyped_storage()
        life = Life(storage, self._dead.append)
        life.address, life.size, life.category = storage._cdata, size, self.born
        self._known[life.address] = life
        self.bytes[self.born] += size
        self.live += size


class Remembered:
    """An operation that knows its results' shapes. See [Note: remembered shapes]."""

    def __init__(self, func: Any) -> None:
        self.func, self.writes = func, func._schema.is_mutable
        self.known: dict[tuple, Make | None] = {}  # None: is called each time

    def __call__(self, ledger: DryLedger, args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            key = _key(args, kwargs)
            make = self.known[key]
        except KeyError:
            result = self._first(key, args, kwargs)
        except (TypeError, _Elsewhere):
            result = self.func(*args, **kwargs)
        else:
            if make is not None:
                return make(ledger, args)
            result = self.func(*args, **kwargs)
        ledger._meet_all(result)
        return result

    def _first(self, key: tuple, args: tuple, kwargs: dict[str, Any]) -> Any:
        before = _state(args[0]) if self.writes and args else None
        result = self.func(*args, **kwargs)
        if self.func is torch.ops.aten.native_layer_norm.default and args[2] is not None:
            result = (result[0], *(kept.to(args[2].dtype) for kept in result[1:]))
        self.known[key] = self._maker(result, args, kwargs, before)
        return result

    def _maker(self, result: Any, args: tuple, kwargs: dict, before: Any) -> Make | None:
        """What makes such a result again of such arguments; None: the operation alone can."""
        if self.writes:
            same = args and result is args[0] and _state(result) == before
            return _first if same else None
        there = {t.untyped_storage()._cdata for t in _tensors((args, tuple(kwargs.values())))}
        if isinstance(result, Tensor):
            return _maker_of(result, there)
        if not isinstance(result, tuple) or not result:
            return None
        makers: list[Any] = []
        for part in result:
            if part is None:
                makers.append(lambda ledger, args: None)
            else:
                makers.append(isinstance(part, Tensor) and _maker_of(part, there))
                there |= {t.untyped_storage()._cdata for t in _tensors([part])}
        if not all(makers):
            return None
        return lambda ledger, args: tuple([make(ledger, args) for make in makers])


Make = Callable[[DryLedger, tuple], Any]  # result for these arguments, counted by the ledger
_OPERATIONS: dict[str, Remembered] = {}  # by name; of one operation the same in every run


def _operation(func: Any) -> Remembered:
    return _OPERATIONS.setdefault(func.__qualname__, Remembered(func))


class _Elsewhere(Exception):
    """An argument is not on "meta": it may be a number in disguise, and decide on a type."""


def _key(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """All that a result's shape depends on. Raises _Elsewhere, or TypeError if it is not known."""
    key: list[Any] = [*kwargs]
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind in _TENSORS:
            if not value.is_meta:
                raise _Elsewhere
            key += (value.dtype, value.shape, value.stride())
        elif kind is list or kind is tuple:
            key.append(_key(value, {}))
        else:
            key += (kind, value)
    return tuple(key)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _state(tensor: Any) -> Any:
    """What an operation that writes numbers leaves as it is, and one that resizes does not."""
    if not isinstance(tensor, Tensor):
        return None
    storage = tensor.untyped_storage()
    return tensor.shape, tensor.stride(), storage._cdata, storage.nbytes()


def _first(ledger: DryLedger, args: tuple) -> Any:
    ledger._meet(args[0])
    return args[0]


def _maker_of(result: Tensor, there: set[int]) -> Make | None:
    """there: storages of the arguments; a result that lies in one of them is not new."""
    size, stride, dtype = result.shape, result.stride(), result.dtype
    if not result.is_meta or result.untyped_storage()._cdata in there:
        return None

    empty = functools.partial(torch.empty_strided, size, stride, dtype=dtype, device=_META)
    nbytes = empty().untyped_storage().nbytes()

    def make(ledger: DryLedger, _: tuple) -> Tensor:
        made = empty()
        ledger.add(made, nbytes)
        return made

    whole = nbytes == result.untyped_storage().nbytes()
    return make if whole and result.storage_offset() == 0 else None


class _CpuAttention(TorchFunctionMode):
    """Fused attention as a CPU has it, which keeps no scores. See [Note: as a CPU]."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not kwargs.get("dropout_p"):
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return fused(*args, is_causal=kwargs.get("is_causal", False))[0]
        return func(*args, **kwargs)


def as_on_cpu(attention: str) -> contextlib.AbstractContextManager:
    """Around a dry run of a model with this kind of attention."""
    return _CpuAttention() if attention == "sdpa" else contextlib.nullcontext()
