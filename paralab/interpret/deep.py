"""A folded program, interpreted: the step of a deep pipeline with any number of micro-batches.

A rank's list is the actions of its kind (programs/fold.py) in the order of the schedule, and the
messages between them; it is never written down. When its actions happen is a longest path through
the schedule (pipeline.py), with what each of them takes worked out once: compute, and the sums of
tensor parallelism between, run by themselves. Ranks of a kind whose groups cross nodes differently
have figures of their own. How a step ends, from its last gradients on, is timed as it stands.

What a rank holds follows from what every action and every message adds and ends, and has meanwhile:
that too is worked out once, from the few micro-batches, and summed up along the list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from paralab.interpret.costs import AWAITED, Awaited, Compute, Cost, Costs, Job
from paralab.interpret.memory import moments
from paralab.interpret.pipeline import (
    LETTERS,
    MESSAGE,
    POSTING,
    WAYS,
    Graph,
    Item,
    graph,
    number,
    way,
)
from paralab.interpret.serial import Serial
from paralab.interpret.time import Body, Times, body, walked
from paralab.interpret.traffic import Calls
from paralab.interpret.turns import (
    Said,
    Step,
    Sums,
    Turn,
    beside,
    boxes,
    copies_of,
    idle,
    in_flight,
    said,
    timed,
    worked,
)
from paralab.model.ops import Call
from paralab.programs.compile import laid_out
from paralab.programs.fold import END, FEW, Folded, Key, Lists
from paralab.programs.instructions import (
    CALL,
    COMPUTE,
    RECEIVE,
    SEND,
    WAIT,
    WORKERS,
    Code,
    Instr,
)
from paralab.spec import Cluster, ModelSpec, Plan

Held = dict[tuple[str, str], int]
GAP = "gap"  # what a rank waits for to come to its last actions in time
CONTROL = "control"  # a phase that no report counts
SAMPLES = 12  # of a rank's memory, in addition to its peaks


class Figures(NamedTuple):
    """What an action of a few micro-batches is and takes, on a group of ranks alike.

    before, behind  its instructions and their costs, before and behind the wait for a message;
                    ``waits``: whether there is one
    items           what the graph has of it, with their seconds, and of compute: its seconds (below
                    0: it is timed as it stands), those that are work, and `Deep.inner`
    work            seconds from the first compute to the last that the rank is not idle,
                    those of them in which it adds up and copies, and those behind
    said            its calls and copies, and how many there are of each
    """

    before: tuple[Code, list]
    behind: tuple[Code, list]
    waits: bool
    items: tuple[tuple, ...]
    work: tuple[float, float, float]
    said: Counter[Said]


class Effects(NamedTuple):
    """What the steps of a walk through a rank's list do, actions, messages and instructions of the
    end: bytes that each adds, and has at its peak beyond what there was before it.

    before      what there is before the first                                           (kinds,)
    added, top                                                                     (steps, kinds)
    row         per number of an action or a message (pipeline.py) which step it is
    end         those of the end
    """

    before: np.ndarray
    added: np.ndarray
    top: np.ndarray
    row: np.ndarray
    end: list[int]


class Tail(NamedTuple):
    """The end of a rank's list, from its last actions on.

    turns, actions  those actions here, and their numbers among all
    since, behind   where those of the last micro-batch begin, and what is behind them all
    """

    code: Code
    costs: list[Cost | Body]
    turns: list[Turn]
    actions: list[int]
    since: int
    behind: int


class Deep:
    """A plan's folded program on a cluster."""

    def __init__(self, spec: ModelSpec, plan: Plan, cluster: Cluster, optimizer: str) -> None:
        self.plan, self.cluster = plan, cluster
        self.program = laid_out(spec, plan, optimizer=optimizer, clips=False)
        self.folded, self.calls = Folded(self.program), Calls(self.program)
        self.v = plan.virtual_stages
        self.lanes: dict[int, list[str]] = {}
        # Whether an action of the last micro-batch takes as long by itself as where it stands.
        self.alone = not plan.reduces_often and (self.v == 1 or not plan.zero_stage)
        self._count(Costs(self.program, cluster))
        gloo = not cluster.gpus
        found = {like: list(_steps(some, gloo)) for like, some in self.folded.lists.items()}
        every = chain.from_iterable(found.values())
        self.kinds = sorted({kind for _, *three in every for held in three for kind in held})
        self.device = np.array([tier == "device" for tier, _ in self.kinds])
        self.effects = {like: self._effects(some) for like, some in found.items()}

    def without_overlap(self) -> Deep:
        """The same program where nothing overlaps: see serial.py."""
        other = copy(self)
        other._count(Serial(self.program, self.cluster))
        return other

    # ---- figures ---------------------------------------------------------------------------------
    def _count(self, costs: Costs) -> None:
        """What everything takes."""
        self.costs = costs
        self.messages = [self._messages(pp) for pp in range(self.plan.pp)]
        self.figures: dict[Any, dict[Any, Figures]] = {}
        # {``at`` of a CALL: seconds that its calls are in flight, and of these during compute}
        self.inner: dict[Any, np.ndarray] = {}
        self.copied: dict[Any, float] = {}  # and in which it adds up and copies
        self.group = [self._group(pp) for pp in range(self.plan.pp)]

    def _messages(self, pp: int) -> dict[tuple[str, str, int], tuple[Call, Cost]]:
        """The messages of a rank, and what they take."""
        plan, stages, found = self.plan, self.program.stages, {}
        for chunk, s in enumerate(range(pp, plan.stages, plan.pp)):
            for state, to, out in (("x", 1, 1), ("g", -1, 0)):
                for op, far, edge in ((SEND, to, out), (RECEIVE, -to, 1 - out)):
                    if 0 <= s + far < plan.stages:
                        v, peer = ((state, stages[s][edge], 0),), (s + far) % plan.pp
                        values = (v, ()) if op == SEND else ((), v)
                        ins = Instr(op, 0, -1, -1, *values, "pp", peer, "activations")
                        (call,) = self.calls.of(pp, ins)
                        found[op, state, chunk] = call, self.costs.of(pp, ins)
        return found

    def _group(self, pp: int) -> Any:
        """Equal for ranks of a kind whose groups cross nodes alike, and that pay the same for
        messages; works out their figures.
        """
        like = self.folded.like[pp]
        found = self.folded.lists[like]
        reaches = [self.costs.reach(pp, lane) for lane in self._lanes(like)]
        at = like, *reaches, *(takes.behind for _, takes in self.messages[pp].values())
        if at not in self.figures:
            self.begun = {
                ins.writes: ins
                for key, both in found.turns.items()
                for ins in chain.from_iterable(both)
                if key != END and ins.lane and ins.op != WAIT
            }
            self.figures[at] = {
                key: self._figures(pp, key, (at, key), key in found.waits, both)
                for key, both in found.turns.items()
            }
        return at

    def _lanes(self, like: int) -> list[str]:
        """Of whose calls ranks of a kind are a part, messages between stages apart."""
        if like not in self.lanes:
            turns = self.folded.lists[like].turns.values()
            every = list(chain.from_iterable(chain.from_iterable(turns)))
            found = {ins.lane for ins in every} - WORKERS - {"", "pp"}
            for ins in every:
                found |= {call.axis for call in self.calls.of(like, ins) if not ins.lane}
            self.lanes[like] = sorted(found)
        return self.lanes[like]

    def _figures(
        self, pp: int, key: Any, name: tuple, waits: bool, both: tuple[Code, Code]
    ) -> Figures:
        pieces = tuple(self._written(pp, (name, side), code) for side, code in enumerate(both))
        costs = [cost for _, some in pieces for cost in some]
        count = Counter(
            one for code in both for ins in code for one in said(self.costs, self.calls, pp, ins)
        )
        over = self.over(pp, key) if waits and key != END else 0.0
        items, work = [], (0.0, 0.0, 0.0)
        if key != END and key[2] == FEW - 1 and self.alone and not _computes(costs):
            takes = [body(self.program, self.costs, pp, code).seconds for code in both]
            items = [(Item(works=True), takes[0], -1.0)] * bool(both[0])
            items += [(Item(MESSAGE if waits else None, works=True), over + takes[1], -1.0)]
        elif key != END:
            items, work = self._items(pp, pieces, waits, over)
        return Figures(*pieces, waits, tuple(items), work, count)

    def _items(
        self, pp: int, pieces: tuple, waits: bool, over: float
    ) -> tuple[list[tuple], tuple[float, float, float]]:
        """What the graph has of an action, and its `Figures.work`."""
        made: list[tuple] = []
        # since: what is done behind the last compute, and of it what is added up of a call and else
        total, since = np.zeros(2), np.zeros(3)
        wait: tuple | None = None  # that nothing follows yet, and what goes with it
        ahead = 0.0  # seconds just done that are in the box of what is computed next (boxes.since)

        def add(
            item: Item, seconds: float, done: float, copies: float = 0.0, adds: float = 0.0
        ) -> None:
            nonlocal since, ahead
            made.append((item, seconds))
            since = since + (done, copies, adds)
            ahead = done - copies + (ahead if item.lane else 0.0)

        for side, (code, costs) in enumerate(pieces):
            if side and waits:
                wait = MESSAGE, over, over, 0.0
            for ins, cost in zip(code, costs, strict=True):
                works = ins.op in COMPUTE or ins.op == CALL
                if wait and not works:
                    add(Item(wait[0]), *wait[1:])
                    wait = None
                if type(cost) is Awaited:
                    ahead = 0.0
                    call = self.costs.of(pp, self.begun[ins.reads])
                    both = call.summed + call.behind
                    wait = ins.reads, both, both, call.summed
                elif works:
                    name, more, done, copies = wait or (None, 0.0, 0.0, 0.0)
                    ahead = done - copies if wait else ahead
                    takes = ahead + cost.seconds
                    work = takes - (idle(cost) if type(cost) is Body else 0.0)
                    inner = self.inner.get(ins.at, (0.0, 0.0)) if ins.op == CALL else (0.0, 0.0)
                    if any(one[0].works for one in made):
                        total += since[:2] + (done - ahead, copies)
                    made.append((Item(name, works=True), more + cost.seconds, takes, work, *inner))
                    total += work, self.copied.get(ins.at, 0.0) if ins.op == CALL else 0.0
                    since, wait, ahead = np.zeros(3), None, 0.0
                elif type(cost) is not Compute:
                    item = Item(lane=ins.lane, call=ins.writes)
                    add(item, cost.seconds, self.cluster.call_overhead)
                else:
                    add(Item(), cost.seconds, cost.seconds, adds=cost.seconds + ahead)
                    ahead = 0.0
        if wait:
            add(Item(wait[0]), wait[1], 0.0)
        return made, (*total.tolist(), float(since[1:].sum()))

    def _written(self, pp: int, name: tuple, code: Code) -> tuple[Code, list]:
        """Instructions and what they take; those that run by themselves as CALLs, and so those
        whose ops make calls.
        """
        made: Code = []
        costs: list[Cost | Body] = []
        for run in _runs(code):
            ins, cost = run[0], self.costs.of(pp, run[0])
            if len(run) > 1 or type(cost) is Compute and cost.inside:
                ins = Instr(CALL, (*name, len(made)))
                self.program.bodies[ins.at] = run
                cost = body(self.program, self.costs, pp, run)
                calls, _ = in_flight(run, cost.times, -1)
                self.inner[ins.at] = beside(calls, *worked(cost.times, -1))
                self.copied[ins.at] = float(
                    copies_of(run, cost.times, -1, {}, [(0, len(run))]).sum()
                )
            made.append(ins)
            costs.append(cost)
        return made, costs

    # ---- a step ----------------------------------------------------------------------------------
    @property
    def seconds(self) -> float:
        """Of the plan's step."""
        return float(self._walked()[-1].seconds)

    def _walked(self) -> tuple[Graph, np.ndarray, np.ndarray, list[np.ndarray], list[Tail], Times]:
        """The schedule's graph, its weights and moments; per rank which actions are its own, and
        the end of its list; and when everything in these ends happens.
        """
        found, weights = self._graph()
        now = found.moments(weights)
        mine = np.split(np.arange(len(found.rank)), np.flatnonzero(np.diff(found.rank)) + 1)
        tails = [self._tail(pp, found, weights, now, here) for pp, here in enumerate(mine)]
        program = replace(self.program, codes=[tail.code for tail in tails])
        costs = [tail.costs for tail in tails]
        times = walked(program, costs, self.cluster.call_overhead)
        return found, weights, now, mine, tails, times

    def step(self) -> Step:
        """The plan's step."""
        found, weights, now, mine, tails, times = self._walked()
        of = (found.letter * self.v + found.chunk) * FEW + found.few
        work = np.zeros((3, self.plan.pp, len(LETTERS) * self.v * FEW))
        for pp, at in enumerate(self.group):
            for key, one in self.figures[at].items():
                if key != END:
                    work[:, pp, number(*key, self.v)] = one.work
        posting = self.cluster.call_overhead * found.ahead
        start, end = now[found.first] - self.table[0][found.opens] - posting, now[found.last]
        cost, copies, more = work[:, found.rank, of]
        cost = cost + posting
        ends = np.array(times.ends)
        drawn, sums, held, moving = [], {}, [], np.zeros(4)
        came, flights = self._came(found, now), self._flights(found, now, weights)
        for pp, (tail, here) in enumerate(zip(tails, mine, strict=True)):
            if self.alone and tail.turns:
                for column, some in zip(
                    (start, end, cost, copies, more),
                    timed(tail.code, times, pp, tail.turns, self.program.bodies),
                    strict=True,
                ):
                    column[tail.actions] = some
            behind = tail.turns[-1].last + 1 if tail.turns else tail.behind
            more[here[-1]] = 0.0  # these are drawn
            drawn += boxes(tail.code, times, pp, tail.since, behind)
            counted = np.unique(of[here], return_index=True, return_counts=True)
            sums |= self._sums(
                pp, counted, start[here], found, came, times.entered[pp][tail.behind]
            )
            calls, jobs = in_flight(tail.code, times, pp, 0 if self.alone else tail.behind)
            calls = np.concatenate([np.array(calls).reshape(-1, 2), *flights[pp]])
            moving += self._moving(calls, jobs, *self._worked(pp, found, now, tail, times))
            held.append(self._held(pp, found.steps[pp], start[here], end[here], ends[pp]))
        return Step(
            found.rank,
            found.chunk * self.plan.pp + found.rank,
            np.array(list(LETTERS))[found.letter],
            found.microbatch,
            start,
            end,
            cost,
            copies,
            more,
            drawn,
            sums,
            ends,
            moving,
            self.kinds,
            held,
        )

    def _graph(self) -> tuple[Graph, np.ndarray]:
        """The schedule's graph, and its weights."""
        figures = [self.figures[at] for at in self.group]
        shapes: dict[tuple, int] = {}
        kind = tuple(
            shapes.setdefault(
                tuple(
                    (key, tuple(item for item, *_ in one.items))
                    for key, one in mine.items()
                    if key != END
                ),
                len(shapes),
            )
            for mine in figures
        )
        posting = self.cluster.call_overhead
        found = graph(self.plan, kind, tuple(shapes), posts=posting > 0)
        weights, self.table = np.zeros(found.base[-1]), np.zeros((4, found.base[-1]))
        for pp, mine in enumerate(figures):
            here, table = weights[found.base[pp] :], self.table[:, found.base[pp] :]
            here[POSTING] = posting
            for (op, state, chunk), (_, takes) in self.messages[pp].items():
                if op == SEND:
                    at = WAYS + 2 * chunk + (state == "g")
                    here[at], here[at + 2 * self.v] = takes.seconds, takes.behind
            for key, at in found.symbol[kind[pp]].items():
                for item, (_, seconds, *rest) in enumerate(mine[key].items):
                    here[at + item], table[: len(rest), at + item] = seconds, rest
        return found, weights

    def _tail(
        self, pp: int, found: Graph, weights: np.ndarray, now: np.ndarray, mine: np.ndarray
    ) -> Tail:
        """The end of a rank's list: its last actions, if what they begin goes on behind them,
        and all that follows. It comes to each of them when the graph says so, and messages are
        there then.
        """
        figures, made = self.figures[self.group[pp]], Tail([], [], [], [], 0, 0)
        code, costs, turns, actions, *_ = made
        until: list[tuple[float, float]] = []
        begun: set[tuple] = set()

        def gap(moment: float, more: float = 0.0) -> None:
            code.append(Instr(WAIT, GAP, reads=((GAP, len(until), 0),)))
            costs.append(AWAITED)
            until.append((moment, more))

        def add(piece: tuple[Code, list]) -> None:
            for ins, cost in zip(*piece, strict=True):
                if ins.op != WAIT or ins.reads in begun:  # of an action before these: long over
                    code.append(ins)
                    costs.append(cost)
                if ins.lane and ins.op != WAIT:
                    begun.add(ins.writes)

        for at in mine[-12 * self.v :] if not self.alone else mine[found.few[mine] == FEW - 1]:
            key = LETTERS[found.letter[at]], int(found.chunk[at]), int(found.few[at])
            one = figures[key]
            if self.alone and _computes([*one.before[1], *one.behind[1]]):
                continue
            begin = len(code)
            gap(now[found.begin[at]])
            add(one.before)
            if one.waits:
                gap(now[found.message[at]], self.over(pp, key))
            add(one.behind)
            works = [
                n for n in range(begin, len(code)) if code[n].op in COMPUTE or code[n].op == CALL
            ]
            stage = key[1] * self.plan.pp + pp
            turns.append(Turn(stage, key[0], int(found.microbatch[at]), works[0], works[-1]))
            actions.append(at)
        last = [
            turn.first for at, turn in zip(actions, turns, strict=True) if found.few[at] == FEW - 1
        ]
        since = min(last, default=len(code))
        gap(now[found.ends[pp]])
        behind = len(code)
        add(figures[END].before)
        for node, paid in found.sent[pp]:
            gap(now[node], float(weights[paid]))
        add(figures[END].behind)
        n = len(until)  # it comes to them as if it waited for jobs that end then
        ahead = [
            Instr(GAP, 0, writes=((GAP, at, 0),), lane=f"{GAP} {at}", phase=CONTROL)
            for at in range(n)
        ]
        takes = [Job(ins.lane, *both) for ins, both in zip(ahead, until, strict=True)]
        turns = [turn._replace(first=turn.first + n, last=turn.last + n) for turn in turns]
        return Tail(ahead + code, takes + costs, turns, actions, since + n, behind + n)

    def over(self, pp: int, key: Key) -> float:
        """Seconds that go with an action's wait for its message."""
        return self.messages[pp][RECEIVE, "x" if key[0] == "F" else "g", key[1]][1].behind

    # ---- calls -----------------------------------------------------------------------------------
    def _came(self, found: Graph, now: np.ndarray) -> dict[tuple[int, str, str], float]:
        """{(rank, op, state): when its first message of this kind leaves}."""
        first: dict[tuple[int, str, str], float] = {}
        if not len(found.left):
            return first
        state = (found.takes - found.base[found.sender] - WAYS) % 2
        left = now[found.left]
        for op, rank in ((SEND, found.sender), (RECEIVE, found.receiver)):
            code = rank * 2 + state
            earliest = np.full(2 * self.plan.pp, np.inf)
            np.minimum.at(earliest, code, left)
            for number_ in np.flatnonzero(earliest < np.inf).tolist():
                first[number_ // 2, op, "xg"[number_ % 2]] = earliest[number_]
        return first

    def _sums(
        self, pp: int, counted: tuple, start: np.ndarray, found: Graph, came: dict, end: float
    ) -> dict:
        sums, figures = Sums(self.costs, pp), self.figures[self.group[pp]]
        names = {number(*key, self.v): key for key in figures.keys() - {END}}
        every = [
            (names[code], start[at], n)
            for code, at, n in zip(*map(np.ndarray.tolist, counted), strict=True)
        ]
        for key, begin, times in [*every, (END, end, 1)]:
            for one, each in figures[key].said.items():
                sums.add(one, float(begin), times * each)
        counts = np.bincount(found.steps[pp], minlength=way(WAIT, "x", 0, self.v))
        for (op, state, chunk), (call, cost) in self.messages[pp].items():
            times = int(counts[way(op, state, chunk, self.v)])
            sums.add((call, cost.seconds), came[pp, op, state] - cost.seconds, times)
        return sums.found

    def _flights(
        self, found: Graph, now: np.ndarray, weights: np.ndarray
    ) -> list[list[np.ndarray]]:
        """Per rank when the messages and the calls of the graph are in flight, (k, 2) each."""
        made: list[list[np.ndarray]] = [[] for _ in range(self.plan.pp)]
        for rank, takes, node in (
            (found.sender, found.takes, found.left),
            (found.receiver, found.takes, found.left),
            (found.caller, found.asks, found.done),
        ):
            both = np.stack([now[node] - weights[takes], now[node]], 1)
            order = np.argsort(rank, kind="stable")
            edges = np.searchsorted(rank[order], np.arange(self.plan.pp + 1))
            for pp, mine in enumerate(made):
                mine.append(both[order[edges[pp] : edges[pp + 1]]])
        return made

    def _worked(
        self, pp: int, found: Graph, now: np.ndarray, tail: Tail, times: Times
    ) -> Iterator[np.ndarray]:
        """Of all compute of actions: begin, end, seconds of work, and `inner`."""
        symbol, node = found.works[pp]
        symbol, node = (some[self.table[0][symbol] >= 0.0] for some in (symbol, node))
        end = now[node]
        made = [np.stack([end - self.table[0][symbol], end, *self.table[1:, symbol]], 1)]
        if self.alone:  # the others are in the tail
            counts = [at < tail.behind for at in range(len(tail.code))]
            inner = [
                self.inner.get(ins.at, (0.0, 0.0)) if ins.op == CALL else (0.0, 0.0)
                for ins, cost in zip(tail.code[: tail.behind], tail.costs, strict=False)
                if type(cost) in (Compute, Body)
            ]
            last = np.stack(worked(times, pp, counts), 1)
            made.append(np.concatenate([last, np.array(inner).reshape(-1, 2)], 1))
        every = np.concatenate(made)
        return iter(every[np.argsort(every[:, 0], kind="stable")].T)

    def _moving(
        self, calls: np.ndarray, jobs: list, start: np.ndarray, end: np.ndarray, *work: np.ndarray
    ) -> np.ndarray:
        """`Step.moving` of a rank. Calls within CALLs count once, next to others in flight."""
        done, inner, hidden = work
        found = np.r_[beside(calls, start, end, done), beside(jobs, start, end, done)]
        found[0] += inner.sum() - beside(calls, start, end, inner)[1]
        found[1] += hidden.sum() - beside(calls, start, end, hidden)[1]
        return found

    # ---- memory ----------------------------------------------------------------------------------
    def _held(
        self, pp: int, steps: np.ndarray, start: np.ndarray, end: np.ndarray, over: float
    ) -> list[tuple[float, np.ndarray]]:
        """Samples: at the start, behind some actions, at the rank's peak, at the end."""
        effects, device = self.effects[self.folded.like[pp]], self.device
        rows = effects.row[steps]
        added, top = (table[:, device].sum(1) for table in (effects.added, effects.top))
        fullest = int((added[rows].cumsum() - added[rows] + top[rows]).argmax())
        actions = np.flatnonzero(steps < way(SEND, "x", 0, self.v))
        some = actions[np.unique(np.linspace(0, len(actions) - 1, SAMPLES).astype(int))]
        found, here, at = [(0.0, effects.before)], effects.before, 0
        for step in sorted({*some.tolist(), fullest, len(steps) - 1}):
            here = here + np.bincount(rows[at:step], minlength=len(effects.added)) @ effects.added
            at = step
            action = max(int(np.searchsorted(actions, step, "right")) - 1, 0)
            if step == fullest:
                found.append(((start[action] + end[action]) / 2, here + effects.top[rows[step]]))
            if step in some:
                found.append((end[action], here + effects.added[rows[step]]))
        here = here + effects.added[rows[at]]
        behind = here + effects.added[effects.end].cumsum(0)
        tops = behind - effects.added[effects.end] + effects.top[effects.end]
        return found + [
            ((end[-1] + over) / 2, tops[tops[:, device].sum(1).argmax()]),
            (over, behind[behind[:, ~device].sum(1).argmax()]),
        ]

    def _effects(self, steps: list[tuple]) -> Effects:
        """The steps of a walk through a few micro-batches: see `_steps`."""
        (_, before, *_), *steps = steps
        table = np.array(
            [[[held.get(kind, 0) for kind in self.kinds] for held in three] for _, *three in steps]
        )
        row = np.zeros(way(WAIT, "g", self.v - 1, self.v) + 1, int)
        for place, (key, *_) in reversed(list(enumerate(steps))):
            if key != END:
                row[number(*key, self.v) if key[0] in LETTERS else way(*key, self.v)] = place
        end = [place for place, (key, *_) in enumerate(steps) if key == END]
        return Effects(
            np.array([before.get(kind, 0) for kind in self.kinds]),
            table[:, 2] - table[:, 0],
            table[:, 1] - table[:, 0],
            row,
            end,
        )


def _computes(costs: list[Cost | Body]) -> bool:
    """Whether these are compute alone."""
    return all(type(cost) in (Compute, Body) for cost in costs)


def _steps(found: Lists, gloo: bool) -> Iterator[tuple[Any, Held, Held, Held]]:
    """A walk through the list of a few micro-batches, in steps: an action, a message, the wait for
    one, or an instruction of the end. Of each its key, what there is before it, at the device's
    peak, and behind it. First what there is before the list.
    """
    walk = moments(found.program, found.rank, gloo=gloo)
    before, here = next(walk)
    yield "", before, before, before
    step: list[Any] = []
    for (top, behind), key in zip(walk, found.labels, strict=True):
        if step and not (key == step[0] and key[0] in LETTERS):
            yield tuple(step)
            step = []
        if not step:
            step = [key, here, top, behind]
        step[2:] = max(step[2], top, key=_on_device), behind
        here = behind
    yield tuple(step)


def _on_device(held: Held) -> int:
    return sum(size for (tier, _), size in held.items() if tier == "device")


def _runs(code: Code) -> Iterator[Code]:
    """Instructions that run by themselves together, from one of compute to another; others one by
    one.
    """
    run: Code = []
    begun: set[tuple] = set()
    closed = 0  # so many of the run end with nothing in flight
    for ins in code:
        tensor, waits, works = ins.lane.startswith("tp"), ins.op == WAIT, ins.op in COMPUTE
        outside = ins.lane and not tensor or waits and ins.reads not in begun
        if outside or not (run or works):
            yield from _parted(run, closed)
            run, begun, closed = [], set(), 0
            yield [ins]
            continue
        run.append(ins)
        if waits:
            begun.discard(ins.reads)
        elif tensor:
            begun.add(ins.writes)
        if works and not begun:
            closed = len(run)
    yield from _parted(run, closed)


def _parted(run: Code, closed: int) -> Iterator[Code]:
    if closed:
        yield run[:closed]
    for ins in run[closed:]:
        yield [ins]
