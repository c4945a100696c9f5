"""What a fresh clone can rely on: a light import, a complete wheel, the targets README names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from processes import printed, python, ran

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "paralab"
MODULES = sorted(PACKAGE.rglob("*.py"))

# DESIGN: a notebook's kernel imports these, and they leave torch to the ranks.
TORCH_FREE = (
    *("spec", "report.report", "launch", "experiment", "cli", "doctor"),
    *("theory", "view", "parallel.buckets"),
)


def test_import_paralab_leaves_what_is_heavy_for_when_it_is_needed():
    code = """
import sys, paralab as pl
import paralab.report.report, paralab.report.storage, paralab.report.merge, paralab.view.page
import paralab.trace, paralab.instruments.witness, paralab.theory.collectives
pl.exercises.ALL, pl.exercises.guess("?", low=0, high=1), pl.explore, pl.program
print(*sorted({"torch", "numpy", "pandas", "plotly", "ipywidgets"} & sys.modules.keys()))
"""
    assert printed(code).split() == []


def test_a_program_may_start_where_the_clone_lies(tmp_path):
    """Python takes a folder for the package of its name, where nothing else on its path is."""
    (tmp_path / "paralab").mkdir()  # as `git clone` makes one
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import paralab; print(paralab.ModelSpec)"
    done = ran(sys.executable, "-c", code, cwd=tmp_path, env=env)
    assert "ModelSpec" in done.stdout, done.stderr


@pytest.mark.skipif(not find_spec("rfc3987_syntax"), reason="JupyterLab has not brought it along")
def test_a_figure_does_not_wait_for_a_grammar_that_nobody_asks_for():
    code = """
import sys
from paralab.view import chart
import nbformat, plotly.io
for module in list(sys.modules.values()):  # as inspect and unittest go through them
    getattr(module, "__file__", None), getattr(module, "__warningregistry__", None)
there = "lark" in sys.modules
import jsonschema
checks = jsonschema.FormatChecker(["iri"])
said = [checks.conforms(text, "iri") for text in ("http://a/\u00fc", "no iri")]
from rfc3987_syntax import parse
print(there, *said, "lark" in sys.modules, parse("iri", "http://a/b") is not None)
"""
    assert printed(code).split() == ["False", "True", "False", "True", "True"]


NO_TORCH = """
import dataclasses, importlib, sys
sys.modules["torch"] = None  # who imports it fails
for name in sys.argv[1:]:
    importlib.import_module(name)
import paralab as pl
from paralab.theory import papers, training
model = pl.ModelSpec(layers=4, hidden=32, heads=4, seq_len=16)
cluster = pl.Cluster.preset("dgx-a100").replace(disk=pl.Link(alpha=1e-4, bandwidth=2e9))
for detail, plan in (
    ("actions", pl.Plan(dp=2, pp=2, tp=2, microbatches=2, schedule="zb-h1", zero_stage=1)),
    ("calls", pl.Plan(tp=4, tp_mode="2d", microbatch_size=4)),
    ("calls", pl.Plan(dp=2, zero_stage=3, offload="nvme", precision="bf16", recompute="full")),
):
    report = pl.predict(model, plan, cluster, steps=1, detail=detail)
    report.timeline(), report.traffic_chart(), report.memory_chart(), report.summary()
    report.peaks(), report.bubbles() if plan.pp > 1 else None
    pl.view.mesh(plan, cluster), pl.view.stage_memory(report)
    pl.view.timelines(report, report), pl.view.memory_bars({"a": report})
    pl.view.memory_charts({"a": report})
pl.compare(report, dataclasses.replace(report, clock="measured")), report.replay(cluster)
report.to_perfetto("trace.json"), report.save("report.json")
pl.load("report.json").to_html("report.html")
bench = pl.explore(model, pl.Plan(dp=2, pp=2), cluster)
bench.knobs["dp"].value = 4
bench.knobs["tp"].value = 8
assert bench.state == "error"
bench.set(tp=1)
assert bench.state == "idle" and bench.views()
for name in ("data_parallel", "memory", "collective", "pipeline", "tensor", "zero", "tensor1d"):
    make = getattr(pl.view.widgets, name)
    widget = make(model, cluster=cluster) if name in ("memory", "data_parallel") else make()
    knob = next(k for k in widget.knobs.values() if len(k.options) > 1 and not k.disabled)
    knob.value = next(v for _, v in knob.options if v != knob.value)
big = pl.Plan(dp=6, tp=8, pp=64, microbatches=64, microbatch_size=1, recompute="full")
assert pl.dry_run(pl.ModelSpec.preset("ptdp-1t"), big, rank=3071).peak_memory > 2**35
a, b = (pl.program(model, pl.Plan(dp=4, zero_stage=z)) for z in (2, 3))
a, b, a.diff(b), a._repr_html_()
papers.ptdp_table1()
training.training_cost(model, tokens=1e9, devices=4, flops=1e12)
clinic = pl.exercises.memory_clinic
assert clinic.check({n: ("buffers", {"prefetch": 0}) for n in clinic.patients}).rows
states = lambda model, recipe: {s: model.num_params * n for s, n in recipe.items()}
assert pl.exercises.model_states.check(states).rows[0].ok
print("torch was not missed")
"""


def test_predicting_drawing_exploring_and_checking_need_no_torch_at_all(tmp_path):
    """Where importing torch fails, all that is theory still works: a kernel stays at 100 MB."""
    names = []
    for path in MODULES:
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if any(name == free or name.startswith(f"{free}.") for free in TORCH_FREE):
            names.append(f"paralab.{name}")
    assert {"paralab.spec", "paralab.report.report", "paralab.cli"} <= set(names)
    done = python("-c", NO_TORCH, *names, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "torch was not missed"


def test_the_wheel_holds_every_file_of_the_package(tmp_path):
    """A data file that setuptools does not know of works in a clone and is missing for users."""
    clone, out = tmp_path / "clone", tmp_path / "out"
    shutil.copytree(PACKAGE, clone / "paralab", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    out.mkdir()
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    done = ran(sys.executable, "-c", code, cwd=clone)
    assert done.returncode == 0, done.stderr
    [wheel] = out.glob("paralab-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("paralab/")}
    ours = {str(path.relative_to(clone)) for path in clone.glob("paralab/**/*") if path.is_file()}
    assert packed == ours


def test_lint_and_tests_are_configured_as_the_house_wants_them():
    with open(ROOT / "pyproject.toml", "rb") as file:
        tools = tomllib.load(file)["tool"]
    assert tools["ruff"]["line-length"] == 100
    assert set(tools["ruff"]["lint"]["select"]) == {"E", "F", "W", "I", "UP", "B", "SIM"}
    options = tools["pytest"]["ini_options"]
    assert "--strict-markers" in options["addopts"] and float(options["timeout"]) > 0
    assert any(marker.startswith("gpu:") for marker in options["markers"])


# ---- the Makefile --------------------------------------------------------------------------------
DOCUMENTED = (
    *("lab", "demo", "test", "test-spawn", "virtual", "memory"),
    *("gpu", "nbval", "bench", "labs", "clean"),
)


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TEST_ARGS")
    env = {k: v for k, v in os.environ.items() if k not in inherited}
    words = [f"{name}={value}" for name, value in variables.items()]
    return ran("make", *arguments, *words, cwd=ROOT, env=env)


@pytest.mark.parametrize("target", DOCUMENTED)
def test_every_documented_target_is_there_and_explained(target):
    done = make("--dry-run", target)
    assert done.returncode == 0 and "Nothing to be done" not in done.stdout
    assert re.search(rf"^ +make {target} ", make("help").stdout, re.MULTILINE)


def test_readme_names_only_targets_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^make ([\w-]+)|`make ([\w-]+)", text, re.MULTILINE))
    words = {first or second for first, second in named}
    assert words >= {"lab", "test", "demo"} and words <= set(DOCUMENTED)


def test_continuous_integration_runs_what_a_contributor_runs():
    """One definition of "the tests pass": `make test`; hosted: tests/test_binder.py."""
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec make test"
    assert os.access(ROOT / ".ci/run", os.X_OK)
    recipe = make("--dry-run", "test").stdout
    for part in ("ruff check", "ruff format --check", "pytest  tests labs --nbval --numprocesses="):
        assert part in recipe
    assert recipe.splitlines()[-1].endswith("--dist=loadfile --no-loadscope-reorder")  # all tests


@pytest.fixture
def bin_folder(tmp_path):
    """Where a test puts the Python that `make` is to find."""

    def put(script: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return put


def test_set_up_says_what_is_missing(tmp_path, bin_folder):
    venv = str(tmp_path / "venv")
    none = make("demo", PYTHON="python-of-nowhere", VENV=venv)
    assert none.returncode != 0 and "there is no 'python-of-nowhere'" in none.stderr
    real = f'*) exec {sys.executable} "$@";; esac'
    old = f'case "$*" in *version_info*) exit 1;; -V) echo Python 3.9.2;; {real}'
    aged = make("demo", PYTHON=bin_folder(old), VENV=venv)
    assert aged.returncode != 0 and "is Python 3.9.2" in aged.stderr
    bare = f'case "$*" in *ensurepip*) exit 1;; {real}'
    done = make("demo", PYTHON=bin_folder(bare), VENV=venv)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert done.returncode != 0 and f"sudo apt install python{version}-venv" in done.stderr
    assert not Path(venv).exists()


def test_set_up_is_not_repeated_until_pyproject_changes(tmp_path):
    venv = tmp_path / "venv"
    venv.mkdir()
    assert "-m venv" in make("--dry-run", "test", VENV=str(venv)).stdout
    for stamp in (".ready", ".ready-dev"):
        (venv / stamp).touch()
    assert "-m venv" not in make("--dry-run", "test", VENV=str(venv)).stdout
    before = (ROOT / "pyproject.toml").stat().st_mtime - 10
    for stamp in (".ready", ".ready-dev"):
        os.utime(venv / stamp, (before, before))
    assert "-m venv" in make("--dry-run", "test", VENV=str(venv)).stdout
