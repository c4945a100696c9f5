"""Which rank holds which block under tensor parallelism: weights, activations, groups. Torch-free.

The tp ranks of a group form a grid. Every dimension of every tensor is either whole on each of them
or sharded in equal parts over some of the grid's coordinates. One table per mode, `Mode`, states
all of it; training, prediction, checkpoints and pictures read the table.

    mode   grid                coordinates
    1d     tp                  t
    2d     q x q               i (row), j (column)
    2.5d   d x q x q           z (depth), i, j
    3d     q x q x q           i, j, k

and for a product Y = X W, with X (M, K) of M = b s token rows and W (K, N):

    mode            X: M, K       W: K, N       Y: M, N       ranks with the same block of W
    1d column       -, -          -, t          -, t          no rank
    1d row          -, t          t, -          -, -          no rank
    2d              i, j          i, j          i, j          no rank
    2.5d            (z,i), j      i, j          (z,i), j      the ranks along z
    3d, first       (i,j), k      k, (j,i)      (i,k), j      no rank; in Y j and k are swapped
    3d, second      (i,k), j      j, (k,i)      (i,j), k      no rank; and swapped back

"(j,i)" is sharded over j, and each of these parts over i. With sequence parallelism the residual
stream of "1d", between a row and a column layer, is sharded into t parts along s.

1D: Megatron-LM (Shoeybi+ 2019, arXiv:1909.08053, sec. 3), sequence parallel Korthikanti+ 2022
(arXiv:2205.05198, sec. 4.2). 2D: Xu+ 2021 (Optimus, arXiv:2104.05343) after SUMMA (van de Geijn &
Watts 1997). 2.5D: Wang+ 2021 (Tesseract, arXiv:2105.14500). 3D: Bian+ 2021 (arXiv:2105.14450),
after Agarwal+ 1995.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from paralab.spec.model import TIED, ModelSpec

Split = str  # coordinates that a dimension is sharded over, slowest first: "ji"; "": whole
Box = tuple[slice, ...]  # one range per dimension of the whole tensor
# A `spec.Plan`, of which tp, tp_mode, tp_grid, sequence_parallel and microbatch_size are read.
TensorPlan = Any


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The table of one mode: for each kind of tensor the coordinates that shard its dimensions.

    axes         {name of a group of ranks: the coordinates that vary within it}; in "tp" all do
    weights      {kind of parameter, see `kind_of`: the split of each dimension}. Weights are (out,
                 in); qkv's has its three parts as one more dimension in front
    residual     splits of the residual stream (b, s, h)
    scores       splits of the attention scores (b, a, s, s); each rank has whole heads and samples
    logits       splits of the logits (b, s, V)
    copies       {kind of parameter: axis whose ranks hold the same block}
    partial      kinds of ``copies`` whose gradients are partial sums, to be summed over that axis
    """

    axes: Mapping[str, Split]
    weights: Mapping[str, tuple[Split, ...]]
    residual: tuple[Split, ...]
    scores: tuple[Split, ...]
    logits: tuple[Split, ...]
    copies: Mapping[str, str]
    partial: frozenset[str]


# {layer: kind of its weight}, where the two have different names. Layers alike share a kind: those
# that lead from the residual stream into a branch, and those that lead back.
KINDS = {
    "output": "token",
    **dict.fromkeys(("norm1", "norm2"), "norm"),
    **dict.fromkeys(("qkv", "up"), "inward"),
    **dict.fromkeys(("proj", "down"), "outward"),
}


@lru_cache
def _one_d(sequence_parallel: bool) -> Mode:
    s, positions = ("t", ()) if sequence_parallel else ("", ("position",))
    return Mode(
        axes={"tp": "t"},
        weights={
            "token": ("t", ""),
            "position": (s, ""),
            "norm": ("",),
            "inward": ("t", ""),
            "inward bias": ("t",),
            "outward": ("", "t"),
            "outward bias": ("",),
        },
        residual=("", s, ""),
        scores=("", "t", "", ""),
        logits=("", "", "t"),
        copies=dict.fromkeys(("norm", "outward bias", *positions), "tp"),
        # A norm on a part of the sequence has a partial gradient. The bias of a row-parallel layer
        # is added there too, but its gradient is computed from the whole sequence, which backward
        # gathers for the weight's gradient.
        partial=frozenset(("norm",) if sequence_parallel else ()),
    )


def _two_d(z: str) -> Mode:
    """2D, or with the coordinate ``z`` 2.5D."""
    rows, tokens = z + "i", "tp:tokens" if z else "tp:col"
    axes = {"tp": rows + "j", "tp:row": "j", "tp:col": "i"}
    copies = dict.fromkeys(("position", "norm", "inward bias", "outward bias"), tokens)
    if z:
        axes |= {"tp:depth": z, "tp:tokens": rows}
        copies |= dict.fromkeys(("token", "inward", "outward"), "tp:depth")
    return Mode(
        axes=axes,
        weights={
            "token": ("i", "j"),
            "position": ("", "j"),
            "norm": ("j",),
            "inward": ("j", "i"),
            "inward bias": ("j",),
            "outward": ("j", "i"),
            "outward bias": ("j",),
        },
        residual=(rows, "", "j"),
        scores=(rows, "j", "", ""),
        logits=(rows, "", "j"),
        copies=copies,
        partial=frozenset(copies),
    )


def _three_d() -> Mode:
    copies = dict.fromkeys(("position", "norm", "outward bias"), "tp:ij") | {"inward bias": "tp:ik"}
    return Mode(
        axes={"tp": "ijk", "tp:i": "i", "tp:j": "j", "tp:k": "k", "tp:ij": "ij", "tp:ik": "ik"},
        weights={
            "token": ("ji", "k"),
            "position": ("", "k"),
            "norm": ("k",),
            "inward": ("ji", "k"),
            "inward bias": ("j",),
            "outward": ("ki", "j"),
            "outward bias": ("k",),
        },
        residual=("ij", "", "k"),
        scores=("ik", "j", "", ""),
        logits=("ik", "", "j"),
        copies=copies,
        partial=frozenset(copies),
    )


MODES = {"2d": _two_d(""), "2.5d": _two_d("z"), "3d": _three_d()}


def mode_of(plan: TensorPlan) -> Mode:
    return MODES.get(plan.tp_mode) or _one_d(plan.sequence_parallel)


# The phase of a sum of gradients over the ranks of ``copies``. Sums of whole matrices (2.5D) belong
# to the traffic of their layers; all others have the phase "shared".
SHARED_PHASE = {
    **dict.fromkeys(("inward", "outward"), "linear_backward"),
    "token": "embedding_backward",
}


# ---- the grid -----------------------------------------------------------------------------------
def extents(plan: TensorPlan) -> dict[str, int]:
    """{coordinate: its extent}. Raises ValueError if tp ranks cannot form the mode's grid."""
    if plan.tp_mode == "1d":
        return {"t": plan.tp}
    q, depth = plan.tp_grid
    return {name: depth if name == "z" else q for name in mode_of(plan).axes["tp"]}


def coordinates(plan: TensorPlan, index: int) -> dict[str, int]:
    """{coordinate: value} of rank number ``index`` of a tp group."""
    sizes, position = extents(plan), {}
    for name in reversed(sizes):
        index, position[name] = divmod(index, sizes[name])
    return {name: position[name] for name in sizes}


def group(plan: TensorPlan, axis: str, index: int) -> tuple[int, ...]:
    """The ranks of a tp group that form a group along ``axis`` with rank number ``index``."""
    varying, places = mode_of(plan).axes[axis], [coordinates(plan, r) for r in range(plan.tp)]
    fixed = places[index].keys() - set(varying)
    members = [r for r in range(plan.tp) if all(places[r][n] == places[index][n] for n in fixed)]
    return tuple(sorted(members, key=lambda r: [places[r][name] for name in varying]))


def axis_of(plan: TensorPlan, split: Split) -> str:
    """The axis of the ranks that hold the other parts of a dimension sharded by ``split``; "" if
    each rank holds all of it.
    """
    axes = mode_of(plan).axes.items()
    return next((name for name, varying in axes if plan.tp > 1 and set(varying) == set(split)), "")


# ---- blocks -------------------------------------------------------------------------------------
class Holding(NamedTuple):
    """The block of a parameter that one rank holds.

    whole    shape of the whole parameter, with qkv's three parts as a dimension of their own
    box      the rank's range of each dimension of ``whole``
    shape    shape of the rank's tensor, with qkv's three parts in one dimension
    copies   axis whose ranks hold the same block; "" if no other rank does
    partial  whether the gradient is a partial sum, to be summed over ``copies``
    """

    whole: tuple[int, ...]
    box: Box
    shape: tuple[int, ...]
    copies: str
    partial: bool


def kind_of(name: str) -> str:
    """The kind of the parameter called ``name``: a key of ``Mode.weights``."""
    *_, layer, leaf = name.split(".")
    kind = KINDS.get(layer, layer)
    return f"{kind} bias" if leaf == "bias" and kind != "norm" else kind


@lru_cache(maxsize=16)
def _shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Cached, because a large model has thousands of parameters and each is looked up alone."""
    return model.parameter_shapes()


def whole_shape(model: ModelSpec, name: str) -> tuple[int, ...]:
    """Shape of a whole parameter, with qkv's three parts as a dimension of their own."""
    if name == TIED[1]:  # if tied, a copy of the embedding, which `parameter_shapes` leaves out
        return (model.vocab, model.hidden)
    shape = _shapes(model)[name]
    if model.block is not None and name.startswith("blocks."):
        return shape
    return (3, shape[0] // 3, *shape[1:]) if ".qkv." in name else shape


def _range(length: int, split: Split, place: Mapping[str, int], sizes: Mapping[str, int]) -> slice:
    """The part of a dimension of ``length`` that the rank at the coordinates ``place`` holds."""
    parts, index = 1, 0
    for name in split:
        parts, index = parts * sizes[name], index * sizes[name] + place[name]
    return slice(index * length // parts, (index + 1) * length // parts)


def box(whole: tuple[int, ...], splits: tuple[Split, ...], plan: TensorPlan, index: int) -> Box:
    """The ranges that rank number ``index`` holds of a tensor of shape ``whole``."""
    place, sizes = coordinates(plan, index), extents(plan)
    return tuple(_range(n, split, place, sizes) for n, split in zip(whole, splits, strict=True))


def box_shape(ranges: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in ranges)


@lru_cache(maxsize=1024)
def holding(model: ModelSpec, plan: TensorPlan, name: str, index: int) -> Holding:
    """What rank number ``index`` of a tp group holds of the parameter called ``name``."""
    mode, kind, whole = mode_of(plan), kind_of(name), whole_shape(model, name)
    if model.block is not None and name.startswith("blocks."):  # the user's block is never cut
        return Holding(whole, tuple(slice(0, n) for n in whole), whole, "", False)
    thirds = ".qkv." in name  # a dimension more, of which each rank has all
    ranges = box(whole, ("",) * thirds + mode.weights[kind], plan, index)
    shape = box_shape(ranges)
    if thirds:
        shape = (shape[0] * shape[1], *shape[2:])
    return Holding(whole, ranges, shape, mode.copies.get(kind, ""), kind in mode.partial)


def activation_box(model: ModelSpec, plan: TensorPlan, tensor: str, index: int) -> Box:
    """The ranges of a micro-batch's "residual" (b, s, h), "scores" (b, a, s, s) or "logits"
    (b, s, V) that rank number ``index`` of a tp group holds.
    """
    batch, s = plan.microbatch_size, model.seq_len
    whole = {
        "residual": (batch, s, model.hidden),
        "scores": (batch, model.heads, s, s),
        "logits": (batch, s, model.vocab),
    }[tensor]
    return box(whole, getattr(mode_of(plan), tensor), plan, index)


def looked_up(plan: TensorPlan, index: int) -> slice:
    """The samples of a micro-batch whose tokens rank number ``index`` looks up in its part of the
    embedding: in "2.5d" the samples of its q x q grid, otherwise all.
    """
    count = plan.microbatch_size // extents(plan).get("z", 1)
    grid = coordinates(plan, index).get("z", 0)
    return slice(grid * count, (grid + 1) * count)


def loss_parts(plan: TensorPlan) -> int:
    """The number of parts into which the tokens of a micro-batch are sharded where the loss is
    computed; each part has a loss of its own.
    """
    sizes = extents(plan)
    return math.prod(sizes[name] for name in mode_of(plan).logits[0])


def reports_loss(plan: TensorPlan, index: int) -> bool:
    """Whether rank number ``index`` reports the loss of its part of the tokens."""
    place = coordinates(plan, index)
    return not any(place[name] for name in mode_of(plan).logits[2])
