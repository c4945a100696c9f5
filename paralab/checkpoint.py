"""Saving a training and going on with it later, under the same plan or any other.

What a training is at a moment belongs to the model, not to the plan: every parameter, its AdamW
moments, how many steps have been done. So that is what a checkpoint holds, under the names of the
single-device model,

    weight/blocks.0.mlp.up.weight      exp_avg/...      exp_avg_sq/...

and a plan only says which rank writes, and later reads, which elements of it (`Piece`). Every rank
writes one safetensors file of what it keeps, and no rank ever holds all of it: 12 bytes per
parameter in all with AdamW in fp32, 12/world_size on each rank, since of replicas one is written.
report/boxes.py says which; report/checkpoints.py makes a checkpoint appear all at once.

With mixed precision the stored weight is the fp32 master: what the ranks compute with is that,
rounded. So precision is not in the checkpoint either. Nor is randomness: batches and dropout masks
follow from seed and step. With another global batch, the batches are those that a run with it would
see from that step on.

The messages that this takes are no part of a step, and are not in the report's ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from paralab.interpret.pieces import Piece
from paralab.ranks.failure import Refused
from paralab.report import boxes, checkpoints


def _held(pieces: Sequence[Piece]) -> dict[tuple[str, boxes.Sizes, boxes.Sizes], Tensor]:
    """{(name in the checkpoint, offsets, sizes): values} of what a rank keeps."""
    found = {}
    for piece in pieces:
        tensors = dict(piece.state)
        tensors["weight"] = tensors.pop("master", piece.weight)
        for kind, values in tensors.items():
            if values.numel():
                box = (f"{kind}/{piece.name}", tuple(piece.offsets), tuple(values.shape))
                found[box] = values.detach()
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
    with ExitStack() as held:
        try:
            if first:
                held.enter_context(checkpoints.locked(Path(folder)))
        except ValueError as error:
            raise Refused(str(error)) from None
        yield save_if_due


def save(trainer: Any, folder: Path, *, step: int) -> None:
    """Write the state after ``step`` steps into ``folder``; every rank calls this.

    Raises ``OSError`` on all ranks if one could not write; if rank 0 cannot make or publish the
    folder, on rank 0, and the job ends with it. The checkpoint before is whole then.
    """
    rank, written = dist.get_rank(), checkpoints.scratch(folder, step)
    trainer.settle()
    held = _held(trainer.pieces())

    def everyones(mine: Any) -> list[Any]:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        return found

    try:
        if rank == 0:
            checkpoints.sweep(folder)
            written.mkdir()
        shares = boxes.assigned(everyones(list(held)))
        mine, file, wrote, failed = shares[rank], boxes.file_of(rank), None, ""
        try:
            wrote = boxes.write(written / file, mine, (held[box[:3]].cpu() for box in mine))
        except OSError as error:
            failed = f"rank {rank}: {error}"
        files = everyones((file, wrote, failed))
        if failed := next((said for *_, said in files if said), ""):
            raise OSError(failed)
        if rank == 0:
            model, optimizer = trainer.model, trainer.optimizer_name
            about = {
                "model": model.to_dict(),
                "plan": trainer.plan.to_dict(),
                "optimizer": optimizer,
                "lr": trainer.state.optimizer.lr,
                "seed": trainer.seed,
                "global_batch": trainer.plan.global_batch,
                "data": trainer.corpus.identity,
                "clip_norm": trainer.clip_norm,
                "step": step,
                "counters": trainer.counters(),
                "files": {name: facts for name, facts, _ in files},
                "tensors": boxes.index(checkpoints.shapes(model, optimizer), chain(*shares)),
            }
            checkpoints.publish(written, about, step=step)
    except OSError as error:
        if rank == 0:
            checkpoints.sweep(folder)  # what there is of it takes the room that was missing
        raise OSError(
            f"cannot save the checkpoint of step {step} into {folder}: {error}; "
            "what was saved there before is whole"
        ) from error


# ---- resuming -----------------------------------------------------------------------------------
def load(trainer: Any, folder: str) -> None:
    """Give ``trainer`` the state that is stored in ``folder``; every rank calls this.

    trainer  has `pieces`, which are filled, and `restored`, told of it: what follows from the
             pieces (rounded weights, gathered buffers) is its own business

    Raises ``Refused``, in the caller a ``ValueError``, naming the file that is damaged.
    """
    try:
        found = checkpoints.find(folder)
        found.check_state(trainer.model, trainer.optimizer_name)
        for name in sorted(found.files)[dist.get_rank() :: dist.get_world_size()]:
            if checkpoints.facts(found.folder / name) != found.files[name]:
                checkpoints.damaged(found.folder / name, "its checksum does not fit")
    except ValueError as error:
        raise Refused(str(error)) from None
    with ExitStack() as opened:
        files: dict[str, Any] = {}
        for (name, offsets, sizes), values in _held(trainer.pieces()).items():
            for box in found.tensors[name].boxes:
                if both := boxes.intersection(offsets, sizes, box):
                    if box.file not in files:
                        file = safe_open(found.folder / box.file, framework="pt")
                        files[box.file] = opened.enter_context(file)
                    values[both[0]].copy_(files[box.file].get_slice(box.key)[both[1]])
    trainer.restored(found.step, found.counters)
