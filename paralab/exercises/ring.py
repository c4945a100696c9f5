"""Lab 01: the second half of a ring all-reduce, from sends and receives between neighbours.

The checker traces the answer on real ranks in strict order mode, and compares it with the numbers
of a ring (Patarasuk & Yuan 2009, sec. 4). Its time is that of a replay on a stated link, in which
computing takes none: so it is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paralab.exercises.diagnose import first_wrong
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import np, torch
from paralab.exercises.tries import Outcome
from paralab.exercises.verdict import Notes, first
from paralab.spec import Cluster, Link
from paralab.theory.traffic import POINT_TO_POINT

RANKS = (2, 3, 4)
CHUNK = 5000  # elements of 4 bytes: k
CLUSTER = Cluster(
    name="10 Gbit/s", flops=1e12, memory_bandwidth=1e11, intra=Link(alpha=20e-6, bandwidth=1.25e9)
)

REQUIRED = {
    "result": "N = 2, 3, 4: every rank has all N chunks, each in its place",
    "calls": "sends and receives between neighbours on the ring",
    "bytes per rank": "exactly (N-1)/N · S, where S is the size of the whole tensor",
    "extra memory": "tensors: at most one chunk",
    "simulated time": "at most (N-1)(α + β S/N), α = 20 µs, 1/β = 1.25 GB/s",
}
RESULT, CALLS, BYTES, MEMORY, TIME = REQUIRED
EXTRA = "takes {held} bytes in addition to the tensor"


@exercise(Takes("f(group, tensor)"), required=REQUIRED)
def all_gather_half(tries: Tries) -> None:
    chunk = 4 * CHUNK
    for n in RANKS:
        for notes, outcome in tries.run(hand_round, n, where=f"n={n}", unbroken=(RESULT,)):
            notes.look(RESULT, _wrong_chunk(outcome), "every chunk on every rank")
            look_at_calls(notes, outcome, "group.{}", "each rank")
            notes.bytes(BYTES, outcome.sent(), (n - 1) * chunk)
            words = f"{EXTRA}, required: at most one chunk, {chunk:,}"
            notes.memory(MEMORY, outcome["extra"], chunk, words)
            look_at_time(notes, outcome, (n - 1) * CLUSTER.intra.seconds(chunk), n - 1)


def hand_round(watch: Any, answer: tuple, seed: int) -> dict[str, Any]:
    """What every rank runs: the answer gets a tensor of which one chunk is finished; the other
    chunks are -1.
    """
    n, own = watch.group.size, (watch.group.index + 1) % watch.group.size
    tensor = torch.full((n, CHUNK), -1.0)
    tensor[own] = torch.from_numpy(chunks(n, seed)[own])
    tensor = tensor.view(-1)
    with watch.section() as section:
        answer[0](watch.group, tensor)
    return {"tensor": tensor, "extra": section.peak}


def chunks(n: int, seed: int) -> np.ndarray:
    """All finished chunks, (n, k); rank r begins with chunk r + 1."""
    return np.random.default_rng([seed, n]).random((n, CHUNK), dtype=np.float32)


def _wrong_chunk(outcome: Outcome) -> str:
    n = len(outcome.results)
    right = chunks(n, outcome.seed)

    def known(number: int) -> Iterator[tuple[str, np.ndarray]]:
        yield "no finished chunk was received into it", np.full(CHUNK, -1.0)
        for other in range(n):
            if other != number:
                yield f"it holds the numbers of chunk {other}", right[other]

    for rank, tensor in enumerate(outcome["tensor"]):
        if np.shape(tensor) != (n * CHUNK,):
            return f"rank {rank}: the tensor has shape {np.shape(tensor)} now"
        rows = tensor.reshape(n, CHUNK)
        wrong = first_wrong("", rows, right, tolerance=0.0, known=known, ranks="chunk {}".format)
        if wrong:
            return f"rank {rank}, {wrong}"
    return ""


# ---- limits that both rings have -----------------------------------------------------------------
def look_at_calls(notes: Notes, outcome: Outcome, named: str, by: str) -> None:
    """Record whether the answer only sends to and receives from its neighbours.

    named  how the answer writes a call: "group.{}"
    by     whose sends the row counts, in words; the count is that of rank 0
    """
    n, calls = len(outcome.results), outcome.report.collectives
    rows = calls.sort_values(["rank", "span"]).to_dict("records")
    count = sum(row["op"] == "send" and row["rank"] == 0 for row in rows)
    notes.look(CALLS, first(_strange_call(row, n, named) for row in rows), f"{count} sends by {by}")


def _strange_call(row: dict[str, Any], n: int, named: str) -> str:
    rank, op, peer = (row[column] for column in ("rank", "op", "peer"))
    if op not in POINT_TO_POINT:
        return f"rank {rank} calls {named.format(op)}, required: only sends and receives"
    if (rank - peer) % n in (1, n - 1):
        return ""
    does = "sends to" if op == "send" else "receives from"
    return f"rank {rank} {does} rank {peer}, which is not its neighbour on the ring"


def look_at_time(notes: Notes, outcome: Outcome, most: float, messages: int) -> None:
    """Record whether a replay of the calls on `CLUSTER` takes at most ``most`` seconds, in which a
    rank can send so many ``messages`` of one chunk.
    """
    sends = outcome.report.collectives.query("op == 'send'")["rank"].value_counts()
    why = ": the messages of one step are sent one after the other, not at the same time"
    if notes.broke((CALLS,)):
        why = ""
    elif max(sends, default=0) > messages:
        why = f": rank {sends.idxmax()} sends {max(sends)} messages, required: {messages}"
    time = outcome.report.replay(CLUSTER, compute=0.0).step_time
    notes.at_most(TIME, time, most, lambda seconds: f"{1e6 * seconds:.1f} µs", why)
