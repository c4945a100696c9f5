"""Lab 10: coordinates of a rank in the mesh (pp, dp, tp), and its three groups by `dist.new_group`.

One process plays every rank of four meshes in turn. On real ranks the check would hang if a rank
made too few groups, or made them in another order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

from paralab.checks import count_of, shown
from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import dist
from paralab.exercises.questions import kind_of, plain
from paralab.exercises.verdict import Notes, first
from paralab.spec import Plan

AXES = ("dp", "pp", "tp")
MESHES = [Plan(dp=dp, pp=pp, tp=tp) for dp, pp, tp in ((2, 2, 2), (3, 1, 4), (1, 4, 3), (2, 3, 1))]
REQUIRED = {
    "coordinates": "of every rank in four meshes: r = (pp index * dp + dp index) * tp + tp index",
    "members": "of each of its groups: the ranks that differ in that coordinate alone",
    "calls of new_group": "every rank makes all groups of the mesh, in the same order",
}
PLACE, MEMBERS, CALLS = REQUIRED
NO_MESH = "a DeviceMesh makes these groups itself; in this exercise, make them by dist.new_group"


class PlayedGroup(NamedTuple):
    """What `new_group` returns to a member. at: the rank that is played"""

    ranks: tuple[int, ...]
    at: int

    def rank(self) -> int:
        return self.ranks.index(self.at)

    def size(self) -> int:
        return len(self.ranks)


@exercise(Takes("mesh_groups(dp=..., pp=..., tp=...)"), required=REQUIRED)
def mesh_groups(tries: Tries) -> None:
    for notes, outcome in tries.run(played, 1):
        for plan, replies in zip(MESHES, outcome.results[0], strict=True):
            if not notes.over:
                _look(notes, plan, replies)


def played(watch: Any, answer: tuple, seed: int) -> list[list[tuple[Any, str, list]]]:
    """(what the answer returns, or None and why, the groups that it makes) by mesh and rank."""

    def on(plan: Plan, rank: int) -> tuple[Any, str, list]:
        calls: list[tuple[int, ...]] = []
        with _as_rank(rank, plan.world_size, calls):
            value, trouble = attempt(lambda: _read(answer[0](dp=plan.dp, pp=plan.pp, tp=plan.tp)))
        return value, trouble, calls

    return [[on(plan, rank) for rank in range(plan.world_size)] for plan in MESHES]


@contextlib.contextmanager
def _as_rank(rank: int, count: int, calls: list) -> Iterator[None]:
    """Within this context torch.distributed's functions behave as on ``rank`` of ``count`` ranks:
    what they call is replaced, so the names under which an answer imports them do not matter. The
    ranks of each new group are added to ``calls``.
    """
    core = dist.distributed_c10d
    ranks_of = core._world.pg_group_ranks

    def group(ranks: Any) -> PlayedGroup:
        made = PlayedGroup(tuple(sorted(map(int, ranks))), rank)
        ranks_of[made] = {other: position for position, other in enumerate(made.ranks)}
        return made

    def new_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        made = group(range(count) if ranks is None else ranks)
        if not made.ranks or not set(made.ranks) <= set(range(count)):
            said = f"new_group({list(made.ranks)}): a group has one or more of the ranks 0 to"
            raise ValueError(f"{said} {count - 1}")
        calls.append(made.ranks)
        return made if rank in made.ranks else dist.GroupMember.NON_GROUP_MEMBER

    with (
        mock.patch.dict(ranks_of),
        mock.patch.object(core, "_new_group_with_tag", new_group),
        mock.patch("torch.distributed.barrier"),  # there is no other rank to wait for
        mock.patch.object(dist.DeviceMesh, "__init__", side_effect=RuntimeError(NO_MESH)),
    ):
        world, dist.group.WORLD = dist.group.WORLD, group(range(count))
        try:
            yield
        finally:
            dist.group.WORLD = world


def _read(value: Any) -> Any:
    """(coordinates, {axis: ranks}) of what an answer returns."""
    parts = value if isinstance(value, (tuple, list)) and len(value) == 2 else [value]
    if not all(isinstance(one, Mapping) for one in parts) or len(parts) < 2:
        said = " and ".join(map(kind_of, parts))
        raise ValueError(f"required: (where, groups), two dicts; the answer returns {said}")
    where, groups = map(dict, parts)
    kept = {k: one.ranks for k, one in groups.items() if isinstance(one, PlayedGroup)}
    return plain(where), plain(kept)


def _look(notes: Notes, plan: Plan, replies: Sequence[tuple[Any, str, list]]) -> None:
    mesh = f"dp={plan.dp}, pp={plan.pp}, tp={plan.tp}"
    for rank, (value, trouble, _) in enumerate(replies):
        notes.where = f"{mesh}, rank {rank}"
        if trouble:
            return notes.end(trouble, limit=PLACE)
        right, (yours, groups) = {axis: getattr(plan.place(rank), axis) for axis in AXES}, value
        notes.each(PLACE, "" if yours == right else f"required: {right}, yours {shown(yours)}")
        notes.each(MEMBERS, _wrong_members(plan, rank, groups))
    made = [calls for _, _, calls in replies]
    needed = {plan.ranks(axis, rank) for axis in AXES for rank in range(plan.world_size)}
    notes.where = mesh
    notes.each(CALLS, _wrong_calls(made, needed))


def _wrong_members(plan: Plan, rank: int, groups: Any) -> str:
    right = {axis: plan.ranks(axis, rank) for axis in AXES}
    for axis, members in right.items():
        if axis not in groups:
            return f"groups[{axis!r}] is not a process group of which this rank is a member"
        if (yours := groups[axis]) != members:
            said = f"its {axis} group: required: {list(members)}, yours {list(yours)}"
            others = (other for other in AXES if yours == right[other])
            return first(f"{said}; these are the ranks of its {a} group" for a in others) or said
    return ""


def _wrong_calls(made: Sequence[list], needed: set) -> str:
    for rank, calls in enumerate(made):
        if calls != made[0]:
            groups = f"{count_of(len(calls), 'group')}, and not those that rank 0 makes"
            if sorted(calls) == sorted(made[0]):
                groups = "the same groups in another order than rank 0"
            said = "every rank has to make every group, in the same order"
            return f"rank {rank} makes {groups}: {said}"
    missing = sorted(needed - set(made[0]))
    return f"no rank makes the group {list(missing[0])}" if missing else ""
