"""Plans of several paradigms at once: they train what one process does, and as predicted.

Every two settings that can meet do so in the list of pairwise.py. Each of its plans trains once,
and that one run is held against the reference (equality.py), and against what is predicted: its
rows and its memory.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import paralab as pl
from pairwise import cover
from paralab.theory.traffic import BOOKKEEPING
from stated import TIERS
from together import Case, Trained

STEPS = 2
CALL = ["rank", "op", "axis", "ranks", "peer", "level", "phase", "payload_bytes", "wire_bytes"]
COPY = ["rank", "lane", "op", "category", "bytes"]
CASES = [
    Case(one.name, one.model, one.plan, (("clip_norm", one.clip_norm),)) for one in cover().cases
]


@pytest.fixture(scope="module")
def trained(text) -> Trained:
    return Trained(CASES, text)


@pytest.fixture(params=CASES, ids=lambda one: one.name)
def one(request) -> Case:
    return request.param


@pytest.fixture
def report(trained, one) -> pl.Report:
    """The case's one run."""
    return trained[one]


def rows(table: Any, columns: list[str], step: int) -> Counter:
    """A step's rows, how often each; bookkeeping left out."""
    table = table[table["step"] == step]
    if "phase" in table:
        table = table[~table["phase"].isin(BOOKKEEPING)]
    return Counter(zip(*(table[column] for column in columns), strict=True))


def test_gradients_weights_and_losses_are_those_of_one_process(trained, one):
    trained.assert_equals_the_reference(one)


def test_every_call_and_every_copy_is_predicted(report, one):
    expect = pl.predict(one.model, one.plan, TIERS, steps=1, optimizer="sgd")
    for table, columns in (("collectives", CALL), ("copies", COPY)):
        want = rows(getattr(expect, table), columns, 0)  # every step is the same
        for step in range(STEPS):
            got = rows(getattr(report, table), columns, step)
            assert want == got, (table, step, list((want - got) + (got - want))[:3])


def test_peak_memory_is_predicted(report, one):
    """Ranks of a grid take turns, and a prediction is that of the one that holds most. Gloo's
    thread may let go of a call's tensors, two copies at most, a moment after the rank does.
    """
    late = 2 * report.collectives["payload_bytes"].max()
    found: dict[int, list] = {}
    for rank in range(one.plan.world_size):
        found.setdefault(one.plan.place(rank).pp, []).append(report.peaks(rank))
    for tables in found.values():
        fullest = max(tables, key=lambda table: table.loc["total", "measured"])
        said, measured = fullest.loc["total"]
        assert 0.999 * said <= measured <= 1.001 * said + late, fullest
