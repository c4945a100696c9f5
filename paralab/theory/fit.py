"""Rates from measured seconds: a device's rates and overhead, and a link's alpha and bandwidth.

The fit is non-negative least squares of the *relative* error, so that 1 kB and 8 MB, or a small and
a large model, have equal weight. With at most three unknowns it can try every subset of the terms:
the best one with non-negative coefficients wins, and the coefficients of all other terms are zero.
"""

from __future__ import annotations

import math
from itertools import combinations
from operator import mul
from statistics import median
from typing import Any

from paralab.checks import real
from paralab.spec import Link
from paralab.spec.links import messages

NEVER = 1e18  # the rate that a fitted coefficient of zero stands for: its term vanishes


def fit_device(points: list[dict[str, Any]]) -> tuple[float, float, float]:
    """(FLOP/s, bytes/s, seconds per kernel)"""
    terms = [(p["flops"], p["bytes"], p["kernels"]) for p in points]
    (per_flop, per_byte, per_kernel), _ = _fitted(points, terms)
    return _rate(per_flop), _rate(per_byte), per_kernel


def fit_link(points: list[dict[str, Any]]) -> tuple[Link, dict[str, float]]:
    """(link, accuracy) of one operation; adds "fitted" seconds to every point.

    A call of "ranks" members pays alpha for each message that has to come after another one. A
    point without "ranks" is a copy, which pays alpha once.
    """
    terms = [
        (float(messages(p["op"], p["ranks"]) if "ranks" in p else 1), float(p["wire_bytes"]))
        for p in points
    ]
    (alpha, per_byte), accuracy = _fitted(points, terms)
    return Link(alpha=alpha, bandwidth=_rate(per_byte)), accuracy


def fit_rate(points: list[dict[str, Any]], half_rate_tokens: float | None = None) -> float:
    """FLOP/s of one kind of matrix product.

    half_rate_tokens  tokens at which a product reaches half of its rate, on a device on which small
                      products are slower. The fit then has a constant time per product as well,
                      which is no part of the rate
    """
    half, constant = half_rate_tokens or 0.0, float(half_rate_tokens is not None)
    terms = [(p["flops"] * (1 + half / p.get("tokens", 1)), constant) for p in points]
    (per_flop, _), _ = _fitted(points, terms)
    return _rate(per_flop)


def fit_half_rate(points: list[dict[str, Any]]) -> float:
    """Tokens at which a kind of product reaches half its rate; needs points with few and many."""
    terms = [(p["flops"], p["flops"] / p["tokens"], 1.0) for p in points]
    (per_flop, per_token, _), _ = _fitted(points, terms)
    return per_token * _rate(per_flop)


def _rate(seconds: float) -> float:
    """Units per second, from seconds per unit."""
    return 1 / max(seconds, 1 / NEVER)


def _fitted(
    points: list[dict[str, Any]], terms: list[tuple[float, ...]]
) -> tuple[list[float], dict[str, float]]:
    """(coefficients, accuracy); adds "fitted" seconds to every point. terms: a row for each point.

    The coefficients are those >= 0 for which sum(coefficient * term) / seconds is nearest to 1 in
    least squares.
    """
    import numpy as np

    measured = [real("seconds", p["seconds"], above=0.0) for p in points]
    rows = np.array(terms, dtype=float) / np.array(measured)[:, None]
    largest = rows.max(axis=0)
    scale = np.where(largest > 0, largest, 1.0)
    rows /= scale
    least_error, best = math.inf, np.zeros(rows.shape[1])
    for count in range(1, rows.shape[1] + 1):
        for columns in map(list, combinations(range(rows.shape[1]), count)):
            solution = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
            error = float(((rows[:, columns] @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and error < least_error:
                least_error, best = error, np.zeros(rows.shape[1])
                best[columns] = solution
    coefficients = (best / scale).tolist()
    for point, row in zip(points, terms, strict=True):
        point["fitted"] = sum(map(mul, row, coefficients))
    errors = [abs(p["fitted"] / p["seconds"] - 1) for p in points]
    return coefficients, {"median": median(errors), "worst": max(errors)}
