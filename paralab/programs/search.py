"""Every legal plan on a cluster, ranked: `plan_search`, and what it finds, `Search`.

Tens of thousands of plans are a matter of a second because only a few are compiled: of all others
seconds and bytes are estimates, one array expression over what compiled parts of the model take
(estimate.py). The best are compiled whole, timed and weighed as `predict` does, and reordered by
that; both figures are shown. What fits is what the compiled program holds at its peak, workspace
included: a plan that fits runs under that memory limit.

A step's time assumes that communication and copies overlap with compute wherever the program lets
them. What the same step takes where nothing overlaps (interpret/serial.py) is shown next to it, so
that a plan which is fast only because of perfect overlap can be seen to be so.

PTD-P (Narayanan+ 2021, arXiv:2104.04473, sec. 5) gives the answer for its own machine as three
rules of thumb: tensor parallelism up to the size of a node, pipelines across nodes, the rest data
parallelism. They are not built in here: they come out.
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

PER_DEVICE = 4  # samples of the global batch per device, where none is stated
SPARE = 1.1  # what an estimate of bytes may be off by
BEHIND = 1.02  # what is estimated so many times slower than the fastest compiled is not compiled
OVER = 2.0  # how many times too high it may be: plans within that may fit after all
NEAR = 30  # of these at most are compiled to see whether one does
AT_LEAST = 3  # of the best are compiled, whatever their estimates are
LARGE = 100_000  # rows of a step that cannot be folded: it takes seconds to compile
MAX_TOP = 100  # plans, each compiled: of a trillion parameters seconds each
MAX_BATCH = 2**24  # samples of a step
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

    devices       that a plan uses, all of them; default: all that the cluster has
    global_batch  samples per step, of every plan; default: dp * microbatches * microbatch_size
                  where all three are given, else 4 per device
    memory        bytes per device, or text as "40GB"; default: what the cluster states
    optimizer     "adamw" or "sgd"
    top           at most this many of the plans that fit are compiled and simulated, in the order
                  of their estimates. Of many plans (three times ``top`` and more) three are enough
                  where the next one's estimate is more than 2 % above the fastest simulated time,
                  so a larger ``top`` may change nothing. Plans that take seconds to compile come
                  last, and only if no other fits
    fixed         any field of `Plan` but passes, a schedule of one's own, "l2l" and grad_sync=None:
                  a value, or a list of values to try. Tried without: all dp, tp, pp and micro-batch
                  sizes that multiply up, every schedule of a pipeline, virtual stages of 2, 4, 8
                  ..., every ZeRO stage that has something to shard (with a pipeline, and without
                  offload, stage 2 is stage 1), sequence parallelism, recomputation, and offload
                  where the cluster states its links. Other fields are as `Plan` has them: precision
                  is fp32 unless said otherwise

    Estimates rank plans as the simulation does (rank correlation 0.97 and more in
    tests/test_search.py). Time and memory of the simulated plans are those of `pl.predict`; any
    other is said to fit if its estimate leaves a tenth to spare. Returns a `Search`, whose ``best``
    is a `Plan`. Raises ValueError if nothing is legal, or nothing fits: then with the smallest
    need, and what would help.
    """
    Plan().validate(model)  # raises what is wrong with the model itself
    check_cluster(Plan(), cluster)
    model = model.resolved(gpus=cluster.gpus)
    there = cluster.num_devices
    given = there if devices is None else devices
    devices = whole("devices", given, at_least=1, at_most=MAX_RANKS)
    if devices > there:
        legal = f"up to {there}, or cluster.replace(nodes=...)"
        raise illegal("devices", devices, f"{cluster.name!r} has {there}", legal)
    choice("optimizer", optimizer, OPTIMIZERS)
    top = whole("top", top, at_least=1, at_most=MAX_TOP)
    room = cluster.memory if memory is None else num_bytes("memory", memory)
    if global_batch is None:
        sizes = {name: fixed.get(name) for name in ("dp", "microbatches", "microbatch_size")}
        stated = all(isinstance(value, Integral) for value in sizes.values())
        global_batch = Plan(**sizes).global_batch if stated else PER_DEVICE * devices
    batch = whole("global_batch", global_batch, at_least=1, at_most=MAX_BATCH)
    found = space(model, cluster, devices, batch, fixed)
    return Search(model, cluster, found, batch, room, optimizer=optimizer, top=top, pinned=fixed)


class Search:
    """What `plan_search` found.

    table    DataFrame, one row per plan. First those that were compiled and fit, by simulated_s;
             then those that seem to fit, by closed_s; last what does not fit. So rows with a
             simulated_s alone are in the order of predictions. Columns: rank, the settings,
             closed_s and simulated_s (seconds per step, estimated and of the compiled plan; NaN
             where not compiled),
             serial_s (the same where no communication and no copy overlaps with compute; of the
             compiled plan, else estimated), memory (bytes per device), fits (by the estimate and a
             tenth more where a plan was not compiled), bubble (as estimated, a share of the time
             of forward and backward), then
             the estimate's seconds of compute, recompute, tp, pp and dp communication that is
             waited for, offload and optimizer
    best     the plan that is fastest of those that were compiled and fit
    plans    all of them, in the table's order
    losers() what each other choice would cost, and why
    pareto() the front of time against memory
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
        # Whatever may fit, by time; if none of the first does, what fits by the estimate; if none
        # of that does, what needs least, and all that needs little more.
        few = len(plans) <= 3 * top  # all can be compiled, so none is left out by its estimate
        likely = np.flatnonzero(self.memory <= (OVER if few else SPARE) * memory_limit)
        by_time = likely[np.argsort(self.closed[likely], kind="stable")]
        self._simulate(by_time, top)
        if not self._one_fits():
            self._simulate(by_time[self.fits[by_time]], top)
        if not self._one_fits():
            least = np.argsort(self.memory, kind="stable")
            near = int((self.memory <= OVER * memory_limit).sum())
            self._simulate(least, 1, min(max(near, 1), NEAR))
        if not self._one_fits():
            raise words.what_helps(self)
        # Of those that fit the simulated come first, then by time; last what does not fit.
        known = np.isfinite(self.simulated)
        seconds = np.where(known, self.simulated, self.closed)
        order = np.lexsort((seconds, ~known & self.fits, ~self.fits))
        self.plans = plans.kept(order)
        for name in ("closed", "simulated", "serial", "memory", "fits", "bubble"):
            setattr(self, name, getattr(self, name)[order])
        for columns in (self.terms, self.categories):
            columns |= {name: column[order] for name, column in columns.items()}

    def _one_fits(self) -> bool:
        """Whether one of the plans that were simulated fits."""
        return bool((np.isfinite(self.simulated) & self.fits).any())

    def _simulate(self, order: np.ndarray, top: int, most: int = 0) -> None:
        """The first plans in this order, ``most`` or three times ``top``, until ``top`` of them
        fit, or it seems in vain. Those that take seconds each come last, and only where no other
        fits.
        """
        good, fastest, few = 0, np.inf, len(order) <= top
        first = order[: most or 3 * top].tolist()
        slow = {at for at in first if self._is_slow(self.plans[at])}
        for at in sorted(first, key=slow.__contains__):
            if good == top or (good and at in slow):
                return
            if not few and good >= AT_LEAST and self.closed[at] > BEHIND * fastest:
                return
            found = Totals(self.model, self.plans[at], self.cluster, self.optimizer)
            self.simulated[at], self.memory[at] = found.seconds(), found.peak
            self.serial[at] = found.seconds(overlap=False)
            self.fits[at] = self.memory[at] <= self.memory_limit
            if self.fits[at]:
                good, fastest = good + 1, min(fastest, self.simulated[at])

    def _is_slow(self, plan: Plan) -> bool:
        return not folds(plan) and rows_of_a_pipeline(self.model, plan) > LARGE

    @property
    def devices(self) -> int:
        return self.best.world_size

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def settings(self) -> list[str]:
        """Fields of `Plan` that the table has a column for."""
        several = [name for name, values in self.plans.values.items() if len(values) > 1]
        return [*SETTINGS, *(name for name in several if name not in SETTINGS)]

    @cached_property
    def table(self) -> pd.DataFrame:
        made = self.rows(slice(None))
        made.insert(0, "rank", np.arange(1, len(made) + 1))
        return made

    def rows(self, which: Any) -> pd.DataFrame:
        """The table's columns, but rank, of the plans at these positions."""
        import pandas as pd

        columns = {name: self.plans.column(name) for name in self.settings}
        columns |= {"closed_s": self.closed, "simulated_s": self.simulated}
        columns |= {"serial_s": self.serial, "memory": self.memory}
        columns |= {"fits": self.fits, "bubble": self.bubble}
        columns |= {f"{n}_s": term for n, term in self.terms.items() if n != "bubble"}
        return pd.DataFrame(
            {n: pd.Series(column[which], dtype=column.dtype) for n, column in columns.items()}
        )

    def pareto(self) -> pd.DataFrame:
        """Plans that no other beats in both time and memory, fastest first, fitting or not."""
        return self.rows(self.front).reset_index(drop=True)

    @cached_property
    def front(self) -> np.ndarray:
        """Positions of these plans; by the estimated time, which all have."""
        order = np.lexsort((self.memory, self.closed))
        least = np.minimum.accumulate(self.memory[order])
        return order[np.r_[True, self.memory[order][1:] < least[:-1]]]

    def losers(self) -> pd.DataFrame:
        """For every other choice of one setting the best plan that makes it, and why it loses.

        One row per value: the setting, ``instead`` of what the winner has, that plan, its seconds
        and how many times the winner's, memory, fits, and a sentence.
        """
        return words.losers(self)

    def __repr__(self) -> str:
        return f"Search({words.counts(self)})"

    def _repr_html_(self) -> str:
        return words.as_html(self)
