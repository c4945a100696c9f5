"""Lab 09's exercise: right orders pass, wrong ones are refused by the limits they break."""

from __future__ import annotations

import importlib
import random

import pytest

import bad_answers as bad
import paralab as pl
from bad_answers import good
from judged import Table

STREAM = pl.exercises.stream
offload = importlib.import_module("paralab.exercises.offload")
FAST_S, SLOW_S = offload.UPDATE_S.values()
JOBS, MEMORY, TIME = STREAM.required
KINDS = ("read", "update", "write")


def changed(rule):
    """The right jobs, changed by a rule for (jobs, units, window)."""
    return lambda units, window: rule(good(units, window), units, window)


WRONG = [  # answer, limits it breaks, words of the verdict
    (bad.one_after_the_other, {TIME},
     "units=6, window=2: with the fast host it takes 198 ms, required: at most 150 ms; the "
     "lane disk is idle from 10 ms to 18 ms, before write 0"),
    (bad.in_batches, {TIME},
     "units=6, window=2: with the slow host it takes 255 ms, required: at most 205 ms; the lane "
     "host is idle from 70 ms to 95 ms, before update 2"),
    (lambda n, w: [(kind, u, u % w) for kind in KINDS for u in range(n)], {JOBS},
     "jobs[2]=('read', 2, 0): it overwrites unit 0, which is in that buffer and has not been"),
    (changed(lambda jobs, n, w: [(k, u, (b + (k == "write")) % w) for k, u, b in jobs]), {JOBS},
     "unit 0 is not in buffer 1 by then"),
    (changed(lambda jobs, n, w: [(k, u, (b + (k == "update")) % w) for k, u, b in jobs]), {JOBS},
     "jobs[1]=('update', 0, 1): unit 0 is not in buffer 1 by then"),
    (changed(lambda jobs, n, w: [job for job in jobs if job[:2] != ("update", n - 1)]), {JOBS},
     "unit 5 has not been updated by then"),
    (changed(lambda jobs, *_: jobs[:-1]), {JOBS}, "units=6, window=2: there is no write of unit 5"),
    (changed(lambda jobs, *_: [jobs[0], *jobs]), {JOBS},
     "jobs[1]=('read', 0, 0): the read of unit 0 is there twice"),
    (lambda n, w: good(n, w + 1), {MEMORY},
     "jobs[4]=('read', 2, 2): the buffers are 0 to 1"),
    (lambda n, w: good(n, 2), {MEMORY},
     "units=5, window=1: jobs[2]=('read', 1, 1): the only buffer is 0"),
    (lambda n, w: None, {JOBS}, "jobs=None: not a list"),
    (changed(lambda jobs, *_: [" ".join(map(str, job)) for job in jobs]), {JOBS},
     "jobs[0]='read 0 0': not a job"),
    (lambda n, w: [("read", 0, 0) for _ in iter(int, 1)], {JOBS},
     "2,000,000 lines of the answer were run, and it has not ended"),
    (lambda n, w: good(5 if n == 4 else n, w), {JOBS},
     "units=4, window=2: jobs[11][1]=4: out of range"),
]  # fmt: skip
RIGHT = [
    good, lambda n, w: iter(good(n, w)), changed(lambda jobs, *_: list(map(list, jobs))),
    changed(lambda jobs, n, w: [(k, n - 1 - u, w - 1 - b) for k, u, b in jobs]),
]  # fmt: skip
STREAMS = Table(STREAM, WRONG, RIGHT, exact=True, most=1)
test_a_wrong_stream_is_refused, test_a_right_stream_passes, test_its_stub = STREAMS.tests()


@pytest.mark.parametrize("answer", RIGHT)
def test_what_is_right_is_said_of_the_task_s_size(answer):
    verdict = STREAMS[answer]
    assert {row.yours.split(": ")[0] for row in verdict.rows} == {"units=6, window=2"}


# ---- simulated time ------------------------------------------------------------------------------
def took(jobs, update_s):
    return max(end for _, end in offload.simulate(jobs, update_s))


def test_a_job_starts_when_its_lane_and_its_buffer_are_free():
    jobs = good(3, 2)
    times = dict(zip([job[:2] for job in jobs], offload.simulate(jobs, 30e-3), strict=True))
    assert {job: round(1e3 * start) for job, (start, _) in times.items()} == {
        ("read", 0): 0, ("update", 0): 10, ("read", 1): 10, ("update", 1): 40, ("write", 0): 40,
        ("read", 2): 55, ("update", 2): 70, ("write", 1): 70, ("write", 2): 100,
    }  # fmt: skip


@pytest.mark.parametrize("update_s", [1e-3, FAST_S, 10e-3, 25e-3, SLOW_S, 0.1])
def test_reading_ahead_reaches_the_limit_at_every_size(update_s):
    for units in range(1, 13):
        for window in range(1, 16):
            jobs = good(units, window)
            assert not offload.first_misplaced(jobs, units)
            limit = offload.limit_s(units, window, update_s)
            assert took(jobs, update_s) == pytest.approx(limit, rel=1e-9), (units, window)


def test_no_order_that_is_right_is_faster_than_the_limit():
    draw = random.Random(0)
    for _ in range(500):
        units, window = draw.randint(1, 6), draw.randint(1, 4)
        jobs = at_random(draw, units, window)
        assert not offload.first_misplaced(jobs, units)
        for update_s in (1e-3, FAST_S, 12e-3, SLOW_S):
            assert took(jobs, update_s) >= offload.limit_s(units, window, update_s) * (1 - 1e-9)


def at_random(draw: random.Random, units: int, window: int) -> list:
    """Some order that is right."""
    jobs, inside, left = [], {}, draw.sample(range(units), units)
    while left or inside:
        free = [buffer for buffer in range(window) if buffer not in inside]
        if left and free and (not inside or draw.random() < 0.5):
            inside[buffer := draw.choice(free)] = ["read", "update", "write"], left.pop()
        else:
            buffer = draw.choice(list(inside))
        kinds, unit = inside[buffer]
        jobs.append((kinds.pop(0), unit, buffer))
        if not kinds:
            del inside[buffer]
    return jobs


def test_a_wrong_timeout_is_refused():
    with pytest.raises(ValueError, match=r"timeout=0.*; legal: "):
        STREAM.check(good, timeout=0)
