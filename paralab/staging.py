"""Gloo for CUDA tensors: through pinned host buffers and back.

Gloo cannot read device memory, and NCCL refuses two ranks on one GPU; so ranks that share a GPU
stage what they send in pinned (page-locked) host memory, which the device copies at full speed.
Both copies are recorded, on the lanes "d2h" (device to host) and "h2d". The rank stands still while
they run: gloo reads the buffer as soon as it is handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paralab.instruments.recorder import Recorder


class HostStaging:
    """The pinned buffers of one group: pinning is slow, so a finished call's buffer is kept."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._free: dict[tuple, list[Tensor]] = {}  # (shape, dtype) -> buffers no call uses

    def through_host(
        self,
        tensors: list[Tensor],
        writes: Sequence[Tensor],
        reads: Sequence[Tensor],
        finish: Callable | None,
    ) -> tuple[list[Tensor], Callable]:
        """Host buffers for ``tensors``, and what to call at the end: it copies ``writes`` back.

        What the call only fills is not copied down before: of ``writes`` only ``reads`` are.
        """
        twins = {id(t): self._take(t) for t in tensors}
        filled = {id(t) for t in writes} - {id(t) for t in reads}
        self._copy("d2h", [(twins[id(t)], t) for t in tensors if id(t) not in filled])

        def back() -> None:
            self._copy("h2d", [(t, twins[id(t)]) for t in writes])
            for twin in twins.values():
                self._free[tuple(twin.shape), twin.dtype].append(twin)
            if finish is not None:
                finish()

        return [twins[id(t)] for t in tensors], back

    def _take(self, tensor: Tensor) -> Tensor:
        free = self._free.setdefault((tuple(tensor.shape), tensor.dtype), [])
        if free:
            return free.pop()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def _copy(self, lane: str, pairs: list[tuple[Tensor, Tensor]]) -> None:
        if not pairs:
            return
        after, clock = self.recorder.cut(), self.recorder.clock
        start = clock.mark()
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        if any(t.is_cuda for pair in pairs for t in pair):
            torch.cuda.current_stream().synchronize()
        size = sum(target.nbytes for target, _ in pairs)
        self.recorder.copied(lane, start, clock.mark(), after, size=size, category="buffers")
