"""Compares the arrays of all ranks with the right ones, and explains the first difference.

All checkers of arrays use `first_wrong`. It knows the mistakes that people make wherever ranks
compute one result together: an array is unchanged, wrong by a constant factor, one term of a sum
alone, or another rank's part; a term of the sum is missing, or is in it twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paralab.exercises.lazy import np

TOLERANCE = 1e-5  # of the largest entry: for sums of a few hundred numbers in another order

Known = Callable[[int], Iterable[tuple[str, Any]]]  # rank -> (words, array that a mistake gives)


def first_wrong(
    name: str,
    found: Sequence[Any],
    wanted: Sequence[np.ndarray],
    *,
    tolerance: float = TOLERANCE,
    start: Sequence[np.ndarray] | None = None,
    terms: Known = lambda rank: (),
    known: Known = lambda rank: (),
    ranks: Callable[[int], str] = "rank {}".format,
) -> str:
    """The first wrong array and the mistake that explains it, in words; "" if all are right.

    name           the name of the array in these words
    found, wanted  each rank's array, and the right one
    tolerance      as a share of the largest entry of all right arrays
    start          each rank's array before: then to leave it unchanged is a known mistake, and so
                   is to change it by the wrong factor
    terms          rank -> (name, array) of each term, if the right array is a sum
    known          rank -> (words, array) of further mistakes
    ranks          rank -> its name
    """
    wanted = [np.asarray(right, dtype=np.float64) for right in wanted]
    allowed = tolerance * max(
        (float(np.abs(right).max(initial=0.0)) for right in wanted), default=0
    )
    for rank, (got, right) in enumerate(zip(found, wanted, strict=True)):
        got, where = np.asarray(got), f"{ranks(rank)}: {name}" if name else ranks(rank)
        if got.dtype.kind not in "fiub":
            return f"{where} has elements of type {got.dtype}, required: float32"
        if got.shape != right.shape:
            return f"{where} has shape {got.shape}, required: {right.shape}"
        got = got.astype(np.float64)
        wrong = np.argwhere(~(np.abs(got - right) <= allowed))  # NaN is wrong too
        if not len(wrong):
            continue
        index = tuple(int(i) for i in wrong[0])
        place = f"{index[0]:,}" if len(index) == 1 else f"{index}"
        values = distinct(float(got[index]), float(right[index]))
        before = np.zeros_like(right) if start is None else np.asarray(start[rank], np.float64)
        mistakes = [
            ("it is zero everywhere" if start is None else "it is as it was before", before),
            *known(rank),
            *_of_terms(list(terms(rank)), right, got, allowed),
            *((f"it is {ranks(n)}'s part", other) for n, other in enumerate(wanted) if n != rank),
        ]
        # a mistake whose array is right but for rounding explains nothing
        mistakes = [(words, one) for words, one in mistakes if not near(right, one, allowed / 2)]
        why = _first_near(got, mistakes, allowed)
        why = why or _factor(got, right, before, allowed, start is not None)
        if not why and len(wrong) < got.size:  # the mistake may concern a part of the array
            part = tuple(wrong.T)
            mistakes = [(w, np.asarray(m)[part]) for w, m in mistakes if np.shape(m) == got.shape]
            if why := _first_near(got[part], mistakes, allowed):
                why = why[2:].removesuffix(" everywhere")
                why = f"; in {len(wrong):,} of {got.size:,} elements {why}"
        return f"{where}, element {place}: {values[0]}, required: {values[1]}{why}"
    return ""


def first_wrong_tensor(
    found: Sequence[Mapping[str, Any]],
    wanted: Mapping[str, np.ndarray],
    *,
    start: Mapping[str, np.ndarray] | None = None,
    known: Mapping[str, Mapping[str, Any]] | None = None,
    ranks: Callable[[int], str] = "rank {}".format,
    tolerance: float = TOLERANCE,
) -> str:
    """`first_wrong` of named tensors, of which a rank may have only some.

    found          {name: array} of each rank
    wanted, start  {name: array}, the same for all ranks
    known          {words: {name: array}} of further mistakes
    """
    for name, right in wanted.items():
        has = [rank for rank, one in enumerate(found) if name in one]
        wrong = first_wrong(
            name,
            [found[rank][name] for rank in has],
            [right] * len(has),
            start=start and [start[name]] * len(has),
            known=lambda _, name=name: ((w, one.get(name)) for w, one in (known or {}).items()),
            ranks=lambda place, has=has: ranks(has[place]),
            tolerance=tolerance,
        )
        if wrong:
            return wrong
    return ""


def first_other_bits(
    found: Mapping[str, np.ndarray],
    wanted: Mapping[str, np.ndarray],
    known: Callable[[str], Iterable[tuple[str, Any]]] = lambda name: (),
) -> str:
    """The first tensor that is not equal bit for bit, in words, or "". known: name -> (words,
    array) of known mistakes.
    """
    for name, right in wanted.items():
        if found[name].shape != right.shape:
            return f"{name} has shape {found[name].shape}, required: {right.shape}"
        if found[name].tobytes() != right.tobytes():
            count = int((found[name] != right).sum())
            largest = np.abs(right).max()
            most = np.abs(found[name] - right).max() / largest
            how = f"by up to {most:.1e} of its largest entry"
            if lost := int(np.isnan(found[name]).sum()):
                how = f"of which {lost:,} {'is' if lost == 1 else 'are'} NaN"
            why = _first_near(found[name], known(name), 0.0)
            if not why and most > TOLERANCE:
                before = np.zeros_like(right)
                why = _factor(found[name], right, before, TOLERANCE * largest, False)
            return f"{name} differs in {count:,} of {right.size:,} elements, {how}{why}"
    return ""


def _of_terms(
    terms: Sequence[tuple[str, Any]], right: np.ndarray, got: np.ndarray, allowed: float
) -> Iterable[tuple[str, Any]]:
    for name, term in terms:
        yield f"it is the one term {name}, to which no other was added", term
    for name, term in terms if len(terms) > 1 else ():
        yield f"the term {name} is missing", right - term
        yield f"the term {name} is in it twice", right + term
    for count in range(2, len(terms) - 1):  # with one less, a term is missing
        for some in itertools.combinations(terms, count):
            names = " and ".join(name for name, _ in some)
            yield f"only the terms {names} are in it", sum(term for _, term in some)
    alone = np.full_like(right, np.nan)
    for _, term in terms:
        alone = np.where(np.abs(got - term) <= 2 * allowed, term, alone)
    if np.isfinite(alone).all():
        yield "each element is one term alone, to which no other was added", alone


def _first_near(got: np.ndarray, known: Iterable[tuple[str, Any]], allowed: float) -> str:
    return next((f"; {words}" for words, other in known if near(got, other, allowed)), "")


def near(got: np.ndarray, other: Any, allowed: float) -> bool:
    """Whether two arrays are equal up to twice ``allowed``; NaN equals NaN."""
    if np.shape(other) != got.shape:
        return False
    return bool(((np.abs(got - other) <= 2 * allowed) | (np.isnan(got) & np.isnan(other))).all())


def _factor(
    got: np.ndarray, right: np.ndarray, before: np.ndarray, allowed: float, started: bool
) -> str:
    moved, required = got - before, right - before
    size = float((required * required).sum())
    with np.errstate(over="ignore", invalid="ignore"):
        factor = float((moved * required).sum()) / size if size else 0.0
        close = allowed * max(1.0, abs(factor))
        if not (size and np.isfinite(factor) and near(moved, factor * required, close)):
            return ""
    whole = (n and round(n) and abs(n - round(n)) < 1e-3 for n in (factor, factor and 1 / factor))
    if required.size == 1 and not any(whole):  # of single numbers each is a multiple of the other
        return ""
    if started:
        return f"; it has changed by {times(factor)} what is required"
    return f"; it is {times(factor)} what is required"


def times(factor: float) -> str:
    """The factor in words, "0.5 times", with enough digits to differ from 1."""
    digits = next((d for d in range(3, 10) if float(f"{factor:.{d}g}") != 1), 10)
    return f"{factor:.{digits}g} times"


def distinct(yours: float, right: float) -> tuple[str, str]:
    """Both numbers as text, with as many digits as tell them apart."""
    yours, right = yours + 0.0, right + 0.0  # no "-0", which some builds of torch compute
    for digits in range(5, 18):
        both = f"{yours:.{digits}g}", f"{right:.{digits}g}"
        if both[0] != both[1]:
            break
    return both
