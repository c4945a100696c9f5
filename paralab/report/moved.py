"""What a report's tables say of bytes per step: sent between ranks, copied between memory tiers.

Pure functions of a `Tables`, as in metrics.py: step 0 is left out wherever there is another step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, illegal
from paralab.report.metrics import in_outline, measured_steps, reported_ranks
from paralab.spec import BYTES_PER_ELEMENT
from paralab.spec.tiers import WAYS
from paralab.theory.traffic import BOOKKEEPING, edges

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.tables import Tables

BY = ("rank", "op", "axis", "level", "phase", "edge")
COPIED_BY = ("rank", "link", "category")


def node_of(report: Tables, rank: int) -> int:
    """The node that ``rank`` ran on; one node where the report does not say."""
    nodes = report.meta.get("nodes") or []
    return nodes[rank] if rank < len(nodes) else 0


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
                 receiver share a node
    bookkeeping  count phases control and setup too
    warmup       count step 0 too

    The column bytes is the mean over the counted steps: int64 whenever every row's mean is whole,
    float64 otherwise. Raises ValueError if a row's wire_bytes are not what its operation sends.
    """
    names = [choice("by", b, BY) for b in ([by] if isinstance(by, str) else by)]
    if not names:
        raise illegal("by", by, "nothing to split by", " | ".join(BY))
    keys = [k for b in names for k in (("sender", "receiver") if b == "edge" else (b,))]
    steps = set(report.steps["step"].tolist() if warmup else measured_steps(report))
    calls, sums = report.collectives, in_outline(report)
    calls = calls[calls["step"].isin(steps)]
    if not bookkeeping:
        calls = calls[~calls["phase"].isin(BOOKKEEPING)]
    totals: dict[tuple[Any, ...], int] = defaultdict(int)
    if keys == ["rank"]:  # a rank that sends nothing is worth a row
        totals |= {(rank,): 0 for rank in reported_ranks(report)}
    for row in calls.to_dict("records"):
        sent = edges(
            row["op"],
            row["ranks"],
            row["rank"],
            row["payload_bytes"],
            row["peer"],
            sent=row["wire_bytes"] if sums else None,
        )
        if sum(sent.values()) != row["wire_bytes"]:
            raise ValueError(
                f"collective {row['call']} on rank {row['rank']}: wire_bytes={row['wire_bytes']}, "
                f"but {row['op']} of {row['payload_bytes']} bytes among {len(row['ranks'])} ranks "
                f"sends {sum(sent.values())}; traffic() counts only bytes that the formulas know"
            )
        for receiver, count in sent.items():
            apart = node_of(report, row["rank"]) != node_of(report, receiver)
            row |= {
                "level": "inter" if apart else "intra",
                "sender": row["rank"],
                "receiver": receiver,
            }
            totals[tuple(row[k] for k in keys)] += count
    return _per_step(sorted(totals.items()), keys, len(steps))


def copied(
    report: Tables, by: str | Sequence[str] = COPIED_BY, *, warmup: bool = False
) -> pd.DataFrame:
    """Bytes copied between memory tiers per step, summed over what is not named in ``by``.

    by      one or several of rank, link (h2d, d2h, disk read, disk write), category
    warmup  count step 0 too

    The column bytes is the mean over the counted steps, as in ``traffic``.
    """
    names = [choice("by", b, COPIED_BY) for b in ([by] if isinstance(by, str) else by)]
    if not names:
        raise illegal("by", by, "nothing to split by", " | ".join(COPIED_BY))
    steps = set(report.steps["step"].tolist() if warmup else measured_steps(report))
    totals: dict[tuple[Any, ...], int] = defaultdict(int)
    if names == ["rank"]:  # a rank that copies nothing is worth a row
        totals |= {(rank,): 0 for rank in reported_ranks(report)}
    for row in report.copies[report.copies["step"].isin(steps)].to_dict("records"):
        lane, op = row["lane"], row["op"]
        row["link"] = lane if op == "copy" else f"{lane} {op}"
        totals[tuple(row[k] for k in names)] += row["bytes"]
    place = {link: f"{i}" for i, link in enumerate(WAYS)}  # from the device outwards
    rows = sorted(totals.items(), key=lambda r: [place.get(label, label) for label in r[0]])
    return _per_step(rows, names, len(steps))


def _per_step(rows: Sequence[Any], keys: Sequence[str], steps: int) -> pd.DataFrame:
    """Rows (labels, bytes of all steps) as a table of bytes of one step."""
    import pandas as pd

    steps = max(steps, 1)  # a report may have none
    whole = all(count % steps == 0 for _, count in rows)
    values = [count // steps if whole else count / steps for _, count in rows]
    columns: dict[str, Any] = {}
    for i, key in enumerate(keys):
        dtype = "int64" if key in ("rank", "sender", "receiver") else "object"
        columns[key] = pd.Series([labels[i] for labels, _ in rows], dtype=dtype)
    columns["bytes"] = pd.Series(values, dtype="int64" if whole else "float64")
    return pd.DataFrame(columns)


def ring_optimum(report: Tables) -> int:
    """Bytes all ranks together send per step in pure data parallelism: N times 2(N-1)/N Psi.

    Psi in bytes of the plan's gradients (Patarasuk & Yuan 2009, the bandwidth-optimal all-reduce).
    """
    if report.model is None:
        raise illegal("model", None, "a traced function has no gradients to sum", "a training run")
    psi = report.model.num_params * BYTES_PER_ELEMENT[report.plan.grad_precision]
    return 2 * (report.plan.dp - 1) * psi
