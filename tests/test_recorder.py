"""The recorder keeps the compute lane flat and loses no time."""

from __future__ import annotations

import dataclasses
import threading
import time
from types import SimpleNamespace

import torch

from paralab.comm import everyone
from paralab.instruments.clocks import measure_offset
from paralab.instruments.recorder import Recorder
from paralab.launch import launch_program


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def rows(recorder: Recorder) -> list[dict]:
    table = recorder.tables()["spans"]
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def test_a_launch_cuts_the_span_and_a_wait_ends_a_call_whose_end_nobody_signalled():
    recorder = Recorder(rank=1, world_size=4)
    with recorder.span("backward", microbatch=2):
        call = recorder.launch("comm:dp", recorder.cut(), recorder.clock.host())
        with recorder.span("wait"):
            time.sleep(0.01)
            recorder.settled(call)
    _, comm, *_ = found = rows(recorder)
    assert [p["kind"] for p in found] == ["backward", "comm", "backward", "wait", "backward"]
    assert [p["microbatch"] for p in found] == [2, -1, 2, -1, 2]
    assert [p["id"] for p in found] == [1, 5, 9, 13, 17]  # unique over ranks
    parts = [p for p in found if p is not comm]
    assert [p["end"] for p in parts[:-1]] == [p["start"] for p in parts[1:]]
    assert comm["after"] == [1] and comm["cost"] == 0.0
    assert comm["end"] - comm["start"] >= 0.01


def test_cost_is_the_cpu_time_of_the_span_and_a_wait_has_none():
    recorder = Recorder(rank=0, world_size=1)
    with recorder.span("forward"):
        spin(0.02)
    with recorder.span("forward"):
        time.sleep(0.02)
    with recorder.span("wait"):
        spin(0.005)
    busy, idle, wait = rows(recorder)
    assert 0.02 <= busy["cost"] < 0.05
    assert idle["cost"] < 0.01 and idle["end"] - idle["start"] >= 0.02
    assert wait["cost"] == 0.0


def test_work_of_other_threads_is_written_down_beside_the_step_and_own_work_is_not():
    recorder = Recorder(rank=0, world_size=1)
    recorder.begin_step(0)
    spin(0.02)
    recorder.end_step()
    recorder.begin_step(1)
    helper = threading.Thread(target=spin, args=(0.02,))
    helper.start()
    helper.join()
    recorder.end_step()
    own, helped = recorder.tables()["steps"]["beside"]
    assert own < 0.01 <= helped < 0.05


# ---- clocks -------------------------------------------------------------------------------------
class Late:
    """A group whose messages arrive when time passes, not when a wait returns: as with NCCL."""

    def __init__(self, rank: int) -> None:
        self.ranks, self.sent, self.here = (0, 1), [], 0.0
        self.context = SimpleNamespace(rank=rank, nodes=(0, 1), device="cpu")

    def send(self, stamp, *, to, phase):
        self.sent.append(stamp.clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, stamp, *, source, phase):
        self.here = time.perf_counter() + 0.002
        return SimpleNamespace(wait=lambda: None)

    def all_gather(self, every, mine, *, phase):
        every.copy_(mine.repeat(2))
        return SimpleNamespace(wait=lambda: None)


def on_two_machines(context):
    return measure_offset(everyone(dataclasses.replace(context, nodes=(0, 0, 1, 1))))


def test_ranks_of_one_machine_have_one_offset():
    here, beside, *there = launch_program(on_two_machines, 4, device="cpu")
    assert here == beside == (0.0, 0.0) and there[0] == there[1] and there[0][1] > 0


def test_clocks_are_read_when_a_message_is_here_not_when_its_wait_returns(monkeypatch):
    group, value = Late(0), torch.Tensor.item

    def item(tensor):
        while time.perf_counter() < group.here:
            pass
        return value(tensor)

    monkeypatch.setattr(torch.Tensor, "item", item)
    measure_offset(group, rounds=3)
    assert group.sent[-1][0] >= 0.002  # the shortest trip
    group, arrived = Late(1), []
    send = group.send
    group.send = lambda *what, **more: (arrived.append(group.here), send(*what, **more))[1]
    measure_offset(group, rounds=3)
    assert all(stamp >= here for stamp, here in zip(group.sent, arrived, strict=True))
