"""The six tables of a report: their columns, their types, and what must hold between rows.

The meaning of every table and column is in the docstring of `Tables`. Columns and dtypes are the
same whether the rows were measured, replayed, predicted, loaded from a file, or there are none:
whole numbers are int64, times float64, text and tuples plain Python objects.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, illegal
from paralab.report.plain import plain
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.spec.tiers import LINKS
from paralab.theory.traffic import OPS, ROOTED

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

DRY = "dry run"  # a clock that has no times
CLOCKS = ("measured", "replayed", "predicted", DRY)

# What fills a pipeline, with a schedule's letters for it; the rest does not.
LETTER = {"forward": "F", "backward": "B", "weight_grad": "W"}
KIND = {"F": "forward", "B": "backward", "I": "backward", "W": "weight_grad"}
COMPUTE_KINDS = tuple(LETTER)
KINDS = (*COMPUTE_KINDS, "optimizer", "compute", "wait", "comm", "copy")
LEVELS = ("intra", "inter")
TIERS = ("device", "host", "file")
COPY_LANES = LINKS  # between them
COPY_OPS = ("copy", "read", "write")  # of a file: read or write

# A column's name says its type, in every table.
_TYPES: dict[type, str] = {
    int: "id rank step stage chunk microbatch call peer payload_bytes wire_bytes span bytes "
    "allocated active reserved largest_free",
    float: "start end cost time beside",
    str: "lane kind op axis level phase category tier",
    tuple: "after ranks",
}
_TYPE = {column: kind for kind, columns in _TYPES.items() for column in columns.split()}
_TABLES = {
    "spans": "id rank step lane kind stage chunk microbatch start end cost after",
    "collectives": "call rank step op axis ranks peer level phase payload_bytes wire_bytes start "
    "end span",
    "copies": "rank step lane op category bytes start end span",
    "memory": "rank step time tier category bytes",
    "steps": "rank step start end beside",
    "allocator": "rank step allocated active reserved largest_free",
}
COLUMNS = {
    name: {column: _TYPE[column] for column in columns.split()} for name, columns in _TABLES.items()
}
TIMES = ("start", "end", "time")  # columns that a clock offset shifts

_CHOICES = {
    ("spans", "kind"): KINDS,
    ("collectives", "op"): OPS,
    ("collectives", "level"): LEVELS,
    ("copies", "lane"): COPY_LANES,
    ("copies", "op"): COPY_OPS,
    ("memory", "tier"): TIERS,
}
_NAMES = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    tuple: "a list of span ids or ranks",
}


def _converted(kind: type, value: Any) -> Any:
    """``value`` as a column of this kind has it, or TypeError."""
    if kind is tuple and isinstance(value, (tuple, list)):
        return tuple(_converted(int, one) for one in value)
    if kind is str and isinstance(value, str):
        return value
    plain = not isinstance(value, (bool, str))
    if kind is int and plain and abs(whole := operator.index(value)) < 2**63:
        return whole
    if kind is float and plain and math.isfinite(number := float(value)):
        return number
    raise TypeError


_DTYPE = {int: "int64", float: "float64", str: "object", tuple: "object"}


def by_column(rows: Mapping[str, Sequence[tuple]]) -> dict[str, dict[str, list[Any]]]:
    """The rows of each table, column by column."""
    found = {}
    for name, some in rows.items():
        columns = zip(*some, strict=True) if some else [()] * len(COLUMNS[name])
        found[name] = dict(zip(COLUMNS[name], map(list, columns), strict=True))
    return found


def columns_of(name: str, rows: Mapping[str, Any] | pd.DataFrame | None) -> dict[str, list[Any]]:
    """Table ``name`` as plain lists, every value checked. None is a table without rows.

    Raises ValueError naming the table, the column, the row and what would be legal.
    """
    found = _columns(name, rows)
    return {c: some if isinstance(some, list) else some.tolist() for c, some in found.items()}


def _columns(name: str, rows: Mapping[str, Any] | pd.DataFrame | None) -> dict[str, Any]:
    kinds = COLUMNS[name]
    if rows is None:
        return {column: [] for column in kinds}
    missing = [c for c in kinds if c not in rows]
    unknown = [str(c) for c in rows if c not in kinds]
    if missing or unknown:
        said = [f"lacks {', '.join(missing)}"] * bool(missing)
        said += [f"has unknown {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(f"table {name}: {' and '.join(said)}; legal columns: {', '.join(kinds)}")
    lists = {column: _read(name, column, rows[column]) for column in kinds}
    if len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{column} {len(values)}" for column, values in lists.items())
        raise ValueError(f"table {name}: columns of unequal length: {lengths}")
    return lists


def _read(name: str, column: str, values: Any) -> Any:
    """A column, checked: a list, or the NumPy array that came if it is one of numbers."""
    kind = COLUMNS[name][column]
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    dtype = getattr(values, "dtype", None)
    if dtype is not None and len(values.shape) == 1 and dtype.str[1:] in ("i8", "f8"):
        if kind is int and dtype.kind == "i":
            return values
        if kind is float and dtype.kind == "f" and abs(values).max(initial=0.0) < math.inf:
            return values
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"table {name}: column {column} is not a list")
    legal = _CHOICES.get((name, column))
    if _plain(kind, values) and (legal is None or set(values) <= set(legal)):
        return list(values)
    done = []
    for row, value in enumerate(values):
        wrong = ""
        try:
            done.append(_converted(kind, value))
            if legal and done[-1] not in legal:
                wrong = f"; legal: {', '.join(legal)}"
        except (TypeError, ValueError, OverflowError):
            wrong = f" is not {_NAMES[kind]}"
        if wrong:
            raise ValueError(f"table {name}: row {row}, {column}={value!r}{wrong}")
    return done


def _plain(kind: type, values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether all values are what they should be, found out at once; `_read` says which is not."""
    if not set(map(type, values)) <= {kind}:
        return False
    if kind is tuple:
        return _plain(int, list(chain.from_iterable(values)))
    if kind is int:
        return not values or (min(values) >= -(2**63) and max(values) < 2**63)
    return kind is str or all(map(math.isfinite, values))


def frame(name: str, rows: Mapping[str, Any] | pd.DataFrame | None) -> pd.DataFrame:
    """Table ``name`` as a DataFrame with exactly the stated columns and dtypes."""
    import numpy as np  # `import paralab` does without
    import pandas as pd

    found, kinds = _columns(name, rows), COLUMNS[name]
    index = pd.RangeIndex(len(next(iter(found.values()))))
    columns: dict[str, Any] = {}
    for column, values in found.items():
        dtype = _DTYPE[kinds[column]]
        if dtype == "object":
            cells = np.fromiter(values, object, len(index))
            columns[column] = pd.Series(cells, index=index, dtype=cells.dtype)
        else:
            columns[column] = np.asarray(values, dtype)
    return pd.DataFrame(columns, index=index)


def letters(spans: pd.DataFrame) -> pd.Series:
    """The schedule's letter of each span, or its kind where it has none.

    A backward is an I where the weight half of its micro-batch is an action of its own, else a B.
    """
    import pandas as pd

    kinds, places = spans["kind"], pd.MultiIndex.from_frame(spans[["stage", "microbatch"]])
    halves = (kinds == "backward") & places.isin(places[kinds == "weight_grad"])
    return kinds.replace(LETTER).mask(halves, "I")


def check_relations(tables: Mapping[str, pd.DataFrame], world_size: int) -> None:
    """What must hold between rows, or ValueError: unique ids, references that exist, time."""
    for name, table in tables.items():
        strange = sorted(set(table["rank"].unique().tolist()) - set(range(world_size)))
        if strange:
            raise ValueError(f"table {name}: rank {strange[0]} in a report of {world_size} ranks")
        if "end" in table and (backwards := table["end"] < table["start"]).any():
            raise ValueError(f"table {name}: row {backwards.argmax()} ends before it starts")
    spans, calls = tables["spans"], tables["collectives"]
    if (again := spans["id"].duplicated()).any():
        raise ValueError(f"table spans: id {spans['id'][again].iloc[0]} appears more than once")
    named = {name: set(tables[name]["span"].tolist()) - {-1} for name in ("collectives", "copies")}
    waited = set(chain.from_iterable(spans["after"].tolist()))
    ids = set(spans["id"].tolist()) if waited or any(named.values()) else set()
    if not waited <= ids:
        span, lost = next(
            (span, a)
            for span, after in zip(spans["id"], spans["after"], strict=True)
            for a in after
            if a not in ids
        )
        raise ValueError(f"table spans: span {span} waits for span {lost}, which is not there")
    for name, some in named.items():
        if strange := some - ids:
            raise ValueError(f"table {name}: span {min(strange)} is not in the table of spans")
    for row, (rank, ranks, op, peer) in enumerate(
        zip(calls["rank"], calls["ranks"], calls["op"], calls["peer"], strict=True)
    ):
        if rank not in ranks or (op in ROOTED and peer not in ranks):
            who = f"root {peer}" if rank in ranks else f"rank {rank}"
            raise ValueError(f"table collectives: row {row}, {who} is not of its group {ranks}")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Tables:
    """What a run, a replay, a prediction or a dry run left behind: six tables, and whose they are.

    Everything that draws, compares or checks asks only ``clock`` where the times come from:
    "measured" (wall clock; ranks that share cores or a GPU wait for those, too), "replayed"
    (measured compute costs on one virtual device per rank, with a stated link model) or
    "predicted"; or nowhere: "dry run".

    Times are seconds from the start of step 0, sizes bytes. Step 0 is warm-up.

    clock        "measured" | "replayed" | "predicted" | "dry run", which has rows of one rank alone
                 (meta["rank"]), and in place of times the numbers of what happens, in order
    model, plan  what was trained and how it was split; ``cluster`` on what, where that was stated.
                 model is None for a traced function or an observed program (`pl.trace`, `observe`)
    spans        id, rank, step, lane, kind, stage, chunk, microbatch, start, end, cost, after.
                 One row per box of the timeline. lane: compute, comm:<axis>, h2d, d2h, disk, host
                 (the host's processor at work for the rank: an optimizer that was offloaded). kind:
                 forward, backward, weight_grad, optimizer, compute (a traced function's own work),
                 wait, comm, copy. cost: thread CPU (or device) seconds. after: ids of the spans
                 waited for. microbatch -1 where it has no meaning
    collectives  call, rank, step, op, axis, ranks, peer, level, phase, payload_bytes, wire_bytes,
                 start, end, span. One row per rank and call; wire_bytes is what this rank sends;
                 level the slowest link that the group, or a send, crosses
    copies       rank, step, lane, op, category, bytes, start, end, span. One row per copy between
                 memory tiers: lane h2d (host to device), d2h, disk (op read or write); category
                 what was moved, as in memory
    memory       rank, step, time, tier, category, bytes. Per rank one sample at every span's
                 beginning and end and one at the peak between; a sample is one row for
                 every category (parameters, gradients, optimizer, activations, buffers, workspace,
                 other) that there is or has been. Measured in step 0, with a memory_limit in all,
                 by `pl.observe` in the first ``memory_steps``
    steps        rank, step, start, end, beside. One row per rank and step. beside: processor
                 seconds of the rank's other threads, which carry its messages
    allocator    rank, step, allocated, active, reserved, largest_free. On GPUs, one row per rank
                 and step, of CUDA's allocator. Peaks of the step: allocated, bytes of blocks in
                 use; active, these and those given back that a stream has not passed; reserved,
                 bytes taken from the driver. largest_free: at the step's end, the largest block
                 that is reserved and not in use
    losses       one per step: mean over the global batch, nats per token
    weights, gradients  {name in the single-device model: full NumPy array}, or None; not saved
    results      what a traced or observed function returned on every rank, or None; not saved
    meta         anything else worth knowing, as plain JSON values; "nodes" is each rank's node,
                 "compute" what a replay scaled the recorded costs by, if by another factor than 1
    """

    clock: str
    model: ModelSpec | None
    plan: Plan
    cluster: Cluster | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    losses: Sequence[float] = ()
    spans: pd.DataFrame = None  # type: ignore[assignment]  # None is a table without rows
    collectives: pd.DataFrame = None  # type: ignore[assignment]
    copies: pd.DataFrame = None  # type: ignore[assignment]
    memory: pd.DataFrame = None  # type: ignore[assignment]
    steps: pd.DataFrame = None  # type: ignore[assignment]
    allocator: pd.DataFrame = None  # type: ignore[assignment]
    weights: Mapping[str, np.ndarray] | None = None
    gradients: Mapping[str, np.ndarray] | None = None
    results: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        choice("clock", self.clock, CLOCKS)
        for name, kind in (("model", ModelSpec), ("plan", Plan), ("cluster", Cluster)):
            value, optional = getattr(self, name), name != "plan"
            if not isinstance(value, kind) and not (value is None and optional):
                legal = f"a pl.{kind.__name__}(...){' or None' * optional}"
                raise illegal(name, value, "not one", legal)
        object.__setattr__(self, "meta", plain(dict(self.meta), "meta"))
        object.__setattr__(self, "losses", [float(loss) for loss in self.losses])
        for name in COLUMNS:
            object.__setattr__(self, name, frame(name, getattr(self, name)))
        check_relations({n: getattr(self, n) for n in COLUMNS}, self.plan.world_size)

    @property
    def world_size(self) -> int:
        """Ranks of the plan."""
        return self.plan.world_size
