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
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise illegal(name, value, "too large", legal) from None
    except TypeError:
        raise illegal(name, value, "not one number", legal) from None
    if not math.isfinite(number):
        raise illegal(name, value, "not finite", legal)
    if (above is not None and number <= above) or (at_least is not None and number < at_least):
        raise illegal(name, value, "out of range", legal)
    return number


UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def number(text: str) -> int | float | str:
    """The number that ``text`` writes, or ``text``: then the field refuses it in its own words."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def size(text: str) -> int | float | str:
    """Bytes: a plain number, or one with a unit. 1.5MiB is fine, half a byte is not."""
    upper = text.strip().upper()
    for unit, factor in UNITS.items():
        value = number(upper.removesuffix(unit).strip()) if upper.endswith(unit) else text
        if not isinstance(value, str):
            total = value * factor
            return int(total) if total == total // 1 else text
    return number(text)


def num_bytes(name: str, value: object) -> int:
    """``value`` as a number of bytes: an int, or text as "64MB" (10^6) or "64MiB" (2^20)."""
    found = size(value) if isinstance(value, str) else value
    legal = 'bytes, at least 1, as a whole number or as text: "64MB" (10^6), "64MiB" (2^20)'
    if isinstance(found, str):
        raise illegal(name, value, "not a number of bytes", legal)
    try:
        return whole(name, found, at_least=1)
    except ValueError:
        raise illegal(name, value, "not a whole number of bytes above 0", legal) from None


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
