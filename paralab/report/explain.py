"""`report.explain()`: what people ask of a distributed run, answered from the rows of its report.

Which collectives there are, whether their bytes are those of the paradigm that they look like, how
much of them is hidden, what fills the memory, whether gathers are prefetched, whether gradients are
reduced once or for every micro-batch, how large the buckets are. What the rows do not say is not
guessed: the last answer lists it.

The closed forms, per rank and step, with n ranks in the group and Psi bytes of trained parameters:

    data parallelism        all-reduce      2 (n-1)/n Psi, for every backward that is reduced
    ZeRO-1 in addition      broadcast         (n-1)/n Psi on average
    sharded parameters      all-gather        (n-1)/n Psi, for every forward; again for every
                                              backward if the parameters are resharded
                            reduce-scatter    (n-1)/n Psi, for every backward that is reduced
"""

from __future__ import annotations

import html
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from paralab.report import metrics
from paralab.report.tables import Tables
from paralab.theory.traffic import BOOKKEEPING, POINT_TO_POINT

if TYPE_CHECKING:
    import pandas as pd

SURPLUS = "gloo surplus"
REDUCTIONS = ("all_reduce", "reduce_scatter")
NEAR = 0.02  # a ratio this near to a whole number is it: FSDP pads its shards
PREFETCHED = 0.5  # of the work that comes with a gather: less, before it is waited for, is none
NAMED = 5  # parameters that are named


@dataclass(frozen=True)
class Explanation:
    """``answers``: {question: answer}. Prints as text, shows as a table in a notebook."""

    answers: dict[str, str]

    def __str__(self) -> str:
        lines: list[str] = []
        for question, answer in self.answers.items():
            lines += ["", question]
            for part in answer.split("\n"):
                lines += textwrap.wrap(part, 98, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines[1:])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left;vertical-align:top">{html.escape(question)}</th>'
            f'<td style="text-align:left">{html.escape(answer).replace(chr(10), "<br>")}</td></tr>'
            for question, answer in self.answers.items()
        )
        return f"<table><tbody>{rows}</tbody></table>"


def explain(report: Tables) -> Explanation:
    """Answers from the steps that count: all but step 0, where there are others."""
    steps = metrics.measured_steps(report)
    calls = report.collectives[report.collectives["step"].isin(steps)]
    calls = calls[~calls["phase"].isin(BOOKKEEPING)]
    answers = {
        "Which collectives does a step make?": _collectives(report, calls, len(steps)),
        "Do the bytes agree with theory?": _forms(report, calls, len(steps)),
        "How much communication is hidden?": _hidden(report, steps),
        "What does the peak of memory consist of?": _peak(report),
        "Which parameters are not sharded?": _whole(report),
        "Are gathers prefetched?": _prefetch(report, calls),
        "Are gradients reduced once, or for every micro-batch?": _reductions(report, calls, steps),
        "How large are the buckets?": _buckets(calls),
        "What is not known?": _unknown(report, calls),
    }
    return Explanation({question: answer for question, answer in answers.items() if answer})


# ---- bytes --------------------------------------------------------------------------------------
def _collectives(report: Tables, calls: pd.DataFrame, steps: int) -> str:
    if calls.empty:
        return "None: the ranks send nothing in a step." * (report.world_size > 1)
    lines = []
    for (axis, op, phase), rows in calls.groupby(["axis", "op", "phase"]):
        if op == "recv":
            continue
        each = steps * rows["rank"].nunique()
        count, sent = len(rows) / each, rows["wire_bytes"].sum() / each
        mean = rows["payload_bytes"].mean()
        lines.append(
            f"axis {axis}, {phase}: {count:g} × {op} of {_mb(mean)} on average; a rank sends "
            f"{_mb(sent)}"
        )
    return "\n".join(lines)


def _forms(report: Tables, calls: pd.DataFrame, steps: int) -> str:
    lines = []
    for axis, rows in calls[~calls["op"].isin(POINT_TO_POINT)].groupby("axis"):
        lines.append(f"axis {axis}: " + _form(report, rows, steps))
    for axis, rows in calls[calls["op"] == "send"].groupby("axis"):
        pairs = Counter(zip(rows["rank"], rows["peer"], strict=True))
        said = ", ".join(f"{a}→{b} ({n / steps:g})" for (a, b), n in sorted(pairs.items())[:8])
        lines.append(f"axis {axis}: messages per step {said}: a pipeline, or a ring of its own")
    return "\n".join(lines)


def _form(report: Tables, rows: pd.DataFrame, steps: int) -> str:
    """What a group's calls look like, with the closed form."""
    rank = int(rows["rank"].min())
    rows, psi = rows[rows["rank"] == rank], _psi(report, rank)
    if {"reduce_scatter", "all_gather"} <= set(rows["op"]):  # those of sharded parameters alone
        psi = _psi(report, rank, sharded=True) or psi
    n = len(rows["ranks"].iloc[0])
    if n == 1:
        return "a group of one rank sends nothing"
    if not psi:
        return "no trained parameter was seen, so there is nothing to compare the bytes with"
    times = {key: size / steps / psi for key, size in _payloads(rows).items()}
    gathered = {p: times.get(("all_gather", p), 0.0) for p in ("forward", "backward")}
    gathered["forward"] += times.get(("all_gather", "data"), 0.0)  # ``model.unshard()``
    reduced, scattered = (times.get((op, "backward"), 0.0) for op in REDUCTIONS)
    first = times.get(("reduce_scatter", "forward"), 0) or times.get(("all_reduce", "forward"), 0)
    parts = []
    if first:
        return (
            "sums and gathers activations in the forward and their gradients in the backward, as "
            "tensor parallelism does; its bytes follow from the batch, not from the parameters"
        )
    if scattered and any(gathered.values()):
        k = _whole_number(scattered)
        again = "again for every backward" if gathered["backward"] >= NEAR else "kept for backward"
        name = f"sharded parameters (FSDP, ZeRO-3): gathered for the forward, {again}"
        parts.append((name, gathered["forward"] + gathered["backward"] + scattered, k))
    elif scattered:
        parts.append(("sharded gradients (ZeRO-2)", scattered, _whole_number(scattered)))
    if reduced and not parts:
        name = "data parallelism: gradients all-reduced"
        parts.append((name, 2 * reduced, _whole_number(reduced)))
    if (spread := times.get(("broadcast", "optimizer"), 0.0)) > NEAR:
        name = "a sharded optimizer (ZeRO-1): updated parameters broadcast"
        parts.append((name, spread, _whole_number(spread)))
    if not parts:
        return "no paradigm that this explanation knows"
    said = []
    for name, factor, known in parts:
        closed, known_words = _mb(factor * (n - 1) / n * psi), ""
        if known is None:
            known_words = "; not a whole number of times Ψ: only some parameters take part"
        said.append(f"{name}; {factor:.3g} (n−1)/n Ψ = {closed} per rank{known_words}")
    extra = rows[rows["phase"] == SURPLUS]["wire_bytes"].sum() / steps
    if extra:
        said.append(f"gloo's reduce-scatter is an all-reduce and sends {_mb(extra)} more than that")
    return f"{'; '.join(said)} (n={n}, Ψ={_mb(psi)})"


def _payloads(rows: pd.DataFrame) -> dict[tuple[str, str], int]:
    """{(op, phase): payload bytes}"""
    return rows.groupby(["op", "phase"])["payload_bytes"].sum().to_dict()


def _psi(report: Tables, rank: int, *, sharded: bool = False) -> float:
    """Bytes of the trained parameters that the rank holds or has a shard of; or has a shard of."""
    return sum(
        p["elements"] * _width(p)
        for p in _parameters(report, rank)
        if p["trained"] and (p["held"] < p["elements"] or not sharded)
    )


def _width(parameter: dict[str, Any]) -> float:
    return parameter["bytes"] / parameter["held"] if parameter["held"] else 4.0


def _about(report: Tables, rank: int = 0) -> dict[str, Any]:
    """What the observation found the rank's program to be made of."""
    found = report.meta.get("observed") or []
    return (found[rank] if rank < len(found) else None) or {}


def _parameters(report: Tables, rank: int) -> list[dict[str, Any]]:
    return _about(report, rank).get("parameters", [])


def _whole_number(times: float) -> int | None:
    near = round(times)
    return near if near and abs(times / near - 1) <= NEAR else None


# ---- time ---------------------------------------------------------------------------------------
def _hidden(report: Tables, steps: list[int]) -> str:
    parts = [metrics.shares(report, step) for step in steps]
    moving = median(part["communication"] for part in parts) if parts else 0.0
    if not moving:
        return ""
    hidden = median(part["hidden"] for part in parts)
    waited = median(part["wait"] for part in parts)
    return (
        f"{100 * hidden / moving:.0f} % of the time in which a collective is in flight, "
        f"{1e3 * moving:.1f} ms of a step, has forward or backward work at the same time; ranks "
        f"wait {1e3 * waited:.1f} ms"
    )


def _prefetch(report: Tables, calls: pd.DataFrame) -> str:
    """Whether gathers of parameters run next to compute."""
    gathers = calls[(calls["op"] == "all_gather") & calls["phase"].isin(["forward", "backward"])]
    if gathers.empty or "FSDPModule" not in _about(report).get("modules", ()):
        return ""  # what is gathered is no parameters
    lines = []
    for phase, rows in gathers.groupby("phase"):
        early = [worked > PREFETCHED * each for worked, each in _ahead(report, rows, phase)]
        verdict = "prefetch works" if sum(early) > len(early) / 2 else "there is no prefetch"
        if 0 < sum(early) <= len(early) / 2:
            verdict = "prefetch works for some"
        lines.append(
            f"{phase}: between the launch and the wait of {sum(early)} of {len(early)} gathers the "
            f"rank computed, the others were waited for at once: {verdict}"
        )
    return "\n".join(lines)


def _ahead(report: Tables, rows: pd.DataFrame, phase: str) -> Iterator[tuple[float, float]]:
    """Of every call (seconds that its rank computed between its launch and its wait, seconds of
    such work for each call of the step).
    """
    for (rank, step), mine in rows.groupby(["rank", "step"]):
        spans = report.spans[(report.spans["rank"] == rank) & (report.spans["step"] == step)]
        work, waits = spans[spans["kind"] == phase], spans[spans["kind"] == "wait"]
        over = {
            call: span
            for span, after in zip(waits["id"], waits["after"], strict=True)
            for call in after
        }
        for call in mine["span"]:  # ids are in the order in which a rank wrote
            if call in over:
                between = (work["id"] > call) & (work["id"] < over[call])
                yield work["cost"][between].sum(), work["cost"].sum() / len(mine)


# ---- gradients ----------------------------------------------------------------------------------
def _reductions(report: Tables, calls: pd.DataFrame, steps: list[int]) -> str:
    found = calls[(calls["phase"] == "backward") & calls["op"].isin(REDUCTIONS)]
    if found.empty:
        return ""
    rank = int(found["rank"].min())
    spans = report.spans[(report.spans["rank"] == rank) & report.spans["step"].isin(steps)]
    backwards = spans[spans["kind"] == "backward"].groupby("step")["microbatch"].nunique()
    m, psi = int(median(backwards)) if len(backwards) else 1, _psi(report, rank)
    if not psi or "forward" in set(calls[calls["op"].isin(REDUCTIONS)]["phase"]):
        return ""  # activations are summed on this axis too
    if "reduce_scatter" in set(found["op"]):
        psi = _psi(report, rank, sharded=True) or psi
    times = found[found["rank"] == rank]["payload_bytes"].sum() / len(steps) / psi
    if m == 1:
        return f"A step has one backward, which reduces {times:.2g} times Ψ."
    if _whole_number(times) == m:
        return (
            f"For every one of {m} micro-batches: {m} times Ψ per step. Accumulating first "
            f"(no_sync, or set_requires_gradient_sync(False), in all but the last) sends 1/{m} of "
            "it, and keeps unsharded gradients meanwhile."
        )
    once = "Once" if _whole_number(times) == 1 else f"{times:.3g} times Ψ"
    return f"{once} per step, with {m} micro-batches."


def _buckets(calls: pd.DataFrame) -> str:
    found = calls[(calls["phase"] == "backward") & calls["op"].isin(REDUCTIONS)]
    if found.empty:
        return ""
    lines = []
    for (axis, op), rows in found.groupby(["axis", "op"]):
        sizes = sorted(rows["payload_bytes"].tolist())
        kinds = list(dict.fromkeys(map(_mb, sizes)))
        more = f" and {len(kinds) - 8} sizes more" * (len(kinds) > 8)
        lines.append(
            f"axis {axis}, {op}: {', '.join(kinds[:8])}{more}; the median is {_mb(median(sizes))}"
        )
    return "\n".join(lines)


# ---- memory -------------------------------------------------------------------------------------
def _peak(report: Tables) -> str:
    found = metrics.peak(report)
    if found is None:
        return "It was not counted: memory_steps was 0."
    held = sorted(found.held.items(), key=lambda item: -item[1])
    parts = [f"{name} {_mb(size)}" for name, size in held if size]
    return f"{_mb(found.total)} on rank {found.rank} in step {found.step}: {', '.join(parts)}"


def _whole(report: Tables) -> str:
    if report.world_size == 1:
        return ""
    lines: dict[str, list[int]] = {}
    for rank in metrics.reported_ranks(report):
        own = _parameters(report, rank)
        whole = [p for p in own if p["held"] == p["elements"]]
        if own:
            lines.setdefault(_named(own, whole), []).append(rank)
    if len(lines) == 1:
        return next(iter(lines))
    return "\n".join(f"ranks {', '.join(map(str, r))}: {said}" for said, r in lines.items())


def _named(own: list[dict[str, Any]], whole: list[dict[str, Any]]) -> str:
    size = sum(p["bytes"] for p in whole)
    if not whole:
        return "All are sharded."
    if len(whole) == len(own):
        said = f"None is a sharded DTensor: a rank holds {len(own)} whole, {_mb(size)}."
        return said + " Parts that code cut by hand look like whole ones."
    largest = sorted(whole, key=lambda p: -p["bytes"])[:NAMED]
    names = ", ".join(f"{p['name']} ({_mb(p['bytes'])})" for p in largest)
    more = f" and {len(whole) - NAMED} more" * (len(whole) > NAMED)
    return f"{len(whole)} of {len(own)}, {_mb(size)}, are whole on this rank: {names}{more}."


# ---- what is not known --------------------------------------------------------------------------
def _unknown(report: Tables, calls: pd.DataFrame) -> str:
    said = []
    if not str(report.meta.get("device", "cpu")).startswith("cuda") and len(calls):
        said.append(
            "When a send, a receive or a reduce-scatter of gloo ended: it has no hook, so its span "
            "ends where the rank had waited for it."
        )
    if "DistributedDataParallel" in _about(report).get("modules", ()):
        said.append(
            "When DistributedDataParallel's reducer began to wait: it waits in C++, so what "
            "follows its last all-reduce in a backward counts as the wait."
        )
    if len(counted := sorted(set(report.memory["step"]))):
        steps = ", ".join(map(str, counted))
        said.append(f"Memory after step {counted[-1]}: bytes were counted in steps {steps} alone.")
    return "\n".join(said)


def _mb(size: float) -> str:
    return f"{size / 1e6:,.3g} MB" if size >= 1e5 else f"{size:,.0f} B"
