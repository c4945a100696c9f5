"""Devices that the papers ran on, and what of their peak a matrix product really reaches.

From stas00/ml-engineering's accelerator and network tables (MAMF: the best of many shapes tried),
PTD-P and ZeRO. Datasheet peaks are dense, 16 bits. `Cluster.preset` has the same figures at the
shares that it states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# TFLOP/s, GB of memory, GB/s of memory, GB/s per device one way inside a node and between nodes,
# TFLOP/s that a matrix product reached at best.
DEVICES = (
    ("V100-32GB", 125, 32, 900, 150, 6.25, None),
    ("A100-80GB", 312, 80, 2039, 300, 25, 271.2),
    ("H100-SXM", 989, 80, 3350, 450, 50, 794.5),
    ("H200", 989, 141, 4800, 450, 50, 794.5),
)


def devices() -> pd.DataFrame:
    """One row per device; "reached" is the share of peak that the best matrix product had.

    What a whole training step reaches is less again: PTD-P's 44 to 52 % on A100s.
    """
    import pandas as pd

    rows = [(*row, 100 * row[-1] / row[1] if row[-1] else None) for row in DEVICES]
    names = ["device", "peak (TFLOP/s)", "memory (GB)", "memory (GB/s)", "inside a node (GB/s)",
             "between nodes (GB/s)", "matrix product (TFLOP/s)", "reached (%)"]  # fmt: skip
    return pd.DataFrame(rows, columns=names)
