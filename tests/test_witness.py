"""The kernel agrees with theory, and finds out who moves more than his name says."""

import pytest

import paralab as pl
from paralab.instruments import witness as module
from paralab.instruments.witness import NATIVE, OPS, loopback_bytes, theory_bytes, witness
from paralab.theory.traffic import wire_bytes
from refusals import refuses


def test_theory_knows_every_op_that_the_witness_takes():
    for op in OPS:
        assert theory_bytes(op, 4, 4096) > 0
    assert theory_bytes(NATIVE, 4, 4096) == 4 * wire_bytes("reduce_scatter", 4096, 4)
    assert theory_bytes("tree_all_reduce", 4, 4096) == 6 * 4096


def test_what_cannot_be_witnessed_is_refused():
    refuses("ranks=1", witness, ranks=1)
    refuses("ops='gossip'.*'ring_all_reduce'", witness, ops=("gossip",))
    refuses("nbytes=8", witness, nbytes=8)


def test_the_counter_is_the_loopbacks_and_a_kernel_without_it_is_named(monkeypatch, tmp_path):
    file = tmp_path / "dev"
    monkeypatch.setattr(module, "_COUNTERS", file)
    with pytest.raises(OSError, match="only Linux has one"):
        witness(2, ("send",))
    file.write_text("eth0: 1 2 3")
    with pytest.raises(OSError, match="only Linux has one"):
        witness(2, ("send",))
    file.write_text("  face\n  eth0: 5 1\n    lo: 123 4 0\n")
    assert loopback_bytes() == 123


def test_a_failing_rank_ends_the_witness_with_its_error():
    """A rank does not wait for ever at a gate for one that is gone."""
    with pytest.raises(pl.RankError, match="ZeroDivisionError"):
        module.between_gates(_fails, 2, (), timeout=30)


def _fails(context, gate):
    gate()
    if context.rank:
        return context.rank / 0
    gate()
