"""The loss over steps, of one run or several, with the loss of equally likely tokens as a line.

Curves that coincide are the best proof that plans train the same, and the hardest to draw: their
lines become narrower from the first to the last, so that each is visible behind the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paralab.checks import count_of, instance
from paralab.report.tables import Tables
from paralab.view import naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import line, note
from paralab.view.marks.curves import curve

ALIKE = 1e-3  # nats: curves that are closer than that at every step are said to coincide


def loss_chart(report: Tables) -> Chart:
    """The loss over the steps: nats per token, mean over the global batch; for an observed program,
    the loss that it computes.

    Raises ValueError on a report without losses, as that of a prediction or a traced function.
    """
    return losses({naming.subject(report): report})


def losses(runs: Mapping[str, Tables | Sequence[float]], *, title: str | None = None) -> Chart:
    """The losses of several runs in one figure, {label: report or its losses}.

    title  replaces the finding, which is made from the curves

    Raises ValueError without runs, and on a run that has no losses, which it names.
    """
    naming.labelled("runs", runs, "{label: report}")
    curves = {str(label): _values(str(label), run) for label, run in runs.items()}
    of_models = [run for run in runs.values() if getattr(run, "model", None) is not None]
    vocabularies = {report.model.vocab for report in of_models}
    batches = {report.plan.global_batch for report in of_models}
    same = len(batches) == 1 and len(of_models) == len(runs)
    # Observed programs may have any loss.
    nats = bool(of_models) or not any(hasattr(run, "clock") for run in runs.values())
    several, spread = len(curves) > 1, _spread(list(curves.values()))
    alike = several and spread <= ALIKE
    style, faint = theme.series(list(curves)), theme.look().faint
    traces, notes, shapes = [], [], []
    for i, (label, values) in enumerate(curves.items()):
        width = max(2.0, 2.5 * len(curves) - 3.0 * i) if alike else 2.2
        pairs = [(at, v if math.isfinite(v) else None) for at, v in enumerate(values)]
        name = theme.text(label)
        texts = [f"{name}, step {at}: {v:.4f}{' nats' * nats}" for at, v in enumerate(values)]
        look = {"mode": "lines+markers", "showlegend": several, **style[label]}
        traces.append(curve(label, pairs, texts, width=width, size=4 + 1.5 * width, **look))
    for vocab in vocabularies:
        guess = math.log(vocab)
        label = f"every token equally likely: ln {vocab} = {guess:.3f}"
        at = {"axes": ("paper", "y"), "anchor": "right bottom"}
        notes.append(note(label, 1, guess, ink=faint, **at))
        shapes.append(line((0, 1), (guess, guess), dash="dash", width=1.5, ink=faint, xref="paper"))
    count = max(map(len, curves.values()))
    steps = {"title": "step", "tickformat": "d", "dtick": 1 if count <= 12 else None}
    steps |= {"range": [-0.02 * count - 0.1, 1.02 * count - 0.9]}
    below = f"{count_of(batches.pop(), 'sample')} per step" if same else "nats per token" * nats
    fig = figure(
        _verdict(curves, spread, nats),
        below,
        height=400,
        xaxis=steps,
        yaxis={"title": "loss" + " (nats per token)" * nats},
    )
    fig.titled(title).draw(traces, notes, shapes)
    rows = [(label, step, v) for label, values in curves.items() for step, v in enumerate(values)]
    return fig.tabled(("run step loss", rows))


def _values(label: str, run: Any) -> list[float]:
    legal = "a report or a list of losses"
    losses = instance(f"runs[{label!r}]", getattr(run, "losses", run), Iterable, legal, "run")
    values = [float(v) for v in losses]
    if not values:
        raise ValueError(f"{label} has no losses; legal: what pl.run(...) returned")
    return values


def _spread(curves: Sequence[Sequence[float]]) -> float:
    """The largest difference between two curves at one step; infinite if their numbers of steps
    differ or a loss is not finite.
    """
    if len(set(map(len, curves))) > 1 or not np.isfinite(curves).all():
        return math.inf
    return float(np.ptp(curves, axis=0).max())


def _verdict(curves: Mapping[str, Sequence[float]], spread: float, nats: bool) -> str:
    curves = {theme.text(label): values for label, values in curves.items()}
    lost = [
        f"{label} diverged at step {[*map(math.isfinite, values)].index(False)}"
        for label, values in curves.items()
        if not all(map(math.isfinite, values))
    ]
    if lost:
        return theme.listed(lost)
    ends = sorted((last, label) for label, (*_, last) in curves.items())
    (low, best), (high, worst) = ends[0], ends[-1]
    if len(curves) == 1:
        first, steps = curves[best][0], count_of(len(curves[best]), "step")
        verb = "fell" if low < first else "went"
        return f"{best}: the loss {verb} from {first:.3f} to {low:.3f} in {steps}"
    if spread <= ALIKE:  # rounded up to a power of ten, which is the same when a cell runs again
        bound = 10.0 ** math.ceil(math.log10(spread)) if spread else 0
        return f"All curves coincide: their losses differ by at most {bound:g}"
    return f"{best} ends at {low:.3f}, {worst} at {high:.3f}{' nats' * nats}"
