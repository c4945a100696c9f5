"""From measured seconds to rates: the device's three terms, and a link's alpha and bandwidth.

Non-negative least squares of the *relative* error, so that 1 kB and 8 MB, or a small and a large
model, weigh alike. A coefficient that would come out negative is zero. With two or three unknowns
the best subset of terms is found by trying all of them.
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

NEVER = 1e18  # a rate so high that its term vanishes: what a fitted coefficient of zero means


def fit_device(points: list[dict[str, Any]]) -> tuple[tuple[float, float, float], dict[str, float]]:
    """((FLOP/s, bytes/s, seconds per kernel), accuracy); adds "fitted" seconds to every point."""
    terms = [(p["flops"], p["bytes"], p["kernels"]) for p in points]
    (per_flop, per_byte, per_kernel), accuracy = _fitted(points, terms)
    return (_rate(per_flop), _rate(per_byte), per_kernel), accuracy


def fit_link(points: list[dict[str, Any]]) -> tuple[Link, dict[str, float]]:
    """(alpha and bandwidth, accuracy) of one operation; adds "fitted" seconds to every point.

    A call of ``ranks`` members pays alpha for each message that comes after another; a copy, which
    names no ranks, once.
    """
    terms = [
        (float(messages(p["op"], p["ranks"]) if "ranks" in p else 1), float(p["wire_bytes"]))
        for p in points
    ]
    (alpha, per_byte), accuracy = _fitted(points, terms)
    return Link(alpha=alpha, bandwidth=_rate(per_byte)), accuracy


def fit_rate(
    points: list[dict[str, Any]], half_rate_tokens: float | None = None
) -> tuple[float, dict[str, float]]:
    """(FLOP/s, accuracy) of one kind of matrix product; adds "fitted" seconds to every point.

    half_rate_tokens  of a device on which small products are slower. There a product also takes
                      something whatever its size, which is no part of the rate
    """
    half, each = half_rate_tokens or 0.0, float(half_rate_tokens is not None)
    terms = [(p["flops"] * (1 + half / p.get("tokens", 1)), each) for p in points]
    (per_flop, _), accuracy = _fitted(points, terms)
    return _rate(per_flop), accuracy


def fit_half_rate(points: list[dict[str, Any]]) -> float:
    """Tokens at which one kind of product reaches half of its rate; of points with few and many."""
    terms = [(p["flops"], p["flops"] / p["tokens"], 1.0) for p in points]
    (per_flop, per_token, _), _ = _fitted(points, terms)
    return per_token * _rate(per_flop)


def _rate(seconds: float) -> float:
    """How much is done in a second if one of it takes so many."""
    return 1 / max(seconds, 1 / NEVER)


def _fitted(
    points: list[dict[str, Any]], terms: list[tuple[float, ...]]
) -> tuple[list[float], dict[str, float]]:
    """(coefficients >= 0 that make sum(coefficient * term) / seconds nearest to 1, in least
    squares; accuracy); adds "fitted" seconds to every point. terms: a row for each.
    """
    import numpy as np

    took = [real("seconds", p["seconds"], above=0.0) for p in points]
    rows = np.array(terms, dtype=float) / np.array(took)[:, None]
    largest = rows.max(axis=0)
    scale = np.where(largest > 0, largest, 1.0)
    rows /= scale
    best, found = math.inf, np.zeros(rows.shape[1])
    for count in range(1, rows.shape[1] + 1):
        for columns in map(list, combinations(range(rows.shape[1]), count)):
            some = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
            error = float(((rows[:, columns] @ some - 1) ** 2).sum())
            if (some >= 0).all() and error < best:
                best, found = error, np.zeros(rows.shape[1])
                found[columns] = some
    coefficients = (found / scale).tolist()
    for point, row in zip(points, terms, strict=True):
        point["fitted"] = sum(map(mul, row, coefficients))
    errors = [abs(p["fitted"] / p["seconds"] - 1) for p in points]
    return coefficients, {"median": median(errors), "worst": max(errors)}
