"""The proof that a paradigm is right: its gradients and SGD weights against one process.

The reference is a plain torch loop over the same micro-batches in the same order. It uses the model
and the text, and nothing of the training code under test.
"""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import paralab as pl

# Largest difference allowed, relative to the largest entry of the tensor. Sums over ranks are added
# in another order than one process adds them; each addition rounds to 2**-24 relative.
# In 16 bits each rounds to 2**-9 (bf16) or 2**-12 (fp16), and a later step starts from there.
TOLERANCE = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.006}


@functools.cache
def reference(model: pl.ModelSpec, **asked: Any) -> dict[str, Any]:
    """Last step's gradients, the weights after it and all losses, by one plain process; made once.

    asked  microbatches, microbatch_size, steps, lr and data, and if they matter precision and
           clip_norm
    """
    return references([{"model": model, **asked}])[0]


def references(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several, by the same process one after the other."""
    return pl.launch(_each_alone, ranks=1, args=(asked,))[0]


def _each_alone(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_train_alone(**one) for one in asked]


def _train_alone(
    model: pl.ModelSpec, microbatches: int, microbatch_size: int, steps: int, lr: float, data: Path,
    precision: str = "fp32", clip_norm: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    import torch

    from paralab.data import Corpus
    from paralab.model import GPT

    gpt, corpus, losses = GPT(model, seed=0), Corpus(str(data)), []
    trained = {name: p for name, p in gpt.named_parameters() if p.requires_grad}
    masters = {name: p.detach().clone() for name, p in trained.items()}  # fp32
    gpt.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    scale = 2.0**16 if precision == "fp16" else 1.0
    for step in range(steps):
        gpt.zero_grad()
        for k in range(microbatches):
            text = corpus.microbatch(
                step=step, index=k, size=microbatch_size, seed=0, length=model.seq_len,
                global_batch=microbatches * microbatch_size,
            )  # fmt: skip
            tokens = torch.tensor(list(text)).view(microbatch_size, -1)
            # Dropout's masks are drawn for each micro-batch and part, whoever computes them.
            gpt.before = lambda part, at=f"0 {step} {k}": torch.manual_seed(
                zlib.crc32(f"{at} {part}".encode())
            )
            loss = gpt(tokens[:, :-1], tokens[:, 1:])
            (loss / microbatches * scale).backward()
            losses.append(loss.item())
        gradients = {name: p.grad.float() / scale for name, p in trained.items()}
        assert all(bool(g.isfinite().all()) for g in gradients.values())
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        shrink = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm.item() + 1e-6))
        with torch.no_grad():
            for name, p in trained.items():
                masters[name] -= lr * (gradients[name] * shrink)
                p.copy_(masters[name])
    weights = {name: p.detach().float().numpy() for name, p in gpt.named_parameters()}
    gradients = {name: g.numpy() for name, g in gradients.items()}
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
