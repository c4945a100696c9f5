"""Answers to the exercises that are wrong, each in a way that somebody would be wrong, and the
right ones that they are made of.

A checker that lets a wrong one pass is broken. Ranks import this module: it imports little.
"""

from __future__ import annotations

import itertools


# ---- lab 04: a schedule --------------------------------------------------------------------------
def one_f_one_b(pp, m, warmup=None):
    """1F1B as text, with ``warmup(rank)`` forwards before the first pair."""
    schedule = []
    for rank in range(pp):
        first = min(warmup(rank) if warmup else pp - rank - 1, m)
        row = [f"{rank}F{i}" for i in range(first)]
        for i in range(m):
            row += [f"{rank}F{first + i}"] * (first + i < m) + [f"{rank}B{i}"]
        schedule.append(row)
    return schedule


def schedule_good(pp, microbatches):
    """A right answer, one text per rank."""
    return [" ".join(row) for row in one_f_one_b(pp, microbatches)]


def schedule_halves(pp, microbatches):
    """A right answer, and a faster one: rank r's weight halves wait for r backwards."""
    schedule = []
    for rank, row in enumerate(one_f_one_b(pp, microbatches)):
        split = []
        for action in row:
            split.append(action.replace("B", "I"))
            done = int(action.partition("B")[2] or -1) - rank
            split += [f"{rank}W{done}"] * (done >= 0)
        late = range(max(microbatches - rank, 0), microbatches)
        schedule.append(split + [f"{rank}W{i}" for i in late])
    return schedule


def schedule_forgets_a_half(pp, microbatches):
    return [row[:-1] for row in schedule_halves(pp, microbatches)]


def schedule_upside_down(pp, microbatches):
    """The warm-up counted from the wrong end: every list is fine, together they stand still."""
    return one_f_one_b(pp, microbatches, lambda rank: rank)


def schedule_without_end(pp, microbatches):
    """Where it is asked first: lists of other sizes would be read to the cut, too."""

    def row(rank):
        for i in itertools.count() if (pp, microbatches) == (4, 6) else ():
            yield f"{rank}F{i}"

    return [row(rank) for rank in range(pp)]


def never_ends_in_c(*asked):
    return max(itertools.count())


# ---- lab 09: the order of a streamed update ------------------------------------------------------
def good(units, window):
    jobs, ahead = [], window - 1
    for unit in range(units + ahead):
        if unit < units:
            jobs += [("read", unit, unit % window), ("update", unit, unit % window)]
        if unit >= ahead:
            jobs.append(("write", unit - ahead, (unit - ahead) % window))
    return jobs


def one_after_the_other(units, window):
    return [(kind, u, u % window) for u in range(units) for kind in ("read", "update", "write")]


def in_batches(units, window):
    """Fills the window, updates all of it, writes all of it."""
    jobs = []
    for first in range(0, units, window):
        group = range(first, min(first + window, units))
        jobs += [(kind, u, u - first) for kind in ("read", "update", "write") for u in group]
    return jobs
