# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 05 · ZeRO: who keeps what
#
# *«Four devices hold four copies of everything. Why can I not train a larger model on four of them
# than on one?»*
#
# Because plain data parallelism copies. After every all-reduce all ranks have the same gradients,
# make the same update and keep the same AdamW moments: the same work and the same bytes, N times.
# **ZeRO** partitions these bytes. Each of the N ranks updates only its own N-th of the parameters,
# and then every rank gathers what the others have updated. By hand, in one function:

# %%
import numpy as np
import pandas as pd

import paralab as pl
from paralab import view
from paralab.theory import zero

model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)


def by_hand(group, steps, gather=True):
    import torch
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    device = group.context.device
    gpt = pl.reference.GPT(model).to(device)
    share = {"microbatch_size": 4, "rank": group.index, "ranks": group.size, "device": device}
    flat = parameters_to_vector(gpt.parameters()).detach()  # a length that 4 divides
    own = flat.chunk(group.size)[group.index].clone()  # this rank's part of the parameters ...
    update = torch.optim.AdamW([own], lr=1e-3)  # ... and the moments of that part alone
    losses = []
    for step in range(steps):
        [(tokens, targets)] = pl.reference.batches(model, step=step, **share)
        loss = gpt(tokens, targets)
        loss.backward()
        gradients = parameters_to_vector([p.grad for p in gpt.parameters()]) / group.size
        own.grad = torch.empty_like(own)
        group.reduce_scatter(own.grad, gradients).wait()  # the sum, of the own part only
        update.step()
        if gather:
            group.all_gather(flat, own).wait()  # everybody gets everybody's part
        else:
            flat.chunk(group.size)[group.index].copy_(own)
        vector_to_parameters(flat, gpt.parameters())
        gpt.zero_grad()
        losses.append(loss.item())
    moments = sum(t.nbytes for t in update.state[own].values())
    return losses, moments, float(flat.double().sum())


traced = pl.trace(by_hand, ranks=4, args=(8,)).results
losses = np.mean([of_rank for of_rank, _, _ in traced], axis=0)
print("it learns:", losses[-1] < losses[0] - 0.5)
print(
    f"AdamW's moments on each rank: {traced[0][1] / 1e6:.2f} MB "
    f"of the {8 * model.num_params / 1e6:.2f} MB that one device needs"
)

# %% [markdown]
# An all-reduce *is* a reduce-scatter followed by an all-gather (lab 01). ZeRO only puts the
# optimizer between the two, so its first stage sends not one byte more. Two more stages follow from
# the same idea. A rank that updates only a part of the parameters needs only that part of the
# **gradients** (stage 2), and a **parameter** need not be on a rank while the rank does not use it
# (stage 3).
#
# ## Commit to a guess
# Four ranks. Data parallelism needs a certain memory at its worst moment. How much of that is left
# with all three stages?

# %%
guess = pl.exercises.guess(
    "peak memory of ZeRO-3 on 4 ranks, as a share of data parallelism's",
    low=0,
    high=100,
    unit="%",
    decimals=0,
)
guess

# %% [markdown]
# ## Run it
# Four real processes each time. The memory ledger sees every tensor of every rank come and go.

# %%
wide = pl.ModelSpec(layers=8, hidden=192, heads=4, seq_len=32, attention="explicit")
plan = pl.Plan(dp=4, microbatches=2, microbatch_size=2, bucket_bytes=2**20)
reports = {"data parallelism": pl.run(wide, plan, steps=3, progress=False)}
for stage in (1, 2, 3):
    split = plan.replace(zero_stage=stage)
    reports[f"ZeRO-{stage}"] = pl.run(wide, split, steps=3, progress=False)

# %% [markdown]
# ## See it
# One step of rank 0 under each of the four plans, on one scale. The table below it has the bytes of
# each category at the peak.

# %% tags=["measured"]
view.memory_charts(reports)

# %% tags=["measured"]
peaks = pd.DataFrame({name: report.peaks(rank=0).iloc[:, -1] for name, report in reports.items()})
(peaks / 1e6).round(2).add_suffix(" (MB)")

# %% tags=["measured"]
share = reports["ZeRO-3"].peak_memory / reports["data parallelism"].peak_memory
guess.reveal(round(100 * share))

# %% [markdown]
# At rest a rank of ZeRO-3 holds a quarter of the model states. At the worst moment it holds more,
# and the rest of the memory does not shrink with the states. People ask [what part of the memory is
# really sharded](https://github.com/huggingface/accelerate/issues/3474). Activations belong to a
# rank's own samples, and ZeRO does not touch them (lab 06). Some memory comes and goes: gradients
# on their way, and the parameters of the blocks that compute or are next.
#
# ## The stages as lists of instructions
# The runs above did not execute `by_hand`. A plan is compiled to a **program** (lab 02), a list of
# instructions for each rank, and every stage of ZeRO changes a few lines of it. The lines name the
# values that they work on. `w` is whole parameters, and `shard` is an N-th of them. `grad` is the
# rank's own gradient, and `gshard` is its N-th of the sum over the ranks; `part` is what one
# micro-batch adds to that. `x`, `g` and `saved` belong to the activations, as in lab 02, and
# `frees` says whose memory ends at a line. A bucket here is as large as the model, so there is only
# one. First data parallelism with one micro-batch, then what the first stage changes:

# %%
names = ["data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
programs = {
    name: pl.program(model, pl.Plan(dp=4, zero_stage=stage)) for stage, name in enumerate(names)
}
programs["data parallelism"]

# %%
programs["data parallelism"].diff(programs["ZeRO-1"])

# %% [markdown]
# A line with `-` is left out, a line with `+` is new, and a line with `~` (further down) is
# changed. The all-reduce has become a reduce-scatter and an all-gather, each with the same payload,
# and an all-reduce sends as much as both of them. The update stands between the two and changes
# only an N-th of the parameters.
#
# Stage 3 keeps parameters in N parts and gathers a unit only where it is needed. This model has
# six units: the embedding, four blocks and the head. How many all-gathers are there in its step?

# %%
gathers = pl.exercises.guess(
    "all-gathers in one step of ZeRO-3", low=0, high=24, unit="calls", decimals=0
)
gathers

# %%
programs["ZeRO-3"]

# %%
gathers.reveal(len(programs["ZeRO-3"].filter(op="all_gather")))

# %% [markdown]
# Read the lines of one block. Its parameters are requested while the block before it computes, they
# must have arrived at WAIT, and FORWARD frees them (`frees w`). They are gathered again before
# BACKWARD, which frees them again. Then the reduce-scatter of the gradient begins at once, and KEEP
# turns its result (`part`) into `gshard`. (The head uses the matrix of the embedding, too, so in
# forward the embedding is not freed before the head is done.) Everything in which stage 3 differs
# from stage 2:

# %%
programs["ZeRO-2"].diff(programs["ZeRO-3"])

# %% [markdown]
# Stage 3 gathers the parameters twice, before FORWARD and before BACKWARD, where stage 2 gathers
# them once, after the update. With one micro-batch it sends 3Ψ in place of 2Ψ. (Both times
# (N−1)/N, on each of the N ranks.) Every gathered copy is freed after its use.
#
# ## Three prices: memory, traffic, time
# The formulas stand next to what these runs did: bytes of model states per parameter, and elements
# sent per rank in units of Ψ, the number of parameters. The replay gives every rank a device of
# its own and all of them the same link.

# %% tags=["measured"]
STATES = ["parameters", "gradients", "optimizer"]
link = pl.Link(alpha=100e-6, bandwidth=2e9)
cluster = pl.Cluster(
    name="2 GB/s", devices_per_node=4, flops=1e11, memory_bandwidth=2e10, intra=link
)
rows = []
for stage, (name, report) in enumerate(reports.items()):
    psi, n = wide.num_params, plan.dp
    states = report.memory.query("rank == 0 and category in @STATES")
    most = states.groupby("time")["bytes"].sum().max()
    rows.append(
        {
            "": name,
            "states at most (B/parameter)": round(most / psi, 2),
            "formula": zero.bytes_per_device(1.0, n, stage, "fp32"),
            "sent (Ψ per rank)": round(report.traffic()["bytes"].mean() / 4 / psi, 2),
            "formula ": zero.elements_sent(1.0, n, stage, plan.microbatches),
            "step, replayed (ms)": round(1e3 * report.replay(cluster).step_time),
        }
    )
pd.DataFrame(rows).set_index("")

# %% [markdown]
# At its worst moment each stage of ZeRO holds more than the formula, and stage 3 clearly more in a
# model of so few blocks: whole gradients of units that have not left yet lie next to the parts that
# the rank keeps. The parameters that stage 3 has gathered come on top. The ledger counts them as
# buffers, and `report.peaks()` lists them to the byte.
#
# These runs have m = 2 micro-batches per step. With one, stages 1 and 2 send as much as data
# parallelism, and stage 3 sends half as much again, because it gathers the parameters twice, once
# for each direction. With more, the stages differ. Stage 2 cannot keep whole gradients until the
# last micro-batch, so it reduces them after each one. Stage 3 cannot keep whole parameters, so it
# gathers them for each one. Counted on two real ranks, in Ψ:

# %%
rows = []
for m in (1, 2, 4):
    row = {"m": m}
    for stage in (1, 2, 3):
        small = plan.replace(dp=2, zero_stage=stage, microbatches=m, microbatch_size=1)
        report = pl.run(model, small, steps=2, progress=False)
        volume = report.traffic()["bytes"].sum() / 4 / model.num_params
        row |= {f"ZeRO-{stage}": round(volume, 3), f"theory {stage}": zero.volume(stage, m)}
    rows.append(row)
pd.DataFrame(rows).set_index("m")

# %% [markdown]
# (Each of N ranks sends (N−1)/N of this volume. With two ranks that is one half, so both together
# send exactly the volume.)
#
# ## The paper's own numbers
# Figure 1 of the [paper](https://arxiv.org/abs/1910.02054) has a model of 7.5 billion parameters on
# 64 devices, in GB. Weights and gradients have 16 bits, and the optimizer has 12 bytes per
# parameter: the 32-bit master copy and two moments. The paper calls stages 1, 2 and 3 *Pos*,
# *Pos+g* and *Pos+g+p*: the optimizer states are partitioned, then the gradients as well, then the
# parameters as well.

# %%
figure = pd.DataFrame(
    {name: zero.stage_bytes(7.5e9, 64, stage) for stage, name in enumerate(zero.NAMES)}
)
figure.loc["in all"] = figure.sum()
(figure / 1e9).round(2).add_suffix(" (GB)")

# %% [markdown]
# Its Table 1, as printed there, has gigabytes per device for three models:

# %%
rows = {
    (f"{params / 1e9:g} B", n): {
        name: zero.as_printed(zero.bytes_per_device(params, n, stage))
        for stage, name in enumerate(zero.NAMES)
        if stage
    }
    for params in (7.5e9, 128e9, 1e12)
    for n in (1, 4, 16, 64, 256, 1024)
}
pd.DataFrame(rows).T.rename_axis(["model", "devices"])

# %% [markdown]
# Stages 1 and 2 reach a limit that more devices do not lower, because every device keeps something
# whole: parameters and gradients in stage 1 (4 bytes per parameter), the parameters alone in stage
# 2 (2 bytes). Stage 3 keeps nothing whole: on 1024 devices a trillion parameters need 15.6 GB on
# each.
#
# ## Turn the knobs
# *Run it* starts real ranks.

# %%
view.widgets.zero()

# %% [markdown]
# ## The largest model that fits
# A rank here is a virtual accelerator, and `memory_limit` gives it a memory of a fixed size. A plan
# that does not fit fails, as it would on a real device, but the error says what filled the memory:

# %% tags=["measured"]
deep = pl.ModelSpec(layers=8, hidden=256, heads=4, seq_len=64)
limit = "64MB"
try:
    pl.run(deep, pl.Plan(dp=4, microbatch_size=1), steps=2, memory_limit=limit, progress=False)
except pl.OutOfMemory as error:
    print(str(error).split("\n\n")[0])
    print(error.table)

# %% [markdown]
# How many blocks does each stage fit into 64 MB (61.035 MiB)? `peak()` of a program says how much a
# rank needs at its worst moment, by category. The largest number of blocks that it allows is then
# trained, and one block more is tried. These plans have two micro-batches, so stage 1 has to keep
# the gradients whole from one micro-batch to the next. (With one micro-batch, as in the error
# above, stages 1 and 2 need the same.)


# %% tags=["measured"]
def shares(stage):
    return pl.Plan(dp=4, microbatches=2, microbatch_size=1, zero_stage=stage, bucket_bytes=2**20)


def needs(layers, stage):
    return sum(pl.program(deep.replace(layers=layers), shares(stage)).peak().values())


def fits(layers, stage):
    try:
        pl.run(
            deep.replace(layers=layers), shares(stage), steps=1, memory_limit=limit, progress=False
        )
        return True
    except pl.OutOfMemory:
        return False


largest = {}
for stage, name in enumerate(names):
    most = max(layers for layers in range(1, 20) if needs(layers, stage) <= 64e6)
    largest[name] = {
        "blocks, by program": most,
        "parameters": deep.replace(layers=most).num_params,
        "trains": fits(most, stage),
        "one block more trains": fits(most + 1, stage),
    }
pd.DataFrame(largest).T

# %% [markdown]
# ## Nodes: not all bytes are alike
# Stage 3 sends 3Ψ for every micro-batch (there are two here), and with the ranks on two nodes more
# than half of that crosses the slow network. The remedy is to partition the states inside a node,
# where links are fast, and to keep one copy of them per node. This is hybrid sharding (HSDP);
# `shard=2` says that two ranks share one copy. Here is what is predicted for two nodes of two
# devices, by level of the network:

# %%
nodes = pl.Cluster(
    name="2 nodes of 2",
    nodes=2,
    devices_per_node=2,
    flops=1e11,
    memory_bandwidth=2e10,
    intra=pl.Link(alpha=20e-6, bandwidth=1e10),
    inter=pl.Link(alpha=100e-6, bandwidth=5e8),
)
rows = {}
for name, shard in (("ZeRO-3 over all 4", None), ("HSDP: 2 share, 2 copies", 2)):
    split = plan.replace(zero_stage=3, shard=shard, microbatches=2)
    expected = pl.predict(wide, split, nodes)
    by_level = expected.traffic(by="level").set_index("level")["bytes"] / 1e6
    rows[name] = {
        "inside a node (MB)": by_level.get("intra", 0.0),
        "between nodes (MB)": by_level.get("inter", 0.0),
        "in all (MB)": by_level.sum(),
        "step, predicted (ms)": 1e3 * expected.step_time,
        "peak memory (MB)": expected.peak_memory / 1e6,
    }
pd.DataFrame(rows).T.round(1)

# %% [markdown]
# The sum of the bytes says little about the time: it adds bytes of two links, one of them twenty
# times as fast as the other. What the step waits for is the bytes between nodes. The price of HSDP
# stands in the last column: more memory.
#
# ## Is it the same training?
# One process computes all micro-batches with plain SGD. Its gradients and weights are compared with
# those of each stage:

# %%
proof = {"optimizer": "sgd", "lr": 0.1, "steps": 3, "keep_state": True, "progress": False}
alone = pl.run(model, pl.Plan(microbatches=6), **proof)
for stage in (1, 2, 3):
    # 3 ranks: 3 does not divide the number of parameters
    split = pl.run(model, pl.Plan(dp=3, zero_stage=stage, microbatches=2), **proof)
    for what in ("gradients", "weights"):
        one, three = getattr(alone, what), getattr(split, what)
        worst = max(np.abs(one[name] - three[name]).max() / np.abs(one[name]).max() for name in one)
        print(f"ZeRO-{stage}: {what} equal to 1e-5 of their largest entry: {worst < 1e-5}")

# %% [markdown]
# ## Break it
# Leave the all-gather out. Every rank updates its part, and no rank tells the others:

# %%
broken = pl.trace(by_hand, ranks=4, args=(8, False)).results
losses = np.mean([of_rank for of_rank, _, _ in broken], axis=0)
print("it still learns:", losses[-1] < losses[0] - 0.1)
print("different weights after 8 steps, ranks:", len({total for _, _, total in broken}))
print("with the all-gather                   :", len({total for _, _, total in traced}))

# %% [markdown]
# The loss falls, and there are four different models. This is why the check above compares
# gradients and weights, and never a loss curve. The traffic would have shown the mistake as well:
# half of it is missing.
#
# ## Your turn

# %%
exercise = pl.exercises.zero_step
exercise


# %%
### ANSWER: zero_step


exercise.check(MyZero1)

# %% [markdown]
# Stuck? `exercise.hint()` gives one push at a time, `exercise.solution()` shows an answer.

# %% [markdown]
# ## On your GPUs
# The same cells run there: ranks then use NCCL, the ledger counts device memory, and `memory_limit`
# also caps the allocator. In a larger model, raise `bucket_bytes` to about 25 MiB, and look in
# `report.timeline()` whether the gathers are hidden behind the blocks that compute.
#
# ## Read on
# * Rajbhandari and others 2020, [ZeRO](https://arxiv.org/abs/1910.02054): figure 1 and table 1
#   above, sec. 7 for the traffic. Zhao and others 2023, [PyTorch
#   FSDP](https://arxiv.org/abs/2304.11277), sec. 3.2: hybrid sharding.
# * In the package: `paralab/parallel/zero.py`. Each stage is the one before it with one more line.
