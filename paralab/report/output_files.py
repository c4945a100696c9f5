"""Writing a file completely or not at all, and checking before the work that it can be written."""

from __future__ import annotations

import contextlib
import gzip
import os
import secrets
import tempfile
from pathlib import Path

from paralab import checks

LEGAL = "a file in an existing folder that you may write to"


def check(name: str, path: object) -> None:
    """Raise ``ValueError`` if no file can be written at ``path``."""
    place = _place(name, path).absolute()
    try:
        tempfile.TemporaryFile(dir=place.parent).close()
    except OSError as error:
        why = f"it cannot be written: {error.strerror}"
        raise checks.illegal(name, str(path), why, LEGAL) from None


def check_folder(name: str, path: object, legal: str) -> Path:
    """The folder at ``path``. Raises ``ValueError`` if it cannot be written to, or cannot be made.
    It is not made here, so what is refused afterwards leaves none.
    """
    folder, why = checks.path(name, path, legal).absolute(), "the folder cannot be created"
    try:
        nearest = _nearest(folder)
        if nearest == folder and folder.is_dir():
            why = "it cannot be written to"
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise checks.illegal(name, str(path), f"{why}: {error.strerror}", legal) from None
    return folder


def _nearest(place: Path) -> Path:
    """``place`` if something is there, else the nearest folder above it that exists."""
    try:
        place.lstat()
    except FileNotFoundError:
        return _nearest(place.parent)
    return place


def _place(name: str, path: object) -> Path:
    """``path`` as a Path. Raises ``ValueError`` if it is a folder."""
    place = checks.path(name, path, LEGAL)
    if place.is_dir():
        raise checks.illegal(name, str(path), "it is a folder, not a file", LEGAL)
    return place


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the file at ``path`` atomically: after a crash it is the old file or the new one. If
    its name ends in .gz, ``data`` is compressed.
    """
    place = _place("path", path)
    if place.name.endswith(".gz"):
        # Without a date, so that equal data give equal files.
        data = gzip.compress(data, 6, mtime=0)
    scratch = place.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(scratch, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(scratch, place)
    except BaseException as error:
        with contextlib.suppress(OSError):  # on a file system for reading only this fails, too
            scratch.unlink()
        if getattr(error, "errno", None) is None:
            raise
        # The same error with the file's name: the error of a full disk has none.
        raise OSError(error.errno, error.strerror, str(place)) from None
