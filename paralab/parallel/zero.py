"""ZeRO: data-parallel ranks shard the model states that plain data parallelism replicates.

N ranks, Psi parameters, w bytes per element, K bytes of optimizer states per parameter (AdamW in
fp32: 8); m micro-batches (Rajbhandari+ 2020, arXiv:1910.02054, sec. 5 and 7):

    stage   memory per rank               elements sent per rank and step, times (N-1)/N
    0       (2w + K) Psi                  2 Psi                all-reduce
    1       (2w + K/N) Psi                2 Psi                reduce-scatter, all-gather
    2       (w + (w + K)/N) Psi           (m + 1) Psi          reduced as produced
    3       (2w + K)/N Psi                3 m Psi              gathered for each use

Every stage reduces a unit's gradient to a shard, by `zero1` once a step or by `zero2` in every
micro-batch. Stages 1 and 2 then gather the updated shards (`gather_updated`); stage 3 gathers
parameters for each use instead (`zero3`). Each gather makes a value of its own, whose memory ends
behind its last reader, so no instruction reshards. With pp > 1 ZeRO-2 is ZeRO-1: to reduce in each
of the m micro-batches would send (m + 1) Psi in place of 2 Psi, in the pipeline's way (DeepSpeed
refuses stages 2 and 3 there). The last of its backwards waits for no reduce-scatter, as the
pipeline's stage before waits for it; w Psi / N bytes more are alive when it ends. A unit is a group
of parameters that is gathered and reduced as one buffer (parallel/buckets.py).

With ``shard`` groups the states are sharded inside a group, and `replicas` sums a shard's gradient
over the groups (HSDP, Zhao+ 2023, arXiv:2304.11277, sec. 3.2.2). With ``secondary_shard``
`second_copy` gathers for backward inside a node: hpZ of ZeRO++ (Wang+ 2023, arXiv:2306.10209, sec.
3.2), for w Psi / n bytes more on each of n neighbours. Lab 05.
"""

from __future__ import annotations

from collections.abc import Callable

from paralab.programs.instructions import (
    ADD,
    ADDS_GRADIENTS,
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTE,
    COPY,
    FORWARD,
    KEEP,
    Code,
    Instr,
    Value,
    completed,
    gradients,
    insert,
    reduce_scatter,
    wait,
)


def zero1(code: Code, *, alone: bool = False, at_once: bool = False) -> Code:
    """Like data parallelism, but every rank receives only its shard of the sum. At most one
    reduce-scatter is in flight: its gradient is freed before the next shard is made.

    alone    no other rank has a part of the sum: the gradient is the shard
    at_once  all are in flight: backward waits for none, and all shards are there next to all
             gradients for a moment
    """
    made: Code = []
    # {position: units whose gradient is complete behind it}, and the last reduce-scatter
    ends, in_flight = completed(code), None
    for position, ins in enumerate(code):
        made.append(ins)
        for u in ends.get(position, ()):
            if alone:
                made.append(Instr(KEEP, u, -1, u, (("grad", u, 0),), (("gshard", u, 0),)))
                continue
            if in_flight is not None and not at_once:
                made.append(wait(in_flight))
            in_flight = reduce_scatter(u)._replace(writes=(("gshard", u, 0),))
            made.append(in_flight)
    return made


def zero2(code: Code, *, alone: bool = False) -> Code:
    """A unit's gradient is reduced after each micro-batch and this rank's shard of it is added up.
    At most one reduce-scatter is in flight: it is waited for, and added, before the next begins.
    """
    made: Code = []
    ends, owed, seen = completed(code, per_microbatch=True), [], set()
    for position, ins in enumerate(code):
        if ins.op in ADDS_GRADIENTS:  # a gradient of this micro-batch alone
            ins = ins._replace(
                writes=tuple((v[0], v[1], ins.mb) if v[0] == "grad" else v for v in ins.writes)
            )
        made.append(ins)
        for u in ends.get(position, ()):
            grad, part, k = ("grad", u, ins.mb), ("part", u, ins.mb), ins.mb
            made += owed
            if not alone:
                made.append(reduce_scatter(u)._replace(mb=k, reads=(grad,), writes=(part,)))
            op, given = ADD if u in seen else KEEP, grad if alone else part
            add = Instr(op, u, k, u, (given,), (("gshard", u, 0),))
            seen.add(u)
            made += [add] * alone
            owed = [add] * (not alone)
    return made + owed


def replicas(code: Code) -> Code:
    """After backward each shard's gradient is summed over the ranks that hold the same shard."""
    calls = [(u, ("gshard", u, 0)) for u in sorted(gradients(code))]
    return code + [
        Instr(ALL_REDUCE, u, -1, u, (v,), (v,), "replica", phase="grad_sync") for u, v in calls
    ]


def gather_updated(code: Code) -> Code:
    """Stages 1 and 2: every updated shard is gathered by all ranks."""
    after = {
        at: [_gather(v[1], v, ("w", v[1], 0)) for v in ins.writes if v[0] == "shard"]
        for at, ins in enumerate(code)
    }
    return insert(code, after)


def zero3(
    code: Code,
    prefetch: int,
    visit: Callable[[Instr, int], tuple[object, object]],
    *,
    bring: Callable[[int, int], tuple[Code, bool]] | None = None,
) -> Code:
    """A unit's parameters are gathered for each visit of the units that use them, at most
    ``prefetch`` units before they are used.

    visit      called with an instruction and a unit that it reads, returns two keys (run, visit):
               gathers are moved ahead inside a run only, and uses with the same visit share one
               gather. Both are an action of the schedule, but longer in a relay
    bring      where parameters live off the device: called with a unit and the number of its
               gather, returns the copies that bring this rank's share to the device, and whether it
               has to be gathered then. If so, they begin one unit's compute before the gather
    """
    runs: dict[object, dict[int, int]] = {}  # run -> {unit: first position that uses it}
    for position, ins in enumerate(code):
        for v in ins.reads if ins.op in COMPUTE else ():
            if v[0] == "w":
                runs.setdefault(visit(ins, v[1])[0], {}).setdefault(v[1], position)
    version: dict[tuple[object, int], int] = {}
    before: dict[int, tuple[Code, Code]] = {}  # position -> copies, then gathers
    for uses in runs.values():
        begin = list(uses.values())
        for at, (u, position) in enumerate(uses.items()):
            key = visit(code[position], u)[1], u
            if key in version:
                continue
            number = version[key] = len(version) + 1
            source, copies, gathers = ("shard", u, 0), [], True
            if bring is not None:
                copies, gathers = bring(u, number)
                source = copies[-1].writes[0]
            early = begin[max(0, at - prefetch - gathers)]
            before.setdefault(early, ([], []))[0].extend(copies)
            if gathers:
                gather = _gather(u, source, ("w", u, number), code[begin[0]].mb)
                before.setdefault(begin[max(0, at - prefetch)], ([], []))[1].append(gather)
    made: Code = []
    for position, ins in enumerate(code):
        copies, gathers = before.get(position, ((), ()))
        made += [*copies, *gathers]
        if ins.op in COMPUTE:
            ins = ins._replace(
                reads=tuple(
                    ("w", v[1], version[visit(ins, v[1])[1], v[1]]) if v[0] == "w" else v
                    for v in ins.reads
                )
            )
        made.append(ins)
    return made


def second_copy(code: Code) -> Code:
    """hpZ: of the parameters that forward gathers each rank keeps a second, larger shard, over the
    ranks of its node alone, and backward gathers from these: 2 M instead of 3 M cross between
    nodes in each micro-batch, M the bytes of the parameters.
    """
    user: dict[Value, str] = {}  # a gathered unit -> the op that uses it first
    for ins in code:
        for v in ins.reads if ins.op in COMPUTE else ():
            user.setdefault(v, ins.op)
    made: Code = []
    kept: set[Value] = set()
    for ins in code:
        late = ins.op == ALL_GATHER and user.get(ins.writes[0], FORWARD) != FORWARD
        if late and ins.writes[0][0] == "w":
            ins = ins._replace(reads=(("second", ins.unit, 0),), lane="secondary")
        made.append(ins)
        for v in ins.reads if ins.op == FORWARD else ():
            second = ("second", v[1], 0)
            if v[0] == "w" and second not in kept:
                kept.add(second)
                made.append(Instr(COPY, v[1], ins.mb, v[1], (v,), (second,)))
    return made


def _gather(u: int, source: Value, into: Value, k: int = -1) -> Instr:
    return Instr(ALL_GATHER, u, k, u, (source,), (into,), "dp", phase="param_gather")
