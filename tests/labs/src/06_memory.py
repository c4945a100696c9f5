# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 06 · Where the memory goes
#
# *«[Estimate: 0.49 GB. Observed: 14 to 21.](https://github.com/deepspeedai/DeepSpeed/issues/4527)»*
# *«[Memory does not fall with more GPUs.](https://github.com/pytorch/pytorch/issues/104589)»*
# *«[ZeRO-3 has no effect.](https://github.com/huggingface/trl/issues/2784)»* Many public threads
# ask the same question. The answer is always in one picture, and few tools draw it: what is in
# memory, **what for**, and **when**.

# %%
import numpy as np
import pandas as pd

import paralab as pl
from paralab import view
from paralab.instruments import heap
from paralab.theory import zero

model = pl.ModelSpec(layers=6, hidden=128, heads=4, seq_len=128, attention="explicit")
psi = model.num_params
print(f"{psi:,} parameters: 16 bytes for each are {16 * psi / 1e6:.1f} MB")

# %% [markdown]
# ## Commit to a guess
# One device, fp32, AdamW: 4 bytes per parameter for weights, 4 for gradients, 8 for two moments.
# Eight samples of 128 tokens per step. How much is in memory at the worst moment?

# %%
guess = pl.exercises.guess(
    "peak memory of one training step", low=0, high=200, unit="MB", decimals=0
)
guess

# %% [markdown]
# ## Run it

# %%
report = pl.run(model, pl.Plan(microbatch_size=8), steps=4)
report

# %% [markdown]
# ## See it
# [Where does the memory go?](https://github.com/pytorch/pytorch/issues/114934) One step, every byte
# of it. The ledger notes each tensor when it comes and when it goes.

# %% tags=["measured"]
report.memory_chart()

# %%
guess.reveal(round(report.peak_memory / 1e6))

# %% [markdown]
# Weights and moments are the flat bottom. The mountain is **activations**: what forward leaves
# behind for backward. It rises through forward, layer by layer, and falls through backward.
# Gradients grow while it falls: the two are never both at their most.

# %%
(report.peaks() / 1e6).round(2).add_suffix(" (MB)")

# %% [markdown]
# The first column is read off the **program**, the list of instructions that the run executes (lab
# 05): each of its values has a size, a first and a last moment. *Workspace* is what one operation
# needs for that operation only. The totals are equal to the byte. Where a step has two moments that
# are equally full, the columns may show one each: between these two, workspace has become
# activations. The ledger itself is checked against the allocator.
#
# ## What it grows with
# Model states know nothing of your batch. Activations grow with all three:

# %%
rows = []
for change, size in (
    ({}, 8),
    ({}, 16),
    ({"seq_len": 256}, 8),
    ({"seq_len": 64}, 8),
    ({"hidden": 256}, 8),
):
    spec, plan = model.replace(**change), pl.Plan(microbatch_size=size)
    run = pl.run(spec, plan, steps=1, progress=False)
    most = run.memory.groupby("category")["bytes"].max()  # of each category, at any moment
    rows.append(
        {
            "batch": size,
            "tokens": spec.seq_len,
            "hidden": spec.hidden,
            "states (MB)": round(most[["parameters", "gradients", "optimizer"]].sum() / 1e6, 1),
            "activations (MB)": round(most["activations"] / 1e6, 1),
            "program (MB)": round(pl.program(spec, plan).most()["activations"] / 1e6, 1),
        }
    )
pd.DataFrame(rows)

# %% [markdown]
# Twice the batch, twice the activations. Twice the tokens, *more* than twice: the scores of
# attention are s x s. So with a long sequence or a large batch, whatever shards model states shards
# the smaller part.
#
# ## Forget, and compute again
# An activation can be recomputed. **Full** recomputation keeps only each block's input and runs its
# forward a second time; **selective** recomputation forgets just the attention's scores, which are
# large and cheap ([Korthikanti and others](https://arxiv.org/abs/2205.05198)):

# %% tags=["measured"]
kinds = {
    kind: pl.run(model, pl.Plan(microbatch_size=8, recompute=kind), steps=6, progress=False)
    for kind in ("none", "selective", "full")
}
view.memory_charts(kinds)

# %% tags=["measured"]
rows = {}
for kind, run in kinds.items():
    peak = run.peaks().iloc[:, -1]
    cost = run.spans.query("step > 0 and kind == 'backward'").groupby("step")["cost"].sum().median()
    rows[kind] = {
        "peak (MB)": round(peak["total"] / 1e6, 1),
        "activations (MB)": round(peak["activations"] / 1e6, 1),
        "backward (ms)": round(1e3 * cost),
    }
pd.DataFrame(rows).T

# %%
proof = {"optimizer": "sgd", "lr": 0.1, "steps": 2, "keep_state": True, "progress": False}
noisy = model.replace(dropout=0.1, layers=2)
kept = pl.run(noisy, pl.Plan(microbatch_size=2), **proof)
for kind in ("selective", "full"):
    again = pl.run(noisy, pl.Plan(microbatch_size=2, recompute=kind), **proof)
    same = all(np.array_equal(kept.gradients[n], again.gradients[n]) for n in kept.gradients)
    print(f"{kind:<9} gradients equal bit for bit, dropout included: {same}")

# %% [markdown]
# ## «My memory does not fall with more devices»
# There are four reasons, and [one maintainer's
# checklist](https://github.com/facebookresearch/fairscale/issues/1050) has most of them. Here is
# each, for real.
#
# **1. It is not the states.** ZeRO [shares out model states, not
# activations](https://github.com/deepspeedai/DeepSpeed/issues/2302); each device still has its own
# samples. ([One thread](https://github.com/pytorch/torchtitan/issues/1126),
# [another](https://github.com/pytorch/examples/issues/1319), and [one with large medical
# images](https://github.com/Lightning-AI/pytorch-lightning/issues/15976).)


# %% tags=["measured"]
def peaks(spec, plans):
    """Peak of the worst rank by category, MB, one column per plan; each is really run."""
    columns = {}
    for name, plan in plans.items():
        run = pl.run(spec, plan, steps=1, progress=False)
        columns[name] = (run.peaks().iloc[:, -1] / 1e6).round(2)
    return pd.DataFrame(columns)


zero3 = pl.Plan(dp=2, zero_stage=3, microbatch_size=8, bucket_bytes=2**20)
peaks(model, {"2 devices": zero3, "4 devices": zero3.replace(dp=4)})

# %% [markdown]
# What helps: fewer samples at a time (more micro-batches), or recomputation. Same global batch:

# %% tags=["measured"]
peaks(
    model,
    {
        "4 devices": zero3.replace(dp=4),
        "2 samples at a time": zero3.replace(dp=4, microbatch_size=2, microbatches=4),
        "... and recompute": zero3.replace(
            dp=4, microbatch_size=2, microbatches=4, recompute="full"
        ),
    },
)

# %% [markdown]
# **2. The model is too small.** Sharding has costs of its own: padding, gradients in flight,
# gathered parameters. For [230 thousand
# parameters](https://github.com/Lightning-AI/pytorch-lightning/issues/6047) they eat what sharding
# saves, and [plain data parallelism](https://github.com/pytorch/pytorch/issues/108976) is about as
# good:

# %% tags=["measured"]
tiny = pl.ModelSpec(layers=1, hidden=128, heads=4, seq_len=16)
print(f"{tiny.num_params:,} parameters")
stages = {"data parallelism": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}
peaks(tiny, {name: pl.Plan(dp=2, zero_stage=n, microbatch_size=1) for name, n in stages.items()})

# %% [markdown]
# Here one bucket holds all gradients, so stages 1 and 2 need a buffer of the model's size. With
# buckets of 256 kB they save something. Stage 3 works with whole blocks, whatever the bucket, and
# this model has only one: so [stage 3 needs more than stage
# 2](https://github.com/deepspeedai/DeepSpeed/issues/4305):

# %% tags=["measured"]
peaks(
    tiny,
    {
        name: pl.Plan(dp=2, zero_stage=n, microbatch_size=1, bucket_bytes=256 * 1024)
        for name, n in stages.items()
    },
)

# %% [markdown]
# **3. Everything is gathered at once.** Stage 3 saves only if a *part* is there at a time. Wrap the
# whole model as [one unit](https://github.com/facebookresearch/fairscale/issues/1050) (the
# checklist's last), or gather too far ahead (`prefetch`, in blocks), and at the worst moment all of
# it is there. (The ledger counts gathered parameters as buffers, and only the shard that a rank
# keeps as parameters.)

# %% tags=["measured"]
narrow = pl.ModelSpec(layers=12, hidden=128, heads=4, seq_len=16)
ahead = pl.Plan(dp=4, zero_stage=3, microbatch_size=1)
peaks(narrow, {f"prefetch={n}": ahead.replace(prefetch=n) for n in (0, 1, 12)})

# %% [markdown]
# **4. The wrong number grew.** States are shared by the ranks that *share*: [the data-parallel
# degree, not the number of devices](https://github.com/deepspeedai/DeepSpeed/issues/237). With
# copies per node, or with the ranks spent on another axis, more devices share nothing more:

# %% tags=["measured"]
inside = pl.Plan(dp=2, shard=2, zero_stage=3, microbatch_size=1)
peaks(
    narrow,
    {
        "2 devices, 2 share": inside,
        "4 devices, 2 share": inside.replace(dp=4),
        "4 devices, 4 share": inside.replace(dp=4, shard=4),
    },
)

# %% [markdown]
# (And a fifth that is none: what the driver shows is what the allocator has
# [*reserved*](https://github.com/pytorch/pytorch/issues/82001), and what libraries take besides. An
# allocator keeps what it once had. [Which number
# matters](https://github.com/pytorch/torchtitan/issues/735)? What is allocated, and how it lies,
# for whether your step fits; what is reserved, for whether something else fits beside it. The
# ledger counts allocated.)
#
# ## What estimators leave out
# [Estimators](https://github.com/deepspeedai/DeepSpeed/issues/965) print model states, and people
# [take that for the answer](https://github.com/deepspeedai/DeepSpeed/issues/4093),
# [more](https://github.com/deepspeedai/DeepSpeed/issues/5102) than
# [once](https://github.com/deepspeedai/DeepSpeed/issues/2797). Beside a run:

# %% tags=["measured"]
stage3 = pl.run(model, zero3.replace(dp=4), steps=1, progress=False)
largest = max(4 * model.hidden**2 + 4 * model.hidden, model.vocab * model.hidden)  # one module
estimate, _ = zero.deepspeed_zero3(psi, largest, devices=4, per_node=4)
measured = stage3.peaks().iloc[:, -1]
pd.Series(
    {
        "estimator: 18 bytes/N and the largest module": estimate,
        "model states": measured[["parameters", "gradients", "optimizer"]].sum(),
        "gathered blocks and other buffers": measured["buffers"],
        "activations": measured["activations"],
        "workspace": measured["workspace"],
        "measured peak": measured["total"],
    },
    name="MB",
).div(1e6).round(2).to_frame()

# %% [markdown]
# The estimator is near the sum of the next two lines, though it counts another recipe: 18 bytes per
# parameter for mixed precision, where this run in fp32 keeps 16, and all gradients, of which few
# are there at this peak. And these are not what fills the device: activations are.
#
# ## Buffers of constant size
# A fused buffer is fast, and a buffer for *all* gradients grows with the model. ZeRO therefore caps
# it (the paper's C<sub>B</sub>, sec. 6.2; here `bucket_bytes`). Capped ones add up as well, if
# every unit keeps its own: somebody found [11 GB after backward and had expected
# 5](https://github.com/facebookresearch/fairscale/issues/627). Here no unit keeps one:

# %% tags=["measured"]
rows = []
for layers in (2, 4, 8):
    row = {"blocks": layers}
    for name, size in (("one buffer for all (MB)", 2**30), ("1 MiB at a time (MB)", 2**20)):
        plan = pl.Plan(dp=2, zero_stage=2, microbatch_size=1, bucket_bytes=size)
        run = pl.run(narrow.replace(layers=layers), plan, steps=1, progress=False)
        most = run.memory.query("category == 'buffers'")["bytes"].max()
        row[name] = round(most / 1e6, 2)
    rows.append(row)
pd.DataFrame(rows).set_index("blocks")

# %% [markdown]
# ## Enough free, and no room
# An allocator deals addresses, and cannot move what it has dealt. The tensors of the very step
# above, laid into an address space one after the other, each where it first fits:

# %%
step = heap.storages(model, pl.Plan(microbatch_size=8))
spaces = {
    "as they come": heap.first_fit(step),
    "activations and gradients apart": heap.first_fit(
        step, apart=[("activations",), ("gradients",)]
    ),
}
pd.DataFrame(spaces, index=["alive", "address space", "free", "largest hole"]).div(1e6).round(2).T

# %% [markdown]
# In the first row, at the worst moment, many megabytes are free, and a request for a fraction of
# them fails: they lie between tensors that stay. This is **fragmentation**. ZeRO-R (M<sub>D</sub>,
# sec. 6.3) gives long-lived tensors regions of their own. Then far less lies idle, and the largest
# hole is a larger part of it; the price is address space. (`alive` is the most at any moment;
# `free` and `largest hole` are of the moment when free space is of least use.)
#
# ## Break it
# Give the rank less memory than the step needs. It fails at the very tensor that is one too many,
# and says what filled the device and what would help:

# %%
try:
    pl.run(model, pl.Plan(microbatch_size=8), steps=2, memory_limit="60MB", progress=False)
except pl.OutOfMemory as error:
    print(error.table)

# %% [markdown]
# ## Your turn
# Four plans, four causes. Find the one setting for each.

# %%
clinic = pl.exercises.memory_clinic
clinic

# %%
clinic.patients["twice the devices"].chart()

# %%
### ANSWER: memory_clinic


clinic.check(treatment)

# %% [markdown]
# Stuck? `clinic.hint()` gives one push at a time, `clinic.solution()` shows an answer.

# %% [markdown]
# ## On your GPUs
# The same cells: the ledger counts tensors on the device, and `memory_limit` caps the allocator
# too. What the allocator says stands in the report, a row for every rank and step: compare
# `report.peak_memory` with `report.allocator["allocated"].max()`, and that with `["reserved"]`.
# (`torch.cuda.max_memory_allocated()` in a cell asks this process, and ranks are others.)
#
# ## Read on
# * Korthikanti and others 2022, [Reducing activation
#   recomputation](https://arxiv.org/abs/2205.05198), sec. 4 and 5. Rajbhandari and others 2020,
#   [ZeRO](https://arxiv.org/abs/1910.02054), sec. 6: ZeRO-R.
# * In the package: `paralab/instruments/ledger.py` counts, `paralab/interpret/memory.py` reads the
#   same off a program, `paralab/parallel/recompute.py` makes one that forgets and computes again.
