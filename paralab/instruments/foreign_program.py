"""What is known of an observed program: what it is made of, where it computes, in which step it is.

[Note: graphs] While a program captures a CUDA graph nothing is written down and no event is asked:
an event that is recorded in a captured stream cannot be asked later, and asking any may end the
capture. What a graph does when it is replayed is not seen.

[Note: device] A program's device is the program's own: where there are GPUs it may well compute on
the CPU. It does until it shows a tensor on a GPU: to the ledger, in a collective, or as a parameter
of a module or an optimizer. From then on times are that GPU's, and bytes those on GPUs.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paralab.instruments.foreign_calls import Calls
from paralab.instruments.foreign_hooks import compile_again
from paralab.instruments.foreign_ledger import ForeignLedger, plain
from paralab.instruments.recorder import Recorder

WRAPPERS = {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}
# Whether an optimizer evaluates, another thread trains, messages were coalesced, calls waited for
# on other streams, CUDA graphs captured, or something would have been compiled without the ledger.
FLAGS = ("closures", "threads", "batches", "aside", "graphs", "compiles")


class Program:
    """A program that runs, and that it is to be observed.

    nodes         index of the node that each rank runs on
    memory_steps  how many steps the live ledger is on, from the first; 0: never
    marked        steps end at `end_step` alone, not at an optimizer's
    """

    def __init__(
        self, recorder: Recorder, *, nodes: Sequence[int], memory_steps: int, marked: bool
    ) -> None:
        self.recorder, self.calls = recorder, Calls(recorder.rank, nodes)
        self.memory_steps, self.marked, self.undo = memory_steps, marked, ExitStack()
        self.ledger = ForeignLedger(recorder) if memory_steps else None  # on: the recorder has it
        self.step = 0  # the step that is open, or comes next
        self.open = self.found = False  # inside a step; a forward, backward or optimizer was met
        self.raw = True  # the program has none of these: its first step is all that it did
        self.inside: list[str] = []  # which of these are open, the outermost first
        self.numbers: Counter[Any] = Counter()  # a module's forwards, and backwards, in this step
        self.users: dict[int, tuple[int]] = {}  # of a storage in this step: span of its last call
        self.device, self.looks = "cpu", torch.cuda.is_available()  # see [Note: device]
        self.stream: Any = None  # that the program computes on
        self._gpus, self._thread = self.looks, threading.get_ident()
        self.about: dict[str, Any] = {"modules": [], "parameters": []}  # as a report has it
        self.about |= dict.fromkeys(FLAGS, False)
        self.met: weakref.WeakSet[Any] = weakref.WeakSet()  # modules called by the program
        self.named: set[int] = set()  # ids of parameters described

    # ---- modules and parameters -----------------------------------------------------------------
    def meet(self, module: Any) -> list[Tensor]:
        """What a module holds that is called for the first time."""
        if module in self.met:
            return []
        self.met.add(module)
        kinds = set(self.about["modules"]).union(*map(_kinds, module.modules()))
        self.about["modules"] = sorted(WRAPPERS & kinds)
        return list(_at_rest(module))

    def describe(self) -> None:
        """The parameters of the modules met, at a moment when FSDP2 has gathered none."""
        for module in self.met:
            for name, parameter in module.named_parameters():
                if id(parameter) not in self.named:
                    self.named.add(id(parameter))
                    self.about["parameters"].append(self._described(name, parameter))

    def _described(self, name: str, parameter: Tensor) -> dict[str, Any]:
        """A parameter in a report: name, elements in all and on this rank, bytes here, how it is
        sharded, and on which axes over how many ranks.
        """
        placed, cut = getattr(parameter, "placements", None), {}
        local = parameter if placed is None else parameter.to_local()
        for dimension, placement in enumerate(placed or ()):
            if not (placement.is_replicate() or placement.is_partial()):
                mesh = parameter.device_mesh
                axis = self.calls.where(mesh.get_group(dimension), local.device).axis
                cut[axis] = mesh.size(dimension)
        return {
            "name": name.removeprefix("module."),
            "elements": parameter.numel(),
            "held": local.numel(),
            "bytes": local.numel() * local.element_size(),
            "trained": parameter.requires_grad,
            "placements": ", ".join(map(str, placed or ())),
            "cut": cut,
        }

    # ---- thread, device and stream --------------------------------------------------------------
    def is_main(self) -> bool:
        """Whether this thread is watched. What another one trains is said to be unknown."""
        return threading.get_ident() == self._thread

    def is_program(self) -> bool:
        """Whether this thread is watched, or is one on which the engine works for it: that is no
        thread of Python's.
        """
        return self.is_main() or ("backward" in self.inside and not of_python())

    def shows(self, *seen: Tensor) -> bool:
        """Whether one of these is the program's first tensor on a GPU: see [Note: device]."""
        inner = (t for tensor in seen for t in plain(tensor)) if self.looks else ()
        first = next((t for t in inner if t.is_cuda), None)
        if first is None or self.captures():
            return False
        self.looks, self.device = False, f"cuda:{first.get_device()}"
        self.stream = torch.cuda.current_stream(first.device)
        self.recorder.moves_to(self.device)
        self.recorder.allocator.share(self.undo)
        self.describe()
        self.met.clear()  # where their parameters are now is looked up at their next call
        return True

    def captures(self) -> bool:
        """Whether this thread's stream is being captured: see [Note: graphs]."""
        cuda = torch.cuda
        found = self._gpus and cuda.is_initialized() and cuda.is_current_stream_capturing()
        self.about["graphs"] |= found
        return found

    def is_aside(self, device: Any = None) -> bool:
        """Whether this is another stream than that which the program computes on."""
        computes = self.stream
        return computes is not None and torch.cuda.current_stream(device or self.device) != computes

    # ---- steps ----------------------------------------------------------------------------------
    def begin(self) -> None:
        """Something of a step happens; before the first one was the setup."""
        if self.open:
            return
        if not self.found:
            self.recorder.leave()
            self.recorder.drop_step("comm")
        self.open = self.found = True
        self.recorder.begin_step(self.step, waits=False)
        self.recorder.enter("compute")

    def end_step(self) -> None:
        """The program says, or an optimizer, that a step is over."""
        if self.found and not self.open:
            return  # the optimizer's step ended it
        if self.captures():
            return
        self.recorder.leave()
        self.recorder.end_step()
        self.open, self.found, self.step = False, True, self.step + 1
        self.numbers.clear()
        self.users.clear()
        if self.step >= self.memory_steps:
            self.close_ledger()
        if self.marked:  # all that follows belongs to the next one, until it is marked
            self.begin()

    def go_on(self) -> None:
        """The optimizer's step did not end the step: another's follows, and nothing between."""
        if self.open:  # by a call
            self.recorder.leave()
        self.recorder.go_on()
        self.open, self.step = True, self.step - 1
        if self.recorder.ledger is None and self.step < self.memory_steps:
            self.ledger.__enter__()
        self.recorder.enter("compute")

    def close_ledger(self) -> None:
        """The ledger goes, unless the program has put a mode or hooks of its own above it."""
        if self.recorder.ledger is not None and self.ledger.on_top:
            self.ledger.__exit__(None, None, None)
            self.about["compiles"] |= compile_again()


def of_python() -> bool:
    """Whether Python has started this thread; it knows others by a stand-in at most."""
    here = threading.get_ident()
    known = (one for one in threading.enumerate() if one.ident == here)
    return any(not isinstance(one, threading._DummyThread) for one in known)


def _kinds(module: Any) -> set[str]:
    """Names of the module's class and of those above it."""
    return {kind.__name__ for kind in type(module).__mro__}


def _at_rest(module: Any) -> Iterator[Tensor]:
    """A module's parameters and buffers, but for those that FSDP2 has gathered."""
    shards = (part for part in module.modules() if "FSDPModule" in _kinds(part))
    sharded = {id(p) for part in shards for p in part.parameters()}
    yield from module.buffers()
    for parameter in module.parameters():
        if id(parameter) not in sharded or is_traceable_wrapper_subclass(parameter):
            yield parameter
