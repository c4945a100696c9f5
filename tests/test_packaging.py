"""What a fresh clone can rely on: a light import, a complete wheel, the targets README names."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from paralab import doctor
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
pl.theory.zero.volume(3), pl.view.use_theme("dark")
assert "theory" in pl.__all__ and "papers" in dir(pl.theory) and "timelines" in dir(pl.view)
assert not hasattr(pl.theory, "pipelines") and not hasattr(pl.view, "pie")
print(*sorted({"torch", "numpy", "pandas", "plotly", "ipywidgets"} & sys.modules.keys()))
pl.theory.papers.errata()
assert "plotly" not in sys.modules
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


def test_doctor_wants_what_pyproject_wants():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    doctors = doctor.OLDEST | {"torch": doctor.OLDEST_TORCH}
    assert sorted(wanted) == sorted(f"{name}>={least}" for name, least in doctors.items())


def test_what_colab_runs_installs_every_file_of_the_package(tmp_path):
    """A data file that setuptools does not know of works in a clone and is missing for users. Here
    a copy of the package stands for the repository's address, and what it needs is there.
    """
    cell = (ROOT / "binder" / "colab.txt").read_text()
    compile(TransformerManager().transform_cell(cell), "the cell", "exec")
    [line] = re.findall(r"^%pip (install .*) git\+ADDRESS$", cell, re.MULTILINE)
    clone, target = tmp_path / "clone", tmp_path / "target"
    shutil.copytree(PACKAGE, clone / "paralab", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *shlex.split(line)]
    more = ["--no-deps", "--no-build-isolation", "--no-compile", f"--target={target}"]
    done = ran(*pip, *more, clone)
    assert done.returncode == 0, done.stderr
    installed, ours = (
        {path.relative_to(top) for path in top.glob("paralab/**/*") if path.is_file()}
        for top in (target, clone)
    )
    assert installed == ours


# ---- the Makefile --------------------------------------------------------------------------------
DOCUMENTED = "lab demo test test-spawn virtual memory gpu nbval bench labs clean"


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TEST_ARGS")
    env = {k: v for k, v in os.environ.items() if k not in inherited}
    words = [f"{name}={value}" for name, value in variables.items()]
    return ran("make", *arguments, *words, cwd=ROOT, env=env)


def test_every_target_of_help_and_readme_is_there_and_every_one_is_explained():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE))
    assert {"lab", "test", "demo"} <= named <= set(DOCUMENTED.split())
    assert "`~/.cache/paralab`" in text  # what is left outside the clone
    explained = re.findall(r"^ +make ([\w-]+) ", make("help").stdout, re.MULTILINE)
    assert " ".join(explained) == DOCUMENTED
    for target in explained:
        done = make("--dry-run", target)
        assert done.returncode == 0 and "Nothing to be done" not in done.stdout


def test_continuous_integration_runs_what_a_contributor_runs():
    """One definition of "the tests pass": `make test`; hosted: tests/test_binder.py."""
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec make test"
    assert os.access(ROOT / ".ci/run", os.X_OK)
    recipe = make("--dry-run", "test").stdout
    parts = ("ruff check", "ruff format --check", "python tests/browser/chromium.py",
             "pytest  tests labs --nbval --numprocesses=")  # fmt: skip
    found = [recipe.index(part) for part in parts]
    assert found == sorted(found)
    assert recipe.splitlines()[-1].endswith("--dist=loadfile --no-loadscope-reorder")  # all tests


def test_set_up_says_what_is_missing(tmp_path):
    version, venv = f"{sys.version_info.major}.{sys.version_info.minor}", tmp_path / "venv"
    python = tmp_path / "python"
    for words, said in (
        ("*version_info*) exit 1;; -V) echo Python 3.9.2", "is Python 3.9.2"),
        ("*ensurepip*) exit 1", f"sudo apt install python{version}-venv"),
        ("", "there is no"),
    ):
        if words:
            other = f'*) exec {sys.executable} "$@"'
            python.write_text(f'#!/bin/sh\ncase "$*" in {words};; {other};; esac\n')
            python.chmod(0o755)
        else:
            python.unlink()
        done = make("demo", PYTHON=str(python), VENV=str(venv))
        assert done.returncode != 0 and said in done.stderr and not venv.exists()


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
