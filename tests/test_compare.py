"""Comparison: the same quantities three times, sentences that fit the numbers, nothing mixed up."""

import dataclasses
import math
from functools import cache

import pandas as pd
import pytest

import paralab as pl
from paralab.interpret.predict import predict
from paralab.parallel.schedules import gpipe
from paralab.theory.compare import compare
from paralab.theory.pipeline import simulate
from refusals import refuses
from stated import FORMS, MODEL, TIERS, as_measured, cluster

CLUSTER = cluster(cores=2)


@cache
def predicted(dp=2, form="overlapped"):
    return predict(MODEL, pl.Plan(dp=dp, grad_sync=form, bucket_bytes=20_000), CLUSTER)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_a_run_that_follows_theory_agrees_in_every_row(dp, form):
    expect = predicted(dp, form)
    table = compare(expect, as_measured(expect)).table
    for name in table.index:
        row = table.loc[name]
        assert row["replayed"] == pytest.approx(row["predicted"], rel=1e-9), name
        assert row["measured"] == pytest.approx(row["predicted"], rel=1e-9), name


def test_rows_hold_what_they_say():
    expect = predicted(4)
    seen = compare(expect, as_measured(expect, wall=2.0))
    calls = expect.collectives[expect.collectives["step"] == 1]
    mine = calls[calls["rank"] == 0]
    spans = expect.spans[(expect.spans["rank"] == 0) & (expect.spans["step"] == 1)]

    def seconds(kind):
        rows = spans[spans["kind"] == kind]
        return (rows["end"] - rows["start"]).sum()

    column = seen.table["predicted"]
    assert column["bytes sent per rank"] == mine["wire_bytes"].sum()
    assert column["calls and messages"] == len(mine)
    for name in ("forward", "backward", "optimizer"):
        assert column[name] == pytest.approx(seconds(name))
    assert column["bucket copies"] == pytest.approx(seconds("copy"))
    assert column["exposed communication"] == pytest.approx(seconds("wait"))
    assert column["step time"] == expect.step_time
    assert seen.table.loc["step time", "measured"] == pytest.approx(2 * expect.step_time)


def test_a_message_is_counted_once_by_who_sends_it():
    cluster = pl.Cluster.preset("dgx-a100")
    plan = pl.Plan(pp=2, microbatches=4)
    expect = pl.predict(pl.ModelSpec.preset("laptop"), plan, cluster)
    calls = expect.collectives[expect.collectives["step"] == 1]
    made = compare(expect, as_measured(expect, wall=1.0)).table.loc["calls and messages"]
    assert made["predicted"] == (calls["op"] != "recv").sum() / 2 > 4


# Of the prediction the ranks; what was measured, with shares of a step for seconds; what is said of
# the step time, and what is not.
STEP_TIMES = [
    (4, {"wall": 2.1}, "4 ranks share 2 cores, which explains a factor of 2", "other threads"),
    (4, {"wall": 2.1}, "The wall clock shows 2.1 times as much", "outside every span"),
    (4, {"wall": 5.0, "cores": 8}, "other work", "share"),
    (2, {"wall": 1.3, "beside": 0.2}, "other threads of a rank used {:.0f} ms", "%"),
    (2, {"wall": 1.3, "beside": 0.01}, "The wall clock shows", "other threads"),
    (2, {"wall": 1.02, "cost": 1.01}, "The columns agree.", "%"),
    (2, {"wall": 0.75}, "shows 25 % less than the replay. Messages and copies took less", "share"),
    (2, {"idle": 1.0}, "50 % of the measured step lies outside every span", "other threads"),
]


@pytest.mark.parametrize(("dp", "how", "said", "unsaid"), STEP_TIMES)
def test_the_note_on_the_step_time_says_what_made_it_longer(dp, how, said, unsaid):
    expect = predicted(dp)
    seconds = {name: expect.step_time * how[name] for name in ("beside", "idle") if name in how}
    note = compare(expect, as_measured(expect, **how | seconds)).notes["step time"]
    assert said.format(1e3 * seconds.get("beside", 0.0)) in note and unsaid not in note


def test_the_device_models_error_is_given_in_per_cent_and_explained_once():
    notes = compare(predicted(), as_measured(predicted(), cost=1.25)).notes
    assert "Theory is 20 % below the replay" in notes["forward"]
    assert " ".join(notes.values()).count("a few rates") == 1
    assert "backward" not in compare(predicted(), as_measured(predicted(), cost=1.01)).notes


@pytest.mark.parametrize("form", FORMS)
def test_overlap_says_what_it_hides_and_the_others_that_nothing_does(form):
    expect = predicted(form=form)
    note = compare(expect, as_measured(expect)).notes["exposed communication"]
    assert "computation hides" in note
    for words in (f"{form} gradient sync", "nothing hides it"):
        assert (words in note) == (form != "overlapped")


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


def test_one_device_waits_for_copies_alone():
    expect = predict(MODEL, pl.Plan(zero_stage=3, offload="nvme"), TIERS)
    held = compare(expect, as_measured(expect))
    assert held.table.loc["exposed communication", "replayed"] == 0
    assert "exposed communication" not in held.notes
    said = held.replayed.summary()["value"]["waiting"]
    assert 1e3 * held.table.loc["exposed copies", "replayed"] == pytest.approx(said, abs=1e-4) != 0
    assert "exposed copies" not in compare(predicted(), as_measured(predicted())).table.index


def test_bytes_that_differ_are_located_and_called_a_bug():
    measured = as_measured(predicted())
    calls = measured.collectives.copy()
    row = calls.index[(calls["step"] == 2) & (calls["rank"] == 1)][0]
    calls.loc[row, "wire_bytes"] += 4
    seen = compare(predicted(), dataclasses.replace(measured, collectives=calls))
    assert not seen.bytes_agree and "DIFFER" in repr(seen)
    note = seen.notes["bytes sent per rank"]
    assert "step 2, rank 1" in note and "bug" in note


def test_control_traffic_is_left_out():
    measured = as_measured(predicted())
    calls = measured.collectives
    late = calls[calls["step"] == 2].groupby("rank").head(1)
    extra = pd.concat([calls, late.assign(phase="control", call=10**6, span=-1)])
    seen = compare(predicted(), dataclasses.replace(measured, collectives=extra))
    assert seen.bytes_agree
    for name in ("bytes sent per rank", "calls and messages"):
        row = seen.table.loc[name]
        assert row["predicted"] == row["measured"] == row["replayed"]


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
    seen = compare(dataclasses.replace(predicted(), cluster=named), as_measured(predicted()))
    page = seen._repr_html_()
    assert page.count("<tr>") == len(seen.table) + 1
    assert "<b>mine" not in page
    assert "The bytes agree exactly" in page


def test_a_replay_alone_can_be_compared_and_has_no_measured_column():
    seen = compare(predicted(), as_measured(predicted()).replay(CLUSTER))
    assert seen.measured is None and "measured" not in repr(seen)
    assert math.isnan(seen.table.loc["step time", "measured"])
    assert " -" in str(seen)


def test_the_order_of_the_two_reports_does_not_matter():
    measured = as_measured(predicted(), wall=2.0)
    assert compare(predicted(), measured).table.equals(compare(measured, predicted()).table)


# ---- what cannot be compared ----------------------------------------------------------------
def run_of(name, **fields):
    """A run like the prediction, with another ``name``."""
    return dataclasses.replace(
        as_measured(predicted()), **{name: getattr(predicted(), name).replace(**fields)}
    )


def pairs():
    expect, run = predicted(), as_measured(predicted())
    again = expect.replay(CLUSTER)
    simulated = simulate(gpipe(2, 2), forward=1.0, backward=2.0).report()
    sgd = predict(MODEL, pl.Plan(), CLUSTER, optimizer="sgd")
    one_clock = "clock.*legal: one report of pl.predict and one of pl.run"
    untrained = "no model of the library was trained.*legal: "
    return {
        "report=.*nothing was measured; legal: what pl.run": [
            (expect, again), (expect, again.replay(CLUSTER))],
        one_clock: [(expect, expect), (run, run), (run, run.replay(CLUSTER))],
        "plan.bucket_bytes: 20000 was predicted, 4000 was run": [
            (expect, run_of("plan", bucket_bytes=4000))],
        "model.dropout: 0.0 was predicted, 0.5 was run": [(expect, run_of("model", dropout=0.5))],
        "optimizer: 'sgd' was predicted, 'adamw' was run": [(sgd, as_measured(sgd))],
        "report='run.json'": [(expect, "run.json")],
        f"report=.*{untrained}": [(expect, dataclasses.replace(run, model=None))],
        f"expect=.*{untrained}": [(simulated, run)],
    }  # fmt: skip


def test_what_are_not_a_prediction_and_its_run_is_refused_by_the_first_difference():
    for said, some in pairs().items():
        for pair in some:
            refuses(said, compare, *pair)


def test_a_run_of_an_own_schedule_is_compared_after_it_was_saved(tmp_path):
    def mine(pp, microbatches):
        return gpipe(pp, microbatches)

    expect = predict(MODEL, pl.Plan(pp=2, microbatches=2, schedule=mine), CLUSTER)
    measured = dataclasses.replace(as_measured(expect), memory=expect.memory)
    measured.save(tmp_path / "run.json")
    loaded = pl.load(tmp_path / "run.json")
    table = compare(expect, loaded).table
    assert table.equals(compare(expect, measured).table)
    peaks = loaded.peaks()  # what the program is compiled from is not in the file
    assert (peaks["program"] == 0).all() and peaks["measured"]["total"] > 0
    assert (measured.peaks()["program"]["total"]) > 0


@pytest.mark.parametrize("dp", [1, 2])
def test_a_replay_that_takes_no_time_has_no_gap_in_per_cent(dp):
    expect = predict(MODEL, pl.Plan(dp=dp), CLUSTER)
    free = CLUSTER.replace(intra=pl.Link(alpha=0.0, bandwidth=1e30))
    notes = compare(expect, as_measured(expect).replay(free, compute=0.0)).notes
    assert "nan" not in " ".join(notes.values()) and all(notes.values())
    if dp == 1:
        assert notes["step time"].startswith("In the replay this takes no time.")
