"""Pipeline schedules as data: what every rank computes, and in which order. Nothing else.

A model cut into stages lives on ``pp`` ranks, stage s on rank s % pp. A *schedule* is one list of
actions per rank; a rank works through its list from left to right and waits where what an action
needs has not arrived. Six functions below write such lists, and so can you (lab 04). p is ``pp``,
r a rank, m the number of micro-batches, v the number of stages per rank. F, B and W are one rank's
seconds for a micro-batch's forward, its whole backward, and the weight half of that (`Action`). A
micro-batch is alive on a rank while the rank keeps its activations for backward.

                 bubble: idle seconds per rank   most micro-batches alive on rank r
    naive        m (p-1) (F + B)                 1
    gpipe        (p-1) (F + B)                   m
    one_f_one_b  (p-1) (F + B)                   min(m, p - r)
    interleaved  (p-1) (F + B) / v               min(m v, 2 (p-r-1) + (v-1) p + 1) chunks
    zb_h1        (p-1) (F + I - W)               min(m, p - r), and r weight halves pending
    zb_h2        (p-1) (F + I - 2 W)             min(m, 2 (p-r) - 1), and 2 r halves pending

I = B - W is the input half, T_B of the Zero Bubble paper. The two zb rows hold for m >= 2p - 1 and
W <= F: a weight half hides no more than the forward of another rank. Where F + I < 2 W, zb_h2 has
no bubble. A weight half is pending between the input half of its micro-batch and its own turn, and
holds memory meanwhile.

Ideal work is m (F + B), so the bubble's share of the step is bubble / (bubble + m (F + B)). An
action is written in the notation of torch.distributed.pipelining: "4F0" is stage 4, forward,
micro-batch 0. The lists also determine which ranks exchange which messages (parallel/lowering.py),
and whether the ranks can deadlock (theory/schedule_check.py). Labs 03 and 04 show all schedules.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from paralab.checks import choice, illegal, whole

KINDS = {
    "F": "forward",
    "B": "whole backward",
    "I": "input half of the backward",
    "W": "weight half of the backward",
}


class Action(NamedTuple):
    """One computation, a box of a pipeline diagram: ``Action(4, "F", 0)`` is printed as 4F0, in
    a list, too.

    stage       global number of the stage; stage 0 has the embedding
    kind        "F" forward, "B" whole backward, "I" its input half (the gradient that the previous
                stage waits for), "W" its weight half (which no stage waits for)
    microbatch  0 .. m-1
    """

    stage: int
    kind: str
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Schedule = list[list[Action]]


def naive(pp: int, microbatches: int) -> Schedule:
    """Layer-wise model parallelism: a micro-batch's forward and backward pass through all stages
    before the next micro-batch begins. One rank works at a time, so the bubble is (p-1)/p of the
    step, however many micro-batches there are. (GPipe, Huang+ 2019, arXiv:1811.06965, fig. 2b.)
    """
    pp, microbatches = _sizes(pp, microbatches)
    return [
        [Action(rank, kind, i) for i in range(microbatches) for kind in "FB"] for rank in range(pp)
    ]


def gpipe(pp: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    All m are alive even with p = 1, where "1f1b" keeps only one. GPipe (Huang+ 2019,
    arXiv:1811.06965) sec. 2.3, fig. 2c, runs the backwards from the last micro-batch to the first;
    here they start with the first, as in PTD-P's fig. 3 and in torch, and the bubble is the same.
    GPipe also recomputes: a stage keeps only its own input. The nearest setting here is
    recompute="full", which keeps the input of every block.
    """
    pp, microbatches = _sizes(pp, microbatches)
    return [
        [Action(rank, kind, i) for kind in "FB" for i in range(microbatches)] for rank in range(pp)
    ]


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """As many warm-up forwards as keep the last rank busy, then one forward, one backward in turn.

    The bubble is GPipe's, but what is alive no longer grows with m. PipeDream-Flush (Narayanan+
    2021, arXiv:2006.09503, sec. 3.2), as in PTD-P (arXiv:2104.04473) sec. 2.2.1, fig. 4.
    """
    pp, microbatches = _sizes(pp, microbatches)
    return [_one_f_one_b(rank, pp - rank - 1, microbatches) for rank in range(pp)]


def _one_f_one_b(rank: int, warmup: int, microbatches: int, backward: str = "B") -> list[Action]:
    """The list of a rank with one stage. backward: the kind of its backwards, B or I."""
    kinds = "F", backward
    forwards, backwards = ([Action(rank, kind, i) for i in range(microbatches)] for kind in kinds)
    return _in_turn(forwards, backwards, warmup)


def _in_turn(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Warm-up: so many forwards. Steady state: a forward, a backward. Cool-down: backwards."""
    steady = forwards[warmup:]
    turns = [action for turn in zip(steady, backwards, strict=False) for action in turn]
    return forwards[:warmup] + turns + backwards[len(steady) :]


def interleaved(pp: int, microbatches: int, virtual_stages: int) -> Schedule:
    """1F1B with v stages per rank: rank r has the stages r, r + p, r + 2p, ... and runs p
    micro-batches through each in turn.

    The bubble is (p-1)/(v m + p-1) of the step, for (p v - 1)/(p-1) times the messages of 1F1B (the
    paper says v). A chunk is 1/v of the rank's layers. Before its first backward the last rank has
    to bring p micro-batches to its last chunk, with (v-1) p forwards. A rank d places before the
    last needs d more forwards if messages take no time. It makes 2 d more, so that messages may
    take time both ways. With v = 1 the warm-up is therefore twice that of `one_f_one_b`: this
    schedule is then faster where messages take time, and up to twice as many micro-batches are
    alive. m must be a multiple of p. PTD-P (Narayanan+ 2021, arXiv:2104.04473) sec. 2.2.2, fig. 4.
    """
    pp, microbatches, v = checked_sizes("interleaved", pp, microbatches, virtual_stages)
    # p micro-batches pass through a rank's first stage, its second, ..., then the next p do.
    turns = [
        (chunk, i)
        for first in range(0, microbatches, pp)
        for chunk in range(v)
        for i in range(first, first + pp)
    ]
    schedule = []
    for rank in range(pp):
        forwards = [Action(chunk * pp + rank, "F", i) for chunk, i in turns]
        backwards = [Action((v - 1 - chunk) * pp + rank, "B", i) for chunk, i in turns]
        schedule.append(_in_turn(forwards, backwards, 2 * (pp - rank - 1) + (v - 1) * pp))
    return schedule


def zb_h1(pp: int, microbatches: int) -> Schedule:
    """1F1B with a split backward: deferred weight halves fill the bubble at the end of the step.

    Rank r defers r weight halves. The bubble is a third of 1F1B's where F = I = W, and no rank has
    more micro-batches alive or pending than 1F1B's first rank has alive. Zero Bubble (Qi+ 2023,
    arXiv:2401.10241) sec. 2.1, fig. 3.
    """
    pp, microbatches = _sizes(pp, microbatches)
    return [_zero_bubble(rank, pp - rank - 1, rank, microbatches) for rank in range(pp)]


def zb_h2(pp: int, microbatches: int) -> Schedule:
    """ZB-H1 with twice the warm-up, which fills the bubble at the start of the step too.

    Rank r defers 2 r weight halves. There is no bubble where F = I = W and m >= 2p - 1. The ranks'
    steps start and end at different times, and no rank waits for another one to start the next
    step. With clipping, or in fp16, the norm over all ranks makes them wait (the paper, sec. 4,
    updates first and rolls back a wrong update; not done here). Zero Bubble (Qi+ 2023,
    arXiv:2401.10241) sec. 2.2, fig. 3.
    """
    pp, microbatches = _sizes(pp, microbatches)
    return [_zero_bubble(rank, 2 * (pp - rank - 1), 2 * rank, microbatches) for rank in range(pp)]


def _zero_bubble(rank: int, warmup: int, delay: int, microbatches: int) -> list[Action]:
    """1F1B of forwards and input halves; a weight half runs after the input half of the micro-batch
    ``delay`` later, and those that are left run at the end.
    """
    weights, actions = [Action(rank, "W", i) for i in range(microbatches)], []
    for action in _one_f_one_b(rank, warmup, microbatches, "I"):
        actions.append(action)
        if action.kind == "I" and action.microbatch >= delay:
            actions.append(weights[action.microbatch - delay])
    return actions + weights[max(microbatches - delay, 0) :]


# What Plan(schedule="...") names.
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}

SPLIT = ("zb-h1", "zb-h2")  # schedules that defer weight halves of backward
RELAY = "l2l"  # Plan's name for `relay`: one rank, one part of the model after another


def relay(parts: int, microbatches: int) -> list[Action]:
    """The layer relay of L2L (Pudipeddi+ 2020, arXiv:2002.05645): one part of the model at a time.

    An action's ``stage`` is the number of the part. All micro-batches pass through a part before
    the next part begins, in forward from the first part to the last, in backward from the last to
    the first. The last part, the head, runs each micro-batch's backward right after its forward, so
    that the logits of one micro-batch are alive, not of m.
    """
    head, numbers = parts - 1, range(microbatches)
    forwards = [Action(part, "F", i) for part in range(head) for i in numbers]
    of_head = [Action(head, kind, i) for i in numbers for kind in "FB"]
    backwards = [Action(part, "B", i) for part in reversed(range(head)) for i in numbers]
    return forwards + of_head + backwards


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_LEGAL_ACTION = 'stage, F, B, I or W, and micro-batch, such as "4F0"'


def actions(lists: Iterable[Iterable[Action | str]]) -> Schedule:
    """A schedule from lists of actions or of their texts. A rank's list may be one text: "0F0 0B0".

    Raises ValueError with the rank and position of an entry that is not an action.
    """
    if isinstance(lists, (str, bytes)) or not isinstance(lists, Iterable):
        raise illegal("schedule", lists, "not a schedule", "a list of actions per pipeline rank")
    schedule = []
    for rank, row in enumerate(lists):
        items = row.split() if isinstance(row, str) else row
        if not isinstance(items, Iterable):
            raise illegal(f"schedule[{rank}]", row, "not a list of actions", '["0F0", ...]')
        rank_actions = list(items)
        if not set(map(type, rank_actions)) <= {Action}:
            rank_actions = [_action(item, rank, at) for at, item in enumerate(rank_actions)]
        schedule.append(rank_actions)
    return schedule


def _action(item: Any, rank: int, position: int) -> Action:
    try:
        if isinstance(item, str):
            stage, kind, microbatch = _ACTION.fullmatch(item).groups()
            return Action(int(stage), kind, int(microbatch))
        stage, kind, microbatch = item
        if kind in KINDS:
            return Action(
                whole("stage", stage, at_least=0), kind, whole("microbatch", microbatch, at_least=0)
            )
    except (AttributeError, TypeError, ValueError):
        pass
    raise illegal(f"schedule[{rank}][{position}]", item, "not an action", _LEGAL_ACTION)


def build(
    schedule: str | Callable[..., Sequence[Sequence[Action | str]]],
    *,
    pp: int,
    microbatches: int,
    virtual_stages: int = 1,
) -> Schedule:
    """The lists of a named schedule, or those that your own function returns.

    Your function is called as f(pp, microbatches), or as f(pp, microbatches, virtual_stages) if it
    takes three arguments. theory/schedule_check.py checks the lists, not this function. Raises
    ValueError if the schedule does not exist for these sizes.
    """
    if not callable(schedule):
        choice("schedule", schedule, tuple(SCHEDULES))
    sizes = checked_sizes(schedule, pp, microbatches, virtual_stages)
    if callable(schedule):
        return actions(schedule(*(sizes if takes_three(schedule) else sizes[:2])))
    return SCHEDULES[schedule](*(sizes if schedule == "interleaved" else sizes[:2]))


def checked_sizes(
    schedule: str | Callable[..., Any], pp: int, microbatches: int, virtual_stages: int
) -> tuple[int, int, int]:
    """The three sizes. Raises ValueError if the named schedule does not exist for them."""
    pp, microbatches = _sizes(pp, microbatches)
    v = whole("virtual_stages", virtual_stages, at_least=1)
    if schedule == "interleaved" and microbatches % pp:
        raise illegal("microbatches", microbatches, *uneven_groups(pp, microbatches))
    if schedule != "interleaved" and not callable(schedule) and v > 1:
        why = f"schedule={schedule!r} has one stage per rank"
        legal = "1, or schedule='interleaved' or a function of your own"
        raise illegal("virtual_stages", v, why, legal)
    return pp, microbatches, v


def uneven_groups(pp: int, microbatches: int) -> tuple[str, str]:
    """(why, legal) for an error: ``microbatches`` is not a multiple of ``pp``."""
    near = sorted({max(microbatches // pp, 1) * pp, (microbatches // pp + 1) * pp})
    return (
        f"schedule='interleaved' runs them through each of a rank's stages in groups of pp={pp}",
        f"a multiple of {pp}, such as {' or '.join(map(str, near))}; or schedule='1f1b' with "
        "virtual_stages=1, which takes any number",
    )


OWN_SCHEDULES = ("f(pp, microbatches)", "f(pp, microbatches, virtual_stages)")


def takes_three(function: Callable[..., Any]) -> bool:
    """Whether ``function`` is f(pp, microbatches, virtual_stages), not f(pp, microbatches).

    Raises ValueError if it is neither.
    """
    for sizes in ((1, 1, 1), (1, 1)):
        try:
            inspect.signature(function).bind(*sizes)
        except (TypeError, ValueError):  # a built-in function, for example, has no signature
            continue
        return len(sizes) == 3
    legal = " | ".join((*map(repr, (*SCHEDULES, RELAY)), *OWN_SCHEDULES))
    raise illegal("schedule", function, "cannot be called with the sizes of a pipeline", legal)


def _sizes(pp: int, microbatches: int) -> tuple[int, int]:
    return whole("pp", pp, at_least=1), whole("microbatches", microbatches, at_least=1)
