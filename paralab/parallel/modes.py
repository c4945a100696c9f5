"""Which set of layers a plan's model is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from paralab.comm import Group
from paralab.model import Layers
from paralab.parallel import split_backward
from paralab.parallel.offload_inputs import Activations
from paralab.parallel.split_backward import WeightHalves
from paralab.parallel.tensor_2d import Layers2D
from paralab.parallel.tensor_3d import Layers3D
from paralab.parallel.tensor_25d import Layers25D
from paralab.parallel.tensor_parallel import Layers1D
from paralab.spec import ModelSpec, Plan

MODES = {"1d": Layers1D, "2d": Layers2D, "2.5d": Layers25D, "3d": Layers3D}


def make_layers(
    model: ModelSpec, plan: Plan, groups: Mapping[str, Group], inputs: Activations | None,
    halves: WeightHalves | None,
) -> Layers:  # fmt: skip
    """The layers of the plan's tp_mode, or whole ones.

    groups  {axis: this rank's group} of its tp group's grid
    inputs  who takes the inputs of recomputed blocks off the device, or None: they stay
    halves  where the linear layers put their weight halves aside, or None: they compute them
    """
    made = Layers()
    if plan.tp > 1:
        made = MODES[plan.tp_mode](model, plan, groups, halves=halves).layers()
    elif halves is not None:
        made = Layers(linear=partial(split_backward.Linear, halves=halves))
    return made if inputs is None else replace(made, partition=inputs)
