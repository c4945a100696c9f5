"""ZeRO with sliders: what every stage keeps on a device, what it sends for that, the real thing.

Left the peak of a step by category, of all four stages; right what a rank sends per step. Both are
read off the compiled program (interpret/quick.py), padding included, at once and for any number of
devices. «Run it» trains on one real process per device under the chosen stage; its
ledger's peak and its counted bytes then stand below the prediction.
"""

from __future__ import annotations

import threading
from typing import Any

from paralab.checks import illegal
from paralab.interpret import quick
from paralab.report.report import Report
from paralab.spec import ModelSpec, Plan
from paralab.theory import zero
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.memory_curves import fullest
from paralab.view.widget_bench import Bench, Progress
from paralab.view.widget_parts import Knob, Sketch, given
from paralab.view.widget_shared import MOST_RANKS, check_real, count
from paralab.view.zero_bars import memory_and_traffic, table

STAGES = {0: "plain DP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
RANKS = (1, 2, 3, 4, 8, 16, 64)
MICROBATCHES = (1, 2, 3, 4, 8)
HIDDEN = (64, 96, 128, 192, 256, 384)
MODEL = ModelSpec(layers=8, hidden=128, heads=4, seq_len=64)  # one block in eight is gathered
PLAN = Plan(dp=4, zero_stage=2, microbatches=2, microbatch_size=1, bucket_bytes=2**18)
STEPS = 4
STATES = ("parameters", "gradients", "optimizer")


class Zero(Bench):
    """Stage, devices N, micro-batches m, hidden size, precision, recomputation.

    model  where the hidden size starts, and all else about the model; default: 8 layers
    plan   where the other knobs start; its bucket_bytes, prefetch and microbatch_size are used
    """

    name = "zero"

    def __init__(self, model: ModelSpec | None = None, plan: Plan | None = None) -> None:
        self.model = given("model", model, MODEL)
        self.plan = given("plan", plan, PLAN)
        if self.plan.pp > 1:
            raise illegal("pp", self.plan.pp, "this widget is about data parallelism", "1")
        at = self.plan
        super().__init__(
            {
                "stage": Knob(
                    label="stage",
                    value=at.zero_stage,
                    buttons=True,
                    options=[(name, stage) for stage, name in STAGES.items()],
                ),
                "ranks": _slider("devices N", RANKS, at.dp, "{} device"),
                "microbatches": _slider(
                    "micro-batches", MICROBATCHES, at.microbatches, "{} micro-batch", "es"
                ),
                "hidden": _slider("hidden size", HIDDEN, self.model.hidden, "hidden {}", ""),
                "precision": Knob(
                    label="precision",
                    value=at.precision,
                    buttons=True,
                    options=[("fp32", "fp32"), ("bf16, mixed", "bf16"), ("fp16, mixed", "fp16")],
                ),
                "recompute": Knob(
                    label="recompute",
                    value=at.recompute,
                    buttons=True,
                    options=[
                        (f"{kind} recomputed" if kind != "none" else "all kept", kind)
                        for kind in ("none", "selective", "full")
                    ],
                ),
            }
        )

    # ---- settings as descriptions --------------------------------------------------------------
    def model_of(self, knobs: dict[str, Any]) -> ModelSpec:
        """The model that these settings mean; heads stay as wide as they are."""
        width = self.model.hidden // self.model.heads
        heads = max(1, knobs["hidden"] // width)
        heads = next(n for n in range(heads, 0, -1) if knobs["hidden"] % n == 0)
        return self.model.replace(hidden=knobs["hidden"], heads=heads)

    def plan_of(self, knobs: dict[str, Any], stage: int | None = None) -> Plan:
        """The plan that these settings mean, with this stage or the chosen one."""
        return self.plan.replace(
            dp=knobs["ranks"],
            microbatches=knobs["microbatches"],
            precision=knobs["precision"],
            recompute=knobs["recompute"],
            shard=None,
            grad_sync="overlapped",
            zero_stage=knobs["stage"] if stage is None else stage,
        )

    def bytes_of(self, knobs: dict[str, Any], stage: int) -> dict[str, int]:
        """{category: bytes} at a step's fullest moment, on every device."""
        return quick.peak(self.model_of(knobs), self.plan_of(knobs, stage))

    def sent_of(self, knobs: dict[str, Any], stage: int) -> int:
        """Bytes that each device sends per step, padding included."""
        return int(quick.sent(self.model_of(knobs), self.plan_of(knobs, stage)))

    # ---- the bench ------------------------------------------------------------------------------
    def _steady(self, chart: Chart) -> Chart:
        return chart  # bytes grow fast here: the axis has to follow

    def _predict(self, knobs: dict[str, Any]) -> Sketch:
        self.plan_of(knobs).validate(self.model_of(knobs))
        return Sketch(chart=self._bars(knobs), rows=self._predicted(knobs))

    def _measure(
        self, knobs: dict[str, Any], *, stop: threading.Event, progress: Progress
    ) -> Report:
        from paralab.experiment import run

        model, plan = self.model_of(knobs), self.plan_of(knobs)
        check_real(knobs["ranks"], sum(self.bytes_of(knobs, plan.zero_stage).values()), "devices")
        return run(model, plan, steps=STEPS, progress=progress, stop=stop)

    def _compare(self, knobs: dict[str, Any], found: Report) -> Sketch:
        kept, sent = _measured(found)
        peak, foreseen = sum(kept.values()), sum(self.bytes_of(knobs, knobs["stage"]).values())
        exact = sent == self.sent_of(knobs, knobs["stage"])
        return Sketch(
            chart=self._bars(knobs, found),
            rows=[*self._predicted(knobs), _row(f"{STAGES[knobs['stage']]}, measured", kept, sent)],
            said=f"Done, {count(knobs['ranks'], 'real process', 'es')}: the peak is "
            f"{theme.scaled(peak, 'B')}, predicted were {theme.scaled(foreseen, 'B')}; bytes sent "
            + ("are as predicted, every one." if exact else f"are {theme.scaled(sent, 'B')}."),
        )

    def _hint(self, knobs: dict[str, Any]) -> str:
        if knobs["ranks"] > MOST_RANKS:
            return f"«Run it» takes up to {MOST_RANKS} devices."
        return super()._hint(knobs)

    # ---- what is shown --------------------------------------------------------------------------
    def _predicted(self, knobs: dict[str, Any]) -> list[dict[str, str]]:
        """A row for plain data parallelism and one for the chosen stage."""
        rows, model = [], self.model_of(knobs)
        for stage in sorted({0, knobs["stage"]}):
            program = quick.program_of(model, self.plan_of(knobs, stage), "adamw", 0)
            each = sum(quick.states(program, 0).values()) / model.num_params
            times = zero.volume(stage, knobs["microbatches"]) if knobs["ranks"] > 1 else 0
            rows.append(
                _row(
                    f"{STAGES[stage]}, predicted",
                    self.bytes_of(knobs, stage),
                    self.sent_of(knobs, stage),
                    f"{each:.2f}",
                    f"{times} Ψ(N−1)/N" if times else "0",
                )
            )
        return rows

    def _bars(self, knobs: dict[str, Any], found: Report | None = None) -> Chart:
        """The four stages, the chosen one in full colour, below it what a run measured."""
        bars, sent, chosen = {}, {}, [STAGES[knobs["stage"]]]
        for stage, name in STAGES.items():
            bars[name], sent[name] = self.bytes_of(knobs, stage), self.sent_of(knobs, stage)
            if found is not None and [name] == chosen:
                bars["measured"], sent["measured"] = _measured(found)
        clock = "predicted" if found is None else "predicted and measured"
        psi = self.model_of(knobs).num_params
        fig = memory_and_traffic(
            bars,
            sent,
            bright=[*chosen, "measured"],
            title=self._finding(knobs),
            below=f"{clock}, per device and step · 1 MB = 10<sup>6</sup> bytes · Ψ = {psi:,}",
        )
        return fig.explained(
            f"ZeRO on {count(knobs['ranks'], 'device')}, {clock}: {len(bars)} bars by category",
            table(bars, sent),
        )

    def _finding(self, knobs: dict[str, Any]) -> str:
        stage = knobs["stage"]
        peaks = {s: sum(self.bytes_of(knobs, s).values()) for s in (0, stage)}
        said = f"{STAGES[stage]} on {count(knobs['ranks'], 'device')}: "
        if stage == 0:
            return f"{said}{theme.scaled(peaks[0], 'B')} on each, everything on every one"
        said += f"{100 * peaks[stage] / peaks[0]:.0f} % of the memory of plain DP"
        before, now = self.sent_of(knobs, 0), self.sent_of(knobs, stage)
        if not before:
            return f"{said}, nobody to share with"
        times = now / before
        return (
            f"{said} for {'the same' if abs(times - 1) < 0.01 else f'{times:.2g} times the'} "
            "traffic"
        )


def _measured(found: Report) -> tuple[dict[str, int], int]:
    """({category: bytes} at the worst sample of the fullest rank, bytes a rank sends per step)."""
    curve = fullest(found)
    return curve.samples[curve.peak_at], round(float(found.traffic()["bytes"].max()))


def _row(
    name: str, kept: dict[str, int], sent: int, each: str = "", formula: str = ""
) -> dict[str, str]:
    states = sum(kept.get(category, 0) for category in STATES)
    rest = sum(kept.values()) - states - kept.get("activations", 0) - kept.get("buffers", 0)
    return {
        "at the peak": name,
        "model states": theme.scaled(states, "B"),
        "bytes per Ψ": each,
        "activations": theme.scaled(kept.get("activations", 0), "B"),
        "buffers": theme.scaled(kept.get("buffers", 0), "B"),
        "rest": theme.scaled(rest, "B"),
        "in all": theme.scaled(sum(kept.values()), "B"),
        "sent": theme.scaled(sent, "B"),
        "that is": formula,
    }


def _slider(label: str, usual: tuple[int, ...], value: int, text: str, plural: str = "s") -> Knob:
    return Knob(
        label=label,
        value=value,
        options=[(text.format(n) + plural * (n != 1), n) for n in sorted({*usual, value})],
    )
