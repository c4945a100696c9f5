"""What a step takes of many plans at once: seconds and bytes, one array expression per term.

The parts of a model are compiled and timed (parts.py); the rest follows from how many of them a
rank has, what of its schedule it waits for, and what data parallelism and offload move. A column
has an entry per plan. Of a pipeline's ranks three are looked at, a row each: the first, which has
the embedding and most micro-batches in flight, one with the most blocks, and the last, with the
head. A fourth row stands for all of them together.

    step = compute + recompute + tp + bubble + pp + dp + offload + optimizer

F, I, W: forward and the two halves of backward of one micro-batch on a rank, with what tensor
parallelism and ZeRO do not hide; p, m, v as in parallel/schedules.py. What is left out, one thing
waiting for another, shows where the best are compiled as a whole (search.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paralab.parallel.partition import partition
from paralab.parallel.schedules import SCHEDULES
from paralab.programs.estimate_bytes import held
from paralab.programs.parts import part_table, reach
from paralab.programs.space import Space, numbered
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec
from paralab.spec.cluster import Cluster, Link
from paralab.spec.links import Reach, Way
from paralab.theory.pipeline import idle_seconds

Array = np.ndarray
Seconds = Callable[[Array], Array]  # of a call with so many bytes or elements
WHOLE = 3  # the row of all ranks together


class Estimate:
    """Of all plans of a space.

    terms       {name: seconds}
    serial      seconds where no call and no copy moves while a rank computes (interpret/serial.py)
    categories  {name: bytes} at the peak
    """

    def __init__(self, space: Space, model: ModelSpec, cluster: Cluster, optimizer: str) -> None:
        self.space, self.model, self.cluster = space, model, cluster
        self.parts = part_table(space, model, cluster)
        self.p, self.m, self.v = space.pp, space.microbatches, space.virtual_stages
        self.n, self.zero = space.shard_degree, space.zero_stage
        self.item = self.each("precision", BYTES_PER_ELEMENT.__getitem__)
        wide = self.each("grad_dtype", lambda way: way == "fp32")
        self.copied = self.each("grad_dtype", lambda way: way == "fp32-copy")
        self.grad = np.where(wide, 4, self.item)  # bytes, of a gradient's
        self.often = (self.zero == 3) | ((self.zero == 2) & (self.p == 1))
        self.width = 8 * (optimizer == "adamw") + 4 * (self.item < 4)  # bytes of states
        self.moved = 12 + 16 * (optimizer == "adamw") + 6 * (self.item < 4)
        self.moved = self.moved + 6 * (self.grad < 4)  # by an update
        self._load_stages()
        copy = model.tied & (self.p > 1)  # the last rank has one of the embedding
        self.tied = (self.first | self.last) * copy * self.parts.token
        embedding = self.first * self.parts.embedding.elements
        head = self.last * (self.parts.head.elements + copy * self.parts.token)
        self.psi = self.blocks * self.parts.block.elements + embedding + head
        self.ends = np.maximum(embedding, head)
        parts = self.blocks + self.first + self.last + (self.tied > 0)
        buckets = self.total("units") + self.last * copy
        filled = np.ceil(self.psi * self.grad / self.each("bucket_bytes", float))
        units = np.where(self.zero == 3, parts, np.minimum(buckets, filled))
        self.units = np.maximum(units, 1)
        self.own = self.psi / np.where(self.zero > 0, self.n, 1)
        (self.terms, busy), self.categories = self._seconds(), held(self)
        self.serial = sum(self._seconds(overlap=False)[0].values())
        sync = self.terms.pop("sync")  # which comes behind the pipeline, as the next two do
        inside = sum(self.terms.values()) - self.terms["optimizer"] - self.terms["offload"]
        self.terms["dp"] = self.terms["dp"] + sync
        self.bubble = np.where(self.p == 1, 0.0, 1 - busy / inside)

    # ---- columns ---------------------------------------------------------------------------------
    def each(self, name: str, ask: Callable) -> Array:
        """What ``ask`` says of a field of every plan."""
        return np.array([ask(value) for value in self.space.values[name]])[self.space.codes[name]]

    def once(self, ask: Callable, *columns: Array) -> Array:
        """What ``ask`` says of these whole numbers of every plan, once for each different row."""
        _, first, which = np.unique(numbered(*columns), return_index=True, return_inverse=True)
        rows = np.stack(columns, 1)[first].tolist()
        return np.array([ask(*row) for row in rows])[which]

    def _load_stages(self) -> None:
        """How many blocks the rows' ranks have, and who has embedding and head."""

        def shares(pp: int, v: int, samples: int) -> tuple[int, ...]:
            names = partition(self.model, pp * v, samples)
            counts = [sum(part.startswith("blocks.") for part in some) for some in names]
            of_ranks = [sum(counts[r::pp]) for r in range(pp)]
            most = max(of_ranks)
            return of_ranks[0], most, of_ranks[-1], of_ranks.index(most)

        first, most, last, at = self.once(shares, self.p, self.v, self.space.microbatch_size).T
        none, end = 0 * self.p, self.p - 1
        self.at = np.stack([none, at, end, none])
        self.blocks = np.stack([first, most, last, none + self.model.layers])
        self.first, self.last = 1 * (self.at == 0), 1 * (self.at == end)
        self.first[WHOLE] = self.last[WHOLE] = 1

    def total(self, *names: str) -> Array:
        """Of the parts of each row's rank."""
        embedding, block, head = (sum(getattr(part, n) for n in names) for part in self.parts[:3])
        return self.blocks * block + self.first * embedding + self.last * head

    def of_schedule(self, found: dict[str, Array]) -> Array:
        """Each plan's own, of what every schedule has."""
        return np.select([self.space.schedule == name for name in found], list(found.values()), 0.0)

    def place(self, state: str) -> Array:
        """Where a state is kept: 0 on the device, 1 on the host, 2 in files."""
        where = getattr(self.space.place, state)
        return 1 * (where == "cpu") + 2 * (where == "nvme")

    # ---- links -----------------------------------------------------------------------------------
    def link(self, op: str, size: Array, stride: Array) -> Seconds:
        """Of the bytes that a member sends, in groups of ``size`` ranks ``stride`` apart. What goes
        on more slowly behind a wait is in each call.
        """

        def figures(*row: int) -> list[float]:
            ways = list(self.cluster.ways(op, reach(self.cluster, *row)).values())
            return [number for way in (ways[0], ways[-1]) for number in way]

        world = self.space.dp * self.space.tp * self.p
        found = self.once(figures, size, stride, world).T
        late = 0.0 if op == "send" else self.cluster.wait_overhead
        one, other = Way(*found[:2]), Way(*found[2:])
        return lambda sent: np.minimum(one.seconds(sent), other.seconds(sent)) + late

    def collective(self, op: str) -> Seconds:
        """Of elements, in the group that shares the states."""
        seconds = self.link(op, self.n, self.space.tp)
        item = self.item if op == "all_gather" else self.grad
        sent = (2 if op == "all_reduce" else 1) * (self.n - 1) / self.n * item
        return lambda elements: (self.n > 1) * seconds(sent * elements)

    def tier(self, lane: str) -> Seconds:
        """Of bytes over a link between tiers: "h2d", "d2h" or "disk"."""
        found = self.cluster.disk if lane == "disk" else self.cluster.host
        found = found or Link(alpha=0.0, bandwidth=1.0)  # no plan uses it
        limit = self.each("offload", lambda value: getattr(value, "limits", {}).get(lane, np.inf))
        return lambda size: np.maximum(found.seconds(size), size / limit)

    # ---- time ------------------------------------------------------------------------------------
    def _seconds(self, *, overlap: bool = True) -> tuple[dict[str, Array], Array]:
        """Of each term; and of a rank's forwards and backwards alone, the mean of the ranks."""
        m, cluster = self.m, self.cluster
        forward, weight, sent = (self.total(name) for name in ("forward", "weight", "sent"))
        if not overlap:
            forward, sent = (some + self.total("hidden") for some in (forward, sent))
        back, again = self.total("back", "again", "weight"), self.total("again")
        messages = (self.p > 1) * (2 * self.v - self.first - self.last)  # received per micro-batch
        posted = messages * (2 * cluster.call_overhead + cluster.wait_overhead)
        each, hops = self.messages()
        if not overlap:  # a message is paid for at both ends
            posted = posted + 2 * messages * each
        gathered, returned = self.gathering(forward, back, overlap)
        whole, back = forward + gathered + back + returned + posted, back + returned
        slowest = whole[:WHOLE].argmax(0)[None]

        def pace(rows: Array) -> Array:
            """Of the rank at whose pace the pipeline runs."""
            return np.take_along_axis(rows, slowest, 0)[0]

        mine = pace(whole)
        through = np.maximum(whole[WHOLE], mine)  # a micro-batch, on all ranks
        halves = (rows[WHOLE] - pace(rows) for rows in (weight, np.minimum(weight, forward)))
        last = self.after(np.where(self.space.splits, weight, back), overlap)
        sync, away, update = (rows[:WHOLE].max(0) for rows in last)
        busy = forward + back - returned - sent
        terms = {
            "compute": m * pace(busy - again),
            "recompute": m * pace(again),
            "tp": m * pace(sent) + self.parts.shared * self.psi[1] / self.psi[WHOLE],
            "bubble": self.idle(through, mine, *halves),
            "pp": hops + m * pace(posted),
            "dp": m * pace(gathered + returned),
            "sync": sync,
            "offload": away,
            "optimizer": update,
        }
        return terms, m * busy[WHOLE] / self.p

    def idle(self, through: Array, mine: Array, weights: Array, fill: Array) -> Array:
        """Seconds that the slowest rank waits for others (theory/pipeline.py).

        A block that is recomputed before its gradient is there, a rank's last, waits for no other
        rank.
        """
        ahead = (self.p - 1) * self.parts.block.again * (self.space.recompute == "full")
        found = idle_seconds(self.p, self.m, self.v, through, mine, weights, fill, ahead)
        return np.where(self.p == 1, 0.0, np.maximum(self.of_schedule(found), 0.0))

    def messages(self) -> tuple[Array, Array]:
        """Seconds of a message, b s h elements or a part and the gather after it, and what stages
        wait for each other's: per boundary and direction.

        A step begins with a hop to every later stage and ends with one to every earlier; naive does
        so for each micro-batch, and interleaved there are p v - 1 hops each way.
        """
        p, tp, message = self.p, self.space.tp, self.parts.message
        nodes = p * self.space.dp * tp / self.cluster.devices_per_node
        parts = self.each("partition_messages", int)  # put together by a gather over tp
        gather = parts * self.link("all_gather", tp, 1 + 0 * p)((tp - 1) / tp * message)
        message = message / np.where(parts, tp, 1)
        far = np.clip(np.ceil(nodes) - 1, 0, p - 1)  # hops from node to node
        pairs = (Reach(2, 2, 1), Reach(2, 1, 2))
        near_by, across = (
            self.cluster.ways("send", pair)["direct"].seconds(message) + gather for pair in pairs
        )
        hops = 2 * ((p - 1 - far) * near_by + far * across)
        each = hops / (2 * np.maximum(p - 1, 1))
        often = 2 * each * (p * self.v - 1)
        found = dict.fromkeys(SCHEDULES, hops) | {"naive": self.m * hops, "interleaved": often}
        return each, np.where(p == 1, 0.0, self.of_schedule(found))

    def gathering(self, forward: Array, back: Array, overlap: bool) -> tuple[Array, Array]:
        """Exposed seconds of what ZeRO does in every micro-batch, forward and backward: 3 m Psi, or
        (m + 1) Psi in stage 2; where parameters are offloaded, their way up too.

        A stage's first part is waited for. The others come, and gradients leave, while it computes,
        if there is time enough (ZeRO, arXiv:1910.02054, sec. 7.2.2); what is sent last holds up the
        next gather. Parts that came are added up, and their sum to that of earlier micro-batches.
        """
        gather, scatter = self.collective("all_gather"), self.collective("reduce_scatter")
        weights, up, disk = self.place("parameters"), self.tier("h2d"), self.tier("disk")

        def come(elements: Array) -> tuple[Array, ...]:
            """Seconds on each way to the device."""
            size = elements / self.n * self.item
            return gather(elements), (weights > 0) * up(size), (weights == 2) * disk(size)

        unit = self.psi / self.units
        first, ways = self.v * sum(come(self.parts.block.elements)), come(unit)
        slowest, left = self.units * together(ways, overlap), self.units * scatter(unit)
        forward, back = overlap * forward, overlap * back  # what hides something
        hidden = first + (self.space.prefetch > 0) * forward
        fetched = first + np.maximum(slowest - hidden, 0.0)
        lane = self.units * (ways[0] if overlap else sum(ways)) + left
        again = first + np.maximum(lane - first - back, 0.0) + scatter(unit)
        summed = ((self.n > 1) * (1 + 1 / self.n) + 3 / self.n) * self.psi * self.grad
        third, second = self.zero == 3, self.often & (self.zero == 2)
        waits = np.where(third, again, second * np.maximum(left - back, 0.0))
        return third * fetched, waits + self.often * summed / self.cluster.memory_bandwidth

    def after(self, ends: Array, overlap: bool) -> tuple[Array, Array, Array]:
        """(dp, offload, optimizer): what a rank does after its last backward.

        Buckets leave as they fill (Li+ 2020, arXiv:2006.15704, sec. 3.2.3), in what the last
        micro-batch ``ends`` with: the last one has nothing left to hide behind.
        """
        units, zero, own = self.units, self.zero, self.own
        unit, dp, tp = self.psi / units, self.space.dp, self.space.tp
        reduce, scatter, gather = (
            self.collective(op)(unit) for op in ("all_reduce", "reduce_scatter", "all_gather")
        )
        one = np.where(zero == 0, reduce, scatter)
        beside = overlap * (self.space.grad_sync == "overlapped") * ends * (1 - 1 / units)
        late = np.where(self.often, one, np.maximum(units * one - beside, one))
        copies = dp // self.n
        replicas = self.link("all_reduce", copies, tp * self.n)
        sent = 2 * (copies - 1) / copies * own / units * self.grad
        late = late + (copies > 1) * (zero > 0) * units * replicas(sent)
        both = self.link("all_reduce", np.minimum(self.p, 2), dp * tp * np.maximum(self.p - 1, 1))
        late = late + (self.tied > 0) * both(self.grad * self.tied * own / self.psi)
        stays = self.place("optimizer") == 0
        update = own * self.moved / self.cluster.memory_bandwidth
        update = (update + 6 * units * self.cluster.op_overhead) * stays
        gather = gather * ((zero == 1) | (zero == 2))
        return late + stays * units * gather, self.offloaded(gather, overlap), update

    def offloaded(self, gather: Array, overlap: bool) -> Array:
        """Exposed seconds of everything that leaves the device (ZeRO-Infinity, Rajbhandari+ 2021,
        arXiv:2104.07857, sec. 6), and of the gather of each unit that comes back.

        Copies of one unit run next to the update of another: the slowest lane sets the pace, the
        others add a unit's worth. What moves during forward and backward is waited for where it is
        slower.
        """
        up, down, disk = (self.tier(lane) for lane in ("h2d", "d2h", "disk"))
        names = ("parameters", "gradients", "optimizer", "activations")
        weights, sums, states, inputs = map(self.place, names)
        units, own = self.units, self.own / self.units  # of a unit
        part, grad = own * self.item, own * self.grad
        rows = self.width + 4 * ((self.item == 4) & (weights == 0))
        file = (states == 2) * 2 * disk(rows * own) + (sums == 2) * disk(grad)
        file = file + (weights == 2) * (1 + (self.item == 4)) * disk(part)
        host = self.cluster.host_bandwidth or 1.0
        lanes = [own * self.moved / host, file]
        lanes += [(sums == 0) * down(grad), (weights == 0) * up(part), gather]
        update = (units - 1) * together(lanes, overlap) + sum(lanes)
        # In every micro-batch gradients go down and are added, blocks' inputs go down and come up.
        often, moves = np.where(self.often, self.m, 1) * units, self.m * self.blocks * (inputs > 0)
        message, ways = self.parts.message, (sums > 0) * often * down(grad)
        filed = (sums == 2) * (2 * often - units) * disk(grad)
        filed = filed + (inputs == 2) * 2 * moves * disk(message)
        added = (sums > 0) * (often - units) * 3 * grad / host
        lanes = [ways + moves * down(message), moves * up(message), filed, added]
        moved, back = together(lanes, overlap), self.m * self.blocks * sum(self.parts.block[1:4])
        return (states > 0) * update + np.maximum(moved - overlap * back, 0.0)


def together(lanes: Sequence[Array], overlap: bool) -> Array:
    """Seconds of work on several lanes: next to each other, or one after the other."""
    return np.maximum.reduce(lanes) if overlap else np.add.reduce(lanes)
