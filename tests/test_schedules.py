"""Schedules: the papers' orders, torch's orders, and what cannot be scheduled."""

from itertools import product

import pytest

from paralab.parallel.schedules import (
    SCHEDULES,
    Action,
    actions,
    build,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from paralab.theory.schedule_check import live, peak_live, validate
from refusals import refuses

SIZES = list(product((1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 8, 16)))  # m < p and m % p != 0 among them


def text(schedule):
    return [" ".join(map(str, row)) for row in schedule]


def every_schedule():
    for (p, m), (name, function) in product(SIZES, SCHEDULES.items()):
        if function is not interleaved:
            yield name, function(p, m), p, m, 1
    for p, v, rounds in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3)):
        yield "interleaved", interleaved(p, p * rounds, v), p, p * rounds, v


# ---- the papers' orders ------------------------------------------------------------------------
def test_zb_h2_starts_with_2_p_minus_r_minus_1_forwards():
    assert text(zb_h2(2, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


def test_every_schedule_of_every_size_is_valid():
    for _, schedule, p, m, v in every_schedule():
        validate(schedule, microbatches=m, stages=p * v)


def test_live_activations_are_those_of_the_papers():
    for name, schedule, p, m, v in every_schedule():
        peak = peak_live(schedule)
        expected = {
            "naive": [1] * p,
            "gpipe": [m] * p,
            "1f1b": [min(m, p - r) for r in range(p)],
            "interleaved": [min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)],
            # A micro-batch counts until its weight half: (p - r) M_B + r M_W, Zero Bubble sec. 2.3.
            "zb-h1": [min(m, p)] * p,
            "zb-h2": [min(m, 2 * p - 1)] * p,
        }[name]
        assert peak == expected, (name, p, m, v)


def test_live_counts_a_forward_in_and_a_backward_out():
    assert live(one_f_one_b(2, 3)) == [[1, 2, 2, 2, 2, 1], [1, 1, 1, 1, 1, 1]]
    assert live(zb_h1(2, 2))[1] == [1, 1, 2, 2, 2, 1]  # 1F0 1I0 1F1 1I1 1W0 1W1


# ---- torch's ------------------------------------------------------------------------------------
def torch_rows(kind, p, m, v=1):
    """The compute actions of a schedule of torch.distributed.pipelining, rank by rank, as text."""
    from torch.distributed.pipelining import schedules as theirs

    cls = getattr(theirs, kind)
    one = object.__new__(cls)  # its constructor wants stages on devices; the order needs sizes
    one._num_stages, one._n_microbatches = p, m
    if v == 1 and hasattr(cls, "_get_pipeline_order") and kind in ("ScheduleGPipe", "Schedule1F1B"):
        rows = one._get_pipeline_order()
    else:
        one.pp_group_size, one.n_local_stages = p, v
        one.number_of_rounds = max(1, m // p)
        one.microbatches_per_round = m // one.number_of_rounds
        rows = {rank: one._calculate_single_rank_operations(rank) for rank in range(p)}
    kept = [[str(a) for a in rows[r] if a is not None] for r in range(p)]
    return [" ".join(a for a in row if not a.endswith("REDUCE_GRAD")) for row in kept]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 16])
def test_gpipe_is_torchs(p):
    for m in (1, 2, 3, 4, 7, 32):
        assert text(gpipe(p, m)) == torch_rows("ScheduleGPipe", p, m)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 16])
def test_interleaved_is_torchs(p):
    for rounds, v in product((1, 2, 3, 5), (1, 2, 3, 4)):
        rows = torch_rows("ScheduleInterleaved1F1B", p, p * rounds, v)
        assert text(interleaved(p, p * rounds, v)) == rows


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 16])
def test_1f1b_and_zb_h1_are_torchs_zero_bubble_of_one_stage_per_rank(p):
    # torch's own 1F1B forgets the last rank's first forward (2.13), and its interleaved schedule
    # warms up twice as long where v = 1. Its interleaved zero bubble, v = 1, is 1F1B's order.
    for m in (p, 2 * p, 3 * p, 5 * p):
        rows = torch_rows("ScheduleInterleavedZeroBubble", p, m)
        assert text(zb_h1(p, m)) == rows
        without = [" ".join(a.replace("I", "B") for a in row.split() if "W" not in a)
                   for row in rows]  # fmt: skip
        assert text(one_f_one_b(p, m)) == without
        assert text(one_f_one_b(p, m))[:-1] == torch_rows("Schedule1F1B", p, m)[:-1]


# ---- what can be written ------------------------------------------------------------------------
def test_an_action_reads_back_from_its_text():
    assert str(Action(4, "F", 0)) == "4F0" and repr([Action(4, "F", 0)]) == "[4F0]"
    assert actions(["12W345"]) == [[Action(12, "W", 345)]]
    for _, schedule, *_ in every_schedule():
        assert actions(text(schedule)) == schedule


@pytest.mark.parametrize("bad", ["", "F0", "0F", "0X0", "-1F0", "0F-1", "0f0", "0F0 0F1", "٠F0", 5])
def test_what_is_no_action_is_refused(bad):
    refuses(r"not an action; legal: .*4F0", actions, [[bad]])


@pytest.mark.parametrize(("lists", "said"), [
    ("0F0 0B0", "a list of actions per pipeline rank"),
    ([3], r"schedule\[0\]=3"),
    ([["0F0"], ["1F0", "oops"]], r"schedule\[1\]\[1\]='oops'"),
    ([[(0, "F", 0.5)]], r"schedule\[0\]\[0\]"),
])  # fmt: skip
def test_lists_that_are_no_schedule_are_refused_by_place(lists, said):
    refuses(said, actions, lists)


def test_names_and_own_functions_build_alike():
    for name in ("1f1b", one_f_one_b, lambda pp, m: text(one_f_one_b(pp, m))):
        assert build(name, pp=2, microbatches=3) == one_f_one_b(2, 3)
    for name in ("interleaved", interleaved, lambda pp, m, v=1: interleaved(pp, m, v)):
        assert build(name, pp=2, microbatches=4, virtual_stages=3) == interleaved(2, 4, 3)


@pytest.mark.parametrize(("sizes", "said"), [
    ({"schedule": "zigzag"}, "'1f1b'"),
    ({"schedule": "1f1b", "virtual_stages": 2}, "virtual_stages=2.*interleaved"),
    ({"schedule": "interleaved", "microbatches": 3}, "=3.*a multiple of 2, such as 2 or 4"),
    ({"schedule": "interleaved", "microbatches": 1}, "such as 2; or schedule=.1f1b.*any"),
    ({"schedule": "gpipe", "pp": 0}, "pp=0"),
    ({"schedule": "gpipe", "microbatches": 0}, "microbatches=0"),
    ({"schedule": lambda: []}, "f\\(pp, microbatches\\)"),
    ({"schedule": lambda pp, m: 7}, "a list of actions per pipeline rank"),
])  # fmt: skip
def test_what_cannot_be_built_is_refused_with_what_would_do(sizes, said):
    refuses(said, build, **{"pp": 2, "microbatches": 4, **sizes})
