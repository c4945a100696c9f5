"""Plans drawn at random: each is refused in a refusal's words, or predicted, and some are run.

Hypothesis draws them: the same ones in every run of the suite, and others under its own profile
(conftest.py). What a prediction sends is held against the closed forms of each paradigm.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import drawn
import paralab as pl
from drawn import MODEL, PLAN, SMALL
from equality import assert_equal_state, references
from paralab.parallel.layouts import activation_box, box_shape
from paralab.programs.compile import compiled
from paralab.programs.program import Program
from paralab.theory.traffic import BOOKKEEPING
from paralab.theory.zero import volume
from patience import HANG_S
from stated import TIERS

KINDS = (pl.Plan, pl.ModelSpec, pl.spec.tiers.Offload)
FIELDS = [field.name for kind in KINDS for field in dataclasses.fields(kind)]
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**12), st.floats(), st.text(max_size=6),
    st.lists(st.integers(0, 3), max_size=2), st.just({"a": 1}),
)  # fmt: skip

CALM = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def refused(build) -> str:
    """The refusal of ``build()``, in a refusal's words, or nothing. Anything else is an error."""
    try:
        build()
    except ValueError as error:
        said = str(error)
        name = re.match(r"(\w+)(\['\w+'\])*=", said)
        assert name and name[1] in FIELDS and "; legal: " in said, said
        return said
    return ""


# Hypothesis draws a seed, and the seed the rest: what it would make small itself is seldom a plan
# that does much.
seeds = st.integers(0, 2**32 - 1).map(random.Random)


@st.composite
def anything(draw, values: dict) -> dict:
    """Some fields, of sizes that make sense or, one of them now and then, of any other kind."""
    chance = draw(seeds)
    found = {name: chance.choice(some) for name, some in values.items() if chance.random() < 0.3}
    if found and chance.random() < 0.3:
        found[chance.choice(list(found))] = draw(JUNK)
    return found


@st.composite
def legal(draw, ranks: int) -> tuple[pl.ModelSpec, pl.Plan]:
    """A drawn plan, with overlap in tensor parallelism or without."""
    chance = draw(seeds)
    model, plan = drawn.legal(chance, ranks)
    if plan.tp > 1 and plan.tp_mode == "1d":
        plan = plan.replace(tp_overlap=chance.random() < 0.5)
    return model, plan


# ---- legal or refused ---------------------------------------------------------------------------
@settings(max_examples=300, **CALM)
@given(anything(PLAN), anything(MODEL))
def test_whatever_is_asked_is_a_plan_or_is_refused_by_name(of_plan, of_model):
    asked = []

    def build():
        asked.append(pl.ModelSpec(**{**SMALL, **of_model}))
        asked.append(pl.Plan(**of_plan))
        asked[1].validate(asked[0])

    said = refused(build)
    if len(asked) == 2 and said:  # and by every function that would use it
        model, plan = asked
        assert refused(lambda: pl.predict(model, plan, TIERS)) == said
        assert refused(lambda: pl.run(model, plan)) == said


@pytest.mark.parametrize("settings", [
    {"microbatches": 10**9}, {"microbatches": 10**6, "pp": 4}, {"dp": 10**9}, {"tp": 2**60},
    {"pp": 10**12}, {"virtual_stages": 10**9, "pp": 2, "schedule": "interleaved"},
    {"tp": 10**12, "tp_mode": "3d"}, {"tp": 10**12, "tp_mode": "2.5d"},
    {"zero_stage": 1, "shard": 10**15}, {"dp": 4, "pp": 10**5},
], ids=str)  # fmt: skip
@pytest.mark.timeout(HANG_S)
def test_a_slipped_digit_is_refused_at_once_and_by_its_own_name(settings):
    field = max((n for n, v in settings.items() if isinstance(v, int)), key=settings.get)
    model = pl.ModelSpec(**SMALL)
    assert refused(lambda: pl.Plan(**settings).validate(model)).startswith(f"{field}=")
    assert refused(lambda: model.replace(layers=10**9)).startswith("layers=1000000000:")


# ---- predicted ----------------------------------------------------------------------------------
def total(calls, **where) -> int:
    """Bytes that all ranks send, bookkeeping left out."""
    calls = calls[~calls["phase"].isin(BOOKKEEPING)]
    for column, value in where.items():
        calls = calls[calls[column] == value]
    return int(calls["wire_bytes"].sum())


@settings(max_examples=24, **CALM)
@given(legal(16))
@example((pl.ModelSpec(**SMALL), pl.Plan(schedule="zb-h2", microbatches=3, dp=2, zero_stage=2)))
@example((pl.ModelSpec(**SMALL), pl.Plan(pp=2, tp=2, tp_mode="2.5d", tp_depth=2)))
@example((pl.ModelSpec(**SMALL), pl.Plan(dp=2, tp=2, tp_mode="2.5d", tp_depth=2, zero_stage=1)))
@example((pl.ModelSpec(**SMALL), pl.Plan(dp=2, tp=2, tp_mode="2.5d", tp_depth=2)))
def test_a_legal_plan_is_predicted_and_sends_what_the_closed_forms_say(drawn):
    model, plan = drawn
    report, outline = (
        pl.predict(model, plan, TIERS, steps=1, detail=detail) for detail in ("calls", "actions")
    )
    assert outline.step_time == pytest.approx(report.step_time, rel=1e-9)
    assert outline.peak_memory == report.peak_memory
    assert 0 < report.step_time < 60 and report.peak_memory > 0
    assert (report.spans["end"] >= report.spans["start"]).all()
    calls, program = report.collectives, compiled(model, plan)
    check_messages(program, calls)
    if plan.zero_stage:
        check_zero(program, calls)
    elif plan.dp > 1:  # an all-reduce of every gradient, and of little padding in buckets
        units, shapes = [u for units in program.units for u in units], program.model.shapes
        padding = [u.numel - sum(math.prod(shapes[name]) for name in u.names) for u in units]
        assert 0 <= min(padding) <= max(padding) < (1 if plan.grad_sync == "naive" else plan.dp)
        size = program.item_of("grad") * sum(u.numel for u in units)
        assert total(calls, phase="grad_sync") == 2 * (plan.dp - 1) * size * plan.tp


def check_messages(program: Program, calls) -> None:
    """b s h elements over every boundary, forth and back; each that leaves arrives."""
    plan, item = program.plan, program.model.item
    sent, arrived = (calls[calls["op"] == op] for op in ("send", "recv"))
    pairs = Counter(zip(sent["rank"], sent["peer"], sent["payload_bytes"], strict=True))
    assert pairs == Counter(zip(arrived["peer"], arrived["rank"], arrived["payload_bytes"],
                                strict=True))  # fmt: skip
    alike = plan.dp * plan.tp
    if program.spec.tied and plan.stages > 1:  # first and last stage add its gradient up
        size = program.model.numels["embedding"]["embedding.token.weight"]
        words = -(-size // plan.shard_degree) if plan.zero_stage else size
        assert total(calls, phase="tied") == 2 * program.item_of("grad") * words * alike
    message = item * math.prod(box_shape(activation_box(program.spec, plan, "residual", 0)))
    times = 2 * plan.microbatches * (plan.stages - 1) * alike
    parts = plan.tp if plan.partition_messages else 1
    assert total(calls, op="send") * parts == times * message


def check_zero(program: Program, calls) -> None:
    """2 Psi, (m+1) Psi or 3m Psi, times (N-1)/N; replicas an all-reduce of each shard."""
    plan = program.plan
    n, replicas = plan.shard_degree, plan.dp // plan.shard_degree
    elements = sum(unit.numel for units in program.units for unit in units)
    psi, wide = Fraction(elements * plan.dp * plan.tp * program.model.item), program.item_of("grad")
    summed = psi * wide / program.model.item  # of gradients, whose elements may have more bytes
    if replicas > 1:
        assert total(calls, axis="replica") == summed / n * 2 * (replicas - 1) / replicas
    if plan.relays:  # theory/offload.py says how often a relay needs each part
        return
    stage = 1 if plan.zero_stage == 2 and plan.pp > 1 else plan.zero_stage
    times = 1 if stage == 1 else plan.microbatches
    moved = volume(stage, plan.microbatches) * psi + times * (summed - psi)
    assert total(calls, axis="dp") == moved * (n - 1) / n


# ---- run ----------------------------------------------------------------------------------------
@settings(max_examples=3, **CALM)
@given(drawn=legal(6))
def test_some_are_run_and_train_what_one_process_does(run, text, drawn):
    model, plan = drawn
    assume(not (plan.tiers and plan.tiers.delayed))  # which is one update late, and means to be
    assume(plan.precision != "fp16")  # a first step may overflow, and is skipped
    assume(not (model.dropout and model.attention == "sdpa"))  # draws its mask inside the kernel
    report = run(model, plan, steps=2, optimizer="sgd", lr=0.5, keep_state=True)
    asked = {"model": model, "microbatches": plan.dp * plan.microbatches, "steps": 2, "lr": 0.5,
             "data": text, "microbatch_size": plan.microbatch_size,
             "precision": plan.precision}  # fmt: skip
    [alone] = references([asked])
    assert_equal_state(alone, report, precision=plan.precision)
    expect = pl.predict(report.model, plan, TIERS, optimizer="sgd")  # its attention is named
    assert pl.compare(expect, report).bytes_agree
