"""The compiler: from a plan to a program, by a chain of passes. This file has their order.

The skeleton is what each pipeline rank computes, and its messages. Every other paradigm is one pass
or a few: first those of a micro-batch, then those of a step, then the user's own. Finally waits and
frees are derived, which no pass has to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from paralab.checks import choice
from paralab.model.build import build
from paralab.parallel import buckets, data_parallel, offload, optimizer, recompute, zero
from paralab.parallel.parameters import add_parameters, gradient_cuts
from paralab.parallel.scatter_gather import scatter_gather
from paralab.parallel.tensor_parallel import message_cuts, tensor_parallel
from paralab.programs.actions import write
from paralab.programs.checks import check
from paralab.programs.derive import derived
from paralab.programs.instructions import BACKWARDS, RECOMPUTE, Code, Instr, Pass, cut
from paralab.programs.own import own_passes
from paralab.programs.program import OPTIMIZERS, Program
from paralab.programs.skeleton import skeleton, stage_parts
from paralab.programs.tiers import own_master, rows
from paralab.spec import ModelSpec, Plan


def compiled(
    spec: ModelSpec,
    plan: Plan,
    *,
    optimizer: str = "adamw",
    clips: bool = False,
    only: int | None = None,
    final: bool = True,
) -> Program:
    """The program of every pipeline rank, or of ``only`` one. The plan has to be valid already.

    clips  whether the norm of the gradients is bounded
    final  whether waits and frees are added; without them the lists are those of the last pass

    Raises ``ValueError`` on an unknown optimizer, and where the user's own pass or schedule makes
    no valid program.
    """
    program = laid_out(spec, plan, optimizer=optimizer, clips=clips)
    codes = skeleton(program, only=only)
    for rank in range(plan.pp) if only is None else (only,):
        codes[rank] = passed(program, rank, codes[rank])
        if final:
            codes[rank] = derived(codes[rank])
    program.codes.extend(codes)  # it keeps the sizes and shares that passes asked for
    if final and (plan.passes or plan.grad_sync is None or callable(plan.schedule)):
        check(program)  # because some of it is the user's own
    return program


def laid_out(spec: ModelSpec, plan: Plan, *, optimizer: str, clips: bool) -> Program:
    """A program without instructions: the model's ops, the stages, and each rank's units."""
    choice("optimizer", optimizer, OPTIMIZERS)
    model, stages = build(spec, plan), stage_parts(spec, plan)
    units = []
    for rank in range(plan.pp):
        rank_parts = (model.numels[part] for parts in stages[rank :: plan.pp] for part in parts)
        sizes = {name: size for numels in rank_parts for name, size in numels.items()}
        units.append(buckets.units(sizes, spec, plan))
    ops_of = {name: (i, j) for name, i, j in model.parts}
    ranges = tuple((ops_of[parts[0]][0], ops_of[parts[-1]][1]) for parts in stages)
    return Program(spec, plan, optimizer, clips, model, ranges, tuple(units))


def passed(program: Program, rank: int, code: Code) -> Code:
    """A pipeline rank's skeleton ``code`` after all passes, without waits and frees."""
    code = write(code, list(passes_of_a_microbatch(program, rank)), len(program.model.ops))
    for one_pass in passes_of_a_step(program, rank):
        code = one_pass(code)
    return own_passes(program, rank, code)


def passes_of_a_microbatch(program: Program, rank: int) -> Iterator[Pass]:
    """The passes that see the path of one micro-batch through a stage."""
    plan, model, n = program.plan, program.model, len(program.model.ops)
    units = program.units[rank]
    yield lambda code: cut(code, {i for _, i, _ in model.parts}, n)
    if plan.recompute != "none":
        yield lambda code: recompute.recompute(code, model, plan.recompute)
    cuts = message_cuts(model)
    if plan.dp > 1 or plan.zero_stage:
        cuts |= gradient_cuts(model, units)
    yield lambda code: cut(code, cuts, n)
    yield lambda code: add_parameters(code, model, units)
    if plan.tp > 1 and plan.tp_mode == "1d":
        yield lambda code: tensor_parallel(code, model, overlap=plan.tp_overlap)
    if plan.partition_activations:
        yield recompute.partition_activations


def passes_of_a_step(program: Program, rank: int) -> Iterator[Pass]:
    """The passes that see the whole step: sums over ranks, gathers, the optimizer, offload."""
    plan, tiers = program.plan, program.plan.tiers
    stage, alone = plan.zero_stage, plan.shard_degree == 1
    mixed, scaled = program.model.item < 4, plan.precision == "fp16"
    measured = program.clips or scaled  # whether the gradients' norm is needed
    if plan.partition_messages:
        yield scatter_gather
    if stage:
        if plan.reduces_often:
            yield lambda code: zero.zero2(code, alone=alone)
        else:
            yield lambda code: zero.zero1(code, alone=alone, at_once=plan.reduces_at_once)
        if plan.shard_degree < plan.dp:
            yield zero.replicas
    elif plan.dp > 1 and plan.grad_sync is not None:
        yield data_parallel.FORMS[plan.grad_sync]
    shared = program.shared(rank, None)  # of whole units: all data-parallel ranks have one list
    axes = {key: {share.unit for share in shares} for key, shares in shared.items()}
    yield lambda code: optimizer.shared(code, axes, "gshard" if stage else "grad")
    if tiers and tiers.gradients != "device":
        waits = {u for u, unit in enumerate(program.units[rank]) if unit.waits}
        yield lambda code: offload.gradients(code, tiers.gradients, waits, measured=measured)
    yield lambda code: optimizer.update(code, sharded=stage > 0, mixed=mixed, scaled=scaled)
    if stage in (1, 2) and not alone:
        yield zero.gather_updated
    run = runs(program)
    if stage == 3:
        once = units_of_head(program, rank) if plan.relays else ()
        fetched = tiers and tiers.parameters != "device"
        fetch = partial(offload.fetch, tiers.parameters) if fetched else None
        yield lambda code: zero.zero3(code, plan.prefetch, run, once, alone=alone, fetch=fetch)
    if plan.secondary_shard:
        yield zero.second_copy
    if measured:
        yield lambda code: optimizer.clip(code, program.norm_axes, scaled=scaled)
    if tiers and tiers.states:
        has_states, has_master = rows(program) > 0, own_master(plan)
        yield offload.Update(tiers=tiers, states=has_states, master=has_master, mixed=mixed)
    if tiers and tiers.activations != "device":
        yield lambda code: offload.inputs(code, tiers.activations, run)


def runs(program: Program) -> Callable[[Instr], object]:
    """The argument ``run`` of `zero.zero3` and `offload.inputs`."""
    stage_of = {op: s for s, (i, j) in enumerate(program.stages) for op in range(i, j)}

    def run(ins: Instr) -> object:
        back = ins.op in BACKWARDS or ins.op == RECOMPUTE
        return back if program.plan.relays else (back, ins.mb, stage_of[ins.at[0]])

    return run


def units_of_head(program: Program, rank: int) -> set[int]:
    """The units that the head uses, a tied embedding too. In a relay they are gathered once for
    forward and backward, because the head's backward follows its forward at once.
    """
    model, (_, i, j) = program.model, program.model.parts[-1]
    of_head = {name for names in model.read_by[i:j] for name in names}
    units = enumerate(program.units[rank])
    return {u for u, unit in units if not of_head.isdisjoint(unit.names)}
