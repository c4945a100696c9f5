"""Estimates of a rank's peak memory, for many plans at once.

    parameters + gradients + optimizer states + activations + workspace

States follow from ZeRO's stage (Rajbhandari+ 2020, arXiv:1910.02054, sec. 5); activations are what
the compiled parts save for a micro-batch (parts.py), times the micro-batches that the schedule has
in flight; workspace is a part's own peak, with gathered parameters and message buffers. The peak is
the largest of these moments: with all micro-batches in flight the backward of the head, of a block,
of the next unit and of the embedding; where backward is split, a weight half, and the last block's
input half next to what pending weight halves hold; and the update. Arrays have a column per plan
and a row for each of the ranks that estimate.py estimates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray
CATEGORIES = ("parameters", "optimizer", "activations", "gradients", "workspace")
ROWS = 3  # rows of single ranks; the row after them stands for all ranks together


def in_flight(c: Any) -> Array:
    """The most micro-batches alive on a rank, counting v chunks as one.

    naive 1, gpipe m, 1f1b p - r, interleaved (2 (p-r-1) + (v-1) p + 1) / v chunks
    zb-h1 p - r, zb-h2 2 (p-r) - 1; never more than m. PTD-P, arXiv:2104.04473, sec. 2.2
    """
    left, all_of_them = c.p - c.at, c.m + 0 * c.at
    chunks = (2 * (left - 1) + (c.v - 1) * c.p + 1) / c.v
    most = {"naive": 1 + 0 * left, "gpipe": all_of_them, "1f1b": left, "interleaved": chunks}
    return np.minimum(c.of_schedule(most | {"zb-h1": left, "zb-h2": 2 * left - 1}), c.m)


def held(c: Any) -> dict[str, Array]:
    """{category: bytes} at the peak of the rank with the highest peak. c: an `Estimate`."""
    m, n, item, grad, psi, own = c.m, c.n, c.item, c.grad, c.psi, c.own
    third, zero = c.zero == 3, c.zero > 0
    on_device = {name: c.place(name) == 0 for name in ("parameters", "gradients", "optimizer")}
    parameters = item * np.where(third, own * on_device["parameters"], psi)
    second = c.each("secondary_shard", lambda near: 1 / near if near else 0.0)
    parameters = parameters + third * second * item * psi
    parameters = parameters + c.parts.constant * (c.blocks if c.model.block else 1)
    optimizer = own * c.width * on_device["optimizer"]
    embedding, block, head = c.parts[:3]
    alive, message, aside = in_flight(c), (c.p > 1) * c.parts.message, c.total("aside")
    offloaded_input = (c.place("activations") > 0) * c.parts.message
    kept = c.total("kept") + (c.last - c.first) * message - c.blocks * offloaded_input
    pending = np.where(c.space.schedule == "zb-h1", 1, 2) * c.at
    pending = np.where(c.space.splits, np.clip(m - alive, 0, pending), 0)  # weight halves

    # Gradients. ``grad_sum`` is what a rank holds of the sums over micro-batches, from the first
    # backward on. If units are reduced during backward (``leaves``), two of them exist at a time,
    # one being computed and one being sent, next to receive buffers and the resulting shard.
    grad_sum = grad * np.where(c.often, psi / n * on_device["gradients"], psi)
    end_largest = np.maximum(c.first * embedding.largest, c.last * head.largest)
    # The last parameter of a bucket may exceed ``bucket_bytes``.
    bucket = c.each("bucket_bytes", float) + grad * np.maximum(block.largest, end_largest)
    unit = np.where(third, grad * block.elements, np.minimum(bucket, grad * psi))
    largest = np.maximum(unit, third * grad * c.ends)
    leaves = zero & (c.often | (m == 1))
    gloo = not c.cluster.gpus  # it receives all ranks' parts before it adds them
    received = zero * (n > 1) * largest * (gloo + 1 / n)
    two_units = np.where(m > 1, 2 * largest, np.minimum(unit + largest, grad * psi))
    leaving = leaves * (two_units + received)
    before, later = np.where(m > alive, grad_sum, 0.0), np.where(m > 1, grad_sum, 0.0)
    first_sum = ~((before > 0) | leaves)
    head_gradients = first_sum * grad * c.last * c.ends
    block_gradients = head_gradients + first_sum * np.maximum(unit, grad * block.elements)
    # Gathered parameters: of the part in use, and of those that are prefetched.
    gathers = third * ((n > 1) | ~on_device["parameters"]) * item
    units = gathers * block.elements * np.minimum(c.blocks / c.v, 1 + c.space.prefetch)
    # An offloaded shard is on the device next to the part that is gathered from it.
    units = units * np.where(on_device["parameters"], 1, 1 + (n > 1) / n)

    weight_peak = np.maximum(block.over, np.maximum(c.first * embedding.over, c.last * head.over))
    base = (alive - 1) * kept + pending * aside
    at_head, sent = kept - c.last * head.kept, 2 * (message + offloaded_input)
    of_head = c.last * (np.maximum(head.front, head.behind) + gathers * c.ends) + units
    of_block = np.maximum(block.front, block.behind) + units
    of_next = (block.behind - block.kept) * (c.units > 1) + received
    widened = 4 * (grad < 4) * on_device["optimizer"] * own
    of_update, copies = widened / c.units * (1 - c.copied), widened * c.copied
    in_units = np.where(leaves, later + leaving, grad_sum)
    moments = [  # activations, gradients, and workspace
        (base + at_head, before + leaving + head_gradients, of_head + sent),
        (base + at_head - block.kept, before + leaving + block_gradients, of_block + sent),
        (base + kept * (1 - 1 / c.units), in_units, of_next + sent),
        (base, in_units, c.first * embedding.behind + sent),
        (base + aside, grad_sum, weight_peak + sent),
        (base + c.space.splits * (aside - block.aside), grad_sum, of_block + sent),
        (0.0, np.where(c.often, grad_sum, grad * own) + copies, of_update),
    ]
    table = [np.broadcast_arrays(parameters, optimizer, *moment, base)[:-1] for moment in moments]
    table = np.stack(table, 1)[:, :, :ROWS].reshape(len(CATEGORIES), -1, len(c.space))
    highest = table.sum(0).argmax(0)[None, None]  # of moments and ranks
    return dict(zip(CATEGORIES, np.take_along_axis(table, highest, 1)[:, 0], strict=True))
