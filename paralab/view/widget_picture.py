"""A widget as a picture: what a static view of a notebook shows in its place.

GitHub and nbconvert run no kernel: of a widget they have what is stored with the cell, and that
would be a line of repr. Where notebooks are built, `VARIABLE` is set, and a widget adds what it
shows to its output, as data of type `FIGURES`. The builder draws that with `drawn`, which needs
chromium, and stores the PNG in its place. Elsewhere nothing is added.
"""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.marks import note

VARIABLE = "PARALAB_PICTURES"  # of the environment
FIGURES = "application/vnd.paralab.figures+json"
# Pixels of a figure, by figures in a row. The picture gets the first, which is what a cell of
# JupyterLab has in a window of 1,000; the second is drawn larger, for its letters.
WIDTH = {1: 830, 2: 560}
LINE = 28  # pixels below the figures, for the settings


def bundle(charts: Sequence[Chart], said: str) -> dict[str, Any]:
    """What a widget adds to its output: {} but where notebooks are built.

    said  the widget's settings, which stand below its picture
    """
    if not os.environ.get(VARIABLE):
        return {}
    narrow = [copy.copy(chart).narrowed(WIDTH[min(2, len(charts))]) for chart in charts]
    return {FIGURES: {"figures": [json.loads(one.to_json()) for one in narrow], "said": said}}


def drawn(data: dict[str, Any]) -> bytes:
    """What `bundle` added, as one PNG: the figures with their titles, two in a row of several."""
    figures = [go.Figure(figure) for figure in data["figures"]]
    across, images, top = min(2, len(figures)), [], 0
    for first in range(0, len(figures), across):
        row = figures[first : first + across]
        for i, figure in enumerate(row):
            png = figure.to_image("png", width=WIDTH[across], scale=2)
            source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
            place = {"x": i * WIDTH[across], "y": -top, "xref": "x", "yref": "y"}
            size = {"sizex": WIDTH[across], "sizey": figure.layout.height}
            images.append({"source": source, **place, **size})
        top += max(figure.layout.height for figure in row)
    said = f"{data['said']} · run the cell to move its sliders"
    width, style = across * WIDTH[across], {"size": 12, "ink": theme.look().faint}
    axis = {"visible": False, "fixedrange": True}
    layout = {"template": "none", "images": images}
    layout |= {"annotations": [note(said, theme.SIDE, -top, hold="left top", **style)]}
    layout |= dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), theme.look().paper)
    layout |= {"font": {"family": theme.FONT}, "margin": dict.fromkeys("tblr", 0)}
    layout |= {"xaxis": {**axis, "range": [0, width]}}
    layout |= {"yaxis": {**axis, "range": [-top - LINE, 0]}}
    whole = {"width": width, "height": top + LINE, "scale": WIDTH[1] / width}
    return go.Figure(layout=layout).to_image("png", **whole)
