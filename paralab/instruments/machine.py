"""What this machine has for labs to run on, asked of the system: facts, no opinion.

`examine` takes a second or two and starts no ranks. torch is asked in a process of its own: this
one stays light, and a torch that hangs or crashes at import is an answer, not the end. Whatever
cannot be found out is None. What the facts mean for a learner is in doctor.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from paralab.instruments import calibrate
from paralab.spec.cluster import available_cores

PACKAGES = (
    "torch",
    "numpy",
    "pandas",
    "plotly",
    "anywidget",
    "ipywidgets",
    "jupyterlab",
    "cloudpickle",
    "safetensors",
    "tqdm",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TORCH_TIMEOUT = 120.0  # seconds: a first import from a cold disk is slow

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


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What torch says of itself. gpus: {"name", "memory"} each; error: why it said nothing."""

    version: str | None = None
    cuda: str | None = None
    gpus: tuple[dict[str, Any], ...] = ()
    backends: tuple[str, ...] = ()
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A place for files: bytes in all and free, file system, and whether O_DIRECT opens one."""

    path: str
    total: int
    free: int
    kind: str | None
    writable: bool
    direct: bool


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts. Sizes in bytes.

    cores                that this process may run on
    processor_time       how many of these a container may use at once; None: all of them
    memory, free_memory  of the machine, or of the container that this runs in
    links                of the calibrated `Cluster.local`, or None if nothing is cached
    open_files           the soft limit of this process, and the hard one it may be raised to
    private_network      whether a network namespace of one's own is allowed
    loopback_counter     whether the kernel shows how many bytes went over the loopback
    """

    system: str
    python: str
    versions: dict[str, str | None]
    cores: int
    processor_time: float | None
    memory: int
    free_memory: int | None
    torch: Torch
    links: dict[str, Any] | None
    open_files: tuple[int, int] | None
    shm: Folder | None
    temp: Folder | None
    forkserver: bool
    private_network: bool
    loopback_counter: bool
    browser: str | None


def examine(*, device: str = "cpu", timeout: float = TORCH_TIMEOUT) -> Machine:
    """Ask the system. device: whose links; ``timeout``: seconds until torch is given up."""
    import multiprocessing

    from paralab.instruments.witness import loopback_bytes

    counter = True
    try:
        loopback_bytes()
    except OSError:
        counter = False
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        cores=available_cores(),
        processor_time=processor_time(),
        memory=calibrate.memory_bytes(),
        free_memory=free_memory(),
        torch=ask_torch(timeout=timeout),
        links=calibrated(device),
        open_files=open_files(),
        shm=folder("/dev/shm") if os.path.isdir("/dev/shm") else None,
        temp=folder(_temp()),
        forkserver="forkserver" in multiprocessing.get_all_start_methods(),
        private_network=private_network(),
        loopback_counter=counter,
        browser=browser(),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ---- torch --------------------------------------------------------------------------------------
def ask_torch(
    *, timeout: float = TORCH_TIMEOUT, command: Sequence[str] = (sys.executable, "-c", _PROBE)
) -> Torch:
    """Import torch in a process of its own and ask it; `Torch.error` says why that failed."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Torch(error=f"importing it took more than {timeout:g} s")
    except OSError as error:
        return Torch(error=str(error))
    if ran.returncode:
        lines = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
        killed = f"its process ended with signal {-ran.returncode}" if ran.returncode < 0 else ""
        return Torch(error=killed or (lines[-1] if lines else f"exit status {ran.returncode}"))
    try:
        found = json.loads(ran.stdout.splitlines()[-1])
        lists = {name: tuple(found[name]) for name in ("gpus", "backends")}
        return Torch(**{**found, **lists})
    except (IndexError, ValueError, KeyError, TypeError):
        return Torch(error="its process did not say what it found")


# ---- links --------------------------------------------------------------------------------------
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
    link = cluster["collectives"].get("all_reduce") or cluster["intra"]
    busy = known.get("busy", 0.0) > calibrate.BUSY
    return {
        "on": "GPU" if device == "cuda" else "core",
        "made": known["made"],
        "busy": busy,
        "stolen": known.get("stolen", 0.0),
        "flops": cluster["flops"],
        "alpha": link["alpha"],
        "bandwidth": link["bandwidth"],
    }


# ---- the operating system -----------------------------------------------------------------------
def processor_time() -> float | None:
    """Seconds of processor time per second that this container is given, or None: no limit."""
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    return None


def free_memory() -> int | None:
    """Bytes that a new process could use: of the machine, or of the container if that is less."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1]))
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limit = int((group / "memory.max").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        found.append(max(0, limit - used))
    return min(found) if found else None


def open_files() -> tuple[int, int] | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _temp() -> str | None:
    try:
        return tempfile.gettempdir()
    except OSError:  # no folder can be written to
        return None


def folder(path: str | None) -> Folder | None:
    """What ``path`` has room for; None if it is no folder."""
    try:
        usage = shutil.disk_usage(path)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return None
    writable, direct = _try(str(path))
    return Folder(
        path=str(path),
        total=usage.total,
        free=usage.free,
        kind=file_system(str(path)),
        writable=writable,
        direct=direct,
    )


def _try(path: str) -> tuple[bool, bool]:
    """(a file can be made there, and opened past the page cache)."""
    probe = os.path.join(path, f".paralab-{os.getpid()}-{time.monotonic_ns()}")
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        return False, False
    try:
        if not hasattr(os, "O_DIRECT"):
            return True, False
        os.close(os.open(probe, os.O_WRONLY | os.O_DIRECT))
        return True, True
    except OSError:
        return True, False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)


def file_system(path: str, mounts: str = "/proc/mounts") -> str | None:
    """ "ext4", "tmpfs", "overlay" ...: the kind of the mount that ``path`` is on."""
    try:
        lines = [line.split() for line in Path(mounts).read_text().splitlines()]
    except OSError:
        return None
    at = os.path.realpath(path)
    best = ("", None)
    for _, where, kind, *_ in lines:
        inside = at == where or at.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(best[0]):  # later mounts hide earlier ones
            best = (where, kind)
    return best[1]


def private_network() -> bool:
    """Whether `unshare` gives a network namespace: then the kernel's counter is one's own."""
    tool = shutil.which("unshare")
    if tool is None:
        return False
    try:
        asked = subprocess.run([tool, "-rn", "true"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def browser() -> str | None:
    """A chromium or Chrome: tests and `make labs` drive one, learners need none but their own."""
    chosen = os.environ.get("BROWSER_PATH")
    return next(filter(None, map(shutil.which, (chosen,) if chosen else BROWSERS)), None)
