"""The tables of a step in outline: the rows of `Report`, from a `Step` of actions (turns.py).

spans        one box per action; its ``cost`` is what the rank computes in it, what is missing to
             its length is what it is idle for. Gaps between are "wait". Then the end of a
             step; and beneath, from the last micro-batch on, what is in flight of data parallelism
             and offload, run together
collectives  one row per rank, op, axis, group, peer, level and phase: the sums of all its calls in
             a step. From the start of the first on as long as all of them take together
copies       one row per rank, lane, op and category, likewise
memory       of every rank the peak, and samples between
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paralab.interpret.lines import SHORT
from paralab.interpret.turns import Box, Step
from paralab.report.tables import COLUMNS
from paralab.spec import Plan

KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight_grad"}
ARROWS = 20_000  # boxes: of more, no reader follows from one to the other what waited for what


def tables(plan: Plan, step: Step, steps: int) -> dict[str, dict[str, Any]]:
    """Of ``steps`` steps, all alike."""
    one = {
        "spans": _spans(plan, step),
        "collectives": _sums(plan, step, "collectives"),
        "copies": _sums(plan, step, "copies"),
        "memory": _memory(plan, step),
        "steps": {
            "rank": np.arange(plan.pp) * plan.dp * plan.tp,
            "start": np.zeros(plan.pp),
            "end": step.ends,
            "beside": np.zeros(plan.pp),
        },
    }
    length = float(step.ends.max())
    return {name: _repeated(name, table, steps, length) for name, table in one.items()}


def _spans(plan: Plan, step: Step) -> dict[str, Any]:
    n, boxes = len(step.start), list(step.boxes)
    # What an action adds up and copies is drawn at its end; of a backward at its begin, for the
    # first forward and the last backward are where the pipeline begins and ends.
    forward = step.letter == "F"
    copied = np.concatenate([np.where(forward, step.end - step.copies, step.start), step.end])
    long = np.r_[step.copies, step.more]
    for at in np.flatnonzero(long > 0).tolist():
        start, more = float(copied[at]), float(long[at])
        boxes.append(Box(step.pp[at % n], "compute", "copy", start, start + more, more))
    step = step._replace(
        start=step.start + np.where(forward, 0.0, step.copies),
        end=step.end - np.where(forward, step.copies, 0.0),
        cost=step.cost - step.copies,
    )
    of = {
        "pp": np.concatenate([step.pp, [box.pp for box in boxes]]).astype(int),
        "lane": np.array(["compute"] * n + [box.lane for box in boxes], object),
        "kind": np.concatenate(
            [_named(step.letter), np.array([box.kind for box in boxes], object)]
        ),
        "stage": np.concatenate([step.stage, np.zeros(len(boxes), int)]),
        "microbatch": np.concatenate([step.microbatch, np.full(len(boxes), -1)]),
        **{
            name: np.concatenate([getattr(step, name), [getattr(box, name) for box in boxes]])
            for name in ("start", "end", "cost")
        },
        "after": np.concatenate([_sources(plan, step), np.full(len(boxes), -1)]),
    }
    gaps = _gaps(step, of)
    of = {name: np.concatenate([some, gaps[name]]) for name, some in of.items()}
    order = np.lexsort((of["start"], of["pp"]))
    of = {name: some[order] for name, some in of.items()}
    place = np.empty(len(order) + 1, int)
    place[order], place[-1] = np.arange(len(order)), -1  # row -1 stays -1
    stage = 0 * of["stage"] if plan.relays else of["stage"]
    return {
        **of,
        "rank": of["pp"] * plan.dp * plan.tp,
        "id": np.arange(len(order)),
        "stage": stage,
        "chunk": stage // plan.pp,
        "after": place[of["after"]],
    }


def _named(letters: np.ndarray) -> np.ndarray:
    found = np.empty(len(letters), object)
    for letter, kind in KINDS.items():
        found[letters == letter] = kind
    return found


def _sources(plan: Plan, step: Step) -> np.ndarray:
    """The action that made what each one needs of another rank, or -1."""
    made = np.full((2, plan.stages + 2, plan.microbatches), -1)
    back = (step.letter != "F").astype(int)
    number, halves = np.arange(len(back)), step.letter != "W"
    if plan.pp == 1 or plan.relays:
        return np.full(len(back), -1)
    made[back[halves], step.stage[halves] + 1, step.microbatch[halves]] = number[halves]
    source = made[back, step.stage + 2 * back, step.microbatch]
    return np.where(halves, source, -1)


def _gaps(step: Step, of: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Where a rank computes nothing before something, or before its step ends."""
    here = np.flatnonzero(of["lane"] == "compute")
    here = here[np.lexsort((of["start"][here], of["pp"][here]))]
    pp, start, end = (of[name][here] for name in ("pp", "start", "end"))
    last = np.flatnonzero(np.diff(pp, append=-1))
    first = np.r_[0, last[:-1] + 1]
    before = np.r_[0.0, end[:-1]]
    before[first] = 0.0
    begin, until = np.r_[before, end[last]], np.r_[start, step.ends[pp[last]]]
    late = np.flatnonzero(until - begin > SHORT * step.ends.max())
    n = len(late)
    return {
        "pp": np.r_[pp, pp[last]][late],
        "lane": np.full(n, "compute", object),
        "kind": np.full(n, "wait", object),
        "stage": np.zeros(n, int),
        "microbatch": np.full(n, -1),
        "start": begin[late],
        "end": until[late],
        "cost": np.zeros(n),
        "after": np.r_[of["after"][here], np.full(len(last), -1)][late],
    }


def _sums(plan: Plan, step: Step, name: str) -> dict[str, list[Any]]:
    made: dict[str, list[Any]] = {column: [] for column in COLUMNS[name]}
    count: dict[tuple[int, str], int] = {}
    for (pp, *what), one in step.sums.items():
        if (len(what) == 3) != (name == "copies"):
            continue
        rank, times = pp * plan.dp * plan.tp, (one.start, one.start + one.seconds, -1)
        row: tuple = (rank, 0, *what, one.payload, *times)
        if name == "collectives":
            call = count[rank, what[-1]] = count.get((rank, what[-1]), -1) + 1
            row = (call, rank, 0, *what, one.payload, one.wire, *times)
        for column, value in zip(made.values(), row, strict=True):
            column.append(value)
    return made


def _memory(plan: Plan, step: Step) -> dict[str, Any]:
    rank, time, size = [], [], []
    for pp, samples in enumerate(step.held):
        rank += [pp * plan.dp * plan.tp] * len(samples)
        time += [float(now) for now, _ in samples]
        size += [held for _, held in samples]
    each, kinds = len(step.kinds), step.kinds * len(rank)
    return {
        "rank": np.repeat(rank, each),
        "step": np.zeros(len(kinds), int),
        "time": np.repeat(time, each),
        "tier": [tier for tier, _ in kinds],
        "category": [category for _, category in kinds],
        "bytes": np.reshape(size, -1),
    }


def _repeated(name: str, table: dict[str, Any], steps: int, length: float) -> dict[str, Any]:
    """The same rows for every step, later; memory is looked at in the first."""
    n, steps = len(table["rank"]), 1 if name == "memory" else steps
    turn = np.repeat(np.arange(steps), n)
    made: dict[str, Any] = {}
    for column, kind in COLUMNS[name].items():
        if column == "step":
            made[column] = turn
        elif column == "after":
            after = np.tile(table[column], steps)
            made[column] = [()] * len(after)
            if len(after) < ARROWS:
                ids = (after + turn * n).tolist()
                made[column] = [(i,) if a >= 0 else () for i, a in zip(ids, after, strict=True)]
        elif kind in (str, tuple):
            values = table[column]
            made[column] = (values if isinstance(values, list) else values.tolist()) * steps
        else:
            values = np.tile(np.asarray(table[column], kind), steps)
            later = column in ("start", "end", "time")
            made[column] = values + turn * (length if later else n * (column == "id"))
    if name == "collectives":  # numbered on through the steps, phase by phase
        keys = list(zip(table["rank"], table["phase"], strict=True))
        each = {key: keys.count(key) for key in dict.fromkeys(keys)}
        made["call"] = made["call"] + turn * np.tile([each[key] for key in keys], steps)
    return made
