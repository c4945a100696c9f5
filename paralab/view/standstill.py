"""A schedule that deadlocks, drawn as far as it gets: where each rank stops, and what it needs.

Every rank works until something that it needs can never arrive. The actions done until then are
drawn as boxes; each stuck rank is labelled with the action at which it stopped and what that needs.
Followed from rank to rank, the needs form a cycle (theory/schedule_check.py names it). Lab 04's
clinic shows this picture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from paralab.parallel.lowering import UNITS
from paralab.parallel.schedules import Action
from paralab.report.tables import Tables
from paralab.theory.order import F, walk
from paralab.theory.pipeline import Simulation
from paralab.theory.schedule_check import checked, standing
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.marks import note

SECONDS = 10e-3 * np.array(UNITS)  # of F, B, I, W
ROOM = 0.8  # room for the labels of stuck ranks, as a share of the time that ranks worked


def stuck(schedule: Sequence[Sequence[Action | str]], *, name: str = "schedule") -> Chart:
    """How far a schedule gets; F = 10 ms, B = 20 ms, I = W = 10 ms, links free.

    Raises ``ValueError`` if the lists are wrong in another way: an action is missing,
    there twice, on the wrong rank, or before one that it needs on its own rank.
    """
    from paralab.view.timeline import timeline

    lists, order = checked(schedule)
    start, end = map(np.array, walk(order, SECONDS[order.kind]))
    done, stand = np.isfinite(end), standing(order, end)
    start[~done] = end[~done] = 0.0
    report, until = _so_far(Simulation(lists, order, start, end).report(name), done, stand)
    chart = timeline(report, ideal=False)
    finding = f"{theme.text(name)}: all {len(done)} actions are done, and no rank is stuck"
    if stand:
        finding = f"{theme.text(name)}: after {sum(done)} of {len(done)} actions "
        finding += f"{len(stand)} of {order.ranks} ranks wait for ever"
    below = "F = 10 ms, B = 20 ms, I = W = 10 ms, links take no time"
    below += " · a rank's later stages are paler" * (order.stages > order.ranks)
    chart.retitled(finding, below)
    chart.layout.annotations, chart.layout.shapes = (), ()
    rows = dict(zip(chart.layout.yaxis.ticktext, chart.layout.yaxis.tickvals, strict=True))
    box = {"anchor": "left", "xshift": 4, "above": True, "borderpad": 2}
    notes = []
    for rank, node in stand.items():
        action, need = map(order.action, (node, order.source[node]))
        label = f"<b>{action}</b> needs <b>{need}</b> of rank {order.rank[order.source[node]]}"
        notes.append(note(label, 1e3 * until[rank], rows[f"<b>rank {rank}</b>"], **box))
    for trace in chart.data:
        if stand and trace.name.startswith("waiting"):
            trace.name = "waiting; for ever where labelled"
    chart.layout.xaxis.title.text = "time (ms)"
    return chart.draw([], notes)


def _so_far(
    report: Tables, done: np.ndarray, standing: Iterable[int]
) -> tuple[Tables, dict[int, float]]:
    """The report of the actions done, with waits of the stuck ranks; {rank: start of its wait}."""
    spans = report.spans[done]
    until = spans.groupby("rank")["end"].max().reindex(list(standing), fill_value=0.0).to_dict()
    worked = float(spans["end"].max()) if len(spans) else SECONDS[F]
    horizon = worked * (1 + ROOM if until else 1)
    blank = report.spans.iloc[0].to_dict() | {"kind": "wait", "microbatch": -1, "cost": 0.0}
    blank |= {"after": (), "end": horizon}
    waits = [
        blank | {"id": len(done) + rank, "rank": rank, "start": at} for rank, at in until.items()
    ]
    if waits:
        spans = pd.concat([spans, pd.DataFrame(waits)], ignore_index=True)
    return dataclasses.replace(report, spans=spans, steps=report.steps.assign(end=horizon)), until
