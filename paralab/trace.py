"""`pl.trace`: any function on real ranks, with everything that it sent and computed written down.

    def hello(group):
        tensor = torch.ones(8) * group.index
        group.all_reduce(tensor).wait()
        return tensor

    report = pl.trace(hello, ranks=4)
    report.results, report.traffic(), report.timeline(), report.replay(cluster)

The report is of the same type as that of a training run, with one step, no model and no losses; so
whatever draws, counts or replays a run does the same with a function of your own. Torch is not
imported in this process: what ranks return as tensors arrives as NumPy arrays.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paralab.checks import choice, illegal, instance, shown, whole
from paralab.launch import MAX_RANKS, _pickled, launch_program
from paralab.report.report import Report
from paralab.spec import Plan

NUMBERS = {int, float, bool, str, type(None)}  # and what else no tensor is in


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
    live: bool = False,
    stop: threading.Event | None = None,
) -> Report:
    """Call ``fn(group, *args)`` on every rank and return what it did, and what it returned.

    fn       gets a `comm.Group` of all ranks: ``group.index`` and ``group.size`` say who it is,
             ``group.context.device`` where its tensors belong, its methods send and receive
    ranks    processes, 1 to 64
    args     further arguments, the same on every rank; data of its own for each rank can come as
             one NumPy array, of which rank r takes ``torch.from_numpy(array[r])``
    nodes    place the ranks on this many virtual nodes, the first ones on node 0; calls between
             two of them count as "inter", and a replay uses the link between nodes
    memory   also find the peak of tensor bytes that ``fn`` had alive beyond what was alive when it
             was called, arguments included: ``report.meta["peak_bytes"]``, one number per rank
    timeout  seconds without any sign of life before the ranks are stopped
    device   "cpu", "cuda", or None: what `pl.set_default_device` says; else a GPU for each
             rank where there are as many, else the CPU
    strict   hold every call to NCCL's order rules, whatever the backend, and refuse one that a
             rank makes alone, even if nobody waits for it
    live     show what ranks print as it comes; otherwise in rank order at the end
    stop     an event that ends the ranks when it is set

    ``report.results`` has the return values in rank order, tensors as NumPy arrays. Raises
    ValueError before a process starts, RankError, RankTimeout or OutOfMemory after.
    """
    __tracebackhide__ = True
    if not callable(fn):
        raise illegal("fn", fn, "cannot be called", "a function of a group: fn(group, *args)")
    node_of = places(fn, ranks, args, nodes)
    choice("memory", memory, (False, True))
    program = functools.partial(_program, fn)
    parts = launch_program(
        program,
        ranks,
        (node_of, memory, *args),
        timeout=timeout,
        device=device,
        live=live,
        strict=strict,
        stop=stop,
    )
    for part in parts:
        if calls := part["unwaited"]:
            said = f"rank {part['rank']} has not waited for {calls[0]}"
            said += f" and {len(calls) - 1} more" * (len(calls) > 1)
            more = "what is returned may be half-finished, so call .wait() on what a call returns"
            warnings.warn(f"{said}: {more}", stacklevel=2)
            break
    peaks = {"peak_bytes": [part["peak_bytes"] for part in parts]} if memory else {}
    meta = {"function": name_of(fn), "strict": strict, **parts[0]["meta"], **peaks}
    return Report.from_parts(parts, model=None, plan=Plan(dp=ranks), meta=meta)


def places(fn: Any, ranks: int, args: Sequence[Any], nodes: int) -> tuple[int, ...]:
    """The node of each rank. Refuses what cannot be sent to ranks by the names the caller knows."""
    ranks = whole("ranks", ranks, at_least=1, at_most=MAX_RANKS)
    nodes = whole("nodes", nodes, at_least=1, at_most=ranks)
    instance("args", args, (tuple, list), f"args=({shown(args)},)", "tuple of arguments")
    _pickled("fn", fn, tuple(args))
    return tuple(rank * nodes // ranks for rank in range(ranks))


def name_of(fn: Callable[..., Any]) -> str:
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    return getattr(fn, "__name__", type(fn).__name__)


def part_of(who: Any, tables: dict[str, Any], result: Any, **meta: Any) -> dict[str, Any]:
    """What a rank hands back. ``who`` has its rank, device and nodes, if ``meta`` does not say."""
    import torch

    said = {"device": who.device, "nodes": list(who.nodes), "torch": str(torch.__version__)}
    return {
        "rank": who.rank,
        "clock_offset": 0.0,  # one machine, one clock
        "clock_uncertainty": 0.0,
        **tables,
        "losses": [],
        "result": _plain(result),
        "meta": said | meta,
    }


def _program(
    fn: Callable[..., Any], context: Any, node_of: tuple[int, ...], memory: bool, *args: Any
) -> dict[str, Any]:
    """What every rank runs: ``fn`` as step 0, between two moments that all ranks share."""
    __tracebackhide__ = True  # an error's traceback begins with the caller's function
    import torch

    from paralab.comm import everyone
    from paralab.instruments.memory import PeakMemory

    context = replace(context, nodes=node_of)
    # Connections are made, and the ranks brought together, in a notebook that is thrown away.
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
    """``value`` with every tensor in it as a NumPy array, which has no bfloat16: float32 then."""
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    if isinstance(value, dict):
        return dict(zip(value, _plain(list(value.values())), strict=True))
    if isinstance(value, tuple) and type(value).__module__.partition(".")[0] == "torch":
        value = tuple(value)  # a torch.Size, or what torch.max returns: to read one takes torch
    kind, make = type(value), None
    if kind in (list, tuple):
        make = kind
    elif isinstance(value, tuple):
        make = getattr(kind, "_make", None)  # of a named tuple
    if make is None or NUMBERS.issuperset(map(type, value)):
        return value
    return make(map(_plain, value))
