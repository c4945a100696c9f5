"""The layer relay: the same training, one part of the model on the device, bytes whatever m is."""

from __future__ import annotations

import itertools
import types

import pytest

import paralab as pl
from equality import assert_equal_state, reference
from paralab.parallel.buckets import units
from paralab.parallel.schedules import gpipe, relay
from paralab.theory import memory
from paralab.theory.memory_relay import RelayWalk
from paralab.theory.offload import link_bytes, tier_bytes
from paralab.theory.schedule_check import validate
from paralab.tiers import WAYS
from test_offload import ALL, assert_near, assert_same_bits, cluster, said
from test_predict_zero import order

STEPS = 3
STATES = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
HERE = {"parameters": "cpu", "optimizer": "cpu"}  # gradients stay on the device


def plan_of(**settings):
    return pl.Plan(**{"schedule": "l2l", "zero_stage": 3, "offload": "cpu", "recompute": "full",
                      "microbatches": 4, **settings})  # fmt: skip


# ---- equality ---------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "settings",
    [
        {"prefetch": 0},
        {"offload": "nvme"},
        {"offload": STATES, "prefetch": 2, "microbatches": 1},
        {"offload": HERE},
        {"offload": ALL},
        {"offload": {**ALL, "activations": "cpu"}, "prefetch": 0},
    ],
    ids=said,
)
def test_it_is_the_training_of_one_process_bit_for_bit(kept, model, settings, dropout, optimizer):
    model, plan = model.replace(tied=False, dropout=dropout), plan_of(**settings)
    alone = kept(model, pl.Plan(microbatches=plan.microbatches), optimizer=optimizer)
    assert_same_bits(kept(model, plan, optimizer=optimizer), alone)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_a_tied_weight_adds_up_in_another_order_and_with_one_micro_batch_in_the_same(
    kept, model, place, prefetch, dropout
):
    """All heads' gradients and then all embeddings', in place of micro-batch by micro-batch."""
    model = model.replace(dropout=dropout)
    for m in (1, 4):
        plan = plan_of(offload=place, prefetch=prefetch, microbatches=m)
        alone = kept(model, pl.Plan(microbatches=m))
        (assert_same_bits if m == 1 else assert_near)(kept(model, plan), alone)


@pytest.mark.parametrize("settings", [{}, {"offload": ALL}, {"prefetch": 0}], ids=said)
def test_two_ranks_relay_their_shares_of_the_batch(kept, model, settings):
    """With one micro-batch each they add in the order of ZeRO-3; with more each adds its own up
    before it sends.
    """
    for tied in (False, True):
        model = model.replace(tied=tied, dropout=0.1)
        report = kept(model, plan_of(dp=2, microbatches=1, **settings))
        other = pl.Plan(dp=2, zero_stage=3, recompute="full")
        assert_same_bits(report, kept(model, other))
        report = kept(model, plan_of(dp=2, microbatches=2, **settings))
        assert_near(kept(model, pl.Plan(microbatches=4)), report)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_and_sgd_weights_are_those_of_a_plain_loop(run, model, text, tied, dp):
    model, plan = model.replace(tied=tied), plan_of(dp=dp, microbatches=4 // dp)
    report = run(model, plan, steps=3, optimizer="sgd", lr=0.5, keep_state=True)
    alone = reference(model, microbatches=4, microbatch_size=2, steps=3, lr=0.5, data=text)
    assert_equal_state(alone, report)


@pytest.mark.parametrize(
    "change, settings, more",
    [
        ({"tied": False}, {}, {"precision": "bf16", "offload": "nvme"}),
        ({"tied": False}, {}, {"precision": "fp16", "offload": STATES}),
        ({"frozen": ("embedding", "blocks.0")}, {}, {}),
        ({"frozen": ("embedding.position", "blocks.1"), "tied": False}, {}, {"prefetch": 0}),
        ({"frozen": ("head", "blocks.1"), "tied": False}, {}, {}),
        ({"attention": "sdpa", "tied": False}, {}, {}),
    ],
    ids=said,
)
def test_everything_else_goes_with_it_bit_for_bit(kept, model, change, settings, more):
    model, plan = model.replace(layers=3, **change), plan_of(**more)
    plain = pl.Plan(microbatches=4, precision=plan.precision)
    assert_same_bits(kept(model, plan, **settings), kept(model, plain, **settings))


def test_clipping_goes_with_it(kept, model):
    """The norm is a sum over units, and over tensors in one process: another order."""
    model = model.replace(tied=False)
    report = kept(model, plan_of(), clip_norm=0.1)
    assert_near(kept(model, pl.Plan(microbatches=4), clip_norm=0.1), report)
    assert report.losses != kept(model, plan_of()).losses


def test_a_training_goes_on_as_a_relay_and_from_one(run, model, tmp_path):
    plans = plan_of(offload="nvme"), pl.Plan(microbatches=4)
    whole = run(model, plans[1], steps=5, keep_state=True)
    for number, (first, second) in enumerate([plans, plans[::-1]]):
        run(model, first, steps=3, save=tmp_path / str(number))
        report = run(model, second, steps=2, resume=tmp_path / str(number), keep_state=True)
        assert_near(whole, report)


# ---- bytes ------------------------------------------------------------------------------------
SMALL = pl.ModelSpec(layers=3, hidden=96, heads=4, seq_len=48)
COUNTED = [
    ({}, {}),
    ({}, {"offload": "nvme", "microbatches": 1}),
    ({"tied": False}, {"prefetch": 0, "microbatch_size": 8}),
    ({}, {"dp": 2, "microbatches": 2}),
    ({}, {"offload": ALL}),
    ({"tied": False}, {"offload": {**ALL, "activations": "cpu"}, "dp": 2, "prefetch": 2}),
    ({}, {"precision": "bf16", "microbatch_size": 1, "microbatches": 8}),
    ({}, {"offload": HERE, "microbatch_size": 8}),
    ({"frozen": ("embedding", "blocks.0")}, {"microbatch_size": 6}),
    ({"frozen": ("blocks.1",)}, {"prefetch": 0}),
    ({"vocab": 2048, "tied": False}, {}),
    ({"vocab": 2048}, {"microbatch_size": 4}),
    ({"dropout": 0.1, "layers": 5}, {"prefetch": 0, "microbatch_size": 4}),
]


@pytest.fixture(scope="module")
def counted(run):
    known: dict[str, pl.Report] = {}

    def train(change, settings):
        model, plan = SMALL.replace(**change), plan_of(**settings)
        if repr((model, plan)) not in known:
            known[repr((model, plan))] = run(model, plan, steps=3)
        return known[repr((model, plan))]

    return train


def moved(report, rank=0, step=1):
    rows = report.copies
    found = {link: {} for link in WAYS}
    for row in rows[(rows["rank"] == rank) & (rows["step"] == step)].itertuples():
        link = found[f"disk {row.op}" if row.lane == "disk" else row.lane]
        link[row.category] = link.get(row.category, 0) + row.bytes
    return found


@pytest.mark.parametrize("change, settings", COUNTED, ids=said)
def test_bytes_over_each_link_are_the_formulas(counted, change, settings):
    report = counted(change, settings)
    for rank in range(report.world_size):
        for step in (1, 2):
            assert moved(report, rank, step) == link_bytes(report.model, report.plan, rank=rank)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dp", [1, 2])
def test_parameters_come_up_twice_and_gradients_leave_once_whatever_m_is(counted, tied, dp):
    """By hand, and as rows: a block's part comes up before its forward and before its backward."""
    model = SMALL.replace(tied=tied)
    made = units(memory.rank_sizes(model, plan_of(dp=dp)), model, plan_of(dp=dp))
    psi = 4 * sum(unit.numel for unit in made) // dp
    once = ("head", "embedding") if tied else ("head",)
    stays = 4 * sum(unit.numel for unit in made if unit.part in once) // dp
    for m in (1, 2, 4):
        report = counted({"tied": tied}, {"dp": dp, "microbatches": m})
        found = moved(report)
        assert found["h2d"] == {"parameters": 2 * psi - stays}
        assert found["d2h"] == {"gradients": psi}
        rows = report.copies[(report.copies["rank"] == 0) & (report.copies["step"] == 1)]
        assert len(rows[rows["category"] == "gradients"]) == len(made)
        assert len(rows[rows["category"] == "parameters"]) == 2 * len(made) - len(once)
    plan = plan_of(dp=dp, schedule="gpipe")  # micro-batch by micro-batch
    assert link_bytes(model, plan)["h2d"] == {"parameters": 2 * 4 * psi}


@pytest.mark.parametrize("change, settings", COUNTED, ids=said)
def test_host_and_files_hold_what_the_formulas_say(counted, change, settings):
    report = counted(change, settings)
    for rank in range(report.world_size):
        rows = report.memory[report.memory["rank"] == rank]
        found = {"host": {}, "file": {}}
        for row in rows[rows["tier"] != "device"].itertuples():
            tier = found[row.tier]
            tier[row.category] = max(tier.get(row.category, 0), row.bytes)
        assert found == tier_bytes(report.model, report.plan, rank=rank)


@pytest.mark.parametrize("change, settings", COUNTED, ids=said)
def test_peak_device_memory_is_the_formulas(counted, change, settings):
    report = counted(change, settings)
    for rank in range(report.world_size):
        table = report.peaks(rank)
        total = table.loc["total"]
        assert total["measured"] == pytest.approx(total["formula"], rel=0.02), table


# A frozen tied weight spares the head its norm's result, which the formula counts: an x too much.
WHOLE = [case for case in COUNTED if "embedding" not in case[0].get("frozen", ())]


@pytest.mark.parametrize("change, settings", WHOLE, ids=said)
def test_activations_before_the_turn_are_the_formulas(counted, change, settings):
    """When the head has taken its first micro-batch: all that waits for its backward."""
    report = counted(change, settings)
    spans = report.spans[(report.spans["rank"] == 0) & (report.spans["step"] == 0)]
    turn = spans[spans["kind"] == "backward"]["start"].min()
    rows = report.memory[(report.memory["rank"] == 0) & (report.memory["step"] == 0)]
    rows = rows[(rows["category"] == "activations") & (rows["time"] <= turn)]
    walk = RelayWalk(report.model, report.plan, memory.state_bytes(report.model, report.plan), 0)
    there = itertools.takewhile(lambda action: action.kind == "F", walk.actions)
    expected = max(walk.act(action)["activations"] for action in there)
    most = rows[rows["tier"] == "device"]["bytes"].max()
    assert most == pytest.approx(expected, rel=0.02)


def on_device(report, category="parameters"):
    """Most bytes of a category that a step had on the device."""
    rows = report.memory[(report.memory["tier"] == "device") & (report.memory["step"] >= 0)]
    return rows[rows["category"] == category]["bytes"].max()


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("layers", [2, 6])
def test_one_part_at_a_time_is_on_the_device_and_prefetch_more(run, layers, prefetch):
    model = SMALL.replace(layers=layers, tied=False)
    report = run(model, plan_of(prefetch=prefetch), steps=2)
    h, masks = model.hidden, layers * model.seq_len**2
    block = 4 * (12 * h * h + 13 * h)
    assert on_device(report) == (1 + prefetch) * block + masks
    assert on_device(report, "gradients") == block
    tied = run(model.replace(tied=True), plan_of(prefetch=prefetch), steps=2)
    embedding = 4 * (model.vocab + model.seq_len) * h
    assert on_device(tied) == (1 + prefetch) * block + masks + embedding


def test_device_memory_does_not_grow_with_depth_but_for_the_masks(run):
    peaks = []
    for layers in (3, 7):  # of fewer none has one on its way up and one's gradient on its way down
        model = SMALL.replace(layers=layers)
        report = run(model, plan_of(offload={**STATES, "activations": "cpu"}), steps=2)
        peaks.append(report.peak_memory - layers * model.seq_len**2)
    assert peaks[0] == peaks[1]


def test_what_is_between_two_parts_grows_with_m(run):
    """One boundary more for each micro-batch, of activations or of their gradients; beside it what
    a lookup keeps, 8 bytes for each token and position, and the loss.
    """
    sizes = {"microbatch_size": 8, "offload": {**STATES, "activations": "cpu"}}
    peaks = [run(SMALL, plan_of(microbatches=m, **sizes), steps=2).peak_memory for m in (3, 5)]
    s, h = SMALL.seq_len, SMALL.hidden
    assert peaks[1] - peaks[0] == 2 * (4 * 8 * s * h + 8 * (8 * s + s) + 4)


def test_a_cap_at_the_formula_holds_and_one_below_says_what_was_there(run):
    plan = plan_of()
    need = max(sum(parts.values()) for parts in memory.moments(SMALL, plan).values())
    assert run(SMALL, plan, steps=2, memory_limit=int(1.02 * need)).peak_memory <= 1.02 * need
    with pytest.raises(pl.OutOfMemory, match="parameters"):
        run(SMALL, plan, steps=2, memory_limit=int(0.95 * need))


# ---- rows -------------------------------------------------------------------------------------
@pytest.mark.parametrize("change, settings", COUNTED, ids=said)
def test_predicted_rows_are_the_rows_of_a_run(counted, change, settings):
    report = counted(change, settings)
    expected = pl.predict(report.model, report.plan, cluster(), steps=3)
    for rank in range(report.world_size):
        assert order(expected, rank) == order(report, rank)
    comparison = pl.compare(expected, report)
    assert comparison.bytes_agree
    row = comparison.table.loc["bytes moved between tiers per rank"]
    assert row["predicted"] == row["replayed"] == row["measured"] > 0


def test_the_next_part_comes_up_while_this_one_is_at_work(counted):
    """With prefetch=1 the copy of a part stands before the first forward of the one before it."""

    def before_its_copy(prefetch):
        found = order(counted({"tied": False}, {"prefetch": prefetch}), 0)
        ups = [at for at, row in enumerate(found) if row[0] == "copy"]
        return found[: ups[2]].count(("forward", 0, 0, 3))

    assert (before_its_copy(0), before_its_copy(1)) == (2, 1)


def test_on_a_slow_link_it_is_m_times_as_fast():
    slow = cluster().replace(host=pl.Link(alpha=1e-6, bandwidth=1e6))
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
    assert "l2l" in repr(pl.compare(pl.predict(SMALL, plan_of(), cluster()), report))
    shares = report.bubbles(cluster())
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
    for ask in (lambda: pl.run(SMALL, plan), lambda: pl.predict(SMALL, plan, cluster())):
        with pytest.raises(ValueError) as refused:
            ask()
        assert words in str(refused.value)
        assert "legal: " in str(refused.value)


# ---- mutants ----------------------------------------------------------------------------------
RELAY, PIPELINE = "paralab.parallel.relay", "paralab.parallel.pipeline"
SIGNAL = "paralab.parallel.gradient_signal"
MUTANTS = {
    "dropout masks of the first micro-batch for all": (
        RELAY, "before and partial(before, k)", "before and partial(before, 0)"),
    "another micro-batch's gradient": (
        RELAY, "self._gradients[k] = into.pop()", "self._gradients[0] = into.pop()"),
    "no gradient passes on": (PIPELINE, "ctx.into.append(grad)", "pass"),
    "a tied weight leaves before its embedding has added": (
        SIGNAL, "2 * microbatches", "microbatches"),
    "gradients of the last step are still there": (
        "paralab.parallel.offload", "share.adding, share.here = [], None", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_a_mutant_is_caught(kept, model, text, name):
    from paralab.launch import launch_program
    from test_mutants import mutated_run

    model = model.replace(dropout=0.1)
    settings = {"steps": STEPS, "optimizer": "adamw", "lr": 1e-3, "clip_norm": None,
                "data": str(text), "seed": 0, "keep_state": True,
                "offload_folder": None}  # fmt: skip
    plan = plan_of(offload={**dict.fromkeys(ALL, "cpu")})
    alone = kept(model, pl.Plan(microbatches=4))

    def check():
        args = (MUTANTS.get(name), model, plan, settings)
        part = launch_program(mutated_run, 1, args, timeout=60, device="cpu")[0]
        assert_near(alone, types.SimpleNamespace(**part))

    if name is None:
        check()
        return
    with pytest.raises((AssertionError, pl.RankError)) as caught:
        check()
    assert "stands" not in str(caught.value)
