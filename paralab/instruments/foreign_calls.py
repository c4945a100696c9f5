"""What a call of torch.distributed sends, as rows: in which group, how many bytes, to whom.

[Note: gloo] Rows say what leaves the rank. Gloo's own reduce-scatter is n all-reduces, which also
gathers what no rank asked for: these bytes are a row of their own, an all-gather of the phase
``SURPLUS``. Its reduce is a reduce-scatter whose parts are then sent to the root. Its sum of sparse
tensors is an all-gather of their indices and values; other ranks' are taken to be as many as here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paralab.checks import illegal
from paralab.instruments.memory import tensors
from paralab.ranks.host import send_first
from paralab.theory.traffic import BOOKKEEPING, SURPLUS, row

CALLS = {  # names of c10d's operations, by the name that rows have
    "all_reduce": "allreduce_ allreduce_coalesced_",
    "all_gather": "allgather_ _allgather_base_ allgather_coalesced_ "
    "allgather_into_tensor_coalesced_",
    "reduce_scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
    "all_to_all": "alltoall_ alltoall_base_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "gather": "gather_",
    "scatter": "scatter_",
    "send": "send",
    "recv": "recv_ recv_any_source_",
    "barrier": "barrier",
}
INPUT = ("reduce_scatter", "all_to_all", "gather")  # their payload is the second argument
PEER = ("root_rank", "dst", "src")  # arguments that are a position in the group
INDICES = 4096  # bytes of whole numbers that are bookkeeping


class Where(NamedTuple):
    """A process group: its axis, its global ranks, whether gloo carries these tensors."""

    axis: str
    ranks: tuple[int, ...]
    gloo: bool


class Calls:
    """The calls of one rank. ``nodes``: index of the node that each rank runs on."""

    def __init__(self, rank: int, nodes: Sequence[int]) -> None:
        self.rank, self.nodes = rank, nodes
        self.made: Counter[tuple[str, tuple[int, ...]]] = Counter()  # of an axis and its ranks
        self.backends: dict[str, str] = {}  # what carried the tensors of a kind of device
        self._groups: dict[tuple[str, str], Where] = {}
        self._meshes: list[Any] = []

    @contextlib.contextmanager
    def meshing(self, mesh: Any, *_: Any) -> Iterator[None]:
        """A DeviceMesh is made; one of its dimensions may name a group that there is already."""
        yield
        self._meshes.append(weakref.ref(mesh))
        self._groups.clear()

    def where(self, group: Any, device: torch.device) -> Where:
        """The group's axis: the name of its mesh dimension, of the group, or its ranks."""
        name, kind = of = group.group_name, device.type
        if of not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            if max(ranks) >= len(self.nodes):
                why = f"a group of the ranks {ranks}, and this observation is of {len(self.nodes)}"
                legal = "pl.observe(program, ranks=N), paralab observe --ranks N, or torchrun"
                raise illegal("ranks", len(ranks), why, legal)
            axis = self._mesh_dimension(name) or group.group_desc.removeprefix("mesh_")
            if axis in ("default_pg", "undefined", "default", ""):
                every = len(ranks) == len(self.nodes)
                axis = "world" if every else f"ranks {','.join(map(str, ranks))}"
            self.backends[kind] = _backend(group, device)
            if self.backends[kind] == "gloo":
                send_first()  # of a group that the program has made, as of those of `pl.run`
            self._groups[of] = Where(axis, ranks, self.backends[kind] == "gloo")
        return self._groups[of]

    def backend(self, device: str) -> str:
        """What carried tensors of this device; if none were sent, what the default group has."""
        kind = torch.device(device).type
        if kind not in self.backends and dist.is_initialized():
            return _backend(dist.group.WORLD, torch.device(kind))
        return self.backends.get(kind, "")

    def _mesh_dimension(self, group: str) -> str:
        """Of several dimensions with this group the latest: the first is often all ranks."""
        for mesh in filter(None, (reference() for reference in reversed(self._meshes))):
            for name in mesh.mesh_dim_names or ():
                with contextlib.suppress(RuntimeError, KeyError, AssertionError):
                    if mesh.get_group(name).group_name == group:
                        return name
        return ""

    def rows(
        self, op: str, given: dict[str, Any], sent: list[Tensor], where: Where, phase: str
    ) -> Iterator[tuple]:
        """Of one call: number, op, axis, ranks, peer, level, phase, payload and wire bytes."""
        axis, ranks, _ = where
        number = self.made[axis, ranks]
        self.made[axis, ranks] += 1
        node_of = self.nodes.__getitem__
        for name, size, peer in self._sent(op, given, sent, where):
            more = (op, name) == ("reduce_scatter", "all_gather") and phase not in BOOKKEEPING
            how = {"phase": SURPLUS if more else phase, "payload": size, "node_of": node_of}
            yield number, *row(name, axis, ranks, self.rank, peer=peer, **how)

    def _sent(
        self, op: str, given: dict[str, Any], sent: list[Tensor], where: Where
    ) -> list[tuple[str, int, int]]:
        """What one call sends: operation, payload bytes, root or peer. See [Note: gloo]."""
        size = sum(t.nbytes for t in sent)
        position = next((given[name] for name in PEER if name in given), None)
        peer = -1 if position is None else where.ranks[position]
        others = [r for r in where.ranks if r != self.rank]
        inwards = [("recv", r) for r in others] if self.rank == peer else [("send", peer)]
        outwards = [("send", r) for r in others] if self.rank == peer else [("recv", peer)]
        if op in ("gather", "scatter"):
            return [(side, size, r) for side, r in (inwards if op == "gather" else outwards)]
        if op == "all_to_all" and (parts := _parts(given, sent)):
            return [
                (side, size, r)
                for side, sizes in zip(("send", "recv"), parts, strict=True)
                for r, size in zip(where.ranks, sizes, strict=True)
                if r != self.rank
            ]
        if op == "all_reduce" and where.gloo and any(t.is_sparse for t in tensors(given)):
            return [("all_gather", size * len(where.ranks), -1)]
        if op == "reduce" and where.gloo:
            part = size // len(where.ranks)
            return [("reduce_scatter", size, -1), *((side, part, r) for side, r in inwards)]
        if op == "reduce_scatter" and where.gloo and others:
            return [(op, size, -1), ("all_gather", size, -1)]
        return [(op, size, peer)]


def _backend(group: Any, device: torch.device) -> str:
    """Its name; "" where the group has none for tensors of this device: torch refuses the call."""
    with contextlib.suppress(RuntimeError):
        return group._get_backend(device).name()
    return ""


def payload(op: str, given: dict[str, Any]) -> list[Tensor]:
    """The tensors whose bytes are the call's payload."""
    return carried(list(given.values())[op in INPUT])


def carried(given: Any) -> list[Tensor]:
    """The tensors in arguments of a call; of a sparse one its indices and values."""
    found = ((t._indices(), t._values()) if t.is_sparse else (t,) for t in tensors(given))
    return list(chain.from_iterable(found))


def has_unequal_parts(given: dict[str, Any]) -> bool:
    """Whether an argument is a list of tensors, one per rank, that differ in shape."""
    lists = (inner for value in given.values() if isinstance(value, list) for inner in value)
    return any(isinstance(parts, list) and len({t.shape for t in parts}) > 1 for parts in lists)


def as_data(calls: dict[str, list]) -> Iterator[str]:
    """The phases of calls, of which those of the setup are all that a program did."""
    scattered = set()
    for op, span, phase in zip(*(calls[name] for name in ("op", "span", "phase")), strict=True):
        scattered |= {span} if op == "reduce_scatter" else set()
        more = op == "all_gather" and span in scattered  # see [Note: gloo]
        yield phase if phase != "setup" else SURPLUS if more else "data"


def is_control(sent: list[Tensor]) -> bool:
    """Whether they are no part of an algorithm: a norm, a loss, a flag, some indices."""
    numbers = any(t.is_floating_point() or t.is_complex() for t in sent)
    few = sum(t.numel() for t in sent) <= 1
    return few or (not numbers and sum(t.nbytes for t in sent) <= INDICES)


def _parts(given: dict[str, Any], sent: list[Tensor]) -> tuple[list[int], list[int]] | None:
    """Bytes for each rank, and from each, of an all-to-all whose call states its parts: other ranks
    may have others. None if it is one tensor in equal parts, as on all ranks.
    """
    came = carried(next(iter(given.values())))
    if len(sent) > 1:
        return [t.nbytes for t in sent], [t.nbytes for t in came]
    splits = given.get("input_split_sizes"), given.get("output_split_sizes")
    if not any(splits):
        return None
    found = []
    for tensor, some in zip((sent[0], came[0]), splits, strict=True):
        some = some or [1] * max(map(len, filter(None, splits)))
        found.append([tensor.nbytes * split // max(sum(some), 1) for split in some])
    return found[0], found[1]
