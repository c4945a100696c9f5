"""Pipelines as printed: Zero Bubble's table 5 from its table 6, GPipe's table 2, and what schedules
cost by their sources.

Qi+ 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241; Huang+ 2018, "GPipe", arXiv:
1811.06965. The first reports a bubble of 1 - busy time over p times cost, where cost is the longest
of the ranks' own spans and not the makespan, as theory/pipeline.py does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.parallel.schedules import interleaved, one_f_one_b, zb_h1, zb_h2
from paralab.theory.pipeline import bubble_formula, simulate
from paralab.theory.pipeline_costs import (
    SCHEDULES,
    idle_seconds,
    parameter_copies,
    peak_activations,
)

if TYPE_CHECKING:
    import pandas as pd

# Zero Bubble, table 6: billions, p, m, milliseconds of F, B (input half), W, and a message; table
# 5: bubble rates of 1F1B, 1F1B-I (3 chunks per rank here), ZB-H1, ZB-H2, ZB-1p and ZB-2p. The last
# two are what the paper's search finds under a memory limit.
ZERO_BUBBLE = (
    (1.5, 8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433),
    (1.5, 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039),
    (1.5, 8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674, 0.0444, 0.0674, 0.0026),
    (14.6, 16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1104, 0.1397, 0.0672, 0.1397, 0.0066),
    (14.6, 16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.0852, 0.1088, 0.0516, 0.1088, 0.0054),
    (14.6, 16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0445, 0.0576, 0.0266, 0.0576, 0.0028),
)
CHUNKS = 3

# GPipe, table 2: normalised throughput on TPUs, by model, m, and K = 2, 4, 8.
GPIPE = (
    ("AmoebaNet", 1, (1, 1.13, 1.38)),
    ("AmoebaNet", 4, (1.07, 1.26, 1.72)),
    ("AmoebaNet", 32, (1.21, 1.84, 3.48)),
    ("Transformer", 1, (1, 1.07, 1.3)),
    ("Transformer", 4, (1.7, 3.2, 4.8)),
    ("Transformer", 32, (1.8, 3.4, 6.3)),
)


def zero_bubble_table5() -> pd.DataFrame:
    """Zero Bubble, table 5: bubble rates, simulated from the times that its table 6 has measured.

    1F1B, ZB-H1 and ZB-H2 agree to all four digits printed, 1F1B-I within 0.004.
    """
    import pandas as pd

    made = {"1F1B": one_f_one_b, "ZB-H1": zb_h1, "ZB-H2": zb_h2}
    rows = []
    for size, p, m, f, b, w, comm, plain, chunked, h1, h2, p1, p2 in ZERO_BUBBLE:
        row = {"parameters (B)": size, "ranks": p, "micro-batches": m, "F (ms)": f, "B (ms)": b,
               "W (ms)": w, "message (ms)": comm}  # fmt: skip
        for (name, schedule), printed in zip(made.items(), (plain, h1, h2), strict=True):
            found = simulate(schedule(p, m), forward=f, backward=b, weight_grad=w, comm=comm)
            row |= {f"{name}, printed": printed, f"{name}, recomputed": found.bubble_rate}
        times = {"forward": f / CHUNKS, "backward": b / CHUNKS, "weight_grad": w / CHUNKS}
        found = simulate(interleaved(p, m, CHUNKS), comm=comm, **times)
        row |= {"1F1B-I, printed": chunked, "1F1B-I, recomputed": found.bubble_rate}
        rows.append(row | {"ZB-1p, printed": p1, "ZB-2p, printed": p2})
    return pd.DataFrame(rows)


def gpipe_table2() -> pd.DataFrame:
    """GPipe, table 2: throughput on K devices with m micro-batches, beside K (1 - bubble).

    Printed numbers are relative to m = 1, K = 2; recomputed is the speed-up over one device of a
    pipeline of equal stages and free links, m K/(m + K - 1), which is 1 there too. Only the
    Transformer at m = 32 is such a pipeline: at m = 4 it is printed faster than any pipeline could
    be (the batch was another), and AmoebaNet's stages are not equal.
    """
    import pandas as pd

    rows = []
    for model, m, values in GPIPE:
        for k, printed in zip((2, 4, 8), values, strict=True):
            speed = k * (1 - bubble_formula("gpipe", k, m))
            rows.append((model, m, k, float(printed), speed, 100 * (speed / printed - 1)))
    names = ["model", "micro-batches", "devices", "throughput, printed", "throughput, recomputed",
             "off by (%)"]  # fmt: skip
    return pd.DataFrame(rows, columns=names)


def schedule_costs(pp: int = 8, microbatches: int = 32, chunks: int = 2) -> pd.DataFrame:
    """What every schedule costs by its source: idle time and activations with F = B = W = 1.

    Idle time is per rank, and over the ideal m (F + B + W), of which a rank of dualpipev has two
    stages' worth; activations are micro-batches of a stage, on the rank that keeps most;
    parameters, how many stages' a rank keeps.
    """
    import pandas as pd

    rows = []
    for name in SCHEDULES:
        idle = idle_seconds(name, pp, virtual_stages=chunks)
        kept = peak_activations(name, pp, microbatches, virtual_stages=chunks)
        ideal = 3 * microbatches * (2 if name == "dualpipev" else 1)
        rows.append((name, idle, idle / ideal, float(kept), parameter_copies(name)))
    names = ["schedule", "idle", "bubble over ideal", "activations", "parameters"]
    return pd.DataFrame(rows, columns=names)
