"""Fold a list of lines: what repeats for one block after the other, or for every micro-batch, once.

Lines are text with numbers in it: "FORWARD blocks.3 mb 0". Two stretches of equal length repeat if
their words are equal and every number of a kind (block, micro-batch, bucket) has moved by the same
step from each line to its counterpart. Then the first stretch stands for all of them, with letters
for what moves: "FORWARD blocks.i mb 0", i = 0 … 7. Folds fold again: blocks inside a micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from paralab.programs.instructions import COMPUTE

# What stands before a number: the letter for it, and what one counts with it.
KINDS = {"blocks.": ("i", "blocks"), "mb ": ("k", "micro-batches"), "bucket ": ("j", "buckets")}
NUMBER = re.compile(rf"\b({'|'.join(map(re.escape, KINDS))})(\d+)")
LONGEST = 48  # items of a stretch that repeats; a fold is one item
WORTH = 2  # a fold has to save more lines

Moves = dict[str, int]  # {kind of number: its step}


@dataclass(frozen=True, eq=False)
class Line:
    """One line: its text, and where it stands in the list."""

    text: str
    position: int = 0
    length = 1  # lines that it is printed in

    @cached_property
    def shape(self) -> str:
        """What is equal in all repetitions."""
        return self._with(lambda kind, value: "#")

    @cached_property
    def numbers(self) -> list[tuple[str, int]]:
        """(kind, value) of every number, in order."""
        return [(kind, int(value)) for kind, value in NUMBER.findall(self.text)]

    @property
    def lines(self) -> Iterator[Line]:
        yield self

    def moved(self, moves: Moves, times: int) -> Line:
        """The line that comes so many times after it."""
        text = self._with(lambda kind, value: str(value + times * moves.get(kind, 0)))
        return Line(text, self.position)

    def said(self, letters: dict[str, tuple[str, int]]) -> str:
        """The text, with a letter and a distance for each number of these kinds."""

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
    """``count`` stretches, of which ``body`` is the first; ``moves``: what moves from one to the
    next, and by how much.
    """

    body: list[Line | Fold]
    count: int
    moves: Moves

    @cached_property
    def shape(self) -> tuple:
        """With what moves inside, which is not to move outside as well: a letter is one number."""
        inside = (item.shape for item in self.body)
        return (self.count, *self.moves.items(), *self.letters.items(), *inside)

    @cached_property
    def numbers(self) -> list[tuple[str, int]]:
        return [number for item in self.body for number in item.numbers]

    @property
    def lines(self) -> Iterator[Line]:
        """Those of the first stretch."""
        return (line for item in self.body for line in item.lines)

    @property
    def position(self) -> int:
        return self.body[0].position

    @cached_property
    def length(self) -> int:
        """Lines that it is printed in."""
        return 1 + sum(item.length for item in self.body)

    @cached_property
    def letters(self) -> dict[str, tuple[str, int]]:
        """{kind: (letter, value in the first stretch)} of what moves here. The value is that of the
        compute, if there is any, so a gather ahead of it is of "blocks.i+1".
        """
        lines = sorted(self.lines, key=lambda line: line.text.partition("\t")[0] not in COMPUTE)
        first = dict(reversed([number for line in lines for number in line.numbers]))
        return {kind: (KINDS[kind][0], first[kind]) for kind, step in self.moves.items() if step}

    @property
    def what(self) -> str:
        """What there are ``count`` of: "blocks"; or "times", if that is not what moves by one."""
        kinds = [kind for kind in self.letters if abs(self.moves[kind]) == 1]
        return KINDS[kinds[0]][1] if len(kinds) == len(self.letters) == 1 else "times"

    @property
    def head(self) -> str:
        """ "× 8 blocks, i = 7 … 0"."""
        found = [f"× {self.count} {self.what}"]
        for kind, (letter, base) in self.letters.items():
            step = self.moves[kind]
            second = f", {base + step}" * (abs(step) > 1)
            found.append(f"{letter} = {base}{second} … {base + step * (self.count - 1)}")
        return ", ".join(found)

    def moved(self, moves: Moves, times: int) -> Fold:
        return Fold([item.moved(moves, times) for item in self.body], self.count, self.moves)

    def repeated(self, times: int) -> list[Item]:
        """The stretch that comes so many times after the first."""
        return [item.moved(self.moves, times) for item in self.body]


Item = Line | Fold


def fold(lines: Sequence[Line], *, worth: int = WORTH) -> list[Item]:
    """The lines, with every stretch that repeats folded, short stretches first; a fold saves more
    than ``worth`` lines.
    """
    items: list[Item] = list(lines)
    length = 1
    while length <= min(LONGEST, len(items) // 2):
        made = list(_folded(items, length, worth))
        items, length = made, length + 1 if len(made) == len(items) else 1
    return items


def _folded(items: list[Item], length: int, worth: int) -> Iterator[Item]:
    """Stretches of one length, from left to right."""
    at = 0
    while at < len(items):
        moves, end = _moves(items, at, length), at + length
        while moves is not None and _moves(items, end - length, length) == moves:
            end += length
        count, body = (end - at) // length, items[at : at + length]
        if count > 1 and (count - 1) * sum(item.length for item in body) > worth:
            yield Fold(body, count, moves)
            at = end
        else:
            yield items[at]
            at += 1


def _moves(items: list[Item], at: int, length: int) -> Moves | None:
    """The steps by which the stretch after this one follows it, if their words are equal and the
    steps are the same for all numbers of a kind.
    """
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
