"""Plans next to one another: those of a search, and of a contest in the order they came in."""

from types import SimpleNamespace

import pytest

import paralab as pl
from paralab.programs.search import SPARE
from paralab.view import contest, pareto, theme
from paralab.view.plan_times import rank_correlation
from refusals import refuses
from test_search import LAPTOP, SMALL


def reports(clock, **seconds):
    return {n: SimpleNamespace(clock=clock, step_time=s) for n, s in seconds.items()}


FOUND = reports("replayed", a=3e-3, b=1e-3, c=2e-3)


def test_plans_stand_in_the_order_they_came_in_with_both_times():
    chart = contest(reports("predicted", a=5e-3, b=2e-3, c=1e-3), FOUND)
    assert chart.table.index.tolist() == ["b", "c", "a"]
    assert chart.table["predicted"].tolist() == [2e-3, 1e-3, 5e-3]
    assert chart.table["replayed"].tolist() == [1e-3, 2e-3, 3e-3]
    assert chart.finding == "The fastest plan is b; c was predicted as the fastest"
    lines, expected, found = chart.data
    assert expected.x == (2.0, 1.0, 5.0) and found.x == (1.0, 2.0, 3.0)  # ms
    assert expected.marker.symbol == "circle-open" and found.marker.symbol == "circle"
    assert lines.x == (2.0, 1.0, None, 1.0, 2.0, None, 5.0, 3.0, None)


def test_a_right_prediction_is_said_to_be_one():
    tied = reports("replayed", a=2.0, b=1.0, c=1.0)
    for expected, found, best in (
        ({"a": 9.0, "b": 7.0, "c": 8.0}, FOUND, "b"), ({"a": 2.0, "b": 1.0, "c": 1.0}, FOUND, "b"),
        ({"a": 2.0, "b": 1.5, "c": 1.0}, tied, "c"),
    ):  # fmt: skip
        chart = contest(reports("predicted", **expected), found)
        assert chart.finding == f"The fastest plan is {best}, as predicted"


def test_rank_correlation_is_spearmans_with_ties():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.948683, abs=1e-6)


def test_what_cannot_be_compared_is_refused():
    two, one = reports("predicted", a=1.0, b=1.0), reports("measured", c=1.0)
    refuses("not the plans in expected", contest, two, FOUND)
    refuses("at least two", contest, reports("predicted", c=1.0), one)
    for expected in (reports("predicted", a=1.0, b=1.0) | one, FOUND):
        refuses("clocks=.*not one for each mapping", contest, expected, FOUND)


# ---- a search ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def search():
    return pl.plan_search(SMALL, LAPTOP, devices=8, global_batch=16,
                          memory="12MB", top=5)  # fmt: skip


def test_the_front_and_the_best_are_drawn(search):
    chart = pareto(search)
    front = search.front
    lines = [trace for trace in chart.data if trace.mode == "lines" and len(trace.x) == len(front)]
    assert len(lines) == 1
    assert all(trace.name for trace in chart.data if trace.showlegend)
    assert chart.finding and all("MB" in tick for tick in chart.layout.xaxis.ticktext)
    assert not search.fits[search.front[0]]  # both numbers of the title are then estimates
    estimate = theme.scaled(float(search.closed[0]), "s")
    assert estimate != theme.scaled(float(search.simulated[0]), "s")
    assert f"takes {estimate} by estimate; one of " in chart.finding


def test_plans_that_do_not_fit_are_told_apart(search):
    assert 0 < search.fits.sum() < len(search.fits)
    chart = pareto(search)
    table = chart.table
    assert set(table["fits"]) == {True, False}
    assert (table.loc[~table["fits"], "memory"] > search.memory_limit / SPARE).all()
