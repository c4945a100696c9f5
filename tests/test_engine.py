"""The event engine: timelines worked out by hand, and properties that hold for any program.

What it makes of a program's own instructions is in test_interpret_time.py.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paralab.interpret.walk import CALL, JOB, WAIT, WORK, Item, moments
from paralab.programs.instructions import Instr


def compute(seconds):
    return Item(WORK, seconds)


def copied(name):
    """What a wait for a copy is for."""
    return (("", name, 0),)


def wait(what):
    return Item(WAIT, name=what)


def copy(name, seconds, *after, lane="h2d"):
    reads = tuple(value for other in after for value in copied(other))
    return Item(JOB, seconds, Instr("", reads=reads, writes=copied(name)), lane)


def call(name, seconds=1.0, *, ranks=(0, 1), lane="comm:dp"):
    return Item(CALL, seconds, name, (lane, ranks), len(ranks))


# ---- what cannot run ------------------------------------------------------------------------
A, B = call("a"), call("b")
THEIRS = call("b", lane="b")  # on a lane of its own


@pytest.mark.parametrize("said, lists", [
    # A call that a member never launches.
    ("rank 0 launches a, rank 1 launches nothing more", [[A, wait("a")], [compute(1.0)]]),
    ("rank 0 launches nothing more, rank 1 launches a",
     [[compute(1.0)], [call("a", ranks=(0, 1, 2))], []]),
    # Deadlocks.
    ("wait for each other's calls",
     [[A, wait("a"), THEIRS, wait("b")], [THEIRS, wait("b"), A, wait("a")]]),
    ("rank 0 launches a, rank 1 launches b", [[A, B], [B, A]]),
])  # fmt: skip
def test_what_never_ends_is_refused_with_the_calls_that_are_to_blame(said, lists):
    with pytest.raises(ValueError, match=said):
        moments(lists)


# ---- any program ----------------------------------------------------------------------------
durations = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0])  # exact in binary: sums compare with ==


@st.composite
def programs(draw):
    """Random programs that cannot deadlock: every member launches calls in one global order.

    copies: names, also of those that a rank has waited for; begun: what it can wait for
    """
    world = draw(st.integers(1, 4))
    lists, copies, begun = ([[] for _ in range(world)] for _ in range(3))
    for name in range(draw(st.integers(0, 6))):
        for rank, items in enumerate(lists):
            for _ in range(draw(st.integers(0, 2))):
                what = draw(st.sampled_from(["compute", "wait", "copy"]))
                if what == "compute":
                    items.append(compute(draw(durations)))
                elif what == "copy":
                    after = draw(st.lists(st.sampled_from(copies[rank] or [0]), max_size=1))
                    after *= bool(copies[rank])
                    copies[rank].append(len(items))
                    begun[rank].append(copied(len(items)))
                    lane = draw(st.sampled_from(["h2d", "disk"]))
                    items.append(copy(len(items), draw(durations), *after, lane=lane))
                elif begun[rank]:
                    items.append(wait(draw(st.sampled_from(begun[rank]))))
                    begun[rank].remove(items[-1].name)
        ranks = tuple(sorted(draw(st.sets(st.integers(0, world - 1), min_size=1))))
        made = call(name, draw(durations), ranks=ranks, lane=draw(st.sampled_from("ab")))
        for rank in ranks:
            begun[rank].append(name)
            lists[rank].append(made._replace(late=draw(durations)))
    return lists


def by_fixed_point(lists):
    """The definition itself, applied to every item over and over until nothing moves."""
    times = [[(0.0, 0.0)] * len(items) for items in lists]
    moved = True
    while moved:
        before, launches = [list(rank) for rank in times], {}
        for rank, items in enumerate(lists):
            now, free, over = 0.0, {}, {}
            for i, item in enumerate(items):
                start = max(now, free.get(item.lane, 0.0))
                if item.op == JOB:
                    start = max([start, *(over[value,] for value in item.name.reads)])
                elif item.op == CALL:
                    launches.setdefault(item.name, []).append((rank, i, start))
                    start = max(start, times[rank][i][0])
                end = max(now, over[item.name]) if item.op == WAIT else start + item.takes
                times[rank][i] = start, end + item.late
                if item.op in (WORK, WAIT):
                    now = end
                else:
                    free[item.lane] = end
                    over[item.name.writes if item.op == JOB else item.name] = end + item.late
        for members in launches.values():
            start = max(start for *_, start in members)
            for rank, i, _ in members:
                item = lists[rank][i]
                times[rank][i] = start, start + item.takes + item.late
        moved = before != times
    return times


@given(programs())
def test_the_engine_agrees_with_the_definition_applied_until_nothing_moves(lists):
    assert moments(lists) == by_fixed_point(lists)
