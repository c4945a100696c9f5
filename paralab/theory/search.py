"""Every legal plan on a cluster, ranked: `plan_search`, and what it finds, `Search`.

All plans' step time and memory come from closed formulas (closed_form.py, closed_memory.py), which
is what makes tens of thousands of them a matter of a second. The best are then simulated event by
event, as `predict` does, and reordered by that; both figures are shown. PTD-P (Narayanan+ 2021,
arXiv:2104.04473, sec. 5) gives the answer for its own machine as three rules of thumb: tensor
parallelism up to the size of a node, pipelines across nodes, the rest data parallelism. They are
not built in here: they come out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from paralab.checks import choice, illegal, num_bytes, whole
from paralab.cluster import Cluster
from paralab.spec import ModelSpec, Plan
from paralab.theory import closed_form, closed_memory
from paralab.theory.closed_columns import Columns
from paralab.theory.outline import totals
from paralab.theory.search_space import COUNTED, Space, as_values, space
from paralab.theory.uncollected import uncollected

if TYPE_CHECKING:
    import pandas as pd

PER_DEVICE = 4  # samples of the global batch per device, where none is stated
SETTINGS = ("dp", "tp", "pp", "virtual_stages", "schedule", "microbatches", "microbatch_size",
            "zero_stage", "sequence_parallel", "recompute", "offload")  # fmt: skip


@uncollected()
def plan_search(
    model: ModelSpec, cluster: Cluster, devices: int | None = None, *,
    global_batch: int | None = None, memory: int | str | None = None, optimizer: str = "adamw",
    top: int = 20, **fixed: Any,
) -> Search:  # fmt: skip
    """Every legal plan of ``model`` on ``devices`` of ``cluster``, ranked by predicted step time.

    devices       that a plan uses, all of them; default: all that the cluster has
    global_batch  samples per step, of every plan; default: 4 per device
    memory        bytes per device, or text as "40GB"; default: what the cluster states
    optimizer     "adamw" or "sgd"
    top           how many of the best plans that fit are simulated
    fixed         any field of `Plan`: a value, or a list of values to try. Tried without: all dp,
                  tp, pp and micro-batch sizes that multiply up, every schedule, virtual stages of
                  2, 4, 8 ..., every ZeRO stage, sequence parallelism, recomputation, and offload
                  where the cluster states its links. Other fields are as `Plan` has them: precision
                  is fp32 unless said otherwise

    The closed forms rank plans as the simulation does (rank correlation 0.99 and more in
    tests/test_search.py) and know peak memory within some per cent; of the simulated plans both
    are exact predictions. Raises ValueError if nothing is legal, or nothing fits: then with the
    smallest need, and what would help.
    """
    if not isinstance(model, ModelSpec):
        raise illegal("model", model, "not a model description", "a pl.ModelSpec(...)")
    if not isinstance(cluster, Cluster):
        raise illegal("cluster", cluster, "not a cluster", "a pl.Cluster(...)")
    if model.frozen:
        raise illegal("frozen", model.frozen, "closed forms count every block as trained",
                      "(), and pl.predict for a plan of the frozen model")  # fmt: skip
    there = cluster.num_devices
    devices = whole("devices", there if devices is None else devices, at_least=1)
    if devices > there:
        raise illegal("devices", devices, f"{cluster.name!r} has {there}",
                      f"up to {there}, or cluster.replace(nodes=...)")  # fmt: skip
    choice("optimizer", optimizer, ("adamw", "sgd"))
    top = whole("top", top, at_least=1)
    room = cluster.memory if memory is None else num_bytes("memory", memory)
    batch = _global_batch(devices, global_batch, fixed)
    found = space(model, cluster, devices, batch, fixed)
    return Search(model, cluster, found, global_batch=batch, memory=room, optimizer=optimizer,
                  top=top, pinned=fixed)  # fmt: skip


def _global_batch(devices: int, stated: int | None, fixed: dict[str, Any]) -> int:
    if stated is not None:
        return whole("global_batch", stated, at_least=1)
    counts = [as_values(name, fixed[name]) for name in ("dp", *COUNTED[3:]) if name in fixed]
    if len(counts) == 3 and all(len(values) == 1 for values in counts):
        return counts[0][0] * counts[1][0] * counts[2][0]
    return PER_DEVICE * devices


class Plans(Sequence[Plan]):
    """Plans in order, made when they are asked for."""

    def __init__(self, space: Space, order: np.ndarray) -> None:
        self._space, self._order = space, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self._space.plan(number) for number in self._order[at]]
        return self._space.plan(self._order[at])

    def __iter__(self) -> Iterator[Plan]:
        return map(self._space.plan, self._order)

    def __repr__(self) -> str:
        return f"{len(self):,} plans, best first"


class Search:
    """What `plan_search` found.

    table    DataFrame, one row per plan, best first: rank, the settings, closed_s and simulated_s
             (seconds per step; NaN where not simulated), memory (bytes per device), fits, bubble
             (share of the pipeline's time), then the closed form's seconds of compute, recompute,
             tp, pp and dp communication that is waited for, offload and optimizer, and why
    best     the plan that is fastest of those that fit
    plans    all of them, in the table's order
    losers() what each other choice would cost        pareto() the front of time against memory
    """

    def __init__(
        self, model: ModelSpec, cluster: Cluster, space: Space, *, global_batch: int, memory: int,
        optimizer: str, top: int, pinned: dict[str, Any],
    ) -> None:  # fmt: skip
        self.model, self.cluster, self.global_batch = model, cluster, global_batch
        self.memory_limit, self.optimizer, self.pinned = memory, optimizer, dict(pinned)
        self.space = space
        columns = Columns(model, cluster, space, optimizer=optimizer)
        self.terms = closed_form.seconds(columns)
        self.categories = closed_memory.peaks(columns)
        self.closed = sum(self.terms.values())
        self.memory = sum(self.categories.values())
        self.simulated = np.full(len(space), np.nan)
        self.fits = self.memory <= memory
        self._simulate(top)
        if not self.fits.any():
            raise self._too_little()
        known = np.isfinite(self.simulated)
        seconds = np.where(known, self.simulated, self.closed)
        # Of those that fit the simulated come first, then by time; last what does not fit.
        self.order = np.lexsort((seconds, ~known & self.fits, ~self.fits))

    def _simulate(self, top: int) -> None:
        """The best plans that fit, as the event engine has them; memory by the exact formulas."""
        good = 0
        ranked = np.argsort(np.where(self.fits, self.closed, np.inf), kind="stable")
        for tried, at in enumerate(ranked):
            if good == top or (good and tried >= 3 * top) or not self.fits[at]:
                break
            plan = self.space.plan(at)
            seconds, peak = totals(self.model, plan, self.cluster, optimizer=self.optimizer)
            self.simulated[at], self.memory[at] = seconds, peak
            self.fits[at] = peak <= self.memory_limit
            good += bool(self.fits[at])

    def _too_little(self) -> ValueError:
        from paralab.theory.search_words import what_helps

        return what_helps(self)

    @property
    def devices(self) -> int:
        return int(self.space.dp[0] * self.space.tp[0] * self.space.pp[0])

    @property
    def best(self) -> Plan:
        return self.space.plan(self.order[0])

    @cached_property
    def plans(self) -> Plans:
        return Plans(self.space, self.order)

    @property
    def settings(self) -> list[str]:
        """Fields of `Plan` that the table has a column for."""
        several = [n for n in self.space.mixes[0] if len({str(m[n]) for m in self.space.mixes}) > 1]
        return [*SETTINGS, *(name for name in several if name not in SETTINGS)]

    @property
    def bubble(self) -> np.ndarray:
        """Idle share of each plan's pipeline part, by the closed form."""
        beside = self.terms["optimizer"] + self.terms["offload"]
        return self.terms["bubble"] / (self.closed - beside)

    @cached_property
    def table(self) -> pd.DataFrame:
        from paralab.theory.search_words import reasons

        made = self.rows(self.order)
        made.insert(0, "rank", np.arange(1, len(made) + 1))
        made["why"] = reasons(self)
        return made

    def rows(self, which: np.ndarray) -> pd.DataFrame:
        """The table's columns, but rank and why, of the plans at these positions of the space."""
        import pandas as pd

        columns, terms = {name: self.space.column(name) for name in self.settings}, self.terms
        columns |= {
            "closed_s": self.closed, "simulated_s": self.simulated, "memory": self.memory,
            "fits": self.fits, "bubble": self.bubble, "compute_s": terms["compute"],
            "recompute_s": terms["recompute"], "tp_s": terms["tensor"], "pp_s": terms["messages"],
            "dp_s": terms["gradients"], "offload_s": terms["offload"],
            "optimizer_s": terms["optimizer"],
        }  # fmt: skip
        return pd.DataFrame({
            name: pd.Series(column[which], dtype=column.dtype) for name, column in columns.items()
        })  # fmt: skip

    def pareto(self) -> pd.DataFrame:
        """Plans that no other beats in both time and memory, fastest first, fitting or not."""
        return self.rows(self.front).reset_index(drop=True)

    @cached_property
    def front(self) -> np.ndarray:
        """Positions of these plans in the space; by the closed form's time, which all have."""
        order = np.lexsort((self.memory, self.closed))
        least = np.minimum.accumulate(self.memory[order])
        better = np.r_[True, self.memory[order][1:] < least[:-1]]
        return order[better]

    def losers(self) -> pd.DataFrame:
        """For every other choice of one setting the best plan that makes it, and why it loses.

        One row per value: the setting, ``instead`` of what the winner has, that plan, its seconds
        and how many times the winner's, memory, fits, and a sentence.
        """
        from paralab.theory.search_words import losers

        return losers(self)

    def __repr__(self) -> str:
        from paralab.theory.search_words import counts

        return f"Search({counts(self)})"

    def _repr_html_(self) -> str:
        from paralab.theory.search_words import as_html

        return as_html(self)
