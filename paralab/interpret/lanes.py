"""Lanes: the threads that copy between memory tiers while the rank computes.

    h2d, d2h  host to device and back      on a GPU a stream of its own, with pinned memory
    disk      files, read and written
    host      the host's processor: additions and optimizer steps on tensors in its memory

A lane is a thread that does one job after the other, in the order they were handed over; a job
starts when the jobs it comes after are done. Jobs only ever come after jobs handed over before, so
that order is one in which all can run: lanes cannot block each other.

[Note: freed memory] The program says where a value's memory ends: after the rank's WAIT for the
job that uses it, not when a thread has finished. So a job drops its references as soon as it is
done, and the rank's memory is the same in every run.

[Note: streams] On a GPU a copy is issued on the lane's stream, after what the rank had launched
when it handed the job over. `Job.wait` then holds the rank's stream, not its host: the host goes on
launching kernels. Later copies follow the rank's stream. A job on the lanes "host" and "disk"
follows no stream: it waits for a copy itself, even if the rank has already waited for it.

A ``bandwidth`` models a slow link: the lane sleeps for the rest of the time that its bytes take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from paralab.instruments.recorder import Recorder
from paralab.interpret.jobs import Ordered


class Job(Ordered):
    """Work handed to a lane."""

    def __init__(
        self, lane: Lane, span: int, work: Callable[[], Any], after: tuple[Job, ...], size: int
    ) -> None:
        super().__init__(after)  # the rank's thread uses `predecessors`, the lane's uses `after`
        self.lane, self.span, self.size, self.after = lane, span, size, after
        self.work: Callable[[], Any] | None = work
        self.ready: Any = None  # on a stream: event after what the rank had launched
        self.end: Any = None  # on a stream: event after the copy
        self.issued, self.done = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """The rank needs the result: a wait in its picture. Raises what the job raised."""
        if self.over:
            return
        recorder, note = self.lane.recorder, self.lane.note
        recorder.enter("wait", after=(self.span,))
        note(f"a job on lane {self.lane.name}, step {recorder.step}")
        self.issued.wait()
        if self.end is not None and self.error is None:
            torch.cuda.current_stream().wait_event(self.end)
        note("")
        recorder.leave()
        self.settled()
        if self.error is not None:
            raise self.error

    def over_for(self, lane: str) -> bool:
        """See [Note: streams]."""
        return self.over and (self.lane.stream is None or lane not in ("host", "disk"))

    def settle(self) -> None:
        """Hold the calling thread until the job is done. Raises what it raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class Lane:
    """One link of a rank, or its host's processor, as a thread with a queue of jobs.

    name       as in the report: "h2d", "d2h", "disk", "host"
    device     the rank's; on a GPU the lanes "h2d" and "d2h" have a stream. None: the host's
    bandwidth  limit in bytes per second; None: no limit
    note       function that records what the rank waits for
    threads    processor threads that its work runs on
    """

    def __init__(
        self,
        name: str,
        recorder: Recorder,
        *,
        device: str | None = None,
        bandwidth: float | None = None,
        note: Callable[[str], None] = lambda text: None,
        threads: int = 1,
    ) -> None:
        self.threads = threads
        self.name, self.recorder, self.bandwidth, self.note = name, recorder, bandwidth, note
        cuda = device is not None and device.startswith("cuda")
        self.device = device if cuda else None
        self.stream = torch.cuda.Stream(device) if cuda and name in ("h2d", "d2h") else None
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._last: Job | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"lane {name}")
        self._thread.start()

    def submit(
        self,
        work: Callable[[], Any],
        *,
        after: Sequence[Job] = (),
        op: str = "copy",
        category: str = "",
        size: int = 0,
    ) -> Job:
        """Hand over ``work``, which moves ``size`` bytes of ``category`` once ``after`` is done."""
        recorder, after = self.recorder, tuple(after)
        spans = (*recorder.cut(), *(job.span for job in after))
        span = recorder.queued(self.name, spans, op=op, category=category, size=size)
        job = self._last = Job(self, span, work, after, size)
        if self.stream is not None:
            job.ready = torch.cuda.current_stream().record_event()
        self._queue.put(job)
        return job

    def drain(self) -> None:
        """Hold the calling thread until everything handed over is done. Raises what it raised."""
        if self._last is not None:
            self._last.settle()

    def close(self) -> None:
        """Do what was handed over, then end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        # Both settings belong to a thread, but its first read of the number of threads takes over
        # the number that another thread has set last.
        torch.get_num_threads()
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(False)
        if self.device is not None:  # else a stream or an event makes a context on the first GPU
            torch.cuda.set_device(self.device)
        while (job := self._queue.get()) is not None:
            try:
                for other in job.after:
                    other.settle()
                (self._do if self.stream is None else self._issue)(job)
            except BaseException as error:  # the rank hears of it where it waits
                job.error = error
            job.after, job.work = (), None
            job.issued.set()
            job.done.set()
            del job

    def _do(self, job: Job) -> None:
        start, began = self.recorder.clock.host(), time.thread_time()
        self._move(job)
        cost = time.thread_time() - began
        self.recorder.worked(job.span, start, self.recorder.clock.host(), cost)

    def _move(self, job: Job) -> None:
        """Do the work; with a ``bandwidth`` take as long as it says."""
        if self.bandwidth is None:
            return job.work()
        settle = (lambda: None) if self.stream is None else self.stream.synchronize
        settle()
        began = time.perf_counter()
        job.work()
        settle()
        time.sleep(max(0.0, job.size / self.bandwidth - (time.perf_counter() - began)))

    def _issue(self, job: Job) -> None:
        """See [Note: streams]."""
        clock = self.recorder.clock
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(job.ready)
            start = clock.mark()
            self._move(job)
            end, over = clock.mark(), self.stream.record_event()
        job.end, job.work = over, None
        job.issued.set()
        over.synchronize()
        self.recorder.worked(job.span, start, end, None)
