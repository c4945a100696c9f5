"""What an instruction of compute has in hand: a walk over its ops, as a rank makes it. Torch-free.

Forward goes from op to op: there are the state that comes in, the one that goes out, what has been
kept so far, and the op's own ``scratch``. Backward goes down again: with each op what it has kept
ends, and its two halves have a scratch each. All micro-batches have the same walk, made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from paralab.model.build import Model
from paralab.model.ops import Call
from paralab.parallel.layouts import extents, mode_of
from paralab.programs.instructions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARDS, Instr, keeps
from paralab.programs.storages import Name, sharing_of
from paralab.spec import Plan


class Inside(NamedTuple):
    """Bytes beyond those that are alive when an instruction begins: at its peak, and of
    activations and workspace each its own most.
    """

    activations: int = 0
    workspace: int = 0
    buffers: int = 0
    most: tuple[int, int] = (0, 0)


class Moment(NamedTuple):
    activations: int
    workspace: int


class Insides:
    """Of all instructions of a program."""

    def __init__(self, model: Model, plan: Plan, gloo: bool) -> None:
        self.model, self.plan, self.gloo, self.sharing = model, plan, gloo, sharing_of(model)
        self._known: dict[tuple, Inside] = {}

    def of(self, ins: Instr, stays: tuple[Name, ...] = ()) -> Inside:
        """stays: storages that a backward lets go of, and others still hold."""
        forward, behind = ins.op in FORWARDS, self.model.behind.get(ins.at[0], 0)
        at = ins.at[0] - behind, ins.at[1] - behind
        left = frozenset([(kind, boundary - behind) for kind, boundary in stays])
        key = at, "forward" if forward else ins.op, not forward or keeps(ins), left
        found = self._known.get(key)
        if found is None:
            if forward:
                moments = list(self._forward(*at, keep=keeps(ins)))
            elif ins.op == BACKWARD_WEIGHT:
                moments = list(self._weight(*at))
            else:
                moments = list(self._backward(*at, left, halves=ins.op == BACKWARD_INPUT))
            activations, workspace = max(moments, key=sum)
            most = max(m.activations for m in moments), max(m.workspace for m in moments)
            found = self._known[key] = Inside(activations, workspace, 0, most)
        return found

    def _forward(self, i: int, j: int, *, keep: bool) -> Iterator[Moment]:
        ops, sharing = self.model.ops, self.sharing
        state = list(sharing.state(i)) if i else []
        there = dict(state)  # alive before, and to the end
        kept: dict[Name, int] = {}
        own = 0  # what is kept by this one alone
        for at in range(i, j):
            op, out = ops[at], sharing.forward(at + 1)
            new = _bytes({**dict(state), **dict([out])}, besides=(there, kept))
            grown = own + _bytes(kept, besides=(there,))
            scratch = op.in_hand("forward", self._received)
            yield Moment(grown, new + op.keeps + scratch)
            if keep:
                own += op.keeps
                kept.update(sharing.kept(at))
            state = [*(state[-1:] if op.forks else () if op.joins else state[:-1]), out]
        grown = own + _bytes(kept, besides=(there,))
        yield Moment(grown, _bytes(dict(state), besides=(there, kept)))

    def _backward(
        self, i: int, j: int, stays: frozenset[Name], *, halves: bool
    ) -> Iterator[Moment]:
        ops, sharing, n = self.model.ops, self.sharing, len(self.model.ops)

        def goes(held: Iterable[tuple[Name, int]]) -> dict[Name, int]:
            return {name: size for name, size in held if name not in stays}

        own = sum(ops[at].keeps for at in range(i, j))
        kept = [goes(sharing.kept(at)) for at in range(i, j)]
        saved = {name: size for some in kept for name, size in some.items()}
        grads = goes(sharing.grads(j)) if j < n else {}
        begin = Moment(own + _bytes(saved), _bytes(grads))
        aside: dict[Name, int] = {}
        waits = saved_waits = 0
        for at in reversed(range(i, j)):
            op = ops[at]
            names = {name: size for some in kept[: at - i + 1] for name, size in some.items()}
            names |= {name: size for name, size in aside.items() if name in saved}
            into = goes(sharing.grads(at)) if at else {}
            fresh = op.deferred
            scratch = op.in_hand("input", self._received) - op.defers_kept
            moved = _bytes({**grads, **into, **aside}, besides=(names,)) + waits
            held = own + saved_waits + _bytes(names)
            yield _since(begin, held, moved + fresh + scratch)
            own -= op.keeps
            mine, grads = goes(sharing.put_aside(at)), into
            if halves:
                aside |= mine
                saved_waits += op.defers_kept
                waits += fresh - op.defers_kept
                continue
            names = {name: size for some in kept[: at - i] for name, size in some.items()}
            names |= {name: size for name, size in mine.items() if name in saved}
            scratch = op.in_hand("weight", self._received) + fresh - op.defers_kept
            moved = _bytes({**grads, **mine}, besides=(names,))
            yield _since(begin, own + op.defers_kept + _bytes(names), moved + scratch)
        waits += saved_waits  # what waits for its weight half is an activation from here on
        yield _since(begin, waits + _bytes(aside), _bytes(grads, besides=(aside,)))

    def _weight(self, i: int, j: int) -> Iterator[Moment]:
        """From what was deferred last to what was first; each is let go when it is used."""
        ops, sharing = self.model.ops, self.sharing
        left = [(dict(sharing.put_aside(at)), ops[at].deferred) for at in range(i, j)]

        def size() -> int:
            names = {name: size for some, _ in left for name, size in some.items()}
            return _bytes(names) + sum(fresh for _, fresh in left)

        begin = size()
        for at in reversed(range(i, j)):
            yield Moment(size() - begin, ops[at].in_hand("weight", self._received, alone=True))
            left.pop()

    def _received(self, call: Call) -> int:
        """What gloo receives into: of a reduce on its root the others' parts, of a reduce-scatter
        everybody's.
        """
        if self.gloo and call.op == "reduce_scatter":
            return call.payload
        if self.gloo and call.op == "reduce":
            sizes = extents(self.plan)
            return call.payload * (prod(sizes[a] for a in mode_of(self.plan).axes[call.axis]) - 1)
        return 0


insides = lru_cache(maxsize=64)(Insides)  # the same for all ranks of a program


def _bytes(names: dict[Name, int], *, besides: Iterable[dict[Name, int]] = ()) -> int:
    return sum(size for name, size in names.items() if not any(name in some for some in besides))


def _since(begin: Moment, activations: int, workspace: int) -> Moment:
    return Moment(activations - begin.activations, workspace - begin.workspace)
