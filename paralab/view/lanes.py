"""Lanes of a rank beside its compute and its messages: links between memory tiers, and its host.

A copy has the colour of what it moves, as in the charts of memory; the row it stands on says which
way. A file is read and written on one link, but drawn on two rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.report.tables import COPY_LANES
from paralab.view import theme

ROW_NAME = {  # from the device outwards
    "h2d": "host to device",
    "d2h": "device to host",
    "host": "host's processor",
    "disk": "disk",
    "disk read": "disk read",
    "disk write": "disk write",
}
LANES = (*COPY_LANES, "host")
HEIGHT = 0.55  # of a row of compute
THIN = 2e-3  # of the time axis: a box below that has its own colour as its edge, or is not seen
MOVED = {"optimizer": "optimizer states"}
WAY = {
    "h2d": "host to device",
    "d2h": "device to host",
    "read": "read from disk",
    "write": "written to disk",
}


def row(box: dict[str, Any]) -> str:
    """Where a box stands below its rank: on its lane's row, or on one of the disk's two."""
    op = box["copies"][0]["op"] if box.get("copies") else ""
    return f"disk {op}" if box["lane"] == "disk" and op in ("read", "write") else box["lane"]


def order(row: str) -> tuple[int, str]:
    """Compute first, then messages, then tier after tier."""
    known = list(ROW_NAME)
    return (2 + known.index(row) if row in known else int(row != "compute")), row


def category(box: dict[str, Any]) -> str:
    """What a copy between tiers moves; "" of any other box."""
    return box["copies"][0]["category"] if box.get("copies") else ""


def style(kind: str, row: str, category: str) -> dict[str, str]:
    """Name and colour of boxes, where a picture has copies between tiers: in its legend a colour
    means one thing, on whatever row.
    """
    found = {"name": kind.replace("_", " "), "colour": theme.colour(kind, row)}
    if category:
        found = {
            "name": f"copying {theme.text(category)}",
            "colour": theme.CATEGORY_COLOUR.get(category, theme.OTHER_COLOUR),
        }
    elif kind == "copy" and row == "compute":
        found["name"] = "copy on the device"
    elif kind == "compute" and row == "host":
        found["name"] = "adding, rounding"
    return found


def edges(
    boxes: Sequence[dict[str, Any]], window: float, fill: str, least: float = THIN
) -> dict[str, list[Any]]:
    """Lines around boxes: of paper between those of at least a share ``least`` of the window, of
    their own colour around others.
    """
    thin = [b["end"] - b["start"] < least * window for b in boxes]
    paper = theme.look().paper
    return {"width": [1 if t else 0.5 for t in thin], "color": [fill if t else paper for t in thin]}


def hover(box: dict[str, Any]) -> list[str]:
    """What was moved which way, how much of it, and how fast."""
    said = []
    for copy in box.get("copies", ()):
        what = MOVED.get(copy["category"], copy["category"])
        line = f"{what}, {WAY.get(copy['op']) or WAY.get(copy['lane'], copy['lane'])}: "
        line += f"{copy['bytes']:,} bytes"
        if copy["bytes"] and (seconds := copy["end"] - copy["start"]) > 0:
            line += f" at {theme.scaled(copy['bytes'] / seconds, 'B/s')}"
        said.append(theme.text(line))
    return said
