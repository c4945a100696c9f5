"""The tables of a step in outline: the rows of `Report`, from a `Step` (lines.py).

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

from collections import Counter
from typing import Any

import numpy as np

from paralab.interpret.lines import SHORT, Step
from paralab.interpret.turns import Box
from paralab.report.tables import COLUMNS, KIND, by_column
from paralab.spec import Plan
from paralab.theory.order import F, W

TYPES = {"lane": object, "kind": object} | dict.fromkeys(("start", "end", "cost"), float)
ARROWS = 20_000  # boxes: of more, no reader follows from one to the other what waited for what
Rows = dict[str, np.ndarray]


def tables(plan: Plan, step: Step, steps: int) -> dict[str, dict[str, Any]]:
    """Of ``steps`` steps, all alike."""
    sums = {key: one for line in step.lines for key, one in line.sums(step.costs).items()}
    one = {
        "spans": _spans(plan, step),
        **_sums(plan, sums),
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
    timed = [line.actions(turns) for line, turns in step.ranks]
    start, end, cost, copies, more = map(np.concatenate, zip(*timed, strict=True))
    stage, letter, microbatch, *_ = map(np.concatenate, zip(*step.turns, strict=True))
    pp = np.repeat(np.arange(plan.pp), [len(turns.first) for turns in step.turns])
    short, forward = SHORT * float(step.ends.max()), letter == F
    boxes = [b for line, turns in step.ranks for b in line.boxes(turns.since, turns.behind, short)]
    # What an action adds up and copies is drawn at its end; of a backward at its begin, for the
    # first forward and the last backward are where the pipeline begins and ends.
    copied = np.concatenate([np.where(forward, end - copies, start), end])
    long = np.r_[copies, more]
    for at in np.flatnonzero(long > 0).tolist():
        now, took = float(copied[at]), float(long[at])
        boxes.append(Box(pp[at % len(pp)], "compute", "copy", now, now + took, took))
    actions = _rows(
        pp=pp,
        kind=np.array(list(KIND.values()), object)[letter],
        stage=stage,
        microbatch=microbatch,
        start=start + np.where(forward, 0.0, copies),
        end=end - np.where(forward, copies, 0.0),
        cost=cost - copies,
        after=_sources(plan, stage, letter, microbatch),
    )
    others = {name: [getattr(box, name) for box in boxes] for name in Box._fields}
    of = _joined(actions, _rows(**others))
    of = _joined(of, _gaps(step.ends, of))
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


def _rows(**columns: Any) -> Rows:
    """Boxes; a column that is not named is that of a wait."""
    usual = {"lane": "compute", "kind": "wait", "stage": 0, "microbatch": -1, "cost": 0.0}
    usual = {name: [one] * len(columns["start"]) for name, one in (usual | {"after": -1}).items()}
    return {name: np.array(some, TYPES.get(name, int)) for name, some in (usual | columns).items()}


def _joined(some: Rows, more: Rows) -> Rows:
    return {name: np.concatenate([column, more[name]]) for name, column in some.items()}


def _sources(
    plan: Plan, stage: np.ndarray, letter: np.ndarray, microbatch: np.ndarray
) -> np.ndarray:
    """The action that made what each one needs of another rank, or -1."""
    if plan.pp == 1 or plan.relays:
        return np.full(len(stage), -1)
    made = np.full((2, plan.stages + 2, plan.microbatches), -1)
    back, halves = (letter != F).astype(int), letter != W
    made[back[halves], stage[halves] + 1, microbatch[halves]] = np.flatnonzero(halves)
    return np.where(halves, made[back, stage + 2 * back, microbatch], -1)


def _gaps(ends: np.ndarray, of: Rows) -> Rows:
    """Where a rank computes nothing before something, or before its step ends."""
    here = np.flatnonzero(of["lane"] == "compute")
    here = here[np.lexsort((of["start"][here], of["pp"][here]))]
    pp, start, end = (of[name][here] for name in ("pp", "start", "end"))
    last = np.flatnonzero(np.diff(pp, append=-1))
    before = np.r_[0.0, end[:-1]]
    before[np.r_[0, last[:-1] + 1]] = 0.0
    begin, until = np.r_[before, end[last]], np.r_[start, ends[pp[last]]]
    late = np.flatnonzero(until - begin > SHORT * ends.max())
    after = np.r_[of["after"][here], np.full(len(last), -1)][late]
    return _rows(pp=np.r_[pp, pp[last]][late], start=begin[late], end=until[late], after=after)


def _sums(plan: Plan, sums: dict[tuple, list]) -> dict[str, dict[str, list[Any]]]:
    rows: dict[str, list[tuple]] = {"collectives": [], "copies": []}
    for (pp, *what), (payload, wire, seconds, start) in sums.items():
        rank, times = pp * plan.dp * plan.tp, (start, start + seconds, -1)
        if len(what) == 3:  # lane, op and category
            rows["copies"].append((rank, 0, *what, payload, *times))
        else:  # numbered when they are repeated
            rows["collectives"].append((0, rank, 0, *what, payload, wire, *times))
    return by_column(rows)


def _memory(plan: Plan, step: Step) -> dict[str, Any]:
    every = [(pp, now, held) for pp, some in enumerate(step.held) for now, held in some]
    pp, time, size = map(np.array, zip(*every, strict=True))
    each, kinds = len(step.kinds), step.kinds * len(every)
    return {
        "rank": np.repeat(pp * plan.dp * plan.tp, each),
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
        calls: Counter[tuple[int, str]] = Counter()  # so far, of each rank and phase
        for at, call in enumerate(zip(made["rank"].tolist(), made["phase"], strict=True)):
            made["call"][at] = calls[call]
            calls[call] += 1
    return made
