"""A folder of checkpoints: each is published whole or not at all, and can be checked without torch.

    folder/latest                   the names of the last two checkpoints, newest first
    folder/step-00000004/           one checkpoint: the training's state after 4 steps
        paralab.json                the index: model, plan, optimizer, seed, step ...; size and
                                    checksum of every other file; which file holds which box of
                                    which tensor (boxes.py)
        rank-0.safetensors ...      the tensors

[Note: atomic] A save writes into ``.saving-step-00000004``, where no reader looks. When all files
have reached the disk (fsync of files and folder), one rename gives the folder its name, and another
replaces ``latest``, the only file by which readers find a checkpoint. So whenever the ranks are
killed, ``latest`` names a complete checkpoint: the previous one or the new one. Only then are all
but the last two checkpoints removed. The next save removes what a killed save has left behind.

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
import stat
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

from paralab import checks
from paralab.checks import choice, illegal, reason, whole
from paralab.parallel.layouts import whole_shape
from paralab.report import boxes
from paralab.report.plain import plain, typed
from paralab.report.storage import seal
from paralab.spec import ModelSpec

FORMAT, VERSION = "paralab checkpoint", 2
ABOUT, LATEST, LOCK = "paralab.json", "latest", ".lock"
KEPT = 2
LAST_STEP = 10**8 - 1  # of eight digits, as in the name of a checkpoint's folder
LOCK_SECONDS = 10.0  # within which the ranks of a run whose caller was killed have ended
# The settings that a resumed run may change, if ``resume_changes`` names them.
CHANGES = ("lr", "global_batch", "data", "clip_norm")
_NAME, _FILE = re.compile(r"step-\d{8}(\.\d+)?"), re.compile(r"rank-\d+\.safetensors")
_STATES = {"adamw": ("weight", "exp_avg", "exp_avg_sq"), "sgd": ("weight",)}
_KINDS: dict[str, Any] = dict(plan=dict, optimizer=str, seed=int, lr=float, global_batch=int)
_KINDS |= dict(data=str, clip_norm=(float, NoneType))
SCRATCH, _REMOVED = ".saving-", ".removed-"
_LEGAL = "a folder into which a run saved checkpoints, or None for a run from the start"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint says about itself and about the run that wrote it."""

    folder: Path  # its own
    model: ModelSpec
    plan: Mapping[str, Any]  # as plain values
    optimizer: str
    lr: float
    seed: int
    global_batch: int
    data: str  # length and digest of the training text: `Corpus.identity`
    clip_norm: float | None
    step: int  # optimizer steps that the training has done
    counters: Mapping[str, float]  # numbers of the optimizer that are equal on all ranks
    files: Mapping[str, tuple[int, int]]  # {file name: (bytes, CRC-32)}
    tensors: Mapping[str, boxes.Stored]  # {name: the boxes that tile it}

    def check(self, model: ModelSpec, changes: Sequence[str] = (), **settings: Any) -> None:
        """Raise ``ValueError`` if a run with this model and settings would not continue this
        training.

        settings  the run's optimizer, seed, and those of `CHANGES`
        changes   names of `CHANGES` that may differ
        """
        saved, wanted = (plain(m.to_dict(), "model") for m in (self.model, model))
        # The kernel that computes attention may differ: by default the device decides it.
        differing = [n for n in wanted if n != "attention" and saved[n] != wanted[n]]
        if differing:
            was, now = (", ".join(f"{n}={m[n]!r}" for n in differing) for m in (saved, wanted))
            raise self._refuse(f"its model has {was}, this model has {now}", f"a model with {was}")
        for name, now in settings.items():
            if name not in changes and getattr(self, name) != now:
                was = f"{name}={getattr(self, name)!r}"
                why = f"it was trained with {was}, this run has {name}={now!r}"
                legal = f"{was}, or resume_changes=({name!r},)" if name in CHANGES else was
                raise self._refuse(why, legal)
        self.check_state(model, self.optimizer)

    def check_state(self, model: ModelSpec, optimizer: str) -> None:
        """Raise ``ValueError`` if the tensors and counters are not those of such a training."""
        expected, stored = shapes(model, optimizer), {n: t.shape for n, t in self.tensors.items()}
        for name in [*expected, *stored]:
            if expected.get(name) != stored.get(name):
                here, right = (shapes.get(name, "missing") for shapes in (stored, expected))
                why = f"the shape of {name} is {here} in it, and {right} in this training"
                damaged(self.folder / ABOUT, why)
        if optimizer == "adamw" and "optimizer_steps" not in self.counters:
            damaged(self.folder / ABOUT, "the counter optimizer_steps is missing in it")

    def _refuse(self, why: str, legal: str) -> ValueError:
        return illegal("resume", str(self.folder), why, f"{legal}, or resume=None")


def shapes(model: ModelSpec, optimizer: str) -> dict[str, tuple[int, ...]]:
    """{tensor: shape} of all tensors in a checkpoint of such a training."""
    names = model.parameter_shapes()
    return {f"{kind}/{n}": whole_shape(model, n) for kind in _STATES[optimizer] for n in names}


def check_changes(changes: object) -> tuple[str, ...]:
    """The names in ``pl.run(resume_changes=...)``; raises ``ValueError`` if one is not legal."""
    if isinstance(changes, str) or not isinstance(changes, Iterable):
        raise illegal("resume_changes", changes, "not a tuple of names", f"some of {CHANGES}")
    return tuple(choice("resume_changes", name, CHANGES) for name in changes)


# ---- reading ------------------------------------------------------------------------------------
def find(path: object) -> Checkpoint:
    """The checkpoint at ``path``, which is one checkpoint, or a folder of which it is the latest.

    Raises ``ValueError`` saying what is wrong: there is no folder, or no checkpoint in it; the
    index is inconsistent; a file is missing, has another size, or holds other tensors than the
    index says. The ranks that read a file compare its contents with its checksum.
    """
    folder = checks.path("resume", path, _LEGAL).absolute()
    if not folder.is_dir():
        why = "it is a file" if folder.exists() else "there is no such folder"
        raise illegal("resume", str(path), why, _LEGAL)
    if not (folder / ABOUT).is_file():
        named, names = _named(folder), _listed(folder)
        if not names:
            complete = sorted(_all_complete(folder))
            why = f"it has no file {LATEST!r} that names a checkpoint"
            legal = ", ".join(str(folder / name) for name in complete) or _LEGAL
            raise illegal("resume", str(path), why, legal)
        if names[0] != named[0]:
            why = f"{named[0]}, the newest checkpoint of {folder}, is no longer there"
            warnings.warn(f"{why}: the run resumes from {names[0]}", stacklevel=2)
        folder /= names[0]
    checkpoint = _read(folder)
    for name, (size, _) in checkpoint.files.items():
        try:
            found = (folder / name).stat()
        except FileNotFoundError:
            damaged(folder / name, "the file is missing")
        if not stat.S_ISREG(found.st_mode):  # reading a FIFO may block for ever
            damaged(folder / name, "it is no file")
        if found.st_size != size:
            damaged(folder / name, f"the file has {found.st_size} bytes, but {size} were written")
    file, stored = attrgetter("file"), chain(*(t.boxes for t in checkpoint.tensors.values()))
    for name, file_boxes in groupby(sorted(stored, key=file), file):
        if name not in checkpoint.files:
            damaged(folder / ABOUT, f"{name!r} is none of the checkpoint's files")
        try:
            boxes.check_file(folder / name, file_boxes)
        except ValueError as error:
            damaged(folder / name, str(error))
    return checkpoint


def damaged(file: Path, why: str) -> NoReturn:
    """Raise the ``ValueError`` of a checkpoint of which this file is damaged."""
    others = [name for name in _listed(file.parent.parent) if name != file.parent.name]
    legal = f"another copy of {file.parent}"
    if others:
        legal += f", or the other checkpoint in the folder, {file.parent.with_name(others[-1])}"
    why = f"{reason(why)}: the checkpoint is damaged"  # only a whole copy helps
    raise illegal("resume", str(file), why, legal)


def facts(file: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file. They detect damage, not manipulation."""
    size = crc = 0
    with open(file, "rb") as opened:
        while part := opened.read(2**22):
            size, crc = size + len(part), zlib.crc32(part, crc)
    return size, crc


def _read(folder: Path) -> Checkpoint:
    file = folder / ABOUT
    try:
        index = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        damaged(file, f"it cannot be read ({error})")
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        why = f"its {ABOUT} is not the index of a checkpoint"
        raise illegal("resume", str(folder), why, _LEGAL)
    version = index.get("version")
    if version != VERSION:
        why = f"its format version is {version!r}, and this paralab reads version {VERSION} only"
        legal = f"{_LEGAL}; update paralab if a newer version of it wrote the checkpoint"
        raise illegal("resume", str(folder), why, legal)
    try:
        body = typed(index, "body", dict)
        if seal(body) != index.get("sha256"):
            raise ValueError("its content does not match its own checksum")
        counters, files, tensors = (typed(body, n, dict) for n in ("counters", "files", "tensors"))
        return Checkpoint(
            folder=folder,
            model=ModelSpec.from_dict(typed(body, "model", dict)),
            step=whole("step", body.get("step"), at_least=0, at_most=LAST_STEP),
            counters={name: _count(counters, name) for name in counters},
            files={name: _facts(files, name) for name in files},
            tensors={name: boxes.stored(name, entry) for name, entry in tensors.items()},
            **{name: typed(body, name, kind) for name, kind in _KINDS.items()},
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        damaged(file, str(error))


def _count(counters: Mapping[str, Any], name: str) -> float:
    """A counter: steps, or the loss scale, a power of two by which gradients are divided."""
    count, least = typed(counters, name, float), int(name == "loss_scale.value")
    if not (count.is_integer() and least <= count <= LAST_STEP):
        raise ValueError(f"{name} is {count!r}, not a whole number from {least} to {LAST_STEP}")
    return count


def _facts(files: Mapping[str, Any], name: str) -> tuple[int, int]:
    pair = typed(files, name, list)
    if not _FILE.fullmatch(name) or [type(n) for n in pair] != [int, int]:
        raise ValueError(f"{name!r}: {pair} is not a file of tensors with its bytes and CRC-32")
    return pair[0], pair[1]


def _named(folder: Path) -> list[str]:
    """The names in ``latest``, newest first."""
    latest = folder / LATEST
    try:
        names = latest.read_text().split() if latest.is_file() else []  # a FIFO may block
    except (OSError, UnicodeDecodeError):
        return []
    return [name for name in names if _NAME.fullmatch(name)]


def _listed(folder: Path) -> list[str]:
    """The checkpoints that ``latest`` names and that exist, newest first."""
    return [name for name in _named(folder) if (folder / name / ABOUT).is_file()]


def _all_complete(folder: Path) -> list[str]:
    """All checkpoints in a folder: those of ``latest``, then the others; each newest first."""
    listed = _listed(folder)
    present = {index.parent.name for index in folder.glob(f"step-*/{ABOUT}")}
    return [*listed, *sorted(filter(_NAME.fullmatch, present - set(listed)), reverse=True)]


# ---- writing ------------------------------------------------------------------------------------
def check_save(folder: Path, resume: str | None, *, newest: bool = False) -> None:
    """Raise ``ValueError`` if saving here would replace another training's checkpoints.

    resume  the checkpoint from which the run continues
    newest  the caller named no checkpoint, so it must still be the newest one of its folder
    """
    if (folder / ABOUT).is_file():
        legal = f"the folder that contains it, {folder.parent}, or another one"
        raise illegal("save", str(folder), "it is a single checkpoint", legal)
    present = _all_complete(folder)
    if present and (resume is None or Path(resume).parent.resolve() != folder.resolve()):
        why = f"it has {present[0]} of another training, which this run does not resume"
        raise illegal("save", str(folder), why, f"resume={str(folder)!r} too, or another folder")
    if newest and present and present[0] != (name := Path(resume or "").name):
        why = f"another run has saved {present[0]} there since this one began to resume {name}"
        raise illegal("save", str(folder), why, "the same call again, or another folder")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Callable[[], bool]]:
    """Make the folder if need be, and hold its lock for as long as the block runs, so that no other
    run saves there.

    Yields a function that returns whether the lock still protects the folder: once the folder has
    been removed and created again, another run can lock the new one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a") as file:
        give_up = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    why, legal = "another run saves into it", "another folder, or this one later"
                    raise illegal("save", str(folder), why, legal) from None
                time.sleep(0.05)
            except OSError as error:
                why = f"it cannot be locked: {error.strerror}"
                legal = "a folder on a file system that supports flock"
                raise illegal("save", str(folder), why, legal) from None
        yield lambda: (folder / LOCK).exists() and os.path.samefile(folder / LOCK, file.fileno())


def scratch(folder: Path, step: int) -> Path:
    """The folder into which the checkpoint of ``step`` is written before it is published."""
    return folder / f"{SCRATCH}{_name(step)}"


def sweep(folder: Path) -> None:
    """Remove leftovers of a killed save, and all checkpoints that ``latest`` does not name.

    A folder without ``latest`` keeps all its checkpoints.
    """
    kept = _listed(folder)
    for entry in list(folder.iterdir()):
        if kept and _NAME.fullmatch(entry.name) and entry.name not in kept:
            removed = entry.with_name(f"{_REMOVED}{entry.name}")
            shutil.rmtree(removed, ignore_errors=True)
            entry = entry.rename(removed)  # so that half a checkpoint never has a checkpoint's name
        if entry.name.startswith((SCRATCH, _REMOVED)):
            if entry.is_file():
                entry.unlink(missing_ok=True)
            else:
                shutil.rmtree(entry, ignore_errors=True)


def publish(written: Path, about: Mapping[str, Any], *, step: int) -> Path:
    """Make the files in ``written`` the latest checkpoint of its folder. See [Note: atomic].

    about  the fields of `Checkpoint`, for the index
    """
    folder, earlier = written.parent, _listed(written.parent)
    body = plain(about, "checkpoint")
    index = {"format": FORMAT, "version": VERSION, "sha256": seal(body), "body": body}
    _write(written / ABOUT, json.dumps(index))
    _sync(written)
    name, copies = _name(step), 0
    while (folder / name).exists():  # a run resumed from an earlier step reaches this step again
        copies += 1
        name = f"{_name(step)}.{copies}"
    os.rename(written, folder / name)
    _sync(folder)
    new_latest = folder / f"{SCRATCH}{LATEST}"
    _write(new_latest, "\n".join([name, *earlier][:KEPT]) + "\n")
    os.replace(new_latest, folder / LATEST)
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
    """Flush the folder's entries to the disk: its files' names, not their contents."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
