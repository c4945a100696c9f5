"""`pl.run`: check the arguments, launch the ranks, merge their parts into one report.

The caller's process (a notebook's kernel) never imports torch; the ranks do. `run_under_torchrun`
is what one rank of a torchrun job does instead: it trains, and writes its part into a folder.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from paralab.checks import choice, count_of, illegal, instance, num_bytes, real, whole
from paralab.data import Corpus
from paralab.instruments.calibrate import device_of_run, gpu_each, timestamp
from paralab.interpret.quick import table
from paralab.launch import MAX_RANKS, check_launch, launch_program
from paralab.programs.compile import compiled
from paralab.ranks.errors import OutOfMemory, Stopped, interrupted
from paralab.ranks.started import variable
from paralab.report import checkpoints, output_files, scratch
from paralab.report.report import Report
from paralab.report.storage import check_part, save_part
from paralab.spec import ModelSpec, Plan
from paralab.spec.cluster import available_cores
from paralab.theory.offload import file_bytes
from paralab.version import __version__

DEFAULT_LR = {"adamw": 1e-3, "sgd": 0.1}
ROW_BYTES = 2200  # of records per instruction and step: half on the rank, half in the caller
MUCH, LONG = 10**9, 100  # bytes of records, and steps of a run, from which `run` warns
LEGAL_SAVE = "a folder that you may write to, or the name of a new one"


def checked(
    model: ModelSpec,
    plan: Plan,
    *,
    steps: int = 4,
    optimizer: str = "adamw",
    lr: float | None = None,
    clip_norm: float | None = None,
    data: str | os.PathLike[str] | None = None,
    seed: int = 0,
    keep_state: bool = False,
    memory_limit: object = None,
    save: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    resume_changes: Sequence[str] = (),
) -> dict[str, Any]:
    """The arguments of `run` that `train` needs besides the model and the plan, checked and with
    defaults filled in. Raises ``ValueError`` on anything that no run could do, so before a process
    starts. Makes no folder.
    """
    instance("plan", plan, Plan, "a pl.Plan(...)")
    plan.validate(model)
    if model.vocab < 256:
        why = "text is read as bytes, which have 256 values"
        raise illegal("vocab", model.vocab, why, "256 or more")
    choice("optimizer", optimizer, tuple(DEFAULT_LR))
    lr = DEFAULT_LR[optimizer] if lr is None else real("lr", lr, above=0.0)
    clip = None if clip_norm is None else real("clip_norm", clip_norm, above=0.0)
    if plan.passes or plan.grad_sync is None:  # refuses what a pass of the caller gets wrong
        compiled(model, plan, optimizer=optimizer, clips=clip is not None)
    corpus = Corpus(data)
    corpus.sample(0, length=model.seq_len, seed=0)  # refuses a text shorter than one sample
    seed = whole("seed", seed, at_least=0, at_most=2**31 - 1)
    if save_every is not None:
        whole("save_every", save_every, at_least=1)
        if save is None:
            why, legal = "there is no folder to save into", 'save="a folder" too, or None'
            raise illegal("save_every", save_every, why, legal)
    changes = checkpoints.check_changes(resume_changes)
    if changes and resume is None:
        why, legal = "there is nothing to resume", 'resume="a folder" too, or ()'
        raise illegal("resume_changes", changes, why, legal)
    if resume is not None:  # "latest" is looked up once, so all ranks read the same checkpoint
        checkpoint = checkpoints.find(resume)
        ours = {"optimizer": optimizer, "seed": seed, "lr": lr}
        ours |= {"global_batch": plan.global_batch, "data": corpus.identity, "clip_norm": clip}
        checkpoint.check(model, changes, **ours)
        resume = str(checkpoint.folder)
    scratch.check(plan.tiers, file_bytes(model, plan, optimizer=optimizer))
    settings = {
        "steps": whole("steps", steps, at_least=1),
        "optimizer": optimizer,
        "lr": lr,
        "clip_norm": clip,
        "data": None if data is None else str(corpus.root),
        "seed": seed,
        "keep_state": choice("keep_state", keep_state, (True, False)),
        "memory_limit": None if memory_limit is None else num_bytes("memory_limit", memory_limit),
        "save": None,
        "save_every": save_every,
        "resume": resume,
    }
    if save is not None:
        folder = output_files.check_folder("save", save, LEGAL_SAVE)
        checkpoints.check_save(folder, resume)
        settings["save"] = str(folder)
    return settings


def run(
    model: ModelSpec,
    plan: Plan | None = None,
    *,
    steps: int = 4,
    optimizer: str = "adamw",
    lr: float | None = None,
    clip_norm: float | None = None,
    data: str | os.PathLike[str] | None = None,
    seed: int = 0,
    memory_limit: object = None,
    keep_state: bool = False,
    save: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    resume_changes: Sequence[str] = (),
    device: str | None = None,
    timeout: float = 120.0,
    progress: bool | Callable[[int, int, int], None] = True,
    strict: bool = False,
    stop: threading.Event | None = None,
) -> Report:
    """Train ``model`` under ``plan`` on real processes and return what they measured.

    model, plan   what to train and how to split it (default: one device)
    steps         optimizer steps, the first of them warm-up; the records of all are in memory
    optimizer     "adamw" or "sgd"; ``lr`` learning rate (default 1e-3 or 0.1)
    clip_norm     clip the gradients' global L2 norm to this
    data          a text file or folder (default: the source of torch's layers)
    seed          draws weights and batches
    memory_limit  bytes that the live tensors of a rank may take, as a number or as text, "64MB"
                  (10^6) or "64MiB" (2^20); a rank that needs more ends the run with OutOfMemory.
                  `report.memory` then has every step, otherwise step 0 alone. The ledger that
                  counts the bytes slows each step down, by 5 to 20 % on a processor and more on a
                  GPU, so the times of such a run are no measurements
    keep_state    also return ``report.weights`` and ``report.gradients``, which `report.save`
                  leaves out
    save          a folder for checkpoints; one is written after the last step. The folder keeps the
                  last two, so a folder with checkpoints of another training is refused
    save_every    also save whenever the training has done a multiple of this many steps
    resume        a folder that ``save`` wrote: continue from its latest checkpoint (or from a given
                  one, "folder/step-00000004"), under the same plan or any other, for ``steps`` more
                  steps, with the batches that come next. Model, optimizer, seed, lr, clip_norm,
                  global batch and text must be those of the checkpoint
    resume_changes  which of these settings may differ from the checkpoint's: any of "lr",
                  "global_batch", "data", "clip_norm"
    device        "cpu", "cuda", or None: what `pl.set_default_device` says; else a GPU for each
                  rank where there are as many, else the CPU
    timeout       seconds without any sign of life after which the ranks are stopped
    progress      show a bar that moves with the ranks' steps; or a function called as
                  progress(rank, steps done, steps), at most 20 times a second for each rank
    strict        check every call against NCCL's order rules, on gloo too (strict.py)
    stop          an event: set it from any thread, at any moment, and the run ends within a second

    Raises ValueError before a process starts; RankError, RankTimeout, OutOfMemory or Stopped
    afterwards. No process is left behind in any case.
    """
    __tracebackhide__ = True
    if not callable(progress):
        choice("progress", progress, (True, False), "progress(rank, steps done, steps)")
    limits = {"timeout": timeout, "device": device, "strict": strict, "stop": stop}
    check_launch(**limits)
    plan = Plan() if plan is None else plan
    if isinstance(plan, Plan) and plan.world_size > MAX_RANKS:
        plan.validate(model)  # a plan that no machine can run is refused as such first
        largest = max(("dp", "tp", "pp"), key=lambda name: getattr(plan, name))
        why = f"the plan needs {plan.world_size} ranks, and one machine starts at most {MAX_RANKS}"
        others = "fewer ranks; pl.dry_run, or pl.predict for a larger cluster, which start no "
        others += "ranks; or torchrun on several machines"
        raise illegal(largest, getattr(plan, largest), why, others)
    settings = checked(
        model,
        plan,
        steps=steps,
        optimizer=optimizer,
        lr=lr,
        clip_norm=clip_norm,
        data=data,
        seed=seed,
        memory_limit=memory_limit,
        keep_state=keep_state,
        save=save,
        save_every=save_every,
        resume=resume,
        resume_changes=resume_changes,
    )
    steps = settings["steps"]
    trains = {"optimizer": settings["optimizer"], "clips": settings["clip_norm"] is not None}
    if steps >= LONG and (size := _report_bytes(model, plan, steps, **trains)) >= MUCH:
        what = f"the records of all {steps} steps will take about {size / 1e9:,.0f} GB"
        advice = "train in several runs, each of which resumes what the one before has saved"
        warnings.warn(f"{what} of memory; {advice}", stacklevel=2)
    gpus = (device or device_of_run(plan.world_size)) == "cuda"
    model = model.resolved(gpus=gpus)
    with closing(_ProgressBar(steps, plan, progress)) as bar:
        try:
            with scratch.folder(plan.tiers) as folder:
                given = model, plan, settings, resume and os.fspath(resume), folder
                how = {"optimizers": False, "on_progress": bar.move, **limits}
                parts = launch_program(_program, plan.world_size, given, **how)
        except Stopped as stopped:
            raise Stopped(f"{stopped}; {bar}") from None
        except KeyboardInterrupt as interrupt:
            raise interrupted(interrupt, str(bar)) from None
        except OutOfMemory as error:
            gloo = not gpus or not gpu_each(plan.world_size)  # ranks that share a GPU use gloo too
            error.explain(table(model, plan, gloo=gloo, **trains))
            raise
    return Report.from_parts(parts, model=model, plan=plan, meta=_meta(settings, parts[0]["meta"]))


def run_under_torchrun(
    model: ModelSpec,
    plan: Plan,
    *,
    folder: str,
    device: str | None = None,
    timeout: float = 120.0,
    **settings: Any,
) -> int:
    """Be one rank of a `torchrun` job, and write its part of the report into ``folder``, where
    ``pl.load(folder)`` merges the parts of all ranks. Returns the rank.
    """
    timeout = check_launch(timeout, device)
    resume, settings = settings.get("resume"), checked(model, plan, **settings)
    check_part(folder)
    world = int(variable("WORLD_SIZE", number=True))
    if world != plan.world_size:
        why = f"the plan needs {count_of(plan.world_size, 'rank')}, torchrun started {world}"
        legal = f"a plan of {count_of(world, 'rank')}, "
        legal += f"or --nproc-per-node * --nnodes = {plan.world_size}"
        raise illegal("dp", plan.dp, why, legal)
    import torch  # this process is a rank, so it may import torch
    import torch.distributed as dist

    from paralab.ranks.host import separate_queues
    from paralab.ranks.torchrun import torchrun_context

    separate_queues()
    # torchrun sees to it where it starts several ranks; of a single one torch would use all cores.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    context = torchrun_context(timeout=timeout, device=device)
    model = model.resolved(gpus=context.device != "cpu")
    with scratch.folder(plan.tiers) as folder_of_rank:
        part = _program(context, model, plan, settings, resume, folder_of_rank)
    meta = _meta(settings, part["meta"])
    if context.rank == 0:
        context.store.set("paralab/run_id", meta["run_id"])
    meta["run_id"] = context.store.get("paralab/run_id").decode()  # rank 0's, in all parts
    save_part(Path(folder), part, model=model, plan=plan, meta=meta)
    dist.destroy_process_group()  # else NCCL's threads may hang at exit
    return context.rank


def _report_bytes(model: ModelSpec, plan: Plan, steps: int, **trains: Any) -> float:
    """The memory that the records of a run take, on the ranks and in this process, at its end."""
    codes = compiled(model, plan, **trains).codes
    return ROW_BYTES * steps * sum(map(len, codes)) * plan.world_size / plan.pp


def _program(
    context: Any,
    model: ModelSpec,
    plan: Plan,
    settings: dict[str, Any],
    resume: str | os.PathLike[str] | None,
    folder: str | None,
) -> dict[str, Any]:
    """Runs in a rank. resume: as the caller gave it; folder: for the files of offloaded states"""
    from paralab.interpret.train import train

    newest = resume is not None and Path(resume).expanduser().absolute() != Path(settings["resume"])
    return train(context, model, plan, offload_folder=folder, newest=newest, **settings)


def _meta(settings: dict[str, Any], rank_meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "run_id": uuid.uuid4().hex,
        "paralab": __version__,
        "python": platform.python_version(),
        "cores": available_cores(),
        "finished": timestamp(),
        **rank_meta,
        **settings,
    }


class _ProgressBar:
    """A tqdm bar over the steps that every rank has finished, in a notebook or a terminal only."""

    def __init__(
        self, steps: int, plan: Plan, display: bool | Callable[[int, int, int], None]
    ) -> None:
        self.steps, self.done, self.bar = steps, [0] * plan.world_size, None
        self.callback = display if callable(display) else None
        visible = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
        if display is True and visible:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=steps, desc=count_of(plan.world_size, "rank"), unit="step")

    def __str__(self) -> str:
        return f"{min(self.done)} of {self.steps} steps done"

    def move(self, rank: int, done: int, total: int) -> None:
        self.done[rank] = done
        if self.bar is not None:
            self.bar.update(min(self.done) - self.bar.n)
        if self.callback is not None:
            self.callback(rank, done, total)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
