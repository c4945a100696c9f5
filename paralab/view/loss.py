"""The loss over steps, of one run or of several, beside what guessing every token alike costs.

Several curves that coincide are the best proof a plan can give, and the hardest to draw: they are
drawn from wide to narrow, so that each still shows behind the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paralab.checks import illegal
from paralab.view import naming, theme

if TYPE_CHECKING:
    from paralab.report.tables import Tables
    from paralab.view.chart import Chart

ALIKE = 1e-3  # nats: curves nearer than that everywhere are one curve to the eye


def loss_chart(report: Tables) -> Chart:
    """Loss (nats per token, mean over the global batch) against the step.

    Raises ValueError if there are no losses: a prediction or a traced function has none.
    """
    values = _values(naming.subject(report), report)
    first, last, count = values[0], values[-1], len(values)
    moved = "fell" if last < first else "did not fall:"
    title = f"loss {moved} from {first:.3f} to {last:.3f} in {count} steps"
    if count == 1:
        title = f"loss of the first step: {first:.3f}"
    if not all(map(math.isfinite, values)):
        title = f"loss diverged at step {_diverged(values)}"
    name = naming.subject(report)
    fig = theme.figure(
        f"{theme.text(name)}: {title}",
        naming.clock_line(report, f"{report.plan.global_batch} samples per step"),
        height=380,
    )
    _curve(fig, "loss", values, {**theme.series(["loss"])["loss"], "width": 2.0}, legend=False)
    _axes(fig, count, report.model.vocab)
    return fig.explained(f"loss of {name}, {report.clock}: {count} steps", _table({name: values}))


def losses(runs: Mapping[str, Tables | Sequence[float]], *, title: str | None = None) -> Chart:
    """The losses of several runs in one figure, {label: report or its losses}.

    title  in place of the finding that the curves themselves give

    Raises ValueError if there are none, or naming the run that has no losses.
    """
    if not isinstance(runs, Mapping) or not runs:
        raise illegal("runs", runs, "nothing to draw", "{label: report}")
    curves = {str(label): _values(str(label), run) for label, run in runs.items()}
    reports = [run for run in runs.values() if hasattr(run, "clock")]
    vocabularies = {r.model.vocab for r in reports if r.model is not None}
    lines = [naming.clock_line(reports[0])] if len({r.clock for r in reports}) == 1 else []
    batches = {r.plan.global_batch for r in reports}
    if len(batches) == 1 and len(reports) == len(runs):
        lines.append(f"{batches.pop()} samples per step")
    finding = _verdict(curves) if title is None else theme.text(title)
    fig = theme.figure(finding, " · ".join(lines or ["nats per token"]), height=420)
    style = theme.series(list(curves))
    widest = 2.5 * len(curves)
    for i, (label, values) in enumerate(curves.items()):
        width = max(2.0, widest - 3.0 * i) if _alike(curves) else 2.2
        _curve(fig, label, values, {**style[label], "width": width}, legend=len(curves) > 1)
    _axes(fig, max(map(len, curves.values())), *vocabularies)
    fig.update_layout(legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0})
    steps = max(map(len, curves.values()))
    return fig.explained(
        f"losses of {len(curves)} runs over {steps} steps: {' | '.join(curves)}", _table(curves)
    )


def _values(label: str, run: Any) -> list[float]:
    values = [float(v) for v in (run.losses if hasattr(run, "losses") else run)]
    if not values:
        kind = f"is {run.clock} and" if hasattr(run, "clock") else ""
        raise ValueError(
            f"{label}: this report {kind} has no losses; legal: what pl.run(...) returned"
        )
    return values


def _diverged(values: Sequence[float]) -> int:
    return next(i for i, v in enumerate(values) if not math.isfinite(v))


def _alike(curves: Mapping[str, Sequence[float]]) -> bool:
    return len({len(v) for v in curves.values()}) == 1 and _spread(curves) <= ALIKE


def _spread(curves: Mapping[str, Sequence[float]]) -> float:
    """Largest difference between two curves at one step; infinite where one is not finite."""
    columns = list(zip(*curves.values(), strict=False))
    if not all(math.isfinite(v) for column in columns for v in column):
        return math.inf
    return max(max(column) - min(column) for column in columns)


def _verdict(curves: Mapping[str, Sequence[float]]) -> str:
    names = {label: theme.text(label) for label in curves}
    lost = [label for label, v in curves.items() if not all(map(math.isfinite, v))]
    if lost:
        return f"{names[lost[0]]} diverged at step {_diverged(curves[lost[0]])}"
    if len(curves) == 1:
        label, values = next(iter(curves.items()))
        return f"{names[label]}: loss went from {values[0]:.3f} to {values[-1]:.3f}"
    if _alike(curves):
        both = "Both curves" if len(curves) == 2 else f"All {len(curves)} curves"
        return f"{both} coincide: no loss differs by more than {_round_up(_spread(curves))}"
    best = min(curves, key=lambda label: curves[label][-1])
    worst = max(curves, key=lambda label: curves[label][-1])
    return (
        f"{names[best]} ends at {curves[best][-1]:.3f}, "
        f"{names[worst]} at {curves[worst][-1]:.3f} nats"
    )


def _round_up(value: float) -> str:
    """The next power of ten: a bound, which two runs of a cell agree on better than a figure."""
    return "nothing" if value <= 0 else f"{10.0 ** math.ceil(math.log10(value)):.0e}"


def _curve(
    fig: Chart, name: str, values: Sequence[float], style: Mapping[str, Any], *, legend: bool
) -> None:
    fig.add_scatter(
        name=theme.text(name),
        x=list(range(len(values))),
        y=[v if math.isfinite(v) else None for v in values],
        mode="lines+markers",
        line={"color": style["colour"], "width": style["width"], "dash": style["dash"]},
        marker={"size": 4 + 1.5 * style["width"], "symbol": style["symbol"]},
        showlegend=legend,
        hovertemplate=f"{theme.text(name)}, step %{{x}}: %{{y:.4f}} nats<extra></extra>",
    )


def _axes(fig: Chart, count: int, *vocabularies: int) -> None:
    for vocab in vocabularies:
        guess, faint = math.log(vocab), theme.look().faint
        fig.add_hline(y=guess, line={"dash": "dash", "width": 1.5, "color": faint})
        fig.add_annotation(
            xref="paper",
            x=1,
            y=guess,
            text=f"guessing evenly: ln {vocab} = {guess:.3f}",
            showarrow=False,
            xanchor="right",
            yanchor="bottom",
            font={"color": faint},
        )
    fig.update_layout(
        xaxis={
            "title": {"text": "step"},
            "tickformat": "d",
            "range": [-0.02 * count - 0.1, 1.02 * count - 0.9],
            **({"dtick": 1} if count <= 12 else {}),
        },
        yaxis={"title": {"text": "loss (nats per token)"}, "tickformat": ".2f"},
    )


def _table(curves: Mapping[str, Sequence[float]]) -> Any:
    import pandas as pd

    rows = [(label, step, v) for label, values in curves.items() for step, v in enumerate(values)]
    return pd.DataFrame(rows, columns=["run", "step", "loss"])
