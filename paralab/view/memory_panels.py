"""Panels of memory over a step, one above the other on one scale of bytes.

What was sampled is drawn as it was sampled: a state holds until the next sample, so steps and no
slopes. A prediction has a sample behind every instruction and one inside the fullest; in outline
behind some actions and at the peak. The strip above a panel has the step's phases. Decimal units:
1 MB = 10^6 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paralab.view import theme
from paralab.view.memory import LARGEST
from paralab.view.memory_curves import Curve, capacity, thinned

if TYPE_CHECKING:
    from paralab.view.chart import Chart

MAX_PANELS = 4
MAX_POINTS = 4000  # of a figure; more are thinned out, and every peak stays
NEAR = 3  # times the highest peak: a device beyond that is not drawn
HEAD, STRIP, GAP = 26, 17, 20  # pixels
WORDS = 28  # pixels above the highest peak, for its bytes
ROOM = {1: 300, 2: 200, 3: 165, 4: 145}  # pixels that a panel is high
FRAME = 152  # pixels of a figure that are no panel
LETTER = 0.0095  # of the step that one letter in the strip takes


def limits(found: Any) -> dict[str, float]:
    """{label: bytes} of the devices, those of one run's own limit first; far ones left out."""
    found = list(found)
    highest, limits = max(curve.peak for curve in found), {}
    for curve in found:
        if (held := capacity(curve.report)) and held[1] <= NEAR * highest:
            limits[held[0]] = float(held[1])
    return limits


def drawn(
    shown: list[Curve],
    heads: list[str],
    finding: str,
    below: str,
    *,
    against: str | None = None,
    room_below: int = 0,
) -> Chart:
    """A panel for each curve, its head above it.

    room_below  pixels left free beneath them
    against     what the first is called: then the time axis is per cent of each curve's own step,
                not milliseconds, and a faint line in every other panel is the first's peak
    """
    held, share = limits(shown), against is not None
    told = [size for curve in shown for size in curve.reserved.values()]
    highest = max([*(curve.peak for curve in shown), *held.values(), *told, 1])
    unit = next(u for u, size in LARGEST.items() if highest >= size)
    per, room = LARGEST[unit], ROOM[min(len(shown), MAX_PANELS)]
    power = len(str(int(per))) - 1
    head = HEAD if any(heads) else 6
    each = head + STRIP + 3 + room
    plot = len(shown) * each + (len(shown) - 1) * GAP + room_below
    fig = theme.figure(
        finding,
        f"{below} · 1 {unit} = 10<sup>{power}</sup> bytes" if power else below,
        height=plot + FRAME,
    )
    numbered = any(curve.numbered for curve in shown)  # no times: what happens, in order
    seconds = 1.0 if numbered else 1e3
    width = 100.0 if share else seconds * max(curve.length for curve in shown)
    names = [c for c in theme.CATEGORY_COLOUR if any(c in one.samples[0] for one in shown)]
    names += sorted({c for one in shown for c in one.samples[0]} - set(names))
    most = MAX_POINTS // (len(shown) * max(1, len(names)))
    layout: dict[str, Any] = {}
    for i, curve in enumerate(shown):
        top = plot - i * (each + GAP)
        scale = (100.0 / curve.length if share else seconds) if curve.length > 0 else 1.0
        panel, strip = "y" if i == 0 else f"y{2 * i + 1}", f"y{2 * i + 2}"
        _strip(fig, curve, strip, scale, width)
        _stack(fig, curve, names, panel, scale, per, most)
        _marks(fig, curve, panel, scale, per, width, held)
        low, high = (top - each) / plot, (top - head - STRIP - 3) / plot
        layout[f"yaxis{panel[1:]}"] = {
            "domain": [max(low, 0.0), high],
            "range": [0, highest / per * room / (room - WORDS)],
            "title": {"text": unit if len(shown) > 2 else f"memory ({unit})"},
            "tickformat": "~g",
            "nticks": max(3, room // 45),
            "anchor": "x",
        }
        layout[f"yaxis{strip[1:]}"] = {
            "domain": [high + 3 / plot, min(high + (3 + STRIP) / plot, 1.0)],
            "range": [-0.5, 0.5],
            "visible": False,
            "anchor": "x",
            "fixedrange": True,
        }
        if share and i:
            fig.add_shape(
                type="line",
                x0=0,
                x1=width,
                yref=panel,
                y0=shown[0].peak / per,
                y1=shown[0].peak / per,
                line={"dash": "dot", "width": 1.5, "color": theme.look().faint},
            )
        if share and i == 1:
            fig.add_annotation(
                xref="paper",
                x=1,
                y=shown[0].peak / per,
                yref=panel,
                xanchor="right",
                yanchor="bottom",
                text=f"peak of {theme.text(against)}",
                showarrow=False,
                font={"size": 12, "color": theme.look().faint},
            )
        if heads[i]:
            fig.add_annotation(
                xref="paper",
                x=0,
                yref="paper",
                y=(top - head) / plot,
                xanchor="left",
                yanchor="bottom",
                text=heads[i],
                showarrow=False,
                font={"size": 14},
            )
    fig.update_layout(
        **layout,
        barmode="stack",
        bargap=0,
        hovermode="closest",
        margin={"t": 100, "b": 52, "l": 20, "r": 44},
        xaxis={
            "title": {
                "text": "share of the step (%)"
                if share
                else "what happens in the step, numbered"
                if numbered
                else "time in the step (ms)"
            },
            "range": [-0.005 * width, 1.005 * width],
            "dtick": _dtick(width),
            "showgrid": False,
            "anchor": panel,
        },
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )
    return fig


def _strip(fig: Chart, curve: Curve, axis: str, scale: float, width: float) -> None:
    """The step's phases, with their names where there is room, or their first letters."""
    for kind in theme.KIND_COLOUR:
        mine = [phase for phase in curve.phases if phase.kind == kind]
        if not mine:
            continue
        name, wide = kind.replace("_", " "), [(p.end - p.start) * scale for p in mine]
        words = [
            next(
                (
                    word
                    for word in (name, name[:1].upper())
                    if (len(word) + 1) * LETTER * width <= w
                ),
                "",
            )
            for w in wide
        ]
        fill = theme.colour(kind)
        fig.add_bar(
            name=name,
            orientation="h",
            y=[0] * len(mine),
            base=[_ms(p.start * scale) for p in mine],
            x=[_ms(w) for w in wide],
            width=1,
            yaxis=axis,
            showlegend=False,
            marker={"color": fill, "line": {"width": 1, "color": theme.look().paper}},
            text=words,
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            textfont={"size": 12, "color": theme.on(fill)},
            hovertext=[
                name if curve.numbered else f"{name}: {1e3 * (p.end - p.start):.2f} ms"
                for p in mine
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )


def _stack(
    fig: Chart, curve: Curve, names: list[str], axis: str, scale: float, per: float, most: int
) -> None:
    """The categories, stacked: areas of steps."""
    kept = thinned(curve.totals, most)
    times = [_ms(curve.times[i] * scale) for i in kept]
    for name in names:
        sizes = [curve.samples[i].get(name, 0) for i in kept]
        fill = theme.CATEGORY_COLOUR.get(name, theme.OTHER_COLOUR)
        said = theme.text(name)
        shared = {
            "name": said,
            "legendgroup": said,
            "yaxis": axis,
            "showlegend": axis == "y",
            "hovertemplate": f"{said}: %{{y:.4~g}} {_unit(per)} at %{{x:.1f}}<extra></extra>",
        }
        fig.add_scatter(
            **shared,
            x=[*times, _ms(curve.length * scale)],
            y=[n / per for n in (*sizes, sizes[-1])],
            mode="lines",
            stackgroup=axis,
            line={"shape": "hv", "width": 0, "color": fill},
            fillcolor=fill,
        )


def _marks(
    fig: Chart,
    curve: Curve,
    axis: str,
    scale: float,
    per: float,
    width: float,
    held: Mapping[str, float],
) -> None:
    """The peak with its bytes, what the device holds, and what a GPU's allocator says."""
    ink = theme.look().ink
    x, y = curve.times[curve.peak_at] * scale, curve.peak
    side = "left" if x < 0.08 * width else "right" if x > 0.92 * width else "center"
    fig.add_annotation(
        x=_ms(x),
        y=y / per,
        yref=axis,
        yanchor="bottom",
        yshift=5,
        xanchor=side,
        showarrow=False,
        text=f"<b>peak {theme.scaled(y, 'B')}</b>",
        font={"size": 13},
    )
    fig.add_scatter(
        name="peak",
        x=[_ms(x)],
        y=[y / per],
        yaxis=axis,
        mode="markers",
        showlegend=False,
        marker={
            "size": 9,
            "color": ink,
            "symbol": "circle",
            "line": {"width": 1.5, "color": theme.look().paper},
        },
        hovertemplate=f"peak: {y:,} bytes, {curve.phase(curve.peak_at)}<extra></extra>",
    )
    label, _ = capacity(curve.report) or ("", 0)
    lines = [(label, held[label], "dash", "right")] if label in held else []
    lines += [
        (name, size, "dot", "left" if name == "allocated" else "right")
        for name, size in curve.reserved.items()
    ]
    for label, size, dash, side in lines:
        fig.add_shape(
            type="line",
            xref="x domain",
            x0=0,
            x1=1,
            yref=axis,
            y0=size / per,
            y1=size / per,
            line={"dash": dash, "width": 2, "color": ink},
        )
        fig.add_annotation(
            xref="paper",
            x=float(side == "right"),
            y=size / per,
            yref=axis,
            xanchor=side,
            yanchor="bottom",
            text=f"{theme.text(label)} {theme.scaled(size, 'B')}",
            showarrow=False,
            font={"size": 13},
        )


def _dtick(width: float) -> float:
    """Between two labels of the time axis: 1, 2 or 5 times a power of ten, four to ten of them."""
    power = 10.0 ** math.floor(math.log10(width / 4)) if width > 0 else 1.0
    return max(step * power for step in (1, 2, 5) if 4 * step * power <= width or step == 1)


def _ms(value: float) -> float:
    return round(value, 4)  # of a millisecond or a per cent: more digits nobody sees


def _unit(per: float) -> str:
    return next(unit for unit, size in LARGEST.items() if size == per)
