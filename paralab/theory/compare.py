"""`pl.compare`: the same quantities predicted, replayed and measured, and a sentence on each gap.

    predicted  by the device model and the link model
    replayed   the compute costs that the run recorded, with the prediction's links and one virtual
               device per rank (replay.py)
    measured   by the wall clock

Bytes and calls are counted, so they agree exactly or something is wrong. The gap between predicted
and replayed is the error of the device model. The gap between replayed and measured comes from what
the ranks share; gaps.py writes a sentence on each.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from paralab.checks import count_of, illegal, instance
from paralab.report import amounts, facts, metrics
from paralab.report.facts import device_of, needs_own_devices, needs_times
from paralab.report.tables import Tables
from paralab.theory.gaps import EXPOSED_COPIES, MOVED, WAITED, notes_on
from paralab.theory.replay import replay
from paralab.view.naming import cluster_name, plan_name
from paralab.view.theme import percent

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("predicted", "replayed", "measured")
CALLS = "calls and messages"
UNITS = {"bytes sent per rank": "B", CALLS: "calls", MOVED: "B", "bubble": "share"}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Comparison:
    """What `compare` returns; prints as a table, with a sentence on each gap.

    table        DataFrame with a row per quantity, of one step: columns predicted, replayed and
                 measured (seconds, bytes or calls; NaN without such a report), and unit. For a
                 pipeline it has the bubble too, a share of device time
    notes        {quantity: what its gap means}
    bytes_agree  whether run and prediction have the same calls and copies, to the byte; for an
                 observed program, whether each rank sends the same sum of bytes
    expect, replayed, measured  the reports that were compared; ``measured`` is None if ``report``
                 was a replay
    """

    expect: Tables
    replayed: Tables
    measured: Tables | None
    table: pd.DataFrame
    notes: dict[str, str] = field(default_factory=dict)
    bytes_agree: bool

    def __repr__(self) -> str:
        # Without times, so that it is the same for every run: notebooks store this line.
        columns = " | ".join(c for c in COLUMNS if c != "measured" or self.measured is not None)
        verdict = "agree" if self.bytes_agree else "DIFFER"
        return f"Comparison({plan_name(self.expect.plan)}: {columns}, bytes {verdict})"

    def __str__(self) -> str:
        rows = [("per step", *COLUMNS), *self._rows()]
        first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "   ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in rows
        ]
        lines.insert(1, "-" * len(lines[0]))
        for name, note in self.notes.items():
            lines += ["", *textwrap.wrap(f"{name}: {note}", 100, subsequent_indent="  ")]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, ...]]:
        rows = self.table.iterrows()
        return [(str(n), *(_shown(row[c], row["unit"]) for c in COLUMNS)) for n, row in rows]

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{c}</th>" for c in ("per step", *COLUMNS, "what the gap means"))
        number, text = 'style="text-align:right;white-space:nowrap"', 'style="text-align:left"'
        body = []
        for name, *row in self._rows():
            cells = "".join(f"<td {number}>{cell}</td>" for cell in row)
            label, note = html.escape(name), html.escape(self.notes.get(name, ""))
            body.append(f"<tr><th {text}>{label}</th>{cells}<td {text}>{note}</td></tr>")
        where = cluster_name(self.expect.cluster)
        caption = html.escape(f"{plan_name(self.expect.plan)} on {where}")
        return (
            f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table>"
        )


def compare(expect: Tables, report: Tables) -> Comparison:
    """Compare a prediction with a run of the same model and plan.

    expect  what `pl.predict` returned
    report  what `pl.run` returned, or a replay of that; or what `pl.observe` returned for a program
            that trains the predicted model under the predicted plan. The two may be swapped

    The run is replayed with the links of the prediction's cluster, so that prediction and replay
    differ in compute costs alone. An observed program may make other calls than the library's, so
    only the sum of its bytes is compared, for each rank. Returns a `Comparison`. Raises ValueError
    naming the first difference if the two are not of the same model, plan, optimizer and number of
    ranks, or if a run on GPUs is compared with a prediction for processors.
    """
    expect, report = _prediction_and_run(expect, report)
    if report.model is None and "observed" in report.meta:
        report = replace(report, model=expect.model, plan=expect.plan)
    _same_subject(expect, report)
    measured = report if report.clock == "measured" else None
    replayed = replay(report, expect.cluster) if measured is not None else report
    columns = {
        "predicted": _quantities(expect),
        "replayed": _quantities(replayed),
        "measured": _quantities(report) if measured is not None else {},
    }
    import pandas as pd

    reports, pipeline = (expect, report), expect.plan.pp > 1
    split = any((each.spans["kind"] == "weight_grad").any() for each in reports)
    copies = any(len(each.copies) for each in reports)
    applies = {"weight halves": pipeline and split, "bubble": pipeline}
    applies |= dict.fromkeys((MOVED, WAITED, EXPOSED_COPIES), copies)
    names = [name for name in columns["predicted"] if applies.get(name, True)]
    table = pd.DataFrame(columns, index=pd.Index(names, name="quantity"), dtype=float)
    table["unit"] = [UNITS.get(name, "s") for name in names]
    difference = _first_traffic_difference(expect, report)
    return Comparison(
        expect=expect,
        replayed=replayed,
        measured=measured,
        table=table,
        notes=notes_on(table, expect, replayed, report, difference),
        bytes_agree=not difference,
    )


def _prediction_and_run(a: Any, b: Any) -> tuple[Tables, Tables]:
    """The two reports, also those that blocks hold, the prediction first; or ``ValueError``."""
    a, b = (r if isinstance(r := getattr(x, "report", x), Tables) else x for x in (a, b))
    for name, value in (("expect", a), ("report", b)):
        instance(name, value, Tables, "what pl.predict and pl.run return", "report")
        needs_times(value, "a comparison")
        needs_own_devices(value, "a comparison")
    if a.clock != "predicted":
        a, b = b, a
    if a.clock != "predicted" or b.clock == "predicted":
        which = "both reports are" if a.clock == "predicted" else "neither report is"
        raise ValueError(
            f"clock: {which} predicted; legal: one report of pl.predict and one of pl.run; for two "
            "others, pl.view.timelines(a, b) draws their steps next to each other"
        )
    if b.meta.get("costs") == "predicted":
        why = "it is the replay of a prediction, in which nothing was measured"
        raise illegal("report", b, why, "what pl.run returned, or a replay of that")
    return a, b


def _same_subject(expect: Tables, report: Tables) -> None:
    """Raise ``ValueError`` naming the first setting in which prediction and run differ."""
    for name, tables in (("expect", expect), ("report", report)):
        if tables.model is None:
            why = "no model of the library was trained, so there is no prediction to compare with"
            legal = "what pl.predict(model, plan) and pl.run(model, plan) return, or pl.observe"
            raise illegal(name, tables, why, legal)
    settings = [("world_size", expect.world_size, len(facts.reported_ranks(report)))]
    for name in ("model", "plan"):
        # In the form of files, which has the name of a user's class or function in its place, so
        # that loaded reports can be compared too.
        ours, theirs = getattr(expect, name).to_dict(), getattr(report, name).to_dict()
        settings += [(f"{name}.{setting}", x, theirs[setting]) for setting, x in ours.items()]
    optimizers = [tables.meta.get("optimizer") for tables in (expect, report)]
    settings += [("optimizer", *optimizers)] * all(optimizers)
    for name, x, y in settings:
        if x != y:
            legal = f"pl.predict(report.model, report.plan, cluster, optimizer={optimizers[1]!r})"
            if "observed" in report.meta:  # only the number of ranks can differ
                legal = f"a prediction for {count_of(y, 'rank')}"
            raise ValueError(f"{name}: {x!r} was predicted, {y!r} was run; legal: {legal}")
    if device_of(report) == "cuda" and not expect.cluster.gpus:
        why = "the run was on GPUs, and this prediction is for CPUs"
        legal = "pl.predict(report.model, report.plan, cluster=...) with the machine of the run, "
        legal += "which is pl.Cluster.local(device='cuda') there, or with a preset"
        raise illegal("cluster", expect.cluster.name, why, legal)


# ---- quantities -------------------------------------------------------------------------------
def _quantities(report: Tables) -> dict[str, float]:
    """{quantity: its value in one report}, in the order of the table's rows: the mean over ranks,
    the median over `facts.measured_steps`.
    """
    steps, spans, calls = facts.measured_steps(report), report.spans, facts.own_calls(report)
    calls = calls[calls["step"].isin(steps)]
    shares = metrics.typical_shares(report)
    lane = spans[spans["lane"] == "compute"]
    seconds = metrics.seconds_of(report, lane).groupby([lane["step"], lane["kind"]]).sum()
    moved = report.copies[report.copies["step"].isin(steps)]
    ranks, count = len(facts.reported_ranks(report)), max(len(steps), 1)
    outline = facts.in_outline(report)  # a row of collectives stands for many calls

    def spent(kind: str) -> float:
        return median([float(seconds.get((s, kind), 0.0)) / ranks for s in steps] or [math.nan])

    return {
        "bytes sent per rank": calls["wire_bytes"].sum() / ranks / count,
        CALLS: math.nan if outline else (calls["op"] != "recv").sum() / ranks / count,
        MOVED: moved["bytes"].sum() / ranks / count,
        "forward": spent("forward"),
        "backward": spent("backward"),
        "weight halves": spent("weight_grad"),
        "bucket copies": spent("copy"),
        "optimizer": spent("optimizer"),
        WAITED: shares["copies"],
        EXPOSED_COPIES: shares["for copies"],
        "communication": shares["communication"],
        "exposed communication": shares["for calls"],
        "step time": metrics.step_time(report),
        "bubble": metrics.bubble(report),
    }


def _first_traffic_difference(expect: Tables, report: Tables) -> str:
    """Where calls and copies of a run first differ from those predicted; "" if they agree."""
    if "observed" in report.meta:
        return _first_sum_difference(expect, report)
    summed = facts.in_outline(expect)
    predicted, run = _traffic(expect, summed), _traffic(report, summed)
    # {rank: its calls in the first predicted step}, as all predicted steps are alike
    by_rank = {rank: calls for (_, rank), calls in sorted(predicted.items(), reverse=True)}
    for step in facts.measured_steps(report):
        for rank in facts.reported_ranks(expect):
            want, got = by_rank.get(rank, Counter()), run.get((step, rank), Counter())
            if want != got:
                missing, extra = want - got, got - want
                clauses = [f"{_in_words(c)} was predicted" for c in list(missing)[:1]]
                clauses += [f"{_in_words(c)} was run" for c in list(extra)[:1]]
                return f"step {step}, rank {rank}: {'; '.join(clauses)}"
    return ""


def _first_sum_difference(expect: Tables, report: Tables) -> str:
    """The first rank whose bytes per step in an observed program are not those predicted; or ""."""
    plan, run = (amounts.traffic(each, "rank").set_index("rank") for each in (expect, report))
    for rank, (planned,) in plan.iterrows():
        if planned != (sent := run.loc[rank, "bytes"]):
            return f"rank {rank}: the plan sends {planned:,} bytes per step, the program {sent:,}"
    return ""


def _traffic(report: Tables, summed: bool) -> dict[tuple[int, int], Counter]:
    """{(step, rank): how often it makes each call and copy}; with ``summed`` the calls of a kind,
    and the copies of a kind, count as one.
    """
    kind = ["step", "rank", "op", "lane", "category"]
    names = {"axis": "lane", "wire_bytes": "bytes"}
    calls = facts.own_calls(report).rename(columns=names).assign(category="")
    counts = defaultdict(Counter)
    for rows in (calls, report.copies.assign(payload_bytes=0)):
        rows = rows[[*kind, "payload_bytes", "bytes"]]
        if summed:
            rows = rows.groupby(kind, as_index=False, sort=False).sum()
        for step, rank, *call in rows.itertuples(index=False):
            counts[step, rank][tuple(call)] += 1
    return counts


def _in_words(call: tuple[str, str, str, int, int]) -> str:
    op, lane, category, payload, size = call
    if category:
        return f"a {op} of {size:,} bytes of {category} on lane {lane}"
    article = "an" if op[0] in "aeiou" else "a"
    return f"{article} {op} of {payload:,} bytes on axis {lane} that sends {size:,} bytes"


# ---- text -------------------------------------------------------------------------------------
def _shown(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    if unit == "share":
        return percent(value, 1)
    if unit == "s":
        return f"{value * 1e3:,.2f} ms"
    if value == 1:
        unit = unit.removesuffix("s")  # 1 call
    return f"{value:,.0f} {unit}" if float(value).is_integer() else f"{value:,.1f} {unit}"
