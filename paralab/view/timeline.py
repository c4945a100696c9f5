"""The timeline: one step, every rank, every span. Compute on top, communication beneath.

Reading it: a coloured box is work; a hatched grey one is a rank that waits for a collective to
end. Communication under a coloured box is hidden; communication over a hatched box is what
the step paid for. Where something was offloaded, links between memory tiers are beneath, and what
the host's CPU does. Several reports stand under one another on one time scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.checks import illegal
from paralab.report import about, metrics
from paralab.report.tables import Tables
from paralab.view import boxes, naming, theme
from paralab.view.boxes import Section
from paralab.view.chart import Chart
from paralab.view.pipeline import pipeline_timeline
from paralab.view.pipeline import section as pipeline_section
from paralab.view.timeline_rows import drawn

MAX_RANKS = 12  # rows of ranks that several reports show together before some are left out
SAME = 0.02  # durations closer than this share are called equal


def timeline(
    report: Tables,
    *,
    step: int | None = None,
    ranks: Sequence[int] | None = None,
    ideal: bool | None = None,
) -> Chart:
    """One bar per span of ``step`` (default: of median duration) on ``ranks`` (default: all).

    ideal   of a pipeline: its schedule with free links above, what the report has beneath. Default:
            where there is room for both

    Milliseconds from the step's start. Raises ValueError if the report has no such step or rank, or
    no ideal.
    """
    if ideal not in (None, True, False):
        raise illegal("ideal", ideal, "neither yes nor no", "True | False | None")
    if report.plan.pp > 1:
        return pipeline_timeline(report, step=step, ranks=ranks, ideal=ideal)
    if ideal:
        raise illegal("ideal", ideal, "one stage has no schedule to idealise", "None, or pp > 1")
    one = boxes.section(report, step=step, ranks=ranks)
    several = report.steps["step"].nunique() > 1  # of a program that was observed
    said = [f"step {one.step}"] if several or report.model is not None else []
    said.append(f"{one.duration * 1e3:.1f} ms")
    if report.plan.tiers is not None:  # no room for it in the first line
        said.append(f"waiting: {of_step(report, one.step, 'wait')}")
    what = " of the typical step" if step is None else f" of step {step}"
    own = sum(b["step"] == one.step for b in one.boxes)  # of others there are more or fewer
    what *= report.model is not None
    on = f"{len(one.ranks)} rank{'s' * (len(one.ranks) > 1)}"
    summary = f"timeline of {naming.subject(report)}, {report.clock}: {own} boxes{what} on {on}"
    return drawn([one], finding(one), said, summary)


def timelines(
    *reports: Tables,
    labels: Sequence[str] | None = None,
    step: int | None = None,
    ranks: Sequence[int] | None = None,
    title: str | None = None,
) -> Chart:
    """Several reports under one another on one time scale: who is faster, and where.

    labels  what to call each; by default what tells them apart (clock, plan or both)
    step    default: of each report the step of median duration
    ranks   default: all, or as many of the first as leave the picture readable
    title   in place of the finding, by how much the slowest takes longer than the fastest

    Raises ValueError without reports, on a report without that step or rank, or if there are not as
    many labels as reports.
    """
    _check(reports, labels)
    names = [str(label) for label in labels] if labels is not None else naming.apart(reports)
    known = [about.reported_ranks(report) for report in reports]
    most = max(1, MAX_RANKS // len(reports))
    sections = [
        (boxes.section if report.plan.pp == 1 else pipeline_section)(
            report, label=name, step=step, ranks=mine[:most] if ranks is None else ranks
        )
        for report, name, mine in zip(reports, names, known, strict=True)
    ]
    said = [theme.text(", ".join(naming.common([naming.subject(r) for r in reports])))]
    said *= any(report.plan.pp > 1 for report in reports) and bool(said[0])
    if ranks is None and any(len(mine) > most for mine in known):
        said.append(f"the first {most} rank{'s' * (most != 1)} of each; choose ranks=")
    clocks = ", ".join(dict.fromkeys(report.clock for report in reports))
    summary = f"timelines of {len(reports)} reports: {' | '.join(names)} ({clocks}): "
    summary += f"{sum(len(one.boxes) for one in sections)} boxes"
    return drawn(sections, _verdict(sections), said, summary).titled(title)


def _check(reports: Sequence[Any], labels: Sequence[str] | None) -> None:
    if not reports:
        raise illegal("reports", reports, "nothing to draw", "one report or several")
    for report in reports:
        if not hasattr(report, "spans"):
            raise illegal("reports", report, "not a report", "what pl.run or pl.predict returns")
    if labels is not None and len(labels) != len(reports):
        raise illegal("labels", labels, f"there are {len(reports)} reports", "one label for each")


# ---- the finding ---------------------------------------------------------------------------------
def finding(one: Section) -> str:
    """The one sentence that the picture of one report proves."""
    report, step = one.report, one.step
    part, name = metrics.shares(report, step), theme.text(naming.subject(report))
    if one.duration <= 0:
        return name
    if report.model is None:
        return f"{name}: {_sent(report, step)}"
    hidden = []
    copied = metrics.copy_shares(report, step) if report.plan.tiers is not None else {"copies": 0}
    if part["communication"] > 0 and (report.world_size > 1 or not copied["copies"]):
        hidden.append(f"{theme.percent(part['hidden'] / part['communication'])} of communication")
    if copied["copies"]:
        hidden.append(f"{theme.percent(copied['hidden'] / copied['copies'])} of copies")
    if hidden:
        verb = "are" if copied["copies"] else "is"
        waiting = f", ranks wait {of_step(report, step, 'wait')}" * (not copied["copies"])
        return f"{name}: {' and '.join(hidden)} {verb} hidden{waiting}"
    return (
        f"{name}: {theme.percent(part['work'] / one.duration)} of the step is forward and backward"
    )


def _sent(report: Tables, step: int) -> str:
    """What the rank that sends most sends in this step, and in how many calls."""
    calls = about.own_calls(report).query("step == @step and wire_bytes > 0")
    if calls.empty:
        return "no rank sends anything"
    sent = calls.groupby("rank")["wire_bytes"].sum()
    most = sent.idxmax()
    own = calls[calls["rank"] == most]
    count = len(own[["axis", "ranks", "call"]].drop_duplicates())
    said = f"{theme.scaled(float(sent[most]), 'B')} in {count} call{'s' * (count != 1)}"
    if len(sent) == report.world_size and sent.nunique() == 1:
        return f"each rank sends {said}"
    return f"rank {most} sends {said}, and no rank sends more"


def of_step(report: Tables, step: int, part: str) -> str:
    """ "31 % of the step": a part of it, mean over ranks."""
    seconds = metrics.step_durations(report, warmup=True)[step] or 1.0
    return f"{theme.percent(metrics.shares(report, step)[part] / seconds)} of the step"


def _verdict(sections: list[Section]) -> str:
    """Who is faster, by how much; of one run on several clocks, what each clock reads."""
    subjects = {naming.subject(one.report) for one in sections}
    clocks = [one.report.clock for one in sections]
    if len(sections) == 1:
        return finding(sections[0])
    if len(subjects) == 1 and len(set(clocks)) == len(sections):
        read = ", ".join(f"{one.duration * 1e3:.1f} ms {one.report.clock}" for one in sections)
        return f"{theme.text(subjects.pop())}: {read}{_gap(sections)}"
    fast = min(sections, key=lambda one: one.duration)
    slow = max(sections, key=lambda one: one.duration)
    if fast.duration <= 0 or slow.duration / fast.duration - 1 < SAME:
        return f"All take the same time, to {theme.percent(SAME)}: {fast.duration * 1e3:.1f} ms"
    said = [f"{theme.text(one.label)} takes {one.duration * 1e3:.1f} ms" for one in (fast, slow)]
    return f"{', '.join(said)}, {slow.duration / fast.duration:.2f} times as long"


def _gap(sections: list[Section]) -> str:
    """Of a prediction and one other clock: by how much it is off."""
    by_clock = {one.report.clock: one.duration for one in sections}
    expect = by_clock.pop("predicted", None)
    if expect is None or len(by_clock) != 1 or not (real := next(iter(by_clock.values()))):
        return ""
    apart = gap(expect, real) or "equal"
    return f" (prediction {apart}{' that' * apart.endswith('times')})"


def gap(expect: float, real: float) -> str:
    """How far a prediction is off: "10 % below", "2.5 times"; "" where that rounds to 0 %."""
    if not 0.5 <= expect / real <= 2:
        return f"{expect / real:.2g} times"
    off = theme.percent(abs(expect / real - 1))
    return "" if off == theme.percent(0) else f"{off} {'above' if expect > real else 'below'}"
