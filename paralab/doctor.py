"""`paralab doctor`: what this machine can do, and which labs run here, in sentences.

`examine` finds the facts out, `diagnose` says what they mean for a learner. A *problem* keeps labs
from running, and makes the exit status 1; a *remark* is good to know. Nothing is changed on the
machine, no ranks are started, and even the links are measured only with ``--calibrate``. torch is
asked in a process of its own: this one stays light, and a torch that hangs or crashes at import is
an answer, not the end. A fact that cannot be found out is None.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from paralab.instruments import calibrate, processors, witness
from paralab.launch import MAX_RANKS
from paralab.ranks.server import start_method
from paralab.spec import Cluster
from paralab.spec.cluster import available_cores
from paralab.version import __version__

Machine = SimpleNamespace  # what `examine` found
GB, MB = 10**9, 10**6
OLDEST_PYTHON = (3, 11)
# Measured under JupyterLab after training: server and kernel, and each rank.
BASE_MEMORY, RANK_MEMORY = 500 * MB, 70 * MB
SCRATCH = 300 * MB  # of temporary files: notes between ranks, saved runs, offloaded states
NEEDED_FILES = 256  # open at once: pipes and sockets between the ranks of a lab, and some room
TORCH_TIMEOUT = 120.0  # seconds: a first import from a cold disk is slow
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PACKAGES = ("torch", "numpy", "pandas", "plotly", "anywidget", "ipywidgets", "jupyterlab")
PACKAGES += ("cloudpickle", "safetensors", "tqdm")


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
    Lab("11", "What a training costs", 1),
    Lab("12", "A trillion parameters", 8),
)


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


# ---- the facts ----------------------------------------------------------------------------------
def examine(*, device: str = "cpu", timeout: float = TORCH_TIMEOUT) -> Machine:
    """Ask the system; sizes are in bytes. device: whose links; ``timeout``: seconds until torch is
    given up.
    """
    counted = temp = None
    with contextlib.suppress(OSError):
        counted = witness.loopback_bytes()
    with contextlib.suppress(OSError):  # no folder can be written to
        temp = tempfile.gettempdir()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        versions={name: calibrate.version_of(name) for name in PACKAGES},
        cores=available_cores(),  # that this process may run on
        processor_time=processor_time(),  # how many of these at once; None: all
        memory=calibrate.memory_bytes(),  # of the machine, or of the container
        free_memory=free_memory(),
        torch=ask_torch(timeout=timeout),
        links=calibrated(device),
        open_files=open_files(),  # the soft limit, and the hard one it may be raised to
        shm=folder("/dev/shm"),
        temp=folder(temp),
        forkserver=start_method() == "fork",
        private_network=private_network(),
        loopback_counter=counted is not None,
        load_shown=processors.spent().total > 0,  # how busy other programs are
        browser=browser(),
    )


# Runs in a process of its own; its last line of output is the answer.
_PROBE = """
import json, time
began = time.perf_counter()
import torch, torch.distributed as dist
gpus = []
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(i)
        gpus.append({"name": found.name, "memory": found.total_memory})
have = dist.is_available()
backends = [name for name, there in (("gloo", have and dist.is_gloo_available()),
                                     ("nccl", have and dist.is_nccl_available())) if there]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus,
                  "backends": backends, "seconds": time.perf_counter() - began}))
"""


def ask_torch(
    *, timeout: float = TORCH_TIMEOUT, command: Sequence[str] = (sys.executable, "-c", _PROBE)
) -> dict[str, Any]:
    """What torch says of itself: version, cuda, gpus ("name" and "memory" of each), backends, the
    seconds that its import took; error: why it said nothing.
    """
    silent = {"version": None, "cuda": None, "gpus": [], "backends": [], "seconds": None}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return silent | {"error": f"importing it took more than {timeout:g} s"}
    except OSError as error:
        return silent | {"error": str(error)}
    if ran.returncode < 0:
        return silent | {"error": f"its process ended with signal {-ran.returncode}"}
    if ran.returncode:
        lines = [
            f"exit status {ran.returncode}",
            *filter(None, map(str.strip, ran.stderr.splitlines())),
        ]
        return silent | {"error": lines[-1]}
    with contextlib.suppress(IndexError, ValueError):
        found = json.loads(ran.stdout.splitlines()[-1])
        if isinstance(found, dict) and found.keys() >= silent.keys():
            return found | {"error": None}
    return silent | {"error": "its process did not say what it found"}


def calibrated(device: str = "cpu") -> dict[str, Any] | None:
    """{"on", "made", "busy", "stolen", "flops", "alpha", "bandwidth"} of the cached calibration, or
    None.

    flops is one core's or one GPU's (``on``), FLOP/s; the link is that of an all-reduce between
    ranks; busy: whether too much of the machine was other programs' for it to be kept; stolen: the
    share that was another machine's.
    """
    known = calibrate.known(device)
    if known is None:
        return None
    cluster = known["cluster"]
    return {
        "on": "GPU" if device == "cuda" else "core",
        "made": known["made"],
        "busy": known.get("busy", 0.0) > calibrate.BUSY,
        "stolen": known.get("stolen", 0.0),
        "flops": cluster["flops"],
        **(cluster["collectives"].get("all_reduce") or cluster["intra"]),
    }


def processor_time() -> float | None:
    """Seconds of processor time per second that this container is given, or None: no limit."""
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    return None


def free_memory() -> int | None:
    """Bytes that a new process could use: of the machine, or of the container if that is less."""
    found, group = [], Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limit = int((group / "memory.max").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        found.append(max(0, limit - used))
    return min(found, default=None)


def open_files() -> tuple[int, int] | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def folder(path: str | None) -> dict[str, Any] | None:
    """What ``path`` has room for: bytes in all and free, its file system, whether it can be written
    to, and whether O_DIRECT opens a file there. None if it is no folder.
    """
    try:
        usage = shutil.disk_usage(path)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return None
    writable, direct = _try(str(path))
    room = {"path": str(path), "total": usage.total, "free": usage.free}
    return {**room, "kind": file_system(str(path)), "writable": writable, "direct": direct}


def _try(path: str) -> tuple[bool, bool]:
    """(a file can be made there, and opened past the page cache)."""
    probe, made = os.path.join(path, f".paralab-{os.getpid()}-{time.monotonic_ns()}"), False
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        made = True
        os.close(os.open(probe, os.O_WRONLY | os.O_DIRECT))
        return True, True
    except (OSError, AttributeError):  # not every system has O_DIRECT
        return made, False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)


def file_system(path: str, mounts: str = "/proc/mounts") -> str | None:
    """ "ext4", "tmpfs", "overlay" ...: the kind of the mount that ``path`` is on."""
    at, best = os.path.realpath(path), ("", None)
    with contextlib.suppress(OSError):
        for _, where, kind, *_ in map(str.split, Path(mounts).read_text().splitlines()):
            inside = at == where or at.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= len(best[0]):  # later mounts hide earlier ones
                best = (where, kind)
    return best[1]


def private_network() -> bool:
    """Whether `unshare` gives a network namespace: then the kernel's counter is one's own."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(["unshare", "-rn", "true"], capture_output=True, timeout=10)
        return asked.returncode == 0
    return False


def browser() -> str | None:
    """A chromium or Chrome: tests and `make labs` drive one, learners need none but their own."""
    chosen = os.environ.get("BROWSER_PATH")
    return next(filter(None, map(shutil.which, (chosen,) if chosen else BROWSERS)), None)


# ---- what they mean -----------------------------------------------------------------------------
class Diagnosis(NamedTuple):
    """lines: {what: sentence}; labs: (lab, whether it runs, sentence); problems end in exit 1."""

    machine: Machine
    lines: dict[str, str]
    labs: list[tuple[Lab, bool, str]]
    problems: list[str]

    @property
    def runs(self) -> bool:
        return not self.problems and any(ok for _, ok, _ in self.labs)

    def text(self) -> str:
        """Everything, for a terminal."""
        width, title = max(map(len, self.lines)), max(len(lab.title) for lab in LABS)
        at = self.machine
        rows = [f"paralab {__version__} on {at.system}, Python {at.python}", ""]
        rows += [f"  {what:<{width}}  {said}" for what, said in self.lines.items()]
        rows += ["", "labs (up to a minute each; more where many ranks share few cores)"]
        for lab, _, said in self.labs:
            rows.append(f"  {lab.name} {lab.title:<{title}}  {_count(lab.ranks, 'rank'):<9} {said}")
        end = ["The labs that say so run here as they are. Open them with: make lab"]
        if self.problems:
            end = ["What has to be mended first:", *(f"  - {said}" for said in self.problems)]
        elif all(ok for _, ok, _ in self.labs):
            end = ["All labs run here. Open them with: make lab"]
        return "\n".join([*rows, "", *end])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: facts, what they mean, labs, problems."""
        return {
            "machine": vars(self.machine),
            "says": self.lines,
            "labs": [{**lab._asdict(), "runs": ok, "says": said} for lab, ok, said in self.labs],
            "problems": self.problems,
            "runs": self.runs,
        }


def diagnose(machine: Machine) -> Diagnosis:
    """What the facts mean."""
    problems = list(_problems(machine))
    labs = [(lab, *_verdict(lab, machine, problems)) for lab in LABS]
    return Diagnosis(machine, dict(_sentences(machine)), labs, problems)


def _problems(at: Machine) -> Iterator[str]:
    """What keeps labs from running, and what helps."""
    pip = f"{sys.executable} -m pip install"
    if tuple(int(part) for part in at.python.split(".")[:2]) < OLDEST_PYTHON:
        yield f"Python {at.python} is too old: 3.11 or newer is needed"
    missing = [name for name, found in at.versions.items() if found is None and name != "torch"]
    if missing:
        yield f"missing: {', '.join(missing)}; {pip} {' '.join(missing)}"
    if at.torch["error"] is not None and at.versions.get("torch") is None:
        yield (
            f"torch is not installed: {pip} torch (without a GPU: --index-url "
            "https://download.pytorch.org/whl/cpu)"
        )
    elif at.torch["error"] is not None:
        yield f"torch is installed and cannot be imported: {at.torch['error']}"
    elif "gloo" not in at.torch["backends"]:
        yield (
            "this torch was built without gloo, over which ranks on CPUs talk: install one from "
            "pytorch.org"
        )
    if _room_for_ranks(at) < 1:
        yield (
            f"{_size(at.free_memory)} of memory are free, and one rank next to JupyterLab takes "
            f"{_size(BASE_MEMORY + RANK_MEMORY)}: close something"
        )
    if at.temp is None or not at.temp["writable"]:
        yield (
            "there is no folder for temporary files that can be written to, and ranks meet in "
            "one: set TMPDIR"
        )
    elif at.temp["free"] < SCRATCH // 10:
        yield (
            f"{at.temp['path']} has {_size(at.temp['free'])} left, and ranks meet in files there: "
            "make room, or set TMPDIR to another folder"
        )
    if at.open_files is not None and 0 <= at.open_files[0] < NEEDED_FILES // 4:
        yield (
            f"a process may open {at.open_files[0]} files, and ranks need more: "
            f"ulimit -n {NEEDED_FILES}"
        )


def _verdict(lab: Lab, at: Machine, problems: list[str]) -> tuple[bool, str]:
    """(whether the lab runs as it is, in words)."""
    room, cores = _room_for_ranks(at), _cores_at_once(at)
    if problems:
        return False, "not yet"
    if room < lab.ranks:
        return False, f"with {room} ranks instead: memory has no room for {lab.ranks}"
    if lab.files and at.temp is not None and at.temp["free"] < lab.files:
        left = f"{at.temp['path']}, which has {_size(at.temp['free'])}"
        return False, f"not yet: it writes {_size(lab.files)} to {left}"
    turns = f", ranks taking turns on {_count(int(cores), 'core')}" * (lab.ranks > cores)
    return True, f"runs here as it is{turns}"


def _sentences(at: Machine) -> Iterator[tuple[str, str]]:
    """Every fact and what it means."""
    said = _count(at.cores, "core")
    if _cores_at_once(at) < at.cores:
        said += f", of which this container may use {at.processor_time:g} at once"
    enough = _cores_at_once(at) >= max(lab.ranks for lab in LABS)
    turns = "more ranks take turns, so look at the replayed clock, not at the wall's"
    yield "cores", f"{said}: {'every rank of every lab has one' if enough else turns}"
    free = ", how much of it is free is not shown here"
    if at.free_memory is not None:
        free = f", {_size(at.free_memory)} free"
    yield "memory", f"{_size(at.memory)}{free}: room for {_room_for_ranks(at)} ranks"
    yield "GPUs", _gpus(at.torch)
    unseen = "; how busy other programs are is not shown here, so measure when they are not"
    yield "links", _links(at.links) + unseen * (not at.load_shown)
    yield "backends", ", ".join(at.torch["backends"]) or "none: torch has to be mended first"
    yield "open files", _open_files(at.open_files)
    yield "/dev/shm", "none" if at.shm is None else _room(at.shm)
    yield "temp folder", _temp(at.temp)
    warm = "from a warm server: a launch takes a tenth of a second"
    cold = "started one by one, some seconds per launch: they are not forked here"
    yield "ranks", warm if at.forkserver else cold
    said = "none that the kernel shows: lab 01's witness is Linux's, its other cells run"
    if at.loopback_counter:
        own = "in a network of one's own where tests ask for it"
        shared = "shared with other programs: no network of one's own is allowed here"
        said = f"the kernel's, {own if at.private_network else shared}"
    yield "byte counter", said
    lacks = "no chromium or Chrome: only `make labs` and the browser tests need one of their own"
    yield "browser", at.browser or lacks
    versions = (f"{name} {version or 'missing'}" for name, version in at.versions.items())
    yield "software", ", ".join(versions)


def _gpus(torch: Mapping[str, Any]) -> str:
    if torch["error"] is not None:
        return "unknown: torch could not be asked"
    if not torch["gpus"]:
        why = " (this torch is built without CUDA)" if torch["cuda"] is None else ""
        return f'none that torch sees{why}; only a lab\'s "On your GPUs" needs one'
    names = ", ".join(f"{gpu['name']} with {_size(gpu['memory'])}" for gpu in torch["gpus"])
    return f"{len(torch['gpus'])}: {names}"


def _links(known: Mapping[str, Any] | None) -> str:
    if known is None:
        return (
            "not measured yet: paralab doctor --calibrate takes some fifteen seconds; else the "
            "first prediction does it"
        )
    again = ""
    if known["busy"]:
        again = "; other programs were busy, so it is measured again once they are not"
    elif known["stolen"] > calibrate.BUSY:
        again = (
            f"; meanwhile {100 * known['stolen']:.0f} % of its time went to other machines on the "
            "same hardware, so links look slow; --calibrate in a quieter hour"
        )
    link = f"{1e3 * known['alpha']:.2g} ms and {known['bandwidth'] / 1e9:.2g} GB/s"
    speed = f"{known['flops'] / 1e9:.0f} GFLOP/s on a {known['on']}"
    return f"measured {known['made'][:10]}: {speed}, between ranks {link}{again}"


def _open_files(limits: tuple[int, int] | None) -> str:
    if limits is None:
        return "not known on this system"
    soft, most = ("no limit" if limit < 0 else str(limit) for limit in limits)
    few = f": few; ulimit -n {NEEDED_FILES} (at most: {most})"
    return soft + few * (0 <= limits[0] < NEEDED_FILES)


def _temp(place: Mapping[str, Any] | None) -> str:
    if place is None or not place["writable"]:
        return "none that can be written to"
    said = "; without O_DIRECT, so the page cache makes files look fast"
    if place["kind"] in ("tmpfs", "ramfs"):
        said = ": that is memory, so lab 09's files are on no disk unless TMPDIR is"
    elif place["direct"]:
        said = "; files go past the page cache"
    return f"{place['path']}: {_room(place)}{said}"


def _room(place: Mapping[str, Any]) -> str:
    kind = f", {place['kind']}" if place["kind"] else ""
    return f"{_size(place['free'])} of {_size(place['total'])} free{kind}"


def _room_for_ranks(at: Machine) -> int:
    """Ranks that free memory has room for, next to a notebook."""
    free = at.memory if at.free_memory is None else at.free_memory
    return max(0, min(MAX_RANKS, (free - BASE_MEMORY) // RANK_MEMORY))


def _cores_at_once(at: Machine) -> float:
    """Cores that compute at the same time."""
    return max(1, min(at.cores, at.processor_time or at.cores))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _size(size: int | None) -> str:
    """Bytes for a reader: 512 MB, 7.4 GB."""
    if size is None:
        return "an unknown number of bytes"
    return f"{size / GB:.1f} GB" if size >= GB else f"{max(0, size) // MB} MB"
