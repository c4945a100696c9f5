# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 07 · Tensor parallelism: one layer on several devices
#
# *«[Puzzling collectives in TP](https://github.com/pytorch/torchtitan/issues/1369)»*: somebody
# reads a log and finds calls in it that nobody wrote. By the end of this lab you know of each why
# it is there, how many there must be, and what becomes of a model that leaves one out.
#
# Data parallelism and ZeRO deal out samples; every device computes whole layers. **Tensor
# parallelism** deals out a layer's matrices: t devices work on the same tokens, each with a t-th of
# the weights. What does one rank know then, and what must it be told? An MLP, GELU(x A) B, on two
# ranks, cut in three ways:

# %%
import numpy as np
import pandas as pd

import paralab as pl
from paralab import view
from paralab.theory import tensor


def mlp(group, cut):
    import torch
    from torch.nn.functional import gelu

    torch.manual_seed(0)
    x, A, B = torch.randn(16, 64), torch.randn(64, 256) / 8, torch.randn(256, 64) / 16
    x, A, B = (tensor.to(group.context.device) for tensor in (x, A, B))
    t, r = group.size, group.index
    if cut == "A by columns, B by rows":
        z = gelu(x @ A.chunk(t, 1)[r]) @ B.chunk(t, 0)[r]  # one of t terms of a sum
        group.all_reduce(z).wait()
    else:
        inside = x.chunk(t, 1)[r] @ A.chunk(t, 0)[r]  # one of t terms too, before GELU
        if cut == "A by rows, B by columns":
            group.all_reduce(inside).wait()
            parts = x.new_empty(t * 16, 64 // t)
            group.all_gather(parts, gelu(inside) @ B.chunk(t, 1)[r]).wait()
            z = torch.cat(parts.chunk(t), dim=1)
        else:
            z = gelu(inside) @ B
            group.all_reduce(z).wait()
    return (z - gelu(x @ A) @ B).abs().max().item()


rows = []
for cut in ("A by columns, B by rows", "A by rows, B by columns", "A by rows, summed after GELU"):
    report = pl.trace(mlp, ranks=2, args=(cut,))
    calls = report.collectives.query("rank == 0")
    rows.append(
        {
            "": cut,
            "right": max(report.results) < 1e-5,
            "calls": ", ".join(calls.op),
            "kB sent": calls.wire_bytes.sum() / 1e3,
        }
    )
pd.DataFrame(rows).set_index("")

# %% [markdown]
# By **columns**, a rank has all of *its* outputs, and GELU can be taken of them. By **rows**, it
# has one term of a sum for *every* output, and GELU(a) + GELU(b) is not GELU(a + b). So the first
# matrix is cut by columns, the second by rows: what is between them never travels, and one
# all-reduce ends the pair. Attention is such a pair too: a rank has whole heads (columns of qkv)
# and the rows of proj that belong to them.
#
# ## Commit to a guess
# Both pairs, forward *and* backward:

# %%
guess = pl.exercises.guess(
    "all-reduces per block and step", low=0, high=16, unit="calls", decimals=0
)
guess

# %% [markdown]
# ## Run it
# Four real processes, one model. Each has a quarter of every layer's matrices, and all tokens.

# %%
model = pl.ModelSpec(layers=3, hidden=128, heads=4, seq_len=64)
plan = pl.Plan(tp=4, microbatch_size=4)
report = pl.run(model, plan, steps=6)
report

# %% [markdown]
# ## See it
# One step, replayed with a device for each rank. All ranks do the same at the same time, and stop
# for one another again and again:

# %% tags=["measured"]
report.replay().timeline()

# %% [markdown]
# And what they send meanwhile:

# %%
report.traffic_chart()

# %% [markdown]
# ## Count it
# Every call of one rank in one step, out of the report:


# %%
def calls_of(report):
    """Calls and kB sent by rank 0 in the first step, by phase."""
    calls = report.collectives.query("rank == 0 and step == 0 and phase != 'setup'")
    table = calls.groupby(["phase", "op"], sort=False).agg(
        calls=("op", "size"), kB=("wire_bytes", lambda sent: sent.sum() / 1e3)
    )
    return table.round(1)


calls_of(report)

# %%
blocks = calls_of(report).loc[["linear_forward", "linear_backward"]]
per_block = int(blocks["calls"].sum()) / model.layers
guess.reveal(per_block)

# %% [markdown]
# Two forward: behind `proj` and behind `down`, where terms are added up. Two backward: before `qkv`
# and before `up`, because a rank that has some columns has only their part of the input's gradient.
# Megatron-LM calls the two ends of a pair *f* (nothing forward, all-reduce backward) and *g* (the
# other way round). A single layer therefore has [one call, not
# two](https://github.com/pytorch/pytorch/issues/157606): in backward if it is cut by columns, in
# forward if by rows. No weight and no gradient of one ever travels.
#
# What else is in the table: one call where the embedding, cut by entries of the vocabulary, comes
# together, one before the logits, and a small one in the loss (below).
#
# The formula, 2(t−1)/t · b s h elements for each, beside the ledger:

# %%
forward, backward = (
    sum(tensor.linear_elements(model, plan, role)[way] for role in tensor.ROLES) for way in (0, 1)
)
pd.DataFrame(
    {
        "formula (kB per block)": [4e-3 * float(elements) for elements in (forward, backward)],
        "counted": list(blocks["kB"] / model.layers),
    },
    index=["forward", "backward"],
).round(1)

# %% [markdown]
# These bytes do not shrink with t. Those of backward are hidden in part, as a weight's gradient is
# computed meanwhile; those of forward are not, as the next layer needs the sum at once. That is the
# price. The gain is memory:

# %%
kept = {}
for t in (1, 2, 4):
    run = report if t == 4 else pl.run(model, plan.replace(tp=t), steps=1, progress=False)
    kept[f"t={t}"] = run.memory.groupby("category")["bytes"].max()[["parameters", "optimizer"]]
(pd.DataFrame(kept) / 1e6).round(2).add_suffix(" (MB)")

# %% [markdown]
# A little more than a t-th: norms, positions and the biases behind a sum are small, and all ranks
# have them whole.
#
# ## The logits stay where they are
# The last activation is a large one, b s V logits, and is cut by columns as well. Gathering it
# would be the natural thing to do. But a cross-entropy needs only log Σ exp over V, which is put
# together from the ranks' own, and the target's logit, which one rank has: two numbers per token.

# %%
rows = []
for name, b, s, vocab, t in (("this run", 4, 64, model.vocab, 4), ("22 B", 4, 2048, 51200, 8)):
    rows.append(
        {
            "": name,
            "tokens": b * s,
            "vocabulary": vocab,
            "all logits (kB)": f"{4e-3 * (t - 1) / t * b * s * vocab:,.1f}",
            "two numbers (kB)": f"{4e-3 * (t - 1) * 2 * b * s:,.1f}",
        }
    )
counted = calls_of(report).loc["loss_forward", "kB"].sum()
print(f"counted in this run: {counted} kB per rank")
pd.DataFrame(rows).set_index("")

# %% [markdown]
# (22 B is a model of Korthikanti and others; more about it in a moment.)
#
# ## Sequence parallelism
# Between the pairs are norms, dropout and sums. There every rank does the same work on the same
# tokens and keeps the same activations, t times over. An all-reduce *is* a reduce-scatter and an
# all-gather; let the residual stream lie on the ranks in parts of the **sequence** between the two:

# %%
sequence = plan.replace(sequence_parallel=True)
parted = pl.run(model, sequence, steps=6, progress=False)
calls_of(parted)

# %%
ways = {"forward": "forward", "backward": "backward", "once per step": "shared"}
sums = {
    name: {
        way: calls_of(run).filter(like=ending, axis=0)["kB"].sum() for way, ending in ways.items()
    }
    for name, run in {"1D": report, "1D with sequence parallelism": parted}.items()
}
pd.DataFrame(sums).round(1).add_suffix(" (kB)")

# %% [markdown]
# Forward the bytes are the same, to the last one. Backward has more: what was gathered in forward
# was not kept, or it would not be a t-th, so it is gathered again. (Megatron-LM hides that call
# behind the one product that does not need it.) In return the activations take less memory. Their
# maximum, as the program says it before anything runs and as the ledger measured it:

# %% tags=["measured"]
rows = {}
for name, run in {
    "one device": pl.run(model, pl.Plan(microbatch_size=4), steps=1, progress=False),
    "1D, t=4": report,
    "1D with sequence parallelism, t=4": parted,
}.items():
    most = run.memory.query("rank == 0").groupby("category")["bytes"].max()
    rows[name] = {
        "activations by program": pl.program(model, run.plan).most()["activations"] / 1e6,
        "measured": most["activations"] / 1e6,
    }
pd.DataFrame(rows).T.round(2).add_suffix(" (MB)")

# %% [markdown]
# [Korthikanti and others](https://arxiv.org/abs/2205.05198) have this as formulas, in bytes per
# layer (table 2). Put in the models of their table 3, in 16 bits and with t = 8:

# %%
sizes = {  # a, h, s, b
    "22 B": (64, 6144, 2048, 4),
    "175 B": (96, 12288, 2048, 1),
    "530 B": (128, 20480, 2048, 1),
    "1 T": (160, 25600, 2048, 1),
}
table, t = {}, 8
for name, (a, h, s, b) in sizes.items():
    x, scores = s * b * h, 5 * a * s / h
    table[name] = {
        "no parallelism": x * (34 + scores),
        "tensor": x * (10 + 24 / t + scores / t),  # 10: norms, dropout, inputs of the pairs
        "tensor, sequence": x * (34 / t + scores / t),
        "tensor, selective recomputation": x * (10 + 24 / t),
        "tensor, sequence, selective": x * 34 / t,
        "full recomputation": x * 2,
    }
table = pd.DataFrame(table)
(table / 1e6).round().astype(int).add_suffix(" (MB)")

# %% [markdown]
# The 10 in the second row is what tensor parallelism alone cannot deal out. The paper's figure 7
# has the same in per cent of that row:

# %%
(100 * table / table.loc["tensor"]).iloc[2:].round(1).add_suffix(" (%)")

# %% [markdown]
# ## Is it the same training?
# One process, plain SGD, and dropout on:

# %%
noisy = model.replace(layers=2, dropout=0.1)
proof = {"optimizer": "sgd", "lr": 0.1, "steps": 2, "keep_state": True, "progress": False}
alone = pl.run(noisy, pl.Plan(microbatch_size=4), **proof)


def worst(split):
    """Largest error of a gradient, in parts of its largest entry."""
    return max(
        np.abs(alone.gradients[name] - split.gradients[name]).max()
        / np.abs(alone.gradients[name]).max()
        for name in alone.gradients
    )


for name, cut in {"1D": plan, "1D with sequence parallelism": sequence}.items():
    same = worst(pl.run(noisy, cut, **proof)) < 1e-5
    print(f"{name}: gradients equal to 1e-5 of their largest entry: {same}")

# %% [markdown]
# ## Predicted, replayed, measured
# Bytes agree call by call. The wall clock need not: where ranks share cores, with one another or
# with the threads that carry their messages, all wait in every call for the last one to come, and
# the step falls far behind the replay, which gives each rank a device of its own. With cores to
# spare it may even be ahead, for the replay's links are as fast as they were measured, and no
# faster.

# %% tags=["measured"]
expect = pl.predict(model, plan)
pl.compare(expect, report)

# %% tags=["measured"]
view.timelines(expect, report.replay(), labels=["theory", "replayed"], ranks=[0])

# %% [markdown]
# ## Why it stays inside a node
# Everything hangs on the link. Eight devices in two nodes of four, between which the link has a
# tenth of the speed. The same global batch, twice:

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
wide = pl.ModelSpec(
    layers=4, hidden=4096, heads=32, seq_len=2048, vocab=32000, attention="explicit"
)
rows = []
for name, split in (
    ("tp=4 inside, dp=2 across", pl.Plan(tp=4, dp=2, microbatch_size=2)),
    ("tp=8, across", pl.Plan(tp=8, microbatch_size=4)),
):
    expected = pl.predict(wide, split, nodes)
    by_level = expected.traffic(by="level").set_index("level")["bytes"] / 1e9
    summary = expected.summary()["value"]
    rows.append(
        {
            "": name,
            "inside a node (GB, all ranks)": by_level.get("intra", 0.0),
            "between nodes (GB, all ranks)": by_level.get("inter", 0.0),
            "step, predicted (ms)": 1e3 * expected.step_time,
            "of it waiting (ms)": summary["waiting"],
        }
    )
pd.DataFrame(rows).set_index("").round(1)

# %% [markdown]
# Nearly as many bytes on the slow link, and a much longer wait. Data parallelism sends gradients
# there, once a step and while backward goes on; tensor parallelism sends sums that the next layer
# waits for, and more of them with every sample. So t is rarely more than the number of devices in a
# node.
#
# ## Turn the knobs
# *Run it* starts real ranks.

# %%
view.widgets.tensor1d()

# %% [markdown]
# ## Break it: dropout
# Every rank draws masks. From the same seed as the others, or from one of its own? One pair of
# layers behind a dropout, L = ½|z|². Its gradient for x, beside the slope of L along a direction v,
# by a difference of two values:


# %%
def after_dropout(group, own_seeds):
    import torch
    from torch.nn.functional import dropout, gelu

    torch.manual_seed(0)
    shapes = (8, 16), (8, 16), (16, 32), (32, 16)
    x, v, A, B = (torch.randn(shape).double().to(group.context.device) for shape in shapes)
    A, B = (W.chunk(group.size, d)[group.index] / 4 for W, d in ((A, 1), (B, 0)))
    torch.manual_seed(1 + own_seeds * group.index)
    mask = dropout(torch.ones_like(x), 0.5)

    def pair(x):
        x = (x * mask).requires_grad_()
        own = gelu(x @ A) @ B
        z = own.detach().clone()
        group.all_reduce(z).wait()
        return x, own, z

    inside, own, z = pair(x)
    (of_x,) = torch.autograd.grad(own, inside, z)  # dL/dz = z
    group.all_reduce(of_x).wait()
    ahead, behind = (0.5 * pair(x + e * v)[2].square().sum() for e in (1e-5, -1e-5))
    return {"gradient · v": (of_x * mask * v).sum().item(), "slope": (ahead - behind).item() / 2e-5}


rows = []
for seeds in ("the same seed", "seeds of their own"):
    results = pl.trace(after_dropout, ranks=2, args=(seeds != "the same seed",)).results
    rows += [{"": seeds, "rank": rank, **of_rank} for rank, of_rank in enumerate(results)]
pd.DataFrame(rows).set_index(["", "rank"]).round(3)

# %% [markdown]
# With seeds of their own the ranks' copies of x are no copies any more. What they add up belongs to
# no model, and each has a gradient of its own, none of which is the slope.
#
# Under sequence parallelism it is the other way round. Each rank has tokens of its own, and from
# one seed all draw the same mask, for token 1 and for token s/t + 1:


# %%
def mask_of_own_tokens(group, own_seeds):
    import torch

    torch.manual_seed(1 + own_seeds * group.index)
    return torch.nn.functional.dropout(torch.ones(32, 128), 0.5)


for seeds in ("the same seed", "seeds of their own"):
    first, second = pl.trace(mask_of_own_tokens, 2, args=(seeds != "the same seed",)).results
    print(f"{seeds}: {100 * (first == second).mean():.0f} % of the ranks' masks are alike")

# %% [markdown]
# So a rank needs two streams of random numbers: one in common for what lies whole on all ranks, one
# of its own for what is dealt out (also for the scores of *its* heads). The runs here draw the mask
# that one device would draw and keep their part. It costs time, and it is how the gradients above
# could be equal with dropout on.
#
# ## Break it: LayerNorm
# A norm's weights are on all ranks. With sequence parallelism each rank sees only its own tokens,
# so it has only their part of the gradient: the row *shared* in the table of calls above adds the
# parts up. People [ask why](https://github.com/NVIDIA/Megatron-LM/issues/443) that is necessary.
# Leave it out. A plan takes passes of your own (lab 02), functions that change the program of a
# rank, and this one drops the only instruction of the phase *shared*:


# %%
def forget_norms(program):
    return program.replace(ins for ins in program.code if ins.phase != "shared")


try:
    pl.run(model, sequence.replace(passes=(forget_norms,)), progress=False)
except ValueError as refused:
    print(refused)

# %% [markdown]
# The program is refused before a process starts. The checks know for every value of a program over
# which axes it is a partial sum, one to which other ranks still have to add their terms, and this
# update would read a partial sum. A trainer without such a check goes on. Here is one by hand, with
# one norm and one layer, on two ranks that have half of the tokens each:


# %%
def train_norm(group, add_up, steps):
    import torch

    torch.manual_seed(0)
    x, shape = torch.randn(64, 32), torch.linspace(0, 2, 32)
    wanted = (x * shape) @ torch.randn(32, 32) / 6  # the norm's weights can learn `shape`
    norm, layer = torch.nn.LayerNorm(32), torch.nn.Linear(32, 32)
    everything = [*norm.parameters(), *layer.parameters()]
    update = torch.optim.AdamW(everything, lr=1e-2)
    own = slice(group.index * 64 // group.size, (group.index + 1) * 64 // group.size)  # its tokens
    losses, first = [], None
    for _ in range(steps):
        loss = (layer(norm(x[own])) - wanted[own]).square().sum() / wanted.numel()
        update.zero_grad()
        loss.backward()
        for parameter in everything if add_up else layer.parameters():
            group.all_reduce(parameter.grad).wait()
        first = norm.weight.grad.clone() if first is None else first
        update.step()
        losses.append(loss.item())
    return losses, norm.weight.detach(), first


[(_, _, right)] = pl.trace(train_norm, ranks=1, args=(True, 1)).results
drift = {}
for name, add_up in (("added up", True), ("forgotten", False)):
    losses, norms, first = zip(
        *pl.trace(train_norm, ranks=2, args=(add_up, 200)).results, strict=True
    )
    losses = np.sum(losses, axis=0)
    drift[name] = {
        "loss, first step": losses[0],
        "loss, last step": losses[-1],
        "ranks' norms differ by up to": np.abs(norms[0] - norms[1]).max(),
        "their first gradient wrong by (%)": 100
        * np.abs(first[0] - right).max()
        / np.abs(right).max(),
    }
pd.DataFrame(drift).T.round(2)

# %% [markdown]
# The loss falls as far, and no error is raised. The ranks have [different
# norms](https://github.com/NVIDIA/Megatron-LM/issues/474) now, and which of them a checkpoint has
# depends on who writes it. [Gradients that differ from rank to
# rank](https://github.com/NVIDIA/Megatron-LM/issues/1446) are right before that sum, and wrong
# after it. One look at the first step's, beside those of one process, tells.
#
# ## A part of every checkpoint
# With full recomputation a block keeps its input alone, and all tensor-parallel ranks keep the same
# one. ZeRO-R's P<sub>a</sub> deals it out: each rank keeps a t-th, and they gather it when backward
# comes to the block.

# %% tags=["measured"]
rows = []
for name, more in {
    "all kept": {},
    "full recomputation": {"recompute": "full"},
    "... and a part of each": {"recompute": "full", "partition_activations": True},
}.items():
    run = pl.run(model, plan.replace(**more), steps=1, progress=False)
    calls, kept = calls_of(run), run.memory.groupby("category")["bytes"].max()
    rows.append(
        {
            "": name,
            "kept at most (MB)": kept["activations"] / 1e6,
            "sent (kB)": calls["kB"].sum(),
            "all-reduces per block": calls.filter(like="linear", axis=0)["calls"].sum()
            / model.layers,
            "all-gathers per block": calls.filter(like="recompute", axis=0)["calls"].sum()
            / model.layers,
        }
    )
pd.DataFrame(rows).set_index("").round(2)

# %% [markdown]
# Its price is one all-gather per block, half an all-reduce. Recomputation itself has a price that
# is easily forgotten: the block's forward runs again, *with its two all-reduces*. (Most of what is
# left here is one block at work.) For a model that is worth it, by formula:

# %%
from paralab.theory import activation_costs

a, h, s, b = sizes["22 B"]
large = pl.ModelSpec(layers=48, hidden=h, heads=a, seq_len=s, vocab=51200, attention="explicit")
rows = {}
for name, share in (("whole on every rank", 1), ("a part on each", 8)):
    per_block = activation_costs.layer_bytes(large, b, recompute="full") / share
    rows[name] = {
        "a block keeps (MB)": per_block / 1e6,
        "all blocks (GB)": large.layers * per_block / 1e9,
    }
pd.DataFrame(rows).T.round(2)

# %% [markdown]
# ## Your turn

# %%
exercise = pl.exercises.tensor_mlp
exercise


# %%
### ANSWER: tensor_mlp


exercise.check(MyMLP)

# %% [markdown]
# Stuck? `exercise.hint()` gives one push at a time, `exercise.solution()` shows an answer.

# %% [markdown]
# ## On your GPUs
# The same cells: ranks then use NCCL, and the measured clock is the honest one. On devices that
# share a fast link (NVLink) see in `report.timeline()` how much of a step the gaps between two
# products take, and make `hidden` larger until they no longer matter: work per block grows with its
# square, the sums with it alone.
#
# ## Read on
# * Shoeybi and others 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053), sec. 3: columns, rows,
#   f and g, the embedding and the loss in parts. Korthikanti and others 2022, [Reducing activation
#   recomputation](https://arxiv.org/abs/2205.05198), sec. 4: sequence parallelism, table 2.
#   Rajbhandari and others 2020, [ZeRO](https://arxiv.org/abs/1910.02054), sec. 6.1: P<sub>a</sub>.
# * In the package: `paralab/parallel/tensor_parallel.py` (the four operators come first),
#   `paralab/model/ops.py` with the layers, `paralab/programs/sums.py`, which finds a forgotten sum,
#   and `paralab/theory/tensor.py` with the formulas.
