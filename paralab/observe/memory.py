"""How many bytes of tensors a function has alive at its worst moment, counted as they come and go.

A dispatch mode sees every operation and holds a weak reference to each storage that comes out of
one: born, it adds its bytes; gone, it takes them back. The same figure as the allocator's peak,
views counted once, at a few per cent of the time. It works on a CPU, where no allocator can be
asked, and on a GPU.

What was alive when counting began counts as zero, whatever becomes of it. A NumPy array is seen
once a tensor looks at it, a bytes buffer once an operation uses such a tensor; what no tensor looks
at is not counted.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """``with PeakMemory() as memory: ...``, then ``memory.peak``: bytes beyond what was alive.

    device    count storages of this kind of device only ("cpu", "cuda")
    existing  values (nested at will) whose NumPy arrays were alive before; tensors are found anyway
    """

    def __init__(self, device: str = "cpu", *, existing: Any = ()) -> None:
        super().__init__()
        self.device = torch.device(device).type
        self.live = self.peak = 0
        arrays = [a for a in tree_leaves(existing) if isinstance(a, np.ndarray)]
        self._arrays = [np.lib.array_utils.byte_bounds(a) for a in arrays]  # [first, end) addresses
        # storage address -> (it, bytes counted; None if it was alive before)
        self._known: dict[int, tuple[weakref.ref, int | None]] = {}

    def __enter__(self) -> PeakMemory:
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):  # isinstance would wake lazy proxies
                grad = thing.grad if thing.is_leaf else None
                for tensor in (thing, grad):
                    if tensor is not None:
                        self._meet(tensor, before=True)
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self._meet(leaf)
        self.peak = max(self.peak, self.live)
        return result

    def _meet(self, tensor: Tensor, *, before: bool = False) -> None:
        if tensor.device.type != self.device or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._known:
            reference, counted = self._known[address]
            if counted is None:
                return
        else:
            first, counted = storage.data_ptr(), 0
            if before or any(start <= first < end for start, end in self._arrays):
                size = None
            reference = weakref.ref(storage, lambda _: self._part(address))
        self._known[address] = (reference, size)
        self.live += (size or 0) - counted  # a storage may be resized where it is

    def _part(self, address: int) -> None:
        """A storage has gone; its address may be given to the next."""
        self.live -= self._known.pop(address)[1] or 0
