"""Shown answers as a learner has them, who has copied them: no part of the package.

Ranks import this module.
"""

from __future__ import annotations

from typing import Any

from paralab.exercises import sources


def _copied(*names: str) -> Any:
    found: dict[str, Any] = {"__name__": __name__}
    for name in names:
        exec(sources.solution(sources.answer(name)), found)
    return found


ring_all_reduce = _copied("ring_all_reduce")["ring_all_reduce"]
MyPrefetch = _copied("my_zero3", "my_prefetch")["MyPrefetch"]
MySumma = _copied("summa")["MySumma"]
MyStreamedAdamW = _copied("streamed_optimizer")["MyStreamedAdamW"]
MyZero1 = _copied("zero_step")["MyZero1"]
