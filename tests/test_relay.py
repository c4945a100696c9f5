"""The layer relay: the same training, one part of the model on the device, bytes whatever m is.

Its copies, row by row, against the program: test_programs_offload.py; its boxes:
test_interpret_traffic.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import paralab as pl
from equality import assert_equal_state, reference, worst
from paralab.interpret import quick
from paralab.parallel.schedules import gpipe, relay
from paralab.programs.compile import compiled
from paralab.programs.instructions import COPY, FORWARD
from paralab.spec.tiers import WAYS
from paralab.theory.offload import link_bytes, tier_bytes
from paralab.theory.schedule_check import validate

STEPS = 3
STATES = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
ALL = {**STATES, "activations": "nvme"}
HERE = {"parameters": "cpu", "optimizer": "cpu"}  # gradients stay on the device
LINK = pl.Link(alpha=1e-5, bandwidth=1e9)
CLUSTER = pl.Cluster(devices_per_node=8, flops=1e11, memory_bandwidth=3e10, op_overhead=5e-6,
                     intra=LINK, host=LINK, disk=LINK, host_bandwidth=1e10)  # fmt: skip


def said(value):
    if isinstance(value, dict):
        return " ".join(f"{k}={said(v)}" for k, v in value.items()) or "as is"
    return str(value)


def plan_of(**settings):
    return pl.Plan(**{"schedule": "l2l", "zero_stage": 3, "offload": "cpu", "recompute": "full",
                      "microbatches": 4, **settings})  # fmt: skip


def assert_same_bits(report, other):
    for what in ("weights", "gradients"):
        gap, name = worst(getattr(other, what), getattr(report, what))
        assert gap == 0.0, f"{what} of {name} differ by {gap}"
    assert report.losses == other.losses


# ---- equality ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings",
    [
        {"prefetch": 0},
        {"offload": "nvme"},
        {"offload": STATES, "prefetch": 2, "microbatches": 1},
        {"offload": HERE},
        {"offload": {**ALL, "activations": "cpu"}, "prefetch": 0},
    ],
    ids=said,
)
def test_it_is_the_training_of_one_process_bit_for_bit(kept, model, settings):
    model, plan = model.replace(tied=False, dropout=0.1), plan_of(**settings)
    alone = kept(model, pl.Plan(microbatches=plan.microbatches))
    assert_same_bits(kept(model, plan), alone)


@pytest.mark.parametrize(
    "change, more",
    [
        ({}, {"precision": "bf16", "offload": "nvme"}),
        ({}, {"precision": "fp16", "offload": STATES}),
        ({"attention": "sdpa"}, {}),
    ],
    ids=said,
)
def test_everything_else_goes_with_it_bit_for_bit(kept, model, change, more):
    model, plan = model.replace(layers=3, tied=False, **change), plan_of(**more)
    plain = pl.Plan(microbatches=4, precision=plan.precision)
    assert_same_bits(kept(model, plan), kept(model, plain))


def test_a_tied_weight_adds_up_in_another_order_and_with_one_micro_batch_in_the_same(kept, model):
    """All heads' gradients and then all embeddings', in place of micro-batch by micro-batch."""
    sgd = {"optimizer": "sgd", "lr": 0.5}
    alone, report = (kept(model, plan, **sgd) for plan in (pl.Plan(microbatches=4), plan_of()))
    assert_equal_state(vars(alone), report)
    alone, report = (
        kept(model, plan, steps=1).gradients for plan in (pl.Plan(microbatches=4), plan_of())
    )
    other = [name for name in alone if not np.array_equal(alone[name], report[name])]
    assert other == ["embedding.token.weight"]
    assert_same_bits(kept(model, plan_of(microbatches=1), **sgd), kept(model, pl.Plan(), **sgd))


def test_two_ranks_relay_their_shares_of_the_batch(kept, model, text):
    """With one micro-batch each they add in the order of ZeRO-3; with more each adds its own up
    before it sends.
    """
    model, sgd = model.replace(dropout=0.1), {"optimizer": "sgd", "lr": 0.5}
    report = kept(model, plan_of(dp=2, microbatches=1), **sgd)
    assert_same_bits(report, kept(model, pl.Plan(dp=2, zero_stage=3, recompute="full"), **sgd))
    alone = reference(model, microbatches=4, microbatch_size=2, steps=STEPS, lr=0.5, data=text)
    assert_equal_state(alone, kept(model, plan_of(dp=2, microbatches=2), **sgd))


def test_clipping_goes_with_it(kept, model):
    """The norm is a sum over units in both."""
    sgd = {"optimizer": "sgd", "lr": 0.5, "clip_norm": 0.1}
    report = kept(model, plan_of(), **sgd)
    assert_equal_state(vars(kept(model, pl.Plan(microbatches=4), **sgd)), report)
    assert report.losses != kept(model, plan_of(), **{**sgd, "clip_norm": None}).losses


def test_a_training_goes_on_as_a_relay_and_from_one(run, model, tmp_path):
    model = model.replace(tied=False)
    plans = plan_of(offload="nvme"), pl.Plan(microbatches=4)
    whole = run(model, plans[1], steps=3, keep_state=True)
    for number, (first, second) in enumerate([plans, plans[::-1]]):
        run(model, first, steps=2, save=tmp_path / str(number))
        report = run(model, second, steps=1, resume=tmp_path / str(number), keep_state=True)
        gap, name = worst(whole.weights, report.weights)
        assert gap == 0.0, f"weights of {name} differ by {gap}"


# ---- bytes ------------------------------------------------------------------------------------
SMALL = pl.ModelSpec(layers=3, hidden=96, heads=4, seq_len=48)
COUNTED = [
    ({}, {}),
    ({"tied": False}, {"prefetch": 0, "microbatch_size": 8}),
    ({}, {"dp": 2, "microbatches": 2}),
    ({"tied": False}, {"offload": {**ALL, "activations": "cpu"}, "dp": 2, "prefetch": 2}),
    ({"dropout": 0.1}, {"precision": "bf16", "microbatch_size": 1, "microbatches": 8}),
    ({"vocab": 2048}, {"offload": HERE, "microbatch_size": 4}),
]


@pytest.fixture(scope="module")
def counted(run):
    known: dict[str, pl.Report] = {}

    def train(change, settings):
        model, plan = SMALL.replace(**change), plan_of(**settings)
        if repr((model, plan)) not in known:
            known[repr((model, plan))] = run(model, plan, steps=2)
        return known[repr((model, plan))]

    return train


def moved(report, rank=0):
    rows = report.copies
    found = {link: {} for link in WAYS}
    for row in rows[(rows["rank"] == rank) & (rows["step"] == 1)].itertuples():
        link = found[f"disk {row.op}" if row.lane == "disk" else row.lane]
        link[row.category] = link.get(row.category, 0) + row.bytes
    return found


@pytest.mark.parametrize("change, settings", COUNTED, ids=said)
def test_bytes_over_each_link_and_on_each_tier_are_the_programs(counted, change, settings):
    report = counted(change, settings)
    for rank in range(report.world_size):
        assert moved(report, rank) == link_bytes(report.model, report.plan, rank=rank)
        rows = report.memory[report.memory["rank"] == rank]
        found = {"host": {}, "file": {}}
        for row in rows[rows["tier"] != "device"].itertuples():
            tier = found[row.tier]
            tier[row.category] = max(tier.get(row.category, 0), row.bytes)
        assert found == tier_bytes(report.model, report.plan, rank=rank)
        total = report.peaks(rank).loc["total"]
        assert total["measured"] == pytest.approx(total["program"], rel=0.01)
    comparison = pl.compare(pl.predict(report.model, report.plan, CLUSTER), report)
    assert comparison.bytes_agree
    row = comparison.table.loc["bytes moved between tiers per rank"]
    assert row["predicted"] == row["replayed"] == row["measured"] > 0


@pytest.mark.parametrize("tied, dp", [(True, 1), (False, 2)])
def test_parameters_come_up_twice_and_gradients_leave_once_whatever_m_is(counted, tied, dp):
    """By hand, and as rows: a block's part comes up before its forward and before its backward."""
    model = SMALL.replace(tied=tied)
    units = compiled(model, plan_of(dp=dp)).units[0]
    psi = 4 * sum(unit.numel for unit in units) // dp
    once = ("head", "embedding") if tied else ("head",)
    stays = 4 * sum(unit.numel for unit in units if unit.part in once) // dp
    for m in (1, 4):
        report = counted({"tied": tied}, {"dp": dp, "microbatches": m})
        found = moved(report)
        assert found["h2d"] == {"parameters": 2 * psi - stays}
        assert found["d2h"] == {"gradients": psi}
        rows = report.copies[(report.copies["rank"] == 0) & (report.copies["step"] == 1)]
        assert len(rows[rows["category"] == "gradients"]) == len(units)
        assert len(rows[rows["category"] == "parameters"]) == 2 * len(units) - len(once)
    plan = plan_of(dp=dp, schedule="gpipe")  # micro-batch by micro-batch
    assert link_bytes(model, plan)["h2d"] == {"parameters": 2 * 4 * psi}


# ---- memory -----------------------------------------------------------------------------------
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("layers", [3, 6])
def test_one_part_at_a_time_is_on_the_device_and_prefetch_more(layers, prefetch):
    """Beside it the causal mask, and gradients: a block's, and those that are on their way down."""
    model, plan = SMALL.replace(layers=layers, tied=False), plan_of(prefetch=prefetch)
    h, mask = model.hidden, model.seq_len**2
    block = 4 * (12 * h * h + 13 * h)
    found = quick.most(model, plan)
    assert found["buffers"] == (1 + prefetch) * block + mask
    assert found["gradients"] == 2 * block
    embedding = 4 * (model.vocab + model.seq_len) * h
    tied = quick.most(model.replace(tied=True), plan)
    assert tied["buffers"] == (1 + prefetch) * block + mask + embedding


def test_device_memory_does_not_grow_with_depth(run):
    plan = plan_of(offload={**STATES, "activations": "cpu"})
    # of fewer layers none has one on its way up and one's gradient on its way down
    peaks = [run(SMALL.replace(layers=n), plan, steps=1).peak_memory for n in (3, 7)]
    assert peaks[0] == peaks[1]


def test_what_is_between_two_parts_grows_with_m():
    """One boundary more for each micro-batch, of activations or of their gradients; beside it what
    a lookup keeps, and the loss.
    """
    sizes = {"microbatch_size": 8, "offload": {**STATES, "activations": "cpu"}}
    peaks = [sum(quick.peak(SMALL, plan_of(microbatches=m, **sizes)).values()) for m in (3, 5)]
    boundary = 4 * 8 * SMALL.seq_len * SMALL.hidden
    assert peaks[1] - peaks[0] == pytest.approx(2 * boundary, rel=0.05)


def test_a_cap_at_the_prediction_holds_and_one_below_says_what_was_there(run):
    plan = plan_of()
    need = sum(quick.peak(SMALL, plan).values())
    assert run(SMALL, plan, steps=1, memory_limit=int(1.01 * need)).peak_memory <= 1.01 * need
    with pytest.raises(pl.OutOfMemory, match="activations"):
        run(SMALL, plan, steps=1, memory_limit=int(0.95 * need))


# ---- order ------------------------------------------------------------------------------------
def test_the_next_part_comes_up_while_this_one_is_at_work():
    """With prefetch=1 the copy of a part stands before the first forward of the one before it."""

    def before_its_copy(prefetch):
        code = compiled(SMALL, plan_of(prefetch=prefetch)).codes[0]
        ups = [at for at, ins in enumerate(code) if ins.op == COPY]
        return sum(ins.op == FORWARD for ins in code[: ups[2]]) // 4

    assert (before_its_copy(0), before_its_copy(1)) == (2, 1)


def test_on_a_slow_link_it_is_m_times_as_fast():
    slow = CLUSTER.replace(host=pl.Link(alpha=1e-6, bandwidth=1e6))
    times = {name: pl.predict(SMALL, plan_of(schedule=name, microbatches=8), slow).step_time
             for name in ("l2l", "gpipe")}  # fmt: skip
    assert times["gpipe"] / times["l2l"] == pytest.approx(8, rel=0.1)


def test_its_order_is_a_schedule_whose_stages_are_the_parts():
    listed = relay(4, 3)
    validate([listed], microbatches=3, stages=4)
    assert " ".join(map(str, relay(3, 2))) == ("0F0 0F1 1F0 1F1 2F0 2B0 2F1 2B1 1B0 1B1 0B0 0B1")
    assert plan_of().actions() == gpipe(1, 4)


def test_pictures_and_words_of_a_relay(counted):
    report = counted({}, {})
    assert "layer relay" in report.timeline().layout.title.text
    assert "l2l" in repr(pl.compare(pl.predict(SMALL, plan_of(), CLUSTER), report))
    shares = report.bubbles(CLUSTER)
    assert shares.loc["bubble", "formula"] == 0 == shares.loc["bubble", "simulated"]


# ---- refusals ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, words",
    [
        ({"pp": 2}, "pp=2: schedule='l2l' is one rank's relay"),
        ({"virtual_stages": 2}, "virtual_stages=2: schedule='l2l' is one rank's relay"),
        ({"zero_stage": 2}, "zero_stage=2: there is nothing to relay"),
        ({"offload": None}, "offload=None: there is nothing to relay"),
        ({"offload": {"optimizer": "cpu"}}, "there is nothing to relay"),
        ({"recompute": "none"}, "recompute='none': schedule='l2l' comes back to a block"),
        ({"recompute": "selective"}, "recompute='selective'"),
    ],
    ids=said,
)
def test_what_cannot_be_is_refused_before_a_process_starts(settings, words):
    plan = plan_of(**settings)
    for ask in (lambda: pl.run(SMALL, plan), lambda: pl.predict(SMALL, plan, CLUSTER)):
        with pytest.raises(ValueError) as refused:
            ask()
        assert words in str(refused.value)
        assert "legal: " in str(refused.value)
