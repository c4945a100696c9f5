"""Which device a rank takes, from what the ranks see; without a GPU, so the cards are stated."""

import dataclasses
import os
from types import SimpleNamespace

import torch

import paralab as pl
from paralab.instruments import calibrate
from paralab.instruments.measure import see_gpus
from paralab.launch import launch_program
from paralab.ranks.process import choose_device, take_device
from patience import HANG_S
from refusals import refuses

MODEL = pl.ModelSpec(layers=1, hidden=16, heads=2, seq_len=8)
CARDS = [(0, f"GPU-{rank}") for rank in range(4)]
# What is asked for, the rank, every rank's card, how many of them torch sees; device, backend,
# whether the GPU is shared, and words of the reason.
CHOICES = [
    ((None, 3, CARDS, 4), ("cuda:3", "nccl", False), [""]),
    # A wrapper shows every rank one GPU; two nodes have cards of one name (of virtual machines).
    ((None, 3, CARDS, 1), ("cuda:0", "nccl", False), [""]),
    ((None, 1, [(0, "GPU-0"), (1, "GPU-0")], 1), ("cuda:0", "nccl", False), [""]),
    ((None, 3, CARDS[:2] * 2, 2), ("cpu", "gloo", False), ["2 GPUs: by default", "device='cuda'"]),
    (("cuda", 3, CARDS[:1] * 4, 1), ("cuda:0", "gloo", True), ["4 ranks and 1 GPU:"]),
    ((None, 0, [(0, ""), (0, "")], 0), ("cpu", "gloo", False), [""]),
    (("cpu", 0, [], 4), ("cpu", "gloo", False), [""]),
    ((None, 0, [(0, ""), (1, "GPU-1")], 0), ("cpu", "gloo", False), ["no GPU: by default"]),
]


def torch_sees(monkeypatch, names):
    """GPUs with these UUIDs."""
    cards = [SimpleNamespace(uuid=name, name="H100", total_memory=80) for name in names]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_device", lambda name: None)


def test_a_rank_takes_a_gpu_of_its_own_or_the_processor_and_says_why(monkeypatch):
    for (*asked, count), expected, words in CHOICES:
        torch_sees(monkeypatch, "a" * count)
        *choice, why = choose_device(*asked)
        assert tuple(choice) == expected, asked
        assert all(word in why for word in words) and bool(why) == bool(words[0]), asked


def test_of_ranks_that_do_not_take_the_gpus_one_says_why_in_one_line(monkeypatch, capsys):
    torch_sees(monkeypatch, "ab")
    monkeypatch.setenv("PARALAB_DEVICE", "")
    taken = [take_device(None, rank, rank, CARDS[:2] * 2) for rank in range(4)]
    assert {one.device for one in taken} == {"cpu"}
    said = capsys.readouterr().out
    assert said == f"paralab: {taken[0].why}\n" and "4 ranks and 2 GPUs: by default" in said


def test_gpus_that_a_rank_can_have_for_itself_are_told_apart_by_uuid(monkeypatch):
    for names, count in (("", 0), ("ab", 2), ("aab", 2)):
        torch_sees(monkeypatch, names)
        assert see_gpus(None) == [("H100", 80)] * count


def test_times_of_ranks_that_shared_a_gpu_are_refused_by_name(run):
    report = run(MODEL, pl.Plan(dp=2), steps=2)
    shared = dataclasses.replace(report, meta={**report.meta, "shared_gpu": True})
    expect = pl.predict(MODEL, pl.Plan(dp=2), pl.Cluster.preset("dgx-a100"))
    asked = [("a replay", shared.replay), ("a bubble", shared.bubbles)]
    for what, ask in [*asked, ("a comparison", lambda: pl.compare(expect, shared))]:
        refuses(f"{what} needs the compute time of each rank", ask)
    assert "ranks shared a GPU, so boxes are longer" in shared.timeline().layout.title.text
    unknown = "How long each rank computed: ranks shared a GPU"
    assert unknown in shared.explain()["What is not known?"]
    assert "shared a GPU" not in report.timeline().layout.title.text + str(report.explain())


def test_a_run_on_gpus_is_replayed_on_this_machines_gpus(run, monkeypatch):
    report, asked = run(MODEL, pl.Plan(dp=2), steps=2), []
    ours = pl.Cluster.preset("dgx-a100")
    monkeypatch.setattr(pl.Cluster, "local", lambda **how: asked.append(how) or ours)
    for device in ("cuda:0", "cpu"):
        there = dataclasses.replace(report, meta={**report.meta, "device": device})
        assert there.replay().cluster.devices_per_node == ours.devices_per_node
    assert asked == [{"device": "cuda"}, {"device": "cpu"}]


def told(context):
    return os.environ["PARALAB_DEVICE"]


def test_the_default_device_is_what_runs_and_predictions_that_name_none_take(monkeypatch):
    eight = (("one", 8 * 10**9),) * 8
    monkeypatch.setattr(calibrate, "gpus", lambda: eight)
    monkeypatch.setenv("PARALAB_DEVICE", "")
    assert calibrate.device_of_run(8) == "cuda"
    pl.set_default_device("cpu")
    assert calibrate.device_of_run(1) == "cpu" and launch_program(told, 1, ()) == ["cpu"]
    pl.set_default_device("cuda")
    assert launch_program(told, 1, (), device="cpu") == ["cpu"]  # what is named goes first
    refuses("device='cuda': torch sees no GPU here.* no PARALAB_DEVICE=cuda", pl.launch, print, 1)
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "gpus", tuple)
        refuses("no GPU here that could be measured", pl.Cluster.local)
    pl.set_default_device(None)
    assert "PARALAB_DEVICE" not in os.environ and calibrate.device_of_run(8) == "cuda"
    monkeypatch.setenv("PARALAB_DEVICE", "gpu")
    refuses("PARALAB_DEVICE='gpu'", pl.launch, print, 1)
    refuses("device='gpu'", pl.set_default_device, "gpu")


def predicts(context):
    calibrate.DRIVERS = ("/",)
    return calibrate.gpus(), len(repr(pl.program(MODEL, pl.Plan(dp=2)))) > 0


def test_a_rank_knows_its_device_and_starts_no_process_to_ask():
    """Where there is a GPU, as an exercise does that makes programs on its ranks."""
    assert launch_program(predicts, 1, (), device="cpu", timeout=HANG_S) == [((), True)]
