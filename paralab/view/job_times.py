"""The jobs of a streamed optimizer update, in a learner's order, on the lanes disk and host."""

from __future__ import annotations

from collections.abc import Iterable

from paralab.checks import choice, count_of, illegal
from paralab.exercises import offload as stream
from paralab.view import theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import boxes as mark
from paralab.view.marks import note, upright


def jobs(listed: Iterable[stream.Job], *, host: str = "slow") -> Chart:
    """When the jobs (what, unit, buffer) of `pl.exercises.stream` run, with a line at the least
    possible time.

    host  "fast" or "slow": how long the host takes to update a unit

    ``table``: lane, what, unit, buffer, start, end. Raises ValueError if ``listed`` is no list of
    jobs.
    """
    update_s = stream.UPDATE_S[choice("host", host, tuple(stream.UPDATE_S))]
    wanted = list(listed) if isinstance(listed, Iterable) else []
    if not wanted:
        raise illegal("jobs", listed, "no jobs", 'a list [("read", 0, 0), ...]')
    job_list = stream.as_jobs(wanted, len(wanted))
    units, window = 1 + max(job[1] for job in job_list), len({job[2] for job in job_list})
    times = stream.simulate(job_list, update_s)
    rows = [
        (stream.LANE[kind], kind, unit, buffer, *moments)
        for (kind, unit, buffer), moments in zip(job_list, times, strict=True)
    ]
    total, least = max(end for _, end in times), stream.limit_s(units, window, update_s)
    fig = figure(
        _finding(units, total, least, stream.first_misplaced(job_list, units)),
        f"simulated · {host} host · {count_of(window, 'buffer')} · number: the unit",
        height=270,
        xaxis=mark.time_axis("time (ms)", 1e3 * max(total, least)),
        yaxis=mark.rows_axis([(0, "disk"), (1, "host")], 1.6, -1.0),
    )
    *_, olive, teal = theme.look().series  # reads and writes belong to no phase with a colour
    hues = {"read": olive, "update": theme.colour("optimizer"), "write": teal}
    shown: dict[str, list[tuple]] = {what: [] for what in hues}
    for lane, what, unit, buffer, start, end in rows:
        text = f"{what} unit {unit}, buffer {buffer}: {stream.ms(start)} to {stream.ms(end)}"
        y = ("disk", "host").index(lane)
        shown[what].append((1e3 * start, 1e3 * (end - start), y, 0.8, str(unit), text))
    traces = [mark.boxes(what, hue, shown[what]) for what, hue in hues.items()]
    anchor, shift = ("right", -4) if least > total / 2 else ("left", 4)
    label = note("least possible time", 1e3 * least, -0.7, anchor=anchor, xshift=shift)
    return fig.draw(traces, [label], [upright(1e3 * least, dash="dash")]).tabled(
        ("lane what unit buffer start end", rows)
    )


def _finding(units: int, total: float, least: float, wrong: str) -> str:
    """How long the jobs take, next to the least possible time of all jobs, or what is wrong."""
    if total < least * (1 - 1e-9):  # some jobs are missing
        return f"These jobs take {stream.ms(total)}; all jobs take at least {stream.ms(least)}"
    if wrong:
        return f"These jobs are no update of {count_of(units, 'unit')}: {wrong}"
    takes = "1 unit takes" if units == 1 else f"{units} units take"
    return f"{takes} {stream.ms(total)}; no order takes less than {stream.ms(least)}"
