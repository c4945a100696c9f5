"""Plans that use several paradigms at once: equal to one process, and predicted to the byte.

Every two settings that can meet do so in the list of pairwise.py. Each of its plans trains once,
and that run is held against a plain loop on one device (equality.py), against its prediction's
collectives and copies row by row, and against the memory formulas.
"""

from __future__ import annotations

from collections import Counter

import pytest

import paralab as pl
from equality import assert_equal_state, assert_same_bits, references
from pairwise import Case, cover
from paralab.theory.traffic import BOOKKEEPING

STEPS, LR = 2, 0.5
CASES = cover().cases
LINK = pl.Link(alpha=1e-5, bandwidth=1e9)
CLUSTER = pl.Cluster(flops=1e11, memory_bandwidth=3e10, devices_per_node=8, intra=LINK, host=LINK,
                     disk=LINK, host_bandwidth=1e10)  # fmt: skip
