"""From measured iterations to a cluster that predicts the others: `fit_cluster`.

At most six figures of a stated cluster are corrected, each by a factor:

    products   FLOP/s that large matrix products reach: no more than a data sheet says
    memory     bytes/s of kernels and of products' operands
    launch     seconds of the host's program for a kernel
    inside     bytes/s of links inside a node
    between    bytes/s of a port between nodes
    latency    seconds of alpha, of all links

The factors are those that bring the logarithms of predicted over measured seconds nearest to zero,
with two restraints. A run that is further off than `CLOSE` pulls no harder than that (Huber 1964,
"Robust Estimation of a Location Parameter"), as some iterations of a cluster are slow for reasons
of their own. And a factor of e^`SPREAD` costs as much as one run that far off: what the runs say
nothing about stays as it was stated, so that a handful of them is enough. Steps of Gauss and
Newton, shortened where they do not help, with derivatives by differences.

What the fit is worth is said out of sample: every model's runs are predicted by a fit of its own
to the other models' (of a single model, every run by a fit to the others), next to the null model,
one rate of FLOP/s per device for everything. Of more than ten models, or runs, several are left out
together, so that there are ten such fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from paralab.checks import choice, illegal, instance, real
from paralab.interpret.predict import check_cluster
from paralab.interpret.totals import Totals
from paralab.programs.program import OPTIMIZERS
from paralab.spec import Cluster, Link, ModelSpec, Plan
from paralab.theory.needs import step_flops

CLOSE, SPREAD = 0.05, 0.2  # of logarithms: an error that is common, a correction that is
STEPS, NUDGE = 3, 0.05
FOLDS = 10  # fits that are made to say what the fit is worth
LAUNCHES = (0.7, 1.4, 2.1)  # logarithms of what a launch may take more than was stated


class Run(NamedTuple):
    """One measured run; ``seconds`` per iteration."""

    model: ModelSpec
    plan: Plan
    seconds: float
    optimizer: str = "adamw"


# The fields of a cluster that each factor changes, and the figure that it is shown by, with its
# unit. Of a link it changes what the figure is of: alpha or bandwidth.
FACTORS: dict[str, tuple[str, str, str]] = {
    "products": ("flops products", "products", "FLOP/s"),
    "memory": ("memory_bandwidth operand_bandwidth", "memory_bandwidth", "bytes/s"),
    "launch": ("launch_overhead", "launch_overhead", "s"),
    "inside": ("intra collectives", "intra.bandwidth", "bytes/s"),
    "between": ("inter", "inter.bandwidth", "bytes/s"),
    "latency": ("intra inter collectives", "inter.alpha", "s"),
}


def _changed(cluster: Cluster, name: str, by: float) -> Cluster:
    """The cluster with a factor's figures times ``by``."""
    fields, figure, _ = FACTORS[name]

    def times(value: Any) -> Any:
        if isinstance(value, Link):
            of = figure.partition(".")[2]
            return replace(value, **{of: getattr(value, of) * by})
        if isinstance(value, Mapping):
            return {name: times(one) for name, one in value.items()}
        if isinstance(value, tuple):
            return tuple(map(times, value))
        return value and value * by  # None: not stated

    return cluster.replace(**{field: times(getattr(cluster, field)) for field in fields.split()})


@dataclass(frozen=True)
class ClusterFit:
    """What `fit_cluster` found.

    cluster    with the corrected figures, and with nodes enough for the runs
    constants  {name: (unit, as stated, as fitted)}
    runs       what it was fitted to
    inside     relative errors of the runs that it was fitted to, predicted over measured - 1
    errors     the same, each of a fit that has not seen the run's group; () of a single run
    null       the same of one rate for everything, from the same other runs
    """

    cluster: Cluster
    constants: dict[str, tuple[str, float, float]]
    runs: tuple[Run, ...]
    inside: tuple[float, ...]
    errors: tuple[float, ...]
    null: tuple[float, ...]

    def table(self) -> Any:
        """A pandas DataFrame with a row per run: what was measured, and who is how far off (%)."""
        import pandas as pd

        rows = [
            {
                "model (B)": run.model.num_params / 1e9,
                "dp": run.plan.dp,
                "tp": run.plan.tp,
                "pp": run.plan.pp,
                "micro-batch": run.plan.microbatch_size,
                "measured (s)": run.seconds,
                "out of sample (%)": 100 * error,
                "one rate for everything (%)": 100 * null,
            }
            for run, error, null in zip(
                self.runs, self.errors or [math.nan], self.null or [math.nan], strict=True
            )
        ]
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        lines = [f"{len(self.runs)} runs, {said(self.inside)} where it was fitted"]
        if self.errors:
            lines += [f"out of sample: {said(self.errors)}"]
            lines += [f"one rate for everything: {said(self.null)}"]
        for name, (unit, before, after) in self.constants.items():
            lines.append(f"  {name:<10}{before:>12.4g} -> {after:<12.4g}{unit}")
        return "\n".join(lines)


def said(errors: Sequence[float]) -> str:
    """ "mean 8.1 %, median 4.9 %, at most 38.2 % off"."""
    off = [100 * abs(error) for error in errors]
    return f"mean {mean(off):.1f} %, median {median(off):.1f} %, at most {max(off):.1f} % off"


def fit_cluster(
    model_runs: Iterable[Any] | Mapping[ModelSpec, Any],
    cluster: Cluster,
    *,
    by: Callable[[Run], Hashable] | None = None,
) -> ClusterFit:
    """The cluster that predicts these iterations best, and how well it predicts others.

    model_runs  (model, plan, seconds per iteration), a handful or many; or
                {model: [(plan, seconds), ...]}; or reports of runs
    cluster     what is known of the machine: a preset, or stated
    by          what runs have in common that are left out together; default: their model

    A few seconds per run. Returns a `ClusterFit`: ``cluster`` is for `pl.predict`, ``constants``
    has what was changed, ``table()`` a row per run. Raises ValueError naming the run that is
    refused.
    """
    instance("cluster", cluster, Cluster, "a pl.Cluster(...) or a preset")
    instance("by", by, Callable | None, "a function of a run, or None", "function")
    runs = _runs(model_runs)
    most = max(run.plan.world_size for run in runs)
    wide = cluster.replace(nodes=max(cluster.nodes, -(-most // cluster.devices_per_node)))
    in_ = runs[0].plan.product_precision
    used = [name for name in FACTORS if _changed(wide, name, 2.0) != wide]
    steps = []  # each compiled once
    for number, run in enumerate(runs):
        with _of_run(number, run):
            check_cluster(run.plan, wide)
            model = run.model.resolved(gpus=wide.gpus)
            steps.append(Totals(model, run.plan, wide, run.optimizer, many=True))

    known: dict[bytes, Any] = {}

    def off_at(factors: Any, some: Any) -> Any:
        """Logarithms of predicted over measured seconds, of these runs with these factors."""
        off = known.setdefault(factors.tobytes(), np.full(len(runs), np.nan))
        there = _with(wide, used, factors)
        for at in some:
            if math.isnan(off[at]):
                off[at] = math.log(steps[at].seconds(there) / runs[at].seconds)
        return off[some]

    most = np.full(len(used), np.inf)
    if wide.peak_flops:
        rate = max(map(wide.rate, ("bf16", "fp16")))
        most[used.index("products")] = max(math.log(wide.peak_flops / rate), 0.0)
    factors, now = _fitted(off_at, np.arange(len(runs)), used, most)
    errors, null = _out_of_sample(runs, off_at, used, most, by)
    fitted = _with(wide, used, factors)
    shown = {
        name: (unit, _figure(cluster, at, in_), _figure(fitted, at, in_))
        for name, (_, at, unit) in FACTORS.items()
        if name in used
    }
    inside = tuple(math.expm1(one) for one in now)
    return ClusterFit(fitted, shown, tuple(runs), inside, errors, null)


def _figure(cluster: Cluster, at: str, precision: str) -> float:
    """What stands at a name; of products what they reach in the precision that was trained in."""
    return cluster.rate(precision) if at == "products" else float(attrgetter(at)(cluster))


def _runs(rows: Any) -> list[Run]:
    """Raises ValueError naming the row that is none."""
    if isinstance(rows, Mapping):
        rows = {m: list(s) if isinstance(s, Iterable) else [s] for m, s in rows.items()}
        for pairs in rows.values():
            if not all(isinstance(row, Sequence) for row in pairs):
                legal = "{model: [(plan, seconds per iteration), ...]}"
                raise illegal("model_runs", pairs, "not a list of pairs", legal)
        rows = [(model, *row) for model, several in rows.items() for row in several]
    found = []
    for number, row in enumerate(rows if isinstance(rows, Iterable) else ()):
        with _of_run(number, row):
            if hasattr(row, "step_time"):  # a report
                row = (row.model, row.plan, row.step_time, row.meta.get("optimizer", "adamw"))
            run = Run(*row)
            run.plan.validate(run.model)
            choice("optimizer", run.optimizer, OPTIMIZERS)
            _work(run)  # refuses a model whose FLOPs are not known
            found.append(run._replace(seconds=real("seconds", run.seconds, above=0.0)))
    if not found:
        legal = "rows of (model, plan, seconds per iteration), or reports of runs"
        raise illegal("model_runs", rows, "no run in it", legal)
    return found


@contextmanager
def _of_run(number: int, row: Any) -> Iterator[None]:
    """What is refused inside is said to be this run's."""
    try:
        yield
    except (TypeError, AttributeError, ValueError) as error:
        why = f"run {number} is refused: {error}"
        raise illegal("model_runs", row, why, "(model, plan, seconds per iteration)") from error


# ---- the fit -------------------------------------------------------------------------------------
def _with(cluster: Cluster, used: Sequence[str], factors: Sequence[float]) -> Cluster:
    """The cluster with e^factor of each figure."""
    for name, factor in zip(used, factors, strict=True):
        cluster = _changed(cluster, name, math.exp(factor))
    return cluster


def _cost(off: Any, factors: Any) -> float:
    """Huber's, of the runs, and of the factors."""
    size = np.abs(off) / CLOSE
    return float(np.where(size < 1, size**2, 2 * size - 1).sum() + ((factors / SPREAD) ** 2).sum())


def _solved(off: Any, slopes: Any, factors: Any, most: Any) -> Any:
    """Factors at which the cost is least, if ``off`` changed by ``slopes`` as they do here; none
    above its ``most``.
    """
    found = np.array(factors)
    for _ in range(20):
        here = off + slopes @ (found - factors)
        pulls = 1 / np.maximum(np.abs(here) / CLOSE, 1) / CLOSE**2  # Huber's weights
        left = slopes.T @ (pulls[:, None] * slopes) + np.eye(len(found)) / SPREAD**2
        right = slopes.T @ (pulls * (slopes @ factors - off))
        found = np.linalg.solve(left, right)
        over = found > most
        found[over] = most[over]  # and the others make do with that
        right = right[~over] - left[~over][:, over] @ found[over]
        found[~over] = np.linalg.solve(left[~over][:, ~over], right)
    return found


def _fitted(
    off_at: Callable[..., Any], some: Any, used: Sequence[str], most: Any
) -> tuple[Any, Any]:
    """(the factors that fit some of the runs best, their errors with them), as logarithms."""
    factors = np.zeros(len(used))
    off = off_at(factors, some)
    if "launch" in used:  # while the device's work hides launches, no slope tells of them
        for more in LAUNCHES:
            there = np.where(np.array(used) == "launch", more, 0.0)
            found = off_at(there, some)
            if _cost(found, there) < _cost(off, factors):
                factors, off = there, found
    for _ in range(STEPS):
        nudged = [off_at(factors + row, some) for row in NUDGE * np.eye(len(used))]
        slopes = np.stack([(there - off) / NUDGE for there in nudged], axis=1)
        step = _solved(off, slopes, factors, most) - factors
        for part in (1.0, 0.5, 0.25):
            found = off_at(factors + part * step, some)
            if _cost(found, factors + part * step) < _cost(off, factors) - 1e-3:
                factors, off = factors + part * step, found
                break
        else:
            break
    return factors, off


def _out_of_sample(
    runs: Sequence[Run],
    off_at: Callable[..., Any],
    used: Sequence[str],
    most: Any,
    by: Callable[[Run], Hashable] | None,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(errors, those of one rate), of every run by the runs of other groups."""
    groups: list[Hashable] = [by(run) if by else run.model for run in runs]
    if len(set(groups)) == 1:
        groups = list(range(len(runs)))
    if len(runs) == 1:
        return (), ()
    fold = {group: at % FOLDS for at, group in enumerate(dict.fromkeys(groups))}
    folds = np.array([fold[group] for group in groups])
    work = np.array([_work(run) for run in runs])
    rates = work / np.array([run.seconds for run in runs])
    errors, null = np.zeros(len(runs)), np.zeros(len(runs))
    for out in (folds == at for at in dict.fromkeys(folds.tolist())):
        there, _ = _fitted(off_at, np.flatnonzero(~out), used, most)
        errors[out] = np.expm1(off_at(there, np.flatnonzero(out)))
        null[out] = rates[out] / np.median(rates[~out]) - 1
    return tuple(errors.tolist()), tuple(null.tolist())


def _work(run: Run) -> float:
    """FLOPs of one device in a step."""
    plan = run.plan
    return step_flops(run.model, plan.global_batch, recompute=plan.recompute) / plan.world_size
