"""Saving a training and resuming it later, under the same plan or any other.

The state of a training belongs to the model, not to the plan: every parameter, its AdamW moments,
the number of steps done. A checkpoint holds this state under the names of the single-device model,

    weight/blocks.0.mlp.up.weight      exp_avg/...      exp_avg_sq/...

and the plan only determines which rank writes, and later reads, which elements (`Piece`). Each rank
writes one safetensors file, and no rank ever holds the whole state. With AdamW in fp32 it has 12
bytes per parameter, of which each rank writes about 12/world_size, because one of several replicas
is written: report/boxes.py says by which rank. report/checkpoints.py publishes a checkpoint all at
once.

With mixed precision the stored weight is the fp32 master copy, of which the weights that ranks
compute with are a rounding. So a checkpoint does not depend on the precision either. It has no
random state: batches and dropout masks follow from seed and step. If the global batch changes, the
batches are those that a run with the new one would see from that step on.

Messages for checkpoints are no part of a step, and are not in the report's ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from paralab.checks import illegal
from paralab.interpret.pieces import Piece, pieces
from paralab.ranks.failure import Refused
from paralab.ranks.hangs import rank_names
from paralab.report import boxes, checkpoints


def _held(kept: Iterable[Piece]) -> dict[tuple[str, boxes.Sizes, boxes.Sizes], Tensor]:
    """{(name in the checkpoint, offsets, sizes): values} of each piece of state on this rank."""
    held = {}
    for piece in kept:
        tensors = dict(piece.state)
        tensors["weight"] = tensors.pop("master", piece.weight)
        for kind, values in tensors.items():
            if values.numel():
                box = (f"{kind}/{piece.name}", tuple(piece.offsets), tuple(values.shape))
                held[box] = values.detach()
    return held


# ---- saving -------------------------------------------------------------------------------------
@contextmanager
def saving(
    trainer: Any, folder: str | None, *, every: int | None, steps: int, **resumed: Any
) -> Iterator[Callable[[int], None]]:
    """Yields a function that every rank calls after each step with the number of this run's steps
    done, and that saves into ``folder`` when a checkpoint is due. Without a folder it does nothing.

    every    save when the steps of the whole training, earlier runs included, are a multiple of it
    steps    the steps of this run; a checkpoint is due after the last one in any case
    resumed  ``resume`` and ``newest``, as in `checkpoints.check_save`

    Rank 0 locks the folder against other runs until the block ends. Another run may have saved
    there and ended since the caller checked the folder, so rank 0 checks it again. Ranks on other
    machines must see what rank 0 writes there, as one checkpoint has the files of all ranks.
    """

    def save_if_due(done: int) -> None:
        step = trainer.first_step + done
        if folder is not None and (done == steps or (every and step % every == 0)):
            if locks and not still_locked():
                why = "the folder, or the file .lock in it, was removed while the training ran"
                raise OSError(f"cannot save the checkpoint of step {step} into {folder}: {why}")
            save(trainer, Path(folder), step=step)

    locks = folder is not None and dist.get_rank() == 0
    with ExitStack() as lock:
        try:
            if locks:
                still_locked = lock.enter_context(checkpoints.locked(Path(folder)))
                checkpoints.check_save(Path(folder), **resumed)
            if folder is not None and len(set(trainer.context.nodes)) > 1:
                trainer.grid.world.barrier(phase="setup")
                Path(folder).mkdir(parents=True, exist_ok=True)  # this asks a file server anew
                with NamedTemporaryFile(dir=folder, prefix=checkpoints.SCRATCH) as mark:
                    marks = _gathered(mark.name)  # new, so that no machine remembers it
                    sees = _gathered(Path(folder, Path(marks[0]).name).exists())
                if blind := [rank for rank, sees_it in enumerate(sees) if not sees_it]:
                    why = f"{rank_names(blind)} cannot see in it what rank 0 writes there"
                    raise illegal("save", folder, why, "a folder that all machines share")
        except ValueError as error:
            raise Refused(str(error)) from None
        yield save_if_due


def _gathered(mine: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    return by_rank


def save(trainer: Any, folder: Path, *, step: int) -> None:
    """Write the state after ``step`` steps into ``folder``; every rank calls this.

    Raises ``OSError`` on all ranks if one of them cannot write its file, and on rank 0, with which
    the job ends, if it cannot create or publish the folder. The previous checkpoint stays intact.
    """
    rank, unpublished = dist.get_rank(), checkpoints.scratch(folder, step)
    trainer.rank.settle()
    held = _held(pieces(trainer.state))

    try:
        if rank == 0:
            checkpoints.sweep(folder)
            unpublished.mkdir()
        shares = boxes.assigned(_gathered(list(held)))
        mine, file, facts, failure = shares[rank], boxes.file_of(rank), None, ""
        try:
            facts = boxes.write(unpublished / file, mine, (held[box[:3]].cpu() for box in mine))
        except OSError as error:
            size = boxes.ITEM * sum(prod(box.sizes) for box in mine) / 1e6
            failure = f"rank {rank}: {error}, in writing a file of {size:.3g} MB"
        files = _gathered((file, facts, failure))
        if failure := next((reason for *_, reason in files if reason), ""):
            raise OSError(failure)
        if rank == 0:
            model, optimizer = trainer.model, trainer.state.optimizer.name
            about = {
                "model": model.to_dict(),
                "plan": trainer.plan.to_dict(),
                "optimizer": optimizer,
                "lr": trainer.state.optimizer.lr,
                "seed": trainer.seed,
                "global_batch": trainer.plan.global_batch,
                "data": trainer.corpus.identity,
                "clip_norm": trainer.state.clip_norm,
                "step": step,
                "counters": trainer.state.counters(),
                "files": {name: facts for name, facts, _ in files},
                "tensors": boxes.index(checkpoints.shapes(model, optimizer), chain(*shares)),
            }
            checkpoints.publish(unpublished, about, step=step)
    except OSError as error:
        if rank == 0:
            with suppress(OSError):  # the unfinished files take up space that the disk may lack
                checkpoints.sweep(folder)
        raise OSError(
            f"cannot save the checkpoint of step {step} into {folder}: {error}; "
            "the checkpoints that were saved there before are complete"
        ) from error


# ---- resuming -----------------------------------------------------------------------------------
def load(trainer: Any, folder: str) -> None:
    """Give ``trainer`` the state stored in the checkpoint at ``folder``; every rank calls this.

    trainer  the `pieces` of its state are filled, then its `restored` is called, which recomputes
             whatever follows from them (rounded weights, gathered buffers)

    Raises ``Refused``, which reaches the caller of `pl.run` as a ``ValueError``, if a file is
    damaged.
    """
    try:
        checkpoint = checkpoints.find(folder)
        checkpoint.check_state(trainer.model, trainer.state.optimizer.name)
        for name in sorted(checkpoint.files)[dist.get_rank() :: dist.get_world_size()]:
            if checkpoints.facts(checkpoint.folder / name) != checkpoint.files[name]:
                why = "its content does not match its checksum"
                checkpoints.damaged(checkpoint.folder / name, why)
        with ExitStack() as opened:
            files: dict[str, Any] = {}
            for (name, offsets, sizes), values in _held(pieces(trainer.state)).items():
                for box in checkpoint.tensors[name].boxes:
                    if overlap := boxes.intersection(offsets, sizes, box):
                        if box.file not in files:
                            file = safe_open(checkpoint.folder / box.file, framework="pt")
                            files[box.file] = opened.enter_context(file)
                        here, there = overlap  # in ``values``, in the stored box
                        values[here].copy_(files[box.file].get_slice(box.key)[there])
    except (FileNotFoundError, ValueError) as error:  # newer checkpoints may have replaced it
        raise Refused(str(error)) from None
    trainer.restored(checkpoint.step, checkpoint.counters)
