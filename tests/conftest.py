"""What every test shares: one fixed text, and a run that holds all calls to NCCL's order."""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import paralab as pl
from paralab.ranks import server
from patience import HANG_S

# What a test launches brings its module along, and that pytest: 80 ms in each rank if not shared.
# Checks follow one another without the pause in which the server would load what they import.
server.ESSENTIAL += ("pytest", "paralab.exercises.watched")

# Drawn tests draw the same in every run: a change is to blame for what fails after it. Others are
# drawn with `pytest --hypothesis-profile=default --hypothesis-seed=random`.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

WORDS = [
    *("the", "gradient", "of", "a", "sum", "is", "the", "sum", "of", "the", "gradients", "and"),
    *("every", "rank", "holds", "a", "part", "of", "it", "while", "the", "pipeline", "waits"),
    *("for", "nobody", "when", "each", "bucket", "leaves", "as", "soon", "as", "its", "last"),
    *("byte", "is", "there"),
]


# Files of fifteen seconds or more, the longest first. Next to others they begin first, after the
# pages: one that begins last is waited for alone. Half of launch_failures and of labs_meta is
# waiting: each stands where a file comes next to it that computes.
LONG = ("composed", "launch_failures", "programs_equal", "labs_meta", "search", "exercises_05",
        "programs_offload", "mutants", "observe", "exercises_01", "exercises_02",
        "virtual_plans", "torchrun", "exercises_06", "traffic", "launch", "checkpoint", "published",
        "exercises_08", "exercises_03", "outline", "binder")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """ZeRO-3 in a pipeline is legal and slow, which a warning says: of it many plans are tested."""
    config.addinivalue_line("filterwarnings", "ignore:zero_stage=3 with pp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Pages first, then the labs' notebooks, then LONG, then all other files."""

    def turn(item: pytest.Item) -> int:
        if item.path.parent.name == "browser":
            return -2
        if item.path.suffix == ".ipynb":
            return -1
        name = item.path.stem.removeprefix("test_")
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=turn)  # stable: within a file nothing moves


def pytest_collection_finish() -> None:
    """Thousands of tests stay to the end: no collection of garbage goes through them again, and
    what tests make is looked through seldom: 5 % of the time of those that predict.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 1000)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each file's tests go to one worker, and all pages to one: they share a JupyterLab."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "pages" if "tests/browser/" in nodeid else super()._split_scope(nodeid)

    return Files(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(autouse=True)
def no_default_device():
    """Cells of labs name one, also where a test runs them in its own process."""
    os.environ.pop("PARALAB_DEVICE", None)
    yield
    os.environ.pop("PARALAB_DEVICE", None)


@pytest.fixture(autouse=True)
def checked_by_plotly(monkeypatch):
    """Plotly checks the traces of every chart that a test draws: `Chart.draw` leaves that out."""
    if (module := sys.modules.get("paralab.view.chart")) is None:
        return
    draw = module.Chart.draw

    def checked(chart: Any, traces: Any, *more: Any) -> Any:
        valid = module.go.Figure(traces := list(traces))
        before = len(chart.data)
        draw(chart, traces, *more)
        assert json.loads(chart.to_json())["data"][before:] == json.loads(valid.to_json())["data"]
        return chart

    monkeypatch.setattr(module.Chart, "draw", checked)


@pytest.fixture
def make(monkeypatch):
    """Widgets by name, whose runs have this many steps; they are closed at the end."""
    import widgets

    made = []

    def one(name: str, steps: int = 3) -> Any:
        made.append(widgets.MAKE[name]())
        monkeypatch.setattr(type(made[-1]), "steps", steps)
        return made[-1]

    yield one
    for widget in made:
        widget.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 kB of words in a fixed order: no test may depend on which Python is installed."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    lines = [
        " ".join(WORDS[int(draw.random() * len(WORDS))] for _ in range(12)) for _ in range(1100)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def run(text: Path):
    """`pl.run` on the fixed text, in strict order mode, without a progress bar."""
    return functools.partial(pl.run, data=text, strict=True, progress=False, timeout=HANG_S)


@pytest.fixture(scope="session")
def model() -> pl.ModelSpec:
    """Small, with sizes that 3 ranks do not divide."""
    return pl.ModelSpec(layers=2, hidden=40, heads=4, seq_len=24, vocab=257)
