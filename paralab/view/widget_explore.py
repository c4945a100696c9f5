"""`pl.explore`: a whole plan with sliders. What theory says at once, real ranks on demand.

Four views follow the sliders, and each has a twin that needs no mouse. With
``report = pl.predict(model, plan, cluster, steps=1, detail="actions")``:

    timeline   report.timeline()               a step, stage by stage; one of too many boxes as
               pl.view.stage_time(report)      stretches, divided by what their time went to
    mesh       pl.view.mesh(plan, cluster)     ranks, nodes, the groups of rank 0 and their traffic
    memory     pl.view.stage_memory(report)    peak by category against what a device has
    traffic    report.traffic_chart(matrix=False)   bytes and time over every link

A combination that cannot be says why in place of the views, which are greyed. “Run it” trains with
the plan on this machine, one process per rank; of that run the timeline shows the replay, beneath
the prediction and on the same time scale, and the other views what was measured.
"""

from __future__ import annotations

import warnings
from typing import Any

from paralab.report.amounts import peak_memory
from paralab.report.tables import Tables
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.view import explore_parts as parts
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.explore_parts import EACH, GIVEN, HERE, LOW, TALL
from paralab.view.memory_chart import stage_memory
from paralab.view.rank_mesh import mesh
from paralab.view.timeline import timelines
from paralab.view.traffic import traffic_chart
from paralab.view.widget import At
from paralab.view.widget_parts import few, here, is_here, no_room
from paralab.view.widget_steps import Steps

BOTH = 3  # ranks of two timelines
LONGEST = 60.0  # seconds of a run
VIEWS = ("timeline", "mesh", "memory", "traffic")
WARNING = "zero_stage=3 with pp="  # what a plan says that is legal and slow


class Explore(Steps):
    """Degrees, schedule, micro-batches, ZeRO, offload, recomputation, precision, cluster.

    model    what is trained; default: eight small layers. A slider has models of the literature
    plan     where the sliders start; what has no slider (tp_mode, bucket_bytes, ...) stays. The
             default is dp=2, pp=2, or one device where model or cluster have no room for that
    cluster  what is predicted on; default: this machine. Buttons have others

    ``chart`` is the timeline, ``charts`` are timeline, mesh, memory and traffic.
    """

    name, steps, detail = "explore", 5, "actions"
    steady, width = False, "100%"
    model = ModelSpec(layers=8, hidden=128, heads=8, seq_len=64)  # 8 heads, 8 stages at most
    plan = Plan(dp=2, pp=2, microbatches=4)
    columns = parts.COLUMNS

    def _check(self) -> None:
        """A plan that was given and cannot be is shown as any other: with the reason."""
        if self.plan is type(self).plan and not _fits(self.plan, self.model, self.cluster):
            self.plan = Plan(microbatches=4)
        self.board = parts.knobs(self.model, self.plan, self.cluster)

    # ---- what settings mean ------------------------------------------------------------------
    def _model(self, at: At) -> ModelSpec:
        return self.model if at["model"] == GIVEN else ModelSpec.preset(at["model"])

    def _plan(self, at: At) -> Plan:
        placed = None if at["offload"] == parts.NOWHERE else at["offload"]
        return self.plan.replace(**self._set(at.but(offload=placed), Plan))

    def _cluster(self, at: At) -> Cluster:
        """This machine is one node, whatever the knob ``nodes`` says."""
        name, nodes = at["cluster"], at["nodes"]
        if name not in (HERE, GIVEN):
            return self._once(name, nodes, lambda: Cluster.preset(name, nodes=nodes))
        if name == HERE:
            return self._here(self._ranks(at))
        if self.cluster is None or is_here(self.cluster):
            return self._machine(at)
        return self._once(name, nodes, lambda: self.cluster.replace(nodes=nodes))

    def _needs(self, at: At) -> Any:
        """A run is found again whatever says the same: the nodes of one machine, for example."""
        return super()._needs(at), at["cluster"] if is_here(at.cluster) else None

    def _measure(self, at: At, **how: Any) -> Tables:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=WARNING)  # the page says it already
            return super()._measure(at, **how)

    def _blocked(self, at: At) -> str:
        cluster, plan, memory = at.cluster, at.plan, at.expect.memory
        if not is_here(cluster):
            return f"“Run it” trains on this machine, and this is a prediction for {cluster.name}"
        if at.model.vocab < 256:
            return "“Run it” reads text as bytes, which needs a vocabulary of 256 or more"
        each = peak_memory(at.expect)
        if plan.tiers is not None:
            held = memory[memory["tier"] == "host"].groupby(["rank", "time"])["bytes"].sum()
            each += int(held.max() or 0)
        crowd = max(1, plan.world_size / (cluster.cores or 1))
        seconds = self.steps * at.expect.step_time * crowd
        return no_room(plan.world_size, each, cluster, seconds, LONGEST)

    def _refused(self, at: At) -> str:
        return ""  # the button says it before

    # ---- what is shown -----------------------------------------------------------------------
    def views(self, **knobs: Any) -> dict[str, Chart]:
        """All views by name, as `predict` gives the timeline."""
        with self._aside():
            return dict(zip(VIEWS, self._charts(self.at(**knobs)), strict=True))

    def _charts(self, at: At) -> list[Chart]:
        if (trouble := parts.fits(at.expect)) is not None:
            self._notes.insert(0, trouble)
        with theme.framed(EACH, TALL):
            views = [self._step(at), self._mesh(at)]
        with theme.framed(EACH, LOW):
            report = at.expect if at.found is None else at.replayed
            return [*views, stage_memory(report), traffic_chart(report, matrix=False)]

    def _step(self, at: At) -> Chart:
        if at.found is None:
            return parts.step_chart(at.expect)
        ranks = parts.shown_ranks(at.expect, parts.BOXES // 2)[:BOTH]
        both = timelines(at.expect, at.replayed, ranks=ranks)
        return few(both, len(ranks), at.plan.world_size)

    def _mesh(self, at: At) -> Chart:
        """The last mesh again, if nothing that it shows has changed."""
        unseen = {"recompute": "none", "precision": "fp32", "offload": None}
        shown = at.plan.replace(microbatches=1, microbatch_size=1, **unseen)
        key = shown, at.cluster.nodes, at.cluster.devices_per_node, theme.look()
        return self._once("mesh", key, lambda: mesh(at.plan, at.cluster))

    def _sketch(self) -> list[Chart]:
        charts = super()._sketch()
        self._code.value = parts.as_code(self.values.plan)
        return charts

    def _idle(self, name: str) -> bool:
        """This machine is one node."""
        cluster = self.knobs["cluster"].value
        return name == "nodes" and self._kinds["cluster"].repr(cluster) == HERE


def _fits(plan: Plan, model: ModelSpec, cluster: Cluster | None) -> bool:
    try:
        plan.validate(model)
    except ValueError:
        return False
    return plan.world_size <= (cluster or here(plan.world_size)).num_devices
