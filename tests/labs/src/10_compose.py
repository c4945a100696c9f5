# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 10 · Composing: which of ten thousand plans?
#
# *«Data, tensor, pipeline, ZeRO, recomputation, micro-batches: I have eight GPUs, and nobody tells
# me the numbers. Do I have to try them all?»*
#
# Each lab so far turned one knob. They all turn at once: the axes are orthogonal, pipeline says
# *when* something computes, tensor parallelism *how* a layer is cut, ZeRO *who* keeps a state,
# recomputation *what* is remembered. Eight ranks, three axes:

# %%
import numpy as np
import pandas as pd

import paralab as pl
from paralab import view

model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64, attention="explicit")
cube = pl.Plan(dp=2, tp=2, pp=2, zero_stage=1, microbatches=4, microbatch_size=2)
view.mesh(cube, rank=0)

# %% [markdown]
# Rank 0 is a member of three groups, and each carries something else: activations to its tensor
# partner, several times per layer; gradients to its data partner, once per step; and what leaves
# its last layer to the next stage, once per micro-batch. Neighbours in rank are tensor partners:
# they have most to say to each other.
#
# Is it still the same training? Two steps of it, beside one process that does everything alone:

# %%
proof = {"steps": 2, "optimizer": "sgd", "lr": 0.1, "keep_state": True, "progress": False}
alone = pl.run(model, pl.Plan(microbatches=8, microbatch_size=2), **proof)
together = pl.run(model, cube, **proof)
for kind in ("gradients", "weights"):
    ours, theirs = getattr(together, kind), getattr(alone, kind)
    worst = max(np.abs(ours[n] - theirs[n]).max() / np.abs(theirs[n]).max() for n in theirs)
    print(f"{kind} of all {len(theirs)} parameters equal to five digits:", bool(worst < 1e-5))

# %% [markdown]
# ## Commit to a guess
# Below are a dozen ways to train this model on four ranks, sixteen samples per step. All give the
# same weights. How many times as long does the slowest of them take as the fastest?

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
print(
    len(plans),
    "plans of",
    {plan.world_size for plan in plans.values()},
    "ranks and",
    {plan.global_batch for plan in plans.values()},
    "samples",
)

# %% [markdown]
# ## Predict first, then run
# `pl.predict` knows the schedule, the bytes, and this machine's speed, measured once. Every
# prediction is made before the first process starts.

# %% tags=["measured"]
cluster = pl.Cluster.local()
expected = {name: pl.predict(model, plan, cluster) for name, plan in plans.items()}
found = {name: pl.run(model, plan, steps=4, progress=False) for name, plan in plans.items()}
replayed = {name: report.replay(cluster) for name, report in found.items()}
view.contest(expected, replayed)

# %% tags=["measured"]
took = {name: report.step_time for name, report in replayed.items()}
guess.reveal(max(took.values()) / min(took.values()))

# %% [markdown]
# What each of them pays with: time, the share of it in which ranks wait for a message, megabytes
# that a rank sends, and the peak of its memory. Nobody wins in every column.

# %% tags=["measured"]
rows = {}
for name, report in found.items():
    rows[name] = {
        "step, replayed (ms)": 1e3 * took[name],
        "predicted (ms)": 1e3 * expected[name].step_time,
        "waiting (%)": replayed[name].summary().loc["waiting", "value"] / (10 * took[name]),
        "sent per rank (MB)": report.traffic()["bytes"].mean() / 1e6,
        "peak memory (MB)": report.peak_memory / 1e6,
    }
pd.DataFrame(rows).T.sort_values("step, replayed (ms)").round(2)

# %% [markdown]
# Times come from this machine. Bytes do not: they were known beforehand.

# %%
print(
    "bytes predicted exactly, in all of them:",
    all(pl.compare(expected[name], found[name]).bytes_agree for name in plans),
)

# %% [markdown]
# Bytes alone do not decide. A pipeline of two micro-batches sends least of all and stands still for
# half of its step, as two cannot fill four stages. Tensor parallelism waits for its sums in every
# layer, and with sequence parallelism for twice as many messages. On this machine a message costs
# more by its latency than by its bytes.
#
# Where prediction and replay differ, `compare` says by how much and why. The plan with most moving
# parts:

# %% tags=["measured"]
pl.compare(expected["tp 2, pp 2, interleaved"], found["tp 2, pp 2, interleaved"])

# %% [markdown]
# ## The same plans, on other wires
# This machine has one kind of wire. A prediction takes any: four devices as fast as this one's,
# once all in one node, once on two nodes, with a hundredth of the bandwidth between them.


# %% tags=["measured"]
def nodes(count, name):
    fast, slow = pl.Link(alpha=1e-5, bandwidth=1e10), pl.Link(alpha=1e-4, bandwidth=1e8)
    return cluster.replace(
        name=name,
        nodes=count,
        devices_per_node=4 // count,
        intra=fast,
        inter=slow,
        collectives={},
        cores=None,
    )


where = {"one node": nodes(1, "one node"), "two nodes": nodes(2, "two nodes")}
rows = {
    name: {place: 1e3 * pl.predict(model, plans[name], on).step_time for place, on in where.items()}
    for name in ("dp 4", "tp 4", "dp 2, tp 2", "pp 4, 1F1B")
}
pd.DataFrame(rows).T.round(1).add_suffix(" (ms per step)")

# %% [markdown]
# What crosses the slow wire decides. `tp 4` waits for it in every layer; `dp 2, tp 2` keeps tensor
# parallelism inside a node and sends gradients across, once a step; a pipeline sends least of all.
# Tensor parallelism inside a node and the other axes across: that is Megatron's first advice. Seen
# on the mesh:

# %%
view.mesh(
    plans["tp 4"],
    where_two := pl.Cluster.preset("dgx-a100").replace(
        name="two nodes", nodes=2, devices_per_node=2
    ),
    rank=0,
)

# %%
view.mesh(plans["dp 2, tp 2"], where_two, rank=0)

# %% [markdown]
# ## Megatron's advice, tested
# PTD-P, Megatron's paper of 2021 (sec. 5.4 and 5.5), measured it on clusters. Here is its first
# experiment by prediction: a GPT of 162 billion parameters on 64 A100s in eight nodes, all 64 of
# them model-parallel. How much of it should be tensor, how much pipeline?

# %%
big = pl.ModelSpec(
    layers=32, hidden=20480, heads=128, seq_len=2048, vocab=51200, attention="explicit"
)
a100 = pl.Cluster.preset("dgx-a100", nodes=8)


def reached(plan, model=big, cluster=a100):
    report = pl.predict(model, plan, cluster, steps=1, detail="actions")
    return report.summary().loc["model FLOPs utilisation", "value"]


rows = {}
for batch in (32, 128):
    for tp in (2, 4, 8, 16, 32):
        plan = pl.Plan(
            tp=tp,
            pp=64 // tp,
            microbatches=batch,
            microbatch_size=1,
            precision="bf16",
            recompute="full",
        )
        rows.setdefault(f"tp {tp}, pp {64 // tp}", {})[f"batch {batch}"] = reached(plan)
table = pd.DataFrame(rows).T
print("best with batch 32:", table["batch 32"].idxmax(), "- with 128:", table["batch 128"].idxmax())
table.round(1).add_suffix(", MFU (%)")

# %% [markdown]
# (MFU, model FLOPs utilisation: the FLOPs that the model needs, over those that the devices could
# do. What is recomputed is not counted; the paper counts it, about a third more.)
#
# tp = 8 is a node. Beyond it every layer's all-reduces cross to other nodes, through all eight
# ports of each (its connections to other nodes) at once, and every product is cut narrower; below
# it the pipeline is so long that its bubble, (p - 1)/m of the work, eats what was saved. With the
# larger batch the bubble is small, and tp = 4 and tp = 8 come out nearly alike. (The paper's figure
# 13 has its maximum at 8 for both.)
#
# The second question is the **micro-batch**. A larger one is better for the device and worse for
# the bubble, because there are fewer of them. Better for the device, as a product has to read its
# weights, however few tokens it multiplies with them. 91 billion parameters, tp 8, pp 8:

# %%
wide = pl.ModelSpec(
    layers=32, hidden=15360, heads=128, seq_len=2048, vocab=51200, attention="explicit"
)


rows = {}
for batch in (128, 512):
    for b in (1, 2, 4, 8):
        plan = pl.Plan(
            tp=8,
            pp=8,
            microbatches=batch // b,
            microbatch_size=b,
            precision="bf16",
            recompute="full",
        )
        rows.setdefault(b, {})[f"batch {batch}"] = reached(plan, wide)
table = pd.DataFrame(rows).T.rename_axis("samples per micro-batch")
print("best with batch 128:", table["batch 128"].idxmax(), "- 512:", table["batch 512"].idxmax())
table.round(1).add_suffix(", MFU (%)")

# %% [markdown]
# At a batch of 128 eight samples per micro-batch leave 16 micro-batches for 8 stages, and the
# bubble decides; at 512 it is small, and one sample is too few: every micro-batch reads all
# weights, and adds its gradients to those before it. (In the paper's figure 16 two samples win at
# both batches.) The best two are closer to each other than a prediction is to a measurement.
#
# ## Ten thousand plans
# `plan_search` goes through every legal combination of dp, tp, pp, schedule, chunks per rank,
# micro-batches, ZeRO stage, sequence parallelism, recomputation and offload, estimates seconds and
# bytes of each from compiled programs of one block, leaves out what does not fit, and compiles and
# simulates the best. 39 billion parameters on 64 A100s:

# %% tags=["measured"]
search = pl.plan_search(pl.ModelSpec.preset("ptdp-39b"), a100, global_batch=128, precision="bf16")
search

# %%
view.pareto(search)

# %% [markdown]
# The line is what is worth discussing: who wants to be faster has to find more memory. The winner
# is ZeRO-3 across nodes, and not Megatron's advice. A prediction lets its gathers overlap
# perfectly, and no device does quite that: the column *without overlap* (`serial_s` in
# `search.table`) says how long the same step takes if nothing overlaps. A real step may be slower
# still: lab 11 has a measured one. And why do the others lose?

# %%
pd.set_option("display.max_colwidth", 200)
losers = search.losers()
losers = losers[losers["setting"].isin(["tp", "pp", "schedule", "recompute", "offload"])]
losers[["setting", "instead", "times", "fits", "why"]].round(2)

# %% [markdown]
# ## Turn all the knobs
# Drag: mesh, timeline, memory and traffic follow. What cannot be says why. *Run it* trains the plan
# on this machine and lays the replay beside the prediction.

# %%
pl.explore(model, plan=cube)

# %% [markdown]
# Without a mouse it is `view.mesh(plan)`, `pl.predict(model, plan).timeline()`, `.memory_chart()`
# and `.traffic_chart()`.
#
# ## Break it
# Ask for what cannot be, and see whether you are told why:

# %%
for settings in (
    {"tp": 3},
    {"pp": 8},
    {"pp": 2, "virtual_stages": 2, "schedule": "1f1b"},
    {"dp": 2, "zero_stage": 1, "grad_sync": "naive"},
):
    try:
        pl.run(model, pl.Plan(**settings))
    except ValueError as error:
        print(settings, "->", error, end="\n\n")

# %% [markdown]
# No process was started. Some plans are legal, and a trap. ZeRO's third stage keeps a shard of
# every parameter and gathers the rest when it is needed: for every micro-batch, there and back.

# %%
import warnings

rows = {}
for stage in (1, 3):
    trap = cube.replace(zero_stage=stage, microbatches=8, microbatch_size=1)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        report = pl.run(model, trap, steps=2, progress=False)
    sent = report.traffic(by="axis").set_index("axis")["bytes"]
    rows[f"stage {stage}"] = {axis: sent[axis] / 1e6 for axis in ("dp", "tp", "pp")}
print(heard[0].message)
pd.DataFrame(rows).T.round(2).add_suffix(" (MB, all ranks)")

# %% [markdown]
# With m micro-batches stage 1 sends twice the parameters along dp, whatever m is, and stage 3 sends
# them 3m times. It would do so without a pipeline, too; but there m may be 1, and a pipeline lives
# on a large one.
#
# ## Your turn

# %%
exercise = pl.exercises.place
exercise


# %%
### ANSWER: place


exercise.check(my_planner)

# %% [markdown]
# Stuck? `exercise.hint()` gives one push at a time, `exercise.solution()` shows an answer.

# %% [markdown]
# ## On your GPUs
# The same cells run there. `pl.Cluster.local(device="cuda")` measures your GPUs and the links
# between them; for a cluster that is not at hand take a preset, or
# `pl.Cluster.preset("dgx-a100").replace(flops=..., intra=pl.Link(...))` with figures of your own.
# On several nodes `torchrun ... -m paralab run --dp 4 --tp 8 --pp 2`
# makes the run and `pl.load` reads it. Look first at the level of each group
# (`report.traffic(by="level")`): what is between nodes should be the smallest number.
#
# ## Read on
# * Narayanan and others 2021, [PTD-P](https://arxiv.org/abs/2104.04473): sec. 3 for the model of
#   composing, sec. 5.4 and 5.5 for the experiments above.
# * In the package: `paralab/programs/compile.py`, where the axes meet, `paralab/grid.py`, the mesh,
#   `paralab/programs/search.py`. Next: [lab 11](11_trillion.ipynb).
