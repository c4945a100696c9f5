"""Lab 00: how many bytes a model's states take, and how many devices hold them.

Mixed precision with AdamW keeps 16 bytes per parameter (Rajbhandari+ 2020, ZeRO, arXiv:1910.02054,
sec. 3.1). The checker has several models and recipes, so a constant that happens to fit one of them
fails on the next.
"""

from __future__ import annotations

import math

from paralab.checks import count_of
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import Mistakes, Reply, ask, size_text
from paralab.spec import ModelSpec

RECIPES: dict[str, dict[str, int]] = {  # {recipe: {state: bytes per parameter}}
    "fp32": {"parameters": 4, "gradients": 4, "moments": 8},
    "mixed": {"parameters": 2, "gradients": 2, "master": 4, "moments": 8},
    "mixed, fp32 gradients": {"parameters": 2, "gradients": 4, "master": 4, "moments": 8},
}
REQUIRED = {
    "tied output matrix": "GPT-2, whose output matrix is the embedding; two recipes: every "
    "state to the byte",
    "untied output matrix": "GPT-2 and the laptop model with tied=False: one more matrix",
    "large models": "7.5 B and 1 T parameters",
    "devices": "four models on devices of 24 and 80 GB, and one that fills its devices exactly",
}
TIED, OWN, LARGE, DEVICES = REQUIRED
CASES = (  # limit, model, recipe, GB of a device if devices are to be counted
    (TIED, "gpt2", "fp32"),
    (TIED, "gpt2", "mixed"),
    (OWN, "gpt2", "mixed"),
    (OWN, "laptop", "mixed, fp32 gradients"),
    (LARGE, "ptdp-7.5b", "mixed"),
    (LARGE, "ptdp-1t", "mixed, fp32 gradients"),
    (DEVICES, "gpt2", "fp32", 0.497759232),  # fits exactly; the others leave a part of a device,
    (DEVICES, "gpt2", "fp32", 24),  # 0.08, 0.49, 0.76 and 0.61
    (DEVICES, "ptdp-7.5b", "mixed", 80),
    (DEVICES, "ptdp-145b", "mixed, fp32 gradients", 80),
    (DEVICES, "ptdp-1t", "mixed", 80),
)


@exercise(
    Takes("model_states(model, recipe)"),
    Takes("devices_needed(model, recipe, memory_gb)"),
    required=REQUIRED,
)
def model_states(tries: Tries) -> None:
    questions = [
        (int(limit == DEVICES), (_model(limit, name), RECIPES[recipe], *memory))
        for limit, name, recipe, *memory in CASES
    ]
    for notes, (limit, name, recipe_name, *memory), reply in ask(tries, CASES, questions):
        model, recipe = _model(limit, name), RECIPES[recipe_name]
        notes.where = ", ".join([name, recipe_name, *(f"{size} GB" for size in memory)])
        right = {state: model.num_params * size for state, size in recipe.items()}
        if limit == DEVICES:
            notes.look(limit, _wrong_devices(reply, right, *memory), f"{reply.value}")
            continue
        wrong = reply.states(right, lambda state, m=model, r=recipe: known_states(m, r[state]))
        notes.look(limit, wrong, size_text(sum(right.values())))


def _model(limit: str, name: str) -> ModelSpec:
    return ModelSpec.preset(name).replace(tied=limit != OWN)


def known_states(model: ModelSpec, size: int) -> Mistakes:
    """size: bytes per parameter"""
    right, head = model.num_params * size, model.vocab * model.hidden * size
    if not model.tied:
        yield "with tied=False the output matrix is a tensor of its own", right - head
    yield "the tied output matrix is the embedding: count it once", right + head
    matrices = 12 * model.layers * model.hidden**2 * size
    yield "12 l h² are the blocks' matrices alone: embeddings, biases and norms count too", matrices
    blocks = matrices + 13 * model.layers * model.hidden * size
    yield "the blocks alone: embeddings, and the norm after the blocks, count too", blocks
    yield "that is the number of parameters; each takes several bytes", right / size


def _wrong_devices(reply: Reply, states: dict[str, int], memory: float) -> str:
    total, size = sum(states.values()), memory * 10**9
    rounded = "rounded, but not up: what is left over needs a device too"
    alone = "that is for the weights alone; the other states need memory too"
    known = [
        (rounded, total // size),
        (rounded, round(total / size)),
        ("one more than needed: the states fit exactly", total // size + 1),
        ("memory_gb is taken for GiB; 1 GB is 10⁹ bytes", math.ceil(total / (memory * 2**30))),
        ("only whole devices exist: round up", total / size),
        ("memory_gb is taken for bytes; a GB is 10⁹ bytes", math.ceil(total / memory)),
        (alone, math.ceil(states["parameters"] / size)),
    ]
    devices = math.ceil(total / size)
    return reply.number(devices, known, lambda n: count_of(n, "device", ","), " of devices")
