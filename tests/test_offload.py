"""Offload: what its links cost, its files and what may happen to them, its lanes and settings.

That it trains the same, and what it moves, is in test_programs_offload.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch

import paralab as pl
from paralab.instruments.recorder import Recorder
from paralab.interpret import files, lanes, quick
from paralab.interpret.lanes import Lane
from paralab.interpret.memory import moments
from paralab.report import scratch
from paralab.theory.offload import file_bytes, link_bytes
from patience import HANG_S
from processes import ROOT, until
from refusals import refuses
from stated import TIERS

STATES = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}


# ---- bytes ------------------------------------------------------------------------------------
SMALL = pl.ModelSpec(layers=3, hidden=96, heads=4, seq_len=48, attention="explicit")
NVME = pl.Plan(zero_stage=3, offload="nvme")


def test_four_bytes_a_parameter_is_what_zero_offload_moves():
    """ZeRO-Offload, sec. 3: 2 M down and 2 M up, on one device with one micro-batch in 16 bits."""
    plan = pl.Plan(zero_stage=2, offload="cpu", precision="bf16")
    moved = link_bytes(SMALL, plan)
    assert moved["d2h"] == {"gradients": 2 * SMALL.num_params}
    assert moved["h2d"] == {"parameters": 2 * SMALL.num_params}
    _, _, before = next(moments(quick.program_of(SMALL, plan, "adamw", 0)))
    between_steps = quick.on("device", before)
    assert between_steps["parameters"] == 2 * SMALL.num_params
    assert not {"gradients", "optimizer"} & between_steps.keys()


def test_bytes_of_what_is_no_plan_or_no_optimizer_are_refused():
    for asked in (link_bytes, file_bytes):
        refuses("plan=.*; legal: ", asked, SMALL, None)
    refuses("optimizer=.*; legal: ", file_bytes, SMALL, NVME, optimizer="adam")


@pytest.mark.parametrize("knob", ["h2d", "d2h", "disk"])
def test_a_bandwidth_slows_its_link_down_in_predictions(knob):
    took = [
        pl.predict(SMALL, NVME.replace(offload=tiers), TIERS, steps=2).step_time
        for tiers in (STATES, STATES | {"bandwidth": {knob: "20MB"}})
    ]
    assert took[1] > 1.5 * took[0]


def test_a_cluster_that_does_not_state_its_links_is_refused():
    bare = TIERS.replace(disk=None)
    pl.predict(SMALL, pl.Plan(zero_stage=1, offload="cpu"), bare, steps=1)
    alone = r"disk=None: the plan offloads.*legal: cluster.replace\(disk=pl.Link\([^)]*\)\)$"
    refuses(alone, pl.predict, SMALL, pl.Plan(zero_stage=1, offload="nvme"), bare, steps=1)


# ---- refusals ---------------------------------------------------------------------------------


REFUSED = {
    "offload='disk'": "disk",
    "not a place": 3,
    "Offload has no such field": {"weights": "cpu"},
    "offload['optimizer']='gpu'": {"optimizer": "gpu"},
    "h2d": {"optimizer": "cpu", "bandwidth": {"pcie": 1}},
    "not a whole number of bytes": {"optimizer": "cpu", "bandwidth": {"disk": "fast"}},
    "not a table": {"optimizer": "cpu", "bandwidth": 5},
    "offload['delayed']=1": {"optimizer": "cpu", "delayed": 1},
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_setting_that_is_none_is_refused_by_its_name(words):
    refuses(re.escape(words), pl.Plan, zero_stage=1, offload=REFUSED[words])


def test_a_plan_with_tiers_can_be_saved_compared_and_used_as_a_key(tmp_path):
    tiers = {"optimizer": "cpu", "bandwidth": {"h2d": "1GB", "d2h": 500_000_000}}
    plan = pl.Plan(zero_stage=1, offload=tiers)
    assert plan == pl.Plan.from_dict(plan.to_dict())
    assert len({plan, plan.replace(offload=dict(tiers)), pl.Plan()}) == 2
    report = pl.predict(SMALL, plan, TIERS, steps=1)
    report.save(tmp_path / "run.json")
    again = pl.load(tmp_path / "run.json")
    assert again.plan == plan and again.copies.equals(report.copies)


# ---- files ------------------------------------------------------------------------------------


def on(folder, **more):
    tiers = {"parameters": "nvme", "gradients": "cpu", "optimizer": "nvme", "folder": str(folder)}
    return NVME.replace(offload={**tiers, **more})


def test_a_folder_that_is_none_or_has_no_room_or_is_not_ones_own_is_refused(tmp_path, monkeypatch):
    def denied(*args, **more):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none", tmp_path / "file"):
        refuses("there is no such folder", pl.run, SMALL, on(path))
    refuses("opened: Could not determine home", pl.run, SMALL, on("~no such user/states"))
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda path: full)
        words = "this plan's files take [34][.][0-9]+ MB, but only 1,000 B are free"
        refuses(words, pl.run, SMALL, on(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", denied)  # root may write anywhere
    refuses("cannot be written to: Permission denied", pl.run, SMALL, on(tmp_path))
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_to_a_full_disk_says_how_much_room_there_is(tmp_path):
    tier, values = files.Files(tmp_path / "tier"), torch.ones(2)
    tier.create("states-1", 8)
    (tmp_path / "tier" / "states-1").unlink()
    (tmp_path / "tier" / "states-1").symlink_to("/dev/full")
    with pytest.raises(OSError, match="cannot write .*states-1: No space left.*[0-9] [A-Z]?B free"):
        tier.write("states-1", values)
    assert values.tolist() == [1, 1]  # the host's copy is as it was


@pytest.mark.parametrize("size", [1, 4095, 4096, 20_000_001])
@pytest.mark.parametrize("askew", [0, 1])
def test_files_give_back_what_they_were_given_past_the_page_cache_or_not(tmp_path, size, askew):
    tier = files.Files(tmp_path / "tier")
    tier.create("states", size)
    kept = files.aligned(size + askew)[askew:]
    kept.random_(0, 256)
    found = files.aligned(size + askew)[askew:].zero_()
    with patch.object(files.fcntl, "fcntl", wraps=files.fcntl.fcntl) as spy:
        tier.write("states", kept)
        tier.read("states", found)
    assert bool((found == kept).all())
    assert (tmp_path / "tier" / "states").stat().st_size == size
    past = [call for call in spy.call_args_list if any(how & os.O_DIRECT for how in call.args[2:])]
    if tier._direct:  # not every file system knows it
        assert len(past) == 2 * (size >= 4096 and not askew)
    os.truncate(tmp_path / "tier" / "states", size // 2)
    with pytest.raises(OSError, match="it has been cut short"):
        tier.read("states", found)
    tier.close()


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
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            paths = [file.path for file in process.open_files()]
            if any(path.startswith(str(folder)) and "states-" in path for path in paths):
                found.append(process)
    return found


def test_a_run_that_lives_keeps_its_files_when_another_begins(tmp_path, run, monkeypatch):
    plan, flock = on(tmp_path), scratch.fcntl.flock

    def late(file, how):
        if how == scratch.fcntl.LOCK_EX:  # another run begins before this one has its lock
            scratch._sweep(tmp_path)
        flock(file, how)

    monkeypatch.setattr(scratch.fcntl, "flock", late)
    with scratch.folder(plan.tiers) as mine:
        (tmp_path / mine / "rank-0").mkdir()
        run(SMALL, plan, steps=1)
        assert os.listdir(tmp_path) == [os.path.basename(mine)]
        assert sorted(os.listdir(mine)) == ["lock", "rank-0"]
    assert not os.listdir(tmp_path)


def test_the_next_run_removes_what_a_dead_one_left_and_nothing_of_another_user(
    tmp_path, monkeypatch
):
    late, theirs = tmp_path / f"{scratch.NAME}gone" / "rank-0", tmp_path / f"{scratch.NAME}theirs"
    late.mkdir(parents=True)
    theirs.mkdir()
    (late / "states-1").write_bytes(b"written after its folder was emptied")
    exists = Path.exists

    def refused(path, **more):
        if theirs in path.parents:
            raise PermissionError(13, "Permission denied")
        return exists(path, **more)

    monkeypatch.setattr(Path, "exists", refused)
    with scratch.folder(on(tmp_path).tiers) as mine:
        assert set(os.listdir(tmp_path)) == {os.path.basename(mine), theirs.name}


def test_on_a_file_system_without_locks_no_run_removes_the_files_of_another(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(scratch.fcntl, "flock", refused)
    tiers = on(tmp_path).tiers
    with scratch.folder(tiers) as mine, scratch.folder(tiers) as other:
        assert set(os.listdir(tmp_path)) == {os.path.basename(one) for one in (mine, other)}
    assert not os.listdir(tmp_path)


# ---- lanes ------------------------------------------------------------------------------------
def test_jobs_keep_their_order_and_come_after_what_they_need(recorder):
    own, draw = [Lane(name, recorder) for name in ("h2d", "d2h", "disk")], np.random.default_rng(0)
    jobs, done = [], []
    for number in range(300):
        after = [jobs[i] for i in draw.integers(0, number, 2 if number else 0)]

        def work(number=number, after=after):
            assert all(other.done.is_set() for other in after)
            done.append(number)

        jobs.append(own[draw.integers(3)].submit(work, after=after))
    for job in jobs:
        job.wait()
    assert sorted(done) == list(range(300))
    for lane in own:
        mine = [number for number, job in enumerate(jobs) if job.lane is lane]
        assert [number for number in done if number in set(mine)] == mine
        lane.close()


def test_an_error_reaches_what_waits_and_what_comes_after_does_not_run(recorder):
    lane, ran = Lane("disk", recorder), []
    failed = lane.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: ran.append("after it"), after=[failed]).wait()
    lane.submit(lambda: ran.append("next")).wait()  # the lane itself goes on
    lane.close()
    assert ran == ["next"]


@pytest.fixture
def recorder():
    made = Recorder(rank=0, world_size=1)
    made.begin_step(0)
    return made


def test_waiting_for_the_last_of_a_chain_is_waiting_for_all_of_it(recorder):
    own, jobs = [Lane(name, recorder) for name in ("disk", "host", "d2h")], []
    for number in range(60):
        jobs.append(own[number % 3].submit(lambda: None, after=jobs[-1:] + jobs[-7:-6]))
    for job in (jobs[-1], *jobs):
        job.wait()  # the first time alone is in the picture
        assert all(one.over for one in jobs)
    recorder.end_step()
    assert recorder.tables()["spans"]["kind"].count("wait") == 1
    for lane in own:
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
