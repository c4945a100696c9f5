"""The house stays as it was drawn: imports point one way, torch stays in its rooms."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import paralab as pl

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "paralab").rglob("*.py"))
}
# Who imports torch when it is imported itself: what runs on ranks, and the reference.
WITH_TORCH = {
    "agree", "batches", "checkpoint", "comm", "grid", "strict", "transports",
    *(f"interpret.{name}" for name in ("files", "flat", "host", "lanes", "offloaded", "pieces",
                                       "run", "state", "train", "workers")),
    *("model.draws", "model.reference"),
    *("instruments.clocks", "instruments.ledger", "instruments.memory"),
    "instruments.foreign",
    *(f"instruments.foreign_{name}" for name in ("calls", "flights", "hooks", "ledger", "program")),
    *(f"exercises.{name}" for name in ("plain", "timed", "watched")),
    "parallel.collectives",  # lab 01's algorithms
    *("ranks.process", "ranks.torchrun"),
}  # fmt: skip
LONGEST_PASS = 150  # lines, docstring included
PUBLIC = (
    "Cluster Link ModelSpec OutOfMemory Plan RankError RankTimeout Report Stopped compare dry_run "
    "explore launch load plan_search predict program reference run trace warm_up"
)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules that a file imports anywhere: inside functions and for types alone, too."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                found.add(whole if whole in FILES else node.module)
        elif isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
    return frozenset(found)


def test_every_module_begins_with_its_abstract():
    assert [module for module, path in FILES.items() if not ast.get_docstring(parsed(path))] == []


def test_what_a_public_class_offers_says_what_it_is():
    classes = [kind for name in pl.__all__ if inspect.isclass(kind := getattr(pl, name))]
    assert pl.Report in classes
    mute = [
        f"{kind.__name__}.{name}"
        for kind in classes
        for name, offered in inspect.getmembers(kind)
        if name[0] != "_" and (callable(offered) or isinstance(offered, property))
        if not inspect.getdoc(offered)
    ]
    assert mute == []


def test_the_formatter_lays_out_every_line():
    kept = [name for name, path in FILES.items() if "# fmt: " in path.read_text(encoding="utf-8")]
    assert kept == []


def test_no_imports_go_round():
    graph = {module: imports(path) & FILES.keys() - {module} for module, path in FILES.items()}
    assert len(graph) > 100
    TopologicalSorter(graph).prepare()  # else a CycleError that has the circle


def test_the_face_is_imported_by_what_a_learner_writes_alone():
    """``import paralab`` brings everything, so a module that imports it closes a circle."""
    found = [module for module, path in FILES.items() if "paralab" in imports(path)]
    assert all(module.startswith("paralab.exercises.answers.") for module in found), found


def test_torch_is_imported_by_what_runs_on_ranks_alone():
    found = {
        module.removeprefix("paralab.")
        for module, path in FILES.items()
        if not module.startswith("paralab.exercises.answers.")  # read as text; ranks import some
        and any(name.split(".")[0] == "torch" for name in top_level(path))
    }
    assert found <= WITH_TORCH


def top_level(path: Path) -> Iterator[str]:
    """What is imported at once, not for types alone and not inside a function."""
    for node in parsed(path).body:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_a_pass_can_be_read_in_one_go():
    for path in (ROOT / "paralab/parallel").glob("*.py"):
        for node in parsed(path).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                assert node.end_lineno - node.lineno < LONGEST_PASS, (path.stem, node.name)


def test_every_public_name_is_there_after_every_module_was_imported():
    """Folders and functions could have one name: then importing a module would hide a function."""
    for found in pkgutil.walk_packages(pl.__path__, "paralab."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    hidden = {name for name in pl.__all__ if inspect.ismodule(getattr(pl, name))}
    assert set(PUBLIC.split()) <= set(pl.__all__) and hidden == {"reference", "theory"}


@pytest.mark.parametrize("module", ["", ".exercises", ".theory", ".view"])
def test_a_notebook_offers_what_a_module_is_for_and_nothing_that_it_is_made_of(module):
    """Tab shows dir(): also names that are imported when they are first used."""
    package = importlib.import_module(f"paralab{module}")
    offered = dir(package)
    assert [name for name in offered if not hasattr(package, name)] == []
    assert set(getattr(package, "__all__", ())) <= set(offered)
    made_of = {"Any", "TYPE_CHECKING", "annotations", "importlib", "import_module", "pkgutil"}
    assert made_of & set(offered) == set()
    if not module:
        assert {"exercises", "fit_cluster", "plan_search", "program", "view"} <= set(offered)
        assert {"experiment", "interpret", "ranks", "spec"} & set(offered) == set()
    if module == ".exercises":
        others = {name for name in offered if name not in {*package.ALL, "ALL"}}
        assert others == {"Choice", "Exercise", "Guess", "Verdict", "choose", "guess"}


def test_every_name_that_benchmarks_import_is_there():
    """They are not run by `make test`, and a function may move or be renamed."""
    for path in sorted((ROOT / "tests" / "benchmarks").glob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paralab"):
                module = importlib.import_module(node.module)
                for name in node.names:
                    there = hasattr(module, name.name) or f"{node.module}.{name.name}" in FILES
                    assert there, f"{path.name}: {node.module}.{name.name}"


OF_ITS_OWN = re.compile(r"\btimeout\b[=(] *[0-9]{2,}|\btimeout=[5-9]\b|monotonic\(\) \+ [0-9]{2,}")


def test_no_test_waits_for_what_never_comes_by_a_time_of_its_own():
    """tests/patience.py has the one limit. Limits of seconds, and two more, are what tests try."""
    found = {
        path.stem: len(lines)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if (lines := OF_ITS_OWN.findall(path.read_text(encoding="utf-8")))
    }
    assert found == {"test_cli": 1, "test_torchrun": 1}
