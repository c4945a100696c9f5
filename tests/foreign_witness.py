"""Count on the loopback interface what an observed step of every foreign program moves.

python tests/foreign_witness.py RANKS    prints {program: [recorded bytes, the kernel's]}
"""

from __future__ import annotations

import json
import sys

import cloudpickle

import foreign_programs
import wire_witness
from foreign_programs import PROGRAMS
from paralab.instruments.witness import REPEATS, between_gates, per_call
from paralab.theory.traffic import BOOKKEEPING

cloudpickle.register_pickle_by_value(foreign_programs)


def count(context, gate, names):
    """Steps of each program between gates. Returns the recorded bytes of one step of each."""
    from paralab.observing import _observed

    sent = []
    for name in names:
        with _observed(context, {"marked": True, "memory_steps": 0}) as observer:
            step = PROGRAMS[name](context.world_size)
            for _ in range(2):
                step()
                observer.end_step()
            gate()
            for _ in range(REPEATS):
                step()
                observer.end_step()
                gate()
            calls = observer.part()["collectives"]
        rows = zip(calls["step"], calls["phase"], calls["wire_bytes"], strict=True)
        last = max(calls["step"])
        sent.append(sum(size for k, phase, size in rows if k == last and phase not in BOOKKEEPING))
    return sent


if __name__ == "__main__":
    wire_witness.bring_loopback_up()
    ranks, names = int(sys.argv[1]), list(PROGRAMS)
    parts, counts = between_gates(count, ranks, (names,), gates=len(names) * (REPEATS + 1))
    seen = {
        name: [sum(part[i] for part in parts), min(per_call(counts, i))]
        for i, name in enumerate(names)
    }
    print(json.dumps(seen))
