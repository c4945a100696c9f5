"""Korthikanti+ 2022, "Reducing Activation Recomputation in Large Transformer Models",
arXiv:2205.05198: what table 5 says of utilisation.

All on A100s of 312 TFLOP/s, 16-bit activations, dropout masks of a byte, no data parallelism. The
formulas of table 2 are in theory/activation_costs.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pandas as pd

from paralab.spec import ModelSpec
from paralab.theory import training
from paralab.theory.papers.ptdp import PEAK, gpt
from paralab.theory.papers.rows import NAN, rows_of


class Setting(NamedTuple):
    """A row of table 3; ``chunks`` per rank are in the text of sec. 6."""

    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    devices: int
    batch: int
    micro: int
    chunks: int

    @property
    def model(self) -> ModelSpec:
        return gpt(self.heads, self.hidden, self.layers).replace(dropout=0.1)


TABLE_3 = {
    "22B": Setting(64, 6144, 48, 8, 1, 8, 4, 4, 1),
    "175B": Setting(96, 12288, 96, 8, 8, 64, 64, 1, 3),
    "530B": Setting(128, 20480, 105, 8, 35, 280, 280, 1, 3),
    "1T": Setting(160, 25600, 128, 8, 64, 512, 512, 1, 1),
}

# Table 5: seconds per iteration with full recomputation, and with sequence parallelism and
# selective recomputation; the rise in throughput, MFU and HFU of the latter in %.
TABLE_5 = {
    "22B": (1.42, 1.10, 29.0, 41.5, 43.7),
    "175B": (18.13, 13.75, 31.8, 51.4, 52.8),
    "530B": (49.05, 37.83, 29.7, 56.0, 57.0),
    "1T": (94.42, 71.49, 32.1, 56.3, 57.0),
}
# Sec. 6.3: the 530B model with 8-way data parallelism, on 8 times the devices and batch.
DP_8 = ("530B", 8, NAN, 39.15, NAN, 54.2, NAN)


class Measured(NamedTuple):
    """A row of table 5.

    batch    samples per iteration
    present  seconds per iteration with sequence parallelism and selective recomputation
    name     what the model is called
    full     seconds per iteration with full recomputation
    gain     as printed: rise in throughput in %; ``mfu``, ``hfu``: utilisations in %
    peak     FLOP/s of a device
    """

    model: ModelSpec
    devices: int
    batch: int
    present: float
    name: str = ""
    full: float = NAN
    gain: float = NAN
    mfu: float = NAN
    hfu: float = NAN
    peak: float = PEAK


def printed_rows() -> list[Measured]:
    """Those of table 5, and of sec. 6.3."""
    found = []
    for name, dp, full, present, *shares in [(n, 1, *row) for n, row in TABLE_5.items()] + [DP_8]:
        at = TABLE_3[name]
        found.append(
            Measured(at.model, dp * at.devices, dp * at.batch, present, name, full, *shares)
        )
    return found


def korthikanti_table5(rows: Iterable[Measured | Mapping[str, Any]] | None = None) -> pd.DataFrame:
    """Table 5: iteration times, throughput, and the two utilisations that follow from them; last,
    the 530B model on 2240 devices (sec. 6.3).

    rows  a reader's own instead, each a `Measured` or a mapping of its fields

    "HFU (%), recomputed" is by the paper's eq. 8, which counts the attention core three times over
    (`training.printed_selective_flops`); "HFU (%), counted once" is what its text describes.
    """
    made = []
    for row in rows_of(Measured, rows, printed_rows()):
        used = {"seconds": row.present, "devices": row.devices, "peak": row.peak}
        once = training.utilisation(row.model, row.batch, recompute="selective", **used)
        eq8 = training.printed_selective_flops(row.model, row.batch)
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
                "HFU (%), recomputed": 100 * eq8 / (row.present * row.devices * row.peak),
                "HFU (%), counted once": 100 * once.hardware,
            }
        )
    return pd.DataFrame(made)
