"""The three transports of a `comm.Group`: gloo, gloo for tensors on a GPU, NCCL.

Each is a class with ``post(call)``, which hands the call to torch.distributed and returns a
`Posted`: its span, what to wait for, and what is left to do after the wait.

Three of gloo's collectives are replaced. Two send too much, as the kernel counts. Its
reduce-scatter consists of n all-reduces, twice the minimum; ours is an all-to-all and a local sum
in rank order. Its reduce sends up to 2.3 times the minimum; ours is direct sends to the root, which
adds them to its own tensor in rank order. Its all-gather collects the parts in a tensor of its own
and copies them from there; ours, inside a node, is direct messages into the result. Between nodes
gloo's ring stays: direct messages would send more bytes over the slow links.

[Note: CUDA] With NCCL the calls of a group run on a CUDA stream of their own, and nothing blocks
the host. Each call has an event that completes it. A wait is for this event alone, not for calls
put on the stream since: a prefetched all-gather must not delay the compute that waits for the
all-gather before it. Between pipeline ranks each way (a direction and a peer) has a communicator
and a stream of its own, so that a receive posted ahead does not hold up a send.

[Note: arrivals] Gloo's sends and receives have no callback; only a thread that waits for a message
learns when it ends. So for each way one thread waits for the messages, one after the other, as they
arrive in order; for those of a reduce another. The end of a receive is then the moment at which its
bytes had arrived, not that at which the rank had time to look, and a buffer is freed as soon as it
has been sent. An all-gather ends with its last message, so one thread waits for all of them: two
for each other rank would be too many for faulthandler, which shows the lines of 100 threads.

[Note: lent] Gloo's thread reports the end of a collective before it drops its references to the
tensors. In 2 to 7 % of 12,000 calls, and in half of them where every core was busy, it still held
them when the rank went on, for up to 11 ms. A peak of memory counted just then would differ from
run to run. So where memory is counted, gloo is lent tensors with storages of their own that share
the bytes, and a wait ends when gloo holds none of these any more.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paralab.checks import illegal
from paralab.instruments.recorder import Recorder
from paralab.ranks.host import send_first
from paralab.ranks.lookout import Lookout

# {operation: function of torch.distributed}, called with (*tensors, the root if there is one).
# torch 2.13 renamed two; the old names still work there, with a warning.
FUNCTIONS: dict[str, Callable] = {
    "all_reduce": dist.all_reduce,
    "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "all_to_all": dist.all_to_all_single,
    "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
    "broadcast": dist.broadcast,
    "reduce": dist.reduce,
}
IN_PLACE = ("all_reduce", "reduce")  # operations whose one tensor is read and written
Way = tuple[str, int]  # "send" or "recv", and the global rank at the other end
OWN = {"reduce": 1, "all_gather": 2}  # tags of the messages that stand in for a collective
PATIENCE = 1.0  # seconds that a wait goes on for if gloo does not drop the tensors lent to it


class Call(NamedTuple):
    """One call of a group, as a transport needs to know it.

    op       the name of a collective; or "send", "recv", or "exchange" of several messages
    words    the call in a message: "send #3 to rank 1 on axis pp, ranks 0,1, step 2"
    tensors  of a collective its result, then its input if that is another tensor; of an exchange
             the tensor of each way
    fills    those of ``tensors`` that the call writes; `IN_PLACE` reads them first
    root     (global rank,) of a broadcast or a reduce, else ()
    ways     of an exchange: direction and peer of each message; else ()
    tag      of messages: one of `OWN` for those that make up a collective, which no message of the
             program's own, or of the other collective, is to be matched with
    finish   what is left to do on this rank after the wait, or None
    """

    op: str
    words: str
    tensors: list[Tensor]
    fills: Sequence[Tensor] = ()
    root: tuple[int, ...] = ()
    ways: Sequence[Way] = ()
    tag: int = 0
    finish: Callable[[], None] | None = None


class Posted(NamedTuple):
    """A call in flight: its span's id, what to wait for in order, what to do after the wait."""

    span: int
    works: list[Any]
    finish: Callable[[], None] | None


class Transport:
    """What the three have in common. The arguments are those of `comm.Group`."""

    def __init__(
        self, ranks: Sequence[int], *, axis: str, context: Any, recorder: Recorder, group: Any
    ) -> None:
        self.ranks, self.context, self.recorder, self.group = ranks, context, recorder, group
        self.lane = f"comm:{axis}"

    def start(self, call: Call, group: Any) -> list[Any]:
        """Hand the call to torch.distributed. Returns its works."""
        tensors = call.tensors
        if len(self.ranks) == 1:  # nothing to send: the result is this rank's part
            if len(tensors) == 2:
                tensors[0].view(-1).copy_(tensors[1].view(-1))
            return []
        if not call.ways:
            return [FUNCTIONS[call.op](*tensors, *call.root, group=group, async_op=True)]
        functions, settings = {"send": dist.isend, "recv": dist.irecv}, (group, call.tag)
        ops = [
            dist.P2POp(functions[side], tensor, peer, *settings)
            for (side, peer), tensor in zip(call.ways, tensors, strict=True)
        ]
        return dist.batch_isend_irecv(ops)


class Gloo(Transport):
    """Gloo between CPUs. Its threads move the bytes, and the end of each call is recorded there."""

    def __init__(self, ranks: Sequence[int], **settings: Any) -> None:
        super().__init__(ranks, **settings)
        send_first()
        self.inside_a_node = len({self.context.nodes[rank] for rank in self.ranks}) == 1
        self.arrivals: dict[tuple, SimpleQueue] = {}  # of each line

    def post(self, call: Call) -> Posted:
        call, recorder, after = self.substitute(call), self.recorder, self.recorder.cut()
        lent, more = self.lend(call)
        span = recorder.launch(self.lane, after, recorder.clock.host())
        works = self.watch(call, self.start(lent, self.group), span)
        return Posted(span, [*works, *more], lent.finish)

    def substitute(self, call: Call) -> Call:
        """The call that sends the bytes of the closed form in place of ``call``, mostly itself."""
        if call.op == "reduce_scatter":
            output, tensor = call.tensors
            with self.recorder.making("buffers"):
                received = torch.empty_like(tensor)

            def sum_parts() -> None:
                with self.recorder.span("copy"):
                    torch.sum(received.view(len(self.ranks), -1), dim=0, out=output.view(-1))

            changes = {"tensors": [received, tensor], "fills": [received], "finish": sum_parts}
            return call._replace(op="all_to_all", **changes)
        if call.op == "all_gather" and self.inside_a_node:
            output, own = (tensor.detach() for tensor in call.tensors)
            with self.recorder.making("buffers"):
                whole = output.contiguous()  # itself, or a buffer, as gloo's messages have no gaps
            parts = dict(zip(self.ranks, whole.view(len(self.ranks), own.numel()), strict=True))
            mine = parts.pop(self.context.rank)
            mine.view_as(own).copy_(own)
            fills = [*parts.values()]
            ways = [(side, rank) for side in ("send", "recv") for rank in parts]
            changes = {"tensors": [mine] * len(parts) + fills, "fills": fills, "ways": ways}
            if whole is not output:
                changes["finish"] = partial(output.copy_, whole)
            return call._replace(op="exchange", tag=OWN[call.op], **changes)
        if call.op == "reduce":
            (tensor,), (root,) = call.tensors, call.root
            if root != self.context.rank:
                changes = {"op": "send", "fills": (), "ways": [("send", root)]}
                return call._replace(root=(), tag=OWN[call.op], **changes)
            others = [rank for rank in self.ranks if rank != root]
            with self.recorder.making("buffers"):
                parts = [torch.empty_like(tensor) for _ in others]

            def add_parts() -> None:
                with self.recorder.span("copy"):
                    for part in parts:
                        tensor.add_(part)

            ways = [("recv", rank) for rank in others]
            changes = {"tensors": parts, "fills": parts, "finish": add_parts, "ways": ways}
            return call._replace(op="exchange", root=(), tag=OWN[call.op], **changes)
        return call

    def lend(self, call: Call) -> tuple[Call, list[Any]]:
        """(the call with the tensors for gloo, what to wait for after its works)"""
        ledger = self.recorder.ledger
        if ledger is None or self.context.backend != "gloo":
            return call, []
        lent = Lent(call.tensors, ledger)
        return call._replace(tensors=lent.tensors), [lent]

    def watch(self, call: Call, works: list[Any], span: int) -> list[Any]:
        """Let the end of each of ``works`` be recorded. Returns what the rank is to wait for."""

        def ended() -> None:
            self.recorder.completed(span, self.recorder.clock.host())

        if call.ways:
            together = call.tag == OWN["all_gather"]
            lines = [(call.tag, *(() if together else way)) for way in call.ways]
            return [self._arrival(*pair, ended) for pair in zip(lines, works, strict=True)]
        if not works:
            ended()
        for work in works:
            work.get_future().add_done_callback(lambda _: ended())
        return works

    def _arrival(self, line: tuple, work: Any, ended: Callable[[], None]) -> Arrival:
        """The end of a message, for which the thread of its ``line`` (a tag, and mostly a way)
        waits. See [Note: arrivals].
        """
        if line not in self.arrivals:
            self.arrivals[line] = queue = SimpleQueue()
            threading.Thread(target=_wait_in_turn, args=(queue,), daemon=True).start()
        arrival = Arrival()
        self.arrivals[line].put((work, ended, arrival))
        return arrival


class Staged(Gloo):
    """Gloo for tensors on a GPU, which it cannot read: they go through pinned host buffers.

    NCCL refuses two ranks on one GPU, so ranks that share one send from pinned (page-locked) host
    memory, which the device copies at full speed. Both copies are recorded, on the lanes "d2h"
    (device to host) and "h2d". The rank is idle while they run: gloo reads the buffer as soon
    as it is handed over. Pinning is slow, so the buffers of a finished call are kept.
    """

    def __init__(self, ranks: Sequence[int], **settings: Any) -> None:
        super().__init__(ranks, **settings)
        self._free: dict[tuple, list[Tensor]] = {}  # (shape, dtype): buffers that no call uses

    def lend(self, call: Call) -> tuple[Call, list[Any]]:
        """Host buffers in place of the tensors. Only those that the call reads are copied there."""
        tensors = {id(t): t for t in call.tensors}  # one may go to several ranks
        buffers = {key: self._take(t) for key, t in tensors.items()}
        unread = {id(t) for t in call.fills if call.op not in IN_PLACE}
        self._copy("d2h", [(buffers[key], t) for key, t in tensors.items() if key not in unread])

        def copy_back() -> None:
            self._copy("h2d", [(t, buffers[id(t)]) for t in call.fills])
            for buffer in buffers.values():
                self._free[tuple(buffer.shape), buffer.dtype].append(buffer)
            if call.finish is not None:
                call.finish()

        return call._replace(tensors=[buffers[id(t)] for t in call.tensors], finish=copy_back), []

    def _take(self, tensor: Tensor) -> Tensor:
        free = self._free.setdefault((tuple(tensor.shape), tensor.dtype), [])
        if free:
            return free.pop()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def _copy(self, lane: str, pairs: list[tuple[Tensor, Tensor]]) -> None:
        if not pairs:
            return
        after, clock = self.recorder.cut(), self.recorder.clock
        start = clock.mark()
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        if any(t.is_cuda for pair in pairs for t in pair):
            torch.cuda.current_stream().synchronize()
        end, size = clock.mark(), sum(target.nbytes for target, _ in pairs)
        span = self.recorder.queued(lane, after, size=size, category="buffers")
        self.recorder.worked(span, start, end, None)


class Nccl(Transport):
    """NCCL between GPUs, on a CUDA stream of the group. See [Note: CUDA]."""

    def __init__(self, ranks: Sequence[int], **settings: Any) -> None:
        super().__init__(ranks, **settings)
        self.stream = torch.cuda.Stream(self.context.device)
        self.ways: dict[Way, tuple[Any, Any]] = {}  # {way: (communicator, its stream)}
        if self.recorder.lookout is None:
            context = self.context
            self.recorder.lookout = Lookout(context, self.recorder.clock.passed)
            self.recorder.lookout.start(lambda: torch.cuda.set_device(context.device))

    def post(self, call: Call) -> Posted:
        recorder, after = self.recorder, self.recorder.cut()
        group, stream = self.group, self.stream
        kinds = {tensor.device.type for tensor in call.tensors if len(self.ranks) > 1}
        if others := kinds - {self.context.device.partition(":")[0]}:
            legal = "device=group.context.device for the tensor, or device='cpu' for the launch"
            raise illegal("tensor.device", others.pop(), "NCCL sends what is on a GPU", legal)
        if len(call.ways) == 1:
            group, stream = self.ways.get(call.ways[0], (group, stream))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            span = recorder.launch(self.lane, after, recorder.clock.mark())
            for work in self.start(call, group):
                work.wait()  # holds the stream, not the host
            recorder.completed(span, recorder.clock.mark())
            event, held = stream.record_event(), [*call.tensors]
        recorder.lookout.posted(call.words, event, held)
        return Posted(span, [Enqueued(event, held)], call.finish)


class Enqueued:
    """A call on a CUDA stream: the event that completes it, and its tensors.

    The tensors are kept alive until the rank has waited; if it never does, by its `Lookout` until
    the call is over. After a wait the compute stream runs behind the call, so that the allocator
    may use their memory again. torch's ``record_stream`` would keep the memory until the host
    happens to see that the stream has passed the call: a host that runs ahead of its device would
    then hold every unit that ZeRO-3 has gathered.
    """

    __slots__ = ("event", "tensors")

    def __init__(self, event: Any, tensors: list[Tensor]) -> None:
        self.event, self.tensors = event, tensors

    def wait(self) -> None:
        """Make the compute stream wait for this call alone; the host does not wait."""
        torch.cuda.current_stream().wait_event(self.event)
        self.tensors.clear()


class Lent:
    """Tensors for gloo, with storages of their own that share the bytes of a call's tensors.
    ``wait`` returns when gloo has dropped them and all its views of them. See [Note: lent].
    """

    def __init__(self, tensors: Sequence[Tensor], ledger: Any) -> None:
        self._holders = torch._C._storage_Use_Count
        self.tensors = [torch.from_dlpack(tensor.detach()) for tensor in tensors]
        ledger.shares_bytes(*self.tensors)
        self._own = self._counts()  # of the references that are not gloo's

    def wait(self) -> None:
        give_up = time.monotonic() + PATIENCE
        while self._counts() != self._own and time.monotonic() < give_up:
            time.sleep(1e-5)  # gloo's thread may need Python's lock to drop them

    def _counts(self) -> list[int]:
        """Reference counts of each tensor, of its Python object, which gloo's thread drops last,
        and of its storage, which a view holds.
        """
        counts = []
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            counts += [tensor._use_count(), sys.getrefcount(tensor), self._holders(storage._cdata)]
        return counts


class Arrival(SimpleQueue):
    """The end of one send or receive: the thread of its way puts None here, or the error. Unlike a
    wait of torch's, this one lets the handlers of signals run, so that Ctrl-C ends it.
    """

    def wait(self) -> None:
        """Wait for the end of the message. Raises what torch.distributed raised."""
        error = self.get()
        if error is not None:
            raise error


def _wait_in_turn(queue: SimpleQueue) -> None:
    """The thread of a line: wait for each message and report its end."""
    while True:
        work, ended, arrival = queue.get()
        outcome = None
        try:
            work.wait()
        except Exception as error:  # raised again where the rank waits for the message
            outcome = error
        work = None  # frees the message's memory before the rank learns of its end
        ended()
        arrival.put(outcome)
        del ended, arrival, outcome  # keep nothing alive while the queue is empty
