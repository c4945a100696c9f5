"""Peak memory per device as closed formulas, of one plan or of a hundred thousand at once.

    parameters + gradients + optimizer states + activations + buffers + workspace

States by ZeRO's stage (Rajbhandari+ 2020, arXiv:1910.02054, sec. 5), activations of one micro-batch
(Korthikanti+ 2022, arXiv:2205.05198, eq. 1 to 5) times those that the schedule has under way
(parallel/schedules.py), and what is gathered, packed or recomputed at the fullest moment. The very
events are gone through in memory.py and memory_zero.py; tests/test_search.py holds these against
those. Bytes on the device; of a pipeline's ranks the fullest of three (closed_columns.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paralab.theory.closed_columns import Array, Columns, Rank

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace")


def peaks(c: Columns) -> dict[str, Array]:
    """{category: bytes} on the fullest rank, at its fullest moment."""
    found = [rank_peak(c, rank) for rank in c.ranks]
    fullest = np.argmax([sum(some.values()) for some in found], axis=0)
    return {name: np.choose(fullest, [some[name] for some in found]) for name in CATEGORIES}


def under_way(c: Columns, rank: Rank) -> Array:
    """Micro-batches whose activations a rank keeps at most, in whole ranks' worth.

    naive 1, gpipe m, 1f1b p - r, interleaved (2 (p-r-1) + (v-1) p + 1) / v chunks
    zb-h1 p - r, zb-h2 2 (p-r) - 1; never more than m. PTD-P, arXiv:2104.04473, sec. 2.2
    """
    left = c.p - rank.at
    chunks = (2 * (left - 1) + (c.v - 1) * c.p + 1) / c.v
    found = {"naive": 1 + 0 * left, "gpipe": c.m, "1f1b": left, "interleaved": chunks,
             "zb-h1": left, "zb-h2": 2 * left - 1}  # fmt: skip
    most = np.select([c.schedule == name for name in found], list(found.values()))
    return np.minimum(most, c.m)


def waiting(c: Columns, rank: Rank) -> Array:
    """Weight halves that wait beside them: r in ZB-H1, 2 r in ZB-H2 (arXiv:2401.10241, sec. 2.3)"""
    held = np.where(c.schedule == "zb-h1", 1, 2) * rank.at
    return np.where(c.split, np.minimum(held, np.maximum(c.m - under_way(c, rank), 0)), 0)


class Moment(NamedTuple):
    """What a rank holds at some moment beside what it always holds; bytes."""

    activations: Array
    gradients: Array
    parameters: Array
    buffers: Array
    workspace: Array


def rank_peak(c: Columns, rank: Rank) -> dict[str, Array]:
    """{category: bytes} of one rank at the fullest of its moments."""
    psi, third = c.elements(rank), c.zero == 3
    own = np.where(c.zero > 0, psi / c.n, psi)
    here = {name: c.place(name) == 0 for name in ("parameters", "optimizer")}
    width = (8 if c.optimizer == "adamw" else 0) + 4 * c.mixed
    always = {
        "parameters": c.item * np.where(third, own * here["parameters"], psi)
                      + rank.blocks * c.model.seq_len**2,  # and the causal masks
        "optimizer": own * width * here["optimizer"],
    }  # fmt: skip
    found = moments(c, rank)
    fullest = np.argmax([sum(moment) for moment in found], axis=0)
    most = Moment(*(np.choose(fullest, column) for column in zip(*found, strict=True)))
    return most._asdict() | {
        "parameters": always["parameters"] + most.parameters, "optimizer": always["optimizer"],
    }  # fmt: skip


def moments(c: Columns, rank: Rank) -> list[Moment]:
    """The moments at which a rank may be at its fullest.

    When a forward has ended with as many micro-batches under way as there can be; when the block
    that is backward's first begins, what is recomputed of it there again; the same one micro-batch
    later, with gradients; and in a backward whose gradients leave, when a unit has just left and
    when one is packed. Workspace counts where states are offloaded, as in workspace.py.
    """
    item, third, n = c.item, c.zero == 3, c.n
    psi, (units, tail), many = c.elements(rank), c.buckets(rank), under_way(c, rank)
    zero = 0.0 * psi
    moving = (c.place("activations") > 0) * c.message
    one = (rank.blocks * (c.block.kept - moving) + rank.first * c.embedding.kept
           + rank.last * c.head.kept + (1 - rank.last) * c.message * c.v)  # fmt: skip
    aside = waiting(c, rank) * (rank.blocks * c.block.aside + rank.last * c.head.aside)
    head, again = rank.last * c.head.kept, c.block.again_bytes
    hand = c.workspace()

    # Gradients of earlier micro-batches: their sum, or the rank's part of it.
    stay = np.where(c.often, np.where(c.place("gradients") == 0, psi / n, 0.0), psi) * item
    before, later = np.where(c.m > many, stay, 0.0), np.where(c.m > 1, stay, 0.0)

    # ZeRO-3 has the part in use and the next one whole; a tied embedding from first to last.
    part = item * third * c.block.elements * ((n > 1) | (c.place("parameters") > 0))
    tied = item * third * rank.first * rank.last * c.model.tied * c.embedding.elements
    whole = part * np.minimum(rank.blocks / c.v, 2) + tied

    # A unit of gradients, packed; as it leaves, beside what is received and what comes out.
    unit = item * np.where(third, c.block.elements, tail) * (c.zero > 0)
    leaving = unit * np.where(n > 1, 2 + 1 / n, np.where(c.place("gradients") > 0, 1.0, 0.0))
    gone = c.block.kept * np.maximum(rank.blocks / units, 1)  # a unit may span several blocks
    these = np.where(c.often, many, 1)  # micro-batches under way when gradients leave
    held = np.where(c.often, before, later)
    fresh = np.where(c.often | (c.m == 1), item * c.block.elements, 0.0)
    ends = rank.first * item * np.where(c.zero > 0, np.where(third, c.embedding.elements, tail), 0)
    return [
        Moment(many * one + aside + moving, before, part + tied, zero, hand.head * rank.last),
        Moment(many * one + aside - head + again + 2 * moving, before, whole, zero,
               hand.down + hand.tied),
        Moment(many * one + aside - head + again - hand.gone + 2 * moving, before, whole, zero,
               hand.core + hand.core_gradients + hand.tied),
        Moment((many - (c.zero > 0)) * one + aside - head + again + 2 * moving,
               np.where(c.zero > 0, later, before), whole, zero, hand.down + hand.tied),
        Moment(these * one - head - gone + again * (units > 1) + moving, held, whole, leaving,
               hand.down + hand.tied),
        Moment(these * one - head - gone + moving, held + fresh, whole, unit,
               hand.close + hand.tied),
        Moment((these - 1) * one, held + ends * (c.often | (c.m == 1)), tied, ends,
               hand.lookup * rank.first),
        Moment(zero, psi * item * (c.zero == 0), zero, item * tail * (c.dp > 1) * (c.zero == 0),
               zero),
    ]  # fmt: skip
