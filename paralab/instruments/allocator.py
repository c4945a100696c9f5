"""What CUDA's caching allocator says of a step, next to what the ledger counts.

The ledger counts the bytes of tensors. The allocator rounds every block up, keeps a block until all
streams that use it have passed, keeps what was given back for the next request, and serves cuBLAS's
workspaces too; NCCL and the CUDA context take theirs besides. What it keeps for itself is what a
device lacks that "should have had room".
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

PEAKS = ("allocated", "active", "reserved")  # columns of the report that are peaks of a step


class Allocator:
    """Of one device; asking it neither waits for the device nor meets it."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda, self.device = torch.cuda, torch.device(device)
        self._stats, self._reset = torch.cuda.memory_stats, torch.cuda.reset_peak_memory_stats
        # CUDA's own pool (cudaMallocAsync) keeps no list of blocks.
        self.native = self._cuda.get_allocator_backend() == "native"

    def begin(self) -> None:
        """A step begins: what there is now is its first peak."""
        self._reset(self.device)

    def row(self) -> tuple[int, ...]:
        """The peaks since `begin`, and the largest free block now, in bytes."""
        found = self._found()
        return (*(found[f"{name}_bytes.all.peak"] for name in PEAKS), self._largest_free())

    def _found(self) -> dict[str, Any]:
        return self._stats(self.device)

    def _largest_free(self) -> int:
        """The largest block that the allocator could hand out without asking the driver."""
        if not self.native:
            return 0
        segments, here = self._cuda.memory_snapshot(), self.device.index
        blocks = [b for segment in segments if segment["device"] == here for b in segment["blocks"]]
        return max((b["size"] for b in blocks if b["state"] == "inactive"), default=0)


class SharedAllocator(Allocator):
    """Of a program that may ask for its peaks itself: torch has one counter of each.

    What the program is told has the peaks put back that there were before a step began; and where
    the program resets the counters, its step keeps the peak that it had. Once the observation has
    ended, the counters are those of its last step.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._theirs: dict[str, int] = {}  # peaks since the program's last reset, before our last
        self._ours: dict[str, int] = {}  # peaks of this step, before the program's last reset

    def begin(self) -> None:
        _keep(self._theirs, self._stats(self.device))
        self._ours.clear()
        super().begin()

    def _found(self) -> dict[str, Any]:
        return _keep(self._ours.copy(), super()._found())

    def share(self, undo: ExitStack) -> None:
        """Until ``undo`` is closed, be there where the program asks for peaks or resets them."""
        import torch
        from torch.cuda import memory

        accelerator = getattr(torch, "accelerator", None)
        modules = (torch.cuda, memory, accelerator, getattr(accelerator, "memory", None))
        instead = {"memory_stats": self._told, "reset_peak_memory_stats": self._forgets}
        for module, name in itertools.product(modules, instead):
            if (own := getattr(module, name, None)) is not None:
                undo.callback(setattr, module, name, own)
                asked = functools.partial(instead[name], own)
                setattr(module, name, functools.update_wrapper(asked, own))

    def _told(self, own: Callable[..., Any], *device: Any, **named: Any) -> Any:
        found = own(*device, **named)
        if found and self._is_mine(*device, **named):
            found |= {name: max(size, found[name]) for name, size in self._theirs.items()}
        return found

    def _forgets(self, own: Callable[..., Any], *device: Any, **named: Any) -> Any:
        if self._is_mine(*device, **named):
            _keep(self._ours, self._stats(self.device))
            self._theirs.clear()
        return own(*device, **named)

    def _is_mine(self, device: Any = None) -> bool:
        if device is not None and not isinstance(device, int):
            import torch

            device = torch.device(device).index
        return (self._cuda.current_device() if device is None else device) == self.device.index


def _keep(kept: dict[str, int], found: dict[str, Any]) -> dict[str, int]:
    """Raise what is kept to the peaks that were found."""
    peaks = {name: size for name, size in found.items() if name.endswith(".peak")}
    kept |= {name: max(size, kept.get(name, 0)) for name, size in peaks.items()}
    return kept
