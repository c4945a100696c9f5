"""A folded program, timed: the step of a deep pipeline with any number of micro-batches.

A rank's list is the actions of its kind of rank (programs/fold.py) in the order of the schedule,
with the messages in between. The list is never written down. Its distinct instructions and their
costs are worked out once (`Parts`), where compute, with the sums of tensor parallelism in it, is
one CALL. When everything happens is a longest path through the schedule (pipeline.py). Ranks of one
kind whose groups are spread differently over nodes have costs of their own.
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
from paralab.interpret.lines import Actions, Line, Step, Table, transfers
from paralab.interpret.listed import ARRIVAL, MESSAGE_OPS, RECEIVED, SENT, message_index
from paralab.interpret.memory import Kind
from paralab.interpret.memory_samples import Effects, kinds_of, steps
from paralab.interpret.resumed import costs_of_calls, share, work_until_wait
from paralab.interpret.time import Timed, Times, walked
from paralab.interpret.walk import Item
from paralab.programs.compile import laid_out
from paralab.programs.fold import END, FEW, first_alike, lists
from paralab.programs.instructions import CALL, COMPUTE, RECEIVE, SEND, WAIT, WORKERS, Code, Instr
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory.order import CODE

NOTHING = Instr(WAIT), AWAITED
WAITED = {SEND: SENT, RECEIVE: ARRIVAL}


class Parts(NamedTuple):
    """The k distinct instructions of a rank's list: first its messages, then the rest, which is the
    same for all ranks of a kind.

    code     the instructions, each with its cost; for a CALL that stands for several the `Times`
    awaited  {index of a WAIT: cost of the call that it waits for}
    weights  seconds that each takes, as the graph of moments adds them (k,)
    took     of a call those from its begin until it is over for the rank (k,)
    shape    {key of an action, or `END`: its `Item`s, whose ``takes`` and ``before`` are indices}
    ends     positions of the first and the last compute among an action's items (2, 4, v, FEW)
    """

    code: list[tuple[Instr, Cost | Times]]
    awaited: dict[int, Cost]
    weights: np.ndarray
    took: np.ndarray
    shape: dict[Any, list[Item]]
    ends: np.ndarray


class Deep:
    """A plan's folded program on a cluster.

    like   per pipeline rank the first rank of its kind; ``lists``: the folded list of each of these
    parts  per pipeline rank its `Parts`
    graph  when everything happens, as a function of ``weights``: the parts' weights, rank by rank
    """

    def __init__(self, spec: ModelSpec, plan: Plan, cluster: Cluster, optimizer: str) -> None:
        self.plan, self.cluster, self.v = plan, cluster, plan.virtual_stages
        self.program = laid_out(spec, plan, optimizer=optimizer, clips=False)
        self.like = first_alike(self.program)
        self.lists = {like: lists(self.program, like) for like in dict.fromkeys(self.like)}
        self.messages = {like: folded.messages for like, folded in self.lists.items()}
        self._graph_of: tuple = ()  # the arguments that the graph was made with
        self._price(Costs(self.program, cluster))

    def priced(self, costs: Costs) -> Deep:
        """The same program at other costs: on another cluster, or where nothing overlaps."""
        other = copy(self)
        other.__dict__.pop("memory", None)  # it depends on the parts, and on the cluster's devices
        other.cluster = costs.cluster
        other._price(costs)
        return other

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        ends = [left[-1] for left in self.graph.left]
        return float(self.graph.moments(self.weights)[ends].max())

    @property
    def peak(self) -> int:
        """Bytes on the device with the highest peak."""
        _, effects = self.memory
        lists = zip(self.like, self.graph.symbol, strict=True)
        return max(effects[like].peak(symbol) for like, symbol in lists)

    def step(self) -> Step:
        """Everything that happens in the step."""
        graph, lines = self.graph, []
        moments = graph.moments(self.weights)
        for pp, (parts, table) in enumerate(zip(self.parts, self._tables(), strict=True)):
            symbol, left, over = graph.symbol[pp], moments[graph.left[pp]], graph.over[pp]
            end = np.maximum(moments[over], np.append(0.0, left[:-1]))
            at, node = graph.calls[pp]
            when = np.stack([moments[node] - parts.took[symbol[at]], moments[node]], 1)
            waits = np.where(over > 0, end, -1.0)
            letter, chunk, few, microbatch, begin = graph.actions[pp]
            first, last = begin + parts.ends[:, letter, chunk, few]
            actions = Actions(chunk * self.plan.pp + pp, letter, microbatch, first, last)
            lines.append(Line(pp, table, symbol, left, waits, at, when, actions))
        kinds, effects = self.memory
        held = [effects[self.like[line.pp]].samples(line) for line in lines]
        return Step(lines, kinds, held, self.costs)

    # ---- the instructions and their costs --------------------------------------------------------
    def _price(self, costs: Costs) -> None:
        self.costs = costs
        self.parts: list[Parts] = []
        last: list[tuple] = [()] * self.plan.pp  # `Key` of a rank's last action, if it matters
        if self.cluster.wait_work:
            final = (row[-1] for row in self.plan.actions())
            last = [(action.kind, action.stage // self.plan.pp, FEW - 1) for action in final]
        known: dict[Any, tuple[Parts, int]] = {}
        shapes: dict[tuple, int] = {}
        kinds = []
        for pp, like in enumerate(self.like):
            name = like, last[pp], *(costs.reach(pp, lane) for lane in self._lanes)
            if name not in known:
                parts = self._parts(pp, like, last[pp])
                shape = tuple((key, tuple(items)) for key, items in parts.shape.items())
                known[name] = parts, shapes.setdefault(shape, len(shapes))
            parts, kind = known[name]
            kinds.append(kind)
            weights, took = parts.weights.copy(), parts.weights.copy()
            for at, wait, ins, cost in self._messages(pp):
                # A message has left after a SEND's weight, and after a RECEIVE's it has arrived.
                weights[at] = cost.late if ins.op == RECEIVE else cost.seconds
                weights[wait], took[at] = cost.after(), cost.seconds + cost.late_for(ins)
            self.parts.append(parts._replace(weights=weights, took=took))
        posting = self.cluster.call_overhead
        graph_of = tuple(shapes), tuple(kinds), posting > 0
        if graph_of != self._graph_of:  # else the graph stays, and only the weights change
            self._graph_of, self.graph = graph_of, pipeline.graph(self.plan, *graph_of)
        self.weights = np.concatenate([[0.0, posting], *(parts.weights for parts in self.parts)])

    @cached_property
    def _lanes(self) -> list[str]:
        """The lanes of all collectives; messages between stages have lanes of their own."""
        lanes = set()
        for like, folded in self.lists.items():
            for ins in chain.from_iterable(folded.code_of.values()):
                calls = self.costs.calls.of(like, ins) if ins.op in COMPUTE else ()
                lanes |= {ins.lane, *(call.axis for call in calls)}
        return sorted(lanes - WORKERS - {"", "pp"})

    def _messages(self, pp: int) -> Iterator[tuple[int, int, Instr, Cost]]:
        """(index in the table, index of its WAIT, instruction, cost) of each SEND and RECEIVE."""
        like = self.like[pp]
        for (op, *of), ins in self.messages[like].items():
            if op != WAIT:
                ins = ins._replace(peer=(ins.peer + pp - like) % self.plan.pp)
                at, wait = (message_index(end, *of, self.v) for end in (op, WAITED[op]))
                yield at, wait, ins, self.costs.of(pp, ins)

    def _parts(self, pp: int, like: int, last: tuple) -> Parts:
        """The `Parts` of a rank of the same kind as rank ``like``. last: key of its last action."""
        n, code_of = len(MESSAGE_OPS) * 2 * self.v, self.lists[like].code_of  # n: messages' indices
        code, weights = [NOTHING] * n, [0.0] * n
        for at, _, *message in self._messages(pp):
            code[at] = tuple(message)
        timed = {
            key: [(ins, self.costs.of(pp, ins)) for ins in body] for key, body in code_of.items()
        }
        actions = chain.from_iterable(body for key, body in timed.items() if key != END)
        begun = costs_of_calls(actions)
        calls, work = begun | costs_of_calls(timed[END]), {}  # work behind each instruction
        _, of_end = work_until_wait(self.cluster, timed[END], calls)
        for key, body in timed.items():
            after = of_end if key == last else inf
            work[key], _ = work_until_wait(self.cluster, body, calls, after)
        awaited: dict[int, Cost] = {}
        bodies: dict[Any, Times] = {}  # runs alike, in whatever block, are timed once
        shape: dict[Any, list[Item]] = {key: [] for key in code_of}
        ends = np.zeros((2, len(CODE), self.v, FEW), int)

        def add(ins: Instr, cost: Cost | Times, seconds: float) -> int:
            code.append((ins, cost))
            weights.append(seconds)
            return len(code) - 1

        for key, items in shape.items():
            computes, position = [], 0  # computes: where among the items compute is
            for run in _runs(code_of[key]):
                ins, cost = timed[key][position]
                position += len(run)
                after = work[key][position - 1]
                if ins.op == WAIT and ins.at == SEND:
                    to = (ins.peer - like) % self.plan.pp
                    items.append(Item(walk.WAIT, 0, to))
                    continue
                if ins.op == WAIT and ins.at == RECEIVE:
                    of = "x" if key[0] == "F" else "g", key[1], self.v
                    items.append(Item(walk.WAIT, message_index(ARRIVAL, *of), RECEIVED))
                    continue
                computes += [len(items)] * (ins.op in COMPUTE)
                if len(run) > 1 or type(cost) is Compute and cost.inside:
                    body = after, *self._alike(pp, timed[key][position - len(run) : position])
                    if body not in bodies:
                        # Nothing is in flight at its ends: it takes as long wherever it stands.
                        alone = replace(self.program, codes=[*([] for _ in range(pp)), run])
                        bodies[body] = walked(alone, self.costs, after)
                    ins, cost = Instr(CALL), bodies[body]
                call = begun[ins.reads] if ins.op == WAIT else None
                item = walk.item(ins, cost, call, share(self.cluster, after))
                at = add(ins, cost, item.takes)
                if call:
                    awaited[at] = call
                elif ins.lane:
                    begun[ins.writes] = cost
                before = None if item.before is None else add(*NOTHING, item.before)
                items.append(item._replace(takes=at, before=before))
            if key != END:
                ends[:, CODE[key[0]], *key[1:]] = computes[0], computes[-1]
        seconds = np.array(weights)
        return Parts(code, awaited, seconds, seconds, shape, ends)

    def _alike(self, pp: int, run: Timed) -> Iterator[tuple]:
        """What the times and the calls of a run depend on: the same for all blocks."""
        begun = {ins.writes: at for at, (ins, _) in enumerate(run) if ins.op != WAIT}
        for ins, cost in run:
            if ins.op == WAIT:
                yield cost, begun[ins.reads]
            else:
                yield ins.op, cost, ins.lane and self.costs.calls.of(pp, ins)

    def _tables(self) -> Iterator[Table]:
        """The `Table` of every rank. The tables of ranks alike differ in their messages only."""
        tables: dict[int, Table] = {}
        for pp, parts in enumerate(self.parts):
            if id(parts.code) not in tables:
                shared = tables[id(parts.code)] = Table(parts.code, parts.awaited)
                shared.transfers = transfers(self.costs, pp, dict(enumerate(parts.code)))
            table = copy(tables[id(parts.code)])
            messages = {at: tuple(message) for at, _, *message in self._messages(pp)}
            table.transfers = table.transfers | transfers(self.costs, pp, messages)
            yield table

    # ---- memory ----------------------------------------------------------------------------------
    @cached_property
    def memory(self) -> tuple[list[Kind], dict[int, Effects]]:
        """The kinds of memory, and what each kind of rank's instructions do to them."""
        gloo = not self.cluster.gpus
        walks = {like: list(steps(folded, gloo)) for like, folded in self.lists.items()}
        kinds = kinds_of(walks.values())
        return kinds, {
            like: Effects(walk, self._symbols(like, walk), len(self.parts[like].weights), kinds)
            for like, walk in walks.items()
        }

    def _symbols(self, like: int, walk: list[tuple]) -> Iterator[int]:
        """The index of each step of a walk in the table; an action has that of its last part."""
        shape = self.parts[like].shape
        end = (item.takes for item in shape[END] if item.takes)
        for key, *_ in walk[1:]:
            if key == END:
                yield next(end)
            elif key[0] in CODE:
                yield shape[key][-1].takes
            else:
                yield message_index(WAITED[SEND] if key[0] == WAIT else key[0], *key[1:], self.v)


def _runs(code: Code) -> Iterator[Code]:
    """Cut a list into runs. A run goes from one compute to another, and every call that it begins
    it also waits for; instructions that belong to no such run come one by one.
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
