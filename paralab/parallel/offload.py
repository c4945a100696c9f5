"""Offload: model states and activations kept on the host or in files instead of on the device.

AdamW in mixed precision keeps 16 bytes for every parameter, and the device computes with 2 of them.
The other bytes can be kept where memory is cheap, if few of them have to move in a step and they
move while the device computes:

    ZeRO-Offload   (Ren+ 2021, arXiv:2101.06840)   gradients and optimizer states on the host. The
                   gradient of a unit is copied to the host while backward goes on to the next; the
                   host's processor makes the Adam step; updated parameters are copied back. With
                   one micro-batch this moves 2w bytes per parameter and step, w bytes per element:
                   no other way to split a step between device and host moves less (sec. 3)
    ZeRO-Infinity  (Rajbhandari+ 2021, arXiv:2104.07857)   parameters on the host too, or states in
                   files. Stage 3 fetches its shards from there, ``prefetch`` units ahead: each of N
                   ranks fetches an N-th over its own link, so that N links work at once (bandwidth-
                   centric partitioning, sec. 6.1). Large operators are not tiled (sec. 5.1.3) here
    L2L            (Pudipeddi+ 2020, arXiv:2002.05645)   the extreme: all micro-batches pass through
                   one part of the model before the next part is fetched. Whatever m is, parameters
                   are fetched twice, those of the head once, and gradients are copied out once
    delayed update (ZeRO-Offload, sec. 5.2)   the host updates while the device already computes the
                   next step, whose gradients then belong to weights one update old

Bytes of a rank per step, d2h from device to host and h2d back: Psi parameters, K bytes of optimizer
states for each, N ranks, m micro-batches of b samples of s tokens, l blocks of width h:

    gradients      d2h    w m Psi/N    reduced in every micro-batch (stages 2, 3); else w Psi/N
                   disk   in files: as many bytes written, and read again
    parameters     h2d    w Psi/N      after the update, where they live on the device
                          2 w m Psi/N  where they do not: before each forward and each backward
                          2 w Psi/N    the same with schedule="l2l", which reduces gradients once
                   disk   in files: what goes h2d is read before, and the update writes w Psi/N;
                          in fp32, which has no master weights, it also reads w Psi/N
    optimizer      disk   K Psi/N read, K Psi/N written; where parameters live on the device, K is
                          12 in fp32 too, because the host has a copy of them
    activations    d2h    w m l b s h, and as much h2d: the input of every block
                   disk   in files: as many bytes written, and read again

Every function here moves one kind of state; of the others it knows only the names of their values.
Lab 09.
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
    on_unit,
    sums_shared,
    wait,
)
from paralab.programs.tiers import PREFIX, tier_of
from paralab.spec.tiers import Offload


def gradients(code: Code, place: str, waits: Container[int], *, measured: bool) -> Code:
    """Each reduced shard of a gradient is copied to the host at once; one copy is in flight.

    The first micro-batch's shard of a unit becomes the sum on the host; the host's processor adds
    those of later micro-batches to it.

    place     "cpu" or "nvme"
    waits     units whose shard other ranks still add to: it is copied when backward is over
    measured  whether the gradients' norm is needed; the host computes it from the sum
    """
    new_code: Code = []
    in_flight: list[Instr] = []
    # The reductions of a whole step, by `zero1`, which waits for each but the last: so does this.
    reductions = [ins for ins in code if ins.op == REDUCE_SCATTER and _makes_shard(ins)]
    reduced_values = {ins.writes for ins in reductions if ins.unit not in waits}
    if reductions and reductions[-1].writes in reduced_values:
        after_backward = next((at for at, ins in enumerate(code) if sums_shared(ins)), len(code))
        code = [*code[:after_backward], wait(reductions[-1]), *code[after_backward:]]
    last_at = {ins.unit: at for at, ins in enumerate(code) if _makes_shard(ins)}

    def copy_out(u: int, k: int, shard: Value, *, first: bool, last: bool) -> None:
        part, total, in_file = ("host.part", u, k), ("host.gshard", u, 0), ("file.gshard", u, 0)
        if place == "nvme":  # the host has the sum only while it adds to it
            total = part if first else ("host.sum", u, k)
        in_flight.append(_copy(shard, total if first else part, k))
        new_code.append(in_flight[-1])
        if not first:
            if place == "nvme":
                new_code.append(_copy(in_file, total, k))
            new_code.append(Instr(ADD, 0, k, u, (part, total), (total,), "host"))
        if measured and last:
            new_code.append(on_unit(NORM, total, ("host.norm", u, 0), k, lane="host"))
        if place == "nvme":
            new_code.append(_copy(total, in_file, k))

    for position, ins in enumerate(code):
        if ins.op == WAIT and ins.reads in reduced_values:
            _wait_for_copies(new_code, in_flight)
            new_code.append(ins)
            copy_out(ins.reads[0][1], -1, ins.reads[0], first=True, last=True)
        elif not _makes_shard(ins) or ins.writes in reduced_values:
            new_code.append(ins)
        else:
            _wait_for_copies(new_code, in_flight)
            if ins.unit in waits:
                new_code.append(ins)
            else:  # the KEEP or ADD of one micro-batch's shard: a copy to the host replaces it
                first, last = ins.op == KEEP, last_at[ins.unit] == position
                copy_out(ins.unit, ins.mb, ins.reads[0], first=first, last=last)
    _wait_for_copies(new_code, in_flight)
    for u in sorted(u for u in last_at if u in waits):
        copy_out(u, -1, ("gshard", u, 0), first=True, last=True)
    _wait_for_copies(new_code, in_flight)
    return new_code


def _makes_shard(ins: Instr) -> bool:
    """Whether ``ins`` produces this rank's shard of a gradient on the device."""
    return bool(ins.writes) and ins.writes[0][0] == "gshard" and ins.op not in (ALL_REDUCE, WAIT)


@dataclass(frozen=True, kw_only=True)
class Update:
    """The pass that moves the updates to the host's processor, unit by unit.

    tiers   where each state lives
    states  whether the optimizer keeps states off the device
    master  whether fp32 master weights are among them
    mixed   whether updated weights are rounded to 16 bits before they are copied to the device
    """

    tiers: Offload
    states: bool
    master: bool
    mixed: bool

    @property
    def phase(self) -> str:
        return LATE if self.tiers.delayed else ""

    def __call__(self, code: Code) -> Code:
        """A unit is opened before the previous unit is updated and closed, so that the disk reads
        while the host computes. Updated shards are gathered at the end.
        """
        updates = sorted((ins for ins in code if ins.op == UPDATE), key=lambda ins: ins.unit)
        if not updates:
            return code
        first = next(at for at, ins in enumerate(code) if ins.op == UPDATE or _is_norm(ins))
        new_code, opened = code[:first], [self.open(ins.unit) for ins in updates]
        if self.tiers.delayed:  # the parameters of the previous step's update come first
            deliveries = [ins for update in updates for ins in self.deliver(update.unit)]
            new_code += [*deliveries, *(wait(ins) for ins in deliveries if ins.lane == "h2d")]
        new_code += self.verdict([ins for ins in code if _is_norm(ins)]) + opened[0]
        for ins, next_open in zip(updates, [*opened[1:], []], strict=True):
            new_code += next_open + self.close(ins)
            if self.tiers.parameters == "device" and not self.tiers.delayed:
                new_code += self.deliver(ins.unit)
        new_code += sorted((ins for ins in code if _gathers_update(ins)), key=lambda ins: ins.unit)
        others = (ins for ins in code[first:] if ins.op != UPDATE)
        return new_code + [ins for ins in others if not _is_norm(ins) and not _gathers_update(ins)]

    def verdict(self, norms: Code) -> Code:
        """The instructions of the norm, and a COPY to the host of what it decides."""
        if not norms:
            return []
        if self.tiers.gradients != "device":
            parts = tuple(("host.norm", u, 0) for _, u, _ in norms[0].reads)
            norms = [norms[0]._replace(reads=parts), *norms[1:]]
        return [*norms, Instr(COPY, reads=norms[0].writes, writes=(("host.verdict", 0, 0),))]

    def places(self, state: str, u: int) -> tuple[Value, Value]:
        """(where a unit's state lives, where the host has it while it updates the unit)."""
        tier = tier_of(self.tiers, state)
        return (tier + state, u, 0), (f"host.{state}", u, 0 if tier == "host." else 1)

    def open(self, u: int) -> Code:
        """Copy what the update of unit ``u`` reads into the host's buffers."""
        states = {"opt": self.states, "gshard": True, "shard": not self.master}
        pairs = [self.places(state, u) for state, needed in states.items() if needed]
        return [_copy(home, buffer) for home, buffer in pairs if home != buffer]

    def close(self, ins: Instr) -> Code:
        """The update, and copies of what it wrote back to where that lives."""
        u, states = ins.unit, {"opt": self.states, "shard": self.tiers.parameters != "device"}
        pairs = [self.places(state, u) for state, changed in states.items() if changed]
        written = tuple(buffer for _, buffer in pairs)
        read = tuple(v for v in written if not self.master or v[0] != "host.shard")
        count, gradient = ("host.count", u, 0), self.places("gshard", u)[1]
        verdict = [("host.verdict", 0, 0)] if any(v[0] == "norm" for v in ins.reads) else []
        reads, writes = (gradient, *read, count, *verdict), (*written, count)
        update = Instr(UPDATE, 0, -1, u, reads, writes, "host", phase=self.phase)
        return [update, *(_copy(buffer, home) for home, buffer in pairs if home != buffer)]

    def deliver(self, u: int) -> Code:
        """Copy a unit's updated parameters to the device, where they live, from the fp32 master
        weights, a row of "opt"; in mixed precision the host rounds them first.
        """
        (_, master), rounded = self.places("opt", u), [("host.shard", u, 1)] * self.mixed
        way = [master, *rounded, ("shard", u, 0)]
        return [_copy(source, into, phase=self.phase) for source, into in pairwise(way)]


def _is_norm(ins: Instr) -> bool:
    """Whether ``ins`` belongs to the norm of all gradients."""
    of_rank = ins.op == NORM and not ins.lane  # not the host's, of one unit
    return of_rank or (ins.op == ALL_REDUCE and ins.reads[0][0] == "norm")


def _gathers_update(ins: Instr) -> bool:
    """Whether ``ins`` gathers a unit's updated shards on all ranks."""
    return ins.op == ALL_GATHER and ins.writes[0][0] == "w" and ins.writes[0][2] == 0


def fetch(place: str, u: int, into: Value) -> Code:
    """Copy this rank's shard of a unit's parameters from ``place`` to the device, as ``into``."""
    buffer = [("host.piece", u, into[2])] * (place == "nvme")
    way = [(PREFIX[place] + "shard", u, 0), *buffer, into]
    return [_copy(source, into) for source, into in pairwise(way)]


def inputs(code: Code, place: str, run: Callable[[Instr], object]) -> Code:
    """The saved input of a recomputed block is copied out while the block computes forward, and
    fetched while the block after it computes backward. One copy out is in flight at a time.

    run  as for `zero.zero3`: inputs are fetched ahead within a run
    """
    new_code: Code = []
    in_flight: list[Instr] = []
    last_use = kept_inputs(code)
    recomputes = [ins for ins in code if ins.op == RECOMPUTE and ins.reads[0] in last_use]
    next_input = {a.reads[0]: b.reads[0] for a, b in pairwise(recomputes) if run(a) == run(b)}
    ahead = set(next_input.values())  # all but the first inputs of runs

    def copy_out(x: Value) -> None:
        in_flight.append(_copy_state(x, "host.x"))
        new_code.append(in_flight[-1])
        if place == "nvme":
            new_code.append(_copy_state(("host.x", *x[1:]), "file.x"))

    def fetch_back(x: Value) -> None:
        if place == "nvme":
            new_code.append(_copy_state(("file.x", *x[1:]), "host.back"))
        source = "host.back" if place == "nvme" else "host.x"
        new_code.append(_copy_state((source, *x[1:]), "back"))

    for position, ins in enumerate(code):
        for x in ins.reads:
            if last_use.get(x) == position:
                _wait_for_copies(new_code, in_flight)
                copy_out(x)
        if ins.op == RECOMPUTE and (x := ins.reads[0]) in last_use:
            _wait_for_copies(new_code, in_flight)
            if x not in ahead:
                fetch_back(x)
            new_code.append(Instr(WAIT, reads=(("back", *x[1:]),)))
            if x in next_input:
                fetch_back(next_input[x])
            ins = ins._replace(reads=(("back", *x[1:]), *ins.reads[1:]))
        new_code.append(ins)
    return new_code


def _wait_for_copies(new_code: Code, in_flight: list[Instr]) -> None:
    """Wait for the copies to the host that are in flight, so that their sources can be freed."""
    new_code += map(wait, in_flight)
    in_flight.clear()


# {(tier of the source, tier of the target): lane}; copies from or to a file have the lane "disk".
LANES = {("", "host"): "d2h", ("host", ""): "h2d", ("host", "host"): "host"}


def _copy(source: Value, into: Value, k: int = -1, phase: str = "") -> Instr:
    """A COPY of a unit's value to another tier, on the lane between the two."""
    tiers = source[0].rpartition(".")[0], into[0].rpartition(".")[0]
    return on_unit(COPY, source, into, k, lane=LANES.get(tiers, "disk"), phase=phase)


def _copy_state(source: Value, kind: str) -> Instr:
    """A COPY of a block's input, which belongs to no unit."""
    return _copy(source, (kind, *source[1:]), source[2])._replace(at=source[1], unit=-1)
