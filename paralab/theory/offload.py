"""Offload in numbers: what lies on which tier, and what moves over which link in a step.

Read off the program. Per rank it comes to this, with w bytes per element (4 in fp32), c elements of
the rank's part of each of ZeRO's units, m micro-batches, and k rows of the optimizer's states
(AdamW's two moments; the fp32 master weights too, in 16 bits and where parameters stay on the
device):

    link        parameters                  gradients          optimizer    activations
    h2d         offloaded: g w c            0                  0            m w l b s h
                else: w c
    d2h         0                           offloaded: m w c   0            m w l b s h
                                            else: w c
    disk read   g w c, in fp32 w c more     m w c              4 k c        m w l b s h
    disk write  w c                         m w c              4 k c        m w l b s h

The disk's rows where that state is on "nvme". Gradients of which others have a part too (replicas;
a tied embedding at a pipeline's ends; what tp ranks share) wait on the device and leave once: their
m is 1. g is how often a unit is needed: 2 m, once for every forward and backward; m if no backward
comes by. With stage 1, and stage 2 with pp > 1, m of gradients is 1. In a layer relay both m are 1,
and the head, which turns round, is needed once, as is what is tied to it. ZeRO-Offload (Ren+ 2021,
arXiv:2101.06840, sec. 3) is the first column's second line and the second's first with w = 2, N = 1
and m = 1: 4 bytes per parameter.

On the host lie 8 bytes per unit besides, a step count and a norm, and buffers: whatever is read or
written passes through two, in turn (programs/tiers.py).
"""

from __future__ import annotations

from paralab.checks import instance
from paralab.interpret import quick
from paralab.programs.instructions import COPY
from paralab.programs.tiers import moved
from paralab.spec import ModelSpec, Plan
from paralab.spec.tiers import LINKS, WAYS


def link_bytes(
    model: ModelSpec, plan: Plan, *, optimizer: str = "adamw", rank: int = 0
) -> dict[str, dict[str, int]]:
    """{link: {category: bytes}} that ``rank`` moves in a step; links are `tiers.WAYS`."""
    instance("plan", plan, Plan, "a pl.Plan(...)").validate(model)
    at = plan.place(rank).pp
    program = quick.program_of(model, plan, optimizer, at)
    found: dict[str, dict[str, int]] = {link: {} for link in WAYS}
    for ins in program.codes[at]:
        if ins.op == COPY and ins.lane in LINKS:
            what = moved(program, ins, at)
            parts = found[ins.lane if what.op == "copy" else f"disk {what.op}"]
            parts[what.category] = parts.get(what.category, 0) + what.bytes
    return found


def tier_bytes(
    model: ModelSpec, plan: Plan, *, optimizer: str = "adamw", rank: int = 0
) -> dict[str, dict[str, int]]:
    """{"host", "file": {category: bytes}} that ``rank`` has at most in addition to its device's
    memory.
    """
    found = {}
    for tier in ("host", "file"):
        held = quick.most(model, plan, optimizer=optimizer, rank=rank, tier=tier)
        found[tier] = {name: size for name, size in held.items() if size}
    return found


def file_bytes(model: ModelSpec, plan: Plan, *, optimizer: str = "adamw") -> int:
    """Bytes of all ranks' files."""
    instance("plan", plan, Plan, "a pl.Plan(...)").validate(model)
    if plan.tiers is None or not plan.tiers.uses("nvme"):
        return 0
    alike = plan.dp * plan.tp  # ranks of a stage
    each = [
        sum(tier_bytes(model, plan, optimizer=optimizer, rank=rank)["file"].values())
        for rank in range(0, plan.world_size, alike)
    ]
    return sum(each) * alike
