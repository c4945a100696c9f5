"""Report: one type for what a run, a replay, a prediction or a dry run recorded.

The data are `tables.Tables`; figures, comparisons and checks take these. `Report` adds the methods
that users call. It imports figures and theory only when such a method is used, and no module that
it imports depends on it.
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
from paralab.checks import count_of
from paralab.report import amounts, facts, metrics
from paralab.report.explain import explain
from paralab.report.merge import merge
from paralab.report.storage import load_folder, load_report, save
from paralab.report.summary import summary
from paralab.report.tables import DRY, Tables
from paralab.spec import ModelSpec, Plan
from paralab.theory.traffic import POINT_TO_POINT


class _Later:
    """A method whose function is in another module, which is imported when the method is first
    used: figures import plotly.

    times        the noun for an error on a dry run, if the method needs times
    own_devices  whether the method also refuses a run whose ranks shared a GPU
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
                facts.needs_times(report, self.times)
            if self.own_devices:
                facts.needs_own_devices(report, self.times)
            return function(report, *args, **settings)

        return method if report is None else MethodType(method, report)


class Report(Tables):
    __doc__ = Tables.__doc__  # the meaning of the tables and columns

    @classmethod
    def from_parts(
        cls,
        parts: Sequence[Mapping[str, Any]],
        *,
        model: ModelSpec | None,
        plan: Plan,
        meta: Mapping[str, Any],
    ) -> Report:
        """One measured report from the parts of all ranks, in any order.

        Each rank's ``clock_offset`` is added to its times; then all times are shifted so that the
        earliest step 0 starts at 0. Raises ValueError if a rank is missing or occurs twice, or if
        the parts belong to different runs.
        """
        what = {"model": model, "plan": plan}
        return cls(clock="measured", **what, **merge(parts, meta=meta, **what))

    # ---- one number ---------------------------------------------------------------------------
    step_time = cached_property(metrics.step_time)
    bubble = cached_property(metrics.bubble)
    peak_memory = property(amounts.peak_memory)

    # ---- tables -------------------------------------------------------------------------------
    summary, explain, pipeline_times = summary, explain, metrics.pipeline_times
    traffic, copied, peaks = amounts.traffic, amounts.copied, amounts.peaks

    bubbles = _Later("theory.ideal", "a bubble", own_devices=True)

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
        # Without times: notebooks compare this line, so it must be the same for every run.
        plan, calls = self.plan, facts.own_calls(self)
        messages = int((calls["op"] == "send").sum())
        calls = calls[~calls["op"].isin(POINT_TO_POINT)]
        calls = calls[["axis", "ranks", "call"]].drop_duplicates()
        parts = [count_of(self.world_size, "rank"), count_of(len(set(self.steps["step"])), "step")]
        if self.clock == DRY:
            parts[0] = f"rank {self.meta.get('rank')} of {parts[0]}"
        if facts.in_outline(self):  # its rows are sums of calls, so there is no count of calls
            parts.append(f"{len(facts.reported_ranks(self))} in outline")
        else:
            counts = (len(calls), "collective"), (messages, "message")
            parts += [count_of(n, name) for n, name in counts if n] or ["0 collectives"]
        if self.model is None:
            name = self.meta.get("function", "a function")
            return f"Report({self.clock}, {', '.join([f'{name} on {parts[0]}', *parts[2:]])})"
        degrees = [f"dp={plan.dp}", plan.tp_name, f"pp={plan.pp}" * (plan.pp > 1)]
        return f"Report({self.clock}, {', '.join([*filter(None, degrees), *parts])})"


def load(path: str | os.PathLike[str]) -> Report:
    """A saved report, or one report merged from a folder of parts that torchrun's ranks wrote.

    Raises FileNotFoundError if there is no such file. Raises ValueError if the file is damaged, not
    a report, or of another version; the message says what is wrong and what would work.
    """
    path = checks.path(
        "path", path, "a file that report.save wrote, or a folder of torchrun's parts"
    )
    return load_folder(path, Report.from_parts) if path.is_dir() else load_report(path, Report)
