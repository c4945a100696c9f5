"""What every rank of a check runs: the answers, one after the other, each under a `Watch`.

The watch records an answer's calls of torch.distributed and delivers their results late (plain.py).
It counts the memory of tensors (instruments/memory.py), in which the limits are stated.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from paralab.batches import as_numpy
from paralab.comm import Group
from paralab.exercises.attempts import origin
from paralab.exercises.plain import AnswerGroup, LateCalls, WrongGroups, freed
from paralab.instruments.memory import Life, PeakMemory
from paralab.instruments.recorder import Recorder
from paralab.ranks.failure import describe
from paralab.ranks.hangs import place
from paralab.trace import part_of


class Watch(PeakMemory):
    """Observes one answer on this rank, and counts the memory of its tensors.

    label     the phase under which the ledger has the calls that follow
    recorder  has the answer's spans and calls
    calls     intercepts its calls of torch.distributed
    group     all ranks, for an answer that takes a group
    """

    def __init__(self, group: Group, number: int) -> None:
        super().__init__("cpu")
        self.label = "data"
        self._freed = False  # whether the answer has ever freed a storage
        self.recorder = Recorder(rank=group.context.rank, world_size=group.size, device="cpu")
        world = torch.distributed.new_group() if number else group.process_group
        self.group = AnswerGroup(group, number, world)
        self.calls = LateCalls(self, number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):  # it has no storage to be counted
            raise RuntimeError("a DTensor is used, as fully_shard does it: write what it does")
        # To reshape a freed tensor, or to make a new tensor of its size, is no error.
        lost = freed((args, kwargs)) if self._freed and not _reads_nothing(func) else None
        if lost is not None:
            when = "in backward, " * (torch._C._current_graph_task_id() != -1)
            said = f"{when}{_operation(func).strip('_')} uses a tensor of {tuple(lost.shape)}"
            said += " whose storage is freed: it has to be allocated again, and gathered into, "
            raise RuntimeError(said + "before")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def resized(self, life: Life) -> None:
        """Note that a storage is resized: computing with a freed one is an error."""
        self._freed |= life.size == 0

    def unseen(self) -> AbstractContextManager:
        """Within this context no tensor is counted: the checker computes, not the answer."""
        return _disable_current_modes()

    def section(self) -> Section:
        """A context that counts bytes of tensors beyond those that are alive when it begins."""
        assert self._counting, "a run without memory"
        return Section(self)


def _operation(func: Any) -> str:
    return func.__name__.split(".")[0]


@functools.cache
def _reads_nothing(func: Any) -> bool:
    name = _operation(func)
    makes = name.endswith("_like") or name.startswith(("new_", "set_", "resize_"))
    # torch refuses all other views itself, but its message speaks of storage sizes
    return makes or name in ("alias", "detach", "view")


class Section:
    """Bytes of tensors since it began: ``now()`` alive, ``peak`` at most, once it has ended."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.before, self.peak = watch, 0, 0

    def __enter__(self) -> Section:
        self.before = self.watch.peak = self.now()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = max(self.watch.peak, self.watch.live) - self.before

    def now(self) -> int:
        gc.collect()  # frees unreachable tensors in reference cycles
        self.watch._settle()
        return self.watch.live - self.before


def run_answers(
    group: Group,
    work: Callable[..., Any],
    answers: Sequence[tuple[Any, int]],
    args: tuple,
    memory: bool,
) -> list[dict[str, Any]]:
    """Run ``work`` on every (answer, seed), each with a recorder and a process group of its own.
    memory: whether every operation is watched. Returns, by answer, the tables of its recorder and
    what ``work`` returned, or {"failed": why}.
    """
    # torch 2.13 warns about two names that an answer may use, as all versions have them
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    parts = []
    for number, (answer, seed) in enumerate(answers):
        watch = Watch(group, number)
        rank, recorder = group.context.rank, watch.recorder
        try:
            counted = watch if memory else contextlib.nullcontext()
            with counted, watch.resizes(watch.resized), watch.calls.seen():
                recorder.begin_step(0)
                with recorder.span("compute"):
                    result = work(watch, answer, seed, *args)
                recorder.end_step()
        except WrongGroups as wrong:  # every rank raises it, so none waits for this one
            parts.append({"failed": f"{wrong}{place(wrong)}"})
            continue
        except (Exception, SystemExit, GeneratorExit) as error:
            if len(answers) == 1:
                error.add_note(origin(error))
                raise
            failure = describe(error, rank).what + origin(error)
            parts.append({"failed": f"rank {rank} {failure}"})
            continue
        part = part_of(group.context, recorder.tables(), result)
        parts.append(part | {"open": [call.words for call in watch.calls.in_flight.values()]})
    return parts


def array(value: Any) -> Any:
    """A NumPy copy of a tensor, for the verdict. Raises TypeError for anything else."""
    if not isinstance(value, Tensor):
        what = "None" if value is None else f"of type {type(value).__name__}"
        raise TypeError(f"required: a tensor, yours is {what}")
    return as_numpy(value)


def arrays(module: Any) -> dict[str, Any]:
    """{name: NumPy copy} of a module's parameters."""
    return {name: array(parameter) for name, parameter in module.named_parameters()}


class Lent:
    """Tensors that an answer gets and must not change."""

    def __init__(self, **named: Tensor) -> None:
        self._all: list[tuple[str, Tensor, Any]] = []
        for name, tensor in named.items():
            self.note(f"it changes {name}, which its caller still needs: work on a copy", tensor)

    def note(self, words: str, tensor: Tensor) -> None:
        """Remember the contents of a tensor. words: the mistake, if they change."""
        self._all.append((words, tensor.detach(), array(tensor)))

    def changed(self) -> str:
        """The words for the first tensor that has changed, or ""."""
        changes = (words for words, now, was in self._all if array(now).tobytes() != was.tobytes())
        return next(changes, "")
