"""`pl.observe`: any PyTorch program, with everything that it computed, sent and held written down.

    report = pl.observe(train, ranks=4)          # train() on four ranks, a process group is up
    report.traffic(["axis", "op"]), report.memory_chart(), report.timeline(), report.explain()

    with pl.observe() as seen:                   # this process: a few steps of any model
        for batch in batches: ...
    seen.memory_chart()

    paralab observe --ranks 4 train.py --lr 0.1                   # a script, unchanged
    torchrun --nproc-per-node 2 -m paralab observe train.py       # one part per rank, for pl.load

A step ends where an optimizer's ``step`` ends, or where the program calls `step`. What instruments
see, on which device, and what they cost, is in instruments/foreign.py. Torch-free.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paralab import checks
from paralab.checks import choice, illegal, whole
from paralab.launch import launch_program, torchrun_context
from paralab.ranks.ending import ending
from paralab.ranks.errors import OutOfMemory
from paralab.report.report import Report, save_part
from paralab.report.storage import check_part
from paralab.spec import Plan
from paralab.trace import name_of, part_of, places
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
                  Without one: a context manager for this process, which yields an object
                  that has the report's methods after the block
    ranks         processes, 1 to 64; ``args`` the same on every rank, of a script as text
    nodes         place the ranks on this many virtual nodes, the first ones on node 0
    steps         "optimizer": a step ends where the optimizer's ``step`` ends; where several step
                  one after the other, the last one's. "marked": where the program calls
                  ``paralab.step()``
    memory_steps  how many steps, from the first, the live ledger counts bytes in. Such a step is 5
                  to 20 % slower, and more where operations are small; later ones are timed without
                  it. Optimizers make their states at the end of the first, so there are two. While
                  it counts, torch.compile compiles nothing, and what it would have compiled is
                  compiled in the step after; with 0, in the first. torch.func refuses to work while
                  it counts: observe such a program with 0
    launch        timeout, device, live, stop: as in `pl.launch`

    The device is the program's own, and ``report.meta["device"]`` says which: times and bytes are a
    GPU's from the first tensor that ``fn`` has there, and the CPU's if it has none. Its peaks, as
    torch.cuda.max_memory_allocated() says them, are what they are without; after a block in this
    process they are those of the block's last step.
    ``report.losses`` are what ``fn`` returns if that is one number per step, the mean of the ranks
    that return some; ``report.results`` are the returned values in rank order, tensors as NumPy
    arrays. Raises ValueError before a process starts, or where steps cannot be told apart;
    RankError, RankTimeout or OutOfMemory after.
    """
    __tracebackhide__ = True
    settings = _settings(steps, memory_steps)
    if unknown := set(launch) - {"timeout", "device", "live", "stop"}:
        raise TypeError(f"observe() got an unexpected keyword argument {min(unknown)!r}")
    if fn is None:
        if launch or args or (ranks, nodes) != (4, 1):
            legal = "with a function or a script, which is observed on ranks of its own"
            why = "without a function this process is observed, as it is"
            raise illegal("ranks, args, nodes, launch", (ranks, args, nodes, launch), why, legal)
        return _here(settings)
    what = fn if callable(fn) else _script_file(fn)
    node_of, program = places(what, ranks, args, nodes), functools.partial(_program, what)
    arguments = (node_of, settings, *args)
    parts = launch_program(program, ranks, arguments, any_tensor=True, **launch)
    return _report(_named(what), parts)


def _named(what: Any) -> str:
    return what.name if isinstance(what, Path) else name_of(what)


def step() -> None:
    """A training step of an observed program ends here; without an observation nothing happens."""
    if _observers:
        _observers[-1].end_step()


def observe_under_torchrun(
    path: str | os.PathLike[str], args: Sequence[str] = (), *, folder: str, **settings: Any
) -> int:
    """Be one rank of a torchrun job: run the script, write this rank's part. Returns the rank.

    The ranks meet before the script lets them, so that parts have one name and clocks one zero.
    """
    script, checked = _script_file(path), _settings(**settings)
    check_part(folder)
    context = torchrun_context()
    from paralab.comm import everyone
    from paralab.instruments.clocks import measure_offset

    if context.rank == 0:
        context.store.set("run_id", uuid.uuid4().hex)
    said = {"run_id": context.store.get("run_id").decode()}
    offset, uncertainty = measure_offset(everyone(context))  # its messages are not in the report
    with _observed(context, checked) as observer:
        own = os.getpid()
        _script(context, script, *args)
        if os.getpid() != own:  # a fork of the program came to its end
            sys.stdout.flush()
            os._exit(0)
        part = _part(observer, context, None, script.name)
    part |= {"clock_offset": offset, "clock_uncertainty": uncertainty}
    meta = _meta(script.name) | part.pop("meta") | said
    save_part(Path(folder), part, model=None, plan=Plan(dp=context.world_size), meta=meta)
    return context.rank


def _settings(steps: str = "optimizer", memory_steps: int = 2) -> dict[str, Any]:
    choice("steps", steps, STEPS)
    count = whole("memory_steps", memory_steps, at_least=0)
    return {"marked": steps == "marked", "memory_steps": count}


def _script_file(path: str | os.PathLike[str]) -> Path:
    legal = "a function, a Python file, or nothing for this process"
    script = checks.path("fn", path, legal)
    if not script.is_file():
        why = "is a folder" if script.is_dir() else "there is no such file"
        raise illegal("fn", str(path), why, legal)
    return script.absolute()


def _meta(name: str) -> dict[str, Any]:
    finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"function": name, "paralab": __version__, "finished": finished}


def _report(name: str, parts: list[dict[str, Any]]) -> Report:
    meta = _meta(name) | parts[0]["meta"]
    return Report.from_parts(parts, model=None, plan=Plan(dp=len(parts)), meta=meta)


# ---- on a rank ----------------------------------------------------------------------------------
def _program(
    what: Any, context: Any, nodes: tuple[int, ...], settings: dict[str, Any], *args: Any
) -> dict[str, Any]:
    __tracebackhide__ = True
    context = replace(context, nodes=nodes)
    run = _function if callable(what) else _launched_script
    with _observed(context, settings) as observer:
        return _part(observer, context, run(context, what, *args), _named(what))


@contextlib.contextmanager
def _observed(who: Any, settings: dict[str, Any]) -> Iterator[Any]:
    """who  has its rank, world_size and nodes; the device is the program's own"""
    __tracebackhide__ = True
    from paralab.instruments.foreign import Observer
    from paralab.instruments.recorder import Recorder

    recorder = Recorder(rank=who.rank, world_size=who.world_size)
    with Observer(recorder, nodes=who.nodes, **settings) as observer:
        _observers.append(observer)
        try:
            yield observer
        except RuntimeError as error:
            if isinstance(report := getattr(error, "out_of_memory", None), OutOfMemory):
                raise report from error
            if "support saved tensor hooks" not in str(error):
                raise
            why = "the ledger has hooks on saved tensors, and torch.func takes none"
            raise illegal("memory_steps", observer.memory_steps, why, "0") from error
        finally:
            _observers.remove(observer)


def _part(observer: Any, who: Any, result: Any, name: str = "this process") -> dict[str, Any]:
    tables = observer.part()
    if observer.saw_nothing and result is None:
        raise illegal("program", name, NOTHING, "a program that trains in its ranks")
    used = {"device": observer.device, "backend": observer.calls.backend(observer.device)}
    part = part_of(who, tables, result, observed=observer.about, **used)
    result = part["result"]
    if isinstance(result, (list, tuple)) and len(result) == len(tables["steps"]["step"]):
        with contextlib.suppress(TypeError, ValueError):
            part["losses"] = [[float(loss)] for loss in result]
    return part


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


def _launched_script(context: Any, path: Path, *args: Any) -> None:
    """The script in a launched rank, with the store and the variables of a torchrun job."""
    __tracebackhide__ = True
    import torch.distributed as dist

    if context.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context.store.set("observed/port", str(store.port))
    port = context.store.get("observed/port").decode()
    said = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0"}  # one machine
    said |= dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(context.rank))
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    os.environ |= said | dict.fromkeys(sizes, str(context.world_size))
    os.environ["TORCHELASTIC_RUN_ID"] = "paralab"
    own = os.getpid()  # the store is there already, but not for processes that the script starts
    rendezvous = sys.modules["torch.distributed.rendezvous"]  # under that name is a function, too
    rendezvous._torchelastic_use_agent_store = lambda: os.getpid() == own
    with ending():
        _names = _script(context, path, *args)  # kept, as by Python, until the end


def _script(context: Any, path: Path, *args: Any) -> dict[str, Any]:
    """The script as ``python path args``, which makes its own process group. ``sys.exit(0)`` is an
    end like any other. Returns its names.
    """
    __tracebackhide__ = True
    import runpy

    import torch.distributed as dist

    dist.destroy_process_group()
    sys.argv[:] = [str(path), *map(str, args)]
    sys.path.insert(0, str(path.parent))
    try:
        return runpy.run_path(str(path), run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0):
            raise
        return {}


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
    import torch

    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
    if ranks > 1:
        why = f"this process is one of {ranks} ranks, and the report would be of one process"
        legal = "pl.observe(fn, ranks=N), or torchrun ... -m paralab observe FILE"
        raise illegal("fn", None, why, legal)
    seen, who = _Seen(), SimpleNamespace(rank=0, world_size=1, device="cpu", nodes=(0,))
    with _observed(who, {**settings, "existing": True}) as observer:
        yield seen
        part = _part(observer, who, ())
    seen.report = _report("this process", [part])
