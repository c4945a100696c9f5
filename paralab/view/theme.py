"""One look for every figure: a colour means the same thing everywhere, on light and dark pages.

The phases of a step have Okabe and Ito's eight colours (2008, "Color Universal Design"), which
people with any form of colour blindness can tell apart: five for what a rank computes, three for
communication, one per axis of parallelism. Categories of memory, also where they are copied between
tiers, have muted colours of their own (after Paul Tol, 2021), so that a forward and the activations
that it saves are never mistaken for each other. Waiting is grey and hatched.

Curves of anything else (a run's losses, an algorithm) take their colours from a third set,
`series`, and differ in dash and marker too. `use_theme` chooses light or dark for all figures made
afterwards; a colour means the same in both, except that black becomes white on a dark page.
"""

from __future__ import annotations

import contextlib
import contextvars
import html
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from paralab.checks import choice

KIND_COLOUR = {
    "forward": "#56B4E9",  # sky blue
    "backward": "#009E73",  # bluish green
    "weight_grad": "#F0E442",  # yellow
    "optimizer": "#CC79A7",  # reddish purple
    "copy": "#E69F00",  # orange
    "compute": "#8797A7",  # slate: the work of a traced function, which has no phases of training
    "wait": "#DDE1E5",
}
AXIS_COLOUR = {"dp": "#D55E00", "tp": "#0072B2", "pp": "#000000"}  # vermillion, blue, black
# A traced function's group has all ranks, as dp's mostly has; shard is a part of dp.
AXIS_ALIAS = {"world": "dp", "shard": "dp"}
OTHER_COLOUR = "#7F7F7F"
CATEGORY_COLOUR = {  # of bytes, in the order they are stacked
    "parameters": "#5B6B7B",  # slate
    "gradients": "#CC6677",  # rose
    "optimizer": "#8C3B6B",  # wine
    "master": "#C79AB4",  # master weights and moments are optimizer states: two shades of wine
    "moments": "#8C3B6B",
    "activations": "#DDCC77",  # sand
    "buffers": "#7A6FB0",  # violet
    "workspace": "#A9C0A6",  # sage
    "other": OTHER_COLOUR,
}
UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}  # decimal, as data sheets have them

FONT = "Inter, 'Open Sans', 'Segoe UI', Helvetica, Arial, sans-serif"
OP_PATTERN = {
    "reduce_scatter": "/",
    "all_gather": "\\",
    "all_to_all": "x",
    "send": ".",
    "broadcast": "|",
    "reduce": "-",
}


# ---- light and dark ------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Look:
    """What differs between light and dark: paper and ink, never the meaning of a colour."""

    name: str
    paper: str
    ink: str
    faint: str
    grid: str
    wait: str
    hatch: str
    scale: tuple[str, str]  # of a matrix, from no bytes to the most; grey, which no axis has
    series: tuple[str, ...]


_INKS = {  # light and dark
    "name": ("light", "dark"),
    "paper": ("#FFFFFF", "#11151A"),
    "ink": ("#24292F", "#E6EDF3"),
    "faint": ("#57606A", "#9AA4AE"),
    "grid": ("#E5E8EB", "#2B323A"),
    "wait": (KIND_COLOUR["wait"], "#343C45"),
    "hatch": ("#57606A", "#7D8894"),
    "scale": (("#F4F6F8", "#4A5A6A"), ("#1C2229", "#B4BFCA")),
    "series": (
        ("#2B3642", "#DC1845", "#8A4FC4", "#A58E12", "#2E8A8A"),
        ("#E6EDF3", "#EE4F7B", "#8B72EE", "#EEC763", "#40B0BF"),
    ),
}
LIGHT, DARK = (Look(**{name: both[i] for name, both in _INKS.items()}) for i in (0, 1))
LOOKS = {"light": LIGHT, "dark": DARK}
SERIES_DASH = ("solid", "dash", "dot", "dashdot", "longdash")
SERIES_SYMBOL = ("circle", "square", "diamond", "triangle-up", "x")

_chosen = LIGHT


def use_theme(name: str) -> None:
    """Draw all later figures "light" or "dark". Raises ValueError on another name."""
    global _chosen  # a setting of the reader's screen, not of any report
    _chosen = LOOKS[choice("theme", name, tuple(LOOKS))]


def look() -> Look:
    """The current look."""
    return _chosen


@contextlib.contextmanager
def drawn(name: str) -> Iterator[None]:
    """Figures made inside the block have this look, whatever was chosen before."""
    before = look().name
    use_theme(name)
    try:
        yield
    finally:
        use_theme(before)


# ---- colours -------------------------------------------------------------------------------------
def axis_of(lane: str) -> str:
    """ "dp" of lane "comm:dp"; the lane itself where it is no communication lane."""
    return lane.removeprefix("comm:")


# Which of three shades of tp's blue an axis of a tp group's grid has.
TP_SHADE = {"row": 0, "j": 0, "col": 1, "i": 1, "depth": 2, "k": 2, "tokens": 2, "ij": 2, "ik": 2}


def axis_colour(axis: str) -> str:
    kind, _, part = axis.partition(":")
    if part:
        return shade(AXIS_COLOUR[kind], TP_SHADE.get(part, 0), 3)
    if axis in ("replica", "secondary"):  # parts of dp too, but paler than the ranks that shard
        return shade(AXIS_COLOUR["dp"], 1, 2 + (axis == "secondary"))
    fill = AXIS_COLOUR.get(AXIS_ALIAS.get(axis, axis), OTHER_COLOUR)
    return look().ink if fill == "#000000" else fill


def colour(kind: str, lane: str = "compute") -> str:
    """The colour of a span."""
    if kind == "comm":
        return axis_colour(axis_of(lane))
    return look().wait if kind == "wait" else KIND_COLOUR.get(kind, OTHER_COLOUR)


def shade(fill: str, index: int, of: int) -> str:
    """The ``index``-th of ``of`` shades of a colour: the colour itself, then paler and paler."""
    part, paper = 0.62 * index / max(of - 1, 1), bytes.fromhex(look().paper[1:])
    levels = zip(bytes.fromhex(fill[1:]), paper, strict=True)
    return "#" + "".join(f"{round((1 - part) * own + part * to):02X}" for own, to in levels)


def clear(fill: str, opacity: float) -> str:
    """The colour with this opacity, so that what is beneath it shows through."""
    red, green, blue = bytes.fromhex(fill[1:])
    return f"rgba({red},{green},{blue},{opacity})"


def on(background: str) -> str:
    """Black or white, whichever reads better on this colour (relative luminance, WCAG 2)."""
    parts = [level / 255 for level in bytes.fromhex(background[1:])]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "#FFFFFF"


def series(labels: Sequence[str]) -> dict[str, dict[str, str]]:
    """{label: {"ink", "dash", "symbol"}}: how each curve is drawn."""
    looks = {"ink": look().series, "dash": SERIES_DASH, "symbol": SERIES_SYMBOL}
    return {
        label: {name: values[i % len(values)] for name, values in looks.items()}
        for i, label in enumerate(labels)
    }


# ---- text and numbers ----------------------------------------------------------------------------
def text(value: Any) -> str:
    """The value as text, escaped: plotly reads <b> and <a> in it as markup."""
    return html.escape(str(value), quote=False)


def scaled(value: float, unit: str, *, digits: int = 3) -> str:
    """ "1.25 MB", "107 µs", "3.4 GB/s": three digits and a decimal prefix. 1 kB = 10^3 bytes."""
    size = float(f"{value:.{digits}g}")  # rounded first: 999.9 becomes 1 k
    if size == 0:
        return f"0 {unit}"
    power = max(-3, min(0 if unit == "s" else 4, math.floor(math.log10(abs(size)) / 3)))
    number = size / 1000.0**power
    shown = f"{number:.{digits}g}" if abs(number) < 10**digits else f"{number:,.0f}"
    return f"{shown} {('', 'k', 'M', 'G', 'T', 'n', 'µ', 'm')[power]}{unit}"


in_bytes, in_seconds, in_speed = (partial(scaled, unit=unit) for unit in ("B", "s", "B/s"))


def unit_of(biggest: float) -> tuple[str, float]:
    """The unit for an axis of bytes that ends at ``biggest``, and its size in bytes."""
    return next(pair for pair in UNITS.items() if biggest >= pair[1] or pair[1] == 1)


def category_colour(category: str) -> str:
    """The colour of a category of bytes; grey if it has none of its own."""
    return CATEGORY_COLOUR.get(category, OTHER_COLOUR)


def listed(words: Sequence[str]) -> str:
    """ "a", "a and b" or "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def percent(share: float, digits: int = 0) -> str:
    """ "22 %"; with a digit "22.4 %"."""
    return f"{100 * share:z.{digits}f} %"


def share(part: float) -> str:
    """`percent` for a sentence: something is not "0 %", and less than all is not "100 %"."""
    if 1e-9 < part < 0.01:
        return "less than 1 %"
    return "more than 99 %" if 0.99 < part < 1 - 1e-9 else percent(part)


def times(ratio: float) -> str:
    """ "2.5 times", "120 times"."""
    return f"{ratio:,.0f} times" if ratio >= 99.5 else f"{ratio:.2g} times"


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: its decades, with 2 and 5 times each if there are below four."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = [10.0**k for k in range(first, last + 1) if low <= 10.0**k <= high]
    if len(decades) >= 4:
        return decades
    every = (m * 10.0**k for k in range(first, last + 1) for m in (1, 2, 5))
    return [tick for tick in every if low <= tick <= high]


# ---- a frame ------------------------------------------------------------------------------------
class Frame(NamedTuple):
    """The size, in pixels, for which a figure is made: alone on a page, or one of several.

    height        0: each figure chooses its own
    large, small  size of the letters in the title's two lines
    """

    width: int = 800
    height: int = 0
    large: int = 17
    small: int = 13


SIDE = 20  # pixels of margin on both sides of a title
UNIT = re.compile(r"(?<=\d) (?=(?:%|[kMGTmµn]?[Bs])(?:\W|$))")  # the space before a unit
LETTER_WIDTH, BOLD = 0.54, 1.13  # average width of a letter over its size; how much wider is bold
SWATCH, LEGEND_ROW = 50, 20  # pixels: the sample before a name in the legend; a row of the legend
LEGEND = {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
ALONE = Frame()
_frame = contextvars.ContextVar("frame", default=ALONE)
frame = _frame.get  # the current one


@contextlib.contextmanager
def framed(width: int, height: int) -> Iterator[None]:
    """Every figure made inside the block has this size, whatever height it asks for."""
    token = _frame.set(Frame(width, height, large=14, small=11))
    try:
        yield
    finally:
        _frame.reset(token)


def letter_scale() -> float:
    """How much more of an axis a letter takes in the current frame than in a figure alone."""
    return 1.15 * ALONE.width / frame().width if frame().height else 1.0


def broken(text: str, width: float, size: float) -> str:
    """The text, broken into lines (<br>) for a figure of this width and letters of this size."""
    lines, most = [""], width / (LETTER_WIDTH * size)
    text = UNIT.sub("\0", text.replace(" ·", "\0·"))  # neither a dot nor a unit begins a line
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and letters(longer) > most:
            lines.append(word)
        else:
            lines[-1] = longer
    return "<br>".join(lines).replace("\0", " ")


def letters(text: str) -> int:
    """How many letters of a text with markup are visible."""
    return len(html.unescape(re.sub("<[^>]*>", "", text)))


def legend_rows(names: Sequence[str]) -> int:
    """Rows that a horizontal legend of these names takes in the current frame."""
    each = [SWATCH + LETTER_WIDTH * frame().small * letters(name) for name in names]
    room = frame().width - 5 * SIDE
    if sum(each) <= room:
        return 1
    return math.ceil(len(each) / max(1, int(room / max(each))))
