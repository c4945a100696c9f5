"""Fragmentation, seen on the storages of a real step: enough free bytes, and no room.

An allocator deals addresses, and what it has given cannot be moved. When storages that live long
lie between others that live a moment, the gaps that the short ones leave may be too small for the
next large one, however many there are. ZeRO calls the remedy memory defragmentation, MD: what lives
long, checkpointed activations and gradients, gets a contiguous region of its own from the beginning
(Rajbhandari+ 2020, arXiv:1910.02054, sec. 6.3). Lab 06.

`storages` lists what one training step creates and gives back, as the ledger saw it; `first_fit`
puts that into an address space, each storage where it first fits, and says how much space it took.
Real allocators are cleverer (sizes in classes, pages remapped), and have the same problem.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import illegal
from paralab.instruments.samples import CATEGORIES
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
    """What a sequence of storages needs of an address space.

    alive         most bytes alive at once
    extent        bytes of address space: what a device must have
    free, hole    at the moment when most of the free space is of no use to one large request: bytes
                  that are free, and the largest piece of them
    """

    alive: int
    extent: int
    free: int
    hole: int


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

    recorder = Recorder(rank=0, world_size=1)
    with Log(recorder) as log:
        trainer = Trainer(context, model, plan, recorder=recorder)
        trainer.step(0)
        log.state()
        kept = [entry for entry in log.lives.values() if entry[1] is None]
        log.lives = {id(entry[3]): entry for entry in kept}
        first = log.events
        trainer.step(1)
        log.state()
    found = [
        (
            max(born - first, 0),
            (log.events + 1 if died is None else died) - first,
            size,
            life.category,
        )
        for born, died, size, life in log.lives.values()
    ]
    return sorted(found)


def first_fit(found: Sequence[Storage], *, apart: Sequence[Collection[str]] = ()) -> Space:
    """Lay storages into an address space, each into the first gap that is large enough.

    apart  sets of categories; each set gets a region of its own, as large as it needs
    """
    rest = set(CATEGORIES).difference(*apart)
    blocks: list[tuple[int, int, Storage]] = []  # (address, end, what)
    extent = 0
    for region in (*apart, rest):
        laid = _lay([storage for storage in found if storage.category in region])
        blocks += [(extent + start, extent + end, storage) for start, end, storage in laid]
        extent = max((end for _, end, _ in blocks), default=0)
    blocks.sort()
    alive, free, hole = 0, 0, 0
    for storage in found:
        here = [b for b in blocks if b[2].born <= storage.born < b[2].died]
        edges = [0, *(edge for start, end, _ in here for edge in (start, end)), extent]
        gaps = [end - start for start, end in zip(edges[::2], edges[1::2], strict=True)]
        alive = max(alive, sum(b[2].bytes for b in here))
        if sum(gaps) - max(gaps) > free - hole:
            free, hole = sum(gaps), max(gaps)
    return Space(alive, extent, free, hole)


def _lay(found: Sequence[Storage]) -> list[tuple[int, int, Storage]]:
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
