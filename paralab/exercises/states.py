"""Lab 00: what a model's states weigh, and how many devices hold them.

Mixed precision with AdamW keeps 16 bytes per parameter whatever the model does: weights and
gradients in 16 bits, master weights and two moments in 32 (Rajbhandari+ 2020, ZeRO,
arXiv:1910.02054, sec. 3.1). The checker asks for exact bytes on models and recipes of its own, so a
constant that happens to fit one of them fails on the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paralab.exercises.exercise import Exercise
from paralab.exercises.verdict import NOT_STARTED, Notes, Verdict, attempt
from paralab.spec import ModelSpec

RECIPES: dict[str, dict[str, int]] = {
    "fp32": {"parameters": 4, "gradients": 4, "moments": 8},
    "mixed": {"parameters": 2, "gradients": 2, "master": 4, "moments": 8},
    "mixed, fp32 gradients": {"parameters": 2, "gradients": 4, "master": 4, "moments": 8},
}
TIED, OWN, LARGE, DEVICES = (
    "one head for both ends",
    "a head of its own",
    "large models",
    "devices",
)
STATE_CASES = (
    (TIED, "gpt2", True, "fp32"),
    (TIED, "gpt2", True, "mixed"),
    (OWN, "gpt2", False, "mixed"),
    (OWN, "laptop", False, "mixed, fp32 gradients"),
    (LARGE, "ptdp-7.5b", True, "mixed"),
    (LARGE, "ptdp-1t", True, "mixed, fp32 gradients"),
)
DEVICE_CASES = (  # with a share of a device over of 0.08, 0.49, 0.76 and 0.61: none rounds alike
    ("gpt2", "fp32", 24),
    ("ptdp-7.5b", "mixed", 80),
    ("ptdp-145b", "mixed, fp32 gradients", 80),
    ("ptdp-1t", "mixed", 80),
)

TASK = """
**Your turn.** Write two functions.

`model_states(model, recipe)` says what every state of a model weighs, `{state: bytes}`. `recipe`
has the bytes *per parameter*: `{"parameters": 2, "gradients": 2, "master": 4, "moments": 8}` is
mixed precision with AdamW. `model` is a `pl.ModelSpec`.

`devices_needed(model, recipe, memory_gb)` says how many devices hold these states and nothing else,
if all share alike. A data sheet's GB is 10⁹ bytes; a device is whole.

`pl.exercises.model_states.check(model_states, devices_needed)`
"""

ASKED = (
    (TIED, "GPT-2, two recipes: every state to the byte"),
    (OWN, "the same with tied=False"),
    (LARGE, "7.5 B and 1 T parameters"),
    (DEVICES, "four models on devices of 24 and 80 GB"),
)

HINTS = (
    "every recipe is a number of bytes per parameter. What has to be known of the model is one "
    "number only.",
    "model.num_params is that number (or add up model.parameter_shapes(): with a tied head, "
    "embedding and head are one tensor there). Do not look for 16 anywhere: the recipe says it.",
    "bytes of a state = model.num_params * recipe[state]. Devices: the sum over the states, "
    "divided by memory_gb * 10**9, and rounded up (math.ceil).",
)


def check(
    model_states: Callable[..., Any], devices_needed: Callable[..., Any] | None = None
) -> Verdict:
    """Ask both functions about models of 0.8 M to 1 T parameters. Takes no time, starts no ranks.

    model_states    called as (ModelSpec, {state: bytes per parameter})
    devices_needed  called as (ModelSpec, recipe, GB); without it that limit stays open
    """
    notes = Notes("model_states", ASKED)
    started = False
    for limit, name, tied, recipe_name in STATE_CASES:
        model, recipe = ModelSpec.preset(name).replace(tied=tied), RECIPES[recipe_name]
        found, trouble = attempt(lambda m=model, r=recipe: model_states(m, dict(r)))
        if trouble == NOT_STARTED:
            break
        started = True
        where = f"{name}, {recipe_name}"
        wrong = trouble or _wrong_states(model, recipe, found)
        right = size_text(sum(recipe.values()) * model.num_params)
        notes.note(limit, f"{where}: {wrong or right}", not wrong, f"{where}: {wrong}")
    for name, recipe_name, memory_gb in DEVICE_CASES if devices_needed else ():
        model, recipe = ModelSpec.preset(name), RECIPES[recipe_name]
        found, trouble = attempt(
            lambda m=model, r=recipe, gb=memory_gb: devices_needed(m, dict(r), gb)
        )
        if trouble == NOT_STARTED:
            break
        started = True
        where = f"{name}, {recipe_name}, {memory_gb} GB"
        wrong = trouble or _wrong_devices(model, recipe, memory_gb, found)
        notes.note(DEVICES, f"{where}: {wrong or found}", not wrong, f"{where}: {wrong}")
    if started and not notes.said:
        notes.said = "there is one function left to write"  # read only where a row stayed open
    return notes.verdict()


def _wrong_states(model: ModelSpec, recipe: Mapping[str, int], found: Any) -> str:
    """What is wrong with the first wrong state, or ""."""
    if not isinstance(found, Mapping):
        return f"asked is a dict, {{state: bytes}}, yours is a {type(found).__name__}"
    for state in recipe:
        if state not in found:
            return f"the state {state!r} is missing"
    for state in found:
        if state not in recipe:
            return f"{state!r} is not in the recipe"
    for state, size in recipe.items():
        right, yours = model.num_params * size, found[state]
        if not is_number(yours):
            return f"{state!r} is {yours!r}, not a number of bytes"
        if yours != right:
            return f"{state!r} is {size_text(right)}, yours {size_text(yours)}" + _why(
                model, size, right, yours
            )
    return ""


def _why(model: ModelSpec, size: int, right: int, yours: float) -> str:
    """The mistake that gives exactly this number, if it is a known one."""
    head = model.vocab * model.hidden * size
    known = {
        right + head: "the tied head is the embedding, one tensor: count it once",
        12 * model.layers * model.hidden**2 * size: "12 l h² are the blocks' matrices alone: "
        "embeddings, biases and norms have parameters too",
        right / size: "that is the number of parameters, each of which takes some bytes",
        right / 1e9: "that is in GB, asked are bytes",
        right / 2**30: "that is in GiB, asked are bytes",
    }
    if not model.tied:
        known[right - head] = "with tied=False the head is a tensor of its own"
    return f" ({known[yours]})" if yours in known else ""


def _wrong_devices(model: ModelSpec, recipe: Mapping[str, int], gb: int, found: Any) -> str:
    total = model.num_params * sum(recipe.values())
    right = math.ceil(total / (gb * 10**9))
    if not is_number(found):
        return f"asked is a number of devices, yours is {found!r}"
    if found == right:
        return ""
    known = {
        total // (gb * 10**9): "rounded, but not up: the rest has no place",
        round(total / (gb * 10**9)): "rounded, but not up: the rest has no place",
        math.ceil(total / (gb * 2**30)): "those are GiB; a data sheet's GB is 10⁹ bytes",
        total / (gb * 10**9): "a device is whole",
        math.ceil(model.num_params * 2 / (gb * 10**9)): "the weights alone; there is more to keep",
    }
    why = f" ({known[found]})" if found in known else ""
    return f"{right:,} device{'s' * (right > 1)}, yours {found:,}{why}"


def is_number(value: object) -> bool:
    """Whether ``value`` is one number: of Python, NumPy or torch, but no text and no truth."""
    if not hasattr(value, "__float__") or isinstance(value, (bool, str)):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several, say
        return False
    return True


def size_text(count: float) -> str:
    """Bytes as a data sheet has them, with enough digits to tell answers apart."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if abs(count) >= factor:
            return f"{count / factor:,.3f} {unit}"
    return f"{count:,.10g} bytes"


model_states = Exercise(
    name="model_states", lab="00", task=TASK, asked=ASKED, hints=HINTS, checker=check
)
