"""What the widgets say is what the library predicts and what runs give, number by number."""

import dataclasses
import re
from fractions import Fraction
from types import SimpleNamespace

import pytest

import paralab as pl
import synthetic
from paralab.theory import needs
from paralab.theory.pipeline import bubble_formula
from paralab.theory.zero import volume
from paralab.view import theme, widget_memory, widgets
from paralab.view.matrix_blocks import MODE_NAME
from paralab.view.widget_bars import STAGES
from paralab.view.widget_steps import Steps, share_of_step
from widgets import CLUSTER, PATIENCE, TINY, bars, numbers


@pytest.fixture
def widget(request, make) -> widgets.Widget:
    """The one that the test's name begins with, whose runs have two steps."""
    return make(request.function.__name__.split("_")[1], steps=2)


@pytest.mark.parametrize("name", ["zero", "tensor", "memory"])
@pytest.mark.parametrize("cluster", [CLUSTER, pl.Cluster.preset("dgx-a100")], ids=["cpu", "gpu"])
def test_bars_are_the_prediction_for_the_cluster_that_was_given(name, cluster):
    made = getattr(widgets, name)(cluster=cluster)
    at = made.at(recipe="fp32") if name == "memory" else made.at()
    expect = pl.predict(at.model, at.plan, cluster, steps=1)
    drawn = made._charts(at)[0].table
    if name != "memory":
        drawn = drawn[(drawn["category"] != "sent") & (drawn["bar"] == made.called[at[made.among]])]
    assert drawn["bytes"].sum() == expect.peak_memory
    made.close()


@pytest.mark.parametrize(("name", "knobs", "label", "others"), [
    ("zero", {"stage": 2}, "ZeRO-2",
     [{"stage": 3}, {"microbatches": 1}, {"precision": "bf16"}, {"recompute": "full"}]),
    ("tensor", {"mode": "2d", "ranks": 4}, "2D", [{"mode": "1d"}, {"tokens": 512}]),
])  # fmt: skip
def test_a_run_puts_the_measured_peak_and_bytes_below_its_prediction(
    make, name, knobs, label, others
):
    widget = make(name, steps=2)
    chart, found = widget.run(**knobs).wait(PATIENCE), widget.result
    held, sent, names = bars(chart), bars(chart, "sent"), list(bars(chart))
    assert names[names.index(label) + 1] == "measured"
    assert held["measured"] == found.peak_memory == found.peaks()["measured"]["total"]
    parts = chart.table[chart.table["bar"] == "measured"].set_index("category")["bytes"]
    assert parts.drop("sent").to_dict() == found.peaks()["measured"].drop("total").to_dict()
    assert sent["measured"] == sent[label] == int(found.traffic()["bytes"].mean())
    assert "exactly as predicted" in widget._status.value
    assert numbers(widget)[-1]["at the peak"] == f"{label}, measured"
    for knob in others:
        old = {name: widget.values[name] for name in knob}
        assert widget.set(**knob).result is None and widget.state == "idle"
        assert widget.set(**old).result is found and widget.state == "done"


# ---- words of a step -----------------------------------------------------------------------------
def test_a_part_of_a_step_is_never_more_than_the_step_it_is_of():
    """Of two steps that count the typical one is the longer here, and the median is between."""
    report, tables = synthetic.report(2, steps=3), {}
    for name in ("spans", "collectives", "steps"):
        table = getattr(report, name)
        short = table["step"].map({0: 1.0, 1: 1.0, 2: 0.1})
        tables[name] = table.assign(start=table["start"] * short, end=table["end"] * short)
    uneven = dataclasses.replace(report, **tables)
    for part in ("work", "wait"):
        assert share_of_step(uneven, part) == share_of_step(report, part)


def test_a_run_is_held_against_its_prediction_in_the_right_direction():
    for predicted, said in ((1.004, "within 1 % of"), (0.9, "10 % below"), (1.2, "20 % above")):
        at = SimpleNamespace(**{
            name: SimpleNamespace(step_time=seconds)
            for name, seconds in (("predicted", predicted), ("replayed", 1.0))
        })  # fmt: skip
        assert Steps._outcome(None, at) == f"the predicted step time is {said} the replayed one"


# ---- memory and collective -----------------------------------------------------------------------
def test_memory_bars_are_one_moment_of_a_program_that_keeps_what_the_recipe_says(widget):
    for recipe, settings in widget_memory.KEEPS.items():
        plan = pl.Plan(microbatch_size=2, **settings)
        program = pl.program(TINY, plan)
        states = sum(program.states().values())
        assert states // TINY.num_params == needs.bytes_per_parameter(recipe)  # and 4 per tensor
        table = widget.predict(recipe=recipe).table
        assert table["bytes"].sum() == sum(program.peak().values())
        most = program.most()  # what each has at its own moment is more
        assert table["bytes"].sum() < sum(most.values())


def test_memory_trains_a_small_model(widget):
    chart = widget.run(layers=2).wait(PATIENCE)
    assert bars(chart).keys() == {"zero-fp16", "fp32, measured"}
    assert bars(chart)["fp32, measured"] == widget.result.peak_memory
    assert "exactly as predicted" in widget._status.value
    assert widget.result.model.layers == 2 and "1 real process:" in widget._status.value
    widget.set(recipe="fp32")
    assert widget.state == "done"  # another recipe is another formula, not another run


def test_collective_replayed_is_on_its_formula_for_both_algorithms(widget):
    for algorithm in ("ring", "tree"):
        chart = widget.run(algorithm=algorithm, ranks=3, nbytes=10_000).wait(PATIENCE)
        assert "every rank holds the sum" in widget._status.value
        assert "exactly what the formula says" in widget._status.value
    at = chart.table[chart.table["bytes"] == 10_000]
    marks, lines = (at[at["clock"] == c].set_index("algorithm")["seconds"]
                    for c in ("replayed", "predicted"))  # fmt: skip
    assert marks.to_dict() == pytest.approx(lines.to_dict(), rel=1e-9)
    widget.set(alpha=1e-6, bandwidth=10**10)
    assert widget.state == "done" and "exactly what the formula says" in widget._status.value


def test_collective_times_that_differ_by_less_than_it_says_are_not_called_the_same(widget):
    ring, tree = numbers(widget.set(ranks=8, nbytes=200_000))
    assert (ring["predicted"], tree["predicted"]) == ("1.75 ms", "1.8 ms")
    assert widget.chart.finding.endswith("ring and tree take the same time within 5 %")


# ---- pipeline ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_pipeline_that_is_even_with_free_links_has_the_formulas_bubble(widget, name):
    widget.set(schedule=name, pp=4, microbatches=8)
    v = 2 if name == "interleaved" else 1
    theory = bubble_formula(name, 4, 8, v, 1.0, 1.0, 1.0)
    assert widget.simulation(widget.values).bubble_rate == pytest.approx(theory, abs=1e-12)
    (row,) = numbers(widget)
    assert row["bubble"] == row["formula"] == f"{100 * theory:.1f} %"
    assert row["messages"] == str(2 * 8 * (4 * v - 1))
    assert widget.knobs["virtual_stages"].disabled is (v == 1)
    assert widget.values.plan.virtual_stages == v


def test_pipeline_run_shows_the_replay_beneath_its_simulation(widget):
    chart = widget.run(schedule="interleaved", pp=2, microbatches=4).wait(PATIENCE)
    plan = widget.result.plan
    assert (plan.pp, plan.virtual_stages, plan.microbatches) == (2, 2, 4)
    for label in ("simulated", "replayed"):  # the same work, box by box
        work = chart.table[(chart.table["report"] == label) & (chart.table["microbatch"] >= 0)]
        assert work.groupby("rank").size().to_dict() == {0: 16, 1: 16}, label
    rows = numbers(widget)
    assert [row["clock"].split(" (")[0] for row in rows] == ["simulated", "replayed", "measured"]
    # 2(p-1) + (v-1)p + 1 and 2 m (p v - 1), in theory and in the run
    assert {(row["micro-batches alive on rank 0"], row["messages"]) for row in rows} == {
        ("5 chunks of 1/2", "24")
    }


def test_pipeline_simulation_and_replay_agree_and_need_no_new_run(widget):
    """Same costs, same order, same links: two programs that must come to one bubble."""
    widget.run(schedule="1f1b", pp=2, microbatches=4).wait(PATIENCE)
    ran, even = widget.result, widget.values
    for knob in ({"comm": 1.0}, {"imbalance": 3.0}, {"comm": 0.3, "imbalance": 2.0}):
        at = widget.set(**knob).values
        assert widget.state == "done" and at.measured is ran
        simulated = widget.simulation(at)
        assert at.replayed.step_time > 1.1 * even.replayed.step_time
        assert simulated.makespan > 1.1 * widget.simulation(even).makespan
        assert at.replayed.bubble == pytest.approx(simulated.bubble_rate, abs=0.02)
        # The line of the replay is not where its step ends, which is what the table has.
        words = [note.text for note in widget.chart.layout.annotations if " ms" in note.text]
        assert [bool(re.search(r"\bpipeline [\d.]+ ms", said)) for said in words] == [False, True]
    assert widget.set(microbatches=5).state == "idle" and widget.result is None


# ---- ZeRO ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero_bytes_sent_are_those_of_a_predicted_step(widget, microbatches):
    for stage in STAGES:
        at = widget.at(stage=stage, ranks=3, microbatches=microbatches)
        expect = pl.predict(at.model, at.plan, CLUSTER, steps=1)
        assert widget.sent(at) == expect.traffic()["bytes"].max()
        around = volume(stage, microbatches) * 4 * at.model.num_params * 2 / 3
        assert float(widget.sent(at)) == pytest.approx(around, rel=1e-2)  # and padding


def test_zero_table_has_the_states_the_peak_and_the_traffic_in_psi(widget):
    rows = numbers(widget.set(stage=3, ranks=4, microbatches=2))
    for name, values in {
        "at the peak": ["plain DP, predicted", "ZeRO-3, predicted"],
        "bytes per parameter": ["16.00", "4.00"], "sent, formula": ["2 Ψ(N−1)/N", "6 Ψ(N−1)/N"],
    }.items():  # fmt: skip
        assert [row[name] for row in rows] == values
    assert rows[1]["total"] == theme.scaled(bars(widget.chart)["ZeRO-3"], "B")
    assert rows[1]["sent"] == theme.scaled(bars(widget.chart, "sent")["ZeRO-3"], "B")
    assert len(numbers(widget.set(stage=0))) == 1  # not twice the same
    assert numbers(widget.set(stage=1, ranks=1))[1]["sent, formula"] == "0"
    assert "nothing to shard" in widget.chart.finding


def test_zero_stage_that_is_chosen_stands_out_and_the_title_says_what_it_costs(widget):
    chart = widget.set(stage=3, ranks=4, microbatches=1).chart
    assert {tuple(trace.marker.opacity) for trace in chart.data} == {(0.45, 0.45, 0.45, 1.0)}
    share = f"{100 * bars(chart)['ZeRO-3'] / bars(chart)['plain DP']:.0f} %"
    said = f"ZeRO-3 on 4 devices: {share} of the memory of plain DP for 1.5 times the traffic"
    assert chart.finding == said
    assert "for the same traffic" in widget.predict(stage=2).finding  # one micro-batch: m + 1 = 2
    assert "each holds all states" in widget.predict(stage=0).finding


# ---- tensor parallelism --------------------------------------------------------------------------
@pytest.mark.parametrize(("ranks", "modes"), [
    (4, ["1d", "2d"]), (8, ["1d", "2.5d", "3d"]), (64, ["1d", "2d", "2.5d", "3d"]),
])  # fmt: skip
def test_tensor_has_a_bar_for_every_mode_that_there_is_with_its_predicted_peak(
    widget, ranks, modes
):
    drawn = bars(widget.set(ranks=ranks, tokens=2048, hidden=512, mode=modes[0]).chart)
    for mode in modes:
        at = widget.at(mode=mode)
        assert drawn[MODE_NAME[mode]] == sum(pl.program(at.model, at.plan).peak().values())
    rows = [row["at the peak"] for row in numbers(widget)]
    assert rows == [f"{name}, predicted" for name in drawn]
    assert list(drawn) == [MODE_NAME[mode] for mode in modes]
    assert (at.model.hidden, at.model.heads) == (512, 64)


@pytest.mark.parametrize(("mode", "ranks"), [("1d", 4), ("2d", 4), ("2.5d", 8), ("3d", 8)])
def test_tensor_bytes_sent_are_those_of_a_predicted_step(widget, mode, ranks):
    for tokens in (128, 512):
        at = widget.at(mode=mode, ranks=ranks, tokens=tokens)
        sent = pl.predict(at.model, at.plan, CLUSTER, steps=1).traffic()["bytes"]
        assert widget.sent(at) == Fraction(round(sent.sum()), ranks)


def test_tensor_title_says_which_mode_sends_least(widget):
    far = widget.predict(ranks=64, mode="1d", tokens=512, hidden=12288)
    assert far.finding == "64 ranks, 512 tokens: 1D sends the least"
    far = widget.predict(ranks=64, mode="2d", tokens=512, hidden=12288)
    assert re.fullmatch("64 ranks, 512 tokens: 2D sends .* times as much as 1D", far.finding)
    none = widget.predict(ranks=8, mode="2d", tokens=32768, hidden=2048)
    assert none.finding == "8 ranks, 32,768 tokens: 2D is impossible; 2.5D sends the least"
    sent = none.data[-1]
    assert sent.name == "sent" and sent.marker.color == theme.axis_colour("tp")


@pytest.mark.parametrize(("ranks", "sequence", "more"), [
    (2, "whole", ""), (4, "parts", " with sequence parallelism"),
])  # fmt: skip
def test_tensor1d_table_has_the_programs_bytes_of_one_device_and_of_t(
    widget, ranks, sequence, more
):
    alone, chosen = numbers(widget.set(ranks=ranks, sequence=sequence))
    assert alone["clock"] == "1 device, predicted"
    assert chosen["clock"] == f"t={ranks}{more}, predicted"
    plan = widget.values.plan
    for row, one in ((alone, widget.plan.replace(tp=1)), (chosen, plan)):
        most = pl.program(widget.model, one).most()
        for category in ("parameters", "activations"):
            assert row[category] == theme.scaled(most[category], "B")
    expect = pl.predict(widget.model, plan, CLUSTER, steps=1)
    assert chosen["sent per rank"] == theme.scaled(float(expect.traffic()["bytes"].mean()), "B")
    assert chosen["time per step"] == f"{1e3 * expect.step_time:.1f} ms"
    assert alone["sent per rank"] == "0 B" and alone["waiting"] == "0 %"
    assert len(numbers(widget.set(ranks=1))) == 1 and not widget.values.plan.sequence_parallel


def test_tensor1d_run_puts_the_replay_and_what_was_counted_below_the_prediction(widget):
    widget.run(sequence="parts").wait(PATIENCE)
    assert "the bytes sent are exactly as predicted" in widget._status.value
    (_, expected, found), ran = numbers(widget), widget.result
    assert found["clock"] == expected["clock"].replace("predicted", "replayed")
    for column in ("sent per rank", "parameters"):
        assert found[column] == expected[column]
    most = ran.memory.groupby("category")["bytes"].max()
    assert found["activations"] == theme.scaled(int(most["activations"]), "B")
    assert widget.set(bandwidth=10**8).result is ran and widget.state == "done"
    assert widget.set(sequence="whole").result is None and widget.state == "idle"
    widget.run(ranks=1).wait(PATIENCE)
    assert numbers(widget)[1]["clock"] == "1 device, replayed"
