"""The settings that rules read, for one plan as values or for many plans as columns. Torch-free.

A setting is a field of `Plan` or of `ModelSpec`, or is derived from a few of them (`derived`).
`Settings` has those of one plan, as values; `Columns` those of many plans, as NumPy arrays or
`Coded` columns, which compare as values do. So an expression with operators on settings, as a rule
of rules.py is, works for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

from paralab.parallel.schedules import SPLIT
from paralab.spec.forms import block_shapes, form_name, make_schedule, saved
from paralab.spec.tiers import Offload, resolved

ON_DEVICE = Offload()
# {derived setting: (names of its arguments, function)}; an argument may also be "model".
DERIVED: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {}


def derived(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function of settings as a setting; its parameters name the settings it needs."""
    code = function.__code__
    DERIVED[function.__name__] = code.co_varnames[: code.co_argcount], function
    return function


class Grid(NamedTuple):
    """The grid of a tp group: ``depth`` squares of q x q ranks; q = 0 if tp makes no such grid.

    heads, vocab, hidden, microbatch_size  numbers of equal parts that the group makes of these
    """

    q: int
    depth: int
    heads: int
    vocab: int
    hidden: int
    microbatch_size: int


@derived
def grid(tp: int, tp_mode: str, tp_depth: int | None) -> Grid:
    q, depth = tp, 1
    if tp_mode == "2.5d":
        depths = [tp_depth] if tp_depth else range(round(tp ** (1 / 3)), 0, -1)
        squares = ((math.isqrt(tp // d), d) for d in depths)
        q, depth = next(((q, d) for q, d in squares if d * q * q == tp), (0, 0))
    elif tp_mode != "1d":
        power = 3 if tp_mode == "3d" else 2
        q = round(tp ** (1 / power))
        q, depth = (q, q if power == 3 else 1) if q**power == tp else (0, 0)
    rows = q or 1
    entries = rows**2 if tp_mode == "3d" else rows
    cut = (1, 1) if tp_mode == "1d" else (entries, rows * (depth or 1))  # hidden and samples
    return Grid(q, depth, rows, entries, *cut)


@derived
def place(offload: Any, zero_stage: int) -> Offload:
    """The place of every state."""
    return resolved(offload, zero_stage) or ON_DEVICE


@derived
def shard_degree(dp: int, shard: int | None) -> int:
    return shard or dp


@derived
def backward_shard_degree(secondary_shard: int | None, dp: int, shard: int | None) -> int:
    """Number of ranks that share the copy of the parameters that backward gathers."""
    return secondary_shard or shard or dp


@derived
def own_schedule(schedule: Any) -> bool:
    return not isinstance(schedule, str)


@derived
def is_schedule(schedule: Any, pp: int, microbatches: int, virtual_stages: int) -> bool:
    """True for the library's schedules, which tests prove; a user's own is validated, and raises
    an error of its own if it is not valid.
    """
    return isinstance(schedule, str) or bool(
        make_schedule(schedule, pp, microbatches, virtual_stages)
    )


@derived
def splits(schedule: Any, pp: int, microbatches: int, virtual_stages: int) -> bool:
    """Whether a schedule defers weight halves of backward."""
    if isinstance(schedule, str):
        return schedule in SPLIT
    lists = make_schedule(schedule, pp, microbatches, virtual_stages)
    return any(action.kind == "W" for actions in lists for action in actions)


@derived
def only_named(schedule: Any, passes: tuple) -> str:
    """The field of which a saved plan has only the name of the user's function, or ""."""
    forms = [("schedule", schedule), *(("passes", f) for f in passes)]
    return next((name for name, form in forms if saved(form)), "")


@derived
def block_runs(block: Any, model: Any, microbatch_size: int, precision: str) -> bool:
    """True, unless a user's own block fails: this raises an error of its own."""
    if block is not None:
        from paralab.model.facts import facts

        block_shapes(block, model)  # raises if the block differs from the one that facts are of
        facts(model, microbatch_size, precision)
    return True


class Settings:
    """The settings of one plan for one model, each computed when it is first read."""

    def __init__(self, plan: Any, model: Any = None) -> None:
        self.__dict__.update({**vars(model or plan), **vars(plan), "plan": plan, "model": model})

    def __getattr__(self, name: str) -> Any:
        if name in DERIVED:
            names, function = DERIVED[name]
            value = function(*[getattr(self, other) for other in names])
        else:
            value = getattr(self.plan, name)  # a property
        self.__dict__[name] = value
        return value

    def value(self, field: str) -> Any:
        """The value that an error shows for a field; of a user's own function, its name."""
        if field.startswith("offload["):
            return getattr(self.place, field[9:-2])
        return form_name(getattr(self, field))


class Coded:
    """A column of arbitrary values: the distinct values, and per entry the index of its value."""

    def __init__(self, values: Sequence[Any], codes: Any) -> None:
        self.values, self.codes = values, codes

    def __getattr__(self, name: str) -> Any:
        return column([getattr(value, name) for value in self.values], self.codes)

    def __eq__(self, other: object) -> Any:
        import numpy as np

        return np.array([value == other for value in self.values], bool)[self.codes]

    def __ne__(self, other: object) -> Any:
        return ~(self == other)


def column(values: Sequence[Any], codes: Any) -> Any:
    """``values[codes]``: an array if the values are numbers or truths, else a `Coded` column."""
    import numpy as np

    kinds = set(map(type, values))
    if len(kinds) == 1 and kinds <= {int, float, bool}:
        return np.array(values)[codes]
    return Coded(values, codes)


class Columns:
    """The settings of many plans for one model, one column each. A setting that has not been chosen
    yet raises ``AttributeError``.

    values  {field: its distinct values}
    codes   {field: per plan the index of its value}
    """

    def __init__(self, model: Any, values: dict[str, Sequence[Any]], codes: dict[str, Any]) -> None:
        self.model, self.values, self.codes = model, values, codes

    def __getattr__(self, name: str) -> Any:
        if name in self.values:
            value = column(self.values[name], self.codes[name])
        elif name in DERIVED:
            value = self.of(*DERIVED[name])
        else:
            value = getattr(self.model, name)
        self.__dict__[name] = value
        return value

    def of(self, names: Sequence[str], function: Callable[..., Any]) -> Any:
        """A derived column; the function is called once per combination of distinct values."""
        import numpy as np

        fields = [name for name in names if name in self.values]
        fixed = {name: getattr(self, name) for name in names if name not in fields}
        results = [
            function(**dict(zip(fields, combination, strict=True)), **fixed)
            for combination in product(*(self.values[name] for name in fields))
        ]
        if not fields:
            return results[0]
        codes = tuple(self.codes[name] for name in fields)
        return column(results, np.ravel_multi_index(codes, [len(self.values[n]) for n in fields]))
