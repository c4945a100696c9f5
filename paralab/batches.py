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
    size, found = plan.microbatch_size, []
    first = rank * plan.microbatches
    sizes = {"size": size, "global_batch": plan.global_batch, "length": model.seq_len}
    for index in range(first, first + plan.microbatches):
        text = corpus.microbatch(step=step, index=index, seed=seed, **sizes)
        batch = torch.frombuffer(bytearray(text), dtype=torch.uint8).view(size, -1)
        if pinned:
            batch = torch.empty(batch.shape, dtype=batch.dtype, pin_memory=True).copy_(batch)
        found.append(batch)
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
