"""The memory a rank has beside its device's: the host's, files, and the lanes between.

Host memory is taken once and kept: page-locked (pinned) where there is a GPU, or copies could not
run beside its kernels. Files lie behind it: what is read passes through a few buffers, taken in
turn, and so does what is written.

On a CPU the device's memory and the host's are the same chips. What keeps them apart is who counts:
the ledger sees what the rank's own thread does, and the jobs here run in others; what they hold is
counted here, as tiers of their own, and no ``memory_limit`` bounds it. In a dry run there is none
of all this: tensors without bytes, lanes that move nothing, files that are nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paralab.observe.recorder import Recorder
from paralab.parallel.files import DryFiles, Files, aligned
from paralab.parallel.lanes import DryLane, Job, Lane
from paralab.tiers import Offload


@dataclass
class Slot:
    """One buffer of a ring, and the jobs that whoever takes it next has to come after."""

    buffer: Tensor
    users: list[Job] = field(default_factory=list)


class Ring:
    """A few buffers of host memory, taken in turn. A taker's jobs come after its slot's ``users``,
    and it leaves its own there.

    With two of them the lane "disk" never stands still: what it is given in order is read 0, read
    1, write 0, read 2, write 1 ..., and an update is made while the lane is at the next read.
    """

    def __init__(self, host: Host, size: int, count: int = 2) -> None:
        self.host, self.size, self.count, self.turn = host, size, count, 0
        self.slots: list[Slot] = []  # made when the first is taken: many rings never are

    def take(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Slot]:
        shape = (shape,) if isinstance(shape, int) else shape
        if not self.slots:
            self.slots = [Slot(self.host.empty((self.size,), torch.uint8, "buffers"))
                          for _ in range(self.count)]  # fmt: skip
        slot = self.slots[self.turn % self.count]
        self.turn += 1
        used = math.prod(shape) * dtype.itemsize
        return slot.buffer[:used].view(dtype).view(shape), slot


class Host:
    """One rank's host memory, files and lanes.

    tiers   what lies there
    folder  for this rank's files; made when the first of them is
    """

    def __init__(self, tiers: Offload, *, context: Any, recorder: Recorder, folder: Path) -> None:
        self.tiers, self.recorder = tiers, recorder
        self.cuda, self.dry = context.device.startswith("cuda"), context.device == "meta"

        def lane(name: str, *, device: str | None = None) -> Lane:
            kind = DryLane if self.dry else Lane
            return kind(name, recorder, device=device, bandwidth=tiers.limits.get(name),
                        note=context.note)  # fmt: skip

        self.h2d, self.d2h = (lane(name, device=context.device) for name in ("h2d", "d2h"))
        self.disk, self.processor = lane("disk"), lane("host")
        self.lanes = (self.d2h, self.processor, self.disk, self.h2d)
        self.files = None
        if tiers.uses("nvme"):
            self.files = DryFiles() if self.dry else Files(folder, cached=tiers.cached)
        self.staging = Ring(self, 0)
        self.inputs = Ring(self, 0)
        self._number = 0
        self._lent: dict[tuple, list[tuple[Tensor, Job]]] = {}
        self._files: dict[int, list[str]] = {}

    # ---- memory ----------------------------------------------------------------------------------
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, category: str) -> Tensor:
        """Host memory that the device's ledger does not see."""
        if self.dry:
            with self.recorder.unwatched():
                found = torch.empty(shape, dtype=dtype, device="meta")
        elif self.cuda:
            found = torch.empty(shape, dtype=dtype, pin_memory=True)
        else:
            found = aligned(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        self.recorder.holds("host", category, found.nbytes)
        return found

    def here(self, tensor: Tensor) -> Tensor:
        """A copy on the host, for setting up."""
        return tensor.detach().clone() if self.dry else tensor.detach().to("cpu", copy=True)

    def number(self) -> int:
        self._number += 1
        return self._number

    def create(self, name: str, size: int, category: str) -> None:
        self.files.create(name, size)
        self.recorder.holds("file", category, size)

    def borrow(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory for an activation; `give_back` says after which job the next may have it."""
        free = self._lent.setdefault((tuple(shape), dtype), [])
        if free:
            found, job = free.pop(0)
            job.settle()
            return found
        return self.empty(tuple(shape), dtype, "activations")

    def give_back(self, held: Tensor, after: Job) -> None:
        self._lent[tuple(held.shape), held.dtype].append((held, after))

    def borrow_file(self, size: int) -> str:
        free = self._files.setdefault(size, [])
        if free:
            return free.pop(0)
        self.inputs.size = size  # all blocks' inputs are alike
        name = f"activation-{self.number()}"
        self.create(name, size, "activations")
        return name

    def give_back_file(self, name: str, size: int) -> None:
        self._files[size].append(name)  # reads and writes of it keep their order on the lane

    # ---- jobs ------------------------------------------------------------------------------------
    def down(
        self, source: Tensor, into: Tensor, category: str, after: Sequence[Job] = (),
        shape: Sequence[int] | None = None,
    ) -> Job:  # fmt: skip
        """A copy from the device to the host."""
        target = into if shape is None else into.view(shape)
        return self.d2h.submit(lambda: target.copy_(source, non_blocking=True), after=after,
                               category=category, size=source.nbytes)  # fmt: skip

    def read(self, name: str, into: Tensor, category: str, after: Sequence[Job] = ()) -> Job:
        return self.disk.submit(lambda: self.files.read(name, into), after=after, op="read",
                                category=category, size=into.nbytes)  # fmt: skip

    def write(self, name: str, values: Tensor, category: str, after: Sequence[Job] = ()) -> Job:
        return self.disk.submit(lambda: self.files.write(name, values), after=after, op="write",
                                category=category, size=values.nbytes)  # fmt: skip

    def do(self, work: Callable[[], Any], *, after: Sequence[Job] = (), op: str = "compute") -> Job:
        """Work of the host's processor."""
        return self.processor.submit(work, after=after, op=op)

    def settle(self) -> None:
        """Hold the rank until all that was handed over is done."""
        for lane in self.lanes:
            lane.drain()

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        if self.files is not None:
            self.files.close()
