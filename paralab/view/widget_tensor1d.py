"""1D tensor parallelism with sliders: what t ranks save of a layer, and what its sums cost.

Below the predicted step, a bar per rank; every gap is a sum that the next layer needs. The table
puts one device and t ranks side by side: parameters, activations, bytes sent and the time that they
are waited for (interpret/predict.py). «Run it» trains on t real processes; the picture then has the
replay of that run on the links that the slider states. One run is replayed on any link.
"""

from __future__ import annotations

import threading
from typing import Any

from paralab.checks import illegal
from paralab.interpret import quick
from paralab.interpret.predict import predict
from paralab.report import metrics
from paralab.report.report import Report
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.view import theme
from paralab.view.timeline import timeline, timelines
from paralab.view.widget_bench import Bench, Progress
from paralab.view.widget_parts import Knob, Sketch, given
from paralab.view.widget_shared import at_speed, beside_replay, count, few, link_knob

RANKS = (1, 2, 4, 8)
SAMPLES = (1, 2, 4, 8)
BANDWIDTHS = tuple(m * 10**e for e in range(8, 12) for m in (1, 3))  # 100 MB/s to 300 GB/s
MODEL = ModelSpec(layers=2, hidden=128, heads=8, seq_len=64)
PLAN = Plan(tp=4, microbatch_size=4)
STEPS = 6
SHOWN = 1  # ranks drawn: all do alike
RESIDUAL = {"whole on every rank": "whole", "in parts of the sequence": "parts"}


class Tensor1D(Bench):
    """Ranks t, where the residual stream lies, micro-batch size, link speed.

    model    what is trained; its heads limit t. Default: 2 layers of 8 heads
    plan     where the sliders start; tensor-parallel in 1D
    cluster  what is predicted and replayed on; default ``Cluster.local()``, this machine
    """

    name = "tensor1d"

    def __init__(
        self,
        model: ModelSpec | None = None,
        plan: Plan | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.model, self.plan = given("model", model, MODEL), given("plan", plan, PLAN)
        at = self.plan
        if at.tp_mode != "1d" or at.dp * at.pp > 1:
            raise illegal(
                "plan", at, "this widget is about tensor parallelism in 1D alone", "pl.Plan(tp=...)"
            )
        at.validate(self.model)
        self.cluster = given("cluster", cluster, Cluster.local)
        self.link = self.cluster.link("all_reduce", "intra")
        self._alone: dict[int, dict[str, str]] = {}  # the table's first row, by micro-batch size
        most = self.cluster.num_devices
        ranks = sorted({n for n in RANKS if n <= most and self._divides(n)} | {at.tp})
        super().__init__(
            {
                "ranks": Knob(
                    label="ranks t", value=at.tp, options=[(count(n, "rank"), n) for n in ranks]
                ),
                "sequence": Knob(
                    label="residual",
                    buttons=True,
                    options=list(RESIDUAL.items()),
                    value="parts" if at.sequence_parallel else "whole",
                    tip="norms, dropout and sums: t times over, or a t-th on each rank",
                ),
                "microbatch_size": Knob(
                    label="micro-batch",
                    value=at.microbatch_size,
                    options=[
                        (count(b, "sample"), b) for b in sorted({*SAMPLES, at.microbatch_size})
                    ],
                ),
                "bandwidth": link_knob(self.link, BANDWIDTHS),
            }
        )

    def _divides(self, t: int) -> bool:
        """Whether every matrix, the heads and the sequence can be dealt out to t ranks."""
        try:
            Plan(tp=t, sequence_parallel=t > 1).validate(self.model)
        except ValueError:
            return False
        return True

    # ---- settings as descriptions --------------------------------------------------------------
    def plan_of(self, knobs: dict[str, Any]) -> Plan:
        """The plan that these settings mean."""
        parts = knobs["sequence"] == "parts" and knobs["ranks"] > 1
        alone = {"partition_activations": False} if knobs["ranks"] == 1 or parts else {}
        return self.plan.replace(
            tp=knobs["ranks"],
            sequence_parallel=parts,
            microbatch_size=knobs["microbatch_size"],
            **alone,
        )

    def cluster_of(self, knobs: dict[str, Any]) -> Cluster:
        """The cluster with its links at the chosen speed; latency stays."""
        return at_speed(self.cluster, self.link, knobs["bandwidth"])

    # ---- the bench ------------------------------------------------------------------------------
    def _expect(self, knobs: dict[str, Any]) -> Report:
        return predict(self.model, self.plan_of(knobs), self.cluster_of(knobs), steps=1)

    def _predict(self, knobs: dict[str, Any]) -> Sketch:
        expect = self._expect(knobs)
        chart = timeline(expect, ranks=range(min(SHOWN, knobs["ranks"])))
        return Sketch(chart=few(chart, SHOWN, knobs["ranks"]), rows=self._predicted(knobs, expect))

    def _measure(
        self, knobs: dict[str, Any], *, stop: threading.Event, progress: Progress
    ) -> Report:
        from paralab.experiment import run

        return run(self.model, self.plan_of(knobs), steps=STEPS, progress=progress, stop=stop)

    def _compare(self, knobs: dict[str, Any], found: Report) -> Sketch:
        expect, replayed = self._expect(knobs), found.replay(self.cluster_of(knobs))
        sent = [metrics.traffic(report)["bytes"].sum() for report in (expect, found)]
        exact = "bytes are as predicted, every one" if sent[0] == sent[1] else "bytes differ"
        drawn = timelines(expect, replayed, ranks=range(min(SHOWN, knobs["ranks"])))
        name = self._called(knobs)
        kept = found.memory.groupby("category")["bytes"].max()
        return Sketch(
            chart=few(drawn, SHOWN, knobs["ranks"]),
            rows=[*self._predicted(knobs, expect), _row(f"{name}, replayed", replayed, kept)],
            said=f"Done, {count(knobs['ranks'], 'real process', 'es')}: {exact}; the predicted "
            f"step {beside_replay(expect, replayed)}.",
        )

    def _needs(self, knobs: dict[str, Any]) -> Any:
        return self.plan_of(knobs)

    # ---- what is shown --------------------------------------------------------------------------
    def _called(self, knobs: dict[str, Any]) -> str:
        if knobs["ranks"] == 1:
            return "1 device"
        parts = knobs["sequence"] == "parts"
        return f"t={knobs['ranks']}{' with sequence parallelism' if parts else ''}"

    def _predicted(self, knobs: dict[str, Any], expect: Report) -> list[dict[str, str]]:
        """One device, which no link slows down, and what is chosen."""
        size, rows = knobs["microbatch_size"], []
        if size not in self._alone:
            alone = {**knobs, "ranks": 1}
            self._alone[size] = self._foreseen(alone, self._expect(alone))
        if knobs["ranks"] > 1:
            rows.append(self._foreseen(knobs, expect))
        return [self._alone[size], *rows]

    def _foreseen(self, knobs: dict[str, Any], expect: Report) -> dict[str, str]:
        kept = quick.most(self.model, self.plan_of(knobs))
        return _row(f"{self._called(knobs)}, predicted", expect, kept)


def _row(name: str, report: Report, kept: Any) -> dict[str, str]:
    wait, seconds = metrics.shares(report, metrics.typical_step(report))["wait"], report.step_time
    return {
        "clock": name,
        "parameters": theme.scaled(int(kept["parameters"]), "B"),
        "activations": theme.scaled(int(kept["activations"]), "B"),
        "sent per rank": theme.scaled(float(metrics.traffic(report)["bytes"].mean()), "B")
        if report.world_size > 1
        else "0 B",
        "time per step": f"{seconds * 1e3:.1f} ms",
        "of it waiting": f"{100 * wait / seconds:.0f} %",
    }
