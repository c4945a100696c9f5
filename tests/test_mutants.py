"""Removing any one division, sum, wait or free makes a check fail, and says what is wrong.

mutants.py has the list. What can be refused without a process is; for the rest the mutants of all
cases with as many ranks are trained one after the other by the same ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter

import pytest

import paralab as pl
from equality import assert_equal_state
from mutants import CASES, FROZEN, MUTANTS, applied
from paralab.programs.checks import check
from paralab.programs.compile import compiled
from test_interpret_traffic import sent
from tests.oracles import load
from together import Case, Trained, in_turn, reports

SPEC = pl.ModelSpec(layers=2, hidden=48, heads=4, seq_len=24, vocab=260)
PARTS = ("model", "interpret", "programs", "parallel")
GUARDS = ("check", "frozen", "equal", "late")
ON_DEVICE = "the unchanged source, without offload"


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


def sent_by_each_rank(name: str) -> list[Counter]:
    """Of a frozen plan."""
    program = compiled(frozen()[name].model, frozen()[name].plan)
    return [sent(program, rank) for rank in range(program.plan.world_size)]


@pytest.mark.parametrize("name", of_guard("frozen"))
def test_a_mutant_sends_something_else(name):
    mutant = MUTANTS[name]
    plan = FROZEN[mutant.case]
    expected = list(map(Counter, frozen()[plan].calls))
    assert sent_by_each_rank(plan) == expected
    with applied(mutant):
        found = sent_by_each_rank(plan)
    others = [now - then | then - now for now, then in zip(found, expected, strict=True)]
    assert mutant.frozen in {phase for rows in others for _, _, phase, *_ in rows}


# ---- on ranks ------------------------------------------------------------------------------------
def mutated(names, late):
    """`in_turn`, each training by the source that its mutant leaves."""

    def program(context, jobs):
        @contextlib.contextmanager
        def around(number):
            late_too = delivered_late() if late else contextlib.nullcontext()
            with applied(MUTANTS.get(names[number])), late_too:
                yield

        return in_turn(context, jobs, around)

    return program


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
        while now.works:
            now.works.pop(0).wait()  # let go before the next, which waits until gloo has, too
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
def compare(text):
    """Holds what a mutant of a case, or the unchanged source, leaves against the reference."""
    cases = {
        name: Case(
            name,
            *of_case(name),
            tuple((what, getattr(how, what)) for what in ("clip_norm", "optimizer", "steps")),
        )
        for name, how in CASES.items()
    }
    reference = Trained(
        [cases[n] for n in dict.fromkeys(cases_of("equal") + cases_of("late"))], text
    )
    known: dict[tuple[str, str, str | None], pl.Report] = {}

    def run(guard: str, ranks: int) -> dict[tuple[str, str, str | None], pl.Report]:
        """Of all cases with as many ranks, in one launch."""
        jobs, late = {}, guard == "late"
        for case in cases_of(guard):
            one = cases[case]
            if one.plan.world_size == ranks:
                names = [None, *(name for name in of_guard(guard) if MUTANTS[name].case == case)]
                jobs |= {(guard, case, name): one for name in names}
                if CASES[case].optimizer != "sgd":
                    here = one._replace(plan=one.plan.replace(offload=None))
                    jobs[guard, case, ON_DEVICE] = here
        program = mutated([name for *_, name in jobs], late)
        asked = [(one.model, one.plan, one.settings) for one in jobs.values()]
        return dict(zip(jobs, reports(asked, text, strict=late, program=program), strict=True))

    def compare(guard: str, case: str, name: str | None) -> None:
        one = cases[case]
        if (guard, case, name) not in known:
            known.update(run(guard, one.plan.world_size))
        if CASES[case].optimizer == "sgd":
            expected = reference.alone(one)
        else:
            expected = vars(known[guard, case, ON_DEVICE])
        assert_equal_state(expected, known[guard, case, name], precision=one.plan.precision)

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
