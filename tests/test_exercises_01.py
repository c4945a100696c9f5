"""Lab 01: a ring all-reduce, and one on two levels of links, in plain torch.distributed."""

from __future__ import annotations

import bad_answers_01 as bad
import paralab as pl
from judged import Table, stored

RING, LEVELS = pl.exercises.ring_all_reduce, pl.exercises.hierarchical_all_reduce


RINGS = [  # answer, limits it breaks, words of the verdict
    (bad.by_collective, {"calls"}, "calls all_reduce, which is the thing to be"),
    (bad.imported_by_name, {"result"}, "goes around what is counted"),
    (bad.through_rank_0, {"calls", "extra memory", "simulated time"}, "no neighbour of it"),
    (bad.whole_tensor, {"extra memory"}, "takes 80,008 bytes, one chunk is 20,004"),
    (bad.half, {"result", "bytes per rank"}, "in 5,001 of 10,001 elements it is as it was before"),
    (bad.one_step_short, {"result", "bytes per rank"}, "it is as it was before"),
    (bad.does_not_add, {"result"}, "N=2: rank 0, element 0: "),
    (bad.never_waits, {"result"}, "never waits for send"),
    (bad.a_copy, {"extra memory"}, "bytes, one chunk is 20,004"),
    (bad.the_mean, {"result"}, "it is the mean, required: the sum"),
    (bad.not_in_place, {"result", "extra memory"}, "it is as it was before"),
    (bad.equal_chunks_only, {"result", "bytes per rank"}, "element 10,000: "),
    (bad.padded, {"bytes per rank", "extra memory"}, "together 80,016, required: 80,008"),
    (bad.torch_chunk, {"extra memory"}, "N=3: rank 2 takes 26,672 bytes"),
    (bad.in_pieces, {"simulated time"}, "µs of "),
    (bad.one_rank_receives_first, {"simulated time"}, "N=2: 144.0 µs of 72.0 µs"),
    (bad.gathers_twice, {"bytes per rank"}, "together 120,012, required: 80,008"),
    (bad.reads_too_early, {"result"}, "N=2: rank 0, element "),
    (bad.sends_first, {"result"}, "nothing moves any more: rank 0 in send"),
    (bad.with_a_group, {"result"}, "yours cannot be called so: missing a required argument"),
    (bad.raises, {"result"}, "raised KeyError: 'chunk 7'"),
    (None, {"result"}, "required: a function, yours is None"),
]
RIGHT_RINGS = [
    bad.owns_its_number,
    bad.gathers_to_the_left,
    stored("ring_all_reduce_other", "ring_to_the_left"),
]
ALL_RINGS = Table(RING, RINGS, RIGHT_RINGS, alone=[bad.sends_first])
test_a_wrong_ring_is_refused, test_a_right_ring_passes, test_the_stub_of_a_ring = ALL_RINGS.tests()


def test_two_verdicts_on_one_ring_are_the_same():
    ALL_RINGS.assert_reads_the_same_alone(bad.a_copy)


# ---- two levels ----------------------------------------------------------------------------------
TWO_LEVELS = [
    (bad.levels_flat, {"bytes between nodes", "bytes inside nodes"}, "bytes to others, required"),
    (bad.levels_two_all_reduces, {"bytes between nodes"}, "48,000 bytes to others, required: 24"),
    (bad.levels_across_first, {"bytes between nodes"}, "48,000 bytes to others, required: 24,000"),
    (bad.levels_by_leaders, {"bytes between nodes", "bytes inside nodes"}, "48,000 bytes to oth"),
    (bad.levels_inside_only, {"result", "bytes between nodes"}, "sends nothing through the group"),
    (bad.levels_without_the_middle, {"result", "bytes between nodes"}, "rank 0, element 0: "),
    (bad.levels_swapped, {"bytes between nodes"}, "2 nodes of 2: rank 0 sends 48,000 bytes to"),
    (bad.levels_wrong_twins, {"result"}, "2 nodes of 2: rank 0, element 0: "),
    (bad.levels_not_in_place, {"result"}, "it is as it was before"),
    (bad.levels_no_wait, {"result"}, "2 nodes of 2: rank 0, element 0: "),
    (bad.levels_many_copies, {"extra memory"}, "bytes, the tensor has 48,000"),
    (bad.levels_for_two, {"bytes between nodes"}, "2 nodes of 3: rank "),
    (bad.raises, {"result"}, "raised KeyError: 'chunk 7'"),
    (bad.by_collective, {"result"}, "yours cannot be called so: too many positional"),
]
RIGHT_LEVELS = [
    bad.levels,
    bad.levels_by_views,
    stored("hierarchical_all_reduce_other", "by_all_to_all"),
]
ALL_LEVELS = Table(LEVELS, TWO_LEVELS, RIGHT_LEVELS)
test_wrong_levels_are_refused, test_right_levels_pass, test_the_stub_of_levels = ALL_LEVELS.tests()


def test_a_table_of_answers_costs_one_check():
    assert not ALL_RINGS[bad.half] and ALL_RINGS.launches == 3
    assert ALL_LEVELS[bad.levels] and ALL_LEVELS.launches == 2
