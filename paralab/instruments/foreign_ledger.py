"""The live ledger for programs that do not say what their tensors are for.

paralab's own training tells `Ledger` the categories; this ledger finds them out. Parameters are
found when a module is called for the first time, gradients where parameters have them, an
optimizer's state after its step. Buffers are tensors of messages, and parameters that FSDP2 has
gathered. Until it is found, a new storage counts as workspace inside a forward, a backward or an
optimizer's step, and as other outside.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Module
from torch.utils import _python_dispatch as wrappers

from paralab.instruments.foreign_hooks import untraced
from paralab.instruments.ledger import UNNAMED, Ledger
from paralab.instruments.memory import Life, tensors
from paralab.ranks.errors import OutOfMemory


class ForeignLedger(Ledger):
    """The ledger of a `Program`, which is told when a tensor turns out to be on a GPU."""

    born_in = Ledger.born_in | {"compute": "other"}  # the program's work outside all other spans

    def __init__(self, program: Any) -> None:
        super().__init__(program.recorder)
        self.program = program

    def __enter__(self) -> ForeignLedger:
        super().__enter__()
        self._while_on.enter_context(self.resizes(self._to_buffer))  # FSDP2 resizes its buffers
        self._see_other_hooks()
        return self

    def _see_other_hooks(self) -> None:
        """While on, see what the program's own hooks on saved tensors keep, as autograd calls the
        innermost hooks only. Checkpointing has such hooks, also while it recomputes.
        """
        autograd, name = torch._C._autograd, "_push_saved_tensors_default_hooks"
        push = getattr(autograd, name)

        def packed(pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
            kept: Any = tensor  # also where checkpointing raises, as the recomputation ends there
            try:
                kept = pack(tensor)
            finally:
                for each in tensors(kept):
                    self._saved(tensor if self._meet(each) is self._meet(tensor) else each)
            return kept

        setattr(autograd, name, lambda pack, *rest: push(functools.partial(packed, pack), *rest))
        self._while_on.callback(setattr, autograd, name, push)

    @untraced
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(wrappers.is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # DTensor handles it; the operations that it makes come here
        if torch.compiler.is_compiling():  # nothing is computed
            return func(*args, **(kwargs or {}))
        self.program.flights.drop_last_work()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _exhausted(self, error: BaseException, out_of_memory: OutOfMemory) -> None:
        """The program may catch torch's error and go on, with a smaller batch say. So that error
        propagates, with the ledger's attached for observing.py to raise if it is not caught.
        """
        error.out_of_memory = out_of_memory

    def _meet(self, tensor: Tensor) -> Life | None:
        life = None
        for inner in plain(tensor):
            life = super()._meet(inner) or life
        if life is None and self.program.look_for_gpu(tensor):  # which moves the ledger there
            return self._meet(tensor)
        return life

    def moves_to(self, device: str) -> None:
        """From now on storages on this device count, and those counted so far no longer do."""
        self._settle()
        for life in self._known.values():
            self._count(life, 0)  # a reference that is held elsewhere then changes no sum
        self._known.clear()
        self.counts_on(device)
        self._most = 0

    def _saved(self, tensor: Tensor) -> Tensor:
        root = tensor if tensor._base is None else tensor._base
        if not (isinstance(root, torch.nn.Parameter) and root.is_leaf and root.requires_grad):
            return super()._saved(tensor)  # also for what a pipeline's stage has received
        self._to_buffer(self._meet(root))  # a parameter without a category is one that was gathered
        return tensor

    # ---- what a storage is for ------------------------------------------------------------------
    def carries(self, tensor: Tensor) -> None:
        """A message is sent from this tensor or received into it."""
        self._to_buffer(self._meet(tensor))

    def _to_buffer(self, life: Life | None) -> None:
        """A storage that has no particular category yet becomes a buffer."""
        if life is not None and life.category in ("workspace", "other"):
            self._move(life, "buffers")

    def adopt(self, objects: list[Any]) -> None:
        """Count the existing tensors of the modules and optimizers among ``objects``."""
        for value in objects:
            if issubclass(type(value), Module):  # isinstance would load lazy proxies
                own = [*Module.parameters(value, False), *Module.buffers(value, False)]
                self.owns("parameters", *own)
                self.owns("gradients", *(t.grad for t in own if t.is_leaf and t.grad is not None))
            elif issubclass(type(value), torch.optim.Optimizer):
                self.owns_state(value)

    def expect_gradients(self, outputs: Sequence[Any]) -> None:
        """Before a backward from these tensors or edges of the graph: find the gradients of all
        parameters in the graph, also of those that FSDP2 has gathered and autograd has not saved.
        """
        known = {id(reference()) for reference in self._parameters}
        roots = (out.grad_fn if isinstance(out, Tensor) else out.node for out in outputs)
        nodes = list(seen := set(roots) - {None})
        while nodes:
            node = nodes.pop()
            leaf = node.variable if type(node).__name__ == "AccumulateGrad" else None
            if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in known:
                self._parameters.append(weakref.ref(leaf))
                self._hook_gradient(leaf)
                life = self._meet(leaf)
                if life is not None and life.category == "other":  # neither gathered nor a module's
                    self._move(life, "parameters")
            nodes += (new := {before for before, _ in node.next_functions} - seen - {None})
            seen |= new

    def find_gradients(self, *trained: Tensor) -> None:
        """Find gradients that code, not autograd, has assigned to ``grad``: FSDP2's shards."""
        for parameter in (*(reference() for reference in self._parameters), *trained):
            if parameter is not None and parameter.grad is not None:
                self._accumulated(parameter)

    def owns_trained(self, optimizer: Any) -> None:
        """Assign a category to tensors that an optimizer updates and that have none. If a module
        was called they are copies of its weights in higher precision and belong to the optimizer;
        otherwise, and if autograd has saved or met them or a module has them, they are parameters.
        """
        model = bool(self.program.met)
        known = self.program.described | {id(found()) for found in self._parameters}
        for parameter in updated(optimizer):
            life = self._meet(parameter)
            if life is not None and life.category in (*UNNAMED, "activations"):
                copied = model and id(parameter) not in known and life.category != "activations"
                self.owns("optimizer" if copied else "parameters", parameter)

    def owns_state(self, optimizer: Any) -> None:
        """The tensors that an optimizer keeps from step to step are its state."""
        self.owns("optimizer", *tensors(optimizer.state))


def updated(optimizer: Any) -> Iterator[Tensor]:
    """The tensors that an optimizer updates."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold a tensor's bytes: those inside a DTensor, say; of a fake one, none."""
    if wrappers.is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # a DTensor lists its mesh, too
            if isinstance(inner := getattr(tensor, name), Tensor):
                yield from plain(inner)
    elif not isinstance(tensor, FakeTensor):
        yield tensor
