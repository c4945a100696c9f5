"""A report as one HTML file that needs nothing else: no server, no network, no kit.

plotly's JavaScript (4.8 MB) is inside, and a content security policy in the page forbids the
browser to ask any host for anything. Light or dark follows the reader's system. Everything that
came from outside the kit (names, paths, notes) is escaped.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from paralab.report import metrics, written
from paralab.report.tables import DRY
from paralab.spec.tiers import Offload
from paralab.view import naming, theme

if TYPE_CHECKING:
    from paralab.report.tables import Tables
    from paralab.view.chart import Chart

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)

STYLE = """
:root { color-scheme: light dark; --page: #f6f8fa; --card: #fff; --ink: #24292f; --faint: #57606a;
  --line: #e5e8eb; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --card: #161b22; --ink: #e6edf3;
  --faint: #9aa4ae; --line: #30363d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 16px/1.5 Inter, "Open Sans", "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 28px; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 0 0 12px; }
h3 { font-size: 15px; margin: 0 0 6px; }
.lead { color: var(--faint); margin: 4px 0 20px; }
.lead code { color: var(--ink); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 20px; margin: 0 0 20px; overflow-x: auto; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px;
  margin: 0 0 20px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 18px; }
.card b { display: block; font-size: 25px; font-variant-numeric: tabular-nums; line-height: 1.25; }
.card span { color: var(--faint); font-size: 14px; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 24px; }
table { border-collapse: collapse; font-size: 14px; width: 100%; }
.figure { min-width: 800px; }
table.narrow { max-width: 520px; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line);
  font-weight: 400; vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--faint); white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 0.92em; }
footer { color: var(--faint); font-size: 14px; }
"""

# Every figure is there twice, as theme.py draws it by day and by night; the paper is the page's.
SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
function look(layout) {
  return {...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)"};
}
function draw() {
  const now = FIGURES[dark.matches ? "dark" : "light"];
  for (const [id, figure] of Object.entries(now)) {
    const config = {responsive: true, displayModeBar: false};
    Plotly.react(id, structuredClone(figure.data), look(structuredClone(figure.layout)), config);
  }
}
dark.addEventListener("change", draw);
draw();
"""


def to_html(
    report: Tables, path: str | os.PathLike[str], *, sections: Sequence[tuple[str, str]] = ()
) -> None:
    """Write the page. ``sections``: (title, HTML) pairs, shown after the numbers.

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
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{html.escape(title)}</h1>
<p class="lead"><code>{html.escape(repr(report))}</code><br>
Times are on the <b>{report.clock}</b> clock: {html.escape(naming.CLOCK_MEANS[report.clock])}.</p>
{_cards(report)}
{extra}
{drawn}
<section><h2>The numbers</h2>
{_summary(report)}</section>
<section><h2>What was run</h2>
<div class="columns">
{_described(report)}
</div></section>
<footer>Drag over a figure to zoom in, double-click to come back, point at a box for its
numbers. Step 0 is warm-up and left out of times and bytes. 1 MB = 10<sup>6</sup> bytes.</footer>
</main>
<script>{get_plotlyjs()}</script>
<script>const FIGURES = {_for_script(data)};{SCRIPT}</script>
</body>
</html>
"""


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
        return _shown_as_cards(
            [
                (f"{numbers['peak memory']:,.3f} MB", f"at most on rank {report.meta.get('rank')}"),
                (f"{numbers['sent per step']:,.3f} MB", "sent by it per step"),
            ]
        )
    cards = [
        (f"{numbers['step time']:.1f} ms", "per step"),
        (f"{numbers['sent per rank and step']:.3f} MB", "sent per rank and step"),
    ]
    if report.plan.tiers is not None and len(report.copies):
        each = metrics.copied(report, "rank")["bytes"].mean() / 1e6
        copied = (f"{each:.3f} MB", "copied between tiers, per rank and step")
        # One device sends nothing: that is worth no card.
        cards[1:] = [copied] if report.world_size == 1 else [cards[1], copied]
    if numbers["communication in flight"] > 0 and numbers["sent per rank and step"]:
        cards.append((f"{numbers['of it hidden behind compute']:.0f} %", "of communication hidden"))
    if (hidden := numbers.get(metrics.COPIES_HIDDEN)) is not None:
        cards.append((f"{hidden:.0f} %", "of copies hidden"))
    if report.losses:
        cards.append(
            (f"{report.losses[0]:.3f} → {report.losses[-1]:.3f}", "loss, first to last step")
        )
    return _shown_as_cards(cards)


def _shown_as_cards(cards: Sequence[tuple[str, str]]) -> str:
    shown = "".join(
        f'<div class="card"><b>{html.escape(value if "nan" not in value else "–")}</b>'
        f"<span>{html.escape(name)}</span></div>"
        for value, name in cards
    )
    return f'<div class="cards">{shown}</div>'


def _summary(report: Tables) -> str:
    rows = [(name, row["value"], row["unit"]) for name, row in metrics.summary(report).iterrows()]
    cells = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        f'<td class="number">{f"{value:.3f}" if math.isfinite(value) else "–"}</td>'
        f"<td>{html.escape(unit)}</td></tr>"
        for name, value, unit in rows
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
        plan["offload"] = {
            name: value
            for name, value in report.plan.offload.to_dict().items()
            if value != getattr(Offload(), name)
        }
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
        if value is None:
            return "none"
        return (
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        )

    rows = "".join(
        f'<tr><th scope="row">{html.escape(str(name))}</th><td>{html.escape(said(value))}</td></tr>'
        for name, value in values.items()
    )
    return f"<table>{rows}</table>"
