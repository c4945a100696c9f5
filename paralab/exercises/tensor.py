"""Lab 07: an MLP on several ranks, forward and backward, in one class.

Columns of the first weight, rows of the second: what is between them stays where it is, and one
all-reduce of the result is enough, with one more of the input's gradient in backward (Shoeybi+
2019, arXiv:1909.08053, sec. 3). The checker runs the answer on 2, 3 and 4 real ranks and compares
the result and every gradient with the whole MLP's, in float64; the bytes of each direction with
2(t-1)/t of the activation, which is small beside the weights; and what a rank holds once the whole
weights are gone with a t-th of them. ReLU stands for GELU: its derivative is one comparison.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paralab.checks import real
from paralab.exercises.exercise import Exercise
from paralab.exercises.verdict import Notes, Verdict, on_ranks
from paralab.exercises.zero import at_rest

if TYPE_CHECKING:
    import numpy as np

    from paralab.report.report import Report

RANKS = (2, 3, 4)
TOKENS, HIDDEN, INSIDE = 48, 64, 240  # n, h, k: an activation is 12 kB, A and B are 61 kB each
PART_OF = {"A": 1, "b": 0, "B": 0}  # the dimension along which a rank's part of it is cut
TOLERANCE = 1e-5  # of the largest entry: sums of 240 numbers, taken in another order
SCALARS = 1000  # bytes
TIMEOUT_S = 10.0

RESULT, GRADIENTS, WEIGHTS = "result", "gradients", "weights per rank"
FORWARD, BACKWARD = "bytes, forward", "bytes, backward"

TASK = """
**Your turn.** Write an MLP whose weights lie on t ranks, z = relu(x A + b) B + c. Every rank makes
one, `MyMLP(A, b, B, c, group=group)`, and then calls `forward(x)` and `backward(grad)`:

* A is (h, k), b (k,), B (k, h), c (h,): whole, and the same on every rank. Keep a t-th of A, b and
  B, that of columns, entries and rows r k/t to (r+1) k/t on rank r, and all of c; the rest goes
  away, so keep copies (a slice is only a view);
* `forward(x)` takes the same x, (n, h), on every rank, and returns z, (n, h), on every rank;
* `backward(grad)` takes z's gradient, the same on every rank, and returns x's, on every rank. It
  leaves the gradients of what the rank keeps in `self.gradients`, a dict with "A", "b", "B", "c".

`group.all_reduce(tensor)` adds up in place, `.wait()` on what it returns waits; `group.size` is t,
`group.index` is r. There are h = 64, k = 240 and n = 48: to send weights is far too much.

`pl.exercises.tensor_mlp.check(MyMLP)`
"""

ASKED = (
    (RESULT, "t = 2, 3, 4: z of the whole MLP, on every rank"),
    (GRADIENTS, "of x on every rank, of c, and of the rank's parts of A, b and B"),
    (FORWARD, "exactly 2(t-1)/t n h elements: one all-reduce"),
    (BACKWARD, "exactly 2(t-1)/t n h elements: one all-reduce"),
    (WEIGHTS, "at most a t-th of A, b and B, and c (and 1 kB)"),
)

HINTS = (
    "x A needs all of x and gives each rank its own columns. These meet their own rows of B: what "
    "comes out is one of t terms of a sum. Where is the one place to add up, and what must not be "
    "added t times?",
    "backward is forward the other way round. All ranks have z's gradient, so nothing has to be "
    "sent for those of B, c, b and A. Only x's gradient is again one of t terms.",
    "forward: inside = (x @ A + b).relu(); z = inside @ B; all_reduce(z); z + c. backward: "
    "of_inside = (grad @ B.t()) * (inside > 0); A's is x.t() @ of_inside, B's inside.t() @ grad; "
    "of_x = of_inside @ A.t(); all_reduce(of_x).",
)


def check(form: Any, *, timeout: float = TIMEOUT_S) -> Verdict:
    """Run ``form`` on 2, 3 and 4 real ranks; about a second when ranks are warm.

    timeout  seconds without a sign of life until a deadlock is called one

    Raises ValueError for a wrong timeout; an answer that is wrong, fails or hangs is a Verdict.
    """
    from paralab.trace import trace

    timeout = real("timeout", timeout, above=0.0)
    return on_ranks(
        Notes("tensor_mlp", ASKED),
        form,
        RANKS,
        lambda t: trace(forward_and_back, t, (form,), timeout=timeout),
        _look,
        first=RESULT,
        letter="t",
    )


def forward_and_back(group: Any, form: Callable[..., Any]) -> dict[str, Any]:
    """What every rank runs: one forward, one backward.

    Returns {"z", "x", "A", "b", "B", "c": result and gradients as arrays; "held": bytes of weights}
    """
    import torch

    from paralab.instruments.memory import PeakMemory

    device, given = group.context.device, _given()
    x, grad = (torch.from_numpy(given[name]).to(device) for name in ("x", "grad"))
    with PeakMemory(device) as memory:
        whole = {name: torch.from_numpy(given[name]).to(device).clone() for name in "AbBc"}
        answer = form(**whole, group=group)
        del whole
        held = at_rest(memory, device, enough=_allowed(group.size))
    with group.recorder.span("forward"):
        found = {"z": _array(answer.forward(x.clone()))}
    with group.recorder.span("backward"):
        of_x = answer.backward(grad.clone())
    gradients = {name: answer.gradients[name] for name in "AbBc"}
    found |= {name: _array(value) for name, value in {"x": of_x, **gradients}.items()}
    return {**found, "held": held}


def _array(value: Any) -> np.ndarray:
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a tensor is asked, this is a {type(value).__name__}")
    return value.detach().cpu().numpy().copy()


def _allowed(t: int) -> int:
    """Bytes of weights that a rank may hold."""
    return 4 * ((2 * HIDDEN * INSIDE + INSIDE) // t + HIDDEN) + SCALARS


@functools.cache
def _given() -> dict[str, np.ndarray]:
    """Weights, input and the result's gradient, the same on every rank."""
    import numpy as np

    sizes = {
        "A": (HIDDEN, INSIDE),
        "b": (INSIDE,),
        "B": (INSIDE, HIDDEN),
        "c": (HIDDEN,),
        "x": (TOKENS, HIDDEN),
        "grad": (TOKENS, HIDDEN),
    }
    draw = np.random.default_rng(7)
    made = {name: draw.standard_normal(size, dtype=np.float32) for name, size in sizes.items()}
    return made | {"A": made["A"] / HIDDEN**0.5, "B": made["B"] / INSIDE**0.5}


@functools.cache  # the same for every answer
def _of_one_device() -> dict[str, np.ndarray]:
    """z and all gradients of the whole MLP, in float64."""
    import numpy as np

    given = {name: value.astype(np.float64) for name, value in _given().items()}
    x, grad = given["x"], given["grad"]
    inside = np.maximum(x @ given["A"] + given["b"], 0.0)
    of_inside = (grad @ given["B"].T) * (inside > 0)
    return {
        "z": inside @ given["B"] + given["c"],
        "x": of_inside @ given["A"].T,
        "A": x.T @ of_inside,
        "b": of_inside.sum(0),
        "B": inside.T @ grad,
        "c": grad.sum(0),
    }


def _look(notes: Notes, report: Report, t: int) -> None:
    """One traced run against every limit."""
    for limit, names in ((RESULT, "z"), (GRADIENTS, "xcBbA")):  # as backward comes by them
        said = _not_waited_for(report) if limit == RESULT else ""  # it may be right by luck
        said = said or _first_wrong(report.results, t, names)
        said = f"t={t}, {said}" if said else ""
        notes.note(limit, said or f"t={t}: right, on every rank", not said, said)

    asked = 2 * (t - 1) * 4 * TOKENS * HIDDEN // t
    for limit, sent in zip((FORWARD, BACKWARD), _sent(report, t), strict=True):
        worst = max(range(t), key=lambda r: (abs(sent[r] - asked), -r))
        yours, way = sent[worst], limit.split(", ")[1]
        said = f"t={t}: rank {worst} sends {yours:,} bytes in {way}, asked are {asked:,}"
        if not yours:
            said = f"t={t}: rank {worst} sends nothing through the group in {way}"
        elif yours != asked:
            said += f", {yours / asked:.3g} times as many"
        exact = yours == asked
        notes.note(limit, f"t={t}: {asked:,} bytes" if exact else said, exact, said)

    held = [found["held"] for found in report.results]
    worst, part = max(range(t), key=lambda r: (held[r], -r)), _allowed(t) - SCALARS
    fits = held[worst] <= part + SCALARS
    said = f"t={t}: rank {worst} holds {held[worst]:,} bytes, a t-th and c are {part:,}"
    notes.note(WEIGHTS, f"t={t}: {held[worst]:,} bytes" if fits else said, fits, said)


def _sent(report: Report, t: int) -> tuple[list[int], list[int]]:
    """Bytes that each rank sends in forward and in backward."""
    calls, spans = report.collectives, report.spans
    begins = spans[spans["kind"] == "backward"].groupby("rank")["id"].min()
    later = calls["span"] > calls["rank"].map(begins)  # by number
    ways = (calls[part].groupby("rank")["wire_bytes"].sum() for part in (~later, later))
    forward, backward = ([int(way.get(rank, 0)) for rank in range(t)] for way in ways)
    return forward, backward


def _not_waited_for(report: Report) -> str:
    """The first call whose result was read before it was there, in words, or ""."""
    waits = report.spans[report.spans["kind"] == "wait"]
    known = {span for after in waits["after"] for span in after}
    for call in report.collectives.sort_values(["call", "rank"]).itertuples():
        if call.span not in known:
            return f"rank {call.rank}: nobody waits for {call.op} #{call.call}"
    return ""


def part_of(name: str, whole: np.ndarray, rank: int, t: int) -> np.ndarray:
    """What rank ``rank`` of ``t`` has of a tensor: its part, or all of it."""
    if name not in PART_OF:
        return whole
    width = INSIDE // t
    own = slice(rank * width, (rank + 1) * width)
    return whole[:, own] if PART_OF[name] else whole[own]


def _first_wrong(results: list[dict[str, Any]], t: int, names: str) -> str:
    """The first tensor of the first rank that is wrong, in words, or ""."""
    import numpy as np

    for name in names:
        for rank, found in enumerate(results):
            whole = _of_one_device()[name]
            wanted, got = part_of(name, whole, rank, t), found[name].astype(np.float64)
            called = f"rank {rank}: {'z' if name == 'z' else f'the gradient of {name}'}"
            if got.shape != wanted.shape:
                return f"{called} has shape {got.shape}, asked {wanted.shape}"
            allowed = TOLERANCE * np.abs(whole).max()
            wrong = np.argwhere(~(np.abs(got - wanted) <= allowed))  # NaN is wrong too
            if len(wrong):
                at = tuple(int(i) for i in wrong[0])
                return (
                    f"{called} at {list(at)} is {got[at]:.5g}, asked {wanted[at]:.5g}"
                    f"{_why(name, results, rank, wanted, allowed)}"
                )
    return ""


def _why(
    name: str, results: list[dict[str, Any]], rank: int, wanted: np.ndarray, allowed: float
) -> str:
    """The mistake that makes exactly this of ``wanted``, if it is a known one."""
    import numpy as np

    t, got = len(results), results[rank][name].astype(np.float64)

    def is_near(value: np.ndarray, other: np.ndarray) -> bool:
        return value.shape == other.shape and bool((np.abs(value - other) <= t * allowed).all())

    c = _given()["c"].astype(np.float64)
    if name == "z":
        for times in (0, *range(2, t + 1)):
            if is_near(got, wanted + (times - 1) * c):
                return f"; c is in it {times} times"
    factor = float((got * wanted).sum()) / float((wanted * wanted).sum())
    if is_near(got, factor * wanted):
        return f"; it is {factor:.3g} times what is asked"
    if name in ("z", "x"):
        terms = [found[name].astype(np.float64) for found in results]
        if all(term.shape == wanted.shape for term in terms):
            extra = (t - 1) * c if name == "z" else 0.0
            if any(is_near(sum(terms) - e, wanted) for e in (0.0, extra)):
                return "; it is the rank's own term of the sum, which nobody has added up"
    if name in PART_OF:
        for other in range(t):
            if is_near(got, part_of(name, _of_one_device()[name], other, t)):
                return f"; that is rank {other}'s part"
    return ""


tensor_mlp = Exercise(
    name="tensor_mlp", lab="07", task=TASK, asked=ASKED, hints=HINTS, checker=check
)
