"""What a box of a timeline says when pointed at."""

from __future__ import annotations

from typing import Any

from paralab.report.tables import COPY_LANES
from paralab.theory.traffic import POINT_TO_POINT
from paralab.view import lanes, theme


def hover(b: dict[str, Any]) -> str:
    """What a box says when pointed at: times in ms, bytes as they were counted."""
    head = f"<b>{b['kind'].replace('_', ' ')}</b>"
    if b["lane"] in lanes.LANES:
        head = f"<b>{lanes.style(b['kind'], b['lane'], lanes.category(b))['name']}</b>"
    if b["microbatch"] >= 0:
        head += f", micro-batch {b['microbatch']}"
    if b["stage"] or b["chunk"]:
        head += f", stage {b['stage']}"
    if b["label"]:
        head = f"{theme.text(b['label'])}: {head}"
    where = f"rank {b['rank']}, {lanes.ROW_NAME.get(b['lane']) or theme.text(b['lane'])}"
    where += f", of step {b['step']}" * b.get("late", False)
    lines = [
        head,
        where,
        f"{(b['end'] - b['start']) * 1e3:.3f} ms, from {b['start'] * 1e3:.3f} to "
        f"{b['end'] * 1e3:.3f} ms",
    ]
    if b["kind"] not in ("wait", "comm") and b["lane"] not in COPY_LANES:
        whose = "processor" if b["lane"] == "host" else "device"
        lines.append(f"cost {b['cost'] * 1e3:.3f} ms of {whose} time")
    lines += [b["why"]] if "why" in b else [_call(call) for call in b["calls"]]
    lines += lanes.hover(b)
    return "<br>".join(lines)


def _call(call: dict[str, Any]) -> str:
    phase = theme.text(call["phase"])
    if call["op"] in POINT_TO_POINT:
        way = "send to" if call["op"] == "send" else "receive from"
        return f"{way} rank {call['peer']} ({phase}): {call['payload_bytes']:,} bytes"
    return (
        f"{call['op']} ({phase}): {call['payload_bytes']:,} bytes "
        f"in the buffer, {call['wire_bytes']:,} sent"
    )
