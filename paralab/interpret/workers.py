"""Instructions on the lanes "h2d", "d2h", "disk" and "host": each becomes a job for another thread.

The rank's own thread allocates what the instruction writes, on the device too, where the ledger
sees it. The job then only moves bytes, or computes on tensors on the host. jobs.py says which jobs
it comes after.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, float32, uint8

from paralab.interpret.flat import DTYPES, flat_of
from paralab.interpret.host import plain
from paralab.interpret.jobs import Order
from paralab.interpret.lanes import Job
from paralab.interpret.state import State
from paralab.programs.instructions import ADD, COPY, NORM, Instr, Value
from paralab.programs.tiers import BUFFERS, elements, moved, ring, rings, rows

Work = Callable[[], Any]


class Workers:
    """One rank's jobs.

    new      function that allocates a value on the device
    arrived  the event after which the verdict on the gradients is on the host, or None
    """

    def __init__(self, state: State, new: Callable[[Value], Any]) -> None:
        self.state, self.host, self.new = state, state.host, new
        self.program, self.pp, self.store = state.program, state.pp, state.store
        self.order = Order(self.program.plan)
        self.arrived: Any = None
        self.buffers = {  # of the rings, by name
            name: [self.host.empty((size,), uint8, "buffers") for _ in range(BUFFERS)]
            for name, size in rings(self.program, self.pp).items()
        }

    def begin(self, ins: Instr) -> Job:
        """Hand an instruction over to its lane as a job."""
        after = self.order.predecessors(ins)
        for v in ins.writes:
            if v not in self.store:
                self.store[v] = self._room(v)
        op, category, size = moved(self.program, ins, self.pp)
        lane = self.host.lanes[ins.lane]
        job = lane.submit(self._work(ins), after=after, op=op, category=category, size=size)
        self.order.add(ins, job)
        return job

    def free(self, value: Value, held: Any) -> None:
        """The value's memory ends: no call or job in flight uses it."""
        borrowed = value[0] in ("host.x", "file.x") and value not in self.order.slots
        self.order.end((value,))
        if borrowed:
            self.host.give_back(held)

    def copied(self, numbers: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Copies of numbers on the device for jobs to read, as the rank may change its own.

        From a GPU they are still in flight: a job that reads them first waits for `arrived`.
        """
        cuda = self.host.cuda
        room = partial(torch.empty, pin_memory=True) if cuda else plain
        with self.host.recorder.unwatched():
            copies = tuple(
                n if n is None else room((), dtype=float32).copy_(n, non_blocking=True)
                for n in numbers
            )
        self.arrived = torch.cuda.current_stream().record_event() if cuda else None
        return copies

    # ---- what a job works on ---------------------------------------------------------------------
    def _room(self, v: Value) -> Any:
        """Allocate a value on its tier, or take its buffer of a ring."""
        kind, name = v[0], ring(self.program.plan, v)
        if "." not in kind:
            return self.new(v)
        item, count = elements(self.program, v, self.pp)
        dtype = DTYPES[self.program.precision_of(kind)]
        if name:
            buffer = self.buffers[name][self.order.slots[v].number][: item * count]
            if kind == "host.opt":
                return buffer.view(float32).view(rows(self.program), -1)
            return buffer.view(dtype)
        if kind == "file.x":
            return self.host.borrow_file(item * count)
        return self.host.borrow(count, dtype)

    def _tensor(self, v: Value) -> Tensor:
        return flat_of(self.store[v])

    def _work(self, ins: Instr) -> Work:
        if ins.op == COPY:
            return self._disk(ins) if ins.lane == "disk" else self._copy(ins)
        first, last = self._tensor(ins.reads[0]), self._tensor(ins.writes[-1])
        if ins.op == ADD:
            return lambda: last.add_(first)
        if ins.op == NORM:
            return lambda: last.copy_(self.state.norm_of(ins.unit, first))
        held = {v[0]: self.store[v] for v in (*ins.reads, *ins.writes)}
        arrived = self.arrived if "host.verdict" in held else None
        return self.state.offloaded.update(self.state.optimizer, held, first, arrived)

    def _copy(self, ins: Instr) -> Work:
        source, target = self._tensor(ins.reads[0]), self._tensor(ins.writes[0])
        if ins.reads[0][0] == "host.opt":
            source = source[-1]  # the master weights
        if ins.writes[0][0].startswith("host."):
            target = target.view(source.shape)
        else:
            source = source.view(target.shape)
        return lambda: target.copy_(source, non_blocking=True)

    def _disk(self, ins: Instr) -> Work:
        source, target = self.store[ins.reads[0]], self.store[ins.writes[0]]
        files = self.host.files
        if isinstance(source, str):
            return lambda: files.read(source, target)
        return lambda: files.write(target, source)
