"""The device of an observed program is its own, not the machine's: shown without a GPU.

In a rank of these tests tensors of float64 are on a GPU, and all others on the CPU: what they hold,
send and save is real, and ``model.double()`` is ``model.to("cuda")``. torch.cuda is that of the
virtual device (virtual_cuda.py). What NCCL does with two kinds of tensors only a GPU shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import time
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paralab as pl
import virtual_cuda
from paralab import observing
from paralab.instruments import foreign_calls, marks
from paralab.instruments.foreign_calls import Calls, is_uneven
from paralab.instruments.foreign_hooks import stand_before
from paralab.instruments.marks import clock_of
from paralab.launch import launch_program
from paralab.ranks import process, torchrun, watch
from patience import HANG_S
from stated import NODES

PSI = 4 * (2 * 256 * 512 + 512 + 256)  # bytes of the model where it was made; twice as many here
STEP_COUNTS = 4 * 4  # AdamW's, which it keeps on the host
SETTINGS = {"marked": False, "memory_steps": 2}


def with_a_gpu():
    virtual_cuda.install(0)
    # In a build for CUDA optimizers ask whether a graph is captured, torch 2.11's by the first.
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.is_initialized = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: None
    gpu = property(lambda tensor: tensor.dtype is torch.float64)
    host = property(lambda tensor: tensor.dtype is not torch.float64)
    index = property(lambda tensor: lambda: 0 if tensor.is_cuda else -1)
    for name, value in {"is_cuda": gpu, "is_cpu": host, "get_device": index}.items():
        setattr(torch.Tensor, name, value)


def one_layer():
    """A model of the GPU, its optimizer, and what it is given."""
    model = torch.nn.Linear(8, 8).double()
    return model, torch.optim.SGD(model.parameters(), 0.1), torch.ones(8, 8, dtype=torch.float64)


def a_second_late():
    """From here on the device is a second behind the host."""
    late = virtual_cuda.Event.elapsed_time
    virtual_cuda.Event.elapsed_time = lambda event, other: late(event, other) + 1e3


def in_a_rank(context, program, args, settings, before):
    with_a_gpu()
    before()
    context = dataclasses.replace(context, device="cuda:0", backend="nccl")  # as pl.launch chooses
    with observing._observed(context, settings) as observer:
        return observing._part(observer, context, program(*args))


def observed(program, *args, ranks=1, before=bool, **settings) -> pl.Report:
    """What `pl.observe` returns where every rank has a GPU. ``before()``: in a rank, unobserved."""
    given = (program, args, SETTINGS | settings, before)
    parts = launch_program(in_a_rank, ranks, given, device="cpu", timeout=HANG_S)
    return observing._report("program", parts)


def training(to, how="plain"):
    """AdamW on a model that is made on the host, as all are, and moved to ``to``."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    if how == "tried before":
        model(torch.randn(64, 256)).sum().backward()
        model.zero_grad()
    model.to(to)
    if how == "parallel":
        model = DistributedDataParallel(model)
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for _ in range(3):
        loss = model(torch.randn(64, 256).to(to)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def beside(report: pl.Report) -> Any:
    """Seconds of each span that computes which are not its cost."""
    spans = report.spans[report.spans["kind"].isin(["forward", "backward", "optimizer"])]
    return (spans["end"] - spans["start"] - spans["cost"]).abs()


# ---- whose device --------------------------------------------------------------------------------
def test_a_program_of_the_cpu_is_one_where_there_are_gpus_too():
    report = observed(training, torch.float32, ranks=2)
    assert report.meta["device"] == "cpu" and report.meta["backend"] == "gloo"
    held = report.peaks()["measured"]
    assert held["parameters"] == held["gradients"] == PSI
    assert held["optimizer"] == 2 * PSI + STEP_COUNTS
    assert set(report.memory["step"]) == {0, 1} and not len(report.allocator)
    assert beside(report).max() > 0  # a processor's time is not the wall's
    plain = pl.observe(training, 2, (torch.float32,), timeout=HANG_S)
    assert plain.meta["device"] == "cpu" and plain.meta["backend"] == "gloo"
    assert plain.peaks()["measured"].to_dict() == held.to_dict()


@pytest.mark.parametrize("how", ["plain", "parallel", "tried before"])
def test_a_model_that_is_moved_to_the_gpu_makes_it_a_program_of_the_gpu(how):
    report = observed(training, torch.float64, how, ranks=2)
    assert report.meta["device"] == "cuda:0"
    most = report.memory.groupby("category")["bytes"].max()
    assert most["parameters"] == most["gradients"] == 2 * PSI
    assert most["optimizer"] == 4 * PSI  # and not the steps' counts
    assert ("buffers" in most) == (how == "parallel")
    total = report.peaks()["measured"]["total"] - most.get("buffers", 0)
    assert total <= 10.1 * PSI  # nothing is left of what was on the host
    assert (report.memory["bytes"] >= 0).all() and set(report.memory["step"]) == {0, 1}
    assert report.allocator["step"].tolist() == [0, 1, 2] * 2
    assert beside(report).max() < 1e-9  # events say both
    assert len(report.losses) == 3 and report.bubble >= 0
    assert report.replay(NODES).step_time > 0
    assert "parameters 2.1 MB" in report.explain()["What does the peak of memory consist of?"]


def its_own_update():
    """No module, no ledger: an optimizer alone."""
    weights = torch.ones(8, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True), weights], 0.1)
    for _ in range(2):
        weights.grad = torch.ones_like(weights)
        optimizer.step()


def its_module(used):
    model = torch.nn.BatchNorm1d(8, affine=False)  # has nothing but buffers
    model(torch.ones(2, 8))
    model = torch.nn.Sequential(model, torch.nn.Linear(8, 8).double() if used else model)
    model[0].double()
    model(torch.ones(2, 8, dtype=torch.float64))


def its_messages(*_):
    flag = torch.ones(8)
    dist.all_reduce(flag)
    dist.all_reduce(torch.ones(8, dtype=torch.float64))
    flag.untyped_storage().resize_(4000)


def its_arithmetic():
    """One span, in which there is a lot on the host before there is a little on the GPU."""
    torch.ones(4_000_000)
    kept = [torch.ones(8, dtype=torch.float64) for _ in range(4)]
    del kept
    return torch.ones(2_000_000).sum().item()


@pytest.mark.parametrize(
    ("program", "args"),
    [(its_own_update, ()), (its_module, (False,)), (its_module, (True,)), (its_messages, ())],
)
def test_without_a_ledger_modules_optimizers_and_messages_say_it(program, args):
    report = observed(program, *args, memory_steps=0)
    assert report.meta["device"] == "cuda:0" and not len(report.memory)
    assert (report.steps["end"] > report.steps["start"]).all()
    assert (report.spans["end"] >= report.spans["start"]).all()


@pytest.mark.parametrize(
    ("program", "most"), [(its_own_update, 3), (its_messages, 1), (its_arithmetic, 4)]
)
def test_with_a_ledger_nothing_counts_that_is_on_the_host(program, most):
    report = observed(program)
    assert report.meta["device"] == "cuda:0"
    held = report.memory.groupby("time")["bytes"].sum()
    assert {size % 64 for size in held} == {0} and 64 <= held.max() <= most * 64
    if program is its_arithmetic:
        assert held.max() == 4 * 64 and len(held) >= 4  # as fine as the GPU's own bytes ask for
        [peak] = report.allocator["allocated"]
        assert peak < 9_000_000  # of what came later: the virtual device has all tensors


def sums(aside, at_once):
    """``aside``: on another stream. ``at_once``: as NCCL makes it that is waited for at once: on
    the caller's stream, without a Work. Streams on which the wait has been marked.
    """
    record, unboxed, on = virtual_cuda.Event.record, dist.Work.unbox, []

    def recorded(event, stream=None):
        on.append((stream or torch.cuda.current_stream()).chain.name)
        record(event, stream)

    def waited(work):
        unboxed(work).wait()

    virtual_cuda.Event.record = recorded
    model, optimizer, x = one_layer()
    if at_once:
        dist.Work.unbox = waited
    for _ in range(2):
        model(x).sum().backward()
        work = None if at_once else dist.all_reduce(x, async_op=True)
        with torch.cuda.stream(torch.cuda.Stream() if aside else torch.cuda.current_stream()):
            on.clear()
            dist.all_reduce(x) if at_once else work.wait()
            marked = sorted(set(on))
        optimizer.step()
    virtual_cuda.Event.record, dist.Work.unbox = record, unboxed
    return marked


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("aside", [False, True])
def test_a_wait_on_another_stream_is_none_of_the_stream_that_computes(aside, at_once):
    report = observed(sums, aside, at_once, ranks=2, memory_steps=2 * at_once)
    calls, waits = report.collectives, report.spans[report.spans["kind"] == "wait"]
    assert calls["op"].tolist() == ["all_reduce"] * 4 and (calls["end"] >= calls["start"]).all()
    waited = {span for after in waits["after"] for span in after}
    assert waited == set() if aside else set(calls["span"]) <= waited
    if at_once:
        begun = report.spans[report.spans["id"].isin(calls["span"])]
        assert begun["after"].map(len).min() == 1  # behind what was computed before it
        return
    assert (report.results == [["default 0"]] * 2) != aside  # marks are the waiting stream's
    assert len(waits) == 4 * (not aside) and (calls["end"] > calls["start"]).all()
    said = report.explain().get("What is not known?", "")
    assert ("on streams of their own" in said) == aside


def as_nccl_coalesces():
    """From here on torch makes batches of messages as over NCCL: one Work for all of them."""
    c10d, unbox, batch = torch._C._distributed_c10d, dist.Work.unbox, []

    def hidden(boxed):
        if not batch:
            return unbox(boxed)
        batch.append(unbox(boxed))  # a single one has no Work

    def ended(group, device):
        *others, last = batch[1:]
        batch.clear()
        for work in others:
            work.wait()
        return last

    c10d.Backend.supports_coalescing = property(lambda backend: True)
    dist.Work.unbox = hidden
    dist.ProcessGroup._start_coalescing = lambda group, device: batch.append("begun")
    dist.ProcessGroup._end_coalescing = ended


def of_two_stages():
    """Each rank computes 50 ms, the second one on what it receives from the first."""

    class Slow(torch.nn.Linear):
        def forward(self, x):
            time.sleep(0.05)
            return super().forward(x)

    def message(op):
        for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, 1 - rank)]):
            work.wait()

    rank, tensor = dist.get_rank(), torch.ones(64, dtype=torch.float64)
    model = Slow(8, 8).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dist.barrier()
    for _ in range(2):
        if rank == 1:
            message(dist.irecv)
        model(tensor[:8].view(1, 8)).sum().backward()
        if rank == 0:
            message(dist.isend)
        optimizer.step()


def test_a_batch_of_messages_lasts_until_it_is_waited_for_and_a_replay_waits_for_it():
    report = observed(of_two_stages, ranks=2, before=as_nccl_coalesces)
    calls = report.collectives
    assert sorted(calls["op"]) == ["recv"] * 2 + ["send"] * 2
    assert (calls["end"] - calls["start"]).max() > 0.02  # rank 1 is there 50 ms before the message
    waits = report.spans[report.spans["kind"] == "wait"]
    assert {span for after in waits["after"] for span in after} == set(calls["span"])
    assert report.replay(NODES).step_time > 0.09  # one stage behind the other
    assert "When a batch of messages ended" in report.explain()["What is not known?"]


def captures():
    """A graph is captured: CUDA refuses to be asked about an event of that stream."""
    record, query, capturing = virtual_cuda.Event.record, virtual_cuda.Event.query, []

    def recorded(event, stream=None):
        event.captured = bool(capturing)
        record(event, stream)

    def asked(event):
        if capturing or event.captured:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return query(event)

    virtual_cuda.Event.record, virtual_cuda.Event.query = recorded, asked
    torch.cuda.is_current_stream_capturing = lambda: bool(capturing)
    model, optimizer, x = one_layer()

    def step():
        model(x).sum().backward()
        dist.all_reduce(model.weight.grad, async_op=True).wait()
        optimizer.step()

    capturing.append("from the first on")
    step()
    capturing.clear()
    for _ in range(3):
        step()
        capturing.append("between two steps")
        step()
        pl.step()
        capturing.clear()


@pytest.mark.parametrize("memory_steps", [0, 2])
def test_while_a_graph_is_captured_nothing_is_written(memory_steps):
    report = observed(captures, ranks=2, memory_steps=memory_steps)
    assert report.meta["device"] == "cuda:0"
    assert len(report.steps) == len(report.collectives) == 2 * 3
    assert "CUDA graphs" in report.explain()["What is not known?"]


class NcclFuture:
    """As NCCL's: done when the call is launched; what waits for it is the current stream."""

    streams: ClassVar[list[str]] = []

    def __init__(self, real: Any) -> None:
        self.real = real

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        self.streams.append(torch.cuda.current_stream().chain.name)
        self.real.wait()  # the virtual stream has come to the end of the call


def as_nccl_ends():
    """From here on a call's future is one of NCCL's, and the device a second behind the host."""
    a_second_late()
    work = torch._C._distributed_c10d.Work
    future = work.get_future
    work.get_future = lambda work: NcclFuture(future(work))
    foreign_calls._backend = lambda group, device: "nccl"


def waits_long_after():
    tensor = torch.ones(8, dtype=torch.float64)
    dist.barrier()
    for _ in range(3):
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(0.1)
        work.wait()
    return NcclFuture.streams


def test_a_call_of_nccl_ends_when_it_ends_and_not_when_it_is_waited_for():
    report = observed(waits_long_after, ranks=2, before=as_nccl_ends, memory_steps=0)
    calls = report.collectives
    assert len(calls) == 6 and report.meta["device"] == "cuda:0"
    waits = report.spans[report.spans["kind"] == "wait"].explode("after").set_index("after")
    early = waits["start"].loc[calls["span"]].to_numpy() - calls["end"].to_numpy()
    assert min(early) > 0.09 and (calls["end"] > calls["start"]).all()  # on the device's clock
    for streams in report.results:  # one of its own, and not where the program computes
        assert len(streams) == 3 and len(set(streams)) == 1 and "default 0" not in streams


def both_kinds():
    """A program of the GPU whose ranks tell each other something on the host, too."""
    a_second_late()
    big = torch.ones(4096, dtype=torch.float64)
    for _ in range(3):
        dist.all_reduce(big)
        flag = torch.ones(300)
        dist.all_reduce(flag)
        if dist.get_rank() == 0:
            dist.send(flag, 1)
        else:
            dist.recv(flag, 0)
        dist.barrier()
    return [flag.sum().item()]


def test_messages_of_the_host_do_not_disturb_a_program_of_the_gpu():
    report = observed(both_kinds, ranks=2)
    assert report.meta["device"] == "cuda:0" and report.results == [[600.0]] * 2
    calls = report.collectives.query("rank == 0 and op == 'all_reduce'")
    assert calls["payload_bytes"].tolist() == [8 * 4096, 1200] * 3
    assert calls["call"].tolist() == [0, 1, 3, 4, 6, 7]
    spans = report.spans.set_index("id").loc[calls["span"]]
    took = (spans["end"] - spans["start"]).tolist()
    assert min(took) >= 0 and max(took[1::2]) < 0.5  # the host's own say when they begin and end
    assert set(report.memory["category"]) == {"buffers"}
    assert report.memory["bytes"].max() == 8 * 4096


def before_the_block(*kinds):
    with_a_gpu()
    models = [torch.nn.Linear(16, 16, bias=False, dtype=getattr(torch, kind)) for kind in kinds]
    with pl.observe() as seen:
        models[0](torch.ones(16))
    first = seen.memory[seen.memory["time"] == seen.memory["time"].min()]
    return seen.meta["device"], first.set_index("category")["bytes"]["parameters"]


def test_what_a_process_has_on_the_gpu_before_the_block_decides():
    for kinds, said in (
        (("float32", "float64"), ("cuda:0", 8 * 256)),
        (("float32",), ("cpu", 1024)),
    ):
        assert pl.launch(before_the_block, 1, kinds, device="cpu") == [said]


# ---- how far the host runs ahead -----------------------------------------------------------------
def runs_ahead():
    """Five steps that read no number, and how often the host waits for the device in them."""
    waits, wait = [], virtual_cuda.Event.synchronize
    virtual_cuda.Event.synchronize = lambda event: (waits.append(event), wait(event))
    virtual_cuda.Stream.query = lambda stream: False  # the device is still in the step before
    model, optimizer, x = one_layer()
    for _ in range(5):
        model(x).sum().backward()
        optimizer.step()
    return [len(waits)]


def test_the_host_of_an_observed_program_waits_for_its_device_once():
    report = observed(runs_ahead, memory_steps=0)
    assert report.results == [[1]]
    assert len(report.steps) == 5 and (report.steps["start"].diff()[1:] > 0).all()


def ahead_for(hours, drift, ties):
    """Steps of 0.3 s, launched 0.8 s before the device comes to them. Its clock is ``drift`` fast,
    and says milliseconds in 32 bits. How many marks there were, the largest error, waits per step.
    """
    with_a_gpu()
    now, waits, event, made = [1000.0], [], virtual_cuda.Event, []
    make = event.__init__

    def makes(self, **how):
        made.append(make(self, **how))

    def record(self, stream=None):
        self.when = now[0] + 0.8 * (now[0] > 1000.0)

    def elapsed_time(self, other):
        assert max(self.when, other.when) <= now[0], "cudaErrorNotReady"
        return float(np.float32((other.when - self.when) * 1e3 * (1 + drift)))

    def synchronize(self):
        waits.append(self)
        now[0] = max(now[0], self.when)

    event.record, event.elapsed_time, event.synchronize = record, elapsed_time, synchronize
    event.__init__ = makes
    event.query = lambda self: self.when <= now[0]
    virtual_cuda.Stream.query = lambda stream: False
    marks.time = type("Time", (), {"perf_counter": lambda: now[0]})
    marks.RESYNC = ties
    clock, kept, steps = marks.clock_of("cuda:0"), [], int(hours * 3600 / 0.3)
    for _ in range(steps):
        clock.anchor(waits=False)
        for _ in range(2):
            mark, aside = clock.mark(), clock.mark()
            aside.event.when = now[0]  # on another stream, which is not behind: ahead of its anchor
            kept += [(mark, mark.event.when), (aside, now[0])]
            now[0] += 0.15
        clock.resolve()
    assert len(clock._open) <= 16 and len(clock._free) <= 16
    assert len(made) <= steps + 17  # an anchor of each, and a few that its marks use in turn
    errors = [abs(clock.seconds(mark) - when) for mark, when in kept]
    return len(kept), max(errors), len(waits) / steps


def test_times_of_a_gpu_are_right_for_hours_though_no_step_waits_for_it():
    [(_, error, waits)] = pl.launch(ahead_for, 1, (2.0, 0.0, 1e9), device="cpu")
    assert error < 20e-6 and waits < 0.001
    [(_, error, waits)] = pl.launch(ahead_for, 1, (2.0, 1e-5, 10.0), device="cpu")
    assert error < 150e-6 and waits < 0.05


# ---- what it asks itself -------------------------------------------------------------------------
def asks_for_its_peak(resets):
    """The largest batch is the first one."""

    def peak(**device):
        return torch.cuda.memory_stats(**device)["allocated_bytes.all.peak"]

    said, (model, optimizer, _) = [], one_layer()
    for batch in (100_000, 8, 8):
        model(torch.ones(batch, 8, dtype=torch.float64)).sum().backward()
        if batch == resets:
            said.append(peak())
            torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        optimizer.zero_grad()
    return [*said, peak(), peak(device="cuda:0"), peak(device=1)]


@pytest.mark.parametrize("resets", [None, 100_000])
def test_a_program_is_told_the_peaks_that_it_has_without_an_observation(resets):
    [alone] = pl.launch(lambda: (with_a_gpu(), asks_for_its_peak(resets))[1], 1, device="cpu")
    report = observed(asks_for_its_peak, resets, memory_steps=0)
    *same, another = report.results[0]
    assert same == pytest.approx(alone[:-1], abs=10_000)  # a few small tensors are the report's
    assert same[0] > 12_000_000 > 100_000 > another  # another GPU's counter is as it is
    peaks = report.allocator["allocated"].tolist()
    assert len(peaks) == 3 and peaks[0] > 12_000_000 > 100_000 > max(peaks[1:])  # of each step


# ---- its own answer to a full device -------------------------------------------------------------
FULL = "CUDA out of memory. Tried to allocate 8 GiB. GPU 0 has 1 GiB free. Process 7 has 79 GiB."


def finds_its_batch(smallest):
    """Halves the batch until it fits, as a program may."""
    own = torch.library.Library("too_small_a_gpu", "DEF")
    own.define("work(Tensor x) -> ()")

    def work(x):
        if len(x) > 8:
            raise torch.OutOfMemoryError(f"{FULL} Of the allocated memory 7 MiB is of PyTorch.")

    own.impl("work", work, "CPU")
    for batch in (32, 16, 8):
        try:
            torch.ops.too_small_a_gpu.work(torch.ones(batch))
            return batch
        except torch.cuda.OutOfMemoryError:
            if batch <= smallest:
                raise


def test_a_program_that_handles_a_full_gpu_does_so_when_it_is_observed():
    assert pl.observe(finds_its_batch, 1, (1,), device="cpu").results == [8]
    with pytest.raises(pl.OutOfMemory, match="CUDA out of memory") as raised:
        pl.observe(finds_its_batch, 1, (16,), device="cpu")
    assert str(raised.value).splitlines()[0].endswith(FULL)
    assert "what rank 0 held" in raised.value.table


# ---- what carries its messages -------------------------------------------------------------------
def of_one_backend():
    calls, group = Calls(0, (0,)), dist.new_group([0], backend="cpu:gloo")
    over_gloo = [calls.where(group, torch.device(kind)).gloo for kind in ("cuda", "cpu")]
    return over_gloo, calls.backend("cuda:0"), calls.backends


def test_a_group_that_has_nothing_for_a_device_is_no_error():
    found = ([False, True], "", {"cuda": "", "cpu": "gloo"})
    assert pl.launch(of_one_backend, 1, device="cpu") == [found]


def test_a_gather_of_unequal_parts_is_known():
    """Over NCCL its work has no future."""

    def gathers():
        found, own = [], torch.ones(3 + dist.get_rank())
        with ExitStack() as undo:
            stand_before(undo, "c10d", "allgather_", lambda given, own: found.append(given))
            for parts in ([torch.ones(3), torch.ones(4)], [own, own]):
                with contextlib.suppress(Exception):  # nothing is gathered
                    dist.all_gather(parts, own)
        return [is_uneven(given) for given in found]

    assert pl.launch(gathers, 2, device="cpu") == [[True, False]] * 2


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("call", [pl.observe, pl.launch, pl.trace], ids=lambda call: call.__name__)
def test_the_group_of_ranks_with_gpus_serves_the_host_too(call, own, monkeypatch, tmp_path):
    """But for `pl.trace`, whose tensors are all of one device."""
    start, joined, launcher = (Mock(side_effect=ZeroDivisionError) for _ in range(3))
    monkeypatch.setattr(watch.Run, "start", start)
    with pytest.raises(ZeroDivisionError):
        call(its_messages, 2)
    _, task, payload = start.call_args.args
    (tmp_path / "payload").write_bytes(payload)
    chosen = process.Chosen("cuda:0", "nccl") if own else process.Chosen("cpu", "gloo")
    monkeypatch.setattr(process, "choose_device", lambda *given: chosen)
    monkeypatch.setattr(process.dist, "init_process_group", joined)
    with pytest.raises(ZeroDivisionError):
        process._work(0, pickle.loads(task), str(tmp_path), launcher, Mock())
    assert launcher.send.mock_calls == [mock.call("up", own)]  # for the words of a hang
    both = "nccl" if call is pl.trace else "cpu:gloo,cuda:nccl"
    assert joined.call_args.args == (both if own else "gloo",)


def test_a_script_finds_gpus_that_nobody_has_touched(monkeypatch, tmp_path):
    """So it may still choose which it sees, and how their memory is allocated."""
    asked, script = Mock(side_effect=ZeroDivisionError), tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(watch.Run, "start", asked)
    for program, device in ((script, "cpu"), (its_messages, None)):
        with pytest.raises(ZeroDivisionError):
            pl.observe(program, 2)
        assert pickle.loads(asked.call_args.args[1])["device"] == device
    monkeypatch.setattr(torchrun, "torchrun_context", asked)
    for here in ("2", "1"):  # on one machine, and on two
        monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": here})
        with pytest.raises(ZeroDivisionError):
            observing.observe_under_torchrun(script, folder=str(tmp_path / "parts"))
        assert asked.call_args.kwargs["device"] == "cpu"


def test_a_gpus_clock_reads_what_the_cpus_has_marked():
    def on_a_rank():
        earlier = clock_of("cpu")
        marks = [earlier.mark(), earlier.host()]
        with_a_gpu()
        clock = clock_of("cuda:0")
        marks += [clock.mark(), clock.host()]
        return [clock.seconds(mark) for mark in marks], clock.cost(marks[0], marks[2])

    [(seconds, cost)] = pl.launch(on_a_rank, 1, device="cpu")
    assert seconds == pytest.approx(sorted(seconds), abs=1e-3)  # an event is tied to the wall
    assert cost == seconds[2] - seconds[0] > 0
