"""Exercises whose checkers enforce every limit they state, and guesses made before a run.

    guess = pl.exercises.guess("megabytes each rank sends per step", low=0, high=10, unit="MB")
    guess.commit(3.4)                              # or the slider and its button
    guess.reveal(6.3)                              # you said 3.4 MB, it is 6.3 MB: 0.54 times ...

    why = pl.exercises.choose("why?", ["latency", "bandwidth"])  # explanations: pick, reveal

    pl.exercises.all_gather_half                   # the task and its limits; .task in a shell
    pl.exercises.all_gather_half.check(my_answer)  # a Verdict: limit | required | yours | ok
    pl.exercises.all_gather_half.hint()            # one hint at a time
    pl.exercises.all_gather_half.solution()        # source of one answer

A checker looks at the result, gradients, bytes, peak memory of tensors and simulated time, never at
the wall clock, so its verdict is the same on every machine. Importing this package imports neither
torch nor ipywidgets.
"""

from __future__ import annotations

import pkgutil

from paralab.exercises.exercise import Exercise
from paralab.exercises.guess import Choice, Guess, choose, guess
from paralab.exercises.verdict import Verdict

PLACES = {  # by lab: the module and the name of a warm-up, one or more to implement, a further one
    "00": "states:model_states accumulation:accumulate peak:peak_estimate",
    "01": "all_reduce:all_gather_half all_reduce:ring_all_reduce "
    "all_reduce:hierarchical_all_reduce",
    "02": "sync:average_gradients ddp:my_ddp sync_pass:sync_pass",
    "03": "warmup:warmup pipeline:pipeline_executor pipeline:interleaved_executor",
    "04": "clinic:deadlock_clinic schedule:own_schedule schedule:better_schedules",
    "05": "zero:zero_step zero3:my_zero3 prefetch:my_prefetch",
    "06": "memory:memory_clinic recomputed:checkpoint estimator:memory_estimator",
    "07": "tensor:f_and_g tensor:tensor_mlp tensor:tensor_attention vocab_loss:vocab_parallel_loss",
    "08": "cannon:grid_groups summa:summa cannon:cannon",
    "09": "bandwidth:bandwidth streamed:streamed_optimizer offload:stream",
    "10": "mesh:mesh_groups mesh_step:mesh_step place:place",
    "11": "cost:days_and_mfu cost:training_cost own_fit:own_fit",
    "12": "trillion:stage_memory trillion:rank_sends trillion:trillion_plan",
}
LADDERS: dict[str, tuple[Exercise, ...]] = {}
for _lab, _places in PLACES.items():
    LADDERS[_lab] = tuple(pkgutil.resolve_name(f"{__name__}.{one}") for one in _places.split())
    for _exercise in LADDERS[_lab]:
        _exercise.lab = _lab
ALL = {exercise.name: exercise for ladder in LADDERS.values() for exercise in ladder}
globals().update(ALL)  # also where a module has the name of its exercise

__all__ = ["ALL", "Choice", "Exercise", "Guess", "Verdict", "choose", "guess", *ALL]


def __dir__() -> list[str]:  # what Tab completes: exercises, not the modules behind them
    return sorted(__all__)
