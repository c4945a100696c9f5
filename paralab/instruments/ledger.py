"""The live memory ledger: how many bytes of a rank's tensors are alive, and what they are for.

    parameters   and what else a model holds, such as its masks
    gradients    of parameters
    optimizer    its state
    activations  what autograd has saved for backward
    buffers      what a message leaves from or arrives in, gathered parameters
    workspace    results that are not saved, gradients of activations, temporaries of the optimizer
    other        what came to be while no span was open: a batch, a loss

A storage has one category, and counts once however many views of it there are. Which one, is known
from where it came: a new storage has the category of the open span (``born_in``). It becomes an
activation at the moment autograd saves it, a gradient when it has been added to a parameter's
``grad``; what else it may be, the code that made it says with ``recorder.owns``.

The counting is that of memory.py, so it is the same on a CPU, on a GPU and on fake tensors. What a
kernel takes and gives back inside itself is not seen. While no ledger is on, nothing is left of it:
no mode, no hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from paralab.instruments.memory import Life, Storages, tensors
from paralab.instruments.samples import CATEGORIES, Sample
from paralab.ranks.errors import OutOfMemory

if TYPE_CHECKING:
    from paralab.instruments.recorder import Recorder

GRAIN = 32  # within a span a sample is taken when a category has changed by 1/32 of the most bytes
ALLOCATOR_EXTRA = 256 * 2**20  # and an eighth of the limit
UNNAMED = ("buffers", "workspace", "other")  # what autograd saves of these is an activation


class Ledger(Storages):
    """``with Ledger(recorder): ...`` counts for ``recorder``, which writes the samples down.

    limit   bytes that may be alive at once; an operation that takes more raises `OutOfMemory`
    advise  what to say then: which setting would help

    It may be left and entered again: what it knows stays right, for a storage that dies meanwhile
    is taken back; what is born meanwhile is met when an operation writes to it.
    """

    born_in = {"copy": "buffers", "wait": "buffers", "": "other"}  # open span: category

    def __init__(
        self,
        recorder: Recorder,
        *,
        device: str = "cpu",
        limit: int | None = None,
        advise: Callable[[], str] = str,
    ) -> None:
        super().__init__(device)
        if limit is not None and device.startswith("cuda"):
            _bound_allocator(limit, device)
        self.recorder, self.limit, self.advise = recorder, limit, advise
        self.bytes = dict.fromkeys(CATEGORIES, 0)
        self.born: str | None = "other"  # category of a new storage
        self.made = ""  # its category while something is made, whatever span is open
        self._noted = self.bytes.copy()  # at the last sample; gradients may replace activations
        self._most = 0  # bytes there ever were
        self._top = 0  # most bytes alive since the last sample
        self._at_top: tuple | None = None  # when, and what they were, here and elsewhere
        self._parameters: list[weakref.ref] = []
        self._on = ExitStack()  # closed when the ledger goes

    def __enter__(self) -> Ledger:
        super().__enter__()
        self._on.enter_context(saved_tensors_hooks(self._saved, lambda tensor: tensor))
        for reference in self._parameters:
            self._listen(reference())
        self.recorder.ledger = self
        return self

    @property
    def on_top(self) -> bool:
        """Whether neither a dispatch mode nor hooks on saved tensors were put above its own."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        own = hooks is not None and self._saved == hooks[0]
        return own and _get_current_dispatch_mode() is self

    def __exit__(self, *error: Any) -> None:
        self.recorder.ledger = None
        self._on.close()
        super().__exit__(*error)

    # ---- what comes and goes ------------------------------------------------------------------
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._dead:
            self._settle()
        before = self.live
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except torch.OutOfMemoryError as error:  # the device's own allocator
            said = f"{self.recorder.where()}: {str(error).split('. ')[0]}"
            self._spent(error, self._error(said, self.bytes, {}))
            raise
        if func.is_view:  # most operations are, and none of them makes a storage
            return result
        for tensor in tensors(result):
            self._meet(tensor)
        if self.recorder.samples and self._changed():
            self._note()
        if self.limit is not None and self.live > self.limit:
            raise self._over(self.live - before, self.made or self.born)
        return result

    def _born(self, storage: torch.UntypedStorage) -> str | None:
        return self.made or self.born

    def _count(self, life: Life, size: int) -> None:
        if size < life.size:
            self._look_back()
        self.bytes[life.category] += size - life.size
        self.live += size - life.size
        life.size = size

    def _look_back(self) -> None:
        """Before bytes are given back: was this the most there were? Categories settled by now."""
        if self.live > self._top:
            away = self.recorder.away.copy()
            self._top = self.live
            self._at_top = (self.recorder.clock.now(), self.bytes.copy(), away)

    # ---- what it is for -----------------------------------------------------------------------
    def owns(self, category: str, *tensors: Tensor) -> None:
        """From now on these tensors' storages have this category.

        Parameters that are trained are listened to: the gradients they get are gradients.
        """
        self._settle()
        for tensor in tensors:
            life = self._meet(tensor)
            if life is not None:
                self._move(life, category)
            if category == "parameters" and tensor.is_leaf and tensor.requires_grad:
                self._parameters.append(weakref.ref(tensor))
                self._listen(tensor)

    def shares_bytes(self, *tensors: Tensor) -> None:
        """These tensors' storages count zero: their bytes are another storage's."""
        self._settle()
        born, self.born = self.born, None
        for tensor in tensors:
            self._meet(tensor)
        self.born = born

    def _move(self, life: Life, category: str) -> None:
        if life.category != category:
            self.bytes[life.category] -= life.size
            self.bytes[category] += life.size
            life.category = category

    def _saved(self, tensor: Tensor) -> Tensor:
        life = self._meet(tensor)
        if life is not None and life.category in UNNAMED:
            self._move(life, "activations")
        return tensor

    def _listen(self, parameter: Tensor | None) -> None:
        if parameter is not None:
            hook = parameter.register_post_accumulate_grad_hook(self._accumulated)
            self._on.callback(hook.remove)

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None and (life := self._meet(parameter.grad)) is not None:
            self._move(life, "gradients")

    def state(self) -> dict[str, int]:
        """{category: bytes alive now}."""
        self._settle()
        return self.bytes.copy()

    # ---- samples ------------------------------------------------------------------------------
    def sample(self, mark: Any, kind: str) -> None:
        """The state now, at a span's boundary, and before it the largest since the last.

        mark  the boundary on the recorder's clock; kind: the span that is open from here on, or ""
        """
        self._settle()
        self._note(mark)
        self.born = self.born_in.get(kind, "workspace")

    def _changed(self) -> bool:
        if self.bytes != self._noted:
            grain = self._most // GRAIN
            for category, size in self.bytes.items():
                if abs(size - self._noted[category]) > grain:
                    return True
        return False

    def _note(self, mark: Any = None) -> None:
        """Write down what is alive, and what was when there was more since the last time."""
        samples, step = self.recorder.samples, self.recorder.step
        if samples and self._at_top is not None and self._top > self.live:
            samples.append(Sample(step, None, *self._at_top))
        held, away = self.bytes.copy(), self.recorder.away.copy()
        samples.append(Sample(step, mark, self.recorder.clock.now(), held, away))
        self._top, self._at_top, self._noted = self.live, None, held
        self._most = max(self._most, self.live)

    # ---- the limit ----------------------------------------------------------------------------
    def _spent(self, error: BaseException, told: OutOfMemory) -> None:
        """The device has no more: what is raised is said in our words."""
        raise told from error

    def _over(self, asked: int, category: str) -> OutOfMemory:
        """What is raised when ``asked`` bytes, counted already, are more than the limit allows."""
        first = (
            f"{self.recorder.where()} asked for {_said(asked)} when {_said(self.live - asked)} of "
            f"memory_limit={_said(self.limit)} were taken"
        )
        held = self.bytes.copy()
        held[category] -= asked
        return self._error(first, held, {"asked for": asked, "limit": self.limit})

    def _error(self, first: str, held: dict[str, int], more: dict[str, int]) -> OutOfMemory:
        rows = {name: size for name, size in held.items() if size > 0}
        rows |= {"in all": sum(held.values()), **more}
        where = self.recorder.where()  # "before step 0", or "step 0, forward"
        when = where if where.startswith("before") else f"in {where}"
        lines = [f"what rank {self.recorder.rank} held {when}:"]
        lines += [f"  {name:<12}{_said(size):>17}" for name, size in rows.items()]
        table = "\n".join([*lines, *filter(None, [self.advise()])])
        return OutOfMemory(f"{first}\n\n{table}", rank=self.recorder.rank, table=table)


def _bound_allocator(limit: int, device: str) -> None:
    """Hold CUDA's allocator near ``limit`` bytes too, for what no operation returns.

    The limit is on bytes of tensors, and the ledger enforces it. The allocator counts what it has
    reserved, and a training that fits must not fail there. The workspaces of cuBLAS and cuDNN come
    from the same pool (35 to 102 MB were measured on an H100), which does not depend on the limit.
    Segments that are not filled do: the larger the tensors, the more lies between them.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    share = min(1.0, (limit + ALLOCATOR_EXTRA + limit // 8) / total)
    torch.cuda.set_per_process_memory_fraction(share, device)


def _said(size: int) -> str:
    return f"{size / 1e6:,.3f} MB" if size >= 10**5 else f"{size:,} B"
