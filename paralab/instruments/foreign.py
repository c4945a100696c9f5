"""Observe a program that was not written for paralab: its calls, its spans, its steps, its memory.

Nothing of the program changes. What sees it, and what that costs:

    collectives    every operation ``c10d.*`` gets a kernel in front of its own, for as long as the
                   observation lasts. All of torch passes there: DistributedDataParallel's reducer
                   in C++, FSDP2, DTensor and its ``_c10d_functional.*``, pipelining, raw calls.
                   About 30 us per call, on no other operation. Over NCCL, memory of an asynchronous
                   call's result that the program gives back is used again once the host has seen
                   that the call has ended: see [Note: ends]
    waits          ``Work.wait`` and ``_c10d_functional.wait_tensor``: a few us per wait
    spans          ``Module.__call__``, autograd's call of its engine and hooks of optimizers: a few
                   us per outermost call, 0.3 us per inner one
    memory         the live ledger, a dispatch mode on every operation: 5 to 20 % of a step. It is
                   on in the first ``memory_steps`` steps; later steps are timed without it

How calls are seen is in foreign_hooks.py, what they send in foreign_calls.py, what tensors are for
in foreign_ledger.py.

[Note: destroyed] Gloo's thread drops a finished call with Python's lock, and the end of a process
group waits for that thread with the lock in its hand. So the group is destroyed when the threads
have had time.

[Note: ends] A collective of gloo says when it ends; gloo's sends, receives and reduce-scatters do
not, and those of tensors on a GPU say it on another clock. Their span ends when the rank has waited
for them. The reducer of DistributedDataParallel waits
in C++: what follows its last launch in a backward counts as the wait. A Work of NCCL has a future
that stands for an event of the device, and a stream that waits for the future passes a mark when
the call has ended. The stream is the observer's own: torch runs the future's callbacks on any
stream of the pool that the program's and NCCL's streams come from too, and would hold that one up.
So it has a priority that hardly any program asks for, as a pool and its queues are those of a
priority. While the future is waited for, torch notes that the result is used on that stream.

[Note: at once] Where the caller waits at once, NCCL runs the collective on the caller's own stream
and returns no Work. On the stream that the program computes on this is a wait. On another one, as
FSDP2 has them, the program goes on computing; when it waits for that stream is not seen. Nor is it
where a Work is waited for on another stream.

[Note: batches] What is coalesced, as ``batch_isend_irecv`` is over NCCL, is made when the batch
ends: its calls have no Work of their own, and the batch's stands for all of them. It has no future,
and torch would follow a null pointer to it; so its spans end when the rank has waited for it. NCCL
makes an all-gather or a reduce-scatter of unequal parts as such a batch, too.

[Note: graphs] While a program captures a CUDA graph nothing is written down and no event is asked:
an event that is recorded in a captured stream cannot be asked later, and asking any may end the
capture. What a graph does when it is replayed is not seen.

[Note: device] A program's device is the program's own: where there are GPUs it may well compute on
the CPU. It does until it shows a tensor on a GPU: to the ledger, in a collective, or as a parameter
of a module or an optimizer. From then on times are that GPU's, and bytes those on GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import optimizer as optimizers

from paralab.checks import illegal
from paralab.instruments.foreign_calls import (
    CALLS,
    Calls,
    Where,
    as_data,
    carried,
    has_unequal_parts,
    is_control,
    payload,
)
from paralab.instruments.foreign_hooks import around, compile_again, stand_before
from paralab.instruments.foreign_ledger import ForeignLedger, at_rest, kinds_of, plain, updated
from paralab.instruments.recorder import Recorder
from paralab.theory.traffic import POINT_TO_POINT

BY_HAND = "call paralab.step() where a step ends, and observe with steps='marked'"
PRIORITY = -3  # of a stream: see [Note: ends]
PATIENCE = 0.05  # seconds for threads to let go of the last calls
WRAPPERS = {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}


class Observer:
    """``with Observer(recorder, ...) as observer: program()``, then ``observer.part()``.

    nodes         index of the node that each rank runs on
    memory_steps  how many steps the live ledger is on, from the first; 0: never
    marked        steps end at `end_step` alone, not at an optimizer's
    existing      count what modules and optimizers hold already (an observation of this process)
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        nodes: Sequence[int],
        memory_steps: int = 2,
        marked: bool = False,
        existing: bool = False,
    ) -> None:
        self.recorder, self.memory_steps = recorder, memory_steps
        self.marked, self.existing = marked, existing
        self.device, self._looks = "cpu", torch.cuda.is_available()  # see [Note: device]
        self._gpus = self._looks
        self._stream: Any = None  # that the program computes on
        self.calls = Calls(recorder.rank, nodes)
        self.ledger = ForeignLedger(recorder) if memory_steps else None
        self.step = 0  # the step that is open, or comes next
        self.open = self.found = False  # inside a step; a forward, backward or optimizer was met
        self.raw = True  # the program has none of these: its first step is all that it did
        self.inside: list[str] = []  # which of these are open, the outermost first
        # what the program is made of; whether an optimizer evaluates, another thread trains,
        # messages were coalesced, calls waited for on other streams, CUDA graphs captured, or
        # something would have been compiled while the ledger was on
        self.about: dict[str, Any] = {"modules": [], "parameters": []}
        self.about |= {"closures": False, "threads": False, "batches": False}
        self.about |= {"aside": False, "graphs": False, "compiles": False}
        self._thread, self._undo = threading.get_ident(), contextlib.ExitStack()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # that have stepped
        self._turn: weakref.WeakSet[Any] = weakref.WeakSet()  # since the last forward or backward
        self._left: ForeignLedger | None = None  # the ledger, when it has gone
        self._stepping: list[int] = []  # ids of those whose step is open, the outermost first
        self._numbers: Counter[Any] = Counter()  # a module's forwards, and backwards, in this step
        # a call's Work: the spans that it stands for, and whether it is on a GPU
        self._works: weakref.WeakKeyDictionary[Any, tuple] = weakref.WeakKeyDictionary()
        self._batches: dict[int, list[int]] = {}  # of a thread: see [Note: batches]
        self._held: Any = None  # the last call's Work, until its caller has it
        self._listening: dict[Any, Any] = {}  # of a group: a stream that waits for its calls' ends
        self._flying: dict[int, Any] = {}  # a backward's calls: weak references to their Work
        self._by_storage: dict[int, int] = {}  # span of the last call that used a storage
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # modules called by the program
        self._named: set[int] = set()  # ids of parameters described

    # ---- on and off ---------------------------------------------------------------------------
    def __enter__(self) -> Observer:
        recorder, undo = self.recorder, self._undo
        for op, names in CALLS.items():
            for name in names.split():
                stand_before(undo, "c10d", name, functools.partial(self._called, op))
        stand_before(undo, "_c10d_functional", "wait_tensor", self._awaited)

        def bucketing(*_: Any) -> Any:
            return recorder.making("buffers")

        around(undo, dist.Reducer, "_rebuild_buckets", bucketing)
        around(undo, torch.nn.parallel.DistributedDataParallel, "_ddp_init_helper", bucketing)
        around(undo, torch._C._distributed_c10d.Work, "wait", self._waiting)
        around(undo, dist.ProcessGroup, "_start_coalescing", self._batching)
        around(undo, dist.ProcessGroup, "_end_coalescing", self._batched)
        around(undo, torch.nn.Module, "__call__", self._forward)
        around(undo, torch.autograd, "_engine_run_backward", self._backward)
        around(undo, DeviceMesh, "__init__", self.calls.meshing)
        for module in (dist, dist.distributed_c10d):
            around(undo, module, "destroy_process_group", _destroying)
        undo.callback(optimizers.register_optimizer_step_pre_hook(self._update).remove)
        undo.callback(optimizers.register_optimizer_step_post_hook(self._updated).remove)
        if self.ledger is not None:
            self.ledger.before_each = functools.partial(setattr, self, "_held", None)
            if self._looks:
                self.ledger.elsewhere = self._shows
            self.ledger.__enter__()
            around(undo, torch.optim.Optimizer, "load_state_dict", self._loading)
            if self.existing:
                self.ledger.adopt(gc.get_objects())
        recorder.begin_step(0)  # unless it turns out to have been the setup
        recorder.enter("compute")
        return self

    def __exit__(self, *raised: Any) -> None:
        self._close_ledger()
        self._undo.close()

    def _close_ledger(self) -> None:
        """The ledger goes, unless the program has put a mode or hooks of its own above it."""
        if self.ledger is not None and self.ledger.on_top:
            self.ledger.__exit__(None, None, None)
            self._left, self.ledger = self.ledger, None
            self.about["compiles"] |= compile_again()

    def _is_program(self) -> bool:
        """Whether this thread is the program's, or one on which the engine works for it: that is no
        thread of Python's.
        """
        return self._is_main() or ("backward" in self.inside and not _of_python())

    def _is_main(self) -> bool:
        """Whether this is the thread that is watched. What another one trains is said to be
        unknown.
        """
        return threading.get_ident() == self._thread

    def _shows(self, *seen: Tensor) -> bool:
        """Whether one of these is the program's first tensor on a GPU: see [Note: device]."""
        inner = (t for tensor in seen for t in plain(tensor)) if self._looks else ()
        first = next((t for t in inner if t.is_cuda), None)
        if first is None or self._captures():
            return False
        self._looks, self.device = False, f"cuda:{first.get_device()}"
        self._stream = torch.cuda.current_stream(first.device)
        self.recorder.moves_to(self.device)
        self.recorder.allocator.share(self._undo)
        self._describe()
        self._seen.clear()  # where their parameters are now is looked up at their next call
        return True

    def _captures(self) -> bool:
        """Whether this thread's stream is being captured: see [Note: graphs]."""
        cuda = torch.cuda
        if not (self._gpus and cuda.is_initialized() and cuda.is_current_stream_capturing()):
            return False
        self.about["graphs"] = True
        return True

    def _is_aside(self, device: Any = None) -> bool:
        """Whether this is another stream than that which the program computes on."""
        computes = self._stream
        return computes is not None and torch.cuda.current_stream(device or self.device) != computes

    # ---- collectives --------------------------------------------------------------------------
    def _called(self, op: str, given: dict[str, Any], own: Callable[[], Any]) -> Any:
        """One call of c10d, on whatever thread: write it down, make it, hear of its end."""
        if self._captures():
            return own()
        recorder, sent, used = self.recorder, payload(op, given), carried(given)
        if of_program := self._is_program():
            self._shows(*used)
        if self.found or op in POINT_TO_POINT:  # a pipeline's later stages begin with a message
            self._begin()
        on_gpu = next((tensor.device for tensor in used if tensor.is_cuda), None)
        aside = on_gpu is not None and self._is_aside(on_gpu)
        batch, after = self._batches.get(threading.get_ident()), ()
        if of_program:  # the cut is where the program computes, wherever the call is made
            with torch.cuda.stream(self._stream) if aside else contextlib.nullcontext():
                after = recorder.cut()
        if op == "barrier":
            return own()
        where = self.calls.where(dist.ProcessGroup.unbox(given["process_group"]), used[0].device)
        start = recorder.clock.host() if on_gpu is None else recorder.clock.mark()
        span = recorder.launch(f"comm:{where.axis}", after, start)
        for row in self.calls.rows(op, given, sent, where, self._phase(sent, of_program)):
            recorder.call((*row, span))
        for tensor in used:
            self._by_storage[tensor.untyped_storage()._cdata] = span
            if self.ledger is not None:
                self.ledger.carries(tensor)
        at_once = on_gpu and of_program and not aside and given.get("async_op") is False
        if at_once := at_once and batch is None:
            recorder.enter("wait", after=(span,))
        try:
            result = own()
        finally:
            if at_once:
                recorder.leave()
        last = result[-1] if isinstance(result, (tuple, list)) else result
        work = self._held = dist.Work.unbox(last)
        if batch is not None:
            batch.append(span)
            return result
        if work is None:  # [Note: at once]
            self._settle((span,))
            return result
        self._works[work] = (span,), on_gpu is not None
        if of_program and "backward" in self.inside:
            self._flying[span] = weakref.ref(work)
        if on_gpu is not None and not where.gloo and has_unequal_parts(given):
            self.about["batches"] = True
        elif on_gpu is None or not where.gloo:
            with contextlib.suppress(RuntimeError):  # not all calls say it
                self._hear_of_end(work.get_future(), span, where, on_gpu)
        return result

    def _hear_of_end(self, future: Any, span: int, where: Where, on_gpu: Any) -> None:
        """See [Note: ends]."""
        recorder, clock = self.recorder, self.recorder.clock
        if on_gpu is None:
            future.add_done_callback(lambda _: recorder.completed(span, clock.host()))
        elif future.done():  # NCCL's is from the start: the host does not wait
            if where not in self._listening:
                self._listening[where] = torch.cuda.Stream(clock.device, priority=PRIORITY)
            with torch.cuda.stream(self._listening[where]):
                future.wait()
                recorder.completed(span, clock.mark())

    @contextlib.contextmanager
    def _batching(self, *_: Any) -> Iterator[None]:
        yield
        self._batches[threading.get_ident()] = []

    @contextlib.contextmanager
    def _batched(self, *_: Any) -> Iterator[Callable[[Any], None]]:
        spans = tuple(self._batches.pop(threading.get_ident(), ()))

        def heard(work: Any) -> None:
            if work is None:  # [Note: at once]
                self._settle(spans)
            elif spans:
                self._works[work] = spans, True
                self.about["batches"] = True

        yield heard

    def _phase(self, sent: list[Tensor], of_program: bool) -> str:
        """What another thread of the program sends is no part of its steps."""
        if not self.found:
            return "setup"
        if not of_program or is_control(sent):
            return "control"
        return self.inside[-1] if self.inside else "data"

    # ---- waits --------------------------------------------------------------------------------
    def _waiting(self, work: Any, *_: Any) -> Any:
        self._held = None
        if self._is_program() and not self._captures():
            return self._wait(*self._works.pop(work, ((), False)))
        return contextlib.nullcontext()

    def _awaited(self, given: dict[str, Any], own: Callable[[], Any]) -> Any:
        """``_c10d_functional.wait_tensor``: known by the storage that the call works on."""
        span = self._by_storage.get(given["tensor"].untyped_storage()._cdata)
        spans = () if span is None else (span,)
        waits = self._wait(spans, given["tensor"].is_cuda)
        seen = self._is_program() and not self._captures()
        with waits if seen else contextlib.nullcontext():
            return own()

    @contextlib.contextmanager
    def _wait(self, spans: tuple[int, ...], on_gpu: bool) -> Iterator[None]:
        if aside := on_gpu and self._is_aside():  # [Note: at once]
            self.about["aside"] = True
        else:
            self.recorder.enter("wait", after=spans)
        try:
            yield
        finally:
            if not aside:
                self.recorder.leave()
            self._settle(spans)

    def _settle(self, spans: Sequence[int]) -> None:
        """The wait for these calls is over."""
        for span in spans:
            self._flying.pop(span, None)
            self.recorder.settled(span, self.recorder.clock.mark())

    # ---- steps --------------------------------------------------------------------------------
    def _begin(self) -> None:
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
        if self._captures():
            return
        self.recorder.leave()
        self.recorder.end_step()
        self.open, self.found, self.step = False, True, self.step + 1
        self._numbers.clear()
        self._by_storage.clear()
        if self.step >= self.memory_steps:
            self._close_ledger()
        if self.marked:  # all that follows belongs to the next one, until it is marked
            self._begin()

    def _go_on(self) -> None:
        """The optimizer's step did not end the step: another's follows, and nothing between."""
        if self.open:  # by a call
            self.recorder.leave()
        self.recorder.go_on()
        self.open, self.step = True, self.step - 1
        if self._left is not None and self.step < self.memory_steps:
            self.ledger, self._left = self._left.__enter__(), None
        self.recorder.enter("compute")

    @contextlib.contextmanager
    def _part(self, kind: str, counted: Any) -> Iterator[None]:
        """A forward or a backward; how many of ``counted`` there were is its micro-batch."""
        self._turn.clear()
        self._begin()
        self.raw = False
        self.recorder.enter(kind, self._numbers[counted])
        self._numbers[counted] += 1
        self.inside.append(kind)
        try:
            yield
        finally:
            self.inside.pop()
            self.recorder.leave()

    @contextlib.contextmanager
    def _forward(self, module: Any, *_: Any) -> Iterator[None]:
        """Around a module's call: the outermost is a forward."""
        inner = "forward" in self.inside or "backward" in self.inside
        if not self._is_main() or inner or self._captures():
            yield
            return
        with self._part("forward", id(module)):
            if module not in self._seen:
                self._seen.add(module)
                kinds = set(self.about["modules"]).union(*map(kinds_of, module.modules()))
                self.about["modules"] = sorted(WRAPPERS & kinds)
                own = list(at_rest(module))
                self._shows(*own)
                self.recorder.owns("parameters", *own)
            yield

    @contextlib.contextmanager
    def _backward(self, *_: Any) -> Iterator[None]:
        """Around the autograd engine's work."""
        if self._captures():
            yield
            return
        if "backward" in self.inside or not self._is_main():
            self.about["threads"] |= not self._is_main() and _of_python()
            yield
            return
        self.about["closures"] |= "optimizer" in self.inside
        self._flying.clear()
        with self._part("backward", "backward"):
            yield
            self._held = None
            # What C++ launched it has waited for: the reducer, at the end of the backward.
            spans = tuple(span for span, work in self._flying.items() if work() is None)
            if spans:
                self.recorder.was_waiting(spans)
        self._settle(spans)
        if not self.about["parameters"] and "FSDPModule" not in self.about["modules"]:
            self._describe()  # modules may be gone when the program has ended
        if self.ledger is not None:
            self.ledger.find_gradients()

    def _update(self, optimizer: Any, *_: Any) -> None:
        """Before an optimizer's step; within it, an inner one's."""
        if not self._is_main() or self._captures():
            return
        if id(optimizer) in self._stepping:  # its last step raised, and the program went on
            self._stepping.clear()
            self.inside = [one for one in self.inside if one != "optimizer"]
            self.recorder.leave()
        self._stepping.append(id(optimizer))
        if "optimizer" not in self.inside:
            if not self.marked:
                self._takes_turn(optimizer)
            self._optimizers.add(optimizer)
            self._begin()
            self.raw = False
            self._describe()
            if self.ledger is not None:
                self.ledger.find_gradients(optimizer)
                self.ledger.owns_trained(optimizer, model=bool(self._seen), named=self._named)
            elif self._looks:
                self._shows(*updated(optimizer))
            self.recorder.enter("optimizer")
        self.inside.append("optimizer")

    def _takes_turn(self, optimizer: Any) -> None:
        """Optimizers that step one after the other step in one step. Refuse what is in none."""
        why, others = "", {type(one).__name__ for one in self._optimizers}
        if "backward" in self.inside:
            why = "it steps inside a backward"
        elif others and not self._turn and optimizer not in self._optimizers:
            why = f"a forward or a backward lies between the step of {' and '.join(sorted(others))}"
            why += " and its own"
        if why:
            why += ", so where a training step ends is not known"
            raise illegal("optimizer", type(optimizer).__name__, why, BY_HAND)
        if optimizer in self._turn:
            self._turn.clear()
        elif self._turn:
            self._go_on()

    @contextlib.contextmanager
    def _loading(self, optimizer: Any, *_: Any) -> Iterator[None]:
        yield
        if self.ledger is not None and self._is_main():
            self.ledger.owns_state(optimizer)

    def _updated(self, optimizer: Any, *_: Any) -> None:
        if not self._is_main() or self._captures():
            return
        self.inside.pop()
        self._stepping.pop()
        if self.ledger is not None:
            self.ledger.owns_state(optimizer)
        if "optimizer" not in self.inside:
            self.recorder.leave()
            self._turn.add(optimizer)
            if not self.marked:
                self.end_step()

    # ---- the part -----------------------------------------------------------------------------
    def _describe(self) -> None:
        """The parameters of the modules met, at a moment when FSDP2 has gathered none."""
        for module in self._seen:
            for name, parameter in module.named_parameters():
                if id(parameter) not in self._named:
                    self._named.add(id(parameter))
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

    def part(self) -> dict[str, Any]:
        """This rank's tables, when the program has ended.

        What follows the last step is left out; a program without steps is one step.
        """
        self._describe()
        self.saw_nothing = not self.found and not self.calls.made
        if not self.found or (self.open and not self.step):
            self.end_step()
        if self.open:
            self.recorder.leave()
            self.recorder.drop_step()
        tables = self.recorder.tables()
        if self.raw:
            tables["collectives"] |= {"phase": list(as_data(tables["collectives"]))}
        return tables


@contextlib.contextmanager
def _destroying(*_: Any) -> Iterator[None]:
    """See [Note: destroyed]."""
    time.sleep(PATIENCE)
    yield


def _of_python() -> bool:
    """Whether Python has started this thread; it knows others by a stand-in at most."""
    here = threading.get_ident()
    known = (one for one in threading.enumerate() if one.ident == here)
    return any(not isinstance(one, threading._DummyThread) for one in known)
