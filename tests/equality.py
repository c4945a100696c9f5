"""The proof that a paradigm is right: its gradients and SGD weights against one process.

The reference is a plain torch loop over the same micro-batches in the same order. It uses the model
and the text, and nothing of the training code under test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import paralab as pl

# Largest difference allowed, relative to the largest entry of the tensor. Sums over ranks are added
# in another order than one process adds them; each addition rounds to 2**-24 relative.
TOLERANCE = {"fp32": 1e-5}


def reference(
    model: pl.ModelSpec,
    *,
    microbatches: int,
    microbatch_size: int,
    steps: int,
    lr: float,
    data: Path,
) -> dict[str, Any]:
    """Last step's gradients, the weights after it and all losses, by one plain process."""
    args = (model, microbatches, microbatch_size, steps, lr, str(data))
    return pl.launch(_train_alone, ranks=1, args=args)[0]


def _train_alone(
    model: pl.ModelSpec, microbatches: int, microbatch_size: int, steps: int, lr: float, data: str
) -> dict[str, Any]:
    import torch

    from paralab.data import Corpus
    from paralab.model import GPT

    gpt, corpus, losses = GPT(model, seed=0), Corpus(data), []
    for step in range(steps):
        gpt.zero_grad()
        for k in range(microbatches):
            text = corpus.microbatch(
                step=step, index=k, size=microbatch_size, seed=0, length=model.seq_len,
                global_batch=microbatches * microbatch_size,
            )  # fmt: skip
            tokens = torch.tensor(list(text)).view(microbatch_size, -1)
            loss = gpt(tokens[:, :-1], tokens[:, 1:])
            (loss / microbatches).backward()
            losses.append(loss.item())
        gradients = {name: p.grad.numpy().copy() for name, p in gpt.named_parameters()}
        with torch.no_grad():
            for p in gpt.parameters():
                p -= lr * p.grad
    weights = {name: p.detach().numpy() for name, p in gpt.named_parameters()}
    return {"gradients": gradients, "weights": weights, "losses": losses}


def worst(expected: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> tuple[float, str]:
    """(largest relative difference, the tensor it is in). Names and shapes must be the same."""
    assert list(expected) == list(got)
    found = (0.0, "")
    for name, a in expected.items():
        b = got[name]
        assert a.shape == b.shape, name
        scale = np.abs(a).max() or 1.0
        gap = float(np.abs(a - b).max() / scale)
        found = max(found, (float("inf") if np.isnan(gap) else gap, name))
    return found


def assert_equal_state(expected: dict[str, Any], got: Any, *, precision: str = "fp32") -> None:
    """Gradients and weights within TOLERANCE, the first wrong tensor named."""
    for what in ("gradients", "weights"):
        state = got[what] if isinstance(got, dict) else getattr(got, what)
        gap, name = worst(expected[what], state)
        assert gap <= TOLERANCE[precision], (
            f"{what} of {name} differ by {gap:.2e} of their largest entry"
        )
