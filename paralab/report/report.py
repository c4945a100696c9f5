"""Report: what a run, a replay, a prediction or a dry run left behind. One type for all of them.

The data are `tables.Tables`, which everything takes that draws, compares or checks; this is their
face. It imports figures and theory when they are asked for, and nothing that it imports knows it.
"""

from __future__ import annotations

import functools
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MethodType
from typing import Any

from paralab import checks
from paralab.report import about, amounts, metrics
from paralab.report.explain import explain
from paralab.report.merge import merge
from paralab.report.storage import load_folder, load_report, save
from paralab.report.summary import summary
from paralab.report.tables import DRY, Tables
from paralab.spec import ModelSpec, Plan
from paralab.theory.traffic import POINT_TO_POINT


class _Later:
    """A method that is a function of another module, which is imported when it is asked for:
    pictures bring plotly along.

    times        what a dry run is told that it cannot have, if it is something with times
    own_devices  whether ranks that shared a GPU cannot have it either
    """

    def __init__(self, module: str, times: str = "", *, own_devices: bool = False) -> None:
        self.module, self.times, self.own_devices = module, times, own_devices

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, report: Report | None, owner: type) -> Callable[..., Any]:
        function = pkgutil.resolve_name(f"paralab.{self.module}:{self.name}")

        @functools.wraps(function)
        def method(report: Report, *args: Any, **settings: Any) -> Any:
            if self.times:
                about.needs_times(report, self.times)
            if self.own_devices:
                about.needs_own_devices(report, self.times)
            return function(report, *args, **settings)

        return method if report is None else MethodType(method, report)


class Report(Tables):
    __doc__ = Tables.__doc__  # what the columns mean; the face adds what can be asked of them

    @classmethod
    def from_parts(
        cls,
        parts: Sequence[Mapping[str, Any]],
        *,
        model: ModelSpec | None,
        plan: Plan,
        meta: Mapping[str, Any],
    ) -> Report:
        """One measured report from what every rank wrote, in any order, on one clock.

        Each rank's times get its ``clock_offset`` added, then all are shifted so that the earliest
        step 0 starts at 0. Raises ValueError if a rank is missing, is there twice, or if parts of
        different runs meet.
        """
        said = {"model": model, "plan": plan}
        return cls(clock="measured", **said, **merge(parts, meta=meta, **said))

    # ---- one number ---------------------------------------------------------------------------
    step_time = cached_property(metrics.step_time)
    bubble = cached_property(metrics.bubble)
    peak_memory = property(amounts.peak_memory)

    # ---- tables -------------------------------------------------------------------------------
    summary, explain, pipeline_times = summary, explain, metrics.pipeline_times
    traffic, copied, peaks = amounts.traffic, amounts.copied, amounts.peaks

    bubbles = _Later("theory.ideal", "a bubble", own_devices=True)
    algorithms = _Later("theory.algorithms")

    # ---- pictures and files -------------------------------------------------------------------
    timeline = _Later("view.timeline", "a timeline")
    traffic_chart = _Later("view.traffic")
    memory_chart = _Later("view.memory_chart")
    loss_chart = _Later("view.loss")
    to_html = _Later("view.page")
    to_perfetto = _Later("view.perfetto", "a trace")
    replay = _Later("theory.replay", "a replay", own_devices=True)
    live_activations = _Later("view.live", "a chart over all ranks")
    save = save

    def __repr__(self) -> str:
        # No times: notebooks compare this line, and a run must give the same one twice.
        plan, calls = self.plan, about.own_calls(self)
        messages = int((calls["op"] == "send").sum())
        calls = calls[~calls["op"].isin(POINT_TO_POINT)]
        calls = calls[["axis", "ranks", "call"]].drop_duplicates()
        counts = [
            (self.world_size, "rank"),
            (len(set(self.steps["step"])), "step"),
            (len(calls), "collective"),
            (messages, "message"),
        ]
        said = [f"{n} {name}{'s' * (n != 1)}" for n, name in counts]
        if self.clock == DRY:
            said[0] = f"rank {self.meta.get('rank')} of {said[0]}"
        if about.in_outline(self):  # its rows are sums of calls
            said[2:] = [f"{len(about.reported_ranks(self))} in outline"]
        elif not messages or not len(calls):  # what there is none of goes unsaid, but not both
            said.pop(3 if not messages else 2)
        if self.model is None:
            name = self.meta.get("function", "a function")
            return f"Report({self.clock}, {', '.join([f'{name} on {said[0]}', *said[2:]])})"
        degrees = [f"dp={plan.dp}", plan.tp_name, f"pp={plan.pp}" * (plan.pp > 1)]
        return f"Report({self.clock}, {', '.join([*filter(None, degrees), *said])})"


def load(path: str | os.PathLike[str]) -> Report:
    """A saved report, or a folder of rank parts that torchrun's ranks wrote, merged on one clock.

    Raises FileNotFoundError if there is none, ValueError naming the file, what is wrong with it and
    what would do, if it is damaged, foreign or of another version.
    """
    path = checks.path(
        "path", path, "a file that report.save wrote, or a folder of torchrun's parts"
    )
    return load_folder(path, Report.from_parts) if path.is_dir() else load_report(path, Report)
