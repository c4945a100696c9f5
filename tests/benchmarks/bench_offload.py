"""Offload against the physical limit, and on a GPU against FSDP2's.

    files  the update of a training whose optimizer states and parameters lie in files, against
           reading and writing as many bytes one after the other: the same disk, blocks and order
           of magnitude of everything, every write on the disk (fdatasync), nothing read from the
           page cache, and more bytes than the device's memory is allowed to hold
    gpu    a step with everything on the host, against FSDP2 with its CPUOffloadPolicy; the largest
           model that trains; how much of the copies hides behind compute. Where a GPU is at hand

Both sides live in the same rank and take turns.
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
from paralab.launch import launch_program
from paralab.theory.offload import link_bytes, tier_bytes

MODEL = pl.ModelSpec(layers=12, hidden=384, heads=6, seq_len=64)  # 21.4 M parameters
PLAN = pl.Plan(zero_stage=3, offload="nvme", microbatch_size=1)
CAP = 64 * 10**6
LARGE = pl.ModelSpec(layers=24, hidden=2048, heads=16, seq_len=1024, vocab=32000)  # 1.3 B


def updated_bytes() -> tuple[int, int]:
    """(read, written) by the update of one step: all that is not fetched for computing."""
    moved = link_bytes(MODEL, PLAN)
    parameters = moved["disk write"]["parameters"]
    states = moved["disk write"]["optimizer"]
    return states + parameters, states + parameters


def raw(folder: Path) -> Callable[[int], None]:
    """Reads and writes as many bytes, one after the other."""
    from paralab.interpret.files import BLOCK

    size, _ = updated_bytes()
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
        sides = {"ours": ours, "theirs": other}
        take_turns(sides, steps=1)
        trainer.host.close()
    return {"ours": spent[1:], "theirs": beside[1:]}  # take_turns leaves out one pair too


def files() -> dict:
    read, written = updated_bytes()
    held = sum(tier_bytes(MODEL, PLAN)["file"].values())
    assert held > CAP
    report = pl.run(MODEL, PLAN, steps=1, memory_limit=CAP, progress=False)
    ours, theirs = slowest_rank(turns, 1, ())
    rates = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    note = (f"s per update of {MODEL.num_params / 1e6:.1f} M parameters, {held / 1e6:.0f} MB in "
            f"files, device's peak {report.peak_memory / 1e6:.1f} of {CAP / 1e6:.0f} MB allowed; "
            f"{(read + written) / 1e6:.0f} MB read and written: "
            f"{rates[len(rates) // 2]:.3f} of the raw bandwidth")  # fmt: skip
    return row("offload to files, update", "sequential read and write", ours, theirs, note)


# ---- on a GPU -----------------------------------------------------------------------------------
def has_gpu(context: Any) -> bool:
    import torch

    return torch.cuda.is_available()


def gpu_turns(context: Any, ours_first: bool) -> dict[str, list[float]]:
    """Steps with parameters, gradients and optimizer states on the host, of both sides."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    from paralab.interpret.train import Trainer
    from paralab.model import reference

    plan = pl.Plan(zero_stage=3, offload="cpu", precision="bf16", microbatch_size=4, prefetch=2,
                   recompute="full")  # fmt: skip

    def our_side() -> Callable[[int], Any]:
        trainer = Trainer(context, LARGE, plan)
        return lambda i: trainer.step(i)

    def their_side() -> Callable[[int], Any]:
        model = reference.GPT(LARGE)
        policy = {"offload_policy": CPUOffloadPolicy(),
                  "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}  # fmt: skip
        for block in model.blocks:
            fully_shard(block, **policy)
        fully_shard(model, **policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step(number: int) -> None:
            optimizer.zero_grad()
            (batch,) = reference.batches(
                LARGE, step=number, microbatch_size=plan.microbatch_size, device=context.device
            )
            model(*batch).backward()
            optimizer.step()
            torch.cuda.synchronize()

        return step

    made = {"ours": our_side, "theirs": their_side}
    sides = {name: made[name]() for name in (made if ours_first else reversed(made))}
    return take_turns({name: sides[name] for name in made}, steps=1)


def gpu() -> list[dict]:
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(5):
        parts = launch_program(gpu_turns, 1, (number % 2 == 0,), timeout=900, device="cuda")
        for side, seconds in times.items():
            seconds += parts[0][side]
    plan = pl.Plan(zero_stage=3, offload="cpu", precision="bf16", microbatch_size=4, prefetch=2,
                   recompute="full")  # fmt: skip
    report = pl.run(LARGE, plan, steps=4, progress=False, device="cuda", timeout=600)
    hidden = report.summary()["value"].get("of the copies hidden behind compute", float("nan"))
    note = (f"s per step, {LARGE.num_params / 1e9:.2f} B parameters, bf16; {hidden:.0f} % of the "
            f"copies hidden; largest model with {largest()}")  # fmt: skip
    return [row("offload to the host, one GPU", "FSDP2 with CPUOffloadPolicy",
                times["ours"], times["theirs"], note)]  # fmt: skip


def largest() -> str:
    """Blocks of LARGE's width that train on this GPU, without offload and with."""
    found = {}
    for offload in (None, "cpu"):
        layers = 12
        while fits(2 * layers, offload):
            layers *= 2
        step = layers // 2
        while step >= 4:
            if fits(layers + step, offload):
                layers += step
            step //= 2
        found[offload] = LARGE.replace(layers=layers).num_params / 1e9
    return f"offload {found['cpu']:.1f} B parameters, without {found[None]:.1f} B"


def fits(layers: int, offload: str | None) -> bool:
    plan = pl.Plan(zero_stage=3, offload=offload, precision="bf16", microbatch_size=1,
                   recompute="full")  # fmt: skip
    try:
        pl.run(LARGE.replace(layers=layers), plan, steps=1, progress=False, device="cuda",
               timeout=600)  # fmt: skip
        return True
    except (pl.OutOfMemory, pl.RankError):
        return False


def measure() -> list[dict]:
    rows = [files()]
    if launch_program(has_gpu, 1, (), device="cpu")[0]:
        rows += gpu()
    return rows


if __name__ == "__main__":
    for r in measure():
        print(r["name"], r["peer"], f"{r['ratio']:.3f}", r["note"], sep="  ")
