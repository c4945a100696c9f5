"""The cost of a pipeline schedule: makespan, bubble and live activations, by simulation.

In `simulate` a rank works through its list in order; an action starts when its rank is free and the
result that it needs has arrived (theory/order.py). The bubble is

    bubble rate = 1 - sum of compute / (p cost),   cost = the longest of the ranks' (end - start)

as defined in the Zero Bubble paper (Qi+ 2023, arXiv:2401.10241, sec. 5.3). The makespan in place of
``cost`` would overstate it: with ZB-H2 the ranks neither start nor end together. From that paper's
Table 6 the simulation gives its Table 5's bubble rates of 1F1B, ZB-H1 and ZB-H2 (of 1F1B-I higher
ones: `papers.errata`). Labs 03 and 04.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from paralab.checks import choice, count_of, illegal, real
from paralab.parallel.schedules import SCHEDULES, Action, checked_sizes
from paralab.theory.order import B, F, I, Order, W
from paralab.theory.schedule_check import checked, peak_live, timed

if TYPE_CHECKING:
    from paralab.report.tables import Tables

Cost = float | Sequence[float]


@dataclass(frozen=True, eq=False, repr=False)
class Simulation:
    """A schedule with the start and end of its actions, in seconds from the first start.

    order       the schedule as arrays: rank, stage, kind, microbatch of every action, rank by rank
    start, end  seconds of every action, in the same order                (number of actions,)
    """

    schedule: list[list[Action]]
    order: Order
    start: np.ndarray
    end: np.ndarray

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return float(self.end.max() - self.start.min())

    @cached_property
    def cost(self) -> float:
        """Seconds of the rank that takes longest from its first start to its last end."""
        first, last = self.order.first[:-1], self.order.first[1:] - 1
        return float((self.end[last] - self.start[first]).max())

    @cached_property
    def busy(self) -> list[float]:
        """Seconds of compute per rank."""
        return np.add.reduceat(self.end - self.start, self.order.first[:-1]).tolist()

    @cached_property
    def bubble_rate(self) -> float:
        """Idle share of device time, 1 - sum(busy) / (p cost); 0 if no action takes time."""
        device_time = self.order.ranks * self.cost
        # Not below 0, where rounding would put it.
        return max(0.0, 1 - sum(self.busy) / device_time) if device_time else 0.0

    @cached_property
    def peak_live(self) -> list[int]:
        """Per rank, the most micro-batches whose activations are alive at once; see `live`."""
        return peak_live(self.schedule)

    def report(self, name: str = "a schedule") -> Tables:
        """The simulation as a predicted `Tables` of one step, to draw or compare as a report."""
        import pandas as pd

        from paralab.report.tables import KIND, Tables
        from paralab.spec import OWN_FORM, Plan

        order, n = self.order, len(self.start)
        spans = {
            "id": range(n),
            "rank": order.rank,
            "step": 0,
            "lane": "compute",
            "kind": np.array(list(KIND.values()), object)[order.kind],
            "stage": order.stage,
            "chunk": order.stage // order.ranks,
            "microbatch": order.microbatch,
            "start": self.start,
            "end": self.end,
            "cost": self.end - self.start,
            "after": [(i,) if i >= 0 else () for i in order.source.tolist()],
        }
        end = float(self.end.max())
        steps = {"rank": range(order.ranks), "step": 0, "start": 0.0, "end": end, "beside": 0.0}
        schedule, chunks = OWN_FORM + name, order.stages // order.ranks
        sizes = {"microbatches": order.microbatches, "virtual_stages": chunks}
        return Tables(
            clock="predicted",
            model=None,
            plan=Plan(pp=order.ranks, schedule=schedule, **sizes),
            meta={"function": name},
            spans=pd.DataFrame(spans),
            steps=pd.DataFrame(steps),
        )

    def __repr__(self) -> str:
        p, stages, m = self.order.ranks, self.order.stages, self.order.microbatches
        return (
            f"Simulation({count_of(p, 'rank')}, {count_of(stages, 'stage')}, "
            f"{count_of(m, 'micro-batch')}: makespan {self.makespan:.6g} s, "
            f"bubble {100 * self.bubble_rate:.1f} %)"
        )


def simulate(
    schedule: Sequence[Sequence[Action | str]],
    *,
    forward: Cost,
    backward: Cost,
    weight_grad: Cost = 0.0,
    comm: Cost = 0.0,
    folded: bool = False,
    overlapped: float = 0.0,
    pairs: Iterable[tuple[str, str]] = (),
) -> Simulation:
    """The start and end of every action of a valid schedule.

    Costs are seconds per micro-batch, each a number or one per stage:
    forward      duration of F
    backward     duration of I, the half that the stage before waits for
    weight_grad  duration of W; a whole B takes backward + weight_grad
    comm         time for which a stage's result (activations or gradients) is in flight to another
                 rank; the sender goes on computing, and links never delay each other's messages
    folded       stages are on ranks 0 ... p-1, p-1 ... 0, as in DualPipeV, not on s % p
    overlapped   duration of a pair: a forward and the backward after it on its rank, which start
                 and end together; they are drawn one after the other
    pairs        the texts of the actions of each pair: ("4F1", "3B0")

    Raises ``ValueError``, as `validate` does, if the schedule is not valid.
    """
    schedule, order = checked(schedule, folded=folded)
    costs = {"forward": forward, "backward": backward, "weight_grad": weight_grad, "comm": comm}
    f, i, w, delay = (_per_stage(name, cost, order.stages) for name, cost in costs.items())
    table = np.empty((4, order.stages))
    table[[F, B, I, W]] = f, i + w, i, w
    seconds = table[order.kind, order.stage]
    delay, also_needs = delay[order.stage], {}
    texts = [str(order.action(node)) for node in range(len(seconds))] if pairs else []
    real("overlapped", overlapped, at_least=0.0)
    for first, second in pairs:
        node = texts.index(first) if first in texts else len(texts)
        if second not in texts[node + 1 : node + 2]:
            why = f"{second} does not follow {first} in a rank's list"
            raise illegal("pairs", (first, second), why, "an action, and the next one of its rank")
        seconds[node : node + 2] *= overlapped / seconds[node : node + 2].sum()
        delay[node] += seconds[node + 1]
        also_needs[node] = int(order.source[node + 1])
    start, end = timed(order, seconds, delay, also_needs)
    return Simulation(schedule, order, np.array(start), np.array(end))


def _per_stage(name: str, cost: Any, stages: int) -> np.ndarray:
    if not np.ndim(cost):
        return np.full(stages, real(name, cost, at_least=0.0))
    if len(cost) != stages:
        why = f"{count_of(len(cost), 'number')} for {count_of(stages, 'stage')}"
        raise illegal(name, cost, why, "a number of seconds, or one per stage")
    return np.array([real(f"{name}[{s}]", c, at_least=0.0) for s, c in enumerate(cost)])


def idle_seconds(
    p: Any, m: Any, v: Any, total: Any, own: Any, halves: Any, filling: Any, ahead: Any = 0.0
) -> dict[str, Any]:
    """{schedule: seconds for which a rank waits for others}, each a number or an array.

    total    seconds of a micro-batch on all ranks
    own      seconds of a micro-batch on this rank
    halves   seconds of its weight halves on all other ranks
    filling  the same, but for each rank at most the seconds of its forward
    ahead    seconds that the other ranks recompute before the gradient that they need exists, so
             that no rank waits for it

    With p ranks, m micro-batches, v stages per rank, equal stages and free links these are

        naive        m (p-1) (F + I + W)   one rank computes at a time
        gpipe, 1f1b  (p-1) (F + I + W)     GPipe, arXiv:1811.06965, sec. 2.3: (p-1)/(m+p-1) of all
                                           time; PTD-P, sec. 2.2.1: (p-1)/m of the ideal time
        interleaved  (p-1) (F + I + W) / v PTD-P, arXiv:2104.04473, sec. 2.2.2
        zb-h1        (p-1) (F + I - k W)   Zero Bubble, arXiv:2401.10241, sec. 2.3, table 2: k = 1
        zb-h2        (p-1) (F + I - k W)   the same, k = 2

    In the last two, W of a rank overlaps with I of the next one, and weight halves of later
    micro-batches fill gaps. There are m - 1 later ones, so k is at most (m-1)/(p-1); the paper
    assumes enough micro-batches. A weight half fills at most the time of a forward: where W > F, F
    counts in place of W. The last row is exact for m >= 2p - 1, and for fewer if 2 W <= F + I.
    """
    others = total - own - ahead
    later = (m - 1) / np.maximum(p - 1, 1)  # later micro-batches per gap that they can fill
    return {
        "naive": m * others,
        "gpipe": others,
        "1f1b": others,
        "interleaved": total * (p - 1) / (p * v) - ahead,
        "zb-h1": others - halves - filling * np.minimum(later, 1),
        "zb-h2": others - halves - filling * np.minimum(later, 2),
    }


def bubble_formula(
    name: str,
    pp: int,
    microbatches: int,
    virtual_stages: int = 1,
    F: float = 1.0,
    B: float = 1.0,
    W: float = 0.0,
) -> float:
    """The bubble's share of device time by the papers' formulas: balanced stages, free links.

    F, B, W  seconds of one micro-batch on one *rank* per forward, input half and weight half; as in
             `simulate`, a whole backward is B + W. Only their ratios matter.

    With the idle seconds of `idle_seconds`, the share is idle / (idle + m (F + B + W)); a negative
    idle time counts as zero. Raises ValueError if the schedule does not exist for these sizes.
    """
    choice("name", name, tuple(SCHEDULES))
    p, m, v = checked_sizes(name, pp, microbatches, virtual_stages)
    F, B, W = (real(name, t, at_least=0.0) for name, t in {"F": F, "B": B, "W": W}.items())
    work = F + B + W
    halves, filling = (p - 1) * W, (p - 1) * min(F, W)
    idle = float(idle_seconds(p, m, v, p * work, work, halves, filling)[name])
    idle = max(0.0, idle)  # the order of the arguments turns -0.0 into 0.0
    return idle / (idle + m * work) if work else 0.0
