"""What rules speak of: the settings of a plan and a model, of one plan or of a column of them.

A setting is a field of `Plan` or of `ModelSpec`, or follows from a few of them (`derived`: the grid
of a tp group, the place of every state). `Asked` has the settings of one plan, as values; `Columns`
those of many plans, as NumPy arrays or `Coded` columns, which compare as values do. So what is
written with operators on settings holds for both: the rules of rules.py. Torch-free.
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
# {name: (settings, function)} of what follows from a few settings; "model" is one of these.
DERIVED: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {}


def derived(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of settings, which its parameters name, a setting itself."""
    code = function.__code__
    DERIVED[function.__name__] = code.co_varnames[: code.co_argcount], function
    return function


class Grid(NamedTuple):
    """How a tp group stands: q x q ranks, ``depth`` of these; q = 0 where it makes no such grid.
    What is named like a size says in how many parts the group deals it out.

    asked  the depth that the plan states, or None
    """

    mode: str
    q: int
    depth: int
    asked: int | None

    @property
    def shape(self) -> str:
        """What the mode takes."""
        if self.mode == "2.5d":
            depth = f"d={self.asked}" if self.asked else "d up to q"
            return f"d grids of q x q ranks, {depth}"
        return "a grid of q x q x q ranks" if self.mode == "3d" else "a grid of q x q ranks"

    @property
    def sizes(self) -> str:
        """The first numbers of ranks that make one."""
        found = {q ** (3 if self.mode == "3d" else 2) for q in range(1, 13)}
        if self.mode == "2.5d":
            depths = [self.asked] if self.asked else range(1, 9)
            found = {d * q * q for q in range(1, 9) for d in depths if self.asked or d <= q}
        return ", ".join(map(str, sorted(found)[:12])) + ", ..."

    @property
    def heads(self) -> int:
        return self.q or 1

    @property
    def vocab(self) -> int:
        return self.heads ** (2 if self.mode == "3d" else 1)

    @property
    def hidden(self) -> int:
        return 1 if self.mode == "1d" else self.vocab

    @property
    def microbatch_size(self) -> int:
        return 1 if self.mode == "1d" else self.heads * (self.depth or 1)


@derived
def grid(tp: int, tp_mode: str, tp_depth: int | None) -> Grid:
    found = (tp, 1)
    if tp_mode == "2.5d":
        depths = [tp_depth] if tp_depth else range(round(tp ** (1 / 3)), 0, -1)
        squares = ((math.isqrt(tp // d), d) for d in depths)
        found = next(((q, d) for q, d in squares if d * q * q == tp), (0, 0))
    elif tp_mode != "1d":
        power = 3 if tp_mode == "3d" else 2
        q = round(tp ** (1 / power))
        found = (q, q if power == 3 else 1) if q**power == tp else (0, 0)
    return Grid(tp_mode, *found, tp_depth)


@derived
def place(offload: Any, zero_stage: int) -> Offload:
    """Where every state lies."""
    return resolved(offload, zero_stage) or ON_DEVICE


@derived
def shard_degree(dp: int, shard: int | None) -> int:
    return shard or dp


@derived
def near(secondary_shard: int | None, dp: int, shard: int | None) -> int:
    """Ranks that share the parameters that backward gathers."""
    return secondary_shard or shard or dp


@derived
def largest(dp: int, tp: int, pp: int) -> str:
    """The degree that a slipped digit is in."""
    degrees = {"dp": dp, "tp": tp, "pp": pp}
    return max(degrees, key=degrees.__getitem__)


@derived
def most_stages(layers: int, pp: int, virtual_stages: int) -> str:
    most = layers if virtual_stages == 1 else layers // pp
    return f"up to {most}" if most else f"pp of at most {layers} first"


@derived
def own_schedule(schedule: Any) -> bool:
    return not isinstance(schedule, str)


@derived
def is_schedule(schedule: Any, pp: int, microbatches: int, virtual_stages: int) -> bool:
    """The kit's own are proved by tests; one of the user's own raises its own refusal."""
    return isinstance(schedule, str) or bool(
        make_schedule(schedule, pp, microbatches, virtual_stages)
    )


@derived
def splits(schedule: Any, pp: int, microbatches: int, virtual_stages: int) -> bool:
    """Whether a schedule puts weight halves of backward aside."""
    if isinstance(schedule, str):
        return schedule in SPLIT
    lists = make_schedule(schedule, pp, microbatches, virtual_stages)
    return any(action.kind == "W" for actions in lists for action in actions)


@derived
def only_named(schedule: Any, passes: tuple) -> str:
    """The function of the user's own that a saved plan has kept nothing but the name of, or ""."""
    forms = [("schedule", schedule), *(("passes", f) for f in passes)]
    return next((name for name, form in forms if saved(form)), "")


@derived
def block_runs(block: Any, model: Any, microbatch_size: int, precision: str) -> bool:
    """A block of the user's own raises its own refusal."""
    if block is not None:
        from paralab.model.facts import facts

        block_shapes(block, model)  # which is compared each time with what the facts are of
        facts(model, microbatch_size, precision)
    return True


class Asked:
    """The settings of one plan for one model."""

    def __init__(self, plan: Any, model: Any = None) -> None:
        self.__dict__.update({**vars(model or plan), **vars(plan), "plan": plan, "model": model})

    def __getattr__(self, name: str) -> Any:
        if name in DERIVED:
            names, function = DERIVED[name]
            found = function(*[getattr(self, other) for other in names])
        else:
            found = getattr(self.plan, name)  # a property
        self.__dict__[name] = found
        return found

    def value(self, field: str) -> Any:
        """What a refusal shows: of a form of the user's own its name."""
        if field.startswith("offload["):
            return getattr(self.place, field[9:-2])
        return form_name(getattr(self, field))


class Coded:
    """A column of any values: the different ones, and for each entry which of them it has."""

    def __init__(self, values: Sequence[Any], codes: Any) -> None:
        self.values, self.codes = values, codes

    def __getattr__(self, name: str) -> Any:
        return column([getattr(value, name) for value in self.values], self.codes)

    def __eq__(self, other: object) -> Any:
        import numpy as np

        return np.array([value == other for value in self.values], bool)[self.codes]

    def __ne__(self, other: object) -> Any:
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]


def column(values: Sequence[Any], codes: Any) -> Any:
    """An array, of numbers or truths, or else a `Coded` column."""
    import numpy as np

    kinds = set(map(type, values))
    if len(kinds) == 1 and kinds <= {int, float, bool}:
        return np.array(values)[codes]
    return Coded(values, codes)


class Columns:
    """The settings of many plans for one model: a column each. What no plan has yet is an
    ``AttributeError``.

    values  {field: the different values}; ``codes``: {field: which of them each plan has}
    """

    def __init__(self, model: Any, values: dict[str, Sequence[Any]], codes: dict[str, Any]) -> None:
        self.model, self.values, self.codes = model, values, codes

    def __getattr__(self, name: str) -> Any:
        if name in self.values:
            found = column(self.values[name], self.codes[name])
        elif name in DERIVED:
            found = self.of(*DERIVED[name])
        else:
            found = getattr(self.model, name)
        self.__dict__[name] = found
        return found

    def of(self, names: Sequence[str], function: Callable[..., Any]) -> Any:
        """A column that follows from others, worked out once for each combination of values."""
        import numpy as np

        fields = [name for name in names if name in self.values]
        fixed = {name: getattr(self, name) for name in names if name not in fields}
        listed = [
            function(**dict(zip(fields, some, strict=True)), **fixed)
            for some in product(*(self.values[name] for name in fields))
        ]
        if not fields:
            return listed[0]
        codes = tuple(self.codes[name] for name in fields)
        return column(listed, np.ravel_multi_index(codes, [len(self.values[n]) for n in fields]))
