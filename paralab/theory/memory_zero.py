"""What a rank holds at the fullest moments of a step with ZeRO: the step's events, gone through.

Beside the model states (memory.py) and activations there are

    stage 3   the units that are gathered, whole, as "parameters": those in use, ``prefetch`` more,
              and a tied embedding from the first part to the last (gathering.py)
    all       gradients that backward has made and no reduce-scatter has taken yet, as "gradients";
              of the two reduce-scatters that may be under way: the packed gradients, as many bytes
              to receive the others' parts in (gloo's way, see comm.py), and the sum of them, an
              N-th: as "buffers". They stay until somebody waits for them, also in the next forward

A part's activations are counted until its backward has made gradients; workspace is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paralab.parallel.buckets import IN_FLIGHT, units
from paralab.parallel.schedules import Action
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan
from paralab.theory import memory
from paralab.theory.activations import recomputed_bytes
from paralab.theory.formulas import backward_halves
from paralab.theory.gathering import Gathering, parts_with_backward

Bytes = dict[str, int]


def zero_moments(
    model: ModelSpec, plan: Plan, states: Mapping[str, int], rank: int
) -> dict[str, Bytes]:
    """{"forward", "backward"}: bytes by category at the fullest moment of either.

    states  of the rank, from memory.state_bytes
    """
    walk = _Walk(model, plan, states, rank)
    fullest: dict[str, Bytes] = {}
    for action in plan.actions()[plan.place(rank)[0]]:
        moment = "forward" if action.kind == "F" else "backward"
        found = walk.act(action)
        if moment not in fullest or sum(found.values()) > sum(fullest[moment].values()):
            fullest[moment] = found
    return fullest


class _Walk:
    """One rank's memory as its actions pass: what is there, and the most there has been."""

    def __init__(
        self, model: ModelSpec, plan: Plan, states: Mapping[str, int], rank: int
    ) -> None:  # fmt: skip
        batch = plan.microbatch_size
        self.plan, self.states, self.n = plan, states, plan.shard_degree
        self.item, self.every = BYTES_PER_ELEMENT[plan.precision], memory.reduces_often(plan)
        self.sizes = memory.rank_sizes(model, plan, rank)
        self.units = units(self.sizes, model, plan)
        self.unit_of = {
            name: n for n, unit in enumerate(self.units) if not unit.frozen for name in unit.names
        }
        self.stages = memory.stage_parts(model, plan, rank)
        self.kept = {s: memory.kept_bytes(model, plan, p) for s, p in self.stages.items()}
        self.aside = {
            s: sum(memory.put_aside_bytes(model, part, batch, plan.tp) for part in parts)
            for s, parts in self.stages.items()
        }
        self.again = recomputed_bytes(model, batch, **memory.asked(plan))
        flows = parts_with_backward(model, self.stages)
        self.backward = {
            s: [p for p in backward_halves(model, batch, accumulate=False)
                if p.part in parts and p.part in flows]
            for s, parts in self.stages.items()
        }  # fmt: skip
        self.copy = model.tied and plan.stages > 1  # the head's, of a tied embedding elsewhere
        self.gathering = None
        if plan.zero_stage == 3:
            self.gathering = Gathering(model, self.stages, self.units, plan.prefetch)
        self.activations = 0
        self.whole: dict[str, int] = {}  # gradients that nobody has taken, elements
        self.shards: set[int] = set()  # units whose part of the gradient is there
        self.under_way: tuple[int, ...] = ()
        self.missing = {n: len(self.units[n].names) for n in set(self.unit_of.values())}
        self.done = dict.fromkeys(self.stages, 0), dict.fromkeys(self.stages, 0)
        self.seen: dict[tuple, tuple] = {}

    def act(self, action: Action) -> Bytes:
        """Go through one action; returns its fullest moment.

        Micro-batches repeat each other: what an action did from the same state is looked up.
        """
        stage, kind, _ = action
        late = self.done[kind == "W"]
        late[stage] += kind != "F"
        last = late[stage] == self.plan.microbatches
        before = (stage, kind, last, frozenset(self.whole), frozenset(self.shards), self.under_way)
        base = self.activations
        if before in self.seen and not last:
            self.whole, self.shards, self.under_way, found = self.seen[before]
            self.whole, self.shards = dict(self.whole), set(self.shards)
        else:
            self.activations = 0
            moments = self._forward(stage) if kind == "F" else self._backward(stage, kind, last)
            found = max(moments, key=lambda moment: sum(moment.values()))
            self.seen[before] = dict(self.whole), set(self.shards), self.under_way, found
        size, aside = sum(self.kept[stage].values()), self.aside[stage]
        more = {"F": size, "B": -size, "I": aside - size, "W": -aside}[kind]
        self.activations = base + more
        held = {"F": 0, "B": size, "I": size, "W": aside}[kind]  # counted by the moments themselves
        return {**found, "activations": found["activations"] + base - held}

    def _forward(self, stage: int) -> Iterator[Bytes]:
        parts, kept = self.stages[stage], self.kept[stage]
        self.activations = kept[""]
        for at, part in enumerate(parts):
            if self.gathering is not None:
                self.gathering.forward(parts, at)
            self.activations += kept[part]
            yield self._now()
            if self.gathering is not None:
                self.gathering.leave(parts, at)

    def _backward(self, stage: int, kind: str, last: bool) -> Iterator[Bytes]:
        parts, kept = self.stages[stage], self.kept[stage]
        self.activations = self.aside[stage] if kind == "W" else sum(kept.values())
        current = None
        for half in self.backward[stage]:
            if half.part != current and kind != "W":
                if current is not None:
                    self.activations -= kept[current]
                if self.gathering is not None:
                    self.gathering.backward(parts, parts.index(half.part))
                yield self._now(self.again if half.part.startswith("blocks.") else 0)
            current = half.part
            names = half.names * (kind != "W") + half.weight_names * (kind != "I")
            if self.copy and half.part == "head" and half.weight.flops and kind != "I":
                names = ("head.output.weight",)
            for name in names:
                yield from self._made(name, last, kept[current] if kind != "W" else 0)
        yield self._now()

    def _made(self, name: str, last: bool, spent: int) -> Iterator[Bytes]:
        """Backward has made this gradient; ``spent``: activations of its part, used up by now."""
        if name not in self.unit_of:
            return
        self.whole[name] = self.sizes[name]
        unit = self.unit_of[name]
        if not (last or self.every):
            return
        self.missing[unit] -= 1
        if self.missing[unit]:
            return
        self.missing[unit] = len(self.units[unit].names)
        settled = self.under_way[: len(self.under_way) - (IN_FLIGHT - 1)]
        self.shards.update(settled)
        self.under_way = self.under_way[len(settled) :]
        yield self._now(-spent, self.units[unit].numel)  # packed, and its own memory still there
        for taken in self.units[unit].names:
            self.whole.pop(taken)
        self.under_way += (unit,)
        yield self._now(-spent)
        if self.gathering is not None:
            self.gathering.release([unit])

    def _now(self, activations: int = 0, packing: int = 0) -> Bytes:
        """What is there, with ``activations`` bytes more and a buffer of ``packing`` elements."""
        gathered = self.gathering.here if self.gathering is not None else ()
        full = sum(self.units[unit].numel for unit in gathered)
        shards = sum(self.units[unit].numel // self.n for unit in self.shards)
        moving = [self.units[unit].numel for unit in self.under_way]
        buffers = packing + sum(2 * numel + numel // self.n for numel in moving)
        return {
            "parameters": self.states["parameters"] + self.item * full,
            "gradients": self.item * (sum(self.whole.values()) + shards),
            "optimizer": self.states["optimizer"],
            "buffers": self.item * buffers,
            "activations": self.activations + activations,
        }
