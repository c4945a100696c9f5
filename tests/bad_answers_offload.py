"""Answers to lab 09's exercise that take more than a line, right ones and wrong ones."""

from __future__ import annotations


def good(units, window):
    jobs, ahead = [], window - 1
    for unit in range(units + ahead):
        if unit < units:
            jobs += [("read", unit, unit % window), ("update", unit, unit % window)]
        if unit >= ahead:
            jobs.append(("write", unit - ahead, (unit - ahead) % window))
    return jobs


# ---- right ---------------------------------------------------------------------------------------
def two_of_many(units, window):
    return good(units, min(window, 2))


def a_generator(units, window):
    yield from good(units, window)


# ---- wrong --------------------------------------------------------------------------------------
def one_after_the_other(units, window):
    return [(kind, u, u % window) for u in range(units) for kind in ("read", "update", "write")]


def in_batches(units, window):
    """Fills the window, updates all of it, writes all of it."""
    jobs = []
    for first in range(0, units, window):
        group = range(first, min(first + window, units))
        jobs += [(kind, u, u - first) for kind in ("read", "update", "write") for u in group]
    return jobs


def fills_the_window_first(units, window):
    """Reads `window` units to begin with, even if there are fewer."""
    jobs = [("read", unit, unit) for unit in range(window)]
    return jobs + [job for job in good(units, window) if job not in jobs]
