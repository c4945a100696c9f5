"""Fragmentation and caching, seen on the storages of a real step: free bytes, and no room.

An allocator hands out addresses, and what it has given cannot be moved. When storages that live
long stand between others that live briefly, the gaps that the short ones leave may be too small for
the next large request, however many there are. ZeRO calls the remedy memory defragmentation, MD:
what lives long gets a contiguous region of its own from the beginning (Rajbhandari+ 2020,
arXiv:1910.02054, sec. 6.3). Lab 06.

    storages    what one training step creates and gives back, as the ledger saw it
    first_fit   these in an address space, each storage where it first fits
    cached      these served by CUDA's caching allocator: bytes allocated and bytes reserved
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import illegal
from paralab.spec import ModelSpec, Plan

if TYPE_CHECKING:
    from paralab.instruments.recorder import Recorder

ALIGN = 64  # bytes


class Storage(NamedTuple):
    """Bytes that were alive from event ``born`` to event ``died`` of a step, and what for."""

    born: int
    died: int
    bytes: int
    category: str


class Space(NamedTuple):
    """An address space in which storages were placed.

    alive    most bytes alive at once
    extent   bytes of address space: what a device must have
    blocks   (first address, end, storage), by address
    """

    alive: int
    extent: int
    blocks: tuple[tuple[int, int, Storage], ...]

    def gaps(self, event: int) -> list[int]:
        """Bytes of every free piece at an event, in order of addresses."""
        here = [block for block in self.blocks if block[2].born <= event < block[2].died]
        edges = [0, *(edge for start, end, _ in here for edge in (start, end)), self.extent]
        return [end - start for start, end in zip(edges[::2], edges[1::2], strict=True)]


def storages(model: ModelSpec, plan: Plan | None = None) -> list[Storage]:
    """What the second step of training ``model`` on one rank creates, in order of birth.

    plan  of one rank; its microbatch_size, microbatches and recompute count
    """
    from paralab.launch import launch_program

    plan = Plan() if plan is None else plan
    if plan.world_size > 1:
        raise illegal("plan", plan, f"{plan.world_size} ranks", "a plan of one rank")
    plan.validate(model)
    return [Storage(*row) for row in launch_program(_watch, 1, (model, plan), device="cpu")[0]]


def _watch(context: Any, model: ModelSpec, plan: Plan) -> list[tuple]:
    """In a rank: the births and deaths of one step."""
    from paralab.instruments.ledger import Ledger
    from paralab.instruments.memory import Life
    from paralab.instruments.recorder import Recorder
    from paralab.interpret.train import Trainer

    class Log(Ledger):
        """A ledger that remembers every storage."""

        def __init__(self, recorder: Recorder) -> None:
            super().__init__(recorder)
            self.events, self.lives = 0, {}

        def _count(self, life: Life, size: int) -> None:
            super()._count(life, size)
            self.events += 1
            entry = self.lives.setdefault(id(life), [self.events, None, 0, life])
            if size:
                entry[2] = max(entry[2], size)
            else:
                entry[1] = self.events

        def _settle(self) -> None:
            """What died since the operation before died at one moment. In which order Python has
            let go of it differs from version to version: the youngest is counted first.
            """
            dead = [self._dead.popleft() for _ in range(len(self._dead))]  # more may come meanwhile
            self._dead.extend(sorted(dead, key=self._born_at, reverse=True))
            super()._settle()

        def _born_at(self, life: Life) -> int:
            return self.lives[id(life)][0] if id(life) in self.lives else 0  # without bytes

    recorder = Recorder(rank=0, world_size=1)
    with Log(recorder) as log:
        trainer = Trainer(context, model, plan, recorder=recorder)
        trainer.step(0)
        log.state()
        log.lives = {key: entry for key, entry in log.lives.items() if entry[1] is None}
        first = log.events
        trainer.step(1)
        log.state()
    end = log.events + 1
    return sorted(
        (max(born - first, 0), (end if died is None else died) - first, size, life.category)
        for born, died, size, life in log.lives.values()
    )


def first_fit(found: Sequence[Storage], *, apart: int | None = None) -> Space:
    """Place storages in an address space, each in the first gap that is large enough.

    apart  storages that live for more events than this get a region of their own, at the bottom
    """
    most = math.inf if apart is None else apart
    blocks: list[tuple[int, int, Storage]] = []
    extent = 0
    for long in (True, False):
        region = [one for one in found if (one.died - one.born > most) == long]
        blocks += [(extent + start, extent + end, one) for start, end, one in _placed(region)]
        extent = max((end for _, end, _ in blocks), default=0)
    changes = [(one.born, one.bytes) for one in found] + [(one.died, -one.bytes) for one in found]
    alive = max(accumulate(size for _, size in sorted(changes)), default=0)
    return Space(alive, extent, tuple(sorted(blocks)))


def _placed(found: Sequence[Storage]) -> list[tuple[int, int, Storage]]:
    """(address, end, storage), each at the lowest address where it has room."""
    laid: list[tuple[int, int, Storage]] = []
    taken: list[tuple[int, int, Storage]] = []  # of them those alive, by address
    for storage in sorted(found):
        taken = [block for block in taken if block[2].died > storage.born]
        size, at = -(-storage.bytes // ALIGN) * ALIGN, 0
        for start, end, _ in taken:
            if start - at >= size:
                break
            at = end
        laid.append((at, at + size, storage))
        taken = sorted([*taken, laid[-1]])
    return laid


# ---- CUDA's caching allocator --------------------------------------------------------------------
MIB = 2**20


def cached(found: Sequence[Storage]) -> list[tuple[int, int, int]]:
    """[(event, bytes allocated, bytes reserved)]: these storages in CUDA's caching allocator.

    It asks the driver for segments and never gives one back: 2 MiB for requests of up to 1 MiB, 20
    MiB for those below 10 MiB, else the request itself, rounded to 2 MiB. A request takes the
    smallest free block that is large enough, and splits off what is left (c10/cuda/
    CUDACachingAllocator.cpp, with default settings and one stream).
    """
    segments: list[tuple[bool, list[list[Any]]]] = []  # small or not, blocks: [bytes, storage]
    events = [(one.died, 0, i) for i, one in enumerate(found)]
    events += [(one.born, 1, i) for i, one in enumerate(found)]
    rows, allocated = [], 0
    for event, born, i in sorted(events):
        size = -(-max(found[i].bytes, 1) // 512) * 512
        allocated += size if born else -size
        if born:
            _take(segments, size, i)
        else:
            _give_back(segments, i)
        rows.append((event, allocated, sum(b[0] for _, blocks in segments for b in blocks)))
    return rows


def _take(segments: list[tuple[bool, list[list[Any]]]], size: int, i: int) -> None:
    small = size <= MIB
    free = [
        (block[0], n, k)
        for n, (kind, blocks) in enumerate(segments)
        for k, block in enumerate(blocks)
        if kind == small and block[1] is None and block[0] >= size
    ]
    if not free:
        new = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        segments.append((small, [[new, None]]))
        free = [(new, len(segments) - 1, 0)]
    room, n, k = min(free)
    left = room - size
    split = left >= 512 if small else left > MIB
    segments[n][1][k : k + 1] = [[size, i], [left, None]] if split else [[room, i]]


def _give_back(segments: list[tuple[bool, list[list[Any]]]], i: int) -> None:
    """Free the block of storage ``i``, and join it with free neighbours."""
    for _, blocks in segments:
        for k, block in enumerate(blocks):
            if block[1] == i:
                block[1] = None
                first, last = max(k - 1, 0), min(k + 1, len(blocks) - 1)
                first += blocks[first][1] is not None
                last -= blocks[last][1] is not None
                blocks[first : last + 1] = [[sum(b[0] for b in blocks[first : last + 1]), None]]
                return
