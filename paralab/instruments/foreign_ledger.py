"""The live ledger for programs that do not say what their tensors are for.

What `Ledger` is told by paralab's own training, this one finds: parameters when a module is called
for the first time, gradients where parameters have them, an optimizer's state after its step,
buffers where a message leaves from or arrives in, and parameters that FSDP2 has gathered, which are
buffers too. Until then a new storage is workspace inside a forward, a backward or an optimizer's
step, and other outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

from paralab.instruments.foreign_hooks import untraced
from paralab.instruments.ledger import UNNAMED, Ledger
from paralab.instruments.memory import Life, tensors
from paralab.ranks.errors import OutOfMemory


class ForeignLedger(Ledger):
    """``before_each()`` is called before every operation.

    ``elsewhere(tensor)`` is asked about each tensor that is not counted; it returns True if it has
    just moved the ledger to that tensor's device.
    """

    born_in = Ledger.born_in | {"compute": "other"}  # the program's own work outside the spans
    before_each: Callable[[], None] = staticmethod(lambda: None)
    elsewhere: Callable[[Tensor], bool] = staticmethod(lambda tensor: False)

    def __enter__(self) -> ForeignLedger:
        super().__enter__()
        self._while_on.enter_context(self.resizes(self._loose))  # as FSDP2's buffers are
        return self

    @untraced
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # DTensor goes first; what it does inside comes here
        if torch.compiler.is_compiling():  # nothing is computed
            return func(*args, **(kwargs or {}))
        self.before_each()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _exhausted(self, error: BaseException, out_of_memory: OutOfMemory) -> None:
        """The program may catch torch's error and go on, with a smaller batch say. So torch's error
        is raised; the ledger's is attached to it, for `observing` to raise if no one catches it.
        """
        error.out_of_memory = out_of_memory

    def _meet(self, tensor: Tensor) -> Life | None:
        life = None
        for inner in plain(tensor):
            life = super()._meet(inner) or life
        if life is None and self.elsewhere(tensor):
            return self._meet(tensor)
        return life

    def moves_to(self, device: str) -> None:
        """Storages on this device count from now on, and no longer those met so far."""
        self._settle()
        for life in self._known.values():
            self._count(life, 0)  # held elsewhere, it moves nothing
        self._known.clear()
        self.counts_on(device)
        self._most = 0

    def _saved(self, tensor: Tensor) -> Tensor:
        root = tensor if tensor._base is None else tensor._base
        if not (isinstance(root, torch.nn.Parameter) and root.is_leaf and root.requires_grad):
            return super()._saved(tensor)  # also what a pipeline's stage has received
        self._loose(self._meet(root))  # a parameter; if it is not known, one that was gathered
        if not any(reference() is root for reference in self._parameters):
            self._parameters.append(weakref.ref(root))
            self._hook_gradient(root)
        return tensor

    # ---- what a storage is for ------------------------------------------------------------------
    def carries(self, tensor: Tensor) -> None:
        """A message leaves from here or arrives here."""
        self._loose(self._meet(tensor))

    def _loose(self, life: Life | None) -> None:
        """If it was nothing in particular, it is a buffer."""
        if life is not None and life.category in ("workspace", "other"):
            self._move(life, "buffers")

    def adopt(self, things: list[Any]) -> None:
        """What modules and optimizers among ``things`` hold already."""
        for thing in things:
            if issubclass(type(thing), torch.nn.Module):  # isinstance would wake lazy proxies
                own = [*thing.parameters(recurse=False), *thing.buffers(recurse=False)]
                self.owns("parameters", *own)
                self.owns("gradients", *(t.grad for t in own if t.is_leaf and t.grad is not None))
            elif issubclass(type(thing), torch.optim.Optimizer):
                self.owns_state(thing)

    def find_gradients(self, optimizer: Any = None) -> None:
        """Gradients that code has put where autograd would have: FSDP2's shards of them."""
        known = [reference() for reference in self._parameters]
        if optimizer is not None:
            known += updated(optimizer)
        for parameter in known:
            if parameter is not None and parameter.grad is not None:
                self._accumulated(parameter)

    def owns_trained(self, optimizer: Any, *, model: bool, named: Container[int]) -> None:
        """What an optimizer updates and no module has shown: copies of a model's weights in more
        bits, which are the optimizer's; without a model, parameters, as is what autograd saves.
        ``named``: ids of parameters that modules show by now, when FSDP2 has gathered none.
        """
        for parameter in updated(optimizer):
            life = self._meet(parameter)
            if life is None or life.category not in (*UNNAMED, "activations"):
                continue
            copied = model and id(parameter) not in named and life.category != "activations"
            self.owns("optimizer" if copied else "parameters", parameter)

    def owns_state(self, optimizer: Any) -> None:
        """What an optimizer keeps from step to step."""
        self.owns("optimizer", *tensors(optimizer.state))


def updated(optimizer: Any) -> Iterator[Tensor]:
    """The tensors that an optimizer updates."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the bytes: those inside a DTensor, say. Fake ones hold none."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # a DTensor names its mesh too
            if isinstance(inner := getattr(tensor, name), Tensor):
                yield from plain(inner)
    elif not isinstance(tensor, FakeTensor):
        yield tensor
