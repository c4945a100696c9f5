"""`report.explain()`: common questions about a distributed run, answered from its report's rows.

What the rows do not say is not guessed: the last answer lists it. paradigm.py names the paradigm
that the calls of a group look like, with the closed form of their bytes.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paralab.checks import count_of, mb
from paralab.report import amounts, facts
from paralab.report.paradigm import (
    REDUCING,
    REDUCTIONS,
    backwards,
    describe_axis,
    fully_sharded,
    made_of,
    steps_of,
    sums_activations,
    trained_bytes,
    whole_number,
)
from paralab.report.summary import readable, summary
from paralab.report.tables import Tables
from paralab.theory.traffic import POINT_TO_POINT

if TYPE_CHECKING:
    import pandas as pd

# A gather is prefetched if its rank computes, between its launch and its wait, more than this share
# of the compute per gather.
PREFETCHED = 0.5
NAMED = 5  # how many parameters, sizes or pairs of ranks an answer names
UNKNOWN = {  # what is not known, by the condition under which it is not: see `_unknown`
    "shared": "How long each rank computed: ranks shared a GPU, and the time of each includes the "
    "work of the others.",
    "gloo": "When a send, a receive or a reduce-scatter of gloo ended, or any call of gloo with "
    "tensors on a GPU: gloo does not report it, so its span ends when the rank's wait for it "
    "ended.",
    "aside": "When the device waited for calls that FSDP or the program waits for on streams of "
    "their own: a stall of the compute stream counts as computation.",
    "batches": "When a batch of messages ended (batch_isend_irecv over NCCL), or a call of NCCL "
    "with parts of unequal sizes: NCCL does not report it, so their spans end when the rank's wait "
    "for them ended.",
    "DDP": "When DistributedDataParallel's reducer began to wait: it waits in C++, so what follows "
    "its last all-reduce in a backward counts as the wait.",
    "graphs": "What CUDA graphs do: while a graph is captured, nothing is recorded, and when it is "
    "replayed, its calls, forwards and backwards are not seen.",
    "compiles": "What a compiled program holds: torch.compile compiles nothing while bytes are "
    "counted, so the bytes are those of the program as it is written. It compiles in the step "
    "after that, which takes longer; with memory_steps=0, in the first step.",
    "clocks": "The order of moments on different machines that are less than {apart:.2g} ms apart: "
    "their clocks were compared once, before the first step, and may drift apart in a long run.",
    "unended": "Where steps end: no step was ended, so all that the program did counts as one. "
    "Call paralab.step() where a step ends, and observe with steps='marked'.",
    "scratch": "What kernels allocate and free while they compute, attention or gloo's gathers "
    "say: only tensors that operations return are counted, so the process may hold more than the "
    "peak says.",
}


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
    """Answers to common questions about a distributed run: which collectives it makes, whether the
    bytes agree with theory, how much is hidden, what fills the peak. A dict {question: answer} that
    prints as text, about all steps but step 0, where there are others. Raises ValueError on a dry
    run.
    """
    facts.needs_times(report, "an explanation")
    steps = facts.measured_steps(report)
    calls = facts.own_calls(report)
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
    lines, outline = [], facts.in_outline(report)
    num_ranks = len(facts.reported_ranks(report))
    for (axis, op, phase), rows in calls[calls["op"] != "recv"].groupby(["axis", "op", "phase"]):
        ranks = sorted(set(rows["rank"]))
        rank_steps = sum(steps_of(report, rank) for rank in ranks)  # steps, summed over the ranks
        sizes = list(dict.fromkeys(map(mb, sorted(rows["payload_bytes"]))))
        more = f" and {len(sizes) - NAMED} more" * (len(sizes) > NAMED)
        counted = f"{round(len(rows) / rank_steps, 2):g} × {op} of {', '.join(sizes[:NAMED])}{more}"
        what = op if outline else counted  # in outline a row is the sum of all equal calls
        who = "a rank" if len(ranks) == num_ranks else f"each of {len(ranks)} ranks"
        who = f"rank {ranks[0]}" if len(ranks) == 1 else who
        sent = mb(rows["wire_bytes"].sum() / rank_steps)
        lines.append(f"axis {axis}, {phase}: {what}; {who} sends {sent}")
    return "\n".join(lines)


def _forms(report: Tables, calls: pd.DataFrame, steps: int) -> str:
    if report.model is not None:
        return "pl.compare(pl.predict(model, plan), report) puts the predicted bytes next to these."
    axes_of: dict[str, list[str]] = {}  # {description: the axes that it fits}
    collectives = calls[~calls["op"].isin(POINT_TO_POINT)]
    for axis, rows in collectives.groupby("axis"):
        axes_of.setdefault(describe_axis(report, rows, axis), []).append(axis)
    for axis, rows in calls[calls["op"] == "send"].groupby("axis"):
        pairs = sorted(Counter(zip(rows["rank"], rows["peer"], strict=True)).items())
        counted = ((a, b, round(n / steps, 2)) for (a, b), n in pairs[: 2 * NAMED])
        messages = ", ".join(f"{a}→{b} ({times:g})" for a, b, times in counted)
        messages += f" and {len(pairs) - 2 * NAMED} more" * (len(pairs) > 2 * NAMED)
        like = "it may be a pipeline, a ring made by hand, a gather, gloo's reduce, or an "
        like += "exchange of unequal parts"
        axes_of.setdefault(f"messages per step: {messages}; {like}", []).append(axis)
    lines = []
    for description, axes in axes_of.items():
        lines.append(f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(axes)}: {description}")
    return "\n".join(lines)


# ---- time ---------------------------------------------------------------------------------------
def _hidden(report: Tables) -> str:
    value = summary(report)["value"]
    moving, waiting = (readable(value[name]) for name in ("communication in flight", "waiting"))
    if moving == "0":
        return ""
    return (
        f"{value['of it hidden behind compute']:.0f} % of the {moving} ms per step in which "
        f"communication is in flight; a rank waits for {waiting} ms per step."
    )


def _prefetch(report: Tables, calls: pd.DataFrame) -> str:
    if not fully_sharded(report):
        return ""  # without FSDP the program's gathers are not of parameters
    axes = [a for a, rows in calls.groupby("axis") if not sums_activations(report, rows, a)]
    gathers, lines = calls[calls["op"].eq("all_gather") & calls["axis"].isin(axes)], []
    for phase, rows in gathers[gathers["phase"].isin(["forward", "backward"])].groupby("phase"):
        awaited = {span for after in report.spans["after"] for span in after}
        if awaited.isdisjoint(rows["span"]):
            lines.append(f"{phase}: not known, because no wait for a gather was seen")
            continue
        times = _compute_in_flight(report, rows, phase)
        early = [computed > PREFETCHED * per_gather for computed, per_gather in times]
        verdict = "prefetch works" if sum(early) > len(early) / 2 else "there is no prefetch"
        lines.append(
            f"{phase}: for {sum(early)} of {len(early)} gathers, ranks computed between the launch "
            f"and the wait; for the others they waited at once: {verdict}"
        )
    return "\n".join(lines)


def _compute_in_flight(
    report: Tables, gathers: pd.DataFrame, phase: str
) -> Iterator[tuple[float, float]]:
    """For every gather: (seconds of this phase's compute between its launch and its wait, seconds
    of this phase's compute per gather).
    """
    for (rank, step), calls in gathers.groupby(["rank", "step"]):
        spans = report.spans[(report.spans["rank"] == rank) & (report.spans["step"] == step)]
        work, waits = spans[spans["kind"] == phase], spans[spans["kind"] == "wait"]
        pairs = zip(waits["id"], waits["after"], strict=True)
        wait_for = {call: span for span, after in [*pairs][::-1] for call in after}  # the first
        for call in calls["span"]:  # a rank's span ids rise with time
            if call in wait_for:
                between = (work["id"] > call) & (work["id"] < wait_for[call])
                yield work["cost"][between].sum(), work["cost"].sum() / len(calls)


def _reductions(report: Tables, calls: pd.DataFrame) -> str:
    """How often the gradients of a step are reduced, judged by the axis on which a rank reduces
    most bytes, sums of activations apart. A group of one rank reduces nothing.
    """
    sums = calls[calls["op"].isin(REDUCTIONS) & calls["ranks"].map(len).gt(1)]
    axes = [a for a, rows in sums.groupby("axis") if not sums_activations(report, rows, a)]
    rank = int(sums["rank"].min()) if axes else 0
    sums = sums[(sums["rank"] == rank) & sums["axis"].isin(axes) & sums["phase"].isin(REDUCING)]
    if sums.empty:
        return ""
    size = sums.groupby(["axis", "op"])["payload_bytes"].sum()  # FSDP's, or those of DDP beside it
    psi = trained_bytes(report, rank, size.idxmax()[0])
    m, reducing = backwards(report, rank, sums)
    if not psi or not m:
        return ""
    times = float(size.max()) / steps_of(report, rank) / psi
    if not (reducing or whole_number(times)):
        return ""  # these sums, made by hand, are not of gradients
    text = f"{times:.3g} times Ψ is reduced per step".removeprefix("1 times ")
    text += f", which has {count_of(m, 'backward pass', '.3g')}"
    if _updates_between(report, rank):
        return f"{text}, with an optimizer's step between or around them."
    if m == 1 or reducing != m:
        return f"{text}."
    return (
        f"For every one of {m:.3g} micro-batches: {text}. Accumulating first "
        "(no_sync, or set_requires_gradient_sync(False), in all but the last) would send 1/"
        f"{m:.3g} of that, and would hold unsharded gradients until the last backward."
    )


def _updates_between(report: Tables, rank: int) -> bool:
    """Whether an optimizer steps before the last backward of a step begins. Then the backwards are
    no micro-batches, but of a generator and its critic, of a closure that the optimizer evaluates,
    or of a step marked once per epoch.
    """
    spans = report.spans[report.spans["rank"].eq(rank)]
    spans = spans[spans["step"].isin(facts.measured_steps(report))]
    begin = spans.groupby(["step", "kind", "microbatch"])["id"].min()
    last = begin.groupby(["step", "kind"]).max().unstack()  # its kinds are columns
    return "optimizer" in last and bool((last["optimizer"] < last["backward"]).any())


# ---- memory -------------------------------------------------------------------------------------
def _peak(report: Tables) -> str:
    peak = amounts.peak(report)
    if peak is None:
        return "The bytes of tensors were not counted."
    held = sorted(peak.held.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {mb(size)}" for name, size in held if size)
    return f"{mb(peak.total)} on rank {peak.rank} in step {peak.step}: {parts}"


def _whole(report: Tables) -> str:
    """Which parameters of rank 0 are not sharded."""
    own = made_of(report, "parameters")
    whole = sorted((p for p in own if p["held"] == p["elements"]), key=lambda p: -p["bytes"])
    if report.world_size == 1 or not own:
        return ""
    if not whole:
        return "None: all parameters are sharded."
    size = mb(sum(p["bytes"] for p in whole))
    if len(whole) == len(own):
        return (
            f"All {len(own)} ({size}): rank 0 holds no sharded DTensor. Parts that the program has "
            "cut by hand count as whole, too."
        )
    names = ", ".join(f"{p['name']} ({mb(p['bytes'])})" for p in whole[:NAMED])
    names += f" and {len(whole) - NAMED} smaller" * (len(whole) > NAMED)
    return f"Rank 0 holds {len(whole)} of {count_of(len(own), 'parameter')} whole, {size}: {names}."


def _unknown(report: Tables, calls: pd.DataFrame) -> str:
    if report.clock == "predicted":
        return ""
    counted, observed = sorted(set(report.memory["step"])), report.meta.get("observed", ())
    on_gpu, apart = facts.device_of(report) == "cuda", 2e3 * facts.clock_uncertainty(report)
    holds = {flag: any(program.get(flag) for program in observed) for flag in UNKNOWN}
    holds["aside"] |= on_gpu and fully_sharded(report)
    holds |= {
        "shared": report.meta.get("shared_gpu"),
        "gloo": len(calls) and (not on_gpu or (observed and report.meta.get("backend") == "gloo")),
        "DDP": "DistributedDataParallel" in made_of(report, "modules"),
        "clocks": report.clock == "measured" and apart,
        "unended": observed and all(program.get("unended") for program in observed),
        "scratch": observed and counted,
    }
    unknown = [text.format(apart=apart) for name, text in UNKNOWN.items() if holds[name]]
    steps = report.steps[report.steps["step"].isin(facts.measured_steps(report))]
    counts = sorted({(steps["rank"] == rank).sum() for rank in facts.reported_ranks(report)})
    if len(counts) > 1:
        unknown.append(
            f"All that each rank did: ranks have from {counts[0]} to {counts[-1]} steps that "
            "count. Step 0 and what follows the last step of a rank are left out. traffic() "
            f"divides the bytes of every rank by {counts[-1]} steps."
        )
    if counted and counted[-1] < report.steps["step"].max():
        unknown.append(f"Memory after step {counted[-1]}: bytes were counted in steps {counted}.")
    return "\n".join(unknown)
