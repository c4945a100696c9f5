"""How two ways of doing one thing are compared: in turn, in the same ranks, several times over.

[Note: who comes first] What is built second lies elsewhere in memory and ran up to 2 % slower here,
whichever side it was. So the ranks are started anew several times, and the sides take turns in
being built first as well as in running first.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from paralab.launch import launch_program

ROUNDS, PAIRS_A_ROUND = 6, 4


def together() -> float:
    """The time, once all ranks are here."""
    import torch.distributed as dist

    dist.barrier()
    return time.perf_counter()


def take_turns(
    sides: dict[str, Callable[[int], Any]],
    *,
    steps: int,
    pairs: int = PAIRS_A_ROUND,
    begin: Callable[[], float] = together,
    end: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """In a rank: seconds per step of each side's turns, after one pair of warm-up."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(pairs + 1):
        for side in sides if turn % 2 else reversed(sides):
            began = begin()
            for i in range(steps):
                sides[side](turn * steps + i)
            if turn:
                times[side].append((end() - began) / steps)
    return times


def trained_in_turn(
    sides: dict[str, Callable[[], Callable[[int], Any]]], ours_first: bool, *, steps: int
) -> dict[str, list[float]]:
    """In a rank: `take_turns` of two trainings, which are built in turn and are the same one."""
    both = {name: sides[name]() for name in (sides if ours_first else reversed(sides))}
    for step in range(3):
        ours, theirs = (both[name](step) for name in sides)
        if ours and theirs:  # of a pipeline and of tensor parallelism some ranks say no loss
            assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-3, step
    return take_turns({name: both[name] for name in sides}, steps=steps)


def slowest_rank(
    program: Callable[..., dict[str, list[float]]], ranks: int, args: tuple
) -> tuple[list[float], list[float]]:
    """Turns of (ours, theirs) over fresh launches of ``program(context, ours_first, *args)``."""
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(ROUNDS):
        task = (number % 2 == 0, *args)
        parts = launch_program(program, ranks, task, timeout=300, device="cpu")
        for side, seconds in times.items():
            seconds += [max(t) for t in zip(*(part[side] for part in parts), strict=True)]
    return times["ours"], times["theirs"]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lower, upper): the interval by bootstrap of the median, seeded."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1950]


def row(name: str, peer: str, ours: Sequence[float], theirs: Sequence[float], note: str) -> dict:
    """One comparison for bench.json: seconds of both sides and the ratio pair by pair."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio, low, high = median_interval(ratios)
    interval = f"95 % interval {low:.3f} to {high:.3f} over {len(ratios)} pairs"
    return {
        "name": name,
        "peer": peer,
        "paralab_s": statistics.median(ours),
        "peer_s": statistics.median(theirs),
        "ratio": ratio,
        "note": f"{interval}; {note}",
    }
