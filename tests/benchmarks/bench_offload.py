"""Offload to files against the physical limit.

The update of a training whose optimizer states and parameters lie in files, against reading and
writing as many bytes one after the other: the same disk, blocks and order of magnitude of
everything, every write on the disk (fdatasync), nothing read from the page cache, and more bytes
than the device's memory is allowed to hold. Both sides live in the same rank and take turns.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pairs import row, slowest_rank, take_turns

import paralab as pl
from paralab.theory.offload import file_bytes, link_bytes

MODEL = pl.ModelSpec(layers=12, hidden=384, heads=6, seq_len=64)  # 21.4 M parameters
PLAN = pl.Plan(zero_stage=3, offload="nvme", microbatch_size=1)
CAP = 64 * 10**6


def updated_bytes() -> int:
    """What one step's update reads, and writes: all that is not fetched for computing."""
    written = link_bytes(MODEL, PLAN)["disk write"]
    return written["parameters"] + written["optimizer"]


def raw(folder: Path) -> Callable[[int], None]:
    """Reads and writes as many bytes, one after the other."""
    from paralab.interpret.files import BLOCK

    size = updated_bytes()
    path, block = folder / "raw", bytearray(os.urandom(BLOCK))

    def write() -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        for at in range(0, size, BLOCK):
            os.pwrite(file, memoryview(block)[: min(BLOCK, size - at)], at)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)

    def turn(_: int) -> None:
        file = os.open(path, os.O_RDONLY)
        for at in range(0, size, BLOCK):
            os.preadv(file, [memoryview(block)[: min(BLOCK, size - at)]], at)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
        write()

    write()
    return turn


def turns(context: Any, ours_first: bool) -> dict[str, list[float]]:
    """Seconds of each turn: updates of our side, the same bytes of the other."""
    from paralab.interpret.train import Trainer
    from paralab.programs.instructions import COMPUTE

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(context, MODEL, PLAN, offload_folder=folder)
        plain, steps = raw(Path(folder)), trainer.rank.steps
        last = max(at for at, (_, ins, _) in enumerate(steps) if ins.op in COMPUTE)
        compute, *rest = steps[last]
        mark, spent = [0.0], []

        def marked(ins: Any) -> None:
            compute(ins)
            mark[0] = time.perf_counter()  # what follows is the update

        def ours(i: int) -> None:
            trainer.step(next(number))
            spent.append(time.perf_counter() - mark[0])

        steps[last] = (marked, *rest)
        number = iter(range(10**6))

        def other(i: int) -> None:
            began = time.perf_counter()
            plain(i)
            beside.append(time.perf_counter() - began)

        beside: list[float] = []
        take_turns({"ours": ours, "theirs": other}, steps=1)
        trainer.host.close()
    return {"ours": spent[1:], "theirs": beside[1:]}  # take_turns leaves out one pair too


def measure() -> list[dict]:
    held = file_bytes(MODEL, PLAN)
    assert held > CAP
    report = pl.run(MODEL, PLAN, steps=1, memory_limit=CAP, progress=False)
    ours, theirs = slowest_rank(turns, 1, ())
    rates = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    note = (f"s per update of {MODEL.num_params / 1e6:.1f} M parameters, {held / 1e6:.0f} MB in "
            f"files, device's peak {report.peak_memory / 1e6:.1f} of {CAP / 1e6:.0f} MB allowed; "
            f"{2 * updated_bytes() / 1e6:.0f} MB read and written: "
            f"{rates[len(rates) // 2]:.3f} of the raw bandwidth")  # fmt: skip
    return [row("offload to files, update", "sequential read and write", ours, theirs, note)]
