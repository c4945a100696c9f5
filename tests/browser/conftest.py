"""One JupyterLab and one chromium for all browser tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import nbformat
import pytest
from playwright import sync_api

from browser import chromium
from browser.notebook import Notebook
from browser.server import Server, serving

# no-sandbox: root has none; the rest: what chromium would ask the network for by itself.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]
OPENED = pytest.StashKey[list[Notebook]]()


# Both live as long as this package: playwright's loop is gone before the next test needs its own.
@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("jupyter")) as running:
        yield running


@pytest.fixture(scope="package")
def browser() -> Iterator[sync_api.BrowserContext]:
    path = chromium.find()
    if path is None:
        pytest.skip(f"no browser here; `{Path(chromium.__file__).name}` says what to install")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running.new_context()  # one for all: JupyterLab's scripts are loaded once
        running.close()


@pytest.fixture(scope="package")
def pages(browser: sync_api.BrowserContext, server: Server) -> Iterator[list[Notebook]]:
    """The page that is open, if there is one: next to another one JupyterLab loads itself anew."""
    opened: list[Notebook] = []
    yield opened
    while opened:
        opened.pop().close()


@pytest.fixture
def open_notebook(
    request: pytest.FixtureRequest,
    browser: sync_api.BrowserContext,
    server: Server,
    pages: list[Notebook],
) -> Iterator[Callable[..., Notebook]]:
    """``open_notebook(path)`` a copy of a notebook, or ``cells=[...]`` of sources, or both: then
    the cells come after it. In the JupyterLab in which the one before was: to load that takes
    several times as long as to open a notebook. With ``alone=True`` in one that was just loaded,
    has no code for figures yet, and is closed afterwards. A headless page in which sliders were
    moved by keys has no idle time for seconds, in which JupyterLab draws a lab's cells.
    """
    request.node.stash[OPENED], left = pages, False

    def start(
        path: Path | None = None, *, cells: list[str] | None = None, alone: bool = False
    ) -> Notebook:
        nonlocal left
        name, left = _placed(server, path, cells or []), alone
        while alone and pages:
            pages.pop().close()
        if pages:
            pages[0].turn_to(name)
        else:
            pages.append(Notebook(browser, server, name))
            pages[0].open()
        return pages[0]

    yield start
    while left and pages:
        pages.pop().close()


def _placed(server: Server, path: Path | None, cells: list[str]) -> str:
    """The name of a new notebook on the server: what ``path`` has, and these cells."""
    name = f"{len(list(server.notebooks.iterdir())):02}-{path.name if path else 'test.ipynb'}"
    if path is not None:
        notebook = nbformat.read(path, as_version=4)
    else:
        spec = {"name": "python3", "display_name": "Python 3"}
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": spec})
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in cells]
    nbformat.write(notebook, server.notebooks / name)
    return name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failed test all that was wrong with its page."""
    report = yield
    if call.when == "call" and report.failed:
        for notebook in item.stash.get(OPENED, []):
            with contextlib.suppress(Exception):  # the page may be gone
                report.sections.append(("browser", "\n".join(notebook.complaints())))
            report.sections.append(("jupyter", notebook.server.tail()))
    return report
