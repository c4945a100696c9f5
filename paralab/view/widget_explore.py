"""`pl.explore`: a whole plan with sliders, predicted while they move, and run on real ranks.

Four views follow the sliders, and each can be made by a call. With
``report = pl.predict(model, plan, cluster, steps=1, detail="actions")``:

    timeline   report.timeline()               a step, stage by stage; if it has too many boxes,
               pl.view.stage_time(report)      as stretches, divided into what their time is for
    mesh       pl.view.mesh(plan, cluster)     ranks, nodes, the groups of rank 0 and their traffic
    memory     pl.view.stage_memory(report)    peak by category against what a device has
    traffic    report.traffic_chart(matrix=False)   bytes and time over every link

For an impossible combination the reason is shown, and the views are greyed. “Run it” trains with
the plan on this machine, one process per rank. The timeline then shows the replay of that run,
beneath the prediction and on the same time scale; memory and traffic show what was measured.
"""

from __future__ import annotations

import html
import warnings
from typing import Any

from paralab.checks import count_of
from paralab.parallel.schedules import SCHEDULES
from paralab.report.amounts import peak_memory, traffic
from paralab.report.facts import reported_ranks
from paralab.report.summary import utilisation
from paralab.report.tables import Tables
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.spec.cluster import CLUSTER_PRESETS
from paralab.spec.tiers import Offload
from paralab.view import naming, theme
from paralab.view.chart import Chart
from paralab.view.memory_chart import fits, stage_memory
from paralab.view.mesh_grid import spread
from paralab.view.rank_mesh import mesh
from paralab.view.stage_stretches import stage_time
from paralab.view.theme import in_bytes, in_seconds
from paralab.view.timeline import timeline, timelines
from paralab.view.traffic import traffic_chart
from paralab.view.widget import At
from paralab.view.widget_parts import MUTED, Knob, buttons, counted, is_local, slider
from paralab.view.widget_steps import Says, Steps

BOTH = 3  # ranks at most, where prediction and replay are drawn together
VIEWS = ("timeline", "mesh", "memory", "traffic")
WARNING = "zero_stage=3 with pp="  # the start of a plan's warning that it is legal, but slow
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


# ---- its table -----------------------------------------------------------------------------------
def _used(report: Tables) -> str:
    used = utilisation(report).get("model")
    return "no peak stated" if used is None else f"{theme.percent(used)} of peak"


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
        theme.percent(report.bubble, 1) if report.plan.pp > 1 else "no pipeline"
    ),
    "peak memory": lambda report: in_bytes(peak_memory(report)),
    "sent inside a node": lambda report: _sent(report, "intra"),
    "sent between nodes": lambda report: _sent(report, "inter"),
}


class Explore(Steps):
    """Knobs: degrees, schedule, micro-batches, ZeRO, offload, recomputation, precision, cluster.

    model    what is trained; default: eight small layers. A slider offers published models
    plan     where the sliders start; settings without a slider (tp_mode, bucket_bytes, ...) stay.
             Default: dp=2, pp=2, or one device if that does not fit the model or the cluster
    cluster  what is predicted on; default: this machine. Buttons offer others

    ``chart`` is the timeline, ``charts`` are timeline, mesh, memory and traffic.
    """

    name, steps, longest, detail = "explore", 5, 60.0, "actions"
    steady, width = False, "100%"
    model = ModelSpec(layers=8, hidden=128, heads=8, seq_len=64)  # 8 heads, 8 stages at most
    plan = Plan(dp=2, pp=2, microbatches=4)
    columns = COLUMNS

    def _check(self) -> None:
        """Make the knobs. An impossible plan is not refused: the widget shows the reason."""
        if self.plan is type(self).plan and not self._fits(self.plan):
            self.plan = Plan(microbatches=4)
        self.board = knobs(self.model, self.plan, self.cluster)

    # ---- what settings mean ------------------------------------------------------------------
    def _model(self, at: At) -> ModelSpec:
        return self.model if at["model"] == GIVEN else ModelSpec.preset(at["model"])

    def _plan(self, at: At) -> Plan:
        placed = None if at["offload"] == NOWHERE else at["offload"]
        return self.plan.replace(**self._fields_set(at.but(offload=placed), Plan))

    def _cluster(self, at: At) -> Cluster:
        """The chosen cluster with so many nodes; this machine is always one node."""
        if at["cluster"] == HERE:
            return self._here(self._ranks(at))
        if at["cluster"] != GIVEN:
            return Cluster.preset(at["cluster"], nodes=at["nodes"])
        given = self._machine(self._ranks(at))
        return given if is_local(given) else given.replace(nodes=at["nodes"])

    def _depends_on(self, at: At) -> Any:
        """A run on this machine is found again whatever the knob ``nodes`` says."""
        return super()._depends_on(at), at["cluster"] if is_local(at.cluster) else None

    def _measure(self, at: At, **how: Any) -> Tables:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=WARNING)  # the page says it already
            return super()._measure(at, **how)

    def _blocked(self, at: At) -> str:
        if not is_local(at.cluster):
            where = naming.cluster_name(at.cluster)
            return f"“Run it” trains on this machine, and this is a prediction for {where}"
        if at.model.vocab < 256:
            return "“Run it” reads text as bytes, which needs a vocabulary of 256 or more"
        return super()._blocked(at) or self._refused(at)

    # ---- what is shown -----------------------------------------------------------------------
    def views(self, **knobs: Any) -> dict[str, Chart]:
        """All views by name, as `predict` gives the timeline."""
        return dict(zip(VIEWS, self._charts(self.at(**knobs)), strict=True))

    def _charts(self, at: At) -> list[Chart]:
        if (trouble := fits(at.predicted)) is not None:
            at.notes.insert(0, trouble)
        with theme.framed(EACH, TALL):
            views = [self._step(at), self._mesh(at)]
        with theme.framed(EACH, LOW):
            report = at.predicted if at.measured is None else at.replayed
            return [*views, stage_memory(report), traffic_chart(report, matrix=False)]

    def _step(self, at: At) -> Chart:
        if at.measured is None:
            return step_chart(at.predicted)
        ranks = shown_ranks(at.predicted, BOXES // 2)[:BOTH]
        both = timelines(at.predicted, at.replayed, ranks=ranks)
        return counted(both, len(ranks), at.plan.world_size)

    def _mesh(self, at: At) -> Chart:
        """The mesh, drawn again only if something that it shows has changed."""
        unseen = {"recompute": "none", "precision": "fp32", "offload": None}
        shown = at.plan.replace(microbatches=1, microbatch_size=1, **unseen)
        key = shown, at.cluster.nodes, at.cluster.devices_per_node, theme.look()
        return self._cached("mesh", key, lambda: mesh(at.plan, at.cluster))

    def _draw(self) -> None:
        super()._draw()
        self._code.value = as_code(self.values.plan)

    def _unused(self, name: str) -> bool:
        """This machine is one node."""
        cluster = self.knobs["cluster"].value
        return name == "nodes" and self._declared["cluster"].repr(cluster) == HERE


# ---- its knobs -----------------------------------------------------------------------------------
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
        "nodes": slider("nodes", NODES, "node", start=nodes, tip="this machine is one node"),
    }


# ---- its timeline --------------------------------------------------------------------------------
def step_chart(report: Tables) -> Chart:
    """A step box by box, or as stretches if boxes would be too many."""
    ranks = shown_ranks(report, BOXES)
    if len(ranks) < min(report.plan.pp, FEW) or _boxes_per_rank(report) > BOXES:
        return stage_time(report)
    chart = timeline(report, ranks=ranks, ideal=False)
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


def _boxes_per_rank(report: Tables) -> float:
    """The mean over the report's ranks."""
    return max(1.0, len(report.spans) / len(reported_ranks(report)))


# ---- its line of code ----------------------------------------------------------------------------
def _written(value: Any) -> str:
    """A setting as code; a user's function by its name, or "your_own" if it has none."""
    if isinstance(value, Offload):
        limits = {"bandwidth": value.limits} if value.limits else {}
        return repr(value.changed() | limits)
    if isinstance(value, tuple):
        return f"({' '.join(f'{_written(item)},' for item in value)})"
    if callable(value):
        name = getattr(value, "__name__", "")
        return name if name.isidentifier() else "your_own"
    return repr(value)


def as_code(plan: Plan) -> str:
    """The plan as the code that makes it, with what differs from the default, as HTML."""
    settings = [f"{name}={_written(getattr(plan, name))}" for name in plan.changed()]
    style = f"color:{MUTED};font-family:monospace;font-size:12px;line-height:1.5"
    code = html.escape(f"plan = pl.Plan({', '.join(settings)})")
    return f'<div style="{style};overflow-wrap:anywhere">{code}</div>'
