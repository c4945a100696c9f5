"""The formulas of the papers as functions; proof and simulation of schedules; replay. No torch.

    import paralab as pl
    pl.theory.zero.bytes_per_device(7.5e9, devices=64, stage=3)
    pl.theory.papers.ptdp_table1()

A module is imported when it is first used, because some import NumPy and pandas.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = sorted(module.name for module in pkgutil.iter_modules(__path__))


def __dir__() -> list[str]:
    return __all__
