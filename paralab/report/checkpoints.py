"""A folder of checkpoints: published whole or not at all, found and judged without torch.

    folder/latest                   the names of the last two checkpoints, newest first
    folder/step-00000004/           one checkpoint: the training's state after 4 steps
        paralab.json                what it is: model, plan, optimizer, seed, step ...; size and
                                    checksum of every other file; which file holds which box of
                                    which tensor (boxes.py)
        rank-0.safetensors ...      the tensors

[Note: atomic] A save writes into ``.saving-step-00000004``, where no reader looks. When all of it
has reached the disk (fsync of files and folder) one rename gives it its name, and one more replaces
``latest``, by which alone a checkpoint is found. So whenever the ranks are killed, ``latest`` names
a checkpoint that is whole: the one before, or the new one. Only then does the last but two go. What
a killed save has left behind, the next one sweeps away.

A folder belongs to one run at a time: its rank 0 holds a lock that ends with the process.

Nothing in a checkpoint is code: it is JSON and numbers, and all of it is checked before it is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from paralab import checks
from paralab.checks import choice, illegal, whole
from paralab.parallel.layouts import whole_shape
from paralab.report import boxes
from paralab.report.plain import plain, typed
from paralab.report.storage import seal
from paralab.spec import ModelSpec

FORMAT, VERSION = "paralab checkpoint", 2
ABOUT, LATEST, LOCK = "paralab.json", "latest", ".lock"
KEPT = 2
LOCK_SECONDS = 10.0  # for the ranks of a run whose caller was killed to be gone
_WHY = {
    "optimizer": "whose state {now!r} cannot go on with",
    "seed": "which draws the batches that come next; this run has {now!r}",
}
# What a resumed run may have other than before, if asked.
CHANGES = ("lr", "global_batch", "data", "clip_norm")
_NAME, _FILE = re.compile(r"step-\d{8}(\.\d+)?"), re.compile(r"rank-\d+\.safetensors")
_STATES = {"adamw": ("weight", "exp_avg", "exp_avg_sq"), "sgd": ("weight",)}
_KINDS = dict(plan=dict, optimizer=str, seed=int, lr=float, global_batch=int, data=str)
_SCRATCH, _REMOVED = ".saving-", ".removed-"
_LEGAL = 'a folder that pl.run(..., save="folder") wrote, or None for a run from the start'


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint says about itself.

    folder     where it lies
    model, plan, optimizer, lr, seed, global_batch  of the run that wrote it; ``plan`` as plain
               values
    data       of its text the length and a digest: `Corpus.identity`
    clip_norm  None also for one that was written before checkpoints said so
    step       optimizer steps that the training has done
    counters   numbers of the optimizer that every rank has the same: {name: value}
    files      {file name: (bytes, CRC-32)}
    tensors    {name: the boxes that tile it}
    """

    folder: Path
    model: ModelSpec
    plan: Mapping[str, Any]
    optimizer: str
    lr: float
    seed: int
    global_batch: int
    data: str
    clip_norm: float | None
    step: int
    counters: Mapping[str, float]
    files: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, boxes.Stored]

    def check(self, model: ModelSpec, changes: Sequence[str] = (), **settings: Any) -> None:
        """Raise ``ValueError`` if a run would not go on with this training.

        settings  of the run: optimizer, seed, and those of `CHANGES`
        changes   names of `CHANGES` that may differ
        """
        saved, asked = (plain(m.to_dict(), "model") for m in (self.model, model))
        # Which kernel computes attention is a matter of the device, as None for it says.
        other = [n for n in asked if n != "attention" and saved[n] != asked[n]]
        if other:
            was, now = (", ".join(f"{n}={m[n]!r}" for n in other) for m in (saved, asked))
            raise self._refuse(f"its model has {was}, this one {now}", f"a model with {was}")
        for name, now in settings.items():
            if name not in changes and getattr(self, name) != now:
                was = f"{name}={getattr(self, name)!r}"
                why = _WHY.get(name, "this run has {now!r}").format(now=now)
                legal = f"{was}, or resume_changes=({name!r},)" if name in CHANGES else was
                raise self._refuse(f"it was trained with {was}, {why}", legal)
        self.check_state(model, self.optimizer)

    def check_state(self, model: ModelSpec, optimizer: str) -> None:
        """Raise ``ValueError`` if this is not the state of such a training."""
        asked, there = shapes(model, optimizer), {n: t.shape for n, t in self.tensors.items()}
        for name in [*asked, *there]:
            if asked.get(name) != there.get(name):
                why = f"{name} has shape {there.get(name)} in it, not {asked.get(name)}"
                damaged(self.folder / ABOUT, why)
        if optimizer == "adamw" and "optimizer_steps" not in self.counters:
            damaged(self.folder / ABOUT, "optimizer_steps is not in it")

    def _refuse(self, why: str, legal: str) -> ValueError:
        return illegal("resume", str(self.folder), why, f"{legal}, or resume=None")


def shapes(model: ModelSpec, optimizer: str) -> dict[str, tuple[int, ...]]:
    """{tensor: shape} of all that a checkpoint of such a training holds."""
    names = model.parameter_shapes()
    return {f"{kind}/{n}": whole_shape(model, n) for kind in _STATES[optimizer] for n in names}


def check_changes(changes: object) -> tuple[str, ...]:
    """What may differ from the checkpoint, as ``pl.run(resume_changes=...)`` has it."""
    if isinstance(changes, str) or not isinstance(changes, Iterable):
        raise illegal("resume_changes", changes, "not a tuple of names", f"some of {CHANGES}")
    return tuple(choice("resume_changes", name, CHANGES) for name in changes)


# ---- reading ------------------------------------------------------------------------------------
def find(path: object) -> Checkpoint:
    """The checkpoint at ``path``: a folder of them (its latest), or one of them.

    Raises ``ValueError`` saying what is wrong: no folder, none in it, an index that does not hold
    together, a file that is missing, too short or too long, or has other tensors than the index
    says. What a file holds is compared with its checksum by the ranks that read it.
    """
    folder = checks.path("resume", path, _LEGAL).absolute()
    if not folder.is_dir():
        if not folder.exists() and _NAME.fullmatch(folder.name) and _listed(folder.parent):
            _gone(folder)
        why = "is a file" if folder.exists() else "there is no such folder"
        raise illegal("resume", str(path), why, _LEGAL)
    if not (folder / ABOUT).is_file():
        named, names = _named(folder), _listed(folder)
        if not names:
            there = sorted(_whole(folder))
            why = f"no file {LATEST!r} in it names a checkpoint"
            legal = ", ".join(str(folder / name) for name in there) or _LEGAL
            raise illegal("resume", str(path), why, legal)
        if names[0] != named[0]:
            why = f"{named[0]}, the newest checkpoint of {folder}, is no longer there"
            warnings.warn(f"{why}: {names[0]} is taken", stacklevel=2)
        folder /= names[0]
    checkpoint = _read(folder)
    for name, (size, _) in checkpoint.files.items():
        if not (folder / name).is_file():
            damaged(folder / name, "the file is missing")
        if (found := (folder / name).stat().st_size) != size:
            damaged(folder / name, f"the file has {found} bytes, {size} were written")
    file, there = attrgetter("file"), chain(*(t.boxes for t in checkpoint.tensors.values()))
    for name, some in groupby(sorted(there, key=file), file):
        if name not in checkpoint.files:
            damaged(folder / ABOUT, f"{name!r} is none of the checkpoint's files")
        try:
            boxes.check_file(folder / name, some)
        except ValueError as error:
            damaged(folder / name, str(error))
    return checkpoint


def _gone(checkpoint: Path) -> NoReturn:
    """Raise the refusal of a checkpoint that is not where it was, naming those that are."""
    why = "it is not there; newer ones may have taken its place while it was read"
    there = [str(checkpoint.with_name(name)) for name in _listed(checkpoint.parent)]
    raise illegal("resume", str(checkpoint), why, ", or ".join(there) or _LEGAL)


def damaged(file: Path, why: str) -> NoReturn:
    """Raise the refusal of a checkpoint because of one of its files."""
    if not file.parent.exists():
        _gone(file.parent)
    others = [name for name in _listed(file.parent.parent) if name != file.parent.name]
    legal = f"another copy of {file.parent}"
    if others:
        legal += f", or the other checkpoint there, {file.parent.with_name(others[-1])}"
    raise illegal("resume", str(file), f"{why}: the checkpoint is damaged", legal)


def facts(file: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file. They tell damage, not malice."""
    size = crc = 0
    with open(file, "rb") as opened:
        while part := opened.read(2**22):
            size, crc = size + len(part), zlib.crc32(part, crc)
    return size, crc


def _read(folder: Path) -> Checkpoint:
    file = folder / ABOUT
    try:
        said = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        damaged(file, f"it cannot be read ({error})")
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise illegal("resume", str(folder), f"{ABOUT} in it is not a checkpoint's", _LEGAL)
    version = said.get("version")
    if version != VERSION:
        why = f"its format version {version!r} is unknown, this paralab reads {VERSION}"
        legal = f"{_LEGAL}; update paralab if a newer one wrote it"
        raise illegal("resume", str(folder), why, legal)
    try:
        body = typed(said, "body", dict)
        if seal(body) != said.get("sha256"):
            raise ValueError("its own checksum does not fit")
        counters, files, tensors = (typed(body, n, dict) for n in ("counters", "files", "tensors"))
        return Checkpoint(
            folder=folder,
            model=ModelSpec.from_dict(typed(body, "model", dict)),
            step=whole("step", body.get("step"), at_least=0),
            counters={name: typed(counters, name, float) for name in counters},
            files={name: _facts(files, name) for name in files},
            tensors={name: boxes.stored(name, said) for name, said in tensors.items()},
            clip_norm=typed(body, "clip_norm", float) if body.get("clip_norm") else None,
            **{name: typed(body, name, kind) for name, kind in _KINDS.items()},
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        damaged(file, str(error))


def _facts(files: Mapping[str, Any], name: str) -> tuple[int, int]:
    found = typed(files, name, list)
    if not _FILE.fullmatch(name) or [type(n) for n in found] != [int, int]:
        raise ValueError(f"{name!r}: {found} is not a file of tensors with its bytes and CRC-32")
    return found[0], found[1]


def _named(folder: Path) -> list[str]:
    """The names in ``latest``, newest first."""
    try:
        names = (folder / LATEST).read_text().split()
    except (OSError, UnicodeDecodeError):
        return []
    return [name for name in names if _NAME.fullmatch(name)]


def _listed(folder: Path) -> list[str]:
    """Of these, the checkpoints that are there."""
    return [name for name in _named(folder) if (folder / name / ABOUT).is_file()]


def _whole(folder: Path) -> list[str]:
    """The checkpoints in a folder, whether ``latest`` names them or not; the newest first."""
    named = _listed(folder)
    there = {found.parent.name for found in folder.glob(f"step-*/{ABOUT}")}
    return [*named, *sorted(filter(_NAME.fullmatch, there - set(named)), reverse=True)]


# ---- writing ------------------------------------------------------------------------------------
def check_save(folder: Path, resume: str | None) -> None:
    """Raise ``ValueError`` where a save would take the place of another training's checkpoints, or
    could not be read again. resume: the checkpoint that the run goes on from
    """
    try:
        os.fsencode(folder).decode()
    except UnicodeDecodeError:
        why, legal = "its name is not UTF-8, and files of tensors need that", "another folder"
        raise illegal("save", str(folder), why, legal) from None
    if (folder / ABOUT).is_file():
        legal = f"the folder around it, {folder.parent}, or another one"
        raise illegal("save", str(folder), "it is one checkpoint itself", legal)
    there = _whole(folder)
    if there and (resume is None or Path(resume).parent.resolve() != folder.resolve()):
        why = f"a training has saved {there[0]} there, and this run does not go on with it"
        raise illegal("save", str(folder), why, f"resume={str(folder)!r} too, or another folder")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder is this process's for as long as the block runs."""
    with open(folder / LOCK, "a") as file:
        give_up = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    why, legal = "another run saves there", "another folder, or wait for its end"
                    raise illegal("save", str(folder), why, legal) from None
                time.sleep(0.05)
            except OSError as error:
                why = f"cannot be locked: {error.strerror}"
                legal = "a folder on a file system that has flock"
                raise illegal("save", str(folder), why, legal) from None
        yield


def scratch(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is written before it is published."""
    return folder / f"{_SCRATCH}{_name(step)}"


def sweep(folder: Path) -> None:
    """Remove what no reader can want: leftovers of a killed save, and all but the last two.

    A folder whose ``latest`` is gone keeps all its checkpoints.
    """
    kept = _listed(folder)
    for found in list(folder.iterdir()):
        if kept and _NAME.fullmatch(found.name) and found.name not in kept:
            gone = found.with_name(f"{_REMOVED}{found.name}")
            shutil.rmtree(gone, ignore_errors=True)
            found = found.rename(gone)  # half a checkpoint never has a checkpoint's name
        if found.name.startswith((_SCRATCH, _REMOVED)):
            if found.is_file():
                found.unlink(missing_ok=True)
            else:
                shutil.rmtree(found, ignore_errors=True)


def publish(written: Path, about: Mapping[str, Any], *, step: int) -> Path:
    """Make what lies in ``written`` the folder's latest checkpoint. See [Note: atomic]."""
    folder, before = written.parent, _listed(written.parent)
    body = plain(about, "checkpoint")
    said = {"format": FORMAT, "version": VERSION, "sha256": seal(body), "body": body}
    _write(written / ABOUT, json.dumps(said))
    _sync(written)
    name, again = _name(step), 0
    while (folder / name).exists():  # the same step once more: a run that began before it
        again += 1
        name = f"{_name(step)}.{again}"
    os.rename(written, folder / name)
    _sync(folder)
    fresh = folder / f"{_SCRATCH}{LATEST}"
    _write(fresh, "\n".join([name, *before][:KEPT]) + "\n")
    os.replace(fresh, folder / LATEST)
    _sync(folder)
    sweep(folder)
    return folder / name


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _write(file: Path, text: str) -> None:
    with open(file, "w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def _sync(folder: Path) -> None:
    """The folder's own entries reach the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
