# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 05 · ZeRO: sharding the model states
#
# **The question.** Four devices hold four copies of the same model states. Why can four devices not
# train a larger model than one?
#
# **You will be able to**
# * say how many bytes of model states each stage of ZeRO leaves on a rank, and what comes on top;
# * derive the traffic of each stage, and say when the gathers are hidden behind computation;
# * write ZeRO-1 and ZeRO-3 (FSDP), and hide the gathers of ZeRO-3 behind computation;
# * choose between data parallelism, the three stages, and hybrid sharding.
#
# **You need** labs 00 to 02; of PyTorch, hooks of modules and tensors.
# **Minutes**: 120 to 170, more than half of them for the exercises.
#
# What four ranks keep under data parallelism and under the three stages of ZeRO:

# %%
import paralab as pl
from paralab import view

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
model = pl.ModelSpec(layers=8, hidden=192, heads=4, seq_len=32, attention="explicit", tied=False)
view.zero_shards(model, 4)

# %% [markdown]
# The symbols of this lab:
#
# | symbol | meaning |
# |---|---|
# | $N$ | data-parallel ranks that share one copy of the model states |
# | $\Psi$, $\Psi_u$ | parameters of the model, and of one unit (a block, say); counts |
# | $\theta$, $g$ | all parameters; all gradients |
# | $\theta_r$, $g_r$ | rank $r$'s N-th of the parameters; of the summed gradients |
# | $k_w$, $k_g$, $k_o$; $K$ | bytes per parameter of weights, gradients, optimizer; their sum |
# | $M_0$ to $M_3$ | bytes of model states on a rank: data parallelism, and stages 1 to 3 |
# | $V_0$ to $V_3$ | elements that a rank sends in a step |
# | $m$, $b$, $s$ | micro-batches per step and rank; samples per micro-batch; tokens per sample |
# | $\alpha$, $\beta$ | seconds per message; seconds per byte ($1/\beta$ is the bandwidth) |
# | $X$ | FLOP/s that a device reaches |
# | $q$ | all-gathers in which one unit is gathered |
#
# ## The optimizer fits between the two halves of an all-reduce
# After the all-reduce of lab 02 all ranks have the same gradients, keep the same AdamW moments, and
# compute the same update. The same work is done N times, and the same moments are stored N times.
#
# An all-reduce is a reduce-scatter followed by an all-gather (lab 01). Between these two halves
# each rank holds one N-th of the summed gradients. **Stage 1** of ZeRO lets rank $r$ update exactly
# this N-th of the parameters at this point. The all-gather then gathers the updated parameters, in
# place of the gradients:
#
# $$
# \text{all-reduce}(g);\ \text{update}(\theta)
# \quad\longrightarrow\quad
# \text{reduce-scatter}(g);\ \text{update}(\theta_r, g_r);\ \text{all-gather}(\theta).
# $$
#
# A rank sends as many bytes as before, in fp32 $2\frac{N-1}{N}\,4\Psi$, and it needs the moments of
# its own N-th only.
#
# The *program* of a rank is the list of instructions that it executes in a step. The next cell
# compiles the programs of data parallelism and of the three stages, and shows what stage 1 changes
# in the first one. (`w` stands for all parameters, `shard` for an N-th of them, `grad` for the
# gradients of the rank's own samples, and `gshard` for an N-th of their sum over the ranks.)

# %%
small = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64, tied=False)
names = ["data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
programs = {
    name: pl.program(small, pl.Plan(dp=4, zero_stage=stage)) for stage, name in enumerate(names)
}
programs["data parallelism"].diff(programs["ZeRO-1"])

# %% [markdown]
# ### Exercise 1 (warm-up): a step of ZeRO-1

# %%
warm_up = pl.exercises.zero_step
warm_up


# %%
### ANSWER: zero_step


pl.exercises.zero_step.check(MyZero1)

# %% [markdown]
# `warm_up.hint()` gives one hint at a time, and `warm_up.solution()` shows an answer.

# %% [markdown] tags=["solution-only"]
# Why it works: a rank updates only its own part of the parameters, so it never needs the momentum
# of another part. Common mistakes, with what the checker says about them:
# * momentum for all parameters: more bytes are kept between steps than an N-th;
# * an all-reduce in place of the reduce-scatter: 1.5 times the bytes;
# * the update of another rank's part: the first wrong part and element are named;
# * no padding: the answer is right on 2 ranks, and fails on 3, which do not divide Ψ.
#
# ## A second answer: torch's optimizer on a flat shard
# The shard is a tensor of its own, and any optimizer of torch.optim updates it.


# %% tags=["solution-only"]
### ANSWER: zero_step_other


pl.exercises.zero_step.check(ShardedSGD)

# %% [markdown]
# What happens if the all-gather is left out? Each rank then updates its own part, and never
# receives the parts that the other ranks have updated. The function below trains the GPT with
# ZeRO-1 and AdamW. Its argument says whether the updated parameters are gathered. (For brevity it
# all-reduces the gradients and takes its part, where your class has a reduce-scatter.)


# %%
def zero_one(gather):
    import torch
    import torch.distributed as dist
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    rank, ranks = dist.get_rank(), dist.get_world_size()
    gpt, losses = pl.reference.GPT(small), []
    flat = parameters_to_vector(gpt.parameters()).detach()  # of a length that 4 divides
    own = flat.chunk(ranks)[rank].clone()
    update = torch.optim.AdamW([own], lr=1e-3)  # has the moments of this part alone
    for step in range(4):
        share = {"rank": rank, "ranks": ranks, "microbatch_size": 4}
        [(tokens, targets)] = pl.reference.batches(small, step=step, **share)
        loss = gpt(tokens, targets)
        loss.backward()
        summed = parameters_to_vector([p.grad for p in gpt.parameters()])
        dist.all_reduce(summed)
        own.grad = summed.chunk(ranks)[rank] / ranks
        update.step()
        flat.chunk(ranks)[rank].copy_(own)
        if gather:
            dist.all_gather(list(flat.chunk(ranks)), own)
        vector_to_parameters(flat, gpt.parameters())
        gpt.zero_grad()
        losses.append(loss.item())
    return losses, float(flat.double().sum())


choice = pl.exercises.choose(
    "Without the all-gather, what does the loss of each rank do?",
    ["it rises", "it stays where it was", "it still falls"],
)
choice

# %%
for gather in (True, False):
    results = pl.launch(zero_one, ranks=4, args=(gather,))
    fell = all(losses[-1] < losses[0] - 0.1 for losses, _ in results)
    weights = len({total for _, total in results})
    words = "with" if gather else "without"
    print(f"{words} the all-gather: the loss falls: {fell}, different models: {weights}")
choice.reveal(3, "Each rank trains a model of its own, of which it updates a quarter.")

# %% [markdown]
# The loss falls in both runs. Without the all-gather, however, the four ranks end up with four
# different models. So a falling loss does not prove that the ranks train the same model (lab 02),
# and the checkers of this lab compare weights.
#
# ## Each stage divides one more kind of state by N
# A rank that updates an N-th of the parameters needs only this N-th of the summed **gradients**.
# Under stage 2 the gradients of a bucket are reduced as soon as backward has produced them, and a
# rank frees the parts that belong to other ranks. The **parameters** of a layer are needed on a
# rank only while the layer computes. Under stage 3 a rank keeps an N-th of the parameters as well,
# and gathers the rest one unit at a time.
#
# $$
# M_0 = K\Psi, \qquad
# M_1 = \Big(k_w + k_g + \frac{k_o}{N}\Big)\Psi, \qquad
# M_2 = \Big(k_w + \frac{k_g + k_o}{N}\Big)\Psi, \qquad
# M_3 = \frac{K}{N}\,\Psi .
# $$
#
# Training in fp32 with AdamW has $k_w = k_g = 4$ and $k_o = 8$. With four ranks, a rank keeps a
# quarter of the model states under stage 3. What share of data parallelism's *peak memory*, which
# includes everything else that a step needs, does a rank need under stage 3?

# %%
guess = pl.exercises.guess(
    "peak memory under ZeRO-3 on 4 ranks, as a share of data parallelism's",
    low=0,
    high=100,
    unit="%",
    decimals=0,
)
guess

# %% [markdown]
# The four formulas, evaluated for this model:

# %%
N, psi = 4, model.num_params
k_w, k_g, k_o = 4, 4, 8
formula = {
    "data parallelism": (k_w, k_g, k_o),
    "ZeRO-1": (k_w, k_g, k_o / N),
    "ZeRO-2": (k_w, k_g / N, k_o / N),
    "ZeRO-3": (k_w / N, k_g / N, k_o / N),
}
for name, k in formula.items():
    print(f"{name:<17} {sum(k):4.0f} bytes per parameter, {sum(k) * psi / 1e6:5.1f} MB")

# %% [markdown]
# The formulas count model states only. For the whole memory, four real processes train under each
# of the four plans. Under which of them does a rank hold the most *in addition* to the formula?

# %%
most_more = pl.exercises.choose(
    "A rank holds the most in addition to the model states of the formula under", names
)
most_more

# %% [markdown]
# The picture shows what rank 0 holds in the course of one step:

# %% tags=["measured"]
plan = pl.Plan(dp=4, microbatches=2, microbatch_size=2, bucket_bytes=2**20)
reports = {
    name: pl.run(model, plan.replace(zero_stage=stage), steps=2, progress=False)
    for stage, name in enumerate(names)
}
view.memory_charts(reports, title="Each stage of ZeRO lowers what a rank holds")

# %% [markdown]
# Each pair of bars below compares the model states of the formula with the measured peak:

# %% tags=["measured"]
states = ("parameters", "gradients", "optimizer")
pairs = {}
for name, report in reports.items():
    pairs[f"{name}: formula"] = dict(zip(states, [k * psi for k in formula[name]], strict=True))
    pairs[f"{name}: measured"] = report.peaks(rank=0)["measured"].drop("total").to_dict()
view.bytes_bars(pairs, title="At its peak a step holds more than the model states")

# %% tags=["measured"]
share = reports["ZeRO-3"].peak_memory / reports["data parallelism"].peak_memory
guess.reveal(round(100 * share))

# %%
most_more.reveal(4, "It shards the most states, and holds whole units again while they compute.")

# %% [markdown]
# At the peak a rank holds three things in addition to the model states of the formulas:
# * **Activations** of the rank's own samples. ZeRO does not shard them (lab 06 reduces them).
# * Under stage 3 **gathered parameters**, in the category *buffers*: all parameters of the unit
#   that computes, and of the next unit, which is gathered ahead. *Buffers* has also what a
#   reduce-scatter receives into: with gloo a whole unit or bucket, under all three stages.
# * **Gradients** of whole units, from backward until the reduce-scatter is over. At the peak of
#   stage 3 these are two units: one is being reduced while the next one computes its gradients.
#
# The second and the third depend on the size of a few units, not on the size of the model. This
# model has only eight blocks, so a single unit is a large part of it.
#
# ## Does memory fall with more devices?
# The model states fall as $1/N$. What about everything that a rank holds in addition to them?

# %%
on_top = pl.exercises.choose(
    "With 4 ranks instead of 2, and as many samples on each rank as before, what a rank holds in "
    "addition to the model states",
    ["is halved, too", "stays nearly the same", "is doubled"],
)
on_top

# %% [markdown]
# Here are real runs of stage 3 on 1, 2 and 4 ranks (on a single rank nothing is sharded; that on 4
# is the one above):

# %% tags=["measured"]
falling, more = {}, {}
for n in (1, 2, 4):
    split = plan.replace(dp=n, zero_stage=3 if n > 1 else 0)
    run = reports["ZeRO-3"] if n == 4 else pl.run(model, split, steps=2, progress=False)
    sharded = [k * psi / n for k in (k_w, k_g, k_o)]
    falling[f"N = {n}: formula"] = dict(zip(states, sharded, strict=True))
    measured = run.peaks(rank=0)["measured"]
    falling[f"N = {n}: measured"] = measured.drop("total").to_dict()
    more[n] = (measured["total"] - sum(sharded)) / 1e6
title = f"More than the formula: {more[2]:.0f} MB on each of 2 ranks, {more[4]:.0f} MB on each of 4"
view.bytes_bars(falling, title=title)

# %%
on_top.reveal(
    2,
    "With as many samples on each rank as before, activations, gathered units and gradients of a "
    "unit do not depend on N.",
)

# %% [markdown]
# Figure 1 of the [ZeRO paper](https://arxiv.org/abs/1910.02054) compares the stages for a model of
# 7.5 billion parameters on 64 devices, trained in 16 bits. There $k_w = k_g = 2$ and $k_o = 12$:
# four bytes each for the fp32 master copy of the weights and for two moments. The paper calls the
# stages *Pos*, *Pos+g* and *Pos+g+p*: first the optimizer states are sharded, then the gradients,
# then the parameters.

# %%
from paralab.theory import zero

figure = {name: zero.stage_bytes(7.5e9, 64, stage) for stage, name in enumerate(zero.NAMES)}
view.bytes_bars(figure, {"a device": 80e9}, title="On 64 devices 120 GB become 1.9 GB on each")

# %% [markdown]
# The sliders below show the same for other models and other numbers of devices. The button *Run it*
# starts real ranks.

# %%
view.widgets.zero()

# %% [markdown]
# ## The life of a unit: gathered, computed, freed, and gathered again
# Under stage 3 a block is a *unit*: its parameters are gathered together, and freed together. This
# is what happens to one unit in a step of two micro-batches:

# %%
view.zero_unit(model, plan.replace(zero_stage=3))

# %% [markdown]
# Its parameters are gathered before forward and freed after it. Backward needs them, too, so they
# are gathered a second time. (The embedding's backward could do without its table; here it is a
# unit like the others, and is gathered again.) Then its gradients are reduced, so that each rank
# keeps an N-th of the sum, and the whole gradients are freed. (In the program `part` is this N-th,
# and KEEP makes it the first term of `gshard`.) `small` has six units: the embedding,
# four blocks, and the head. How many all-gathers does a step with one micro-batch have?

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
# ## Traffic: 2Ψ, (m+1)Ψ and 3mΨ
# A reduce-scatter or an all-gather of all Ψ elements makes each rank send $\frac{N-1}{N}\Psi$
# elements. So the traffic is a matter of counting these two:
#
# * stages 0 and 1: one reduce-scatter and one all-gather per step;
# * stage 2 cannot keep whole gradients until the last micro-batch: one reduce-scatter per
#   micro-batch, and one all-gather of the updated parameters;
# * stage 3 cannot keep whole parameters: per micro-batch two all-gathers and one reduce-scatter.
#
# (So a rank of stages 2 and 3 keeps as little as it can. With more memory it can keep whole
# gradients, or gathered parameters, for all micro-batches of a step, and send them once.)
#
# $$
# V_0 = V_1 = 2\,\frac{N-1}{N}\Psi, \qquad
# V_2 = (m+1)\,\frac{N-1}{N}\Psi, \qquad
# V_3 = 3m\,\frac{N-1}{N}\Psi .
# $$
#
# Real runs on two ranks, which together send exactly the number in front of the fraction:

# %%
import pandas as pd

rows = {}
for m in (1, 2, 4):
    for stage in (1, 2, 3):
        split = pl.Plan(dp=2, zero_stage=stage, microbatches=m)
        run = pl.run(small, split, steps=1, progress=False)
        sent = run.traffic()["bytes"].sum() / 4 / small.num_params
        rows.setdefault(f"m = {m}", {})[f"ZeRO-{stage} (Ψ)"] = round(sent, 3)
    rows[f"m = {m}"] |= {"2": 2, "m+1": m + 1, "3m": 3 * m}
pd.DataFrame(rows).T

# %% [markdown]
# ### Exercise 2 (implement): ZeRO-3
# Write stage 3 in plain PyTorch, as FSDP does it. The checker trains the reference GPT with your
# class, compares the weights with one process, counts bytes, and looks at what a rank holds between
# steps and at the peak.

# %%
exercise = pl.exercises.my_zero3
exercise


# %%
### ANSWER: my_zero3


verdict = pl.exercises.my_zero3.check(MyZero3)
verdict

# %% [markdown] tags=["solution-only"]
# Why it works: the parameters are views of one flat tensor per unit. Freeing the *storage* of this
# tensor leaves the views valid, those that autograd has saved for backward included; when the
# storage is allocated again and gathered into, all of them have their values back. A hook on the
# unit's output runs when backward reaches the unit, before its first operation needs a parameter.
#
# Common mistakes, with what the checker says:
# * units that stay gathered between forward and backward: the limit of the peak is broken;
# * gradients that are copied twice (`cat`, then `pad`) before the unit is freed: the same limit is
#   broken by a little, and the checker says what counts;
# * gradients that are reduced in `step()`: they are all whole at once, and the peak shows it;
# * `parameter.data = ...` alone: autograd has saved the old tensor, so nothing is freed;
# * no division by N, or the sum that has been added up so far divided again in each micro-batch;
# * a reduce-scatter without the padding that the all-gather has.
#
# ## A second answer: hooks on saved tensors
# Here autograd never keeps a parameter. Whatever it saves inside a unit is replaced by the place in
# the flat tensor (`torch.autograd.graph.saved_tensors_hooks`), and the first value that backward
# asks for gathers the unit. An operation that needs no parameter in backward (an embedding) then
# causes no second all-gather.


# %% tags=["solution-only"]
### ANSWER: my_zero3_other


pl.exercises.my_zero3.check(SavedTensorHooks)

# %% [markdown]
# ## Your own ZeRO-3 trains the GPT
# Your class, the program of the same plan, and PyTorch's FSDP2 (`fully_shard`), all observed. FSDP2
# is also run with `reshard_after_forward=False`, which keeps parameters from forward to backward.
# How much of the traffic is left then?

# %%
resharding = pl.exercises.guess(
    "bytes sent with reshard_after_forward=False, as a share of those with True",
    low=0,
    high=100,
    unit="%",
    decimals=0,
)
resharding


# %%
def train(make):
    import warnings

    import torch.distributed as dist

    # torch 2.13 calls two collectives reduce_scatter_single and all_gather_single.
    warnings.simplefilter("ignore", FutureWarning)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gpt, losses = pl.reference.GPT(model), []
    sharded = make([gpt.embedding, *gpt.blocks, gpt.head], lr=0.1)
    for step in range(2):
        share = {"rank": rank, "ranks": ranks, "microbatch_size": 2}
        [(tokens, targets)] = pl.reference.batches(model, step=step, **share)
        loss = gpt(tokens, targets)
        loss.backward()
        sharded.step()
        pl.step()  # the observer's step ends here: there is no torch.optim that would say so
        losses.append(loss.item())
    return losses


def fsdp2(reshard=True, blocks=True):
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    gpt, losses = pl.reference.GPT(model), []
    for block in gpt.blocks if blocks else ():
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(gpt, reshard_after_forward=reshard)
    update = torch.optim.SGD(gpt.parameters(), lr=0.1)
    for step in range(2):
        share = {"rank": rank, "ranks": ranks, "microbatch_size": 2}
        [(tokens, targets)] = pl.reference.batches(model, step=step, **share)
        loss = gpt(tokens, targets)
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


# %%
one = pl.Plan(dp=4, microbatch_size=2, zero_stage=3)
both = {"optimizer": "sgd", "lr": 0.1, "steps": 2, "progress": False}
seen = {
    "the program, stage 3": pl.run(model, one, **both),
    "FSDP2, resharded": pl.observe(fsdp2, ranks=4),
    "FSDP2, kept": pl.observe(fsdp2, ranks=4, args=(False,)),
}

# %%
most_held = pl.exercises.choose(
    "Which of the three has the highest peak?",
    ["the program", "FSDP2, resharded", "FSDP2, kept"],
)
most_held

# %% tags=["measured"]
# yours is drawn as well, once MyZero3 passes its check
if verdict.passed:
    seen["yours"] = pl.observe(train, ranks=4, args=(MyZero3,), steps="marked")
view.memory_charts(seen, title="FSDP2 that keeps its parameters needs more at the peak")

# %%
most_held.reveal(3, "When backward begins it still holds the gathered parameters of every block.")

# %%
for name, run in seen.items():
    calls = run.collectives.query("rank == 0 and step == 1 and phase != 'gloo surplus'")
    counts = calls["op"].value_counts()
    sent = calls["wire_bytes"].sum() / (4 * psi * 3 / 4)
    print(
        f"{name:<21} {counts['all_gather']:2} all-gathers, {counts['reduce_scatter']:2} "
        f"reduce-scatters: {sent:.2f} Ψ (N-1)/N, last loss {run.losses[-1]:.4f}"
    )

# %% tags=["measured"]
# yours is drawn as well, once MyZero3 passes its check
drawn = {name: run for name, run in seen.items() if name != "FSDP2, kept"}
title = "Between the computations of two units a rank waits for messages"
view.timelines(*drawn.values(), labels=list(drawn), ranks=[0], title=title)

# %%
gathered, kept = (
    seen[name].collectives.query("step == 1 and phase != 'gloo surplus'")["wire_bytes"].sum()
    for name in ("FSDP2, resharded", "FSDP2, kept")
)
resharding.reveal(100 * kept / gathered)

# %% [markdown]
# FSDP2 has one unit less: embedding and head are its root unit. `reshard_after_forward=False`
# leaves out the second all-gather, so its traffic is that of stage 2 with one micro-batch, at the
# price of memory that the picture shows. (gloo has no reduce-scatter of its own; what it sends in
# addition is in the phase *gloo surplus*, and is left out here. NCCL sends no such surplus.)
#
# Once your class passes, the picture of memory has its shards of parameters and gradients as
# *other*: they are plain tensors, and no observer can know what they are for. The picture of the
# steps has this machine's wall clock, on which ranks also wait for a core: its lengths say little.
# Look at what comes between the computations of two units.
#
# [Accelerate #3474](https://github.com/huggingface/accelerate/issues/3474) reports high memory
# under FSDP2 with LoRA, which trains small added matrices only. One of the three changes that
# lowered it was to set the wrap policy: without it the whole model is one unit, and is gathered at
# once. Does wrapping matter that much? Here both are run, without LoRA.

# %%
one_unit = pl.exercises.choose(
    "With the model as one unit, what do the buffers of a rank hold at the peak?",
    ["a quarter of the model", "the model once", "the model twice"],
)
one_unit

# %% tags=["measured"]
units = {
    "FSDP2, every block a unit": seen["FSDP2, resharded"],
    "FSDP2, the model as one unit": pl.observe(fsdp2, ranks=4, args=(True, False)),
}
wrapped = {name: run.peaks(0)["measured"].drop("total").to_dict() for name, run in units.items()}
view.bytes_bars(wrapped, title="Gathered as one unit, the model more than doubles the peak")

# %%
one_unit.reveal(3, "The gathered parameters, and the buffer that FSDP2 copies them from.")

# %% [markdown]
# (*Buffers* are 2 · 14.7 MB then. *Parameters* are this rank's quarter.)
#
# ## Prefetch hides a gather while the unit before it computes
# [DeepSpeed #5047](https://github.com/deepspeedai/DeepSpeed/issues/5047) shows a ZeRO-3 trace in
# which all-gathers are very fragmented and do not overlap with computation, and asks why. Two
# conditions have to hold. First, the gather of the *next* unit has to start before the current one
# computes: that is prefetch, a number in a plan. Four devices on a link of 2 GB/s:

# %%
link = pl.Link(alpha=100e-6, bandwidth=2e9)
cluster = pl.Cluster(
    name="2 GB/s",
    devices_per_node=4,
    flops=1e11,
    memory_bandwidth=2e10,
    intra=link,
    algorithm="ring",
)
ahead = {
    f"prefetch={depth}": pl.predict(model, one.replace(prefetch=depth), cluster) for depth in (0, 1)
}
title = "Without prefetch every gather is waited for"
view.timelines(*ahead.values(), labels=list(ahead), ranks=[0], title=title)

# %% [markdown]
# Second, the gather has to be shorter than the computation that hides it, that of the unit before.
# Forward takes 2 FLOPs per parameter and token. If the unit before has as many parameters, a unit
# that is gathered in $q$ calls is hidden in forward if
#
# $$
# \underbrace{q\,(N-1)\,\alpha + \frac{N-1}{N}\,4\Psi_u\,\beta}_{\text{all-gather}}
# \;\le\; \underbrace{\frac{2\Psi_u\,bs}{X}}_{\text{forward}}
# \quad\Longleftrightarrow\quad
# bs \;\ge\; 2\,\frac{N-1}{N}\,\beta X + \frac{q\,(N-1)\,\alpha X}{2\Psi_u} .
# $$
#
# The first term does not depend on the unit. The second is the price of fragments: many calls $q$
# for few parameters. A block of this model has 444,864 parameters. How many tokens does it need,
# gathered in one call, and gathered tensor by tensor?

# %%
hidden_from = pl.exercises.guess(
    "tokens per micro-batch that hide the gather of a block, in one call",
    low=0,
    high=600,
    decimals=0,
)
hidden_from

# %%
X, alpha, beta = cluster.flops, link.alpha, 1 / link.bandwidth
block = {name: shape for name, shape in model.parameter_shapes().items() if "blocks.0." in name}
psi_u = sum(pd.Series(shape).prod() for shape in block.values())
for q in (1, len(block)):
    tokens = 2 * (N - 1) / N * beta * X + q * (N - 1) * alpha * X / (2 * psi_u)
    print(f"{q:2} calls for {psi_u:,} parameters: at least {tokens:.0f} tokens per micro-batch")
    if q == 1:
        in_one_call = tokens
for size in (2, 4):
    timed = pl.predict(model, one.replace(prefetch=1, microbatch_size=size), cluster)
    waits, ms = timed.summary()["value"]["waiting"], 1e3 * timed.step_time
    print(f"{size * model.seq_len:3} tokens, prefetch=1: a rank waits {waits:.1f} of {ms:.1f} ms")
hidden_from.reveal(in_one_call)

# %% [markdown]
# The timelines above have 64 tokens, too few even for one call, so with `prefetch=1` a rank still
# waits in every block. With 128 tokens it waits where forward and backward begin and where the step
# ends: nothing computes there meanwhile, or only the embedding or the head, which are too short to
# hide the message of a block. In backward a unit has twice the FLOPs and two messages to hide, the
# gather and the reduce-scatter, so the bound is the same.
#
# DeepSpeed gathers module by module (a linear layer, a norm) unless its prefetch bucket
# (`stage3_prefetch_bucket_size`) joins several of them; FSDP gathers a unit in one call. If latency
# is high, prefer large units, as long as two of them fit. Against low bandwidth larger units do not
# help; more tokens per micro-batch do, and so do fewer bytes: 16-bit parameters, or shards inside a
# node (below).
#
# What does prefetch cost? [DeepSpeed #4305](https://github.com/deepspeedai/DeepSpeed/issues/4305)
# finds that stage 3 takes *more* memory than stage 2: 36.6 GB against 32.4 GB after the first
# forward of a model of 6.9 billion parameters. (The model was not run here. The thread fine-tunes
# it with LoRA, so gradients and optimizer states, which stage 2 shards, are small. Stage 3 is 10 GB
# higher already after initialization, which this lab does not explain.) One way in which stage 3
# can need more than stage 2 can be shown: what is gathered ahead is whole. The model has eight
# blocks.

# %%
too_far = pl.exercises.choose(
    "How many units gathered ahead make ZeRO-3 need more than ZeRO-2?",
    ["one is enough", "five", "not even all eight do"],
)
too_far

# %%
rows = {"ZeRO-2": sum(pl.program(model, plan.replace(zero_stage=2)).peak().values()) / 1e6}
for depth in (0, 1, 2, 4, 5, 8):
    program = pl.program(model, plan.replace(zero_stage=3, prefetch=depth))
    rows[f"ZeRO-3, prefetch={depth}"] = sum(program.peak().values()) / 1e6
pd.Series(rows, name="peak memory (MB)").round(1).to_frame()

# %%
too_far.reveal(
    2,
    "With the block in use six of the eight are then whole, in addition to the shards of all: "
    "sharding the parameters saves nothing any more.",
)

# %% [markdown]
# ### Exercise 3 (go further): prefetch
# Let your ZeRO-3 gather the next unit while the current one computes. At most half of the exposed
# time may be left. Hiding the reduce-scatters as well saves more than that, and is up to you.

# %%
further = pl.exercises.my_prefetch
further


# %%
### ANSWER: my_prefetch


pl.exercises.my_prefetch.check(MyPrefetch)

# %% [markdown] tags=["solution-only"]
# Why it works: calls of one group are executed in the order in which they are posted. When unit $i$
# begins to compute, the gather of the next unit has been posted and is executed meanwhile. Without
# prefetch six units have $6 \cdot 3 \cdot 4 = 72$ ms of exposed time. With prefetch only the first
# gather of forward and the first gather of backward are exposed, and the six reduce-scatters, which
# this answer does not hide: $4 + 4 + 6 \cdot 4 = 32$ ms.
#
# Common mistakes, with what the checker says about them:
# * the next gather is posted after the unit has computed, or waited for at once: no gather is in
#   flight during the forward of unit 1;
# * unit $i + 1$ is prefetched in backward, too, where unit $i - 1$ follows: a tensor of an
#   all-gather was changed before it was waited for;
# * a prefetched gather is never waited for, or posted a second time when the unit's turn comes:
#   rank 0 never waits for all_gather #1;
# * the unit computes first and `work.wait()` comes later: a unit has computed before its
#   parameters arrived.
#
# ## A second answer: one list of uses, and hidden reductions
# This class keeps the order in which units are used in a micro-batch. The last unit is used by
# forward and by backward without a break, so it stays gathered in between. Its reduce-scatters are
# asynchronous, and each is waited for when the backward of the next unit is over. Only the first
# gather and the last reduce-scatter are exposed, $4 + 4 = 8$ ms.


# %% tags=["solution-only"]
### ANSWER: my_prefetch_other


pl.exercises.my_prefetch.check(InOrder)

# %% [markdown]
# ## The largest model that fits
# A rank here is a virtual accelerator, and `memory_limit` gives it a memory of a fixed size. A plan
# that does not fit fails, as it would on a real device, and the error says what filled the memory:


# %% tags=["measured"]
def shares(stage):
    return pl.Plan(dp=4, microbatches=2, microbatch_size=1, zero_stage=stage, bucket_bytes=2**18)


deep = pl.ModelSpec(layers=8, hidden=128, heads=4, seq_len=32)
try:
    pl.run(deep, shares(0), steps=1, memory_limit="16MB", progress=False)
except pl.OutOfMemory as error:
    print(str(error).split("\n\n")[0])
    print(error.table)

# %% [markdown]
# How many blocks does each stage fit into these 16 MB? `peak()` of a program says how much a rank
# needs, by category. The largest number of blocks that it allows is trained, and one block more is
# tried. Data parallelism fits four blocks.

# %%
deepest = pl.exercises.guess("blocks that ZeRO-3 fits into 16 MB", low=4, high=20, decimals=0)
deepest


# %%
def needs(layers, stage):
    return sum(pl.program(deep.replace(layers=layers), shares(stage)).peak().values())


def fits(layers, stage):
    settings = {"steps": 1, "memory_limit": "16MB", "progress": False}
    try:
        return bool(pl.run(deep.replace(layers=layers), shares(stage), **settings).step_time)
    except pl.OutOfMemory:
        return False


most_blocks = {}
for stage, name in enumerate(names):
    most = max(layers for layers in range(1, 20) if needs(layers, stage) <= 16e6)
    trains = {"trains": fits(most, stage), "one block more": fits(most + 1, stage)}
    most_blocks[name] = {"blocks, by program": most} | trains
pd.DataFrame(most_blocks).T

# %%
deepest.reveal(most_blocks["ZeRO-3"]["blocks, by program"])

# %% [markdown]
# ## Nodes: hybrid sharding keeps the expensive bytes inside
# With the ranks on two nodes, part of stage 3's traffic crosses the slow network. On a ring of four
# ranks, two on each node, two of the four edges cross: half of the bytes of an all-gather and, as
# NCCL makes it, of a reduce-scatter. (Gloo has no ring for it. There the reduce-scatter of this
# library is an all-to-all: each rank sends a quarter to each of three others, two of which are on
# the other node, so $\frac23$ of its bytes cross.)
#
# **Hybrid sharding** (HSDP, `shard=2`) shards inside a node and keeps one copy of the states per
# node. Between nodes only an all-reduce of a shard's gradients is left, once per step. What does
# that leave of the bytes between two nodes of two devices, in a step of two micro-batches?

# %%
between_nodes = pl.exercises.guess(
    "bytes between the nodes under HSDP, as a share of those under ZeRO-3",
    low=0,
    high=100,
    unit="%",
    decimals=0,
)
between_nodes

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
by_level = {}
for name, shard in (("ZeRO-3 over all 4", None), ("HSDP: 2 share, 2 copies", 2)):
    expected = pl.predict(model, plan.replace(zero_stage=3, shard=shard), nodes)
    level = expected.traffic(by="level").set_index("level")["bytes"] / 1e6
    by_level[name] = {
        "inside a node (MB)": level["intra"],
        "between nodes (MB)": level["inter"],
        "between, share (%)": 100 * level["inter"] / level.sum(),
        "step (ms)": 1e3 * expected.step_time,
        "peak memory (MB)": expected.peak_memory / 1e6,
    }
pd.DataFrame(by_level).T.round(1)

# %%
sharded, hybrid = (row["between nodes (MB)"] for row in by_level.values())
between_nodes.reveal(100 * hybrid / sharded)

# %% [markdown]
# Counted over all four ranks, ZeRO-3 sends $3m(N-1)\Psi = 18\Psi$ elements in a step, of which
# half, $9\Psi$, are sent between the nodes. HSDP has two all-reduces there, one of each shard of
# $\frac{\Psi}{2}$ elements, and both ranks of each send that many. That is $2\Psi$ in all, two
# ninths of $9\Psi$.
#
# The sum of both kinds of bytes says little, because the links differ by a factor of twenty. The
# step waits for the bytes between the nodes. The price of hybrid sharding is memory. (ZeRO-3
# needs less of it than above: these devices count as GPUs, whose reduce-scatter has no buffer to
# receive into.)
#
# ## Is it the same training?
# One process computes all micro-batches with plain SGD; its gradients and weights are compared with
# those of each stage, on three ranks, which do not divide the number of parameters:

# %%
import numpy as np

proof = {"optimizer": "sgd", "lr": 0.1, "steps": 2, "keep_state": True, "progress": False}
odd = small.replace(layers=5)
print(f"{odd.num_params:,} parameters, {odd.num_params % 3} more than a multiple of 3")
alone = pl.run(odd, pl.Plan(microbatches=6), **proof)
for stage in (1, 2, 3):
    split = pl.run(odd, pl.Plan(dp=3, zero_stage=stage, microbatches=2), **proof)
    for what in ("gradients", "weights"):
        one_, three = getattr(alone, what), getattr(split, what)
        worst = max(np.abs(one_[n] - three[n]).max() / np.abs(one_[n]).max() for n in one_)
        print(f"ZeRO-{stage}: {what} equal to 1e-5 of their largest entry: {worst < 1e-5}")

# %% [markdown]
# ## What to remember
# 1. Data parallelism keeps N copies of weights, gradients and optimizer states; ZeRO-3 keeps
#    one, in N shards.
# 2. Stage 1 sends no more bytes than data parallelism: the optimizer fits between the two halves of
#    the all-reduce. Its all-gather comes after the update, where backward cannot hide it; the next
#    forward can (Megatron-LM's `--overlap-param-gather`).
# 3. Stage 3 gathers a unit before each use, and frees it after. It sends $3m/2$ times what data
#    parallelism sends.
# 4. Activations, gathered units and gradients in flight come on top of the formulas. With as many
#    samples on each rank they do not fall with N.
# 5. Prefetch hides gathers if a unit computes longer than it takes to gather the next, and costs
#    the memory of one more unit.
#
# $$
# M_3 = \frac{K}{N}\Psi, \qquad V_3 = 3m\,\frac{N-1}{N}\Psi, \qquad
# bs \;\ge\; 2\,\frac{N-1}{N}\,\beta X + \frac{q\,(N-1)\,\alpha X}{2\Psi_u} .
# $$
#
# | situation | use |
# |---|---|
# | everything fits | data parallelism; stage 1 costs no bytes |
# | optimizer states do not fit | stage 1; stage 2 if gradients do not fit either |
# | parameters do not fit, fast links | stage 3 = FSDP full shard |
# | the same, slow links between nodes | hybrid sharding, one copy per node |
# | many micro-batches per step | stage 1: the traffic of stages 2 and 3 grows with $m$ |
# | activations do not fit | not ZeRO: recompute them (lab 06) |
#
# ## In PyTorch, DeepSpeed, Megatron
# FSDP2 was observed above. Every block is a unit, and the root takes what is left:
#
# ```python
# for block in gpt.blocks:
#     fully_shard(block, reshard_after_forward=True)  # stage 3; False: no second gather
# fully_shard(gpt, reshard_after_forward=True)  # left out, the root stays gathered until backward
# ```
# HSDP shards inside a node, and replicates between nodes:
#
# ```python
# mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
# for block in gpt.blocks:
#     fully_shard(block, mesh=mesh)
# fully_shard(gpt, mesh=mesh)
# ```
#
# By default the copies are all-reduced in every backward. With
# `gpt.set_requires_all_reduce(False)` before all micro-batches but the last, and `True` before that
# one, they are once per step, as in the table above.
#
# In DeepSpeed a stage is a line of its JSON. Of the two sizes below, the first limits the elements
# that are gathered ahead of their use (a larger one: smaller $q$, more prefetch), the second the
# elements that are whole at once. Megatron-LM has flags: those below are stage 1,
# `--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params` is stage 3. (Neither is
# installed here; this is how they are written.)
#
# ```json
# {"zero_optimization": {"stage": 3, "overlap_comm": true,
#    "stage3_prefetch_bucket_size": 5e7, "stage3_max_live_parameters": 1e9}}
# ```
# ```
# --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
# ```
#
# **On your GPUs**, with `pl.set_default_device("cuda")` in the first cell, the library takes a GPU
# per rank; the ledger then counts device memory, and `memory_limit` caps the allocator. All three
# stages were run with NCCL on one GPU that two ranks shared, not yet on several GPUs.
#
# ## Read on
# * Rajbhandari and others 2020, [ZeRO](https://arxiv.org/abs/1910.02054): figure 1 and table 1 for
#   memory, sec. 7 for the traffic.
# * Zhao and others 2023, [PyTorch FSDP](https://arxiv.org/abs/2304.11277): sec. 3.2 for sharding,
#   hybrid sharding too, sec. 3.3 for prefetch.
# * PyTorch: [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
#   DeepSpeed: [ZeRO's settings](https://www.deepspeed.ai/docs/config-json/).
# * In the package: `paralab/parallel/zero.py`, all three stages as passes over a program.
