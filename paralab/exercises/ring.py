"""Lab 01: the second half of a ring all-reduce, from sends and receives between neighbours.

The checker traces the answer on 2, 3 and 4 real ranks in strict order mode, and holds it against
the ring's own numbers: (n-1)/n S sent by every rank, one chunk of extra memory, and
(n-1)(alpha + S/n / beta) on a stated link (Patarasuk & Yuan 2009, sec. 4). Time is that of a replay
on that link, with computing free: the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paralab.checks import real
from paralab.exercises.exercise import Exercise
from paralab.exercises.verdict import NOT_STARTED, Notes, Verdict, attempt
from paralab.spec import Cluster, Link
from paralab.theory.traffic import BOOKKEEPING, POINT_TO_POINT

if TYPE_CHECKING:
    import numpy as np

    from paralab.report.report import Report

RANKS = (2, 3, 4)
CHUNK = 5000  # elements of 4 bytes: k
CLUSTER = Cluster(
    name="10 Gbit/s", flops=1e12, memory_bandwidth=1e11, intra=Link(alpha=20e-6, bandwidth=1.25e9)
)
TIMEOUT_S = 10.0  # without any sign of life: four ranks that exchange 60 kB need milliseconds

RESULT, CALLS, BYTES, MEMORY, TIME = (
    "result",
    "calls",
    "bytes per rank",
    "extra memory",
    "simulated time",
)

TASK = """
**Your turn.** After the reduce-scatter every rank owns one finished chunk: rank r has chunk
(r + 1) % n, and the other chunks of its tensor are of no use. Write the other half:

`ring_all_gather(group, tensor)` hands the finished chunks round until every rank has all n, in
place. `tensor` is flat, n chunks of k elements. `group.index` and `group.size` say who you are,
`group.exchange([("send", chunk, rank), ("recv", chunk, rank)]).wait()` talks to your neighbours,
and to nobody else.

`pl.exercises.all_gather_half.check(ring_all_gather)`
"""

ASKED = (
    (RESULT, "n = 2, 3, 4: every rank has all n chunks, each in its place"),
    (CALLS, "sends and receives between neighbours on the ring"),
    (BYTES, "exactly (n-1)/n S, S the whole tensor"),
    (MEMORY, "at most one chunk"),
    (TIME, "at most (n-1)(α + S/n / β), α = 20 µs, β = 1.25 GB/s"),
)

HINTS = (
    "in each of n-1 steps you send the chunk that you finished or received last, to your right, "
    "and receive one from your left.",
    "step 0: rank r sends chunk r+1 and receives chunk r. Which chunk does it send in step 1, and "
    "which one comes? All numbers modulo n.",
    "for step in range(n - 1): send chunks[(r + 1 - step) % n] to the right and receive "
    "chunks[(r - step) % n] from the left, both in one exchange, and wait. Chunks are views of the "
    "tensor: what is received into one is where it belongs.",
)


def check(answer: Callable[..., Any], *, timeout: float = TIMEOUT_S) -> Verdict:
    """Trace ``answer(group, tensor)`` on 2, 3 and 4 real ranks; about a second when ranks are warm.

    timeout  seconds without a sign of life until a deadlock is called one

    Raises ValueError for a wrong timeout; an answer that is wrong, fails or hangs is a Verdict.
    """
    from paralab.trace import trace

    timeout = real("timeout", timeout, above=0.0)
    notes = Notes("all_gather_half", ASKED)
    if not callable(answer):
        notes.note(RESULT, "nothing to call", False, f"asked is a function, yours is {answer!r}")
        return notes.verdict()
    for n in RANKS:
        report, trouble = attempt(
            lambda n=n: trace(hand_round, n, (answer, CHUNK), memory=True, timeout=timeout)
        )
        if trouble == NOT_STARTED:
            return notes.verdict()
        if trouble:
            notes.note(RESULT, f"n={n}: failed", False, f"n={n}: {trouble}")
            return notes.verdict()
        _look(notes, report, n)
    return notes.verdict()


def hand_round(group: Any, answer: Callable[..., Any], k: int) -> Any:
    """What every rank runs: a tensor of which one chunk is finished, given to ``answer``.

    Element i of the finished tensor is i; what is not finished is -1.
    """
    import torch

    n, own = group.size, (group.index + 1) % group.size
    tensor = torch.full((n * k,), -1.0, device=group.context.device)
    torch.arange(own * k, (own + 1) * k, out=tensor[own * k : (own + 1) * k])
    answer(group, tensor)
    return tensor


def _look(notes: Notes, report: Report, n: int) -> None:
    """One traced run against every limit."""
    chunk, whole = 4 * CHUNK, 4 * CHUNK * n
    wrong = next((w for r, t in enumerate(report.results) if (w := _wrong_chunk(t, r, n))), "")
    notes.note(RESULT, wrong or f"n={n}: every chunk on every rank", not wrong, wrong)

    calls = report.collectives[~report.collectives["phase"].isin(BOOKKEEPING)]
    rows = calls.sort_values(["rank", "span"]).to_dict("records")
    strange = next((w for row in rows if (w := _strange_call(row, n))), "")
    count = sum(row["op"] == "send" and row["rank"] == 0 for row in rows)
    notes.note(
        CALLS, strange or f"n={n}: {count} sends by each rank", not strange, f"n={n}: {strange}"
    )

    sent = calls.groupby("rank")["wire_bytes"].sum()
    per_rank = [int(sent.get(rank, 0)) for rank in range(n)]
    worst = max(range(n), key=lambda r: (abs(per_rank[r] - (whole - chunk)), -r))
    said = f"n={n}: rank {worst} sends {per_rank[worst]:,} bytes, asked are {whole - chunk:,}"
    if not per_rank[worst]:
        said = f"n={n}: rank {worst} sends nothing through the group"
    exact = per_rank[worst] == whole - chunk
    notes.note(BYTES, f"n={n}: {whole - chunk:,} bytes" if exact else said, exact, said)

    extra = [peak - whole for peak in report.meta["peak_bytes"]]  # the tensor is hand_round's
    worst = max(range(n), key=lambda r: (extra[r], -r))
    said = f"n={n}: rank {worst} takes {extra[worst]:,} bytes, one chunk is {chunk:,}"
    fits = extra[worst] <= chunk
    notes.note(MEMORY, f"n={n}: {extra[worst]:,} bytes" if fits else said, fits, said)

    limit = (n - 1) * CLUSTER.intra.seconds(chunk)
    time = report.replay(CLUSTER, compute=0.0).step_time
    said = f"n={n}: {1e6 * time:.1f} µs, of {1e6 * limit:.1f} µs asked"
    notes.note(
        TIME, said.replace(", of", " of").removesuffix(" asked"), time <= limit * (1 + 1e-9), said
    )


def _wrong_chunk(tensor: np.ndarray, rank: int, n: int) -> str:
    """The first wrong element of a rank's tensor, in words; "" if there is none."""
    import numpy as np

    wanted = np.arange(n * CHUNK, dtype=np.float32)
    wrong = np.flatnonzero(tensor != wanted)
    if not len(wrong):
        return ""
    i = int(wrong[0])
    place, value = f"n={n}, rank {rank}, chunk {i // CHUNK}", float(tensor[i])
    if value == -1:
        return f"{place}: still unfinished at element {i % CHUNK}"
    if 0 <= value < n * CHUNK and value % 1 == 0 and value % CHUNK == i % CHUNK:
        return f"{place}: holds the numbers of chunk {int(value) // CHUNK}"
    return f"{place}, element {i % CHUNK}: {value:g}, asked {wanted[i]:g}"


def _strange_call(row: dict[str, Any], n: int) -> str:
    if row["op"] not in POINT_TO_POINT:
        return f"rank {row['rank']} calls group.{row['op']}, which is the thing to be written"
    if (row["rank"] - row["peer"]) % n not in (1, n - 1):
        way = "to" if row["op"] == "send" else "from"
        return f"rank {row['rank']} does a {row['op']} {way} rank {row['peer']}, no neighbour of it"
    return ""


all_gather_half = Exercise(
    name="all_gather_half", lab="01", task=TASK, asked=ASKED, hints=HINTS, checker=check
)
