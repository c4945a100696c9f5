"""When the calls of an observed program begin, and when they end.

[Note: destroyed] Gloo's thread needs Python's lock to release a finished call, and the destructor
of a process group holds that lock while it waits for the thread. So that this is no deadlock, a
group is destroyed only after its threads have had `PATIENCE` seconds to release their calls.

[Note: ends] Gloo, tensors on the CPU: the future of a collective's Work reports its end. Gloo's
sends, receives and reduce-scatters have no future, and with tensors on a GPU gloo's futures report
on the host's clock; the spans of these calls end when the rank has waited for them. The reducer of
DistributedDataParallel waits in C++: the time from its last launch in a backward to the end of the
backward counts as the wait.

NCCL: the future of a Work stands for an event on the device. A stream of the observer's own waits
for the future, and a mark on that stream then has the time of the end. A callback of the future
would not do: torch runs it on some stream of the pool from which the program's and NCCL's streams
come too, and would delay that stream. Streams of one priority share a pool and hardware queues, so
the observer's has a priority that hardly any program uses. To torch, the wait for the future is a
use of the call's result on that stream.

[Note: at once] Where the caller waits at once (async_op=False), NCCL runs the collective on the
caller's current stream and returns no Work. If that is the stream on which the program computes,
the call is a wait. On another stream, as in FSDP2, the program goes on computing, and its later
wait for that stream is not seen; neither is a wait for a Work on another stream.

[Note: batches] Calls that are coalesced, as those of ``batch_isend_irecv`` over NCCL, are launched
when the batch ends. They have no Work of their own; the batch's stands for all of them. It has no
future (torch would follow a null pointer), so the calls' spans end when the rank has waited for it.
NCCL makes an all-gather or reduce-scatter of unequal parts as such a batch, too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paralab.instruments.foreign_calls import CALLS, Where, carried, is_control, is_uneven, payload
from paralab.instruments.foreign_hooks import UNSEEN, around, stand_before
from paralab.instruments.foreign_program import Program
from paralab.theory.traffic import POINT_TO_POINT

PRIORITY = -3  # of the observer's streams: see [Note: ends]
PATIENCE = 0.05  # seconds: see [Note: destroyed]


class Flights:
    """The calls of c10d that are in flight: made, and not waited for yet."""

    def __init__(self, program: Program) -> None:
        self.program, self.recorder = program, program.recorder
        self.backward_calls: set[int] = set()  # spans of calls in this backward, not waited for
        # Work: the spans of the calls that it stands for, and whether their tensors are on a GPU
        self._works: weakref.WeakKeyDictionary[Any, tuple] = weakref.WeakKeyDictionary()
        self._batches: dict[int, list[int]] = {}  # thread: spans of its open batch
        self._last_work: Any = None  # of the last call, kept alive until its caller refers to it
        self._end_streams: dict[Where, Any] = {}  # the stream that waits for a group's calls

    def intercept(self, undo: contextlib.ExitStack) -> None:
        """Until ``undo`` is closed, intercept where calls are made and waited for."""
        for op, names in CALLS.items():
            for name in names.split():
                stand_before(undo, "c10d", name, functools.partial(self._called, op))
        stand_before(undo, "_c10d_functional", "wait_tensor", self._wait_tensor)
        around(undo, dist.Work, "wait", self._wait_work)
        around(undo, dist.ProcessGroup, "_start_coalescing", self._begin_batch)
        around(undo, dist.ProcessGroup, "_end_coalescing", self._end_batch)
        for module in (dist, dist.distributed_c10d):
            around(undo, module, "destroy_process_group", _destroying)

    def drop_last_work(self) -> None:
        """The caller refers to the last call's Work by now, if it keeps the Work at all."""
        self._last_work = None

    # ---- how they begin -------------------------------------------------------------------------
    def _called(self, op: str, args: dict[str, Any], original: Callable[[], Any]) -> Any:
        """Around a call of c10d on any thread: record it, make it, arrange to record its end."""
        program, recorder = self.program, self.recorder
        if program.captures():
            return original()
        sent, used = payload(op, args), carried(args)
        if of_program := program.is_program():
            program.look_for_gpu(*used)
        if program.started or op in POINT_TO_POINT:  # a later pipeline stage starts with a message
            program.begin()
        gpu = next((tensor.device for tensor in used if tensor.is_cuda), None)
        aside = gpu is not None and program.is_aside(gpu)
        batch, after = self._batches.get(threading.get_ident()), ()
        if of_program:  # cut on the stream that computes, whatever stream the call is made on
            with torch.cuda.stream(program.stream) if aside else UNSEEN:
                after = recorder.cut()
        if op == "barrier":
            return original()
        group = dist.ProcessGroup.unbox(args["process_group"])
        where = program.calls.where(group, used[0].device)
        start = recorder.clock.host() if gpu is None else recorder.clock.mark()
        span = recorder.launch(f"comm:{where.axis}", after, start)
        for row in program.calls.rows(op, args, sent, where, self._phase(sent, of_program)):
            recorder.call((*row, span))
        for tensor in used:
            program.last_calls[tensor.untyped_storage()._cdata] = (span,)
            if recorder.ledger is not None:
                recorder.ledger.carries(tensor)
        at_once = gpu and of_program and not aside and args.get("async_op") is False
        at_once = at_once and batch is None
        with recorder.span("wait", after=(span,)) if at_once else UNSEEN:
            result = original()
        last = result[-1] if isinstance(result, (tuple, list)) else result
        work = self._last_work = dist.Work.unbox(last)
        if batch is not None:
            batch.append(span)
            return result
        self._in_flight(work, (span,), gpu is not None)
        if work is None:
            return result
        if of_program and "backward" in program.inside:
            self.backward_calls.add(span)
        if gpu is not None and not where.gloo and is_uneven(args):
            program.about["batches"] = True
        elif gpu is None or not where.gloo:
            with contextlib.suppress(RuntimeError):  # calls without a future: see [Note: ends]
                self._record_end(work.get_future(), span, where, gpu)
        return result

    def _phase(self, sent: list[Tensor], of_program: bool) -> str:
        """The phase of a call. Messages of other threads are not part of the program's steps."""
        if self.program.started and (not of_program or is_control(sent)):
            return "control"
        return self.program.inside[-1] if self.program.inside else "data"

    def _in_flight(self, work: Any, spans: tuple[int, ...], on_gpu: bool) -> None:
        """These calls have been launched. ``work`` stands for them; None: they were waited for."""
        if work is None:  # [Note: at once]
            self.settle(spans)
        elif spans:
            self._works[work] = spans, on_gpu

    def _begin_batch(self, call: Callable[[], None], *_: Any) -> None:
        call()
        self._batches[threading.get_ident()] = []

    def _end_batch(self, call: Callable[[], Any], *_: Any) -> Any:
        spans = tuple(self._batches.pop(threading.get_ident(), ()))
        work = call()
        self._in_flight(work, spans, on_gpu=True)
        self.program.about["batches"] |= bool(spans) and work is not None
        return work

    # ---- how they end ---------------------------------------------------------------------------
    def _record_end(self, future: Any, span: int, where: Where, gpu: Any) -> None:
        """Have the end of a call recorded when its future is done: see [Note: ends]."""
        recorder, clock = self.recorder, self.recorder.clock
        if gpu is None:
            future.add_done_callback(lambda _: recorder.completed(span, clock.host()))
        elif future.done():  # NCCL's is done from the start, so that the host does not wait here
            if where not in self._end_streams:
                self._end_streams[where] = torch.cuda.Stream(clock.device, priority=PRIORITY)
            with torch.cuda.stream(self._end_streams[where]):
                future.wait()
                recorder.completed(span, clock.mark())

    def _wait_work(self, call: Callable[[], Any], work: Any, *_: Any) -> Any:
        """Around ``Work.wait``."""
        self.drop_last_work()
        return self._wait(call, *self._works.get(work, ((), False)))

    def _wait_tensor(self, args: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Around ``wait_tensor``, a wait for the last call that used the tensor's storage."""
        tensor = args["tensor"]
        spans = self.program.last_calls.get(tensor.untyped_storage()._cdata, ())
        return self._wait(call, spans, tensor.is_cuda)

    def _wait(self, call: Callable[[], Any], spans: tuple[int, ...], on_gpu: bool) -> Any:
        if not self.program.is_program() or self.program.captures():
            return call()
        aside = on_gpu and self.program.is_aside()  # [Note: at once]
        self.program.about["aside"] |= aside
        try:
            with UNSEEN if aside else self.recorder.span("wait", after=spans):
                return call()
        finally:
            self.settle(spans)

    def was_waiting(self) -> None:
        """At the end of a backward: the spans of its calls that C++ code has launched and, as their
        Work is gone, waited for. The time since the last launch becomes a wait for them.
        """
        self.drop_last_work()
        kept = {span for spans, _ in self._works.values() for span in spans}
        if spans := tuple(sorted(self.backward_calls - kept)):
            self.recorder.was_waiting(spans)
            self.settle(spans)

    def settle(self, spans: tuple[int, ...]) -> None:
        """The wait for these calls is over."""
        for span in spans:
            self.backward_calls.discard(span)
            self.recorder.settled(span, self.recorder.clock.mark())


def _destroying(call: Callable[[], None], *_: Any) -> None:
    """See [Note: destroyed]."""
    time.sleep(PATIENCE)
    call()
