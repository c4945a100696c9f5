"""`paralab doctor`: what this machine can do, and which labs run here, in sentences.

observe/machine.py finds the facts out; this says what they mean for a learner. A *problem* keeps
labs from running, and makes the exit status 1; a *remark* is good to know. Nothing is changed on
the machine: even the links are measured only with ``--calibrate``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any, NamedTuple

from paralab.instruments.calibrate import BUSY
from paralab.instruments.machine import Folder, Machine, examine
from paralab.launch import MAX_RANKS
from paralab.spec import Cluster
from paralab.version import __version__

GB, GIB, MB = 10**9, 2**30, 10**6
OLDEST_PYTHON = (3, 11)
# Measured under JupyterLab after training: server and kernel, and each rank.
BASE_MEMORY, RANK_MEMORY = 500 * MB, 70 * MB
SCRATCH = 300 * MB  # of temporary files: notes between ranks, saved runs, offloaded states
NEEDED_FILES = 256  # open at once: pipes and sockets between the ranks of a lab, and some room


def add_command(commands: Any) -> None:
    """Add `paralab doctor` to the shell's commands."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine can do, and which labs run here",
        allow_abbrev=False,
        description="Exit status 0 if labs run here, 1 with the reason if none does.",
    )
    parser.add_argument("--json", action="store_true", help="the same for programs")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine's speed and links first: some fifteen seconds",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="whose speed and links: cpu, the processors' (default), or cuda, the GPUs'",
    )
    parser.set_defaults(act=_command, parser=parser)


def _command(given: argparse.Namespace) -> int:
    if given.calibrate:
        print("measuring this machine …", file=sys.stderr, flush=True)
        try:
            Cluster.local(device=given.device, refresh=True)
        except ValueError as error:  # there is no GPU
            given.parser.error(str(error))
    found = diagnose(examine(device=given.device))
    print(json.dumps(found.to_dict(), indent=2) if given.json else found.text())
    return 0 if found.runs else 1


class Lab(NamedTuple):
    """ranks: the most that it starts at once; files: bytes that it writes to temporary files."""

    name: str
    title: str
    ranks: int
    files: int = 0


LABS = (
    Lab("00", "Why one device is not enough", 1),
    Lab("01", "Collectives", 4),
    Lab("02", "Data parallelism", 8),
    Lab("03", "Pipelines", 4),
    Lab("04", "Write your own schedule", 4),
    Lab("05", "ZeRO", 4),
    Lab("06", "Where the memory goes", 4),
    Lab("07", "Tensor parallelism", 4),
    Lab("08", "Grids", 16),
    Lab("09", "Offload", 1, files=200 * MB),
    Lab("10", "Composing", 8),
    Lab("11", "A trillion parameters", 8),
)


class Diagnosis(NamedTuple):
    """lines: (what, sentence); labs: (lab, whether it runs, sentence); problems end in exit 1."""

    machine: Machine
    lines: list[tuple[str, str]]
    labs: list[tuple[Lab, bool, str]]
    problems: list[str]

    @property
    def runs(self) -> bool:
        return not self.problems and any(ok for _, ok, _ in self.labs)

    def text(self) -> str:
        """Everything, for a terminal."""
        width = max(len(what) for what, _ in self.lines)
        rows = [
            f"paralab {__version__} on {self.machine.system}, Python {self.machine.python}",
            "",
        ]
        rows += [f"  {what:<{width}}  {said}" for what, said in self.lines]
        rows += [
            "",
            "labs (up to a minute each; more where many ranks share few cores)",
        ]
        title = max(len(lab.title) for lab, _, _ in self.labs)
        for lab, _, said in self.labs:
            ranks = f"{lab.ranks} rank{'s' * (lab.ranks > 1)}"
            rows.append(f"  {lab.name} {lab.title:<{title}}  {ranks:<9} {said}")
        rows.append("")
        if self.problems:
            rows += ["What has to be mended first:", *(f"  - {said}" for said in self.problems)]
        elif all(ok for _, ok, _ in self.labs):
            rows.append("All labs run here. Open them with: make lab")
        else:
            rows.append("The labs that say so run here as they are. Open them with: make lab")
        return "\n".join(rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: facts, what they mean, labs, problems."""
        return {
            "machine": dataclasses.asdict(self.machine),
            "says": dict(self.lines),
            "labs": [{**lab._asdict(), "runs": ok, "says": said} for lab, ok, said in self.labs],
            "problems": self.problems,
            "runs": self.runs,
        }


def diagnose(machine: Machine) -> Diagnosis:
    """What the facts mean."""
    problems = _problems(machine)
    lines = [
        ("cores", _cores(machine)),
        ("memory", _memory(machine)),
        ("GPUs", _gpus(machine)),
        ("links", _links(machine)),
        ("backends", ", ".join(machine.torch.backends) or "none: torch has to be mended first"),
        ("open files", _open_files(machine)),
        ("/dev/shm", "none" if machine.shm is None else _room(machine.shm)),
        ("temp folder", _temp(machine.temp)),
        (
            "ranks",
            "from a warm server: a launch takes a tenth of a second"
            if machine.forkserver
            else "started one by one, some seconds per launch: this system cannot fork them",
        ),
        ("byte counter", _counter(machine)),
        (
            "browser",
            machine.browser
            or "no chromium or Chrome: only `make labs` and the browser "
            "tests need one of their own",
        ),
        (
            "software",
            ", ".join(
                f"{name} {version or 'missing'}" for name, version in machine.versions.items()
            ),
        ),
    ]
    labs = [(lab, *_verdict(lab, machine, problems)) for lab in LABS]
    return Diagnosis(machine, lines, labs, problems)


# ---- what keeps labs from running ---------------------------------------------------------------
def _problems(machine: Machine) -> list[str]:
    found = []
    version = tuple(int(part) for part in machine.python.split(".")[:2])
    if version < OLDEST_PYTHON:
        found.append(f"Python {machine.python} is too old: 3.11 or newer is needed")
    missing = [name for name, at in machine.versions.items() if at is None and name != "torch"]
    if missing:
        found.append(
            f"missing: {', '.join(missing)}; {sys.executable} -m pip install {' '.join(missing)}"
        )
    torch = machine.torch
    if torch.error is not None and machine.versions.get("torch") is None:
        found.append(
            f"torch is not installed: {sys.executable} -m pip install torch (without a "
            "GPU: --index-url https://download.pytorch.org/whl/cpu)"
        )
    elif torch.error is not None:
        found.append(f"torch is installed and cannot be imported: {torch.error}")
    elif "gloo" not in torch.backends:
        found.append(
            "this torch was built without gloo, over which ranks on CPUs talk: install "
            "one from pytorch.org"
        )
    if _room_for_ranks(machine) < 1:
        free, one = _size(machine.free_memory), _size(BASE_MEMORY + RANK_MEMORY)
        found.append(
            f"{free} of memory are free, and one rank beside JupyterLab takes {one}: "
            "close something"
        )
    if machine.temp is None or not machine.temp.writable:
        found.append(
            "there is no folder for temporary files that can be written to, and ranks "
            "meet in one: set TMPDIR"
        )
    elif machine.temp.free < SCRATCH // 10:
        found.append(
            f"{machine.temp.path} has {_size(machine.temp.free)} left, and ranks meet in "
            "files there: make room, or set TMPDIR to another folder"
        )
    if machine.open_files is not None and 0 <= machine.open_files[0] < NEEDED_FILES // 4:
        found.append(
            f"a process may open {machine.open_files[0]} files, and ranks need more: "
            f"ulimit -n {NEEDED_FILES}"
        )
    return found


def _room_for_ranks(machine: Machine) -> int:
    """Ranks that free memory has room for, beside a notebook."""
    free = machine.memory if machine.free_memory is None else machine.free_memory
    return max(0, min(MAX_RANKS, (free - BASE_MEMORY) // RANK_MEMORY))


def _verdict(lab: Lab, machine: Machine, problems: list[str]) -> tuple[bool, str]:
    """(whether the lab runs as it is, in words)."""
    if problems:
        return False, "not yet"
    room = _room_for_ranks(machine)
    if room < lab.ranks:
        return False, f"with {room} ranks instead: memory has no room for {lab.ranks}"
    if lab.files and machine.temp is not None and machine.temp.free < lab.files:
        return False, (
            f"not yet: it writes {_size(lab.files)} to {machine.temp.path}, which has "
            f"{_size(machine.temp.free)}"
        )
    gpus = len(machine.torch.gpus)
    said = "runs here as it is"
    if lab.ranks > _cores_at_once(machine) and not gpus:
        said += f", ranks taking turns on {_count(int(_cores_at_once(machine)), 'core')}"
    if 0 < gpus < lab.ranks:
        shared = _count(gpus, "GPU")
        return True, f"{said}, ranks sharing {shared} over gloo; NCCL needs a GPU for each"
    return True, f"{said}, on {_count(lab.ranks, 'GPU')}" if gpus else said


# ---- sentences ----------------------------------------------------------------------------------
def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _size(size: int | None) -> str:
    """Bytes for a reader: 512 MB, 7.4 GB."""
    if size is None:
        return "an unknown number of bytes"
    return f"{size / GB:.1f} GB" if size >= GB else f"{max(0, size) // MB} MB"


def _cores_at_once(machine: Machine) -> float:
    """Cores that compute at the same time."""
    return max(1, min(machine.cores, machine.processor_time or machine.cores))


def _cores(machine: Machine) -> str:
    said = _count(machine.cores, "core")
    if machine.processor_time is not None and machine.processor_time < machine.cores:
        said += f", of which this container may use {machine.processor_time:g} at once"
    if _cores_at_once(machine) >= max(lab.ranks for lab in LABS):
        return said + ": every rank of every lab has one"
    return said + ": more ranks take turns, so look at the replayed clock, not at the wall's"


def _memory(machine: Machine) -> str:
    free = "" if machine.free_memory is None else f", {_size(machine.free_memory)} free"
    return f"{_size(machine.memory)}{free}: room for {_room_for_ranks(machine)} ranks"


def _gpus(machine: Machine) -> str:
    found = machine.torch.gpus
    if machine.torch.error is not None:
        return "unknown: torch could not be asked"
    if not found:
        why = " (this torch is built without CUDA)" if machine.torch.cuda is None else ""
        return f"none that torch sees{why}; only a lab's «On your GPUs» needs one"
    names = ", ".join(f"{gpu['name']} with {_size(gpu['memory'])}" for gpu in found)
    return f"{len(found)}: {names}"


def _links(machine: Machine) -> str:
    at = machine.links
    if at is None:
        return (
            "not measured yet: paralab doctor --calibrate takes some fifteen seconds; else the "
            "first prediction does it"
        )
    again = "; other programs were busy, so it is measured again once they are not" * at["busy"]
    if at["stolen"] > BUSY and not again:
        again = (
            f"; meanwhile {100 * at['stolen']:.0f} % of its time went to other machines on "
            "the same hardware, so links look slow; --calibrate in a quieter hour"
        )
    link = f"{1e3 * at['alpha']:.2g} ms and {at['bandwidth'] / 1e9:.2g} GB/s"
    return (
        f"measured {at['made'][:10]}: {at['flops'] / 1e9:.0f} GFLOP/s on a {at['on']}, between "
        f"ranks {link}{again}"
    )


def _open_files(machine: Machine) -> str:
    if machine.open_files is None:
        return "not known on this system"
    soft, hard = machine.open_files
    unlimited = "no limit"
    said = unlimited if soft < 0 else str(soft)
    if 0 <= soft < NEEDED_FILES:
        most = unlimited if hard < 0 else str(hard)
        said += f": few; ulimit -n {NEEDED_FILES} (at most: {most})"
    return said


def _room(place: Folder) -> str:
    kind = f", {place.kind}" if place.kind else ""
    return f"{_size(place.free)} of {_size(place.total)} free{kind}"


def _temp(place: Folder | None) -> str:
    if place is None or not place.writable:
        return "none that can be written to"
    said = f"{place.path}: {_room(place)}"
    if place.kind in ("tmpfs", "ramfs"):
        return said + ": that is memory, so lab 09's files are on no disk unless TMPDIR is"
    if place.direct:
        return said + "; files go past the page cache"
    return said + "; without O_DIRECT, so the page cache makes files look fast"


def _counter(machine: Machine) -> str:
    if not machine.loopback_counter:
        return "none that the kernel shows: lab 01's witness is Linux's, its other cells run"
    if machine.private_network:
        return "the kernel's, in a network of one's own where tests ask for it"
    return "the kernel's, shared with other programs: no network of one's own is allowed here"
