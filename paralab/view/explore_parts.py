"""What the explorer's page is made of: its knobs, its four pictures' frames, its words.

Nothing here predicts or runs anything; see widget_explore.py.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, fields

from paralab.parallel.schedules import SCHEDULES
from paralab.report.metrics import reported_ranks, utilisation
from paralab.report.report import Report
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.spec.cluster import CLUSTER_PRESETS
from paralab.view import naming, theme
from paralab.view.chart import Chart
from paralab.view.sampling import spread
from paralab.view.stage_bars import peaks
from paralab.view.stage_stretches import stage_time
from paralab.view.timeline import timeline
from paralab.view.traffic_bars import flows
from paralab.view.widget_parts import BAD, MUTED, Knob
from paralab.view.widget_shared import count

WIDTH = 1056  # pixels: two pictures beside one another, as a laptop shows beside the file list
EACH, TALL, LOW = 520, 424, 340  # of one picture: width; height above and below
BOXES = 320  # of a timeline, at most
FEW = 4  # stages whose boxes must fit among those
BOLD, SMALL = 66, 96  # letters on a line of its title
DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512)
TPS = (1, 2, 4, 8, 16)
PPS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SAMPLES = (1, 2, 4, 8, 16)
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)
MODELS = ("gpt2", "ptdp-7.5b", "gpt3-175b", "ptdp-1t")
CLUSTERS = tuple(CLUSTER_PRESETS)
HERE, GIVEN = "this machine", "given"
NOWHERE = "none"  # buttons cannot have None for a value
STALE = "paralab-stale"
GREY = f"<style>.{STALE} {{ opacity: 0.2; pointer-events: none; }}</style>"


def knobs(model: ModelSpec, plan: Plan, cluster: Cluster | None) -> dict[str, Knob]:
    """Every setting of a plan that has a slider, and what it runs on; they start at ``plan``."""
    own_nodes = cluster.nodes if cluster is not None else 1
    schedules = [(naming.SCHEDULE_NAME.get(name, name), name) for name in SCHEDULES]
    if plan.schedule not in SCHEDULES:
        schedules.append((naming.schedule_name(plan), plan.schedule))
    places = [(NOWHERE, NOWHERE), ("to host", "cpu"), ("to disk", "nvme")]
    if plan.offload not in (None, "cpu", "nvme"):
        places.append(("as given", plan.offload))
    return {
        "dp": _counts("data, dp", DEGREES, plan.dp),
        "tp": _counts("tensor, tp", TPS, plan.tp),
        "pp": _counts("pipeline, pp", PPS, plan.pp),
        "microbatches": _counts("micro-batches, m", MICROBATCHES, plan.microbatches),
        "microbatch_size": _counts("samples, b", SAMPLES, plan.microbatch_size),
        "virtual_stages": _counts("chunks, v", (1, 2, 3, 4), plan.virtual_stages),
        "schedule": Knob(label="schedule", options=schedules, value=plan.schedule),
        "zero_stage": Knob(
            label="ZeRO",
            value=plan.zero_stage,
            buttons=True,
            options=[("off", 0), ("1", 1), ("2", 2), ("3", 3)],
        ),
        "offload": Knob(
            label="offload", options=places, value=plan.offload or NOWHERE, buttons=True
        ),
        "recompute": Knob(
            label="recompute",
            value=plan.recompute,
            buttons=True,
            options=[("none", "none"), ("attention", "selective"), ("blocks", "full")],
        ),
        "sequence_parallel": Knob(
            label="sequence",
            value=plan.sequence_parallel,
            buttons=True,
            options=[("whole", False), ("parallel", True)],
            tip="sequence parallelism, beside tensor parallelism",
        ),
        "precision": Knob(
            label="precision",
            value=plan.precision,
            buttons=True,
            options=[(name, name) for name in ("fp32", "bf16", "fp16")],
        ),
        "model": Knob(
            label="model",
            value=GIVEN,
            options=[
                (model_name(model), GIVEN),
                *[(n, n) for n in MODELS if ModelSpec.preset(n) != model],
            ],
        ),
        "cluster": Knob(label="cluster", value=GIVEN, options=_clusters(cluster), buttons=True),
        "nodes": Knob(
            label="nodes",
            value=own_nodes,
            options=[(count(n, "node"), n) for n in sorted({*NODES, own_nodes})],
            tip="of the cluster; this machine is one",
        ),
    }


def _counts(label: str, usual: Sequence[int], value: int) -> Knob:
    name = label.rpartition(", ")[2]
    return Knob(
        label=label,
        value=value,
        options=[(str(n), n) for n in sorted({*usual, value})],
        brief={n: f"{name}={n}" for n in {*usual, value}},
    )


def model_name(model: ModelSpec) -> str:
    return f"{count(model.layers, 'layer')}, h={model.hidden}"


def _clusters(cluster: Cluster | None) -> list[tuple[str, str]]:
    """(what is written, value): the one given, or this machine; and those of the literature."""
    name = HERE if cluster is None or is_here(cluster) else cluster.name
    here = [(HERE, HERE)] * (name != HERE)
    return [(name, GIVEN), *here, *[(n, n) for n in CLUSTERS if n != name]]


def is_here(cluster: Cluster) -> bool:
    """Whether its devices are ranks that share a processor's cores: then a plan can run here."""
    return not cluster.gpus


# ---- pictures ------------------------------------------------------------------------------------
def broken(chart: Chart) -> Chart:
    """The chart with its title's two lines broken so that they fit into the page's frame."""
    finding, _, below = chart.layout.title.text.partition("<br>")
    style, _, words = below.partition(">")
    bold = textwrap.wrap(finding.removeprefix("<b>").removesuffix("</b>"), BOLD)
    small = textwrap.wrap(words.removesuffix("</span>"), SMALL)
    if len(bold) + len(small) > 2:
        lines = [*[f"<b>{line}</b>" for line in bold], *[f"{style}>{s}</span>" for s in small]]
        chart.layout.title.text = "<br>".join(lines)
    return chart


def step_chart(report: Report) -> Chart:
    """A step box by box, or as stretches where few of its ranks could be drawn that way."""
    ranks, stages = shown_ranks(report, BOXES), report.plan.pp
    if len(ranks) < min(stages, FEW) or _boxes(report) > BOXES:
        return stage_time(report)
    drawn = timeline(report, ranks=ranks, ideal=False if stages > 1 else None)
    if report.plan.tp > 1:
        drawn.said_below("boxes with their waits for tp")
    if len(ranks) < report.world_size:
        drawn.said_below(f"{len(ranks)} of {count(report.world_size, 'rank')} drawn")
    return drawn


def shown_ranks(report: Report, boxes: int) -> list[int]:
    """Ranks whose timeline is drawn, evenly spaced, so that there are about ``boxes`` in all; of
    a pipeline one per stage, of one stage at most four.
    """
    known, plan = reported_ranks(report), report.plan
    if plan.pp > 1:
        known = [r for r in known if plan.place(r)[1:] == (0, 0)]
    most = min(8 if plan.pp > 1 else 4, int(boxes / _boxes(report)))
    return spread(known, max(1, most))


def _boxes(report: Report) -> float:
    """Of a rank, on average."""
    return max(1.0, len(report.spans) / len(reported_ranks(report)))


# ---- words ---------------------------------------------------------------------------------------
def numbers(clock: str, report: Report) -> dict[str, str]:
    """The table's row of a report."""
    plan, seconds = report.plan, report.step_time
    tokens = plan.global_batch * report.model.seq_len / seconds
    sent = dict.fromkeys(("intra", "inter"), 0.0)
    for flow in flows(report):
        if flow.link in sent:
            sent[flow.link] += flow.bytes
    used = utilisation(report).get("model")
    return {
        "clock": clock,
        "a step": theme.scaled(seconds, "s"),
        "tokens per second": f"{tokens:,.0f}",
        "model FLOPs": "no peak stated" if used is None else f"{100 * used:.0f} % of peak",
        "bubble": f"{100 * report.bubble:.1f} %" if plan.pp > 1 else "no pipeline",
        "peak of a device": theme.scaled(peak(report), "B"),
        "sent inside a node": theme.scaled(sent["intra"], "B"),
        "sent between nodes": theme.scaled(sent["inter"], "B"),
    }


def peak(report: Report) -> int:
    """Bytes on the fullest device."""
    return max(p.total for p in peaks(report).values() if p.tier == "device")


def code(plan: Plan) -> str:
    """The plan as one would write it: what differs from the default."""
    said = []
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.default is not MISSING and value == field.default:
            continue
        said.append(f"{field.name}={getattr(value, '__name__', None) or repr(value)}")
    return f"pl.Plan({', '.join(said)})"


def impossible(error: Exception) -> str:
    """A refusal as HTML in place of the pictures: what was asked, why not, what would work."""
    asked, _, rest = str(error).partition(": ")
    why, _, legal = rest.partition("; legal: ")
    lines = [f"<b>{html.escape(asked)}</b> cannot be: {html.escape(why or str(error))}."]
    if legal:
        lines.append(f"What would work: {html.escape(legal)}.")
    style = f"border-left:4px solid {BAD};padding:10px 14px;line-height:1.6;font-size:15px"
    return f'{GREY}<div style="{style}">{"<br>".join(lines)}</div>'


def note(said: Sequence[str]) -> str:
    """Sentences that go with a prediction that can be made: it does not fit, it is a bad idea."""
    if not said:
        return ""
    style = f"border-left:4px solid {BAD};padding:4px 10px;line-height:1.4"
    lines = "<br>".join(html.escape(f"{line[:1].upper()}{line[1:]}.") for line in said)
    return f'<div style="{style}">{lines}</div>'


def as_code(plan: Plan) -> str:
    """Beneath the table: the same picture without a mouse."""
    style = f"color:{MUTED};font-family:monospace;font-size:12px;line-height:1.5"
    return f'<div style="{style}">plan = {html.escape(code(plan))}</div>'
