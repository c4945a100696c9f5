"""Observe a program that was not written for paralab: its calls, its spans, its steps, its memory.

Nothing of the program changes. What sees it, and what that costs:

    collectives    every operation ``c10d.*`` gets a kernel in front of its own, for as long as the
                   observation lasts. All of torch passes there: DistributedDataParallel's reducer
                   in C++, FSDP2, DTensor and its ``_c10d_functional.*``, pipelining, raw calls.
                   About 30 us per call, on no other operation
    waits          ``Work.wait`` and ``_c10d_functional.wait_tensor``: a few us per wait
    spans          global hooks of modules and optimizers, the autograd engine's ``run_backward``: a
                   few us per module and step
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
from torch.utils._pytree import tree_leaves

from paralab.checks import illegal
from paralab.instruments.foreign_ledger import ForeignLedger
from paralab.instruments.recorder import Recorder
from paralab.theory.traffic import POINT_TO_POINT, ROOTED, wire_bytes

SURPLUS = "gloo surplus"  # phase of bytes that gloo sends and the operation does not need
BY_HAND = "call paralab.step() where a step ends, and observe with steps='marked'"
INDICES = 4096  # bytes of whole numbers that are bookkeeping
PATIENCE = 1.0  # seconds that the ends of calls may take to be heard of
SEARCHED = 256  # nodes of the autograd graph between a loss and the module that it came from

# c10d's operation: (the ledger's name, the argument that is the whole payload)
CALLS = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "allgather_": ("all_gather", "output_tensors"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "allgather_coalesced_": ("all_gather", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
    "barrier": ("barrier", "tensor"),
}
PEER = ("root_rank", "dst", "src")  # a position in the group


class Where(NamedTuple):
    """A process group: its axis, its global ranks, this rank's position, the link it crosses."""

    axis: str
    ranks: tuple[int, ...]
    index: int
    level: str


class Observer:
    """``with Observer(recorder, ...) as observer: program()``, then ``observer.part()``.

    recorder      where everything is written down
    nodes         index of the node that each rank runs on
    memory_steps  how many steps the live ledger is on, from the first; 0: never
    marked        steps end at ``step()`` alone, not at an optimizer's
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
        self.thread = threading.get_ident()
        self._optimizers: dict[int, str] = {}  # those that have stepped
        self._last_event = ""
        self._chunks: dict[int, int] = {}  # by outermost module, in the order of their first calls
        self._numbers: Counter[Any] = Counter()  # calls by group; forwards and backwards of a step
        self._groups: dict[str, Where] = {}
        self._meshes: list[Any] = []
        self._works: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._held: Any = None  # the last call's Work, until its caller has it
        self._flying: dict[
            int, Any
        ] = {}  # span: weak reference to its Work, launched in a backward
        self._by_storage: dict[int, int] = {}  # span of the last call that used a storage
        self._unheard: set[int] = set()  # spans whose end is told by a thread of gloo
        self._named: set[int] = set()  # ids of parameters described
        self._undo = contextlib.ExitStack()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # modules called by the program
        self._described: weakref.WeakSet[Any] = weakref.WeakSet()
        self.about: dict[str, Any] = {"modules": [], "optimizers": [], "parameters": []}
        self.result: Any = None

    # ---- on and off ---------------------------------------------------------------------------
    def __enter__(self) -> Observer:
        undo = self._undo
        for name in CALLS:
            self._stand_before("c10d", name, self._called)
        self._stand_before("_c10d_functional", "wait_tensor", self._awaited)
        work = torch._C._distributed_c10d.Work
        self._replace(work, "wait", self._waiting(work.wait))
        ddp, reducer = torch.nn.parallel.DistributedDataParallel, dist.Reducer
        self._replace(ddp, "_ddp_init_helper", self._making_buckets(ddp._ddp_init_helper))
        self._replace(reducer, "_rebuild_buckets", self._making_buckets(reducer._rebuild_buckets))
        self._replace(torch.nn.Module, "__call__", self._calling(torch.nn.Module.__call__))
        self._replace(DeviceMesh, "__init__", self._making_mesh(DeviceMesh.__init__))
        for module in (dist, dist.distributed_c10d):
            destroy = self._destroying(module.destroy_process_group)
            self._replace(module, "destroy_process_group", destroy)
        variable = torch.autograd.Variable
        self._replace(variable, "_execution_engine", _Engine(variable._execution_engine, self))
        for handle in (
            optimizers.register_optimizer_step_pre_hook(self._update),
            optimizers.register_optimizer_step_post_hook(self._updated),
        ):
            undo.callback(handle.remove)
        if self.ledger is not None:
            self.ledger.before_each = self._let_go
            self.ledger.__enter__()
            if self.existing:
                self._adopt_all()
        self.recorder.clock.anchor()
        self._zero = self.recorder.clock.mark()
        self.recorder.enter("compute")
        return self

    def __exit__(self, *raised: Any) -> None:
        self._close_ledger()
        self._undo.close()

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, new)

    def _stand_before(self, namespace: str, name: str, seen: Callable[..., Any]) -> None:
        """See the calls of operation ``name``. See [Note: before]."""
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is None:  # another version of torch
            return
        operation = packet.default
        names = [argument.name for argument in operation._schema.arguments]

        def kernel(keys: Any, *args: Any) -> Any:
            def own() -> Any:
                return operation.redispatch(keys.remove(DispatchKey.BackendSelect), *args)

            return seen(name, dict(zip(names, args, strict=False)), own)

        library = Library(namespace, "IMPL")
        self._undo.callback(library._destroy)
        library.impl(name, kernel, "BackendSelect", with_keyset=True)

    def _making_buckets(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def make(*args: Any, **kwargs: Any) -> Any:
            with self.recorder.making("buffers"):
                return own(*args, **kwargs)

        return make

    def _making_mesh(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def make(mesh: Any, *args: Any, **kwargs: Any) -> None:
            own(mesh, *args, **kwargs)
            self._meshes.append(weakref.ref(mesh))
            self._groups.clear()  # one of its dimensions may name a group that there is already

        return make

    def _close_ledger(self) -> None:
        """The ledger goes, unless the program has put a dispatch mode of its own above it."""
        ledger = self.ledger
        if ledger is not None and ledger.is_top():
            ledger.__exit__(None, None, None)
            self.ledger = None

    def _let_go(self) -> None:
        self._held = None

    # ---- collectives --------------------------------------------------------------------------
    def _called(self, name: str, given: dict[str, Any], own: Callable[[], Any]) -> Any:
        """One call of c10d, on whatever thread: write it down, make it, hear of its end."""
        recorder = self.recorder
        if self.found and not self.open:
            self._begin("call")
        mine = threading.get_ident() == self.thread or self.backwards
        after = recorder.cut() if mine else ()
        group = dist.ProcessGroup.unbox(given["process_group"])
        where = self._where(group)
        op, which = CALLS[name]
        tensors = [t for t in tree_leaves(given[which]) if isinstance(t, Tensor)]
        span = None
        if op != "barrier":
            span = recorder.launch(f"comm:{where.axis}", after, recorder.clock.mark())
            self._write(op, given, tensors, where, group, span)
            for leaf in tree_leaves(given):
                if isinstance(leaf, Tensor):
                    self._by_storage[leaf.untyped_storage()._cdata] = span
                    if self.ledger is not None:
                        self.ledger.carries(leaf)
        result = own()
        if span is not None:
            last = result[-1] if isinstance(result, (tuple, list)) else result
            work = self._held = dist.Work.unbox(last)
            self._works[work] = span
            if self.backwards:
                self._flying[span] = weakref.ref(work)
            if not tensors[0].is_cuda:
                self._listen(work, span)
        return result

    def _listen(self, work: Any, span: int) -> None:
        """Hear of the end of a call, where someone says it. See [Note: ends]."""
        recorder, unheard = self.recorder, self._unheard

        def ended(_: Any) -> None:
            recorder.completed(span, recorder.clock.host())
            unheard.discard(span)

        with contextlib.suppress(RuntimeError):
            future = work.get_future()
            unheard.add(span)
            future.add_done_callback(ended)

    def _destroying(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """See [Note: destroyed]."""

        @functools.wraps(own)
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            give_up = time.monotonic() + PATIENCE
            while self._unheard and time.monotonic() < give_up:
                time.sleep(0.001)
            time.sleep(0.02)
            return own(*args, **kwargs)

        return destroy_process_group

    def _write(
        self,
        op: str,
        given: dict[str, Any],
        tensors: list[Tensor],
        where: Where,
        group: Any,
        span: int,
    ) -> None:
        """The rows of one call."""
        n, rank, size = len(where.ranks), self.recorder.rank, sum(t.nbytes for t in tensors)
        position = next((given[name] for name in PEER if name in given), None)
        peer = -1 if position is None else where.ranks[position]
        gloo = group._get_backend(tensors[0].device).name() == "gloo" if tensors else False
        others = [r for r in where.ranks if r != rank]
        rows: list[tuple[str, int, int, str]] = []  # op, payload, peer, phase if it is its own
        if op == "gather":
            rows = [("send", size, peer, "")] if rank != peer else []
            rows += [("recv", size, r, "") for r in others if rank == peer]
        elif op == "scatter":
            rows = [("recv", size, peer, "")] if rank != peer else []
            rows += [("send", size, r, "") for r in others if rank == peer]
        elif op == "all_to_all" and (uneven := self._uneven(given, tensors, where)):
            rows = [("send", uneven[r], r, "") for r in others]
        elif op == "reduce" and gloo:
            rows = [("reduce_scatter", size, -1, "")]
            pieces = [("recv", r) for r in others] if rank == peer else [("send", peer)]
            rows += [(side, size // n, r, "") for side, r in pieces]
        elif op == "reduce_scatter" and gloo and n > 1:
            rows = [(op, size, -1, ""), ("all_gather", size, -1, SURPLUS)]
        else:
            rows = [(op, size, peer, "")]
        number = self._numbers[where.axis, where.ranks]
        self._numbers[where.axis, where.ranks] += 1
        phase = self._phase(tensors)
        for name, payload, other, own_phase in rows:
            root = where.ranks.index(other) if name in ROOTED else 0
            level = where.level
            if name in POINT_TO_POINT and other >= 0:
                level = self._level((rank, other))
            wire = wire_bytes(name, payload, n, where.index, root)
            place = (where.axis, where.ranks, other, level)
            kept = phase if phase in ("setup", "control") or not own_phase else own_phase
            self.recorder.call((number, name, *place, kept, payload, wire, span))

    def _uneven(self, given: dict[str, Any], tensors: list[Tensor], where: Where) -> dict[int, int]:
        """{rank: bytes for it} of an all-to-all whose parts are not alike; {} if they are."""
        if len(tensors) > 1:
            parts = [t.nbytes for t in tensors]
        elif splits := given.get("input_split_sizes"):
            rows = max(sum(splits), 1)
            parts = [tensors[0].nbytes * split // rows for split in splits]
        else:
            return {}
        return {} if len(set(parts)) == 1 else dict(zip(where.ranks, parts, strict=True))

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
            said = group.group_desc
            axis = _mesh_dimension(self._meshes, name) or said.removeprefix("mesh_")
            if said == "default_pg" and axis == said:
                axis = "world"
            elif axis in ("undefined", "default", ""):
                axis = "world" if ranks == tuple(range(self.recorder.world_size)) else "ranks "
                axis += ",".join(map(str, ranks)) * (axis != "world")
            index = ranks.index(self.recorder.rank)
            self._groups[name] = Where(axis, ranks, index, self._level(ranks))
        return self._groups[name]

    def _level(self, ranks: tuple[int, ...]) -> str:
        return "inter" if len({self.nodes[r] for r in ranks}) > 1 else "intra"

    # ---- waits --------------------------------------------------------------------------------
    def _waiting(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            self._held = None
            if threading.get_ident() != self.thread and not self.backwards:
                return own(work, *args, **kwargs)
            with self._wait(self._works.pop(work, None)):
                return own(work, *args, **kwargs)

        return wait

    def _awaited(self, name: str, given: dict[str, Any], own: Callable[[], Any]) -> Any:
        """``_c10d_functional.wait_tensor``: known by the storage that the call works on."""
        with self._wait(self._by_storage.get(given["tensor"].untyped_storage()._cdata)):
            return own()

    @contextlib.contextmanager
    def _wait(self, span: int | None) -> Iterator[None]:
        recorder = self.recorder
        recorder.enter("wait", after=() if span is None else (span,))
        try:
            yield
        finally:
            recorder.leave()
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
    def _begin(self, event: str) -> None:
        """Something of a step happens; before the first one was the setup."""
        self._last_event = event
        if self.open:
            return
        recorder = self.recorder
        if not self.found:
            recorder.leave()
            recorder.forget("compute")
        self.open = self.found = True
        recorder.begin_step(self.step)
        recorder.enter("compute")

    def end_step(self) -> None:
        """The program says, or an optimizer, that a step is over."""
        recorder = self.recorder
        if not self.found:  # raw calls alone: all that was, was the step
            recorder.leave()
            self.about["from the start"] = True
            self.found = True
            recorder.begin_step(0, keep=True)
        elif not self.open:
            return  # the optimizer's step ended it
        else:
            recorder.leave()
        recorder.end_step()
        self.open = False
        self.step += 1
        for key in [key for key in self._numbers if key[0] in ("forward", "backward")]:
            del self._numbers[key]
        self._by_storage.clear()
        self._last_event = "end"
        if self.step >= self.memory_steps:
            self._close_ledger()

    def _calling(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """A module's call: the outermost is a forward. Hooks of all modules would cost the inner
        ones several us each.
        """

        @functools.wraps(own)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.forwards or self.backwards or threading.get_ident() != self.thread:
                if self.ledger is not None:
                    self.ledger.gathered(module)
                return own(module, *args, **kwargs)
            label = self._forward(module)
            self.forwards += 1
            try:
                output = own(module, *args, **kwargs)
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                        leaf.grad_fn.metadata.setdefault("paralab", label)
                return output
            finally:
                self.forwards -= 1
                self.recorder.leave()

        return call

    def _forward(self, module: Any) -> tuple[int, int]:
        """A forward begins. Returns its (micro-batch, chunk)."""
        self._begin("forward")
        if module not in self._seen:
            self._seen.add(module)
            self._meet_module(module)
        chunk = self._chunks.setdefault(id(module), len(self._chunks))
        number = self._numbers["forward", chunk]
        self._numbers["forward", chunk] += 1
        self.recorder.enter("forward", number, chunk=chunk)
        return number, chunk

    @contextlib.contextmanager
    def backward(self, roots: Any) -> Iterator[None]:
        """Around the autograd engine's work."""
        if threading.get_ident() != self.thread or self.backwards:
            yield
            return
        self._begin("backward")
        self.backwards += 1
        self._flying.clear()
        label = _label(roots)
        if label is None:
            label = self._numbers["backward", 0], 0
            self._numbers["backward", 0] += 1
        self.recorder.enter("backward", label[0], chunk=label[1])
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
        self.updates += 1
        if self.updates > 1:
            return
        if not self.marked:
            self._judge(optimizer)
        if not self.open and self.found and self._last_event == "end":
            self._resume()  # a second optimizer right behind the first: the same step
        self._begin("optimizer")
        self._describe()
        if self.ledger is not None:
            self.ledger.find_gradients(optimizer)
        self.recorder.enter("optimizer")

    def _judge(self, optimizer: Any) -> None:
        """Refuse what does not say where a step ends."""
        name = type(optimizer).__name__
        if self.backwards:
            self.updates = 0
            why = "it steps inside a backward, so it does not say where a training step ends"
            raise illegal("optimizer", name, why, BY_HAND)
        another = self._optimizers and id(optimizer) not in self._optimizers
        if another and self._last_event != "end":
            self.updates = 0
            others = ", ".join(self._optimizers.values())
            why = f"it steps in another place than {others}: which of them ends a step is not known"
            raise illegal("optimizer", name, why, BY_HAND)
        self._optimizers[id(optimizer)] = name

    def _resume(self) -> None:
        self.recorder.resume_step()
        self.step -= 1
        self.open = True
        self.recorder.enter("compute")

    def _updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.updates -= 1
        if self.ledger is not None:
            self.ledger.owns_state(optimizer)
        if self.updates:
            return
        name = type(optimizer).__name__
        if name not in self.about["optimizers"]:
            self.about["optimizers"].append(name)
        self.recorder.leave()
        if not self.marked:
            self.end_step()

    # ---- what the program is made of ------------------------------------------------------------
    def _meet_module(self, module: Any) -> None:
        """What it is made of, when it is called for the first time."""
        inside = [m for m in module.modules() if type(m).__module__.startswith("torch.")]
        kinds = {kind.__name__ for m in inside for kind in type(m).__mro__}
        kinds |= {kind.__name__ for m in module.modules() for kind in type(m).__mro__}
        for kind in ("DistributedDataParallel", "FSDPModule"):
            if kind in kinds and kind not in self.about["modules"]:
                self.about["modules"].append(kind)
        if self.ledger is not None:
            self.ledger.owns("parameters", *module.parameters(), *module.buffers())

    def _describe(self) -> None:
        """The parameters of all modules met, when none is gathered: at an optimizer's step, or at
        the end.
        """
        for module in [m for m in self._seen if m not in self._described]:
            self._described.add(module)
            for name, parameter in module.named_parameters():
                if id(parameter) not in self._named:
                    self._named.add(id(parameter))
                    self.about["parameters"].append(_described(name, parameter))

    def _adopt_all(self) -> None:
        """What modules and optimizers of this process hold already."""
        for thing in gc.get_objects():
            kind = type(thing)
            if issubclass(kind, torch.nn.Module):
                own = [*thing.parameters(recurse=False), *thing.buffers(recurse=False)]
                self.ledger.owns("parameters", *own)
                grads = [p.grad for p in own if p.is_leaf and p.grad is not None]
                self.ledger.owns("gradients", *grads)
            elif issubclass(kind, torch.optim.Optimizer):
                self.ledger.owns_state(thing)

    # ---- the part -----------------------------------------------------------------------------
    def part(self) -> dict[str, Any]:
        """This rank's tables, when the program has ended.

        What follows the last step is left out; a program without steps is one step.
        """
        recorder = self.recorder
        self._describe()
        self.saw_nothing = not self.found and not self._numbers
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

    def run_backward(self, roots: Any, *args: Any, **kwargs: Any) -> Any:
        with self._observer.backward(roots):
            return self._engine.run_backward(roots, *args, **kwargs)


def _label(roots: Any) -> tuple[int, int] | None:
    """(micro-batch, chunk) of the forward that these tensors came from, if it is near."""
    nodes = [r.grad_fn for r in roots if isinstance(r, Tensor) and r.grad_fn is not None]
    for _ in range(SEARCHED):
        if not nodes:
            return None
        node = nodes.pop(0)
        if "paralab" in node.metadata:
            return node.metadata["paralab"]
        nodes += [following for following, _ in node.next_functions if following is not None]
    return None


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
