"""What one block, the embedding and the head cost on one micro-batch: the bricks of a closed form.

All blocks of a model are alike, so a plan's step is a few such costs times a few counts. They come
from the very functions that the prediction adds up call by call: work from formulas.py (PTD-P,
Narayanan+ 2021, arXiv:2104.04473, eq. 3), what tensor parallelism sends from tensor.py (Shoeybi+
2019, arXiv:1909.08053, sec. 3), what stays for backward from activations.py (Korthikanti+
2022, arXiv:2205.05198, eq. 1 to 5). What a call of tensor parallelism does not hide behind the
product beside it is its exposed time. Units: seconds, bytes, elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from paralab.cluster import Cluster
from paralab.parallel.layouts import residual_shape
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan
from paralab.theory import memory, tensor
from paralab.theory.activations import part_activation_bytes, put_aside_bytes, recomputed_bytes
from paralab.theory.formulas import (
    ITEM,
    BackwardPart,
    Work,
    backward_halves,
    forward_pieces,
    recompute_work,
    total,
)
from paralab.theory.predict_rows import ALWAYS_FP32
from paralab.theory.traffic import wire_bytes

PARTS = ("embedding", "blocks.0", "head")


class PartCost(NamedTuple):
    """One part of the model on one micro-batch, on one tensor-parallel rank.

    forward, input, weight   seconds of work: forward, and the two halves of backward
    added                    of which what adds a gradient to that of an earlier micro-batch
    again                    seconds of work that recomputation does once more
    sent, sent_back          exposed seconds of tensor parallelism in forward and in backward
    sent_input               in an input half alone, where the weight half waits
    sent_again               in what is recomputed
    kept, again_bytes        bytes from forward to backward, and those that recomputation brings
    aside                    bytes from an input half to its weight half
    elements                 of the parameters
    """

    forward: float
    input: float
    weight: float
    added: float
    again: float
    sent: float
    sent_back: float
    sent_input: float
    sent_again: float
    kept: int
    again_bytes: int
    aside: int
    elements: int


class LayerCosts(NamedTuple):
    """The three parts, and what belongs to none of them.

    message           bytes of what goes from stage to stage
    token             elements of the embedding's rows for tokens, on one rank
    shared, shared_more  seconds, once per step, to add up what tp ranks share, with one block and
                      for each block more
    """

    embedding: PartCost
    block: PartCost
    head: PartCost
    message: int
    token: int
    shared: float
    shared_more: float


LAYOUT = ("tp", "tp_mode", "tp_depth", "sequence_parallel")  # how a plan cuts layers


class LayerBook:
    """The costs of ``model``'s layers on ``cluster``, whatever its depth; each worked out once."""

    def __init__(self, model: ModelSpec, cluster: Cluster) -> None:
        self.one, self.two = (model.replace(layers=n, frozen=()) for n in (1, 2))
        self.cluster = cluster
        self._made: dict[tuple, Any] = {}

    def costs(self, plan: Plan, *, inter: bool) -> LayerCosts:
        """Under the plan's tp, micro-batch, recompute and precision.

        inter  whether a tensor-parallel group crosses nodes: all its calls are then at that level
        """
        layout = tuple(getattr(plan, name) for name in LAYOUT)
        key = (*layout, plan.microbatch_size, plan.precision, inter)
        parts = self._once(("parts", *key), lambda: _Parts(self, plan, inter))
        shared = self._once(("shared", *layout, plan.precision, inter),
                            lambda: self._shared(plan, parts))  # fmt: skip
        again = parts.of(plan)
        return LayerCosts(*again, parts.message, parts.held["embedding.token.weight"], *shared)

    def held(self, plan: Plan) -> dict[str, int]:
        """Elements of every parameter of a model of one block that the first tp rank holds."""
        layout = {name: getattr(plan, name) for name in LAYOUT}
        return self._once(("held", *layout.values()),
                          lambda: memory.rank_sizes(self.one, Plan(**layout)))  # fmt: skip

    def group_size(self, plan: Plan, axis: str) -> int:
        key = (axis, plan.tp, plan.tp_mode, plan.tp_depth)
        return self._once(key, lambda: tensor.group_size(plan, axis))

    def _shared(self, plan: Plan, parts: _Parts) -> tuple[float, float]:
        plan = plan.replace(dp=1, pp=1, virtual_stages=1, zero_stage=0, shard=None, offload=None,
                            schedule="1f1b")  # fmt: skip
        one, two = (parts.comm(tensor.shared_calls(m, plan, 0, memory.rank_sizes(m, plan)))
                    for m in (self.one, self.two))  # fmt: skip
        return one, two - one

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class _Parts:
    """The parts of a model of one block, before it is known what is recomputed."""

    def __init__(self, book: LayerBook, plan: Plan, inter: bool) -> None:
        self.book, self.model, self.cluster = book, book.one, book.cluster
        self.plan = plan.replace(recompute="none", partition_activations=False)
        self.level = "inter" if inter else "intra"
        self.item, self.batch = BYTES_PER_ELEMENT[plan.precision], plan.microbatch_size
        tokens = self.batch * self.model.seq_len
        self.slower = 1 + self.cluster.half_rate_tokens / tokens  # of products, as in predict_rows
        self.calls = tensor.calls(self.model, plan)
        self.cut, self.held = tensor.share_of_work(plan), book.held(plan)
        self.message = self.item * math.prod(residual_shape(self.model, plan))
        forward = forward_pieces(self.model, self.batch, self.cut)
        first, later = (
            backward_halves(self.model, self.batch, accumulate=adding, cut=self.cut, held=self.held)
            for adding in (False, True)
        )
        self.plain = [
            self._part(name, forward[name], *([half for half in halves if half.part == name]
                                              for halves in (first, later)))
            for name in PARTS
        ]  # fmt: skip

    def seconds(self, work: Work) -> float:
        """Of work on the device, in the plan's precision."""
        flops, moved = work.flops * self.slower, work.bytes * self.item / ITEM
        return Work(flops, moved, work.kernels).seconds(self.cluster)

    def comm(self, calls: Iterable[tensor.Call]) -> float:
        """Of calls one after the other: alpha + wire bytes / bandwidth each (traffic.py), and what
        goes on more slowly after the wait.
        """
        found = 0.0
        for call in calls:
            item = 4 if call.phase in ALWAYS_FP32 else self.item
            n = self.book.group_size(self.plan, call.axis)
            sent = wire_bytes(call.op, item * call.elements, n, 0, n - 1 if call.root > 0 else 0)
            found += self.cluster.link(call.op, self.level).seconds(sent)
            found += self.cluster.wait_overhead
        return found

    def _part(
        self, name: str, forward: Sequence[tuple[str, Work]], first: Sequence[BackwardPart],
        later: Sequence[BackwardPart],
    ) -> PartCost:  # fmt: skip
        sent = sum(self.comm(self._of(layer).before + self._of(layer).after)
                   for layer, _ in forward)  # fmt: skip
        inputs = self.seconds(total(half.input for half in later))
        weights = self.seconds(total(half.weight for half in later))
        added = inputs + weights - self.seconds(total(half.whole for half in first))
        back = alone = 0.0
        for half in later:
            calls = self._of(half.layer)
            waited, beside = self.comm(calls.backward), self.comm(calls.beside)
            # A call that something hides is still posted, and waited for.
            posted = len(calls.beside) * self.cluster.call_overhead
            slower = len(calls.beside) * self.cluster.wait_overhead
            alone += waited + beside + posted
            back += waited + self.comm(calls.weight) + posted
            back += max(slower, beside - self.seconds(half.weight))
        return PartCost(
            forward=self.seconds(total(work for _, work in forward)), input=inputs, weight=weights,
            added=added, again=0.0, sent=sent, sent_back=back, sent_input=alone, sent_again=0.0,
            kept=part_activation_bytes(self.model, name, self.batch, **memory.asked(self.plan)),
            again_bytes=0,
            aside=put_aside_bytes(self.model, name, self.batch, self.plan.tp,
                                  self.plan.precision),
            elements=sum(n for key, n in self.held.items() if key.startswith(f"{name}.")),
        )  # fmt: skip

    def of(self, plan: Plan) -> tuple[PartCost, ...]:
        """The three parts, with what this plan recomputes of the block."""
        embedding, block, head = self.plain
        if plan.recompute == "none":
            return embedding, block, head
        work, sent = recompute_work(self.model, self.batch, plan.recompute, self.cut), 0.0
        if plan.recompute == "full":
            sent = block.sent + self.comm(tensor.partition_calls(self.model, plan))
        asked = memory.asked(plan)
        block = block._replace(
            again=self.seconds(work),
            sent_again=sent,
            kept=part_activation_bytes(self.model, "blocks.0", self.batch, **asked),
            again_bytes=recomputed_bytes(self.model, self.batch, **asked),
        )
        return embedding, block, head

    def _of(self, layer: str) -> tensor.Calls:
        return self.calls.get(layer, tensor.Calls())
