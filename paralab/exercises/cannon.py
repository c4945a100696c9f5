"""Lab 08's warm-up, groups of rows and columns, and its last exercise, Cannon's algorithm.

Cannon (1969) multiplies blocks on a q x q torus with messages between neighbours. After a first
move rank (i, j) has X_il and W_lj with l = i + j, and after each further move those of the next l.
It may hold two blocks of X and of W in addition to its own: on 4 x 4 ranks a gathered row or column
takes three. Shapes and data are those of summa.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paralab.checks import shown
from paralab.exercises.diagnose import TOLERANCE, near
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import dist, np, torch
from paralab.exercises.questions import two
from paralab.exercises.summa import CROSS, SCALARS, SHAPES, blocks, grid_name, products, wrong_block
from paralab.exercises.tries import Outcome
from paralab.exercises.verdict import first

GROUP_GRIDS = (2, 3)
GRIDS = (2, 4)  # q; with 2 left and right are the same, with 3 two received blocks make a row
GROUPS = {  # {name: (i, j, q) -> its ranks}
    "row": lambda i, j, q: [i * q + b for b in range(q)],
    "column": lambda i, j, q: [a * q + j for a in range(q)],
}
GROUPS_REQUIRED = {
    "row": "on 2 x 2 and on 3 x 3 ranks: the ranks of this rank's row",
    "column": "the ranks of its column",
    "a sum over each": "an all-reduce in the row and one in the column",
}
REQUIRED = {
    "Y": "on 2 x 2 and on 4 x 4 ranks: block (i, j) of X W on rank (i, j)",
    "calls": "messages between two ranks only; after the first move of a matrix, to neighbours",
    "blocks sent": "by each rank at most q blocks of X and q blocks of W",
    "memory": "tensors in addition to x and w: two blocks of X and of W, y, and one product",
}
PRODUCT, CALLS, SENT, MEMORY = REQUIRED
AT_FIRST = " before the first product"
MESSAGES = "messages between two ranks"
MISTAKES = {  # {words: signs of X's first move to the left, of W's up, and of W's moves after it;
    # the end of the q products}
    "nothing was moved: it is the product of the rank's own blocks": (0, 0, 1, 1),
    "the last of the q products is missing": (1, 1, 1, -1),
    "between the products X goes left and W down, or X right and W up": (1, 1, -1, None),
    f"nothing was moved{AT_FIRST}": (0, 0, 1, None),
    f"W was not moved{AT_FIRST}": (1, 0, 1, None),
    f"X was not moved{AT_FIRST}": (0, 1, 1, None),
    f"X was moved to the right and W down{AT_FIRST}": (-1, -1, 1, None),
    f"X was moved to the right{AT_FIRST}": (-1, 1, 1, None),
    f"W was moved down{AT_FIRST}": (1, -1, 1, None),
}


# ---- groups --------------------------------------------------------------------------------------
@exercise(Takes("row_and_column(q)"), required=GROUPS_REQUIRED)
def grid_groups(tries: Tries) -> None:
    for q in GROUP_GRIDS:
        for notes, outcome in tries.run(summed, q * q, q, where=f"q={q}", memory=False):
            for limit in GROUPS_REQUIRED:
                ranks = enumerate(outcome.results)
                wrong = first(_wrong_line(rank, limit, result, q) for rank, result in ranks)
                notes.look(limit, wrong, "right, on every rank")


def summed(watch: Any, answer: tuple, seed: int, q: int) -> dict[str, Any]:
    """What every rank runs: the members of both groups, and a sum of ranks over each."""
    groups = answer[0](q)
    watch.calls.agree()  # else the sums would hang if a rank makes one more group
    result: dict[str, Any] = {"sums": []}
    for name, group in zip(GROUPS, two(groups, "a row and a column, two groups"), strict=True):
        if not isinstance(group, dist.ProcessGroup):
            other = group == dist.GroupMember.NON_GROUP_MEMBER
            what = "a group of which this rank is no member" if other else shown(group)
            legal = "a group that dist.new_group(ranks) has returned to a member"
            raise ValueError(f"the {name} is {what}, required: {legal}")
        result[name] = list(dist.get_process_group_ranks(group))
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=group)
        result["sums"].append(total.item())
    return result


def _wrong_line(rank: int, limit: str, result: dict[str, Any], q: int) -> str:
    place = divmod(rank, q)
    right = {name: members(*place, q) for name, members in GROUPS.items()}
    if limit not in GROUPS:
        sums, yours = [float(sum(members)) for members in right.values()], result["sums"]
        said = f"rank {rank}: the sums in its row and its column are {yours}, required: {sums}"
        return said if yours != sums else ""
    required, yours = right[limit], result[limit]
    said = f"rank {rank}, at {place}: the {limit} has the ranks {yours}, required: {required}"
    for other in right:
        said += f"; these are the ranks of its {other}" * (yours == right[other])
    return said if yours != required else ""


# ---- Cannon's algorithm --------------------------------------------------------------------------
@exercise(Takes("cannon(x, w, q)"), required=REQUIRED)
def cannon(tries: Tries) -> None:
    for q in GRIDS:
        for notes, outcome in tries.run(multiply, q * q, q, where=f"q={q}"):
            cases, ops = range(len(SHAPES)), outcome.report.collectives["op"].unique()
            wrong = first(_wrong(outcome, n, q) for n in cases)
            wrong = wrong or first(words for one in outcome["changed"] for words in one)
            notes.look(PRODUCT, wrong, "every block")
            collective = first(
                f"it calls {op}, required: {MESSAGES}" for op in ops if op not in ("send", "recv")
            )
            notes.look(CALLS, collective or first(_far(outcome, q)), MESSAGES)
            for number, (m, k, n) in enumerate(SHAPES):
                most, limit = 4 * q * k * (m + n), 4 * (2 * k * (m + n) + 2 * m * n) + SCALARS
                sent, blocks = outcome.sent(f"{number}"), f", {q} blocks of X and of W"
                notes.memory(SENT, sent, most, "sends {} bytes", blocks, grid_name(q))
                peaks = [peak[number] for peak in outcome["peak"]]
                words = "holds {} bytes in addition to x and w"
                notes.memory(MEMORY, peaks, limit, words, ranks=grid_name(q))


def multiply(watch: Any, answer: tuple, seed: int, q: int) -> dict[str, list]:
    """What every rank runs: the forward `products`."""
    return products(watch, seed, q, lambda x, w: answer[0](x, w, q))


def _far(outcome: Outcome, q: int) -> Iterator[str]:
    """Messages to ranks that are neither neighbours nor the target of the first move, in words."""
    calls, name = outcome.report.collectives, grid_name(q)
    for (rank, _), sends in calls[calls["op"] == "send"].groupby(["rank", "phase"]):
        i, j = divmod(int(rank), q)
        row = [i * q + (j + by) % q for by in (-1, 1)]
        column = [(i + by) % q * q + j for by in (-1, 1)]
        for legal, in_row in ((row, True), (column, False)):
            targets = [int(peer) for peer in sends["peer"] if (peer // q == i) == in_row]
            for far in (peer for peer in targets if peer not in (*legal, targets[0])):
                said = f"{name(rank)} sends to {name(far)} after the first move, required: to a "
                yield f"{said}neighbour, {' or '.join(dict.fromkeys(map(name, legal)))}"


def _wrong(outcome: Outcome, number: int, q: int) -> str:
    """The first rank whose block of Y is wrong, in words, or "". A mistake in the moves is named
    only if it explains the blocks of all ranks, because on some ranks several give the same block.
    """
    x, w = (one.astype("float64") for one in blocks(outcome.seed, q, number)[:2])
    mine, places = [y[number] for y in outcome["y"]], [divmod(rank, q) for rank in range(q * q)]

    def products(left: int, up: int, later: int, end: int | None) -> list[np.ndarray]:
        """Each rank's block, with signs and an end as in `MISTAKES`."""
        steps = range(q)[:end]
        return [
            sum(x[i, (j + left * i + s) % q] @ w[(i + up * j + later * s) % q, j] for s in steps)
            for i, j in places
        ]

    mistakes = {words: products(*how) for words, how in MISTAKES.items()}
    mistakes[CROSS] = [sum(x[a, j] @ w[i, a] for a in range(q)) for i, j in places]
    allowed = TOLERANCE * max(abs(block).max() for block in products(1, 1, 1, None))
    made = [
        words
        for words, blocks in mistakes.items()
        if all(near(one, other, allowed) for one, other in zip(mine, blocks, strict=True))
    ]
    return wrong_block(outcome, "y", number, q, lambda rank: [(w, mine[rank]) for w in made])
