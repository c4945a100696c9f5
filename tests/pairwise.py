"""A short list of plans in which every two settings that can meet do meet.

Most faults of a program with many settings need only two of them together (Kuhn, Wallace and Gallo
2004, "Software fault interactions", IEEE TSE 30(6)), and all pairs fit into about as many plans as
the two largest settings have combinations. The list is built greedily, as by AETG (Cohen+ 1997,
IEEE TSE 23(7)): each plan starts from a pair that no plan has yet, and takes of every other setting
the value that brings in most others, over the ranks that it costs.

What is legal is asked of the code. A refusal names the settings at odds, so the search for a legal
plan with a given pair changes those it names, breadth first. So a pair that becomes legal is
covered from then on; one that never is comes with its refusal.

A setting that does nothing in a plan (``prefetch`` without ZeRO's stage 3) is absent there.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import paralab as pl

Values = Mapping[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]  # two (setting, value), in the order of SETTINGS

MAX_RANKS = 8
SEEDS = 2  # plans that are tried for each one taken
DRAW = 7  # of some hundred draws, one whose list is short, cheap and rich in threes
START = 192  # of a plan, in the unit of `cost`
SIZES = {"hidden": 44, "heads": 4, "seq_len": 24, "vocab": 260}
ALWAYS = {"microbatch_size": 2, "bucket_bytes": 40_000}  # several buckets and units
OF_MODEL = ("layers", "tied", "dropout")

# The first value is the plain one. Of 5 layers, neither 2 nor 3 stages have equally many.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "dp": (1, 2, 4),
    "tp": (1, 2, 4),
    "pp": (1, 2, 3),
    "tp_mode": ("1d", "2d"),
    "sequence_parallel": (False, True),
    "schedule": ("1f1b", "naive", "gpipe", "interleaved", "zb-h1", "zb-h2", "l2l"),
    "virtual_stages": (1, 2),
    "microbatches": (2, 1, 3),  # with 2 or 3 stages: fewer than stages, and not divisible by them
    "zero_stage": (0, 1, 2, 3),
    "shard": (None, 2),
    "secondary_shard": (None, 2),
    "prefetch": (1, 0),
    # "bucketed" is the first one's buckets at the other one's time.
    "grad_sync": ("overlapped", "naive"),
    "recompute": ("none", "selective", "full"),
    "partition_activations": (False, True),
    "tp_overlap": (True, False),
    "partition_messages": (False, True),
    "offload": (None, "cpu", "nvme", (("activations", "cpu"),)),  # pairs: values can be keys
    "precision": ("fp32", "bf16", "fp16"),
    "grad_dtype": (None, "fp32"),
    "clip_norm": (None, 0.05),
    "layers": (2, 5),
    "tied": (True, False),
    "dropout": (0.0, 0.1),
}  # fmt: skip
# Why a setting does nothing in a plan, or nothing if it is at work.
IDLE: dict[str, Callable[[Values], str]] = {
    "tp_mode": lambda v: (v["tp"] == 1) * " does nothing with tp=1",
    "tp_overlap": lambda v: (v["tp"] == 1) * " does nothing with tp=1",
    "schedule": lambda v: (v["pp"] == 1 and v["schedule"] != "l2l") * " does nothing with pp=1",
    "grad_sync": lambda v: (
        (v["dp"] == 1 or v["zero_stage"] > 0)
        * " does nothing with dp=1, or with zero_stage above 0"
    ),
    "shard": lambda v: (v["shard"] == v["dp"]) * " is what dp is already",
    "secondary_shard": lambda v: (
        (v["secondary_shard"] == (v["shard"] or v["dp"])) * " is what shard or dp is already"
    ),
    "prefetch": lambda v: (v["zero_stage"] < 3) * " does nothing with zero_stage below 3",
}
PLAIN = {name: values[0] for name, values in SETTINGS.items()}


class Case(NamedTuple):
    """One plan of the list, what it trains, and what a run is told besides."""

    name: str
    model: pl.ModelSpec
    plan: pl.Plan
    clip_norm: float | None


def case(values: Values) -> Case:
    """The plan and the model that have these values. Raises ValueError where there is none."""
    values = _acting(values)
    return Case(said(values), *_model_and_plan(values), values["clip_norm"])


def _acting(values: Values) -> Values:
    """The same with the plain value of every setting that does nothing."""
    return {n: PLAIN[n] if n in IDLE and IDLE[n](values) else v for n, v in values.items()}


def _model_and_plan(values: Values) -> tuple[pl.ModelSpec, pl.Plan]:
    of_plan = {n: v for n, v in values.items() if n not in OF_MODEL and n != "clip_norm"}
    if isinstance(of_plan["offload"], tuple):
        of_plan["offload"] = dict(of_plan["offload"])
    plan = pl.Plan(**of_plan, **ALWAYS)
    return _model(*(values[name] for name in OF_MODEL)), plan


@functools.cache
def _model(*values: Any) -> pl.ModelSpec:
    return pl.ModelSpec(**dict(zip(OF_MODEL, values, strict=True)), **SIZES)


def said(values: Values) -> str:
    """What is not plain, as text."""
    words = []
    for name, value in values.items():
        if value != PLAIN[name]:
            text = value if isinstance(value, str) else repr(value).replace(" ", "")
            words.append(name if value is True else f"{name}={text}")
    return " ".join(words) or "plain"


# ---- what is legal, and what does nothing -------------------------------------------------------
@functools.cache
def _refusal(acting: tuple[Any, ...]) -> str:
    try:
        model, plan = _model_and_plan(dict(zip(SETTINGS, acting, strict=True)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ZeRO-3 in a pipeline: legal, and slow
            plan.validate(model)
    except ValueError as refused:
        return str(refused)
    if plan.world_size > MAX_RANKS:
        return f"dp*tp*pp is {plan.world_size} ranks, and this list has up to {MAX_RANKS}"
    return ""


def refusal(values: Values) -> str:
    """Why there is no such plan, or nothing."""
    acting = _acting(values)
    return _refusal(tuple(acting[name] for name in SETTINGS))


def at_work(values: Values) -> list[tuple[str, Any]]:
    """(setting, value) of those that do something in this plan."""
    return [(n, v) for n, v in values.items() if n not in IDLE or not IDLE[n](values)]


def pairs(values: Values) -> Iterator[Pair]:
    """Every two settings that are at work in this plan."""
    return itertools.combinations(at_work(values), 2)


def objection(values: Values, pinned: Values) -> str:
    """Why this is no plan in which all of ``pinned`` is at work, or nothing."""
    said = refusal(values)
    return said or next((n + IDLE[n](values) for n in pinned if n in IDLE and IDLE[n](values)), "")


@functools.cache
def _named(why: str) -> list[str]:
    """The settings that an objection names."""
    return [name for name in SETTINGS if re.search(rf"\b{name}\b", why)]


def complete(values: Values, pinned: Values, *, tries: int = 400) -> tuple[dict[str, Any], str]:
    """(a legal plan that has ``pinned`` at work and else little but ``values``, "") or, if none is
    found, ({}, the objection that was left when most had been done about the others).
    """
    start = {**values, **pinned}
    queue, seen, dead = [(start, frozenset(pinned))], {tuple(start.values())}, (0, "")
    for at in range(tries):
        if at == len(queue):
            break
        found, fixed = queue[at]
        why = objection(found, pinned)
        if not why:
            return found, ""
        free = [name for name in _named(why) if name not in fixed]
        if not free:
            dead = max(dead, (len(fixed), why), key=lambda end: end[0])
        for name in free:
            for value in SETTINGS[name]:
                other = {**found, name: value}
                if tuple(other.values()) not in seen:
                    seen.add(tuple(other.values()))
                    queue.append((other, fixed | {name}))
    return {}, dead[1]


# ---- the list -----------------------------------------------------------------------------------
class Cover(NamedTuple):
    """cases, and {pair: the refusal} of those that no legal plan has."""

    cases: list[Case]
    impossible: dict[Pair, str]


@functools.cache
def cover() -> Cover:
    """The list; the same in every process, as long as the rules are."""
    return Cover([case(values) for values in chosen()], _possible()[1])


def each_value() -> list[Case]:
    """A few of the list's plans, in which every value of every setting is at work."""
    left, taken = set(itertools.chain.from_iterable(map(at_work, chosen()))), []
    while left:  # those that are still to come
        taken.append(max(chosen(), key=lambda values: _share(at_work(values), left, values)))
        left.difference_update(at_work(taken[-1]))
    return list(map(case, taken))


@functools.cache
def chosen() -> list[dict[str, Any]]:
    """The values of the list's plans."""
    possible, _ = _possible()
    left, taken, draw = dict(possible), [], random.Random(DRAW)
    while left:
        seeds = draw.sample(list(left), min(SEEDS, len(left)))
        wanted = Counter(itertools.chain.from_iterable(left))
        grown = [_grow(dict(seed), possible[seed], left, wanted, draw) for seed in seeds]
        best = max(grown, key=lambda values: _worth(values, left))
        taken.append(best)
        for pair in pairs(best):
            left.pop(pair, None)
    return _as_cheap_as_can_be(taken, possible)


@functools.cache
def _possible() -> tuple[dict[Pair, dict[str, Any]], dict[Pair, str]]:
    """Pairs that some legal plan has, with the first found, and those that none has, with why."""
    possible: dict[Pair, dict[str, Any]] = {}
    impossible: dict[Pair, str] = {}
    for (a, some), (b, others) in itertools.combinations(SETTINGS.items(), 2):
        for x, y in itertools.product(some, others):
            pair = ((a, x), (b, y))
            if pair in possible:
                continue
            values, why = complete(PLAIN, dict(pair))
            for met in pairs(values) if values else ():
                possible.setdefault(met, values)
            if not values:
                impossible[pair] = why
    return possible, impossible


def _grow(
    pinned: dict[str, Any], values: dict[str, Any], left: Mapping[Pair, Any], wanted: Counter,
    draw: random.Random,
) -> dict[str, Any]:  # fmt: skip
    """The legal plan ``values``, which has ``pinned``, with each other setting changed where that
    is worth it. wanted: how many pairs are left of each (setting, value).
    """
    names = [name for name in SETTINGS if name not in pinned]
    draw.shuffle(names)
    for name in names:
        options = [values]
        for value in SETTINGS[name]:
            if value != values[name] and wanted[name, value]:
                changed, _ = complete(values, {**pinned, name: value}, tries=12)
                options += [changed] * bool(changed)
        values = max(options, key=lambda option: _worth(option, left))
    return values


def _worth(values: Values, left: Mapping[Pair, Any]) -> float:
    """Pairs that are new, over what it costs: starting a plan, and its training."""
    return _share(pairs(values), left, values)


def _share(found: Iterable[Any], left: Collection[Any], values: Values) -> float:
    return sum(map(left.__contains__, found)) / (START + cost(values))


def cost(values: Values) -> float:
    """Of a training: its ranks, and the calls of all layers, of which tensor parallelism makes the
    most. A single micro-batch counts as two: with it a schedule has nothing to order.
    """
    calls = 1.0 if values["tp"] == 1 else 2.5 if values["tp_mode"] == "1d" else 5.0
    lanes = values["dp"] * values["tp"]
    passes = lanes * values["layers"] * max(values["microbatches"], 2)
    return 1.5 * lanes * values["pp"] + calls * passes


def _as_cheap_as_can_be(
    taken: list[dict[str, Any]], wanted: Mapping[Pair, Any]
) -> list[dict[str, Any]]:
    """The same pairs for less, from the most expensive plan on: other plans may have all that one
    was taken for, and what it alone has may be in a cheaper one too.
    """
    count = Counter(pair for values in taken for pair in pairs(values))
    kept = []
    for values in sorted(taken, key=cost, reverse=True):
        alone = {pair for pair in pairs(values) if pair in wanted and count[pair] == 1}
        count.subtract(pairs(values))
        if alone:
            kept.append(_cheapest(values, alone))
            count.update(pairs(kept[-1]))
    return kept


def _cheapest(values: dict[str, Any], alone: Collection[Pair]) -> dict[str, Any]:
    """The plan that is left when one setting after the other has its value that saves the most; the
    pairs ``alone`` stay at work.
    """
    others = [{**values, name: other} for name, some in SETTINGS.items() for other in some]
    cheaper = (one for one in sorted(others, key=cost) if cost(one) < cost(values))
    legal = (one for one in cheaper if alone <= set(pairs(one)) and not refusal(one))
    found = next(legal, None)
    return values if found is None else _cheapest(found, alone)
