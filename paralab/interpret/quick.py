"""Single figures of a plan, for sliders, error messages and checkers. Torch-free.

Each figure comes from the interpreters of a compiled program (memory.py, traffic.py). Those of the
latest plans are cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from paralab.checks import instance
from paralab.interpret.memory import Memory, memory
from paralab.interpret.traffic import Calls, Member
from paralab.programs.compile import compiled
from paralab.programs.program import Program
from paralab.spec import ModelSpec, Plan
from paralab.theory.traffic import BOOKKEEPING


@lru_cache(maxsize=32)
def program_of(
    model: ModelSpec, plan: Plan, optimizer: str, pp: int, clips: bool = False
) -> Program:
    """The program of one pipeline rank."""
    return compiled(model, plan, optimizer=optimizer, clips=clips, only=pp)


def weighed(
    model: ModelSpec,
    plan: Plan,
    optimizer: str = "adamw",
    rank: int = 0,
    gloo: bool = True,
    clips: bool = False,
) -> Memory:
    """What a global rank holds in a step. Raises ``ValueError`` on a plan that is not legal."""
    instance("plan", plan, Plan, "a pl.Plan(...)").validate(model)
    at = plan.place(rank)
    shard = at.dp % plan.shard_degree if plan.zero_stage else 0
    return _weighed(model, plan, optimizer, at.pp, shard, gloo, clips)


@lru_cache(maxsize=512)
def _weighed(
    model: ModelSpec, plan: Plan, optimizer: str, pp: int, shard: int, gloo: bool, clips: bool
) -> Memory:
    """The same for all ranks that share a stage and have the same shard of its states."""
    return memory(program_of(model, plan, optimizer, pp, clips), pp, index=shard, gloo=gloo)


def peak(model: ModelSpec, plan: Plan, **how: Any) -> dict[str, int]:
    """{category: bytes} on a rank's device at its peak, workspace included.

    how  ``optimizer``, ``rank``; ``gloo``: whether with the buffers of gloo's calls, as on
         processors; ``clips``: whether the norm of the gradients is bounded
    """
    return on("device", weighed(model, plan, **how).held)


def most(
    model: ModelSpec, plan: Plan, *, optimizer: str = "adamw", rank: int = 0, tier: str = "device"
) -> dict[str, int]:
    """{category: bytes} on a tier, each category at its own peak."""
    return on(tier, weighed(model, plan, optimizer, rank).most)


def on(tier: str, found: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """{category: bytes} of one tier, from {(tier, category): bytes}."""
    return {category: size for (where, category), size in found.items() if where == tier}


def states(program: Program, pp: int) -> dict[str, int]:
    """{category: bytes} of a pipeline rank's parameters, gradients (as kept until the update) and
    optimizer states, on all tiers together.
    """
    plan, units = program.plan, range(len(program.units[pp]))
    kinds = {
        "parameters": ["shard" if plan.zero_stage == 3 else "w"],
        "gradients": ["gshard" if plan.reduces_often else "grad"],
        "optimizer": ["opt"] + ["master"] * (program.model.item < 4),
    }
    return {
        category: sum(program.size((kind, u, 0), pp).bytes for kind in of_category for u in units)
        for category, of_category in kinds.items()
    }


@lru_cache(maxsize=512)
def sent(model: ModelSpec, plan: Plan) -> Fraction:
    """Bytes that a rank sends in a step, bookkeeping left out: the mean over the first tp group."""
    plan.validate(model)
    program = program_of(model, plan, "adamw", 0)
    calls, members = Calls(program), [Member(program, rank) for rank in range(plan.tp)]
    made = Counter(call for ins in program.codes[0] for call in calls.of(0, ins))
    total = sum(
        count * member.row(call).wire
        for call, count in made.items()
        if call.phase not in BOOKKEEPING
        for member in members
    )
    return Fraction(total, plan.tp)


def fullest(model: ModelSpec, plan: Plan, **how: Any) -> tuple[int, dict[str, int]]:
    """(the rank with the highest peak, {category: bytes} then), of one rank per stage; ``how``: as
    for `peak`.
    """
    ranks = range(0, plan.world_size, plan.dp * plan.tp)
    peaks = {rank: peak(model, plan, rank=rank, **how) for rank in ranks}
    return max(peaks.items(), key=lambda rank_and_peak: sum(rank_and_peak[1].values()))


def table(model: ModelSpec, plan: Plan, **how: Any) -> str:
    """The categories of the rank with the highest peak, largest first, as text for an error."""
    rank, parts = fullest(model, plan, **how)
    rows = sorted(parts.items(), key=lambda part: -part[1])
    rows = [(name, size) for name, size in [*rows, ("in all", sum(parts.values()))] if size]
    who = f"rank {rank}" if plan.pp > 1 else "one rank"
    lines = [f"  {name:<12}{size / 1e6:>14,.1f} MB" for name, size in rows]
    return "\n".join([f"what {who} needs at its predicted peak:", *lines])
