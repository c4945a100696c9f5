"""The search space: every legal plan on a number of devices, as columns of settings.

A plan has a value for every field, with

    dp * tp * pp = devices        dp * microbatches * microbatch_size = global batch

and has to satisfy spec/rules.py. Fields are chosen one after the other, for all plans at once, and
each rule is applied as soon as all its settings are chosen. So these are the same rules as those of
`Plan.validate`, and there are never many more candidates than legal plans. Values that have no
effect of their own (`NEEDLESS`) are left out.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from paralab.checks import count_of, illegal
from paralab.interpret.predict import check_cluster
from paralab.parallel.schedules import SCHEDULES
from paralab.spec import GRAD_SYNC_FORMS, ModelSpec, Plan, rules
from paralab.spec.cluster import Cluster
from paralab.spec.plan import MANY
from paralab.spec.rules import NONE
from paralab.spec.settings import Coded, Columns, Settings

MOST = 4_000_000  # candidates at a time; they take seconds, and a gigabyte
TRIED = {  # values tried, in the order in which fields are chosen; counts are tried by divisors
    "schedule": tuple(SCHEDULES),
    "virtual_stages": (),  # 1, 2, 4 ... up to the layers
    "zero_stage": (0, 1, 2, 3),
    "offload": (None, "cpu", "nvme"),  # as far as the cluster states its links
    "recompute": ("none", "selective", "full"),
    "sequence_parallel": (False, True),
}
# (field, value, condition): under the condition other values of the field are the same plan as this
# one. A single rank has no order of work to choose. ZeRO has nothing to shard with dp=1, and with a
# pipeline stage 2 reduces gradients once a step, as stage 1 does.
NEEDLESS = (
    ("schedule", "1f1b", lambda s: s.pp == 1),
    ("zero_stage", 0, lambda s: (s.offload == NONE) & (s.dp == 1)),
    ("zero_stage", 1, lambda s: (s.offload == NONE) & (s.pp > 1) & (s.zero_stage == 2)),
)


class Space(Columns):
    """A sequence of plans: a column for every field of `Plan` and for every derived setting."""

    def __len__(self) -> int:
        return len(self.codes["tp"])

    def __getitem__(self, at: int) -> Plan:
        return Plan(**{name: values[self.codes[name][at]] for name, values in self.values.items()})

    def column(self, name: str) -> np.ndarray:
        """The values of one field, one per plan."""
        column = getattr(self, name)
        coded = isinstance(column, Coded)
        return np.fromiter(column.values, object)[column.codes] if coded else column

    def chosen(self, name: str, tried: tuple) -> Space:
        """Each of these plans with each value in ``tried`` of one more field."""
        codes = {field: np.repeat(code, len(tried)) for field, code in self.codes.items()}
        codes[name] = np.tile(np.arange(len(tried)), len(self))
        return Space(self.model, self.values | {name: tried}, codes)

    def given(self, name: str, tried: tuple, wanted: np.ndarray) -> Space:
        """Each of these plans with its own entry of ``wanted`` as value of one more field; plans
        whose entry is not in ``tried`` are dropped.
        """
        at = {value: code for code, value in enumerate(tried)}
        code = np.array([at.get(value, -1) for value in wanted.tolist()], int)
        extended = Space(self.model, self.values | {name: tried}, self.codes | {name: code})
        return extended.kept(code >= 0)

    def kept(self, where: np.ndarray) -> Space:
        """The plans at these positions, or where a mask is true."""
        return Space(self.model, self.values, {n: code[where] for n, code in self.codes.items()})


def space(
    model: ModelSpec, cluster: Cluster, devices: int, global_batch: int, pinned: dict[str, Any]
) -> Space:
    """All legal plans. Raises ValueError, saying what would help, if there is none."""
    tried = values(model, cluster, devices, global_batch, pinned)
    rules_left = [
        lambda s: s.dp * s.tp * s.pp == devices,
        lambda s: global_batch % (s.dp * s.microbatch_size) == 0,  # can be applied before the next
        lambda s: s.dp * s.microbatches * s.microbatch_size == global_batch,
        *(rule.holds for rule in rules.RULES),
    ]
    rules_left += [
        lambda s, f=field, plain=plain, idle=idle: rules.implies(idle(s), getattr(s, f) == plain)
        for field, plain, idle in NEEDLESS
        if plain in tried[field]
    ]
    plans = Space(model, {"tp": tried["tp"]}, {"tp": np.arange(len(tried["tp"]))})
    for name in tuple(tried)[1:]:
        # No choice: their number follows from what has been chosen, and among the divisors of a
        # large batch there would be too many plans to choose from.
        if name == "microbatches":
            wanted = global_batch // (plans.dp * plans.microbatch_size)
            candidates = plans.given(name, tried[name], wanted)
        elif len(plans) * len(tried[name]) <= MOST:
            candidates = plans.chosen(name, tried[name])
        else:
            why = f"on {devices} devices there are more than {MOST:,} plans to search"
            legal = "one with fewer divisors, or some settings restricted, as in dp=[8, 16]"
            raise illegal("global_batch", global_batch, why, legal)
        plans, rules_left, (at, holds) = _sifted(candidates, rules_left)
        if len(plans):
            continue
        pins = ", ".join(f"{name}={value!r}" for name, value in pinned.items())
        why = f"no legal plan of {count_of(model.layers, 'layer')} has dp*tp*pp = {devices} and "
        why += f"dp*microbatches*microbatch_size = {global_batch}" + f" with {pins}" * bool(pins)
        broken = [rule for rule in rules.RULES if rule.holds is holds]
        try:
            rules.refuse(broken, Settings(candidates[at] if broken else Plan(), model))
        except ValueError as refusal:
            why += f"; the last one left breaks a rule: {refusal}"
        legal = "fewer given settings, a global_batch with more divisors, or another number of "
        raise illegal("devices", devices, why, legal + "devices")
    return plans


def _sifted(plans: Space, rules_left: list) -> tuple[Space, list, tuple]:
    """(legal plans, undecided rules, (position of a plan that the last rule took, that rule))."""
    legal, undecided, last = np.ones(len(plans), bool), [], (0, None)
    for holds in rules_left:
        last = (int(legal.argmax()), holds) if legal.any() else last
        try:
            legal &= holds(plans)
        except AttributeError:
            undecided.append(holds)
    return plans.kept(legal), undecided, last


def values(
    model: ModelSpec, cluster: Cluster, devices: int, global_batch: int, pinned: dict[str, Any]
) -> dict[str, tuple]:
    """{field: values that are tried}, in the order in which fields are chosen; ``pinned`` values
    replace the usual ones. Raises ValueError on a name that `Plan` does not have, and on values
    that cannot be estimated.
    """
    usual = {field.name: field.default for field in dataclasses.fields(Plan)}
    for name in pinned:
        if name not in usual:
            legal = ", ".join(("devices, global_batch, memory, optimizer, top", *sorted(usual)))
            raise illegal(name, pinned[name], "no argument of a search and no field of Plan", legal)
    offloads = cluster.host is not None and cluster.host_bandwidth is not None
    tried = dict.fromkeys(("tp", "pp", "dp"), _divisors(devices))
    for name in ("microbatch_size", "microbatches"):
        tried[name] = tuple(n for n in _divisors(global_batch) if n <= MANY)
    tried |= {name: (usual[name],) for name in usual if name not in (*tried, *TRIED)} | TRIED
    tried["virtual_stages"] = tuple(2**k for k in range(model.layers.bit_length()))
    tried["offload"] = TRIED["offload"][: 1 + offloads + (offloads and cluster.disk is not None)]
    tried |= {name: as_values(name, value) for name, value in pinned.items()}
    for value in tried["offload"]:
        check_cluster(Plan(offload=value), cluster)
    why = "the search does not try it, but pl.predict(model, plan) predicts such a plan"
    for name, known in (("grad_sync", GRAD_SYNC_FORMS), ("schedule", SCHEDULES), ("passes", ((),))):
        for value in tried[name]:
            if value not in known:
                raise illegal(name, value, why, " | ".join(map(repr, known)))
    return tried


def as_values(name: str, pinned: Any) -> tuple:
    """The values pinned for a field, one value or a list of them, each checked as by `Plan`."""
    several = isinstance(pinned, (list, tuple, set, range)) and name != "passes"
    listed = list(pinned) if several else [pinned]
    if not listed:
        raise illegal(name, pinned, "no value to try", "a value, or a list of at least one")
    return tuple(dict.fromkeys(getattr(Plan(**{name: value}), name) for value in listed))


def _divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def numbered(*columns: np.ndarray) -> np.ndarray:
    """One number per row of these columns of whole numbers; equal rows have equal numbers."""
    return np.ravel_multi_index(columns, [int(column.max()) + 1 for column in columns])
