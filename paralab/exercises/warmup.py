"""Lab 03: how many forwards a rank of a pipeline runs before its first backward."""

from __future__ import annotations

from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import Mistakes, ask
from paralab.parallel.schedules import Action, Schedule, build

SIZES = [  # rank, p, m, v
    (rank, p, m, v)
    for p, m, v in ((4, 8, 1), (2, 5, 1), (3, 1, 1), (8, 3, 1), (4, 8, 3), (2, 2, 3), (3, 9, 4))
    for rank in range(p)
]
BACKWARD_FIRST = "interleaved with rank 0's backwards first"
LAST_FIRST = "gpipe with the last backward first"
COUNT = "forwards before the first backward"


@exercise(
    Takes("warmup(rank, p, m, v)"),
    required={COUNT: f"right for {len(SIZES)} ranks of 7 pipelines, 3 of them interleaved"},
)
def warmup(tries: Tries) -> None:
    for notes, size, reply in ask(tries, SIZES):
        notes.where, right = "rank {}, p={}, m={}, v={}".format(*size), counted(*size)
        known = [(words, number) for words, number in _miscounted(*size) if number != right]
        notes.look(COUNT, reply.number(right, known, "{:g}".format, " of forwards"), "right")


def counted(rank: int, p: int, m: int, v: int) -> int:
    """The number of forwards before the first backward in this rank's list."""
    return [action.kind for action in lists_of("1f1b", p, m, v)[rank]].index("B")


def lists_of(name: str, p: int, m: int, v: int) -> Schedule:
    """The lists of a schedule by name: "gpipe", "1f1b", or one of two variants. `BACKWARD_FIRST` is
    interleaved, and in the steady phase rank 0's backward comes before the forward of its pair: so
    rank 0 needs messages in another order than rank 1 sends them. In `LAST_FIRST` backwards come in
    the reverse order of forwards, as in GPipe's paper.
    """
    if name == LAST_FIRST:
        rows = [[(s, i) for s in range(rank, v * p, p) for i in range(m)] for rank in range(p)]
        return [
            [Action(s, "F", i) for s, i in row] + [Action(s, "B", i) for s, i in reversed(row)]
            for row in rows
        ]
    schedule = build("interleaved" if v > 1 else name, pp=p, microbatches=m, virtual_stages=v)
    if name == BACKWARD_FIRST:
        row = schedule[0]
        for position in range(counted(0, p, m, v) - 1, len(row) - 1, 2):
            if row[position].kind == "F":
                row[position : position + 2] = row[position + 1], row[position]
    return schedule


def _miscounted(rank: int, p: int, m: int, v: int) -> Mistakes:
    chunks = 2 * (p - rank - 1) + (v - 1) * p + 1
    yield "the first forward of the steady phase is missing", counted(rank, p, m, v) - 1
    only = f"there are only {m * v} forwards" if m * v > 1 else "there is only 1 forward"
    yield f"{only} to run", chunks if v > 1 else p - rank
    yield "that is the interleaved warm-up, and this is 1F1B", min(v * m, chunks)
    yield from ((f"that is the count of rank {r}", counted(r, p, m, v)) for r in range(p))
    yield "that is GPipe: all forwards before the first backward", m * v
    if v > 1:
        yield "that is the count of 1F1B, and this schedule is interleaved", min(m, p - rank)
        yield f"m is not the most that there can be: a rank has v m = {v * m} forwards", m
    yield "each rank after this one adds two forwards, not one", chunks - (p - rank - 1)
    yield "the (v-1) p forwards of the other chunks are missing", chunks - (v - 1) * p
    yield "the distance to the last rank is not multiplied by v", v * (p - rank - 1) + 1
