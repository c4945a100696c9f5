"""Step time as closed formulas, of one plan or of a hundred thousand at once: no events, no queues.

    step = compute + recompute + tensor + bubble + messages + gradients + offload + optimizer

`predict` lets the event engine say when everything happens; here every term is a formula of the
literature, on arrays with an entry per plan (closed_columns.py); those of data parallelism and ZeRO
are in closed_zero.py. What they leave out, one thing waiting for another, is what the two differ
by: tests/test_search.py holds them against each other.

All in seconds. F, I, W: forward and the two halves of backward of one micro-batch on one rank, with
what tensor parallelism does not hide; p, m, v as in parallel/schedules.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paralab.theory.closed_columns import Array, Columns, Rank
from paralab.theory.closed_zero import collective, exposed, gathering, last_backward, window
from paralab.theory.formulas import optimizer_work


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
    passes = [one_pass(c, rank, c.v) for rank in c.ranks]
    whole = one_pass(c, c.whole, c.p * c.v)
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
def one_pass(c: Columns, rank: Rank, stages: Array) -> Pass:
    """Work of PTD-P's eq. 3 cut by tensor parallelism (layer_costs.py), what ZeRO-3 gathers, and
    what goes on more slowly after each message that one of the rank's ``stages`` waits for.
    """
    slower = c.cluster.wait_overhead

    def total(*names: str) -> Array:
        return sum(rank.blocks * getattr(c.block, name) + rank.first * getattr(c.embedding, name)
                   + rank.last * getattr(c.head, name) for name in names)  # fmt: skip

    sent_back = np.where(c.split, total("sent_input"), total("sent_back"))
    again, sent_again = total("again"), total("sent_again")
    gather_forward, gather_backward = gathering(c, rank)
    forward, sent = total("forward"), total("sent")
    return Pass(
        forward=forward + sent + gather_forward + slower * (stages - rank.first),
        input=total("input")
        + again
        + sent_back
        + sent_again
        + gather_backward
        + slower * (stages - rank.last),
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
        zb-h1        (p-1) (F + I - W)          Zero Bubble (Qi+ 2023, arXiv:2401.10241), table 2
        zb-h2        (p-1) (F + I - 2 W)

    in equal stages; with unequal ones (p-1)(F + I + W) is what the other ranks take. Where
    interleaved chunks differ by a block, the longer ones count, and every further round of p
    micro-batches costs p - 3 blocks: whoever is at a short one waits for others at long ones (read
    off `pipeline.simulate`, for p of 2 to 16). In the last two a rank's W runs beside the next
    one's I, and weight halves of later micro-batches, of which there are m - 1, fill what is left.
    """
    others, weights = whole.whole - pace.whole, whole.weight - pace.weight
    later = (c.m - 1) / np.maximum(c.p - 1, 1)  # micro-batches there are to fill a gap with
    block = sum(window(c.block))
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


# ---- after backward -----------------------------------------------------------------------------
def after(c: Columns, rank: Rank, found: Pass) -> tuple[Array, ...]:
    """(gradients, offload, optimizer, slack): what a rank does after its last backward, and by how
    much before the pipeline's end that is, as a negative number.
    """
    psi, (units, _) = c.elements(rank), c.buckets(rank)
    own = np.where(c.zero > 0, psi / c.n, psi)
    early = np.where(c.split | (c.schedule == "naive"), 0.0, rank.at)
    slack = -early * (found.input + found.weight)
    sync = sum(last_backward(c, rank)) + exposed(c, rank, found.input + found.weight)
    tied = c.wire("all_reduce", c.ends_inter).seconds(
        c.item * c.token / np.where(c.zero > 0, c.n, 1))  # fmt: skip
    sync = sync + np.where(c.tied & ((rank.first > 0) | (rank.last > 0)), tied, 0.0)
    ends = np.where(c.tied & (rank.last > 0), 0.0, slack)  # the last rank waits for the first
    gather = collective(c, "all_gather")(psi, units)
    gather = np.where((c.zero > 0) & (c.zero < 3), gather, 0.0)
    away = offloaded(c, own, units)
    update = np.where(c.place("optimizer") > 0, 0.0, optimizer(c, own, units))
    return sync + gather, away, update, ends


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
    busy = c.m * c.ranks[1].blocks * window(c.block)[1]
    beside = np.maximum(moved - busy, 0.0) + left / (often * units)
    return np.where(states > 0, update, 0.0) + beside
