"""The timeline: one step, every rank, every span. Compute on top, communication beneath.

How to read it: a coloured box is work; in a hatched grey box a rank waits for communication or a
copy to end. Communication under a coloured box is hidden; under a hatched one it costs time.
"""

from __future__ import annotations

from collections.abc import Sequence

from paralab.checks import count_of, illegal
from paralab.report import facts
from paralab.report.tables import Tables
from paralab.view import boxes, naming, theme
from paralab.view.boxes import Section
from paralab.view.chart import Chart
from paralab.view.pipeline import pipeline_timeline
from paralab.view.pipeline import section as pipeline_section
from paralab.view.timeline_rows import drawn

MAX_RANKS = 12  # of several reports together: beyond that, each shows only its first ranks
SAME = 0.02  # durations closer than this share are called equal


def timeline(
    report: Tables,
    *,
    step: int | None = None,
    ranks: Sequence[int] | None = None,
    ideal: bool = True,
) -> Chart:
    """One box per span of ``step`` (default: of median duration) on ``ranks`` (default: all).

    ideal   for a pipeline: whether its schedule with free links is drawn above, if there is room
            for both

    The axis has milliseconds from the step's start. Raises ValueError if the report has no such
    step or rank.
    """
    if report.plan.pp > 1:
        return pipeline_timeline(report, step=step, ranks=ranks, ideal=ideal)
    section = boxes.section(report, step=step, ranks=ranks)
    several = report.steps["step"].nunique() > 1  # true of an observed program, not of a function
    remarks = [f"step {section.step}"] if several or report.model is not None else []
    remarks.append(f"{section.duration * 1e3:.1f} ms")
    if report.plan.tiers is not None:  # the first line has no room for it, see `finding`
        remarks.append(f"waiting: {section.share('wait')}")
    return drawn([section], finding(section), remarks)


def timelines(
    *reports: Tables,
    labels: Sequence[str] | None = None,
    step: int | None = None,
    ranks: Sequence[int] | None = None,
    title: str | None = None,
) -> Chart:
    """Several reports under one another on one time scale: which is faster, and where.

    labels  names of the reports; default: what tells them apart (clock, plan or both)
    step    default: the step of median duration of each report
    ranks   default: all, or as many of the first ones as the picture has room for
    title   replaces the finding, which compares the slowest with the fastest

    Raises ValueError without reports, on a report without that step or rank, or if there are not as
    many labels as reports.
    """
    if not reports:
        raise illegal("reports", reports, "nothing to draw", "one report or several")
    for report in reports:
        facts.needs_tables(report, "reports")
    names = naming.apart(reports) if labels is None else naming.given(labels, reports, "reports")
    ranks_of = [facts.reported_ranks(report) for report in reports]
    most = max(1, MAX_RANKS // len(reports))
    sections = [
        (boxes.section if report.plan.pp == 1 else pipeline_section)(
            report, label=name, step=step, ranks=ranks_there[:most] if ranks is None else ranks
        )
        for report, name, ranks_there in zip(reports, names, ranks_of, strict=True)
    ]
    remarks = [theme.text(", ".join(naming.common([naming.subject(r) for r in reports])))]
    remarks *= any(report.plan.pp > 1 for report in reports) and bool(remarks[0])
    if ranks is None and any(len(ranks_there) > most for ranks_there in ranks_of):
        remarks.append(f"the first {count_of(most, 'rank')} of each; ranks= selects others")
    return drawn(sections, _verdict(sections), remarks).titled(title)


# ---- the finding ---------------------------------------------------------------------------------
def finding(section: Section) -> str:
    """What the picture of one report proves, in one sentence."""
    report, step = section.report, section.step
    name = theme.text(naming.subject(report))
    if report.model is None:
        return f"{name}: {_sent(report, step)}"
    shares, hidden = section.shares, []
    copies = shares["copies"] if report.plan.tiers is not None else 0
    if shares["communication"] > 0 and (report.world_size > 1 or not copies):
        share = shares["hidden"] / shares["communication"]
        hidden.append(f"{theme.share(share)} of communication")
    if copies:
        hidden.append(f"{theme.share(shares['copies hidden'] / copies)} of copies")
    if hidden:
        verb = "are" if copies else "is"
        waiting = f", and ranks wait for {section.share('wait')}" * (not copies)
        return f"{name}: {' and '.join(hidden)} {verb} hidden{waiting}"
    return f"{name}: forward and backward take {section.share('work')}"


def _sent(report: Tables, step: int) -> str:
    """What the rank that sends the most bytes in this step sends, and in how many calls."""
    calls = facts.own_calls(report).query("step == @step and wire_bytes > 0")
    if calls.empty:
        return "no rank sends anything" + f" in step {step}" * (len(facts.own_calls(report)) > 0)
    sent = calls.groupby("rank")["wire_bytes"].sum()
    most = sent.idxmax()
    own_calls = calls[calls["rank"] == most]
    count = len(own_calls[["axis", "ranks", "call"]].drop_duplicates())
    amount = f"{theme.in_bytes(float(sent[most]))} in {count_of(count, 'call')}"
    if len(sent) == report.world_size and sent.nunique() == 1:
        return f"each rank sends {amount}"
    return f"rank {most} sends {amount}, and no rank sends more"


def _verdict(sections: list[Section]) -> str:
    """Which report is faster, by how much; for one plan on several clocks, the time on each."""
    subjects = {naming.subject(section.report) for section in sections}
    clocks = [section.report.clock for section in sections]
    if len(sections) == 1:
        return finding(sections[0])
    one_plan = len(subjects) == 1 and not any(naming.settings_apart([s.report for s in sections]))
    if one_plan and len(set(clocks)) == len(sections):
        read = ", ".join(f"{s.duration * 1e3:.1f} ms {s.report.clock}" for s in sections)
        return f"{theme.text(subjects.pop())}: {read}{_gap(sections)}"
    fast = min(sections, key=lambda section: section.duration)
    slow = max(sections, key=lambda section: section.duration)
    if slow.duration / fast.duration - 1 < SAME:
        return f"All take the same time within {theme.percent(SAME)}: {fast.duration * 1e3:.1f} ms"
    times = [f"{theme.text(s.label)} takes {s.duration * 1e3:.1f} ms" for s in (fast, slow)]
    return f"{'; '.join(times)}, {slow.duration / fast.duration:.2f} times as long"


def _gap(sections: list[Section]) -> str:
    """How far a prediction is off, if there are a prediction and one other clock; else ""."""
    by_clock = {section.report.clock: section.duration for section in sections}
    predicted = by_clock.pop("predicted", None)
    if predicted is None or len(by_clock) != 1 or not (other := next(iter(by_clock.values()))):
        return ""
    apart = gap(predicted, other)
    return f" (the prediction is {apart}{' that' * apart.endswith(('times', 'of'))})"


def gap(predicted: float, actual: float) -> str:
    """How far a prediction is off: "10 % below", "2.5 times", "within 1 % of"."""
    if not 0.5 <= predicted / actual <= 2:
        return f"{predicted / actual:.2g} times"
    off = theme.percent(abs(predicted / actual - 1))
    way = "above" if predicted > actual else "below"
    return "within 1 % of" if off == theme.percent(0) else f"{off} {way}"
