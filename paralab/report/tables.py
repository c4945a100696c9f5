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

from paralab.checks import choice
from paralab.report.plain import plain
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.spec.tiers import LINKS
from paralab.theory.traffic import OPS

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

DRY = "dry run"  # the clock of a report without times
CLOCKS = ("measured", "replayed", "predicted", DRY)

# The kinds of span that count as compute of a pipeline, with the letters that schedules use for
# them. A pipeline is idle in spans of all other kinds.
LETTER = {"forward": "F", "backward": "B", "weight_grad": "W"}
KIND = {"F": "forward", "B": "backward", "I": "backward", "W": "weight_grad"}
COMPUTE_KINDS = tuple(LETTER)
KINDS = (*COMPUTE_KINDS, "optimizer", "compute", "wait", "comm", "copy")
LEVELS = ("intra", "inter")
TIERS = ("device", "host", "file")
COPY_LANES = LINKS  # the links between the tiers
COPY_OPS = ("copy", "read", "write")  # "read" and "write" are of files

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
    """``value`` converted to the type of a column. Raises TypeError if it has no such form."""
    if kind is tuple and isinstance(value, (tuple, list)):
        return tuple(_converted(int, element) for element in value)
    if kind is str and isinstance(value, str):
        return value
    may_be_number = not isinstance(value, (bool, str))
    if kind is int and may_be_number and abs(whole := operator.index(value)) < 2**63:
        return whole
    if kind is float and may_be_number and math.isfinite(number := float(value)):
        return number
    raise TypeError


_DTYPE = {int: "int64", float: "float64", str: "object", tuple: "object"}


def by_column(rows: Mapping[str, Sequence[tuple]]) -> dict[str, dict[str, list[Any]]]:
    """Transpose tables from rows to columns: {table: {column: values}}."""
    tables = {}
    for name, tuples in rows.items():
        columns = zip(*tuples, strict=True) if tuples else [()] * len(COLUMNS[name])
        tables[name] = dict(zip(COLUMNS[name], map(list, columns), strict=True))
    return tables


class Made(dict):
    """A table as {column: values} that an outline has made, of the right types and in order: it is
    not looked through again, which would take a tenth of the time of the prediction.
    """


def columns_of(name: str, rows: Mapping[str, Any] | pd.DataFrame | None) -> dict[str, list[Any]]:
    """Table ``name`` as plain lists, every value checked. None stands for a table without rows.

    Raises ValueError, which names the table, the column, the row and the legal values.
    """
    columns = _columns(name, rows)
    return {c: v if isinstance(v, list) else v.tolist() for c, v in columns.items()}


def _columns(name: str, rows: Mapping[str, Any] | pd.DataFrame | None) -> dict[str, Any]:
    if isinstance(rows, Made):
        return rows
    kinds = COLUMNS[name]
    if rows is None:
        return {column: [] for column in kinds}
    missing = [c for c in kinds if c not in rows]
    unknown = [str(c) for c in rows if c not in kinds]
    if missing or unknown:
        problems = [f"it lacks {', '.join(missing)}"] * bool(missing)
        problems += [f"it has unknown {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(
            f"table {name}: {' and '.join(problems)}; legal columns: {', '.join(kinds)}"
        )
    lists = {column: _read(name, column, rows[column]) for column in kinds}
    if len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{column} {len(values)}" for column, values in lists.items())
        raise ValueError(f"table {name}: its columns have unequal lengths: {lengths}")
    return lists


def _read(name: str, column: str, values: Any) -> Any:
    """The checked values of a column: a list, or the given NumPy array if it holds numbers."""
    kind, legal = COLUMNS[name][column], _CHOICES.get((name, column))
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    numbers = kind in (int, float) and getattr(values, "dtype", None) == _DTYPE[kind]
    if numbers and values.ndim == 1 and (kind is int or abs(values).max(initial=0.0) < math.inf):
        return values
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"table {name}: column {column} is not a list")
    if _all_are(kind, values) and (legal is None or set(values) <= set(legal)):
        return list(values)
    converted = []
    for row, value in enumerate(values):
        wrong = ""
        try:
            converted.append(_converted(kind, value))
            if legal and converted[-1] not in legal:
                wrong = f"; legal: {', '.join(legal)}"
        except (TypeError, ValueError, OverflowError):
            wrong = f" is not {_NAMES[kind]}"
        if wrong:
            raise ValueError(f"table {name}: row {row}, {column}={value!r}{wrong}")
    return converted


def _all_are(kind: type, values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether all values are of this type and in its range: fast, as most columns need no more."""
    if not set(map(type, values)) <= {kind}:
        return False
    if kind is tuple:
        return _all_are(int, list(chain.from_iterable(values)))
    if kind is int:
        return not values or (min(values) >= -(2**63) and max(values) < 2**63)
    return kind is str or all(map(math.isfinite, values))


def frame(name: str, rows: Mapping[str, Any] | pd.DataFrame | None) -> pd.DataFrame:
    """Table ``name`` as a DataFrame with exactly the stated columns and dtypes."""
    import numpy as np  # `import paralab` does without
    import pandas as pd

    checked, kinds = _columns(name, rows), COLUMNS[name]
    index = pd.RangeIndex(len(next(iter(checked.values()))))
    columns: dict[str, Any] = {}
    for column, values in checked.items():
        dtype = _DTYPE[kinds[column]]
        if dtype == "object":
            ready = isinstance(values, np.ndarray)
            cells = values if ready else np.fromiter(values, object, len(index))
            columns[column] = pd.Series(cells, index=index, dtype=cells.dtype)
        else:
            columns[column] = np.asarray(values, dtype)
    return pd.DataFrame(columns, index=index)


def letters(spans: pd.DataFrame) -> pd.Series:
    """The schedule's letter for each span, or the span's kind where schedules have no letter.

    A backward is "I" (input gradients only) if the weight gradients of the same stage and
    micro-batch are a span of their own, otherwise "B".
    """
    import pandas as pd

    kinds, passes = spans["kind"], pd.MultiIndex.from_frame(spans[["stage", "microbatch"]])
    input_only = (kinds == "backward") & passes.isin(passes[kinds == "weight_grad"])
    return kinds.replace(LETTER).mask(input_only, "I")


def check_relations(tables: Mapping[str, pd.DataFrame], world_size: int) -> None:
    """Raise ValueError unless span ids are unique, every span and rank that a row refers to exists,
    and no row ends before it starts.
    """
    for name, table in tables.items():
        ranks = table["rank"].unique().tolist()
        if unknown := [rank for rank in ranks if not 0 <= rank < world_size]:
            raise ValueError(f"table {name}: rank {min(unknown)} in a report of {world_size} ranks")
        if "end" in table and (backwards := table["end"] < table["start"]).any():
            raise ValueError(f"table {name}: row {backwards.argmax()} ends before it starts")
    spans = tables["spans"]
    if (repeated := spans["id"].duplicated()).any():
        raise ValueError(f"table spans: id {spans['id'][repeated].iloc[0]} appears more than once")
    # The spans that rows of the other tables name; -1 names none.
    named = {name: set(tables[name]["span"].tolist()) - {-1} for name in ("collectives", "copies")}
    awaited = set(chain.from_iterable(spans["after"].tolist()))
    ids = set(spans["id"].tolist()) if awaited or any(named.values()) else set()
    if lost := awaited - ids:
        raise ValueError(f"table spans: a span waits for span {min(lost)}, which is not there")
    for name, spans_named in named.items():
        if unknown := spans_named - ids:
            raise ValueError(f"table {name}: span {min(unknown)} is not in the table of spans")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Tables:
    """What a run, a replay, a prediction or a dry run recorded: six tables, and what they describe.

    Figures, comparisons and checks read all four alike; only ``clock`` says where the times come
    from: "measured" (wall clock, which includes waiting for cores or a GPU that ranks share),
    "replayed" (measured compute costs on one virtual device per rank, with a stated link model),
    "predicted", or "dry run" (there are no times).

    Times are seconds from the start of step 0, sizes bytes. Step 0 is warm-up.

    clock        "measured" | "replayed" | "predicted" | "dry run". A dry run has rows of one rank
                 only (meta["rank"]), and numbers its events in order in place of times
    model, plan  what was trained and how it was split. model is None for a traced function or an
                 observed program (`pl.trace`, `pl.observe`)
    cluster      the devices and links, where they were stated
    spans        id, rank, step, lane, kind, stage, chunk, microbatch, start, end, cost, after.
                 One row per box of the timeline. lane: compute, comm:<axis>, h2d, d2h, disk, host
                 (the host's processor, which runs an offloaded optimizer for the rank). kind:
                 forward, backward, weight_grad, optimizer, compute (a traced function's own work),
                 wait, comm, copy. cost: thread CPU (or device) seconds. after: ids of the spans
                 that this span waits for. microbatch: -1 where it has no meaning
    collectives  call, rank, step, op, axis, ranks, peer, level, phase, payload_bytes, wire_bytes,
                 start, end, span. One row per rank and call. call: which of its group's, from 0.
                 wire_bytes: what this rank sends.
                 level: that of the slowest link which the group, or a message, crosses
    copies       rank, step, lane, op, category, bytes, start, end, span. One row per copy between
                 memory tiers. lane: h2d (host to device), d2h, disk (op is read or write).
                 category: what was copied, as in memory
    memory       rank, step, time, tier, category, bytes. Each rank has one sample at the beginning
                 and at the end of every span, and one at the peak between. A sample is one row per
                 category that has held bytes so far (parameters, gradients, optimizer, activations,
                 buffers, workspace, other). Sampled in step 0, with a memory_limit in every step,
                 by `pl.observe` in the first ``memory_steps``
    steps        rank, step, start, end, beside. One row per rank and step. beside: processor
                 seconds of the rank's other threads, which carry its messages
    allocator    rank, step, allocated, active, reserved, largest_free. On GPUs one row per rank and
                 step, from CUDA's allocator. Peaks of the step: allocated, bytes of blocks in use;
                 active, these and freed blocks that a stream may still use; reserved, bytes taken
                 from the driver. largest_free: at the step's end, the largest block that is
                 reserved and not in use
    losses       one per step: mean over the global batch, nats per token
    weights, gradients  {name in the single-device model: full NumPy array}, or None; not saved
    results      what a traced or observed function returned on every rank, or None; not saved
    meta         further facts as plain JSON values: "nodes" is each rank's node, "compute" the
                 factor by which a replay scaled the recorded costs, if it is not 1
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
        object.__setattr__(self, "meta", plain(dict(self.meta), "meta"))
        object.__setattr__(self, "losses", [float(loss) for loss in self.losses])
        checked = isinstance(self.spans, Made)
        for name in COLUMNS:
            object.__setattr__(self, name, frame(name, getattr(self, name)))
        if not checked:
            check_relations({n: getattr(self, n) for n in COLUMNS}, self.plan.world_size)

    @property
    def world_size(self) -> int:
        """Ranks of the plan, also in a dry run, which has rows of one."""
        return self.plan.world_size
