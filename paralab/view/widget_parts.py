"""The parts of widgets: knobs, checks before a run, words, HTML tables and messages."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ipywidgets as ipw

from paralab.checks import LEGAL, count_of, illegal
from paralab.instruments.calibrate import device_of_run, memory_bytes
from paralab.report import facts
from paralab.report.amounts import peak
from paralab.report.tables import Tables
from paralab.spec import Cluster, Link
from paralab.view.chart import Chart
from paralab.view.theme import in_bytes, in_seconds, in_speed

MUTED, BAD = "var(--jp-ui-font-color2, #57606A)", "var(--jp-error-color0, #B3261E)"
MOST_RANKS = 8  # real processes of a run; with more, a widget only predicts
LABEL, KNOB = 116, 400  # pixels: width of a knob's label, least width of a knob with its label


# ---- knobs ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Knob:
    """One setting of a widget.

    offers   its values; or {text on the knob: value}, in order
    says     the text for a value: a function, or the noun of what the value counts
    start    the start value, or a function of the widget that returns it; default: the value in the
             plan or the model
    sets     the field of the plan or the model that it sets; default: that of the knob's own name
    link     for a bandwidth: cluster -> the link whose own bandwidth is the start value
    buttons  whether it is a row of buttons, not a slider
    tip      its tooltip
    brief    {value: its text in the widget's repr}, for texts that depend on the machine; or a
             symbol: "dp" gives "dp=2"
    """

    label: str
    offers: Iterable[Any] | Mapping[str, Any]
    says: str | Callable[[Any], str] = str
    start: Any = None
    sets: str = ""
    link: Callable[[Cluster], Link | None] | None = None
    buttons: bool = False
    tip: str = ""
    brief: Mapping[Any, str] | str = field(default_factory=dict)

    def at(self, link: Link) -> Knob:
        """This knob of bandwidths, starting with that of ``link``, without values close to it."""
        bandwidth = link.bandwidth
        return replace(
            self,
            start=bandwidth,
            offers=[b for b in self.offers if not 0.7 < b / bandwidth < 1.4],
            says=lambda b: in_speed(b) + " (own)" * (b == bandwidth),
            tip=f"own: the cluster's; every call also costs {in_seconds(link.alpha)}",
            brief={bandwidth: f"own {self.label.split()[0].replace('host', 'link')}"},
        )

    @property
    def options(self) -> list[tuple[str, Any]]:
        """(text, value) pairs, with the start value among them."""
        if isinstance(self.offers, Mapping):
            return list(self.offers.items())
        return [(self.written(n), n) for n in sorted({*self.offers, self.start})]

    def written(self, n: Any) -> str:
        return self.says(n) if callable(self.says) else count_of(n, self.says, ",")

    def widget(self) -> ipw.SelectionSlider | ipw.ToggleButtons:
        settings = {"options": self.options, "value": self.start, "tooltip": self.tip or None}
        if not self.buttons:
            layout = {"width": "auto", "flex": "1 1 auto"}
            return ipw.SelectionSlider(**settings, continuous_update=True, layout=layout)
        style = {"button_width": "auto"}
        return ipw.ToggleButtons(**settings, layout={"width": "100%"}, style=style)

    def check(self, name: str, value: Any) -> Any:
        """The knob's option that equals ``value``. Raises ``ValueError`` if there is none."""
        values = [option for _, option in self.options]
        if value not in values:
            legal = ", ".join(map(str, values))
            raise illegal(name, value, "the knob does not offer this value", legal)
        return values[values.index(value)]

    def repr(self, value: Any) -> str:
        if isinstance(self.brief, str):
            return f"{self.brief}={value}"
        words = next(words for words, option in self.options if option == value)
        return self.brief.get(value, words)

    def row(self, widget: ipw.Widget) -> ipw.HBox:
        """The ipywidget with its label before it; buttons may need two lines."""
        name = ipw.Label(self.label, layout={"width": f"{LABEL}px", "flex": "0 0 auto"})
        return ipw.HBox([name, widget], layout={"align_items": "center", "min_height": "34px"})


slider = Knob  # the name for knobs without buttons


def buttons(label: str, offers: Mapping[str, Any] | Iterable[str], **more: Any) -> Knob:
    """A knob that is a row of buttons; a name without a value is its own value."""
    named = offers if isinstance(offers, Mapping) else {name: name for name in offers}
    return Knob(label, named, buttons=True, **more)


def links_of(cluster: Cluster) -> Link:
    return cluster.collectives.get("all_reduce", cluster.intra)


def cluster_of(link: Link) -> Cluster:
    """Devices for a replay of which only the link matters."""
    return Cluster(devices_per_node=64, flops=1e12, memory_bandwidth=1e12, intra=link)


# ---- what a run of a widget needs ----------------------------------------------------------------
def this_machine(ranks: int) -> Cluster:
    """This machine as `pl.run` would use it for so many ranks: its GPUs if there are enough."""
    return Cluster.local(device=device_of_run(ranks))


def is_local(cluster: Cluster) -> bool:
    """Whether a cluster is a machine like this one, on which a plan can run: its ranks share the
    cores of processors, or it is the GPUs of `this_machine`.
    """
    return cluster.cores is not None or cluster.name == "local GPUs"


def no_room(report: Tables, machine: Cluster, steps: int, longest: float) -> str:
    """Why a run of so many predicted steps does not fit on a machine, as a sentence; "" if it does.

    longest   the limit for its seconds
    """
    ranks = report.world_size
    held = (peak(report, tier=tier) for tier in ("device", "host"))
    need, waits, room = sum(one.total for one in held if one is not None), 1.0, machine.memory
    if machine.cores is not None:  # ranks on processors share one memory, and the cores
        need, waits = ranks * need, max(1.0, ranks / machine.cores)
        room = min(room, memory_bytes())  # a cluster need not state its memory
    least = "a smaller model or batch would"
    if need > room // 2:
        half = f"may take half of this machine's {in_bytes(room)}"
        return f"“Run it” would need {in_bytes(need)}, and {half}: {least} fit"
    seconds = steps * report.step_time * waits
    if seconds > longest:
        return f"“Run it” would take about {duration(seconds)} here: {least} take less"
    return ""


# ---- words ---------------------------------------------------------------------------------------
def processes(n: int) -> str:
    return count_of(n, "real process")


def duration(seconds: float) -> str:
    """ "12 ms", "3 h", "40 years"."""
    for unit, size in (("years", 31_557_600), ("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return in_seconds(seconds)


def clock_name(report: Tables) -> str:
    """The report's clock, with the numbers of ranks and cores if ranks shared cores."""
    ranks, cores = facts.shared_cores(report)
    shared = f" ({ranks} ranks on {count_of(cores, 'core')})" if cores else ""
    return report.clock + shared


def counted(chart: Chart, shown: int, ranks: int) -> Chart:
    """The chart; if it does not show all ranks, its title says how many it shows."""
    return chart.said_below(f"{shown} of {ranks} ranks drawn") if ranks > shown else chart


# ---- HTML ----------------------------------------------------------------------------------------
def grid(children: Sequence[ipw.Widget], least: str, gap: str, width: str) -> ipw.GridBox:
    """A grid with as many columns of at least the width ``least`` as the page has room for."""
    columns = f"repeat(auto-fit, minmax({least}, 1fr))"
    layout = {"grid_gap": gap, "max_width": width, "grid_template_columns": columns}
    return ipw.GridBox(children, layout=layout)


def table(rows: Sequence[dict[str, str]]) -> str:
    """The rows as an HTML table; the first column is bold, its keys are the headings."""
    cell, lines = "padding:2px 18px 2px 0;text-align:left;vertical-align:bottom", ""
    for tag, style, row in [("th", f"font-weight:normal;color:{MUTED}", list(rows[0]))] + [
        ("td", "white-space:nowrap", list(row.values())) for row in rows
    ]:
        cells = [f'<{tag} style="{cell};{style}">{html.escape(text)}</{tag}>' for text in row]
        if tag == "td":
            cells[0] = cells[0].replace(style, "font-weight:600")
        lines += f"<tr>{''.join(cells)}</tr>"
    shown = f'<table style="border-collapse:collapse;line-height:1.5">{lines}</table>'
    # As wide as the page whatever it contains: a wider table is scrolled in its place.
    return f'<div style="overflow-x:auto;width:0;min-width:100%">{shown}</div>'


def noted(*lines: str) -> str:
    """Lines of HTML with a coloured mark at their side, for what the reader has to know."""
    style = f"border-left:4px solid {BAD};padding:4px 10px;line-height:1.5"
    return f'<div style="{style}">{"<br>".join(lines)}</div>' if lines else ""


def trouble(error: BaseException) -> str:
    """An error as HTML: its first line, and the rest (a rank's traceback) in a part that opens."""
    first, _, rest = str(error).partition("\n")
    shown = f"<b>{type(error).__name__}</b>: {html.escape(first)}"
    if rest.strip():
        style = '<pre style="line-height:1.3;overflow:auto">'
        shown += f"<details><summary>full message</summary>{style}{html.escape(rest.strip())}</pre>"
        shown += "</details>"
    return noted(shown)


def impossible(error: BaseException) -> str:
    """A refusal as HTML: the setting, why it is impossible, and what would work."""
    asked, why, legal = map(html.escape, refusal(error))
    if not legal:  # an error of the user's own code has another form
        return trouble(error)
    return noted(f"<b>{asked}</b> is impossible: {why}.", f"What would work: {legal}.")


def refusal(error: BaseException) -> tuple[str, str, str]:
    """The parts of an error made by `illegal`: the setting, why it is refused, what would work."""
    refused, _, legal = str(error).partition(LEGAL)
    asked, _, why = refused.partition(": ")
    return asked, why, legal.replace(", ...", " and so on")
