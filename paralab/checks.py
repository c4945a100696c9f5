"""Refusals with one voice: what was asked, why it cannot be, what would work.

Everything a learner can get wrong goes through these few functions before any process starts. They
raise ``ValueError`` with ``field=value: why; legal: what`` as its message.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Any


def illegal(name: str, value: object, why: str, legal: str) -> ValueError:
    """The one form of every refusal: what was asked, why it cannot be, what would work."""
    return ValueError(f"{name}={value!r}: {why}; legal: {legal}")


def whole(name: str, value: object, *, at_least: int, at_most: int = 2**62) -> int:
    """``value`` as an int in range, or the refusal. Booleans and floats are not whole numbers."""
    legal = f"a whole number of at least {at_least}"
    if at_most < 2**62:
        legal = f"a whole number from {at_least} to {at_most}"
    if isinstance(value, bool):
        raise illegal(name, value, "a yes/no value is not a count", legal)
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # 2.0 is refused, numpy's 2 is not
    except TypeError:
        raise illegal(name, value, "not a whole number", legal) from None
    if not at_least <= number <= at_most:
        raise illegal(name, value, "out of range", legal)
    return number


def real(
    name: str, value: object, *, above: float | None = None, at_least: float | None = None
) -> float:
    """``value`` as a finite float in range, or the refusal."""
    bound = f" above {above:g}" if above is not None else ""
    if at_least is not None:
        bound = f" of at least {at_least:g}"
    legal = f"a finite number{bound}"
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise illegal(name, value, "not a number", legal)
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise illegal(name, value, "not finite", legal)
    if (above is not None and number <= above) or (at_least is not None and number < at_least):
        raise illegal(name, value, "out of range", legal)
    return number


def choice(name: str, value: object, options: tuple[Any, ...]) -> Any:
    """``value`` if it is one of ``options``, or the refusal listing them."""
    if not any(type(value) is type(o) and value == o for o in options):
        raise illegal(name, value, "unknown choice", " | ".join(repr(o) for o in options))
    return value


class Description:
    """What the three descriptions share: a change of some fields, and a plain-dict form to save."""

    def replace(self, **changes: Any) -> Any:
        """A copy with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Any:
        """The inverse of ``to_dict``. Raises ``ValueError`` on a field it does not know."""
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in values:
            if name not in known:
                raise illegal(
                    name,
                    values[name],
                    f"{cls.__name__} has no such field",
                    ", ".join(sorted(known)),
                )
        return cls(**values)
