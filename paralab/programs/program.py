"""A compiled program, and the sizes of its values. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from paralab.model.build import Model
from paralab.parallel.buckets import Unit, overlaps
from paralab.parallel.layouts import SHARED_PHASE, coordinates, holding, kind_of, mode_of
from paralab.programs import tiers
from paralab.programs.instructions import Code, Value
from paralab.programs.storages import SHARING, Storages, sharing_of
from paralab.spec import BYTES_PER_ELEMENT, TIED, ModelSpec, Plan

OPTIMIZERS = ("adamw", "sgd")


class Size(NamedTuple):
    """The tier of a value ("device", "host" or "file"), its memory category, and its bytes."""

    tier: str
    category: str
    bytes: int


class Share(NamedTuple):
    """A range of a parameter's elements in what a rank keeps of a unit (all of it, or its shard).

    unit   number of the unit
    name   name of the parameter
    start  the range's first element in what the rank keeps of the unit
    count  number of elements
    first  the range's first element in the parameter
    """

    unit: int
    name: str
    start: int
    count: int
    first: int


@dataclass(frozen=True, eq=False)
class Program:
    """One training step under a plan.

    optimizer  one of `OPTIMIZERS`
    clips      whether the norm of the gradients is bounded
    model      the ops that one tensor-parallel rank runs
    stages     ops (i, j) of every pipeline stage
    units      per pipeline rank its units
    codes      per pipeline rank its instructions; empty for ranks that were not compiled
    """

    spec: ModelSpec
    plan: Plan
    optimizer: str
    clips: bool
    model: Model
    stages: tuple[tuple[int, int], ...]
    units: tuple[tuple[Unit, ...], ...]
    codes: list[Code] = field(default_factory=list)
    _known: dict = field(default_factory=dict, init=False, repr=False)  # cached sizes and shares

    # ---- sizes -----------------------------------------------------------------------------------
    def precision_of(self, kind: str) -> str:
        """The precision of a value's elements, by the value's kind, on any tier."""
        own = kind.rpartition(".")[2] in tiers.GRADIENTS
        return self.plan.grad_precision if own else self.plan.precision

    def item_of(self, kind: str) -> int:
        """Bytes of one element of a value of this kind."""
        return BYTES_PER_ELEMENT[self.precision_of(kind)]

    @property
    def update_widens(self) -> bool:
        """Whether an UPDATE makes an fp32 copy of its own unit's 16-bit gradient."""
        return self.plan.grad_precision != "fp32"

    @property
    def update_rounds(self) -> bool:
        """Whether an UPDATE rounds its fp32 masters to 16-bit parameters. Where it runs on the host
        and the parameters do not live there, a COPY on the host rounds them.
        """
        tiers = self.plan.tiers
        own_copy = tiers is not None and tiers.states and tiers.parameters == "device"
        return self.model.item < 4 and not own_copy

    @property
    def update_bytes(self) -> int:
        """Bytes that an UPDATE moves per element: AdamW reads four fp32 values and writes three,
        SGD reads two and writes one. Rounding 16-bit parameters from their masters takes 6 more,
        widening 16-bit gradients 6 more.
        """
        values = 7 if self.optimizer == "adamw" else 3
        return 4 * values + 6 * self.update_rounds + 6 * self.update_widens

    def size(self, value: Value, rank: int) -> Size:
        """The size of a value on a pipeline rank."""
        kind, where, version = value
        by_version = kind == "w" or "." in kind  # of these, later versions may be buffers
        key = (kind, where, rank, by_version and version > 0)
        size = self._known.get(key)
        if size is None:
            size = self._known[key] = self._size(kind, where, version, rank)
        return size

    def _size(self, kind: str, where: Any, version: int, rank: int) -> Size:
        if "." in kind:
            return Size(kind.partition(".")[0], *tiers.size(self, (kind, where, version), rank))
        if kind in SHARING:
            held = self.storages(rank).held((kind, where, version))
            return Size("device", held.category, held.own + sum(size for _, size in held.shared))
        if kind in _OF_THE_RANK:
            return Size("device", *_OF_THE_RANK[kind](self, where))
        return Size("device", *self._of_unit(self.units[rank][where], version)[kind])

    def _of_unit(self, unit: Unit, version: int) -> dict[str, tuple[str, int]]:
        """{kind: (category, bytes)} of the values of a unit."""
        plan, item, grad = self.plan, self.model.item, self.item_of("grad")
        share, elements = unit.numel // self.shards, self.elements(unit)
        counts = 4 * (1 if plan.zero_stage else len(unit.names))  # AdamW's step count per tensor
        adamw = 8 * elements // self.shards + counts
        return {
            "w": ("buffers" if version else "parameters", item * elements),
            "shard": ("parameters", item * share * (plan.zero_stage == 3)),
            "piece": ("buffers", item * share),
            "second": ("parameters", item * unit.numel // (plan.secondary_shard or 1)),
            "grad": ("gradients", grad * unit.numel),
            "part": ("buffers", grad * (unit.numel // plan.shard_degree)),
            "gshard": ("gradients", grad * share),
            "master": ("optimizer", 4 * elements // self.shards),
            "opt": ("optimizer", adamw * (self.optimizer == "adamw")),
        }

    def storages(self, rank: int) -> Storages:
        """The storages of a pipeline rank's values."""
        storages = self._known.get(rank)
        if storages is None:
            stages = self.stages[rank :: self.plan.pp]
            storages = self._known[rank] = Storages(sharing_of(self.model), self.plan, stages)
        return storages

    @property
    def shards(self) -> int:
        """The number of shards into which a unit's states are partitioned."""
        return self.plan.shard_degree if self.plan.zero_stage else 1

    def elements(self, unit: Unit) -> int:
        """Elements of a unit's parameters, with padding only if they are sharded."""
        if self.plan.zero_stage:
            return unit.numel
        return sum(prod(self.model.shapes[name]) for name in unit.names)

    def state_elements(self, boundary: int) -> int:
        """Elements of the last entry of the state at a boundary between ops."""
        return self.model.ops[boundary - 1].out

    @property
    def norm_axes(self) -> list[str]:
        """The axes over which gradients are partitioned, so that the norm's squares are summed."""
        plan = self.plan
        sizes = {"pp": plan.pp, "tp": plan.tp, "dp": self.shards}
        return [axis for axis, size in sizes.items() if size > 1]

    # ---- what several ranks hold -----------------------------------------------------------------
    def shared(self, rank: int, index: int | None = 0) -> dict[tuple[str, str], list[Share]]:
        """{(axis, phase): the ranges of the rank's gradients to sum over that axis}: gradients that
        are partial over tp ranks which hold the same parameter, and those of a tied embedding, of
        which a pipeline's first and last stage each hold a copy.

        index  of the data-parallel rank among those that share the states; None: of whole units
        """
        index = index if self.shards > 1 else 0  # the only shard is whole units
        key = "shared", rank, index
        if key in self._known:
            return self._known[key]
        shares = {}
        partial = mode_of(self.plan).partial if self.plan.tp > 1 else ()
        for share in self.places(rank, index) if partial else ():
            if kind_of(share.name) not in partial:
                continue
            block = holding(self.spec, self.plan, share.name, 0)
            if block.partial:
                phase = SHARED_PHASE.get(kind_of(share.name), "shared")
                shares.setdefault((block.copies, phase), []).append(share)
        for share in self.places(rank, index) if self.spec.tied and self.plan.pp > 1 else ():
            if share.name in TIED:
                if self.plan.zero_stage:  # it is alone in its unit: the shard is sent with padding
                    shard = self.units[rank][share.unit].numel // self.shards
                    share = share._replace(count=shard)
                shares["ends", "tied"] = [share]
        return self._known.setdefault(key, shares)

    def places(self, rank: int, index: int | None = 0) -> Iterator[Share]:
        """The ranges that the rank keeps of each unit's parameters; without an index, all."""
        for number, unit in enumerate(self.units[rank]):
            sizes = {name: prod(self.model.shapes[name]) for name in unit.names}
            count = unit.numel // (1 if index is None else self.shards)
            for name, first, where in overlaps(sizes, (index or 0) * count, count):
                yield Share(number, name, where.start, where.stop - where.start, first)

    def counted(self, rank: int, index: int, tp: int) -> dict[int, list[slice]]:
        """{unit: ranges of elements} that this rank counts in the norm of the gradients; one slice
        if it counts the whole unit. Of parameters that several tp ranks hold one rank counts each,
        and of a tied embedding only the first stage.
        """
        ranges = {}
        partly, at = set(), coordinates(self.plan, tp) if self.plan.tp > 1 else {}
        for number, name, start, count, _ in self.places(rank, index):
            elsewhere = self.spec.tied and name == TIED[1]
            if self.plan.tp > 1 and (axis := holding(self.spec, self.plan, name, tp).copies):
                elsewhere = elsewhere or any(at[c] for c in mode_of(self.plan).axes[axis])
            if elsewhere:
                partly.add(number)
            else:
                ranges.setdefault(number, []).append(slice(start, start + count))
        whole = {u: [slice(0, slices[-1].stop)] for u, slices in ranges.items() if u not in partly}
        return ranges | whole

    def constant_bytes(self, rank: int) -> int:
        """Bytes that no step changes: the causal mask, or the buffers of a block of your own."""
        if self.spec.block is None:
            return self.spec.seq_len**2 * (self.spec.attention != "sdpa")
        own_stages = self.stages[rank :: self.plan.pp]
        return sum(op.constant for i, j in own_stages for op in self.model.ops[i:j])

    def lasting(self, rank: int) -> Iterator[Value]:
        """The values that exist before and after every step."""
        plan = self.plan
        states = plan.tiers is not None and plan.tiers.states
        parameters_here = not states or plan.tiers.parameters == "device"
        for u in range(len(self.units[rank])):
            if parameters_here:
                yield "shard" if plan.zero_stage == 3 else "w", u, 0
            if not states:
                yield "opt", u, 0
            if not states and self.model.item < 4:
                yield "master", u, 0
        yield from tiers.lasting(self, rank)
        if self.constant_bytes(rank):
            yield "mask", rank, 0
        if self.clips or plan.precision == "fp16":
            yield "scale", 0, 0


def _tp_part(category: str) -> Callable[[Program, Any], tuple[str, int]]:
    return lambda p, i: (category, p.model.item * p.state_elements(i) // p.plan.tp)


_OF_THE_RANK: Mapping[str, Callable[[Program, Any], tuple[str, int]]] = {
    "xpart": _tp_part("activations"),
    "xslice": _tp_part("buffers"),
    "gslice": _tp_part("buffers"),
    "loss": lambda p, _: ("workspace", 4),  # no value of a list: interpret/memory.py counts it
    "sent": lambda p, _: ("buffers", 0),
    "norm": lambda p, _: ("buffers", 4),
    "scale": lambda p, _: ("buffers", 16 * (p.plan.precision == "fp16") + 4 * p.clips),
    "mask": lambda p, rank: ("buffers", p.constant_bytes(rank)),
}
