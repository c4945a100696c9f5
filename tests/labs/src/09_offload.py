# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 09 · Offload: memory that is not on the device
#
# *«I have one GPU, and the model does not fit. The machine around it has ten times the memory, and
# a disk. Can they not help?»*
#
# They can. AdamW in mixed precision keeps 16 bytes for every parameter, and the device computes
# with two of them. The other fourteen wait for one moment per step, the update, which is no work to
# speak of: any processor can do it. So let the **host** do it, where memory is cheap. By hand:

# %%
import os
import shutil
import tempfile
from bisect import bisect_right
from pathlib import Path

import numpy as np
import pandas as pd

import paralab as pl
from paralab import view
from paralab.theory import offload, offload_costs

model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)


def by_hand(group, steps):
    import torch

    device = group.context.device
    gpt = pl.reference.GPT(model).to(device)
    host = [p.detach().cpu().clone() for p in gpt.parameters()]  # the host's own weights ...
    update = torch.optim.AdamW(host, lr=1e-3)  # ... and the moments
    losses, moved = [], 0
    for step in range(steps):
        [(tokens, targets)] = pl.reference.batches(model, step=step, device=device)
        loss = gpt(tokens, targets)
        loss.backward()
        for ours, theirs in zip(gpt.parameters(), host, strict=True):
            theirs.grad, ours.grad = ours.grad.to("cpu"), None  # gradients go down
            moved += theirs.grad.nbytes
        update.step()  # on the host
        with torch.no_grad():
            for ours, theirs in zip(gpt.parameters(), host, strict=True):
                ours.copy_(theirs)  # parameters come up
                moved += ours.nbytes
        losses.append(loss.item())
    return losses, moved / steps


losses, moved = pl.trace(by_hand, ranks=1, args=(8,)).results[0]
print("it learns:", losses[-1] < losses[0] - 0.5)
print(f"moved per step: {moved / model.num_params:g} bytes per parameter, in fp32")

# %% [markdown]
# Gradients down, parameters up: twice the width of a number. In 16 bits that is 4 bytes per
# parameter and step, while 12 bytes, the moments and the master weights, never move. This is
# **ZeRO-Offload**. **ZeRO-Infinity** goes on: parameters too come up only while they are needed,
# and behind the host's memory lie files.
#
# ## Commit to a guess
# One device, one small GPT. Gradients, optimizer states and parameters all move to the host. How
# much of the device's peak memory is left?

# %%
guess = pl.exercises.guess(
    "peak device memory with everything on the host, as a share of what it takes without",
    low=0,
    high=100,
    unit="%",
    decimals=0,
)
guess

# %% [markdown]
# ## Run it
# One real process, five times the same training. `offload="cpu"` moves what ZeRO's stage deals out
# (it does so with one rank as well): stage 1 the optimizer's states, stage 2 gradients too, stage 3
# parameters too. `offload="nvme"` writes the optimizer's states and the parameters to files, and
# leaves gradients on the host. On a laptop the device's memory and the host's are the same chips;
# what keeps them apart is the ledger, which counts the device's bytes and, with `memory_limit`,
# bounds them. The copies are real, and so are the files.

# %%
wide = pl.ModelSpec(layers=8, hidden=192, heads=4, seq_len=32, attention="explicit")
plan = pl.Plan(microbatches=2, microbatch_size=2, bucket_bytes=2**20)
plans = {
    "no offload": plan,
    "optimizer": plan.replace(zero_stage=1, offload="cpu"),
    "+ gradients": plan.replace(zero_stage=2, offload="cpu"),
    "+ parameters": plan.replace(zero_stage=3, offload="cpu"),
    "files": plan.replace(zero_stage=3, offload="nvme"),
}
reports = {name: pl.run(wide, how, steps=3, progress=False) for name, how in plans.items()}

# %% [markdown]
# ## See it
# One step, five times, on one scale.

# %% tags=["measured"]
view.memory_charts(reports)

# %% tags=["measured"]
share = reports["+ parameters"].peak_memory / reports["no offload"].peak_memory
guess.reveal(round(100 * share))

# %% [markdown]
# What is left is what computing itself needs: activations, the block at work and the next, its
# gradient on the way out. And where did the rest go? One rank, three tiers:

# %% tags=["measured"]
rows = {}
for name, report in reports.items():
    held = report.memory.groupby(["tier", "time"])["bytes"].sum().groupby("tier").max() / 1e6
    rows[name] = {tier: held.get(tier, 0.0) for tier in ("device", "host", "file")}
pd.DataFrame(rows).T.round(2).add_suffix(" (MB at most)")

# %% [markdown]
# ## What moves, and when
# The timeline of one step. Every link is a lane of its own: copies run beside the computing, until
# somebody needs what they bring.

# %% tags=["measured"]
reports["+ gradients"].timeline()

# %% [markdown]
# Gradients leave while backward is still at work; then the device stands still, while the host
# updates and the new parameters come up. With parameters and states in files:

# %% tags=["measured"]
reports["files"].timeline()

# %% [markdown]
# How many bytes, over which link (h2d: host to device; d2h: device to host; disk)? What the program
# says, beside the run, byte for byte:

# %%
rows = []
for name, report in reports.items():
    moved = report.copied(by="link").set_index("link")["bytes"]
    for link, parts in offload.link_bytes(wide, report.plan).items():
        if parts:
            size = sum(parts.values())
            rows.append(
                {
                    "": name,
                    "link": link,
                    "moved (B)": int(moved[link]),
                    "program (B)": size,
                    "bytes per parameter": round(size / wide.num_params, 2),
                }
            )
pd.DataFrame(rows).set_index(["", "link"])

# %% [markdown]
# Two micro-batches per step: from stage 2 on gradients go down for each of them (stage 1 keeps them
# until the step ends), and stage 3 fetches every parameter four times, before each forward and each
# backward. In files the update reads and writes too: weights and two moments.
#
# ## Why this cut, and no other
# Take the training step as a graph: values are nodes, whatever flows between them is an edge with
# so many bytes per parameter. Offload cuts the graph in two. Forward and backward must stay on the
# device, the update should leave it. How many such cuts are there, and how much crosses each?

# %%
cuts = offload_costs.cuts(update="cpu")
volumes = sorted(offload_costs.cut_volume(cut) for cut in cuts)
print("cuts:", len(cuts), "- least volumes (bytes per parameter):", sorted(set(volumes))[:3])
best = [cut for cut in cuts if offload_costs.cut_volume(cut) == volumes[0]]
for cut in best:
    here = [node for node, place in cut.items() if place == offload_costs.GPU]
    print(f"crosses {volumes[0]}, device keeps {offload_costs.gpu_memory(cut)} bytes: {here}")

# %% [markdown]
# Four bytes per parameter is the minimum, six the next best. Of the two cuts that reach it,
# ZeRO-Offload takes the one that leaves two bytes per parameter on the device: an eighth of 16.
# (Its Table 1 prints four for that row, and "8x"; two is meant. `theory/offload_costs.py` has what
# the papers print and where it does not add up.)
#
# Counted on a run in 16 bits, one micro-batch:

# %%
half = pl.run(wide, pl.Plan(zero_stage=2, offload="cpu", precision="bf16"), steps=2, progress=False)
print(f"{half.copied(by='link')['bytes'].sum() / wide.num_params:g} bytes per parameter")

# %% [markdown]
# ## What it costs
# Predicted, replayed, measured, for the plan with files, on this machine:

# %% tags=["measured"]
cluster = pl.Cluster.local()
pl.compare(pl.predict(wide, plans["files"], cluster), reports["files"])

# %% [markdown]
# ZeRO-Infinity (sec. 4) has a formula for this. A device that computes at `peak` FLOP/s, and does
# `ait` FLOPs for every byte that is moved, is busy
#
# $$\text{efficiency} = \frac{ait \cdot bw}{ait \cdot bw + peak}$$
#
# of the time, if nothing overlaps. With the paper's numbers, a V100's 70 TFLOP/s: which bandwidth
# do optimizer states need for 90 %?

# %%
ait = offload_costs.ait_optimizer(batch=2, seq_len=1024)
print(f"{ait:g} FLOPs per byte; {offload_costs.bandwidth_needed(0.9, ait, 70e12) / 1e12:.2f} TB/s")
share = offload_costs.efficiency_at(ait, 1.5e12, 70e12)
print(f"at the paper's 1.5 TB/s it is {100 * share:.1f} %")

# %% [markdown]
# (The paper says that 1.5 TB/s gives 90 %; its own formula says 1.23.) Now this machine: its own
# measured device and disk, and the bytes of the run above.


# %% tags=["measured"]
def busy(model, plan, cluster):
    """Share of a step that computes: by the formula, with perfect overlap, and predicted."""
    moved = offload.link_bytes(model, plan)
    disk = sum(sum(moved[link].values()) for link in ("disk read", "disk write"))
    flops = 3 * pl.theory.flops.forward_flops(model, plan.microbatches * plan.microbatch_size)
    asked = (flops, disk, cluster.flops, cluster.disk.bandwidth)
    free = pl.predict(model, plan.replace(zero_stage=0, offload=None), cluster)
    took = pl.predict(model, plan, cluster)
    return {
        "formula": offload_costs.efficiency(*asked),
        "perfect overlap": offload_costs.efficiency_overlapped(*asked),
        "predicted": free.step_time / took.step_time,
    }


table = {}
for samples in (2, 8, 32):
    table[samples] = busy(wide, plans["files"].replace(microbatch_size=samples), cluster)
(100 * pd.DataFrame(table).T.rename_axis("samples per micro-batch")).round(1).add_suffix(" (%)")

# %% [markdown]
# The same bytes for more work: the batch is what pays for a slow link. The prediction lies above
# the formula, for two reasons: this device does more than multiply, so its step takes longer than
# FLOPs over peak, and some of the copying hides behind it. With few samples the first reason can
# lift it even above perfect overlap; with many it stays below that, because the update has to wait,
# and nothing computes then.
#
# ## How fast an NVMe do I need?
# *Run it* trains for real, with the disk held down to the slider's bandwidth.

# %%
view.widgets.offload()

# %% [markdown]
# ## The largest model that fits
# A device of 64 MB. How deep a GPT does it train: without help, and with? Predicted first; then
# every answer is trained, and one block more is tried and fails.

# %% tags=["measured"]
deep = pl.ModelSpec(layers=8, hidden=256, heads=4, seq_len=64)
limit, one = 64 * 10**6, pl.Plan(microbatch_size=1, bucket_bytes=2**20)
ladder = {
    "without": one,
    "ZeRO-Offload": one.replace(zero_stage=2, offload="cpu"),
    "everything on the host": one.replace(zero_stage=3, offload="cpu"),
    "parameters and states in files": one.replace(zero_stage=3, offload="nvme"),
}


def needs(layers, how):
    return sum(pl.program(deep.replace(layers=layers), how).peak().values())


def trained(layers, how):
    try:
        return pl.run(deep.replace(layers=layers), how, steps=1, memory_limit=limit, progress=False)
    except pl.OutOfMemory:
        return None


rows = {}
for name, how in ladder.items():
    most = bisect_right(range(1, 80), limit, key=lambda layers, how=how: needs(layers, how))
    report = trained(most, how)
    held = report.memory.groupby(["tier", "time"])["bytes"].sum().groupby("tier").max() / 1e6
    rows[name] = {
        "blocks": most,
        "million parameters": round(deep.replace(layers=most).num_params / 1e6, 1),
        "one block more": "fits" if trained(most + 1, how) else "does not fit",
        **{f"{tier} (MB)": round(held.get(tier, 0.0), 1) for tier in ("device", "host", "file")},
    }
pd.DataFrame(rows).T

# %% [markdown]
# The device decides how deep: what stays on it grows with every block, parameters with
# ZeRO-Offload, activations alone with everything away. The host decides where: files take from it
# what it would have to hold. (`recompute="full"` and `offload={"activations": "cpu"}` take the
# activations too.)
#
# At the far end of the ladder one layer is on the device at a time, and *all* micro-batches pass
# through it before the next one comes: **L2L**, the layer relay. Parameters then come up as often
# with many micro-batches as with one. Bytes per parameter, counted on runs:

# %%
rows = {}
for m in (1, 2, 4):
    usual = pl.Plan(zero_stage=3, offload="cpu", recompute="full", microbatches=m)
    rows[m] = {}
    for name, how in (("in turn", usual), ("relay", usual.replace(schedule="l2l"))):
        run = pl.run(model, how, steps=2, progress=False)
        moved = run.copied(by="link").set_index("link")["bytes"] / model.num_params
        rows[m] |= {f"{name}, up": moved["h2d"], f"{name}, down": moved["d2h"]}
pd.DataFrame(rows).T.rename_axis("micro-batches").round(2)

# %% [markdown]
# Its price: between two layers the residual stream of every micro-batch waits. (ZeRO-Offload's
# paper prints 28 bytes per parameter for L2L. That is what comes out if the optimizer's states come
# up and go back too; here they stay.)
#
# And what does the host hold? All that left the device and is in no file; and where files take
# part, buffers, through which everything passes on its way:

# %%
pd.DataFrame(
    {
        name: offload.tier_bytes(deep.replace(layers=24), how)["host"]
        for name, how in ladder.items()
        if how.offload
    }
).fillna(0).div(1e6).round(1).add_suffix(" (MB)")

# %% [markdown]
# ## Is it the same training?
# Not to five decimals: bit for bit, where the device is a processor too: the host then makes the
# same step with the same kernel.

# %%
proof = {"steps": 4, "keep_state": True, "progress": False}
for stage, place in ((1, "cpu"), (2, "cpu"), (3, "cpu"), (3, "nvme")):
    how = pl.Plan(zero_stage=stage, microbatches=2)
    here = pl.run(model, how, **proof)
    away = pl.run(model, how.replace(offload=place), **proof)
    same = all(np.array_equal(here.weights[name], away.weights[name]) for name in here.weights)
    print(f"stage {stage}, {place}: the same bits after four AdamW steps: {same}")

# %% [markdown]
# One setting does change the training. With `delayed` the host updates while the device is at the
# next step already, which it computes with weights that are one update old:

# %%
late = pl.Plan(
    zero_stage=2, microbatches=2, offload={"gradients": "cpu", "optimizer": "cpu", "delayed": True}
)
delayed = pl.run(model, late, **proof)
here = pl.run(model, late.replace(offload=None), **proof)
print("first losses equal:", delayed.losses[0] == here.losses[0])
print("second step saw the first one's weights:", delayed.losses[1] != here.losses[1])

# %% [markdown]
# Is it worth it? On a machine whose host is slow, by prediction, milliseconds per step:

# %%
slow = pl.Cluster(
    name="slow host",
    flops=1e11,
    memory_bandwidth=2e10,
    host_bandwidth=1e9,
    intra=pl.Link(alpha=0, bandwidth=1e9),
    host=pl.Link(alpha=1e-5, bandwidth=5e9),
)
now = late.replace(offload={"gradients": "cpu", "optimizer": "cpu"})
both = {"waits for the update": now, "delayed": late}
took = {name: 1e3 * pl.predict(model, how, slow).step_time for name, how in both.items()}
pd.Series(took).round(1).rename("ms per step")

# %% [markdown]
# ## Break it
# Pull the disk out while it trains. The folder goes after the third step:

# %%
disk, saved = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())


def pull(rank, done, steps):
    if done == 3:
        for folder in disk.glob("paralab-offload-*"):
            shutil.rmtree(folder)


removable = {
    "parameters": "nvme",
    "gradients": "cpu",
    "optimizer": "nvme",
    "folder": str(disk),
    "bandwidth": {"disk": "40MB"},
}
files = pl.Plan(zero_stage=3, offload=removable)
try:
    pl.run(model, files, steps=50, save=saved, save_every=1, progress=pull)
except pl.RankError as error:
    said = str(error)
print("a clear error:", "offload cannot" in said and "No such file or directory" in said)
print("and what to do:", "resume from the last one" in said)
print("files left behind:", len(os.listdir(disk)))

# %% [markdown]
# The training is not lost: every step was saved. On with it, on the host this time:

# %%
on_host = pl.Plan(zero_stage=3, offload="cpu")
more = pl.run(model, on_host, steps=1, resume=saved, keep_state=True, progress=False)
done = int((saved / "latest").read_text().split("-")[1].split()[0])
whole = pl.run(model, on_host, steps=done + 1, keep_state=True, progress=False)
print("at least three steps were saved:", done >= 3)
print(
    "as if nothing had been:",
    all(np.array_equal(whole.weights[n], more.weights[n]) for n in whole.weights),
)

# %% [markdown]
# ## Your turn

# %%
exercise = pl.exercises.stream
exercise


# %%
### ANSWER: stream


exercise.check(my_stream)

# %% [markdown]
# Stuck? `exercise.hint()` gives one push at a time, `exercise.solution()` shows an answer.

# %% [markdown]
# ## On your GPUs
# The same cells. Copies then run on streams of their own from page-locked memory, the lanes show
# what the device's clock says, and `memory_limit` also caps the allocator. («The same bits» need
# the same kernel: AdamW on the host may differ from the GPU's in the last digits.) Look at how much
# of the copies hides behind computing (`report.summary()`), and raise `microbatch_size` until it
# does.
#
# ## Read on
# * Ren and others 2021, [ZeRO-Offload](https://arxiv.org/abs/2101.06840): sec. 3 for the cut, sec.
#   5.2 for the delayed update. Rajbhandari and others 2021,
#   [ZeRO-Infinity](https://arxiv.org/abs/2104.07857): sec. 3 and 4 for memory and bandwidth.
# * In the package: `paralab/parallel/offload.py`, and `lanes.py`, `host.py` and `files.py` in
#   `paralab/interpret`, which move the bytes.
