"""`pl.trace`: any function on real ranks, with all that it sends and computes recorded.

    def hello(group):
        tensor = torch.full((8,), group.index, device=group.context.device)
        group.all_reduce(tensor).wait()
        return tensor

    report = pl.trace(hello, ranks=4)
    report.results, report.traffic(), report.timeline(), report.replay(cluster)

The report has the type of a training run's, with one step, no model and no losses, so every method
that draws, counts or replays a run works for a function of your own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paralab.checks import count_of, whole
from paralab.launch import MAX_RANKS, launch_program
from paralab.report.report import Report
from paralab.spec import Plan
from paralab.spec.cluster import available_cores
from paralab.spec.forms import name_of


def trace(
    fn: Callable[..., Any],
    ranks: int = 4,
    args: Sequence[Any] = (),
    *,
    nodes: int = 1,
    memory: bool = False,
    timeout: float = 120.0,
    device: str | None = None,
    strict: bool = True,
    stop: threading.Event | None = None,
) -> Report:
    """Call ``fn(group, *args)`` on every rank; return a report of its calls, times and results.

    fn       its first argument is a `comm.Group` of all ranks: ``group.index`` is the rank,
             ``group.size`` the world size, ``group.context.device`` the device for its tensors,
             and the group's methods are the collectives, ``send`` and ``recv``
    ranks    processes, 1 to 64
    args     further arguments, the same on every rank. For data that differs, pass one NumPy array
             and take ``torch.from_numpy(array[group.index])``
    nodes    spread the ranks over this many virtual nodes, the lowest on node 0; calls between
             nodes count as "inter", and a replay uses the link between nodes for them
    memory   also measure by how much the bytes of live tensors rose at most while ``fn`` ran (its
             arguments were alive before): ``report.meta["peak_bytes"]``, one number per rank
    strict   check every call against NCCL's order rules, on gloo too, and refuse a call that only
             some members of its group make, even if no rank waits for it
    timeout, device, stop  as in `pl.launch`

    ``report.results`` has the return values in rank order, tensors as NumPy arrays. Raises
    ValueError before a process starts; RankError, RankTimeout, OutOfMemory or Stopped afterwards.
    """
    __tracebackhide__ = True
    node_of = places(ranks, nodes)
    program = functools.partial(_program, fn, node_of, memory)
    how = {"timeout": timeout, "device": device, "strict": strict, "stop": stop}
    parts = launch_program(program, ranks, args, fn=fn, **how)
    for part in parts:
        if calls := part["unwaited"]:
            problem = f"rank {part['rank']} has not waited for {calls[0]}"
            if others := len(calls) - 1:
                problem += f" and for {count_of(others, 'other call')}"
            advice = "its results may be incomplete; call .wait() on what each call returns"
            warnings.warn(f"{problem}: {advice}", stacklevel=2)
            break
    peaks = {"peak_bytes": [part["peak_bytes"] for part in parts]} if memory else {}
    meta = {"function": name_of(fn), "strict": strict, "one_machine": True}
    meta |= parts[0]["meta"] | peaks
    return Report.from_parts(parts, model=None, plan=Plan(dp=ranks), meta=meta)


def places(ranks: int, nodes: int) -> tuple[int, ...]:
    """The node of each rank. Raises ``ValueError`` if one of the two is illegal."""
    ranks = whole("ranks", ranks, at_least=1, at_most=MAX_RANKS)
    nodes = whole("nodes", nodes, at_least=1, at_most=ranks)
    return tuple(rank * nodes // ranks for rank in range(ranks))


def part_of(owner: Any, tables: dict[str, Any], result: Any, **meta: Any) -> dict[str, Any]:
    """A rank's part of a report. ``owner`` has rank, device, nodes; ``meta`` adds or corrects."""
    import torch

    facts = {"device": owner.device, "nodes": list(owner.nodes), "cores": available_cores()}
    facts["torch"] = str(torch.__version__)
    clock = dict.fromkeys(("clock_offset", "clock_uncertainty"), 0.0)  # one machine, one clock
    own = {"rank": owner.rank, "losses": [], "result": _plain(result), "meta": facts | meta}
    return {**clock, **tables, **own}


def _program(
    fn: Callable[..., Any], node_of: tuple[int, ...], memory: bool, context: Any, *args: Any
) -> dict[str, Any]:
    """What every rank runs: ``fn`` as step 0."""
    __tracebackhide__ = True  # an error's traceback begins with the caller's function
    import torch

    from paralab.comm import everyone
    from paralab.instruments.memory import PeakMemory

    context = replace(context, nodes=node_of)
    # Connects the ranks and lets them start together; this group's recorder is thrown away.
    everyone(context, axis="setup").barrier()
    group = everyone(context)
    recorder = group.recorder
    peak = PeakMemory(context.device, existing=args)
    with peak if memory else contextlib.nullcontext():
        recorder.begin_step(0)
        with recorder.span("compute"):
            result = fn(group, *args)
        if context.device.startswith("cuda"):
            torch.cuda.synchronize()
        recorder.end_step()
    unwaited = group.end()
    part = part_of(context, recorder.tables(), result, backend=context.backend)
    return {**part, "peak_bytes": peak.peak, "unwaited": unwaited}


def _plain(value: Any) -> Any:
    """``value`` with its tensors as NumPy arrays, also those in dicts, lists and tuples."""
    import torch

    from paralab.batches import as_numpy

    if isinstance(value, torch.Tensor):
        return as_numpy(value)
    if isinstance(value, dict):
        return dict(zip(value, _plain(list(value.values())), strict=True))
    if isinstance(value, tuple) and type(value).__module__.partition(".")[0] == "torch":
        value = tuple(value)  # a torch.Size, or what torch.max returns: unpickling it takes torch
    kind = type(value)
    return kind(map(_plain, value)) if kind in (list, tuple) else value
