"""What every rank of a check runs: answers, one after the other, each with a watch on it.

[Note: late] A result must not be read before it has been waited for. On one machine it has often
arrived by then, and the answer is right by luck. So a call of a `Watched` group works on copies,
and its result is delivered in ``wait()``: an answer that reads too early reads what was there
before. A tensor that is changed while it is being sent is an error at the wait, and a call that is
never waited for is written down.

An answer in plain PyTorch calls torch.distributed's functions, which are those of a `Watched` group
meanwhile (plain.py). Everything that tensors say to torch.distributed passes torch's dispatcher;
what does not come from a `Watched` group there goes around the checker, and is refused. Memory is
that of tensors (instruments/memory.py) and, once an answer has taken the numbers out of a tensor,
of large blocks that Python allocates: a NumPy copy, bytes, a list. To follow those doubles the time
of a rank, so one that leaves its numbers where they are does not pay for it.
"""

from __future__ import annotations

import _weakrefset
import contextlib
import functools
import gc
import sys
import threading
import tracemalloc
from _tracemalloc import _get_traces
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._library import simple_registry
from torch.utils._python_dispatch import _disable_current_modes

from paralab.checks import illegal
from paralab.comm import Group, Pending
from paralab.exercises.plain import functions
from paralab.instruments.foreign_hooks import around
from paralab.instruments.memory import Life, PeakMemory, tensors
from paralab.instruments.recorder import Recorder
from paralab.ranks.failure import describe
from paralab.strict import Strict
from paralab.trace import part_of
from paralab.transports import Call, Posted, Transport

BLOCK = 4096  # bytes: smaller Python objects are not counted, a rank makes some of its own
JUMP, DRIFT = 4 * BLOCK, 16 * BLOCK  # bytes between two operations, and since the last look
OURS = str(Path(__file__).parents[1])
PRINTED = 20_000  # characters that one answer may print on a rank
# What takes numbers out of a tensor: all of them, or one, of which as many as `SINGLE` are free.
ARRAYS = "numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "__reduce_ex__"
NUMBERS, SINGLE = ("item", "__float__", "__int__"), 500


class Watch(PeakMemory):
    """What one answer does on this rank.

    group    the `Watched` group of all ranks
    label    the ledger's phase for the calls to come
    open     calls that have not been waited for
    groups   the `Watched` group of each group that was made
    names    torch.distributed's functions: (as the answer has them, the real ones)
    """

    def __init__(self, group: Group, number: int) -> None:
        super().__init__("cpu")
        self.label, self.open, self.most = "data", {}, 0
        self.groups: dict[Group, Group] = {}
        self.names: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._blocks = self._traced = self._last = 0
        self._taken = 0  # numbers or arrays, out of tensors
        self._ours = False  # whether this package computes, not the answer
        self._freed = False  # whether the answer has ever freed a storage
        self.group = Watched(group, self, number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(
                f"{_name(func).strip('_')} goes around what is counted: call the "
                "functions of torch.distributed by their module, as dist.all_reduce(tensor)"
            )
        if self._freed:
            _look_at_freed(func, (args, kwargs))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view:
            self.most = max(self.most, self._alive())
        return result

    def _alive(self, look: bool = False) -> int:
        """Bytes of tensors and of Python's large blocks. To list the second takes milliseconds:
        it is done to ``look``, and where more may have changed than a few small objects do.
        """
        if tracemalloc.is_tracing():
            traced = tracemalloc.get_traced_memory()[0]
            grown, all_of_it, self._last = traced - self._last, traced - self._traced, traced
            if not self._blocks and all_of_it < 0:  # there is nothing large that could be less
                grown, all_of_it, self._traced = max(0, grown), 0, traced
            if look or abs(grown) >= JUMP or abs(all_of_it) >= DRIFT:
                large = [trace for trace in _get_traces() if trace[1] >= BLOCK]
                self._blocks = sum(
                    size for _, size, frames, *_ in large if not frames[0][0].startswith(NOT_THEIRS)
                )
                self._traced = traced
        return self.live + self._blocks

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Within, torch.distributed's functions are those of the group (plain.py)."""
        self.names = ours, real = functions(self.group)
        vars(torch.distributed).update(ours)
        try:
            with self.resizes(self._resized), contextlib.ExitStack() as undo:
                for name in ARRAYS + NUMBERS:
                    around(undo, Tensor, name, functools.partial(self._taking, name))
                yield
        finally:
            vars(torch.distributed).update(real)

    def _taking(self, name: str, *_: Any) -> contextlib.AbstractContextManager:
        """Around what takes numbers out of a tensor: from then on Python's blocks are counted."""
        if not self._ours:
            self._taken += 1
            if name in ARRAYS or self._taken > SINGLE:
                _follow()
        return contextlib.nullcontext()

    def _resized(self, life: Life) -> None:
        self._freed |= life.size == 0

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Within, they are the real ones: this package asks, not the answer."""
        ours, real = self.names
        vars(torch.distributed).update(real)
        try:
            yield
        finally:
            vars(torch.distributed).update(ours)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Within, no tensor is counted: this package computes what is right, not the answer."""
        before, self._ours = self._ours, True
        try:
            with _disable_current_modes():
                yield
        finally:
            self._ours = before

    @contextlib.contextmanager
    def section(self, *, files: bool = False) -> Iterator[Section]:
        """Bytes from here on, beyond those that are alive now. files: whether the answer has
        numbers of its own that come out of no tensor.
        """
        if files:
            _follow()
        found = Section(self)
        yield found
        self.most = max(self.most, self._alive(look=True))
        found.peak = self.most - found.before


def _follow() -> None:
    """Count Python's blocks from here on; for good, to stop while gloo allocates is a crash."""
    if not tracemalloc.is_tracing():
        tracemalloc.start()


def _look_at_freed(func: Any, given: Any) -> None:
    """Refuse to compute with a freed tensor. Views of it, and new ones of its size, may be made."""
    if not _reads_nothing(func) and (found := freed(given)) is not None:
        raise RuntimeError(
            f"{_name(func).strip('_')} computes with a tensor of {tuple(found.shape)} whose "
            "storage is freed: it has to be gathered before"
        )


def _name(func: Any) -> str:
    return func.__name__.split(".")[0]


@functools.cache
def _reads_nothing(func: Any) -> bool:
    name = _name(func)
    made = name.endswith("_like") or name.startswith(("new_", "set_", "resize_"))
    return made or func.is_view


def freed(given: Any) -> Tensor | None:
    """The first tensor in it whose storage is freed: to read that would end the process."""
    found = (t for t in tensors(given) if t.numel() and not t.untyped_storage().nbytes())
    return next(found, None)


# Of lists that Python and torch keep themselves, and that grow by a large block at some answer.
NOT_THEIRS = (
    *("<frozen ", OURS),
    *(one.__file__ for one in (tracemalloc, threading, _weakrefset, simple_registry)),
)


class Section:
    """``now()``: bytes that stay; ``peak``: the most there were, once the section is over."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.peak = watch, 0
        self.before = 0
        self.before = watch.most = self.now()

    def now(self) -> int:
        gc.collect()  # what is gone is counted as gone
        self.watch._settle()
        return self.watch._alive(look=True) - self.before


class Watched(Group):
    """``group``, with results that arrive in ``wait()``. See [Note: late]."""

    def __init__(self, group: Group, watch: Watch, number: int) -> None:
        self.__dict__.update(group.__dict__)
        self.group, self.watch, self.number = group, watch, number
        self.transport = Late(group.transport, watch)
        self._strict = Strict(self.context, axis=f"{self.axis} of answer {number}")

    def subgroup(self, ranks: Sequence[int], *, axis: str) -> Group | None:
        with self.watch.within():
            made = self.group.subgroup(ranks, axis=axis)
        if made is not None and made not in self.watch.groups:  # asked for again, it is the same
            self.watch.groups[made] = Watched(made, self.watch, self.number)
        return made and self.watch.groups[made]

    def _noted(
        self, posted: Posted, op: str, rows: list[tuple[str, int, int]], phase: str | None
    ) -> Pending:
        barrier = phase == "control" and sum(size for _, size, _ in rows) <= 8
        return super()._noted(posted, op, rows, "control" if barrier else self.watch.label)


class Late:
    """A transport that works on copies, and delivers them at the end. See [Note: late]."""

    def __init__(self, transport: Transport, watch: Watch) -> None:
        self.transport, self.watch = transport, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def post(self, call: Call) -> Posted:
        watch, name = self.watch, f"{call.ways[0][0] if call.ways else call.op} #{call.number}"
        for tensor in call.tensors:
            if not tensor.is_contiguous():
                raise illegal(name, tuple(tensor.shape), "not contiguous", "tensor.contiguous()")
        key = len(watch.open) and max(watch.open) + 1
        filled = [any(tensor is other for other in call.fills) for tensor in call.tensors]
        read = [
            not new or any(tensor is other for other in call.reads)
            for tensor, new in zip(call.tensors, filled, strict=True)
        ]
        with _disable_current_modes(), watch.within():
            given = [tensor.detach() for tensor in call.tensors]
            copies = [tensor.clone() for tensor in given]
            before = [t.clone() if kept else None for t, kept in zip(given, read, strict=True)]
            to = {id(tensor): copy for tensor, copy in zip(call.tensors, copies, strict=True)}
            posted = self.transport.post(
                call._replace(
                    tensors=copies,
                    fills=[to[id(tensor)] for tensor in call.fills],
                    reads=[to[id(tensor)] for tensor in call.reads],
                )
            )

        def arrive() -> None:
            del watch.open[key]
            with _disable_current_modes():  # gloo's thread may hold its buffers for a while yet
                if posted.finish is not None:
                    posted.finish()
                for now, was in zip(given, before, strict=True):
                    if was is not None and not torch.equal(_bits(now), _bits(was)):
                        raise RuntimeError(
                            f"a tensor of {name} was changed before it was waited for"
                        )
                for tensor, copy, new in zip(given, copies, filled, strict=True):
                    if new:
                        tensor.copy_(copy)
                for some in (given, copies, before):
                    some.clear()

        watch.open[key] = name
        return posted._replace(finish=arrive)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class Short:
    """An output that says no more than `PRINTED` characters."""

    def __init__(self, out: Any) -> None:
        self.out, self.left = out, PRINTED

    def write(self, text: str) -> int:
        if self.left > 0:
            self.out.write(text[: self.left])
            self.left -= len(text)
            if self.left <= 0:
                self.out.write("\n... and more, which is left out\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)


def each(
    group: Group, work: Callable[..., Any], answers: Sequence[tuple[Any, int]], args: tuple
) -> list[dict[str, Any]]:
    """Run ``work`` on every (answer, seed). Each has a recorder and a process group of its own."""
    parts = []
    for number, (answer, seed) in enumerate(answers):
        context = group.context
        recorder = Recorder(rank=context.rank, world_size=group.size, device="cpu")
        other = torch.distributed.new_group() if number else group.process_group
        own = Group(
            group.ranks, axis="world", context=context, recorder=recorder, process_group=other
        )
        if tracemalloc.is_tracing():  # what earlier answers left is looked through at every change
            tracemalloc.clear_traces()
        watch = Watch(own, number)
        try:
            with watch, watch.plain(), contextlib.redirect_stdout(Short(sys.stdout)):
                recorder.begin_step(0)
                with recorder.span("compute"):
                    result = work(watch, answer, seed, *args)
                recorder.end_step()
        except (Exception, SystemExit, GeneratorExit) as error:
            if len(answers) == 1:
                raise
            said = describe(error, context.rank, 0.0).what
            parts.append({"failed": f"rank {context.rank} {said}"})
            continue
        part = part_of(context, recorder.tables(), result)
        parts.append(part | {"open": list(watch.open.values())})
    return parts


_numpy = Tensor.numpy  # this package's own: no sign that an answer takes numbers out


def array(value: Any) -> Any:
    """A copy of a tensor, for the verdict. Raises TypeError if it is none."""
    if not isinstance(value, Tensor):
        raise TypeError(f"required: a tensor, this is a {type(value).__name__}")
    return _numpy(value.detach().cpu()).copy()
