"""What a rank records while it trains: spans of time, and one row per collective and copy.

Recording is always on and costs next to nothing: entering or leaving a span reads two clocks and
appends one tuple. On a GPU it records one CUDA event, and nothing waits for the device until the
step is over. The columns are the public contract (`report.tables.Tables`); times are seconds of
``time.perf_counter``, which all processes of one machine share.

The compute lane is flat: its spans do not overlap. When a span is entered inside another (a wait
inside a forward, say), the current part of the outer span ends, and a new part of it begins when
the inner span is left. A part also ends where a collective is launched: the collective depends on
the part before the launch and can overlap with the part after it, and a replay needs to tell them
apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paralab.instruments.allocator import Allocator
from paralab.instruments.marks import clock_of
from paralab.instruments.samples import Sample, rows
from paralab.report.tables import COLUMNS, by_column

if TYPE_CHECKING:
    from torch import Tensor


class Recorder:
    """The records of one rank.

    rank, world_size  make span ids unique over ranks: rank + world_size * (number on this rank)
    device            says what the cost of a span is: on "cpu" the CPU time of the thread, on
                      "cuda:i" the device time between two events
    """

    def __init__(self, *, rank: int, world_size: int, device: str = "cpu") -> None:
        self.rank = rank
        self.clock = clock_of(device)
        self.step = 0
        self._ids = itertools.count(rank, world_size)
        self._open: list[tuple] = []  # stack of (kind, stage, chunk, microbatch, after)
        self._began: Any = None  # the mark at which the current part of the open span began
        self._last = -1  # id of the part that ended last on the compute lane
        self._spans: list[tuple] = []  # the step is the first field of all rows
        self.calls: list[tuple] = []
        self._copies: list[tuple] = []
        self._comm_ends: dict[int, Any] = {}  # span of a collective: the mark at its end
        self._lane_work: dict[int, tuple] = {}  # span of a job on a lane: its start, end and cost
        self._steps: list[list] = []  # [step, start, end, beside]; end is None: open
        self.allocator = Allocator(device) if device.startswith("cuda") else None
        self._allocated: list[tuple] = []
        self.ledger: Any = None  # counts the bytes of this rank's tensors (ledger.py); None: off
        self.lookout: Any = None  # reports that a GPU makes progress (ranks/lookout.py)
        self.samples: list[Sample] = []
        self.offloaded: dict[tuple[str, str], int] = {}  # (tier, category): bytes offloaded

    def moves_to(self, device: str) -> None:
        """An observed program turns out to compute on this GPU: from now on times and bytes are the
        GPU's. Earlier marks remain times of the host; earlier samples of memory are dropped.
        """
        self.clock, self.allocator = clock_of(device), Allocator(device)
        self.allocator.begin()
        self.samples.clear()
        if self.ledger is not None:
            self.ledger.moves_to(device)
        self._sample(self.clock.mark())

    # ---- memory -------------------------------------------------------------------------------
    def owns(self, category: str, *tensors: Tensor) -> None:
        """From now on these tensors' storages count as ``category`` in the ledger, if one is on."""
        if self.ledger is not None:
            self.ledger.owns(category, *tensors)

    @contextmanager
    def making(self, category: str) -> Iterator[None]:
        """What the block allocates is ``category`` at once, also in an `OutOfMemory` it raises."""
        ledger = self.ledger
        if ledger is None:
            yield
            return
        before, ledger.block_category = ledger.block_category, category
        try:
            yield
        finally:
            ledger.block_category = before

    def holds(self, tier: str, category: str, more: int) -> None:
        """The rank has offloaded ``more`` bytes (if negative, freed them) to "host" or "file"."""
        key = (tier, category)
        self.offloaded[key] = self.offloaded.get(key, 0) + more

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """The block is not part of the training: the ledger neither counts nor limits its bytes."""
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
        """The block, which lies between two steps, leaves no span, collective or copy."""
        tables = (self._spans, self.calls, self._copies)
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
        """Where in the training this rank is, for a message: "step 0, forward of micro-batch 1"."""
        if not self._steps or self._steps[-1][2] is not None:
            return f"before step {len(self._steps)}"
        kind, *_, microbatch, _ = self._open[-1] if self._open else ("between two spans", -1, ())
        return f"step {self.step}, {kind}" + (f" of micro-batch {microbatch}" * (microbatch >= 0))

    # ---- compute lane -------------------------------------------------------------------------
    def enter(
        self, kind: str, microbatch: int = -1, stage: int = 0, chunk: int = 0, after: tuple = ()
    ) -> None:
        """Begin a span on the compute lane; `leave` ends it.

        after  ids of the spans that a wait waits for
        """
        now = self._next_part()
        self._open.append((kind, stage, chunk, microbatch, after))
        self._sample(now)

    def leave(self) -> None:
        """End the innermost span."""
        now = self._next_part()
        self._open.pop()
        self._sample(now)

    def cut(self) -> tuple[int, ...]:
        """End the current part and begin a new one. Returns the ``after`` of a call or job that is
        launched at this point: the id of the part that ended, if there was one.
        """
        if self._open:
            self._sample(self._next_part())
        return (self._last,) if self._last >= 0 else ()

    def was_waiting(self, after: tuple) -> None:
        """The time since the last cut turns out to have been a wait for the spans ``after``."""
        _, *place, _ = self._open[-1]
        self._open[-1] = ("wait", *place, after)

    @contextmanager
    def span(self, kind: str, **settings: Any) -> Iterator[None]:
        """``with recorder.span("forward", microbatch=k): ...``; settings: those of `enter`."""
        self.enter(kind, **settings)
        try:
            yield
        finally:
            self.leave()

    def _next_part(self) -> Any:
        """The mark at which the current part, if there is one, ends and the next one begins."""
        now = self.clock.mark()
        if self._open:
            self._last = next(self._ids)
            *names, after = self._open[-1]
            self._spans.append((self.step, self._last, "compute", *names, self._began, now, after))
        self._began = now
        return now

    # ---- other lanes --------------------------------------------------------------------------
    def launch(self, lane: str, after: tuple, start: Any) -> int:
        """Record that a collective was launched at the mark ``start``; `completed` or `settled`
        adds its end. Returns the id of its span.
        """
        span = next(self._ids)
        self._spans.append((self.step, span, lane, "comm", 0, 0, -1, start, None, after))
        return span

    def completed(self, span: int, end: Any) -> None:
        """The collective ended at the mark ``end``. Safe in any thread: it stores one value."""
        self._comm_ends[span] = end

    def settled(self, span: int, end: Any = None) -> None:
        """A collective was waited for: unless it has `completed`, it ended at ``end``, or now."""
        self._comm_ends.setdefault(span, self.clock.host() if end is None else end)

    def queued(
        self, lane: str, after: tuple, *, op: str = "copy", category: str = "", size: int = 0
    ) -> int:
        """Record that a job was handed to a lane; `worked` adds when the lane ran it. Returns the
        id of its span.

        op  "copy", "read" or "write" of ``size`` bytes; "optimizer" and "compute" move no bytes
        """
        kind = op if op in ("optimizer", "compute") else "copy"
        span, now = next(self._ids), self.clock.host()
        self._spans.append((self.step, span, lane, kind, 0, 0, -1, now, now, after))
        if kind == "copy":
            self._copies.append((self.step, lane, op, category, size, span))
        return span

    def worked(self, span: int, start: Any, end: Any, cost: float | None) -> None:
        """A job ran between these marks, at this cost in seconds; None: the time between them.
        Safe in any thread.
        """
        self._lane_work[span] = (start, end, cost)

    def call(self, row: tuple) -> None:
        """Record a collective: call, op, axis, ranks, peer, level, phase, payload, wire, span."""
        self.calls.append((self.step, *row))

    # ---- steps and export -----------------------------------------------------------------------
    def begin_step(self, step: int, *, waits: bool = True) -> None:
        """Open a step.

        waits  the host may wait until the device is idle, which paralab's own steps leave it
        """
        self.step = step
        if self.allocator is not None:
            self.allocator.begin()
        self.clock.anchor(waits=waits)
        now = self.clock.mark()
        if not self._steps:
            self.samples.clear()  # building the model is no part of a step
        self._steps.append([step, now, None, self.clock.beside()])
        self._sample(now)

    def end_step(self) -> None:
        """Close the step. In paralab's own training the device has completed it by now."""
        step, _, _, beside = self._steps[-1]
        now = self.clock.mark()
        self._steps[-1][2:] = now, self.clock.beside() - beside
        self._sample(now)
        self.clock.resolve()
        if self.allocator is not None:
            row = self.allocator.row()
            if self._allocated and self._allocated[-1][1] == step:  # reopened by `go_on`
                row = (*map(max, row[:-1], self._allocated.pop()[2:-1]), row[-1])
            self._allocated.append((self.rank, step, *row))

    def go_on(self) -> None:
        """Reopen the step that ended last, with all rows since, also those of the next step."""
        if self._steps[-1][2] is None:  # the next step has begun
            self._steps.pop()
        step, _, _, beside = self._steps[-1]
        self._steps[-1][2:] = None, self.clock.beside() - beside
        self.step, later = step, step + 1
        for table in (self._spans, self.calls):
            table[:] = [(step, *row[1:]) if row[0] == later else row for row in table]
        self.samples[:] = [s._replace(step=step) if s.step == later else s for s in self.samples]

    def drop_step(self, kept: str = "") -> None:
        """Discard the open step and its rows; with ``kept`` = "comm" its collectives stay."""
        step = self._steps.pop()[0]
        self._spans = [row for row in self._spans if row[0] != step or row[3] == kept]
        self.calls = [row for row in self.calls if row[0] != step or kept]
        self._allocated = [row for row in self._allocated if row[1] != step]
        self._copies = [row for row in self._copies if row[0] != step]
        self.samples[:] = [sample for sample in self.samples if sample.step != step]

    def tables(self) -> dict[str, dict[str, list]]:
        """All records as {table: {column: values}}; marks become seconds."""
        clock, spans, times, calls = self.clock, [], {}, []  # times: {span: (start, end)}
        for step, span, lane, kind, *place, start, end, after in self._spans:
            end = self._comm_ends.get(span, start) if end is None else end
            start, end, cost = self._lane_work.get(span, (start, end, None))
            if cost is None:
                cost = 0.0 if kind in ("wait", "comm") else clock.cost(start, end)
            times[span] = clock.seconds(start), clock.seconds(end)
            spans.append((span, self.rank, step, lane, kind, *place, *times[span], cost, after))
        # ``after`` may name spans that an `unwritten` block has removed: leave them out.
        spans = [(*row, [span for span in after if span in times]) for *row, after in spans]
        for step, call, op, axis, ranks, *row, span in self.calls:
            of_rank = (call, self.rank, step, op, axis, list(ranks))
            calls.append((*of_rank, *row, *times[span], span))
        copies = [(self.rank, *row[:-1], *times[row[-1]], row[-1]) for row in self._copies]
        steps = [
            (self.rank, step, clock.seconds(start), clock.seconds(end), max(beside, 0.0))
            for step, start, end, beside in self._steps
        ]
        memory = rows(self.samples, clock, self.rank)
        tables = spans, calls, copies, memory, steps, self._allocated
        return by_column(dict(zip(COLUMNS, tables, strict=True)))
