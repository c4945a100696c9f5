"""Reports as files: JSON without pickle, sealed by a checksum, written whole or not at all.

    {"format": "paralab report", "version": 2, "sha256": "...", "body": {...}}

Numbers keep every bit (JSON prints the shortest decimal that reads back as the same float). A file
whose content has changed since it was written is refused: a clear error is worth more than a wrong
number. A run over several machines writes one part per rank into a folder; `pl.load` merges them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from paralab import checks
from paralab.instruments.calibrate import memory_bytes
from paralab.report import facts, output_files, tables
from paralab.report.merge import CLOCK_OFFSET
from paralab.report.plain import plain, typed
from paralab.report.tables import Tables
from paralab.spec import Cluster, ModelSpec, Plan

AnyReport = TypeVar("AnyReport", bound=Tables)
VERSION = 2
REPORT, PART = "paralab report", "paralab rank part"
# Facts of meta that reports are asked for: a type, [of each] or {key: of its value}.
_PARAMETER = {"name": str, "elements": int, "held": int, "bytes": int, "trained": bool}
_PROGRAM = {"modules": [str], "parameters": [_PARAMETER | {"cut": dict}]}
_FLIGHT = ("communication", "communication hidden", "copies", "copies hidden")
_FACTS = {"nodes": [int], "cores": int, "one_machine": bool, "skipped_steps": int, "compute": float}
_FACTS |= {"num_params": int, "memory_limit": int, "optimizer": str, "observed": [_PROGRAM]}
_FACTS |= {"clock_offsets": {"uncertainty_s": [float]}, "in flight": dict.fromkeys(_FLIGHT, float)}
# All that reading a report from arbitrary JSON may raise; `read` turns each into a ValueError.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def save(report: Tables, path: str | os.PathLike[str]) -> None:
    """Write the report as JSON, gzipped if ``path`` ends in .gz; ``pl.load`` reads it back.

    Weights and gradients are left out: a checkpoint, `pl.run(..., save=folder)`, has the weights.
    """
    cluster = None if report.cluster is None else plain(report.cluster.to_dict(), "cluster")
    body = {"clock": report.clock, "cluster": cluster, **_body(vars(report))}
    write(path, body, REPORT)


def load_report(path: Path, kind: type[AnyReport]) -> AnyReport:
    """The saved report, as an instance of ``kind``."""
    return read(path, REPORT, lambda body: _checked(kind(**_report(body))))


def check_part(folder: str | os.PathLike[str]) -> None:
    """Raise ``ValueError``, before a training, if a rank's part cannot be written there."""
    output_files.check_folder("out", folder, "a new folder, or one of parts")


def save_part(
    folder: str | os.PathLike[str],
    part: Mapping[str, Any],
    *,
    model: ModelSpec | None,
    plan: Plan,
    meta: Mapping[str, Any],
) -> None:
    """Write one rank's part as ``folder``/rank-00003.json; makes the folder if there is none.

    ``meta["run_id"]`` must be the same on all ranks of a run, and differ between runs.
    """
    losses = [list(map(float, step)) for step in part["losses"]]
    about = {"model": model, "plan": plan, "meta": meta, "losses": losses}
    body = {
        "rank": int(part["rank"]),
        **{name: float(part[name]) for name in CLOCK_OFFSET},
        **_body({**part, **about}),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    write(Path(folder) / f"rank-{body['rank']:05d}.json", body, PART)


def load_folder(folder: Path, merged: Callable[..., AnyReport]) -> AnyReport:
    """One report from the parts of all ranks of a run. ``merged`` is `Report.from_parts`."""
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        raise FileNotFoundError(
            f"{folder}: it has no rank-00000.json, rank-00001.json, ...; "
            "give the folder that the ranks wrote to, or a saved report"
        )
    parts = [read(path, PART, _part) for path in paths]
    first = min(parts, key=lambda part: part["rank"])
    try:
        return _checked(merged(parts, **{name: first[name] for name in ("model", "plan", "meta")}))
    except _MALFORMED as error:
        raise ValueError(f"{folder}: {error}") from None


# ---- the envelope -------------------------------------------------------------------------------
def write(path: str | os.PathLike[str], body: dict[str, Any], kind: str) -> None:
    """Write the body, sealed, as JSON."""
    sealed = {"format": kind, "version": VERSION, "sha256": seal(body), "body": body}
    output_files.write(path, json.dumps(sealed, allow_nan=False).encode())


def seal(body: Mapping[str, Any]) -> str:
    """The SHA-256 of a body's canonical JSON: neither spacing nor the order of keys counts."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def read(path: Path, kind: str, build: Callable[[dict[str, Any]], Any]) -> Any:
    """Check the file's envelope and return ``build(body)``.

    Raises ``FileNotFoundError``, or ``ValueError`` saying what is wrong with the file.
    """
    again = "save the report again, or load another copy"
    path = checks.path("path", path, "a report that report.save wrote")
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":  # by content, not by name: people rename files
            room = memory_bytes() // 4  # parsed, JSON takes more than four times its bytes
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(room + 1)
            if len(data) > room:
                raise ValueError(f"unpacked it is larger than {room:,} bytes, a quarter of memory")
        envelope = json.loads(data.decode())
    except (ValueError, EOFError, OSError, zlib.error, RecursionError) as error:
        why = f"damaged or not a report ({error})"
        raise ValueError(f"{path}: the file is {why}; {again}") from None
    if not isinstance(envelope, dict) or envelope.get("format") != kind:
        legal = "what report.save wrote, or the folder with the parts of all ranks"
        raise ValueError(f"{path}: the file is not a {kind}; legal: {legal}")
    version = envelope.get("version")
    if version != VERSION:
        raise ValueError(
            f"{path}: its format version is {version!r}, and this paralab reads {VERSION} only; "
            "update paralab if a newer version of it wrote the file"
        )
    try:
        if envelope.get("sha256") != seal(body := typed(envelope, "body", dict)):
            raise ValueError("its content does not match its checksum")
        return build(body)
    except _MALFORMED as error:
        raise ValueError(f"{path}: the file is damaged ({error}); {again}") from None


# ---- the body -----------------------------------------------------------------------------------
def _body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a report and a rank's part have in common, as plain JSON values."""
    model = fields["model"]
    return {
        "model": None if model is None else plain(model.to_dict(), "model"),
        "plan": plain(fields["plan"].to_dict(), "plan"),
        "meta": _encode(plain(dict(fields["meta"]), "meta")),
        "losses": _encode(fields["losses"]),
        "tables": {name: tables.columns_of(name, fields[name]) for name in tables.COLUMNS},
    }


def _fields(body: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_body`."""
    model, columns = typed(body, "model", (dict, type(None))), typed(body, "tables", dict)
    return {
        "model": None if model is None else ModelSpec.from_dict(model),
        "plan": Plan.from_dict(typed(body, "plan", dict)),
        "meta": _decode(typed(body, "meta", dict)),
        "losses": _decode(typed(body, "losses", list)),
        **{name: tables.columns_of(name, typed(columns, name, dict)) for name in tables.COLUMNS},
    }


def _report(body: dict[str, Any]) -> dict[str, Any]:
    cluster = typed(body, "cluster", (dict, type(None)))
    cluster = None if cluster is None else Cluster.from_dict(cluster)
    return {"clock": typed(body, "clock", str), "cluster": cluster, **_fields(body)}


def _part(body: dict[str, Any]) -> dict[str, Any]:
    fields, rank = _fields(body), typed(body, "rank", int)
    offsets = {name: typed(body, name, float) for name in CLOCK_OFFSET}
    return {"rank": rank, "run_id": fields["meta"].get("run_id"), **offsets, **fields}


def _checked(report: AnyReport) -> AnyReport:
    """The report. Raises ValueError, which names it, if a fact of its meta is not of its kind."""
    needed = {"in flight": None} if facts.in_outline(report) else {}
    for name, value in (needed | dict(report.meta)).items():
        known = name in _FACTS and (name, value) != ("memory_limit", None)
        ranks = len(value) if name == "observed" and isinstance(value, list) else report.world_size
        if known and not (_is(_FACTS[name], value) and ranks == report.world_size):
            raise ValueError(f"meta[{name!r}] is {checks.shown(value)}, which no report has there")
    return report


def _is(kind: Any, value: Any) -> bool:
    """Whether a fact, and all that is in it, is of this kind."""
    if isinstance(kind, dict) and isinstance(value, dict):
        return all(_is(each, value.get(name)) for name, each in kind.items())
    if isinstance(kind, list) and isinstance(value, list):
        return all(_is(kind[0], each) for each in value)
    if kind is dict and isinstance(value, dict):  # {axis: ranks}
        return _is([int], [*value.values()])
    if kind in (int, float):
        return type(value) in (int, kind) and abs(value) < 2**63
    return type(value) is kind


def _encode(value: Any) -> Any:
    """Replace NaN and infinities, which a diverged run has and for which JSON has no form."""
    return json.loads(json.dumps(value), parse_constant=lambda name: {"$float": repr(float(name))})


def _decode(value: Any) -> Any:
    """The inverse of `_encode`."""

    def number(found: dict[str, Any]) -> Any:
        return float(found["$float"]) if list(found) == ["$float"] else found

    return json.loads(json.dumps(value), object_hook=number)
