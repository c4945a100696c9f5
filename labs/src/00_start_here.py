# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Start here: one model, four processes
#
# *«I gave my training four devices. What do they say to each other, how much is it, and is it still
# the same training?»*
#
# In the next minute you train a small GPT on four real processes, see what each of them did, count
# every byte they sent, and check the result against one process. Run the cells from top to bottom
# (Shift+Enter).

# %%
import paralab as pl

model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)
print(f"{model.num_params:,} parameters, {model.num_params * 4 / 1e6:.2f} MB in fp32")

# %% [markdown]
# **Data parallelism**: every rank (one process, one device) holds the whole model and trains on its
# own quarter of the batch. So each comes out of backward with a different gradient, and all of them
# need the mean.
#
# Before you look: how many megabytes does *each rank* send per step for that? Write your guess
# down, in the code.

# %%
my_guess_mb = 3.4  # one copy of the gradients? two? four?

# %% [markdown]
# ## Run it
# Four processes start, read the source code of Python's own standard library as text, and train.

# %%
plan = pl.Plan(dp=4, microbatch_size=4, bucket_bytes=2**20)
report = pl.run(model, plan, steps=8)
report

# %% [markdown]
# ## See it
# One row per rank: what it computed, and under it what was on the wire. Grey is a rank that waits.
# Most likely your machine has fewer cores than four ranks want, and then the wall clock mostly
# shows ranks waiting for a core. So this is your run *replayed*: each piece of work takes the
# processor time it really took, on a device of its own.

# %% tags=["measured"]
report.replay().timeline()

# %% [markdown]
# The gradients leave in buckets while backward is still running (that is why backward is cut into
# pieces), so most of the traffic costs no time: only the last bucket has nothing left to hide
# behind. `report.timeline()` shows the same step on the wall clock.
#
# ## Count it
# The most economical way known to add up buffers over N ranks, a ring all-reduce, makes every rank
# send 2(N−1)/N times the buffer. Ψ is the number of parameters:

# %%
N, psi = plan.dp, model.num_params
theory_mb = 2 * (N - 1) / N * psi * 4 / 1e6

sent = report.collectives.query("phase == 'grad_sync' and step == 3 and rank == 0")
sent_mb = sent.wire_bytes.sum() / 1e6
print(f"2(N-1)/N Ψ : {theory_mb:.3f} MB per rank and step")
print(f"recorded   : {sent_mb:.3f} MB in {len(sent)} all-reduces")
print(f"your guess : {my_guess_mb:.3f} MB, {my_guess_mb / sent_mb:.1f} times what was sent")

# %% [markdown]
# Not N copies, and not even two, however many ranks there are. Who sent it to whom:

# %%
report.traffic_chart()

# %% [markdown]
# ## Is it the same training?
# One process, with the four quarters of the batch one after the other: the same samples, the same
# first weights.

# %%
alone = pl.run(model, pl.Plan(dp=1, microbatches=4, microbatch_size=4), steps=8)

gap = max(abs(a - b) for a, b in zip(alone.losses, report.losses, strict=True))
print(f"largest difference of a loss in 8 steps: below 1e-4: {gap < 1e-4}")
print(f"and it learns, the loss falls: {report.losses[-1] < report.losses[0] - 0.5}")

# %% [markdown]
# A loss curve is a weak witness, though. Adam hides gradients that are four times too large, for it
# divides by their size. Plain SGD hides nothing, so that is where paralab looks: every gradient and
# every weight.

# %%
import numpy as np

proof = {"optimizer": "sgd", "lr": 0.1, "steps": 3, "keep_state": True}
split = pl.run(model, plan, **proof)
whole = pl.run(model, pl.Plan(dp=1, microbatches=4, microbatch_size=4), **proof)

for what in ("gradients", "weights"):
    one, four = getattr(whole, what), getattr(split, what)
    worst = max(np.abs(one[name] - four[name]).max() / np.abs(one[name]).max() for name in one)
    print(f"{what}: {len(one)} tensors, equal to 1e-5 of their largest entry: {worst < 1e-5}")

# %% [markdown]
# ## What theory says about your machine
# `predict` returns the same kind of report as `run`, from formulas and a short measurement of this
# machine. Three clocks side by side, and a sentence on every gap:

# %% tags=["measured"]
pl.compare(pl.predict(model, plan), report)

# %% [markdown]
# ## Break it
# Any function runs on ranks, one from a cell too. Here each rank has a "gradient", and all four add
# them up. The mean needs one more division. Leave it out and look: four times too large, and no
# error anywhere.


# %%
def mean_gradient(divide):
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    gradient = torch.full((3,), float(rank))  # 0, 1, 2, 3: the mean is 1.5
    dist.all_reduce(gradient)  # the sum over all ranks
    if divide:
        gradient /= n
    return gradient.tolist()


print("with the division   :", pl.launch(mean_gradient, ranks=4, args=(True,))[0])
print("without the division:", pl.launch(mean_gradient, ranks=4, args=(False,))[0])

# %% [markdown]
# ## Your turn
# Change one thing at a time, guess first, then run again from «Run it»:
#
# * `dp=2` or `dp=3`: does a rank send more or less than with four?
# * `grad_sync="naive"`: one all-reduce per parameter. The same bytes; how many calls, and what does
# the timeline
#   say? (`"bucketed"` lies between the two.)
# * `data="a/folder/of/yours"`: train on your own text.
#
# **On your GPUs** the same cells run as they are: with a GPU per rank over NCCL, and the timeline
# is device time.
#
# **Read on**: `paralab/parallel/data_parallel.py` is all of it in one file. Li+ 2020,
# [PyTorch Distributed](https://arxiv.org/abs/2006.15704), sec. 3.2 is the paper; Patarasuk and Yuan
# 2009, *Bandwidth optimal all-reduce algorithms*, proves the 2(N−1)/N.
