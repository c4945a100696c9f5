"""Lab 01: half a ring all-reduce, a whole one, and one on two levels of links.

The rings are compared with their formulas (Patarasuk & Yuan 2009, sec. 4), and their time is that
of a replay on a stated link, in which computing takes none: so it is the same on every machine.
"""

from __future__ import annotations

from typing import Any

from paralab.exercises.diagnose import first_wrong, shifted
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import np, torch
from paralab.exercises.tries import Outcome
from paralab.exercises.verdict import Notes, first
from paralab.spec import Cluster, Link
from paralab.theory import collectives
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
EXTRA = "takes {} bytes in addition to the tensor"
LENGTH = 10_001  # elements: no number of ranks divides it
NODES = ((2, 2), (2, 3), (3, 2))  # nodes, ranks per node
EVEN = 12_000  # elements: a multiple of the ranks of a node
BETWEEN, INSIDE = "bytes between nodes", "bytes inside nodes"


# ---- half a ring ---------------------------------------------------------------------------------
@exercise(Takes("f(group, tensor)"), required=REQUIRED)
def all_gather_half(tries: Tries) -> None:
    chunk = 4 * CHUNK
    for n in RANKS:
        for notes, outcome in tries.run(hand_round, n, where=f"n={n}", unbroken=(RESULT,)):
            notes.look(RESULT, _wrong_chunk(outcome), "every chunk on every rank")
            look_at_calls(notes, outcome, "group.{}", "each rank")
            notes.bytes(BYTES, outcome.sent(), (n - 1) * chunk)
            _look_at_memory(notes, outcome, chunk)
            look_at_time(notes, outcome, (n - 1) * CLUSTER.intra.seconds(chunk), n - 1)


def hand_round(watch: Any, answer: tuple, seed: int) -> dict[str, Any]:
    """What every rank runs: one chunk of the answer's tensor is finished, the others are -1."""
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

    def known(chunk: int) -> list[tuple[str, Any]]:
        added = right[chunk].astype("float32") - 1  # in which the answer computes it, too
        none = "no finished chunk was received into it", np.full(CHUNK, -1.0)
        return [none, ("what is received is added to what was there", added)]

    how = {"tolerance": 0.0, "known": known, "ranks": "chunk {}".format}
    for rank, tensor in enumerate(outcome["tensor"]):
        if np.shape(tensor) != (n * CHUNK,):
            return f"rank {rank}: the tensor has shape {np.shape(tensor)} now"
        if wrong := first_wrong("", tensor.reshape(n, CHUNK), right, **how):
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


def _look_at_memory(notes: Notes, outcome: Outcome, chunk: int) -> None:
    why = ", one chunk"
    if len(outcome.results) > 2 and max(outcome["extra"]) <= 2 * chunk:
        why += "; one buffer is enough, made before the loop: one per step needs room for two"
    notes.memory(MEMORY, outcome["extra"], chunk, EXTRA, why)


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


# ---- a ring --------------------------------------------------------------------------------------
@exercise(
    Takes("ring_all_reduce(tensor)"),
    required={
        RESULT: f"{LENGTH:,} elements on N = 2, 3 and 4 ranks: the sum, in place, on every rank",
        CALLS: REQUIRED[CALLS],
        BYTES: "2(N-1) S by all ranks together; at most 2 (S − its smallest chunk) by a rank",
        MEMORY: "tensors: at most one chunk, of ⌈elements/N⌉",
        TIME: "at most 2(N-1)(α + β S/N), α = 20 µs, 1/β = 1.25 GB/s",
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
            _look_at_memory(notes, outcome, largest)
            limit = collectives.seconds("ring_all_reduce", n, size, CLUSTER.intra)
            look_at_time(notes, outcome, limit, 2 * (n - 1))


def _uneven(outcome: Outcome) -> str:
    """By how much the sizes of messages differ, if by more than one element, in words, or ""."""
    sizes = outcome.report.collectives["payload_bytes"]
    spread = int(sizes.max() - sizes.min()) // 4 if len(sizes) else 0
    return f"in chunks that differ by {spread:,} elements, more than one" if spread > 1 else ""


def summed(watch: Any, answer: tuple, seed: int, length: int, *more: Any) -> dict[str, Any]:
    """What every rank runs: the answer gets this rank's term of the sum, and sums in place."""
    tensor = torch.from_numpy(term(seed, watch.group.index, length))
    with watch.section() as section:
        returned = answer[0](tensor, *more)
    unread = isinstance(returned, torch.Tensor) and returned is not tensor
    return {"tensor": tensor, "extra": section.peak, "unread": unread}


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
    added = np.tile(total.reshape(parts, -1).sum(axis=0), parts)
    alone = "the ranks that add up one part are not a group of their own"
    known.append((f"it is the sum of all parts: {alone}", added))
    wrong = first_wrong(
        "",
        outcome["tensor"],
        [total] * n,
        start=terms,
        terms=lambda _: named,
        others=lambda _: shifted(named, parts),
        known=lambda _: known,
    )
    unread = "; the tensor that it returns is not read: the sum has to be in its argument"
    return wrong + unread * bool(wrong and any(outcome["unread"]))


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
            why, most = "", max(far)
            if set(far) == {swapped} and set(near) == {2 * (k - 1) * size // n}:
                why = "the groups are exchanged: tensors go between nodes, their parts inside"
            elif far.count(0) == n - nodes and sum(far) == n * between:
                why = f"rank {far.index(0)} sends none: one rank of each node sends for all of it"
            if why:
                wrong = f"rank {far.index(most)} sends {most:,} bytes to other nodes, required: "
                notes.look(BETWEEN, f"{wrong}{between:,}; {why}", "")
            notes.bytes(BETWEEN, far, between, "to other nodes")
            notes.bytes(INSIDE, near, inside, "to its node")
            most, why = size * (k + 1) // k, f"; the tensor has {size:,}"
            notes.memory(MEMORY, outcome["extra"], most, EXTRA, why)
