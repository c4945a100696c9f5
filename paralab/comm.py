"""Communication between ranks: every byte that a step sends passes here and is written down.

A `Group` is one communicator: some ranks along one axis of the plan. Each call but `barrier` is
asynchronous and returns a `Pending`; ``.wait()`` is where the rank is idle, and it is recorded as a
wait, never as communication. How a call reaches torch.distributed, by gloo or NCCL, is in
transports.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paralab.checks import choice, illegal, instance
from paralab.instruments.recorder import Recorder
from paralab.strict import Strict
from paralab.theory.traffic import Row, row
from paralab.transports import Call, Gloo, Nccl, Posted, Staged, Transport


class Group:
    """Ranks that communicate with each other, and the ledger of what they sent.

    ranks      global ranks, in group order; this rank is one of them
    axis       the plan's axis the group lies on: "dp", "tp", "pp", "replica", "tp:row", "world" ...
    context    the rank's context: who it is, its device, its backend, `note`
    transport  the class that carries the calls; by default NCCL's where there is NCCL, and where
               gloo meets CUDA the way through host buffers

    ``phase`` says in the ledger what a call was for; by default "grad_sync" on axis "dp" and "data"
    on any other.
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
        if transport is None:
            on_cuda = context.device.startswith("cuda")
            transport = Gloo if not on_cuda else Staged if context.backend == "gloo" else Nccl
        settings = {"axis": axis, "context": context, "recorder": recorder}
        self.transport = transport(self.ranks, group=self.process_group, **settings)
        self._calls = 0
        self._open: dict[int, str] = {}  # calls that nobody has waited for: number, operation
        self._subgroups: dict[tuple, Group | None] = {}
        self._rows: dict[tuple, Row] = {}  # of calls alike: what is written down of each
        self._strict = Strict(context, axis=axis) if context.strict else None

    def subgroup(self, ranks: Sequence[int], *, axis: str) -> Group | None:
        """Some of these ranks as a group of their own; None on the others.

        Every rank of the world calls this on its world group, with the same arguments and in the
        same order. Asked for again, the group is the one made before. NCCL connects a group at its
        first call, in which all members have to take part: that one is made here.
        """
        ranks = tuple(ranks)
        if self.size < self.context.world_size:
            raise RuntimeError("only the group of all ranks has subgroups: every rank has to ask")
        if not ranks or len(set(ranks).intersection(self.ranks)) < len(ranks):
            raise illegal("ranks", ranks, "not different ranks", f"some of {self.ranks}")
        key = (ranks, axis)
        if key == (self.ranks, self.axis):
            return self
        if key not in self._subgroups:
            settings = {
                "context": self.context,
                "recorder": self.recorder,
                "process_group": self._new_group(ranks),
                "transport": type(self.transport),
            }
            made = Group(ranks, axis=axis, **settings) if self.context.rank in ranks else None
            if made is not None and made.size > 1 and isinstance(made.transport, Nccl):
                made.barrier(phase="setup")
            self._subgroups[key] = made
        return self._subgroups[key]

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """torch gives it a limit of its own, 10 minutes with NCCL, if it is told none."""
        return dist.new_group(list(ranks), timeout=timedelta(seconds=self.context.limit))

    def open_ways(self, rings: Sequence[Sequence[int]]) -> None:
        """Make a communicator of two ranks, with a CUDA stream, for each direction between two
        neighbours in a pipeline: a *way*.

        Every rank of the world calls this at the same point, with all rings, one of which is this
        group. Then each way carries one message: NCCL connects two ranks when both have come to
        their first call, and all members go through theirs in one order.
        """
        mine, ways = self.context.rank, self.transport.ways
        for ring in rings:
            pairs = {tuple(sorted((a, b))) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)}
            for low, high in sorted(pairs):
                for source, target in ((low, high), (high, low)):
                    made = self._new_group([low, high])
                    if mine in (low, high):
                        way = ("send", target) if mine == source else ("recv", source)
                        ways[way] = made, torch.cuda.Stream(self.context.device)
        for side, peer in ways:
            first = torch.zeros(1, device=self.context.device)
            self.exchange([(side, first, peer)], phase="setup").wait()

    # ---- collectives ------------------------------------------------------------------------
    def all_reduce(self, tensor: Tensor, *, phase: str | None = None) -> Pending:
        """Sum ``tensor`` over the group, in place."""
        return self._call("all_reduce", [tensor], phase, reads=[tensor])

    def all_gather(self, output: Tensor, part: Tensor, *, phase: str | None = None) -> Pending:
        """``output`` = the members' ``part`` one after the other, (n * numel,)."""
        return self._call("all_gather", [output, part], phase)

    def all_to_all(self, output: Tensor, tensor: Tensor, *, phase: str | None = None) -> Pending:
        """Part i of ``tensor`` goes to member i; ``output`` holds what the members sent here."""
        return self._call("all_to_all", [output, tensor], phase)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, *, phase: str | None = None
    ) -> Pending:
        """``output`` = this rank's part of the members' sum. tensor: (n * output.numel(),)."""
        return self._call("reduce_scatter", [output, tensor], phase)

    def broadcast(self, tensor: Tensor, *, root: int, phase: str | None = None) -> Pending:
        """Every member gets global rank ``root``'s tensor, on gloo down a binomial tree."""
        fills = [tensor] * (self.context.rank != root)
        return self._call("broadcast", [tensor], phase, fills=fills, root=root)

    def reduce(self, tensor: Tensor, *, root: int, phase: str | None = None) -> Pending:
        """Global rank ``root``'s tensor becomes the members' sum; the others keep theirs."""
        return self._call("reduce", [tensor], phase, reads=[tensor], root=root)

    def barrier(self, *, phase: str = "control") -> None:
        """No rank goes on before all are here, with NCCL its host and its device."""
        self.all_reduce(torch.zeros(1, device=self.context.device), phase=phase).wait()
        if isinstance(self.transport, Nccl):  # the wait above orders the compute stream alone
            torch.cuda.current_stream().synchronize()

    def _call(
        self,
        op: str,
        tensors: list[Tensor],
        phase: str | None,
        *,
        fills: Sequence[Tensor] | None = None,
        reads: Sequence[Tensor] = (),
        root: int | None = None,
    ) -> Pending:
        """A collective. Its payload is the largest tensor; by default it fills the first one."""
        _check_sizes(op, tensors, self.size)
        if root is not None and root not in self.ranks:
            raise illegal("root", root, "not a rank of this group", f"one of {self.ranks}")
        payload = max(tensors, key=Tensor.numel)
        if self._strict is not None:
            self._strict.collective(self.ranks, op, payload)
        call = Call(
            op=op,
            tensors=tensors,
            fills=tensors[:1] if fills is None else fills,
            reads=reads,
            root=() if root is None else (root,),
            number=self._calls,
        )
        row = (op, payload.nbytes, -1 if root is None else root)
        return self._noted(self.transport.post(call), op, [row], phase)

    # ---- point to point -------------------------------------------------------------------------
    def send(self, tensor: Tensor, *, to: int, phase: str | None = None) -> Pending:
        """Send to global rank ``to``; matched with its receives in order, never by tag."""
        return self.exchange([("send", tensor, to)], phase=phase)

    def recv(self, tensor: Tensor, *, source: int, phase: str | None = None) -> Pending:
        """Receive from global rank ``source`` into ``tensor``."""
        return self.exchange([("recv", tensor, source)], phase=phase)

    def exchange(
        self, parts: Sequence[tuple[str, Tensor, int]], *, phase: str | None = None
    ) -> Pending:
        """Several sends and receives at once, ("send" | "recv", tensor, global rank) each.

        What two ranks send each other belongs into one exchange: NCCL runs a pair's calls one after
        the other, so two sends that face each other would wait for ever.
        """
        self._check_ways(parts)
        if self._strict is not None:
            self.recorder.enter("wait")  # a strict send waits for its receive, as NCCL may
            self.blocked_in("exchange", [(side, peer) for side, _, peer in parts])
            self._strict.rendezvous(self.ranks, parts)
            self.blocked_in()
            self.recorder.leave()
        first = parts[0][0]
        call = Call(
            op="exchange",
            tensors=[tensor for _, tensor, _ in parts],
            fills=[tensor for side, tensor, _ in parts if side == "recv"],
            ways=[(side, peer) for side, _, peer in parts],
            number=self._calls,
        )
        rows = [(side, tensor.nbytes, peer) for side, tensor, peer in parts]
        return self._noted(self.transport.post(call), first, rows, phase)

    def _check_ways(self, parts: Sequence[tuple[str, Tensor, int]]) -> None:
        """A message for a rank that there is not would be waited for until the time is over."""
        if not parts:
            legal = '[("send", tensor, rank), ("recv", tensor, rank)]'
            raise illegal("parts", parts, "nothing to send or to receive", legal)
        for side, tensor, peer in parts:
            choice("side", side, ("send", "recv"))
            instance("tensor", tensor, Tensor, "a torch.Tensor")
            if peer not in self.ranks or peer == self.context.rank:
                name = "to" if side == "send" else "source"
                others = tuple(rank for rank in self.ranks if rank != self.context.rank)
                raise illegal(name, peer, "not another rank of this group", f"one of {others}")

    # ---- what is written down -------------------------------------------------------------------
    def _noted(
        self, posted: Posted, op: str, rows: list[tuple[str, int, int]], phase: str | None
    ) -> Pending:
        """Write the rows (operation, payload bytes, root or peer) of a call that was posted."""
        number, phase = self._calls, phase or self.phase
        how = {"phase": phase, "node_of": self.context.nodes.__getitem__}
        for what in rows:
            name, payload, peer = what
            made = self._rows.get((what, phase))
            if made is None:
                group = self.axis, self.ranks, self.context.rank
                made = row(name, *group, peer=peer, payload=payload, **how)
                self._rows[what, phase] = made
            self.recorder.call((number, *made, posted.span))
        self._calls += 1
        self._open[number] = op
        return Pending(self, posted, (op, number))

    def end(self) -> list[str]:
        """The calls of this group, and of its subgroups, that nobody has waited for, in words.

        Called after the last one. Raises OrderError if strict, and if another member has made more.
        """
        if self._strict is not None:
            self._strict.end(self.ranks)
        own = [self.transport.words(op, number) for number, op in self._open.items()]
        inner = filter(None, self._subgroups.values())
        return [*own, *(words for group in inner for words in group.end())]

    def blocked_in(self, op: str = "", call: object = "") -> None:
        """Note why this rank is idle, for the watchdog; without arguments: it computes again."""
        self.context.note(self.transport.words(op, call) if op else "")


def _check_sizes(op: str, tensors: Sequence[Tensor], n: int) -> None:
    """Refuse tensors that do not fit each other, in a collective of n ranks: gloo sends what lies
    behind the end of one in memory, or leaves a part of it out.
    """
    for tensor in tensors:
        instance("tensor", tensor, Tensor, "a torch.Tensor")
    if len(tensors) == 1:
        return
    output, given = (tensor.numel() for tensor in tensors)
    if op == "all_gather":
        right, why = n * given, f"{n} ranks have {given} elements each"
    elif given % n:
        raise illegal("tensor.numel()", given, f"not {n} equal parts", f"a multiple of {n}")
    elif op == "all_to_all":
        right, why = given, "as many elements come in as go out"
    else:
        right, why = given // n, f"each of {n} ranks gets one of {n} parts of {given} elements"
    if output != right:
        raise illegal("output.numel()", output, why, str(right))


def everyone(context: Any, *, axis: str = "world") -> Group:
    """All ranks as a group with a recorder of its own, in which nothing else is written down."""
    recorder = Recorder(rank=context.rank, world_size=context.world_size, device=context.device)
    return Group(range(context.world_size), axis=axis, context=context, recorder=recorder)


class Pending:
    """A call in flight. ``wait()`` returns when its result may be read; twice is harmless."""

    __slots__ = ("_group", "_posted", "_what", "_done")

    def __init__(self, group: Group, posted: Posted, what: tuple[str, int]) -> None:
        self._group, self._posted, self._what, self._done = group, posted, what, False

    def wait(self) -> None:
        wait_all([self])

    def _settle(self) -> None:
        """Hold the rank (with NCCL: its compute stream) until it is over; raises what the transport
        raised.
        """
        works = self._posted.works
        while works:
            works.pop(0).wait()  # each holds its tensors, and is let go before the next
        self._group.recorder.settled(self._posted.span)

    def _end(self) -> None:
        self._done = True
        self._group._open.pop(self._what[1], None)
        if self._posted.finish is not None:
            self._posted.finish()


def wait_all(calls: Sequence[Pending]) -> None:
    """Wait for several calls of one group: one wait in the picture, as nothing runs in between."""
    calls = [call for call in calls if not call._done]
    if not calls:
        return
    group = calls[0]._group
    group.recorder.enter("wait", after=tuple(call._posted.span for call in calls))
    for call in calls:
        group.blocked_in(*call._what)
        call._settle()
    group.blocked_in()
    group.recorder.leave()
    for call in calls:
        call._end()
