"""How much slower a rank goes on behind a wait: the more, the more work there is up to the next.

While a rank is idle, others use its core and its caches. Much work pays `Cluster.wait_overhead` for
that. Work of `Cluster.wait_work` seconds pays half, and less pays less: it needs little of what the
caches held. So waits one behind the other, as at the end of a step, cost little more than one.

In a rank's list, work is what it computes, and the posting of calls. Behind an action's last
instruction of compute, from an ADD or a KEEP on, and behind what came from another stage, what
follows is taken for much: so an action has the same waits wherever it stands (deep.py), but for the
last one, behind which comes what ends the step. Inside an op, where the same call is posted again
and again, posting is no work: counted as such, it would make 2D layers 15 to 20 % too slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from math import inf
from typing import Any

from paralab.programs.instructions import (
    ADD,
    BACKWARD_WEIGHT,
    CALL,
    COMPUTE,
    FORWARD,
    KEEP,
    MESSAGES,
    RECEIVE,
    WAIT,
    Instr,
)
from paralab.spec import Cluster

Costs = Sequence[tuple[Instr, Any]]  # a list, and what each instruction takes


def share(cluster: Cluster, work: float) -> float:
    """Of `Cluster.wait_overhead`, with so much work up to the next wait."""
    half = cluster.wait_work
    return 1.0 if work == inf or not half else work / (half + work)


def calls(code: Iterable[tuple[Instr, Any]]) -> dict[tuple, Any]:
    """What a list's calls take, by what they write."""
    return {ins.writes: cost for ins, cost in code if ins.lane and ins.op != WAIT}


def until(
    cluster: Cluster,
    code: Costs,
    begun: Mapping[tuple, Any] | None = None,
    after: float = inf,
    *,
    within: bool = False,
) -> tuple[list[float], float]:
    """Seconds of work up to the next wait: behind each instruction of a rank's list, and in front
    of the first.

    begun   see `calls`; None: those of the list. It may lack messages
    after   what there is behind the list; ``within``: of the same action
    """
    begun = calls(code) if begun is None else begun
    found, work = [inf] * len(code), after
    action = _action(code[-1][0]) if code and within else None
    for at in range(len(code) - 1, -1, -1):
        ins, cost = code[at]
        if ins.op == WAIT:
            found[at] = inf if ins.at == RECEIVE else work
            call = begun.get(ins.reads)  # of a job that the rank does itself (serial.py) work
            if ins.at == RECEIVE or call is not None and getattr(call, "slower", True):
                work = 0.0
            continue
        if ins.op in COMPUTE:
            if _action(ins) != action:
                action, work = _action(ins), inf
            found[at] = work
            work = _before_a_wait(cost.inside) if cost.inside else work + cost.seconds
            continue
        found[at] = work
        if ins.op in (ADD, KEEP):
            work = inf
        elif ins.op == RECEIVE:  # an action begins
            action = None
        elif not ins.lane:
            work += cost.seconds
        elif ins.op not in MESSAGES:
            work += cluster.call_overhead
    return found, work


def inside(cluster: Cluster, parts: list[tuple[Instr, Any]]) -> list[tuple[Instr, Any]]:
    """What an op consists of, its calls with what their waits cost. What comes behind the last of
    them is not known here.
    """
    begun = {ins.writes: at for at, (ins, _) in enumerate(parts) if ins.op == CALL}
    found, work = parts.copy(), inf
    for ins, cost in reversed(parts):
        if ins.op == WAIT:
            at = begun[ins.reads]
            call, takes = found[at]
            found[at] = call, takes._replace(slower=takes.slower * share(cluster, work))
            work = 0.0
        elif ins.op != CALL:
            work += cost.seconds
    return found


def _before_a_wait(parts: Costs) -> float:
    """Of an op that waits inside: what it computes before."""
    first = takewhile(lambda part: part[0].op != WAIT, parts)
    return sum(cost.seconds for ins, cost in first if ins.op != CALL)


def _action(ins: Instr) -> tuple[str, int]:
    """Which action an instruction of compute belongs to, among those that follow one another."""
    return ins.op if ins.op in (FORWARD, BACKWARD_WEIGHT) else "", ins.mb
