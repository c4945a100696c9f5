"""Checkpoints: what one plan saved any other goes on with, and no failure loses the last good one.

What being killed at any moment does is in test_checkpoint_killed.py.
"""

import errno
import json
import math
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import pairwise
import paralab as pl
from equality import worst
from paralab import checkpoint
from paralab.interpret.pieces import pieces
from paralab.interpret.train import Trainer, train
from paralab.launch import launch_program
from paralab.parallel.layouts import whole_shape
from paralab.programs.compile import compiled
from paralab.report import boxes, checkpoints
from paralab.report.storage import seal
from patience import HANG_S
from processes import ROOT
from refusals import refuses

PLANS = {
    "one device": pl.Plan(microbatches=4),
    "dp=2": pl.Plan(dp=2, microbatches=2),
    "dp=3": pl.Plan(dp=3, microbatches=2),
    "interleaved": pl.Plan(pp=2, virtual_stages=2, schedule="interleaved", microbatches=4),
    "zero 1": pl.Plan(dp=2, zero_stage=1, microbatches=2),
    "zero 2": pl.Plan(dp=3, zero_stage=2, microbatches=2, bucket_bytes=20_000),
    "zero 3": pl.Plan(dp=4, zero_stage=3),
    "hsdp": pl.Plan(dp=4, zero_stage=3, shard=2),
    "zero 3, pp=2": pl.Plan(dp=2, pp=2, zero_stage=3, microbatches=2),
}


@pytest.fixture(scope="module")
def deep() -> pl.ModelSpec:
    """Four blocks, for interleaved stages; sizes that 3 ranks do not divide; dropout."""
    return pl.ModelSpec(layers=4, hidden=20, heads=2, seq_len=12, vocab=257, dropout=0.1)


@pytest.fixture(scope="module")
def saved(run, deep, tmp_path_factory) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    run(deep, PLANS["dp=2"], steps=2, save=folder, save_every=1)
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A copy of that folder, for a test to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def latest(folder: Path) -> Path:
    return checkpoints.find(folder).folder


# ---- going on -----------------------------------------------------------------------------------
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(run, deep, tmp_path):
    """Of mixed precision the master weights and the loss scale go on too."""
    plan = pl.Plan(dp=2, zero_stage=2, precision="fp16", microbatches=2)
    same = {"keep_state": True, "clip_norm": 1.0}
    whole = run(deep, plan, steps=4, **same)
    first = run(deep, plan, steps=2, save=tmp_path, **same)
    second = run(deep, plan, steps=2, resume=tmp_path, save=tmp_path, **same)
    assert first.losses + second.losses == whole.losses
    assert second.meta["first_step"] == 2 and whole.meta["first_step"] == 0
    assert worst(whole.weights, second.weights)[0] == 0.0
    assert worst(whole.gradients, second.gradients)[0] == 0.0
    scale = {"loss_scale.value": 2.0**16, "loss_scale.good_steps": 4.0}
    assert checkpoints.find(tmp_path).counters == {"optimizer_steps": 4.0, **scale}
    masters = tmp_path / "step-00000002"  # from which fp32 goes on
    plain = run(deep, PLANS["dp=2"], steps=1, resume=masters, clip_norm=1.0)
    assert plain.losses == pytest.approx(whole.losses[2:3], rel=1e-2)


def test_a_training_changes_its_plan_at_every_stop_and_stays_the_same(run, deep, tmp_path):
    """With an untied head, and with SGD, so that no tolerance is needed but that of additions."""
    model, same = deep.replace(tied=False), {"optimizer": "sgd", "keep_state": True}
    whole = run(model, PLANS["one device"], steps=4, **same)
    losses: list[float] = []
    for name in ("dp=2", "zero 3", "interleaved", "zero 3, pp=2"):
        folder = tmp_path if losses else None
        part = run(model, PLANS[name], steps=1, save=tmp_path, resume=folder, **same)
        losses += part.losses
    assert losses == pytest.approx(whole.losses, rel=1e-5)
    gap, name = worst(whole.weights, part.weights)
    assert gap < 1e-5, name
    last = checkpoints.find(tmp_path)
    assert (last.step, last.plan["pp"], last.model) == (4, 2, model.resolved(gpus=False))
    assert last.files.keys() == {f"rank-{r}.safetensors" for r in range(4)}


def _restored(context: Any, model: pl.ModelSpec, plans: list[pl.Plan], folder: str) -> list[dict]:
    """In a rank: what a trainer under each plan has after loading."""
    found = []
    for plan in plans:
        trainer = Trainer(context, model, plan)
        checkpoint.load(trainer, folder)
        tensors = [(kind, piece.name, piece.offsets, np.array(values))
                   for piece in pieces(trainer.state)
                   for kind, values in {"weight": piece.weight, **piece.state}.items()]  # fmt: skip
        alias = {"head.output.weight": "embedding.token.weight"} if model.tied else {}
        used = {
            alias.get(name, name): p.numpy()
            for value, unit in trainer.state.store.items() if value[0] == "w"
            for name, p in unit.views.items()
        }  # fmt: skip
        found.append({"pieces": tensors, "used": used, "counters": trainer.state.counters()})
    return found


def assembled(parts: list[dict[str, Any]], model: pl.ModelSpec) -> dict[str, np.ndarray]:
    """Every tensor of the training's state, whole, from what the ranks keep; replicas agree."""
    found: dict[str, np.ndarray] = {}
    for kind, name, offsets, values in (piece for part in parts for piece in part["pieces"]):
        empty = np.full(whole_shape(model, name), np.nan)
        box = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        there = found.setdefault(f"{kind}/{name}", empty)[box]
        assert np.isnan(there).all() or (there == values).all(), f"replicas of {name} differ"
        there[:] = values
    return found


@pytest.fixture(scope="module")
def restored(deep, saved) -> dict[str, list[dict[str, Any]]]:
    """What the ranks of each plan have after loading; one launch for all with as many ranks."""
    found = {}
    for ranks in sorted({plan.world_size for plan in PLANS.values()}):
        alike = {name: plan for name, plan in PLANS.items() if plan.world_size == ranks}
        given = (deep, list(alike.values()), str(saved))
        parts = launch_program(_restored, ranks, given, strict=True)
        found |= zip(alike, zip(*parts, strict=True), strict=True)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_reads_every_bit_of_the_state(name, deep, restored):
    one, plan, parts = restored["one device"], PLANS[name], restored[name]
    expected, got = assembled(one, deep), assembled(parts, deep)
    assert got.keys() == expected.keys() and len(got) == 3 * len(deep.parameter_shapes())
    for tensor in expected:
        assert np.array_equal(got[tensor], expected[tensor]), tensor  # NaN, not filled, is unequal
    assert np.abs(expected["exp_avg/blocks.1.mlp.up.weight"]).max() > 0.0
    used = [item for part in parts for item in part["used"].items()]
    assert used or plan.zero_stage == 3  # there the model has nothing between two steps
    for tensor, values in used:  # what the model computes with, not only what is kept
        assert np.array_equal(values, one[0]["used"][tensor]), tensor
    assert all(part["counters"] == {"optimizer_steps": 2.0} for part in parts)


def test_what_the_ranks_write_tiles_every_tensor_and_they_share_the_writing(deep):
    """Under every pair of settings; without ranks: the program says what each of them keeps."""
    cases = [(model, plan) for _, model, plan, _ in pairwise.cover().cases]
    for model, plan in [*cases, *((deep, plan) for plan in PLANS.values())]:
        program, held = compiled(model, plan, optimizer="sgd", clips=False), []
        for at in map(plan.place, range(plan.world_size)):
            state = SimpleNamespace(
                program=program, pp=at.pp, tp=at.tp,
                index=at.dp % plan.shard_degree if plan.zero_stage else 0,
                kept=lambda unit, name, where: {"weight": torch.empty(where.stop - where.start)},
            )  # fmt: skip
            kept = [(f"weight/{p.name}", p.offsets, tuple(p.weight.shape)) for p in pieces(state)]
            held.append(kept)
        asked, written = checkpoints.shapes(model, "sgd"), boxes.assigned(held)
        index = boxes.index(asked, chain(*written))
        for name, said in json.loads(json.dumps(index)).items():
            assert boxes.stored(name, said).shape == asked[name], (name, plan)
        if model == deep:
            most = max(sum(math.prod(box.sizes) for box in share) for share in written)
            assert most < 1.6 * deep.num_params / plan.world_size


def test_the_last_two_are_kept_and_every_so_many_steps_count_from_the_start(run, model, tmp_path):
    plan = pl.Plan(dp=2)
    run(model, plan, steps=5, save=tmp_path, save_every=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    run(model, plan, steps=2, save=tmp_path, save_every=2, resume=tmp_path)
    assert names(tmp_path) == ["step-00000006", "step-00000007"]
    [six] = (entry for entry in os.scandir(tmp_path) if entry.name == "step-00000006")
    run(model, plan, steps=1, save=tmp_path, resume=six)  # a path that cannot be pickled; 7 again
    assert names(tmp_path) == ["step-00000007", "step-00000007.1"]
    assert latest(tmp_path).name == "step-00000007.1"


def names(folder: Path) -> list[str]:
    """Everything in the folder but ``latest`` and the lock."""
    return sorted(f.name for f in folder.iterdir() if f.name not in ("latest", ".lock"))


# ---- refusals -----------------------------------------------------------------------------------
def test_what_is_no_checkpoint_is_refused_before_a_rank_starts(run, deep, saved, tmp_path, lone):
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "paralab.json").write_text('{"format": "another"}')
    for path, said in (
        ("nowhere", "there is no such folder"),
        ("file", "it is a file"),
        ("empty", "it has no file 'latest' that names a checkpoint"),
        ("other", "its paralab.json is not the index of a checkpoint"),
    ):
        refuses(f"^resume=.*{said}", run, deep, resume=tmp_path / path)
    refuses("resume=3: not a path", run, deep, resume=3)
    for settings, said in (
        ({"model": deep.replace(layers=2)}, "its model has layers=4, this model has layers=2; lega"
         "l: a model with layers=4, or resume=None"),
        ({"optimizer": "sgd"}, "trained with optimizer='adamw', this run has optimizer='sgd'; leg"),
        ({"seed": 7}, "it was trained with seed=0, this run has seed=7; legal: seed=0, or resume="),
    ):  # fmt: skip
        refuses(said, run, settings.pop("model", deep), resume=saved, **settings)


def test_another_rate_batch_or_text_is_refused_unless_it_is_named(run, deep, saved, text, tmp_path):
    other, digest = tmp_path / "other", "'[0-9]+ bytes, sha256 [0-9a-f]{64}'"
    other.write_bytes(text.read_bytes()[:-1] + b"?")  # as long as the text
    asked, changed = {"plan": PLANS["dp=2"], "steps": 1, "resume": saved}, {}
    every = {"lr", "clip_norm", "global_batch", "data"}
    for name, settings, was, now in (
        ("lr", {"lr": 0.5}, "0.001", "0.5"),
        ("clip_norm", {"clip_norm": 1.0}, "None", "1.0"),
        ("global_batch", {"plan": PLANS["dp=3"]}, "8", "12"),
        ("data", {"data": other}, digest, digest),
    ):
        said = f"trained with {name}={was}, this run has {name}={now}; legal: {name}={was}, or re"
        refuses(said, run, deep, **asked | settings, resume_changes=every - {name})
        changed |= settings
    assert run(deep, **asked | changed, resume_changes=[*every]).meta["first_step"] == 2
    shutil.copy(text, other)  # equal text elsewhere is the same data
    assert run(deep, **asked, data=other).meta["first_step"] == 2
    for changes, said in (
        ("lr", r"^resume_changes='lr': not a tuple of names; legal: some of \('lr', 'glob"),
        (("seed",), "^resume_changes='seed': unknown choice; legal: 'lr' .* 'data'"),
        (3, "^resume_changes=3: not a tuple"),
    ):
        refuses(said, run, deep, resume=saved, resume_changes=changes)
    refuses("^resume_changes=.*: there is nothing to res", run, deep, resume_changes=("lr",))


def test_a_file_changed_cut_or_gone_is_named_and_the_one_before_works(run, deep, copy):
    for name in ("rank-0.safetensors", "rank-1.safetensors"):  # each rank checks one of them
        victim = latest(copy) / name
        content, size = victim.read_bytes(), victim.stat().st_size
        at = size // 2
        victim.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        changed = f"{name}': its content does not match its ch.*; legal: "
        refuses(changed, run, deep, PLANS["dp=2"], resume=copy)
        victim.write_bytes(content)
    os.truncate(victim, size // 2)
    refuses(rf"rank-1.safetensors'.* {size // 2} bytes, but {size} were", run, deep, resume=copy)
    victim.unlink()
    other = copy / "step-00000001"
    said = f"{victim.name}': the file is missing.*or the other checkpoint in the folder, {other}$"
    refuses(said, run, deep, resume=copy)
    assert run(deep, PLANS["one device"], steps=1, resume=other).meta["first_step"] == 1
    shutil.rmtree(victim.parent)
    with pytest.warns(UserWarning, match="no longer there: the run resumes from step-00000001"):
        assert checkpoints.find(copy).step == 1


def test_a_damaged_description_is_refused(run, deep, copy):
    about = latest(copy) / "paralab.json"
    said = json.loads(about.read_text())
    about.write_text(json.dumps({**said, "body": {**said["body"], "step": 3}}))
    refuses("not match its own checksum: the checkpoint is damag", run, deep, resume=copy)
    for version in (3, 1, -1, "2", None):
        about.write_text(json.dumps({**said, "version": version}))
        said_of_it = f"its format version is {version!r}, and this paralab reads"
        refuses(said_of_it, run, deep, resume=copy)
    for content in (json.dumps(said)[:100], "[" * 100_000, "\0"):
        about.write_text(content)
        refuses("paralab.json': it cannot be read", run, deep, resume=copy)


def crafted(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The latest checkpoint of ``folder`` with another index, which is sealed."""
    about = folder / "step-00000002" / "paralab.json"
    said = json.loads(about.read_text())
    change(said["body"])
    about.write_text(json.dumps({**said, "sha256": seal(said["body"])}))
    return about.parent


TENSOR = "weight/blocks.0.mlp.up.weight"  # (80, 20)


def _of(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one box of TENSOR."""
    return lambda body: body["tensors"][TENSOR]["boxes"][0].update({name: value})


def _key_of_another(body: dict[str, Any]) -> None:
    """The first box of TENSOR is to be read from where a box of another shape is stored."""
    [box, *_] = body["tensors"][TENSOR]["boxes"]
    every = chain(*(tensor["boxes"] for tensor in body["tensors"].values()))
    other = (b for b in every if b["file"] == box["file"] and b["sizes"] != box["sizes"])
    box["key"] = next(other)["key"]


CRAFTED = {
    "a file elsewhere": (
        lambda body: body["files"].update({"../step-00000001/rank-0.safetensors": [9, 9]}),
        r"'../step-00000001/rank-0.safetensors': \[9, 9\] is not a file of tensors"),
    "a size in words": (lambda body: body["files"].update({"rank-1.safetensors": ["9", 9]}),
                        "is not a file of tensors with its bytes"),
    "a box in a file elsewhere": (_of("file", "../../x"), "'../../x' is none of the checkpoint's"),
    "another key": (_of("key", "nothing"), "rank-.*safetensors' *: .*nothing"),
    "the key of another tensor": (_key_of_another, "' in it is F32 of shape .*, not F32 of sh"),
    "outside": (_of("offsets", [1, 0]), "a box of .* at .* is not inside"),
    "negative": (_of("offsets", [-1, 0]), "offsets is .*, not whole numbers"),
    "one dimension": (_of("offsets", [0]), TENSOR),
    "null for a box": (lambda body: body["tensors"][TENSOR]["boxes"].append(None), TENSOR),
    "a box missing": (lambda body: body["tensors"][TENSOR]["boxes"].pop(),
                      f"{TENSOR}: the checkpoint has only [0-9]+ of its 1600 elements"),
    "a box twice": (lambda body: body["tensors"][TENSOR]["boxes"].append(
        body["tensors"][TENSOR]["boxes"][0]), "two boxes hold the element at"),
    "no boxes": (lambda body: body["tensors"][TENSOR].pop("boxes"), f"{TENSOR}: boxes is missing"),
    "16 bits": (lambda body: body["tensors"][TENSOR].update(dtype="F16"), "its dtype is 'F16'"),
    "no such tensor": (lambda body: body["tensors"].pop(TENSOR),
                       f"the shape of {TENSOR} is missing in it, and"),
    "one tensor more": (lambda body: body["tensors"].update({"more": {
        "dtype": "F32", "shape": [0], "boxes": []}}), "shape of more is .0,. in it, and missing"),
    "no steps": (lambda body: body["counters"].clear(), "optimizer_steps is missing in it"),
    "steps in words": (lambda body: body["counters"].update(optimizer_steps="2"),
                       "optimizer_steps has type str, not float"),
    "steps without end": (lambda body: body["counters"].update(optimizer_steps=1e308),
                          r"optimizer_steps is 1e\+308"),
    "a scale that divides by 0": (lambda body: body["counters"].update({"loss_scale.value": 0.0}),
                                  "loss_scale.value is 0.0"),
    "a step before the first": (lambda body: body.update(step=-1), "step=-1: out of range"),
    "a step that no folder can name": (lambda body: body.update(step=10**8), "step=100000000: out"),
    "no rate": (lambda body: body.pop("lr"), "lr is missing"),
}  # fmt: skip


@pytest.mark.parametrize("how", CRAFTED)
def test_a_crafted_index_is_refused_before_a_rank_starts(deep, run, copy, how, lone):
    change, said = CRAFTED[how]
    crafted(copy, change)
    said = f"^resume='.*({said}).*: the checkpoint is damaged; le"
    refuses(said, run, deep, PLANS["dp=2"], resume=copy)


@pytest.mark.timeout(HANG_S)
def test_a_fifo_in_a_checkpoint_is_refused_and_not_waited_for(deep, run, copy, lone):
    os.mkfifo(latest(copy) / "rank-9.safetensors")
    crafted(copy, lambda body: body["files"].update({"rank-9.safetensors": [0, 0]}))
    said = "^resume='.*rank-9.safetensors': it is no file: the checkpoint is damaged; le"
    refuses(said, run, deep, PLANS["dp=2"], resume=copy)
    (copy / "latest").unlink()
    os.mkfifo(copy / "latest")
    refuses("no file 'latest'", run, deep, PLANS["dp=2"], resume=copy)


@pytest.fixture
def lone(monkeypatch) -> None:
    """No rank can be started."""
    monkeypatch.setattr("paralab.experiment.launch_program", None)


# ---- nothing is executed ------------------------------------------------------------------------
class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


def test_a_pickle_in_a_checkpoint_is_refused_and_not_executed(run, deep, copy, tmp_path):
    bomb, gone_off = pickle.dumps(Bomb(tmp_path / "bang")), tmp_path / "bang"
    pickle.loads(bomb)
    assert gone_off.is_dir()  # so it works
    gone_off.rmdir()
    victim = latest(copy) / "rank-1.safetensors"
    (victim.parent / ".metadata").write_bytes(bomb)
    assert run(deep, PLANS["dp=2"], steps=1, resume=copy).meta["first_step"] == 2  # not looked at
    victim.write_bytes(bomb)
    crafted(copy, lambda body: body["files"].update({victim.name: checkpoints.facts(victim)}))
    refuses(f"{victim.name}': safetensors cannot read it", run, deep, PLANS["dp=2"], resume=copy)
    assert not gone_off.exists()


READ_PICKLES = re.compile(
    r"\b(?:pickle|cloudpickle|marshal|shelve|torch|np|dcp)\.(?:loads?|open)\b"
    r"|Unpickler|read_pickle|allow_pickle"
)


def test_what_is_unpickled_comes_from_this_runs_own_processes():
    """By pipes and a folder that only its owner may enter, which is gone when the call returns."""
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in (ROOT / "paralab").rglob("*.py")
        for name in READ_PICKLES.findall(path.read_text())
    }
    # what ranks return, and what the process returns that executes a notebook's answers
    own = ("paralab/ranks/process.py", "paralab/ranks/watch.py", "paralab/exercises/graded.py")
    assert found == {(path, "pickle.loads") for path in own}


def test_a_folder_that_cannot_be_written_to_is_refused_before_a_rank_starts(run, deep, tmp_path):
    (tmp_path / "file").write_text("text")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        refuses("^save=.*the folder cannot be created: .*; legal: ", run, deep, save=path)
    refuses("memory_limit", run, deep, save=tmp_path / "new", memory_limit="none")
    assert not (tmp_path / "new").exists()  # nor is one made for what is refused
    refuses("save_every=2: there is no folder to save into", run, deep, save_every=2)
    refuses("save_every=0: out of range", run, deep, save=tmp_path, save_every=0)


def test_a_folder_of_another_training_is_not_saved_into(run, deep, saved, copy):
    """Two checkpoints are kept: the other training's would be gone, without a word."""
    plan = PLANS["dp=2"]
    goes_on = "^save=.*: it has step-00000002 of another training.*; legal: resume=.*copy'"
    for resume in (None, saved):
        refuses(goes_on, run, deep, plan, steps=1, save=copy, resume=resume)
    os.remove(copy / "latest")
    refuses(goes_on, run, deep, plan, steps=1, save=copy)
    single = "^save=.*: it is a single checkpoint; legal: the fol"
    refuses(single, run, deep, plan, steps=1, save=copy / "step-00000002")
    assert names(copy) == ["step-00000001", "step-00000002"]


def test_a_run_into_a_folder_that_another_saves_into_is_refused_in_words(
    deep, run, tmp_path, monkeypatch
):
    def soon(program: Callable, ranks: int, args: tuple, **how: Any) -> Any:
        def impatient(*given: Any) -> Any:
            checkpoints.LOCK_SECONDS = 0.1  # in the rank
            return program(*given)

        return launch_program(impatient, ranks, args, **how)

    monkeypatch.setattr("paralab.experiment.launch_program", soon)
    with checkpoints.locked(tmp_path):
        refuses("^save=.*another run saves into it; legal: ", run, deep, save=tmp_path)


@pytest.mark.parametrize("resumes", [False, True])
def test_what_another_run_saves_after_this_one_was_checked_is_not_replaced(
    deep, run, tmp_path, monkeypatch, resumes
):
    folder = tmp_path / "both"
    if resumes:
        run(deep, steps=1, save=folder)
    settings = {"save": folder, "resume": folder if resumes else None}

    def after_another(*given: Any, **how: Any) -> Any:
        monkeypatch.setattr("paralab.experiment.launch_program", launch_program)
        run(deep, steps=3, **settings)
        return launch_program(*given, **how)

    monkeypatch.setattr("paralab.experiment.launch_program", after_another)
    said = "step-00000003 of another training, which this run does not resume; legal: resume="
    if resumes:
        said = "run has saved step-00000004 there since this one began to resume step-00000001; leg"
    refuses(f"^save=.*{said}", run, deep, steps=1, **settings)
    assert latest(folder).name == f"step-{3 + resumes:08d}"
    run(deep, steps=1, save=folder, resume=folder)
    if resumes:  # whoever names an older checkpoint wants to go on from that one
        run(deep, steps=1, save=folder, resume=folder / "step-00000004")
        assert latest(folder).name == "step-00000005.1"


def test_a_checkpoint_that_goes_while_a_rank_reads_it_is_refused_in_words(deep, copy):
    def program(context: Any) -> None:
        facts = checkpoints.facts
        checkpoints.facts = lambda file: file.parent.rename(copy / ".removed") and facts(file)
        checkpoint.load(Trainer(context, deep, PLANS["one device"]), str(copy))

    refuses("No such file or directory: .*copy/step-00000002/rank", launch_program, program, 1)


# ---- a full disk --------------------------------------------------------------------------------
def _no_room(file: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))


@pytest.mark.parametrize(
    ("full", "said"),
    [
        (1, r"rank 1: .*File too large, in writing a file of 0\.\d+ MB"),  # of tensors
        (0, "No space left on device.*paralab.json"),
    ],
)
def test_a_disk_that_runs_full_leaves_the_checkpoint_before(run, deep, copy, text, full, said):
    before = checkpoints.find(copy)

    def program(context: Any) -> Any:
        if context.rank == full == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        elif context.rank == full:
            checkpoints._write = _no_room
        return train(
            context, deep, pl.Plan(dp=2), steps=1, keep_state=False, data=str(text),
            save=str(copy), resume=str(before.folder), optimizer="adamw",
        )  # fmt: skip

    said = f"raised OSError: cannot save the checkpoint of step 3 into {copy}: .*{said}"
    with pytest.raises(pl.RankError, match=said):
        launch_program(program, 2)
    assert checkpoints.find(copy) == before
    assert names(copy) == ["step-00000001", "step-00000002"]
    assert run(deep, PLANS["dp=2"], steps=1, resume=copy, save=copy).meta["first_step"] == 2


@pytest.mark.parametrize("made_again", [False, True])
def test_a_folder_that_is_removed_during_the_training_is_named_and_left_to_others(
    deep, saved, tmp_path, made_again
):
    folder = tmp_path / "gone"

    def program(context: Any) -> Any:
        step = Trainer.step

        def late(*given: Any, **how: Any) -> Any:
            shutil.rmtree(folder)
            if made_again:  # by another run
                shutil.copytree(saved, folder)
            return step(*given, **how)

        Trainer.step = late  # in the rank
        return train(context, deep, pl.Plan(microbatches=4), steps=1, keep_state=False,
                     save=str(folder), optimizer="adamw")  # fmt: skip

    folder.mkdir()
    said = f"OSError: cannot save the checkpoint of step 1 into {folder}: the folder, or .* removed"
    with pytest.raises(pl.RankError, match=said):
        launch_program(program, 1)
    assert folder.exists() == made_again
    if made_again:
        assert (folder / "latest").read_bytes() == (saved / "latest").read_bytes()
