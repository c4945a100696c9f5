"""Observe a program that was not written for paralab: its calls, its spans, its steps, its memory.

Nothing of the program changes. What sees it, and what that costs:

    collectives    every operation ``c10d.*`` gets a kernel in front of its own, for as long as the
                   observation lasts. All of torch passes there: DistributedDataParallel's reducer
                   in C++, FSDP2, DTensor and its ``_c10d_functional.*``, pipelining, raw calls.
                   About 30 us per call, on no other operation
    waits          ``Work.wait`` and ``_c10d_functional.wait_tensor``: a few us per wait
    spans          ``Module.__call__``, the autograd engine's ``run_backward`` and hooks of
                   optimizers: a few us per outermost call, 0.3 us per inner one
    memory         the live ledger, a dispatch mode on every operation: 5 to 20 % of a step. It is
                   on in the first ``memory_steps`` steps; later steps are timed without it

[Note: before] The kernel that sees a call is one of the dispatch key BackendSelect, which lies
below autograd and the dispatch modes and above the devices' own kernels: the call passes there on
every thread, from Python and C++, inside modes and DTensor. Redispatching gives Python's lock back,
which gloo's threads need to end a call.

[Note: destroyed] Gloo's thread drops a finished call with Python's lock, and the end of a process
group waits for that thread with the lock in its hand. So the group is destroyed when the threads
have had time.

[Note: ends] A collective of gloo or NCCL says when it ends; gloo's sends, receives and
reduce-scatters do not. Their span ends when the rank has waited for them. The reducer of
DistributedDataParallel waits in C++: what follows its last launch in a backward counts as the wait.

[Note: gloo] Rows say what leaves the rank. Gloo's own reduce-scatter is n all-reduces, which also
gathers what no rank asked for: these bytes are a row of their own, an all-gather of the phase
``SURPLUS``. Its reduce is a reduce-scatter whose parts are then sent to the root.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey
from torch.distributed.device_mesh import DeviceMesh
from torch.library import Library
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from paralab.checks import illegal
from paralab.instruments.foreign_ledger import ForeignLedger
from paralab.instruments.recorder import Recorder
from paralab.theory.traffic import BOOKKEEPING, POINT_TO_POINT, ROOTED, wire_bytes

SURPLUS = "gloo surplus"  # phase of bytes that gloo sends and the operation does not need
BY_HAND = "call paralab.step() where a step ends, and observe with steps='marked'"
INDICES = 4096  # bytes of whole numbers that are bookkeeping
PATIENCE = 0.05  # seconds for threads to let go of the last calls

# {c10d's operation: the argument that is the whole payload}, by the ledger's name
CALLS = {
    "all_reduce": {"allreduce_": "tensors", "allreduce_coalesced_": "tensors"},
    "all_gather": {"allgather_": "output_tensors", "_allgather_base_": "output_tensor",
                   "allgather_coalesced_": "output_lists",
                   "allgather_into_tensor_coalesced_": "outputs"},
    "reduce_scatter": {"reduce_scatter_": "input_tensors", "_reduce_scatter_base_": "input_tensor",
                       "reduce_scatter_tensor_coalesced_": "inputs"},
    "all_to_all": {"alltoall_": "input_tensors", "alltoall_base_": "input"},
    "broadcast": {"broadcast_": "tensors"}, "reduce": {"reduce_": "tensors"},
    "gather": {"gather_": "input_tensors"}, "scatter": {"scatter_": "output_tensors"},
    "send": {"send": "tensors"}, "recv": {"recv_": "tensors", "recv_any_source_": "tensors"},
    "barrier": {"barrier": "tensor"},
}  # fmt: skip
PEER = ("root_rank", "dst", "src")  # a position in the group


class Where(NamedTuple):
    """A process group: its axis, global ranks, this rank's position, its level, whether gloo's."""

    axis: str
    ranks: tuple[int, ...]
    index: int
    level: str
    gloo: bool


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
        nodes: tuple[int, ...],
        device: str = "cpu",
        memory_steps: int = 2,
        marked: bool = False,
        existing: bool = False,
    ) -> None:
        self.recorder, self.nodes, self.marked, self.existing = recorder, nodes, marked, existing
        self.memory_steps, self.device = memory_steps, device
        self.ledger = ForeignLedger(recorder, device=device) if memory_steps else None
        self.step = 0  # the step that is open, or comes next
        self.open = self.found = False  # inside a step; a forward, backward or optimizer was met
        self.forwards = self.backwards = self.updates = 0  # how deep inside each
        self.about: dict[str, Any] = {"modules": [], "parameters": []}
        self._thread, self._undo = threading.get_ident(), contextlib.ExitStack()
        self._optimizer: Any = None  # the one that steps
        self._calls: Counter[Where] = Counter()
        self._numbers: Counter[Any] = Counter()  # a module's forwards, and backwards, in this step
        self._groups: dict[str, Where] = {}
        self._meshes: list[Any] = []
        self._works: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._held: Any = None  # the last call's Work, until its caller has it
        self._flying: dict[int, Any] = {}  # a backward's calls: weak references to their Work
        self._by_storage: dict[int, int] = {}  # span of the last call that used a storage
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # modules called by the program
        self._named: set[int] = set()  # ids of parameters described

    # ---- on and off ---------------------------------------------------------------------------
    def __enter__(self) -> Observer:
        for op, operations in CALLS.items():
            for name, payload in operations.items():
                self._stand_before("c10d", name, functools.partial(self._called, op, payload))
        self._stand_before("_c10d_functional", "wait_tensor", self._awaited)
        ddp = torch.nn.parallel.DistributedDataParallel
        self._around(dist.Reducer, "_rebuild_buckets", self._bucketing)
        self._around(ddp, "_ddp_init_helper", self._bucketing)
        self._around(torch._C._distributed_c10d.Work, "wait", self._waiting)
        self._around(torch.nn.Module, "__call__", self._forward)
        self._around(DeviceMesh, "__init__", self._meshing)
        for module in (dist, dist.distributed_c10d):
            self._around(module, "destroy_process_group", self._destroying)
        variable = torch.autograd.Variable
        self._undo.callback(setattr, variable, "_execution_engine", variable._execution_engine)
        variable._execution_engine = _Engine(variable._execution_engine, self)
        for register, hook in (
            (optimizers.register_optimizer_step_pre_hook, self._update),
            (optimizers.register_optimizer_step_post_hook, self._updated),
        ):
            self._undo.callback(register(hook).remove)
        if self.ledger is not None:
            self.ledger.before_each = self._let_go
            self.ledger.__enter__()
            if self.existing:
                self.ledger.adopt(gc.get_objects())
        self.recorder.clock.anchor()
        self._zero = self.recorder.clock.mark()
        self.recorder.enter("compute")
        return self

    def __exit__(self, *raised: Any) -> None:
        self._close_ledger()
        self._undo.close()

    def _around(self, owner: Any, name: str, block: Callable[..., Any]) -> None:
        """Call ``owner.name`` within ``with block(*its arguments)``."""
        own = getattr(owner, name)

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            with block(*args):
                return own(*args, **kwargs)

        self._undo.callback(setattr, owner, name, own)
        setattr(owner, name, call)

    def _stand_before(self, namespace: str, name: str, seen: Callable[..., Any]) -> None:
        """See the calls of operation ``name``. See [Note: before]."""
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is None:  # another version of torch
            return
        names = [argument.name for argument in packet.default._schema.arguments]

        def kernel(keys: Any, *args: Any) -> Any:
            below = keys.remove(DispatchKey.BackendSelect)
            own = functools.partial(packet.default.redispatch, below, *args)
            return seen(dict(zip(names, args, strict=False)), own)

        library = Library(namespace, "IMPL")
        self._undo.callback(library._destroy)
        library.impl(name, kernel, "BackendSelect", with_keyset=True)

    def _bucketing(self, *_: Any) -> Any:
        return contextlib.nullcontext() if self.ledger is None else self.ledger.buckets()

    @contextlib.contextmanager
    def _meshing(self, mesh: Any, *_: Any) -> Iterator[None]:
        yield
        self._meshes.append(weakref.ref(mesh))
        self._groups.clear()  # one of its dimensions may name a group that there is already

    def _destroying(self, *_: Any) -> Any:
        """See [Note: destroyed]."""
        time.sleep(PATIENCE)
        return contextlib.nullcontext()

    def _close_ledger(self) -> None:
        """The ledger goes, unless the program has put a dispatch mode of its own above it."""
        if self.ledger is not None and _get_current_dispatch_mode() is self.ledger:
            self.ledger.__exit__(None, None, None)
            self.ledger = None

    def _let_go(self) -> None:
        self._held = None

    # ---- collectives --------------------------------------------------------------------------
    def _called(self, op: str, payload: str, given: dict[str, Any], own: Callable[[], Any]) -> Any:
        """One call of c10d, on whatever thread: write it down, make it, hear of its end."""
        recorder = self.recorder
        tensors = [t for t in tree_leaves(given[payload]) if isinstance(t, Tensor)]
        if self.found or op in POINT_TO_POINT:  # a pipeline's later stages begin with a message
            self._begin()
        mine = threading.get_ident() == self._thread or self.backwards
        after = recorder.cut() if mine else ()
        if op == "barrier":
            return own()
        where = self._where(dist.ProcessGroup.unbox(given["process_group"]))
        span = recorder.launch(f"comm:{where.axis}", after, recorder.clock.mark())
        number, self._calls[where] = self._calls[where], self._calls[where] + 1
        phase = self._phase(tensors)
        for row in self._rows(op, given, tensors, where):
            recorder.call((number, *self._row(where, phase, *row), span))
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor):
                self._by_storage[leaf.untyped_storage()._cdata] = span
                if self.ledger is not None:
                    self.ledger.carries(leaf)
        result = own()
        last = result[-1] if isinstance(result, (tuple, list)) else result
        work = self._held = dist.Work.unbox(last)
        self._works[work] = span
        if self.backwards:
            self._flying[span] = weakref.ref(work)
        if self.device == "cpu":
            self._listen(work, span)
        return result

    def _listen(self, work: Any, span: int) -> None:
        """Hear of the end of a call, where someone says it. See [Note: ends]."""
        recorder = self.recorder
        with contextlib.suppress(RuntimeError):
            future = work.get_future()
            future.add_done_callback(lambda _: recorder.completed(span, recorder.clock.host()))

    def _rows(
        self, op: str, given: dict[str, Any], tensors: list[Tensor], where: Where
    ) -> list[tuple]:
        """What one call sends: operation, payload bytes, root or peer, phase if it is its own."""
        rank, size = self.recorder.rank, sum(t.nbytes for t in tensors)
        position = next((given[name] for name in PEER if name in given), None)
        peer = -1 if position is None else where.ranks[position]
        others = [r for r in where.ranks if r != rank]
        inwards = [("recv", r) for r in others] if rank == peer else [("send", peer)]
        outwards = [("send", r) for r in others] if rank == peer else [("recv", peer)]
        if op in ("gather", "scatter"):
            return [(side, size, r) for side, r in (inwards if op == "gather" else outwards)]
        if op == "all_to_all" and (uneven := _uneven(given, tensors, where)):
            return [("send", uneven[r], r) for r in others]
        if op == "reduce" and where.gloo:
            part = size // len(where.ranks)
            return [("reduce_scatter", size, -1), *((side, part, r) for side, r in inwards)]
        if op == "reduce_scatter" and where.gloo and others:
            return [(op, size, -1), ("all_gather", size, -1, SURPLUS)]
        return [(op, size, peer)]

    def _row(
        self, where: Where, phase: str, op: str, size: int, peer: int, own_phase: str = ""
    ) -> tuple:
        axis, ranks, index, level, _ = where
        if op in POINT_TO_POINT and peer >= 0:
            level = self._level((self.recorder.rank, peer))
        wire = wire_bytes(op, size, len(ranks), index, ranks.index(peer) if op in ROOTED else 0)
        if own_phase and phase not in BOOKKEEPING:
            phase = own_phase
        return op, axis, ranks, peer, level, phase, size, wire

    def _phase(self, tensors: list[Tensor]) -> str:
        if not self.found:
            return "setup"
        numbers = any(t.is_floating_point() or t.is_complex() for t in tensors)
        few = sum(t.numel() for t in tensors) <= 1  # a norm, a loss, a flag
        if few or (not numbers and sum(t.nbytes for t in tensors) <= INDICES):
            return "control"
        if self.updates:
            return "optimizer"
        return "backward" if self.backwards else "forward" if self.forwards else "data"

    def _where(self, group: Any) -> Where:
        """The group's axis: the name of its mesh dimension, of the group, or its ranks."""
        name = group.group_name
        if name not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            axis = _mesh_dimension(self._meshes, name) or group.group_desc.removeprefix("mesh_")
            if axis in ("default_pg", "undefined", "default", ""):
                every = len(ranks) == self.recorder.world_size
                axis = "world" if every else f"ranks {','.join(map(str, ranks))}"
            index, device = ranks.index(self.recorder.rank), torch.device(self.device)
            gloo = group._get_backend(device).name() == "gloo"
            self._groups[name] = Where(axis, ranks, index, self._level(ranks), gloo)
        return self._groups[name]

    def _level(self, ranks: tuple[int, ...]) -> str:
        return "inter" if len({self.nodes[r] for r in ranks}) > 1 else "intra"

    # ---- waits --------------------------------------------------------------------------------
    def _waiting(self, work: Any, *_: Any) -> Any:
        self._held = None
        if threading.get_ident() != self._thread and not self.backwards:
            return contextlib.nullcontext()
        return self._wait(self._works.pop(work, None))

    def _awaited(self, given: dict[str, Any], own: Callable[[], Any]) -> Any:
        """``_c10d_functional.wait_tensor``: known by the storage that the call works on."""
        with self._wait(self._by_storage.get(given["tensor"].untyped_storage()._cdata)):
            return own()

    @contextlib.contextmanager
    def _wait(self, span: int | None) -> Iterator[None]:
        self.recorder.enter("wait", after=() if span is None else (span,))
        try:
            yield
        finally:
            self.recorder.leave()
            if span is not None:
                self._flying.pop(span, None)
                self._end(span)

    def _end(self, span: int) -> None:
        """The wait for ``span`` is over: on a GPU its end is a moment of the device."""
        if self.device == "cpu":
            self.recorder.settled(span)
        else:
            self.recorder.completed(span, self.recorder.clock.mark())

    # ---- steps --------------------------------------------------------------------------------
    def _begin(self) -> None:
        """Something of a step happens; before the first one was the setup."""
        if self.open:
            return
        if not self.found:
            self.recorder.leave()
            self.recorder.forget("compute")
        self.open = self.found = True
        self.recorder.begin_step(self.step)
        self.recorder.enter("compute")

    def end_step(self) -> None:
        """The program says, or an optimizer, that a step is over."""
        recorder = self.recorder
        if self.found and not self.open:
            return  # the optimizer's step ended it
        recorder.leave()
        if not self.found:  # raw calls alone: all that was, was the step
            self.about["from the start"] = self.found = True
            recorder.begin_step(0, keep=True)
        recorder.end_step()
        self.open = False
        self.step += 1
        self._numbers.clear()
        self._by_storage.clear()
        if self.step >= self.memory_steps:
            self._close_ledger()

    @contextlib.contextmanager
    def _forward(self, module: Any, *_: Any) -> Iterator[None]:
        """Around a module's call: the outermost is a forward."""
        if self.forwards or self.backwards or threading.get_ident() != self._thread:
            yield
            return
        self._begin()
        if module not in self._seen:
            self._seen.add(module)
            kinds = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}
            wrappers = {"DistributedDataParallel", "FSDPModule"} & kinds
            self.about["modules"] = sorted(wrappers.union(self.about["modules"]))
            if self.ledger is not None:
                self.ledger.owns("parameters", *module.parameters(), *module.buffers())
        self.recorder.enter("forward", self._numbers[id(module)])
        self._numbers[id(module)] += 1
        self.forwards += 1
        try:
            yield
        finally:
            self.forwards -= 1
            self.recorder.leave()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around the autograd engine's work."""
        if threading.get_ident() != self._thread or self.backwards:
            yield
            return
        self._begin()
        self.backwards += 1
        self._flying.clear()
        self.recorder.enter("backward", self._numbers["backward"])
        self._numbers["backward"] += 1
        try:
            yield
        finally:
            self._held = None
            # What C++ launched it has waited for: the reducer, at the end of the backward.
            spans = tuple(span for span, work in self._flying.items() if work() is None)
            if spans:
                self.recorder.was_waiting(spans)
            self.recorder.leave()
            for span in spans:
                self._end(span)
            self.backwards -= 1
            if self.ledger is not None:
                self.ledger.find_gradients()

    def _update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before an optimizer's step; within it, an inner one's."""
        if self.updates == 0:
            name, first = type(optimizer).__name__, self._optimizer or optimizer
            why = "it steps inside a backward, so it does not say where a training step ends"
            if not self.backwards:
                why = f"it steps besides a {type(first).__name__}: which of them ends a training "
                why += "step is not known"
            if not self.marked and (self.backwards or first is not optimizer):
                raise illegal("optimizer", name, why, BY_HAND)
            self._optimizer = optimizer
            self._begin()
            self._describe()
            if self.ledger is not None:
                self.ledger.find_gradients(optimizer)
            self.recorder.enter("optimizer")
        self.updates += 1

    def _updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.updates -= 1
        if self.ledger is not None:
            self.ledger.owns_state(optimizer)
        if self.updates == 0:
            self.recorder.leave()
            if not self.marked:
                self.end_step()

    # ---- the part -----------------------------------------------------------------------------
    def _describe(self) -> None:
        """The parameters of the modules met, at a moment when FSDP2 has gathered none."""
        for module in self._seen:
            for name, parameter in module.named_parameters():
                if id(parameter) not in self._named:
                    self._named.add(id(parameter))
                    self.about["parameters"].append(_described(name, parameter))

    def part(self) -> dict[str, Any]:
        """This rank's tables, when the program has ended.

        What follows the last step is left out; a program without steps is one step.
        """
        recorder = self.recorder
        self._describe()
        self.saw_nothing = not self.found and not self._calls
        if not self.found or (self.open and not self.step):
            self.end_step()
        elif self.open:
            recorder.leave()
            recorder.drop_step()
        tables = recorder.tables()
        if self.about.pop("from the start", False):
            calls, steps = tables["collectives"], tables["steps"]
            calls["phase"] = ["data" if p == "setup" else p for p in calls["phase"]]
            steps["start"][0] = recorder.clock.seconds(self._zero)
        return tables


class _Engine:
    """The autograd engine, with an observer around its work."""

    def __init__(self, engine: Any, observer: Observer) -> None:
        self._engine, self._observer = engine, observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with self._observer.backward():
            return self._engine.run_backward(*args, **kwargs)


def _uneven(given: dict[str, Any], tensors: list[Tensor], where: Where) -> dict[int, int]:
    """{rank: bytes for it} of an all-to-all whose parts are not alike; {} if they are."""
    splits = given.get("input_split_sizes") or [1]
    parts = [tensors[0].nbytes * split // max(sum(splits), 1) for split in splits]
    if len(tensors) > 1:
        parts = [t.nbytes for t in tensors]
    return {} if len(set(parts)) == 1 else dict(zip(where.ranks, parts, strict=True))


def _mesh_dimension(meshes: list[Any], group: str) -> str:
    """The name of the mesh dimension whose group this is."""
    for mesh in filter(None, (reference() for reference in meshes)):
        for name in mesh.mesh_dim_names or ():
            with contextlib.suppress(RuntimeError, KeyError, AssertionError):
                if mesh.get_group(name).group_name == group:
                    return name
    return ""


def _described(name: str, parameter: Tensor) -> dict[str, Any]:
    """A parameter in a report: name, elements in all and on this rank, bytes here, how it is
    sharded.
    """
    placed = getattr(parameter, "placements", None)
    local = parameter.to_local() if placed is not None else parameter
    return {
        "name": name.removeprefix("module."),
        "elements": parameter.numel(),
        "held": local.numel(),
        "bytes": local.numel() * local.element_size(),
        "trained": parameter.requires_grad,
        "placements": "" if placed is None else ", ".join(map(str, placed)),
    }
