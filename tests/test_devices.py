"""Which device a rank takes, from what the ranks see; without a GPU, so the cards are stated."""

from __future__ import annotations

import dataclasses
import os

import pytest

import paralab as pl
from paralab.instruments import calibrate
from paralab.launch import launch_program

MODEL = pl.ModelSpec(layers=1, hidden=16, heads=2, seq_len=8)


def chosen(context, device, rank, cards, count):
    """What `choose_device` says where torch sees ``count`` GPUs."""
    import torch

    from paralab.ranks.process import choose_device

    torch.cuda.is_available = lambda: count > 0
    torch.cuda.device_count = lambda: count
    torch.cuda.set_device = lambda name: None
    return tuple(choose_device(device, rank, cards))


def choose(device, rank, cards, count):
    return launch_program(chosen, 1, (device, rank, cards, count), device="cpu", timeout=30)[0]


def test_a_gpu_for_each_rank_is_nccl_whatever_it_is_called():
    cards = [(0, f"GPU-{r}") for r in range(4)]
    assert choose(None, 3, cards, 4) == ("cuda:3", "nccl", False, "")
    # A wrapper shows every rank one GPU; two nodes have cards of one name (of virtual machines).
    assert choose(None, 3, cards, 1) == ("cuda:0", "nccl", False, "")
    assert choose(None, 1, [(0, "GPU-0"), (1, "GPU-0")], 1)[:2] == ("cuda:0", "nccl")


def test_fewer_gpus_than_ranks_train_on_the_cpu_and_say_so():
    cards = [(0, f"GPU-{r % 2}") for r in range(4)]
    device, backend, shared, why = choose(None, 3, cards, 2)
    assert (device, backend, shared) == ("cpu", "gloo", False)
    assert "4 ranks and 2 GPUs" in why and "device='cuda'" in why


def test_asked_for_they_share_the_gpu():
    cards = [(0, "GPU-0")] * 4
    device, backend, shared, why = choose("cuda", 3, cards, 1)
    assert (device, backend, shared) == ("cuda:0", "gloo", True)
    assert "4 ranks and 1 GPU:" in why


def test_no_gpu_is_the_cpu_without_a_word():
    assert choose(None, 0, [(0, ""), (0, "")], 0) == ("cpu", "gloo", False, "")
    assert choose("cpu", 0, [], 4) == ("cpu", "gloo", False, "")
    assert "some of 2 ranks have no GPU" in choose(None, 0, [(0, ""), (1, "GPU-1")], 0)[3]


def seen(context, names):
    """What `see_gpus` says where torch sees these cards."""
    from types import SimpleNamespace

    import torch

    from paralab.instruments.measure import see_gpus

    torch.cuda.is_available = lambda: bool(names)
    torch.cuda.device_count = lambda: len(names)
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(
        uuid=names[index], name="H100", total_memory=80
    )
    return see_gpus(context)


@pytest.mark.parametrize(("names", "count"), [("", 0), ("ab", 2), ("aab", 2)])
def test_gpus_that_a_rank_can_have_for_itself_are_told_apart_by_uuid(names, count):
    assert launch_program(seen, 1, (names,), device="cpu", timeout=30) == [[("H100", 80)] * count]


def test_times_of_ranks_that_shared_a_gpu_are_refused_by_name(run):
    report = run(MODEL, pl.Plan(dp=2), steps=2)
    shared = dataclasses.replace(report, meta={**report.meta, "shared_gpu": True})
    expect = pl.predict(MODEL, pl.Plan(dp=2), pl.Cluster.preset("dgx-a100"))
    for what, ask in {
        "a replay": shared.replay,
        "a bubble": shared.bubbles,
        "a comparison": lambda: pl.compare(expect, shared),
    }.items():
        with pytest.raises(ValueError, match=f"{what} needs what each rank computed"):
            ask()


def told(context):
    import os

    return os.environ["PARALAB_DEVICE"]


def test_the_default_device_is_what_runs_and_predictions_that_name_none_take(monkeypatch):
    monkeypatch.setattr(calibrate, "gpus", lambda: (("one", 8 * 10**9),) * 8)
    monkeypatch.setenv("PARALAB_DEVICE", "")
    assert calibrate.device_of_run(8) == "cuda"
    pl.set_default_device("cpu")
    assert calibrate.device_of_run(1) == "cpu"
    assert launch_program(told, 1, ()) == ["cpu"]
    pl.set_default_device("cuda")
    with pytest.raises(ValueError, match="torch sees no GPU here.* no PARALAB_DEVICE=cuda"):
        pl.launch(print, 1)
    monkeypatch.setattr(calibrate, "gpus", tuple)
    with pytest.raises(ValueError, match="no GPU here that could be measured"):
        pl.Cluster.local()
    monkeypatch.setattr(calibrate, "gpus", lambda: (("one", 8 * 10**9),) * 8)
    assert launch_program(told, 1, (), device="cpu") == ["cpu"]  # what is named goes first
    pl.set_default_device(None)
    assert "PARALAB_DEVICE" not in os.environ and calibrate.device_of_run(8) == "cuda"
    monkeypatch.setenv("PARALAB_DEVICE", "gpu")
    with pytest.raises(ValueError, match="PARALAB_DEVICE='gpu'"):
        pl.launch(print, 1)
    with pytest.raises(ValueError, match="device='gpu'"):
        pl.set_default_device("gpu")


def test_a_rank_knows_its_device_and_starts_no_process_to_ask():
    """Where there is a GPU, as an exercise does that makes programs on its ranks."""
    assert launch_program(predicts, 1, (), device="cpu", timeout=60) == [((), True)]


def predicts(context):
    from paralab.instruments import calibrate

    calibrate.DRIVERS = ("/",)
    return calibrate.gpus(), len(repr(pl.program(MODEL, pl.Plan(dp=2)))) > 0
