"""A shell's options, read off the descriptions, and what was typed as a model and a plan again.

Every field of ``ModelSpec`` and ``Plan`` is an option of the same name: a field that a later
version adds is reachable the day it exists. Values are handed on as typed: what is legal is said by
the descriptions alone.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from paralab.checks import number, size
from paralab.spec import MODEL_PRESETS, ModelSpec, Plan

DEFAULT_PRESET = "laptop"
CODE = ("block", "passes")  # fields that take code of one's own, which a shell cannot write

HELP = {
    # ModelSpec
    "layers": "transformer blocks",
    "hidden": "width of the residual stream",
    "heads": "attention heads; must divide hidden",
    "seq_len": "tokens per sample",
    "vocab": "entries of the embedding; bytes of text need 256",
    "tied": "share one weight between token embedding and output head",
    "dropout": "probability of dropping an activation, from 0 to below 1",
    "attention": "explicit (writes the score matrix) or sdpa (torch's fused kernel); by default "
    "sdpa on GPUs and explicit on processors",
    # Plan
    "dp": "data-parallel degree: copies of the model, each on its share of the batch",
    "tp": "tensor-parallel degree",
    "pp": "pipeline-parallel degree",
    "schedule": "order of a pipeline's work: naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2; "
    "l2l: one rank's relay of offloaded layers",
    "microbatches": "micro-batches per step on every data-parallel rank",
    "microbatch_size": "samples per micro-batch",
    "virtual_stages": "model chunks per pipeline rank",
    "zero_stage": "what data-parallel ranks shard: 0 nothing, 1 optimizer, 2 + gradients, 3 + all",
    "shard": "data-parallel ranks that share one copy of the states; the others hold replicas",
    "secondary_shard": "neighbouring ranks that share a second copy, gathered in backward (hpZ)",
    "sequence_parallel": "split the activations between tensor-parallel regions too",
    "recompute": "activations computed again in backward: none, selective (attention), full",
    "offload": "cpu or nvme: where the states that zero_stage shards are kept",
    "precision": "fp32, bf16 or fp16",
    "tf32": "on GPUs: multiply fp32 operands rounded to tf32",
    "grad_dtype": "fp32: gradients of 16 bits are added up in fp32; fp32-copy: they are copied to "
    "fp32 for the update",
    "tp_mode": "how a layer is cut: 1d, 2d (q x q ranks), 2.5d (d of these), 3d (q x q x q)",
    "tp_overlap": "tensor parallelism's backward computes while its messages move",
    "tp_depth": "d of 2.5d; by default the largest up to q",
    "partition_activations": "with recompute full: tensor-parallel ranks share what a block keeps",
    "grad_sync": "naive (one call per parameter), bucketed, or overlapped with backward",
    "bucket_bytes": "size at which a gradient bucket is closed: 4194304, 4MiB (2^20) or 4MB (10^6)",
    "prefetch": "units gathered ahead of their use",
}


def comma_separated(text: str) -> list[str]:
    """A list written with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


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
    """One option per field of the dataclass ``kind``."""
    for field in dataclasses.fields(kind):
        if field.name in CODE:
            continue
        value = defaults[field.name]
        default = "" if value is None or value == () else f" (default {value})"
        reader = size if field.name.endswith("_bytes") else READERS.get(str(field.type), str)
        yield Option(field.name, reader, HELP.get(field.name, f"see {kind.__name__}") + default)


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
    """The fields of ``kind`` that the command line names."""
    return settings_of(given, *(field.name for field in dataclasses.fields(kind)))
