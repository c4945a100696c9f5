"""Report: what a run, a replay, a prediction or a dry run left behind. One type for all of them.

Everything that draws, compares or checks takes a Report and asks only ``clock`` where its times
come from: "measured" (wall clock, ranks on devices of their own), "replayed" (measured compute
costs on one virtual device per rank, with a stated link model) or "predicted"; or nowhere: "dry
run". Costs nothing but memory: six tables, a list of losses, and the weights if they were asked
for. Torch is not imported here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import TYPE_CHECKING, Any

from paralab import checks
from paralab.checks import choice, illegal
from paralab.report import dry, metrics, moved, summary, tables
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory.traffic import BOOKKEEPING, POINT_TO_POINT

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import plotly.graph_objects as go

CLOCKS = ("measured", "replayed", "predicted", dry.CLOCK)
PLAIN = {bool, int, float, str, NoneType}  # what JSON knows as it is


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Report:
    """Times are seconds from the start of step 0, sizes bytes. Step 0 is warm-up.

    clock        "measured" | "replayed" | "predicted" | "dry run", which has rows of one rank alone
                 (meta["rank"]), and in place of times the numbers of what happens, in order
    model, plan  what was trained and how it was split; ``cluster`` on what, where that was stated.
                 model is None for a traced function (`pl.trace`), which trains nothing
    spans        id, rank, step, lane, kind, stage, chunk, microbatch, start, end, cost, after.
                 lane: compute, comm:<axis>, h2d, d2h, disk, host (the host's processor at work for
                 the rank: an optimizer that was offloaded). kind: forward, backward, weight_grad,
                 optimizer, compute (a traced function's own work), wait, comm, copy. cost: thread
                 CPU (or device) seconds. after: ids of the spans waited for. microbatch -1 where it
                 has no meaning
    collectives  call, rank, step, op, axis, ranks, peer, level, phase, payload_bytes, wire_bytes,
                 start, end, span. One row per rank and call; wire_bytes is what this rank sends;
                 level the slowest link that the group, or a send, crosses
    copies       rank, step, lane, op, category, bytes, start, end, span. One row per copy between
                 memory tiers: lane h2d (host to device), d2h, disk (op read or write); category
                 what was moved, as in memory
    memory       rank, step, time, tier, category, bytes. Per rank one sample at every span's
                 beginning and end and one at the fullest moment between; a sample is one row for
                 every category (parameters, gradients, optimizer, activations, buffers, workspace,
                 other) that there is or has been. Measured in step 0, with a memory_limit in all
    steps        rank, step, start, end, beside: processor seconds of the rank's other threads,
                 which carry its messages
    allocator    rank, step, allocated, active, reserved, largest_free. On GPUs, one row per rank
                 and step, of CUDA's allocator. Peaks of the step: allocated, bytes of blocks in
                 use; active, these and those given back that a stream has not passed; reserved,
                 bytes taken from the driver. largest_free: at the step's end, the largest block
                 that is reserved and not in use
    losses       one per step: mean over the global batch, nats per token
    weights, gradients  {name in the single-device model: full NumPy array}, or None
    results      what a traced function returned on every rank, or None; not saved to a file
    meta         anything else worth knowing, as plain JSON values; "nodes" is each rank's node
    """

    clock: str
    model: ModelSpec | None
    plan: Plan
    cluster: Cluster | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    losses: Sequence[float] = ()
    spans: pd.DataFrame = None  # type: ignore[assignment]  # None is a table without rows
    collectives: pd.DataFrame = None  # type: ignore[assignment]
    copies: pd.DataFrame = None  # type: ignore[assignment]
    memory: pd.DataFrame = None  # type: ignore[assignment]
    steps: pd.DataFrame = None  # type: ignore[assignment]
    allocator: pd.DataFrame = None  # type: ignore[assignment]
    weights: Mapping[str, np.ndarray] | None = None
    gradients: Mapping[str, np.ndarray] | None = None
    results: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        choice("clock", self.clock, CLOCKS)
        for name, kind, legal in (
            ("model", (ModelSpec, NoneType), "a pl.ModelSpec(...) or None"),
            ("plan", Plan, "a pl.Plan(...)"),
            ("cluster", (Cluster, NoneType), "a pl.Cluster(...) or None"),
        ):
            if not isinstance(getattr(self, name), kind):
                raise illegal(name, getattr(self, name), "not one", legal)
        object.__setattr__(self, "meta", plain(dict(self.meta), "meta"))
        object.__setattr__(self, "losses", [float(loss) for loss in self.losses])
        for name in tables.COLUMNS:
            object.__setattr__(self, name, tables.frame(name, getattr(self, name)))
        tables.check_relations({n: getattr(self, n) for n in tables.COLUMNS}, self.plan.world_size)

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
        from paralab.report.merge import merge

        return cls(
            clock="measured",
            model=model,
            plan=plan,
            **merge(parts, plan=plan, meta=meta, model=model),
        )

    # ---- one number ---------------------------------------------------------------------------
    @property
    def world_size(self) -> int:
        """Ranks of the plan."""
        return self.plan.world_size

    @cached_property
    def step_time(self) -> float:
        """Seconds: median over steps 1.. of the largest (end - start) over ranks."""
        return metrics.step_time(self)

    @cached_property
    def bubble(self) -> float:
        """Idle share of the pipeline part, 1 - sum(compute) / (p T); see ``metrics.bubble``."""
        return metrics.bubble(self)

    @property
    def peak_memory(self) -> int | None:
        """Bytes on the device at the worst sample of the worst rank; None if not sampled."""
        return metrics.peak_memory(self)

    # ---- tables -------------------------------------------------------------------------------
    def summary(self) -> pd.DataFrame:
        """Step time, compute, waiting, bytes per rank and step, loss: one small table."""
        return summary.summary(self)

    def peaks(self, rank: int | None = None) -> pd.DataFrame:
        """Bytes by category at the peak of ``rank`` (default: the worst), formula beside.

        See ``records.peaks``.
        """
        from paralab.report.peaks import peaks

        return peaks(self, rank)

    def bubbles(self, cluster: Cluster | None = None) -> pd.DataFrame:
        """The bubble by formula, simulated with this report's own costs, replayed, measured.

        Two rows: idle over device time, and idle over ideal time (the papers' (p-1)/m). A measured
        report is replayed on ``cluster`` (default: this machine's links); see theory/ideal.py.
        """
        from paralab.theory.ideal import bubbles

        dry.needs_times(self, "a bubble")
        dry.needs_own_devices(self, "a bubble")
        return bubbles(self, cluster)

    def traffic(
        self, by: str | Sequence[str] = "rank", *, bookkeeping: bool = False, warmup: bool = False
    ) -> pd.DataFrame:
        """Bytes per step by rank, op, axis, level, phase or edge; see ``moved.traffic``."""
        return moved.traffic(self, by, bookkeeping=bookkeeping, warmup=warmup)

    def copied(
        self, by: str | Sequence[str] = ("rank", "link", "category"), *, warmup: bool = False
    ) -> pd.DataFrame:
        """Bytes per step between device, host and files; see ``moved.copied``."""
        return moved.copied(self, by, warmup=warmup)

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

        dry.needs_times(self, "a timeline")
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

        dry.needs_times(self, "a chart over all ranks")
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

        dry.needs_times(self, "a trace")
        to_perfetto(self, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything as JSON, gzipped if ``path`` ends in .gz; ``pl.load`` reads it back."""
        from paralab.report.storage import save

        save(self, path)

    def replay(self, cluster: Cluster | None = None, *, compute: float = 1.0) -> Report:
        """The same run on one virtual device per rank of ``cluster``; this report stays as is.

        Compute takes the time of its processor or GPU that it took in the run; links are those of
        ``cluster``, by default this machine's as measured (`Cluster.local`), between processors or
        between GPUs as in the run. ``compute`` scales what compute took:
        0.0 leaves the links alone, and so a time that is the same on every machine.
        """
        from paralab.theory.replay import replay

        dry.needs_times(self, "a replay")
        dry.needs_own_devices(self, "a replay")
        return replay(self, cluster, compute=compute)

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
        if self.clock == dry.CLOCK:
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


def plain(value: Any, where: str) -> Any:
    """``value`` as JSON knows it: dict with text keys, list, text, number, yes/no, None.

    Done when a report is made, so that what is saved and loaded again is equal. Raises ValueError
    naming the place of a value that JSON has no form for.
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        if set(map(type, value)) <= PLAIN:  # the nodes of thousands of ranks
            return list(value)
        return [plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise illegal(
        where,
        value,
        f"{type(value).__name__} has no plain form",
        "text, numbers, yes/no, None, and lists and dicts of them",
    )


def load(path: str | os.PathLike[str]) -> Report:
    """A saved report, or a folder of rank parts that torchrun's ranks wrote, merged on one clock.

    Raises FileNotFoundError if there is none, ValueError naming the file, what is wrong with it and
    what would do, if it is damaged, foreign or written by a newer version.
    """
    from paralab.report.storage import load_folder, load_report

    path = checks.path(
        "path", path, "a file that report.save wrote, or a folder of torchrun's parts"
    )
    return load_folder(path) if path.is_dir() else load_report(path)


def save_part(
    folder: str | os.PathLike[str],
    part: Mapping[str, Any],
    *,
    model: ModelSpec,
    plan: Plan,
    meta: Mapping[str, Any],
) -> None:
    """Write what one rank of a torchrun job measured, for ``load(folder)`` to merge."""
    from paralab.report.storage import save_part as write_part

    write_part(folder, part, model=model, plan=plan, meta=meta)


__all__ = ["CLOCKS", "Report", "load", "plain", "save_part"]
