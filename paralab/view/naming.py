"""What figures call things: a plan, a schedule, the subject of a report, the clock it is on.

As the papers name them, and as short as tells two plans apart; plain text, for a table too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from paralab.report.tables import Tables
from paralab.spec import OWN_FORM, Plan
from paralab.view.theme import CATEGORY_COLOUR

_SEPARATORS = re.compile(", | on ")
LEVEL_NAME = {"intra": "inside a node", "inter": "between nodes"}
CLOCK_MEANS = {
    "measured": "wall clock",
    "replayed": "measured compute on one virtual device per rank, modelled links",
    "predicted": "theory alone",
    "dry run": "no times, only what happens in which order",
}
CLOCK_BRIEF = {**CLOCK_MEANS, "replayed": "one virtual device per rank"}
SCHEDULE_NAME = {
    "naive": "naive pipeline",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "l2l": "layer relay",
}


def schedule_name(plan: Plan) -> str:
    """The plan's schedule as the papers call it; of a function of one's own its name."""
    if callable(plan.schedule):
        return getattr(plan.schedule, "__name__", "own schedule")
    return SCHEDULE_NAME.get(plan.schedule, plan.schedule.removeprefix(OWN_FORM))


def plan_name(plan: Plan) -> str:
    """ "dp=4, overlapped" or "1F1B, p=4, m=8": the degrees, and how the ranks work together."""
    form = plan.grad_sync_name.removeprefix(OWN_FORM)
    if plan.zero_stage:
        form = f"ZeRO-{plan.zero_stage}"
        form += f" in groups of {plan.shard_degree}" * (plan.shard_degree < plan.dp)
    sharded = plan.tiers is not None and plan.tiers.states  # ZeRO's states, on one rank too
    copies = ["one device" if plan.world_size == 1 else f"dp={plan.dp}"] + [form] * (
        plan.dp > 1 or sharded
    )
    if plan.tp > 1:
        copies = [plan.tp_name, *copies * (plan.dp > 1)]
    if plan.relays:
        copies += [schedule_name(plan), f"m={plan.microbatches}"]
    if plan.pp == 1:
        return ", ".join(copies + _away(plan))
    name = [schedule_name(plan), f"p={plan.pp}", f"m={plan.microbatches}"]
    name += [f"v={plan.virtual_stages}"] * (plan.virtual_stages > 1)
    return ", ".join(name + copies * (plan.dp > 1 or plan.tp > 1) + _away(plan))


def _away(plan: Plan) -> list[str]:
    """ "offload to nvme", "activations to cpu": what left the device; else empty."""
    tiers = plan.tiers
    kept = {name: getattr(tiers, name, "device") for name in CATEGORY_COLOUR}
    found = {name: place for name, place in kept.items() if place != "device"}
    if not found:
        return []
    places = " and ".join(place for place in ("cpu", "nvme") if place in found.values())
    said = next(iter(found)) if len(found) == 1 else "offload"
    said += f" to {plan.offload if isinstance(plan.offload, str) else places}"
    return [said + ", delayed" * tiers.delayed]


def subject(report: Tables) -> str:
    """What a report is about, as plain text: its plan, or the function that was traced."""
    if report.model is not None:
        return plan_name(report.plan)
    n = report.world_size
    return f"{report.meta.get('function', 'function')} on {n} rank{'s' * (n != 1)}"


def shared_cores(report: Tables) -> int:
    """How many cores the ranks of a run had, if they were fewer than the ranks; else 0."""
    cores = report.meta.get("cores")
    few = report.clock == "measured" and isinstance(cores, int) and cores < report.world_size
    return cores if few else 0


def clock_line(report: Tables, *more: str) -> str:
    """The second line of every title: which clock, then what else."""
    return " · ".join([f"{report.clock} clock ({CLOCK_MEANS[report.clock]})", *more])


def clock_lines(clocks: Iterable[str]) -> list[str]:
    """ "measured: wall clock" of each clock, once."""
    return [f"{clock}: {CLOCK_BRIEF[clock]}" for clock in dict.fromkeys(clocks)]


def told_apart(subjects: list[str]) -> list[str]:
    """The names without the parts all of them have: "ring" of "ring on 4 ranks"."""
    shared = common(subjects)
    shorter = [
        ", ".join(p for p in _SEPARATORS.split(mine) if p not in shared) for mine in subjects
    ]
    return shorter if all(shorter) else subjects


def common(subjects: list[str]) -> list[str]:
    """The parts that all of the names have."""
    parts = [_SEPARATORS.split(subject) for subject in subjects]
    return [part for part in parts[0] if all(part in other for other in parts[1:])]


def apart(reports: Sequence[Tables]) -> list[str]:
    """The shortest names that tell the reports apart: subject, clock, both, or those numbered."""
    subjects = told_apart([subject(report) for report in reports])
    clocks = [report.clock for report in reports]
    both = [f"{s}, {c}" for s, c in zip(subjects, clocks, strict=True)]
    for names in (clocks, subjects, both):
        if len(set(names)) == len(reports) and (names is not clocks or len(set(subjects)) == 1):
            return names
    return [f"{i}: {name}" for i, name in enumerate(both, 1)]
