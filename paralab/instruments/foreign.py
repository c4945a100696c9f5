"""Observe a program that was not written for paralab: its calls, its spans, its steps, its memory.

The program is not changed. What is intercepted, and what that costs:

    collectives    every operation ``c10d.*`` gets a kernel in front of its own while the
                   observation lasts. All of torch's collectives pass there: those of
                   DistributedDataParallel's reducer in C++, FSDP2, DTensor and its
                   ``_c10d_functional.*``, pipelining, raw calls. 40 to 90 us per call, and nothing
                   for other operations. Over NCCL, freed memory of an asynchronous call's result is
                   reused only once the host knows that the call has ended: [Note: ends] of
                   foreign_flights.py
    waits          ``Work.wait`` and ``_c10d_functional.wait_tensor``: about 10 us per wait
    spans          ``Module.__call__``, autograd's call of its engine and hooks of optimizers: a few
                   us per outermost call, 0.7 us per inner one
    memory         the live ledger, a dispatch mode on every operation: 5 to 20 % of a step. It is
                   on in the first ``memory_steps`` steps; later steps are timed without it

foreign_program.py keeps the program's state, foreign_hooks.py intercepts functions and operations,
foreign_calls.py says what calls send, foreign_flights.py when they end, and foreign_ledger.py what
tensors are for.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

from paralab.instruments.foreign_flights import Flights
from paralab.instruments.foreign_hooks import around
from paralab.instruments.foreign_ledger import updated
from paralab.instruments.foreign_program import Program
from paralab.instruments.recorder import Recorder

_STEP = torch.optim.Optimizer.profile_hook_step(bool).__code__  # of all optimizers' steps
BY_HAND = "call paralab.step() where a step ends, and observe with steps='marked'"


class Observer(Program):
    """``with Observer(recorder, ...) as observer: program()``, then ``observer.part()``.

    settings  as `Program` takes them
    existing  count tensors that modules and optimizers have already (observing this process)
    """

    def __init__(self, recorder: Recorder, *, existing: bool = False, **settings: Any) -> None:
        super().__init__(recorder, **settings)
        self.existing, self.flights = existing, Flights(self)
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # all whose step has begun
        # those of them since the last forward or backward, which share a training step, and ids of
        # each and of the parameters that it has updated in it: none if its step raised
        self._step_sharers: weakref.WeakKeyDictionary[Any, set] = weakref.WeakKeyDictionary()

    # ---- on and off ---------------------------------------------------------------------------
    def __enter__(self) -> Observer:
        recorder, undo = self.recorder, self.undo
        self.flights.intercept(undo)
        # These two functions allocate DistributedDataParallel's buckets.
        makers = (dist.Reducer, "_rebuild_buckets"), (DistributedDataParallel, "_ddp_init_helper")
        for owner, name in makers:
            around(undo, owner, name, self._making)
        around(undo, Module, "__call__", self._forward)
        around(undo, torch.autograd, "_engine_run_backward", self._backward)
        around(undo, DeviceMesh, "__init__", self.calls.meshing)
        undo.callback(optimizers.register_optimizer_step_pre_hook(self._update).remove)
        undo.callback(optimizers.register_optimizer_step_post_hook(self._updated).remove)
        if self.ledger is not None:
            self.ledger.__enter__()
            if self.existing:
                self.ledger.adopt(gc.get_objects())
        recorder.begin_step(0)  # it is discarded if it turns out to be the setup
        recorder.enter("compute")
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close_ledger()
        self.undo.close()

    # ---- forward and backward -----------------------------------------------------------------
    @contextlib.contextmanager
    def _part(self, kind: str, counted: Any) -> Iterator[None]:
        """A forward or a backward. Its micro-batch is how many of ``counted`` came before it in the
        step: forwards of the same module, or backwards.
        """
        self._step_sharers.clear()
        if self.kinds <= {"optimizer"} and self.step == 1 and not (self.marked or self.inside):
            self.was_setup()
        self.begin()
        self.kinds.add(kind)
        self.recorder.enter(kind, self.counts[counted])
        self.counts[counted] += 1
        self.inside.append(kind)
        try:
            yield
        finally:
            while self.inside.pop() != kind:  # a step that raised, called by a hook
                if "optimizer" not in self.inside:
                    self.recorder.leave()
            self.recorder.leave()

    def _forward(self, call: Callable[[], Any], module: Any, *_: Any) -> Any:
        """Around a module's call: the outermost call is a forward."""
        inner = "forward" in self.inside or "backward" in self.inside
        if inner or not self._watches():
            return call()
        if parameters := self.meet(module):  # before a step's first sample of memory
            self.look_for_gpu(*parameters)
            self.recorder.owns("parameters", *parameters)
        with self._part("forward", id(module)):
            return call()

    def _backward(self, call: Callable[[], Any], outputs: Any, *_: Any) -> Any:
        """Around autograd's call of its engine: the outermost call is a backward."""
        if self.captures():
            return call()
        if self.recorder.ledger is not None and self.is_program():
            self.ledger.expect_gradients(outputs)
        if not self.is_main() or "backward" in self.inside:
            return call()
        self.flights.backward_calls.clear()
        with self._part("backward", "backward"):
            result = call()
            self.flights.was_waiting()
        if not self.about["parameters"] and "FSDPModule" not in self.about["modules"]:
            self.describe()  # at the program's end its modules may be gone
        if self.recorder.ledger is not None:
            self.ledger.find_gradients()
        return result

    def _making(self, call: Callable[[], Any], *_: Any) -> Any:
        with self.recorder.making("buffers"):
            return call()

    def _watches(self) -> bool:
        """Whether this is the observed thread, and it does not capture a graph."""
        return self.is_main() and not self.captures()

    # ---- optimizers ---------------------------------------------------------------------------
    def _update(self, optimizer: Any, *_: Any) -> None:
        """Before an optimizer's step, which may lie inside another optimizer's step."""
        if not self._watches():
            return
        codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())]
        if "optimizer" in self.inside and codes.count(_STEP) < 2:  # the last step raised
            self.inside.remove("optimizer")
            self.recorder.leave()
        if "optimizer" not in self.inside:
            if not self.marked:
                self._assign_step(optimizer)
            self._optimizers.add(optimizer)
            self._step_sharers.setdefault(optimizer, set())
            self.begin()
            self.kinds.add("optimizer")
            self.describe()
            self.look_for_gpu(*updated(optimizer))
            if self.recorder.ledger is not None:
                self.ledger.find_gradients(*updated(optimizer))
                self.ledger.owns_trained(optimizer)
            self.recorder.enter("optimizer")
        self.inside.append("optimizer")

    def _assign_step(self, optimizer: Any) -> None:
        """Optimizers that step directly one after the other share one training step; so does one
        that steps for some of its parameters after the other. Raises ValueError where the end of a
        training step is not known.
        """
        others = sorted({type(known).__name__ for known in self._optimizers})
        why = "it steps inside a backward" if "backward" in self.inside else ""
        if not why and others and not self._step_sharers and optimizer not in self._optimizers:
            why = f"a forward or backward lies between its step and that of {' and '.join(others)}"
        if why:
            why += ", so it is not known where a training step ends"
            self.calls.refuse("optimizer", type(optimizer).__name__, why, BY_HAND)
        updated_before = self._step_sharers.get(optimizer, set())
        if not updated_before.isdisjoint(map(id, updated(optimizer))):  # a new training step
            self._step_sharers.clear()
        elif any(self._step_sharers.values()):  # the step that the last optimizer ended goes on
            self.go_on()

    def _updated(self, optimizer: Any, *_: Any) -> None:
        if not self._watches():
            return
        self.inside.pop()
        if self.recorder.ledger is not None:
            self.ledger.owns_state(optimizer)
        if "optimizer" not in self.inside:
            self.recorder.leave()
            ids = map(id, (optimizer, *updated(optimizer)))
            self._step_sharers.setdefault(optimizer, set()).update(ids)
            if not self.marked:
                self.end_step()

    # ---- the part -----------------------------------------------------------------------------
    def part(self) -> dict[str, Any]:
        """This rank's tables, when the program has ended.

        What follows the last step is left out; a program without steps counts as one step.
        """
        self.describe()
        self.saw_nothing = not self.started and not self.calls.made
        self.about["unended"] = not self.started or (self.in_step and not self.step)
        if self.about["unended"]:
            self.end_step()
        if self.in_step:
            self.recorder.leave()
            self.recorder.drop_step()
        tables = self.recorder.tables()
        if self.kinds:  # else all calls are the program's data
            tables["collectives"]["phase"][: self.setup] = ["setup"] * self.setup
        return tables
