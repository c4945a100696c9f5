"""torch.distributed as a judged answer sees it: its own functions, counted like those of a group.

While an answer runs, the names below are functions of the answer's `Watched` group, so that a call
is written down and its result arrives in ``wait()`` (watched.py). What has no such function here
reaches torch's dispatcher and is refused there. Messages between two ranks are matched in the order
in which they are sent, as NCCL does it, so a tag is refused; they do not wait for their peer to
arrive, as those of a group do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paralab.checks import illegal

if TYPE_CHECKING:
    from paralab.comm import Group, Pending

# torch 2.13 renamed two.
RENAMED = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
SUM = dist.ReduceOp.SUM
ORDER = "messages of two ranks are matched in the order in which they are sent, as NCCL does it"


class Message(NamedTuple):
    """What `torch.distributed.P2POp` is to an answer."""

    op: Callable
    tensor: Tensor
    peer: int
    group: Any = None
    tag: int = 0


class Work:
    """What an asynchronous call returns."""

    def __init__(self, call: Pending, deliver: Callable[[], None] | None = None) -> None:
        self.call, self.deliver = call, deliver

    def wait(self, timeout: object = None) -> bool:
        self.call.wait()
        deliver, self.deliver = self.deliver, None
        if deliver is not None:
            deliver()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.call._posted.works)


class Plain:
    """The functions of torch.distributed, on the groups of one answer. Their arguments are torch's.

    world  the group of all ranks
    """

    P2POp = Message

    def __init__(self, world: Group) -> None:
        self.world = world

    def of(self, group: Any) -> Group:
        """The group that an argument ``group=`` means."""
        if group is None or group is dist.group.WORLD:
            return self.world
        if type(group) is type(self.world):
            return group
        what = "no member of it" if group is dist.GroupMember.NON_GROUP_MEMBER else "unknown here"
        legal = "one that dist.new_group(ranks) has returned to a member, or none for all ranks"
        raise illegal("group", group, what, legal)

    # ---- groups ------------------------------------------------------------------------------
    def new_group(self, ranks=None, *_, **__):
        ranks = sorted(self.world.ranks if ranks is None else ranks)
        axis = "ranks " + ",".join(map(str, ranks))
        made = self.world.subgroup(ranks, axis=axis)
        return dist.GroupMember.NON_GROUP_MEMBER if made is None else made

    def get_rank(self, group=None):
        return -1 if group is dist.GroupMember.NON_GROUP_MEMBER else self.of(group).index

    def get_world_size(self, group=None):
        return -1 if group is dist.GroupMember.NON_GROUP_MEMBER else self.of(group).size

    def get_backend(self, group=None):
        return "gloo"

    def get_process_group_ranks(self, group=None):
        return list(self.of(group).ranks)

    def get_global_rank(self, group, group_rank):
        return self.of(group).ranks[group_rank]

    def get_group_rank(self, group, global_rank):
        return self.of(group).ranks.index(global_rank)

    def barrier(self, group=None, async_op=False, **_):
        self.of(group).barrier()

    # ---- collectives -------------------------------------------------------------------------
    def all_reduce(self, tensor, op=SUM, group=None, async_op=False):
        return _done(self.of(group).all_reduce(tensor, reduce=_kind(op)), async_op)

    def reduce(self, tensor, dst=None, op=SUM, group=None, async_op=False, group_dst=None):
        group = self.of(group)
        _sum_only("reduce", op)
        return _done(group.reduce(tensor, root=_peer(group, dst, group_dst)), async_op)

    def broadcast(self, tensor, src=None, group=None, async_op=False, group_src=None):
        group = self.of(group)
        return _done(group.broadcast(tensor, root=_peer(group, src, group_src)), async_op)

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        return _done(self.of(group).all_gather(_flat(output_tensor), _flat(input_tensor)), async_op)

    def all_gather(self, tensor_list, tensor, group=None, async_op=False):
        whole = tensor.new_empty(len(tensor_list) * tensor.numel())

        def deliver() -> None:
            for part, out in zip(whole.chunk(len(tensor_list)), tensor_list, strict=True):
                out.copy_(part.view_as(out))

        return _done(self.of(group).all_gather(whole, _flat(tensor)), async_op, deliver)

    def reduce_scatter_tensor(self, output, input, op=SUM, group=None, async_op=False):
        _sum_only("reduce_scatter_tensor", op)
        return _done(self.of(group).reduce_scatter(_flat(output), _flat(input)), async_op)

    def reduce_scatter(self, output, input_list, op=SUM, group=None, async_op=False):
        whole = torch.cat([part.flatten() for part in input_list])
        return self.reduce_scatter_tensor(output, whole, op, group, async_op)

    def all_to_all_single(
        self,
        output,
        input,
        output_split_sizes=None,
        input_split_sizes=None,
        group=None,
        async_op=False,
    ):
        if output_split_sizes or input_split_sizes:
            raise illegal("input_split_sizes", input_split_sizes, "not counted here", "equal parts")
        return _done(self.of(group).all_to_all(output, input), async_op)

    # ---- messages ----------------------------------------------------------------------------
    def isend(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        group = self.of(group)
        return _messages(group, [("send", tensor, _peer(group, dst, group_dst))], [tag])

    def irecv(self, tensor, src=None, group=None, tag=0, group_src=None):
        group = self.of(group)
        return _messages(group, [("recv", tensor, _peer(group, src, group_src))], [tag])

    def send(self, *args, **settings):
        self.isend(*args, **settings).wait()

    def recv(self, tensor, *args, **settings):
        self.irecv(tensor, *args, **settings).wait()
        return 0

    def batch_isend_irecv(self, p2p_op_list):
        sides = {self.isend: "send", self.irecv: "recv"}
        parts = [(sides[one.op], one.tensor, one.peer) for one in p2p_op_list]
        group = self.of(p2p_op_list[0].group if parts else None)
        return [_messages(group, parts, [one.tag for one in p2p_op_list])]


def _messages(group: Group, parts: list[tuple[str, Tensor, int]], tags: list[int]) -> Work:
    if group.context.rank in {peer for _, _, peer in parts}:
        legal = "another rank of the group; within a rank, copy the tensor"
        raise illegal("peer", group.context.rank, "a rank sends nothing to itself", legal)
    for tag in tags:
        if tag:
            raise illegal("tag", tag, ORDER, "no tag, and the same order on both ranks")
    for side, tensor, peer in parts:
        if not isinstance(tensor, Tensor):
            why = f"rank {peer} cannot {'get' if side == 'send' else 'fill'} it"
            raise illegal("tensor", tensor, why, "a tensor; .grad is None without a gradient")
    strict, group._strict = group._strict, None
    try:
        return Work(group.exchange(parts))
    finally:
        group._strict = strict


def _done(call: Pending, async_op: bool, deliver: Callable[[], None] | None = None) -> Work | None:
    work = Work(call, deliver)
    if async_op:
        return work
    work.wait()
    return None


def _flat(tensor: Tensor) -> Tensor:
    """A group takes the parts one after the other; torch takes them as rows too."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def _kind(op: Any) -> str:
    kinds = {SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
    for known, name in kinds.items():
        if op == known:
            return name
    raise illegal("op", op, "gloo has no such reduction", "dist.ReduceOp.SUM, MAX or MIN")


def _sum_only(name: str, op: Any) -> None:
    if op != SUM:
        raise illegal("op", op, f"a {name} adds up here", "dist.ReduceOp.SUM")


def _peer(group: Group, rank: int | None, in_group: int | None) -> int:
    """A global rank, which may be given by its place in the group."""
    peer = rank if in_group is None else group.ranks[in_group]
    if peer not in group.ranks:
        raise illegal("rank", peer, "no member of the group", f"one of {group.ranks}")
    return peer


def functions(group: Group) -> tuple[dict[str, Any], dict[str, Any]]:
    """torch.distributed's functions by name: as the answer has them, on ``group``, and the real
    ones.
    """
    plain = Plain(group)
    ours = {name: getattr(plain, name) for name in vars(Plain) if name[0] != "_" and name != "of"}
    ours |= {new: ours[old] for new, old in RENAMED.items() if hasattr(dist, new)}
    return ours, {name: getattr(dist, name) for name in ours}
