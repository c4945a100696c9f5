"""Offload: the same training wherever its states lie, and every byte that this moves."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time

import numpy as np
import pytest

import paralab as pl
from equality import assert_equal_state, reference, worst
from paralab.interpret import quick
from paralab.report import scratch
from paralab.spec.tiers import WAYS
from paralab.theory.offload import link_bytes, tier_bytes
from test_predict import cluster as slow_cluster

STEPS = 3
PLACES = ("device", "cpu", "nvme")
BUCKET = {"bucket_bytes": 60_000}  # several units in stages 1 and 2
TIERS = [
    (stage, dict(parameters=p, gradients=g, optimizer=o))
    for stage, p, g, o in itertools.product((1, 2, 3), PLACES, PLACES, ("cpu", "nvme"))
    if (p == "device" or stage == 3) and (g == "device" or stage >= 2)
]
ALL = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme", "activations": "nvme"}


def said(value):
    if isinstance(value, dict):
        return " ".join(f"{k}={said(v)}" for k, v in value.items()) or "as is"
    return str(value)


def order(report, rank):
    """Everything a rank does in step 1, in order, with every call's row of the traffic table.

    Of a pipeline without waits: in strict mode a send waits for its receiver.
    """
    spans = report.spans[(report.spans["rank"] == rank) & (report.spans["step"] == 1)]
    calls = report.collectives.set_index("span")
    columns = ["op", "axis", "ranks", "peer", "level", "phase", "payload_bytes", "wire_bytes"]
    found = []
    for row in spans.sort_values("id").itertuples():
        said = (row.kind, row.stage, row.chunk, row.microbatch)
        if row.kind == "comm":
            call = calls.loc[row.id]
            if call["phase"] in ("control", "setup"):
                continue
            said = tuple(call[columns])
        if row.kind != "wait" or report.plan.pp == 1:
            found.append(said)
    return found


def cluster():
    link = pl.Link(alpha=1e-5, bandwidth=1e9)
    return slow_cluster().replace(host=link, disk=link, host_bandwidth=1e10)


def assert_same_bits(report, other):
    for what in ("weights", "gradients"):
        gap, name = worst(getattr(other, what), getattr(report, what))
        assert gap == 0.0, f"{what} of {name} differ by {gap}"
    assert report.losses == other.losses


def assert_near(alone, report):
    """Gradients and weights of one process. AdamW divides by a gradient's size: where that is
    rounding alone, as of the keys' bias, whose gradient is zero, an update is a matter of chance.
    """
    for what in ("gradients", "weights"):
        ours, theirs = ({n: a.copy() for n, a in getattr(r, what).items()} for r in (report, alone))
        for name in ours:
            if name.endswith("qkv.bias"):
                for state in (ours, theirs):
                    state[name] = np.delete(state[name].reshape(3, -1), 1, axis=0)
        gap, name = worst(theirs, ours)
        assert gap < (1e-5 if what == "gradients" else 2e-4), f"{what} of {name}: {gap:.1e}"


# ---- equality ---------------------------------------------------------------------------------
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("stage, tiers", TIERS, ids=said)
def test_adamw_is_that_of_one_process_wherever_its_states_lie(kept, model, stage, tiers, dp):
    plan = pl.Plan(dp=dp, zero_stage=stage, offload=tiers, microbatches=4 // dp, **BUCKET)
    report = kept(model, plan)
    assert_same_bits(report, kept(model, plan.replace(offload=None)))
    alone = kept(model, pl.Plan(microbatches=4))
    if dp == 1 and stage == 1:  # stages 2 and 3 add a micro-batch's gradient up in a buffer apart
        assert_same_bits(report, alone)
    assert_near(alone, report)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_gradients_and_sgd_weights_are_those_of_a_plain_loop(run, model, text, stage, place):
    plan = pl.Plan(dp=2, zero_stage=stage, offload=place, microbatches=2, **BUCKET)
    report = run(model, plan, steps=3, optimizer="sgd", lr=0.5, keep_state=True)
    alone = reference(model, microbatches=4, microbatch_size=2, steps=3, lr=0.5, data=text)
    assert_equal_state(alone, report)


@pytest.mark.parametrize(
    "change, settings, more",
    [
        ({}, {"clip": 0.1}, {}),
        ({}, {"clip": 0.1}, {"offload": {k: v for k, v in ALL.items() if k != "activations"}}),
        ({}, {"clip": 0.1}, {"zero_stage": 1, "offload": "nvme"}),
        ({}, {}, {"precision": "bf16", "offload": "nvme"}),
        ({}, {"clip": 0.1}, {"precision": "bf16", "zero_stage": 2, "dp": 1}),
        ({}, {}, {"precision": "fp16", "zero_stage": 2}),
        ({}, {"optimizer": "sgd"}, {"precision": "fp16", "offload": "nvme"}),
        ({"dropout": 0.1}, {}, {"recompute": "full", "offload": ALL}),
        ({"tied": False}, {}, {"prefetch": 0, "offload": "nvme"}),
        ({}, {}, {"prefetch": 2, "offload": "nvme"}),
        ({"attention": "sdpa"}, {}, {"schedule": "gpipe", "microbatches": 3}),
    ],
    ids=said,
)
def test_everything_else_goes_with_it_bit_for_bit(kept, model, change, settings, more):
    settings = {"clip_norm" if k == "clip" else k: v for k, v in settings.items()}
    model = model.replace(**change)
    plan = pl.Plan(**{"dp": 2, "zero_stage": 3, "offload": "cpu", "microbatches": 2, **more})
    plain = kept(model, plan.replace(offload=None), **settings)
    assert_same_bits(kept(model, plan, **settings), plain)


@pytest.mark.parametrize(
    "more",
    [{"dp": 1}, {"dp": 2}, {"dp": 2, "zero_stage": 1}, {"pp": 2, "microbatches": 4}, {"tp": 2},
     {"pp": 2, "microbatches": 4, "schedule": "interleaved", "virtual_stages": 2}],
    ids=said,
)  # fmt: skip
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_offloaded_activations_give_the_same_gradients(kept, model, place, more):
    model = model.replace(layers=4, vocab=258)
    plan = pl.Plan(**{"microbatches": 2, "recompute": "full", **more})
    report = kept(model, plan.replace(offload={"activations": place}))
    assert_same_bits(report, kept(model, plan))
    moved = report.copies[report.copies["category"] == "activations"]
    assert set(moved["lane"]) == {"h2d", "d2h"} | ({"disk"} if place == "nvme" else set())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage, dp", [(2, 1), (2, 2), (3, 2)])
def test_a_delayed_update_is_one_update_late_and_nothing_else(
    run, model, text, stage, dp, precision
):
    """w(t+1) = w(t) - lr * gradient at w(t-1); w(-1) = w(0)."""
    steps, lr = 4, 0.5
    tiers = {"gradients": "cpu", "optimizer": "cpu", "delayed": True}
    plan = pl.Plan(dp=dp, zero_stage=stage, offload=tiers, precision=precision, **BUCKET)
    report = run(model, plan, steps=steps, optimizer="sgd", lr=lr, keep_state=True)
    if precision == "bf16":  # rounding differs from a plain loop's: it must at least be late
        late = run(model, plan.replace(offload=None), steps=steps, optimizer="sgd", lr=lr,
                   keep_state=True)  # fmt: skip
        assert report.losses[:2] != late.losses[:2] and report.losses[0] == late.losses[0]
        return
    expected = pl.launch(_one_late, ranks=1, args=(model, 2 * dp, steps, lr, str(text)))[0]
    assert_equal_state(expected, report)
    assert report.losses == pytest.approx(expected["losses"], rel=1e-6)


def _one_late(model, samples, steps, lr, data):
    import torch

    gpt, losses = pl.reference.GPT(model), []
    newest = {name: p.detach().clone() for name, p in gpt.named_parameters()}
    for step in range(steps):
        updated = {name: p.clone() for name, p in newest.items()}  # without this step's gradient
        gpt.zero_grad()
        (batch,) = pl.reference.batches(model, step=step, microbatch_size=samples, data=data)
        loss = gpt(*batch)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, p in gpt.named_parameters():
                newest[name] -= lr * p.grad
                p.copy_(updated[name])
    return {
        "losses": losses,
        "weights": {name: p.numpy() for name, p in newest.items()},
        "gradients": {name: p.grad.numpy() for name, p in gpt.named_parameters()},
    }


# ---- bytes ------------------------------------------------------------------------------------
SMALL = pl.ModelSpec(layers=3, hidden=96, heads=4, seq_len=48, attention="explicit")
COUNTED = [
    {"zero_stage": 1, "offload": "cpu"},
    {"zero_stage": 1, "offload": "nvme", "dp": 2},
    {"zero_stage": 2, "offload": "cpu", "precision": "bf16"},
    {"zero_stage": 2, "offload": "nvme", "dp": 2},
    {"zero_stage": 2, "dp": 2,
     "offload": {"gradients": "cpu", "optimizer": "cpu", "delayed": True}},
    {"zero_stage": 3, "offload": "cpu"},
    {"zero_stage": 3, "offload": "cpu", "microbatches": 1, "microbatch_size": 1, "prefetch": 0},
    {"zero_stage": 3, "offload": "nvme", "dp": 2, "prefetch": 2},
    {"zero_stage": 3, "offload": {**ALL, "activations": "device"}, "dp": 2},
    {"zero_stage": 3, "offload": {"optimizer": "nvme"}, "dp": 2},
    {"zero_stage": 3, "offload": {**ALL, "activations": "cpu"}, "recompute": "full"},
    {"zero_stage": 3, "offload": "cpu", "dp": 2, "precision": "bf16"},
    {"zero_stage": 3, "offload": ALL, "recompute": "full", "microbatch_size": 6},
    {"zero_stage": 0, "offload": {"activations": "cpu"}, "recompute": "full"},
    {"zero_stage": 1, "offload": {"activations": "nvme"}, "recompute": "full", "dp": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def counted(run):
    known: dict[str, pl.Report] = {}

    def train(settings):
        plan = pl.Plan(**{"microbatches": 2, "bucket_bytes": 2**18, **settings})
        key = repr(plan)
        if key not in known:
            known[key] = run(SMALL, plan, steps=3)
        return known[key]

    return train


@pytest.mark.parametrize("settings", COUNTED, ids=said)
def test_bytes_over_each_link_are_the_formulas(counted, settings):
    report = counted(settings)
    for rank in range(report.world_size):
        expected = link_bytes(report.model, report.plan, rank=rank)
        for step in (1, 2):
            rows = report.copies
            rows = rows[(rows["rank"] == rank) & (rows["step"] == step)]
            found = {link: {} for link in WAYS}
            for row in rows.itertuples():
                link = found[f"disk {row.op}" if row.lane == "disk" else row.lane]
                link[row.category] = link.get(row.category, 0) + row.bytes
            assert found == expected


@pytest.mark.parametrize("settings", COUNTED, ids=said)
def test_peak_device_memory_is_the_predicted_one(counted, settings):
    report = counted(settings)
    for rank in range(report.world_size):
        table = report.peaks(rank)
        total = table.loc["total"]
        assert total["measured"] == pytest.approx(total["program"], rel=0.05), table


@pytest.mark.parametrize("settings", COUNTED, ids=said)
def test_host_and_files_hold_what_the_formulas_say(counted, settings):
    report = counted(settings)
    for rank in range(report.world_size):
        rows = report.memory[report.memory["rank"] == rank]
        found = {"host": {}, "file": {}}
        for row in rows[rows["tier"] != "device"].itertuples():
            tier = found[row.tier]
            tier[row.category] = max(tier.get(row.category, 0), row.bytes)
        assert found == tier_bytes(report.model, report.plan, rank=rank)


@pytest.mark.parametrize("settings", COUNTED, ids=said)
def test_a_cap_at_the_prediction_holds_and_one_below_says_what_was_there(run, counted, settings):
    model, plan = counted(settings).model, counted(settings).plan
    need = sum(quick.peak(model, plan).values())
    # gloo's thread may let go of a message a moment late
    report = run(model, plan, steps=2, memory_limit=int(1.05 * need))
    assert report.peak_memory <= 1.05 * need
    with pytest.raises(pl.OutOfMemory, match=r"what rank \d held in step 0(.|\n)*activations"):
        run(model, plan, steps=2, memory_limit=int(0.9 * need))


@pytest.mark.parametrize("settings", [s for s in COUNTED if "delayed" not in str(s)], ids=said)
def test_predicted_rows_are_the_rows_of_a_run(counted, settings):
    report = counted(settings)
    expected = pl.predict(report.model, report.plan, cluster(), steps=3)
    for rank in range(report.world_size):
        assert order(expected, rank) == order(report, rank)
    comparison = pl.compare(expected, report)
    assert comparison.bytes_agree
    row = comparison.table.loc["bytes moved between tiers per rank"]
    assert row["predicted"] == row["replayed"] == row["measured"] > 0


def test_delayed_updates_are_predicted_beside_the_next_step(counted):
    settings = next(s for s in COUNTED if "delayed" in str(s))
    report = counted(settings)
    slow = cluster().replace(host_bandwidth=2e8)
    late = pl.predict(SMALL, report.plan, slow, steps=2)
    now = report.plan.replace(offload={"gradients": "cpu", "optimizer": "cpu"})
    assert pl.compare(late, report).bytes_agree
    assert late.step_time < 0.85 * pl.predict(SMALL, now, slow, steps=2).step_time


def test_four_bytes_a_parameter_is_what_zero_offload_moves():
    """ZeRO-Offload, sec. 3: 2 M down and 2 M up, on one device with one micro-batch in 16 bits."""
    plan = pl.Plan(zero_stage=2, offload="cpu", precision="bf16")
    moved = link_bytes(SMALL, plan)
    assert moved["d2h"] == {"gradients": 2 * SMALL.num_params}
    assert moved["h2d"] == {"parameters": 2 * SMALL.num_params}
    between_steps = quick.on("device", quick.weighed(SMALL, plan).before)
    assert between_steps["parameters"] == 2 * SMALL.num_params
    assert not {"gradients", "optimizer"} & between_steps.keys()


@pytest.mark.parametrize("knob", ["h2d", "d2h", "disk"])
def test_a_bandwidth_slows_its_link_down_in_runs_and_in_predictions(run, knob):
    plan = pl.Plan(zero_stage=3, offload=dict(ALL, activations="device", bandwidth={knob: "20MB"}))
    report = run(SMALL, plan, steps=2)
    rows = report.copies[report.copies["lane"] == knob]
    rates = rows["bytes"] / (rows["end"] - rows["start"])
    assert rates.max() <= 20e6 * 1.001
    assert rates.max() > 10e6
    fast = plan.replace(offload=dict(ALL, activations="device"))
    times = [pl.predict(SMALL, p, cluster(), steps=1).step_time for p in (fast, plan)]
    assert times[1] > 1.5 * times[0]
    other = run(SMALL, fast, steps=2)
    assert other.copies[other.copies["lane"] == knob]["bytes"].sum() == rows["bytes"].sum()


def test_a_cluster_that_does_not_state_its_links_is_refused():
    bare = cluster().replace(disk=None)
    pl.predict(SMALL, pl.Plan(zero_stage=1, offload="cpu"), bare, steps=1)
    with pytest.raises(ValueError, match="disk=None: the plan offloads"):
        pl.predict(SMALL, pl.Plan(zero_stage=1, offload="nvme"), bare, steps=1)


# ---- refusals ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, words",
    [
        ({"offload": "cpu"}, "zero_stage=0: offload='cpu' moves what ZeRO shards"),
        ({"offload": {"optimizer": "cpu"}}, "zero_stage=0 does not deal optimizer out"),
        ({"zero_stage": 1, "offload": {"optimizer": "cpu", "gradients": "cpu"}},
         "zero_stage=1 does not deal gradients out"),
        ({"zero_stage": 2, "offload": {"optimizer": "cpu", "parameters": "nvme"}},
         "zero_stage=2 does not deal parameters out"),
        ({"zero_stage": 3, "offload": {"parameters": "cpu"}}, "the update runs where"),
        ({"offload": {"activations": "cpu"}}, "kept when blocks are recomputed"),
        ({"zero_stage": 3, "offload": {}}, "nothing in it leaves the device"),
        ({"zero_stage": 3, "offload": {"optimizer": "nvme", "delayed": True}}, "delayed"),
    ],
    ids=said,
)  # fmt: skip
def test_what_cannot_be_is_refused_before_a_process_starts(settings, words):
    plan = pl.Plan(**settings)
    for ask in (lambda: pl.run(SMALL, plan), lambda: pl.predict(SMALL, plan, cluster())):
        with pytest.raises(ValueError) as refused:
            ask()
        assert words in str(refused.value)
        assert "legal: " in str(refused.value)


@pytest.mark.parametrize(
    "value, words",
    [
        ("disk", "offload='disk'"),
        (3, "not a place"),
        ({"weights": "cpu"}, "Offload has no such field"),
        ({"optimizer": "gpu"}, "offload['optimizer']='gpu'"),
        ({"optimizer": "cpu", "bandwidth": {"pcie": 1}}, "h2d"),
        ({"optimizer": "cpu", "bandwidth": {"disk": "fast"}}, "not a number of bytes"),
        ({"optimizer": "cpu", "bandwidth": 5}, "not a table"),
        ({"optimizer": "cpu", "delayed": 1}, "offload['delayed']=1"),
    ],
    ids=said,
)
def test_a_setting_that_is_none_is_refused_by_its_name(value, words):
    with pytest.raises(ValueError) as refused:
        pl.Plan(zero_stage=1, offload=value)
    assert words in str(refused.value)


def test_a_plan_with_tiers_can_be_saved_compared_and_used_as_a_key(tmp_path, run):
    tiers = {"optimizer": "cpu", "bandwidth": {"h2d": "1GB", "d2h": (5e8).__int__()}}
    plan = pl.Plan(zero_stage=1, offload=tiers)
    assert plan == pl.Plan.from_dict(plan.to_dict())
    assert len({plan, plan.replace(offload=dict(tiers)), pl.Plan()}) == 2
    report = run(SMALL, plan, steps=1)
    report.save(tmp_path / "run.json")
    again = pl.load(tmp_path / "run.json")
    assert again.plan == plan and again.copies.equals(report.copies)


# ---- files ------------------------------------------------------------------------------------
NVME = pl.Plan(zero_stage=3, offload="nvme")


def on(folder, **more):
    tiers = {"parameters": "nvme", "gradients": "cpu", "optimizer": "nvme", "folder": str(folder)}
    return NVME.replace(offload={**tiers, **more})


def test_a_folder_that_does_not_exist_or_has_no_room_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="there is no such folder"):
        pl.run(SMALL, on(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="there is no such folder"):
        pl.run(SMALL, on(tmp_path / "file"))
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(ValueError, match="this plan's files take 4 MiB, and 0 MiB are free"):
        pl.run(SMALL, on(tmp_path))
    assert not [path for path in tmp_path.iterdir() if path.name != "file"]


def test_an_unwritable_folder_is_refused(monkeypatch, tmp_path):
    import tempfile

    def denied(*args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)  # root may write anywhere
    with pytest.raises(ValueError, match="cannot be written to: Permission denied"):
        pl.run(SMALL, on(tmp_path))


def spoiled(run, tmp_path, spoil):
    """The error of a run whose files were spoiled after its third step, and its checkpoints."""
    files, saved = tmp_path / "tier", tmp_path / "saved"
    files.mkdir()
    done = []

    def progress(rank, steps, total):
        if steps >= 3 and not done:
            done.append(steps)
            spoil(next(files.glob("paralab-offload-*")) / "rank-0")

    slow = on(files, bandwidth={"disk": "20MB"})
    with pytest.raises(pl.RankError) as failed:
        run(SMALL, slow, steps=200, save=saved, save_every=1, progress=progress)
    assert done
    assert not list(files.glob("*")) and not list(files.glob(".*"))  # nothing is left there
    return str(failed.value), saved


def goes_on(run, saved, text):
    """The training goes on from the last checkpoint as if nothing had been."""
    step = int(next(iter((saved / "latest").read_text().split())).split("-")[1].split(".")[0])
    more = run(SMALL, NVME, steps=1, resume=saved, keep_state=True)
    whole = run(SMALL, NVME.replace(offload=None), steps=step + 1, keep_state=True)
    gap, name = worst(whole.weights, more.weights)
    assert gap == 0.0, name


def test_a_vanished_folder_is_an_error_with_a_name_and_loses_no_checkpoint(run, tmp_path, text):
    said, saved = spoiled(run, tmp_path, shutil.rmtree)
    assert "offload cannot" in said and "No such file or directory" in said
    assert "resume from the last one" in said
    goes_on(run, saved, text)


def test_a_truncated_file_is_an_error_with_a_name_and_loses_no_checkpoint(run, tmp_path, text):
    def cut(folder):
        for path in folder.glob("states-*"):
            os.truncate(path, path.stat().st_size // 2)

    said, saved = spoiled(run, tmp_path, cut)
    assert "offload cannot read" in said and "somebody has cut it short" in said
    goes_on(run, saved, text)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_an_error_with_a_name_and_loses_no_checkpoint(run, tmp_path, text):
    def fill(folder):
        for path in folder.glob("parameters-*"):
            path.unlink()
            path.symlink_to("/dev/full")

    said, saved = spoiled(run, tmp_path, fill)
    assert "offload cannot" in said
    goes_on(run, saved, text)


def test_a_write_to_a_full_disk_says_how_much_room_there_is(tmp_path):
    import torch

    from paralab.interpret.files import Files

    files = Files(tmp_path / "tier")
    files.create("states-1", 8)
    (tmp_path / "tier" / "states-1").unlink()
    (tmp_path / "tier" / "states-1").symlink_to("/dev/full")
    values = torch.ones(2)
    with pytest.raises(OSError, match="cannot write .*states-1: No space left.*MiB free there"):
        files.write("states-1", values)
    assert values.tolist() == [1, 1]  # the host's copy is as it was


@pytest.mark.parametrize("size", [1, 4095, 4096, 20_000_001])
@pytest.mark.parametrize("askew", [0, 1])
def test_files_give_back_what_they_were_given_past_the_page_cache_or_not(
    tmp_path, monkeypatch, size, askew
):
    from paralab.interpret import files

    monkeypatch.setattr(files.fcntl, "fcntl", spy := Spy(files.fcntl.fcntl, []))
    tier = files.Files(tmp_path / "tier")
    tier.create("states", size)
    kept = files.aligned(size + askew)[askew:]
    kept.random_(0, 256)
    tier.write("states", kept)
    found = files.aligned(size + askew)[askew:].zero_()
    tier.read("states", found)
    assert bool((found == kept).all())
    assert (tmp_path / "tier" / "states").stat().st_size == size
    past = [how for how in spy.flags if how & os.O_DIRECT]
    if tier._direct:  # not every file system knows it
        assert len(past) == 2 * (size >= 4096 and not askew)
    os.truncate(tmp_path / "tier" / "states", size // 2)
    with pytest.raises(OSError, match="somebody has cut it short"):
        tier.read("states", found)
    tier.close()


class Spy:
    """fcntl.fcntl, and the flags it was asked to set."""

    def __init__(self, call, flags):
        self.call, self.flags = call, flags

    def __call__(self, file, command, *how):
        self.flags += how
        return self.call(file, command, *how)


def test_a_file_system_that_has_no_way_past_its_cache_is_used_as_it_is(tmp_path, monkeypatch):
    from paralab.interpret import files

    monkeypatch.setattr(files, "_DIRECT", os.O_DIRECTORY)  # refused for a plain file
    tier = files.Files(tmp_path / "tier")
    tier.create("states", 8192)
    tier.write("states", files.aligned(8192).fill_(7))
    found = files.aligned(8192).zero_()
    tier.read("states", found)
    assert tier._direct == 0 and bool((found == 7).all())
    assert [path.name for path in (tmp_path / "tier").iterdir()] == ["states"]


@pytest.mark.parametrize("killed", ["rank", "caller"])
def test_files_go_after_a_crash(tmp_path, killed):
    """A rank that is killed is cleaned up after by its caller, a caller by the next run."""
    import signal
    import subprocess
    import sys

    code = (
        "import paralab as pl, sys\n"
        "from test_offload import SMALL, on\n"
        "if __name__ == '__main__':\n"
        f"    pl.run(SMALL, on({str(tmp_path)!r}, bandwidth={{'disk': '10MB'}}), steps=10**6)\n"
    )
    script = tmp_path.parent / f"{tmp_path.name}-{killed}.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    child = subprocess.Popen([sys.executable, script], env=env, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (found := list(tmp_path.glob("paralab-offload-*/rank-0/states-*"))):
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.05)
        time.sleep(0.3)
        if killed == "caller":
            child.kill()
            child.wait()
            child.stderr.close()
            deadline = time.monotonic() + 60
            while tmp_path.glob("paralab-offload-*") and time.monotonic() < deadline:
                if not list(tmp_path.glob("paralab-offload-*")):
                    break
                pl.run(SMALL, on(tmp_path), steps=1, progress=False)
        else:
            os.kill(_rank_that_has_open(found[0].parent), signal.SIGKILL)
            _, said = child.communicate(timeout=60)
            assert "RankError" in said
    finally:
        child.kill()
    assert not list(tmp_path.glob("*")) and not list(tmp_path.glob(".paralab*"))


def _rank_that_has_open(folder):
    """Of the processes that belong to a rank, the one that writes into ``folder``."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in os.listdir("/proc"):
            if not process.isdigit():
                continue
            try:
                fds = [os.readlink(f"/proc/{process}/fd/{fd}")
                       for fd in os.listdir(f"/proc/{process}/fd")]  # fmt: skip
            except OSError:
                continue
            if any(fd.startswith(str(folder)) for fd in fds):
                return int(process)
    raise AssertionError("no process has a file open there")


def test_a_run_that_lives_keeps_its_files_when_another_begins(tmp_path, run):
    plan = on(tmp_path)
    with scratch.folder(plan.tiers) as mine:
        (tmp_path / mine / "rank-0").mkdir()
        run(SMALL, plan, steps=1)
        assert os.listdir(tmp_path) == [os.path.basename(mine)]
        assert sorted(os.listdir(mine)) == ["lock", "rank-0"]
    assert not os.listdir(tmp_path)


def test_what_a_late_write_left_behind_goes_with_the_next_run(tmp_path):
    late = tmp_path / f"{scratch.NAME}gone" / "rank-0"
    late.mkdir(parents=True)
    (late / "states-1").write_bytes(b"written after its folder was emptied")
    with scratch.folder(on(tmp_path).tiers) as mine:
        assert os.listdir(tmp_path) == [os.path.basename(mine)]


# ---- checkpoints ------------------------------------------------------------------------------
@pytest.mark.parametrize("first, second", [
    ({"zero_stage": 3, "offload": "nvme", "dp": 2}, {"dp": 2}),
    ({"zero_stage": 2, "offload": "cpu"}, {"zero_stage": 3, "offload": "nvme"}),
    ({"dp": 2}, {"zero_stage": 3, "offload": "nvme", "dp": 2, "precision": "fp32"}),
    ({"zero_stage": 3, "offload": "cpu", "precision": "bf16"},
     {"zero_stage": 1, "offload": "nvme", "precision": "bf16"}),
], ids=said)  # fmt: skip
def test_a_training_goes_on_on_other_tiers(run, model, tmp_path, first, second):
    plans = [pl.Plan(**{"microbatches": 2, **how}) for how in (first, second)]
    plans = [plan.replace(microbatches=4 // plan.dp) for plan in plans]
    run(model, plans[0], steps=3, save=tmp_path / "saved")
    report = run(model, plans[1], steps=2, resume=tmp_path / "saved", keep_state=True)
    alone = pl.Plan(microbatches=4, precision=plans[0].precision)
    whole = run(model, alone, steps=5, keep_state=True)
    if alone.precision == "bf16":
        states = [
            {name: a for name, a in some.weights.items() if not name.endswith("qkv.bias")}
            for some in (whole, report)
        ]  # of the keys' bias the gradient is rounding alone, and AdamW divides by its size
        gap, name = worst(*states)  # stages round their sums of micro-batches in other places
        assert gap < 0.1, name
    else:
        assert_near(whole, report)


def test_a_save_ends_a_delay_and_the_run_that_saves_goes_on_as_the_resumed_one(
    run, model, tmp_path
):
    tiers = {"gradients": "cpu", "optimizer": "cpu", "delayed": True}
    plan = pl.Plan(zero_stage=2, offload=tiers)
    whole = run(model, plan, steps=5, save=tmp_path / "a", save_every=3, keep_state=True)
    run(model, plan, steps=3, save=tmp_path / "b")
    report = run(model, plan, steps=2, resume=tmp_path / "b", keep_state=True)
    gap, name = worst(whole.weights, report.weights)
    assert gap == 0.0, name
    assert set(whole.copies["step"]) == set(range(5))


# ---- lanes ------------------------------------------------------------------------------------
def test_jobs_keep_their_order_and_come_after_what_they_need(recorder):
    from paralab.interpret.lanes import Lane

    lanes, done, draw = [Lane(name, recorder) for name in ("h2d", "d2h", "disk")], [], None
    draw = np.random.default_rng(0)
    jobs = []
    for number in range(300):
        after = [jobs[i] for i in draw.integers(0, number, 2)] if number else []

        def work(number=number, after=after):
            assert all(other.done.is_set() for other in after)
            done.append(number)

        jobs.append(lanes[draw.integers(3)].submit(work, after=after))
    for job in jobs:
        job.wait()
    assert sorted(done) == list(range(300))
    for lane in lanes:
        mine = [number for number, job in enumerate(jobs) if job.lane is lane]
        assert [number for number in done if number in set(mine)] == mine
        lane.close()


def test_an_error_reaches_whoever_waits_and_what_comes_after_does_not_run(recorder):
    from paralab.interpret.lanes import Lane

    lane, other, ran = Lane("disk", recorder), Lane("h2d", recorder), []

    def fail():
        raise OSError("no disk")

    first = lane.submit(fail)
    second = other.submit(lambda: ran.append(1), after=[first])
    with pytest.raises(OSError, match="no disk"):
        second.wait()
    assert not ran
    third = lane.submit(lambda: ran.append(3))  # the lane itself goes on
    third.wait()
    assert ran == [3]


@pytest.fixture
def recorder():
    from paralab.instruments.recorder import Recorder

    made = Recorder(rank=0, world_size=1)
    made.begin_step(0)
    return made


def test_threads_of_lanes_are_not_seen_by_the_ledger(recorder):
    import torch

    from paralab.instruments.ledger import Ledger
    from paralab.interpret.lanes import Lane

    lane, seen = Lane("host", recorder), []
    with Ledger(recorder, device="cpu", limit=10_000):
        lane.submit(lambda: seen.append(torch.ones(10**6).sum())).wait()
    assert seen[0] == 10**6 and threading.active_count() > 1
