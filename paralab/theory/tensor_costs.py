"""The published table of the costs of 1D, 2D, 2.5D and 3D tensor parallelism, and its units.

`PRINTED` is the column “Communication (bandwidth)” of Colossal-AI's documentation (ColossalAI,
docs/source/en/features, 1D_, 2D_, 2p5D_ and 3D_tensor_parallel.md: one linear layer, forward and
backward, on a ring), unchanged. Its rows have different units, so they cannot be compared as they
are. With square matrices, M = K = N and S = M N elements, and P ranks:

    row     printed                 unit          so elements sent per rank are
    1D      2 (P-1)/P               S             2 (P-1)/P S
    2D      6 (q-1)/q               S/q           6 (q-1)/q^2 S
    2.5D    3 (q-1)(d+1)/(d q)      S/q           3 (q-1)(d+1)/(d q^2) S, and 2 (d-1)/(d q^2) S for
                                                  the sum over depth, which the table leaves out
    3D      6 (q-1)/q^3             S             6 (q-1)/q^3 S

`in_one_unit` is the last column. It agrees with `tensor.linear_elements`, which holds for matrices
of any shape and is tested against the traffic of real ranks.
"""

from __future__ import annotations

from fractions import Fraction

from paralab.spec import Plan

PRINTED = {  # with P = q^2 in 2D, d q^2 in 2.5D and q^3 in 3D
    "1d": "2(P-1)/P",
    "2d": "6(q-1)/q",
    "2.5d": "3(q-1)(d+1)/(d q)",
    "3d": "6(q-1)/q^3",
}


def as_printed(mode: str, tp: int) -> Fraction:
    """The number printed for ``tp`` ranks, in the unit of its row.

    Raises ValueError where ``tp`` ranks form no grid of this mode.
    """
    q, d = Plan(tp=tp, tp_mode=mode).tp_grid
    return {
        "1d": Fraction(2 * (tp - 1), tp),
        "2d": Fraction(6 * (q - 1), q),
        "2.5d": Fraction(3 * (q - 1) * (d + 1), d * q),
        "3d": Fraction(6 * (q - 1), q**3),
    }[mode]


def unit(mode: str, tp: int) -> Fraction:
    """The unit of the mode's row, as a multiple of S, the elements of a whole matrix."""
    q, _ = Plan(tp=tp, tp_mode=mode).tp_grid
    return Fraction(1, q) if mode in ("2d", "2.5d") else Fraction(1)


def left_out(mode: str, tp: int) -> Fraction:
    """Traffic that the table leaves out, in S: 2.5D's sum of the weight's gradient over depth."""
    q, d = Plan(tp=tp, tp_mode=mode).tp_grid
    return Fraction(2 * (d - 1), d * q * q) if mode == "2.5d" else Fraction(0)


def in_one_unit(mode: str, tp: int) -> Fraction:
    """Elements that a rank sends for one square linear layer, forward and backward, in S."""
    return as_printed(mode, tp) * unit(mode, tp) + left_out(mode, tp)
