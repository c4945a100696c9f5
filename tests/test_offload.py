"""Offload: what its links cost, its files and what may happen to them, its lanes and settings.

That it trains the same, and what it moves, is in test_programs_offload.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import paralab as pl
from paralab.instruments.ledger import Ledger
from paralab.instruments.recorder import Recorder
from paralab.interpret import files, lanes, quick
from paralab.interpret.files import Files
from paralab.interpret.lanes import Lane
from paralab.report import scratch
from paralab.theory.offload import file_bytes, link_bytes, tier_bytes
from patience import HANG_S
from processes import ROOT, until
from stated import cluster as slow_cluster

ALL = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme", "activations": "nvme"}


def said(value):
    if isinstance(value, dict):
        return " ".join(f"{k}={said(v)}" for k, v in value.items()) or "as is"
    return str(value)


def cluster():
    link = pl.Link(alpha=1e-5, bandwidth=1e9)
    return slow_cluster().replace(host=link, disk=link, host_bandwidth=1e10)


# ---- bytes ------------------------------------------------------------------------------------
SMALL = pl.ModelSpec(layers=3, hidden=96, heads=4, seq_len=48, attention="explicit")


def test_four_bytes_a_parameter_is_what_zero_offload_moves():
    """ZeRO-Offload, sec. 3: 2 M down and 2 M up, on one device with one micro-batch in 16 bits."""
    plan = pl.Plan(zero_stage=2, offload="cpu", precision="bf16")
    moved = link_bytes(SMALL, plan)
    assert moved["d2h"] == {"gradients": 2 * SMALL.num_params}
    assert moved["h2d"] == {"parameters": 2 * SMALL.num_params}
    between_steps = quick.on("device", quick.weighed(SMALL, plan).before)
    assert between_steps["parameters"] == 2 * SMALL.num_params
    assert not {"gradients", "optimizer"} & between_steps.keys()


@pytest.mark.parametrize("settings", [{"zero_stage": 3, "offload": ALL, "recompute": "full"},
                                      {"zero_stage": 2, "offload": "cpu", "dp": 2}])  # fmt: skip
def test_a_cap_at_the_prediction_holds_and_one_below_says_what_was_there(run, settings):
    plan = pl.Plan(microbatches=2, **settings)
    need = sum(quick.peak(SMALL, plan).values())
    # gloo's thread may let go of a message a moment late
    report = run(SMALL, plan, steps=2, memory_limit=int(1.05 * need))
    assert report.peak_memory <= 1.05 * need
    with pytest.raises(pl.OutOfMemory, match=r"what rank \d held in step 0(.|\n)*activations"):
        run(SMALL, plan, steps=2, memory_limit=int(0.9 * need))


@pytest.mark.parametrize("asked", [link_bytes, tier_bytes, file_bytes])
@pytest.mark.parametrize("wrong", ["plan", "optimizer"])
def test_bytes_of_what_is_no_plan_or_no_optimizer_are_refused(asked, wrong):
    plan, optimizer = pl.Plan(zero_stage=3, offload="nvme"), "adamw"
    plan, optimizer = (None, optimizer) if wrong == "plan" else (plan, "adam")
    with pytest.raises(ValueError, match=f"{wrong}=.*; legal: "):
        asked(SMALL, plan, optimizer=optimizer)


def seconds(tiers: dict, machine: pl.Cluster, **plan) -> float:
    return pl.predict(SMALL, pl.Plan(offload=tiers, **plan), machine, steps=2).step_time


@pytest.mark.parametrize("knob", ["h2d", "d2h", "disk"])
def test_a_bandwidth_slows_its_link_down_in_predictions(knob):
    fast = dict(ALL, activations="device")
    slow = {**fast, "bandwidth": {knob: "20MB"}}
    assert seconds(slow, cluster(), zero_stage=3) > 1.5 * seconds(fast, cluster(), zero_stage=3)


def test_a_cluster_that_does_not_state_its_links_is_refused():
    bare = cluster().replace(disk=None)
    pl.predict(SMALL, pl.Plan(zero_stage=1, offload="cpu"), bare, steps=1)
    alone = r"disk=None: the plan offloads.*legal: cluster.replace\(disk=pl.Link\([^)]*\)\)$"
    with pytest.raises(ValueError, match=alone):
        pl.predict(SMALL, pl.Plan(zero_stage=1, offload="nvme"), bare, steps=1)


# ---- refusals ---------------------------------------------------------------------------------


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


def test_a_plan_with_tiers_can_be_saved_compared_and_used_as_a_key(tmp_path):
    tiers = {"optimizer": "cpu", "bandwidth": {"h2d": "1GB", "d2h": (5e8).__int__()}}
    plan = pl.Plan(zero_stage=1, offload=tiers)
    assert plan == pl.Plan.from_dict(plan.to_dict())
    assert len({plan, plan.replace(offload=dict(tiers)), pl.Plan()}) == 2
    report = pl.predict(SMALL, plan, cluster(), steps=1)
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
    with pytest.raises(ValueError, match="this plan's files take 4 MB, but only 0 MB are free"):
        pl.run(SMALL, on(tmp_path))
    assert not [path for path in tmp_path.iterdir() if path.name != "file"]


def test_an_unwritable_folder_is_refused(monkeypatch, tmp_path):
    def denied(*args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)  # root may write anywhere
    with pytest.raises(ValueError, match="cannot be written to: Permission denied"):
        pl.run(SMALL, on(tmp_path))


def test_a_write_to_a_full_disk_says_how_much_room_there_is(tmp_path):
    files = Files(tmp_path / "tier")
    files.create("states-1", 8)
    (tmp_path / "tier" / "states-1").unlink()
    (tmp_path / "tier" / "states-1").symlink_to("/dev/full")
    values = torch.ones(2)
    with pytest.raises(OSError, match="cannot write .*states-1: No space left.*MB free there"):
        files.write("states-1", values)
    assert values.tolist() == [1, 1]  # the host's copy is as it was


@pytest.mark.parametrize("size", [1, 4095, 4096, 20_000_001])
@pytest.mark.parametrize("askew", [0, 1])
def test_files_give_back_what_they_were_given_past_the_page_cache_or_not(
    tmp_path, monkeypatch, size, askew
):
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
    with pytest.raises(OSError, match="it has been cut short"):
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
    monkeypatch.setattr(files, "_DIRECT", os.O_DIRECTORY)  # refused for a plain file
    tier = files.Files(tmp_path / "tier")
    tier.create("states", 8192)
    tier.write("states", files.aligned(8192).fill_(7))
    found = files.aligned(8192).zero_()
    tier.read("states", found)
    assert tier._direct == 0 and bool((found == 7).all())
    assert [path.name for path in (tmp_path / "tier").iterdir()] == ["states"]


VICTIM = """
import paralab as pl
if __name__ == "__main__":
    pl.run(pl.ModelSpec.from_dict({model}), pl.Plan.from_dict({plan}), steps=10**6)
"""


@pytest.mark.parametrize("killed", ["rank", "caller"])
def test_files_go_after_a_crash(tmp_path, killed):
    """A rank that is killed is cleaned up after by its caller, a caller by the next run."""
    plan = on(tmp_path, bandwidth={"disk": "10MB"})
    code = VICTIM.format(model=SMALL.to_dict(), plan=plan.to_dict())
    command, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as caller:
        try:
            [rank] = until(lambda: writing_into(tmp_path))
            if killed == "caller":
                caller.kill()
            else:
                rank.kill()
                assert "RankError" in caller.communicate(timeout=HANG_S)[1]
        finally:
            caller.kill()
    if killed == "caller":
        run = functools.partial(pl.run, SMALL, on(tmp_path), steps=1, progress=False)
        assert until(lambda: not (list(tmp_path.iterdir()) and run()))
    assert not list(tmp_path.iterdir())


def writing_into(folder: Path) -> list[psutil.Process]:
    """The processes that have a file of states open there."""

    def writes(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return any(
                file.path.startswith(str(folder)) and "states-" in file.path
                for file in process.open_files()
            )
        return False

    return list(filter(writes, psutil.process_iter()))


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


def test_a_folder_of_another_user_is_left_alone(tmp_path, monkeypatch):
    theirs, exists = tmp_path / f"{scratch.NAME}theirs", Path.exists
    theirs.mkdir()

    def refused(path, **more):
        if theirs in path.parents:
            raise PermissionError(13, "Permission denied")
        return exists(path, **more)

    monkeypatch.setattr(Path, "exists", refused)
    with scratch.folder(on(tmp_path).tiers):
        assert theirs.is_dir()


# ---- lanes ------------------------------------------------------------------------------------
def test_jobs_keep_their_order_and_come_after_what_they_need(recorder):
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


def test_an_error_reaches_what_waits_and_what_comes_after_does_not_run(recorder):
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
    made = Recorder(rank=0, world_size=1)
    made.begin_step(0)
    return made


def test_threads_of_lanes_are_not_seen_by_the_ledger(recorder):
    lane, seen = Lane("host", recorder), []
    with Ledger(recorder, device="cpu", limit=10_000):
        lane.submit(lambda: seen.append(torch.ones(10**6).sum())).wait()
    assert seen[0] == 10**6 and threading.active_count() > 1


def test_waiting_for_the_last_of_a_chain_is_waiting_for_all_of_it(recorder):
    lanes, done = [Lane(name, recorder) for name in ("disk", "host", "d2h")], []
    jobs = []
    for number in range(60):
        after = jobs[-1:] + jobs[-7:-6]

        def work(number=number, after=tuple(after)):
            assert all(other.done.is_set() for other in after)
            done.append(number)

        jobs.append(lanes[number % 3].submit(work, after=after))
    jobs[-1].wait()
    assert done == list(range(60)) and all(job.over for job in jobs)
    recorder.end_step()
    waits = recorder.tables()["spans"]["kind"].count("wait")
    for job in jobs:
        job.wait()  # nothing to wait for, and nothing in the picture
    assert waits == 1 == recorder.tables()["spans"]["kind"].count("wait")
    for lane in lanes:
        lane.close()


def test_a_job_frees_what_it_worked_on_before_it_says_that_it_is_done(recorder):
    lane, alive = Lane("d2h", recorder), []
    into = torch.empty(1000)
    for _ in range(50):
        source = torch.ones(1000)
        alive.append(weakref.ref(source))
        job = lane.submit(lambda source=source: into.copy_(source))
        job.wait()
        del source
        assert alive[-1]() is None
    lane.close()


def test_a_limited_link_takes_the_time_that_its_bytes_would(recorder, monkeypatch):
    slept = []
    monkeypatch.setattr(lanes.time, "sleep", slept.append)
    lane = lanes.Lane("disk", recorder, bandwidth=1e3)
    lane.submit(lambda: None, size=5000).wait()
    assert len(slept) == 1 and 4.0 < slept[0] <= 5.0
    lane.close()
