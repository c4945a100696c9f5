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


class RankRows:
    """A rank's rows so far, and what it needs to write the next."""

    def __init__(self, model: ModelSpec, plan: Plan, cluster: Cluster, rank: int) -> None:
        self.model, self.plan, self.cluster, self.rank = model, plan, cluster, rank
        self.item = BYTES_PER_ELEMENT[plan.precision]
        # How many times longer products take than on infinitely many tokens.
        self.slower = 1 + cluster.half_rate_tokens / (plan.microbatch_size * model.seq_len)
        self.rows: list[Row] = []
        self.calls: dict[tuple, int] = {}  # so that the members of a call name it alike
        self.groups: dict[str, tuple[int, ...]] = {}  # of tensor parallelism, by axis
        self.alike: dict[tuple, tuple] = {}  # what calls with the same arguments have in common

    def compute(self, work: Work, kind: str, microbatch: int = -1, stage: int = 0) -> None:
        if self.slower > 1:
            work = replace(work, flops=work.flops * self.slower)
        # An optimizer works in fp32 in any precision.
        precision = "fp32" if kind == "optimizer" else self.plan.precision
        seconds = work.seconds(self.cluster, precision)
        self.rows.append(Row(Compute(seconds), kind, microbatch, stage=stage))

    def wait(self, *positions: int) -> None:
        if positions:
            self.rows.append(Row(Wait(positions), "wait", after=positions))

    def launch(self, op: str, payload: int, ranks: tuple[int, ...], axis: str, phase: str,
               peer: int = -1) -> int:  # fmt: skip
        """Post a call; returns its position, to be waited for. peer: of a pair, or a root."""
        key = op, payload, ranks, axis, phase, peer
        if key not in self.alike:
            self.alike[key] = self._common(*key)
        name, *common = self.alike[key]
        number = self.calls[name] = self.calls.get(name, -1) + 1
        item = Collective((*name, number), *common)
        self.rows.append(
            Row(item, "comm", -1, self._before(), 0, payload, axis, phase, ranks, peer)
        )
        return len(self.rows) - 1

    def _common(self, op: str, payload: int, ranks: tuple[int, ...], axis: str, phase: str,
                peer: int) -> tuple:  # fmt: skip
        """(name of its kind, lane, members, op, wire bytes, level) of a call."""
        lane, members = f"comm:{axis}", ranks
        pair = op in POINT_TO_POINT
        if pair:  # each direction of each pair is a wire of its own, used in order
            members = (self.rank, peer) if op == "send" else (peer, self.rank)
            lane = f"{lane}:{members[0]}>{members[1]}"
        name = ("pair", *members) if pair else (axis, phase, *members)
        nodes = {self.cluster.node_of(r) for r in members}
        root = ranks.index(peer) if op in ROOTED else 0
        wire = wire_bytes(op, payload, len(ranks), ranks.index(self.rank), root)
        return name, lane, members, op, wire, "inter" if len(nodes) > 1 else "intra"

    def _before(self) -> tuple[int, ...]:
        """The last entry of the compute lane: what is launched now comes after it."""
        rows = self.rows
        return next(((p,) for p in reversed(range(len(rows))) if rows[p].lane == "compute"), ())

    def queue(self, item: Copy, kind: str, op: str, category: str, size: int) -> int:
        """Hand a job to a lane between tiers; returns its position."""
        after = (*self._before(), *item.after)
        self.rows.append(Row(item, kind, -1, after, 0, size, op=op, category=category))
        return len(self.rows) - 1

    def call(self, call: tensor.Call) -> int:
        """Post a call of tensor parallelism."""
        if call.axis not in self.groups:
            self.groups[call.axis] = self.plan.ranks(call.axis, self.rank)
        ranks = self.groups[call.axis]
        peer = ranks[call.root] if call.root >= 0 else -1
        item = 4 if call.phase in ALWAYS_FP32 else self.item
        return self.launch(call.op, item * call.elements, ranks, call.axis, call.phase, peer)


class Pieces:
    """A span that is written piece by piece: every launch, copy and wait within ends a piece."""

    def __init__(self, rank: RankRows, kind: str, microbatch: int, stage: int) -> None:
        self.rank, self.said = rank, (kind, microbatch, stage)
        self.work = Work()

    def add(self, work: Work) -> None:
        self.work += work

    def cut(self) -> None:
        """End a piece, as the recorder does."""
        self.rank.compute(self.work, *self.said)
        self.work = Work()

    def launch(self, call: tensor.Call) -> int:
        """A call of tensor parallelism leaves; returns its position."""
        self.cut()
        return self.rank.call(call)

    def wait_for(self, calls: Sequence[tensor.Call]) -> None:
        """Such calls one after the other, each waited for."""
        for call in calls:
            self.rank.wait(self.launch(call))
