# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 03 · Pipelines
#
# **A model is cut into stages, one per device. For which part of the time are the devices idle, and
# what does it cost to make that part smaller?**
#
# A pipeline trains a model that no single device holds. Only activations, and their gradients, go
# from one device to its neighbour, so it works over slow links, too. Its price is waiting.
#
# **You will be able to**
# * derive the bubble of a pipeline schedule, and name the two shares that papers give for it;
# * read a step's time as forward + backward + point-to-point + idle, and say which clock to
#   believe;
# * say what 1F1B and interleaving improve, and what each of them costs;
# * write the executor of a pipeline in plain PyTorch, and train a GPT with it.
#
# **You need** labs 00 and 01, fractions, and `nn.Module`, `backward()`, `dist.send`, `dist.recv`.
#
# **Minutes** 100 to 140, of which 40 are reading and running, the others exercises.

# %%
from itertools import chain

import numpy as np
import pandas as pd

import paralab as pl
from paralab import view
from paralab.parallel import schedules
from paralab.theory import pipeline

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
view.schedules({"layer by layer": schedules.naive(4, 4), "GPipe": schedules.gpipe(4, 4)})

# %% [markdown]
# ## One stage works, the others wait
# Each of four devices has a quarter of the layers, a **stage**. No device holds the whole model,
# but stage 1 cannot begin before stage 0 has sent it its output. *Layer by layer* (the upper half
# of the picture) means that one micro-batch goes through all stages, forward and backward, before
# the next one begins.

# %%
by_layer = pl.exercises.choose(
    "Layer by layer on eight devices: which share of all device time is idle?",
    ["1/2", "3/4", "7/8"],
)
by_layer

# %%
of_naive = pipeline.simulate(schedules.naive(8, 4), forward=1e-3, backward=2e-3).bubble_rate
print(f"idle: {of_naive:.2f}")
by_layer.reveal(3, "One device works and seven are idle: that saves memory, but no time.")

# %% [markdown]
# The remedy is to cut the batch into **micro-batches** (the numbers in the boxes; both schedules
# have four) and not to wait for one to end before the next begins. Stage 0 goes on with micro-batch
# 1 while stage 1 works on micro-batch 0. In the drawing a forward takes 1 ms and a backward 2 ms.
# GPipe runs all forwards, then all backwards. The hatched time that is left is the **bubble**.
#
# A **schedule** is one list per rank. `2F1` is stage 2, forward, micro-batch 1; `2B1` its backward.

# %%
for rank, actions in enumerate(schedules.gpipe(4, 4)):
    print(f"rank {rank}:", " ".join(map(str, actions)))

# %% [markdown]
# | symbol | meaning |
# |---|---|
# | $p$ | ranks of the pipeline; each has one stage, until interleaving |
# | $r$ | the number of a rank, $0 \ldots p-1$ |
# | $m$ | micro-batches of a step |
# | $b$, $s$, $h$ | samples of a micro-batch, tokens of a sample, hidden size |
# | $v$ | chunks of the model on each rank (interleaving) |
# | $S$ | bytes of one message between two stages |
# | $F$, $B$ | seconds of a micro-batch's forward and backward on a rank (in lab 00 B is samples) |
# | $T$ | seconds from first forward to last backward, of the rank where that is longest |
#
# ## What a stage adds to the program
# Compared with one device, the program of rank 1 has a receive before each forward and each
# backward, and a send after it. The rank computes as before, but only its own blocks. (The sign ↕
# marks instructions that are in another place.)

# %%
model = pl.ModelSpec(layers=8, hidden=192, heads=4, seq_len=128, tied=False)
plan = pl.Plan(pp=4, schedule="gpipe", microbatches=4, microbatch_size=2)
whole = pl.program(model, pl.Plan(microbatches=4, microbatch_size=2))
whole.diff(pl.program(model, plan, rank=1))

# %% [markdown]
# What is sent is one activation forward, and its gradient backward, for $b = 2$ samples of
# $s = 128$ tokens and $h = 192$. How large is one message?

# %%
one_message = pl.exercises.guess(
    "kB of one message, in fp32", low=0, high=1000, unit="kB", decimals=0
)
one_message

# %% [markdown]
# Both have the shape $(b, s, h)$, so a message has
#
# $$ S = 4\,b\,s\,h \ \text{bytes in fp32.} $$
#
# (The head is not tied to the embedding here: two stages would share that weight, and have to add
# up its gradient.)

# %%
size = 4 * plan.microbatch_size * model.seq_len * model.hidden
print(f"{size:,} bytes; the comparison of the programs shows four of them, {4 * size / 1e3:.0f} kB")
one_message.reveal(size / 1e3)

# %% [markdown]
# ## The bubble of GPipe
# The first picture has four stages and four micro-batches. Now take twelve micro-batches. All
# stages are alike, and messages take no time. Which share of all device time is idle?

# %%
guess = pl.exercises.guess(
    "share of device time that is idle: GPipe, p=4, m=12", low=0, high=80, unit="%", decimals=0
)
guess

# %% [markdown]
# First the pipeline **fills**. Micro-batch 0 passes $p-1$ stages before it reaches the last stage,
# which takes $(p-1)F$. From then on the last stage runs its $m$ forwards without a gap, which takes
# $mF$. So all forwards are over after
#
# $$ (p-1)F + mF = (m+p-1)\,F . $$
#
# The backwards pass the stages in the opposite order. The last stage begins at once and runs its
# $m$ backwards without a gap, which takes $mB$. Then the pipeline **drains**: the last gradient
# passes the other $p-1$ stages, which takes $(p-1)B$. So the backwards take $(m+p-1)B$ in all:
#
# $$ T = (m+p-1)(F+B) . $$
#
# Each rank computes for $m(F+B)$ of this time. It is idle for the rest, $(p-1)F$ among the forwards
# and $(p-1)B$ among the backwards:
#
# $$ T - m(F+B) = (p-1)(F+B) . $$
#
# Divided by $T$ this is the **bubble**, a share of device time. Divided by the ideal time $m(F+B)$
# it is the **bubble over ideal**, which PTD-P and many papers print under the same name:
#
# $$ \text{bubble} = \frac{p-1}{m+p-1}, \qquad \text{bubble over ideal} = \frac{p-1}{m} . $$

# %%
p, rows = 4, []
for m in (2, 4, 8, 12, 16, 32):
    simulated = pipeline.simulate(schedules.gpipe(p, m), forward=1e-3, backward=2e-3).bubble_rate
    shares = {"(p-1)/(m+p-1)": (p - 1) / (m + p - 1), "(p-1)/m": (p - 1) / m}
    rows.append({"m": m, "bubble, simulated": simulated, **shares})
pd.DataFrame(rows).set_index("m").round(3)

# %%
guess.reveal(100 * 3 / (12 + 3))

# %% [markdown]
# ## Four real ranks
# Four processes, two of the eight blocks each. The upper half of the next picture is the ideal:
# this run's own times of forward and backward, with messages that take no time. The lower half is
# the **replay**: the same times, each rank on a device of its own, and links that take time. How
# many messages do the four ranks send in a step of four micro-batches? (Unless it is given a
# cluster, `replay` takes the links of this machine, which `pl.Cluster.local()` has measured.)

# %%
crossings = pl.exercises.guess(
    "messages of a step, all ranks together: p=4, m=4", low=0, high=60, decimals=0
)
crossings

# %%
report = pl.run(model, plan, steps=3, progress=False)
report

# %%
crossings.reveal(len(report.collectives.query("step == 0 and op == 'send'")))

# %% tags=["measured"]
replayed = report.replay()
replayed.timeline()

# %% [markdown]
# Each of the $p-1$ borders is crossed by $m$ activations and $m$ gradients, so there are
# $2m(p-1) = 24$ messages.
#
# The ideal's bubble is not exactly the 3/7 (43 %) of the formula, because the formula assumes that
# all stages are alike. The measured stages differ: the last rank has the head and the loss too, and
# what else the machine did changes the times as well. All ranks run at the pace of the slowest one,
# which is the one with the most forward and backward in the table below.
#
# This picture is what [DeepSpeedExamples
# #201](https://github.com/deepspeedai/DeepSpeedExamples/issues/201) and [zero-bubble
# #18](https://github.com/sail-sg/zero-bubble-pipeline-parallelism/issues/18) ask for. It needs no
# profiler: `pl.run` draws it from its own runs. Of a PyTorch program `pl.observe` draws the
# timeline of the wall clock, without the ideal. The end of this lab does that for your own executor
# and for torch's. (DeepSpeed's engine was not tried.)
#
# ## Where a step goes: forward + backward + p2p + idle = T
# How can bubble time be profiled accurately ([Megatron-LM
# #691](https://github.com/NVIDIA/Megatron-LM/issues/691)), and told apart from point-to-point
# communication ([Megatron-LM #828](https://github.com/NVIDIA/Megatron-LM/issues/828))? Write down
# four numbers per rank that add up to $T$. **p2p** is the time between a rank's first forward and
# last backward in which it waits for a message that is in flight. **idle** is the rest of $T$: the
# rank waits before its first forward, after its last backward, or for a message that its neighbour
# has not computed yet.

# %% tags=["measured"]
times = replayed.pipeline_times()
(1e3 * times).round(1).add_suffix(" (ms)")

# %%
free_links = pl.exercises.choose(
    "If messages took no time, which of these would be 0 on every rank?",
    ["p2p", "idle", "both", "neither"],
)
free_links

# %% [markdown]
# The bubble is the time in which ranks do not compute, as a share of $p\,T$. It is the mean of p2p
# + idle over the ranks, divided by $T$:

# %%
bubble = (times["p2p"] + times["idle"]).mean() / times["T"].max()
print("(p2p + idle) / T is the bubble of the report:", bool(np.isclose(bubble, replayed.bubble)))
free_links.reveal(
    1,
    "No message is in flight for any time then. What is left of the bubble is idle time: a rank "
    "waits for what its neighbour has not computed yet. That is the upper half of the picture.",
)

# %% [markdown]
# The same table from the wall clock of the same run:

# %% tags=["measured"]
(1e3 * report.pipeline_times()).round(1).add_suffix(" (ms)")

# %%
why_p2p = pl.exercises.choose(
    "On the wall clock, p2p is many times what it is in the replay. Why?",
    [
        "the messages are larger there",
        "a receive counts as in flight from the moment the receiver asks for it",
        "the replay leaves out the backward messages",
    ],
)
why_p2p

# %%
why_p2p.reveal(
    2,
    "A program cannot see when its neighbour sends. A receive that has been posted looks the same "
    "while the message is on the link and while the neighbour still computes it.",
)

# %% [markdown]
# The same happens with a profiler on GPUs. NCCL's kernel for a receive runs from the moment it is
# launched, so it contains the idle time
# ([zero-bubble #25](https://github.com/sail-sg/zero-bubble-pipeline-parallelism/issues/25)). The
# authors answer there that the bubble rates of their paper are computed from times of forward,
# backward and communication that were profiled separately. The replay does the same, with modelled
# links.
#
# **Which clock to believe.** On the wall clock, waiting for a processor core lengthens forward and
# backward, and lets the neighbours wait longer for their messages. Each rank computes in one thread
# and communicates in another. Believe the wall clock where ranks and communication threads together
# have a core each (four ranks: eight cores), or where each rank has a GPU. Everywhere else believe
# the replay: it takes the processor time of each piece of work, and gives each rank a device of its
# own. It assumes that a stage computes as fast alone as it did here, and that a message takes what
# the model of the link says. All this is about forward, backward, $T$ and the bubble. How the rest
# is divided into point-to-point and idle, no wall clock says; only the replay does.
#
# ## 1F1B: each backward as early as possible
# More micro-batches make the bubble smaller. But GPipe runs no backward before the last forward, so
# (without recomputation, lab 06) it keeps the activations of all $m$ micro-batches. **1F1B** runs
# each backward as soon as it can: as few forwards as keep the last rank busy, and then one forward,
# one backward in turn. (It is PipeDream-Flush in [Narayanan and others
# 2021](https://arxiv.org/abs/2006.09503), and the schedule of
# [DAPPLE](https://arxiv.org/abs/2007.01045).)

# %%
improves = pl.exercises.choose(
    "What does 1F1B improve, compared with GPipe at the same p and m?",
    ["the bubble", "the memory", "both"],
)
improves

# %%
view.schedules({"GPipe": schedules.gpipe(4, 8), "1F1B": schedules.one_f_one_b(4, 8)})

# %%
improves.reveal(
    2,
    "Both end at the same moment, and each rank computes the same. The idle time is in other "
    "places, but it is (p-1)(F+B) in both.",
)

# %% [markdown]
# **Why the memory is bounded.** Micro-batch 0 comes back to rank $r$ when it has gone down through
# the $p-r-1$ stages after it and up again. In 1F1B rank $r$ starts one forward for each of these
# stages, and then its first steady one. From there on each forward is followed by a backward, which
# frees what a forward has saved. So the largest number of micro-batches **in flight** on rank $r$,
# whose activations are alive there, is
#
# $$ \text{GPipe: } m, \qquad \text{1F1B: } \min(m,\; p-r) . $$

# %%
memory = view.live_activations(
    schedules.gpipe(4, 8), schedules.one_f_one_b(4, 8), labels=["GPipe", "1F1B"]
)
memory

# %% [markdown]
# The same on real ranks. How many of GPipe's activation bytes does rank 0 keep under 1F1B, with
# four stages and eight micro-batches?

# %%
kept_share = pl.exercises.guess(
    "activations of rank 0 under 1F1B, as a share of GPipe's", low=0, high=100, unit="%", decimals=0
)
kept_share

# %% [markdown]
# The first table has the bytes of activations at the peak of memory, the second has 1F1B's share of
# GPipe's next to the formula's:

# %%
settings = {"steps": 2, "optimizer": "sgd", "progress": False}
runs = {
    name: pl.run(model, plan.replace(schedule=name, microbatches=8), **settings)
    for name in ("gpipe", "1f1b")
}
held = {
    name: [run.peaks(rank).loc["activations", "program"] for rank in range(4)]
    for name, run in runs.items()
}
found = pd.DataFrame(held).rename_axis("rank") / 1e6
found.add_suffix(" (MB)").round(1)

# %%
counted = found["1f1b"] / found["gpipe"]
pd.DataFrame({"1F1B / GPipe": counted, "(p-r)/m": [(4 - r) / 8 for r in range(4)]}).round(3)

# %%
kept_share.reveal(100 * counted[0])

# %% [markdown]
# On ranks 0 to 2 the two agree. The last rank has the head, too. Its peak lies within a backward,
# when the head's activations of that micro-batch have been freed. Under 1F1B the rank keeps no
# other micro-batch then, under GPipe seven others with the head's activations.
#
# ## Interleaving divides the idle time by v and multiplies the messages
# Give each rank two smaller **chunks** of the model in place of one stage: rank 0 has stages 0 and
# 4, rank 1 has 1 and 5, and so on. Stages are half as long, so the pipeline fills and drains in
# half the time. Here are four schedules on one axis. (The last one is lab 04's: it splits the
# backward, and its weight half is yellow.)

# %%
four = {
    "GPipe": schedules.gpipe(4, 8),
    "1F1B": schedules.one_f_one_b(4, 8),
    "interleaved, v=2": schedules.interleaved(4, 8, 2),
    "zero bubble (ZB-H1)": schedules.zb_h1(4, 8),
}
view.schedules(four, title="Two chunks per rank shorten the bubble of 1F1B")

# %% [markdown]
# With $v$ chunks per rank a stage takes $F/v$ and $B/v$. The fill is $p-1$ stages long, and so is
# the drain. So the idle time per rank, and its shares of $T$ and of $m(F+B)$, are
#
# $$ (p-1)\,\frac{F+B}{v}, \qquad
#    \text{bubble} = \frac{p-1}{vm+p-1}, \qquad \text{bubble over ideal} = \frac{p-1}{vm} . $$
#
# The price is communication, and more memory for activations (the section on warm-up counts it).
# In the paper's schedule, and in ours, $m$ has to be a multiple of $p$, because a rank takes $p$
# micro-batches through one chunk before it begins the next. (torch's schedule takes some others,
# too, and Megatron-Core's takes larger groups than $p$ if asked to; what follows has groups of
# $p$.) There are $pv$ stages, and two stages that follow one another are never on one rank, so all
# $pv-1$ borders are crossed by messages, where 1F1B has $p-1$ borders:
#
# $$ \frac{pv-1}{p-1} \ \text{times as many messages, all of the same } 4\,b\,s\,h \text{ bytes.} $$
#
# Four ranks, two chunks on each: how many messages does a step of eight micro-batches send?

# %%
messages = pl.exercises.guess(
    "messages of a step, all ranks together: p=4, v=2, m=8", low=0, high=200, decimals=0
)
messages

# %%
rows = []
for v, name in ((1, "1f1b"), (2, "interleaved")):
    chosen = plan.replace(schedule=name, microbatches=8, virtual_stages=v)
    run = runs[name] if name in runs else pl.run(model, chosen, **settings | {"steps": 1})
    sends = run.collectives.query("step == 0 and op == 'send'")
    row = {"v": v, "messages": len(sends), "2 m (pv-1)": 2 * 8 * (4 * v - 1)}
    row |= {"MB": sends["wire_bytes"].sum() / 1e6, "bubble, formula": 3 / (v * 8 + 3)}
    simulated = pipeline.simulate(run.plan.actions(), forward=1 / v, backward=2 / v)
    rows.append(row | {"bubble, simulated": simulated.bubble_rate})
pd.DataFrame(rows).set_index("v").round(3)

# %%
messages.reveal(2 * 8 * (4 * 2 - 1))

# %% [markdown]
# ## Only forwards, until the first backward
# A rank of 1F1B runs a few forwards before its first backward. A rank of the interleaved schedule
# runs more of them, because it takes $p$ micro-batches through one chunk before it begins the next
# chunk. Before you count, look at a few lists: `print(*schedules.interleaved(4, 8, 2), sep="\n")`.

# %%
pl.exercises.warmup

# %%
### ANSWER: warmup


pl.exercises.warmup.check(warmup)

# %% [markdown] tags=["solution-only"]
# **Why it works.** The last rank ($r=p-1$) of 1F1B runs one forward before its first backward, and
# each rank before it one more, hence $p-r$. With few micro-batches there are no more than $m$
# forwards to run, or $vm$ with chunks. In the interleaved schedule the last rank first runs the
# $(v-1)p$ forwards of its other chunks, and each rank before it two more, for a reason that the
# next section gives.
#
# **Common mistakes.** The forward of the steady phase is forgotten (one too few everywhere). `min`
# is forgotten (right until $m < p$). The ranks are counted from the wrong end. The interleaved
# formula is used at $v=1$, where it is not 1F1B's: it gives $2(p-r-1)+1$.
#
# **Another answer** counts instead of computing: it reads the schedule.

# %% tags=["solution-only"]
### ANSWER: warmup_other


pl.exercises.warmup.check(by_counting)

# %% [markdown]
# ## Why the interleaved warm-up has a factor of two
# In Megatron-LM the **warm-up** is the forwards before the steady phase. (The steady phase begins
# with a forward, which comes before the first backward, too, but does not count.) Rank $r$ has
# $p-r-1$ of them in 1F1B and $2(p-r-1) + (v-1)p$ in the interleaved schedule; [Megatron-LM
# #169](https://github.com/NVIDIA/Megatron-LM/issues/169) asks why. The second term is needed: the
# last rank runs $(v-1)p$ forwards of its other chunks before the first forward of its last chunk.
# But why $2(p-r-1)$, and not $p-r-1$? The next picture has both, at first with messages that take
# no time.

# %%
longer = pl.exercises.choose(
    "With messages that take no time, the schedule with the longer warm-up ends",
    ["earlier", "at the same time", "later"],
)
longer


# %%
def interleaved_with(factor, p=4, m=8, v=2):
    """The interleaved schedule of each rank with factor * (p-r-1) + (v-1) p forwards of warm-up."""
    lists = []
    for rank, actions in enumerate(schedules.interleaved(p, m, v)):
        forwards = [action for action in actions if action.kind == "F"]
        backwards = [action for action in actions if action.kind == "B"]
        ahead = factor * (p - rank - 1) + (v - 1) * p
        steady = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
        lists.append([*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]])
    return lists


def both_warmups(comm):
    chunk = {"forward": 0.5e-3, "backward": 1e-3, "comm": comm}
    lists = {"short warm-up": interleaved_with(1), "long warm-up": interleaved_with(2)}
    return {name: pipeline.simulate(one, **chunk) for name, one in lists.items()}


free = both_warmups(comm=0)
view.schedules(free, title="Where messages take no time the long warm-up gains nothing")

# %%
longer.reveal(2, "Whatever a rank needs is there in time with the short warm-up, too.")

# %% [markdown]
# And now with messages that take 0.1 ms, a fifth of a chunk's forward:

# %%
delayed = pl.exercises.choose(
    "With messages that take 0.1 ms, the schedule with the longer warm-up ends",
    ["earlier", "at the same time", "later"],
)
delayed

# %%
slow = both_warmups(comm=0.1e-3)
view.schedules(slow, title="Where messages take 0.1 ms the long warm-up is faster")

# %%
delayed.reveal(1, "While a message is in flight, a rank has another forward to run.")

# %%
pd.DataFrame(
    {
        "bubble": {name: one.bubble_rate for name, one in free.items()},
        "with messages": {name: one.bubble_rate for name, one in slow.items()},
        "micro-batches in flight on rank 0": {n: one.peak_live[0] / 2 for n, one in slow.items()},
    }
).rename_axis("forwards of warm-up").round(3)

# %% [markdown]
# With free messages both end at the same time, and the factor only costs memory. If messages take
# time, a micro-batch comes back to rank $r$ later, because each border that it crosses on its way
# down and up costs a message. After its warm-up a rank's list alternates: the next forward stands
# behind a backward whose gradient is still on its way. With the factor of two $p-r-1$ more
# forwards stand before that backward, and the rank computes them meanwhile. So the factor of two
# hides communication, and costs memory for activations.
#
# ## Two ranks: activations and gradients come from the same neighbour
# With $p=2$ the rank after a rank is also the rank before it. Here is all that rank 0 receives, in
# program order:

# %%
two = pl.Plan(pp=2, virtual_stages=2, schedule="interleaved", microbatches=2, microbatch_size=2)
pl.program(model, two, rank=0).filter(op="receive")

# %% [markdown]
# Activations (x) and gradients (g) come from one rank, and have one shape. Nothing in a message
# says which it is. NCCL matches messages of a pair by their order alone, and so does gloo where all
# have the same tag. What happens if the sender sends the activation first, and the receiver asks
# for the gradient first?

# %%
collides = pl.exercises.choose(
    "Rank 1 sends x, then g. Rank 0 receives g, then x. All have one shape and no tag. Then rank 0",
    ["waits without end", "raises an error", "goes on with x in the place of g"],
)
collides


# %%
def crossed(tagged):
    """Rank 1 sends an activation of ones, then a gradient of twos. What has rank 0 received?"""
    import torch
    import torch.distributed as dist

    x_tag, g_tag = (1, 2) if tagged else (0, 0)
    if dist.get_rank() == 1:
        x, g = torch.full((3,), 1.0), torch.full((3,), 2.0)
        for work in dist.isend(x, 0, tag=x_tag), dist.isend(g, 0, tag=g_tag):
            work.wait()
        return None
    gradient, activation = torch.zeros(3), torch.zeros(3)
    dist.recv(gradient, 1, tag=g_tag)
    dist.recv(activation, 1, tag=x_tag)
    return {"gradient": gradient[0].item(), "activation": activation[0].item()}


for tagged, words in ((False, "without tags:"), (True, "with tags:   ")):
    print(words, pl.launch(crossed, ranks=2, args=(tagged,))[0])

# %%
collides.reveal(3, "No rank waits, no error is raised: the training goes on with wrong numbers.")

# %% [markdown]
# That is what collided in Megatron-LM, which therefore demanded $p>2$: a maintainer explains in
# [#750](https://github.com/NVIDIA/Megatron-LM/issues/750) that the two sends of one step cannot be
# told apart with two ranks, and that this is no issue where forward and backward messages are sent
# separately, as with `overlap_p2p_comm`. Gloo obeys tags; NCCL has none, so there both ends have
# to agree on an order. paralab derives the sends and receives of both ends from one list, and so
# it runs with two ranks:

# %%
pl.run(model, two, steps=2, progress=False)

# %% [markdown]
# ## Is it the same training?
# One process, the same micro-batches in the same order, and plain SGD. The gradients are compared,
# not the losses alone. (With AdamW losses would prove little: its step hardly changes if all
# gradients are wrong by a constant factor.)

# %%
proof = {"optimizer": "sgd", "steps": 2, "keep_state": True, "progress": False}
small = model.replace(hidden=64)
alone = pl.run(small, pl.Plan(microbatches=4), **proof)
for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
    split = pl.run(small, pl.Plan(pp=4, schedule=name, virtual_stages=v, microbatches=4), **proof)
    same = all(np.array_equal(one, split.gradients[key]) for key, one in alone.gradients.items())
    print(f"{name:<11} every gradient is equal, bit by bit: {same}")

# %% [markdown]
# The gradients are equal bit by bit because each rank adds up the gradient of a weight over the
# micro-batches in the same order.
#
# ## One slow stage
# The last stage takes twice as long as the others here. Move the sliders: more micro-batches, more
# chunks, a stage that is slower still. The number of chunks acts only in the interleaved schedule.
# *Run it* starts real processes.

# %%
sliders = view.widgets.pipeline()
sliders.knobs["imbalance"].value = 2.0
sliders

# %%
imbalance = pl.exercises.choose(
    "Four stages under 1F1B, the last takes twice as long. With ever more micro-batches the bubble",
    ["goes to 0, as with equal stages", "goes to 3/8", "goes to 1/2"],
)
imbalance

# %%
for m in (8, 64, 512):
    one = pipeline.simulate(
        schedules.one_f_one_b(4, m), forward=[1e-3] * 3 + [2e-3], backward=[2e-3] * 3 + [4e-3]
    )
    print(f"m={m:<3} bubble {one.bubble_rate:.3f}")
imbalance.reveal(
    2,
    "In the long run each rank waits for the slow one: three of four ranks compute half of the "
    "time, and 3/4 times 1/2 is 3/8. More micro-batches help against fill and drain, not against "
    "imbalance.",
)

# %% [markdown]
# ## Write the executor
# Everything above was run by paralab. Now write what runs a schedule: in plain PyTorch, on
# `torch.distributed`, as one would at work.

# %%
executor = pl.exercises.pipeline_executor
executor

# %%
### ANSWER: pipeline_executor


verdict = pl.exercises.pipeline_executor.check(pipeline_step)
verdict

# %% [markdown]
# `executor.hint()` gives one hint at a time; `executor.solution()` shows an answer.

# %% [markdown] tags=["solution-only"]
# **Why it works.** Autograd stops at the border of a stage: `x` comes out of a message, so it is a
# leaf. `requires_grad_()` makes autograd compute its gradient, which is exactly what the stage
# before waits for. `y.backward(gradient)` continues with the gradient of the stage after, as if the
# graph had never been cut.
#
# **Common mistakes**, and how they show:
# * `requires_grad_()` is missing: `x.grad` is None, and there is nothing to send back.
# * The loss is not divided by $m$: all gradients are $m$ times what they should be.
# * The backward retains its graph, and x and y stay in the dictionary: activations stay alive, and
#   1F1B needs as much memory as GPipe.
# * `send` in place of `isend`: where neighbours send to each other at the same time, both wait.
#   (On NCCL even `isend` is not enough: it runs the single calls between two ranks in order.
#   There a send and the receive that faces it go into one `dist.batch_isend_irecv`.)
# * A send is never waited for: the tensor may be freed while it is being read.
#
# **Another answer** asks for the message of its next action before it computes the present one, so
# that communication and computation overlap. paralab does so, too, with a communicator for each
# direction between two ranks on NCCL. torch's own `Schedule1F1B` batches a send with the receive
# that faces it, and waits for both before it computes.

# %% tags=["solution-only"]
### ANSWER: pipeline_executor_other


pl.exercises.pipeline_executor.check(pipeline_step_ahead)

# %% [markdown]
# ## Your executor trains the GPT
# Four ranks, each with its stage of the reference GPT, under 1F1B. `pl.observe` watches: it needs
# to know nothing of your code. In its timeline the orange bar of a message ends where your code has
# waited for it, because gloo does not report when a message is over. *Compute* is what your code
# does outside of forward and backward.


# %%
def train(model, lists, microbatches, steps=2):
    import torch.distributed as dist

    rank, p = dist.get_rank(), dist.get_world_size()
    stage = pl.reference.Stage(model, rank, p)
    optimizer = pl.reference.optimizer(stage.parameters(), "sgd")
    neighbours = (rank - 1 if rank > 0 else None), (rank + 1 if rank < p - 1 else None)
    losses = []
    for step in range(steps):
        batches = pl.reference.batches(model, step=step, microbatches=microbatches)
        shape = (*batches[0][0].shape, model.hidden)
        losses.append(pipeline_step(stage, lists[rank], *neighbours, batches, shape))
        optimizer.step()
        optimizer.zero_grad()
    return losses


lists = [[f"{a.kind}{a.microbatch}" for a in row] for row in schedules.one_f_one_b(4, 8)]
first = "write pipeline_step first"
how = {"ranks": 4, "memory_steps": 1}  # bytes are counted in the first step, seconds in the second
yours = pl.observe(train, args=(model, lists, 8), **how) if verdict else first
yours

# %% tags=["measured"]
title = "Your executor runs 1F1B: rank r has 4 − r forwards before its first backward"
yours.timeline().titled(title) if verdict else yours

# %%
twice = pl.exercises.choose(
    "How many bytes does rank 1 send in a step, compared with rank 0?",
    ["as many", "twice as many", "three times as many"],
)
twice

# %%
library = runs["1f1b"]  # the same plan, trained with SGD as well


def next_to_ours(report, losses):
    """Megabytes and losses of a report next to those of the library's program for the same plan."""
    peak = [one.peak_memory / 1e6 for one in (report, library)]
    sent = [one.traffic()["bytes"].tolist() for one in (report, library)]
    print("bytes that ranks 0 to 3 send per step:", *sent, sep="\n  ")
    print("the same losses:", bool(np.allclose(losses, library.losses, rtol=1e-5)))
    print(f"highest peak of memory: {peak[0]:.1f} MB, the library's {peak[1]:.1f} MB")


# %%
if verdict:
    next_to_ours(yours, yours.results[3])

# %%
print("The library's ranks send in a step:", *library.traffic()["bytes"])
twice.reveal(2, "Rank 1 sends activations on and gradients back, rank 0 has no rank before it.")

# %% [markdown]
# ## Go further: chunks, also on two ranks
# Write the same executor for $v$ stages on each rank. Now messages from one neighbour belong to
# different stages, and with two ranks they are activations and gradients at once.

# %%
chunked = pl.exercises.interleaved_executor
chunked

# %%
### ANSWER: interleaved_executor


pl.exercises.interleaved_executor.check(interleaved_step)

# %% [markdown] tags=["solution-only"]
# **Why it works.** A rank's messages to a neighbour leave in the order of its list, and every rank
# knows all lists. So the receiver knows what the next message of a neighbour is. It takes messages
# in that order, and puts what it does not need yet into a dictionary.
#
# **Common mistakes.** Messages are received when they are needed. That is right if they are also
# sent in this order, as in the interleaved schedule. If a neighbour works in another order, it is
# wrong, and no error is raised. Tags are used: gloo obeys them, NCCL has none.
# All stages of the last rank are treated as the last stage: the output of its other chunks is no
# scalar, so `y.item()` and `y.backward()` raise an error.
#
# **Another answer** looks no message up: it asks for all messages of a step at the beginning, each
# into a tensor of its own, in the order in which its neighbours send them. It is shorter, needs the
# memory for all of them, and is for gloo: on NCCL the receives would hold up the sends behind them.

# %% tags=["solution-only"]
### ANSWER: interleaved_executor_other


pl.exercises.interleaved_executor.check(interleaved_step_posted)

# %% [markdown]
# ## What to remember
# 1. A pipeline cuts the model by depth: only activations and their gradients cross the borders,
#    $4bsh$ bytes per micro-batch in fp32.
# 2. It fills and drains, and both are idle time: $(p-1)F$ and $(p-1)B$ per rank.
# 3. 1F1B has GPipe's bubble, and keeps at most $p-r$ micro-batches in place of $m$.
# 4. Interleaving divides the idle time by $v$, multiplies messages by $(pv-1)/(p-1)$, and keeps
#    more activations.
# 5. A waiting rank looks the same whether a message is late or not yet computed: separate p2p from
#    idle before you blame the schedule for a bubble.
#
# | schedule | bubble | in flight on rank $r$ | messages | when |
# |---|---|---|---|---|
# | GPipe | $\frac{p-1}{m+p-1}$ | $m$ | $2m(p-1)$ | few micro-batches, or with recomputation |
# | 1F1B | $\frac{p-1}{m+p-1}$ | $\min(m, p-r)$ | $2m(p-1)$ | the default |
# | interleaved | $\frac{p-1}{vm+p-1}$ | $\min(vm, 2(p-r-1)+(v-1)p+1)/v$ | $2m(pv-1)$ | small $m$ |
# | ZB-H1 | lab 04 | $\min(m, p)$ | $2m(p-1)$ | where the bubble still counts |
#
# A chunk has $1/v$ of a rank's layers, and counts as $1/v$ of a micro-batch in flight.
#
# ## In PyTorch, DeepSpeed, Megatron
# `torch.distributed.pipelining` has these schedules. A rank gives it the module of each of its
# stages; the schedule splits the batch and runs the step. Here it is on the same GPT.


# %%
def with_torch(model, kind, chunks, microbatches, steps=2):
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, p = dist.get_rank(), dist.get_world_size()
    mine = {i: pl.reference.Stage(model, i, chunks * p) for i in range(rank, chunks * p, p)}
    stages = [PipelineStage(part, i, chunks * p, torch.device("cpu")) for i, part in mine.items()]
    optimizer = pl.reference.optimizer(torch.nn.ModuleList(mine.values()).parameters(), "sgd")
    schedule = getattr(schedules, kind)(
        stages if chunks > 1 else stages[0], microbatches, loss_fn=lambda loss, targets: loss
    )
    means = []
    for step in range(steps):
        batches = pl.reference.batches(model, step=step, microbatches=microbatches)
        tokens, targets = (torch.cat(column) for column in zip(*batches, strict=True))
        losses = []
        last = {"target": targets, "targets": targets, "losses": losses} if rank == p - 1 else {}
        schedule.step(*(tokens,)[: rank == 0], **last, return_outputs=False)
        means.append(float(sum(losses)) / microbatches)
        optimizer.step()
        optimizer.zero_grad()
    return means


torch_1f1b = pl.observe(with_torch, args=(model, "Schedule1F1B", 1, 8), **how)
next_to_ours(torch_1f1b, torch_1f1b.results[3])

# %% tags=["measured"]
title = "torch's 1F1B, too: rank r has 4 − r forwards before its first backward"
torch_1f1b.timeline().titled(title)

# %% [markdown]
# The ranks do not begin the step at the same time: each begins it when it is done with the step
# before, and the last rank is done first.
#
# The losses and the bytes are the same. torch's peak is higher. One reason is that it makes the
# buffers for all micro-batches' messages once and keeps them.

# %%
torch_sends = pl.exercises.choose(
    "How much does torch's interleaved schedule send, compared with ours?",
    ["less", "on every rank as much as ours", "more on the first and the last rank"],
)
torch_sends

# %%
interleaved = (model, "ScheduleInterleaved1F1B", 2, 8, 1)  # one step: the bytes are all we ask for
torch_interleaved = pl.observe(with_torch, ranks=4, args=interleaved, memory_steps=0)
pd.DataFrame(
    {
        "torch": torch_interleaved.traffic()["bytes"],
        "ours": run.traffic()["bytes"],
    }
)

# %%
torch_sends.reveal(2, "Both cross the same pv - 1 borders, with messages of the same size.")

# %% [markdown]
# In DeepSpeed a model becomes a list of layers, `PipelineModule(layers, num_stages=4)`; its engine
# runs 1F1B, and $m$ is `gradient_accumulation_steps` in the JSON. In Megatron-LM these are flags:
#
# ```
# --pipeline-model-parallel-size 4              # p; the schedule is 1F1B
# --num-layers-per-virtual-pipeline-stage 1     # interleaved: 8 layers, p = 4, v = 2
# --micro-batch-size 2 --global-batch-size 16   # m = 16 / 2 with one data-parallel replica
# ```
#
# DeepSpeed and Megatron-LM are not installed here, and neither was run. With
# `pl.set_default_device("cuda")` in the first cell the library's ranks take a GPU each, and times
# come from CUDA events. Its schedules were run with NCCL on one GPU, which says nothing of their
# bubbles: a test told each of two ranks that it was a machine of its own, as NCCL refuses two
# ranks of one host on one GPU. On several GPUs they were not run yet.
#
# ## Read on
# * Huang and others 2019, [GPipe](https://arxiv.org/abs/1811.06965), sec. 2: micro-batches, and
#   recomputation inside a stage.
# * Narayanan and others 2021, [Memory-Efficient Pipeline-Parallel DNN
#   Training](https://arxiv.org/abs/2006.09503), sec. 3.2: PipeDream-Flush, which is 1F1B.
# * Narayanan and others 2021, [PTD-P](https://arxiv.org/abs/2104.04473), sec. 2.2: the bubble over
#   ideal, and the interleaved schedule.
# * Korthikanti and others 2022, [Reducing activation
#   recomputation](https://arxiv.org/abs/2205.05198), sec. 4.2.3: what interleaving keeps.
# * [torch.distributed.pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html)
# * In the package: `paralab/parallel/schedules.py` (all schedules), `lowering.py` (adds the
#   messages), `paralab/theory/pipeline.py` (the simulation).
