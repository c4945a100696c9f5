"""What of a notebook travels to a rank by value, and what cannot."""

import paralab as pl
from judged import defined

TEXT = """
import functools, threading

@functools.cache
def fibonacci(n):
    "The n-th."
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

class Sizes:
    @functools.cached_property
    def one(self):
        return 1

    @functools.lru_cache(maxsize=7, typed=True)
    def of(self, n):
        return n * self.one

def found():
    kept = fibonacci(60), fibonacci.__doc__, Sizes().of(4)
    return *kept, Sizes.of.cache_parameters(), fibonacci.cache_info().currsize

@functools.cache
def warmup(rank, p, m, v):
    return min(m, p - rank) if v == 1 else min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1)

lock = threading.Lock()

def locked(rank, p, m, v):
    with lock:
        return warmup(rank, p, m, v)
"""


def test_functions_with_a_cache_travel_and_bring_an_empty_one():
    right = 1548008755920, "The n-th.", 4, {"maxsize": 7, "typed": True}, 61
    defined(TEXT, "fibonacci")(5)
    assert pl.launch(defined(TEXT, "found"), ranks=2) == [right, right]


def test_a_function_with_a_cache_is_an_answer_and_one_with_a_lock_cannot_be():
    assert pl.exercises.warmup.check(defined(TEXT, "warmup")).passed
    verdict = pl.exercises.warmup.check(defined(TEXT, "locked"))
    assert not verdict
    assert "answer='locked': its global 'lock', a lock, cannot be sent to a rank" in verdict.said
