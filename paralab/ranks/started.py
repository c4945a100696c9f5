"""The environment variables by which torchrun tells a process which rank it is. Torch-free."""

from __future__ import annotations

import os

from paralab.checks import illegal

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")


def variable(name: str, *, number: bool = False) -> str:
    """The value of one of torchrun's variables. Raises ``ValueError`` if it is not set."""
    value = os.environ.get(name)
    if not value or (number and not (value.isascii() and value.isdecimal())):
        why = "this process is not a rank of torchrun, which sets it" + " to a number" * number
        legal = "torchrun --nproc-per-node N -m paralab run ..., or no variables of torchrun"
        raise illegal(name, value, why, legal)
    return value
