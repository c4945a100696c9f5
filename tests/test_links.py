"""Ports, messages that come after one another, and the choice between ring and tree."""

from __future__ import annotations

import pytest

import paralab as pl
from paralab.spec.links import Reach, furthest, messages, rounds, ways
from paralab.theory import collectives
from paralab.theory.traffic import most_sent

NEAR, FAR = pl.Link(alpha=1e-6, bandwidth=100e9), pl.Link(alpha=1e-5, bandwidth=10e9)
MODEL = pl.ModelSpec(layers=2, hidden=64, heads=16, seq_len=32, vocab=256)
NODES = pl.Cluster(
    nodes=4, devices_per_node=4, flops=1e12, memory_bandwidth=1e12, intra=NEAR, inter=FAR
)


def took(op: str, size: int, reach: Reach, cluster: pl.Cluster = NODES) -> float:
    return cluster.call(op, most_sent(op, size, reach.members), reach)[1]


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("name", ["ring_reduce_scatter", "ring_all_gather", "ring_all_reduce"])
def test_inside_a_node_a_ring_takes_what_its_steps_do(name, n):
    size, op = 48 * n, name.removeprefix("ring_")
    ring = ways(op, Reach(n, n, 1), NEAR, FAR)["ring"]
    expected = collectives.seconds(name, n, size, NEAR)
    assert ring.seconds(most_sent(op, size, n)) == pytest.approx(expected)
    assert messages(op, n) == collectives.steps(name, n)


def test_nccls_tree_is_a_chain_in_a_node_and_pieces_that_come_to_twice_the_tensor():
    """Its src/graph/tuning.cc: latency by hops, and 0.9 of the ring's rate for 2 S."""
    size, reach = 10**8, Reach(512, 8, 64)
    tree = ways("all_reduce", reach, NEAR, FAR, nccl=True)["tree"]
    rate = min(8 * FAR.bandwidth, NEAR.bandwidth)
    expected = 2 * (7 * NEAR.alpha + 6 * FAR.alpha) + 2 * size / (0.9 * rate)
    assert tree.seconds(most_sent("all_reduce", size, 512)) == pytest.approx(expected)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_inside_a_node_a_tree_takes_what_its_rounds_do(n):
    tree = ways("all_reduce", Reach(n, n, 1), NEAR, FAR)["tree"]
    expected = collectives.seconds("tree_all_reduce", n, 4 * n, NEAR)
    assert tree.seconds(most_sent("all_reduce", 4 * n, n)) == pytest.approx(expected)


def test_a_group_sends_through_as_many_ports_as_it_has_members_on_a_node():
    sizes = {k: took("all_gather", 10**9, Reach(4 * k, k, 4)) for k in (1, 2, 4, 8)}
    moving = {k: s - NODES.ways("all_gather", Reach(4 * k, k, 4))["ring"].latency
              for k, s in sizes.items()}  # fmt: skip
    for k in (1, 2, 4, 8):
        assert moving[k] == pytest.approx((4 * k - 1) / (4 * k) * 1e9 / (k * 10e9))
    # Never faster than links inside a node bring the bytes to the ports.
    wide = NODES.replace(inter=FAR.replace(bandwidth=80e9))
    four = Reach(16, 4, 4)
    assert wide.ways("all_gather", four)["ring"].bandwidth == 100e9


def test_half_as_many_ports_are_half_the_bandwidth():
    one, two = (NODES.replace(ports=ports) for ports in (4, 2))
    reach = Reach(16, 4, 4)
    assert two.ways("all_gather", reach)["ring"].bandwidth == pytest.approx(
        one.ways("all_gather", reach)["ring"].bandwidth / 2
    )
    assert one.call("send", 10**6, Reach(2, 1, 2)) == NODES.call("send", 10**6, Reach(2, 1, 2))


def test_of_an_all_to_all_every_member_sends_what_leaves_the_node_through_its_own_port():
    way = NODES.ways("all_to_all", Reach(8, 4, 2))["pairwise"]
    assert way.bandwidth == pytest.approx(10e9 * 7 / 4)


def test_over_gloo_a_root_broadcasts_to_one_after_the_other_and_nccl_passes_pieces_on():
    """A broadcast that was measured is one that was fitted as a tree, whoever made it."""
    measured, size = NODES.replace(collectives={"broadcast": NEAR}), 10**6
    for n in (2, 4, 5, 8):
        ring, inside = (n - 1) * 1e-6 + size / 100e9, Reach(n, n, 1)
        tree = rounds(n) * (1e-6 + size / 100e9)
        assert took("broadcast", size, inside) == pytest.approx(ring)
        for cluster in (NODES.replace(cores=4), measured):
            assert took("broadcast", size, inside, cluster) == pytest.approx(tree)


def test_over_gloo_a_root_takes_in_what_all_others_reduce_and_over_nccl_the_tensor():
    gloo, size = NODES.replace(cores=4), 10**6
    for n in (2, 4, 8):
        inside = took("reduce", size, Reach(n, n, 1), gloo)
        assert inside == pytest.approx(1e-6 + (n - 1) * size / 100e9)
        ring = took("reduce", size, Reach(n, n, 1))
        assert ring == pytest.approx((n - 1) * 1e-6 + size / 100e9)
    # Of seven members' bytes those of the four on the other node pass the root's port.
    assert took("send", size, Reach(8, 8, 1), gloo) == took("send", size, Reach(2, 2, 1), gloo)
    across = took("reduce", size, Reach(8, 4, 2), gloo)
    assert across == pytest.approx(1e-5 + 4 * size / 10e9)


def test_alpha_is_paid_for_every_message_and_between_nodes_for_those_that_cross():
    ring = NODES.ways("all_reduce", Reach(16, 4, 4))["ring"]
    assert ring.latency == pytest.approx(2 * (12 * 1e-6 + 3 * 1e-5))


def test_a_tree_is_taken_where_it_is_quicker_and_what_is_stated_goes_before():
    reach = Reach(16, 1, 16)
    assert NODES.call("all_reduce", 100, reach)[0] == "tree"
    assert NODES.call("all_reduce", 10**9, reach)[0] == "ring"
    for name in ("ring", "tree"):
        assert NODES.replace(algorithm=name).call("all_reduce", 100, reach)[0] == name
        assert NODES.replace(algorithm=name).call("all_gather", 100, reach)[0] == "ring"
    for bad in ("star", 3):
        with pytest.raises(ValueError, match="algorithm=.*legal: .*ring.*tree"):
            NODES.replace(algorithm=bad)


def test_what_was_measured_is_not_chosen():
    measured = NODES.replace(collectives={"all_reduce": NEAR})
    assert list(measured.ways("all_reduce", Reach(4, 4, 1))) == ["ring"]


def test_the_group_that_is_spread_furthest_sets_the_pace():
    assert furthest([Reach(4, 4, 1), Reach(4, 2, 2)]) == Reach(4, 2, 2)
    assert furthest([Reach(4, 2, 2), Reach(4, 1, 3)]) == Reach(4, 1, 3)
    assert NODES.reach([0, 1, 4, 5, 6]) == Reach(5, 2, 2)


def test_the_report_says_which_algorithm_and_what_it_takes():
    plan = pl.Plan(dp=4, tp=4, bucket_bytes=10**9)
    report = pl.predict(MODEL, plan, NODES, steps=1, detail="calls")
    table = report.algorithms().set_index("axis")
    across = table.loc["dp"]
    assert (across["nodes"], across["near"], across["op"]) == (4, 1, "all_reduce")
    assert not table["otherwise_s"].isna().all()
    for row in report.algorithms().query("op == 'all_reduce'").itertuples():
        reach = Reach(row.members, row.near, row.nodes)
        assert row.latency_s + row.moving_s == pytest.approx(took(row.op, row.payload_bytes, reach))
        other = {"ring": "tree", "tree": "ring"}[row.algorithm]
        forced = NODES.replace(algorithm=other)
        assert row.otherwise_s == pytest.approx(took(row.op, row.payload_bytes, reach, forced))
    calls = report.collectives.query("axis == 'dp'")
    assert (calls["end"] - calls["start"]).max() == pytest.approx(
        across["latency_s"] + across["moving_s"]
    )
    with pytest.raises(ValueError, match="summed up"):
        pl.predict(MODEL, plan, NODES, detail="actions").algorithms()


def test_the_search_and_the_prediction_take_the_same_ports():
    found = pl.plan_search(MODEL, NODES, devices=16, global_batch=16, tp=4, pp=1, top=1)
    slow = pl.plan_search(
        MODEL, NODES.replace(ports=1), devices=16, global_batch=16, tp=4, pp=1, top=1
    )
    table, other = found.table.iloc[0], slow.table.iloc[0]
    assert other["simulated_s"] > table["simulated_s"]
    assert pl.predict(MODEL, slow.best, NODES.replace(ports=1)).step_time == pytest.approx(
        other["simulated_s"]
    )
