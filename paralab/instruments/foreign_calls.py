"""The rows of a call of torch.distributed: in which group, how many bytes, and to which ranks.

[Note: gloo] Rows describe the bytes that leave the rank. Gloo implements reduce-scatter as n
all-reduces, so that every rank also gets the parts of the others, which it did not ask for: these
bytes have a row of their own, an all-gather in the phase ``SURPLUS``. Gloo's reduce is a
reduce-scatter whose parts are then sent to the root. Its all-reduce of sparse tensors is an
all-gather of their indices and values; other ranks are assumed to have as many as this rank.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from paralab.checks import illegal
from paralab.instruments.memory import tensors
from paralab.ranks.host import send_first
from paralab.theory.traffic import BOOKKEEPING, SURPLUS, row

CALLS = {  # operation as rows name it: the names of c10d's operations that implement it
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
INPUT = ("reduce_scatter", "all_to_all", "gather")  # the second argument is their payload
PEER = ("root_rank", "dst", "src")  # names of arguments whose value is a position in the group
INDICES = 4096  # bytes of integers up to which a message counts as control data: `is_control`


class Where(NamedTuple):
    """A process group: its axis, its global ranks, and whether its backend for a device is gloo."""

    axis: str
    ranks: tuple[int, ...]
    gloo: bool


class Calls:
    """The calls of one rank. ``nodes``: for each rank the index of the node that it runs on."""

    def __init__(self, rank: int, nodes: Sequence[int]) -> None:
        self.rank, self.nodes = rank, nodes
        self.made: Counter[tuple[str, tuple[int, ...]]] = Counter()  # calls per axis and ranks
        self.backends: dict[str, str] = {}  # kind of device: the backend that sent its tensors
        self._groups: dict[tuple[str, str, tuple[int, ...]], Where] = {}
        self._meshes: list[Any] = []
        self.refusal: ValueError | None = None  # of the program, which may have caught it

    def refuse(self, *said: Any) -> NoReturn:
        """Raise `illegal`, which the observation raises again if the program catches it."""
        self.refusal = illegal(*said)
        raise self.refusal

    def meshing(self, call: Callable[[], None], mesh: Any, *_: Any) -> None:
        """Around the creation of a DeviceMesh, which may name the axis of an existing group."""
        call()
        self._meshes.append(weakref.ref(mesh))
        self._groups.clear()

    def where(self, group: Any, device: torch.device) -> Where:
        """The group; its axis is the name of its mesh dimension, else its own, else its ranks."""
        ranks = _ranks(group, device)
        name, kind, _ = key = group.group_name, device.type, ranks  # torchft's have all one name
        if key not in self._groups:
            if max(ranks) >= len(self.nodes):
                why = f"the group has the ranks {ranks}, but only {len(self.nodes)} are observed"
                legal = "pl.observe(program, ranks=N), paralab observe --ranks N, or torchrun"
                self.refuse("ranks", len(ranks), why, legal)
            if ranks[group.rank()] != self.rank:
                why = f"the observed rank {self.rank} is the group's rank {group.rank()}"
                legal = "a group that torch.distributed makes, of ranks numbered as in RANK"
                self.refuse("ranks", ranks, why, legal)
            axis = self._mesh_dimension(name) or group.group_desc.removeprefix("mesh_")
            if axis in ("default_pg", "undefined", "default", ""):
                every = len(ranks) == len(self.nodes)
                axis = "world" if every else f"ranks {','.join(map(str, ranks))}"
            self.backends[kind] = _backend(group, device)
            if self.backends[kind] == "gloo":
                send_first()  # also for a group of the program's, as `pl.run` does for its own
            self._groups[key] = Where(axis, ranks, self.backends[kind] == "gloo")
        return self._groups[key]

    def backend(self, device: str) -> str:
        """The backend that sent tensors of this device; if none were sent, the default group's."""
        kind = torch.device(device).type
        if kind not in self.backends and dist.is_initialized():
            return _backend(dist.group.WORLD, torch.device(kind))
        return self.backends.get(kind, "")

    def _mesh_dimension(self, group: str) -> str:
        """The group's dimension in the latest mesh that has it: the first often has all ranks."""
        for mesh in filter(None, (reference() for reference in reversed(self._meshes))):
            for name in mesh.mesh_dim_names or ():
                with contextlib.suppress(RuntimeError, KeyError, AssertionError):
                    if mesh.get_group(name).group_name == group:
                        return name
        return ""

    def rows(
        self, op: str, args: dict[str, Any], sent: list[Tensor], where: Where, phase: str
    ) -> Iterator[tuple]:
        """One call's rows: number, op, axis, ranks, peer, level, phase, payload and wire bytes."""
        axis, ranks, _ = where
        number = self.made[axis, ranks]
        self.made[axis, ranks] += 1
        node_of = self.nodes.__getitem__
        for name, size, peer in self._messages(op, args, sent, where):
            surplus = (op, name) == ("reduce_scatter", "all_gather") and phase not in BOOKKEEPING
            fields = {"phase": SURPLUS if surplus else phase, "payload": size, "node_of": node_of}
            yield number, *row(name, axis, ranks, self.rank, peer=peer, **fields)

    def _messages(
        self, op: str, args: dict[str, Any], sent: list[Tensor], where: Where
    ) -> list[tuple[str, int, int]]:
        """[(operation, payload bytes, root or peer, -1 for none)] of a call; see [Note: gloo]."""
        size = sum(t.nbytes for t in sent)
        position = next((args[name] for name in PEER if name in args), None)
        peer = -1 if position is None else where.ranks[position]
        others = [r for r in where.ranks if r != self.rank]
        to_root = [("recv", r) for r in others] if self.rank == peer else [("send", peer)]
        from_root = [("send", r) for r in others] if self.rank == peer else [("recv", peer)]
        if op in ("gather", "scatter"):
            return [(name, size, r) for name, r in (to_root if op == "gather" else from_root)]
        if op == "all_to_all" and (parts := _parts(args, sent)):
            return [
                (name, size, r)
                for name, sizes in zip(("send", "recv"), parts, strict=True)
                for r, size in zip(where.ranks, sizes, strict=True)
                if r != self.rank
            ]
        if op == "all_reduce" and where.gloo and any(t.is_sparse for t in tensors(args)):
            return [("all_gather", size * len(where.ranks), -1)]
        if op == "reduce" and where.gloo:
            part = size // len(where.ranks)
            return [("reduce_scatter", size, -1), *((name, part, r) for name, r in to_root)]
        if op == "reduce_scatter" and where.gloo and others:
            return [(op, size, -1), ("all_gather", size, -1)]
        return [(op, size, peer)]


def _ranks(group: Any, device: torch.device) -> tuple[int, ...]:
    """The group's global ranks, in its order. A group that torch.distributed did not make, as
    torchft's, may have them in the options of its backend; else they are taken to be 0, 1, ...
    """
    known = dist.distributed_c10d._world.pg_group_ranks.get(group)
    if known is None:
        options = getattr(group._get_backend(device), "options", None)
        known = getattr(options, "global_ranks_in_group", None) or range(group.size())
    return tuple(known)


def _backend(group: Any, device: torch.device) -> str:
    """The name of the group's backend for a device; "" if it has none, and torch refuses calls."""
    with contextlib.suppress(RuntimeError):
        return group._get_backend(device).name()
    return ""


def payload(op: str, args: dict[str, Any]) -> list[Tensor]:
    """The tensors whose bytes are the call's payload."""
    return carried(list(args.values())[op in INPUT])


def carried(args: Any) -> list[Tensor]:
    """The dense tensors in arguments of a call; for a sparse tensor its indices and values."""
    dense = ((t._indices(), t._values()) if t.is_sparse else (t,) for t in tensors(args))
    return list(chain.from_iterable(dense))


def is_uneven(args: dict[str, Any]) -> bool:
    """Whether an argument is a list of tensors, one per rank, that differ in shape."""
    lists = (inner for value in args.values() if isinstance(value, list) for inner in value)
    return any(isinstance(parts, list) and len({t.shape for t in parts}) > 1 for parts in lists)


def is_control(sent: list[Tensor]) -> bool:
    """Whether a message is bookkeeping: one number (a norm, a loss, a flag), or up to `INDICES`
    bytes of integers.
    """
    has_floats = any(t.is_floating_point() or t.is_complex() for t in sent)
    is_single = sum(t.numel() for t in sent) <= 1
    return is_single or (not has_floats and sum(t.nbytes for t in sent) <= INDICES)


def _parts(args: dict[str, Any], sent: list[Tensor]) -> tuple[list[int], list[int]] | None:
    """(bytes to each rank, bytes from each rank) of an all-to-all whose parts may be unequal: it
    has a list of tensors, or states split sizes. None if it splits one tensor equally.
    """
    received = carried(next(iter(args.values())))
    if len(sent) > 1:
        return [t.nbytes for t in sent], [t.nbytes for t in received]
    splits = args.get("input_split_sizes"), args.get("output_split_sizes")
    if not any(splits):
        return None
    parts = []
    for tensor, sizes in zip((sent[0], received[0]), splits, strict=True):
        sizes = sizes or [1] * max(map(len, filter(None, splits)))  # not stated: equal
        parts.append([tensor.nbytes * size // max(sum(sizes), 1) for size in sizes])
    return parts[0], parts[1]
