"""What the checks of a compiled program promise: the kit's programs hold, and broken ones do not.

A program is broken in every way that a wrong pass, or a wrong derivation of waits and frees, could
break it: an instruction left out, moved, doubled, or over another axis.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

import paralab as pl
from paralab.programs.checks import check
from paralab.programs.compile import compiled
from paralab.programs.derive import derived
from paralab.programs.instructions import (
    BACKWARD,
    FORWARD,
    RECEIVE,
    REDUCE_SCATTER,
    RESCALE,
    SEND,
    UPDATE,
    WAIT,
    Code,
)
from paralab.programs.program import Program

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
    "sequence parallel ZB-H1": {"pp": 2, "tp": 2, "sequence_parallel": True, "schedule": "zb-h1",
                                "microbatches": 2},
    "tensor parallel": {"tp": 2, "dp": 2, "recompute": "selective"},
    "activations in parts": {"tp": 2, "recompute": "full", "partition_activations": True},
    "2D": {"tp": 4, "tp_mode": "2d"},
}  # fmt: skip


def program_of(plan: dict, *, final: bool = True) -> Program:
    return compiled(SPEC, pl.Plan(**plan), clips=True, final=final)


def with_code(program: Program, pp: int, code: Code) -> Program:
    return dataclasses.replace(program, codes=[*program.codes[:pp], code, *program.codes[pp + 1 :]])


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
                frees = code[position - 1].frees + ins.frees
                without[position - 1] = code[position - 1]._replace(frees=frees)
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


def test_gradients_of_other_axes_are_not_added_up():
    (code,) = (program := program_of(PLANS["ZeRO-2"], final=False)).codes
    position = of(code, REDUCE_SCATTER, mb=1)[0]
    wrong = [*code]
    wrong[position + 1] = code[position + 1]._replace(reads=code[position].reads)
    said = refused(program, 0, derived(wrong))
    assert "one value is partial over dp, the other over no axis" in said


def test_a_gradient_that_is_read_too_early_is_to_be_summed_after_its_last_addition():
    plan = pl.Plan(dp=2, microbatches=2, grad_sync=None)
    (code,) = (program := compiled(SPEC, plan, final=False)).codes
    update = code[of(code, UPDATE)[0]]
    first, *_, last = (at for at, ins in enumerate(code) if update.reads[0] in ins.writes)
    early = [*code[: first + 1], update, *(ins for ins in code[first + 1 :] if ins != update)]
    assert f"'dp' after position {last + 1}, " in refused(program, 0, derived(early))


def test_compute_in_another_order_is_refused():
    """The second forward moves in front of the first backward: fine, and not what was asked for."""
    (code,) = (program := program_of({"microbatches": 2})).codes
    forwards = [code[at] for at in of(code, FORWARD, mb=1)]
    rest = [ins for ins in code if ins not in forwards]
    first = of(rest, BACKWARD)[0]
    said = refused(program, 0, rest[:first] + forwards + rest[first:])
    assert "the schedule has BACKWARD head.loss mb 0 here" in said


# ---- the order of calls --------------------------------------------------------------------------
def refused_messages(schedule: str, pp: int, move: Callable[[Code], Code]) -> str:
    """What is said of two ranks when this one makes its messages in another order."""
    program = program_of({"pp": 2, "microbatches": 4, "schedule": schedule})
    code = [ins._replace(frees=()) for ins in program.codes[pp] if ins.op != WAIT]
    return refused(program, pp, derived(move(code)))


def later(code: Code, first: int, second: int) -> Code:
    """One instruction moves behind another."""
    return [*code[:first], *code[first + 1 : second + 1], code[first], *code[second + 1 :]]


def test_messages_in_another_order_are_refused_without_a_process():
    said = refused_messages("gpipe", 0, lambda code: later(code, *of(code, SEND)[:2]))
    assert re.search("does not match, .* x blocks.1 mb . ", said)
    assert "in the same order a RECEIVE for each SEND" in said


def test_two_ranks_that_both_send_first_are_refused():
    """On gloo this runs; on NCCL both may wait for the other's receive."""

    def move(code: Code) -> Code:
        receive = of(code, RECEIVE)[1]
        return later(code, receive, next(at for at in of(code, SEND) if at > receive))

    said = refused_messages("1f1b", 1, move)
    assert re.search("'SEND g .*: pipeline rank 0 makes a call .*'SEND x ", said)


def test_a_receive_without_a_send_is_refused():
    def without_its_last(code: Code) -> Code:
        last = of(code, SEND)[-1]
        return code[:last] + code[last + 1 :]

    said = refused_messages("1f1b", 1, without_its_last)
    assert re.search("deadlock: .* rank 0 waits at position .*RECEIVE g", said)
