"""What "the same output" means for a lab: as nbval compares them.

Two runs of a lab agree when every cell shows the same things in the same order. What a run may
change without changing what a learner sees is removed first: plotly's random ``uid``, its
``template`` (the theme, which comes with plotly's version), the encoding of an array (``bdata`` or
a list), digits after the sixth, and pixels, which depend on the machine's browser and fonts.

A cell tagged ``measured`` shows numbers from the clock. Of it only the structure is compared: which
outputs, of which types, and of each figure how many traces, their names and their types.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"  # a random model id, and nothing else
PNG = "image/png"
MEASURED = "measured"


def is_measured(cell: Mapping[str, Any]) -> bool:
    """Whether this cell's numbers come from the clock."""
    return MEASURED in cell["metadata"].get("tags", [])


def _plain(value: Any) -> Any:
    """``value`` with arrays as lists and floats at six significant digits."""
    if isinstance(value, Mapping):
        if "bdata" in value and "dtype" in value:
            import numpy as np  # late: every test process imports this module, and few read arrays

            # plotly's typed arrays are little-endian; "shape" is there from two dimensions on
            array = np.frombuffer(
                base64.b64decode(value["bdata"]), np.dtype(value["dtype"]).newbyteorder("<")
            )
            if "shape" in value:
                array = array.reshape([int(n) for n in str(value["shape"]).split(",")])
            return _plain(array.tolist())
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None  # JSON has no NaN; plotly writes null
        return float(f"{value:.6g}") if abs(value) >= 1e-12 else 0.0  # below: noise around zero
    return value


def canonical_figure(figure: Mapping[str, Any]) -> dict[str, Any]:
    """A plotly figure without what differs between two runs of the same cell."""

    def traces(data: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [_plain({k: v for k, v in trace.items() if k != "uid"}) for trace in data]

    plain = {k: _plain(v) for k, v in figure.items() if k not in ("data", "layout", "frames")}
    plain["data"] = traces(figure.get("data", ()))
    layout = figure.get("layout", {})
    plain["layout"] = _plain({k: v for k, v in layout.items() if k != "template"})
    plain["frames"] = [
        {**_plain(frame), "data": traces(frame.get("data", ()))}
        for frame in figure.get("frames", ())
    ]
    return plain


def _compared_types(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The MIME types of one output, less those a run may or may not produce.

    Pictures of figures and of widgets are drawn where notebooks are built, and nowhere else: that
    needs a browser.
    """
    return tuple(sorted(set(data) - {WIDGET, PNG}))


def canonical(outputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A cell's outputs in the form in which two runs are compared."""
    result = []
    for output in outputs:
        plain = {k: v for k, v in output.items() if k not in ("metadata", "execution_count")}
        if "data" in output:
            data = output["data"]
            plain["data"] = {
                mime: canonical_figure(data[mime]) if mime == PLOTLY else data[mime]
                for mime in _compared_types(data)
            }
        result.append(plain)
    return result


def kinds(outputs: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """What a cell shows, in order, without the values: stream names, MIME types, error names."""
    result: list[tuple[Any, ...]] = []
    for output in outputs:
        kind = output["output_type"]
        if kind == "stream":
            result.append((kind, output["name"]))
        elif kind == "error":
            result.append((kind, output["ename"]))
        else:
            result.append((kind, *_compared_types(output["data"])))
    return result


def structure(outputs: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """What must not change in a ``measured`` cell: ``kinds``, and every figure's traces."""
    figures: list[tuple[Any, ...]] = [
        ("traces", *((trace.get("type"), trace.get("name")) for trace in figure.get("data", ())))
        for figure in (output.get("data", {}).get(PLOTLY) for output in outputs)
        if figure is not None
    ]
    return kinds(outputs) + figures


def contradictions(
    stored: Sequence[Mapping[str, Any]], fresh: Sequence[Mapping[str, Any]], measured: bool
) -> list[str]:
    """What this run of a cell shows that its stored outputs do not, in words; [] if they agree."""
    stored, fresh = _joined(stored), _joined(fresh)
    shape = structure if measured else kinds
    if shape(stored) != shape(fresh):
        return [
            "The cell shows other outputs, or in another order.",
            f"  stored:   {shape(stored)}",
            f"  this run: {shape(fresh)}",
        ]
    if measured:
        return []
    return [
        f"Output {number} is another.\n  stored:   {before}\n  this run: {now}"
        for number, (before, now) in enumerate(
            zip(canonical(stored), canonical(fresh), strict=True), start=1
        )
        if not _alike(before, now)
    ]


def _alike(stored: Any, fresh: Any) -> bool:
    """Equal; a page may have made an integer of a float: JavaScript has one kind of number."""
    if isinstance(stored, dict) and isinstance(fresh, dict):
        return stored.keys() == fresh.keys() and all(_alike(stored[k], fresh[k]) for k in stored)
    if isinstance(stored, list) and isinstance(fresh, list):
        return len(stored) == len(fresh) and all(map(_alike, stored, fresh))
    if type(stored) is float and type(fresh) is int:
        return stored == _plain(float(fresh))
    return bool(stored == fresh)


def _joined(outputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Outputs as a notebook stores them: the text of one stream is one string in one output, and a
    traceback, which names this machine's paths, is left out.
    """
    result: list[dict[str, Any]] = []
    streams: dict[str, dict[str, Any]] = {}
    for output in outputs:
        plain = {k: v for k, v in output.items() if k != "traceback"}
        if plain["output_type"] == "stream":
            text = "".join(plain["text"])
            if plain["name"] in streams:
                streams[plain["name"]]["text"] += text
                continue
            streams[plain["name"]] = plain
            plain["text"] = text
        result.append(plain)
    return result
