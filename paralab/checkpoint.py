"""Saving a training and going on with it later, under the same plan or any other.

What a training is at a moment belongs to the model, not to the plan: every parameter, its AdamW
moments, how many steps have been done. So that is what a checkpoint holds, under the names of the
single-device model,

    weight/blocks.0.mlp.up.weight      exp_avg/...      exp_avg_sq/...

and a plan only says who writes, and later reads, which elements of it (`Piece`). Every rank writes
what it keeps and nobody ever holds all of it: 12 bytes per parameter in all with AdamW in fp32,
12/world_size on each rank, replicas taking turns. torch.distributed.checkpoint moves the bytes
(records/boxes.py); records/checkpoints.py makes a checkpoint appear all at once.

With mixed precision the stored weight is the fp32 master: what the ranks compute with is that,
rounded. So precision is not in the checkpoint either. Nor is randomness: batches and dropout masks
follow from seed and step. With another global batch, the batches are those that a run with it would
see from that step on.

The messages that this takes are no part of a step, and are not in the report's ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paralab.checks import illegal
from paralab.interpret.pieces import Piece
from paralab.parallel.layouts import whole_shape
from paralab.ranks.failure import Refused
from paralab.records import checkpoints


def _boxes(pieces: Sequence[Piece]) -> dict[str, list[tuple[tuple[int, ...], Tensor]]]:
    """{name in the checkpoint: [(offsets, values)]} of what a rank keeps."""
    found: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    for piece in pieces:
        tensors = dict(piece.state)
        tensors["weight"] = tensors.pop("master", piece.weight)
        for kind, values in tensors.items():
            found.setdefault(f"{kind}/{piece.name}", []).append((piece.offsets, values.detach()))
    return found


# ---- saving -------------------------------------------------------------------------------------
@contextmanager
def saving(
    trainer: Any, folder: str | None, *, every: int | None, steps: int
) -> Iterator[Callable[[int], None]]:
    """Yields what is to be called after every step with the number of steps done, on every rank.

    It saves into ``folder`` after ``every`` so many steps of the training, those of the run it was
    resumed from included, and after the last of this run's ``steps``. Does nothing without a
    folder. Rank 0 keeps other runs out of the folder for as long as the block runs.
    """

    def save_if_due(done: int) -> None:
        step = trainer.first_step + done
        if folder is not None and (done == steps or (every and step % every == 0)):
            save(trainer, Path(folder), step=step)

    first = folder is not None and dist.get_rank() == 0
    with checkpoints.locked(Path(folder)) if first else nullcontext():
        yield save_if_due


def save(trainer: Any, folder: Path, *, step: int) -> None:
    """Write the state after ``step`` steps into ``folder``; every rank calls this.

    Raises ``OSError`` on all ranks if one could not write: the checkpoint before is whole then.
    """
    import torch.distributed.checkpoint as dcp

    from paralab.records.boxes import SaveBoxes

    rank, written = dist.get_rank(), checkpoints.scratch(folder, step)
    trainer.settle()
    boxes = _boxes(trainer.pieces())
    shapes = {name: whole_shape(trainer.model, name.partition("/")[2]) for name in boxes}
    try:
        if rank == 0:
            checkpoints.sweep(folder)
        dist.barrier()
        dcp.save({}, storage_writer=dcp.FileSystemWriter(written),
                 planner=SaveBoxes(boxes, shapes))  # fmt: skip
        files: list[dict[str, tuple[int, int]]] = [{} for _ in range(dist.get_world_size())]
        mine = [f"__{rank}_0.distcp", *[".metadata"] * (rank == 0)]
        dist.all_gather_object(files, {name: checkpoints.facts(written / name) for name in mine})
        if rank == 0:
            about = {
                "model": trainer.model.to_dict(),
                "plan": trainer.plan.to_dict(),
                "optimizer": trainer.optimizer_name,
                "seed": trainer.seed,
                "step": step,
                "counters": trainer.counters(),
                "files": {name: facts for found in files for name, facts in found.items()},
            }
            checkpoints.publish(written, about, step=step)
    except (dcp.CheckpointException, OSError) as error:
        if rank == 0:
            checkpoints.sweep(folder)  # what there is of it takes the room that was missing
        raise OSError(f"cannot save the checkpoint of step {step} into {folder}: {_cause(error)}; "
                      "what was saved there before is whole") from error  # fmt: skip


# ---- resuming -----------------------------------------------------------------------------------
def load(trainer: Any, folder: str) -> None:
    """Give ``trainer`` the state that lies in ``folder``; every rank calls this.

    trainer  has `pieces`, which are filled, and `restored`, told of it: what follows from the
             pieces (rounded weights, gathered buffers) is its own business

    Raises ``Refused``, in the caller a ``ValueError``, naming the file that is damaged. Files of
    torch.distributed.checkpoint are unpickled: load none that you would not run.
    """
    import torch.distributed.checkpoint as dcp

    from paralab.records.boxes import LoadBoxes

    try:
        found = checkpoints.find(folder)
        for name in sorted(found.files)[dist.get_rank() :: dist.get_world_size()]:
            if checkpoints.facts(found.folder / name) != found.files[name]:
                checkpoints.damaged(found.folder / name, "its checksum does not fit")
        dcp.load({}, storage_reader=dcp.FileSystemReader(found.folder),
                 planner=LoadBoxes(_boxes(trainer.pieces())))  # fmt: skip
    except dcp.CheckpointException as error:
        raise Refused(str(illegal("resume", folder, f"cannot be read: {_cause(error)}",
                                  "another checkpoint"))) from error  # fmt: skip
    except ValueError as error:
        raise Refused(str(error)) from None
    trainer.restored(found.step, found.counters)


def _cause(error: BaseException) -> str:
    """What went wrong, and on which rank if DCP tells."""
    failures = getattr(error, "failures", None)
    if not failures:
        return str(error)
    rank, (cause, _) = next(iter(failures.items()))
    return f"rank {rank}: {cause}"
