"""A widget as a picture, which a static view of a notebook shows in its place.

GitHub and nbconvert run no kernel: they only have the output that is stored with a cell, which for
a widget would be one line of repr. When notebooks are built, the environment variable `VARIABLE` is
set, and a widget adds its figures to its output, as data of type `FIGURES`. The builder draws them
(tests/labs/widget_png.py) and stores the PNG instead. Otherwise nothing is added.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from typing import Any

from paralab.view.chart import Chart

VARIABLE = "PARALAB_PICTURES"
FIGURES = "application/vnd.paralab.figures+json"
# Width of a figure in pixels, by the number of figures in a row. A picture is as wide as the first,
# as a cell of JupyterLab is in a window of 1,000; two figures are drawn larger and scaled down.
WIDTH = {1: 830, 2: 560}


def bundle(charts: Sequence[Chart], settings: str) -> dict[str, Any]:
    """What a widget adds to its output, by MIME type: {} unless notebooks are built.

    settings  the widget's repr, which is written below its picture
    """
    if not os.environ.get(VARIABLE):
        return {}
    narrow = [copy.copy(chart).narrowed(WIDTH[min(2, len(charts))]) for chart in charts]
    return {FIGURES: {"figures": [json.loads(one.to_json()) for one in narrow], "said": settings}}
