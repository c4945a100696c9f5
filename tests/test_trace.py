"""`pl.trace`: a function on real ranks leaves the same report that a training run leaves."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import paralab as pl
from paralab.report.facts import shared_cores
from paralab.spec.cluster import available_cores
from paralab.spec.links import Reach
from patience import HANG_S
from stated import NODES


def pass_on(group, factor):
    """Compute, one message round the ring, one sum."""
    work = torch.ones(200, 200)
    for _ in range(5):
        work = work @ work / 200
    tensor = torch.full((1000,), float(group.index * factor))
    received = torch.empty(1000)
    n, ranks = group.size, group.ranks
    right, left = ranks[(group.index + 1) % n], ranks[(group.index - 1) % n]
    group.exchange([("send", tensor, right), ("recv", received, left)]).wait()
    group.all_reduce(tensor).wait()
    return {
        "from the left": received,
        "sum": tensor[0],
        "also": [tensor.bfloat16()[:2], 3],
        "torch's": (tensor[:2], (tensor.max(dim=0), tensor.shape)),
    }


@pytest.fixture(scope="module")
def report():
    return pl.trace(pass_on, 4, (2,), nodes=2, timeout=HANG_S)


def test_results_come_in_rank_order_with_tensors_as_numpy(report):
    for rank, result in enumerate(report.results):
        assert type(result["from the left"]) is np.ndarray
        assert (result["from the left"] == 2 * ((rank - 1) % 4)).all()
        assert result["sum"] == 12.0 and result["also"][1] == 3
        assert result["also"][0].tolist() == [12.0, 12.0]
        first, (most, shape) = result["torch's"]
        assert type(first) is np.ndarray
        assert type(most) is tuple and list(map(type, most)) == [np.ndarray] * 2
        assert type(shape) is tuple and shape == (1000,)


def test_a_traced_function_is_a_measured_report_of_one_step(report):
    assert report.clock == "measured" and report.model is None and report.losses == []
    assert "peak_bytes" not in report.meta  # where memory= does not ask for them
    assert report.plan.world_size == 4 and report.steps["step"].tolist() == [0] * 4
    assert repr(report) == "Report(measured, pass_on on 4 ranks, 1 collective, 4 messages)"
    assert report.meta["function"] == "pass_on" and report.meta["nodes"] == [0, 0, 1, 1]
    assert report.meta["cores"] == available_cores()  # of the machine that both nodes are on
    assert shared_cores(replace(report, meta={**report.meta, "cores": 3})) == (4, 3)
    assert report.step_time > 0 and "step time" in report.summary().index
    shares = report.bubbles()  # it has no schedule, and no forward either
    assert shares[["formula", "simulated"]].isna().all(axis=None)
    assert shares.loc["bubble"].isna().all()


def test_every_byte_of_the_function_is_data_and_has_its_level(report):
    assert set(report.collectives["phase"]) == {"data"}
    sent = dict(report.traffic("op").itertuples(index=False))
    assert sent == {"send": 4 * 4000, "all_reduce": 2 * 3 * 4000}
    sends = report.collectives[report.collectives["op"] == "send"]
    assert sends.set_index("rank")["level"].to_dict() == {
        0: "intra", 1: "inter", 2: "intra", 3: "inter",
    }  # fmt: skip


def test_what_a_function_computes_is_written_down_between_its_calls(report):
    spans = report.spans[report.spans["lane"] == "compute"]
    for _, mine in spans.groupby("rank"):
        assert mine["start"].to_list()[1:] == mine["end"].to_list()[:-1]  # no gap
        work = mine[mine["kind"] == "compute"]
        assert work["cost"].max() > 1e-4 and mine["kind"].iloc[[0, -1]].tolist() == ["compute"] * 2
    assert len(spans[spans["kind"] == "wait"]) >= 2 * 4


def test_a_replay_without_compute_is_alpha_and_bytes_alone(report):
    replayed = report.replay(NODES, compute=0.0)
    _, message = NODES.call("send", 4000, Reach(2, 1, 2))  # to the next node
    _, summed = NODES.call("all_reduce", 6000, Reach(4, 2, 2))
    assert replayed.step_time == pytest.approx(message + summed, rel=1e-9)
    assert replayed.results is report.results and replayed.model is None
    full, double = report.replay(NODES), report.replay(NODES, compute=2.0)
    assert replayed.step_time < full.step_time < double.step_time
    assert double.spans["cost"].sum() == pytest.approx(2 * full.spans["cost"].sum())
    with pytest.raises(ValueError, match="compute=-1"):
        report.replay(NODES, compute=-1)


def uneven(group):
    end = time.thread_time() + 0.02 * group.index
    while time.thread_time() < end:
        pass


def test_ranks_that_do_different_things_keep_their_own_costs_in_a_replay():
    steps = pl.trace(uneven, 3, timeout=HANG_S).replay(NODES).steps
    lasted = (steps["end"] - steps["start"]).tolist()
    assert lasted[0] < 0.02 <= lasted[1] < 0.04 <= lasted[2]


def greedy(group, data):
    mine = torch.from_numpy(data[group.index])  # the argument's own memory
    mine += 1
    copy = mine.clone()  # 4000
    seen = torch.frombuffer(bytearray(4000), dtype=torch.uint8)  # 4000 more, seen once it is used
    total = seen.sum()  # 8
    mine.view(10, 100)[2:].add_(1)  # nothing
    del copy
    small = torch.tensor([1.0] * 500)  # 2000
    bigger = small.repeat(4)
    bigger.untyped_storage().resize_(20_000)
    bigger += 1  # 20000, seen once it is used
    return total


def test_peak_memory_is_what_the_function_had_alive_beyond_its_arguments():
    data = np.zeros((2, 1000), dtype=np.float32)
    assert pl.trace(greedy, 2, (data,), memory=True).meta["peak_bytes"] == [26008, 26008]


def breaks(group):
    if group.index == 1:
        return [][group.index]
    group.barrier()


def test_an_error_names_the_rank_and_begins_with_the_callers_function():
    with pytest.raises(pl.RankError, match="rank 1 raised IndexError") as caught:
        pl.trace(breaks, 2, timeout=HANG_S)
    assert "in breaks" in str(caught.value) and "in _program" not in str(caught.value)


def with_numpys_ranks(group):
    me, other = np.arange(group.size)[[group.index, 1 - group.index]]
    pair, got = group.subgroup(np.arange(group.size), axis="pair"), torch.zeros(1)
    group.exchange([("send", torch.full((1,), float(me)), other), ("recv", got, other)]).wait()
    values = torch.full((1,), float(me))
    pair.broadcast(values, root=np.int64(1)).wait()
    pair.reduce(got, root=np.arange(2)[1]).wait()
    return got, values


def test_a_rank_may_be_an_integer_of_numpys():
    """As are those of ``np.arange(world_size).reshape(pp, dp, tp)``."""
    report = pl.trace(with_numpys_ranks, 2, timeout=HANG_S)
    assert [[float(x[0]) for x in result] for result in report.results] == [[1, 1], [1, 1]]
    assert set(report.collectives["peer"].map(type)) == {int}


def faces(group):
    group.send(torch.ones(2), to=1 - group.index).wait()


def test_a_traced_function_is_held_to_ncclS_order_unless_asked_not_to():
    with pytest.raises(pl.RankError, match="OrderError"):
        pl.trace(faces, 2, timeout=HANG_S)
    assert pl.trace(pass_on, 2, (1,), strict=False).meta["strict"] is False


WRONG_CALLS = [
    ("to=7: not another rank of this group", lambda g, t: g.send(t, to=7)),
    ("source='1': not another", lambda g, t: g.recv(t, source="1")),
    ("to=", lambda g, t: g.send(t, to=g.index)),
    ("root=-1: not a rank of this group; legal: one of (0, 1)", lambda g, t: g.reduce(t, root=-1)),
    ("parts=[]: nothing to send", lambda g, t: g.exchange([])),
    ("side='snd': unknown choice", lambda g, t: g.exchange([("snd", t, 1 - g.index)])),
    ("tensor=[1, 2]: not a tensor", lambda g, t: g.all_reduce([1, 2])),
    ("tensor.numel()=5: it cannot be cut into 2 equal", lambda g, t: g.all_to_all(t, t)),
    ("output.numel()=5: all_to_all of 4 elements", lambda g, t: g.all_to_all(t, t[:4])),
    ("tensor.numel()=5: it cannot be cut into 2 equal", lambda g, t: g.reduce_scatter(t[:2], t)),
    ("output.numel()=5: reduce_scatter of 4 elem", lambda g, t: g.reduce_scatter(t, t[:4])),
    ("output.numel()=5: all_gather of 2 elements", lambda g, t: g.all_gather(t, t[:2])),
    ("output.dtype=torch.float64: ", lambda g, t: g.reduce_scatter(t[:2].double(), t[:4])),
]


def call_wrongly(group, calls):
    """What each says, on a rank that goes on."""
    said = []
    for call in calls:
        try:
            call(group, torch.arange(5.0)).wait()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    total = torch.ones(2)
    group.all_reduce(total).wait()
    return said, total


def test_a_call_that_cannot_be_is_refused_before_anything_is_sent():
    """gloo would send what lies behind a tensor's end, or wait for a rank that there is not."""
    words, calls = zip(*WRONG_CALLS, strict=True)
    for said, total in pl.trace(call_wrongly, 2, (calls,), timeout=HANG_S).results:
        assert all(map(str.startswith, said, words)) and len(said) == len(words), said
        assert total.tolist() == [2, 2]


def one_rank_more(group, later):
    pair = group.subgroup(range(group.size), axis="pair")
    pair.all_reduce(torch.ones(2)).wait()
    if group.index == later:
        pair.all_reduce(torch.ones(2))  # and waits for nobody


@pytest.mark.parametrize("later", [0, 1])
def test_a_collective_that_one_rank_alone_makes_is_an_error_of_order(later):
    """Nothing else would say so: gloo lets a rank go that waits for nothing."""
    call, end = "all_reduce of 2 elements of torch.float32", "the end of the function"
    one, group = 1 - later, "call #1 of the group of ranks .*"
    fits = f"on rank {later}, {group} is {call}, but on rank {one} it is {end}"
    other = f"on rank {one}, {group} is {end}, but on rank {later} it is {call}"
    with pytest.raises(pl.RankError, match=f"{fits}|{other}"):
        pl.trace(one_rank_more, 2, (later,), timeout=HANG_S)


def lets_go(group, wait):
    pair = group.subgroup(range(group.size), axis="pair")
    sums = [one.all_reduce(torch.ones(2)) for one in (group, group, pair)]
    for one in sums[:wait]:
        one.wait()


def test_a_call_that_nobody_waited_for_is_named():
    """Its result may be half-finished, and whether the others have made it is not known."""
    where = "ranks 0,1, step 0"
    words = f"rank 0 has not waited for all_reduce #1 on axis world, {where} and for 1 other call: "
    with pytest.warns(UserWarning, match=words):
        pl.trace(lets_go, 2, (1,))
    with pytest.warns(UserWarning, match=f"for all_reduce #0 on axis pair, {where}: its"):
        pl.trace(lets_go, 2, (2,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pl.trace(lets_go, 2, (3,))


def waits_for_rank_2(group, both):
    if group.index == 1:
        parts = [("recv", torch.empty(2), 2), ("send", torch.ones(2), 0)]
        group.exchange(parts[: 1 + both]).wait()


@pytest.mark.parametrize(
    ("strict", "both", "ends"),
    [(False, False, "recv #0 for rank 2"), (True, True, "exchange #0 for ranks 0, 2")],
)
def test_a_hang_in_a_message_names_the_ranks_at_its_other_ends_alone(strict, both, ends):
    """Rank 3 is of the group too, but has no part in the message."""
    words = rf"1 waits in {ends} \(ranks? [0-9, ]+ already returned\)\n"
    with pytest.raises(pl.RankTimeout, match=words) as hang:
        pl.trace(waits_for_rank_2, 4, (both,), timeout=1.0, strict=strict)
    said = "rank 1: in recv #0 from rank 2 on axis world, ranks 0,1,2,3"
    assert both or said in str(hang.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fn": None}, "fn=None: cannot be called"),
        ({"fn": lambda: 0}, r"too many .*; legal: a function for the call fn\(group, \*args\)"),
        ({"ranks": 0}, "ranks=0"),
        ({"nodes": 3}, "nodes=3.*from 1 to 2"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_a_process_starts(settings, says):
    with pytest.raises(ValueError, match=says):
        pl.trace(**{"fn": breaks, "ranks": 2, **settings})
