"""Which jobs a job of another lane comes after, as anyone can read off the values."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import paralab as pl
import virtual_cuda
from paralab.instruments.recorder import Recorder
from paralab.interpret.costs import Costs
from paralab.interpret.host import Host
from paralab.interpret.jobs import Order, Ordered
from paralab.interpret.time import walked
from paralab.interpret.workers import Workers
from paralab.launch import launch_program
from paralab.programs.compile import compiled
from paralab.programs.instructions import COPY, Instr
from paralab.programs.tiers import BUFFERS, ring
from paralab.spec.tiers import Offload
from patience import HANG_S

MODEL = pl.ModelSpec(layers=4, hidden=64, heads=4, seq_len=32)
DEVICE, HOST, OTHER = ("shard", 0, 0), ("host.shard", 0, 0), ("host.shard", 1, 0)


def hand_over(order: Order, reads: tuple, writes: tuple, lane: str) -> Ordered:
    ins = Instr(COPY, 0, -1, -1, (reads,), (writes,), lane)
    job = Ordered(order.predecessors(ins))
    order.add(ins, job)
    return job


@pytest.fixture
def order() -> Order:
    return Order(pl.Plan(dp=2, zero_stage=3, offload="nvme"))


def test_what_reads_comes_after_what_wrote_and_what_writes_over_it_after_all_that_read_it(order):
    written = hand_over(order, DEVICE, HOST, "d2h")
    reads = [hand_over(order, HOST, ("file.shard", k, 0), "disk") for k in range(2)]
    assert [one.predecessors for one in reads] == [(written,)] * 2
    again = hand_over(order, DEVICE, HOST, "d2h")
    assert set(again.predecessors) == {written, *reads}
    last = hand_over(order, HOST, OTHER, "host")
    assert last.predecessors == (again,)
    assert set(hand_over(order, DEVICE, HOST, "d2h").predecessors) == {again, last}


def test_a_buffer_of_a_ring_is_filled_again_when_all_are_through_with_it(order):
    values = [("host.opt", unit, 1) for unit in range(BUFFERS + 1)]
    assert all(ring(order.plan, value) for value in values)
    users = {}
    for value in values[:-1]:
        filled = hand_over(order, ("file.opt", *value[1:]), value, "disk")
        assert filled.predecessors == ()
        users[value] = {filled, hand_over(order, value, OTHER, "host")}
        order.end((value,))
    again = hand_over(order, ("file.opt", *values[-1][1:]), values[-1], "disk")
    assert set(again.predecessors) == users[values[0]]


def test_nothing_comes_after_what_the_rank_has_waited_for(order):
    first = hand_over(order, DEVICE, HOST, "d2h")
    second = hand_over(order, HOST, OTHER, "host")
    second.settled()
    assert first.over and second.over
    assert hand_over(order, OTHER, HOST, "host").predecessors == ()


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_waits_or_comes_after_a_job_that_an_earlier_wait_was_enough_for(stage):
    """A prediction's boxes and edges are those that a run's recorder writes down."""
    program = compiled(MODEL, pl.Plan(dp=2, zero_stage=stage, offload="cpu"), optimizer="adamw")
    times = walked(program, Costs(program, pl.Cluster.preset("dgx-a100")))
    jobs, over = times.ranks[0].predecessors, set()
    for position in sorted({*jobs, *times.ranks[0].waits}):
        assert not over.intersection(jobs.get(position, ()))
        call, _ = times.ranks[0].waits.get(position, (None, None))
        rest = [call] if call in jobs else []
        assert not over.intersection(rest)
        while rest:
            over.add(job := rest.pop())
            rest += jobs[job]
    assert over.issuperset(jobs)


def test_a_job_is_told_numbers_that_the_rank_no_longer_changes():
    def told(context):
        virtual_cuda.install(context.rank)
        context = dataclasses.replace(
            context, device=(device := virtual_cuda.name_of(context.rank))
        )
        recorder = Recorder(rank=0, world_size=1, device=device)
        recorder.begin_step(0)
        workers = object.__new__(Workers)
        workers.host = Host(Offload(), context=context, recorder=recorder, folder=None)
        found, nothing = workers.copied(((scale := torch.tensor(3.0)), None))
        scale.zero_()
        workers.arrived.synchronize()
        return found.item(), nothing

    assert launch_program(told, 1, (), device="cpu", timeout=HANG_S) == [(3.0, None)]
