# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 11 · What a training costs: FLOPs, days, money
#
# In 2021 3,072 GPUs ran steps of a model with a trillion parameters at 52 % of what their data
# sheet promises. How do you compute such a number, and the days and the money of a training of your
# own?
#
# **You will be able to** derive the FLOPs of a step; tell MFU from HFU; turn a rate into days and
# money; take a step apart into what it loses; and say what a prediction is worth before you use it.
#
# **You need** labs 00, 03 and 10, and products of matrices. **Minutes** 70 to 110: 40 of reading
# and running, the rest for the exercises.

# %%
import pandas as pd

import paralab as pl
from paralab import view
from paralab.theory import needs, papers, training

PEAK = 312e12  # FLOP/s of an A100 in 16 bits, at its very best
table = papers.ptdp_table1()  # PTD-P, Narayanan et al. 2021: ten models that were trained for real
last = table.iloc[-1]
ideal = last["FLOPs per step"] / last["devices"] / PEAK
parts = {"products at the peak": ideal, "everything else": last["seconds per step"] - ideal}
view.seconds_bars({"a trillion parameters": parts}, title="Half of each step is not products")

# %% [markdown]
# ## FLOPs are products of matrices, counted
#
# | symbol | meaning |
# |---|---|
# | $d, p, t, n$ | data-, pipeline-, tensor-parallel ranks; all of them, $n = d\,p\,t$ |
# | $m, b$ | micro-batches per step and data-parallel rank; samples of each: $d\,m\,b$ per step |
# | $s, h, L, V$ | tokens per sample, hidden size, blocks, vocabulary |
# | $\Psi$ | parameters |
# | $C$ | FLOPs of a step: $C_\text{model}$ without, $C_\text{hw}$ with what is recomputed |
# | $T, D$ | seconds of a step; tokens of the whole training |
# | $X, X_\text{peak}$ | FLOP/s of a device: reached, and on its data sheet |
#
# A product of an $(i, k)$ and a $(k, j)$ matrix takes $2\,i\,k\,j$ FLOPs, a multiplication and an
# addition each. For one sample of $s$ tokens, forward:
#
# 1. A block's linear layers have $12 h^2$ weights, and each token meets each of them once:
#    $24\,s\,h^2$.
# 2. Attention multiplies queries with keys and scores with values (over all $s^2$ pairs,
#    masked or not), $2\,s^2 h$ each: $4\,s^2 h$.
# 3. The head: $2\,s\,h\,V$.
# 4. Backward takes twice forward: a product for the input's gradient, one for the weight's.
# 5. Full recomputation makes the forward of the blocks once more, and not that of the head.
#
# $$ C_\text{model} = 3\,d\,m\,b\,\big(L\,(24 s h^2 + 4 s^2 h) + 2 s h V\big)
#    = 72\,d m b\, s L h^2 \Big(1 + \frac{s}{6h} + \frac{V}{12 L h}\Big) $$
#
# $$ C_\text{hw} = d\,m\,b\,\big(4 L\,(24 s h^2 + 4 s^2 h) + 6 s h V\big)
#    = 96\,d m b\, s L h^2 \Big(1 + \frac{s}{6h} + \frac{V}{16 L h}\Big) $$
#
# The second one is equation 3 of [PTD-P](https://arxiv.org/abs/2104.04473); its equation 2 counts
# the parameters, $\Psi = 12 L h^2 \big(1 + \frac{13}{12 h} + \frac{V + s}{12 L h}\big)$.

# %%
model, plan = papers.ptdp_models()[-1]
s, h, L, V, samples = model.seq_len, model.hidden, model.layers, model.vocab, plan.global_batch
C_model = 72 * samples * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
C_hw = 96 * samples * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
print(
    f"parameters, eq. 2: {12 * L * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * L * h)) / 1e9:.1f} B"
)
print(f"C_model {C_model:.4e}, C_hw {C_hw:.4e}, printed rate x time: ", end="")
print(
    f"{last['TFLOP/s per device, printed'] * 1e12 * last['devices'] * last['seconds per step']:.4e}"
)

# %% [markdown]
# In the program of a step (lab 02) the difference is a few lines per block. A block is computed
# once more before its backward, from its input, which is all that was kept of it.

# %%
small = pl.ModelSpec(layers=3, hidden=64, heads=4, seq_len=32, attention="explicit")
kept = pl.program(small, pl.Plan(microbatch_size=2))
kept.diff(pl.program(small, pl.Plan(microbatch_size=2, recompute="full")))

# %% [markdown]
# Is it what really runs? PyTorch counts the FLOPs of every product that it makes, here for the
# reference GPT, forward and backward:


# %%
def counted(recompute):
    from torch.utils import checkpoint, flop_counter

    spec = pl.ModelSpec(layers=3, hidden=64, heads=4, seq_len=32, attention="explicit")
    gpt = pl.reference.GPT(spec)
    for block in gpt.blocks if recompute else ():
        plain = block.forward
        block.forward = lambda x, f=plain: checkpoint.checkpoint(f, x, use_reentrant=False)
    [(tokens, targets)] = pl.reference.batches(spec, step=0, microbatch_size=2)
    with flop_counter.FlopCounterMode(display=False) as counter:
        gpt(tokens, targets).backward()
    return counter.get_total_flops(), needs.step_flops(spec, 2, recompute=recompute)


rows = {kind: pl.launch(counted, 1, (kind,))[0] for kind in (False, True)}
frame = pd.DataFrame(rows, index=["PyTorch counts", "formula"]).T
frame.set_axis(["nothing recomputed", "blocks recomputed"]).assign(
    missing=lambda t: t["formula"] - t["PyTorch counts"]
)

# %% [markdown]
# Without recomputation the formula is exact. With it PyTorch computes fewer:
# `torch.utils.checkpoint` stops as soon as it has what backward needs, and backward never needs
# the result of a block's last product, $8\,b\,s\,h^2$ FLOPs. Within
# `set_checkpoint_early_stop(False)` it makes them.
#
# ## MFU counts what the model needs, HFU what the device does
#
# $$ \text{MFU} = \frac{C_\text{model}}{n\,T\,X_\text{peak}}, \qquad
#    \text{HFU} = \frac{C_\text{hw}}{n\,T\,X_\text{peak}} $$
#
# Recomputation raises HFU and does not train faster, so only MFU compares plans.

# %%
which = pl.exercises.choose(
    "PTD-P trained with full recomputation and prints 52 % of the peak. Which one is that?",
    ["MFU", "HFU", "neither: it is a share of the time"],
)
which

# %%
T, n = last["seconds per step"], last["devices"]
print(f"MFU {C_model / (n * T * PEAK):.1%}, HFU {C_hw / (n * T * PEAK):.1%}")
which.reveal(2, "The model's own FLOPs are a quarter less than those that were made.")

# %% [markdown]
# A year later [Korthikanti et al.](https://arxiv.org/abs/2205.05198) recomputed the attention core
# alone, and print both (table 5):

# %%
printed = papers.korthikanti_table5().set_index("model")
printed[
    ["MFU (%), printed", "MFU (%), recomputed", "HFU (%), printed", "HFU (%), counted once"]
].round(1)

# %% [markdown]
# (Their equation 8 counts the recomputed core three times, which explains the HFU that they print;
# counted once it is lower.)
#
# ## How is MFU calculated from a log?
# [MaxText #8](https://github.com/AI-Hypercomputer/maxtext/issues/8) asks how the MFU of a README
# was calculated. A maintainer answers: $6\,\Psi$ FLOPs per token, over the step time and the peak.
# That leaves out attention's scores, $s/(6h)$. For the smallest and the largest model of PTD-P, and
# for a small one with a long sequence:

# %%
long = pl.ModelSpec(layers=24, hidden=2048, heads=16, seq_len=16_384, vocab=51_200)
names = {"1.7 B": papers.ptdp_models()[0][0], "1008 B": model, "1.3 B, 16k tokens": long}
{
    name: f"{6 * spec.num_params * spec.seq_len / needs.step_flops(spec, 1) - 1:+.1%}"
    for name, spec in names.items()
}

# %% [markdown]
# ## Days are tokens times FLOPs per token over what all devices do
# A step trains $d\,m\,b\,s$ tokens and takes $C_\text{hw}/(n X)$ seconds, so $D$ tokens take
#
# $$ \text{days} = \frac{D}{d\,m\,b\,s} \cdot \frac{C_\text{hw}}{n\,X} \cdot \frac{1}{86{,}400}
#    \;\approx\; \frac{8\,D\,\Psi}{n\,X} \cdot \frac{1}{86{,}400} $$
#
# The approximation is equation 4 of PTD-P, with 8 FLOPs per parameter and token: 2 forward, 2
# recomputed, 4 backward. The paper asks it for the trillion parameters, 450 billion tokens and
# 3,072 GPUs that reach 163 TFLOP/s each. What is your estimate?

# %%
estimate = pl.exercises.guess("days for a trillion parameters", low=1, high=200, decimals=0)
estimate

# %%
D, X = 450e9, 163e12
exact = D / (samples * s) * C_hw / (n * X) / 86_400
print(
    f"exact {exact:.1f} days, eq. 4 {8 * D * model.num_params / (n * X) / 86_400:.1f}, printed 84"
)
estimate.reveal(round(exact))

# %%
days = papers.ptdp_table2().query("scheme == 'PTD-P'").set_index("devices")
days["eq. 4 is off by (%)"] = 100 * (days["days, eq. 4"] / days["days, recomputed"] - 1)
days[
    [
        "parameters (B), printed",
        "days, printed",
        "days, recomputed",
        "days, eq. 4",
        "eq. 4 is off by (%)",
    ]
].round(1)

# %% [markdown]
# The days that the paper prints in its table 2 are within one day of the exact ones. The 84 days of
# its text are those of equation 4, which comes out low every time; by the exact count they are 85.
#
# ## Warm-up: days and MFU from the seconds of a step

# %%
warm_up = pl.exercises.days_and_mfu
warm_up


# %%
### ANSWER: days_and_mfu


pl.exercises.days_and_mfu.check(days_and_mfu)

# %% [markdown]
# ## Implement: what does a training cost?

# %%
exercise = pl.exercises.training_cost
exercise


# %%
### ANSWER: training_cost


pl.exercises.training_cost.check(step_flops, training_days, states_per_device)

# %% [markdown]
# If you are stuck, `exercise.hint()` gives one hint at a time.

# %% [markdown] tags=["solution-only"]
# **Why it works.** The three functions are the three formulas above and the states of lab 10: FLOPs
# per sample, tokens times FLOPs over the rate of all devices, and bytes divided by every axis that
# shards them.
#
# **Common mistakes.** Recomputing the head; leaving out the scores; tokens taken for samples; days
# by equation 4; ZeRO's $N$ taken as all devices instead of $d$.

# %% [markdown]
# ## A prediction has to beat a constant
# `pl.predict` gives the time of a step before you own the devices. What is that worth? PTD-P's
# table 1 has ten measured rates. The preset's figures were not fitted to them. (Two of them, the
# reachable memory bandwidth and the cost of a kernel launch, were chosen to fit other published
# iterations on A100s.) Next to the prediction stands the null model, which says the mean of the
# column whatever you ask it:

# %%
judged = table[["TFLOP/s per device, printed", "chunks"]].set_axis(["printed", "chunks"], axis=1)
predicted = []
for each, how in papers.ptdp_models():
    machine = pl.Cluster.preset("dgx-a100", nodes=how.world_size // 8)
    trained = each.replace(dropout=0.1)  # the authors' scripts leave it on
    seconds = pl.predict(trained, how, machine, steps=1, detail="actions").step_time
    work = needs.step_flops(each, how.global_batch, recompute=True)
    predicted.append(work / how.world_size / seconds / 1e12)
off = pd.DataFrame({"prediction": predicted, "null model": judged["printed"].mean()})
off = (100 * off.div(judged["printed"], axis=0) - 100).abs()
kind = judged["chunks"].gt(1).map({False: "not interleaved", True: "interleaved"})
pd.concat([off.groupby(kind).mean(), off.mean().to_frame("all ten").T]).add_suffix(
    ", off by (%)"
).round(1)

# %% [markdown]
# A constant, too, is only a few per cent off on average, so a tool that is has not shown much. The
# prediction's errors are smaller on average, and they have a pattern: for interleaved plans the
# constant is nearer. Use a prediction for differences between plans of one kind.
#
# ## Five measured rows may correct a cluster
# With iterations of your own, `pl.fit_cluster` corrects at most six figures of a stated cluster,
# and says how far off it is on runs that it has not seen. These are five iterations of a model of
# 3.6 billion parameters on 64 A100s, published by [vTrain](https://github.com/VIA-Research/vTrain)
# (Bang et al. 2024, MIT licence): samples per micro-batch, tp, dp, pp, seconds.

# %%
vtrain = pl.ModelSpec(layers=30, hidden=3072, heads=32, seq_len=2048, vocab=51200, dropout=0.1)
vtrain = vtrain.replace(attention="explicit")
how = {"recompute": "full", "precision": "fp16", "grad_sync": "bucketed", "bucket_bytes": 2**40}
stated = pl.Cluster.preset("dgx-a100", nodes=8).replace(ports=4)  # 800 Gbit/s between nodes


def run(b, t, d, p, seconds):
    return (
        vtrain,
        pl.Plan(tp=t, dp=d, pp=p, microbatches=512 // (d * b), microbatch_size=b, **how),
        seconds,
    )


rows = [(4, 1, 64, 1, 3.638), (16, 2, 32, 1, 3.938), (32, 4, 16, 1, 4.548), (32, 8, 8, 1, 4.972)]
rows += [(4, 1, 32, 2, 4.382)]
fit = pl.fit_cluster([run(*row) for row in rows], stated)
fit

# %%
unseen = [
    (2, 1, 64, 1, 3.7),
    (2, 2, 32, 1, 4.264),
    (8, 4, 16, 1, 4.634),
    (16, 8, 8, 1, 5.018),
    (2, 1, 32, 2, 4.035),
]
at = {"stated": stated, "fitted": fit.cluster}
found = {}
for b, t, d, p, seconds in unseen:
    spec, cut, _ = run(b, t, d, p, seconds)
    said = {k: pl.predict(spec, cut, c, steps=1, detail="actions").step_time for k, c in at.items()}
    found[f"dp {d}, tp {t}, pp {p}, b {b}"] = {"measured (s)": seconds} | {
        f"{k} (s)": v for k, v in said.items()
    }
pd.DataFrame(found).T.round(2)

# %% [markdown]
# Compare the two columns: the fit is nearer in one row and further off in four. Five rows correct
# little, and the stated figures were good. On rows that it has not seen a fit can come out worse
# than what it began with, and then the stated cluster is the one to keep. That is why `fit_cluster`
# prints an error out of sample, and the null model's next to it.
#
# ### Go further: a fit of your own, with its error out of sample

# %%
further = pl.exercises.own_fit
further


# %%
### ANSWER: own_fit


pl.exercises.own_fit.check(own_fit)

# %% [markdown] tags=["solution-only"]
# **Why it works.** The mean of logarithms treats an error by a factor of two alike, whether the
# step takes a second or a minute. Leaving a row out before it is predicted shows what the rate is
# worth for a run that has not been measured yet.
#
# **Common mistakes.** The arithmetic mean of the rates; an error in sample that is called out of
# sample; signed errors, which cancel each other; a rate of all devices together. A second answer
# needs no second fit, because the mean without one row follows from the mean of all:

# %% tags=["solution-only"]
### ANSWER: own_fit_other


pl.exercises.own_fit.check(own_fit)

# %% [markdown]
# ## Where the other half of a step goes
# The prediction of the trillion can be taken apart, term by term, and stands next to
# the step that follows from the measured rate:

# %%
nodes = pl.Cluster.preset("dgx-a100", nodes=384)
expect = pl.predict(model, plan, nodes, steps=1, detail="actions")
work = expect.spans[expect.spans["kind"].isin(["forward", "backward"])]
computing = work.groupby("rank")["cost"].sum()  # seconds, one rank of each stage
edges = {
    "products at the peak": C_hw / n / PEAK,
    "products below it": C_hw / n / nodes.flops,
    "operands, norms, GELU, softmax": computing.mean(),
    "the slowest stage": computing.max(),
    "bubble": computing.max() * (1 + (plan.pp - 1) / plan.microbatches),
    "links, optimizer": expect.step_time,
}
steps = pd.Series(edges).diff().fillna(edges["products at the peak"]).to_dict()
view.seconds_bars(
    {"predicted": steps, "measured": {"measured": T}},
    title="Most of the loss is in the devices, not between them",
)

# %% [markdown]
# The largest loss has nothing to do with parallelism: operations limited by the bandwidth of the
# device's memory. Then
# comes the bubble (here relative to the ideal time, $(p-1)/m$), then products, which stay below the
# peak even where they are large. The links, which people fear most, come after that, and the last
# stage, for which all others wait, as it has the head in addition to its blocks. The prediction is
# too fast: the two bars differ by what it does not know.
#
# ## What would your model cost?
# Put your own numbers into this cell: the price is yours to fill in.

# %%
mine = pl.ModelSpec(
    layers=32, hidden=4096, heads=32, seq_len=4096, vocab=32_000, attention="explicit"
)
tokens, devices, reached, dollars = 2e12, 256, 150e12, 2.0  # FLOP/s per device; per device hour

cost = training.training_cost(
    mine, tokens=tokens, devices=devices, flops=reached, watts=600, recompute="full"
)
pd.Series(
    {
        "parameters (billions)": cost.params / 1e9,
        "model states, 18 bytes each (GB)": cost.state_bytes / 1e9,
        "80 GB devices that hold them": cost.fewest_devices,
        "a checkpoint, 14 bytes each (GB)": cost.saved_bytes / 1e9,
        "days": cost.days,
        "device hours": cost.device_hours,
        "money (thousands)": cost.device_hours * dollars / 1e3,
        "electricity (MWh)": cost.energy / 3.6e9,
    }
).round(1)

# %% [markdown]
# (18 bytes, not 16: here gradients are added up in 32 bits.) The rate was an assumption. A search
# over the plans of lab 10 predicts it, with and without overlap:

# %%
here = pl.Cluster.preset("dgx-a100", nodes=devices // 8)
search = pl.plan_search(mine, here, global_batch=1024, precision="bf16", offload=None, top=3)
best, steps = search.table.head(3).copy(), tokens / (1024 * mine.seq_len)
best["days"] = best["simulated_s"] * steps / 86_400
best["days, no overlap"] = best["serial_s"] * steps / 86_400
best[["dp", "tp", "zero_stage", "recompute", "days", "days, no overlap"]].round(1)

# %% [markdown]
# These are fewer days than above, because the best plans recompute nothing. Without overlap the
# order is another one; [lab 12](12_trillion.ipynb) shows how kind the column *days*
# is to ZeRO's third stage.
#
# ## What to remember
# 1. $C_\text{model} = 72\,d m b\, s L h^2 (1 + \frac{s}{6h} + \frac{V}{12Lh})$; with the blocks
#    recomputed 96 and $\frac{V}{16Lh}$.
# 2. MFU divides what the model needs by what the devices could do; HFU counts recomputation too.
# 3. days $= \frac{8 D \Psi}{n X}/86{,}400$, one to three per cent low.
# 4. Half of what is lost is lost inside the devices; the rest is bubble, links and the slowest
#    stage.
# 5. Judge a prediction by how much better than a constant it is, on rows it was not fitted to.
#
# | when | use |
# |---|---|
# | compare plans or machines | MFU |
# | ask whether kernels are good | HFU |
# | a first guess of days | $6 D \Psi$ or, recomputed, $8 D \Psi$ over $n X$ |
# | long sequences ($s$ near $6h$) | the exact count |
# | you have a log of your own | `pl.fit_cluster` |
#
# ## In PyTorch, DeepSpeed, Megatron
# PyTorch counts FLOPs with `torch.utils.flop_counter.FlopCounterMode`, as above: it counts the
# products that are made, so with checkpointing that is HFU's numerator. Megatron-LM prints TFLOP/s
# per GPU with `--log-throughput` and counts the model's FLOPs; torchtitan logs `mfu` from $6\Psi$
# plus the scores; DeepSpeed has a profiler in its JSON, `"flops_profiler": {"enabled": true,
# "profile_step": 5}`. Before you compare two such numbers, ask which of the formulas each one is.
#
# **On your GPUs.** Nothing here was run on one. A report of `pl.run` on GPUs has MFU and HFU in its
# `summary()` if the cluster states `peak_flops`; its rows go into `pl.fit_cluster` as they are.
#
# ## Read on
# * Narayanan et al. 2021, [PTD-P](https://arxiv.org/abs/2104.04473): tables 1 and 2, eq. 2 to 4 in
#   sec. 5.1 and the appendix.
# * Korthikanti et al. 2022, [Reducing activation recomputation](https://arxiv.org/abs/2205.05198),
#   sec. 6.3 and table 5: MFU and HFU.
# * Chowdhery et al. 2022, [PaLM](https://arxiv.org/abs/2204.02311), appendix B: the definition of
#   MFU.
# * [ML Engineering](https://github.com/stas00/ml-engineering), the chapter on performance.
# * In the package: `theory/training.py`, `theory/needs.py`, `theory/fit_cluster.py`, and
#   `papers.errata()`, where papers contradict themselves. Next: [lab 12](12_trillion.ipynb).
