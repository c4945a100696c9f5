"""Replay: a run's own costs on devices of their own, the same from a file as from memory."""

import dataclasses
import math

import pandas as pd
import pytest

import paralab as pl
import synthetic
from paralab.interpret.predict import predict
from paralab.report.report import Report
from paralab.theory.replay import replay
from stated import FORMS, MODEL, as_measured, cluster

CLUSTER = cluster()
TABLES = ("spans", "collectives", "memory", "steps")


def plan(form="overlapped", **more):
    return pl.Plan(**{"dp": 2, "grad_sync": form, "bucket_bytes": 20_000, **more})


@pytest.fixture(scope="module")
def measured(run):
    """A real run of three ranks, six steps."""
    return run(MODEL, plan(dp=3), steps=6)


def same(a, b):
    return all(getattr(a, name).equals(getattr(b, name)) for name in TABLES)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_replay_of_a_prediction_is_the_prediction(form, dp):
    report = predict(MODEL, plan(form, dp=dp), CLUSTER)
    again = replay(as_measured(report, wall=2.0), CLUSTER)
    assert again.clock == "replayed" and again.cluster == CLUSTER
    for column in ("start", "end", "cost"):
        assert (again.spans[column] - report.spans[column]).abs().max() < 1e-12
    assert math.isclose(again.step_time, report.step_time, rel_tol=1e-12)


def test_a_replay_keeps_ids_rows_bytes_and_losses_and_alters_nothing(measured):
    before = {name: getattr(measured, name).copy(deep=True) for name in TABLES}
    replayed = measured.replay(CLUSTER)
    for name, table in before.items():
        pd.testing.assert_frame_equal(table, getattr(measured, name))
    assert measured.clock == "measured" and measured.cluster is None
    kept = {"spans": ["id", "rank", "step", "lane", "kind", "microbatch", "after"],
            "collectives": ["call", "rank", "step", "op", "ranks", "phase", "payload_bytes",
                            "wire_bytes", "span"]}  # fmt: skip
    for table, columns in kept.items():
        assert getattr(replayed, table)[columns].equals(before[table][columns])
    assert replayed.losses == measured.losses and replayed.meta == measured.meta


def test_a_saved_run_and_a_replay_replay_exactly_like_the_live_one(measured, tmp_path):
    measured.save(tmp_path / "run.json")
    once = replay(measured, CLUSTER)
    assert same(replay(pl.load(tmp_path / "run.json"), CLUSTER), once)
    assert same(replay(once, CLUSTER), once)


def test_handshakes_before_the_first_step_are_no_part_of_it(measured):
    replayed = replay(measured, CLUSTER)
    ends = replayed.collectives["end"][replayed.collectives["phase"] == "setup"]
    assert len(ends) > 0 and (ends <= 0.0).all()
    assert replayed.steps["start"].min() == 0.0


@pytest.mark.parametrize(("steps", "slow"), [(6, 3), (2, 0), (1, None)])
def test_costs_are_medians_without_the_warm_up_so_one_slow_step_changes_nothing(steps, slow):
    report = predict(MODEL, plan(), CLUSTER, steps=steps)
    spans = report.spans
    cost = spans["cost"].where(spans["step"] != slow, spans["cost"] * 50)
    slowed = dataclasses.replace(report, spans=spans.assign(cost=cost))
    assert same(replay(slowed, CLUSTER), replay(report, CLUSTER))
    assert math.isclose(replay(slowed, CLUSTER).step_time, report.step_time, rel_tol=1e-12)


def test_the_slowest_member_sets_what_a_call_takes():
    report = predict(MODEL, plan("bucketed"), CLUSTER)
    calls = report.collectives
    found = []
    for ranks in ((0,), (1,), (0, 1)):
        size = calls["wire_bytes"].where(~calls["rank"].isin(ranks), 9 * calls["wire_bytes"])
        more = dataclasses.replace(report, collectives=calls.assign(wire_bytes=size))
        found.append(replay(more, CLUSTER))
    one, other, both = found
    assert one.spans.equals(both.spans) and other.spans.equals(both.spans)
    assert both.step_time > replay(report, CLUSTER).step_time


def test_a_missing_launch_is_named_not_waited_for():
    report = predict(MODEL, plan("bucketed"), CLUSTER, steps=1)
    spans, calls = report.spans, report.collectives
    lost = calls[(calls["rank"] == 1) & (calls["call"] == 0)]["span"].iloc[0]
    rest = spans[spans["id"] != lost]
    rest = rest.assign(after=[tuple(a for a in after if a != lost) for after in rest["after"]])
    broken = dataclasses.replace(report, spans=rest, collectives=calls[calls["span"] != lost])
    with pytest.raises(ValueError, match="rank 0 launches all_reduce.*rank 1 launches"):
        replay(broken, CLUSTER)


def exchange(rank, peer, op, *, id_, start):
    """A rank's send or receive, then a wait for it, as rows."""
    span = [id_, rank, 0, "comm:pp", "comm", 0, 0, -1, start, start + 1.0, 0.0, ()]
    wait = [id_ + 2, rank, 0, "compute", "wait", 0, 0, -1, start, start + 1.0, 0.0, (id_,)]
    call = [id_, rank, 0, op, "pp", (0, 1), peer, "intra", "activations", 1000,
            1000 * (op == "send"), start, start + 1.0, id_]  # fmt: skip
    return [span, wait], call


@pytest.mark.parametrize(
    ("of_0", "of_1", "ends"),
    [
        (["send", "send", "recv"], ["recv", "recv", "send"], [1, 2, 3]),  # pair by pair, in order
        (["send recv"], ["send recv"], [1, 1]),  # to each other in one exchange: at once
    ],
)
def test_sends_and_receives_meet_and_those_of_one_exchange_run_at_once(of_0, of_1, ends):
    spans, calls = [], []
    for rank, exchanges in ((0, of_0), (1, of_1)):
        for i, ops in enumerate(exchanges):
            for op in ops.split():
                rows, call = exchange(rank, 1 - rank, op, id_=rank + 4 * i, start=float(i))
                calls.append(call)
            spans += rows
    steps = [(rank, 0, 0.0, 3.0, 0.0) for rank in (0, 1)]
    made = synthetic.tables(spans=spans, collectives=calls, steps=steps)
    times = replay(Report(clock="measured", model=MODEL, plan=plan(), **made), CLUSTER)
    one = CLUSTER.intra.seconds(1000)
    assert times.collectives["end"].tolist() == pytest.approx([end * one for end in ends] * 2)


SLOW = pl.Link(alpha=0.05, bandwidth=1e6)


def test_a_replay_of_gloos_calls_on_gpus_sends_as_it_is_timed():
    apart = CLUSTER.replace(devices_per_node=2, nodes=2)
    expect = predict(MODEL, plan(dp=4, zero_stage=1), apart)
    run = dataclasses.replace(as_measured(expect), meta={"backend": "gloo"})
    assert run.replay(apart).traffic("level").equals(expect.traffic("level"))


def test_ranks_of_a_plan_are_on_the_nodes_of_the_cluster_that_is_named(measured):
    apart = CLUSTER.replace(devices_per_node=1, nodes=3, inter=SLOW)
    inside = CLUSTER.replace(devices_per_node=3, intra=SLOW)
    replayed = measured.replay(apart)
    assert replayed.step_time == pytest.approx(measured.replay(inside).step_time)
    assert replayed.step_time > 0.05 > measured.replay(CLUSTER).step_time
    assert set(replayed.traffic("level")["level"]) == {"inter"}
    assert set(replayed.collectives["level"]) == {"inter"}
    assert set(measured.collectives["level"]) == {"intra"}  # the run's own stays
    with pytest.raises(ValueError, match="cluster='stated': it has 2 devices, and 3 ranks need"):
        measured.replay(CLUSTER.replace(devices_per_node=2))


def test_a_pipeline_that_computes_in_no_time_is_drawn(tmp_path):
    run = as_measured(predict(MODEL, pl.Plan(pp=2, microbatches=3), CLUSTER, steps=2))
    report = run.replay(CLUSTER, compute=0.0)
    assert report.timeline().data
    report.to_html(tmp_path / "page.html")
