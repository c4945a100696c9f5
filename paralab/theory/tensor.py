"""Traffic of tensor parallelism by formula: the elements that ranks send for a linear layer.

For Y = X W with X (M, K) and W (K, N), the elements that all ranks of a tp group send together:

    mode    layer          forward                          backward
    1d      column         0                                2 (P-1) M K
            row            2 (P-1) M N                      0
    1d, sequence parallel
            column         (P-1) M K                        2 (P-1) M K      X is gathered again
            row            (P-1) M N                        (P-1) M N
    2d      any            (q-1) (M K + K N)                2 (q-1) (M K + K N)
    2.5d    any            (q-1) (M K + d K N)              2 (q-1) (M K + d K N), and once per step
                                                            2 (d-1) K N for the weight's gradient
    3d      any            (q-1) (M K + K N + M N)          (q-1) (M K + K N + M N)

P = tp; in 2d P = q^2, in 2.5d d q^2, in 3d q^3. One rank sends 1/P of that: `linear_elements`. In
"2d" and "2.5d" the weight of the logits is sharded as W^T would be, so that M N replaces M K. In 3d
K N is sent twice: forward gathers the weight, backward reduce-scatters its gradient.
"""

from __future__ import annotations

from fractions import Fraction

from paralab.checks import choice
from paralab.spec import ModelSpec, Plan

# (inputs, outputs) of a linear layer, in h; the logits' are (1, V/h)
ROLES = {"qkv": (1, 3), "proj": (1, 1), "up": (1, 4), "down": (4, 1)}
OUTWARD = ("proj", "down")  # the layers that lead from a branch back to the residual stream


def matrix(model: ModelSpec, role: str) -> tuple[int, int]:
    """(K, N) of a linear layer: "qkv", "proj", "up", "down", or "output", the logits."""
    if choice("role", role, (*ROLES, "output")) == "output":
        return model.hidden, model.vocab
    inputs, outputs = ROLES[role]
    return inputs * model.hidden, outputs * model.hidden


def linear_elements(model: ModelSpec, plan: Plan, role: str) -> tuple[Fraction, Fraction]:
    """(forward, backward) elements that one rank sends for a linear layer and micro-batch, on
    average over the tp group; without 2.5D's sum over the grids, once per step (`depth_elements`).
    """
    m, (k, n) = plan.microbatch_size * model.seq_len, matrix(model, role)
    q, d = plan.tp_grid
    if plan.tp_mode == "1d":
        p, row = plan.tp, role in OUTWARD
        x = m * (n if row else k)
        if plan.sequence_parallel:
            forward, backward = (p - 1) * x, (p - 1) * x * (1 if row else 2)
        else:
            forward, backward = (2 * (p - 1) * x, 0) if row else (0, 2 * (p - 1) * x)
    elif plan.tp_mode == "3d":
        forward = backward = (q - 1) * (m * k + k * n + m * n)
    else:
        forward = (q - 1) * (m * (n if role == "output" else k) + d * k * n)
        backward = 2 * forward
    return Fraction(forward, plan.tp), Fraction(backward, plan.tp)


def depth_elements(model: ModelSpec, plan: Plan, role: str) -> Fraction:
    """Elements that one rank of 2.5D sends once per step to sum a weight's gradient over depth.

    With ZeRO a rank sums only its shard of the gradient, after data parallelism; then this is the
    average over the dp ranks.
    """
    (q, d), (k, n) = plan.tp_grid, matrix(model, role)
    if plan.tp_mode != "2.5d":
        return Fraction(0)
    share = plan.shard_degree if plan.zero_stage else 1
    return Fraction(2 * (d - 1) * k * n, d * q * q * share)
