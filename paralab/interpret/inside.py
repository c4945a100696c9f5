"""The memory inside an instruction of compute: a walk over its ops, in a rank's order. Torch-free.

In forward each op has the state that comes in, the state that goes out, what the ops so far keep
for backward, and its own temporary memory, ``scratch``. Backward takes the ops in reverse: each
frees what it kept, and its two halves have a scratch each. All micro-batches share one walk.
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
    """Bytes in addition to those alive when an instruction begins: at its peak by category; and
    ``most``, activations and workspace each at its own peak.
    """

    activations: int = 0
    workspace: int = 0
    buffers: int = 0
    most: tuple[int, int] = (0, 0)


Moments = Iterator[tuple[int, int]]  # bytes of activations and workspace, at the begin first


class Insides:
    """The `Inside` of all instructions of a program; equal blocks share one."""

    def __init__(self, model: Model, plan: Plan, gloo: bool) -> None:
        self.model, self.plan, self.gloo, self.sharing = model, plan, gloo, sharing_of(model)
        self._known: dict[tuple, Inside] = {}

    def of(self, ins: Instr, stays: tuple[Name, ...] = ()) -> Inside:
        """stays: storages of values that a backward frees, but which other values still hold."""
        forward, offset = ins.op in FORWARDS, self.model.offset.get(ins.at[0], 0)
        at = ins.at[0] - offset, ins.at[1] - offset  # in the first block
        shared = frozenset([(kind, boundary - offset) for kind, boundary in stays])
        key = at, "forward" if forward else ins.op, not forward or keeps(ins), shared
        inside = self._known.get(key)
        if inside is None:
            if forward:
                begin, *walk = self._forward(*at, keep=keeps(ins))
            elif ins.op == BACKWARD_WEIGHT:
                begin, *walk = self._weight(*at)
            else:
                begin, *walk = self._backward(*at, shared, split=ins.op == BACKWARD_INPUT)
            moments = [(held - begin[0], work - begin[1]) for held, work in walk]
            most = tuple(map(max, zip(*moments, strict=True)))
            inside = self._known[key] = Inside(*max(moments, key=sum), most=most)
        return inside

    def _forward(self, i: int, j: int, *, keep: bool) -> Moments:
        ops, sharing = self.model.ops, self.sharing
        state = sharing.state("x", i) if i else ()
        there = dict(state)  # alive from before the instruction to its end
        kept: dict[Name, int] = {}  # storages that other values may share
        own = 0  # bytes kept in storages that no other value shares
        targets = ops[-1].targets * (j == len(ops))  # there before the loss, which keeps them
        yield 0, 0
        for at in range(i, j):
            op, before, state = ops[at], state, sharing.state("x", at + 1)
            new = _bytes(dict(before + state), without=(there, kept))
            grown = own + _bytes(kept, without=(there,))
            scratch = op.temporaries("forward", self._received) + targets * (op is not ops[-1])
            yield grown, new + op.keeps + scratch
            if keep:
                own += op.keeps
                kept.update(sharing.kept(at))
        grown = own + _bytes(kept, without=(there,))
        yield grown, _bytes(dict(state), without=(there, kept))

    def _backward(self, i: int, j: int, stays: frozenset[Name], *, split: bool) -> Moments:
        ops, sharing, n = self.model.ops, self.sharing, len(self.model.ops)

        def freed(held: Iterable[tuple[Name, int]]) -> dict[Name, int]:
            return {name: size for name, size in held if name not in stays}

        # Shared storages by name, and bytes of unshared ones (``own`` of what is kept).
        own = sum(ops[at].keeps for at in range(i, j))
        kept = [freed(sharing.kept(at)) for at in range(i, j)]
        saved = {name: size for of_op in kept for name, size in of_op.items()}
        grads = freed(sharing.state("g", j)) if j < n else {}
        yield own + _bytes(saved), _bytes(grads)
        deferred: dict[Name, int] = {}  # until the weight half of its op
        deferred_new = deferred_kept = 0  # made by the input half; saved by forward
        for at in reversed(range(i, j)):
            op = ops[at]
            names = {name: size for of_op in kept[: at - i + 1] for name, size in of_op.items()}
            names |= {name: size for name, size in deferred.items() if name in saved}
            into = freed(sharing.state("g", at)) if at else {}
            fresh = op.deferred
            scratch = op.temporaries("input", self._received) - op.defers_kept
            work = _bytes({**grads, **into, **deferred}, without=(names,)) + deferred_new
            result, _ = sharing.last("x", at + 1)
            freed_first = op.frees_result * (result in kept[at - i] and result not in deferred)
            held = own + deferred_kept + _bytes(names) - freed_first
            yield held, work + fresh + scratch
            own -= op.keeps
            mine, grads = freed(sharing.deferred(at)), into
            if split:
                deferred |= mine
                deferred_kept += op.defers_kept
                deferred_new += fresh - op.defers_kept
                continue
            names = {name: size for of_op in kept[: at - i] for name, size in of_op.items()}
            names |= {name: size for name, size in mine.items() if name in saved}
            scratch = op.temporaries("weight", self._received) + fresh - op.defers_kept
            work = _bytes({**grads, **mine}, without=(names,))
            yield own + op.defers_kept + _bytes(names), work + scratch
        deferred_new += deferred_kept  # what is deferred is an activation once the halves are apart
        yield deferred_new + _bytes(deferred), _bytes(grads, without=(deferred,))

    def _weight(self, i: int, j: int) -> Moments:
        """The op deferred last comes first; each frees what it deferred once it has used it."""
        ops, sharing = self.model.ops, self.sharing
        left = [(dict(sharing.deferred(at)), ops[at].deferred) for at in range(i, j)]

        def size() -> int:
            names = {name: size for deferred, _ in left for name, size in deferred.items()}
            return _bytes(names) + sum(fresh for _, fresh in left)

        yield size(), 0
        for at in reversed(range(i, j)):
            yield size(), ops[at].temporaries("weight", self._received, alone=True)
            left.pop()

    def _received(self, call: Call) -> int:
        """Bytes of the buffers that gloo receives into: all ranks' parts in a reduce-scatter, those
        of the other ranks on the root of a reduce.
        """
        if self.gloo and call.op == "reduce_scatter":
            return call.payload
        if self.gloo and call.op == "reduce":
            sizes = extents(self.plan)
            return call.payload * (prod(sizes[a] for a in mode_of(self.plan).axes[call.axis]) - 1)
        return 0


insides = lru_cache(maxsize=64)(Insides)  # the same for all ranks of a program


def _bytes(names: dict[Name, int], *, without: Iterable[dict[Name, int]] = ()) -> int:
    return sum(size for name, size in names.items() if not any(name in held for held in without))
