"""Modules that are imported when something of them is first used.

A notebook's process holds answers against their limits without torch, but for layers whose right
gradients autograd makes: ranks import it, in processes of their own. So a checker, which has code
for both, names these modules here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class Late:
    """Stands for a module; nothing is kept of it, for a check replaces functions of torch's."""

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
    np, torch, dist = map(Late, ("numpy", "torch", "torch.distributed"))
    watched, reference = map(Late, ("paralab.exercises.watched", "paralab.model.reference"))
