"""Every legal plan on a number of devices, as columns of settings: what a search looks through.

A plan is a choice of a value for every field, with

    dp * tp * pp = devices        dp * microbatches * microbatch_size = global batch

and what rules.py allows. Fields are chosen one after the other, for all plans at once, and a rule
is asked as soon as all that it speaks of has been chosen: so it is the very rule of
`Plan.validate`, and there are never many more plans than the legal ones. Settings that have nothing
to act on (`NEEDLESS`) are left out where the plain one is tried too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from paralab.checks import illegal
from paralab.interpret.predict import check_cluster
from paralab.parallel.schedules import SCHEDULES
from paralab.spec import GRAD_SYNC_FORMS, ModelSpec, Plan, rules
from paralab.spec.cluster import Cluster
from paralab.spec.rules import NONE
from paralab.spec.settings import Coded, Columns

MOST = 4_000_000  # plans at a time: some seconds, and a gigabyte
TRIED = {  # all but the counts, for which there are divisors; in the order of their choice
    "schedule": tuple(SCHEDULES),
    "virtual_stages": (),  # 1, 2, 4 ... up to the layers
    "zero_stage": (0, 1, 2, 3),
    "offload": (None, "cpu", "nvme"),  # where the cluster states its links
    "recompute": ("none", "selective", "full"),
    "sequence_parallel": (False, True),
}
# (field, the plain value, where any other has nothing to act on). One rank has no order of work to
# choose. ZeRO has nothing to shard where there is one copy, and with a pipeline stage 2 reduces
# gradients once a step, as stage 1 does.
NEEDLESS = (
    ("schedule", "1f1b", lambda s: s.pp == 1),
    ("zero_stage", 0, lambda s: (s.offload == NONE) & (s.dp == 1)),
    (
        "zero_stage",
        1,
        lambda s: (s.offload == NONE) & (s.dp > 1) & (s.pp > 1) & (s.zero_stage == 2),
    ),
)


class Space(Columns):
    """A sequence of plans: a column for every field of `Plan`, and for what follows from them."""

    def __len__(self) -> int:
        return len(self.codes["tp"])

    def __getitem__(self, at: int) -> Plan:
        return Plan(**{name: some[self.codes[name][at]] for name, some in self.values.items()})

    def column(self, name: str) -> np.ndarray:
        """A field of every plan, as plain values."""
        found = getattr(self, name)
        if isinstance(found, Coded):
            return np.fromiter(found.values, object)[found.codes]
        return found

    def chosen(self, name: str, several: tuple) -> Space:
        """Each of these plans with each value of one more field."""
        codes = {field: np.repeat(code, len(several)) for field, code in self.codes.items()}
        codes[name] = np.tile(np.arange(len(several)), len(self))
        return Space(self.model, self.values | {name: several}, codes)

    def given(self, name: str, several: tuple, wanted: np.ndarray) -> Space:
        """Each of these plans with the value of one more field that it wants, if that is one of
        ``several``.
        """
        at = {value: code for code, value in enumerate(several)}
        code = np.array([at.get(value, -1) for value in wanted.tolist()], int)
        found = Space(self.model, self.values | {name: several}, self.codes | {name: code})
        return found.kept(code >= 0)

    def kept(self, those: np.ndarray) -> Space:
        """The plans at these positions, or where this is true."""
        return Space(self.model, self.values, {n: code[those] for n, code in self.codes.items()})


def space(
    model: ModelSpec, cluster: Cluster, devices: int, global_batch: int, pinned: dict[str, Any]
) -> Space:
    """All legal plans. Raises ValueError, saying what would help, if there is none."""
    tried = values(model, cluster, devices, global_batch, pinned)
    asked = [
        lambda s: s.dp * s.tp * s.pp == devices,
        lambda s: global_batch % (s.dp * s.microbatch_size) == 0,  # sooner than the next
        lambda s: s.dp * s.microbatches * s.microbatch_size == global_batch,
        *(rule.holds for rule in rules.RULES),
    ]
    asked += [
        lambda s, field=field, plain=plain, idle=idle: rules.implies(
            idle(s), getattr(s, field) == plain
        )
        for field, plain, idle in NEEDLESS
        if plain in tried[field]
    ]
    found = Space(model, {"tp": tried["tp"]}, {"tp": np.arange(len(tried["tp"]))})
    for name in tuple(tried)[1:]:
        if name == "microbatches":
            rest = global_batch // (found.dp * found.microbatch_size)
            found, asked = _sifted(found.given(name, tried[name], rest), asked)
            continue
        if len(found) * len(tried[name]) > MOST:
            why = f"on {devices} devices it makes more than {MOST:,} plans to look through"
            legal = "one with fewer divisors, or some settings pinned, as dp=[8, 16]"
            raise illegal("global_batch", global_batch, why, legal)
        found, asked = _sifted(found.chosen(name, tried[name]), asked)
    for holds in asked:  # none is left, or it says what it misses
        holds(found)
    if not len(found):
        said = ", ".join(f"{name}={value!r}" for name, value in pinned.items())
        why = f"no legal plan of {model.layers} layers has dp*tp*pp = {devices} and "
        why += f"dp*microbatches*microbatch_size = {global_batch}" + f" with {said}" * bool(said)
        legal = "fewer settings pinned, a global_batch with more divisors, or another number of "
        raise illegal("devices", devices, why, legal + "devices")
    return found


def _sifted(found: Space, asked: list) -> tuple[Space, list]:
    """Without the plans that break a rule; and the rules that speak of what is still to come."""
    keep, later = np.ones(len(found), bool), []
    for holds in asked:
        try:
            keep &= holds(found)
        except AttributeError:
            later.append(holds)
    return found.kept(keep), later


def values(
    model: ModelSpec, cluster: Cluster, devices: int, global_batch: int, pinned: dict[str, Any]
) -> dict[str, tuple]:
    """{field: values that are tried}, in the order in which they are chosen; ``pinned`` goes
    before. Raises ValueError on a name that `Plan` does not have, and on what no estimate can be
    made of.
    """
    kinds = {field.name: field for field in dataclasses.fields(Plan)}
    fields = {name: field.default for name, field in kinds.items()}
    for name in pinned:
        if name not in fields:
            raise illegal(name, pinned[name], "a plan has no such field", ", ".join(sorted(fields)))
    away = cluster.host is not None and cluster.host_bandwidth is not None
    tried = dict.fromkeys(("tp", "pp", "dp"), _divisors(devices))
    for name in ("microbatch_size", "microbatches"):
        _, most = kinds[name].metadata["range"]
        tried[name] = tuple(n for n in _divisors(global_batch) if n <= most)
    tried |= {name: (fields[name],) for name in fields if name not in (*tried, *TRIED)} | TRIED
    tried["virtual_stages"] = tuple(2**k for k in range(model.layers.bit_length()))
    tried["offload"] = TRIED["offload"][: 1 + away + (away and cluster.disk is not None)]
    tried |= {name: as_values(name, value) for name, value in pinned.items()}
    for value in tried["offload"]:
        check_cluster(Plan(offload=value), cluster)
    why = "not searched, but pl.predict times it, one plan at a time"
    for name, known in (("grad_sync", GRAD_SYNC_FORMS), ("schedule", SCHEDULES), ("passes", ((),))):
        for value in tried[name]:
            if value not in known:
                raise illegal(name, value, why, " | ".join(map(repr, known)))
    return tried


def as_values(name: str, pinned: Any) -> tuple:
    """What was pinned, each value checked as `Plan` would: one, or a list of them."""
    if isinstance(pinned, np.ndarray):
        pinned = list(np.atleast_1d(pinned))
    several = isinstance(pinned, (list, tuple, set, range)) and name != "passes"
    listed = list(pinned) if several else [pinned]
    if not listed:
        raise illegal(name, pinned, "no value to try", "a value, or a list of some")
    return tuple(dict.fromkeys(getattr(Plan(**{name: value}), name) for value in listed))


def _divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def numbered(*columns: np.ndarray) -> np.ndarray:
    """A number for each different row of these columns of whole numbers."""
    return np.ravel_multi_index(columns, [int(column.max()) + 1 for column in columns])
