"""The pipeline widget without a browser: simulated at once, run for real, refused kindly."""

from __future__ import annotations

import pytest

import paralab as pl
from paralab import view
from paralab.theory import ideal
from paralab.theory.pipeline import bubble_formula
from paralab.view import widget_pipeline
from paralab.view.widgets import pipeline

MODEL = pl.ModelSpec(layers=4, hidden=32, heads=2, seq_len=16)
PATIENCE = 60


@pytest.fixture
def bench(monkeypatch) -> pipeline:
    monkeypatch.setattr(widget_pipeline, "STEPS", 3)
    made = pipeline(MODEL)
    yield made
    made.close()


def numbers(bench: pipeline) -> str:
    return bench._numbers.value


# ---- sliders -------------------------------------------------------------------------------------
def test_every_knob_moves_the_simulation(bench):
    bench.set(schedule="interleaved", microbatches=16)
    for name, value in {"pp": 8, "virtual_stages": 3, "imbalance": 2.0, "comm": 0.3,
                        "microbatches": 8, "schedule": "naive"}.items():  # fmt: skip
        before = bench.chart.table
        bench.knobs[name].value = value
        assert bench.error is None and not bench.chart.table.equals(before), name
    assert bench.chart.table.equals(
        view.simulated_timeline(bench.simulation_of(bench.values), "naive").table
    )


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_an_even_pipeline_with_free_links_has_the_formulas_bubble(bench, name):
    bench.set(schedule=name, pp=4, microbatches=8)
    simulation = bench.simulation_of(bench.values)
    v = 2 if name == "interleaved" else 1
    theory = bubble_formula(name, 4, 8, v, 1.0, 1.0, 1.0)
    assert simulation.bubble_rate == pytest.approx(theory, abs=1e-12)
    assert numbers(bench).count(f"{100 * theory:.1f} %") == 2  # simulated, and formula
    assert str(2 * 8 * (4 * v - 1)) in numbers(bench)


def test_a_slow_stage_and_a_slow_link_cost_what_they_must(bench):
    bench.set(schedule="gpipe", pp=2, microbatches=4)
    forward = widget_pipeline.FORWARD_S / 2
    even = bench.simulation_of(bench.values).makespan
    assert even == pytest.approx(5 * 3 * forward)
    slow = bench.simulation_of(bench.set(imbalance=3.0).values)
    assert slow.busy[1] == pytest.approx(3 * slow.busy[0])
    bench.set(imbalance=1.0, comm=0.1)
    assert bench.simulation_of(bench.values).makespan == pytest.approx(even + 2 * 0.1 * forward)


def test_chunks_can_be_moved_only_where_they_mean_something(bench):
    chunks = bench.knobs["virtual_stages"]
    assert chunks.disabled
    bench.set(schedule="interleaved")
    assert not chunks.disabled and bench.plan_of(bench.values).virtual_stages == 2
    bench.set(schedule="zb-h1")
    assert chunks.disabled and bench.plan_of(bench.values).virtual_stages == 1


def test_what_cannot_be_is_a_sentence_in_the_widget_and_the_sliders_live_on(bench, capfd):
    bench.set(schedule="interleaved", pp=4, microbatches=8)
    bench.knobs["microbatches"].value = 6
    assert bench.state == "error" and "4 (pp) at a time" in bench._trouble.value
    assert "a multiple of 4, like 4 or 8" in bench._trouble.value
    with pytest.raises(ValueError, match="a multiple of 4"):
        bench.predict()
    bench.knobs["microbatches"].value = 12
    assert bench.state == "idle" and not bench._trouble.value
    assert capfd.readouterr() == ("", "")


def test_the_repr_says_the_settings():
    assert repr(pipeline()) == \
        "pipeline(1f1b, 4 ranks, 8 micro-batches, 2 chunks, even, free links)"  # fmt: skip
    with pytest.raises(ValueError, match="model='gpt'.*legal: a pl.ModelSpec"):
        pipeline("gpt")


# ---- the real run --------------------------------------------------------------------------------
def test_run_it_shows_the_replay_beneath_its_simulation(bench):
    seen = []
    bench._bar.observe(lambda change: seen.append(change["new"]), names="value")
    bench.run(schedule="interleaved", pp=2, microbatches=4)
    assert all(knob.disabled for knob in bench.knobs.values())
    chart = bench.wait(PATIENCE)
    assert bench.state == "done" and seen[-1] == 3 and "2 real processes" in bench._status.value
    assert bench.knobs["virtual_stages"].disabled is False
    plan = bench.result.plan
    assert (plan.pp, plan.virtual_stages, plan.microbatches) == (2, 2, 4)
    for label in ("simulated", "replayed"):  # the same work, box by box
        work = chart.table[(chart.table["report"] == label) & (chart.table["microbatch"] >= 0)]
        assert work.groupby("rank").size().to_dict() == {0: 16, 1: 16}, label
    assert all(clock in numbers(bench) for clock in ("simulated", "replayed", "measured"))
    assert numbers(bench).count(">5 chunks of 1/2<") == 3  # 2(p-1) + (v-1)p + 1, in theory and run
    assert numbers(bench).count(">24<") == 3  # messages, 2 m (p v - 1)


def test_a_new_imbalance_or_link_needs_no_new_run_and_moves_both_pictures(bench):
    bench.run(schedule="1f1b", pp=2, microbatches=4).wait(PATIENCE)
    ran = bench.result
    for knob in ({"comm": 1.0}, {"imbalance": 3.0}):
        before = bench.replay_of(bench.values, ran).step_time
        theory = bench.simulation_of(bench.values, ran).makespan
        bench.set(**knob)
        assert bench.state == "done" and bench.result is ran
        assert bench.replay_of(bench.values, ran).step_time > 1.1 * before
        assert bench.simulation_of(bench.values, ran).makespan > 1.1 * theory
    bench.set(microbatches=5)
    assert bench.state == "idle" and bench.result is None


def test_simulation_and_replay_of_one_run_agree(bench):
    """Same costs, same order, same links: two programs that must come to one bubble."""
    bench.run(schedule="1f1b", pp=2, microbatches=4, comm=0.3, imbalance=2.0).wait(PATIENCE)
    replayed = bench.replay_of(bench.values, bench.result)
    simulated = bench.simulation_of(bench.values, bench.result)
    assert replayed.bubble == pytest.approx(simulated.bubble_rate, abs=0.02)
    assert ideal.schedule_of(replayed) == bench.schedule_of(bench.values)


def test_a_model_with_too_few_layers_is_refused_in_words(bench):
    with pytest.raises(ValueError, match="; legal: "):
        bench.run(schedule="1f1b", pp=6).wait(PATIENCE)
    assert bench.state == "error" and "4" in bench._trouble.value and "Traceback" not in \
        bench._trouble.value  # fmt: skip
