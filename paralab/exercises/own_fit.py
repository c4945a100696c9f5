"""Lab 11: one rate from measured steps, and how far off it is on steps that it has not seen.

The rate is the geometric mean of the rows' rates, which is the least-squares fit of the logarithm
of seconds. A row's error out of sample is that of the rate of all other rows: leave one out
(Stone 1974, "Cross-validatory choice and assessment of statistical predictions").
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import Mistakes, ask

LIMITS = RATE, INSIDE, OUTSIDE = "rate", "error in sample", "error out of sample"
ASKED = {
    RATE: "of three logs: FLOP/s of one device",
    INSIDE: "mean over the rows, a share: 0.1 for 10 %",
    OUTSIDE: "the same, each row by the rate of all others",
}
Rows = list[tuple[float, int, float]]  # FLOPs of a step, devices, seconds
LOGS: tuple[Rows, ...] = (
    [(1.9e19, 3072, 51.4), (6.1e15, 64, 3.7), (3.3e17, 512, 9.1), (8.8e16, 64, 11.2)],
    [(2.0e15, 8, 2.0), (2.0e15, 16, 1.4)],
    [(4e16, 64, 3.638), (4e16, 32, 9.4), (5e16, 128, 2.9), (7e15, 8, 6.6), (9e17, 1024, 8.8)],
)


@exercise(Takes("own_fit(rows)"), lab="11", asked=ASKED)
def own_fit(tries: Tries) -> None:
    questions = [(0, (rows,)) for rows in LOGS]
    for notes, rows, reply in ask(tries, LOGS, questions):
        notes.where = f"{len(rows)} rows"
        numbers = {
            limit: (number, known(rows, place))
            for place, (limit, number) in enumerate(zip(LIMITS, right(rows), strict=True))
        }
        for limit, wrong in reply.numbers(numbers, 1e-9):
            notes.look(limit, wrong, f"{numbers[limit][0]:.6g}")


def geometric(rows: Rows) -> float:
    return math.exp(sum(math.log(c / (n * t)) for c, n, t in rows) / len(rows))


def arithmetic(rows: Rows) -> float:
    return sum(c / (n * t) for c, n, t in rows) / len(rows)


def of_all(rows: Rows) -> float:
    return sum(c for c, _, _ in rows) / sum(n * t for _, n, t in rows)


def error(rate: float, row: tuple[float, int, float]) -> float:
    flops, devices, seconds = row
    return flops / (devices * rate) / seconds - 1


def right(rows: Rows, rate: Callable[[Rows], float] = geometric) -> tuple[float, float, float]:
    seen = [abs(error(rate(rows), row)) for row in rows]
    unseen = [abs(error(rate(rows[:i] + rows[i + 1 :]), row)) for i, row in enumerate(rows)]
    return rate(rows), sum(seen) / len(rows), sum(unseen) / len(rows)


def known(rows: Rows, place: int) -> Mistakes:
    """(what was done, the number it gives) of the mistakes that are made with number ``place``."""
    found = right(rows)
    signed = [error(geometric(rows), row) for row in rows]
    others = [error(geometric(rows[:i] + rows[i + 1 :]), row) for i, row in enumerate(rows)]
    signs = (0.0, sum(signed) / len(rows), sum(others) / len(rows))
    rates = [1 / (1 + error(found[0], row)) - 1 for row in rows]
    return [
        ("that is with the arithmetic mean of the rates", right(rows, arithmetic)[place]),
        ("that is with all FLOPs over all device seconds", right(rows, of_all)[place]),
        ("that is in TFLOP/s or per cent", found[place] * (1e-12 if place == 0 else 100)),
        ("errors with their signs cancel each other", signs[place]),
        ("that is of the rate, not of the seconds", sum(map(abs, rates)) / len(rows)),
        ("that is the error in sample: the row helped to fit its own rate", found[1]),
        (
            "that is the largest error, not the mean",
            max(map(abs, others if place == 2 else signed)),
        ),
        ("that is the rate of all devices together", geometric([(c, 1, t) for c, _, t in rows])),
        ("that is with the median of the rates", right(rows, median)[place]),
    ]


def median(rows: Rows) -> float:
    rates = sorted(c / (n * t) for c, n, t in rows)
    middle = len(rates) // 2
    return rates[middle] if len(rates) % 2 else (rates[middle - 1] + rates[middle]) / 2
