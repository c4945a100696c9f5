"""A pipeline with sliders: its schedule simulated at once, and run on real processes on demand.

The simulation (theory/pipeline.py) follows the sliders. Of it a whole model's forward takes 40 ms
per micro-batch, its backward twice that, divided evenly over the stages; then the last stage may be
slower, and what leaves a stage may be on its way for a share of a rank's forward. «Run it» trains
on one real process per rank; of that run the picture shows the replay, below the same schedule
simulated with the run's own median costs. Imbalance and link speed need no new run: the run's costs
are scaled, and replayed on any link.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from paralab.parallel.schedules import SCHEDULES, Schedule, build
from paralab.report.report import Report
from paralab.spec import Cluster, Link, ModelSpec, Plan
from paralab.theory import ideal
from paralab.theory.pipeline import Simulation, bubble_formula, simulate
from paralab.theory.schedule_check import peak_live
from paralab.theory.traffic import BOOKKEEPING
from paralab.view import pipeline as drawing
from paralab.view import theme, timeline_rows
from paralab.view.boxes import table as boxes_table
from paralab.view.chart import Chart
from paralab.view.widget_bench import Bench, Progress
from paralab.view.widget_parts import Knob, Sketch, given
from paralab.view.widget_shared import crowd

RANKS = (2, 3, 4, 6, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
CHUNKS = (1, 2, 3)
SLOWER = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
SHARES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
MODEL = ModelSpec(layers=24, hidden=128, heads=4, seq_len=64)  # as many layers as stages at most
FORWARD_S = 40e-3  # of the whole model, one micro-batch; backward's halves take as long each
STEPS = 6


class Pipeline(Bench):
    """Schedule, ranks p, micro-batches m, chunks per rank v, a slower stage, link speed.

    model  what a real run trains; default: 24 small layers
    """

    name = "pipeline"

    def __init__(self, model: ModelSpec | None = None) -> None:
        self.model = given("model", model, MODEL)
        super().__init__(
            {
                "schedule": Knob(
                    label="schedule",
                    value="1f1b",
                    buttons=True,
                    options=[(name, name) for name in SCHEDULES],
                ),
                "pp": Knob(label="ranks p", value=4, options=[(f"{n} ranks", n) for n in RANKS]),
                "microbatches": Knob(
                    label="micro-batches",
                    value=8,
                    options=[(f"{m} micro-batch{'es' * (m > 1)}", m) for m in MICROBATCHES],
                ),
                "virtual_stages": Knob(
                    label="chunks v",
                    value=2,
                    options=[(f"{v} chunk{'s' * (v > 1)}", v) for v in CHUNKS],
                    tip="stages per rank; only interleaved has more than one",
                ),
                "imbalance": Knob(
                    label="last stage",
                    value=1.0,
                    tip="how much slower than the others",
                    options=[(f"{x:g} x" if x > 1 else "even", x) for x in SLOWER],
                ),
                "comm": Knob(
                    label="a message",
                    value=0.0,
                    tip="as a share of a rank's forward",
                    options=[(f"{100 * s:g} % of F" if s else "free links", s) for s in SHARES],
                ),
            }
        )

    # ---- settings as descriptions --------------------------------------------------------------
    def plan_of(self, knobs: dict[str, Any]) -> Plan:
        """The plan that these settings mean."""
        return Plan(
            pp=knobs["pp"],
            schedule=knobs["schedule"],
            virtual_stages=_chunks(knobs),
            microbatches=knobs["microbatches"],
        )

    def schedule_of(self, knobs: dict[str, Any]) -> Schedule:
        """The lists of actions. Raises ``ValueError`` where there are none for these sizes."""
        return build(
            knobs["schedule"],
            pp=knobs["pp"],
            microbatches=knobs["microbatches"],
            virtual_stages=_chunks(knobs),
        )

    def simulation_of(self, knobs: dict[str, Any], found: Report | None = None) -> Simulation:
        """These settings simulated, with the stated costs or with the medians of a run."""
        schedule, stages = self.schedule_of(knobs), knobs["pp"] * _chunks(knobs)
        each = [FORWARD_S / stages] * stages
        costs = {"forward": each, "backward": each, "weight_grad": each}
        costs = costs if found is None else ideal.stage_costs(found)
        slower = [1.0] * (stages - 1) + [knobs["imbalance"]]
        scaled = {
            kind: [s * x for s, x in zip(seconds, slower, strict=True)]
            for kind, seconds in costs.items()
        }
        return simulate(schedule, **scaled, comm=_delay(knobs, costs["forward"]))

    def replay_of(self, knobs: dict[str, Any], found: Report) -> Report:
        """A run with its last stage slowed and its links as the sliders say."""
        delay = _delay(knobs, ideal.stage_costs(found)["forward"])
        link = Link(alpha=delay, bandwidth=1e15)
        cluster = Cluster(
            name="the slider's link",
            devices_per_node=64,
            flops=1e12,
            memory_bandwidth=1e12,
            intra=link,
        )
        spans = found.spans
        last = spans["kind"].isin(ideal.LETTER) & (spans["stage"] == found.plan.stages - 1)
        cost = spans["cost"].where(~last, spans["cost"] * knobs["imbalance"])
        return dataclasses.replace(found, spans=spans.assign(cost=cost)).replay(cluster)

    # ---- the bench ------------------------------------------------------------------------------
    def _predict(self, knobs: dict[str, Any]) -> Sketch:
        simulation = self.simulation_of(knobs)
        chart = drawing.simulated_timeline(simulation, knobs["schedule"])
        return Sketch(chart=chart, rows=[self._simulated(knobs, simulation)])

    def _measure(
        self, knobs: dict[str, Any], *, stop: threading.Event, progress: Progress
    ) -> Report:
        from paralab.experiment import run

        return run(self.model, self.plan_of(knobs), steps=STEPS, progress=progress, stop=stop)

    def _compare(self, knobs: dict[str, Any], found: Report) -> Sketch:
        simulation, replayed = self.simulation_of(knobs, found), self.replay_of(knobs, found)
        gap = replayed.bubble - simulation.bubble_rate
        return Sketch(
            chart=self._beneath(knobs, simulation, replayed),
            rows=[
                self._simulated(knobs, simulation),
                self._ran("replayed", replayed),
                self._ran(crowd(found), found),
            ],
            said=f"Done, {knobs['pp']} real processes: replayed, {100 * replayed.bubble:.0f} % is "
            f"bubble; simulated with its median costs {100 * simulation.bubble_rate:.0f} %"
            f"{', the same to a hundredth' * (abs(gap) < 0.01)}.",
        )

    def _needs(self, knobs: dict[str, Any]) -> Any:
        return knobs["schedule"], knobs["pp"], knobs["microbatches"], _chunks(knobs)

    def _hint(self, knobs: dict[str, Any]) -> str:
        return f"«Run it» trains {self.model.layers} layers on {knobs['pp']} real processes."

    def _ranks(self, knobs: dict[str, Any]) -> int:
        return knobs["pp"]

    def _enter(self, state: str, said: str = "", error: Exception | None = None) -> None:
        super()._enter(state, said, error)
        chunks, schedule = self.knobs["virtual_stages"], self.knobs["schedule"].value
        chunks.disabled = state == "running" or schedule != "interleaved"

    # ---- what is shown --------------------------------------------------------------------------
    def _beneath(self, knobs: dict[str, Any], simulation: Simulation, replayed: Report) -> Chart:
        """The run's replay beneath the simulation, on one time scale."""
        above = drawing.simulated(simulation, replayed, label="simulated")
        above.head = _head("simulated, the run's median costs", simulation.bubble_rate)
        real = drawing.section(replayed, label="replayed", step=None, ranks=None, marked=True)
        real.head = _head("replayed", replayed.bubble)
        finding = (
            f"{theme.text(knobs['schedule'])}: {drawing.percent(replayed.bubble)} of device "
            f"time is bubble, {drawing.percent(simulation.bubble_rate)} simulated"
        )
        chart = timeline_rows.drawn([above, real], finding, "replayed", [f"step {real.step}"])
        return chart.explained(
            f"{knobs['schedule']}, simulated and replayed: {len(above.boxes) + len(real.boxes)} "
            f"boxes on {knobs['pp']} ranks",
            boxes_table([above, real]),
        )

    def _simulated(self, knobs: dict[str, Any], simulation: Simulation) -> dict[str, str]:
        pp, m, v = knobs["pp"], knobs["microbatches"], _chunks(knobs)
        theory = bubble_formula(knobs["schedule"], pp, m, v, 1.0, 1.0, 1.0)
        return _row(
            "simulated",
            simulation.bubble_rate,
            f"{100 * theory:.1f} %",
            simulation.makespan,
            simulation.peak_live[0],
            v,
            2 * m * (pp * v - 1),
        )

    def _ran(self, clock: str, report: Report) -> dict[str, str]:
        calls = report.collectives
        sent = calls[(calls["op"] == "send") & ~calls["phase"].isin((*BOOKKEEPING, "tied"))]
        order = ideal.schedule_of(report)
        return _row(
            clock,
            report.bubble,
            "",
            report.step_time,
            peak_live(order)[0],
            report.plan.virtual_stages,
            len(sent) // max(1, len(set(report.steps["step"]))),
        )


def _row(
    clock: str, bubble: float, formula: str, seconds: float, alive: int, v: int, messages: int
) -> dict[str, str]:
    return {
        "clock": clock,
        "bubble": f"{100 * bubble:.1f} %",
        "formula": formula,
        "bubble over ideal": f"{100 * bubble / (1 - bubble):.0f} %" if bubble < 1 else "",
        "a step": theme.scaled(seconds, "s"),
        "alive on rank 0": f"{alive}" if v == 1 else f"{alive} chunks of 1/{v}",
        "messages": str(messages),
    }


def _chunks(knobs: dict[str, Any]) -> int:
    return knobs["virtual_stages"] if knobs["schedule"] == "interleaved" else 1


def _delay(knobs: dict[str, Any], forward: list[float]) -> float:
    """Seconds that a message is under way: a share of what a rank's forward takes."""
    return knobs["comm"] * sum(forward) / knobs["pp"]


def _head(name: str, bubble: float) -> str:
    return f"<b>{name}</b> · bubble {drawing.percent(bubble)}"
