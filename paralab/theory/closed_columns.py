"""What a closed form is fed with: of many plans at once, every number that its terms ask for.

A column is an array with an entry per plan. Of a pipeline's ranks three are looked at: the first,
which has the embedding and most micro-batches under way, one with the most blocks, and the last,
which has the head. The others have no more of anything than one of these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from paralab.cluster import Cluster, Link
from paralab.parallel.buckets import closed
from paralab.parallel.partition import partition
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan
from paralab.theory.layer_costs import LayerBook, PartCost
from paralab.theory.search_space import LAYER, Space
from paralab.theory.workspace import Workspace, backward_workspace
from paralab.tiers import LINKS, PLACES, resolved

Array = np.ndarray
SPLIT = ("zb-h1", "zb-h2")  # schedules that put weight halves aside


class Wire(NamedTuple):
    """A link for every plan: seconds per message, and bytes per second."""

    alpha: Array
    bandwidth: Array

    def seconds(self, size: Array, messages: Array | float = 1.0) -> Array:
        return messages * self.alpha + size / self.bandwidth


class Rank(NamedTuple):
    """One of a pipeline's ranks.

    at       its position, 0 to p - 1
    blocks, first, last   how many blocks, embeddings and heads it has
    """

    at: Array
    blocks: Array
    first: Array
    last: Array


class Columns:
    """Of all plans of ``space``."""

    def __init__(
        self, model: ModelSpec, cluster: Cluster, space: Space, *, optimizer: str
    ) -> None:  # fmt: skip
        self.model, self.cluster, self.space, self.optimizer = model, cluster, space, optimizer
        self.p, self.m, self.b = space.pp, space.microbatches, space.microbatch_size
        self.dp, self.tp, self.zero = space.dp, space.tp, space.column("zero_stage")
        self.v, self.schedule = space.column("virtual_stages"), space.column("schedule")
        self.one = self.p == 1
        self.split = np.isin(self.schedule.astype(str), SPLIT)
        self.item = self.of_mix(lambda mix: BYTES_PER_ELEMENT[mix["precision"]])
        self.mixed = self.item != 4
        shard = self.of_mix(lambda mix: mix["shard"] or 0)
        self.n = np.where(shard > 0, shard, self.dp)  # ranks that share one copy of the states
        self.replicas = self.dp // self.n
        # Whether gradients are reduced in every micro-batch: `Plan.reduces_often`
        self.often = (self.zero == 3) | ((self.zero == 2) & self.one)
        self.tied = model.tied & ~self.one  # the last rank has a copy of the embedding
        self._load_layers()
        self._load_stages()
        self._dealt: dict[int, tuple[Array, Array]] = {}

    # ---- lookups -------------------------------------------------------------------------------
    def of_mix(self, ask: Callable[[dict[str, Any]], Any]) -> Array:
        """What ``ask`` says of each plan's settings beside its degrees."""
        return np.array([ask(mix) for mix in self.space.mixes])[self.space.mix]

    def _rows(self, *columns: Array) -> tuple[list[tuple[int, ...]], Array]:
        """The different rows of these whole numbers, and which one each plan has."""
        code, sizes = np.zeros(len(self.p), np.int64), [int(c.max()) + 1 for c in columns]
        for column, size in zip(columns, sizes, strict=True):
            code = code * size + column
        _, first, which = np.unique(code, return_index=True, return_inverse=True)
        return [tuple(int(column[at]) for column in columns) for at in first], which

    def _load_layers(self) -> None:
        settings: list[tuple] = []
        kind = []
        for mix in self.space.mixes:
            asked = tuple(mix[name] for name in LAYER)
            settings += [asked] * (asked not in settings)
            kind.append(settings.index(asked))
        keys, which = self._rows(self.tp, self.b, np.array(kind)[self.space.mix])
        book, made = LayerBook(self.model, self.cluster), []
        self.plans = [
            Plan(tp=tp, microbatch_size=b, **dict(zip(LAYER, settings[at], strict=True)))
            for tp, b, at in keys
        ]
        for plan in self.plans:
            inter = self.crosses(plan.tp, int(self.space.dp[0] * self.tp[0] * self.p[0]))
            made.append(book.costs(plan, inter=inter))
        self.layer, self.book = which, book  # which: position in ``plans``
        flat = [[number for part in cost[:3] for number in part] + list(cost[3:]) for cost in made]
        numbers = np.array(flat, float)[which].T
        width = len(PartCost._fields)
        self.embedding, self.block, self.head = (
            PartCost(*numbers[i * width : (i + 1) * width]) for i in range(3)
        )
        self.message, self.token, self.shared, self.shared_more = numbers[3 * width :]

    def _load_stages(self) -> None:
        keys, which = self._rows(self.p, self.v)
        found = []
        for pp, v in keys:
            stages = [sum(part.startswith("blocks.") for part in parts)
                      for parts in partition(self.model, pp * v)]  # fmt: skip
            held = [sum(stages[r::pp]) for r in range(pp)]
            most = max(range(pp), key=lambda r, held=held: (held[r], -r))
            inner = stages[:-1] or stages  # the last has fewer for its head's sake
            longer = max(inner) - sum(inner) / len(inner)
            found.append((held[0], most, held[most], held[-1], max(inner) > min(inner), longer))
        first, at, most, last, self.uneven, self.longer = np.array(found)[which].T
        nobody = np.zeros_like(first)
        self.ranks = [Rank(nobody, first, nobody + 1, 1 * self.one),
                      Rank(at, most, 1 * (at == 0), 1 * (at == self.p - 1)),
                      Rank(self.p - 1, last, 1 * self.one, nobody + 1)]  # fmt: skip
        self.whole = Rank(nobody, nobody + self.model.layers, nobody + 1, nobody + 1)

    # ---- links ---------------------------------------------------------------------------------
    def crosses(self, size: int, world: int, stride: int = 1) -> bool:
        """Whether some group of ``size`` ranks, ``stride`` apart, has ranks on different nodes."""
        per, span = self.cluster.devices_per_node, (size - 1) * stride
        firsts = (block + i for block in range(0, world, size * stride) for i in range(stride))
        return any(first // per != (first + span) // per for first in firsts)

    def wire(self, op: str, inter: Array) -> Wire:
        """The link of ``op``, where ``inter`` says that a group crosses nodes. What goes on more
        slowly after a wait is in its alpha; after a message from stage to stage, in the stage's own
        time (closed_form.py).
        """
        slower = 0.0 if op == "send" else self.cluster.wait_overhead
        near, far = self.cluster.link(op, "intra"), self.cluster.link(op, "inter")
        return Wire(np.where(inter, far.alpha, near.alpha) + slower,
                    np.where(inter, far.bandwidth, near.bandwidth))  # fmt: skip

    def _crossing(self, size: Array, stride: Array) -> Array:
        keys, which = self._rows(size, stride, self.dp * self.tp * self.p)
        return np.array([self.crosses(n, world, s) for n, s, world in keys])[which]

    @cached_property
    def dp_inter(self) -> Array:
        return self._crossing(self.n, self.tp)

    @cached_property
    def replica_inter(self) -> Array:
        keys, which = self._rows(self.replicas, self.tp * self.n, self.dp * self.tp)
        per = self.cluster.devices_per_node
        return np.array([(r - 1) * s + 1 > per or (r > 1 and w % per and per % w != 0)
                         for r, s, w in keys], bool)[which]  # fmt: skip

    @cached_property
    def hops_inter(self) -> Array:
        """Of the p - 1 hops between neighbours in a pipeline, how many go from node to node."""
        keys, which = self._rows(self.p, self.dp * self.tp)
        per = self.cluster.devices_per_node
        found = [
            sum(i * s // per != (i + 1) * s // per or ((i + 1) * s - 1) // per != ((i + 2) * s - 1)
                // per for i in range(p - 1)) for p, s in keys
        ]  # fmt: skip
        return np.array(found)[which]

    @cached_property
    def ends_inter(self) -> Array:
        """Whether a pipeline's first and last rank are on different nodes."""
        return (self.p - 1) * self.dp * self.tp + self.dp * self.tp > self.cluster.devices_per_node

    # ---- parameters ----------------------------------------------------------------------------
    def elements(self, rank: Rank) -> Array:
        """Psi of a rank: its parts' parameters, a tied head's copy of the embedding too."""
        return (rank.blocks * self.block.elements + rank.first * self.embedding.elements
                + rank.last * (self.head.elements + self.tied * self.token))  # fmt: skip

    def buckets(self, rank: Rank) -> tuple[Array, Array]:
        """(how many flat buffers the gradients of ``rank`` lie in, elements of the last to leave);
        `parallel.buckets.units`.
        """
        if id(rank) not in self._dealt:  # one of `ranks`, or `whole`: they stay
            self._dealt[id(rank)] = self._buckets(rank)
        return self._dealt[id(rank)]

    def _buckets(self, rank: Rank) -> tuple[Array, Array]:
        limit = self.of_mix(lambda mix: mix["bucket_bytes"])
        layer_kind, ends = self._rows(self.layer, self.zero > 0)[1], rank.first + 2 * rank.last
        keys, which = self._rows(layer_kind, rank.blocks, ends, self.item, limit, 1 * self.one)
        at = np.unique(which, return_index=True)[1]
        layer, zero = self.layer[at], self.zero[at]
        found, made = [], {}
        for (_, blocks, has, item, most, one), plan, stage in zip(keys, layer, zero, strict=True):
            if stage == 3:
                found.append((blocks + (has & 1) + has // 2, 0))
                continue
            held = self.book.held(self.plans[plan])
            key = (tuple(held.values()), blocks, has, item, most, one, stage > 0)
            if key not in made:
                made[key] = self._deal(held, *key[1:])
            found.append(made[key])
        count, last = np.array(found)[which].T
        return count, np.where(self.zero == 3, np.where(rank.first > 0, self.embedding.elements,
                                                        self.block.elements), last)  # fmt: skip

    def _deal(self, held: dict[str, int], blocks: int, has: int, item: int, most: int, one: int,
              zero: bool) -> tuple[int, int]:  # fmt: skip
        def of(part: str) -> list[int]:
            return [n for name, n in held.items() if name.startswith(f"{part}.")]

        token = held["embedding.token.weight"]
        tied = self.model.tied and not one
        sizes = of("embedding")[1 if zero and tied else 0 :] * (has & 1) + of("blocks.0") * blocks
        sizes += (of("head") + [token] * (tied and not zero)) * (has // 2)
        ends = list(accumulate(reversed(sizes), initial=0))
        made = closed(ends, -(-most // item))  # `assign`, without its lists
        alone = zero and tied and has > 0
        return len(made) + alone, token if alone else ends[-1] - ends[made[-1][0]]

    def workspace(self) -> Workspace:
        """What backward has in hand, `theory.workspace`; counted where something is offloaded."""
        away = self.of_mix(lambda mix: mix["offload"] is not None)
        made = [backward_workspace(self.model, plan) for plan in self.plans]
        columns = np.array(made, float)[self.layer].T * away
        found = Workspace(*columns)
        return found._replace(tied=found.tied * self.one)

    # ---- offload -------------------------------------------------------------------------------
    def place(self, state: str) -> Array:
        """Where a state lies: 0 on the device, 1 on the host, 2 in files."""

        def of(mix: dict[str, Any]) -> int:
            tiers = resolved(mix["offload"], mix["zero_stage"])
            return 0 if tiers is None else PLACES.index(getattr(tiers, state))

        return self.of_mix(of)

    def link(self, lane: str) -> Wire:
        """A link between tiers: "h2d", "d2h" or "disk"."""
        found = self.cluster.disk if lane == LINKS[2] else self.cluster.host
        found = found or Link(alpha=0.0, bandwidth=1.0)  # nobody uses it
        limit = self.of_mix(lambda mix: getattr(mix["offload"], "limits", {}).get(lane, np.inf))
        return Wire(np.full(len(limit), found.alpha), np.minimum(found.bandwidth, limit))
