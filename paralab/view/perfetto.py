"""A report as a trace for ui.perfetto.dev or chrome://tracing.

The file has the Chrome trace-event format: a process per rank, a thread per lane, an "X" event per
span, and arrows from a span to the spans that waited for it. Overlapping collectives of one lane
are on threads of their own ("comm:dp 2"), because slices of one thread must nest. Copies between
memory tiers have their category and bytes.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from typing import Any

from paralab.report import output_files
from paralab.report.tables import Tables
from paralab.view.boxes import of_span
from paralab.view.lanes import ROW_NAME, order, tracks

Event = dict[str, Any]  # also a row of a table from which an event is made


def to_perfetto(report: Tables, path: str | os.PathLike[str]) -> None:
    """Write a trace of all steps that ui.perfetto.dev opens (Chrome trace-event JSON, gzipped if
    ``path`` ends in .gz), in microseconds from the earliest span.
    """
    trace = {
        "traceEvents": events(report),
        "displayTimeUnit": "ms",
        "otherData": {"written by": "paralab", "clock": report.clock, "report": repr(report)},
    }
    output_files.write(path, json.dumps(trace).encode())


def _microseconds(seconds: float) -> float:
    """Microseconds, rounded to 1/8: both binary floats and whole nanoseconds can represent these
    exactly, so the end of a slice and the start of the next stay equal in every viewer.
    """
    return round(seconds * 8e6) / 8


def events(report: Tables) -> list[Event]:
    """The list "traceEvents" of the file."""
    spans = report.spans.to_dict("records")
    origin = min((s["start"] for s in spans), default=0.0)
    calls, copies = of_span(report.collectives), of_span(report.copies)
    lanes: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for span in spans:
        span["ts"] = _microseconds(span["start"] - origin)
        span["dur"] = _microseconds(span["end"] - origin) - span["ts"]
        lanes[span["rank"], span["lane"]].append(span)
    result = []
    for rank in sorted({rank for rank, _ in lanes}):
        result += _named("process", rank, 0, f"rank {rank}")
    result += _threads(lanes)
    result += [_slice(s, calls[s["id"]], copies[s["id"]]) for s in spans]
    by_id = {span["id"]: span for span in spans}
    arrows = [(by_id[a], span) for span in spans for a in span["after"]]
    for number, (cause, effect) in enumerate(arrows):
        common = {"cat": "after", "name": "after", "id": number}
        result.append({"ph": "s", **common, **_place(cause)})
        # A wait may begin before what it waits for; viewers drop an arrow that points back in time.
        landed = _place(effect) | {"ts": max(cause["ts"], effect["ts"])}
        result.append({"ph": "f", "bp": "e", **common, **landed})
    return result


def _threads(lanes: dict[tuple[int, str], list[Event]]) -> list[Event]:
    """Give every span its thread, "tid"; return the events that name the threads."""
    result, used = [], Counter()
    for rank, lane in sorted(lanes, key=lambda thread: (order(thread[1])[0], thread)):
        lane_spans = lanes[rank, lane]
        intervals = [(s["ts"], s["ts"] + s["dur"]) for s in lane_spans]
        tracks_of = tracks(intervals, at_most=len(intervals))
        for span, track in zip(lane_spans, tracks_of, strict=True):
            span["tid"] = used[rank] + track
        for track in range(max(tracks_of) + 1):
            name = ROW_NAME.get(lane, lane) + f" {track + 1}" * (track > 0)
            result += _named("thread", rank, used[rank], name)
            used[rank] += 1
    return result


def _named(what: str, rank: int, thread: int, name: str) -> list[Event]:
    """The events that give a process or a thread its name and, by its number, its place."""
    args = {"name": name, "sort_index": rank if what == "process" else thread}
    common = {"pid": rank, "tid": thread}
    return [
        {"ph": "M", "name": f"{what}_{key}", **common, "args": {key: value}}
        for key, value in args.items()
    ]


def _place(span: Event) -> Event:
    return {"pid": span["rank"], "tid": span["tid"], "ts": span["ts"]}


def _slice(span: Event, calls: list[Event], copies: list[Event]) -> Event:
    name = span["kind"].replace("_", " ")
    if span["microbatch"] >= 0:
        name += f" {span['microbatch']}"
    if calls:
        name = calls[0]["op"] if len(calls) == 1 else f"{len(calls)} transfers"
    args = {key: span[key] for key in ("id", "step", "stage", "chunk", "microbatch", "cost")}
    args["after"] = list(span["after"])
    if calls:
        args["payload_bytes"] = sum(call["payload_bytes"] for call in calls)
        args["wire_bytes"] = sum(call["wire_bytes"] for call in calls)
        args["phase"], args["ranks"] = calls[0]["phase"], list(calls[0]["ranks"])
    if copies:
        first, size = copies[0], sum(copy["bytes"] for copy in copies)
        name = f"{first['op']} {first['category']}"
        args |= {"bytes": size, "category": first["category"], "op": first["op"]}
    event = {"ph": "X", "name": name, "cat": span["kind"], "dur": span["dur"], "args": args}
    return event | _place(span)
