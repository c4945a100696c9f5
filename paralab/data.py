"""Real text without a download, and the same batches for every plan.

The text is read as bytes, so the vocabulary is 256 and there is no tokenizer to fetch. By default
it is the source code of torch's layers, 0.9 MB of well-formed English and code: it is there
wherever ranks train, and is the same for a version of torch whatever the version of Python, so that
losses are the same too. Any text file or folder will do instead.

[Note: same batches] Sample number g of a run (step * global batch + position in the batch) starts
at a place in the text that depends on the seed and g alone. So any rank can read any sample by
itself, and the number of data-parallel ranks does not change a global batch. With micro-batches of
b samples, micro-batch k of a step holds positions k*b ... (k+1)*b - 1, and data-parallel rank d
takes micro-batches d*m ... (d+1)*m - 1. So one process that runs the dp*m micro-batches in order
sees what all ranks see together.
"""

from __future__ import annotations

import bisect
import hashlib
import importlib.util
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from paralab import checks
from paralab.checks import illegal

_MASK = 2**64 - 1
TEXTS = "a text file, or a folder with text files"
READ_BYTES = 2**22  # the most of the text that `identity` has in memory at a time


def _scramble(x: int) -> int:
    """SplitMix64's finalizer (Steele+ 2014): well-mixed 64-bit numbers, on any machine."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


class Corpus:
    """The text: the bytes of all its files one after the other, read from disk when needed.

    path  None for the source of torch's layers, or a text file, or a folder (all its text files, in
          the order of their names, without hidden ones)

    Raises ValueError if the path does not exist or has no text in it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.root = _layers() if path is None else _checked(path)
        if self.root.is_file():
            self.files = [self.root]
        elif path is None:
            self.files = sorted(self.root.glob("*.py"))
        else:
            self.files = [f for f in _walk(self.root) if _looks_like_text(f)]
        self.sizes = [f.stat().st_size for f in self.files]
        self.starts = [0, *accumulate(self.sizes)]
        if not self.num_bytes:
            raise illegal("data", str(self.root), "no text in it", TEXTS)

    @property
    def num_bytes(self) -> int:
        return self.starts[-1]

    @property
    def fingerprint(self) -> str:
        """A hash of the files' names and sizes, equal on all ranks that read the same text."""
        facts = [(f.name, size) for f, size in zip(self.files, self.sizes, strict=True)]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    @cached_property
    def identity(self) -> str:
        """Length and digest of the text, wherever its files are. Reads all of it."""
        digest = hashlib.sha256()
        for start in range(0, self.num_bytes, READ_BYTES):
            digest.update(self.read(start, min(READ_BYTES, self.num_bytes - start)))
        return f"{self.num_bytes} bytes, sha256 {digest.hexdigest()}"

    def read(self, start: int, count: int) -> bytes:
        """``count`` bytes from position ``start`` of the whole text."""
        parts, index = [], bisect.bisect_right(self.starts, start) - 1
        while count > 0:
            wanted = min(count, self.starts[index + 1] - start)
            with open(self.files[index], "rb") as file:
                file.seek(start - self.starts[index])
                part = file.read(wanted)
            if len(part) < wanted:
                raise ValueError(
                    f"{self.files[index]} became shorter while it was being read; "
                    "train on a copy that nothing else changes"
                )
            parts.append(part)
            start, count, index = start + wanted, count - wanted, index + 1
        return b"".join(parts)

    def sample(self, number: int, *, length: int, seed: int) -> bytes:
        """Sample ``number`` of a run: ``length`` + 1 bytes; all but the first are targets."""
        if self.num_bytes < length + 1:
            why = f"its {self.num_bytes} bytes are fewer than one sample"
            raise illegal("data", str(self.root), why, f"at least seq_len + 1 = {length + 1} bytes")
        places = self.num_bytes - length
        start = _scramble((_scramble(seed & _MASK) + number * 0x9E3779B97F4A7C15) & _MASK) % places
        return self.read(start, length + 1)

    def microbatch(
        self, *, step: int, index: int, size: int, global_batch: int, length: int, seed: int
    ) -> bytes:
        """Micro-batch ``index`` of ``step``'s global batch: size * (length + 1) bytes."""
        first = step * global_batch + index * size
        return b"".join(self.sample(first + i, length=length, seed=seed) for i in range(size))


def _layers() -> Path:
    """The folder of torch.nn.modules; torch is not imported."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        why = "the default is the source of torch's layers, and torch is not installed here"
        raise illegal("data", None, why, TEXTS)
    return Path(found.origin).parent / "nn" / "modules"


def _checked(path: str | os.PathLike[str]) -> Path:
    legal = "None for the source of torch's layers, or the path of a text file or folder"
    place = checks.path("data", path, legal).absolute()
    if not place.exists():
        raise illegal("data", str(path), "does not exist", legal)
    if place.is_file() and not os.access(place, os.R_OK):
        raise illegal("data", str(path), "may not be read by you", legal)
    if place.is_file() and not _looks_like_text(place):
        why = "not text: it has zero bytes, or is UTF-16"
        raise illegal("data", str(path), why, f"{legal}; UTF-8 is best")
    return place


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(names):
            file = Path(place, name)
            if not name.startswith(".") and file.is_file() and os.access(file, os.R_OK):
                yield file


def _looks_like_text(file: Path) -> bool:
    with open(file, "rb") as opened:
        begins = opened.read(1024)
    return b"\0" not in begins and not begins.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
