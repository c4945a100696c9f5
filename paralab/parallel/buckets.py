"""How parameters are assigned to flat buffers. Torch-free: training and prediction share this rule.

An all-reduce costs alpha + bytes / bandwidth. Thousands of small calls pay alpha thousands of
times; one call for everything cannot start before the last gradient exists. Buckets are the
compromise (PyTorch Distributed, Li+ 2020, arXiv:2006.15704, sec. 3.2.2-3.2.3). Backward produces
gradients from the last layer to the first, so buckets are filled in reverse order of registration.

The parameters in one flat buffer are a `Unit`: one collective moves it, its optimizer step is one
instruction, and ZeRO partitions it into N equal parts, wherever that cuts through a parameter.

    zero_stage=0, dp > 1   gradient buckets of ``bucket_bytes``; "naive" has one per parameter
    zero_stage=1, 2        the same buckets, sharded
    zero_stage=3           one unit per part of the model: embedding, each block, head
    zero_stage=0, dp = 1   the same
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from paralab.parallel.layouts import holding
from paralab.spec import BYTES_PER_ELEMENT, TIED, ModelSpec, Plan


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters in one flat buffer that N ranks partition into equal parts.

    names   names of the parameters, in the order in which they lie in the buffer
    numel   elements of the buffer, padded to a multiple of N
    part    the part of the model that the parameters belong to; "" where a unit spans parts
    waits   with offloaded gradients: whether the rank's shard of the gradient has to stay on the
            device until backward is over, because it is then summed over another axis too
    """

    names: tuple[str, ...]
    numel: int
    part: str = ""
    waits: bool = False


def units(sizes: Mapping[str, int], model: ModelSpec, plan: Plan) -> tuple[Unit, ...]:
    """The flat buffers of one rank, in the order of their numbers.

    sizes  elements of every parameter the rank holds, in order of registration

    Under ZeRO a tied embedding, which a pipeline's first and last stage both hold, is a unit of its
    own, the last one, so that its shards are the same on both stages. Where gradients are
    offloaded, those that have to wait on the device (`Unit.waits`) are in units of their own, so
    that all others can be copied to the host during backward.
    """
    stage = plan.zero_stage
    tied = set(TIED) if stage and model.tied and plan.pp > 1 else set()
    offloaded = plan.tiers is not None and plan.tiers.gradients != "device"

    def must_wait(name: str) -> bool:
        """See `Unit.waits`: replicas, the other pipeline end or tp ranks add to its gradient."""
        if not offloaded:
            return False
        tp_ranks_add = plan.tp > 1 and holding(model, plan, name, 0).partial
        return plan.shard_degree < plan.dp or name in tied or tp_ranks_add

    shards, spans_parts = plan.shard_degree if stage else plan.dp, False
    untied = [name for name in sizes if name not in tied]
    if stage == 0 and shards > 1 and plan.grad_sync == "naive":
        groups, shards = [[name] for name in untied], 1
    elif stage == 3 or (stage == 0 and shards == 1):
        parts = [list(names) for _, names in groupby(untied, part_of)]
        halves = ([n for n in names if must_wait(n) == w] for names in parts for w in (False, True))
        groups = [names for names in halves if names]
    else:
        spans_parts = True
        closing_size = -(-plan.bucket_bytes // BYTES_PER_ELEMENT[plan.grad_precision])
        groups = []
        for waits in (False, True):
            pool = {name: sizes[name] for name in untied if must_wait(name) == waits}
            groups += assign(pool, closing_size)
    return tuple(
        Unit(
            names=tuple(names),
            numel=-(-sum(sizes[name] for name in names) // shards) * shards,
            part="" if spans_parts else part_of(names[0]),
            waits=must_wait(names[0]),
        )
        for names in [*groups, *([name] for name in sizes if name in tied)]
    )


def assign(sizes: Mapping[str, int], closing_size: int) -> list[list[str]]:
    """Assign parameters of ``sizes`` elements to buckets, last parameter first. A bucket is closed
    once it holds ``closing_size`` elements or more.
    """
    buckets: list[list[str]] = []
    missing = 0
    for name in reversed(sizes):
        if missing <= 0:
            buckets.append([])
            missing = closing_size
        buckets[-1].append(name)
        missing -= sizes[name]
    return buckets


def overlaps(sizes: Mapping[str, int], start: int, count: int) -> Iterator[tuple[str, int, slice]]:
    """The tensors that overlap one part of a flat buffer: (name, the first of the tensor's elements
    in the part, the range of the part that they fill).

    sizes  elements of the buffer's tensors, one after the other
    start, count  the part: its first element in the buffer, and its length
    """
    offset = 0
    for name, size in sizes.items():
        first, end = max(offset, start), min(offset + size, start + count)
        if first < end:
            yield name, first - offset, slice(first - start, end - start)
        offset += size


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to: "blocks.3" of "blocks.3.norm1.weight"."""
    first, second, _ = name.split(".", 2)
    return f"{first}.{second}" if first == "blocks" else first
