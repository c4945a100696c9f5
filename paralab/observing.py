"""`pl.observe`: run any PyTorch program, and record what it computed, sent and held in memory.

    report = pl.observe(train, ranks=4)          # train() on four ranks, whose process group is up
    report.traffic(["axis", "op"]), report.memory_chart(), report.timeline(), report.explain()

    with pl.observe() as seen:                   # this process: a few steps of any model
        for batch in batches: ...
    seen.memory_chart()

    paralab observe --ranks 4 train.py --lr 0.1                   # a script, unchanged; or -m NAME
    torchrun --nproc-per-node 2 -m paralab observe train.py       # one part per rank, for pl.load

A step ends where an optimizer's ``step`` ends, or where the program calls `step`. The docstring of
instruments/foreign.py says what is intercepted and what that costs. Torch-free.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paralab import checks
from paralab.checks import choice, illegal, whole
from paralab.instruments.calibrate import timestamp
from paralab.launch import launch_program
from paralab.ranks.ending import ending
from paralab.ranks.errors import OutOfMemory
from paralab.ranks.failure import Refused
from paralab.report.report import Report
from paralab.report.storage import check_part, save_part
from paralab.spec import Plan
from paralab.spec.forms import name_of
from paralab.trace import part_of, places
from paralab.version import __version__

STEPS = ("optimizer", "marked")
NOTHING = """nothing was seen in this process: no module or optimizer was called, and no tensor \
sent. Processes that a program starts itself (torch.multiprocessing.spawn) are not observed: let \
paralab observe --ranks N, or torchrun, start its ranks"""
UNCOUNTED = {  # {what torch says of a program whose bytes cannot be counted: why}
    "support saved tensor hooks": "counting bytes takes hooks on saved tensors, which torch.func "
    "does not support",
    "torch dispatch mode present": "counting bytes takes a dispatch mode, in which torch.compile "
    "with fullgraph=True refuses to work",
}
_observers: list[Any] = []  # those that are active; the last one is the innermost


class Module(str):
    """The name of a module that is run as by ``python -m``, in place of a script's path."""


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

    fn            a function that uses torch.distributed, whose default process group is up; or the
                  path of a script, which makes its process group itself, from torchrun's variables.
                  None: return a context manager that observes this process, and yields an object
                  that has the report's methods after the block
    ranks         processes, 1 to 64
    args          the same on every rank; a script gets them as text
    nodes         place the ranks on this many virtual nodes, the first ranks on node 0
    steps         "optimizer": a step ends where the optimizer's ``step`` ends; where several
                  optimizers step one after the other, where the last one's does. "marked": where
                  the program calls ``paralab.step()``
    memory_steps  the number of steps, from the first, in which the live ledger counts bytes. Such a
                  step is 5 to 20 % slower, more where operations are small; later steps are timed
                  without the ledger. The default is 2, as optimizers make their states at the end
                  of the first step. While the ledger counts, torch.compile compiles nothing (with
                  fullgraph=True it refuses), and torch.func refuses to work. What torch.compile
                  skips it compiles in the step after, or never where a compiled function holds
                  whole steps, as the ledger stays on; with 0 both work from the first step on
    launch        timeout, device, live, stop: as in `pl.launch`

    The program chooses its device, and ``report.meta["device"]`` says which: times and bytes are a
    GPU's from the first tensor that ``fn`` has there, and the CPU's if it has none. What the
    program reads from torch.cuda.max_memory_allocated() is the same as without the observation;
    after a block in this process it is the peak of the block's last step.
    ``report.losses`` is what ``fn`` returns if that is one number per step, averaged over the ranks
    that return numbers; ``report.results`` are the returned values in rank order, tensors as NumPy
    arrays. Raises ValueError before a process starts, or where the ends of steps are not known;
    RankError, RankTimeout or OutOfMemory after.
    """
    __tracebackhide__ = True
    settings = _settings(steps, memory_steps)
    if unknown := set(launch) - {"timeout", "device", "live", "stop"}:
        raise TypeError(f"observe() got an unexpected keyword argument {min(unknown)!r}")
    if fn is None:
        if launch or args or (ranks, nodes) != (4, 1):
            legal = "these arguments together with a function or a script"
            why = "without a function, pl.observe observes this process and starts no ranks"
            raise illegal("ranks, args, nodes, launch", (ranks, args, nodes, launch), why, legal)
        return _here(settings)
    program = fn if callable(fn) else _script_file(fn)
    if not callable(fn):  # a script, which finds its GPUs untouched: it may choose what it sees
        launch["device"] = launch.get("device") or "cpu"
    on_rank = functools.partial(_on_rank, program, places(ranks, nodes), settings)
    parts = launch_program(on_rank, ranks, args, fn=program, any_tensor=True, **launch)
    return _report(_name(program), parts)


def _name(program: Any) -> str:
    return name_of(program) if callable(program) else getattr(program, "name", program)


def step() -> None:
    """End a training step of the observed program. Without an observation nothing happens."""
    if _observers:
        _observers[-1].end_step()


def observe_under_torchrun(
    path: str | os.PathLike[str], args: Sequence[str] = (), *, folder: str, **settings: Any
) -> Callable[[], None]:
    """Become one rank of a torchrun job. Returns a function that runs the script, and writes this
    rank's part of the report into ``folder``: its errors are the script's, and no refusals.

    The ranks communicate before the script runs, to agree on the id of the run and to compare their
    clocks.
    """
    script, checked = _script_file(path), _settings(**settings)
    check_part(folder)
    from paralab.ranks.torchrun import torchrun_context

    place = os.path.abspath(folder)  # the script may change the current folder
    context = torchrun_context(device="cpu")  # the script finds its GPUs untouched
    return functools.partial(_observe_rank, context, script, args, place, checked)


def _observe_rank(
    context: Any, script: Path | Module, args: Sequence[str], folder: str, settings: dict[str, Any]
) -> None:
    from paralab.comm import everyone
    from paralab.instruments.clocks import measure_offset

    if context.rank == 0:
        context.store.set("run_id", uuid.uuid4().hex)
    shared = {"run_id": context.store.get("run_id").decode()}
    offset, uncertainty = measure_offset(everyone(context))  # its messages are not in the report
    with _observed(context, settings) as observer:
        own = os.getpid()
        _script(context, script, *args)
        if os.getpid() != own:  # this is a process that the program has forked, at its end
            sys.stdout.flush()
            os._exit(0)
        part = _part(observer, context, None, _name(script))
    part |= {"clock_offset": offset, "clock_uncertainty": uncertainty}
    meta = _meta(_name(script)) | part.pop("meta") | shared
    save_part(Path(folder), part, model=None, plan=Plan(dp=context.world_size), meta=meta)


def _settings(steps: str = "optimizer", memory_steps: int = 2) -> dict[str, Any]:
    choice("steps", steps, STEPS)
    count = whole("memory_steps", memory_steps, at_least=0)
    return {"marked": steps == "marked", "memory_steps": count}


def _script_file(path: str | os.PathLike[str]) -> Path | Module:
    if isinstance(path, Module):  # only a rank finds it, as to look into a package imports that
        return path
    any_kind = "a function, the path of a Python file, or None to observe this process"
    checks.instance("fn", path, str | os.PathLike, any_kind, "path")
    legal = "the path of a Python file"
    script = checks.path("script", path, legal)
    if not script.is_file():
        why = "it is a folder" if script.is_dir() else "there is no such file"
        raise illegal("script", str(path), why, legal)
    return script.absolute()


def _meta(name: str) -> dict[str, Any]:
    return {"function": name, "paralab": __version__, "finished": timestamp()}


def _report(name: str, parts: list[dict[str, Any]]) -> Report:
    meta = _meta(name) | parts[0]["meta"] | {"one_machine": True}
    return Report.from_parts(parts, model=None, plan=Plan(dp=len(parts)), meta=meta)


# ---- on a rank ----------------------------------------------------------------------------------
def _on_rank(
    program: Any, nodes: tuple[int, ...], settings: dict[str, Any], context: Any, *args: Any
) -> dict[str, Any]:
    """Runs in a launched rank: run the program under observation, and return the rank's part. Other
    libraries look for their rank where torchrun has it, in the environment.
    """
    __tracebackhide__ = True
    context = replace(context, nodes=nodes)
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(context.rank))
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    os.environ |= {"GROUP_RANK": "0"} | ranks | dict.fromkeys(sizes, str(context.world_size))
    run = _function if callable(program) else _launched_script
    with _observed(context, settings) as observer:
        return _part(observer, context, run(context, program, *args), _name(program))


@contextlib.contextmanager
def _observed(context: Any, settings: dict[str, Any]) -> Iterator[Any]:
    """Observe what the block does, on a rank with the rank, world_size and nodes of ``context``."""
    __tracebackhide__ = True
    from paralab.instruments.foreign import Observer
    from paralab.instruments.recorder import Recorder

    recorder = Recorder(rank=context.rank, world_size=context.world_size)
    with Observer(recorder, nodes=context.nodes, **settings) as observer:
        _observers.append(observer)
        try:
            yield observer
        except RuntimeError as error:
            if isinstance(report := getattr(error, "out_of_memory", None), OutOfMemory):
                raise report from error
            why = next((why for text, why in UNCOUNTED.items() if text in str(error)), None)
            if why is None or not observer.memory_steps:
                raise
            raise illegal("memory_steps", observer.memory_steps, why, "0") from error
        finally:
            _observers.remove(observer)
            if observer.calls.refusal is not None:  # the program may have caught it
                raise observer.calls.refusal from None


def _part(observer: Any, context: Any, result: Any, name: str = "this process") -> dict[str, Any]:
    """This rank's part of the report, with what the program returned."""
    tables = observer.part()
    if observer.saw_nothing and result is None:
        raise illegal("program", name, NOTHING, "a program that trains in these processes")
    used = {"device": observer.device, "backend": observer.calls.backend(observer.device)}
    part = part_of(context, tables, result, observed=observer.about, **used)
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
        why = "the default process group exists already when pl.observe calls a function"
        legal = "a function without this call, or the program as a script: paralab observe FILE"
        raise illegal("init_process_group", "called again", why, legal) from error


def _launched_script(context: Any, path: Path | Module, *args: Any) -> None:
    """The script in a launched rank, with the store of a torchrun job."""
    __tracebackhide__ = True
    import torch.distributed as dist

    if context.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context.store.set("observed/port", str(store.port))
    port = context.store.get("observed/port").decode()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ["TORCHELASTIC_RUN_ID"] = "paralab"
    own = os.getpid()  # ranks connect to the store above; processes that the script starts do not
    rendezvous = sys.modules["torch.distributed.rendezvous"]  # the attribute is a function
    rendezvous._torchelastic_use_agent_store = lambda: os.getpid() == own
    with ending():
        _names = _script(context, path, *args)  # alive until the end, as a script's globals are


def _script(context: Any, path: Path | Module, *args: Any) -> dict[str, Any]:
    """Run a script as ``python path args`` does, or ``python -m``; it makes its process group
    itself. Returns its global names, after ``sys.exit(0)`` none.
    """
    __tracebackhide__ = True
    import runpy  # of it pdb, too, uses the function that says what cannot be found

    import torch.distributed as dist

    dist.destroy_process_group()
    sys.argv[:] = [str(path), *map(str, args)]
    sys.path.insert(0, os.getcwd() if isinstance(path, Module) else str(path.parent))
    try:
        if not isinstance(path, Module):
            return runpy.run_path(str(path), run_name="__main__")
        runpy._get_module_details(path, Refused)
        return runpy.run_module(path, run_name="__main__", alter_sys=True)
    except Refused as error:
        legal = "-m and the name of a module, as in python -m"
        raise Refused(str(illegal("module", str(path), str(error), legal))) from None
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return {}


# ---- in this process ----------------------------------------------------------------------------
class _Seen:
    """What ``with pl.observe()`` yields. After the block it has the ``report``, and the report's
    attributes as its own.

    Parameters, gradients and optimizer states that exist before the block count; other tensors that
    do are not counted.
    """

    report: Report | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self.report is None:
            raise AttributeError(f"{name!r}: there is no report before the block has ended")
        return getattr(self.report, name)


@contextlib.contextmanager
def _here(settings: dict[str, Any]) -> Iterator[_Seen]:
    import torch

    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
    if ranks > 1:
        why = f"this process is one of {ranks} ranks, and the report would cover this one only"
        legal = "pl.observe(fn, ranks=N), or torchrun ... -m paralab observe FILE"
        raise illegal("fn", None, why, legal)
    seen, context = _Seen(), SimpleNamespace(rank=0, world_size=1, device="cpu", nodes=(0,))
    with _observed(context, {**settings, "existing": True}) as observer:
        yield seen
        part = _part(observer, context, ())
    seen.report = _report("this process", [part])
