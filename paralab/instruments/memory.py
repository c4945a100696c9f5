"""How many bytes of tensors a function has alive at its worst moment, counted as they come and go.

A dispatch mode sees every operation and holds a weak reference to each storage that comes out of
one: born, it adds its bytes; gone, it takes them back. The same figure as the allocator's peak,
views counted once, at a few per cent of the time. It works on a CPU, where no allocator can be
asked, on a GPU, and on fake tensors, which have sizes and no bytes (FakeTensorMode).

`PeakMemory` is one number for any function; the ledger of a training run (ledger.py) says besides
what the bytes are for.
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
    """The tensors in what an operation is given or returns, in their order: in tuples, lists and
    dicts, nested at will. Three times as fast as torch's pytree, which knows more containers.
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
    """A storage that is alive: its ``address``, the ``size`` it counts with, its ``category``."""

    __slots__ = ("address", "size", "category")


class Storages(TorchDispatchMode):
    """The storages on one kind of device ("cpu", "cuda"), and the bytes of those alive: ``live``.

    What has died waits in a queue until it is looked at, before the next operation at the latest:
    storages also die on the threads that carry messages, and only one thread keeps the count.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.counts_on(device)
        self.live = 0
        self._known: dict[int, Life] = {}  # by address, which may be given to the next
        self._dead: deque[Life] = deque()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard would cost more than the counting

    def counts_on(self, device: str) -> None:
        """Storages on this kind of device count from now on."""
        self.device = torch.device(device).type
        self._here = operator.attrgetter(f"is_{self.device}")  # half the time of tensor.device

    def _born(self, storage: torch.UntypedStorage) -> str | None:
        """Category of a storage that was not known; None: it was there before, and counts zero."""
        return "other"

    def _meet(self, tensor: Tensor) -> Life | None:
        """The life of the tensor's storage, with its size as it is now; None: it is elsewhere."""
        if not self._here(tensor) or tensor.layout is not torch.strided:
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
        """From now on it has ``size`` bytes."""
        self.live += size - life.size
        life.size = size

    @contextlib.contextmanager
    def resizes(self, told: Callable[[Life], None] = lambda life: None) -> Iterator[None]:
        """Within, a storage that is resized counts with its new size at once: no operation tells.
        ``told`` hears of each.
        """
        own = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result, life = own(storage, size), self._known.get(storage._cdata)
            if life is not None and life() is storage and life.category is not None:
                self._count(life, storage.nbytes())
                told(life)
            return result

        torch.UntypedStorage.resize_ = resize_
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = own

    def _settle(self) -> None:
        """Take back the bytes of all that has died."""
        while self._dead:
            life = self._dead.popleft()
            if self._known.get(life.address) is life:
                del self._known[life.address]
            if life.size:
                self._count(life, 0)


class PeakMemory(Storages):
    """``with PeakMemory() as memory: ...``, then ``memory.peak``: bytes beyond what was alive.

    device    count storages of this kind of device only ("cpu", "cuda")
    existing  values (nested at will) whose NumPy arrays were alive before; tensors are found anyway

    What was alive when counting began counts as zero, whatever becomes of it. A NumPy array is seen
    once a tensor looks at it, a bytes buffer once an operation uses such a tensor; what no tensor
    looks at is not counted.
    """

    def __init__(self, device: str = "cpu", *, existing: Any = ()) -> None:
        super().__init__(device)
        self.peak = 0
        arrays = [a for a in tree_leaves(existing) if isinstance(a, np.ndarray)]
        self._arrays = [np.lib.array_utils.byte_bounds(a) for a in arrays]  # [first, end) addresses
        self._counting = False

    def __enter__(self) -> PeakMemory:
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):  # isinstance would wake lazy proxies
                self._meet(thing)
                if thing.is_leaf and thing.grad is not None:
                    self._meet(thing.grad)
        self._counting = True
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._dead:
            self._settle()
        result = func(*args, **kwargs) if kwargs else func(*args)
        # Most operations make views, and no storage: one tensor of them is enough.
        for tensor in tensors(result)[:1] if func.is_view else tensors((args, kwargs, result)):
            self._meet(tensor)
        self.peak = max(self.peak, self.live)
        return result

    def _born(self, storage: torch.UntypedStorage) -> str | None:
        first = storage.data_ptr()
        if not self._counting or any(start <= first < end for start, end in self._arrays):
            return None
        return "other"
