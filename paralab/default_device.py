"""The device of runs that name none. It is kept in the environment, PARALAB_DEVICE, which ranks and
shells pass on. Torch-free.
"""

from __future__ import annotations

import os

from paralab.checks import choice

VARIABLE = "PARALAB_DEVICE"
LEGAL = (None, "cpu", "cuda")


def set_default_device(device: str | None) -> None:
    """From now on launches, runs, traces and predictions of this process that name no device take
    this one. For `pl.observe` it chooses the process group alone: a program's device is its own.

    device  "cpu", "cuda", or None: a GPU for each rank where there are as many, else the CPU

    Raises ValueError for anything else.
    """
    choice("device", device, LEGAL)
    os.environ.pop(VARIABLE, None)
    if device is not None:
        os.environ[VARIABLE] = device


def default_device() -> str | None:
    """What was set; raises ValueError if the variable says something else."""
    return choice(VARIABLE, os.environ.get(VARIABLE) or None, LEGAL)
