"""Which of ZeRO-3's units are gathered when: the order of events of parallel/zero.Stage3.

Without tensors, so that the prediction of traffic (predict_zero.py) and of memory (memory_zero.py)
go through the same events as a run:

    gather  the unit's all-gather is launched, its buffer has all its bytes from here on
    wait    the next to compute needs it
    free    the buffer is given back

Where parameters are offloaded (parallel/offload.Offloaded3) they have to come up first:

    fetch   this rank's part starts to; alone it has the whole buffer for it from here on, one of
            several the N-th that it brings
    raise   the part is waited for; one of several gathers at once, and has its part until "wait"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paralab.parallel.buckets import Unit
from paralab.spec import ModelSpec


class Event(NamedTuple):
    """What happens to unit number ``unit``: "fetch", "raise", "gather", "wait" or "free"."""

    what: str
    unit: int


class Gathering:
    """The units of one rank that are gathered, ``here``, as its parts compute.

    stages    {stage: its parts} of the rank
    prefetch  units that may be gathered ahead of those in use
    away      whether parameters come up from the host or from files
    alone     whether nobody else has a part of them
    """

    def __init__(
        self, model: ModelSpec, stages: Mapping[int, Sequence[str]], units: Sequence[Unit],
        prefetch: int, *, away: bool = False, alone: bool = False,
    ) -> None:  # fmt: skip
        self.prefetch, self.away, self.alone = prefetch, away, alone
        self.here: dict[int, str] = {}  # unit -> "fetch" or "gather": under way; "wait": there
        self.needs: dict[str, list[int]] = {p: [] for parts in stages.values() for p in parts}
        self.backwards = parts_with_backward(model, stages)
        with_head = next((parts for parts in stages.values() if "head" in parts), ())
        tied = model.tied and "embedding" in with_head
        self.users: list[list[str]] = []  # of each unit, the parts that need it
        for number, unit in enumerate(units):
            both = tied and "embedding.token.weight" in unit.names
            self.users.append([unit.part, "head"] if both else [unit.part])
            for part in self.users[-1]:
                self.needs[part].append(number)

    def forward(self, parts: Sequence[str], at: int) -> list[Event]:
        """Part number ``at`` of a stage is about to compute."""
        return self._enter(parts[at:])

    def leave(self, parts: Sequence[str], at: int) -> list[Event]:
        """It has computed."""
        later = set(parts[at + 1 :])
        return self.release([u for u in self.needs[parts[at]] if later.isdisjoint(self.users[u])])

    def backward(self, parts: Sequence[str], at: int) -> list[Event]:
        """Its backward is about to begin."""
        order = [part for part in parts[: at + 1] if part in self.backwards][::-1]
        wanted = set(order)
        freed = self.release([u for u in self.here if wanted.isdisjoint(self.users[u])])
        return freed + self._enter(order)

    def release(self, units: Sequence[int]) -> list[Event]:
        """Nobody needs these any more; what is still on its way is waited for first."""
        events = []
        for unit in units:
            if unit in self.here:
                last = self.here.pop(unit)
                events += {"fetch": [Event("raise", unit)], "gather": [Event("wait", unit)],
                           "wait": []}[last]  # fmt: skip
                events.append(Event("free", unit))
        return events

    def _units(self, parts: Sequence[str], most: int) -> list[int]:
        """What these parts need, in order: all, or ``most`` and what the last part needs beside."""
        found: dict[int, None] = {}
        for part in parts:
            if len(found) >= most:
                break
            found.update(dict.fromkeys(self.needs[part]))
        return list(found)

    def _enter(self, parts: Sequence[str]) -> list[Event]:
        """The first of ``parts`` is about to compute, the others follow."""
        now = len(self.needs[parts[0]])
        ahead, events = now + self.prefetch, []
        further = ahead + (not self.alone)
        units = self._units(parts, further)
        if self.away:
            events = [Event("fetch", unit) for unit in units[:further] if unit not in self.here]
            self.here.update((unit, "fetch") for _, unit in events)
        if not (self.away and self.alone):
            for unit in units[:ahead]:
                if self.here.get(unit) == "fetch":
                    events.append(Event("raise", unit))
                if self.here.get(unit, "fetch") == "fetch":
                    events.append(Event("gather", unit))
                    self.here[unit] = "gather"
        for unit in units[:now]:
            if self.here[unit] != "wait":
                events.append(Event({"fetch": "raise", "gather": "wait"}[self.here[unit]], unit))
                self.here[unit] = "wait"
        return events


def parts_with_backward(model: ModelSpec, stages: Mapping[int, Sequence[str]]) -> set[str]:
    """Parts that a gradient flows through: those of which, or below which, something trains."""
    found: set[str] = set()
    for stage, parts in stages.items():
        trains = stage > 0  # what a pipeline sends on has a gradient
        for part in parts:
            trains = trains or any(
                model.trainable(name)
                for name in model.parameter_shapes()
                if name.startswith(f"{part}.")
            )
            found.update([part] if trains else [])
    return found
