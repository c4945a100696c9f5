"""The ideal beneath a real pipeline: what its schedule costs even where links are free.

A report knows what every rank computed, in which order, and what that cost. The same order and the
typical costs, simulated without communication (theory/pipeline.py), are the ideal: what is idle
there is the schedule's own bubble, and what a run shows beyond it comes from links, from uneven
costs and from whatever ranks share. `bubbles` has both, and what a formula says, as the idle share
of device time, 1 - sum(compute) / (p T). The papers often write the idle time over the ideal time,
(p-1)/m (PTD-P, Narayanan+ 2021, arXiv:2104.04473, sec. 2.2): the same bubble over a smaller whole,
named `bubble over ideal` here. One is x, the other x / (1 - x).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.parallel.schedules import SCHEDULES, Action
from paralab.report import about, metrics
from paralab.report.tables import COMPUTE_KINDS, Tables, letters
from paralab.spec import Cluster
from paralab.theory.replay import replay

if TYPE_CHECKING:
    import pandas as pd

    from paralab.theory.pipeline import Simulation

NAN = float("nan")


def schedule_of(report: Tables, *, step: int | None = None) -> list[list[Action]]:
    """What every rank of one pipeline computed in ``step``, in order: the schedule, read off spans.

    step  default: the typical one. Of several pipelines the first is read; all
    follow the same schedule.
    """
    step = metrics.chosen_step(report, step)
    spans = _compute(report)
    spans = spans[spans["step"] == step].sort_values("id")
    found: list[dict[Action, None]] = [{} for _ in range(report.plan.pp)]
    columns = (spans[name].tolist() for name in ("rank", "stage", "microbatch"))
    for letter, rank, stage, microbatch in zip(letters(spans), *columns, strict=True):
        pp_index, *pipeline = report.plan.place(rank)
        if not any(pipeline):  # a backward that messages cut into pieces is one action
            found[pp_index][Action(stage, letter, microbatch)] = None
    return [list(actions) for actions in found]


def stage_costs(report: Tables) -> dict[str, list[float]]:
    """{kind: seconds per stage}: the median cost of one micro-batch over the steps that count.

    What is measured by the processor's or device's own clock, so that ranks which share cores do
    not stretch one another's costs. 0.0 where a stage has no such kind. Where a stage has weight
    halves, "backward" is the input half: backwards that it makes whole are left out.
    """
    spans = _compute(report)
    spans = spans[spans["step"].isin(about.measured_steps(report))]
    split = spans["stage"].isin(spans["stage"][spans["kind"] == "weight_grad"])
    spans = spans[~(split & (letters(spans) == "B"))]
    stages = 1 + int(spans["stage"].max()) if len(spans) else 1
    action = ["kind", "stage", "rank", "step", "microbatch"]  # its pieces add up
    typical = spans.groupby(action)["cost"].sum().groupby(action[:2]).median().to_dict()
    return {
        kind: [typical.get((kind, stage), 0.0) for stage in range(stages)] for kind in COMPUTE_KINDS
    }


def ideal(report: Tables, *, step: int | None = None) -> Simulation:
    """The report's schedule with its own median costs, on devices with links that cost nothing."""
    from paralab.theory.pipeline import simulate

    return simulate(schedule_of(report, step=step), **stage_costs(report))


def formula(report: Tables) -> float:
    """The textbook's bubble of the report's schedule; NaN for a schedule of the user's own.

    Balanced stages and free links; F, B and W are the medians of this report, mean over ranks.
    """
    from paralab.theory.pipeline import bubble_formula

    plan = report.plan
    if plan.relays:  # one rank, which waits for no other
        return 0.0
    if plan.schedule_name not in SCHEDULES:
        return NAN
    costs, sizes = stage_costs(report), (plan.pp, plan.microbatches, plan.virtual_stages)
    of_rank = (sum(costs[kind]) / plan.pp for kind in COMPUTE_KINDS)
    return bubble_formula(plan.schedule, *sizes, *of_rank)


def bubbles(report: Tables, cluster: Cluster | None = None) -> pd.DataFrame:
    """Formula, simulated, and what the report says, side by side.

    cluster  whose links a measured report is replayed on; default as in ``report.replay``

    Rows: "bubble" (idle over device time, by the formula (p-1)/(m+p-1) for GPipe and 1F1B) and
    "bubble over ideal" (idle over ideal time, for these (p-1)/m). Columns: formula (`formula`),
    simulated (`ideal`), then the report's clock; for a measured report replayed before measured.
    NaN where there is no such number: the schedule of an observed program is not known.
    """
    import pandas as pd

    shares = {"formula": NAN, "simulated": NAN}
    if "observed" not in report.meta:
        shares = {"formula": formula(report), "simulated": ideal(report).bubble_rate}
    if report.clock == "measured":
        shares["replayed"] = metrics.bubble(replay(report, cluster))
    shares[report.clock] = metrics.bubble(report)
    over = {name: x / (1 - x) if x < 1 else NAN for name, x in shares.items()}
    rows = pd.Index(["bubble", "bubble over ideal"], name="share")
    return pd.DataFrame([shares, over], index=rows)


def _compute(report: Tables) -> pd.DataFrame:
    spans = report.spans
    return spans[(spans["lane"] == "compute") & spans["kind"].isin(COMPUTE_KINDS)]
