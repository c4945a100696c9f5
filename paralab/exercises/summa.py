"""Lab 08: SUMMA, the matrix product of 2D tensor parallelism, and its two gradients.

Rank (i, j) of q x q has block (i, j) of X, of W and of Y. The three products of a linear layer are
three forms of one loop (van de Geijn & Watts 1997; Xu+ 2021, arXiv:2104.05343, algorithms 1 to 3):

    Y = X W       X_il to all of row i, W_lj to all of column j, for each l; a rank adds its terms
    dX = dY Wᵀ    W_lj to all of column j; the sum of row i's terms to rank (i, l)
    dW = Xᵀ dY    X_il to all of row i; the sum of column j's terms to rank (l, j)

An all-gather in the row and the column sends as many elements, but on 4 x 4 ranks it breaks the
limit of memory. M, K and N differ: X is the larger matrix in one case, W in the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from paralab.exercises.diagnose import Known, first_wrong
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import dist, np, torch, watched
from paralab.exercises.questions import two
from paralab.exercises.tries import Outcome
from paralab.exercises.verdict import as_many, first

GRIDS = (2, 4)  # q; up to 3 the own block and two received ones make a whole row
SHAPES = ((40, 48, 6), (6, 48, 40))  # m, k, n of the blocks
RECEIVED = 2  # blocks of X, and of W: the one in use, and the one before it, not yet freed
SCALARS = 1000  # bytes for anything small
LETTERS = {"y": "Y", "dx": "dX", "dw": "dW"}
CROSS = "X went along the columns and W along the rows"
OVERWRITTEN = "; forward overwrites its x or w, which later steps need: in step l only member l of "
OVERWRITTEN += "a group may broadcast its own block, and the others receive into an empty one"
EMPTY = "an empty block is in it, as when it is read before its wait(), or when its sender "
EMPTY += "compares l with its place in the other group"

REQUIRED = {
    "Y": "on 2 x 2 and on 4 x 4 ranks: block (i, j) of X W on rank (i, j)",
    "elements forward": "exactly (q-1)(M K + K N), all ranks together",
    "memory forward": f"tensors in addition to its own x and w: y, one product, and {RECEIVED} "
    "received blocks of X and of W at most (4 x 4 ranks)",
    "gradients": "block (i, j) of dY Wᵀ and of Xᵀ dY on rank (i, j)",
    "elements backward": "exactly 2(q-1)(M K + K N), all ranks together",
}
FORWARD, SENT, MEMORY, BACKWARD, SENT_BACK = REQUIRED


@exercise(Takes("MySumma(row, column)", methods=("forward", "backward")), required=REQUIRED)
def summa(tries: Tries) -> None:
    for q in GRIDS:
        for notes, outcome in tries.run(multiply, q * q, q, where=f"q={q}"):
            for limit, names in ((FORWARD, ("y",)), (BACKWARD, ("dx", "dw"))):
                cases = ((name, number) for number in range(len(SHAPES)) for name in names)
                wrong = first(wrong_block(outcome, name, number, q) for name, number in cases)
                if wrong and any(map(any, outcome["changed"])):
                    wrong += OVERWRITTEN
                notes.look(limit, wrong, "every block")
            once = sum((q - 1) * q * q * k * (m + n) for m, k, n in SHAPES)
            there, back = outcome.sent(*map(str, range(len(SHAPES)))), outcome.sent(BACKWARD)
            for limit, sent, required in ((SENT, there, once), (SENT_BACK, back, 2 * once)):
                yours = sum(sent) / 4
                wrong = f"all ranks send {yours:,.0f} elements, required: {required:,}"
                wrong += as_many(yours, required)
                notes.look(limit, wrong if yours != required else "", f"{required:,}")
            if q > RECEIVED + 1:
                for number, (m, k, n) in enumerate(SHAPES):
                    most = 4 * (RECEIVED * k * (m + n) + 2 * m * n) + SCALARS
                    words = "holds {} bytes in addition to its own blocks"
                    why = f"; a whole row or column has {4 * q * k * max(m, n):,} bytes"
                    peaks = [peak[number] for peak in outcome["peak"]]
                    notes.memory(MEMORY, peaks, most, words, why, grid_name(q))


def multiply(watch: Any, answer: tuple, seed: int, q: int) -> dict[str, list]:
    """What every rank runs: `products`, and their gradients."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new empty tensors with NaN
    i, j = divmod(watch.group.index, q)
    rows = [dist.new_group([a * q + b for b in range(q)]) for a in range(q)]
    columns = [dist.new_group([a * q + b for a in range(q)]) for b in range(q)]
    product = answer[0](rows[i], columns[j])
    return products(watch, seed, q, product.forward, product.backward)


def products(
    watch: Any, seed: int, q: int, forward: Callable, backward: Callable | None = None
) -> dict[str, list]:
    """For each of SHAPES the blocks "y" of a product, and "dx" and "dw" if there is a backward;
    "peak", the most bytes of forward in addition to its arguments; and which of these it "changed",
    in words. The label of forward's calls is the number of the case.
    """
    place, result = divmod(watch.group.index, q), defaultdict(list)
    for number in range(len(SHAPES)):
        x, w, dy = (torch.from_numpy(one[place]) for one in blocks(seed, q, number))
        watch.label, lent = f"{number}", watched.Lent(x=x, w=w)
        with watch.section() as section:
            made = {"y": forward(x, w)}
        result["changed"].append(lent.changed())
        result["peak"].append(section.peak)
        if backward:
            watch.label = BACKWARD
            what = "dX and dW, two blocks"
            made |= zip(("dx", "dw"), two(backward(x, w, dy), what), strict=True)
        for name, block in made.items():
            result[name].append(watched.array(block))
        del x, w, dy, made, block, lent  # so that the next case does not count them
    return result


def grid_name(q: int) -> Callable[[int], str]:
    """rank -> its name, by row and column: "rank (0, 1)"."""
    return lambda rank: f"rank {divmod(rank, q)}"


def blocks(seed: int, q: int, number: int) -> list[np.ndarray]:
    """The blocks of X, W and dY of a case, (q, q, rows, columns) each."""
    (m, k, n), draw = SHAPES[number], np.random.default_rng([seed, q, number])
    shapes = ((m, k), (k, n), (m, n))
    return [draw.standard_normal((q, q, *shape), dtype=np.float32) for shape in shapes]


def wrong_block(
    outcome: Outcome, name: str, number: int, q: int, known: Known | None = None
) -> str:
    """The first rank whose block of ``name`` is wrong, in words, or "". known: mistakes of another
    algorithm, in place of SUMMA's.
    """
    parts = [block.astype("float64") for block in blocks(outcome.seed, q, number)]
    x, w, dy = parts
    # Term (a, b) on rank (i, j), and its name. The block is the sum of the terms with a == b.
    term, pattern = {
        "y": (lambda i, j, a, b: x[i, a] @ w[b, j], "X_{0}{2} W_{3}{1}"),
        "dx": (lambda i, j, a, b: dy[i, a] @ w[j, b].T, "dY_{0}{2} (W_{1}{3})ᵀ"),
        "dw": (lambda i, j, a, b: x[a, i].T @ dy[b, j], "(X_{2}{0})ᵀ dY_{3}{1}"),
    }[name]
    places = [divmod(rank, q) for rank in range(q * q)]
    right = [sum(term(*place, a, a) for a in range(q)) for place in places]

    def named(rank: int, mixed: bool) -> list:
        place = places[rank]
        pairs = [(a, b) for a in range(q) for b in range(q) if (a != b) == mixed]
        return [(pattern.format(*place, *pair), term(*place, *pair)) for pair in pairs]

    def mistakes(rank: int) -> list:
        i, j = places[rank]
        empty = (EMPTY, np.full_like(right[rank], np.nan))
        if name == "y":
            swapped = sum(x[a, j] @ w[i, a] for a in range(q))
            return [(CROSS, swapped), empty]
        lines, step, line_sums = ("column", "row"), j, right[i * q : i * q + q]
        swapped = sum(dy[a, j] @ w[i, j].T for a in range(q))
        addends = [dy[i, j] @ w[a, j].T for a in range(q)]
        if name == "dw":
            lines, step, line_sums = ("row", "column"), i, right[j::q]
            swapped = sum(x[i, j].T @ dy[i, a] for a in range(q))
            addends = [x[i, a].T @ dy[i, j] for a in range(q)]
        keep = f"; it has to keep the sum of step {step}, its place in the {lines[1]}"
        other = []
        for own, term in enumerate(addends):
            if own != step:
                place = f", its place in the {lines[0]}" * (own == i + j - step)
                other.append((f"it is its own term of step {own}{place}{keep}", term))
        addends[step] = right[rank]
        said = f"the results of all steps were added; its block is the sum of step {step} alone"
        crossed = "terms were summed along the {}, required: the {}".format(*lines)
        # Without its step alone: a reduce leaves its own terms otherwise, an all-reduce the sums.
        return [empty, (crossed, swapped), *other, (said, sum(addends)), (said, sum(line_sums))]

    return first_wrong(
        f"block of {LETTERS[name]}",
        [block[number] for block in outcome[name]],
        right,
        terms=lambda rank: named(rank, mixed=False),
        others=lambda rank: named(rank, mixed=True),
        known=known or mistakes,
        ranks=grid_name(q),
    )
