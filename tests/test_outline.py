"""A step in outline says what the full simulation says: bytes, memory, time, and every picture.

The full one is of the list that was never folded.
"""

import dataclasses
from functools import cache
from itertools import product

import pytest

import paralab as pl
from paralab.interpret.predict import predict
from paralab.interpret.totals import Totals
from paralab.parallel.schedules import Action, one_f_one_b
from paralab.programs.instructions import WORKERS
from refusals import refuses
from stated import mixed

MODEL = pl.ModelSpec(layers=4, hidden=32, heads=4, seq_len=16, vocab=256, attention="explicit")
DEEP = MODEL.replace(layers=8)
LINK = {"alpha": 3e-6, "bandwidth": 1e10}
FAST = pl.Cluster(
    nodes=8, devices_per_node=4, flops=1e11, memory_bandwidth=3e10, op_overhead=5e-6,
    intra=pl.Link(**LINK), inter=pl.Link(alpha=1e-5, bandwidth=2e9),
    host=pl.Link(alpha=1e-5, bandwidth=5e9), disk=pl.Link(alpha=1e-5, bandwidth=2e9),
    host_bandwidth=1e10,
)  # fmt: skip
# Messages take longer than what is computed between them.
SLOW = FAST.replace(intra=pl.Link(alpha=3e-4, bandwidth=3e8),
                    inter=pl.Link(alpha=2e-3, bandwidth=2e7))  # fmt: skip
# And its ranks post their calls themselves, on shared cores, and messages are gloo's.
SHARED = SLOW.replace(call_overhead=1e-4, wait_overhead=2e-4, wait_work=5e-5, cores=8)
CLUSTERS = {"fast": FAST, "slow": SLOW, "shared": SHARED}


DELAYED = {"gradients": "cpu", "optimizer": "cpu", "delayed": True}
PLANS = {
    "one device": {"microbatches": 8},
    "bucketed": {"dp": 4, "grad_sync": "bucketed"},
    "1f1b": {"pp": 4, "microbatches": 8},
    "gpipe": {"pp": 4, "microbatches": 8, "schedule": "gpipe"},
    "naive pipeline": {"pp": 4, "microbatches": 4, "schedule": "naive"},
    "interleaved": {"pp": 4, "microbatches": 8, "schedule": "interleaved", "virtual_stages": 2},
    "zb-h1": {"pp": 4, "microbatches": 8, "schedule": "zb-h1"},
    "zb-h2": {"pp": 4, "dp": 2, "microbatches": 8, "schedule": "zb-h2"},
    "three axes": {"dp": 2, "tp": 2, "pp": 2, "microbatches": 6},
    "nodes cut through groups": {"dp": 3, "tp": 2, "pp": 4, "microbatches": 6},
    "only some cross nodes": {"dp": 3, "pp": 2, "microbatches": 6},  # of nodes of four
    "2.5d, many": {"tp": 4, "dp": 2, "microbatches": 3, "tp_mode": "2.5d", "microbatch_size": 4,
                   "zero_stage": 1},
    "2.5d, one sum": {"tp": 4, "dp": 2, "microbatches": 5, "tp_mode": "2.5d",
                      "microbatch_size": 2, "recompute": "selective"},
    "3d, zb-h1": {"tp": 8, "pp": 2, "microbatches": 4, "tp_mode": "3d", "microbatch_size": 4,
                  "schedule": "zb-h1", "recompute": "full"},
    "zero 2": {"dp": 4, "microbatches": 6, "zero_stage": 2, "bucket_bytes": 20_000},
    "zero 3": {"dp": 4, "microbatches": 6, "zero_stage": 3},
    "zero 3, tp and pp": {"dp": 2, "tp": 2, "pp": 2, "microbatches": 5, "zero_stage": 3,
                          "recompute": "full"},
    "full": {"tp": 2, "microbatches": 6, "recompute": "full", "partition_activations": True},
    "messages in parts": {"tp": 2, "pp": 4, "microbatches": 8, "partition_messages": True,
                          "schedule": "zb-h1"},
    "all on the host": {"dp": 2, "microbatches": 6, "zero_stage": 3, "offload": "cpu"},
    "all in files": {"dp": 2, "microbatches": 6, "zero_stage": 3, "offload": "nvme"},
    "16 bits on the host": {"dp": 2, "microbatches": 6, "zero_stage": 1, "precision": "bf16",
                            "offload": "cpu"},
    "inputs on the host": {"pp": 2, "microbatches": 6, "recompute": "full",
                           "offload": {"activations": "cpu"}},
    "delayed": {"microbatches": 6, "zero_stage": 2, "offload": DELAYED},
    "relay": {"microbatches": 6, "zero_stage": 3, "offload": "cpu", "schedule": "l2l",
              "recompute": "full"},
    "many": {"pp": 4, "microbatches": 40},
    "many, zero 3": {"dp": 2, "pp": 2, "microbatches": 20, "zero_stage": 3, "prefetch": 2},
    "zb-h1, sequence": {"dp": 2, "tp": 2, "pp": 2, "microbatches": 6, "schedule": "zb-h1",
                        "sequence_parallel": True, "zero_stage": 1},
    "tp, sequence": {"tp": 4, "microbatches": 5, "sequence_parallel": True},
    "gradients on the host": {"dp": 2, "pp": 2, "microbatches": 6, "zero_stage": 2,
                              "offload": "cpu"},
    "own schedule": {"pp": 2, "microbatches": 7, "schedule": mixed},
    "own, backward whole": {"pp": 3, "microbatches": 7, "schedule": one_f_one_b},
}  # fmt: skip


@cache
def both(name, links="slow"):
    plan, cluster = pl.Plan(**PLANS[name]), CLUSTERS[links]
    model = DEEP if plan.stages > 4 else MODEL
    return tuple(
        predict(model, plan, cluster, steps=2, detail=detail) for detail in ("calls", "actions")
    )


def totals(report, table, by, sums, ranks):
    found = getattr(report, table)
    found = found[found["rank"].isin(ranks)]
    return found.groupby(by)[sums].sum().sort_index().to_dict("index")


def fullest(report, tier, ranks):
    """{rank: most bytes of a tier at any moment}"""
    held = report.memory[(report.memory["tier"] == tier) & report.memory["rank"].isin(ranks)]
    return held.groupby(["rank", "time"])["bytes"].sum().groupby("rank").max().to_dict()


@pytest.mark.parametrize("name", PLANS)
def test_bytes_and_memory_are_exactly_those_of_every_call(name):
    calls, actions = both(name)
    plan, ranks = calls.plan, actions.steps["rank"].tolist()
    assert set(ranks) == set(range(0, plan.world_size, plan.dp * plan.tp))
    by, sums = ["step", "rank", "op", "axis", "phase", "level"], ["payload_bytes", "wire_bytes"]
    assert totals(actions, "collectives", by, sums, ranks) == \
        totals(calls, "collectives", by, sums, ranks)  # fmt: skip
    by = ["step", "rank", "lane", "op", "category"]
    assert totals(actions, "copies", by, ["bytes"], ranks) == \
        totals(calls, "copies", by, ["bytes"], ranks)  # fmt: skip
    for tier in ("device", "host", "file"):
        assert fullest(actions, tier, ranks) == fullest(calls, tier, ranks)
    assert actions.peaks().equals(calls.peaks())
    kinds = [kinds_off_the_device(report) for report in (calls, actions)]
    assert kinds[0] == kinds[1]
    if name == "16 bits on the host":
        assert ("host", "compute") in kinds[1]  # the rounding


@pytest.mark.parametrize("name", PLANS)
def test_tables_that_are_not_looked_through_would_pass(name):
    dataclasses.replace(both(name)[1])  # made of data frames, whose every value is checked


def kinds_off_the_device(report):
    spans = report.spans[report.spans["lane"].isin(WORKERS)]
    return set(zip(spans["lane"], spans["kind"], strict=True))


@pytest.mark.parametrize("plan", [
    {"dp": 16, "zero_stage": 1}, {"dp": 8, "pp": 2, "microbatches": 2},
    {"dp": 4, "tp": 4, "tp_mode": "2d"},
], ids=str)  # fmt: skip
def test_bytes_are_on_the_levels_that_those_of_all_members_of_a_group_are_on(plan):
    """One rank stands for them; it need not be the one that sends to another node."""
    for cores in (None, 16):  # without them over NCCL, where a reduce-scatter is a ring as well
        cluster, shares = FAST.replace(devices_per_node=8, nodes=2, cores=cores), []
        for detail in ("calls", "actions"):
            report = predict(MODEL, pl.Plan(**plan), cluster, steps=1, detail=detail)
            sent = report.traffic(by="level").set_index("level")["bytes"]
            shares.append((sent / report.steps["rank"].nunique()).to_dict())
        assert shares[1] == pytest.approx(shares[0], abs=2)
        one_in_eight = 8 * shares[0]["inter"] == pytest.approx(sum(shares[0].values()))
        assert one_in_eight == ("zero_stage" in plan and cluster.gpus)


@pytest.mark.parametrize("name", PLANS)
def test_without_its_tables_a_step_is_as_long_and_as_large(name):
    report = both(name)[1]
    for many in (False, True):
        found = Totals(report.model, report.plan, SLOW, "adamw", many=many)
        assert found.seconds() == pytest.approx(report.step_time, rel=1e-12)
        assert found.peak == report.peak_memory
        elsewhere = Totals(report.model, report.plan, FAST, "adamw", many=many).seconds()
        assert found.seconds(FAST) == elsewhere and found.seconds(SLOW) == found.seconds()


# Where messages hide behind what is computed, a plan of each kind: the others wait for more. Where
# ranks post their calls themselves, those that make calls of other kinds or at other places.
HIDDEN = ["bucketed", "1f1b", "interleaved", "zb-h1", "three axes", "tp, sequence", "zero 3",
          "all in files", "only some cross nodes"]  # fmt: skip
POSTED = [*HIDDEN, "gpipe", "zb-h2", "2.5d, many", "3d, zb-h1", "zero 2", "zero 3, tp and pp",
          "full", "messages in parts", "16 bits on the host", "delayed", "relay", "many",
          "many, zero 3", "zb-h1, sequence", "own schedule"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "links"),
    [*product(PLANS, ["slow"]), *product(POSTED, ["shared"]), *product(HIDDEN, ["fast"])],
)
def test_a_step_takes_as_long_as_with_every_call_and_has_the_same_bubble(name, links):
    calls, actions = both(name, links)
    assert actions.step_time == pytest.approx(calls.step_time, rel=1e-9)
    assert actions.bubble == pytest.approx(calls.bubble, abs=1e-9)
    one, other = calls.summary()["value"], actions.summary()["value"]
    assert list(one.index) == list(other.index)
    near = {"waiting": 0.01 * one["step time"]}  # what is between boxes counts as one
    if links == "shared":  # posting counts as one, too
        near = dict.fromkeys(("waiting", "optimizer"), one["step time"])
        near["of it hidden behind compute"] = 0.2
    if calls.plan.tp > 1:  # calls inside actions are counted one by one, messages next to them
        near["communication in flight"] = 0.04 * one["communication in flight"]
        near["of it hidden behind compute"] = 4.0 if links == "shared" else 1.0
    for quantity, value in one.items():
        allowed = max(near.get(quantity, 0.0), 1e-6 * abs(value), 1.1e-4)
        assert other[quantity] == pytest.approx(value, abs=allowed), quantity
    ranks = actions.steps["rank"].unique()
    assert in_messages(actions, ranks) == pytest.approx(in_messages(calls, ranks))


def in_messages(report, ranks):
    """{(rank, op): seconds of all its messages between stages}"""
    found = report.collectives
    found = found[found["op"].isin(["send", "recv"]) & found["rank"].isin(ranks)]
    return (found["end"] - found["start"]).groupby([found["rank"], found["op"]]).sum().to_dict()


# ---- pictures ------------------------------------------------------------------------------------
def test_a_box_per_action_in_the_order_of_the_schedule():
    _, report = both("three axes")
    spans = report.spans[(report.spans["step"] == 1) & (report.spans["microbatch"] >= 0)]
    assert len(spans) == sum(map(len, report.plan.actions()))
    for index, actions in enumerate(report.plan.actions()):
        mine = spans[spans["rank"] == 4 * index].sort_values("id")
        letters = mine["kind"].map({"forward": "F", "backward": "B"})
        found = zip(mine["stage"], letters, mine["microbatch"], strict=True)
        assert [Action(*action) for action in found] == actions
    inside = (spans["end"] - spans["start"] - spans["cost"])[spans["kind"] == "forward"]
    assert (inside > 1e-5).all()  # every forward waits for its tensor-parallel sums
    by_id = report.spans.set_index("id")
    for end, after in zip(spans["start"], spans["after"], strict=True):
        assert all(by_id.loc[a, "end"] <= end for a in after)


@pytest.mark.parametrize("name", ["three axes", "all in files"])
def test_every_picture_and_table_reads_an_outline(name, tmp_path):
    calls, actions = both(name)
    assert actions.meta["detail"] == "actions" and "in outline" in repr(actions)
    for draw in (actions.timeline, actions.memory_chart, actions.traffic_chart):
        assert draw().data
    assert actions.peaks()["predicted"].tolist() == calls.peaks()["predicted"].tolist()
    assert actions.bubbles().values == pytest.approx(calls.bubbles().values, abs=0.01, nan_ok=True)
    actions.to_html(tmp_path / "page.html")
    actions.to_perfetto(tmp_path / "trace.json")
    actions.save(tmp_path / "report.json")
    again = pl.load(tmp_path / "report.json")
    assert again.summary().equals(actions.summary())
    refuses("in an outline, calls are summed up", actions.replay, FAST)
    # Per rank, not per rank of the plan: an outline has fewer.
    sent = calls.traffic("rank").set_index("rank")["bytes"]
    mine = actions.traffic("rank").set_index("rank")["bytes"]
    assert mine.to_dict() == sent[mine.index].to_dict()
    assert actions.summary()["value"]["sent per rank and step"] == \
        pytest.approx(mine.mean() / 1e6, abs=1e-4)  # fmt: skip


@pytest.mark.parametrize("name", ["1f1b", "zero 3, tp and pp", "inputs on the host"])
@pytest.mark.parametrize("links", CLUSTERS)
def test_no_wait_ends_before_what_it_is_said_to_be_for(name, links):
    """A backward that recomputes begins before it has received: the gap before it is another."""
    _, actions = both(name, links)
    end = actions.spans.set_index("id")["end"]
    waits = actions.spans[actions.spans["kind"] == "wait"]
    assert any(waits["after"])
    for until, after in zip(waits["end"], waits["after"], strict=True):
        assert all(end[source] <= until + 1e-9 * actions.step_time for source in after)


def test_adding_up_what_a_reduction_received_is_work_that_hides_calls_and_copies():
    """On processors, whose reduce-scatter is an all-to-all and a sum on the rank's own thread."""
    plan = pl.Plan(dp=2, microbatches=3, zero_stage=1, offload="cpu", bucket_bytes=3000)
    hidden = []
    for detail in ("calls", "actions"):
        report = predict(MODEL, plan, FAST.replace(cores=8), steps=2, detail=detail)
        hidden.append(report.summary()["value"].filter(like="hidden behind compute").to_dict())
    assert hidden[1] == pytest.approx(hidden[0], abs=1e-3) and max(hidden[0].values()) > 1


def test_an_outline_is_compared_with_a_run_by_its_sums(run):
    plan = pl.Plan(dp=2, microbatches=2, bucket_bytes=20_000)
    model = MODEL.replace(layers=2)
    measured = run(model, plan, steps=2)
    expect = predict(model, plan, FAST, detail="actions")
    found = pl.compare(expect, measured)
    assert found.bytes_agree
    assert found.table.loc["bytes sent per rank", "predicted"] == \
        found.table.loc["bytes sent per rank", "measured"]  # fmt: skip
    other = expect.collectives.assign(wire_bytes=expect.collectives["wire_bytes"] + 8)
    assert not pl.compare(dataclasses.replace(expect, collectives=other), measured).bytes_agree


def test_detail_is_chosen_by_size_and_refused_by_name():
    assert predict(MODEL, pl.Plan(dp=2), FAST).meta["detail"] == "calls"
    big = pl.Plan(dp=4, tp=2, pp=4, microbatches=32)
    assert predict(MODEL, big, FAST).meta["detail"] == "actions"
    refuses("detail='rows'.*'calls' | 'actions'", predict, MODEL, pl.Plan(), FAST, detail="rows")
