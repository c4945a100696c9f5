"""paralab: see how models too large for one device are trained, by doing it.

    import paralab as pl
    model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)
    report = pl.run(model, pl.Plan(dp=4), steps=8)     # four real processes
    expect = pl.predict(model, pl.Plan(dp=4))          # what theory says about this machine
    pl.compare(expect, report)

Importing this package is quick and leaves torch out; ranks import torch in processes of their own.
"""

from __future__ import annotations

__version__ = "0.1.0"

from paralab.experiment import run
from paralab.launch import OutOfMemory, RankError, RankTimeout, launch, warm_up
from paralab.report import Report, load
from paralab.spec import Cluster, Link, ModelSpec, Plan
from paralab.theory.compare import compare
from paralab.theory.predict import predict

__all__ = [
    "Cluster", "Link", "ModelSpec", "OutOfMemory", "Plan", "RankError", "RankTimeout", "Report",
    "compare", "launch", "load", "predict", "run", "warm_up",
]  # fmt: skip
