"""A report as one HTML file that needs nothing else: no server, no network, not this library.

The file contains plotly's JavaScript (4.8 MB), and a content security policy (page.html) forbids
the browser to contact any host. Light or dark follows the reader's system. All text that comes from
outside the library (names, paths, notes) is escaped.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from paralab.report import facts, output_files
from paralab.report.summary import readable, summary
from paralab.report.tables import DRY
from paralab.spec.tiers import Offload
from paralab.view import naming, theme

if TYPE_CHECKING:
    from paralab.report.tables import Tables
    from paralab.view.chart import Chart

ALWAYS = ("dp", "microbatches", "microbatch_size", "precision", "grad_sync")  # told of a plan
PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def to_html(
    report: Tables, path: str | os.PathLike[str], *, sections: Sequence[tuple[str, str]] = ()
) -> None:
    """Write one self-contained page. ``sections``: (title, HTML) pairs, shown after the numbers.

    Titles are escaped; the HTML of a section is trusted as it is, so escape what you put into it.
    """
    output_files.write(path, page(report, sections=sections).encode())


def page(report: Tables, *, sections: Sequence[tuple[str, str]] = ()) -> str:
    """The page as text."""
    from plotly.offline import get_plotlyjs

    figures: dict[str, dict[str, Any]] = {}
    for look in theme.LOOKS:
        with theme.drawn(look):
            charts = _figures(report)
        figures[look] = {name: json.loads(chart.to_json()) for name, chart in charts.items()}
    title = f"paralab: {naming.subject(report)}"
    panels = "\n".join(
        f'<section><div id="{name}" class="figure" style="height:{chart.layout.height}px">'
        "</div></section>"
        for name, chart in charts.items()
    )
    extra = "\n".join(
        f"<section><h2>{html.escape(head)}</h2>\n{body}</section>" for head, body in sections
    )
    numbers = summary(report)
    numbers["value"] = numbers["value"].map(readable)
    return PAGE.substitute(
        title=html.escape(title),
        report=html.escape(repr(report)),
        clock=report.clock,
        means=html.escape(naming.CLOCK_MEANS[report.clock]),
        extra=extra,
        drawn=panels,
        numbers=numbers.to_html(header=False, index_names=False, border=0, classes="narrow"),
        described=_descriptions(report),
        plotly=get_plotlyjs(),
        figures=_for_script(figures),
    )


def _figures(report: Tables) -> dict[str, Chart]:
    from paralab.view.loss import loss_chart
    from paralab.view.memory_chart import memory_chart
    from paralab.view.timeline import timeline
    from paralab.view.traffic import traffic_chart

    charts: dict[str, Chart] = {}
    if len(report.steps) and report.clock != DRY:
        charts["timeline"] = timeline(report)
    charts["traffic"] = traffic_chart(report)
    if (report.memory["tier"] == "device").any():
        charts["memory"] = memory_chart(report)
    if report.losses:
        charts["loss"] = loss_chart(report)
    return charts


def _for_script(value: Any) -> str:
    """The value as JSON in which no text can end the script element that contains it."""
    dumped = json.dumps(value)  # ASCII only, so U+2028 and the like are escaped too
    for sign in "<>&":
        dumped = dumped.replace(sign, f"\\u{ord(sign):04x}")
    return dumped


def _descriptions(report: Tables) -> str:
    told = {*ALWAYS, *report.plan.changed()}
    plan = {name: value for name, value in report.plan.to_dict().items() if name in told}
    if isinstance(report.plan.offload, Offload):
        plan["offload"] = report.plan.offload.changed()
    plan["grad_sync"] = report.plan.grad_sync_name
    plan["samples per step"] = report.plan.global_batch
    groups: dict[str, Any] = {"Function": {"ranks": report.world_size}}
    if report.model is not None:  # a traced function's plan only has the number of ranks
        psi = facts.num_params(report)
        size = {"parameters Ψ": f"{psi:,}"} if psi else {}
        groups = {"Model": report.model.to_dict() | size, "Plan": plan}
    run = {name: value for name, value in report.meta.items() if name != "observed"}  # pages of it
    groups |= {"Cluster": report.cluster and report.cluster.to_dict(), "Run": run}
    return "\n".join(
        f"<div><h3>{name}</h3>{_pairs_table(values)}</div>"
        for name, values in groups.items()
        if values
    )


def _pairs_table(values: Mapping[str, Any]) -> str:
    import pandas as pd

    def said(value: Any) -> str:
        if isinstance(value, str):
            return value
        return "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)

    rows = pd.Series({str(name): said(value) for name, value in values.items()}, dtype=str)
    with pd.option_context("display.max_colwidth", None):
        return rows.to_frame().to_html(header=False, border=0)
