"""The pieces of a widget: what it was given, its knobs, what it shows, its small table, its words
for an error.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ipywidgets as ipw

from paralab.checks import illegal
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.view.chart import Chart
from paralab.view.widget_live import WIDTH

MUTED, BAD = "var(--jp-ui-font-color2, #57606A)", "var(--jp-error-color0, #B3261E)"


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One setting. ``options``: (what is written, value) pairs in order; ``value``: the first one.

    buttons  a row of buttons instead of a slider: for words
    brief    {value: how the bench's repr writes it}, where that must not depend on the machine
    """

    label: str
    options: Sequence[tuple[str, Any]]
    value: Any
    buttons: bool = False
    tip: str = ""
    brief: Mapping[Any, str] = field(default_factory=dict)

    def widget(self) -> ipw.SelectionSlider | ipw.ToggleButtons:
        settings = {"options": list(self.options), "value": self.value, "tooltip": self.tip or None}
        if not self.buttons:
            layout = {"width": "auto", "flex": "1 1 auto"}
            return ipw.SelectionSlider(**settings, continuous_update=True, layout=layout)
        made = ipw.ToggleButtons(**settings, layout={"width": "100%"})
        made.style.button_width = "auto"
        return made

    def check(self, name: str, value: Any) -> Any:
        """``value`` as the slider has it, or the refusal."""
        values = [option for _, option in self.options]
        same = [o for o in values if o == value and isinstance(o, bool) == isinstance(value, bool)]
        if not same:
            raise illegal(name, value, "not on this slider", ", ".join(map(str, values)))
        return same[0]

    def says(self, value: Any) -> str:
        """The value in the words of the bench's repr."""
        words = next(words for words, option in self.options if option == value)
        return self.brief.get(value, words)

    def row(self, widget: ipw.Widget) -> ipw.HBox:
        """The widget with its name before it, all of one width; buttons may need two lines."""
        name = ipw.Label(self.label, layout={"width": "92px", "flex": "0 0 auto"})
        return ipw.HBox([name, widget], layout={"align_items": "center", "min_height": "34px"})


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """What a bench shows: a picture, a small table of headline numbers, one sentence.

    beside  more pictures, of a bench that has several views
    """

    chart: Chart
    beside: Sequence[Chart] = ()
    rows: Sequence[dict[str, str]] = ()
    said: str = ""


KINDS = {
    "model": (ModelSpec, "model description"),
    "plan": (Plan, "plan"),
    "cluster": (Cluster, "cluster"),
}


def given(name: str, value: Any, default: Any) -> Any:
    """What a bench was given as "model", "plan" or "cluster"; its default if that is None.

    default  the description, or what makes it
    """
    if value is None:
        return default() if callable(default) else default
    kind, said = KINDS[name]
    if not isinstance(value, kind):
        raise illegal(name, value, f"not a {said}", f"a pl.{kind.__name__}(...) or None")
    return value


def grid(rows: Sequence[ipw.Widget], width: int = WIDTH) -> ipw.GridBox:
    """The knobs: two columns where the page has room for them, of a wider bench more."""
    made = ipw.GridBox(list(rows), layout={"max_width": f"{width}px", "grid_gap": "0 28px"})
    made.layout.grid_template_columns = "repeat(auto-fit, minmax(360px, 1fr))"
    return made


def button(text: str, icon: str, style: str) -> ipw.Button:
    return ipw.Button(description=text, icon=icon, button_style=style, layout={"width": "110px"})


def table(rows: Sequence[dict[str, str]]) -> str:
    """Headline numbers, a row for each clock."""
    if not rows:
        return ""
    cell = "padding:2px 18px 2px 0;text-align:left;white-space:nowrap"
    head = "".join(
        f'<th style="{cell};font-weight:normal;color:{MUTED}">{html.escape(name)}</th>'
        for name in rows[0]
    )
    lines = []
    for row in rows:
        cells = [f'<td style="{cell}">{html.escape(value)}</td>' for value in row.values()]
        cells[0] = cells[0].replace(cell, cell + ";font-weight:600")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<table style="border-collapse:collapse;line-height:1.5"><tr>{head}</tr>'
        f"{''.join(lines)}</table>"
    )


def trouble(error: Exception) -> str:
    """An error as HTML: its first line, and the rest (a rank's traceback) for who opens it."""
    first, _, rest = str(error).partition("\n")
    shown = f"<b>{type(error).__name__}</b>: {html.escape(first)}"
    if rest.strip():
        shown += (
            f'<details><summary style="cursor:pointer">all of it</summary><pre style="line-height:'
            f'1.3;overflow:auto">{html.escape(rest.strip())}</pre></details>'
        )
    style = f"border-left:4px solid {BAD};padding:4px 10px;line-height:1.4"
    return f'<div style="{style}">{shown}</div>'
