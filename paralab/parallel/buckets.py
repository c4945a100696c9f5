"""How gradients are dealt into flat buckets. Torch-free: training and prediction share this one
rule.

An all-reduce costs alpha + bytes / bandwidth. Thousands of small calls pay alpha thousands of
times, one call for everything cannot start before the last gradient exists; buckets sit between the
two (PyTorch Distributed, Li+ 2020, arXiv:2006.15704, sec. 3.2.2-3.2.3). Backward produces gradients
from the last layer to the first, so buckets are filled in reverse order of registration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One flat buffer: which parameters lie in it, and where.

    params   indices of the parameters, in the order their gradients lie in the buffer
    offsets  first element of each
    numel    elements of the buffer, padding included
    """

    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


def assign(
    sizes: Sequence[int], *, bucket_bytes: int, itemsize: int = 4, multiple: int = 1
) -> list[Bucket]:
    """Deal parameters of ``sizes`` elements into buckets, last parameter first.

    A bucket is closed once it holds ``bucket_bytes`` or more, and padded to a whole multiple of
    ``multiple`` elements (the group size, so that every rank's share of it is equal).
    """
    buckets: list[Bucket] = []
    params: list[int] = []
    offsets: list[int] = []
    filled = 0
    for index in reversed(range(len(sizes))):
        params.append(index)
        offsets.append(filled)
        filled += sizes[index]
        if filled * itemsize >= bucket_bytes or index == 0:
            padded = -(-filled // multiple) * multiple
            buckets.append(Bucket(params=tuple(params), offsets=tuple(offsets), numel=padded))
            params, offsets, filled = [], [], 0
    return buckets
