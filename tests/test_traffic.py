"""The traffic ledger is true: equal to the closed forms, and to what the kernel counted."""

import json
import math
import os
import socket
import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paralab as pl
from foreign_programs import PROGRAMS, theory
from paralab.instruments import witness as instrument
from paralab.instruments.witness import NATIVE, received_bytes, theory_bytes, witness
from paralab.parallel.buckets import assign, units
from paralab.theory.traffic import OPS, edges, far_share, wire_bytes
from patience import HANG_S
from processes import ran
from refusals import refuses


@given(op=st.sampled_from(OPS), payload=st.integers(0, 10**9), n=st.integers(1, 9), data=st.data())
def test_edges_add_up_to_the_wire_bytes(op, payload, n, data):
    ranks = data.draw(st.permutations(range(10, 10 + n)))
    rank = data.draw(st.sampled_from(ranks))
    peer = data.draw(st.sampled_from(ranks))
    sent = edges(op, ranks, rank, payload, peer)
    root = ranks.index(peer) if op in ("broadcast", "reduce") else 0
    alone = n == 1 and op == "send"  # there is no rank to send to
    assert alone or sum(sent.values()) == wire_bytes(op, payload, n, ranks.index(rank), root)
    assert rank not in sent and set(sent) <= set(ranks) or op == "send"


@given(payload=st.integers(0, 10**9), n=st.integers(1, 64))
def test_group_totals_are_the_textbook_volumes(payload, n):
    def total(op: str) -> int:
        return sum(wire_bytes(op, payload, n, i, root=n // 2) for i in range(n))

    assert total("all_reduce") == 2 * (n - 1) * payload
    for op in ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"):
        assert total(op) == (n - 1) * payload
    assert far_share("all_to_all", range(16), None, -1, lambda r: r // 8) == 8 / 15  # without bytes


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.integers(1, 1000))
def test_buckets_hold_every_parameter_once_in_reverse_order(numels, enough):
    sizes = {f"layer {number}": numel for number, numel in enumerate(numels)}
    buckets = assign(sizes, enough)
    assert [name for bucket in buckets for name in bucket] == list(reversed(sizes))
    for bucket in buckets:
        filled = sum(sizes[name] for name in bucket)
        assert filled - sizes[bucket[-1]] < enough
        assert filled >= enough or bucket is buckets[-1]


@given(dp=st.integers(2, 7), stage=st.integers(0, 2), bucket_bytes=st.integers(1, 9000))
def test_a_bucket_is_padded_so_that_every_rank_has_an_equal_share(dp, stage, bucket_bytes):
    model = pl.ModelSpec(layers=1, hidden=12, heads=2, seq_len=6, vocab=10)
    sizes = {name: math.prod(shape) for name, shape in model.parameter_shapes().items()}
    plan = pl.Plan(dp=dp, zero_stage=stage, bucket_bytes=bucket_bytes)
    for unit in units(sizes, model, plan):
        filled = sum(sizes[name] for name in unit.names)
        assert filled <= unit.numel < filled + dp and unit.numel % dp == 0


# ---- what the kernel counted ---------------------------------------------------------------------
@pytest.fixture(scope="module")
def counted() -> dict[str, dict]:
    """One run of wire_witness.py."""
    if sys.platform != "linux":
        pytest.skip("the kernel's counter is Linux's")
    command = [sys.executable, str(Path(__file__).with_name("wire_witness.py"))]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = ran(*command, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_ledger_agrees_with_the_kernels_counter_within_one_percent(counted):
    """Every operation, and steps of ZeRO's four stages, of the modes of tensor parallelism, and of
    a pipeline.
    """
    assert (len(counted["calls"]), len(counted["steps"])) == (11, 10)
    for name, seen in (counted["calls"] | counted["steps"]).items():
        assert seen["ledger"] > 2**20
        gap = seen["kernel"] / seen["ledger"] - 1
        assert -1e-3 <= gap <= 0.01, f"{name}: ledger {seen['ledger']:.0f} B, kernel {gap:+.2%}"
    # By the kernel, not by the ledger's own formula: (n-1) S for the group of n.
    for op in ("reduce_scatter", "reduce", "ring_reduce_scatter", "ring_all_gather"):
        assert counted["calls"][op]["kernel"] <= 1.01 * 3 * counted["calls"][op]["payload"], op


def test_the_witness_confirms_theory_and_convicts_the_native_reduce_scatter(counted):
    table = pd.DataFrame(counted["table"]).set_index("op")
    assert table.ledger_bytes["reduce_scatter"] == table.theory_bytes["reduce_scatter"]
    assert 0.999 <= table.ratio["reduce_scatter"] <= 1.02
    assert 1.98 <= table.ratio[NATIVE] <= 2.05
    assert table.ledger_bytes.isna().tolist() == [False, True]  # it went past the ledger


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_kernel_counts_the_recorded_bytes_of_programs_that_know_nothing_of_it(counted, name):
    recorded, kernel = counted["programs"][name]
    assert recorded == {f"{op} {phase}": size for (op, phase), size in theory(name, 3).items()}
    assert kernel == pytest.approx(sum(recorded.values()), rel=0.01)


# ---- the witness itself --------------------------------------------------------------------------
def test_theory_knows_every_op_that_the_witness_takes():
    for op in instrument.OPS:
        assert theory_bytes(op, 4, 4096) > 0
    assert theory_bytes(NATIVE, 4, 4096) == 4 * wire_bytes("reduce_scatter", 4096, 4)
    assert theory_bytes("tree_all_reduce", 4, 4096) == 6 * 4096


def test_what_cannot_be_witnessed_is_refused():
    refuses("ranks=1", witness, ranks=1)
    refuses("ops='gossip'.*'ring_all_reduce'", witness, ops=("gossip",))
    refuses("nbytes=8", witness, nbytes=8)


TALK = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    one = socket.create_connection(server.getsockname())
    other = server.accept()[0]
one.sendall(bytes(12345))
other.recv(12345, socket.MSG_WAITALL)
"""


def test_the_counter_is_the_process_s_own_and_a_kernel_without_it_is_named(monkeypatch):
    before = received_bytes()
    ran(sys.executable, "-c", TALK)  # as other programs of the machine do
    assert received_bytes() == before
    kept: dict = {}
    exec(TALK, kept)
    assert received_bytes() == before + 12345
    kept["one"].close(), kept["other"].close()
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: bytes(104))  # Linux before 4.1
    with pytest.raises(OSError, match="only Linux has one"):
        witness(2, ("send",))


def test_a_failing_rank_ends_the_witness_with_its_error():
    """A rank does not wait for ever at a gate for one that is gone."""
    with pytest.raises(pl.RankError, match="ZeroDivisionError"):
        instrument.between_gates(_fails, 2, (), timeout=HANG_S)


def _fails(context, gate):
    gate()
    if context.rank:
        return context.rank / 0
    gate()
