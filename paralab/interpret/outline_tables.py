"""The tables of a step in outline: the rows of `Report`, from a `Step` (lines.py).

spans        one box per action; its ``cost`` is the time in which the rank computes, and for the
             rest of its length the rank is idle. Gaps between boxes are "wait". Then the end of the
             step; and on lanes of their own, from the last micro-batch on, the calls and copies of
             data parallelism and offload, merged where they overlap
collectives  one row per rank, op, axis, group, peer, level and phase: the sums of all its calls in
             a step. It begins with the first call and lasts as long as all of them together
copies       one row per rank, lane, op and category, likewise
memory       per rank the peak, and samples
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from paralab.interpret.lines import SHORT, Step
from paralab.interpret.outline_parts import Box
from paralab.report.tables import COLUMNS, KIND, by_column
from paralab.spec import Plan
from paralab.theory.order import F, W

TYPES = {"lane": object, "kind": object} | dict.fromkeys(("start", "end", "cost"), float)
ARROWS = 20_000  # boxes: with more, the picture has no arrows, for no reader follows them
Rows = dict[str, np.ndarray]


def tables(plan: Plan, step: Step, steps: int) -> dict[str, dict[str, Any]]:
    """The report's tables of ``steps`` steps, all alike."""
    sums = {key: row for line in step.lines for key, row in line.sums(step.costs).items()}
    of_step = {
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
    return {name: _repeated(name, table, steps, length) for name, table in of_step.items()}


def _spans(plan: Plan, step: Step) -> dict[str, Any]:
    timed = [line.action_times(actions) for line, actions in step.ranks]
    start, end, cost, copies, after = map(np.concatenate, zip(*timed, strict=True))
    stage, letter, microbatch, *_ = map(np.concatenate, zip(*step.actions, strict=True))
    pp = np.repeat(np.arange(plan.pp), [len(actions.first) for actions in step.actions])
    short, forward = SHORT * float(step.ends.max()), letter == F
    boxes = []
    for line, actions in step.ranks:
        boxes += line.boxes(actions.since, actions.after_all, short)
    # The time that an action adds up and copies is drawn as one box: at the end of a forward, and
    # at the beginning of a backward, because the pipeline begins with a forward's compute and ends
    # with a backward's.
    copied = np.concatenate([np.where(forward, end - copies, start), end])
    seconds = np.r_[copies, after]
    for at in np.flatnonzero(seconds > 0).tolist():
        begin, took = float(copied[at]), float(seconds[at])
        boxes.append(Box(pp[at % len(pp)], "compute", "copy", begin, begin + took, took))
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
    rows = _joined(actions, _rows(**others))
    rows = _joined(rows, _gaps(step.ends, rows))
    order = np.lexsort((rows["start"], rows["pp"]))
    rows = {name: column[order] for name, column in rows.items()}
    place = np.empty(len(order) + 1, int)
    place[order], place[-1] = np.arange(len(order)), -1  # -1, no box, stays -1
    stage = 0 * rows["stage"] if plan.relays else rows["stage"]
    return {
        **rows,
        "rank": rows["pp"] * plan.dp * plan.tp,
        "id": np.arange(len(order)),
        "stage": stage,
        "chunk": stage // plan.pp,
        "after": place[rows["after"]],
    }


def _rows(**columns: Any) -> Rows:
    """Rows of boxes; columns that are not given have the values of a wait."""
    usual = {"lane": "compute", "kind": "wait", "stage": 0, "microbatch": -1, "cost": 0.0}
    count = len(columns["start"])
    columns = {name: [value] * count for name, value in (usual | {"after": -1}).items()} | columns
    return {name: np.array(column, TYPES.get(name, int)) for name, column in columns.items()}


def _joined(rows: Rows, others: Rows) -> Rows:
    return {name: np.concatenate([column, others[name]]) for name, column in rows.items()}


def _sources(
    plan: Plan, stage: np.ndarray, letter: np.ndarray, microbatch: np.ndarray
) -> np.ndarray:
    """Per action the action of another stage whose result it receives, or -1."""
    if plan.pp == 1 or plan.relays:
        return np.full(len(stage), -1)
    maker = np.full((2, plan.stages + 2, plan.microbatches), -1)
    back, passes_on = (letter != F).astype(int), letter != W  # a W sends and receives nothing
    maker[back[passes_on], stage[passes_on] + 1, microbatch[passes_on]] = np.flatnonzero(passes_on)
    return np.where(passes_on, maker[back, stage + 2 * back, microbatch], -1)


def _gaps(ends: np.ndarray, rows: Rows) -> Rows:
    """The waits: gaps on the compute lane before a box, and before the end of the rank's step."""
    boxes = np.flatnonzero(rows["lane"] == "compute")
    boxes = boxes[np.lexsort((rows["start"][boxes], rows["pp"][boxes]))]
    pp, start, end = (rows[name][boxes] for name in ("pp", "start", "end"))
    last = np.flatnonzero(np.diff(pp, append=-1))
    before = np.r_[0.0, end[:-1]]
    before[np.r_[0, last[:-1] + 1]] = 0.0
    begin, until = np.r_[before, end[last]], np.r_[start, ends[pp[last]]]
    gap = np.flatnonzero(until - begin > SHORT * ends.max())
    after = np.r_[rows["after"][boxes], np.full(len(last), -1)][gap]
    return _rows(pp=np.r_[pp, pp[last]][gap], start=begin[gap], end=until[gap], after=after)


def _sums(plan: Plan, sums: dict[tuple, list]) -> dict[str, dict[str, list[Any]]]:
    rows: dict[str, list[tuple]] = {"collectives": [], "copies": []}
    for (pp, *what), (payload, wire, seconds, start) in sums.items():
        rank, times = pp * plan.dp * plan.tp, (start, start + seconds, -1)
        if len(what) == 3:  # lane, op and category
            rows["copies"].append((rank, 0, *what, payload, *times))
        else:  # `_repeated` numbers the calls
            rows["collectives"].append((0, rank, 0, *what, payload, wire, *times))
    return by_column(rows)


def _memory(plan: Plan, step: Step) -> dict[str, Any]:
    samples = [(pp, now, held) for pp, mine in enumerate(step.held) for now, held in mine]
    pp, time, size = map(np.array, zip(*samples, strict=True))
    each, kinds = len(step.kinds), step.kinds * len(samples)
    return {
        "rank": np.repeat(pp * plan.dp * plan.tp, each),
        "step": np.zeros(len(kinds), int),
        "time": np.repeat(time, each),
        "tier": [tier for tier, _ in kinds],
        "category": [category for _, category in kinds],
        "bytes": np.reshape(size, -1),
    }


def _repeated(name: str, table: dict[str, Any], steps: int, length: float) -> dict[str, Any]:
    """The rows of all steps, each ``length`` seconds after the one before; memory is recorded in
    the first step only.
    """
    n, steps = len(table["rank"]), 1 if name == "memory" else steps
    turn = np.repeat(np.arange(steps), n)
    columns: dict[str, Any] = {}
    for column, kind in COLUMNS[name].items():
        if column == "step":
            columns[column] = turn
        elif column == "after":
            after = np.tile(table[column], steps)
            columns[column] = [()] * len(after)
            if len(after) < ARROWS:
                ids = (after + turn * n).tolist()
                columns[column] = [(i,) if a >= 0 else () for i, a in zip(ids, after, strict=True)]
        elif kind in (str, tuple):
            values = table[column]
            columns[column] = (values if isinstance(values, list) else values.tolist()) * steps
        else:
            values = np.tile(np.asarray(table[column], kind), steps)
            later = column in ("start", "end", "time")
            columns[column] = values + turn * (length if later else n * (column == "id"))
    if name == "collectives":  # numbered on through the steps, phase by phase
        calls: Counter[tuple[int, str]] = Counter()  # so far, of each rank and phase
        for at, call in enumerate(zip(columns["rank"].tolist(), columns["phase"], strict=True)):
            columns["call"][at] = calls[call]
            calls[call] += 1
    return columns
