"""Lowering: sends and receives that no backend can deadlock on, early enough to be hidden."""

from itertools import product

import numpy as np
import pytest

import paralab as pl
from lowered import Transfer, lower
from paralab.parallel.lowering import UNITS
from paralab.parallel.schedules import SCHEDULES, Action, gpipe, interleaved, one_f_one_b
from paralab.programs.checks import check
from paralab.programs.compile import compiled, laid_out
from paralab.programs.instructions import ACTIONS, COMPUTE
from paralab.programs.skeleton import skeleton
from paralab.theory.order import CODE
from paralab.theory.schedule_check import checked, timed


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
        own, plain = (pl.program(model, p) for p in (plan.replace(schedule=numbers), plan))
        assert repr(own).splitlines()[1:] == repr(plain).splitlines()[1:]


def test_no_order_deadlocks_where_every_transfer_holds_up_both_ranks():
    """By the checks of a learner's own program: messages are matched by their order alone."""
    for name, p, m, v in product(SCHEDULES, (2, 3, 4, 8), (1, 2, 4, 8, 9), (1, 2, 3)):
        if (v == 1 or name == "interleaved") and (name != "interleaved" or m % p == 0):
            plan = pl.Plan(pp=p, microbatches=m, schedule=name, virtual_stages=v)
            model = pl.ModelSpec(layers=p * v, hidden=4, heads=1, seq_len=4, vocab=256, tied=False)
            check(compiled(model, plan, optimizer="sgd"))


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


def seconds_of(lists, message):
    """Until the last action is over. A message takes ``message`` once both its ends are posted, and
    holds up those behind it from the same rank to the same rank.
    """
    stages = 1 + max(step.stage for row in lists for step in row)
    left, now, free = [row[::-1] for row in lists], [0.0] * len(lists), {}
    posted, over = {}, {}  # by what is sent, from which stage, of which micro-batch
    while any(left):
        for rank, row in enumerate(left):
            while row:
                step = row[-1]
                if isinstance(step, Transfer):
                    sent = step.kind == "send"
                    key = step.what, step.stage if sent else step.other_stage, step.microbatch
                    begin = max(posted.setdefault(key, now[rank]), now[rank])
                    lane = (rank, step.peer) if sent else (step.peer, rank)
                    if key in over:
                        over[key] = free[lane] = max(begin, free.get(lane, 0.0)) + message
                    over.setdefault(key, np.inf)
                elif step.kind != "W":
                    what, before = ("F", -1) if step.kind == "F" else ("B", 1)
                    key = what, step.stage + before, step.microbatch
                    comes = len(lists) > 1 and 0 <= key[1] < stages
                    arrived = over.get(key, np.inf) if comes else 0.0
                    if arrived == np.inf:
                        break
                    now[rank] = max(now[rank], arrived)
                if isinstance(step, Action):
                    now[rank] += UNITS[CODE[step.kind]]
                row.pop()
    return max(now)


def test_the_order_of_messages_costs_no_time():
    """While a message takes no more than an eighth of a forward."""
    for schedule in SOME:
        _, order = checked(schedule)
        for message in (0.0, 0.05, 0.125):
            _, end = timed(order, np.array(UNITS)[order.kind], np.full(len(order.rank), message))
            assert seconds_of(lower(schedule), message) == pytest.approx(max(end))
