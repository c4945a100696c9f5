"""Values off the device: which exist, their sizes, and the bytes that copies move. Torch-free.

A kind with "host." or "file." before it is that value on the host or in a file. With c elements in
the rank's shard of a unit, w bytes per element (gradients may have another w than parameters) and k
fp32 rows of optimizer states (AdamW's two moments; also the master weights, where parameters have
16 bits or stay on the device):

    shard, gshard   w c      parameters, and the sum of their gradient
    opt             4 k c    the optimizer's rows: off the device the master is one of them
    count, norm     4 each   on the host: number of updates, and the norm of the gradient
    x, back         inputs of blocks, copied out in forward and fetched in backward

Values that last from step to step have version 0. All others on the host pass through a *ring* of
two buffers that are used in turn, so that the disk moves the next unit while the host computes on
this one. A ring is allocated once, and a value in it has no memory of its own. ZeRO-Infinity
(Rajbhandari+ 2021, arXiv:2104.07857, sec. 6.3) reuses a few pinned buffers too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from paralab.programs.instructions import ADD, NORM, UPDATE, Instr, Value
from paralab.spec.tiers import Offload

BUFFERS = 2  # of a ring
PREFIX = {"device": "", "cpu": "host.", "nvme": "file."}  # of a value's kind, by its place
_RINGS = {
    # A later micro-batch's gradient, the sum so far, and parameters being fetched from a file.
    **dict.fromkeys(("host.part", "host.sum", "host.piece"), "staging"),
    # Operands of an update that live in files or on the device, not on the host.
    **{"host.gshard": "gradient", "host.opt": "states", "host.shard": "parameters"},
    **dict.fromkeys(("host.x", "host.back"), "inputs"),  # only if they live in files
}
GRADIENTS = ("grad", "gshard", "part", "sum")  # of parameters
CATEGORY = {  # of a kind's memory; of a state also the field of `Offload` that has its place
    **dict.fromkeys(GRADIENTS, "gradients"),
    **dict.fromkeys(("w", "shard", "piece"), "parameters"),
    **dict.fromkeys(("x", "back"), "activations"),
    **dict.fromkeys(("opt", "count", "norm"), "optimizer"),
}


def tier_of(tiers: Offload, kind: str) -> str:
    """The tier of a kind of state, as the prefix of its values: "host.", "file.", or ""."""
    return PREFIX[getattr(tiers, CATEGORY[kind])]


def own_master(plan: Any) -> bool:
    """Whether offloaded optimizer states include master weights."""
    return plan.precision != "fp32" or plan.tiers.parameters == "device"


def rows(program: Any) -> int:
    """k: fp32 rows of optimizer states off the device."""
    return 2 * (program.optimizer == "adamw") + own_master(program.plan)


def ring(plan: Any, value: Value) -> str:
    """The ring whose buffer holds a value, or ""."""
    kind, _, version = value
    name = _RINGS.get(kind, "")
    if name == "inputs":
        return name if plan.tiers.activations == "nvme" else ""
    return name if version or name == "staging" else ""


def elements(program: Any, value: Value, rank: int) -> tuple[int, int]:
    """(bytes per element, number of elements) of this rank's part of a value, on any tier."""
    kind, where, _ = value
    kind = kind.rpartition(".")[2]
    if kind in ("x", "back"):
        return program.model.item, program.state_elements(where)
    count = program.units[rank][where].numel // program.shards
    if kind == "opt":
        return 4, rows(program) * count
    return (4, 1) if kind in ("count", "norm") else (program.item_of(kind), count)


def size(program: Any, value: Value, rank: int) -> tuple[str, int]:
    """(category, bytes) of a value off the device."""
    kind, where, _ = value
    if kind == "host.ring":
        return "buffers", BUFFERS * rings(program, rank)[where]
    if kind == "host.verdict" or ring(program.plan, value):
        return "buffers", 0
    item, count = elements(program, value, rank)
    return CATEGORY[kind.rpartition(".")[2]], item * count


def rings(program: Any, rank: int) -> dict[str, int]:
    """{name: bytes of one buffer} of the rings that this rank's instructions use."""
    plan, buffer_bytes = program.plan, {}
    if plan.tiers is None:
        return buffer_bytes
    for ins in program.codes[rank]:
        for value in ins.writes:
            if value[0] in _RINGS and (name := ring(plan, value)):
                item, count = elements(program, value, rank)
                buffer_bytes[name] = max(buffer_bytes.get(name, 0), item * count)
    return buffer_bytes


def lasting(program: Any, rank: int) -> Iterator[Value]:
    """The values off the device that exist before and after a step."""
    tiers = program.plan.tiers
    yield from (("host.ring", name, 0) for name in rings(program, rank))
    for u in range(len(program.units[rank]) if tiers is not None and tiers.states else 0):
        for kind in ("shard", "gshard"):
            if tier := tier_of(tiers, kind):
                yield tier + kind, u, 0
        if rows(program):
            yield tier_of(tiers, "opt") + "opt", u, 0
        yield from (("host.count", u, 0), ("host.norm", u, 0))


class Moved(NamedTuple):
    """The memory traffic of a worker's instruction.

    op        "copy" over a link; "read" or "write" of a file; "optimizer" or "compute" on the
              host's processor, which reports do not list as copies
    category  of the value that is moved
    bytes     sent over the link, or read and written by the host's processor
    """

    op: str
    category: str
    bytes: int


def kind_of(ins: Instr) -> str:
    """A report's name for an instruction on a worker's lane. Rounding on the host is no copy."""
    if ins.lane != "host":
        return "copy"
    return "optimizer" if ins.op == UPDATE else "compute"


def moved(program: Any, ins: Instr, rank: int) -> Moved:
    """The memory traffic of an instruction on a worker's lane."""
    if ins.lane == "host":
        item, grad = program.model.item, program.item_of("grad")
        bytes_per_element = {UPDATE: program.update_bytes, ADD: 3 * grad, NORM: grad}
        count = program.units[rank][ins.unit].numel // program.shards
        size = count * bytes_per_element.get(ins.op, 4 + item)  # any other op is a rounding COPY
        return Moved(kind_of(ins), "", size)
    read, written = ins.reads[0], ins.writes[0]
    value = written if ins.lane == "h2d" or written[0].startswith("file.") else read
    op = "copy"
    if ins.lane == "disk":
        op = "write" if value is written else "read"
    item, count = elements(program, value, rank)
    return Moved(op, CATEGORY[value[0].rpartition(".")[2]], item * count)
