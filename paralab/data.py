"""Real text without a download, and the same batches for every plan.

The text is read as bytes, so the vocabulary has 256 entries and no tokenizer is needed. By default
it is the source code of torch's layers, 0.9 MB of well-formed English and code. Torch is installed
wherever ranks train, and one version of it has the same source for every version of Python, so the
losses are the same too. Any text file or folder of the user's own works as well.

[Note: same batches] Sample number g of a run (step * global batch + position in the batch) starts
at an offset of the text that depends on the seed and g alone. Therefore every rank can read any
sample without communication, and the number of ranks does not change what a batch contains. With b
samples per micro-batch and m micro-batches per rank, micro-batch k of a step holds positions k*b to
(k+1)*b - 1, and data-parallel rank d computes micro-batches d*m to (d+1)*m - 1. So one process that
runs the dp*m micro-batches in order sees the same samples as all ranks together.
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
PART = 2**22  # bytes of the text in memory at a time


def _scramble(x: int) -> int:
    """SplitMix64's finalizer (Steele+ 2014): a well-mixed 64-bit number, equal on all machines."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


class Corpus:
    """A text as one sequence of bytes over its files, which are read on demand.

    path  a text file; or a folder, for all its text files in the order of their names, without
          hidden ones; or None, for the source of torch's layers

    Raises ValueError where the path does not exist or holds no text.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.root = _torch_layers() if path is None else _checked(path)
        if self.root.is_file():
            self.files = [self.root]
        elif path is None:
            self.files = sorted(self.root.glob("*.py"))
        else:
            self.files = [f for f in _walk(self.root) if _looks_like_text(f)]
        self.sizes = [f.stat().st_size for f in self.files]
        self.starts = [0, *accumulate(self.sizes)]
        self.num_bytes = self.starts[-1]
        if not self.num_bytes:
            raise illegal("data", str(self.root), "it contains no text", TEXTS)

    @cached_property
    def identity(self) -> str:
        """A hash of the whole text, independent of where its files are; reads all of them."""
        digest = hashlib.sha256()
        for start in range(0, self.num_bytes, PART):
            digest.update(self.read(start, min(PART, self.num_bytes - start)))
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
                    "train on a copy that no other program changes"
                )
            parts.append(part)
            start, count, index = start + wanted, count - wanted, index + 1
        return b"".join(parts)

    def sample(self, number: int, *, length: int, seed: int) -> bytes:
        """Sample ``number`` of a run: ``length`` + 1 bytes, of which the last ``length`` are the
        targets. See [Note: same batches].
        """
        if self.num_bytes < length + 1:
            why = f"its {self.num_bytes} bytes are fewer than one sample needs"
            raise illegal("data", str(self.root), why, f"at least seq_len + 1 = {length + 1} bytes")
        starts = self.num_bytes - length
        start = _scramble((_scramble(seed & _MASK) + number * 0x9E3779B97F4A7C15) & _MASK) % starts
        return self.read(start, length + 1)

    def microbatch(
        self, *, step: int, index: int, size: int, global_batch: int, length: int, seed: int
    ) -> bytes:
        """Micro-batch ``index`` of ``step``'s global batch: size * (length + 1) bytes."""
        first = step * global_batch + index * size
        return b"".join(self.sample(first + i, length=length, seed=seed) for i in range(size))


def _torch_layers() -> Path:
    """The folder of torch.nn.modules, found without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        why = "the default is the source code of torch's layers, and torch is not installed here"
        raise illegal("data", None, why, TEXTS)
    return Path(spec.origin).parent / "nn" / "modules"


def _checked(path: str | os.PathLike[str]) -> Path:
    legal = "None for the source code of torch's layers, or the path of a text file or folder"
    absolute = checks.path("data", path, legal).absolute()
    if not absolute.exists():
        raise illegal("data", str(path), "there is no such file or folder", legal)
    if absolute.is_file() and not os.access(absolute, os.R_OK):
        raise illegal("data", str(path), "you have no permission to read it", legal)
    if absolute.is_file() and not _looks_like_text(absolute):
        why = "it is not text: it contains zero bytes, or is UTF-16"
        raise illegal("data", str(path), why, f"{legal}, best in UTF-8")
    return absolute


def _walk(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(f for f in subfolders if not f.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file() and os.access(file, os.R_OK):
                yield file


def _looks_like_text(file: Path) -> bool:
    with open(file, "rb") as opened:
        beginning = opened.read(1024)
    return b"\0" not in beginning and not beginning.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
