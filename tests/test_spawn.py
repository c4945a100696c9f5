"""Ranks that are new interpreters, as on macOS: plans train what one process does, and where
Linux's own counters are missing, what is left out is said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from equality import TOLERANCE, assert_equal_state, references
from pairwise import Case, cover
from paralab.launch import _house
from paralab.ranks.server import START
from patience import HANG_S

HERE = Path(__file__).parent
STEPS, LR = 2, 0.5
WANTED = ("tp=2", "schedule=zb-h1", "zero_stage=3", "offload=nvme")

pytestmark = pytest.mark.timeout(900)  # a launch takes seconds


def chosen() -> list[Case]:
    """For each of WANTED the first composed plan on at most four ranks that has it."""
    small = [one for one in cover().cases if one.plan.world_size <= 4]
    found = [next(one for one in small if wanted in one.name.split()) for wanted in WANTED]
    return list({one.name: one for one in found}.values())


@pytest.mark.filterwarnings("ignore:zero_stage=3 with pp")
def test_plans_train_what_one_process_does(run, text, monkeypatch) -> None:
    monkeypatch.setenv(START, "spawn")
    cases = chosen()
    asked = [
        {
            "model": one.model,
            "microbatches": one.plan.dp * one.plan.microbatches,
            "microbatch_size": one.plan.microbatch_size,
            "steps": STEPS,
            "lr": LR,
            "data": text,
            "precision": one.plan.precision,
            "clip_norm": one.clip_norm,
        }
        for one in cases
    ]
    settings = {"steps": STEPS, "optimizer": "sgd", "lr": LR, "keep_state": True}
    for one, alone in zip(cases, references(asked), strict=True):
        report = run(one.model, one.plan, clip_norm=one.clip_norm, **settings)
        assert _house._server.method == "spawn"
        assert_equal_state(alone, report, precision=one.plan.precision)
        assert report.losses == pytest.approx(alone["losses"], rel=TOLERANCE[one.plan.precision])


# ---- without what only Linux has ----------------------------------------------------------------

TRIED = """
import os
assert not os.path.exists("/proc") and not hasattr(os, "sched_getaffinity"), "nothing is hidden"

import json
import paralab as pl
from paralab.instruments import processors, witness

def hidden():
    import os
    return not os.path.exists("/proc")

said = {"hidden from ranks": pl.launch(hidden, ranks=1)[0]}
try:
    witness.witness()
except OSError as error:
    said["witness"] = str(error)
said["busy"] = processors.processors_busy()
model = pl.ModelSpec(layers=2, hidden=40, heads=4, seq_len=24)
offload = pl.Plan(zero_stage=3, dp=2, offload="nvme")
said["losses"] = len(pl.run(model, offload, steps=2, progress=False).losses)
print(json.dumps(said))
"""


def without_linux(*command: str) -> subprocess.CompletedProcess:
    """Python started so that neither it nor its ranks see /proc, /sys or Linux's own calls."""
    path = os.pathsep.join(map(str, (HERE / "without_linux", HERE.parent)))
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, START: "spawn"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def test_a_run_needs_nothing_of_linux_and_the_witness_says_that_it_does() -> None:
    ran = without_linux("-c", TRIED)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["hidden from ranks"] and said["losses"] == 2 and said["busy"] == 0.0
    assert said["witness"].startswith("the kernel shows no counter of the loopback interface")
    assert (
        "only Linux has it; elsewhere the ledger (report.traffic()) has no witness"
        in said["witness"]
    )


def test_the_doctor_names_what_is_left_out_without_linux() -> None:
    ran = without_linux("-m", "paralab", "doctor")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = {line[2:16].strip(): line[16:] for line in ran.stdout.splitlines()}
    assert "how much of it is free is not shown here" in rows["memory"]
    assert "how busy other programs are is not shown here" in rows["links"]
    assert rows["/dev/shm"] == "none"
    assert rows["ranks"].startswith("started one by one, some seconds per launch")
    assert "none that the kernel shows: lab 01's witness is Linux's" in rows["byte counter"]
    assert "without O_DIRECT" in rows["temp folder"]
    assert "all labs run here" in ran.stdout.lower()
