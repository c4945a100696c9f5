"""The kernel agrees with theory, and finds out who moves more than his name says."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from paralab.instruments import witness as module
from paralab.instruments.witness import NATIVE, OPS, loopback_bytes, theory_bytes, witness
from paralab.theory.traffic import wire_bytes

linux = pytest.mark.skipif(
    not Path("/proc/net/dev").exists(), reason="the kernel's counter is Linux's"
)


TABLE = f"""
import wire_witness
from paralab.instruments.witness import witness

if __name__ == "__main__":
    wire_witness.bring_loopback_up()
    ops = ("reduce_scatter", {NATIVE!r}, "ring_all_reduce")
    print("table", witness(4, ops, nbytes=4 * 2**20).to_json())
"""


@linux
def test_the_kernel_confirms_theory_and_the_ledger_and_convicts_the_native_reduce_scatter(tmp_path):
    """In a network of its own where that is allowed: other tests use the loopback as well."""
    script = tmp_path / "table.py"
    script.write_text(TABLE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    for private in (["unshare", "-rn"], []):
        with contextlib.suppress(FileNotFoundError):
            done = subprocess.run([*private, sys.executable, str(script)], capture_output=True,
                                  text=True, timeout=60, env=environment)  # fmt: skip
            if done.returncode == 0 or not private:
                break
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("table ")]
    assert "Warning" not in done.stderr + done.stdout
    table = pd.DataFrame(json.loads(line.removeprefix("table "))).set_index("op")
    for op in ("reduce_scatter", "ring_all_reduce"):
        assert table.ledger_bytes[op] == table.theory_bytes[op]
        assert 0.999 <= table.ratio[op] <= 1.02
    assert 1.98 <= table.ratio[NATIVE] <= 2.05
    assert table.ledger_bytes.isna().tolist() == [False, True, False]  # it went past the ledger


def test_theory_knows_every_op_that_the_witness_takes():
    for op in OPS:
        assert theory_bytes(op, 4, 4096) > 0
    assert theory_bytes(NATIVE, 4, 4096) == 4 * wire_bytes("reduce_scatter", 4096, 4)
    assert theory_bytes("tree_all_reduce", 4, 4096) == 6 * 4096


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"ranks": 1}, "ranks=1"), ({"ops": ("gossip",)}, "ops='gossip'.*'ring_all_reduce'"),
     ({"nbytes": 8}, "nbytes=8")],
)  # fmt: skip
def test_what_cannot_be_witnessed_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        witness(**settings)


def test_a_kernel_without_the_counter_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_COUNTERS", tmp_path / "dev")
    for text in (None, "eth0: 1 2 3"):
        if text:
            (tmp_path / "dev").write_text(text)
        with pytest.raises(OSError, match="only Linux has it"):
            witness(2, ("send",))


@linux
def test_the_counter_is_the_loopbacks(monkeypatch, tmp_path):
    assert loopback_bytes() >= 0
    (tmp_path / "dev").write_text("  face\n  eth0: 5 1\n    lo: 123 4 0\n")
    monkeypatch.setattr(module, "_COUNTERS", tmp_path / "dev")
    assert loopback_bytes() == 123


def test_a_failing_rank_ends_the_witness_with_its_error():
    """The thread that keeps the gates does not wait for ever for ranks that are gone."""
    import paralab as pl

    with pytest.raises(pl.RankError, match="ZeroDivisionError"):
        module.between_gates(_fails, 2, (), gates=3, timeout=30)


def _fails(context, gate):
    gate()
    return context.rank / 0
