"""`paralab doctor`: what this machine can do, and which labs run here, in sentences.

`examine` collects the facts, `diagnose` says what they mean for a learner. A *problem* keeps all
labs from running, and makes the exit status 1. Nothing is changed on the machine, no ranks are
started, and links are measured only with ``--calibrate``. torch is imported in another process, so
that this one stays light and survives a torch that hangs or crashes at import. A fact that cannot
be found out is None.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from paralab.checks import count_of, illegal
from paralab.instruments import calibrate, processors, witness
from paralab.launch import MAX_RANKS
from paralab.ranks.server import start_method
from paralab.spec.cluster import available_cores, control_groups
from paralab.version import __version__
from paralab.view.theme import in_bytes, in_seconds, in_speed, scaled

Machine = SimpleNamespace  # the facts that `examine` returns
GB, MB = 10**9, 10**6
# Bytes of JupyterLab (server and kernel) and of a rank, measured after training.
BASE_MEMORY, RANK_MEMORY = 500 * MB, 70 * MB
SCRATCH = 300 * MB  # for temporary files: notes between ranks, saved runs, lab 09's 200 MB
SHARED = GB  # for /dev/shm, through which NCCL's ranks communicate: NVIDIA's advice for containers
TORCH_TIMEOUT = 120.0  # seconds: a first import from a cold disk is slow
# {package: the oldest version that will do}, as pyproject.toml has them
OLDEST = {"numpy": "2.0", "pandas": "2.2.2", "plotly": "7.0", "anywidget": "0.11", "tqdm": "4.67"}
OLDEST |= {"ipywidgets": "8.1", "jupyterlab": "4.6", "cloudpickle": "3.1", "safetensors": "0.4.3"}
OLDEST_TORCH = "2.11"
# {the most ranks that a lab starts at once: these labs}
LABS = {
    1: ("00", "09"),
    2: ("11",),
    4: ("01", "03", "04", "05", "06", "07"),
    8: ("02", "10", "12"),
    16: ("08",),
}


# ---- the facts ----------------------------------------------------------------------------------
def examine(device: str) -> Machine:
    """The facts about this machine; sizes are in bytes. device: whose links to report."""
    temp, temp_free = temp_folder()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: calibrate.version_of(name) for name in OLDEST},
        cores=available_cores(),
        memory=calibrate.memory_bytes(),  # of the machine, or of the container
        free_memory=free_memory(),
        torch=ask_torch(),
        device=device,
        links=calibrated(device),
        shared=room_in("/dev/shm"),
        temp=temp,
        temp_free=temp_free,
        forkserver=start_method() == "fork",
        byte_counter=witness.counts(),
        load_shown=processors.spent()[0] > 0,  # the system says how busy other programs are
    )


# Runs in a process of its own; its last line of output is the answer.
_PROBE = """
import json
import torch, torch.distributed as dist
gpus = []
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(i)
        gpus.append({"name": found.name, "memory": found.total_memory})
backends = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus,
                  "backends": backends}))
"""


def ask_torch() -> dict[str, Any]:
    """torch's version, its CUDA's version, gpus ("name" and "memory" of each) and backends; error:
    why these are unknown, or None.
    """
    unknown = {"version": None, "cuda": None, "gpus": [], "backends": []}
    try:
        command = [sys.executable, "-c", _PROBE]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT)
    except subprocess.TimeoutExpired:
        return unknown | {"error": f"its import took more than {TORCH_TIMEOUT:g} s"}
    if ran.returncode == 0:
        return json.loads(ran.stdout.splitlines()[-1]) | {"error": None}
    if ran.returncode < 0:
        return unknown | {"error": f"its process ended with signal {-ran.returncode}"}
    return unknown | {"error": ran.stderr.strip().split("\n")[-1]}


def calibrated(device: str) -> str | None:
    """The cached calibration in words: the speed of a core or GPU, and of an all-reduce between
    ranks. None if there is none.
    """
    known = calibrate.known(device)
    if known is None:
        return None
    cluster = known["cluster"]
    link = cluster["collectives"].get("all_reduce") or cluster["intra"]
    summary = (
        f"measured {known['made'][:10]}: {scaled(cluster['flops'], 'FLOP/s')} on a "
        f"{'GPU' if device == 'cuda' else 'core'}; between ranks a latency of "
        f"{in_seconds(link['alpha'])} and {in_speed(link['bandwidth'])}"
    )
    if known.get("busy", 0.0) > calibrate.BUSY:
        summary += "; other programs were busy then, so it is measured again when they are not"
    if calibrate.cache_path(device) in calibrate.unwritten:
        summary += "; it could not be kept: set PARALAB_CACHE_DIR to a writable folder"
    if found := known.get("inter"):
        link, made = found["link"], found["made"][:10]
        summary += f"; on the slowest link between {found['nodes']} nodes (measured {made}) a "
        summary += f"latency of {in_seconds(link['alpha'])} and {in_speed(link['bandwidth'])}"
    return summary


def free_memory() -> int | None:
    """Bytes that a new process could use, in the machine or, if that is less, in its groups."""
    limits = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(1024 * int(lines["MemAvailable"].split()[0]))
    for most, now, stat in control_groups(calibrate.CONTAINERS):
        with contextlib.suppress(ValueError):  # "max" is no number
            parts = dict(line.split() for line in stat.splitlines())
            idle = parts.get("total_inactive_file", parts.get("inactive_file", 0))  # can be dropped
            limits.append(max(0, int(most) - int(now) + int(idle)))
    memory = calibrate.memory_bytes()  # a group that leaves more has no limit
    return min((free for free in limits if free <= memory), default=None)


def temp_folder() -> tuple[str | None, int | None]:
    """The folder for temporary files, and the free bytes there; None if none can be written to."""
    with contextlib.suppress(OSError):
        return (folder := tempfile.gettempdir()), room_in(folder)
    return None, None


def need_room() -> None:
    """Raise ValueError if temporary files have too little room: then right answers fail."""
    folder, free = temp_folder()
    if (free or 0) < SCRATCH:
        why = f"it has {in_bytes(free or 0)} free, and without room right answers fail"
        raise illegal("TMPDIR", folder, why, f"a folder with {in_bytes(SCRATCH)} free")


def room_in(folder: str) -> int | None:
    """Free bytes on the disk of ``folder``; None if it is no folder."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


# ---- the diagnosis ------------------------------------------------------------------------------
class Check(NamedTuple):
    """finding: a fact and what it means; remedy: what helps, if it keeps labs from running."""

    name: str
    finding: str
    remedy: str = ""


class Diagnosis(NamedTuple):
    """labs: those that run on this machine; problems: each with its remedy, if no lab runs."""

    machine: Machine
    checks: list[Check]
    labs: list[str]
    problems: list[str]

    def text(self) -> str:
        """Everything, for a terminal."""
        width = max(len(check.name) for check in self.checks)
        rows = [f"paralab {__version__} on {self.machine.system}", ""]
        rows += [f"  {check.name:<{width}}  {check.finding}" for check in self.checks]
        room = _room(self.machine)
        more = [
            f"{', '.join(labs)} ({ranks} ranks)" for ranks, labs in LABS.items() if ranks > room
        ]
        end = ["All labs run here. Open them with: make lab"]
        if self.problems:
            end = ["What has to be fixed first:", *(f"  - {problem}" for problem in self.problems)]
        elif more:
            end = [
                f"Labs that run here: {', '.join(self.labs)}. Open them with: make lab",
                f"Memory has room for {count_of(room, 'rank')} at once. Labs that start more: "
                f"{'; '.join(more)}.",
            ]
        return "\n".join([*rows, "", *end])


def diagnose(machine: Machine) -> Diagnosis:
    """What the facts mean for the labs."""
    checks = list(_checks(machine))
    problems = [
        f"{check.name}: {check.finding}; {check.remedy}" for check in checks if check.remedy
    ]
    room = 0 if problems else _room(machine)
    labs = [lab for ranks, names in LABS.items() if ranks <= room for lab in names]
    return Diagnosis(machine, checks, sorted(labs), problems)


def _checks(machine: Machine) -> Iterator[Check]:
    many = "enough for one per rank in every lab"
    few = "more ranks than cores take turns, so trust the replayed clock, not the wall clock"
    cores = count_of(machine.cores, "core")
    yield Check("cores", f"{cores}: {few if machine.cores < max(LABS) else many}")

    room, free = _room(machine), "this system does not show how much of it is free"
    if machine.free_memory is not None:
        free = f"{in_bytes(machine.free_memory)} free"
    finding = f"{in_bytes(machine.memory)}, {free}: room for {count_of(room, 'rank')}"
    least = in_bytes(BASE_MEMORY + RANK_MEMORY)
    remedy = f"close other programs: one rank and JupyterLab take {least}" * (room < 1)
    yield Check("memory", finding, remedy)

    yield Check("torch", *_torch(machine))
    yield Check("GPUs", _gpus(machine))
    none = "not measured yet; to measure (ten to fifteen seconds): paralab doctor --calibrate"
    gpus = "not measured yet; to measure: paralab doctor --calibrate --device cuda"
    if machine.device == "cuda":
        none = gpus if machine.torch["gpus"] else "no GPU to measure"
    unseen = "this system does not show how busy other programs are, so measure when they are idle"
    yield Check("links", (machine.links or none) + f"; {unseen}" * (not machine.load_shown))

    finding = "there is none that can be written to"
    remedy = "ranks meet in files there: set TMPDIR"
    if machine.temp_free is not None:
        finding = f"{machine.temp}, {in_bytes(machine.temp_free)} free"
        remedy = f"make room for {in_bytes(SCRATCH)}, or set TMPDIR" * (machine.temp_free < SCRATCH)
    yield Check("temp folder", finding, remedy)

    warm = "forked from a warm server, so a launch takes a tenth of a second"
    cold = "started one by one rather than forked, so a launch takes some seconds"
    yield Check("ranks", warm if machine.forkserver else cold)
    lacks = "this kernel shows none; one experiment of lab 01 needs it, the rest of the lab runs"
    yield Check("byte counter", "the kernel shows one" if machine.byte_counter else lacks)

    yield Check("Python", machine.python)
    found, wanted = [], []
    for name, version in machine.packages.items():
        old = version is None or _numbers(version) < _numbers(OLDEST[name])
        found.append(f"{name} {version or 'missing'}{' (too old)' * bool(version and old)}")
        wanted += [f"'{name}>={OLDEST[name]}'"] * old
    remedy = f"{sys.executable} -m pip install {' '.join(wanted)}"
    yield Check("packages", ", ".join(found), remedy * bool(wanted))


def _numbers(version: str) -> list[int]:
    """Of 2.13.0+cpu [2, 13, 0]."""
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3]]


def _torch(machine: Machine) -> tuple[str, str]:
    """(finding, remedy) for torch."""
    error, backends = machine.torch["error"], machine.torch["backends"]
    install = f"{sys.executable} -m pip install --force-reinstall 'torch>={OLDEST_TORCH}'"
    install += " (without a GPU: --index-url https://download.pytorch.org/whl/cpu)"
    if error is not None:
        return f"cannot be imported: {error}", install
    if _numbers(machine.torch["version"]) < _numbers(OLDEST_TORCH):
        return f"{machine.torch['version']} (too old)", install
    remedy = "ranks on CPUs communicate over gloo: install torch from pytorch.org"
    finding = f"{machine.torch['version']} with {' and '.join(backends) or 'no backend'}"
    return finding, remedy * ("gloo" not in backends)


def _gpus(machine: Machine) -> str:
    if machine.torch["error"] is not None:
        return "unknown, as torch cannot be imported"
    gpus, shared = machine.torch["gpus"], machine.shared or 0
    if not gpus:
        why = " (this torch is built without CUDA)" if machine.torch["cuda"] is None else ""
        return f"torch sees none{why}; only the paragraphs “On your GPUs” of the labs need one"
    finding = ", ".join(f"{gpu['name']} with {in_bytes(gpu['memory'])}" for gpu in gpus)
    little = f"; /dev/shm has {in_bytes(shared)}, too little for NCCL: give it {in_bytes(SHARED)}"
    return f"{len(gpus)}: {finding}" + little * (len(gpus) > 1 and shared < SHARED)


def _room(machine: Machine) -> int:
    """The number of ranks that fit into free memory next to a notebook."""
    free = machine.memory if machine.free_memory is None else machine.free_memory
    return max(0, min(MAX_RANKS, (free - BASE_MEMORY) // RANK_MEMORY))
