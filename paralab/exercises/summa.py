"""Lab 08: SUMMA, the product that 2D tensor parallelism is made of, and its two gradients.

Rank (i, j) of q x q has block (i, j) of X, of W and of Y. The three products of a linear layer are
three forms of one loop (van de Geijn & Watts 1997; Xu+ 2021, arXiv:2104.05343, algorithms 1 to 3):

    Y = X W       X_il to all of row i, W_lj to all of column j, for each l; add up at home
    X' = Y' W^T   W_lj to all of column j; the sum of row i's terms to rank (i, l)
    W' = X^T Y'   X_il to all of row i; the sum of column j's terms to rank (l, j)

The checker runs the answer on 2 x 2 and 4 x 4 real ranks. It compares every block with the product
of whole matrices, elements sent with (q-1)(M K + K N) forward and twice that backward, all ranks
together, and, on 4 x 4, memory: an all-gather of the row and of the column sends as much, and is
refused for what it holds. M, K and N differ, and in turn X and W are the large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paralab.checks import real
from paralab.exercises.exercise import Exercise
from paralab.exercises.verdict import Notes, Verdict, on_ranks
from paralab.theory.traffic import BOOKKEEPING

if TYPE_CHECKING:
    import numpy as np

    from paralab.report.report import Report

GRIDS = (2, 4)  # q; with 2 or 3, the own block and two received ones are a whole row
SHAPES = ((40, 48, 6), (6, 48, 40))  # blocks' m, k, n: X is the large one, then W is
TRIES = 3  # of forward: threads that carry messages may hold a block a little longer
RECEIVED = 2  # blocks of X, and of W: the one in use, and the one before it on its way out
TOLERANCE = 1e-5  # of the largest entry: terms added in another order
SCALARS = 1000  # bytes
TIMEOUT_S = 10.0

FORWARD, BACKWARD = "Y", "gradients"
SENT, SENT_BACK = "elements forward", "elements backward"
MEMORY = "memory forward"

TASK = """
**Your turn.** Write SUMMA as a class, forward and backward. Every rank (i, j) of a q x q grid makes
one, `MySumma(row, column)`, and has block (i, j) of every matrix:

* `forward(x, w)` returns its block of Y = X W, from blocks x (m, k) and w (k, n);
* `backward(x, w, dy)` returns its blocks of X' = Y' W^T and W' = X^T Y', from the same two and dy
  (m, n).

`row` is the group of the ranks (i, 0) ... (i, q-1), so `row.index` is j; `column` is that of
(0, j) ... (q-1, j), and `column.index` is i. `group.broadcast(tensor, root=group.ranks[l])` gives
everybody member l's tensor, in place; `group.reduce(tensor, root=group.ranks[l])` makes member l's
tensor the sum of all. Both want a `.wait()`, and a contiguous tensor. In forward no rank may hold a
whole row or column of blocks: that is what makes it SUMMA.

`pl.exercises.summa.check(MySumma)`
"""

ASKED = (
    (FORWARD, "on 2 x 2 and on 4 x 4 ranks: block (i, j) of X W on rank (i, j)"),
    (SENT, "exactly (q-1)(M K + K N), all ranks together"),
    (
        MEMORY,
        f"beside its own x and w: y, one product, and {RECEIVED} received blocks of X and of "
        "W at most (4 x 4 ranks)",
    ),
    (BACKWARD, "block (i, j) of Y' W^T and of X^T Y' on rank (i, j)"),
    (SENT_BACK, "exactly 2(q-1)(M K + K N), all ranks together"),
)

HINTS = (
    "forward is q steps. In step l the ranks of column l give their x to their rows, those of row "
    "l their w to their columns; then everybody multiplies what came and adds it to y.",
    "the root's own block is what it sends: block if group.index == l else "
    "block.new_empty(block.shape), then group.broadcast(that, root=group.ranks[l]).wait(). One of "
    "them at a time is all that y += ... needs.",
    "backward, step l: part = dy @ (w of row l).t() is this rank's term of X'[i, l], which belongs "
    "to rank (i, l): row.reduce(part, root=row.ranks[l]).wait(), and if row.index == l it is dx. "
    "W'[l, j] is the same with (x of column l).t() @ dy and the column.",
)


def check(form: Any, *, timeout: float = TIMEOUT_S) -> Verdict:
    """Run ``form`` on 4 and on 16 real ranks; some three seconds when ranks are warm.

    timeout  seconds without a sign of life until a deadlock is called one

    Raises ValueError for a wrong timeout; an answer that is wrong, fails or hangs is a Verdict.
    """
    from paralab.trace import trace

    timeout = real("timeout", timeout, above=0.0)
    return on_ranks(
        Notes("summa", ASKED),
        form,
        GRIDS,
        lambda q: trace(multiply, q * q, (form,), timeout=timeout),
        _look,
        first=FORWARD,
        letter="q",
    )


def multiply(group: Any, form: Callable[..., Any]) -> dict[str, Any]:
    """What every rank runs: products of given matrices.

    Returns, for each of SHAPES, what forward and backward gave and the most bytes that forward had
    beside its arguments; and the elements that each of the two sent.
    """
    import torch

    from paralab.instruments.memory import PeakMemory

    q = round(group.size**0.5)
    i, j = divmod(group.index, q)
    rows = [group.subgroup([a * q + b for b in range(q)], axis="row") for a in range(q)]
    columns = [group.subgroup([a * q + b for a in range(q)], axis="column") for b in range(q)]
    answer, device = form(rows[i], columns[j]), group.context.device
    found: dict[str, Any] = {"y": [], "dx": [], "dw": [], "peak": []}
    for number in range(len(SHAPES)):
        x, w, dy = (torch.from_numpy(one[i, j]).to(device) for one in blocks(q, number))
        peaks = []
        for _ in range(TRIES):
            rows[i].phase = columns[j].phase = FORWARD
            with PeakMemory(device, existing=(x, w, dy)) as memory:
                y = answer.forward(x, w)
            peaks.append(memory.peak)
        rows[i].phase = columns[j].phase = BACKWARD
        dx, dw = answer.backward(x, w, dy)
        found["peak"].append(min(peaks))
        for name, block in (("y", y), ("dx", dx), ("dw", dw)):
            found[name].append(block.detach().cpu().numpy().copy())
    return found


def blocks(q: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X, W and Y' of the case, as blocks: (q, q, rows, columns)."""
    import numpy as np

    m, k, n = SHAPES[number]
    random = np.random.default_rng([q, number])
    return tuple(
        random.standard_normal((q, q, *shape), dtype=np.float32)
        for shape in ((m, k), (k, n), (m, n))
    )


def whole(parts: np.ndarray) -> np.ndarray:
    """A matrix from its blocks, in double precision."""
    import numpy as np

    return np.block([list(row) for row in parts]).astype(np.float64)


def cut(matrix: np.ndarray, q: int) -> np.ndarray:
    """The blocks of a matrix, (q, q, rows, columns)."""
    import numpy as np

    return np.stack([np.stack(np.split(row, q, axis=1)) for row in np.split(matrix, q, axis=0)])


def _look(notes: Notes, report: Report, q: int) -> None:
    """One traced run against every limit."""
    for limit, names in ((FORWARD, ("y",)), (BACKWARD, ("dx", "dw"))):
        wrong = ""
        for number in range(len(SHAPES)):
            for name in names:
                wrong = wrong or _first_wrong(report.results, name, q, number)
        notes.note(
            limit,
            f"q={q}: {wrong}" if wrong else f"q={q}: every block",
            not wrong,
            f"q={q}, {wrong}",
        )

    calls = report.collectives[~report.collectives["phase"].isin(BOOKKEEPING)]
    once = sum((q - 1) * q * q * k * (m + n) for m, k, n in SHAPES)
    for limit, phase, asked in ((SENT, FORWARD, once), (SENT_BACK, BACKWARD, 2 * once)):
        sent = calls.loc[calls["phase"] == phase, "wire_bytes"].sum() / 4
        yours = sent / TRIES if phase == FORWARD else sent
        said = f"q={q}: {yours:,.0f} elements, asked are {asked:,}"
        if not yours:
            said = f"q={q}: nothing goes through row and column"
        elif yours != asked:
            said += f", {yours / asked:.3g} times as many"
        exact = yours == asked
        notes.note(limit, f"q={q}: {asked:,}" if exact else said, exact, said)

    if q > RECEIVED + 1:
        _look_at_memory(notes, report, q)


def _look_at_memory(notes: Notes, report: Report, q: int) -> None:
    """Of both shapes the one that is farthest beyond its limit."""
    found = []
    for number, (m, k, n) in enumerate(SHAPES):
        limit = 4 * (RECEIVED * k * (m + n) + 2 * m * n) + SCALARS
        peaks = [result["peak"][number] for result in report.results]
        worst = max(range(q * q), key=lambda r: (peaks[r], -r))
        found.append((peaks[worst] / limit, -number, worst, peaks[worst] / (4 * k * max(m, n))))
    share, number, worst, held = max(found)
    fits, large = share <= 1, ("X", "W")[-number]
    said = (
        "no more than that"
        if fits
        else (
            f"q={q}: rank {divmod(worst, q)} holds {held:.1f} blocks of {large} "
            f"beside its own, a whole {'row' if large == 'X' else 'column'} is {q}"
        )
    )
    notes.note(MEMORY, said, fits, said)


def _first_wrong(results: list[dict], name: str, q: int, number: int) -> str:
    """The first rank whose block of ``name`` is wrong, in words, or ""."""
    import numpy as np

    parts = blocks(q, number)
    x, w, dy = map(whole, parts)
    product = {"y": lambda: x @ w, "dx": lambda: dy @ w.T, "dw": lambda: x.T @ dy}[name]()
    right, letter = cut(product, q), {"y": "Y", "dx": "X'", "dw": "W'"}[name]
    allowed = TOLERANCE * np.abs(product).max()
    for rank, found in enumerate(results):
        i, j = divmod(rank, q)
        got, asked = found[name][number], right[i, j]
        where = f"rank ({i}, {j}), block ({i}, {j}) of {letter}: "
        if got.shape != asked.shape:
            return f"{where}its shape is {got.shape}, asked {asked.shape}"
        off = np.argwhere(~(np.abs(got - asked) <= allowed))  # NaN is wrong too
        if len(off):
            at = tuple(int(n) for n in off[0])
            why = _why(got, right, parts, name, (i, j), allowed)
            return f"{where}element {at} is {got[at]:.4g}, asked {asked[at]:.4g}{why}"
    return ""


def _why(
    got: np.ndarray,
    right: np.ndarray,
    parts: tuple,
    name: str,
    at: tuple[int, int],
    allowed: float,
) -> str:
    """The known mistake that gives exactly this block, if there is one."""
    import numpy as np

    def is_(other: np.ndarray) -> bool:
        return other.shape == got.shape and bool((np.abs(got - other) <= allowed).all())

    (i, j), (x, w, dy), q = at, parts, len(right)
    if is_(np.zeros_like(got)):
        return "; it is zero everywhere"
    for a in range(q):
        for b in range(q):
            if is_(right[a, b]):
                return f"; it is block ({a}, {b})"
    term, names = {
        "y": (lambda a, b: x[i, a] @ w[b, j], "X_{0}{2} W_{3}{1}"),
        "dx": (lambda a, b: dy[i, a] @ w[j, b].T, "Y'_{0}{2} (W_{1}{3})^T"),
        "dw": (lambda a, b: x[a, i].T @ dy[b, j], "(X_{2}{0})^T Y'_{3}{1}"),
    }[name]
    for a in range(q):
        for b in range(q):
            if is_(term(a, b)):
                return f"; it is the one term {names.format(i, j, a, b)}"
    return ""


summa = Exercise(name="summa", lab="08", task=TASK, asked=ASKED, hints=HINTS, checker=check)
