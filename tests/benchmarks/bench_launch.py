"""What it costs to have ranks: seconds to a first all-reduce, megabytes per rank.

    python tests/benchmarks/bench_launch.py

first_s   no server yet: from the call to the moment the last of 4 ranks has finished an all-reduce
warm_s    the same once the server runs: median, and the largest, of `WARM` launches
pss_mb    proportional set size of each of 8 ranks after that all-reduce, before any model: the
          largest; private_mb: pages that no other process shares
note_us   one ``context.note`` of 40 characters
result_s  a 30 MB NumPy array from each of 2 ranks, beyond a launch that returns nothing
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from pairs import row

import paralab as pl
from paralab.launch import _shared_server, launch_program

WARM = 20
BARS = {"first_s": 2.0, "warm_s": 0.15, "pss_mb": 60.0, "note_us": 2.0}


def _all_reduce() -> tuple[float, dict[str, float]]:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    done = time.monotonic()  # CLOCK_MONOTONIC is the same in all processes of a machine
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kb = {name.rstrip(":"): float(size) for name, size, *_ in map(str.split, lines)}
    private = kb["Private_Clean"] + kb["Private_Dirty"]
    return done, {"pss_mb": kb["Pss"] / 1024, "private_mb": private / 1024}


def _note(context: Any) -> float:
    start = time.perf_counter()
    for _ in range(10_000):
        context.note("all_reduce #17 on axis dp, ranks 0,1,2,3")
    return (time.perf_counter() - start) / 10_000 * 1e6


def _seconds(ranks: int = 4) -> float:
    start = time.monotonic()
    return max(done for done, _ in pl.launch(_all_reduce, ranks=ranks)) - start


def _array() -> np.ndarray:
    return np.ones(30 * 2**17)


def measure() -> dict[str, float]:
    """All figures above; seconds, megabytes (2**20 bytes), microseconds."""
    _shared_server.close()  # so that the first launch is one
    first = _seconds()
    time.sleep(5)  # let the server load what it leaves for later
    warm = [_seconds() for _ in range(WARM)]
    memory = [of_rank for _, of_rank in pl.launch(_all_reduce, ranks=8)]
    start = time.monotonic()
    pl.launch(_array, ranks=2)
    result = time.monotonic() - start
    start = time.monotonic()
    pl.launch(int, ranks=2)
    result -= time.monotonic() - start
    return {
        "first_s": first,
        "warm_s": statistics.median(warm),
        "warm_max_s": max(warm),
        "pss_mb": max(of_rank["pss_mb"] for of_rank in memory),
        "private_mb": max(of_rank["private_mb"] for of_rank in memory),
        "note_us": launch_program(_note, 1)[0],
        "result_s": result,
    }


def _spawned(rank: int, ranks: int, folder: str) -> None:
    """What the peer's ranks do: the same group, the same all-reduce."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    done, _ = _all_reduce()
    Path(folder, str(rank)).write_text(repr(done))


def _seconds_of_spawn(ranks: int = 4) -> float:
    from torch.multiprocessing import spawn

    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        spawn(_spawned, args=(ranks, folder), nprocs=ranks)
        return max(float(Path(folder, str(r)).read_text()) for r in range(ranks)) - start


def rows(*, pairs: int = 20) -> list[dict]:
    """For bench.json: a warm launch against torch's own way to start ranks, in turn."""
    figures = measure()
    ours, theirs = [], []
    for _ in range(pairs):
        ours.append(_seconds())
        theirs.append(_seconds_of_spawn())
    said = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
    note = f"s from the call to the first finished all-reduce; {said}"
    return [row("warm launch, 4 ranks", "torch.multiprocessing.spawn", ours, theirs, note)]


if __name__ == "__main__":
    figures = measure()
    for name, value in figures.items():
        bar = BARS.get(name)
        verdict = "" if bar is None else f"  (bar {bar:g}: {'met' if value <= bar else 'MISSED'})"
        print(f"{name:12s} {value:8.3f}{verdict}")
    print(json.dumps(figures))
