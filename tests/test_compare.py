"""Comparison: the same quantities three times, sentences that fit the numbers, nothing mixed up."""

import dataclasses
import math

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


def predicted(dp=4, form="overlapped", **more):
    plan = pl.Plan(dp=dp, grad_sync=form, bucket_bytes=20_000, **more)
    return predict(MODEL, plan, CLUSTER)


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


def test_more_ranks_than_cores_is_said_with_both_numbers():
    expect = predicted(4)
    note = compare(expect, as_measured(expect, wall=2.1, cores=2)).notes["step time"]
    assert "4 ranks share 2 cores, which explains a factor of 2" in note
    assert "The wall clock shows 2.1 times as much" in note


def test_what_sharing_cannot_explain_is_not_blamed_on_it():
    expect = predicted(4)
    note = compare(expect, as_measured(expect, wall=5.0, cores=8)).notes["step time"]
    assert "share" not in note and "other work" in note


def test_the_work_of_carrying_messages_is_named_where_it_counts():
    expect = predicted(2)
    share = 0.2 * expect.step_time
    note = compare(expect, as_measured(expect, wall=1.3, beside=share)).notes["step time"]
    assert f"other threads of a rank used {1e3 * share:.0f} ms" in note
    for nothing in (0.0, 0.01 * expect.step_time):
        note = compare(expect, as_measured(expect, wall=1.3, beside=nothing)).notes["step time"]
        assert "other threads" not in note


def test_a_wall_clock_like_the_replay_needs_no_reason():
    expect = predicted(2)
    note = compare(expect, as_measured(expect, wall=1.02)).notes["step time"]
    assert note == "The columns agree."


def test_a_wall_clock_that_is_quicker_than_the_replay_is_said_to_be():
    expect = predicted(2)
    note = compare(expect, as_measured(expect, wall=0.75)).notes["step time"]
    assert (
        "The wall clock shows 25 % less than the replay. Messages and copies took less time" in note
    )


def test_time_outside_every_span_is_said():
    expect = predicted(2)
    quiet = compare(expect, as_measured(expect)).notes["step time"]
    idle = compare(expect, as_measured(expect, idle=expect.step_time)).notes["step time"]
    assert "outside every span" not in quiet
    assert "50 % of the measured step lies outside every span" in idle


def test_the_device_models_error_is_given_in_per_cent_and_explained_once():
    expect = predicted(2)
    notes = compare(expect, as_measured(expect, cost=1.25)).notes
    assert "Theory is 20 % below the replay" in notes["forward"]
    said = " ".join(notes.values())
    assert said.count("a few rates") == 1
    notes = compare(expect, as_measured(expect, cost=1.01)).notes
    assert "backward" not in notes and notes["step time"] == "The columns agree."


def test_overlap_says_what_it_hides_and_the_others_that_nothing_does():
    hides = compare(predicted(2), as_measured(predicted(2))).notes["exposed communication"]
    assert "computation hides" in hides
    for form in ("naive", "bucketed"):
        expect = predicted(2, form)
        note = compare(expect, as_measured(expect)).notes["exposed communication"]
        assert f"{form} gradient sync" in note and "nothing hides it" in note


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
    assert "exposed copies" not in compare(predicted(2), as_measured(predicted(2))).table.index


def test_bytes_that_differ_are_located_and_called_a_bug():
    expect = predicted(2)
    measured = as_measured(expect)
    calls = measured.collectives
    row = calls.index[(calls["step"] == 2) & (calls["rank"] == 1)][0]
    calls = calls.copy()
    calls.loc[row, "wire_bytes"] += 4
    seen = compare(expect, dataclasses.replace(measured, collectives=calls))
    assert not seen.bytes_agree and "DIFFER" in repr(seen)
    note = seen.notes["bytes sent per rank"]
    assert "step 2, rank 1" in note and "bug" in note


def test_control_traffic_is_left_out():
    expect = predicted(2)
    measured = as_measured(expect)
    calls = measured.collectives
    late = calls[calls["step"] == 2].groupby("rank").head(1)
    extra = late.assign(phase="control", call=10**6, span=-1)
    more = dataclasses.replace(measured, collectives=pd.concat([calls, extra]))
    seen = compare(expect, more)
    assert seen.bytes_agree
    for name in ("bytes sent per rank", "calls and messages"):
        row = seen.table.loc[name]
        assert row["predicted"] == row["measured"] == row["replayed"]


# ---- what it looks like ---------------------------------------------------------------------
def test_the_one_line_form_is_short_and_has_no_times():
    expect = predicted(4)
    lines = {repr(compare(expect, as_measured(expect, wall=w))) for w in (1.0, 2.0, 3.3)}
    assert lines == {"Comparison(dp=4, overlapped: predicted | replayed | measured, bytes agree)"}
    assert all(len(line) <= 110 for line in lines)


def test_the_terminal_table_is_aligned_and_fits():
    expect = predicted(4)
    text = str(compare(expect, as_measured(expect, wall=2.1)))
    lines = text.splitlines()
    table = lines[: lines.index("")]
    assert len({len(line) for line in table}) == 1
    assert max(map(len, lines)) <= 100
    assert "predicted" in table[0] and "measured" in table[0]
    assert any(line.startswith("step time") for line in table)


def test_the_notebook_table_has_every_row_and_note_escaped():
    expect = predicted(4)
    expect = dataclasses.replace(expect, cluster=expect.cluster.replace(name="<b>mine</b>"))
    seen = compare(expect, as_measured(expect))
    page = seen._repr_html_()
    assert page.count("<tr>") == len(seen.table) + 1
    assert "<b>mine" not in page
    assert "The bytes agree exactly" in page


def test_a_replay_alone_can_be_compared_and_has_no_measured_column():
    expect = predicted(2)
    seen = compare(expect, as_measured(expect).replay(CLUSTER))
    assert seen.measured is None and "measured" not in repr(seen)
    assert math.isnan(seen.table.loc["step time", "measured"])
    assert " -" in str(seen)


def test_the_order_of_the_two_reports_does_not_matter():
    expect = predicted(2)
    measured = as_measured(expect, wall=2.0)
    assert compare(expect, measured).table.equals(compare(measured, expect).table)


# ---- what cannot be compared ----------------------------------------------------------------
def test_a_prediction_is_not_held_against_its_own_replay():
    expect = predicted(2)
    for again in (expect.replay(CLUSTER), expect.replay(CLUSTER).replay(CLUSTER)):
        refuses("report=.*nothing was measured; legal: what pl.run", compare, expect, again)


def test_two_reports_of_one_clock_are_refused():
    expect = predicted(2)
    measured = as_measured(expect)
    for pair in ((expect, expect), (measured, measured), (measured, measured.replay(CLUSTER))):
        refuses("clock.*legal: one report of pl.predict and one of pl.run", compare, *pair)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"plan": {"bucket_bytes": 4000}}, "plan.bucket_bytes: 20000 was predicted, 4000 was run"),
        ({"plan": {"microbatches": 3}}, "plan.microbatches: 1 was predicted, 3 was run"),
        ({"model": {"dropout": 0.5}}, "model.dropout: 0.0 was predicted, 0.5 was run"),
    ],
)
def test_reports_of_different_things_are_refused_by_the_first_difference(changes, said):
    expect = predicted(2)
    other = {name: getattr(expect, name).replace(**fields) for name, fields in changes.items()}
    with pytest.raises(ValueError) as error:
        compare(expect, dataclasses.replace(as_measured(expect), **other))
    assert said in str(error.value)


def test_another_optimizer_is_refused():
    expect = predict(MODEL, pl.Plan(), CLUSTER, optimizer="sgd")
    refuses("optimizer: 'sgd' was predicted, 'adamw' was run", compare, expect, as_measured(expect))


def test_something_that_is_no_report_is_refused():
    refuses("report='run.json'", compare, predicted(2), "run.json")


def test_a_report_that_trained_no_model_is_refused():
    expect = predicted(2)
    simulated = simulate(gpipe(2, 2), forward=1.0, backward=2.0).report()
    with pytest.raises(ValueError, match="report=.*no model of the library was trained.*legal: "):
        compare(expect, dataclasses.replace(as_measured(expect), model=None))
    refuses("expect=.*no model of the library was", compare, simulated, as_measured(expect))


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
