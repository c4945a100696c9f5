"""Every legal plan on a number of devices, as columns of numbers: what a search looks through.

The values that are tried for each setting are `values`; a plan is a choice of one of each, with

    dp * tp * pp = devices        dp * microbatches * microbatch_size = global batch

and what `Plan.validate` allows. Asking it tens of thousands of times would take seconds, so it is
asked in parts, which together are as strict as the whole (tests/test_search.py compares them):

    sizes of a layer     tp, tp_mode, micro-batch, sequence_parallel: the model itself on tp ranks
    stages               pp, virtual_stages, schedule, microbatches: the model itself on pp ranks
    copies               dp, shard, zero_stage
    what goes with what  every setting at once, on a small model and two ranks per axis

Settings that have nothing to act on are left out, `needless`, where the plain one is tried too.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from paralab.checks import illegal
from paralab.cluster import Cluster
from paralab.parallel.schedules import SCHEDULES
from paralab.spec import GRAD_SYNC_FORMS, ModelSpec, Plan
from paralab.theory.predict_offload import check_links

COUNTED = ("dp", "tp", "pp", "microbatches", "microbatch_size")  # these follow from each other
PIPE = ("schedule", "virtual_stages")
LAYER = ("tp_mode", "tp_depth", "sequence_parallel", "recompute", "partition_activations",
         "precision")  # fmt: skip
FIELDS = {f.name: f.default for f in dataclasses.fields(Plan)}
TRIED: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "recompute": ("none", "selective", "full"),
    "schedule": tuple(SCHEDULES),
}


class Space(NamedTuple):
    """Legal plans as columns, one entry per plan.

    dp, tp, pp, microbatches, microbatch_size   numbers
    pipe, mix   positions in ``pipes`` and ``mixes``
    pipes       [(schedule, virtual_stages)]
    mixes       [{every other field: value}]
    """

    dp: np.ndarray
    tp: np.ndarray
    pp: np.ndarray
    microbatches: np.ndarray
    microbatch_size: np.ndarray
    pipe: np.ndarray
    mix: np.ndarray
    pipes: list[tuple[Any, int]]
    mixes: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.dp)

    def plan(self, at: int) -> Plan:
        """Plan number ``at``."""
        counts = {name: int(getattr(self, name)[at]) for name in COUNTED}
        pipe = dict(zip(PIPE, self.pipes[self.pipe[at]], strict=True))
        return Plan(**counts, **pipe, **self.mixes[self.mix[at]])

    def column(self, name: str) -> np.ndarray:
        """A field of every plan."""
        if name in COUNTED:
            return getattr(self, name)
        if name in PIPE:
            return _objects(pipe[PIPE.index(name)] for pipe in self.pipes)[self.pipe]
        return _objects(mix[name] for mix in self.mixes)[self.mix]


def _objects(values: Any) -> np.ndarray:
    listed = list(values)
    kind = type(listed[0])
    if kind in (int, bool) and all(type(value) is kind for value in listed):
        return np.array(listed)
    found = np.empty(len(listed), object)
    found[:] = listed
    return found


def values(model: ModelSpec, cluster: Cluster, pinned: dict[str, Any]) -> dict[str, tuple]:
    """{field: values that are tried} of all but the counts; ``pinned`` goes before.

    virtual_stages are 1, 2, 4 ... up to the layers; offload is tried where the cluster states its
    links. Raises ValueError on a name that `Plan` does not have.
    """
    known = set(FIELDS)
    for name in pinned:
        if name not in known:
            raise illegal(name, pinned[name], "a plan has no such field", ", ".join(sorted(known)))
    away = [None]
    if cluster.host is not None and cluster.host_bandwidth is not None:
        away += ["cpu"] + ["nvme"] * (cluster.disk is not None)
    doubled = tuple(2**k for k in range(model.layers.bit_length()) if 2**k <= model.layers)
    tried = {**TRIED, "offload": tuple(away), "virtual_stages": doubled}
    found = {}
    for name, default in FIELDS.items():
        if name not in COUNTED:
            found[name] = as_values(name, pinned[name]) if name in pinned else tried.get(
                name, (default,))  # fmt: skip
    for value in found["offload"]:
        check_links(Plan(offload=value), cluster)
    for value in filter(callable, found["grad_sync"]):
        raise illegal("grad_sync", value, "theory cannot know when a class of your own sends",
                      " | ".join(map(repr, GRAD_SYNC_FORMS)))  # fmt: skip
    for value in found["schedule"]:
        if value not in SCHEDULES:
            raise illegal("schedule", value, "there is no closed form for it; pl.predict simulates "
                          "any", " | ".join(map(repr, SCHEDULES)))  # fmt: skip
    return found


def as_values(name: str, pinned: Any) -> tuple:
    """What was pinned, each value checked as `Plan` would: one, or a list of them."""
    several = isinstance(pinned, (list, tuple, set, range, np.ndarray))
    listed = list(pinned) if several else [pinned]
    if not listed:
        raise illegal(name, pinned, "no value to try", "a value, or a list of some")
    checked = [getattr(Plan(**{name: value}), name) for value in listed]
    return tuple(value for at, value in enumerate(checked) if value not in checked[:at])


def space(
    model: ModelSpec, cluster: Cluster, devices: int, global_batch: int, pinned: dict[str, Any]
) -> Space:  # fmt: skip
    """All legal plans. Raises ValueError, saying what would help, if there is none."""
    tried = values(model, cluster, pinned)
    counts = {name: as_values(name, pinned[name]) for name in COUNTED if name in pinned}
    pipes = list(product(*(tried[name] for name in PIPE)))
    rest = [name for name in tried if name not in PIPE]
    mixes = [dict(zip(rest, chosen, strict=True)) for chosen in product(*map(tried.get, rest))]
    rules = _Rules(model, pipes, mixes)
    rows: list[tuple[int, ...]] = []
    chosen: list[np.ndarray] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ZeRO-3 beside a pipeline is legal, and warned of
        for dp, tp, pp in _degrees(devices, counts):
            for (m, b), pipe in product(_batches(global_batch, dp, counts), range(len(pipes))):
                legal = rules.mixes(dp, tp, pp, m, b, pipe)
                if len(legal):
                    rows.append((dp, tp, pp, m, b, pipe))
                    chosen.append(legal)
    if not rows:
        raise _nothing(model, devices, global_batch, pinned)
    columns = np.repeat(np.array(rows), [len(legal) for legal in chosen], axis=0)
    return Space(*columns.T, np.concatenate(chosen), pipes, mixes)


def _degrees(devices: int, pinned: dict[str, tuple]) -> Iterator[tuple[int, int, int]]:
    divisors = _divisors(devices)
    for tp in divisors:
        for pp in _divisors(devices // tp):
            found = {"dp": devices // tp // pp, "tp": tp, "pp": pp}
            if all(found[name] in pinned.get(name, found.values()) for name in found):
                yield found["dp"], tp, pp


def _batches(global_batch: int, dp: int, pinned: dict[str, tuple]) -> Iterator[tuple[int, int]]:
    if global_batch % dp:
        return
    for b in _divisors(global_batch // dp):
        m = global_batch // dp // b
        if m in pinned.get("microbatches", (m,)) and b in pinned.get("microbatch_size", (b,)):
            yield m, b


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


class _Rules:
    """Which mixes are legal where, each question asked once."""

    def __init__(
        self, model: ModelSpec, pipes: Sequence[tuple[Any, int]], mixes: list[dict[str, Any]]
    ) -> None:  # fmt: skip
        self.model, self.pipes, self.all = model, pipes, mixes
        self.stages = {mix["zero_stage"] for mix in mixes}
        self.flat = all(mix["tp_mode"] == "1d" for mix in mixes)  # the micro-batch stays whole
        self.schedules = {schedule for schedule, _ in pipes}
        self.asked: dict[tuple, Any] = {}

    def mixes(self, dp: int, tp: int, pp: int, m: int, b: int, pipe: int) -> np.ndarray:
        """Positions of the legal ones."""
        if not self._once(("pipe", pp, m % pp == 0, pipe), partial(self._pipeline, pp, m, pipe)):
            return np.zeros(0, int)
        few = tuple(min(n, 2) for n in (dp, tp, pp))
        wide = 0 if self.flat else tp  # on a grid two ranks do not say what more of them do
        schedule, v = self.pipes[pipe][0], min(self.pipes[pipe][1], 2)
        key = ("all", dp, tp, few, schedule, v, 0 if self.flat else b)
        return self._once(key, lambda: np.flatnonzero(
            self._once(("layer", tp, key[-1]), partial(self._layer, tp, b))
            & self._once(("copies", dp), partial(self._copies, dp))
            & self._once(("mix", *few, wide, schedule, v),
                         partial(self._together, *few, tp, schedule, v))
        ))  # fmt: skip

    def _once(self, key: tuple, ask: Any) -> Any:
        if key not in self.asked:
            self.asked[key] = ask()
        return self.asked[key]

    def _pipeline(self, pp: int, m: int, pipe: int) -> bool:
        schedule, v = self.pipes[pipe]
        if self._needless(pp=pp, schedule=schedule).get("schedule") in self.schedules:
            return False
        few = pp if m % pp == 0 else 1  # nobody asks for more than a multiple of pp
        return self._legal(self.model, pp=pp, microbatches=few, schedule=schedule,
                           virtual_stages=v)  # fmt: skip

    def _layer(self, tp: int, b: int) -> np.ndarray:
        def ask(mix: dict[str, Any]) -> bool:
            asked = {name: mix[name] for name in LAYER}
            key = ("one layer", tp, 0 if mix["tp_mode"] == "1d" else b, *asked.values())
            return self._once(key, lambda: self._legal(self.model, tp=tp, microbatch_size=b,
                                                       **asked))  # fmt: skip

        return np.array([ask(mix) for mix in self.all])

    def _copies(self, dp: int) -> np.ndarray:
        def ask(mix: dict[str, Any]) -> bool:
            key = ("one copy", dp, mix["shard"], mix["zero_stage"])
            return self._once(key, lambda: mix["shard"] is None or self._legal(
                self.model, dp=dp, shard=mix["shard"], zero_stage=mix["zero_stage"]))  # fmt: skip

        return np.array([ask(mix) for mix in self.all])

    def _together(
        self, dp: int, few: int, pp: int, tp: int, schedule: Any, v: int
    ) -> np.ndarray:  # fmt: skip
        """Everything at once, on as few ranks as say the same."""

        def ask(mix: dict[str, Any]) -> bool:
            plain = self._needless(dp=dp, pp=pp, zero_stage=mix["zero_stage"],
                                   offload=mix["offload"])  # fmt: skip
            if plain.get("zero_stage") in self.stages:
                return False
            t = few if mix["tp_mode"] == "1d" else tp
            shard = mix["shard"]
            if shard is not None:
                shard = 1 if shard < dp else dp
            settings = {**mix, "shard": shard}
            return self._legal(self._once(("small", t), partial(self._small, t)), dp=dp, tp=t,
                               pp=pp, microbatches=2, microbatch_size=t * t, schedule=schedule,
                               virtual_stages=v, **settings)  # fmt: skip

        return np.array([ask(mix) for mix in self.all])

    def _needless(self, **settings: Any) -> dict[str, Any]:
        key = "needless", *settings.items()
        return self._once(key, lambda: needless(Plan(**settings)))

    def _small(self, tp: int) -> ModelSpec:
        """A model whose every size ``tp`` ranks can cut in any tp_mode."""
        size = tp * tp
        return ModelSpec(layers=4, hidden=size, heads=size, seq_len=size, vocab=size,
                         dropout=self.model.dropout, attention=self.model.attention,
                         tied=self.model.tied)  # fmt: skip

    def _legal(self, model: ModelSpec, **settings: Any) -> bool:
        try:
            Plan(**settings).validate(model)
        except ValueError:
            return False
        return True


def needless(plan: Plan) -> dict[str, Any]:
    """{field: the plain value} of settings that have nothing to act on in this plan.

    One rank has no order of work to choose: 1F1B is one micro-batch after the other there. ZeRO has
    nothing to share out where there is one copy, and beside a pipeline stage 2 reduces gradients
    once a step, as stage 1 does.
    """
    found: dict[str, Any] = {}
    if plan.pp == 1 and plan.schedule != "1f1b":
        found["schedule"] = "1f1b"
    if plan.offload is None and plan.zero_stage:
        if plan.dp == 1:
            found["zero_stage"] = 0
        elif plan.zero_stage == 2 and plan.pp > 1:
            found["zero_stage"] = 1
    return found


def _nothing(
    model: ModelSpec, devices: int, global_batch: int, pinned: dict[str, Any]
) -> ValueError:  # fmt: skip
    said = ", ".join(f"{name}={value!r}" for name, value in pinned.items())
    return illegal("devices", devices, f"no legal plan of {model.layers} layers has dp*tp*pp = "
                   f"{devices} and dp*microbatches*microbatch_size = {global_batch}"
                   + f" with {said}" * bool(said),
                   "fewer settings pinned, a global_batch with more divisors, or another number of "
                   "devices")  # fmt: skip
