"""Korthikanti+ 2022, "Reducing Activation Recomputation in Large Transformer Models",
arXiv:2205.05198: what table 5 says of utilisation.

All on A100s of 312 TFLOP/s, 16-bit activations, dropout masks of a byte, no data parallelism. The
formulas of table 2 are in theory/activation_costs.py.
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from paralab.spec import ModelSpec
from paralab.theory import training

PEAK = 312e12


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
        return ModelSpec(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            seq_len=2048,
            vocab=51200,
            dropout=0.1,
            attention="explicit",
        )


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
DP_8 = (8, None, 39.15, None, 54.2, None)


def korthikanti_table5() -> pd.DataFrame:
    """Table 5: iteration times, throughput, and the two utilisations that follow from them; last,
    the 530B model on 2240 devices (sec. 6.3).

    "HFU (%), recomputed" is by the paper's eq. 8, which counts the attention core three times over
    (`training.printed_selective_flops`); "HFU (%), counted once" is what its text describes.
    """
    printed = [(name, 1, *row) for name, row in TABLE_5.items()] + [("530B", *DP_8)]
    rows = []
    for name, dp, full, present, gain, mfu, hfu in printed:
        at, devices, batch = TABLE_3[name], dp * TABLE_3[name].devices, dp * TABLE_3[name].batch
        used = {"seconds": present, "devices": devices, "peak": PEAK}
        once = training.utilisation(at.model, batch, recompute="selective", **used)
        eq8 = training.printed_selective_flops(at.model, batch)
        rows.append(
            {
                "model": name,
                "devices": devices,
                "batch": batch,
                "full (s), printed": full,
                "present (s), printed": present,
                "throughput (%), printed": gain,
                "throughput (%), recomputed": full and 100 * (full / present - 1),
                "MFU (%), printed": mfu,
                "MFU (%), recomputed": 100 * once.model,
                "HFU (%), printed": hfu,
                "HFU (%), recomputed": 100 * eq8 / (present * devices * PEAK),
                "HFU (%), counted once": 100 * once.hardware,
            }
        )
    return pd.DataFrame(rows)
