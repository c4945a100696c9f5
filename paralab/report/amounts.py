"""A report's bytes: sent between ranks and copied between memory tiers per step, and held."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import choice, illegal, whole
from paralab.instruments.samples import CATEGORIES
from paralab.interpret import quick
from paralab.report.facts import (
    in_outline,
    measured_steps,
    node_of,
    own_calls,
    remembered,
    reported_ranks,
)
from paralab.report.tables import DRY, Tables
from paralab.spec.forms import saved
from paralab.spec.tiers import WAYS
from paralab.theory.traffic import POINT_TO_POINT, edges, far_share, level

if TYPE_CHECKING:
    import pandas as pd

BY = ("rank", "op", "axis", "level", "phase", "edge")
COPIED_BY = ("rank", "link", "category")
SENT = ("rank", "sender", "op", "axis", "phase", "level", "receiver")


# ---- moved --------------------------------------------------------------------------------------
def traffic(
    report: Tables,
    by: str | Sequence[str] = "rank",
    *,
    bookkeeping: bool = False,
    warmup: bool = False,
) -> pd.DataFrame:
    """Bytes sent per step, one row for each combination of the columns in ``by``.

    by           one or several of rank (the sender), op, axis, level, phase, edge; edge gives two
                 columns, sender and receiver. The level of an edge is intra if sender and receiver
                 share a node. A reduce-scatter is a ring over NCCL, over gloo an all-to-all. In
                 outline a rank stands for all members of its group, so its bytes are split over the
                 levels in the proportion of the whole group's
    bookkeeping  count phases control and setup too
    warmup       count step 0 too

    The column bytes is the mean over the counted steps: int64 whenever every row's mean is whole,
    float64 otherwise. Raises ValueError if a row's wire_bytes are not what its operation sends.
    """
    names = _checked(by, BY)
    choice("bookkeeping", bookkeeping, (False, True))
    keys = [k for name in names for k in (("sender", "receiver") if name == "edge" else (name,))]
    by_edge = "edge" in names or not in_outline(report)
    steps = _steps(report, warmup)
    sent = _sent(report, bookkeeping, steps, by_edge)
    return _per_step(report, sent, SENT, keys, steps)


@remembered
def _sent(
    report: Tables, bookkeeping: bool, steps: frozenset[int], by_edge: bool
) -> Counter[tuple[Any, ...]]:
    """{values of `SENT`: bytes sent in these steps}; without receivers of a group's calls unless
    ``by_edge``.
    """
    outline, nodes = in_outline(report), functools.partial(node_of, report)
    # A replay sends as the cluster of its times does, whatever the run was on.
    gpus = report.cluster.gpus if report.cluster else not _gloo(report)
    ring = {"reduce_scatter": "all_gather"} if gpus else {}  # of the same bytes
    calls, sums = report.collectives if bookkeeping else own_calls(report), Counter()
    for row in calls[calls["step"].isin(steps)].itertuples(index=False):
        rank, payload, wire = row.rank, row.payload_bytes, row.wire_bytes
        op = ring.get(row.op, row.op)
        sent = edges(op, row.ranks, rank, payload, row.peer, sent=wire if outline else None)
        if sum(sent.values()) != wire:
            raise ValueError(
                f"collective {row.call} on rank {rank}: wire_bytes={wire}, but {row.op} of "
                f"{payload} bytes among {len(row.ranks)} ranks sends {sum(sent.values())}; "
                "traffic() counts only bytes that the formulas know"
            )
        labels = rank, rank, row.op, row.axis, row.phase
        if not by_edge and row.op not in POINT_TO_POINT:
            inter = round(wire * far_share(op, row.ranks, payload, row.peer, nodes))
            for name, size in (("intra", wire - inter), ("inter", inter)):
                if size:
                    sums[*labels, name, None] += size
            continue
        for receiver, size in sent.items():
            sums[*labels, level((rank, receiver), nodes), receiver] += size
    return sums


def copied(report: Tables, by: str | Sequence[str] = COPIED_BY) -> pd.DataFrame:
    """Bytes copied between memory tiers per step, one row per combination of the columns in ``by``.

    by  one or several of rank, link (h2d, d2h, disk read, disk write), category

    The column bytes is the mean over the counted steps, as in ``traffic``.
    """
    keys, sums, steps = _checked(by, COPIED_BY), Counter(), _steps(report, False)
    for row in report.copies[report.copies["step"].isin(steps)].itertuples(index=False):
        link = row.lane if row.op == "copy" else f"{row.lane} {row.op}"
        sums[row.rank, link, row.category] += row.bytes
    return _per_step(report, sums, COPIED_BY, keys, steps)


def _checked(by: str | Sequence[str], legal: Sequence[str]) -> list[str]:
    """The names in ``by`` as a list. Raises ValueError if one is not legal or there is none."""
    several = isinstance(by, Iterable) and not isinstance(by, str)
    names = [choice("by", name, legal) for name in (by if several else [by])]
    if not names:
        raise illegal("by", by, "nothing to split by", " | ".join(map(repr, legal)))
    return names


def _steps(report: Tables, warmup: bool) -> frozenset[int]:
    """The counted steps."""
    choice("warmup", warmup, (False, True))
    return frozenset(report.steps["step"].tolist() if warmup else measured_steps(report))


def _per_step(
    report: Tables,
    sums: Mapping[tuple[Any, ...], int],
    labels: Sequence[str],
    keys: Sequence[str],
    steps: frozenset[int],
) -> pd.DataFrame:
    """The bytes of one step, grouped by ``keys``.

    sums  {value of each of ``labels``: bytes} of all counted steps

    Rows are sorted by their labels, links in the order of `WAYS`, from the device outwards.
    """
    import pandas as pd

    keys, position = list(dict.fromkeys(keys)), {link: str(at) for at, link in enumerate(WAYS)}
    n, totals = max(len(steps), 1), Counter()  # there may be no steps
    if keys == ["rank"]:  # a rank that moves nothing has a row too
        totals.update({(rank,): 0 for rank in reported_ranks(report)})
    places = [labels.index(key) for key in keys]
    for values, size in sums.items():
        totals[tuple([values[place] for place in places])] += size
    rows = sorted(totals.items(), key=lambda row: [position.get(label, label) for label in row[0]])
    whole = all(size % n == 0 for _, size in rows)
    means = [(*labels, size // n if whole else size / n) for labels, size in rows]
    kinds = {key: "int64" if key in ("rank", "sender", "receiver") else "object" for key in keys}
    kinds["bytes"] = "int64" if whole else "float64"
    return pd.DataFrame(means, columns=list(kinds)).astype(kinds)


# ---- held ---------------------------------------------------------------------------------------
class Peak(NamedTuple):
    """The sample at which a rank holds most bytes on a tier; held: {category: bytes}."""

    rank: int
    step: int
    time: float
    held: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


def peak(report: Tables, *, tier: str = "device", rank: int | None = None) -> Peak | None:
    """The sample at which ``rank``, by default the rank with the highest peak, holds most bytes on
    a tier; None without samples.

    Of several such samples the earliest of the lowest rank is taken, if possible in a measured
    step: only in the course of step 0 does `pl.observe` learn the category of some tensors.
    """
    memory = report.memory[report.memory["tier"] == tier]
    if rank is not None:
        memory = memory[memory["rank"] == rank]
    if memory.empty:
        return None
    totals = memory.groupby(["rank", "step", "time"])["bytes"].sum()
    largest = totals[totals == totals.max()]
    measured = largest.index.get_level_values("step").isin(measured_steps(report))
    rank, step, time = (largest[measured] if measured.any() else largest).index[0]
    # Faster than `get_group`, which looks up the rows of all samples.
    sample = memory[(memory["rank"] == rank) & (memory["step"] == step) & (memory["time"] == time)]
    held = sample.groupby("category", sort=False)["bytes"].sum().to_dict()
    return Peak(int(rank), int(step), float(time), held)


def peak_memory(report: Tables) -> int | None:
    """The highest peak of a rank: bytes of all tensors on its device, workspace included. None if
    memory was not sampled. A GPU's context, and blocks that its allocator has reserved but does not
    use, are not counted.
    """
    highest = peak(report)
    return None if highest is None else highest.total


def peaks(report: Tables, rank: int | None = None) -> pd.DataFrame:
    """Bytes per category at the peak of ``rank`` (default: the rank with the highest peak).

    One row per category, always in the same order, and one "total". Two columns: "program", the
    peak that interpret/memory.py computes from the plan's program, workspace included; and, under
    the name of the report's clock, the bytes of the report. There is no "program" of a traced
    function, nor of a saved report with a block, schedule or passes of the user's own; a dry run is
    computed from the program. On a 2D or 2.5D grid it is that of the rank that holds most; others
    hold up to a few per cent less. With tp > 1 a tensor that a message fills may be a buffer in one
    column, workspace in the other. Raises ValueError if memory was not sampled.
    """
    import pandas as pd

    highest = peak(report, rank=None if rank is None else whole("rank", rank, at_least=0))
    if highest is None:
        ranks = sorted(set(report.memory["rank"][report.memory["tier"] == "device"].tolist()))
        if rank is not None and ranks:
            raise illegal("rank", rank, "this rank has no samples of memory", f"one of {ranks}")
        raise illegal("memory", None, "memory was not sampled", "a report of pl.run or pl.predict")
    columns, plan = {report.clock: highest.held}, report.plan
    parts = (plan.schedule, *plan.passes, report.model and report.model.block)
    if report.clock != DRY and report.model is not None and not any(map(saved, parts)):
        settings = {"optimizer": report.meta.get("optimizer", "adamw"), "rank": highest.rank}
        settings |= {"gloo": _gloo(report), "clips": report.meta.get("clip_norm") is not None}
        columns = {"program": quick.peak(report.model, plan, **settings), **columns}
    categories = dict.fromkeys([*CATEGORIES, *highest.held, *columns.get("program", ())])
    table = pd.DataFrame(
        {name: [held.get(c, 0) for c in categories] for name, held in columns.items()},
        index=pd.Index(list(categories), name="category"),
        dtype="int64",
    )
    table.loc["total"] = table.sum()
    return table


def _gloo(report: Tables) -> bool:
    """Whether gloo carries the messages: by the report, otherwise by the cluster's devices."""
    usual = "gloo" if report.cluster is None or not report.cluster.gpus else "nccl"
    return report.meta.get("backend", usual) != "nccl"
