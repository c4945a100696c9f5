"""The command line's options for a model and a plan, and the model and plan that they describe.

Every field of ``ModelSpec`` and ``Plan`` is an option of the same name, but for ``block`` and
``passes``, which take code; so a new field needs no code here. An option's text becomes a number
where the field takes one, and is otherwise passed on: `ModelSpec` and `Plan` decide what is legal.
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
CODE = ("block", "passes")  # fields whose values are code, which an option cannot hold
SIZES = ": 4194304, 4MiB (2^20) or 4MB (10^6)"


def explained(kind: type) -> dict[str, str]:
    """{field: the first sentence on it} from a dataclass's docstring. The entry of a field is the
    line that begins with its name, and the lines indented below.
    """
    entries = re.findall(r"^(\w+)  +(.+(?:\n +.+)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    first = {name: re.split(r"\.\s", " ".join(text.split()))[0] for name, text in entries}
    return {name: re.sub('["`]', "", said).replace("%", "%%") for name, said in first.items()}


def comma_separated(text: str) -> list[str]:
    """The names between commas."""
    return [name.strip() for name in text.split(",")]


READERS: dict[str, Callable[[str], Any]] = {  # by annotation
    "bool": bool,
    "int": number,
    "float": number,
    "int | None": number,
    "tuple[str, ...]": comma_separated,
}


class Option(NamedTuple):
    """A setting's name, what reads its text (bool: it is --name or --no-name), its help."""

    name: str
    reader: Callable[[str], Any]
    help: str


def add_options(group: Any, options: Iterable[Option]) -> None:
    """Add ``options`` to an argparse group. One that is not given leaves no attribute behind."""
    for name, reader, text in options:

        def read(given: str, reader: Callable[[str], Any] = reader) -> Any:
            return None if given == "None" else reader(given)  # which refusals call None

        value: dict[str, Any] = {"type": read, "metavar": name.upper()}
        if reader is bool:
            value = {"action": argparse.BooleanOptionalAction}
        shared = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        group.add_argument("--" + name.replace("_", "-"), **shared, **value)


def _options_of(kind: type, defaults: dict[str, Any]) -> Iterator[Option]:
    sentences = explained(kind)
    for field in dataclasses.fields(kind):
        if field.name in CODE:
            continue
        value = defaults[field.name]
        default = "" if value is None or value == () else f" (default {value})"
        reader = size if field.name.endswith("_bytes") else READERS.get(str(field.type), str)
        text = sentences.get(field.name, "")  # under python -OO there are no docstrings
        text += SIZES if reader is size else ""
        yield Option(field.name, reader, text + default)


def add_model_and_plan(command: argparse.ArgumentParser) -> None:
    model = command.add_argument_group("the model")
    model.add_argument(
        "--preset",
        default=DEFAULT_PRESET,
        metavar="NAME",
        help=f"start from {', '.join(MODEL_PRESETS)} (default {DEFAULT_PRESET}); "
        "the options below change it",
    )
    add_options(model, _options_of(ModelSpec, ModelSpec.preset(DEFAULT_PRESET).to_dict()))
    add_options(command.add_argument_group("the plan"), _options_of(Plan, Plan().to_dict()))


def model_of(given: argparse.Namespace) -> ModelSpec:
    """The preset as the given options change it. Raises ``ValueError`` if that is illegal."""
    return ModelSpec.preset(given.preset).replace(**_given_fields(ModelSpec, given))


def plan_of(given: argparse.Namespace) -> Plan:
    """The plan of the options that were given. Raises ``ValueError`` if that is illegal."""
    return Plan(**_given_fields(Plan, given))


def settings_of(given: argparse.Namespace, *names: str) -> dict[str, Any]:
    """{name: value} of those of the options ``names`` that were given."""
    return {name: getattr(given, name) for name in names if name in given}


def _given_fields(kind: type, given: argparse.Namespace) -> dict[str, Any]:
    return settings_of(given, *(field.name for field in dataclasses.fields(kind)))
