"""Tensors cut into boxes: which rank's safetensors file holds which box of which tensor.

Tensor parallelism cuts a matrix into boxes. The shards of ZeRO end in the middle of a row, which is
no box, but three: the end of a row, whole rows, the beginning of a row (`interpret.pieces.boxes`).
The stored boxes of a tensor tile it, and a reader takes from each of them what it has in common
with the box that it wants: so what one plan wrote, every other plan reads. Torch-free; NumPy and
safetensors are imported where they are used.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from paralab.report.plain import typed

DTYPE, ITEM = "F32", 4
Sizes = tuple[int, ...]


class Box(NamedTuple):
    """A box of a tensor, and where it is stored: in which file, under which key."""

    tensor: str
    offsets: Sizes
    sizes: Sizes
    file: str
    key: str


class Stored(NamedTuple):
    """A whole tensor as the boxes that tile it."""

    shape: Sizes
    boxes: Sequence[Box]


def common(offsets: Sizes, sizes: Sizes, box: Box) -> tuple[tuple[slice, ...], ...]:
    """(where in the box at ``offsets``, where in ``box``) are the elements of both; () if none."""
    corners = list(zip(offsets, sizes, box.offsets, box.sizes, strict=True))
    spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in corners]
    if any(start >= stop for start, stop in spans):
        return ()
    return tuple(
        tuple(slice(start - o, stop - o) for (start, stop), o in zip(spans, corner, strict=True))
        for corner in (offsets, box.offsets)
    )


# ---- writing ------------------------------------------------------------------------------------
def shared_out(held: Sequence[Iterable[tuple[str, Sizes, Sizes]]]) -> list[list[Box]]:
    """For each rank the boxes that it writes: every box once, and about equal bytes per rank.

    held  for each rank (tensor, offsets, sizes) of what it holds; of replicas one is written, by
          the rank that has the fewest elements to write so far
    """
    holders: dict[tuple[str, Sizes, Sizes], list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    load, found = [0] * len(held), [[] for _ in held]
    for box in sorted(holders, key=lambda box: (len(holders[box]), -math.prod(box[2]))):
        rank = min(holders[box], key=load.__getitem__)
        load[rank] += math.prod(box[2])
        where = ", ".join(f"{o}:{o + n}" for o, n in zip(*box[1:], strict=True))
        found[rank].append(Box(*box, file_of(rank), f"{box[0]}[{where}]"))
    return found


def file_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def index(shapes: Mapping[str, Sizes], boxes: Iterable[Box]) -> dict[str, dict[str, Any]]:
    """What the JSON index says of tensors of these shapes; `stored` reads each of them."""
    found = {name: {"dtype": DTYPE, "shape": size, "boxes": []} for name, size in shapes.items()}
    for name, *where in boxes:
        found[name]["boxes"].append(dict(zip(Box._fields[1:], where, strict=True)))
    return found


def write(file: Path, boxes: Sequence[Box], values: Iterable[Any]) -> tuple[int, int]:
    """Write a safetensors file to the disk. Returns its (bytes, CRC-32).

    values  of every box, as NumPy or torch on the host has them; taken one at a time
    """
    import numpy as np

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for box in boxes:
        begin, end = end, end + ITEM * math.prod(box.sizes)
        header[box.key] = {"dtype": DTYPE, "shape": box.sizes, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = (memoryview(np.ascontiguousarray(one, "<f4")).cast("B") for one in values)
    size = crc = 0
    with open(file, "xb") as opened:
        for part in chain([len(text).to_bytes(8, "little") + text], parts):
            opened.write(part)
            size, crc = size + len(part), zlib.crc32(part, crc)
        opened.flush()
        os.fsync(opened.fileno())
    return size, crc


# ---- reading ------------------------------------------------------------------------------------
def stored(name: str, said: Any) -> Stored:
    """A tensor of the index. Raises ``ValueError`` if its boxes do not tile it."""
    try:
        shape = _sizes(said, "shape")
        if typed(said, "dtype", str) != DTYPE:
            raise ValueError(f"its dtype is {said['dtype']!r}, not {DTYPE!r}")
        found = []
        for one in typed(said, "boxes", list):
            where = typed(one, "file", str), typed(one, "key", str)
            box = Box(name, _sizes(one, "offsets"), _sizes(one, "sizes"), *where)
            if any(o + n > end for o, n, end in zip(*box[1:3], shape, strict=True)):
                raise ValueError(f"a box of {box.sizes} at {box.offsets} is not inside {shape}")
            found.append(box)
        near: list[Box] = []  # boxes that reach as far as the next one along the first dimension
        for box in sorted(found):
            near = [other for other in near if other.offsets[0] + other.sizes[0] > box.offsets[0]]
            if any(common(box.offsets, box.sizes, other) for other in near):
                raise ValueError(f"two boxes hold the element at {box.offsets}")
            near.append(box)
        there, whole = sum(math.prod(box.sizes) for box in found), math.prod(shape)
        if there != whole:
            raise ValueError(f"the checkpoint has {there} of {whole} elements")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None
    return Stored(shape, found)


def check_file(file: Path, boxes: Iterable[Box]) -> None:
    """Raise ``ValueError`` if a file is not safetensors or does not hold these boxes."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            for box in boxes:
                part = opened.get_slice(box.key)
                found = part.get_dtype(), tuple(part.get_shape())
                if found != (DTYPE, box.sizes):
                    raise ValueError(f"{box.key!r} in it is {found}, not {(DTYPE, box.sizes)}")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"safetensors cannot read it ({error})") from None


def _sizes(said: Mapping[str, Any], name: str) -> Sizes:
    found = tuple(typed(said, name, list))
    if not found or not all(type(n) is int and 0 <= n < 2**62 for n in found):
        raise ValueError(f"{name} is {found}, not whole numbers")
    return found
