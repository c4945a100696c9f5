"""Lab 07: an MLP on several ranks, forward and backward, in one class.

Columns of the first weight, rows of the second: what is between them stays where it is, and one
all-reduce of the result is enough, with one more of the input's gradient in backward (Shoeybi+
2019, arXiv:1909.08053, sec. 3). The checker runs the answer on 2, 3 and 4 real ranks and compares
the result and every gradient with the whole MLP's, in float64; the bytes of each direction with
2(t-1)/t of the activation, which is small compared with the weights; and what a rank holds once the
whole weights are gone with a t-th of them. ReLU stands for GELU: its derivative is one comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paralab.exercises.diagnose import first_wrong
from paralab.exercises.exercise import Exercise
from paralab.exercises.tries import Found, Takes, Try, look_at_bytes, look_at_memory, on_ranks
from paralab.exercises.verdict import Notes

if TYPE_CHECKING:
    import numpy as np

RANKS = (2, 3, 4)
TOKENS, HIDDEN, INSIDE = 48, 64, 240  # n, h, k: an activation is 12 kB, A and B are 61 kB each
SIZES = {
    "A": (HIDDEN, INSIDE),
    "b": (INSIDE,),
    "B": (INSIDE, HIDDEN),
    "c": (HIDDEN,),
    "x": (TOKENS, HIDDEN),
    "grad": (TOKENS, HIDDEN),
}
SCALES = {"A": HIDDEN**-0.5, "B": INSIDE**-0.5}
PART_OF = {"A": 1, "b": 0, "B": 0}  # the dimension along which a rank's part of it is cut
SCALARS = 1000  # bytes

RESULT, GRADIENTS, WEIGHTS = "result", "gradients", "weights per rank"
FORWARD, BACKWARD = "bytes, forward", "bytes, backward"
ASKED = (
    (RESULT, "t = 2, 3, 4: z of the whole MLP, on every rank"),
    (GRADIENTS, "of x on every rank, of c, and of the rank's parts of A, b and B"),
    (FORWARD, "exactly 2(t-1)/t n h elements: one all-reduce"),
    (BACKWARD, "exactly 2(t-1)/t n h elements: one all-reduce"),
    (WEIGHTS, "at most a t-th of A, b and B, and c (and 1 kB)"),
)


def check(tries: Sequence[Try], timeout: float) -> None:
    for t in RANKS:
        for notes, found in on_ranks(tries, forward_and_back, t, where=f"t={t}", timeout=timeout):
            _look(notes, found, t)


def forward_and_back(watch: Any, answer: tuple, seed: int) -> dict[str, Any]:
    """What every rank runs: one forward, one backward.

    Returns {"z", "x", "A", "b", "B", "c": result and gradients as arrays; "held": bytes of weights}
    """
    import torch

    from paralab.exercises.watched import array

    numbers = given(seed)
    x, grad = torch.from_numpy(numbers["x"]), torch.from_numpy(numbers["grad"])
    with watch.section() as section:
        whole = {name: torch.from_numpy(numbers[name]).clone() for name in "AbBc"}
        mine = answer[0](**whole, group=watch.group)
        del whole
        held = section.now()
    watch.label = FORWARD
    found = {"z": array(mine.forward(x.clone()))}
    watch.label = BACKWARD
    of_x = mine.backward(grad.clone())
    gradients = {"x": of_x, **{name: mine.gradients[name] for name in "AbBc"}}
    found |= {name: array(value) for name, value in gradients.items()}
    return {**found, "held": held, "seed": seed}


def weight_bytes(t: int) -> int:
    """What a rank holds of the weights."""
    return 4 * ((2 * HIDDEN * INSIDE + INSIDE) // t + HIDDEN)


def given(seed: int) -> dict[str, np.ndarray]:
    """Weights, input and the result's gradient, the same on every rank."""
    import numpy as np

    draw = np.random.default_rng(seed)
    made = {name: draw.standard_normal(size, dtype=np.float32) for name, size in SIZES.items()}
    return {name: array * np.float32(SCALES.get(name, 1)) for name, array in made.items()}


def of_one_device(seed: int) -> dict[str, np.ndarray]:
    """z and all gradients of the whole MLP, in float64."""
    import numpy as np

    numbers = {name: value.astype(np.float64) for name, value in given(seed).items()}
    x, grad = numbers["x"], numbers["grad"]
    inside = np.maximum(x @ numbers["A"] + numbers["b"], 0.0)
    of_inside = (grad @ numbers["B"].T) * (inside > 0)
    return {
        "z": inside @ numbers["B"] + numbers["c"],
        "x": of_inside @ numbers["A"].T,
        "A": x.T @ of_inside,
        "b": of_inside.sum(0),
        "B": inside.T @ grad,
        "c": grad.sum(0),
    }


def terms(seed: int, t: int) -> dict[str, list[np.ndarray]]:
    """{"z", "x": what each rank's part of the weights adds to it}."""
    import numpy as np

    numbers = {name: value.astype(np.float64) for name, value in given(seed).items()}
    found: dict[str, list[np.ndarray]] = {"z": [], "x": []}
    for rank in range(t):
        A, b, B = (part_of(name, numbers[name], rank, t) for name in "AbB")
        inside = np.maximum(numbers["x"] @ A + b, 0.0)
        found["z"].append(inside @ B)
        found["x"].append(((numbers["grad"] @ B.T) * (inside > 0)) @ A.T)
    return found


def part_of(name: str, whole: np.ndarray, rank: int, t: int) -> np.ndarray:
    """What rank ``rank`` of ``t`` has of a tensor: its part, or all of it."""
    if name not in PART_OF:
        return whole
    own = slice(rank * (INSIDE // t), (rank + 1) * (INSIDE // t))
    return whole[:, own] if PART_OF[name] else whole[own]


def _look(notes: Notes, found: Found, t: int) -> None:
    """One run against every limit."""
    where = f"t={t}"
    for limit, names in ((RESULT, "z"), (GRADIENTS, "xcBbA")):  # as backward comes by them
        wrong = next((w for name in names if (w := _wrong(found.results, name, t))), "")
        notes.look(limit, where, wrong, "right, on every rank")
    required = 2 * (t - 1) * 4 * TOKENS * HIDDEN // t
    for limit in (FORWARD, BACKWARD):
        doing = f"in {limit.split(', ')[1]}"
        look_at_bytes(notes, limit, where, found.sent(limit), required, doing)
    part = weight_bytes(t)
    words = f"holds {{held}} bytes, a t-th and c are {part:,}"
    held = [result["held"] for result in found.results]
    look_at_memory(notes, WEIGHTS, where, held, part + SCALARS, words)


def _wrong(results: Sequence[dict[str, Any]], name: str, t: int) -> str:
    """What is wrong with a tensor, on the first rank where it is, or ""."""
    seed = results[0]["seed"]
    whole, c = of_one_device(seed)[name], given(seed)["c"]
    one = terms(seed, t).get(name, [])

    def known(rank: int) -> Iterator[tuple[str, np.ndarray]]:
        for times in (0, *range(2, t + 1)) if name == "z" else ():
            yield f"c is in it {times} times", whole + (times - 1) * c
        for number, term in enumerate(one):
            own = "the rank's own" if number == rank else f"rank {number}'s"
            yield (
                f"it is {own} term of the sum, to which no other was added",
                term + c * (name == "z"),
            )
            yield f"it is {own} term of the sum, to which no other was added", term

    return first_wrong(
        "z" if name == "z" else f"the gradient of {name}",
        [result[name] for result in results],
        [part_of(name, whole, rank, t) for rank in range(t)],
        known=known,
    )


tensor_mlp = Exercise(
    name="tensor_mlp",
    lab="07",
    asked=ASKED,
    takes=(
        Takes(
            "a class",
            "MyMLP(A, b, B, c, group=group)",
            0,
            ("A", "b", "B", "c", "group"),
            ("forward", "backward"),
        ),
    ),
    checker=check,
)
