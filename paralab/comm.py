"""The only door to torch.distributed: every byte passes here and is written down.

A `Group` is one communicator: some ranks along one axis of the plan. Each call is asynchronous and
returns a `Pending`; ``.wait()`` is where the rank stands idle, and it is recorded as a wait, never
as communication.

What gloo does badly is done better with what it does well (bytes counted on the loopback
interface): its reduce-scatter is n all-reduces, twice the minimum, so ours is an all-to-all and a
local sum; its reduce sends up to 2.3 times the minimum, so ours is direct sends and a local sum.
Both add in rank order.

[Note: CUDA] With NCCL a group's calls run on a stream of their own and nothing blocks the host. A
call is completed by an event of its own, and whoever waits for it waits for that event alone, not
for what was put on the stream since: a gather that is fetched ahead must not delay the compute that
waits for the gather before it. Between pipeline ranks every way, a peer and a direction, has a
communicator and a stream of its own (`open_ways`), so that a receive that is posted ahead does not
hold up a send. Gloo cannot read device memory: there, tensors go through the host (staging.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paralab.checks import illegal
from paralab.instruments.recorder import Recorder
from paralab.pending import Arrivals, Lent, Pending
from paralab.ranks.lookout import Lookout
from paralab.staging import HostStaging
from paralab.strict import Strict
from paralab.theory.traffic import POINT_TO_POINT, wire_bytes

# torch 2.13 renamed it; the old name still works there, with a warning.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Group:
    """Ranks that communicate with each other, and the ledger of what they sent.

    ranks     global ranks, in group order; this rank is one of them
    axis      the plan's axis the group lies on: "dp", "tp", "pp", "world"
    context   the rank's context: who it is, its device, its backend, `note`
    stage     force the way through host buffers (tests); by default where gloo meets CUDA

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
        stage: bool | None = None,
    ) -> None:
        self.ranks, self.axis, self.context, self.recorder = tuple(ranks), axis, context, recorder
        self.size, self.index = len(ranks), list(ranks).index(context.rank)
        self.process_group = dist.group.WORLD if process_group is None else process_group
        self.level = self._level_of(ranks)
        self.phase = "grad_sync" if axis == "dp" else "data"
        on_cuda = context.device.startswith("cuda")
        stage = (on_cuda and context.backend == "gloo") if stage is None else stage
        self.staging = HostStaging(recorder) if stage else None
        self.stream = torch.cuda.Stream(context.device) if on_cuda and not stage else None
        if self.stream is not None and recorder.lookout is None:
            recorder.lookout = Lookout(context.note, recorder.clock.passed, context.alive)
            recorder.lookout.start()
        # {(peer, "send" or "recv"): its communicator and stream}, where they are opened
        self._ways: dict[tuple[int, str], tuple[dist.ProcessGroup, Any]] = {}
        self._calls = 0
        self._arrivals = Arrivals()
        self._subgroups: dict[tuple, Group | None] = {}
        self._strict = Strict(context, axis=axis) if context.strict else None

    def _level_of(self, ranks: Sequence[int]) -> str:
        return "inter" if len({self.context.nodes[r] for r in ranks}) > 1 else "intra"

    def subgroup(self, ranks: Sequence[int], *, axis: str) -> Group | None:
        """Some of these ranks as a group of their own; None on the others.

        Every rank of the world calls this on its world group, with the same arguments and in the
        same order. Asked for again, the group is the one made before.
        """
        ranks = tuple(ranks)
        if self.size < self.context.world_size:
            raise RuntimeError("only the group of all ranks has subgroups: every rank has to ask")
        if not ranks or len(set(ranks).intersection(self.ranks)) < len(ranks):
            raise illegal("ranks", ranks, "not different ranks", f"some of {self.ranks}")
        if (ranks, axis) == (self.ranks, self.axis):
            return self
        key = (ranks, axis)
        if key not in self._subgroups:
            settings = {
                "context": self.context,
                "recorder": self.recorder,
                "process_group": dist.new_group(list(ranks)),
                "stage": self.staging is not None,
            }
            member = self.context.rank in ranks
            self._subgroups[key] = Group(ranks, axis=axis, **settings) if member else None
        return self._subgroups[key]

    def open_ways(self, rings: Sequence[Sequence[int]]) -> None:
        """Give every way between neighbours in a ring of ranks its own communicator and stream.

        Every rank of the world calls this at the same point, with all rings, one of which is this
        group. Then each way carries one message: NCCL connects two ranks when both have come to
        their first call, and all members go through theirs in one order.
        """
        mine = self.context.rank
        for ring in rings:
            pairs = {tuple(sorted((a, b))) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)}
            for low, high in sorted(pairs):
                for source, target in ((low, high), (high, low)):
                    made = dist.new_group([low, high])
                    if mine in (low, high):
                        way = (target, "send") if mine == source else (source, "recv")
                        self._ways[way] = made, torch.cuda.Stream(self.context.device)
        for peer, kind in self._ways:
            first = torch.zeros(1, device=self.context.device)
            self.exchange([(kind, first, peer)], phase="setup").wait()

    # ---- collectives ------------------------------------------------------------------------
    def all_reduce(self, tensor: Tensor, *, phase: str | None = None) -> Pending:
        """Sum ``tensor`` over the group, in place."""
        return self._call(
            "all_reduce",
            tensor,
            phase,
            [tensor],
            lambda t: [dist.all_reduce(t, group=self.process_group, async_op=True)],
            writes=[tensor],
            reads=[tensor],
        )

    def all_gather(self, output: Tensor, part: Tensor, *, phase: str | None = None) -> Pending:
        """``output`` = the members' ``part`` one after the other, (n * numel,)."""
        return self._call(
            "all_gather",
            output,
            phase,
            [output, part],
            lambda o, p: [_all_gather(o, p, group=self.process_group, async_op=True)],
            writes=[output],
        )

    def all_to_all(self, output: Tensor, tensor: Tensor, *, phase: str | None = None) -> Pending:
        """Part i of ``tensor`` goes to member i; ``output`` holds what the members sent here."""
        return self._call(
            "all_to_all", tensor, phase, [output, tensor], self._exchange, writes=[output]
        )

    def _exchange(self, output: Tensor, tensor: Tensor) -> list:
        return [dist.all_to_all_single(output, tensor, group=self.process_group, async_op=True)]

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, *, phase: str | None = None
    ) -> Pending:
        """``output`` = this rank's part of the members' sum. tensor: (n * output.numel(),)."""
        if self.context.backend == "nccl":
            return self._call(
                "reduce_scatter",
                tensor,
                phase,
                [output, tensor],
                lambda o, t: [native_reduce_scatter(o, t, group=self.process_group, async_op=True)],
                writes=[output],
            )
        with self.recorder.making("buffers"):
            received = torch.empty_like(tensor)

        def add_up() -> None:
            with self.recorder.span("copy"):
                torch.sum(received.view(self.size, -1), dim=0, out=output.view(-1))

        return self._call(
            "reduce_scatter",
            tensor,
            phase,
            [received, tensor],
            self._exchange,
            writes=[received],
            finish=add_up,
        )

    def broadcast(self, tensor: Tensor, *, root: int, phase: str | None = None) -> Pending:
        """Everybody gets global rank ``root``'s tensor. Gloo forwards it down a binomial tree."""
        options = {"group": self.process_group, "async_op": True}
        return self._call(
            "broadcast",
            tensor,
            phase,
            [tensor],
            lambda t: [dist.broadcast(t, root, **options)],
            writes=[tensor] * (self.context.rank != root),
            peer=root,
        )

    def reduce(self, tensor: Tensor, *, root: int, phase: str | None = None) -> Pending:
        """Global rank ``root``'s tensor becomes the members' sum; the others keep theirs."""
        if self.context.backend == "nccl":
            options = {"group": self.process_group, "async_op": True}
            return self._call(
                "reduce",
                tensor,
                phase,
                [tensor],
                lambda t: [dist.reduce(t, root, **options)],
                writes=[tensor],
                reads=[tensor],
                peer=root,
            )
        others = [r for r in self.ranks if r != root]
        if self.context.rank != root:
            return self._call(
                "reduce",
                tensor,
                phase,
                [tensor],
                lambda t: [dist.isend(t, root, group=self.process_group)],
                writes=[],
                peer=root,
            )
        with self.recorder.making("buffers"):
            parts = [torch.empty_like(tensor) for _ in others]

        def add_up() -> None:
            with self.recorder.span("copy"):
                for part in parts:
                    tensor.add_(part)

        def receive(*into: Tensor) -> list:
            return [
                dist.irecv(p, r, group=self.process_group)
                for p, r in zip(into, others, strict=True)
            ]

        return self._call(
            "reduce", tensor, phase, parts, receive, writes=parts, peer=root, finish=add_up
        )

    def barrier(self, *, phase: str = "control") -> None:
        """No rank goes on before all are here, with NCCL its host and its device."""
        self.all_reduce(torch.zeros(1, device=self.context.device), phase=phase).wait()
        if self.stream is not None:  # the wait above orders the compute stream alone
            torch.cuda.current_stream().synchronize()

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
        if self._strict is not None:
            self.recorder.enter("wait")  # for peers, as where nothing is buffered
            self.blocked_in("exchange", [(kind, peer) for kind, _, peer in parts])
            self._strict.rendezvous(self.ranks, parts)
            self.blocked_in()
            self.recorder.leave()
        tensors = [tensor for _, tensor, _ in parts]
        alone = self._ways.get((parts[0][2], parts[0][0])) if len(parts) == 1 else None
        process_group, stream = alone or (self.process_group, self.stream)

        def post(*staged: Tensor) -> list:
            calls = {"send": dist.isend, "recv": dist.irecv}
            ops = [
                dist.P2POp(calls[kind], tensor, peer, group=process_group)
                for (kind, _, peer), tensor in zip(parts, staged, strict=True)
            ]
            return dist.batch_isend_irecv(ops)

        writes = [tensor for kind, tensor, _ in parts if kind == "recv"]
        return self._launch(
            [(kind, _nbytes(t), peer) for kind, t, peer in parts],
            phase,
            tensors,
            post,
            writes,
            (),
            None,
            stream,
        )

    # ---- the one way out -----------------------------------------------------------------------
    def _call(
        self,
        op: str,
        payload: Tensor,
        phase: str | None,
        tensors: list[Tensor],
        post: Callable,
        *,
        writes: list[Tensor],
        reads: Sequence[Tensor] = (),
        peer: int = -1,
        finish: Callable | None = None,
    ) -> Pending:
        """writes: those of ``tensors`` that the call fills; of these, ``reads`` are read first."""
        if self._strict is not None:
            self._strict.collective(self.ranks, op, payload)
        if self.size == 1:
            post = _alone
        return self._launch(
            [(op, _nbytes(payload), peer)], phase, tensors, post, writes, reads, finish, self.stream
        )

    def _launch(
        self,
        ops: list[tuple[str, int, int]],
        phase: str | None,
        tensors: list[Tensor],
        post: Callable,
        writes: list[Tensor],
        reads: Sequence[Tensor],
        finish: Callable | None,
        stream: Any,
    ) -> Pending:
        recorder, after = self.recorder, self.recorder.cut()
        lane = f"comm:{self.axis}"
        lent = None
        if self.staging is not None:
            tensors, finish = self.staging.through_host(tensors, writes, reads, finish)
        elif recorder.ledger is not None and self.context.backend == "gloo":
            lent = Lent(tensors, recorder.ledger)
            tensors = lent.tensors
        if stream is not None:
            what = self._where(ops[0][0], self._calls)
            works, span = self._on_stream(stream, lane, after, tensors, post, what)
        else:
            span = recorder.launch(lane, after, recorder.clock.host())
            ended = lambda: recorder.completed(span, recorder.clock.host())  # noqa: E731
            works = self._arrivals.watch(post(*tensors), ops, ended)
        for op, payload, peer in ops:
            root = self.ranks.index(peer) if op in ("broadcast", "reduce") else 0
            wire = wire_bytes(op, payload, self.size, self.index, root)
            pair = op in POINT_TO_POINT
            level = self._level_of((self.context.rank, peer)) if pair else self.level
            recorder.call(
                (
                    self._calls,
                    op,
                    self.axis,
                    self.ranks,
                    peer,
                    level,
                    phase or self.phase,
                    payload,
                    wire,
                    span,
                )
            )
        self._calls += 1
        return Pending(self, works, span, (ops[0][0], self._calls - 1), finish, lent)

    def _on_stream(
        self, stream: Any, lane: str, after: tuple, tensors: list[Tensor], post: Callable, what: str
    ) -> tuple[list[Enqueued], int]:
        """NCCL: the stream is the call's lane. See [Note: CUDA]."""
        recorder = self.recorder
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            span = recorder.launch(lane, after, recorder.clock.mark())
            for work in post(*tensors):
                work.wait()  # orders the stream, not the host
            recorder.completed(span, recorder.clock.mark())
            over = torch.cuda.Event()
            over.record(stream)
        recorder.lookout.posted(what, over)
        return [Enqueued(over, tensors)], span

    def settle(self, works: Sequence[Any]) -> None:
        """Hold the rank (with NCCL: its compute stream) until ``works`` are done."""
        for work in works:
            work.wait()

    def over(self, works: Sequence[Any]) -> bool:
        """Whether all of ``works`` are done; asks, does not wait."""
        return all(work.is_completed() for work in works)

    def blocked_in(self, op: str = "", call: object = "") -> None:
        """Tell whoever asks why this rank stands still; no argument: it computes again."""
        if not op:
            self.context.note("")
            return
        self.context.note(self._where(op, call))

    def _where(self, op: str, call: object) -> str:
        where = f"axis {self.axis}, ranks {','.join(map(str, self.ranks))}"
        return f"{op} #{call} on {where}, step {self.recorder.step}"


class Enqueued:
    """A call that was put on a stream: the event that completes it, and its tensors.

    The tensors live as long as the rank has not waited. Behind the wait whatever the allocator
    makes of their memory is ordered behind the call, not before. torch's ``record_stream`` keeps
    memory back until the host happens to see that the stream has passed it; a host that runs ahead
    of its device then holds every unit that ZeRO-3 has gathered.
    """

    __slots__ = ("event", "tensors")

    def __init__(self, event: Any, tensors: Sequence[Tensor]) -> None:
        self.event, self.tensors = event, tensors

    def is_completed(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        """Order the compute stream behind this call alone; the host does not stand still."""
        torch.cuda.current_stream().wait_event(self.event)
        self.tensors = ()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _alone(*parts: Tensor) -> list:
    """A group of one: nothing to send, the result (the first of two) is the own part."""
    if len(parts) == 2:
        parts[0].view(-1).copy_(parts[1].view(-1))
    return []
