"""Records the calls of torch.distributed that an answer makes, and delivers their results late.

An answer calls torch's own functions. Below them each call is a c10d operation, intercepted on any
thread (instruments/foreign_hooks.py); its bytes are those that NCCL would send. Messages between
two ranks are matched in the order in which they are sent, as NCCL does, so a tag is refused. Gloo
accepts a message that is shorter than its receive, and ends the process at a longer one. So each
message has a header, with which its receive compares size and type, and the receive's buffer has
room for a message that is too long.

[Note: late] A result must not be read before ``wait()``. On one machine it has often arrived by
then all the same, and the answer would be right by luck. So a call works on copies, and ``wait()``
delivers its result: an answer that reads too early reads the old contents of its tensor, or NaN
where a message is received, in every run. Changing a tensor while its call is in flight is an error
at the wait, and a call that is never waited for is reported. DistributedDataParallel and functional
collectives wait in C++, where nothing could be delivered, so an operation is refused unless a
function of torch.distributed calls it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from paralab.checks import illegal
from paralab.comm import Group
from paralab.instruments.foreign_calls import CALLS, PEER, Calls, payload
from paralab.instruments.foreign_hooks import around, stand_before
from paralab.instruments.memory import tensors
from paralab.instruments.recorder import Recorder
from paralab.strict import OrderError, Strict
from paralab.theory.traffic import POINT_TO_POINT
from paralab.transports import Call, Posted, Transport

ORDER = "messages of two ranks are matched in the order in which they are sent, as NCCL does it"
NO_OTHER = "no other group"
HEAD, ROOM = 128, 2**20  # bytes: of a message's header; behind a receive, for a longer message
OURS = str(Path(__file__).parents[1])
# Files of the frames between a function of torch.distributed and `LateCalls`.
BELOW = OURS, torch._ops.__file__


class WrongGroups(Exception):
    """Ranks are about to make different groups, and would wait for each other for ever."""


class InFlight(NamedTuple):
    """A call in flight.

    words    its name in messages: "send #0 to rank 1"
    span     the id of its span
    inputs   (tensor of the answer, its contents at the call), of all tensors among its arguments
    results  (tensor of the answer, the copy in which the result for it arrives)
    """

    words: str
    span: int
    inputs: list[tuple[Tensor, Tensor]]
    results: list[tuple[Tensor, Tensor]]

    def arrive(self) -> None:
        """Deliver the result in ``wait()``. RuntimeError if a tensor was changed or freed."""
        if freed([now for now, _ in self.inputs]) is not None:
            raise RuntimeError(f"a tensor of {self.words} was freed before it was waited for")
        if not all(torch.equal(_bytes_of(now), _bytes_of(was)) for now, was in self.inputs):
            raise RuntimeError(f"a tensor of {self.words} was changed before it was waited for")
        for tensor, copy in self.results:
            arrived = self._unpacked(tensor, copy) if self.words.startswith("recv") else copy
            tensor.detach().copy_(arrived)

    def _unpacked(self, tensor: Tensor, packed: Tensor) -> Tensor:
        """The tensor in a message. Raises OrderError unless its size and type are as required."""
        header, sender, call = bytes(packed[:HEAD].tolist()).decode().split("|")[:3]
        if header != _size_and_type(tensor):
            said = f"{self.words} is for {_size_and_type(tensor)}, and {sender} sends {header} "
            said += f"({call}): a send and its receive need the same size and type, and {ORDER}"
            raise OrderError(said)
        return packed[HEAD:][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def freed(values: Any) -> Tensor | None:
    """The first tensor in ``values`` whose storage is freed: to read it would crash the process."""
    lost = (t for t in tensors(values) if t.numel() and not t.untyped_storage().nbytes())
    return next(lost, None)


def _size_and_type(tensor: Tensor) -> str:
    return f"{tensor.numel():,} elements of {tensor.dtype}".replace("torch.", "")


def _packed(sender: str, number: str, tensor: Tensor) -> Tensor:
    """A message: the tensor's bytes behind a header with its size, its type and its sender."""
    head = f"{_size_and_type(tensor)}|{sender}|{number}|".encode().ljust(HEAD)
    return torch.cat([torch.tensor(list(head), dtype=torch.uint8), _bytes_of(tensor)])


def _receive_buffer(tensor: Tensor) -> Tensor:
    return torch.empty(HEAD + tensor.nbytes + ROOM, dtype=torch.uint8)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


class LateCalls:
    """Intercepts the calls of one answer on this rank. See [Note: late].

    watch      the answer's watch: its label is the phase of the calls, its recorder gets their rows
    in_flight  calls that have not been waited for, by their Work
    """

    def __init__(self, watch: Any, number: int) -> None:
        self.watch, self.context = watch, watch.group.context
        self.calls = Calls(self.context.rank, self.context.nodes)
        self.strict = Strict(self.context, axis=f"calls of answer {number}")
        self.in_flight: dict[Any, InFlight] = {}
        self._groups_made = 0

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Within this context calls are intercepted, and the default group is the answer's own."""
        with contextlib.ExitStack() as undo:
            for op, names in CALLS.items():
                for name in names.split():
                    stand_before(undo, "c10d", name, functools.partial(self._called, op))
            around(undo, dist.Work, "wait", self._waiting)
            around(undo, dist.Work, "get_future", _refuse_future)
            around(undo, dist.ProcessGroup, "barrier", _uncounted)
            core = dist.distributed_c10d
            around(undo, core, "_check_single_tensor", _require_tensor)
            around(undo, core, "_canonicalize_group_rank", _require_rank)
            for name in ("_rank_not_in_group", "_group_or_default_group"):  # each call asks one
                around(undo, core, name, _require_group)
            new_group = functools.partial(self._new_group, core._new_group_with_tag)
            for owner, name, value in (
                (dist.Work, "is_completed", lambda work: True),  # gloo never says so of a message
                (dist.group, "WORLD", self.watch.group.process_group),
                (core, "_new_group_with_tag", new_group),  # makes any new group
            ):
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            yield
            self._announce(NO_OTHER)  # so that a rank that makes one more group raises an error

    def _new_group(
        self, original: Callable[..., Any], ranks: Any = None, *args: Any, **settings: Any
    ) -> Any:
        ranks = self.watch.group.ranks if ranks is None else list(ranks)  # may be an iterator
        if not ranks:  # range(4, 2), say, where range(4, 4 + 2) is meant
            raise illegal("ranks", ranks, "a group without a rank", "one rank or more, [0, 1]")
        if not settings.get("use_local_synchronization"):  # with it, members alone call
            self.agree(f"the group {sorted(ranks)}")
        return original(ranks, *args, **settings)

    def agree(self, made: str = NO_OTHER) -> None:
        """Compare the group that this rank is about to make, in words, with that of every rank;
        raise WrongGroups on all of them if they differ.
        """
        self._announce(made)
        self.context.note("new_group")
        keys = (f"group {self._groups_made} of rank {rank}" for rank in self.watch.group.ranks)
        announced = [self.strict.wait_for(key).decode() for key in keys]
        self.context.note("")
        if other := next((rank for rank, one in enumerate(announced) if one != announced[0]), 0):
            said = f"rank {other} makes {announced[other]} where rank 0 makes {announced[0]}: "
            said += "every rank has to call new_group for every group, in the same order"
            raise WrongGroups(said)

    def _announce(self, made: str) -> None:
        self._groups_made += 1
        self.strict.store.set(f"group {self._groups_made} of rank {self.context.rank}", made)

    def _called(self, op: str, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        _refuse(op, arguments, group)
        if op == "barrier":
            return original()
        words, span = self._record(op, arguments, group)
        with _disable_current_modes():
            for tensor in tensors(arguments) if op == "recv" else ():
                if tensor.is_floating_point():
                    tensor.detach().fill_(torch.nan)
            before = [(tensor, _copy(tensor)) for tensor in tensors(arguments)]
            send = functools.partial(_packed, f"rank {self.context.rank}", words)
            replace = {"send": send, "recv": _receive_buffer}.get(op, _copy)
            copied = tree_map_only(Tensor, replace, list(arguments.values()))
        result = original(*copied)

        outputs, root = next(iter(arguments.values())), arguments.get("root_rank") == group.rank()
        receives = {"send": False, "broadcast": not root, "reduce": root}.get(op, True)
        results = zip(tensors(outputs), tensors(copied[0]), strict=True) if receives else ()
        in_tuple = isinstance(result, tuple)
        work = result[-1] if in_tuple else result
        self.in_flight[dist.Work.unbox(work)] = InFlight(words, span, before, list(results))
        return (outputs, work) if in_tuple else work

    def _record(self, op: str, arguments: dict[str, Any], group: Any) -> tuple[str, int]:
        """Record a call, with the bytes that NCCL would send. Returns (its name, its span's id)."""
        recorder, operands = self.watch.recorder, tensors(arguments)
        where = self.calls.where(group, operands[0].device)._replace(gloo=False)
        number = self.calls.made[where.axis, where.ranks]
        rows = list(self.calls.rows(op, arguments, payload(op, arguments), where, self.watch.label))
        if all(name not in POINT_TO_POINT for _, name, *_ in rows):
            root = arguments.get("root_rank")
            root = root if root is None else where.ranks[root]
            self.strict.collective(where.ranks, op, max(operands, key=Tensor.numel), root)
        span = recorder.launch(f"comm:{where.axis}", recorder.cut(), recorder.clock.host())
        for row in rows:
            recorder.call((*row, span))
        way = {"send": " to", "recv": " from"}.get(op)  # other calls may send nothing: no row
        return f"{op} #{number}" + (f"{way} rank {rows[0][4]}" if way else ""), span

    def _waiting(self, wait: Callable[[], Any], work: Any, *_: Any) -> Any:
        call = self.in_flight.pop(work, None)
        if call is None:  # waited for before
            return wait()
        recorder = self.watch.recorder
        recorder.enter("wait", after=(call.span,))
        others = [other.words for other in self.in_flight.values()][:3]
        also = f" (also in flight: {', '.join(others)})" if others else ""
        self.context.note(call.words + also)
        try:
            with _disable_current_modes():  # gloo's reduce-scatter copies a tensor of its own
                result = wait()
                call.arrive()
                return result
        finally:
            self.context.note("")
            recorder.leave()
            recorder.settled(call.span)


def _refuse(op: str, arguments: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raise an error for a call whose result could not be delivered or that NCCL does not have."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(BELOW):
        frame = frame.f_back
    if frame.f_code.co_filename != dist.distributed_c10d.__file__:
        said = f"{op} is not called by a function of torch.distributed, so it cannot be counted: "
        raise RuntimeError(said + "call these functions yourself")
    for tensor in tensors(arguments):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{op} of a tensor of shape {tuple(tensor.shape)}: it is not contiguous in memory, "
                "as after a transpose; legal: tensor = tensor.contiguous() before the call"
            )
    output, given = [*arguments.values()][:2]
    if op in ("all_gather", "reduce_scatter") and isinstance(output, Tensor):
        large, small = (output, given) if op == "all_gather" else (given, output)
        if large.numel() != (n := group.size()) * small.numel():
            longer = "output" if large is output else "input"
            said = f"{op} of {given.numel():,} elements into {output.numel():,}: on {n} ranks the "
            said += f"{longer} has to be {n} times as long, and the output is the first argument"
            raise ValueError(said)
    if arguments.get("tag"):
        raise illegal("tag", arguments["tag"], ORDER, "no tag, and the same order on both ranks")
    peer = next((arguments[n] for n in PEER if n in arguments), None if op == "recv" else 0)
    if peer is None or not 0 <= peer < group.size():
        raise illegal("rank", peer, "no member of the group", f"0 to {group.size() - 1}")
    if peer == group.rank() and op in POINT_TO_POINT:
        legal = "another rank of the group; within a rank, copy the tensor"
        raise illegal("peer", peer, "a rank sends nothing to itself", legal)


def _uncounted(call: Callable[[], Any], *_: Any) -> Any:
    """Does not count the tensor that a barrier makes, which is not the answer's."""
    with _disable_current_modes():
        return call()


def _require_tensor(call: Callable[[], None], value: Any, name: str, *_: Any) -> None:
    if not isinstance(value, Tensor):
        legal = "a tensor; .grad is None unless the tensor required a gradient before its forward"
        raise illegal(name, value, "it cannot be sent or filled", legal)
    call()


def _require_rank(call: Callable[[], int], group: dist.ProcessGroup, *ranks: Any) -> int:
    if ranks.count(None) == len(ranks):
        raise illegal("rank", None, "no member of the group", f"0 to {group.size() - 1}")
    return call()


def _require_group(call: Callable[[], Any], group: Any = None) -> Any:
    if not (hasattr(group, "rank") or group in (None, dist.GroupMember.NON_GROUP_MEMBER)):
        raise illegal("group", group, "not a process group", "what dist.new_group returns, or None")
    return call()


def _refuse_future(*_: Any) -> Any:
    raise RuntimeError(
        "a future cannot show when its call was waited for: keep the call, and call its wait()"
    )


class DirectTransport(Transport):
    """Calls torch.distributed, where `LateCalls` intercepts the calls."""

    def post(self, call: Call) -> Posted:
        span = self.recorder.launch(self.lane, (), self.recorder.clock.host())
        return Posted(span, self.start(call, self.group), call.finish)


class AnswerGroup(Group):
    """All ranks, for an answer that takes a group. `LateCalls` records the answer's calls; what the
    group records itself is not read.
    """

    def __init__(self, group: Group, number: int, process_group: dist.ProcessGroup) -> None:
        context, ranks = group.context, group.ranks
        how = {"context": context, "process_group": process_group, "transport": DirectTransport}
        unread = Recorder(rank=context.rank, world_size=group.size, device="cpu")
        super().__init__(ranks, axis="world", recorder=unread, **how)
        self._strict = Strict(context, axis=f"group of answer {number}")

    def barrier(self, *, phase: str = "control") -> None:
        dist.barrier(self.process_group)
