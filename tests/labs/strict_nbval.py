"""Strict nbval for the labs: what the plain plugin lets pass is refused here.

pyproject.toml loads this plugin into every pytest of this repository, so `pytest labs --nbval` is
strict without further options. nbval runs a stored notebook again and compares every output. By
itself it accepts a notebook that was never executed, takes plotly's random ids for differences,
ignores the order of outputs, and waits 2000 s for a kernel that is dead. With this plugin:

- plotly figures are compared by what they show, ``measured`` cells by structure (lab_outputs.py);
- a cell that was never run, is skipped, or ignores its output without a reason in its metadata
  (``ignore_reason``) fails; so does one that rewrites an output after showing it;
- a kernel that dies fails its cell at once; one that never began is started again;
- a lab and its solution are one run. A cell that both have and that is stored alike in both is run
  once; every other cell of the solution, one that shows what the learner's answer does among them,
  runs in the lab's kernel after the lab's last cell. A file in solutions/ has no run of its own.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

from paralab.ranks import server
from paralab.view import lazy_grammar  # noqa: F401  before nbval imports nbformat

# isort: split
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell, IPyNbFile

from lab_outputs import contradictions, is_measured

# torch is not imported yet. With a thread per core in every worker and kernel, next to their ranks,
# threads wait for one another more than they compute: two files at a time took 154 s, and 59 so.
os.environ.update(server.ONE_THREAD)

POLL_S = 0.5  # how often a silent kernel is asked whether it is still alive
STARTS = 3  # of a kernel that ends, or hangs, before its first answer
PORTS_TAKEN = re.compile("Kernel (died|didn't respond)")  # jupyter_client's words for what it saw
SOLUTIONS = "solutions"
# What was shown first is then not stored, so the stored output proves nothing.
REWRITES = ("clear_output", "update_display_data")


class KernelDied(RuntimeError):
    """The kernel's process ended while one of its messages was awaited."""


class WatchedKernel(RunningKernel):
    """A kernel whose death is noticed while waiting for it; nbval's own writes every message down,
    figures and all, for a log that nobody keeps.
    """

    def get_message(self, stream: str, timeout: float | None = None) -> dict[str, Any]:
        get = {"iopub": self.kc.get_iopub_msg, "shell": self.kc.get_shell_msg}[stream]
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            left = deadline - time.monotonic()
            try:
                return get(timeout=max(0.0, min(POLL_S, left)))
            except Empty:
                if not self.is_alive():
                    raise KernelDied("the kernel died while this cell ran") from None
                if left <= POLL_S:
                    raise


class LabFile(IPyNbFile):
    """A stored lab and what its solution has in addition, run in one kernel."""

    rewritten = False

    def setup(self) -> None:
        with pytest.MonkeyPatch.context() as environment:
            # The kernel draws no PNG: that needs a browser, and pixels are not compared.
            environment.setenv("PLOTLY_RENDERER", "plotly_mimetype")
            self._start()
        self.kernel.__class__ = WatchedKernel  # nbval has no other way to say which kernel it uses

    def _start(self) -> None:
        """Start the kernel, several times if need be.

        A kernel's ports are found free, released, and bound by the kernel a moment later. If
        another process took one meanwhile, the kernel ends at once, or hangs while it ends, and
        other ports are tried.
        """
        for left in range(STARTS - 1, -1, -1):
            try:
                return super().setup()
            except RuntimeError as error:
                if not left or not PORTS_TAKEN.match(str(error)):
                    raise

    def get_kernel_message(self, timeout: float | None = None, stream: str = "iopub") -> Any:
        message = super().get_kernel_message(timeout=timeout, stream=stream)
        self.rewritten |= message["msg_type"] in REWRITES
        return message

    def collect(self) -> Iterator[LabCell]:
        stored = defaultdict(list)
        for cell in super().collect():
            stored[cell.cell.source].append(cell.cell)
            yield self._own(cell, cell.name)
        solution = self.path.parent / SOLUTIONS / self.path.name
        if solution.exists():
            for cell in IPyNbFile.from_parent(self.parent, path=solution).collect():
                item = self._own(cell, f"Solution {cell.name}")
                if same := stored[cell.cell.source]:
                    item.in_lab = same.pop(0)
                yield item

    def _own(self, cell: IPyNbCell, name: str) -> LabCell:
        return LabCell.from_parent(
            self, name=name, cell_num=cell.cell_num, cell=cell.cell, options=cell.options
        )


class LabCell(IPyNbCell):
    """One code cell of a stored lab or of its solution.

    in_lab  of a solution's cell, the lab's cell with the same source, if there is one
    """

    in_lab: Any = None

    def runtest(self) -> None:
        if self.options["skip"]:
            self.raise_cell_error("A lab's cells are all run: remove the skip mark")
        if not self.options["check"] and not self.cell.metadata.get("ignore_reason"):
            self.raise_cell_error(
                "Output ignored without a reason: add ignore_reason to the cell's metadata"
            )
        if self.cell.source.strip() and self.cell.execution_count is None:
            self.raise_cell_error("This stored cell was never run: build the lab with `make labs`")
        alike = self.in_lab is not None and self.compare_outputs(
            self.in_lab.outputs, self.cell.outputs
        )
        if not alike:
            self._run()

    def _run(self) -> None:
        self.parent.rewritten = False
        self.output_timeout = self.config.option.nbval_cell_timeout  # nbval: 5 s
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
    """Replace what nbval collected: a lab by a LabFile, a lab's solution by nothing."""
    collected = yield
    lab = file_path.parent.parent / file_path.name
    if file_path.parent.name == SOLUTIONS and lab.exists():
        return [found for found in collected if not isinstance(found, IPyNbFile)]
    return [
        LabFile.from_parent(parent, path=file_path) if isinstance(found, IPyNbFile) else found
        for found in collected
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse settings under which a run of the labs proves less than it says; set the others."""
    if config.getoption("nbval_lax", False):
        raise pytest.UsageError("the labs are compared strictly: use --nbval, not --nbval-lax")
    if not config.getoption("nbval", False):
        return
    if config.getoption("dist", "no") not in ("no", "loadfile"):
        raise pytest.UsageError("the cells of one lab share a kernel: use --dist=loadfile")
    config.option.nbval_current_env = True
    # Less than pytest gives a test: a cell that hangs is interrupted, and named with its traceback.
    hang = float(config.getini("timeout"))
    config.option.nbval_cell_timeout = hang * 2 / 3
    config.option.nbval_kernel_startup_timeout = hang / 2 / STARTS
