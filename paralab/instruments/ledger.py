"""The live memory ledger: how many bytes of a rank's tensors are alive, and what they are for.

    parameters   the model's weights, and constants of the model such as its masks
    gradients    of parameters
    optimizer    the optimizer's state
    activations  what autograd has saved for backward
    buffers      memory that is sent from or received into, gathered parameters
    workspace    results that are not saved, gradients of activations, temporaries of the optimizer
    other        what was allocated while no span was open: a batch, a loss

A storage has one category, and counts once however many views of it there are. A new storage gets
the category that belongs to the open span (``born_in``). It becomes an activation when autograd
saves it, and a gradient when autograd has accumulated it in a parameter's ``grad``. Any other
category is stated by the code that allocated the storage, with ``recorder.owns``.

memory.py does the counting, so it is the same on a CPU, on a GPU and on fake tensors. Memory that a
kernel allocates and frees internally is not seen. While no ledger is on, there is no dispatch mode
and no hook, and no operation pays for it.
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

GRAIN = 32  # a span gets a sample where a category changed by 1/32 of the most bytes ever alive
ALLOCATOR_EXTRA = 256 * 2**20  # bytes; see `_bound_allocator`
UNNAMED = ("buffers", "workspace", "other")  # what autograd saves of these becomes activations


class Ledger(Storages):
    """``with Ledger(recorder): ...`` counts, and appends its samples to ``recorder.samples``.

    limit   bytes that may be alive at once; an operation that exceeds them raises `OutOfMemory`
    advise  returns the last sentence of that error: which setting would help

    The ledger can be left and entered again. A storage that is freed in between is subtracted; one
    that is allocated in between is counted once an operation writes to it.
    """

    # kind of the open span: category of what it allocates, if that is not workspace
    born_in = {"copy": "buffers", "wait": "buffers", "": "other"}

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
        self.span_category: str | None = "other"  # of what the open span allocates
        self.block_category = ""  # inside `Recorder.making`: takes precedence over the span's
        # Bytes at the last sample, by category: gradients may replace activations, the sum the same
        self._sampled = self.bytes.copy()
        self._most = 0  # most bytes ever alive, at samples
        self._peak = 0  # most bytes alive since the last sample
        self._peak_state: tuple | None = None  # then: the time, bytes on the device, and offloaded
        self._parameters: list[weakref.ref] = []
        self._while_on = ExitStack()  # undoes the hooks of this ledger

    def __enter__(self) -> Ledger:
        super().__enter__()
        self._while_on.enter_context(saved_tensors_hooks(self._saved, lambda tensor: tensor))
        for reference in self._parameters:
            self._hook_gradient(reference())
        self.recorder.ledger = self
        return self

    @property
    def on_top(self) -> bool:
        """Whether no other dispatch mode and no other hooks on saved tensors were entered since."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        own = hooks is not None and self._saved == hooks[0]
        return own and _get_current_dispatch_mode() is self

    def __exit__(self, *error: Any) -> None:
        self.recorder.ledger = None
        self._while_on.close()
        super().__exit__(*error)

    # ---- allocations and frees ----------------------------------------------------------------
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._dead:
            self._settle()
        before = self.live
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except torch.OutOfMemoryError as error:  # the device's own allocator
            message = f"{self.recorder.where()}: {str(error).split(' Of the allocated')[0]}"
            self._exhausted(error, self._error(message, self.bytes, {}))
            raise
        if func.is_view:  # most operations are views, and a view allocates no storage
            return result
        for tensor in tensors(result):
            self._meet(tensor)
        if self.recorder.samples and self._changed():
            self._append_samples()
        if self.limit is not None and self.live > self.limit:
            raise self._over_limit(self.live - before, self.block_category or self.span_category)
        return result

    def _born(self, storage: torch.UntypedStorage) -> str | None:
        return self.block_category or self.span_category

    def _count(self, life: Life, size: int) -> None:
        if size < life.size:
            self._keep_peak()
        self.bytes[life.category] += size - life.size
        self.live += size - life.size
        life.size = size

    def _keep_peak(self) -> None:
        """Before bytes are freed: keep the state if it is the peak since the last sample. Storages
        that were workspace when they were allocated may have become activations by now.
        """
        if self.live > self._peak:
            offloaded = self.recorder.offloaded.copy()
            self._peak = self.live
            self._peak_state = (self.recorder.clock.now(), self.bytes.copy(), offloaded)

    # ---- categories ---------------------------------------------------------------------------
    def owns(self, category: str, *tensors: Tensor) -> None:
        """From now on these tensors' storages have this category.

        Trained parameters get a hook, by which the storages of their gradients become gradients.
        """
        self._settle()
        for tensor in tensors:
            life = self._meet(tensor)
            if life is not None:
                self._move(life, category)
            if category == "parameters" and tensor.is_leaf and tensor.requires_grad:
                self._parameters.append(weakref.ref(tensor))
                self._hook_gradient(tensor)

    def shares_bytes(self, *tensors: Tensor) -> None:
        """These tensors' storages count zero bytes: they alias memory of storages that count."""
        self._settle()
        category, self.span_category = self.span_category, None
        for tensor in tensors:
            self._meet(tensor)
        self.span_category = category

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

    def _hook_gradient(self, parameter: Tensor | None) -> None:
        if parameter is not None:
            hook = parameter.register_post_accumulate_grad_hook(self._accumulated)
            self._while_on.callback(hook.remove)

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None and (life := self._meet(parameter.grad)) is not None:
            self._move(life, "gradients")

    def state(self) -> dict[str, int]:
        """{category: bytes alive now}."""
        self._settle()
        return self.bytes.copy()

    # ---- samples ------------------------------------------------------------------------------
    def sample(self, mark: Any, kind: str) -> None:
        """Take a sample at a span's boundary, and one of the peak since the last sample.

        mark  the boundary on the recorder's clock
        kind  of the span that is open from now on; "": none
        """
        self._settle()
        self._append_samples(mark)
        self.span_category = self.born_in.get(kind, "workspace")

    def _changed(self) -> bool:
        if self.bytes == self._sampled:  # nearly always
            return False
        grain, sampled = self._most // GRAIN, self._sampled
        return any(abs(size - sampled[name]) > grain for name, size in self.bytes.items())

    def _append_samples(self, mark: Any = None) -> None:
        """One sample of what is alive; before it the peak since the last one, if it was higher."""
        samples, step = self.recorder.samples, self.recorder.step
        if samples and self._peak_state is not None and self._peak > self.live:
            samples.append(Sample(step, None, *self._peak_state))
        held, offloaded = self.bytes.copy(), self.recorder.offloaded.copy()
        samples.append(Sample(step, mark, self.recorder.clock.now(), held, offloaded))
        self._peak, self._peak_state, self._sampled = self.live, None, held
        self._most = max(self._most, self.live)

    # ---- the limit ----------------------------------------------------------------------------
    def _exhausted(self, error: BaseException, out_of_memory: OutOfMemory) -> None:
        """The device's own memory is exhausted: raise `OutOfMemory` in place of torch's error."""
        raise out_of_memory from error

    def _over_limit(self, size: int, category: str) -> OutOfMemory:
        """The error for the ``size`` bytes, counted already, that exceed the limit."""
        cause = (
            f"{self._when()}, it asked for {_megabytes(size)} when {_megabytes(self.live - size)} "
            f"of memory_limit={_megabytes(self.limit)} were in use"
        )
        held = self.bytes.copy()
        held[category] -= size
        return self._error(cause, held, {"asked for": size, "limit": self.limit})

    def _error(self, cause: str, held: dict[str, int], totals: dict[str, int]) -> OutOfMemory:
        """The cause, a table of the bytes ``held`` with ``totals`` below it, and the advice."""
        rows = {name: size for name, size in held.items() if size > 0}
        rows |= {"in all": sum(held.values()), **totals}
        lines = [f"what rank {self.recorder.rank} held {self._when()}:"]
        lines += [f"  {name:<12}{_megabytes(size):>17}" for name, size in rows.items()]
        table = "\n".join([*lines, *filter(None, [self.advise()])])
        return OutOfMemory(f"{cause}\n\n{table}", rank=self.recorder.rank, table=table)

    def _when(self) -> str:
        where = self.recorder.where()  # "before step 0", or "step 0, forward"
        return where if where.startswith("before") else f"in {where}"


def _bound_allocator(limit: int, device: str) -> None:
    """Bound CUDA's allocator near ``limit`` bytes too, for memory that is no operation's result.

    The ledger enforces the limit, on bytes of tensors. The allocator's bound is on bytes reserved,
    and must be looser: a training whose tensors fit must not fail there. `ALLOCATOR_EXTRA` is for
    the workspaces of cuBLAS and cuDNN (35 to 102 MB were measured on an H100), which do not depend
    on the limit. An eighth of the limit is for gaps in segments, which grow with the tensors.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    share = min(1.0, (limit + ALLOCATOR_EXTRA + limit // 8) / total)
    torch.cuda.set_per_process_memory_fraction(share, device)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.3f} MB" if size >= 10**5 else f"{size:,} B"
