"""The witness of predicted memory: a rank's storages, counted while its program runs.

`witness` lets one rank of a plan run a step on torch's "meta" device, whose tensors have sizes and
no bytes, without peers: a call is over at once. The ledger (instruments/ledger.py) counts storages
as operations make them, and knows nothing of names, sizes and lifetimes in the program, which is
what interpret/memory.py counts. `on_ranks` does the same on real ranks, with real tensors.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import paralab as pl


class Witness(NamedTuple):
    """What was alive on one rank in its first step.

    before   {category: bytes} when the step began
    between  the same behind every instruction
    tops     (bytes, {category: bytes}) at the fullest moment of every instruction
    """

    before: dict[str, int]
    between: list[dict[str, int]]
    tops: list[tuple[int, dict[str, int]]]

    @property
    def peak(self) -> int:
        return max(size for size, _ in self.tops)

    @property
    def where(self) -> int:
        """The instruction of the peak; of equal ones the first."""
        return max(range(len(self.tops)), key=lambda at: self.tops[at][0])


def witness(
    model: pl.ModelSpec,
    plan: pl.Plan,
    rank: int = 0,
    *,
    optimizer: str = "adamw",
    clip_norm: float | None = None,
) -> Witness:
    """Of one rank, without its peers; its host and its files hold nothing."""
    from dry_offload import dry_host
    from fake_tensors import DryLedger, alone

    n, nothing = plan.world_size, lambda *_: None
    context = SimpleNamespace(
        **{"rank": rank, "world_size": n, "nodes": (0,) * n, "device": "meta", "backend": "fake"},
        **{"strict": False, "store": None, "note": nothing, "progress": nothing},
    )
    _fused_sgd()
    with alone(model.attention), dry_host():
        return _step(context, model, plan, DryLedger, optimizer=optimizer, clip_norm=clip_norm)


@functools.cache
def _fused_sgd() -> Any:
    """torch has no fused SGD for tensors without values: one that makes none, as on others."""
    import torch

    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_fused_sgd_", lambda *args, **kwargs: None)
    return library


def on_ranks(model: pl.ModelSpec, plan: pl.Plan, **settings: Any) -> list[Witness]:
    """Of every rank, with its peers."""
    return pl.trace(_on_rank, ranks=plan.world_size, args=(model, plan, settings)).results


def _on_rank(group: Any, model: pl.ModelSpec, plan: pl.Plan, settings: dict) -> Witness:
    from paralab.instruments.ledger import Ledger

    return _step(group.context, model, plan, Ledger, **settings)


def _step(context: Any, model: pl.ModelSpec, plan: pl.Plan, kind: type, **settings: Any) -> Witness:
    """A step under a ledger that looks between instructions."""
    from paralab.instruments.recorder import Recorder
    from paralab.interpret.train import Trainer
    from paralab.programs.compile import compiled

    compiled(model, plan)  # looks into a block of one's own, on tensors of another kind

    class Watching(kind):
        top, then = 0, {}

        def _keep_peak(self) -> None:
            super()._keep_peak()
            self.look()

        def look(self) -> None:
            if self.live > self.top:
                self.top, self.then = self.live, self.bytes.copy()

        def mark(self) -> None:
            self.look()
            found = self.state()
            between.append(found)
            tops.append((self.top, self.then))
            self.top, self.then = sum(found.values()), found

    between: list[dict[str, int]] = []
    tops: list[tuple[int, dict[str, int]]] = []
    recorder = Recorder(rank=context.rank, world_size=context.world_size)
    with Watching(recorder, device=context.device) as ledger:
        trainer = Trainer(context, model, plan, recorder=recorder, **settings)
        rank = trainer.rank

        def marked(method: Any) -> Any:
            return lambda ins: (ledger.mark(), method(ins))

        end = SimpleNamespace(frees=())
        rank.steps = [(marked(method), ins, span) for method, ins, span in rank.steps]
        rank.steps.append((lambda ins: ledger.mark(), end, None))
        trainer.step(0)
    return Witness(between[0], between[1:], tops[1:])
