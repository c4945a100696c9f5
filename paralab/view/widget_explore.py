"""`pl.explore`: a whole plan with sliders. What theory says at once, real ranks on demand.

Four views follow the sliders, and each has a twin that needs no mouse. With
``report = pl.predict(model, plan, cluster, steps=1, detail="actions")``:

    mesh       pl.view.mesh(plan, cluster)     ranks, nodes, the groups of rank 0 and their traffic
    timeline   report.timeline()               a step, stage by stage; one of too many boxes as
               pl.view.stage_time(report)      stretches, shared out by what their time went to
    memory     pl.view.stage_memory(report)    peak by category against what a device has
    traffic    pl.view.link_traffic(report)    bytes and time over every link

A combination that cannot be says why in place of the views, which are greyed. «Run it» trains with
the plan on this machine, one process per rank; of that run the timeline shows the replay, beneath
the prediction and on the same time scale, and the other views what was measured.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import ipywidgets as ipw

from paralab.interpret.predict import predict
from paralab.report.report import Report
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.view import explore_parts as parts
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.explore_parts import GIVEN, HERE, LOW, STALE, TALL
from paralab.view.rank_mesh import mesh
from paralab.view.stage_bars import fits, stage_memory
from paralab.view.timeline import timelines
from paralab.view.traffic_bars import link_traffic
from paralab.view.widget_bench import Bench, Progress
from paralab.view.widget_parts import Sketch, given
from paralab.view.widget_shared import MOST_RANKS, count, crowd

MODEL = ModelSpec(layers=8, hidden=128, heads=8, seq_len=64)  # eight heads, eight stages at most
PLAN = Plan(dp=2, pp=2, microbatches=4)
SMALLER = Plan(microbatches=4)  # where that one cannot be
STEPS = 5
LONGEST = 60.0  # seconds of a run
BESIDE = 3  # ranks of two timelines
WARNING = "zero_stage=3 with pp="  # what a plan says that is legal and slow


class Explore(Bench):
    """Degrees, schedule, micro-batches, ZeRO, offload, recomputation, precision, cluster.

    model    what is trained; default: eight small layers. A slider has models of the literature
    plan     where the sliders start; what has no slider (tp_mode, bucket_bytes, ...) stays. The
             default is dp=2, pp=2, or one device where model or cluster have no room for that
    cluster  what is predicted on; default ``Cluster.local()``, this machine. Buttons have others

    ``chart`` is the timeline, ``charts`` are timeline, mesh, memory and traffic.
    """

    name = "explore"
    width = parts.WIDTH

    def __init__(
        self,
        model: ModelSpec | None = None,
        plan: Plan | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.model = given("model", model, MODEL)
        self.cluster = given("cluster", cluster, Cluster.local)
        self.plan = given("plan", plan, PLAN if _fits(self.model, self.cluster) else SMALLER)
        self._clusters: dict[Any, Cluster] = {}
        self._replays: dict[str, Report] = {}
        self._notes: list[str] = []
        self._drawn: tuple[Any, Chart] | None = None  # what the mesh shows, and the mesh
        self._stands_in = ""  # why the plan as it stands cannot run here
        self._code = ipw.HTML()
        super().__init__(parts.knobs(self.model, self.plan, self.cluster))
        self.children = (*self.children[:-1], self._code, self._views)

    # ---- settings as descriptions --------------------------------------------------------------
    def model_of(self, knobs: dict[str, Any]) -> ModelSpec:
        """The model that these settings mean."""
        return self.model if knobs["model"] == GIVEN else ModelSpec.preset(knobs["model"])

    def plan_of(self, knobs: dict[str, Any]) -> Plan:
        """The plan that these settings mean. Raises ``ValueError`` on what no plan can be."""
        changed = {
            name: value
            for name, value in knobs.items()
            if name not in ("model", "cluster", "nodes")
        }
        if changed["offload"] == parts.NOWHERE:
            changed["offload"] = None
        return self.plan.replace(**changed)

    def cluster_of(self, knobs: dict[str, Any]) -> Cluster:
        """The cluster that these settings mean; this machine is one node, whatever ``nodes``."""
        name, nodes = knobs["cluster"], knobs["nodes"]
        if name == HERE or (name == GIVEN and parts.is_here(self.cluster)):
            return self.cluster if name == GIVEN else Cluster.local()
        if (name, nodes) not in self._clusters:
            made = (
                self.cluster.replace(nodes=nodes)
                if name == GIVEN
                else Cluster.preset(name, nodes=nodes)
            )
            self._clusters[name, nodes] = made
        return self._clusters[name, nodes]

    # ---- the bench ------------------------------------------------------------------------------
    def _expect(self, knobs: dict[str, Any]) -> Report:
        """The prediction; what it warns of is shown, not printed."""
        plan = self.plan_of(knobs)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            report = predict(
                self.model_of(knobs), plan, self.cluster_of(knobs), steps=1, detail="actions"
            )
        self._notes = list(dict.fromkeys(str(one.message) for one in heard))
        return report

    def views(self, **knobs: Any) -> dict[str, Chart]:
        """All views by name, as `predict` gives the timeline."""
        sketch = self._predict(self._asked(knobs))
        names = ("timeline", "mesh", "memory", "traffic")
        return dict(zip(names, (sketch.chart, *sketch.beside), strict=True))

    def _predict(self, knobs: dict[str, Any]) -> Sketch:
        expect = self._expect(knobs)
        with theme.framed(parts.EACH, TALL):
            drawn = parts.step_chart(expect)
        return self._sketched(knobs, drawn, [expect], [parts.numbers("predicted", expect)])

    def _sketched(
        self,
        knobs: dict[str, Any],
        drawn: Chart,
        reports: list[Report],
        rows: list[dict[str, str]],
        said: str = "",
    ) -> Sketch:
        """Beside the timeline the other three views, all of the page's size."""
        expect = reports[0]
        if (trouble := fits(expect)) is not None:
            self._notes.insert(0, trouble)
        self._stands_in = self._why_not(knobs, expect)
        self._code.value = parts.as_code(expect.plan)
        beside = [self._mesh(expect.plan, expect.cluster)]
        with theme.framed(parts.EACH, LOW):
            beside += [stage_memory(*reports), link_traffic(*reports)]
        beside[1:] = map(parts.broken, beside[1:])
        return Sketch(chart=parts.broken(drawn), beside=beside, rows=rows, said=said)

    def _mesh(self, plan: Plan, cluster: Cluster) -> Chart:
        """The last mesh again, if nothing that it shows has moved."""
        shows = (
            plan.replace(
                microbatches=1, microbatch_size=1, recompute="none", precision="fp32", offload=None
            ),
            cluster.nodes,
            cluster.devices_per_node,
        )
        if self._drawn is None or self._drawn[0] != shows:
            with theme.framed(parts.EACH, TALL):
                self._drawn = shows, parts.broken(mesh(plan, cluster))
        return self._drawn[1]

    def _measure(
        self, knobs: dict[str, Any], *, stop: threading.Event, progress: Progress
    ) -> Report:
        from paralab.experiment import run

        if why := self._why_not(knobs, self._expect(knobs)):
            raise ValueError(why)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=WARNING)  # the page says it already
            return run(
                self.model_of(knobs), self.plan_of(knobs), steps=STEPS, progress=progress, stop=stop
            )

    def _compare(self, knobs: dict[str, Any], found: Report) -> Sketch:
        expect, replayed = self._expect(knobs), self._replay(knobs, found)
        shown = parts.shown_ranks(expect, parts.BOXES // 2)[:BESIDE]
        with theme.framed(parts.EACH, TALL):
            drawn = timelines(expect, replayed, ranks=shown)
        drawn.said_below(f"{len(shown)} of {count(found.world_size, 'rank')} drawn")
        gap = expect.step_time / replayed.step_time - 1
        how = f"is {abs(100 * gap):.0f} % {'above' if gap > 0 else 'below'} its replay"
        how = "equals its replay" if abs(gap) < 0.01 else how
        rows = [
            parts.numbers("predicted", expect),
            parts.numbers("replayed", replayed),
            parts.numbers(crowd(found), found),
        ]
        said = f"Done, {count(found.world_size, 'real process', 'es')}: the predicted step {how}."
        return self._sketched(knobs, drawn, [expect, found], rows, said)

    def _replay(self, knobs: dict[str, Any], found: Report) -> Report:
        key = found.meta["run_id"]
        if key not in self._replays:
            self._replays[key] = found.replay(self.cluster_of(knobs))
        return self._replays[key]

    def _needs(self, knobs: dict[str, Any]) -> Any:
        """A run is found again whatever says the same: the nodes of one machine, for example."""
        try:
            here = parts.is_here(self.cluster_of(knobs))
            return self.model_of(knobs), self.plan_of(knobs), knobs["cluster"] if here else None
        except ValueError:
            return None

    # ---- what cannot be -------------------------------------------------------------------------
    def _why_not(self, knobs: dict[str, Any], expect: Report) -> str:
        """Why this plan cannot run on this machine; "" if it can."""
        cluster, plan, model = expect.cluster, expect.plan, expect.model
        if not parts.is_here(cluster):
            return f"«Run it» trains on this machine, and this is a prediction for {cluster.name}"
        if plan.world_size > MOST_RANKS:
            return (
                f"«Run it» takes up to {MOST_RANKS} real processes on one machine, and this "
                f"plan has {plan.world_size} ranks"
            )
        if model.vocab < 256:
            return "«Run it» reads text as bytes, which needs a vocabulary of 256 or more"
        each = parts.peak(expect)
        if plan.tiers is not None:
            table = expect.memory
            each += int(
                table[table["tier"] == "host"].groupby(["rank", "time"])["bytes"].sum().max() or 0
            )
        need, there = plan.world_size * each, cluster.memory
        if need > there // 2:
            return (
                f"«Run it» would need {theme.scaled(need, 'B')} for {plan.world_size} ranks, "
                f"and this machine has {theme.scaled(there, 'B')}"
            )
        seconds = STEPS * expect.step_time * max(1, plan.world_size / (cluster.cores or 1))
        if seconds > LONGEST:
            return f"«Run it» would take about {theme.scaled(seconds, 's')} here"
        return ""

    def _blocked(self, knobs: dict[str, Any]) -> str:
        return self._stands_in

    def _refuse(self, error: Exception) -> None:
        """The reason in place of the views, which stay, greyed; nothing to run."""
        if not isinstance(error, ValueError):
            self._complain(error)
            return
        self._stands_in, self._notes = "this combination cannot be: see below", []
        self._enter("error", "This combination cannot be: see below. Move a slider.", error)
        self._trouble.value = parts.impossible(error)
        self._numbers.value = self._code.value = ""
        self._views.add_class(STALE)

    def _enter(self, state: str, said: str = "", error: Exception | None = None) -> None:
        super()._enter(state, said, error)
        here = self._kinds["cluster"].says(self.knobs["cluster"].value) == HERE
        self.knobs["nodes"].disabled = state == "running" or here
        self._views.remove_class(STALE)
        if state != "error":
            self._trouble.value = parts.note(self._notes)

    # ---- what is shown --------------------------------------------------------------------------
    def _arranged(self) -> ipw.Box:
        """Two beside one another where the page has room for them."""
        made = ipw.GridBox(self.figures, layout={"grid_gap": "12px 16px"})
        made.layout.grid_template_columns = f"repeat(auto-fit, {parts.EACH}px)"
        return made

    def _hint(self, knobs: dict[str, Any]) -> str:
        if self._stands_in:
            return f"{self._stands_in}."
        return super()._hint(knobs)

    def _ranks(self, knobs: dict[str, Any]) -> int:
        return self.plan_of(knobs).world_size


def _fits(model: ModelSpec, cluster: Cluster) -> bool:
    """Whether the usual plan can be."""
    try:
        PLAN.validate(model)
    except ValueError:
        return False
    return PLAN.world_size <= cluster.num_devices
