"""The calls of an observed program's ranks: when they begin, and when they end.

[Note: destroyed] Gloo's thread drops a finished call with Python's lock, and the end of a process
group waits for that thread with the lock in its hand. So the group is destroyed when the threads
have had time.

[Note: ends] A collective of gloo says when it ends; gloo's sends, receives and reduce-scatters do
not, and those of tensors on a GPU say it on another clock. Their span ends when the rank has waited
for them. The reducer of DistributedDataParallel waits in C++: what follows its last launch in a
backward counts as the wait. A Work of NCCL has a future that stands for an event of the device, and
a stream that waits for the future passes a mark when the call has ended. The stream is the
observer's own: torch runs the future's callbacks on any stream of the pool that the program's and
NCCL's streams come from too, and would hold that one up. So it has a priority that hardly any
program asks for, as a pool and its queues are those of a priority. While the future is waited for,
torch notes that the result is used on that stream.

[Note: at once] Where the caller waits at once, NCCL runs the collective on the caller's own stream
and returns no Work. On the stream that the program computes on this is a wait. On another one, as
FSDP2 has them, the program goes on computing; when it waits for that stream is not seen. Nor is it
where a Work is waited for on another stream.

[Note: batches] What is coalesced, as ``batch_isend_irecv`` is over NCCL, is made when the batch
ends: its calls have no Work of their own, and the batch's stands for all of them. It has no future,
and torch would follow a null pointer to it; so its spans end when the rank has waited for it. NCCL
makes an all-gather or a reduce-scatter of unequal parts as such a batch, too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paralab.instruments.foreign_calls import (
    CALLS,
    Where,
    carried,
    has_unequal_parts,
    is_control,
    payload,
)
from paralab.instruments.foreign_hooks import UNSEEN, around, stand_before
from paralab.instruments.foreign_program import Program
from paralab.theory.traffic import POINT_TO_POINT

PRIORITY = -3  # of a stream: see [Note: ends]
PATIENCE = 0.05  # seconds for threads to let go of the last calls


class Flights:
    """Calls of c10d from where they are made, until they have been waited for."""

    def __init__(self, program: Program) -> None:
        self.program, self.recorder = program, program.recorder
        self.of_backward: dict[int, Any] = {}  # its calls' spans, weak references to their Work
        # a call's Work: the spans that it stands for, and whether it is on a GPU
        self._works: weakref.WeakKeyDictionary[Any, tuple] = weakref.WeakKeyDictionary()
        self._batches: dict[int, list[int]] = {}  # of a thread: see [Note: batches]
        self._held: Any = None  # the last call's Work, until its caller has it
        self._listening: dict[Where, Any] = {}  # of a group: a stream that waits for its calls

    def follow(self, undo: contextlib.ExitStack) -> None:
        """Until ``undo`` is closed, be there where calls are made and waited for."""
        for op, names in CALLS.items():
            for name in names.split():
                stand_before(undo, "c10d", name, functools.partial(self._called, op))
        stand_before(undo, "_c10d_functional", "wait_tensor", self._awaited)
        around(undo, dist.Work, "wait", self._waiting)
        around(undo, dist.ProcessGroup, "_start_coalescing", self._batching)
        around(undo, dist.ProcessGroup, "_end_coalescing", self._batched)
        for module in (dist, dist.distributed_c10d):
            around(undo, module, "destroy_process_group", _destroying)

    def let_go(self) -> None:
        """The caller has the last call's Work."""
        self._held = None

    # ---- how they begin -------------------------------------------------------------------------
    def _called(self, op: str, given: dict[str, Any], own: Callable[[], Any]) -> Any:
        """One call of c10d, on whatever thread: write it down, make it, hear of its end."""
        program, recorder = self.program, self.recorder
        if program.captures():
            return own()
        sent, used = payload(op, given), carried(given)
        if of_program := program.is_program():
            program.shows(*used)
        if program.found or op in POINT_TO_POINT:  # a pipeline's later stages begin with a message
            program.begin()
        gpu = next((tensor.device for tensor in used if tensor.is_cuda), None)
        aside = gpu is not None and program.is_aside(gpu)
        batch, after = self._batches.get(threading.get_ident()), ()
        if of_program:  # the cut is where the program computes, wherever the call is made
            with torch.cuda.stream(program.stream) if aside else UNSEEN:
                after = recorder.cut()
        if op == "barrier":
            return own()
        group = dist.ProcessGroup.unbox(given["process_group"])
        where = program.calls.where(group, used[0].device)
        start = recorder.clock.host() if gpu is None else recorder.clock.mark()
        span = recorder.launch(f"comm:{where.axis}", after, start)
        for row in program.calls.rows(op, given, sent, where, self._phase(sent, of_program)):
            recorder.call((*row, span))
        for tensor in used:
            program.users[tensor.untyped_storage()._cdata] = (span,)
            if recorder.ledger is not None:
                recorder.ledger.carries(tensor)
        at_once = gpu and of_program and not aside and given.get("async_op") is False
        at_once = at_once and batch is None
        with recorder.span("wait", after=(span,)) if at_once else UNSEEN:
            result = own()
        last = result[-1] if isinstance(result, (tuple, list)) else result
        work = self._held = dist.Work.unbox(last)
        if batch is not None:
            batch.append(span)
            return result
        self._flies(work, (span,), gpu is not None)
        if work is None:
            return result
        if of_program and "backward" in program.inside:
            self.of_backward[span] = weakref.ref(work)
        if gpu is not None and not where.gloo and has_unequal_parts(given):
            program.about["batches"] = True
        elif gpu is None or not where.gloo:
            with contextlib.suppress(RuntimeError):  # not all calls say it
                self._hear_of_end(work.get_future(), span, where, gpu)
        return result

    def _phase(self, sent: list[Tensor], of_program: bool) -> str:
        """What another thread of the program sends is no part of its steps."""
        if not self.program.found:
            return "setup"
        if not of_program or is_control(sent):
            return "control"
        return self.program.inside[-1] if self.program.inside else "data"

    def _flies(self, work: Any, spans: tuple[int, ...], on_gpu: bool) -> None:
        """The Work stands for these calls."""
        if work is None:  # [Note: at once]
            self.settle(spans)
        elif spans:
            self._works[work] = spans, on_gpu

    @contextlib.contextmanager
    def _batching(self, *_: Any) -> Iterator[None]:
        yield
        self._batches[threading.get_ident()] = []

    @contextlib.contextmanager
    def _batched(self, *_: Any) -> Iterator[Callable[[Any], None]]:
        spans = tuple(self._batches.pop(threading.get_ident(), ()))

        def heard(work: Any) -> None:
            self._flies(work, spans, on_gpu=True)
            self.program.about["batches"] |= bool(spans) and work is not None

        yield heard

    # ---- how they end ---------------------------------------------------------------------------
    def _hear_of_end(self, future: Any, span: int, where: Where, gpu: Any) -> None:
        """See [Note: ends]."""
        recorder, clock = self.recorder, self.recorder.clock
        if gpu is None:
            future.add_done_callback(lambda _: recorder.completed(span, clock.host()))
        elif future.done():  # NCCL's is from the start: the host does not wait
            if where not in self._listening:
                self._listening[where] = torch.cuda.Stream(clock.device, priority=PRIORITY)
            with torch.cuda.stream(self._listening[where]):
                future.wait()
                recorder.completed(span, clock.mark())

    def _waiting(self, work: Any, *_: Any) -> Any:
        self.let_go()
        if self.program.is_program() and not self.program.captures():
            return self._wait(*self._works.pop(work, ((), False)))
        return UNSEEN

    def _awaited(self, given: dict[str, Any], own: Callable[[], Any]) -> Any:
        """``_c10d_functional.wait_tensor``: known by the storage that the call works on."""
        program, tensor = self.program, given["tensor"]
        spans = program.users.get(tensor.untyped_storage()._cdata, ())
        seen = program.is_program() and not program.captures()
        with self._wait(spans, tensor.is_cuda) if seen else UNSEEN:
            return own()

    @contextlib.contextmanager
    def _wait(self, spans: tuple[int, ...], on_gpu: bool) -> Iterator[None]:
        if aside := on_gpu and self.program.is_aside():  # [Note: at once]
            self.program.about["aside"] = True
        else:
            self.recorder.enter("wait", after=spans)
        try:
            yield
        finally:
            if not aside:
                self.recorder.leave()
            self.settle(spans)

    def was_waiting(self) -> tuple[int, ...]:
        """The backward's calls that C++ launched, and has waited for at the backward's end."""
        self.let_go()
        spans = tuple(span for span, work in self.of_backward.items() if work() is None)
        if spans:
            self.recorder.was_waiting(spans)
        return spans

    def settle(self, spans: tuple[int, ...]) -> None:
        """The wait for these calls is over."""
        for span in spans:
            self.of_backward.pop(span, None)
            self.recorder.settled(span, self.recorder.clock.mark())


@contextlib.contextmanager
def _destroying(*_: Any) -> Iterator[None]:
    """See [Note: destroyed]."""
    time.sleep(PATIENCE)
    yield
