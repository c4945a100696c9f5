"""Lab 10's exercises: groups of a mesh, a step on it, and planners that know the advice."""

import importlib
import textwrap

import pytest
from torch.distributed import get_process_group_ranks, get_rank, get_world_size, new_group

import paralab as pl
from judged import Table, altered
from paralab import plan_search
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
EVERY = {mesh.PLACE, mesh.MEMBERS, mesh.CALLS}
WRONG_GROUPS = [  # change of the answer, limits it breaks, words of the verdict
    ([(MINE, MINE.replace(KEEP, "").replace("= made", "= dist.new_group(ranks)"))],
     {mesh.CALLS},
     "rank 1 makes 3 groups, and not those that rank 0 makes: every rank has to make every group"),
    ([("reshape(pp, dp, tp)", "reshape(dp, pp, tp).transpose(0, 1)")], EVERY,
     "its dp group: required: [0, 2], yours [0, 4]"),
    ([("tolist():", "tolist()[::-1 if rank else 1]:")], {mesh.CALLS},
     "rank 1 makes the same groups in another order than rank 0"),
    ([("return where, groups", "return tuple(where.values()), groups")], {mesh.PLACE},
     "raised ValueError: required: (where, groups), two dicts; the answer returns a tuple "
     "of length 3 and a dict"),
    ([("new_group(ranks)", "new_group([one + 1 for one in ranks])")], {mesh.PLACE},
     "new_group([4, 8]): a group has one or more of the ranks 0 to 7"),
    ([("dist.get_rank()", "0")], {mesh.PLACE, mesh.MEMBERS},
     "rank 1: required: {'dp': 0, 'pp': 0, 'tp': 1}"),
]  # fmt: skip
GROUP_WRONG = [(altered(GROUPS.name)(*pairs), *row) for pairs, *row in WRONG_GROUPS]
MESH = "a DeviceMesh makes these groups itself; in this exercise, make them"
ALL_WAIT = altered(GROUPS.name)(("    return where", "    dist.barrier()\n    return where"))
GROUP_ALL = Table(
    GROUPS, [*GROUP_WRONG, (by_mesh, {mesh.PLACE}, MESH)], [by_hand, by_name, ALL_WAIT], exact=True
)
test_wrong_groups_are_refused, test_right_groups_pass, test_the_stub_of_groups = GROUP_ALL.tests()


# ---- a step --------------------------------------------------------------------------------------
REDUCE = '    dist.all_reduce(flat, group=groups["dp"])  # a sum of shares: the mean\n'
SQUARE = '    dist.all_reduce(square, group=groups["pp"])  # stages have different parameters\n'
ZERO = "    optimizer.zero_grad()\n"
SIZE = 'dist.get_world_size(groups["dp"])'
MEAN = "    flat /= dist.get_world_size(groups['dp'])\n"
NORM, WEIGHTS, ORDER, BYTES = STEP.required
ANSWER = sources.solution(sources.answer(STEP.name))
FORWARDS = "        kept.append((x, y))\n    for x, y in kept:\n"
BACKWARDS = ANSWER.partition(FORWARDS)[2].partition("\n\n")[0] + "\n"
BY_TURNS = f"        for x, y in [(x, y)]:\n{textwrap.indent(BACKWARDS, '    ')}"
WRONG_STEPS = [  # change of the answer, limits it breaks, words of the verdict
    ([(" / share", "")], {NORM, WEIGHTS}, "the loss is divided neither by m nor by dp"),
    ([("len(batches) * dist", "dist")], {NORM, WEIGHTS}, "not divided by the number of micro-"),
    ([(SQUARE, "")], {NORM, WEIGHTS},
     "it is the norm of this stage alone: sum the squares over pp, and wait for the result"),
    ([(SQUARE, "    dist.all_reduce(square)\n")], {NORM, WEIGHTS},
     "every parameter is counted once for each data-parallel rank"),
    ([(REDUCE, "")], {NORM, WEIGHTS, BYTES},
     "it is the norm of one pipeline's gradient: average over dp first, and wait for the result"),
    ([("min(1.0, max_norm / (norm + 1e-6))", "max_norm / norm")], {WEIGHTS},
     ("step 2: rank 0: ", "the gradient is scaled to max_norm although it is shorter")),
    ([("return norm", "return min(norm, max_norm)")], {NORM}, "it is the norm after clipping"),
    ([(ZERO, "")], {NORM, WEIGHTS}, "(old gradients were not set to zero)"),
    ([(FORWARDS + BACKWARDS, BY_TURNS)], {ORDER},
     "pp=2: rank 0 runs the backward of its first micro-batch before it starts"),
    ([(REDUCE, 2 * (REDUCE + MEAN) + MEAN.replace("/=", "*="))], {BYTES},
     "and at most 256 for norms"),
    ([(SIZE, f"min(2, {SIZE})")], {NORM, WEIGHTS}, "dp=3, pp=1, step 1, rank 0: required: "),
    ([("len(batches) * dist", "3 * dist")], {NORM, WEIGHTS}, "dp=1, pp=4, step 1, rank 0: "),
    ([("*tokens.shape, hidden,", "2, 16, 32,")], {NORM},
     ("dp=1, pp=4: rank 1 raised OrderError: recv #0 from rank 0 is for 1,024 elements of ",
      " sends 2,304 ")),
]  # fmt: skip
STEP_WRONG = [(altered(STEP.name)(*pairs), *row) for pairs, *row in WRONG_STEPS]
LAST_ONE_FIRST = altered(STEP.name)(("for x, y in kept", "for x, y in kept[::-1]"))
ALONE = STEP_WRONG[-1][0]  # a rank fails while others wait
SQUARES = "    squares = dist.get_world_size(groups['pp']) * [0]\n    dist.all_gather_object("
SQUARES += "squares, square.item(), groups['pp'])\n    square = torch.tensor(sum(squares))\n"
PICKLED = altered(STEP.name)((SQUARE, SQUARES))
STEP_ALL = Table(STEP, STEP_WRONG, [LAST_ONE_FIRST, PICKLED], alone=[ALONE])
test_a_wrong_step_is_refused, test_a_right_step_passes, test_its_stub = STEP_ALL.tests()


# ---- a planner -----------------------------------------------------------------------------------
PLACE = pl.exercises.place
place = importlib.import_module("paralab.exercises.place")
PLAN, FITS, INSIDE, SIMULATED = PLACE.required


def planned(tp, pp, batch, devices, samples=1, **settings):
    dp = devices // (tp * pp)
    settings = {"zero_stage": 1, "precision": "bf16", "recompute": "full", **settings}
    return pl.Plan(dp=dp, tp=tp, pp=pp, microbatch_size=samples,
                   microbatches=batch // dp // samples, **settings)  # fmt: skip


def shape(model):
    """(tp, pp) that fit with full recomputation."""
    return {36: (4, 1), 48: (8, 1), 96: (8, 8)}[model.layers]


def all_data_parallel(model, cluster, batch, ask):
    devices = min(cluster.num_devices, batch)
    return planned(1, cluster.num_devices // devices, batch, cluster.num_devices)


def asks(times, model, cluster, batch, ask):
    for _ in range(times):
        ask(all_data_parallel(model, cluster, batch, ask))


def allows_itself_more(*asked):
    importlib.import_module("paralab.exercises.place").QUESTIONS = 10**9
    asks(13, *asked)


class Claims(pl.Plan):
    """A plan that says of itself whatever is asked of it."""

    world_size, global_batch = 16, 64


def searches_by_name(model, cluster, batch, ask):
    return plan_search(model, cluster, global_batch=batch, precision="bf16").best


def predicts(model, cluster, batch, ask):
    plan = knows(model, cluster, batch, ask)
    pl.predict(model, plan, cluster, steps=1, detail="actions")
    return plan


def weighs(model, cluster, batch, ask):
    pl.dry_run(model, plan := knows(model, cluster, batch, ask), rank=0, cluster=cluster)
    return plan


def knows(model, cluster, batch, ask):
    """The best plans, known by heart."""
    tp, pp, samples = {36: (1, 1, 2), 48: (4, 1, 2), 96: (4, 8, 1)}[model.layers]
    settings = {"recompute": "none", "sequence_parallel": tp > 1}
    return planned(tp, pp, batch, cluster.num_devices, samples, **settings)


def knows_and_asks(*asked):
    asks(12, *asked)
    return knows(*asked)


def knows_formulas(model, *asked):
    pl.theory.zero.bytes_per_device(model.num_params, 16, stage=1)
    return knows(model, *asked)


WRONG_PLANNERS = [  # answer to (model, cluster, batch, ask), limits it breaks, words of the verdict
    (lambda m, c, b, ask: planned(*shape(m), b, c.num_devices), {SIMULATED},
     "simulated step (ptdp-7.5b on 16 devices, batch 64): "),
    (all_data_parallel, {FITS, SIMULATED}, "simulated step ("),
    (lambda m, c, b, ask: planned(16, 1, b, c.num_devices), {INSIDE, SIMULATED},
     "a tensor-parallel group are on 2 nodes"),
    (lambda m, c, b, ask: planned(*shape(m), b // 2, c.num_devices), {PLAN},
     "is 4*8*1 = 32, and a step has 64 samples; legal: 16 with dp=4, mic"),
    (lambda m, c, b, ask: planned(1, 16, b, 16, schedule="interleaved", virtual_stages=3), {PLAN},
     "pp*virtual_stages is 48 stages, the model has 36 blocks"),
    (lambda m, c, b, ask: planned(*shape(m), b, c.num_devices // 2), {PLAN},
     "dp*tp*pp is 8, and there are 16 devices"),
    (lambda m, c, b, ask: planned(*shape(m), b, c.num_devices, precision="fp32"), {PLAN},
     "precision='fp32': not the required precision"),
    (lambda m, c, b, ask: planned(*shape(m), b, c.num_devices, offload={"optimizer": "cpu"}),
     {PLAN}, "not allowed in this exercise; legal: None"),
    (lambda *asked: asks(13, *asked), {PLAN}, "raised RuntimeError: more than 12 questions"),
    (allows_itself_more, {PLAN}, "raised RuntimeError: more than 12 questions"),
    (lambda *asked: Claims(dp=16, precision="bf16"), {PLAN}, "not a plan; legal: a pl.Plan(...)"),
    *((one, {PLAN}, "so this function of it may not be called")
      for one in (searches_by_name, predicts, weighs)),
]  # fmt: skip
PLANS = Table(PLACE, WRONG_PLANNERS, [knows, knows_and_asks, knows_formulas], exact=True)
test_a_wrong_planner_is_refused, test_a_right_planner_passes, test_a_stub = PLANS.tests()


@pytest.mark.parametrize("case", place.CASES, ids=str)
def test_the_limit_is_the_best_plan_that_a_search_finds(case):
    ptdp = {"schedule": "1f1b", "zero_stage": [0, 1], "offload": None}  # what the paper composes
    found = pl.plan_search(case.spec, case.cluster, global_batch=case.batch,
                           precision="bf16", top=3, **ptdp)  # fmt: skip
    assert found.simulated[0] == pytest.approx(case.best, abs=1e-6)
