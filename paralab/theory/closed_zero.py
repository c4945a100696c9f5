"""Data parallelism and ZeRO as closed formulas: how long a rank waits for gradients and parameters.

Bytes are those of the ladder in parallel/zero.py, seconds those of a ring on one link; what hides
behind a neighbour's compute is taken off. Arrays with an entry per plan, as in closed_form.py,
which adds these to a step's other terms; tests/test_search.py holds them against the event engine.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paralab.theory.closed_columns import Array, Columns, Rank
from paralab.theory.layer_costs import PartCost


def gathering(c: Columns, rank: Rank) -> tuple[Array, Array]:
    """Exposed seconds of what ZeRO does in every micro-batch, forward and backward: 3 m Psi, or
    (m + 1) Psi in stage 2; where parameters are offloaded, their way up too.

    The first part of a stage is waited for; the next comes while one computes, and a part's
    gradients leave while the next part makes its own (ZeRO, arXiv:1910.02054, sec. 7.2.2).
    """
    gather, scatter = (collective(c, op) for op in ("all_gather", "reduce_scatter"))
    weights, up, disk = c.place("parameters"), c.link("h2d"), c.link("disk")

    def come(elements: Array) -> tuple[Array, Array]:
        """(alone, one after the other): seconds until a unit is there."""
        size = elements / c.n * c.item
        ways = [gather(elements), np.where(weights > 0, up.seconds(size), 0.0),
                np.where(weights == 2, disk.seconds(size), 0.0)]  # fmt: skip
        return sum(ways), np.maximum.reduce(ways)

    embedding, chunks, later = c.embedding.elements, c.v, np.maximum(rank.blocks - c.v, 0)
    forward, back = window(c.block)
    (first, next_one), r = come(c.block.elements), scatter(c.block.elements) * c.often
    (head, next_head), (tokens, _) = come(c.head.elements + c.tied * c.token), come(embedding)
    fetched = chunks * first + later * np.maximum(next_one - forward, 0.0)
    fetched = fetched + rank.first * np.maximum(tokens - window(c.embedding)[0], -first)
    fetched = fetched + rank.last * np.maximum(next_head - forward, 0.0)
    sent = np.maximum(scatter(c.block.elements) + gather(c.block.elements), next_one)
    again = np.where(rank.last > 0, head + np.maximum(next_one - window(c.head)[1], 0.0), first)
    again = again + (chunks - 1) * first + later * np.maximum(sent - back, 0.0)
    # The next action's first gather queues behind what the last part of this one sends.
    again = again + np.where(rank.first > 0, scatter(embedding) + (chunks - 1) * r, chunks * r)
    psi, (units, _) = c.elements(rank), c.buckets(rank)
    reduced = rank.blocks * _settled(c, rank, units, r)
    summed = (2 + (c.n > 1) * (1 + 1 / c.n)) * psi * c.item / c.cluster.memory_bandwidth
    summed = np.where(c.often, summed + 17 * rank.blocks * c.cluster.op_overhead, 0.0)
    third = c.zero == 3
    # However early a part was asked for, it is waited for, and its gradients' way out is posted.
    slower, posts = c.cluster.wait_overhead, c.cluster.call_overhead
    fetched = fetched + later * (slower + posts)
    again = again + later * (slower + 2 * posts)
    return (
        np.where(third, fetched, 0.0),
        summed + np.where(third, again, np.where(c.n > 1, c.often * reduced, 0.0)),
    )


def _settled(c: Columns, rank: Rank, units: Array, scatter: Array) -> Array:
    """Seconds per block that a rank waits for its reduce-scatters, of which one is under way: each
    hides behind the backward of the next unit alone. Recomputation hides the last one's.
    """
    again = c.block.again + c.block.sent_again
    back, each = window(c.block)[1] - again, np.maximum(units / np.maximum(rank.blocks, 1), 1)
    waits = (1 - 1 / each) * np.maximum(scatter - back, 0.0)
    return waits + np.maximum(scatter / each - again - back / each, 0.0)


def window(part: PartCost) -> tuple[Array, Array]:
    """What a part's forward and backward take: so long can something else be under way."""
    return (
        part.forward + part.sent,
        part.input + part.weight + part.again + part.sent_back + part.sent_again,
    )


def collective(c: Columns, op: str) -> Callable[..., Array]:
    """Seconds of ``op`` in the group that shares the states, of so many elements at once."""
    wire, times = c.wire(op, c.dp_inter), 2 if op == "all_reduce" else 1

    def seconds(elements: Array, messages: Array | float = 1.0) -> Array:
        sent = times * (c.n - 1) / c.n * elements * c.item
        return np.where(c.n > 1, wire.seconds(sent, messages), 0.0)

    return seconds


def last_backward(c: Columns, rank: Rank) -> tuple[Array, Array]:
    """By how much a rank's last backward is longer than the others: (copies, waits).

    Gradients are copied into their buckets, and ZeRO sums what N ranks sent: bytes over bandwidth.
    ZeRO has one reduce-scatter under way (parallel/buckets.py) and waits where that takes longer
    than the backward of what is next. The rank before in the pipeline waits with it.
    """
    psi, (units, _) = c.elements(rank), c.buckets(rank)
    into = np.where((c.zero > 0) | (c.dp > 1), 2.0, 0.0)
    summed = np.where((c.zero > 0) & (c.n > 1), 1 + 1 / c.n, 0.0)
    moved = (into + summed) * psi * c.item / c.cluster.memory_bandwidth
    calls = (into > 0) * (12 * rank.blocks + 5 * units) * c.cluster.op_overhead
    scatter = collective(c, "reduce_scatter")
    each = scatter(c.block.elements, units / np.maximum(rank.blocks, 1))
    waits = rank.blocks * _settled(c, rank, units, each)
    shares = (c.zero > 0) & ~c.often
    return np.where(c.often, 0.0, moved + calls), np.where(shares, waits, 0.0)


def exposed(c: Columns, rank: Rank, backward: Array) -> Array:
    """Data parallelism's traffic beyond the last backward, of so many seconds, that it runs beside.

    Buckets leave as they fill (Li+ 2020, arXiv:2006.15704, sec. 3.2.3): the last one has nothing
    left to hide behind. 2 Psi (N-1)/N in all, or half of that and a gather after the update.
    """
    psi, (units, tail) = c.elements(rank), c.buckets(rank)
    beside = backward * (1 - 1 / units)
    reduce = collective(c, "all_reduce")
    form = c.of_mix(lambda mix: mix["grad_sync"])
    calls = np.where(form == "naive", 12 * rank.blocks, units)
    late = np.where(
        form == "overlapped",
        np.maximum(reduce(tail), reduce(psi, units) - beside),
        reduce(psi, calls),
    )
    wire = c.wire("all_reduce", c.replica_inter)
    sent = 2 * (c.replicas - 1) / c.replicas * psi / c.n * c.item
    copied = np.where(c.replicas > 1, wire.seconds(sent, units), 0.0)
    return np.where(c.zero == 0, late, collective(c, "reduce_scatter")(tail) + copied)
