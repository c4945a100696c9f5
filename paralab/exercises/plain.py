"""The calls of torch.distributed that a judged answer makes: written down, and delivered late.

An answer calls torch's own functions. Below them each call is an operation of c10d's, which is seen
on every thread (instruments/foreign_hooks.py) and counted as NCCL would send it. Messages between
two ranks are matched in the order in which they are sent, as NCCL does it, so a tag is refused.
Gloo takes a message that is shorter than its receive, and ends the process at a longer one, so a
message carries a head: its receive compares sizes and types, and has room for one that is too long.

[Note: late] A result must not be read before it has been waited for. On one machine it has often
arrived by then, and the answer is right by luck. So a call works on copies, and its result is
delivered in ``wait()``: an answer that reads too early reads what was there before, or NaN where a
message is received, the same in every run. A tensor that is changed while its call is in flight is
an error at the wait, and a call that is never waited for is written down. DistributedDataParallel
and functional collectives wait in C++, where nothing would be delivered: what does not come from a
function of torch.distributed's is refused.
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
HEAD, ROOM = 128, 2**20  # bytes in front of a message, and behind one, where a longer one fits
OURS = str(Path(__file__).parents[1])
BELOW = OURS, torch._ops.__file__  # frames between torch.distributed's function and `LateCalls`


class WrongGroups(Exception):
    """Ranks were about to make different groups, which would wait for each other."""


class Sent(NamedTuple):
    """A call in flight.

    words    which one it is: "send #0"
    span     its id
    given    (a tensor of the answer's, what was in it), of all that it was given
    results  (a tensor of the answer's, the copy in which its result arrives)
    """

    words: str
    span: int
    given: list[tuple[Tensor, Tensor]]
    results: list[tuple[Tensor, Tensor]]

    def arrive(self) -> None:
        """The call has been waited for, and its result may be read."""
        if not all(torch.equal(_bits(now), _bits(was)) for now, was in self.given):
            raise RuntimeError(f"a tensor of {self.words} was changed before it was waited for")
        for tensor, copy in self.results:
            came = self._unpacked(tensor, copy) if self.words.startswith("recv") else copy
            tensor.detach().copy_(came)

    def _unpacked(self, tensor: Tensor, packed: Tensor) -> Tensor:
        """What a message brings, or OrderError if that is no tensor like this one."""
        kind, sender, number = bytes(packed[:HEAD].tolist()).decode().split("|")[:3]
        if kind != _kind(tensor):
            raise OrderError(
                f"{self.words} is of {_kind(tensor)}, and {sender} sends {kind} ({number}): a send "
                f"and its receive need the same size and type, and {ORDER}"
            )
        return packed[HEAD:][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.numel()} {tensor.dtype}".replace("torch.", "")


def _packed(sender: str, number: str, tensor: Tensor) -> Tensor:
    """A message: what is sent, behind its size and type and where it comes from."""
    head = f"{_kind(tensor)}|{sender}|{number}|".encode().ljust(HEAD)
    return torch.cat([torch.tensor(list(head), dtype=torch.uint8), _bits(tensor)])


def _room(tensor: Tensor) -> Tensor:
    return torch.empty(HEAD + tensor.nbytes + ROOM, dtype=torch.uint8)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


class LateCalls:
    """The calls of one answer on this rank. See [Note: late].

    watch  the answer's: its label says what calls are for, its recorder has their rows
    open   calls that have not been waited for, by their Work
    """

    def __init__(self, watch: Any, number: int) -> None:
        self.watch, self.context = watch, watch.group.context
        self.calls = Calls(self.context.rank, self.context.nodes)
        self.strict = Strict(self.context, axis=f"calls of answer {number}")
        self.open: dict[Any, Sent] = {}
        self._made = 0  # groups

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Within, calls are the answer's, and the default group is its own."""
        with contextlib.ExitStack() as undo:
            for op, names in CALLS.items():
                for name in names.split():
                    stand_before(undo, "c10d", name, functools.partial(self._called, op))
            around(undo, dist.Work, "wait", self._waiting)
            around(undo, dist.Work, "get_future", _no_future)
            around(undo, dist.ProcessGroup, "barrier", _unseen)
            around(undo, dist.distributed_c10d, "_check_single_tensor", _no_tensor)
            undo.callback(setattr, dist.Work, "is_completed", dist.Work.is_completed)
            dist.Work.is_completed = lambda work: True  # gloo never says so of a message
            undo.callback(setattr, dist.group, "WORLD", dist.group.WORLD)
            dist.group.WORLD = self.watch.group.process_group
            core, made_by = dist.distributed_c10d, "_new_group_with_tag"  # whatever it is called by
            undo.callback(setattr, core, made_by, core._new_group_with_tag)
            core._new_group_with_tag = functools.partial(self._new_group, core._new_group_with_tag)
            yield
            self._announce(NO_OTHER)  # a rank that makes one more is told

    def _new_group(
        self, own: Callable[..., Any], ranks: Any = None, *args: Any, **settings: Any
    ) -> Any:
        ranks = None if ranks is None else list(ranks)  # it may be an iterator
        if not settings.get("use_local_synchronization"):  # a call of the members alone
            everyone = self.watch.group.ranks
            self.agree(f"the group {sorted(everyone if ranks is None else ranks)}")
        return own(ranks, *args, **settings)

    def agree(self, made: str = NO_OTHER) -> None:
        """Ranks say what group they make before they make it; WrongGroups where one differs."""
        self._announce(made)
        self.context.note("new_group")
        keys = (f"group {self._made} of rank {rank}" for rank in self.watch.group.ranks)
        said = [self.strict.wait_for(key).decode() for key in keys]
        self.context.note("")
        if other := next((rank for rank, one in enumerate(said) if one != said[0]), 0):
            raise WrongGroups(
                f"rank {other} makes {said[other]} where rank 0 makes {said[0]}: every rank has to "
                "call new_group for every group, in the same order"
            )

    def _announce(self, made: str) -> None:
        self._made += 1
        self.strict.store.set(f"group {self._made} of rank {self.context.rank}", made)

    def _called(self, op: str, given: dict[str, Any], own: Callable[..., Any]) -> Any:
        group = dist.ProcessGroup.unbox(given["process_group"])
        _refuse(op, given, group)
        if op == "barrier":
            return own()
        words, span = self._written_down(op, given, group)
        with _disable_current_modes():
            for tensor in tensors(given) if op == "recv" else ():
                if tensor.is_floating_point():
                    tensor.detach().fill_(torch.nan)
            before = [(tensor, _copy(tensor)) for tensor in tensors(given)]
            send = functools.partial(_packed, f"rank {self.context.rank}", words)
            ours = {"send": send, "recv": _room}.get(op, _copy)
            copied = tree_map_only(Tensor, ours, list(given.values()))
        result = own(*copied)

        filled, root = next(iter(given.values())), given.get("root_rank") == group.rank()
        gets = {"send": False, "broadcast": not root, "reduce": root}.get(op, True)
        results = zip(tensors(filled), tensors(copied[0]), strict=True) if gets else ()
        in_tuple = isinstance(result, tuple)
        work = result[-1] if in_tuple else result
        self.open[dist.Work.unbox(work)] = Sent(words, span, before, list(results))
        return (filled, work) if in_tuple else work

    def _written_down(self, op: str, given: dict[str, Any], group: Any) -> tuple[str, int]:
        """Which call this is, in words, and its span. Its bytes are those that NCCL would send."""
        recorder, used = self.watch.recorder, tensors(given)
        where = self.calls.where(group, used[0].device)._replace(gloo=False)
        number = self.calls.made[where.axis, where.ranks]
        rows = list(self.calls.rows(op, given, payload(op, given), where, self.watch.label))
        if all(name not in POINT_TO_POINT for _, name, *_ in rows):
            self.strict.collective(where.ranks, op, max(used, key=Tensor.numel))
        span = recorder.launch(f"comm:{where.axis}", recorder.cut(), recorder.clock.host())
        for row in rows:
            recorder.call((*row, span))
        return f"{op} #{number}", span

    @contextlib.contextmanager
    def _waiting(self, work: Any, *_: Any) -> Iterator[None]:
        sent = self.open.pop(work, None)
        if sent is None:  # it has been waited for
            yield
            return
        recorder = self.watch.recorder
        recorder.enter("wait", after=(sent.span,))
        self.context.note(sent.words)
        try:
            with _disable_current_modes():  # a reduce-scatter copies here from gloo's own tensor
                yield
                sent.arrive()
        finally:
            self.context.note("")
            recorder.leave()
            recorder.settled(sent.span)


def _refuse(op: str, given: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Refuse calls whose results would not arrive, and what NCCL does not have."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(BELOW):
        frame = frame.f_back
    if frame.f_code.co_filename != dist.distributed_c10d.__file__:
        raise RuntimeError(
            f"{op} goes around what is counted: call the functions of torch.distributed"
        )
    for tensor in tensors(given):
        if not tensor.is_contiguous():
            raise illegal(op, tuple(tensor.shape), "not contiguous", "tensor.contiguous()")
    if given.get("tag"):
        raise illegal("tag", given["tag"], ORDER, "no tag, and the same order on both ranks")
    peer = next((given[name] for name in PEER if name in given), None)
    if peer is not None and not 0 <= peer < group.size():
        raise illegal("rank", peer, "no member of the group", f"0 to {group.size() - 1}")
    if peer == group.rank() and op in POINT_TO_POINT:
        legal = "another rank of the group; within a rank, copy the tensor"
        raise illegal("peer", peer, "a rank sends nothing to itself", legal)


@contextlib.contextmanager
def _unseen(*_: Any) -> Iterator[None]:
    """The tensor that a barrier makes is none of the answer's."""
    with _disable_current_modes():
        yield


def _no_tensor(given: Any, name: str, *_: Any) -> Any:
    if not isinstance(given, Tensor):
        legal = "a tensor; .grad is None without a gradient"
        raise illegal(name, given, "it cannot be sent or filled", legal)
    return contextlib.nullcontext()


def _no_future(*_: Any) -> Any:
    raise RuntimeError("a call's future says nothing of a wait: call its wait()")


class Direct(Transport):
    """torch.distributed itself, whose calls are seen."""

    def post(self, call: Call) -> Posted:
        span = self.recorder.launch(self.lane, (), self.recorder.clock.host())
        return Posted(span, self.start(call, call.tensors, self.group), call.finish)


class Given(Group):
    """All ranks, for an answer that is given a group. What it writes down itself no one reads."""

    def __init__(self, group: Group, number: int, process_group: dist.ProcessGroup) -> None:
        context, ranks = group.context, group.ranks
        settings = {"context": context, "process_group": process_group, "transport": Direct}
        unread = Recorder(rank=context.rank, world_size=group.size, device="cpu")
        super().__init__(ranks, axis="world", recorder=unread, **settings)
        self._strict = Strict(context, axis=f"group of answer {number}")

    def barrier(self, *, phase: str = "control") -> None:
        dist.barrier(self.process_group)
