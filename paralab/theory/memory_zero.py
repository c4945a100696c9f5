"""What a rank holds at the fullest moments of a step with ZeRO: the step's events, gone through.

Beside the model states (memory.py) and activations there are

    stage 3   the units that are gathered, whole, as "parameters": those in use, ``prefetch`` more,
              and a tied embedding from the first part to the last (gathering.py)
    offload   what is not on the device is not counted, and of a gradient that leaves the N-th that
              is on its way; of offloaded activations the block's input that leaves, or the one that
              has come up and the one below it
    all       gradients that backward has made and no reduce-scatter has taken yet, as "gradients";
              of the two reduce-scatters that may be under way: the packed gradients, as many bytes
              to receive the others' parts in (gloo's way, see comm.py), and the sum of them, an
              N-th: as "buffers". They stay until somebody waits for them, also in the next forward

In a pipeline its messages besides, one that arrives and one that leaves, as "buffers". The input
half of a split backward puts aside what the weight half lets go of again, layer by layer.

A part's activations are counted until its backward has made gradients; workspace only where states
are offloaded (workspace.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from threading import Lock

import numpy as np

from paralab.parallel.buckets import IN_FLIGHT
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan
from paralab.theory import memory
from paralab.theory.activations import layer_aside_bytes, recomputed_bytes
from paralab.theory.formulas import backward_halves
from paralab.theory.gathering import Gathering, parts_with_backward
from paralab.theory.order import CODE, F, W, order_of
from paralab.theory.workspace import backward_workspace

Bytes = dict[str, int]


def zero_moments(
    model: ModelSpec, plan: Plan, states: Mapping[str, int], rank: int
) -> dict[str, Bytes]:
    """{"forward", "backward"}: bytes by category at the fullest moment of either.

    states  of the rank, from memory.state_bytes
    """
    alike = memory.like(model, plan, rank)
    if plan.relays:
        from paralab.theory.memory_relay import RelayWalk

        walk: Walk = RelayWalk(model, plan, states, alike)
    else:
        walk = _walk(model, plan, tuple(states.items()), alike)
    try:
        with walk.lock:
            fullest = walk.fullest(plan.place(rank).pp)
    except BaseException:  # interrupted halfway, it is not to be gone on with
        _walk.cache_clear()
        raise
    return {
        moment: {**found, "activations": found["activations"] + beside}
        for moment, (found, beside) in fullest.items()
    }


@lru_cache(maxsize=4)  # ranks that are alike
def _walk(model: ModelSpec, plan: Plan, states: tuple[tuple[str, int], ...], rank: int) -> Walk:
    return Walk(model, plan, dict(states), rank)


class Walk:
    """One rank's memory as its actions pass: what is there, and the most there has been."""

    def __init__(
        self, model: ModelSpec, plan: Plan, states: Mapping[str, int], rank: int
    ) -> None:  # fmt: skip
        batch = plan.microbatch_size
        self.model, self.plan, self.states, self.n = model, plan, states, plan.shard_degree
        self.messages = memory.message_bytes(model, plan, rank)
        self.item, self.every = BYTES_PER_ELEMENT[plan.precision], plan.reduces_often
        self.sizes = memory.rank_sizes(model, plan, rank)
        self.units = memory.rank_units(model, plan, rank)
        self.own = [unit.numel // self.n for unit in self.units]
        self.unit_of = {
            name: n for n, unit in enumerate(self.units) if not unit.frozen for name in unit.names
        }
        self.stages = memory.stage_parts(model, plan, rank)
        self.kept = {s: memory.kept_bytes(model, plan, p) for s, p in self.stages.items()}
        self.size = {s: sum(parts.values()) for s, parts in self.kept.items()}
        self.put = {
            layer: layer_aside_bytes(model, layer, batch, plan.tp, plan.precision)
            for layer in memory.LINEAR
        }
        self.part_aside = {
            part: memory.put_aside_bytes(model, part, batch, plan.tp, plan.precision)
            for parts in self.stages.values() for part in parts
        }  # fmt: skip
        self.aside = {
            s: sum(self.part_aside[part] for part in parts) for s, parts in self.stages.items()
        }
        self.again = recomputed_bytes(model, batch, **memory.asked(plan))
        flows = parts_with_backward(model, self.stages)
        self.backward = {
            s: backward_halves(model, batch, accumulate=False, parts=flows.intersection(parts))
            for s, parts in self.stages.items()
        }
        self.copy = model.tied and plan.stages > 1  # the head's, of a tied embedding elsewhere
        self.gathering = None
        if plan.zero_stage == 3:
            away = plan.tiers is not None and plan.tiers.parameters != "device"
            self.gathering = Gathering(model, self.stages, self.units, plan.prefetch, away=away,
                                       alone=self.n == 1)  # fmt: skip
        self.away = plan.tiers is not None and plan.tiers.gradients != "device"
        self.leaving: tuple[int, ...] = ()  # units whose part of the gradient is on its way down
        self.input = memory.offloaded_input(model, plan)  # bytes; 0 if inputs stay
        self.moving = 0  # bytes of inputs on their way
        self.hand = backward_workspace(model, plan) if plan.tiers is not None else None
        self.tied = 0  # bytes of a tied weight's gradient that waits for the embedding's
        self.between = 0  # bytes of gradients that wait for the part below
        self.activations = 0
        self.whole: dict[str, int] = {}  # gradients that nobody has taken, elements
        self.shards: set[int] = set()  # units whose part of the gradient is there
        self.under_way: tuple[int, ...] = ()
        self.missing: dict[int, int] = {}  # of units begun, the gradients that are yet to come
        self.met: list[tuple] = []  # copies of the states it has been in, by number
        self.number_of: dict[tuple, int] = {}
        self.lock = Lock()  # ranks that are alike share it, and a widget predicts in two threads
        self.start = self._number()
        self.turns: dict[tuple[int, int], tuple[int, int]] = {}  # what an action does from a state:
        self.found: list[Bytes] = []  # the number of its fullest moment here, and the state after

    def fullest(self, place: int) -> dict[str, tuple[Bytes, int]]:
        """{"forward", "backward"}: the fullest moment of any forward, of any backward, but for the
        activations of other micro-batches; and the bytes of these.

        place  in the pipeline, of a rank that holds as much as this one

        Micro-batches repeat each other: what an action does from a state is worked out once.
        """
        order, own = order_of(self.plan), list(self.stages)
        here = slice(order.first[place], order.first[place + 1])
        chunk, kind = order.stage[here] // self.plan.pp, order.kind[here]
        at, passed = self.start, []
        for code in (2 * (chunk * len(CODE) + kind) + self._last(chunk, kind)).tolist():
            known = self.turns.get((at, code))
            if known is None:
                self._enter(at)
                (of, what), last = divmod(code // 2, len(CODE)), bool(code % 2)
                moments = self._forward(own[of]) if what == F else \
                    self._backward(own[of], "FBIW"[what], last)  # fmt: skip
                self.found.append(max(moments, key=memory.total))
                self.turns[at, code] = known = len(self.found) - 1, self._number()
            passed.append(known[0])
            at = known[1]
        size = np.array([self.size[s] for s in own])[chunk]
        aside = np.array([self.aside[s] for s in own])[chunk]
        more = np.choose(kind, [size, -size, aside - size, -aside])  # F, B, I, W
        # What an action's own micro-batch has there is counted by its moments themselves.
        beside = np.cumsum(more) - more - np.choose(kind, [0 * size, size, size, aside])
        sizes = np.array([memory.total(one) for one in self.found])[passed] + beside
        most: dict[str, tuple[Bytes, int]] = {}
        for moment, which in (("forward", kind == F), ("backward", kind != F)):
            among = np.flatnonzero(which)
            at = among[sizes[among].argmax()]
            most[moment] = self.found[passed[at]], int(beside[at])
        return most

    def _last(self, chunk: np.ndarray, kind: np.ndarray) -> np.ndarray:
        """Whether an action is its chunk's last whole backward or input half, or its last weight
        half if there is one for every micro-batch.
        """
        last = np.zeros(len(kind), bool)
        for of in ((kind != F) & (kind != W), kind == W):
            for one in range(len(self.stages)):
                mine = np.flatnonzero(of & (chunk == one))
                if len(mine) == self.plan.microbatches:
                    last[mine[-1]] = True
        return last

    def _number(self) -> int:
        """Of the state that this is in: the same for the same."""
        rest = self.under_way, self.leaving, self.moving
        key = (frozenset(self.whole), frozenset(self.shards), frozenset(self.missing.items()),
               *rest)  # fmt: skip
        if key not in self.number_of:
            self.number_of[key] = len(self.met)
            self.met.append((dict(self.whole), set(self.shards), dict(self.missing), *rest))
        return self.number_of[key]

    def _enter(self, number: int) -> None:
        """Be in the state of this number."""
        whole, shards, missing, *rest = self.met[number]
        self.whole, self.shards, self.missing = dict(whole), set(shards), dict(missing)
        self.under_way, self.leaving, self.moving = rest

    def _forward(self, stage: int) -> Iterator[Bytes]:
        parts, kept = self.stages[stage], self.kept[stage]
        self.activations = 0
        for at, part in enumerate(parts):
            if self.gathering is not None:
                self.gathering.forward(parts, at)
            self.activations += kept[part]
            if part.startswith("blocks."):
                self.moving = self.input
            yield self._now()
            if self.gathering is not None:
                self.gathering.leave(parts, at)

    def _backward(self, stage: int, kind: str, last: bool) -> Iterator[Bytes]:
        parts, kept = self.stages[stage], self.kept[stage]
        self.activations = self.aside[stage] if kind == "W" else self.size[stage]
        current = None
        for half in self.backward[stage]:
            if half.part != current and kind != "W":
                if current is not None:
                    stays = self.part_aside[current] if kind == "I" else 0
                    self.activations -= kept[current] - stays
                if self.gathering is not None:
                    self.gathering.backward(parts, parts.index(half.part))
                if half.part.startswith("blocks."):
                    below = parts[: parts.index(half.part)]
                    self.moving = self.input * (1 + any(p.startswith("blocks.") for p in below))
                elif half.part == "embedding":
                    self.moving = 0
                yield from self._began(half.part, split=kind == "I")
            current = half.part
            if half.part == "embedding" and self.hand is not None:
                yield self._now(-kept[current], hand=self.hand.lookup)
                self.tied = 0
            names = half.names * (kind != "W") + half.weight_names * (kind != "I")
            if self.copy and half.part == "head" and half.weight.flops and kind != "I":
                names = ("head.output.weight",)
            for name in names:
                yield from self._made(name, last, kept[current] if kind != "W" else 0)
            if kind == "W":
                self.activations -= self.put.get(half.layer, 0)
        yield self._now()

    def _began(self, part: str, *, adding: bool = False, split: bool = False) -> Iterator[Bytes]:
        """The fullest moments of a part's backward before its gradients are complete.

        adding  to an earlier micro-batch's, which are there: of its own only one at a time
        split   it is the input half alone: no weight's gradient, but what is put aside for it
        """
        if not part.startswith("blocks."):
            if self.hand is not None and part == "head":
                yield self._now(hand=self.hand.head)
                self.tied = self.hand.tied
            yield self._now()
            return
        if self.hand is None:
            yield self._now(self.again)
            return
        yield self._now(self.again, hand=self.hand.down - self.hand.down_gradient * split)
        hand = self.hand.core + self.hand.core_gradients * (not adding and not split)
        aside = sum(self.put[layer] for layer in ("down", "up", "proj")) * split
        yield self._now(self.again - self.hand.gone + aside, hand=hand)

    def _made(self, name: str, last: bool, spent: int) -> Iterator[Bytes]:
        """Backward has made this gradient; ``spent``: activations of its part, used up by now."""
        if name not in self.unit_of:
            return
        self.whole[name] = self.sizes[name]
        unit = self.unit_of[name]
        if not (last or self.every):
            return
        missing = self.missing.pop(unit, len(self.units[unit].names)) - 1
        if missing:
            self.missing[unit] = missing
            return
        settled = self.under_way[: len(self.under_way) - (IN_FLIGHT - 1)]
        self.under_way, self.leaving = self.under_way[len(settled) :], ()
        self._keep(settled)
        hand = 0
        if self.hand is not None and self.units[unit].part.startswith("blocks."):
            hand = self.hand.close
        # Packed, and its own memory still there.
        yield self._now(-spent, self.units[unit].numel, hand)
        for taken in self.units[unit].names:
            self.whole.pop(taken)
        if self.n == 1:
            self._keep((unit,))
        else:
            self.under_way += (unit,)
        yield self._now(-spent, hand=hand)
        if self.gathering is not None:
            self.gathering.release([unit])

    def _keep(self, units: tuple[int, ...]) -> None:
        """The parts of these gradients are summed: here they stay, or they leave."""
        stay = {unit for unit in units if not self.away or self.units[unit].waits}
        self.leaving = tuple(unit for unit in units if unit not in stay)
        self.shards.update(stay)

    def _now(self, activations: int = 0, packing: int = 0, hand: int = 0) -> Bytes:
        """What is there, with ``activations`` bytes more, a buffer of ``packing`` elements, and
        ``hand`` bytes of workspace.
        """
        full = brought = 0
        for unit, state in self.gathering.here.items() if self.gathering is not None else ():
            numel, alone = self.units[unit].numel, self.gathering.alone
            full += numel if state != "fetch" or alone else 0
            brought += (
                numel // self.n if self.gathering.away and not (alone or state == "wait") else 0
            )
        shards = sum(map(self.own.__getitem__, self.shards))
        moving = [self.units[unit].numel for unit in self.under_way]
        buffers = packing + brought + sum(2 * numel + numel // self.n for numel in moving)
        buffers += sum(map(self.own.__getitem__, self.leaving))
        return {
            "parameters": self.states["parameters"] + self.item * full,
            "gradients": self.item * (sum(self.whole.values()) + shards),
            "optimizer": self.states["optimizer"],
            "buffers": self.item * buffers + self.messages,
            "activations": self.activations + activations + self.moving,
            "workspace": hand + self.tied + self.between,
        }
