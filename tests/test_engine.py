"""The event engine: timelines worked out by hand, and properties that hold for any program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paralab.theory.engine import Item, simulate


def compute(seconds):
    return Item("compute", seconds)


def wait(*positions):
    return Item("compute", 0.0, positions)


def copy(seconds, *after):
    return Item("h2d", seconds, after)


def call(name, seconds=1.0, *after, ranks=(0, 1), lane="comm:dp"):
    return Item(lane, seconds, after, name, ranks)


def test_compute_runs_one_after_the_other():
    times = simulate([[compute(2.0), compute(0.5)], [compute(1.0)]])
    assert times.start == [[0.0, 2.0], [0.0]]
    assert times.end == [[2.0, 2.5], [1.0]]


def test_a_call_starts_at_the_last_launch_and_a_wait_ends_with_it():
    fast = [compute(1.0), call("a", 3.0), compute(0.5), wait(1), compute(1.0)]
    slow = [compute(4.0), call("a", 3.0), wait(1)]
    times = simulate([fast, slow])
    assert (times.start[0][1], times.end[0][1]) == (4.0, 7.0)  # rank 1 launches at 4
    assert (times.start[1][1], times.end[1][1]) == (4.0, 7.0)
    assert times.end[0][3] == times.end[1][2] == 7.0
    assert (times.start[0][4], times.end[0][4]) == (7.0, 8.0)


def test_a_wait_for_what_is_over_takes_no_time():
    times = simulate([[call("a", ranks=(0,)), compute(3.0), wait(0), compute(1.0)]])
    assert (times.start[0][2], times.end[0][2]) == (3.0, 3.0)
    assert times.end[0][3] == 4.0


def test_a_lane_is_first_in_first_out():
    program = [call(k, 2.0) for k in "abc"]
    times = simulate([program, program])
    assert times.start[0] == [0.0, 2.0, 4.0]
    assert times.end[1] == [2.0, 4.0, 6.0]


def test_lanes_of_different_groups_run_side_by_side():
    program = [call("a", ranks=(0,)), call("b", ranks=(0,), lane="comm:tp")]
    assert simulate([program]).start == [[0.0, 0.0]]


def test_a_call_queued_on_one_member_holds_up_the_others():
    first = [call("a", 6.0, ranks=(0,)), call("b")]
    times = simulate([first, [call("b")]])
    assert (times.start[1][0], times.end[1][0]) == (6.0, 7.0)


def test_the_slowest_member_sets_the_duration():
    assert simulate([[call("a", 2.0)], [call("a", 5.0)]]).end == [[5.0], [5.0]]


def test_a_send_and_its_receive_are_one_rendezvous():
    sender = [compute(1.0), call("m", 3.0)]
    receiver = [call("m", 0.0), wait(0), compute(1.0)]
    times = simulate([sender, receiver])
    assert (times.start[1][0], times.end[1][0]) == (1.0, 4.0)
    assert times.end[1][2] == 5.0
    assert times.end[0][1] == 4.0  # the sender computes on meanwhile; its lane is busy


def test_copies_have_lanes_of_their_own_and_can_follow_each_other():
    program = [
        Item("disk", 2.0),
        copy(1.0, 0),
        copy(1.0),
        call("a", 1.0, 1, ranks=(0,)),
        compute(1.0),
        wait(2),
    ]
    times = simulate([program])
    assert times.start == [[0.0, 2.0, 3.0, 3.0, 0.0, 4.0]]
    assert times.end == [[2.0, 3.0, 4.0, 4.0, 1.0, 4.0]]


def test_overlap_hides_what_fits_behind_backward():
    hidden = [compute(1.0), call("a", 2.0), compute(5.0), wait(1)]
    exposed = [compute(6.0), call("a", 2.0), wait(1)]
    assert simulate([hidden, hidden]).end[0][-1] == 6.0
    assert simulate([exposed, exposed]).end[0][-1] == 8.0


# ---- what cannot run ------------------------------------------------------------------------
def test_a_call_that_a_member_never_launches_is_named():
    with pytest.raises(ValueError, match=r"rank 0 waits for sum 1, which rank 1 never launches"):
        simulate([[call("sum 1"), wait(0)], [compute(1.0)]])
    with pytest.raises(ValueError, match=r"rank 1 waits for sum 1, which rank 0, 2 never"):
        simulate([[compute(1.0)], [call("sum 1", ranks=(0, 1, 2))], []])


def test_two_ranks_that_wait_for_each_other_are_a_deadlock():
    mine = [call("a", lane="a"), wait(0), call("b", lane="b"), wait(2)]
    yours = [call("b", lane="b"), wait(0), call("a", lane="a"), wait(2)]
    with pytest.raises(ValueError, match="different orders"):
        simulate([mine, yours])


def test_calls_in_another_order_on_one_lane_are_a_deadlock():
    with pytest.raises(ValueError, match="different orders"):
        simulate([[call("a"), call("b")], [call("b"), call("a")]])


# ---- any program ----------------------------------------------------------------------------
durations = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0])  # exact in binary: sums compare with ==


@st.composite
def programs(draw):
    """Random programs that cannot deadlock: one global order of calls, every member launches it
    there.
    """
    world = draw(st.integers(1, 4))
    lists = [[] for _ in range(world)]
    launched = [[] for _ in range(world)]
    for name in range(draw(st.integers(0, 6))):
        for rank in range(world):
            for _ in range(draw(st.integers(0, 2))):
                what = draw(st.sampled_from(["compute", "wait", "copy"]))
                if what == "compute":
                    lists[rank].append(compute(draw(durations)))
                elif what == "copy":
                    launched[rank].append(len(lists[rank]))
                    lists[rank].append(copy(draw(durations)))
                elif launched[rank]:
                    lists[rank].append(wait(draw(st.sampled_from(launched[rank]))))
        ranks = tuple(sorted(draw(st.sets(st.integers(0, world - 1), min_size=1))))
        lane = draw(st.sampled_from(["comm:dp", "comm:tp"]))
        for rank in ranks:
            after = ()
            if launched[rank] and draw(st.booleans()):
                after = (draw(st.sampled_from(launched[rank])),)
            launched[rank].append(len(lists[rank]))
            lists[rank].append(call(name, draw(durations), *after, ranks=ranks, lane=lane))
    return lists


def by_fixed_point(lists):
    """The definition itself, applied to every item over and over until nothing moves."""
    start = [[0.0] * len(p) for p in lists]
    end = [[0.0] * len(p) for p in lists]
    moved = True
    while moved:
        moved = False
        members = {}
        for rank, program in enumerate(lists):
            free = {}
            for i, item in enumerate(program):
                lanes = [free.get("compute", 0.0), free.get(item.lane, 0.0)]
                s = max([*lanes, *(end[rank][j] for j in item.after)])
                e = s + item.seconds
                if item.call is not None:
                    members.setdefault(item.call, []).append((rank, i, s, item.seconds))
                    s, e = max(s, start[rank][i]), end[rank][i]
                free[item.lane] = e
                moved |= (s, e) != (start[rank][i], end[rank][i])
                start[rank][i], end[rank][i] = s, e
        for parts in members.values():
            s = max(part[2] for part in parts)
            e = s + max(part[3] for part in parts)
            for rank, i, _, _ in parts:
                moved |= (s, e) != (start[rank][i], end[rank][i])
                start[rank][i], end[rank][i] = s, e
    return start, end


@given(programs())
def test_the_engine_agrees_with_the_definition_applied_until_nothing_moves(lists):
    times = simulate(lists)
    assert (times.start, times.end) == by_fixed_point(lists)


@given(programs())
def test_no_call_starts_before_its_last_member_has_launched(lists):
    times = simulate(lists)
    launch = {}
    for rank, program in enumerate(lists):
        now = 0.0
        for i, item in enumerate(program):
            if item.lane == "compute":
                now = times.end[rank][i]
            elif item.call is not None:
                launch[item.call] = max(launch.get(item.call, 0.0), now)
    for rank, program in enumerate(lists):
        for i, item in enumerate(program):
            assert item.call is None or times.start[rank][i] >= launch[item.call]


@given(programs())
def test_a_compute_lane_is_idle_only_before_a_wait(lists):
    times = simulate(lists)
    for rank, program in enumerate(lists):
        free = 0.0
        for i, item in enumerate(program):
            if item.lane == "compute":
                assert times.start[rank][i] == free or (item.after and times.start[rank][i] > free)
                free = times.end[rank][i]
                assert free == times.start[rank][i] + item.seconds
