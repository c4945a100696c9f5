"""Three ways for a call to torch.distributed: gloo, gloo for tensors on a GPU, NCCL.

Each is a class with ``post(call)``, which starts the call and returns a `Posted`: its span, what to
wait for, and what is left to do at its end.

What gloo does badly is done better with what it does well (bytes counted on the loopback
interface): its reduce-scatter is n all-reduces, twice the minimum, so ours is an all-to-all and a
local sum; its reduce sends up to 2.3 times the minimum, so ours is direct sends and a local sum.
Both add in rank order.

[Note: CUDA] With NCCL a group's calls run on a stream of their own and nothing blocks the host. A
call is completed by an event of its own, and a wait is for that event alone, not for what was put
on the stream since: a gather that is fetched ahead must not delay the compute that waits for the
gather before it. Between pipeline ranks every way, a direction and a peer, has a communicator and a
stream of its own, so that a receive that is posted ahead does not hold up a send.

[Note: arrivals] Gloo's sends and receives say nothing when they end; only a thread that waits for
one hears of it. So a thread for each direction and peer waits for them in turn, as a pair's
messages arrive in order: the end of a receive is then the moment at which its bytes were there, not
the moment at which the rank had time to look, and a buffer that has been sent is let go at once.

[Note: lent] Gloo's thread says that a collective is over before it lets go of the tensors: in 2 to
7 % of 12,000 calls they were still held when the rank went on, for up to 11 ms, and in half of them
where every core was busy. A peak of memory that was counted just then would be another in the next
run. So where memory is counted, gloo is lent storages that share the bytes, and a wait is over when
gloo has none of them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paralab.instruments.recorder import Recorder
from paralab.ranks.host import send_first
from paralab.ranks.lookout import Lookout

# How torch.distributed is asked for a collective: (*tensors, the root if there is one). torch 2.13
# renamed two; the old names still work there, with a warning.
ASK: dict[str, Callable] = {
    "all_reduce": dist.all_reduce,
    "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "all_to_all": dist.all_to_all_single,
    "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
    "broadcast": dist.broadcast,
    "reduce": dist.reduce,
}
Way = tuple[str, int]  # "send" or "recv", and the global rank at the other end
PATIENCE = 1.0  # seconds that gloo may hold what it was lent after it says that a call is over


class Call(NamedTuple):
    """What one call does.

    op       a collective's name, or "exchange"
    tensors  what it works on: a collective's result first, one tensor per way of an exchange
    fills    those of them that it fills; ``reads``: those of these that it reads first
    root     (global rank,) of a broadcast or a reduce, else ()
    ways     of an exchange
    number   of the group's calls, for the words that say why a rank is idle
    finish   what this rank does when it has waited for the call
    """

    op: str
    tensors: list[Tensor]
    fills: Sequence[Tensor] = ()
    reads: Sequence[Tensor] = ()
    root: tuple[int, ...] = ()
    ways: Sequence[Way] = ()
    number: int = 0
    finish: Callable[[], None] | None = None


class Posted(NamedTuple):
    """span: its id; works: what to wait for, in order; finish: what is to be done after that."""

    span: int
    works: list[Any]
    finish: Callable[[], None] | None


class Transport:
    """What the three have in common. The settings are those of the group, `comm.Group`."""

    def __init__(
        self, ranks: Sequence[int], *, axis: str, context: Any, recorder: Recorder, group: Any
    ) -> None:
        self.ranks, self.context, self.recorder, self.group = ranks, context, recorder, group
        self.axis, self.lane = axis, f"comm:{axis}"

    def words(self, op: str, number: object) -> str:
        """A call of this group, for a message."""
        where = f"axis {self.axis}, ranks {','.join(map(str, self.ranks))}"
        return f"{op} #{number} on {where}, step {self.recorder.step}"

    def post(self, call: Call) -> Posted:
        raise NotImplementedError

    def ask(self, call: Call, tensors: Sequence[Tensor], group: Any) -> list[Any]:
        """Hand the call to torch.distributed."""
        if len(self.ranks) == 1:  # nothing to send: the result is the own part
            if len(tensors) == 2:
                tensors[0].view(-1).copy_(tensors[1].view(-1))
            return []
        if not call.ways:
            return [ASK[call.op](*tensors, *call.root, group=group, async_op=True)]
        sides = {"send": dist.isend, "recv": dist.irecv}
        ops = [
            dist.P2POp(sides[side], tensor, peer, group=group)
            for (side, peer), tensor in zip(call.ways, tensors, strict=True)
        ]
        return dist.batch_isend_irecv(ops)


class Gloo(Transport):
    """Between processors. Other threads move the bytes, and say when they are through."""

    def __init__(self, ranks: Sequence[int], **settings: Any) -> None:
        super().__init__(ranks, **settings)
        send_first()
        self.arrivals: dict[Way, SimpleQueue] = {}

    def post(self, call: Call) -> Posted:
        call, recorder, after = self.as_own(call), self.recorder, self.recorder.cut()
        tensors, held, finish = self.lend(call)
        span = recorder.launch(self.lane, after, recorder.clock.host())
        works = self.watch(call, self.ask(call, tensors, self.group), span)
        return Posted(span, [*works, *held], finish)

    def as_own(self, call: Call) -> Call:
        """The call as gloo does it best, at the same bytes on the wire as everywhere."""
        if call.op == "reduce_scatter":
            output, tensor = call.tensors
            with self.recorder.making("buffers"):
                received = torch.empty_like(tensor)

            def add_up() -> None:
                with self.recorder.span("copy"):
                    torch.sum(received.view(len(self.ranks), -1), dim=0, out=output.view(-1))

            made = {"tensors": [received, tensor], "fills": [received], "finish": add_up}
            return call._replace(op="all_to_all", **made)
        if call.op == "reduce":
            (tensor,), (root,) = call.tensors, call.root
            if root != self.context.rank:
                return call._replace(fills=(), reads=(), root=(), ways=[("send", root)])
            others = [rank for rank in self.ranks if rank != root]
            with self.recorder.making("buffers"):
                parts = [torch.empty_like(tensor) for _ in others]

            def add() -> None:
                with self.recorder.span("copy"):
                    for part in parts:
                        tensor.add_(part)

            ways = [("recv", rank) for rank in others]
            made = {"tensors": parts, "fills": parts, "finish": add, "ways": ways}
            return call._replace(reads=(), root=(), **made)
        return call

    def lend(self, call: Call) -> tuple[list[Tensor], list[Any], Callable | None]:
        """(what gloo is given, what to wait for besides its works, what to do at the end)"""
        ledger = self.recorder.ledger
        if ledger is None or self.context.backend != "gloo":
            return call.tensors, [], call.finish
        lent = Lent(call.tensors, ledger)
        return lent.tensors, [lent], call.finish

    def watch(self, call: Call, works: list[Any], span: int) -> list[Any]:
        """Note the end of each of ``works``. Returns what to wait for in their place."""

        def ended() -> None:
            self.recorder.completed(span, self.recorder.clock.host())

        if call.ways:
            return [self._arrival(*pair, ended) for pair in zip(call.ways, works, strict=True)]
        if not works:
            ended()
        for work in works:
            work.get_future().add_done_callback(lambda _: ended())
        return works

    def _arrival(self, way: Way, work: Any, ended: Callable[[], None]) -> Arrival:
        """See [Note: arrivals]."""
        if way not in self.arrivals:
            self.arrivals[way] = SimpleQueue()
            threading.Thread(target=_hear, args=(self.arrivals[way],), daemon=True).start()
        arrival = Arrival(ended)
        self.arrivals[way].put((work, arrival))
        return arrival


class Staged(Gloo):
    """Gloo for tensors on a GPU, which it cannot read: through pinned host buffers and back.

    NCCL refuses two ranks on one GPU, so ranks that share one send from pinned (page-locked) host
    memory, which the device copies at full speed. Both copies are recorded, on the lanes "d2h"
    (device to host) and "h2d". The rank is idle while they run: gloo reads the buffer as soon
    as it is handed over. Pinning is slow, so the buffers of a finished call are kept.
    """

    def __init__(self, ranks: Sequence[int], **settings: Any) -> None:
        super().__init__(ranks, **settings)
        self._free: dict[tuple, list[Tensor]] = {}  # (shape, dtype): buffers that no call uses

    def lend(self, call: Call) -> tuple[list[Tensor], list[Any], Callable | None]:
        """Host buffers. What the call only fills is not copied down before."""
        twins = {id(t): self._take(t) for t in call.tensors}
        filled = {id(t) for t in call.fills} - {id(t) for t in call.reads}
        self._copy("d2h", [(twins[id(t)], t) for t in call.tensors if id(t) not in filled])

        def back() -> None:
            self._copy("h2d", [(t, twins[id(t)]) for t in call.fills])
            for twin in twins.values():
                self._free[tuple(twin.shape), twin.dtype].append(twin)
            if call.finish is not None:
                call.finish()

        return [twins[id(t)] for t in call.tensors], [], back

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
        size = sum(target.nbytes for target, _ in pairs)
        end = clock.mark()
        span = self.recorder.queued(lane, after, size=size, category="buffers")
        self.recorder.worked(span, start, end, None)


class Nccl(Transport):
    """Between GPUs: the stream is the calls' lane. See [Note: CUDA]."""

    def __init__(self, ranks: Sequence[int], **settings: Any) -> None:
        super().__init__(ranks, **settings)
        self.stream = torch.cuda.Stream(self.context.device)
        self.ways: dict[Way, tuple[Any, Any]] = {}  # each one's communicator and stream
        if self.recorder.lookout is None:
            passed, context = self.recorder.clock.passed, self.context
            how = {"rank": context.rank, "limit": context.limit}
            self.recorder.lookout = Lookout(context.note, passed, context.alive, **how)
            self.recorder.lookout.start()

    def post(self, call: Call) -> Posted:
        recorder, after = self.recorder, self.recorder.cut()
        group, stream = self.group, self.stream
        if len(call.ways) == 1:
            group, stream = self.ways.get(call.ways[0], (group, stream))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            span = recorder.launch(self.lane, after, recorder.clock.mark())
            for work in self.ask(call, call.tensors, group):
                work.wait()  # orders the stream, not the host
            recorder.completed(span, recorder.clock.mark())
            over = torch.cuda.Event()
            over.record(stream)
        op = call.ways[0][0] if call.ways else call.op
        recorder.lookout.posted(self.words(op, call.number), over)
        return Posted(span, [Enqueued(over, call.tensors)], call.finish)


class Enqueued:
    """A call that was put on a stream: the event that completes it, and its tensors.

    The tensors live as long as the rank has not waited. Behind the wait whatever the allocator
    makes of their memory is ordered behind the call, not before. torch's ``record_stream`` keeps
    memory back until the host happens to see that the stream has passed it; a host that runs ahead
    of its device then holds every unit that ZeRO-3 has gathered.
    """

    __slots__ = ("event", "tensors")

    def __init__(self, event: Any, tensors: Sequence[Tensor]) -> None:
        self.event, self.tensors = event, tensors

    def wait(self) -> None:
        """Order the compute stream behind this call alone; the host does not wait."""
        torch.cuda.current_stream().wait_event(self.event)
        self.tensors = ()


class Lent:
    """A call's tensors for gloo, as storages of their own that share the bytes, and when gloo has
    let go of them and of every view it made. See [Note: lent].
    """

    def __init__(self, tensors: Sequence[Tensor], ledger: Any) -> None:
        self._uses = torch._C._storage_Use_Count
        self.tensors = [torch.from_dlpack(tensor.detach()) for tensor in tensors]
        ledger.shares_bytes(*self.tensors)
        self._own = self._counts()

    def wait(self) -> None:
        give_up = time.monotonic() + PATIENCE
        while self._counts() != self._own and time.monotonic() < give_up:
            time.sleep(1e-5)  # the thread may need Python's lock to go on

    def _counts(self) -> list[int]:
        """References to the tensors, to their Python objects, which gloo's thread gives up last,
        and to their storages, for views.
        """
        counts = []
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            counts += [tensor._use_count(), sys.getrefcount(tensor), self._uses(storage._cdata)]
        return counts


class Arrival:
    """The end of one send or receive, for the one thread that computes."""

    __slots__ = ("ended", "error", "_lock")

    def __init__(self, ended: Callable[[], None]) -> None:
        self.ended, self.error = ended, None
        self._lock = threading.Lock()  # held until the end
        self._lock.acquire()

    def wait(self) -> None:
        """Wait until the end. Raises what the transport raised."""
        with self._lock:
            pass
        if self.error is not None:
            raise self.error


def _hear(queue: SimpleQueue) -> None:
    while True:
        work, arrival = queue.get()
        try:
            work.wait()
        except Exception as raised:  # the rank hears of it where it waits itself
            arrival.error = raised
        work = None  # with it the message's memory: the rank may count on it once it hears
        arrival.ended()
        arrival._lock.release()
        del arrival  # nothing is kept alive while there is nothing to wait for
