"""Korthikanti+ 2022, "Reducing Activation Recomputation in Large Transformer Models",
arXiv:2205.05198: the utilisations of table 5.

All runs are on A100s of 312 TFLOP/s, with 16-bit activations, dropout masks of one byte per element
and, but for the last row, no data parallelism. theory/activation_costs.py has table 2's formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd

from paralab.spec import ModelSpec
from paralab.spec.model import megatron
from paralab.theory import training

PEAK = 312e12  # FLOP/s, 16-bit, of an A100
NAN = float("nan")


class Measured(NamedTuple):
    """A row of table 5; NaN where the paper prints nothing.

    name     the model's name
    batch    samples per iteration
    full     seconds per iteration with full recomputation
    present  the same with sequence parallelism and selective recomputation
    gain     as printed: rise in throughput in %; ``mfu``, ``hfu``: utilisations in %
    """

    name: str
    model: ModelSpec
    devices: int
    batch: int
    full: float
    present: float
    gain: float
    mfu: float
    hfu: float


def _row(name: str, *columns: Any) -> Measured:
    heads, hidden, layers, *measured = columns
    model = ModelSpec(**megatron(layers, hidden, heads), dropout=0.1)
    return Measured(name, model, *measured)


# From table 3: heads, hidden, layers, devices, batch. From table 5: seconds per iteration with full
# recomputation, and with sequence parallelism and selective recomputation; the rise in throughput,
# MFU and HFU of the latter in %. The last row, with 8-way data parallelism, is from sec. 6.3.
TABLE_5 = (
    _row("22B", 64, 6144, 48, 8, 4, 1.42, 1.10, 29.0, 41.5, 43.7),
    _row("175B", 96, 12288, 96, 64, 64, 18.13, 13.75, 31.8, 51.4, 52.8),
    _row("530B", 128, 20480, 105, 280, 280, 49.05, 37.83, 29.7, 56.0, 57.0),
    _row("1T", 160, 25600, 128, 512, 512, 94.42, 71.49, 32.1, 56.3, 57.0),
    _row("530B", 128, 20480, 105, 2240, 2240, NAN, 39.15, NAN, 54.2, NAN),
)


def korthikanti_table5() -> pd.DataFrame:
    """Table 5: iteration times, throughput, and the two utilisations that follow from them; and as
    the last row the 530B model on 2240 devices (sec. 6.3).

    "HFU (%), counted once" is what the paper's text describes; the printed ones follow its eq. 8,
    which counts the recomputed attention core three times.
    """
    made = []
    for row in TABLE_5:
        used = {"seconds": row.present, "devices": row.devices, "peak": PEAK}
        once = training.utilisation(row.model, row.batch, recompute="selective", **used)
        made.append(
            {
                "model": row.name,
                "devices": row.devices,
                "batch": row.batch,
                "full (s), printed": row.full,
                "present (s), printed": row.present,
                "throughput (%), printed": row.gain,
                "throughput (%), recomputed": 100 * (row.full / row.present - 1),
                "MFU (%), printed": row.mfu,
                "MFU (%), recomputed": 100 * once.model,
                "HFU (%), printed": row.hfu,
                "HFU (%), counted once": 100 * once.hardware,
            }
        )
    return pd.DataFrame(made)
