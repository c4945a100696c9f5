"""One of a few explanations, picked before the experiment that decides between them.

    why = pl.exercises.choose("Why does the loss still fall?", ["each rank ...", "the sum ..."])
    why.pick(2)                        # or the buttons
    why.reveal(1, "the ranks ...")     # which one it is, and why

In a notebook it shows its options as buttons; ipywidgets is imported then.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from paralab.checks import illegal, whole
from paralab.exercises.exercise import Text


def choose(question: str, options: Sequence[str]) -> Choice:
    """Ask which of two or more explanations holds. Raises ValueError if there are fewer."""
    options = [] if isinstance(options, str) else [str(option) for option in options]
    if len(set(options)) < 2:
        raise illegal("options", options, "nothing to choose from", "two or more different texts")
    return Choice(str(question), options)


class Choice:
    """A question with numbered options, 1 and on, and the one that was picked; made by `choose`."""

    def __init__(self, question: str, options: list[str]) -> None:
        self.question, self.options = question, options
        self.picked: int | None = None
        self.revealed = False
        self._box: Any = None

    def pick(self, number: int) -> Text:
        """Stand by option ``number``. Once: afterwards the first one stands."""
        number = whole("number", number, at_least=1, at_most=len(self.options))
        if self.picked is not None:
            return Text(f"you have picked {self.picked} already, and that stands")
        if self.revealed:
            return Text("the answer is out: run the question's cell again to choose again")
        self.picked = number
        self._close()
        return Text(f"picked {number}: {self.options[number - 1]}")

    def reveal(self, number: int, why: str = "") -> Text:
        """Which option it is, and why; next to what was picked, if anything was."""
        number = whole("number", number, at_least=1, at_most=len(self.options))
        self.revealed = True
        self._close()
        it = f"{number}, {self.options[number - 1]}"
        said = f"It is {it}."
        if self.picked is not None:
            right = self.picked == number
            said = f"You picked {self.picked}, and that is right: {self.options[number - 1]}."
            said = said if right else f"You picked {self.picked}. It is {it}."
        return Text(f"{said} {why}".strip())

    def __repr__(self) -> str:
        state = "nothing picked yet" if self.picked is None else f"picked {self.picked}"
        rows = (f"\n  {n} {option}" for n, option in enumerate(self.options, 1))
        return f"{self.question} ({state}){''.join(rows)}"

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """The buttons where ipywidgets is there, and always the words."""
        if self._box is None:
            self._box = self._buttons()
        shown = self._box._repr_mimebundle_() or {}
        data = shown[0] if isinstance(shown, tuple) else shown
        return {**data, "text/plain": repr(self)}

    def _buttons(self) -> Any:
        import ipywidgets as widgets

        rows = [widgets.HTML(f"<b>{html.escape(self.question)}</b>")]
        for number, option in enumerate(self.options, 1):
            button = widgets.Button(description=str(number), layout={"width": "40px"})
            button.on_click(lambda _, number=number: self.pick(number))
            rows.append(widgets.HBox([button, widgets.Label(option)]))
        box = widgets.VBox(rows)
        self._box = box
        if self.picked is not None or self.revealed:
            self._close()
        return box

    def _close(self) -> None:
        """From now on the buttons show what was picked."""
        for number, row in enumerate(self._box.children[1:] if self._box is not None else (), 1):
            button = row.children[0]
            button.disabled = True
            button.button_style = "primary" if number == self.picked else ""
