"""CUDA without a GPU: streams, events and NCCL communicators that keep order and time only.

Ranks are real processes and the arithmetic is real, on the CPU and over gloo; what is virtual is
when it happens. `install` puts a `Device` in place of ``torch.cuda`` in a rank's process. What the
rank launches goes to streams, as on a GPU, and the host never waits for it. A stream is a
chain of nodes with durations that the test states; an event is a node; a call of NCCL is a node on
its communicator's own stream that starts when all its members have come to theirs. `solve` puts the
ranks' graphs together and finds every moment as a longest path.

Where the test states a `pl.Cluster`, every operation lasts as long as it would there (`takes`,
`sends`), and what an event and the host's clock say are moments of that device: the members of a
call tell each other when they come to it.

The same graph says what is ordered with what, so each rank also looks for races: an operation that
touches memory which another stream may still be using, and memory that is given back to its
allocator while another stream may still be using it. Threads of the host are chains too. A meeting
of host and device inside a step, and a CUDA context on another rank's GPU, are written down.

What this device does not model, it refuses: any other name of ``torch.cuda`` raises.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paralab.instruments.memory import tensors
from paralab.spec import Cluster
from paralab.spec.links import Reach
from paralab.theory.traffic import most_sent

PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")}
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
OVERWRITES = {"aten::copy_", "aten::zero_", "aten::fill_"}  # look at nothing that they change
FREE = {  # operations that look at no element
    "aten::detach", "aten::lift_fresh", "aten::_local_scalar_dense", "aten::empty_like",
    "aten::new_empty", "aten::empty", "aten::new_empty_strided", "aten::empty_strided",
}  # fmt: skip
PAGE = 4096
POOL = 32  # streams of one priority that torch has: c10/cuda/CUDAStream.h
QUEUES = 8  # of the device, for all streams, unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise
MEETS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")


class Node(NamedTuple):
    """stream, its duration in seconds, the nodes before it, and what it starts together with;
    queued: the node that is before it in a queue of the device, and has to begin first, or -1.
    """

    stream: str
    seconds: float
    after: tuple[int, ...]
    meets: tuple
    label: str
    queued: int = -1


class Name(str):
    """The name of a virtual GPU: torch makes tensors on the CPU, paralab sees "cuda:i"."""

    index: int

    def startswith(self, prefix: Any, *rest: Any) -> bool:
        return f"cuda:{self.index}".startswith(prefix, *rest)


def name_of(index: int) -> Name:
    name = Name("cpu")
    name.index = index
    return name


class Chain:
    """A stream, or a thread of the host: what is on it happens in order.

    tail   its last node, or -1
    count  nodes so far; ``knows``: {chain: how many nodes of it are behind us}
    works  calls of gloo that really carry what is virtually behind us
    """

    def __init__(self, name: str, queue: int = -1) -> None:
        self.name, self.queue, self.tail, self.count = name, queue, -1, 0
        self.knows: dict[str, int] = {}
        self.works: tuple = ()


class Stream:
    """``torch.cuda.Stream``."""

    def __init__(
        self, device: Any = None, chain: Chain | None = None, *, priority: int = 0
    ) -> None:
        self.machine = machine = Machine.here
        self.index = getattr(device, "index", None)
        self.index = machine.device() if self.index is None else self.index
        machine.touch(self.index)
        self.chain = chain or machine.pooled()

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self.machine.order(self.chain, event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        self.machine.complain("a stream is asked")
        return True


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.machine, self.node, self.works, self.timing = Machine.here, -1, (), enable_timing
        self.knows: dict[str, int] = {}
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        chain = (stream or self.machine.stream()).chain
        self.node = self.machine.node(chain, label="event")
        self.works, self.knows, self.at = chain.works, dict(chain.knows), time.perf_counter()

    def query(self) -> bool:
        self.machine.asks_here("an event is asked")
        with self.machine.lock:
            _merge(self.machine.thread().knows, self.knows)
        return True

    def synchronize(self) -> None:
        self.machine.asks_here("an event is waited for")
        self.machine.order(self.machine.thread(), self)

    def elapsed_time(self, other: Event) -> float:
        assert self.timing and other.timing, "these events were made without enable_timing"
        if self.machine.cluster is not None:
            ends = self.machine.ends
            return (ends[other.node] - ends[self.node]) * 1e3
        return (other.at - self.at) * 1e3


class Work:
    """What an asynchronous call of NCCL returns: ``wait`` orders the current stream behind it."""

    def __init__(self, node: int, knows: dict[str, int], real: Any) -> None:
        self.event = Event()
        self.event.node, self.event.knows, self.event.works = node, knows, (real,)

    def wait(self) -> None:
        chain = Machine.here.stream().chain
        Machine.here.order(chain, self.event, really=False)
        left = (work for work in chain.works if work not in Machine.here.over)
        chain.works = (*left, *self.event.works)


class Memory:
    """A storage: who made it, and what has read and written it last on every chain."""

    def __init__(self, home: str) -> None:
        self.home, self.size = home, 0
        self.wrote: dict[str, tuple[int, str]] = {}
        self.read: dict[str, tuple[int, str]] = {}


class Allocator:
    """CUDA's caching allocator without fragments: one segment, which grows and is never given back.

    A block is active until its storage is gone; no stream is asked whether it has passed, and what
    gloo has carried it keeps. Another device's segment is in the snapshot too; torch gives this
    one, a "cpu", no index.
    """

    SEGMENT = 2 * 2**20

    def __init__(self) -> None:
        self.live = self.peak = self.reserved = 0
        self.lock = threading.RLock()

    def takes(self, more: int) -> None:
        with self.lock:
            self.live += more
            self.peak = max(self.peak, self.live)
            self.reserved = max(self.reserved, -(-self.live // self.SEGMENT) * self.SEGMENT)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.peak = self.live

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        found = {"allocated": self.peak, "active": self.peak, "reserved": self.reserved}
        return {f"{name}_bytes.all.peak": size for name, size in found.items()}

    def memory_snapshot(self) -> list[dict[str, Any]]:
        states = {"active_allocated": self.live, "inactive": self.reserved - self.live}
        blocks = [{"size": size, "state": state} for state, size in states.items()]
        another = {"device": 7, "blocks": [{"size": 2**40, "state": "inactive"}]}
        return [another, {"device": None, "blocks": blocks}]


class Machine:
    """One rank's host and device.

    lasts(op, bytes)  seconds of a call of NCCL
    cluster           says instead what everything takes
    """

    here: Machine

    def __init__(
        self, rank: int, lasts: Callable[[str, int], float], cluster: Cluster | None = None
    ) -> None:
        Machine.here = self
        self.cluster = cluster
        self.ends: list[float] = []  # of the nodes; of use where a cluster is stated
        self.rank, self.lasts, self.numbers = rank, lasts, itertools.count()
        self.pool: list[Chain] = []  # torch's streams
        self.queues = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or QUEUES)
        self.queued: dict[int, int] = {}  # queue of the device: the last node in it
        self.lock, self.local = threading.RLock(), threading.local()
        self.nodes: list[Node] = []
        self.wrong: list[str] = []  # races, meetings
        self.over: set[Any] = set()  # calls of gloo whose data is there: not waited for again
        self.contexts: set[int] = set()  # GPUs on which this process has made one
        self.inside = False  # a step
        self.main = threading.get_ident()
        self.defaults: dict[int, Stream] = {}
        self.communicators: dict[str, Chain] = {}
        self.turns: dict[tuple, int] = defaultdict(int)
        self.known: dict[int, tuple[weakref.ref, Memory]] = {}
        self.pinned: weakref.WeakSet = weakref.WeakSet()  # storages of the host: page-locked, and
        self.pageable: weakref.WeakSet = weakref.WeakSet()  # those that are page-locked if
        self.locked: dict[int, int] = {}  # their address is here: bytes
        self.allocator = Allocator()
        self.undo = contextlib.ExitStack()

    # ---- in place of what it stands for ------------------------------------------------------
    def put(self, where: Any, **values: Any) -> None:
        """Names of a module or of a class, until `remove`."""
        for name, value in values.items():
            self.undo.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, value)

    def remove(self) -> None:
        """The process is as it was before `install`."""
        self.undo.close()

    # ---- where a thread is -------------------------------------------------------------------
    def device(self) -> int:
        return getattr(self.local, "device", 0)

    def set_device(self, device: Any) -> None:
        self.local.device = device if isinstance(device, int) else device.index
        self.touch(self.local.device)

    def pooled(self) -> Chain:
        """The next of torch's streams, which after the last begin again with the first."""
        number = next(self.numbers)
        if number < POOL:
            self.pool.append(Chain(f"stream {number}", number % self.queues))
        return self.pool[number % POOL]

    def touch(self, index: int) -> None:
        self.contexts.add(index)

    def asks_here(self, what: str) -> None:
        """An event's own device does not count: CUDA makes a context on the thread's current one,
        the first where the thread has set none.
        """
        self.touch(self.device())
        self.complain(what)

    def stream(self, device: Any = None) -> Stream:
        stack = getattr(self.local, "stack", None)
        if stack:
            return stack[-1]
        index = self.device()
        self.touch(index)
        if index not in self.defaults:
            self.defaults[index] = Stream(name_of(index), Chain(f"default {index}", self.queues))
        return self.defaults[index]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """``torch.cuda.stream``: torch goes back to the device that was current before."""
        before = self.device()
        stack = self.local.__dict__.setdefault("stack", [])
        self.set_device(stream.index)
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()
            self.set_device(before)

    def apart(self) -> bool:
        """Whether this thread works for the host alone: it has chosen no stream."""
        return threading.get_ident() != self.main and not getattr(self.local, "stack", None)

    def thread(self) -> Chain:
        if not hasattr(self.local, "chain"):
            self.local.chain = Chain(f"host {threading.current_thread().name}")
        return self.local.chain

    # ---- order ---------------------------------------------------------------------------------
    def node(
        self, chain: Chain, *, seconds: float = 0.0, meets: tuple = (), label: str = ""
    ) -> int:
        """Launched by this thread, behind what is on the chain."""
        with self.lock:
            self.launch(chain)
            return self._put(chain, seconds, (), meets, label)

    def launch(self, chain: Chain) -> None:
        """What this thread does next on the chain comes after what the thread has done."""
        host = self.thread()
        host.count += 1
        host.knows[host.name] = host.count
        _merge(chain.knows, host.knows)

    def _put(
        self, chain: Chain, seconds: float, behind: tuple[int, ...], meets: tuple, label: str
    ) -> int:
        after = {chain.tail, self.thread().tail, *behind} - {-1}
        before = -1
        if chain.queue >= 0 and not meets:
            before = self.queued.get(chain.queue, -1)
            self.queued[chain.queue] = len(self.nodes)
        self.nodes.append(Node(chain.name, seconds, tuple(after), meets, label, before))
        self.ends.append(max((self.ends[at] for at in after), default=0.0) + seconds)
        chain.count += 1
        chain.knows[chain.name] = chain.count
        chain.tail = len(self.nodes) - 1
        return chain.tail

    def order(self, chain: Chain, event: Event, *, really: bool = True) -> None:
        """The chain goes on behind the event. really: the data that gloo carries is there too."""
        if event.node < 0:
            return  # never recorded: CUDA does not wait
        if really:
            for work in event.works:
                if work not in self.over:
                    work.wait()
                    self.over.add(work)
        with self.lock:
            self.launch(chain)
            self._put(chain, 0.0, (event.node,), (), "wait")
            _merge(chain.knows, event.knows)

    def tell(self) -> tuple[int, dict[str, int]]:
        """What this thread of the host knows, for another one."""
        with self.lock:
            host = self.thread()
            return self._put(host, 0.0, (), (), "tells"), dict(host.knows)

    def hear(self, told: tuple[int, dict[str, int]]) -> None:
        with self.lock:
            host = self.thread()
            self._put(host, 0.0, (told[0],), (), "hears")
            _merge(host.knows, told[1])

    def works(self, seconds: float, label: str) -> None:
        """The current stream computes for so long."""
        self.node(self.stream().chain, seconds=seconds, label=label)

    def now(self) -> float:
        """The host's clock."""
        tail = self.thread().tail
        return self.ends[tail] if tail >= 0 else 0.0

    def takes(self, name: str, args: tuple, tensors: list[Tensor], size: int) -> float:
        """Seconds of an operation on the stated cluster: its launch, and the arithmetic of a
        product or the ``size`` bytes that any other reads and writes; a copy over the link to the
        host.
        """
        cluster = self.cluster
        if any(self.memory(t).home == "" for t in tensors):
            assert name == "aten::copy_", f"the virtual device does not time {name} over the link"
            return cluster.host.seconds(size / 2)
        assert "attention" not in name, f"the virtual device does not time {name}"
        if name.startswith("c10d::"):
            return 0.0  # gloo's part of a call of NCCL
        if name not in PRODUCTS:
            return cluster.op_overhead + size / cluster.memory_bandwidth
        a, b = [t for t in args if isinstance(t, Tensor)][-2:]
        kind = 0 if b.stride(-2) == 1 else 2 if a.stride(-2) == 1 else 1  # x W^T, g W, g^T x
        low = "tf32" if torch.backends.cuda.matmul.allow_tf32 else ""
        rates = cluster.products.get(PRECISIONS.get(a.dtype, low), (cluster.flops,) * 3)
        odd = any(n % 2 for n in (a.shape[-1], b.shape[-1])) and a.dtype in PRECISIONS
        few = 1 + cluster.half_rate_tokens / a.shape[-1 if kind == 2 else -2]
        rate = rates[kind] * (cluster.odd_products if odd else 1)
        return cluster.op_overhead + 2 * a.numel() * b.shape[-1] * few / rate

    def sends(self, op: str, size: int, n: int) -> float:
        """Seconds of a call of NCCL on the stated cluster."""
        op = "send" if op == "message" else op
        payload = size * n if op == "reduce_scatter" else size
        return self.cluster.call(op, most_sent(op, payload, n), Reach(n, n, 1))[1]

    def meeting(self, what: str) -> None:
        """The host waits for what is on the current stream."""
        chain = self.stream().chain
        with self.lock:
            self.launch(chain)
            self._put(chain, 0.0, (), (), "is waited for")
            self._put(self.thread(), 0.0, (chain.tail,), (), "waits")
            _merge(self.thread().knows, chain.knows)
        self.complain(what)

    def complain(self, what: str) -> None:
        if self.inside and threading.get_ident() == self.main:
            frames = traceback_of(sys._getframe(1))
            self.wrong.append(f"inside a step host and device meet: {what} ({frames})")

    # ---- memory --------------------------------------------------------------------------------
    def memory(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        address = storage._cdata
        found = self.known.get(address)
        if found is None or found[0]() is not storage:
            host = self.apart() or storage in self.pinned or storage in self.pageable
            memory = Memory("" if host else self.stream().chain.name)
            gone = weakref.ref(storage, lambda _: self.freed(memory))
            found = self.known[address] = gone, memory
        memory = found[1]
        if memory.home and (size := _blocks(storage.nbytes())) != memory.size:
            self.allocator.takes(size - memory.size)
            memory.size = size
        return memory

    def slow(self, tensor: Tensor) -> bool:
        """Whether a copy between this memory of the host's and the device holds up the host."""
        storage = tensor.untyped_storage()
        return storage in self.pageable and storage.data_ptr() not in self.locked

    def register(self, address: int, size: int, flags: int) -> int:
        """``cudaHostRegister``: by the page, each of them once."""
        pages = range(address // PAGE, -(-(address + size) // PAGE))
        for other, length in self.locked.items():
            taken = range(other // PAGE, -(-(other + length) // PAGE))
            apart = pages[-1] < taken[0] or taken[-1] < pages[0]
            assert apart, "cudaErrorHostMemoryAlreadyRegistered"
        self.locked[address] = size
        return 0

    def unregister(self, address: int) -> int:
        """``cudaHostUnregister``."""
        del self.locked[address]
        return 0

    def touched(
        self, what: str, reads: Iterable[Memory], writes: Iterable[Memory], chain: Chain,
        place: int, knows: dict[str, int],
    ) -> None:  # fmt: skip
        """An operation on a chain looks for what may still be in flight on others."""
        with self.lock:
            for touched, write in ((reads, False), (writes, True)):
                for memory in touched:
                    others = (*memory.wrote.items(), *(memory.read.items() if write else ()))
                    for other, (at, by) in others:
                        if other != chain.name and knows.get(other, 0) < at:
                            self.wrong.append(f"{what} on {chain.name} may run beside {by} on "
                                              f"{other}, which uses the same memory")  # fmt: skip
                    (memory.wrote if write else memory.read)[chain.name] = place, what

    def freed(self, memory: Memory) -> None:
        """Its allocator may give it to what is launched next on the stream that it was made on."""
        if not memory.home:
            return
        self.allocator.takes(-memory.size)
        with self.lock:
            home = next((s.chain for s in self.defaults.values()
                         if s.chain.name == memory.home), None)  # fmt: skip
            for other, (at, by) in [*memory.wrote.items(), *memory.read.items()]:
                known = dict(self.thread().knows)  # what is launched from now on comes after it
                _merge(known, home.knows if home is not None else {})
                if (
                    not other.startswith("host")
                    and other != memory.home
                    and known.get(other, 0) < at
                ):
                    self.wrong.append(f"memory of {memory.home} is freed while {by} on {other} "
                                      "may still use it")  # fmt: skip

    def watching(self) -> TorchDispatchMode:
        return _Watch(self)

    # ---- NCCL ------------------------------------------------------------------------------------
    def call(
        self, group: Any, op: str, keys: Sequence[tuple], reads: list, writes: list, real: Any
    ) -> Work:
        """A call on a group's communicator, behind what the current stream has so far."""
        with self.lock:
            name = group.group_name
            if name not in self.communicators:  # all its members have to come, and their hosts wait
                self.complain("NCCL connects a communicator")
                self.communicators[name] = self.pooled()
            chain = self.communicators[name]
            self.order(chain, self.stream().record_event(), really=False)
            meets = []
            for key in keys:
                self.turns[name, *key] += 1
                meets.append((name, *key, self.turns[name, *key]))
            size = sum(t.nbytes for t in (writes or reads))
            timed = self.cluster is not None
            seconds = self.sends(op, size, group.size()) if timed else self.lasts(op, size)
            at = self.node(chain, seconds=seconds, meets=tuple(meets), label=op)
            if timed:
                self.ends[at] = _together(group, keys, self.ends[at] - seconds) + seconds
            both = map(self.memory, reads), map(self.memory, writes)
            self.touched(op, *both, chain, chain.count, chain.knows)
            return Work(chain.tail, dict(chain.knows), real)


def _blocks(size: int) -> int:
    return -(-size // 512) * 512  # the allocator's grain


def _together(group: Any, keys: Sequence[tuple], moment: float) -> float:
    """When the last member of a call comes to it."""
    with torch.utils._python_dispatch._disable_current_modes():
        mine = torch.tensor(moment, dtype=torch.float64)
        if keys == [("",)]:
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
            return mine.item()
        (key,), theirs = keys, torch.zeros_like(mine)  # of one peer: no more is modelled
        peer = key[0] if key[1] == dist.get_rank() else key[1]
        sent = dist.isend(mine, peer, group=group, tag=1)
        dist.recv(theirs, peer, group=group, tag=1)
        sent.wait()
        return max(mine.item(), theirs.item())


def _merge(known: dict[str, int], more: dict[str, int]) -> None:
    for chain, count in more.items():
        if known.get(chain, 0) < count:
            known[chain] = count


def traceback_of(frame: Any) -> str:
    """The nearest lines of paralab."""
    found = []
    while frame is not None and len(found) < 3:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("paralab"):
            found.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return ", ".join(found)


class _Watch(TorchDispatchMode):
    """Every operation of torch on this thread reads and writes memory on its current stream."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        machine, op = self.machine, _operation(func)
        made = func(*args, **(kwargs or {}))
        if op.meets and not _on_host(machine, args):
            machine.meeting(op.name)
        if not op.looks:
            for tensor in tensors(made):
                machine.memory(tensor)  # made on this stream
            return made
        reads, writes = [], []
        for number, (name, written) in enumerate(op.arguments):
            value = args[number] if number < len(args) else (kwargs or {}).get(name)
            (writes if written else reads).extend(filter(_is, tensors(value)))
        read = [machine.memory(tensor) for tensor in reads]
        wrote = [machine.memory(tensor) for tensor in writes]
        anew = [t for t in filter(_is, tensors(made)) if machine.memory(t) not in (*read, *wrote)]
        wrote += map(machine.memory, anew)
        both = [*read, *wrote]
        if both and (machine.apart() or all(memory.home == "" for memory in both)):
            chain = machine.thread()
            machine.touched(op.name, read, wrote, chain, chain.count + 1, chain.knows)
        else:
            chain = machine.stream().chain
            with machine.lock:
                place = chain.count + 1
                if machine.cluster is None:
                    machine.launch(chain)
                else:
                    some = [*reads, *writes, *anew]
                    looked_at = [*some, *(() if op.name in OVERWRITES else writes)]
                    size = sum(t.nbytes for t in looked_at)
                    seconds = machine.takes(op.name, args, some, size)
                    machine.node(chain, seconds=seconds, label=op.name)
                machine.touched(op.name, read, wrote, chain, place, chain.knows)
        if any(map(machine.slow, (*reads, *writes))) and any(memory.home for memory in both):
            machine.meeting("a copy of memory that is not page-locked")
        if op.name == "aten::copy_" and _stands_still(machine, args, kwargs or {}):
            machine.meeting("a copy over the link that is not asynchronous")
        return made


class _Operation(NamedTuple):
    """An operation of torch: its arguments' names, and whether each is written; whether the host
    waits for it; whether it looks at an element.
    """

    name: str
    arguments: list[tuple[str, bool]]
    meets: bool
    looks: bool


@functools.cache
def _operation(func: Any) -> _Operation:
    schema = func._schema
    aliases = [(argument.name, argument.alias_info) for argument in schema.arguments]
    arguments = [(name, alias is not None and alias.is_write) for name, alias in aliases]
    meets = any(name in schema.name for name in MEETS)
    return _Operation(schema.name, arguments, meets, not func.is_view and schema.name not in FREE)


def _stands_still(machine: Machine, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a copy holds up the host: between it and the device, and not asked to be
    asynchronous.
    """
    beside = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return not beside and _on_host(machine, args[0]) != _on_host(machine, args[1])


def _is(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _on_host(machine: Machine, values: Any) -> bool:
    """Whether this is the host's own work: its lane's, or on page-locked memory alone."""
    if machine.apart():
        return True
    some = [t for t in tensors(values) if _is(t)]
    return bool(some) and all(machine.memory(t).home == "" for t in some)


# ---- in place of torch's -------------------------------------------------------------------------
def install(
    rank: int,
    lasts: Callable[[str, int], float] = lambda op, size: 0.0,
    cluster: Cluster | None = None,
) -> Machine:
    """Give this process a virtual GPU of its own, number ``rank``, and NCCL, until `remove`."""
    from paralab import comm, transports
    from paralab.instruments import marks
    from paralab.interpret import host, lanes, run

    machine = Machine(rank, lasts, cluster)
    if cluster is not None:
        machine.put(marks, time=SimpleNamespace(perf_counter=machine.now))
    cuda = _Refusing(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        current_stream=machine.stream,
        current_device=machine.device,
        stream=machine.on,
        set_device=machine.set_device,
        device_count=lambda: 1,
        get_allocator_backend=lambda: "native",
        reset_peak_memory_stats=machine.allocator.reset_peak_memory_stats,
        memory_stats=machine.allocator.memory_stats,
        memory_snapshot=machine.allocator.memory_snapshot,
        cudart=lambda: SimpleNamespace(
            cudaHostRegister=machine.register, cudaHostUnregister=machine.unregister
        ),
        check_error=_checked,
        synchronize=lambda device=None: machine.meeting("the device is waited for"),
    )
    machine.put(torch, cuda=cuda)
    machine.set_device(rank)
    _pin(machine)
    _nccl(machine, comm, transports)
    _threads(machine, lanes, host)
    _steps(machine, run)
    machine.undo.enter_context(machine.watching())
    return machine


class _Refusing:
    """``torch.cuda`` for paralab and tests; torch's own modules see the real one."""

    def __init__(self, real: Any, **modelled: Any) -> None:
        self.__dict__.update(modelled)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch"):
            return getattr(self._real, name)
        raise AttributeError(f"the virtual device does not model torch.cuda.{name}")


def _checked(code: int) -> None:
    if code:
        raise RuntimeError(f"out of memory ({code})")


def _pin(machine: Machine) -> None:
    make = torch.empty

    def of_the_host(make: Callable[..., Tensor], kind: weakref.WeakSet) -> Callable[..., Tensor]:
        def made(*given: Any, **how: Any) -> Tensor:
            with torch.utils._python_dispatch._disable_current_modes():  # or it is the device's
                tensor = make(*given, **how)
            kind.add(tensor.untyped_storage())
            return tensor

        return made

    def empty(*shape: Any, pin_memory: bool = False, **how: Any) -> Tensor:
        return (locked if pin_memory else make)(*shape, **how)

    def to(tensor: Tensor, *given: Any, **how: Any) -> Tensor:
        if given and isinstance(given[0], Name) and _on_host(machine, tensor):
            return make(tensor.shape, dtype=tensor.dtype).copy_(tensor, **how)
        return plain(tensor, *given, **how)

    plain = torch.Tensor.to  # which has nothing to do: torch knows both as memory of a CPU
    machine.put(torch.Tensor, to=to)
    locked, wraps = of_the_host(make, machine.pinned), {}
    for name in ("frombuffer", "from_numpy"):
        wraps[name] = of_the_host(getattr(torch, name), machine.pageable)
    machine.put(torch, empty=empty, **wraps)


def _nccl(machine: Machine, comm: Any, transports: Any) -> None:
    def all_reduce(tensor: Tensor, *, group: Any, async_op: bool) -> Work:
        with torch.utils._python_dispatch._disable_current_modes():
            whole = tensor.clone()
        work = dist.all_reduce(whole, group=group, async_op=True)
        given = weakref.ref(tensor)  # NCCL keeps nothing of a call whose ``wait`` has been called
        real = _Then(work, lambda: None if given() is None else given().copy_(whole))
        return machine.call(group, "all_reduce", [("",)], [], [tensor], real)

    def broadcast(tensor: Tensor, root: int, *, group: Any, async_op: bool) -> Work:
        real = dist.broadcast(tensor, root, group=group, async_op=True)
        return machine.call(group, "broadcast", [("",)], [], [tensor], real)

    def reduce(tensor: Tensor, root: int, *, group: Any, async_op: bool) -> Work:
        whole = tensor.clone()  # gloo leaves partial sums on the others
        work = dist.all_reduce(whole, group=group, async_op=True)
        mine = dist.get_rank() == root
        real = _Then(work, lambda: tensor.copy_(whole) if mine else None)
        return machine.call(group, "reduce", [("",)], [tensor], [tensor] * mine, real)

    def all_to_all_single(output: Tensor, tensor: Tensor, *, group: Any, async_op: bool) -> Work:
        real = dist.all_to_all_single(output, tensor, group=group, async_op=True)
        return machine.call(group, "all_to_all", [("",)], [tensor], [output], real)

    def all_gather(output: Tensor, part: Tensor, *, group: Any, async_op: bool) -> Work:
        real = gather(output, part, group=group, async_op=True)
        return machine.call(group, "all_gather", [("",)], [part], [output], real)

    def reduce_scatter(output: Tensor, tensor: Tensor, *, group: Any, async_op: bool) -> Work:
        received = tensor.new_empty(tensor.shape)
        work = dist.all_to_all_single(received, tensor, group=group, async_op=True)
        parts = received.view(dist.get_world_size(group), -1)
        real = _Then(work, lambda: output.view(-1).copy_(parts.sum(0)))
        return machine.call(group, "reduce_scatter", [("",)], [tensor], [output], real)

    def batch_isend_irecv(ops: list[Any]) -> list[Work]:
        group, me = ops[0].group, dist.get_rank()
        real = _All(dist.batch_isend_irecv(ops))
        sends = [(one.tensor, one.peer) for one in ops if one.op is dist.isend]
        takes = [(one.tensor, one.peer) for one in ops if one.op is not dist.isend]
        keys = [(me, peer) for _, peer in sends] + [(peer, me) for _, peer in takes]
        both = [[tensor for tensor, _ in some] for some in (sends, takes)]
        return [machine.call(group, "message", keys, *both, real)]

    gather = transports.FUNCTIONS["all_gather"]
    machine.undo.callback(transports.FUNCTIONS.update, dict(transports.FUNCTIONS))
    transports.FUNCTIONS.update(
        all_reduce=all_reduce,
        all_gather=all_gather,
        all_to_all=all_to_all_single,
        reduce_scatter=reduce_scatter,
        broadcast=broadcast,
        reduce=reduce,
    )
    messages = SimpleNamespace(
        batch_isend_irecv=batch_isend_irecv, isend=dist.isend, irecv=dist.irecv, P2POp=dist.P2POp
    )
    groups = SimpleNamespace(
        group=dist.group, new_group=dist.new_group, ProcessGroup=dist.ProcessGroup
    )
    machine.put(transports, dist=messages)
    machine.put(comm, dist=groups)


class _Then:
    """A call of gloo, and what is left to do when it is over. Waited for as often as one likes."""

    def __init__(self, work: Any, finish: Callable[[], Any]) -> None:
        self.work, self.finish, self.lock = work, finish, threading.Lock()

    def wait(self) -> None:
        with self.lock:
            if self.work is not None:
                self.work.wait()
                with torch.utils._python_dispatch._disable_current_modes():
                    self.finish()
                self.work = None


class _All(_Then):
    def __init__(self, works: list[Any]) -> None:
        super().__init__(self, lambda: None)
        self.works = works

    def wait(self) -> None:
        with self.lock:
            while self.works:
                self.works.pop().wait()


def _threads(machine: Machine, lanes: Any, host: Any) -> None:
    """Threads of the host hear of each other by these."""

    class Told(threading.Event):
        def set(self) -> None:
            if not self.is_set():  # the first lets those go that wait
                self.told = machine.tell()
            super().set()

        def wait(self, timeout: float | None = None) -> bool:
            found = super().wait(timeout)
            machine.hear(self.told)
            return found

    class Queue:
        def __init__(self) -> None:
            self.items: deque = deque()
            self.there = threading.Semaphore(0)

        def put(self, item: Any) -> None:
            self.items.append((machine.tell(), item))
            self.there.release()

        def get(self) -> Any:
            self.there.acquire()
            told, item = self.items.popleft()
            machine.hear(told)
            return item

    told = SimpleNamespace(Event=Told, Thread=threading.Thread)
    machine.put(lanes, threading=told, SimpleQueue=Queue)

    def watched(method: Callable) -> Callable:
        def call(lane: Any, job: Any) -> None:
            with machine.watching():
                method(lane, job)

        return call

    machine.put(lanes.Lane, _do=watched(lanes.Lane._do), _issue=watched(lanes.Lane._issue))
    for method, write in (("read", True), ("write", False)):
        plain = getattr(host.Files, method)

        def touching(files: Any, name: str, tensor: Tensor, *, plain=plain, write=write) -> None:
            chain = machine.thread()
            memory = machine.memory(tensor)
            both = ([], [memory]) if write else ([memory], [])
            machine.touched("a file", *both, chain, chain.count + 1, chain.knows)
            plain(files, name, tensor)

        machine.put(host.Files, **{method: touching})


def _steps(machine: Machine, run: Any) -> None:
    plain = run.Rank.step

    def step(rank: Any, batches: Any) -> Any:
        machine.inside = True
        try:
            return plain(rank, batches)
        finally:
            machine.inside = False

    machine.put(run.Rank, step=step)


# ---- all ranks -----------------------------------------------------------------------------------
class Moments(NamedTuple):
    """Per rank and node when it begins and ends, seconds."""

    start: list[list[float]]
    end: list[list[float]]


def solve(graphs: Sequence[Sequence[Node]]) -> Moments:
    """When everything happens. Raises ValueError where ranks wait for each other in a circle."""
    first = list(itertools.accumulate((len(graph) for graph in graphs), initial=0))
    every = [(first[r], node) for r, graph in enumerate(graphs) for node in graph]
    after = [[base + at for at in node.after] for base, node in every]
    queued = [[base + node.queued] * (node.queued >= 0) for base, node in every]
    head = list(range(len(every)))  # of those that start together, the one they are found by

    def find(at: int) -> int:
        while head[at] != at:
            head[at] = at = head[head[at]]
        return at

    by_key: dict[tuple, int] = {}
    for at, (_, node) in enumerate(every):
        for key in node.meets:
            head[find(at)] = find(by_key.setdefault(key, at))
    members: dict[int, list[int]] = defaultdict(list)
    for at in range(len(every)):
        members[find(at)].append(at)
    needs = {
        one: {find(b) for at in some for b in (*after[at], *queued[at])}
        for one, some in members.items()
    }
    start, end = [0.0] * len(every), [0.0] * len(every)
    for one in TopologicalSorter(needs).static_order():
        some = members[one]
        waits = [end[b] for at in some for b in after[at]]
        begin = max([0.0, *waits, *(start[b] for at in some for b in queued[at])])
        until = begin + max(every[at][1].seconds for at in some)
        for at in some:
            start[at], end[at] = begin, until
    cut = [slice(a, b) for a, b in itertools.pairwise(first)]
    return Moments([start[c] for c in cut], [end[c] for c in cut])
