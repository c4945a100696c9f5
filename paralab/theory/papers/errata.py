"""Where papers contradict themselves, found by recomputing their tables.

This package corrects no table silently: printed figures stay as printed, and the function named
here computes what follows from the paper's own inputs.
"""

from __future__ import annotations

import re

import pandas as pd

# where | as printed
#     | what follows | why | the function of paralab.theory that computes or explains it, if any
ERRATA = """
GPipe, table 1, Transformer, Naive-1 | parameters 11.7 G, activations 3.15 G
    | parameters 3.15 GiB, activations 11.7 | 12 bytes times 282.2 M are 3.15 GiB
GPipe, table 1, units | GB for both models
    | AmoebaNet in GB, the Transformer in GiB | 12 bytes per parameter
GPipe, table 1, AmoebaNet 1.8 B | 24.62
    | 21.6, or 2.05 B parameters | 12 bytes per parameter
GPipe, table 2, Transformer, M = 4 | 1.7, 3.2, 4.8
    | 1.60, 2.29, 2.91 | no pipeline is faster than m K/(m + K - 1); the batch was another
ZeRO, sec. 6.1, activation partitioning | 33 GB to 2 GB
    | 67.1 GB to 4.2 GB | 2 * 8192 * 32 * 1024 * 125 bytes; sec. 3.2 says about 60 GB
ZeRO, table 1 | rounded two ways
    | from 100 on cut off, below rounded | 4187.5 is 4187, 257.75 is 257 | zero.as_printed
ZeRO, table 2, Pos | 15.2, 30.4, 60.8, 121.6
    | 15.28, 30.57, 61.13, 122.27 | multiples of the first row as rounded
ZeRO-Offload, table 1, last row | 4M
    | 2M | an eighth of 16M | offload_costs.gpu_memory
ZeRO-Infinity, figure 2a, MSWM of 0.1 T | 1.95
    | 1.56 | 16 h^2 bytes by eq. 4
ZeRO-Infinity, eq. 5 | no bytes per element
    | twice that | figure 2a follows with 2 bytes only
ZeRO-Infinity, units | TB, GB
    | TiB, GiB | figure 2a
ZeRO-Infinity, sec. 4, optimizer bandwidth | 1.5 TB/s for 90 %
    | 1.23 TB/s | eq. 6; 1.5 TB/s give 91.6 % | offload_costs.bandwidth_needed
Ring Attention, table 2, A100 over InfiniBand | 24.5
    | 24.96 | 312e12 / 12.5e9, in thousands
FSDP, hybrid sharding factor | F = W/G
    | F = G | its text: shards inside a host
Zero Bubble, tables 5 and 6, column 1F1B-I | 0.1055, with 1.5 B parameters and m = 24
    | 0.1090 | the authors' simulator waits for the message from rank p-1 to rank 0 for the first
    of every p micro-batches only; up to 0.0035 in the other rows | pipeline.simulate
PTD-P, eq. 4 | 8 T P/(n X)
    | 1.5 to 3 % more | the exact FLOPs give table 2's days | training.days_by_parameters
PTD-P, table 1, 1T | interleaved
    | not interleaved | the authors' script | papers.ptdp_table1
PTD-P, sec. 5.6 | 33 % lower throughput
    | 25 % lower, or 33 % longer | an extra forward is a third more FLOPs
Korthikanti+, table 5, 22B | MFU 41.5, HFU 43.7
    | 41.7, 43.8 | 1.10 s has three digits | papers.korthikanti_table5
Korthikanti+, eq. 8 and 9 | s/(3h), a ratio of 1 + s/(6h)
    | 2s/(9h), 1 + s/(18h) | its text: 4 b s^2 h once more in a block, not three times; table 5's
    HFU, and the 2.7 % and 1.6 % of sec. 5, follow eq. 8 | needs.step_flops
"""


def errata() -> pd.DataFrame:
    """One row per contradiction: where, printed, follows, why, and the function to see."""
    entries = re.split(r"\n(?=\w)", ERRATA.strip())
    rows = [[" ".join(cell.split()) for cell in f"{entry} |".split("|")[:5]] for entry in entries]
    return pd.DataFrame(rows, columns=["where", "printed", "follows", "why", "see"])
