# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 07 · Tensor parallelism: one layer on several devices
#
# **How can t devices compute one layer together, what must they send each other, and which
# mistakes does no error message report?**
#
# A layer of a large model, or its activations, may not fit on one device, and ZeRO gathers a whole
# layer to compute it. Tensor parallelism has the whole layer nowhere. It pays for that with
# messages in every layer.
#
# **You will be able to**
# * shard an MLP and an attention layer so that each needs one all-reduce, and derive why;
# * explain every collective in the log of a tensor-parallel run, and compute its bytes;
# * write both layers and the vocabulary-parallel loss in plain PyTorch, and train a GPT with them;
# * say what sequence parallelism adds, and what it costs;
# * find a gradient that was never summed, by comparing it with that of one process.
#
# **You need** labs 01 (collectives and their bytes) and 02 (programs, passes, replay); products of
# block matrices and the chain rule; `nn.Module` and `torch.autograd.Function`. **Minutes**:
# 120–150, of which 60 for the exercises.

# %%
import numpy as np
import pandas as pd

import paralab as pl
from paralab import view

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
columns = pl.Plan(tp=4, microbatch_size=4)
view.blocks(columns, role="up")

# %% [markdown]
# In data parallelism and ZeRO every device computes whole layers for its own samples. In **tensor
# parallelism** all t devices work on the same tokens, and each holds a t-th of every weight
# matrix. The picture shows the first layer of an MLP, called `up`: X is replicated, and rank r has
# the columns W_r of the weight. It computes the columns Y_r of the result without asking any other
# rank. The library calls this layout 1D.
#
# | symbol | meaning |
# |---|---|
# | t | ranks of the tensor-parallel group |
# | b, s, h | samples per micro-batch, tokens per sample, hidden size |
# | a, V, L | heads, vocabulary, layers (blocks) |
# | $V_i$, $V_r$ | values of head i; rank r's part of the vocabulary |
# | X, A, B | input of an MLP (b s × h), its weights (h × 4h and 4h × h) |
# | W_r | rank r's part of a weight |
# | M | bytes of activations that a block keeps for backward |
# | E | elements that a rank sends |
# | S | bytes of a whole tensor: an all-reduce of it sends 2(t−1)/t · S per rank (lab 01) |
#
# ## Columns first, then rows
# An MLP is $Z = \mathrm{GELU}(XA)\,B$. A matrix can be cut by columns or by rows:
#
# $$X\,[A_1\;A_2] = [XA_1\;\;XA_2] \qquad\qquad
# [X_1\;X_2]\begin{bmatrix}A_1\\A_2\end{bmatrix} = X_1A_1 + X_2A_2$$
#
# By columns, each rank has some *columns of the result*. By rows, each rank has *one term of a
# sum* for every entry of the result. GELU acts on single entries, so it can be applied to columns.
#
# The second matrix is then cut by rows, because rank r has exactly the columns of GELU(XA) that
# meet its rows of B:
#
# $$Z = \mathrm{GELU}(X[A_1 \cdots A_t])\begin{bmatrix}B_1\\ \vdots\\ B_t\end{bmatrix}
# = \sum_{r=1}^{t} \mathrm{GELU}(XA_r)\,B_r$$

# %%
view.blocks(columns, role="down")

# %% [markdown]
# In this picture W is B, and X is the input of this second layer, GELU(XA): b s × 4h numbers that
# are never communicated. Each rank multiplies its columns of X with its rows of W, and a single
# all-reduce adds the four products. What would other cuts cost, and are they right?

# %%
cuts = ["A by columns, B by rows", "A by rows, B by columns", "A by rows, summed after GELU"]
which = pl.exercises.choose("Which of these gives a wrong result?", cuts)
which


# %%
def three_cuts(group):
    """Errors of the three cuts against the whole MLP; the ledger's phase is the cut's name."""
    import torch
    from torch.nn.functional import gelu

    torch.manual_seed(0)
    X, A, B = torch.randn(16, 64), torch.randn(64, 256) / 8, torch.randn(256, 64) / 16
    t, r = group.size, group.index
    by_columns = gelu(X @ A.chunk(t, 1)[r]) @ B.chunk(t, 0)[r]
    group.all_reduce(by_columns, phase=cuts[0]).wait()
    term = X.chunk(t, 1)[r] @ A.chunk(t, 0)[r]  # of the sum X A
    too_late = gelu(term) @ B
    group.all_reduce(too_late, phase=cuts[2]).wait()
    group.all_reduce(term, phase=cuts[1]).wait()
    parts = X.new_empty(t * 16, 64 // t)
    group.all_gather(parts, gelu(term) @ B.chunk(t, 1)[r], phase=cuts[1]).wait()
    found = by_columns, torch.cat(parts.chunk(t), dim=1), too_late
    return [(one - gelu(X @ A) @ B).abs().max().item() for one in found]


traced = pl.trace(three_cuts, ranks=2, device="cpu")
calls = traced.collectives.query("rank == 0").groupby("phase")
table = pd.DataFrame({"calls": calls.size(), "kB sent": calls.wire_bytes.sum() / 1e3}).loc[cuts]
table.assign(right=[error < 1e-5 for error in traced.results[0]])

# %%
which.reveal(3, "GELU acts on terms of the sum X A, and GELU(u + v) is not GELU(u) + GELU(v).")

# %% [markdown]
# Attention is such a pair too. Head i needs only its own columns of the query, key and value
# weights, and its result is multiplied with its own rows of the output projection only:
#
# $$Q_i = XW^Q_i,\quad K_i = XW^K_i,\quad V_i = XW^V_i,\qquad
# Z = \sum_{i=1}^{a} \mathrm{softmax}\!\left(\frac{Q_iK_i^\top}{\sqrt{h/a}} + C\right)V_i\,W^O_i$$
#
# C is the causal mask: −∞ where a token would see a later one, and 0 elsewhere.
# With a/t whole heads per rank, `qkv` is column-parallel, `proj` is row-parallel, and the scores
# of a head exist on one rank only.

# %%
calls_guess = pl.exercises.guess(
    "all-reduces per block and step, forward and backward together",
    low=0,
    high=16,
    unit="calls",
    decimals=0,
)
calls_guess

# %% [markdown]
# ## f and g: one all-reduce in each direction
# In backward, ∂Z stands for the gradient of the loss with respect to Z. For $Z = \sum_r
# \mathrm{GELU}(XA_r)B_r$ every rank knows $\partial Z$, because Z is replicated. The chain rule
# gives each rank everything it needs for its own weights:
#
# $$U_r = XA_r,\qquad \partial U_r = \left(\partial Z\,B_r^\top\right)\odot\mathrm{GELU}'(U_r),
# \qquad \partial B_r = \mathrm{GELU}(U_r)^\top\,\partial Z,
# \qquad \partial A_r = X^\top\partial U_r$$
#
# But X is used by every rank, so its gradient is a sum over ranks again:
#
# $$\partial X = \sum_{r=1}^{t} \partial U_r\,A_r^\top$$
#
# [Megatron-LM](https://arxiv.org/abs/1909.08053) (section 3) writes the two sums as a pair of
# operators at the two ends of the pair of layers, $Z = g\left(\mathrm{GELU}(f(X)A_r)B_r\right)$:
#
# | operator | where | forward | backward |
# |---|---|---|---|
# | f | before the column-parallel layer | nothing | all-reduce |
# | g | after the row-parallel layer | all-reduce | nothing |
#
# Each is the other's transpose: the derivative of a copy to t ranks is a sum over t ranks, and the
# derivative of a sum is a copy. Write them.

# %%
warm_up = pl.exercises.f_and_g
warm_up


# %%
### ANSWER: f_and_g


verdict_f_g = pl.exercises.f_and_g.check(f, g)
verdict_f_g

# %% [markdown] tags=["solution-only"]
# **Why it works.** `Copy.forward` returns the same numbers, so the all-reduce of backward is the
# only thing that it adds. `Sum.backward` hands the gradient on, because every rank has all of it.
# **Common mistakes**: summing in both directions (gradients are t times too large); summing in
# neither; summing `grad` in place, although autograd may still need it; dividing by t as one does
# with data-parallel gradients. **A second solution** subclasses `Function` for neither: f is a hook
# on the gradient, and g adds what the other ranks have as a constant, so that its derivative is
# that of x alone.

# %% tags=["solution-only"]
### ANSWER: f_and_g_other


pl.exercises.f_and_g.check(f, g)

# %% [markdown]
# ## An MLP on t ranks
# With f and g, autograd does the rest: a tensor-parallel layer is an ordinary module with smaller
# weights. Only one thing is still easy to get wrong: what has to be added *once*, and not t times?

# %%
mlp_exercise = pl.exercises.tensor_mlp
mlp_exercise


# %%
### ANSWER: tensor_mlp


verdict_mlp = pl.exercises.tensor_mlp.check(MyMLP)
verdict_mlp

# %% [markdown] tags=["solution-only"]
# **Why it works.** Rows of `up.weight` are columns of A, because `nn.Linear` stores the transpose.
# **Common mistakes**: adding `down.bias` before g, so that it is summed t times; keeping a slice,
# which is a view and keeps the whole matrix alive; taking rows where columns are meant. **A second
# solution** keeps plain parameters and calls `F.linear`:

# %% tags=["solution-only"]
### ANSWER: tensor_mlp_other


pl.exercises.tensor_mlp.check(MyMLP)

# %% [markdown]
# ## Attention by heads
# Attention is cut by heads. `qkv` has 3h outputs in the order query, key, value. A contiguous t-th
# of its rows is *not* a t-th of the heads: with t = 2, rank 0 would get all queries and half of the
# keys. The same mistake is easily made when a checkpoint is loaded with another t.

# %%
attention_exercise = pl.exercises.tensor_attention
attention_exercise


# %%
### ANSWER: tensor_attention


verdict_attention = pl.exercises.tensor_attention.check(MyAttention)
verdict_attention

# %% [markdown] tags=["solution-only"]
# **Why it works.** Viewed as (3, heads, h/a, h), the weight can be cut along the heads, and the
# part is again a query, a key and a value weight. **Common mistakes**: `qkv.weight.chunk(t)`, with
# which rank 0 of 2 has all queries and half of the keys; the scale 1/√h for 1/√(h/a); no causal
# mask; `proj.bias` added t times; a second all-reduce of the mixed heads. **A second solution**
# cuts query, key and value each for itself, joins them again in the constructor, and leaves the
# scores to `scaled_dot_product_attention`:

# %% tags=["solution-only"]
### ANSWER: tensor_attention_other


pl.exercises.tensor_attention.check(MyAttention)

# %% [markdown]
# ## Your layers train a GPT
# Put both into the reference GPT, on four real ranks. This is the whole program, and nothing in it
# is paralab's parallelism: `pl.observe` only writes down what it computes, sends and holds.

# %%
model = pl.ModelSpec(layers=3, hidden=128, heads=4, seq_len=64)


def train(gpt, steps):
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(steps):
        [(tokens, targets)] = pl.reference.batches(gpt.spec, step=step, microbatch_size=4)
        optimizer.zero_grad()
        loss = gpt(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def own_gpt(spec, steps):
    gpt = pl.reference.GPT(spec)
    for block in gpt.blocks:
        block.attention = MyAttention(
            block.attention.qkv, block.attention.proj, heads=spec.heads, f=f, g=g
        )
        block.mlp = MyMLP(block.mlp.up, block.mlp.down, f=f, g=g)
    return train(gpt, steps)


own = None
if verdict_f_g and verdict_mlp and verdict_attention:
    own = pl.observe(own_gpt, ranks=4, args=(model, 4))
else:
    print("write f, g, MyMLP and MyAttention first")

# %% [markdown]
# And the library's program for the same plan: four processes, a quarter of every matrix on each.

# %%
report = pl.run(model, columns, optimizer="sgd", steps=4, progress=False)


def in_blocks(report):
    """Calls of rank 0 in the blocks, in the second step: how many, and how many kB it sends."""
    calls = report.collectives.query("rank == 0 and step == 1")
    way = calls["phase"].str.removeprefix("linear_")
    calls = calls[way.isin(["forward", "backward"])]
    sent = calls.groupby(way).agg(calls=("op", "size"), kB=("wire_bytes", lambda b: b.sum() / 1e3))
    return sent.loc[["forward", "backward"]]


in_blocks(report)

# %%
if own:
    same = np.allclose(own.losses, report.losses, rtol=1e-4)
    print("losses of your GPT and of the library's plan are equal to 1e-4:", same)
    print(in_blocks(own))

# %%
peaks = pl.exercises.choose(
    "The blocks are sharded in both runs. Which run has the higher peak memory per rank?",
    ["yours", "the library's", "neither: the blocks decide"],
)
peaks

# %% tags=["measured"]
title = "Embedding, head and logits are replicated next to your layers"
view.memory_bars({"your layers": own, "the library": report}, title=title) if own else None

# %% tags=["measured"]
names, title = ["your layers", "the library"], "Both wait for one all-reduce after the other"
view.timelines(own, report, labels=names, ranks=[0], title=title) if own else None

# %% [markdown]
# Once all three exercises are solved, the cells above show your GPT. (The steps are drawn on this
# machine's wall clock, on which ranks also wait for a core.) In the blocks its calls and bytes are
# the library's. Your all-reduces are called *world*, after the group of all ranks; the library's
# are called *tp*, after a group of the same four. The memory differs: your embedding and head are
# replicated, and the library cuts both by entries of the vocabulary, the subject of the section
# *The logits stay where they are*.

# %%
peaks.reveal(1, "Outside the blocks each of your ranks has all weights, and all logits.")

# %%
per_block = in_blocks(report)["calls"].sum() / model.layers
calls_guess.reveal(int(per_block))

# %% [markdown]
# ## Four all-reduces per block: 8(t−1)/t · b s h
# The program of a rank says where they are. This is what changes from the program of one device
# to that of rank 0 of four. The work is cut into smaller pieces, because it has to stop for
# messages; the two lines ALL_REDUCE are the messages themselves. The line with `x`, an activation,
# is the operator g of the table above; the line with `g`, here a gradient, is the operator f. Of
# the seven in each direction six belong to the three blocks; the others to embedding and head.
# Their size, 918 kB, is 7 S; a rank sends 2(t−1)/t = 1.5 times as many bytes.

# %%
pl.program(model, pl.Plan(microbatch_size=4)).diff(pl.program(model, columns))

# %% tags=["measured"]
view.timelines(report.replay(), ranks=[0])

# %% [markdown]
# In the hatched gaps the rank waits. The eighth message of forward is small: the loss's all-gather,
# of two numbers per token. It is sent within the instruction that computes the loss, so the program
# has no line for it. Each of a block's four all-reduces has b s h elements. Per rank and block they
# send
#
# $$E_\text{block} = \underbrace{2}_{g:\ \text{forward}}\cdot\frac{2(t-1)}{t}\,b\,s\,h
# \;+\;\underbrace{2}_{f:\ \text{backward}}\cdot\frac{2(t-1)}{t}\,b\,s\,h
# = \frac{8(t-1)}{t}\,b\,s\,h \quad\text{elements.}$$

# %%
pair_guess = pl.exercises.guess(
    "kB that a rank sends per block with t = 2, in percent of those with t = 4",
    low=0,
    high=200,
    unit="%",
    decimals=0,
)
pair_guess

# %%
b, s, h = columns.microbatch_size, model.seq_len, model.hidden
pairs = {}
for t in (2, 4):
    run = report if t == 4 else pl.run(model, columns.replace(tp=2), steps=2, progress=False)
    counted = in_blocks(run)["kB"].sum() / model.layers
    pairs[f"t={t}"] = {"formula (kB)": 4 * 8 * (t - 1) / t * b * s * h / 1e3, "counted": counted}
pd.DataFrame(pairs).T.round(1)

# %%
pair_guess.reveal(100 * pairs["t=2"]["counted"] / pairs["t=4"]["counted"])

# %% [markdown]
# The formula does not shrink with t, it grows towards 8 b s h. The weights are not in it: no weight
# is ever sent, and without sequence parallelism no gradient of a weight either. In backward a part
# of the messages can be hidden: the gradient of the layer's weight is computed while the sum of ∂X
# is in flight (with `tp_overlap=False` in the plan a rank waits instead). In forward the next layer
# needs the sum, so it can be hidden only if the product and its message are cut into pieces (the
# table at the end of this lab says who does); the runs here do not.
#
# In [PyTorch #157606](https://github.com/pytorch/pytorch/issues/157606) backward has no collective:
# a column-parallel layer and a row-parallel one, as in PyTorch's example, make one all-reduce
# forward and none backward. The author then takes a single layer, sees one collective per rank, and
# asks whether there should not be two, one in each direction.

# %%
single = pl.exercises.choose(
    "A single column-parallel layer, its input replicated and its output left in columns, sends:",
    ["one all-reduce in forward", "one all-reduce in backward", "one in each direction"],
)
single

# %%
single.reveal(2, "It has an f and no g. A single row-parallel layer has a g and no f.")


# %%
def torchs_pair(input_grad):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    pair = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    styles = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(pair, init_device_mesh("cpu", (2,)), styles)
    x = torch.ones(4, 8, requires_grad=input_grad)
    pair(x).sum().backward()


for input_grad in (False, True):
    calls = pl.observe(torchs_pair, ranks=2, args=(input_grad,)).collectives.query("rank == 0")
    made = {way: int((calls["phase"] == way).sum()) for way in ("forward", "backward")}
    print(f"the input needs a gradient: {input_grad!s:<5}  collectives: {made}")

# %% [markdown]
# f's all-reduce sums the gradient of the layer's *input*. In that example the input is data, which
# needs none, so PyTorch leaves the message out. Inside a model the input comes from other layers,
# so the message is sent.
#
# ## The logits stay where they are
# The head's weight is cut by entries of the vocabulary, so rank r has the logits $z_v$ of its own
# $v \in V_r$. Gathering them costs (t−1)/t · b s V elements. The loss of a token with target y
# does not need them:
#
# $$\ell = \log\sum_{v=1}^{V} e^{z_v} - z_y
# = m + \log\sum_{r=1}^{t}\;\sum_{v\in V_r} e^{z_v - m} \;-\; \sum_{r=1}^{t} [y\in V_r]\,z_y,
# \qquad m = \max_v z_v$$
#
# (Subtracting m changes nothing, and keeps the exponentials from overflowing.) So three numbers per
# token are enough: the maximum, the sum of exponentials and the target's logit. The gradient needs
# no message at all, since every rank knows m and the sum:
#
# $$\frac{\partial\ell}{\partial z_v} = \frac{e^{z_v - m}}{\sum_{u} e^{z_u - m}} - [v = y]$$
#
# Megatron-LM and [PyTorch](https://github.com/pytorch/pytorch/pull/121366) all-reduce the three
# numbers, 3 · 2(t−1)/t · b s elements. This package all-gathers two, the rank's own log Σ exp and
# the target's logit, (t−1) · 2 b s elements: one message instead of three, and fewer bytes for t =
# 2 only.

# %%
loss_bytes = {}
for name, b, s, V, t in (("this run", 4, 64, model.vocab, 4), ("22 B", 4, 2048, 51200, 8)):
    loss_bytes[name] = {
        "gathered logits": 4e-3 * (t - 1) / t * b * s * V,
        "3 all-reduces": 4e-3 * 3 * 2 * (t - 1) / t * b * s,
        "all-gather of 2": 4e-3 * (t - 1) * 2 * b * s,
    }
counted = report.collectives.query("rank == 0 and step == 1 and phase == 'loss_forward'")
print(f"counted in this run: {counted.wire_bytes.sum() / 1e3} kB per rank")
pd.DataFrame(loss_bytes).T.round(1).add_suffix(" (kB)")

# %% [markdown]
# The row 22 B is the model of 22 billion parameters in table 3 of [Korthikanti et
# al.](https://arxiv.org/abs/2205.05198), with t = 8. **Go further**: write the loss, forward and
# backward.

# %%
loss_exercise = pl.exercises.vocab_parallel_loss
loss_exercise


# %%
### ANSWER: vocab_parallel_loss


pl.exercises.vocab_parallel_loss.check(vocab_parallel_loss)

# %% [markdown] tags=["solution-only"]
# **Why it works.** The two sums can share one message, as they are both sums over ranks; the
# maximum cannot. **Common mistakes**: no maximum, so that large logits overflow; using the rank's
# own maximum in exp and then adding sums that belong to different maxima; a target outside of the
# rank's part used as an index; subtracting 1 at the target on every rank; no division by the
# number of tokens in backward; copies of all logits. **A second solution** sends three messages
# and lets autograd find the gradient, with the sum as a `Function` whose backward does nothing:

# %% tags=["solution-only"]
### ANSWER: vocab_parallel_loss_other


pl.exercises.vocab_parallel_loss.check(vocab_parallel_loss)

# %% [markdown]
# ## Sequence parallelism: an all-reduce in two halves
# Between the pairs are norms, dropout and the sums x + layer(x): the *residual stream*, b s × h
# numbers. Every rank does the same work there on the same tokens, and keeps the same activations.
# Lab 01 has shown that an all-reduce is a reduce-scatter followed by an all-gather:

# %%
view.ring(4)

# %% [markdown]
# **Sequence parallelism** keeps the residual stream sharded along the sequence dimension between
# the two halves. Norms and dropout then work on s/t tokens per rank, and f and g become
#
# | operator | forward | backward |
# |---|---|---|
# | f̄, before the column-parallel layer | all-gather | reduce-scatter |
# | ḡ, after the row-parallel layer | reduce-scatter | all-gather |
#
# $$\underbrace{\frac{2(t-1)}{t}S}_{\text{all-reduce}} =
# \underbrace{\frac{t-1}{t}S}_{\text{reduce-scatter}}
# + \underbrace{\frac{t-1}{t}S}_{\text{all-gather}}$$
#
# (Korthikanti et al., who introduced this, call the second pair g and ḡ, and the pair of the
# sections above f and f̄.) Before you guess the bytes below: what must backward do if the gathered
# input was not kept?

# %%
sequence = columns.replace(sequence_parallel=True)
view.blocks(sequence, role="up")

# %%
bytes_guess = pl.exercises.guess(
    "bytes with sequence parallelism, in percent of those without",
    low=50,
    high=200,
    unit="%",
    decimals=0,
)
bytes_guess

# %%
sharded = pl.run(model, sequence, optimizer="sgd", steps=4, progress=False)
both = {"without": in_blocks(report)["kB"], "with": in_blocks(sharded)["kB"]}
sent = pd.DataFrame(both)
sent.round(1).add_suffix(" (kB)")

# %%
bytes_guess.reveal(100 * sent["with"].sum() / sent["without"].sum())

# %% [markdown]
# Forward sends the same number of bytes, backward half as much again. The input that f̄ gathered in
# forward is not saved for backward, because the saved activations would then not be a t-th of the
# whole, so it is gathered a second time. (Megatron-LM does the same. Both send that call while the
# gradient of the input is computed, which does not need it. PyTorch saves the gathered input.) In
# return, activations take less memory, and so do parameters: a rank keeps the positions of its own
# tokens only, a t-th of that table of s × h numbers. *Buffers* are here tensors that messages fill:

# %% tags=["measured"]
view.memory_bars(
    {"t = 4": report, "t = 4, sequence parallel": sharded},
    title="Sequence parallelism lowers the peak: it shards the residual stream",
)

# %% [markdown]
# ## The collectives that you did not write
# In [torchtitan #1369](https://github.com/pytorch/torchtitan/issues/1369) a one-block model (dim
# 256, 16 heads, 8 × 2048 tokens) runs with TP=2 under sequence parallelism. Its author expects
# four all-reduces per rank (as pairs of reduce-scatter and all-gather), finds six, and wonders
# about further calls of 1, 256 and 2048 numbers. Answer, then read the calls of our program for the
# same model:

# %%
further_pairs = pl.exercises.choose(
    "The two pairs that the author did not expect belong to",
    [
        "the input and output of the whole model: embedding and head",
        "the gradients of the norms' weights",
        "the loss and the norm of all gradients",
    ],
)
further_pairs

# %%
thread = pl.ModelSpec(layers=1, hidden=256, heads=16, seq_len=2048)
theirs = pl.predict(thread, pl.Plan(tp=2, sequence_parallel=True, microbatch_size=8))
calls = theirs.collectives.query("rank == 0 and step == 0")
calls = calls.assign(numbers=calls.payload_bytes // 4)
calls.groupby(["phase", "op", "numbers"], sort=False).size().rename("calls").to_frame()

# %%
further_pairs.reveal(1, "The embedding's rows and the head's columns are cut over the ranks too.")

# %% [markdown]
# Per rank there are six reduce-scatters: one after the embedding, two after the pairs of the
# block, and three in backward, for the inputs of the head and of the two pairs. With one all-gather
# for each that makes six pairs, for L blocks 4L + 2. (The three further all-gathers of backward
# are those that PyTorch avoids by saving the gathered input.) As to the small calls: 256 numbers
# are the gradient of a norm's weight, the subject of the section after next. Our program adds those
# of all norms in one call: 1,536 numbers are the weight and the bias of 3 norms, 256 each. A single
# number is a scalar such as the norm of all gradients, by which they are clipped. Our model has no
# call of 2048 numbers, and the thread does not say where theirs comes from.
#
# ## What a block keeps for backward
# [Korthikanti et al.](https://arxiv.org/abs/2205.05198) (table 2) write the activations of a block,
# in bytes with 16-bit numbers (lab 00 derives the first of these formulas). Of the 34, norms,
# dropouts and the inputs of the pairs are 10, and what is inside the pairs is 24. Without sequence
# parallelism the 10 are replicated:
#
# $$M_\text{none} = s\,b\,h\left(34 + 5\frac{a\,s}{h}\right)
# \qquad M_\text{tensor} = s\,b\,h\left(10 + \frac{24}{t} + 5\frac{a\,s}{h\,t}\right)
# \qquad M_\text{tensor, sequence} = \frac{s\,b\,h}{t}\left(34 + 5\frac{a\,s}{h}\right)$$
#
# $$M_\text{tensor, selective} = s\,b\,h\left(10 + \frac{24}{t}\right)
# \qquad M_\text{tensor, sequence, selective} = s\,b\,h\,\frac{34}{t}
# \qquad M_\text{full} = 2\,s\,b\,h$$
#
# *Recomputation* keeps less in forward and computes the rest again in backward (lab 06). Selective
# recomputation does not keep the scores, the term with a s/h; full recomputation keeps the block's
# input only. $M_\text{full}$ is the paper's; with sequence parallelism the input is sharded too,
# and a rank of this library keeps a t-th of it. Without sequence parallelism, how much of what a
# rank keeps is the part that is replicated?

# %%
undivided = pl.exercises.guess(
    "the 10 as a share of 10 + 24/t, with t = 8", low=0, high=100, unit="%", decimals=0
)
undivided

# %% [markdown]
# For three of the four models of their table 3, with t = 8:

# %%
sizes = {"22 B": (64, 6144, 2048, 4), "175 B": (96, 12288, 2048, 1), "1 T": (160, 25600, 2048, 1)}
kept, t = {}, 8
for name, (a, h, s, b) in sizes.items():
    x, scores = s * b * h / 1e6, 5 * a * s / h
    kept[f"{name} (MB)"] = {
        "no parallelism": x * (34 + scores),
        "tensor": x * (10 + 24 / t + scores / t),
        "tensor, sequence": x * (34 + scores) / t,
        "tensor, selective recomputation": x * (10 + 24 / t),
        "tensor, sequence, selective": x * 34 / t,
        "full recomputation": x * 2,
        "sequence, full recomputation": x * 2 / t,
    }
pd.DataFrame(kept).round().astype(int)

# %%
undivided.reveal(100 * 10 / (10 + 24 / 8))  # t = 8

# %% [markdown]
# Tensor parallelism alone does not divide the 10: with t = 8 and selective recomputation these are
# 10 of 10 + 24/8 = 13. Sequence parallelism divides them as well.
#
# ## The gradients of the norms must be summed
# The weights of a LayerNorm are replicated. With sequence parallelism each rank sees only its own
# tokens, so it has only its part of the gradient, and the parts must be added: the phase *shared*
# in the table of calls above. (The biases of `down` and `proj` are added behind ḡ, to a rank's own
# tokens, so what a rank could sum up there would be a part as well. The library computes their
# gradients in backward, behind the all-gather that belongs to ḡ, from the gradient of all tokens:
# they are complete without a message.) Megatron's users ask [why the sum of the parts is
# necessary](https://github.com/NVIDIA/Megatron-LM/issues/443). Leave it out and see. A pass of your
# own (lab 02) drops the instruction from the program of every rank:


# %%
import textwrap


def forget_norms(program):
    return program.replace(ins for ins in program.code if ins.phase != "shared")


try:
    pl.run(model, sequence.replace(passes=(forget_norms,)), progress=False)
except ValueError as refused:
    print(textwrap.fill(str(refused), 100))

# %% [markdown]
# The program is refused before a process starts: its checks know for each value over which axes it
# is a partial sum. A trainer without such a check goes on. Here is one in a few lines, with one
# norm and one layer, on two ranks with half of the tokens each.

# %%
silent = pl.exercises.choose(
    "Without the sum of the norm's gradients, after 200 steps:",
    [
        "the loss diverges",
        "the loss falls, but to more than twice the value that it has with the sum",
        "the loss falls at least as far as with the sum",
    ],
)
silent


# %%
def train_norm(group, add_up, steps=200):
    import torch

    torch.manual_seed(0)
    x, shape = torch.randn(64, 32), torch.linspace(0, 2, 32)
    wanted = (x * shape) @ torch.randn(32, 32) / 6  # the norm's weight can learn `shape`
    norm, layer = torch.nn.LayerNorm(32), torch.nn.Linear(32, 32)
    everything, summed = [*norm.parameters(), *layer.parameters()], list(layer.parameters())
    update = torch.optim.AdamW(everything, lr=1e-2)
    own = slice(group.index * 64 // group.size, (group.index + 1) * 64 // group.size)  # its tokens
    found = []
    for _ in range(steps):
        loss = (layer(norm(x[own])) - wanted[own]).square().sum() / wanted.numel()
        update.zero_grad()
        loss.backward()
        for parameter in everything if add_up else summed:
            group.all_reduce(parameter.grad).wait()
        found.append((loss.item(), norm.weight.grad.clone()))
        update.step()
    whole = (layer(norm(x)) - wanted).square().sum().item() / wanted.numel()  # of all tokens
    return [one for one, _ in found], found[0][1], norm.weight.detach(), whole


right = pl.trace(train_norm, ranks=1, args=(True, 1)).results[0][1]
drift = {}
for name, add_up in (("added", True), ("left out", False)):
    ranks = pl.trace(train_norm, 2, args=(add_up,), device="cpu").results
    losses, first, weights, whole = zip(*ranks, strict=True)
    drift[name] = {
        "first loss": sum(one[0] for one in losses),
        "last loss": sum(one[-1] for one in losses),
        "all tokens with rank 0's norm": whole[0],
        "first gradient wrong by (%)": 100 * np.abs(first[0] - right).max() / np.abs(right).max(),
        "weights differ by up to": np.abs(weights[0] - weights[1]).max(),
    }
pd.DataFrame(drift).T.round(3)

# %%
silent.reveal(3, "Each rank trains a norm of its own, and both of them fit their own tokens.")

# %% [markdown]
# Here no loss curve shows the mistake, and no error is raised. The loss is even a little lower,
# because each norm fits its own rank's tokens. With one of the norms for all tokens it is higher
# than in the right run. The two ranks have different norms now, and which of them a checkpoint
# contains depends on the rank that writes it. Megatron's users report
# [norms](https://github.com/NVIDIA/Megatron-LM/issues/474) and [gradients of
# norms](https://github.com/NVIDIA/Megatron-LM/issues/1446) that differ between ranks. Gradients
# must differ before the sum and be equal after it, so it matters where one prints them. The test
# that finds this mistake compares the first step's gradient with that of one process. Here it is
# for the library's two plans, with dropout on:

# %%
noisy = model.replace(layers=2, dropout=0.1)
proof = {"optimizer": "sgd", "steps": 1, "keep_state": True, "progress": False}
alone = pl.run(noisy, pl.Plan(microbatch_size=4), **proof).gradients
for name, plan in {"tensor": columns, "tensor and sequence": sequence}.items():
    split = pl.run(noisy, plan, **proof).gradients
    wrong = max(np.abs(alone[n] - split[n]).max() / np.abs(alone[n]).max() for n in alone)
    print(f"{name}: all gradients are equal to 1e-5 of their largest entry: {wrong < 1e-5}")

# %% [markdown]
# ## Dropout needs two streams of random numbers
# Two ranks draw the same dropout mask or different ones, depending on their seeds:


# %%
def masks(group, own_seed):
    import torch

    torch.manual_seed(1 + own_seed * group.index)
    return torch.nn.functional.dropout(torch.ones(32, 128), 0.5)


for name, own_seed in (("one seed for all ranks", False), ("a seed per rank", True)):
    one, other = pl.trace(masks, 2, args=(own_seed,)).results
    print(f"{name}: {100 * (one == other).mean():.0f} % of the two masks' entries agree")

# %%
streams = pl.exercises.choose(
    "Which dropout must use the seed that is common to all ranks of the tensor-parallel group?",
    [
        "on attention scores",
        "on the residual stream, without sequence parallelism",
        "on the residual stream, with sequence parallelism",
    ],
)
streams

# %%
streams.reveal(2, "There the tokens are replicated. Scores belong to one rank's own heads.")

# %% [markdown]
# Where tokens are replicated, all ranks must draw the *same* mask, or their copies of the residual
# stream drift apart. Where tokens or heads are sharded, each must draw a *different* one, or token
# 1 and token s/t + 1 lose the same entries. [Megatron-LM](https://github.com/NVIDIA/Megatron-LM)
# therefore keeps two states of its random number generator per rank
# (`megatron/core/tensor_parallel/random.py`; experts have a third one). The runs above draw the
# mask that a single device would draw and keep their part, which costs time but lets the gradients
# agree with dropout on.
#
# ## Why t stays inside a node
# Tensor parallelism sends with every layer, and the next layer waits. Take two nodes of four
# devices; the link between them has a tenth of the bandwidth. The same global batch, in two ways:

# %%
nodes = pl.Cluster(
    name="2 nodes of 4",
    nodes=2,
    devices_per_node=4,
    flops=3e14,
    memory_bandwidth=2e12,
    memory=80 * 10**9,
    intra=pl.Link(alpha=5e-6, bandwidth=3e11),
    inter=pl.Link(alpha=15e-6, bandwidth=3e10),
)
wide = pl.ModelSpec(layers=4, hidden=4096, heads=32, seq_len=2048, vocab=32000)
ways = {
    "tp=4, dp=2": pl.Plan(tp=4, dp=2, microbatch_size=2),
    "tp=8": pl.Plan(tp=8, microbatch_size=4),
}
rows = {}
for name, plan in ways.items():
    expected = pl.predict(wide, plan, nodes)
    between = expected.traffic(by="level").set_index("level")["bytes"]["inter"]
    rows[name] = {
        "all ranks, between nodes (GB)": between / 1e9,
        "step (ms)": 1e3 * expected.step_time,
        "of it waiting (ms)": expected.summary()["value"]["waiting"],
    }
pd.DataFrame(rows).T.round(1)

# %% [markdown]
# The waiting time differs far more than the bytes on the slow link. Data parallelism sends
# gradients there once per step while backward goes on. Tensor parallelism sends sums that the next
# layer waits for. So t is rarely larger than the number of devices in a node. Find out for which
# link speed and micro-batch a larger t would pay; *Run it* starts real ranks:

# %%
view.widgets.tensor1d()

# %% [markdown]
# ## What to remember
# 1. Columns first, then rows: the activation between the two layers of a pair is never sent.
# 2. f and g are transposes of each other; a block has four all-reduces of b s h elements.
# 3. Their bytes do not shrink with t, and in forward the next layer waits for them, so t stays
#    inside a node.
# 4. Sequence parallelism splits each all-reduce into its two halves and shards what is in between.
# 5. Parameters that stay replicated while their tokens are sharded need their gradients summed,
#    and a loss curve need not show when they are not.
#
# | when | use |
# |---|---|
# | a layer's weights or activations do not fit on one device | t up to the devices of a node |
# | t > 1 | sequence parallelism, unless the links are the bottleneck (here 25 % more bytes) |
# | the vocabulary is large | the vocabulary-parallel loss |
# | more devices than a node has | data, pipeline or ZeRO parallelism on top (labs 02 to 05, 10) |
#
# $$Z = \sum_r \mathrm{GELU}(XA_r)B_r\qquad E_\text{block} = \frac{8(t-1)}{t}\,b\,s\,h
# \qquad \ell = m + \log\sum_r\sum_{v\in V_r}e^{z_v-m} - z_y$$
#
# ## In PyTorch, DeepSpeed, Megatron
# PyTorch has the two layers as *parallel styles* of modules whose weights become DTensors: tensors
# that know how they are sharded. Its own tensor parallelism, on the same GPT, without and with
# sequence parallelism:


# %%
def torch_plan(sequence):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    out = {"output_layouts": Shard(1)} if sequence else {}
    styles = {"attention.qkv": tp.ColwiseParallel(), "mlp.up": tp.ColwiseParallel()}
    styles |= {name: tp.RowwiseParallel(**out) for name in ("attention.proj", "mlp.down")}
    if sequence:
        styles |= {name: tp.SequenceParallel() for name in ("norm1", "norm2")}
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        styles |= {name: tp.PrepareModuleInput(**gather) for name in ("attention", "mlp")}
    return styles


# %%
def torch_gpt(spec, sequence, steps):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    t, gpt = dist.get_world_size(), pl.reference.GPT(spec)
    mesh = init_device_mesh("cpu", (t,), mesh_dim_names=("tp",))
    for block in gpt.blocks:
        for one in block.attention.qkv.parameters():  # rows in the order of ranks, then q, k, v
            one.data = one.data.unflatten(0, (3, t, -1)).transpose(0, 1).flatten(0, 2)
        tp.parallelize_module(block, mesh, torch_plan(sequence))
    if sequence:  # the stream is sharded before the first block, and gathered for the head
        ends = {gpt.blocks[0]: ((Replicate(),), (Shard(1),))}
        ends[gpt.head] = (Shard(1), None, None), (Replicate(), None, None)
        for module, (now, then) in ends.items():
            layouts = {"input_layouts": now, "desired_input_layouts": then}
            style = tp.PrepareModuleInput(**layouts, use_local_output=True)
            tp.parallelize_module(module, mesh, style)
    return train(gpt, steps)


# %%
saves = pl.exercises.choose(
    "PyTorch's calls under sequence parallelism, compared with ours:",
    [
        "the same",
        "fewer all-gathers and more all-reduces",
        "more all-gathers and fewer all-reduces",
    ],
)
saves

# %%
theirs = {on: pl.observe(torch_gpt, ranks=4, args=(model, on, 4)) for on in (False, True)}
same = [np.allclose(one.losses, report.losses, rtol=1e-4) for one in theirs.values()]
print("losses equal to ours:", all(same))
rows = {}
for name, run in {
    "ours": report,
    "PyTorch": theirs[False],
    "ours, sequence parallel": sharded,
    "PyTorch, sequence parallel": theirs[True],
}.items():
    calls = run.collectives.query("rank == 0 and step == 1")
    ends = ("embedding", "head", "loss", "control", "setup", "gloo")
    calls = calls[~calls["phase"].str.startswith(ends)]
    rows[name] = calls.groupby("op").size().to_dict()
pd.DataFrame(rows).T.fillna(0).astype(int)

# %%
saves.reveal(2, "It saves what it gathered, and sums the gradients of the norms one by one.")

# %% [markdown]
# The table leaves out our calls in embedding, head and loss. In the blocks, without sequence
# parallelism, both send the same twelve all-reduces: each of the three blocks has two in forward
# (g) and two in backward (f). With it there are three differences. PyTorch saves what it gathered,
# so it has no second all-gather in backward (ours: two more per block). At the two ends of the
# blocks its plan above needs an all-gather, since the embedding and the head are replicated there.
# And the gradients of the norms' weights and biases are added one by one inside
# `optimizer.step()`, two calls per norm, where DTensor notices that they are partial sums; ours
# adds all of them in one call. These are the calls of 256 numbers in #1369. Note what `torch_gpt`
# had to do to `qkv`: `ColwiseParallel` cuts contiguous rows, so a fused weight must be reordered
# first.
#
# | here | in Megatron-LM | in PyTorch |
# |---|---|---|
# | `pl.Plan(tp=8)` | `--tensor-model-parallel-size 8` | `parallelize_module(block, mesh, ...)` |
# | `sequence_parallel=True` | `--sequence-parallel` | `SequenceParallel()`, layouts `Shard(1)` |
# | the loss above | `vocab_parallel_cross_entropy` | `with loss_parallel():` |
# | the sum of ∂X during the gradient of W; `tp_overlap=False` waits | the default | – |
# | products overlap messages, in pieces | `--tp-comm-overlap` | async TP, in `torch.compile` |
#
# The flags are those of [Megatron-LM](https://github.com/NVIDIA/Megatron-LM)'s training scripts. In
# the configuration of [torchtitan](https://github.com/pytorch/torchtitan) the degree is
# `tensor_parallel_degree`, in [DeepSpeed's
# JSON](https://www.deepspeed.ai/tutorials/autotp-training) it is
# `{"tensor_parallel": {"autotp_size": 8}}`. None of them was run here.
#
# **On your GPUs** write `pl.set_default_device("cuda")` in the first cell: the library's ranks take
# a GPU each, with NCCL between them. Tensor and sequence parallelism were run so on one GPU that
# two ranks shared, not yet on several. In `report.timeline()` look at the gaps between two
# products, and make `hidden` larger until they no longer matter: the work of a block grows with h²,
# its messages with h.
#
# ## Read on
# * Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053), section 3: columns, rows,
#   f and g, the embedding and the loss. Korthikanti et al. 2022, [Reducing activation
#   recomputation](https://arxiv.org/abs/2205.05198), section 4: sequence parallelism, table 2.
# * PyTorch's [tensor
#   parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html) and its
#   [tutorial](https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html).
# * With recomputation and without sequence parallelism, all ranks keep the same input of a block.
#   ZeRO-R's P<sub>a</sub> shards it: Rajbhandari et al. 2020,
#   [ZeRO](https://arxiv.org/abs/1910.02054), section 6.1, here `pl.Plan(..., recompute="full",
#   partition_activations=True)`.
# * In the package: `paralab/parallel/tensor_parallel.py` (the four operators),
#   `paralab/model/ops.py` (the layers), `paralab/programs/sums.py` (finds a missing sum),
#   `paralab/theory/tensor.py` (the formulas).
