"""Modules that are imported when an attribute of them is first used.

A checker has code for the ranks, which import torch in their processes, and code for the notebook's
process, which compares results with the limits and does without torch (but where autograd computes
the right gradients of layers). So a checker takes these modules from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    """Stands for a module. Attributes are not cached, because a check replaces some of torch's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import distributed as dist

    from paralab.exercises import watched
    from paralab.model import reference
else:
    np, torch, dist = map(LazyModule, ("numpy", "torch", "torch.distributed"))
    watched, reference = map(LazyModule, ("paralab.exercises.watched", "paralab.model.reference"))
