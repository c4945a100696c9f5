"""`report.explain()`: what people ask of a distributed run, answered from the rows of its report.

What the rows do not say is not guessed: the last answer lists it. The closed forms, per rank and
step, with n ranks in the group and Psi bytes of trained parameters:

    data parallelism        all-reduce      2 (n-1)/n Psi, for every backward that is reduced
    ZeRO-1 in addition      broadcast         (n-1)/n Psi on average
    sharded parameters      all-gather        (n-1)/n Psi, for every forward; again for every
                                              backward if the parameters are resharded
                            reduce-scatter    (n-1)/n Psi, for every backward that is reduced
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

from paralab.report import metrics
from paralab.report.tables import Tables
from paralab.theory.traffic import POINT_TO_POINT, SURPLUS

if TYPE_CHECKING:
    import pandas as pd

REDUCTIONS = ("all_reduce", "reduce_scatter")
NEAR = 0.02  # a ratio this near to a whole number is it: FSDP pads its shards
PREFETCHED = 0.5  # of the work that comes with a gather: less, before it is waited for, is none
OTHER = 0.05  # of the peak: more is worth a sentence
NAMED = 5  # parameters, sizes and pairs of ranks that are named


class Explanation(dict[str, str]):
    """{question: answer}, which prints as text."""

    def __str__(self) -> str:
        lines: list[str] = []
        for question, answer in self.items():
            lines += ["", question]
            for part in answer.split("\n"):
                lines += textwrap.wrap(part, 98, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines[1:])

    __repr__ = __str__


def explain(report: Tables) -> Explanation:
    """Answers from the steps that count: all but step 0, where there are others."""
    metrics.needs_times(report, "an explanation")
    steps = metrics.measured_steps(report)
    calls = metrics.own_calls(report)
    calls = calls[calls["step"].isin(steps)]
    answers = {
        "Which collectives does a step make, of what sizes?": _collectives(report, calls, steps),
        "Do the bytes agree with theory?": _forms(report, calls, len(steps)),
        "How much communication is hidden?": _hidden(report),
        "What does the peak of memory consist of?": _peak(report),
        "Which parameters are not sharded?": _whole(report),
        "Are gathers prefetched?": _prefetch(report, calls),
        "Are gradients reduced once, or for every micro-batch?": _reductions(report, calls, steps),
        "What is not known?": _unknown(report, calls),
    }
    return Explanation({question: answer for question, answer in answers.items() if answer})


# ---- bytes --------------------------------------------------------------------------------------
def _collectives(report: Tables, calls: pd.DataFrame, steps: list[int]) -> str:
    lines, outline = [], metrics.in_outline(report)
    for (axis, op, phase), rows in calls[calls["op"] != "recv"].groupby(["axis", "op", "phase"]):
        each = len(steps) * rows["rank"].nunique()
        sizes = list(dict.fromkeys(map(_mb, sorted(rows["payload_bytes"]))))
        more = f" and {len(sizes) - NAMED} sizes more" * (len(sizes) > NAMED)
        counted = f"{len(rows) / each:g} × {op} of {', '.join(sizes[:NAMED])}{more}"
        what = op if outline else counted  # in outline a row stands for all calls alike
        sent = _mb(rows["wire_bytes"].sum() / each)
        lines.append(f"axis {axis}, {phase}: {what}; a rank sends {sent}")
    return "\n".join(lines)


def _forms(report: Tables, calls: pd.DataFrame, steps: int) -> str:
    if report.model is not None:
        return "pl.compare(pl.predict(model, plan), report) puts the predicted bytes next to these."
    lines = []
    for axis, rows in calls[~calls["op"].isin(POINT_TO_POINT)].groupby("axis"):
        lines.append(f"axis {axis}: {_form(report, rows, steps)}")
    for axis, rows in calls[calls["op"] == "send"].groupby("axis"):
        pairs = sorted(Counter(zip(rows["rank"], rows["peer"], strict=True)).items())
        said = ", ".join(f"{a}→{b} ({n / steps:g})" for (a, b), n in pairs[: 2 * NAMED])
        said += f" and {len(pairs) - 2 * NAMED} pairs more" * (len(pairs) > 2 * NAMED)
        like = "a pipeline, a ring made by hand, or an exchange of unequal parts"
        lines.append(f"axis {axis}: messages per step {said}: {like}")
    return "\n".join(lines)


def _form(report: Tables, rows: pd.DataFrame, steps: int) -> str:
    """What a group's calls look like, with the closed form."""
    rank = int(rows["rank"].min())
    rows, n = rows[rows["rank"] == rank], len(rows["ranks"].iloc[0])
    psi = _psi(report, rank, rows)
    if n == 1 or not psi:
        why = "no trained parameter was seen, so there is nothing to compare with"
        return why if n > 1 else "a group of one rank sends nothing"
    sums = rows.groupby(["op", "phase"])["payload_bytes"].sum() / (steps * psi)
    times = Counter(sums.to_dict())  # 0 where there is none
    if any(times[op, "forward"] for op in REDUCTIONS):
        return (
            "sums activations in the forward and their gradients in the backward, as tensor "
            "parallelism does; its bytes follow from the batch, not from the parameters"
        )
    late = ("backward", "data", "optimizer")  # by hand, or in a closure
    reduced, scattered = (sum(times[op, phase] for phase in late) for op in REDUCTIONS)
    before = times["all_gather", "forward"] + times["all_gather", "data"]  # ``model.unshard()``
    again, spread = times["all_gather", "backward"], times["broadcast", "optimizer"]
    if not (scattered or reduced):
        return "no paradigm that is known here"
    if scattered:
        name, factor = "sharded gradients (ZeRO-2)", before + again + scattered
        if before:
            how = "again for every backward" if again >= NEAR else "kept for backward"
            name = f"sharded parameters (FSDP, ZeRO-3), gathered for the forward, {how}"
    elif reduced:
        name, factor = "data parallelism, gradients all-reduced", 2 * reduced
        if spread > NEAR:
            name += ", with a sharded optimizer (ZeRO-1) that broadcasts updated parameters"
            factor += spread
    closed = f"{name}: {factor:.3g} (n−1)/n Ψ = {_mb(factor * (n - 1) / n * psi)} per rank"
    said = f"{closed} (n={n}, Ψ={_mb(psi)})"
    if not _whole_number(scattered or reduced):
        said += "; not a whole number of times Ψ: parameters that take no part, messages in fewer "
        said += "bits, or shards in place of whole gradients send less"
    if extra := rows[rows["phase"] == SURPLUS]["wire_bytes"].sum() / steps:
        said += f"; gloo's reduce-scatter is an all-reduce and sends {_mb(extra)} more"
    return said


def _psi(report: Tables, rank: int, rows: pd.DataFrame) -> float:
    """Bytes of the trained parameters that the rank holds; where these calls reduce-scatter, of
    those that it has a shard of.
    """
    trained = [p for p in _made_of(report, "parameters", rank) if p["trained"]]
    if "reduce_scatter" in set(rows["op"]):
        trained = [p for p in trained if p["held"] < p["elements"]] or trained
    return sum(p["elements"] * p["bytes"] / max(p["held"], 1) for p in trained)


def _made_of(report: Tables, what: str, rank: int = 0) -> list[Any]:
    """The "modules" or "parameters" that the observation found in the rank's program."""
    return report.meta["observed"][rank][what] if "observed" in report.meta else []


def _whole_number(times: float) -> int:
    """The whole number that is near, or 0."""
    near = round(times)
    return near if near and abs(times / near - 1) <= NEAR else 0


# ---- time ---------------------------------------------------------------------------------------
def _hidden(report: Tables) -> str:
    of = metrics.summary(report)["value"]
    if not (moving := of["communication in flight"]):
        return ""
    return (
        f"{of['of it hidden behind compute']:.0f} % of the {moving:.1f} ms of a step in which a "
        f"collective is in flight; ranks wait {of['waiting']:.1f} ms"
    )


def _prefetch(report: Tables, calls: pd.DataFrame) -> str:
    """Whether gathers of parameters run next to compute."""
    gathers, lines = calls[calls["op"] == "all_gather"], []
    if "FSDPModule" not in _made_of(report, "modules"):
        return ""  # what is gathered is no parameters
    for phase, rows in gathers[gathers["phase"].isin(["forward", "backward"])].groupby("phase"):
        waited = {span for after in report.spans["after"] for span in after}
        if waited.isdisjoint(rows["span"]):
            lines.append(f"{phase}: not known, no wait for a gather was seen")
            continue
        early = [worked > PREFETCHED * each for worked, each in _ahead(report, rows, phase)]
        verdict = "prefetch works" if sum(early) > len(early) / 2 else "there is no prefetch"
        lines.append(
            f"{phase}: the rank computed between the launch and the wait of {sum(early)} of "
            f"{len(early)} gathers, the others were waited for at once: {verdict}"
        )
    return "\n".join(lines)


def _ahead(report: Tables, rows: pd.DataFrame, phase: str) -> Iterator[tuple[float, float]]:
    """Of every call (seconds that its rank computed between its launch and its wait, seconds of
    such work for each call of the step).
    """
    for (rank, step), mine in rows.groupby(["rank", "step"]):
        spans = report.spans[(report.spans["rank"] == rank) & (report.spans["step"] == step)]
        work, waits = spans[spans["kind"] == phase], spans[spans["kind"] == "wait"]
        pairs = zip(waits["id"], waits["after"], strict=True)
        over = {call: span for span, after in pairs for call in after}
        for call in mine["span"]:  # ids are in the order in which a rank wrote
            if call in over:
                between = (work["id"] > call) & (work["id"] < over[call])
                yield work["cost"][between].sum(), work["cost"].sum() / len(mine)


def _reductions(report: Tables, calls: pd.DataFrame, steps: list[int]) -> str:
    found = calls[calls["op"].isin(REDUCTIONS)]
    if found.empty or "forward" in set(found["phase"]):
        return ""  # activations are summed on this axis too
    rank = int(found["rank"].min())
    mine = found[(found["rank"] == rank) & (found["phase"] == "backward")]
    spans = report.spans[(report.spans["rank"] == rank) & report.spans["step"].isin(steps)]
    backwards = spans[spans["kind"] == "backward"].groupby("step")["microbatch"].nunique()
    m, psi = int(median([*backwards] or [1])), _psi(report, rank, mine)
    if mine.empty or not psi:
        return ""
    times = mine["payload_bytes"].sum() / len(steps) / psi
    if m == 1 or _whole_number(times) != m:
        return f"{times:.3g} times Ψ per step, which has {m} backward{'s' * (m != 1)}."
    return (
        f"For every one of {m} micro-batches: {m} times Ψ per step. Accumulating first (no_sync, "
        f"or set_requires_gradient_sync(False), in all but the last) sends 1/{m} of it, and keeps "
        "unsharded gradients meanwhile."
    )


# ---- memory -------------------------------------------------------------------------------------
def _peak(report: Tables) -> str:
    found = metrics.peak(report)
    if found is None:
        return "It was not counted."
    held = sorted(found.held.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {_mb(size)}" for name, size in held if size)
    said = f"{_mb(found.total)} on rank {found.rank} in step {found.step}: {parts}"
    if found.held.get("other", 0) > OTHER * found.total:
        said += ". Other is what the program makes outside forward, backward and optimizer: "
        said += "batches, a data set, losses."
    return said


def _whole(report: Tables) -> str:
    """Of rank 0."""
    own = _made_of(report, "parameters")
    whole = sorted((p for p in own if p["held"] == p["elements"]), key=lambda p: -p["bytes"])
    if report.world_size == 1 or not own:
        return ""
    if not whole:
        return "All are sharded."
    size = _mb(sum(p["bytes"] for p in whole))
    if len(whole) == len(own):
        return (
            f"None is a sharded DTensor: rank 0 holds {len(own)} whole, {size}. Parts that code "
            "cut by hand look like whole ones."
        )
    names = ", ".join(f"{p['name']} ({_mb(p['bytes'])})" for p in whole[:NAMED])
    return f"{len(whole)} of {len(own)}, {size}, are whole on rank 0; the largest: {names}."


def _unknown(report: Tables, calls: pd.DataFrame) -> str:
    if report.clock == "predicted":
        return ""
    said, counted = [], sorted(set(report.memory["step"]))
    if not str(report.meta.get("device", "cpu")).startswith("cuda") and len(calls):
        said.append(
            "When a send, a receive or a reduce-scatter of gloo ended: it has no hook, so its span "
            "ends where the rank had waited for it."
        )
    elif "FSDPModule" in _made_of(report, "modules"):
        said.append(
            "When the device waited for FSDP2's collectives: they run on streams of their own, and "
            "a stall of the computing stream counts as computing."
        )
    if "DistributedDataParallel" in _made_of(report, "modules"):
        said.append(
            "When DistributedDataParallel's reducer began to wait: it waits in C++, so what "
            "follows its last all-reduce in a backward counts as the wait."
        )
    if counted and counted[-1] < report.steps["step"].max():
        said.append(f"Memory after step {counted[-1]}: bytes were counted in steps {counted}.")
    return "\n".join(said)


def _mb(size: float) -> str:
    return f"{size / 1e6:,.3g} MB" if size >= 1e5 else f"{size:,.0f} B"
