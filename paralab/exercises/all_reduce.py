"""Lab 01: two all-reduces in plain torch.distributed: on a ring, and on two levels of links.

The ring is compared with its formulas (Patarasuk & Yuan 2009, sec. 4); its chunks are of unequal
size where N does not divide the tensor, and its time is that of a replay with computing free. The
two-level all-reduce is judged by the bytes between and inside nodes.
"""

from __future__ import annotations

from typing import Any

from paralab.exercises.diagnose import first_wrong, shifted
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import np, torch
from paralab.exercises.ring import (
    BYTES,
    CLUSTER,
    EXTRA,
    MEMORY,
    RESULT,
    look_at_calls,
    look_at_time,
)
from paralab.exercises.tries import Outcome
from paralab.theory import collectives

LENGTH = 10_001  # elements: no number of ranks divides it
RANKS = (2, 3, 4)
NODES = ((2, 2), (2, 3), (3, 2))  # nodes, ranks per node
EVEN = 12_000  # elements: a multiple of the ranks of a node
BETWEEN, INSIDE = "bytes between nodes", "bytes inside nodes"


# ---- a ring --------------------------------------------------------------------------------------
@exercise(
    Takes("ring_all_reduce(tensor)"),
    required={
        RESULT: f"{LENGTH:,} elements on N = 2, 3 and 4 ranks: the sum, in place, on every rank",
        "calls": "sends and receives between neighbours on the ring",
        BYTES: "2(N-1) S by all ranks together; at most 2 (S − its smallest chunk) by a rank",
        MEMORY: "tensors: at most one chunk, of ⌈elements/N⌉",
        "simulated time": "at most 2(N-1)(α + β S/N), α = 20 µs, 1/β = 1.25 GB/s",
    },
)
def ring_all_reduce(tries: Tries) -> None:
    size = 4 * LENGTH
    for n in RANKS:
        for notes, outcome in tries.run(summed, n, LENGTH, where=f"N={n}", unbroken=(RESULT,)):
            notes.look(RESULT, _wrong_sum(outcome, LENGTH), f"{n} ranks, all equal")
            look_at_calls(notes, outcome, "{}", "rank 0")
            largest, smallest = 4 * -(-LENGTH // n), 4 * (LENGTH // n)
            sent, most, least = outcome.sent(), 2 * (size - smallest), 2 * (size - largest)
            notes.bytes(BYTES, sent, most, _uneven(outcome), least=least)
            every = 2 * (n - 1) * size
            wrong = f"the ranks send {sum(sent):,} bytes together, required: {every:,}"
            notes.look(BYTES, wrong if sum(sent) != every else "", f"{every:,} bytes together")
            words = f"{EXTRA}, required: at most one chunk, {largest:,}"
            notes.memory(MEMORY, outcome["extra"], largest, words)
            limit = collectives.seconds("ring_all_reduce", n, size, CLUSTER.intra)
            look_at_time(notes, outcome, limit, 2 * (n - 1))


def _uneven(outcome: Outcome) -> str:
    """By how much the sizes of messages differ, in words; "" for no more than one element."""
    sizes = outcome.report.collectives["payload_bytes"]
    spread = int(sizes.max() - sizes.min()) // 4 if len(sizes) else 0
    return f"in chunks that differ by {spread:,} elements, more than one" if spread > 1 else ""


def summed(watch: Any, answer: tuple, seed: int, length: int, *more: Any) -> dict[str, Any]:
    """What every rank runs: the answer gets this rank's term of the sum, and sums in place."""
    tensor = torch.from_numpy(term(seed, watch.group.index, length))
    with watch.section() as section:
        answer[0](tensor, *more)
    return {"tensor": tensor, "extra": section.peak}


def term(seed: int, rank: int, length: int) -> np.ndarray:
    return np.random.default_rng([seed, rank]).standard_normal(length, dtype=np.float32)


def _wrong_sum(outcome: Outcome, length: int, parts: int = 1) -> str:
    """The first wrong sum, in words, or "". parts: of which a rank of a node reduces one."""
    n = len(outcome.results)
    terms = [term(outcome.seed, rank, length) for rank in range(n)]
    total = sum(one.astype("float64") for one in terms)
    named = [(f"of rank {rank}", one) for rank, one in enumerate(terms)]

    known = [("it is the mean, required: the sum", total / n)]
    known.append(("a chunk is read before the wait() of its receive", np.full(length, np.nan)))
    return first_wrong(
        "",
        outcome["tensor"],
        [total] * n,
        start=terms,
        terms=lambda _: named,
        others=lambda _: shifted(named, parts),
        known=lambda _: known,
    )


# ---- two levels of links -------------------------------------------------------------------------
@exercise(
    Takes("hierarchical_all_reduce(tensor, ranks_per_node)"),
    required={
        RESULT: "2 nodes of 2 and of 3 ranks, 3 nodes of 2: the sum, in place, on every rank",
        BETWEEN: "exactly 2(M-1)/M · S/k sent by each rank, on M nodes",
        INSIDE: "exactly 2(k-1)/k · S sent by each rank",
        MEMORY: "tensors: at most one copy of the tensor and a k-th",
    },
)
def hierarchical_all_reduce(tries: Tries) -> None:
    for nodes, k in NODES:
        n, size = nodes * k, 4 * EVEN
        settings = {"where": f"{nodes} nodes of {k}", "nodes": nodes, "unbroken": (RESULT,)}
        for notes, outcome in tries.run(summed, n, EVEN, k, **settings):
            notes.look(RESULT, _wrong_sum(outcome, EVEN, k), f"{n} ranks, all equal")
            between, inside = 2 * (nodes - 1) * size // n, 2 * (k - 1) * size // k
            far, near = (outcome.sent(level=level) for level in ("inter", "intra"))
            swapped = 2 * (nodes - 1) * size // nodes  # a reduce-scatter and an all-gather
            if set(far) == {swapped} and set(near) == {2 * (k - 1) * size // n}:
                wrong = f"rank 0 sends {swapped:,} bytes to other nodes, required: {between:,}; "
                wrong += "the groups are exchanged: tensors go between nodes, their parts inside"
                notes.look(BETWEEN, wrong, "")
            notes.bytes(BETWEEN, far, between, "to other nodes")
            notes.bytes(INSIDE, near, inside, "to its node")
            most = size * (k + 1) // k
            words = f"{EXTRA}, required: at most {most:,}; the tensor has {size:,}"
            notes.memory(MEMORY, outcome["extra"], most, words)
