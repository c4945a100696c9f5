"""Lab 05: ZeRO-3 that gathers the next unit while this one computes.

The answer is a whole ZeRO-3. It runs two steps of timed units (timed.py), and the recorded order of
the second is replayed with stated costs. So the exposed time, in which a rank waits for messages,
is the same on every machine (Zhao+ 2023, arXiv:2304.11277, sec. 3.3.2). In the first step an answer
may learn the order of the units, as DeepSpeed does. If it keeps these limits, it trains with the
limits of `my_zero3` and one more unit of memory (zero3.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.exercises import zero3
from paralab.exercises.ddp import replayed
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import torch
from paralab.exercises.tries import Outcome
from paralab.exercises.verdict import Notes, ms
from paralab.spec import Cluster, Link

TRAINED = {3: 2}  # ranks: steps
RANKS, STEPS, UNITS = 2, 2, 6
SIZES = (3000, 1000)  # elements of each tensor of a unit: N divides their sum
MESSAGE_S, FORWARD_S, BACKWARD_S = 4e-3, 5e-3, 10e-3  # seconds per unit
SENT = 4 * sum(SIZES) * (RANKS - 1) // RANKS  # bytes by a rank in a gather or a reduce-scatter
LINK = Link(alpha=0.0, bandwidth=SENT / MESSAGE_S)
CLUSTER = Cluster(name="timed units", flops=1e12, memory_bandwidth=1e12, intra=LINK)
WITHOUT_S = 3 * UNITS * MESSAGE_S  # two gathers and a reduce-scatter of each unit
LIMIT_S = WITHOUT_S / 2

GATHERS, EXPOSED = "gathers", "exposed time"
EARLY = "a unit has computed before its parameters arrived"
REQUIRED = zero3.REQUIRED | {
    zero3.WEIGHTS: "N = 3: after 2 steps of SGD those of one process, on every rank",
    zero3.PEAK: zero3.room(zero3.UNITS + 1),
    GATHERS: "each unit for its forward and for its backward, at most one unit ahead",
    EXPOSED: f"at most {1e3 * LIMIT_S:.0f} ms, half of the time without prefetch",
}


@exercise(Takes("MyPrefetch(units, lr=...)", methods=("step", "gather")), required=REQUIRED)
def my_prefetch(tries: Tries) -> None:
    for notes, outcome in tries.run(steps, RANKS, where="timed units"):
        _look(notes, outcome)
    zero3.look_at_training(tries, TRAINED, zero3.UNITS + 1)


def steps(watch: Any, answer: tuple, seed: int) -> list[tuple[float, float]]:
    """What every rank runs. Returns for each step (output of the units, the right output)."""
    from paralab.exercises.timed import timed

    module, outputs = timed([SIZES] * UNITS, watch.recorder), []
    values = torch.rand(UNITS, len(SIZES), generator=torch.Generator().manual_seed(seed)) + 1
    for layer, numbers in zip(module, values, strict=True):
        layer.gradient = watch.group.index
        for weight, number in zip(layer.weights, numbers, strict=True):
            weight.data.fill_(number)
    watch.label = "before"
    lr = zero3.RATES[RANKS]
    zero = answer[0](list(module), lr=lr)
    for step in range(STEPS):
        watch.label = f"step {step}"
        out = module(torch.zeros(1))
        outputs.append((out.item(), values.sum().item()))
        out.backward()
        zero.step()
        values -= lr * (values + (RANKS - 1) / 2)  # the mean of the ranks' gradients
    return outputs


def _look(notes: Notes, outcome: Outcome) -> None:
    for step, (out, right) in enumerate(outcome.results[0]):
        wrong = f"step {step + 1}: the units' output is {out:.5g}, required: {right:.5g}; "
        wrong += f"{EARLY}, or with wrong parameters"
        if abs(out - right) > 1e-4 * right:  # the row of a right one is the training's
            notes.look(zero3.WEIGHTS, wrong, "")

    spans = outcome.report.spans.query("rank == 0")
    calls = outcome.report.collectives.query("rank == 0")
    work = spans[spans["kind"].isin(("forward", "backward")) & (spans["chunk"] > 0)]
    gathers = calls[calls["op"] == "all_gather"]
    progress = _progress(spans, gathers, work.sort_values("id"))
    last = calls["phase"] == f"step {STEPS - 1}"
    units = gathers["wire_bytes"][last].sum() / SENT
    enough = units >= 2 * UNITS - 1  # with fewer, a unit was kept, which needs no gather
    if enough and (early := _early(progress)):
        notes.look(zero3.WEIGHTS, early, "")
    notes.where = ""
    few = f"{units:g} units are gathered in a step, required: {2 * UNITS}, or {2 * UNITS - 1} if "
    few += "the last unit stays whole between its forward and its backward"
    notes.look(GATHERS, "" if enough else few, f"{units:g} in a step")
    for position, (row, called, _) in enumerate(progress):
        ahead = called - (position + 1)
        many = f"{ahead:g} units are gathered ahead when unit {row.chunk} begins its {row.kind}, "
        many += "required: at most 1"
        notes.look(GATHERS, many if ahead > 1 else "", f"{units:g} in a step")

    costs = {"forward": [FORWARD_S] * UNITS, "backward": [BACKWARD_S] * UNITS}
    timed = replayed(outcome.report, CLUSTER, **costs).query("rank == 0").set_index("id")
    first = min(calls["span"][last], default=progress[-2 * UNITS][0].id)
    seconds = timed["end"].max() - timed["start"][first]
    exposed = float(seconds) - UNITS * (FORWARD_S + BACKWARD_S)
    why = _why(progress)
    others = calls["wire_bytes"][last & (calls["op"] != "all_gather")].sum() / (UNITS * SENT)
    if not why and others > 1:
        why = f": reducing gradients sends {others:.3g} times the bytes of reduce-scatters"
    notes.at_most(EXPOSED, exposed, LIMIT_S, ms, why)


def _progress(spans: Any, gathers: Any, work: Any) -> list[tuple[Any, float, float]]:
    """(span, units whose gathers were called before it, and waited for) of each span in ``work``,
    by the gathers' bytes.
    """
    found = []
    for row in work.itertuples():
        waits = spans[(spans["kind"] == "wait") & (spans["id"] < row.id)]
        waited = gathers["span"].isin({id for ids in waits["after"] for id in ids})
        before = (gathers["span"] < row.id), waited
        found.append((row, *(gathers["wire_bytes"][which].sum() / SENT for which in before)))
    return found


def _early(progress: Sequence[tuple[Any, float, float]]) -> str:
    """The first unit that computes before its own gather has been waited for, in words, or "".

    The unit's output does not show that in every run: the gather may be over by chance, or the old
    parameters may still be in memory.
    """
    kept = 0
    for position, (row, called, waited) in enumerate(progress):
        kept += (row.kind, row.chunk) == ("backward", UNITS)  # the last unit, since its forward
        if waited < min(called, position + 1 - kept):
            return f"the {row.kind} of unit {row.chunk} begins before its gather is over: {EARLY}"
    return ""


def _why(progress: Sequence[tuple[Any, float, float]]) -> str:
    """The first unit of the last step during whose computation no gather is in flight, in words."""
    for row, called, waited in progress[-2 * UNITS :]:
        if called == waited and row.chunk != {"forward": UNITS, "backward": 1}[row.kind]:
            return f": no gather is in flight during the {row.kind} of unit {row.chunk}"
    return ""
