"""What goes to a rank's device, a step's text, and what comes back, numbers and whole tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paralab.data import Corpus
from paralab.spec import ModelSpec, Plan


def load_batches(
    corpus: Corpus,
    model: ModelSpec,
    plan: Plan,
    *,
    step: int,
    rank: int,
    seed: int,
    pinned: bool = False,
) -> list[Tensor]:
    """This rank's micro-batches of one step, (b, s + 1) each; data.py's [Note: same batches].

    pinned  for a GPU: a copy from other memory may wait until the device has done what it has
    """
    first = rank * plan.microbatches
    texts = [
        corpus.microbatch(
            step=step,
            index=first + k,
            size=plan.microbatch_size,
            global_batch=plan.global_batch,
            length=model.seq_len,
            seed=seed,
        )
        for k in range(plan.microbatches)
    ]
    found = [
        torch.frombuffer(bytearray(text), dtype=torch.uint8).view(plan.microbatch_size, -1)
        for text in texts
    ]
    if pinned:
        found = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t) for t in found]
    return found


def read_scalars(scalars: list[Tensor], *, device: str = "cpu") -> list[float]:
    """The one place where numbers come back from the device, once per step.

    A rank that has none to read waits for ``device``, too: the step is over when it is done.
    Tensors on "meta" have no values to read.
    """
    values = torch.stack(scalars or [torch.zeros((), device=device)]).double()
    return [] if values.is_meta else values.tolist()[: len(scalars)]


def as_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", copy=True).numpy()
