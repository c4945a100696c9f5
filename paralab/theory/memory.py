"""Bytes a rank needs, by category, as formulas: what a run's memory is held against.

Model states, Psi parameters of which all are trained, w bytes each (4 in fp32, 2 in bf16 and fp16),
N ranks that share them out (ZeRO, Rajbhandari+ 2020, arXiv:1910.02054, sec. 3.1 and 5):

    stage            0           1            2            3
    parameters       w Psi       w Psi        w Psi        w Psi/N and what is gathered
    gradients        w Psi       w Psi        w Psi/N      w Psi/N
    optimizer        K Psi       K Psi/N      K Psi/N      K Psi/N

K is 8 for AdamW in fp32 (two moments) and 12 in 16 bits (master weights too); SGD has 0 and 4. With
each tensor, or unit of ZeRO, AdamW keeps a step count of 4 bytes. ZeRO's units are padded to a
multiple of N, and Psi is counted with padding wherever it stands beside N. Frozen parameters have
their own bytes and nothing else.

Once complete, gradients lie in data parallelism's buckets, whose padding counts as "buffers".
ZeRO's buffers are the reduce-scatters under way: memory_zero.py. Activations: activations.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import choice
from paralab.parallel.layouts import residual_shape
from paralab.parallel.schedules import Action
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan
from paralab.theory.activations import (
    activation_bytes,
    block_activation_bytes,
    part_activation_bytes,
    put_aside_bytes,
    recomputed_bytes,
)
from paralab.theory.parameters import (
    gradient_buckets,
    like,
    parameter_sizes,
    rank_sizes,
    rank_units,
    stage_parts,
    stage_shapes,
)
from paralab.theory.tensor import shares
from paralab.theory.workspace import backward_workspace

if TYPE_CHECKING:
    import numpy as np

__all__ = ["activation_bytes", "block_activation_bytes", "fullest", "gradient_buckets", "moments",
           "parameter_sizes", "part_activation_bytes", "put_aside_bytes", "rank_sizes",
           "rank_units", "stage_parts", "stage_shapes", "state_bytes", "table"]  # fmt: skip

OPTIMIZERS = ("adamw", "sgd")
LINEAR = ("qkv", "proj", "up", "down", "output")  # layers with a weight half of their backward


def state_bytes(
    model: ModelSpec, plan: Plan, *, optimizer: str = "adamw", rank: int = 0
) -> dict[str, int]:
    """Bytes of the model states on one rank, by category. Raises ValueError on an unknown
    optimizer.

    What is offloaded is not on the device and counts 0: theory/offload.py; of gradients what has to
    wait there for the sum over other ranks.

    gradients: what a step keeps of them between two micro-batches; with one alone ZeRO's first
    stage gives them away as they come, like its second.
    """
    choice("optimizer", optimizer, OPTIMIZERS)
    item, mixed = BYTES_PER_ELEMENT[plan.precision], plan.precision != "fp32"
    counts = rank_sizes(model, plan, rank)
    trained = {name: count for name, count in counts.items() if model.trainable(name)}
    parameters, gradients = sum(counts.values()), sum(trained.values())
    updated, tensors, padding, waiting = gradients, len(trained), 0, 0
    tiers = plan.tiers
    if plan.zero_stage:
        n, made = plan.shard_degree, rank_units(model, plan, rank)
        shared = [unit for unit in made if not unit.frozen]
        padded = sum(unit.numel for unit in made)
        updated, tensors = sum(unit.numel for unit in shared) // n, len(shared)
        alone = parameters - sum(counts[name] for unit in made for name in unit.names)
        parameters = alone + (padded // n if plan.zero_stage == 3 else padded)
        gradients = updated if plan.reduces_often or plan.zero_stage == 3 else gradients
        waiting = item * sum(unit.numel for unit in shared if unit.waits) // n
    elif buckets := gradient_buckets(model, plan, rank):
        padding = sum(size for _, size in buckets) - item * gradients
    moments = 8 * updated + 4 * tensors if optimizer == "adamw" else 0
    here = {
        "parameters": item * parameters,
        "gradients": item * gradients,
        "optimizer": moments + (4 * updated if mixed else 0),
        "buffers": padding,
    }
    for name in ("parameters", "gradients", "optimizer"):
        if tiers is not None and getattr(tiers, name) != "device":
            here[name] = waiting if name == "gradients" else 0
    return here


def moments(
    model: ModelSpec, plan: Plan, *, optimizer: str = "adamw", rank: int = 0
) -> dict[str, dict[str, int]]:
    """Bytes by category at the two moments of a step that can be the peak of ``rank``.

    "forward": activations and gradients are at their most after a forward (in a pipeline of one
    stage the last: there are gradients if an earlier micro-batch left them). "backward": the last
    gradient is being copied into the last bucket; all the others are in theirs already, their own
    memory given back. Or, if it is more, the first block to be recomputed is there once more.
    Workspace inside a kernel is not part of the formula. Beside the parameters every block has its
    causal mask, s^2 bytes. For ZeRO see memory_zero.py.
    """
    as_ever = _standing(model, plan, optimizer, like(model, plan, rank))
    if plan.zero_stage:
        from paralab.theory.memory_zero import zero_moments

        return zero_moments(model, plan, as_ever.states, rank)
    states = as_ever.states
    action, kept, gradients = fullest(model, plan, rank)
    moving = offloaded_input(model, plan)  # the last block's input is on its way to the host
    forward = {**states, "buffers": states["buffers"] + as_ever.messages, "gradients": gradients,
               "activations": kept + moving}  # fmt: skip
    backward = {**forward, "buffers": forward["buffers"] + as_ever.filling,
                "gradients": states["gradients"], "activations": 0}  # fmt: skip
    begun = _begun(model, plan, rank, forward, as_ever.again)
    if plan.recompute == "none":  # then most of them are what a forward has left
        begun = [found for found in begun if total(found) > total(forward)]
    return {"forward": forward, "backward": max([backward, *begun], key=total)}


class Standing(NamedTuple):
    """Of a rank, whatever its schedule; bytes.

    states    with the blocks' masks
    messages  of a pipeline
    filling   gradients on their way into the last bucket, and its padding
    again     of each chunk, what its backward has beside when it begins
    """

    states: dict[str, int]
    messages: int
    filling: int
    again: tuple[int, ...]


@lru_cache(maxsize=8)  # ranks that are alike
def _standing(model: ModelSpec, plan: Plan, optimizer: str, rank: int) -> Standing:
    states, chunks = state_bytes(model, plan, optimizer=optimizer, rank=rank), []
    parts_of, filling = stage_parts(model, plan, rank).values(), 0
    blocks = sum(part.startswith("blocks.") for parts in parts_of for part in parts)
    states["parameters"] += blocks * model.seq_len**2
    if buckets := gradient_buckets(model, plan, rank):
        counts = [n for name, n in rank_sizes(model, plan, rank).items() if model.trainable(name)]
        item = BYTES_PER_ELEMENT[plan.precision]
        filling = states["buffers"] + item * sum(counts[i] for i in buckets[-1][0])
    for parts in parts_of:
        more = 0
        if plan.recompute != "none":
            more = recomputed_bytes(model, plan.microbatch_size, **asked(plan))
            if "head" in parts:  # its backward is over
                more -= part_activation_bytes(model, "head", plan.microbatch_size, **asked(plan))
        # Its own input is back, and that of the block below, if there is one.
        more += offloaded_input(model, plan) * min(2, sum("blocks" in part for part in parts))
        chunks.append(more)
    return Standing(states, message_bytes(model, plan, rank), filling, tuple(chunks))


def _begun(
    model: ModelSpec, plan: Plan, rank: int, forward: dict[str, int], again: Sequence[int]
) -> list[dict[str, int]]:
    """What is there when each chunk's backward has begun: a block that is recomputed once more, and
    the gradients of earlier micro-batches, which after a forward may not have been there.
    """
    held, begun = _held(model, plan, rank), []
    both, stage = held.activations + held.gradients, held.stage[held.backward]
    for of in dict.fromkeys(stage.tolist()):
        here = held.backward[stage == of]
        kept, gradients = held.bytes(here[both[here].argmax()])
        more = again[of // plan.pp]
        begun.append({**forward, "activations": kept + more, "gradients": gradients})
    if offloaded_input(model, plan):
        hand = backward_workspace(model, plan)
        begun = [{**found, "workspace": hand.down + hand.tied} for found in begun]
    return begun


def total(parts: Mapping[str, int]) -> int:
    """Bytes of all categories."""
    return sum(parts.values())


def kept_bytes(model: ModelSpec, plan: Plan, parts: Sequence[str]) -> dict[str, int]:
    """{part: bytes of activations} of one micro-batch in a stage of these parts.

    What leaves for the next stage is not kept: backward needs its graph, and none of its numbers.
    """
    batch, gone = plan.microbatch_size, offloaded_input(model, plan)
    return {
        part: part_activation_bytes(model, part, batch, **asked(plan))
        - (gone if part.startswith("blocks.") else 0)
        for part in parts
    }


def message_bytes(model: ModelSpec, plan: Plan, rank: int) -> int:
    """Of a pipeline's messages at the fullest moment: one arrives while the rank computes, and one
    leaves. The last stage makes its backward at once, and what leaves has left by the next.
    """
    if plan.pp == 1:
        return 0
    ends = list(stage_parts(model, plan, rank)) == [plan.stages - 1]
    size = BYTES_PER_ELEMENT[plan.precision] * math.prod(residual_shape(model, plan))
    return size if ends else 2 * size


def offloaded_input(model: ModelSpec, plan: Plan) -> int:
    """Bytes of a block's input, if inputs are kept off the device; else 0."""
    if plan.tiers is None or plan.tiers.activations == "device":
        return 0
    return BYTES_PER_ELEMENT[plan.precision] * math.prod(residual_shape(model, plan))


def asked(plan: Plan) -> dict[str, Any]:
    """The plan's settings as the formulas of activations.py take them."""
    return {"recompute": plan.recompute, "precision": plan.precision, "shares": shares(plan),
            "partition": plan.tp if plan.partition_activations else 1}  # fmt: skip


def fullest(model: ModelSpec, plan: Plan, rank: int) -> tuple[Action, int, int]:
    """(forward, bytes of activations, of gradients): the last after which both are at their most.

    A forward's activations stay until its backward, or until the weight half of it.
    """
    held = _held(model, plan, rank)
    forward = held.forward[::-1]
    at = forward[(held.activations + held.gradients)[forward].argmax()]
    action = Action(int(held.stage[at]), "F", int(held.microbatch[at]))
    return action, *held.bytes(at)


class Held(NamedTuple):
    """The bytes there are after a rank's forwards, before its backwards and halves of them, action
    by action. (n,); but for two arrays that tell which actions are which
    """

    stage: np.ndarray
    microbatch: np.ndarray
    activations: np.ndarray
    gradients: np.ndarray
    forward: np.ndarray  # positions
    backward: np.ndarray  # positions, but of weight halves

    def bytes(self, at: int) -> tuple[int, int]:
        return int(self.activations[at]), int(self.gradients[at])


class Chunk(NamedTuple):
    """Of a chunk of a rank's layers, bytes: kept and put aside for a micro-batch, and the gradients
    that input halves make and weight halves (linear layers').
    """

    kept: int
    aside: int
    inputs: int
    weights: int

    @property
    def changes(self) -> tuple[int, int, int, int]:
        """What an F, a B, an I and a W add to the activations there are."""
        return self.kept, -self.kept, self.aside - self.kept, -self.aside


@lru_cache(maxsize=8)  # ranks that are alike
def _chunks(model: ModelSpec, plan: Plan, rank: int) -> tuple[Chunk, ...]:
    item, batch, found = BYTES_PER_ELEMENT[plan.precision], plan.microbatch_size, []
    counts = rank_sizes(model, plan, rank)
    for parts in stage_parts(model, plan, rank).values():
        made = dict.fromkeys("IW", 0)
        for name in stage_shapes(model, parts):
            if model.trainable(name):
                made["W" if name.split(".")[-2] in LINEAR else "I"] += item * counts[name]
        if plan.reduces_often:
            made = {half: size // plan.shard_degree for half, size in made.items()}
        found.append(Chunk(
            sum(kept_bytes(model, plan, parts).values()),
            sum(put_aside_bytes(model, part, batch, plan.tp, plan.precision) for part in parts),
            made["I"], made["W"],
        ))  # fmt: skip
    return tuple(found)


@lru_cache(maxsize=4)  # what is asked for a rank is asked up to three times in a row
def _held(model: ModelSpec, plan: Plan, rank: int) -> Held:
    import numpy as np  # `import paralab` does without

    from paralab.theory.order import CODE, order_of

    found, place = order_of(plan), plan.place(rank)[0]
    here = slice(found.first[place], found.first[place + 1])
    stage, kind, microbatch = found.stage[here], found.kind[here], found.microbatch[here]
    which = stage // plan.pp * len(CODE) + kind  # one number for each stage and kind of the rank
    first = np.full(plan.virtual_stages * len(CODE), len(which))
    np.minimum.at(first, which, np.arange(len(which)))
    change, made = np.zeros(len(first), np.int64), np.zeros(len(which) + 1, np.int64)
    for chunk, one in enumerate(_chunks(model, plan, like(model, plan, rank))):
        own = chunk * len(CODE)
        change[own : own + len(CODE)] = one.changes
        # Gradients that no backward has made yet.
        for half, size in (("I", one.inputs), ("W", one.weights)):
            made[min(first[own + CODE["B"]], first[own + CODE[half]])] += size
    changes, new = change[which], made[:-1]
    forward, weights = kind == CODE["F"], kind == CODE["W"]
    held = np.cumsum(changes) - np.where(forward, 0, changes)
    return Held(stage, microbatch, held, np.cumsum(new) - new, np.flatnonzero(forward),
                np.flatnonzero(~forward & ~weights))  # fmt: skip


def table(model: ModelSpec, plan: Plan, *, optimizer: str = "adamw") -> str:
    """The fullest rank at the fuller of its two moments, category by category, as text: what
    `pl.OutOfMemory` shows.
    """
    found = {
        (moment, rank): parts
        for rank in range(0, plan.world_size, plan.dp * plan.tp)  # the others hold as much
        for moment, parts in moments(model, plan, optimizer=optimizer, rank=rank).items()
    }
    moment, rank = max(found, key=lambda key: (sum(found[key].values()), -key[1]))
    rows = [(name, size) for name, size in found[moment, rank].items() if size]
    rows.append(("in all", sum(size for _, size in rows)))
    who = f"rank {rank}" if plan.pp > 1 else "one rank"
    lines = [f"what {who} needs by the formulas, when {moment} has ended:"]
    lines += [f"  {name:<12}{size / 2**20:>14,.1f} MiB" for name, size in rows]
    return "\n".join(lines)
