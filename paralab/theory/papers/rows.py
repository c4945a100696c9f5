"""The rows of a table: the paper's, or the reader's own.

A kind of row is a NamedTuple. The table is computed from its fields without a default. Fields with
the default `NAN` are printed figures: a reader who has none leaves them out, and the table is empty
there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

from paralab.checks import illegal, instance, real, whole

NAN = float("nan")
Row = TypeVar("Row", bound=tuple)


def rows_of(kind: type[Row], rows: Any, printed: Iterable[Row]) -> list[Row]:
    """The reader's own ``rows``, checked; or the paper's, ``printed``, if ``rows`` is None.

    rows  one row or several, each a ``kind`` or a mapping of its fields

    Raises ValueError naming the row and the field that is missing, unknown or illegal.
    """
    if rows is None:
        return list(printed)
    if isinstance(rows, (kind, Mapping)):
        rows = [rows]
    fields = ", ".join(kind._fields)
    legal = f"a {kind.__name__}, a mapping of {fields}, or a list of these"
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise illegal("rows", rows, "not rows of this table", legal)
    checked = [_checked(kind, f"rows[{at}]", row, legal) for at, row in enumerate(rows)]
    if not checked:
        raise illegal("rows", rows, "there is no row", legal)
    return checked


def _checked(kind: type[Row], name: str, row: Any, legal: str) -> Row:
    instance(name, row, (kind, Mapping), legal, "row of this table")
    given = dict(row) if isinstance(row, Mapping) else row._asdict()
    defaults, fields = kind._field_defaults, ", ".join(kind._fields)
    for field in given.keys() - set(kind._fields):
        raise illegal(f"{name}.{field}", given[field], "this table has no such column", fields)
    for field in kind._fields:
        if field not in given and field not in defaults:
            raise illegal(name, dict(given), f"{field} is missing", f"a row with {field} too")
    types = get_type_hints(kind)
    values = {f: _value(f"{name}.{f}", types[f], v, defaults.get(f)) for f, v in given.items()}
    row = kind(**values)
    if {"model", "plan"} <= set(kind._fields):
        row.plan.validate(row.model)
    return row


def _value(name: str, kind: type, value: Any, default: Any) -> Any:
    """A field's value, checked. None and NaN mean that a printed figure is not known."""
    if kind is int:
        return whole(name, value, at_least=1)
    if kind is float:
        printed = default is NAN
        if printed and (value is None or isinstance(value, float) and math.isnan(value)):
            return NAN
        return real(name, value, above=None if printed else 0.0)
    return instance(name, value, kind, f"a {kind.__name__}", kind.__name__)
