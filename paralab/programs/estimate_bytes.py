"""The peak memory of a rank, of many plans at once: states and the parts' own figures.

    parameters + gradients + optimizer states + activations + workspace

States by ZeRO's stage (Rajbhandari+ 2020, arXiv:1910.02054, sec. 5); of activations what the
compiled parts keep for a micro-batch (parts.py), times those that the schedule has in flight; and
what a part holds at its peak, what is gathered, and what is sent. The moments looked at are the
backward of the head, of a block, of the next unit and of the embedding, with all micro-batches in
flight; where backward is split, its last block, next to what the others' weight halves need, and a
weight half; and the update. A column has an entry per plan, and a row for each of a pipeline's
ranks that estimate.py looks at.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray
CATEGORIES = ("parameters", "optimizer", "activations", "gradients", "workspace")
ROWS = 3  # ranks; behind them one stands for all together


def in_flight(c: Any) -> Array:
    """Micro-batches whose activations a rank keeps at most, in whole ranks' worth.

    naive 1, gpipe m, 1f1b p - r, interleaved (2 (p-r-1) + (v-1) p + 1) / v chunks
    zb-h1 p - r, zb-h2 2 (p-r) - 1; never more than m. PTD-P, arXiv:2104.04473, sec. 2.2
    """
    left, all_of_them = c.p - c.at, c.m + 0 * c.at
    chunks = (2 * (left - 1) + (c.v - 1) * c.p + 1) / c.v
    most = {"naive": 1 + 0 * left, "gpipe": all_of_them, "1f1b": left, "interleaved": chunks}
    return np.minimum(c.of_schedule(most | {"zb-h1": left, "zb-h2": 2 * left - 1}), c.m)


def held(c: Any) -> dict[str, Array]:
    """{category: bytes} at the peak of the rank with most of them; c: an `Estimate`'s columns."""
    m, n, item, grad, psi, own = c.m, c.n, c.item, c.grad, c.psi, c.own
    third, zero = c.zero == 3, c.zero > 0
    here = {name: c.place(name) == 0 for name in ("parameters", "gradients", "optimizer")}
    parameters = item * np.where(third, own * here["parameters"], psi)
    second = c.each("secondary_shard", lambda near: 1 / near if near else 0.0)
    parameters = parameters + third * second * item * psi
    parameters = parameters + c.parts.constant * (c.blocks if c.model.block else 1)
    optimizer = own * c.width * here["optimizer"]
    embedding, block, head = c.parts[:3]
    many, message, aside = in_flight(c), (c.p > 1) * c.parts.message, c.total("aside")
    away = (c.place("activations") > 0) * c.parts.message
    kept = c.total("kept") + (c.last - c.first) * message - c.blocks * away
    late = np.where(c.space.schedule == "zb-h1", 1, 2) * c.at
    late = np.where(c.space.splits, np.clip(m - many, 0, late), 0)  # weight halves that wait

    # Gradients of earlier micro-batches. A unit's are there as a whole from the first on; where
    # units leave, one is made, and one is sent, next to what is received and what comes out.
    stay = grad * np.where(c.often, psi / n * here["gradients"], psi)
    ends = np.maximum(c.first * embedding.largest, c.last * head.largest)
    bucket = c.each("bucket_bytes", float) + grad * np.maximum(block.largest, ends)  # at most
    unit = np.where(third, grad * block.elements, np.minimum(bucket, grad * psi))
    largest = np.maximum(unit, third * grad * c.ends)
    leaves = zero & (c.often | (m == 1))
    gloo = not c.cluster.gpus  # receives parts next to each other
    received = zero * (n > 1) * largest * (gloo + 1 / n)
    two = np.where(m > 1, 2 * largest, np.minimum(unit + largest, grad * psi))
    left = leaves * (two + received)
    before, later = np.where(m > many, stay, 0.0), np.where(m > 1, stay, 0.0)
    new = ~((before > 0) | leaves)
    fresh = new * grad * c.last * c.ends  # of the head, then a block
    first = fresh + new * np.maximum(unit, grad * block.elements)
    # Parameters that are gathered: of the part in use, and of those to come.
    gathers = third * ((n > 1) | ~here["parameters"]) * item
    units = gathers * block.elements * np.minimum(c.blocks / c.v, 1 + c.space.prefetch)
    units = units * np.where(here["parameters"], 1, 1 + (n > 1) / n)  # a part comes up first

    over = np.maximum(block.over, np.maximum(c.first * embedding.over, c.last * head.over))
    base = (many - 1) * kept + late * aside
    at_head, sent = kept - c.last * head.kept, 2 * (message + away)
    of_head = c.last * (np.maximum(head.front, head.behind) + gathers * c.ends) + units
    of_block = np.maximum(block.front, block.behind) + units
    of_next = (block.behind - block.kept) * (c.units > 1) + received
    widened = 4 * (grad < 4) * here["optimizer"] * own
    of_update, copies = widened / c.units * (1 - c.copied), widened * c.copied
    moments = [  # activations, gradients, and workspace
        (base + at_head, before + left + fresh, of_head + sent),
        (base + at_head - block.kept, before + left + first, of_block + sent),
        (base + kept * (1 - 1 / c.units), np.where(leaves, later + left, stay), of_next + sent),
        (base, np.where(leaves, later + left, stay), c.first * embedding.behind + sent),
        (base + aside, stay, over + sent),
        (base + c.space.splits * (aside - block.aside), stay, of_block + sent),
        (0.0, np.where(c.often, stay, grad * own) + copies, of_update),
    ]
    table = [np.broadcast_arrays(parameters, optimizer, *moment, base)[:-1] for moment in moments]
    table = np.stack(table, 1)[:, :, :ROWS].reshape(len(CATEGORIES), -1, len(c.space))
    fullest = table.sum(0).argmax(0)[None, None]  # of moments and ranks
    return dict(zip(CATEGORIES, np.take_along_axis(table, fullest, 1)[:, 0], strict=True))
