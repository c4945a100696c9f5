"""The picture of a search: every plan's time and memory, the front, the best."""

import pytest

import paralab as pl
from paralab import view
from paralab.programs.search import SPARE
from paralab.view import theme
from test_search import LAPTOP, SMALL


@pytest.fixture(scope="module")
def search():
    return pl.plan_search(SMALL, LAPTOP, devices=8, global_batch=16,
                          memory="12MB", top=5)  # fmt: skip


def test_the_front_and_the_best_are_drawn(search):
    chart = view.pareto(search)
    front = search.pareto()
    lines = [trace for trace in chart.data if trace.mode == "lines" and len(trace.x) == len(front)]
    assert len(lines) == 1
    assert all(trace.name for trace in chart.data if trace.showlegend)
    assert chart.finding and all("MB" in tick for tick in chart.layout.xaxis.ticktext)
    assert repr(chart).startswith("Chart(")
    assert not search.fits[search.front[0]]  # both numbers of the title are then estimates
    estimate = theme.scaled(float(search.closed[0]), "s")
    assert estimate != theme.scaled(float(search.simulated[0]), "s")
    assert f"takes {estimate} by estimate; one of " in chart.finding


def test_plans_that_do_not_fit_are_told_apart(search):
    assert 0 < search.fits.sum() < len(search.fits)
    chart = view.pareto(search)
    table = chart.table
    assert set(table["fits"]) == {True, False}
    assert (table.loc[~table["fits"], "memory"] > search.memory_limit / SPARE).all()
