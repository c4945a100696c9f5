# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 06 · Where the memory goes
#
# **What fills a device during a training step, and which setting makes it smaller?**
#
# You will be able to
# * name what fills a device, and the moment at which it holds most;
# * compute the activation bytes of a transformer block by hand, and a step's model states;
# * write activation checkpointing, with the random numbers of dropout restored;
# * say why more devices did not help, in cases from public reports;
# * read the figures of an estimator, of an allocator and of `nvidia-smi`, and say what each leaves
#   out.
#
# **You need** labs 00 (one step on one device) and 05 (ZeRO); in PyTorch `torch.autograd.Function`.
# **Minutes:** 90 to 120: 45 for reading and running, the rest for three exercises.
#
# [Where does the memory go?](https://github.com/pytorch/pytorch/issues/114934) Here is one step of
# a small GPT, eight samples of 128 tokens. paralab's **ledger** notes every tensor when it is
# created and when it is freed:

# %% tags=["measured"]
import pandas as pd

import paralab as pl
from paralab import view

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
model = pl.ModelSpec(layers=6, hidden=128, heads=4, seq_len=128, attention="explicit")
report = pl.run(model, pl.Plan(microbatch_size=8), steps=2, progress=False)
report.memory_chart()

# %% [markdown]
# The flat layers at the bottom are **model states**: parameters, and AdamW's two moments
# (*optimizer*). The mountain is **activations**: what forward saves for backward. It grows block by
# block in forward and shrinks block by block in backward, while gradients appear. The device holds
# most at the turning point. (The short phase at the right end is the optimizer's update.)
#
# ## States do not depend on the batch, activations do
#
# Every tensor of a step exists because of the model or because of the batch.
#
# | symbol | meaning |
# |---|---|
# | L, h, a, V | blocks, hidden size, heads, vocabulary |
# | b, s | samples per micro-batch, tokens per sample |
# | Ψ | parameters (a count) |
# | w | bytes of an element: 4 in fp32, 2 in bf16 and fp16 |
# | N | ranks that shard the model states |
# | M | bytes of memory |
#
# In fp32, a training with AdamW keeps per parameter one weight, one gradient and two moments. In 16
# bits it keeps a master copy of the weights in fp32 as well:
#
# $$M_\text{states} = \Psi\,(\underbrace{w}_\text{weight} + \underbrace{w}_\text{gradient} +
# \underbrace{8 + 4\,[w=2]}_\text{optimizer}) = 16\,\Psi \text{ bytes in both cases}$$
#
# Here [w=2] is 1 if w = 2, else 0. Neither b nor s is in this formula. Activations are the
# opposite case. Make your guess before you go on: the samples get twice as long, 256 tokens, and
# there are still eight of them.

# %%
guess = pl.exercises.guess(
    "activation bytes with s = 256, as a multiple of those at 128", low=1, high=6, unit="times"
)
guess

# %% [markdown]
# ## The activation bytes of a block, in seven lines
# Backward of an operation needs some of its inputs or outputs. Go through a block and write down
# what each operation saves, and nothing twice:
#
# $$\begin{aligned}
# \text{LayerNorm 1} &: w\,bsh + 2w\,bs &&\text{input; mean and deviation of each token}\\
# \text{query, key, value} &: w\,bsh &&\text{input of the product}\\
# \text{attention} &: 3w\,bsh + w\,abs^2 &&\text{q, k, v; the softmax's result, } s \times s
# \text{ per head}\\
# \text{output projection} &: w\,bsh &&\text{input of the product}\\
# \text{LayerNorm 2} &: w\,bsh + 2w\,bs &&\text{as the first}\\
# \text{up, GELU} &: w\,bsh + 4w\,bsh &&\text{input; input of GELU, four times as wide}\\
# \text{down} &: 4w\,bsh &&\text{input of the product}
# \end{aligned}$$
#
# The embedding keeps the token numbers (8 bs), the head its norm's and its product's inputs, the
# probabilities of the loss in fp32, and the targets:
#
# $$M_\text{ends} = 2w\,bsh + 2w\,bs + 4\,bsV + 16\,bs$$
#
# Add the seven lines up to $M_\text{block}$, complete the line `block = ...`, and compare with the
# run:


# %%
def activation_bytes(spec, b, w=4):
    s, h, a = spec.seq_len, spec.hidden, spec.heads
    ends = 2 * w * b * s * h + 2 * w * b * s + 4 * b * s * spec.vocab + 16 * b * s
    ### BEGIN SOLUTION
    ### STUB: block = 0  # the sum of the seven lines
    block = 16 * w * b * s * h + w * a * b * s * s + 4 * w * b * s
    ### END SOLUTION
    return spec.layers * block + ends


measured = report.memory.query("category == 'activations'")["bytes"].max()
print(f"measured: {measured:,} bytes; your formula: {activation_bytes(model, 8):,}")
print("equal to the byte:", measured == activation_bytes(model, 8))
missing = (measured - activation_bytes(model, 8)) / model.layers / (4 * 8 * 128 * 128)
print(f"missing in each block: {missing:.2f} times w bsh")

# %% [markdown]
# $$M_\text{block} = 16\,w\,bsh + w\,a\,bs^2 + 4w\,bs$$
#
# Korthikanti et al. print $sbh\,(34 + 5as/h)$ for the same block in 16 bits. With w = 2 ours is
# $sbh\,(32 + 2as/h)$, and the small term 4w bs. The difference is dropout, which keeps masks of
# one byte (2 sbh and as²b) and the scores after dropout (2as²b).
#
# The **program** of a step, the list of instructions that `pl.run` executes, knows the same. Each
# value in it has a size, a first and a last moment, so a peak can be read off without a run:

# %%
pl.program(model, pl.Plan(microbatch_size=8))

# %%
peak = pl.program(model, pl.Plan(microbatch_size=8)).peak()
both = pd.DataFrame({"program": peak, "ledger": report.peaks().iloc[:, -1]}).dropna().astype(int)
print("total of the program:", f"{sum(peak.values()):,} bytes")
print("peak of the run:     ", f"{report.peak_memory:,} bytes")
both

# %% [markdown]
# *Workspace* is what one operation needs only while it runs; *buffers* are kept for several
# operations: here the causal mask, with ZeRO also gathered weights and what a reduce-scatter
# receives into. The totals are equal to the byte, so from here on most pictures are read off
# programs. Activations have fewer bytes here than the 65.1 MB above, because some are freed
# already when the total is highest. Where the total is the same at two moments, the
# columns may show different ones.
#
# ## Twice the tokens, more than twice the activations


# %%
def peaks(settings):
    """{name: peak of the program by category} for {name: (model, plan)}."""
    return {name: pl.program(spec, plan).peak() for name, (spec, plan) in settings.items()}


eight = pl.Plan(microbatch_size=8)
grown = {
    "as it was": (model, eight),
    "twice the samples": (model, eight.replace(microbatch_size=16)),
    "twice the tokens": (model.replace(seq_len=256), eight),
    "twice the width": (model.replace(hidden=256), eight),
}
view.bytes_bars(
    peaks(grown), title="Samples twice as long need more memory than twice as many samples"
)

# %%
once, twice = (
    pl.program(spec, pl.Plan(microbatch_size=8)).most()["activations"]
    for spec in (model, model.replace(seq_len=256))
)  # the most activations of any moment; the bars show the moment with the highest total
guess.reveal(round(twice / once, 2))

# %% [markdown]
# It is more than twice, because the term $w\,abs^2$ is quadratic in s. (The bars as a whole grow
# 2.2 times, as parameters and optimizer states do not grow. When the total is highest, some
# activations are freed already, and workspace has taken their place.) FlashAttention never writes
# the s × s scores, and keeps one number per row and head instead. In PyTorch
# `scaled_dot_product_attention` uses it where device, dtype and mask allow; its math backend
# writes the scores. Here it is `attention="sdpa"`.
#
# ## Activation checkpointing: keep a block's input, compute the rest again
# An activation can be **recomputed**. *Full* recomputation keeps only the input of each block, and
# runs the block's forward a second time before its backward ([Chen et
# al.](https://arxiv.org/abs/1604.06174)). *Selective* recomputation drops only the attention's
# scores, which are large and cheap to compute ([Korthikanti et
# al.](https://arxiv.org/abs/2205.05198)); with FlashAttention there are none to drop. In the
# program it is one instruction per block:

# %%
pl.program(model, eight).diff(pl.program(model, eight.replace(recompute="full")))

# %% [markdown]
# With full recomputation L inputs stay. Activations can be at their most at two moments. At the end
# of forward the L inputs and the ends are there. Backward then recomputes the last block, which has
# all its activations once more. One of them is its input, w bsh, which is one of the L already. By
# then of the ends only the embedding's token numbers, 8 bs bytes, are left. The larger is the most:
#
# $$M_\text{full} = L \cdot w\,bsh + \max\,(M_\text{ends},\; M_\text{block} - w\,bsh + 8\,bs)$$
#
# A forward of F FLOPs has a backward of 2F. With the second forward a step has
# $(F + F + 2F) / (F + 2F) = 4/3$ of the FLOPs. And of the bytes?

# %%
full_guess = pl.exercises.guess(
    "MB of activations at most with full recomputation (65.1 MB without)",
    low=0,
    high=66,
    unit="MB",
)
full_guess

# %% tags=["measured"]
recomputed = {
    name: pl.run(model, eight.replace(recompute=kind), steps=3, progress=False)
    for name, kind in (("all kept", "none"), ("selective", "selective"), ("full", "full"))
}
view.memory_charts(recomputed, title="Recomputation lowers the peak, and moves it")

# %%
w, b, s, h, a, L = 4, 8, model.seq_len, model.hidden, model.heads, model.layers
ends = 2 * w * b * s * h + 2 * w * b * s + 4 * b * s * model.vocab + 16 * b * s
block = 16 * w * b * s * h + w * a * b * s**2 + 4 * w * b * s
full = L * w * b * s * h + max(ends, block - w * b * s * h + 8 * b * s)
held = recomputed["full"].memory.query("category == 'activations'")["bytes"].max()
print(f"formula: {full / 1e6:.2f} MB, measured: {held / 1e6:.2f} MB")
full_guess.reveal(held / 1e6)

# %% [markdown]
# The second moment has the most activations here. (The *total* is highest later, when the
# model's first block is recomputed and all gradients are there.) Gradients do not change by one
# bit, dropout included, because masks are drawn again from the same seeds:

# %%
proof = {"optimizer": "sgd", "lr": 0.1, "steps": 2, "keep_state": True, "progress": False}
noisy = model.replace(dropout=0.1, layers=2)
kept = pl.run(noisy, pl.Plan(microbatch_size=2), **proof)
for kind in ("selective", "full"):
    again = pl.run(noisy, pl.Plan(microbatch_size=2, recompute=kind), **proof)
    same = all((kept.gradients[n] == again.gradients[n]).all() for n in kept.gradients)
    print(f"{kind:<9} gradients equal bit for bit: {same}")

# %% [markdown]
# ## Write it: activation checkpointing

# %%
exercise = pl.exercises.checkpoint
exercise

# %%
### ANSWER: checkpoint


verdict = pl.exercises.checkpoint.check(my_checkpoint)
verdict

# %% [markdown] tags=["solution-only"]
# **Why it works.** Inside `forward` of an autograd function gradients are switched off, so the
# block's operations save nothing; only `x` is put into the context. In `backward` the block runs
# again on a *leaf* with the same values, this time with gradients on. `torch.autograd.grad` then
# walks through this small graph and returns what the outer graph expects. The generator's state is
# part of the input: it is remembered, set for the second forward, and put back.
#
# **Common mistakes**, as the checker sees them. No restored state: gradients are off by some per
# cent, because other units were dropped (the loss falls all the same, so it goes unnoticed). One
# state in a global: it is that of the last block when backward begins. Calling the block without
# `enable_grad`: there is no graph. Not detaching `x` and calling `y.backward(gradient)`: it runs on
# through the blocks before. Making the saved tensor itself the leaf: its `.grad` then lives as long
# as the graph does. On a GPU dropout draws from CUDA's generator: there
# `torch.cuda.get_rng_state()` has to be kept and set as well.
#
# **A second solution** lets autograd run inside autograd: `torch.autograd.backward` fills the
# parameters' `.grad` by itself, so forward need not take the parameters. It fails where `x` does
# not require a gradient: then the output does not either, and its backward is never called. This is
# the reason for the warning of `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`.

# %% tags=["solution-only"]
### ANSWER: checkpoint_other


pl.exercises.checkpoint.check(my_checkpoint)

# %% [markdown]
# Stuck? `exercise.hint()` gives one hint at a time, `exercise.solution()` shows an answer.
#
# ## Your checkpoint trains the GPT, next to torch's and next to the plan
# Two data-parallel ranks train the reference GPT in plain PyTorch; every block is called through
# the function that is handed in. `pl.observe` writes down what any PyTorch program computes, sends
# and holds.


# %%
def train(apply, steps=2):
    import torch.distributed as dist

    gpt, ranks, losses = pl.reference.GPT(model), dist.get_world_size(), []
    update = pl.reference.optimizer(gpt.parameters())
    for step in range(steps):
        place = {"step": step, "rank": dist.get_rank(), "ranks": ranks, "microbatch_size": 8}
        [(tokens, targets)] = pl.reference.batches(model, **place)
        x = gpt.embedding(tokens)
        for block in gpt.blocks:
            x = apply(block, x)  # block(x), and less memory
        loss = gpt.head(x, targets, gpt.embedding.token.weight)
        (loss / ranks).backward()
        for parameter in gpt.parameters():
            dist.all_reduce(parameter.grad)
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


# %%
def torchs_own(block, x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(block, x, use_reentrant=False)


plan = eight.replace(dp=2, recompute="full")
runs = {
    "the library's plan": pl.run(model, plan, steps=2, progress=False),
    "torch.utils.checkpoint": pl.observe(train, ranks=2, args=(torchs_own,)),
}

# %% tags=["measured"]
if verdict:
    runs["yours"] = pl.observe(train, ranks=2, args=(my_checkpoint,))
else:
    print("write my_checkpoint first")
view.memory_charts(runs, title="Blocks are recomputed in backward, and memory peaks there")

# %%
sends = pl.exercises.choose(
    "Compared with a step that keeps everything, both ranks send with full recomputation",
    ["as many bytes", "4/3 of the bytes, as they make 4/3 of the FLOPs", "twice as many bytes"],
)
sends

# %%
without = pl.predict(model, eight.replace(dp=2)).collectives
print(f"without recomputation: {without.query('step == 0')['wire_bytes'].sum():,} bytes in a step")
for name, run in runs.items():
    same = run.losses == runs["the library's plan"].losses
    sent = run.collectives.query("step == 1")["wire_bytes"].sum()
    print(f"{name}: losses of the plan: {same}; both ranks send {sent:,} bytes in a step")
sends.reveal(1, "Data parallelism sends gradients, and they are computed once.")

# %% tags=["measured"]
title = "Backward computes every block again, and takes far longer than forward"
view.timelines(*runs.values(), labels=list(runs), ranks=[0], title=title)

# %% [markdown]
# The losses are equal bit for bit, and with data parallelism recomputation sends nothing. (With
# tensor parallelism the second forward repeats its all-reduces.)
#
# In the plan all *gradients* are there from the head's backward on: with data parallelism they lie
# in two buckets, which are allocated whole, and the head needs both, as its weight is the
# embedding's. So its peak is at the block that is recomputed first, where all six inputs are still
# kept. In `train` gradients appear in the course of backward, so its runs peak at the block that is
# recomputed last, when most inputs have been freed.
#
# Where a step of `train` takes longer, a part of it is the messages at its end: `train` makes an
# all-reduce per parameter after backward, while the plan sends two buckets, the first of them
# before backward ends. Where its forward is longer, too, messages cannot be the reason, as none
# has been sent by then. (Lengths are those of this machine's wall clock, on which ranks also wait
# for a core, and on which observing a program takes time.)
#
# ## More devices, the same memory
# People often ask why memory does not fall with more devices. Pick an answer before you run the
# cells.

# %%
pick = pl.exercises.choose(
    "ZeRO-3 with 8 samples per device, on 4 devices instead of 2. What happens to the peak?",
    ["it is halved: everything is sharded", "it falls a little", "it rises: buffers grow"],
)
pick

# %%
zero3 = pl.Plan(dp=2, zero_stage=3, microbatch_size=8, bucket_bytes=2**20)
four = zero3.replace(dp=4)
less = four.replace(microbatch_size=2, microbatches=4)
cures = {
    "2 devices": (model, zero3),
    "4 devices": (model, four),
    "4 devices, 2 samples at a time": (model, less),
    "... and recomputed": (model, less.replace(recompute="full")),
}
view.bytes_bars(peaks(cures), title="Smaller micro-batches help where more devices do not")

# %%
two, more = (sum(pl.program(model, plan).peak().values()) for plan in (zero3, four))
run = pl.run(model, four, steps=1, progress=False)
print(f"peak on 4 devices, as a share of that on 2: {100 * more / two:.1f} %")
print("a run on four ranks has the same peak, to the byte:", run.peak_memory == more)
pick.reveal(2, "States are halved, and they are the smaller part; activations stay.")

# %% [markdown]
# [A maintainer of DeepSpeed](https://github.com/deepspeedai/DeepSpeed/issues/2302) and [one of
# fairscale](https://github.com/facebookresearch/fairscale/issues/1050) (the second of four
# reasons) say so: each device has samples of its own, and ZeRO shards states, not activations.
# The same happened [with a vision-language model under
# `fully_shard`](https://github.com/pytorch/torchtitan/issues/1126), [in reinforcement learning
# with ZeRO-3](https://github.com/huggingface/trl/issues/2784), and [with 3-D medical
# images](https://github.com/Lightning-AI/pytorch-lightning/issues/15976), where 1 and 2 GPUs need
# the same 24 GB. Wrapping nearly doubled the memory there. Wrapping (which modules become one
# unit) changes how much is gathered at a time (the section *Everything gathered at once*); it
# cannot reduce activations.
#
# ## Two axes: tensor parallelism divides activations, more data parallelism does not
# [PyTorch's FSDP + TP example](https://github.com/pytorch/examples/issues/1319) was run on 4 GPUs
# (2,161 to 2,411 MB), on 8 (2,141 to 2,395 MB) and on two nodes of 4. Tensor parallelism (`tp`,
# lab 07) divides every layer, and with it the activations inside a layer; those between layers
# stay whole. Four more ranks can join either axis.

# %%
tensor = pl.exercises.guess(
    "peak with tp=4, dp=2, in per cent of that with tp=2, dp=2",
    low=0,
    high=100,
    unit="%",
    decimals=0,
)
tensor

# %%
axes = {
    "4 devices: tp=2, dp=2": (model, zero3.replace(tp=2)),
    "8 devices: tp=2, dp=4": (model, four.replace(tp=2)),
    "8 devices: tp=2, dp=4, 4 samples each": (model, four.replace(tp=2, microbatch_size=4)),
    "8 devices: tp=4, dp=2": (model, zero3.replace(tp=4)),
}
bars = peaks(axes)
two, *_, more = (sum(parts.values()) for parts in bars.values())
print("tp=4, dp=2:", tensor.reveal(100 * more / two))
view.bytes_bars(bars, title="On the data axis more ranks help only with fewer samples each")

# %% [markdown]
# A data-parallel rank has eight samples, so dp=4 trains twice as many in a step, and a rank's
# activations stay. With four samples each, 16 in all as with dp=2, it needs the least.
#
# ## A small model: buffers cost what sharding saves
# [Sharded training saves nothing](https://github.com/Lightning-AI/pytorch-lightning/issues/6047) on
# a model of 230 thousand parameters; [`DataParallel` needs less than
# FSDP](https://github.com/pytorch/pytorch/issues/108976), where the model is only about 50 MB;
# [ZeRO-3 needs more than ZeRO-2](https://github.com/deepspeedai/DeepSpeed/issues/4305). Buffers are
# one possible cause. Take one block of the first thread's size, on two devices:

# %%
tiniest = pl.exercises.choose(
    "Which of these needs the least memory?",
    ["data parallelism", "ZeRO-2 with one bucket for all gradients", "ZeRO-2 with small buckets"],
)
tiniest

# %%
tiny = pl.ModelSpec(layers=1, hidden=128, heads=4, seq_len=16)
small = pl.Plan(dp=2, microbatch_size=1)
fine = small.replace(bucket_bytes=256 * 1024)  # gradients are reduced in buckets of this size
stages = {
    "one device": (tiny, small.replace(dp=1)),
    "2 devices: data parallelism": (tiny, small),
    "ZeRO-2": (tiny, small.replace(zero_stage=2)),
    "ZeRO-2, buckets of 256 KiB": (tiny, fine.replace(zero_stage=2)),
    "ZeRO-3, buckets of 256 KiB": (tiny, fine.replace(zero_stage=3)),
}
print(f"{tiny.num_params:,} parameters")
view.bytes_bars(peaks(stages), title="One large bucket costs more than ZeRO-2 saves")

# %%
tiniest.reveal(3, "With one bucket ZeRO-2 needs more than data parallelism, with small ones less.")

# %% [markdown]
# What makes the difference is **buffers**. A bucket has up to 4 MiB by default, so one takes all
# gradients of this model, and ZeRO-2 reduces from a copy of everything. With small buckets it saves
# something. ZeRO-3 works unit by unit, and the only block is nearly the whole model: it is
# gathered, and its gradients are reduced, at full size.
#
# ## Everything gathered at once: the unit is too large
# ZeRO-3 saves memory only if *a part* of the model is gathered at a time. The fourth reason of
# [fairscale's maintainer](https://github.com/facebookresearch/fairscale/issues/1050) is the model
# wrapped as one unit. Here a unit is a block, and `prefetch` says how many are gathered ahead. The
# sizes are those of [a thread in which memory did not fall with more
# GPUs](https://github.com/pytorch/pytorch/issues/104589): 40 layers and 3.4 billion parameters,
# there 40 linear layers of 9216 × 9216, here a GPT.

# %%
gathered = pl.exercises.guess(
    "GB on each of 8 devices with all 40 blocks gathered, in fp32",
    low=0,
    high=60,
    unit="GB",
    decimals=0,
)
gathered

# %%
large = pl.ModelSpec(layers=40, hidden=2688, heads=16, seq_len=16)
print(f"{large.num_params / 1e9:.2f} billion parameters")
units = {"one device": (large, pl.Plan())}
for n in (2, 8):
    plan = pl.Plan(dp=n, zero_stage=3)
    units[f"{n} devices, next block gathered"] = (large, plan)
    units[f"{n} devices, all blocks gathered"] = (large, plan.replace(prefetch=40))
bars = peaks(units)
print("all gathered:", gathered.reveal(sum(bars["8 devices, all blocks gathered"].values()) / 1e9))
view.bytes_bars(bars, title="With all blocks gathered at once each device holds all weights")

# %% [markdown]
# That thread gives its numbers only as a screenshot, and here memory falls in both cases, so we
# cannot show why it did not fall there. What the program says: with states sharded and blocks
# gathered one by one, memory falls from 29.2 GB on 2 devices to 8.61 GB on 8 (a quarter would be
# 7.3 GB). Where it does not fall, look for what is whole: a unit that is too large, or gathers that
# run ahead. FSDP1 limits these with `limit_all_gathers`; in FSDP2 the modules that get
# `fully_shard` are the units.
#
# ## You added devices, but not to the group that shards
# ZeRO divides model states by N, the size of the group that shards them. [That is the data-parallel
# degree, not the number of GPUs](https://github.com/deepspeedai/DeepSpeed/issues/237): a model of
# 40 billion parameters ran out of memory on 8 GPUs of 32 GB, all of them tensor-parallel, and the
# answer was that “the minimum number of GPUs for a 40B parameters would be around 48 GPUs”. What
# does the program say, with ZeRO-2, recomputation and one sample at a time?

# %%
gpus = pl.exercises.choose(
    "40 billion parameters, tp=8, 32 GB on each GPU: the smallest number that is enough?",
    ["16", "32", "48"],
)
gpus

# %%
forty = pl.ModelSpec(layers=88, hidden=6144, heads=32, seq_len=1024, vocab=50304)
print(f"{forty.num_params / 1e9:.1f} billion parameters")
sharded = pl.Plan(tp=8, zero_stage=2, precision="fp16", recompute="full", microbatch_size=1)
groups = {f"{8 * n} GPUs: tp=8, dp={n}": (forty, sharded.replace(dp=n)) for n in (1, 2, 4, 6)}
groups["48 GPUs, states sharded by 2"] = (forty, sharded.replace(dp=6, shard=2))
title = "40 B parameters fit on 32 GPUs and more, if all data-parallel ranks shard states"
print(gpus.reveal(2, "With dp=4, gradients and optimizer states are a quarter of those with dp=1."))
view.bytes_bars(peaks(groups), {"32 GB GPU": 32 * 10**9}, title=title)

# %% [markdown]
# A real training also needs room for larger buckets, for fragmentation, and for more than one
# sample. (In that thread 64 GPUs still ran out of memory after several iterations: that the states
# fit is necessary, not sufficient.) The last bar is hybrid sharding, with copies of the states: as
# many GPUs, and three times the optimizer states.
#
# ## Before the first forward: the whole model on every device
# The estimator of DeepSpeed said 0.49 GiB, and [14,678 MiB were in use already after
# `deepspeed.initialize()`](https://github.com/deepspeedai/DeepSpeed/issues/4527): 6,805 million
# parameters, 4 GPUs, everything offloaded. What do [the
# estimators](https://github.com/deepspeedai/DeepSpeed/issues/965) estimate? For ZeRO-3, with Λ
# parameters in the largest layer (131 million in that thread):
#
# $$M_\text{GPU} = 4\Lambda + \begin{cases} 18\,\Psi/N & \text{nothing offloaded}\\
# 2\,\Psi/N & \text{optimizer offloaded}\\ 0 & \text{parameters too}\end{cases}$$
#
# 4Λ are a gathered layer and its gradient in 16 bits. That is all: no activations, no workspace,
# and no word about how the model got onto the device.

# %%
MIB = 2**20
estimate = 4 * 131 * 10**6
llama = pl.ModelSpec(
    layers=32, hidden=4096, heads=32, seq_len=2048, vocab=32000, tied=False, attention="explicit"
)
offloaded = pl.Plan(dp=4, zero_stage=3, offload="cpu", precision="fp16", microbatch_size=1)
bars = {
    "the estimator's 4Λ": {"buffers": estimate},
    "all weights in fp16, 2Ψ": {"parameters": 2 * 6805 * 10**6},
    "program, one sample of 2,048 tokens": pl.program(llama, offloaded).peak(),
}
reported = {
    "reported: after initialize()": 14678 * MIB,
    "after the 2nd forward": 21272 * MIB,
}
print(f"{llama.num_params / 1e6:,.0f} million parameters here, 6,805 million in the thread")
view.bytes_bars(bars, reported, title="First the device holds all weights, later the activations")

# %% [markdown]
# 14,678 MiB are the weights in 16 bits, 12,979 MiB, and 1.7 GiB of CUDA context, libraries and
# buffers. So the model had been on the device whole (our inference from the numbers; the thread
# does not say how it was built). DeepSpeed partitions it in `initialize()`, but its memory stays
# reserved (see *Reserved is not allocated*): [a log by the same
# author](https://github.com/deepspeedai/DeepSpeedExamples/issues/777) has 0.41 GB allocated after
# it, and 13.1 GB reserved. Before the second forward this has been given back, and 1,838 MiB are in
# use. The second forward adds 19,434 MiB (20.4 GB). The program has nearly as much, 19.6 GB, for
# one sample of 2,048 tokens (our assumption) with scores written out: 17.0 GB of it are
# activations, which the estimator leaves out.
#
# Two more threads, with their own models (as GPTs of the same size; FLAN-T5-XL has an encoder and
# a decoder). [GPT-J-6B needed 13 GB on 2 and on 4
# GPUs](https://github.com/deepspeedai/DeepSpeed/issues/4093): that is near whole 16-bit weights
# (11.28 GiB, or 12.1 GB, below), which do not depend on N. [FLAN-T5-XL was expected to fit on
# four V100 of 16 GB](https://github.com/deepspeedai/DeepSpeed/issues/2797) with one sample per
# GPU.

# %%
gptj = pl.ModelSpec(layers=28, hidden=4096, heads=16, seq_len=512, vocab=50400, tied=False)
t5 = pl.ModelSpec(layers=60, hidden=2048, heads=32, seq_len=512, vocab=32128, tied=False)
rows = {}
for name, spec, largest in (("GPT-J-6B", gptj, 206), ("FLAN-T5-XL", t5, 65)):
    spec = spec.replace(attention="explicit")
    rows[name] = {"estimator": 4e6 * largest, "whole weights": 2 * spec.num_params}
    for b in (1, 4):
        program = pl.program(spec, offloaded.replace(microbatch_size=b))
        rows[name][f"program, b={b}, s=512"] = sum(program.peak().values())
(pd.DataFrame(rows).T / 2**30).round(2).add_suffix(" (GiB)")

# %% [markdown]
# FLAN-T5-XL needs 3.44 GiB for one sample of 512 tokens, 12.27 GiB for four, and 5.88 GiB if its
# 16-bit weights are whole at the start. The estimator says 0.24 GiB in all three cases.
#
# What to do: build the model under `deepspeed.zero.Init()` or on the `meta` device, or let the
# trainer do so, so that it is never whole; then count activations.
#
# ### Which stage divides which part
# [A thread](https://github.com/deepspeedai/DeepSpeed/issues/5102) finds the estimates confusing:
# there is none for ZeRO-1, gradients are not partitioned in ZeRO-2, only 16 bits are offered, and
# multipliers are too high. Each of the three parts of $M_\text{states}$ is divided by N if the
# stage shards it. How many bytes per parameter does a rank hold at the end of backward, when its
# part of every gradient is there?

# %%
per_parameter = pl.exercises.guess(
    "bytes of states per parameter, ZeRO-2 in bf16 on 4 ranks", low=0, high=16, unit="bytes"
)
per_parameter

# %%
sizes = {}
for precision, w in (("fp32", 4), ("bf16", 2)):
    optimizer = 8 if w == 4 else 12
    for stage, (p, g, o) in enumerate(((1, 1, 1), (1, 1, 4), (1, 4, 4), (4, 4, 4))):
        plan = pl.Plan(dp=4, zero_stage=stage, precision=precision, bucket_bytes=2**24)
        held = pl.program(gptj, plan).most()
        lasting = (held["parameters"] + held["optimizer"]) / gptj.num_params
        row = sizes.setdefault(f"ZeRO-{stage}", {})
        row[f"{precision}, end of backward"] = w / p + w / g + optimizer / o
        row[f"{precision}, without gradients"] = w / p + optimizer / o
        row[f"{precision}, the same by program"] = round(lasting, 3)
print("ZeRO-2 in bf16:", per_parameter.reveal(sizes["ZeRO-2"]["bf16, end of backward"]))
pd.DataFrame(sizes).T

# %% [markdown]
# In ZeRO-1 the whole gradient is there in backward, and only the rank's part when the optimizer
# begins; the exercise below asks for the second. DeepSpeed's 18 bytes are 16 in fp32 (weight,
# gradient and two moments) and the weight in 16 bits: gradients are turned into fp32 for the
# update, and their 16-bit form is not counted ([its
# documentation](https://deepspeed.readthedocs.io/en/stable/memory.html)). Megatron-LM has 18 as
# well if gradients are kept in fp32.
#
# ## Buffers that add up
# A fused buffer makes calls fast, and a buffer for *all* gradients grows with the model. ZeRO
# caps it ([its paper's](https://arxiv.org/abs/1910.02054) C<sub>B</sub>, sec. 6.2; here
# `bucket_bytes`). Capped buffers add up as well, if every unit keeps one: [11,190 MB after
# backward](https://github.com/facebookresearch/fairscale/issues/627), where the weights, 2,739 MB,
# and as much of gradients were expected. The cause was [a buffer per wrapped
# module](https://github.com/facebookresearch/fairscale/pull/633), never freed. Programs here free
# theirs, as fairscale has done since then:

# %%
narrow = pl.ModelSpec(layers=8, hidden=128, heads=4, seq_len=16)
excess = 11190 - 2 * 2739
print(f"{excess:,} MB too many: {excess / 25:.0f} buffers of 25 MB, fairscale's default size")
buffers = {}
for layers in (2, 4, 8):
    for name, size in (("one for all", 2**30), ("1 MiB at a time", 2**20)):
        plan = pl.Plan(dp=2, zero_stage=2, microbatch_size=1, bucket_bytes=size)
        held = pl.program(narrow.replace(layers=layers), plan).most()["buffers"]
        buffers[f"{layers} blocks, {name}"] = {"buffers": held}
view.bytes_bars(
    buffers, title="A buffer for all gradients grows with the model, a capped one does not"
)

# %% [markdown]
# ## Reserved is not allocated
# `nvidia-smi` shows what the process has **reserved**, and CUDA's context. PyTorch's allocator
# asks the driver for large segments, cuts requests out of them, and gives a segment back only
# when a request would otherwise fail, or at `empty_cache()`. Here the storages of the step at the
# top of this lab, served by its rules:

# %%
from paralab.instruments import heap

step = heap.storages(model, eight)
history = heap.cached(step)
last = max(storage.died for storage in step)
kept = sum(s.bytes for s in step if s.died == last and s.category != "gradients")  # model states
figures = {
    "allocated, after the step": kept,
    "allocated, at the peak": max(allocated for _, allocated, _ in history),
    "reserved, from the peak on": history[-1][2],
}
for name, size in figures.items():
    print(f"{name:<28} {size / 1e6:6.1f} MB")

# %% [markdown]
# [Which of them matters](https://github.com/pytorch/torchtitan/issues/735)? Whether *your step*
# fits is decided by the peak of allocated memory and by how it is cut up; whether *another process*
# fits, by reserved memory. In that thread FSDP2 peaked higher than FSDP1 because calls of tensor
# parallelism kept memory longer (`recordStream`); `TORCH_NCCL_AVOID_RECORD_STREAMS=1` cured it.
# (PyTorch does so by default now, and the variable is deprecated.)
#
# In [another thread](https://github.com/pytorch/pytorch/issues/82001) reserved memory goes from 28
# to 24 GB from 1 to 4 nodes, while allocated memory nearly halves. One cause can be shown. If
# `memory_allocated()` is asked after the step, only states are left. Reserved memory stays as large
# as the peak made it. Take a GPT of T5-3B's size, and four samples of 512 tokens on each of 8 GPUs
# per node:

# %%
fourth = pl.exercises.guess(
    "peak on four nodes, in per cent of that on one", low=0, high=100, unit="%", decimals=0
)
fourth

# %%
written = t5.replace(attention="explicit")
nodes = {}
for n in (1, 2, 3, 4):
    plan = pl.Plan(dp=8 * n, zero_stage=3, precision="bf16", microbatch_size=4)
    program = pl.program(written, plan)
    states = {kind: program.most()[kind] for kind in ("parameters", "optimizer")}
    nodes[f"{n} node{'s' * (n > 1)}: after the step"] = states
    nodes[f"{n} node{'s' * (n > 1)}: at the peak"] = program.peak()
title = "On four nodes memory is a quarter after the step, but four fifths at the peak"
first, last = (sum(nodes[f"{n}: at the peak"].values()) for n in ("1 node", "4 nodes"))
print("four nodes:", fourth.reveal(100 * last / first))
view.bytes_bars(nodes, title=title)

# %% [markdown]
# Here the states fall to a quarter, and the peak to 78 %. The thread has about a half and 86 %, so
# on its GPUs something else was allocated that more nodes do not divide. It does not say what.
#
# ## Enough free memory, but not in one piece
# An allocator cannot move what it has given. Place the storages of the step in one address space,
# each where it first fits. Towards the end of backward most of it is free again, and long-lived
# gradients stand between the pieces. In a second address space storages that live for more than
# `apart` events have a region of their own; an event is the creation or the end of a storage, and
# the step has about 600. Then 20 MB are asked for. Run both cells with other values of `apart` as
# well, from 10 to 600: for which of them is the largest piece largest?

# %%
moment = max(storage.died for storage in step if storage.category == "activations")
spaces = {
    "as they come": heap.first_fit(step),
    "long-lived storages apart": heap.first_fit(step, apart=200),  # more than 200 events
}
request = 20e6  # bytes
view.addresses(spaces, moment, request)

# %%
for name, space in spaces.items():
    gaps = space.gaps(moment)
    fits = "is served" if max(gaps) >= request else "FAILS"
    print(f"{name}: {sum(gaps) / 1e6:.1f} of {space.extent / 1e6:.1f} MB are free", end=", ")
    print(f"largest piece {max(gaps) / 1e6:.1f} MB: a request of {request / 1e6:.1f} MB {fits}")

# %% [markdown]
# The best values of `apart` lie in the middle: of 10, 250 and 600 it is 250 by far. If it is
# small, nearly all activations count as long-lived; if it is large, the model states do and no
# gradient. In both cases long and short lives share one region again.
#
# This is **fragmentation**. ZeRO-R (M<sub>D</sub>, sec. 6.3) gives long-lived tensors regions of
# their own. PyTorch's `expandable_segments:True` attacks the same problem: it maps pages of
# physical memory behind contiguous addresses.
#
# ## One byte too many
# Give the rank less memory than the step needs. It fails at the first tensor that does not fit, and
# says what fills the device and what would help. Which is the smallest limit, in tenths of a MB,
# with which the step runs? Find it above, and try it:

# %%
limit = pl.exercises.guess("the smallest limit that is enough", low=60, high=100, unit="MB")
limit

# %%
try:
    pl.run(model, eight, steps=2, memory_limit="60MB", progress=False)
except pl.OutOfMemory as error:
    print(error.table)
else:
    print("the step runs")

# %%
limit.reveal(-(-report.peak_memory // 10**5) / 10)  # the peak of the run, rounded up

# %% [markdown]
# ## Exercise: four plans that do not profit from more devices

# %%
clinic = pl.exercises.memory_clinic
clinic

# %%
for patient in clinic.patients.values():
    print(patient, end="\n\n")

# %%
next(iter(clinic.patients.values())).chart()

# %%
### ANSWER: memory_clinic


pl.exercises.memory_clinic.check(treatment)

# %% [markdown] tags=["solution-only"]
# **Why it works.** *More nodes*: two ranks share the states, however large dp is; with `shard=8`
# the activations are largest, and recomputation frees them. *Twice the devices*: the activations
# are those of a rank's own samples, which ZeRO does not shard. *Fully sharded*: prefetch gathers
# all blocks at once; after that the activations are largest. *A small model*: one bucket of 4 MiB
# holds all gradients.
#
# **Common mistakes.** One of two causes is cured; more settings are changed than are allowed; the
# global batch changes. **A second answer** takes smaller micro-batches in place of recomputation,
# and `zero_stage=3` in place of smaller buckets:

# %% tags=["solution-only"]
one_at_a_time = {"microbatches": 2, "microbatch_size": 1}
other_treatment = {
    "more nodes": ("optimizer", {"shard": 8, **one_at_a_time}),
    "twice the devices": ("activations", {"microbatches": 8, "microbatch_size": 1}),
    "fully sharded": ("buffers", {"prefetch": 1, **one_at_a_time}),
    "a small model": ("buffers", {"zero_stage": 3}),
}
pl.exercises.memory_clinic.check(other_treatment)

# %% [markdown]
# ## Go further: an estimator that is right to the byte

# %%
further = pl.exercises.memory_estimator
further

# %%
### ANSWER: memory_estimator


pl.exercises.memory_estimator.check(my_estimate)

# %% [markdown] tags=["solution-only"]
# **Why it works.** Every category is one idea: states are Ψ times a width, divided by N from the
# stage on that shards them; padding rounds each unit up; activations are the seven lines of this
# lab.
#
# **Common mistakes**: AdamW's step counts are left out (4 bytes per tensor or unit); Ψ is divided
# by N without padding; the loss's probabilities are taken to be in 16 bits, they are always fp32;
# gradients of ZeRO-1 are taken whole, though only the shard is left when the optimizer begins.
#
# **A second solution** counts from shapes, tensor by tensor, and needs no formula for Ψ:

# %% tags=["solution-only"]
### ANSWER: memory_estimator_other


pl.exercises.memory_estimator.check(my_estimate)

# %% [markdown]
# ## What to remember
# 1. Model states take 16 Ψ bytes with AdamW (18 Ψ with 16-bit weights and gradients in fp32),
#    whatever the batch; activations take about $w\,bsh\,(16 + as/h)$ per block, whatever the
#    optimizer.
# 2. Without recomputation a device holds most where forward ends and backward begins, if a block's
#    activations are larger than its gradients; else at the end of backward.
# 3. Full recomputation keeps one input per block and costs a third more FLOPs; gradients are the
#    same bits if dropout's random state is restored.
# 4. ZeRO divides states by the size of the group that shards. It divides neither activations nor a
#    gathered unit, and a model that is built whole needs its whole memory until it is divided.
# 5. The peak of allocated memory, and how it is cut up, decide whether a step fits; reserved is
#    what other processes see.
#
# | what fills the device | what helps |
# |---|---|
# | activations | smaller micro-batches, recomputation, fused attention; tensor parallelism |
# | optimizer states, gradients | ZeRO-1, ZeRO-2, a larger sharding group; offload (lab 09) |
# | parameters | ZeRO-3 with small units; tensor or pipeline parallelism |
# | buffers | smaller buckets, less prefetch |
# | whole weights at the start | `meta` device, `zero.Init()` |
# | free, but in pieces | `expandable_segments:True`, fewer odd sizes |
#
# $$M_\text{states} = 16\,\Psi,\quad M_\text{block} = 16w\,bsh + w\,abs^2 + 4w\,bs,\quad
# M_\text{full} = Lw\,bsh + \max\,(M_\text{ends},\; M_\text{block} - w\,bsh + 8\,bs),\quad
# M_\text{estimator} = 4\Lambda + 18\,\Psi/N$$
#
# ## In PyTorch, DeepSpeed, Megatron
# * **PyTorch**: `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)` ran above.
#   What selective recomputation keeps is chosen with `create_selective_checkpoint_contexts`.
#   Peaks: `torch.cuda.max_memory_allocated()`, `max_memory_reserved()`; a picture like those of
#   this lab: `torch.cuda.memory._record_memory_history()` and `_dump_snapshot()`, shown by
#   [pytorch.org/memory_viz](https://pytorch.org/memory_viz).
# * **DeepSpeed**: `deepspeed.checkpointing.checkpoint`, and
#   ```json
#   {"activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": false,
#                                 "contiguous_memory_optimization": true,
#                                 "number_checkpoints": 24},
#    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8,
#                          "stage3_prefetch_bucket_size": 5e7,
#                          "stage3_max_live_parameters": 1e9}}
#   ```
#   `contiguous_memory_optimization` is the region for long-lived tensors, `reduce_bucket_size`
#   (elements, not bytes) the bucket, `stage3_prefetch_bucket_size` is `prefetch`, and
#   `stage3_max_live_parameters` is a cap on gathered parameters.
# * **Megatron-LM**: `--recompute-granularity full --recompute-method uniform
#   --recompute-num-layers 1`, or `--recompute-granularity selective`, whose `--recompute-modules`
#   is `core_attn` by default. With FlashAttention that saves next to nothing, and other modules,
#   such as `mlp` or `layernorm`, do.
#
# In this process, the reference GPT with each kind of PyTorch's checkpointing. Of two steps the
# second has the peak: the optimizer makes its states in the first one.

# %% tags=["measured"]
import gc

from torch.utils.checkpoint import checkpoint


def two_steps(reentrant):
    gpt = pl.reference.GPT(model)
    update = pl.reference.optimizer(gpt.parameters())
    for step in range(2):
        [(tokens, targets)] = pl.reference.batches(model, step=step, microbatch_size=8)
        x = gpt.embedding(tokens)
        for block in gpt.blocks:
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        gpt.head(x, targets, gpt.embedding.token.weight).backward()
        del x
        update.step()
        update.zero_grad()


kinds = {"without": None, "use_reentrant=False": False, "use_reentrant=True": True}
seen = {}
for name, reentrant in kinds.items():
    gc.collect()  # optimizers refer to themselves: the last one is freed here, not when it leaves
    with pl.observe() as seen[name]:
        two_steps(reentrant)
view.bytes_bars(
    {name: one.report.peaks().iloc[:-1, -1].dropna().to_dict() for name, one in seen.items()},
    title="With either kind of torch's checkpoint the peak falls to two fifths",
)

# %% [markdown]
# ## Read on
# * Chen et al. 2016, [Training deep nets with sublinear memory
#   cost](https://arxiv.org/abs/1604.06174), sec. 3 and 4. Korthikanti et al. 2022, [Reducing
#   activation recomputation](https://arxiv.org/abs/2205.05198), sec. 4 and 5. Rajbhandari et al.
#   2020, [ZeRO](https://arxiv.org/abs/1910.02054), sec. 6: ZeRO-R.
# * PyTorch: [activation checkpointing](https://docs.pytorch.org/docs/stable/checkpoint.html),
#   [understanding CUDA memory
#   usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html). [The Ultra-Scale
#   Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), “Memory usage in
#   transformers”.
# * In the package: `paralab/instruments/ledger.py` counts, `paralab/interpret/memory.py` reads the
#   same off a program, `paralab/parallel/recompute.py` adds recomputation to one,
#   `paralab/instruments/heap.py` replays an allocator.
#
# **On your GPUs**, with `pl.set_default_device("cuda")` in the first cell, the ledger counts
# tensors on the device, and `report.allocator` has what CUDA's allocator says, a row for every rank
# and step. Of GPT-2 with a vocabulary of 50,304, in bf16 on an H100, with eight samples of 1,024
# tokens, the ledger's peak was 8,390 MB, as predicted. The allocator had 55 MB more, for workspaces
# of libraries that no tensor shows, and had reserved 9,269 MB, a tenth more than the tensors need.
