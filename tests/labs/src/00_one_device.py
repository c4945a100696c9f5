# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 00 · Why one device is not enough
#
# **The question.** A model of 7.5 billion parameters has 15 GB of 16-bit weights. Why does its
# training run out of memory on a GPU with 80 GB?
#
# **You will be able to**
# * say what each byte of a training step is for, and derive how many there are;
# * predict which of them grow with the model, the batch and the sequence;
# * train with a large batch on a small device (gradient accumulation), and name the two mistakes
#   that people make with it;
# * say how many devices and how many years a given model needs.
#
# **You need** PyTorch (a module, `backward()`, an optimizer), powers and sums. No earlier lab.
#
# **Minutes** 70 to 90: 30 of reading, 1 of running, the rest for three exercises.

# %%
import paralab as pl
from paralab import view
from paralab.theory import needs

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
GB = 10**9  # decimal, as device makers count
large = pl.ModelSpec.preset("ptdp-7.5b")
weights, states = {"parameters": 2 * large.num_params}, needs.model_states(large, "zero-fp16")
bars = {"the weights": weights, "what training keeps": states}
title = "7.5 billion parameters: the weights fit, training them does not"
view.bytes_bars(bars, {"one device": 80 * GB}, title=title)

# %% [markdown]
# Training keeps eight times as much as the 16-bit weights, and this picture does not even contain
# the activations. In this lab you find each of these bytes in a model that is small enough to
# train here, write the formulas down, and return to the large model with them.
#
# ## A training step is a list of instructions
#
# In PyTorch a training step is four lines:
#
# ```python
# optimizer.zero_grad()
# loss = model(tokens, targets)      # forward: computes the loss, saves activations for backward
# loss.backward()                    # backward: uses them, makes a gradient for each parameter
# optimizer.step()                   # update: gradients change the weights
# ```
#
# paralab compiles a **plan** (how a model is to be trained) to the same step as a list of
# instructions. With one device the list holds nothing but these three phases. A block is one
# transformer layer (attention and an MLP), and *mb* is a micro-batch, the samples that go through
# the model together. *frees* names the values that no later instruction uses: `x`, the input of the
# block; `saved`, its activations; `g`, the gradient of the block's output; `grad`, the gradient of
# its parameters. (The memory of `x` stays until `saved` is freed, because backward of the first
# norm needs it.)

# %%
model = pl.ModelSpec(layers=4, hidden=256, heads=4, seq_len=128, attention="explicit")
plan = pl.Plan(microbatch_size=8)
pl.program(model, plan)

# %% [markdown]
# Every later lab adds instructions to this list. Reading them is how you will see what a way of
# parallel training really does.
#
# | symbol | meaning |
# |---|---|
# | Ψ | parameters of the model, a count |
# | L, h, a, V | layers (blocks), hidden size, heads, vocabulary |
# | s, b, m | tokens of a sequence, samples of a micro-batch, micro-batches of a step |
# | B | samples of a step, m · b |
# | K | bytes of model state per parameter |
# | Q, K, V | where they are matrices: the queries, keys and values of attention |
# | M | bytes of memory |
# | C | FLOPs (floating-point operations) of a whole training (in labs 10 and 11: of a step) |
# | D | tokens that a model is trained on |
# | g | gradient |
# | η, ε | learning rate and small constant of AdamW |
#
# ## Model states: K bytes for each of Ψ parameters
#
# A weight in 32-bit floating point (fp32) takes 4 bytes. How many bytes does the device hold *for
# each parameter* while it trains with AdamW, activations left out? Commit to a guess first.

# %%
guess = pl.exercises.guess(
    "bytes per parameter while training (fp32, AdamW)", low=4, high=40, unit="bytes", decimals=0
)
guess

# %% [markdown]
# Now train: one real process (a **rank**; on a cluster there is one for each device), real text
# (the source code of PyTorch's layers), three steps. Meanwhile a ledger records when each
# tensor is allocated and freed. The table shows the maximum of each category in a step.

# %%
report = pl.run(model, plan, steps=3, progress=False)
most = report.memory.groupby("category")["bytes"].max().to_frame("bytes")
most["bytes per parameter"] = (most["bytes"] / model.num_params).round(2)
most.sort_values("bytes", ascending=False)

# %%
kept = most["bytes"][["parameters", "gradients", "optimizer"]]
guess.reveal(round(kept.sum() / model.num_params))

# %% [markdown]
# Three of the categories are the **model states**: the weight, its gradient, and the two moments of
# AdamW, which are running means of the gradient and of its square. Of the others, *workspace* is
# temporary tensors of a single operation, *buffers* is here the causal mask, and *other* is small
# scalars such as the loss.
#
# $$M_\text{states} = K\,\Psi, \qquad
# K_\text{fp32} = \underbrace{4}_\text{weight} + \underbrace{4}_\text{gradient}
# + \underbrace{4 + 4}_\text{two moments} = 16.$$
#
# How many parameters are there? One block has
#
# * attention: queries, keys and values $3h^2 + 3h$, the projection after them $h^2 + h$;
# * the MLP: up to $4h$ and down again, $4h^2 + 4h$ and $4h^2 + h$;
# * two layer norms with a scale and a shift each: $4h$.
#
# Together $12h^2 + 13h$. In addition to the $L$ blocks there are the token embedding ($Vh$, which
# is also the output matrix when the two are *tied*), the positions ($sh$) and the last norm
# ($2h$):
#
# $$\Psi = L\,(12h^2 + 13h) + Vh + sh + 2h.$$

# %%
L, h, s, V = model.layers, model.hidden, model.seq_len, model.vocab
psi = L * (12 * h**2 + 13 * h) + V * h + s * h + 2 * h
print(f"parameters by the formula {psi:,}, of the real model {model.num_params:,}")
print(f"states by the formula {16 * psi:,} bytes, in the ledger {kept.sum():,}")
print(f"the difference is {kept.sum() - 16 * psi} bytes: a step counter (4 bytes) for each of")
print(f"{len(model.parameter_shapes())} tensors, which AdamW keeps to correct its means")

# %% [markdown]
# ### Mixed precision also needs 16 bytes per parameter
#
# Large models compute with 16-bit weights and gradients, which halves two terms. But small updates
# vanish in 16 bits: the next bf16 number above 1 is 1 + 1/128, so a change of less than half of
# that is lost. So the optimizer keeps a 32-bit **master copy** of the weights
# ([ZeRO](https://arxiv.org/abs/1910.02054), sec. 3.1):
#
# $$K_\text{mixed} = \underbrace{2}_\text{weight} + \underbrace{2}_\text{gradient}
# + \underbrace{4 + 4 + 4}_\text{master copy, two moments} = 2 + 2 + 12 = 16.$$
#
# (The paper calls the 12 alone K. With 32-bit gradients the sum is 18 if they replace the 16-bit
# ones, and 20 if both are kept.)
# This is the answer to the opening question: 7.47 billion parameters at 16 bytes each are 119.5 GB.
#
# **Your turn (warm-up).** Write two functions, for any recipe of bytes per parameter: how many
# bytes the states have, and how many devices hold them.

# %%
warm_up = pl.exercises.model_states
warm_up

# %%
### ANSWER: model_states


pl.exercises.model_states.check(model_states, devices_needed)

# %% [markdown]
# `warm_up.hint()` gives one hint at a time, `warm_up.solution()` shows an answer.

# %% [markdown] tags=["solution-only"]
# **Why it works.** The states depend on the recipe and on one number of the model, Ψ.
#
# **Common mistakes.** Counting the output matrix twice although it is tied to the embedding;
# counting $12Lh^2$, which leaves out embeddings, biases and norms; dividing by $2^{30}$ instead of
# $10^9$; rounding the number of devices to the nearest whole number instead of up.
#
# **A second answer** rounds up by a division of whole numbers, `-(-a // b)`, which is exact also
# where bytes have more digits than a float.

# %% tags=["solution-only"]
### ANSWER: model_states_other


pl.exercises.model_states.check(states_by_sum, devices_by_whole_numbers)

# %% [markdown]
# ## Activations: what forward saves for backward
#
# The largest row of the table above is none of the states. To compute the gradient of
# $y = Wx$ with respect to $W$, backward needs $x$ again; so forward keeps it. These are the
# **activations**. In fp32, one block keeps for $b$ samples of $s$ tokens:
#
# | operation | saved for backward | bytes |
# |---|---|---|
# | two layer norms | their inputs | $2 \cdot 4sbh$ |
# | product for queries, keys, values | its input | $4sbh$ |
# | scores $QK^\top$ | $Q$ and $K$ | $2 \cdot 4sbh$ |
# | softmax | its output, one number for each pair of tokens and each head | $4as^2b$ |
# | scores times $V$ | $V$ (the softmax output is there already) | $4sbh$ |
# | projection | its input | $4sbh$ |
# | MLP up | its input | $4sbh$ |
# | GeLU | its input, four times as wide | $16sbh$ |
# | MLP down | its input, four times as wide | $16sbh$ |
#
# Added up:
#
# $$M_\text{act} = sbh\left(64 + 4\,\frac{as}{h}\right) \text{ bytes per block}.$$
#
# In 16 bits it is half of that, $sbh(32 + 2as/h)$. Dropout adds masks of one byte: two of $sbh$,
# and for the scores a mask ($as^2b$) and an output ($2as^2b$). That gives the formula that the
# literature uses ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), eq. 1):
#
# $$M_\text{act} = sbh\left(34 + 5\,\frac{as}{h}\right) \text{ bytes per block, 16 bits, dropout}.$$
#
# Does the small model keep what the first formula says? Compare a model of four blocks with one of
# five: the difference is one block.

# %%
a, b = model.heads, plan.microbatch_size
five = pl.program(model.replace(layers=5), plan).most()["activations"]
four = pl.program(model, plan).most()["activations"]
print(f"one more block keeps {five - four:,} bytes")
print(f"s b h (64 + 4 a s / h) = {s * b * h * 64 + 4 * a * s**2 * b:,} bytes")
print(f"16 s b = {16 * s * b:,} more are the statistics of the norms")
print(f"the ledger of the run agrees: {most['bytes']['activations'] == four}")

# %% [markdown]
# The 16-bit formula needs no run. Its second term is the attention scores, and its 34 is everything
# else that a block keeps. The next cell evaluates the second term for four models, from GPT-2 (124
# million parameters) to one with a trillion. In how many of the four do the scores take more memory
# than all other activations of the block together?

# %%
scores = pl.exercises.guess("models whose scores take more", low=0, high=4, decimals=0)
scores

# %%
import pandas as pd

from paralab.theory.activation_costs import layer_bytes

rows = {}
for name in ("gpt2", "ptdp-7.5b", "gpt3-175b", "ptdp-1t"):
    one = pl.ModelSpec.preset(name)
    rows[name] = {
        "5 a s / h": 5 * one.heads * one.seq_len / one.hidden,
        "activations of the blocks, one sample (GB)": float(one.layers * layer_bytes(one, 1)) / GB,
        "model states (GB)": 16 * one.num_params / GB,
    }
pd.DataFrame(rows).T.round(1)

# %%
scores.reveal(sum(row["5 a s / h"] > 34 for row in rows.values()))

# %% [markdown]
# Lab 06 shows how to avoid storing the scores. Outside of the blocks forward saves above all the
# logits, $4sbV$ bytes in fp32: 0.2 GB more for GPT-2.
#
# ### What doubles what?
# Model states scale with the number of parameters, activations with the number of tokens in the
# micro-batch. Which of these changes makes the *activations* more than twice as large?

# %%
question = pl.exercises.choose(
    "The activations more than double with",
    ["twice the batch", "twice the layers", "twice the sequence"],
)
question


# %%
def bytes_of(batch=8, **changes):
    program = pl.program(model.replace(**changes), pl.Plan(microbatch_size=batch))
    return pd.Series(
        {
            "model states": sum(program.states().values()),
            "activations": program.most()["activations"],
        }
    )


changed = {
    "twice the batch": bytes_of(batch=16),
    "twice the sequence": bytes_of(seq_len=256),
    "twice the layers": bytes_of(layers=8),
    "twice the width": bytes_of(hidden=512),
}
(pd.DataFrame(changed).T / bytes_of()).round(2).add_suffix(", factor")

# %%
question.reveal(3, "The scores of attention, a s² b, grow with the square of s.")

# %% [markdown]
# Twice the width gives less than twice, because the scores do not depend on $h$.
#
# ## The peak is not the sum
#
# States and activations are not all there at once: backward frees the activations block by block,
# while gradients appear. In addition there are temporary tensors, and for long sequences or large
# vocabularies these make the peak larger than the sum. The memory that a device must have is the
# **peak** over the step, $M_\text{peak} = \max_t M(t)$, where $M(t)$ are the bytes at the time $t$.
# When does it come?

# %%
moment = pl.exercises.choose(
    "The peak of memory comes",
    ["when forward begins", "shortly after backward begins", "in the optimizer's update"],
)
moment

# %% tags=["measured"]
report.memory_chart()

# %%
peak = pl.program(model, plan).peak()
print(f"peak by the program {sum(peak.values()):,} bytes, in the run {report.peak_memory:,}")
print(f"gradients at that moment: {peak['gradients'] / (4 * psi):.0%} of all")
moment.reveal(2, "Nearly all activations are still kept, and the first gradients are there.")

# %% [markdown]
# The program knows the peak to the byte before anything runs, because it is the list that is run.
#
# Try other sizes: the bar is what is there at the peak, and moves while you drag. *Run it* trains
# the model that you have set, and adds what was measured.

# %%
knobs = view.widgets.memory(model)
knobs.set(recipe="fp32")
knobs

# %% [markdown]
# ## A large batch on a small device
#
# Good training wants a batch of thousands of samples, but activations grow with the samples that
# are in the model at once. **Gradient accumulation** separates the two. The loss of a batch is a
# mean over its samples, and so is its gradient. Let $g_i$ be the gradient of sample $i$. Cut a
# batch of $B = m \cdot b$ samples into $m$ micro-batches of $b$ samples:
#
# $$g = \frac{1}{B}\sum_{i=1}^{B} g_i
# = \frac{1}{m}\sum_{k=1}^{m}\Big(\underbrace{\frac{1}{b}\sum_{i \in \text{micro-batch } k} g_i}_{
# \text{gradient of micro-batch } k}\Big).$$
#
# So one can compute the micro-batches one after the other, add up their gradients (PyTorch's
# `backward()` adds to `.grad` anyway), divide by $m$ and update once. Activations are those of one
# micro-batch. As a program, the difference to a single batch of 8 is:

# %%
accumulating = pl.Plan(microbatch_size=8, microbatches=4)
pl.program(model, plan).diff(pl.program(model, accumulating))

# %%
whole = pl.predict(model, pl.Plan(microbatch_size=32))
parts = pl.predict(model, accumulating)
view.memory_bars(
    {"one batch of 32": whole, "4 micro-batches of 8": parts, "one batch of 8": report},
    title="Accumulation trains 32 samples in little more memory than 8 need",
)

# %% [markdown]
# The 9.5 MB more than one batch of 8 are gradients: at its peak a single batch has 27 % of them,
# and from the second micro-batch on all are there.
#
# ### Two mistakes that raise no error
#
# **The missing division.** Without the $1/m$ the gradient is $m$ times too large. With four times
# the gradient SGD moves the weights four times as far. And AdamW, in its first step?

# %%
hides = pl.exercises.choose(
    "With four times the gradient, the first step of AdamW moves the weights",
    ["four times as far", "twice as far", "as far as before"],
)
hides

# %% [markdown]
# The optimizer that most people use hides the mistake. In its first step AdamW's means are
# $\hat m = g$ and $\hat v = g^2$, so, weight decay left out, it changes each weight $\theta$ by
#
# $$\Delta\theta = -\eta\,\frac{\hat m}{\sqrt{\hat v} + \epsilon} \approx -\eta\,\frac{g}{|g|},$$
#
# in which a factor of $g$ cancels. SGD, $\Delta\theta = -\eta g$, shows it:


# %%
def one_update(group, spec, optimizer, factor):
    """How far one step moves the weights when the gradient is multiplied by a factor."""
    gpt = pl.reference.GPT(spec)
    update = pl.reference.optimizer(gpt.parameters(), optimizer)
    before = [p.detach().clone() for p in gpt.parameters()]
    for tokens, targets in pl.reference.batches(spec, step=0, microbatch_size=8):
        (factor * gpt(tokens, targets)).backward()
    update.step()
    moved = zip(gpt.parameters(), before, strict=True)
    return sum((p.detach() - old).square().sum().item() for p, old in moved) ** 0.5


small = pl.ModelSpec(layers=2, hidden=64, heads=4, seq_len=32)
for optimizer in ("adamw", "sgd"):
    once, four = (
        pl.trace(one_update, ranks=1, args=(small, optimizer, factor)).results[0]
        for factor in (1.0, 4.0)
    )
    print(f"{optimizer:>5}: 4 times the gradient moves the weights {four / once:.1f} times as far")
hides.reveal(3, "Both means are of the same gradient, so a factor of it cancels.")

# %% [markdown]
# Without clipping AdamW's losses hide this bug to the end, because a constant factor cancels (but
# for ε) in every later step, too. What shows it, from the first step on, is the logged norm of the
# gradient, which is m times too large; and clipping, if there is any, sets in too early. Never use
# AdamW to test whether gradients are right.
#
# **Memory that grows with $m$.** The function below divides correctly, and its gradients are right.
# But something is wrong with its memory:


# %%
def sum_the_losses(group, spec, microbatches):
    gpt = pl.reference.GPT(spec)
    feed = pl.reference.batches(spec, step=0, microbatches=microbatches, microbatch_size=8)
    loss = sum(gpt(tokens, targets) for tokens, targets in feed) / microbatches
    loss.backward()


for count in (1, 4):
    traced = pl.trace(sum_the_losses, ranks=1, args=(small, count), memory=True)
    print(f"{count} micro-batches: peak {traced.meta['peak_bytes'][0] / 1e6:.1f} MB")

# %%
cause = pl.exercises.choose(
    "The memory grows with m because",
    [
        "gradients of four micro-batches are kept",
        "until backward() runs, autograd keeps all activations of the graph alive",
        "Python frees tensors late",
    ],
)
cause

# %%
cause.reveal(2, "The sum of four losses is one graph, with the activations of four micro-batches.")

# %% [markdown]
# **Your turn (implement).** Write the step itself, in plain PyTorch, as you would at work: mean
# gradient over all samples, activations of one micro-batch, clipping by the global norm.

# %%
exercise = pl.exercises.accumulate
exercise

# %%
### ANSWER: accumulate


verdict = pl.exercises.accumulate.check(accumulate)
verdict

# %% [markdown]
# ### Your step trains the reference GPT
#
# `pl.observe` runs any PyTorch program on real ranks and reports on it just as on a program of the
# library. Here your function trains, next to the library's program for the same plan.


# %%
def my_training(spec, steps, microbatches):
    gpt = pl.reference.GPT(spec)
    optimizer, losses = pl.reference.optimizer(gpt.parameters()), []
    for step in range(steps):
        feed = pl.reference.batches(spec, step=step, microbatches=microbatches, microbatch_size=8)
        loss, norm = accumulate(gpt, optimizer, feed, clip_norm=1.0)
        losses.append(loss)
    return losses


if verdict:
    library = pl.run(small, accumulating, steps=3, clip_norm=1.0, progress=False)
    yours = pl.observe(my_training, ranks=1, args=(small, 3, 4))
    pairs = zip(yours.losses, library.losses, strict=True)
    print("the same losses, to four decimals:", all(abs(x - y) < 1e-4 for x, y in pairs))
    finding = "The same states and activations; autograd needs more temporary memory"
    view.memory_bars({"yours": yours, "the library": library}, title=finding).show()
else:
    print("write accumulate first")

# %% [markdown] tags=["solution-only"]
# **Why it works.** Each micro-batch's loss is a mean over its
# own samples. Weighting it by its share of all samples makes the sum of the gradients the mean
# over all samples, also where the last micro-batch is smaller. `backward()` after each forward
# frees that micro-batch's graph. The norm is one number over *all* parameters, and can be known
# only after the last backward.
#
# **Common mistakes.** Dividing by $m$ although the micro-batches differ in size (in 2024 a fix of
# this kind went through [several libraries](https://huggingface.co/blog/gradient_accumulation));
# clipping after each micro-batch; clipping each tensor by its own norm; one `backward()` of the sum
# of all losses, which keeps the activations of all micro-batches until then; `zero_grad()` within
# the loop.
#
# **A second answer** adds up the sums over the samples, divides the gradients once at the end by
# the number of samples, and leaves the clipping to `clip_grad_norm_`.

# %% tags=["solution-only"]
### ANSWER: accumulate_other


pl.exercises.accumulate.check(accumulate_by_scaling)

# %% [markdown]
# ## The second wall is time
#
# A matrix product with $n$ weights costs $2n$ FLOPs per token: one multiplication and one addition
# per weight. Backward makes two such products, one for the gradient of the input and one for the
# gradient of the weight. So a step costs 6 FLOPs per parameter and token, and a training on $D$
# tokens
#
# $$C \approx 6\,\Psi\,D.$$
#
# How long is that for 300 billion tokens, on one device that reaches 150 TFLOP/s (half of an A100's
# peak)? The exact count adds the scores of attention, which have no parameters. Per token and
# block, $QK^\top$ and the product with $V$ cost $2sh$ FLOPs each in forward, so with backward it is
# $12Lsh$ per token, about $s/(6h)$ of the rest. That is 8 % for the model of 7.5 billion
# parameters and 3 % for GPT-3, which has 175 billion.

# %%
years_guess = pl.exercises.guess(
    "years on one device for GPT-3", low=0, high=500, unit="years", decimals=0
)
years_guess

# %%
tokens, speed, year = 300e9, 150e12, 365 * 86400
needed = {}
for name in ("gpt2", "ptdp-7.5b", "gpt3-175b", "ptdp-1t"):
    one = pl.ModelSpec.preset(name)
    exact = needs.step_flops(one, 1) / one.seq_len * tokens
    needed[name] = {
        "80 GB devices for the states": needs.devices_for(16 * one.num_params, 80 * GB),
        "years by 6 Ψ D": 6 * one.num_params * tokens / speed / year,
        "years, exact": exact / speed / year,
    }
pd.DataFrame.from_dict(needed, orient="index").round(2)

# %%
years_guess.reveal(needed["gpt3-175b"]["years, exact"])

# %% [markdown]
# For the two largest, even a device with enough memory would take decades or centuries. So work
# and memory have to be divided. Three ways divide the work: by samples (data parallelism, lab 02),
# by layers (pipelines, 03), inside a layer (tensor parallelism, 07). Two are there for memory:
# sharding the model states (ZeRO, 05; it divides the small work of the update, too), and moving
# state to slower memory (offload, 09).
#
# **Your turn (go further).** Predict the peak of a whole step, activations and temporary tensors
# included, within 5 %, without running or compiling anything. This is what a memory estimator
# does, and many of those that people use are wrong by factors (lab 06).

# %%
further = pl.exercises.peak_estimate
further

# %%
### ANSWER: peak_estimate


pl.exercises.peak_estimate.check(peak_estimate)

# %% [markdown] tags=["solution-only"]
# **Why it works.** The peak is the largest of a few moments,
# and each is a sum of what is alive then. With a large vocabulary it is the backward of the output
# matrix, when the gradient of the logits is there; with a long sequence that of the scores; with a
# wide model and few tokens that of the lookup in the embedding, when all gradients are there and
# no activations. Embedding and output matrix are one tensor, so the gradient of the lookup ($4Vh$)
# is held next to that of the output matrix until the two are added.
#
# Where the terms in $sbh$ come from: in the MLP's backward there are the gradient of GeLU's output
# ($16sbh$), of its input ($16sbh$) and of the residual stream ($4sbh$), together $36sbh$; the saved
# input of *MLP down* ($16sbh$) is freed by then. At the scores there are the gradients of the
# softmax output and of its input, $2 \cdot 4as^2b$; what was saved for *MLP down* (16), GeLU (16),
# *MLP up* (4) and the second norm (4) is freed, which is $40sbh$. (The projection's input and V are
# freed, too, $8sbh$, and the gradients of the residual stream and of V are there, as many bytes.)
#
# **Common mistakes.** Adding all gradients to all activations ($m = 1$); forgetting that with
# $m > 1$ all gradients are there from the second micro-batch on; leaving out the logits ($4sbV$
# bytes, twice) or the gradient of the lookup; taking the 16-bit formula for an fp32 run.
#
# **A second answer** goes through the same moments as a dictionary, so that one can ask which it
# is.

# %% tags=["solution-only"]
### ANSWER: peak_estimate_other


pl.exercises.peak_estimate.check(peak_by_moments)

# %% [markdown]
# ## What to remember
#
# 1. Training with AdamW keeps 16 bytes per parameter, in fp32 (4+4+8) as in mixed precision
#    (2+2+12).
# 2. Activations come on top: they grow with the tokens in the micro-batch, and the scores with the
#    square of the sequence.
# 3. What has to fit is the peak over time, which usually comes early in backward.
# 4. With gradient accumulation the batch can grow without more activations. Weight each micro-batch
#    by its share of the samples (of the tokens in its loss, if samples differ in that), and call
#    `backward()` for each of them.
# 5. AdamW hides a wrong factor in the gradients. Test with SGD.
#
# $$M_\text{states} = K\Psi,\ K = 16 \qquad
# M_\text{act} = sbh\,(34 + 5as/h)\,L\ \text{(16 bits, dropout)} \qquad C \approx 6\Psi D$$
#
# | if this fills the device | then | lab |
# |---|---|---|
# | activations, because of the batch | gradient accumulation | here |
# | activations of one sample | recomputation, tensor and sequence parallelism | 06, 07 |
# | model states | ZeRO, pipelines, tensor parallelism, offload | 05, 03, 07, 09 |
# | nothing, but it takes years | data parallelism first | 02 |
#
# ## In PyTorch, DeepSpeed, Megatron
#
# | what | PyTorch | DeepSpeed (JSON) | Megatron-LM |
# |---|---|---|---|
# | micro-batch $b$ | your `DataLoader` | `train_micro_batch_size_per_gpu` | `--micro-batch-size` |
# | accumulation $m$ | your loop | `gradient_accumulation_steps` | `--global-batch-size` ¹ |
# | clipping | `clip_grad_norm_` | `gradient_clipping` | `--clip-grad` |
# | peak | `torch.cuda.max_memory_allocated()` | `memory_breakdown` | `--log-memory-interval` |
#
# ¹ $m$ is this number divided by $b$ times the data-parallel ranks.
#
# One of the four lines at the start of this lab changes the memory too:
# `optimizer.zero_grad(set_to_none=True)`, the default, frees the gradients; with `False` they are
# filled with zeros and stay through forward. PyTorch itself runs here, observed:


# %%
def plain_pytorch(spec, set_to_none):
    gpt = pl.reference.GPT(spec)
    optimizer = pl.reference.optimizer(gpt.parameters())
    for step in range(3):
        [(tokens, targets)] = pl.reference.batches(spec, step=step, microbatch_size=8)
        optimizer.zero_grad(set_to_none=set_to_none)
        gpt(tokens, targets).backward()
        optimizer.step()


for choice in (True, False):
    seen = pl.observe(plain_pytorch, ranks=1, args=(small, choice))
    print(f"set_to_none={choice!s:<5} peak {seen.peak_memory / 1e6:.2f} MB")
print(f"all gradients of this model: {4 * small.num_params / 1e6:.2f} MB")

# %% [markdown]
# The first cell says that all of this computes on the processor, also where there is a GPU. With
# `pl.set_default_device("cuda")` there, the library trains on the GPU, and the ledger counts the
# same tensors there; this was run on one H100. `nvidia-smi` shows more than the ledger: the CUDA
# context and memory that PyTorch's allocator has reserved (lab 06).
#
# ## Read on
# * Rajbhandari et al. 2020, [ZeRO](https://arxiv.org/abs/1910.02054), sec. 3: what the states are.
# * Korthikanti et al. 2022, [Reducing activation recomputation](https://arxiv.org/abs/2205.05198),
#   sec. 4: the activations of a block, operation by operation.
# * Narayanan et al. 2021, [PTD-P](https://arxiv.org/abs/2104.04473), sec. 5.1: how long training
#   takes.
# * Micikevicius et al. 2018, [Mixed precision training](https://arxiv.org/abs/1710.03740), sec.
#   3.1: why there is a master copy.
# * In the package: `paralab/theory/needs.py` has the recipes, `paralab/model/reference.py` the GPT
#   in plain PyTorch, `paralab/interpret/memory.py` reads memory off the program. Next:
#   [lab 01](01_collectives.ipynb).
