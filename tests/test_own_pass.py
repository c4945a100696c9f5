"""A learner's own pass and schedule: trained like the built-in ones, and refused in words.

Nothing that is refused here starts a process.
"""

from __future__ import annotations

import json
import os
import random
import re

import pytest

import paralab as pl
from pairwise import cover
from paralab.parallel.schedules import gpipe, one_f_one_b
from paralab.programs import (
    ADD,
    ALL_REDUCE,
    BACKWARD,
    FORWARD,
    KEEP,
    UPDATE,
    Instr,
    all_gather,
    all_reduce,
    completed,
    gradients,
    insert,
    reduce_scatter,
)
from paralab.programs.compile import compiled
from paralab.programs.instructions import ADDS_GRADIENTS, COPY, NORM, RESCALE, WAIT
from refusals import refuses
from together import Case, Trained, assert_same_bits, case

SPEC = pl.ModelSpec(layers=4, hidden=48, heads=4, seq_len=24, vocab=260)
LEFT = {"grad_sync": None, "bucket_bytes": 40_000, "microbatches": 2}


def my_sync(program):
    ends = completed(program.code)
    sums = {at: [all_reduce(unit) for unit in units] for at, units in ends.items()}
    return program.replace(insert(program.code, sums))


def test_a_pass_prints_the_program_that_it_gets_with_the_positions_of_its_list():
    printed = []

    def prints(program):
        for code in (program.code, [*program.code, "ALL_REDUCE"]):
            printed.append(str(program.replace(code)).splitlines())
        return my_sync(program)

    pl.program(SPEC, pl.Plan(dp=2, **LEFT, passes=(prints,)))
    good, bad = printed
    assert good[0] == "    0  FORWARD embedding mb 0" and good[-1].endswith(" UPDATE bucket 7")
    assert bad == [*good, f"{len(good):5}  'ALL_REDUCE'"]  # what is no instruction, as it is


def two_halves(program):
    """An all-reduce is a reduce-scatter and an all-gather."""
    calls = {
        at: [call(unit) for unit in units for call in (reduce_scatter, all_gather)]
        for at, units in completed(program.code).items()
    }
    return program.replace(insert(program.code, calls))


def forgets_one(program):
    return program.replace(
        ins for ins in my_sync(program).code if ins != all_reduce(gradients(program.code)[2])
    )


def refusal(*passes, clip_norm=None, **plan) -> str:
    with pytest.raises(ValueError, match="; legal: ") as found:
        pl.run(SPEC, pl.Plan(**{"dp": 2} | LEFT | plan, passes=passes), clip_norm=clip_norm)
    return str(found.value)


# ---- what trains ---------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [{"dp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_data_parallelism_as_a_pass_is_the_built_in_form_instruction_by_instruction(shape):
    """So it trains the same, bit for bit."""
    mine, built_in = (
        compiled(SPEC, pl.Plan(**LEFT | shape | form))
        for form in ({"passes": (my_sync,)}, {"grad_sync": "overlapped"})
    )
    assert mine.codes == built_in.codes


def unnamed(program):
    code = my_sync(program).code
    return program.replace(i._replace(unit=-1) if i.op == ALL_REDUCE else i for i in code)


def test_a_call_that_names_no_unit_is_predicted_by_what_it_reads_and_writes():
    mine, named = (
        pl.predict(SPEC, pl.Plan(**LEFT, dp=2, passes=(one,)), pl.Cluster.preset("dgx-a100"))
        for one in (unnamed, my_sync)
    )
    assert mine.collectives.equals(named.collectives)


def fused(program):
    """Each unit is updated as soon as its gradient is summed, inside backward."""
    updates = {ins.unit: ins for ins in program.code if ins.op == UPDATE}
    code = []
    for ins in my_sync(program).code:
        code += [ins] * (ins.op != UPDATE)
        if ins.op == ALL_REDUCE:
            code.append(updates[ins.unit])
    return program.replace(code)


def copies(program):
    return program.replace(Instr(*ins) for ins in program.code)


@pytest.mark.parametrize("one", cover().cases, ids=lambda one: one.name)
def test_what_the_built_in_passes_make_a_pass_may_make(one):
    """A copy of an instruction, or one with another field, is looked at as a new one."""
    how = {"optimizer": "adamw", "clips": one.clip_norm is not None}
    plain = compiled(one.model, one.plan, **how)
    assert compiled(one.model, one.plan.replace(passes=(copies,)), **how).codes == plain.codes


def by_micro_batch(program):
    """A gradient of each micro-batch, summed while the next is computed, and added up."""
    code, last, calls, first = [], {}, {}, {}
    for at, ins in enumerate(program.code):
        adds = ins.op in ADDS_GRADIENTS
        own = tuple((*v[:2], ins.mb) if adds and v[0] == "grad" else v for v in ins.writes)
        code.append(ins._replace(writes=own))
        last |= dict.fromkeys([v for v in own if adds and v[0] == "grad"], at)
    for v, at in sorted(last.items(), key=lambda item: item[1]):
        call = all_reduce(v[1])._replace(reads=(v,), writes=(v,))
        calls.setdefault(at, []).append(call)
        if first.setdefault(v[1], v) != v:
            calls[at].append(Instr(ADD, v[1], -1, v[1], (v,), (first[v[1]],)))
    return program.replace(insert(code, calls))


def with_pass(one) -> Case:
    return case("dp=2 microbatches=2 layers=4 grad_sync=None", passes=(one,))


FUSED, PLAIN, HALVES, APART = map(with_pass, (fused, my_sync, two_halves, by_micro_batch))


@pytest.fixture(scope="module")
def trained(text) -> Trained:
    return Trained([FUSED, PLAIN, HALVES, APART], text)


def test_an_all_reduce_written_as_two_calls_trains_as_one_process(trained):
    trained.assert_equals_the_reference(HALVES)
    ops = set(trained[HALVES].collectives["op"])
    assert {"reduce_scatter", "all_gather"} <= ops and "all_reduce" not in ops


def test_an_update_inside_backward_trains_the_same_and_the_gradients_are_those_it_saw(trained):
    assert_same_bits(trained[PLAIN], trained[FUSED])


def test_gradients_of_each_micro_batch_are_summed_apart_and_added_up(trained):
    trained.assert_equals_the_reference(APART)


@pytest.mark.parametrize(("is_copy", "waits"), [(False, 2), (True, 1)], ids=["call", "copy"])
def test_one_instruction_may_be_in_a_list_twice_and_is_waited_for(is_copy, waits):
    """A worker's lane makes both copies in order: the WAIT for the second is a WAIT for both."""

    def waited(times):
        def again(program):
            codes = ([ins] * (times if chosen(ins) else 1) for ins in program.code)
            return program.replace(sum(codes, []))

        plan = pl.Plan(dp=2, zero_stage=1, offload="cpu" if is_copy else None, passes=(again,))
        code = compiled(SPEC, plan).codes[0]
        return [ins.reads for ins in code if ins.op == WAIT and chosen(ins)]

    def chosen(ins):
        return ins.lane == "h2d" if is_copy else "ALL_GATHER" in (ins.op, ins.at)

    assert sorted(waited(2)) == sorted(waits * waited(1)) != []


# ---- what is refused -----------------------------------------------------------------------------
def test_a_schedule_that_changes_between_two_calls_is_named():
    calls = []

    def flips(pp, microbatches):
        calls.append(pp)
        return (gpipe if len(calls) % 2 else one_f_one_b)(pp, microbatches)

    said = refusal(dp=1, pp=2, microbatches=4, schedule=flips)
    assert said.startswith(
        "schedule='own: flips': a later call made other lists; legal: a function"
    )


def test_a_forgotten_unit_is_refused_by_name():
    said = refusal(forgets_one)
    names = pl.program(SPEC, pl.Plan(dp=2, **LEFT)).units[2].names
    assert f"the gradient of {names[0]} and {len(names) - 1} more (bucket 2) is never" in said
    assert "(axis 'dp')" in said and "legal: ALL_REDUCE over 'dp' after position" in said
    shown = repr(pl.program(SPEC, pl.Plan(dp=2, **LEFT, passes=(forgets_one,))))
    assert shown.splitlines()[-1] == f"refused: {said}"


GRAD = ("grad", 0, 0)


@pytest.mark.parametrize(("change", "words"), [
    (lambda code: [], "it returned an empty list"),
    (lambda code: code.sort(key=len), "not a list of instructions; legal: a list; append, insert"),
    (lambda code: [*code, "sum"], "'sum', is not an instruction"),
    (lambda code: [*code, Instr("SUM")], "has an unknown op 'SUM'; legal: ADD, ALL_GATHER"),
    (lambda code: [*code, all_reduce(0, "tp")], "has the lane 'tp', where this plan"),
    (lambda code: [*code, all_reduce(0, ["dp"])], "has a mutable field (unhashable type: 'list')"),
    (lambda code: [*code, all_reduce([0, 1])], "of a list of units one all_reduce(unit) for each"),
    (lambda code: [*code, all_reduce(99)], "names ('grad', 99, 0), which is not a value"),
    (lambda code: [*code, all_reduce(0)._replace(reads=())], "reads 0 values and writes 1"),
    (lambda code: [*code, all_reduce(0)._replace(reads=[3])], "or writes that are not tuples"),
    (lambda code: [*code, all_reduce(0)._replace(writes=(("grad", 0, 1),))], "to another value"),
    (lambda code: [all_gather(0), *code], "reads part bucket 0, which no instruction has"),
    (lambda code: [i for i in code if i.op != UPDATE], "(bucket 0) is updated 0 times"),
    (lambda code: [i for i in code if i.op != FORWARD], "the schedule has FORWARD embedding"),
    (lambda code: [*code, Instr(ADD, reads=(GRAD,), writes=(GRAD,))], "writes the same value"),
    (lambda code: [*code, Instr(ADD, 0, -1, 0, (GRAD,), (("gshard", 0, 0),))],
     "adds to gshard bucket 0, which no instruction has written; legal: KEEP"),
    (lambda code: [*code, Instr(RESCALE)], "adapts a loss scale"),
    (lambda code: [*code, Instr(WAIT)], "waits for nothing; legal: wait(call)"),
    (lambda code: [*code, Instr(FORWARD)], "has at=0, not a range of ops"),
    (lambda code: [*code, Instr(FORWARD, (0, 999))], "has at=(0, 999), not a range of ops"),
    (lambda code: [*code, Instr(UPDATE, 0, -1, 0)], "names no unit to update or no gradient"),
    (lambda code: [*code, Instr(UPDATE, reads=(GRAD,))], "names no unit to update or no gradient"),
    (lambda code: [*code, Instr(COPY, 0, -1, 0, (GRAD,), (GRAD,), "h2d")], "plan runs no COPY"),
    (lambda code: [*code, Instr(COPY, 0, -1, 0, (GRAD,), (("gshard", 0, 0),))],
     "copies to 'gshard', which"),
    (lambda code: insert(bare := [i for i in code if i.op != ALL_REDUCE],
                         {at: map(reduce_scatter, units) for at, units in firsts(bare).items()}),
     "is never summed over the data-parallel ranks"),  # the parts lack the last micro-batch
])  # fmt: skip
def test_a_wrong_list_is_refused_in_words(change, words):
    assert words in refusal(lambda program: program.replace(change(my_sync(program).code)))


def test_what_is_no_program_or_another_ranks_is_refused():
    assert "='own: <lambda>': it returned a NoneType, not a prog" in refusal(lambda program: None)
    other = pl.program(SPEC, pl.Plan(dp=2, **LEFT))
    assert "it returned another rank's program" in refusal(lambda program: other)


def keeps_and_reads(program):
    """The gradient is renamed in front of the first update, which reads it by both names."""
    code = my_sync(program).code
    at = next(at for at, ins in enumerate(code) if ins.op == UPDATE)
    u, kept = code[at].unit, ("gshard", code[at].unit, 0)
    code[at] = code[at]._replace(reads=(*code[at].reads, kept))
    code.insert(at, Instr(KEEP, u, -1, u, (("grad", u, 0),), (kept,)))
    return program.replace(code)


def leaves_one_out(program):
    """What is left out is not trained: there is no place for its gradient."""
    out = ("grad", gradients(program.code)[1], 0)
    return program.replace(
        ins._replace(writes=tuple(v for v in ins.writes if v != out))
        for ins in my_sync(program).code
        if out not in ins.reads
    )


def writes_one_more(program):
    code = my_sync(program).code
    at = next(at for at, ins in enumerate(code) if ins.op in ADDS_GRADIENTS)
    grads = [v for ins in code for v in ins.writes if v[0] == "grad" and v not in code[at].writes]
    code[at] = code[at]._replace(writes=(*code[at].writes, grads[0]))
    return program.replace(code)


def firsts(code):
    """{position: units whose gradient the first micro-batch completes there}"""
    ends = completed(code, per_microbatch=True)
    return {at: units for at, units in ends.items() if code[at].mb == 0}


def early(program):
    """Scattered behind the first micro-batch, gathered behind the last."""
    some = {at: list(map(reduce_scatter, units)) for at, units in firsts(program.code).items()}
    for at, units in completed(program.code).items():
        some.setdefault(at, []).extend(map(all_gather, units))
    return program.replace(insert(program.code, some))


def overlap(program):
    """The gradient is the sum so far, and is reduced and added up after each micro-batch."""
    code, calls, ends = program.code, {}, completed(program.code)
    for at, units in sorted(completed(code, per_microbatch=True).items()):
        for unit in units:
            part = ("part", unit, code[at].mb)
            calls.setdefault(at, []).append(reduce_scatter(unit)._replace(writes=(part,)))
            if part[2]:
                calls[at].append(Instr(ADD, unit, -1, unit, (part,), (("part", unit, 0),)))
            calls[at] += [all_gather(unit)] * (unit in ends.get(at, ()))
    return program.replace(insert(code, calls))


def swapped(program):
    """Two updates take each other's gradient."""
    code, updates = my_sync(program).code, {}
    for at, ins in enumerate(code):
        if ins.op == UPDATE:
            updates.setdefault(program.units[ins.unit].numel, []).append(at)
    i, j = next(some for some in updates.values() if len(some) > 1)[:2]
    (one, *rest), (other, *more) = code[i].reads, code[j].reads
    code[i], code[j] = code[i]._replace(reads=(other, *rest)), code[j]._replace(reads=(one, *more))
    return program.replace(code)


def norm_ahead(program):
    """One rank, so that no sum is owed; the update behind it has all of the gradient."""
    norm = next(ins for ins in program.code if ins.op == NORM)
    code = [ins for ins in program.code if ins.op != NORM]
    return program.replace(insert(code, {max(firsts(code)): [norm]}))


def without_norm(program):
    return program.replace(
        ins._replace(reads=tuple(v for v in ins.reads if v[0] != "norm" or ins.op != UPDATE))
        for ins in my_sync(program).code
    )


def norm_of_one(program):
    return program.replace(
        ins._replace(reads=ins.reads[:1]) if ins.op == NORM else ins
        for ins in my_sync(program).code
    )


def split(program):
    """A message of each bucket would sum all of them, as often as there are buckets."""
    code = []
    for ins in program.code:
        several = ins.op == ALL_REDUCE and isinstance(ins.at, tuple)
        each = [ins._replace(reads=(v,), writes=(v,)) for v in ins.reads]
        code += each if several else [ins]
    return program.replace(code)


FP16, CLIPPED = {"precision": "fp16"}, {"clip_norm": 0.01}
ZERO_2 = {"zero_stage": 2, "grad_sync": "overlapped"}
TENSOR = {"dp": 1, "tp": 2, "sequence_parallel": True}


@pytest.mark.parametrize(("wrong", "plan", "words"), [
    (keeps_and_reads, {}, "reads grad bucket 0, which KEEP has renamed; legal: "),
    (leaves_one_out, {}, "and 9 more .bucket 1. 0 times instead of 1; legal"),
    (writes_one_more, {}, "1 times instead of 0; legal: a pass that does not change compute"),
    (early, {}, "UPDATE.* micro-batch 1 adds is in it 0 times; legal: a copy or sum after"),
    (overlap, {}, "UPDATE.* micro-batch 0 adds is in it 2 times; legal: a copy or sum after"),
    (lambda program: program.replace(i for i in program.code for _ in range(1 + (i.op == ADD))),
     ZERO_2, "UPDATE.* micro-batch 1 adds is in it 2 times"),
    *((lambda program, kind=kind: program.replace(
        ins for ins in program.code if ins.op != COPY or ins.writes[0][0] != kind),
       ZERO_2 | {"offload": at}, f"UPDATE .* not copied to {kind} bucket 0; legal: COPY")
      for kind, at in (("shard", "cpu"), ("file.opt", "nvme"))),
    *((lambda program, last=last: program.replace(sorted(program.code, key=last)),
       ZERO_2 | {"offload": "cpu"}, words) for last, words in (
        (lambda ins: ins.op == UPDATE, "not copied to shard bucket 0; legal: COPY .* after it"),
        (lambda ins: ins.lane == "h2d", "COPY .* which is never gathered; legal: ALL_GATHER"))),
    (swapped, {}, "UPDATE.* holds the gradient of blocks.1.mlp.up.bias and 5 more .bucket 4.; leg"),
    (norm_ahead, {"dp": 1, **CLIPPED}, "'NORM .* micro-batch 1 adds is in it 0 times; legal: a"),
    (without_norm, CLIPPED, "its gradient would not be clipped; legal: ..norm"),
    (without_norm, FP16, "would not skip a step that overflows; legal: "),
    (norm_of_one, CLIPPED, "does not read the gradient of blocks.3"),
    (lambda program: program.replace(i for i in my_sync(program).code if i.op != RESCALE), FP16,
     "the loss scale is adapted 0 times; legal: one RESCALE"),
    (split, TENSOR, "the ranks of 'tp' share; legal: one sum of all 5, in place"),
])  # fmt: skip
def test_what_would_train_something_else_or_end_in_a_traceback_is_refused(wrong, plan, words):
    assert re.search(words, said := refusal(wrong, **plan)), said


def test_a_list_that_is_another_one_in_every_process_is_refused_by_the_passs_name(run):
    """Only sums of one size change places: all calls would match, and not what they sum."""

    def drawn(program):
        units, code = gradients(program.code), program.code
        random.Random(os.getpid()).shuffle(units)
        units.sort(key=lambda u: program.units[u].numel)
        last = max(at for at, ins in enumerate(code) if ins.op == BACKWARD)
        return program.replace(insert(code, {last: map(all_reduce, units)}))

    plan = pl.Plan(dp=2, **LEFT | {"bucket_bytes": 1}, passes=(drawn,))
    with pytest.raises(pl.RankError, match="rank . got another list of instructions") as found:
        run(SPEC, plan)
    assert "passes=('own: drawn',): rank " in str(found.value)


def test_what_is_no_sequence_of_passes_is_refused_when_the_plan_is_made():
    refuses("passes=.*: not a sequence; legal: ", pl.Plan, passes=my_sync)


def test_zero_does_not_leave_its_sums_to_passes():
    with pytest.raises(ValueError, match="grad_sync=None: zero_stage=1 sums gradients by reduce-"):
        pl.Plan(dp=2, zero_stage=1, grad_sync=None).validate(SPEC)


# ---- what a plan keeps ---------------------------------------------------------------------------
def test_a_saved_plan_keeps_the_names_of_passes_and_does_not_run_without_them():
    plan = pl.Plan(dp=2, **LEFT, passes=(my_sync,))
    saved = json.loads(json.dumps(plan.to_dict()))
    assert saved["passes"] == ["own: my_sync"] and saved["grad_sync"] is None
    again = pl.Plan.from_dict(saved)
    assert again.passes == ("own: my_sync",) and again.grad_sync is None
    assert again.grad_sync_name == plan.grad_sync_name == "own: my_sync"
    refuses("passes=.*a saved plan keeps only the function's name", again.validate, SPEC)
    assert again.replace(passes=(my_sync,)) == plan


def test_a_pass_can_be_tried_on_a_printed_program():
    before = pl.program(SPEC, pl.Plan(dp=2, **LEFT))
    after = my_sync(before)
    assert before.refusal and not after.refusal
    assert after.count()["ALL_REDUCE", "dp"] == len(before.units)
    assert len(before.diff(after).changes) == 1
