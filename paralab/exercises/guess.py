"""A guess that is committed to before the run: predict, observe, explain.

People remember what surprised them, and only what was predicted can surprise. In a notebook a guess
is a slider and a button; ``.commit(value)`` does the same without a mouse. ipywidgets is imported
when one is shown.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from paralab.checks import illegal, real, whole
from paralab.exercises.exercise import Text

NOT_YET = "not committed yet"
REPR_WIDTH = 110


def guess(
    question: str,
    *,
    low: float,
    high: float,
    unit: str = "",
    step: float | None = None,
    decimals: int = 1,
    value: float | None = None,
) -> Guess:
    """Ask for a number before it is known.

    question       what the number is
    low, high      ends of the slider, in ``unit``
    unit           "MB", "%", or "" for a plain number
    step           of the slider; default: the last shown digit
    decimals       digits after the point, of everything that is shown
    value          where the slider starts; default: the middle

    Raises ValueError if the range is empty or ``value`` lies outside.
    """
    low, high = real("low", low), real("high", high)
    if high <= low:
        raise illegal("high", high, f"the range from low={low:g} is empty", f"above {low:g}")
    decimals = whole("decimals", decimals, at_least=0, at_most=9)
    step = 10.0**-decimals if step is None else real("step", step, above=0.0)
    made = Guess(
        question=str(question), low=low, high=high, unit=str(unit), step=step, decimals=decimals
    )
    made.position = (low + high) / 2 if value is None else made.in_range("value", value)
    return made


class Guess:
    """A question, and one answer to it that stands once it is given; made by `guess`."""

    def __init__(
        self, *, question: str, low: float, high: float, unit: str, step: float, decimals: int
    ) -> None:
        self.question, self.low, self.high, self.unit = question, low, high, unit
        self.step, self.decimals = step, decimals
        self.position = low  # where the slider starts
        self.value: float | None = None  # what was committed to
        self.revealed = False
        self._widget: Any = None

    def commit(self, value: float) -> Text:
        """Stand by ``value``. Once: a second commitment is declined and the first one stands.

        Raises ValueError if ``value`` is not a number within the question's range.
        """
        value = self.in_range("value", value)
        if self.value is not None:
            return Text(f"you have committed to {self.shown(self.value)} already, and that stands")
        if self.revealed:
            return Text("the answer is out: run the question's cell again to guess again")
        self.value = value
        if self._widget is not None:
            self._widget.close_for(value)
        return Text(f"committed: {self.shown(value)}")

    def reveal(self, actual: float) -> Reveal:
        """The answer next to the guess; without a commitment, the answer alone."""
        actual = real("actual", actual)
        self.revealed = True
        if self._widget is not None and self.value is None:
            self._widget.close_for(None)
        return Reveal(guess=self, actual=actual)

    def shown(self, value: float) -> str:
        """``value`` with its unit: "3.4 MB", "43 %", "7"."""
        return f"{value:,.{self.decimals}f} {self.unit}".strip()

    def in_range(self, name: str, value: float) -> float:
        legal = f"from {self.shown(self.low)} to {self.shown(self.high)}"
        value = real(name, value)
        if not self.low <= value <= self.high:
            raise illegal(name, value, "out of range", legal)
        return value

    def __repr__(self) -> str:
        state = NOT_YET if self.value is None else f"committed to {self.shown(self.value)}"
        room = REPR_WIDTH - len(f"Guess(, {state})")
        words = " ".join(self.question.split())
        words = words if len(words) <= room else words[: room - 3].rstrip() + "..."
        return f"Guess({words}, {state})"

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """The widget where ipywidgets is there, and always the words."""
        if self._widget is None:
            self._widget = _Slider(self)
        shown = self._widget.box._repr_mimebundle_() or {}
        data = shown[0] if isinstance(shown, tuple) else shown
        return {**data, "text/plain": repr(self)}


class _Slider:
    """The slider, the button and what they say."""

    def __init__(self, guess: Guess) -> None:
        import ipywidgets as widgets

        self.guess = guess
        question = widgets.HTML(f"<b>{html.escape(guess.question)}</b>")
        self.slider = widgets.FloatSlider(
            value=guess.position if guess.value is None else guess.value,
            min=guess.low,
            max=guess.high,
            step=guess.step,
            readout_format=f",.{guess.decimals}f",
            layout={"width": "420px"},
        )
        unit = widgets.Label(guess.unit)
        self.button = widgets.Button(
            description="Commit", tooltip="stand by this guess; it cannot be changed afterwards"
        )
        self.said = widgets.Label()
        self.button.on_click(lambda _: guess.commit(self.slider.value))
        row = widgets.HBox([self.slider, unit, self.button, self.said])
        self.box = widgets.VBox([question, row])
        if guess.value is not None or guess.revealed:
            self.close_for(guess.value)

    def close_for(self, value: float | None) -> None:
        """From now on the slider shows what was committed to."""
        self.slider.disabled = self.button.disabled = True
        if value is None:
            self.said.value = "the answer is out"
            return
        self.slider.value = value
        self.said.value = f"committed: {self.guess.shown(value)}"


@dataclass(frozen=True, repr=False, kw_only=True)
class Reveal:
    """The answer next to what was guessed; its repr is one sentence."""

    guess: Guess
    actual: float

    @property
    def ratio(self) -> float | None:
        """Guess over actual; None without a commitment, or where there is no ratio."""
        if self.guess.value is None or self.actual == 0 or self.guess.value / self.actual < 0:
            return None
        return self.guess.value / self.actual

    def __repr__(self) -> str:
        guess = self.guess
        was = guess.shown(self.actual)
        if guess.value is None:
            return f"it is {was}"
        said = f"you said {guess.shown(guess.value)}, it is {was}"
        if guess.shown(guess.value) == was:
            return f"{said}: exactly"
        if self.ratio is None:
            return f"{said}: {guess.shown(abs(guess.value - self.actual))} apart"
        return f"{said}: {self.ratio:.2f} times what it is"

    def _repr_html_(self) -> str:
        """The sentence, and both numbers as bars on one scale from zero."""
        rows = [("it is", self.actual, "#0072B2")]
        if self.guess.value is not None:
            rows.insert(0, ("you said", self.guess.value, "#7F7F7F"))
        longest = max(abs(value) for _, value, _ in rows) or 1.0
        bars = "".join(
            f'<tr><td style="text-align:right">{name}</td><td style="text-align:left">'
            f'<div style="display:inline-block;vertical-align:middle;height:0.8em;'
            f"width:{300 * abs(value) / longest:.0f}px;"
            f'background:{colour}"></div> {html.escape(self.guess.shown(value))}</td></tr>'
            for name, value, colour in rows
        )
        question = html.escape(self.guess.question)
        return f"<p><b>{question}</b><br>{html.escape(repr(self))}</p><table>{bars}</table>"
