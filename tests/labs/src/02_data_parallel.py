# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 02 · Data parallelism
#
# **The question.** Four devices train one model together. Why is the training not four times
# faster, and is it still the same training?
#
# **You will be able to**
# * write data parallelism in plain PyTorch: bucketed, overlapped, with gradient accumulation;
# * say how many bytes every rank sends per step, and derive the number;
# * decide from a link, a device and a batch whether backward can hide the traffic;
# * show that a parallel training equals a training on one device, which a loss curve does not show.
#
# **You need** labs 00 and 01, the chain rule, and PyTorch's autograd and optimizers.
# **Minutes**: 90 to 120, half of them for the exercises.
#
# Every rank holds the whole model and trains on its own part of the batch. (`dp=4` in a plan means
# four data-parallel ranks.) One step of four real processes, drawn as on devices of their own:

# %% tags=["measured", "readme-picture"]
import paralab as pl
from paralab import view

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)
plan = pl.Plan(dp=4, microbatch_size=4, bucket_bytes=2**20)
link = pl.Link(alpha=200e-6, bandwidth=0.6e9)
devices = pl.Cluster(devices_per_node=64, flops=50e9, memory_bandwidth=10e9, intra=link)
report = pl.run(model, plan, steps=4, progress=False)
title = "Buckets of gradients leave while backward still runs"
report.replay(devices.replace(algorithm="ring")).timeline().titled(title)

# %% [markdown]
# A rank's upper row is what it computes, and its lower row is what it has in flight on the network.
# The number in a bar is its micro-batch. Grey is waiting. This is the run *replayed*: each piece of
# work takes the processor time that it took on this machine, on a device of its own, with a link of
# 0.6 GB/s. The link is that slow because the devices are: the share of a step that traffic takes
# depends on the batch, and on the speed of the devices compared with that of the link. (Here it
# also depends on this machine.) The section “Which clock” says when to use a replay.
#
# The symbols of this lab:
#
# | symbol | meaning |
# |---|---|
# | $N$ | data-parallel ranks; a rank has the number $r = 0 \dots N-1$ |
# | $m$, $b$, $s$ | micro-batches per step and rank; samples per micro-batch; tokens per sample |
# | $L$, $\ell_i$ | the loss of a batch (elsewhere $L$ is the number of blocks); of its sample $i$ |
# | $\Psi$ | parameters of the model (a count); their fp32 gradients have $4\Psi$ bytes |
# | $S$ | bytes of the tensor that is reduced |
# | $q$ | buckets: messages into which the gradients are packed |
# | $\alpha$, $\beta$ | seconds per message; seconds per byte ($1/\beta$ is the bandwidth) |
# | $T_F$, $T_B$ | time of forward and backward of a micro-batch on one rank |
# | $X$ | FLOP/s that a device reaches |
#
# ## The mean over the ranks is the gradient of the whole batch
# The loss of a batch of $Nb$ samples is the mean of the losses $\ell_i$ of its samples (for now
# each rank has a single micro-batch, $m=1$). A gradient is linear in the loss, so the sum can be
# cut into one part per rank:
#
# $$
# \nabla L \;=\; \frac{1}{Nb}\sum_{i=1}^{Nb}\nabla \ell_i
# \;=\; \frac1N\sum_{r=0}^{N-1}\Big(\frac1b\sum_{i\,\in\,\text{rank }r}\nabla\ell_i\Big)
# \;=\; \frac1N\sum_{r=0}^{N-1} g_r .
# $$
#
# The bracket $g_r$ is what `loss.backward()` leaves on rank $r$. So each rank runs forward and
# backward on its own samples, all ranks replace their gradients by the mean over the ranks, and
# then every rank makes the same update. Ranks that begin with equal weights keep equal weights. The
# second equality needs the same number $b$ on all ranks. If one rank has fewer samples (or fewer
# tokens in its loss), the mean of the means differs from the mean over all samples.
#
# ### Exercise 1 (warm-up)
# Write the function that replaces each gradient by its mean over the ranks. In this exercise and
# the next one the process group is initialised, and answers are plain PyTorch:
# `import torch.distributed as dist` is all they need.

# %%
warm_up = pl.exercises.average_gradients
warm_up


# %%
### ANSWER: average_gradients


pl.exercises.average_gradients.check(average_gradients)

# %% [markdown]
# `warm_up.hint()` gives one hint at a time, and `warm_up.solution()` shows an answer.

# %% [markdown] tags=["solution-only"]
# Why it works: an all-reduce leaves the sum on every rank, and the mean is the sum divided by N.
# The common mistakes are a sum that is not divided (all gradients are N times too large), a
# division by a constant instead of `dist.get_world_size()`, and a call that is started with
# `async_op=True` and never waited for.
#
# ## A second answer: one message
# All gradients are copied into one flat tensor, which is reduced in a single call and copied back.
# It costs a second copy of the gradients and saves all latencies but one.


# %% tags=["solution-only"]
### ANSWER: average_gradients_other


pl.exercises.average_gradients.check(average_in_one_message)

# %% [markdown]
# ## A rank sends less than two copies of the gradients
# How much does a rank send over the network in one step?

# %%
print(f"{model.num_params:,} parameters: {4 * model.num_params / 1e6:.2f} MB of fp32 gradients")
guess = pl.exercises.guess("MB that each of 4 ranks sends per step", low=0, high=16, unit="MB")
guess

# %% [markdown]
# An all-reduce on a ring (lab 01) has two halves. The tensor is cut into N chunks. In the
# reduce-scatter a rank sends one chunk in each of N−1 steps, after which it holds the complete sum
# of one chunk. In the all-gather it sends a complete chunk in each of another N−1 steps:

# %%
view.ring(4)

# %% [markdown]
# $$
# \underbrace{(N-1)\,\frac SN}_{\text{reduce-scatter}}
# + \underbrace{(N-1)\,\frac SN}_{\text{all-gather}}
# \;=\; 2\,\frac{N-1}{N}\,S, \qquad S = 4\Psi \text{ bytes.}
# $$
#
# The next cell evaluates this formula for several N. Next to it stands the ledger of real runs: it
# records every all-reduce that was called, and charges each with the bytes that a ring sends for
# its payload (lab 01 has the kernel's counter). So the comparison checks which calls were made and
# how large they were.

# %%
import pandas as pd

rows = {}
for n in (1, 2, 3, 4, 64, 1024):
    rows[n] = {"by formula (MB)": 2 * (n - 1) / n * 4 * model.num_params / 1e6}
    if n <= 4:
        counted = report if n == 4 else pl.run(model, plan.replace(dp=n), steps=1, progress=False)
        rows[n]["counted (MB)"] = counted.traffic()["bytes"].max() / 1e6
pd.DataFrame(rows).T.rename_axis("ranks").round(3)

# %%
guess.reveal(round(report.traffic()["bytes"][0] / 1e6, 1))

# %% [markdown]
# The volume per rank stays below two copies of the gradients ($2S$), however many ranks there are.
# The number of messages grows without bound: an all-reduce on a ring has 2(N−1) steps, each of
# which costs the latency α.
#
# ## Three programs that send the same bytes
# A plan is compiled to a *program*: the list of all instructions of a rank. Here is the program of
# a step in which the gradients are not summed at all. `mb 0` is the first micro-batch (here the
# only one), `frees` names the values that no later line uses, and `×` stands for several
# lines. A block in which a bucket ends is cut into two lines there. The checks of the program
# refuse it, and say what is missing:

# %%
unsummed = pl.program(model, plan.replace(grad_sync=None))
unsummed

# %% [markdown]
# `grad_sync="bucketed"` adds an all-reduce for each of the four buckets (and four waits, which the
# comparison leaves out). `bucket_bytes` decides how many buckets there are: a bucket is closed as
# soon as it holds that many bytes.

# %%
unsummed.diff(pl.program(model, plan.replace(grad_sync="bucketed")))

# %% [markdown]
# The three forms differ in the place and the number of these lines:
#
# * **naive**: when backward is over, one all-reduce per parameter, each waited for before the next;
# * **bucketed**: when backward is over, one all-reduce per bucket;
# * **overlapped**: the all-reduce of a bucket starts as soon as backward has completed it.
#
# In the overlapped form an all-reduce cannot start before the gradients of its bucket are complete.
# The last line of the listing of `unsummed` says where that is for bucket 0. After which position
# may the all-reduce of bucket 3 start, at the earliest?

# %%
first = pl.exercises.guess("first position for the sum of bucket 3", low=0, high=21, decimals=0)
first

# %%
from paralab.programs import completed

for position, buckets in sorted(completed(unsummed.code).items()):
    print(f"after position {position} the gradients of buckets {buckets} are complete")
first.reveal(position)

# %% [markdown]
# Bucket 3 holds the token embedding, and the backward pass reaches the embedding last. No backward
# is left to hide this bucket: every form has to wait for the last one. Backward runs through the
# model from the head to the embedding, so buckets are filled in this order, too.
#
# Below are the three forms on the same devices, one step of rank 0 each. Before that: the model has
# two embeddings, four blocks and a last norm, and every weight and every bias is a parameter of its
# own. How many all-reduces does the naive form start in a step?

# %%
calls_guess = pl.exercises.guess("all-reduces per step, naive form", low=0, high=100, decimals=0)
calls_guess

# %% tags=["measured"]
ring = devices.replace(name="0.6 GB/s", algorithm="ring")
forms = {
    form: pl.run(model, plan.replace(grad_sync=form), steps=3, progress=False)
    for form in ("naive", "bucketed")
}
forms["overlapped"] = report  # the plan of the first run has this form
replays = {form: run.replay(ring) for form, run in forms.items()}
title = "Buckets that leave during backward hide part of what they send"
view.timelines(*replays.values(), labels=list(replays), ranks=[0], title=title)

# %%
by_form = {}
for form, run in forms.items():
    calls = run.collectives.query("step == 2 and rank == 0 and phase == 'grad_sync'")
    by_form[form] = {"all-reduces per step": len(calls), "MB sent": calls.wire_bytes.sum() / 1e6}
pd.DataFrame(by_form).T.round(3)

# %%
calls_guess.reveal(by_form["naive"]["all-reduces per step"])

# %% [markdown]
# A block has 12 parameters: its two norms, the two layers of attention and the two of the MLP have
# a weight and a bias each. With the embeddings and the last norm these are $4 \cdot 12 + 4 = 52$.
#
# One all-reduce of $S$ bytes on a ring takes $2(N-1)\alpha + 2\frac{N-1}{N}S\beta$. Added up over
# the $q$ messages of a step, with $T_{\text{net}}$ for the time that the network is busy:
#
# $$
# T_{\text{net}} = 2(N-1)\,q\alpha + 2\,\frac{N-1}{N}\,4\Psi\beta ,
# \qquad
# T_{\text{bucketed}} = T_F + T_B + T_{\text{net}} ,
# $$
#
# $$
# T_{\text{overlapped}} \approx
# T_F + \max(T_B + T_{\text{tail}},\; T_{\text{first}} + T_{\text{net}}) .
# $$
#
# $T_{\text{first}}$ is backward's time until the first bucket is complete, $T_{\text{tail}}$ the
# time of the buckets that are complete only when backward is (nearly) over: here buckets 2 and 3.
# If backward is the slower one, the network has only these left to send when backward ends (the
# first term). If the network is, it is never idle once the first bucket is complete (the second).
# Naive and bucketed have the same formula; naive has a much larger $q$. (The optimizer's time,
# 2.3 ms in the predictions below, is left out. Where some buckets are updated while others are in
# flight, most of it is hidden.)

# %%
N, bytes_ = 4, 4 * model.num_params
for form, q in (("naive", 52), ("overlapped", 4)):
    net = 2 * (N - 1) * q * link.alpha + 2 * (N - 1) / N * bytes_ / link.bandwidth
    expected = pl.predict(model, plan.replace(grad_sync=form), cluster=ring)
    busy = expected.summary()["value"]["communication in flight"]
    print(f"{form:<10} q = {q:2}: formula {1e3 * net:5.2f} ms, predicted {busy:5.2f} ms")

# %% [markdown]
# `pl.predict` takes the speed of the devices from the cluster (50 GFLOP/s), not from this machine,
# so its backward differs from the replay's; compare predictions only with predictions.
#
# ## Small buckets pay latency, large buckets start late
# What does the step time do if the gradients are packed into a single bucket?

# %%
why = pl.exercises.choose(
    "One bucket for the whole model instead of four:",
    [
        "the step gets faster, because latency is paid once",
        "the step gets slower, because nothing can be sent before backward is over",
        "the step takes as long as before, because the bytes are the same",
    ],
)
why

# %%
sizes = {"64 KiB": 2**16, "1 MiB": 2**20, "all in one": 2**23}
predicted = {
    name: pl.predict(model, plan.replace(bucket_bytes=size), cluster=ring)
    for name, size in sizes.items()
}
title = "Small buckets pay latency, a single one starts when backward is over"
view.timelines(*predicted.values(), labels=list(predicted), ranks=[0], title=title)

# %%
for name, expected in predicted.items():
    waits = expected.summary()["value"]["waiting"]
    print(f"{name:>10}: step {1e3 * expected.step_time:4.1f} ms, of it waiting {waits:4.1f} ms")
why.reveal(2, "A bucket is sent when its last gradient is complete, which is when backward ends.")

# %% [markdown]
# Small buckets pay the latency $2(N-1)\alpha$ too often, and the network cannot keep up with
# backward. One bucket starts too late. DDP's `bucket_cap_mb=25` is this number for GPUs. Look for
# the best size with the slider; *Run it* starts real ranks. (The widget starts with this machine's
# own link and speed.)

# %%
view.widgets.data_parallel(model, plan)

# %% [markdown]
# ## Overlap works while backward takes longer than the network
# The overlapped form hides all traffic but that of the last buckets if the first of the two terms
# under the maximum is the larger one:
#
# $$ T_B + T_{\text{tail}} \;\ge\; T_{\text{first}} + T_{\text{net}} . $$
#
# $T_{\text{first}}$ is a share $f$ of $T_B$, and $T_{\text{tail}}$ is a share $t$ of
# $T_{\text{net}}$, so this is $(1-f)\,T_B \ge (1-t)\,T_{\text{net}}$. Where $f \le t$, it is
# enough that
#
# $$ T_B \;\ge\; T_{\text{net}} . $$
#
# The next cell prints $f$ and $t$ of our model, from the prediction with buckets of 1 MiB.
#
# Backward takes about $4$ FLOPs per parameter and token ($2$ for the gradient of the input, $2$ for
# that of the weight; lab 00), so $T_B \approx 4\Psi\,bs/X$ with $bs$ tokens per rank. (This counts
# the matrix products with weights; attention takes some time more.) Insert this and solve for the
# tokens:
#
# $$
# bs \;\ge\; \frac{X}{4\Psi}\Big(2(N-1)q\alpha + 2\,\frac{N-1}{N}\,4\Psi\beta\Big)
# \;\xrightarrow{\;\alpha \to 0\;}\; 2\,\frac{N-1}{N}\,\beta X .
# $$
#
# Without latency the size of the model cancels, because each parameter means 4 bytes of gradient
# and 4 FLOPs of backward per token: what counts is tokens per rank, the bandwidth, and the speed of
# the device. How many samples per rank (of 64 tokens each) are enough to hide the traffic of our
# devices? Use the formula with latency, with $q = 4$.

# %%
one_step = "rank == 0 and step == 1 and kind in ('backward', 'comm')"
spans = predicted["1 MiB"].spans.query(one_step).eval("took = end - start")
backward, network = (spans[spans.kind == kind].took for kind in ("backward", "comm"))
print(f"f = {backward.iloc[0] / backward.sum():.2f}, t = {network[-2:].sum() / network.sum():.2f}")
enough = pl.exercises.guess("samples per rank that hide the traffic", low=1, high=16, decimals=0)
enough

# %%
import math

X, alpha, beta = devices.flops, link.alpha, 1 / link.bandwidth
net = 2 * (N - 1) * 4 * alpha + 2 * (N - 1) / N * bytes_ * beta
tokens = X / (4 * model.num_params) * net
print(f"enough: {tokens:.0f} tokens per rank, {tokens / model.seq_len:.1f} samples")
print(f"without latency: {2 * (N - 1) / N * beta * X:.0f} tokens")
h100 = 2 * (1023 / 1024) * 400e12 / 50e9
print(f"1,024 GPUs with 400 TFLOP/s and 50 GB/s each: {h100:,.0f} tokens per GPU")
enough.reveal(math.ceil(tokens / model.seq_len))

# %% [markdown]
# (The last line is for fp32 gradients and leaves out latency, which grows with N on a ring. 16-bit
# gradients need half as many tokens.) The prediction of whole steps agrees. From that number of
# samples on, the rank waits only for the two buckets that complete last, and more samples hardly
# shorten the time that it waits. (The condition is enough, and not necessary: with the $f$ and $t$
# printed above, $T_B \ge 0.88\,T_{\text{net}}$ will do, which three samples fulfil.)

# %%
rows = {}
for b in (1, 2, 3, 4, 8, 16):
    summary = pl.predict(model, plan.replace(microbatch_size=b), cluster=ring).summary()["value"]
    rows[b] = {
        "tokens per rank": b * model.seq_len,
        "condition holds": b * model.seq_len >= tokens,
        "waiting (ms)": round(summary["waiting"], 1),
    }
pd.DataFrame(rows).T.rename_axis("samples per rank")

# %% [markdown]
# ## Accumulation: synchronise once per step, not once per micro-batch
# A batch that does not fit is computed in $m$ micro-batches whose gradients add up. The mean over
# all of them needs a division by $m$, too:
#
# $$ \nabla L = \frac1N\sum_{r}\;\frac1m\sum_{k=1}^{m} g_{r,k} . $$
#
# The sum over $k$ stays on the rank, so the ranks have to reduce it only once. PyTorch's
# `DistributedDataParallel` (DDP) has a context manager for this, `no_sync()`, under which forward
# and backward of the first $m-1$ micro-batches are to run. Above a rank sent 5.0 MB per step. How
# much does it send with four micro-batches of one sample each and without `no_sync()`?

# %%
unsynced = pl.exercises.guess(
    "MB per rank and step, m = 4, no_sync() not used", low=0, high=40, unit="MB"
)
unsynced

# %% [markdown]
# Here DDP is observed, on the reference GPT:


# %%
def torch_ddp(m, quiet, bucket_cap_mb=1):
    import contextlib

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, ranks = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(pl.reference.GPT(model), bucket_cap_mb=bucket_cap_mb)
    update, losses = pl.reference.optimizer(ddp.parameters(), "sgd", 0.1), []
    for step in range(3):
        share = {"rank": rank, "ranks": ranks, "microbatches": m, "microbatch_size": 4 // m}
        for k, (tokens, targets) in enumerate(pl.reference.batches(model, step=step, **share)):
            last = k == m - 1
            with ddp.no_sync() if quiet and not last else contextlib.nullcontext():
                loss = ddp(tokens, targets)
                (loss / m).backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


sent = {}
for quiet in (False, True):
    seen = pl.observe(torch_ddp, ranks=4, args=(4, quiet), memory_steps=0)
    sent[quiet] = seen.traffic()["bytes"].max() / 1e6
    words = "used" if quiet else "not used"
    print(f"m = 4, no_sync {words}: {sent[quiet]:6.3f} MB per rank and step")

# %%
unsynced.reveal(sent[False])

# %% [markdown]
# A wrapper that reduces after every backward sends $m$ times as much. DDP does that unless forward
# and backward of the first $m-1$ micro-batches run under `no_sync()`. It looks at the setting in
# the forward, so a backward alone inside `no_sync()` sends everything, without an error.
#
# What accumulation costs is overlap: only the last micro-batch's backward can hide the traffic, so
# in the condition for overlap $b$ is the size of one micro-batch. With four micro-batches of one
# sample a rank waits as long as with one sample in all: 7.5 ms by the table above, in place of the
# 3.1 ms of a micro-batch of four.
#
# ### Exercise 2 (implement): DDP
# PyTorch does not know beforehand in which order backward completes the gradients. DDP therefore
# registers a hook for every parameter, and autograd calls the hook when the gradient of this
# parameter is complete. Write the wrapper that these hooks drive. The checker trains the reference
# GPT with your class, compares gradients and weights with one process, counts bytes, and computes
# the time of a step from the order of your calls and given costs. Only buckets *and* overlap
# together are fast enough.

# %%
exercise = pl.exercises.my_ddp
exercise


# %%
### ANSWER: my_ddp


verdict = pl.exercises.my_ddp.check(MyDDP)
verdict

# %% [markdown]
# `exercise.hint()` gives one hint at a time, and `exercise.solution()` shows an answer.

# %% [markdown] tags=["solution-only"]
# Why it works: `dist.all_reduce(..., async_op=True)` returns at once, so the network carries one
# bucket while backward fills the next. The hook of the parameter that fills a bucket is the first
# moment at which the bucket may be sent. Nothing reads a bucket before `finish()` has waited for
# it.
#
# Common mistakes, with what the checker says:
# * the last bucket is never full, so it is never sent (“embedding.token.weight,
#   element (0, 0): …”);
# * `wait()` in the hook: “backward is idle while the rank waits for a message”;
# * buckets that are sent in `finish()`: “nothing is sent before backward is over”;
# * the weights of rank 0 are not broadcast, and ranks that begin differently stay different;
# * under `no_sync()` the hooks still fill buckets, so gradients are sent once per micro-batch;
# * a list that keeps the buckets of the step before.
#
# ## A second answer: gradients that are views of their bucket
# Parameters are assigned to buckets once, in the reverse order of registration, and every bucket
# has a buffer that lasts. `parameter.grad` is a view of this buffer, so nothing is unpacked after
# the sum; each gradient is copied into the bucket when it is complete. (With
# `zero_grad(set_to_none=False)` backward would add into the bucket and the copy would vanish.) DDP
# does the same with `gradient_as_bucket_view=True`.


# %% tags=["solution-only"]
### ANSWER: my_ddp_other


pl.exercises.my_ddp.check(BucketViews)

# %% [markdown]
# ## Your own DDP trains the GPT
# The cells behind the next question train the reference GPT on four ranks with your class,
# observed like DDP above, and compare it with DDP and with the library's program of the same plan.
# (They wait until your class passes its check.) The buckets of both have 1 MiB, and the gradients
# 3.34 MB. Which of the two needs more memory at its peak?

# %%
higher = pl.exercises.choose(
    "The peak of memory, of DDP and of the library's program:",
    ["DDP's is higher", "the program's is higher", "they are equal"],
)
higher


# %%
def train(wrap, m=1):
    import contextlib

    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    gpt = pl.reference.GPT(model)
    ddp, losses = wrap(gpt, bucket_bytes=2**20), []
    update = pl.reference.optimizer(gpt.parameters(), "sgd", 0.1)
    for step in range(3):
        share = {"rank": rank, "ranks": ranks, "microbatches": m, "microbatch_size": 4 // m}
        for k, (tokens, targets) in enumerate(pl.reference.batches(model, step=step, **share)):
            with ddp.no_sync() if k < m - 1 else contextlib.nullcontext():
                loss = ddp(tokens, targets)
                (loss / m).backward()
        ddp.finish()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


# %%
# runs once MyDDP passes its check
if verdict.passed:
    mine = pl.observe(train, ranks=4, args=(MyDDP,))
    torchs = pl.observe(torch_ddp, ranks=4, args=(1, False))
    ours = pl.run(model, plan, steps=3, optimizer="sgd", lr=0.1, progress=False)
    three = {"yours": mine, "torch's DDP": torchs, "the program": ours}
    for name, one in three.items():
        calls = one.collectives.query("rank == 0 and step == 2")
        volume = calls.wire_bytes.sum() / 1e6
        print(f"{name:<12} {len(calls)} calls, {volume:.3f} MB, last loss {one.losses[-1]:.4f}")
else:
    print("write MyDDP first")

# %% tags=["measured"]
# draws the memory of a step, once MyDDP passes its check
if verdict.passed:
    memory = view.memory_charts(three, title="DDP's buckets are there at its peak, and add to it")
memory if verdict.passed else print("write MyDDP first")

# %%
higher.reveal(1, "DDP's buckets are there all the time, and hold as many bytes as the gradients.")

# %% tags=["measured"]
# draws a step of rank 0, once MyDDP passes its check
if verdict.passed:
    title = "All three send buckets while backward is still running"
    steps = view.timelines(*three.values(), labels=list(three), step=2, ranks=[0], title=title)
steps if verdict.passed else print("write MyDDP first")

# %% [markdown]
# All three send the same bytes and arrive at the same loss. (Counts and timeline are of step 2: in
# step 0 DDP sums all gradients in one message, and sees in which order they are complete; in step 1
# rank 0 broadcasts the new buckets to all ranks.) They differ in memory. DDP's buckets (violet,
# among the *buffers*) are there during the whole step, so they add to its peak. (The picture has
# DDP's step 1, in which it replaces its buckets: hence the notch.) A wrapper that makes a bucket
# when it is full has no bucket at the peak, which is at the start of backward. The program knows
# the optimizer, too: it updates the parameters of a bucket as soon as the sum has arrived, and
# frees these gradients (`frees grad` in the listing above). At the peak the program may hold more
# than yours, because it allocates the gradients of a whole bucket at once. (The picture of the
# steps has the wall clock of this machine, on which ranks also wait for a core: look at the order
# of things in it, not at their lengths.)
#
# ## Is it the same training?
# Leave out the division by N, so that every gradient is N times too large. The function below is
# data parallelism after exercise 1, with the division as an option.


# %%
def by_hand(optimizer, lr, divide):
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    gpt, losses = pl.reference.GPT(model.replace(layers=1)), []  # one block shows it, too
    update = pl.reference.optimizer(gpt.parameters(), optimizer, lr)
    for step in range(8):
        share = {"rank": rank, "ranks": ranks, "microbatch_size": 4}
        [(tokens, targets)] = pl.reference.batches(model, step=step, **share)
        loss = gpt(tokens, targets)
        loss.backward()
        for parameter in gpt.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks if divide else 1
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


choice = pl.exercises.choose(
    "Without the division, the loss curve of AdamW:",
    ["diverges", "looks the same", "falls four times as fast"],
)
choice

# %% tags=["measured"]
curves = {}
for optimizer, lr in (("adamw", 1e-3), ("sgd", 0.1)):
    for divide, words in ((True, ""), (False, ", not divided")):
        seen = pl.observe(by_hand, ranks=4, args=(optimizer, lr, divide), memory_steps=0)
        curves[f"{optimizer}{words}"] = seen.losses
view.losses(curves, title="AdamW hides a gradient that is four times too large, SGD does not")

# %%
choice.reveal(2, "Adam divides by the size of the gradient, so a constant factor cancels.")

# %% [markdown]
# Adam's update is $-\eta\,\hat m/(\sqrt{\hat v}+\epsilon)$, where $\hat m$ and $\hat v$ are means
# of the gradient and of its square over the steps (lab 00). If every gradient is multiplied by a
# number $c > 0$, then both $\hat m$ and $\sqrt{\hat v}$ are multiplied by $c$, and their quotient
# stays the same, but for the small $\epsilon$. The mistake shows with an optimizer whose update is
# proportional to the gradient, such as SGD, and where a clipping threshold lies between the true
# norm and the one that is too large. (Where both are above the threshold, clipping hides the
# factor, too.) So a loss curve does not show that the gradients are right; a comparison with one
# process does. The comparison uses SGD. One process computes the four quarters of the batch one
# after the other:

# %%
import numpy as np

proof = {"optimizer": "sgd", "lr": 0.1, "steps": 3, "keep_state": True, "progress": False}
split = pl.run(model, plan, **proof)
alone = pl.run(model, pl.Plan(microbatches=4, microbatch_size=4), **proof)
for what in ("gradients", "weights"):
    one, four = getattr(alone, what), getattr(split, what)
    worst = max(np.abs(one[name] - four[name]).max() / np.abs(one[name]).max() for name in one)
    print(f"{what}: {len(one)} tensors, equal to 1e-5 of their largest entry: {worst < 1e-5}")

# %% [markdown]
# ## Every call has a purpose
# [TraceML #145](https://github.com/traceopt-ai/traceml/issues/145) asks for collectives summed up
# by operation, process group and phase, with their overlap, and [DeepSpeed
# #7403](https://github.com/deepspeedai/DeepSpeed/issues/7403) for the raw data of every call
# instead of a printed sum. `collectives` of a report has one row per call, rank and step; of your
# own PyTorch program, `pl.observe` returns the same table.
#
# The next plan combines data parallelism (`dp=2`) with tensor parallelism (`tp=2`: each linear
# layer is split over two ranks, lab 07, so a rank holds about half of the parameters). How many
# bytes does a rank now send for the gradients, compared with 5.0 MB under `dp=4`?

# %%
halved = pl.exercises.guess("MB for the gradients, dp=2 and tp=2", low=0, high=6, unit="MB")
halved

# %%
both = pl.run(model, pl.Plan(dp=2, tp=2, microbatch_size=4), steps=2, clip_norm=1.0, progress=False)
hybrid_calls = both.collectives.query("step == 1 and rank == 0")
by = ["axis", "phase", "op", "payload_bytes"]
hybrid_calls.groupby(by).agg(calls=("call", "count"), sent=("wire_bytes", "sum"))

# %%
halved.reveal(round(hybrid_calls.query("phase == 'grad_sync'")["wire_bytes"].sum() / 1e6, 1))

# %% [markdown]
# With two data-parallel ranks $2(N-1)/N$ is 1, so a rank sends its half of the gradients once. In
# the table `axis` is the process group, `phase` the purpose, `payload_bytes` the size of the
# tensor, and `sent` what the rank sends for it. The sizes do not depend on the machine. [torchtitan
# #1369](https://github.com/pytorch/torchtitan/issues/1369) finds all-reduces of a single element in
# an NCCL log of tensor parallelism, and asks what they are for. Here the call of 4 bytes is of that
# kind: one number, a rank's part of the gradient norm, which clipping needs. (Whether the calls in
# that log are for a norm or for a logged loss, the log does not say: a log has sizes and no
# purposes.) The next cell lists the calls of our first run (dp=4), with the time of each call and
# its bandwidth. Above the table it prints the share of all their time that is hidden behind
# computation:

# %% tags=["measured"]
replayed = report.replay(ring)
calls = replayed.collectives.query("step == 2 and rank == 0")[["op", "phase", "wire_bytes"]]
calls["ms"] = replayed.collectives.eval("1e3 * (end - start)")
calls["MB/s"] = calls.wire_bytes / calls.ms / 1e3
hidden = replayed.summary()["value"]["of it hidden behind compute"]
print(f"hidden behind compute: {hidden:.0f} %")
calls.round(2)

# %% [markdown]
# No call reaches the bandwidth of the link: each pays $2(N-1)\alpha$ of latency, and for the small
# one that is most of its time.
#
# ## Weak scaling keeps more of its efficiency, strong scaling loses it when b gets small
# With $T(N)$ the time of a step on N ranks:
#
# $$
# E_{\text{weak}} = \frac{T(1)}{T(N)} \ \ (b \text{ fixed}), \qquad
# E_{\text{strong}} = \frac{T(1)}{N\,T(N)} \ \ (N b \text{ fixed}).
# $$
#
# Under strong scaling $b$ falls with N, and the condition of the section on overlap fails sooner
# or later. Under weak scaling $b$ stays, but on a ring the latency of each bucket, $2(N-1)\alpha$,
# grows with N. By the formula the last two buckets, which no backward hides, take 2.8 ms for N = 2,
# 5.5 ms for N = 4, and 9.2 ms for N = 8. The update of the other buckets hides some 2 ms of that;
# the rest is what weak scaling loses here. For a still larger N the condition fails, too. The
# prediction for these devices:

# %%
rows = []
for form, batch in (("weak", lambda n: 4), ("strong", lambda n: 16 // n)):
    for n in (1, 2, 4, 8):
        scaled = plan.replace(dp=n, microbatch_size=batch(n))
        step = pl.predict(model, scaled, cluster=ring).step_time
        row = {"form": form, "ranks": n, "clock": "predicted", "step_time": step}
        rows.append(row | {"samples": scaled.global_batch})
view.scaling(rows)

# %% [markdown]
# At N = 4 both have b = 4, so both have the same point there. (At N = 2 strong scaling even has the
# larger $b$, 8 in place of 4.) Weak scaling has another price: a
# larger global batch. Beyond the *critical batch size* of a task (McCandlish and others, below)
# more samples per step hardly save steps.
#
# ## Which clock answers which question
# `pl.predict` returns the same kind of report as `pl.run`, from formulas and the numbers of a
# cluster; without one, of this machine, measured once. `pl.compare` puts three clocks next to each
# other and explains each gap. Before you read it:

# %%
clock = pl.exercises.choose(
    "Suppose your machine has fewer cores than ranks. Which clock says what four devices would do "
    "with the work of this run?",
    ["the wall clock", "the replay", "the prediction"],
)
clock

# %% tags=["measured"]
pl.compare(pl.predict(model, plan), report)

# %%
clock.reveal(2, "It has the work of this run, and none of the wall clock's waiting for a core.")

# %% [markdown]
# * *What would four devices do?* The replay says it, from the work that this run really did.
# * *What did this machine do?* The wall clock says it. It includes waiting for a processor core:
#   gloo's threads need cores, too, so do not read an efficiency from it, even with a core per rank.
# * *What will a machine do that I do not have?* The prediction says it, and the comparison above
#   says how far to trust it.
#
# ### Exercise 3 (go further): the same as a pass
# A function that takes a program and returns a changed program is called a *pass*. The three forms
# of this lab are passes of a few lines each. Write one yourself. It is checked, run and predicted
# like the built-in ones.

# %%
further = pl.exercises.sync_pass
further


# %%
### ANSWER: sync_pass


pl.exercises.sync_pass.check(my_pass)

# %% [markdown] tags=["solution-only"]
# Why it works: the program already says where each gradient is complete, and `all_reduce` only
# starts the sum; the library derives a `WAIT` before the `UPDATE` that needs it. Common mistakes
# are a bucket that is never summed, sums after each micro-batch, all sums after backward, and a
# `wait` after each call.
#
# ## A second answer: two halves
# An all-reduce is a reduce-scatter followed by an all-gather. If both stood at the same place, the
# rank would wait for the first before it could start the second. So each all-gather is placed one
# bucket later.


# %% tags=["solution-only"]
### ANSWER: sync_pass_other


pl.exercises.sync_pass.check(in_halves)

# %% [markdown]
# ## What to remember
# 1. The gradient of a batch is the mean of the gradients of its equally large parts. In a step data
#    parallelism has to communicate this mean only.
# 2. With a ring all-reduce, once per step, a rank sends less than two copies of the gradients,
#    however many ranks there are.
# 3. Buckets save latency, overlap hides bytes, and no backward is left to hide the last bucket.
# 4. Overlap hides the traffic while the last micro-batch's backward takes longer than the network;
#    that depends on the tokens of a micro-batch.
# 5. A loss curve under Adam does not show that gradients are right; a comparison with one process
#    does.
#
# $$
# \text{bytes per rank} = 2\,\frac{N-1}{N}\,4\Psi,
# \qquad
# bs \;\ge\; \frac{X}{4\Psi}\Big(2(N-1)q\alpha + 2\,\frac{N-1}{N}\,4\Psi\beta\Big),
# \qquad
# \nabla L = \frac{1}{Nm}\sum_{r,k} g_{r,k}.
# $$
#
# | situation | use |
# |---|---|
# | the model and its optimizer fit on one device | data parallelism, overlapped |
# | the batch does not fit | accumulation with `no_sync()` |
# | the optimizer states do not fit | ZeRO (lab 05) |
# | too few tokens to hide the traffic | larger $b$, more micro-batches, or 16-bit gradients |
#
# ## In PyTorch, DeepSpeed, Megatron
# The class of exercise 2 is called `DistributedDataParallel` in PyTorch. It was observed above, and
# what this lab's numbers say about its options is:
#
# ```python
# ddp = DistributedDataParallel(
#     gpt,
#     bucket_cap_mb=25,  # MiB per bucket; left out, it is 25, but 1 for the first bucket
#     gradient_as_bucket_view=True,  # no second copy of the gradients
# )
# with ddp.no_sync():  # accumulation: no traffic in the first m - 1 micro-batches
#     (ddp(tokens, targets) / m).backward()  # forward and backward; the last ones run outside
# ```
#
# Does a larger bucket change what DDP does here? The gradients have 3.34 MB, and the 25 is written
# down, so that it holds for the first bucket, too.

# %%
whole = pl.exercises.guess("all-reduces of a step with bucket_cap_mb=25", low=0, high=8, decimals=0)
whole

# %%
for cap in (1, None, 25):  # None: left out
    seen = pl.observe(torch_ddp, ranks=4, args=(1, False, cap), memory_steps=0)
    sizes = seen.collectives.query("rank == 0 and step == 2")["payload_bytes"]
    print(f"bucket_cap_mb={cap!s:<4}: all-reduces of", [f"{s / 1e6:.2f} MB" for s in sizes])
whole.reveal(len(sizes))

# %% [markdown]
# With 25 MiB the whole model fits into one bucket, and nothing is left to overlap. If the option is
# left out, the first bucket is closed at 1 MiB, and here one more holds the rest: the default is
# for models of a hundred times this size and more.
#
# DeepSpeed has these switches in its [JSON](https://www.deepspeed.ai/docs/config-json/) for ZeRO
# stages 1 and 2 (lab 05). With stage 1 gradients are reduced once per step, as under `no_sync()`;
# with stage 2 after every micro-batch, so accumulation saves no traffic there. Megatron-LM has
# them as flags. `reduce_bucket_size` and `--ddp-bucket-size` count elements, not bytes. (Neither
# library is installed here; this is how the switches are written.)
#
# ```json
# {"gradient_accumulation_steps": 4,
#  "zero_optimization": {"stage": 1, "overlap_comm": true, "reduce_bucket_size": 5e8}}
# ```
# ```
# --overlap-grad-reduce --ddp-bucket-size 40000000
# ```
#
# **On your GPUs** write `pl.set_default_device("cuda")` in the first cell. Where every rank has a
# GPU the library trains on them, and NCCL carries the messages; your own code stays where its
# tensors are. The naive and the overlapped form were run with NCCL on one GPU, not yet on several:
# a test told each of two ranks that it was a machine of its own, as NCCL refuses two ranks of one
# host on one GPU.
#
# ## Read on
# * Li and others 2020, [PyTorch Distributed](https://arxiv.org/abs/2006.15704): sec. 3.2 has the
#   ladder naive, bucketed, overlapped; sec. 3.2.4 has `no_sync`.
# * McCandlish and others 2018, [An Empirical Model of Large-Batch
#   Training](https://arxiv.org/abs/1812.06162): how large a global batch may be.
# * PyTorch: [DistributedDataParallel](
#   https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html)
#   and the [design note](https://docs.pytorch.org/docs/stable/notes/ddp.html).
# * In the package: `paralab/parallel/data_parallel.py`, three passes of a few lines.
