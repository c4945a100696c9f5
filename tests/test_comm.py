"""Every operation of the one door: right sums, right rows, also through host buffers."""

from __future__ import annotations

import pytest

import paralab as pl
from paralab.launch import launch_program


def every_operation(context, stage: bool) -> dict:
    import torch

    from paralab.comm import Group
    from paralab.observe.recorder import Recorder

    n, rank = context.world_size, context.rank
    recorder = Recorder(rank=rank, world_size=n)
    group = Group(range(n), axis="world", context=context, recorder=recorder, stage=stage)
    mine = torch.arange(2 * n, dtype=torch.float32) + 100 * rank  # (2n,)
    out = {}

    total = mine.clone()
    group.all_reduce(total).wait()
    out["all_reduce"] = total
    gathered = torch.empty(2 * n * n)
    group.all_gather(gathered, mine, phase="test").wait()
    out["all_gather"] = gathered
    swapped = torch.empty(2 * n)
    group.all_to_all(swapped, mine, phase="test").wait()
    out["all_to_all"] = swapped
    part = torch.empty(2)
    group.reduce_scatter(part, mine, phase="test").wait()
    out["reduce_scatter"] = part
    for root in range(n):
        copy = mine.clone()
        group.broadcast(copy, root=root, phase="test").wait()
        out[f"broadcast {root}"] = copy
        copy = mine.clone()
        group.reduce(copy, root=root, phase="test").wait()
        out[f"reduce {root}"] = copy
    if n > 1:
        ring = torch.empty(2 * n)
        parts = [("send", mine, (rank + 1) % n), ("recv", ring, (rank - 1) % n)]
        group.exchange(parts, phase="test").wait()
        out["ring"] = ring
    group.barrier()
    tables = recorder.tables()
    return {"values": {k: v.tolist() for k, v in out.items()}, **tables}


@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_operation_gives_what_its_name_says(n, stage):
    parts = launch_program(every_operation, n, (stage,), timeout=30, device="cpu", strict=True)
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


def test_rows_say_what_was_sent_to_whom_and_when():
    parts = launch_program(every_operation, 3, (False,), timeout=30, device="cpu")
    for rank, part in enumerate(parts):
        rows = part["collectives"]
        kinds = list(zip(rows["op"], rows["payload_bytes"], rows["wire_bytes"], strict=True))
        assert kinds[0] == ("all_reduce", 24, 32)
        assert kinds[1] == ("all_gather", 72, 48)
        assert kinds[2] == ("all_to_all", 24, 16)
        assert kinds[3] == ("reduce_scatter", 24, 16)
        assert ("send", 24, 24) in kinds and ("recv", 24, 0) in kinds
        assert rows["ranks"][0] == [0, 1, 2] and set(rows["rank"]) == {rank}
        assert all(a <= b for a, b in zip(rows["start"], rows["end"], strict=True))
    calls = [
        list(zip(p["collectives"]["call"], p["collectives"]["op"], strict=True)) for p in parts
    ]
    assert [c for c, op in calls[0] if op == "all_reduce"] == [
        c for c, op in calls[1] if op == "all_reduce"
    ]


def test_staged_copies_are_written_down_on_the_lanes_of_the_two_links():
    part = launch_program(every_operation, 2, (True,), timeout=30, device="cpu")[0]
    lanes = part["spans"]["lane"]
    assert lanes.count("d2h") == len(set(part["collectives"]["span"]))
    assert 0 < lanes.count("h2d") <= lanes.count("d2h")


def out_of_order(context, case: str) -> None:
    import torch

    from paralab.comm import Group
    from paralab.observe.recorder import Recorder

    rank, t = context.rank, torch.zeros(4)
    group = Group(range(2), axis="pp", context=context, recorder=Recorder(rank=rank, world_size=2))
    other = 1 - rank
    if case == "both send first":  # gloo buffers this; NCCL hangs
        group.send(t, to=other, phase="test")
        group.recv(t.clone(), source=other, phase="test").wait()
    elif case == "sizes differ":
        if rank == 0:
            group.send(t, to=1, phase="test").wait()
        else:
            group.recv(torch.zeros(2), source=0, phase="test").wait()
    elif case == "another collective":
        if rank == 0:
            group.all_reduce(t).wait()
        else:
            group.broadcast(t, root=0, phase="test").wait()
    elif case == "another size":
        group.all_reduce(torch.zeros(4 + rank)).wait()
    elif case == "tags would match":  # receives in the other order than the sends
        if rank == 0:
            group.send(torch.zeros(1), to=1, phase="test")
            group.send(torch.zeros(2), to=1, phase="test")
        else:
            group.recv(torch.zeros(2), source=0, phase="test")
            group.recv(torch.zeros(1), source=0, phase="test")


@pytest.mark.parametrize(
    "case",
    ["both send first", "sizes differ", "another collective", "another size", "tags would match"],
)
def test_strict_mode_refuses_what_would_hang_on_nccl(case):
    with pytest.raises(pl.RankError, match="OrderError.*(exchange|call) #0") as caught:
        launch_program(out_of_order, 2, (case,), timeout=30, device="cpu", strict=True)
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)


def waits_for_an_absent_peer(context) -> None:
    import torch

    from paralab.comm import Group
    from paralab.observe.recorder import Recorder

    group = Group(
        range(2), axis="pp", context=context, recorder=Recorder(rank=context.rank, world_size=2)
    )
    if context.rank == 0:
        group.send(torch.zeros(1), to=1, phase="test").wait()


def test_strict_mode_holds_a_send_until_its_receive_is_there():
    with pytest.raises(pl.RankTimeout) as caught:
        launch_program(waits_for_an_absent_peer, 2, timeout=3, device="cpu", strict=True)
    assert "exchange" in caught.value.waiting[0] and "1" in caught.value.waiting[0]
