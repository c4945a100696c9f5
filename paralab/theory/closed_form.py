"""Step time as closed formulas, of one plan or of a hundred thousand at once: no events, no queues.

    step = compute + recompute + tensor + bubble + messages + gradients + offload + optimizer

`predict` lets the event engine say when everything happens; here every term is a formula of the
literature, on arrays with an entry per plan (closed_columns.py). What they leave out, one thing
waiting for another, is what the two differ by: tests/test_search.py holds them against each other.

All in seconds. F, I, W: forward and the two halves of backward of one micro-batch on one rank, with
what tensor parallelism does not hide; p, m, v as in parallel/schedules.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paralab.theory.closed_columns import Array, Columns, Rank
from paralab.theory.formulas import optimizer_work

TERMS = ("compute", "recompute", "tensor", "bubble", "messages", "gradients", "offload",
         "optimizer")  # fmt: skip


class Pass(NamedTuple):
    """A micro-batch on a rank: work and exposed communication, forward and backward.

    forward, input, weight   F, I, W, seconds; ``again`` of I is recomputation
    sent, sent_again         of all three, what tensor parallelism exposes
    """

    forward: Array
    input: Array
    weight: Array
    again: Array
    sent: Array
    sent_again: Array
    gathered: Array

    @property
    def whole(self) -> Array:
        return self.forward + self.input + self.weight


def seconds(c: Columns) -> dict[str, Array]:
    """{term: seconds of a step}; their sum is the closed form's step time."""
    passes = [one_pass(c, rank) for rank in c.ranks]
    whole = one_pass(c, c.whole)
    slowest = np.argmax([found.whole for found in passes], axis=0)
    pace = Pass(*(np.choose(slowest, columns) for columns in zip(*passes, strict=True)))
    idle, hops = bubble(c, whole, pace), messages(c, whole, pace)
    added = np.choose(slowest, [first_gradients(c, rank) for rank in c.ranks])
    ends = [after(c, rank, found) for rank, found in zip(c.ranks, passes, strict=True)]
    sums = (c.p - 1) * sum(last_backward(c, c.ranks[1]))
    last = np.argmax([sum(end) for end in ends], axis=0)
    sync, away, update, slack = (np.choose(last, columns) for columns in zip(*ends, strict=True))
    return {
        "compute": c.m * (pace.whole - pace.again - pace.sent - pace.gathered) - added,
        "recompute": c.m * (pace.again + pace.sent_again),
        "tensor": c.m * (pace.sent - pace.sent_again) + c.shared
                  + c.shared_more * (c.ranks[1].blocks - 1),
        "bubble": idle,
        "messages": hops,
        "gradients": c.m * pace.gathered + np.where(c.split, 0.0, sums) + sync + slack,
        "offload": away,
        "optimizer": update,
    }  # fmt: skip


# ---- one micro-batch ----------------------------------------------------------------------------
def one_pass(c: Columns, rank: Rank) -> Pass:
    """Work of PTD-P's eq. 3 cut by tensor parallelism (layer_costs.py), and what ZeRO-3 gathers."""

    def total(*names: str) -> Array:
        return sum(rank.blocks * getattr(c.block, name) + rank.first * getattr(c.embedding, name)
                   + rank.last * getattr(c.head, name) for name in names)  # fmt: skip

    sent_back = np.where(c.split, total("sent_input"), total("sent_back"))
    again, sent_again = total("again"), total("sent_again")
    gather_forward, gather_backward = gathering(c, rank)
    forward, sent = total("forward"), total("sent")
    return Pass(
        forward=forward + sent + gather_forward,
        input=total("input") + again + sent_back + sent_again + gather_backward,
        weight=total("weight"),
        again=again,
        sent=sent + sent_back + sent_again,
        sent_again=sent_again,
        gathered=gather_forward + gather_backward,
    )


def first_gradients(c: Columns, rank: Rank) -> Array:
    """The first micro-batch's gradients are kept as they come, and not added to any."""
    return (rank.blocks * c.block.added + rank.first * c.embedding.added
            + rank.last * c.head.added)  # fmt: skip


# ---- the pipeline -------------------------------------------------------------------------------
def bubble(c: Columns, whole: Pass, pace: Pass) -> Array:
    """Seconds that the slowest rank waits for others: what a micro-batch takes on all the others.

        naive        (m (p-1)) (F + I + W)
        gpipe, 1f1b  (p-1) (F + I + W)          PTD-P, sec. 2.2.1
        interleaved  (p-1) (F + I + W) / v      PTD-P, sec. 2.2.2
        zb-h1        (p-1) (F + I - W)          Zero Bubble (Qi+ 2023, arXiv:2401.10241), table 1
        zb-h2        (p-1) (F + I - 2 W)

    in equal stages; with unequal ones (p-1)(F + I + W) is what the other ranks take. Where
    interleaved chunks differ by a block, the longer ones count, and every further round of p
    micro-batches costs p - 3 blocks: whoever is at a short one waits for others at long ones (read
    off `pipeline.simulate`, for p of 2 to 16). In the last two a rank's W runs beside the next
    one's I, and weight halves of later micro-batches, of which there are m - 1, fill what is left.
    """
    others, weights = whole.whole - pace.whole, whole.weight - pace.weight
    later = (c.m - 1) / np.maximum(c.p - 1, 1)  # micro-batches there are to fill a gap with
    block = sum(_window(c.block))
    beside = weights * (1 + np.minimum(later, 1.0))
    found = {
        "naive": others + (c.m - 1) * others,
        "gpipe": others,
        "1f1b": others,
        "interleaved": whole.whole * (c.p - 1) / (c.p * c.v)
        + block * ((c.p - 1) * c.longer + c.uneven * (c.m / c.p - 1) * np.maximum(c.p - 3, 0)),
        "zb-h1": others - beside,
        "zb-h2": others - beside - weights * np.clip(later - 1, 0.0, 1.0),
    }
    return np.where(c.one, 0.0, np.maximum(_of_schedule(c, found), 0.0))


def messages(c: Columns, whole: Pass, pace: Pass) -> Array:
    """What stages wait for each other's messages: b s h elements per boundary and direction.

    A step begins with a hop to every later stage and ends with one to every earlier. In between the
    p micro-batches that 1F1B has under way cannot come round sooner than a way there and back:
    where (p (F + I + W) + hops) / p is more than a rank's own pace, it is the pace. Interleaved
    there are more of them under way than needed for that, and p v - 1 hops each way.
    """
    near, far = c.wire("send", c.one & False), c.wire("send", c.one | True)
    hops = 2 * (c.p - 1 - c.hops_inter) * near.seconds(c.message)
    hops = hops + 2 * c.hops_inter * far.seconds(c.message)
    steady = np.maximum(c.m - c.p, 0)
    late = np.maximum((whole.whole + hops) / c.p - pace.whole, 0.0)
    found = {
        "naive": c.m * hops,
        "gpipe": hops,
        "1f1b": hops + steady * late,
        "interleaved": hops / np.maximum(c.p - 1, 1) * (c.p * c.v - 1),
        "zb-h1": hops + steady * late,
        "zb-h2": hops,
    }
    return np.where(c.one, 0.0, _of_schedule(c, found))


def _of_schedule(c: Columns, found: dict[str, Array]) -> Array:
    return np.select([c.schedule == name for name in found], list(found.values()))


# ---- data parallelism and ZeRO ------------------------------------------------------------------
def gathering(c: Columns, rank: Rank) -> tuple[Array, Array]:
    """Exposed seconds of what ZeRO does in every micro-batch, forward and backward: 3 m Psi, or
    (m + 1) Psi in stage 2; where parameters are offloaded, their way up too.

    The first part of a stage is waited for; the next comes while one computes, and a part's
    gradients leave while the next part makes its own (ZeRO, arXiv:1910.02054, sec. 7.2.2).
    """
    gather, scatter = (_collective(c, op) for op in ("all_gather", "reduce_scatter"))
    weights, up, disk = c.place("parameters"), c.link("h2d"), c.link("disk")

    def come(elements: Array) -> tuple[Array, Array]:
        """(alone, one after the other): seconds until a unit is there."""
        size = elements / c.n * c.item
        ways = [gather(elements), np.where(weights > 0, up.seconds(size), 0.0),
                np.where(weights == 2, disk.seconds(size), 0.0)]  # fmt: skip
        return sum(ways), np.maximum.reduce(ways)

    embedding, chunks, later = c.embedding.elements, c.v, np.maximum(rank.blocks - c.v, 0)
    forward, back = _window(c.block)
    (first, next_one), r = come(c.block.elements), scatter(c.block.elements) * c.often
    (head, next_head), (tokens, _) = come(c.head.elements + c.tied * c.token), come(embedding)
    fetched = chunks * first + later * np.maximum(next_one - forward, 0.0)
    fetched = fetched + rank.first * np.maximum(tokens - _window(c.embedding)[0], -first)
    fetched = fetched + rank.last * np.maximum(next_head - forward, 0.0)
    sent = np.maximum(scatter(c.block.elements) + gather(c.block.elements), next_one)
    again = np.where(rank.last > 0, head + np.maximum(next_one - _window(c.head)[1], 0.0), first)
    again = again + (chunks - 1) * first + later * np.maximum(sent - back, 0.0)
    # The next action's first gather queues behind what the last part of this one sends.
    again = again + np.where(rank.first > 0, scatter(embedding) + (chunks - 1) * r, chunks * r)
    psi, (units, _) = c.elements(rank), c.buckets(rank)
    reduced = rank.blocks * _settled(c, rank, units, r)
    summed = (2 + (c.n > 1) * (1 + 1 / c.n)) * psi * c.item / c.cluster.memory_bandwidth
    summed = np.where(c.often, summed + 17 * rank.blocks * c.cluster.op_overhead, 0.0)
    third = c.zero == 3
    return (
        np.where(third, fetched, 0.0),
        summed + np.where(third, again, np.where(c.n > 1, c.often * reduced, 0.0)),
    )


def _settled(c: Columns, rank: Rank, units: Array, scatter: Array) -> Array:
    """Seconds per block that a rank waits for its reduce-scatters, of which one is under way: each
    hides behind the backward of the next unit alone. Recomputation hides the last one's.
    """
    again = c.block.again + c.block.sent_again
    back, each = _window(c.block)[1] - again, np.maximum(units / np.maximum(rank.blocks, 1), 1)
    waits = (1 - 1 / each) * np.maximum(scatter - back, 0.0)
    return waits + np.maximum(scatter / each - again - back / each, 0.0)


def _window(part) -> tuple[Array, Array]:
    """What a part's forward and backward take: so long can something else be under way."""
    return (
        part.forward + part.sent,
        part.input + part.weight + part.again + part.sent_back + part.sent_again,
    )


def _collective(c: Columns, op: str):
    """Seconds of ``op`` in the group that shares the states, of so many elements at once."""
    wire, times = c.wire(op, c.dp_inter), 2 if op == "all_reduce" else 1

    def seconds(elements: Array, messages: Array | float = 1.0) -> Array:
        sent = times * (c.n - 1) / c.n * elements * c.item
        return np.where(c.n > 1, wire.seconds(sent, messages), 0.0)

    return seconds


def after(c: Columns, rank: Rank, found: Pass) -> tuple[Array, ...]:
    """(gradients, offload, optimizer, slack): what a rank does after its last backward, and by how
    much before the pipeline's end that is, as a negative number.
    """
    psi, (units, _) = c.elements(rank), c.buckets(rank)
    own = np.where(c.zero > 0, psi / c.n, psi)
    early = np.where(c.split | (c.schedule == "naive"), 0.0, rank.at)
    slack = -early * (found.input + found.weight)
    sync = sum(last_backward(c, rank)) + _exposed(c, rank, found)
    tied = c.wire("all_reduce", c.ends_inter).seconds(
        c.item * c.token / np.where(c.zero > 0, c.n, 1))  # fmt: skip
    sync = sync + np.where(c.tied & ((rank.first > 0) | (rank.last > 0)), tied, 0.0)
    ends = np.where(c.tied & (rank.last > 0), 0.0, slack)  # the last rank waits for the first
    gather = _collective(c, "all_gather")(psi, units)
    gather = np.where((c.zero > 0) & (c.zero < 3), gather, 0.0)
    away = offloaded(c, own, units)
    update = np.where(c.place("optimizer") > 0, 0.0, optimizer(c, own, units))
    return sync + gather, away, update, ends


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
    scatter = _collective(c, "reduce_scatter")
    each = scatter(c.block.elements, units / np.maximum(rank.blocks, 1))
    waits = rank.blocks * _settled(c, rank, units, each)
    shares = (c.zero > 0) & ~c.often
    return np.where(c.often, 0.0, moved + calls), np.where(shares, waits, 0.0)


def _exposed(c: Columns, rank: Rank, found: Pass) -> Array:
    """Data parallelism's traffic beyond the last backward that it runs beside.

    Buckets leave as they fill (Li+ 2020, arXiv:2006.15704, sec. 3.2.3): the last one has nothing
    left to hide behind. 2 Psi (N-1)/N in all, or half of that and a gather after the update.
    """
    psi, (units, tail) = c.elements(rank), c.buckets(rank)
    window = (found.input + found.weight) * (1 - 1 / units)
    reduce = _collective(c, "all_reduce")
    form = c.of_mix(lambda mix: mix["grad_sync"])
    calls = np.where(form == "naive", 12 * rank.blocks, units)
    late = np.where(
        form == "overlapped",
        np.maximum(reduce(tail), reduce(psi, units) - window),
        reduce(psi, calls),
    )
    wire = c.wire("all_reduce", c.replica_inter)
    sent = 2 * (c.replicas - 1) / c.replicas * psi / c.n * c.item
    copied = np.where(c.replicas > 1, wire.seconds(sent, units), 0.0)
    return np.where(c.zero == 0, late, _collective(c, "reduce_scatter")(tail) + copied)


# ---- the update ---------------------------------------------------------------------------------
def _update_work(c: Columns) -> tuple[Array, Array]:
    """(bytes per element, calls per tensor) of an optimizer step; `formulas.optimizer_work`."""
    made = [optimizer_work(c.model, optimizer=c.optimizer, parameters={0: 1}, mixed=mixed)
            for mixed in (False, True)]  # fmt: skip
    return (np.where(c.mixed, made[1].bytes, made[0].bytes), np.where(c.mixed, 9.0, 1.0))


def optimizer(c: Columns, own: Array, units: Array) -> Array:
    """Seconds of the update on the device: 7 Psi elements of AdamW, 3 Psi of SGD, and masters."""
    size, calls = _update_work(c)
    tensors = np.where(c.zero > 0, units, 12 * c.ranks[1].blocks)
    return own * size / c.cluster.memory_bandwidth + (5 + calls * tensors) * c.cluster.op_overhead


def offloaded(c: Columns, own: Array, units: Array) -> Array:
    """Exposed seconds of everything that leaves the device (theory/offload.py has the bytes).

    Copies of one unit run beside the update of another: the slowest lane sets the pace, the others
    add a unit's worth. What moves beside forward and backward is waited for where it is slower.
    """
    if not any(mix["offload"] is not None for mix in c.space.mixes):
        return np.zeros(len(c.p))
    up, down, disk = (c.link(lane) for lane in ("h2d", "d2h", "disk"))
    weights, sums, states, inputs = map(
        c.place, ("parameters", "gradients", "optimizer", "activations"))  # fmt: skip
    part = own * c.item
    rows = (2 if c.optimizer == "adamw" else 0) + (c.mixed | (weights == 0))
    host = own * _update_work(c)[0] / (c.cluster.host_bandwidth or 1.0)
    file = ((states == 2) * 2 * disk.seconds(4 * rows * own, units)
            + (sums == 2) * disk.seconds(part, units)
            + (weights == 2) * (1 + ~c.mixed) * disk.seconds(part, units))  # fmt: skip
    lanes = [host, file, (sums == 0) * down.seconds(part, units),
             (weights == 0) * up.seconds(part, units)]  # fmt: skip
    update = np.maximum.reduce(lanes)
    update = update + (sum(lanes) - update) / units
    # In every micro-batch gradients go down, blocks' inputs go down and come up.
    often = np.where(c.often, c.m, 1)
    held = c.ranks[1].blocks * c.m * c.message
    left = (sums > 0) * often * down.seconds(part, units)
    filed = ((sums == 2) * (2 * often - 1) * disk.seconds(part, units)
             + (inputs == 2) * 2 * disk.seconds(held))  # fmt: skip
    moved = np.maximum.reduce([left + (inputs > 0) * down.seconds(held),
                               (inputs > 0) * up.seconds(held), filed])  # fmt: skip
    busy = c.m * c.ranks[1].blocks * _window(c.block)[1]
    beside = np.maximum(moved - busy, 0.0) + left / (often * units)
    return np.where(states > 0, update, 0.0) + beside
