"""Report: what a run, a replay, a prediction or a dry run left behind. One type for all of them.

The data are `tables.Tables`, which everything takes that draws, compares or checks; this is their
face. It imports figures and theory when they are asked for, and nothing that it imports knows it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paralab import checks
from paralab.report import metrics
from paralab.report.explain import explain
from paralab.report.merge import merge
from paralab.report.storage import load_folder, load_report, save, save_part
from paralab.report.tables import DRY, Tables
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory.traffic import BOOKKEEPING, POINT_TO_POINT

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


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
    peak_memory = property(metrics.peak_memory)

    # ---- tables -------------------------------------------------------------------------------
    summary, peaks, pipeline_times = metrics.summary, metrics.peaks, metrics.pipeline_times
    traffic, copied, explain = metrics.traffic, metrics.copied, explain

    def bubbles(self, cluster: Cluster | None = None) -> pd.DataFrame:
        """The bubble by formula, simulated with this report's own costs, replayed, measured.

        Two rows: idle over device time, and idle over ideal time (the papers' (p-1)/m). A measured
        report is replayed on ``cluster`` (default: this machine's links); see theory/ideal.py.
        """
        from paralab.theory.ideal import bubbles

        metrics.needs_times(self, "a bubble")
        metrics.needs_own_devices(self, "a bubble")
        return bubbles(self, cluster)

    # ---- pictures and files -------------------------------------------------------------------
    def timeline(
        self,
        *,
        step: int | None = None,
        ranks: Sequence[int] | None = None,
        ideal: bool | None = None,
    ) -> go.Figure:
        """Every span of one step, rank by rank; by default the step of median duration.

        Of a pipeline the ideal stands above, the same schedule and costs with free links, where
        there is room; ``ideal`` says yes or no.
        """
        from paralab.view.timeline import timeline

        metrics.needs_times(self, "a timeline")
        return timeline(self, step=step, ranks=ranks, ideal=ideal)

    def traffic_chart(self) -> go.Figure:
        """Bytes per step: rank by rank, and by axis and level."""
        from paralab.view.traffic import traffic_chart

        return traffic_chart(self)

    def memory_chart(self, *, rank: int | None = None, step: int | None = None) -> go.Figure:
        """Bytes on the device by category over a step, by default the one with the highest peak.

        A panel for every rank, or for one ``rank``. Raises ValueError without memory samples.
        """
        from paralab.view.memory_chart import memory_chart

        return memory_chart(self, rank=rank, step=step)

    def live_activations(self, *, step: int | None = None) -> go.Figure:
        """Of a pipeline: how many micro-batches' activations every rank keeps, over time."""
        from paralab.view.live import live_activations

        metrics.needs_times(self, "a chart over all ranks")
        return live_activations(self, step=step)

    def loss_chart(self) -> go.Figure:
        """The loss over steps."""
        from paralab.view.loss import loss_chart

        return loss_chart(self)

    def to_html(
        self, path: str | os.PathLike[str], *, sections: Sequence[tuple[str, str]] = ()
    ) -> None:
        """One self-contained page. ``sections``: (title, HTML) pairs put after the summary."""
        from paralab.view.page import to_html

        to_html(self, path, sections=sections)

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """A trace that ui.perfetto.dev opens (Chrome trace-event JSON)."""
        from paralab.view.perfetto import to_perfetto

        metrics.needs_times(self, "a trace")
        to_perfetto(self, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything as JSON, gzipped if ``path`` ends in .gz; ``pl.load`` reads it back."""
        save(self, path)

    def replay(self, cluster: Cluster | None = None, *, compute: float = 1.0) -> Report:
        """The same run on one virtual device per rank of ``cluster``; this report stays as is.

        Compute takes the time of its processor or GPU that it took in the run; links are those of
        ``cluster``, by default this machine's as measured (`Cluster.local`), between processors or
        between GPUs as in the run. ``compute`` scales what compute took:
        0.0 leaves the links alone, and so a time that is the same on every machine.
        """
        from paralab.theory.replay import replay

        metrics.needs_times(self, "a replay")
        metrics.needs_own_devices(self, "a replay")
        return replay(self, cluster, compute=compute)

    def algorithms(self) -> pd.DataFrame:
        """Ring or tree for every kind of call on this report's cluster, and what either takes; see
        ``theory.algorithms``.
        """
        from paralab.theory.algorithms import algorithms

        return algorithms(self)

    def __repr__(self) -> str:
        # No times: notebooks compare this line, and a run must give the same one twice.
        plan, calls = self.plan, self.collectives
        calls = calls[~calls["phase"].isin(BOOKKEEPING)]
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
        if metrics.in_outline(self):  # its rows are sums of calls
            said[2:] = [f"{len(metrics.reported_ranks(self))} in outline"]
        elif not messages or not len(calls):  # what there is none of goes unsaid, but not both
            said.pop(3 if not messages else 2)
        if self.model is None:
            name = self.meta.get("function", "a function")
            return f"Report({self.clock}, {', '.join([f'{name} on {said[0]}', *said[2:]])})"
        degrees = [*[plan.tp_name] * (plan.tp > 1), *[f"pp={plan.pp}"] * (plan.pp > 1)]
        return f"Report({self.clock}, {', '.join([f'dp={plan.dp}', *degrees, *said])})"


def load(path: str | os.PathLike[str]) -> Report:
    """A saved report, or a folder of rank parts that torchrun's ranks wrote, merged on one clock.

    Raises FileNotFoundError if there is none, ValueError naming the file, what is wrong with it and
    what would do, if it is damaged, foreign or written by a newer version.
    """
    path = checks.path(
        "path", path, "a file that report.save wrote, or a folder of torchrun's parts"
    )
    return load_folder(path, Report) if path.is_dir() else load_report(path, Report)


__all__ = ["Report", "load", "save_part"]
