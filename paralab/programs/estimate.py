"""Estimates for many plans at once: seconds and bytes of a step, one array expression per term.

The parts of a model are compiled and timed (parts.py). The rest follows from how many of them a
rank has, from the bubble of its schedule, and from the bytes that data parallelism and offload
move. Arrays have a column per plan. Three of a pipeline's ranks are estimated, one row each: the
first, which has the embedding and most micro-batches in flight; one with the most blocks; and the
last, with the head. A fourth row stands for all ranks together.

    step = compute + recompute + tp + bubble + pp + dp + offload + optimizer

p, m, v as in parallel/schedules.py. Forward and backward times include exposed communication of
tensor parallelism and ZeRO. The estimates leave out how one wait delays another; the best plans are
therefore compiled as a whole (search.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from paralab.interpret.costs import update_calls
from paralab.parallel.partition import partition
from paralab.programs.estimate_bytes import held
from paralab.programs.parts import part_table, reach
from paralab.programs.space import Space, numbered
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec
from paralab.spec.cluster import Cluster, Link
from paralab.spec.links import Reach, Way
from paralab.theory.pipeline import idle_seconds

Array = np.ndarray
Seconds = Callable[[Array], Array]  # {bytes or elements of a call: its seconds}, as a function
WHOLE = 3  # the row of all ranks together


class Estimate:
    """The estimates for all plans of a space.

    terms       {name: seconds}; the step takes their sum
    serial      seconds of a step without any overlap (interpret/serial.py)
    bubble      share of the time of forward and backward in which a rank is idle
    categories  {name: bytes} at the peak
    """

    def __init__(self, space: Space, model: ModelSpec, cluster: Cluster, optimizer: str) -> None:
        self.space, self.model, self.cluster = space, model, cluster
        self.parts = part_table(space, model, cluster)
        self.p, self.m, self.v = space.pp, space.microbatches, space.virtual_stages
        self.n, self.zero = space.shard_degree, space.zero_stage
        self.item = self.each("precision", BYTES_PER_ELEMENT.__getitem__)
        self.grad = np.where(space.grad_dtype == "fp32", 4, self.item)  # bytes of an element
        self.reduces_often = (self.zero == 3) | ((self.zero == 2) & (self.p == 1))  # as in `Plan`
        # Bytes per parameter: of the optimizer's states, and that an update moves.
        self.state_bytes = 8 * (optimizer == "adamw") + 4 * (self.item < 4)
        self.update_bytes = 12 + 16 * (optimizer == "adamw") + 6 * (self.item < 4)
        self.update_bytes = self.update_bytes + 6 * (self.grad < 4)
        self._load_stages()
        copy = model.tied & (self.p > 1)  # whether the last rank has a copy of the embedding
        self.tied = (self.first | self.last) * copy * self.parts.token  # elements of such a copy
        embedding = self.first * self.parts.embedding.elements
        head = self.last * (self.parts.head.elements + copy * self.parts.token)
        # Elements of a rank's parameters, and of its embedding or head.
        self.psi = self.blocks * self.parts.block.elements + embedding + head
        self.end_elements = np.maximum(embedding, head)
        parts = self.blocks + self.first + self.last + (self.tied > 0)
        filled, most = self.total("units") + self.last * copy, self.parts.embedding.largest
        joins = self.first * (most * self.grad >= space.bucket_bytes)  # joins the last blocks' rest
        buckets = np.where(joins, np.floor(filled), np.ceil(filled))
        self.tensors = self.total("tensors") + self.last * copy  # number of a rank's parameters
        by_tensor = (self.zero == 0) & (space.grad_sync == "naive")
        by_part = (self.zero == 3) | ((self.zero == 0) & (space.dp == 1))
        units = np.where(by_tensor, self.tensors, buckets)
        self.units = np.maximum(np.where(by_part, parts, units), 1)  # number of a rank's units
        self.updated = self.psi / np.where(self.zero > 0, self.n, 1)  # elements that it updates
        targets = np.where(self.zero == 0, self.tensors, self.units)
        what = optimizer == "adamw", self.item < 4, self.grad < 4
        self.update_calls = update_calls(self.units, targets, *what)
        ops = ("all_reduce", "reduce_scatter", "all_gather")
        self.over_shards = {op: self.collective(op, self.n) for op in ops}
        self.gather_back = self.collective("all_gather", space.backward_shard_degree)
        (self.terms, busy), self.categories = self._seconds(), held(self)
        self.serial = sum(self._seconds(overlap=False)[0].values())
        sync = self.terms.pop("sync")  # after the pipeline, as are the optimizer and offload
        inside = sum(self.terms.values()) - self.terms["optimizer"] - self.terms["offload"]
        self.terms["dp"] = self.terms["dp"] + sync
        self.bubble = np.where(self.p == 1, 0.0, 1 - busy / inside)

    # ---- columns ---------------------------------------------------------------------------------
    def each(self, name: str, f: Callable) -> Array:
        """f of a field of every plan."""
        return np.array([f(value) for value in self.space.values[name]])[self.space.codes[name]]

    def once(self, f: Callable, *columns: Array) -> Array:
        """f of these whole numbers of every plan, called once per different row."""
        _, first, which = np.unique(numbered(*columns), return_index=True, return_inverse=True)
        rows = np.stack(columns, 1)[first].tolist()
        return np.array([f(*row) for row in rows])[which]

    def _load_stages(self) -> None:
        """Per row the rank's place, its number of blocks, and whether it has embedding and head."""

        def counts_of(pp: int, v: int, samples: int) -> tuple[int, ...]:
            names = partition(self.model, pp * v, samples)
            counts = [sum(part.startswith("blocks.") for part in parts) for parts in names]
            per_rank = [sum(counts[r::pp]) for r in range(pp)]
            most = max(per_rank)
            return per_rank[0], most, per_rank[-1], per_rank.index(most)

        first, most, last, at = self.once(counts_of, self.p, self.v, self.space.microbatch_size).T
        none, end = 0 * self.p, self.p - 1
        self.at = np.stack([none, at, end, none])
        self.blocks = np.stack([first, most, last, none + self.model.layers])
        self.first, self.last = 1 * (self.at == 0), 1 * (self.at == end)
        self.first[WHOLE] = self.last[WHOLE] = 1

    def total(self, *names: str) -> Array:
        """The sum of fields of `PartFigures` over the parts of each row's rank."""
        embedding, block, head = (sum(getattr(part, n) for n in names) for part in self.parts[:3])
        return self.blocks * block + self.first * embedding + self.last * head

    def of_schedule(self, terms: dict[str, Array]) -> Array:
        """Per plan the column of its schedule, from {schedule: column}; 0 for other schedules."""
        return np.select([self.space.schedule == name for name in terms], list(terms.values()), 0.0)

    def place(self, state: str) -> Array:
        """Where a state is kept: 0 on the device, 1 on the host, 2 in files."""
        where = getattr(self.space.place, state)
        return 1 * (where == "cpu") + 2 * (where == "nvme")

    # ---- links -----------------------------------------------------------------------------------
    def link(self, op: str, size: Array, stride: Array) -> Seconds:
        """Seconds of a call by the bytes that a member sends, in groups of ``size`` ranks that are
        ``stride`` apart; without the rank's own time, which `calls` has.
        """
        near = self.cluster.devices_per_node

        def figures(*row: int) -> list[float]:
            algorithms = list(self.cluster.ways(op, reach(near, *row)).values())
            return [number for algorithm in (algorithms[0], algorithms[-1]) for number in algorithm]

        columns = self.once(figures, size, stride, self.space.dp * self.space.tp * self.p).T
        first_way, second_way = Way(*columns[:2]), Way(*columns[2:])
        return lambda sent: np.minimum(first_way.seconds(sent), second_way.seconds(sent))

    def collective(self, op: str, n: Array) -> Seconds:
        """Seconds of a collective by its elements, in a group of ``n`` that shards the states."""
        seconds = self.link(op, n, self.space.tp)
        item = self.item if op == "all_gather" else self.grad
        sent = (2 if op == "all_reduce" else 1) * (n - 1) / n * item
        return lambda elements: (n > 1) * seconds(sent * elements)

    def kernels(self, moved: Array, count: Array) -> Array:
        """Seconds of so many kernels that move these bytes."""
        seconds = moved / self.cluster.memory_bandwidth + count * self.cluster.op_overhead
        return np.maximum(seconds, count * self.cluster.launch_overhead)

    def calls(self, work: Array) -> Array:
        """Seconds of a rank's own time that a call takes, with ``work`` seconds after its wait."""
        c = self.cluster
        slower = c.wait_overhead * work / np.maximum(work + c.wait_work, 1e-30)
        return (self.space.dp > 1) * (c.call_overhead + slower)  # as in resumed.py

    def tier(self, lane: str) -> Seconds:
        """Seconds of a copy by its bytes, over a link between tiers: "h2d", "d2h" or "disk"."""
        link = self.cluster.disk if lane == "disk" else self.cluster.host
        link = link or Link(alpha=0.0, bandwidth=1.0)  # no plan uses it
        limit = self.each("offload", lambda value: getattr(value, "limits", {}).get(lane, np.inf))
        return lambda size: np.maximum(link.seconds(size), size / limit)

    # ---- time ------------------------------------------------------------------------------------
    def _seconds(self, *, overlap: bool = True) -> tuple[dict[str, Array], Array]:
        """Seconds of each term, and the ranks' mean seconds of forwards and backwards alone."""
        m, cluster = self.m, self.cluster
        forward, weight, sent = (self.total(name) for name in ("forward", "weight", "tp_wait"))
        if not overlap:
            forward, sent = (seconds + self.total("tp_hidden") for seconds in (forward, sent))
        back, recompute = self.total("backward", "recompute", "weight"), self.total("recompute")
        messages = (self.p > 1) * (2 * self.v - self.first - self.last)  # received per micro-batch
        posted = messages * (2 * cluster.call_overhead + cluster.wait_overhead)
        message, longest, carried = self.messages
        posted = posted + (not overlap) * 2 * messages * message  # is paid for at both ends
        gathered, returned, during = self.gathering(forward, back, overlap)
        per_rank, back = forward + gathered + back + returned + posted, back + returned
        slowest = per_rank[:WHOLE].argmax(0)[None]

        def pace(rows: Array) -> Array:
            """The row of the slowest rank, at whose pace the pipeline runs."""
            return np.take_along_axis(rows, slowest, 0)[0]

        slowest_rank, others = pace(per_rank), (per_rank - forward)[1]
        all_ranks = np.maximum((per_rank - during)[WHOLE] + pace(during), slowest_rank)
        halves = [rows[WHOLE] - pace(rows) for rows in (weight, np.minimum(weight, forward))]
        # A step begins with a hop to every later stage and ends with one to every earlier stage;
        # "naive" does so for each micro-batch.
        hops = (self.p > 1) * 2 * message * (self.p * self.v - 1)
        lap = (all_ranks - halves[0] + hops) / self.p
        waits = overlap * self.waits(slowest_rank, pace(weight), others, lap, longest, carried)
        # Of several chunks the first is done when the p last micro-batches have all others to go.
        last_backward = back * ((self.v - 1) * self.p + 1) / self.v
        at_end = self.after(np.where(self.space.splits, weight, last_backward), overlap)
        sync, offload, update = (rows[:WHOLE].max(0) for rows in at_end)
        busy = forward + back - returned - sent
        terms = {
            "compute": m * pace(busy - recompute),
            "recompute": m * pace(recompute),
            "tp": m * pace(sent) + self.parts.shared * self.psi[1] / self.psi[WHOLE],
            "bubble": self.idle(all_ranks, slowest_rank, *halves),
            "pp": np.where(self.space.schedule == "naive", m, 1) * hops + waits + m * pace(posted),
            "dp": m * pace(gathered + returned),
            "sync": sync,
            "offload": offload,
            "optimizer": update,
        }
        return terms, m * busy[WHOLE] / self.p

    def idle(self, through: Array, mine: Array, weights: Array, fill: Array) -> Array:
        """Seconds that the slowest rank waits for others; the arguments are those of
        `theory.pipeline.idle_seconds`. A rank recomputes its last block before its gradient has
        arrived, so that this time is not idle.
        """
        ahead = (self.p - 1) * self.parts.block.recompute * (self.space.recompute == "full")
        found = idle_seconds(self.p, self.m, self.v, through, mine, weights, fill, ahead)
        return np.where(self.p == 1, 0.0, np.maximum(self.of_schedule(found), 0.0))

    @cached_property
    def messages(self) -> tuple[Array, Array, Array]:
        """Seconds of a message, of b s h elements or of a part and the gather after it: the mean,
        and the longest; and of the longest those until its link carries the next one.
        """
        p, tp, message = self.p, self.space.tp, self.parts.message
        nodes = p * self.space.dp * tp / self.cluster.devices_per_node
        parts = self.space.partition_messages  # received in parts, then gathered over tp
        gather = parts * self.link("all_gather", tp, 1 + 0 * p)((tp - 1) / tp * message)
        message = message / np.where(parts, tp, 1)
        crossings = np.clip(np.ceil(nodes) - 1, 0, p - 1)  # hops from node to node
        ways = [self.cluster.message(message, Reach(2, *pair)) for pair in ((2, 1), (1, 2))]
        within, across = (carried + late + gather for carried, late in ways)
        hops = (p - 1 - crossings) * within + crossings * across
        carried = np.where(crossings > 0, *(carried + gather for carried, _ in reversed(ways)))
        longest = np.where(crossings > 0, across, within)
        return hops / np.maximum(p - 1, 1), longest, carried

    def waits(
        self, mine: Array, weight: Array, others: Array, lap: Array, message: Array, carried: Array
    ) -> Array:
        """Seconds per step that a full pipeline waits for messages which compute does not hide.

        From the third micro-batch on (of GPipe's: the second) each one takes, if that is more than
        the slowest rank's ``mine`` seconds,

        gpipe         what a link carries (``carried``) of two messages; or, except for the last of
                      2 k, a message and half of ``mine``, as two receives are posted at a time
        1f1b, zb-h1   ``lap``, a p-th of a micro-batch's way through all stages and back, as only p
                      are alive at once (parallel/schedules.py)
        these, zb-h2  ``mine`` and a message, as of the two that neighbours swap one is not hidden
                      (parallel/lowering.py), except by ``weight``, a weight half
        interleaved   ``others``, the backwards of a rank with the most blocks, and a message per
                      stage, as a message of each stage's two is hidden, behind a forward
        """
        swap, two, gpipe = mine - weight + message, 2 * carried, self.space.schedule == "gpipe"
        pace = {"zb-h2": swap, "interleaved": others + self.v * message}
        pace |= dict.fromkeys(("1f1b", "zb-h1"), np.maximum(swap, lap))
        pace["gpipe"] = np.maximum(two, message + mine / 2)
        waited = np.maximum(self.of_schedule(pace) - mine, 0.0)
        later, behind = np.maximum(self.m - 2 + gpipe * (self.m % 2), 0), gpipe * (1 - self.m % 2)
        return (self.p > 1) * (later * waited + behind * np.maximum(two - mine, 0.0))

    def gathering(self, forward: Array, back: Array, overlap: bool) -> tuple[Array, ...]:
        """Exposed seconds of ZeRO's gathers and reductions per micro-batch, in forward and in
        backward: 3 m Psi elements, or (m + 1) Psi in stage 2; also of fetching offloaded
        parameters. And those of both that go on while a rank waits for other stages: of forward
        only what is fetched ahead, and never the sums.

        A stage waits for its first part. The other gathers and the reductions overlap with compute
        as far as it lasts (ZeRO, arXiv:1910.02054, sec. 7.2.2); the last reduction delays the next
        gather. Reduced gradients are then added to the sum so far.
        """
        scatter = self.over_shards["reduce_scatter"]
        weights, upload, disk = self.place("parameters"), self.tier("h2d"), self.tier("disk")

        def fetch_seconds(elements: Array, gather: Seconds) -> tuple[Array, ...]:
            """Seconds on each lane to the device: the gather, the host's link, the disk."""
            size = elements / self.n * self.item
            return gather(elements), (weights > 0) * upload(size), (weights == 2) * disk(size)

        unit, block, units = self.psi / self.units, self.parts.block.elements, self.units
        gathers = self.over_shards["all_gather"], self.gather_back  # in forward, in backward
        first, first_back = (self.v * sum(fetch_seconds(block, gather)) for gather in gathers)
        lanes, lanes_back = (fetch_seconds(unit, gather) for gather in gathers)
        slowest, scatter_seconds = units * together(lanes, overlap), units * scatter(unit)
        call, call_back = self.calls(forward / units), units * self.calls(back / units)
        # Compute that can hide communication.
        forward, back = overlap * (forward + units * call), overlap * (back + call_back)
        hidden = first + (self.space.prefetch > 0) * forward
        gathers = first + np.maximum(slowest - hidden, 0.0)
        ranks = np.where(self.first & self.last, self.p, 1)  # all of a pipeline in the fourth row
        most_ahead = ranks * (first + self.space.prefetch * together(lanes, overlap))
        lane = units * (lanes_back[0] if overlap else sum(lanes_back)) + scatter_seconds
        waits = first_back + np.maximum(lane - first_back - back, 0.0) + scatter(unit)
        during = overlap * (self.zero == 3) * (np.minimum(gathers, most_ahead) + waits)
        gloo = (self.n > 1) * (not self.cluster.gpus)  # the rank adds up what it received
        added_bytes = (gloo * (1 + 1 / self.n) + 3 / self.n) * self.psi * self.grad
        added = self.kernels(added_bytes, (1 + 2 * gloo) * units) + call_back
        added = added + (self.zero == 2) * np.maximum(scatter_seconds - back, 0.0)
        returned = (self.zero == 3) * (waits + call_back) + self.reduces_often * added
        return (self.zero == 3) * (gathers + units * call), returned, during

    def after(self, last_backward: Array, overlap: bool) -> tuple[Array, Array, Array]:
        """Exposed seconds (dp, offload, optimizer) after a rank's last backward.

        Buckets are reduced as they fill (Li+ 2020, arXiv:2006.15704, sec. 3.2.3), during the last
        micro-batch's ``last_backward`` seconds; nothing hides the last bucket.
        """
        units, zero, updated = self.units, self.zero, self.updated
        unit, dp, tp = self.psi / units, self.space.dp, self.space.tp
        reduce, scatter, gather = (seconds(unit) for seconds in self.over_shards.values())
        stays = self.place("optimizer") == 0
        update = stays * self.kernels(updated * self.update_bytes, self.update_calls)
        call = self.calls(update / units)
        per_unit = np.where(zero == 0, reduce, scatter)
        hides = overlap * (self.space.grad_sync == "overlapped") * (1 - 1 / units)
        hides = hides * (last_backward + units * call)
        not_hidden = np.maximum(units * per_unit - hides, per_unit) + units * call
        exposed = np.where(self.reduces_often, per_unit, not_hidden)
        replica_count = dp // self.n
        replicas = self.link("all_reduce", replica_count, tp * self.n)
        sent = 2 * (replica_count - 1) / replica_count * updated / units * self.grad
        sums = (replica_count > 1) * (zero > 0) * (replicas(sent) + call)
        ends = self.link("all_reduce", np.minimum(self.p, 2), dp * tp * np.maximum(self.p - 1, 1))
        exposed = exposed + (self.tied > 0) * ends(self.grad * self.tied * updated / self.psi)
        gather = (gather + call) * ((zero == 1) | (zero == 2))
        calls = (sums, stays * gather)  # of one unit, next to the replicas' sum of the next unit
        exposed = exposed + (units - 1) * together(calls, overlap) + sum(calls)
        return exposed, self.offloaded(gather, overlap), update

    def offloaded(self, gather: Array, overlap: bool) -> Array:
        """Exposed seconds of all offloaded states (ZeRO-Infinity, Rajbhandari+ 2021,
        arXiv:2104.07857, sec. 6), with the gather of each updated unit.

        Copies of one unit overlap with the update of another: the slowest lane sets the pace, and
        every lane adds its time for one unit. Copies during forward and backward are exposed as far
        as they take longer than compute.
        """
        upload, download, disk = (self.tier(lane) for lane in ("h2d", "d2h", "disk"))
        names = ("parameters", "gradients", "optimizer", "activations")
        weights, sums, states, inputs = map(self.place, names)
        units, own = self.units, self.updated / self.units  # own: elements of one unit
        part, grad = own * self.item, own * self.grad
        rows = self.state_bytes + 4 * ((self.item == 4) & (weights == 0))
        file = (states == 2) * 2 * disk(rows * own) + (sums == 2) * disk(grad)
        file = file + (weights == 2) * (1 + (self.item == 4)) * disk(part)
        host = self.cluster.host_seconds
        lanes = [host(own * self.update_bytes, self.update_calls / units), file]
        lanes += [(sums == 0) * download(grad), (weights == 0) * upload(part), gather]
        update = (units - 1) * together(lanes, overlap) + sum(lanes)
        # In every micro-batch gradients are copied to the host and added there, and the inputs of
        # blocks are copied to the host and back.
        reductions = np.where(self.reduces_often, self.m, 1) * units
        moves = self.m * self.blocks * (inputs > 0)
        message, gradients_down = self.parts.message, (sums > 0) * reductions * download(grad)
        file_lane = (sums == 2) * (2 * reductions - units) * disk(grad)
        file_lane = file_lane + (inputs == 2) * 2 * moves * disk(message)
        host_lane = (sums > 0) * (reductions - units) * host(3 * grad, 1)
        down = gradients_down + moves * download(message)
        lanes = [down, moves * upload(message), file_lane, host_lane]
        block = self.parts.block
        hiding = self.m * self.blocks * (block.backward + block.weight + block.recompute)
        return (states > 0) * update + np.maximum(together(lanes, overlap) - overlap * hiding, 0.0)


def together(lanes: Sequence[Array], overlap: bool) -> Array:
    """Seconds of work on several lanes: in parallel with ``overlap``, otherwise in sequence."""
    return np.maximum.reduce(lanes) if overlap else np.add.reduce(lanes)
