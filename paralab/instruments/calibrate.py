"""What this machine really does: the numbers behind `Cluster.local`, measured once and cached.

Five short measurements in ranks of their own (ten to fifteen seconds together; the caller never
imports torch). measure.py has what runs in the ranks, theory/fit.py the fit:

    device  forward, backward and optimizer of small GPTs with one thread, in two to four
            ranks at once, as in a run. Their thread CPU seconds are fitted to flops / F + bytes / B
            + kernels * o, the model of theory/work.py
    links   every collective between as many ranks, 1 kB to 8 MB, fitted to alpha + wire bytes
            / bandwidth, as the event engine counts them
    calls   what posting a call takes a rank's own thread, and what more a computation takes after
            a wait: what ran meanwhile has used the caches. On few cores by one rank more than there
            are: in a run, too, some waits give a core to another rank, and some do not
    products  x W^T, g W and g^T x in 16 bits, FLOP/s of each (theory/work.py)
    tiers   copies from one part of memory to another, which is what "host to device" is where both
            are the same chips; files, written and read past the page cache; AdamW steps

On GPUs, with one rank on each, products in fp32 say F, and all products at how many tokens they
reach half of their rate; kernels that only read and write say B and o, and how long the host takes
to ask for one is `Cluster.launch_overhead`. Posting a call runs ahead of the device as a launch
does. The host is page-locked memory. A single GPU has no links but that.

What was measured while other programs computed is measured once more when they do not: links can
come out half as fast.

The alpha-beta model is Hockney's (1994, "The communication challenge for MPP"). Its alpha here is
the price of gloo's threads and sockets on loopback, not of a wire; more ranks than were calibrated
pay more of it.
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
from paralab.report import written
from paralab.spec import Cluster, Link
from paralab.spec.cluster import available_cores
from paralab.theory.fit import fit_device, fit_half_rate, fit_link, fit_rate
from paralab.theory.traffic import most_sent
from paralab.theory.work import on_processor
from paralab.version import __version__

# Cores change their speed from second to second: what computing takes is measured in as many
# passes, what messages and files take in every third, in which it is repeated more often.
PASSES = 6
COMPUTING = ("device", "calls", "products")
FORMAT = 11  # of the cache file; files of another format are measured again
BUSY = 0.25  # of the processors, taken by other programs: what is measured next to them is not kept
VIRTUAL_DEVICES = 64  # a laptop rank is a device of its own; how many is up to patience
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # files that are there where torch may see a GPU

# Measurements of this process whose cache folder cannot be written, by path: without them every
# prediction would measure again.
_unwritten: dict[Path, dict[str, Any]] = {}
_again: set[Path] = set()  # measured once more, as other programs were busy the first time


def local_cluster(*, device: str | None = None, refresh: bool = False) -> Cluster:
    """This machine as a Cluster named "local", or its GPUs as "local GPUs": measured on the first
    call, then read from a cache.

    device   "cuda" for the GPUs, "cpu" for the processors; None: what `pl.set_default_device` says,
             else the processors
    refresh  measure again and replace the cache

    On processors every rank counts as a device of its own with one core's speed; ``cores`` says how
    many there really are, ``memory`` is the machine's (or its container's) and is shared by all.
    Raises ValueError if GPUs are asked for where there is none.
    """
    return Cluster.from_dict(calibration(device=device, refresh=refresh)["cluster"])


Cluster.measure = staticmethod(local_cluster)


def gpus() -> tuple[tuple[str, int], ...]:
    """(name, bytes of memory) of each GPU that `pl.run` would give to a rank.

    A rank asks torch, once for every value of CUDA_VISIBLE_DEVICES; none does without a driver.
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
    """Whether there is a GPU for each of so many ranks; those that share one use gloo."""
    return ranks <= len(gpus())


def device_of_run(ranks: int) -> str:
    """What `pl.run` takes for so many ranks if no device is named: ranks/process.py decides."""
    return default_device() or ("cuda" if gpu_each(ranks) else "cpu")


def calibration(*, device: str | None = None, refresh: bool = False) -> dict[str, Any]:
    """Everything measured: {"cluster", "points", "accuracy", "busy", "seconds", "made"}, plain JSON
    values.

    device     as in `local_cluster`
    accuracy   {"device", an operation, or as "bf16 forward" a product: {"median", "worst"}},
               relative errors of the fit at its own points
    busy       share of the processors that other programs took, between or after measurements. If
               that was more than a quarter, a later call measures again once it is not; a process
               does so once, for on some machines others are always busy now and then
    """
    choice("device", device, LEGAL)
    device = device or default_device() or "cpu"
    if device == "cuda" and not gpus():
        legal = "'cpu'; or cluster= the machine with the GPUs: pl.Cluster.preset('dgx-a100'), or "
        legal += "what pl.Cluster.local(device='cuda') was there"
        raise illegal("device", device, "there is no GPU here that could be measured", legal)
    path, found = cache_path(device), None if refresh else known(device)
    disturbed = found is not None and path not in _again and found.get("busy", 0.0) > BUSY
    if found is None or (disturbed and processors_busy() <= BUSY):
        found = measured(device)
        if disturbed:
            _again.add(path)
        _write(path, found)
    return found


def calibration_points(
    *, device: str | None = None, refresh: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """The measured points, rows each with its seconds and, where there is one, the fit's: {"links",
    "calls", "device", "products", "tiers", "kernels": rows}.

    links   op, ranks, payload_bytes, wire_bytes, seconds, fitted
    calls   what, seconds: "post"; "forward", "backward", "product"; each "after a wait": how much
            more
    device  layers, hidden, heads, seq_len, samples, what, flops, bytes, kernels, seconds, fitted
    products  precision, what (forward, input, weight), tokens, flops, odd, seconds, fitted
    tiers   op (host, disk, optimizer), payload_bytes, wire_bytes, seconds, fitted
    kernels  of a GPU: op (kernel, launch), payload_bytes, wire_bytes, seconds, fitted
    """
    return calibration(device=device, refresh=refresh)["points"]


# ---- the cache --------------------------------------------------------------------------------
def known(device: str = "cpu") -> dict[str, Any] | None:
    """The calibration that is there already, in this process or in the cache; nothing is measured.

    None if there is none.
    """
    path = cache_path(device)
    return _unwritten.get(path) or _read(path)


def cache_path(device: str = "cpu") -> Path:
    """The cache file: one per processor, core count, and version of torch and paralab; of GPUs one
    per their names and number too.
    """
    base = os.environ.get("PARALAB_CACHE_DIR")
    if base:
        folder = Path(base)
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paralab"
    return folder / f"cluster-{fingerprint(device)}.json"


def fingerprint(device: str = "cpu") -> str:
    """What a calibration depends on, as 12 hexadecimal digits."""
    facts = [FORMAT, _processor(), available_cores(), version_of("torch"), __version__]
    if device == "cuda":
        facts.append(gpus())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def version_of(package: str) -> str | None:
    """The installed version; None if there is none."""
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
    """Memory of the machine, or of the container it runs in if that is less."""
    limits = [2**34]
    with contextlib.suppress(AttributeError, OSError, ValueError):  # else 16 GiB is a guess
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    return min(limits)


def _read(path: Path) -> dict[str, Any] | None:
    """The cache, or None if there is none or it is damaged: then it is measured again."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        Cluster.from_dict(known["cluster"])
        points, fit = known["points"], known["accuracy"]["device"]["median"]
        whole = None not in (points["links"], points["device"], fit)
        return known if whole and known["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, known: dict[str, Any]) -> None:
    """All or nothing: two notebooks may calibrate at once. What cannot be written is remembered."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written.write(path, json.dumps(known).encode())
        _unwritten.pop(path, None)
    except (OSError, ValueError):  # a folder of that name, say
        _unwritten[path] = known


# ---- measuring --------------------------------------------------------------------------------
def measured(device: str, between: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """`calibration`, measured now and not kept.

    between  what is called behind every pass: runs that are made there meet the machine at the
             speeds that are measured, however these change
    """
    from paralab.launch import launch_program

    began, cores = time.perf_counter(), available_cores()
    found = gpus() if device == "cuda" else ()
    ranks = len(found) or max(2, min(4, cores))
    programs = {
        "device": (measure_device, 0 if found else ranks),
        "calls": (measure_calls, 0 if found else ranks + (ranks >= cores)),
        "products": (functools.partial(measure_products, budget=0.3 if found else 0.15), ranks),
        "tiers": (functools.partial(measure_tiers, ranks=ranks), 1),
        "kernels": (measure_kernels, ranks if found else 0),
        "links": (measure_links, ranks if ranks > 1 else 0),
    }
    passes: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in programs}
    for number in range(1 if found else PASSES):
        for name, (program, count) in programs.items():
            if count and (name in COMPUTING or not number % 3):
                passes[name] += launch_program(program, count, (), device=device, optimizers=False)
        between()
    busy = processors_busy()  # nothing of ours runs now: the server of ranks has loaded torch
    links = _from_last_launch(passes.pop("links"), ranks)
    points = {"links": links} | {name: _typical(some) for name, some in passes.items()}
    tiers, kernels = points["tiers"], points["kernels"]
    post, wait, work = (0.0, 0.0, 0.0) if found else overheads(points["calls"])
    updates = [row for row in tiers if row["op"] == "optimizer"]
    largest = max(updates, key=lambda row: row["wire_bytes"])
    launch = next((row["seconds"] for row in kernels if row["op"] == "launch"), 0.0)
    accuracy: dict[str, dict[str, float]] = {}
    collectives, between = _links(links, accuracy), _links(tiers, accuracy)
    kinds: dict[tuple[str, str, bool], list[dict[str, Any]]] = defaultdict(list)
    for row in points["products"]:
        kinds[row["precision"], row["what"], row["odd"]].append(row)
    even = {kind[:2]: rows for kind, rows in kinds.items() if not kind[2]}
    half = median(map(fit_half_rate, even.values())) if found else None
    rates: dict[str, list[float]] = defaultdict(list)
    shares: list[float] = []
    for (precision, what), rows in even.items():
        rate, accuracy[f"{precision} {what}"] = fit_rate(rows, half)
        rates[precision].append(rate)
        odd = kinds.get((precision, what, True), ())
        shares += [row["flops"] / row["seconds"] / rate for row in odd]
    if found:
        flops = 3 / sum(1 / rate for rate in rates.pop("fp32"))  # as many of each kind
        own, accuracy["device"] = fit_link([row for row in kernels if row["op"] == "kernel"])
        bandwidth, overhead = own.bandwidth, own.alpha
    else:
        (flops, bandwidth, overhead), accuracy["device"] = fit_device(points["device"])
    cluster = Cluster(
        name="local GPUs" if found else "local",
        devices_per_node=len(found) or VIRTUAL_DEVICES,
        flops=flops,
        half_rate_tokens=half or 0.0,
        memory_bandwidth=bandwidth,
        op_overhead=overhead,
        launch_overhead=launch,
        elements={} if found else on_processor(flops),
        call_overhead=post,
        wait_overhead=wait,
        wait_work=work,
        memory=min(size for _, size in found) if found else memory_bytes(),
        intra=collectives.get("send", between["host"]),  # one GPU's only link is that to its host
        collectives=collectives,
        host=between["host"],
        disk=between["disk"],
        # AdamW reads and writes 7 tensors of the size that was counted: interpret/costs.py. Next to
        # a GPU only the largest are more than the host's caches hold.
        host_bandwidth=7
        * (largest["wire_bytes"] / largest["seconds"] if found else between["optimizer"].bandwidth),
        products=rates,
        odd_products=min(1.0, median(shares)) if shares else 1.0,
        cores=None if found else cores,
    )
    return {
        "format": FORMAT,
        "cluster": cluster.to_dict(),
        "points": points,
        "accuracy": accuracy,
        "busy": max(busy, processors_busy()),
        "seconds": time.perf_counter() - began,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _links(rows: list[dict[str, Any]], accuracy: dict[str, dict[str, float]]) -> dict[str, Link]:
    """The link of each operation; adds to ``accuracy``."""
    found = {}
    for op in dict.fromkeys(row["op"] for row in rows):
        found[op], accuracy[op] = fit_link([row for row in rows if row["op"] == op])
    return found


def _typical(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows that every rank has in every pass, with the median of their seconds."""
    return [
        {**same[0], "seconds": median(row["seconds"] for row in same)}
        for same in zip(*ranks, strict=True)
    ]


def overheads(calls: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Seconds of posting a call; seconds that what follows a wait costs more, and of work that
    costs half as much more: `Cluster.wait_work`.
    """
    seconds = {row["what"]: row["seconds"] for row in calls}
    more = [seconds[f"{what} after a wait"] for what in ("forward", "backward")]
    wait, little = max(0.0, sum(more) / len(more)), seconds["product after a wait"]
    work = seconds["product"] * (wait / little - 1) if 0 < little < wait else 0.0
    return seconds["post"], wait, work


def _from_last_launch(found: list[list[dict[str, Any]]], ranks: int) -> list[dict[str, Any]]:
    """One row per operation and size: last end - last launch. found: pass by pass, rank by rank.

    The lower quartile over the repetitions of all passes: on a wall clock, other work can only add,
    and whole launches are ten times as slow while others have the processors.
    """
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for first in range(0, len(found), ranks):
        for same in zip(*found[first : first + ranks], strict=True):
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
