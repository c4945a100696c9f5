"""The tables of a step in outline: the rows of `Report`, from theory/outline.py's times.

spans        one box per action; its ``cost`` is what the rank computes in it, what is missing to
             its length is what it stands still for. Gaps between are "wait", and say whose action
             they wait for. Beneath, gradient sync and copies between tiers, run together
collectives  one row per rank, op, axis, group, peer, level and phase: the sums of all its calls in
             a step. From the start of the first on as long as all of them take together
copies       one row per rank, lane, op and category, likewise
memory       as in full
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paralab.records.metrics import union
from paralab.records.tables import COLUMNS
from paralab.spec import ModelSpec, Plan
from paralab.theory import memory
from paralab.theory.engine import Compute, Copy, Wait
from paralab.theory.offload import tier_bytes
from paralab.theory.order import CODE, F
from paralab.theory.outline_program import Program, pipeline_ranks
from paralab.theory.outline_tail import Tail
from paralab.theory.outline_times import Timetable
from paralab.theory.predict_rows import Row

KINDS = np.array(["forward", "backward", "backward", "weight_grad"], object)  # of F, B, I, W
SHORT = 1e-9  # of a step: gaps shorter than that are rounding


def tables(
    model: ModelSpec, plan: Plan, times: Timetable, ends: Sequence[Tail], *, size: int,
    level: Callable[[int, int], str], optimizer: str, steps: int,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Of ``steps`` steps, all alike.

    size, level  bytes of a message between stages, and the level that it crosses between two ranks
    """
    one = {
        "spans": _spans(plan, times, ends),
        "collectives": _calls(plan, times, ends, size, level),
        "copies": _copies(plan, times, ends),
        "memory": _memory(model, plan, optimizer, times),
        "steps": _steps(plan, ends),
    }
    length = max(tail.now for tail in ends)
    return {name: _repeated(name, table, steps, length) for name, table in one.items()}


# ---- spans ---------------------------------------------------------------------------------------
def _spans(plan: Plan, times: Timetable, ends: Sequence[Tail]) -> dict[str, Any]:
    found, n = times.order, len(times.start)
    ranks = np.array(pipeline_ranks(plan))
    stage = np.zeros(n, int) if plan.relays else found.stage
    length = max(tail.now for tail in ends)
    after = found.source  # rows of actions come first
    actions = {
        "rank": ranks[found.rank], "kind": KINDS[found.kind], "stage": stage,
        "microbatch": found.microbatch, "start": times.start, "end": times.end - times.copies,
        "cost": times.cost, "after": after,
    }  # fmt: skip
    before = np.r_[0.0, times.end[:-1]]
    before[found.first[:-1]] = 0.0
    late = np.flatnonzero(times.start - before > SHORT * length)
    waits = {
        "rank": ranks[found.rank[late]], "kind": np.full(len(late), "wait", object),
        "stage": np.zeros(len(late), int), "microbatch": np.full(len(late), -1),
        "start": before[late], "end": times.start[late], "cost": np.zeros(len(late)),
        "after": after[late],
    }  # fmt: skip
    packs = np.flatnonzero(times.copies > 0)
    copies = {
        "rank": ranks[found.rank[packs]], "kind": np.full(len(packs), "copy", object),
        "stage": np.zeros(len(packs), int), "microbatch": np.full(len(packs), -1),
        "start": (times.end - times.copies)[packs], "end": times.end[packs],
        "cost": times.copies[packs], "after": np.full(len(packs), -1),
    }  # fmt: skip
    rest = _rest(plan, times, ends)
    lane = ["compute"] * (n + len(late) + len(packs)) + rest.pop("lane")
    table = {c: np.concatenate([actions[c], waits[c], copies[c], rest[c]]) for c in actions}
    order = np.lexsort((np.arange(len(lane)), table["start"], table["rank"]))
    place = np.empty(len(lane), int)
    place[order] = np.arange(len(lane))
    table = {c: values[order] for c, values in table.items()}
    table["after"] = np.where(table["after"] >= 0, place[table["after"]], -1)
    return {"id": np.arange(len(lane)), "lane": np.array(lane, object)[order],
            "chunk": table["stage"] // plan.pp, **table}  # fmt: skip


def _rest(plan: Plan, times: Timetable, ends: Sequence[Tail]) -> dict[str, Any]:
    """What comes after the last actions, and what goes on in other lanes."""
    rows: list[tuple] = []
    nows = times.end[times.order.first[1:] - 1]
    for rank, tail, now in zip(pipeline_ranks(plan), ends, nows.tolist(), strict=True):
        runs: list[list[Any]] = []  # kind, start, end, cost
        begun = tail.begun
        if begun > now:  # its last message is still on its way
            runs.append(["wait", now, begun, 0.0])
        program, lanes = tail.program, {}
        for position, start in tail.start.items():
            row, end = program.rows[position], tail.end[position]
            item = row.item
            if type(item) in (Compute, Wait):
                work = item.seconds if type(item) is Compute else 0.0
                if runs and runs[-1][0] == row.kind and runs[-1][2] == start:
                    runs[-1][2:] = [end, runs[-1][3] + work]
                elif end > start or work:
                    runs.append([row.kind, start, end, work])
            elif end > start and not row.axis.startswith("tp") and _shown(row, position, program):
                lanes.setdefault((row.lane, row.kind), []).append((start, end))
        rows += [(rank, "compute", *run) for run in runs if run[2] > run[1]]
        rows += [
            (rank, lane, kind, *both, 0.0 if kind == "comm" else both[1] - both[0])
            for (lane, kind), some in lanes.items() for both in union(some)
        ]  # fmt: skip
    rows += _lanes_beside(plan, times, ends)
    columns = list(zip(*rows, strict=True)) or [()] * 6
    n = len(rows)
    return {
        "rank": np.array(columns[0], int), "lane": list(columns[1]),
        "kind": np.array(columns[2], object), "start": np.array(columns[3], float),
        "end": np.array(columns[4], float), "cost": np.array(columns[5], float),
        "stage": np.zeros(n, int), "microbatch": np.full(n, -1), "after": np.full(n, -1),
    }  # fmt: skip


def _shown(row: Row, position: int, program: Program) -> bool:
    """Copies of an action are drawn with all actions' (`_lanes_beside`)."""
    return type(row.item) is not Copy or not program.head <= position < program.tail


def _lanes_beside(plan: Plan, times: Timetable, ends: Sequence[Tail]) -> list[tuple]:
    """Lanes between tiers while actions compute: from an action's first copy to its last."""
    rows: list[tuple] = []
    if plan.tiers is None:
        return rows
    found = times.order
    for action, start in enumerate(times.start.tolist()):
        index = int(found.rank[action])
        program = ends[index].program
        key = times.key(plan, action, program.count)
        for (lane, kind), (first, last, busy) in program.lanes[key].items():
            rank = pipeline_ranks(plan)[index]
            rows.append((rank, lane, kind, start + first, start + last, busy))
    return rows


# ---- calls and copies ----------------------------------------------------------------------------
def _calls(
    plan: Plan,
    times: Timetable,
    ends: Sequence[Tail],
    size: int,
    level: Callable[[int, int], str],
) -> dict[str, list[Any]]:
    made: dict[str, list[Any]] = {column: [] for column in COLUMNS["collectives"]}
    ranks = pipeline_ranks(plan)
    count: dict[tuple[int, str], int] = {}

    def add(rank: int, op: str, axis: str, group: tuple[int, ...], peer: int, where: str,
            phase: str, payload: int, wire: int, start: float, seconds: float) -> None:  # fmt: skip
        call = count[rank, phase] = count.get((rank, phase), -1) + 1
        values = (call, rank, 0, op, axis, group, peer, where, phase, payload, wire, start,
                  start + seconds, -1)  # fmt: skip
        for column, value in zip(made, values, strict=True):
            made[column].append(value)

    for index, (rank, tail) in enumerate(zip(ranks, ends, strict=True)):
        program = tail.program
        for key, found in program.sums(plan.microbatches)["calls"].items():
            op, axis, group, peer, where, phase = key
            if axis != "pp":  # of the same kind, but this rank's own
                shift = rank - program.rank
                group = tuple(member + shift for member in group)
                peer = peer + shift if peer >= 0 else peer
            start = _when(found.where, index, plan, times, tail)
            add(rank, op, axis, group, peer, where, phase, found.payload, found.wire, start,
                found.seconds)  # fmt: skip
    order = times.order
    pairs = order.rank[times.maker] * order.ranks + order.rank[times.user]
    for pair in np.unique(pairs).tolist():
        a, b = divmod(pair, order.ranks)
        here = np.flatnonzero(pairs == pair)
        start = float(times.left[here].min())
        seconds = float((times.came[here] - times.left[here]).sum())
        group = plan.ranks("pp", ranks[a])
        payload = size * len(here)
        add(ranks[a], "send", "pp", group, ranks[b], level(a, b), "activations", payload, payload,
            start, seconds)  # fmt: skip
        add(ranks[b], "recv", "pp", group, ranks[a], level(a, b), "activations", payload, 0,
            start, seconds)  # fmt: skip
    return made


def _when(where: Any, index: int, plan: Plan, times: Timetable, tail: Tail) -> float:
    """When the first call of a sum begins on the rank."""
    key, offset = where
    if key is None:
        return tail.start[offset]
    return times.first(plan, index, key) + offset


def _copies(plan: Plan, times: Timetable, ends: Sequence[Tail]) -> dict[str, list[Any]]:
    made: dict[str, list[Any]] = {column: [] for column in COLUMNS["copies"]}
    for index, (rank, tail) in enumerate(zip(pipeline_ranks(plan), ends, strict=True)):
        for key, found in tail.program.sums(plan.microbatches)["copies"].items():
            start = _when(found.where, index, plan, times, tail)
            values = (rank, 0, *key, found.payload, start, start + found.seconds, -1)
            for column, value in zip(made, values, strict=True):
                made[column].append(value)
    return made


# ---- memory and steps ----------------------------------------------------------------------------
def _memory(model: ModelSpec, plan: Plan, optimizer: str, times: Timetable) -> dict[str, list[Any]]:
    made: dict[str, list[Any]] = {column: [] for column in COLUMNS["memory"]}
    found = times.order
    for index, rank in enumerate(pipeline_ranks(plan)):
        here = slice(found.first[index], found.first[index + 1])
        kind, end = found.kind[here], times.end[here]
        fullest = memory.fullest(model, plan, rank)[0]
        is_it = (kind == F) & (found.microbatch[here] == fullest.microbatch)
        if not plan.relays:
            is_it &= found.stage[here] == fullest.stage
        backward = (kind == CODE["B"]) | (kind == CODE["I"])
        when = {"forward": end[is_it][-1], "backward": end[backward][-1]}
        beyond = tier_bytes(model, plan, optimizer=optimizer, rank=rank)
        for moment, held in memory.moments(model, plan, optimizer=optimizer, rank=rank).items():
            for tier, categories in {"device": held, **beyond}.items():
                for category, size in categories.items():
                    values = (rank, 0, float(when[moment]), tier, category, size)
                    for column, value in zip(made, values, strict=True):
                        made[column].append(value)
    return made


def _steps(plan: Plan, ends: Sequence[Tail]) -> dict[str, list[Any]]:
    n = len(ends)
    return {"rank": list(pipeline_ranks(plan)), "step": [0] * n, "start": [0.0] * n,
            "end": [tail.now for tail in ends], "beside": [0.0] * n}  # fmt: skip


def _repeated(name: str, table: dict[str, Any], steps: int, length: float) -> dict[str, Any]:
    """The same rows for every step, later."""
    n = len(table["rank"])
    turn = np.repeat(np.arange(steps), n)
    made: dict[str, Any] = {}
    for column, kind in COLUMNS[name].items():
        if column == "step":
            made[column] = turn
            continue
        if column == "after":
            after = np.tile(table[column], steps)
            made[column] = list(zip((after + turn * n).tolist(), strict=True))
            for row in np.flatnonzero(after < 0).tolist():
                made[column][row] = ()
            continue
        if kind in (str, tuple):
            values = table[column] if isinstance(table[column], list) else table[column].tolist()
            made[column] = values * steps
            continue
        values = np.tile(np.asarray(table[column], kind), steps)
        if column in ("start", "end", "time"):
            values = values + turn * length
        elif column == "id":
            values = values + turn * n
        made[column] = values
    if name == "collectives":  # numbered on through the steps, phase by phase
        sizes: dict[tuple[int, str], int] = {}
        for key in zip(table["rank"], table["phase"], strict=True):
            sizes[key] = sizes.get(key, 0) + 1
        each = np.array([sizes[k] for k in zip(table["rank"], table["phase"], strict=True)], int)
        made["call"] = made["call"] + turn * np.tile(each, steps)
    return made
