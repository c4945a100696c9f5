"""A widget on the page: sliders moved by keyboard, buttons pressed, its picture read."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator

from browser.notebook import Notebook
from patience import HANG_S as ANSWER_S


def displayed(notebook: Notebook, index: int) -> str:
    """The data of the figure that cell ``index`` displays when it is run now."""
    notebook.run_cell(index)
    notebook.wait(lambda: notebook.figures(index), ANSWER_S, f"cell {index} shows no figure")
    return notebook.figures(index)[0]["data"]


class Bench:
    """The widget that cell ``index`` of an open notebook shows.

    sliders  one per knob that is a slider
    choices  rows of buttons, for knobs whose values are words
    """

    def __init__(self, notebook: Notebook, index: int) -> None:
        self.notebook, self.index = notebook, index
        self.cell = notebook.cell(index)
        # By their places among all: one that cannot be moved may look as if it could for a moment,
        # while its range changes, and would then be counted.
        all_of_them = self.cell.locator(".widget-slider").all()
        self.sliders = [one for one in all_of_them if not one.locator("[disabled]").count()]
        self.choices = self.cell.locator(".widget-toggle-buttons").all()
        self._predicted: list[int] = []  # what the picture showed before a run

    @property
    def figure(self) -> dict[str, Any] | None:
        """What its picture shows (see page.js, ``look``); None for a widget without one."""
        return next(iter(self.notebook.figures(self.index)), None)

    def prints(self) -> list[int]:
        """A number for each of its pictures: two pictures that differ have two numbers."""
        return self.notebook.ask("prints", self.index)

    def _answers(self, before: list[int], what: str) -> None:
        """Wait until the picture is another one, if there is a picture."""
        if before:
            self.notebook.wait(
                lambda: self.prints() != before, ANSWER_S,
                f"the picture of cell {self.index} does not follow {what}",
            )  # fmt: skip

    def move(self, slider: Locator) -> None:
        """Move a slider a step up, at its end a step down, by its keys; the picture follows."""
        handle, readout = slider.locator(".noUi-handle").first, slider.locator(".widget-readout")
        before, said = self.prints(), readout.inner_text()
        now, most = (float(handle.get_attribute(f"aria-value{of}")) for of in ("now", "max"))

        def moved() -> bool:
            """A key is pressed again, as a page that is busy may have given it to another part."""
            if readout.inner_text() == said:
                handle.press("ArrowRight" if now < most else "ArrowLeft")
            return readout.inner_text() != said

        self.notebook.wait(moved, ANSWER_S, f"no key moves the slider that reads {said}")
        self._answers(before, f"its slider from {said} to {readout.inner_text()}")

    def choose(self, row: Locator) -> None:
        """Press the next button of a row that is not pressed yet; the picture follows."""
        button = row.locator("button:not(.mod-active)").first
        before = self.prints()
        button.click()
        self._answers(before, f"its button {button.inner_text()!r}")

    def button(self, name: str) -> Locator:
        return self.cell.get_by_role("button", name=name)

    def enabled(self, name: str) -> bool:
        """Whether there is such a button, and it can be pressed."""
        return bool(self.notebook.ask("buttons", self.index).get(name))

    def start(self) -> None:
        """Press Run it and see that a run has started, or on a slow page that it has ended."""
        self._predicted, again = self.prints(), self.enabled("Run again")
        self.cell.get_by_role("button", name="Run").click()
        self.notebook.wait(
            lambda: self.enabled("Stop") or (self.enabled("Run again") and not again), ANSWER_S,
            lambda: f"Run it starts nothing: {self.words()}",
        )  # fmt: skip

    def stop(self) -> None:
        """Press Stop during a run; its ranks end, and another run can be started."""
        assert self.enabled("Stop"), f"the run ended before it could be stopped: {self.words()}"
        self.button("Stop").click()
        self.notebook.wait(
            lambda: self.enabled("Run it") and self.notebook.server.ranks() == 0, ANSWER_S,
            lambda: f"{self.notebook.server.ranks()} ranks after Stop: {self.words()}",
        )  # fmt: skip

    def finish(self) -> None:
        """Wait until the run has ended well: its button offers another one, the picture is new."""
        self.notebook.wait(
            lambda: self.enabled("Run again"),
            ANSWER_S,
            lambda: f"no end of the run: {self.words()}",
        )
        self._answers(self._predicted, "the run that has ended")

    def words(self) -> str:
        """What the widget says, numbers and messages."""
        return " | ".join(self.cell.locator(".widget-html").all_inner_texts())
