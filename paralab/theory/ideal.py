"""The bubble that a pipeline's schedule causes by itself, with links that cost nothing.

The ideal of a report is its order of work with its typical costs, simulated without communication
(theory/pipeline.py). Further idle time in a run comes from links, from uneven costs and from what
the ranks share. Three numbers say how large a bubble is:

    formula     balanced stages, free links: (p-1)/(m+p-1) of device time for GPipe and 1F1B
    simulated   this schedule with this report's median cost of every (stage, kind), free links
    replayed    the recorded order, costs and messages on one virtual device per rank

All three are the idle share of device time, 1 - sum(compute) / (p T). Papers often divide the idle
time by the ideal time instead (PTD-P, Narayanan+ 2021, arXiv:2104.04473, sec. 2.2): "bubble over
ideal" here. Where the share of device time is x, it is x / (1 - x).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.checks import instance
from paralab.parallel.schedules import SCHEDULES, Action
from paralab.report import facts, metrics
from paralab.report.tables import COMPUTE_KINDS, Tables, letters
from paralab.spec import Cluster
from paralab.theory.replay import replay

if TYPE_CHECKING:
    import pandas as pd

    from paralab.theory.pipeline import Simulation

NAN = float("nan")


def schedule_of(report: Tables, *, step: int | None = None) -> list[list[Action]]:
    """The schedule of the report, read from the spans of one step: a list of actions per rank.

    step  default: the typical step

    Of several data-parallel pipelines the first is read, as all follow the same schedule.
    """
    step = metrics.chosen_step(report, step)
    spans = _compute(report)
    spans = spans[spans["step"] == step].sort_values("id")
    schedule = [{} for _ in range(report.plan.pp)]
    columns = (spans[name].tolist() for name in ("rank", "stage", "microbatch"))
    for letter, rank, stage, microbatch in zip(letters(spans), *columns, strict=True):
        pp_index, *pipeline = report.plan.place(rank)
        if not any(pipeline):  # dict keys: a backward that messages cut into pieces is one action
            schedule[pp_index][Action(stage, letter, microbatch)] = None
    return [list(actions) for actions in schedule]


def stage_costs(report: Tables) -> dict[str, list[float]]:
    """{kind: seconds per stage}: the median cost of one micro-batch over the measured steps.

    Costs are in CPU or device time, so ranks that share cores do not stretch one another's. The
    cost is 0.0 for a kind that a stage does not have. In a stage with weight halves, "backward" is
    the input half, and backwards that were not split are left out.
    """
    spans = _compute(report)
    spans = spans[spans["step"].isin(facts.measured_steps(report))]
    split = spans["stage"].isin(spans["stage"][spans["kind"] == "weight_grad"])
    spans = spans[~(split & (letters(spans) == "B"))]
    stages = 1 + int(spans["stage"].max()) if len(spans) else 1
    action = ["kind", "stage", "rank", "step", "microbatch"]  # the spans of one action add up
    typical = spans.groupby(action)["cost"].sum().groupby(action[:2]).median().to_dict()
    return {
        kind: [typical.get((kind, stage), 0.0) for stage in range(stages)] for kind in COMPUTE_KINDS
    }


def ideal(report: Tables, *, step: int | None = None) -> Simulation:
    """The report's schedule with its own median costs, on devices with links that cost nothing."""
    from paralab.theory.pipeline import simulate

    return simulate(schedule_of(report, step=step), **stage_costs(report))


def formula(report: Tables) -> float:
    """`bubble_formula` with the report's median costs, averaged over the ranks; NaN for a schedule
    of the user's own.
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
    """A table of the bubble by formula, by simulation, and in the report.

    cluster  the cluster on whose links a measured report is replayed; default as in
             ``report.replay``

    Rows: "bubble" (idle over device time) and "bubble over ideal" (idle over ideal time, which for
    GPipe and 1F1B is the papers' (p-1)/m). Columns: "formula", "simulated", for a measured report
    "replayed", and last the report's clock. The first two are NaN for an observed program and for a
    traced function, whose schedules are not known, and the formula also for a schedule of the
    user's own.
    """
    import pandas as pd

    instance("cluster", cluster, Cluster | None, "a pl.Cluster(...) or None")
    shares = {"formula": NAN, "simulated": NAN}
    if "observed" not in report.meta and len(_compute(report)):
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
