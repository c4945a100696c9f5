"""The device of runs that name none. It is kept in the environment variable PARALAB_DEVICE, which
ranks and child processes inherit. Torch-free.
"""

from __future__ import annotations

import os

from paralab.checks import choice

VARIABLE = "PARALAB_DEVICE"
LEGAL = (None, "cpu", "cuda")


def set_default_device(device: str | None) -> None:
    """Set the device for all later launches, runs, traces and predictions of this process that name
    none. `pl.observe` takes the process group for it; the program chooses its device itself.

    device  "cpu", "cuda", or None: a GPU for each rank where there are as many, else the CPU

    Raises ValueError for anything else.
    """
    choice("device", device, LEGAL)
    os.environ.pop(VARIABLE, None)
    if device is not None:
        os.environ[VARIABLE] = device


def default_device() -> str | None:
    """The device that was set, or None. Raises ValueError if PARALAB_DEVICE has another value."""
    return choice(VARIABLE, os.environ.get(VARIABLE) or None, LEGAL)
