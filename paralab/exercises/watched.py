"""What every rank of a check runs: answers, one after the other, each with a watch on it.

An answer's calls of torch.distributed are seen, and their results delivered late (plain.py). Memory
is that of tensors (instruments/memory.py), as every limit says.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from paralab.comm import Group
from paralab.exercises.attempts import whence
from paralab.exercises.plain import Given, LateCalls, WrongGroups
from paralab.instruments.memory import Life, PeakMemory, tensors
from paralab.instruments.recorder import Recorder
from paralab.ranks.failure import describe
from paralab.ranks.waits import place
from paralab.trace import part_of


class Watch(PeakMemory):
    """What one answer does on this rank.

    label     the ledger's phase for the calls to come
    recorder  what the answer does, and its calls
    calls     its calls of torch.distributed
    group     all ranks, for an answer that is given a group
    """

    def __init__(self, group: Group, number: int) -> None:
        super().__init__("cpu")
        self.label = "data"
        self._freed = False  # whether the answer has ever freed a storage
        self.recorder = Recorder(rank=group.context.rank, world_size=group.size, device="cpu")
        world = torch.distributed.new_group() if number else group.process_group
        self.group = Given(group, number, world)
        self.calls = LateCalls(self, number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._freed:
            _look_at_freed(func, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _resized(self, life: Life) -> None:
        self._freed |= life.size == 0

    @contextlib.contextmanager
    def looking(self, memory: bool) -> Iterator[None]:
        """Within, if ``memory``, tensors are counted, and none that is freed is computed with."""
        with contextlib.ExitStack() as looks:
            if memory:
                looks.enter_context(self)
                looks.enter_context(self.resizes(self._resized))
            yield

    def unseen(self) -> AbstractContextManager:
        """Within, no tensor is counted: this package computes what is right, not the answer."""
        return _disable_current_modes()

    def section(self) -> Section:
        """A context: bytes from here on, beyond those that are alive now."""
        assert self._counting, "a run without memory"
        return Section(self)


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
    # these views are refused by torch, in words of storage sizes
    return made or (func.is_view and name not in ("t", "transpose", "as_strided"))


def freed(given: Any) -> Tensor | None:
    """The first tensor in it whose storage is freed: to read that would end the process."""
    found = (t for t in tensors(given) if t.numel() and not t.untyped_storage().nbytes())
    return next(found, None)


class Section:
    """``now()``: bytes that stay; ``peak``: the most there were, once the section is over."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.before, self.peak = watch, 0, 0

    def __enter__(self) -> Section:
        self.before = self.watch.peak = self.now()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = max(self.watch.peak, self.watch.live) - self.before

    def now(self) -> int:
        gc.collect()  # what is gone is counted as gone
        self.watch._settle()
        return self.watch.live - self.before


def each(
    group: Group,
    work: Callable[..., Any],
    answers: Sequence[tuple[Any, int]],
    args: tuple,
    memory: bool,
) -> list[dict[str, Any]]:
    """Run ``work`` on every (answer, seed). Each has a recorder and a process group of its own.
    memory: whether operations are looked at.
    """
    # torch 2.13 renamed two functions; an answer may call them as all versions have them
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    parts = []
    for number, (answer, seed) in enumerate(answers):
        watch = Watch(group, number)
        rank, recorder = group.context.rank, watch.recorder
        try:
            with watch.looking(memory), watch.calls.seen():
                recorder.begin_step(0)
                with recorder.span("compute"):
                    result = work(watch, answer, seed, *args)
                recorder.end_step()
        except WrongGroups as wrong:  # no rank waits for this one
            parts.append({"failed": f"{wrong}{place(wrong)}"})
            continue
        except (Exception, SystemExit, GeneratorExit) as error:
            if len(answers) == 1:
                error.add_note(whence(error))
                raise
            said = describe(error, rank, 0.0).what + whence(error)
            parts.append({"failed": f"rank {rank} {said}"})
            continue
        part = part_of(group.context, recorder.tables(), result)
        parts.append(part | {"open": [sent.words for sent in watch.calls.open.values()]})
    return parts


def array(value: Any) -> Any:
    """A copy of a tensor, for the verdict. Raises TypeError if it is none."""
    if not isinstance(value, Tensor):
        raise TypeError(f"required: a tensor, this is a {type(value).__name__}")
    return value.detach().cpu().numpy().copy()


def arrays(module: Any) -> dict[str, Any]:
    """{name: a copy} of a module's parameters."""
    return {name: array(parameter) for name, parameter in module.named_parameters()}


class Lent:
    """Tensors that an answer is given and has to leave as they are."""

    def __init__(self, **named: Tensor) -> None:
        self._all: list[tuple[str, Tensor, Any]] = []
        for name, tensor in named.items():
            self.note(f"it changes {name}, which its caller still needs: work on a copy", tensor)

    def note(self, words: str, tensor: Tensor) -> None:
        """words: what there is to say if the tensor is changed."""
        self._all.append((words, tensor.detach(), array(tensor)))

    def changed(self) -> str:
        """What there is to say of the first that is not as it was, or ""."""
        found = (words for words, now, was in self._all if array(now).tobytes() != was.tobytes())
        return next(found, "")
