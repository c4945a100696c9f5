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

from paralab.exercises.accumulation import accumulate
from paralab.exercises.all_reduce import all_gather_half, hierarchical_all_reduce, ring_all_reduce
from paralab.exercises.bandwidth import bandwidth
from paralab.exercises.cannon import cannon, grid_groups
from paralab.exercises.clinic import deadlock_clinic
from paralab.exercises.cost import days_and_mfu, training_cost
from paralab.exercises.ddp import my_ddp
from paralab.exercises.estimator import memory_estimator
from paralab.exercises.exercise import Exercise
from paralab.exercises.guess import Choice, Guess, choose, guess
from paralab.exercises.memory import memory_clinic
from paralab.exercises.mesh import mesh_groups
from paralab.exercises.mesh_step import mesh_step
from paralab.exercises.offload import stream
from paralab.exercises.own_fit import own_fit
from paralab.exercises.peak import peak_estimate
from paralab.exercises.pipeline import interleaved_executor, pipeline_executor
from paralab.exercises.place import place
from paralab.exercises.prefetch import my_prefetch
from paralab.exercises.recomputed import checkpoint
from paralab.exercises.schedule import better_schedules, own_schedule
from paralab.exercises.states import model_states
from paralab.exercises.streamed import streamed_optimizer
from paralab.exercises.summa import summa
from paralab.exercises.sync import average_gradients
from paralab.exercises.sync_pass import sync_pass
from paralab.exercises.tensor import f_and_g, tensor_attention, tensor_mlp
from paralab.exercises.trillion import rank_sends, stage_memory, trillion_plan
from paralab.exercises.verdict import Verdict
from paralab.exercises.vocab_loss import vocab_parallel_loss
from paralab.exercises.warmup import warmup
from paralab.exercises.zero import zero_step
from paralab.exercises.zero3 import my_zero3

LADDERS = {  # the exercises of each lab: a warm-up, one or more to implement, one to go further
    "00": (model_states, accumulate, peak_estimate),
    "01": (all_gather_half, ring_all_reduce, hierarchical_all_reduce),
    "02": (average_gradients, my_ddp, sync_pass),
    "03": (warmup, pipeline_executor, interleaved_executor),
    "04": (deadlock_clinic, own_schedule, better_schedules),
    "05": (zero_step, my_zero3, my_prefetch),
    "06": (memory_clinic, checkpoint, memory_estimator),
    "07": (f_and_g, tensor_mlp, tensor_attention, vocab_parallel_loss),
    "08": (grid_groups, summa, cannon),
    "09": (bandwidth, streamed_optimizer, stream),
    "10": (mesh_groups, mesh_step, place),
    "11": (days_and_mfu, training_cost, own_fit),
    "12": (stage_memory, rank_sends, trillion_plan),
}
ALL = {exercise.name: exercise for ladder in LADDERS.values() for exercise in ladder}
for _lab, _ladder in LADDERS.items():
    for _exercise in _ladder:
        _exercise.lab = _lab

__all__ = ["ALL", "Choice", "Exercise", "Guess", "Verdict", "choose", "guess", *ALL]


def __dir__() -> list[str]:  # what Tab completes: exercises, not the modules behind them
    return sorted(__all__)
