"""Lab 05: ZeRO-3 that gathers the next unit while this one computes.

The answer is a whole ZeRO-3. It runs two steps of timed units (timed.py) on 2 ranks, and the
recorded order of the second is replayed with stated costs. So the exposed time, in which a rank
waits for messages, is the same on every machine (Zhao+ 2023, arXiv:2304.11277, sec. 3.3.2). In the
first step an answer may learn the order of the units, as DeepSpeed does. If it keeps these limits,
it trains on 3 ranks, with the limits of `my_zero3` and one more unit of memory (zero3.py).
"""

from __future__ import annotations

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

GATHERS, EXPOSED, RIGHT = "gathers", "exposed time", "right"
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


def steps(watch: Any, answer: tuple, seed: int) -> list[tuple[float, dict[str, float]]]:
    """What every rank runs. Returns for each step (output of the units, {`RIGHT` or a known
    mistake: the output that it gives}).
    """
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
    rates = {RIGHT: lr, zero3.FIXED: zero3.TASK_LR, zero3.SUMMED: lr * RANKS}
    known = {words: values.clone() for words in rates}
    for step in range(STEPS):
        watch.label = f"step {step}"
        out = module(torch.zeros(1))
        sums = {words: numbers.sum().item() for words, numbers in known.items()}
        outputs.append((out.item(), sums))
        out.backward()
        zero.step()
        for words, numbers in known.items():
            numbers -= rates[words] * (numbers + (RANKS - 1) / 2)  # the mean of all gradients
    return outputs


def _look(notes: Notes, outcome: Outcome) -> None:
    for step, (out, known) in enumerate(outcome.results[0]):
        right = known.pop(RIGHT)
        wrong = f"step {step + 1}: the units' output is {out:.5g}, required: {right:.5g}; "
        near = (words for words, other in known.items() if abs(out - other) < 1e-4 * abs(other))
        wrong += next(near, f"{EARLY}, or with wrong parameters")
        if abs(out - right) > 1e-4 * right:  # the row of a right one is the training's
            notes.look(zero3.WEIGHTS, wrong, "")

    spans = outcome.report.spans.query("rank == 0")
    calls = outcome.report.collectives.query("rank == 0")
    work = spans[spans["kind"].isin(("forward", "backward")) & (spans["chunk"] > 0)]
    work = work.sort_values("id")
    gathers = calls[calls["op"] == "all_gather"]
    last = calls["phase"] == f"step {STEPS - 1}"
    units = _units(gathers, last)
    enough = units >= 2 * UNITS - 1  # with fewer, a unit was kept, which needs no gather
    if enough and (early := _early(spans, gathers, work)):
        notes.look(zero3.WEIGHTS, early, "")
    notes.where = ""
    few = f"{units:g} units are gathered in a step, required: {2 * UNITS}, or {2 * UNITS - 1} if "
    few += "the last unit stays whole between its forward and its backward"
    notes.look(GATHERS, "" if enough else few, f"{units:g} in a step")
    for position, row in enumerate(work.itertuples()):
        ahead = _units(gathers, gathers["span"] < row.id) - (position + 1)
        many = f"{ahead:g} units are gathered ahead when unit {row.chunk} begins its {row.kind}, "
        many += "required: at most 1"
        notes.look(GATHERS, many if ahead > 1 else "", f"{units:g} in a step")

    costs = {"forward": [FORWARD_S] * UNITS, "backward": [BACKWARD_S] * UNITS}
    timed = replayed(outcome.report, CLUSTER, **costs).query("rank == 0").set_index("id")
    first = min(calls["span"][last], default=work["id"].iloc[-2 * UNITS])
    seconds = timed["end"].max() - timed["start"][first]
    exposed = float(seconds) - UNITS * (FORWARD_S + BACKWARD_S)
    why = _why(spans, gathers, work)
    others = calls["wire_bytes"][last & (calls["op"] != "all_gather")].sum() / (UNITS * SENT)
    if not why and others > 1:
        why = f": reducing gradients sends {others:.3g} times the bytes of reduce-scatters"
    notes.at_most(EXPOSED, exposed, LIMIT_S, ms, why)


def _early(spans: Any, gathers: Any, work: Any) -> str:
    """The first unit that computes before its own gather has been waited for, in words, or "".

    The unit's output does not show that in every run: the gather may be over by chance, or the old
    parameters may still be in memory.
    """
    kept = 0
    for position, row in enumerate(work.itertuples()):
        kept += (row.kind, row.chunk) == ("backward", UNITS)  # the last unit, since its forward
        arrived = _units(gathers, gathers["span"].isin(_waited_for(spans, row.id)))
        if arrived < min(_units(gathers, gathers["span"] < row.id), position + 1 - kept):
            return f"the {row.kind} of unit {row.chunk} begins before its gather is over: {EARLY}"
    return ""


def _why(spans: Any, gathers: Any, work: Any) -> str:
    """The first unit of the last step during whose computation no gather is in flight, in words."""
    for row in work.iloc[-2 * UNITS :].itertuples():
        in_flight = set(gathers["span"][gathers["span"] < row.id]) - _waited_for(spans, row.id)
        if not in_flight and row.chunk != {"forward": UNITS, "backward": 1}[row.kind]:
            return f": no gather is in flight during the {row.kind} of unit {row.chunk}"
    return ""


def _units(gathers: Any, which: Any) -> float:
    """How many units these gathers gather, by their bytes."""
    return gathers["wire_bytes"][which].sum() / SENT


def _waited_for(spans: Any, before: int) -> set[int]:
    """The spans of the calls that were waited for before this span."""
    waits = spans[(spans["kind"] == "wait") & (spans["id"] < before)]
    return {id for ids in waits["after"] for id in ids}
