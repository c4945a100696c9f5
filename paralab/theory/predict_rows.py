"""The rows of one rank's step, as they are written down; predict_step.py says what they are.

A row is an item of the event engine (theory/engine.py), with its seconds or its bytes, and what the
tables of a report say about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from paralab.spec import BYTES_PER_ELEMENT, Cluster, ModelSpec, Plan
from paralab.theory import tensor
from paralab.theory.engine import Collective, Compute, Copy, Item, Wait
from paralab.theory.formulas import Work
from paralab.theory.traffic import POINT_TO_POINT, ROOTED, wire_bytes

# Sums over a token's features or entries are made in fp32, whatever the precision.
ALWAYS_FP32 = ("norm_forward", "norm_backward", "loss_forward")


class Row(NamedTuple):
    """One row of a rank's step: an engine item, and what the tables say about it."""

    item: Item
    kind: str
    microbatch: int = -1
    after: tuple[int, ...] = ()  # positions in the same list
    stage: int = 0
    payload: int = 0  # of a call, bytes
    axis: str = ""
    phase: str = ""
    ranks: tuple[int, ...] = ()  # the call's group
    peer: int = -1
    op: str = ""  # of a copy between tiers; its payload is what it moves
    category: str = ""

    @property
    def lane(self) -> str:
        if isinstance(self.item, Copy):
            return self.item.lane
        return f"comm:{self.axis}" if self.axis else "compute"


class _Common(NamedTuple):
    """What calls with the same arguments have in common: the name of their kind, the number of the
    last one, shared with all of that name, and what the item and the row say.
    """

    name: tuple
    number: list[int]
    item: tuple  # lane, members, op, wire bytes, level
    row: tuple  # payload, axis, phase, ranks, peer


class RankRows:
    """A rank's rows so far, and what it needs to write the next."""

    def __init__(self, model: ModelSpec, plan: Plan, cluster: Cluster, rank: int) -> None:
        self.model, self.plan, self.cluster, self.rank = model, plan, cluster, rank
        self.item = BYTES_PER_ELEMENT[plan.precision]
        # How many times longer products take than on infinitely many tokens.
        self.slower = 1 + cluster.half_rate_tokens / (plan.microbatch_size * model.seq_len)
        self.rows: list[Row] = []
        self.before: tuple[int, ...] = ()  # the position of the compute lane's last entry
        self.owed = 0.0  # seconds that calls and waits so far add to what is computed next
        self.calls: dict[tuple, list[int]] = {}  # so that the members of a call name it alike
        # What calls with the same arguments have in common, and those of tensor parallelism.
        self.alike: dict[tuple, _Common] = {}
        self.of_layers: dict[tensor.Call, _Common] = {}
        self.known: dict[Work, float] = {}  # seconds of work: blocks and micro-batches are alike

    def compute(self, work: Work, kind: str) -> None:
        # An optimizer works in fp32 in any precision.
        seconds = self.seconds(work, "fp32") if kind == "optimizer" else self.takes(work)
        self.computes(Compute(seconds), kind)

    def computes(
        self, item: Item, kind: str, microbatch: int = -1, after: tuple[int, ...] = (),
        stage: int = 0,
    ) -> None:  # fmt: skip
        """An entry of the compute lane: what is launched now comes after it."""
        if self.owed and isinstance(item, Compute):
            item, self.owed = Compute(item.seconds + self.owed), 0.0
        self.before = (len(self.rows),)
        self.rows.append(Row(item, kind, microbatch, after, stage))

    def takes(self, work: Work) -> float:
        """Seconds of work in the plan's precision."""
        found = self.known.get(work)
        if found is None:
            found = self.known[work] = self.seconds(work, self.plan.precision)
        return found

    def seconds(self, work: Work, precision: str) -> float:
        if self.slower > 1:
            work = replace(work, flops=work.flops * self.slower)
        return work.seconds(self.cluster, precision)

    def wait(self, *positions: int) -> None:
        if positions:
            self.computes(Wait(positions), "wait", -1, positions)
            self.owed = self.cluster.wait_overhead  # the call's own time hides its posting

    def launch(self, op: str, payload: int, ranks: tuple[int, ...], axis: str, phase: str,
               peer: int = -1) -> int:  # fmt: skip
        """Post a call; returns its position, to be waited for. peer: of a pair, or a root."""
        key = op, payload, ranks, axis, phase, peer
        found = self.alike.get(key)
        if found is None:
            found = self.alike[key] = self._common(*key)
        return self._post(found)

    def _post(self, common: _Common) -> int:
        name, number, item, row = common
        number[0] += 1
        self.owed += self.cluster.call_overhead
        item = Collective((*name, number[0]), *item)
        self.rows.append(Row(item, "comm", -1, self.before, 0, *row))
        return len(self.rows) - 1

    def _common(self, op: str, payload: int, ranks: tuple[int, ...], axis: str, phase: str,
                peer: int) -> _Common:  # fmt: skip
        lane, members = f"comm:{axis}", ranks
        pair = op in POINT_TO_POINT
        if pair:  # each direction of each pair is a wire of its own, used in order
            members = (self.rank, peer) if op == "send" else (peer, self.rank)
            lane = f"{lane}:{members[0]}>{members[1]}"
        name = ("pair", *members) if pair else (axis, phase, *members)
        nodes = {self.cluster.node_of(r) for r in members}
        root = ranks.index(peer) if op in ROOTED else 0
        wire = wire_bytes(op, payload, len(ranks), ranks.index(self.rank), root)
        item = lane, members, op, wire, "inter" if len(nodes) > 1 else "intra"
        number = self.calls.setdefault(name, [-1])
        return _Common(name, number, item, (payload, axis, phase, ranks, peer))

    def queue(self, item: Copy, kind: str, op: str, category: str, size: int) -> int:
        """Hand a job to a lane between tiers; returns its position."""
        after = (*self.before, *item.after)
        self.rows.append(Row(item, kind, -1, after, 0, size, op=op, category=category))
        return len(self.rows) - 1

    def call(self, call: tensor.Call) -> int:
        """Post a call of tensor parallelism."""
        found = self.of_layers.get(call)
        if found is None:
            ranks = self.plan.ranks(call.axis, self.rank)
            peer = ranks[call.root] if call.root >= 0 else -1
            size = call.elements * (4 if call.phase in ALWAYS_FP32 else self.item)
            found = self._common(call.op, size, ranks, call.axis, call.phase, peer)
            self.of_layers[call] = found
        return self._post(found)


class Pieces:
    """A span that is written piece by piece: every launch, copy and wait within ends a piece."""

    def __init__(self, rank: RankRows, kind: str, microbatch: int, stage: int) -> None:
        self.rank, self.kind, self.microbatch, self.stage = rank, kind, microbatch, stage
        self.seconds = 0.0

    def add(self, work: Work) -> None:
        self.seconds += self.rank.takes(work)

    def cut(self) -> None:
        """End a piece, as the recorder does."""
        self.rank.computes(Compute(self.seconds), self.kind, self.microbatch, (), self.stage)
        self.seconds = 0.0

    def launch(self, call: tensor.Call) -> int:
        """A call of tensor parallelism leaves; returns its position."""
        self.cut()
        return self.rank.call(call)

    def wait_for(self, calls: Sequence[tensor.Call]) -> None:
        """Such calls one after the other, each waited for."""
        for call in calls:
            self.rank.wait(self.launch(call))
