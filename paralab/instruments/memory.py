"""The peak of the bytes of tensors that a function has alive, counted storage by storage.

A dispatch mode sees every operation and holds a weak reference to each storage that an operation
returns: it adds the storage's bytes when it first sees it, and subtracts them when the reference
dies. A storage counts once, whatever views it has. The figure is the same as the allocator's peak,
and costs a few per cent of the time. It works on a CPU, whose allocator keeps no peak, on a GPU,
and on fake tensors, which have sizes but no bytes (FakeTensorMode).

The ledger of a training run (ledger.py) also says what the bytes are for.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(values: Any) -> list[Tensor]:
    """The tensors among an operation's arguments or results, in order: in tuples, lists and dicts
    of any depth. Three times as fast as torch's pytree, which knows more containers.
    """
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found += tensors(value)
    return found


class Life(weakref.ref):
    """A weak reference to a storage, with its ``address``, the ``size`` in bytes with which it
    counts, and its ``category``; None: it counts zero.
    """

    __slots__ = ("address", "size", "category")


class Storages(TorchDispatchMode):
    """The storages on one kind of device ("cpu", "cuda"); ``live`` is the bytes of those alive.

    Storages that have died wait in a queue until `_settle` subtracts them, before the next
    operation at the latest: storages also die on the threads that carry messages, and only one
    thread keeps the count.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.counts_on(device)
        self.live = 0
        self._known: dict[int, Life] = {}  # by address, which a later storage may reuse
        self._dead: deque[Life] = deque()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard would cost more than the counting

    def counts_on(self, device: str) -> None:
        """From now on count the storages on this kind of device."""
        self.device = torch.device(device).type
        self._on_device = operator.attrgetter(f"is_{self.device}")  # half the time of tensor.device

    def _born(self, storage: torch.UntypedStorage) -> str | None:
        """The category of a storage that is seen for the first time; None: it counts zero."""
        return "other"

    def _meet(self, tensor: Tensor) -> Life | None:
        """The tensor's storage, counted with its present size; None: it is on another device."""
        if not self._on_device(tensor) or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        life = self._known.get(address)
        if life is None or life() is not storage:
            life = self._known[address] = Life(storage, self._dead.append)
            life.address, life.size, life.category = address, 0, self._born(storage)
        size = storage.nbytes()
        if size != life.size and life.category is not None:
            self._count(life, size)
        return life

    def _count(self, life: Life, size: int) -> None:
        """From now on the storage counts with ``size`` bytes."""
        self.live += size - life.size
        life.size = size

    @contextlib.contextmanager
    def resizes(self, notify: Callable[[Life], None] = lambda life: None) -> Iterator[None]:
        """Inside the block, a storage that is resized counts with its new size at once, and
        ``notify`` is called with it. A resize is not an operation that the dispatch mode sees.
        """
        original = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result, life = original(storage, size), self._known.get(storage._cdata)
            if life is not None and life() is storage and life.category is not None:
                self._count(life, storage.nbytes())
                notify(life)
            return result

        torch.UntypedStorage.resize_ = resize_
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original

    def _settle(self) -> None:
        """Subtract the bytes of all storages that have died."""
        while self._dead:
            life = self._dead.popleft()
            if self._known.get(life.address) is life:
                del self._known[life.address]
            if life.size:
                self._count(life, 0)


class PeakMemory(Storages):
    """``with PeakMemory() as memory: ...``, then ``memory.peak``: bytes beyond those alive before.

    device    count storages on this kind of device only ("cpu", "cuda")
    existing  values, nested at will, whose NumPy arrays were alive before (tensors that were alive
              are found without it)

    Storages that were alive when counting began count zero, even after a resize. Memory of a NumPy
    array or a bytes buffer counts once an operation uses a tensor that shares it.
    """

    def __init__(self, device: str = "cpu", *, existing: Any = ()) -> None:
        super().__init__(device)
        self.peak = 0
        arrays = [a for a in tree_leaves(existing) if isinstance(a, np.ndarray)]
        self._arrays = [np.lib.array_utils.byte_bounds(a) for a in arrays]  # [first, end) addresses
        self._counting = False

    def __enter__(self) -> PeakMemory:
        for value in gc.get_objects():
            if issubclass(type(value), Tensor):  # isinstance would load the object of a lazy proxy
                self._meet(value)
                if value.is_leaf and value.grad is not None:
                    self._meet(value.grad)
        self._counting = True
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._dead:
            self._settle()
        result = func(*args, **kwargs) if kwargs else func(*args)
        # Most operations are views and allocate no storage: one tensor of theirs is enough.
        for tensor in tensors(result)[:1] if func.is_view else tensors((args, kwargs, result)):
            self._meet(tensor)
        self.peak = max(self.peak, self.live)
        return result

    def _born(self, storage: torch.UntypedStorage) -> str | None:
        address = storage.data_ptr()
        if not self._counting or any(start <= address < end for start, end in self._arrays):
            return None
        return "other"
