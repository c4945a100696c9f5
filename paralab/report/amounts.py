"""What a report's tables say in bytes: moved between ranks and memory tiers per step, and held."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import choice, illegal
from paralab.instruments.samples import CATEGORIES
from paralab.interpret import quick
from paralab.report.about import in_outline, measured_steps, node_of, own_calls, reported_ranks
from paralab.report.tables import DRY, Tables
from paralab.spec import OWN_FORM
from paralab.spec.tiers import WAYS
from paralab.theory.traffic import POINT_TO_POINT, edges, far_share, level

if TYPE_CHECKING:
    import pandas as pd

BY = ("rank", "op", "axis", "level", "phase", "edge")
COPIED_BY = ("rank", "link", "category")


# ---- moved --------------------------------------------------------------------------------------
def traffic(
    report: Tables,
    by: str | Sequence[str] = "rank",
    *,
    bookkeeping: bool = False,
    warmup: bool = False,
) -> pd.DataFrame:
    """Bytes sent per step, summed over what is not named in ``by``.

    by           one or several of rank (the sender), op, axis, level, phase, edge; edge gives two
                 columns, sender and receiver. A level is each edge's own: intra if sender and
                 receiver share a node; of a report in outline, whose rank stands for the members of
                 its group, they are on the levels as those of all members
    bookkeeping  count phases control and setup too
    warmup       count step 0 too

    The column bytes is the mean over the counted steps: int64 whenever every row's mean is whole,
    float64 otherwise. Raises ValueError if a row's wire_bytes are not what its operation sends.
    """
    names, summed = _named(by, BY), in_outline(report)
    keys = [k for name in names for k in (("sender", "receiver") if name == "edge" else (name,))]
    calls = report.collectives if bookkeeping else own_calls(report)
    nodes, of_all = functools.partial(node_of, report), summed and "edge" not in names

    def moved(row: Any) -> Iterator[tuple[dict[str, Any], int]]:
        rank, payload, wire = row.rank, row.payload_bytes, row.wire_bytes
        sent = edges(row.op, row.ranks, rank, payload, row.peer, sent=wire if summed else None)
        if sum(sent.values()) != wire:
            raise ValueError(
                f"collective {row.call} on rank {rank}: wire_bytes={wire}, but {row.op} of "
                f"{payload} bytes among {len(row.ranks)} ranks sends {sum(sent.values())}; "
                "traffic() counts only bytes that the formulas know"
            )
        labels = {"rank": rank, "op": row.op, "axis": row.axis, "phase": row.phase}
        if of_all and row.op not in POINT_TO_POINT:
            far = round(wire * far_share(row.op, row.ranks, payload, row.peer, nodes))
            parts = {"intra": wire - far, "inter": far}.items()
            yield from (({**labels, "level": which}, size) for which, size in parts if size)
            return
        for receiver, size in sent.items():
            edge = {"sender": rank, "receiver": receiver}
            yield {**labels, **edge, "level": level((rank, receiver), nodes)}, size

    return _per_step(report, calls, moved, keys, warmup)


def copied(
    report: Tables, by: str | Sequence[str] = COPIED_BY, *, warmup: bool = False
) -> pd.DataFrame:
    """Bytes copied between memory tiers per step, summed over what is not named in ``by``.

    by      one or several of rank, link (h2d, d2h, disk read, disk write), category
    warmup  count step 0 too

    The column bytes is the mean over the counted steps, as in ``traffic``.
    """

    def moved(row: Any) -> Iterator[tuple[dict[str, Any], int]]:
        link = row.lane if row.op == "copy" else f"{row.lane} {row.op}"
        yield {"rank": row.rank, "link": link, "category": row.category}, row.bytes

    return _per_step(report, report.copies, moved, _named(by, COPIED_BY), warmup)


def _named(by: str | Sequence[str], legal: Sequence[str]) -> list[str]:
    several = isinstance(by, Iterable) and not isinstance(by, str)
    names = [choice("by", name, legal) for name in (by if several else [by])]
    if not names:
        raise illegal("by", by, "nothing to split by", " | ".join(legal))
    return names


def _per_step(
    report: Tables,
    table: pd.DataFrame,
    moved: Callable[[Any], Iterable[tuple[dict[str, Any], int]]],
    keys: Sequence[str],
    warmup: bool,
) -> pd.DataFrame:
    """The bytes of one step by ``keys``; moved: (labels, bytes) of a row of ``table``. Links are in
    order from the device outwards.
    """
    import pandas as pd

    steps = set(report.steps["step"].tolist() if warmup else measured_steps(report))
    keys, place = list(dict.fromkeys(keys)), {link: str(at) for at, link in enumerate(WAYS)}
    n, totals = max(len(steps), 1), Counter()  # there may be no steps
    if keys == ["rank"]:  # one that moves nothing is worth a row
        totals.update({(rank,): 0 for rank in reported_ranks(report)})
    for row in table[table["step"].isin(steps)].itertuples(index=False):
        for labels, size in moved(row):
            totals[tuple([labels[key] for key in keys])] += size
    rows = sorted(totals.items(), key=lambda row: [place.get(label, label) for label in row[0]])
    numbers, whole = ("rank", "sender", "receiver"), all(size % n == 0 for _, size in rows)
    columns = {
        key: pd.Series([row[i] for row, _ in rows], dtype="int64" if key in numbers else "object")
        for i, key in enumerate(keys)
    }
    sizes = [size // n if whole else size / n for _, size in rows]
    return pd.DataFrame(columns | {"bytes": pd.Series(sizes, dtype=None if rows else "int64")})


# ---- held ---------------------------------------------------------------------------------------
class Peak(NamedTuple):
    """The sample with most bytes on a tier; held: {category: bytes}."""

    rank: int
    step: int
    time: float
    held: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


def peak(report: Tables, *, tier: str = "device", rank: int | None = None) -> Peak | None:
    """The moment at which ``rank``, by default the worst rank, holds most; None without samples.

    Of several moments with as many bytes it is the first rank's first in a step that counts: an
    observation learns in step 0 what some bytes are for.
    """
    memory = report.memory[report.memory["tier"] == tier]
    if rank is not None:
        memory = memory[memory["rank"] == rank]
    if memory.empty:
        return None
    totals = memory.groupby(["rank", "step", "time"])["bytes"].sum()
    most = totals[totals == totals.max()]
    counts = most.index.get_level_values("step").isin(measured_steps(report))
    at = (most[counts] if counts.any() else most).index[0]
    moment = memory[(memory["rank"] == at[0]) & (memory["step"] == at[1])]
    moment = moment[moment["time"] == at[2]]
    held = moment.groupby("category", sort=False)["bytes"].sum().to_dict()
    return Peak(int(at[0]), int(at[1]), float(at[2]), held)


def peak_memory(report: Tables) -> int | None:
    """Bytes of all tensors on the device, workspace included, at the worst sample of the worst
    rank; None if memory was not sampled. A GPU's context, and what its allocator has reserved and
    does not use, are not counted.
    """
    found = peak(report)
    return None if found is None else found.total


def peaks(report: Tables, rank: int | None = None) -> pd.DataFrame:
    """What fills the device of ``rank`` (default: the worst rank) at its worst sample, in bytes.

    One row per category, always in the same order, and one "total". Columns: "program", what
    interpret/memory.py says of the moment at which the rank holds most, workspace included; and the
    report's clock. There is no program of a traced function, nor of a saved one with a block,
    schedule or passes of the user's own; then its column is 0. On a 2D or 2.5D grid it is that of
    the rank that holds most; others hold up to a few per cent less. A dry run is the program, and
    has no second column of it. Raises ValueError if memory was not sampled.
    """
    import pandas as pd

    worst = peak(report, rank=rank)
    if worst is None:
        ranks = sorted(set(report.memory["rank"][report.memory["tier"] == "device"].tolist()))
        if rank is not None:
            legal = f"one of {ranks}" if ranks else "-"
            raise illegal("rank", rank, "has no samples of memory", legal)
        raise illegal("memory", None, "memory was not sampled", "a report of pl.run or pl.predict")
    columns, plan = {report.clock: worst.held}, report.plan
    if report.clock != DRY:
        program = {}
        forms = (plan.schedule, *plan.passes, report.model and report.model.block)
        own = any(str(form).startswith(OWN_FORM) for form in forms)
        if report.model is not None and not own:
            optimizer = report.meta.get("optimizer", "adamw")
            how = {"optimizer": optimizer, "rank": worst.rank, "gloo": _gloo(report)}
            program = quick.peak(report.model, plan, **how)
        columns = {"program": program, **columns}
    known = dict.fromkeys([*CATEGORIES, *worst.held, *columns.get("program", ())])
    table = pd.DataFrame(
        {clock: [found.get(name, 0) for name in known] for clock, found in columns.items()},
        index=pd.Index(list(known), name="category"),
        dtype="int64",
    )
    table.loc["total"] = table.sum()
    return table


def _gloo(report: Tables) -> bool:
    """Whether messages are gloo's: those of ranks, else those of the cluster's devices."""
    usual = "gloo" if report.cluster is None or not report.cluster.gpus else "nccl"
    return report.meta.get("backend", usual) != "nccl"
