"""Answers that are right by luck, look right to a ledger, do not end, or try to break a checker.

Ranks import this module, so it imports nothing at the top but what is light.
"""

from __future__ import annotations

import itertools
import sys
import time

from bad_answers import _around, ring_by_collective, ring_copied, ring_plain, schedule_good
from bad_answers_offload import good as stream_good


# ---- results that are read before they are there -------------------------------------------------
def _one_step(group, chunks, at, left, right):
    n = len(chunks)
    parts = [("send", chunks[(at + 1) % n], right), ("recv", chunks[at % n], left)]
    return group.exchange(parts)


def ring_waits_at_the_end(group, tensor):
    """Sends in step s + 1 what step s may not have brought yet."""
    n, r, left, right, chunks = _around(group, tensor)
    sent = [_one_step(group, chunks, r - s, left, right) for s in range(n - 1)]
    for pending in sent:
        pending.wait()


def ring_sleeps(group, tensor):
    n, r, left, right, chunks = _around(group, tensor)
    for s in range(n - 1):
        _one_step(group, chunks, r - s, left, right)
        time.sleep(0.05)


def ring_changes_what_it_sends(group, tensor):
    """Right where the transport has copied the chunk by then."""
    n, r, left, right, chunks = _around(group, tensor)
    leaving, arriving = chunks[(r + 1) % n].clone(), chunks[0].clone()
    for s in range(n - 1):
        pending = group.exchange([("send", leaving, right), ("recv", arriving, left)])
        leaving.zero_()
        pending.wait()
        leaving.copy_(arriving)
        chunks[(r - s) % n].copy_(arriving)


# ---- bytes around the ledger ---------------------------------------------------------------------
def ring_decoy(group, tensor):
    """Broadcasts by torch.distributed, and exchanges of the right size for the ledger."""
    ring_plain(group, tensor)
    ring_copied(group, tensor.clone())


def ring_control(group, tensor):
    ring_by_collective(group, tensor, phase="control")


# ---- one size, one constant ----------------------------------------------------------------------
def ring_writes_the_numbers(group, tensor):
    """What the chunks once were: 0, 1, 2, ..."""
    import torch

    ring_copied(group, tensor.clone())
    torch.arange(tensor.numel(), out=tensor)


def schedule_not_for_two(pp, microbatches):
    lists = schedule_good(pp, microbatches)
    return schedule_good(pp, 1) if (pp, microbatches) == (4, 2) else lists


def stream_not_for_four(units, window):
    return stream_good(5 if units == 4 else units, window)


# ---- answers that break what looks at them -------------------------------------------------------
def ring_resizes(group, tensor):
    ring_copied(group, tensor)
    tensor.resize_(10)


def ring_exits(group, tensor):
    sys.exit(3)


def ring_generator_exit(group, tensor):
    raise GeneratorExit


def ring_prints_for_ever(group, tensor):
    while True:
        print("still here", flush=True)
        time.sleep(0.05)  # a sign of life often enough


def ring_prints_megabytes(group, tensor):
    while True:
        print("still here" * 10)


class NoRepr:
    def __repr__(self):
        raise RuntimeError("no words")


def returns(value):
    return lambda *asked: value


def exits(*asked):
    sys.exit(3)


def never_ends(*asked):
    while True:
        pass


def never_ends_in_c(*asked):
    return max(itertools.count())


def schedule_without_end(pp, microbatches):
    """Where it is asked first: lists of other sizes would be read to the cut, too."""

    def row(rank):
        for i in itertools.count() if (pp, microbatches) == (4, 6) else ():
            yield f"{rank}F{i}"

    return [row(rank) for rank in range(pp)]


def schedule_of_any_arguments(*asked):
    """A right answer."""
    return schedule_good(*asked)


def stream_of_lists(units, window):
    """A right answer."""
    return [list(job) for job in stream_good(units, window)]
