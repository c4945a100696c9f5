"""The kernel agrees with theory, and finds out who moves more than his name says."""

from pathlib import Path

import pytest

from paralab.instruments import witness as module
from paralab.instruments.witness import NATIVE, OPS, loopback_bytes, theory_bytes, witness
from paralab.theory.traffic import wire_bytes

linux = pytest.mark.skipif(
    not Path("/proc/net/dev").exists(), reason="the kernel's counter is Linux's"
)


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
        with pytest.raises(OSError, match="only Linux has one"):
            witness(2, ("send",))


@linux
def test_the_counter_is_the_loopbacks(monkeypatch, tmp_path):
    assert loopback_bytes() >= 0
    (tmp_path / "dev").write_text("  face\n  eth0: 5 1\n    lo: 123 4 0\n")
    monkeypatch.setattr(module, "_COUNTERS", tmp_path / "dev")
    assert loopback_bytes() == 123


def test_a_failing_rank_ends_the_witness_with_its_error():
    """A rank does not wait for ever at a gate for one that is gone."""
    import paralab as pl

    with pytest.raises(pl.RankError, match="ZeroDivisionError"):
        module.between_gates(_fails, 2, (), timeout=30)


def _fails(context, gate):
    gate()
    if context.rank:
        return context.rank / 0
    gate()
