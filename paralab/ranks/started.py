"""What torchrun tells a rank, which it does by environment variables. Torch-free."""

from __future__ import annotations

import os
from typing import NamedTuple

from paralab.checks import illegal

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


class Started(NamedTuple):
    """Which rank this process is, and where the ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    local_ranks: int
    node: int
    host: str
    port: int


def started() -> Started:
    """Raise ``ValueError`` naming the variable that is missing or no number."""
    numbers = [variable(name, number=True) for name in (*_NUMBERS, "MASTER_PORT")]
    return Started(*map(int, numbers[:-1]), variable("MASTER_ADDR"), int(numbers[-1]))


def variable(name: str, *, number: bool = False) -> str:
    """What torchrun says by this name, or ``ValueError``."""
    said = os.environ.get(name)
    if not said or (number and not (said.isascii() and said.isdecimal())):
        why = "this process is not a rank of torchrun, which sets it" + " to a number" * number
        legal = "torchrun --nproc-per-node N -m paralab run ..., or none of torchrun's variables"
        raise illegal(name, said, why, legal)
    return said
