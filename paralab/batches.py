"""Data for a rank's device, the micro-batches of a step, and back: scalars and whole tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paralab.data import Corpus
from paralab.spec import ModelSpec, Plan


def load_batches(
    corpus: Corpus, model: ModelSpec, plan: Plan, *, step: int, rank: int, seed: int, pinned: bool
) -> list[Tensor]:
    """The micro-batches of one step for data-parallel rank ``rank``, each (b, s + 1). [Note: same
    batches] in data.py says which samples they hold.

    pinned  in page-locked memory: a copy to a GPU from other memory may block the host
    """
    size, batches = plan.microbatch_size, []
    first = rank * plan.microbatches
    sizes = {"size": size, "global_batch": plan.global_batch, "length": model.seq_len}
    for index in range(first, first + plan.microbatches):
        text = corpus.microbatch(step=step, index=index, seed=seed, **sizes)
        batch = torch.frombuffer(bytearray(text), dtype=torch.uint8).view(size, -1)
        if pinned:
            batch = torch.empty(batch.shape, dtype=batch.dtype, pin_memory=True).copy_(batch)
        batches.append(batch)
    return batches


def read_scalars(scalars: list[Tensor], *, device: str = "cpu") -> list[float]:
    """The values of ``scalars``. A step reads from the device here alone, once, at its end.

    A rank without scalars waits for ``device`` too, because the step ends when its device is done.
    Tensors on "meta" have no values: the result is empty then.
    """
    values = torch.stack(scalars or [torch.zeros((), device=device)]).double()
    return [] if values.is_meta else values.tolist()[: len(scalars)]


def as_numpy(tensor: Tensor) -> np.ndarray:
    """A copy, which is no tensor's memory; bfloat16, which NumPy lacks, becomes float32."""
    values = tensor.detach().cpu()
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy().copy()
