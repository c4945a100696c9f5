"""What the checks of a compiled program promise: the kit's programs hold, and broken ones do not.

A program is broken in every way that a wrong pass, or a wrong derivation of waits and frees, could
break it: an instruction left out, moved, doubled, or over another axis.
"""

from __future__ import annotations

import dataclasses

import pytest

import paralab as pl
from paralab.programs.checks import check
from paralab.programs.compile import compiled
from paralab.programs.derive import derived
from paralab.programs.instructions import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    NORM,
    RECEIVE,
    REDUCE_SCATTER,
    RESCALE,
    SEND,
    UPDATE,
    WAIT,
    Code,
    insert,
)
from paralab.programs.program import Program
from tests.oracles import load

SPEC = pl.ModelSpec(layers=2, hidden=48, heads=4, seq_len=24, vocab=260)
SMALL = 40_000  # bytes of a bucket: so there are several
PLANS = {
    "data parallel": {"dp": 2, "bucket_bytes": SMALL, "microbatches": 2},
    "ZeRO-1": {"dp": 2, "zero_stage": 1, "bucket_bytes": SMALL},
    "ZeRO-2": {"dp": 2, "zero_stage": 2, "microbatches": 2},
    "HSDP": {"dp": 4, "shard": 2, "zero_stage": 3, "recompute": "full"},
    "hpZ": {"dp": 4, "zero_stage": 3, "secondary_shard": 2},
    "fp16": {"dp": 2, "zero_stage": 3, "precision": "fp16"},
    "tied ends": {"pp": 2, "microbatches": 3},
    "sequence parallel ZB-H1": {
        "pp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "schedule": "zb-h1",
        "microbatches": 2,
    },
    "tensor parallel": {"tp": 2, "dp": 2, "recompute": "selective"},
    "activations in parts": {"tp": 2, "recompute": "full", "partition_activations": True},
    "2D": {"tp": 4, "tp_mode": "2d"},
}


def program_of(plan: dict, *, final: bool = True) -> Program:
    return compiled(SPEC, pl.Plan(**plan), clips=True, final=final)


def with_code(program: Program, pp: int, code: Code) -> Program:
    codes = list(program.codes)
    codes[pp] = code
    return dataclasses.replace(program, codes=codes)


def refused(program: Program, pp: int, code: Code) -> str:
    with pytest.raises(ValueError, match="; legal: ") as found:
        check(with_code(program, pp, code))
    return str(found.value)


def of(code: Code, op: str, **fields: object) -> list[int]:
    """The positions of these instructions."""
    return [
        position
        for position, ins in enumerate(code)
        if ins.op == op and all(getattr(ins, name) == value for name, value in fields.items())
    ]


# ---- what holds ----------------------------------------------------------------------------------
def test_the_program_of_every_frozen_plan_holds():
    held = 0
    for number, oracle in enumerate(load()):
        model, clips = oracle.model, oracle.clip_norm is not None
        program = compiled(model, oracle.plan, optimizer=oracle.optimizer, clips=clips)
        check(program)
        held += 1
        if number % 5:
            continue
        own = oracle.plan.replace(passes=(lambda given: given,))
        assert compiled(model, own, optimizer=oracle.optimizer, clips=clips).codes == program.codes
    assert held > 240


@pytest.mark.parametrize("name", PLANS)
def test_every_instruction_left_out_is_missed(name):
    """Removed by a pass, so before waits and frees are derived. Not missed are a wait that only
    orders two calls, and the loss scale's change, which no other instruction of a step reads.
    """
    program = program_of(PLANS[name], final=False)
    lists = [derived(code) for code in program.codes]
    check(dataclasses.replace(program, codes=lists))
    for pp, code in enumerate(program.codes):
        for position, ins in enumerate(code):
            if ins.op not in (WAIT, RESCALE):
                left = derived(code[:position] + code[position + 1 :])
                refused(dataclasses.replace(program, codes=lists), pp, left)


@pytest.mark.parametrize("name", PLANS)
def test_every_wait_and_free_left_out_or_too_early_is_refused(name):
    program = program_of(PLANS[name])
    for pp, code in enumerate(program.codes):
        for position, ins in enumerate(code):
            if ins.op == WAIT:
                without = code[:position] + code[position + 1 :]
                without[position - 1] = without[position - 1]._replace(
                    frees=without[position - 1].frees + ins.frees
                )
                refused(program, pp, without)
            for value in ins.frees:
                kept = tuple(v for v in ins.frees if v != value)
                never = [*code[:position], ins._replace(frees=kept), *code[position + 1 :]]
                refused(program, pp, never)
                before = never[position - 1]
                never[position - 1] = before._replace(frees=(*before.frees, value))
                refused(program, pp, never)
                twice = [*code[: position + 1], *code[position + 1 :]]
                twice[-1] = twice[-1]._replace(frees=(*twice[-1].frees, value))
                refused(program, pp, twice)


# ---- partial sums --------------------------------------------------------------------------------
def test_a_missing_sum_is_refused_with_parameters_axis_and_place():
    program = program_of(PLANS["data parallel"] | {"grad_sync": "naive"}, final=False)
    (code,) = program.codes
    unit = next(
        u for u, some in enumerate(program.units[0]) if some.names == ("blocks.1.mlp.up.weight",)
    )
    (position,) = of(code, ALL_REDUCE, unit=unit)
    left = derived([ins for at, ins in enumerate(code) if at != position])
    said = refused(program, 0, left)
    (update,) = of(left, UPDATE, unit=unit)
    (adds,) = of(left, BACKWARD, mb=1, unit=unit)
    assert "the gradient of blocks.1.mlp.up.weight is never summed over the data-parallel" in said
    assert "so every rank would train on its own samples only" in said
    assert f"instruction {of(left, NORM)[0]}=" in said and update > of(left, NORM)[0]
    assert f"legal: ALL_REDUCE over 'dp' after position {adds}, 'BACKWARD blocks.1" in said


@pytest.mark.parametrize(
    ("name", "lane", "words", "why"),
    [
        ("HSDP", "replica", "ranks that keep the same shard", "its own samples"),
        ("tied ends", "ends", "which both hold the tied embedding", "its two copies would"),
        ("sequence parallel ZB-H1", "tp", "tensor-parallel ranks", "its own tokens"),
    ],
)
def test_a_sum_over_each_axis_is_missed_in_words(name, lane, words, why):
    program = program_of(PLANS[name], final=False)
    code = program.codes[0]
    gone = [at for at in of(code, ALL_REDUCE, lane=lane) if code[at].reads[0][0] != "norm"]
    gone = [at for at in gone if code[at].reads[0][0] in ("grad", "gshard")]
    left = derived([ins for at, ins in enumerate(code) if at not in gone])
    assert gone
    said = refused(with_code(program, 1 % len(program.codes), []), 0, left)
    assert words in said and f"(axis {lane!r})" in said and why in said


def test_a_second_sum_and_one_too_early_are_refused():
    program = program_of(PLANS["data parallel"], final=False)
    (code,) = program.codes
    position = of(code, ALL_REDUCE, lane="dp")[0]
    said = refused(program, 0, derived(insert(code, {position: [code[position]]})))
    assert "is summed over 'dp' already" in said
    early = of(code, BACKWARD, mb=0)[-1]
    said = refused(program, 0, derived(insert(code, {early: [code[position]]})))
    assert "adds to the gradient of" in said and "summed over dp already" in said


def test_a_sum_over_ranks_that_have_other_parameters_is_refused():
    program = program_of(PLANS["tensor parallel"], final=False)
    (code,) = program.codes
    (position, *_) = of(code, ALL_REDUCE, phase="grad_sync")
    wrong = [*code]
    wrong[position] = code[position]._replace(lane="tp")
    assert "is not partial over 'tp'" in refused(program, 0, derived(wrong))


def test_what_a_tensor_parallel_layer_leaves_has_to_be_summed():
    program = program_of(PLANS["tensor parallel"], final=False)
    (code,) = program.codes
    for phase, what in (("linear_forward", "x"), ("linear_backward", "g")):
        position = of(code, ALL_REDUCE, phase=phase)[0]
        said = refused(program, 0, derived(code[:position] + code[position + 1 :]))
        assert f"{what} blocks." in said and "is a partial sum" in said and "axis 'tp'" in said


def test_gradients_of_other_axes_are_not_added_up():
    program = program_of(PLANS["ZeRO-2"], final=False)
    (code,) = program.codes
    position = of(code, REDUCE_SCATTER, mb=1)[0]
    wrong = [*code]
    wrong[position + 1] = code[position + 1]._replace(reads=code[position].reads)
    said = refused(program, 0, derived(wrong))
    assert "one value is partial over dp, the other over no axis" in said


def test_shards_that_are_not_gathered_are_refused():
    program = program_of(PLANS["ZeRO-1"], final=False)
    (code,) = program.codes
    position = of(code, ALL_GATHER)[0]
    said = refused(program, 0, derived(code[:position] + code[position + 1 :]))
    assert "updates its shard of" in said and "which is never gathered" in said
    assert "legal: ALL_GATHER over 'dp'" in said


# ---- the schedule --------------------------------------------------------------------------------
def test_compute_in_another_order_or_twice_is_refused():
    program = program_of({"microbatches": 2})
    (code,) = program.codes
    last = of(code, FORWARD)[-1]
    # The second micro-batch's forward moves in front of the first one's backward: a fine order,
    # and not the one that was asked for.
    forwards = [code[at] for at in of(code, FORWARD, mb=1)]
    rest = [ins for ins in code if ins not in forwards]
    first = of(rest, BACKWARD)[0]
    said = refused(program, 0, rest[:first] + forwards + rest[first:])
    assert "the schedule has BACKWARD head.loss mb 0 here" in said
    said = refused(program, 0, insert(code, {last: [code[last]]}))
    assert "the schedule has BACKWARD" in said


def test_a_weight_half_is_computed_once():
    program = program_of(PLANS["tensor parallel"])
    (code,) = program.codes
    position = of(code, BACKWARD_WEIGHT)[0]
    for wrong in (
        insert(code, {position: [code[position]]}),
        code[:position] + code[position + 1 :],
    ):
        said = refused(program, 0, wrong)
        assert "BACKWARD_WEIGHT" in said and "is computed" in said


# ---- the order of calls --------------------------------------------------------------------------
def test_messages_in_another_order_are_refused_without_a_process():
    program = program_of({"pp": 2, "microbatches": 4, "schedule": "gpipe"})
    code = bare(program.codes[0])
    first, second = of(code, SEND)[:2]
    moved = [*code[:first], *code[first + 1 : second + 1], code[first], *code[second + 1 :]]
    with pytest.raises(ValueError, match="does not match, .* x blocks.1 mb . ") as found:
        check(with_code(program, 0, derived(moved)))
    assert "in the same order a RECEIVE for each SEND" in str(found.value)


def test_two_ranks_that_both_send_first_are_refused():
    """On gloo this runs; on NCCL both may wait for the other's receive."""
    program = program_of({"pp": 2, "microbatches": 4})
    code = bare(program.codes[1])
    receive = of(code, RECEIVE)[1]
    send = next(at for at in of(code, SEND) if at > receive)
    moved = [*code[:receive], *code[receive + 1 : send + 1], code[receive], *code[send + 1 :]]
    with pytest.raises(ValueError, match="'SEND g .*: pipeline rank 0 makes a call .*'SEND x "):
        check(with_code(program, 1, derived(moved)))


def test_a_receive_without_a_send_is_refused():
    program = program_of({"pp": 2, "microbatches": 2})
    code = bare(program.codes[1])
    last = of(code, SEND)[-1]
    with pytest.raises(ValueError, match="deadlock: .* rank 0 waits at position .*RECEIVE g"):
        check(with_code(program, 1, derived(code[:last] + code[last + 1 :])))


def bare(code: Code) -> Code:
    """A list without what is derived."""
    return [ins._replace(frees=()) for ins in code if ins.op != WAIT]


def test_a_collective_that_one_rank_leaves_out_is_refused():
    program = program_of({"pp": 2, "microbatches": 2})
    code = [ins for ins in program.codes[1] if ins.lane != "pp" or ins.op != ALL_REDUCE]
    wrong = with_code(program, 1, derived(bare(code)))
    with pytest.raises(ValueError, match="norm is a partial sum"):
        check(wrong)
