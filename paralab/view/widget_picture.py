"""A widget as a picture: what a static view of a notebook shows in its place.

GitHub and nbconvert run no kernel: of a widget they have what is stored with the cell, and that
would be a line of repr. Where notebooks are built, `VARIABLE` is set, and a widget adds what it
shows to its output, as data of type `FIGURES`. The builder draws that with `drawn`, which needs
chromium, and stores the PNG in its place. Elsewhere nothing is added.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.marks import note
from paralab.view.widget_live import layout_of

VARIABLE = "PARALAB_PICTURES"  # of the environment
FIGURES = "application/vnd.paralab.figures+json"
# Pixels of a figure, by figures in a row. The picture gets the first, which is what a cell of
# JupyterLab has in a window of 1,000; the second is drawn larger, for its letters.
WIDTH = {1: 830, 2: 560}
SIZES = (15 * theme.BOLD, 12)  # of the letters of the two kinds of lines above a figure
LINE = 20  # pixels that a line is high


def bundle(charts: Sequence[Chart], said: str) -> dict[str, Any]:
    """What a widget adds to its output: {} but where notebooks are built.

    said  the widget's settings, which stand below its picture
    """
    if not os.environ.get(VARIABLE):
        return {}
    figures = [json.loads(go.Figure(chart.data, layout_of(chart)).to_json()) for chart in charts]
    heads = [[chart.finding, chart.below] for chart in charts]
    return {FIGURES: {"figures": figures, "heads": heads, "said": said}}


def drawn(data: dict[str, Any]) -> bytes:
    """What `bundle` added, as one PNG: the figures under their titles, two in a row of several."""
    across = min(2, len(data["figures"]))
    width, heads = WIDTH[across], [_lines(head, WIDTH[across]) for head in data["heads"]]
    images, notes, top = [], [], 8
    for first in range(0, len(heads), across):
        row = range(first, min(first + across, len(heads)))
        room = LINE * max(len(heads[i]) for i in row) + 4
        for i in row:
            figure, left = data["figures"][i], (i - first) * width
            high = figure["layout"].get("height", 360)
            png = go.Figure(figure).to_image("png", width=width, height=high, scale=2)
            source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
            place = {"x": left, "y": -top - room, "sizex": width, "sizey": high}
            images.append({"source": source, "xref": "x", "yref": "y", **place})
            for n, line in enumerate(heads[i]):
                notes.append(_note(left + 12, -top - LINE * n, line))
        top += room + max(data["figures"][i]["layout"].get("height", 360) for i in row)
    notes.append(_note(12, -top, _faint(f"{data['said']} · run the cell to move its sliders")))
    across, top = across * width, top + LINE + 8
    axis = {"visible": False, "fixedrange": True}
    layout = {"template": "none", "images": images, "annotations": notes}
    layout |= dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), theme.look().paper)
    layout |= {"font": {"family": theme.FONT}, "margin": dict.fromkeys("tblr", 0)}
    layout |= {"xaxis": {**axis, "range": [0, across]}, "yaxis": {**axis, "range": [-top, 0]}}
    scale = WIDTH[1] / across
    return go.Figure(layout=layout).to_image("png", width=across, height=top, scale=scale)


def _lines(head: Sequence[str], width: int) -> list[str]:
    """A title's two texts, broken into lines that fit."""
    finding, below = (
        theme.broken(text, width - 24, size).split("<br>") if text else []
        for text, size in zip(head, SIZES, strict=True)
    )
    return [f"<b>{line}</b>" for line in finding] + [_faint(line) for line in below]


def _faint(text: str) -> str:
    return f"<span style='color:{theme.look().faint};font-size:12px'>{text}</span>"


def _note(x: float, y: float, text: str) -> dict[str, Any]:
    return note(text, x, y, size=15, hold="left top", align="left")
