"""A rank without values and without peers: tensors on torch's "meta" device, and groups of nobody.

The witness of predicted memory (witness_memory.py) lets a rank's program run as ever; every
operation says what its result would look like, and the ledger counts that. What would lie on the
device is on "meta", and it alone is counted. A call writes its row and is over.

[Note: remembered shapes] On "meta" many operations work out the result's shape in Python, for 0.2
ms each. So what came out for the same operation and the same shapes is remembered, and the next
time an empty tensor of that shape is made, in 10 us. What shares memory with an argument is made
anew, what writes into an argument hands it back.

[Note: as a CPU] The bytes are those of a run on CPUs. Where these depend on the device the CPU's
way is taken: its fused attention keeps no scores, and its layer norm keeps mean and deviation in
the type of what it is given, where a GPU keeps them in fp32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # now: an operation that imports it would leave its own arguments alive
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from paralab import grid
from paralab.comm import Group
from paralab.instruments.ledger import Ledger
from paralab.interpret import train
from paralab.transports import Call, Gloo

_LAYER_NORM = torch.ops.aten.native_layer_norm.default


class DryLedger(Ledger):
    """`Ledger` of tensors without bytes. See [Note: remembered shapes]."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            func = _KNOWN.setdefault(func, _Operation(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Operation:
    """One that knows its results' shapes."""

    is_view = False

    def __init__(self, func: Any) -> None:
        self.func, self.writes = func, func._schema.is_mutable
        self.known: dict[tuple, Callable[[tuple], Any] | None] = {}  # None: is called each time

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = _key((args, tuple(kwargs.items())))
        if key in self.known and self.known[key] is not None:
            return self.known[key](args)
        result = self.func(*args, **kwargs)
        if self.func is _LAYER_NORM:  # see [Note: as a CPU]
            result = (result[0], *(kept.to(args[0].dtype) for kept in result[1:]))
        if key not in self.known:
            self.known[key] = self._maker(result, args)
        return result

    def _maker(self, result: Any, args: tuple) -> Callable[[tuple], Any] | None:
        """What makes such a result again of such arguments."""
        if self.writes:
            return (lambda given: given[0]) if args and result is args[0] else None
        parts = result if isinstance(result, tuple) else (result,)
        if not all(isinstance(part, Tensor) and part.is_meta for part in parts):
            return None
        there = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        if not there.isdisjoint(part.untyped_storage()._cdata for part in parts):
            return None
        anew = [
            functools.partial(
                torch.empty_strided, part.size(), part.stride(), dtype=part.dtype, device="meta"
            )
            for part in parts
        ]
        if isinstance(result, Tensor):
            return lambda given: anew[0]()
        return lambda given: tuple(make() for make in anew)


_KNOWN: dict[Any, _Operation] = {}


def _key(value: Any) -> Any:
    """What a result's shape depends on."""
    if isinstance(value, Tensor):
        return value.device.type, value.dtype, value.shape, value.stride()
    if isinstance(value, (tuple, list)):
        return tuple(map(_key, value))
    return type(value), value


class _CpuAttention(TorchFunctionMode):
    """See [Note: as a CPU]."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not kwargs.get("dropout_p"):
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return fused(*args, is_causal=kwargs.get("is_causal", False))[0]
        return func(*args, **kwargs)


class _Alone(Group):
    """A group that nobody else is in: a call is over at once."""

    def __init__(self, ranks: Sequence[int], **settings: Any) -> None:
        super().__init__(ranks, transport=_Nobody, **settings)

    def subgroup(self, ranks: Sequence[int], *, axis: str) -> Group | None:
        if self.context.rank not in ranks:
            return None
        return _Alone(ranks, axis=axis, context=self.context, recorder=self.recorder)


class _Nobody(Gloo):
    """What would be sent goes to no rank, and is there at once."""

    def start(self, call: Call, group: Any) -> list[_Over]:
        return [_Over(call.tensors)]

    def watch(self, call: Call, works: list[_Over], span: int) -> list[_Over]:
        self.recorder.completed(span, self.recorder.clock.host())
        return works


class _Over:
    """A call that is over. As any, it holds its tensors until it is waited for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        pass


@contextlib.contextmanager
def alone(attention: str) -> Iterator[None]:
    """Around a rank of a model with this kind of attention: as on a CPU, and without peers."""
    attending = _CpuAttention() if attention == "sdpa" else contextlib.nullcontext()
    worlds, parts = (patch.object(module, "Group", _Alone) for module in (train, grid))
    with worlds, parts, attending:
        yield
