"""Data parallelism's rows of a step: the counterpart of parallel/data_parallel.py."""

from __future__ import annotations

from collections.abc import Sequence

from paralab.theory import memory
from paralab.theory.formulas import bucket_copy_work
from paralab.theory.predict_rows import Pieces, RankRows


class DataParallelRows:
    """The launches and waits of one form of gradient sync; see parallel/data_parallel.py.

    A step calls `forward` and `leave` around a part's forward, `backward` before its backward,
    `complete` with the names of gradients that are now complete (``every``: in each micro-batch,
    else in the last), `finish` after the last backward and `updated` after the optimizer.
    """

    every = False

    def __init__(self, rank: RankRows) -> None:
        self.rank, self.plan, self.item = rank, rank.plan, rank.item
        counts = memory.rank_sizes(rank.model, rank.plan, rank.rank)
        self.sizes = {n: size for n, size in counts.items() if rank.model.trainable(n)}
        self.buckets = memory.gradient_buckets(rank.model, rank.plan, rank.rank)
        names = list(self.sizes)
        self.missing = [{names[i] for i in params} for params, _ in self.buckets]
        self.bucket_of = {name: b for b, missing in enumerate(self.missing) for name in missing}
        self.next = 0  # the bucket that leaves next
        self.pending: list[int] = []  # positions of launches not yet waited for

    def forward(self, parts: Sequence[str], at: int, pieces: Pieces) -> None:
        pass  # parameters are there

    leave = backward = forward

    def complete(self, names: Sequence[str], pieces: Pieces) -> None:
        """Pack every bucket that is now complete, and let those leave whose turn it is."""
        for number in sorted({self.bucket_of[n] for n in names if n in self.bucket_of}):
            missing = self.missing[number]
            if missing and missing <= missing.intersection(names):
                params, size = self.buckets[number]
                pieces.cut()
                work = bucket_copy_work(size // self.item, len(params))
                self.rank.compute(work, "copy")
                missing.clear()
                while self._may_launch():
                    pieces.cut()
                    self._launch(self.buckets[self.next][1])
                    self.next += 1
            missing.difference_update(names)

    def _may_launch(self) -> bool:
        """Whether the bucket whose turn it is may leave; they leave in order."""
        overlapped = self.plan.grad_sync == "overlapped"
        return overlapped and self.next < len(self.buckets) and not self.missing[self.next]

    def _launch(self, payload: int) -> None:
        ranks = self.plan.ranks("dp", self.rank.rank)
        self.pending.append(self.rank.launch("all_reduce", payload, ranks, "dp", "grad_sync"))

    def finish(self) -> None:
        """After backward: wait for what is under way, or send what has not left."""
        if self.plan.dp == 1:
            return
        if self.plan.grad_sync == "overlapped":
            for position in self.pending:
                self.rank.wait(position)
            return
        payloads = [size for _, size in self.buckets]
        if self.plan.grad_sync == "naive":
            payloads = [self.item * count for count in self.sizes.values()]
        for payload in payloads:
            self._launch(payload)
            self.rank.wait(self.pending[-1])

    def updated(self) -> None:
        pass  # every rank has made the same update
