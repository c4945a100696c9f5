"""Count on the loopback interface what collectives and a training step really move.

python tests/wire_witness.py RANKS ...    prints one JSON object, for each number of ranks: {op:
{ledger, kernel, payload}} in bytes, group totals

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
from paralab.instruments import witness

MESSAGE = 8 * 2**20  # bytes: overhead of a few kB per call is then far below 1 %
OPS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send"),
    *("ring_reduce_scatter", "ring_all_gather", "ring_all_reduce", "tree_all_reduce"),
)
MODEL = pl.ModelSpec(layers=2, hidden=256, heads=4, seq_len=16)
# Messages of 300 kB and more, the norms' and the loss's few numbers per token aside.
WIDE = pl.ModelSpec(layers=1, hidden=512, heads=8, seq_len=256)


def steps_of(n: int) -> dict[str, tuple[pl.ModelSpec, pl.Plan]]:
    """Training steps to count on n ranks."""
    zero = pl.Plan(dp=n, microbatch_size=1, bucket_bytes=2**20)
    found = {f"training step, ZeRO stage {s}": (MODEL, zero.replace(zero_stage=s))
             for s in range(4)}  # fmt: skip
    tensor = {
        4: ({}, {"sequence_parallel": True}, {"tp_mode": "2d"}),
        8: ({"tp_mode": "2.5d"}, {"tp_mode": "3d"}),
    }
    if n == 8:
        found = {}
    for mode in tensor.get(n, ()):
        name = f"training step, tensor parallel {mode.get('tp_mode', '1d')}"
        name += ", sequence" * ("sequence_parallel" in mode)
        found[name] = WIDE, pl.Plan(tp=n, microbatch_size=4, **mode)
    return found


def ops_of(n: int) -> tuple[str, ...]:
    return OPS if n < 8 else ()


def program(context, gate, payload: int) -> list[int]:
    """Each op between gates, then training steps; returns this rank's ledger bytes by op."""
    from paralab.comm import Group
    from paralab.instruments.recorder import Recorder
    from paralab.interpret.train import Trainer

    n = context.world_size
    recorder = Recorder(rank=context.rank, world_size=n)
    group = Group(range(n), axis="world", context=context, recorder=recorder)
    calls = witness.calls(group, payload)
    sent = [witness.held(calls[op], gate, recorder) for op in ops_of(n)]
    for model, plan in steps_of(n).values():
        trainer = Trainer(context, model, plan, recorder=recorder)
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
    bring_loopback_up()
    print(json.dumps({ranks: counted(int(ranks)) for ranks in sys.argv[1:]}))


def counted(ranks: int) -> dict[str, dict[str, float]]:
    payload = MESSAGE // 4 // ranks * ranks * 4
    names = (*ops_of(ranks), *steps_of(ranks))
    gates = len(names) * (witness.REPEATS + 1)
    parts, counts = witness.between_gates(program, ranks, (payload,), gates=gates)
    return {
        name: {
            "ledger": sum(part[i] for part in parts),
            "kernel": min(witness.per_call(counts, i)),
            "payload": payload,
        }
        for i, name in enumerate(names)
    }


if __name__ == "__main__":
    main()
