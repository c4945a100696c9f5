"""What torchrun tells a rank, which it does by environment variables. Torch-free."""

from __future__ import annotations

import os

from paralab.checks import illegal

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")


def variable(name: str, *, number: bool = False) -> str:
    """What torchrun says by this name, or ``ValueError``."""
    said = os.environ.get(name)
    if not said or (number and not (said.isascii() and said.isdecimal())):
        why = "this process is not a rank of torchrun, which sets it" + " to a number" * number
        legal = "torchrun --nproc-per-node N -m paralab run ..., or none of torchrun's variables"
        raise illegal(name, said, why, legal)
    return said
