"""Fragmentation and caching on the storages of a real step: bytes are free, but not in one piece.

An allocator hands out addresses, and cannot move a block once it is in use. Where long-lived
storages are placed between short-lived ones, the gaps that the short-lived ones leave may each be
too small for the next large request, however many there are. The remedy of ZeRO is memory
defragmentation, MD: long-lived storages get a contiguous region of their own from the beginning
(Rajbhandari+ 2020, arXiv:1910.02054, sec. 6.3). Lab 06.

`storages` are those of a training step as the ledger saw them. `first_fit` places them in an
address space, and `cached` serves them with CUDA's caching allocator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import illegal
from paralab.spec import ModelSpec, Plan

if TYPE_CHECKING:
    from paralab.instruments.recorder import Recorder

ALIGN = 64  # bytes: first_fit rounds storages up to a multiple


class Storage(NamedTuple):
    """Bytes that are alive from event ``born`` to before event ``died`` of a step. An event is the
    allocation, resize or free of a storage.
    """

    born: int
    died: int
    bytes: int
    category: str  # in the ledger


class Space(NamedTuple):
    """An address space in which storages were placed."""

    extent: int  # bytes of address space, which is the memory that a device must have
    blocks: tuple[tuple[int, int, Storage], ...]  # (first address, end, storage), by address

    def gaps(self, event: int) -> list[int]:
        """Bytes of every free gap at an event, in order of addresses."""
        alive = [block for block in self.blocks if block[2].born <= event < block[2].died]
        edges = [0, *(edge for start, end, _ in alive for edge in (start, end)), self.extent]
        return [end - start for start, end in zip(edges[::2], edges[1::2], strict=True)]


def storages(model: ModelSpec, plan: Plan | None = None) -> list[Storage]:
    """The storages of the second step of training ``model`` on one rank, in order of birth: those
    that the step creates, and before them those that are alive when it begins (born at event 0).

    plan  a plan of one rank, of which microbatch_size, microbatches and recompute matter
    """
    from paralab.launch import launch_program

    plan = Plan() if plan is None else plan
    if plan.world_size > 1:
        raise illegal("plan", plan, f"it has {plan.world_size} ranks", "a plan of one rank")
    plan.validate(model)
    return launch_program(_watch, 1, (model, plan), device="cpu")[0]


def _watch(context: Any, model: ModelSpec, plan: Plan) -> list[Storage]:
    """Runs in a rank: every storage of the second step."""
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
            # [born, died, most bytes, life]
            entry = self.lives.setdefault(id(life), [self.events, None, 0, life])
            if size:
                entry[2] = max(entry[2], size)
            else:
                entry[1] = self.events

        def _settle(self) -> None:
            """Storages that died between two operations are freed youngest first: the order in
            which Python drops references differs from version to version.
            """
            dead = [self._dead.popleft() for _ in range(len(self._dead))]  # others may be appended
            self._dead.extend(sorted(dead, key=self._born_at, reverse=True))
            super()._settle()

        def _born_at(self, life: Life) -> int:
            return self.lives[id(life)][0] if id(life) in self.lives else 0  # it had no bytes

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
        Storage(max(born - first, 0), (died or end) - first, size, life.category)
        for born, died, size, life in log.lives.values()
    )


def first_fit(requests: Sequence[Storage], *, apart: float = math.inf) -> Space:
    """Place storages in an address space, each in the first gap that is large enough.

    apart  storages that live for more events than this get a region of their own, at the bottom
    """
    blocks: list[tuple[int, int, Storage]] = []
    extent = 0
    for long in (True, False):
        region = [s for s in requests if (s.died - s.born > apart) == long]
        blocks += [(extent + start, extent + end, s) for start, end, s in _placed(region)]
        extent = max((end for _, end, _ in blocks), default=0)
    return Space(extent, tuple(sorted(blocks)))


def _placed(requests: Sequence[Storage]) -> list[tuple[int, int, Storage]]:
    """(address, end, storage), each at the lowest address where it has room."""
    placed: list[tuple[int, int, Storage]] = []
    alive: list[tuple[int, int, Storage]] = []  # blocks of storages that are alive, by address
    for storage in sorted(requests):
        alive = [block for block in alive if block[2].died > storage.born]
        size, address = -(-storage.bytes // ALIGN) * ALIGN, 0
        for start, end, _ in alive:
            if start - address >= size:
                break
            address = end
        placed.append((address, address + size, storage))
        alive = sorted([*alive, placed[-1]])
    return placed


# ---- CUDA's caching allocator --------------------------------------------------------------------
MIB = 2**20


def cached(requests: Sequence[Storage]) -> list[tuple[int, int, int]]:
    """[(event, bytes allocated, bytes reserved)]: storages served by CUDA's caching allocator.

    It asks the driver for segments and never returns one: 2 MiB for requests of up to 1 MiB, 20 MiB
    for those below 10 MiB, else the request itself, rounded up to 2 MiB. A request takes the
    smallest free block that is large enough, and the rest of the block is split off (c10/cuda/
    CUDACachingAllocator.cpp, with default settings and one stream).
    """
    # (for small requests or not, its blocks: [bytes, index of the storage in it or None])
    segments: list[tuple[bool, list[list[Any]]]] = []
    events = [(storage.died, 0, i) for i, storage in enumerate(requests)]  # before births
    events += [(storage.born, 1, i) for i, storage in enumerate(requests)]
    rows, allocated = [], 0
    for event, born, i in sorted(events):
        size = -(-max(requests[i].bytes, 1) // 512) * 512
        allocated += size if born else -size
        if born:
            _allocate(segments, size, i)
        else:
            _free(segments, i)
        rows.append((event, allocated, sum(b[0] for _, blocks in segments for b in blocks)))
    return rows


def _allocate(segments: list[tuple[bool, list[list[Any]]]], size: int, i: int) -> None:
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
    block_size, n, k = min(free)
    rest = block_size - size
    split = rest >= 512 if small else rest > MIB
    segments[n][1][k : k + 1] = [[size, i], [rest, None]] if split else [[block_size, i]]


def _free(segments: list[tuple[bool, list[list[Any]]]], i: int) -> None:
    """Free the block of storage ``i``, and merge it with free neighbours."""
    for _, blocks in segments:
        for k, block in enumerate(blocks):
            if block[1] == i:
                block[1] = None
                first, last = max(k - 1, 0), min(k + 1, len(blocks) - 1)
                first += blocks[first][1] is not None
                last -= blocks[last][1] is not None
                blocks[first : last + 1] = [[sum(b[0] for b in blocks[first : last + 1]), None]]
                return
