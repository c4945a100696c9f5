"""The loss over steps, beside what guessing every token alike would cost, ln V."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paralab.view import theme

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from paralab.report import Report

LOSS_COLOUR = "#0072B2"


def loss_chart(report: Report) -> go.Figure:
    """Loss (nats per token, mean over the global batch) against the step.

    Raises ValueError if there are no losses: a prediction has none.
    """
    if not report.losses:
        raise ValueError(f"this report is {report.clock} and has no losses; pl.run(...) has them")
    losses = list(report.losses)
    first, last, count = losses[0], losses[-1], len(losses)
    moved = "fell" if last < first else "did not fall:"
    title = f"Loss {moved} from {first:.3f} to {last:.3f} in {count} steps"
    if count == 1:
        title = f"Loss of the first step: {first:.3f}"
    if not all(map(math.isfinite, losses)):
        title = (
            f"Loss diverged at step {next(i for i, v in enumerate(losses) if not math.isfinite(v))}"
        )
    fig = theme.figure(
        f"{theme.plan_name(report.plan)}: {title[0].lower()}{title[1:]}",
        theme.clock_line(report, f"{report.plan.global_batch} samples per step"),
        height=380,
    )
    guess = math.log(report.model.vocab)
    fig.add_scatter(
        name="loss", x=list(range(count)), y=[v if math.isfinite(v) else None for v in losses],
        mode="lines+markers", line={"color": LOSS_COLOUR, "width": 2}, marker={"size": 7},
        hovertemplate="step %{x}: %{y:.4f} nats<extra></extra>", showlegend=False,
    )  # fmt: skip
    fig.add_hline(y=guess, line={"dash": "dash", "width": 1.5, "color": theme.FAINT})
    fig.add_annotation(
        xref="paper", x=1, y=guess, text=f"guessing evenly: ln {report.model.vocab} = {guess:.3f}",
        showarrow=False, xanchor="right", yanchor="bottom", font={"color": theme.FAINT},
    )  # fmt: skip
    fig.update_layout(
        xaxis={"title": {"text": "step"}, "tickformat": "d",
               "range": [-0.02 * count - 0.1, 1.02 * count - 0.9],
               **({"dtick": 1} if count <= 12 else {})},
        yaxis={"title": {"text": "loss (nats per token)"}, "tickformat": ".2f"},
    )  # fmt: skip
    return fig
