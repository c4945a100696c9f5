"""`pl.observe`: any PyTorch program, with everything that it computed, sent and held written down.

    report = pl.observe(train, ranks=4)          # train() on four ranks, a process group is up
    report.traffic(["axis", "op"]), report.memory_chart(), report.timeline(), report.explain()

    with pl.observe() as seen:                   # this process: a few steps of any model
        for batch in batches: ...
    seen.memory_chart()

    paralab observe --ranks 4 train.py --lr 0.1                   # a script, unchanged
    torchrun --nproc-per-node 2 -m paralab observe train.py       # one part per rank, for pl.load

A step ends where an optimizer's ``step`` ends, or where the program calls `step`. What instruments
see, and what they cost, is in instruments/foreign.py. Torch-free.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paralab import checks
from paralab.checks import choice, illegal, whole
from paralab.launch import MAX_RANKS, _pickled, launch_program
from paralab.ranks.started import started
from paralab.report.report import Report, save_part
from paralab.spec import Plan
from paralab.trace import _name, _plain
from paralab.version import __version__

STEPS = ("optimizer", "marked")
NOTHING = """nothing was seen in this process: no module was called, no collective, no optimizer. \
A program that starts its ranks itself (torch.multiprocessing.spawn) is not observed: let \
paralab observe --ranks N, or torchrun, start them"""
_observers: list[Any] = []  # the innermost one hears of `step`


def observe(
    fn: Callable[..., Any] | str | os.PathLike[str] | None = None,
    ranks: int = 4,
    args: Sequence[Any] = (),
    *,
    nodes: int = 1,
    steps: str = "optimizer",
    memory_steps: int = 2,
    **launch: Any,
) -> Any:
    """Call ``fn(*args)`` on every rank and return the `Report` of what it did.

    fn            ordinary code on torch.distributed, whose default process group is up; or the path
                  of a script, which makes its process group itself, from torchrun's variables.
                  Without one: a context manager for this process, which yields what has the
                  report's methods once the block has ended
    ranks         processes, 1 to 64; ``args`` the same on every rank
    nodes         place the ranks on this many virtual nodes, the first ones on node 0
    steps         "optimizer": a step ends where the optimizer's ``step`` ends. "marked": where the
                  program calls ``paralab.step()``
    memory_steps  how many steps, from the first, the live ledger counts bytes in. Such a step is 5
                  to 20 % slower, and more where operations are small; later ones are timed without
                  it. The first step lacks what optimizers make in it, so there are two
    launch        timeout, device, live, stop: as in `pl.launch`

    ``report.losses`` are what ``fn`` returns if that is one number per step; ``report.results`` are
    the returned values in rank order, tensors as NumPy arrays. Raises ValueError before a process
    starts, or where steps cannot be told apart; RankError, RankTimeout or OutOfMemory after.
    """
    __tracebackhide__ = True
    settings = _settings(steps, memory_steps)
    if fn is None:
        return _here(settings)
    ranks = whole("ranks", ranks, at_least=1, at_most=MAX_RANKS)
    nodes = whole("nodes", nodes, at_least=1, at_most=ranks)
    if not isinstance(args, (tuple, list)):
        raise illegal("args", args, "not a tuple of arguments", f"args=({args!r},)")
    if callable(fn):
        run, what, name = _function, fn, _name(fn)
        _pickled("fn", fn, tuple(args))  # refuses what cannot be sent by the names the caller knows
    else:
        script = _script_file(fn)
        run, what, name = _script, str(script), script.name
    node_of = tuple(rank * nodes // ranks for rank in range(ranks))
    program = functools.partial(_program, run, what)
    parts = launch_program(program, ranks, (node_of, settings, *args), **launch)
    meta = {**_meta(name), **parts[0]["meta"]}
    return Report.from_parts(parts, model=None, plan=Plan(dp=ranks), meta=meta)


def step() -> None:
    """A training step of an observed program ends here; without an observation nothing happens."""
    if _observers:
        _observers[-1].end_step()


def observe_under_torchrun(
    path: str | os.PathLike[str], args: Sequence[str] = (), *, folder: str, **settings: Any
) -> int:
    """Be one rank of a torchrun job: run the script, write this rank's part. Returns the rank."""
    script, me, checked = _script_file(path), started(), _settings(**settings)
    from paralab.instruments.foreign_clock import meeting

    with meeting(me, _device(me.local_rank)) as met, _observed(checked, **_who(met)) as observer:
        own = os.getpid()
        _run_script(str(script), args)
        if os.getpid() != own:  # a fork of the program came to its end
            sys.stdout.flush()
            os._exit(0)
        part = _part(observer, None)
    part |= {"clock_offset": met.offset, "clock_uncertainty": met.uncertainty}
    meta = {**_meta(script.name), **part.pop("meta"), "run_id": met.run_id}
    save_part(Path(folder), part, model=None, plan=Plan(dp=me.world_size), meta=meta)
    return me.rank


def _settings(steps: str = "optimizer", memory_steps: int = 2) -> dict[str, Any]:
    choice("steps", steps, STEPS)
    count = whole("memory_steps", memory_steps, at_least=0)
    return {"marked": steps == "marked", "memory_steps": count}


def _script_file(path: str | os.PathLike[str]) -> Path:
    legal = "a function, a Python file, or nothing for this process"
    script = checks.path("fn", path, legal)
    if not script.is_file():
        raise illegal("fn", str(path), "there is no such file", legal)
    return script.absolute()


def _meta(name: str) -> dict[str, Any]:
    finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"function": name, "paralab": __version__, "finished": finished}


# ---- on a rank ----------------------------------------------------------------------------------
def _program(
    run: Callable[..., Any],
    what: Any,
    context: Any,
    nodes: tuple[int, ...],
    settings: dict[str, Any],
    *args: Any,
) -> dict[str, Any]:
    __tracebackhide__ = True
    context = replace(context, nodes=nodes)
    with _observed(settings, **_who(context)) as observer:
        return _part(observer, run(context, what, *args))


def _who(rank: Any) -> dict[str, Any]:
    return {name: getattr(rank, name) for name in ("rank", "world_size", "device", "nodes")}


@contextlib.contextmanager
def _observed(
    settings: dict[str, Any], *, rank: int, world_size: int, device: str, nodes: Sequence[int]
) -> Iterator[Any]:
    __tracebackhide__ = True
    from paralab.instruments.foreign import Observer
    from paralab.instruments.recorder import Recorder

    recorder = Recorder(rank=rank, world_size=world_size, device=device)
    with Observer(recorder, nodes=nodes, device=device.partition(":")[0], **settings) as observer:
        _observers.append(observer)
        try:
            yield observer
        finally:
            _observers.remove(observer)


def _part(observer: Any, result: Any) -> dict[str, Any]:
    import torch

    tables, recorder = observer.part(), observer.recorder
    counted = len(tables["steps"]["step"])
    if observer.saw_nothing and result is None:
        raise illegal("program", observer.step, NOTHING, "a program that trains in its ranks")
    result, losses = _plain(result), []
    if isinstance(result, (list, tuple)) and len(result) == counted:
        with contextlib.suppress(TypeError, ValueError):
            losses = [[float(loss)] for loss in result]
    return {
        "rank": recorder.rank,
        "clock_offset": 0.0,  # one machine, one clock
        "clock_uncertainty": 0.0,
        **tables,
        "losses": losses,
        "result": result,
        "meta": {
            "device": observer.device,
            "nodes": list(observer.nodes),
            "torch": str(torch.__version__),
            "observed": observer.about,
        },
    }


def _function(context: Any, fn: Callable[..., Any], *args: Any) -> Any:
    __tracebackhide__ = True
    try:
        return fn(*args)
    except ValueError as error:
        if "default process group twice" not in str(error):
            raise
        why = "the default process group is up when pl.observe calls a function"
        legal = "a function without that call; or the program as a script: paralab observe FILE"
        raise illegal("init_process_group", "called again", why, legal) from error


def _script(context: Any, path: str, *args: str) -> None:
    """The script in a launched rank, with the variables that torchrun would have set."""
    __tracebackhide__ = True
    import socket

    import torch.distributed as dist

    if context.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            context.store.set("observed/port", str(free.getsockname()[1]))
    port = context.store.get("observed/port").decode()
    dist.destroy_process_group()
    said = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0"}  # one machine
    said |= dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(context.rank))
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    os.environ |= said | dict.fromkeys(sizes, str(context.world_size))
    os.environ["TORCHELASTIC_RUN_ID"] = "paralab"
    _run_script(path, args)


def _run_script(path: str, args: Sequence[str]) -> None:
    """The script as ``python path args``. ``sys.exit(0)`` is an end like any other."""
    __tracebackhide__ = True
    import runpy

    sys.argv[:] = [path, *args]
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0):
            raise


def _device(local_rank: int | None = None) -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    turn = torch.cuda.current_device() if local_rank is None else local_rank
    return f"cuda:{turn % torch.cuda.device_count()}"


# ---- in this process ----------------------------------------------------------------------------
class _Seen:
    """What ``with pl.observe()`` yields: afterwards ``report``, whose methods are its own too.

    Of what there was before the block, the parameters, gradients and optimizer states count.
    """

    report: Report | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self.report is None:
            raise AttributeError(f"{name!r}: the report is there once the block has ended")
        return getattr(self.report, name)


@contextlib.contextmanager
def _here(settings: dict[str, Any]) -> Iterator[_Seen]:
    seen, who = _Seen(), {"rank": 0, "world_size": 1, "device": _device(), "nodes": (0,)}
    with _observed({**settings, "existing": True}, **who) as observer:
        yield seen
        part = _part(observer, ())
    meta = {**_meta("this process"), **part["meta"]}
    seen.report = Report.from_parts([part], model=None, plan=Plan(), meta=meta)
