"""Lab 09: which bandwidth keeps a device busy while states or parameters cross a link.

ZeRO-Infinity (Rajbhandari+ 2021, arXiv:2104.07857, sec. 4): intensity I = FLOPs / bytes moved,
efficiency e = I B / (I B + X) at X FLOP/s and B bytes per second, so B = e / (1 - e) X / I. FLOPs
are with recomputation, 8 per parameter and token.
"""

from __future__ import annotations

from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import Mistakes, ask, unlike
from paralab.theory.offload_costs import bandwidth_needed

REQUIRED = {
    "half the time": "an efficiency of 50 %: the device may wait half of the time",
    "other shares": "efficiencies of 80 % and 35 %, with other devices",
    "ZeRO-Infinity's V100": "70 TFLOP/s, optimizer states read and written, an efficiency of 90 %",
}
HALF, MORE, PAPER = REQUIRED
CASES = (  # limit, tokens, bytes per parameter, FLOP/s, efficiency
    (MORE, 2048, 8, 3e12, 0.8),
    (MORE, 512, 24, 2e11, 0.35),
    (HALF, 1024, 4, 1e12, 0.5),  # with e = 1/2 several mistakes give the same number
    (PAPER, 2 * 1024, 32, 70e12, 0.9),
)


@exercise(Takes("bandwidth_needed(tokens, moved, peak, efficiency)"), required=REQUIRED)
def bandwidth(tries: Tries) -> None:
    questions = [(0, case[1:]) for case in CASES]
    for notes, (limit, tokens, moved, peak, e), reply in ask(tries, CASES, questions):
        notes.where = f"{tokens:,} tokens, {moved} bytes per parameter, {100 * e:g} %"
        right = bandwidth_needed(e, 8 * tokens / moved, peak)
        mistakes = unlike(known(right, tokens, moved, e))
        wrong = reply.number(right, mistakes, _gb_per_s, " of bytes per second", 1e-9)
        notes.look(limit, wrong, _gb_per_s(right))


def known(right: float, tokens: int, moved: int, e: float) -> Mistakes:
    yield "recomputation is missing: 8 FLOPs per parameter and token, not 6", right * 8 / 6
    yield "that counts forward alone, 2 FLOPs per parameter and token", right * 4
    yield "copies may take (1 - e) / e of the time of the computation, not 1 - e of it", right / e
    both = "or yours doubles the bytes: moved has those of both directions"
    yield f"a multiply-add is two FLOPs: 8 per parameter and token, not 4, {both}", right * 2
    yield "tokens are missing: a parameter is used once per token", right * tokens
    yield "that is for one byte per parameter", right / moved
    yield "that is e X / I: copies have 1 - e of the step's time", right * (1 - e)
    yield "e and 1 - e are exchanged", right * ((1 - e) / e) ** 2
    yield "that is X / I, with which copies take as long as the computation", right * (1 - e) / e
    yield "yours is in GB/s, required: bytes per second", right / 1e9


def _gb_per_s(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:,.6g} GB/s"
