"""What training needs on one device, with sliders for the model's sizes: bytes by category.

A bar is what is alive at the peak of a step, in the program that keeps the states of the recipe
(theory/needs.py): all parts are of one moment, so their sum is the peak. “Run it” trains the model
on one real process, in fp32; a model that does not fit on this machine or would take minutes is
refused with the reason.
"""

from __future__ import annotations

from typing import Any

from paralab.interpret import quick
from paralab.spec import Plan
from paralab.theory import needs
from paralab.view.chart import Chart
from paralab.view.memory_curves import curves, fullest
from paralab.view.stacked_bars import bytes_bars, share_of
from paralab.view.theme import in_bytes
from paralab.view.widget import At, Widget
from paralab.view.widget_parts import Knob, duration, slider

HIDDEN = (64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 12288, 16384, 25600)
DEVICE, BYTES = "80 GB GPU", 80 * 10**9  # whose memory is drawn as a line
KEEPS: dict[str, dict[str, Any]] = {  # by recipe: settings of a plan that keeps its states
    "fp32": {},
    "zero-fp16": {"precision": "fp16"},
    "megatron-bf16": {"precision": "bf16", "grad_dtype": "fp32"},
}


class Memory(Widget):
    """Knobs: layers, hidden size, sequence length, micro-batch size, recipe of model states.

    model    where the sliders start; default: the "laptop" preset
    plan     where the micro-batch size starts; nothing else of it is used
    cluster  the machine by whose speed and memory a real run is refused; default: this one
    """

    name, steps, longest, plan = "memory", 4, 20.0, Plan(microbatch_size=2)
    used = ("microbatch_size",)
    board = {
        "layers": slider("layers", (1, 2, 4, 8, 12, 24, 36, 48, 80, 96, 128), "layer"),
        "hidden": slider("hidden size", HIDDEN, "hidden {:,}".format),
        "seq_len": slider("sequence", [2**k for k in range(5, 13)], "token"),
        "microbatch_size": slider("micro-batch", (1, 2, 4, 8, 16, 32), "sample"),
        "recipe": Knob(label="recipe", offers={name: name for name in KEEPS}, start="zero-fp16"),
    }

    def _heads(self, hidden: int) -> int:
        """As many heads as published models of this width have: each is 32 to 128 wide."""
        return hidden // (32 if hidden <= 256 else 64 if hidden <= 1024 else 128)

    def held(self, at: At, recipe: str) -> dict[str, int]:
        """{category: bytes} at the peak of a step on one device under ``recipe``."""
        plan = at.plan.replace(**KEEPS[recipe])
        return quick.peak(at.model, plan, gloo=not self._gpus(at))

    def _charts(self, at: At) -> list[Chart]:
        bars = {at["recipe"]: self.held(at, at["recipe"])}
        total = sum(bars[at["recipe"]].values())
        if at.measured is not None:
            bars["fp32, measured"] = fullest(curves(at.measured)).held
        title = f"Training {_large(at.model.num_params)} parameters takes {in_bytes(total)}, "
        title += f"{share_of(total, BYTES)} one {DEVICE}"
        return [bytes_bars(bars, {DEVICE: BYTES}, title=title)]

    def _rows(self, at: At) -> list[dict[str, str]]:
        rows = [self._row(at, at["recipe"], f"{duration(at.predicted.step_time)}, predicted")]
        if at.measured is not None:
            time = f"{duration(at.measured.step_time)}, measured"
            rows.append(self._row(at, "fp32", time, ", as run"))
        return rows

    def _row(self, at: At, recipe: str, time: str, how: str = "") -> dict[str, str]:
        held, states = self.held(at, recipe), sum(needs.model_states(at.model, recipe).values())
        kept, none = held["activations"], "none: the peak is in the update"
        return {
            "bytes per parameter": f"{recipe}{how}: {needs.bytes_per_parameter(recipe)}",
            "parameters": _large(at.model.num_params),
            "model states": in_bytes(states),
            "activations at the peak": in_bytes(kept) if kept else none,
            "peak": in_bytes(sum(held.values())),
            f"{DEVICE}s for the states": f"{needs.devices_for(states, BYTES):,}",
            "step time here": time,
        }

    def _outcome(self, at: At) -> str:
        peak, expect = at.measured.peak_memory, sum(self.held(at, "fp32").values())
        exact = "exactly as predicted" if peak == expect else f"predicted: {in_bytes(expect)}"
        text = f"{duration(at.measured.step_time)} per step, loss {at.measured.losses[-1]:.2f}"
        return f"{text}; in fp32, in which it ran, the peak is {in_bytes(peak)} ({exact})"


def _large(count: int) -> str:
    for word, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:,.3g} {word}"
    return f"{count:,}"
