"""`report.explain()`: what people ask of a distributed run, answered from the rows of its report.

What the rows do not say is not guessed: the last answer lists it. What the calls of a group look
like, and the closed form of their bytes, is in paradigm.py.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paralab.report import about, amounts
from paralab.report.paradigm import (
    REDUCTIONS,
    any_made_of,
    backwards,
    describe_axis,
    in_parts,
    made_of,
    mb,
    steps_of,
    sums_activations,
    trained_bytes,
    whole_number,
)
from paralab.report.summary import summary
from paralab.report.tables import Tables
from paralab.theory.traffic import POINT_TO_POINT

if TYPE_CHECKING:
    import pandas as pd

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
    """What people ask of a distributed run: which collectives, whether the bytes agree with theory,
    what is hidden, what fills the peak. A dict {question: answer} that prints as text, of the steps
    that count: all but step 0, where there are others. Raises ValueError on a dry run.
    """
    about.needs_times(report, "an explanation")
    steps = about.measured_steps(report)
    calls = about.own_calls(report)
    calls = calls[calls["step"].isin(steps)]
    answers = {
        "Which collectives does a step make, of what sizes?": _collectives(report, calls),
        "Do the bytes agree with theory?": _forms(report, calls, len(steps)),
        "How much communication is hidden?": _hidden(report),
        "What does the peak of memory consist of?": _peak(report),
        "Which parameters are not sharded?": _whole(report),
        "Are gathers prefetched?": _prefetch(report, calls),
        "Are gradients reduced once, or for every micro-batch?": _reductions(report, calls),
        "What is not known?": _unknown(report, calls),
    }
    return Explanation({question: answer for question, answer in answers.items() if answer})


# ---- bytes --------------------------------------------------------------------------------------
def _collectives(report: Tables, calls: pd.DataFrame) -> str:
    lines, outline = [], about.in_outline(report)
    known = len(about.reported_ranks(report))
    for (axis, op, phase), rows in calls[calls["op"] != "recv"].groupby(["axis", "op", "phase"]):
        ranks, when = sorted(set(rows["rank"])), ""
        each = sum(steps_of(report, rank) for rank in ranks)
        if (some := len(rows.groupby(["rank", "step"]))) < each:
            found, of = rows["step"][rows["rank"] == ranks[0]], steps_of(report, ranks[0])
            when, each = f"in {found.nunique()} of {of} steps ", some
        sizes = list(dict.fromkeys(map(mb, sorted(rows["payload_bytes"]))))
        more = f" and {len(sizes) - NAMED} more" * (len(sizes) > NAMED)
        counted = f"{round(len(rows) / each, 2):g} × {op} of {', '.join(sizes[:NAMED])}{more}"
        what = op if outline else counted  # in outline a row stands for all calls alike
        sent = mb(rows["wire_bytes"].sum() / each)
        who = "a rank" if len(ranks) == known else f"each of {len(ranks)} ranks"
        lines.append(
            f"axis {axis}, {phase}: {when}{what}; {who} sends {sent}{' then' * bool(when)}"
        )
    return "\n".join(lines)


def _forms(report: Tables, calls: pd.DataFrame, steps: int) -> str:
    if report.model is not None:
        return "pl.compare(pl.predict(model, plan), report) puts the predicted bytes next to these."
    found: dict[str, list[str]] = {}  # what is said: axes
    collectives = calls[~calls["op"].isin(POINT_TO_POINT)]
    for axis in sorted(set(collectives["axis"])):
        found.setdefault(describe_axis(report, collectives, axis), []).append(axis)
    for axis, rows in calls[calls["op"] == "send"].groupby("axis"):
        pairs = sorted(Counter(zip(rows["rank"], rows["peer"], strict=True)).items())
        said = ", ".join(f"{a}→{b} ({n / steps:g})" for (a, b), n in pairs[: 2 * NAMED])
        said += f" and {len(pairs) - 2 * NAMED} more" * (len(pairs) > 2 * NAMED)
        like = "a pipeline, a ring made by hand, or an exchange of unequal parts"
        found.setdefault(f"messages per step {said}: {like}", []).append(axis)
    lines = []
    for said, axes in found.items():
        lines.append(f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(axes)}: {said}")
    return "\n".join(lines)


# ---- time ---------------------------------------------------------------------------------------
def _hidden(report: Tables) -> str:
    of = summary(report)["value"]
    if not (moving := of["communication in flight"]):
        return ""
    return (
        f"{of['of it hidden behind compute']:.0f} % of the {moving:.1f} ms of a step in which a "
        f"collective is in flight; ranks wait {of['waiting']:.1f} ms"
    )


def _prefetch(report: Tables, calls: pd.DataFrame) -> str:
    if "FSDPModule" not in made_of(report, "modules"):
        return ""  # what is gathered is no parameters
    axes = [a for a, rows in calls.groupby("axis") if not sums_activations(report, rows, a)]
    gathers, lines = calls[calls["op"].eq("all_gather") & calls["axis"].isin(axes)], []
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


def _reductions(report: Tables, calls: pd.DataFrame) -> str:
    """Of the axis on which a rank reduces most, but for sums of activations. Where a backward sums
    nothing, what is summed by hand in every step.
    """
    found = calls[calls["op"].isin(REDUCTIONS)]
    axes = [a for a, rows in found.groupby("axis") if not sums_activations(report, rows, a)]
    rank = int(found["rank"].min()) if axes else 0
    found = found[(found["rank"] == rank) & found["axis"].isin(axes)]
    mine = found[found["phase"] == "backward"]
    if by_hand := mine.empty:
        mine = found[found["phase"] == "data"]
        if mine["step"].nunique() < steps_of(report, rank):
            return ""
    size = mine.groupby("axis")["payload_bytes"].sum()
    psi = trained_bytes(report, rank, str(size.idxmax()))
    m, reduced = backwards(report, rank, mine)
    if not psi or not m:
        return ""
    times, many = float(size.max()) / steps_of(report, rank) / psi, "s" * (m != 1)
    if by_hand and not whole_number(times):
        return ""  # other things than gradients
    said = f"{times:.3g} times Ψ per step"
    if made_of(report, "closures", rank):
        return f"{said}, in which the optimizer evaluates {m:.3g} backward{many}."
    if m == 1 or reduced != m:
        return f"{said}, which has {m:.3g} backward{many}."
    return (
        f"For every one of {m:.3g} micro-batches: {said}. Accumulating first "
        "(no_sync, or set_requires_gradient_sync(False), in all but the last) sends 1/"
        f"{m:.3g} of it, and keeps unsharded gradients meanwhile."
    )


# ---- memory -------------------------------------------------------------------------------------
def _peak(report: Tables) -> str:
    found = amounts.peak(report)
    if found is None:
        return "It was not counted."
    held = sorted(found.held.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {mb(size)}" for name, size in held if size)
    said = f"{mb(found.total)} on rank {found.rank} in step {found.step}: {parts}"
    if found.held.get("other", 0) > OTHER * found.total:
        said += ". Other is what the program makes outside forward, backward and optimizer: "
        said += "batches, a data set, losses."
    return said


def _whole(report: Tables) -> str:
    """Of rank 0."""
    own = made_of(report, "parameters")
    whole = sorted((p for p in own if p["held"] == p["elements"]), key=lambda p: -p["bytes"])
    if report.world_size == 1 or not own or in_parts(report):
        return ""
    if not whole:
        return "All are sharded."
    size = mb(sum(p["bytes"] for p in whole))
    if len(whole) == len(own):
        return (
            f"None is a sharded DTensor: rank 0 holds {len(own)} whole, {size}. Parts that code "
            "cut by hand look like whole ones."
        )
    names = ", ".join(f"{p['name']} ({mb(p['bytes'])})" for p in whole[:NAMED])
    return f"{len(whole)} of {len(own)}, {size}, are whole on rank 0; the largest: {names}."


def _unknown(report: Tables, calls: pd.DataFrame) -> str:
    if report.clock == "predicted":
        return ""
    counted, modules = sorted(set(report.memory["step"])), made_of(report, "modules")
    on_gpu = about.device_of(report) == "cuda"
    through_host = on_gpu and report.meta.get("backend") == "gloo" and "observed" in report.meta
    told = (  # where it is so; what is not known then
        (
            through_host and len(calls),
            "When a call of gloo with tensors on a GPU ended: its span ends where the rank had "
            "waited for it.",
        ),
        (
            not on_gpu and len(calls),
            "When a send, a receive or a reduce-scatter of gloo ended: it has no hook, so its span "
            "ends where the rank had waited for it.",
        ),
        (
            (on_gpu or not len(calls)) and "FSDPModule" in modules,
            "When the device waited for FSDP2's collectives: they run on streams of their own, and "
            "a stall of the computing stream counts as computing.",
        ),
        (
            any_made_of(report, "aside"),
            "When the device waited for calls that the program waits for on streams of its own: "
            "there they end, and a stall of the computing stream counts as computing.",
        ),
        (
            any_made_of(report, "batches"),
            "When a batch of messages ended (batch_isend_irecv over NCCL), or a call of NCCL with "
            "parts of unequal sizes: nothing says it, so their spans end where the rank had waited "
            "for the batch.",
        ),
        (
            "DistributedDataParallel" in modules,
            "When DistributedDataParallel's reducer began to wait: it waits in C++, so what "
            "follows its last all-reduce in a backward counts as the wait.",
        ),
        (
            any_made_of(report, "graphs"),
            "What CUDA graphs do: while one is captured nothing is written down, and when it is "
            "replayed its calls, its forwards and its backwards are not seen.",
        ),
        (
            made_of(report, "threads"),
            "What other threads of the program train: modules were trained on one that the program "
            "had started, and only the first thread's spans, steps and memory are written down.",
        ),
        (
            any_made_of(report, "compiles"),
            "What a compiled program holds: torch.compile compiles nothing while bytes are "
            "counted, so they are those of the program as it is written. It compiles in the step "
            "after, which takes longer; with memory_steps=0 in the first.",
        ),
    )
    said = [words for holds, words in told if holds]
    many = report.steps[report.steps["step"].isin(about.measured_steps(report))]
    many = sorted(set(many["rank"].value_counts()))
    if len(many) > 1:
        said.append(
            f"What ranks did after their last step: they have from {many[0]} to {many[-1]} steps "
            "that count, and what follows a rank's last one is left out. Bytes of `traffic()` are "
            "shared out over the most steps of a rank."
        )
    if counted and counted[-1] < report.steps["step"].max():
        said.append(f"Memory after step {counted[-1]}: bytes were counted in steps {counted}.")
    return "\n".join(said)
