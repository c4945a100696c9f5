"""What of a notebook travels to a rank by value, and what cannot."""

import paralab as pl
from judged import defined

TEXT = """
import functools, threading

@functools.cache
def fibonacci(n):
    "The n-th."
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

@functools.lru_cache(maxsize=7, typed=True)
def first(p, rank):
    return p - rank

class Sizes:
    @functools.cached_property
    def one(self):
        return 1

    @functools.cache
    def of(self, n):
        return n * self.one

def found():
    kept = fibonacci(60), fibonacci.__doc__, first(5, 2), Sizes().of(4)
    return *kept, first.cache_parameters(), fibonacci.cache_info().currsize

@functools.cache
def warmup(rank, p, m, v):
    return min(m, first(p, rank)) if v == 1 else min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1)

lock = threading.Lock()

def locked(rank, p, m, v):
    with lock:
        return warmup(rank, p, m, v)
"""


def test_functions_with_a_cache_travel_and_bring_an_empty_one():
    known = {"maxsize": 7, "typed": True}
    right = 1548008755920, "The n-th.", 3, 4, known, 61
    defined(TEXT, "fibonacci")(5)
    assert pl.launch(defined(TEXT, "found"), ranks=2) == [right, right]


def test_a_function_with_a_cache_is_an_answer():
    assert pl.exercises.warmup.check(defined(TEXT, "warmup")).passed


def test_an_answer_that_cannot_travel_is_told_what_keeps_it():
    verdict = pl.exercises.warmup.check(defined(TEXT, "locked"))
    assert not verdict
    assert "answer='locked': its global 'lock', a lock, cannot be sent to a rank" in verdict.said
