"""Names for figures: of a plan, of a schedule, of the subject of a report and of its clock.

The names are those of the papers, as short as possible while two plans still have different names.
They are plain text, so tables use them too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from paralab.checks import count_of, illegal
from paralab.report.tables import Tables
from paralab.spec import OWN_FORM, Cluster, Plan
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
KIND_NAME = {"wait": "waiting", "weight_grad": "backward, weight half"}  # as a figure says it
CATEGORY_NAME = {"optimizer": "optimizer states", "other": "other tensors"}


def category_name(category: str) -> str:
    """The category of memory in words."""
    return CATEGORY_NAME.get(category, category)


def kind_name(kind: str) -> str:
    """The kind of a span in words."""
    return KIND_NAME.get(kind, kind)


def schedule_name(plan: Plan) -> str:
    """The plan's schedule as the papers call it; if it is the user's function, that one's name."""
    name = plan.schedule_name
    return SCHEDULE_NAME.get(name, name.removeprefix(OWN_FORM))


def plan_name(plan: Plan) -> str:
    """ "dp=4, overlapped" or "1F1B, p=4, m=8": the degrees, and how the ranks work together."""
    form = plan.grad_sync_name.removeprefix(OWN_FORM)
    if plan.zero_stage:
        form = f"ZeRO-{plan.zero_stage}"
        form += f" in groups of {plan.shard_degree}" * (plan.shard_degree < plan.dp)
        form += f" with hpZ in groups of {plan.secondary_shard}" * bool(plan.secondary_shard)
    sharded = plan.tiers is not None and plan.tiers.states  # offloaded ZeRO states: on one rank too
    copies = ["one device" if plan.world_size == 1 else f"dp={plan.dp}"] + [form] * (
        plan.dp > 1 or sharded
    )
    if plan.tp > 1:
        copies = [plan.tp_name, *copies * (plan.dp > 1)]
    if plan.relays:
        copies += [schedule_name(plan), f"m={plan.microbatches}"]
    if plan.pp == 1:
        return ", ".join(copies + _off_device(plan))
    name = [schedule_name(plan), f"p={plan.pp}", f"m={plan.microbatches}"]
    name += [f"v={plan.virtual_stages}"] * (plan.virtual_stages > 1)
    return ", ".join(name + copies * (plan.dp > 1 or plan.tp > 1) + _off_device(plan))


def _off_device(plan: Plan) -> list[str]:
    """["offload to nvme"], ["activations to cpu"]: what is off the device; [] if nothing is."""
    tiers = plan.tiers
    place_of = {name: getattr(tiers, name, "device") for name in CATEGORY_COLOUR}
    moved = {name: place for name, place in place_of.items() if place != "device"}
    if not moved:
        return []
    places = " and ".join(place for place in ("cpu", "nvme") if place in moved.values())
    said = next(iter(moved)) if len(moved) == 1 else "offload"
    said += f" to {plan.offload if isinstance(plan.offload, str) else places}"
    return [said + ", delayed" * tiers.delayed]


def subject(report: Tables) -> str:
    """The subject of a report, as plain text: its plan, or the function that was traced."""
    if report.model is not None:
        return plan_name(report.plan)
    n = report.world_size
    return f"{report.meta.get('function', 'function')} on {count_of(n, 'rank')}"


def cluster_name(cluster: Cluster) -> str:
    """ "cluster dgx-a100"; one that has only the default name is "the stated cluster"."""
    return f"cluster {cluster.name}" if cluster.name != Cluster.name else "the stated cluster"


def clock_line(report: Tables, *more: str) -> str:
    """The second line of a title: the report's clock, then the other remarks."""
    return " · ".join([f"{report.clock} clock ({CLOCK_MEANS[report.clock]})", *more])


def clock_lines(clocks: Iterable[str]) -> list[str]:
    """ "measured: wall clock" and the like, once for each clock."""
    return [f"{clock}: {CLOCK_BRIEF[clock]}" for clock in dict.fromkeys(clocks)]


def labelled(name: str, value: Any, legal: str) -> Mapping[Any, Any]:
    """``value`` if it is a mapping of labels with something to draw, or the refusal."""
    if not isinstance(value, Mapping) or not value:
        raise illegal(name, value, "nothing to draw", legal)
    return value


def given(labels: Any, sources: Sequence[Any], noun: str) -> list[str]:
    """The user's labels as texts; refused unless there is one for each source, called ``noun``."""
    listed = isinstance(labels, Collection) and not isinstance(labels, str)
    if not listed or len(labels) != len(sources):
        why = f"the number of {noun} is {len(sources)}" if listed else "not a list"
        raise illegal("labels", labels, why, "a list with one label for each")
    return list(map(str, labels))


def told_apart(subjects: list[str]) -> list[str]:
    """The names without the parts that all share: "ring" for "ring on 4 ranks"."""
    shared = common(subjects)
    shorter = [
        ", ".join(p for p in _SEPARATORS.split(name) if p not in shared) for name in subjects
    ]
    return shorter if all(shorter) else subjects


def common(subjects: list[str]) -> list[str]:
    """The parts that all of the names share."""
    parts = [_SEPARATORS.split(subject) for subject in subjects]
    return [part for part in parts[0] if all(part in other for other in parts[1:])]


def settings_apart(reports: Sequence[Tables]) -> list[str]:
    """The settings of model and plan that differ, as "recompute=full"; "" if none does."""
    every = [{**(r.model and r.model.to_dict() or {}), **r.plan.to_dict()} for r in reports]
    for one in every:
        if isinstance(places := one["offload"], dict):  # as it was given, without the defaults
            one["offload"] = {k: v for k, v in places.items() if v and v != "device"}
    names = [name for name in every[0] if any(one.get(name) != every[0][name] for one in every)]
    return [", ".join(f"{name}={one.get(name)}" for name in names) for one in every]


def apart(reports: Sequence[Tables]) -> list[str]:
    """The shortest names that differ for all reports: clock, subject, settings, subject and clock,
    or these numbered.
    """
    subjects = told_apart([subject(report) for report in reports])
    clocks = [report.clock for report in reports]
    both = [f"{s}, {c}" for s, c in zip(subjects, clocks, strict=True)]
    # A plan's name does not say all of its settings.
    settings = [settings_apart(reports)] * (len(set(subjects)) < len(reports))
    for names in (*settings, *[clocks] * (len(set(subjects)) == 1), subjects, both):
        if any(names) and len(set(names)) == len(reports):
            return names
    return [f"{i}: {name}" for i, name in enumerate(both, 1)]
