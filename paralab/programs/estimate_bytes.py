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
    """The most micro-batches alive on a rank, counting v chunks as one: the second column of the
    table in parallel/schedules.py.
    """
    left, all_of_them = c.p - c.at, c.m + 0 * c.at
    chunks = (2 * (left - 1) + (c.v - 1) * c.p + 1) / c.v
    most = {"naive": 1 + 0 * left, "gpipe": all_of_them, "1f1b": left, "interleaved": chunks}
    return np.minimum(c.of_schedule(most | {"zb-h1": left, "zb-h2": 2 * left - 1}), c.m)


def held(c: Any) -> dict[str, Array]:
    """{category: bytes} at the peak of the rank with the highest peak. c: an `Estimate`."""
    m, n, item, grad, psi, updated = c.m, c.n, c.item, c.grad, c.psi, c.updated
    third, zero = c.zero == 3, c.zero > 0
    on_device = {name: c.place(name) == 0 for name in ("parameters", "gradients", "optimizer")}
    parameters = item * np.where(third, updated * on_device["parameters"], psi)
    second = c.each("secondary_shard", lambda near: 1 / near if near else 0.0)
    parameters = parameters + third * second * item * psi
    parameters = parameters + c.parts.constant * (c.blocks if c.model.block else 1)
    optimizer = updated * c.state_bytes * on_device["optimizer"]
    embedding, block, head = c.parts[:3]
    alive, message, deferred = in_flight(c), (c.p > 1) * c.parts.message, c.total("deferred")
    offloaded_input = (c.place("activations") > 0) * c.parts.message
    saved = c.total("saved") + (c.last - c.first) * message - c.blocks * offloaded_input
    pending = np.where(c.space.schedule == "zb-h1", 1, 2) * c.at
    pending = np.where(c.space.splits, np.clip(m - alive, 0, pending), 0)  # weight halves

    # Gradients. ``grad_sum`` is what a rank holds of the sums over micro-batches, from the first
    # backward on. If units are reduced during backward (``leaves``), two of them exist at a time,
    # one being computed and one being sent, next to receive buffers and the resulting shard.
    grad_sum = grad * np.where(c.reduces_often, psi / n * on_device["gradients"], psi)
    end_largest = np.maximum(c.first * embedding.largest, c.last * head.largest)
    # The last parameter of a bucket may exceed ``bucket_bytes``.
    bucket = c.space.bucket_bytes + grad * np.maximum(block.largest, end_largest)
    unit = np.where(third, grad * block.elements, np.minimum(bucket, grad * psi))
    largest = np.maximum(unit, third * grad * c.end_elements)
    leaves = zero & (c.reduces_often | (m == 1))
    gloo = not c.cluster.gpus  # it receives all ranks' parts before it adds them
    received = zero * (n > 1) * largest * (gloo + 1 / n)
    two_units = np.where(m > 1, 2 * largest, np.minimum(unit + largest, grad * psi))
    leaving = leaves * (two_units + received)
    before, later = np.where(m > alive, grad_sum, 0.0), np.where(m > 1, grad_sum, 0.0)
    first_sum = ~((before > 0) | leaves)
    head_gradients = first_sum * grad * c.last * c.end_elements
    block_gradients = head_gradients + first_sum * np.maximum(unit, grad * block.elements)
    # Gathered parameters: of the part in use, and of those that are prefetched.
    gathers = third * ((n > 1) | ~on_device["parameters"]) * item
    units = gathers * block.elements * np.minimum(c.blocks / c.v, 1 + c.space.prefetch)
    # An offloaded shard is on the device next to the part that is gathered from it.
    units = units * np.where(on_device["parameters"], 1, 1 + (n > 1) / n)

    weight_peak = np.maximum(c.first * embedding.weight_peak, c.last * head.weight_peak)
    weight_peak = np.maximum(block.weight_peak, weight_peak)
    base = (alive - 1) * saved + pending * deferred
    at_head, sent = saved - c.last * head.saved, 2 * (message + offloaded_input)
    of_head = np.maximum(head.forward_peak, head.backward_peak) + gathers * c.end_elements
    of_head = c.last * of_head + units
    of_block = np.maximum(block.forward_peak, block.backward_peak) + units
    of_next = (block.backward_peak - block.saved) * (c.units > 1) + received
    widened = 4 * (grad < 4) * on_device["optimizer"] * updated / c.units
    in_units = np.where(leaves, later + leaving, grad_sum)
    moments = [  # activations, gradients, and workspace
        (base + at_head, before + leaving + head_gradients, of_head + sent),
        (base + at_head - block.saved, before + leaving + block_gradients, of_block + sent),
        (base + saved * (1 - 1 / c.units), in_units, of_next + sent),
        (base, in_units, c.first * embedding.backward_peak + sent),
        (base + deferred, grad_sum, weight_peak + sent),
        (base + c.space.splits * (deferred - block.deferred), grad_sum, of_block + sent),
        (0.0, np.where(c.reduces_often, grad_sum, grad * updated), widened),
    ]
    table = [np.broadcast_arrays(parameters, optimizer, *moment, base)[:-1] for moment in moments]
    table = np.stack(table, 1)[:, :, :ROWS].reshape(len(CATEGORIES), -1, len(c.space))
    highest = table.sum(0).argmax(0)[None, None]  # of moments and ranks
    return dict(zip(CATEGORIES, np.take_along_axis(table, highest, 1)[:, 0], strict=True))
