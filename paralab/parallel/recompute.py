"""Activation recomputation: keep less for backward, and compute it again when backward is there.

Backward needs what forward had in its hands. Instead of keeping all of it from one to the other, a
part of the model keeps its input alone; when the gradient reaches the part's output, its forward
runs a second time, now with autograd watching, and is differentiated at once:

    "full"       every block keeps only its input (Chen+ 2016, arXiv:1604.06174: sublinear memory)
    "selective"  only the attention core, from the result of qkv to the input of proj, keeps its
                 input alone: it has most of the memory and few of the FLOPs (Korthikanti+ 2022,
                 arXiv:2205.05198, sec. 5)

Memory, elements kept by one block of a micro-batch, x = b s h (those of a block that keeps all are
in theory/memory.py):

    "full"       x: the block's input. During its backward the whole block's once more
    "selective"  input of norm1 x, of qkv x, result of qkv 3x, input of proj x, of norm2 x, of up x,
                 of GELU 4x, of down 4x: 16 x; mean and deviation of two norms, 4 b s; two dropout
                 masks, 2 x, if it drops. The same for both kinds of attention: neither the scores
                 (a b s^2), nor their mask and dropped copy, nor what the fused kernel keeps

Under 1D tensor parallelism every rank keeps the same x. ``Plan(partition_activations=True)`` keeps
a t-th on each and gathers it before the part is recomputed: one all-gather of x per block and
micro-batch (ZeRO's P_a, Rajbhandari+ 2020, arXiv:1910.02054, sec. 6.1).

Where the part drops activations, the state of the random generator stays besides: 5056 bytes on a
CPU, 16 of the host's on a GPU. Bytes on the wire: none. Time, all of it in the backward: "full" one
forward more, which makes backward half as long again; "selective" 4 b s^2 h FLOPs per block.

The gradients are bitwise those without recomputation: the same calls on the same numbers, the same
dropout masks included. Lab 06 shows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def recomputed(
    part: Callable[[Tensor], Tensor], x: Tensor, *, parameters: Iterable[Tensor] = (), draws: bool,
    partition: Any = None,
) -> Tensor:  # fmt: skip
    """``part(x)``, of which only ``x`` is kept for backward.

    parameters  those that part computes with; their gradients are added to ``.grad`` as ever, one
                after the other while the part's own backward runs, and their hooks fire once
    draws       part draws random numbers (dropout): draw the same the second time
    partition   keeps ``partition.part(x)`` instead, a tensor or something that knows where x lies
                (parallel/offload.py); ``partition.whole(...)`` of that is x again
    """
    # x may be the result of frozen layers: autograd has to come by for the parameters' sake too.
    # Not for the parameters themselves: their hooks would fire here, and in the part's backward.
    anchor = x.new_empty(0).requires_grad_(any(p.requires_grad for p in parameters))
    if not (x.requires_grad or anchor.requires_grad):  # no backward comes by: nothing is kept
        return part(x)
    return _Recomputed.apply(part, draws, partition, x, anchor)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Callable, draws: bool, partition: Any, x: Tensor, anchor: Tensor
    ) -> Tensor:
        ctx.part, ctx.partition = part, partition
        kept = x if partition is None else partition.part(x)
        here = isinstance(kept, Tensor)
        ctx.elsewhere = None if here else kept
        ctx.save_for_backward(kept if here else None, _generator_state(x.device) if draws else None)
        return part(x)  # autograd is off inside a Function: nothing more is kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor | None, None]:
        x, state = ctx.saved_tensors
        kept, ctx.elsewhere = (x if ctx.elsewhere is None else ctx.elsewhere), None
        x = x.detach() if ctx.partition is None else ctx.partition.whole(kept)
        x.requires_grad_(ctx.needs_input_grad[3])
        with torch.enable_grad(), _drawing_from(state, x.device):
            y = ctx.part(x)
        torch.autograd.backward(y, grad)
        return None, None, None, x.grad, None


def _generator_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    state = torch.get_rng_state()
    return state.to(device) if device.type == "meta" else state  # a dry run counts its bytes


def _set_generator_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextlib.contextmanager
def _drawing_from(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Random numbers go on from ``state`` in here, and from where they were afterwards."""
    if state is None or state.is_meta:
        yield
        return
    now = _generator_state(device)
    _set_generator_state(state, device)
    try:
        yield
    finally:
        _set_generator_state(now, device)
