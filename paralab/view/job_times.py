"""Jobs of a streamed update on their two lanes, disk and host: a learner's order, as it runs."""

from __future__ import annotations

from collections.abc import Iterable

from paralab.checks import choice, illegal
from paralab.exercises import jobs as stream
from paralab.view import theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import boxes as mark
from paralab.view.marks import note, upright


def jobs(listed: Iterable[stream.Job], *, host: str = "slow") -> Chart:
    """When the jobs (what, unit, buffer) of `pl.exercises.stream` run, with the least possible time
    as a line.

    host  "fast" or "slow": how long an update takes

    ``table``: lane, what, unit, buffer, start, end. Raises ValueError on what is no list of jobs.
    """
    update_s = stream.UPDATE_S[choice("host", host, tuple(stream.UPDATE_S))]
    found = list(listed) if isinstance(listed, Iterable) else []
    if not found:
        raise illegal("jobs", listed, "no jobs", 'a list [("read", 0, 0), ...]')
    made = stream.as_jobs(found, len(found))
    units, window = 1 + max(job[1] for job in made), len({job[2] for job in made})
    times = stream.simulate(made, update_s)
    rows = [
        (stream.LANE[kind], kind, unit, buffer, *moments)
        for (kind, unit, buffer), moments in zip(made, times, strict=True)
    ]
    took, least = max(end for _, end in times), stream.limit_s(units, window, update_s)
    fig = figure(
        f"{units} unit{'s take' if units > 1 else ' takes'} {stream.ms(took)}; no order takes less "
        f"than {stream.ms(least)}",
        f"simulated · {host} host · {window} buffer{'s' * (window > 1)} · number: the unit",
        height=270,
        xaxis=mark.time_axis("time (ms)", 1e3 * max(took, least)),
        yaxis=mark.rows_axis([(0, "disk"), (1, "host")], 1.6, -1.0),
    )
    *_, olive, teal = theme.look().series  # reading and writing are the disk's, of no phase
    hues = {"read": olive, "update": theme.colour("optimizer"), "write": teal}
    shown: dict[str, list[tuple]] = {what: [] for what in hues}
    for lane, what, unit, buffer, start, end in rows:
        said = f"{what} unit {unit}, buffer {buffer}: {stream.ms(start)} to {stream.ms(end)}"
        y = ("disk", "host").index(lane)
        shown[what].append((1e3 * start, 1e3 * (end - start), y, 0.8, str(unit), said))
    traces = [mark.boxes(shown[what], mark.look(what, hue)) for what, hue in hues.items()]
    side = (
        {"anchor": "right", "xshift": -4} if least > took / 2 else {"anchor": "left", "xshift": 4}
    )
    named = note("the least possible", 1e3 * least, -0.7, **side)
    fig.draw(traces, [named], [upright(1e3 * least, dash="dash")])
    return fig.explained(
        f"{len(rows)} jobs of {units} units on disk and host",
        ("lane what unit buffer start end", rows),
    )
