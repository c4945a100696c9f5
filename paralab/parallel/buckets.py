"""How parameters are dealt into flat buffers. Torch-free: training and prediction share this rule.

An all-reduce costs alpha + bytes / bandwidth. Thousands of small calls pay alpha thousands of
times, one call for everything cannot start before the last gradient exists; buckets sit between the
two (PyTorch Distributed, Li+ 2020, arXiv:2006.15704, sec. 3.2.2-3.2.3). Backward produces gradients
from the last layer to the first, so buckets are filled in reverse order of registration.

ZeRO shares flat buffers out: `units` says what lies in each, and every rank owns one of N equal
parts of it, wherever that cuts through a parameter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from paralab.parallel.layouts import holding
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan

# Reduce-scatters that ZeRO has under way at once: each holds its gradients and what it receives.
# One is enough to hide behind the backward of the unit that follows (FSDP2 has one too).
IN_FLIGHT = 1


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One flat buffer: which parameters lie in it, and where.

    params   indices of the parameters, in the order their gradients lie in the buffer
    offsets  first element of each
    numel    elements of the buffer, padding included
    """

    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


def assign(
    sizes: Sequence[int], *, bucket_bytes: int, itemsize: int = 4, multiple: int = 1
) -> list[Bucket]:
    """Deal parameters of ``sizes`` elements into buckets, last parameter first.

    A bucket is closed once it holds ``bucket_bytes`` or more, and padded to a whole multiple of
    ``multiple`` elements (the group size, so that every rank's share of it is equal).
    """
    n, ends = len(sizes), list(accumulate(reversed(sizes), initial=0))
    buckets = []
    for first, end in closed(ends, -(-bucket_bytes // itemsize)):
        filled = ends[end] - ends[first]
        buckets.append(Bucket(
            params=tuple(range(n - 1 - first, n - 1 - end, -1)),
            offsets=tuple(at - ends[first] for at in ends[first:end]),
            numel=-(-filled // multiple) * multiple,
        ))  # fmt: skip
    return buckets


def closed(ends: Sequence[int], enough: int) -> list[tuple[int, int]]:
    """(first, end) of the parameters in each bucket, counted in the order in which they are dealt.

    ends    elements before each of them, and at last of all
    enough  elements that close a bucket
    """
    found, first, n = [], 0, len(ends) - 1
    while first < n:
        end = min(bisect_left(ends, ends[first] + enough, lo=first + 1), n)
        found.append((first, end))
        first = end
    return found


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters in one flat buffer that N ranks share out in equal parts.

    names   of the parameters, in the order in which they lie in the buffer
    numel   elements of the buffer, padded to a multiple of N
    part    the part of the model whose parameters these are; "" where a unit spans parts
    frozen  whether training leaves them as they are
    waits   whether the rank's part of the gradient, once the N ranks have summed it, has to wait on
            the device: others have a part of it too, and add it up after backward
    """

    names: tuple[str, ...]
    numel: int
    part: str = ""
    frozen: bool = False
    waits: bool = False


def units(sizes: Mapping[str, int], model: ModelSpec, plan: Plan) -> list[Unit]:
    """The flat buffers of ZeRO's stages on one rank, in the order in which they are numbered.

    sizes  elements of every parameter the rank holds, in order of registration

    Stages 1 and 2 share out the gradient buckets (frozen parameters stay outside, whole). Stage 3
    shares out what is gathered together: each part of the model, its frozen parameters apart. An
    embedding that a pipeline's last stage holds a copy of is alone and last: so its shards are the
    same on both stages. Where gradients are offloaded, those that have to wait are apart, and the
    last of their part: so the others can leave.
    """
    n, trained = plan.shard_degree, [name for name in sizes if model.trainable(name)]
    ends = {"embedding.token.weight", "head.output.weight"} if model.tied and plan.pp > 1 else set()
    tied = [name for name in trained if name in ends]
    leaves = plan.tiers is not None and plan.tiers.gradients != "device"

    def unit(names: Sequence[str], **more: object) -> Unit:
        numel = -(-sum(sizes[name] for name in names) // n) * n
        more["waits"] = model.trainable(names[0]) and waits(names[0])
        return Unit(names=tuple(names), numel=numel, **more)  # type: ignore[arg-type]

    def waits(name: str) -> bool:
        """Whether replicas, the pipeline's other end or tp ranks have a part of its gradient."""
        if not leaves or n < plan.dp or name in ends:
            return leaves
        return plan.tp > 1 and holding(model, plan, name, 0).partial

    if plan.zero_stage < 3:
        made, item = [], BYTES_PER_ELEMENT[plan.precision]
        for later in (False, True):
            rest = [name for name in trained if name not in ends and waits(name) == later]
            counts = [sizes[name] for name in rest]
            found = assign(counts, bucket_bytes=plan.bucket_bytes, itemsize=item)
            made += [unit([rest[index] for index in bucket.params]) for bucket in found]
        return made + [unit([name]) for name in tied]
    parts = list(dict.fromkeys(map(part_of, sizes)))
    groups: dict[tuple[int, bool, bool], list[str]] = {}
    for name in sizes:
        if name not in tied:
            frozen = not model.trainable(name)
            key = (parts.index(part_of(name)), waits(name) and not frozen, frozen)
            groups.setdefault(key, []).append(name)
    made = [unit(groups[key], part=parts[key[0]], frozen=key[2])
            for key in sorted(groups, key=lambda key: key[:2])]  # fmt: skip
    return made + [unit([name], part=part_of(name)) for name in tied]


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
