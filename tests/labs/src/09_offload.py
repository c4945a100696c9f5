# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 09 · Offload: memory that is not on the device
#
# **The model does not fit on the device, and the machine around it has more memory, and a disk.
# What can be kept there, and what does it cost?**
#
# You will be able to
# * say what moves over which link in a step of ZeRO-Offload and ZeRO-Infinity, in bytes per
#   parameter;
# * explain why the cut goes between backward and update;
# * compute the bandwidth that a link needs, from arithmetic intensity;
# * write an optimizer whose states are in a file and pass through memory in pieces;
# * read a DeepSpeed offload configuration.
#
# **You need** labs 05 (ZeRO) and 06 (memory); in PyTorch optimizers, `torch.no_grad`.
# **Minutes:** 90 to 110: 40 for reading and running, the rest for three exercises.
#
# The picture is drawn from the program of one plan: gradients and optimizer states on the host.

# %%
import pandas as pd

import paralab as pl
from paralab import view
from paralab.theory import offload, offload_costs

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
wide = pl.ModelSpec(layers=8, hidden=192, heads=4, seq_len=32, attention="explicit")
plan = pl.Plan(microbatches=2, microbatch_size=2, bucket_bytes=2**20)
view.data_flow(wide, plan.replace(zero_stage=2, offload="cpu"))

# %% [markdown]
# Forward and backward run on the device. Gradients go down to the host as backward produces them,
# here twice, once for each of two micro-batches. The **host** runs the optimizer, and updated
# parameters come up. The moments never move. This is
# [**ZeRO-Offload**](https://arxiv.org/abs/2101.06840).
# [**ZeRO-Infinity**](https://arxiv.org/abs/2104.07857) goes further: parameters come up only while
# they are needed, and files take what the host cannot hold:

# %%
busiest = pl.exercises.choose(
    "With parameters and optimizer states in files, most bytes of a step go",
    ["from the host to the device", "from files to the host", "from the host to files"],
)
busiest

# %%
view.data_flow(wide, plan.replace(zero_stage=3, offload="nvme"))

# %%
busiest.reveal(2, "Forward and backward read parameters; the update reads them and the moments.")

# %% [markdown]
# | symbol | meaning |
# |---|---|
# | Ψ | parameters (a count) |
# | b, s | samples per micro-batch, tokens per sample |
# | K | bytes of model state per parameter |
# | I | arithmetic intensity: FLOPs per byte that crosses the link |
# | B | bandwidth of the link, bytes per second (in lab 00 B is the samples of a step) |
# | X | FLOP/s that a device reaches |
# | moved | bytes per parameter and step that cross the link |
# | $t_\text{compute}$, $t_\text{copy}$ | seconds of a step for computation, for copies |
# | e | efficiency: share of a step in which the device computes |
#
# ## Of 16 bytes per parameter, two are needed in forward and backward
# AdamW in mixed precision keeps K = 16 bytes per parameter:
#
# $$K = \underbrace{2}_\text{parameter} + \underbrace{2}_\text{gradient} +
# \underbrace{4 + 4 + 4}_\text{master weight, two moments}$$
#
# Forward and backward read the first two bytes. Backward makes the next two, and only the update
# needs the last twelve. The update makes a few FLOPs per parameter, while forward and backward make
# six per parameter *and token*. So with enough tokens per step even a slow processor keeps up with
# the device. What offload adds to a program (`host.` marks what is on the host: `gshard` the
# gradients, `part` those of one more micro-batch before they are added, `opt` master weights and
# moments):

# %%
plain = pl.program(wide, plan.replace(zero_stage=2))
plain.diff(pl.program(wide, plan.replace(zero_stage=2, offload="cpu")))

# %% [markdown]
# Make a guess: one device, this small GPT in fp32; gradients, optimizer states and parameters
# all move to the host. How much of the device's peak memory is left?

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
# ## Five trainings, three tiers
# `offload="cpu"` moves what the ZeRO stage shards, with one rank as well: stage 1 the optimizer
# states, stage 2 gradients too, stage 3 parameters too. Of these `offload="nvme"` writes optimizer
# states and parameters to files. Device, host and files are the three *tiers*. On a laptop the
# device's memory and the host's are the same chips. The ledger keeps them apart: it counts the
# device's bytes and, with `memory_limit`, bounds them. Copies and files are real.

# %%
plans = {
    "no offload": plan,
    "optimizer states": plan.replace(zero_stage=1, offload="cpu"),
    "and gradients": plan.replace(zero_stage=2, offload="cpu"),
    "and parameters": plan.replace(zero_stage=3, offload="cpu"),
    "in files": plan.replace(zero_stage=3, offload="nvme"),
}
reports = {name: pl.run(wide, how, steps=3, progress=False) for name, how in plans.items()}


def tiers(name, report):
    """{name and tier: {category: bytes}}, each at the tier's peak."""
    bars = {}
    for tier, held in report.memory.groupby("tier"):
        fullest = held.groupby("time")["bytes"].sum().idxmax()
        parts = held[held["time"] == fullest].groupby("category")["bytes"].sum()
        bars[f"{name}: {tier}"] = parts[parts > 0].to_dict()
    return bars


bars = {}
for name, report in reports.items():
    bars |= tiers(name, report)
by_tier = sorted(bars, key=lambda label: ("device", "host", "file").index(label.split(": ")[1]))
title = "With everything offloaded the device keeps a fifth"
view.bytes_bars({label: bars[label] for label in by_tier}, title=title)

# %%
share = reports["and parameters"].peak_memory / reports["no offload"].peak_memory
guess.reveal(round(100 * share))

# %% [markdown]
# What is left on the device is what computing needs: activations; the parameters of the unit
# (lab 05) that is computed and of the next one, in *buffers*; and gradients that have not been
# copied to the host yet. Under stages 1 and 2 the host keeps its own copy of the weights, counted
# as optimizer. The host's buffers hold what is on its way from or to the device and the files.
#
# ## What moves, and when
# The timeline of one step. Every link is a lane: copies overlap with computation until an operation
# needs what they bring.

# %% tags=["measured"]
reports["and gradients"].timeline()

# %% [markdown]
# Gradients leave during backward. Then the device is idle, while the host updates and the new
# parameters come up. How many bytes cross which link? With everything on the host, a step of two
# micro-batches brings up each parameter before it is needed:

# %%
brought_up = pl.exercises.guess(
    "bytes per parameter that come up in a step, everything on the host",
    low=0,
    high=32,
    unit="bytes",
    decimals=0,
)
brought_up

# %% [markdown]
# (h2d is from host to device, d2h from device to host.) The program says the bytes before the run,
# and the run moves exactly these:

# %%
carried = {}
for name, report in reports.items():
    moved = report.copied(by="link").set_index("link")["bytes"]
    said = {
        link: sum(parts.values()) for link, parts in offload.link_bytes(wide, report.plan).items()
    }
    assert all(size == moved[link] for link, size in said.items() if size)
    carried[name] = {link: round(size / wide.num_params, 2) for link, size in said.items()}
pd.DataFrame(carried).T.rename_axis("bytes per parameter and step")

# %%
brought_up.reveal(carried["and parameters"]["h2d"])

# %% [markdown]
# There are two micro-batches. From stage 2 on gradients go down for each of them, 4 bytes each;
# stage 1 keeps them until the step ends. Stage 3 brings every parameter up four times, before each
# forward and each backward. With files, these 16 bytes are also read from disk;
# the update reads 12 more, weights and two moments, and writes 12.
#
# ## Why the cut is before the update: it moves four bytes per parameter, the fewest possible
# ZeRO-Offload draws a step as a graph (its figure 2): circles hold data, boxes compute, and an edge
# weighs the bytes per parameter that flow along it. A strategy puts every node on the GPU or the
# CPU; it pays for each edge that it cuts:
#
# $$\text{volume} = \sum_{(u, v)\,:\,\text{place}(u) \ne \text{place}(v)} w_{uv}, \qquad
# \text{GPU memory} = \sum_{u\ \text{on the GPU}} \text{held}_u$$
#
# Forward and backward stay on the GPU, for their work grows with the batch, and the update leaves.
# All other nodes may be on either side. $\text{held}_u$ is the bytes per parameter that node u
# holds. p16 and g16 are parameters and gradients in 16 bits; p32, m32 and v32 are master weights
# and moments in 32 bits; float2half rounds p32 to p16. The edge from p16 to fwd-bwd weighs 4,
# because forward and backward each read its two bytes:

# %%
for (source, to), width in offload_costs.FLOWS.items():
    print(f"{source:>10} → {to:<10} {width} bytes per parameter")

# %%
stays = pl.exercises.choose(
    "The update runs on the CPU. Which placement cuts the fewest bytes and, among those that do, "
    "leaves the fewest on the GPU?",
    [
        "fwd-bwd alone is on the GPU",
        "fwd-bwd and p16 are on the GPU",
        "fwd-bwd, p16 and g16 are on the GPU",
    ],
)
stays

# %%
cuts = offload_costs.cuts(update="cpu")
volumes = sorted(offload_costs.cut_volume(cut) for cut in cuts)
print(f"{len(cuts)} cuts; the smallest volumes: {sorted(set(volumes))[:3]} bytes per parameter")
for cut in cuts:
    if offload_costs.cut_volume(cut) == volumes[0]:
        here = [node for node, place in cut.items() if place == offload_costs.GPU]
        print(f"volume {volumes[0]}, GPU keeps {offload_costs.gpu_memory(cut)} bytes: {here}")
stays.reveal(2, "Gradients go down, 2 bytes, and new parameters come up, 2 bytes.")

# %% [markdown]
# Of the two cuts with the smallest volume ZeRO-Offload takes the one that leaves two bytes per
# parameter on the GPU, an eighth of 16. (Its table 1 prints 4 for that row, and “8x”; two is what
# the graph gives.) A run in 16 bits with one micro-batch moves these four bytes:

# %%
half = pl.Plan(zero_stage=2, offload="cpu", precision="bf16")
moved = pl.run(wide, half, steps=2, progress=False).copied(by="link")["bytes"].sum()
print(f"{moved / wide.num_params:g} bytes per parameter crossed the link per step")

# %% [markdown]
# ## Which bandwidth is enough?
# ZeRO-Infinity (sec. 4) answers with arithmetic intensity. In a step of one micro-batch, b s
# tokens, a device makes 2 FLOPs per parameter and token in forward, 4 in backward, 2 more if
# forward is recomputed. Let `moved` be the bytes per parameter that cross the link. Then
#
# $$I = \frac{8\,b s\,\Psi}{\text{moved}\cdot\Psi} = \frac{8\,bs}{\text{moved}}, \qquad
# t_\text{compute} = \frac{\text{FLOPs}}{X}, \qquad
# t_\text{copy} = \frac{\text{FLOPs}/I}{B}$$
#
# and if nothing overlaps, the device computes during the share
#
# $$e = \frac{t_\text{compute}}{t_\text{compute} + t_\text{copy}}
# = \frac{1/X}{1/X + 1/(IB)} = \frac{I B}{I B + X}$$
#
# If all copies overlap with compute, that share is $\min(1, IB/X)$.
#
# The paper counts 16 bytes of optimizer states per parameter: the master weight, two moments and a
# gradient, all in 32 bits. (Of the K = 16 bytes above 12 are optimizer states, and
# the gradient has 2.) They are read and written once, so moved = 32 and I = b s/4:

# %%
intensity = offload_costs.ait_optimizer(batch=2, seq_len=1024)
e = offload_costs.efficiency(intensity, 1, peak_flops=70e12, bandwidth=1.5e12)  # of one byte
print(f"I = {intensity:g} FLOPs per byte; at 1.5 TB/s and 70 TFLOP/s e = {100 * e:.1f} %")

# %% [markdown]
# (The paper says that 90 % requires 1.5 TB/s.) Which bandwidth does the formula require?

# %%
warm_up = pl.exercises.bandwidth
warm_up

# %%
### ANSWER: bandwidth


pl.exercises.bandwidth.check(bandwidth_needed)

# %% [markdown] tags=["solution-only"]
# **Why it works.** e (IB + X) = IB, so IB (1 − e) = eX. With I = 8 bs/moved this is B. **Common
# mistakes**: 6 FLOPs in place of 8 (nothing recomputed), e X/I (the time that is left for copies is
# 1 − e, not 1), forgetting the tokens. A second way goes through seconds, and has no formula:

# %% tags=["solution-only"]
### ANSWER: bandwidth_other


pl.exercises.bandwidth.check(bandwidth_needed)

# %% [markdown]
# The next table has the efficiency of the plan with files on this machine, from the measured speed
# of its disk. X is the rate that `pl.predict` expects of the device in this plan. A small model
# reaches only a part of the rate of large matrix products, `cluster.flops`. The plan recomputes
# nothing, so its FLOPs are three times forward's: 6 in place of 8 per parameter and token.

# %%
larger = pl.exercises.choose(
    "Micro-batches of 8 samples in place of 2: the share of a step in which the device computes",
    ["falls: there is more to copy", "stays: both grow", "rises: as many copies as before"],
)
larger

# %% tags=["measured"]
cluster = pl.Cluster.local()
table = {}
for samples in (2, 8, 32):
    how = plans["in files"].replace(microbatch_size=samples)
    links = offload.link_bytes(wide, how)
    size = sum(sum(links[link].values()) for link in ("disk read", "disk write"))
    flops = 3 * pl.theory.flops.forward_flops(wide, how.microbatches * samples)
    step = pl.predict(wide, how, cluster).summary()["value"]
    reached = flops / (1e-3 * step["forward and backward"])
    asked = (flops, size, reached, cluster.disk.bandwidth)
    table[samples] = {
        "formula, nothing overlaps": offload_costs.efficiency(*asked),
        "all overlaps": offload_costs.efficiency_overlapped(*asked),
        "predicted": step["forward and backward"] / step["step time"],
    }
(100 * pd.DataFrame(table).T.rename_axis("samples per micro-batch")).round(1).add_suffix(" (%)")

# %%
larger.reveal(3, "Copies are per micro-batch, FLOPs per sample: a large one hides a slow link.")

# %% tags=["measured"]
pl.compare(pl.predict(wide, plans["in files"], cluster), reports["in files"])

# %% [markdown]
# The exposed copies are the time in which the device waits for copies. Compare the row of forward
# and backward: where they take longer in the run than predicted, the X of the table before was too
# high, and the device really computes for a larger share of the step. Which disk would be fast
# enough? The widget shows it for another model, 4 blocks of hidden size 256 with 64 tokens per
# sample, and one micro-batch; *Run it* trains with the disk limited to the slider's bandwidth.

# %%
view.widgets.offload()

# %% [markdown]
# ## Write it: an optimizer that streams its states
# In ZeRO-Infinity the states are in files, and pass through memory one unit at a time.

# %%
exercise = pl.exercises.streamed_optimizer
exercise

# %%
### ANSWER: streamed_optimizer


verdict = pl.exercises.streamed_optimizer.check(MyStreamedAdamW)
verdict

# %% [markdown] tags=["solution-only"]
# **Why it works.** AdamW is elementwise: element i of the new state depends on element i of the old
# one. So any cut into pieces gives the same bits. `numpy.memmap` reserves addresses and reads pages
# on first use; `torch.from_numpy` shares them, so an update in place is an update of the file.
#
# **Common mistakes**, as the checker sees them: the states are read once and kept (weights are
# right until the files are zeroed); a copy is updated and never written back (wrong from the second
# step on); the step count grows with every unit; all files are read before the first update. The
# formulas of the textbook in another order are not wrong, but differ in the last bits.
#
# **A second solution** reads and writes one file per unit and lets `torch.optim.AdamW` do the
# arithmetic, on a parameter that is a view of the real one:

# %% tags=["solution-only"]
### ANSWER: streamed_optimizer_other


pl.exercises.streamed_optimizer.check(MyStreamedAdamW)

# %% [markdown]
# Stuck? `exercise.hint()` gives one hint at a time, `exercise.solution()` shows an answer.
#
# ## Your optimizer trains the GPT, next to AdamW and next to the plan
# The next cells train the reference GPT on a real rank, with an optimizer that is passed in, while
# `pl.observe` watches. With yours no moment is in memory between steps. The panel of the plan shows
# the device only; the plan also holds gradients and buffers on the host. After backward, where no
# phase is named, its device waits for the host's update and the files.


# %%
def train(make, steps=3):
    import tempfile

    gpt, losses = pl.reference.GPT(wide), []
    with tempfile.TemporaryDirectory() as folder:
        update = make(list(gpt.parameters()), folder)
        for step in range(steps):
            [(tokens, targets)] = pl.reference.batches(wide, step=step, microbatch_size=4)
            loss = gpt(tokens, targets)
            loss.backward()
            update.step()
            pl.step()  # a step ends here
            gpt.zero_grad()
            losses.append(loss.item())
    return losses


def adamw(parameters, folder):
    return pl.reference.optimizer(parameters)


def streamed(parameters, folder):
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    return MyStreamedAdamW(parameters, folder, **settings, unit=2**16)


# %%
halved = pl.exercises.choose(
    "With an optimizer that keeps no moments in memory, the device's peak is about",
    ["three quarters of AdamW's", "half of AdamW's", "a tenth of AdamW's"],
)
halved

# %% tags=["measured"]
runs = {}
for name, make in (("torch.optim.AdamW", adamw), ("yours", streamed)):
    if verdict or make is adamw:
        runs[name] = pl.observe(train, ranks=1, args=(make,), steps="marked", memory_steps=3)
    else:
        print("write MyStreamedAdamW first")
files = pl.Plan(microbatch_size=4, zero_stage=3, offload="nvme")
runs["the plan, in files"] = pl.run(wide, files, steps=3, progress=False)
view.memory_charts(runs, title="On the device: what files hold is not in memory between steps")

# %%
right = runs["the plan, in files"].losses
for name, run in runs.items():
    off = max(abs(a - b) for a, b in zip(run.losses, right, strict=True))
    print(f"{name}: losses as those of the plan, to 1e-4: {off < 1e-4}")
halved.reveal(2, "Of weight, gradient and two moments, 4 bytes each, the first two are left.")

# %% tags=["measured"]
title = "The plan copies and updates on other lanes than the device's"
view.timelines(*runs.values(), labels=list(runs), title=title)

# %% [markdown]
# Your optimizer maps, updates and writes back one unit after the other, all on the device's lane.
# (What no optimizer of torch does there is called *compute*.) In the plan the disk reads or writes
# other units while the host updates one. (Lengths are those of this machine's wall clock, on which
# files may be in the system's cache and threads wait for a core.)
#
# ## The largest model that fits
# How many blocks of a GPT does a device of 16 MB train without offload, and how many with it? The
# program says how many fit; a training step with this memory limit confirms it. Without offload
# there are four.

# %%
blocks = pl.exercises.guess(
    "blocks on the same device with everything on the host", low=4, high=80, decimals=0
)
blocks

# %%
from bisect import bisect  # how many of 1, 2, 3, ... blocks are within the limit

deep = pl.ModelSpec(layers=8, hidden=128, heads=4, seq_len=32)
limit, one = 16 * 10**6, pl.Plan(microbatch_size=1, bucket_bytes=2**18)
ways = {
    "without": one,
    "ZeRO-Offload": one.replace(zero_stage=2, offload="cpu"),
    "everything on the host": one.replace(zero_stage=3, offload="cpu"),
    "parameters, states in files": one.replace(zero_stage=3, offload="nvme"),
}


def needs(how):
    return lambda layers: sum(pl.program(deep.replace(layers=layers), how).peak().values())


peaks, most = {}, {}
for name, how in ways.items():
    most[name] = bisect(range(1, 80), limit, key=needs(how))
    spec = deep.replace(layers=most[name])
    run = pl.run(spec, how, steps=1, memory_limit=limit, progress=False)
    peaks |= tiers(f"{most[name]} blocks, {name}", run)
on_device = {label: held for label, held in peaks.items() if label.endswith("device")}
title = "Offload trains a model of more blocks on the same device"
view.bytes_bars(on_device, {"the device": limit}, title=title)

# %%
blocks.reveal(most["everything on the host"])

# %% [markdown]
# What is no longer on the device is on the host or in files:

# %%
elsewhere = {label: held for label, held in peaks.items() if label not in on_device}
view.bytes_bars(elsewhere, title="The host and its files hold several times what the device does")

# %%
name = "everything on the host"
try:
    pl.run(
        deep.replace(layers=most[name] + 1), ways[name], steps=1, memory_limit=limit, progress=False
    )
except pl.OutOfMemory:
    print(f"one block more than {most[name]} does not fit")

# %% [markdown]
# The depth that fits is limited by what must stay on the device and grows with the number of
# blocks: parameters and activations under ZeRO-Offload, activations alone when everything is
# offloaded. Moving states to files does not increase that depth; it reduces what the host holds.
# (`recompute="full"` and `offload={"activations": "cpu"}` take the activations too.)
#
# There is another order, in which all micro-batches pass through one layer before the next layer
# comes: **L2L**, the layer relay. It saves no memory if the next layer is fetched meanwhile, as
# here. It even needs more, because the inputs of all micro-batches are kept. What it can save is
# copies:

# %%
relay = pl.exercises.choose(
    "Under L2L, with four micro-batches in place of one, parameters come up",
    ["as often", "twice as often", "four times as often"],
)
relay

# %% [markdown]
# Bytes per parameter and step over the link to the device:

# %%
rows = {}
for m in (1, 2, 4):
    usual = pl.Plan(zero_stage=3, offload="cpu", recompute="full", microbatches=m)
    rows[m] = {}
    for name, how in (("one by one", usual), ("L2L", usual.replace(schedule="l2l"))):
        up = sum(offload.link_bytes(wide, how)["h2d"].values())
        rows[m][name] = round(up / wide.num_params, 2)
pd.DataFrame(rows).T.rename_axis("micro-batches")

# %%
relay.reveal(1, "A layer comes up once in forward and once in backward, and the head once in all.")

# %% [markdown]
# ## Is it the same training?
# Parameters and states are in files, and the host makes the update. What becomes of the weights?

# %%
alike = pl.exercises.choose(
    "After three steps, compared with a training that keeps everything on the device, weights are",
    ["equal bit for bit", "equal to five digits", "different from the first digit on"],
)
alike

# %%
small = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)
proof = {"steps": 3, "keep_state": True, "progress": False}
how = pl.Plan(zero_stage=3, microbatches=2)
here, away = pl.run(small, how, **proof), pl.run(small, how.replace(offload="nvme"), **proof)
same = all((here.weights[name] == away.weights[name]).all() for name in here.weights)
print("the same bits after three AdamW steps, with states and parameters in files:", same)
alike.reveal(1, "Copies do not change a number, and the host runs the device's kernel.")

# %% [markdown]
# They are identical bit for bit, provided device and host run the same AdamW kernel, which is so
# here because both are CPUs. One setting does change the training: with `delayed` the host updates
# while the device computes the next step already, with weights that are one update old
# (ZeRO-Offload, sec. 5.2). Pick how long a step is then:

# %%
pick = pl.exercises.choose(
    "The update takes the host twice as long as forward and backward take the device. How long is "
    "a step with `delayed`, compared with one without?",
    ["as long", "about two thirds as long", "a tenth as long"],
)
pick

# %%
slow = pl.Cluster(
    name="slow host",
    flops=1e11,
    memory_bandwidth=2e10,
    host_bandwidth=1e9,
    intra=pl.Link(alpha=0, bandwidth=1e9),
    host=pl.Link(alpha=1e-5, bandwidth=5e9),
)
places = {"gradients": "cpu", "optimizer": "cpu"}
for name, where in (("waits for the update", places), ("delayed", {**places, "delayed": True})):
    how = pl.Plan(zero_stage=2, microbatches=2, offload=where)
    print(f"{name:<21} {1e3 * pl.predict(small, how, slow).step_time:5.1f} ms per step")
pick.reveal(2, "It takes the longer of the two and not their sum, so never less than half.")

# %% [markdown]
# ## Pull the disk out
# After the third step the folder with the files is deleted. The training was saved after every
# step. What does the training do then?

# %%
pulled = pl.exercises.choose(
    "When the files are gone, the training",
    ["goes on with what is in memory", "waits without end", "stops, and names the file"],
)
pulled

# %% tags=["measured"]
import os
import shutil
import tempfile
import textwrap
from pathlib import Path

folders = [tempfile.TemporaryDirectory() for _ in range(2)]  # deleted when the kernel ends
disk, saved = (Path(folder.name) for folder in folders)


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
    pl.run(small, files, steps=50, save=saved, save_every=1, progress=pull)
except pl.RankError as error:
    said = str(error).splitlines()[0].replace(f"{disk}/", "")
    print(textwrap.fill(said, 98))

# %%
pulled.reveal(3, "A file that cannot be opened is an error; what was saved before is whole.")

# %%
print("files left behind:", len(os.listdir(disk)))
on_host = pl.Plan(zero_stage=3, offload="cpu")
more = pl.run(small, on_host, steps=1, resume=saved, keep_state=True, progress=False)
done = int((saved / "latest").read_text().split("-")[1].split()[0])
whole = pl.run(small, on_host, steps=done + 1, keep_state=True, progress=False)
same = all((whole.weights[name] == more.weights[name]).all() for name in whole.weights)
print("at least three steps were saved:", done >= 3)
print("resumed on the host, with the bits of an undisturbed training:", same)

# %% [markdown]
# ## Go further: keep the disk busy
# Your optimizer reads, updates and writes one unit after the other, and the disk is idle while the
# host computes. With two buffers it need not be.

# %%
puzzle = pl.exercises.stream
puzzle

# %%
### ANSWER: stream


pl.exercises.stream.check(my_stream)

# %% [markdown]
# The picture of your order, or, as long as it cannot run, of one unit after the other. The dashed
# line is the least possible time:

# %%
one_by_one = [(what, unit, unit % 2) for unit in range(6) for what in ("read", "update", "write")]
try:
    chart = view.jobs(my_stream(6, 2), host="fast")
except Exception:  # the verdict says why it cannot run
    chart = view.jobs(one_by_one, host="fast")
chart

# %% [markdown] tags=["solution-only"]
# **Why it works.** Let a read take r seconds, an update u and a write w, for U units. On the fast
# host the disk is the busier lane and must never wait: U (r + w). On the slow host the update is,
# and reading one unit ahead keeps the host busy: r + U u + w. While the host updates unit i, the
# disk reads unit i + 1, and then writes unit i. The read of unit i comes after the write of unit i
# − `window`, which had the same buffer. **Common mistakes**: reading all units first (they
# overwrite buffers that are not written yet), and filling and emptying the whole window by turns
# (right, but a slow host is idle while the disk writes one window and begins to read the next). **A
# second answer** does that with two halves of the window: while the host updates one half, the disk
# reads and writes the other. A single buffer has no halves: it is written before it is read into
# again.

# %% tags=["solution-only"]
### ANSWER: stream_other


pl.exercises.stream.check(my_stream)

# %% [markdown]
# ## What to remember
# 1. Of K = 16 bytes per parameter forward and backward need two; the update, which needs the rest,
#    is cheap, so it can leave the device.
# 2. With one micro-batch ZeRO-Offload moves 4 bytes per parameter and step in 16 bits, and with the
#    update on the host no cut moves fewer. Here each further micro-batch sends 2 more bytes down.
# 3. Larger micro-batches make up for a slow link: from stage 2 on copies are made per micro-batch,
#    computation per token.
# 4. Offload does not change the training, bit for bit, where device and host run the same kernel; a
#    delayed update does.
# 5. AdamW is elementwise, so its states can pass through a window as small as you like.
#
# | what does not fit | what helps |
# |---|---|
# | optimizer states | `zero_stage=1`, `offload="cpu"`: moments on the host, little traffic |
# | gradients too | `zero_stage=2`, `offload="cpu"`: ZeRO-Offload |
# | parameters too | `zero_stage=3`, `offload="cpu"`, large micro-batches |
# | the host's memory | `offload="nvme"`, several fast disks |
# | activations | recomputation first (lab 06), then `offload={"activations": "cpu"}` |
#
# $$I = \frac{8\,bs}{\text{moved}}, \qquad e = \frac{IB}{IB + X}$$
#
# ## In PyTorch, DeepSpeed, Megatron
# * **PyTorch, FSDP2**: parameters, gradients and optimizer states on the host. On a CPU device and
#   host are the same memory, so there is nothing to observe here:
#   ```python
#   from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
#   for block in model.blocks:
#       fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=True))
#   fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=True))
#   ```
#   Activations: `with torch.autograd.graph.save_on_cpu(pin_memory=True): loss = model(batch)`. It
#   is a pair of hooks, and the cell below observes such a pair.
# * **DeepSpeed**: `"stage": 2` with `offload_optimizer` is ZeRO-Offload, `"stage": 3` with
#   `offload_optimizer` and `offload_param` is ZeRO-Infinity; `"device": "cpu"` or `"nvme"`:
#   ```json
#   {"zero_optimization": {
#      "stage": 3,
#      "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true,
#                            "buffer_count": 12, "pipeline_read": true, "pipeline_write": true},
#      "offload_param": {"device": "cpu", "pin_memory": true}},
#    "aio": {"block_size": 1048576, "queue_depth": 8, "overlap_events": true}}
#   ```
#   `"device": "nvme"` needs stage 3. `pipeline_read` and `pipeline_write` are the overlap of the
#   last exercise. `buffer_count` counts buffers of single states: Adam needs 4 for a sub-group of
#   parameters (weight, gradient, two moments). Each of the two settings keeps those of one more
#   sub-group, which makes 12; with fewer, a model of several sub-groups (of $10^9$ elements by
#   default) stops with an error.
#
#   DeepSpeed sends gradients down in 32 bits unless master weights have 16, so 6 bytes per
#   parameter and not 4. When it accumulates, it adds on the GPU: from the second micro-batch on the
#   sum so far goes up and comes down again. It has no delayed update; in its `zenflow` most
#   gradients are applied late.
# * **Megatron-LM** ([its
#   page](https://github.com/NVIDIA/Megatron-LM/tree/main/megatron/core/optimizer/cpu_offloading)):
#   `--optimizer-cpu-offload --optimizer-offload-fraction 1.0 --use-precision-aware-optimizer`, and
#   `--overlap-cpu-optimizer-d2h-h2d`, which that page recommends. Activations:
#   `--fine-grained-activation-offloading --offload-modules core_attn attn_proj`.
#
# PyTorch calls `pack` for each tensor that a forward saves for backward, and `unpack` when backward
# needs it. In `save_on_cpu`, `pack` copies the tensor to the host and `unpack` copies it back. On a
# CPU there is nothing to copy, so here `pack` writes a file and `unpack` reads it. A forward saves
# weights, too. Here a tensor that shares the memory of a parameter stays where it is; `save_on_cpu`
# copies it like all others. A third run is the library's, which recomputes
# blocks and keeps their inputs on the host. Which category of memory shrinks?

# %%
shrinks = pl.exercises.choose(
    "At the peak of the device's memory, what is smaller with the hooks?",
    ["activations", "gradients", "optimizer states", "nothing: backward needs all of it"],
)
shrinks


# %%
def hooked(spec, to_files):
    import contextlib
    import itertools
    import tempfile
    from pathlib import Path

    import torch

    gpt, losses, number = pl.reference.GPT(spec), [], itertools.count()
    update = pl.reference.optimizer(gpt.parameters(), "adamw", 1e-3)
    parameters = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    folder = tempfile.TemporaryDirectory()

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() in parameters:
            return tensor
        path = Path(folder.name, f"{next(number)}.pt")
        torch.save(tensor.clone(), path)  # without clone() its whole storage would be written
        return path

    def unpack(saved):
        return torch.load(saved) if isinstance(saved, Path) else saved

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    for step in range(3):
        with hooks if to_files else contextlib.nullcontext():
            [(tokens, targets)] = pl.reference.batches(spec, step=step, microbatch_size=8)
            loss = gpt(tokens, targets)
            loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


torchs = {
    "PyTorch": pl.observe(hooked, ranks=1, args=(wide, False)),
    "PyTorch, saved in files": pl.observe(hooked, ranks=1, args=(wide, True)),
}
inputs = pl.Plan(microbatch_size=8, recompute="full", offload={"activations": "cpu"})
ours = pl.run(wide, inputs, steps=3, progress=False)
compared = torchs | {"the library, inputs of blocks on the host": ours}
print(
    "the losses with the hooks are the same, bit for bit:",
    torchs["PyTorch"].losses == [*torchs.values()][1].losses,
)
pairs = zip(ours.losses, torchs["PyTorch"].losses, strict=True)
print("the library's losses are PyTorch's:", all(abs(a - b) < 1e-5 for a, b in pairs))
held = {name: run.peaks(0)["measured"].drop("total").to_dict() for name, run in compared.items()}
view.bytes_bars(held, title="Activations that are saved elsewhere leave the device's peak")

# %%
shrinks.reveal(1, "The hooks get what forward saves for backward, and no gradients or states.")

# %% [markdown]
# The first bar is of the beginning of backward, when hardly any gradient exists and all
# activations are held. Without them the peak comes late in backward, when most gradients exist. So
# the peak falls by less than the activations. The library holds, at its peak, the activations of
# the one block that is being recomputed.
#
# Estimators: [FLAN-T5-XL with ZeRO-3 and
# offload](https://github.com/deepspeedai/DeepSpeed/issues/2797) is computed in lab 06: with all
# states offloaded, activations are what is left on the device.
#
# ## Read on
# * Ren et al. 2021, [ZeRO-Offload](https://arxiv.org/abs/2101.06840): sec. 3 for the cut, sec. 5.2
#   for the delayed update. Rajbhandari et al. 2021,
#   [ZeRO-Infinity](https://arxiv.org/abs/2104.07857): sec. 3 and 4 for memory and bandwidth.
#   Pudipeddi et al. 2020, [L2L](https://arxiv.org/abs/2002.05645): the layer relay.
# * [DeepSpeed's configuration](https://www.deepspeed.ai/docs/config-json/), “ZeRO Optimizations”;
#   [FSDP2](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
# * In the package: `paralab/parallel/offload.py`, and `lanes.py`, `host.py` and `files.py` in
#   `paralab/interpret`, which move the bytes.
#
# **On your GPUs**, with `pl.set_default_device("cuda")` in the first cell, copies use streams of
# their own and page-locked memory. The same bits need the same kernel: AdamW on the host may
# differ from the GPU's in the last digits. On an H100 a step of GPT-2 (124 million parameters,
# bf16, ZeRO-3 with `offload="cpu"`) took about three times as long as without, mostly because the
# device waited for AdamW on the host's sixteen cores.
