"""Strict nbval for the labs: what the plain plugin lets pass is refused here.

nbval runs a stored notebook again and compares every output. By itself it accepts a notebook that
was never executed, takes plotly's random ids for differences, ignores the order of outputs, and
waits 2000 s for a kernel that is dead. With this file:

- plotly figures are compared by what they show, ``measured`` cells by structure (lab_outputs.py);
- a cell that was never run, is skipped, or ignores its output without a reason in its metadata
  (``ignore_reason``) fails; so does one that rewrites an output after showing it;
- a kernel that dies fails its cell at once; one that never began is started again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell, IPyNbFile

from lab_outputs import contradictions, is_measured

POLL_S = 0.5  # how often a silent kernel is asked whether it still lives
STARTS = 3  # of a kernel that ends before its first answer
REWRITES = (
    "clear_output",
    "update_display_data",
)  # what came first is not stored: nothing proves it


class KernelDied(RuntimeError):
    """The kernel's process ended while one of its messages was awaited."""


class WatchedKernel(RunningKernel):
    """A kernel whose death is noticed while waiting for it."""

    def get_message(self, stream: str, timeout: float | None = None) -> dict[str, Any]:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            left = deadline - time.monotonic()
            try:
                return super().get_message(stream, timeout=max(0.0, min(POLL_S, left)))
            except Empty:
                if not self.is_alive():
                    raise KernelDied("the kernel died while this cell ran") from None
                if left <= POLL_S:
                    raise


class LabFile(IPyNbFile):
    """A stored lab, run in a kernel of its own."""

    rewritten = False

    def setup(self) -> None:
        # The kernel draws no PNG: that needs a browser, and pixels are not compared.
        os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"
        self._start()
        self.kernel.__class__ = WatchedKernel  # nbval has no other way to say which kernel it uses

    def _start(self) -> None:
        """A kernel's ports are found free, let go, and bound by the kernel a moment later. If
        somebody took one meanwhile the kernel ends at once: others are tried.
        """
        for left in range(STARTS - 1, -1, -1):
            try:
                return super().setup()
            except RuntimeError as error:
                if not left or "Kernel died" not in str(error):
                    raise

    def get_kernel_message(self, timeout: float | None = None, stream: str = "iopub") -> Any:
        message = super().get_kernel_message(timeout=timeout, stream=stream)
        self.rewritten |= message["msg_type"] in REWRITES
        return message

    def collect(self) -> Iterator[LabCell]:
        for cell in super().collect():
            yield LabCell.from_parent(
                self, name=cell.name, cell_num=cell.cell_num, cell=cell.cell, options=cell.options
            )


class LabCell(IPyNbCell):
    """One code cell of a stored lab."""

    def runtest(self) -> None:
        if self.options["skip"]:
            self.raise_cell_error("A lab's cells are all run: remove the skip mark")
        if not self.options["check"] and not self.cell.metadata.get("ignore_reason"):
            self.raise_cell_error(
                "Output ignored without a reason: add ignore_reason to the cell's metadata"
            )
        if self.cell.source.strip() and self.cell.execution_count is None:
            self.raise_cell_error("This stored cell was never run: build the lab with `make labs`")
        self.parent.rewritten = False
        try:
            super().runtest()
        except KernelDied as died:
            self.raise_cell_error(str(died))
        if self.parent.rewritten:
            self.raise_cell_error(
                "This cell clears or updates what it has shown, so the stored output proves nothing"
            )

    def compare_outputs(self, test: list, ref: list, skip_compare: Any = None) -> bool:
        self.comparison_traceback = contradictions(ref, test, is_measured(self.cell))
        return not self.comparison_traceback


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Put a LabFile in the place of every notebook that nbval collected."""
    collected = yield
    return [
        LabFile.from_parent(parent, path=file_path) if isinstance(found, IPyNbFile) else found
        for found in collected
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse the two settings under which a run of the labs proves less than it says."""
    if config.getoption("nbval_lax", False):
        raise pytest.UsageError("the labs are compared strictly: use --nbval, not --nbval-lax")
    if config.getoption("dist", "no") not in ("no", "loadfile"):
        raise pytest.UsageError("the cells of one lab share a kernel: use --dist=loadfile")
