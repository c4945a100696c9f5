"""The widget of 1D tensor parallelism without a browser: predicted at once, then run for real."""

from __future__ import annotations

import re

import pytest

import paralab as pl
from paralab.view import theme, widget_tensor1d
from paralab.view.widgets import tensor1d

MODEL = pl.ModelSpec(layers=2, hidden=64, heads=4, seq_len=16)
PLAN = pl.Plan(tp=2, microbatch_size=2)
CLUSTER = pl.Cluster(flops=5e10, memory_bandwidth=2e10, op_overhead=1e-5, devices_per_node=8,
                     intra=pl.Link(alpha=1e-4, bandwidth=1e9))  # fmt: skip
PATIENCE = 60


@pytest.fixture
def bench(monkeypatch) -> tensor1d:
    monkeypatch.setattr(widget_tensor1d, "STEPS", 2)
    made = tensor1d(MODEL, PLAN, CLUSTER)
    yield made
    made.close()


def numbers(bench: tensor1d) -> list[dict[str, str]]:
    """The table's rows."""
    rows = re.findall(r"<tr>(.*?)</tr>", bench._numbers.value)
    head, *rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_every_knob_moves_the_picture(bench):
    for name, value in {"ranks": 4, "sequence": "parts", "microbatch_size": 4,
                        "bandwidth": 10**8}.items():  # fmt: skip
        before = bench.chart
        bench.knobs[name].value = value
        assert bench.error is None and bench.chart.to_json() != before.to_json(), name
        assert bench.chart.table.equals(bench.predict().table)
    plan = bench.plan_of(bench.values)
    assert (plan.tp, plan.sequence_parallel, plan.microbatch_size) == (4, True, 4)
    assert bench.cluster_of(bench.values).intra.bandwidth == 10**8


@pytest.mark.parametrize("sequence", ["whole", "parts"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_table_has_the_programs_bytes_of_one_device_and_of_t(bench, ranks, sequence):
    bench.set(ranks=ranks, sequence=sequence)
    alone, chosen = numbers(bench)
    called = f"t={ranks}{' with sequence parallelism' if sequence == 'parts' else ''}, predicted"
    assert (alone["clock"], chosen["clock"]) == ("1 device, predicted", called)
    for row, plan in ((alone, PLAN.replace(tp=1)), (chosen, bench.plan_of(bench.values))):
        most = pl.program(MODEL, plan).most()
        for category in ("parameters", "activations"):
            assert row[category] == theme.scaled(most[category], "B")
    expect = pl.predict(MODEL, bench.plan_of(bench.values), CLUSTER, steps=1)
    assert chosen["sent per rank"] == theme.scaled(float(expect.traffic()["bytes"].mean()), "B")
    assert chosen["time per step"] == f"{1e3 * expect.step_time:.1f} ms"
    assert alone["sent per rank"] == "0 B" and alone["of it waiting"] == "0 %"


def test_one_rank_is_one_device_wherever_the_residual_stream_lies(bench):
    bench.set(ranks=1, sequence="parts")
    assert [row["clock"] for row in numbers(bench)] == ["1 device, predicted"]
    assert not bench.plan_of(bench.values).sequence_parallel


def test_ranks_that_do_not_divide_the_model_are_not_on_the_slider():
    ranks = [value for _, value in tensor1d(MODEL, PLAN, CLUSTER)._kinds["ranks"].options]
    assert ranks == [1, 2, 4]  # of four heads
    small = CLUSTER.replace(devices_per_node=2)
    assert [v for _, v in tensor1d(MODEL, PLAN, small)._kinds["ranks"].options] == [1, 2]


def test_the_repr_says_the_settings_and_wrong_ones_are_refused():
    assert repr(tensor1d(cluster=CLUSTER)) == \
        "tensor1d(4 ranks, whole on every rank, 4 samples, own link)"  # fmt: skip
    with pytest.raises(ValueError, match="model='gpt'.*legal: a pl.ModelSpec"):
        tensor1d("gpt")
    with pytest.raises(ValueError, match="plan=3: not a plan"):
        tensor1d(plan=3)
    for plan in (pl.Plan(tp=4, tp_mode="2d"), pl.Plan(dp=2, tp=2), pl.Plan(pp=2)):
        with pytest.raises(ValueError, match="tensor parallelism in 1D alone"):
            tensor1d(plan=plan)
    with pytest.raises(ValueError, match="cluster='mine': not a cluster"):
        tensor1d(cluster="mine")
    with pytest.raises(ValueError, match="ranks=3: not on this slider"):
        tensor1d(cluster=CLUSTER).predict(ranks=3)


@pytest.mark.parametrize("sequence", ["whole", "parts"])
def test_run_it_puts_the_replay_and_what_was_counted_below_the_prediction(bench, sequence):
    bench.run(sequence=sequence).wait(PATIENCE)
    assert bench.state == "done" and "2 real processes" in bench._status.value
    assert "bytes are as predicted, every one" in bench._status.value
    _, expected, found = numbers(bench)
    assert found["clock"] == expected["clock"].replace("predicted", "replayed")
    assert found["sent per rank"] == expected["sent per rank"]
    assert found["parameters"] == expected["parameters"]
    ran = bench.result.memory.groupby("category")["bytes"].max()
    assert found["activations"] == theme.scaled(int(ran["activations"]), "B")


def test_one_run_is_replayed_on_any_link(bench):
    bench.run().wait(PATIENCE)
    ran = bench.result
    assert bench.set(bandwidth=10**8).result is ran and bench.state == "done"
    assert bench.set(sequence="parts").result is None and bench.state == "idle"
