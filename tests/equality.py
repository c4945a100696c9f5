"""The proof that a paradigm is right: its gradients and SGD weights against one process.

The reference is a plain GPT with autograd (paralab/model/reference.py) on the same micro-batches in
the same order. It shares its first weights and its text with the code under test, and nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import paralab as pl

# Largest difference allowed, relative to the largest entry of the tensor. Sums over ranks are added
# in another order than one process adds them; each addition rounds to 2**-24 relative.
# In 16 bits each rounds to 2**-9 (bf16) or 2**-12 (fp16), and a later step starts from there.
TOLERANCE = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.006}


def references(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each training the last step's gradients, the weights after it and one loss per step, by
    `pl.reference` in one process.

    asked  model, microbatches, microbatch_size, steps, lr and data, and if they matter precision
           and clip_norm
    """
    return pl.launch(_each_trained, ranks=1, args=(asked,))[0]


def _each_trained(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_trained(**one) for one in asked]


def _trained(model: pl.ModelSpec, **asked: Any) -> dict[str, Any]:
    found = list(pl.reference.train(model, optimizer="sgd", **asked))
    return {**found[-1]._asdict(), "losses": [step.loss for step in found[1:]]}


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
