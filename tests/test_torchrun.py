"""Several machines: torchrun starts the ranks, each writes its part, `pl.load` merges them on one
clock.

The two machines are two torchrun agents on this one, so the true clock offset is known: none.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import paralab as pl

MODEL = pl.ModelSpec(layers=2, hidden=40, heads=4, seq_len=24)
SHAPE = ["--layers=2", "--hidden=40", "--heads=4", "--seq-len=24", "--microbatch-size=2",
         "--optimizer=sgd"]  # fmt: skip


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def two_machines(
    *args: str, ranks: int = 2, per_node: tuple[str, ...] = ("", "")
) -> list[tuple[int, str]]:
    """Two agents, each with as many ranks; (exit code, what it printed) of both."""
    port = free_port()
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
             "--nproc-per-node", str(ranks),
             "--master-addr", "127.0.0.1", "--master-port", str(port),
             "-m", "paralab", "run", *SHAPE, *args, *per_node[node].split()],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in (0, 1)
    ]  # fmt: skip
    try:
        said = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, text) for agent, text in zip(agents, said, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text) -> Path:
    parts = tmp_path_factory.mktemp("torchrun") / "parts"
    ended = two_machines("--dp", "4", "--steps", "3", "--data", str(text), "--out", str(parts))
    assert [code for code, _ in ended] == [0, 0], ended
    assert "pl.load" in ended[0][1] and "pl.load" not in ended[1][1]
    return parts


def test_the_parts_merge_into_the_report_that_one_machine_would_give(folder, run):
    merged = pl.load(folder)
    here = run(MODEL, pl.Plan(dp=4, microbatch_size=2), steps=3, optimizer="sgd")
    assert merged.plan == here.plan and merged.model == here.model
    np.testing.assert_array_equal(merged.losses, here.losses)
    columns = ["call", "rank", "step", "op", "axis", "payload_bytes", "wire_bytes"]
    keep = merged.collectives.query("phase == 'grad_sync'")[columns].reset_index(drop=True)
    assert keep.equals(
        here.collectives.query("phase == 'grad_sync'")[columns].reset_index(drop=True)
    )


def test_clock_offsets_are_measured_and_stated(folder):
    stated = pl.load(folder).meta["clock_offsets"]
    assert stated["offset_s"][0] == stated["uncertainty_s"][0] == 0.0
    for offset, uncertainty in zip(
        stated["offset_s"][1:], stated["uncertainty_s"][1:], strict=True
    ):
        assert 0 < uncertainty < 0.05
        assert abs(offset) <= uncertainty  # one machine, one clock: the truth is 0


def test_bytes_between_machines_are_told_from_bytes_inside(folder):
    report = pl.load(folder)
    assert report.meta["nodes"] == [0, 0, 1, 1]
    assert set(report.collectives.query("phase == 'grad_sync'").level) == {"inter"}
    by_level = report.traffic(by="level").set_index("level").bytes
    assert by_level["inter"] == by_level["intra"] > 0  # ring 0-1-2-3: two of four links cross


def test_a_machine_that_was_started_otherwise_is_named(tmp_path, text):
    other = tmp_path / "other.txt"
    other.write_text("x" * 5000)
    args = ("--dp", "2", "--steps", "2", "--out", str(tmp_path / "out"))
    for per_node, said in (
        ((f"--data {text}", f"--data {other}"), "reads another text"),
        ((f"--data {text} --lr 0.1", f"--data {text} --lr 0.2"), "another model, plan or settings"),
    ):
        ended = two_machines(*args, ranks=1, per_node=per_node)
        assert all(code != 0 for code, _ in ended)
        assert said in ended[0][1] + ended[1][1]


def test_a_plan_of_another_size_is_refused(tmp_path):
    ended = two_machines("--dp", "3", "--out", str(tmp_path / "out"))
    assert all(code != 0 for code, _ in ended)
    for _, said in ended:  # once on every machine
        assert said.count("the plan needs 3 ranks, torchrun started 4") == 1


def test_the_rank_that_says_why_goes_first(tmp_path):
    """torchrun ends all ranks of a machine with the first that goes, heard or not."""

    def rank(local: str) -> subprocess.Popen:
        started = dict(RANK=local, LOCAL_RANK=local, WORLD_SIZE="2", MASTER_ADDR="localhost")
        command = [sys.executable, "-m", "paralab", "run", "--dp", "3", "--out", str(tmp_path)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | started)

    with rank("1") as silent:
        with rank("0") as speaker:
            assert b"the plan needs 3 ranks" in speaker.communicate(timeout=60)[1]
        with pytest.raises(subprocess.TimeoutExpired):
            silent.wait(2.0)
        silent.terminate()
