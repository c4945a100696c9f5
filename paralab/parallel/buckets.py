"""How parameters are assigned to flat buffers. Torch-free: training and prediction share this rule.

An all-reduce costs alpha + bytes / bandwidth. Thousands of small calls pay alpha thousands of
times, one call for everything cannot start before the last gradient exists; buckets sit between the
two (PyTorch Distributed, Li+ 2020, arXiv:2006.15704, sec. 3.2.2-3.2.3). Backward produces gradients
from the last layer to the first, so buckets are filled in reverse order of registration.

Parameters that lie together are a `Unit`: one collective moves it, its optimizer step is one
instruction, and ZeRO shares it out in N equal parts, wherever that cuts through a parameter.

    zero_stage=0, dp > 1   gradient buckets of ``bucket_bytes``; "naive" has one per parameter
    zero_stage=1, 2        the same buckets, sharded
    zero_stage=3           the parts of the model, which are gathered one by one
    zero_stage=0, dp = 1   the same parts
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

    names   of the parameters, in the order in which they lie in the buffer
    numel   elements of the buffer, padded to a multiple of N
    part    the part of the model whose parameters these are; "" where a unit spans parts
    waits   whether the rank's part of the gradient, once the N ranks have summed it, has to wait on
            the device: others have a part of it too, and add it up after backward
    """

    names: tuple[str, ...]
    numel: int
    part: str = ""
    waits: bool = False


def units(sizes: Mapping[str, int], model: ModelSpec, plan: Plan) -> tuple[Unit, ...]:
    """The flat buffers of one rank, in the order in which they are numbered.

    sizes  elements of every parameter the rank holds, in order of registration

    Under ZeRO an embedding that a pipeline's last stage holds a copy of is alone and last: so its
    shards are the same on both stages. Where gradients are offloaded, those that have to wait are
    apart, and the last of their part: so the others can leave.
    """
    stage, ends = plan.zero_stage, set()
    if stage and model.tied and plan.pp > 1:
        ends = set(TIED)
    leaves = plan.tiers is not None and plan.tiers.gradients != "device"

    def waits(name: str) -> bool:
        """Whether replicas, the pipeline's other end or tp ranks have a part of its gradient."""
        if not leaves or plan.shard_degree < plan.dp or name in ends:
            return leaves
        return plan.tp > 1 and holding(model, plan, name, 0).partial

    n, spans = plan.shard_degree if stage else plan.dp, False
    rest = [name for name in sizes if name not in ends]
    if not stage and n > 1 and plan.grad_sync == "naive":
        dealt, n = [[name] for name in rest], 1
    elif stage == 3 or not stage and n == 1:
        number = {part: at for at, part in enumerate(dict.fromkeys(map(part_of, rest)))}
        keys = {name: (number[part_of(name)], waits(name)) for name in rest}
        dealt = [list(some) for _, some in groupby(sorted(rest, key=keys.get), keys.get)]
    else:
        spans = True
        pools = [{name: sizes[name] for name in rest if waits(name) == late} for late in (0, 1)]
        enough = -(-plan.bucket_bytes // BYTES_PER_ELEMENT[plan.grad_precision])
        dealt = [names for pool in pools for names in assign(pool, enough)]
    return tuple(
        Unit(
            names=tuple(names),
            numel=-(-sum(sizes[name] for name in names) // n) * n,
            part="" if spans else part_of(names[0]),
            waits=waits(names[0]),
        )
        for names in [*dealt, *([name] for name in sizes if name in ends)]
    )


def assign(sizes: Mapping[str, int], enough: int) -> list[list[str]]:
    """Deal parameters of ``sizes`` elements into buckets, last parameter first. A bucket is closed
    once it holds ``enough`` elements or more.
    """
    buckets: list[list[str]] = []
    room = 0
    for name in reversed(sizes):
        if room <= 0:
            buckets.append([])
            room = enough
        buckets[-1].append(name)
        room -= sizes[name]
    return buckets


def cut(sizes: Mapping[str, int], start: int, count: int) -> Iterator[tuple[str, int, slice]]:
    """(name, its first element there, where in the part) of what lies in a part of a flat buffer.

    sizes  elements of the buffer's tensors, one after the other; the part is ``count`` elements
           from ``start``
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
