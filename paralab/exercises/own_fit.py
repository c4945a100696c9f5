"""Lab 11: one FLOP rate fitted to measured steps, and its error on steps that it was not fitted to.

The rate is the geometric mean of the rows' rates, which is the least-squares fit to the logarithms
of seconds. A row's error out of sample is its error with the rate of all other rows: leave one out
(Stone 1974, "Cross-validatory choice and assessment of statistical predictions").
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from statistics import fmean

from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import Mistakes, ask

REQUIRED = {
    "rate": "for each of five logs: the FLOP/s of one device",
    "error in sample": "the mean over the rows, as a share: 0.1 for 10 %",
    "error out of sample": "the same mean, with each row predicted by the rate of all others",
}
Rows = list[tuple[float, int, float]]  # FLOPs of a step, devices, seconds
Rate = Callable[[Rows], float]
LOGS: tuple[Rows, ...] = (
    [(1.9e19, 3072, 51.4), (6.1e15, 64, 3.7), (3.3e17, 512, 9.1), (8.8e16, 64, 11.2)],
    [(2.0e15, 8, 2.0), (2.0e15, 16, 1.4)],
    [(4e16, 64, 3.638), (4e16, 32, 9.4), (5e16, 128, 2.9), (7e15, 8, 6.6), (9e17, 1024, 8.8)],
    [(3e16, 64, 4.6), (8e15, 16, 6.1), (3e16, 64, 4.6)],  # a step that took as long as another
    [(1e16 * i, 16 * i, 6.0 + i % 3 / 5) for i in range(1, 41)],
)


@exercise(Takes("own_fit(rows)"), required=REQUIRED)
def own_fit(tries: Tries) -> None:
    for notes, (rows,), reply in ask(tries, [(rows,) for rows in LOGS]):
        notes.where = f"{len(rows)} rows"
        numbers = {
            limit: (number, known(rows, position))
            for position, (limit, number) in enumerate(zip(REQUIRED, right(rows), strict=True))
        }
        for limit, wrong in reply.numbers(numbers, 1e-9):
            notes.look(limit, wrong, f"{numbers[limit][0]:.6g}")


def rates(rows: Rows) -> list[float]:
    return [flops / (devices * seconds) for flops, devices, seconds in rows]


def geometric(rows: Rows) -> float:
    return statistics.geometric_mean(rates(rows))


def splits(rows: Rows) -> tuple[list[Rows], list[Rows]]:
    """The rows to which each row's rate is fitted, in sample and out of sample."""
    return [rows] * len(rows), [rows[:i] + rows[i + 1 :] for i in range(len(rows))]


def errors(rows: Rows, fitted: list[Rows], rate: Rate = geometric) -> list[float]:
    """The relative error of each row's seconds, with its sign."""
    pairs = zip(rows, fitted, strict=True)
    return [flops / (n * rate(some)) / seconds - 1 for (flops, n, seconds), some in pairs]


def size(signed: list[float]) -> float:
    return fmean(map(abs, signed))


def right(rows: Rows, rate: Rate = geometric) -> tuple[float, float, float]:
    return rate(rows), *(size(errors(rows, fitted, rate)) for fitted in splits(rows))


def known(rows: Rows, place: int) -> Mistakes:
    """place: of the number in `REQUIRED`"""
    numbers, (seen, unseen) = right(rows), (errors(rows, fitted) for fitted in splits(rows))
    for words, rate in (
        ("the arithmetic mean of the rates", lambda some: fmean(rates(some))),
        ("all FLOPs over all device seconds", of_all),
        ("the harmonic mean of the rates", lambda some: statistics.harmonic_mean(rates(some))),
    ):
        yield f"yours uses {words}", right(rows, rate)[place]
    if place:
        signed = (seen, unseen)[place - 1]
        yield "that is in per cent", 100 * numbers[place]
        yield "errors of opposite sign cancel: take their absolute values", fmean(signed)
        said = "yours is the error of the rate, not of the seconds"
        yield said, size([1 / (1 + one) - 1 for one in signed])
        said = "that is the error in sample: the row helped to fit its own rate"
        yield said if place == 2 else "that is the error out of sample", numbers[3 - place]
        others = [[other for other in rows if other != row] for row in rows]
        said = "yours leaves out all rows that equal the predicted one, required: that row alone"
        yield said, size(errors(rows, others))
    else:
        yield "that is in TFLOP/s", numbers[place] / 1e12
        yield "that is the logarithm of the rate", math.log(numbers[place])
        yield "the product of many rates overflows: add their logarithms", math.inf
        yield "that is the rate of all devices together", geometric([(c, 1, t) for c, _, t in rows])


def of_all(rows: Rows) -> float:
    return sum(flops for flops, _, _ in rows) / sum(n * t for _, n, t in rows)
