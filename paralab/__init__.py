"""paralab: see how models too large for one device are trained, by doing it.

    import paralab as pl
    model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)
    report = pl.run(model, pl.Plan(dp=4), steps=8)     # four real processes
    expect = pl.predict(model, pl.Plan(dp=4))          # what theory says about this machine
    pl.compare(expect, report)
    pl.program(model, pl.Plan(dp=4))                   # the list of instructions of a rank
    pl.observe(fn, ranks=4)                            # your own PyTorch program, unchanged
    pl.dry_run(model, pl.Plan(dp=4096), rank=7)        # bytes of one rank of a plan of any size
    pl.explore(model)                                  # a plan on sliders, predicted and run
    cluster = pl.Cluster.preset("dgx-a100", nodes=2)   # or Cluster(...), or Cluster.local()
    pl.plan_search(model, cluster)                     # the fastest plans that fit
    pl.theory.papers.ptdp_table1()                     # a paper's table, printed and recomputed

Importing this package is quick, because it does not import torch. The ranks do, in their processes.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if os.name != "posix":
    raise ImportError(
        f"paralab needs the processes, signals and file locks of a Unix system, not {os.name!r}; "
        "on Windows run Jupyter inside WSL 2, where everything works"
    )
if sys.version_info < (3, 11) or find_spec("cloudpickle") is None:  # needed before all the others
    raise ImportError(
        f"{sys.executable} (Python {sys.version.split()[0]}) cannot run paralab: it needs Python "
        "3.11 or newer, and the packages that `pip install -e` of its clone installs; `make lab` "
        "there sets up .venv/bin/python with all of them"
    )

from paralab import theory
from paralab.default_device import set_default_device
from paralab.dry_run import dry_run
from paralab.experiment import run
from paralab.interpret.predict import predict
from paralab.launch import launch, warm_up
from paralab.observing import observe, step
from paralab.ranks.errors import OutOfMemory, RankError, RankTimeout, Stopped
from paralab.report.report import Report, load
from paralab.spec import Cluster, Link, ModelSpec, Plan
from paralab.theory.compare import compare
from paralab.trace import trace
from paralab.version import __version__

if TYPE_CHECKING:
    from paralab.interpret.text import program
    from paralab.model import reference as reference
    from paralab.programs.search import plan_search
    from paralab.theory.fit_cluster import fit_cluster
    from paralab.view.widget_explore import Explore

__all__ = [
    "Cluster",
    "Link",
    "ModelSpec",
    "OutOfMemory",
    "Plan",
    "RankError",
    "RankTimeout",
    "Report",
    "Stopped",
    "__version__",
    "compare",
    "dry_run",
    "explore",
    "fit_cluster",
    "launch",
    "load",
    "observe",
    "plan_search",
    "predict",
    "program",
    "reference",
    "run",
    "set_default_device",
    "step",
    "theory",
    "trace",
    "warm_up",
]

_LAZY = {  # imported at first use: they import NumPy, plotly, widgets, the model's ops or torch
    "exercises": "paralab.exercises",
    "fit_cluster": "paralab.theory.fit_cluster:fit_cluster",
    "plan_search": "paralab.programs.search:plan_search",
    "program": "paralab.interpret.text:program",
    "reference": "paralab.model.reference",
    "view": "paralab.view",
}


def explore(
    model: ModelSpec | None = None, plan: Plan | None = None, cluster: Cluster | None = None
) -> Explore:
    """A widget with the settings of a plan as sliders, next to the prediction for them; “Run it”
    runs the plan on real processes.

    model    default: eight small layers
    plan     where the sliders start; default: two pipelines of two stages, or one device if that
             plan does not fit the model or the cluster
    cluster  the devices and links of the prediction; default `Cluster.local`, this machine
    """
    from paralab.view.widget_explore import Explore

    return Explore(model, plan, cluster)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return pkgutil.resolve_name(_LAZY[name])
    raise AttributeError(f"module 'paralab' has no attribute {name!r}")


def __dir__() -> list[str]:  # for tab completion: lazy names too, but not the package's modules
    return sorted({*__all__, *_LAZY})
