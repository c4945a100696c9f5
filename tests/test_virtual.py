"""What no CPU shows: which stream waits for what, on a virtual device (virtual_cuda.py).

The ranks run the real comm, interpreter, lanes and recorder, as they would with a GPU each and
NCCL; durations are stated here.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import paralab as pl
import virtual_cuda
from paralab import transports
from paralab.comm import Group, everyone
from paralab.instruments.allocator import PEAKS
from paralab.instruments.recorder import Recorder
from paralab.interpret import host, lanes, quick
from paralab.interpret.costs import Compute, Costs
from paralab.interpret.time import time
from paralab.interpret.train import train
from paralab.launch import launch_program
from paralab.programs.compile import compiled
from paralab.ranks import lookout
from paralab.spec.tiers import Offload
from paralab.theory.pipeline import bubble_formula
from paralab.trace import _program as traced
from patience import HANG_S
from virtual_cuda import Node, solve
from virtual_runs import COMPUTE, Found, Job, Lasts, on_virtual, share, virtual, virtuals

MODEL = pl.ModelSpec(layers=8, hidden=16, heads=2, seq_len=8)
SMALL = MODEL.replace(layers=2)
UNTIED = MODEL.replace(tied=False)  # its pipelines send messages alone


# ---- time ----------------------------------------------------------------------------------------
def moments_of(act: Callable[[Any, Any], int], *calls: float) -> list[float]:
    """On two ranks the moment of the node that ``act(machine, group)`` returns, where calls of NCCL
    take these seconds, one after the other.
    """

    def on_a_rank(context):
        seconds = iter(calls)
        machine, context = on_virtual(context, lambda op, size: next(seconds))
        at = act(machine, everyone(context))
        return list(map(tuple, machine.nodes)), at

    parts = launch_program(on_a_rank, 2, (), device="cpu", timeout=HANG_S)
    moments = solve([[Node(*node) for node in nodes] for nodes, _ in parts])
    return [moments.end[rank][at] for rank, (_, at) in enumerate(parts)]


def test_virtual_waiting_for_one_call_does_not_wait_for_the_next():
    def two_gathers(machine, group):
        first, _ = (group.all_gather(torch.zeros(8), torch.zeros(4)) for _ in range(2))
        first.wait()
        return machine.node(machine.stream().chain)

    assert moments_of(two_gathers, 1.0, 5.0) == [1.0, 1.0]


def test_virtual_barrier_holds_the_hosts_until_every_device_is_there():
    def comes_late(machine, group):
        machine.works(5.0 * (group.index == 1), "what it does before")
        group.barrier()
        return machine.node(machine.thread())

    assert moments_of(comes_late, 1.0) == [6.0, 6.0]


def test_virtual_subgroups_are_connected_before_some_of_their_members_send():
    """NCCL connects a communicator at its first call, which all its members have to make."""

    def first_calls(context):
        machine, context = on_virtual(dataclasses.replace(context, patience=77.0))
        part = traced(sends, (0,) * 4, False, context)
        return [(node.label, node.meets) for node in machine.nodes if node.meets], part

    def sends(group):
        context = group.recorder.lookout.context
        assert (context.rank, context.patience) == (group.index, 77.0)
        three = group.subgroup((0, 1, 2), axis="three")
        alone = group.subgroup((3,), axis="alone")
        if group.index == 0:
            three.send(torch.ones(4), to=1).wait()
        if group.index == 1:
            three.recv(torch.ones(4), source=0).wait()
        return alone is not None

    found = launch_program(first_calls, 4, (), device="cpu", timeout=HANG_S)
    communicator = found[0][0][-1][1][0][0]
    of_three = [[call for call in calls if call[1][0][0] == communicator] for calls, _ in found]
    assert [[op for op, _ in calls] for calls in of_three] == [
        ["all_reduce", "message"], ["all_reduce", "message"], ["all_reduce"], []
    ]  # fmt: skip
    parts = [part for _, part in found]
    assert [part["result"] for part in parts] == [False] * 3 + [True]
    meta = parts[0]["meta"] | {"function": "sends", "strict": False}
    report = pl.Report.from_parts(parts, model=None, plan=pl.Plan(dp=4), meta=meta)
    assert report.traffic()["bytes"].tolist() == [16, 0, 0, 0]  # the message alone
    assert report.replay(pl.Cluster.preset("dgx-a100")).step_time > 0.0
    assert set(report.collectives["phase"]) == {"data", "setup"}


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
PROMPT, SLOW, SLOWER = (Lasts(forward=1.0, half=1.0, message=seconds) for seconds in (0, 0.05, 0.3))
SIZES = (8, 16) if os.environ.get("PARALAB_VIRTUAL_PLANS") else (8,)  # by `make virtual` both
PIPELINES = [(schedule, m, lasts) for schedule in SCHEDULES for m in SIZES
             for lasts in (PROMPT, SLOW)]  # fmt: skip
PIPELINES += [("interleaved", 16, SLOW)] * (16 not in SIZES)
PIPELINES += [("interleaved", 8, SLOWER)]  # takes 1.2 times as long where all messages queue up


def pipeline(schedule: str, m: int) -> pl.Plan:
    v = 2 if schedule == "interleaved" else 1
    return pl.Plan(pp=4, microbatches=m, schedule=schedule, virtual_stages=v)


@pytest.fixture(scope="module")
def pipelines() -> dict[tuple, Found]:
    """All PIPELINES, in one launch."""
    jobs = [Job(UNTIED, pipeline(schedule, m), lasts) for schedule, m, lasts in PIPELINES]
    return dict(zip(PIPELINES, virtuals(jobs), strict=True))


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_virtual_bubbles_are_those_of_the_formulas(pipelines, schedule, m):
    found, v = pipelines[schedule, m, PROMPT], pipeline(schedule, m).virtual_stages
    assert found.wrong == []
    expected = bubble_formula(schedule, 4, m, v, F=1, B=1, W=1)
    assert found.bubble == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("schedule", "m", "lasts"), [one for one in PIPELINES if one[2].message])
def test_virtual_pipelines_take_as_long_as_predicted(pipelines, schedule, m, lasts, monkeypatch):
    plain = Costs.of
    monkeypatch.setattr(
        Costs, "of",
        lambda costs, pp, ins: Compute(lasts.compute(ins.op, share(costs.program, ins)))
        if ins.op in COMPUTE else plain(costs, pp, ins),
    )  # fmt: skip
    link = pl.Link(alpha=lasts.message, bandwidth=1e30)
    cluster = pl.Cluster(devices_per_node=4, flops=1e30, memory_bandwidth=1e30, intra=link)
    expected = time(compiled(UNTIED, pipeline(schedule, m), optimizer="sgd"), cluster).seconds
    found = pipelines[schedule, m, lasts]
    assert found.bubble == pytest.approx(1 - 3.0 * m / expected, abs=1e-6)
    if (schedule, m, lasts) == ("interleaved", 16, SLOW):
        assert found.bubble <= 0.105


def hidden(change: Callable | None = None) -> float:
    """A step of ZeRO-3 that fetches ahead, as a part of one that does not."""
    model = MODEL.replace(layers=12)  # 14 units
    lasts = Lasts(forward=1.0, half=1.0, collective=0.8, per_part=True)
    plans = [pl.Plan(dp=2, zero_stage=3, prefetch=prefetch) for prefetch in (1, 0)]
    one, other = virtuals([Job(model, plan, lasts, change=change) for plan in plans])
    return one.step / other.step


def test_virtual_prefetch_hides_gathers():
    assert hidden() <= 0.62


def has_a_queue_each(machine):
    machine.queues = 1000


def has_eight_queues(machine):
    machine.queues = virtual_cuda.QUEUES


def test_virtual_streams_hold_up_no_other_in_the_queues_of_the_device():
    lasts = Lasts(forward=1.0, half=1.0, message=0.05, collective=0.1)
    plan = pl.Plan(dp=2, pp=2, microbatches=4, zero_stage=3)
    changes = [None, has_a_queue_each, has_eight_queues]
    plain, each, eight = virtuals([Job(MODEL, plan, lasts, change=change) for change in changes])
    assert plain.step == pytest.approx(each.step) and each.step < 0.995 * eight.step


class Reduces(Lasts):
    """Of NCCL's calls only the sums take time."""

    def call(self, op: str, size: int) -> float:
        return self.collective if op in ("all_reduce", "reduce_scatter") and size > 8 else 0.0


def test_virtual_the_stage_before_does_not_wait_for_zeros_sums():
    lasts = Reduces(forward=1.0, half=1.0, collective=0.5)
    plan = pl.Plan(dp=2, pp=2, microbatches=4, bucket_bytes=2**13)
    found = virtuals([Job(UNTIED, plan.replace(zero_stage=stage), lasts) for stage in range(3)])
    assert [one.step for one in found] == pytest.approx([found[0].step] * 3)


# ---- memory --------------------------------------------------------------------------------------
def test_virtual_allocators_figures_are_those_of_the_step_alone():
    def two_steps(context):
        virtual_cuda.install(context.rank)
        recorder = Recorder(rank=0, world_size=1, device=virtual_cuda.name_of(0))
        held = torch.zeros(10 * 2**18)  # 10 MiB
        torch.zeros(8 * 2**18)  # gone before the first step
        for step, mib in enumerate((6, 1)):
            recorder.begin_step(step)
            torch.zeros(mib * 2**18)
            recorder.end_step()
        return recorder.tables()["allocator"], held.nbytes

    [(table, _)] = launch_program(two_steps, 1, (), device="cpu", timeout=HANG_S)
    found = {name: [size / 2**20 for size in table[name]] for name in (*PEAKS, "largest_free")}
    assert found == {"allocated": [16, 11], "active": [16, 11], "reserved": [18, 18],
                     "largest_free": [8, 8]}  # fmt: skip


def test_virtual_allocators_have_a_row_for_every_step_and_the_programs_peak():
    plan, model = pl.Plan(microbatches=2), MODEL.replace(hidden=128, seq_len=64)
    peak = sum(quick.peak(model, plan, optimizer="sgd", rank=0).values())
    [table] = virtual(model, plan, steps=2).allocators
    assert (table["rank"], table["step"]) == ([0, 0], [0, 1])
    assert table["allocated"] == pytest.approx([peak] * 2, rel=0.02)


def pins_what_the_report_says(machine):
    close, empty, rounded = host.Host.close, torch.empty, []

    def noted(*shape, pin_memory=False, **how):
        made = empty(*shape, pin_memory=pin_memory, **how)
        if pin_memory:  # as torch's allocator rounds it
            rounded.append(1 << (made.nbytes - 1).bit_length())
        return made

    def closes(this):
        held = sum(size for (tier, _), size in this.recorder.offloaded.items() if tier == "host")
        pages = sum(-(-size // 4096) * 4096 for size in machine.locked.values())
        assert 1e7 < held <= pages + sum(rounded) <= 1.05 * held
        close(this)
        assert machine.locked == {}

    machine.put(torch, empty=noted)
    machine.put(host.Host, close=closes)


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_virtual_offload_pins_as_much_host_memory_as_the_report_says(offload):
    plan = pl.Plan(zero_stage=3, offload=offload, microbatches=2, recompute="full")
    settings, model = {"optimizer": "adamw", "clip_norm": 1.0}, MODEL.replace(layers=4, hidden=192)
    jobs = [
        Job(model, plan.replace(precision=precision), steps=2, settings=settings,
            change=pins_what_the_report_says)
        for precision in ("fp32", "bf16")
    ]  # fmt: skip
    assert [found.wrong for found in virtuals(jobs)] == [[], []]


def test_virtual_products_are_of_the_plans_precision():
    settings = [False, True, False]
    found = virtuals([Job(SMALL, pl.Plan(dp=2, tf32=tf32)) for tf32 in settings])
    assert [one.tf32 for one in found] == [[tf32, tf32] for tf32 in settings]


def test_virtual_device_refuses_what_it_does_not_model():
    def asks(context):
        virtual_cuda.install(context.rank)
        torch.cuda.empty_cache()

    with pytest.raises(pl.RankError, match="does not model torch.cuda.empty_cache"):
        launch_program(asks, 1, (), device="cpu", timeout=HANG_S)


@pytest.mark.parametrize(("backend", "said"), [("gloo", "as the kernel"), ("nccl", "a model")])
def test_virtual_reports_say_what_their_wire_bytes_are(backend, said):
    def trains(context):
        if backend == "nccl":
            _, context = on_virtual(context)
        plain = {"optimizer": "sgd", "steps": 1, "keep_state": False}
        return train(context, MODEL, pl.Plan(), **plain)["meta"]["wire_bytes"]

    [found] = launch_program(trains, 1, (), device="cpu", timeout=HANG_S)
    assert found.startswith(said)


# ---- mutants: each of them fails one of these tests ----------------------------------------------
def waits_for_the_whole_stream(machine):
    def posted(self, call):
        found = plain(self, call)
        _, streams[found.works[0]] = self.ways.get((*call.ways, None)[0], (None, self.stream))
        return found

    streams, plain = {}, transports.Nccl.post
    transports.Nccl.post = posted
    transports.Enqueued.wait = lambda call: machine.stream().wait_stream(streams[call])


def waits_for_nothing(machine):
    transports.Enqueued.wait = lambda call: None


def lets_go_at_posting(machine):
    make = transports.Enqueued
    transports.Enqueued = lambda event, tensors: make(event, tensors.clear() or tensors)


def refills_early(machine):
    submit = lanes.Lane.submit
    lanes.Lane.submit = lambda lane, work, *, after=(), **said: submit(lane, work, **said)


def follows_the_ranks_stream(machine):
    del lanes.Job.over_for  # as if the rank's wait for a copy held the host too


def leaves_lanes_on_the_first_gpu(machine):
    torch.cuda.set_device = lambda device: None


def stands_still(machine):
    transports.Enqueued.wait = lambda call: call.event.synchronize()


def reads_norms_at_once(machine):
    def to(tensor, *at, **how):
        return plain(tensor, *at, **(how if tensor.dim() else {}))

    plain = torch.Tensor.to
    machine.put(torch.Tensor, to=to)


def connects_in_the_step(machine):
    def opens(group, rings):
        group.exchange = Mock()
        plain(group, rings)
        del group.exchange

    plain = Group.open_ways
    machine.put(Group, open_ways=opens)


def test_virtual_mutant_that_waits_for_the_whole_stream():
    assert hidden(waits_for_the_whole_stream) > 0.62


PARALLEL = {"dp": 2, "tp": 2, "sequence_parallel": True, "microbatch_size": 2}
LATE = {"tp": 2, "schedule": "l2l", "zero_stage": 3, "offload": "cpu", "prefetch": 0}
AWAY = {"dp": 2, "zero_stage": 3, "offload": "nvme"}


@pytest.mark.parametrize(("change", "settings", "says"), [
    (waits_for_nothing, PARALLEL, "may run beside"),
    (lets_go_at_posting, PARALLEL, "is freed while"),
    (refills_early, AWAY, "may run beside"),
    (follows_the_ranks_stream, AWAY | {"offload": "cpu"}, "may run beside"),
    (follows_the_ranks_stream, LATE, "may run beside"),
    (stands_still, PARALLEL, "host and device meet"),
    (reads_norms_at_once, AWAY, "host and device meet"),
    (connects_in_the_step, {"pp": 2, "microbatches": 2}, "NCCL connects a communicator"),
])  # fmt: skip
def test_virtual_mutants_of_order_are_found(change, settings, says):
    clips = {"clip_norm": 1.0} if change is reads_norms_at_once else {}
    found = virtual(SMALL, pl.Plan(**settings), change=change, **clips)
    assert any(says in line for line in found.wrong)


def test_virtual_mutant_whose_lanes_are_on_another_device():
    found = virtual(SMALL, pl.Plan(**AWAY), change=leaves_lanes_on_the_first_gpu)
    assert found.contexts == [{0}, {0, 1}]


def test_virtual_thread_that_watches_a_device_makes_no_context_on_another():
    def watches(context):
        machine, context = on_virtual(context)
        look, looked = lookout.Lookout.look, threading.Semaphore(0)
        machine.put(lookout.Lookout, look=lambda this: (look(this), looked.release()))
        machine.put(lookout, SECONDS=0.01)
        group = everyone(context)
        group.barrier()  # leaves events, which every look asks
        for _ in range(3):
            looked.acquire()
        return machine.contexts

    assert launch_program(watches, 2, (), device="cpu", timeout=HANG_S) == [{0}, {1}]


def test_virtual_limited_link_takes_the_time_that_its_bytes_would():
    def copies(context):
        machine, context = on_virtual(context)
        slept, recorder = [], Recorder(rank=0, world_size=1, device=context.device)
        machine.put(lanes, time=SimpleNamespace(sleep=slept.append, perf_counter=lambda: 0.0))
        lane = lanes.Lane("h2d", recorder, device=context.device, bandwidth=1e3)
        lane.submit(lambda: None, size=5000).settle()
        return slept

    assert launch_program(copies, 1, (), device="cpu", timeout=HANG_S) == [[5.0]]


def test_virtual_call_keeps_its_tensors_though_the_caller_forgets_it():
    def forgets(context):
        machine, context = on_virtual(context)
        machine.put(lookout, SECONDS=1e3)
        group, waited_for = everyone(context), torch.zeros(8)
        group.all_reduce(torch.zeros(8))
        group.all_reduce(waited_for).wait()
        gone = weakref.ref(waited_for)
        del waited_for
        return gone() is None, machine.wrong

    assert launch_program(forgets, 2, (), device="cpu", timeout=HANG_S) == [(True, [])] * 2


def test_virtual_call_says_which_tensors_nccl_can_send():
    def of_another_device(context):
        group = everyone(on_virtual(context)[1])
        group.all_reduce(torch.zeros(8, device="meta"))

    with pytest.raises(pl.RankError, match=r"tensor\.device=.*device=group\.context\.device"):
        launch_program(of_another_device, 2, (), device="cpu", timeout=HANG_S)


def test_virtual_host_that_locks_no_more_memory_is_said_to():
    def offloads(context):
        machine, context = on_virtual(context)
        machine.put(machine, register=lambda *memory: 2)
        recorder = Recorder(rank=0, world_size=1, device=context.device)
        away = host.Host(Offload(), context=context, recorder=recorder, folder=None)
        away.empty((8,), torch.float32, "optimizer")

    with pytest.raises(pl.RankError, match="cannot lock 32 bytes of host memory"):
        launch_program(offloads, 1, (), device="cpu", timeout=HANG_S)


def test_virtual_device_is_watched_as_long_as_there_is_a_record_of_it():
    def ends(context):
        machine, context = on_virtual(context)
        machine.put(lookout, SECONDS=0.01)
        everyone(context).barrier()
        for thread in threading.enumerate():
            if thread.name == "lookout":
                thread.join()

    launch_program(ends, 2, (), device="cpu", timeout=HANG_S)


def test_the_hosts_update_has_the_cores_that_no_other_rank_of_its_node_has():
    """Of ranks with a GPU each; where ranks compute on the CPU, or share a GPU, it has one."""

    def noted(found, name):
        found[name] = torch.get_num_threads()

    def threads(context):
        virtual_cuda.install(0)
        host.available_cores, every = lambda: 13, []
        for shared, device in ((False, gpu), (True, gpu), (False, "cpu")):
            own = dataclasses.replace(context, device=device, nodes=(0, 0, 0, 1), shared=shared)
            recorder = Recorder(rank=0, world_size=1, device=device)
            recorder.begin_step(0)
            made, found = host.Host(Offload(), context=own, recorder=recorder, folder=None), {}
            for name, lane in made.lanes.items():
                counts = functools.partial(noted, found, name)
                lane.submit(counts).settle()
            every.append({**found, "rank": torch.get_num_threads()})
        return every

    gpu, one = virtual_cuda.name_of(0), dict.fromkeys(("d2h", "host", "disk", "h2d", "rank"), 1)
    assert launch_program(threads, 1, ()) == [[one | {"host": cores} for cores in (4, 1, 1)]]
