"""Lab 10: process groups of a mesh, and one training step on a data x pipeline mesh.

mesh_groups   coordinates of a rank in (pp, dp, tp), and its three groups by `dist.new_group`.
              Judged on one process that plays every rank of four meshes: a rank that makes too
              few groups, or in another order, would hang for real
mesh_step     micro-batches through the stages of a pipeline, gradients averaged over dp, the
              norm of the whole model's gradient, clipping, update. Judged on four ranks, in
              two meshes, against one process: norms and weights of two steps of SGD, whose
              gradients are clipped, and the bytes that each rank sends
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from paralab.checks import shown
from paralab.exercises.diagnose import first_wrong
from paralab.exercises.exercise import Exercise
from paralab.exercises.questions import is_number, plain, wrong_number
from paralab.exercises.tries import Found, Takes, Try, attempt, on_ranks
from paralab.exercises.verdict import NOT_STARTED, Notes
from paralab.spec import ModelSpec, Plan

AXES = ("dp", "pp", "tp")


def _look(notes: Notes, limit: str, where: str, wrong: str) -> None:
    """One of many looks at a limit; what is right needs no place."""
    notes.look(limit, where if wrong else "", wrong, "right everywhere")


# ---- groups --------------------------------------------------------------------------------------
MESHES = ((2, 2, 2), (3, 1, 4), (1, 4, 3), (2, 3, 1))  # dp, pp, tp
GROUPS_ASKED = {
    "coordinates": "of every rank in four meshes: r = (pp index * dp + dp index) * tp + tp index",
    "members": "of each of its groups: the ranks that differ in that coordinate alone",
    "calls of new_group": "every rank makes all groups of the mesh, in the same order",
}
PLACE, MEMBERS, CALLS = GROUPS_ASKED


class Made(NamedTuple):
    """What `new_group` returns to a member here."""

    ranks: tuple[int, ...]


def check_groups(tries: Sequence[Try], timeout: float) -> None:
    for notes, found in on_ranks(tries, played, 1, timeout=timeout):
        for sizes, replies in zip(MESHES, found.results[0], strict=True):
            plan = Plan(**dict(zip(AXES, sizes, strict=True)))
            _look_at_groups(notes, plan, replies)
            if notes.over:
                break


def played(watch: Any, answer: tuple, seed: int) -> list[list[tuple[Any, str, list]]]:
    """For every mesh and rank: (what the answer returned, what went wrong, groups it made)."""
    import torch.distributed as dist

    found: list[list[tuple[Any, str, list]]] = []
    for sizes in MESHES:
        count = sizes[0] * sizes[1] * sizes[2]
        found.append([])
        for rank in range(count):
            calls: list[tuple[int, ...]] = []
            names = _as_rank(rank, count, calls)
            before = {name: getattr(dist, name) for name in names}
            vars(dist).update(names)
            try:
                call = functools.partial(answer[0], **dict(zip(AXES, sizes, strict=True)))
                value, trouble = attempt(lambda call=call: _read(call()))
            finally:
                vars(dist).update(before)
            found[-1].append((value, trouble, calls))
    return found


def _as_rank(rank: int, count: int, calls: list) -> dict[str, Any]:
    """torch.distributed's functions on this rank of so many, in a process that is alone."""
    import torch.distributed as dist

    def new_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        made = Made(tuple(sorted(int(one) for one in (range(count) if ranks is None else ranks))))
        if not made.ranks or not set(made.ranks) <= set(range(count)):
            raise ValueError(f"new_group({list(made.ranks)}) with {count} ranks in all")
        calls.append(made.ranks)
        return made if rank in made.ranks else dist.GroupMember.NON_GROUP_MEMBER

    return {
        "get_rank": lambda group=None: rank if group is None else group.ranks.index(rank),
        "get_world_size": lambda group=None: count if group is None else len(group.ranks),
        "get_process_group_ranks": lambda group: list(group.ranks),
        "new_group": new_group,
    }


def _read(value: Any) -> Any:
    """(coordinates, {axis: ranks}) as plain values."""
    where, groups = value
    kept = {k: one.ranks if isinstance(one, Made) else None for k, one in dict(groups).items()}
    return plain(dict(where)), plain(kept)


def _look_at_groups(notes: Notes, plan: Plan, replies: Sequence[tuple[Any, str, list]]) -> None:
    mesh = f"dp={plan.dp}, pp={plan.pp}, tp={plan.tp}"
    for rank, (value, trouble, _) in enumerate(replies):
        if "NotImplementedError" in trouble:
            notes.end(NOT_STARTED)
            return
        if trouble:
            notes.end(trouble, where=f"{mesh}, rank {rank}", limit=PLACE)
            return
        at = plan.place(rank)
        right = {axis: getattr(at, axis) for axis in AXES}
        wrong = "" if value[0] == right else f"required: {right}, yours {shown(value[0])}"
        _look(notes, PLACE, f"{mesh}, rank {rank}", wrong)
        _look(notes, MEMBERS, f"{mesh}, rank {rank}", _wrong_members(plan, rank, value[1]))
    made = [calls for _, _, calls in replies]
    needed = {plan.ranks(axis, rank) for axis in AXES for rank in range(plan.world_size)}
    _look(notes, CALLS, mesh, _wrong_calls(made, needed))


def _wrong_members(plan: Plan, rank: int, groups: Any) -> str:
    for axis in AXES:
        if groups.get(axis) is None:
            return f"no group of this rank under {axis!r}"
        right, yours = list(plan.ranks(axis, rank)), list(groups[axis])
        if yours != right:
            other = next((a for a in AXES if yours == list(plan.ranks(a, rank))), "")
            named = f"; that is its {other} group" if other else ""
            return f"its {axis} group is {right}, yours {yours}{named}"
    return ""


def _wrong_calls(made: Sequence[list], needed: set) -> str:
    for rank, calls in enumerate(made):
        if calls != made[0]:
            other = "not the groups" if set(calls) != set(made[0]) else "not the order"
            said = f"rank {rank} makes {len(calls)} groups, rank 0 {len(made[0])}"
            return f"{said}, and they are {other} of rank 0: new_group is a call of all ranks"
    missing = sorted(needed - set(made[0]))
    return f"no rank makes the group {list(missing[0])}" if missing else ""


mesh_groups = Exercise(
    name="mesh_groups",
    lab="10",
    asked=GROUPS_ASKED,
    takes=(Takes("a function", "mesh_groups(dp=..., pp=..., tp=...)"),),
    checker=check_groups,
)

# ---- a step --------------------------------------------------------------------------------------
RANKS, STEPS, LR = 4, 2, 0.5
CLIPS = (0.6, 100.0)  # in each step: the first gradient is longer, the second one is not
MODEL = ModelSpec(layers=4, hidden=32, heads=2, seq_len=16, tied=False)
BATCH = {"microbatches": 3, "microbatch_size": 2}
CUTS = ((2, 2), (1, 4))  # dp, pp
SCALARS = 64  # bytes of norms and losses
STEP_ASKED = {
    "norm": "of the whole model's gradient before clipping, on every rank",
    "weights": f"after each of {STEPS} steps of SGD, one of them clipped: those of one process",
    "bytes per rank": "each activation and its gradient once; the stage's gradients once, over dp",
}
NORM, WEIGHTS, BYTES = STEP_ASKED


def check_step(tries: Sequence[Try], timeout: float) -> None:
    for dp, pp in CUTS:
        where = f"dp={dp}, pp={pp}"
        work = on_ranks(tries, stepped, RANKS, (dp, pp), where=where, timeout=timeout)
        for notes, found in work:
            _look_at_step(notes, found, Plan(dp=dp, pp=pp), where)


def stepped(watch: Any, answer: tuple, seed: int, dp: int, pp: int) -> dict[str, Any]:
    """What every rank runs. Returns the norms, and the weights after each step."""
    import torch.distributed as dist

    from paralab.exercises.watched import array
    from paralab.model import reference

    rank, plan = dist.get_rank(), Plan(dp=dp, pp=pp)
    at, groups = plan.place(rank), {}
    for axis in ("dp", "pp"):
        for ranks in sorted({plan.ranks(axis, other) for other in range(RANKS)}):
            made = dist.new_group(ranks)
            groups |= {axis: made} if rank in ranks else {}
    stage = reference.Stage(MODEL, at.pp, pp)
    update, norms, weights = reference.optimizer(stage.parameters(), "sgd", LR), [], []
    for step in range(STEPS):
        batches = reference.batches(MODEL, step=step, rank=at.dp, ranks=dp, **BATCH)
        watch.label = f"step {step}"
        norm = answer[0](stage, batches, groups, update, CLIPS[step], MODEL.hidden)
        norms.append(float(norm) if is_number(norm) else shown(norm))
        weights.append({name: array(p) for name, p in stage.named_parameters()})
    return {"norms": norms, "weights": weights}


@functools.cache
def of_one_process(samples: int) -> list[tuple[dict, dict]]:
    """(gradients before clipping, weights) of each step; first of none, the initial weights."""
    from paralab.launch import launch

    return launch(_alone, ranks=1, args=(samples,))[0]


def _alone(samples: int) -> list[tuple[dict, dict]]:
    import torch

    from paralab.model import reference

    gpt = reference.GPT(MODEL)
    found = [({}, {name: p.detach().numpy().copy() for name, p in gpt.named_parameters()})]
    update = reference.optimizer(gpt.parameters(), "sgd", LR)
    for step, most in enumerate(CLIPS):
        update.zero_grad()
        for tokens, targets in reference.batches(
            MODEL, step=step, **BATCH | {"microbatches": samples}
        ):
            (gpt(tokens, targets) / samples).backward()
        gradients = {name: p.grad.numpy().copy() for name, p in gpt.named_parameters()}
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), most)
        update.step()
        found.append((gradients, {n: p.detach().numpy().copy() for n, p in gpt.named_parameters()}))
    return found


def _look_at_step(notes: Notes, found: Found, plan: Plan, where: str) -> None:
    import numpy as np

    right = of_one_process(plan.dp * BATCH["microbatches"])
    for step in range(STEPS):
        squares = {name: float(np.square(g).sum()) for name, g in right[step + 1][0].items()}
        for rank, one in enumerate(found.results):
            own = sum(squares[name] for name in one["weights"][step]) ** 0.5
            wrong = wrong_number(
                one["norms"][step],
                sum(squares.values()) ** 0.5,
                "{:.6g}".format,
                known_norms(sum(squares.values()) ** 0.5, own, plan, CLIPS[step]),
                what="required: a number, the norm",
                tolerance=1e-4,
            )
            _look(notes, NORM, f"{where}, step {step + 1}, rank {rank}", wrong)
        wrong = ""
        for name, array in right[step + 1][1].items():
            has = [r for r, one in enumerate(found.results) if name in one["weights"][step]]
            wrong = wrong or first_wrong(
                name,
                [found.results[rank]["weights"][step][name] for rank in has],
                [array] * len(has),
                start=[right[step][1][name]] * len(has),
                ranks=lambda place, has=has: f"rank {has[place]}",
            )
        _look(notes, WEIGHTS, f"{where}, step {step + 1}", wrong)
        _look_at_sent(notes, found.sent(f"step {step}"), found, plan, where)


def _look_at_sent(notes: Notes, sent: Sequence[int], found: Found, plan: Plan, where: str) -> None:
    message = 4 * BATCH["microbatch_size"] * MODEL.seq_len * MODEL.hidden
    for rank, size in enumerate(sent):
        at = plan.place(rank).pp
        psi = 4 * sum(array.size for array in found.results[rank]["weights"][0].values())
        messages = BATCH["microbatches"] * message * ((at > 0) + (at < plan.pp - 1))
        required = messages + 2 * (plan.dp - 1) * psi // plan.dp
        wrong = f"rank {rank} sends {size:,} bytes in a step, required: {required:,} and a norm's"
        kept = required <= size <= required + SCALARS
        _look(notes, BYTES, where, "" if kept else wrong)


def known_norms(right: float, own: float, plan: Plan, most: float) -> list[tuple[str, float]]:
    """(what was done, the norm that it gives) of the mistakes that are made."""
    d, m = plan.dp, BATCH["microbatches"]
    return [
        ("that is the norm of this stage alone: other stages have other parameters", own),
        ("it is the norm after clipping", min(right, most)),
        ("every parameter is counted once for each data-parallel rank", right * d**0.5),
        ("gradients are added over dp, not averaged", right * d),
        ("the loss is not divided by the number of micro-batches", right * m),
        ("the loss is divided neither by m nor by dp", right * m * d),
        ("gradients are averaged twice over dp", right / d),
        ("squares are averaged over the stages, not added", right / plan.pp**0.5),
        ("that is the square of the norm", right**2),
    ]


mesh_step = Exercise(
    name="mesh_step",
    lab="10",
    asked=STEP_ASKED,
    takes=(Takes("a function", "mesh_step(stage, batches, groups, optimizer, max_norm, hidden)"),),
    checker=check_step,
)
