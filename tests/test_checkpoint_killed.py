"""kill -9 at any moment of a save leaves a checkpoint that is whole, the new one or the one before.

First every step that publishing takes, one after the other, without ranks; then real runs, killed
at random moments.
"""

import itertools
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import paralab as pl
from paralab.launch import _shared_server
from paralab.report import boxes, checkpoints
from patience import HANG_S

FILE = "rank-0.safetensors"
ROUNDS = 6
MODEL = pl.ModelSpec(layers=1, hidden=16, heads=2, seq_len=8)
PLAN = pl.Plan(dp=2, zero_stage=2)


# ---- every step of publishing -------------------------------------------------------------------
class Killed(BaseException):
    """The process is gone: nothing after it runs, no clean-up either."""


class Dying:
    """A module whose functions in ``names`` count together; number ``at`` is where it ends."""

    def __init__(self, module: Any, names: tuple[str, ...], clock: SimpleNamespace) -> None:
        self.module, self.names, self.clock = module, names, clock

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)
        if name not in self.names:
            return function

        def counted(*args: Any, **settings: Any) -> Any:
            self.clock.done += 1
            if self.clock.done > self.clock.at:
                raise Killed
            if name == "rmtree" and self.clock.done == self.clock.at and Path(args[0]).is_dir():
                next(Path(args[0]).iterdir()).unlink()  # it got this far
                raise Killed
            return function(*args, **settings)

        return counted


def write(folder: Path, step: int) -> None:
    """A save as rank 0 does it, of one file that says its step."""
    checkpoints.sweep(folder)
    written = checkpoints.scratch(folder, step)
    written.mkdir()
    [share] = boxes.assigned([[("weight/a", (0,), (1,))]])
    facts = boxes.write(written / FILE, share, [np.float32([step])])
    about = {"model": MODEL.to_dict(), "plan": PLAN.to_dict(), "optimizer": "sgd", "seed": 0,
             "lr": 0.1, "clip_norm": None, "global_batch": 2, "data": "", "step": step,
             "counters": {}, "files": {FILE: facts},
             "tensors": boxes.index({"weight/a": (1,)}, share)}  # fmt: skip
    checkpoints.publish(written, about, step=step)


def readable(folder: Path) -> int:
    """The step of the folder's checkpoint, which is whole."""
    found = checkpoints.find(folder)
    [(_, value)] = load_file(found.folder / FILE).items()
    assert value == found.step
    assert checkpoints.facts(found.folder / FILE) == found.files[FILE]
    return found.step


@pytest.mark.parametrize("again", [3, 4], ids=["another step", "the same step"])
def test_ended_between_any_two_steps_of_publishing_a_checkpoint_is_whole(
    tmp_path, monkeypatch, again
):
    clock, seen = SimpleNamespace(done=0, at=0), set()
    for name, names in (("os", ("rename", "replace", "fsync", "open")), ("shutil", ("rmtree",))):
        dying = Dying({"os": os, "shutil": shutil}[name], names, clock)
        monkeypatch.setattr(checkpoints, name, dying)
    for at in itertools.count():
        folder = tmp_path / str(at)
        folder.mkdir()
        clock.at = 10**9
        for step in (1, 2, again):
            write(folder, step)
        clock.done, clock.at = 0, at
        try:
            write(folder, 4)
            ended = False
        except Killed:
            ended = True
        clock.at = 10**9
        seen.add(readable(folder))
        assert readable(folder) in (again, 4)
        for one in folder.glob("step-*"):
            readable(one)  # what has a checkpoint's name is one
        write(folder, 5)
        assert readable(folder) == 5
        left = {f.name for f in folder.iterdir()} - {"latest"}
        assert len(left) == 2 and all(name.startswith("step-0000000") for name in left)
        if not ended:
            break
    assert seen == {again, 4} and at > 8


def test_ended_in_the_first_save_of_all_the_next_run_starts_from_nothing(tmp_path, monkeypatch):
    clock = SimpleNamespace(done=0, at=0)
    monkeypatch.setattr(checkpoints, "os", Dying(os, ("replace",), clock))
    with pytest.raises(Killed):
        write(tmp_path, 1)
    with pytest.raises(ValueError, match="no file 'latest' that names a checkpoint; legal: .*01"):
        checkpoints.find(tmp_path)
    clock.at = 10**9
    write(tmp_path, 1)
    assert readable(tmp_path) == 1
    assert sorted(f.name for f in tmp_path.iterdir()) == ["latest", "step-00000001.1"]


# ---- real runs ----------------------------------------------------------------------------------
def published(folder: Path) -> str:
    try:
        return (folder / "latest").read_text().split()[0]
    except OSError:
        return ""


def wait_for_another(folder: Path, than: str) -> str:
    give_up = time.monotonic() + HANG_S
    while (now := published(folder)) in ("", than):
        assert time.monotonic() < give_up, "no checkpoint came"
        time.sleep(0.0005)
    return now


def children(pid: int) -> list[int]:
    try:
        found = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for file in found for child in file.read_text().split()]
    except OSError:
        return []


@pytest.mark.timeout(2 * HANG_S)
def test_killed_at_random_moments_a_training_goes_on_where_it_was(run, tmp_path):
    """Each round goes on from where the one before was killed, saves all the time, is killed."""
    folder = tmp_path
    run(MODEL, PLAN, steps=20, save=folder, save_every=1)
    stamps = [(folder / f"step-000000{n}").stat().st_mtime for n in (19, 20)]
    between = stamps[1] - stamps[0]  # from one checkpoint to the next: nearly all of it is saving
    draw, left_over, gone_on = random.Random(0), 0, {}
    forever = {"steps": 10**6, "save": folder, "save_every": 1, "resume": folder}
    for _ in range(ROUNDS):
        before, seen = published(folder), []

        def end(before: str = before, seen: list[str] = seen) -> None:
            wait_for_another(folder, before)
            time.sleep(draw.uniform(0.0, 2 * between))
            seen.append(published(folder))
            for rank in children(_shared_server._server.pid):
                os.kill(rank, signal.SIGKILL)

        executioner = threading.Thread(target=end)
        executioner.start()
        with pytest.raises(pl.RankError, match="was killed by signal 9"):
            run(MODEL, PLAN, **forever)
        executioner.join()
        left_over += any(folder.glob(".saving-*/*"))
        found = checkpoints.find(folder)
        # Not before the ranks are gone: one that is killed in a rename may still end it.
        assert seen[0] <= found.folder.name == published(folder)
        gone_on[found.step] = run(MODEL, PLAN, steps=2, resume=folder).losses
    expected = run(MODEL, PLAN, steps=max(gone_on) + 2).losses
    for step, losses in gone_on.items():
        assert losses == expected[step : step + 2], f"from step {step}"
    run(MODEL, PLAN, steps=1, resume=folder, save=folder)
    assert len([f for f in folder.iterdir() if f.name not in ("latest", ".lock")]) == 2
    assert left_over >= 1, "none was killed in the middle of a save"
