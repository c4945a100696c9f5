"""Every legal plan on a cluster, ranked: `plan_search`, and its result, `Search`.

Searching tens of thousands of plans takes a second, because only a few are compiled. For all others
seconds and bytes are estimated, by array expressions over the figures of compiled parts of the
model (estimate.py). The best plans are compiled whole and ranked by what `predict` says of them. A
plan that fits by the peak of its compiled program runs under that memory limit.

A step's time assumes that communication and copies overlap with compute wherever the program lets
them. A plan which is fast only because of perfect overlap can be recognised by the time of the same
step without any (interpret/serial.py).

PTD-P (Narayanan+ 2021, arXiv:2104.04473, the takeaways of sec. 3) gives rules of thumb: tensor
parallelism up to the size of a node, pipelines across nodes, the rest data parallelism. The search
does not know them, and where ZeRO-3's gathers overlap perfectly its winner breaks them (lab 10).
"""

from __future__ import annotations

from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from paralab.checks import choice, illegal, num_bytes, whole
from paralab.interpret.predict import check_cluster, rows_of_a_pipeline
from paralab.interpret.totals import Totals
from paralab.programs import search_words as words
from paralab.programs.estimate import Estimate
from paralab.programs.fold import folds
from paralab.programs.program import OPTIMIZERS
from paralab.programs.space import Space, space
from paralab.spec import ModelSpec, Plan
from paralab.spec.cluster import Cluster
from paralab.spec.rules import MAX_RANKS
from paralab.theory.uncollected import uncollected

if TYPE_CHECKING:
    import pandas as pd

PER_DEVICE = 4  # samples per device of the default global batch
SPARE = 1.1  # an uncompiled plan fits if its estimated memory times this does
BEHIND = 1.02  # plans estimated so many times slower than the fastest simulated are not compiled
UNSURE = 0.5  # an estimate is too high by at most this share of what it has next to compute
FEW = 1000  # of so many plans also those that may fit by `LIKELY` are tried
LIKELY = 1.5  # estimates of memory of small models are too high by up to this factor
OVER = 2.0  # estimates of memory may be too high by this factor: plans within it may fit after all
NEAR = 30  # so many plans at least may be compiled to find those that fit
AT_LEAST = 3  # so many fitting plans are compiled, whatever their estimates are
LARGE = 100_000  # a step of more rows that cannot be folded takes seconds to compile
MAX_TOP = 100  # plans to compile; one of a trillion parameters takes seconds
MAX_BATCH = 2**24  # samples per step
SETTINGS = (
    *("dp", "tp", "pp", "virtual_stages", "schedule", "microbatches", "microbatch_size"),
    *("zero_stage", "sequence_parallel", "recompute", "offload"),
)


@uncollected()
def plan_search(
    model: ModelSpec,
    cluster: Cluster,
    devices: int | None = None,
    *,
    global_batch: int | None = None,
    memory: int | str | None = None,
    optimizer: str = "adamw",
    top: int = 20,
    **fixed: Any,
) -> Search:
    """Every legal plan of ``model`` on ``devices`` of ``cluster``, ranked by predicted step time.

    devices       number of devices that every plan uses; default: all of the cluster's
    global_batch  samples per step of every plan; default: dp * microbatches * microbatch_size if
                  all three are given, otherwise 4 per device
    memory        bytes per device, or text as "40GB"; default: what the cluster states
    optimizer     "adamw" or "sgd"
    top           at most this many of the plans that fit are compiled and simulated, in the order
                  of their estimates. If more than ``top`` may fit, then after the first three only
                  those that may still win: their estimate is at most 2 % above the fastest
                  simulated time, and its compute and half of its other seconds are below that time.
                  Plans that take seconds to compile come last, and only if no other fits
    fixed         any field of `Plan` but passes, your own schedule, "l2l" and grad_sync=None: a
                  value, or a list of values to try. By default these are tried: all dp, tp, pp and
                  micro-batch sizes with the right products, every schedule of a pipeline, virtual
                  stages of 2, 4, 8 ..., every ZeRO stage that has something to shard (with a
                  pipeline, and without offload, stage 2 is stage 1), sequence parallelism,
                  recomputation, and offload where the cluster states its links. Other fields keep
                  their defaults in `Plan`; so precision is fp32

    Returns a `Search`: ``best`` is the fastest plan, ``table`` has a row per plan. Time and memory
    of the simulated plans are those of `pl.predict`, and estimates rank plans as these do (rank
    correlation 0.97 and more in tests/test_search.py). Raises ValueError if no plan is legal or
    none fits, then with the smallest memory that a plan needs and what would help.
    """
    Plan().validate(model)  # raises what is wrong with the model itself
    check_cluster(Plan(), cluster)
    model = model.resolved(gpus=cluster.gpus)
    available = cluster.num_devices
    wanted = available if devices is None else devices
    devices = whole("devices", wanted, at_least=1, at_most=MAX_RANKS)
    if devices > available:
        legal = f"up to {available}, or cluster.replace(nodes=...)"
        raise illegal("devices", devices, f"cluster {cluster.name!r} has {available}", legal)
    choice("optimizer", optimizer, OPTIMIZERS)
    top = whole("top", top, at_least=1, at_most=MAX_TOP)
    room = cluster.memory if memory is None else num_bytes("memory", memory)
    if global_batch is None:
        sizes = {name: fixed.get(name) for name in ("dp", "microbatches", "microbatch_size")}
        stated = all(isinstance(value, Integral) for value in sizes.values())
        global_batch = Plan(**sizes).global_batch if stated else PER_DEVICE * devices
    batch = whole("global_batch", global_batch, at_least=1, at_most=MAX_BATCH)
    plans = space(model, cluster, devices, batch, fixed)
    return Search(model, cluster, plans, batch, room, optimizer=optimizer, top=top, pinned=fixed)


class Search:
    """The result of `plan_search`.

    table    DataFrame, one row per plan: first those that were compiled and fit, by simulated_s;
             then those whose estimate fits, by closed_s; last those that do not fit. Columns: rank;
             the settings; closed_s and simulated_s (seconds per step, estimated, and predicted from
             the compiled plan; NaN if not compiled); serial_s (seconds per step if no communication
             and no copy overlaps with compute; estimated if not compiled); memory (bytes per
             device); fits (if not compiled, whether the estimate and a tenth more fits); bubble
             (estimated share of the time of forward and backward); and the estimate's seconds of
             compute, recompute, exposed tp, pp and dp communication, offload and optimizer
    best     the fastest plan of those that were compiled and fit
    plans    all plans, in the table's order
    losers() what each other choice would cost, and why
    front    positions of the front of time against memory
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: Cluster,
        plans: Space,
        global_batch: int,
        memory_limit: int,
        *,
        optimizer: str,
        top: int,
        pinned: dict[str, Any],
    ) -> None:
        self.model, self.cluster, self.global_batch = model, cluster, global_batch
        self.memory_limit, self.optimizer, self.pinned = memory_limit, optimizer, pinned
        self.plans, estimate = plans, Estimate(plans, model, cluster, optimizer)
        self.terms, self.categories = estimate.terms, estimate.categories
        self.closed, self.memory = sum(self.terms.values()), sum(self.categories.values())
        self.serial, self.bubble = estimate.serial, estimate.bubble
        self.simulated = np.full(len(plans), np.nan)
        self.fits = SPARE * self.memory <= memory_limit
        # Simulate plans that may fit, fastest estimate first. If none of the first ones fits, those
        # that fit by their estimate; if none of these does either, those that need least memory.
        over = OVER if len(plans) <= 3 * top else LIKELY if len(plans) <= FEW else SPARE
        likely = np.flatnonzero(self.memory <= over * memory_limit)
        by_time = likely[np.argsort(self.closed[likely], kind="stable")]
        self._simulate(by_time, top)
        if not self._one_fits():
            self._simulate(by_time[self.fits[by_time]], top)
        if not self._one_fits():
            most = max(memory_limit, self.memory.min() * (over == OVER))
            near = np.clip((self.memory <= OVER * most).sum(), AT_LEAST, NEAR)
            self._simulate(np.argsort(self.memory, kind="stable"), 1, int(near))
        if not self._one_fits():
            raise words.what_helps(self)
        # Order: plans that fit, of these the simulated ones first, each by time; then the others.
        simulated = np.isfinite(self.simulated)
        seconds = np.where(simulated, self.simulated, self.closed)
        order = np.lexsort((seconds, ~simulated & self.fits, ~self.fits))
        self.plans = plans.kept(order)
        for name in ("closed", "simulated", "serial", "memory", "fits", "bubble"):
            setattr(self, name, getattr(self, name)[order])
        for columns in (self.terms, self.categories):
            columns |= {name: column[order] for name, column in columns.items()}

    def _one_fits(self) -> bool:
        """Whether a simulated plan fits."""
        return bool((np.isfinite(self.simulated) & self.fits).any())

    def _simulate(self, order: np.ndarray, top: int, most: int = 0) -> None:
        """Simulate the first plans in this order, ``most`` of them or the larger of three times
        ``top`` and `NEAR`, that may be the fastest, until ``top`` fit. Plans that take seconds to
        compile come last, and only if no other fits.
        """
        fitting, fastest, exhaustive = 0, np.inf, len(order) <= top
        work = self.terms["compute"] + self.terms["recompute"]
        least = np.maximum(self.closed - UNSURE * (self.closed - work), self.closed / BEHIND)
        plans = {at: self.plans[at] for at in order[: most or max(3 * top, NEAR)].tolist()}
        rows = {at: rows_of_a_pipeline(self.model, plan) for at, plan in plans.items()}
        slow = {at for at, plan in plans.items() if rows[at] > LARGE and not folds(plan)}
        for at in sorted(plans, key=slow.__contains__):
            if fitting == top or (fitting and at in slow):
                return
            if not exhaustive and fitting >= AT_LEAST and least[at] > fastest:
                continue
            totals = Totals(self.model, plans[at], self.cluster, self.optimizer)
            self.simulated[at], self.memory[at] = totals.seconds(), totals.peak
            self.serial[at] = totals.seconds(overlap=False)
            self.fits[at] = self.memory[at] <= self.memory_limit
            if self.fits[at]:
                fitting, fastest = fitting + 1, min(fastest, self.simulated[at])

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def settings(self) -> list[str]:
        """The fields of `Plan` that the table has a column for."""
        varied = [name for name, values in self.plans.values.items() if len(values) > 1]
        return [*SETTINGS, *(name for name in varied if name not in SETTINGS)]

    @cached_property
    def table(self) -> pd.DataFrame:
        table = self.rows(slice(None))
        table.insert(0, "rank", np.arange(1, len(table) + 1))
        return table

    def rows(self, which: Any) -> pd.DataFrame:
        """The table, without the column rank, for the plans at these positions."""
        import pandas as pd

        columns = {name: self.plans.column(name) for name in self.settings}
        columns |= {f"{n}_s": getattr(self, n) for n in ("closed", "simulated", "serial")}
        columns |= {n: getattr(self, n) for n in ("memory", "fits", "bubble")}
        columns |= {f"{n}_s": term for n, term in self.terms.items() if n != "bubble"}
        return pd.DataFrame(
            {n: pd.Series(column[which], dtype=column.dtype) for n, column in columns.items()}
        )

    @cached_property
    def front(self) -> np.ndarray:
        """Positions of the plans that no other plan beats in both estimated time and memory,
        fastest first, whether or not they fit.
        """
        order = np.lexsort((self.memory, self.closed))
        least = np.minimum.accumulate(self.memory[order])
        return order[np.r_[True, self.memory[order][1:] < least[:-1]]]

    def losers(self) -> pd.DataFrame:
        """For every other value of one setting the best plan with that value, and why it loses.

        One row per value: setting, ``instead`` (the value), plan, estimated seconds, times (how
        many times the winner's estimate), memory, fits, and why, a sentence.
        """
        return words.losers(self)

    def __repr__(self) -> str:
        return f"Search({words.counts(self)})"

    def _repr_html_(self) -> str:
        return words.as_html(self)
