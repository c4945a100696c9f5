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

import warnings
from typing import Any

from paralab.report.amounts import peak_memory
from paralab.report.tables import Tables
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.view import explore_parts as parts
from paralab.view import naming, theme
from paralab.view.chart import Chart
from paralab.view.explore_parts import EACH, GIVEN, HERE, LOW, TALL
from paralab.view.memory_chart import stage_memory
from paralab.view.rank_mesh import mesh
from paralab.view.timeline import timelines
from paralab.view.traffic import traffic_chart
from paralab.view.widget import At
from paralab.view.widget_parts import counted, is_local, no_room, this_machine
from paralab.view.widget_steps import Steps

BOTH = 3  # ranks at most, where prediction and replay are drawn together
LONGEST = 60.0  # seconds that a run may take
VIEWS = ("timeline", "mesh", "memory", "traffic")
WARNING = "zero_stage=3 with pp="  # the start of a plan's warning that it is legal, but slow


class Explore(Steps):
    """Knobs: degrees, schedule, micro-batches, ZeRO, offload, recomputation, precision, cluster.

    model    what is trained; default: eight small layers. A slider offers published models
    plan     where the sliders start; settings without a slider (tp_mode, bucket_bytes, ...) stay.
             Default: dp=2, pp=2, or one device if that does not fit the model or the cluster
    cluster  what is predicted on; default: this machine. Buttons offer others

    ``chart`` is the timeline, ``charts`` are timeline, mesh, memory and traffic.
    """

    name, steps, detail = "explore", 5, "actions"
    steady, width = False, "100%"
    model = ModelSpec(layers=8, hidden=128, heads=8, seq_len=64)  # 8 heads, 8 stages at most
    plan = Plan(dp=2, pp=2, microbatches=4)
    columns = parts.COLUMNS

    def _check(self) -> None:
        """Make the knobs. An impossible plan is not refused: the widget shows the reason."""
        if self.plan is type(self).plan and not _fits(self.plan, self.model, self.cluster):
            self.plan = Plan(microbatches=4)
        self.board = parts.knobs(self.model, self.plan, self.cluster)

    # ---- what settings mean ------------------------------------------------------------------
    def _model(self, at: At) -> ModelSpec:
        return self.model if at["model"] == GIVEN else ModelSpec.preset(at["model"])

    def _plan(self, at: At) -> Plan:
        placed = None if at["offload"] == parts.NOWHERE else at["offload"]
        return self.plan.replace(**self._fields_set(at.but(offload=placed), Plan))

    def _cluster(self, at: At) -> Cluster:
        """The chosen cluster with so many nodes; this machine is always one node."""
        name, nodes = at["cluster"], at["nodes"]
        if name not in (HERE, GIVEN):
            return self._cached(name, nodes, lambda: Cluster.preset(name, nodes=nodes))
        if name == HERE:
            return self._here(self._ranks(at))
        if self.cluster is None or is_local(self.cluster):
            return self._machine(at)
        return self._cached(name, nodes, lambda: self.cluster.replace(nodes=nodes))

    def _depends_on(self, at: At) -> Any:
        """A run on this machine is found again whatever the knob ``nodes`` says."""
        return super()._depends_on(at), at["cluster"] if is_local(at.cluster) else None

    def _measure(self, at: At, **how: Any) -> Tables:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=WARNING)  # the page says it already
            return super()._measure(at, **how)

    def _blocked(self, at: At) -> str:
        cluster, plan, memory = at.cluster, at.plan, at.predicted.memory
        if not is_local(cluster):
            where = naming.cluster_name(cluster)
            return f"“Run it” trains on this machine, and this is a prediction for {where}"
        if at.model.vocab < 256:
            return "“Run it” reads text as bytes, which needs a vocabulary of 256 or more"
        bytes_per_rank = peak_memory(at.predicted)
        if plan.tiers is not None:
            held = memory[memory["tier"] == "host"].groupby(["rank", "time"])["bytes"].sum()
            bytes_per_rank += int(held.max() or 0)
        ranks_per_core = max(1, plan.world_size / (cluster.cores or 1))
        seconds = self.steps * at.predicted.step_time * ranks_per_core
        return no_room(plan.world_size, bytes_per_rank, cluster, seconds, LONGEST)

    def _refused(self, at: At) -> str:
        return ""  # `_blocked` has checked it already

    # ---- what is shown -----------------------------------------------------------------------
    def views(self, **knobs: Any) -> dict[str, Chart]:
        """All views by name, as `predict` gives the timeline."""
        with self._without_notes():
            return dict(zip(VIEWS, self._charts(self.at(**knobs)), strict=True))

    def _charts(self, at: At) -> list[Chart]:
        if (trouble := parts.fits(at.predicted)) is not None:
            self._notes.insert(0, trouble)
        with theme.framed(EACH, TALL):
            views = [self._step(at), self._mesh(at)]
        with theme.framed(EACH, LOW):
            report = at.predicted if at.measured is None else at.replayed
            return [*views, stage_memory(report), traffic_chart(report, matrix=False)]

    def _step(self, at: At) -> Chart:
        if at.measured is None:
            return parts.step_chart(at.predicted)
        ranks = parts.shown_ranks(at.predicted, parts.BOXES // 2)[:BOTH]
        both = timelines(at.predicted, at.replayed, ranks=ranks)
        return counted(both, len(ranks), at.plan.world_size)

    def _mesh(self, at: At) -> Chart:
        """The mesh, drawn again only if something that it shows has changed."""
        unseen = {"recompute": "none", "precision": "fp32", "offload": None}
        shown = at.plan.replace(microbatches=1, microbatch_size=1, **unseen)
        key = shown, at.cluster.nodes, at.cluster.devices_per_node, theme.look()
        return self._cached("mesh", key, lambda: mesh(at.plan, at.cluster))

    def _sketch(self) -> list[Chart]:
        charts = super()._sketch()
        self._code.value = parts.as_code(self.values.plan)
        return charts

    def _unused(self, name: str) -> bool:
        """This machine is one node."""
        cluster = self.knobs["cluster"].value
        return name == "nodes" and self._declared["cluster"].repr(cluster) == HERE


def _fits(plan: Plan, model: ModelSpec, cluster: Cluster | None) -> bool:
    try:
        plan.validate(model)
    except ValueError:
        return False
    return plan.world_size <= (cluster or this_machine(plan.world_size)).num_devices
