"""A widget as a picture: what a static view of a notebook shows in its place.

GitHub and nbconvert run no kernel: of a widget they have what is stored with the cell, and that
would be a line of repr. Where notebooks are built, `VARIABLE` is set, and a widget adds what it
shows to its output, as data of type `FIGURES`. The builder draws that (tests/labs/widget_png.py)
and stores the PNG in its place. Elsewhere nothing is added.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from typing import Any

from paralab.view.chart import Chart

VARIABLE = "PARALAB_PICTURES"  # of the environment
FIGURES = "application/vnd.paralab.figures+json"
# Pixels of a figure, by figures in a row. The picture gets the first, which is what a cell of
# JupyterLab has in a window of 1,000; the second is drawn larger, for its letters.
WIDTH = {1: 830, 2: 560}


def bundle(charts: Sequence[Chart], said: str) -> dict[str, Any]:
    """What a widget adds to its output: {} but where notebooks are built.

    said  the widget's settings, which stand below its picture
    """
    if not os.environ.get(VARIABLE):
        return {}
    narrow = [copy.copy(chart).narrowed(WIDTH[min(2, len(charts))]) for chart in charts]
    return {FIGURES: {"figures": [json.loads(one.to_json()) for one in narrow], "said": said}}
