"""The rows of a rank in a timeline, and the hover texts of the boxes on them.

Compute is on top, communication beneath, then the links between memory tiers and the host's CPU. A
copy has the colour of the category that it moves, as in charts of memory; its row says in which
direction. Reads and writes of files share one link but have two rows. Several buckets are often in
flight at once on one lane; boxes that overlap in time are drawn on tracks of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from paralab.report.tables import COPY_LANES, Tables
from paralab.theory.traffic import POINT_TO_POINT
from paralab.view import naming, theme

# A span with its calls, its copies, and op and category of the first copy, "" without copies. Also
# a call or a copy alone.
Box = dict[str, Any]
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


def row(box: Box) -> str:
    """The row of a box: its lane, or one of the disk's two rows."""
    named = box["lane"] == "disk" and box["op"] in ("read", "write")
    return f"disk {box['op']}" if named else box["lane"]


def row_name(row: str) -> str:
    """The row in words: the link, the axis of communication, or "compute"."""
    return ROW_NAME.get(row) or theme.text(theme.axis_of(row))


def limited(reports: Sequence[Tables]) -> Iterator[str]:
    """ "disk limited to 20 MB/s": each link that is in use, if all plans limit it alike."""
    for link in COPY_LANES:
        tiers = [report.plan.tiers for report in reports if link in set(report.copies["lane"])]
        limits = {some and some.limits.get(link) for some in tiers}
        if len(limits) == 1 and (most := limits.pop()):
            yield f"{ROW_NAME[link]} limited to {theme.in_speed(most)}"


def order(row: str) -> tuple[int, str]:
    """Sort key of rows: compute, then communication, then the tiers from the device outwards."""
    known = list(ROW_NAME)
    return (2 + known.index(row) if row in known else int(row != "compute")), row


def style(kind: str, row: str, category: str = "") -> tuple[str, str]:
    """Name and colour of boxes; those of copies between tiers are of the category copied."""
    if category:
        words = theme.text(naming.category_name(category))
        return f"copying {words}", theme.category_colour(category)
    name = naming.kind_name(kind)
    if kind == "comm":
        name = f"communication, {theme.text(theme.axis_of(row))}"
    elif row == "host" and kind == "compute":
        name = "adding, rounding"
    return name, theme.colour(kind, row)


def tracks(intervals: Sequence[tuple[float, float]], *, at_most: int) -> list[int]:
    """The track of each interval: the lowest one that is free when it starts. If all ``at_most``
    tracks are in use, it shares the one that is free soonest.
    """
    free_from, chosen = [-math.inf] * at_most, [0] * len(intervals)
    for i in sorted(range(len(intervals)), key=intervals.__getitem__):
        start, end = intervals[i]
        track = next((t for t, until in enumerate(free_from) if until <= start), None)
        if track is None:
            track = min(range(at_most), key=free_from.__getitem__)
        free_from[track], chosen[i] = max(free_from[track], end), track
    return chosen


def hover(box: Box) -> str:
    """The hover text of a box: times in ms, bytes as they were counted."""
    head = f"<b>{style(box['kind'], box['lane'], box['category'])[0]}</b>"
    if box["microbatch"] >= 0:
        head += f", micro-batch {box['microbatch']}"
    if box["stage"] or box["chunk"]:
        head += f", stage {box['stage']}"
    where = f"{theme.text(box['label'])}, " if box["label"] else ""
    where += f"rank {box['rank']}, {row_name(row(box))}"
    where += f", of step {box['step']}" * box["late"]
    start, end = box["start"] * 1e3, box["end"] * 1e3
    lines = [head, where, f"{end - start:.3f} ms, from {start:.3f} to {end:.3f} ms"]
    if box["kind"] not in ("wait", "comm") and box["lane"] not in COPY_LANES:
        processor = "CPU" if box["lane"] == "host" else "device"
        lines.append(f"cost: {box['cost'] * 1e3:.3f} ms of {processor} time")
    lines += [box["why"]] if "why" in box else map(_call, box["calls"])
    return "<br>".join([*lines, *map(_copy, box["copies"])])


def _call(call: Box) -> str:
    phase, size = theme.text(call["phase"]), f"{call['payload_bytes']:,} bytes"
    if call["op"] in POINT_TO_POINT:
        direction = "send to" if call["op"] == "send" else "receive from"
        return f"{direction} rank {call['peer']} ({phase}): {size}"
    return f"{call['op']} ({phase}): {size} in the buffer, {call['wire_bytes']:,} sent"


def _copy(copy: Box) -> str:
    """What was copied, in which direction, how many bytes, and how fast."""
    direction = WAY.get(copy["op"]) or WAY.get(copy["lane"], copy["lane"])
    text = theme.text(f"{naming.category_name(copy['category'])}, {direction}")
    text += f": {copy['bytes']:,} bytes"
    if copy["bytes"] and (seconds := copy["end"] - copy["start"]) > 0:
        text += f" at {theme.in_speed(copy['bytes'] / seconds)}"
    return text
