"""Ports, messages that come after one another, and the choice between ring and tree."""

from __future__ import annotations

from itertools import product

import pytest

import paralab as pl
from paralab.spec.links import Reach, furthest, messages, rounds, ways
from paralab.theory import collectives
from paralab.theory.traffic import most_sent
from refusals import refuses

NEAR, FAR = pl.Link(alpha=1e-6, bandwidth=100e9), pl.Link(alpha=1e-5, bandwidth=10e9)
MODEL = pl.ModelSpec(layers=2, hidden=64, heads=16, seq_len=32, vocab=256)
NODES = pl.Cluster(
    nodes=4, devices_per_node=4, flops=1e12, memory_bandwidth=1e12, intra=NEAR, inter=FAR
)


def took(op: str, size: int, reach: Reach, cluster: pl.Cluster = NODES) -> float:
    return cluster.call(op, most_sent(op, size, reach.members), reach)[1]


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(
    "name", ["ring_reduce_scatter", "ring_all_gather", "ring_all_reduce", "tree_all_reduce"]
)
def test_inside_a_node_a_call_takes_what_its_steps_do(name, n):
    (kind, op), size = name.split("_", 1), 48 * n
    found = ways(op, Reach(n, n, 1), NEAR, FAR)
    way = found["pairwise" if op == "reduce_scatter" else kind]  # gloo's takes as long
    expected = collectives.seconds(name, n, size, NEAR)
    assert way.seconds(most_sent(op, size, n)) == pytest.approx(expected)
    assert kind == "tree" or messages(op, n) == collectives.steps(name, n)


def test_nccls_tree_is_a_chain_in_a_node_and_pieces_that_come_to_twice_the_tensor():
    """Its src/graph/tuning.cc: latency by hops, and 0.9 of the ring's rate for 2 S."""
    size, reach = 10**8, Reach(512, 8, 64)
    tree = ways("all_reduce", reach, NEAR, FAR, nccl=True)["tree"]
    rate = min(8 * FAR.bandwidth, NEAR.bandwidth)
    expected = 2 * (7 * NEAR.alpha + 6 * FAR.alpha) + 2 * size / (0.9 * rate)
    assert tree.seconds(most_sent("all_reduce", size, 512)) == pytest.approx(expected)


def test_a_group_sends_through_as_many_ports_as_it_has_members_on_a_node():
    for k in (1, 2, 4, 8):
        reach = Reach(4 * k, k, 4)
        moving = took("all_gather", 10**9, reach) - NODES.ways("all_gather", reach)["ring"].latency
        assert moving == pytest.approx((4 * k - 1) / (4 * k) * 1e9 / (k * 10e9))
    # Never faster than links inside a node bring the bytes to the ports.
    four, wide = Reach(16, 4, 4), NODES.replace(inter=FAR.replace(bandwidth=80e9))
    assert wide.ways("all_gather", four)["ring"].bandwidth == 100e9
    one_each, halved = (NODES.replace(ports=ports) for ports in (4, 2))
    assert halved.ways("all_gather", four)["ring"].bandwidth == pytest.approx(20e9)
    assert one_each.ways("all_gather", four)["ring"].bandwidth == pytest.approx(40e9)
    alone = "send", 10**6, Reach(2, 1, 2)
    assert one_each.call(*alone) == NODES.call(*alone)
    # Gloo has one ring, in which one member sends to the next node, through one port at most.
    gloo = NODES.replace(cores=4)
    for ports, op in product((None, 2, 1), ("all_gather", "all_reduce")):
        assert gloo.replace(ports=ports).ways(op, four)["ring"].bandwidth == pytest.approx(10e9)
    assert gloo.replace(ports=1).ways("all_gather", Reach(4, 1, 4))["ring"].bandwidth == 2.5e9


def test_of_an_all_to_all_every_member_sends_what_leaves_the_node_through_its_own_port():
    way = NODES.ways("all_to_all", Reach(8, 4, 2))["pairwise"]
    assert way.bandwidth == pytest.approx(10e9 * 7 / 4)
    # Over gloo a reduce-scatter is one (transports.py), and over NCCL a ring.
    assert NODES.replace(cores=4).ways("reduce_scatter", Reach(8, 4, 2)) == {"pairwise": way}
    assert list(NODES.ways("reduce_scatter", Reach(8, 4, 2))) == ["ring"]


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
    gloo = NODES.replace(cores=4)  # in each step of its ring some member waits for another node
    for op, halves in (("all_reduce", 2), ("all_gather", 1)):
        assert gloo.ways(op, Reach(4, 2, 2))["ring"].latency == pytest.approx(halves * 3 * 1e-5)
        assert gloo.ways(op, Reach(4, 4, 1))["ring"].latency == pytest.approx(halves * 3 * 1e-6)


@pytest.mark.parametrize("ranks", [[0], [0, 1], [0, 9]], ids=["to itself", "near", "far"])
def test_a_message_takes_as_long_as_one_call(ranks):
    for cluster in (NODES, NODES.replace(cores=8)):
        reach = cluster.reach(ranks)
        took = sum(cluster.message(1e6, reach))
        assert took == pytest.approx(cluster.call("send", 1e6, reach)[1], rel=1e-12)


def test_a_tree_is_taken_where_it_is_quicker_and_what_is_stated_goes_before():
    reach = Reach(16, 1, 16)
    assert NODES.call("all_reduce", 100, reach)[0] == "tree"
    assert NODES.call("all_reduce", 10**9, reach)[0] == "ring"
    for name in ("ring", "tree"):
        assert NODES.replace(algorithm=name).call("all_reduce", 100, reach)[0] == name
        assert NODES.replace(algorithm=name).call("all_gather", 100, reach)[0] == "ring"
    for bad in ("star", 3):
        refuses("algorithm=.*legal: .*ring.*tree", NODES.replace, algorithm=bad)
    measured = NODES.replace(collectives={"all_reduce": NEAR})  # what was is not chosen
    assert list(measured.ways("all_reduce", Reach(4, 4, 1))) == ["ring"]


def test_the_group_that_is_spread_furthest_sets_the_pace():
    assert furthest([Reach(4, 4, 1), Reach(4, 2, 2)]) == Reach(4, 2, 2)
    assert furthest([Reach(4, 2, 2), Reach(4, 1, 3)]) == Reach(4, 1, 3)
    assert NODES.reach([0, 1, 4, 5, 6]) == Reach(5, 2, 2)


def test_a_predicted_call_takes_what_the_quicker_algorithm_says():
    plan = pl.Plan(dp=4, tp=4, bucket_bytes=10**9)
    calls = pl.predict(MODEL, plan, NODES, steps=1, detail="calls").collectives
    across = calls.query("axis == 'dp'")
    (payload,) = set(across["payload_bytes"])
    longest = (across["end"] - across["start"]).max()
    assert longest == pytest.approx(took("all_reduce", payload, Reach(4, 1, 4)))


def test_the_search_and_the_prediction_take_the_same_ports():
    asked, slow = {"devices": 16, "global_batch": 16, "tp": 4, "pp": 1}, NODES.replace(ports=1)
    found, other = (pl.plan_search(MODEL, nodes, **asked, top=1) for nodes in (NODES, slow))
    seconds = other.table["simulated_s"][0]
    assert seconds > found.table["simulated_s"][0]
    assert pl.predict(MODEL, other.best, slow).step_time == pytest.approx(seconds)
