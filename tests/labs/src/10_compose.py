# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 10 · Composing: which of ten thousand plans?
#
# Eight GPUs can be split between data, tensor and pipeline parallelism in ten ways before ZeRO,
# recomputation and micro-batches are chosen. Which plan is the best one, and do you have to try
# them all?
#
# **You will be able to** turn a rank into its coordinates and process groups; write the time and
# the memory of a step as sums of a few terms; say which term a plan loses by; train a GPT on a
# data × pipeline mesh with your own code; and read the result of a search over all plans.
#
# **You need** labs 02, 03, 05, 06 and 07, sums and fractions, and `torch.distributed`.
# **Minutes** 110 to 150: 50 of reading and running, the rest for three exercises.

# %%
import numpy as np
import pandas as pd

import paralab as pl
from paralab import view
from paralab.theory import needs

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64, attention="explicit", tied=False)
cube = pl.Plan(dp=2, tp=2, pp=2, zero_stage=1, microbatches=4, microbatch_size=2)
view.mesh(cube, rank=0)

# %% [markdown]
# ## A rank has three coordinates and three groups
#
# | symbol | meaning |
# |---|---|
# | $d, p, t$ | ranks along the data-, pipeline- and tensor-parallel axis; $n = d\,p\,t$ in all |
# | $m$, $b$ | micro-batches per step and data-parallel rank; samples per micro-batch |
# | $s, h, L, a$ | tokens per sample, hidden size, blocks, attention heads |
# | $\Psi$, $w$ | parameters; bytes of a number (2 in 16 bits) |
# | $K_w$, $K_o$ | bytes per parameter of weight and gradient; of the optimizer's states |
# | $C$, $X$ | FLOPs of a step; FLOP/s that a device reaches |
# | $S$ | bytes of an activation between two blocks, $S = w\,b\,s\,h$ |
# | $\alpha, \beta$ | latency of a message or a call (s), seconds per byte, of an axis' links |
# | $k$ | all-reduces per block and micro-batch |
# | $T$, $M$ | seconds of a step, bytes of memory of one rank |
#
# The ranks form a *mesh* of $p \times d \times t$, numbered so that neighbours are tensor parallel.
# With the coordinates $i_p, i_d, i_t$ along the three axes,
#
# $$ r = (i_p\, d + i_d)\, t + i_t $$
#
# and backwards $i_t = r \bmod t$, $\; i_d = \lfloor r / t \rfloor \bmod d$, $\; i_p = \lfloor r /
# (d\,t) \rfloor$. A group consists of the ranks that differ in *one* coordinate and have the other
# two in common. The three groups of a rank carry different messages. The tensor-parallel group sums
# activations several times per block. The data-parallel group sums gradients once per step. The
# pipeline group passes on what leaves a stage, once per micro-batch.
#
# ### Warm-up: make the groups
# `dist.new_group` is a collective call. Its
# [documentation](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group)
# says which ranks have to make it, and in which order. Look it up before you begin.

# %%
warm_up = pl.exercises.mesh_groups
warm_up


# %%
### ANSWER: mesh_groups


grouped = pl.exercises.mesh_groups.check(mesh_groups)
grouped

# %% [markdown] tags=["solution-only"]
# **Why it works.** `torch.arange(n).reshape(pp, dp, tp)` is the formula above. Moving one axis to
# the end and flattening the others lists all groups along that axis. Every rank makes *all* of
# them, in the same order, because `new_group` is a call of the whole world: a rank that skips a
# group leaves the others waiting, or joins another group than they do.
#
# **Common mistakes.** Calling `new_group` only for the groups that this rank is in; numbering the
# ranks as (dp, pp, tp); taking the ranks of a pipeline as neighbours. A second answer computes the
# members from the coordinates, without a tensor:

# %% tags=["solution-only"]
### ANSWER: mesh_groups_other


pl.exercises.mesh_groups.check(mesh_groups)

# %% [markdown]
# ## Three axes at once are still the same training
# Eight ranks along three axes take two steps, and one process takes the same steps alone.

# %%
proof = {"steps": 2, "optimizer": "sgd", "lr": 0.1, "keep_state": True, "progress": False}
alone = pl.run(model, pl.Plan(microbatches=8, microbatch_size=2), **proof)
together = pl.run(model, cube, **proof)
for kind in ("gradients", "weights"):
    ours, theirs = getattr(together, kind), getattr(alone, kind)
    worst = max(np.abs(ours[n] - theirs[n]).max() / np.abs(theirs[n]).max() for n in theirs)
    print(f"{kind} of all {len(theirs)} parameters equal to five digits:", bool(worst < 1e-5))

# %% [markdown]
# The axes compose because each of them adds its own instructions to the program of a rank and does
# not change the instructions of the others. The next cell compares the program of rank 0 in a
# pipeline of two stages with its program in two data-parallel copies of this pipeline.

# %%
second_axis = pl.exercises.choose(
    "What does the second axis add to the program of rank 0?",
    [
        "One call per bucket of gradients",
        "One call per bucket and micro-batch",
        "One call per block and micro-batch",
    ],
)
second_axis

# %%
pipeline = pl.program(model, pl.Plan(pp=2, microbatches=2, microbatch_size=2))
both = pl.program(model, pl.Plan(pp=2, dp=2, microbatches=2, microbatch_size=2))
pipeline.diff(both)

# %%
second_axis.reveal(
    1,
    "Here one bucket holds all gradients of the stage. Its all-reduce comes after the last "
    "backward, once per step, however many micro-batches there are.",
)

# %% [markdown]
# The order of sends and receives does not change. They are listed because their partner has
# another number: stage 1 begins with rank 2 instead of rank 1. The updates of the single blocks
# become one update of the bucket whose gradients the all-reduce sums.

# %%
why_innermost = pl.exercises.choose(
    "Why is tensor parallelism the innermost axis, so that its ranks are neighbours?",
    [
        "It needs the most memory, and neighbours share their memory",
        "It sends in every block and waits for it, and neighbours are on one node",
        "Its groups are the smallest ones, so they have to be made first",
    ],
)
why_innermost

# %%
why_innermost.reveal(
    2,
    "A block calls two all-reduces forward and two backward. In forward nothing is computed "
    "meanwhile, in backward the gradient of one weight. "
    "Links inside a node are several times as fast as those between nodes.",
)

# %% [markdown]
# ## Time is compute, plus the bubble, plus communication that nothing hides
# 1. Each of the $n$ ranks computes an equal part of the FLOPs of a step, so $T_\text{compute} = C /
#    (d\,p\,t\,X)$.
# 2. A stage of a pipeline computes a micro-batch in $T_\text{compute}/m$, and every rank is idle
#    for $p-1$ such slots: $T_\text{bubble} = \frac{p-1}{m}\, T_\text{compute}$. (This bubble is
#    relative to the *ideal* time. As a share of the *whole* time it is $\frac{p-1}{m+p-1}$. Papers
#    print both.)
# 3. A rank has $L/p$ blocks. In each block tensor parallelism waits for $k$ all-reduces per
#    micro-batch: 2 forward, 2 backward, and 2 more if forward is recomputed. An all-reduce sends
#    $\frac{2(t-1)}{t} S$ bytes.
# 4. Per micro-batch a stage sends an activation forward and a gradient backward, which makes
#    $2\,m\,S$ bytes per step.
# 5. Data parallelism sums the gradients of $\Psi/(p\,t)$ parameters once per step, so its latency
#    hardly counts.
#
# $$ T \;\approx\; \frac{C}{d\,p\,t\,X}\Big(1 + \frac{p-1}{m}\Big)
#    + \frac{m\,k\,L}{p}\Big(\alpha_t + \frac{2(t-1)}{t}\, S\, \beta_t\Big)
#    + 2\,m\,(\alpha_p + S\,\beta_p)
#    + \frac{2(d-1)}{d}\,\frac{w\,\Psi}{p\,t}\,\beta_d $$
#
# The second term applies only for $t > 1$ and the third only for $p > 1$. The formula takes every
# message for exposed, which means that no computation hides it. It also assumes that the bandwidth
# of the memory and kernel launches cost nothing, so the next cells give memory unlimited bandwidth
# and let kernels begin in no time. They look at a GPT of 39 billion parameters on 64 A100s in nodes
# of eight.

# %%
slowest = pl.exercises.choose(
    "Which of these cuts takes the longest step?",
    ["dp 8, tp 8", "dp 4, pp 2, tp 8", "pp 8, tp 8", "dp 8, pp 8", "dp 4, tp 16"],
)
slowest

# %%
big, nodes = pl.ModelSpec.preset("ptdp-39b"), pl.Cluster.preset("dgx-a100", nodes=8)
ideal = nodes.replace(
    memory_bandwidth=1e20, operand_bandwidth=1e20, op_overhead=0, launch_overhead=0
)


def link(plan, axis, op):  # latency of a call (s) and bytes/s, in the group of rank 0
    return next(iter(ideal.ways(op, ideal.reach(plan.ranks(axis, 0))).values()))


def terms(plan):
    d, p, t, m = plan.dp, plan.pp, plan.tp, plan.microbatches
    S = 2 * plan.microbatch_size * big.seq_len * big.hidden
    T = needs.step_flops(big, plan.global_batch, recompute=plan.recompute) / (
        d * p * t * ideal.rate(plan.precision)
    )
    tp, pp, dp = (
        link(plan, *of) for of in (("tp", "all_reduce"), ("pp", "send"), ("dp", "all_reduce"))
    )
    return {
        "compute": T,
        "bubble": (p - 1) / m * T,
        "tp": (t > 1) * m * 6 * big.layers / p * (tp.latency + 2 * (t - 1) / t * S / tp.bandwidth),
        "pp": (p > 1) * 2 * m * (pp.latency + S / pp.bandwidth),
        "dp": 2 * (d - 1) / d * 2 * big.num_params / (p * t) / dp.bandwidth,
    }


recipe = {"recompute": "full", "precision": "bf16", "microbatch_size": 1}
cuts = {
    "dp 8, tp 8": pl.Plan(dp=8, tp=8, microbatches=16, **recipe),
    "dp 4, pp 2, tp 8": pl.Plan(dp=4, pp=2, tp=8, microbatches=32, **recipe),
    "pp 8, tp 8": pl.Plan(pp=8, tp=8, microbatches=128, **recipe),
    "dp 8, pp 8": pl.Plan(dp=8, pp=8, microbatches=16, **recipe),
    "dp 4, tp 16": pl.Plan(dp=4, tp=16, microbatches=32, **recipe),
}
view.seconds_bars(
    {name: terms(plan) for name, plan in cuts.items()},
    title="The same FLOPs in five cuts: tensor parallelism between nodes is slowest",
    clock="predicted",
)

# %%
slowest.reveal(
    5, "Sixteen tensor-parallel ranks are on two nodes, and all their sums go between them."
)

# %% [markdown]
# A simulation is the second opinion. It plays every instruction of every rank, and lets messages
# overlap with computation where the program allows it.

# %%
simulated = {n: pl.predict(big, c, ideal, steps=1, detail="actions") for n, c in cuts.items()}
pd.DataFrame(
    {
        "formula (s)": {name: sum(terms(plan).values()) for name, plan in cuts.items()},
        "simulated (s)": {name: report.step_time for name, report in simulated.items()},
    }
).assign(**{"off (%)": lambda t: 100 * (t.iloc[:, 0] / t.iloc[:, 1] - 1)}).round(2)

# %% [markdown]
# The formula gives too long a time where communication overlaps with computation. This matters
# most for tensor parallelism: the simulation hides its all-reduces of backward, a third of the
# term, behind the gradients of weights. In `dp 8, tp 8` it hides less of the gradients' all-reduce,
# most of which has to wait for the last backward. In `pp 8, tp 8` it hides more than half of the
# messages between stages. The formula gives too short a time where one stage computes more than
# the others. The last stage does, because it has the head: in `dp 8, pp 8` this decides, and in
# `pp 8, tp 8` it takes back a part of what overlap saves.
#
# The bubble may be what [GPT-NeoX #903](https://github.com/EleutherAI/gpt-neox/issues/903) met. Its
# author trains 20 billion parameters on 128 GPUs, and reports 170 TFLOP/s per GPU with one stage
# and 33 with four stages. A maintainer advises fewer stages, which communicate less; how much of
# the time is which, the thread does not say. The ranks of a pipeline compute for the share
# $m/(m+p-1)$ of the time.

# %%
few = pl.exercises.choose(
    "Which number of micro-batches per step comes closest to 33 of 170 TFLOP/s?",
    ["one", "four", "sixteen"],
)
few

# %%
for m in (1, 4, 16):
    print(f"m = {m}: {170 * m / (m + 4 - 1):.0f} of 170 TFLOP/s are left")
few.reveal(
    1,
    "Only 42 are left with one micro-batch, which is `gradient_accumulation_steps=1` in GPT-NeoX. "
    "Other terms take the rest, down to 33.",
)

# %% [markdown]
# ## Memory is states, divided by up to three axes, plus activations
# Three things add up to the memory of a rank, here with full recomputation:
#
# 1. The states of its $\Psi/(p\,t)$ parameters, with $K_w = 2 + 2$ and $K_o = 12$. ZeRO-1 shards
#    those of the optimizer over the $d$ data-parallel ranks.
# 2. The inputs of its $L/p$ blocks for every micro-batch in flight. Under 1F1B at most $\min(p, m)$
#    micro-batches are in flight.
# 3. The activations of the one block that is being recomputed. They take $b\,s\,h\,(10 + 24/t +
#    5as/(ht))$ bytes in 16 bits (lab 07), where $b\,s\,h = S/2$. Tensor parallelism shards all of
#    them but the 10.
#
# $$ M \;\approx\; \frac{\Psi}{p\,t}\Big(K_w + \frac{K_o}{d}\Big)
#    + \min(p, m)\,\frac{L}{p}\, S
#    + \frac{S}{2}\Big(10 + \frac{24}{t} + \frac{5\,a\,s}{h\,t}\Big) $$
#
# The column *compiled (GB)* of the next table is the peak of the compiled program.


# %%
def memory(plan):
    d, p, t = plan.dp, plan.pp, plan.tp
    S = 2 * plan.microbatch_size * big.seq_len * big.hidden
    states = big.num_params / (p * t) * (2 + 2 + 12 / (d if plan.zero_stage else 1))
    block = S / 2 * (10 + 24 / t + 5 * big.heads * big.seq_len / (big.hidden * t))
    return states + min(p, plan.microbatches) * big.layers / p * S + block


sharded = {name: plan.replace(zero_stage=1) for name, plan in cuts.items()}
weighed = {n: pl.predict(big, c, nodes, steps=1, detail="actions") for n, c in sharded.items()}
pd.DataFrame(
    {
        "formula (GB)": {name: memory(plan) / 1e9 for name, plan in sharded.items()},
        "compiled (GB)": {name: report.peak_memory / 1e9 for name, report in weighed.items()},
        "without ZeRO (GB)": {name: memory(plan) / 1e9 for name, plan in cuts.items()},
    }
).round(1)

# %% [markdown]
# The formula divides the embedding by $p$ like all other parameters, but the first stage holds all
# of it, and the last stage a second copy, because it is tied. It leaves out workspace, and counts
# dropout masks that this model does not have; the two nearly cancel.
#
# ZeRO divides the optimizer's states by $d$ alone. In `pp 8, tp 8`, with $d = 1$, it divides
# nothing. That is what [DeepSpeed #237](https://github.com/deepspeedai/DeepSpeed/issues/237) met,
# with eight GPUs that are all tensor parallel (lab 06).
#
# ## Twelve plans, predicted before the first process starts
# The next cells train the small model on four ranks in twelve ways, with sixteen samples per step
# each. All of them end with the same weights. How many times as long as a step of the fastest plan
# does a step of the slowest one take?

# %%
guess = pl.exercises.guess(
    "the slowest plan's step, as a multiple of the fastest's",
    low=1,
    high=10,
    unit="times",
    decimals=1,
)
guess

# %%
each = {"microbatches": 1, "microbatch_size": 4}  # of each of four data-parallel ranks
plans = {
    "dp 4": pl.Plan(dp=4, **each),
    "dp 4, ZeRO 2": pl.Plan(dp=4, zero_stage=2, **each),
    "dp 4, ZeRO 3": pl.Plan(dp=4, zero_stage=3, **each),
    "dp 4, ZeRO 3, recompute": pl.Plan(dp=4, zero_stage=3, recompute="full", **each),
    "tp 4": pl.Plan(tp=4, microbatch_size=16),
    "tp 4, sequence parallel": pl.Plan(tp=4, sequence_parallel=True, microbatch_size=16),
    "pp 4, GPipe": pl.Plan(pp=4, schedule="gpipe", microbatches=8, microbatch_size=2),
    "pp 4, 1F1B": pl.Plan(pp=4, microbatches=8, microbatch_size=2),
    "pp 4, two micro-batches": pl.Plan(pp=4, microbatches=2, microbatch_size=8),
    "dp 2, tp 2": pl.Plan(dp=2, tp=2, microbatch_size=8),
    "dp 2, pp 2": pl.Plan(dp=2, pp=2, microbatches=4, microbatch_size=2),
    "tp 2, pp 2, interleaved": pl.Plan(
        tp=2, pp=2, virtual_stages=2, schedule="interleaved", microbatches=4, microbatch_size=4
    ),
}
print({plan.world_size for plan in plans.values()}, {plan.global_batch for plan in plans.values()})

# %% tags=["measured"]
cluster = pl.Cluster.local()  # this machine's speed, measured once
expected = {name: pl.predict(model, plan, cluster) for name, plan in plans.items()}
found = {name: pl.run(model, plan, steps=4, progress=False) for name, plan in plans.items()}
replayed = {name: report.replay(cluster) for name, report in found.items()}
view.contest(expected, replayed)

# %% tags=["measured"]
took = {name: report.step_time for name, report in replayed.items()}
guess.reveal(max(took.values()) / min(took.values()))

# %% [markdown]
# A prediction takes its times from a few speeds of this machine. The replay plays the processor
# time that each piece of the step took, with other ranks in the same caches. The rank correlation
# below the picture's title (Spearman's) compares the two orders of the plans, and not their times:
# it is 1 if the orders are equal, and 0 if they are unrelated.
#
# The bytes are the same on every machine, and were predicted before the first run. These are the
# three plans that send the least, and the three that send the most:

# %%
pd.DataFrame(
    {
        "sent per rank (MB)": {n: r.traffic()["bytes"].mean() / 1e6 for n, r in found.items()},
        "bytes as predicted": {n: pl.compare(expected[n], r).bytes_agree for n, r in found.items()},
    }
).sort_values("sent per rank (MB)").iloc[[0, 1, 2, -3, -2, -1]].round(2)

# %%
least_bytes = pl.exercises.choose(
    "All three pipelines send the same few bytes. Why is the one of two micro-batches the slowest?",
    [
        "Two micro-batches cannot fill four stages, so its ranks are idle for most of the step",
        "Each of its messages is four times as large, and a stage waits for the whole message",
        "Larger micro-batches make its products slower",
    ],
)
least_bytes

# %%
least_bytes.reveal(
    1,
    "(p-1)/(m+p-1) is 3/5 for m = 2 and 3/11 for m = 8. Its messages are larger, but there are "
    "fewer of them, and they take little of the step.",
)

# %% [markdown]
# ## On other links another plan wins
# A prediction takes any links. The next table has four devices as fast as this machine's, first in
# one node, then on two nodes with a hundredth of the bandwidth and ten times the latency between
# them.

# %%
compared = ["dp 4", "tp 4", "dp 2, tp 2", "pp 4, 1F1B"]
slowed = pl.exercises.choose("Which plan loses the most time to the slow link?", compared)
slowed


# %% tags=["measured"]
def links(nodes):
    fast, slow = pl.Link(alpha=1e-5, bandwidth=1e10), pl.Link(alpha=1e-4, bandwidth=1e8)
    each = {"nodes": nodes, "devices_per_node": 4 // nodes, "intra": fast, "inter": slow}
    alone = {"cores": None, "wait_overhead": 0.0, "collectives": {}}  # no cores are shared
    return cluster.replace(name=f"{nodes} nodes", **alone, **each)


rows = {
    name: {
        f"{k} node{'s' * (k > 1)}": 1e3 * pl.predict(model, plans[name], links(k)).step_time
        for k in (1, 2)
    }
    for name in compared
}
pd.DataFrame(rows).T.round(1).add_suffix(" (ms per step)")

# %%
slowed.reveal(
    2,
    "It waits for this link in every block. `dp 2, tp 2` keeps tensor parallelism inside a node, "
    "and sends gradients across once per step. The pipeline sends the fewest bytes across.",
)

# %%
halves = pl.Cluster.preset("dgx-a100").replace(name="two nodes", nodes=2, devices_per_node=2)
view.mesh(plans["dp 2, tp 2"], halves, rank=0)

# %% [markdown]
# ## Tensor parallelism up to a node, then the pipeline
# This is Megatron's advice ([PTD-P](https://arxiv.org/abs/2104.04473), the takeaways of sec. 3,
# measured in sec. 5.4), found on clusters. Here is its first experiment by prediction: a GPT of 162
# billion parameters on 64 A100s, all of them model parallel. Utilisation (MFU) is the share of the
# devices' peak that goes into the model's own FLOPs; [lab 11](11_cost.ipynb) defines it. A step
# trains 32 or 128 samples, one per micro-batch.

# %%
widest = pl.exercises.choose(
    "Which cut has the highest MFU with a batch of 32?",
    [f"tp {t}, pp {64 // t}" for t in (2, 4, 8, 16, 32)],
)
widest

# %%
wide = pl.ModelSpec(
    layers=32, hidden=20480, heads=128, seq_len=2048, vocab=51200, attention="explicit"
)


def mfu(model, plan):
    report = pl.predict(model, plan, nodes, steps=1, detail="actions")
    return report.summary().loc["model FLOPs utilisation", "value"]


rows = {}
for batch in (32, 128):
    for t in (2, 4, 8, 16, 32):
        plan = pl.Plan(tp=t, pp=64 // t, microbatches=batch, **recipe)
        rows.setdefault(f"tp {t}, pp {64 // t}", {})[f"batch {batch}"] = mfu(wide, plan)
table = pd.DataFrame(rows).T
print("best with batch 32:", table["batch 32"].idxmax(), "- with 128:", table["batch 128"].idxmax())
table.round(1).add_suffix(", MFU (%)")

# %%
widest.reveal(3, "Tensor parallelism fills a node of eight devices and does not leave it.")

# %% [markdown]
# With more than eight tensor-parallel ranks every all-reduce crosses to other nodes, through all
# eight ports of each, and every product is cut narrower. With fewer of them the pipeline is longer,
# and with a batch of 32 its bubble, $(p-1)/m$, costs more than a rank saves by making fewer
# all-reduces. With the larger batch the bubble is small, and tp = 4 and tp = 8 come out nearly
# alike. (The paper's figure 13 has its maximum at 8 for both batches.)
#
# The advice has a condition. [Megatron-LM #258](https://github.com/NVIDIA/Megatron-LM/issues/258)
# reports the opposite from *one* node: with large micro-batches and many of them, eight stages ran
# over 30 % faster than eight tensor-parallel ranks, with models of up to 10 billion parameters. The
# next cell predicts this for a GPT of 8 billion parameters, with micro-batches of four samples of
# 512 tokens. With how many micro-batches does the pipeline begin to win?

# %%
from_m = pl.exercises.choose(
    "From which number of micro-batches on is pp 8 faster than tp 8?",
    ["from 2", "from 8", "from 32", "from 128"],
)
from_m

# %%
eight = pl.ModelSpec(layers=40, hidden=4096, heads=32, seq_len=512, vocab=32000)
node, rows = pl.Cluster.preset("dgx-a100"), {}
for m in (2, 8, 32, 128):
    how = {**recipe, "microbatch_size": 4, "microbatches": m}
    cut = {"tp 8 (s)": pl.Plan(tp=8, **how), "pp 8 (s)": pl.Plan(pp=8, **how)}
    took_8 = {
        n: pl.predict(eight, c, node, steps=1, detail="actions").step_time for n, c in cut.items()
    }
    rows[f"m = {m}"] = {**took_8, "tp over pp": took_8["tp 8 (s)"] / took_8["pp 8 (s)"]}
pd.DataFrame(rows).T.round(2)

# %%
from_m.reveal(2, "With m = 2 most of the pipeline's step is its bubble.")

# %% [markdown]
# The formula says why. Tensor parallelism pays its all-reduces for every micro-batch, so its
# communication grows with $m$. The bubble stays the same number of seconds while the computation
# grows, so its share shrinks. Where memory and the batch allow many micro-batches, a pipeline is
# the faster one inside a node, too. Where they do not, as with $m = 2$, it is the slower one. (The
# issue measured over 30 %, with BERT models. The prediction has 15 % with $m = 8$, and 93 % with $m
# = 128$: trust its direction, not its factor. Its other question is whether TFLOP/s are speed: they
# are if no recomputed FLOPs are counted, lab 11.)
#
# ## Larger micro-batches suit the device, smaller ones the pipeline
# A larger micro-batch gives the device larger products, and leaves the pipeline fewer
# micro-batches. The next cell predicts both effects for 91 billion parameters with tp 8 and pp 8.

# %%
size = pl.exercises.choose(
    "How many samples per micro-batch are best with a batch of 128?",
    ["one", "two", "four", "eight"],
)
size

# %%
mid = wide.replace(hidden=15360)
rows = {}
for batch in (128, 512):
    for b in (1, 2, 4, 8):
        cut = {**recipe, "microbatch_size": b, "microbatches": batch // b}
        rows.setdefault(b, {})[f"batch {batch}"] = mfu(mid, pl.Plan(tp=8, pp=8, **cut))
table = pd.DataFrame(rows).T.rename_axis("samples per micro-batch")
print("best with batch 128:", table["batch 128"].idxmax(), "- 512:", table["batch 512"].idxmax())
table.round(1).add_suffix(", MFU (%)")

# %%
size.reveal(2, "But 1 and 2 are closer to each other than a prediction is to a measurement.")

# %% [markdown]
# With a batch of 128, eight samples per micro-batch leave 16 micro-batches for 8 stages, and the
# bubble decides. With 512 two and four come out alike, and one sample is too few: every micro-batch
# reads all weights, and adds its gradients to those before it. (In the paper's figure 16 two
# samples win with both batches.)
#
# ## A search goes through all legal plans
# `plan_search` goes through every legal combination of dp, tp, pp, schedule, chunks per rank,
# micro-batches, ZeRO stage, sequence parallelism, recomputation and offload. It estimates seconds
# and bytes of each, drops what does not fit, and compiles and simulates the best ones.

# %%
zero_of_winner = pl.exercises.choose(
    "Which stage of ZeRO has the plan with the shortest predicted step?",
    ["none", "ZeRO-1", "ZeRO-2", "ZeRO-3"],
)
zero_of_winner

# %% tags=["measured"]
search = pl.plan_search(big, nodes, global_batch=128, precision="bf16")
search

# %%
view.pareto(search)

# %%
zero_of_winner.reveal(
    1 + search.best.zero_stage, "The prediction lets its gathers overlap with computation."
)

# %% [markdown]
# No estimate is below the line, the *Pareto front*: for every plan above it there is one on it that
# is no slower and needs no more memory. The winner uses ZeRO-3 across nodes, where PTD-P measured a
# pipeline to be faster than ZeRO-3. The prediction lets its gathers overlap with computation
# perfectly, and no device does quite that. In `search.table` the column `closed_s` is the estimated
# time of a step, and `serial_s` the time of the same step if nothing overlaps (simulated for the
# few plans that were compiled, estimated for the others). Here are the winner and the plan that is
# best by `serial_s`. (Lab 04's `zb-h2`, a schedule without a bubble, is left out. Its gain needs
# steps that run into each other, which the estimate takes for granted.)

# %%
fitting = search.table.query("fits and schedule != 'zb-h2'")
columns = ["dp", "tp", "pp", "schedule", "zero_stage", "closed_s", "serial_s"]
fitting.loc[[0, fitting["serial_s"].idxmin()], columns].round(2)

# %% [markdown]
# So the ranking rests on the overlap: without it a pipeline with ZeRO-1 is best. That agrees with
# PTD-P's comparison, but $t$ is 2 here and not 8. Lab 12 compares both columns with a measurement.
#
# Each row of the next table is the best of the plans that have another value of one setting than
# the winner. *times* is its estimated step, divided by the winner's.

# %%
losers = search.losers().query("setting in ['tp', 'pp', 'zero_stage', 'recompute', 'schedule']")
losers[["setting", "instead", "times", "fits"]].sort_values("times").head(10).round(2)

# %% [markdown]
# ## Every knob at once
# Drag the sliders: mesh, timeline, memory and traffic follow, and a combination that is not legal
# says why. *Run it* trains the plan on this machine and puts the replay next to the prediction. The
# *bubble* in the title counts every wait of a rank between the first forward and the last backward:
# filling and draining, and also waiting for tensor parallelism's messages. The share
# $(p-1)/(m+p-1)$ counts only filling and draining, and is 20 % for this plan.

# %%
pl.explore(model, plan=cube)

# %% [markdown]
# ## Plans that are refused, and one that is legal and a trap

# %%
for settings in ({"tp": 3}, {"pp": 8}, {"dp": 2, "zero_stage": 1, "grad_sync": "naive"}):
    try:
        pl.run(model, pl.Plan(**settings))
    except ValueError as error:
        print(settings, "->", error, end="\n\n")

# %% [markdown]
# No process was started for any of them. The trap is ZeRO-3 in a pipeline. ZeRO-1 sends $2\Psi$
# elements along dp, however many micro-batches $m$ there are. ZeRO-3 that frees parameters after
# every use, as this library's does, gathers each of them twice and reduce-scatters its gradient
# once, for every micro-batch. A pipeline needs many micro-batches. How many times the bytes of
# ZeRO-1 does ZeRO-3 send along dp with $m = 8$?

# %%
times = pl.exercises.guess("times the bytes of ZeRO-1", low=1, high=30, decimals=0)
times

# %%
import warnings

by_axis = {}
for stage in (1, 3):
    trap = cube.replace(zero_stage=stage, microbatches=8, microbatch_size=1)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        sent = pl.predict(model, trap, cluster).traffic(by="axis").set_index("axis")["bytes"]
    by_axis[f"ZeRO-{stage}"] = sent[["dp", "tp", "pp"]] / 1e6
print(heard[0].message)
pd.DataFrame(by_axis).T.round(2).add_suffix(" (MB, all ranks)")

# %%
times.reveal(by_axis["ZeRO-3"]["dp"] / by_axis["ZeRO-1"]["dp"])

# %% [markdown]
# Others avoid it. PyTorch's pipelines reduce-scatter the gradients of `fully_shard` once per step;
# torchtitan then keeps parameters gathered for the whole step (`reshard_after_forward=False`),
# which costs memory in place of bytes; and DeepSpeed refuses ZeRO-2 and 3 in a pipeline.
#
# ## Implement: one training step on a data × pipeline mesh
# You have the groups. Now write the step in plain PyTorch, with the detail that goes wrong most
# often when axes are composed: the norm by which gradients are clipped. No parameter is on two
# stages (`tied=False`), and an epsilon of 1e-6 in the clipping factor is accepted.
# `exercise.hint()` gives one hint at a time.

# %%
exercise = pl.exercises.mesh_step
exercise


# %%
### ANSWER: mesh_step


verdict = pl.exercises.mesh_step.check(mesh_step)
verdict

# %% [markdown] tags=["solution-only"]
# **Why it works.** Along pp different ranks hold *different* parameters, so squares of the norm are
# added over pp. Along dp all ranks hold the *same* parameters, so their gradients are averaged
# first and counted once: $\lVert g \rVert^2 = \sum_{\text{stages}} \lVert g_\text{stage} \rVert^2$.
# Along tp it is a mixture: shards are added, replicated parameters such as LayerNorm's are counted
# once.
#
# **Common mistakes.** The norm of the rank's own stage alone (every stage then clips by another
# factor, and the weights are not those of one process); a norm before the gradients are averaged; a
# sum over the whole world, which is too large by $\sqrt{d}$; a loss that is not divided by $m\,d$;
# gradients that are summed in every backward.

# %% [markdown]
# ## Your step trains the GPT, next to the library's plan
# Your two functions run on four real ranks, in plain `torch.distributed` under `pl.observe`, next
# to the library's program for the same plan. Both send the same bytes.


# %%
def train(spec, dp, pp, steps=4):
    from torch.distributed.device_mesh import DeviceMesh

    where, groups = mesh_groups(dp=dp, pp=pp, tp=1)
    both, ranks = [groups["pp"], groups["dp"]], np.arange(pp * dp).reshape(pp, dp)
    # as long as it lives it gives your groups their names in the picture
    _mesh = DeviceMesh.from_group(both, "cpu", ranks, mesh_dim_names=("pp", "dp"))
    stage = pl.reference.Stage(spec, where["pp"], pp)
    optimizer = pl.reference.optimizer(stage.parameters(), "adamw")
    for step in range(steps):
        mine = {"step": step, "rank": where["dp"], "ranks": dp}
        batches = pl.reference.batches(spec, **mine, microbatches=4, microbatch_size=2)
        mesh_step(stage, batches, groups, optimizer, 1.0, spec.hidden)


same = pl.Plan(dp=2, pp=2, schedule="gpipe", microbatches=4, microbatch_size=2)
ours = pl.run(model, same, steps=4, clip_norm=1.0, progress=False)
reports = {"the library's": ours}
if grouped and verdict:
    reports["yours"] = pl.observe(train, 4, (model, 2, 2))
else:
    print("write mesh_groups and mesh_step first")
sent = {name: r.traffic(["axis", "op"])["bytes"].sum() / 1e6 for name, r in reports.items()}
pd.DataFrame({"sent by all ranks (MB)": sent}).round(3)

# %% tags=["measured"]
view.memory_bars(reports, title="The activations of all micro-batches are most of the peak")

# %% [markdown]
# The peak is at the beginning of backward. The library has all gradients of a stage by then: one
# flat buffer, which is summed in one call along dp. Autograd makes each gradient when it computes
# it, so at the peak of a step like yours only those of the last layers are there.
#
# The next picture has the wall clock, so where ranks share cores they wait for a core, too. Hatched
# time is a recorded wait; white time is neither computation nor a recorded wait. The library's
# column *idle* has both together, as a share of T, the longest time of a rank of the same pipeline
# from its first forward to its last backward: ranks 0 and 2 have one T, ranks 1 and 3 another. Your
# half also has a row for the messages of each axis, and it calls *compute* what no span covers:
# mostly a `send` that waits until its message is taken.

# %%
last_waits = pl.exercises.choose(
    "Between its last backward and its update, which ranks does a rank wait for?",
    [
        "None: its own gradients are complete",
        "The same stage of the other pipeline",
        "All the others",
    ],
)
last_waits

# %% tags=["measured"]
title = "After the last backward a rank waits along dp, then along pp"
view.timelines(*reports.values(), labels=list(reports), title=title)

# %%
last_waits.reveal(
    3,
    "Along dp it waits for the gradients of the same stage, and along pp for the norm of the other "
    "stage, which has waited along dp itself.",
)

# %% [markdown] tags=["solution-only"]
# A second answer works in 1F1B order and reduces without a copy:

# %% tags=["solution-only"]
### ANSWER: mesh_step_other


pl.exercises.mesh_step.check(mesh_step)

# %% [markdown]
# ## Go further: a planner with twelve questions

# %%
planner = pl.exercises.place
planner


# %%
### ANSWER: place


pl.exercises.place.check(my_planner)

# %% [markdown] tags=["solution-only"]
# **Why it works.** Few plans are worth a question: those with model parallelism as small as memory
# allows, tensor parallelism first and only inside a node, ZeRO-1, which sends the same bytes as
# data parallelism, and the least recomputation that fits.
#
# **Common mistakes.** Recomputing everything although the plan fits without; data parallelism
# alone, which does not fit; tensor parallelism across nodes; plans that do not use all samples or
# devices. A second answer takes ZeRO-1, sequence parallelism and tp within a node as given. It
# ranks the plans that are left by shorter forms of this lab's two formulas, and asks about the best
# twelve:

# %% tags=["solution-only"]
### ANSWER: place_other


pl.exercises.place.check(my_planner)

# %% [markdown]
# ## What to remember
# 1. A rank's coordinates follow from $r = (i_p\,d + i_d)\,t + i_t$, and every rank has to make
#    every group, in the same order.
# 2. A step is compute, bubble and exposed communication, and a plan loses most by one or two of
#    these.
# 3. States are divided by $p\,t$, and by $d$ only with ZeRO. The inputs that the first stage keeps
#    are divided by no axis if $m \ge p$, unless sequence parallelism divides them by $t$; tensor
#    parallelism divides most of the block that is recomputed.
# 4. Tensor parallelism pays per block and micro-batch, a pipeline per micro-batch, data parallelism
#    once per step. So tensor parallelism gets the fastest links. A pipeline sends $2\,m\,S$
#    bytes, data parallelism about $2 w \Psi/(p\,t)$. The axis that sends less gets the slowest
#    links.
# 5. Squared norms are added over axes along which parameters differ; parameters that are
#    replicated are counted once.
#
# | when | use |
# |---|---|
# | the model fits on one device | dp, with ZeRO-1 |
# | it does not, and one node holds it | tp inside the node (with large $m$: pp), or ZeRO-3 |
# | one node does not hold it | tp = node, pp across, dp for the rest |
# | the batch is small | less pp: the bubble is $(p-1)/m$ |
# | links between nodes are slow | pp or dp across, never tp |
#
# $$\begin{aligned} T &\approx \frac{C}{d\,p\,t\,X}\Big(1 + \frac{p-1}{m}\Big)
#    + \text{exposed communication} \\ M &\approx \frac{\Psi}{p\,t}\Big(K_w + \frac{K_o}{d}\Big)
#    + \min(p, m)\,\frac{L}{p}\,S + \text{one block, with ZeRO-1} \end{aligned}$$
#
# ## In PyTorch, DeepSpeed, Megatron
# torch has the mesh as `DeviceMesh`, and composes by wrapping: `parallelize_module` along `"tp"`,
# then `fully_shard` along `"dp"`. This runs here, on the reference GPT, with its MLPs cut in two:


# %%
def two_d(spec, dp, tp, steps=3):
    from torch.distributed import device_mesh, fsdp
    from torch.distributed.tensor import parallel

    mesh = device_mesh.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    gpt, losses = pl.reference.GPT(spec), []
    for block in gpt.blocks:
        cut = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
        parallel.parallelize_module(block.mlp, mesh["tp"], cut)
        fsdp.fully_shard(block, mesh=mesh["dp"])
    fsdp.fully_shard(gpt, mesh=mesh["dp"])
    optimizer = pl.reference.optimizer(gpt.parameters(), "adamw")
    for step in range(steps):
        mine = {"step": step, "rank": mesh["dp"].get_local_rank(), "ranks": dp}
        [(tokens, targets)] = pl.reference.batches(spec, **mine, microbatch_size=4)
        loss = gpt(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


theirs = pl.observe(two_d, 4, (model, 2, 2))
plan = pl.Plan(dp=2, tp=2, zero_stage=3, microbatch_size=4)
same = pl.run(model, plan, steps=3, progress=False)
print("losses equal to five digits:", bool(np.allclose(theirs.losses, same.losses, rtol=1e-5)))
sent = {
    name: report.collectives.query("step == 1 and phase != 'gloo surplus'")
    for name, report in {"torch": theirs, "paralab": same}.items()
}
pd.DataFrame(
    {n: calls.groupby(["axis", "op"])["wire_bytes"].sum() / 1e6 for n, calls in sent.items()}
).round(2)

# %% [markdown]
# Both train the same model. Ours sends 2.25 times as much along tp: attention doubles it, embedding
# and head add the rest. Along dp torch sends more, because both of its tensor-parallel ranks gather
# what its tp does not cut. (On a CPU torch's reduce-scatter also gathers. That is a property of
# gloo, and the table leaves these bytes out: their phase is *gloo surplus*.) A dimension of the
# mesh that is not wrapped, here pp, needs `torch.distributed.pipelining`; with three axes the order
# is pp, then tp, then `fully_shard`.
#
# ### Flags
# | here | [Megatron-LM](https://github.com/NVIDIA/Megatron-LM) | torchtitan |
# |---|---|---|
# | `tp=8` | `--tensor-model-parallel-size 8` | `tensor_parallel_degree = 8` |
# | `pp=4` | `--pipeline-model-parallel-size 4` | `pipeline_parallel_degree = 4` |
# | `schedule="interleaved"` | `--num-layers-per-virtual-pipeline-stage 2` | `"Interleaved1F1B"` |
# | `sequence_parallel=True` | `--sequence-parallel` | `enable_sequence_parallel`, the default |
# | `zero_stage=1` | `--use-distributed-optimizer` | – |
# | `zero_stage=3` | `--use-megatron-fsdp` ² | `data_parallel_shard_degree = 8` |
# | `microbatch_size=2` | `--micro-batch-size 2` | `num_tokens_per_microbatch_per_dp_rank` ¹ |
#
# ¹ in `training`, and it counts tokens: $2s$. ² Before Megatron-Core 0.18 also
# `--data-parallel-sharding-strategy optim_grads_params`: the default of that option sharded
# nothing.
#
# [DeepSpeed](https://github.com/deepspeedai/DeepSpeed) shards along dp (`"zero_optimization":
# {"stage": 1}` in its [JSON](https://www.deepspeed.ai/docs/config-json/)), brings pipelines as
# `PipelineModule(layers, num_stages=4)`, and cuts layers by its JSON's `{"tensor_parallel":
# {"autotp_size": 8}}` or leaves that to Megatron-LM.
#
# In all of them dp is what is left: world size / (tp · pp). Megatron's default order of ranks
# ([`order`](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/parallel_state.py) of
# `initialize_model_parallel`) is `tp-cp-ep-dp-pp`, innermost first, which is the order of this lab.
#
# **On your GPUs.** With `pl.set_default_device("cuda")` in the first cell the same cells take a GPU
# per rank. Tensor and pipeline parallelism together, and hybrid sharding, were run with NCCL on one
# GPU that four ranks shared, not yet on several. `pl.Cluster.local(device="cuda")` measures your
# GPUs and links. Look first at `report.traffic(by="level")`: what crosses nodes should be the
# smallest number.
#
# ## Read on
# * Narayanan et al. 2021, [PTD-P](https://arxiv.org/abs/2104.04473): sec. 3 for the model of
#   composing, sec. 5.4 and 5.5 for the experiments above.
# * [The Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), “5D
#   parallelism in a nutshell”.
# * [DeviceMesh](https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html) and
#   [tensor parallelism with FSDP](https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html)
#   in PyTorch's tutorials.
# * [torchtitan](https://github.com/pytorch/torchtitan), whose `parallel_dims.py` is the mesh, and
#   [picotron](https://github.com/huggingface/picotron), whose `process_group_manager.py` is the
#   warm-up.
# * In the package: `paralab/programs/compile.py`, where the axes meet, `paralab/grid.py`, the mesh,
#   `paralab/programs/search.py`. Next: [lab 11](11_cost.ipynb), what a training costs.
