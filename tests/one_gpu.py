"""Ranks that share one GPU over NCCL: each is told that it is a machine of its own.

NCCL refuses two ranks on one GPU of one host, and tells hosts apart by a name, which NCCL_HOSTID
sets. So ranks with a name each, started as torchrun would start them on as many machines, have a
communicator, with messages over sockets. Their kernels take turns on the GPU: no time of it says
anything. Streams, events, communicators and the order of calls are what they are on as many GPUs.

    python tests/one_gpu.py FOLDER    be a rank; torchrun's variables say which
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import paralab as pl
from paralab.experiment import _meta, checked
from paralab.report import scratch
from paralab.report.report import Report
from together import one_by_one

Job = tuple[pl.ModelSpec, pl.Plan, dict[str, Any]]
# One channel is a kernel of one block: what spins on the device in place of the others is small.
NCCL = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_NCHANNELS": "1"}


def reports(
    jobs: Sequence[Job], folder: Path, *, data: Path, device: str, seconds: float
) -> tuple[list[Report], str]:
    """What is to be had of these trainings, in turn on the same ranks, within so many seconds; and
    what the ranks printed. All have as many ranks. ``report.meta["meetings"]`` has each place where
    the host waited for the device inside a step.
    """
    made = []
    with contextlib.ExitStack() as stack:
        for model, plan, settings in jobs:
            settings = checked(model, plan, **{"data": data, **settings})
            away = stack.enter_context(scratch.folder(plan.tiers))
            made.append((model, plan, {**settings, "offload_folder": away}))
        (folder / "jobs").write_bytes(pickle.dumps((device, made)))
        ranks = jobs[0][1].world_size
        said = started([__file__, str(folder)], folder, ranks, seconds)
    found = []
    for number, (model, plan, settings) in enumerate(made):
        files = [folder / f"{number}.{rank}" for rank in range(ranks)]
        if not all(map(Path.exists, files)):
            break
        parts = [pickle.loads(file.read_bytes()) for file in files]
        how = _meta(
            {k: v for k, v in settings.items() if k != "offload_folder"},
            {**parts[0]["meta"], "meetings": [p.pop("meetings") for p in parts]},
        )
        found.append(Report.from_parts(parts, model=model, plan=plan, meta=how))
    return found, said


def started(words: Sequence[str], folder: Path, ranks: int, seconds: float) -> str:
    """Be torchrun on as many machines as there are ranks, for ``python words``, until they end or
    the time is over; what they printed, which is in ``folder`` too.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    alike = {**meet, "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    outputs = [folder / f"said.{rank}" for rank in range(ranks)]
    give_up, running = time.monotonic() + seconds, []
    try:
        for rank, output in enumerate(outputs):
            own = {"RANK": str(rank), "GROUP_RANK": str(rank), "NCCL_HOSTID": f"machine-{rank}"}
            with open(output, "w") as file:
                running.append(
                    subprocess.Popen(
                        [sys.executable, *words],
                        env={**os.environ, **NCCL, "GLOO_SOCKET_IFNAME": "lo", **alike, **own},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        while time.monotonic() < give_up and None in (ended := [r.poll() for r in running]):
            if any(ended):  # one failed: the others wait for it
                give_up = min(give_up, time.monotonic() + 10)
            time.sleep(0.1)
    finally:
        for one in running:
            one.kill()
            one.wait()
    return "\n".join(f"rank {r}: {file.read_text()[-3000:]}" for r, file in enumerate(outputs))


# ---- on the ranks --------------------------------------------------------------------------------
def main(folder: Path) -> None:
    from paralab.ranks.torchrun import torchrun_context

    device, jobs = pickle.loads((folder / "jobs").read_bytes())
    context = torchrun_context(device=device, timeout=60.0)
    met: list[str] = []
    parts = one_by_one(context, jobs, around=lambda number: meetings(met))
    for number, part in enumerate(parts):
        part["meetings"], met[:] = list(met), []
        done = folder / f"part.{context.rank}"
        done.write_bytes(pickle.dumps(part))
        done.rename(folder / f"{number}.{context.rank}")
    import torch.distributed as dist

    dist.destroy_process_group()


@contextlib.contextmanager
def meetings(met: list[str]) -> Iterator[None]:
    """``met`` gets each place where the host waits for the device inside a step, as torch sees it;
    not in the first step, nor where gradients are kept.
    """
    import torch

    from paralab.interpret.run import Rank

    if not torch.cuda.is_available():
        yield
        return
    plain: Callable = Rank.step
    steps = 0

    def noted(message: Any, *rest: Any, **more: Any) -> None:
        if "synchronizing CUDA operation" not in str(message):
            return  # that this mode does not see everything
        frames = traceback.extract_stack()[-9:-1]
        met.append(
            f"{message}: "
            + " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
        )

    def watched(self: Any, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 1 or self.before_update is not None:
            return plain(self, *args)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            return plain(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning, Rank.step = noted, watched
        try:
            yield
        finally:
            Rank.step = plain


if __name__ == "__main__":
    main(Path(sys.argv[1]))
