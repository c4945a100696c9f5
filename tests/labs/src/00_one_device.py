# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 00 · Why one device is not enough
#
# *«My model has 7.5 billion parameters. At two bytes each that is 15 GB, and my GPU has 80 GB. Why
# does training run out of memory?»*
#
# Ten minutes from now you can answer that to the byte: you train a small GPT for real, see what one
# step does, find out what every byte is for by watching tensors come and go, and scale the answer
# up to a trillion parameters. Run the cells from top to bottom (Shift+Enter).

# %%
import paralab as pl

model = pl.ModelSpec(layers=4, hidden=256, heads=4, seq_len=128, attention="explicit")
print(f"{model.num_params:,} parameters; as fp32 weights {4 * model.num_params / 1e6:.1f} MB")

# %% [markdown]
# ## Commit to a guess
# A weight in fp32 takes 4 bytes. While it is being *trained* with AdamW, how many bytes does the
# device hold for each parameter, activations left out? Move the slider and press *Commit*: people
# remember what surprised them.

# %%
guess = pl.exercises.guess(
    "bytes per parameter while training (fp32, AdamW)", low=4, high=40, unit="bytes", decimals=0
)
guess

# %% [markdown]
# ## Run it
# One real process, a **rank** (here the only one; on a cluster there is one for each device), real
# text (the source code of Python's standard library), six steps.

# %%
report = pl.run(model, pl.Plan(microbatch_size=8), steps=6)
report

# %% tags=["measured"]
report.timeline()

# %% [markdown]
# Every training step has these three acts. **Forward** computes the loss and saves what
# backward will need. **Backward** uses that up and leaves a gradient for every parameter. The
# **optimizer** turns gradients into new weights.
#
# (The number in a box is its micro-batch.) By arithmetic backward takes twice as long: for every
# matrix product of forward it makes two, one for the gradient of the input and one for the gradient
# of the weight. The clock need not agree, for products are not all that a step does:

# %% tags=["measured"]
from paralab.theory import needs

flops = needs.step_flops(model, samples=8)
work = report.summary().loc["forward and backward", "value"] / 1e3
spans = report.spans[report.spans.step > 0]
seconds = (spans.end - spans.start).groupby(spans.kind).sum()
print(f"a step is {flops / 1e9:.1f} GFLOP, and this core makes {flops / work / 1e9:.0f} GFLOP/s")
print(f"backward took {seconds['backward'] / seconds['forward']:.1f} times as long as forward")

# %% [markdown]
# ## What is every byte for?
# A ledger notes every tensor of a rank when it comes and when it goes, and what it is for. Here is,
# for each category, the most that was alive at any moment of a step. Next to it is what the
# **program** says: the list of instructions that the plan is compiled to, which names every tensor
# before anything runs. `most()` reads the same maximum off this list.

# %%
import pandas as pd

program = pl.program(model, pl.Plan(microbatch_size=8))
parts = (
    pd.DataFrame(
        {
            "measured (B)": report.memory.groupby("category")["bytes"].max(),
            "program (B)": program.most(),
        }
    )
    .fillna(0)
    .astype(int)
)
parts["measured, bytes per parameter"] = (parts["measured (B)"] / model.num_params).round(1)
parts

# %%
states = parts.loc[["parameters", "gradients", "optimizer"], "measured (B)"]
guess.reveal(round(states.sum() / model.num_params))

# %% [markdown]
# Sixteen, four times what the weights alone take: the weight (4), its gradient (4), and AdamW's two
# moments, running means of the gradient and of its square (4 + 4). These are the **model states**.
# They depend on the number of parameters Ψ and on the recipe, and on nothing else.
#
# The **activations**, what forward saves for backward, are another matter. (**Workspace** is what
# an operation needs for a moment. The **buffers** are a constant here: for each token, which others
# come after it. **Other** is a few bytes, such as the loss.)

# %%
from paralab import view

view.bytes_bars(
    {
        "measured": parts["measured (B)"].to_dict(),
        "program": parts["program (B)"].to_dict(),
    },
    title="What a step makes: activations outweigh the model",
)

# %% [markdown]
# They are not all there at once: backward uses activations up while gradients appear. So the peak
# is less than this bar; lab 06 watches it.
#
# ## Turn the knobs
# What happens to either when something doubles? States follow the number of parameters, activations
# follow the tokens that are in flight.


# %%
def doubled(batch=8, **changes):
    program = pl.program(model.replace(**changes), pl.Plan(microbatch_size=batch))
    return {
        "model states": sum(program.states().values()),
        "activations": program.most()["activations"],
    }


as_it_is = doubled()
rows = {
    "twice the batch": doubled(batch=16),
    "twice the sequence": doubled(seq_len=256),
    "twice the layers": doubled(layers=8),
    "twice the width": doubled(hidden=512),
}
pd.DataFrame(rows).T.div(pd.Series(as_it_is)).round(2).add_suffix(", times as many bytes")

# %% [markdown]
# The batch costs activations and no states, the width costs four times the states. And a sequence
# twice as long takes more than twice the activations: the scores of attention are a table of every
# token against every other.
#
# Try it: the bars move while you drag, and *Run it* trains the model you have set up.

# %%
knobs = view.widgets.memory(model)
knobs.set(recipe="fp32")
knobs

# %% [markdown]
# The same without a mouse:

# %%
knobs.predict(hidden=512, microbatch_size=8)

# %% [markdown]
# ## Now the real ones
# Large models are trained with 16-bit weights and gradients. That halves the first two terms, and
# adds one: a 32-bit *master copy* of the weights, because small updates vanish in 16 bits. So it is
# 2 + 2 + 4 + 4 + 4: sixteen again. (ZeRO, sec. 3.1; other recipes keep 18 or 20.)

# %%
GB = 10**9  # decimal, as device makers count
large = ["gpt2", "ptdp-7.5b", "gpt3-175b", "ptdp-1t"]
table = []
for name in large:
    spec = pl.ModelSpec.preset(name)
    need = sum(needs.model_states(spec, "zero-fp16").values())
    days = needs.training_days(spec, tokens=300e9, devices=1, flops=150e12)
    table.append(
        {
            "model": name,
            "parameters (billions)": round(spec.num_params / 1e9, 1),
            "16-bit weights (GB)": round(2 * spec.num_params / GB, 1),
            "model states (GB)": round(need / GB, 1),
            "80 GB devices for them": needs.devices_for(need, 80 * GB),
            "years on one device": round(days / 365, 1),
        }
    )
pd.DataFrame(table).set_index("model")

# %% [markdown]
# Two walls, then. The first is **memory**: the 7.5 billion parameters of the question are 15 GB of
# weights, but the states alone fill more than one device, before the first activation.

# %%
spec = pl.ModelSpec.preset("ptdp-7.5b")
view.bytes_bars(
    {
        "what people count": {"parameters": 2 * spec.num_params},
        "model states": needs.model_states(spec, "zero-fp16"),
    },
    capacity={"one device": 80 * GB},
    title="7.5 billion parameters: the weights fit, training them does not",
)

# %% [markdown]
# The second is **time**: the last column trains on 300 billion tokens at 150 TFLOP/s, half of what
# an A100 can do at its peak, every forward done twice (lab 06 says why). Even if a trillion
# parameters fitted, nobody would wait for them. So the work has to be split, and there are only so
# many ways: by samples (data parallelism, lab 02), by layers (03), inside a layer (07), by who
# keeps which state (05), and by moving state to slower memory (09).
#
# ## Break it
# Gradient accumulation is how a large batch is trained on a device that holds a small one: several
# micro-batches, one after the other, and their gradients add up. Both functions below do that, and
# their gradients agree (the cell compares one tensor's). But one of the functions saves next to no
# memory. (`pl.reference` has the GPT and its batches in plain PyTorch; `pl.trace` runs a function
# on real processes and can watch their memory.)


# %%
def one_backward_at_the_end(group, spec, microbatches):
    device = group.context.device
    gpt = pl.reference.GPT(spec).to(device)
    [batch] = pl.reference.batches(spec, step=0, microbatch_size=8, device=device)
    loss = sum(gpt(*batch) for _ in range(microbatches))
    loss.backward()
    return gpt.head.norm.weight.grad


def backward_each_time(group, spec, microbatches):
    device = group.context.device
    gpt = pl.reference.GPT(spec).to(device)
    [batch] = pl.reference.batches(spec, step=0, microbatch_size=8, device=device)
    for _ in range(microbatches):
        gpt(*batch).backward()
    return gpt.head.norm.weight.grad


import numpy as np

peaks, gradients = {}, []
for function in (one_backward_at_the_end, backward_each_time):
    for microbatches in (1, 4):
        traced = pl.trace(function, ranks=1, args=(model, microbatches), memory=True)
        peaks[function.__name__, microbatches] = traced.meta["peak_bytes"][0]
    gradients.append(traced.results[0])

for (name, microbatches), peak in peaks.items():
    print(f"{name:<24} {microbatches} micro-batches: peak {peak / 1e6:6.1f} MB")
print("same gradients:", np.allclose(*gradients, rtol=1e-4, atol=1e-5))

# %% [markdown]
# A loss that is not yet differentiated holds all the activations under it. Adding up *losses* keeps
# four micro-batches alive at once; adding up *gradients* keeps one. No error, no wrong number: only
# the memory tells.
#
# ## Your turn
# How many devices does it take to hold a model's states? Write it as a function, for any recipe of
# bytes per parameter. The checker asks about models and recipes of its own.

# %%
exercise = pl.exercises.model_states
exercise

# %%
### ANSWER: model_states


exercise.check(model_states, devices_needed)

# %% [markdown]
# Stuck? `exercise.hint()` gives one push at a time, `exercise.solution()` shows an answer.

# %% [markdown] tags=["solution-only"]
# ## Another answer
# The states are a property of the recipe, the parameters one of the model, so one multiplication
# is enough. `-(-a // b)` rounds up without leaving whole numbers, which matters once bytes have
# more digits than a float.


# %% tags=["solution-only"]
def states_by_sum(model, recipe):
    psi = model.num_params
    return dict(zip(recipe, (psi * width for width in recipe.values()), strict=True))


def devices_by_whole_numbers(model, recipe, memory_gb):
    need = model.num_params * sum(recipe.values())
    return -(-need // (memory_gb * 10**9))


exercise.check(states_by_sum, devices_by_whole_numbers)

# %% [markdown]
# ## On your GPUs
# The same cells run there as they are: `pl.run` takes the GPU where there is one, and the timeline
# is device time. The ledger counts there too, and states are the same to the byte.
#
# ## Read on
# * Rajbhandari and others 2020, [ZeRO](https://arxiv.org/abs/1910.02054), sec. 3.1 (what the
#   states are) and 3.2 (the rest); figure 1 has the 120 GB.
# * Narayanan and others 2021, [PTD-P](https://arxiv.org/abs/2104.04473), sec. 5.1: how long
#   training takes.
# * Korthikanti and others 2022,
#   [Reducing activation recomputation](https://arxiv.org/abs/2205.05198), eq. 1: the activations of
#   one block.
# * In the package: `paralab/theory/needs.py` has the recipes, `paralab/instruments/ledger.py`
#   counts what is alive, `paralab/interpret/memory.py` reads it off the program. Next:
#   [lab 01](01_collectives.ipynb).
