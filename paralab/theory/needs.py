"""What training a model needs before it is split over devices: bytes per parameter, devices, days.

Bytes per parameter depend on a recipe, which lists what is kept and how wide each element is:

    fp32            4 + 4 + 8        = 16     paralab's default precision
    zero-fp16       2 + 2 + 12       = 16     ZeRO, Rajbhandari+ 2020, arXiv:1910.02054, sec. 3.1:
                                              16-bit weights and gradients; master weights and
                                              AdamW's two moments in 32 bits (K = 12)
    megatron-bf16   2 + 4 + 12       = 18     gradients accumulated in 32 bits
    megatron-fp16   2 + 2 + 4 + 12   = 20     16-bit gradients and a 32-bit copy of them; ZeRO-
                                              Infinity counts the same (arXiv:2104.07857, sec. 3)

A plan in 16 bits follows zero-fp16, or with ``grad_dtype="fp32"`` megatron-bf16.

Activations come in addition and grow with the batch (interpret/memory.py).

A step of B samples costs F FLOPs (theory/flops.py), so T tokens on n devices take
T F / (B s) / (n X) seconds at X FLOP/s each. theory/training.py has the costs that follow.
"""

from __future__ import annotations

from collections.abc import Mapping

from paralab.checks import choice, instance, num_bytes, real, whole
from paralab.spec import ModelSpec
from paralab.theory.flops import forward_flops, head_flops

RECIPES = {
    "fp32": {"parameters": 4, "gradients": 4, "moments": 8},
    "zero-fp16": {"parameters": 2, "gradients": 2, "master": 4, "moments": 8},
    "megatron-bf16": {"parameters": 2, "gradients": 4, "master": 4, "moments": 8},
    "megatron-fp16": {
        "parameters": 2,
        "gradients": 2,
        "master gradients": 4,
        "master": 4,
        "moments": 8,
    },
}
SECONDS_PER_DAY = 86_400


def bytes_per_parameter(recipe: str) -> int:
    """Bytes of model states that ``recipe`` keeps for every parameter."""
    return sum(recipe_parts(recipe).values())


def model_states(model: ModelSpec, recipe: str = "zero-fp16") -> dict[str, int]:
    """{category: bytes} of one whole copy of the model states."""
    instance("model", model, ModelSpec, "a pl.ModelSpec(...)")
    return {name: width * model.num_params for name, width in recipe_parts(recipe).items()}


def devices_for(size: float, memory: float | str) -> int:
    """The fewest devices of ``memory`` bytes that together hold ``size`` bytes."""
    return -(-num_bytes("size", size) // num_bytes("memory", memory))


def step_flops(model: ModelSpec, samples: int, *, recompute: bool | str = False) -> int:
    """FLOPs of forward, backward and recomputation for ``samples`` samples.

    recompute  as in `Plan`: "none" (False), "selective", or "full" (True), PTD-P's eq. 3

    Backward is twice forward. Recomputing the blocks costs their forward once more, and recomputing
    the attention cores 4 b s^2 h per block; the head is not recomputed.
    """
    samples = whole("samples", samples, at_least=1)
    if not isinstance(recompute, bool):
        choice("recompute", recompute, ("none", "selective", "full"))
    once, core = forward_flops(model, samples), 4 * samples * model.seq_len**2 * model.hidden
    again = {"selective": model.layers * core, "full": once - head_flops(model, samples)}
    return 3 * once + again.get("full" if recompute is True else recompute, 0)


def training_days(
    model: ModelSpec, *, tokens: float, devices: int, flops: float, recompute: bool | str = True
) -> float:
    """Days to train on ``tokens`` with ``devices`` that each reach ``flops`` FLOP/s.

    ``flops`` includes recomputation, as PTD-P's figures do: with recompute="none" the same devices
    reach a lower one.
    """
    tokens, flops = real("tokens", tokens, above=0.0), real("flops", flops, above=0.0)
    devices = whole("devices", devices, at_least=1)
    per_token = step_flops(model, 1, recompute=recompute) / model.seq_len
    return tokens * per_token / (devices * flops) / SECONDS_PER_DAY


def recipe_parts(recipe: str) -> Mapping[str, int]:
    """{kind of state: bytes per parameter} of the recipe with this name."""
    return RECIPES[choice("recipe", recipe, tuple(RECIPES))]
