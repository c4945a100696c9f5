"""What a rank does in one step, in launch order: the counterpart of train.py and pipeline.py.

The plan's schedule says what is computed when, its lowered form (parallel/lowering.py) who sends
what to whom: the very lists that a run goes through. Every entry becomes an item of the event
engine, with its seconds (theory/formulas.py) or its bytes (theory/traffic.py), and a row of the
tables. A plan without a pipeline is a pipeline of one stage.

    forward, backward   the work of a stage's parts on one micro-batch
    send, receive       b s h elements, what goes from stage to stage or its gradient. A receive is
                        posted early and waited for where its action needs it, sends at the end
    data parallelism    three forms, which differ here in the same place as in
                        parallel/data_parallel.py: when the all-reduces leave, and who waits
    ZeRO                predict_zero.py, in place of data parallelism
    tied embedding      V h elements, summed over first and last stage, after data parallelism
    tensor parallelism  theory/tensor.py: what each layer sends, in forward and in backward, and the
                        share of the work that is left
    layer relay         the same part by part, predict_relay.py
    recomputation       a block's forward, or its attention's, once more before its backward
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from paralab.parallel.layouts import residual_shape
from paralab.parallel.lowering import Transfer, lower
from paralab.parallel.schedules import Action, relay
from paralab.spec import BYTES_PER_ELEMENT, Cluster, ModelSpec, Plan
from paralab.theory import memory, tensor
from paralab.theory.formulas import (
    ITEM,
    BackwardPart,
    Work,
    backward_halves,
    forward_pieces,
    optimizer_work,
    recompute_work,
)
from paralab.theory.gathering import parts_with_backward
from paralab.theory.offload import blocks_kept
from paralab.theory.predict_data_parallel import DataParallelRows
from paralab.theory.predict_offload import InputRows, OffloadRows
from paralab.theory.predict_rows import Pieces, RankRows, Row
from paralab.theory.predict_zero import ZeroRows

NOTHING = Work()
KIND = {"F": "forward", "B": "backward", "I": "backward", "W": "weight_grad"}


def step_rows(
    model: ModelSpec, plan: Plan, cluster: Cluster, *, rank: int, optimizer: str,
    steps: Sequence[Any] | None = None, marks: list[int] | None = None,
) -> list[Row]:  # fmt: skip
    """The rows of ``rank``, in launch order. steps: its lowered list; made here if not given.

    marks  gets where each of the steps begins, and at last where the rows after them do
    """
    pp_index = plan.place(rank)[0]
    steps = lower(plan.actions(), only=pp_index)[pp_index] if steps is None else steps
    mine = RankRows(model, plan, cluster, rank)
    away = plan.tiers is not None and plan.tiers.states
    if away:
        sync = OffloadRows(mine, optimizer=optimizer)
    else:
        sync = ZeroRows(mine) if plan.zero_stage else DataParallelRows(mine)
    inputs = InputRows(mine) if memory.offloaded_input(model, plan) else None
    held, counts = memory.stage_parts(model, plan, rank), memory.rank_sizes(model, plan, rank)
    costs = Costs(model, plan, {part for parts in held.values() for part in parts}, counts)
    if plan.relays:
        from paralab.theory.predict_relay import RelayStage

        steps = relay(len(held[0]), plan.microbatches)  # one after the other, and nobody to send to
        stages = dict.fromkeys(range(len(held[0])), RelayStage(costs, 0, held[0], inputs))
    else:
        stages = {s: Stage(costs, s, parts, inputs) for s, parts in held.items()}
    arriving: dict[tuple, int] = {}
    sent: list[int] = []
    pipeline = plan.ranks("pp", rank)
    activation = activation_bytes_sent(model, plan)
    marks = [] if marks is None else marks
    for step in steps:
        marks.append(len(mine.rows))
        if isinstance(step, Transfer):
            call = mine.launch(step.kind, activation, pipeline, "pp", "activations",
                               pipeline[step.peer])  # fmt: skip
            if step.kind == "send":
                sent.append(call)
            else:
                arriving[step.what, step.stage, step.microbatch] = call
        else:
            message = ("F" if step.kind == "F" else "B", step.stage, step.microbatch)
            if step.kind != "W" and message in arriving:
                mine.wait(arriving.pop(message))
            stages[step.stage].act(step, mine, sync)
    marks.append(len(mine.rows))
    mine.wait(*sent)
    mine.owed = 0.0  # they left long ago
    sync.finish()
    for call in tensor.shared_calls(model, plan, rank, counts):
        work = Work(0, ITEM * 2 * call.elements, 3)  # into one message, and back
        mine.compute(work, "copy")
        mine.wait(mine.call(call))
        mine.compute(work, "copy")
    ends = (pipeline[0], pipeline[-1])
    if model.tied and plan.stages > 1 and rank in ends:
        own = "embedding.token.weight" if rank == ends[0] else "head.output.weight"
        elements = counts[own]
        if plan.zero_stage:  # of the shard that either of them owns
            elements = -(-elements // plan.shard_degree)
        mine.wait(mine.launch("all_reduce", mine.item * elements, ends, "pp", "tied"))
    if away:
        sync.summed()
    if away and plan.tiers.optimizer != "device":
        sync.update()
    else:
        work = optimizer_work(model, optimizer=optimizer, parameters=sync.sizes,
                              mixed=plan.precision != "fp32")  # fmt: skip
        mine.compute(work, "optimizer")
    sync.updated()
    return mine.rows


def activation_bytes_sent(model: ModelSpec, plan: Plan) -> int:
    """Of a message from one pipeline stage to the next, or of the gradient that comes back."""
    return BYTES_PER_ELEMENT[plan.precision] * math.prod(residual_shape(model, plan))


class Costs:
    """What the stages of a rank have alike: what each layer costs and sends, and each part of these
    ``parts``; ``counts``: elements of the parameters that the rank holds.
    """

    def __init__(
        self, model: ModelSpec, plan: Plan, parts: Container[str], counts: Mapping[str, int]
    ) -> None:  # fmt: skip
        self.model, self.plan = model, plan
        batch, split = plan.microbatch_size, tensor.share_of_work(plan)
        self.forward = forward_pieces(model, batch, split)
        self.again = recompute_work(model, batch, plan.recompute, split)
        self.calls = tensor.calls(model, plan)
        # The first micro-batch's gradients are kept as they come, later ones' are added to them.
        self.halves = [
            backward_halves(model, batch, accumulate=adding, cut=split, held=counts, parts=parts)
            for adding in (False, True)
        ]


class Stage:
    """What the actions of one stage cost, part by part."""

    def __init__(
        self, costs: Costs, stage: int, parts: tuple[str, ...], inputs: InputRows | None
    ) -> None:  # fmt: skip
        self.model, self.plan, self.parts, self.inputs = costs.model, costs.plan, parts, inputs
        self.forward, self.again, self.calls = costs.forward, costs.again, costs.calls
        model = costs.model
        self.blocks = blocks_kept(model, {stage: parts})[stage]
        self.halves = [[p for p in halves if p.part in parts] for halves in costs.halves]
        if model.tied and "embedding" not in parts:  # its copy is a weight like any other
            self.halves = [[_with_copy(p) for p in halves] for halves in self.halves]
        if model.frozen:
            kept = parts_with_backward(model, {stage: parts})
            self.halves = [
                [_trained(model, p) for p in halves if p.part in kept] for halves in self.halves
            ]
        self.microbatches = costs.plan.microbatches
        self.done = {"I": 0, "W": 0}

    def act(self, action: Action, rank: RankRows, sync: DataParallelRows | ZeroRows) -> None:
        """Append the rows of one action, cut where something is copied, leaves or is awaited."""
        stage, kind, microbatch = action
        pieces = Pieces(rank, KIND[kind], microbatch, stage)
        if kind == "F":
            for at, part in enumerate(self.parts):
                sync.forward(self.parts, at, pieces)
                if self.inputs is not None and part in self.blocks:
                    self.inputs.leave(microbatch, part, pieces)
                self._forward(part, pieces)
                sync.leave(self.parts, at, pieces)
            pieces.cut()
            return
        halves = "IW" if kind == "B" else kind
        parts = self.halves[self.done[halves[0]] > 0]
        for half in halves:
            self.done[half] += 1
        last, at = self.done[halves[0]] == self.microbatches, None
        for part in parts:
            if part.part != at and "I" in halves:
                sync.backward(self.parts, self.parts.index(part.part), pieces)
                if part.part in self.blocks:
                    if self.inputs is not None:
                        below = self.blocks[: self.blocks.index(part.part) + 1][::-1]
                        self.inputs.come([(microbatch, block) for block in below], pieces)
                    self._again(part.part, pieces)
            at = part.part
            self._backward(part, halves, pieces)
            names = part.names * ("I" in halves) + part.weight_names * ("W" in halves)
            if last or sync.every:
                sync.complete(names, pieces)
        pieces.cut()

    def _forward(self, part: str, pieces: Pieces) -> None:
        for layer, work in self.forward[part]:
            calls = self.calls.get(layer, tensor.Calls())
            pieces.wait_for(calls.before)
            pieces.add(work)
            pieces.wait_for(calls.after)

    def _again(self, part: str, pieces: Pieces) -> None:
        """What recomputation does before a block's backward."""
        if self.plan.recompute == "full" and self.plan.tp > 1:
            pieces.wait_for(tensor.partition_calls(self.model, self.plan))
            self._forward(part, pieces)
        else:
            pieces.add(self.again)

    def _backward(self, part: BackwardPart, halves: str, pieces: Pieces) -> None:
        calls = self.calls.get(part.layer, tensor.Calls())
        beside: list[int] = []
        if "I" in halves:
            pieces.wait_for(calls.backward)
            pieces.add(part.input)
            beside = [pieces.launch(call) for call in calls.beside]
        if "W" in halves:
            pieces.add(part.weight)
            if part.weight != NOTHING:  # not of a frozen layer
                pieces.wait_for(calls.weight)
        for position in beside:
            pieces.cut()
            pieces.rank.wait(position)


def _with_copy(part: BackwardPart) -> BackwardPart:
    if part.part != "head" or part.names:
        return part
    return part._replace(weight_names=("head.output.weight",))


def _trained(model: ModelSpec, part: BackwardPart) -> BackwardPart:
    """Without the gradients of frozen parameters."""
    names, weight_names = (
        tuple(filter(model.trainable, some)) for some in (part.names, part.weight_names)
    )
    of = part.weight_names or ("embedding.token.weight",)  # a tied head's
    weight = part.weight if any(map(model.trainable, of)) else NOTHING
    return part._replace(names=names, weight_names=weight_names, weight=weight)
