"""2.5D tensor parallelism: d grids of q x q ranks, each with its own samples and the same weights.

2D on one grid, tensor_2d.py, moves the blocks of X along rows and those of W along columns, and
both in every product. With more tokens than features it is X that is expensive; so d grids share
the samples, and each multiplies with a copy of W of its own, as 2.5D matrix multiplication trades
memory for bytes (Solomonik & Demmel 2011; for transformers Tesseract, Wang+ 2021,
arXiv:2105.14500, sec. 3):

    rank (z, i, j)    X: samples over z and i, features over j    W: block (i, j), same for all z

Everything inside a grid is 2D. What is left is the weights' gradient: each grid has that of its own
samples, and the sum over the d grids is the gradient. Without it the copies drift apart and nothing
fails. It comes once per step, after backward, by shared_gradients.py; norms, biases and positions,
which a column's ranks hold the same too, are added over column and depth at once.

Bytes, received per rank on average for Y = X W, forward and backward:

    3 (q-1)/q^2 (MK/d + KN) + 2 (d-1)/d KN/q^2      elements, the last term once per step

Memory: 1/q^2 of the weights, gradients and optimizer states (2D on as many ranks: 1/(d q^2)),
1/(d q^2) of the activations. d = 1 is 2D; d = q has the ranks of 3D. Lab 08.
"""

from __future__ import annotations

from typing import Any

from paralab.parallel.tensor_2d import Layers2D


class Layers25D(Layers2D):
    """Those of 2D, on the samples of this rank's grid."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        depth = self.groups["tp:depth"]
        count = self.plan.microbatch_size // depth.size
        self.samples = slice(depth.index * count, (depth.index + 1) * count)
