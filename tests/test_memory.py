"""The memory ledger: the allocator's peak, every byte with a name, a limit that stops a run."""

from __future__ import annotations

import gc
import math
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import paralab as pl
from paralab.checks import num_bytes
from paralab.comm import Pending
from paralab.instruments.advice import advice
from paralab.instruments.ledger import CATEGORIES, Ledger
from paralab.instruments.recorder import Recorder
from paralab.interpret import quick
from paralab.interpret.state import Optimizer
from paralab.interpret.train import Trainer
from paralab.launch import launch_program
from refusals import refuses
from stated import TIERS

MODEL = pl.ModelSpec(layers=3, hidden=64, heads=4, seq_len=64, vocab=256)
PSI = MODEL.num_params
PLAN = pl.Plan(microbatch_size=4, microbatches=2)
WAIT = Pending.wait


# ---- one device, in this process -----------------------------------------------------------------
class OneDevice:
    """The reference, an optimizer and a batch, and the step they make, spans and all."""

    def __init__(self, spec: pl.ModelSpec, batch: int, recorder: Recorder) -> None:
        self.recorder, self.gpt = recorder, pl.reference.GPT(spec)
        self.parameters, self.optimizer = list(self.gpt.parameters()), Optimizer("adamw", 1e-3)
        recorder.owns("parameters", *self.parameters, *self.gpt.buffers())
        self.states = self.optimizer.states(self.parameters)
        states = [t for tensors in self.states.values() for t in tensors]
        recorder.owns("optimizer", *states)
        self.tokens = torch.zeros(batch, spec.seq_len, dtype=torch.int64)
        self.targets = torch.zeros_like(self.tokens)
        held = [*self.parameters, *self.gpt.buffers(), *states, self.tokens, self.targets]
        self.nbytes = sum(tensor.untyped_storage().nbytes() for tensor in held)

    def step(self) -> None:
        with self.recorder.span("forward"):
            loss = self.gpt(self.tokens, self.targets)
        with self.recorder.span("backward"):
            loss.backward()
        del loss
        with self.recorder.span("optimizer"), torch.no_grad():
            grads = [p.grad for p in self.parameters]
            self.optimizer.step(self.parameters, grads, self.states, (None, None))
            del grads
            self.gpt.zero_grad()


def watched_step(spec: pl.ModelSpec, batch: int) -> list[dict[str, int]]:
    """What the ledger sampled in one step."""
    recorder = Recorder(rank=0, world_size=1)
    with Ledger(recorder):
        device = OneDevice(spec, batch, recorder)
        recorder.begin_step(0)
        device.step()
        recorder.end_step()
    return [sample.held for sample in recorder.samples]


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


@pytest.mark.parametrize(
    ("batch", "attention", "dropout"),
    [(4, "explicit", 0.0), (4, "sdpa", 0.1), (2, "explicit", 0.1), (2, "sdpa", 0.0)],
)
def test_the_peak_is_the_allocators(batch, attention, dropout):
    sizes = {"hidden": 128, "seq_len": 128} if batch == 2 else {}
    spec = MODEL.replace(attention=attention, dropout=dropout, **sizes)
    held = max(watched_step(spec, batch), key=lambda held: sum(held.values()))
    device = OneDevice(spec, batch, Recorder(rank=0, world_size=1))
    allocator = device.nbytes + profiled_peak(device.step)
    assert sum(held.values()) == pytest.approx(allocator, rel=0.001)
    assert held["other"] <= 0.02 * sum(held.values())


def kept_for_backward(spec: pl.ModelSpec, batch: int) -> int:
    """Bytes of the storages that autograd saves in a forward, parameters aside."""
    device, saved = OneDevice(spec, batch, Recorder(rank=0, world_size=1)), []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        device.gpt(device.tokens, device.targets)
    lasting = {p.untyped_storage().data_ptr() for p in device.parameters}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for at, size in storages.items() if at not in lasting)


@pytest.mark.parametrize("change", [{}, {"attention": "sdpa"}, {"dropout": 0.1}, {"tied": False}])
def test_every_category_is_what_it_says(change):
    spec = MODEL.replace(**change)
    psi, tensors = spec.num_params, len(spec.parameter_shapes())
    states = {"parameters": 4 * psi, "optimizer": 8 * psi + 4 * tensors}
    samples = watched_step(spec, 4)
    for held in samples:
        assert {name: held[name] for name in states} == states
    assert max(held["activations"] for held in samples) == kept_for_backward(spec, 4)
    assert max(held["gradients"] for held in samples) == 4 * psi
    batch = 2 * 8 * 4 * spec.seq_len  # saved by the embedding and the loss, and still held here
    assert samples[-1] == dict.fromkeys(CATEGORIES, 0) | states | {"activations": batch}


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
        with ledger.resizes():
            kept.untyped_storage().resize_(0)
            assert sum(ledger.state().values()) == 0
            kept.untyped_storage().resize_(8000)
            recorder.owns("other", *views)
            assert ledger.state()["other"] == 8000


def test_one_category_that_replaces_another_is_sampled_though_the_total_stays():
    """As in backward, where the gradients of a block replace its activations."""
    recorder = Recorder(rank=0, world_size=1)
    with Ledger(recorder) as ledger:
        recorder.begin_step(0)
        saved = [torch.zeros(1000) for _ in range(8)]
        ledger.owns("activations", *saved)
        with recorder.span("backward"):
            gradients = []
            while saved:
                saved.pop()
                gradients.append(torch.zeros(1000))
                ledger.owns("gradients", gradients[-1])
        recorder.end_step()
    seen = {sample.held["gradients"] for sample in recorder.samples}
    assert {4000 * n for n in range(8)} <= seen


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
def _peaks(context, plan):
    """(what the ledger says, what torch.profiler says) of the same step."""
    gc.collect()  # what the plan before leaves, its steps would give back
    recorder = Recorder(rank=context.rank, world_size=context.world_size)
    ledger = Ledger(recorder)
    with ledger:
        trainer = Trainer(context, MODEL, plan, recorder=recorder)
        # The profiler misses what another thread gives back: who waits for a send to end, and
        # gloo's, if it lets go of a message after the rank does. On a busy machine that thread may
        # be late by more than a moment, so each step waits longer for it than the last, until one
        # was long enough on every rank.
        sent, send, pause = [], trainer.grid.pp.send, [0.003]
        trainer.grid.pp.send = lambda tensor, **how: (sent.append(tensor), send(tensor, **how))[1]
        Pending.wait = lambda call: (WAIT(call), time.sleep(pause[0]))[0]
        trainer.step(0)
        sent.clear()

    def peak(k):
        pause[0] = 0.003 * 4 ** (k - 1)  # 3, 12, 48 ms
        return profiled_peak(lambda: trainer.step(k))

    fullest = max(sum(sample.held.values()) for sample in recorder.samples)
    before, least = sum(ledger.state().values()), math.inf
    for k in (1, 2, 3):
        least = min(least, before + peak(k))
        late = torch.tensor(float(least > 1.005 * fullest))
        torch.distributed.all_reduce(late)
        if not late:
            break
    return fullest, least


def test_every_rank_has_the_allocators_peak():
    zero = [PLAN.replace(dp=2, bucket_bytes=2**18, zero_stage=stage) for stage in (0, 1, 2, 3)]
    pipeline = PLAN.replace(pp=2, microbatches=4)
    recomputed = PLAN.replace(dp=2, recompute="full")
    plans = [pipeline, pipeline.replace(schedule="zb-h1"), recomputed, *zero]
    parts = launch_program(
        lambda context: [_peaks(context, plan) for plan in plans], 2, (), device="cpu"
    )
    for plan, *ranks in zip(plans, *parts, strict=True):
        for ledger, allocator in ranks:
            assert ledger == pytest.approx(allocator, rel=0.01), plan


@pytest.mark.parametrize("change", [
    {}, {"dp": 2, "grad_sync": "naive"}, {"pp": 2, "schedule": "zb-h1"},
    {"pp": 2, "dp": 2, "schedule": "gpipe", "zero_stage": 1},
], ids=str)  # fmt: skip
def test_a_report_has_every_byte_by_category_beside_the_programs(run, change):
    plan = PLAN.replace(microbatches=4, **change)
    report = run(MODEL, plan, steps=2)
    assert set(report.memory["step"]) == {0} and set(report.memory["category"]) <= set(CATEGORIES)
    times = report.memory.groupby("rank")["time"].unique()
    spans = report.spans[(report.spans["lane"] == "compute") & (report.spans["step"] == 0)]
    for rank in range(plan.world_size):
        assert len(times[rank]) >= len(spans[spans["rank"] == rank])
        table = report.peaks(rank)
        assert list(table) == ["program", "measured"]
        assert list(table.index) == [*CATEGORIES, "total"]
        assert (table.drop("total").sum() == table.loc["total"]).all()
        said, found = table["program"], table["measured"]
        lasting = ["parameters", "gradients", "optimizer", "other"]
        assert (said[lasting] == found[lasting]).all(), table
        # gloo's thread may let go of a message a moment after the rank does
        message = report.collectives["payload_bytes"].max() if plan.world_size > 1 else 0
        assert said["total"] <= found["total"] <= said["total"] + message, table
    totals = [report.peaks(rank)["measured"]["total"] for rank in range(plan.world_size)]
    assert report.peak_memory == report.peaks()["measured"]["total"] == max(totals)


def test_the_program_of_a_clipped_run_holds_the_divisor_of_its_gradients(run):
    table = (report := run(MODEL, pl.Plan(), steps=1, clip_norm=1.0)).peaks()
    plain = sum(quick.peak(MODEL, report.plan).values())
    assert (table["program"] == table["measured"]).all(), table
    assert table["program"]["total"] == plain + 4  # an fp32 number
    assert sum(quick.fullest(MODEL, report.plan, clips=True)[1].values()) == plain + 4


def test_a_prediction_has_peaks_and_what_was_not_sampled_says_so(run):
    for plan in (PLAN, pl.Plan(dp=4, zero_stage=2, microbatch_size=1, microbatches=2)):
        table = pl.predict(MODEL, plan, TIERS).peaks()
        assert list(table) == ["program", "predicted"]
        assert (table["program"] == table["predicted"]).all()  # on GPUs: no buffers of gloo's
    refuses("memory was not sampled", pl.trace(lambda group: None, 1).peaks)
    refuses(r"rank=3.*one of \[0\]", run(MODEL, PLAN, steps=1).peaks, 3)


# ---- the limit -----------------------------------------------------------------------------------
def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_plan_runs_in_what_is_predicted_for_it_and_in_no_byte_less(run, precision):
    """Of the loss a number of 32 bits is left, and its share is one that is gone at the peak."""
    plan = pl.Plan(pp=2, microbatches=2, precision=precision)
    model = MODEL.replace(vocab=4096, tied=False)  # so the loss is the fullest moment
    needs = pl.predict(model, plan, TIERS.replace(cores=2)).peak_memory
    assert run(model, plan, steps=1, memory_limit=needs).peak_memory == needs
    with pytest.raises(pl.OutOfMemory):
        run(model, plan, steps=1, memory_limit=needs - 1)


def test_a_run_just_below_the_limit_passes_and_one_byte_less_stops_it(run):
    run(MODEL, steps=1)  # the server of ranks is up
    before = children()
    needs = run(MODEL, PLAN, steps=1).peak_memory
    report = run(MODEL, PLAN, steps=3, memory_limit=needs, keep_state=True)
    assert report.peak_memory == needs and set(report.memory["step"]) == {0, 1, 2}
    assert set(report.weights) == set(MODEL.parameter_shapes())  # kept for the report: no part
    assert report.meta["memory_limit"] == needs
    with pytest.raises(pl.OutOfMemory) as caught:
        run(MODEL, PLAN, steps=3, memory_limit=needs - 1)
    assert children() <= before
    said, table = str(caught.value), caught.value.table
    assert said.startswith("rank 0 ran out of memory: in step 0, backward of micro-batch 1, it ask")
    assert said.count(table) == 1 and caught.value.rank == 0
    held = [line.rsplit(None, 2) for line in table.splitlines() if line.endswith(("MB", " B"))]
    units = {"MB": 1.0, "B": 1e-6}
    rows = {name.strip(): float(size.replace(",", "")) * units[u] for name, size, u in held}
    assert {"parameters", "gradients", "optimizer", "activations", "workspace"} < set(rows)
    sizes = [size for name, size in rows.items() if name in CATEGORIES]
    assert rows["in all"] == pytest.approx(sum(sizes), abs=0.01)
    assert rows["in all"] + rows["asked for"] == pytest.approx(needs / 1e6, abs=0.01)
    assert rows["limit"] == pytest.approx(needs / 1e6, abs=0.001)
    assert "microbatch_size=2, microbatches=4" in table
    assert run(MODEL, PLAN, steps=1).peak_memory == needs  # the next run works


def test_a_limit_below_the_model_stops_it_before_the_first_step(run):
    with pytest.raises(pl.OutOfMemory, match="before step 0, it asked for") as caught:
        run(MODEL, PLAN.replace(dp=2), memory_limit="0.25MiB")
    assert "zero_stage=" in caught.value.table and "but does not fit" in caught.value.table
    with pytest.raises(pl.OutOfMemory, match="for 81,920 B when 0 B of memory_limit=1,000 B were"):
        run(MODEL, memory_limit=1000)
    with pytest.raises(pl.OutOfMemory, match="before step 0") as caught:
        run(MODEL, PLAN, steps=1, memory_limit=8 * PSI)  # the moments are twice the weights
    held = {line.split()[0] for line in caught.value.table.splitlines()[1:]}
    assert {"parameters", "optimizer"} <= held and "other" not in held


@pytest.mark.parametrize(("limit", "room"), [(10**7, 2**28), (10**10, 1.5e9), (75 * 10**9, 5e9)])
def test_a_limit_leaves_cudas_allocator_room_for_what_is_no_tensor(monkeypatch, limit, room):
    """An H100's had up to 102 MB more than the ledger, and segments are not filled."""
    shares, card = [], SimpleNamespace(total_memory=8 * 10**10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    cap = "set_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, cap, lambda *how: shares.append(how))
    Ledger(Recorder(rank=0, world_size=1), device="cuda:1", limit=limit)
    [(share, device)] = shares
    assert share * card.total_memory - limit >= room * (1 - 1e-9) and share <= 1.0
    assert device == "cuda:1"


def test_a_limit_is_bytes_or_text():
    for value, found in {
        64: 64, "64": 64, 64e6: 64 * 10**6, "1e9": 10**9, "64MB": 64 * 10**6, "64MiB": 64 * 2**20,
        "64 mib": 64 * 2**20, "1.5KiB": 1536, "2GB": 2 * 10**9, "1TB": 10**12, "2TiB": 2**41,
    }.items():  # fmt: skip
        assert num_bytes("memory_limit", value) == found
    for value in (1.5, math.inf, math.nan, "1e400MB", ""):  # more of them in test_spec.py
        refuses(r"memory_limit=.*64MB.*64MiB", num_bytes, "memory_limit", value)


def test_advice_names_settings_that_fit_by_prediction():
    plan = PLAN.replace(dp=4)
    whole = sum(quick.peak(MODEL, plan).values())
    said = advice(MODEL, plan, optimizer="adamw", limit=whole * 3 // 4)
    assert said.startswith("By prediction, microbatch_size=2, microbatches=4 (")
    assert " would fit; so would microbatch_size=1, microbatches=8 (" in said
    said = advice(MODEL, plan, optimizer="adamw", limit=whole // 2)  # no one of them would do
    assert said.startswith("By prediction, zero_stage=3, microbatch_size=2, microbatches=4 (3.6 MB")
    said = advice(MODEL, plan, optimizer="adamw", limit=whole * 3 // 10)
    assert said.startswith("By prediction, zero_stage=3, microbatch_size=1, microbatches=8, recom")
    said = advice(MODEL, PLAN, optimizer="adamw", limit=1000)
    assert "comes closest, but does not fit. More data-parallel ranks" in said
    assert said.count("zero_stage") == said.count("zero_stage=3, offload='cpu'") == 1
