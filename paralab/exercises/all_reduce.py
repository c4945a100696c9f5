"""Lab 01: all-reduces of one's own, in plain torch.distributed: a ring, and two levels of links.

The ring is held against its own numbers (Patarasuk & Yuan 2009, sec. 4): 2(N-1)/N S sent by every
rank, one chunk of extra memory, and 2(N-1)(alpha + S/N beta) on a stated link. Chunks are of
unequal size where N does not divide the tensor. The two-level one is judged by the bytes that cross
nodes: 2(n-1)/n of a k-th, on n nodes of k ranks. Time is that of a replay with computing free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paralab.exercises.diagnose import first_wrong
from paralab.exercises.exercise import exercise
from paralab.exercises.late import np, torch
from paralab.exercises.ring import CLUSTER, look_at_calls, look_at_time
from paralab.exercises.tries import Found, Takes, Try, on_ranks
from paralab.exercises.verdict import Notes, look_at_bytes, look_at_memory
from paralab.theory import collectives

LENGTH = 10_001  # elements: no number of ranks divides it
RANKS = (2, 3, 4)
NODES, PER_NODE, EVEN = 2, (2, 3), 12_000  # elements: a multiple of the ranks of a node
RING_ASKED = {
    "result": f"N = 2, 3, 4, {LENGTH:,} elements: the sum, in place, on every rank",
    "calls": "sends and receives between neighbours on the ring",
    "bytes per rank": "2(N-1) S together; no rank more than 2 (S − its smallest chunk)",
    "extra memory": "at most one chunk, of ⌈elements/N⌉",
    "simulated time": "at most 2(N-1)(α + β S/N), α = 20 µs, 1/β = 1.25 GB/s",
}
RESULT, _, BYTES, MEMORY, _ = RING_ASKED
LEVELS_ASKED = {
    "result": "2 nodes of 2 and of 3 ranks: the sum, in place, on every rank",
    "bytes between nodes": "exactly S/k sent by each of the k ranks of a node",
    "bytes inside nodes": "exactly 2(k-1)/k S sent by each rank",
    "extra memory": "at most one copy of the tensor and a k-th",
}
RESULT, BETWEEN, INSIDE, MEMORY = LEVELS_ASKED


# ---- a ring --------------------------------------------------------------------------------------
@exercise(Takes("a function", "ring_all_reduce(tensor)"), lab="01", asked=RING_ASKED)
def ring_all_reduce(tries: Sequence[Try], timeout: float) -> None:
    for n in RANKS:
        for notes, found in on_ranks(tries, added, n, (LENGTH,), where=f"N={n}", timeout=timeout):
            _look_at_ring(notes, found, n)


def added(watch: Any, answer: tuple, seed: int, length: int, *more: Any) -> dict[str, Any]:
    """What every rank runs: the answer gets this rank's term of the sum."""
    tensor = torch.from_numpy(term(seed, watch.group.index, length))
    with watch.section() as section:
        answer[0](tensor, *more)
    return {"tensor": tensor, "extra": section.peak, "seed": seed}


def term(seed: int, rank: int, length: int) -> np.ndarray:
    return np.random.default_rng([seed, rank]).standard_normal(length, dtype=np.float32)


def _look_at_ring(notes: Notes, found: Found, n: int) -> None:
    where, largest, smallest = f"N={n}", 4 * -(-LENGTH // n), 4 * (LENGTH // n)
    notes.look(RESULT, where, _wrong_sum(found.results, LENGTH), f"{n} ranks, all equal")

    look_at_calls(notes, where, found, "{}", "rank 0")

    sent, least, most = found.sent(), 2 * (4 * LENGTH - largest), 2 * (4 * LENGTH - smallest)
    worst = max(range(n), key=lambda rank: (sent[rank] - most, -rank))
    wrong = ""
    if not sent[worst]:
        wrong = "nothing is sent"
    elif sent[worst] > most or min(sent) < least or sum(sent) != 2 * (n - 1) * 4 * LENGTH:
        wrong = f"rank {worst} sends {sent[worst]:,} bytes, required: {least:,} to {most:,}; "
        wrong += f"together {sum(sent):,}, required: {8 * (n - 1) * LENGTH:,}"
    notes.look(BYTES, where, wrong, f"{sum(sent):,} bytes together")

    extra = [result["extra"] for result in found.results]
    words = f"takes {{held}} bytes, one chunk is {largest:,}"
    look_at_memory(notes, MEMORY, where, extra, largest, words)

    limit = collectives.seconds("ring_all_reduce", n, 4 * LENGTH, CLUSTER.intra)
    look_at_time(notes, where, found, limit)


def _wrong_sum(results: Sequence[Mapping[str, Any]], length: int) -> str:
    """The first wrong element of the first rank that has one, in words, or ""."""
    n, seed = len(results), results[0]["seed"]
    terms = [term(seed, rank, length) for rank in range(n)]
    total = sum(one.astype("float64") for one in terms)

    def known(rank: int) -> Iterable[tuple[str, np.ndarray]]:
        yield "it is the mean, required: the sum", total / n

    return first_wrong(
        "",
        [result["tensor"] for result in results],
        [total] * n,
        start=terms,
        terms=lambda _: [(f"of rank {rank}", one) for rank, one in enumerate(terms)],
        known=known,
    )


# ---- two levels of links -------------------------------------------------------------------------
@exercise(
    Takes("a function", "hierarchical_all_reduce(tensor, ranks_per_node)"),
    lab="01",
    asked=LEVELS_ASKED,
)
def hierarchical_all_reduce(tries: Sequence[Try], timeout: float) -> None:
    for k in PER_NODE:
        n, where = NODES * k, f"{NODES} nodes of {k}"
        for notes, found in on_ranks(
            tries, added, n, (EVEN, k), where=where, timeout=timeout, nodes=NODES
        ):
            notes.look(RESULT, where, _wrong_sum(found.results, EVEN), f"{n} ranks, all equal")
            between = 2 * (NODES - 1) * 4 * EVEN // (NODES * k)
            look_at_bytes(notes, BETWEEN, where, found.sent(level="inter"), between, "to others")
            inside = 2 * (k - 1) * 4 * EVEN // k
            look_at_bytes(notes, INSIDE, where, found.sent(level="intra"), inside, "to its node")
            extra = [result["extra"] for result in found.results]
            words = f"takes {{held}} bytes, the tensor has {4 * EVEN:,}"
            look_at_memory(notes, MEMORY, where, extra, 4 * EVEN * (k + 1) // k, words)
