"""Lowering: sends and receives that no backend can deadlock on, early enough to be hidden."""

from itertools import product

import numpy as np
import pytest

import paralab as pl
from lowered import Transfer, check_lowered, lower
from paralab.parallel.schedules import SCHEDULES, Action, gpipe, interleaved, one_f_one_b
from paralab.programs.compile import laid_out
from paralab.programs.instructions import ACTIONS, COMPUTE
from paralab.programs.skeleton import skeleton
from refusals import refuses


def text(lists):
    return [" ".join(map(str, row)) for row in lists]


SOME = [
    *(f(p, m) for f, p, m in product(
        (f for f in SCHEDULES.values() if f is not interleaved), (1, 2, 3, 4, 8), (1, 2, 3, 4, 9))),
    *(interleaved(p, p * n, v) for p, n, v in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3))),
]  # fmt: skip


def test_two_ranks_by_hand():
    assert text(lower(gpipe(2, 2))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    ]


def test_the_lists_without_transfers_are_the_schedule():
    """As lists of steps, and as the instructions of a program, where a rank may be alone."""
    for schedule in SOME:
        lists = lower(schedule)
        assert [[s for s in row if isinstance(s, Action)] for row in lists] == schedule
    for schedule in ("1f1b", "zb-h1", "interleaved"):
        stages = 2 if schedule == "interleaved" else 1
        plan = pl.Plan(pp=2, microbatches=4, schedule=schedule, virtual_stages=stages)
        model = pl.ModelSpec(layers=4, hidden=48, heads=4, seq_len=8, vocab=64)
        program = laid_out(model, plan, optimizer="sgd", clips=False)
        lists = skeleton(program)
        for rank, row in enumerate(lists):
            actions = [ACTIONS[action.kind] for action in plan.actions()[rank]]
            assert [ins.op for ins in row if ins.op in COMPUTE] == actions
            alone = skeleton(program, only=rank)
            assert alone[rank] == row and not any(alone[:rank] + alone[rank + 1 :])


def test_a_schedule_of_ones_own_may_hold_numbers_of_numpy():
    def numbers(pp, m):
        rows = one_f_one_b(pp, m)
        return [[Action(np.int64(s), kind, np.int64(k)) for s, kind, k in row] for row in rows]

    model = pl.ModelSpec(layers=2, hidden=48, heads=4, seq_len=8, vocab=64)
    for pp in (1, 2):
        plan = pl.Plan(pp=pp, microbatches=2)
        assert (
            repr(pl.program(model, plan.replace(schedule=numbers))).splitlines()[1:]
            == (repr(pl.program(model, plan)).splitlines()[1:])
        )


def test_no_order_deadlocks_where_every_transfer_holds_up_both_ranks():
    for schedule in SOME:
        check_lowered(lower(schedule))


@pytest.mark.parametrize(("rank", "at", "to", "said"), [  # a step of two-rank GPipe elsewhere
    (1, 1, 0, "meets 1RECV_F1|meets 0SEND_F0"),  # by order alone taken for micro-batch 0
    (0, 1, 0, "0SEND_F0 needs a send after its action"),
    (1, 2, 0, "what 1F0 needs is not there yet"),
    (1, 7, None, "rank 0 waits at 0RECV_B1, for rank 1"),
])  # fmt: skip
def test_lists_that_could_hang_are_found(rank, at, to, said):
    lists = lower(gpipe(2, 2))
    step = lists[rank].pop(at)
    if to is not None:
        lists[rank].insert(to, step)
    refuses(said, check_lowered, lists)


def test_a_result_leaves_before_its_rank_computes_on():
    for schedule in SOME:
        for row in lower(schedule):
            last = None
            for step in row:
                if isinstance(step, Action):
                    last = step
                elif step.kind == "send":
                    assert (last.stage, last.microbatch) == (step.stage, step.microbatch)
                    assert step.what == {"I": "B"}.get(last.kind, last.kind)


def test_few_buffers_wait_for_their_action():
    # Receives are early by what the sender is ahead: one micro-batch in 1F1B, whatever p and m.
    for p, m in product((2, 4, 8), (8, 32)):
        for row in lower(one_f_one_b(p, m)):
            posted = dict.fromkeys("FB", 0)
            for step in row:
                if isinstance(step, Transfer):
                    posted[step.what] += step.kind == "recv"
                    assert posted[step.what] <= 2, (p, m, str(step))
                elif posted[step.kind]:
                    posted[step.kind] -= 1


def test_a_receive_is_posted_while_the_action_before_computes():
    for p, m in ((2, 4), (3, 4), (4, 9)):
        for row in lower(gpipe(p, m)):
            done, late = 0, 0
            for step in row:
                if isinstance(step, Action):
                    done += 1
                elif step.kind == "recv":
                    used = Action(step.stage, step.what, step.microbatch)
                    at = [s for s in row if isinstance(s, Action)].index(used)
                    late += at == done and done > 0
            assert late <= 1  # the first gradient: nothing is left to compute meanwhile
    # 1F1B: of what two neighbours swap at once one is early, here the gradient.
    rows = text(lower(one_f_one_b(4, 8)))
    assert "2RECV_B2 2F3 2SEND_F3 2B2" in rows[2] and "3RECV_F3 3F3" in rows[3]
