"""Which tensor parallelism sends least: elements per rank over tokens, in 1D, 2D, 2.5D and 3D.

For the pair of layers of an MLP, forward and backward, by theory/tensor.py. Every curve is a
straight line a M + b in the tokens M: b is what weights cost on their way, which 1D leaves where
they are; a is what activations cost, which the grids divide by more. So 1D is best with few tokens,
and two lines cross at most once: exactly at (b2 - b1) / (a1 - a2).
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations
from typing import Any, NamedTuple

from paralab.checks import instance, whole
from paralab.spec import ModelSpec, Plan
from paralab.spec.rules import tensor_grid
from paralab.theory.tensor import depth_elements, linear_elements
from paralab.view import theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import note, upright
from paralab.view.marks.curves import curve, log_axis
from paralab.view.matrix_blocks import MODE_NAME

PAIR = ("up", "down")
TOKENS = (256, 2**20)
POINTS = 60


class Line(NamedTuple):
    """Elements per rank = fixed + each * tokens."""

    fixed: Fraction
    each: Fraction

    def at(self, tokens: float) -> float:
        return float(self.fixed + self.each * Fraction(tokens))


def lines(model: ModelSpec, tp: int) -> dict[str, Line]:
    """{mode: its line} for every mode that ``tp`` ranks can make, per rank, MLP and step of one
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
        one, two = (_elements(model.replace(seq_len=tokens), plan) for tokens in (1, 2))
        found[mode] = Line(2 * one - two, two - one)
    return found


def _elements(model: ModelSpec, plan: Plan) -> Fraction:
    each = ((*linear_elements(model, plan, r), depth_elements(model, plan, r)) for r in PAIR)
    return sum((n for some in each for n in some), Fraction(0))


def crossing(one: Line, other: Line) -> float | None:
    """The tokens at which both send as much; None: they never do."""
    if one.each == other.each:
        return None
    tokens = (other.fixed - one.fixed) / (one.each - other.each)
    return float(tokens) if tokens > 0 else None


def winners(found: dict[str, Line]) -> list[tuple[float, str]]:
    """[(from so many tokens on, the mode that sends least)], the first from 0."""
    meets = {crossing(*pair) for pair in combinations(found.values(), 2)} - {None}
    starts, best = [0.0, *sorted(meets)], []
    for at, until in zip(starts, [*starts[1:], 2 * starts[-1] + 1], strict=True):
        now = min(found, key=lambda mode: found[mode].at((at + until) / 2))
        if not best or best[-1][1] != now:
            best.append((at, now))
    return best


def crossover(
    model: ModelSpec,
    tp: int = 64,
    *,
    tokens: tuple[int, int] = TOKENS,
    name: str = "",
) -> Chart:
    """Elements a rank sends for an MLP's two layers, forward and backward, over the tokens per
    micro-batch, in every mode; both axes logarithmic.

    tp      ranks; a mode that cannot be made of so many is left out
    tokens  (from, to)
    name    of the model, for the title

    ``table``: a row per mode and tokens, with the elements. Raises ValueError on counts and ranges
    that are none.
    """
    instance("model", model, ModelSpec, "a pl.ModelSpec(...)", "model description")
    whole("tp", tp, at_least=2)
    low, high = tokens
    whole("tokens[0]", low, at_least=1)
    whole("tokens[1]", high, at_least=low + 1)
    found, name = lines(model, tp), name or f"h={model.hidden:,}"
    best, looks = winners(found), theme.series(list(MODE_NAME.values()))
    grid = [low * (high / low) ** (n / POINTS) for n in range(POINTS + 1)]
    rows = [(tp, mode, at, line.at(at)) for mode, line in found.items() for at in grid]
    traces = []
    for mode in found:
        label, pairs = MODE_NAME[mode], [row[2:] for row in rows if row[1] == mode]
        said = [f"{label} on {tp} ranks, {at:,.0f} tokens: {n:,.0f} elements" for at, n in pairs]
        traces.append(curve(label, pairs, said, **looks[label]))
    marks, notes, shapes = _marks(found, best, (low, high))
    fig = figure(
        theme.text(_finding(name, best, tp, high)),
        "both layers, forward and backward, one micro-batch · counted, not run · circle "
        "and line: another mode sends least from here on · dot: a grid sends less than 1D",
        height=470,
        legend={"y": -0.2, "yanchor": "top"},
        xaxis=log_axis("tokens per micro-batch", low, high, ""),
        yaxis={"type": "log", "exponentformat": "SI", "dtick": 1}
        | {"title": {"text": "elements sent per rank"}},
    )
    return fig.draw([*traces, *marks], notes, shapes).explained(
        f"elements per rank of {name} on {tp} ranks, predicted: "
        f"{' | '.join(MODE_NAME[mode] for mode in found)}",
        ("tp mode tokens elements", rows),
    )


def _marks(
    found: dict[str, Line], best: list[tuple[float, str]], ends: tuple[int, int]
) -> tuple[list, list, list]:
    """A dotted line where the best mode changes, which is best between them; dots where a grid
    overtakes 1D: traces, notes, shapes.
    """
    look, (low, high) = theme.look(), ends
    traces, notes, shapes = [], [], []

    def dot(at: float, mode: str, does: str, **style: Any) -> None:
        said = [f"from {at:,.0f} tokens on {MODE_NAME[mode]} sends {does}"]
        style = {"mode": "markers", "showlegend": False, **style}
        traces.append(curve("", [(at, found[mode].at(at))], said, **style))

    for mode, line in found.items():
        at = crossing(found["1d"], line)
        if mode != "1d" and at is not None and low < at < high:
            dot(at, mode, "less than 1D", ink=look.ink, size=7)
    for (at, mode), until in zip(best, [*(start for start, _ in best[1:]), high], strict=True):
        left, right = max(at, low), min(until, high)
        if left >= right:
            continue
        if at > low:
            shapes.append(upright(at, dash="dot", width=1.5, ink=look.faint))
            edge = {"line": {"width": 2.5, "color": look.ink}}
            dot(at, mode, "least", ink=look.paper, size=11, marker=edge)
        word = f"<b>{MODE_NAME[mode]}</b>" + (f"<br>from {_round(at)}" if at > low else "")
        where = {"axes": ("x", "y domain"), "hold": "bottom", "bgcolor": look.paper}
        notes.append(note(word, (math.log10(left) + math.log10(right)) / 2, 0.02, **where))
    return traces, notes, shapes


def _finding(name: str, best: list[tuple[float, str]], tp: int, high: int) -> str:
    """Who sends least, from how many tokens on."""
    steps = [(at, MODE_NAME[mode]) for at, mode in best if at < high]
    said = f"{name}, MLP on {tp} ranks: {steps[0][1]} sends least"
    if len(steps) == 1:
        return f"{said}, whatever the tokens"
    said += f" up to {_round(steps[1][0])} tokens, then {steps[1][1]}"
    return said + "".join(f", from {_round(at)} on {mode}" for at, mode in steps[2:])


def _round(tokens: float) -> str:
    """Three digits: 3,080 or 236,000."""
    return f"{float(f'{tokens:.3g}'):,.0f}"
