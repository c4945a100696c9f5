"""Fold a list of lines: write once what repeats for block after block, or for every micro-batch.

Lines are text with numbers in it: "FORWARD blocks.3 mb 0". Two stretches of lines repeat if they
have the same words, and if from each line to its counterpart all numbers of a kind (block,
micro-batch, bucket) change by the same step. Then the first stretch stands for all of them, with
letters for the numbers that change: "FORWARD blocks.i mb 0", i = 0 … 7. Folds can be folded again,
as blocks inside a micro-batch are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from paralab.programs.instructions import COMPUTE

# {text before a number: (the letter for the number, what it counts)}.
KINDS = {"blocks.": ("i", "blocks"), "mb ": ("k", "micro-batches"), "bucket ": ("j", "buckets")}
NUMBER = re.compile(rf"\b({'|'.join(map(re.escape, KINDS))})(\d+)")
LONGEST = 48  # the most items of a stretch that repeats; a fold is one item
WORTH = 2  # a fold has to save more lines than that

Moves = dict[str, int]  # {kind of number: its step}


@dataclass(frozen=True, eq=False)
class Line:
    """One line: its text, and its position in the list."""

    text: str
    position: int = 0
    length = 1  # lines that it is printed in

    @cached_property
    def shape(self) -> str:
        """The words, which are equal in all repetitions."""
        return self._with(lambda kind, value: "#")

    @cached_property
    def numbers(self) -> list[tuple[str, int]]:
        """(kind, value) of every number, in order."""
        return [(kind, int(value)) for kind, value in NUMBER.findall(self.text)]

    def lettered(self, letters: dict[str, tuple[str, int]]) -> str:
        """The text with "i+1" in place of a number. letters: {kind: (letter, its value)}."""

        def number(kind: str, value: int) -> str:
            if kind not in letters:
                return str(value)
            letter, base = letters[kind]
            return letter + f"{value - base:+d}" * (value != base)

        return self._with(number)

    def _with(self, number: Callable[[str, int], str]) -> str:
        return NUMBER.sub(lambda found: found[1] + number(found[1], int(found[2])), self.text)


@dataclass(frozen=True, eq=False)
class Fold:
    """``count`` stretches of lines, from ``body`` to ``last``; ``moves``: by how much each kind of
    number changes from one to the next.
    """

    body: list[Line | Fold]
    last: list[Line | Fold]
    count: int
    moves: Moves

    @cached_property
    def shape(self) -> tuple:
        """The shapes of the body; and the letters of this fold, whose first values have to be equal
        in all repetitions: a letter stands for one number.
        """
        inside = (item.shape for item in self.body)
        return (self.count, *self.moves.items(), *self.letters.items(), *inside)

    @cached_property
    def numbers(self) -> list[tuple[str, int]]:
        return [number for item in self.body for number in item.numbers]

    @property
    def position(self) -> int:
        return self.body[0].position

    @cached_property
    def length(self) -> int:
        """Lines that it is printed in."""
        return 1 + sum(item.length for item in self.body)

    @cached_property
    def letters(self) -> dict[str, tuple[str, int]]:
        """{kind: (letter, value in the first stretch)} of the numbers that change: the value of the
        first compute, if there is any, so that a gather for the next block is of "blocks.i+1".
        """
        lines = sorted(
            _lines(self.body), key=lambda line: line.text.partition("\t")[0] not in COMPUTE
        )
        first = dict(reversed([number for line in lines for number in line.numbers]))
        return {kind: (KINDS[kind][0], first[kind]) for kind, step in self.moves.items() if step}

    @property
    def what(self) -> str:
        """What ``count`` counts: "blocks"; "times", if more than one kind of number changes, or a
        number by more than one.
        """
        kinds = [kind for kind in self.letters if abs(self.moves[kind]) == 1]
        return KINDS[kinds[0]][1] if len(kinds) == len(self.letters) == 1 else "times"

    @property
    def head(self) -> str:
        """ "× 8 blocks, i = 7 … 0"."""
        texts = [f"× {self.count} {self.what}"]
        for kind, (letter, base) in self.letters.items():
            step = self.moves[kind]
            second = f", {base + step}" * (abs(step) > 1)
            texts.append(f"{letter} = {base}{second} … {base + step * (self.count - 1)}")
        return ", ".join(texts)


Item = Line | Fold


def fold(lines: Sequence[Line], *, worth: int = WORTH) -> list[Item]:
    """Fold the stretches that repeat, short ones first. A fold saves more than ``worth`` lines."""
    items: list[Item] = list(lines)
    length = 1
    while length <= min(LONGEST, len(items) // 2):
        folded = list(_folded(items, length, worth))
        items, length = folded, length + 1 if len(folded) == len(items) else 1
    return items


def _lines(items: Sequence[Item]) -> Iterator[Line]:
    """All lines, of a fold those of its first stretch."""
    for item in items:
        yield from _lines(item.body) if isinstance(item, Fold) else [item]


def _folded(items: list[Item], length: int, worth: int) -> Iterator[Item]:
    """Fold the stretches of one length, from left to right."""
    at = 0
    while at < len(items):
        moves, end = _moves(items, at, length), at + length
        while moves is not None and _moves(items, end - length, length) == moves:
            end += length
        count, body = (end - at) // length, items[at : at + length]
        if count > 1 and (count - 1) * sum(item.length for item in body) > worth:
            yield Fold(body, items[end - length : end], count, moves)
            at = end
        else:
            yield items[at]
            at += 1


def _moves(items: list[Item], at: int, length: int) -> Moves | None:
    """The steps from a stretch to the next one, if these repeat, else None."""
    if at + 2 * length > len(items):
        return None
    steps: Moves = {}
    for number in range(at, at + length):
        before, after = items[number], items[number + length]
        if before.shape != after.shape:
            return None
        for (kind, old), (_, new) in zip(before.numbers, after.numbers, strict=True):
            if steps.setdefault(kind, new - old) != new - old:
                return None
    return steps
