"""The memory ledger: the allocator's peak, every byte with a name, a limit that stops a run."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

import paralab as pl
from paralab.checks import num_bytes
from paralab.comm import Group
from paralab.launch import launch_program
from paralab.model import GPT
from paralab.observe.advice import advice
from paralab.observe.ledger import CATEGORIES, Ledger
from paralab.observe.recorder import Recorder
from paralab.theory import memory
from paralab.train import Trainer, make_optimizer

MODEL = pl.ModelSpec(layers=3, hidden=64, heads=4, seq_len=64, vocab=256)
MASKS = MODEL.layers * MODEL.seq_len**2  # one byte per element, not a parameter
SIZES = [(2, 64, 4, 64, 4), (3, 128, 4, 128, 2), (1, 256, 8, 64, 8), (4, 192, 6, 96, 3)]
PLAN = pl.Plan(microbatch_size=4, microbatches=2)


# ---- one device, in this process -----------------------------------------------------------------
class OneDevice:
    """A model, its optimizer and a batch, and the step they make, spans and all."""

    def __init__(self, spec: pl.ModelSpec, batch: int, recorder: Recorder) -> None:
        self.recorder, self.gpt = recorder, GPT(spec)
        recorder.owns("parameters", *self.gpt.parameters(), *self.gpt.buffers())
        self.optimizer = make_optimizer(list(self.gpt.parameters()), "adamw", 1e-3)
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        recorder.owns("optimizer", *states)
        self.tokens = torch.zeros(batch, spec.seq_len, dtype=torch.int64)
        self.targets = torch.zeros_like(self.tokens)
        held = [*self.gpt.parameters(), *self.gpt.buffers(), *states, self.tokens, self.targets]
        self.nbytes = sum(tensor.untyped_storage().nbytes() for tensor in held)

    def step(self) -> None:
        with self.recorder.span("forward"):
            loss = self.gpt(self.tokens, self.targets)
        with self.recorder.span("backward"):
            loss.backward()
        del loss
        with self.recorder.span("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def watched_step(
    spec: pl.ModelSpec, batch: int, *, boundaries: bool = False
) -> list[dict[str, int]]:
    """What the ledger sampled in one step, or of that what is at the spans' boundaries."""
    recorder = Recorder(rank=0, world_size=1)
    with Ledger(recorder):
        device = OneDevice(spec, batch, recorder)
        recorder.begin_step(0)
        device.step()
        recorder.end_step()
    return [sample.held for sample in recorder.samples if sample.mark or not boundaries]


def worst(samples: list[dict[str, int]]) -> dict[str, int]:
    return max(samples, key=lambda held: sum(held.values()))


def profiled_peak(step) -> int:
    """Most bytes that were alive at once, beyond those before, says torch.profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = prof.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
@pytest.mark.parametrize(("layers", "hidden", "heads", "seq_len", "batch"), SIZES)
def test_the_peak_is_the_allocators(layers, hidden, heads, seq_len, batch, attention, dropout):
    spec = pl.ModelSpec(layers=layers, hidden=hidden, heads=heads, seq_len=seq_len, vocab=256,
                        attention=attention, dropout=dropout)  # fmt: skip
    held = worst(watched_step(spec, batch))
    device = OneDevice(spec, batch, Recorder(rank=0, world_size=1))
    allocator = device.nbytes + profiled_peak(device.step)
    assert sum(held.values()) == pytest.approx(allocator, rel=0.001)
    assert held["other"] <= 0.02 * sum(held.values())


@pytest.mark.parametrize(("attention", "dropout"), [("explicit", 0.1), ("sdpa", 0.0)])
def test_fake_tensors_give_the_same_peak_and_boundaries(attention, dropout):
    spec = MODEL.replace(attention=attention, dropout=dropout)
    real = watched_step(spec, 4)
    with FakeTensorMode():
        fake = watched_step(spec, 4)
        boundaries = watched_step(spec, 4, boundaries=True)
    assert worst(fake) == worst(real)
    assert boundaries == watched_step(spec, 4, boundaries=True)


@pytest.mark.parametrize("change", [{}, {"attention": "sdpa"}, {"dropout": 0.1}, {"tied": False}])
def test_every_category_is_what_the_formula_says(change):
    spec = MODEL.replace(**change)
    states = memory.state_bytes(spec, pl.Plan())
    samples = watched_step(spec, 4)
    for held in samples:
        assert held["parameters"] == states["parameters"] + MASKS
        assert held["optimizer"] == states["optimizer"]
    kept = max(held["activations"] for held in samples)
    assert kept - memory.activation_bytes(spec, 4) in range(9)  # the loss's own scalars
    assert max(held["gradients"] for held in samples) == states["gradients"]
    batch = 2 * 8 * 4 * spec.seq_len  # saved by the embedding and the loss, and still held here
    assert samples[-1] == dict.fromkeys(CATEGORIES, 0) | {
        "parameters": states["parameters"] + MASKS, "optimizer": states["optimizer"],
        "activations": batch,
    }  # fmt: skip


def test_views_count_once_and_the_dead_not_at_all():
    recorder = Recorder(rank=0, world_size=1)
    with Ledger(recorder) as ledger:
        kept = torch.zeros(1000)
        views = [kept.view(10, 100), kept[5:], kept.t(), kept.detach()]
        assert ledger.state()["other"] == 4000
        with recorder.span("forward"):
            torch.zeros(50)
            temporary = torch.zeros(100)
            assert ledger.state()["workspace"] == 400
        with recorder.span("copy"):
            buffer = torch.zeros(7)
        recorder.owns("buffers", temporary)
        assert ledger.state() == dict.fromkeys(CATEGORIES, 0) | {"other": 4000, "buffers": 428}
        del temporary, buffer
        kept.untyped_storage().resize_(0)
        recorder.resized(kept)
        assert sum(ledger.state().values()) == 0
        kept.untyped_storage().resize_(8000)
        recorder.resized(*views)
        assert ledger.state()["other"] == 8000


def test_what_it_knows_stays_right_while_it_is_off_and_nothing_of_it_is_left():
    recorder = Recorder(rank=0, world_size=1)
    ledger = Ledger(recorder)
    with ledger:
        device = OneDevice(MODEL, 2, recorder)
        kept, lost = torch.zeros(10), torch.zeros(1000)
    before = ledger.state()
    assert recorder.ledger is None and torch._C._len_torch_dispatch_stack() == 0
    assert all(not p._post_accumulate_grad_hooks for p in device.gpt.parameters())
    saved = torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert saved is None
    count = len(recorder.samples)
    del lost
    device.step()
    assert len(recorder.samples) == count
    assert ledger.state() == before | {"other": before["other"] - 4000}
    with ledger:
        device.step()
        with recorder.unwatched():
            aside = torch.zeros(10**6)
        after = ledger.state()
    assert sum(after.values()) == sum(before.values()) - 4000
    assert after["other"] == 40 and after["gradients"] == 0
    assert kept.numel() + aside.numel()


# ---- real ranks ----------------------------------------------------------------------------------
def _peaks_of_a_rank(context, spec, plan):
    """(what the ledger says, what torch.profiler says) of the same step."""
    recorder = Recorder(rank=context.rank, world_size=context.world_size)
    ledger = Ledger(recorder)
    with ledger:
        trainer = Trainer(context, spec, plan, recorder=recorder)
        # The profiler misses what another thread gives back: who waits for a send to end, and
        # gloo's, if it lets go of a message after the rank does.
        sent, send, settle = [], trainer.grid.pp.send, Group.settle
        trainer.grid.pp.send = lambda tensor, **how: (sent.append(tensor), send(tensor, **how))[1]
        Group.settle = lambda group, works: (settle(group, works), time.sleep(0.003))[0]
        trainer.step(0)
        sent.clear()
    fullest = max(sum(sample.held.values()) for sample in recorder.samples)
    before = sum(ledger.state().values())
    return fullest, before + min(profiled_peak(lambda k=k: trainer.step(k)) for k in (1, 2, 3))


@pytest.mark.parametrize("plan", [
    PLAN.replace(pp=2, microbatches=4), PLAN.replace(pp=2, microbatches=4, schedule="zb-h1"),
    PLAN.replace(dp=2, bucket_bytes=2**18), PLAN.replace(recompute="full"),
    *(PLAN.replace(dp=2, bucket_bytes=2**18, zero_stage=stage) for stage in (1, 2, 3)),
], ids=["1f1b", "zb-h1", "dp", "recompute", "zero-1", "zero-2", "zero-3"])  # fmt: skip
def test_every_rank_has_the_allocators_peak(plan):
    found = launch_program(_peaks_of_a_rank, plan.world_size, (MODEL, plan), device="cpu")
    for ledger, allocator in found:
        assert ledger == pytest.approx(allocator, rel=0.01)


@pytest.mark.parametrize("change", [
    {}, {"dp": 2, "grad_sync": "naive"}, {"dp": 2, "bucket_bytes": 2**17},
    {"pp": 2}, {"pp": 2, "schedule": "zb-h1"}, {"pp": 2, "dp": 2, "schedule": "gpipe"},
], ids=str)  # fmt: skip
def test_a_report_has_every_byte_by_category_beside_the_formula(run, change):
    plan = PLAN.replace(microbatches=4, **change)
    report = run(MODEL, plan, steps=2)
    assert set(report.memory["step"]) == {0} and set(report.memory["category"]) <= set(CATEGORIES)
    times = report.memory.groupby("rank")["time"].unique()
    spans = report.spans[(report.spans["lane"] == "compute") & (report.spans["step"] == 0)]
    for rank in range(plan.world_size):
        assert len(times[rank]) >= len(spans[spans["rank"] == rank])
        table = report.peaks(rank)
        assert list(table) == ["formula", "measured"]
        found, formula = table["measured"], table["formula"]
        assert found["total"] == found.drop("total").sum()
        assert found["other"] <= 0.02 * found["total"]
        assert found["optimizer"] == formula["optimizer"]
        assert 0 <= found["parameters"] - formula["parameters"] <= MASKS
        assert found["gradients"] in range(formula["gradients"], formula["gradients"] + 64)
        message = 4 * plan.microbatch_size * MODEL.seq_len * MODEL.hidden
        kept = found["activations"] + found["buffers"]
        assert abs(kept - formula["activations"]) <= (3 * message if plan.pp > 1 else 4096)
    assert report.peak_memory == report.peaks()["measured"]["total"]
    assert report.peak_memory == max(
        report.peaks(rank)["measured"]["total"] for rank in range(plan.world_size)
    )


def test_memory_is_saved_and_read_again(run, tmp_path: Path):
    report = run(MODEL, PLAN, steps=2)
    report.save(tmp_path / "run.json")
    again = pl.load(tmp_path / "run.json")
    assert again.memory.equals(report.memory) and again.peaks().equals(report.peaks())


def test_a_prediction_has_peaks_and_what_was_not_sampled_says_so(run):
    link = pl.Link(alpha=1e-5, bandwidth=1e10)
    cluster = pl.Cluster(flops=1e12, memory_bandwidth=1e11, intra=link, inter=link)
    table = pl.predict(MODEL, PLAN, cluster=cluster).peaks()
    assert list(table) == ["formula", "predicted"]
    assert (table["formula"] == table["predicted"]).all()
    with pytest.raises(ValueError, match="memory was not sampled"):
        pl.trace(lambda group: None, 1).peaks()
    with pytest.raises(ValueError, match=r"rank=3.*one of \[0\]"):
        run(MODEL, PLAN, steps=1).peaks(3)


# ---- the limit -----------------------------------------------------------------------------------
def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_a_run_just_below_the_limit_passes_and_one_byte_less_stops_it(run):
    run(MODEL, steps=1)  # the server of ranks is up
    before = children()
    needs = run(MODEL, PLAN, steps=1).peak_memory
    report = run(MODEL, PLAN, steps=3, memory_limit=needs)
    assert report.peak_memory == needs and set(report.memory["step"]) == {0, 1, 2}
    assert report.meta["memory_limit"] == needs
    with pytest.raises(pl.OutOfMemory) as caught:
        run(MODEL, PLAN, steps=3, memory_limit=needs - 1)
    assert children() <= before
    said, table = str(caught.value), caught.value.table
    assert said.startswith("rank 0 ran out of memory: step 0, backward of micro-batch 1 asked for")
    assert said.count(table) == 1 and caught.value.rank == 0
    rows = dict(line.rsplit(None, 2)[:2] for line in table.splitlines() if line.endswith("MiB"))
    rows = {name.strip(): float(size) for name, size in rows.items()}
    assert {"parameters", "gradients", "optimizer", "activations", "workspace"} < set(rows)
    sizes = [size for name, size in rows.items() if name in CATEGORIES]
    assert rows["in all"] == pytest.approx(sum(sizes), abs=0.01)
    assert rows["in all"] + rows["asked for"] == pytest.approx(needs / 2**20, abs=0.01)
    assert rows["limit"] == pytest.approx(needs / 2**20, abs=0.001)
    assert "microbatch_size=2, microbatches=4" in table
    assert run(MODEL, PLAN, steps=1).peak_memory == needs  # the next run works


def test_an_optimizer_that_does_not_fit_is_named_while_it_is_made(run):
    weights = 4 * MODEL.num_params + MASKS
    with pytest.raises(pl.OutOfMemory) as caught:
        run(MODEL, PLAN, steps=1, memory_limit=2 * weights)  # the moments are twice the weights
    held = {line.split()[0]: line for line in caught.value.table.splitlines()[1:]}
    assert "before step 0" in str(caught.value) and {"parameters", "optimizer"} <= set(held)
    assert "other" not in held


def test_a_limit_below_the_model_stops_it_before_the_first_step(run):
    with pytest.raises(pl.OutOfMemory, match="before step 0 asked for") as caught:
        run(MODEL, PLAN.replace(dp=2), memory_limit="0.25MiB")
    assert "zero_stage=" in caught.value.table and "too much still" in caught.value.table


def test_what_is_kept_for_the_report_is_not_limited(run):
    needs = run(MODEL, PLAN, steps=1).peak_memory
    report = run(MODEL, PLAN, steps=1, memory_limit=needs, keep_state=True)
    assert report.peak_memory == needs and set(report.weights) == set(MODEL.parameter_shapes())


@pytest.mark.parametrize(("value", "found"), [
    (64, 64), ("64", 64), ("64MB", 64 * 10**6), ("64MiB", 64 * 2**20), ("64 mib", 64 * 2**20),
    ("1.5KiB", 1536), ("2GB", 2 * 10**9),
])  # fmt: skip
def test_a_limit_is_bytes_or_text(value, found):
    assert num_bytes("memory_limit", value) == found


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "much", "0MB", "-1MB", "1e400MB", "", "0.5"])
def test_a_limit_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=r"memory_limit=.*64MB.*64MiB"):
        num_bytes("memory_limit", value)


def test_advice_names_settings_that_fit_by_the_formulas():
    plan = PLAN.replace(dp=4)
    moments = memory.moments(MODEL, plan)
    whole = max(sum(parts.values()) for parts in moments.values())
    said = advice(MODEL, plan, optimizer="adamw", limit=whole // 2)
    assert said.startswith("By the formulas ") and "would fit" in said
    assert "microbatch_size=1, microbatches=8" in said
    said = advice(MODEL, PLAN, optimizer="adamw", limit=1000)
    assert "comes nearest, and is too much still" in said
    assert said.count("zero_stage") == said.count("zero_stage=3, offload='cpu'") == 1


# ---- what it costs -------------------------------------------------------------------------------
@pytest.mark.prompt
def test_a_watched_step_costs_a_tenth_more_at_most():
    spec = pl.ModelSpec(layers=4, hidden=256, heads=8, seq_len=128, vocab=256)
    recorder = Recorder(rank=0, world_size=1)
    ledger = Ledger(recorder)
    with ledger:
        device = OneDevice(spec, 8, recorder)
    ratios = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # all of the step on the thread that is timed
    try:
        for _ in range(9):
            start = time.thread_time()
            device.step()
            between = time.thread_time()
            with ledger:
                device.step()
            ratios.append((time.thread_time() - between) / (between - start))
    finally:
        torch.set_num_threads(threads)
    assert statistics.median(ratios) < 1.15
