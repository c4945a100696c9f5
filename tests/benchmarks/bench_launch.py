"""What it costs to have ranks: seconds to a first all-reduce, megabytes per rank.

first_s   no server yet: from the call to the moment the last of 4 ranks has finished an all-reduce;
          at most 2 s are asked
warm_s    the same once the server runs: median, and the largest, of `WARM` launches; asked 0.15 s
pss_mb    proportional set size of each of 8 ranks after that all-reduce, before any model: the
          largest, asked 60; private_mb: pages that no other process shares
note_us   one ``context.note`` of 40 characters; asked 2
result_s  a 30 MB NumPy array from each of 2 ranks, beyond a launch that returns nothing
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pairs import row

import paralab as pl
from paralab.launch import _shared_server, launch_program

WARM = 20


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


def _array() -> np.ndarray:
    return np.ones(30 * 2**17)


def _launched() -> float:
    start = time.monotonic()
    return max(done for done, _ in pl.launch(_all_reduce, ranks=4)) - start


def figures() -> dict[str, float]:
    """All figures above; seconds, megabytes (2**20 bytes), microseconds."""
    _shared_server.close()  # so that the first launch is one
    first = _launched()
    time.sleep(5)  # let the server load what it leaves for later
    warm = [_launched() for _ in range(WARM)]
    memory = [of_rank for _, of_rank in pl.launch(_all_reduce, ranks=8)]
    with_array, without = (_seconds(lambda f=f: pl.launch(f, ranks=2)) for f in (_array, int))
    return {
        "first_s": first,
        "warm_s": statistics.median(warm),
        "warm_max_s": max(warm),
        **{name: max(of_rank[name] for of_rank in memory) for name in memory[0]},
        "note_us": launch_program(_note, 1)[0],
        "result_s": with_array - without,
    }


def _seconds(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def _spawned(rank: int, ranks: int, folder: str) -> None:
    """What the peer's ranks do: the same group, the same all-reduce."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    done, _ = _all_reduce()
    Path(folder, str(rank)).write_text(repr(done))


def _by_spawn(ranks: int = 4) -> float:
    from torch.multiprocessing import spawn

    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        spawn(_spawned, args=(ranks, folder), nprocs=ranks)
        return max(float(Path(folder, str(r)).read_text()) for r in range(ranks)) - start


def measure() -> list[dict]:
    """A warm launch against torch's own way to start ranks, in turn."""
    said = ", ".join(f"{name} {value:.3g}" for name, value in figures().items())
    ours, theirs = zip(*((_launched(), _by_spawn()) for _ in range(20)), strict=True)
    note = f"s from the call to the first finished all-reduce; {said}"
    return [row("warm launch, 4 ranks", "torch.multiprocessing.spawn", ours, theirs, note)]
