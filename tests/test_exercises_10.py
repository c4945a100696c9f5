"""Lab 10's exercises: groups of a mesh, and a training step on a data x pipeline mesh."""

import textwrap

from torch.distributed import get_process_group_ranks, get_rank, get_world_size, new_group

import paralab as pl
from judged import Table, altered
from paralab.exercises import mesh, sources

GROUPS, STEP = pl.exercises.mesh_groups, pl.exercises.mesh_step


# ---- groups --------------------------------------------------------------------------------------
def by_hand(*, dp, pp, tp):
    """Coordinates by divisions, groups by steps: an unusual answer that is right."""
    import torch.distributed as dist

    r, n, groups = dist.get_rank(), dist.get_world_size(), {}
    for axis, size, step in (("pp", pp, dp * tp), ("tp", tp, 1), ("dp", dp, tp)):
        for first in range(n):
            if first // step % size == 0:
                made = dist.new_group(range(first, first + size * step, step))
                if (r - first) % step == 0 and 0 <= r - first < size * step:
                    groups[axis] = made
    return {"tp": r % tp, "dp": r // tp % dp, "pp": r // tp // dp}, groups


def by_name(*, dp, pp, tp):
    """Functions that were imported before the check, and what groups say of themselves."""
    where, groups = by_hand(dp=dp, pp=pp, tp=tp)
    for axis, size in (("dp", dp), ("pp", pp), ("tp", tp)):
        members = get_process_group_ranks(groups[axis])
        assert get_world_size(groups[axis]) == groups[axis].size() == len(members) == size
        assert members[get_rank(groups[axis])] == get_rank() == members[groups[axis].rank()]
    assert new_group() and get_world_size() == len(get_process_group_ranks(None)) == dp * pp * tp
    return where, groups


def by_mesh(*, dp, pp, tp):
    """As one would write it at work."""
    from torch.distributed import init_device_mesh

    grid = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    where = {axis: grid.get_local_rank(axis) for axis in grid.mesh_dim_names}
    return where, {axis: grid.get_group(axis) for axis in grid.mesh_dim_names}


KEEP = "            made = dist.new_group(ranks)  # every rank, whether it is in the group or not\n"
MINE = KEEP + "            if rank in ranks:\n                groups[axis] = made"
GRID, ALL = "reshape(pp, dp, tp)", 'enumerate(("pp", "dp", "tp"))'
EVERY = {mesh.PLACE, mesh.MEMBERS, mesh.CALLS}
WRONG_GROUPS = [  # change of the answer, limits it breaks, words of the verdict
    ([(MINE, MINE.replace(KEEP, "").replace("= made", "= dist.new_group(ranks)"))],
     {mesh.CALLS},
     "rank 1 makes 3 groups, and not those that rank 0 makes: every rank has to make every group"),
    ([(GRID, "reshape(dp, pp, tp).transpose(0, 1)")], EVERY,
     "its dp group: required: [0, 2], yours [0, 4]"),
    ([("in enumerate", "in (lambda e: [(0, 'dp'), (1, 'pp'), (2, 'tp')])")], {mesh.MEMBERS},
     "these are the ranks of its pp group"),
    ([(ALL, 'enumerate(("pp", "dp"))')], {mesh.MEMBERS, mesh.CALLS},
     "groups['tp'] is not a process group of which this rank is a member"),
    ([("tolist():", "tolist()[::-1 if rank else 1]:")], {mesh.CALLS},
     "rank 1 makes the same groups in another order than rank 0"),
    ([("        for ranks", "        for ranks in [] if grid.shape[dim] == 1 else []:\n"
       "            pass\n        for ranks"), (KEEP, KEEP.replace("ranks)", "ranks[:1])"))],
     {mesh.MEMBERS, mesh.CALLS}, "its dp group: required: [0, 2], yours [0]"),
    ([("groups[axis] = made", "groups[axis] = ranks")], {mesh.MEMBERS},
     "groups['dp'] is not a process group of which this rank is a member"),
    ([("return where, groups", "return tuple(where.values()), groups")], {mesh.PLACE},
     "raised ValueError: required: (where, groups), two dicts; the answer returns a tuple "
     "and a dict"),
    ([("new_group(ranks)", "new_group([one + 1 for one in ranks])")], {mesh.PLACE},
     "new_group([4, 8]): a group has one or more of the ranks 0 to 7"),
    ([("dist.get_rank()", "0")], {mesh.PLACE, mesh.MEMBERS},
     "rank 1: required: {'dp': 0, 'pp': 0, 'tp': 1}"),
]  # fmt: skip
GROUP_WRONG = [(altered(GROUPS.name)(*pairs), *row) for pairs, *row in WRONG_GROUPS]
GROUP_WRONG.append(
    (by_mesh, {mesh.PLACE}, "a DeviceMesh makes these groups itself; in this exercise, make them")
)
ALL_WAIT = altered(GROUPS.name)(("    return where", "    dist.barrier()\n    return where"))
GROUP_ALL = Table(GROUPS, GROUP_WRONG, [by_hand, by_name, ALL_WAIT], exact=True)
test_wrong_groups_are_refused, test_right_groups_pass, test_the_stub_of_groups = GROUP_ALL.tests()


# ---- a step --------------------------------------------------------------------------------------
REDUCE = '    dist.all_reduce(flat, group=groups["dp"])  # a sum of shares: the mean\n'
SQUARE = '    dist.all_reduce(square, group=groups["pp"])  # stages have different parameters\n'
SUM = "    square = flat.square().sum()\n"
ZERO = "    optimizer.zero_grad()\n"
SHARE = ('len(batches) * dist.get_world_size(groups["dp"])', "len(batches)")
MEAN = "    flat /= dist.get_world_size(groups['dp'])\n"
UNREDUCED = (
    "it is the norm of one pipeline's gradient: average over dp first, and wait for the result"
)
NORM, WEIGHTS, ORDER, BYTES = STEP.required
ANSWER = sources.solution(sources.answer(STEP.name))
FORWARDS = "        kept.append((x, y))\n    for x, y in kept:\n"
BACKWARDS = ANSWER.partition(FORWARDS)[2].partition("\n\n")[0] + "\n"
BY_TURNS = f"        for x, y in [(x, y)]:\n{textwrap.indent(BACKWARDS, '    ')}"
NEIGHBOUR = """
    ring = dist.get_process_group_ranks(groups["dp"])
    if len(ring) > 1:
        at, got = ring.index(dist.get_rank()), torch.empty_like(flat)
        after = dist.P2POp(dist.irecv, got, ring[(at + 1) % len(ring)])
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, flat, ring[at - 1]), after]):
            work.wait()
        flat += got
"""
WRONG_STEPS = [  # change of the answer, limits it breaks, words of the verdict
    ([(" / share", "")], {NORM, WEIGHTS}, "the loss is divided neither by m nor by dp"),
    ([("len(batches) * dist", "dist")], {NORM, WEIGHTS}, "not divided by the number of micro-"),
    ([SHARE], {NORM, WEIGHTS}, "gradients are added over dp, not averaged"),
    ([(SUM, MEAN + SUM)], {NORM, WEIGHTS}, "gradients are averaged twice over dp"),
    ([(SQUARE, "")], {NORM, WEIGHTS},
     "it is the norm of this stage alone: sum the squares over pp, and wait for the result"),
    ([(SQUARE, "    dist.all_reduce(square)\n")], {NORM, WEIGHTS},
     "every parameter is counted once for each data-parallel rank"),
    ([(SQUARE, SQUARE.replace("pp", "dp"))], {NORM, WEIGHTS},
     "(squares are summed over dp, required: over pp)"),
    ([('size(groups["dp"])', "size()")], {NORM, WEIGHTS}, "divided by the number of all ranks)"),
    ([(SQUARE, SQUARE.replace("square,", "square.sqrt_(),")),
      ("square.sqrt().item()", "square.item()")], {NORM, WEIGHTS},
     "the norms of the stages are added, not their squares"),
    ([(REDUCE + SUM, SUM + REDUCE)], {NORM, WEIGHTS}, UNREDUCED),
    ([(REDUCE, "")], {NORM, WEIGHTS, BYTES}, UNREDUCED),
    ([SHARE, (REDUCE + SUM, SUM + REDUCE + MEAN)], {NORM, WEIGHTS}, UNREDUCED),
    ([("flat *= min(1.0, max_norm / (norm + 1e-6))", "flat *= 1.0")], {WEIGHTS},
     "the gradient is not clipped before optimizer.step()"),
    ([("min(1.0, max_norm / (norm + 1e-6))", "max_norm / norm")], {WEIGHTS},
     ("step 2: rank 0: ", "the gradient is scaled to max_norm although it is shorter")),
    ([(SQUARE, "    own = square.sqrt().item()\n" + SQUARE),
      ("max_norm / (norm", "max_norm / (own")], {WEIGHTS},
     "the gradient is clipped by the norm of this stage alone"),
    ([("return norm", "return min(norm, max_norm)")], {NORM}, "it is the norm after clipping"),
    ([("return norm", "return norm**2")], {NORM}, "it is the square of the norm"),
    ([("return norm", "return")], {NORM}, "required: a number, the norm, yours is None"),
    ([(ZERO, "")], {NORM, WEIGHTS}, "(old gradients were not set to zero)"),
    ([(ZERO, ""), SHARE, (REDUCE, REDUCE + MEAN)], {NORM, WEIGHTS}, "(old gradients were not"),
    ([("    optimizer.step()\n", "")], {NORM, WEIGHTS}, "it is as it was before"),
    ([(FORWARDS + BACKWARDS, BY_TURNS)], {ORDER},
     "pp=2: rank 0 runs the backward of its first micro-batch before it starts"),
    ([(REDUCE, 2 * (REDUCE + MEAN) + MEAN.replace("/=", "*="))], {BYTES},
     "and at most 256 for norms"),
    ([("dist.recv(gradient", "dist.irecv(gradient")], {NORM, WEIGHTS},
     "never waits for"),
    ([(REDUCE, NEIGHBOUR)], {NORM, WEIGHTS, BYTES}, "dp=3, pp=1, step 1, rank 0: required: "),
    ([("here < len(ranks) - 1", "here == 0 or here < len(ranks) - 1")], {NORM},
     "dp=3, pp=1: rank 0 raised IndexError"),
    ([("len(batches) * dist", "3 * dist")], {NORM, WEIGHTS}, "dp=1, pp=4, step 1, rank 0: "),
    ([('group=groups["dp"])  #', ")  #")], {NORM}, ("raised ", " of cell ", " in mesh_step")),
    ([("*tokens.shape, hidden,", "2, 16, 32,")], {NORM},
     ("dp=1, pp=4: rank 1 raised OrderError: recv #0 from rank 0 is for 1,024 elements of ",
      " sends 2,304 ")),
]  # fmt: skip
STEP_WRONG = [(altered(STEP.name)(*pairs), *row) for pairs, *row in WRONG_STEPS]
LAST_ONE_FIRST = altered(STEP.name)(("for x, y in kept", "for x, y in kept[::-1]"))
ALONE = [row[0] for row in STEP_WRONG[-2:]]  # ranks fail while others wait
SQUARES = "    squares = dist.get_world_size(groups['pp']) * [0]\n    dist.all_gather_object("
SQUARES += "squares, square.item(), groups['pp'])\n    square = torch.tensor(sum(squares))\n"
PICKLED = altered(STEP.name)((SQUARE, SQUARES))
STEP_ALL = Table(STEP, STEP_WRONG, [LAST_ONE_FIRST, PICKLED], alone=ALONE)
test_a_wrong_step_is_refused, test_a_right_step_passes, test_its_stub = STEP_ALL.tests()
