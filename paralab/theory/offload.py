"""Offload in numbers: what lies on which tier, and what moves over which link in a step.

Per rank, with w bytes per element (4 in fp32), c elements of the rank's part of each of ZeRO's
units, m micro-batches, and k rows of the optimizer's states (AdamW's two moments; the fp32 master
weights too, in 16 bits and where parameters stay on the device):

    link        parameters                  gradients          optimizer    activations
    h2d         offloaded: g w c            0                  0            m w l b s h
                else: w c
    d2h         0                           offloaded: m w c   0            m w l b s h
                                            else: w c
    disk read   g w c, in fp32 w c more     m w c              4 k c        m w l b s h
    disk write  w c                         m w c              4 k c        m w l b s h

The disk's rows where that state is on "nvme". Gradients of which others have a part too (replicas;
a tied embedding at a pipeline's ends; what tp ranks share) wait on the device and leave once: their
m is 1. g is how often a unit is needed: 2 m, once for every
forward and backward; m if no backward comes by. With stage 1, m of gradients is 1. In a layer relay
(parallel/relay.py) both m are 1, and the head, which turns round, is needed once, as is what is
tied to it. ZeRO-Offload (Ren+ 2021, arXiv:2101.06840, sec. 3) is the first column's second line and
the second's first with w = 2, N = 1 and m = 1: 4 bytes per parameter.

On the host lie 8 bytes per unit besides, a step count and a norm, and buffers: whatever is read or
written passes through two, in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from paralab.parallel.buckets import Unit
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan
from paralab.theory import memory
from paralab.theory.gathering import parts_with_backward
from paralab.tiers import TIER_OF, WAYS

_NOTHING = "device"


class Layout(NamedTuple):
    """What offload has to know of a rank.

    item    bytes per element of parameters and gradients
    rows    k: fp32 tensors of the optimizer for each parameter
    units   [(the unit, elements of the rank's part)] of all, and of those that train
    """

    item: int
    rows: int
    units: list[tuple[Unit, int]]
    trained: list[tuple[Unit, int]]

    @property
    def most(self) -> int:
        """Elements of the largest part."""
        return max(count for _, count in self.units)


def layout(model: ModelSpec, plan: Plan, *, optimizer: str = "adamw", rank: int = 0) -> Layout:
    """What lies where on ``rank``, of a plan that offloads states."""
    made = memory.rank_units(model, plan, rank)
    parts = [(unit, unit.numel // plan.shard_degree) for unit in made]
    own_master = plan.precision != "fp32" or plan.tiers.parameters == _NOTHING
    rows = (2 if optimizer == "adamw" else 0) + own_master
    trained = [(unit, count) for unit, count in parts if not unit.frozen]
    return Layout(BYTES_PER_ELEMENT[plan.precision], rows, parts, trained)


def needed(model: ModelSpec, plan: Plan, unit: Unit, rank: int = 0) -> int:
    """How often stage 3 needs a unit in a step: for every forward, and every backward there is."""
    flows = parts_with_backward(model, memory.stage_parts(model, plan, rank))
    tied = model.tied and "embedding.token.weight" in unit.names and "head" in flows
    if plan.relays:  # a tied embedding stays until the head has turned
        return 1 if tied or unit.part == "head" else 1 + (unit.part in flows)
    return plan.microbatches * (1 + (unit.part in flows or tied))


def link_bytes(
    model: ModelSpec, plan: Plan, *, optimizer: str = "adamw", rank: int = 0
) -> dict[str, dict[str, int]]:
    """{link: {category: bytes}} that ``rank`` moves in a step; links are `tiers.WAYS`."""
    moved: dict[str, dict[str, int]] = {link: {} for link in WAYS}
    for link, category, size in _moves(model, plan, optimizer, rank):
        if size:
            moved[link][category] = moved[link].get(category, 0) + size
    return moved


def _moves(
    model: ModelSpec, plan: Plan, optimizer: str, rank: int
) -> Iterator[tuple[str, str, int]]:
    tiers, m = plan.tiers, plan.microbatches
    if tiers is None:
        return
    if tiers.states:
        at = layout(model, plan, optimizer=optimizer, rank=rank)
        part = at.item * sum(count for _, count in at.trained)
        if tiers.parameters == _NOTHING:
            yield "h2d", "parameters", part
        else:
            up = sum(at.item * count * needed(model, plan, u, rank) for u, count in at.units)
            yield "h2d", "parameters", up
            if tiers.parameters == "nvme":
                yield "disk read", "parameters", up + part * (plan.precision == "fp32")
                yield "disk write", "parameters", part
        often = m if tiers.gradients != _NOTHING and plan.reduces_often else 1
        down = at.item * sum(count * (1 if u.waits else often) for u, count in at.trained)
        yield "d2h", "gradients", down
        if tiers.gradients == "nvme":
            yield "disk read", "gradients", down
            yield "disk write", "gradients", down
        if tiers.optimizer == "nvme":
            states = 4 * at.rows * sum(count for _, count in at.trained)
            yield "disk read", "optimizer", states
            yield "disk write", "optimizer", states
    blocks = sum(map(len, blocks_kept(model, memory.stage_parts(model, plan, rank)).values()))
    inputs = m * memory.offloaded_input(model, plan) * blocks
    for link in WAYS if tiers.activations == "nvme" else WAYS[:2]:
        yield link, "activations", inputs


def tier_bytes(
    model: ModelSpec, plan: Plan, *, optimizer: str = "adamw", rank: int = 0
) -> dict[str, dict[str, int]]:
    """{"host", "file": {category: bytes}} that ``rank`` has beside its device's memory."""
    held: dict[str, dict[str, int]] = {"host": {}, "file": {}}
    tiers = plan.tiers
    if tiers is None:
        return held

    def put(category: str, place: str, size: int) -> None:
        if place != _NOTHING and size:
            tier = held[TIER_OF[place]]
            tier[category] = tier.get(category, 0) + size

    if tiers.states:
        at = layout(model, plan, optimizer=optimizer, rank=rank)
        trained = sum(count for _, count in at.trained)
        put("parameters", tiers.parameters, at.item * sum(count for _, count in at.units))
        put("gradients", tiers.gradients, at.item * trained)
        put("optimizer", tiers.optimizer, 4 * at.rows * trained)
        put("optimizer", "cpu", 8 * len(at.trained))
        put("buffers", "cpu", _buffers(plan, at))
    size = memory.offloaded_input(model, plan)
    if size:
        put("activations", tiers.activations, size * _inputs_alive(model, plan, rank))
        put("buffers", "cpu", 2 * size * (tiers.activations == "nvme"))
    return held


def _buffers(plan: Plan, at: Layout) -> int:
    """Bytes of host memory that only pass data on."""
    tiers, part = plan.tiers, at.item * at.most
    trained = max(count for _, count in at.trained)
    adds = plan.microbatches > 1 and plan.reduces_often
    adds = adds and not all(unit.waits for unit, _ in at.trained)
    staged = "nvme" in (tiers.parameters, tiers.gradients) or (adds and tiers.gradients == "cpu")
    rounded = at.item != 4 and tiers.parameters == _NOTHING
    return (
        2 * part * staged
        + 2 * 4 * at.rows * trained * (tiers.optimizer == "nvme" and at.rows > 0)
        + 2 * at.item * trained * (tiers.gradients != "cpu")
        + 2 * at.item * trained * (tiers.parameters == "nvme" or rounded)
    )


def blocks_kept(model: ModelSpec, held: Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
    """{stage: blocks} of those in ``held`` whose input stays for a backward."""
    blocks = {s: [p for p in parts if p.startswith("blocks.")] for s, parts in held.items()}
    if not model.frozen:  # a backward comes by all of them
        return blocks
    flows = parts_with_backward(model, held)
    return {s: [p for p in parts if p in flows] for s, parts in blocks.items()}


def _inputs_alive(model: ModelSpec, plan: Plan, rank: int) -> int:
    """Blocks' inputs that wait for their backward at once, at most."""
    kept = blocks_kept(model, memory.stage_parts(model, plan, rank))
    blocks = {stage: len(parts) for stage, parts in kept.items()}
    alive = most = 0
    for action in plan.actions()[plan.place(rank)[0]]:
        alive += {"F": 1, "B": -1}.get(action.kind, 0) * blocks[action.stage]
        most = max(most, alive)
    return most


def file_bytes(model: ModelSpec, plan: Plan, *, optimizer: str = "adamw") -> int:
    """Bytes of all ranks' files."""
    if plan.tiers is None or not plan.tiers.uses("nvme"):
        return 0
    ranks = range(0, plan.world_size, plan.dp * plan.tp)  # the others hold as much
    each = [
        sum(tier_bytes(model, plan, optimizer=optimizer, rank=r)["file"].values()) for r in ranks
    ]
    return sum(each) * plan.dp * plan.tp
