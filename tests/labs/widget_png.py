"""The picture of a widget, from what its output has of it (paralab/view/widget_picture.py)."""

from __future__ import annotations

import base64
from typing import Any

import plotly.graph_objects as go

from paralab.view import theme
from paralab.view.marks import note
from paralab.view.widget_picture import WIDTH

LINE = 28  # pixels below the figures, for the settings


def drawn(data: dict[str, Any]) -> bytes:
    """What a widget added to its output, as one PNG: figures with titles, two in a row of more."""
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
    layout |= {"annotations": [note(said, theme.SIDE, -top, anchor="left top", **style)]}
    layout |= dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), theme.look().paper)
    layout |= {"font": {"family": theme.FONT}, "margin": dict.fromkeys("tblr", 0)}
    layout |= {"xaxis": {**axis, "range": [0, width]}}
    layout |= {"yaxis": {**axis, "range": [-top - LINE, 0]}}
    whole = {"width": width, "height": top + LINE, "scale": WIDTH[1] / width}
    return go.Figure(layout=layout).to_image("png", **whole)
