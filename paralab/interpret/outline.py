"""A step in outline: one rank per pipeline stage, one box per action, at any scale.

`predict` in full writes down every call of every rank: its rows grow with world size times
micro-batches times layers. But the ranks of a stage do the same, so do stages with equally many
blocks, and all micro-batches but the first and the last few repeat each other. So a plan's program
is folded where that is possible (programs/fold.py, deep.py). Where every micro-batch has copies
between tiers, or a learner's pass has changed the program, it is interpreted whole. Either way the
rows are the actions of one pipeline's ranks.

Times, bytes and the peak are those of the program in full. The tables:

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

from collections import defaultdict
from itertools import count
from typing import Any

import numpy as np

from paralab.interpret.costs import Costs
from paralab.interpret.deep import Deep
from paralab.interpret.lines import SHORT, Actions, Box, Line, Step, transfers
from paralab.interpret.memory import moments
from paralab.interpret.memory_samples import kinds_of, samples, sizes_of
from paralab.interpret.spans import spans
from paralab.interpret.time import walked
from paralab.interpret.traffic import Member
from paralab.model.ops import Call
from paralab.programs.compile import compiled
from paralab.programs.fold import folds
from paralab.programs.instructions import COMPUTE
from paralab.programs.program import Program
from paralab.report.tables import COLUMNS, KIND, LETTER, Made, by_column
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory.order import CODE, F, W

TYPES = {"lane": object, "kind": object} | dict.fromkeys(("start", "end", "cost"), float)
Rows = dict[str, np.ndarray]
ARROWS = 20_000  # boxes: with more, the picture has no arrows, for no reader follows them


def outline(
    spec: ModelSpec, plan: Plan, cluster: Cluster, *, optimizer: str, steps: int
) -> tuple[dict[str, Made], dict[str, float]]:
    """(the report's tables for ``steps`` steps; seconds per step, averaged over ranks, in which
    calls are in flight, in which they are hidden behind work of the rank, and the same for copies).
    """
    if folds(plan):
        step = Deep(spec, plan, cluster, optimizer).step()
    else:
        step = whole(compiled(spec, plan, optimizer=optimizer), cluster)
    names = ("communication", "communication hidden", "copies", "copies hidden")
    moving = sum((line.moving for line in step.lines), np.zeros(4)) / plan.pp
    return tables(plan, step, steps), dict(zip(names, moving.tolist(), strict=True))


def whole(program: Program, cluster: Cluster) -> Step:
    """The step of a program that is not folded."""
    costs, ranks = Costs(program, cluster), range(len(program.codes))
    times = walked(program, costs)
    lines, held = [], []
    walks = [list(moments(program, pp, gloo=not cluster.gpus)) for pp in ranks]
    kinds = kinds_of(walks)
    device = np.array([tier == "device" for tier, _ in kinds])
    for pp, walk in enumerate(walks):
        mine, last = actions_of(program, pp), np.array(times.last[pp])
        first = np.r_[0, last[:-1] + 1]
        actions = mine._replace(first=first[mine.first], last=last[mine.last])
        lines.append(line := Line.of(times, pp, actions))
        line.table.transfers = transfers(costs, pp, dict(enumerate(line.table.code)))
        _, *both = zip(*walk, strict=True)
        tops, behind = (sizes_of(helds, kinds).T for helds in both)
        held.append(samples(behind, tops[:, 1:], line.left[last], mine.last, device))
    return Step(lines, kinds, held, costs)


def actions_of(program: Program, pp: int) -> Actions:
    """The actions in a rank's list; in a relay, parts of the model stand in place of stages."""
    code, part_of = program.codes[pp], {}
    if program.plan.relays:
        parts = enumerate(program.model.parts)
        part_of = {op: number for number, (_, i, j) in parts for op in range(i, j)}
    ends_of: dict[tuple, list[int]] = {}
    for position, span in enumerate(spans(program, code)):
        ins = code[position]
        if span and span[0] in LETTER and ins.op in COMPUTE:
            stage = part_of.get(ins.at[0], span[2])
            action = stage, CODE[LETTER[span[0]]], span[1]
            ends_of.setdefault(action, [position, 0])[1] = position
    return Actions(*np.array([(*action, *ends) for action, ends in ends_of.items()]).T)


def tables(plan: Plan, step: Step, steps: int) -> dict[str, Made]:
    """The report's tables of ``steps`` steps, all alike."""
    rows: dict[str, list[tuple]] = {"collectives": [], "copies": []}
    for line in step.lines:
        _add_sums(rows, step.costs, line)
    ranks = range(0, plan.world_size, plan.dp * plan.tp)
    rows["memory"] = [
        (rank, 0, moment, *kind, size)
        for rank, samples in zip(ranks, step.held, strict=True)
        for moment, sizes in samples
        for kind, size in zip(step.kinds, sizes.tolist(), strict=True)
    ]
    rows["steps"] = [(rank, 0, 0.0, end, 0.0) for rank, end in zip(ranks, step.ends, strict=True)]
    of_step = {"spans": _spans(plan, step), **by_column(rows)}
    length = float(step.ends.max())
    return {name: _repeated(name, table, steps, length) for name, table in of_step.items()}


def _add_sums(rows: dict[str, list[tuple]], costs: Costs, line: Line) -> None:
    """Add a rank's rows: each sums all calls, or copies, that agree in the other columns."""
    plan, table, symbols = costs.plan, line.table, line.symbol
    member = Member(costs.program, line.pp * plan.dp * plan.tp, costs.cluster.node_of)
    count = np.bincount(symbols, minlength=len(table.code)).tolist()
    first = np.zeros(len(count), int)
    first[symbols[::-1]] = np.arange(len(symbols))[::-1]
    sums: dict[tuple, list] = {}  # payload, bytes sent, seconds, begin of the first
    for symbol in sorted(table.transfers, key=first.__getitem__):
        for (what, seconds), each in table.transfers[symbol].items() if count[symbol] else ():
            *row, payload, wire = member.row(what) if type(what) is Call else (*what, 0)
            times, start = each * count[symbol], float(line.entered[first[symbol]])
            sums_of_row = sums.setdefault(tuple(row), [0, 0, 0.0, start])
            for at, amount in enumerate((payload, wire, seconds)):
                sums_of_row[at] += times * amount
    for row, (payload, wire, seconds, start) in sums.items():
        times = start, start + seconds, -1
        if len(row) == 3:  # lane, op and category
            rows["copies"].append((member.rank, 0, *row, payload, *times))
        else:  # `_repeated` numbers the calls
            rows["collectives"].append((0, member.rank, 0, *row, payload, wire, *times))


def _spans(plan: Plan, step: Step) -> dict[str, Any]:
    timed = [line.action_times for line in step.lines]
    start, end, cost, copies, after = map(np.concatenate, zip(*timed, strict=True))
    stage, letter, microbatch, *_ = map(
        np.concatenate, zip(*(line.actions for line in step.lines), strict=True)
    )
    pp = np.repeat(np.arange(plan.pp), [len(line.actions.first) for line in step.lines])
    short, forward = SHORT * float(step.ends.max()), letter == F
    boxes = [box for line in step.lines for box in line.boxes(short)]
    # The time that an action adds up and copies is drawn as one box: at the end of a forward, and
    # at the beginning of a backward, because the pipeline begins with a forward's compute and ends
    # with a backward's.
    begin, took = np.r_[np.where(forward, end - copies, start), end], np.r_[copies, after]
    at = np.flatnonzero(took > 0)
    begin, took = begin[at], took[at]
    copied = _rows(pp=pp[at % len(pp)], kind="copy", start=begin, end=begin + took, cost=took)
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
    columns = {name: [getattr(box, name) for box in boxes] for name in Box._fields}
    rows = _joined(actions, _rows(**columns), copied)
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
    columns = usual | {"after": -1} | columns
    typed = {name: np.asarray(value, TYPES.get(name, int)) for name, value in columns.items()}
    return {name: np.broadcast_to(value, typed["start"].shape) for name, value in typed.items()}


def _joined(*rows: Rows) -> Rows:
    return {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}


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
    # A backward that recomputes begins before it receives: the gap before it is for another.
    after[rows["end"][after] > until[gap] + SHORT * ends.max()] = -1
    return _rows(pp=np.r_[pp, pp[last]][gap], start=begin[gap], end=until[gap], after=after)


def _repeated(name: str, table: dict[str, Any], steps: int, length: float) -> Made:
    """The rows of all steps, each ``length`` seconds after the one before; memory is recorded in
    the first step only.
    """
    n, steps = len(table["rank"]), 1 if name == "memory" else steps
    turn = np.repeat(np.arange(steps), n)
    columns = Made()
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
            columns[column] = np.tile(np.fromiter(table[column], object, n), steps)
        else:
            values = np.tile(np.asarray(table[column], kind), steps)
            later = column in ("start", "end", "time")
            columns[column] = values + turn * (length if later else n * (column == "id"))
    if name == "collectives":  # numbered on through the steps, group by group
        numbers = defaultdict(count)
        groups = zip(columns["rank"].tolist(), columns["axis"], columns["ranks"], strict=True)
        columns["call"] = [next(numbers[group]) for group in groups]
    return columns
