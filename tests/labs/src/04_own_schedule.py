# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 04 · Write your own schedule
#
# **How small can the bubble of a pipeline be, how is such a number derived, and can you write a
# schedule that reaches it?** On four ranks with eight micro-batches such a schedule saves 18 % of a
# step's time, and the rank with the highest peak holds no micro-batch more.
#
# **You will be able to**
# * split a backward into its input half and its weight half, and say which one other ranks wait
#   for;
# * derive the idle time of 1F1B, ZB-H1 and ZB-H2 on a drawn schedule, and explain DualPipe's;
# * find the cycle of waits in a schedule that deadlocks, and repair it;
# * write schedules for any number of ranks that stay within a given time and a given memory, and
#   train a GPT with them.
#
# **You need** lab 03, and the gradient of a matrix product.
#
# **Minutes** 90 to 150, of which 40 are reading and running, the others exercises.

# %%
import re

import numpy as np
import pandas as pd

import paralab as pl
from paralab import view
from paralab.parallel import schedules
from paralab.theory import pipeline

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
view.schedules({"1F1B": schedules.one_f_one_b(4, 8), "ZB-H1": schedules.zb_h1(4, 8)})

# %% [markdown]
# Both schedules do the same work on four ranks. The second one cuts each backward in two. The first
# half is green, and half as long as the whole backward of 1F1B. The second half is yellow. It
# may run later. So the gradient reaches the previous rank sooner, and ranks have work left for the
# end, where those of 1F1B wait.
#
# ## A backward is two products
# A linear layer computes $Y = X A$. Its backward gets $\partial L/\partial Y$ and computes two
# matrix products:
#
# $$ \frac{\partial L}{\partial X} = \frac{\partial L}{\partial Y}\,A^{\!\top}
#    \quad (I,\ \text{the input half}), \qquad
#    \frac{\partial L}{\partial A} = X^{\!\top}\,\frac{\partial L}{\partial Y}
#    \quad (W,\ \text{the weight half}). $$
#
# The stage before waits for the first product. No other rank waits for the second one; only the
# optimizer needs it, at the end of the step. Each product needs as many FLOPs as the forward, so
# $F \approx I \approx W$ for large matrices. If both are executed as one action, $B = I + W$, the
# stage before gets its gradient later than it could, by $W$.
#
# The literature does not agree on the letter B, so here is one table for all of it:
#
# | here | meaning | Zero Bubble paper | DeepSeek-V3 report | in a list |
# |---|---|---|---|---|
# | $F$ | forward of one micro-batch on one rank | $T_F$ | $F$ | `2F0` |
# | $I$ | input half of the backward | $T_B$ | – | `2I0` |
# | $W$ | weight half of the backward | $T_W$ | $W$ | `2W0` |
# | $B = I + W$ | whole backward | $T_B + T_W$ | $B$ | `2B0` |
# | $F\&B$ | a forward and a backward that overlap | – | $F\&B$ | – |
# | $p$, $r$, $m$, $T$ | as in lab 03 | $p$, –, $m$ | $PP$ | – |
#
# In the program of a rank the change is a few lines:

# %%
model = pl.ModelSpec(layers=8, hidden=192, heads=4, seq_len=128, tied=False)
plan = pl.Plan(pp=4, schedule="1f1b", microbatches=8, microbatch_size=2)
before = pl.program(model, plan, rank=1)
before.diff(pl.program(model, plan.replace(schedule="zb-h1"), rank=1))

# %% [markdown]
# ## ZB-H1: a third of the idle time, with no more micro-batches alive
# Lab 03 has derived that a rank of 1F1B is idle for $(p-1)(F+B) = (p-1)(F+I+W)$. ZB-H1 splits the
# backward, and rank $r$ runs each weight half $r$ backwards late. Follow the step from
# beginning to end:
#
# 1. **Fill.** Micro-batch 0 passes $p-1$ stages, so the last rank begins after $(p-1)F$.
# 2. **The last rank computes without a gap** until its last input half is done. By then it has run
#    all its work, $m(F+I+W)$, except for $p$ weight halves: the $p-1$ that are late, and that of
#    the last micro-batch. This takes $m(F+I+W) - pW$.
# 3. **Drain.** The last gradient passes the other $p-1$ stages, each of which passes it on after
#    $I$. At last rank 0 runs its own weight half. This takes $(p-1)I + W$, and the last rank uses
#    this time for its $p$ weight halves.
#
# The sum of the three is $T$, and $T$ without the work of a rank is its idle time:
#
# $$ T = (p-1)F + m(F+I+W) - pW + (p-1)I + W , $$
#
# $$ T - m(F+I+W) = (p-1)(F+I-W) \qquad \text{(ZB-H1)} . $$
#
# In 1F1B the last rank has no work left for the drain, and each stage passes the gradient on only
# after $I+W$: hence $(p-1)(F+I+W)$. With a split backward $(p-1)W$ is saved twice: once because the
# drain is shorter, and once because weight halves fill it. As a share of $T$:
#
# $$ \text{bubble} = \frac{(p-1)(F+I-W)}{(p-1)(F+I-W) + m(F+I+W)} . $$
#
# With four ranks, twelve micro-batches and $F=I=W$, which bubble is that? (The first picture shows
# eight.)

# %%
guess = pl.exercises.guess(
    "bubble of ZB-H1, p=4, m=12, F=I=W", low=0, high=30, unit="% of device time", decimals=0
)
guess

# %%
p, m, rows = 4, 12, []
for F, I_, W in ((1, 1, 1), (2, 2, 1), (1, 1.5, 0.5)):
    for name, idle in (("1f1b", (p - 1) * (F + I_ + W)), ("zb-h1", (p - 1) * (F + I_ - W))):
        lists = schedules.build(name, pp=p, microbatches=m)
        simulated = pipeline.simulate(lists, forward=F, backward=I_, weight_grad=W)
        share = idle / (idle + m * (F + I_ + W))
        rows.append([name, F, I_, W, idle, share, simulated.bubble_rate])
names = ["schedule", "F", "I", "W", "idle per rank", "bubble, formula", "bubble, simulated"]
pd.DataFrame(rows, columns=names).round(3)

# %%
guess.reveal(100 * 3 / (3 + 36))

# %% [markdown]
# Formula and simulation agree, also where the halves are not equal. They agree as long as
# $W \le F$. Put `(1, 1, 1.5)` into the list, and the formula promises less idle time than there is.
#
# ## ZB-H2: no bubble, and yet it ends at the same moment
# In ZB-H1 each rank but the last still has a gap between the first forward of its steady phase and
# its first input half. ZB-H2 fills this gap with more forwards: rank $r$ has $2(p-r-1)$ forwards
# of warm-up in place of $p-r-1$. All later work moves back, so rank $r$ has to run its weight
# halves $2r$ backwards late. After its last input half the last rank then has $2(p-1)+1$ weight
# halves left, $p-1$ more than in ZB-H1. So the second of the three parts above is shorter by
# $(p-1)W$, and so is the idle time:
#
# $$ T - m(F+I+W) = (p-1)(F+I-2W), \qquad \text{which is } 0 \text{ for } F = I = W . $$

# %%
title = "ZB-H1 and ZB-H2 end at the same moment, but ZB-H2 has no gap inside a rank's step"
view.schedules({"ZB-H1": schedules.zb_h1(4, 8), "ZB-H2": schedules.zb_h2(4, 8)}, title=title)

# %%
why_same = pl.exercises.choose(
    "ZB-H2 has no bubble. Why do both pictures end at the same time?",
    [
        "ZB-H2 does more work",
        "T is counted per rank: rank 0 ends earlier, by as much as the last rank begins later",
        "the picture is drawn for too few micro-batches",
    ],
)
why_same

# %%
h1, h2 = (
    pipeline.simulate(make(4, 8), forward=1e-3, backward=1e-3, weight_grad=1e-3)
    for make in (schedules.zb_h1, schedules.zb_h2)
)
for name, one in (("ZB-H1", h1), ("ZB-H2", h2)):
    print(f"{name}: all ranks {1e3 * one.makespan:.0f} ms, T of a rank {1e3 * one.cost:.0f} ms")
why_same.reveal(
    2,
    "T is the time from a rank's first action to its last one. What is hatched before and after "
    "them is outside of it.",
)

# %% [markdown]
# So ZB-H2 saves time only if rank 0 may begin its next step while the last rank is still busy with
# this one. Gradient clipping forbids that, because no rank may update its weights before the norm
# over all ranks is known. In the paper (sec. 4) each rank updates its weights at once. The norm is
# checked afterwards, and where the check fails the update is corrected.
#
# ZB-H2 also costs memory. A micro-batch is alive from its forward to its weight half. With eight
# ranks and sixteen micro-batches, how many micro-batches are alive at once on rank 0, at most?

# %%
alive_h2 = pl.exercises.guess("micro-batches alive, ZB-H2, p=8, m=16", low=1, high=16, decimals=0)
alive_h2

# %%
costs = {"forward": 1e-3, "backward": 1e-3, "weight_grad": 1e-3}
alive_h2.reveal(pipeline.simulate(schedules.zb_h2(8, 16), **costs).peak_live[0])

# %% [markdown]
# Rank 0 runs $2(p-1)$ forwards of warm-up and the first forward of the steady phase before the
# first micro-batch comes back. And under ZB-H1?

# %%
on_which = pl.exercises.choose(
    "Which rank keeps the most micro-batches alive under ZB-H1?",
    ["the first, as under 1F1B", "the last", "all ranks keep equally many"],
)
on_which

# %%
view.live_activations(
    schedules.one_f_one_b(4, 8),
    schedules.zb_h1(4, 8),
    schedules.zb_h2(4, 8),
    labels=["1F1B", "ZB-H1", "ZB-H2"],
).titled("Under ZB-H1 and ZB-H2 every rank keeps as many alive as the first")

# %%
on_which.reveal(3, "A weight half that is late keeps its micro-batch alive for as long.")

# %% [markdown]
# The largest number on any rank is
#
# $$ \text{1F1B: } p, \qquad \text{ZB-H1: } p, \qquad \text{ZB-H2: } 2p - 1 . $$
#
# ZB-H1 keeps no more micro-batches alive than the first rank of 1F1B, but it keeps so many on
# every rank.
#
# ## DualPipe, derived on a drawn schedule
# DeepSeek-V3's DualPipe feeds micro-batches into the pipeline from both ends. Its report gives the
# idle time $(\frac{p}{2}-1)(F\&B + B - 3W)$, and
# [DeepSeek-V3 #211](https://github.com/deepseek-ai/DeepSeek-V3/issues/211) asks how it is derived.
# DualPipeV is the same schedule, folded in the middle: it has $p/2$ ranks, and each of them has one
# stage of the first half of the model and one of the second half. PyTorch has DualPipeV, so its
# lists can be printed. Here is that of the last of four ranks:


# %%
def lists_of_torch(kind, microbatches):
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, p = dist.get_rank(), dist.get_world_size()
    stages = [
        PipelineStage(torch.nn.Linear(1, 1), i, 2 * p, torch.device("cpu"))
        for i in (rank, 2 * p - 1 - rank)
    ]
    made = getattr(schedules, kind)(stages, microbatches, loss_fn=torch.sum)
    return [" ".join(map(str, made.pipeline_order[r])) for r in range(p)]


dual = pl.launch(lists_of_torch, ranks=4, args=("ScheduleDualPipeV", 10))[0]
dual[3]

# %% [markdown]
# `(4F4;3B0)OVERLAP_F_B` marks a pair that may overlap. In DualPipe the forward of one micro-batch
# and the backward of another one begin together and end together, and the pair takes $F\&B$.
# PyTorch executes them one after the other, unless you register a function of your own for such a
# pair (`register_custom_function`). (In other lists `None` is a pause.) The next cell draws the
# lists of all ranks twice, with $F=I=W=1$ ms. In the upper picture a pair takes $F\&B = F+B = 3$
# ms, so that overlapping saves no time; in the lower one it takes 2.4 ms. A pair is drawn as its
# forward, then its backward:

# %%
pairs = re.findall(r"\((\w+);(\w+)\)", " ".join(dual))
plain = [re.sub(r"[()]|OVERLAP_F_B|None", "", row).replace(";", " ") for row in dual]


def drawn(F, I_, W, both):
    costs = {"forward": F / 1e3, "backward": I_ / 1e3, "weight_grad": W / 1e3}
    return pipeline.simulate(plain, **costs, overlapped=both / 1e3, pairs=pairs, folded=True)


together = {"DualPipeV, F&B = 3 ms": drawn(1, 1, 1, 3), "F&B = 2.4 ms": drawn(1, 1, 1, 2.4)}
view.schedules(together, title="An F&B that takes less than F + B shortens the step")

# %% [markdown]
# The idle time has four parts. The first three are those of an answer in that thread. The fourth is
# chosen here so that the sum is the report's formula. The upper picture shows parts 1 and 3, from
# left to right; parts 2 and 4 are 0 there. Let $n = \frac{p}{2}-1$ for a DualPipe of $p$
# ranks; here $p = 8$ and $n = 3$.
#
# 1. **Fill.** The last rank begins after $n$ forwards, so it is idle for $nF$. Rank 0 has the same
#    gap later, where it waits for the first gradients of stage 0.
# 2. **First input halves.** The first gradient comes from the last stage to the tip of the V, on
#    the last rank, through $n$ input halves (7I0, 6I0 and 5I0), which take $nI$. Forwards fill $nF$
#    of this time. What is left is $n(I - F)$, which is 0 for $I = F$.
# 3. **Last pairs.** A rank that has no forward left of the stage whose turn it is does a backward
#    alone, while its neighbour still does a pair. It waits for the difference, and does so $n$
#    times: $n(F\&B - B)$.
# 4. **Drain.** The last gradients pass $n$ ranks as input halves. Each rank has a weight half to do
#    meanwhile. What is left is $n(I - W)$, which is 0 for $I = W$.
#
# Together, with $I = B - W$:
#
# $$ n\,\big[F + (I - F) + (F\&B - B) + (I - W)\big] = n\,(F\&B + 2I - B - W)
#    = \Big(\frac{p}{2}-1\Big)(F\&B + B - 3W) . $$
#
# Suppose that a pair takes no longer than its backward alone, $F\&B = 2$ ms. For how long is a rank
# then idle ($F=I=W=1$ ms, $n=3$)?

# %%
overlap = pl.exercises.guess("idle time of the most idle rank", low=0, high=9, unit="ms")
overlap

# %%
overlapped = []
for F, I_, W, both in ((1, 1, 1, 3), (1, 1, 1, 2.4), (1, 1, 1, 2), (1, 1.2, 0.9, 3.1)):
    one = drawn(F, I_, W, both)
    idle = [1e3 * (one.makespan - busy) for busy in one.busy]
    overlapped.append([F, I_, W, both, 3 * (both + (I_ + W) - 3 * W), max(idle), min(idle)])
names = ["F", "I", "W", "F&B", "(p/2-1)(F&B+B-3W)", "drawn, most idle rank", "least idle rank"]
print("chunks of micro-batches that are alive on a rank, at most:", max(one.peak_live))
pd.DataFrame(overlapped, columns=names).round(2)

# %%
overlap.reveal(overlapped[2][5])

# %% [markdown]
# For $F = I = W$ (the first three rows) the most idle rank of the drawn schedule has exactly the
# idle time of the formula, and so it has whenever $I = F$ and $W \le I$. The thread also asks
# whether the bubble differs between devices when $F\&B < F + B$. It does: the other ranks are idle
# for less. In the last row $I$ is larger than $F$, and part 2, $n(I - F) = 0.6$ ms, does not
# appear in the drawing, because torch's lists have another forward to do in that time: 6.9 ms and
# not 7.5.
#
# [PP-Schedule-Visualization
# #1](https://github.com/Victarry/PP-Schedule-Visualization/issues/1) asks why two pictures of one
# schedule show different bubbles. Our two pictures answer that: they are drawn for different
# $F\&B$.
#
# At most nine chunks of micro-batches are alive on a rank, the $p+1$ of the report. DualPipe also
# keeps two copies of the parameters. DualPipeV keeps one copy, on half as many ranks.
#
# ## ZB-H1 on four real ranks
# Now four processes execute the same lists. A GPT has more in it than matrix products. Which half
# of its backward takes longer?

# %%
halves = pl.exercises.choose(
    "In a GPT, the input half of a backward takes",
    ["as long as the weight half", "longer than the weight half", "less time than the weight half"],
)
halves

# %%
settings = {"steps": 3, "optimizer": "sgd", "progress": False}
runs = {name: pl.run(model, plan.replace(schedule=name), **settings) for name in ("1f1b", "zb-h1")}

# %% tags=["measured"]
title = "Weight halves fill part of the time in which ranks of 1F1B wait"
replays = {name: run.replay() for name, run in runs.items()}
view.timelines(*replays.values(), labels=["1F1B", "ZB-H1"], title=title)

# %% tags=["measured"]
pd.DataFrame(
    {
        name: (1e3 * one.pipeline_times()).mean().round(1).add_suffix(" (ms)")
        for name, one in replays.items()
    }
)

# %% [markdown]
# (These are means over the ranks; both halves count as backward.) For $F = I = W$ the formula
# promises a third of the idle time. Are the three equal here? The mean times of one micro-batch on
# one rank:

# %% tags=["measured"]
spans = replays["zb-h1"].spans.query("kind in ('forward', 'backward', 'weight_grad')")
seconds = (spans.end - spans.start).groupby(spans.kind).mean().rename("ms")
names = {"forward": "F", "backward": "I", "weight_grad": "W"}
(1e3 * seconds).rename(names).round(1).to_frame()

# %%
halves.reveal(
    2,
    "Norms, activation functions and the scores of attention have gradients of their inputs, and "
    "few weights or none. So the part of the backward that can be delayed is less than half.",
)

# %% [markdown]
# Put these means into $(p-1)(F+I-W)$ and $(p-1)(F+I+W)$. The formulas promise about half of 1F1B's
# idle time, not a third. Both runs are idle for longer than promised, because the stages are not
# equal and messages take time.
#
# Counting micro-batches hides one thing. After its input half a micro-batch has freed what that
# half alone needed, such as the scores of attention, and keeps the gradients of layer outputs for
# its weight half, which are fewer bytes here. So ranks with late weight halves need less than the
# first one. The first one needs more than under 1F1B, because within a backward the gradients
# of all its layers are alive at once, until the weight half has used them:

# %%
for name, run in runs.items():
    peaks = [f"{run.peaks(rank)['measured']['total'] / 1e6:.1f}" for rank in range(4)]
    print(f"{name:<5} peak of each rank in MB: {', '.join(peaks)}")

# %%
half_sends = pl.exercises.choose(
    "ZB-H1 has two actions in place of each backward. Compared with 1F1B, it sends",
    ["half as many bytes", "as many bytes", "1.5 times as many bytes"],
)
half_sends

# %%
for name, run in runs.items():
    print(f"{name:<5} {run.traffic()['bytes'].sum() / 1e6:.1f} MB in a step, all ranks together")
half_sends.reveal(2, "The input half sends its gradient; no other rank needs what W computes.")

# %% [markdown]
# ## Three schedules that deadlock
# These three schedules deadlock: ranks wait for each other for ever. The validator proves that
# before a process starts, and says which rank waits for which action:

# %%
import textwrap

clinic = pl.exercises.deadlock_clinic
for name, patient in clinic.patients.items():
    print(f"{name}: {patient.story}\n{textwrap.fill(str(patient.diagnosis), 100)}\n")

# %%
clinic.patients["two ranks"].chart()

# %%
clinic.patients["two chunks"].chart()

# %%
third_rank = pl.exercises.choose(
    "Of the three ranks, 0 and 1 are in the cycle. Rank 2 has the list 2F0 2F1 2F2 2B0 2B1 2B2. "
    "How far does it get?",
    ["to its end: it is not in the cycle", "it runs 2F0 and waits at 2F1", "it runs nothing"],
)
third_rank

# %%
clinic.patients["three ranks"].chart()

# %%
third_rank.reveal(2, "It is not in the cycle, but it waits for rank 1, which is: 2F1 needs 1F1.")

# %% [markdown]
# **Warm-up.** Repair them by moving a few actions.

# %%
clinic

# %%
### ANSWER: deadlock_clinic


pl.exercises.deadlock_clinic.check(fixed)

# %% [markdown] tags=["solution-only"]
# **Why it works.** In a cycle of waits, a rank A waits at one action, and a rank B waits for
# another action, which comes later in A's list. Move that one before the action at which A waits,
# and the cycle is open.
#
# **Common mistakes.** More actions are moved than necessary, and the checker counts them. One cycle
# is opened, and the next one appears: the second schedule has two and the third has three. Actions
# are moved to another rank, but a stage is where its weights are.
#
# **Another answer** for the third one takes no thought: 1F1B's own lists for three ranks. They take
# the four moves that are allowed; the answer above takes three.

# %% tags=["solution-only"]
of_1f1b = [" ".join(map(str, row)) for row in schedules.one_f_one_b(3, 3)]
pl.exercises.deadlock_clinic.check({**fixed, "three ranks": of_1f1b})

# %% [markdown]
# ## Write a schedule
# For any number of stages and micro-batches. The checker proves it, simulates it, counts what it
# keeps in memory, and then runs it on four real ranks and compares every gradient with one process.

# %%
exercise = pl.exercises.own_schedule
exercise


# %%
### ANSWER: own_schedule


verdict = pl.exercises.own_schedule.check(my_schedule)
verdict

# %% [markdown]
# `exercise.hint()` gives one hint at a time; `exercise.solution()` shows an answer. This is what
# your schedule looks like, next to GPipe's:


# %%
def next_to_gpipe(make, pp=4, microbatches=6):
    lists = {"GPipe": schedules.gpipe(pp, microbatches), "yours": make(pp, microbatches)}
    return view.schedules(lists)


next_to_gpipe(my_schedule) if verdict else "write my_schedule first"

# %% [markdown] tags=["solution-only"]
# **Why it works.** While micro-batch 0 goes down the $p-r-1$ ranks after $r$ and comes back, each
# of these ranks needs one more micro-batch to work on, or it is idle. So rank $r$ runs $p-r-1$
# forwards ahead. After that each backward makes room for one forward.
#
# **Common mistakes.** All forwards first is GPipe: it keeps the time limit, but $m$ micro-batches
# are alive. A warm-up that is one too short leaves the last rank idle in every round; one that is
# too long costs memory. With fewer micro-batches than stages the warm-up has to end at $m$.
#
# **Another answer** writes down no order, but a rule: a rank that is free takes a backward if one
# is possible, and a forward if its memory allows it. 1F1B comes out.


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


pl.exercises.own_schedule.check(by_rule)

# %% [markdown]
# ## Your schedule trains the GPT
# `pl.run` takes a function in place of a schedule's name. Messages are derived from your lists.

# %%
library = runs["1f1b"]  # trained with the same settings
yours = pl.run(model, plan.replace(schedule=my_schedule), **settings) if verdict else None
if yours:
    print("the same losses:", yours.losses == library.losses)
    peaks = [one.peak_memory / 1e6 for one in (yours, library)]
    print("highest peak of memory: {:.1f} MB, 1F1B's {:.1f} MB".format(*peaks))
    sent = [one.traffic()["bytes"].tolist() for one in (yours, library)]
    print("bytes that ranks 0 to 3 send per step, yours and 1F1B's:", *sent, sep="\n  ")
else:
    print("write my_schedule first")

# %% tags=["measured"]
yours.replay().timeline() if yours else "write my_schedule first"

# %% [markdown]
# ## Go further: three targets
# The first two are schedules that you have seen drawn. The third has not been shown.

# %%
targets = pl.exercises.better_schedules
targets

# %%
### ANSWER: better_schedules


reached = pl.exercises.better_schedules.check(first, second, third)
reached

# %%
if reached:
    named = {"first": first(4, 8), "second": second(4, 8), "third": third(4, 8)}
    title = "1F1B and your three schedules on one axis"
    picture = view.schedules({"1F1B": schedules.one_f_one_b(4, 8), **named}, title=title)
picture if reached else "write first, second and third"

# %%
if reached:
    alive = view.live_activations(*named.values(), labels=list(named))
alive if reached else "write first, second and third"

# %% [markdown] tags=["solution-only"]
# **Why the third works.** A micro-batch occupies memory on rank 0 from its forward to its weight
# half. In 1F1B it goes down $p$ forwards and up $p$ whole backwards, $p(F+B)$, and a new one starts
# every $F+B$: $p$ are alive. With input halves it comes back after $p(F+I)$ and leaves after one
# more $W$, which for $F=I=W$ is $(2p+1)F$. Where a new one starts every $3F$, at least $(2p+1)/3$
# are therefore alive.
#
# **Why it does not work for all sizes.** $(2p+1)/3$ is a lower bound, and it leaves no time for
# waiting. But sometimes a forward of one micro-batch and an input half of another one are due on a
# rank at the same time, and one of them has to wait. With $p=4$ and three alive this cannot be
# avoided: whatever the distance between two starts is, two actions collide on some rank. In the
# steady state of this answer three micro-batches then take $10F$ in place of $9F$. As long as $m$
# is small, the $3(p-1)F$ for which 1F1B is idle pay for that: with $p=4$ this answer takes no
# longer than 1F1B for up to 10 and for 12 micro-batches, and longer for 11 and from 13 on.
#
# **Common mistakes.** Weight halves run as soon as they can: then they are in the way of input
# halves that other ranks wait for. Or they run as late as they can: then memory is full and
# forwards wait.
#
# **Another answer** takes 1F1B's lists apart for the first target, and has one rule for the others.

# %% tags=["solution-only"]
### ANSWER: better_schedules_other


pl.exercises.better_schedules.check(from_1f1b, second_by_rule, third_by_rule)

# %% [markdown]
# ## What to remember
# 1. A backward is two products; other ranks wait only for the gradient of the input.
# 2. Input halves early and weight halves late turn idle time into work.
# 3. ZB-H1 keeps as many micro-batches alive as 1F1B's first rank, on every rank, and has a third of
#    1F1B's idle time ($F=I=W$).
# 4. ZB-H2 has no idle time inside a rank's own step. The step gets shorter only if the next one may
#    begin before this one ends everywhere, and up to $2p-1$ micro-batches are alive.
# 5. A schedule deadlocks where waits form a cycle; that can be proved from the lists alone.
#
# | schedule | idle time per rank | alive at most | when |
# |---|---|---|---|
# | 1F1B | $(p-1)(F+I+W)$ | $p$ | the default |
# | ZB-H1 | $(p-1)(F+I-W)$ | $p$ | few micro-batches, memory is the limit |
# | ZB-H2 | $(p-1)(F+I-2W)$ | $2p-1$ | memory is free, and no barrier between steps |
# | DualPipe | $(\frac{p}{2}-1)(F\&B+B-3W)$ | $p+1$ | messages need hiding, two copies fit |
#
# ZB-H1's formula needs $W \le F$ and $m \ge p$; ZB-H2's needs $W \le F$, $2W \le F+I$ and
# $m \ge 2p-1$: with fewer micro-batches there are too few weight halves to fill the gaps.
# DualPipe's is that of the rank which is idle longest, for $I = F$ and $W \le I$; otherwise it is
# an estimate.
#
# ## In PyTorch, DeepSpeed, Megatron
# `torch.distributed.pipelining` has `ScheduleInterleavedZeroBubble` (interleaved with split
# backwards), `ScheduleZBVZeroBubble` (the V with zero bubble) and `ScheduleDualPipeV`. The first
# one takes one `PipelineStage` per rank or more, and with one its lists are ZB-H1's, action by
# action. The two V schedules take exactly two. The next picture is drawn from torch's own lists,
# with $F=I=W=1$ ms per stage and $F\&B=3$ ms, so that overlapping saves no time.

# %%
shorter = pl.exercises.choose(
    "Where overlapping saves no time, which of the two V schedules is over first?",
    ["ScheduleZBVZeroBubble", "ScheduleDualPipeV", "both at the same moment"],
)
shorter

# %%
zbv = pl.launch(lists_of_torch, ranks=4, args=("ScheduleZBVZeroBubble", 10))[0]
lists = [row.replace("None", "") for row in zbv]
torch_drawn = {"ScheduleZBVZeroBubble": pipeline.simulate(lists, **costs, folded=True)}
title = "Where F&B saves no time, DualPipeV takes longer than ZBV"
view.schedules(torch_drawn | {"ScheduleDualPipeV": drawn(1, 1, 1, 3)}, title=title)

# %%
shorter.reveal(
    1,
    "By the formula above DualPipeV is then idle for (p/2-1)(3 + 2 - 3) = 6 ms: its T is 66 ms. "
    "ZBV's ranks are never idle between their first and last action: T is 60 ms. As they begin and "
    "end at different times, the ends in the picture differ by 3 ms only.",
)

# %% [markdown]
# And one of them at work, on the same GPT under `pl.observe`. Each rank has two stages.

# %%
v_sends = pl.exercises.guess(
    "bytes of a step under ScheduleZBVZeroBubble, as a multiple of 1F1B's",
    low=0,
    high=5,
    unit="times",
)
v_sends


# %%
def with_torch(model, microbatches, steps=3):
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

    rank, p = dist.get_rank(), dist.get_world_size()
    mine = {i: pl.reference.Stage(model, i, 2 * p) for i in (rank, 2 * p - 1 - rank)}
    stages = [PipelineStage(part, i, 2 * p, torch.device("cpu")) for i, part in mine.items()]
    optimizer = pl.reference.optimizer(torch.nn.ModuleList(mine.values()).parameters(), "sgd")
    schedule = ScheduleZBVZeroBubble(stages, microbatches, loss_fn=lambda loss, targets: loss)
    means = []
    for step in range(steps):
        batches = pl.reference.batches(model, step=step, microbatches=microbatches)
        tokens, targets = (torch.cat(column) for column in zip(*batches, strict=True))
        losses = []  # in the V the last stage is on rank 0, next to the first
        last = {"target": targets, "targets": targets, "losses": losses} if rank == 0 else {}
        schedule.step(*(tokens,)[: rank == 0], **last, return_outputs=False)
        means.append(float(sum(losses)) / microbatches)
        optimizer.step()
        optimizer.zero_grad()
    return means


observed = pl.observe(with_torch, ranks=4, args=(model, 8), memory_steps=0)
print("the same losses:", bool(np.allclose(observed.results[0], library.losses, rtol=1e-5)))
sent = {"1F1B": library, "ScheduleZBVZeroBubble": observed}
print("bytes that each rank sends in a step:")
pd.DataFrame({name: run.traffic().set_index("rank")["bytes"] for name, run in sent.items()}).T

# %%
v_sends.reveal(observed.traffic()["bytes"].sum() / library.traffic()["bytes"].sum())

# %% [markdown]
# The losses agree to a relative difference of 1e-5, not bit for bit. Each rank has two stages here,
# so messages cross more borders than under 1F1B: the $2p$ stages have $2p-1$ borders, and only that
# at the tip of the V is crossed by no message, because both its stages are on the last rank. 1F1B
# has $p-1$ borders, half as many as the other $2p-2$, and each rank sends half as many bytes.
#
# DeepSpeed's pipeline engine has 1F1B alone. Megatron-LM has 1F1B and interleaved 1F1B. For
# mixtures of experts it can overlap the forward of one micro-batch with the backward of another one
# (`--overlap-moe-expert-parallel-comm`) and then delay weight halves (`--delay-wgrad-compute`).
# ZB-H1 and ZB-H2 for it are in
# [sail-sg/zero-bubble](https://github.com/sail-sg/zero-bubble-pipeline-parallelism), DualPipe is in
# [deepseek-ai/DualPipe](https://github.com/deepseek-ai/DualPipe); neither is installed here, and
# neither was run. NCCL matches messages by order; every schedule that paralab runs is lowered to an
# order that both ends agree on. ZB-H1 and ZB-H2 were run so with NCCL on one GPU that two ranks
# shared, not yet on several GPUs.
#
# ## Read on
# * Qi and others 2024, [Zero Bubble Pipeline Parallelism](https://arxiv.org/abs/2401.10241), sec.
#   2: ZB-H1 and ZB-H2; sec. 4 for the update without a barrier.
# * Qi and others 2024, [Pipeline Parallelism with Controllable
#   Memory](https://arxiv.org/abs/2405.15362): how long a micro-batch stays alive decides the
#   memory.
# * DeepSeek-AI 2024, [DeepSeek-V3 technical report](https://arxiv.org/abs/2412.19437), sec. 3.2.1.
# * In the package: `paralab/parallel/schedules.py`, `paralab/theory/schedule_check.py` (the proof),
#   `paralab/model/ops.py` (both halves of every backward).
