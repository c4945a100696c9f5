"""The parts of `pl.explore`: its knobs, its table's columns, its timeline, its line of code.

widget_explore.py puts them together; nothing in this file predicts or runs anything.
"""

from __future__ import annotations

import html
import math
from dataclasses import fields
from typing import Any

from paralab.checks import count_of
from paralab.parallel.schedules import SCHEDULES
from paralab.report.amounts import peak, peak_memory, traffic
from paralab.report.facts import reported_ranks
from paralab.report.summary import utilisation
from paralab.report.tables import Tables
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.spec.cluster import CLUSTER_PRESETS
from paralab.spec.tiers import Offload
from paralab.view import naming, theme
from paralab.view.chart import Chart
from paralab.view.memory_chart import stage_of
from paralab.view.memory_curves import capacity
from paralab.view.sampling import spread
from paralab.view.stage_stretches import stage_time
from paralab.view.timeline import timeline
from paralab.view.widget_parts import (
    MUTED,
    Knob,
    buttons,
    counted,
    in_bytes,
    in_seconds,
    is_local,
    slider,
)
from paralab.view.widget_steps import Says

EACH, TALL, LOW = 520, 424, 340  # pixels of a view: width; height in the upper and the lower row
BOXES = 320  # of a timeline, about
FEW = 4  # stages whose boxes must be among those, or stretches are drawn instead
COUNTS = {  # {knob: (label, which ends with the knob's symbol; offered values)}
    "dp": ("data, dp", (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512)),
    "tp": ("tensor, tp", (1, 2, 4, 8, 16)),
    "pp": ("pipeline, pp", (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)),
    "microbatches": ("micro-batches, m", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)),
    "microbatch_size": ("samples, b", (1, 2, 4, 8, 16)),
    "virtual_stages": ("chunks, v", (1, 2, 3, 4)),
}
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)
MODELS = ("gpt2", "ptdp-7.5b", "gpt3-175b", "ptdp-1t")
HERE, GIVEN = "this machine", "given"
NOWHERE = "none"  # for Plan's None, which buttons cannot have as a value


def knobs(model: ModelSpec, plan: Plan, cluster: Cluster | None) -> dict[str, Knob]:
    """The knobs for the settings of a plan, for model and cluster; they start at ``plan``."""
    schedules = {naming.SCHEDULE_NAME.get(name, name): name for name in SCHEDULES}
    if callable(plan.schedule) or plan.schedule not in SCHEDULES:
        schedules[naming.schedule_name(plan)] = plan.schedule
    places = {NOWHERE: NOWHERE, "to host": "cpu", "to disk": "nvme"}
    if plan.offload not in (None, "cpu", "nvme"):
        places["as given"] = plan.offload
    models = {f"{count_of(model.layers, 'layer')}, h={model.hidden}": GIVEN}
    models |= {name: name for name in MODELS if ModelSpec.preset(name) != model}
    name = HERE if cluster is None or is_local(cluster) else cluster.name
    clusters = {name: GIVEN} | {n: n for n in (HERE, *CLUSTER_PRESETS) if n != name}
    recompute = {"none": "none", "attention": "selective", "blocks": "full"}
    sequence = {"whole": False, "parallel": True}
    nodes = cluster.nodes if cluster is not None else 1
    return {
        **{
            name: slider(label, usual, brief=label.rpartition(", ")[2])
            for name, (label, usual) in COUNTS.items()
        },
        "schedule": Knob(label="schedule", offers=schedules),
        "zero_stage": buttons("ZeRO", {"off": 0, "1": 1, "2": 2, "3": 3}),
        "offload": buttons("offload", places, start=plan.offload or NOWHERE),
        "recompute": buttons("recompute", recompute),
        "sequence_parallel": buttons(
            "sequence", sequence, tip="sequence parallelism, in addition to tensor parallelism"
        ),
        "precision": buttons("precision", ("fp32", "bf16", "fp16")),
        "model": Knob(label="model", offers=models, start=GIVEN),
        "cluster": buttons("cluster", clusters, start=GIVEN),
        "nodes": slider(
            "nodes", NODES, "{} node", "s", start=nodes, tip="this machine is one node"
        ),
    }


# ---- pictures ------------------------------------------------------------------------------------
def step_chart(report: Tables) -> Chart:
    """A step box by box, or as stretches if boxes would be too many."""
    ranks, stages = shown_ranks(report, BOXES), report.plan.pp
    if len(ranks) < min(stages, FEW) or _boxes_per_rank(report) > BOXES:
        return stage_time(report)
    chart = timeline(report, ranks=ranks, ideal=False if stages > 1 else None)
    if report.plan.tp > 1:
        chart.said_below("boxes include their waits for tp")
    return counted(chart, len(ranks), report.world_size)


def shown_ranks(report: Tables, boxes: int) -> list[int]:
    """The ranks whose timeline is drawn, evenly spaced, so that there are about ``boxes`` in all:
    of a pipeline at most eight, one per stage; of one stage at most four.
    """
    ranks, plan = reported_ranks(report), report.plan
    if plan.pp > 1:
        ranks = [r for r in ranks if plan.place(r)[1:] == (0, 0)]
    most = min(8 if plan.pp > 1 else 4, int(boxes / _boxes_per_rank(report)))
    return spread(ranks, max(1, most))


def fits(report: Tables) -> str | None:
    """Why a plan does not fit into the memory of a device, with the numbers; None if it fits."""
    worst, room = peak(report), max(capacity(report).values(), default=math.inf)
    if worst is None or worst.total <= room:
        return None
    most = max(worst.held, key=worst.held.__getitem__)
    need, available, part = (theme.scaled(n, "B") for n in (worst.total, room, worst.held[most]))
    stage = stage_of(report, worst.rank)
    text = f"It does not fit: {stage} needs {need} on a device that has {available}"
    return f"{text}; the largest category is {most}, {part}"


def _boxes_per_rank(report: Tables) -> float:
    """The mean over the report's ranks."""
    return max(1.0, len(report.spans) / len(reported_ranks(report)))


# ---- the table -----------------------------------------------------------------------------------
def _used(report: Tables) -> str:
    used = utilisation(report).get("model")
    return "no peak stated" if used is None else f"{100 * used:.0f} % of peak"


def _sent(report: Tables, level: str) -> str:
    """Bytes that a rank sends, on average, over links of this level."""
    sent = traffic(report, by="level").set_index("level")["bytes"]
    return in_bytes(float(sent.get(level, 0)) / len(reported_ranks(report)))


COLUMNS: dict[str, Says] = {
    "step time": lambda report: in_seconds(report.step_time),
    "tokens per second": lambda report: (
        f"{report.plan.global_batch * report.model.seq_len / report.step_time:,.0f}"
    ),
    "model FLOPs utilisation": _used,
    "bubble": lambda report: (
        f"{100 * report.bubble:.1f} %" if report.plan.pp > 1 else "no pipeline"
    ),
    "peak memory": lambda report: in_bytes(peak_memory(report)),
    "sent inside a node": lambda report: _sent(report, "intra"),
    "sent between nodes": lambda report: _sent(report, "inter"),
}


def _changed(described: Any, usual: Any) -> dict[str, Any]:
    """{field: value} of the fields that differ from those of ``usual``."""
    values = {field.name: getattr(described, field.name) for field in fields(described)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


def _written(value: Any) -> str:
    """A setting as code; a user's function by its name, or "your_own" if it has none."""
    if isinstance(value, Offload):
        offload = _changed(value, Offload())
        return repr(offload | ({"bandwidth": value.limits} if value.limits else {}))
    if isinstance(value, tuple):
        return f"({' '.join(f'{_written(item)},' for item in value)})"
    if callable(value):
        name = getattr(value, "__name__", "")
        return name if name.isidentifier() else "your_own"
    return repr(value)


# ---- the code line -------------------------------------------------------------------------------
def as_code(plan: Plan) -> str:
    """The plan as the code that makes it, with what differs from the default, as HTML."""
    settings = [f"{name}={_written(value)}" for name, value in _changed(plan, Plan()).items()]
    style = f"color:{MUTED};font-family:monospace;font-size:12px;line-height:1.5"
    code = html.escape(f"plan = pl.Plan({', '.join(settings)})")
    return f'<div style="{style};overflow-wrap:anywhere">{code}</div>'
