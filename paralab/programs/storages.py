"""Which memory a value is made of, where several values share some. Torch-free.

A gradient, a shard, a unit's parameters are each a storage of their own. What lies between two ops
is not. Inside a branch the state (x, h) has the very x that the branch's norm keeps for backward;
what ops keep is mostly what they were given; and some ops hand on what they get: a sum over ranks
is made in place, and so is the addition that closes a branch.

So these values are made of storages with names: ("x", b) is what the op before boundary b wrote,
("g", b) its gradient. A value holds some that others may hold too, and a number of bytes that are
no other value's. A storage lives as long as a value that holds it, and counts once. What keeps for
backward makes an activation of it; what only hands it on leaves it what it was. What is computed a
second time is another storage, ("r", b): the first may still be on its way to another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from paralab.model.build import Model
from paralab.parallel.recompute import recomputed
from paralab.programs.instructions import Value
from paralab.spec import Plan

Name = tuple[str, int]  # ("x" | "r" | "g", boundary)
Sized = tuple[tuple[Name, int], ...]  # names and bytes
SHARING = frozenset(("x", "r", "g", "again", "back", "saved", "deferred"))  # kinds of values


class Held(NamedTuple):
    """What a value holds.

    own     bytes that are its alone
    shared  (name, bytes) of storages that others may hold too; they are ``category`` from now on
    passed  the same of those that it leaves what they were
    """

    category: str
    own: int
    shared: Sized = ()
    passed: Sized = ()


class Sharing:
    """The storages that a model's ops write and hand on."""

    def __init__(self, model: Model) -> None:
        self.model, ops = model, model.ops
        n = len(ops)
        self.x, self.g = list(range(n + 1)), list(range(n + 1))
        for b in range(1, n + 1):
            if ops[b - 1].passes_input:
                self.x[b] = self.x[b - 1]
        for b in reversed(range(n)):
            if ops[b].passes_grad:
                self.g[b] = self.g[b + 1]
        self.closed = {}  # boundary inside a branch -> the one behind it
        end = n
        for b in reversed(range(n)):
            end = b + 1 if ops[b].joins else end
            if b in model.inside:
                self.closed[b] = end

    def forward(self, at: int) -> tuple[Name, int]:
        """The storage of the last entry of the state at a boundary."""
        name = self.x[at]
        return ("x", name), self.model.item * self.model.ops[at - 1].out

    def backward(self, at: int) -> tuple[Name, int]:
        """The same of its gradient."""
        return ("g", self.g[at]), self.model.item * self.model.ops[at - 1].out

    def state(self, at: int) -> Sized:
        """The storages of the state there, which has two entries inside a branch."""
        inside = self.model.inside
        return tuple(map(self.forward, (inside[at], at) if at in inside else (at,)))

    def grads(self, at: int) -> Sized:
        """The same of its gradient."""
        return tuple(map(self.backward, (self.closed[at], at) if at in self.closed else (at,)))

    def kept(self, at: int) -> list[tuple[Name, int]]:
        """What an op keeps for backward of what it was given and returned."""
        op = self.model.ops[at]
        gathers = op.message is not None and op.message.forward == "all_gather"
        found = [self.forward(at)] if at and (op.keeps_input or gathers) else []
        return found + [self.forward(at + 1)] * op.keeps_result

    def put_aside(self, at: int) -> list[tuple[Name, int]]:
        """What waits between the two halves of its backward, of the same."""
        op = self.model.ops[at]
        found = [self.forward(at)] * op.defers_input + [self.backward(at + 1)] * op.defers_grad
        return found + [self.backward(at)] * op.defers_made


sharing_of = lru_cache(maxsize=64)(Sharing)  # the same for all programs of a model


class Storages:
    """What the values of one pipeline rank hold. stages: the rank's own, ops (i, j) of each."""

    def __init__(self, sharing: Sharing, plan: Plan, stages: Sequence[tuple[int, int]]) -> None:
        self.names, self.model, self.plan = sharing, sharing.model, plan
        self._known: dict[tuple, Held] = {}
        # Boundaries that are another rank's too.
        self._edges = frozenset(edge for stage in stages for edge in stage)
        ranges = recomputed(self.model, plan.recompute)
        # Where what is computed twice begins, by op.
        self._begin = {op: i for i, j in ranges for op in range(i, j)}
        # Boundaries whose state this rank keeps, to compute again what follows.
        starts = {i for i, _ in ranges}
        if plan.relays and plan.recompute == "full":
            starts.add(self.model.parts[-1][1])  # of the head, too
        whole = not plan.partition_activations
        self._kept = {b for b in starts if whole and any(i <= b < j for i, j in stages)}

    def held(self, value: Value) -> Held:
        """By a state, or by what is saved or deferred for backward."""
        key = value[:2]
        if key not in self._known:
            self._known[key] = self._held(*key)
        return self._known[key]

    def _held(self, kind: str, where: Any) -> Held:
        names = self.names
        if kind in ("saved", "deferred"):
            kept, of = ("keeps", names.kept) if kind == "saved" else ("deferred", names.put_aside)
            own = sum(getattr(op, kept) for op in self.model.ops[slice(*where)])
            return self._several(where, dict(pair for at in range(*where) for pair in of(at)), own)
        *others, last = names.grads(where) if kind == "g" else names.state(where)
        mine, others = (last,), tuple(others)
        if kind in ("r", "again"):  # the op in front of a boundary wrote it
            mine, others = self._again(mine, where - 1), self._again(others, where - 1)
        if kind == "back" and not self.plan.partition_activations:
            return Held("activations", 0, mine)
        if kind in ("again", "back"):
            return Held("buffers", 0, mine)
        return Held(self.category(kind, where), 0, mine, others)

    def _again(self, held: Sized, op: int) -> Sized:
        """What lies behind the beginning of a second forward that this op is in is another."""
        begin = self._begin.get(op, len(self.model.ops))
        return tuple(
            (("r", name[1]) if name[0] == "x" and name[1] > begin else name, size)
            for name, size in held
        )

    def _several(self, at: tuple[int, int], held: dict[Name, int], own: int) -> Held:
        """What ops (i, j) hold together: named is only what an op outside them may hold."""
        names, ends = self.names, [end for end in at if 0 < end < len(self.model.ops)]
        outside = {name for end in ends for name, _ in names.state(end) + names.grads(end)}
        shared = tuple((name, size) for name, size in held.items() if name in outside)
        alone = sum(held.values()) - sum(size for _, size in shared)
        return Held("activations", own + alone, self._again(shared, at[0]))

    def category(self, kind: str, boundary: int) -> str:
        """Of a state, or its gradient: what backward comes back to is an activation, what goes to
        another rank or comes from there lies in a buffer; the rest is work.
        """
        if kind == "x" and boundary in self._kept:
            return "activations"
        return "buffers" if kind != "r" and boundary in self._edges else "workspace"
