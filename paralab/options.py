"""A shell's options, read off the descriptions, and what was typed as a model and a plan again.

Every field of ``ModelSpec`` and ``Plan`` but ``block`` and ``passes``, which take code, is an
option of the same name: a field that a later version adds is reachable the day it exists. Values
are handed on as typed: what is legal is said by the descriptions alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from paralab.checks import number, size
from paralab.spec import MODEL_PRESETS, ModelSpec, Plan

DEFAULT_PRESET = "laptop"
CODE = ("block", "passes")  # fields that take code of one's own, which a shell cannot write
SIZES = ": 4194304, 4MiB (2^20) or 4MB (10^6)"


def explained(kind: type) -> dict[str, str]:
    """{field: the first sentence on it} of a dataclass's docstring, whose entries are lines that
    begin with the field's name, and what is indented below them.
    """
    entries = re.findall(r"^(\w+)  +(.+(?:\n +.+)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    first = {name: re.split(r"\.\s", " ".join(text.split()))[0] for name, text in entries}
    return {name: re.sub('["`]', "", said).replace("%", "%%") for name, said in first.items()}


def comma_separated(text: str) -> list[str]:
    """A list written with commas; of nothing, the text itself, which what reads it refuses."""
    return [name.strip() for name in text.split(",") if name.strip()] or [text]


READERS: dict[str, Callable[[str], Any]] = {  # by annotation
    "bool": bool,
    "int": number,
    "float": number,
    "int | None": number,
    "tuple[str, ...]": comma_separated,
}


class Option(NamedTuple):
    """The name of the setting, what reads its value (bool: a yes or no), help."""

    name: str
    reader: Callable[[str], Any]
    said: str


def add_options(group: Any, options: Iterable[Option]) -> None:
    """An option that is not given is not in the result."""
    for name, reader, said in options:
        how: dict[str, Any] = {"type": reader, "metavar": name.upper()}
        if reader is bool:
            how = {"action": argparse.BooleanOptionalAction}
        shared = {"dest": name, "default": argparse.SUPPRESS, "help": said}
        group.add_argument("--" + name.replace("_", "-"), **shared, **how)


def _fields(kind: type, defaults: dict[str, Any]) -> Iterator[Option]:
    said = explained(kind)
    for field in dataclasses.fields(kind):
        if field.name in CODE:
            continue
        value = defaults[field.name]
        default = "" if value is None or value == () else f" (default {value})"
        reader = size if field.name.endswith("_bytes") else READERS.get(str(field.type), str)
        what = said.get(field.name, "")  # under python -OO there are no docstrings
        what += SIZES if reader is size else ""
        yield Option(field.name, reader, what + default)


def add_other_plan(command: argparse.ArgumentParser, prefix: str) -> None:
    """The plan's options once more, for a second plan that differs in these."""
    name = prefix.replace("_", "-")
    about = f"Every option of the plan with --{name} before its name, as --{name}dp 4."
    group = command.add_argument_group("the plan to compare it with", about)
    fields = _fields(Plan, Plan().to_dict())
    add_options(group, (Option(prefix + one.name, one.reader, argparse.SUPPRESS) for one in fields))


def add_model_and_plan(command: argparse.ArgumentParser) -> None:
    model = command.add_argument_group("the model")
    model.add_argument(
        "--preset",
        default=DEFAULT_PRESET,
        metavar="NAME",
        help=f"start from {', '.join(MODEL_PRESETS)} (default {DEFAULT_PRESET}); "
        "the options below change it",
    )
    add_options(model, _fields(ModelSpec, ModelSpec.preset(DEFAULT_PRESET).to_dict()))
    add_options(command.add_argument_group("the plan"), _fields(Plan, Plan().to_dict()))


def model_of(given: argparse.Namespace) -> ModelSpec:
    """The preset with what the command line changes of it. Raises ``ValueError`` if there is no
    such model.
    """
    return ModelSpec.preset(given.preset).replace(**_taken(ModelSpec, given))


def plan_of(given: argparse.Namespace) -> Plan:
    """The plan that the command line names. Raises ``ValueError`` if there is no such plan."""
    return Plan(**_taken(Plan, given))


def other_plan_of(given: argparse.Namespace, prefix: str) -> Plan | None:
    """The same plan with what the options with this prefix change, or None without any."""
    names = {prefix + field.name: field.name for field in dataclasses.fields(Plan)}
    changes = {names[name]: value for name, value in vars(given).items() if name in names}
    return plan_of(given).replace(**changes) if changes else None


def settings_of(given: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the options ``names`` that were given."""
    return {name: getattr(given, name) for name in names if name in given}


def _taken(kind: type, given: argparse.Namespace) -> dict[str, Any]:
    return settings_of(given, *(field.name for field in dataclasses.fields(kind)))
