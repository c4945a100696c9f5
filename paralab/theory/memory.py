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
    states = state_bytes(model, plan, optimizer=optimizer, rank=rank)
    held = [part for parts in stage_parts(model, plan, rank).values() for part in parts]
    masks = sum(part.startswith("blocks.") for part in held) * model.seq_len**2
    states["parameters"] += masks
    if plan.zero_stage:
        from paralab.theory.memory_zero import zero_moments

        return zero_moments(model, plan, states, rank)
    action, kept, gradients = fullest(model, plan, rank)
    moving = offloaded_input(model, plan)  # the last block's input is on its way to the host
    messages, filling = message_bytes(model, plan, rank), 0
    forward = {**states, "buffers": states["buffers"] + messages, "gradients": gradients,
               "activations": kept + moving}  # fmt: skip
    if buckets := gradient_buckets(model, plan, rank):
        counts = [n for name, n in rank_sizes(model, plan, rank).items() if model.trainable(name)]
        item = BYTES_PER_ELEMENT[plan.precision]
        filling = states["buffers"] + item * sum(counts[i] for i in buckets[-1][0])
    backward = {**forward, "buffers": forward["buffers"] + filling,
                "gradients": states["gradients"], "activations": 0}  # fmt: skip
    begun = _begun(model, plan, rank, forward)
    if plan.recompute == "none":  # then most of them are what a forward has left
        begun = [found for found in begun if total(found) > total(forward)]
    return {"forward": forward, "backward": max([backward, *begun], key=total)}


def _begun(
    model: ModelSpec, plan: Plan, rank: int, forward: dict[str, int]
) -> list[dict[str, int]]:
    """What is there when each backward has begun: a block that is recomputed once more, and the
    gradients of earlier micro-batches, which after a forward may not have been there.
    """
    moving, more = offloaded_input(model, plan), {}
    for stage, parts in stage_parts(model, plan, rank).items():
        more[stage] = 0
        if plan.recompute != "none":
            more[stage] = recomputed_bytes(model, plan.microbatch_size, **asked(plan))
            if "head" in parts:  # its backward is over
                head = part_activation_bytes(model, "head", plan.microbatch_size, **asked(plan))
                more[stage] -= head
        # Its own input is back, and that of the block below, if there is one.
        more[stage] += moving * min(2, sum("blocks" in part for part in parts))
    held = _held(model, plan, rank)
    both, most = held.activations + held.gradients, {}
    for stage in dict.fromkeys(held.stage[held.backward].tolist()):
        here = held.backward[held.stage[held.backward] == stage]
        most[stage] = held.bytes(here[both[here].argmax()])
    begun = [{**forward, "activations": kept + more[stage], "gradients": gradients}
             for stage, (kept, gradients) in most.items()]  # fmt: skip
    if moving:
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
    item, batch = BYTES_PER_ELEMENT[plan.precision], plan.microbatch_size
    counts = rank_sizes(model, plan, rank)
    for s, parts in stage_parts(model, plan, rank).items():
        size = sum(kept_bytes(model, plan, parts).values())
        late = sum(put_aside_bytes(model, part, batch, plan.tp, plan.precision) for part in parts)
        own = s // plan.pp * len(CODE)
        change[own : own + len(CODE)] = size, -size, late - size, -late  # F, B, I, W
        # Gradients that no backward has made yet; of linear layers' the weight half makes them.
        trained = [name for name in stage_shapes(model, parts) if model.trainable(name)]
        for half in "IW":
            mine = [n for n in trained if (n.split(".")[-2] in LINEAR) == (half == "W")]
            elements = item * sum(counts[name] for name in mine)
            elements //= plan.shard_degree if plan.reduces_often else 1
            made[min(first[own + CODE["B"]], first[own + CODE[half]])] += elements
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
