"""The speed of this machine: the numbers behind `Cluster.local`, measured once and cached.

Five short measurements run in ranks of their own (ten to fifteen seconds together; the caller never
imports torch). measure.py has the code of the ranks, theory/fit.py the fits:

    device    small GPTs with one thread, in two to four ranks at once, as in a run; fitted to
              flops / F + bytes / B + kernels * o, the model of theory/work.py
    links     every collective between as many ranks, fitted to alpha + wire bytes / bandwidth
    calls     posting a call, and computing right after a wait, as other ranks have used the caches.
              Where cores are few there is one rank more than cores: in a run, too, only some waits
              yield the core
    products  x W^T, g W and g^T x in 16 bits, FLOP/s of each (theory/work.py)
    tiers     copies ("host to device" where both are the same memory), files, AdamW steps

On GPUs, with one rank on each, the products in fp32 give F, and all products give the number of
tokens at which they reach half of their rate. Kernels that only read and write give B and o; the
time in which the host launches one is `Cluster.launch_overhead`. Posting a call costs a GPU
nothing, as the host posts ahead of the device. The host's memory is page-locked. The only link of a
single GPU is the link to its host.

A calibration during which other programs computed is repeated once when they do not: the bandwidth
of links, for example, can come out as half of what it is.

The alpha-beta model is Hockney's (1994, "The communication challenge for MPP"). On loopback, alpha
is the cost of gloo's threads and sockets, not of a network; with more ranks than were calibrated it
is larger.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from paralab.checks import choice, illegal
from paralab.default_device import LEGAL, default_device
from paralab.instruments.measure import (
    measure_calls,
    measure_device,
    measure_kernels,
    measure_links,
    measure_products,
    measure_tiers,
    see_gpus,
)
from paralab.instruments.processors import processors_busy
from paralab.report import output_files
from paralab.spec import Cluster, Link
from paralab.spec.cluster import available_cores, control_groups
from paralab.theory.fit import fit_device, fit_half_rate, fit_link, fit_rate
from paralab.theory.traffic import most_sent
from paralab.theory.work import on_processor
from paralab.version import __version__

# The speed of cores changes from second to second, so computations are measured in every pass;
# messages and files in every third, with more repetitions.
PASSES = 6
COMPUTING = ("device", "calls", "products")
FORMAT = 12  # of the cache file; files of another format are measured again
BUSY = 0.25  # share of the processors: if other programs took more, a later call measures again
VIRTUAL_DEVICES = 64  # on processors each rank counts as a device: the most ranks of a run
# A control group's memory, in both versions: controller, limit, use, and what the use consists of.
CONTAINERS = (
    ("", "memory.max", "memory.current", "memory.stat"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
)
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # torch can only see a GPU if one of these files exists

# Calibrations of this process whose cache file could not be written, by path: without them every
# prediction would measure again.
unwritten: dict[Path, dict[str, Any]] = {}
_repeated: set[Path] = set()  # paths of calibrations that this process repeated: others were busy


def local_cluster(*, device: str | None = None, refresh: bool = False) -> Cluster:
    """This machine as a Cluster named "local", or its GPUs as "local GPUs": measured on the first
    call, then read from a cache.

    device   "cuda" for the GPUs, "cpu" for the processors; None: what `pl.set_default_device` says,
             else the processors
    refresh  measure again and replace the cache

    On processors every rank counts as a device of its own with the speed of one core; ``cores`` is
    the number of real cores, ``memory`` the machine's (or its container's), shared by all ranks.
    Raises ValueError for device="cuda" where there is no GPU.
    """
    cluster = cluster_of(calibration(device=device, refresh=refresh))
    return cluster if cluster.gpus else cluster.replace(memory=memory_bytes())


def cluster_of(known: dict[str, Any]) -> Cluster:
    """The cluster of a calibration, with the link between nodes if one was measured (between.py).

    Raises ValueError, KeyError or TypeError if the file was damaged.
    """
    cluster = Cluster.from_dict(known["cluster"])
    return cluster.replace(inter=Link(**known["inter"]["link"])) if "inter" in known else cluster


Cluster.measure = staticmethod(local_cluster)


def gpus() -> tuple[tuple[str, int], ...]:
    """(name, bytes of memory) of each GPU that `pl.run` would give to a rank.

    A rank asks torch, once per process and value of CUDA_VISIBLE_DEVICES. Without a driver there is
    no GPU, and no rank is started.
    """
    if not any(map(os.path.exists, DRIVERS)):
        return ()
    return _seen(os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _seen(visible: str | None) -> tuple[tuple[str, int], ...]:
    if "PARALAB_RANK" in os.environ:
        return tuple(see_gpus(None))
    from paralab.launch import launch_program

    return tuple(launch_program(see_gpus, 1, (), device="cpu", optimizers=False)[0])


def gpu_each(ranks: int) -> bool:
    """Whether there is a GPU for each of the ranks; ranks that share a GPU use gloo, not NCCL."""
    return ranks <= len(gpus())


def device_of_run(ranks: int) -> str:
    """The device of a `pl.run` that names none, by its number of ranks, as in ranks/process.py."""
    return default_device() or ("cuda" if gpu_each(ranks) else "cpu")


def calibration(*, device: str | None = None, refresh: bool = False) -> dict[str, Any]:
    """The whole calibration as plain JSON values: {"cluster", "points", "busy", "made"}, and
    "inter" if between.py has measured the link between nodes; it is kept when this machine is
    measured again.

    device  as in `local_cluster`
    points  those of `calibration_points`
    busy    share of the processors that other programs took before or after the fit. If it was more
            than a quarter, a later call measures again when it is lower; a process does so only
            once, as on some machines other programs are busy again and again
    """
    choice("device", device, LEGAL)
    device = device or default_device() or "cpu"
    if device == "cuda" and not gpus():
        legal = "'cpu'; or with cluster= the machine that has GPUs: pl.Cluster.preset('dgx-a100'), "
        legal += "or what pl.Cluster.local(device='cuda') returns on that machine"
        raise illegal("device", device, "there is no GPU here that could be measured", legal)
    path, result = cache_path(device), None if refresh else known(device)
    disturbed = result is not None and path not in _repeated and result.get("busy", 0.0) > BUSY
    if result is None or (disturbed and processors_busy() <= BUSY):
        kept = {name: value for name, value in (known(device) or {}).items() if name == "inter"}
        result = measured(device) | kept
        if disturbed:
            _repeated.add(path)
        _write(path, result)
    return result


def calibration_points(**settings: Any) -> dict[str, list[dict[str, Any]]]:
    """{"links": the measured calls}, each with op, ranks, payload_bytes, wire_bytes, seconds, and
    the seconds of the fit as fitted. settings: of `calibration`.
    """
    return calibration(**settings)["points"]


# ---- the cache --------------------------------------------------------------------------------
def known(device: str = "cpu") -> dict[str, Any] | None:
    """The calibration in this process or in the cache, or None. Nothing is measured."""
    path = cache_path(device)
    return unwritten.get(path) or _read(path)


def cache_path(device: str = "cpu") -> Path:
    """The cache file: one per processor, core count, and version of torch and paralab; for GPUs
    also per their names, memory and number.
    """
    environ = os.environ
    folder = environ.get("PARALAB_CACHE_DIR")
    with contextlib.suppress(RuntimeError):  # a user without a home, whose cache is the process
        folder = folder or Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "paralab")
    return Path(folder or os.devnull, f"cluster-{fingerprint(device)}.json")


def fingerprint(device: str = "cpu") -> str:
    """What a calibration depends on, as 12 hexadecimal digits."""
    facts = [FORMAT, _processor(), available_cores(), version_of("torch"), __version__]
    if device == "cuda":
        facts.append(gpus())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def timestamp() -> str:
    """The time now, in UTC, as reports and calibrations state it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Memory of the machine, or of the container or the user's share if that is less."""
    limits = [2**34]
    with contextlib.suppress(AttributeError, OSError, ValueError):  # unknown: assume 16 GiB
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for [most] in control_groups(names[:2] for names in CONTAINERS):
        with contextlib.suppress(ValueError):  # "max"
            limits.append(int(most))
    return min(limits)


def _read(path: Path) -> dict[str, Any] | None:
    """The cached calibration; None if there is no such file, or it is damaged or incomplete."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        cluster_of(known)
        return known if "links" in known["points"] and known["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_inter(found: dict[str, Any]) -> None:
    """Add the link between nodes to the calibration of this machine's processors."""
    _write(cache_path(), (known() or {}) | {"inter": found})


def _write(path: Path, known: dict[str, Any]) -> None:
    """Write the file; if that fails, keep the calibration in this process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        output_files.write(path, json.dumps(known).encode())
        unwritten.pop(path, None)
    except (OSError, ValueError):  # a folder of that name, say
        unwritten[path] = known


# ---- measuring --------------------------------------------------------------------------------
def measured(device: str, between: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """What `calibration` returns, measured now and not cached.

    between  is called after every pass: a run that it makes has the same speed of the machine as
             the measurements around it, however that speed changes
    """
    from paralab.launch import launch_program

    cores, of_gpus = available_cores(), gpus() if device == "cuda" else ()
    ranks = len(of_gpus) or max(2, min(4, cores))
    programs = {  # each with the number of ranks that it runs in
        "device": (measure_device, 0 if of_gpus else ranks),
        "calls": (measure_calls, 0 if of_gpus else ranks + (ranks >= cores)),
        "products": (functools.partial(measure_products, budget=0.3 if of_gpus else 0.15), ranks),
        "tiers": (functools.partial(measure_tiers, ranks=ranks), 1),
        "kernels": (measure_kernels, ranks if of_gpus else 0),
        "links": (measure_links, ranks if ranks > 1 else 0),
    }
    passes: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in programs}
    for number in range(1 if of_gpus else PASSES):
        for name, (program, count) in programs.items():
            if count and (name in COMPUTING or not number % 3):
                passes[name] += launch_program(program, count, (), device=device, optimizers=False)
        between()
    busy = processors_busy()  # by others: the server of ranks has loaded torch and is idle
    links = from_last_launch(passes.pop("links"), ranks)
    points = {name: _typical(rows) for name, rows in passes.items()}
    tiers, kernels = points["tiers"], points["kernels"]
    post, wait, work = (0.0, 0.0, 0.0) if of_gpus else overheads(points["calls"])
    launch = next((row["seconds"] for row in kernels if row["op"] == "launch"), 0.0)
    collectives, tier_links = _links(links), _links(tiers)
    kinds: dict[tuple[str, str, bool], list[dict[str, Any]]] = defaultdict(list)
    for row in points["products"]:
        kinds[row["precision"], row["what"], row["odd"]].append(row)
    even = {kind[:2]: rows for kind, rows in kinds.items() if not kind[2]}
    half = median(map(fit_half_rate, even.values())) if of_gpus else None
    rates: dict[str, list[float]] = defaultdict(list)
    odd_shares: list[float] = []  # rate of products with an odd dimension / rate of the others
    for (precision, what), rows in even.items():
        rate = fit_rate(rows, half)
        rates[precision].append(rate)
        odd = kinds.get((precision, what, True), ())
        odd_shares += [row["flops"] / row["seconds"] / rate for row in odd]
    if of_gpus:
        flops = 3 / sum(1 / rate for rate in rates.pop("fp32"))  # mean of equally many per kind
        fit, _ = fit_link([row for row in kernels if row["op"] == "kernel"])
        bandwidth, overhead = fit.bandwidth, fit.alpha
    else:
        flops, bandwidth, overhead = fit_device(points["device"])
    update_rate = tier_links["optimizer"].bandwidth
    if of_gpus:  # all updates but the largest, the last, fit into their host's caches
        largest = [row for row in tiers if row["op"] == "optimizer"][-1]
        update_rate = largest["wire_bytes"] / largest["seconds"]
    cluster = Cluster(
        name="local GPUs" if of_gpus else "local",
        devices_per_node=len(of_gpus) or VIRTUAL_DEVICES,
        flops=flops,
        half_rate_tokens=half or 0.0,
        memory_bandwidth=bandwidth,
        op_overhead=overhead,
        launch_overhead=launch,
        elements={} if of_gpus else on_processor(flops),
        call_overhead=post,
        wait_overhead=wait,
        wait_work=work,
        memory=min(size for _, size in of_gpus) if of_gpus else memory_bytes(),
        intra=collectives.get("send", tier_links["host"]),  # a single GPU's link is to its host
        collectives=collectives,
        host=tier_links["host"],
        disk=tier_links["disk"],
        # AdamW reads and writes 7 tensors of the size that was counted: interpret/costs.py.
        host_bandwidth=7 * update_rate,
        products=rates,
        odd_products=min(1.0, median(odd_shares)) if odd_shares else 1.0,
        cores=None if of_gpus else cores,
    )
    return {
        "format": FORMAT,
        "cluster": cluster.to_dict(),
        "points": {"links": links},
        "busy": max(busy, processors_busy()),
        "made": timestamp(),
    }


def _links(rows: list[dict[str, Any]]) -> dict[str, Link]:
    """The fitted link of each operation."""
    ops = dict.fromkeys(row["op"] for row in rows)
    return {op: fit_link([row for row in rows if row["op"] == op])[0] for op in ops}


def _typical(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each that every rank has in every pass, with the median of their seconds."""
    return [
        {**same[0], "seconds": median(row["seconds"] for row in same)}
        for same in zip(*ranks, strict=True)
    ]


def overheads(calls: list[dict[str, Any]]) -> tuple[float, float, float]:
    """`Cluster.call_overhead`, `wait_overhead` and `wait_work`, in seconds."""
    seconds = {row["what"]: row["seconds"] for row in calls}
    extra = [seconds[f"{part} after a wait"] for part in ("forward", "backward")]
    wait, of_product = max(0.0, sum(extra) / len(extra)), seconds["product after a wait"]
    work = seconds["product"] * (wait / of_product - 1) if 0 < of_product < wait else 0.0
    return seconds["post"], wait, work


def from_last_launch(measured: list[list[dict[str, Any]]], ranks: int) -> list[dict[str, Any]]:
    """One row per operation and size of `measure_links`, whose rows ``measured`` has rank by rank
    and pass by pass. Its seconds are those from the last rank's launch to the last rank's end: the
    lower quartile over all repetitions, as other work can only add to them, and makes whole
    launches ten times as slow while it has the processors.
    """
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for first in range(0, len(measured), ranks):
        for same in zip(*measured[first : first + ranks], strict=True):
            op, payload = same[0]["op"], same[0]["payload_bytes"]
            members = same[:2] if op == "send" else same
            for marks in zip(*(row["marks"] for row in members), strict=True):
                launched, ended = map(max, zip(*marks, strict=True))
                took[op, payload].append(ended - launched)
    return [
        {
            "op": op,
            "ranks": ranks,
            "payload_bytes": payload,
            "wire_bytes": most_sent(op, payload, ranks),
            "seconds": sorted(seconds)[len(seconds) // 4],
        }
        for (op, payload), seconds in took.items()
    ]
