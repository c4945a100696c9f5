"""ZeRO: data-parallel ranks shard the model states that plain data parallelism replicates.

N ranks, Psi parameters, w bytes per element, K bytes of optimizer states per parameter (AdamW in
fp32: 8; with fp32 masters of 16-bit parameters 12, as in the paper); m micro-batches (Rajbhandari+
2020, arXiv:1910.02054, sec. 5 and 7):

    stage   memory per rank               elements sent per rank and step, times (N-1)/N
    0       (2w + K) Psi                  2 Psi                all-reduce
    1       (2w + K/N) Psi                2 Psi                reduce-scatter, all-gather
    2       (w + (w + K)/N) Psi           (m + 1) Psi          reduced as produced
    3       (2w + K)/N Psi                3 m Psi              gathered for each use

A unit is a group of parameters that is gathered and reduced as one buffer (parallel/buckets.py).
Every stage reduces a unit's gradient to a shard: once a step (`zero1`) or in every micro-batch
(`zero2`). Stages 1 and 2 then gather the updated shards (`gather_updated`); stage 3 gathers
parameters for each use instead (`zero3`). Each gather writes a value of its own, which is freed
after its last use, so no instruction reshards.

With pp > 1 ZeRO-2 is ZeRO-1: reducing in each of the m micro-batches would send (m + 1) Psi
elements instead of 2 Psi while the pipeline sends its messages (DeepSpeed refuses stages 2 and 3
there). The last backward then waits for no reduce-scatter, since the previous pipeline stage waits
for the gradient that it sends; w Psi / N bytes more are alive when it ends.

With ``shard`` groups the states are sharded inside a group, and `replicas` sums a shard's gradient
over the groups (HSDP, Zhao+ 2023, arXiv:2304.11277, sec. 3.2.2). With ``secondary_shard``
`second_copy` makes backward gather inside a node: hpZ of ZeRO++ (Wang+ 2023, arXiv:2306.10209, sec.
3.2), for w Psi / n bytes more on each of n neighbours. Lab 05.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container

from paralab.programs.instructions import (
    ADD,
    ADDS_GRADIENTS,
    ALL_GATHER,
    COMPUTE,
    COPY,
    FORWARD,
    KEEP,
    Code,
    Instr,
    Value,
    all_reduce,
    completed,
    gradients,
    insert,
    on_unit,
    reduce_scatter,
    wait,
)


def zero1(code: Code, *, alone: bool = False, at_once: bool = False) -> Code:
    """Like data parallelism, but every rank receives only its shard of the sum. At most one
    reduce-scatter is in flight: its gradient is freed before the next shard is allocated.

    alone    states are not sharded (one rank per group): the gradient itself is the shard
    at_once  all reduce-scatters may be in flight together: backward waits for none, and for a
             moment all shards exist next to all gradients
    """
    new_code: Code = []
    completed_at, in_flight = completed(code), None  # in_flight: the last reduce-scatter
    for position, ins in enumerate(code):
        new_code.append(ins)
        for u in completed_at.get(position, ()):
            if alone:
                new_code.append(on_unit(KEEP, ("grad", u, 0), ("gshard", u, 0)))
                continue
            if in_flight is not None and not at_once:
                new_code.append(wait(in_flight))
            in_flight = reduce_scatter(u)._replace(writes=(("gshard", u, 0),))
            new_code.append(in_flight)
    return new_code


def zero2(code: Code, *, alone: bool = False) -> Code:
    """A unit's gradient is reduced after each micro-batch, and this rank accumulates its shard. At
    most one reduce-scatter is in flight: its result is added before the next one starts. ``alone``
    as in `zero1`.
    """
    new_code: Code = []
    completed_at, pending_adds, seen = completed(code, per_microbatch=True), [], set()
    for position, ins in enumerate(code):
        if ins.op in ADDS_GRADIENTS:  # it now writes the gradient of its own micro-batch alone
            ins = ins._replace(
                writes=tuple((v[0], v[1], ins.mb) if v[0] == "grad" else v for v in ins.writes)
            )
        new_code.append(ins)
        for u in completed_at.get(position, ()):
            k, grad = ins.mb, ("grad", u, ins.mb)
            part = grad if alone else ("part", u, k)
            op = ADD if u in seen else KEEP  # the first micro-batch's part becomes the sum
            add = on_unit(op, part, ("gshard", u, 0), k)
            seen.add(u)
            if alone:
                new_code.append(add)
                continue
            reduction = reduce_scatter(u)._replace(mb=k, reads=(grad,), writes=(part,))
            new_code += [*pending_adds, reduction]
            pending_adds = [add]
    return new_code + pending_adds


def replicas(code: Code) -> Code:
    """HSDP: after backward a shard's gradient is summed over the ranks that hold the same shard."""
    return code + [all_reduce(u, "replica", "gshard") for u in sorted(gradients(code))]


def gather_updated(code: Code) -> Code:
    """Stages 1 and 2: every updated shard is gathered by all ranks."""
    after = {
        at: [_gather(v, ("w", v[1], 0)) for v in ins.writes if v[0] == "shard"]
        for at, ins in enumerate(code)
    }
    return insert(code, after)


def zero3(
    code: Code,
    prefetch: int,
    run: Callable[[Instr], object],
    once: Container[int] = (),
    *,
    alone: bool = False,
    fetch: Callable[[int, Value], Code] | None = None,
) -> Code:
    """A unit's parameters are gathered for each use, at most ``prefetch`` units before the use.

    run    key of an instruction: uses in one run share a gather, which is moved ahead only within
           its run. A run is an action of the schedule, in a relay all forwards or all backwards
    once   units of which all runs share one gather
    alone  states are not sharded (one rank per group): what is fetched is not gathered
    fetch  for parameters that live off the device: the copies that bring this rank's shard of a
           unit to the device, as the value given. They start one unit earlier than the gather
    """

    def visit(ins: Instr, u: int) -> tuple[object, int]:
        return None if u in once else run(ins), u

    runs: dict[object, dict[int, int]] = defaultdict(dict)  # run -> {unit: position of first use}
    for position, ins in enumerate(code):
        for v in ins.reads if ins.op in COMPUTE else ():
            if v[0] == "w":
                runs[run(ins)].setdefault(v[1], position)
    version: dict[tuple[object, int], int] = {}  # visit -> number of the gather
    copies_before, gathers_before = defaultdict(list), defaultdict(list)  # position -> instructions
    for uses in runs.values():
        positions = list(uses.values())
        for index, (u, position) in enumerate(uses.items()):
            if (key := visit(code[position], u)) in version:
                continue
            number = version[key] = len(version) + 1
            source, w = ("shard", u, 0), ("w", u, number)
            if fetch is not None:
                source = w if alone else ("piece", u, number)
                ahead = prefetch + (not alone)
                copies_before[positions[max(0, index - ahead)]] += fetch(u, source)
            if source != w:
                gather = _gather(source, w, code[positions[0]].mb)
                gathers_before[positions[max(0, index - prefetch)]].append(gather)
    new_code: Code = []
    for position, ins in enumerate(code):
        new_code += copies_before[position] + gathers_before[position]
        if ins.op in COMPUTE:
            reads = (
                ("w", v[1], version[visit(ins, v[1])]) if v[0] == "w" else v for v in ins.reads
            )
            ins = ins._replace(reads=tuple(reads))
        new_code.append(ins)
    return new_code


def second_copy(code: Code) -> Code:
    """hpZ: from the parameters that forward gathers each rank keeps a second, larger shard, cut
    over the ranks of its node alone. Backward gathers these shards, so that 2 M instead of 3 M
    bytes cross between nodes in each micro-batch, M being the bytes of the parameters.
    """
    of_forward = {v for ins in code if ins.op == FORWARD for v in ins.reads}
    new_code: Code = []
    copied: set[Value] = set()
    for ins in code:
        gathers = ins.op == ALL_GATHER and ins.writes[0][0] == "w"
        if gathers and ins.writes[0] not in of_forward:
            ins = ins._replace(reads=(("second", ins.unit, 0),), lane="secondary")
        new_code.append(ins)
        for v in ins.reads if ins.op == FORWARD else ():
            second = ("second", v[1], 0)
            if v[0] == "w" and second not in copied:
                copied.add(second)
                new_code.append(on_unit(COPY, v, second, ins.mb))
    return new_code


def _gather(source: Value, into: Value, k: int = -1) -> Instr:
    return on_unit(ALL_GATHER, source, into, k, lane="dp", phase="param_gather")
