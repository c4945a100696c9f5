"""Values off the device: what there is, how large it is, and what a copy of it moves. Torch-free.

A kind with "host." or "file." before it is that value on the host or in a file. With c elements of
the rank's share of a unit, w bytes per element (of gradients maybe other bytes than of parameters)
and k fp32 rows of the optimizer (AdamW's two moments; the master weights too, where parameters have
16 bits or stay on the device):

    shard, gshard   w c      parameters, and the sum of their gradient
    opt             4 k c    the optimizer's rows: off the device the master is one of them
    count, norm     4 each   on the host: updates made, and the norm of the gradient
    x, back         inputs of blocks on their way out and back

What lasts has version 0. Everything else on the host passes through a *ring*: two buffers that are
taken in turn, so that the disk is at the next unit while the host is at this one. A ring is made
once and stays, and what lies in it has no memory of its own. ZeRO-Infinity (Rajbhandari+ 2021,
arXiv:2104.07857, sec. 6.3) reuses a few pinned buffers too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from paralab.programs.instructions import ADD, NORM, UPDATE, Instr, Value

BUFFERS = 2  # of a ring
_PREFIX = {"device": "", "cpu": "host.", "nvme": "file."}
_IN_RINGS = {
    # A later micro-batch's gradient, the sum so far, and parameters on their way up from a file.
    "staging": ("part", "sum", "piece"),
    # What an update reads and writes that does not live on the host.
    "gradient": ("gshard",),
    "states": ("opt",),
    "parameters": ("shard",),
    "inputs": ("x", "back"),  # where files keep them
}
_RINGS = {f"host.{kind}": name for name, kinds in _IN_RINGS.items() for kind in kinds}
GRADIENTS = ("grad", "gshard", "part", "sum")  # of parameters
_CATEGORIES = {
    "gradients": GRADIENTS,
    "parameters": ("w", "shard", "piece"),
    "activations": ("x", "back"),
    "optimizer": ("opt", "count", "norm"),
}
_CATEGORY = {kind: name for name, kinds in _CATEGORIES.items() for kind in kinds}


def prefix(place: str) -> str:
    """What stands before the kind of a value that lies on "device", "cpu" or "nvme"."""
    return _PREFIX[place]


def own_master(plan: Any) -> bool:
    """Whether the optimizer's rows have master weights, where they are off the device."""
    return plan.precision != "fp32" or plan.tiers.parameters == "device"


def rows(program: Any) -> int:
    """k: rows of the optimizer off the device."""
    return 2 * (program.optimizer == "adamw") + own_master(program.plan)


def ring(plan: Any, value: Value) -> str:
    """The ring whose buffer a value lies in, or ""."""
    kind, _, version = value
    name = _RINGS.get(kind, "")
    if name == "inputs":
        return name if plan.tiers.activations == "nvme" else ""
    return name if version or name == "staging" else ""


def elements(program: Any, value: Value, rank: int) -> tuple[int, int]:
    """(bytes of an element, how many) that this rank has of a value, on whatever tier."""
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
    return _CATEGORY[kind.rpartition(".")[2]], item * count


def rings(program: Any, rank: int) -> dict[str, int]:
    """{name: bytes of one buffer} of the rings that this rank's instructions use."""
    plan, found = program.plan, {}
    if plan.tiers is None:
        return found
    for ins in program.codes[rank]:
        for value in ins.writes:
            if value[0] in _RINGS and (name := ring(plan, value)):
                item, count = elements(program, value, rank)
                found[name] = max(found.get(name, 0), item * count)
    return found


def lasting(program: Any, rank: int) -> Iterator[Value]:
    """What there is off the device before and after a step."""
    tiers = program.plan.tiers
    yield from (("host.ring", name, 0) for name in rings(program, rank))
    for u in range(len(program.units[rank]) if tiers is not None and tiers.states else 0):
        if tiers.parameters != "device":
            yield prefix(tiers.parameters) + "shard", u, 0
        if tiers.gradients != "device":
            yield prefix(tiers.gradients) + "gshard", u, 0
        if rows(program):
            yield prefix(tiers.optimizer) + "opt", u, 0
        yield from (("host.count", u, 0), ("host.norm", u, 0))


class Moved(NamedTuple):
    """What a worker's instruction does to memory.

    op        "copy" over a link, "read" or "write" of a file; "optimizer" and "compute" of the
              host's processor, which no report calls a copy
    category  of what is moved
    bytes     over the link, or read and written by the host's processor
    """

    op: str
    category: str
    bytes: int


def kind_of(ins: Instr) -> str:
    """What a report calls an instruction on a worker's lane. Rounding on the host is no copy."""
    if ins.lane != "host":
        return "copy"
    return "optimizer" if ins.op == UPDATE else "compute"


def moved(program: Any, ins: Instr, rank: int) -> Moved:
    """Of an instruction on a worker's lane."""
    if ins.lane == "host":
        item, grad = program.model.item, program.item_of("grad")
        each = {UPDATE: program.update_bytes, ADD: 3 * grad, NORM: grad}
        count = program.units[rank][ins.unit].numel // program.shards
        size = count * each.get(ins.op, 4 + item)  # else it rounds
        return Moved(kind_of(ins), "", size)
    read, written = ins.reads[0], ins.writes[0]
    value = written if ins.lane == "h2d" or written[0].startswith("file.") else read
    op = "copy"
    if ins.lane == "disk":
        op = "write" if value is written else "read"
    item, count = elements(program, value, rank)
    return Moved(op, _CATEGORY[value[0].rpartition(".")[2]], item * count)
