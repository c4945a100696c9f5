"""Predicted, replayed, measured: the same quantities three times, and a sentence on each gap.

    predicted  the device model and the link model: what theory says
    replayed   the run's own compute costs on one virtual device per rank, with the prediction's
               links: what devices of their own would have shown
    measured   the wall clock

Bytes and calls are counted, so they agree exactly or something is wrong. Between predicted and
replayed lies the error of the device model; between replayed and measured, what the ranks share:
cores, caches, the machine's other work. Reading data and the Python between spans is in the
measured step alone.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from paralab.checks import illegal, instance
from paralab.report import about, amounts, metrics
from paralab.report.about import device_of, needs_own_devices, needs_times
from paralab.report.tables import Tables
from paralab.theory.gaps import EXPOSED_COPIES, MOVED, WAITED, notes_on
from paralab.theory.replay import replay

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("predicted", "replayed", "measured")
CALLED = "calls and messages"
UNITS = {"bytes sent per rank": "B", CALLED: "calls", MOVED: "B", "bubble": "share"}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Comparison:
    """What `compare` returns; prints as a table with its sentences.

    table   DataFrame, one row per quantity and step: columns predicted, replayed, measured
            (seconds, bytes or calls; NaN where there is no such report) and unit. Of a pipeline
            the bubble too, a share of device time
    notes   {quantity: what the gap means}
    bytes_agree   whether report and prediction sent the same bytes in the same number of calls
    expect, replayed, measured   the reports that were compared; measured is None if only a replay
                                 was given
    """

    expect: Tables
    replayed: Tables
    measured: Tables | None
    table: pd.DataFrame
    notes: dict[str, str] = field(default_factory=dict)
    bytes_agree: bool

    def __repr__(self) -> str:
        # No times: notebooks compare this line, and a run must give the same one twice.
        columns = " | ".join(c for c in COLUMNS if c != "measured" or self.measured is not None)
        verdict = "agree" if self.bytes_agree else "DIFFER"
        return f"Comparison({_shape(self.expect)}: {columns}, bytes {verdict})"

    def __str__(self) -> str:
        rows = [("per step", *COLUMNS)]
        for name, row in self.table.iterrows():
            rows.append((str(name), *(_shown(row[c], row["unit"]) for c in COLUMNS)))
        first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "   ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in rows
        ]
        lines.insert(1, "-" * len(lines[0]))
        for name, note in self.notes.items():
            lines += ["", *textwrap.wrap(f"{name}: {note}", 100, subsequent_indent="  ")]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{c}</th>" for c in ("per step", *COLUMNS, "what the gap means"))
        number, text = 'style="text-align:right;white-space:nowrap"', 'style="text-align:left"'
        body = []
        for name, row in self.table.iterrows():
            cells = "".join(f"<td {number}>{_shown(row[c], row['unit'])}</td>" for c in COLUMNS)
            label, note = html.escape(str(name)), html.escape(self.notes.get(str(name), ""))
            body.append(f"<tr><th {text}>{label}</th>{cells}<td {text}>{note}</td></tr>")
        caption = html.escape(f"{_shape(self.expect)} on cluster {self.expect.cluster.name}")
        return (
            f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table>"
        )


def compare(expect: Tables, report: Tables) -> Comparison:
    """Hold a prediction against a run of the same model and plan.

    expect  what `pl.predict` returned
    report  what `pl.run` returned, or `pl.observe`, whose program was to train the predicted model
            by the predicted plan; or a replay of it. The order of the two does not matter

    The run is replayed with the links of the prediction's cluster, so that these two differ in
    compute costs alone. A program that was observed may make other calls than ours: of its bytes
    the sum of each rank is compared. Returns a `Comparison`. Raises ValueError naming the first
    difference if the two are not about the same thing, or if a run on GPUs is held against a
    prediction for processors.
    """
    expect, report = _in_order(expect, report)
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

    both, pipeline = (expect, report), expect.plan.pp > 1
    split = any((one.spans["kind"] == "weight_grad").any() for one in both)
    copies = any(len(one.copies) for one in both)
    rows = {"weight halves": pipeline and split, "bubble": pipeline}
    rows |= dict.fromkeys((MOVED, WAITED, EXPOSED_COPIES), copies)
    names = [name for name in columns["predicted"] if rows.get(name, True)]
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


def _in_order(a: Any, b: Any) -> tuple[Tables, Tables]:
    for name, value in (("expect", a), ("report", b)):
        instance(name, value, Tables, "what pl.predict and pl.run return", "report")
        needs_times(value, "a comparison")
        needs_own_devices(value, "a comparison")
    if a.clock != "predicted":
        a, b = b, a
    if a.clock != "predicted" or b.clock == "predicted":
        clocks = " and ".join(sorted({a.clock, b.clock}))
        raise ValueError(
            f"clock: both reports are {clocks}; legal: one from pl.predict and one from pl.run; "
            "for others side by side: pl.view.timelines(a, b)"
        )
    if b.meta.get("costs") == "predicted":
        why = "it is a prediction that was replayed, in which nothing was measured"
        raise illegal("report", b, why, "what pl.run returned, or a replay of that")
    return a, b


def _same_subject(expect: Tables, report: Tables) -> None:
    for name, one in (("expect", expect), ("report", report)):
        if one.model is None:
            why = "it trained no model, so there is nothing to hold it against"
            legal = "what pl.predict(model, plan) and pl.run(model, plan) return, or pl.observe"
            raise illegal(name, one, why, legal)
    if expect.world_size != (ranks := len(about.reported_ranks(report))):
        raise ValueError(f"world_size: {expect.world_size} ranks were predicted, {ranks} were run")
    for name in ("model", "plan"):
        # As they are saved: of an own class or function the name, so that loaded runs compare too.
        ours, theirs = getattr(expect, name).to_dict(), getattr(report, name).to_dict()
        for setting, x in ours.items():
            if x != (y := theirs[setting]):
                raise ValueError(
                    f"{name}.{setting}: {x!r} was predicted, {y!r} was run; predict what was run: "
                    "pl.predict(report.model, report.plan)"
                )
    if device_of(report) == "cuda" and not expect.cluster.gpus:
        why = "the run was on GPUs, and this prediction is for processors"
        legal = "pl.predict(report.model, report.plan, cluster=...) with the machine that it ran "
        legal += "on, pl.Cluster.local(device='cuda') there, or a preset"
        raise illegal("cluster", expect.cluster.name, why, legal)
    x, y = expect.meta.get("optimizer"), report.meta.get("optimizer")
    if x and y and x != y:
        raise ValueError(
            f"optimizer: {x!r} was predicted, {y!r} was run; predict what was run: "
            f"pl.predict(report.model, report.plan, optimizer={y!r})"
        )


# ---- quantities -------------------------------------------------------------------------------
def _quantities(report: Tables) -> dict[str, float]:
    """Every row of the table, in order, for one report: mean over ranks, median over the steps that
    count.
    """
    steps, spans, calls = about.measured_steps(report), report.spans, about.own_calls(report)
    calls = calls[calls["step"].isin(steps)]
    waited = metrics.medians([metrics.exposed(report, step) for step in steps], metrics.EXPOSED)
    copies = metrics.medians([metrics.copy_shares(report, step) for step in steps], metrics.COPIED)
    here = spans[spans["lane"] == "compute"]
    seconds = metrics.seconds_of(report, here).groupby([here["step"], here["kind"]]).sum()
    moved = report.copies[report.copies["step"].isin(steps)]
    ranks, count = len(about.reported_ranks(report)), max(len(steps), 1)
    summed = about.in_outline(report)  # a row of its calls is many

    def spent(kind: str) -> float:
        return median([float(seconds.get((s, kind), 0.0)) / ranks for s in steps] or [math.nan])

    return {
        "bytes sent per rank": calls["wire_bytes"].sum() / ranks / count,
        CALLED: math.nan if summed else (calls["op"] != "recv").sum() / ranks / count,
        MOVED: moved["bytes"].sum() / ranks / count,
        "forward": spent("forward"),
        "backward": spent("backward"),
        "weight halves": spent("weight_grad"),
        "bucket copies": spent("copy"),
        "optimizer": spent("optimizer"),
        WAITED: copies["copies"],
        EXPOSED_COPIES: waited["copies"],
        "communication": metrics.typical_shares(report)["communication"],
        "exposed communication": waited["calls"],
        "step time": metrics.step_time(report),
        "bubble": metrics.bubble(report),
    }


def _first_traffic_difference(expect: Tables, report: Tables) -> str:
    """How the calls of a run differ from the predicted ones, rank by rank; empty if they do not."""
    if "observed" in report.meta:
        return _sums_differ(expect, report)
    summed = about.in_outline(expect)
    predicted, run = _traffic(expect, summed), _traffic(report, summed)
    first = {rank: rows for (_, rank), rows in sorted(predicted.items(), reverse=True)}
    for step in about.measured_steps(report):
        for rank in about.reported_ranks(expect):
            want, got = first.get(rank, Counter()), run.get((step, rank), Counter())
            if want != got:
                missing, extra = want - got, got - want
                said = [f"{_call(c)} was predicted" for c in list(missing)[:1]]
                said += [f"{_call(c)} was run" for c in list(extra)[:1]]
                return f"step {step}, rank {rank}: {', '.join(said)}"
    return ""


def _sums_differ(expect: Tables, report: Tables) -> str:
    """How the bytes of an observed program's step differ from the predicted, rank by rank."""
    plan, seen = (amounts.traffic(one, "rank").set_index("rank") for one in (expect, report))
    for rank, (planned,) in plan.iterrows():
        if planned != (sent := seen.loc[rank, "bytes"]):
            return f"rank {rank}: the plan sends {planned:,} bytes per step, the program {sent:,}"
    return ""


def _traffic(report: Tables, summed: bool) -> dict[tuple[int, int], Counter]:
    """By step and rank: every call and copy, and how often; ``summed``: all of a kind as one."""
    kind = ["step", "rank", "op", "lane", "category"]
    names = {"axis": "lane", "wire_bytes": "bytes"}
    calls = about.own_calls(report).rename(columns=names).assign(category="")
    found: dict[tuple[int, int], Counter] = defaultdict(Counter)
    for rows in (calls, report.copies.assign(payload_bytes=0)):
        rows = rows[[*kind, "payload_bytes", "bytes"]]
        if summed:
            rows = rows.groupby(kind, as_index=False, sort=False).sum()
        for step, rank, *what in rows.itertuples(index=False):
            found[step, rank][tuple(what)] += 1
    return found


def _call(what: tuple[str, str, str, int, int]) -> str:
    op, lane, category, payload, size = what
    if category:
        return f"a {op} of {size:,} bytes of {category} on lane {lane}"
    return f"a{'n' * (op[0] in 'aeiou')} {op} of {payload:,} bytes on axis {lane} sending {size:,}"


# ---- text -------------------------------------------------------------------------------------
def _shape(report: Tables) -> str:
    plan = report.plan
    form = plan.grad_sync_name * (plan.dp > 1 or plan.pp == 1)
    if plan.zero_stage:
        form = f"zero_stage={plan.zero_stage}" + f", shard={plan.shard}" * (plan.shard is not None)
    schedule = plan.schedule_name * (plan.pp > 1 or plan.relays)
    parts = [f"dp={plan.dp}", plan.tp_name, f"pp={plan.pp}" * (plan.pp > 1), schedule, form]
    return ", ".join(filter(None, parts))


def _shown(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "s":
        return f"{value * 1e3:,.2f} ms"
    if value == 1:
        unit = unit.removesuffix("s")  # 1 call
    return f"{value:,.0f} {unit}" if float(value).is_integer() else f"{value:,.1f} {unit}"
