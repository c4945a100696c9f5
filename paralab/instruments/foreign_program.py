"""The state of an observed program: its modules, its device and stream, and its current step.

[Note: graphs] While a program captures a CUDA graph nothing is recorded and no event is queried: an
event that is recorded in a captured stream cannot be queried later, and to query any event may end
the capture. What a graph does when it is replayed is not seen.

[Note: device] The program chooses its device: where there are GPUs it may still compute on the CPU.
It is taken to do so until the first tensor on a GPU is seen: by the ledger, in a collective, or as
a parameter of a module or an optimizer. From then on times are that GPU's, and bytes those on GPUs.
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
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paralab.instruments.foreign_calls import Calls
from paralab.instruments.foreign_hooks import compile_again, within_compiled
from paralab.instruments.foreign_ledger import ForeignLedger, plain
from paralab.instruments.recorder import Recorder

WRAPPERS = {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}
# Whether messages are coalesced, calls waited for on other streams, CUDA graphs captured, or
# compilations skipped because of the ledger.
FLAGS = ("batches", "aside", "graphs", "compiles")


class Program:
    """One rank of a program that is observed.

    nodes         for each rank the index of the node that it runs on
    memory_steps  the number of steps, from the first, in which the live ledger is on; 0: never
    marked        steps end where the program calls `end_step`, not where an optimizer's step ends
    """

    def __init__(
        self, recorder: Recorder, *, nodes: Sequence[int], memory_steps: int, marked: bool
    ) -> None:
        self.recorder, self.calls = recorder, Calls(recorder.rank, nodes)
        self.memory_steps, self.marked, self.undo = memory_steps, marked, ExitStack()
        self.ledger = ForeignLedger(self) if memory_steps else None  # recorder.ledger while on
        self.step = 0  # the step that is open, or comes next
        self.in_step = self.started = False  # a step is open; the first step has begun
        self.kinds: set[str] = set()  # of the parts of steps that there were
        self.setup = 0  # how many of the recorded calls came before the first step
        self.inside: list[str] = []  # kinds of the parts of a step that are open, outermost first
        self.counts: Counter[Any] = Counter()  # forwards of each module, backwards, in this step
        self.last_calls: dict[int, tuple[int]] = {}  # storage: span of its last call in this step
        # awaits_gpu: the program may yet turn out to compute on a GPU, see [Note: device]. GPUs are
        # counted without initializing CUDA, after which a program could not fork.
        self.device, self.awaits_gpu = "cpu", torch.cuda.device_count() > 0
        self.stream: Any = None  # the stream that the program computes on
        self._thread = threading.get_ident()
        self.about: dict[str, Any] = {"modules": [], "parameters": []}  # meta["observed"]
        self.about |= dict.fromkeys(FLAGS, False)
        self.met: weakref.WeakSet[Any] = weakref.WeakSet()  # outermost modules that were called
        self.described: set[int] = set()  # ids of the parameters in about["parameters"]

    # ---- modules and parameters -----------------------------------------------------------------
    def meet(self, module: Any) -> list[Tensor]:
        """A module's parameters and buffers at the first call that finds them with sizes."""
        if module in self.met or any(map(is_lazy, found := list(_at_rest(module)))):
            return []
        self.met.add(module)
        kinds = set(self.about["modules"]).union(*map(_kinds, Module.modules(module)))
        self.about["modules"] = sorted(WRAPPERS & kinds)
        return found

    def describe(self) -> None:
        """Describe the modules' parameters; called at moments when FSDP2 has gathered none. FSDP1
        makes one flat parameter of several, which may remain as views of it. A parameter without
        bytes is left out: a program may count FLOPs on a copy of its model.
        """
        for module in self.met:
            handles = (part.__dict__.get("_handle") for part in Module.modules(module))
            flat = ((h, h.flat_param) for h in handles if hasattr(h, "flat_param"))
            made = {id(p): (unit, handle) for handle, unit in flat for p in unit._params or (unit,)}
            for name, parameter in module.named_parameters():
                whole, handle = made.get(id(parameter), (parameter, None))
                if whole.is_meta or next(plain(whole), None) is None:
                    continue
                if id(whole) not in self.described:
                    self.about["parameters"].append(self._description(name, whole, handle))
                self.described |= {id(parameter), id(whole)}

    def _description(self, name: str, parameter: Tensor, handle: Any) -> dict[str, Any]:
        """A parameter as a report has it: name, elements in all and on this rank, bytes on this
        rank, whether it is trained, and {axis: ranks} over which it is sharded.
        """
        placed = getattr(parameter, "placements", None)
        local = _shard(parameter) if placed is None else parameter.to_local()
        groups = [handle.process_group] if handle and handle.uses_sharded_strategy else []
        for dimension, placement in enumerate(placed or ()):
            if not (placement.is_replicate() or placement.is_partial()):
                groups.append(parameter.device_mesh.get_group(dimension))
        return {
            "name": name.removeprefix("module."),
            "elements": _whole(parameter),
            "held": local.numel(),
            "bytes": local.numel() * local.element_size(),
            "trained": parameter.requires_grad,
            "cut": {self.calls.where(g, local.device).axis: g.size() for g in groups},
        }

    # ---- thread, device and stream --------------------------------------------------------------
    def is_main(self) -> bool:
        """Whether this is the thread that is observed: of others only the messages are recorded."""
        return threading.get_ident() == self._thread

    def is_program(self) -> bool:
        """Whether this thread is the observed one, or a thread of autograd's engine that works for
        it: during a backward, a thread that Python did not start.
        """
        return self.is_main() or ("backward" in self.inside and not of_python())

    def look_for_gpu(self, *tensors: Tensor) -> bool:
        """If these have the program's first tensor on a GPU, record that GPU's times and bytes from
        now on, and return True: see [Note: device].
        """
        inner = (t for tensor in tensors for t in plain(tensor)) if self.awaits_gpu else ()
        first = next((t for t in inner if t.is_cuda), None)
        if first is None or self.captures():
            return False
        self.awaits_gpu, self.device = False, f"cuda:{first.get_device()}"
        self.stream = torch.cuda.current_stream(first.device)
        self.recorder.moves_to(self.device)
        self.recorder.allocator.share(self.undo)
        self.describe()
        self.met.clear()  # at their next call the parameters count where they are by then
        return True

    def captures(self) -> bool:
        """Whether this thread's stream is being captured: see [Note: graphs]."""
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        self.about["graphs"] |= captures
        return captures

    def is_aside(self, device: Any = None) -> bool:
        """Whether the current stream is another one than that on which the program computes."""
        own = self.stream
        return own is not None and torch.cuda.current_stream(device or self.device) != own

    # ---- steps ----------------------------------------------------------------------------------
    def begin(self) -> None:
        """Open a step if none is open. Of the setup, before the first one, the calls are kept."""
        if self.in_step:
            return
        if not self.started:
            self.setup = len(self.recorder.calls)
            self.recorder.leave()
            self.recorder.drop_step("comm")
        if self.step >= self.memory_steps:
            self.close_ledger()
        self.in_step = self.started = True
        self.recorder.begin_step(self.step, waits=False)
        self.recorder.enter("compute")

    def end_step(self) -> None:
        """A step is over: an optimizer's step has ended, or the program has called `pl.step`."""
        if self.calls.refusal is not None:
            raise self.calls.refusal
        if (self.started and not self.in_step) or self.captures():
            return  # the optimizer's step has ended it already; or see [Note: graphs]
        if not self.started:
            self.setup = len(self.recorder.calls)
        self.recorder.leave()
        self.recorder.end_step()
        self.in_step, self.started, self.step = False, True, self.step + 1
        self.counts.clear()
        self.last_calls.clear()
        if self.step >= self.memory_steps:
            self.close_ledger()
        if self.marked:  # the next step begins at once, and lasts until it is marked
            self.begin()

    def go_on(self) -> None:
        """Reopen the last step, which an optimizer's step has ended too early: another optimizer
        steps, with no forward or backward in between.
        """
        if self.in_step:  # a call has opened the next one
            self.recorder.leave()
        self.recorder.go_on()
        self.in_step, self.step = True, self.step - 1
        if self.recorder.ledger is None and self.step < self.memory_steps:
            self.ledger.__enter__()
        self.recorder.enter("compute")

    def was_setup(self) -> None:
        """The first step, which had no forward or backward, belongs to the setup: an optimizer made
        its states by it, as where torch.distributed.checkpoint loads them.
        """
        self.go_on()
        self.in_step = self.started = False

    def close_ledger(self) -> None:
        """Turn the ledger off, unless the program has entered a mode or hooks of its own since, or
        is in a compiled function: then when the next step begins, or later.
        """
        if self.recorder.ledger is not None and self.ledger.on_top and not within_compiled():
            self.ledger.__exit__(None, None, None)
            self.about["compiles"] |= compile_again()


def of_python() -> bool:
    """Whether Python started this thread. For others ``threading`` has at most a dummy object."""
    own = threading.get_ident()
    known = (thread for thread in threading.enumerate() if thread.ident == own)
    return any(not isinstance(thread, threading._DummyThread) for thread in known)


def _kinds(module: Any) -> set[str]:
    """Names of torch's classes among the module's own and its bases: others use the same names."""
    return {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}


def _at_rest(module: Any) -> Iterator[Tensor]:
    """A module's parameters and buffers without the parameters that FSDP2 has gathered."""
    fsdp_modules = (part for part in Module.modules(module) if "FSDPModule" in _kinds(part))
    sharded = {id(p) for part in fsdp_modules for p in Module.parameters(part)}
    yield from Module.buffers(module)  # Megatron-LM's DDP calls a list so
    for parameter in Module.parameters(module):
        if id(parameter) not in sharded or is_traceable_wrapper_subclass(parameter):
            yield _shard(parameter)


def _shard(parameter: Tensor) -> Tensor:
    """What a rank keeps of a parameter: in DeepSpeed's ZeRO-3 and in FSDP1 an attribute."""
    return getattr(parameter, "ds_tensor", getattr(parameter, "_local_shard", parameter))


def _whole(parameter: Tensor) -> int:
    """The elements of a parameter in all: of a DeepSpeed or FSDP1 shard an attribute."""
    size = getattr(parameter, "_unpadded_unsharded_size", parameter.shape)
    return getattr(parameter, "ds_numel", size.numel())
