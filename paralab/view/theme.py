"""One look for every figure: the same thing has the same colour everywhere.

The colours are Okabe and Ito's eight (2008, "Color Universal Design"), which people with any form
of colour blindness can tell apart. What a rank computes takes five of them, communication the
other three, one per axis of parallelism, so a colour never means two things. Waiting is grey and
hatched: nothing happens there.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from paralab.spec import Plan

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from paralab.report import Report

KIND_COLOUR = {
    "forward": "#56B4E9",  # sky blue
    "backward": "#009E73",  # bluish green
    "weight_grad": "#F0E442",  # yellow
    "optimizer": "#CC79A7",  # reddish purple
    "copy": "#E69F00",  # orange
    "wait": "#DDE1E5",
}
AXIS_COLOUR = {"dp": "#D55E00", "tp": "#0072B2", "pp": "#000000"}  # vermillion, blue, black
OTHER_COLOUR = "#7F7F7F"
INK, FAINT, GRID = "#24292F", "#57606A", "#E5E8EB"
BYTES_SCALE = [[0.0, "#F4F6F8"], [1.0, "#4A5A6A"]]  # grey: no axis and no kind has it

FONT = "Inter, 'Open Sans', 'Segoe UI', Helvetica, Arial, sans-serif"
OP_PATTERN = {
    "all_reduce": "", "reduce_scatter": "/", "all_gather": "\\", "all_to_all": "x",
    "broadcast": "|", "reduce": "-", "send": "+", "recv": ".",
}  # fmt: skip
LEVEL_NAME = {"intra": "inside a node", "inter": "between nodes"}
CLOCK_MEANS = {
    "measured": "wall clock",
    "replayed": "measured compute on one virtual device per rank, modelled links",
    "predicted": "theory alone",
}


def axis_of(lane: str) -> str:
    """ "dp" of lane "comm:dp"; the lane itself where it is no communication lane."""
    return lane.removeprefix("comm:")


def colour(kind: str, lane: str = "compute") -> str:
    """The colour of a span."""
    if kind == "comm":
        return AXIS_COLOUR.get(axis_of(lane), OTHER_COLOUR)
    return KIND_COLOUR.get(kind, OTHER_COLOUR)


def text(value: Any) -> str:
    """Words of a report, safe in a figure: plotly reads <b> and <a> as markup."""
    return html.escape(str(value))


def plan_name(plan: Plan) -> str:
    """ "dp=4, overlapped": the degrees, and how gradients are synchronised if they are."""
    degrees = [f"dp={plan.dp}"] + [
        f"{axis}={getattr(plan, axis)}" for axis in ("tp", "pp") if getattr(plan, axis) > 1
    ]
    return ", ".join(degrees + [plan.grad_sync] * (plan.dp > 1))


def clock_line(report: Report, *more: str) -> str:
    """The second line of every title: which clock, then what else."""
    return " · ".join([f"{report.clock} clock ({CLOCK_MEANS[report.clock]})", *more])


def megabytes(count: float) -> str:
    """Decimal megabytes, 10^6 bytes; digits enough to keep a small model's traffic from 0."""
    return "0" if count == 0 else f"{count / 1e6:.{2 if count >= 1e5 else 4}f}"


def figure(title: str, subtitle: str, *, height: int) -> go.Figure:
    """An empty figure in the kit's look: finding on top, clock beneath."""
    import plotly.graph_objects as go

    axis = {
        "gridcolor": GRID, "linecolor": GRID, "zeroline": False, "automargin": True,
        "ticks": "", "title": {"standoff": 8, "font": {"size": 13}},
    }  # fmt: skip
    layout = {
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "#FFFFFF",
        "plot_bgcolor": "#FFFFFF",
        "xaxis": axis,
        "yaxis": axis,
        "hoverlabel": {"font": {"family": FONT, "size": 13}, "align": "left"},
        "bargap": 0.15,
        # Beside the picture, not over its title; no button that sends a report to a cloud.
        "modebar": {"orientation": "v", "bgcolor": "rgba(0,0,0,0)", "color": FAINT,
                    "activecolor": INK,
                    "remove": ["sendChartToCloud", "lasso2d", "select2d"]},
        "barcornerradius": 2,
    }  # fmt: skip
    fig = go.Figure(layout={"template": {"layout": layout}})
    fig.update_layout(
        title={
            "text": f"<b>{title}</b>",
            "subtitle": {"text": subtitle, "font": {"size": 13, "color": FAINT}},
            "x": 0, "xref": "paper", "xanchor": "left", "font": {"size": 17},
            "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 18},
        },
        height=height,
        margin={"t": 96, "l": 20, "r": 44, "b": 60},
    )  # fmt: skip
    return fig
