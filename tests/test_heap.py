"""Fragmentation on the storages of a real step: what is free, and what of it is in one piece."""

from collections import Counter, deque

import pytest

import paralab as pl
from paralab import view
from paralab.instruments import heap, memory
from paralab.instruments.heap import Storage
from paralab.launch import launch_program
from refusals import refuses

MODEL = pl.ModelSpec(layers=4, hidden=64, heads=4, seq_len=32)
KB = 1024


def test_a_gap_between_what_stays_is_used_only_by_what_fits():
    found = [Storage(0, 9, 4 * KB, "activations"), Storage(1, 3, 2 * KB, "workspace"),
             Storage(2, 9, 4 * KB, "activations"), Storage(4, 9, 3 * KB, "workspace"),
             Storage(5, 9, 1 * KB, "workspace")]  # fmt: skip
    # 3 KB do not fit into the gap of 2 and go to the end; 1 KB does.
    space = heap.first_fit(found)
    assert space.extent == 13 * KB
    assert space.gaps(3) == [0, 2 * KB, 3 * KB] and max(space.gaps(5)) == KB
    assert heap.first_fit(found, apart=6).extent == 12 * KB


def test_attention_that_reads_no_mask_of_the_future_stores_none():
    """The fused kernel knows what lies ahead by itself."""
    fused = heap.storages(MODEL.replace(attention="sdpa"), pl.Plan())
    assert "buffers" not in {storage.category for storage in fused}


@pytest.fixture(scope="module")
def found():
    return heap.storages(MODEL, pl.Plan(microbatch_size=2))


def test_a_step_gives_back_all_but_the_model_states_the_mask_and_the_loss(found):
    last = max(storage.died for storage in found)
    kept = Counter()
    for storage in found:
        kept[storage.category] += storage.bytes * (storage.died == last)
    psi, tensors = MODEL.num_params, len(MODEL.parameter_shapes())
    assert +kept == {
        "parameters": 4 * psi,
        "optimizer": 8 * psi + 4 * tensors,  # AdamW counts steps for each tensor
        "buffers": MODEL.seq_len**2,  # the causal mask
        "workspace": 4,  # the loss, which is read when the step is over
    }
    assert all(0 <= storage.born < storage.died for storage in found)


def watched_backwards(context, model, plan):
    """In a rank whose Python lets go of what dies at one moment in the opposite order."""

    class Backwards(deque):
        append = deque.appendleft

    memory.deque = Backwards
    return heap._watch(context, model, plan)


def test_what_dies_at_one_moment_is_in_an_order_that_no_version_of_python_decides(found):
    [rows] = launch_program(watched_backwards, 1, (MODEL, pl.Plan(microbatch_size=2)), device="cpu")
    assert [Storage(*row) for row in rows] == found


def test_what_is_alive_at_once_is_the_ledgers_peak(found, run):
    report = run(MODEL, pl.Plan(microbatch_size=2), steps=1)
    alive = (sum(s.bytes for s in found if s.born <= one.born < s.died) for one in found)
    assert max(alive) == pytest.approx(report.peak_memory, rel=0.001)


def test_the_caching_allocator_rounds_splits_joins_and_keeps_what_it_reserved():
    mib = 2**20
    found = [Storage(0, 3, 100, "workspace"), Storage(1, 4, 3 * mib, "activations"),
             Storage(2, 5, 12 * mib, "activations"), Storage(4, 6, 5 * mib, "gradients"),
             Storage(5, 7, 12 * mib, "gradients")]  # fmt: skip
    rows = heap.cached(found)
    # 2 MiB for the small one; the 3 MiB get a segment of 20, whose rest serves the first 12
    assert rows[2] == (2, 512 + 15 * mib, 22 * mib)
    # 5 MiB: 3 and the 5 behind the 12 are free, not side by side; the second 12 fit once the
    # first ones are free again
    assert rows[-1] == (7, 0, 22 * mib) and max(row[2] for row in rows) == 22 * mib
    alone = heap.cached([Storage(0, 1, 11 * mib, "gradients"), Storage(1, 2, mib, "gradients")])
    assert [row[2] / mib for row in alone] == [12, 12, 14, 14]  # a multiple of 2; small apart


def test_reserved_is_at_least_what_is_allocated_and_never_falls(found):
    rows = heap.cached(found)
    assert all(allocated <= reserved for _, allocated, reserved in rows)
    assert [row[2] for row in rows] == sorted(row[2] for row in rows)
    assert rows[-1][1] == 0


def test_the_map_of_addresses_says_which_request_fails(found):
    event = max(one.died for one in found if one.category == "activations")
    spaces = {"one": heap.first_fit(found), "apart": heap.first_fit(found, apart=100)}
    one, apart = (max(space.gaps(event)) for space in spaces.values())
    assert 1.5 * one < apart
    assert spaces["apart"].extent < 1.05 * spaces["one"].extent
    for request, served in (
        (one, "2 of 2 address spaces: one, apart"),
        (apart, "1 of 2 address spaces: apart"),
        (apart + 1, "0 of 2 address spaces"),
    ):
        chart = view.addresses(spaces, event, request)
        assert chart.finding.endswith(f" at the line is served in {served}")
    assert len(chart.table) == 2 * len(found)


def test_several_ranks_are_refused():
    refuses("a plan of one rank", heap.storages, MODEL, pl.Plan(dp=2))
