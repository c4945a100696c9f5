"""The peaks of CUDA's caching allocator in each step, to compare with the ledger's.

The ledger counts the bytes of tensors. The allocator takes more: it rounds every block up, keeps a
block until all streams that use it have passed, caches freed blocks for later requests, and also
serves cuBLAS's workspaces. (The memory of NCCL and of the CUDA context does not come from it.) The
difference explains a device that runs out of memory although the tensors would fit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

PEAKS = ("allocated", "active", "reserved")  # columns of the table that are peaks of a step


class Allocator:
    """The allocator of one device. Reading its counters does not synchronize with the device.

    torch has one counter per peak, which `begin` resets at every step, and an observed program may
    read and reset it too. So what the program reads is raised to the peaks from before the reset;
    and where the program resets a counter, the peak of the step so far is kept. After the
    observation the counters are those of its last step.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._cuda, self.device = torch.cuda, torch.device(device)
        self._stats, self._reset = torch.cuda.memory_stats, torch.cuda.reset_peak_memory_stats
        self._program_peaks: dict[str, int] = {}  # from the program's last reset to our last
        self._step_peaks: dict[str, int] = {}  # of this step, up to the program's last reset

    def begin(self) -> None:
        """A step begins: its peaks start from the bytes that are in use now."""
        _raise_peaks(self._program_peaks, self._stats(self.device))
        self._step_peaks.clear()
        self._reset(self.device)

    def row(self) -> tuple[int, ...]:
        """The peaks since `begin`, and the largest free block now, in bytes."""
        peaks = _raise_peaks(self._step_peaks.copy(), self._stats(self.device))
        return (*(peaks[f"{name}_bytes.all.peak"] for name in PEAKS), self._largest_free())

    def _largest_free(self) -> int:
        """The largest block that the allocator could hand out without asking the driver."""
        native = self._cuda.get_allocator_backend() == "native"  # cudaMallocAsync lists no blocks
        segments = self._cuda.memory_snapshot() if native else ()
        blocks = [b for s in segments if s["device"] == self.device.index for b in s["blocks"]]
        return max((b["size"] for b in blocks if b["state"] == "inactive"), default=0)

    def share(self, undo: ExitStack) -> None:
        """Until ``undo`` is closed, intercept the program's reads and resets of the peaks."""
        import torch
        from torch.cuda import memory

        modules = (torch.cuda, memory, torch.accelerator, torch.accelerator.memory)
        wrappers = {"memory_stats": self._on_read, "reset_peak_memory_stats": self._on_reset}
        for module, name in itertools.product(modules, wrappers):
            if (original := getattr(module, name, None)) is not None:
                undo.callback(setattr, module, name, original)
                wrapper = functools.partial(wrappers[name], original)
                setattr(module, name, functools.update_wrapper(wrapper, original))

    def _on_read(self, original: Callable[..., Any], *device: Any, **named: Any) -> Any:
        stats = original(*device, **named)
        if stats and self._is_own(*device, **named):
            stats |= {name: max(size, stats[name]) for name, size in self._program_peaks.items()}
        return stats

    def _on_reset(self, original: Callable[..., Any], *device: Any, **named: Any) -> Any:
        if self._is_own(*device, **named):
            _raise_peaks(self._step_peaks, self._stats(self.device))
            self._program_peaks.clear()
        return original(*device, **named)

    def _is_own(self, device: Any = None) -> bool:
        """Whether the program means this device: an index, a name, or None for the current one."""
        if device is not None and not isinstance(device, int):
            import torch

            device = torch.device(device).index
        return (self._cuda.current_device() if device is None else device) == self.device.index


def _raise_peaks(kept: dict[str, int], stats: dict[str, Any]) -> dict[str, int]:
    """Raise each kept peak, in place, to that of ``stats`` if it is higher."""
    peaks = {name: size for name, size in stats.items() if name.endswith(".peak")}
    kept |= {name: max(size, kept.get(name, 0)) for name, size in peaks.items()}
    return kept
