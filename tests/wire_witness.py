"""Count on the loopback interface what collectives and a training step really move.

python tests/wire_witness.py RANKS    prints one JSON object: {op: {ledger, kernel, payload}} in
bytes, group totals

Run under ``unshare -rn`` the counter is private to this program.
"""

from __future__ import annotations

import fcntl
import functools
import json
import socket
import struct
import sys

import paralab as pl
from paralab.observe import witness

MESSAGE = 8 * 2**20  # bytes: overhead of a few KB per call is then far below 1 %
OPS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send"),
    *("ring_reduce_scatter", "ring_all_gather", "ring_all_reduce", "tree_all_reduce"),
)
MODEL = pl.ModelSpec(layers=2, hidden=256, heads=4, seq_len=16)
STAGES = {f"training step, ZeRO stage {stage}": stage for stage in range(4)}


def program(context, gate, payload: int) -> list[int]:
    """Each op between gates, then training steps; returns this rank's ledger bytes by op."""
    from paralab.comm import Group
    from paralab.observe.recorder import Recorder
    from paralab.train import Trainer

    n = context.world_size
    recorder = Recorder(rank=context.rank, world_size=n)
    group = Group(range(n), axis="world", context=context, recorder=recorder)
    calls = witness.calls(group, payload)
    sent = [witness.held(calls[op], gate, recorder) for op in OPS]
    for stage in STAGES.values():
        plan = pl.Plan(dp=n, microbatch_size=1, bucket_bytes=2**20, zero_stage=stage)
        trainer = Trainer(context, MODEL, plan, recorder=recorder)
        sent.append(witness.held(functools.partial(trainer.step, 0), gate, recorder))
    return sent


def bring_loopback_up() -> None:
    """A fresh network namespace has its loopback down."""
    up, get, put = 1, 0x8913, 0x8914  # IFF_UP, SIOCGIFFLAGS, SIOCSIFFLAGS
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = fcntl.ioctl(s, get, struct.pack("16sH14x", b"lo", 0))
        now = struct.unpack("16sH14x", request)[1]
        if not now & up:
            fcntl.ioctl(s, put, struct.pack("16sH14x", b"lo", now | up))


def main() -> None:
    ranks = int(sys.argv[1])
    bring_loopback_up()
    payload = MESSAGE // 4 // ranks * ranks * 4
    names = (*OPS, *STAGES)
    gates = len(names) * (witness.REPEATS + 1)
    parts, counts = witness.between_gates(program, ranks, (payload,), gates=gates)
    result = {
        name: {
            "ledger": sum(part[i] for part in parts),
            "kernel": min(witness.per_call(counts, i)),
            "payload": payload,
        }
        for i, name in enumerate(names)
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
