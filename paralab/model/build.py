"""From a `ModelSpec` and a `Plan` to one tensor-parallel rank's list of ops. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from paralab.model import grid_ops, ops
from paralab.model.custom import Custom
from paralab.model.ops import Attention, Op
from paralab.model.part import Part
from paralab.parallel.layouts import holding, loss_parts
from paralab.spec import TIED, ModelSpec, Plan


@dataclass(frozen=True, eq=False)
class Model:
    """The ops of one tensor-parallel rank, for all stages of the pipeline.

    ops     in the order of forward
    parts   (name, first op, past the last op) of "embedding", "blocks.0" ... and "head"
    tokens  of a micro-batch that this rank holds in the residual stream
    width   features of the residual stream on this rank
    item    bytes of an activation's element
    """

    ops: tuple[Op, ...]
    parts: tuple[tuple[str, int, int], ...]
    tokens: int
    width: int
    item: int

    @cached_property
    def inside(self) -> dict[int, int]:
        """{boundary between ops inside a branch: the op that opened the branch}."""
        opened_by: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            if op.forks:
                opened_by[index + 1] = index
            elif index in opened_by and not op.joins:
                opened_by[index + 1] = opened_by[index]
        return opened_by

    @cached_property
    def offset(self) -> dict[int, int]:
        """{op of a block: how many ops it comes after the same op of the first block}."""
        blocks = [(i, j) for name, i, j in self.parts if name.startswith("blocks")]
        return {op: i - blocks[0][0] for i, j in blocks for op in range(i, j)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{full name: shape} of every parameter that an op owns, in order of the ops."""
        return {name: op.params[local] for op in self.ops for local, name in op.owned.items()}

    @cached_property
    def owner(self) -> dict[str, int]:
        """{full name of a parameter: index of the op that owns it}."""
        return {name: index for index, op in enumerate(self.ops) for name in op.owned.values()}

    @cached_property
    def numels(self) -> dict[str, dict[str, int]]:
        """{part of the model: {full name: elements}} of these parameters, in the same order."""
        return {
            part: {n: math.prod(self.shapes[n]) for op in self.ops[i:j] for n in op.owned.values()}
            for part, i, j in self.parts
        }

    @cached_property
    def of_op(self) -> tuple[tuple[str, ...], ...]:
        """Per op, the full names of the parameters to whose gradients its weight half adds."""
        return tuple((*op.owned.values(), *op.borrows.values()) for op in self.ops)

    @cached_property
    def read_by(self) -> tuple[tuple[str, ...], ...]:
        """Per op, the full names of the parameters that it reads."""
        return tuple(
            (*names, *op.reads.values()) for op, names in zip(self.ops, self.of_op, strict=True)
        )


SETTINGS_OF_OPS = (
    *("tp", "tp_mode", "tp_depth", "sequence_parallel", "microbatch_size"),
    *("precision", "grad_dtype"),
)


def plan_of_ops(plan: Plan) -> Plan:
    """The plan reduced to the settings that ops depend on; plans equal in these share their ops."""
    return Plan(**{name: getattr(plan, name) for name in SETTINGS_OF_OPS})


def build(spec: ModelSpec, plan: Plan) -> Model:
    """The ops of one tensor-parallel rank for all stages, with the shapes of the rank's own blocks.
    A tied head borrows the embedding's weight, except in a pipeline, whose last stage has a copy.
    """
    return _built(spec, plan_of_ops(plan), spec.tied and plan.pp == 1)


@lru_cache(maxsize=64)
def _built(spec: ModelSpec, plan: Plan, borrows: bool) -> Model:
    return _Builder(spec, plan, borrows).model()


class _Builder:
    """Builds the ops part by part. borrows: whether the head has no weight of its own and borrows
    the embedding's.
    """

    def __init__(self, spec: ModelSpec, plan: Plan, borrows: bool) -> None:
        self.spec, self.plan, self.part, self.borrows = spec, plan, Part(spec, plan), borrows
        # In 1D the messages around a pair of layers are ops, and the bias is added after the sum.
        # The layers of a grid (2D, 2.5D, 3D) send their messages themselves, and add their biases.
        self.is_1d = plan.tp > 1 and plan.tp_mode == "1d"
        self.is_grid = plan.tp > 1 and plan.tp_mode != "1d"

    def shape(self, name: str) -> tuple[int, ...]:
        return holding(self.spec, self.plan, name, 0).shape

    def model(self) -> Model:
        made, parts = self.embedding(), []
        parts.append(("embedding", 0, len(made)))
        for name in (*(f"blocks.{i}" for i in range(self.spec.layers)), "head"):
            begin = len(made)
            made += self.head() if name == "head" else self.block(name)
            parts.append((name, begin, len(made)))
        part = self.part
        return Model(tuple(made), tuple(parts), part.tokens, part.width, part.item)

    def embedding(self) -> list[Op]:
        return [
            ops.Tokens("embedding.token", self.part, self.shape(TIED[0])),
            *self.leave("embedding.sum"),
            ops.Positions("embedding.position", self.part, self.shape("embedding.position.weight")),
        ]

    def block(self, at: str) -> list[Op]:
        if self.spec.block is not None:
            return [Custom(at, self.spec, self.plan.microbatch_size, self.plan.precision)]
        attention = ops.FusedAttention if self.spec.attention == "sdpa" else Attention
        features = self.shape(f"{at}.mlp.up.bias")[0]
        return [
            self.norm(f"{at}.norm1"),
            *self.enter(f"{at}.attention.enter"),
            self.linear(f"{at}.attention.qkv", column=True),
            attention(f"{at}.attention.core", self.part),
            *self.close(f"{at}.attention", "proj"),
            self.norm(f"{at}.norm2"),
            *self.enter(f"{at}.mlp.enter"),
            self.linear(f"{at}.mlp.up", column=True),
            ops.Gelu(f"{at}.mlp.gelu", self.part.inner * features),
            *self.close(f"{at}.mlp", "down"),
        ]

    def close(self, at: str, layer: str) -> list[Op]:
        """A branch's last layer, the sum over ranks, and the residual addition."""
        return [
            self.linear(f"{at}.{layer}", column=False),
            *self.leave(f"{at}.leave"),
            ops.Add(f"{at}.add", self.part, f"{at}.{layer}.bias" if self.is_1d else ""),
        ]

    def head(self) -> list[Op]:
        output = self.linear("head.output", column=True, bias=False)
        if self.borrows:
            output.params, output.borrows = {}, {"weight": TIED[0]}
        norm = self.norm("head.norm", forks=False)
        return [norm, *self.enter("head.enter"), output, ops.Loss("head.loss", self.part)]

    def norm(self, name: str, *, forks: bool = True) -> Op:
        kind = grid_ops.SplitNorm if self.is_grid else ops.Norm
        return kind(name, self.part, forks=forks)

    def linear(self, name: str, *, column: bool, bias: bool = True) -> Op:
        weight, part = self.shape(f"{name}.weight"), self.part
        if not self.is_grid:
            gathers, late = self.plan.sequence_parallel and column, self.is_1d and not column
            return ops.Linear(name, part, weight, bias=bias, late_bias=late, regathers=gathers)
        if self.plan.tp_mode == "3d":
            along = grid_ops.INWARD if column else grid_ops.OUTWARD
            thirds = 3 if name.endswith("qkv") else 1
            return grid_ops.Linear3D(name, part, weight, along, thirds=thirds, bias=bias)
        kind = grid_ops.Linear2D if bias else grid_ops.Logits2D
        return kind(name, part, weight, bias=bias)

    def enter(self, name: str) -> list[Op]:
        """f or f-bar, in front of a pair of layers; nothing without 1D tensor parallelism."""
        message = ops.F_BAR if self.plan.sequence_parallel else ops.F
        return [ops.Collective(name, message, self.part.inner * self.part.width)] * self.is_1d

    def leave(self, name: str) -> list[Op]:
        """g or g-bar, behind a pair of layers; nothing without tensor parallelism. On a grid only
        the embedding is followed by an op that sums over ranks.
        """
        if self.is_grid:
            return [grid_ops.Scatter(name, self.part)] * name.startswith("embedding")
        message = ops.G_BAR if self.plan.sequence_parallel else ops.G
        return [ops.Collective(name, message, self.part.tokens * self.part.width)] * self.is_1d


def loss_share(plan: Plan) -> float:
    """The weight of one rank's micro-batch loss in the mean over the global batch."""
    return 1.0 / (plan.microbatches * plan.dp * loss_parts(plan))
