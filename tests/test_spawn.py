"""Ranks that are new interpreters, as on macOS: plans train what one process does, and where
Linux's own counters are missing, what is left out is said.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paralab.launch import _SharedServer
from paralab.ranks.server import START
from processes import python
from together import Trained, cases

HERE = Path(__file__).parent
PLANS = cases("""
    tp=2 sequence_parallel=True microbatches=2
    pp=2 schedule=zb-h1 microbatches=3 recompute=full
    dp=2 zero_stage=3 offload=nvme microbatches=2 clip_norm=0.05
""")


def test_plans_train_what_one_process_does(text, monkeypatch) -> None:
    trained = Trained(PLANS, text)
    trained.alone(PLANS[0])  # and of all: how its rank is started is all the same
    monkeypatch.setenv(START, "spawn")
    own = _SharedServer()  # so that the one that forks, which took seconds to load, is kept
    monkeypatch.setattr(sys.modules["paralab.launch"], "_shared_server", own)
    for one in PLANS:
        trained.assert_equals_the_reference(one)
        assert own._server.method == "spawn"
    own.close()


# ---- without what only Linux has ----------------------------------------------------------------

TRIED = """
import os
assert not os.path.exists("/proc") and not hasattr(os, "sched_getaffinity"), "nothing is hidden"

import contextlib, io, json
import paralab as pl
from paralab import cli
from paralab.instruments import processors, witness

def fails():
    import os
    print("hidden:", not os.path.exists("/proc"))
    1 / 0

said = {}
try:
    pl.launch(fails, ranks=1)
except pl.RankError as error:
    said["failed"] = str(error)
try:
    witness.witness()
except OSError as error:
    said["witness"] = str(error)
said["busy"] = processors.processors_busy()
with contextlib.redirect_stdout(io.StringIO()) as printed:
    said["status"] = cli.main(["doctor"])
said["doctor"] = printed.getvalue()
model = pl.ModelSpec(layers=2, hidden=40, heads=4, seq_len=24)
offload = pl.Plan(zero_stage=3, dp=2, offload="nvme")
said["losses"] = len(pl.run(model, offload, steps=2, progress=False).losses)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict:
    """By Python started so that neither it nor its ranks see /proc, /sys or Linux's own calls."""
    ran = python("-c", TRIED, path=[HERE / "without_linux"], **{START: "spawn"})
    assert ran.returncode == 0, ran.stderr
    printed, told = ran.stdout.splitlines()
    assert printed == "[rank 0] hidden: True"
    return json.loads(told)


def test_a_run_needs_nothing_of_linux_and_the_witness_says_that_it_does(said) -> None:
    assert said["failed"].startswith("rank 0 raised ZeroDivisionError")
    assert said["losses"] == 2 and said["busy"] == 0.0
    assert "the kernel shows no counter of a connection's bytes" in said["witness"]
    assert "no second count can confirm report.traffic()" in said["witness"]


def test_the_doctor_names_what_is_left_out_without_linux(said) -> None:
    assert said["status"] == 0, said["doctor"]
    rows = {line[2:16].strip(): line[16:] for line in said["doctor"].splitlines()}
    for row, words in {
        "memory": "this system does not show how much of it is free",
        "links": "this system does not show how busy other programs are",
        "ranks": "started one by one rather than forked, so a launch takes some seconds",
        "byte counter": "this kernel shows none; one experiment of lab 01 needs it",
    }.items():
        assert words in rows[row]
    assert "all labs run here" in said["doctor"].lower()
