"""Answers to lab 09's exercise: some that are right in another way, and many that are wrong."""

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


def last_unit_first(units, window):
    return [
        (kind, units - 1 - unit, window - 1 - buffer) for kind, unit, buffer in good(units, window)
    ]


def in_halves(units, window):
    """While the host updates one half of the window, the disk is at the other."""
    half = max(window // 2, 1)
    if window == 1:
        return good(units, 1)
    jobs, before = [], []
    for first in range(0, units + half, half):
        group = range(first, min(first + half, units))
        jobs += [("read", unit, unit % (2 * half)) for unit in group]
        jobs += [("write", unit, unit % (2 * half)) for unit in before]
        jobs += [("update", unit, unit % (2 * half)) for unit in group]
        before = group
    return jobs


# ---- right, and too slow -------------------------------------------------------------------------
def one_after_the_other(units, window):
    return [(kind, u, u % window) for u in range(units) for kind in ("read", "update", "write")]


def one_buffer(units, window):
    return good(units, 1)


def in_batches(units, window):
    """Fills the window, updates all of it, writes all of it."""
    jobs = []
    for first in range(0, units, window):
        group = range(first, min(first + window, units))
        jobs += [(kind, u, u - first) for kind in ("read", "update", "write") for u in group]
    return jobs


# ---- wrong order ---------------------------------------------------------------------------------
def all_reads_first(units, window):
    return [(kind, u, u % window) for kind in ("read", "update", "write") for u in range(units)]


def writes_before_the_update(units, window):
    return [(kind, u, u % window) for u in range(units) for kind in ("read", "write", "update")]


def lane_by_lane(units, window):
    """The disk's jobs in the right order, and then the host's."""
    return sorted(good(units, window), key=lambda job: job[0] == "update")


def writes_the_other_buffer(units, window):
    return [(k, u, (b + 1) % window if k == "write" else b) for k, u, b in good(units, window)]


def writes_into_the_next_file(units, window):
    return [(k, (u + 1) % units if k == "write" else u, b) for k, u, b in good(units, window)]


# ---- too little, too much ------------------------------------------------------------------------
def never_writes(units, window):
    return [job for job in good(units, window) if job[0] != "write"]


def forgets_the_last_write(units, window):
    return good(units, window)[:-1]


def forgets_an_update(units, window):
    return [job for job in good(units, window) if job[:2] != ("update", units - 1)]


def does_nothing(units, window):
    return []


def reads_twice(units, window):
    jobs = good(units, window)
    return [jobs[0], *jobs]


def updates_twice(units, window):
    jobs = good(units, window)
    return [*jobs[:2], jobs[1], *jobs[2:]]


# ---- buffers -------------------------------------------------------------------------------------
def one_buffer_more(units, window):
    return good(units, window + 1)


def buffers_from_one(units, window):
    return [(kind, unit, buffer + 1) for kind, unit, buffer in good(units, window)]


def always_two(units, window):
    return good(units, 2)


# ---- other sizes ---------------------------------------------------------------------------------
def only_six(units, window):
    return good(6, window)


def not_with_one_buffer(units, window):
    return [(kind, unit, unit % (window - 1 or 0) if window < 2 else buffer)
            for kind, unit, buffer in good(units, window)]  # fmt: skip


def fills_the_window_first(units, window):
    """Reads `window` units to begin with, even if there are fewer."""
    jobs = [("read", unit, unit) for unit in range(window)]
    return jobs + [job for job in good(units, window) if job not in jobs]


# ---- no list of jobs -----------------------------------------------------------------------------
def a_generator(units, window):
    yield from good(units, window)


def nothing(units, window):
    good(units, window)


def without_buffers(units, window):
    return [job[:2] for job in good(units, window)]


def as_text(units, window):
    return [" ".join(map(str, job)) for job in good(units, window)]


def other_words(units, window):
    return [({"read": "load"}.get(job[0], job[0]), *job[1:]) for job in good(units, window)]


def units_from_one(units, window):
    return [(kind, unit + 1, buffer) for kind, unit, buffer in good(units, window)]


def half_a_buffer(units, window):
    return [(kind, unit, buffer / 2) for kind, unit, buffer in good(units, window)]


def too_many(units, window):
    return good(units, window) * 10**6


def without_end_on_one_line(units, window):
    return [("read", 0, 0) for _ in iter(int, 1)]


def raises(units, window):
    raise KeyError("unit 7")


def of_units_alone(units):
    return good(units, 2)
