"""Count on the loopback interface what collectives and a training step really move.

python tests/wire_witness.py RANKS    prints one JSON object: {op: {ledger, kernel, payload}} in
bytes, group totals

Ranks are held at a gate before and after each op, and the parent reads the counter while they are
held. Run under ``unshare -rn`` the counter is private to this program.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

import paralab as pl
from paralab.launch import launch_program

MESSAGE = 8 * 2**20  # bytes: overhead of a few KB per call is then far below 1 %
REPEATS = 5  # the median: a hurried kernel now and then splits into many small packets
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send")
MODEL = pl.ModelSpec(layers=2, hidden=256, heads=4, seq_len=16)


def gate(folder: str, number: int, rank: int) -> None:
    Path(folder, f"{number}.{rank}").touch()
    while not Path(folder, f"{number}.open").exists():
        time.sleep(0.002)


def program(context, folder: str) -> dict[str, float]:
    """Each op between two gates; returns this rank's ledger bytes by op."""
    import torch

    from paralab.comm import Group
    from paralab.observe.recorder import Recorder
    from paralab.train import Trainer

    n, rank = context.world_size, context.rank
    recorder = Recorder(rank=rank, world_size=n)
    group = Group(range(n), axis="world", context=context, recorder=recorder)
    whole = torch.ones(MESSAGE // 4 // n * n)
    part = torch.ones(whole.numel() // n)
    plan = pl.Plan(dp=n, microbatch_size=1, bucket_bytes=2**20)
    trainer = Trainer(context, MODEL, plan, recorder=recorder)

    def call(op: str) -> None:
        if op == "all_reduce":
            group.all_reduce(whole, phase=op).wait()
        elif op == "all_gather":
            group.all_gather(whole, part, phase=op).wait()
        elif op == "reduce_scatter":
            group.reduce_scatter(part, whole, phase=op).wait()
        elif op == "all_to_all":
            group.all_to_all(torch.empty_like(whole), whole, phase=op).wait()
        elif op in ("broadcast", "reduce"):
            getattr(group, op)(whole, root=n - 1, phase=op).wait()
        elif op == "send" and rank == 0:
            group.send(whole, to=n - 1, phase=op).wait()
        elif op == "send" and rank == n - 1:
            group.recv(whole, source=0, phase=op).wait()
        elif op == "training step":
            trainer.step(0)

    sent, gates = {}, iter(range(1000))
    for op in (*OPS, "training step"):
        call(op)  # connections are made at the first call
        before = sum(recorder.tables()["collectives"]["wire_bytes"])
        gate(folder, next(gates), rank)
        for _ in range(REPEATS):
            call(op)
            gate(folder, next(gates), rank)
        after = sum(recorder.tables()["collectives"]["wire_bytes"])
        sent[op] = (after - before) / REPEATS
    return sent


def loopback_bytes() -> int:
    """Bytes received on ``lo``: there, each byte sent is received once."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    raise OSError("no loopback interface")


def bring_loopback_up() -> None:
    """A fresh network namespace has its loopback down."""
    up, get, put = 1, 0x8913, 0x8914  # IFF_UP, SIOCGIFFLAGS, SIOCSIFFLAGS
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = fcntl.ioctl(s, get, struct.pack("16sH14x", b"lo", 0))
        now = struct.unpack("16sH14x", request)[1]
        if not now & up:
            fcntl.ioctl(s, put, struct.pack("16sH14x", b"lo", now | up))


def keep_gates(folder: str, ranks: int, counts: list[int]) -> None:
    for number in range((REPEATS + 1) * (len(OPS) + 1)):
        while len(list(Path(folder).glob(f"{number}.[0-9]*"))) < ranks:
            time.sleep(0.002)
        time.sleep(0.02)  # what is still on its way arrives
        counts.append(loopback_bytes())
        Path(folder, f"{number}.open").touch()


def main() -> None:
    ranks, counts = int(sys.argv[1]), []
    bring_loopback_up()
    with tempfile.TemporaryDirectory() as folder:
        keeper = threading.Thread(target=keep_gates, args=(folder, ranks, counts), daemon=True)
        keeper.start()
        parts = launch_program(program, ranks, (folder,), timeout=60, device="cpu")
        keeper.join(10)
    result = {}
    for i, op in enumerate((*OPS, "training step")):
        ledger = sum(part[op] for part in parts)
        read = counts[(REPEATS + 1) * i : (REPEATS + 1) * (i + 1)]
        kernel = statistics.median(b - a for a, b in itertools.pairwise(read))
        payload = MESSAGE // 4 // ranks * ranks * 4
        result[op] = {"ledger": ledger, "kernel": kernel, "payload": payload}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
