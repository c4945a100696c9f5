"""What fills a device at its fullest moment, beside what its program says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.checks import illegal
from paralab.instruments.samples import CATEGORIES
from paralab.interpret import quick
from paralab.report import dry
from paralab.spec import OWN_FORM

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.tables import Tables


def peaks(report: Tables, rank: int | None = None) -> pd.DataFrame:
    """What fills the device of ``rank`` (default: the worst rank) at its worst sample, in bytes.

    One row per category, always in the same order, and one "total". Columns: "program", what
    interpret/memory.py says of the rank's fullest moment, workspace included; and the report's
    clock. There is no program of a traced function, nor of a saved plan with a schedule or passes
    of the user's own; then its column is 0. A dry run is the program, and has no second column of
    it. Raises ValueError if memory was not sampled.
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
    columns, program = {report.clock: held}, {}
    own = (report.plan.schedule, *report.plan.passes)
    code_is_lost = any(str(form).startswith(OWN_FORM) for form in own)
    if report.model is not None and not code_is_lost and report.clock != dry.CLOCK:
        optimizer = report.meta.get("optimizer", "adamw")
        program = quick.peak(report.model, report.plan, optimizer=optimizer, rank=int(worst[0]))
    known = [*held, *(name for name in program if name not in held)]
    names = [*CATEGORIES, *(name for name in known if name not in CATEGORIES)]
    if report.clock != dry.CLOCK:
        columns = {"program": program, **columns}
    table = pd.DataFrame(
        {clock: [found.get(name, 0) for name in names] for clock, found in columns.items()},
        index=pd.Index(names, name="category"),
        dtype="int64",
    )
    table.loc["total"] = table.sum()
    return table
