"""Data and 1D tensor parallelism with sliders: a step on a time axis, predicted and replayed.

“Run it” trains on real processes. The picture then has the replay of that run on links with the
slider's speed, below the prediction and on the same time scale. Another speed needs no new run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from paralab.checks import illegal
from paralab.report import amounts, metrics
from paralab.report.tables import Tables
from paralab.spec import ModelSpec, Plan
from paralab.view.chart import Chart
from paralab.view.theme import in_bytes
from paralab.view.timeline import gap, timeline, timelines
from paralab.view.widget import At, Widget
from paralab.view.widget_parts import buttons, clock_name, counted, links_of, slider

BANDWIDTHS = tuple(m * 10**e for e in range(7, 12) for m in (1, 3))  # 10 MB/s to 300 GB/s
SPEED = slider("link speed", BANDWIDTHS, link=links_of)
FORMS = ("naive", "bucketed", "overlapped")
RESIDUAL = {"replicated": "whole", "sharded by sequence": "parts"}
Says = Callable[[Tables], str]


def share_of_step(report: Tables, part: str, of: str = "") -> str:
    """A part of the typical step, in per cent of that step or of another part ``of`` it."""
    step = metrics.typical_step(report)
    parts = metrics.shares(report, step)
    # Not report.step_time: for an even number of steps that is the mean of two steps.
    whole = parts[of] if of else metrics.step_durations(report)[step]
    return f"{100 * parts[part] / whole:.0f} %" if whole else "none needed"


def _kept(report: Tables, category: str) -> str:
    """The largest number of bytes of a category that a rank holds at any moment."""
    mine = report.memory["category"] == category
    return in_bytes(int(report.memory[mine]["bytes"].max()))


def _sent(report: Tables) -> str:
    return in_bytes(float(amounts.traffic(report)["bytes"].mean()))


def step_time(report: Tables) -> str:
    return f"{report.step_time * 1e3:.1f} ms"


class Steps(Widget):
    """A widget whose picture is a step, and whose table has numbers of reports.

    columns  {heading: function that makes a cell's text of a report}
    drawn    ranks drawn of a prediction alone, and of each report where there are two
    """

    steady = True
    columns: dict[str, Says]
    drawn = (4, 2)

    def _offered(self, name: str, value: Any) -> bool:
        """Only numbers of ranks that divide the model and for which the cluster has devices."""
        if name != "ranks":
            return True
        sets = {self.board[name].sets: value}
        return self._fits(Plan(**sets, sequence_parallel=sets.get("tp", 1) > 1))

    def _fits(self, plan: Plan) -> bool:
        """Whether a plan can train the model on the cluster."""
        try:
            plan.validate(self.model)
        except ValueError:
            return False
        return plan.world_size <= self._machine(plan.world_size).num_devices

    def _charts(self, at: At) -> list[Chart]:
        ranks = range(min(self.drawn[at.measured is not None], at.predicted.world_size))
        # One plan: what the run's has in addition are limits, as slow as the prediction's links.
        predicted = at.measured and replace(at.predicted, plan=at.measured.plan)
        two = at.measured and timelines(predicted, at.replayed, ranks=ranks)
        chart = two or timeline(at.predicted, ranks=ranks)
        return [counted(chart, len(ranks), at.predicted.world_size)]

    def _rows(self, at: At) -> list[dict[str, str]]:
        return [self._row(clock_name(report), report) for report in (at.predicted, *at.runs)]

    def _row(self, clock: str, report: Tables) -> dict[str, str]:
        return {"clock": clock, **{head: says(report) for head, says in self.columns.items()}}

    def _outcome(self, at: At) -> str:
        apart = gap(at.predicted.step_time, at.replayed.step_time)
        return f"the predicted step time is {apart} the replayed one"


class DataParallel(Steps):
    """Knobs: ranks, form of gradient sync, bucket size, micro-batch size, link speed.

    model    what is trained; default: the "laptop" preset
    plan     where the sliders start; only the settings in `used` are used
    cluster  what is predicted and replayed on; default: this machine
    """

    name = "data_parallel"
    plan = Plan(dp=4, bucket_bytes=200_000)
    used = ("dp", "grad_sync", "bucket_bytes", "microbatches", "microbatch_size", "precision")
    buckets = tuple(m * 10**e for e in (4, 5, 6) for m in (1, 2, 5)) + (10**7,)  # 10 kB to 10 MB
    board = {
        "ranks": slider("ranks", (1, 2, 3, 4, 6, 8), "rank", sets="dp"),
        "grad_sync": buttons("gradient sync", FORMS),
        "bucket_bytes": slider(
            "bucket size", buckets, in_bytes, tip="gradients are sent in flat buckets of this size"
        ),
        "bandwidth": SPEED,
        "microbatch_size": slider("micro-batch", (1, 2, 4, 8, 16), "sample"),
    }
    columns = {
        "time per step": step_time,
        "samples per second": lambda report: f"{report.plan.global_batch / report.step_time:,.0f}",
        "communication hidden": partial(share_of_step, part="hidden", of="communication"),
        "waiting": partial(share_of_step, part="wait"),
        "sent per rank": _sent,
    }

    def _check(self) -> None:
        super()._check()
        if self.plan.grad_sync not in FORMS:
            self.plan = self.plan.replace(grad_sync="overlapped")


class Tensor1D(Steps):
    """Knobs: ranks t, layout of the residual stream, micro-batch size, link speed.

    In every gap in the row of a rank it waits for a sum that the next layer needs. The table
    compares one device with t ranks: parameters, activations, bytes sent and time spent waiting.

    model    what is trained; its heads limit t. Default: 2 layers of 8 heads
    plan     where the sliders start; tensor-parallel in 1D
    cluster  what is predicted and replayed on; default: this machine
    """

    name, drawn = "tensor1d", (1, 1)
    model = ModelSpec(layers=2, hidden=128, heads=8, seq_len=64)
    plan = Plan(tp=4, microbatch_size=4)
    board = {
        "ranks": slider("ranks t", (1, 2, 4, 8), "rank", sets="tp"),
        "sequence": buttons(
            "residual",
            RESIDUAL,
            start=lambda widget: "parts" if widget.plan.sequence_parallel else "whole",
            tip="norms, dropout and residual sums: all on every rank, or 1/t on each",
        ),
        "microbatch_size": slider("micro-batch", (1, 2, 4, 8), "sample"),
        "bandwidth": SPEED,
    }
    columns = {
        "parameters": partial(_kept, category="parameters"),
        "activations": partial(_kept, category="activations"),
        "sent per rank": _sent,
        "time per step": step_time,
        "waiting": partial(share_of_step, part="wait"),
    }

    def _check(self) -> None:
        if self.plan.tp_mode != "1d" or self.plan.dp * self.plan.pp > 1:
            why = "this widget is about tensor parallelism in 1D alone"
            raise illegal("plan", self.plan, why, "pl.Plan(tp=...)")
        super()._check()

    def _plan(self, at: At) -> Plan:
        """The plan; one rank always has the whole sequence."""
        parts = at["sequence"] == "parts" and at["ranks"] > 1
        alone = {"partition_activations": False} if parts or at["ranks"] == 1 else {}
        return self.plan.replace(**self._fields_set(at, Plan), sequence_parallel=parts, **alone)

    def _rows(self, at: At) -> list[dict[str, str]]:
        """One device, which no link slows down, and the chosen settings."""
        rows = [self._row("1 device, predicted", self._prediction(at.but(ranks=1), "alone"))]
        name = f"t={at['ranks']}{' with sequence parallelism' * at.plan.sequence_parallel}"
        shown = [at.predicted, *at.runs[:1]]
        if at["ranks"] == 1:
            name, shown = "1 device", shown[1:]
        return rows + [self._row(f"{name}, {report.clock}", report) for report in shown]

    def _outcome(self, at: At) -> str:
        sent = [amounts.traffic(report)["bytes"].sum() for report in (at.predicted, at.measured)]
        how = "are exactly as predicted" if sent[0] == sent[1] else "differ"
        return f"the bytes sent {how}; {super()._outcome(at)}"
