"""All-reduce by hand: right sums, bytes and seconds as theory says, one chunk of memory."""

import math

import numpy as np
import pytest
import torch

import paralab as pl
from paralab.parallel.collectives import ALGORITHMS
from paralab.theory import collectives as theory
from patience import HANG_S
from refusals import refuses

INTRA, INTER = pl.Link(alpha=2e-5, bandwidth=3e9), pl.Link(alpha=3e-4, bandwidth=4e8)
CLUSTER = pl.Cluster(flops=1e12, memory_bandwidth=1e11, intra=INTRA, inter=INTER)
ALL_REDUCES = ("ring_all_reduce", "tree_all_reduce", "hierarchical_all_reduce")


def call(group, name, data, settings):
    """One algorithm on row ``group.index`` of ``data`` (n, numel); returns what became of it."""
    tensor = torch.from_numpy(data[group.index])  # (numel,)
    ALGORITHMS[name](group, tensor, **settings)
    return tensor


def traced(name, n, numel, nodes=1, **settings):
    data = np.random.default_rng(n + numel).integers(0, 1000, (n, numel)).astype(np.float32)
    report = pl.trace(call, n, (name, data, settings), nodes=nodes, memory=True, timeout=HANG_S)
    return data, report


def rings(name, n, numel, node_size=None):
    """What theory has to add up: a hierarchical all-reduce is a ring in a node, and one between."""
    if node_size is None:
        return [(name, n, 4 * numel, INTRA)]
    inside, between = (node_size, 4 * numel, INTRA), (n // node_size, 4 * numel // node_size, INTER)
    return [("ring_all_reduce", *inside), ("ring_all_reduce", *between)]


CASES = [("ring_reduce_scatter", 3, 25, {}), ("ring_all_gather", 3, 26, {})]
CASES += [(name, n, numel, {}) for name in ALL_REDUCES[:2]
          for n, numel in ((1, 24), (3, 26), (4, 2))]  # fmt: skip
CASES += [("hierarchical_all_reduce", n, 6 * n, {"node_size": size})
          for n, size in ((4, 1), (4, 2), (4, 4), (6, 2))]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=lambda c: "-".join(map(str, c[:3])))
def case(request):
    name, n, numel, settings = request.param
    nodes = n // settings.get("node_size", n)
    return (name, n, numel, settings, *traced(name, n, numel, nodes, **settings))


def test_every_member_has_the_sum_in_place(case):
    name, n, numel, _, data, report = case
    chunks = [np.array_split(row, n) for row in report.results]
    sums = np.array_split(data.sum(axis=0), n)
    for rank, row in enumerate(report.results):
        own = (rank + 1) % n
        if name == "ring_reduce_scatter":
            assert np.array_equal(chunks[rank][own], sums[own])
        elif name == "ring_all_gather":  # chunk c comes from its owner, rank c - 1
            owners = [np.array_split(data[(c - 1) % n], n)[c] for c in range(n)]
            assert np.array_equal(row, np.concatenate(owners))
        else:
            assert np.array_equal(row, data.sum(axis=0)) and row.shape == (numel,)


def test_every_member_sends_the_bytes_of_theory_in_its_seconds(case):
    name, n, numel, settings, _, report = case
    parts = rings(name, n, numel, **settings)
    expected = [
        sum(theory.wire_bytes(*ring[:3], index) for ring in parts)
        for index in (range(n) if not settings else [0] * n)
    ]  # of even chunks all the same
    assert report.traffic()["bytes"].tolist() == expected
    if name == "ring_all_reduce":
        assert sum(expected) == 2 * (n - 1) * 4 * numel
    if (n, settings) == (4, {"node_size": 2}):
        levels = dict(report.traffic("level").itertuples(index=False))
        assert levels == {"intra": n * 4 * numel, "inter": n * 2 * numel}
    took = report.replay(CLUSTER, compute=0.0).step_time
    assert math.isclose(took, sum(theory.seconds(*ring) for ring in parts), rel_tol=1e-9)


def test_a_ring_needs_one_chunk_of_memory_and_its_second_half_none(case):
    name, n, numel, settings, _, report = case
    chunk = 4 * math.ceil(numel / settings.get("node_size", n)) * (n > 1)
    peaks = report.meta["peak_bytes"]
    if name == "ring_all_gather":
        assert peaks == [0] * n
    elif name.startswith("ring"):
        assert peaks == [chunk] * n
    elif name == "tree_all_reduce":
        assert max(peaks) == 4 * numel * (n > 1)
    else:  # one ring's buffer at a time
        assert max(peaks) <= max(chunk, 4 * math.ceil(numel / n))


def test_a_flat_ring_over_two_nodes_goes_at_the_pace_of_the_slow_link():
    _, flat = traced("ring_all_reduce", 4, 4096, nodes=2)
    slow = theory.seconds("ring_all_reduce", 4, 4 * 4096, INTER)
    assert math.isclose(flat.replay(CLUSTER, compute=0.0).step_time, slow, rel_tol=1e-9)
    better = rings("hierarchical_all_reduce", 4, 4096, node_size=2)
    assert sum(theory.seconds(*ring) for ring in better) < slow


@pytest.mark.parametrize(
    "n, nbytes, tree_wins",
    [(n, each * n, each == 4) for n in (4, 5, 8, 64) for each in (4, 4_000_000)]
    + [(n, nbytes, False) for n in (2, 3) for nbytes in (0, 12, 12_000)],
)
def test_the_tree_wins_with_small_tensors_from_four_members_on(n, nbytes, tree_wins):
    ring, tree = (theory.seconds(a, n, nbytes, INTRA) for a in ALL_REDUCES[:2])
    assert (tree < ring) == tree_wins


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"algorithm": "star"}, "algorithm='star'.*legal: 'ring_reduce_scatter'"),
        ({"n": 0}, "n=0"),
        ({"nbytes": 10}, "nbytes=10: not a whole number of elements"),
        ({"link": 3}, "link=3: not a link"),
    ],
)
def test_what_no_algorithm_could_do_is_refused(settings, says):
    asked = {"algorithm": "ring_all_reduce", "n": 4, "nbytes": 400, "link": INTRA, **settings}
    refuses(says, theory.seconds, **asked)
