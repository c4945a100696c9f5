"""What training needs on one device, with sliders for the model's sizes: bytes by category.

The bars come from formulas: model states as the recipe says (theory/needs.py), activations of one
micro-batch from the program (half the bytes where a recipe computes in 16 bits). «Run it» trains
the model on one real process, in fp32; a model that this machine could not hold or would take
minutes for is refused, with the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from paralab.checks import illegal
from paralab.interpret import quick
from paralab.interpret.predict import predict
from paralab.report.report import Report
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory import needs
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.memory import bytes_bars
from paralab.view.widget_bench import Bench, Progress
from paralab.view.widget_parts import Knob, Sketch, given

LAYERS = (1, 2, 4, 8, 12, 24, 36, 48, 80, 96, 128)
HIDDEN = (64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 12288, 16384, 25600)
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SAMPLES = (1, 2, 4, 8, 16, 32)
STEPS = 4
LONGEST = 5.0  # seconds that one real step may take by prediction
DEVICE = {"80 GB GPU": 80 * 10**9}


class Memory(Bench):
    """Layers, hidden size, sequence length, micro-batch size, recipe of bytes per parameter.

    model    where the sliders start; default: the "laptop" preset
    device   {name: bytes}, one device that is drawn as a line
    cluster  whose speed and memory a real run is held against; default ``Cluster.local()``
    """

    name = "memory"

    def __init__(
        self,
        model: ModelSpec | None = None,
        *,
        device: Mapping[str, int] = DEVICE,
        cluster: Cluster | None = None,
    ) -> None:
        self.model = given("model", model, ModelSpec.preset("laptop"))
        if not isinstance(device, Mapping) or len(device) != 1:
            raise illegal("device", device, "not one device", '{"80 GB GPU": 80 * 10**9}')
        (self.device,) = device.items()
        self.cluster = given("cluster", cluster, Cluster.local)
        super().__init__(
            {
                "layers": _knob("layers", LAYERS, self.model.layers, "{:,} layers"),
                "hidden": _knob("hidden size", HIDDEN, self.model.hidden, "hidden {:,}"),
                "seq_len": _knob("sequence", LENGTHS, self.model.seq_len, "{:,} tokens"),
                "microbatch_size": _knob("micro-batch", SAMPLES, 2, "{:,} samples"),
                "recipe": Knob(
                    label="recipe",
                    value="zero-fp16",
                    options=[(name, name) for name in needs.RECIPES],
                ),
            }
        )

    def model_of(self, knobs: dict[str, Any]) -> ModelSpec:
        """The model that these settings mean; heads follow the hidden size."""
        hidden = knobs["hidden"]
        heads = self.model.heads if hidden == self.model.hidden else _heads(hidden)
        return self.model.replace(
            layers=knobs["layers"], hidden=hidden, heads=heads, seq_len=knobs["seq_len"]
        )

    def bytes_of(self, knobs: dict[str, Any], recipe: str) -> dict[str, int]:
        """{category: bytes} of one step on one device under ``recipe``."""
        model, found = self.model_of(knobs), {}
        for name, size in needs.model_states(model, recipe).items():
            category = "gradients" if name == "master gradients" else name
            found[category] = found.get(category, 0) + size
        kept = quick.peak(model, Plan(microbatch_size=knobs["microbatch_size"]))["activations"]
        found["activations"] = kept if recipe == "fp32" else kept // 2
        return found

    # ---- the bench ----------------------------------------------------------------------------
    def _steady(self, chart: Chart) -> Chart:
        return chart  # bytes grow by millions here: the axis has to follow

    def _predict(self, knobs: dict[str, Any]) -> Sketch:
        return Sketch(
            chart=self._bars(knobs, knobs["recipe"]),
            rows=[self._row(knobs, knobs["recipe"], f"{_time(self._seconds(knobs))}, predicted")],
        )

    def _measure(
        self, knobs: dict[str, Any], *, stop: threading.Event, progress: Progress
    ) -> Report:
        from paralab.experiment import run

        need, seconds = sum(self.bytes_of(knobs, "fp32").values()), self._seconds(knobs)
        if need > self.cluster.memory // 2:
            raise ValueError(
                f"this model needs {theme.scaled(need, 'B')} in fp32, and this machine has "
                f"{theme.scaled(self.cluster.memory, 'B')}: fewer layers or a smaller hidden size "
                "would fit"
            )
        if seconds > LONGEST:
            raise ValueError(
                f"one step would take about {_time(seconds)} on this machine: fewer layers, a "
                "smaller hidden size or a smaller micro-batch would be done in seconds"
            )
        plan = Plan(microbatch_size=knobs["microbatch_size"])
        return run(self.model_of(knobs), plan, steps=STEPS, progress=progress, stop=stop)

    def _compare(self, knobs: dict[str, Any], found: Report) -> Sketch:
        foreseen = self._seconds(knobs)
        return Sketch(
            chart=self._bars(knobs, knobs["recipe"], run=True),
            rows=[
                self._row(knobs, knobs["recipe"], f"{_time(foreseen)}, predicted"),
                self._row(knobs, "fp32", f"{_time(found.step_time)}, measured", "fp32, as run"),
            ],
            said=f"Trained {len(found.losses)} steps on one real process: "
            f"{_time(found.step_time)} per step, loss {found.losses[-1]:.2f}.",
        )

    def _needs(self, knobs: dict[str, Any]) -> Any:
        return tuple((name, value) for name, value in knobs.items() if name != "recipe")

    def _hint(self, knobs: dict[str, Any]) -> str:
        return "«Run it» trains this model on one real process."

    def _starting(self, knobs: dict[str, Any]) -> str:
        return "starting one process …"

    def _seconds(self, knobs: dict[str, Any]) -> float:
        plan = Plan(microbatch_size=knobs["microbatch_size"])
        return predict(self.model_of(knobs), plan, self.cluster, steps=1).step_time

    def _bars(self, knobs: dict[str, Any], recipe: str, *, run: bool = False) -> Chart:
        need, (label, size) = self.bytes_of(knobs, recipe), self.device
        total = sum(need.values())
        share = f"{total / size:,.3g} times" if total > size else f"{100 * total / size:.0f} % of"
        if total < 0.01 * size:
            share = "less than 1 % of"
        count = _large(self.model_of(knobs).num_params)
        title = (
            f"{count} parameters make {theme.scaled(total, 'B')} with activations: "
            f"{share} one {label}"
        )
        bars = {recipe: need} | ({"fp32, as run": self.bytes_of(knobs, "fp32")} if run else {})
        return bytes_bars(bars, dict([self.device]), title=title)

    def _row(self, knobs: dict[str, Any], recipe: str, time: str, name: str = "") -> dict[str, str]:
        model, need = self.model_of(knobs), self.bytes_of(knobs, recipe)
        states = sum(needs.model_states(model, recipe).values())
        label, size = self.device
        return {
            "bytes per parameter": f"{name or recipe}: {needs.bytes_per_parameter(recipe)}",
            "parameters": _large(model.num_params),
            "model states": theme.scaled(states, "B"),
            "activations": theme.scaled(need["activations"], "B"),
            "in all": theme.scaled(sum(need.values()), "B"),
            f"{label}s for the states": f"{needs.devices_for(states, size):,}",
            "a step here": time,
        }


def _knob(label: str, usual: tuple[int, ...], value: int, text: str) -> Knob:
    def written(n: int) -> str:
        said = text.format(n)
        return said.removesuffix("s") if n == 1 else said

    return Knob(
        label=label, value=value, options=[(written(n), n) for n in sorted({*usual, value})]
    )


def _large(count: int) -> str:
    for word, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:,.3g} {word}"
    return f"{count:,}"


def _heads(hidden: int) -> int:
    """As many as published models of this width have: 32 to 128 wide each."""
    return hidden // (32 if hidden <= 256 else 64 if hidden <= 1024 else 128)


def _time(seconds: float) -> str:
    for unit, size in (("years", 31_557_600), ("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return theme.scaled(seconds, "s")
