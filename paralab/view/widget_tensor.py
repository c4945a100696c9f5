"""Tensor parallelism with sliders: memory and bytes of a rank in 1D, 2D, 2.5D and 3D, for real too.

Left what a rank needs at the fullest moment of a step, by category; right what it sends per step,
on average over the ranks (a broadcast's root sends more than the others). Both are read off the
compiled program (interpret/quick.py), at once and up to GPT-3's hidden size. A mode that the ranks,
the heads or the samples cannot make has no bar. «Run it» trains on one real process per rank in the
chosen mode; its ledger's peak and its counted bytes then stand below.
"""

from __future__ import annotations

import threading
from fractions import Fraction
from functools import lru_cache
from typing import Any

from paralab.checks import illegal
from paralab.interpret import quick
from paralab.report.report import Report
from paralab.spec import ModelSpec, Plan
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.matrix_blocks import MODE_NAME
from paralab.view.memory_curves import fullest
from paralab.view.widget_bench import Bench, Progress
from paralab.view.widget_parts import Knob, Sketch, given
from paralab.view.widget_shared import MOST_RANKS, check_real
from paralab.view.zero_bars import memory_and_traffic, table

RANKS = (4, 8, 16, 64)
TOKENS = (128, 256, 512, 2048, 8192, 32768, 131072)
HIDDEN = (64, 128, 256, 512, 2048, 8192, 12288)
MODEL = ModelSpec(layers=2, hidden=64, heads=8, seq_len=32)
MOST_HEADS = 64
STEPS = 2


class Tensor(Bench):
    """Mode, tokens per step, hidden size, ranks.

    model  where the hidden size starts, and all else about the model; default: 2 layers, 32 tokens
           per sample
    plan   where mode, ranks and micro-batch size start; default: 2D on 4 ranks, 4 samples
    """

    name = "tensor"

    def __init__(self, model: ModelSpec | None = None, plan: Plan | None = None) -> None:
        self.model = given("model", model, MODEL)
        at = given("plan", plan, Plan(tp=4, tp_mode="2d", microbatch_size=4))
        if at.world_size > at.tp or at.tp == 1:
            raise illegal(
                "plan",
                at,
                "this widget is about tensor parallelism alone",
                "tp of at least 2, and pp=1, dp=1",
            )
        self.plan, s = at, self.model.seq_len
        usual = {n for n in TOKENS if n % s == 0} | {at.microbatch_size * s}
        super().__init__(
            {
                "mode": Knob(
                    label="mode",
                    value=at.tp_mode,
                    buttons=True,
                    options=[(name, mode) for mode, name in MODE_NAME.items()],
                ),
                "tokens": _slider("tokens", usual, at.microbatch_size * s, "{:,} tokens"),
                "hidden": _slider(
                    "hidden size", {*HIDDEN, self.model.hidden}, self.model.hidden, "hidden {:,}"
                ),
                "ranks": _slider("ranks P", {*RANKS, at.tp}, at.tp, "{} ranks"),
            }
        )

    # ---- settings as descriptions ---------------------------------------------------------------
    def model_of(self, knobs: dict[str, Any]) -> ModelSpec:
        """The model that these settings mean; heads stay as wide as they are, up to 64 of them."""
        if knobs["hidden"] == self.model.hidden:
            return self.model
        width = self.model.hidden // self.model.heads
        heads = max(1, min(MOST_HEADS, knobs["hidden"] // width))
        heads = next(n for n in range(heads, 0, -1) if knobs["hidden"] % n == 0)
        return self.model.replace(hidden=knobs["hidden"], heads=heads)

    def plan_of(self, knobs: dict[str, Any], mode: str | None = None) -> Plan:
        """The plan that these settings mean, in this mode or the chosen one.

        Raises ValueError where these ranks, heads or samples do not make it.
        """
        batch = knobs["tokens"] // self.model.seq_len
        return checked(self.model_of(knobs), knobs["ranks"], mode or knobs["mode"], batch)

    def modes_of(self, knobs: dict[str, Any]) -> dict[str, Plan]:
        """{mode: plan} of the modes that there are at these settings; 2.5D on one grid is 2D."""
        found = {}
        for mode in MODE_NAME:
            try:
                plan = self.plan_of(knobs, mode)
            except ValueError:
                continue
            if mode != "2.5d" or plan.tp_grid[1] > 1 or knobs["mode"] == mode:
                found[mode] = plan
        return found

    def bytes_of(self, knobs: dict[str, Any], mode: str) -> dict[str, int]:
        """{category: bytes} on a rank at the fullest moment of a step."""
        return peak(self.model_of(knobs), self.plan_of(knobs, mode))

    def sent_of(self, knobs: dict[str, Any], mode: str) -> Fraction:
        """Bytes that a rank sends per step, on average over the ranks."""
        return 4 * elements_sent(self.model_of(knobs), self.plan_of(knobs, mode))

    # ---- the bench ------------------------------------------------------------------------------
    def _steady(self, chart: Chart) -> Chart:
        return chart  # bytes grow fast here: the axis has to follow

    def _predict(self, knobs: dict[str, Any]) -> Sketch:
        return Sketch(chart=self._bars(knobs), rows=self._predicted(knobs))

    def _measure(
        self, knobs: dict[str, Any], *, stop: threading.Event, progress: Progress
    ) -> Report:
        from paralab.experiment import run

        model, plan = self.model_of(knobs), self.plan_of(knobs)
        check_real(knobs["ranks"], sum(self.bytes_of(knobs, plan.tp_mode).values()), "tokens")
        return run(model, plan, steps=STEPS, progress=progress, stop=stop)

    def _compare(self, knobs: dict[str, Any], found: Report) -> Sketch:
        kept, sent = measured(found)
        foreseen, asked = self.bytes_of(knobs, knobs["mode"]), self.sent_of(knobs, knobs["mode"])
        bytes_said = "as predicted, every one" if sent == asked else theme.scaled(sent, "B")
        return Sketch(
            chart=self._bars(knobs, found),
            rows=[
                *self._predicted(knobs),
                _row(f"{MODE_NAME[knobs['mode']]}, measured", kept, sent),
            ],
            said=f"Done, {knobs['ranks']} real processes: the peak is "
            f"{theme.scaled(sum(kept.values()), 'B')}, the formula says "
            f"{theme.scaled(sum(foreseen.values()), 'B')} (workspace is not in it); bytes sent are "
            f"{bytes_said}.",
        )

    def _hint(self, knobs: dict[str, Any]) -> str:
        if knobs["ranks"] > MOST_RANKS:
            return f"«Run it» takes up to {MOST_RANKS} ranks."
        return super()._hint(knobs)

    # ---- what is shown --------------------------------------------------------------------------
    def _predicted(self, knobs: dict[str, Any]) -> list[dict[str, str]]:
        return [
            _row(
                f"{MODE_NAME[mode]}, predicted",
                self.bytes_of(knobs, mode),
                self.sent_of(knobs, mode),
            )
            for mode in self.modes_of(knobs)
        ]

    def _bars(self, knobs: dict[str, Any], found: Report | None = None) -> Chart:
        """A bar for every mode, the chosen one in full colour, below it what a run measured."""
        bars, sent, chosen = {}, {}, MODE_NAME[knobs["mode"]]
        for mode in self.modes_of(knobs):
            label = MODE_NAME[mode]
            bars[label], sent[label] = self.bytes_of(knobs, mode), self.sent_of(knobs, mode)
            if found is not None and label == chosen:
                bars["measured"], sent["measured"] = measured(found)
        if not bars:
            raise ValueError(
                f"{knobs['ranks']} ranks cannot share out {self.model_of(knobs).heads} heads and "
                f"{knobs['tokens']:,} tokens in any mode: more tokens or a larger hidden size "
                "would do"
            )
        clock = "predicted" if found is None else "predicted and measured"
        fig = memory_and_traffic(
            bars,
            {label: int(count) for label, count in sent.items()},
            bright=[chosen, "measured"],
            title=self._finding(knobs),
            axis="tp",
            below=f"{clock}, per rank and step · {self.model.layers} layers, "
            f"{knobs['tokens']:,} tokens, h = {knobs['hidden']:,} · 1 MB = 10<sup>6</sup> "
            "bytes",
        )
        return fig.explained(
            f"tensor parallelism on {knobs['ranks']} ranks, {clock}: {len(bars)} bars by category",
            table(bars, {label: int(count) for label, count in sent.items()}),
        )

    def _finding(self, knobs: dict[str, Any]) -> str:
        there, chosen = self.modes_of(knobs), knobs["mode"]
        sent = {mode: self.sent_of(knobs, mode) for mode in there}
        least = min(sent, key=sent.__getitem__)
        said = f"{knobs['ranks']} ranks, {knobs['tokens']:,} tokens: "
        if chosen not in there:
            return f"{said}no {MODE_NAME[chosen]} of these; {MODE_NAME[least]} sends least"
        if chosen == least:
            return f"{said}{MODE_NAME[chosen]} sends least"
        times = float(sent[chosen] / sent[least])
        return f"{said}{MODE_NAME[chosen]} sends {times:.2g} times as much as {MODE_NAME[least]}"


@lru_cache(maxsize=256)
def checked(model: ModelSpec, tp: int, mode: str, batch: int) -> Plan:
    """The plan of these settings. Raises ValueError where the model does not allow it."""
    plan = Plan(tp=tp, tp_mode=mode, microbatch_size=batch)
    plan.validate(model)
    return plan


@lru_cache(maxsize=256)
def peak(model: ModelSpec, plan: Plan) -> dict[str, int]:
    """{category: bytes} on a rank at the fullest moment of a step."""
    return quick.peak(model, plan)


@lru_cache(maxsize=256)
def elements_sent(model: ModelSpec, plan: Plan) -> Fraction:
    """Elements that a rank of a tp group sends in a step, on average over the group."""
    return quick.sent(model, plan, *range(plan.tp)) / 4


def measured(found: Report) -> tuple[dict[str, int], Fraction]:
    """({category: bytes} at the worst sample of the fullest rank, bytes a rank sends per step)."""
    curve, sent = fullest(found), found.traffic()["bytes"]
    return curve.samples[curve.peak_at], Fraction(round(sent.sum()), len(sent))


def _row(name: str, kept: dict[str, int], sent: Fraction) -> dict[str, str]:
    states = [kept.get(category, 0) for category in ("parameters", "gradients", "optimizer")]
    return {
        "at the peak": name,
        "weights": theme.scaled(states[0], "B"),
        "gradients, moments": theme.scaled(states[1] + states[2], "B"),
        "activations": theme.scaled(kept.get("activations", 0), "B"),
        "rest": theme.scaled(sum(kept.values()) - sum(states) - kept.get("activations", 0), "B"),
        "in all": theme.scaled(sum(kept.values()), "B"),
        "sent": theme.scaled(float(sent), "B"),
    }


def _slider(label: str, values: set[int], value: int, text: str) -> Knob:
    return Knob(label=label, value=value, options=[(text.format(n), n) for n in sorted(values)])
