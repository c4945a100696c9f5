"""Offload in numbers: the bytes held on each tier, and those moved over each link in a step.

They are counted from the compiled program. Per rank and unit they equal the following, with w bytes
per element (4 in fp32), c elements of the rank's shard of the unit, m micro-batches, and k fp32
values of the optimizer per parameter (AdamW's two moments; also the master weights, in 16 bits and
where parameters stay on the device):

    link        parameters                  gradients          optimizer    activations
    h2d         offloaded: g w c            0                  0            m w l b s h
                else: w c
    d2h         0                           offloaded: m w c   0            m w l b s h
                                            else: w c
    disk read   g w c, in fp32 w c more     m w c              4 k c        m w l b s h
    disk write  w c                         m w c              4 k c        m w l b s h

The disk's rows are for a state on "nvme". g is how often a unit is needed: 2 m times, once for
every forward and every backward. Gradients that are first summed with other ranks' (replicas; a
tied embedding at both ends of a pipeline; parameters shared by tp ranks) wait on the device and
leave once, so their m is 1. It is also 1 with stage 1, and with stage 2 and pp > 1. In a layer
relay both m are 1, and the head, where forward turns into backward, is needed once, as is an
embedding that is tied to it. ZeRO-Offload (Ren+ 2021, arXiv:2101.06840, sec. 3) keeps parameters on
the device and offloads gradients: with w = 2, m = 1 and one rank, 4 bytes per parameter.

The host also holds 8 bytes per unit, a step count and a norm, and buffers: all that is read or
written passes through two of them in turn (programs/tiers.py).
"""

from __future__ import annotations

from paralab.checks import instance
from paralab.interpret import quick
from paralab.programs.instructions import COPY
from paralab.programs.tiers import moved
from paralab.spec import ModelSpec, Plan
from paralab.spec.tiers import LINKS, WAYS


def link_bytes(model: ModelSpec, plan: Plan) -> dict[str, dict[str, int]]:
    """{link: {category: bytes}} that rank 0 moves in a step of AdamW; links are `tiers.WAYS`."""
    instance("plan", plan, Plan, "a pl.Plan(...)").validate(model)
    program = quick.program_of(model, plan, "adamw", 0)
    links = {link: {} for link in WAYS}
    for ins in program.codes[0]:
        if ins.op == COPY and ins.lane in LINKS:
            copy = moved(program, ins, 0)
            parts = links[ins.lane if copy.op == "copy" else f"disk {copy.op}"]
            parts[copy.category] = parts.get(copy.category, 0) + copy.bytes
    return links


def file_bytes(model: ModelSpec, plan: Plan, *, optimizer: str = "adamw") -> int:
    """Bytes of the files of all ranks together."""
    instance("plan", plan, Plan, "a pl.Plan(...)").validate(model)
    if plan.tiers is None or not plan.tiers.uses("nvme"):
        return 0
    per_stage = plan.dp * plan.tp  # ranks of one stage, whose files have the same size
    sizes = [
        sum(quick.most(model, plan, optimizer=optimizer, rank=rank, tier="file").values())
        for rank in range(0, plan.world_size, per_stage)
    ]
    return sum(sizes) * per_stage
