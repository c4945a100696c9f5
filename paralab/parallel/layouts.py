"""Who holds which block under tensor parallelism: weights, activations, groups. Torch-free.

The tp ranks of a group stand on a grid, and every dimension of every tensor is either whole on each
of them or sharded in equal parts over some of the grid's coordinates. One table per mode says all
there is to say; training, prediction, checkpoints and pictures read it.

    mode   grid                coordinates
    1d     tp                  t
    2d     q x q               i (row), j (column)
    2.5d   d x q x q           z (depth), i, j
    3d     q x q x q           i, j, k

and for a product Y = X W, with X (M, K) of M = b s token rows and W (K, N):

    mode            X: M, K       W: K, N       Y: M, N       who has the same block of W
    1d column       -, -          -, t          -, t          no rank
    1d row          -, t          t, -          -, -          no rank
    2d              i, j          i, j          i, j          no rank
    2.5d            (z,i), j      i, j          (z,i), j      the ranks along z
    3d, and next    (i,j), k      k, (j,i)      (i,k), j      no rank; j and k have changed places
    3d, back again  (i,k), j      j, (k,i)      (i,j), k      no rank

"(j,i)" is sharded over j, and each part of it over i. Sequence parallelism cuts the residual
stream of "1d", between row and column, into t parts of s.

1D: Megatron-LM (Shoeybi+ 2019, arXiv:1909.08053, sec. 3), sequence parallel Korthikanti+ 2022
(arXiv:2205.05198, sec. 4.2). 2D: Xu+ 2021 (Optimus, arXiv:2104.05343) after SUMMA (van de Geijn &
Watts 1997). 2.5D: Wang+ 2021 (Tesseract, arXiv:2105.14500). 3D: Bian+ 2021 (arXiv:2105.14450),
after Agarwal+ 1995.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from paralab.spec.model import TIED, ModelSpec

Split = tuple[str, ...]  # coordinates that a dimension is sharded over, slowest first; (): whole
Box = tuple[slice, ...]  # one range per dimension of the whole tensor


class TensorPlan(Protocol):
    """What a layout asks of a plan, which is a `spec.Plan`: the settings of tensor parallelism."""

    tp: int
    tp_mode: str
    sequence_parallel: bool
    microbatch_size: int

    @property
    def tp_grid(self) -> tuple[int, int]: ...


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The table of one mode: splits by kind of tensor, dimension by dimension.

    coordinates  of the grid, slowest first
    axes         {name of a group: coordinates that vary in it}
    weights      {kind of parameter: splits of its dimensions}
    residual     (b, s, h): the residual stream
    scores       (b, a, s, s): the attention's; its heads and samples are local
    logits       (b, s, V)
    copies       {kind: axis over which ranks hold the same}
    partial      kinds whose gradients are partial sums, to be added up over that axis
    """

    coordinates: tuple[str, ...]
    axes: Mapping[str, Split]
    weights: Mapping[str, tuple[Split, ...]]
    residual: tuple[Split, ...]
    scores: tuple[Split, ...]
    logits: tuple[Split, ...]
    copies: Mapping[str, str]
    partial: frozenset[str]


def _weights(
    *,
    token: tuple,
    position: tuple,
    norm: Split,
    inward: tuple[Split, Split],
    outward: tuple[Split, Split],
    biases: tuple[Split, Split],
) -> dict:
    """inward: (out, in) of the weights that leave the residual stream, qkv and up; outward: of
    those that lead back, proj and down; biases: of either. qkv has its three parts in front.
    """
    return {
        "token": token,
        "output": token,
        "position": position,
        "norm": (norm,),
        "qkv": ((), *inward),
        "qkv bias": ((), biases[0]),
        "up": inward,
        "up bias": biases[:1],
        "proj": outward,
        "proj bias": biases[1:],
        "down": outward,
        "down bias": biases[1:],
    }


@lru_cache
def _one_d(sequence_parallel: bool) -> Mode:
    t: Split = ("t",)
    s = t if sequence_parallel else ()
    whole = ("norm", "proj bias", "down bias", *(() if sequence_parallel else ("position",)))
    return Mode(
        coordinates=t,
        axes={"tp": t},
        weights=_weights(
            token=(t, ()),
            position=(s, ()),
            norm=(),
            inward=(t, ()),
            outward=((), t),
            biases=(t, ()),
        ),
        residual=((), s, ()),
        scores=((), t, (), ()),
        logits=((), (), t),
        copies=dict.fromkeys(whole, "tp"),
        # A norm on a part of the sequence sees a part of its gradient. A row's bias is added there
        # too, but its gradient is taken where the whole sequence is gathered for the weight's.
        partial=frozenset(("norm",) if sequence_parallel else ()),
    )


def _two_d(depth: bool) -> Mode:
    z: Split = ("z",) if depth else ()
    i, j, rows = ("i",), ("j",), (*z, "i")
    axes = {"tp": (*rows, "j"), "tp:row": j, "tp:col": i}
    tokens = "tp:tokens" if depth else "tp:col"
    copies = dict.fromkeys(
        ("position", "norm", "qkv bias", "up bias", "proj bias", "down bias"), tokens
    )
    if depth:
        axes |= {"tp:depth": z, "tp:tokens": rows}
        copies |= dict.fromkeys(("token", "output", "qkv", "up", "proj", "down"), "tp:depth")
    return Mode(
        coordinates=axes["tp"],
        axes=axes,
        weights=_weights(
            token=(i, j), position=((), j), norm=j, inward=(j, i), outward=(j, i), biases=(j, j)
        ),
        residual=(rows, (), j),
        scores=(rows, j, (), ()),
        logits=(rows, (), j),
        copies=copies,
        partial=frozenset(copies),
    )


def _three_d() -> Mode:
    j, k = ("j",), ("k",)
    copies = dict.fromkeys(("position", "norm", "proj bias", "down bias"), "tp:ij")
    copies |= dict.fromkeys(("qkv bias", "up bias"), "tp:ik")
    return Mode(
        coordinates=("i", "j", "k"),
        axes={
            "tp": ("i", "j", "k"),
            "tp:i": ("i",),
            "tp:j": j,
            "tp:k": k,
            "tp:ij": ("i", "j"),
            "tp:ik": ("i", "k"),
        },
        weights=_weights(
            token=(("j", "i"), k),
            position=((), k),
            norm=k,
            inward=(("j", "i"), k),
            outward=(("k", "i"), j),
            biases=(j, k),
        ),
        residual=(("i", "j"), (), k),
        scores=(("i", "k"), j, (), ()),
        logits=(("i", "k"), (), j),
        copies=copies,
        partial=frozenset(copies),
    )


MODES = {"2d": _two_d(False), "2.5d": _two_d(True), "3d": _three_d()}


def mode_of(plan: TensorPlan) -> Mode:
    """The table of the plan's mode."""
    return MODES.get(plan.tp_mode) or _one_d(plan.sequence_parallel)


# The phase of a sum over the ranks of ``copies``: where they share whole matrices (2.5D), it is
# part of these layers' traffic; else it is "shared".
SHARED_PHASE = {
    **dict.fromkeys(("qkv", "proj", "up", "down"), "linear_backward"),
    **dict.fromkeys(("token", "output"), "embedding_backward"),
}


# ---- the grid -----------------------------------------------------------------------------------
def extents(plan: TensorPlan) -> dict[str, int]:
    """{coordinate: how many there are}. Raises ValueError where tp makes no such grid."""
    if plan.tp_mode == "1d":
        return {"t": plan.tp}
    q, depth = plan.tp_grid
    sizes = {"z": depth, "i": q, "j": q, "k": q}
    return {name: sizes[name] for name in mode_of(plan).coordinates}


def coordinates(plan: TensorPlan, index: int) -> dict[str, int]:
    """Where rank number ``index`` of a tp group stands."""
    sizes, place = extents(plan), {}
    for name in reversed(sizes):
        index, place[name] = divmod(index, sizes[name])
    return {name: place[name] for name in sizes}


def groups(plan: TensorPlan, axis: str) -> list[tuple[int, ...]]:
    """The groups of one axis that the ranks of a tp group fall into, each in order."""
    varying, found = mode_of(plan).axes[axis], defaultdict(list)
    places = [coordinates(plan, index) for index in range(plan.tp)]
    for index in sorted(range(plan.tp), key=lambda r: [places[r][name] for name in varying]):
        fixed = tuple(at for name, at in places[index].items() if name not in varying)
        found[fixed].append(index)
    return [tuple(found[fixed]) for fixed in sorted(found)]


def axis_of(plan: TensorPlan, split: Split) -> str:
    """The axis of the ranks that have the other parts of a dimension that is sharded like that;
    "": this rank has all of it.
    """
    axes = mode_of(plan).axes.items()
    return next((name for name, varying in axes if plan.tp > 1 and {*varying} == {*split}), "")


# ---- blocks -------------------------------------------------------------------------------------
class Holding(NamedTuple):
    """What one rank holds of a parameter.

    whole    shape of the whole parameter, qkv's three parts as a dimension of their own
    box      the rank's ranges of it
    shape    of the rank's own tensor, qkv's parts put together again
    copies   axis over which it is replicated; "": it is not
    partial  the gradient is a partial sum, to be added up over ``copies``
    """

    whole: tuple[int, ...]
    box: Box
    shape: tuple[int, ...]
    copies: str
    partial: bool


def kind_of(name: str) -> str:
    """What sort of parameter it is: a key of ``Mode.weights``."""
    *_, layer, leaf = name.split(".")
    if layer.startswith("norm"):
        return "norm"
    return f"{layer} bias" if leaf == "bias" else layer


@lru_cache(maxsize=16)
def _shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The model's parameters: asked for one by one, and thousands in a large model."""
    return model.parameter_shapes()


def whole_shape(model: ModelSpec, name: str) -> tuple[int, ...]:
    """Shape of a whole parameter, with qkv's three parts as a dimension of their own."""
    if name == TIED[1]:  # also a tied head's copy of the embedding, which has no row
        return (model.vocab, model.hidden)
    shape = _shapes(model)[name]
    if model.block is not None and name.startswith("blocks."):
        return shape
    return (3, shape[0] // 3, *shape[1:]) if kind_of(name).startswith("qkv") else shape


def _range(length: int, split: Split, at: Mapping[str, int], sizes: Mapping[str, int]) -> slice:
    """The part of a dimension of ``length`` that the rank at coordinates ``at`` holds."""
    parts, index = 1, 0
    for name in split:
        parts, index = parts * sizes[name], index * sizes[name] + at[name]
    return slice(index * length // parts, (index + 1) * length // parts)


def box(whole: tuple[int, ...], splits: tuple[Split, ...], plan: TensorPlan, index: int) -> Box:
    """Rank number ``index``'s ranges of a tensor whose dimensions are sharded like that."""
    at, sizes = coordinates(plan, index), extents(plan)
    return tuple(_range(n, split, at, sizes) for n, split in zip(whole, splits, strict=True))


def box_shape(found: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in found)


@lru_cache(maxsize=1024)
def holding(model: ModelSpec, plan: TensorPlan, name: str, index: int) -> Holding:
    """What rank number ``index`` of a tp group holds of the parameter called ``name``."""
    mode, kind, whole = mode_of(plan), kind_of(name), whole_shape(model, name)
    if model.block is not None and name.startswith("blocks."):  # one device has all of it
        return Holding(whole, tuple(slice(0, n) for n in whole), whole, "", False)
    mine = box(whole, mode.weights[kind], plan, index)
    shape = box_shape(mine)
    if kind.startswith("qkv"):
        shape = (shape[0] * shape[1], *shape[2:])
    return Holding(whole, mine, shape, mode.copies.get(kind, ""), kind in mode.partial)


def activation_box(model: ModelSpec, plan: TensorPlan, what: str, index: int) -> Box:
    """Ranges of one micro-batch's "residual" (b, s, h), "scores" (b, a, s, s) or "logits"
    (b, s, V) that are local to rank number ``index`` of a tp group.
    """
    batch, s = plan.microbatch_size, model.seq_len
    whole = {
        "residual": (batch, s, model.hidden),
        "scores": (batch, model.heads, s, s),
        "logits": (batch, s, model.vocab),
    }[what]
    return box(whole, getattr(mode_of(plan), what), plan, index)


def looked_up(plan: TensorPlan, index: int) -> slice:
    """Samples of a micro-batch whose tokens rank number ``index`` looks up in its part of the
    embedding: in "2.5d" those of its grid, else all.
    """
    count = plan.microbatch_size // extents(plan).get("z", 1)
    grid = coordinates(plan, index).get("z", 0)
    return slice(grid * count, (grid + 1) * count)


def loss_parts(plan: TensorPlan) -> int:
    """Into how many parts the tokens of a micro-batch fall, each with a loss of its own."""
    sizes = extents(plan)
    return math.prod(sizes[name] for name in mode_of(plan).logits[0])


def says_loss(plan: TensorPlan, index: int) -> bool:
    """Whether rank number ``index`` is the one of its part of the tokens to report the loss."""
    at = coordinates(plan, index)
    return not any(at[name] for name in mode_of(plan).logits[2])
