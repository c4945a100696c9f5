"""The rows of a timeline, drawn: what one step, several runs and a pipeline have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paralab.view import boxes, naming, theme

if TYPE_CHECKING:
    from paralab.report.tables import Tables
    from paralab.view.boxes import Section
    from paralab.view.chart import Chart

MAX_BOXES = 4000  # more make a browser slow, and no screen has the pixels
LEGEND_ROW = 24  # pixels


def drawn(sections: list[Section], finding: str, clocks: str, said: list[str]) -> Chart:
    """The figure of one section or several; ``said`` goes to its second line."""
    many = len(sections) > 1
    shown = [
        sorted(one.boxes, key=lambda b: (b["start"], b["id"]))[: MAX_BOXES // len(sections)]
        for one in sections
    ]
    window = max(
        one.seconds
        if len(some) == max(len(one.boxes), one.total)
        else max((b["start"] for b in some), default=0.0)
        for one, some in zip(sections, shown, strict=True)
    )
    many_boxes, total = sum(map(len, shown)), sum(max(len(s.boxes), s.total) for s in sections)
    if many_boxes < total:
        said.append(
            f"the first {many_boxes:,} of {total:,} boxes ({window * 1e3:.1f} ms); choose ranks="
        )
    said += list(dict.fromkeys(filter(None, (_crowded(one.report) for one in sections))))
    said += ["shades: a rank's chunks"] * any(b["chunk"] for one in sections for b in one.boxes)
    said += ["framed: between nodes"] * any(boxes.two_levels(one) for one in sections)
    ticks, bottom = boxes.place(sections, heads=many)
    line = naming.clock_line(sections[0].report, *said)
    if many:
        meaning = [f"{c}: {naming.CLOCK_BRIEF[c]}" for c in clocks.split(" and ")]
        line = " · ".join([*meaning, *said])
    rows = 28 if many else 34
    if any(one.idle for one in sections):  # many ranks with one lane each: they may be lower
        rows = max(14.0, min(30.0, 660 / bottom))
    of_step = f"step {sections[0].step}" if not many else "its step"
    if any(one.report.model is None for one in sections):
        of_step = "the function" if not many else "each"
    if all(one.lanes == ("compute",) for one in sections):
        of_step = "the step"
    margin = {"r": 68} if any(one.idle for one in sections) else {}
    if tiers := any(b.get("copies") for one in sections for b in one.boxes):
        margin["t"] = 96 + LEGEND_ROW  # what is copied is in the legend too
    fig = theme.figure(
        finding,
        line,
        height=int(190 + LEGEND_ROW * tiers + rows * bottom),
        barmode="overlay",
        margin=margin,
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        xaxis={
            "title": {"text": f"time from the start of {of_step} (ms)"},
            "range": [-0.005 * window * 1e3, 1.005 * window * 1e3],
            "tickformat": "~g",
        },
        yaxis={
            "tickvals": [y for y, _ in ticks],
            "ticktext": [label for _, label in ticks],
            "range": [bottom, -0.2],
            "showgrid": False,
        },
    )
    boxes.draw(fig, sections, shown, window)
    if many:
        _heads(fig, sections, window)
    _idle(fig, sections)
    return fig


def _idle(fig: Chart, sections: list[Section]) -> None:
    """In the right margin the share of its time that every rank stands idle."""
    if not any(one.idle for one in sections):
        return
    said: list[dict[str, Any]] = []
    for one in sections:
        y = {rank: one.rows[rank, "compute"][0] for rank in one.ranks}
        shares = [(y[rank], share) for rank, share in one.idle.items() if rank in y]
        said += idle_notes(shares, one.top + boxes.HEAD / 2 if len(sections) > 1 else None)
    fig.annotated(said)


def idle_notes(shares: Sequence[tuple[float, float]], head: float | None) -> list[dict[str, Any]]:
    """Notes for the right margin: each share at its y, and what they are, at y = ``head`` or, if
    that is None, on top.
    """
    said: list[dict[str, Any]] = [{"y": y, "text": f"{100 * share:.0f} %"} for y, share in shares]
    at = {"yref": "paper", "y": 1, "yanchor": "bottom"} if head is None else {"y": head}
    said.append({"text": "idle", "font": {"color": theme.look().faint}, **at})
    margin = {"xref": "paper", "x": 1, "xshift": 8, "xanchor": "left", "showarrow": False}
    return [margin | one for one in said]


def _heads(fig: Chart, sections: list[Section], window: float) -> None:
    """Above each section its name and duration, and a line where it ends."""
    ink = theme.look().ink
    for one in sections:
        clock = "" if one.report.clock in one.label else f" ({one.report.clock})"
        fig.add_annotation(
            xref="paper",
            x=0,
            y=one.top + boxes.HEAD / 2,
            showarrow=False,
            xanchor="left",
            text=one.head or f"<b>{theme.text(one.label)}</b>{clock}",
            font={"size": 14},
        )
        end = (one.seconds if one.mark is None else one.mark) * 1e3
        fig.add_shape(
            type="line",
            x0=end,
            x1=end,
            y0=one.top + 0.35,
            y1=one.bottom,
            line={"color": ink, "width": 2},
        )
        inside = end > 0.85 * window * 1e3
        fig.add_annotation(
            x=end,
            y=one.top + boxes.HEAD / 2,
            text=f"<b>{end:.1f} ms</b>",
            showarrow=False,
            xanchor="right" if inside else "left",
            xshift=-5 if inside else 5,
            font={"size": 14},
        )


def _crowded(report: Tables) -> str:
    cores = report.meta.get("cores")
    if report.clock == "measured" and isinstance(cores, int) and cores < report.world_size:
        return f"{report.world_size} ranks shared {cores} cores, which stretches boxes"
    return ""
