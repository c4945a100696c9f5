"""Which memory a value is made of, where several values share memory. Torch-free.

A gradient, a shard and a unit's parameters are each a storage of their own. States between ops and
saved activations share storages. Inside a branch the state (x, h) contains the same x that the
branch's norm saves for backward; most ops save their input; and some ops write their result into
their input's storage: a sum over ranks, and the addition that closes a branch.

So these values consist of named storages: the op before boundary b wrote ("x", b), and ("g", b) is
its gradient. A value holds named storages, which other values may hold too, and bytes of its own. A
storage lives as long as any value that holds it, and counts once. A value that saves it for
backward makes it an activation; one that only passes it on leaves its category. A recomputed state
has another storage, ("r", b), because the first may still be on its way to another rank.
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
    """The memory that a value holds.

    category  of the value's own bytes and of ``shared``
    own       bytes that no other value holds
    shared    (name, bytes) of storages that other values may hold too; they become ``category``
    passed    (name, bytes) of storages whose category the value does not change
    """

    category: str
    own: int
    shared: Sized = ()
    passed: Sized = ()


class Sharing:
    """The storages that a model's ops write and pass on, of states ("x") and gradients ("g").

    named  {"x" or "g": per boundary the boundary that names the storage}
    other  {"x" or "g": {boundary inside a branch: that of the state's other entry}}
    """

    def __init__(self, model: Model) -> None:
        self.model, ops = model, model.ops
        n = end = len(ops)
        x, g, closed = list(range(n + 1)), list(range(n + 1)), {}
        for b in range(1, n + 1):
            if ops[b - 1].passes_input:
                x[b] = x[b - 1]
        for b in reversed(range(n)):
            if ops[b].passes_grad:
                g[b] = g[b + 1]
            end = b + 1 if ops[b].joins else end
            if b in model.inside:
                closed[b] = end  # the boundary behind the branch
        self.named, self.other = {"x": x, "g": g}, {"x": model.inside, "g": closed}

    def last(self, kind: str, at: int) -> tuple[Name, int]:
        """(name, bytes) of the last entry of the state at a boundary, or of its gradient."""
        return (kind, self.named[kind][at]), self.model.item * self.model.ops[at - 1].out

    def state(self, kind: str, at: int) -> Sized:
        """The storages of the state or gradient at a boundary: of two entries inside a branch."""
        entries = [self.other[kind][at], at] if at in self.other[kind] else [at]
        return tuple(self.last(kind, entry) for entry in entries)

    def kept(self, at: int) -> list[tuple[Name, int]]:
        """The storages of its input and its result that an op saves for backward."""
        op = self.model.ops[at]
        gathers = op.message is not None and op.message.forward == "all_gather"
        storages = [self.last("x", at)] if at and (op.keeps_input or gathers) else []
        return storages + ([self.last("x", at + 1)] if op.keeps_result else [])

    def deferred(self, at: int) -> list[tuple[Name, int]]:
        """The storages that an op holds between the two halves of its backward."""
        op = self.model.ops[at]
        held = ("x", at, op.defers_input), ("g", at + 1, op.defers_grad), ("g", at, op.defers_made)
        return [self.last(kind, boundary) for kind, boundary, defers in held if defers]


sharing_of = lru_cache(maxsize=64)(Sharing)  # one for all programs of a model


class Storages:
    """The storages of one pipeline rank's values. stages: ops (i, j) of each of its stages."""

    def __init__(self, sharing: Sharing, plan: Plan, stages: Sequence[tuple[int, int]]) -> None:
        self.names, self.model, self.plan = sharing, sharing.model, plan
        self._known = {}
        # Boundaries of stages, whose states are sent or received.
        self._edges = frozenset(edge for stage in stages for edge in stage)
        ranges = recomputed(self.model, plan.recompute)
        # {op that is recomputed: first op of its range}
        self._begin = {op: i for i, j in ranges for op in range(i, j)}
        # Boundaries whose state this rank saves as the input of a recomputed range.
        saved_at = {i for i, _ in ranges}
        if plan.relays and plan.recompute == "full":
            saved_at.add(self.model.parts[-1][1])  # the head's input
        not_cut = not plan.partition_activations
        self._kept = {b for b in saved_at if not_cut and any(i <= b < j for i, j in stages)}

    def held(self, value: Value) -> Held:
        """The memory of a state, or of what is saved or deferred for backward."""
        key = value[:2]
        if key not in self._known:
            self._known[key] = self._held(*key)
        return self._known[key]

    def _held(self, kind: str, where: Any) -> Held:
        names = self.names
        if kind in ("saved", "deferred"):
            field, of = ("keeps", names.kept) if kind == "saved" else ("deferred", names.deferred)
            own = sum(getattr(op, field) for op in self.model.ops[slice(*where)])
            return self._several(where, dict(pair for at in range(*where) for pair in of(at)), own)
        *others, last = names.state("g" if kind == "g" else "x", where)
        mine, others = (last,), tuple(others)
        if kind in ("r", "again"):  # the storage belongs to the op before the boundary
            mine, others = self._again(mine, where - 1), self._again(others, where - 1)
        if kind == "back" and not self.plan.partition_activations:
            return Held("activations", 0, mine)
        if kind in ("again", "back"):
            return Held("buffers", 0, mine)
        return Held(self.category(kind, where), 0, mine, others)

    def _again(self, held: Sized, op: int) -> Sized:
        """``held`` with "r" for "x" where the recomputation that contains ``op`` writes anew."""
        begin = self._begin.get(op, len(self.model.ops))
        return tuple(
            (("r", name[1]) if name[0] == "x" and name[1] > begin else name, size)
            for name, size in held
        )

    def _several(self, at: tuple[int, int], held: dict[Name, int], own: int) -> Held:
        """What ops (i, j) hold together. Only storages that an op outside of them may hold are
        named; the bytes of the others count as ``own``.
        """
        names, edges = self.names, [end for end in at if 0 < end < len(self.model.ops)]
        outside = {name for end in edges for kind in "xg" for name, _ in names.state(kind, end)}
        shared = tuple((name, size) for name, size in held.items() if name in outside)
        alone = sum(held.values()) - sum(size for _, size in shared)
        return Held("activations", own + alone, self._again(shared, at[0]))

    def category(self, kind: str, boundary: int) -> str:
        """The category of a state or of its gradient: saved inputs of recomputed ranges are
        activations, states that are sent or received are buffers, all others workspace.
        """
        if kind == "x" and boundary in self._kept:
            return "activations"
        return "buffers" if kind != "r" and boundary in self._edges else "workspace"
