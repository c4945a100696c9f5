"""A pipeline with sliders: its schedule is simulated while they move, and run on real processes.

In the simulation (theory/pipeline.py) the forward of the whole model takes 40 ms per micro-batch
and its backward twice that, divided evenly over the stages; sliders make the last stage slower and
let a message between stages take a share of a rank's forward. “Run it” trains with one real process
per rank. The picture then shows the replay of that run, below the same schedule simulated with the
run's own median costs. Imbalance and link speed need no new run: the costs of the run are scaled
and replayed on any link.
"""

from __future__ import annotations

import dataclasses

from paralab.checks import illegal
from paralab.parallel.schedules import SCHEDULES
from paralab.report.tables import COMPUTE_KINDS, Tables
from paralab.spec import Link, ModelSpec, Plan
from paralab.spec.forms import form_name
from paralab.theory import ideal
from paralab.theory.pipeline import Simulation, bubble_formula, simulate
from paralab.theory.schedule_check import peak_live
from paralab.theory.traffic import BOOKKEEPING
from paralab.view import pipeline as drawing
from paralab.view import theme, timeline_rows
from paralab.view.chart import Chart
from paralab.view.naming import SCHEDULE_NAME
from paralab.view.theme import in_seconds
from paralab.view.widget import At, Widget
from paralab.view.widget_parts import buttons, clock_name, cluster_of, slider

FORWARD_S = 40e-3  # of the whole model, one micro-batch; each half of backward takes as long


class Pipeline(Widget):
    """Knobs: schedule, ranks p, micro-batches m, chunks per rank v, a slower stage, link speed.

    model  what a real run trains; default: 24 small layers
    """

    name, steady = "pipeline", True
    model = ModelSpec(layers=24, hidden=128, heads=4, seq_len=64)  # a stage each for 8 × 3
    plan = Plan(pp=4, microbatches=8)
    board = {
        "schedule": buttons("schedule", tuple(SCHEDULES)),
        "pp": slider("ranks p", (2, 3, 4, 6, 8), "rank"),
        "microbatches": slider("micro-batches", (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), "micro-batch"),
        "virtual_stages": slider(
            "chunks v",
            (1, 2, 3),
            "chunk",
            start=lambda widget: max(2, widget.plan.virtual_stages),
            tip="only the interleaved schedule has several chunks per rank",
        ),
        "imbalance": slider(
            "last stage",
            (1.0, 1.25, 1.5, 2.0, 2.5, 3.0),
            lambda x: f"{x:g} × the others" if x > 1 else "equal stages",
            start=1.0,
            tip="the time of the last stage, as a multiple of the other stages' time",
        ),
        "comm": slider(
            "message time",
            (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
            lambda share: f"{100 * share:g} % of a forward" if share else "free links",
            start=0.0,
            tip="of a message between stages, as a share of a rank's forward",
        ),
    }

    def _check(self) -> None:
        """Raise ``ValueError`` on a schedule without a button; `_blocked` checks the model."""
        if self.plan.schedule not in SCHEDULES:
            why, legal = "the widget has no button for it", " | ".join(map(repr, SCHEDULES))
            raise illegal("schedule", form_name(self.plan.schedule), why, legal)

    def _plan(self, at: At) -> Plan:
        chunks = at["virtual_stages"] if at["schedule"] == "interleaved" else 1
        return self.plan.replace(**self._fields_set(at.but(virtual_stages=chunks), Plan))

    def simulation(self, at: At) -> Simulation:
        """The simulated schedule, with the costs above or with the median costs of the run.

        Raises ``ValueError`` if there is no such schedule for these sizes.
        """
        stages = at.plan.stages
        costs = dict.fromkeys(COMPUTE_KINDS, [FORWARD_S / stages] * stages)
        if at.measured is not None:
            costs = ideal.stage_costs(at.measured)
        slow = {kind: [*s[:-1], s[-1] * at["imbalance"]] for kind, s in costs.items()}
        return simulate(at.plan.actions(), **slow, comm=_delay(at, costs))

    def _replay(self, at: At) -> Tables:
        """The replay of the run, with its last stage slowed, on links as the sliders say."""
        link = Link(alpha=_delay(at, ideal.stage_costs(at.measured)), bandwidth=1e15)
        spans = at.measured.spans
        last = spans["kind"].isin(COMPUTE_KINDS) & (spans["stage"] == at.measured.plan.stages - 1)
        cost = spans["cost"].where(~last, spans["cost"] * at["imbalance"])
        slowed = dataclasses.replace(at.measured, spans=spans.assign(cost=cost))
        return slowed.replay(cluster_of(link))

    def _blocked(self, at: At) -> str:
        stages, layers = at.plan.stages, self.model.layers
        few = f"“Run it” has {layers} layers for {stages} stages: choose fewer ranks or chunks"
        return super()._blocked(at) or few * (stages > layers)

    def _unused(self, name: str) -> bool:
        return name == "virtual_stages" and self.knobs["schedule"].value != "interleaved"

    def _charts(self, at: At) -> list[Chart]:
        simulation, name = self.simulation(at), SCHEDULE_NAME[at["schedule"]]
        if at.measured is None:
            return [drawing.simulated_timeline(simulation, name)]
        above = drawing.simulated(simulation, name, label="simulated")
        real = drawing.section(at.replayed, label="replayed", marked=True)
        above.report = at.replayed  # its costs are on that report's clock
        above.head = drawing.head("simulated with the run's median costs", simulation.bubble_rate)
        real.head = drawing.head("replayed", at.replayed.bubble)
        real.until = "pipeline"  # as the step in the table also has the optimizer
        bubble, simulated = map(theme.percent, (at.replayed.bubble, simulation.bubble_rate))
        finding = (
            f"{theme.text(name)}: the bubble is {bubble} of device time, {simulated} as simulated"
        )
        # The axis that stays, without its margin: headings and times are placed on this one.
        window = self._end(1.005e3 * max(above.seconds, real.seconds)) / 1.005e3
        return [timeline_rows.drawn([above, real], finding, [f"step {real.step}"], window)]

    def _rows(self, at: At) -> list[dict[str, str]]:
        simulation, plan = self.simulation(at), at.plan
        pp, m, v = plan.pp, plan.microbatches, plan.virtual_stages
        formula = theme.percent(bubble_formula(at["schedule"], pp, m, v, 1.0, 1.0, 1.0), 1)

        def row(clock: str, bubble: float, step: float, alive: int, messages: int) -> dict:
            return {
                "clock": clock,
                "bubble": theme.percent(bubble, 1),
                "formula": formula if clock == "simulated" else "",
                "bubble over ideal": f"{100 * bubble / (1 - bubble):.0f} %" if bubble < 1 else "",
                "step time": in_seconds(step),
                "micro-batches alive on rank 0": f"{alive}"
                if v == 1
                else f"{alive} chunks of 1/{v}",
                "messages": str(messages),
            }

        times = simulation.bubble_rate, simulation.makespan
        rows = [row("simulated", *times, simulation.peak_live[0], 2 * m * (pp * v - 1))]
        for run in at.runs:
            alive = peak_live(ideal.schedule_of(run))[0]
            rows.append(row(clock_name(run), run.bubble, run.step_time, alive, _messages(run)))
        return rows

    def _outcome(self, at: At) -> str:
        replayed, simulated = at.replayed.bubble, self.simulation(at).bubble_rate
        same = ", equal to within a percentage point" * (abs(replayed - simulated) < 0.01)
        said = f"the bubble is {theme.percent(replayed)} of device time in the replay and"
        return f"{said} {theme.percent(simulated)} as simulated with the run's median costs{same}"


def _messages(report: Tables) -> int:
    """How many activations and gradients of activations are sent in a step."""
    calls = report.collectives
    sent = calls[(calls["op"] == "send") & ~calls["phase"].isin((*BOOKKEEPING, "tied"))]
    return len(sent) // max(1, len(set(report.steps["step"])))


def _delay(at: At, costs: dict[str, list[float]]) -> float:
    """Seconds that a message takes: a share of a rank's forward."""
    return at["comm"] * sum(costs["forward"]) / at["pp"]
