"""Lab 08: the warm-up, groups of rows and columns, and the last exercise, Cannon's algorithm.

Cannon (1969) multiplies blocks on a q x q torus with messages between neighbours: after a first
move rank (i, j) has X_il and W_lj with l = i + j, and with every further one the next l. Answers
run on 2 x 2 and 4 x 4 ranks. Products are compared with those of whole matrices, calls must be
messages between two ranks, each rank sends q blocks of X and of W at most, and holds two of each
in addition to its own: on 4 x 4 ranks a gathered row or column is three. Shapes and data are those
of summa.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paralab.exercises.diagnose import TOLERANCE, first_wrong, near
from paralab.exercises.exercise import Exercise
from paralab.exercises.late import dist, np, torch, watched
from paralab.exercises.summa import SCALARS, SHAPES, blocks
from paralab.exercises.tries import Found, Takes, Try, on_ranks
from paralab.exercises.verdict import Notes

GROUP_GRIDS = (2, 3)
GRIDS = (2, 4)  # q; with 2, left and right are the same, with 3, two received blocks are a row
GROUPS = {"row": lambda i, j, q: [i * q + b for b in range(q)],
          "column": lambda i, j, q: [a * q + j for a in range(q)]}  # fmt: skip
WORKS = "a sum over each"
PRODUCT, CALLS, SENT, MEMORY = "Y", "calls", "blocks sent", "memory"
AT_FIRST = " before the first product"
FIRST = {  # words: places that X goes left and W goes up at first, on rank (i, j)
    f"nothing was moved{AT_FIRST}": lambda i, j: (0, 0),
    f"W was not moved{AT_FIRST}": lambda i, j: (i, 0),
    f"X was not moved{AT_FIRST}": lambda i, j: (0, j),
    f"X was moved to the right and W down{AT_FIRST}": lambda i, j: (-i, -j),
    f"X was moved to the right{AT_FIRST}": lambda i, j: (-i, j),
    f"W was moved down{AT_FIRST}": lambda i, j: (i, -j),
}


# ---- groups --------------------------------------------------------------------------------------
def check_groups(tries: Sequence[Try], timeout: float) -> None:
    for q in GROUP_GRIDS:
        for notes, found in on_ranks(tries, summed, q * q, (q,), where=f"q={q}", timeout=timeout):
            for limit, members in GROUPS.items():
                wrong = _wrong_group(found.results, limit, members, q)
                notes.look(limit, f"q={q}", wrong, "right, on every rank")
            wrong = next((f"rank {r}: the sums are {one['sums']}" for r, one in
                          enumerate(found.results) if one["sums"] != one["right"]), "")  # fmt: skip
            notes.look(WORKS, f"q={q}", wrong, "right, on every rank")


def summed(watch: Any, answer: tuple, seed: int, q: int) -> dict[str, Any]:
    """What every rank runs: the members of both groups, and a sum of ranks over each."""
    given = answer[0](q)
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        what = f"{len(given)} of them" if isinstance(given, (tuple, list)) else type(given).__name__
        raise ValueError(f"required: a row and a column, two groups, this is {what}")
    found, rank = {"sums": [], "right": []}, dist.get_rank()
    for name, group in zip(GROUPS, given, strict=True):
        found[name] = dist.get_process_group_ranks(group)
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        found["sums"].append(total.item())
        found["right"].append(float(sum(GROUPS[name](*divmod(rank, q), q))))
    return found


def _wrong_group(results: Sequence[dict], limit: str, members: Any, q: int) -> str:
    for rank, one in enumerate(results):
        right, other = members(*divmod(rank, q), q), "column" if limit == "row" else "row"
        if list(one[limit]) != right:
            said = f"rank {rank}, at {divmod(rank, q)}: the {limit} has the ranks {one[limit]}, "
            said += f"required: {right}"
            swapped = list(one[limit]) == GROUPS[other](*divmod(rank, q), q)
            return said + f"; it is its {other}" * swapped
    return ""


# ---- Cannon's algorithm --------------------------------------------------------------------------
def check(tries: Sequence[Try], timeout: float) -> None:
    for q in GRIDS:
        for notes, found in on_ranks(tries, multiply, q * q, (q,), where=f"q={q}", timeout=timeout):
            _look(notes, found, q)


def multiply(watch: Any, answer: tuple, seed: int, q: int) -> dict[str, Any]:
    """What every rank runs: a product of each of SHAPES. Returns blocks, and the most bytes that
    each had in addition to its arguments.
    """
    i, j = divmod(watch.group.index, q)
    found: dict[str, Any] = {"y": [], "peak": [], "seed": seed}
    for number in range(len(SHAPES)):
        x, w = (torch.from_numpy(one[i, j]) for one in blocks(seed, q, number)[:2])
        watch.label = f"{number}"
        with watch.section() as section:
            y = answer[0](x, w, q)
        found["y"].append(watched.array(y))
        found["peak"].append(section.peak)
        del x, w, y  # so that they are not counted where the next case begins
    return found


def _look(notes: Notes, found: Found, q: int) -> None:
    """One run against every limit."""
    where, cases = f"q={q}", range(len(SHAPES))
    wrong = next((w for number in cases if (w := _wrong(found.results, number, q))), "")
    notes.look(PRODUCT, where, wrong, "every block")
    used = found.report.collectives["op"].unique()
    other = [op for op in used if op not in ("send", "recv")]
    notes.look(CALLS, where, f"calls {other[0]}" if other else "", "messages between two ranks")
    for number, (m, k, n) in enumerate(SHAPES):
        most, sent = 4 * q * k * (m + n), found.sent(f"{number}")
        worst = max(range(q * q), key=lambda rank: (sent[rank], -rank))
        wrong = f"rank {divmod(worst, q)} sends {sent[worst]:,} bytes, {q} blocks of X and of W "
        wrong += f"are {most:,}"
        notes.look(SENT, where, wrong * (sent[worst] > most), f"{sent[worst]:,} bytes")
        limit = 4 * (2 * k * (m + n) + 2 * m * n) + SCALARS
        peaks = [result["peak"][number] for result in found.results]
        worst = max(range(q * q), key=lambda rank: (peaks[rank], -rank))
        wrong = f"rank {divmod(worst, q)} holds {peaks[worst]:,} bytes in addition to x and w, "
        wrong += f"required: at most {limit:,}"
        notes.look(MEMORY, where, wrong * (peaks[worst] > limit), f"{peaks[worst]:,} bytes")


def _wrong(results: Sequence[dict], number: int, q: int) -> str:
    """The first rank whose block of Y is wrong, in words, or "". A mistake in the moves is named if
    it explains the blocks of all ranks: on some ranks several mistakes have the same result.
    """
    x, w = (one.astype("float64") for one in blocks(results[0]["seed"], q, number)[:2])
    places = [divmod(rank, q) for rank in range(q * q)]
    found = [result["y"][number] for result in results]
    right = [sum(x[i, step] @ w[step, j] for step in range(q)) for i, j in places]
    allowed = TOLERANCE * max(abs(block).max() for block in right)

    def products(first: Any, steps: Sequence[int], up: int = 1) -> list[np.ndarray]:
        """Each rank's sum over steps. X goes one place left after each, and W ``up`` places up."""
        moves = [(i, j, *first(i, j)) for i, j in places]
        return [
            sum(x[i, (j + left + s) % q] @ w[(i + above + up * s) % q, j] for s in steps)
            for i, j, left, above in moves
        ]

    def mistakes() -> Iterator[tuple[str, list[np.ndarray]]]:
        def own(i: int, j: int) -> tuple[int, int]:
            return 0, 0

        def moved(i: int, j: int) -> tuple[int, int]:
            return i, j

        yield "nothing was moved, it is the product of the rank's own blocks", products(own, [0])
        yield "the last of the q products is missing", products(moved, range(q - 1))
        crossed = "X goes left and W goes down in between, or X right and W up"
        yield crossed, products(moved, range(q), -1)
        for words, first in FIRST.items():
            yield words, products(first, range(q))

    def known(rank: int) -> Iterator[tuple[str, np.ndarray]]:
        for words, every in mistakes():
            if all(near(one, other, allowed) for one, other in zip(found, every, strict=True)):
                yield words, found[rank]

    return first_wrong(
        "block of Y",
        found,
        right,
        terms=lambda rank: [
            (f"X_{places[rank][0]}{step} W_{step}{places[rank][1]}",
             x[places[rank][0], step] @ w[step, places[rank][1]]) for step in range(q)
        ],
        known=known,
        ranks=lambda rank: f"rank {places[rank]}",
    )  # fmt: skip


grid_groups = Exercise(
    name="grid_groups",
    lab="08",
    asked={
        "row": "on 2 x 2 and on 3 x 3 ranks: the ranks of this rank's row",
        "column": "the ranks of its column",
        WORKS: "an all-reduce in the row and one in the column",
    },
    takes=(Takes("a function", "row_and_column(q)"),),
    checker=check_groups,
)
cannon = Exercise(
    name="cannon",
    lab="08",
    asked={
        PRODUCT: "on 2 x 2 and on 4 x 4 ranks: block (i, j) of X W on rank (i, j)",
        CALLS: "messages between two ranks only",
        SENT: "by each rank at most q blocks of X and q blocks of W",
        MEMORY: "in addition to x and w: two blocks of X and of W, y, and one product",
    },
    takes=(Takes("a function", "cannon(x, w, q)"),),
    checker=check,
)
