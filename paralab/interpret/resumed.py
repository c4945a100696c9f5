"""How much slower a rank computes after a wait: the longer it then works, the more it loses.

While a rank is idle, other processes use its core and its caches. A long stretch of work after the
wait takes `Cluster.wait_overhead` seconds longer for that. A stretch of `Cluster.wait_work` seconds
loses half of it, and a shorter one less, for it needs little of what the caches held. So several
waits in a row, as at the end of a step, cost little more than one.

The stretch goes up to the next wait and consists of compute and the posting of calls. It counts as
infinitely long after an action's last compute, from an ADD or a KEEP on, and after a RECEIVE's
wait. So the waits of an action cost the same wherever the action stands (deep.py), except in a
rank's last action, where the end of the step follows. Inside an op, which posts the same call again
and again, posting does not count: if it did, predicted 2D layers would be 15 to 20 % too slow.
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

Timed = Sequence[tuple[Instr, Any]]  # a list of instructions, each with its cost


def share(cluster: Cluster, work: float) -> float:
    """The share of `Cluster.wait_overhead` that ``work`` seconds up to the next wait lose."""
    half = cluster.wait_work
    return 1.0 if work == inf or not half else work / (half + work)


def costs_of_calls(code: Iterable[tuple[Instr, Any]]) -> dict[tuple, Any]:
    """{values that a call or a job of the list writes: its cost}."""
    return {ins.writes: cost for ins, cost in code if ins.lane and ins.op != WAIT}


def work_until_wait(
    cluster: Cluster,
    code: Timed,
    begun: Mapping[tuple, Any] | None = None,
    after: float = inf,
    *,
    within: bool = False,
) -> tuple[list[float], float]:
    """Seconds of work up to the next wait: (after each instruction of a rank's list, from the
    beginning of the list).

    begun   `costs_of_calls` of all calls that are waited for, messages optional; None: the list's
    after   seconds of work that follow the list; ``within``: and belong to its last action
    """
    if not cluster.wait_work:  # how long a stretch is makes no difference
        return [inf] * len(code), inf
    begun = costs_of_calls(code) if begun is None else begun
    following, work = [inf] * len(code), after
    action = _action(code[-1][0]) if code and within else None
    for at in range(len(code) - 1, -1, -1):
        ins, cost = code[at]
        if ins.op == WAIT:
            following[at] = inf if ins.at == RECEIVE else work
            call = begun.get(ins.reads)  # a job that the rank does itself (serial.py) is a Compute
            if ins.at == RECEIVE or call is not None and getattr(call, "slower", True):
                work = 0.0
            continue
        if ins.op in COMPUTE:
            if _action(ins) != action:
                action, work = _action(ins), inf
            following[at] = work
            work = _before_a_wait(cost.inside) if cost.inside else work + cost.seconds
            continue
        following[at] = work
        if ins.op in (ADD, KEEP):
            work = inf
        elif ins.op == RECEIVE:  # an action begins
            action = None
        elif not ins.lane:
            work += cost.seconds
        elif ins.op not in MESSAGES:
            work += cluster.call_overhead
    return following, work


def inside(cluster: Cluster, parts: list[tuple[Instr, Any]]) -> list[tuple[Instr, Any]]:
    """The parts of an op, each of its calls with the share of ``slower`` that its wait costs. What
    follows the last call is not known, and taken for long.
    """
    begun = {ins.writes: at for at, (ins, _) in enumerate(parts) if ins.op == CALL}
    shared, work = parts.copy(), inf
    for ins, cost in reversed(parts):
        if ins.op == WAIT:
            at = begun[ins.reads]
            call, posted = shared[at]
            shared[at] = call, posted._replace(slower=posted.slower * share(cluster, work))
            work = 0.0
        elif ins.op != CALL:
            work += cost.seconds
    return shared


def _before_a_wait(parts: Timed) -> float:
    """Seconds that an op with calls of its own computes before its first wait."""
    first = takewhile(lambda part: part[0].op != WAIT, parts)
    return sum(cost.seconds for ins, cost in first if ins.op != CALL)


def _action(ins: Instr) -> tuple[str, int]:
    """Equal for two neighbouring instructions of compute that belong to the same action."""
    return ins.op if ins.op in (FORWARD, BACKWARD_WEIGHT) else "", ins.mb
