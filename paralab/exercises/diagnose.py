"""Compares the arrays of all ranks with the right ones, and explains the first difference.

All checkers of arrays use `first_wrong`. It knows the mistakes that people make wherever ranks
compute one result together: an array is unchanged, wrong by a constant factor, or another rank's
part; terms of a sum are missing, are in it twice, or are those of another part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from paralab.exercises.lazy import np
from paralab.exercises.verdict import first

FEW = 50  # elements, in which a mistake may be found by chance
CHANGED = "changed as another place has to"
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
    others: Known = lambda rank: (),
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
    others         rank -> (name, array) of terms that a mistake adds instead
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
        index = tuple(wrong[0].tolist())
        values = distinct(float(got[index]), float(right[index]))
        before = np.zeros_like(right) if start is None else np.asarray(start[rank], np.float64)
        mistakes = [
            ("it is zero everywhere" if start is None else "it is as it was before", before),
            *known(rank),
            *((f"it is {ranks(n)}'s part", other) for n, other in enumerate(wanted) if n != rank),
        ]
        # a mistake whose array is right but for rounding explains nothing
        mistakes = [(words, one) for words, one in mistakes if not near(right, one, allowed / 2)]
        addends = list(terms(rank)), list(others(rank))
        why = _first_near(got, mistakes, allowed)
        why = why or _factor(got, right, before, allowed, start is not None)
        why = why or _of_terms(*addends, right, got, allowed)
        for size in (len(wrong), len(wrong) // 2, len(wrong) // 4):  # or of a part of the array
            if not why and size < got.size and size > FEW * (size < len(wrong)):
                part = tuple(wrong[:size].T)
                here = [
                    [(w, np.asarray(one)[part]) for w, one in pairs if np.shape(one) == got.shape]
                    for pairs in (mistakes, *addends)
                ]
                why = _first_near(got[part], here[0], allowed)
                if why := why or _of_terms(*here[1:], right[part], got[part], allowed):
                    why = why[2:].removesuffix(" everywhere")
                    why = f"; in {size:,} of {got.size:,} elements {why}"
        return f"{where}, element {_place(index)}: {values[0]}, required: {values[1]}{why}"
    return ""


def first_wrong_tensor(
    found: Sequence[Mapping[str, Any]],
    wanted: Mapping[str, np.ndarray],
    *,
    start: Mapping[str, np.ndarray] | None = None,
    terms: Mapping[str, Mapping[str, Any]] | None = None,
    known: Mapping[str, Mapping[str, Any]] | None = None,
    ranks: Callable[[int], str] = "rank {}".format,
    tolerance: float = TOLERANCE,
) -> str:
    """`first_wrong` of named tensors, of which a rank may have only some.

    found          {name: array} of each rank
    wanted, start  {name: array}, the same for all ranks
    terms, known   {words: {name: array}} of the terms, and of further mistakes
    """

    def of(arrays: Mapping[str, Mapping[str, Any]] | None, name: str) -> list[tuple[str, Any]]:
        return [(words, one.get(name)) for words, one in (arrays or {}).items()]

    def of_another(name: str, rank: int) -> Iterator[tuple[str, Any]]:
        """(words, array) if the first wrong elements, or their changes since the start, are those
        of another place in the tensors.
        """
        got, right = found[rank][name], np.ravel(wanted[name])
        flat = np.nan_to_num(np.ravel(got).astype(float), posinf=0, neginf=0)
        first = np.argmax(~(np.abs(flat - right) <= tolerance * np.abs(right).max()))
        for words, before in (("elements of another place", {}), (CHANGED, start or {})):
            off = {other: np.ravel(array - before.get(other, 0)) for other, array in wanted.items()}
            piece = (flat - np.ravel(before.get(name, 0)))[first : first + 16]
            # Pieces with zeros, as a table's unused rows have them, may be alike by chance.
            limit = min(np.ptp(piece), np.abs(piece - off[name][first : first + 16]).max()) / 100
            for other, array in off.items():
                if array.size >= 16 == np.count_nonzero(piece):
                    windows = np.lib.stride_tricks.sliding_window_view(array, 16)
                    if (np.abs(windows - piece).max(axis=1) < limit).any():
                        yield f"from there on it has {words}, in {other}", got

    def wrong(name: str, right: np.ndarray) -> str:
        has = [rank for rank, one in enumerate(found) if name in one]
        return first_wrong(
            name,
            [found[rank][name] for rank in has],
            [right] * len(has),
            start=start and [start[name]] * len(has),
            terms=lambda _: of(terms, name),
            known=lambda at: [*of(known, name), *of_another(name, has[at])],
            ranks=lambda at: ranks(has[at]),
            tolerance=tolerance,
        )

    return first(wrong(name, right) for name, right in wanted.items())


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
            zero, part = np.zeros_like(right), found[name] != right
            mistakes = [("it is zero", zero), *known(name)]
            there = ((words, one[part]) for words, one in mistakes if one.shape == right.shape)
            why = _first_near(found[name][part], there, 0.0)
            if not why and most > TOLERANCE:
                why = _factor(found[name], right, zero, TOLERANCE * largest, False)
            if count < right.size:
                place = _place(tuple(np.argwhere(part)[0].tolist()))
                why = why.replace("; it", "; there it") or f"; the first is element {place}"
            return f"{name} differs in {count:,} of {right.size:,} elements, {how}{why}"
    return ""


def shifted(terms: Iterable[tuple[str, np.ndarray]], n: int) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of each term, (elements,), with each of its n parts in the place of another."""
    for name, term in terms:
        whole = padded(term, n)
        for by in range(1, n):
            rolled = np.roll(whole, -by * (len(whole) // n))
            yield f"{name} (from part r + {by})", rolled[: len(term)]


def padded(array: np.ndarray, n: int) -> np.ndarray:
    """The array, (elements,), and so many zeros that n divides its length."""
    return np.pad(array, (0, -len(array) % n))


def _of_terms(
    terms: Sequence[tuple[str, Any]],
    others: Sequence[tuple[str, Any]],
    right: np.ndarray,
    got: np.ndarray,
    allowed: float,
) -> str:
    """How often each of the terms, whose sum is right, and of the others is in an array, in words;
    "" if it is no sum of them.
    """
    if not terms or not np.isfinite(got).all():
        return ""
    names = [name for name, _ in (*terms, *others)]
    arrays = np.stack([np.ravel(one).astype(np.float64) for _, one in (*terms, *others)], axis=1)
    sizes = np.linalg.norm(arrays, axis=0)
    if sizes.all() and len(names) < got.size:
        factors, _, rank, _ = np.linalg.lstsq(arrays / sizes, got.ravel(), rcond=1e-3)
        left = np.abs(got.ravel() - arrays / sizes @ factors).max()
        if rank == len(names) and left <= min(allowed, np.abs(got - right).max() / 100):
            return _counted(names, (factors / sizes).round(3).tolist(), len(terms))
    matching = [np.abs(got - term) <= 2 * allowed for _, term in terms]
    alone = "; each element is one term alone, to which no other was added"
    return alone if np.any(matching, axis=0).all() else ""


def _counted(names: Sequence[str], counts: Sequence[float], right: int) -> str:
    """How often each term is in a sum, of which the first ``right`` have to be in it once."""
    inside = [name for name, count in zip(names, counts, strict=True) if count]
    once = {count for count in counts if count} == {1}
    if once and len(inside) == 1:
        return f"; it is the one term {inside[0]}, to which no other was added"
    if once and 2 * len(inside) <= right and not any(counts[right:]):
        return f"; only the terms {' and '.join(inside)} are in it"
    wrong = defaultdict(list)
    for at, (name, count) in enumerate(zip(names, counts, strict=True)):
        if count != (at < right):
            wrong[count].append(name)
    often = {0: "missing", 1: "in it", 2: "in it twice"}
    said = [
        f"the term{'s' * (len(some) > 1)} {' and '.join(some)} {'is' if len(some) == 1 else 'are'} "
        + often.get(count, f"in it {count:.3g} times")
        for count, some in wrong.items()
    ]
    return f"; {', '.join(said)}" if said else ""


def _place(index: tuple[int, ...]) -> str:
    return f"{index[0]:,}" if len(index) == 1 else f"{index}"


def _first_near(got: np.ndarray, known: Iterable[tuple[str, Any]], allowed: float) -> str:
    return next((f"; {words}" for words, other in known if near(got, other, allowed)), "")


def near(got: np.ndarray, other: Any, allowed: float) -> bool:
    """Whether two arrays are equal up to twice ``allowed``; NaN and infinity equal themselves."""
    if np.shape(other) != got.shape:
        return False
    return bool(np.allclose(got, other, rtol=0, atol=2 * allowed, equal_nan=True))


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
    said, ratio = times(factor), Fraction(factor).limit_denominator(9)
    simple = ratio.denominator in (3, 6, 7, 9) and 1 < abs(ratio.numerator) < 10
    if simple and math.isclose(ratio, factor, rel_tol=1e-4):
        said = f"{ratio} times"  # shows a divisor for another number of ranks
    return f"; it {'has changed by' if started else 'is'} {said} what is required"


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
