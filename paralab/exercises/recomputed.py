"""Lab 06: activation checkpointing, written as an autograd function in plain PyTorch.

A step with dropout and two micro-batches in flight is run three times: without checkpoints, with
torch.utils.checkpoint and with the answer. The answer's gradients have to equal the first's, its
memory may not exceed the second's by much (Chen+ 2016, arXiv:1604.06174: one more forward).
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable
from typing import Any

from paralab.exercises.diagnose import first_other_bits
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import reference, torch, watched
from paralab.exercises.questions import kind_of
from paralab.exercises.verdict import first
from paralab.spec import ModelSpec

MODEL = ModelSpec(layers=6, hidden=32, heads=2, seq_len=32, attention="explicit")
MICROBATCHES = 2
DROPOUT = 0.1
ALONE = {"layers": 1, "microbatches": 1}  # a step with a single call
SPOILED = "; with one block and one micro-batch all are equal, so one call spoils what another one "
SPOILED += "has kept or computed"
TWICE = "it is 2 times what is required"
MASKS = "; without dropout all are equal, so the dropout masks differ"
SPARE = 1.1  # factor on the peak with torch.utils.checkpoint
REQUIRED = {
    "gradients": "of one step: those without my_checkpoint, bit for bit",
    "generator": "random numbers drawn after the step: those without my_checkpoint",
    "forwards": "every block: exactly 2 per micro-batch",
    "peak memory": "tensors beyond the parameters: at most 10 % more than torch.utils.checkpoint",
}
GRADIENTS, GENERATOR, FORWARDS, MEMORY = REQUIRED


@exercise(Takes("my_checkpoint(block, x)"), required=REQUIRED)
def checkpoint(tries: Tries) -> None:
    for notes, outcome in tries.run(stepped, 1):
        right, yours, differences, bare, torchs = outcome.results[0]
        wrong = first_other_bits(yours["gradients"], right["gradients"])
        if wrong:
            without_dropout, alone = differences or (wrong, wrong)
            wrong += MASKS * (not without_dropout) + SPOILED * (not alone)
            if TWICE in alone and TWICE not in wrong:
                wrong += f"; with one block and one micro-batch {alone}, as if y.backward() added "
                wrong += "to p.grad and that were returned"
        notes.look(GRADIENTS, wrong, "all equal")
        same = (yours["after"] == right["after"]).all()
        wrong = "the program draws other numbers after the step than without my_checkpoint, which "
        wrong += "has changed the generator's state"
        notes.look(GENERATOR, "" if same else wrong, "as without it")
        required = 2 * MICROBATCHES
        twice = f"in forward and again in backward of each of {MICROBATCHES} micro-batches"
        wrong = first(
            f"block {block} runs {n} times in the step, required: {required}, {twice}"
            for block, n in enumerate(yours["calls"])
            if n != required
        )
        notes.look(FORWARDS, wrong, f"{required} in the step")
        limit = int(SPARE * torchs)
        how = "has {} bytes at its peak", f"; without checkpoints it has {bare:,}"
        notes.memory(MEMORY, [yours["peak"]], limit, *how, lambda _: "the step")


def stepped(watch: Any, answer: tuple, seed: int) -> tuple[dict, dict, list, int, int]:
    """What the rank runs. Returns the step without checkpoints and with the answer; if their
    gradients differ, how they do so without dropout, and in a step with a single call; and `peaks`.
    """
    with watch.unseen():
        known, right = peaks(), _step(without, seed, contextlib.nullcontext())
    yours = _step(answer[0], seed, watch.section())
    differences = []
    if first_other_bits(yours["gradients"], right["gradients"]):
        for how in ({"dropout": 0.0}, ALONE):
            with watch.unseen():
                both = (_step(f, seed, contextlib.nullcontext(), **how) for f in (*answer, without))
                differences.append(first_other_bits(*(one["gradients"] for one in both)))
    return right, yours, differences, *known


@functools.cache  # the same for every answer
def peaks() -> list[int]:
    """Bytes at the peak of a step without checkpoints, and with torch's."""
    return [_step(apply, 0, watched.PeakMemory())["peak"] for apply in (without, torchs_own)]


def without(block: Any, x: Any) -> Any:
    return block(x)


def torchs_own(block: Any, x: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def _step(
    apply: Callable[[Any, Any], Any], seed: int, measured: Any, dropout: float = DROPOUT, **one: int
) -> dict[str, Any]:
    """A step in which ``apply`` calls every block. measured: a context, whose ``peak`` is read.
    one: `ALONE`, for a step with a single call.
    """
    from torch import nn
    from torch.utils import checkpoint as torchs

    torch.manual_seed(seed)
    gpt, calls = reference.GPT(MODEL.replace(layers=one.get("layers", MODEL.layers))), []

    def ran(block: nn.Module, _: Any) -> None:
        files = {frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)}
        if apply is not torchs_own and torchs.__file__ in files:
            raise RuntimeError("torch.utils.checkpoint is called: write what it does")
        calls.append(block)

    class Through(nn.Module):
        """Calls a block through the answer, and records each of its runs."""

        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            block.register_forward_pre_hook(ran)
            self.block = nn.Sequential(block, nn.Dropout(dropout))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = apply(self.block, x)
            if not isinstance(y, torch.Tensor) or y.shape != x.shape:
                what = kind_of(y)
                if isinstance(y, torch.Tensor):
                    what = f"a tensor of shape {tuple(y.shape)}"
                legal = f"the block's output, of shape {tuple(x.shape)}"
                raise ValueError(f"my_checkpoint returns {what}, required: {legal}")
            return y

    blocks = list(gpt.blocks)
    gpt.blocks = nn.ModuleList(map(Through, blocks))
    data = reference.batches(MODEL, step=0, microbatches=one.get("microbatches", MICROBATCHES))
    with measured as section:
        losses = [gpt(*one) for one in data]  # both are in flight when backward begins
        while losses:  # in the order of the forwards, as in 1F1B
            losses.pop(0).backward()
    missing = [name for name, p in gpt.named_parameters() if p.grad is None]
    if missing:
        why = "what backward returns reaches only the arguments of forward"
        why = why if "blocks" in missing[0] else "none arrives at x"
        raise ValueError(f"after backward {missing[0]} has no gradient: {why}")
    named = reversed(list(gpt.named_parameters()))  # in the order of backward
    return {
        "gradients": {name: watched.array(p.grad) for name, p in named},
        "after": watched.array(torch.rand(8)),
        "calls": [calls.count(block) for block in blocks],
        "peak": getattr(section, "peak", 0),
    }
