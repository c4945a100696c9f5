"""What a rank of a layer relay (parallel/relay.py) holds as its parts take their turns.

In place of one micro-batch's activations there are, with x = b s h elements,

    between   m x of activations from part to part: what those micro-batches take that are still to
              come, and what those leave that have been. On the way back as many of gradients, the
              one in use among them
    kept      of every block all m micro-batches' inputs, until their backward (offloaded: none)
    head      what one micro-batch keeps, for it turns round at once

Gradients of the part in turn are there as a whole from its first micro-batch to its last, and those
of a tied embedding from the head's first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from paralab.parallel.layouts import residual_shape
from paralab.parallel.schedules import Action, relay
from paralab.spec import ModelSpec, Plan
from paralab.theory.gathering import parts_with_backward
from paralab.theory.memory import total
from paralab.theory.memory_zero import Bytes, Walk

TIED = "embedding.token.weight"


class RelayWalk(Walk):
    """`memory_zero.Walk` of a relay; an action's stage is the number of its part."""

    def __init__(
        self, model: ModelSpec, plan: Plan, states: Mapping[str, int], rank: int
    ) -> None:  # fmt: skip
        super().__init__(model, plan, states, rank)
        self.parts, self.m = self.stages[0], plan.microbatches
        self.x = self.item * math.prod(residual_shape(model, plan))
        # A tied weight's gradient is one from the head on; a lookup's is added to what is there.
        self.hand = self.hand._replace(tied=0, lookup=self.item * model.vocab * model.hidden)
        self.actions = relay(len(self.parts), self.m)
        self.held = 0  # bytes that wait for their backward
        targets = 8 * plan.microbatch_size * model.seq_len  # wait for the head in other plans
        self.kept[0]["embedding"] -= targets
        self.kept[0]["head"] += targets
        for part in set(self.parts) - parts_with_backward(model, self.stages):
            self.kept[0][part] = 0

    def fullest(self, place: int = 0) -> dict[str, tuple[Bytes, int]]:
        found = [(action.kind, self.act(action)) for action in self.actions]
        return {
            moment: (max((held for kind, held in found if (kind == "F") == forward), key=total), 0)
            for moment, forward in (("forward", True), ("backward", False))
        }

    def act(self, action: Action) -> Bytes:
        """Go through one action; returns its fullest moment."""
        at, kind, k = action
        moments = self._part_forward(at, k) if kind == "F" else self._part_backward(at, k)
        return max(moments, key=total)

    def _part_forward(self, at: int, k: int) -> Iterator[Bytes]:
        part, turns = self.parts[at], at == len(self.parts) - 1
        self.gathering.forward(self.parts, at)
        if part.startswith("blocks."):
            self.moving = self.input
        between = (self.m - 1 - k) * (at > 0) + (k + 1) * (not turns)
        self.held += self.kept[0][part]
        self.activations = self.held + between * self.x
        yield self._now()
        if k == self.m - 1 and not turns:
            self.gathering.leave(self.parts, at)

    def _part_backward(self, at: int, k: int) -> Iterator[Bytes]:
        part, turns = self.parts[at], at == len(self.parts) - 1
        kept, blocks = self.kept[0][part], [p for p in self.parts[:at] if p.startswith("blocks.")]
        halves = [half for half in self.backward[0] if half.part == part]
        self.activations = self.held + (self.m - 1 - k) * turns * self.x
        self.between = (k if turns else self.m - 1) * self.x * bool(halves)
        if halves:
            self.gathering.backward(self.parts, at)
            if part.startswith("blocks."):
                self.moving = self.input * (1 + (k < self.m - 1 or bool(blocks)))
            elif part == "embedding":
                self.moving = 0
            yield from self._began(part, adding=k > 0)
        for name in [n for half in halves for n in half.names + half.weight_names]:
            yield from self._made(name, k == self.m - 1, kept)
        if turns and self.model.tied and TIED in self.unit_of:
            self.whole[TIED] = self.sizes[TIED]
        self.held -= kept
        self.activations -= kept
        yield self._now()
