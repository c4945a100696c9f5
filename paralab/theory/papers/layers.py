"""Tables about layers: what 1D to 3D tensor parallelism cost, and what a mixture of experts buys.

The first is in Colossal-AI's documentation (theory/tensor_costs.py says what its units are), the
second table 1 of Switch Transformers (Fedus+ 2021, arXiv:2101.03961).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.theory import tensor_costs

if TYPE_CHECKING:
    import pandas as pd

# Switch Transformers, table 1, on 32 TPU v3 cores: capacity factor, quality after 100 thousand
# steps (negative log perplexity), hours to -1.50, examples per second. 128 experts.
SWITCH = (
    ("T5-Base", None, -1.731, None, 1600),
    ("T5-Large", None, -1.550, 131.1, 470),
    ("MoE-Base", 2.0, -1.547, 68.7, 840),
    ("Switch-Base", 2.0, -1.554, 72.8, 860),
    ("MoE-Base", 1.25, -1.559, 80.7, 790),
    ("Switch-Base", 1.25, -1.553, 65.0, 910),
    ("MoE-Base", 1.0, -1.572, 80.1, 860),
    ("Switch-Base", 1.0, -1.561, 62.8, 1000),
    ("Switch-Base+", 1.0, -1.534, 67.6, 780),
)


def colossal_costs(tp: int = 64) -> pd.DataFrame:
    """The documentation's table with ``tp`` ranks put in: as printed, and all rows in one unit.

    Recomputed is elements sent per rank for one square linear layer, forward and backward, over the
    elements of a whole matrix. Rows without a grid of ``tp`` ranks are left out.
    """
    import pandas as pd

    rows = []
    for mode, cost in tensor_costs.PRINTED.items():
        try:
            printed = tensor_costs.as_printed(mode, tp)
        except ValueError:  # no such grid
            continue
        rows.append((mode, *cost, float(printed), float(tensor_costs.in_one_unit(mode, tp))))
    names = ["mode", "processes", "compute", "parameters", "activations", "bandwidth", "latency",
             "bandwidth, printed", "bandwidth, recomputed"]  # fmt: skip
    return pd.DataFrame(rows, columns=names)


def switch_table1() -> pd.DataFrame:
    """Switch Transformers, table 1, and what follows: speed beside the dense models'.

    Experts beyond the one that a token visits cost memory, not FLOPs: Switch-Base reaches in half
    the time what T5-Large does.
    """
    import pandas as pd

    dense = {row[0]: row for row in SWITCH[:2]}
    rows = [(*row, dense["T5-Large"][3] / row[3] if row[3] else None, row[4] / dense["T5-Base"][4])
            for row in SWITCH]  # fmt: skip
    names = ["model", "capacity factor", "quality, printed", "hours to -1.50, printed",
             "examples/s, printed", "speed over T5-Large", "examples/s over T5-Base"]  # fmt: skip
    return pd.DataFrame(rows, columns=names)
