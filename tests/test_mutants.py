"""Removing any one division, sum, wait or free makes a check fail, and says what is wrong.

mutants.py has the list. What can be refused without a process is; for the rest the mutants of one
case are trained one after the other by the same ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter

import pytest

import paralab as pl
from equality import assert_equal_state, references
from mutants import CASES, FROZEN, MUTANTS, applied
from paralab.interpret.traffic import rows
from paralab.launch import launch_program
from paralab.programs.checks import check
from paralab.programs.compile import compiled
from paralab.report.merge import whole_model
from tests.oracles import MACHINE, load

SPEC = pl.ModelSpec(layers=2, hidden=48, heads=4, seq_len=24, vocab=260)
STEPS, LR = 2, 0.5
PARTS = ("model", "interpret", "programs", "parallel")
GUARDS = ("check", "frozen", "equal", "late")
STATES = ("gradients", "weights")


def of_guard(guard: str) -> list[str]:
    return [name for name, mutant in MUTANTS.items() if getattr(mutant, guard)]


def cases_of(guard: str) -> list[str]:
    return list(dict.fromkeys(MUTANTS[name].case for name in of_guard(guard)))


def of_case(case: str) -> tuple[pl.ModelSpec, pl.Plan]:
    return SPEC.replace(**CASES[case].model), pl.Plan(**CASES[case].plan)


def test_there_are_mutants_of_every_part_of_the_core():
    parts = {mutant.module.rpartition(".")[0] for mutant in MUTANTS.values()}
    assert {f"paralab.{part}" for part in PARTS} <= parts
    guarded = {name for guard in GUARDS for name in of_guard(guard)}
    assert guarded == set(MUTANTS) and len(MUTANTS) >= 40


# ---- without a process ---------------------------------------------------------------------------
def checked(case: str) -> None:
    how, (model, plan) = CASES[case], of_case(case)
    clips = how.clip_norm is not None
    check(compiled(model, plan, optimizer=how.optimizer, clips=clips))


@pytest.mark.parametrize("case", CASES)
def test_the_program_of_the_unchanged_source_holds(case):
    model, plan = of_case(case)
    plan.validate(model)
    checked(case)


@pytest.mark.parametrize("name", of_guard("check"))
def test_the_program_of_a_mutant_is_refused(name):
    mutant = MUTANTS[name]
    with applied(mutant), pytest.raises(ValueError, match=mutant.check):
        checked(mutant.case)


@functools.cache
def frozen() -> dict:
    return {oracle.name: oracle for oracle in load()}


def sent(name: str) -> list[Counter]:
    """What each rank of a frozen plan sends, as the oracles count it."""
    program = compiled(frozen()[name].model, frozen()[name].plan)
    return [
        Counter(
            (row.op, row.axis, row.phase, row.payload, row.wire, row.level, row.peer, row.ranks)
            for row in rows(program, rank, MACHINE.node_of)
            if row.phase != "control"
        )
        for rank in range(program.plan.world_size)
    ]


@pytest.mark.parametrize("name", of_guard("frozen"))
def test_a_mutant_sends_something_else(name):
    mutant = MUTANTS[name]
    plan = FROZEN[mutant.case]
    expected = list(map(Counter, frozen()[plan].calls))
    assert sent(plan) == expected
    with applied(mutant):
        found = sent(plan)
    others = [
        row for now, then in zip(found, expected, strict=True) for row in now - then | then - now
    ]
    assert mutant.frozen in {phase for _, _, phase, *_ in others}


# ---- on ranks ------------------------------------------------------------------------------------
def trained(context, model, jobs, settings, late):
    """Weights and gradients after each of some (plan, mutant), one after the other."""
    import torch.distributed as dist

    from paralab.interpret.train import train

    dist.new_group = remembered(dist.new_group)
    found = []
    for number, (plan, mutant) in enumerate(jobs):
        store = dist.PrefixStore(str(number), context.store)  # strict mode counts its calls there
        own = dataclasses.replace(context, store=store)
        with applied(mutant), delivered_late() if late else contextlib.nullcontext():
            part = train(own, model, plan, steps=STEPS, lr=LR, keep_state=True, **settings)
        found.append({state: part[state] for state in STATES})
    return found


def remembered(new_group):
    """The same ranks' group is made once."""
    made = {}

    def group(ranks):
        key = tuple(ranks)
        if key not in made:
            made[key] = new_group(ranks)
        return made[key]

    return group


@contextlib.contextmanager
def delivered_late():
    """What a call brings is there when it is waited for, and not before: as on the slowest link."""
    from paralab.transports import Gloo

    class Undelivered:
        def __init__(self, deliver):
            self.wait = deliver

    def posted(self, call):
        copies = [tensor.clone() for tensor in call.tensors]
        now = post(self, call._replace(tensors=copies, fills=copies[: len(call.fills)]))
        for work in now.works:
            work.wait()
        if now.finish is not None:
            now.finish()
        for tensor in call.fills:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

        def deliver():
            for tensor, copy in zip(call.tensors, copies, strict=True):
                if any(tensor is filled for filled in call.fills):
                    tensor.copy_(copy)

        return now._replace(works=[Undelivered(deliver)], finish=None)

    post, Gloo.post = Gloo.post, posted
    try:
        yield
    finally:
        Gloo.post = post


@pytest.fixture(scope="module")
def expected(text):
    """Per case what the reference says; without those that are compared with another plan."""
    asked = {}
    for case in dict.fromkeys(cases_of("equal") + cases_of("late")):
        how, (model, plan) = CASES[case], of_case(case)
        if how.optimizer == "sgd":
            asked[case] = {
                "model": model,
                "microbatches": plan.dp * plan.microbatches,
                "microbatch_size": plan.microbatch_size,
                "precision": plan.precision,
                "clip_norm": how.clip_norm,
                "steps": STEPS,
                "lr": LR,
                "data": text,
            }
    return dict(zip(asked, references(list(asked.values())), strict=True))


@pytest.fixture(scope="module")
def compare(expected, text, tmp_path_factory):
    """Holds what a mutant of a case, or the unchanged source, leaves against the reference."""
    known = {}

    def run(guard: str, case: str) -> dict[str | None, dict]:
        how, (model, plan) = CASES[case], of_case(case)
        names = [None, *(name for name in of_guard(guard) if MUTANTS[name].case == case)]
        jobs = [(plan, MUTANTS.get(name)) for name in names]
        if case not in expected:  # the same without offload, as the last job
            jobs.append((plan.replace(offload=None), None))
        settings = {
            "optimizer": how.optimizer,
            "clip_norm": how.clip_norm,
            "data": str(text),
            "seed": 0,
            "offload_folder": str(tmp_path_factory.mktemp("files")),
        }
        late = guard == "late"
        args = (model, jobs, settings, late)
        parts = launch_program(trained, plan.world_size, args, device="cpu", strict=late)
        made = []
        for number in range(len(jobs)):
            held = {
                state: {
                    rank: part[number][state]
                    for rank, part in enumerate(parts)
                    if part[number][state] is not None
                }
                for state in STATES
            }
            made.append({state: whole_model(held[state], plan, model) for state in STATES})
        expected.setdefault(case, made[-1])
        return dict(zip(names, made, strict=False))

    def compare(guard: str, case: str, name: str | None) -> None:
        if (guard, case) not in known:
            known[guard, case] = run(guard, case)
        precision = of_case(case)[1].precision
        assert_equal_state(expected[case], known[guard, case][name], precision=precision)

    return compare


@pytest.mark.parametrize(
    ("guard", "case"), [(guard, case) for guard in ("equal", "late") for case in cases_of(guard)]
)
def test_the_unchanged_source_equals_the_reference(compare, guard, case):
    compare(guard, case, None)


@pytest.mark.parametrize(
    ("guard", "name"), [(guard, name) for guard in ("equal", "late") for name in of_guard(guard)]
)
def test_a_mutant_does_not_equal_the_reference(compare, guard, name):
    mutant = MUTANTS[name]
    with pytest.raises(AssertionError, match=getattr(mutant, guard)):
        compare(guard, mutant.case, name)
