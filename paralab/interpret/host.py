"""The memory a rank has outside its device: the host's, files, and the lanes between.

Host memory is allocated once and kept. Where there is a GPU it is page-locked (pinned), because
otherwise copies could not run at the same time as kernels. Files come after it: everything read
from or written to a file passes through a few buffers, taken in turn (programs/tiers.py).

[Note: page-locked] torch's allocator of pinned memory takes a power of two bytes for each tensor,
up to twice what the tensor has and a report says. So memory that is kept is allocated by its exact
size and locked in place. Memory that is used once is not kept: scalars in flight come from torch's
allocator, which knows when the copy is over, and initial values of a file are in unlocked memory.

On a CPU the device's memory and the host's are the same chips; only the bookkeeping differs. The
ledger counts what the rank's own thread allocates, while the jobs here run in other threads. What
they hold is counted here, as tiers of their own, which no ``memory_limit`` bounds.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paralab.instruments.recorder import Recorder
from paralab.interpret.files import Files, aligned
from paralab.interpret.lanes import Lane
from paralab.spec.cluster import available_cores
from paralab.spec.tiers import Offload


def host_threads(context: Any, cores: int) -> int:
    """Threads of one rank's share of its node's processor. Ranks with a GPU each leave the cores to
    their hosts' updates; where ranks compute on the CPU, every core has a rank's own work.
    """
    if not context.device.startswith("cuda") or context.shared:
        return 1
    return max(1, cores // context.nodes.count(context.nodes[context.rank]))


def plain(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that no ledger sees, in whole pages of its own at its beginning."""
    return aligned(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class Host:
    """One rank's host memory, files and lanes.

    tiers   what the plan offloads, and where to
    folder  for this rank's files; made if any state or activation goes to files
    """

    def __init__(self, tiers: Offload, *, context: Any, recorder: Recorder, folder: Path) -> None:
        torch.get_num_threads()  # the rank's own: see Lane._run
        self.recorder, self.cuda = recorder, context.device.startswith("cuda")
        own = {"device": context.device, "note": context.note}
        threads, self.lanes = {"host": host_threads(context, available_cores())}, {}
        for name in ("d2h", "host", "disk", "h2d"):
            own |= {"bandwidth": tiers.limits.get(name), "threads": threads.get(name, 1)}
            self.lanes[name] = Lane(name, recorder, **own)
        self.files = Files(folder, cached=tiers.cached) if tiers.uses("nvme") else None
        self._count = 0
        self._free: dict[Any, list[Any]] = {}  # memory and files that were lent and came back
        self._locked: list[Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, category: str) -> Tensor:
        """Host memory to be kept, and counted. See [Note: page-locked]."""
        memory = plain(shape, dtype)
        if self.cuda and memory.nbytes:
            lock = torch.cuda.cudart().cudaHostRegister
            try:
                torch.cuda.check_error(lock(memory.data_ptr(), memory.nbytes, 0))
            except RuntimeError as error:
                why = f"CUDA cannot lock {memory.nbytes:,} bytes of host memory in place: {error}; "
                why += "WSL and virtual machines allow little of it: offload less, or to files"
                raise RuntimeError(why) from error
            self._locked.append(memory)
        self.recorder.holds("host", category, memory.nbytes)
        return memory

    def create(self, kind: str, size: int, category: str) -> str:
        """A file of ``size`` bytes. Returns its name."""
        self._count += 1
        name = f"{kind}-{self._count}"
        self.files.create(name, size)
        self.recorder.holds("file", category, size)
        return name

    def borrow(self, count: int, dtype: torch.dtype) -> Tensor:
        """Host memory for an activation, (count,), until it is given back."""
        free = self._free.get((count, dtype))
        return free.pop() if free else self.empty((count,), dtype, "activations")

    def borrow_file(self, size: int) -> str:
        """The same as a file; the lane keeps the order of its reads and writes."""
        free = self._free.get(size)
        return free.pop(0) if free else self.create("activation", size, "activations")

    def give_back(self, lent: Tensor | str) -> None:
        """Return what was borrowed, for the next to borrow."""
        key = self.files.sizes[lent] if isinstance(lent, str) else (lent.numel(), lent.dtype)
        self._free.setdefault(key, []).append(lent)

    def settle(self) -> None:
        """Hold the rank until all that was handed over is done."""
        for lane in self.lanes.values():
            lane.drain()

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        for memory in self._locked:  # or later memory at this address could not be locked
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
        self._locked.clear()
        if self.files is not None:
            self.files.close()
