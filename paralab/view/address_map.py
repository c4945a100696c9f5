"""An address space over a step: which storage has which addresses, and where a request would fail.

The storages are those of a real training step, placed one after the other (instruments/heap.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from paralab.instruments.heap import Space
from paralab.view import theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import boxes as mark
from paralab.view.marks import note, upright

HEIGHT = 260  # pixels of a panel


def addresses(spaces: Mapping[str, Space], event: int, request: float) -> Chart:
    """One panel per address space: events to the right, addresses upwards, a box per storage, and a
    line at ``event``, with the free bytes at that event and the largest contiguous piece of them.
    The title says in which spaces a ``request``, in bytes, would be served at that event.

    ``table``: space, category, born, died, address, bytes.
    """
    unit, per = theme.unit_of(max(space.extent for space in spaces.values()))
    traces, notes, shapes, rows, layout, served = [], [], [], [], {}, []
    share = 1 / len(spaces)
    for number, (name, space) in enumerate(spaces.items()):
        axis, top = f"y{number + 1}" if number else "y", 1 - number * share
        layout[f"yaxis{number + 1}"] = {
            "domain": [top - share * 0.86, top - share * 0.08],
            "range": [0, space.extent / per],
            "title": f"address ({unit})",
        }
        gaps = space.gaps(event)
        served += [theme.text(name)] * (max(gaps) >= request)
        text = f"<b>{theme.text(name)}</b>: {theme.in_bytes(sum(gaps))} are free at the line; "
        text += f"the largest free piece is {theme.in_bytes(max(gaps))}"
        notes.append(note(text, 0, top, axes=("paper", "paper"), anchor="left top"))
        shapes.append(upright(event, axis=f"{axis} domain", dash="dash"))
        for kind in dict.fromkeys(one.category for *_, one in space.blocks):
            boxed = []
            for start, end, s in space.blocks:
                if s.category == kind:
                    rows.append((name, kind, s.born, s.died, start, end - start))
                    middle, text = (start + end) / 2 / per, f"{kind}, {theme.in_bytes(s.bytes)}"
                    boxed.append((s.born, s.died - s.born, middle, (end - start) / per, "", text))
            look = {"edge": 0, "axes": ("x", axis), "legendgroup": kind, "showlegend": not number}
            traces.append(mark.boxes(kind, theme.category_colour(kind), boxed, **look))
    last = max(one.died for space in spaces.values() for *_, one in space.blocks)
    text = f"A request of {theme.in_bytes(request)} at the line is served in {len(served)} of "
    text += f"{len(spaces)} address spaces" + f": {', '.join(served)}" * bool(served)
    fig = figure(
        text,
        "white: free addresses · box: one storage, from its creation to its end",
        height=110 + HEIGHT * len(spaces),
        bargap=0,
        xaxis={
            "title": "event of the step (a storage is created or freed)",
            "range": [0, last],
            "anchor": axis,
        },
        **layout,
    )
    return fig.draw(traces, notes, shapes).tabled(("space category born died address bytes", rows))
