"""What papers and read-me files state of pipeline schedules: idle time, activations, copies.

With p ranks, m micro-batches, v chunks per rank, and per rank and micro-batch a forward of F, the
input half of a backward of B and its weight half of W seconds (the whole backward is B + W):

    schedule       idle seconds per rank        activations kept at once  parameters
    gpipe          (p-1) (F + B + W)            m                         1
    1f1b           (p-1) (F + B + W)            min(m, p - i) on rank i   1
    interleaved    (p-1) (F + B + W)/v          p (1 + (p-1)/(p v))       1
    zb-h1          (p-1) (F + B - W)            p                         1
    zb-h2          (p-1) (F + B - 2W)           2p - 1                    1
    zb-v           0 if F = B = W               p                         1
    v-half         half of 1f1b's, F = B = W    p/2                       1
    v-min          two thirds, F = B = W        p/3                       1
    dualpipe       (p/2 - 1) (F&B + B - 2W)     p + 1                     2
    dualpipev      the same, p stages on p/2    p + 1                     2

Activations count micro-batches of a whole rank's share of the model, at most over the ranks where
no rank is named. gpipe to interleaved are PTD-P's (Narayanan+ 2021, arXiv:2104.04473, sec. 2.2) and
Korthikanti's (2022, arXiv:2205.05198, sec. 4.2.3), zb-h1 and zb-h2 those of Zero Bubble (Qi+ 2023,
arXiv:2401.10241, table 1), where weight halves that wait keep less than a whole micro-batch
(`zero_bubble_activations`); the v-shaped ones stand in sail-sg/zero-bubble-pipeline-parallelism's
README, and the last two in deepseek-ai/DualPipe's. That one writes B for the whole backward: its
(PP/2 - 1)(F&B + B - 3W) is what stands here, and its "ZB1P", (PP - 1)(F + B - 2W), is zb-h1.

theory/pipeline.py has the share of device time, and simulates the schedules that paralab runs.
"""

from __future__ import annotations

from fractions import Fraction

from paralab.checks import choice, illegal, real, whole

_OF_1F1B = {"zb-v": Fraction(0), "v-half": Fraction(1, 2), "v-min": Fraction(2, 3)}
_DUAL = ("dualpipe", "dualpipev")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", *_OF_1F1B, *_DUAL)


def idle_seconds(
    name: str, pp: int, *, F: float = 1.0, B: float = 1.0, W: float = 1.0, virtual_stages: int = 1,
    together: float | None = None,
) -> float:  # fmt: skip
    """Idle seconds per rank and step that the source of schedule ``name`` states.

    F, B, W   seconds per rank and micro-batch: forward, input half and weight half of a backward
    together  DualPipe's F&B, a forward and a whole backward that overlap; default F + B + W, no
              gain

    Raises ValueError where the source says nothing: v-shaped schedules with F, B, W not alike.
    """
    choice("name", name, SCHEDULES)
    p, v = whole("pp", pp, at_least=1), whole("virtual_stages", virtual_stages, at_least=1)
    F, B, W = (real(n, x, at_least=0.0) for n, x in (("F", F), ("B", B), ("W", W)))
    if name in _OF_1F1B:
        if not F == B == W:
            raise illegal(name, (F, B, W), "stated for F = B = W only", "three equal times")
        return float(_OF_1F1B[name]) * (p - 1) * (F + B + W)
    if name in _DUAL:
        if p % 2:
            raise illegal("pp", p, "micro-batches come in from both ends", "an even number")
        both = F + B + W if together is None else real("together", together, at_least=0.0)
        return (p // 2 - 1) * (both + B - 2 * W)
    if name.startswith("zb"):
        return (p - 1) * (F + B - (1 if name == "zb-h1" else 2) * W)
    return (p - 1) * (F + B + W) / (v if name == "interleaved" else 1)


def peak_activations(
    name: str, pp: int, microbatches: int, *, virtual_stages: int = 1, rank: int = 0
) -> Fraction:
    """Micro-batches whose activations a rank keeps at once, in those of its share of the model.

    rank  only 1f1b says it rank by rank; of the others it is the largest, whatever the rank
    """
    choice("name", name, SCHEDULES)
    p, m = whole("pp", pp, at_least=1), whole("microbatches", microbatches, at_least=1)
    v = whole("virtual_stages", virtual_stages, at_least=1)
    if name == "1f1b":
        return Fraction(min(m, p - whole("rank", rank, at_least=0, at_most=p - 1)))
    return {
        "gpipe": Fraction(m),
        "interleaved": p * (1 + Fraction(p - 1, p * v)),
        "zb-h1": Fraction(p),
        "zb-h2": Fraction(2 * p - 1),
        "zb-v": Fraction(p),
        "v-half": Fraction(p, 2),
        "v-min": Fraction(p, 3),
    }.get(name, Fraction(p + 1))


def zero_bubble_activations(name: str, pp: int, rank: int) -> tuple[int, int]:
    """(whole micro-batches, micro-batches that only wait for their weight half) on a rank.

    Zero Bubble, sec. 2.3, whose workers count from 1: zb-h1 keeps (p-i+1) M_B + (i-1) M_W, zb-h2
    (2p-2i+1) M_B + (2i-2) M_W.
    """
    p = whole("pp", pp, at_least=1)
    i = 1 + whole("rank", rank, at_least=0, at_most=p - 1)
    if choice("name", name, ("zb-h1", "zb-h2")) == "zb-h1":
        return p - i + 1, i - 1
    return 2 * p - 2 * i + 1, 2 * i - 2


def parameter_copies(name: str) -> int:
    """How many stages' parameters a rank keeps: DualPipe has one from either end."""
    return 2 if choice("name", name, SCHEDULES) in _DUAL else 1
