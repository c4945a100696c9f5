"""A plausible data-parallel run without running one: parts as ranks write them, times made up.

Every rank: forward and backward per micro-batch, the last backward cut where a bucket's all-
reduce is launched, one FIFO communication lane, a wait per bucket, the optimizer, and one control
all-reduce for the loss. Ids, ``after`` and bytes follow the same rules as the real recorder;
times wobble a little by rank and step, from a fixed formula, so that two builds are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from paralab.report.report import Report
from paralab.report.tables import COLUMNS
from paralab.spec import ModelSpec, Plan
from paralab.theory.traffic import wire_bytes

MODEL = ModelSpec(layers=2, hidden=64, heads=4, seq_len=32)
BUCKETS = 3
FORWARD, PIECE, OPTIMIZER, ALLREDUCE = 8e-3, 5e-3, 3e-3, 7e-3  # seconds


def tables(**rows: Sequence[tuple]) -> dict[str, dict[str, list]]:
    """Tables of a report from their rows, by the tables' names."""
    return {
        name: {c: [row[i] for row in some] for i, c in enumerate(COLUMNS[name])}
        for name, some in rows.items()
    }


class _Rank:
    """One rank's notebook."""

    def __init__(self, rank: int, plan: Plan, model: ModelSpec, nodes: list[int]) -> None:
        self.rank, self.plan, self.model = rank, plan, model
        self.level = "inter" if len(set(nodes)) > 1 else "intra"
        self.spans: list[tuple] = []
        self.calls: list[tuple] = []
        self.steps: list[tuple] = []
        self.now = 100.0  # the clock does not start at 0
        self.lane_free = 0.0

    def span(self, step: int, lane: str, kind: str, microbatch: int, start: float, end: float,
             cost: float, after: tuple = ()) -> int:  # fmt: skip
        id_ = len(self.spans) * self.plan.dp + self.rank
        self.spans.append(
            (id_, self.rank, step, lane, kind, 0, 0, microbatch, start, end, cost, after)
        )
        return id_

    def work(self, step: int, kind: str, seconds: float, microbatch: int = -1) -> int:
        wobble = 1 + 0.03 * ((7 * self.rank + 3 * step + len(self.spans)) % 5)
        start, self.now = self.now, self.now + seconds * wobble
        return self.span(step, "compute", kind, microbatch, start, self.now, seconds)

    def all_reduce(self, step: int, payload: int, phase: str, seconds: float, after: int) -> int:
        start = self.now
        end = max(start, self.lane_free) + seconds
        self.lane_free = end
        id_ = self.span(step, "comm:dp", "comm", -1, start, end, 0.0, (after,))
        group = tuple(range(self.plan.dp))
        sent = wire_bytes("all_reduce", payload, self.plan.dp, self.rank)
        self.calls.append((len(self.calls), self.rank, step, "all_reduce", "dp", group, -1,
                           self.level, phase, payload, sent, start, end, id_))  # fmt: skip
        return id_

    def wait(self, step: int, comm: int) -> None:
        end = max(self.now, next(s[9] for s in self.spans if s[0] == comm))
        self.span(step, "compute", "wait", -1, self.now, end, 0.0, (comm,))
        self.now = end

    def step(self, step: int) -> None:
        begin, plan, pending = self.now, self.plan, []
        psi = 4 * self.model.num_params
        payloads = [psi // 12 * 4] * (BUCKETS - 1)
        payloads.append(psi - sum(payloads))
        warm = 2.0 if step == 0 else 1.0
        for m in range(plan.microbatches):
            self.work(step, "forward", FORWARD * warm, m)
            last = m == plan.microbatches - 1
            pieces = BUCKETS if last and plan.dp > 1 and plan.grad_sync == "overlapped" else 1
            for piece in range(pieces):
                id_ = self.work(step, "backward", BUCKETS / pieces * PIECE * warm, m)
                if pieces > 1:
                    pending.append(
                        self.all_reduce(step, payloads[piece], "grad_sync", ALLREDUCE, id_)
                    )
        if plan.dp > 1 and not pending:
            for payload in payloads:
                pending.append(self.all_reduce(step, payload, "grad_sync", ALLREDUCE, id_))
        for comm in pending:
            self.wait(step, comm)
        last = self.work(step, "optimizer", OPTIMIZER)
        if plan.dp > 1:
            self.wait(step, self.all_reduce(step, 8, "control", 4e-4, last))
        self.steps.append((self.rank, step, begin, self.now, 0.25 * (self.now - begin)))


def parts(dp: int = 2, *, steps: int = 4, microbatches: int = 2, grad_sync: str = "overlapped",
          nodes: list[int] | None = None, model: ModelSpec = MODEL, keep_state: bool = False,
          clock_offsets: list[float] | None = None,
          ) -> tuple[list[dict[str, Any]], Plan]:  # fmt: skip
    """One part per rank as ``Report.from_parts`` takes them, and the plan."""
    plan = Plan(dp=dp, microbatches=microbatches, grad_sync=grad_sync)
    built = []
    for rank in range(dp):
        notes = _Rank(rank, plan, model, nodes or [0] * dp)
        offset = (clock_offsets or [0.0] * dp)[rank]
        notes.now -= offset
        for step in range(steps):
            notes.step(step)
        rows = {"spans": notes.spans, "collectives": notes.calls, "steps": notes.steps}
        written = tables(**dict.fromkeys(COLUMNS, ()) | rows)
        losses = [[5.5 - 0.4 * s + 0.01 * rank + 0.003 * m for m in range(microbatches)]
                  for s in range(steps)]  # fmt: skip
        state = None
        if keep_state and rank == 0:
            state = {
                "a": np.arange(6, dtype=np.float32).reshape(2, 3) / 3,
                "b": np.float32([1e-45]),
            }
        built.append({"rank": rank, "clock_offset": offset, "clock_uncertainty": 1e-6 * (rank + 1),
                      **written, "losses": losses, "weights": state,
                      "gradients": state})  # fmt: skip
    return built, plan


def report(dp: int = 2, *, meta: dict[str, Any] | None = None, model: ModelSpec = MODEL,
           nodes: list[int] | None = None, **settings: Any) -> Report:  # fmt: skip
    """The parts of ``parts`` merged."""
    built, plan = parts(dp, model=model, nodes=nodes, **settings)
    said = {"run_id": "synthetic", "nodes": nodes or [0] * dp, **(meta or {})}
    return Report.from_parts(built, model=model, plan=plan, meta=said)


def with_memory(made: Report, *, stage: int = 0, within: int = 4) -> Report:
    """The report with what a ledger might have seen in step 0: when work begins, and of every
    span of work ``within`` - 1 times inside it and at its end, one row per category.

    stage  of ZeRO: which of optimizer, gradients, parameters are divided by the ranks. Rank r keeps
           r tenths more activations than rank 0
    """
    psi, n = 4 * made.model.num_params, made.world_size
    shard = {c: n if stage >= s else 1
             for c, s in (("parameters", 3), ("gradients", 2), ("optimizer", 1))}  # fmt: skip
    rows: list[tuple] = []
    spans = made.spans[(made.spans["step"] == 0) & (made.spans["lane"] == "compute")]
    for rank in range(n):
        mine = spans[(spans["rank"] == rank) & (spans["kind"] != "wait")].sort_values("start")
        pieces = mine[mine["kind"] == "backward"].groupby("microbatch").size()
        kept, done, total = 0.0, 0.0, len(pieces)
        for kind, micro, start, end in zip(
            mine["kind"], mine["microbatch"], mine["start"], mine["end"], strict=True
        ):
            share = {"forward": 1.0, "backward": -1 / pieces.get(micro, 1)}.get(kind, 0.0)
            for i in range(int(kept + done > 0), within + 1):
                part = i / within
                ready = done - share * part * (kind == "backward")
                state = {
                    "parameters": psi // shard["parameters"],
                    "gradients": int(min(1.0, ready) * psi) // shard["gradients"],
                    "optimizer": 2 * psi // shard["optimizer"],
                    "activations": round(2 * psi * (kept + share * part) * (1 + 0.1 * rank)),
                    "buffers": psi // 8 if kind == "backward" else 0,
                    "workspace": psi // 4 if 0 < part < 1 else 0,
                    "other": 64,
                }
                time = start + (end - start) * part
                rows += [(rank, 0, time, "device", c, b) for c, b in state.items()]
            kept += share
            done -= share * (kind == "backward")
        assert abs(kept) < 1e-9 and abs(done - total) < 1e-9
    return dataclasses.replace(made, **tables(memory=rows))


def boxes(chart: Any) -> list[dict[str, Any]]:
    """Every box of a timeline: its trace and row, its seconds, where it stands, what it says."""
    axis = chart.layout.yaxis
    rows = dict(zip(axis.ticktext, axis.tickvals, strict=True))
    return [
        {"name": t.name, "row": min(rows, key=lambda r: abs(rows[r] - y)), "start": base / 1e3,
         "end": (base + x) / 1e3, "colour": t.marker.color, "said": said, "top": y - w / 2,
         "bottom": y + w / 2}
        for t in chart.data for base, x, y, w, said in
        zip(t.base, t.x, t.y, t.width, t.hovertext, strict=True)
    ]  # fmt: skip
