# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 04 · Write your own schedule
#
# *«How is the bubble of that new schedule derived?»*
# ([asked](https://github.com/deepseek-ai/DeepSeek-V3/issues/211), more than once.) A schedule is a
# list per rank. You can print it, prove it free of deadlock, simulate it, draw it and run it, and
# in this lab you write one.

# %%
import pandas as pd

import paralab as pl
from paralab import view
from paralab.parallel import schedules
from paralab.theory import pipeline

unit = {"forward": 1e-3, "backward": 1e-3, "weight_grad": 1e-3}  # a whole backward: both

# %% [markdown]
# ## Backward has two halves
# Backward of a linear layer makes two products: the gradient of its *input*, which the stage before
# waits for, and the gradient of its *weight*, which nobody waits for until the optimizer. Written
# as one action, the second holds up the first. Split them, `I` and `W`, and the weight halves can
# fill the bubble. That is the whole idea of zero-bubble schedules:

# %%
whole = pipeline.simulate(schedules.one_f_one_b(4, 8), **unit)
split = pipeline.simulate(schedules.zb_h1(4, 8), **unit)
print(f"1F1B : {whole.bubble_rate:.3f} of device time is bubble")
print(f"ZB-H1: {split.bubble_rate:.3f}")
view.simulated_timeline(split, "ZB-H1")

# %% [markdown]
# ## Commit to a guess
# With more forwards of warm-up ZB-H2 can do better still. What is left of the bubble, when forward
# and both halves of backward take equally long?

# %%
guess = pl.exercises.guess(
    "bubble of ZB-H2, p=4, m=8, F=I=W", low=0, high=30, unit="% of device time", decimals=0
)
guess

# %%
h2 = pipeline.simulate(schedules.zb_h2(4, 8), **unit)
print(
    f"the last action ends at: ZB-H1 {1e3 * split.makespan:.0f} ms, "
    f"ZB-H2 {1e3 * h2.makespan:.0f} ms"
)
guess.reveal(round(100 * h2.bubble_rate))

# %% [markdown]
# Nothing is left, and yet both end at the same moment? The bubble is counted against T, the longest
# time from a rank's *own* first action to its own last (lab 03). Under ZB-H2 rank 0 is through
# earlier, by as much as the last rank began later, and T is shorter. Within one step nothing is
# gained by that: rank 0 has to go straight on to the next one. An optimizer that first adds up a
# norm over all ranks forbids it; the paper checks afterwards instead (sec. 4). And it costs memory,
# which is read off the other picture:

# %%
view.live_activations(
    schedules.one_f_one_b(4, 8),
    schedules.zb_h1(4, 8),
    schedules.zb_h2(4, 8),
    labels=["1F1B", "ZB-H1", "ZB-H2"],
)

# %% [markdown]
# ZB-H1 keeps p micro-batches on *every* rank, where 1F1B's last rank keeps one; ZB-H2 keeps nearly
# twice as many.
#
# ## Where do such formulas come from?
# In 1F1B a rank is idle for (p−1)(F + I + W): the first micro-batch travels down, p−1 forwards, and
# its gradient back, p−1 whole backwards. ZB-H1 passes the gradient on after I, which takes (p−1)W
# off the way back, and does p−1 weight halves in the gap that is left, another (p−1)W: (p−1)(F + I
# − W). ZB-H2 fills in (p−1)W more. Simulate, compare, change the times:

# %%
rows = []
for F, I, W in ((1, 1, 1), (2, 2, 1)):
    for name, make in (("1f1b", schedules.one_f_one_b), ("zb-h1", schedules.zb_h1)):
        simulated = pipeline.simulate(make(4, 12), forward=F, backward=I, weight_grad=W)
        formula = pipeline.bubble_formula(name, 4, 12, F=F, B=I, W=W)
        rows.append(
            {
                "schedule": name,
                "F": F,
                "I": I,
                "W": W,
                "simulated": simulated.bubble_rate,
                "formula": formula,
            }
        )
pd.DataFrame(rows).round(4)

# %% [markdown]
# The same reading (and two copies of the parameters) gives DualPipe's (p/2−1)(F&B + B − 3W). It
# runs the pipeline from both ends, so only p/2−1 hand-overs are in the way of each, and in it F&B
# is one overlapped forward and backward, a time of its own: change what F&B costs, and [the
# pictures people compare](https://github.com/Victarry/PP-Schedule-Visualization/issues/1) have a
# large bubble or a small one. In its terms B is a *whole* backward, so ZB-H1's (p−1)(F + I − W)
# reads (p−1)(F + B − 2W) there:

# %%
p, F, W = 8, 1.0, 1.0
B = 1.0 + W  # a whole backward, as DeepSeek writes it
idle = {
    "1F1B: (p-1)(F+B)": (p - 1) * (F + B),
    "ZB-H1: (p-1)(F+B-2W)": (p - 1) * (F + B - 2 * W),
}
for overlapped in (F + B, 0.8 * (F + B)):
    idle[f"DualPipe: (p/2-1)(F&B+B-3W), F&B = {overlapped:g}"] = (p / 2 - 1) * (
        overlapped + B - 3 * W
    )
pd.Series(idle, name="idle time per rank, in forwards").to_frame()

# %% [markdown]
# ## Run one for real
# The same list drives real processes: here ZB-H1, with the weight halves queued and drained.

# %%
model = pl.ModelSpec(layers=8, hidden=192, heads=4, seq_len=128)
plan = pl.Plan(pp=4, schedule="zb-h1", microbatches=8, microbatch_size=2)
report = pl.run(model, plan, steps=5)
report

# %% tags=["measured"]
report.replay().timeline()

# %% tags=["measured"]
report.bubbles().round(2)

# %% [markdown]
# (The formula counts with the mean F, I and W of this run. They are not alike, so its bubble is not
# that of equal halves above.)
#
# ## Break it: the deadlock clinic
# Three schedules that look right, and stand still. Read what the validator says, and look at the
# picture: every rank's last box, and what it waits for.

# %%
clinic = pl.exercises.deadlock_clinic
for name, patient in clinic.patients.items():
    print(f"{name}: {patient.story}\n  {patient.diagnosis}\n")

# %%
clinic.patients["two chunks"].chart()

# %% [markdown]
# Repair them by moving a few actions; the limits say how many are enough.

# %%
clinic

# %%
### ANSWER: deadlock_clinic


clinic.check(fixed)

# %% [markdown]
# ## Your turn
# A schedule for any number of stages and micro-batches. The checker proves it, simulates it, counts
# what it keeps in memory, and then runs it on four real ranks and compares every gradient with one
# process.

# %%
exercise = pl.exercises.own_schedule
exercise


# %%
### ANSWER: own_schedule


exercise.check(my_schedule)

# %% [markdown]
# Stuck? `exercise.hint()` gives one push at a time, `exercise.solution()` shows an answer.

# %% [markdown] tags=["solution-only"]
# ## Another answer
# Not an order written down, but a rule: whoever is free takes a backward if one is possible, and a
# forward if its memory allows. 1F1B comes out by itself.


# %% tags=["solution-only"]
def by_rule(pp, microbatches):
    lists = [[] for _ in range(pp)]
    done = set()
    while any(len(actions) < 2 * microbatches for actions in lists):
        turn = []
        for rank, actions in enumerate(lists):
            forwards = sum("F" in action for action in actions)
            backwards = len(actions) - forwards
            came_back = rank == pp - 1 or f"{rank + 1}B{backwards}" in done
            came_down = rank == 0 or f"{rank - 1}F{forwards}" in done
            if backwards < forwards and came_back:
                turn.append((rank, f"{rank}B{backwards}"))
            elif forwards < microbatches and forwards - backwards < pp - rank and came_down:
                turn.append((rank, f"{rank}F{forwards}"))
        for rank, action in turn:
            lists[rank].append(action)
        done.update(action for _, action in turn)
    return lists


exercise.check(by_rule)

# %% [markdown]
# ## On your GPUs
# The same cells. On NCCL messages of a pair are matched by order and a wrong order hangs for ever;
# every schedule above has been held to that order already, because `lower` writes the sends and
# receives of both ends from one list.
#
# ## Read on
# * Qi and others 2024, [Zero Bubble Pipeline Parallelism](https://arxiv.org/abs/2401.10241),
#   sec. 2: ZB-H1 and ZB-H2, and table 2 with both bubbles. The DeepSeek-V3 technical report,
#   sec. 3.2, has DualPipe.
# * In the package: `paralab/parallel/schedules.py`, `paralab/model/ops.py` (both halves of every
#   backward), `theory/schedule_check.py` (the proof).
