"""Which of many ranks, stages or plans a picture shows if it has no room for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def spread(many: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` of the items, evenly spaced, with the first and the last among them."""
    if len(many) <= most:
        return list(many)
    if most == 1:
        return list(many[:1])
    return [many[round(i * (len(many) - 1) / (most - 1))] for i in range(most)]
