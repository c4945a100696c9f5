"""A report as one HTML file that needs nothing else: no server, no network, no kit.

plotly's JavaScript (4.8 MB) is inside, and a content security policy in the page (page.html)
forbids the browser to ask any host for anything. Light or dark follows the reader's system.
Everything that came from outside the kit (names, paths, notes) is escaped.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from paralab.report import metrics, written
from paralab.report.tables import DRY
from paralab.spec.tiers import Offload
from paralab.view import naming, theme

if TYPE_CHECKING:
    from paralab.report.tables import Tables
    from paralab.view.chart import Chart

PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def to_html(
    report: Tables, path: str | os.PathLike[str], *, sections: Sequence[tuple[str, str]] = ()
) -> None:
    """Write one self-contained page. ``sections``: (title, HTML) pairs, shown after the numbers.

    Titles are escaped; the HTML of a section is trusted as it is, so escape what you put into it.
    """
    written.write(path, page(report, sections=sections).encode())


def page(report: Tables, *, sections: Sequence[tuple[str, str]] = ()) -> str:
    """The page as text."""
    from plotly.offline import get_plotlyjs

    figures: dict[str, dict[str, Chart]] = {}
    for name in theme.LOOKS:
        with theme.drawn(name):
            figures[name] = _figures(report)
    title = f"paralab: {naming.subject(report)}"
    drawn = "\n".join(
        f'<section><div id="{name}" class="figure" style="height:{fig.layout.height}px"></div>'
        "</section>"
        for name, fig in figures["light"].items()
    )
    extra = "\n".join(
        f"<section><h2>{html.escape(head)}</h2>\n{body}</section>" for head, body in sections
    )
    data = {
        name: {part: json.loads(fig.to_json()) for part, fig in charts.items()}
        for name, charts in figures.items()
    }
    return PAGE.substitute(
        title=html.escape(title),
        report=html.escape(repr(report)),
        clock=report.clock,
        means=html.escape(naming.CLOCK_MEANS[report.clock]),
        cards=_cards(report),
        extra=extra,
        drawn=drawn,
        numbers=_summary(report),
        described=_described(report),
        plotly=get_plotlyjs(),
        figures=_for_script(data),
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
    """JSON that no text inside it can break out of a script element."""
    dumped = json.dumps(value)  # ASCII only, so U+2028 and its like are escaped too
    for sign in "<>&":
        dumped = dumped.replace(sign, f"\\u{ord(sign):04x}")
    return dumped


def _cards(report: Tables) -> str:
    """The few numbers one looks for first."""
    numbers = metrics.summary(report)["value"]
    if report.clock == DRY:
        cards = [
            (f"{numbers['peak memory']:,.3f} MB", f"at most on rank {report.meta.get('rank')}"),
            (f"{numbers['sent per step']:,.3f} MB", "sent by it per step"),
        ]
    else:
        cards = [(f"{numbers['step time']:.1f} ms", "per step"), *_moved(report, numbers)]
        if report.losses:
            first, last = report.losses[0], report.losses[-1]
            cards.append((f"{first:.3f} → {last:.3f}", "loss, first to last step"))
    shown = "".join(
        f'<div class="card"><b>{html.escape(value if "nan" not in value else "–")}</b>'
        f"<span>{html.escape(name)}</span></div>"
        for value, name in cards
    )
    return f'<div class="cards">{shown}</div>'


def _moved(report: Tables, numbers: Any) -> list[tuple[str, str]]:
    """What is sent and copied, and how much of it is hidden. One device sends nothing: that is
    worth no card.
    """
    copies = report.plan.tiers is not None and len(report.copies)
    cards = []
    if report.world_size > 1 or not copies:
        sent = numbers["sent per rank and step"]
        cards.append((f"{sent:.3f} MB", "sent per rank and step"))
    if copies:
        each = metrics.copied(report, "rank")["bytes"].mean() / 1e6
        cards.append((f"{each:.3f} MB", "copied between tiers, per rank and step"))
    if numbers["communication in flight"] > 0 and numbers["sent per rank and step"]:
        cards.append((f"{numbers['of it hidden behind compute']:.0f} %", "of communication hidden"))
    if (hidden := numbers.get(metrics.COPIES_HIDDEN)) is not None:
        cards.append((f"{hidden:.0f} %", "of copies hidden"))
    return cards


def _summary(report: Tables) -> str:
    cells = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        f'<td class="number">{f"{value:.3f}" if math.isfinite(value) else "–"}</td>'
        f"<td>{html.escape(unit)}</td></tr>"
        for name, value, unit in metrics.summary(report).itertuples()
    )
    return f'<table class="narrow">{cells}</table>'


def _described(report: Tables) -> str:
    model: dict[str, Any] = {}
    if report.model is not None:
        model = {**report.model.to_dict(), "parameters Ψ": f"{report.model.num_params:,}"}
    plan = {
        f.name: getattr(report.plan, f.name)
        for f in fields(report.plan)
        if f.name in ("dp", "microbatches", "microbatch_size", "grad_sync", "precision")
        or getattr(report.plan, f.name) != f.default
    }
    if isinstance(report.plan.offload, Offload):
        places, usual = report.plan.offload.to_dict(), Offload()
        plan["offload"] = {k: v for k, v in places.items() if v != getattr(usual, k)}
    plan["grad_sync"] = report.plan.grad_sync_name
    plan["samples per step"] = report.plan.global_batch
    groups: list[tuple[str, Mapping[str, Any]]] = [("Model", model), ("Plan", plan)]
    if report.model is None:  # a traced function: the plan says no more than how many ranks
        groups = [("Function", {"ranks": report.world_size})]
    if report.cluster is not None:
        groups.append(("Cluster", report.cluster.to_dict()))
    if report.meta:
        groups.append(("Run", report.meta))
    return "\n".join(f"<div><h3>{name}</h3>{_pairs(values)}</div>" for name, values in groups)


def _pairs(values: Mapping[str, Any]) -> str:
    def said(value: Any) -> str:
        value = "none" if value is None else value
        plain = isinstance(value, str)
        return value if plain else json.dumps(value, ensure_ascii=False, default=str)

    rows = "".join(
        f'<tr><th scope="row">{html.escape(str(name))}</th><td>{html.escape(said(value))}</td></tr>'
        for name, value in values.items()
    )
    return f"<table>{rows}</table>"
