"""What CUDA's caching allocator says of a step, next to what the ledger counts.

The ledger counts the bytes of tensors. The allocator rounds every block up, keeps a block until all
streams that use it have passed, keeps what was given back for the next request, and serves cuBLAS's
workspaces too; NCCL and the CUDA context take theirs besides. What it keeps for itself is what a
device lacks that "should have had room".
"""

from __future__ import annotations

PEAKS = ("allocated", "active", "reserved")  # columns of the report that are peaks of a step


class Allocator:
    """Of one device; asking it neither waits for the device nor meets it."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda, self.device = torch.cuda, torch.device(device)
        # CUDA's own pool (cudaMallocAsync) keeps no list of blocks.
        self.native = self._cuda.get_allocator_backend() == "native"

    def begin(self) -> None:
        """A step begins: what there is now is its first peak."""
        self._cuda.reset_peak_memory_stats(self.device)

    def row(self) -> tuple[int, ...]:
        """The peaks since `begin`, and the largest free block now, in bytes."""
        found = self._cuda.memory_stats(self.device)
        return (*(found[f"{name}_bytes.all.peak"] for name in PEAKS), self._largest_free())

    def _largest_free(self) -> int:
        """The largest block that the allocator could hand out without asking the driver."""
        if not self.native:
            return 0
        segments, here = self._cuda.memory_snapshot(), self.device.index
        blocks = [b for segment in segments if segment["device"] == here for b in segment["blocks"]]
        return max((b["size"] for b in blocks if b["state"] == "inactive"), default=0)
