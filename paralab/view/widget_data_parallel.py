"""Data parallelism with sliders: what theory says at once, real ranks on demand.

The prediction (interpret/predict.py) follows the sliders. «Run it» trains on real processes; of
that run the picture shows the replay on the links that the slider states, below the prediction and
on the same time scale. The link slider needs no new run: one run is replayed on any link.
"""

from __future__ import annotations

import threading
from typing import Any

from paralab.interpret.predict import predict
from paralab.report import metrics
from paralab.report.report import Report
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.view import theme
from paralab.view.timeline import timeline, timelines
from paralab.view.widget_bench import Bench, Progress
from paralab.view.widget_parts import Knob, Sketch, given
from paralab.view.widget_shared import at_speed, beside_replay, count, crowd, few, link_knob

RANKS = (1, 2, 3, 4, 6, 8)
BUCKETS = tuple(m * 10**e for e in (4, 5, 6) for m in (1, 2, 5)) + (10**7,)  # 10 kB to 10 MB
SAMPLES = (1, 2, 4, 8, 16)
BANDWIDTHS = tuple(m * 10**e for e in range(7, 12) for m in (1, 3))  # 10 MB/s to 300 GB/s
STEPS = 6
SHOWN, BESIDE = 4, 2  # ranks drawn of a prediction, of two reports; the others do alike


class DataParallel(Bench):
    """Ranks, form of gradient sync, bucket size, micro-batch size, link speed.

    model    what is trained; default: the "laptop" preset
    plan     where the sliders start; only its data-parallel settings are used
    cluster  what is predicted and replayed on; default ``Cluster.local()``, this machine
    """

    name = "data_parallel"

    def __init__(
        self,
        model: ModelSpec | None = None,
        plan: Plan | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.model = given("model", model, ModelSpec.preset("laptop"))
        self.plan = plan = given("plan", plan, Plan(dp=4, bucket_bytes=200_000))
        plan.validate(self.model)
        self.cluster = given("cluster", cluster, Cluster.local)
        self.link = self.cluster.link("all_reduce", "intra")
        most = min(self.cluster.num_devices, 64)
        ranks = sorted({n for n in RANKS if n <= most} | {plan.dp})
        form = plan.grad_sync
        forms = ["naive", "bucketed", "overlapped"]
        if form not in forms:
            form = "overlapped"
        super().__init__(
            {
                "ranks": Knob(
                    label="ranks", value=plan.dp, options=[(count(n, "rank"), n) for n in ranks]
                ),
                "grad_sync": Knob(
                    label="gradients", value=form, buttons=True, options=[(f, f) for f in forms]
                ),
                "bucket_bytes": Knob(
                    label="bucket size",
                    value=plan.bucket_bytes,
                    options=[
                        (theme.scaled(b, "B"), b) for b in sorted({*BUCKETS, plan.bucket_bytes})
                    ],
                    tip="gradients travel in flat buckets of about this size",
                ),
                "bandwidth": link_knob(self.link, BANDWIDTHS),
                "microbatch_size": Knob(
                    label="micro-batch",
                    value=plan.microbatch_size,
                    options=[
                        (count(b, "sample"), b) for b in sorted({*SAMPLES, plan.microbatch_size})
                    ],
                ),
            }
        )

    # ---- settings as descriptions --------------------------------------------------------------
    def plan_of(self, knobs: dict[str, Any]) -> Plan:
        """The plan that these settings mean."""
        return self.plan.replace(
            dp=knobs["ranks"],
            grad_sync=knobs["grad_sync"],
            bucket_bytes=knobs["bucket_bytes"],
            microbatch_size=knobs["microbatch_size"],
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
        return Sketch(
            chart=few(chart, SHOWN, knobs["ranks"]),
            rows=[_numbers("predicted", expect)],
        )

    def _measure(
        self, knobs: dict[str, Any], *, stop: threading.Event, progress: Progress
    ) -> Report:
        from paralab.experiment import run

        return run(self.model, self.plan_of(knobs), steps=STEPS, progress=progress, stop=stop)

    def _compare(self, knobs: dict[str, Any], found: Report) -> Sketch:
        expect, replayed = self._expect(knobs), found.replay(self.cluster_of(knobs))
        drawn = timelines(expect, replayed, ranks=range(min(BESIDE, knobs["ranks"])))
        return Sketch(
            chart=few(drawn, BESIDE, knobs["ranks"]),
            rows=[
                _numbers("predicted", expect),
                _numbers("replayed", replayed),
                _numbers(crowd(found), found),
            ],
            said=f"Done, {count(knobs['ranks'], 'real process', 'es')}: the prediction "
            f"{beside_replay(expect, replayed)}.",
        )

    def _needs(self, knobs: dict[str, Any]) -> Any:
        return tuple((name, value) for name, value in knobs.items() if name != "bandwidth")


def _numbers(clock: str, report: Report) -> dict[str, str]:
    step = metrics.typical_step(report)
    part, seconds = metrics.shares(report, step), report.step_time
    sent = metrics.traffic(report)["bytes"].mean()
    talked = part["communication"] > 0
    return {
        "clock": clock,
        "time per step": f"{seconds * 1e3:.1f} ms",
        "samples per second": f"{report.plan.global_batch / seconds:,.0f}",
        "communication hidden": (
            f"{100 * part['hidden'] / part['communication']:.0f} %" if talked else "none needed"
        ),
        "ranks wait": f"{100 * part['wait'] / seconds:.0f} %",
        "sent per rank": theme.scaled(float(sent), "B") if talked else "0 B",
    }
