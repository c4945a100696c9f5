"""An open notebook: run it, look at what it shows, list everything that went wrong.

Nothing here sleeps for a fixed time. Every wait is for a condition, and one that is not met in time
says what the page looked like instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Error, Locator, Page

from browser.server import Server
from patience import HANG_S

WIDTH, HEIGHT = 1280, 2400
FIT_S = 60
OWN = ("127.0.0.1", "localhost")
# What anywidget says of a figure on a page that is busy for two seconds. It follows all the same
# (paralab/view/figure.js; tests/browser/test_widgets.py has it always said).
LATE = "[anywidget] Failed to initialize model."


class Notebook:
    """A notebook of the server's folder, open in a page of its own.

    wrong  what the page itself complained of: console errors, uncaught exceptions, requests to
           anywhere but loopback
    ran    whether any cell has been run in its kernel
    """

    def __init__(self, browser: BrowserContext, server: Server, name: str) -> None:
        self.server, self.name = server, name
        self.wrong: list[str] = []
        self.ran = False
        self.page: Page = browser.new_page()
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        self.page.add_init_script(path=Path(__file__).with_name("page.js"))
        self.page.on("console", self._console)
        self.page.on("pageerror", self._uncaught)
        self.page.on("request", lambda request: self._address(request.url))
        self.page.on("websocket", lambda socket: self._address(socket.url))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            where = message.location.get("url", "").split("?")[0]
            self.wrong.append(f"console error: {message.text} ({where})")

    def _uncaught(self, error: Error) -> None:
        if str(error) != LATE:  # a figure that is late to begin is there all the same
            self.wrong.append(f"uncaught: {error}")

    def _address(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "about") and parts.hostname not in OWN:
            self.wrong.append(f"request off loopback: {url}")

    def ask(self, question: str, *arguments: Any) -> Any:
        """Call a function of page.js."""
        return self.page.evaluate(f"(a) => lab.{question}(...a)", list(arguments))

    def wait(self, condition: Callable[[], Any], seconds: float, otherwise: Any) -> Any:
        """Poll until ``condition()`` is true and return it; else fail with ``otherwise``.

        otherwise  the message, or a function that makes it
        """
        begun = time.monotonic()
        while not (found := condition()):
            waited = time.monotonic() - begun
            if waited > seconds:
                message = otherwise() if callable(otherwise) else otherwise
                raise AssertionError(f"after {seconds:.0f} s: {message}")
            # Lets the page's events in. What takes long is asked for less often, as to ask is work.
            self.page.wait_for_timeout(min(max(50, 100 * waited), 200))
        return found

    def open(self) -> None:
        """Load it and wait for an idle kernel."""
        self.page.goto(f"{self.server.url}/doc/tree/{self.name}?reset&token={self.server.token}")
        self._until_ready()

    def turn_to(self, name: str) -> None:
        """Leave it as it is stored, and open another one in its place. A kernel that has run
        nothing is as good as a new one, and becomes that of the other one. Any other is ended.
        """
        before, self.name = self._sessions(), name
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        self.ask("leave")
        self.wrong.clear()
        if not self.ran:  # JupyterLab takes the session that has the name of the notebook
            for session in before:
                named = {"path": name, "name": name}
                self.server.request(f"api/sessions/{session}", method="PATCH", body=named)
        self.ask("turnTo", name)
        self._until_ready()
        if self.ran:
            self._end(before)
        self.ran = False
        assert len(self._sessions()) == 1, f"{self.name} is not alone in having a kernel"

    def _until_ready(self) -> None:
        known = lambda what: self.page.evaluate(f"() => window.lab?.{what}()")  # noqa: E731
        self.wait(
            lambda: known("ready") or known("dialogs"), HANG_S,
            lambda: f"{self.name} has no idle kernel; {self.wrong}\n{self.server.tail()}",
        )  # fmt: skip
        assert self.ask("dialogs") == [], f"{self.name} does not open without questions"
        self.ask("listen")

    def run_all(self) -> None:
        """Run → Run All Cells; returns when the last cell, and every figure, is there."""
        self.ran = True
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()
        self.wait(lambda: self.ask("ended"), HANG_S, self._unfinished)
        self.wait(self.settled, HANG_S, lambda: "; ".join(self.ask("missing")))

    def settled(self) -> bool:
        """Whether all that the cells promise is on the page; a failed cell has no more to come."""
        if self.ask("dialogs") or self.ask("fails"):
            return True
        return not self.ask("missing", True)

    def _unfinished(self) -> str:
        waiting = [c for c in self.cells() if c["waits"]]
        if not waiting:
            return f"no cell runs and not all have run: {self.complaints()}"
        return f"cell {waiting[0]['index']} still runs: {_first_line(waiting[0])}"

    def run_cell(self, index: int, timeout: float = HANG_S) -> None:
        """Select cell ``index`` and run it as Shift+Enter does; returns when it has run."""
        self.start_cell(index)
        self.until_run(index, timeout)

    def start_cell(self, index: int) -> None:
        """`run_cell`, without waiting for the cell's end.

        What it showed before goes first: a stored count may be the very one that it gets now.
        """
        self.ran = True
        self.page.evaluate(
            "(i) => { const p = jupyterapp.shell.currentWidget; p.content.activeCellIndex = i;"
            " p.content.deselectAll(); p.content.activeCell.model.clearExecution();"
            " jupyterapp.commands.execute('notebook:run-cell'); }",
            index,
        )

    def until_run(self, index: int, timeout: float = HANG_S) -> None:
        """Return once the cell that was started last has run."""

        def has_run() -> bool:
            now = self.ask("stands", index)
            return now["count"] is not None and not now["waits"]

        def otherwise() -> str:
            return f"cell {index} has not run: {_first_line(self.cells()[index])}"

        self.wait(has_run, timeout, otherwise)

    def cell(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def write(self, index: int, source: str) -> None:
        self.ask("write", index, source)

    def cells(self) -> list[dict[str, Any]]:
        """Every cell: index, type, source, tags, count, outputs, and whether it waits or runs.

        Of an output's data there are the ``types`` alone.
        """
        return self.ask("state")

    def text(self, index: int) -> str:
        """What cell ``index`` printed."""
        outputs = self.cells()[index]["outputs"]
        return "".join("".join(o["text"]) for o in outputs if o["output_type"] == "stream")

    def figures(self, index: int | None = None) -> list[dict[str, Any]]:
        """The plotly figures on the page, or in one cell: title, data, print."""
        return self.ask("figures", index)

    def crowded(self, index: int, width: int) -> list[str]:
        """What cannot be read of cell ``index`` on a page this wide (see page.js, ``crowded``)."""
        self.page.set_viewport_size({"width": width, "height": HEIGHT})
        self.cell(index).scroll_into_view_if_needed()
        deadline = time.monotonic() + FIT_S
        while (found := self.ask("crowded", index)) and time.monotonic() < deadline:
            self.page.wait_for_timeout(50)  # figures are drawn anew when their place has changed
        return found

    def look(self, name: str) -> None:
        """JupyterLab's look: "Dark" or "Light"."""
        theme = {"theme": f"JupyterLab {name}"}
        self.page.evaluate(
            "(theme) => jupyterapp.commands.execute('apputils:change-theme', theme)", theme
        )

    def complaints(self, *, drawn: bool = True) -> list[str]:
        """Everything that is wrong now, one sentence each; what a student must never see.

        drawn  whether every cell has been run on this page, so that its figures must be drawn. A
               page that has only been opened shows stored pictures instead
        """
        said = []
        for cell in self.cells():
            where = f"cell {cell['index']} ({_first_line(cell)})"
            for output in cell["outputs"]:
                if output["output_type"] == "error" and "raises-exception" not in cell["tags"]:
                    said.append(f"{where}: {output['ename']}: {output['evalue']}")
                if output.get("name") == "stderr":
                    said.append(f"{where} shows stderr: {''.join(output['text'])}")
        heard = self.page.evaluate("() => lab.said")
        dialogs = [f"a dialog covers the page: {text}" for text in self.ask("dialogs")]
        absent = self.ask("missing") if drawn else []
        return said + heard + dialogs + self.wrong + absent

    def close(self) -> None:
        """Close the page and shut its kernel down."""
        self.page.close()
        self._end(self._sessions())

    def _sessions(self) -> list[str]:
        return [session["id"] for session in self.server.request("api/sessions")]

    def _end(self, sessions: list[str]) -> None:
        for session in sessions:
            self.server.request(f"api/sessions/{session}", method="DELETE")


def _first_line(cell: dict[str, Any]) -> str:
    lines = cell["source"].strip().splitlines() or ["empty"]
    return lines[0][:60]
