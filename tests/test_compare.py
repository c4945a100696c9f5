"""Comparison: the same quantities three times, sentences that fit the numbers, nothing mixed up."""

import math
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest

import paralab as pl
from paralab.interpret.predict import predict
from paralab.parallel.data_parallel import overlapped
from paralab.parallel.schedules import gpipe
from paralab.theory.compare import COLUMNS, compare
from paralab.theory.pipeline import simulate
from refusals import refuses
from stated import FORMS, MODEL, TIERS, as_measured, cluster

CLUSTER = cluster(cores=2, inter=None)


@cache
def predicted(dp=2, form="overlapped"):
    return predict(MODEL, pl.Plan(dp=dp, grad_sync=form, bucket_bytes=20_000), CLUSTER)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dp", [1, 3, 4])
def test_rows_hold_what_they_say_and_a_run_that_follows_theory_agrees_in_each(dp, form):
    expect = predicted(dp, form)
    seen = compare(expect, as_measured(expect, wall=2.0))
    assert compare(seen.measured, expect).table.equals(seen.table)  # in any order
    assert ("exposed communication" in seen.notes) == (dp > 1)
    table = seen.table
    assert "exposed copies" not in table.index
    column, of_step = table["predicted"], pd.Index(["step time", "communication"])
    assert table["replayed"].tolist() == pytest.approx(column.tolist(), rel=1e-9)
    calls, spans = (rows[rows["step"] == 1] for rows in (expect.collectives, expect.spans))
    assert column["bytes sent per rank"] == calls["wire_bytes"].sum() / dp
    assert column["calls and messages"] == len(calls) / dp
    seconds = (spans["end"] - spans["start"]).groupby(spans["kind"]).sum() / dp
    rows = {"copy": "bucket copies", "wait": "exposed communication"}
    for kind in ("forward", "backward", "optimizer", "copy", "wait"):
        assert column[rows.get(kind, kind)] == pytest.approx(seconds.get(kind, 0.0))
    assert column["step time"] == expect.step_time
    assert table["measured"][of_step].tolist() == pytest.approx((2 * column[of_step]).tolist())
    exact = compare(expect, as_measured(expect)).table["measured"]
    assert exact.tolist() == pytest.approx(column.tolist(), rel=1e-9)


# Of the prediction the ranks; what was measured, with shares of a step for seconds; what is said of
# the step time, and what is not.
STEP_TIMES = [
    (4, {"wall": 2.1}, "4 ranks share 2 cores, which explains a factor of 2", "other threads"),
    (4, {"wall": 2.1}, "The wall clock shows 2.1 times as much", "outside every span"),
    (4, {"wall": 5.0, "cores": 8}, "other work", "share"),
    (4, {"wall": 3.3, "nodes": [0, 1, 1, 1]}, "3 ranks share 2 cores, which explains", "threads"),
    (4, {"wall": 1.3, "nodes": [0, 0, 1, 1]}, "The run was on 2 nodes, prediction and ", "core"),
    (4, {"wall": 1.3, "nodes": [0, 1, 1, 1]}, "(nodes=2, devices_per_node=3), whose", "threads"),
    (2, {"wall": 1.3, "nodes": [0, 1]}, "doctor --calibrate measures", "stated"),
    (2, {"wall": 1.3, "beside": 0.2}, "other threads of a rank used {:.3g} µs", "%"),
    (2, {"wall": 1.3, "beside": 0.01}, "The wall clock shows", "other threads"),
    (1, {"wall": 1.3, "beside": 0.2}, "The wall clock shows", "Carrying messages"),
    (2, {"wall": 1.02, "cost": 1.01}, "The columns agree.", "%"),
    (2, {"wall": 0.75}, "shows 25 % less than the replay. Messages and copies took less", "share"),
    (2, {"idle": 1.0}, "50 % of the measured step lies outside every span", "other threads"),
]


@pytest.mark.parametrize(("dp", "how", "said", "unsaid"), STEP_TIMES)
def test_the_note_on_the_step_time_says_what_made_it_longer(dp, how, said, unsaid):
    expect = predicted(dp)
    seconds = {name: expect.step_time * how[name] for name in ("beside", "idle") if name in how}
    note = compare(expect, as_measured(expect, **how | seconds)).notes["step time"]
    assert said.format(1e6 * seconds.get("beside", 0.0)) in note and unsaid not in note


def test_where_a_link_between_nodes_was_stated_it_may_be_slower_than_that():
    apart = CLUSTER.replace(nodes=2, devices_per_node=1)
    expect = predict(MODEL, pl.Plan(dp=2), apart)
    for nodes, said in (([0, 1], True), ([0, 0], False)):
        note = compare(expect, as_measured(expect, wall=2.0, nodes=nodes)).notes["step time"]
        assert ("slower than stated" in note) == said


def test_of_a_run_of_one_step_the_warm_up_is_the_reason():
    expect = predict(MODEL, pl.Plan(dp=4), CLUSTER, steps=1)
    note = compare(expect, as_measured(expect, wall=3.0, cost=2.0)).notes["step time"]
    assert "no step but its warm-up" in note and "rates" not in note and "share" not in note


def test_the_device_models_error_is_given_in_per_cent_and_explained_once():
    notes = compare(predicted(), as_measured(predicted(), cost=1.25)).notes
    assert "Theory is 20 % below the replay" in notes["forward"]
    assert " ".join(notes.values()).count("a few rates") == 1
    assert "backward" not in compare(predicted(), as_measured(predicted(), cost=1.01)).notes


LATE = {"naive": "nothing hides it", "bucketed": "only updates of earlier buckets hide any of it"}


@pytest.mark.parametrize("form", [*FORMS, None])
def test_the_note_on_hidden_communication_says_what_hides_it(form):
    passes = () if form else (lambda own: own.replace(overlapped(own.code)),)
    plan = pl.Plan(dp=2, grad_sync=form, passes=passes, bucket_bytes=20_000)
    expect = predict(MODEL, plan, CLUSTER)
    note = compare(expect, as_measured(expect)).notes["exposed communication"]
    after = f": {form} gradient sync starts after the backward, so {LATE.get(form)}."
    assert note.endswith(after if form in LATE else "; ranks wait for the rest.")
    assert ("computation hides 0 %" in note) == (form == "naive")


@pytest.mark.parametrize(("fields", "said"), [
    ({"pp": 2}, "this is the bubble. It waits for the sum of the gradients too."),
    ({"pp": 2, "zero_stage": 1}, "for gathered parameters and the sum of the gradients too."),
    ({"dp": 1, "tp": 2, "pp": 2}, "It waits for messages of tensor parallelism too."),
    ({"dp": 1, "pp": 2}, "this is the bubble."),
])  # fmt: skip
def test_the_note_on_a_pipeline_says_what_a_rank_waits_for(fields, said):
    expect = predict(MODEL.replace(vocab=258, tied=False), pl.Plan(**{"dp": 2} | fields), CLUSTER)
    assert compare(expect, as_measured(expect)).notes["exposed communication"].endswith(said)


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_waiting_for_copies_is_no_communication_that_is_exposed(offload):
    plan = pl.Plan(dp=2, zero_stage=3, microbatches=2, offload=offload)
    expect = predict(MODEL, plan, TIERS)
    held = compare(expect, as_measured(expect))
    said = held.replayed.summary()["value"]
    hidden = said["of it hidden behind compute"]
    assert f"computation hides {hidden:.0f} % of the" in held.notes["exposed communication"]
    row = held.table["replayed"]
    copies, calls = row["exposed copies"], row["exposed communication"]
    assert 1e3 * (copies + calls) == pytest.approx(said["waiting"], abs=1e-4)
    assert copies > calls and calls <= (1 - hidden / 100) * row["communication"] + 1e-9
    assert "waits for copies" in held.notes["exposed copies"]
    # What a rank is idle for inside a box of an outline is not said.
    rough = predict(MODEL, plan, TIERS, detail="actions")
    row = compare(rough, as_measured(expect)).table.loc["exposed communication"]
    assert math.isnan(row["predicted"]) and row["replayed"] == calls


def test_bytes_that_differ_are_located_and_called_a_bug_and_control_traffic_is_left_out():
    measured = as_measured(predicted())
    calls = measured.collectives.copy()
    late = calls[calls["step"] == 2].groupby("rank").head(1)
    extra = pd.concat([calls, late.assign(phase="control", call=10**6, span=-1)])
    seen = compare(predicted(), replace(measured, collectives=extra))
    assert seen.bytes_agree
    for name in ("bytes sent per rank", "calls and messages"):
        assert seen.table.loc[name, list(COLUMNS)].nunique() == 1
    calls.loc[late.index[late["rank"] == 1][0], "wire_bytes"] += 4
    seen = compare(predicted(), replace(measured, collectives=calls))
    assert not seen.bytes_agree and "DIFFER" in repr(seen)
    note = seen.notes["bytes sent per rank"]
    assert "step 2, rank 1" in note and "bug" in note


# ---- what it looks like ---------------------------------------------------------------------
def test_the_one_line_form_has_no_times_and_the_table_is_aligned_and_fits():
    expect = predicted(4)
    found = [compare(expect, as_measured(expect, wall=w)) for w in (1.0, 2.1, 3.3)]
    line = "Comparison(dp=4, overlapped: predicted | replayed | measured, bytes agree)"
    assert {repr(one) for one in found} == {line}
    lines = str(found[1]).splitlines()
    table = lines[: lines.index("")]
    assert len({len(line) for line in table}) == 1
    assert max(map(len, lines)) <= 100
    assert "predicted" in table[0] and "measured" in table[0]
    assert any(line.startswith("step time") for line in table)


def test_the_notebook_table_has_every_row_and_note_escaped():
    named = predicted().cluster.replace(name="<b>mine</b>")
    seen = compare(replace(predicted(), cluster=named), as_measured(predicted()))
    page = seen._repr_html_()
    assert page.count("<tr>") == len(seen.table) + 1
    assert "<b>mine" not in page
    assert "The bytes agree exactly" in page


def test_a_replay_alone_can_be_compared_and_has_no_measured_column():
    seen = compare(predicted(), as_measured(predicted()).replay(CLUSTER))
    assert seen.measured is None and "measured" not in repr(seen)
    assert math.isnan(seen.table.loc["step time", "measured"])
    assert " -" in str(seen)


# ---- what cannot be compared ----------------------------------------------------------------
def test_what_are_not_a_prediction_and_its_run_is_refused_by_the_first_difference():
    expect, run = predicted(), as_measured(predicted())
    again, sgd = expect.replay(CLUSTER), predict(MODEL, pl.Plan(), CLUSTER, optimizer="sgd")
    simulated = simulate(gpipe(2, 2), forward=1.0, backward=2.0).report()
    other = replace(run, plan=run.plan.replace(bucket_bytes=4000))
    model = run.model.replace(dropout=0.5)
    one_clock = "^clock: neither.*legal: one report of pl.predict and one of pl.run"
    two_predictions = "^clock: both reports are predicted; legal: "
    unmeasured = "report=.*nothing was measured; legal: what pl.run"
    untrained = "no model of the library was trained.*legal: "
    for said, *pair in (
        (unmeasured, expect, again),
        (unmeasured, expect, again.replay(CLUSTER)),
        (two_predictions, expect, expect),
        (one_clock, run, run),
        (one_clock, run, run.replay(CLUSTER)),
        (r"bucket_bytes: 20000 was predicted, 4000 was run; legal: pl.predict\(", expect, other),
        ("model.dropout: 0.0 was predicted, 0.5 was run", expect, replace(run, model=model)),
        ("optimizer: 'sgd' was predicted, 'adamw' was run", sgd, as_measured(sgd)),
        ("report='run.json'", expect, "run.json"),
        (f"report=.*{untrained}", expect, replace(run, model=None)),
        (f"expect=.*{untrained}", simulated, run),
    ):
        refuses(said, compare, *pair)


def test_a_run_of_an_own_schedule_is_compared_after_it_was_saved(tmp_path):
    def mine(pp, microbatches):
        return gpipe(pp, microbatches)

    expect = predict(MODEL, pl.Plan(pp=2, microbatches=2, schedule=mine), CLUSTER)
    measured = replace(as_measured(expect), memory=expect.memory)
    measured.save(tmp_path / "run.json")
    loaded = pl.load(tmp_path / "run.json")
    assert compare(expect, loaded).table.equals(compare(expect, measured).table)
    peaks = loaded.peaks()  # what the program is compiled from is not in the file
    assert list(peaks) == ["measured"] and peaks["measured"]["total"] > 0
    assert measured.peaks()["program"]["total"] > 0


@pytest.mark.parametrize("dp", [1, 2])
def test_a_replay_that_takes_no_time_has_no_gap_in_per_cent(dp):
    expect = predict(MODEL, pl.Plan(dp=dp), CLUSTER)
    free = CLUSTER.replace(intra=pl.Link(alpha=0.0, bandwidth=1e30))
    notes = compare(expect, as_measured(expect).replay(free, compute=0.0)).notes
    assert "nan" not in " ".join(notes.values()) and all(notes.values())
    if dp == 1:
        assert notes["step time"].startswith("In the replay this takes no time.")
