"""One look for every figure: the same thing has the same colour everywhere, by day and by night.

The colours are Okabe and Ito's eight (2008, "Color Universal Design"), which people with any form
of colour blindness can tell apart. What a rank computes takes five of them, communication the
other three, one per axis of parallelism, so a colour never means two things. Memory takes the
colour of what makes it: activations are forward's, gradients backward's, states the optimizer's,
buffers those of the copies into them; what moves from tier to tier keeps its colour. Waiting is
grey and hatched: nothing happens there.

Curves that are none of these (a run's losses, an algorithm) come from a second set, `series`, and
differ in dash and marker too. `use_theme` chooses light or dark for figures made from then on; a
colour means the same in both, and black, which night would swallow, is white there.
"""

from __future__ import annotations

import contextlib
import contextvars
import html
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import choice

if TYPE_CHECKING:
    from paralab.view.chart import Chart

KIND_COLOUR = {
    "forward": "#56B4E9",  # sky blue
    "backward": "#009E73",  # bluish green
    "weight_grad": "#F0E442",  # yellow
    "optimizer": "#CC79A7",  # reddish purple
    "copy": "#E69F00",  # orange
    "compute": "#8797A7",  # slate: what a traced function does, of no kind that training has
    "wait": "#DDE1E5",
}
AXIS_COLOUR = {"dp": "#D55E00", "tp": "#0072B2", "pp": "#000000"}  # vermillion, blue, black
# A traced function has one group of all ranks, as dp mostly has; a second copy is shared by some.
AXIS_ALIAS = {"world": "dp", "secondary": "dp"}
OTHER_COLOUR = "#7F7F7F"
CATEGORY_COLOUR = {  # of bytes, in the order they are stacked
    "parameters": "#5B6B7B",
    "gradients": KIND_COLOUR["backward"],
    "optimizer": KIND_COLOUR["optimizer"],
    "master": "#E6BCD3",  # master weights and moments are the optimizer's: two shades of it
    "moments": KIND_COLOUR["optimizer"],
    "activations": KIND_COLOUR["forward"],
    "buffers": KIND_COLOUR["copy"],
    "workspace": KIND_COLOUR["weight_grad"],
    "other": OTHER_COLOUR,
}

FONT = "Inter, 'Open Sans', 'Segoe UI', Helvetica, Arial, sans-serif"
OP_PATTERN = {
    "all_reduce": "",
    "reduce_scatter": "/",
    "all_gather": "\\",
    "all_to_all": "x",
    "broadcast": "|",
    "reduce": "-",
    "send": "",
    "recv": ".",
}
CLOCK_STYLE = {  # line dash, and whether markers are hollow: a clock looks the same everywhere
    "measured": ("solid", False),
    "replayed": ("dash", True),
    "predicted": ("dot", True),
    "dry run": ("longdash", True),
}


# ---- light and dark ------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Look:
    """What changes between day and night: paper and ink, never what a colour means."""

    name: str
    paper: str
    ink: str
    faint: str
    grid: str
    wait: str
    hatch: str
    scale: tuple[str, str]  # from no bytes to most; grey, for no axis and no kind has it
    series: tuple[str, ...]


LIGHT = Look(
    name="light",
    paper="#FFFFFF",
    ink="#24292F",
    faint="#57606A",
    grid="#E5E8EB",
    wait=KIND_COLOUR["wait"],
    hatch="#57606A",
    scale=("#F4F6F8", "#4A5A6A"),
    series=("#2B3642", "#DC1845", "#8A4FC4", "#A58E12", "#2E8A8A"),
)
DARK = Look(
    name="dark",
    paper="#11151A",
    ink="#E6EDF3",
    faint="#9AA4AE",
    grid="#2B323A",
    wait="#343C45",
    hatch="#7D8894",
    scale=("#1C2229", "#B4BFCA"),
    series=("#E6EDF3", "#EE4F7B", "#8B72EE", "#EEC763", "#40B0BF"),
)
LOOKS = {"light": LIGHT, "dark": DARK}
SERIES_DASH = ("solid", "dash", "dot", "dashdot", "longdash")
SERIES_SYMBOL = ("circle", "square", "diamond", "triangle-up", "x")
SERIES_OF = {"ring": 0, "tree": 1, "hierarchical": 2, "overlapped": 0, "naive": 1, "bucketed": 2}

_chosen: str | None = None


def use_theme(name: str | None) -> None:
    """Draw figures made from now on "light" or "dark"; None: as PARALAB_THEME says, else light.

    Raises ValueError on another name.
    """
    global _chosen  # a setting of the reader's screen, not of any report
    _chosen = None if name is None else choice("theme", name, tuple(LOOKS))


def look() -> Look:
    """The look in force. Raises ValueError if PARALAB_THEME holds another word than light, dark."""
    name = _chosen or os.environ.get("PARALAB_THEME") or "light"
    return LOOKS[choice("PARALAB_THEME", name, tuple(LOOKS))]


@contextlib.contextmanager
def drawn(name: str) -> Iterator[None]:
    """Inside the block figures are made in this look, whatever was chosen."""
    before = _chosen
    use_theme(name)
    try:
        yield
    finally:
        use_theme(before)


# ---- colours -------------------------------------------------------------------------------------
def axis_of(lane: str) -> str:
    """ "dp" of lane "comm:dp"; the lane itself where it is no communication lane."""
    return lane.removeprefix("comm:")


# Of three shades of tp's blue: the axes of a tp group's grid.
TP_SHADE = {"row": 0, "j": 0, "col": 1, "i": 1, "depth": 2, "k": 2, "tokens": 2, "ij": 2, "ik": 2}


def axis_colour(axis: str) -> str:
    kind, _, part = axis.partition(":")
    if part:
        return shade(AXIS_COLOUR[kind], TP_SHADE.get(part, 0), 3)
    found = AXIS_COLOUR.get(AXIS_ALIAS.get(axis, axis), OTHER_COLOUR)
    return look().ink if found == "#000000" else found


def colour(kind: str, lane: str = "compute") -> str:
    """The colour of a span."""
    if kind == "comm":
        return axis_colour(axis_of(lane))
    return look().wait if kind == "wait" else KIND_COLOUR.get(kind, OTHER_COLOUR)


def shade(fill: str, index: int, of: int) -> str:
    """The ``index``-th of ``of`` shades of a colour: the colour itself, then paler and paler."""
    paper, part = look().paper, 0.62 * index / max(of - 1, 1)
    mixed = (
        round((1 - part) * int(fill[i : i + 2], 16) + part * int(paper[i : i + 2], 16))
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{level:02X}" for level in mixed)


def on(background: str) -> str:
    """Black or white, whichever reads better on this colour (relative luminance, WCAG 2)."""
    parts = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return (
        "#000000"
        if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.18
        else "#FFFFFF"
    )


def series(labels: Sequence[str]) -> dict[str, dict[str, str]]:
    """{label: {"colour", "dash", "symbol"}}; ring, tree, naive ... look alike in every figure."""
    taken = {label: SERIES_OF[label] for label in labels if label in SERIES_OF}
    if len(set(taken.values())) < len(taken):  # ring beside overlapped: never seen so far
        taken = {}
    free = [i for i in range(max(len(labels), 5)) if i not in taken.values()]
    colours = look().series
    place = {label: taken[label] if label in taken else free.pop(0) for label in labels}
    return {
        label: {
            "colour": colours[i % len(colours)],
            "dash": SERIES_DASH[i % 5],
            "symbol": SERIES_SYMBOL[i % 5],
        }
        for label, i in place.items()
    }


# ---- text and numbers ----------------------------------------------------------------------------
def text(value: Any) -> str:
    """Words of a report, safe in a figure: plotly reads <b> and <a> as markup."""
    return html.escape(str(value))


def megabytes(count: float) -> str:
    """Decimal megabytes, 10^6 bytes; digits enough to keep a small model's traffic from 0."""
    return "0" if count == 0 else f"{count / 1e6:.{2 if count >= 1e5 else 4}f}"


def scaled(value: float, unit: str, *, digits: int = 3) -> str:
    """ "1.25 MB", "107 µs", "3.4 GB/s": three digits and a decimal prefix. 1 kB = 10^3 bytes."""
    prefixes = (
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
        (1.0, ""),
        (1e-3, "m"),
        (1e-6, "µ"),
        (1e-9, "n"),
    )
    size = float(f"{abs(value):.{digits}g}")  # 999.9 is 1 k
    if size == 0:
        return f"0 {unit}"
    factor, prefix = next((p for p in prefixes if size >= p[0]), prefixes[-1])
    if unit == "s" and factor > 1:
        factor, prefix = 1.0, ""
    number = size / factor
    shown = f"{number:.{digits}g}" if number < 10**digits else f"{number:,.0f}"
    return f"{'-' * (value < 0)}{shown} {prefix}{unit}"


def log_ticks(low: float, high: float) -> list[float]:
    """Where a logarithmic axis from low to high is labelled: decades, and 2 and 5 where few fit."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = [10.0**k for k in range(first, last + 1) if low <= 10.0**k <= high]
    if len(decades) >= 4:
        return decades
    return [
        m * 10.0**k for k in range(first, last + 1) for m in (1, 2, 5) if low <= m * 10.0**k <= high
    ]


# ---- a frame ------------------------------------------------------------------------------------
class Frame(NamedTuple):
    """Pixels of a figure that is one of several on a page, and has to do with less room."""

    width: int
    height: int


TALL = 380  # pixels, from which on there is room for four lines of legend below a long title
USUAL_WIDTH = 800
_frame: contextvars.ContextVar[Frame | None] = contextvars.ContextVar("frame", default=None)


@contextlib.contextmanager
def framed(width: int, height: int) -> Iterator[None]:
    """Inside the block every figure is made for a frame of this size, whatever it would like."""
    token = _frame.set(Frame(width, height))
    try:
        yield
    finally:
        _frame.reset(token)


def letter_scale() -> float:
    """How much more of an axis a letter takes in the frame in force than in a figure alone."""
    frame = _frame.get()
    return 1.0 if frame is None else 1.15 * USUAL_WIDTH / frame.width


def _in_frame(frame: Frame, layout: dict[str, Any]) -> dict[str, Any]:
    """The layout with smaller letters, of the frame's size; room for a legend above the picture."""
    across = layout.get("legend", {}).get("orientation") == "h"
    title = layout["title"] | {"font": {"size": 14}, "pad": {"t": 10, "l": 12}, "xref": "container"}
    title["text"] = title["text"].replace("font-size:13px", "font-size:11px")
    top = 136 if across and frame.height >= TALL else 88
    margin = layout["margin"] | {"t": top, "b": min(layout["margin"]["b"], 110)}
    legend = {"legend": {**layout["legend"], "font": {"size": 11}}} if "legend" in layout else {}
    return {
        **layout,
        **legend,
        "title": title,
        "margin": margin,
        "width": frame.width,
        "height": frame.height,
    }


# ---- the empty figure ----------------------------------------------------------------------------
def figure(title: str, subtitle: str, *, height: int, **settings: Any) -> Chart:
    """An empty chart in the kit's look: finding on top, clock beneath; ``settings`` of its layout.

    All at once, also what could come later: update_layout takes several times as long.
    """
    from paralab.view.chart import Chart

    now = look()
    axis = {
        "gridcolor": now.grid,
        "linecolor": now.grid,
        "zeroline": False,
        "automargin": True,
        "ticks": "",
        "title": {"standoff": 8, "font": {"size": 13}},
    }
    layout = {
        "font": {"family": FONT, "size": 13, "color": now.ink},
        "paper_bgcolor": now.paper,
        "plot_bgcolor": now.paper,
        "xaxis": axis,
        "yaxis": axis,
        "hoverlabel": {"font": {"family": FONT, "size": 13}, "align": "left"},
        "bargap": 0.15,
        # Beside the picture, not over its title; no button that sends a report to a cloud.
        "modebar": {
            "orientation": "v",
            "bgcolor": "rgba(0,0,0,0)",
            "color": now.faint,
            "activecolor": now.ink,
            "remove": ["sendChartToCloud", "lasso2d", "select2d"],
        },
        "barcornerradius": 2,
    }
    made = {
        "template": {"layout": layout},
        "title": {
            # One text of two lines: plotly's own subtitle falls on the title wherever a figure
            # is drawn before it is on screen, or changes its width there.
            "text": f"<b>{title}</b><br><span style='font-size:13px;color:{now.faint}'>{subtitle}"
            "</span>",
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "font": {"size": 17},
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 24},
        },
        "height": height,
        "margin": {"t": 96, "l": 20, "r": 44, "b": 60} | settings.pop("margin", {}),
        **settings,
    }
    frame = _frame.get()
    return Chart(layout=made if frame is None else _in_frame(frame, made))
