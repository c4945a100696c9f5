"""What a rank writes down while it trains: spans of time and rows of traffic.

Always on and nearly free: entering or leaving a span reads two clocks and appends one tuple; on a
GPU it records one CUDA event, and nothing waits for the device until the step is over. The columns
are the public contract (`report.tables.Tables`); times are seconds of ``time.perf_counter``,
which on one machine all processes share.

The compute lane is flat: one thing happens at a time. Entering a span inside another (a wait inside
a forward, say) ends the outer one's current part and starts a new part of it afterwards. Launching
a collective also cuts, because what comes after the launch does not precede the collective: so a
replay knows how much of the backward was left to hide it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paralab.instruments.allocator import Allocator, SharedAllocator
from paralab.instruments.marks import clock_of
from paralab.instruments.samples import Sample, rows
from paralab.report.tables import COLUMNS, by_column

if TYPE_CHECKING:
    from torch import Tensor


class Recorder:
    """The notebook of one rank.

    rank, world_size  make span ids unique over ranks: local number * world_size + rank
    device            "cpu" reads thread CPU time as a span's cost, "cuda:i" device time from
                      events
    """

    def __init__(self, *, rank: int, world_size: int, device: str = "cpu") -> None:
        self.rank = rank
        self.clock = clock_of(device)
        self.step = 0
        self._ids = itertools.count(rank, world_size)
        self._open: list[tuple] = []  # stack of (kind, stage, chunk, microbatch, after)
        self._began: Any = None  # marks of the current part of the innermost open span
        self._last = -1  # id of the last part closed on the compute lane
        self._spans: list[tuple] = []
        self._calls: list[tuple] = []
        self._copies: list[tuple] = []
        self._comm_ends: dict[int, Any] = {}
        self._lane_work: dict[int, tuple] = {}  # start, end, cost: what other threads say of spans
        self._steps: list[tuple] = []
        self.allocator = Allocator(device) if device.startswith("cuda") else None
        self._allocated: list[tuple] = []
        self.ledger: Any = None  # ledger.py: counts the bytes of this rank's tensors, where wanted
        self.lookout: Any = None  # asks a GPU for signs of life (ranks/lookout.py)
        self.samples: list[Sample] = []
        self.away: dict[tuple[str, str], int] = {}  # (tier, category): bytes not on the device

    def moves_to(self, device: str) -> None:
        """What is recorded turns out to compute on this GPU: from now on the times are its, and so
        are the bytes. Earlier marks stay what they are, moments of the host; earlier samples go.
        """
        self.clock, self.allocator = clock_of(device), SharedAllocator(device)
        self.allocator.begin()
        self.samples.clear()
        if self.ledger is not None:
            self.ledger.moves_to(device)
        self._sample(self.clock.mark())

    # ---- memory -------------------------------------------------------------------------------
    def owns(self, category: str, *tensors: Tensor) -> None:
        """From now on the storages of these tensors count as ``category``; see ledger.py.

        Free where no ledger is.
        """
        if self.ledger is not None:
            self.ledger.owns(category, *tensors)

    @contextmanager
    def making(self, category: str) -> Iterator[None]:
        """What is made meanwhile counts as ``category`` at once, also where not all of it fits."""
        ledger = self.ledger
        if ledger is None:
            yield
            return
        before, ledger.made = ledger.made, category
        try:
            yield
        finally:
            ledger.made = before

    def holds(self, tier: str, category: str, more: int) -> None:
        """The rank has ``more`` bytes on the "host" or in a "file"; less, if negative."""
        key = (tier, category)
        self.away[key] = self.away.get(key, 0) + more

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """What happens here is no part of the training: it is not counted and not limited."""
        ledger = self.ledger
        if ledger is not None:
            ledger.__exit__(None, None, None)
        try:
            yield
        finally:
            if ledger is not None:
                ledger.__enter__()

    @contextmanager
    def unwritten(self) -> Iterator[None]:
        """What happens here, between two steps, leaves no row."""
        tables = (self._spans, self._calls, self._copies)
        counts = [len(table) for table in tables]
        try:
            yield
        finally:
            for table, count in zip(tables, counts, strict=True):
                del table[count:]

    def _sample(self, now: Any) -> None:
        if self.ledger is not None:
            self.ledger.sample(now, self._open[-1][0] if self._open else "")

    def where(self) -> str:
        """Where this rank stands, for a message: "step 0, forward of micro-batch 1"."""
        if not self._steps or len(self._steps[-1]) > 3:
            return f"before step {len(self._steps)}"
        kind, *_, microbatch, _ = self._open[-1] if self._open else ("between two spans", -1, ())
        return f"step {self.step}, {kind}" + (f" of micro-batch {microbatch}" * (microbatch >= 0))

    # ---- compute lane -------------------------------------------------------------------------
    def enter(
        self, kind: str, microbatch: int = -1, stage: int = 0, chunk: int = 0, after: tuple = ()
    ) -> None:
        """Begin a span on the compute lane; `leave` ends it."""
        now = self._next_part()
        self._open.append((kind, stage, chunk, microbatch, after))
        self._sample(now)

    def leave(self) -> None:
        """End the innermost span."""
        now = self._next_part()
        self._open.pop()
        self._sample(now)

    def cut(self) -> tuple[int, ...]:
        """End the current part and go on with a new one. Returns ``after`` for what starts here."""
        if self._open:
            self._sample(self._next_part())
        return (self._last,) if self._last >= 0 else ()

    def was_waiting(self, after: tuple) -> None:
        """What is open since the last cut has been a wait, for the spans ``after``."""
        _, *place, _ = self._open[-1]
        self._open[-1] = ("wait", *place, after)

    @contextmanager
    def span(
        self, kind: str, microbatch: int = -1, stage: int = 0, chunk: int = 0, after: tuple = ()
    ) -> Iterator[None]:
        """``with recorder.span("forward", microbatch=k): ...``"""
        self.enter(kind, microbatch, stage, chunk, after)
        try:
            yield
        finally:
            self.leave()

    def _next_part(self) -> Any:
        """The mark at which the part that is open ends, and the next one begins."""
        now = self.clock.mark()
        if self._open:
            self._last = next(self._ids)
            *what, after = self._open[-1]
            self._spans.append((self._last, self.step, "compute", *what, self._began, now, after))
        self._began = now
        return now

    # ---- other lanes --------------------------------------------------------------------------
    def launch(self, lane: str, after: tuple, start: Any) -> int:
        """Write down that a collective was launched; `completed` says later when it ended."""
        span = next(self._ids)
        self._spans.append((span, self.step, lane, "comm", 0, 0, -1, start, None, after))
        return span

    def completed(self, span: int, end: Any) -> None:
        """May be called from another thread: it stores one value."""
        self._comm_ends[span] = end

    def settled(self, span: int, end: Any = None) -> None:
        """The wait for ``span`` is over: it ends now, unless its own signal said when."""
        self._comm_ends.setdefault(span, self.clock.host() if end is None else end)

    def queued(
        self, lane: str, after: tuple, *, op: str = "copy", category: str = "", size: int = 0
    ) -> int:
        """Work was handed to a lane that another thread runs; `worked` says later when it was done.

        op  "copy", "read" or "write" of ``size`` bytes; "optimizer" and "compute" move none
        """
        kind = op if op in ("optimizer", "compute") else "copy"
        span, now = next(self._ids), self.clock.host()
        self._spans.append((span, self.step, lane, kind, 0, 0, -1, now, now, after))
        if kind == "copy":
            self._copies.append((self.step, lane, op, category, size, span))
        return span

    def worked(self, span: int, start: Any, end: Any, cost: float | None) -> None:
        """When queued work was done, and its cost in seconds, by default what lies between. Safe in
        any thread.
        """
        self._lane_work[span] = (start, end, cost)

    def call(self, row: tuple) -> None:
        """One ledger row: call, op, axis, ranks, peer, level, phase, payload, wire, span."""
        self._calls.append((self.step, *row))

    # ---- steps and export -----------------------------------------------------------------------
    def begin_step(self, step: int, *, waits: bool = True) -> None:
        """``waits``: for the device, which paralab's own steps have left idle."""
        self.step = step
        self.clock.anchor(waits=waits)
        now = self.clock.mark()
        if not self._steps:
            self.samples.clear()  # building the model is no part of a step
        if self.allocator is not None:
            self.allocator.begin()
        self._steps.append((step, now, self.clock.beside()))
        self._sample(now)

    def end_step(self) -> None:
        """Close the step, after its scalars were read and the device has nothing left to do."""
        step, start, beside = self._steps.pop()
        now = self.clock.mark()
        self._steps.append((step, start, now, self.clock.beside() - beside))
        self._sample(now)
        self.clock.resolve()
        if self.allocator is not None:
            row = self.allocator.row()
            if self._allocated and self._allocated[-1][1] == step:  # it went on
                row = (*map(max, row[:-1], self._allocated.pop()[2:-1]), row[-1])
            self._allocated.append((self.rank, step, *row))

    def go_on(self) -> None:
        """The step that has ended was not over: it goes on, and what was written down since, also
        of the next one, is part of it.
        """
        if len(self._steps[-1]) == 3:  # the next one has begun
            self._steps.pop()
        step, start, _, beside = self._steps.pop()
        self._steps.append((step, start, self.clock.beside() - beside))
        self.step, later = step, step + 1
        self._spans = [(row[0], step, *row[2:]) if row[1] == later else row for row in self._spans]
        self._calls = [(step, *row[1:]) if row[0] == later else row for row in self._calls]
        for at, sample in enumerate(self.samples):
            if sample.step == later:
                self.samples[at] = sample._replace(step=step)

    def drop_step(self, kept: str = "") -> None:
        """The open step was none: it leaves no row. ``kept``: but for its calls, "comm"."""
        step = self._steps.pop()[0]
        self._spans = [row for row in self._spans if row[1] != step or row[3] == kept]
        self._calls = [row for row in self._calls if row[0] != step or kept]
        self._copies = [row for row in self._copies if row[0] != step]
        self.samples[:] = [sample for sample in self.samples if sample.step != step]

    def tables(self) -> dict[str, dict[str, list]]:
        """Everything written down, as columns; CUDA events become seconds here."""
        clock, spans, where, calls = self.clock, [], {}, []
        for span, step, lane, kind, *place, start, end, after in self._spans:
            end = self._comm_ends.get(span, start) if end is None else end
            start, end, cost = self._lane_work.get(span, (start, end, None))
            if cost is None:
                cost = 0.0 if kind in ("wait", "comm") else clock.cost(start, end)
            where[span] = clock.seconds(start), clock.seconds(end)
            spans.append((span, self.rank, step, lane, kind, *place, *where[span], cost, after))
        # What an `unwritten` block left is waited for by no span.
        spans = [(*row, [a for a in after if a in where]) for *row, after in spans]
        for step, call, op, axis, ranks, *row, span in self._calls:
            of_rank = (call, self.rank, step, op, axis, list(ranks))
            calls.append((*of_rank, *row, *where[span], span))
        copies = [(self.rank, *row[:-1], *where[row[-1]], row[-1]) for row in self._copies]
        steps = [
            (self.rank, step, clock.seconds(a), clock.seconds(b), max(beside, 0.0))
            for step, a, b, beside in self._steps
        ]
        memory = rows(self.samples, clock, self.rank)
        found = spans, calls, copies, memory, steps, self._allocated
        return by_column(dict(zip(COLUMNS, found, strict=True)))
