"""A folded program, interpreted: the step of a deep pipeline with any number of micro-batches.

A rank's list is the actions of its kind (programs/fold.py) in the order of the schedule, with the
messages between; it is never written down. What its instructions are and take is worked out once
(`Alike`): compute, and the sums of tensor parallelism between, as one CALL. When all of it happens
is a longest path through the schedule (pipeline.py). Ranks of a kind whose groups cross nodes
differently have figures of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import numpy as np

from paralab.interpret import pipeline, walk
from paralab.interpret.costs import AWAITED, Compute, Cost, Costs
from paralab.interpret.held import Effects, steps
from paralab.interpret.lines import Line, Step, Table, said
from paralab.interpret.listed import ARRIVAL, SENT, WAYS, way
from paralab.interpret.memory import Kind
from paralab.interpret.resumed import calls, share, until
from paralab.interpret.time import Times, walked
from paralab.interpret.turns import Turns
from paralab.interpret.walk import Item
from paralab.programs.compile import laid_out
from paralab.programs.fold import END, FEW, first_alike, lists
from paralab.programs.instructions import CALL, COMPUTE, RECEIVE, SEND, WAIT, WORKERS, Code, Instr
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory.order import CODE

NOTHING = Instr(WAIT), AWAITED
WAITED = {SEND: SENT, RECEIVE: ARRIVAL}


class Alike(NamedTuple):
    """What the list of a rank consists of, k instructions, messages first; of ranks alike the rest
    is the same.

    code     the instructions, and what each takes
    awaited  {number of a WAIT: what the call takes that it is for}
    weights  seconds of each, as the graph has them                                             (k,)
    shape    per action what the graph has of it
    ends     where in an action its first and its last compute are                  (2, 4, v, FEW)
    """

    code: list[tuple[Instr, Cost | Times]]
    awaited: dict[int, Cost]
    weights: np.ndarray
    shape: dict[Any, list[Item]]
    ends: np.ndarray


class Deep:
    """A plan's folded program on a cluster."""

    def __init__(self, spec: ModelSpec, plan: Plan, cluster: Cluster, optimizer: str) -> None:
        self.plan, self.cluster, self.v = plan, cluster, plan.virtual_stages
        self.program = laid_out(spec, plan, optimizer=optimizer, clips=False)
        self.like = first_alike(self.program)
        self.lists = {like: lists(self.program, like) for like in dict.fromkeys(self.like)}
        self._asked: tuple = ()
        self._count(Costs(self.program, cluster))

    def priced(self, costs: Costs) -> Deep:
        """The same program at other costs: on another cluster, or where nothing overlaps."""
        other = copy(self)
        other.__dict__.pop("memory", None)  # it is of these lists, on this cluster's devices
        other.cluster = costs.cluster
        other._count(costs)
        return other

    @property
    def seconds(self) -> float:
        """Of the plan's step."""
        ends = [left[-1] for left in self.graph.left]
        return float(self.graph.moments(self.weights)[ends].max())

    @property
    def peak(self) -> int:
        """Bytes of the device that holds most at its peak."""
        _, effects = self.memory
        lists = zip(self.like, self.graph.symbol, strict=True)
        return max(effects[like].peak(symbol) for like, symbol in lists)

    def step(self) -> Step:
        """The plan's step."""
        found, lines, turns = self.graph, [], []
        now = found.moments(self.weights)
        for pp, (one, table) in enumerate(zip(self.alike, self._tables(), strict=True)):
            symbol, left, over = found.symbol[pp], now[found.left[pp]], found.over[pp]
            end = np.maximum(now[over], np.r_[0.0, left[:-1]])
            at, node = found.calls[pp]
            when = np.stack([now[node] - one.weights[symbol[at]], now[node]], 1)
            waits = np.where(over > 0, end, -1.0)
            lines.append(Line(pp, table, symbol, left, waits, at, when))
            letter, chunk, few, microbatch, begin = found.actions[pp]
            first, last = begin + one.ends[:, letter, chunk, few]
            turns.append(Turns(chunk * self.plan.pp + pp, letter, microbatch, first, last))
        kinds, effects = self.memory
        held = [effects[self.like[line.pp]].samples(line) for line in lines]
        return Step(lines, turns, kinds, held, self.costs)

    # ---- what everything is and takes ------------------------------------------------------------
    def _count(self, costs: Costs) -> None:
        self.costs = costs
        self.alike: list[Alike] = []  # of every rank
        last: list[tuple] = [()] * self.plan.pp  # `Key` of a rank's last action, if it matters
        if self.cluster.wait_work:
            ends = (row[-1] for row in self.plan.actions())
            last = [(one.kind, one.stage // self.plan.pp, FEW - 1) for one in ends]
        known: dict[Any, tuple[Alike, int]] = {}
        shapes: dict[tuple, int] = {}
        kinds = []
        for pp, like in enumerate(self.like):
            at = like, last[pp], *(costs.reach(pp, lane) for lane in self._lanes[like])
            if at not in known:
                one = self._alike(pp, at)
                shape = tuple((key, tuple(items)) for key, items in one.shape.items())
                known[at] = one, shapes.setdefault(shape, len(shapes))
            one, kind = known[at]
            kinds.append(kind)
            weights = one.weights.copy()
            for at, wait, _, cost in self._messages(pp):
                weights[at], weights[wait] = cost.seconds, cost.after()
            self.alike.append(one._replace(weights=weights))
        posting = self.cluster.call_overhead
        asked = tuple(shapes), tuple(kinds), posting > 0
        if asked != self._asked:  # of the same, the graph that is there
            self._asked, self.graph = asked, pipeline.graph(self.plan, *asked)
        self.weights = np.concatenate([[0.0, posting], *(one.weights for one in self.alike)])

    @cached_property
    def _lanes(self) -> dict[int, list[str]]:
        """Of whose calls ranks of each kind are a part, messages between stages apart."""
        lanes = {}
        for like, some in self.lists.items():
            every = list(chain.from_iterable(some.turns.values()))
            found = {ins.lane for ins in every} - WORKERS - {"", "pp"}
            for ins in {ins[:2]: ins for ins in every if not ins.lane}.values():
                found |= {call.axis for call in self.costs.calls.of(like, ins)}
            lanes[like] = sorted(found)
        return lanes

    def _messages(self, pp: int) -> Iterator[tuple[int, int, Instr, Cost]]:
        """A rank's: (number in its table, number of the WAIT for it, instruction, cost)."""
        like = self.like[pp]
        for (op, *of), ins in self.lists[like].messages.items():
            if op != WAIT:
                ins = ins._replace(peer=(ins.peer + pp - like) % self.plan.pp)
                at, wait = (way(one, *of, self.v) for one in (op, WAITED[op]))
                yield at, wait, ins, self.costs.of(pp, ins)

    def _alike(self, pp: int, name: tuple) -> Alike:
        """Of a rank, whose kind, last action and groups have this name."""
        n, turns = len(WAYS) * 2 * self.v, self.lists[name[0]].turns  # n: of messages
        code, weights = [NOTHING] * n, [0.0] * n
        for at, _, *message in self._messages(pp):
            code[at] = tuple(message)
        timed = {
            key: [(ins, self.costs.of(pp, ins)) for ins in some] for key, some in turns.items()
        }
        actions = chain.from_iterable(some for key, some in timed.items() if key != END)
        begun = calls(actions)
        behind: dict[Any, list[float]] = {}
        if name[1]:
            every = begun | calls(timed[END])
            _, ends = until(self.cluster, timed[END], every)
            for key, some in timed.items():
                behind[key], _ = until(self.cluster, some, every, ends if key == name[1] else inf)
        awaited: dict[int, Cost] = {}
        bodies: dict[Any, Times] = {}  # of micro-batches alike the same
        shape: dict[Any, list[Item]] = {key: [] for key in turns}
        works = np.zeros((2, len(CODE), self.v, FEW), int)

        def add(ins: Instr, cost: Cost | Times, seconds: float) -> int:
            code.append((ins, cost))
            weights.append(seconds)
            return len(code) - 1

        for key, items in shape.items():
            computes, position = [], 0  # places of compute; of instructions
            for run in _runs(turns[key]):
                ins, cost = timed[key][position]
                position += len(run)
                after = behind[key][position - 1] if behind else inf
                if ins.op == WAIT and ins.at == SEND:
                    to = (ins.peer - name[0]) % self.plan.pp
                    items.append(Item(walk.WAIT, 0, (SENT, to)))
                    continue
                if ins.op == WAIT and ins.at == RECEIVE:
                    of = "x" if key[0] == "F" else "g", key[1], self.v
                    items.append(Item(walk.WAIT, way(ARRIVAL, *of), ARRIVAL))
                    continue
                computes += [len(items)] * (ins.op in COMPUTE)
                if len(run) > 1 or type(cost) is Compute and cost.inside:
                    if (several := (*run, after)) not in bodies:
                        # Nothing is in flight at its ends: it takes as long wherever it stands.
                        one = replace(self.program, codes=[*([] for _ in range(pp)), run])
                        bodies[several] = walked(one, self.costs, after)
                    ins, cost = Instr(CALL), bodies[several]
                call = begun[ins.reads] if ins.op == WAIT else None
                found = walk.item(pp, ins, cost, call, share(self.cluster, after))
                at = add(ins, cost, found.takes)
                if call:
                    awaited[at] = call
                elif ins.lane:
                    begun[ins.writes] = cost
                before = None if found.before is None else add(*NOTHING, found.before)
                items.append(found._replace(takes=at, before=before))
            if key != END:
                works[:, CODE[key[0]], *key[1:]] = computes[0], computes[-1]
        return Alike(code, awaited, np.array(weights), shape, works)

    def _tables(self) -> Iterator[Table]:
        """Of every rank; in those of ranks alike, messages alone differ."""
        made: dict[int, Table] = {}
        for pp, one in enumerate(self.alike):
            if id(one.code) not in made:
                first = made[id(one.code)] = Table(one.code, one.awaited)
                several = (
                    cost.lists[-1] if type(cost) is Times else [(ins, cost)]
                    for ins, cost in one.code
                )
                first.said = {at: said(self.costs, pp, some) for at, some in enumerate(several)}
            table = copy(made[id(one.code)])
            table.said = table.said.copy()
            for at, _, *message in self._messages(pp):
                table.said[at] = said(self.costs, pp, [message])
            yield table

    # ---- memory ----------------------------------------------------------------------------------
    @cached_property
    def memory(self) -> tuple[list[Kind], dict[int, Effects]]:
        """Kinds of memory, and what is done to it on each kind of rank."""
        gloo = not self.cluster.gpus
        walks = {like: list(steps(some, gloo)) for like, some in self.lists.items()}
        every = chain.from_iterable(walks.values())
        kinds = sorted({kind for _, *three in every for held in three for kind in held})
        sizes = {like: len(self.alike[like].weights) for like in walks}
        return kinds, {
            like: Effects(walk, self._symbols(like, walk), sizes[like], kinds)
            for like, walk in walks.items()
        }

    def _symbols(self, like: int, walk: list[tuple]) -> Iterator[int]:
        """The numbers of a walk's steps in the table of such ranks: of an action its last."""
        shape = self.alike[like].shape
        end = (item.takes for item in shape[END] if item.takes)
        for key, *_ in walk[1:]:
            if key == END:
                yield next(end)
            elif key[0] in CODE:
                yield shape[key][-1].takes
            else:
                yield way(WAITED[SEND] if key[0] == WAIT else key[0], *key[1:], self.v)


def _runs(code: Code) -> Iterator[Code]:
    """Instructions that run by themselves together, from one of compute to another, with nothing in
    flight behind; others one by one.
    """
    at = 0
    while at < len(code):
        end, begun = at + 1, set()
        for position in range(at, len(code) if code[at].op in COMPUTE else at):
            ins = code[position]
            if ins.op == WAIT:
                if ins.reads not in begun:
                    break
                begun.discard(ins.reads)
            elif ins.lane.startswith("tp"):
                begun.add(ins.writes)
            elif ins.lane:
                break
            elif ins.op in COMPUTE and not begun:
                end = position + 1
        yield code[at:end]
        at = end
