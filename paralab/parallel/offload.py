"""Offload: model states and activations kept on the host or in files instead of on the device.

AdamW in mixed precision keeps 16 bytes for every parameter, and the device computes with 2 of them.
The rest can be kept where memory is cheap, if little has to move, and moves while the device
computes:

    ZeRO-Offload   (Ren+ 2021, arXiv:2101.06840)   gradients and optimizer states on the host. The
                   gradient of a unit leaves while backward goes on to the next; the host's own
                   processor makes the Adam step; updated parameters come back. With one micro-batch
                   this moves 2w bytes per parameter and step, w bytes per element: no other way to
                   split a step between device and host moves less (sec. 3)
    ZeRO-Infinity  (Rajbhandari+ 2021, arXiv:2104.07857)   parameters too, and files behind the
                   host. What stage 3 gathers comes up from there, ``prefetch`` units ahead: each
                   rank's N-th over a link of its own, N links at once (bandwidth-centric
                   partitioning, sec. 6.1). Tiling of large operators (sec. 5.1.3) is not done here
    L2L            (Pudipeddi+ 2020, arXiv:2002.05645)   the far end: all micro-batches pass through
                   one part of the model before the next comes up. Whatever m is, parameters come
                   up twice, those of the head once, and gradients leave once
    delayed update (ZeRO-Offload, sec. 5.2)   the host updates while the device is at the next step
                   already, whose gradients are then of weights one update old

Bytes of a rank per step, d2h from device to host and h2d back: Psi parameters, K bytes of optimizer
states for each, N ranks, m micro-batches of b samples of s tokens, l blocks of width h:

    gradients      d2h    w m Psi/N    reduced in every micro-batch (stages 2, 3); else w Psi/N
    parameters     h2d    w Psi/N      after the update, where they live on the device
                          2 w m Psi/N  where they do not: before each forward and each backward
                          2 w Psi/N    the same with schedule="l2l", which reduces gradients once
    optimizer      disk   K Psi/N read, K Psi/N written; K is 12 also in fp32 where parameters live
                          on the device, as the host has a copy of its own
    activations    d2h    w m l b s h, and as much h2d: the input of every block

Every function here moves one kind of state, and knows of the others nothing but their values'
names. Lab 09.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import pairwise

from paralab.parallel.recompute import kept_inputs
from paralab.programs.instructions import (
    ADD,
    ALL_GATHER,
    ALL_REDUCE,
    COPY,
    KEEP,
    LATE,
    NORM,
    RECOMPUTE,
    REDUCE_SCATTER,
    UPDATE,
    WAIT,
    Code,
    Instr,
    Value,
    wait,
)
from paralab.programs.tiers import prefix
from paralab.spec.tiers import Offload


def gradients(code: Code, place: str, waits: Container[int], *, measured: bool) -> Code:
    """A shard of the summed gradient is copied to the host as soon as it is there; one copy is in
    flight.

    The first of a unit is the sum, later micro-batches are added to it by the host's processor.

    place     "cpu" or "nvme"
    waits     units whose shard stays until other ranks have added theirs: it is copied after that
    measured  whether the gradients' norm is needed; the host computes it from the sum
    """
    made: Code = []
    in_flight: list[Instr] = []
    sums = [ins for ins in code if ins.op == REDUCE_SCATTER and _brings(ins)]  # of a whole step
    summed = {ins.writes for ins in sums if ins.unit not in waits}
    if sums and sums[-1].writes in summed:  # `zero1` has a WAIT for each but the last
        replicas = (ins.op == ALL_REDUCE and ins.reads[0][0] == "gshard" for ins in code)
        over = next((at for at, found in enumerate(replicas) if found), len(code))
        code = [*code[:over], wait(sums[-1]), *code[over:]]
    ends = {ins.unit: at for at, ins in enumerate(code) if _brings(ins)}

    def leave(u: int, k: int, share: Value, *, first: bool, last: bool) -> None:
        total, held = ("host.gshard", u, 0), ("host.part", u, k)
        if first and place == "cpu":
            held = total
        in_flight.append(_copy(share, held, k))
        made.append(in_flight[-1])
        if not first:
            new, held = held, total
            if place == "nvme":
                held = ("host.sum", u, k)
                made.append(_copy(("file.gshard", u, 0), held, k))
            made.append(Instr(ADD, u, k, u, (new, held), (held,), "host"))
        if measured and last:
            made.append(Instr(NORM, u, k, u, (held,), (("host.norm", u, 0),), "host"))
        if place == "nvme":
            made.append(_copy(held, ("file.gshard", u, 0), k))

    for position, ins in enumerate(code):
        if ins.op == WAIT and ins.reads in summed:
            _left(made, in_flight)
            made.append(ins)
            leave(ins.reads[0][1], -1, ins.reads[0], first=True, last=True)
        elif not _brings(ins) or ins.writes in summed:
            made.append(ins)
        else:
            _left(made, in_flight)
            if ins.unit in waits:
                made.append(ins)
            else:  # of one micro-batch: it leaves instead of being kept
                first, last = ins.op == KEEP, ends[ins.unit] == position
                leave(ins.unit, ins.mb, ins.reads[0], first=first, last=last)
    _left(made, in_flight)
    for u in sorted(u for u in ends if u in waits):
        leave(u, -1, ("gshard", u, 0), first=True, last=True)
    _left(made, in_flight)
    return made


def _brings(ins: Instr) -> bool:
    """Whether this rank's share of a gradient is there behind it, on the device."""
    return bool(ins.writes) and ins.writes[0][0] == "gshard" and ins.op not in (ALL_REDUCE, WAIT)


@dataclass(frozen=True)
class Update:
    """The host's processor updates what lies there, unit by unit.

    states  whether the optimizer has rows; ``master``: whether the weights in fp32 are one of them
    mixed   whether what the device computes with has to be rounded first
    """

    tiers: Offload
    states: bool
    master: bool
    mixed: bool

    def __call__(self, code: Code) -> Code:
        """A unit is opened before the one before it is updated and closed: so the disk reads the
        next while the host is at work. Then updated shares are gathered.
        """
        updates = sorted((ins for ins in code if ins.op == UPDATE), key=lambda ins: ins.unit)
        if not updates:
            return code
        begin = next(at for at, ins in enumerate(code) if ins.op == UPDATE or _is_norm(ins))
        made, opened = code[:begin], [self.open(ins.unit) for ins in updates]
        if self.tiers.delayed:  # first, what the host has made of the step before
            early = [ins for update in updates for ins in self.deliver(update.unit)]
            made += early + [Instr(WAIT, reads=ins.writes) for ins in early if ins.lane == "h2d"]
        made += self.verdict([ins for ins in code if _is_norm(ins)])
        for ins, ahead in zip(updates, [*opened[1:], []], strict=True):
            made += opened[0] * (ins is updates[0]) + ahead + self.close(ins)
            if self.tiers.parameters == "device" and not self.tiers.delayed:
                made += self.deliver(ins.unit)
        made += sorted((ins for ins in code if _is_final(ins)), key=lambda ins: ins.unit)
        rest = (ins for ins in code[begin:] if ins.op != UPDATE)
        return made + [ins for ins in rest if not _is_norm(ins) and not _is_final(ins)]

    def verdict(self, norms: Code) -> Code:
        """The norm, and a copy on the host of what it says about the gradients."""
        if not norms:
            return []
        if self.tiers.gradients != "device":
            parts = tuple(("host.norm", u, 0) for _, u, _ in norms[0].reads)
            norms = [norms[0]._replace(reads=parts), *norms[1:]]
        return [*norms, Instr(COPY, reads=norms[0].writes, writes=(("host.verdict", 0, 0),))]

    def lies(self, what: str, u: int) -> tuple[Value, Value]:
        """Where a state of a unit lives, and where the host has it while it updates the unit: the
        same, or in a buffer.
        """
        place = {"opt": "optimizer", "gshard": "gradients", "shard": "parameters"}[what]
        home = prefix(getattr(self.tiers, place)) + what
        return (home, u, 0), (f"host.{what}", u, 0 if home.startswith("host.") else 1)

    def open(self, u: int) -> Code:
        """What the update reads comes to the host."""
        wanted = ["opt"] * self.states + ["gshard"] + ["shard"] * (not self.master)
        pairs = [self.lies(what, u) for what in wanted]
        return [_copy(home, here) for home, here in pairs if home != here]

    def close(self, ins: Instr) -> Code:
        """The update, and the way back into files of what it has written."""
        u, off = ins.unit, self.tiers.parameters != "device"
        pairs = [self.lies(what, u) for what in ["opt"] * self.states + ["shard"] * off]
        written = tuple(here for _, here in pairs)
        read = tuple(v for v in written if not self.master or v[0] != "host.shard")
        asked = (("host.verdict", 0, 0),) * any(v[0] == "norm" for v in ins.reads)
        count = (("host.count", u, 0),)
        reads, phase = (self.lies("gshard", u)[1], *read, *count, *asked), LATE * self.tiers.delayed
        update = Instr(UPDATE, u, -1, u, reads, written + count, "host", phase=phase)
        return [update, *(_copy(here, home) for home, here in pairs if home != here)]

    def deliver(self, u: int) -> Code:
        """Updated parameters go up to where they live on the device."""
        made, new, phase = [], self.lies("opt", u)[1], LATE * self.tiers.delayed
        if self.mixed:
            rounded = ("host.shard", u, 1)
            made.append(_copy(new, rounded, phase=phase))
            new = rounded
        return [*made, _copy(new, ("shard", u, 0), phase=phase)]


def _is_norm(ins: Instr) -> bool:
    """Whether it belongs to the norm of all gradients."""
    return not ins.lane and ins.op == NORM or ins.op == ALL_REDUCE and ins.reads[0][0] == "norm"


def _is_final(ins: Instr) -> bool:
    """Whether it gathers a unit's updated shares on all ranks."""
    return ins.op == ALL_GATHER and ins.writes[0][0] == "w" and ins.writes[0][2] == 0


def bring(place: str, u: int, into: Value) -> Code:
    """This rank's share of a unit's parameters comes up from where it lives, to ``into``."""
    made, source = [], (prefix(place) + "shard", u, 0)
    if place == "nvme":
        made.append(_copy(source, ("host.piece", u, into[2])))
        source = made[0].writes[0]
    return [*made, _copy(source, into)]


def inputs(code: Code, place: str, run: Callable[[Instr], object]) -> Code:
    """The input that a recomputed block keeps leaves while the block computes, and comes back while
    the block above it does; one is on its way out at a time.

    run  which backwards follow each other: an action of the schedule, or in a relay all of them
    """
    made: Code = []
    in_flight: list[Instr] = []
    kept, coming = kept_inputs(code), set()
    again = [ins for ins in code if ins.op == RECOMPUTE and ins.reads[0] in kept]
    below = {a.reads[0]: b.reads[0] for a, b in pairwise(again) if run(a) == run(b)}

    def leave(x: Value) -> None:
        in_flight.append(_copy_state(x, "host.x"))
        made.append(in_flight[-1])
        if place == "nvme":
            made.append(_copy_state(("host.x", *x[1:]), "file.x"))

    def come(x: Value) -> None:
        if x in coming:
            return
        coming.add(x)
        if place == "nvme":
            made.append(_copy_state(("file.x", *x[1:]), "host.back"))
        source = "host.back" if place == "nvme" else "host.x"
        made.append(_copy_state((source, *x[1:]), "back"))

    for position, ins in enumerate(code):
        for x in ins.reads:
            if kept.get(x) == position:
                _left(made, in_flight)
                leave(x)
        if ins.op == RECOMPUTE and (x := ins.reads[0]) in kept:
            _left(made, in_flight)
            come(x)
            made.append(Instr(WAIT, reads=(("back", *x[1:]),)))
            if x in below:
                come(below[x])
            ins = ins._replace(reads=(("back", *x[1:]), *ins.reads[1:]))
        made.append(ins)
    return made


def _left(made: Code, in_flight: list[Instr]) -> None:
    """What was on its way down has left the device, and its memory is given back."""
    made += [Instr(WAIT, reads=copy.writes) for copy in in_flight]
    in_flight.clear()


# By the tiers that a copy leads from and to; from or to a file it is "disk".
LANES = {("", "host"): "d2h", ("host", ""): "h2d", ("host", "host"): "host"}


def _copy(source: Value, into: Value, k: int = -1, phase: str = "") -> Instr:
    """A unit's value goes to another tier, on the lane that leads there."""
    u, tiers = source[1], (source[0].rpartition(".")[0], into[0].rpartition(".")[0])
    return Instr(COPY, u, k, u, (source,), (into,), LANES.get(tiers, "disk"), phase=phase)


def _copy_state(source: Value, kind: str) -> Instr:
    """The state before an op does, which is of no unit."""
    return _copy(source, (kind, *source[1:]), source[2])._replace(unit=-1)
