"""Which tensor parallelism sends least: elements per rank over tokens, in 1D, 2D, 2.5D and 3D.

For the pair of layers of an MLP, forward and backward, by theory/tensor.py. Every curve is a
straight line a M + b in the tokens M: b is what weights cost on their way, which 1D leaves where
they are; a is what activations cost, which the grids divide by more. So 1D is best with few tokens,
and two lines cross at most once: exactly at (b2 - b1) / (a1 - a2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from paralab.checks import choice, illegal, whole
from paralab.spec import ModelSpec, Plan
from paralab.spec.rules import tensor_grid
from paralab.theory.tensor import depth_elements, linear_elements
from paralab.view import theme
from paralab.view.matrix_blocks import MODE_NAME

if TYPE_CHECKING:
    from paralab.view.chart import Chart

PAIRS = {"mlp": ("up", "down"), "attention": ("qkv", "proj")}
TOKENS = (256, 2**20)
POINTS = 60
MOST_PANELS = 3


class Line(NamedTuple):
    """Elements per rank = fixed + each * tokens."""

    fixed: Fraction
    each: Fraction

    def at(self, tokens: float) -> float:
        return float(self.fixed + self.each * Fraction(tokens))


def lines(model: ModelSpec, tp: int, pair: str = "mlp") -> dict[str, Line]:
    """{mode: its line} for every mode that ``tp`` ranks can make, per rank, pair and step of one
    micro-batch, forward and backward.
    """
    found = {}
    for mode in MODE_NAME:
        try:
            _, depth = tensor_grid(tp, mode, None)
        except ValueError:
            continue
        if mode == "2.5d" and depth == 1:
            continue  # one grid: that is 2D
        plan = Plan(tp=tp, tp_mode=mode, microbatch_size=1)
        one, two = (_elements(model.replace(seq_len=tokens), plan, pair) for tokens in (1, 2))
        found[mode] = Line(2 * one - two, two - one)
    return found


def _elements(model: ModelSpec, plan: Plan, pair: str) -> Fraction:
    return sum(
        (
            sum(linear_elements(model, plan, role)) + depth_elements(model, plan, role)
            for role in PAIRS[pair]
        ),
        Fraction(0),
    )


def crossing(one: Line, other: Line) -> float | None:
    """The tokens at which both send as much; None: they never do."""
    if one.each == other.each:
        return None
    tokens = (other.fixed - one.fixed) / (one.each - other.each)
    return float(tokens) if tokens > 0 else None


def winners(found: dict[str, Line]) -> list[tuple[float, str]]:
    """[(from so many tokens on, the mode that sends least)], the first from 0."""
    now, at = min(found, key=lambda mode: (found[mode].fixed, found[mode].each)), 0.0
    best = [(at, now)]
    while True:
        later = {}
        for mode, line in found.items():
            meet = crossing(found[now], line)
            if meet is not None and meet > at and line.each < found[now].each:
                later[mode] = meet
        if not later:
            return best
        now = min(later, key=lambda mode: (later[mode], found[mode].each))
        at = later[now]
        best.append((at, now))


def crossover(
    model: ModelSpec,
    tps: int | Sequence[int] = 64,
    *,
    tokens: tuple[int, int] = TOKENS,
    pair: str = "mlp",
    name: str = "",
) -> Chart:
    """Elements a rank sends for a pair of layers, forward and backward, over the tokens per
    micro-batch, in every mode; both axes logarithmic.

    tps     ranks, or up to three counts of them, a panel each; a mode that cannot be made of so
            many is left out
    tokens  (from, to)
    pair    "mlp": up and down, "attention": qkv and proj
    name    of the model, for the title

    ``table``: a row per count of ranks, mode and tokens, with the elements. Raises ValueError on
    counts and ranges that are none.
    """
    if not isinstance(model, ModelSpec):
        raise illegal("model", model, "not a model description", "a pl.ModelSpec(...)")
    choice("pair", pair, tuple(PAIRS))
    asked = (tps,) if isinstance(tps, int) else tuple(tps)
    if not 1 <= len(asked) <= MOST_PANELS:
        raise illegal("tps", tps, "not so many panels", f"1 to {MOST_PANELS} counts of ranks")
    for tp in asked:
        whole("tps", tp, at_least=2)
    low, high = tokens
    whole("tokens[0]", low, at_least=1)
    whole("tokens[1]", high, at_least=low + 1)
    return _chart(model, asked, (low, high), pair, name or f"h={model.hidden:,}")


def _chart(
    model: ModelSpec, asked: tuple[int, ...], ends: tuple[int, int], pair: str, name: str
) -> Chart:
    import pandas as pd

    (low, high), rows, best = ends, [], {}
    grid = [low * (high / low) ** (n / POINTS) for n in range(POINTS + 1)]
    looks = theme.series([MODE_NAME[mode] for mode in MODE_NAME])
    fig = theme.figure("", "", height=470 if len(asked) == 1 else 450)
    gap, seen = 0.05, set()
    wide = (1 - gap * (len(asked) - 1)) / len(asked)
    for number, tp in enumerate(asked):
        found, mark = lines(model, tp, pair), str(number + 1) if number else ""
        best[tp] = winners(found)
        for mode, line in found.items():
            label = MODE_NAME[mode]
            sent = [line.at(at) for at in grid]
            fig.add_scatter(
                x=grid,
                y=sent,
                mode="lines",
                name=label,
                xaxis=f"x{mark}",
                yaxis=f"y{mark}",
                line={"color": looks[label]["colour"], "dash": looks[label]["dash"], "width": 2.5},
                legendgroup=label,
                showlegend=label not in seen,
                hovertext=[
                    f"{label} on {tp} ranks, {at:,.0f} tokens: {value:,.0f} elements"
                    for at, value in zip(grid, sent, strict=True)
                ],
                hovertemplate="%{hovertext}<extra></extra>",
            )
            seen.add(label)
            rows += [(tp, mode, at, value) for at, value in zip(grid, sent, strict=True)]
        _mark(fig, found, best[tp], ends, mark)
        start = number * (wide + gap)
        ticks = theme.log_ticks(low, high)
        axes = {
            f"xaxis{mark}": {
                "type": "log",
                "domain": [start, start + wide],
                "anchor": f"y{mark}",
                "tickvals": ticks,
                "ticktext": [f"{t:,.0f}" for t in ticks],
                "title": {"text": "tokens per micro-batch"},
            },
            f"yaxis{mark}": {
                "type": "log",
                "anchor": f"x{mark}",
                "exponentformat": "SI",
                "dtick": 1,
                "title": {"text": "" if number else "elements sent per rank"},
            },
        }
        if number:
            axes[f"yaxis{mark}"]["matches"] = "y"
        if len(asked) > 1:
            fig.add_annotation(
                x=start + wide / 2,
                y=1,
                xref="paper",
                yref="paper",
                text=f"{tp} ranks",
                yanchor="bottom",
                showarrow=False,
                font={"size": 14},
            )
        fig.update_layout(axes)
    fig.update_layout(legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"})
    empty = theme.figure(
        theme.text(_finding(name, pair, best[asked[-1]], asked[-1], high)),
        f"{PAIRS[pair][0]} and {PAIRS[pair][1]}, forward and backward, one "
        "micro-batch · predicted (theory alone) · dotted: from here on another "
        "mode sends least",
        height=470,
    )
    fig.update_layout(title=empty.layout.title)
    table = pd.DataFrame(rows, columns=["tp", "mode", "tokens", "elements"])
    ranks = " and ".join(map(str, asked))
    return fig.explained(
        f"elements per rank of {name} on {ranks} ranks, predicted: "
        f"{' | '.join(MODE_NAME[m] for m in table['mode'].unique())}",
        table,
    )


def _mark(fig: Chart, found: dict[str, Line], best: list, ends: tuple[int, int], mark: str) -> None:
    """A dotted line where the best mode changes, who is best between them; dots where a grid
    overtakes 1D.
    """
    look, (low, high) = theme.look(), ends
    for mode, line in found.items():
        at = crossing(found["1d"], line)
        if mode != "1d" and at is not None and low < at < high:
            fig.add_scatter(
                x=[at],
                y=[line.at(at)],
                mode="markers",
                showlegend=False,
                xaxis=f"x{mark}",
                yaxis=f"y{mark}",
                marker={"size": 7, "color": look.ink},
                hovertemplate=f"from {at:,.0f} tokens on {MODE_NAME[mode]} sends less than 1D"
                "<extra></extra>",
            )
    for number, (at, mode) in enumerate(best):
        until = best[number + 1][0] if number + 1 < len(best) else high
        left, right = max(at, low), min(until, high)
        if left >= right:
            continue
        if at > low:
            fig.add_shape(
                type="line",
                x0=at,
                x1=at,
                y0=0,
                y1=1,
                xref=f"x{mark}",
                yref=f"y{mark} domain",
                line={"dash": "dot", "width": 1.5, "color": look.faint},
            )
            fig.add_scatter(
                x=[at],
                y=[found[mode].at(at)],
                mode="markers",
                showlegend=False,
                xaxis=f"x{mark}",
                yaxis=f"y{mark}",
                marker={"size": 11, "color": look.paper, "line": {"width": 2.5, "color": look.ink}},
                hovertemplate=f"from {at:,.0f} tokens on {MODE_NAME[mode]} sends least"
                "<extra></extra>",
            )
        middle = (math.log10(left) + math.log10(right)) / 2
        fig.add_annotation(
            x=middle,
            y=0.02,
            xref=f"x{mark}",
            yref=f"y{mark} domain",
            yanchor="bottom",
            text=f"<b>{MODE_NAME[mode]}</b>" + (f"<br>from {_round(at)}" if at > low else ""),
            showarrow=False,
            font={"size": 13, "color": look.ink},
            bgcolor=look.paper,
        )


def _finding(name: str, pair: str, best: list[tuple[float, str]], tp: int, high: int) -> str:
    """Who sends least, from how many tokens on."""
    what = {"mlp": "MLP", "attention": "attention"}[pair]
    steps = [(at, MODE_NAME[mode]) for at, mode in best if at < high]
    said = f"{name}, {what} on {tp} ranks: {steps[0][1]} sends least"
    if len(steps) == 1:
        return f"{said}, whatever the tokens"
    said += f" up to {_round(steps[1][0])} tokens, then {steps[1][1]}"
    return said + "".join(f", from {_round(at)} on {mode}" for at, mode in steps[2:])


def _round(tokens: float) -> str:
    """Three digits: 3,080 or 236,000."""
    return f"{float(f'{tokens:.3g}'):,.0f}"
