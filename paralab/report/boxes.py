"""Checkpointed tensors as boxes: which rank's safetensors file holds which box of which tensor.

Tensor parallelism cuts a matrix into boxes. A shard of ZeRO may end in the middle of a row, so it
is not one box but three: the end of a row, whole rows, the beginning of a row
(`interpret.pieces.boxes`). The stored boxes of a tensor tile it. A reader that wants a box copies
its intersection with every stored box, so any plan can read what another plan wrote. Torch-free;
NumPy and safetensors are imported where they are used.
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


def intersection(offsets: Sizes, sizes: Sizes, box: Box) -> tuple[tuple[slice, ...], ...]:
    """The elements that ``box`` shares with the box of ``sizes`` at ``offsets``, as slices (of that
    box, of ``box``); () if they share none.
    """
    dimensions = list(zip(offsets, sizes, box.offsets, box.sizes, strict=True))
    spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in dimensions]
    if any(start >= stop for start, stop in spans):
        return ()
    return tuple(
        tuple(slice(start - o, stop - o) for (start, stop), o in zip(spans, origin, strict=True))
        for origin in (offsets, box.offsets)
    )


# ---- writing ------------------------------------------------------------------------------------
def assigned(held: Sequence[Iterable[tuple[str, Sizes, Sizes]]]) -> list[list[Box]]:
    """For each rank the boxes that it writes: every box once, and about equal bytes per rank.

    held  for each rank the (tensor, offsets, sizes) of every box that it holds. Of replicas one is
          written, by the rank that has the fewest elements to write so far
    """
    holders: dict[tuple[str, Sizes, Sizes], list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    load, to_write = [0] * len(held), [[] for _ in held]
    for box in sorted(holders, key=lambda box: (len(holders[box]), -math.prod(box[2]))):
        rank = min(holders[box], key=load.__getitem__)
        load[rank] += math.prod(box[2])
        where = ", ".join(f"{o}:{o + n}" for o, n in zip(*box[1:], strict=True))
        to_write[rank].append(Box(*box, file_of(rank), f"{box[0]}[{where}]"))
    return to_write


def file_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def index(shapes: Mapping[str, Sizes], boxes: Iterable[Box]) -> dict[str, dict[str, Any]]:
    """The entries of tensors in the JSON index, by name; `stored` reads one of them."""
    entries = {name: {"dtype": DTYPE, "shape": size, "boxes": []} for name, size in shapes.items()}
    for name, *fields in boxes:
        entries[name]["boxes"].append(dict(zip(Box._fields[1:], fields, strict=True)))
    return entries


def write(file: Path, boxes: Sequence[Box], values: Iterable[Any]) -> tuple[int, int]:
    """Write a safetensors file to the disk. Returns its (bytes, CRC-32).

    values  of each box, a NumPy array or a torch tensor on the host; taken one at a time
    """
    import numpy as np

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for box in boxes:
        begin, end = end, end + ITEM * math.prod(box.sizes)
        header[box.key] = {"dtype": DTYPE, "shape": box.sizes, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = (memoryview(np.ascontiguousarray(value, "<f4")).cast("B") for value in values)
    size = crc = 0
    with open(file, "xb") as opened:
        for part in chain([len(text).to_bytes(8, "little") + text], parts):
            opened.write(part)
            size, crc = size + len(part), zlib.crc32(part, crc)
        opened.flush()
        os.fsync(opened.fileno())
    return size, crc


# ---- reading ------------------------------------------------------------------------------------
def stored(name: str, entry: Any) -> Stored:
    """The tensor that an entry of the index describes. Raises ``ValueError`` if its boxes do not
    tile it.
    """
    try:
        shape = _sizes(entry, "shape")
        if typed(entry, "dtype", str) != DTYPE:
            raise ValueError(f"its dtype is {entry['dtype']!r}, not {DTYPE!r}")
        boxes = []
        for fields in typed(entry, "boxes", list):
            where = typed(fields, "file", str), typed(fields, "key", str)
            box = Box(name, _sizes(fields, "offsets"), _sizes(fields, "sizes"), *where)
            if any(o + n > end for o, n, end in zip(*box[1:3], shape, strict=True)):
                raise ValueError(f"a box of {box.sizes} at {box.offsets} is not inside {shape}")
            boxes.append(box)
        # Boxes in the order of their first rows, so a box can only overlap those before it that
        # reach beyond its own first row.
        near: list[Box] = []
        for box in sorted(boxes):
            near = [other for other in near if other.offsets[0] + other.sizes[0] > box.offsets[0]]
            if any(intersection(box.offsets, box.sizes, other) for other in near):
                raise ValueError(f"two boxes hold the element at {box.offsets}")
            near.append(box)
        elements, whole = sum(math.prod(box.sizes) for box in boxes), math.prod(shape)
        if elements != whole:
            raise ValueError(f"the checkpoint has only {elements} of its {whole} elements")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None
    return Stored(shape, boxes)


def check_file(file: Path, boxes: Iterable[Box]) -> None:
    """Raise ``ValueError`` if a file is not safetensors or does not hold these boxes."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            for box in boxes:
                part = opened.get_slice(box.key)
                actual = part.get_dtype(), tuple(part.get_shape())
                if actual != (right := (DTYPE, box.sizes)):
                    has, needs = (f"{dtype} of shape {sizes}" for dtype, sizes in (actual, right))
                    raise ValueError(f"{box.key!r} in it is {has}, not {needs}")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"safetensors cannot read it ({error})") from None


def _sizes(fields: Mapping[str, Any], name: str) -> Sizes:
    sizes = tuple(typed(fields, name, list))
    if not sizes or not all(type(n) is int and 0 <= n < 2**62 for n in sizes):
        raise ValueError(f"{name} is {sizes}, not whole numbers")
    return sizes
