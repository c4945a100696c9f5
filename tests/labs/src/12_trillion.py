# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 12 · A trillion parameters on a laptop
#
# 3,072 GPUs train a model of a trillion parameters. What does one of them hold, what does it send,
# and how long does that take? A mistake in such a plan is seen when the devices are booked, or
# here, on a laptop, before they are.
#
# **You will be able to** name the groups of any rank of a large plan; compute what a stage holds
# and what a rank sends per step, axis by axis; read a pipeline of 64 stages; and say when ZeRO-3
# stops scaling.
#
# **You need** labs 03, 05, 10 and 11. **Minutes** 60 to 90.

# %%
import pandas as pd

import paralab as pl
from paralab import view
from paralab.theory import needs, papers, zero

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
GB = 1e9  # a data sheet's
model, plan = papers.ptdp_models()[-1]
plan = plan.replace(grad_sync="overlapped", bucket_bytes=4 * 2**20, partition_messages=False)
nodes = pl.Cluster.preset("dgx-a100", nodes=384)
view.mesh(plan, nodes, rank=1536)

# %% [markdown]
# The plan is that of [PTD-P](https://arxiv.org/abs/2104.04473)'s largest model in its authors'
# [script](https://github.com/NVIDIA/Megatron-LM/tree/main/examples/academic_paper_scripts/sc21):
# without interleaving, though the paper's text says otherwise.
#
# ## Eight tensor-parallel ranks are a node
#
# | symbol | meaning |
# |---|---|
# | $d, p, t$ | data-, pipeline- and tensor-parallel ranks |
# | $m, b$ | micro-batches per step and data-parallel rank; samples of each |
# | $s, h, L, V$ | tokens per sample, hidden size, blocks, vocabulary |
# | $\Psi_r$ | parameters that rank $r$ holds |
# | $i$, $M_r$ | a stage, counted from 0; bytes that rank $r$ holds at its peak |
# | $S$ | bytes of an activation between two blocks, $2\,b\,s\,h$ in 16 bits |
#
# Tensor and pipeline parallelism leave each rank a 512th of the model, 4 GB of weights. How much
# does rank 0, which is on the first stage, send in one step, and how much of that leaves its node?

# %%
print(
    f"{model.num_params / 1e9:,.0f} billion parameters, {model.layers} blocks of {model.hidden:,}"
)
print(f"{plan.world_size:,} ranks: tp={plan.tp}, pp={plan.pp}, dp={plan.dp}, m={plan.microbatches}")

# %%
sends = pl.exercises.guess("GB that rank 0 sends per step", low=0, high=2000, unit="GB", decimals=0)
sends

# %%
leaves = pl.exercises.guess("of it to other nodes", low=0, high=100, unit="%", decimals=0)
leaves

# %% [markdown]
# ## A program can be read instead of run
# You have no 3,072 devices, but you can have the program of one of their ranks: the instructions
# that `pl.run` would execute there. Every message in it has a size and a group, and every value a
# size and a first and last moment. `pl.dry_run` compiles this list and reads off it what the rank
# holds and sends. No tensor is made. To check it, run a plan of eight ranks and compare:

# %%
small = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)
cube = pl.Plan(tp=2, pp=2, dp=2, microbatches=4, zero_stage=1, recompute="full")
real = pl.run(small, cube, steps=1, progress=False)


def counted(report, rank):
    mine = report.memory[report.memory["rank"] == rank]
    most = mine.groupby(["category", "time"])["bytes"].sum().groupby("category").max()
    sent = report.traffic().set_index("rank")["bytes"]
    return {"sent": int(sent[rank]), **most[["parameters", "optimizer", "activations"]].to_dict()}


rows = {}
for rank in (0, 3, 5, 6):  # both stages, replicas and halves of a layer
    seen, dry = counted(real, rank), counted(pl.dry_run(small, cube, rank=rank), rank)
    rows[rank] = {"as a run": seen == dry, **dry}
pd.DataFrame(rows).T.rename_axis("rank")

# %% [markdown]
# The run was counted by a ledger of its tensors and a recorder of its messages. Neither of them
# knows the sizes of the program, and both agree with the program byte for byte.
#
# ### Warm-up: what does a rank of any stage hold?
# In the exercise the head is a matrix of its own (`tied=False`). The model of this lab shares it
# with the embedding.

# %%
warm_up = pl.exercises.stage_memory
warm_up


# %%
### ANSWER: stage_memory


pl.exercises.stage_memory.check(stage_parameters, in_flight)

# %% [markdown] tags=["solution-only"]
# **Why it works.** Tensor parallelism shards a weight and the bias of a column-parallel layer. The
# bias of a row-parallel layer is added after the sum, so it is replicated, like a LayerNorm. The
# last stage runs a backward right after each forward, and each stage before it is one forward
# further ahead, as far as there are micro-batches.
#
# **Common mistakes.** An equal part of the whole model; an embedding that is not sharded, or that
# every stage has; norms divided by t; p − i micro-batches where there are fewer than that. A second
# answer counts tensor by tensor:

# %% tags=["solution-only"]
### ANSWER: stage_memory_other


pl.exercises.stage_memory.check(stage_parameters, in_flight)

# %% [markdown]
# ## One rank holds 16 bytes per parameter and 64 micro-batches
# Each of the $\Psi_r$ parameters of a rank takes 2 bytes for the weight, 2 for its gradient and 12
# for the states of the optimizer. Under 1F1B stage $i$ has at most $p - i$ micro-batches in flight.
# Of each of them it keeps the inputs of its $L/p$ blocks and recomputes everything else:
#
# $$ M_r \;\approx\; (2 + 2 + 12)\,\Psi_r + \min(m, p - i)\,\frac{L}{p}\,S $$

# %%
first = pl.dry_run(model, plan, rank=0, cluster=nodes)
psi, S = first.meta["num_params"], 2 * model.seq_len * model.hidden
blocks = model.layers // plan.pp
by_hand = {
    "parameters": 2 * psi,
    "gradients": 2 * psi,
    "optimizer": 12 * psi,
    "activations": min(plan.microbatches, plan.pp) * blocks * S,
}
by_hand["total"] = sum(by_hand.values())
held = first.peaks()["dry run"]
frame = pd.DataFrame({"dry run (GB)": held / GB, "formula (GB)": pd.Series(by_hand) / GB})
frame.loc[held.index].fillna(0).round(2)

# %% [markdown]
# The formula leaves out the activations of the one block that is being recomputed, its workspace,
# and the buffers of messages. It holds about as well for every stage. Rank 1536 is on stage $i =
# 32$ of 64 and has two blocks of $12 h^2$ weights, an eighth of each, and no embedding. What is its
# peak?

# %%
middle = pl.exercises.guess("GB on rank 1536", low=0, high=80, unit="GB", decimals=0)
middle

# %%
full = plan.replace(microbatches=64)  # a full pipeline: more micro-batches add next to nothing
reports = {
    f"{name} stage": pl.dry_run(model, full, rank=rank, cluster=nodes)
    for name, rank in {"first": 0, "middle": 1536, "last": 3024}.items()
}
peaks = {
    name: report.peaks()["dry run"].drop("total").to_dict() for name, report in reports.items()
}
title = "The first stage holds most: 64 micro-batches are in flight"
view.bytes_bars(peaks, {"an A100": nodes.memory}, title=title)

# %%
middle.reveal(reports["middle stage"].peaks()["dry run"]["total"] / GB)

# %% [markdown]
# The first stage has the highest peak: 64 micro-batches are in flight there, whether the step has
# 64, as in the picture, or 512, as in the plan. It also holds the embedding. The last stage has one
# micro-batch in flight, and a copy of the tied embedding as its head.
#
# ## A rank sends in every block, at the end of its stage, and once per step
# These are the instructions of rank 0 that send something for micro-batch 0. (The program has $m =
# 64$ micro-batches here, which all look alike.) In the list `x` is an activation, `r` an activation
# that is recomputed, and `g` a gradient.

# %%
program = pl.program(model, plan.replace(microbatches=64), rank=0)
program.filter(op=("all_reduce", "send"), microbatch=0)

# %% [markdown]
# ## Implement: the bytes of any rank, axis by axis
# You can count the calls in this list. The exercise asks for the same on any rank but those of the
# last stage, with and without recomputation. `exercise.hint()` gives one hint at a time.

# %%
exercise = pl.exercises.rank_sends
exercise


# %%
### ANSWER: rank_sends


pl.exercises.rank_sends.check(rank_sends)

# %% [markdown] tags=["solution-only"]
# **Why it works.** Each axis has one payload and one count: activations, per block and micro-batch;
# activations, per micro-batch; gradients, once. The first stage differs from one in the middle by
# its embedding and by the neighbour that it lacks.
#
# **Common mistakes.** Four all-reduces although forward is recomputed; gradients sent back by the
# first stage; the whole model's parameters, or an equal part of them; norms counted as sharded. A
# second answer goes layer by layer:

# %% tags=["solution-only"]
### ANSWER: rank_sends_other


pl.exercises.rank_sends.check(rank_sends)

# %% [markdown]
# ## One rank sends more than a terabyte
# Tensor parallelism makes six all-reduces per block and micro-batch: two forward, two recomputed,
# and two backward. On the first stage the embedding needs one more. So rank 0 sends per step
#
# $$ \underbrace{m\Big(\frac{6L}{p} + 1\Big)\frac{2(t-1)}{t}\,S}_{tp}
#    \;+\; \underbrace{m\,S + \frac{2 V h}{t}}_{pp}
#    \;+\; \underbrace{\frac{2(d-1)}{d}\,2\,\Psi_r}_{dp} $$
#
# There is no stage before the first one, so rank 0 sends no gradients back, and $m\,S$ are its
# activations alone. A stage in the middle sends $2\,m\,S$. The term $2Vh/t$ is the gradient of the
# tied embedding, which the first and the last stage sum.

# %%
by_axis = first.traffic(by=["axis", "level"]).set_index("axis")
m, t, d = plan.microbatches, plan.tp, plan.dp
formula = {
    "tp": m * (6 * blocks + 1) * 2 * (t - 1) / t * S,
    "pp": m * S + 2 * model.vocab * model.hidden / t,
    "dp": 2 * (d - 1) / d * 2 * psi,
}
frame = {"level": by_axis["level"], "dry run (GB)": by_axis["bytes"] / GB}
pd.DataFrame({**frame, "formula (GB)": pd.Series(formula) / GB}).round(2)

# %%
total, far = by_axis["bytes"].sum(), by_axis.query("level == 'inter'")["bytes"].sum()
sends.reveal(round(total / GB))

# %%
between = pl.dry_run(model, plan, rank=1536, cluster=nodes).traffic(by="level")
between = between.set_index("level")["bytes"]
share = between["inter"] / between.sum()
print(f"rank 1536, stage 32: {between.sum() / GB:,.0f} GB, {share:.0%} of it to other nodes")
leaves.reveal(round(100 * far / total))

# %% [markdown]
# Nearly all of it is tensor parallelism's, and none of that leaves the node. That is why $t = 8$
# and why tensor parallelism is the innermost axis. A rank on a middle stage sends activations to
# one neighbour and gradients to the other, so the share that leaves the node is about twice as
# large.
#
# ## With and without scatter/gather, for rank 0 and for the mean
# All eight tensor-parallel ranks of a stage have the same activations, and here each sends all of
# them on. PTD-P lets each send an eighth, and the receivers gather inside their node
# (*scatter/gather*, sec. 4.1; here `partition_messages=True`). This is what it changes in the
# program of a rank on a middle stage, again with 64 micro-batches. `xslice` and `gslice` are
# eighths of an activation and of a gradient:

# %%
in_eighths = pl.program(model, full.replace(partition_messages=True), rank=1536)
pl.program(model, full, rank=1536).diff(in_eighths)

# %% [markdown]
# What a rank sends between nodes therefore has four answers: with and without scatter/gather, and
# for rank 0, which has no stage before it, or for the mean of all ranks. By which factor does
# scatter/gather divide the bytes of rank 0?

# %%
factor = pl.exercises.guess("times fewer bytes of rank 0 between nodes", low=1, high=16)
factor

# %%
expect = pl.predict(model, plan, nodes, steps=1, detail="actions")
parted = plan.replace(partition_messages=True)
parted = pl.predict(model, parted, nodes, steps=1, detail="actions")
sent = {}
for words, report in (("as here (GB)", expect), ("with scatter/gather (GB)", parted)):
    between = report.collectives.query("level == 'inter'")
    each = between.groupby("rank")["wire_bytes"].sum() / GB
    sent[words] = {"rank 0": each[0], "mean": each.mean()}
print(f"a step takes {expect.step_time:.1f} s, with scatter/gather {parted.step_time:.1f} s")
pd.DataFrame(sent).round(1)

# %%
factor.reveal(sent["as here (GB)"]["rank 0"] / sent["with scatter/gather (GB)"]["rank 0"])

# %% [markdown]
# The factor is not eight: activations are sent in eighths, the gradients of weights are not. And a
# step is only about 2 % shorter: while a message moves, a stage mostly has another micro-batch to
# compute.
#
# ## Bytes do not tell seconds
# On average over all ranks, most of which are on middle stages, and without scatter/gather, ten
# times as many bytes stay inside a node as leave it. A link inside a node carries 229 GB/s, and a
# port between nodes 24 GB/s. How many times as long do the bytes inside a node take?

# %%
longer = pl.exercises.guess("times as long", low=0, high=20)
longer

# %%
expect.traffic_chart(matrix=False).titled(
    "Of an average rank's bytes ten times as many stay inside a node; they take about as long"
)

# %%
level = expect.collectives.groupby("level")["wire_bytes"].sum()
longer.reveal(level["intra"] / nodes.intra.bandwidth / (level["inter"] / nodes.inter.bandwidth))

# %% [markdown]
# ## The bubble is more than fill and drain
# The seconds below are those of a plan that differs from the script in three points. The script
# sums gradients after the last backward; here each bucket leaves as soon as it is complete. The
# script sends activations between stages in eighths (*scatter/gather*); here they are sent whole,
# and a step takes 2 % longer. The script has dropout, and this model has none: dropout makes a step
# a little longer, and its masks would take much memory in every plan that keeps the scores of
# attention. As in Megatron-LM then, a rank waits for tensor parallelism's messages as soon as they
# are posted (`tp_overlap=False`). (Lab 11's plan has both scatter/gather and dropout. The two
# nearly cancel, so its step is about as long.)
#
# By the formula $\frac{p-1}{m+p-1}$ the bubble of 64 stages and 512 micro-batches is 11 % of the
# step. The formula assumes that all stages are equally fast and that messages take no time. Here
# the last stage has the head, and every activation goes to another node. What share of the time of
# all ranks is idle?

# %%
idle = pl.exercises.guess("of the step is idle", low=0, high=50, unit="%", decimals=0)
idle

# %% [markdown]
# Each row of the next picture is one of eight stages of the 64. With 512 micro-batches a single box
# would be thinner than a pixel, so a stage is drawn as areas: at every time the height of a colour
# is its share of the time.


# %%
def finding(report):
    p, m = report.plan.pp, report.plan.microbatches
    fill = (p - 1) / (m + p - 1)
    return (
        f"{100 * report.bubble:.0f} % of all ranks' time is idle; "
        f"filling and draining are {100 * fill:.0f} %"
    )


view.stage_time(expect).titled(finding(expect))

# %%
idle.reveal(100 * expect.bubble)

# %% [markdown]
# The next picture has an eighth of the micro-batches, $m = 64$. How much of the time is idle now?

# %%
idle_64 = pl.exercises.guess("of the step is idle", low=0, high=100, unit="%", decimals=0)
idle_64

# %%
eighth = pl.predict(model, full, nodes, steps=1, detail="actions")
view.stage_time(eighth).titled(finding(eighth))

# %%
idle_64.reveal(100 * eighth.bubble)

# %%
pd.DataFrame(
    {
        f"m = {r.plan.microbatches}": {
            "bubble of the whole step (%)": 100 * r.bubble,
            "(p-1)/(m+p-1) (%)": 100 * (r.plan.pp - 1) / (r.plan.microbatches + r.plan.pp - 1),
            "(p-1)/m, relative to the ideal (%)": 100 * (r.plan.pp - 1) / r.plan.microbatches,
        }
        for r in (expect, eighth)
    }
).round(1)

# %% [markdown]
# Hatched is waiting between actions, grey is waiting inside them. Some waiting of the drain is
# grey, too: a stage begins to recompute a block before the gradient from the next stage is there,
# and then waits for it. Grey is also the wait for messages of tensor parallelism; their bytes alone
# take 4.9 of the 98 s. And the last stage, which computes the head, makes all others wait. *Bubble*
# counts all of this, $(p-1)/(m+p-1)$ only filling and draining.
#
# ## One change at a time
# The next table makes one change to the plan above at a time; some changes need two settings.
# *Days* is the time for 450 billion tokens.

# %%
most_days = pl.exercises.choose(
    "Which change saves the most days and still fits in 80 GB?",
    [
        "Interleaving: two chunks of half the length per rank",
        "GPipe: all forwards first, then all backwards",
        "Recomputing the core of attention alone, with sequence parallelism",
        "Recomputing nothing",
    ],
)
most_days

# %%
changes = {
    "the plan above": {},
    "selective, sequence parallel": {"recompute": "selective", "sequence_parallel": True},
    "two chunks per rank": {"schedule": "interleaved", "virtual_stages": 2},
    "tp overlapped": {"tp_overlap": True},
    "ZeRO-1": {"zero_stage": 1},
    "nothing recomputed": {"recompute": "none"},
    "the same, sequence parallel": {"recompute": "none", "sequence_parallel": True},
    "GPipe": {"schedule": "gpipe"},
    "tp=16, over two nodes": {"tp": 16, "pp": 32},
}
updates, rows, said = 450e9 / (plan.global_batch * model.seq_len), {}, {"the plan above": expect}
for name, change in changes.items():
    if change:
        said[name] = pl.predict(model, plan.replace(**change), nodes, steps=1, detail="actions")
    rows[name] = {
        "step (s)": round(said[name].step_time, 1),
        "days": round(said[name].step_time * updates / 86_400),
        "bubble (%)": round(100 * said[name].bubble),
        "peak memory (GB)": round(said[name].peak_memory / GB, 1),
        "fits": said[name].peak_memory <= nodes.memory,
    }
pd.DataFrame(rows).T

# %%
most_days.reveal(
    3,
    "Recomputing nothing saves 18 days, and does not fit. It computes less than the second row and "
    "is slower all the same, because the second row has sequence parallelism. With that, too, "
    "recomputing nothing is faster, and needs 83 GB. (With ZeRO-1 in addition it fits, but not "
    "with the masks of the authors' dropout.)",
)

# %% [markdown]
# GPipe is a little faster than 1F1B here, where messages between stages are sent whole and 1F1B's
# ranks wait for them more often; with scatter/gather both take equally long. But GPipe keeps all
# 512 micro-batches and does not fit. ZeRO-1 sends the same bytes as data parallelism, half of them,
# the all-gather of the weights, only after the optimizer's step. They are so few that the step
# takes no longer, and a rank holds 22 GB less, because six ranks share the optimizer states. Since
# [30 August 2021](https://github.com/NVIDIA/Megatron-LM/commit/cf7efd4) Megatron-LM can compute
# the weight's gradient while the all-reduce of the input's gradient moves, and since 2 September
# it does so by default. That hides a third of tensor parallelism's messages, and saves two days.
# With `tp=16` the all-reduces cross between nodes, but the pipeline has half as many stages to
# fill and drain. This wins back a part of what the messages cost, so a step takes only 9 % longer.
# Its bubble is larger all the same, because this column includes the waits for tensor
# parallelism's messages.
#
# The second row is the method of a paper from a year later, which measured it on a trillion
# parameters, with the same tp and pp and without data parallelism ([Korthikanti et
# al.](https://arxiv.org/abs/2205.05198), table 5). How much more throughput did they measure?

# %%
gained = pl.exercises.guess("more throughput", low=0, high=100, unit="%", decimals=0)
gained

# %%
theirs = said["tp overlapped"]  # as in that paper, for both plans
selective = theirs.plan.replace(**changes["selective, sequence parallel"])
selective = pl.predict(model, selective, nodes, steps=1, detail="actions")
gain = theirs.step_time / selective.step_time - 1
print(f"predicted: {100 * gain:.0f} % more throughput")
measured = papers.korthikanti_table5().set_index("model").loc["1T"].filter(like="throughput")
measured

# %%
gained.reveal(measured["throughput (%), printed"])

# %% [markdown]
# ## ZeRO-3 shards the states of a trillion parameters to 16 GB, and stops scaling
# The third stage of ZeRO shards all states over all data-parallel ranks. The next table has a model
# of $10^{12}$ parameters on 1,024 devices. Its first column is a table of
# [the ZeRO paper](https://arxiv.org/abs/1910.02054), in the names of the paper: *Pos* shards the
# states of the optimizer (stage 1), *+g* also gradients (stage 2), and *+p* also parameters (stage
# 3). The column *seconds* is for a ring that goes through one whole node after another, so that it
# crosses between nodes through all eight ports, at $8 \cdot 24 = 192$ GB/s. It assumes that no
# computation hides a message.

# %%
ring, rows = nodes.ways("all_gather", nodes.reach(range(1024)))["ring"], {}
for stage, name in enumerate(zero.NAMES):
    holds, moves = (
        zero.bytes_per_device(1e12, 1024, stage),
        2 * zero.elements_sent(1e12, 1024, stage),
    )
    rows[name] = {"states (GB)": zero.as_printed(holds), "states fit": holds <= nodes.memory}
    rows[name] |= {
        "sends per step (GB)": round(moves / GB),
        "seconds": round(moves / ring.bandwidth),
    }
pd.DataFrame(rows).T.rename_axis("states on 1,024 devices")

# %% [markdown]
# These are states alone. A block of this lab's model has 7.9 billion parameters, which are 15.7 GB
# in 16 bits. ZeRO-3 gathers such a block whole, and its gradient is whole before it is reduced.
# What does a device of 1,024 hold at its peak, with a micro-batch of one sample and full
# recomputation?

# %%
wide = pl.Plan(dp=1024, zero_stage=3, recompute="full", precision="fp16", microbatch_size=1)
for gathered_ahead in (1, 0):
    held = pl.dry_run(model, wide.replace(prefetch=gathered_ahead), rank=0, cluster=nodes)
    print(f"prefetch={gathered_ahead}: {held.peak_memory / GB:.0f} GB at the peak")

# %% [markdown]
# Neither fits in 80 GB. For blocks this wide a layer must be cut after all.
#
# PTD-P measured ZeRO-3 on 175 billion parameters (its table 2), with the same batch on 384, 768 and
# 1,536 devices. With 384 devices each of them reaches 144 TFLOP/s. How many are left with 1,536?

# %%
left = pl.exercises.guess("TFLOP/s of each of 1,536", low=0, high=144, decimals=0)
left

# %% [markdown]
# The next cell predicts the three runs in three ways. In *all hidden* the gathers overlap with
# products as far as they can. In *none hidden* they do not overlap at all. *Tensor by tensor* is
# what DeepSpeed did when PTD-P was measured with it: one call gathered one tensor, and one call
# reduce-scattered one gradient. Tensors with fewer than 100,000 elements (its
# `stage3_param_persistence_threshold`), here all biases and norms, stayed whole. A block has 12
# tensors, and 4 of them are larger. So it has 3 more gathers in forward, 3 more in backward and 11
# more reduce-scatters, 17 in all. Each of them goes around a ring of all devices, and pays the
# latency of every step of the ring.

# %%
gpt3 = pl.ModelSpec.preset("gpt3-175b").replace(dropout=0.1)  # as in the authors' scripts
asked = {
    "tp": 1,
    "pp": 1,
    "zero_stage": 3,
    "recompute": "full",
    "precision": "fp16",
    "offload": None,
}
rates = {}
for row in papers.ptdp_table2().query("`parameters (B), printed` < 200").to_dict("records"):
    if row["model-parallel"] > 1:
        continue
    count, batch = row["devices"], {"microbatch_size": row["micro-batch"], "dp": row["devices"]}
    how = pl.Plan(zero_stage=3, recompute="full", precision="fp16", **batch)
    machine = pl.Cluster.preset("dgx-a100", nodes=count // 8)
    hidden = pl.predict(gpt3, how, machine, steps=1, detail="actions").step_time
    size = {"global_batch": how.global_batch, "memory": "1TB", "top": 1}
    table = pl.plan_search(gpt3, machine, **size, **asked, **batch).table
    none = table.iloc[0]["serial_s"]
    latency = machine.ways("all_gather", machine.reach(range(count)))["ring"].latency  # whole ring
    work = needs.step_flops(gpt3, how.global_batch, recompute=True) / count / 1e12
    rates[count] = {
        "measured": row["TFLOP/s per device"],
        "all hidden": work / hidden,
        "none hidden": work / none,
        "tensor by tensor": work / (none + (3 + 3 + 11) * gpt3.layers * latency),
    }
pd.DataFrame(rates).T.rename_axis("devices").round(0).add_suffix(" (TFLOP/s)")

# %%
left.reveal(rates[1536]["measured"])

# %% [markdown]
# When the devices double, the bytes per device stay the same and the work per device halves. With
# everything hidden the prediction is too fast at every size. With nothing hidden it falls, but not
# far enough. Tensor by tensor it falls faster, and is still 28 to 50 % above the measurements. So
# *latency* that nothing hides explains a part of the fall, not all of it. When a search puts ZeRO-3
# first, look at its seconds without overlap, too, and measure. [DeepSpeed
# #3485](https://github.com/deepspeedai/DeepSpeed/issues/3485) saw the same end of scaling: 40
# machines take 4 days, 80 machines 3.
#
# ## Two more bad plans
# One bad plan forgets to recompute. Another one adds ZeRO-3 to the pipeline, whose 512
# micro-batches then gather every parameter twice each (if it is freed after every use). How long
# does a step of the second one take? (The picture of the first one has $m = 64$, as the picture of
# the three stages has, and the table above has $m = 512$, which takes 1 GB more.)

# %%
gathered = pl.exercises.guess("seconds, in place of 98", low=98, high=500, decimals=0)
gathered

# %%
forgot = pl.dry_run(model, full.replace(recompute="none"), rank=0, cluster=nodes)
bars = {
    "recomputed": peaks["first stage"],
    "nothing recomputed": forgot.peaks()["dry run"].drop("total").to_dict(),
}
view.bytes_bars(
    bars, {"an A100": nodes.memory}, title="Without recomputation the first stage does not fit"
)

# %%
import warnings

with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    greedy = pl.predict(model, plan.replace(zero_stage=3), nodes, steps=1, detail="actions")
print(heard[0].message)
gathered.reveal(greedy.step_time)

# %% [markdown]
# ## Go further: a plan with fewer days

# %%
further = pl.exercises.trillion_plan
further


# %%
### ANSWER: trillion_plan


verdict = pl.exercises.trillion_plan.check(my_plan)
verdict

# %% [markdown] tags=["solution-only"]
# **Why it works.** Selective recomputation with sequence parallelism saves most of the second
# forward. Half as many stages in two chunks each make the bubble smaller, and ZeRO-1 over twice as
# many data-parallel ranks pays for the parameters that a rank holds in addition.
#
# **Common mistakes.** A change of the global batch, which is another training; a plan that is fast
# and does not fit; wider tensor parallelism, whose sums then cross between nodes. The same plan
# with four chunks per rank has a smaller bubble still, for more messages between the stages:

# %% tags=["solution-only"]
### ANSWER: trillion_plan_other


verdict = pl.exercises.trillion_plan.check(my_plan)
verdict

# %% [markdown]
# ## Your plan trains a small GPT
# No laptop runs 3,072 ranks, but it can run most mechanisms of your plan on eight. The next cell
# keeps the other settings of both plans, this lab's and yours, and replaces the sizes: two
# stages, two tensor-parallel and two data-parallel ranks, and four micro-batches of one sample. The
# GPT has one block per chunk of the plan with more chunks. Both plans run in 32 bits, so that
# losses can be compared to the fifth digit, and ZeRO shards over all data-parallel ranks. Do both
# compute what one device computes?


# %%
import numpy as np


def on_eight(plan):
    sizes = {"dp": 2, "tp": 2, "pp": 2, "microbatches": 4, "microbatch_size": 1}
    return plan.replace(**sizes, shard=None, precision="fp32", grad_dtype=None)


ran = {}
if verdict:
    minis = {"this lab's": on_eight(plan), "yours": on_eight(pl.Plan(**my_plan()))}
    layers = 2 * max(mini.virtual_stages for mini in minis.values())
    gpt = pl.ModelSpec(layers=layers, hidden=64, heads=4, seq_len=32, attention="explicit")
    how = {"steps": 2, "progress": False}
    alone = pl.run(gpt, pl.Plan(microbatches=4, microbatch_size=2), **how)
    for name, mini in minis.items():
        try:
            ran[name] = pl.run(gpt, mini, **how)
            same = np.allclose(ran[name].losses, alone.losses, rtol=1e-5)
            print(f"{name}: losses of one device to 1e-5: {same}")
        except ValueError as error:
            print(f"{name}: cannot be reduced to these sizes: {error}")
else:
    print("write my_plan first")

# %% tags=["measured"]
title = "On eight ranks: what each plan holds at its peak"
view.memory_bars(ran, title=title) if ran else None

# %% tags=["measured"]
replayed = [report.replay(nodes) for report in ran.values()]
title = "One step of each plan: computing as long as here, messages as on A100s"
view.timelines(*replayed, labels=list(ran), ranks=[0, 4], step=1, title=title) if ran else None

# %% [markdown]
# Once your plan passes its check, the cells above show both. Seconds and bytes of eight ranks say
# little about a trillion parameters: blocks and messages are small here, so fixed costs weigh more,
# and a bucket of 4 MB holds all gradients of a rank. A plan with fewer predicted days may therefore
# be the slower one here. What the losses say is that the mechanisms of your plan together compute
# what one device computes. The timelines show its schedule, and the memory shows what it shards.
#
# ## What to remember
# 1. A rank is a program; its memory and its bytes can be read off it without running it.
# 2. $M_r \approx 16\,\Psi_r + \min(m, p-i)\,\frac{L}{p}\,S$: the first stage has the highest peak.
# 3. In this plan 95 % of what rank 0 sends is for tensor parallelism. As t is at most a node, none
#    of it leaves the node.
# 4. Say of every traffic figure which rank it is, and whether scatter/gather is in it.
# 5. ZeRO-3's bytes per device do not fall with more devices, and the number of its messages grows.
#
# | when | use |
# |---|---|
# | a plan larger than your machine | `pl.dry_run` for memory and bytes, `pl.predict` for seconds |
# | a trillion parameters | tp = node, pp across, selective recomputation, sequence parallelism |
# | the batch is large for the number of devices | ZeRO-3 |
#
# ## In PyTorch, DeepSpeed, Megatron
# In today's Megatron-LM this plan is `--tensor-model-parallel-size 8 --pipeline-model-parallel-size
# 64 --micro-batch-size 1 --global-batch-size 3072 --recompute-granularity full --recompute-method
# uniform --recompute-num-layers 1 --fp16`. (The script is of 2021, and its option
# `--activations-checkpoint-method` no longer exists.) The paper's scatter/gather went out of the
# code in 2023, when pipelines moved into Megatron-Core; its option did nothing from then on, and
# [was removed](https://github.com/NVIDIA/Megatron-LM/pull/4140) in 2026. With `--sequence-parallel`
# each rank sends its part of the tokens. DeepSpeed's [pipeline
# engine](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/pipe/engine.py)
# sends parts wherever there is tensor parallelism, unless its configuration says otherwise; its
# `estimate_zero3_model_states_mem_needs_all_live` counts model states alone (lab 06).
#
# PyTorch itself can build a part of this model on the *meta* device, on which a tensor has a shape
# and no data. Here is one block of it, PyTorch's own:

# %%
import torch
from torch.utils.flop_counter import FlopCounterMode

h, s, meta = model.hidden, model.seq_len, {"device": "meta", "dtype": torch.float16}
block = torch.nn.TransformerEncoderLayer(h, model.heads, 4 * h, 0.0, batch_first=True, **meta)
with FlopCounterMode(display=False) as counter:
    block(torch.empty(1, s, h, **meta))
flops, count = counter.get_total_flops(), sum(weight.numel() for weight in block.parameters())
print(f"forward of a block: {flops:,} FLOPs, by formula {24 * s * h**2 + 4 * s**2 * h:,}")
print(f"parameters of a block: {count:,}, by formula {12 * h**2 + 13 * h:,}")
held = pl.dry_run(model, plan, rank=1536, cluster=nodes).meta["num_params"]
print(f"rank 1536 holds {held:,}, an eighth of its two blocks is {blocks * count // plan.tp:,}")

# %% [markdown]
# The few parameters that a rank holds in addition are the norms and the biases that tensor
# parallelism replicates. The nearest thing to a whole dry run in PyTorch is
# [`FakeTensorMode`](https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html) with a
# fake process group, and this package's tests hold `pl.dry_run` against it.
#
# **On your GPUs.** Nothing here was run on one. With eight, one stage of this plan is a run:
# `pl.run(model.replace(layers=2), pl.Plan(tp=8, microbatches=4, microbatch_size=1,
# recompute="full", precision="bf16"))`. Compare its `peaks()` with those of `pl.dry_run` of the
# same plan.
#
# ## Read on
# * Narayanan et al. 2021, [PTD-P](https://arxiv.org/abs/2104.04473): sec. 3 and 4.1, tables 1 and
#   2.
# * Rajbhandari et al. 2020, [ZeRO](https://arxiv.org/abs/1910.02054), sec. 5.4 and table 1.
# * Korthikanti et al. 2022, [Reducing activation recomputation](https://arxiv.org/abs/2205.05198),
#   table 5.
# * In the package: `paralab/dry_run.py`; `paralab/programs/fold.py` and `interpret/deep.py`,
#   predictions at any scale.
