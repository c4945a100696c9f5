"""What every rank of a check runs: answers, one after the other, each with a watch on it.

[Note: late] A result must not be read before it has been waited for. On one machine it has often
arrived by then, and the answer is right by luck. So a call of a `Watched` group works on copies,
and its result is delivered in ``wait()``: an answer that reads too early reads what was there
before. A tensor that is changed while it is being sent is an error at the wait, and a call that is
never waited for is written down.

An answer in plain PyTorch calls torch.distributed's functions, which are those of a `Watched` group
meanwhile (plain.py). Everything that tensors say to torch.distributed passes torch's dispatcher;
what does not come from a `Watched` group there goes around the checker, and is refused. Memory is
that of tensors (instruments/memory.py), as every limit says.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from paralab.checks import illegal
from paralab.comm import Group, Pending
from paralab.exercises.plain import functions
from paralab.instruments.memory import Life, PeakMemory, tensors
from paralab.instruments.recorder import Recorder
from paralab.ranks.failure import describe
from paralab.strict import Strict
from paralab.trace import part_of
from paralab.transports import Call, Posted, Transport


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
        self.label, self.open = "data", {}
        self.groups: dict[Group, Group] = {}
        self.names: tuple[dict[str, Any], dict[str, Any]] = {}, {}
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
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Within, torch.distributed's functions are those of the group (plain.py)."""
        self.names = ours, real = functions(self.group)
        vars(torch.distributed).update(ours)
        try:
            with self.resizes(self._resized):
                yield
        finally:
            vars(torch.distributed).update(real)

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

    def unseen(self) -> AbstractContextManager:
        """Within, no tensor is counted: this package computes what is right, not the answer."""
        return _disable_current_modes()

    @contextlib.contextmanager
    def section(self) -> Iterator[Section]:
        """Bytes from here on, beyond those that are alive now."""
        found = Section(self)
        yield found
        found.peak = max(self.peak, self.live) - found.before


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


class Section:
    """``now()``: bytes that stay; ``peak``: the most there were, once the section is over."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.peak = watch, 0
        self.before = 0
        self.before = watch.peak = self.now()

    def now(self) -> int:
        gc.collect()  # what is gone is counted as gone
        self.watch._settle()
        return self.watch.live - self.before


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
        watch = Watch(own, number)
        try:
            with watch, watch.plain():
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


def array(value: Any) -> Any:
    """A copy of a tensor, for the verdict. Raises TypeError if it is none."""
    if not isinstance(value, Tensor):
        raise TypeError(f"required: a tensor, this is a {type(value).__name__}")
    return value.detach().cpu().numpy().copy()
