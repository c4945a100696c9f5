"""What fills a device at its fullest moment, beside what the formulas say of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.checks import illegal
from paralab.observe.samples import CATEGORIES
from paralab.spec import OWN_FORM
from paralab.theory import memory as formulas

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report import Report


def peaks(report: Report, rank: int | None = None) -> pd.DataFrame:
    """What fills the device of ``rank`` (default: the worst rank) at its worst sample, in bytes.

    One row per category, always in the same order, and one "total". Columns: formula, what
    theory/memory.py says of the fuller of a step's two moments, which has workspace only where
    something is offloaded; and the report's clock. Formulas are of the plan; there are none for a
    traced function, nor for a schedule of the user's own in a report that was saved, and the column
    is 0. Raises ValueError if memory was not sampled.
    """
    import pandas as pd

    memory = report.memory[report.memory["tier"] == "device"]
    ranks = sorted(set(memory["rank"].tolist()))
    if rank is not None and rank not in ranks:
        raise illegal("rank", rank, "has no samples of memory", f"one of {ranks}" if ranks else "-")
    if not ranks:
        raise illegal("memory", None, "memory was not sampled", "a report of pl.run or pl.predict")
    if rank is not None:
        memory = memory[memory["rank"] == rank]
    found = memory.groupby(["rank", "step", "time"])["bytes"].sum()
    worst = found.idxmax()
    moment = memory[(memory["rank"] == worst[0]) & (memory["time"] == worst[2])]
    held = moment.groupby("category", sort=False)["bytes"].sum().to_dict()
    formula: dict[str, int] = {}
    code_is_lost = str(report.plan.schedule).startswith(OWN_FORM)
    if report.model is not None and not code_is_lost:
        moments = formulas.moments(
            report.model,
            report.plan,
            optimizer=report.meta.get("optimizer", "adamw"),
            rank=int(worst[0]),
        )
        formula = max(moments.values(), key=lambda parts: sum(parts.values()))
    known = [*held, *(name for name in formula if name not in held)]
    names = [*CATEGORIES, *(name for name in known if name not in CATEGORIES)]
    table = pd.DataFrame(
        {
            "formula": [formula.get(name, 0) for name in names],
            report.clock: [held.get(name, 0) for name in names],
        },
        index=pd.Index(names, name="category"),
        dtype="int64",
    )
    table.loc["total"] = table.sum()
    return table
