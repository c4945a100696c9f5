"""The rows of a rank in a timeline, and what a box on them says when pointed at.

Compute is on top, messages beneath, then the links between memory tiers and the host. A copy has
the colour of what it moves, as in the charts of memory; the row it is on says which way. A file is
read and written on one link, but drawn on two rows. Several buckets are often in flight at once on
one lane: on one row they would hide one another, so each gets a track of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.report.tables import COPY_LANES
from paralab.theory.traffic import POINT_TO_POINT
from paralab.view import theme

ROW_NAME = {  # from the device outwards
    "h2d": "host to device",
    "d2h": "device to host",
    "host": "host's CPU",
    "disk": "disk",
    "disk read": "disk read",
    "disk write": "disk write",
}
LANES = (*COPY_LANES, "host")
WAY = {**ROW_NAME, "read": "read from disk", "write": "written to disk"}


def row(box: dict[str, Any]) -> str:
    """The row of a box: its lane's, or one of the disk's two."""
    op = box["copies"][0]["op"] if box["copies"] else ""
    return f"disk {op}" if box["lane"] == "disk" and op in ("read", "write") else box["lane"]


def order(row: str) -> tuple[int, str]:
    """Compute first, then messages, then tier after tier."""
    known = list(ROW_NAME)
    return (2 + known.index(row) if row in known else int(row != "compute")), row


def category(box: dict[str, Any]) -> str:
    """What a copy between tiers moves; "" of any other box."""
    return box["copies"][0]["category"] if box["copies"] else ""


def style(kind: str, row: str, category: str) -> tuple[str, str]:
    """Name and colour of boxes where a picture has copies between tiers."""
    if category:
        return f"copying {theme.text(category)}", theme.category_colour(category)
    named = {("copy", "compute"): "copy on the device", ("compute", "host"): "adding, rounding"}
    return named.get((kind, row), kind.replace("_", " ")), theme.colour(kind, row)


def tracks(intervals: Sequence[tuple[float, float]], *, at_most: int) -> list[int]:
    """The track of each interval, 0 first. Beyond ``at_most``, the one free soonest is shared."""
    free: list[float] = []
    chosen = [0] * len(intervals)
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        start, end = intervals[i]
        track = next((t for t, until in enumerate(free) if until <= start), len(free))
        if track == at_most:
            track = min(range(at_most), key=free.__getitem__)
        elif track == len(free):
            free.append(end)
        free[track] = max(free[track], end)
        chosen[i] = track
    return chosen


def hover(b: dict[str, Any]) -> str:
    """What a box says when pointed at: times in ms, bytes as they were counted."""
    name = b["kind"].replace("_", " ")
    if b["lane"] in LANES:
        name, _ = style(b["kind"], b["lane"], category(b))
    head = f"<b>{name}</b>"
    if b["microbatch"] >= 0:
        head += f", micro-batch {b['microbatch']}"
    if b["stage"] or b["chunk"]:
        head += f", stage {b['stage']}"
    where = f"{theme.text(b['label'])}, " if b["label"] else ""
    where += f"rank {b['rank']}, {ROW_NAME.get(row(b)) or theme.text(b['lane'])}"
    where += f", of step {b['step']}" * b["late"]
    start, end = b["start"] * 1e3, b["end"] * 1e3
    lines = [head, where, f"{end - start:.3f} ms, from {start:.3f} to {end:.3f} ms"]
    if b["kind"] not in ("wait", "comm") and b["lane"] not in COPY_LANES:
        whose = "CPU" if b["lane"] == "host" else "device"
        lines.append(f"cost {b['cost'] * 1e3:.3f} ms of {whose} time")
    lines += [b["why"]] if "why" in b else map(_call, b["calls"])
    return "<br>".join([*lines, *map(_copy, b["copies"])])


def _call(call: dict[str, Any]) -> str:
    phase, size = theme.text(call["phase"]), f"{call['payload_bytes']:,} bytes"
    if call["op"] in POINT_TO_POINT:
        way = "send to" if call["op"] == "send" else "receive from"
        return f"{way} rank {call['peer']} ({phase}): {size}"
    return f"{call['op']} ({phase}): {size} in the buffer, {call['wire_bytes']:,} sent"


def _copy(copy: dict[str, Any]) -> str:
    """What was moved which way, how much of it, and how fast."""
    what = {"optimizer": "optimizer states"}.get(copy["category"], copy["category"])
    way = WAY.get(copy["op"]) or WAY.get(copy["lane"], copy["lane"])
    said = f"{what}, {way}: {copy['bytes']:,} bytes"
    if copy["bytes"] and (seconds := copy["end"] - copy["start"]) > 0:
        said += f" at {theme.scaled(copy['bytes'] / seconds, 'B/s')}"
    return theme.text(said)
