"""Every operation of the one door: right sums, right rows, also through host buffers."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import paralab as pl
from paralab import transports
from paralab.comm import Group, everyone
from paralab.instruments.ledger import Ledger
from paralab.instruments.recorder import Recorder
from paralab.launch import launch_program
from paralab.transports import Gloo, Staged
from patience import HANG_S


def every_operation(context, staged: bool) -> dict:
    n, rank = context.world_size, context.rank
    recorder = Recorder(rank=rank, world_size=n)
    settings = {"context": context, "recorder": recorder, "transport": Staged if staged else Gloo}
    group = Group(range(n), axis="world", **settings)
    mine = torch.arange(2 * n, dtype=torch.float32) + 100 * rank  # (2n,)
    out = {}

    def filled(name, size):
        out[name] = torch.empty(size)
        getattr(group, name)(out[name], mine, phase="test").wait()

    out["all_reduce"] = mine.clone()
    group.all_reduce(out["all_reduce"]).wait()
    filled("all_gather", 2 * n * n)
    filled("all_to_all", 2 * n)
    filled("reduce_scatter", 2)
    for root in range(n):
        for name in ("broadcast", "reduce"):
            copy = out[f"{name} {root}"] = mine.clone()
            getattr(group, name)(copy, root=root, phase="test").wait()
    if n > 1:
        ring = out["ring"] = torch.empty(2 * n)
        parts = [("send", mine, (rank + 1) % n), ("recv", ring, (rank - 1) % n)]
        group.exchange(parts, phase="test").wait()
    group.barrier()
    return {"values": {k: v.tolist() for k, v in out.items()}, **recorder.tables()}


def assert_copied_down_what_is_read_and_up_what_is_filled(copies):
    """By rank 0 of 2, 16 bytes of its own: no buffer goes down that a call only fills."""
    assert list(zip(copies["lane"], copies["bytes"], strict=True)) == [
        *(("d2h", 16), ("h2d", 16)),  # all-reduce, in place
        *(("d2h", 16), ("h2d", 16)),  # all-gather: the other rank's part
        *(("d2h", 16), ("h2d", 16)),  # all-to-all
        *(("d2h", 16), ("h2d", 16)),  # reduce-scatter: the parts, which the rank adds up
        ("d2h", 16),  # broadcast, as the root
        ("h2d", 16),  # reduce, as the root: the other rank's part
        ("h2d", 16),  # broadcast
        ("d2h", 16),  # reduce
        *(("d2h", 16), ("h2d", 16)),  # a send and a receive
        *(("d2h", 4), ("h2d", 4)),  # barrier
    ]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_operation_gives_what_its_name_says(n, staged):
    given = {"timeout": 30, "device": "cpu", "strict": True}
    parts = launch_program(every_operation, n, (staged,), **given)
    data = [[i + 100.0 * r for i in range(2 * n)] for r in range(n)]
    total = [sum(column) for column in zip(*data, strict=True)]
    for rank, part in enumerate(parts):
        values = part["values"]
        assert values["all_reduce"] == total
        assert values["all_gather"] == [x for row in data for x in row]
        assert values["all_to_all"] == [x for row in data for x in row[2 * rank : 2 * rank + 2]]
        assert values["reduce_scatter"] == total[2 * rank : 2 * rank + 2]
        for root in range(n):
            assert values[f"broadcast {root}"] == data[root]
            assert values[f"reduce {root}"] == (total if rank == root else data[rank])
        if n > 1:
            assert values["ring"] == data[(rank - 1) % n]
        assert part["collectives"]["call"] == parts[0]["collectives"]["call"]
    if n == 2 and staged:
        assert_copied_down_what_is_read_and_up_what_is_filled(parts[0]["copies"])


def a_message_around_a_reduce(context) -> tuple[list, list]:
    """It is received by a call before the reduce, and sent after all have the sum."""
    group, rank = everyone(context), context.rank
    message, total = torch.full((3,), 10.0 * rank), torch.full((3,), 1.0 + rank)
    received = group.recv(message, source=1) if rank == 0 else None
    group.reduce(total, root=0).wait()
    group.barrier()
    (received or group.send(message, to=0)).wait()
    return message.tolist(), total.tolist()


def test_a_message_is_not_taken_for_a_part_of_a_reduce():
    received, _ = launch_program(a_message_around_a_reduce, 2, timeout=HANG_S, device="cpu")
    assert received == ([10.0] * 3, [3.0] * 3)


def gathers(context, nodes) -> tuple[list, list]:
    """An all-gather on such nodes: what of torch.distributed it calls, and its result."""
    called, functions = [], transports.FUNCTIONS
    plain, sends = functions["all_gather"], dist.batch_isend_irecv
    functions["all_gather"] = lambda *given, **how: called.append("ring") or plain(*given, **how)
    dist.batch_isend_irecv = lambda ops: called.append(len(ops)) or sends(ops)
    result = torch.empty(3)
    group = everyone(dataclasses.replace(context, nodes=nodes))
    group.all_gather(result, torch.tensor([1.0 + context.rank])).wait()
    return called, result.tolist()


@pytest.mark.parametrize(("nodes", "called"), [((0, 0, 0), [4]), ((0, 0, 1), ["ring"])])
def test_gloo_gathers_by_messages_inside_a_node_and_by_its_ring_between_nodes(nodes, called):
    found = launch_program(gathers, 3, (nodes,), timeout=HANG_S, device="cpu")
    assert found == [(called, [1.0, 2.0, 3.0])] * 3


def gathers_and_reduces_in_another_order(context) -> tuple[list, list]:
    """Rank 1 begins with the reduce: each call then waits for the part that is meant for it."""
    group, own = everyone(context), torch.tensor([10.0 + context.rank])
    result, total = torch.empty(2), torch.tensor([1.0 + context.rank])
    calls = [lambda: group.all_gather(result, own), lambda: group.reduce(total, root=0)]
    for pending in [call() for call in (calls[::-1] if context.rank else calls)]:
        pending.wait()
    return result.tolist(), total.tolist()


def test_a_part_of_a_gather_is_not_taken_for_a_part_of_a_reduce():
    found = launch_program(gathers_and_reduces_in_another_order, 2, timeout=HANG_S, device="cpu")
    assert found == [([10.0, 11.0], [3.0]), ([10.0, 11.0], [2.0])]


def gathers_what_is_not_a_plain_row(context, transport) -> list[list]:
    settings = {"context": context, "recorder": Recorder(rank=context.rank, world_size=2)}
    group, square = Group((0, 1), axis="world", transport=transport, **settings), torch.ones(2, 2)
    own = (square.cumsum(0) + square.cumsum(1) * 4 + 10 * context.rank).t()
    results = []
    for result, part in (
        (torch.empty(4, 2), own),
        (torch.empty(2, 4).t(), own),
        (torch.empty(16)[::2], own.reshape(4)),
        (torch.empty(8), own.reshape(4).requires_grad_()),
        (torch.empty(0, 3), torch.empty(0, 3)),
    ):
        group.all_gather(result, part).wait()
        results.append(result.flatten().tolist())
    return results


@pytest.mark.parametrize("transport", [Gloo, Staged])
def test_an_all_gather_takes_tensors_that_are_not_contiguous_or_empty(transport):
    given = {"timeout": HANG_S, "device": "cpu"}
    found = launch_program(gathers_what_is_not_a_plain_row, 2, (transport,), **given)
    assert found == [[[5.0, 6.0, 9.0, 10.0, 15.0, 16.0, 19.0, 20.0]] * 4 + [[]]] * 2


def gathers_and_counts_threads(context) -> int:
    group, result = everyone(context), torch.empty(context.world_size)
    before = threading.active_count()
    for _ in range(2):
        group.all_gather(result, torch.ones(1)).wait()
    return threading.active_count() - before


def test_one_thread_waits_for_all_messages_of_the_all_gathers():
    """Of a process with more than 100 threads nobody learns in which line it hangs."""
    found = launch_program(gathers_and_counts_threads, 3, timeout=HANG_S, device="cpu")
    assert found == [1, 1, 1]


def groups_of_groups(context) -> dict:
    n, rank = context.world_size, context.rank
    world = everyone(dataclasses.replace(context, nodes=(0, 0, 1, 1)))
    out = {}
    for axis, members in (("tp", [(0, 1), (2, 3)]), ("dp", [(0, 2), (1, 3)])):
        asked = [world.subgroup(ranks, axis=axis) for ranks in members]
        again = [world.subgroup(ranks, axis=axis) for ranks in members]
        (mine,) = [group for group in asked if group is not None]
        assert again == asked and rank in mine.ranks and mine.ranks[mine.index] == rank
        total = torch.full((2,), float(rank))
        mine.all_reduce(total).wait()
        out[axis] = total.tolist()
    backends = [group.process_group._get_backend(torch.device("cpu")) for group in (world, mine)]
    assert [one.options._timeout.total_seconds() for one in backends] == [context.limit] * 2
    assert context.store.timeout.total_seconds() == context.limit  # of a first call over NCCL
    assert world.subgroup(range(n), axis="world") is world
    right, left = (rank + 1) % n, (rank - 1) % n
    tensor, received = torch.ones(4), torch.empty(4)
    world.exchange([("send", tensor, right), ("recv", received, left)]).wait()
    for wrong in ((), (0, 0), (0, 9)):
        with pytest.raises(ValueError, match="not different ranks of this group"):
            world.subgroup(wrong, axis="tp")
    with pytest.raises(RuntimeError, match="every rank has to call it"):
        mine.subgroup((rank,), axis="pp")
    return {**out, **world.recorder.tables()["collectives"]}


def test_subgroups_sum_over_their_members_and_every_pair_has_its_own_level():
    parts = launch_program(groups_of_groups, 4, timeout=HANG_S, device="cpu", strict=True)
    for rank, part in enumerate(parts):
        assert part["tp"] == [1.0, 1.0] if rank < 2 else [5.0, 5.0]
        assert part["dp"] == [2.0, 2.0] if rank % 2 == 0 else [4.0, 4.0]
        rows = zip(part["op"], part["axis"], part["level"], part["phase"], strict=True)
        near, far = ("inter", "intra") if rank % 2 else ("intra", "inter")  # to the right, left
        assert list(rows) == [
            ("all_reduce", "tp", "intra", "data"),
            ("all_reduce", "dp", "inter", "grad_sync"),
            ("send", "world", near, "data"),
            ("recv", "world", far, "data"),
        ]


def out_of_order(context, case: str) -> None:
    """What rank 0 does in this case, or rank 1."""
    rank, t, group = context.rank, torch.zeros(4), everyone(context)

    def send(tensor):
        return group.send(tensor, to=1 - rank, phase="test")

    def receive(tensor):
        return group.recv(tensor, source=1 - rank, phase="test")

    {
        "both send first": [lambda: (send(t), receive(t.clone()).wait())] * 2,  # gloo buffers this
        "sizes differ": [lambda: send(t).wait(), lambda: receive(t[:2]).wait()],
        "widths differ": [lambda: send(t.bfloat16()).wait(), lambda: receive(t).wait()],
        "tags would match": [lambda: (send(t[:1]), send(t[:2])),
                             lambda: (receive(t[:2]), receive(t[:1]))],
        "another size": [lambda: group.all_reduce(torch.zeros(4 + rank)).wait()] * 2,
        "another collective": [lambda: group.all_reduce(t).wait(),
                               lambda: group.broadcast(t, root=0, phase="test").wait()],
        "another root": [lambda: group.broadcast(t, root=rank, phase="test").wait()] * 2,
        "before and after": [lambda: (receive(t), group.all_reduce(t.clone())),  # gloo: by tag
                             lambda: (group.all_reduce(t.clone()), send(t))],
    }[case][rank]()  # fmt: skip


@pytest.mark.parametrize("case", ["both send first", "sizes differ", "widths differ",
                                  "tags would match", "another size", "another collective",
                                  "another root", "before and after"])  # fmt: skip
def test_strict_mode_refuses_what_would_hang_on_nccl(case):
    with pytest.raises(pl.RankError, match="OrderError.*call #0") as caught:
        launch_program(out_of_order, 2, (case,), timeout=HANG_S, device="cpu", strict=True)
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)


def waits_for_an_absent_peer(context) -> None:
    group = everyone(context)
    if context.rank == 0:
        group.send(torch.zeros(1), to=1, phase="test").wait()


def test_strict_mode_holds_a_send_until_its_receive_is_there():
    with pytest.raises(pl.RankTimeout) as caught:
        launch_program(waits_for_an_absent_peer, 2, timeout=1, device="cpu", strict=True)
    assert caught.value.waiting[0].startswith("in send #0 to rank 1 on axis world")


def receives_long_before_it_looks(context) -> bool:
    group = everyone(context, axis="pp")
    group.barrier()
    if context.rank == 0:
        call = group.send(torch.ones(1000), to=1)
    else:
        got = torch.zeros(1000)
        call = group.recv(got, source=0)
    while call._posted.works[0].empty():  # the thread that hears of it has the time
        time.sleep(0.001)
    before = time.perf_counter()
    time.sleep(0.01)
    call.wait()
    assert context.rank == 0 or bool((got == 1).all())
    table = group.recorder.tables()["spans"]
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    ended = [r["end"] for r in rows if r["lane"] == "comm:pp"][-1]
    return ended < before


def test_a_message_ends_when_its_bytes_are_there_not_when_the_rank_looks():
    assert all(launch_program(receives_long_before_it_looks, 2, timeout=HANG_S, device="cpu"))


class Signalled(Exception):
    pass


def is_interrupted_in_a_wait(context) -> None:
    def handler(*_) -> None:
        raise Signalled

    group, one = everyone(context), torch.ones(1)
    if context.rank == 0:
        signal.signal(signal.SIGALRM, handler)
        call = group.recv(one, source=1)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Signalled):
            call.wait()
        group.send(one, to=1).wait()
    else:
        group.recv(one, source=0).wait()
        group.send(one, to=0).wait()
    group.barrier()


def test_a_signal_is_handled_while_a_rank_waits_for_a_message():
    """As Ctrl-C has to be in a rank of torchrun; here the two would else wait for ever."""
    launch_program(is_interrupted_in_a_wait, 2, timeout=HANG_S, device="cpu")


def looks_for_what_gloo_still_has(context) -> Counter[str]:
    """How often a buffer was alive after the wait and the last name for it were gone."""
    n, group, found = context.world_size, everyone(context), Counter()
    calls = {"all_reduce": [n], "all_gather": [n, 1], "reduce_scatter": [1, n],
             "all_to_all": [n, n]}  # fmt: skip
    with Ledger(group.recorder):
        for name, sizes in calls.items():
            for _ in range(100):
                gone, tensors = [], [torch.zeros(6000 * size) for size in sizes]
                seen = [weakref.ref(t.untyped_storage(), gone.append) for t in tensors]
                getattr(group, name)(*tensors).wait()
                del tensors
                found[name] += len(gone) < len(seen)
    return found


def test_a_wait_ends_when_gloo_has_let_go_where_memory_is_counted():
    for found in launch_program(looks_for_what_gloo_still_has, 3, timeout=HANG_S, device="cpu"):
        assert not any(found.values()), found  # of 100; without care 3 to 60 of each


def test_what_was_lent_is_waited_for_until_it_is_back_but_not_for_ever(monkeypatch):
    lent = transports.Lent([torch.zeros(3)], Ledger(Recorder(rank=0, world_size=1)))
    weight = torch.ones(3, requires_grad=True)  # its backward needs what it was multiplied with
    monkeypatch.setattr(transports, "PATIENCE", 20.0)
    for use in (lambda t: weight * t, torch.Tensor.detach):  # which has the storage alone
        keeps = [use(lent.tensors[0])]
        threading.Timer(0.1, keeps.clear).start()
        lent.wait()
        assert not keeps
    monkeypatch.setattr(transports, "PATIENCE", 0.1)
    view = lent.tensors[0][1:]
    lent.wait()
    assert view.tolist() == [0.0, 0.0]
