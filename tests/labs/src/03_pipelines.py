# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 03 · Pipelines: the bubble, and what it costs to shrink it
#
# *«How do I profile the pipeline's bubble time?»* has been open in a large project's tracker
# [for years](https://github.com/NVIDIA/Megatron-LM/issues/691), and
# [not](https://github.com/NVIDIA/Megatron-LM/issues/828)
# [only](https://github.com/deepspeedai/DeepSpeedExamples/issues/201)
# [there](https://github.com/sail-sg/zero-bubble-pipeline-parallelism/issues/18). By the end of this
# lab you will have measured it on your own machine, to two decimals, and know which of three
# numbers to believe.

# %% [markdown]
# ## Who waits for whom
# Cut a model into four *stages* of consecutive layers, one per device. Now no device holds the
# whole model, but stage 1 cannot start before stage 0 has sent it something. A **schedule** says
# what each device does, in which order. It is a list, and a list can be printed:

# %%
import pandas as pd

import paralab as pl
from paralab import view
from paralab.parallel import schedules
from paralab.theory import pipeline

layerwise = schedules.naive(4, 2)
for rank, actions in enumerate(layerwise):
    print(f"rank {rank}:", " ".join(map(str, actions)))

# %% [markdown]
# `2F1` is stage 2, forward, micro-batch 1; `2B1` its backward. If a forward takes one millisecond
# and a backward two, this is what happens:

# %%
# A backward is two products of 1 ms each, for the input and for the weight (lab 04).
one_by_one = pipeline.simulate(layerwise, forward=1e-3, backward=1e-3, weight_grad=1e-3)
view.simulated_timeline(one_by_one, "layer by layer")

# %% [markdown]
# One device works, three wait: this naive form buys memory and no speed at all. The remedy is as
# old as pipelines: with the batch cut into **micro-batches**, stage 0 need not wait for the first
# to come back before it starts the next. GPipe runs all forwards, then all backwards:

# %%
gpipe = schedules.gpipe(4, 4)
for rank, actions in enumerate(gpipe):
    print(f"rank {rank}:", " ".join(map(str, actions)))

# %% [markdown]
# ## Commit to a guess
# Four stages, four micro-batches, all stages alike. Which share of all device time is spent
# waiting?

# %%
guess = pl.exercises.guess(
    "share of device time that is bubble: GPipe, p=4, m=4", low=0, high=80, unit="%", decimals=0
)
guess

# %% [markdown]
# ## Run it
# Four real processes, each with two of the eight blocks.

# %%
model = pl.ModelSpec(layers=8, hidden=192, heads=4, seq_len=128)
plan = pl.Plan(pp=4, schedule="gpipe", microbatches=4, microbatch_size=2)
report = pl.run(model, plan, steps=7)
report

# %% [markdown]
# ## See it
# Above the ideal schedule, beneath it what really ran, on one scale. The numbers are micro-batches.

# %% tags=["measured"]
replayed = report.replay()
replayed.timeline()

# %% tags=["measured"]
guess.reveal(round(100 * replayed.bubble))

# %% [markdown]
# ## Three numbers, and which to believe
# The bubble is 1 − work / (p · T), with T the longest time from a rank's first action to its last.
# One formula, and three numbers of your run. Theory says that (p−1)/(m+p−1) is bubble. Papers often
# print (p−1)/m instead: idle time over *ideal* time, another number under the same name, so both
# are here.

# %% tags=["measured"]
report.bubbles().round(2)

# %% [markdown]
# * **formula**: all stages alike, with the mean times of this run's actions; messages free;
# * **simulated**: the same schedule with the costs that this run's stages really had;
# * **replayed**: your run, each piece of work with the processor time it took, on a device of its
#   own, with links;
# * **measured**: the wall clock. With fewer cores than ranks it answers another question, for a
#   process that waits for a *core* looks just like one that waits for a message.
#
# For «what would four devices do» believe the *replay*; *simulated* beside it says how much of that
# is the schedule's own. Believe the wall clock where every rank has a core or a GPU of its own.
#
# The replay can tell waiting for a core from waiting for a message, and this is why every span was
# written down with its cost. Its one assumption: a stage computes as fast alone as it did here. On
# GPUs profilers have a trap of the same kind. The kernel that receives is *running* while it waits,
# so idling looks like communication. Users of one paper's code met it, and its authors answer that
# their bubble rates [are
# computed](https://github.com/sail-sg/zero-bubble-pipeline-parallelism/issues/25), from times of
# work and of messages that were profiled apart.
#
# Here a wait is a span of its own:

# %% tags=["measured"]
spans = replayed.spans.query("step == 3")
seconds = (spans.end - spans.start).groupby([spans["rank"], spans.kind]).sum().unstack()
(1e3 * seconds[["forward", "backward", "wait"]]).round(1).add_suffix(" (ms)")

# %% [markdown]
# (A rank that has done its last backward waits for nobody: that end of the picture is bubble too,
# and no span. The last rank is the exception: it shares the token embedding with rank 0, and waits
# until both can add up its gradient.)
#
# ## Turn the knobs
# More micro-batches, smaller bubble. One slow stage, and everybody waits for it. *Run it* starts
# real processes.

# %%
view.widgets.pipeline()

# %% [markdown]
# The same without a mouse:

# %%
unit = {"forward": 1e-3, "backward": 1e-3, "weight_grad": 1e-3}  # seconds
rows = []
for m in (1, 2, 4, 8, 16, 32):
    share = pipeline.simulate(schedules.gpipe(4, m), **unit).bubble_rate
    rows.append({"m": m, "simulated": share, "(p-1)/(m+p-1)": 3 / (m + 3), "(p-1)/m": 3 / m})
pd.DataFrame(rows).set_index("m").round(3)

# %% [markdown]
# ## The price
# So take very many micro-batches? GPipe has to remember the activations of *all* of them, for no
# backward runs before the last forward. **1F1B** runs each backward as soon as it can:

# %%
one_f_one_b = schedules.one_f_one_b(4, 8)
view.simulated_timeline(pipeline.simulate(one_f_one_b, **unit), "1F1B")

# %%
view.live_activations(schedules.gpipe(4, 8), one_f_one_b, labels=["GPipe", "1F1B"])

# %% [markdown]
# **1F1B does not shrink the bubble. It shrinks the memory**: p − r micro-batches on rank r in place
# of m. Most people get this wrong, so here are both numbers, of both schedules, for real:

# %% tags=["measured"]
runs = {
    name: pl.run(model, plan.replace(schedule=name, microbatches=8), steps=5, progress=False)
    for name in ("gpipe", "1f1b")
}
rows = {
    name: {"bubble, replayed": round(run.replay().bubble, 2), "bubble, formula": round(3 / 11, 2)}
    for name, run in runs.items()
}
pd.DataFrame(rows).T

# %%
view.live_activations(*runs.values(), labels=["GPipe", "1F1B"]).table.groupby(
    ["source", "rank"], sort=False
)["live"].max().unstack()

# %% [markdown]
# ## Interleave
# The bubble is the time until the last stage has something to do. Give every device *two* smaller
# stages, first and fifth, second and sixth, and the first micro-batch gets to the last device in
# half the time. Idle time goes down by v (the *bubble over ideal*, for the share is of a shorter
# whole), and messages go up by (pv−1)/(p−1), a little more than v: the stages of one device are not
# neighbours, so every border is a message.

# %%
rows = []
deep = model.replace(layers=16, hidden=64)
for v in (1, 2, 4):
    name = "interleaved" if v > 1 else "1f1b"
    lists = schedules.interleaved(4, 8, v) if v > 1 else schedules.one_f_one_b(4, 8)
    run = pl.run(
        deep,
        plan.replace(schedule=name, microbatches=8, virtual_stages=v),
        steps=2,
        progress=False,
    )
    sends = run.collectives.query("step == 1 and op == 'send' and axis == 'pp'")
    simulated = pipeline.simulate(lists, **{half: 1e-3 / v for half in unit})
    rows.append(
        {
            "v": v,
            "bubble, formula": pipeline.bubble_formula(name, 4, 8, v, F=1, B=1, W=1),
            "bubble, simulated": simulated.bubble_rate,
            "bubble over ideal": simulated.bubble_rate / (1 - simulated.bubble_rate),
            "messages, counted": len(sends),
            "rank 0 keeps (micro-batches)": simulated.peak_live[0] / v,
            "Korthikanti: p (1 + (p-1)/(p v))": 4 * (1 + 3 / (4 * v)) if v > 1 else float("nan"),
        }
    )
pd.DataFrame(rows).set_index("v").round(3)

# %%
interleaved = schedules.interleaved(4, 8, 2)
halved = {half: 0.5e-3 for half in unit}
view.simulated_timeline(pipeline.simulate(interleaved, **halved), "interleaved")

# %% [markdown]
# People stumble over the number of forwards before the first backward: 2(p−r−1) + (v−1)p here,
# [why not p−r−1](https://github.com/NVIDIA/Megatron-LM/issues/169) as in 1F1B? The second half you
# read off the picture: rank 0 has to send its first chunk's micro-batches *and* feed its second
# chunk, p of them for every further chunk.

# %%
p, v = 4, 2
warm_up = []
for rank, actions in enumerate(interleaved):
    kinds = [action.kind for action in actions]
    warm_up.append(
        {
            "rank": rank,
            "2(p-r-1) + (v-1)p": 2 * (p - rank - 1) + (v - 1) * p,
            "counted": kinds.index("B") - 1,
        }
    )
pd.DataFrame(warm_up).set_index("rank")

# %% [markdown]
# (The counted number leaves out one forward, the first of the steady one-forward-one-backward.) The
# 2 does not show in the picture, where messages take no time. So try 1 in its place, with messages
# that take a tenth of a forward and with such that take none:

# %%
from itertools import chain

rows = {}
for factor in (2, 1):
    lists = []
    for rank, actions in enumerate(interleaved):
        forwards = [action for action in actions if action.kind == "F"]
        backwards = [action for action in actions if action.kind == "B"]
        first = factor * (p - rank - 1) + (v - 1) * p
        steady = chain.from_iterable(zip(forwards[first:], backwards, strict=False))
        lists.append([*forwards[:first], *steady, *backwards[len(forwards) - first :]])
    none, some = (pipeline.simulate(lists, **halved, comm=comm) for comm in (0, 0.05e-3))
    rows[f"{factor}(p-r-1) + (v-1)p"] = {
        "bubble, messages take no time": none.bubble_rate,
        "bubble, they take 0.05 ms": some.bubble_rate,
        "rank 0 keeps (chunks)": none.peak_live[0],
    }
pd.DataFrame(rows).T.round(3)

# %% [markdown]
# So it is about the links: where messages take time, forwards begun ahead of need hide them, and
# are paid for with memory.
#
# And [why do some codes demand p > 2](https://github.com/NVIDIA/Megatron-LM/issues/750)? With two
# ranks each is both the left and the right neighbour of the other, and messages that are told apart
# by *order* alone must not overtake one another. Here every pair's messages have one agreed order,
# so it simply runs:

# %%
two = pl.Plan(pp=2, virtual_stages=2, schedule="interleaved", microbatches=4)
pl.run(model, two, steps=2, progress=False)

# %% [markdown]
# ## Is it the same training?
# One process, the same micro-batches in the same order, plain SGD:

# %%
import numpy as np

proof = {"optimizer": "sgd", "lr": 0.1, "steps": 3, "keep_state": True, "progress": False}
small = model.replace(hidden=64)
alone = pl.run(small, pl.Plan(microbatches=4), **proof)
for name in ("naive", "gpipe", "1f1b"):
    split = pl.run(small, pl.Plan(pp=4, schedule=name, microbatches=4), **proof)
    worst = max(
        np.abs(alone.gradients[key] - split.gradients[key]).max()
        / np.abs(alone.gradients[key]).max()
        for key in alone.gradients
    )
    print(f"{name:<6} gradients equal to 1e-5 of their largest entry: {worst < 1e-5}")

# %% [markdown]
# ## Break it
# Swap two entries on one rank, so that it wants to compute something before its input can exist.
# On a cluster the job stands still. Here it is refused before a process starts, and the message
# names who waits for whom:

# %%
broken = [list(actions) for actions in one_f_one_b]
i = broken[1].index(schedules.parse("1F1"))
j = broken[1].index(schedules.parse("1B0"))
broken[1][i], broken[1][j] = broken[1][j], broken[1][i]
try:
    pl.run(model, plan.replace(schedule=lambda pp, m: broken, microbatches=8))
except ValueError as error:
    print(error)

# %%
view.stuck(broken, name="one swap on rank 1")

# %% [markdown]
# ## Your turn
# Small ones, each a line: guess first, then change and run.
#
# * `microbatches=2` on four stages: fewer micro-batches than stages. Does it work? What is left of
#   the pipeline?
# * `pl.Plan(pp=2, dp=2, ...)`: two pipelines of two stages beside one another. Which messages are
#   new?
# * The widget: make the last stage twice as slow. Where does the bubble go, and do more
#   micro-batches help?
#
# The large one, a schedule of your own, is [lab 04](04_own_schedule.ipynb).
#
# ## On your GPUs
# The same cells. Spans come from CUDA events, `report.timeline()` is device time, and the measured
# column of the table joins the other three. What to look for: with NCCL a receive is a kernel, so
# the comm lane is busy where ours shows a wait.
#
# ## Read on
# * Huang and others 2019, [GPipe](https://arxiv.org/abs/1811.06965), sec. 2.3. Narayanan and others
#   2021, [PTD-P](https://arxiv.org/abs/2104.04473), sec. 2.2: both bubble formulas and the
#   interleaved schedule (fig. 4). Korthikanti and others 2022, [Reducing activation
#   recomputation](https://arxiv.org/abs/2205.05198), sec. 4.2.3: what interleaving keeps.
# * In the package: `paralab/parallel/schedules.py` has all six on a screen each, `lowering.py` adds
#   the messages, `paralab/interpret/run.py` runs any of them, `theory/pipeline.py` simulates them.
