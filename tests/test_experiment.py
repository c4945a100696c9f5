"""`pl.run` as a whole: what it says while it runs, and when memory runs out."""

from __future__ import annotations

import inspect
import io
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import paralab as pl
from paralab import experiment
from paralab.experiment import _ProgressBar, checked
from paralab.instruments import calibrate
from paralab.interpret import text
from paralab.ranks.errors import OutOfMemory, Stopped
from together import reports


def test_the_bar_shows_steps_that_every_rank_has_finished(run, model, monkeypatch):
    (screen := io.StringIO()).isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    run(model, pl.Plan(dp=2), steps=3, progress=True)
    assert "2 ranks" in screen.getvalue() and "3/3" in screen.getvalue()
    bar = _ProgressBar(5, pl.Plan(dp=2), display=False)
    shown = []
    bar.bar = SimpleNamespace(n=0, update=shown.append)
    bar.move(0, 3, 5)
    bar.move(1, 2, 5)
    assert shown == [0, 2]


def test_a_run_whose_report_would_fill_the_memory_says_so_before(run, model, monkeypatch):
    plan = pl.Plan(dp=2, zero_stage=3, microbatches=4)
    launch = mock.Mock(side_effect=Stopped("as far as this test goes"))
    report = run(model, plan, steps=2)
    size = experiment._report_bytes(model, plan, 2, optimizer="adamw", clips=False)
    rows = size / experiment.ROW_BYTES
    assert 0.7 < rows / len(report.spans) < 1.5
    monkeypatch.setattr(experiment, "launch_program", launch)
    said = r"records of all 100000 steps will take about [2-9]\d GB of memory; train in several"
    with pytest.warns(UserWarning, match=said), pytest.raises(Stopped):
        run(model, plan, steps=100_000)
    for steps in (1000, np.uint8(200)):  # 200 times a row's bytes is no uint8
        with warnings.catch_warnings(), pytest.raises(Stopped):
            warnings.simplefilter("error")
            run(model, plan, steps=steps)
    assert launch.call_count == 3


def test_running_out_of_memory_says_what_fills_the_device(run, model):
    huge = pl.ModelSpec(layers=1, hidden=2**20, heads=1, seq_len=8)  # 13 terabytes of weights
    with pytest.raises(OutOfMemory) as caught:
        run(huge, pl.Plan(dp=2))
    said = str(caught.value)
    assert "rank" in said and caught.value.table in said
    assert all(word in caught.value.table for word in ("parameters", "gradients", "optimizer"))
    assert run(model, steps=2).losses  # the next call works


@pytest.mark.parametrize("device, gpus, gloo", [
    ("cuda", 2, False), ("cuda", 1, True), ("cpu", 2, True), (None, 2, False), (None, 1, True),
])  # fmt: skip
def test_running_out_of_memory_is_explained_with_what_the_ranks_send_through(
    model, monkeypatch, device, gpus, gloo
):
    """Gloo's reduce-scatter needs memory of its own. Ranks that share a GPU use gloo."""
    ends = mock.Mock(side_effect=OutOfMemory("as far as this test goes", rank=0, table=""))
    monkeypatch.setenv("PARALAB_DEVICE", "")
    monkeypatch.setattr(calibrate, "gpus", lambda: (("one", 8 * 10**9),) * gpus)
    monkeypatch.setattr(experiment, "launch_program", ends)
    monkeypatch.setattr(experiment, "table", table := mock.Mock(return_value="what fills it"))
    with pytest.raises(OutOfMemory, match="what fills it"):
        pl.run(model, pl.Plan(dp=2, zero_stage=2), device=device)
    assert table.call_args.kwargs == {"optimizer": "adamw", "gloo": gloo, "clips": False}


def test_run_and_the_torchrun_way_share_their_arguments_and_defaults():
    def options(function) -> dict:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    own = {"device", "timeout", "progress", "strict", "stop"}
    asked = {name: value for name, value in options(pl.run).items() if name not in own}
    assert asked == options(checked)
    with pytest.raises(TypeError, match="run.*'stepz'"):
        pl.run(pl.ModelSpec(layers=1, hidden=8, heads=1, seq_len=8), stepz=3)


def test_same_seed_same_bits_other_seed_other_run_and_the_report_says_how_it_was_made(text, model):
    jobs = [(model, pl.Plan(dp=2), {"steps": 3, "seed": seed}) for seed in (1, 1, 2)]
    first, again, other = reports(jobs, text)
    assert first.losses == again.losses != other.losses
    said = {"seed": 2, "steps": 3, "data": str(text), "backend": "gloo", "nodes": [0, 0]}
    assert other.meta.items() >= said.items()


GPUS = pl.Cluster.preset("dgx-a100")


@pytest.mark.parametrize("asked, dropout, on_gpus, on_processors", [
    (None, 0.0, "sdpa", "explicit"), (None, 0.1, "explicit", "explicit"),
    ("explicit", 0.0, "explicit", "explicit"), ("sdpa", 0.0, "sdpa", "sdpa"),
])  # fmt: skip
def test_attention_is_what_suits_the_device(
    model, monkeypatch, asked, dropout, on_gpus, on_processors
):
    """In a run, a prediction, a dry run and a program alike."""
    model, plan = model.replace(attention=asked, dropout=dropout), pl.Plan(dp=2)
    launch = mock.Mock(side_effect=Stopped("as far as this test goes"))
    monkeypatch.setattr(experiment, "launch_program", launch)
    for device, expected in (("cuda", on_gpus), ("cpu", on_processors)):
        for module in (experiment, text):
            monkeypatch.setattr(module, "device_of_run", lambda ranks, d=device: d)
        for named in (device, None):  # by name, or what `pl.run` takes by itself
            with pytest.raises(Stopped):
                pl.run(model, plan, device=named)
            _, _, (started, *_) = launch.call_args.args
            assert started.attention == expected
        cluster = GPUS if device == "cuda" else GPUS.replace(cores=2)
        for made in (
            pl.predict(model, plan, cluster),
            pl.dry_run(model, plan, cluster=cluster),
            pl.plan_search(model, cluster, 2, dp=2),
        ):
            assert made.model.attention == expected
        assert pl.program(model, plan).program.spec.attention == expected


def test_a_checkpoint_of_one_kernel_goes_on_with_the_other(run, model, tmp_path):
    run(model, pl.Plan(), steps=1, save=tmp_path)
    report = run(model.replace(attention="sdpa"), pl.Plan(), steps=1, resume=tmp_path)
    assert report.model.attention == "sdpa"
