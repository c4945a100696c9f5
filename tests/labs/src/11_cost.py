# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 11 · What a training costs: FLOPs, days, money
#
# In 2021, 3,072 GPUs ran steps of a model with a trillion parameters at 52 % of what their data
# sheet promises. How do you compute such a number, and the days and the money of a training of your
# own?
#
# **You will be able to** derive the FLOPs of a step; tell MFU from HFU; turn a rate into days and
# money; take a step apart into what it loses; and say what a prediction is worth before you use it.
#
# **You need** labs 00, 03 and 10, and products of matrices. **Minutes** 70 to 110: 40 of reading
# and running, the rest for the exercises.

# %%
import paralab as pl
from paralab import view
from paralab.theory import needs, papers, training

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
PEAK = 312e12  # FLOP/s of an A100 in 16 bits, at its very best
last = papers.ptdp_table1().iloc[-1]  # Narayanan et al. 2021; seconds follow from their rates
ideal = last["FLOPs per step"] / last["devices"] / PEAK
parts = {"matrix products at the peak": ideal, "everything else": last["seconds per step"] - ideal}
title = "Almost half of each step is not matrix products at the peak rate"
view.seconds_bars({"a trillion parameters": parts}, title=title, clock="measured")

# %% [markdown]
# ## Days and MFU follow from the seconds of a step
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
# A step of the picture takes 103 seconds and trains 3,072 samples of 2,048 tokens each. The authors
# plan for $D$ = 450 billion tokens. How many days is that?

# %%
estimate = pl.exercises.guess("days for 450 billion tokens", low=1, high=200, decimals=0)
estimate

# %% [markdown]
# ### Warm-up: days and MFU from a log
# *Model FLOPs utilisation* (MFU, [PaLM](https://arxiv.org/abs/2204.02311), appendix B) is the FLOPs
# that the model needs for a step, divided by the FLOPs that all devices could make in the seconds
# of the step, each at the peak of its data sheet.

# %%
warm_up = pl.exercises.days_and_mfu
warm_up


# %%
### ANSWER: days_and_mfu


pl.exercises.days_and_mfu.check(days_and_mfu)

# %% [markdown] tags=["solution-only"]
# **Why it works.** All devices work on the same step, so the number of steps times the seconds of a
# step is the time of the training, and the number of devices does not divide it. It divides the
# FLOP/s, because each device has a peak of its own.
#
# **Common mistakes.** Seconds divided by the number of devices; the peak of one device for the work
# of all; FLOPs multiplied by the samples that they count already. A second answer goes by rates per
# second and per day:

# %% tags=["solution-only"]
### ANSWER: days_and_mfu_other


pl.exercises.days_and_mfu.check(days_and_mfu)

# %%
model, plan = papers.ptdp_models()[-1]
s, h, L, V, samples = model.seq_len, model.hidden, model.layers, model.vocab, plan.global_batch
T, n, D = last["seconds per step"], last["devices"], 450e9
estimate.reveal(round(D / (samples * s) * T / 86_400))

# %% [markdown]
# ## FLOPs are products of matrices, counted
# A product of an $(i, k)$ and a $(k, j)$ matrix takes $2\,i\,k\,j$ FLOPs: $k$ multiplications and
# $k$ additions for each of the $i\,j$ results. The forward pass of one sample of $s$ tokens makes
# these products:
#
# 1. The linear layers of a block have $12 h^2$ weights together, and every token is multiplied with
#    each of them once. That takes $24\,s\,h^2$ FLOPs.
# 2. Attention multiplies queries with keys, and the scores with values. Each of the two takes
#    $2\,s^2 h$ FLOPs, because this count takes all $s^2$ pairs of tokens, masked or not, as PTD-P
#    does. Together they take $4\,s^2 h$. (A fused causal kernel makes about half of them.)
# 3. The head multiplies every token with an $(h, V)$ matrix: $2\,s\,h\,V$.
#
# The backward pass makes two products for each product of the forward pass, one for the gradient of
# each of its two factors: input and weight in a linear layer, queries and keys, or scores and
# values, in attention. Full recomputation makes the forward pass of every block a second time, and
# not that of the head, whose backward pass follows at once.
#
# ## Implement: what does a training cost?
# You have all that you need for the count. The last function tells MFU from *hardware FLOPs
# utilisation* (HFU, [Korthikanti et al.](https://arxiv.org/abs/2205.05198), sec. 6.3): HFU counts
# the FLOPs that the devices make, recomputed ones included, and MFU only those that the model
# needs. `exercise.hint()` gives one hint at a time.

# %%
exercise = pl.exercises.training_cost
exercise


# %%
### ANSWER: training_cost


verdict = pl.exercises.training_cost.check(step_flops, training_days, utilisation)
verdict

# %% [markdown] tags=["solution-only"]
# **Why it works.** With full recomputation a block's forward is made twice and its backward costs
# two forwards, so a block counts four times and the head three times. Days are tokens times the
# FLOPs of a token over the rate of all devices. MFU and HFU have the same denominator, and only the
# numerator of HFU has the second forward.
#
# **Common mistakes.** Recomputing the head; leaving out the scores; tokens taken for samples; the
# estimates $6\Psi$ or $8\Psi$ in place of the count; HFU given for MFU. A second answer counts the
# products of one token:

# %% tags=["solution-only"]
### ANSWER: training_cost_other


verdict = pl.exercises.training_cost.check(step_flops, training_days, utilisation)
verdict

# %% [markdown]
# ## The count in closed form
# The three products, three times each for forward and backward, and a fourth time for the blocks
# where they are recomputed, give the FLOPs of a step of $d\,m\,b$ samples:
#
# $$ C_\text{model} = 3\,d\,m\,b\,\big(L\,(24 s h^2 + 4 s^2 h) + 2 s h V\big)
#    = 72\,d m b\, s L h^2 \Big(1 + \frac{s}{6h} + \frac{V}{12 L h}\Big) $$
#
# $$ C_\text{hw} = d\,m\,b\,\big(4 L\,(24 s h^2 + 4 s^2 h) + 6 s h V\big)
#    = 96\,d m b\, s L h^2 \Big(1 + \frac{s}{6h} + \frac{V}{16 L h}\Big) $$
#
# The second formula is equation 3 of [PTD-P](https://arxiv.org/abs/2104.04473). Its equation 2
# counts the parameters, $\Psi = 12 L h^2 \big(1 + \frac{13}{12 h} + \frac{V + s}{12 L h}\big)$. For
# the model of the picture:

# %%
C_model = 72 * samples * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
C_hw = 96 * samples * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
psi = 12 * L * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * L * h))
print(f"equation 2: {psi / 1e9:.1f} billion parameters, the model has {model.num_params / 1e9:.1f}")
print(f"C_model {C_model:.4e}, C_hw {C_hw:.4e}, {C_hw / C_model:.3f} times as many")

# %% [markdown]
# The program of a step (lab 00) shows where the additional FLOPs come from. With full recomputation
# a block keeps only its input `x`, and one more instruction per block computes the block a second
# time just before its backward.

# %%
small = pl.ModelSpec(layers=3, hidden=64, heads=4, seq_len=32, attention="explicit")
kept = pl.program(small, pl.Plan(microbatch_size=2))
kept.diff(pl.program(small, pl.Plan(microbatch_size=2, recompute="full")))

# %% [markdown]
# The formulas can be held against a measurement, because PyTorch can count the FLOPs of every
# product that it makes. The next cell counts the forward and backward pass of the reference GPT,
# first without recomputation and then with every block in `torch.utils.checkpoint`.

# %%
early = pl.exercises.choose(
    "How many FLOPs does PyTorch count when every block is recomputed?",
    [
        "As many as the formula: every block's forward is made twice",
        "Fewer: the second forward leaves out what backward does not need",
        "More: the head is recomputed, too",
    ],
)
early


# %%
import pandas as pd


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

# %%
early.reveal(2, "The second forward stops before the last product of each block.")

# %% [markdown]
# Without recomputation the formula is exact for attention that is written as products
# (`attention="explicit"`). With recomputation PyTorch computes fewer FLOPs:
# `torch.utils.checkpoint` stops as soon as it has everything that backward needs, and backward
# never needs the result of a block's last product. This product takes $8\,b\,s\,h^2$ FLOPs in each
# of the $L$ blocks. Within `set_checkpoint_early_stop(False)` PyTorch makes it, too. (So it is
# without dropout and with `use_reentrant=False`. A dropout behind the last product needs its mask
# again, and so the product before it; `use_reentrant=True` repeats the whole block. In both cases
# PyTorch counts what the formula says.)
#
# ## MFU counts what the model needs, HFU what the devices make
#
# $$ \text{MFU} = \frac{C_\text{model}}{n\,T\,X_\text{peak}}, \qquad
#    \text{HFU} = \frac{C_\text{hw}}{n\,T\,X_\text{peak}} $$
#
# A plan that recomputes more has a higher HFU and does not train faster. Plans are therefore
# compared by MFU.

# %%
which = pl.exercises.choose(
    "PTD-P trained with full recomputation and prints 52 % of the peak. Which one is that?",
    ["MFU", "HFU", "neither: it is a share of the time"],
)
which

# %%
print(f"MFU {C_model / (n * T * PEAK):.1%}, HFU {C_hw / (n * T * PEAK):.1%}")
which.reveal(2, "Its equation 3 counts recomputed FLOPs, a quarter of all, and MFU does not.")

# %% [markdown]
# A year later [Korthikanti et al.](https://arxiv.org/abs/2205.05198) recompute only the core of
# attention, and print both shares. The first four rows of the next table are those of their table
# 5. The last row is from the text of their section 6.3, which prints no HFU: eight data-parallel
# copies train the model of 530 billion parameters on 2,240 GPUs, and MFU falls from 56.0 to 54.2 %.

# %%
printed = papers.korthikanti_table5().set_index(["model", "devices"])
columns = ["MFU (%), printed", "MFU (%), recomputed", "HFU (%), printed", "HFU (%), counted once"]
printed[columns].set_axis(
    ["MFU printed", "by formula", "HFU printed", "counted once"], axis=1
).round(1)

# %% [markdown]
# The two columns of MFU agree within 0.2 points. The printed HFU is higher than the last column,
# because equation 8 of the paper adds the recomputed FLOPs three times, and the devices make them
# once.
#
# ## How is MFU calculated from a log?
# [MaxText #8](https://github.com/AI-Hypercomputer/maxtext/issues/8) asks how the MFU of a README
# was calculated. In 2023 a maintainer answered: $6\,\Psi$ FLOPs per token, divided by the step time
# and the peak. (Today MaxText counts all products, and [half of
# attention's](https://github.com/AI-Hypercomputer/maxtext/pull/1988).) The answer is the warm-up's
# quotient, with $6\,\Psi$ per token as an estimate of the FLOPs that the model needs. The estimate
# leaves out the products of attention with the term $\frac{s}{6h}$. How much is missing for a model
# with $L = 24$, $h = 2048$, $V = 51{,}200$ and a sequence of $s = 16{,}384$ tokens?

# %%
missing = pl.exercises.guess("of the FLOPs are missing", low=0, high=100, unit="%", decimals=0)
missing

# %%
long = pl.ModelSpec(layers=24, hidden=2048, heads=16, seq_len=16_384, vocab=51_200)
names = {"1.7 B": papers.ptdp_models()[0][0], "1008 B": model, "1.3 B, 16k tokens": long}
short = {
    name: 1 - 6 * spec.num_params * spec.seq_len / needs.step_flops(spec, 1)
    for name, spec in names.items()
}
{name: f"{share:.1%} missing" for name, share in short.items()}

# %%
missing.reveal(100 * short["1.3 B, 16k tokens"])

# %% [markdown]
# ## Your functions read the log of a training
# The next cell trains the reference GPT on two data-parallel ranks and recomputes every block. It
# does so twice: in plain PyTorch, under `pl.observe`, and as the library's program for the same
# plan. From the seconds of a step your three functions then compute both shares, and the days for a
# billion tokens. A processor has no data sheet with a peak. The rate that its matrix products
# reached when `pl.Cluster.local()` measured them stands for it. (The first measurement takes
# ten to fifteen seconds.) What do you expect?

# %%
shares = pl.exercises.choose(
    "The two runs differ in the seconds of a step. Which figure is the same for both?",
    ["MFU", "HFU", "HFU divided by MFU", "the days"],
)
shares


# %%
def own_training(spec, steps):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    gpt, losses = pl.reference.GPT(spec), []
    for block in gpt.blocks:
        block.forward = lambda x, f=block.forward: checkpoint(f, x, use_reentrant=False)
    ddp = DistributedDataParallel(gpt)
    update = pl.reference.optimizer(ddp.parameters(), "sgd", 0.1)
    share = {"rank": dist.get_rank(), "ranks": dist.get_world_size(), "microbatch_size": 4}
    for step in range(steps):
        [(tokens, targets)] = pl.reference.batches(spec, step=step, **share)
        loss = ddp(tokens, targets)
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


tiny = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64, attention="explicit")
twice = pl.Plan(dp=2, microbatch_size=4, recompute="full")
runs = {
    "PyTorch": pl.observe(own_training, ranks=2, args=(tiny, 6)),
    "the library": pl.run(tiny, twice, optimizer="sgd", steps=6, progress=False),
}
{name: [round(loss, 4) for loss in report.losses] for name, report in runs.items()}


# %%
def read(report, peak):
    """The row of one run: what your functions say of the seconds of its steps."""
    samples, seconds, ranks = twice.global_batch, report.step_time, twice.world_size
    model_share, hardware_share = utilisation(tiny, samples, seconds, ranks, peak)
    reached = step_flops(tiny, samples) / seconds / ranks
    return {
        "seconds per step": seconds,
        "MFU": model_share,
        "HFU": hardware_share,
        "HFU / MFU": hardware_share / model_share,
        "days for a billion tokens": training_days(tiny, 1e9, ranks, reached),
    }


mfus = "write the three functions of training_cost first"
if verdict:
    peak = pl.Cluster.local().flops
    mfus = pd.DataFrame({name: read(report, peak) for name, report in runs.items()}).T
    by_library = runs["the library"].summary().loc["model FLOP/s per device", "value"] * 1e9
    same = abs(mfus.loc["the library", "MFU"] * peak / by_library - 1) < 1e-3
    print("the library's summary counts as many FLOP/s of the model:", same)

# %% tags=["measured"]
mfus.round(3) if verdict else mfus

# %%
shares.reveal(
    3,
    "By the formulas it is C_hw / C_model: it depends on the model and on what is recomputed. "
    "The others have T in them.",
)

# %% tags=["measured"]
title = "DDP's first all-reduce starts during backward, the library's after it"
view.timelines(*runs.values(), labels=list(runs), ranks=[0], step=3, title=title)

# %%
second = pl.exercises.choose(
    "At its peak one of the two runs holds what the other does not. What is it?",
    [
        "a second copy of the parameters",
        "a second copy of the gradients",
        "the activations of all blocks",
    ],
)
second

# %% tags=["measured"]
view.memory_bars(runs, title="DDP's buckets are a second copy of the gradients")

# %%
second.reveal(2, "DDP copies gradients into buckets; the library's gradients are parts of them.")

# %% [markdown]
# Recomputation is part of *backward* in the timelines. Both shares compare a step with one that
# consists of matrix products at the measured rate. The rest of a step is slower products,
# LayerNorms, GELU, softmax, copies, the fixed cost of each operation, and the wait for the
# all-reduce. Your functions count FLOPs by formula for both runs. As counted above, PyTorch's
# second forward leaves out the last product of each block: $8h / (96h + 16s + 6V/L)$ of
# $C_\text{hw}$, 7.5 % with this model. So the HFU of PyTorch's run is 8 % too high. The two runs
# also differ in the code that calls the products, so they do not take the same time.
#
# ## Days are tokens times FLOPs per token over what all devices do
# The warm-up had the seconds of a step. Before a training they are not known, but they follow from
# the FLOPs and a rate. A step trains $d\,m\,b\,s$ tokens and takes $C_\text{hw}/(n X)$ seconds, so
# $D$ tokens take
#
# $$ \text{days} = \frac{D}{d\,m\,b\,s} \cdot \frac{C_\text{hw}}{n\,X} \cdot \frac{1}{86{,}400}
#    \;\approx\; \frac{8\,D\,\Psi}{n\,X} \cdot \frac{1}{86{,}400} $$
#
# The approximation is equation 4 of PTD-P. It counts 8 FLOPs per parameter and token: 2 in forward,
# 2 in the recomputed forward, and 4 in backward. The text of the paper uses it for the trillion
# parameters on 3,072 GPUs that reach 163 TFLOP/s each, and prints 84 days. Below
# it are six rows of the paper's table 2, with smaller models and 300 billion tokens:

# %%
exact, eq4 = D / (samples * s) * C_hw / (n * 163e12), 8 * D * psi / (n * 163e12)
print(f"a trillion parameters: exact {exact / 86_400:.1f} days, equation 4 {eq4 / 86_400:.1f} days")
days = papers.ptdp_table2().query("scheme == 'PTD-P'").set_index("devices")
days["eq. 4 is off by (%)"] = 100 * (days["days, eq. 4"] / days["days, recomputed"] - 1)
days = days.rename(
    columns={"parameters (B), printed": "parameters (B)", "days, recomputed": "exact"}
)
days[["parameters (B)", "days, printed", "exact", "days, eq. 4", "eq. 4 is off by (%)"]].round(1)

# %% [markdown]
# The printed days of table 2 are within one day of the exact count. The 84 days of the text are
# those of equation 4, which comes out low in every row, and by the exact count they are 85.
#
# ## A prediction has to beat a constant
# `pl.predict` gives the time of a step before you own the devices. What is that worth? PTD-P's
# table 1 has ten measured rates, of models from 1.7 to 1008 billion parameters on 32 to 3,072 GPUs.
# The figures of the preset `dgx-a100` were not fitted to them. (Two of these figures, the reachable
# memory bandwidth and the cost of a kernel launch, were chosen to fit other published iterations on
# A100s.) The prediction is compared with a *null model*, which answers every question with the mean
# of the ten rates. (So the constant has seen the ten answers, and the prediction has not.) How far
# off is this constant on average? It depends on how far the ten rates are apart:

# %%
table = papers.ptdp_table1()
rates = table["TFLOP/s per device, printed"]
print(f"ten rates: {rates.min():.0f} to {rates.max():.0f} TFLOP/s, the mean {rates.mean():.0f}")

# %%
constant = pl.exercises.guess("off on average: a constant", low=0, high=50, unit="%")
constant

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

# %%
constant.reveal(off["null model"].mean())

# %% [markdown]
# The ten rates are so close to each other that even a constant is only a few per cent off. An
# error of a few per cent is therefore no proof that a tool predicts well. On average over the ten
# rows the prediction is nearer than the constant, but its errors have a pattern: it is 5 to 7 %
# too fast for each of the five largest models, and within 2.3 % for the others. Four of these five
# plans are interleaved; on average over them, and for three of the four, the constant is nearer. If
# one prediction is 6 % too fast and
# another one is not, their comparison is off by as much. So compare plans for models of
# similar size, with pipelines of similar depth.
#
# ## Five measured rows may correct a cluster
# If you have measured a few iterations, `pl.fit_cluster` corrects at most six figures of a stated
# cluster. It also says how far off the corrected cluster is on runs that it was not fitted to. The
# `rows` of the next cell are five iterations of a model of 3.6 billion parameters on 64 A100s,
# published by [vTrain](https://github.com/VIA-Research/vTrain) (Bang et al. 2024, MIT licence):
# samples per micro-batch, tp, dp, pp, seconds. Two figures of the preset were chosen on vTrain's
# rows. They are set back here to what one would state without having measured: 80 % of the memory's
# bandwidth, and 10 µs for a kernel launch.

# %%
vtrain = pl.ModelSpec(layers=30, hidden=3072, heads=32, seq_len=2048, vocab=51200, dropout=0.1)
vtrain = vtrain.replace(attention="explicit")
how = {"recompute": "full", "precision": "fp16", "grad_sync": "bucketed", "bucket_bytes": 2**40}
before = {"memory_bandwidth": 0.8 * 2039e9, "operand_bandwidth": 0.8 * 2039e9}
stated = pl.Cluster.preset("dgx-a100", nodes=8).replace(
    ports=4,  # 800 Gbit/s between nodes
    launch_overhead=10e-6,
    **before,
)


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

# %% [markdown]
# Five other iterations of the same model were not used for the fit. In how many of them is the
# fitted cluster nearer to the measurement than the stated one?

# %%
nearer = pl.exercises.guess("rows of five where the fit is nearer", low=0, high=5, decimals=0)
nearer

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
held_out = pd.DataFrame(found).T
held_out.round(2)

# %%
both = held_out[["stated (s)", "fitted (s)"]]
errors = 100 * (both.div(held_out["measured (s)"], axis=0) - 1).abs()
print("off on average (%):", errors.mean().round(1).to_dict())
nearer.reveal(int((errors["fitted (s)"] < errors["stated (s)"]).sum()))

# %% [markdown]
# The mean error is halved on rows that the fit has not seen. In one row, the one with tp = 8, the
# fit is farther off than the stated cluster, whose step is a little too short there. The other rows
# have pulled the rate of products down. Five rows say little about six figures, and a fit can be
# worse out of sample than the cluster that it began with. So `fit_cluster` prints an error *out of
# sample*, and the error of the null model (one rate for everything) below it.
#
# ### Go further: a fit of your own, with its error out of sample

# %%
further = pl.exercises.own_fit
further


# %%
### ANSWER: own_fit


pl.exercises.own_fit.check(own_fit)

# %% [markdown] tags=["solution-only"]
# **Why it works.** The mean of logarithms makes the squared logarithmic errors smallest: a
# prediction that is twice too long counts as much as one that is twice too short. The mean of the
# rates lets fast rows decide, and all FLOPs over all device seconds the long steps. Leaving a row
# out before it is predicted shows what the rate is worth for a run that has not been measured yet.
#
# **Common mistakes.** The arithmetic mean of the rates; an error in sample that is called out of
# sample; signed errors, which cancel each other; a rate of all devices together. A second answer
# needs no second fit, because the mean without one row follows from the mean of all:

# %% tags=["solution-only"]
### ANSWER: own_fit_other


pl.exercises.own_fit.check(own_fit)

# %% [markdown]
# ## Where the other half of a step goes
# In the first picture of this lab 49 seconds of a step are *everything else*. The prediction of the
# same step, with dropout as above, can be taken apart, term by term.

# %%
largest = pl.exercises.choose(
    "Which of these takes the largest part of the 49 seconds?",
    [
        "Messages between the devices",
        "The bubble of a pipeline of 64 stages",
        "Reading and writing the device's own memory, operands of products included",
        "Products, once their operands are there, at less than the data sheet's rate",
    ],
)
largest

# %%
nodes = pl.Cluster.preset("dgx-a100", nodes=384)
trained = model.replace(dropout=0.1)
expect = pl.predict(trained, plan, nodes, steps=1, detail="actions")
work = expect.spans[expect.spans["kind"].isin(["forward", "backward"])]
computing = work.groupby("rank")["cost"].sum()  # seconds, one rank of each stage
edges = {
    "products at the peak": C_hw / n / PEAK,
    "products below the peak": C_hw / n / nodes.rate(plan.precision),
    "traffic to memory: norms, GELU, softmax, operands of products": computing.mean(),
    "the slowest stage": computing.max(),
    "bubble": computing.max() * (1 + (plan.pp - 1) / plan.microbatches),
    "links, optimizer": expect.step_time,
}
steps = pd.Series(edges).diff().fillna(edges["products at the peak"])
print(steps.round(1).to_string())
unexplained = T - expect.step_time
print(f"not explained: {unexplained:.1f} s, {unexplained / (T - ideal):.0%} of the measured loss")
view.seconds_bars(
    {"predicted": steps.to_dict(), "measured": {"measured": T}},
    title="Of the losses, traffic to memory is predicted to be the largest",
)

# %%
largest.reveal(
    3, "Norms, GELU, softmax and reading operands are limited by the memory's bandwidth."
)

# %% [markdown]
# The largest loss is inside the devices. It is the time for reading and writing memory, most of it
# for the operands of products. The greater part would be there without parallelism, too. Tensor
# parallelism without sequence parallelism adds the rest: each of the eight ranks computes norms and
# dropout of all tokens, and products that are cut into narrow parts read more per FLOP. The second
# largest loss is the bubble, here relative to the ideal time, $(p-1)/m$. Next are the products,
# which stay below the peak even where they are large, then the links and the optimizer. The
# smallest part is the wait for the last stage, which computes the head in addition to its blocks.
# The measured step is five seconds longer than the prediction, because the prediction does not know
# everything that devices spend time on.
#
# ## What would your model cost?
# The cell after the next one prices a training of 6.6 billion parameters on $2 \cdot 10^{12}$
# tokens, with full recomputation, on 256 devices that reach 150 TFLOP/s each and cost two dollars
# per hour. The model has $h = s = 4096$. Estimate the money first.

# %%
price = pl.exercises.guess("thousand dollars", low=0, high=2000, decimals=0)
price

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

# %%
price.reveal(cost.device_hours * dollars / 1e3)

# %% [markdown]
# If you used $8\,D\,\Psi$, your estimate is 13 % too low: with $s = h$ the products of attention
# add a sixth to those of the linear layers. (A parameter takes 18 bytes and not 16, because the
# gradients are summed in 32 bits here. A checkpoint has 14 of them: 2 for the weight in 16 bits,
# and 4 each for the master weight and AdamW's two moments. Gradients are not saved. Electricity is
# 600 W per device, with its share of the rest of the machine.) Now put numbers of your own into the
# cell.
#
# The rate of 150 TFLOP/s was an assumption. A search over the plans of lab 10 predicts it, with
# communication that overlaps as far as it can and without any overlap:

# %%
here = pl.Cluster.preset("dgx-a100", nodes=-(-devices // 8))  # whole nodes of eight devices
search = pl.plan_search(mine, here, global_batch=1024, precision="bf16", offload=None, top=3)
best, steps = search.table.head(3).copy(), tokens / (1024 * mine.seq_len)
best["TFLOP/s each"] = needs.step_flops(mine, 1024) / here.num_devices / best["simulated_s"] / 1e12
best["days"] = best["simulated_s"] * steps / 86_400
best["days, no overlap"] = best["serial_s"] * steps / 86_400
shown = ["dp", "tp", "pp", "zero_stage", "sequence_parallel", "recompute"]
best[[*shown, "TFLOP/s each", "days", "days, no overlap"]].round(1)

# %% [markdown]
# The rate is near the assumption, and still there are fewer days than above, because the best
# plans recompute nothing. Without overlap the order of the plans changes. [Lab
# 12](12_trillion.ipynb) compares both predictions of ZeRO's third stage with a measurement.
#
# ## What to remember
# 1. $C_\text{model} = 72\,d m b\, s L h^2 (1 + \frac{s}{6h} + \frac{V}{12Lh})$; with the blocks
#    recomputed 96 and $\frac{V}{16Lh}$.
# 2. MFU divides what the model needs by what the devices could do; HFU counts recomputation too.
# 3. days $= \frac{8 D \Psi}{n X}/86{,}400$, low by less than $s/(6h)$: by 1 to 3 % for models of
#    175 billion parameters and more, and by 13 % where $s = h$.
# 4. Of what PTD-P's step of a trillion parameters loses, the prediction puts 47 % inside the
#    devices and 42 % into bubble, links, optimizer and the slowest stage; 11 % are not explained.
# 5. Judge a prediction by how much better than a constant it is, on rows it was not fitted to.
#
# | when | use |
# |---|---|
# | compare plans or machines | MFU |
# | how busy the devices are, recomputation included | HFU |
# | a first guess of days | $6 D \Psi$ or, recomputed, $8 D \Psi$ over $n X$ |
# | long sequences ($s$ about $h$ or more) | the exact count |
# | you have a log of your own | `pl.fit_cluster` |
#
# ## In PyTorch, DeepSpeed, Megatron
# PyTorch counts FLOPs with `torch.utils.flop_counter.FlopCounterMode`, as above: it counts the
# products that are made, so with checkpointing that is HFU's numerator. For a fused kernel of
# attention it has a rule of its own (five products in backward, all pairs of tokens) or, as on a
# CPU, none: then attention is missing.
# [Megatron-LM](https://github.com/NVIDIA/Megatron-LM) prints TFLOP/s per GPU with
# `--log-throughput` and counts the model's FLOPs, today with half of attention's products, because
# causal attention needs only half of the pairs; so does MaxText;
# [torchtitan](https://github.com/pytorch/torchtitan) logs `mfu` from $6\Psi$, without the
# embedding, plus the scores; DeepSpeed has a profiler in its
# [JSON](https://www.deepspeed.ai/docs/config-json/), `"flops_profiler": {"enabled": true,
# "profile_step": 5}`. Before you compare two such numbers, ask which of the formulas each one is.
#
# **On your GPUs.** A report of `pl.run` on GPUs has MFU and HFU in its `summary()` if the cluster
# states `peak_flops`; its rows go into `pl.fit_cluster` as they are. On one H100, of 989 TFLOP/s in
# 16 bits at best, plain PyTorch kernels in bf16 gave an MFU of 40 % with 1.2 billion parameters, 36
# % with 300 million, and 25 % with GPT-2's 124 million. With GPT-2's own vocabulary of 50,257 it
# was 17 %: tensor cores want rows of whole multiples of 16 bytes, and products with an odd number
# of columns ran at about a sixth of their rate. So Megatron-LM pads the vocabulary (its
# `--make-vocab-size-divisible-by`), here to 50,304.
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
