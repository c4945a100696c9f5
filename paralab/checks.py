"""Checks of arguments, whose errors all have one form: what was given, why it is refused, what is
legal.

Whatever a learner can get wrong is checked by these few functions before a process starts. What
they call the refusal is a ``ValueError`` with the message ``field=value: why; legal: what``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, ClassVar

VALUE_LENGTH = 300  # characters of a value that a message shows
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
MESSAGE_LENGTH = 40_000  # characters of a message: megabytes are no help in a notebook
LEGAL = "; legal: "  # between the two parts of a refusal


def illegal(name: str, value: object, why: str, legal: str) -> ValueError:
    """The refusal of ``value`` for the setting ``name``: why, and what is legal instead. If ``why``
    quotes another refusal, what is legal is what that one says.
    """
    why, _, quoted = why.partition(LEGAL)
    return ValueError(f"{name}={shown(value)}: {why}{LEGAL}{quoted or legal}")


def reason(refusal: object) -> str:
    """What a refusal says without what is legal instead."""
    return str(refusal).partition(LEGAL)[0]


def shown(value: object) -> str:
    """``repr(value)``, shortened, and without addresses, which differ from run to run. If ``repr``
    raises, the type of ``value``.
    """
    try:
        return shortened(ADDRESS.sub("", repr(value)), VALUE_LENGTH)
    except Exception as error:  # an int of more than 4300 digits, say
        return f"<{type(value).__name__} without a repr: {type(error).__name__}>"


def shortened(text: str, most: int = MESSAGE_LENGTH) -> str:
    """``text``; if it is longer than ``most`` characters, its beginning, how much is left out, and
    its end.
    """
    excess = len(text) - most
    if excess <= 0:
        return text
    half = most // 2
    return f"{text[:half]} ... {excess} characters left out ... {text[half + excess :]}"


def count_of(number: float, noun: str, spec: str = "") -> str:
    """ "1 rank", "4 ranks", "0 micro-batches". spec: the format of the number"""
    plural = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:{spec}} {noun}{plural * (number != 1)}"


def whole(name: str, value: object, *, at_least: int, at_most: int = 2**62) -> int:
    """``value`` as an int in range, or the refusal. Booleans and floats are not whole numbers."""
    if type(value) is int and at_least <= value <= at_most:  # a fast path: nearly all values
        return value
    span = f"a whole number from {at_least} to {at_most}" if at_most > at_least else f"{at_least}"
    legal = span if at_most < 2**62 else f"a whole number of at least {at_least}"
    if isinstance(value, bool):
        raise illegal(name, value, "a bool is not a number", legal)
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # 2.0 is refused, numpy's 2 is not
    except TypeError:
        raise illegal(name, value, "not a whole number", legal) from None
    if not at_least <= number <= at_most:
        raise illegal(name, value, "out of range", span if number > at_most else legal)
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
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several, say
        raise illegal(name, value, "not one finite number", legal) from None
    if not math.isfinite(number):
        raise illegal(name, value, "not finite", legal)
    if (above is not None and number <= above) or (at_least is not None and number < at_least):
        raise illegal(name, value, "out of range", legal)
    return number


def current_folder() -> str:
    """The current folder. Raises ``FileNotFoundError`` if it was deleted since."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError("the current folder was deleted: change to another one") from None


def path(name: str, value: object, legal: str) -> Path:
    """``value`` as the path of a file, of a folder or of nothing that exists yet, or the refusal.
    FIFOs and devices are refused, because reading one may block for ever.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise illegal(name, value, "not a path", legal)
    if not os.fspath(value):
        raise illegal(name, value, "an empty path would mean the current folder", legal)
    try:
        place = Path(value).expanduser()
        kind = stat.S_IFMT(place.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return place
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise illegal(name, value, f"it cannot be opened: {why}", legal) from None
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise illegal(name, str(value), "neither a file nor a folder", legal)
    return place


UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def number(text: str) -> int | float | str:
    """``text`` as a number; or ``text`` itself, if it is none, which the setting then refuses with
    its own message. Python's "1_0" and digits of other scripts are none.
    """
    for kind in (int, float) if text.isascii() and "_" not in text else ():
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def size(text: str) -> int | float | str:
    """``text`` as a number of bytes, also with a unit: "1.5MiB". A number with a unit that is not
    whole bytes, and what `number` cannot read, is returned as it is.
    """
    upper = text.strip().upper()
    for unit, factor in UNITS.items():
        value = number(upper.removesuffix(unit).strip()) if upper.endswith(unit) else text
        if not isinstance(value, str):
            total = value * factor
            return int(total) if total == total // 1 else text
    return number(text)


def mb(size: float) -> str:
    """ "16,640 B", "0.2 MB", "135 GB": three digits from 0.1 MB on."""
    if size < 1e5:
        return f"{size:,.0f} B"
    number, unit = (size / 1e6, "MB") if size < 999.5e6 else (size / 1e9, "GB")
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"


def num_bytes(name: str, value: object) -> int:
    """``value`` as a number of bytes: a whole number, or text: "64MB" (10^6), "64MiB" (2^20)."""
    amount = size(value) if isinstance(value, str) else value
    if isinstance(amount, float) and amount.is_integer():
        amount = int(amount)
    legal = 'a number of bytes, at least 1, or text: "64MB" (64 * 10^6), "64MiB" (64 * 2^20)'
    try:
        return whole(name, amount, at_least=1)
    except ValueError:
        raise illegal(name, value, "not a whole number of bytes from 1 to 2^62", legal) from None


def choice(name: str, value: object, options: tuple[Any, ...], *others: str) -> Any:
    """``value`` if it is one of ``options``, or the refusal listing them, and after them what else
    is legal, in words.
    """
    for option in options:
        if type(value) is type(option) and value == option:
            return value
    raise illegal(name, value, "unknown choice", " | ".join((*map(repr, options), *others)))


def instance(name: str, value: object, kind: Any, legal: str, noun: str = "") -> Any:
    """``value`` if it is a ``kind``, or the refusal, which calls a ``kind`` a ``noun`` (default: by
    the name of the setting).
    """
    if not isinstance(value, kind):
        raise illegal(name, value, f"not a {noun or name}", legal)
    return value


def misfit(function: Callable[..., Any], *args: Any, unwrap: bool = False, **named: Any) -> str:
    """Why the signature of ``function`` (unwrap: of what it decorates) forbids this call, or ""."""
    try:
        inspect.signature(function, follow_wrapped=unwrap).bind(*args, **named)
    except Exception as error:  # another one than this where there is no signature
        return str(error) if isinstance(error, TypeError) else ""
    return ""


# ---- the fields of a `Description` ----
def checked(check: Callable[[str, Any], Any], default: Any = MISSING, **more: Any) -> Any:
    """A field for what ``check(name, value)`` returns. If the default is None, None is legal too.

    more  further arguments of `dataclasses.field`
    """
    return dataclasses.field(default=default, metadata={"check": check}, **more)


def count(default: Any = MISSING, *, at_least: int = 1, at_most: int = 2**62) -> Any:
    """A field for a whole number in this range."""
    return checked(functools.partial(whole, at_least=at_least, at_most=at_most), default)


def amount(default: Any = MISSING, **bound: float) -> Any:
    """A field for a finite number, ``above`` or ``at_least`` some bound."""
    return checked(functools.partial(real, **bound), default)


def one_of(*options: Any) -> Any:
    """A field for one of these values; the first one is the default."""
    return checked(functools.partial(choice, options=options), options[0])


def flag(default: bool) -> Any:
    """A field for True or False."""
    return checked(functools.partial(choice, options=(True, False)), default)


@functools.cache
def _checks(kind: Any) -> list[tuple[str, str, bool, Callable[[str, Any], Any]]]:
    """Of each field of a `Description` that has a check: (its name, its name in a refusal, whether
    it may be None, the check).
    """
    return [
        (f.name, kind.called.format(f.name), f.default is None, f.metadata["check"])
        for f in dataclasses.fields(kind)
        if f.metadata
    ]


class Description:
    """The base of `ModelSpec`, `Plan`, `Cluster`, `Link` and `Offload`: it checks fields, copies
    with changes, and converts to and from plain dicts for files.

    called  the name of a field in a refusal, from its own name
    """

    called: ClassVar[str] = "{}"

    def __post_init__(self) -> None:
        for name, called, optional, check in _checks(type(self)):
            value = getattr(self, name)
            if value is None and optional:
                continue
            legal = check(called, value)
            if legal is not value:
                object.__setattr__(self, name, legal)

    def replace(self, **changes: Any) -> Any:
        """A copy with some fields changed, checked like a new object. Raises ``ValueError`` on an
        unknown field.
        """
        self._known(changes)
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """Every field as a plain value; `from_dict` reads it back."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def changed(self) -> dict[str, Any]:
        """The items of ``to_dict`` that differ from the defaults, which all fields have."""
        usual = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != usual[name]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Any:
        """The inverse of ``to_dict``. Raises ``ValueError`` on an unknown field and on a missing
        one.
        """
        cls._known(values)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            has_default = (field.default, field.default_factory) != (MISSING, MISSING)
            if field.name not in values and not has_default:
                why, legal = f"{field.name} is missing", f"a table with {field.name} too"
                raise illegal(cls.__name__, dict(values), why, legal)
        return cls(**values)

    @classmethod
    def _known(cls, values: Any) -> None:
        """Raise ``ValueError`` unless ``values`` is a table of this class's fields."""
        known = ", ".join(sorted(f.name for f in dataclasses.fields(cls)))  # type: ignore[arg-type]
        instance(cls.__name__, values, Mapping, f"a table of {known}", "table")
        for name in values:
            if name not in known.split(", "):
                shown_name = name if isinstance(name, str) else shown(name)
                raise illegal(shown_name, values[name], f"{cls.__name__} has no such field", known)
