"""From measured iterations to a cluster that predicts further ones: `fit_cluster`.

The fit corrects at most six figures of a stated cluster, each by a factor:

    products   FLOP/s that large matrix products reach, at most those of the data sheet
    memory     bytes/s of kernels and of the operands of products
    launch     seconds in which the host launches a kernel
    inside     bytes/s of links inside a node
    between    bytes/s of a port between nodes
    latency    alpha of all links, seconds

The error of a run is the logarithm of predicted over measured seconds. The factors minimize a cost
of all errors with two safeguards. The cost is quadratic up to an error of `CLOSE` and linear beyond
(Huber 1964, "Robust Estimation of a Location Parameter"), because some iterations of a cluster are
slow for reasons of their own. And a correction by e^`SPREAD` costs as much as an error of `CLOSE`:
a figure that no run depends on stays as stated, and a handful of runs is enough. The method is
Gauss-Newton with shortened steps and derivatives by differences.

The accuracy is reported out of sample: a fit to the other models predicts the runs of each model
(with a single model, a fit to the other runs predicts each run). It is compared with the null
model, one rate of FLOP/s per device for everything. There are at most ten such fits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from paralab.checks import choice, count_of, illegal, instance, real
from paralab.interpret.predict import check_cluster
from paralab.interpret.totals import Totals
from paralab.programs.program import OPTIMIZERS
from paralab.spec import Cluster, Link, ModelSpec, Plan
from paralab.theory.needs import step_flops

CLOSE, SPREAD = 0.05, 0.2  # logarithms: a common error, a common correction
STEPS, NUDGE = 3, 0.05  # of Gauss-Newton at most; difference of logarithms for derivatives
FOLDS = 10  # fits for the accuracy out of sample
LAUNCHES = (0.7, 1.4, 2.1)  # logarithms of factors of the launch overhead to start from


class Run(NamedTuple):
    """One measured run, with its seconds per iteration."""

    model: ModelSpec
    plan: Plan
    seconds: float
    optimizer: str = "adamw"


# {factor: (the fields of a cluster that it multiplies, the figure that represents it in tables, its
# unit)}. Of a link only the part that the figure names is multiplied: alpha or bandwidth.
FACTORS: dict[str, tuple[str, str, str]] = {
    "products": ("flops products", "products", "FLOP/s"),
    "memory": ("memory_bandwidth operand_bandwidth", "memory_bandwidth", "bytes/s"),
    "launch": ("launch_overhead", "launch_overhead", "s"),
    "inside": ("intra collectives", "intra.bandwidth", "bytes/s"),
    "between": ("inter", "inter.bandwidth", "bytes/s"),
    "latency": ("intra inter collectives", "inter.alpha", "s"),
}


def _changed(cluster: Cluster, name: str, by: float) -> Cluster:
    """The cluster with the fields of one factor multiplied by ``by``."""
    fields, figure, _ = FACTORS[name]

    def times(value: Any) -> Any:
        if isinstance(value, Link):
            part = figure.partition(".")[2]
            return replace(value, **{part: getattr(value, part) * by})
        if isinstance(value, Mapping):
            return {key: times(entry) for key, entry in value.items()}
        if isinstance(value, tuple):
            return tuple(map(times, value))
        return value and value * by  # None: not stated

    return cluster.replace(**{field: times(getattr(cluster, field)) for field in fields.split()})


@dataclass(frozen=True)
class ClusterFit:
    """The result of `fit_cluster`.

    cluster    the cluster with the corrected figures, and with enough nodes for the runs
    constants  {name: (unit, as stated, as fitted)}
    runs       the runs that it was fitted to
    inside     relative errors of these runs, predicted over measured - 1
    errors     the same out of sample, each by a fit to the runs of other groups; () for one run
    null       the same by the null model, one rate for everything, from the same other runs
    """

    cluster: Cluster
    constants: dict[str, tuple[str, float, float]]
    runs: tuple[Run, ...]
    inside: tuple[float, ...]
    errors: tuple[float, ...]
    null: tuple[float, ...]

    def __repr__(self) -> str:
        count = len(self.runs)
        lines = [f"fitted to {count_of(count, 'run')}: {summary(self.inside)}"]
        if self.errors:
            lines += [f"out of sample: {summary(self.errors)}"]
            lines += [f"out of sample, with one rate for everything: {summary(self.null)}"]
        for name, (unit, before, after) in self.constants.items():
            lines.append(f"  {name:<10}{before:>12.4g} -> {after:<12.4g}{unit}")
        return "\n".join(lines)


def summary(errors: Sequence[float]) -> str:
    """Errors as text: "mean 8.1 %, median 4.9 %, at most 38.2 % off"."""
    off = [100 * abs(error) for error in errors]
    return f"mean {mean(off):.1f} %, median {median(off):.1f} %, at most {max(off):.1f} % off"


def fit_cluster(
    model_runs: Iterable[Any],
    cluster: Cluster,
    *,
    by: Callable[[Run], Hashable] | None = None,
) -> ClusterFit:
    """The cluster that predicts these iterations best, and its accuracy out of sample.

    model_runs  (model, plan, seconds per iteration), a handful or many; or reports of runs
    cluster     what is known of the machine: a preset, or figures of your own
    by          a function of a run to its group, which is left out together; default: its model

    This takes a few seconds per run. Returns a `ClusterFit`: ``cluster`` is for `pl.predict`,
    ``constants`` has the changed figures. Raises ValueError naming the run that is refused.
    """
    instance("cluster", cluster, Cluster, "a pl.Cluster(...) or a preset")
    instance("by", by, Callable | None, "a function of a run, or None", "function")
    runs = _runs(model_runs)
    devices = max(run.plan.world_size for run in runs)
    wide = cluster.replace(nodes=max(cluster.nodes, -(-devices // cluster.devices_per_node)))
    precision = runs[0].plan.product_precision
    # Factors that change nothing are left out: of figures that the cluster does not state.
    used = [name for name in FACTORS if _changed(wide, name, 2.0) != wide]
    totals = []  # every plan is compiled once
    for number, run in enumerate(runs):
        with _naming_run(number, run):
            check_cluster(run.plan, wide)
            model = run.model.resolved(gpus=wide.gpus)
            totals.append(Totals(model, run.plan, wide, run.optimizer, many=True))

    corrected = functools.cache(functools.partial(_with, wide, used))

    @functools.cache  # several fits begin at the same factors
    def error(number: int, factors: tuple[float, ...]) -> float:
        return math.log(totals[number].seconds(corrected(factors)) / runs[number].seconds)

    def errors_at(factors: Any, which: Any) -> Any:
        """The errors, as logarithms, of the runs numbered ``which`` with these factors."""
        return np.array([error(number, tuple(factors.tolist())) for number in which.tolist()])

    bounds = np.full(len(used), np.inf)
    if wide.peak_flops:
        rate = max(map(wide.rate, ("bf16", "fp16")))
        bounds[used.index("products")] = max(math.log(wide.peak_flops / rate), 0.0)
    factors, logarithms = _fitted(errors_at, np.arange(len(runs)), used, bounds)
    errors, null = _out_of_sample(runs, errors_at, used, bounds, by)
    fitted = _with(wide, used, factors)
    constants = {
        name: (unit, _figure(cluster, field, precision), _figure(fitted, field, precision))
        for name, (_, field, unit) in FACTORS.items()
        if name in used
    }
    inside = tuple(math.expm1(error) for error in logarithms)
    return ClusterFit(fitted, constants, tuple(runs), inside, errors, null)


def _figure(cluster: Cluster, field: str, precision: str) -> float:
    """A figure of the cluster; for "products" the rate in the precision of the training."""
    return cluster.rate(precision) if field == "products" else float(attrgetter(field)(cluster))


def _runs(rows: Any) -> list[Run]:
    """The rows as runs. Raises ValueError naming the row that is not a run."""
    runs = []
    for number, row in enumerate(rows if isinstance(rows, Iterable) else ()):
        with _naming_run(number, row):
            if hasattr(row, "step_time"):  # a report
                row = (row.model, row.plan, row.step_time, row.meta.get("optimizer", "adamw"))
            fields = tuple(row) if isinstance(row, Iterable) else ()
            if len(fields) not in (3, 4):
                raise ValueError("it is not a row of three")
            run = Run(*fields)
            instance("model", run.model, ModelSpec, "a pl.ModelSpec(...)", "model description")
            instance("plan", run.plan, Plan, "a pl.Plan(...)")
            run.plan.validate(run.model)
            choice("optimizer", run.optimizer, OPTIMIZERS)
            _work(run)  # refuses a model whose FLOPs are not known
            runs.append(run._replace(seconds=real("seconds", run.seconds, above=0.0)))
    if not runs:
        legal = "rows of (model, plan, seconds per iteration), or reports of runs"
        raise illegal("model_runs", rows, "there is no run in it", legal)
    return runs


@contextmanager
def _naming_run(number: int, row: Any) -> Iterator[None]:
    """Errors that are raised inside name this run."""
    try:
        yield
    except (TypeError, AttributeError, ValueError) as error:
        why = f"run {number} is refused: {error}"
        raise illegal("model_runs", row, why, "(model, plan, seconds per iteration)") from error


# ---- the fit -------------------------------------------------------------------------------------
def _with(cluster: Cluster, used: Sequence[str], factors: Sequence[float]) -> Cluster:
    """The cluster with each figure multiplied by e^factor."""
    for name, factor in zip(used, factors, strict=True):
        cluster = _changed(cluster, name, math.exp(factor))
    return cluster


def _cost(errors: Any, factors: Any) -> float:
    """Huber's cost of the errors, and the quadratic cost of the factors; both are logarithms."""
    size = np.abs(errors) / CLOSE
    return float(np.where(size < 1, size**2, 2 * size - 1).sum() + ((factors / SPREAD) ** 2).sum())


def _solved(errors: Any, slopes: Any, factors: Any, bounds: Any) -> Any:
    """The factors of least cost for errors that are linear in the factors, by reweighted least
    squares.

    errors, slopes  the errors at ``factors``, and their derivatives      (runs,), (runs, factors)
    bounds          the largest value of each factor
    """
    solution = np.array(factors)
    for _ in range(20):
        expected = errors + slopes @ (solution - factors)
        weights = 1 / np.maximum(np.abs(expected) / CLOSE, 1) / CLOSE**2  # Huber's
        left = slopes.T @ (weights[:, None] * slopes) + np.eye(len(solution)) / SPREAD**2
        right = slopes.T @ (weights * (slopes @ factors - errors))
        solution = np.linalg.solve(left, right)
        over = solution > bounds
        solution[over] = bounds[over]  # then solve for the others alone
        right = right[~over] - left[~over][:, over] @ solution[over]
        solution[~over] = np.linalg.solve(left[~over][:, ~over], right)
    return solution


def _fitted(
    errors_at: Callable[..., Any], which: Any, used: Sequence[str], bounds: Any
) -> tuple[Any, Any]:
    """(the factors that fit the runs numbered ``which`` best, the errors of these runs)."""

    def tried(factors: Any) -> tuple[float, Any, Any]:
        errors = errors_at(factors, which)
        return _cost(errors, factors), factors, errors

    # Where the device's work hides launches, the derivative of their time is zero.
    starts = (0.0, *LAUNCHES) if "launch" in used else (0.0,)
    trials = [tried(np.where(np.array(used) == "launch", start, 0.0)) for start in starts]
    cost, factors, errors = min(trials, key=itemgetter(0))
    for _ in range(STEPS):
        nudged = [errors_at(factors + row, which) for row in NUDGE * np.eye(len(used))]
        slopes = np.stack([(at_nudge - errors) / NUDGE for at_nudge in nudged], axis=1)
        step = _solved(errors, slopes, factors, bounds) - factors
        shortened = (tried(factors + fraction * step) for fraction in (1.0, 0.5, 0.25))
        better = next((trial for trial in shortened if trial[0] < cost - 1e-3), None)
        if better is None:
            break
        cost, factors, errors = better
    return factors, errors


def _out_of_sample(
    runs: Sequence[Run],
    errors_at: Callable[..., Any],
    used: Sequence[str],
    bounds: Any,
    by: Callable[[Run], Hashable] | None,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(relative errors of the fit, those of the null model) of every run, out of sample."""
    groups = [by(run) if by else run.model for run in runs]
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
        factors, _ = _fitted(errors_at, np.flatnonzero(~out), used, bounds)
        errors[out] = np.expm1(errors_at(factors, np.flatnonzero(out)))
        null[out] = rates[out] / np.median(rates[~out]) - 1
    return tuple(errors.tolist()), tuple(null.tolist())


def _work(run: Run) -> float:
    """FLOPs of one device in a step, with those of recomputation."""
    plan = run.plan
    return step_flops(run.model, plan.global_batch, recompute=plan.recompute) / plan.world_size
