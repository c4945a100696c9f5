"""Questions that a learner answers before the experiment: predict, observe, explain.

People remember what surprised them, and only a prediction can turn out a surprise. A guess is a
number, with a slider and a button; a choice is one of a few explanations, each with a button.
``.commit`` and ``.pick`` do the same without a mouse. ipywidgets is imported when a question is
shown.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from paralab.checks import illegal, real, whole
from paralab.exercises.exercise import Text
from paralab.view.comms import heard_while_busy


def guess(question: str, *, low: float, high: float, unit: str = "", decimals: int = 1) -> Guess:
    """Ask for a number before the experiment shows it.

    question       what the number is, in words
    low, high      ends of the slider, in ``unit``
    unit           "MB", "%", or "" for a plain number
    decimals       digits after the point, of everything that is shown

    Raises ValueError if the range is empty.
    """
    low, high = real("low", low), real("high", high)
    if high <= low:
        raise illegal("high", high, f"the range from low={low:g} is empty", f"above {low:g}")
    return Guess(question, low, high, unit, whole("decimals", decimals, at_least=0, at_most=9))


def choose(question: str, options: Sequence[str]) -> Choice:
    """Ask which of several explanations holds. Raises ValueError unless two differ."""
    texts = [] if isinstance(options, str) else [str(option) for option in options]
    if len(set(texts)) < 2:
        raise illegal("options", options, "nothing to choose from", "two or more different texts")
    return Choice(question, texts)


class Question:
    """A question with one answer, which cannot be changed once it is given. Subclasses have

    _state()             the answer so far, in words
    _inputs(widgets)     the rows of the widget below the question
    _show_answer(*rows)  disables these rows and shows the answer in them
    """

    verb = "guess"

    def __init__(self, question: str) -> None:
        self.question = str(question)
        self.value: float | None = None  # the answer
        self.revealed = False
        self._box: Any = None

    def _commit(self, value: float, said: str) -> Text:
        if self.value is not None:
            return Text(f"you have {self._state()} already, and that stands")
        if self.revealed:
            return Text(self._too_late)
        self.value = value
        self._close()
        return Text(said)

    @property
    def _too_late(self) -> str:
        return f"the answer has been shown: run the question's cell again to {self.verb} again"

    def _reveal(self, said: str) -> Text:
        self.revealed = True
        self._close()
        return Text(said)

    def _close(self) -> None:
        """Make the widget, if there is one, show the answer and take no other."""
        if self._box is not None:
            self._show_answer(*self._box.children[1:])

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """The widget, and its repr for where widgets are not shown."""
        import ipywidgets as widgets

        if self._box is None:
            title = widgets.HTML(f"<b>{html.escape(self.question)}</b>")
            self._box = widgets.VBox([title, *self._inputs(widgets)])
            heard_while_busy(self._box)
            if self.value is not None or self.revealed:
                self._close()
        return self._box._repr_mimebundle_() | {"text/plain": repr(self)}


class Guess(Question):
    """A question whose answer is a number; made by `guess`."""

    def __init__(self, question: str, low: float, high: float, unit: str, decimals: int) -> None:
        super().__init__(question)
        self.low, self.high, self.unit, self.decimals = low, high, str(unit), decimals

    def commit(self, value: float) -> Text:
        """Answer with ``value``. The first commitment stands: a later one is declined.

        Raises ValueError if ``value`` is not a number within the question's range.
        """
        value = real("value", value)
        if not self.low <= value <= self.high:
            raise illegal("value", value, "out of range", self._range)
        return self._commit(value, f"committed: {self.shown(value)}")

    def reveal(self, actual: float) -> Text:
        """The answer next to the guess; without a commitment, the answer alone."""
        actual = real("actual", actual)
        truth = self.shown(actual)
        if self.value is None:
            return self._reveal(f"it is {truth}")
        compared = f"you said {self.shown(self.value)}, it is {truth}"
        if self.shown(self.value) == truth:
            return self._reveal(f"{compared}: exactly right")
        if actual == 0 or self.value / actual < 0:
            return self._reveal(f"{compared}: {self.shown(abs(self.value - actual))} apart")
        return self._reveal(f"{compared}: your guess is {self.value / actual:.2f} times that")

    def shown(self, value: float) -> str:
        """``value`` with its unit: "3.4 MB", "43 %", "7"."""
        return f"{value:,.{self.decimals}f} {self.unit}".strip()

    def _state(self) -> str:
        value = self.value
        return "not committed yet" if value is None else f"committed to {self.shown(value)}"

    @property
    def _range(self) -> str:
        return f"from {self.shown(self.low)} to {self.shown(self.high)}"

    def __repr__(self) -> str:
        return f"{self.question} ({self._state()})\n  {self._range}"

    def _inputs(self, widgets: Any) -> list[Any]:
        slider = widgets.FloatSlider(
            value=self.low,  # the middle of the range may be near the answer
            min=self.low,
            max=self.high,
            step=10.0**-self.decimals,
            readout_format=f",.{self.decimals}f",
            layout={"width": "420px"},
        )
        button = widgets.Button(
            description="Commit", tooltip="give this answer; it cannot be changed afterwards"
        )
        button.on_click(lambda _: self.commit(slider.value))
        unit = widgets.Label(self.unit, layout={"flex": "0 0 auto"})  # not shortened to fit
        return [widgets.HBox([slider, unit, button]), widgets.Label()]

    def _show_answer(self, *rows: Any) -> None:
        row, label = rows
        slider, _, button = row.children
        slider.disabled = button.disabled = True
        label.value = self._too_late
        if self.value is not None:
            slider.value = self.value
            label.value = f"committed: {self.shown(self.value)}"


class Choice(Question):
    """A question with options, numbered from 1, of which one is picked; made by `choose`."""

    verb = "choose"

    def __init__(self, question: str, options: list[str]) -> None:
        super().__init__(question)
        self.options = options

    def pick(self, number: int) -> Text:
        """Answer with option ``number``. The first pick stands: a later one is declined."""
        number = whole("number", number, at_least=1, at_most=len(self.options))
        return self._commit(number, f"picked {number}: {self.options[number - 1]}")

    def reveal(self, number: int, why: str = "") -> Text:
        """Show the right option, the reason ``why``, and the option that was picked, if any."""
        number = whole("number", number, at_least=1, at_most=len(self.options))
        option = self.options[number - 1]
        verdict = "" if self.value is None else f"You picked {self.value}. "
        verdict += f"The answer is {number}, {option}."
        if self.value == number:
            verdict = f"You picked {number}, and that is right: {option}."
        return self._reveal(f"{verdict} {why}".strip())

    def _state(self) -> str:
        return "nothing picked yet" if self.value is None else f"picked {self.value}"

    def __repr__(self) -> str:
        rows = (f"\n  {n} {option}" for n, option in enumerate(self.options, 1))
        return f"{self.question} ({self._state()}){''.join(rows)}"

    def _inputs(self, widgets: Any) -> list[Any]:
        rows = []
        for number, option in enumerate(self.options, 1):
            button = widgets.Button(description=str(number), layout={"flex": "0 0 40px"})
            button.on_click(lambda _, number=number: self.pick(number))
            rows.append(widgets.HBox([button, widgets.HTML(html.escape(option))]))
        return [*rows, widgets.Label()]

    def _show_answer(self, *rows: Any) -> None:
        *rows, label = rows
        for number, row in enumerate(rows, 1):
            button = row.children[0]
            button.disabled = True
            button.button_style = "primary" if number == self.value else ""
        label.value = self._too_late if self.value is None else f"picked {self.value}"
