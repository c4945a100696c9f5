"""Communication between ranks: every byte that a step sends passes through here and is recorded.

A `Group` is one communicator: ranks along one axis of the plan. Each call but `barrier` is
asynchronous and returns a `Pending`. A rank is idle in its ``.wait()``, and the timeline shows this
time as a wait, never as communication. transports.py hands the calls to torch.distributed, on gloo
or NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paralab.checks import choice, illegal, instance
from paralab.instruments.recorder import Recorder
from paralab.ranks.hangs import rank_names
from paralab.strict import Strict
from paralab.theory.traffic import row
from paralab.transports import Call, Gloo, Nccl, Posted, Staged, Transport, Way


class Group:
    """Ranks that communicate with each other; it records what this rank sends them.

    ranks      global ranks, in group order; this rank is one of them
    axis       the plan's axis that they lie on: "dp", "tp", "pp", "replica", "tp:row", "world" ...
    context    this rank's `RankContext`
    transport  the class that carries the calls; default: `Gloo` for CPU tensors, for tensors on a
               GPU `Nccl`, or `Staged` where the backend is gloo

    A call's ``phase`` is its purpose, a column of the ledger; default: "grad_sync" on axis "dp",
    "data" on any other.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        axis: str,
        context: Any,
        recorder: Recorder,
        process_group: dist.ProcessGroup | None = None,
        transport: type[Transport] | None = None,
    ) -> None:
        self.ranks, self.axis, self.context, self.recorder = tuple(ranks), axis, context, recorder
        self.size, self.index = len(ranks), list(ranks).index(context.rank)
        self.process_group = dist.group.WORLD if process_group is None else process_group
        self.phase = "grad_sync" if axis == "dp" else "data"
        if transport is None and context.device.startswith("cuda"):
            transport = Staged if context.backend == "gloo" else Nccl
        settings = {"axis": axis, "context": context, "recorder": recorder}
        self.transport = (transport or Gloo)(self.ranks, group=self.process_group, **settings)
        self._calls = 0
        self._unwaited: dict[int, str] = {}  # {number of a call not waited for: the call in words}
        self._subgroups: dict[tuple, Group | None] = {}
        place = {"axis": axis, "ranks": self.ranks, "rank": context.rank}
        made = partial(row, **place, node_of=context.nodes.__getitem__)
        self._row = cache(made)  # calls that are alike have equal rows
        self._strict = Strict(context, axis=axis) if context.strict else None

    def subgroup(self, ranks: Sequence[int], *, axis: str) -> Group | None:
        """The group of ``ranks``; None on a rank that is not one of them.

        Every rank calls this on its world group, with the same arguments and in the same order. A
        second call for the same ranks and axis returns the same group. NCCL connects a communicator
        at its first call, in which all members have to take part, so that call is made here.
        """
        ranks = tuple(ranks)
        if self.size < self.context.world_size:
            raise RuntimeError(
                f"this group has only the ranks {self.ranks}: call subgroup on the group of all "
                "ranks, because every rank has to call it"
            )
        if not ranks or len(set(ranks).intersection(self.ranks)) < len(ranks):
            why, legal = "not different ranks of this group", f"one or more of {self.ranks}"
            raise illegal("ranks", ranks, why, legal)
        ranks = tuple(map(int, ranks))  # NumPy's would make other keys in the strict mode's store
        key = (ranks, axis)
        if key == (self.ranks, self.axis):
            return self
        if key not in self._subgroups:
            settings = {"axis": axis, "context": self.context, "recorder": self.recorder}
            settings |= {"process_group": self._new_group(ranks), "transport": type(self.transport)}
            group = Group(ranks, **settings) if self.context.rank in ranks else None
            if group is not None and group.size > 1 and isinstance(group.transport, Nccl):
                group.barrier(phase="setup")
            self._subgroups[key] = group
        return self._subgroups[key]

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """With the time limit of the run: torch's default is another, 10 minutes with NCCL."""
        return dist.new_group(list(ranks), timeout=timedelta(seconds=self.context.limit))

    def open_ways(self, rings: Sequence[Sequence[int]]) -> None:
        """Make a *way* for each direction between two neighbours of a pipeline: a communicator of
        these two ranks, with a CUDA stream.

        rings  the ranks of every pipeline, this group among them; the last stage is a neighbour of
               the first, as interleaving needs it

        Every rank of the world calls this at the same point. Each way then carries one message,
        because NCCL connects two ranks at their first call, for which both must be there: all ranks
        go through their ways in the same order.
        """
        me, ways = self.context.rank, self.transport.ways
        for ring in rings:
            pairs = {tuple(sorted((a, b))) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)}
            for low, high in sorted(pairs):
                for source, target in ((low, high), (high, low)):
                    process_group = self._new_group([low, high])
                    if me in (low, high):
                        way = ("send", target) if me == source else ("recv", source)
                        ways[way] = process_group, torch.cuda.Stream(self.context.device)
        for side, peer in ways:
            message = torch.zeros(1, device=self.context.device)
            self.exchange([(side, message, peer)], phase="setup").wait()

    # ---- collectives ------------------------------------------------------------------------
    def all_reduce(self, tensor: Tensor, *, phase: str | None = None) -> Pending:
        """Sum ``tensor`` over the group, in place."""
        return self._call("all_reduce", [tensor], phase)

    def all_gather(self, output: Tensor, part: Tensor, *, phase: str | None = None) -> Pending:
        """Concatenate the members' ``part`` into ``output``, of shape (n * part.numel(),)."""
        return self._call("all_gather", [output, part], phase)

    def all_to_all(self, output: Tensor, tensor: Tensor, *, phase: str | None = None) -> Pending:
        """Send part i of ``tensor`` to member i; ``output`` gets the received parts in order."""
        return self._call("all_to_all", [output, tensor], phase)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, *, phase: str | None = None
    ) -> Pending:
        """``output`` = this rank's part of the summed ``tensor``, (n * output.numel(),)."""
        return self._call("reduce_scatter", [output, tensor], phase)

    def broadcast(self, tensor: Tensor, *, root: int, phase: str | None = None) -> Pending:
        """Copy global rank ``root``'s tensor to every member, on gloo down a binomial tree."""
        return self._call("broadcast", [tensor], phase, root=root)

    def reduce(self, tensor: Tensor, *, root: int, phase: str | None = None) -> Pending:
        """Sum into global rank ``root``'s tensor; the other members' tensors stay as they are."""
        return self._call("reduce", [tensor], phase, root=root)

    def barrier(self, *, phase: str = "control") -> None:
        """Wait until all members have called it; with NCCL the host waits as well as the device."""
        self.all_reduce(torch.zeros(1, device=self.context.device), phase=phase).wait()
        if isinstance(self.transport, Nccl):  # the wait above holds the compute stream only
            torch.cuda.current_stream().synchronize()

    def _call(
        self, op: str, tensors: list[Tensor], phase: str | None, root: int | None = None
    ) -> Pending:
        """Post a collective. It fills the first tensor, except on the root of a broadcast; its
        payload is the largest one.
        """
        _check_tensors(op, tensors, self.size)
        if root is not None and root not in self.ranks:
            raise illegal("root", root, "not a rank of this group", f"one of {self.ranks}")
        root = root if root is None else int(root)
        payload = max(tensors, key=Tensor.numel)
        if self._strict is not None:
            self._strict.collective(self.ranks, op, payload, root)
        fills = [] if op == "broadcast" and root == self.context.rank else tensors[:1]
        call = Call(op, self._words(op), tensors, fills, root=() if root is None else (root,))
        return self._post(call, [(op, payload.nbytes, -1 if root is None else root)], phase)

    # ---- point to point -------------------------------------------------------------------------
    def send(self, tensor: Tensor, *, to: int, phase: str | None = None) -> Pending:
        """Send to global rank ``to``. Sends and receives match in order, never by tag."""
        return self.exchange([("send", tensor, to)], phase=phase)

    def recv(self, tensor: Tensor, *, source: int, phase: str | None = None) -> Pending:
        """Receive from global rank ``source`` into ``tensor``."""
        return self.exchange([("recv", tensor, source)], phase=phase)

    def exchange(
        self, parts: Sequence[tuple[str, Tensor, int]], *, phase: str | None = None
    ) -> Pending:
        """Post several messages as one call; a part is ("send" | "recv", tensor, global rank).

        Two ranks that send to each other have to do it in one exchange: NCCL runs the calls of a
        pair one after the other, so that two opposite sends would wait for each other for ever.
        """
        self._check_ways(parts)
        parts = [(side, tensor, int(peer)) for side, tensor, peer in parts]
        ways = [(side, peer) for side, _, peer in parts]
        op = ways[0][0] if len(ways) == 1 else "exchange"
        words = self._words(op, ways)
        if self._strict is not None:
            with self.recorder.span("wait"):  # for the receive, as a send on NCCL may wait
                self.context.note(words)
                self._strict.rendezvous(self.ranks, parts)
                self.context.note("")
        tensors = [tensor for _, tensor, _ in parts]
        fills = [tensor for side, tensor, _ in parts if side == "recv"]
        call = Call(op, words, tensors, fills, ways=ways)
        rows = [(side, tensor.nbytes, peer) for side, tensor, peer in parts]
        return self._post(call, rows, phase)

    def _check_ways(self, parts: Sequence[tuple[str, Tensor, int]]) -> None:
        """Refuse a message whose other end is no other member: its wait would end in a timeout."""
        if not parts:
            legal = '[("send", tensor, rank), ("recv", tensor, rank)]'
            raise illegal("parts", parts, "nothing to send or to receive", legal)
        for side, tensor, peer in parts:
            choice("side", side, ("send", "recv"))
            instance("tensor", tensor, Tensor, "a torch.Tensor")
            if peer not in self.ranks or peer == self.context.rank:
                name = "to" if side == "send" else "source"
                others = tuple(rank for rank in self.ranks if rank != self.context.rank)
                legal = f"one of {others}" if others else "a group of at least two ranks"
                raise illegal(name, peer, "not another rank of this group", legal)

    # ---- the record of the calls ----------------------------------------------------------------
    def _post(self, call: Call, rows: list[tuple[str, int, int]], phase: str | None) -> Pending:
        """Post a call and record it; rows: (operation, payload bytes, peer or root or -1)."""
        posted, number = self.transport.post(call), self._calls
        for op, payload, peer in rows:
            facts = self._row(op, peer=peer, payload=payload, phase=phase or self.phase)
            self.recorder.call((number, *facts, posted.span))
        self._calls += 1
        self._unwaited[number] = call.words
        return Pending(self, number, posted)

    def _words(self, op: str, ways: Sequence[Way] = ()) -> str:
        """The next call in words: "send #3 to rank 1 on axis pp, ranks 0,1, step 2"."""
        sides, peers = {side for side, _ in ways}, sorted({peer for _, peer in ways})
        preposition = {("send",): "to", ("recv",): "from"}.get(tuple(sides), "with")
        ends = f" {preposition} {rank_names(peers)}" if ways else ""
        where = f"axis {self.axis}, ranks {','.join(map(str, self.ranks))}"
        return f"{op} #{self._calls}{ends} on {where}, step {self.recorder.step}"

    def end(self) -> list[str]:
        """Check a group after its last call. Returns a description of each call of it and of its
        subgroups that this rank has not waited for. In a strict group, raises OrderError if
        another member has made more calls.
        """
        if self._strict is not None:
            self._strict.end(self.ranks)
        subgroups = filter(None, self._subgroups.values())
        return [*self._unwaited.values(), *(words for group in subgroups for words in group.end())]


def _check_tensors(op: str, tensors: Sequence[Tensor], n: int) -> None:
    """Refuse tensors whose types or sizes do not fit a collective of ``n`` ranks: gloo would read
    past the end of one, or leave a part of it out.
    """
    for tensor in tensors:
        instance("tensor", tensor, Tensor, "a torch.Tensor")
    if len(tensors) == 1:
        return
    kinds = [tensor.dtype for tensor in tensors]
    if kinds[0] != kinds[1]:
        raise illegal("output.dtype", kinds[0], f"the other tensor is of {kinds[1]}", str(kinds[1]))
    output, given = (tensor.numel() for tensor in tensors)
    if op != "all_gather" and given % n:
        why = f"it cannot be cut into {n} equal parts, one for each rank"
        raise illegal("tensor.numel()", given, why, f"a multiple of {n}")
    right = {"all_gather": n * given, "all_to_all": given, "reduce_scatter": given // n}[op]
    if output != right:
        why = f"{op} of {given} elements on each of {n} ranks gives {right}"
        raise illegal("output.numel()", output, why, str(right))


def everyone(context: Any, *, axis: str = "world") -> Group:
    """The group of all ranks, with a new recorder that no other group uses."""
    recorder = Recorder(rank=context.rank, world_size=context.world_size, device=context.device)
    return Group(range(context.world_size), axis=axis, context=context, recorder=recorder)


class Pending:
    """A call in flight. After ``wait()`` its result may be read; waiting twice is harmless."""

    __slots__ = ("_group", "_number", "_posted")

    def __init__(self, group: Group, number: int, posted: Posted) -> None:
        self._group, self._number, self._posted = group, number, posted

    def wait(self) -> None:
        """Hold the rank (with NCCL: its compute stream) until the call is over. Raises what the
        transport raised.
        """
        group, posted = self._group, self._posted
        if self._number not in group._unwaited:
            return
        with group.recorder.span("wait", after=(posted.span,)):
            group.context.note(group._unwaited[self._number])
            while posted.works:
                posted.works.pop(0).wait()  # pop: a work keeps its tensors alive
            group.recorder.settled(posted.span)
            group.context.note("")
        del group._unwaited[self._number]
        if posted.finish is not None:
            posted.finish()
