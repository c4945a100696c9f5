# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 08 · Grids: a matrix cut both ways
#
# *«I doubled tp. The weights halved, but each device still holds the whole residual stream, and the
# all-reduces are as large as before.»*
#
# 1D tensor parallelism (lab 07) cuts every **weight** in one direction, and keeps whole rows of
# **activations**. Can both be cut, in both directions? Yes, if a product can be computed from
# blocks. Here is one way, SUMMA, by hand, on four ranks in a 2 x 2 grid:

# %%
import numpy as np
import pandas as pd

import paralab as pl
from paralab import view
from paralab.theory import tensor, tensor_costs


def by_hand(group, x_blocks, w_blocks):
    import torch

    q = 2
    i, j = divmod(group.index, q)  # where this rank stands
    rows = [group.subgroup([a * q + b for b in range(q)], axis="row") for a in range(q)]
    columns = [group.subgroup([a * q + b for a in range(q)], axis="column") for b in range(q)]
    x, w = (torch.from_numpy(b[i, j]).to(group.context.device) for b in (x_blocks, w_blocks))
    y = x.new_zeros(x.shape[0], w.shape[1])
    for step in range(q):
        x_step = x if j == step else torch.empty_like(x)  # X[i, step], for all of row i
        rows[i].broadcast(x_step, root=i * q + step).wait()
        w_step = w if i == step else torch.empty_like(w)  # W[step, j], for all of column j
        columns[j].broadcast(w_step, root=step * q + j).wait()
        y += x_step @ w_step
    return y


random = np.random.default_rng(0)
M, K, N = 256, 64, 96
X = random.standard_normal((M, K), dtype=np.float32)
W = random.standard_normal((K, N), dtype=np.float32)


def cut(matrix):
    return np.array([np.hsplit(row, 2) for row in np.vsplit(matrix, 2)])


traced = pl.trace(by_hand, ranks=4, args=(cut(X), cut(W)))
Y = np.block([traced.results[:2], traced.results[2:]])
print("Y = X W:", np.allclose(Y, X @ W, atol=1e-4))
sent = traced.traffic()["bytes"].sum() / 4
print(f"elements sent by all ranks: {sent:,.0f}; (q-1)(MK + KN) = {M * K + K * N:,}")

# %% [markdown]
# All of its row of X and all of its column of W came through each rank, one block at a time, and
# none of it was kept. And nothing was *summed* on the way: what
# travels is what the product needs, blocks of X and of W.
#
# ## Commit to a guess
# There are four such ways: **1D**, **2D** (SUMMA on q x q ranks), **2.5D** (d grids of q x q, each
# with its own tokens) and **3D** (a cube of q x q x q). Take GPT-3's MLP on 64 devices. With one
# sequence of 2048 tokens, and with 64 of them: how many times as much as 1D does 3D send?

# %%
few = pl.exercises.guess(
    "3D's elements per rank, one sequence, in percent of 1D's",
    low=0,
    high=400,
    unit="%",
    decimals=0,
)
few

# %%
many = pl.exercises.guess(
    "3D's elements per rank, 64 sequences, in percent of 1D's",
    low=0,
    high=400,
    unit="%",
    decimals=0,
)
many

# %% [markdown]
# ## Who holds what
# The same layer, Y = X W, in all four. A rank has one colour; grey blocks are on several ranks.

# %%
plans = {
    "1D": pl.Plan(tp=8, microbatch_size=4),
    "2D": pl.Plan(tp=4, tp_mode="2d", microbatch_size=4),
    "2.5D": pl.Plan(tp=8, tp_mode="2.5d", microbatch_size=4),
    "3D": pl.Plan(tp=8, tp_mode="3d", microbatch_size=4),
}
view.blocks(plans["1D"])

# %%
view.blocks(plans["2D"])

# %%
view.blocks(plans["2.5D"])

# %%
view.blocks(plans["3D"])

# %% [markdown]
# 2.5D pays with copies of W for fewer bytes of X. In 3D, Y lies otherwise than X did: the next
# layer (`role="down"`) turns it back.
#
# ## One product, step by step
# SUMMA first. Move the slider, or press play.

# %%
view.multiplication(plans["2D"])

# %% [markdown]
# The last step as a plain picture, and the cube's fourth: each rank multiplies only once, with what
# it has gathered along two sides of the cube. What it gets is one term of a sum along the third.

# %%
view.multiplication(plans["2D"], step=1)

# %%
view.multiplication(plans["3D"], step=3)

# %%
view.multiplication(plans["3D"])

# %% [markdown]
# ## Run it
# A small GPT on one process, then on 4 and on 8 real ranks.

# %%
model = pl.ModelSpec(layers=2, hidden=64, heads=8, seq_len=32)
settings = {"optimizer": "sgd", "lr": 0.1, "steps": 2, "keep_state": True, "progress": False}
alone = pl.run(model, pl.Plan(microbatch_size=4), **settings)
runs = {
    "1D on 4": pl.Plan(tp=4, microbatch_size=4),
    "2D on 4": plans["2D"],
    "1D on 8": plans["1D"],
    "2.5D on 8": plans["2.5D"],
    "3D on 8": plans["3D"],
}
reports = {name: pl.run(model, plan, **settings) for name, plan in runs.items()}
for name, report in reports.items():
    worst = max(
        np.abs(alone.gradients[n] - report.gradients[n]).max() / np.abs(alone.gradients[n]).max()
        for n in alone.gradients
    )
    print(f"{name:<9} gradients equal to 1e-5 of their largest entry: {worst < 1e-5}")

# %% [markdown]
# ## Bytes
# What the linear layers' collectives sent, per rank and step, beside the formula of each mode:


# %%
def by_formula(plan):
    """(forward, backward) bytes per rank and step of all linear layers, the logits' aside."""
    layers = [tensor.linear_elements(model, plan, role) for role in tensor.ROLES]
    depth = sum(tensor.depth_elements(model, plan, role) for role in tensor.ROLES)
    forward, backward = (sum(way) for way in zip(*layers, strict=True))
    return 4 * model.layers * forward, 4 * model.layers * (backward + depth)


rows = {}
for name, report in reports.items():
    calls = report.collectives.query("step == 0")
    per_rank = calls.groupby("phase")["wire_bytes"].sum() / runs[name].tp
    forward, backward = by_formula(runs[name])
    rows[name] = {
        "forward (B)": per_rank["linear_forward"],
        "formula": float(forward),
        "backward (B)": per_rank["linear_backward"],
        "formula ": float(backward),
        "all else (B)": per_rank.drop(
            ["linear_forward", "linear_backward", "control", "setup"], errors="ignore"
        ).sum(),
        "calls per rank": len(calls.query("rank == 0 and phase not in ['control', 'setup']")),
    }
pd.DataFrame(rows).T.round(1)

# %% [markdown]
# To the byte. «All else» are logits, norms, embedding and loss. Two things to notice. On four ranks
# 2D has sent *more* than 1D: with so few tokens the weights that travel are not made up for (wait
# for the crossover). And the last column: the grids send several times as many messages, each of
# them small; where every message costs its latency, that is what decides (lab 01).
#
# ## Memory
# At the worst moment of a step, on the fullest rank, by category:

# %% tags=["measured"]
view.memory_bars(reports)

# %% [markdown]
# Weights and activations at their most on rank 0, kB, as the ledger saw them and as the program
# says:

# %%
rows = {}
for name, plan in runs.items():
    most = reports[name].memory.query("rank == 0").groupby("category")["bytes"].max()
    program = pl.program(model, plan, optimizer="sgd").most()
    rows[name] = {
        f"{category}{space}": found[category] / 1e3
        for category in ("parameters", "activations")
        for space, found in (("", most), (", program", program))
    }
pd.DataFrame(rows).T.round(1)

# %% [markdown]
# Again to the byte. 1D with twice the ranks: the weights nearly halve, and the activations fall by
# less than a quarter, because the residual stream stays whole. The grids cut both. 2.5D has nearly
# twice the weights of 3D (two copies), 3D nearly twice the activations of 2.5D (it keeps what it
# gathered). You choose what to pay with.
#
# ## The crossover
# Now at GPT-3's size, by the formula that was just right to the byte:

# %%
gpt3 = pl.ModelSpec.preset("gpt3-175b")
view.crossover(gpt3, 64, name="GPT-3")

# %%
rows = {}
for batch in (1, 64):
    for mode in ("1d", "2d", "2.5d", "3d"):
        plan = pl.Plan(tp=64, tp_mode=mode, microbatch_size=batch)
        elements = sum(
            sum(tensor.linear_elements(gpt3, plan, role)) + tensor.depth_elements(gpt3, plan, role)
            for role in ("up", "down")
        )
        rows.setdefault(f"{batch} x 2048 tokens", {})[mode.upper()] = round(float(elements) / 1e6)
million = pd.DataFrame(rows).T
million.add_suffix(" (million)")

# %%
share = (100 * million["3D"] / million["1D"]).round().tolist()
few.reveal(share[0])

# %%
many.reveal(share[1])

# %% [markdown]
# 1D sends activations and nothing else: few tokens, few bytes, and more ranks do not help. A grid
# also sends **weights**, whatever the number of tokens: dear for one sequence, soon forgotten for
# many. So the question «which is best?» has no answer without «with how many tokens?». What else it
# depends on, in one place; *Run it* starts real ranks.

# %%
view.widgets.tensor()

# %% [markdown]
# ## A published table, in one unit
# The documentation of a well-known library prints these costs for a linear layer:

# %%
printed = pd.DataFrame(tensor_costs.PRINTED.values(), index=tensor_costs.PRINTED)
printed[["processes", "parameters", "activations", "bandwidth", "latency"]]

# %% [markdown]
# For 64 devices the column «bandwidth» says that 2D and 2.5D cost more than 1D. But its rows count
# in different units: two of them in whole matrices (S elements), two in q-th parts of one. In S,
# per rank, and beside it what the formulas checked above give for a square layer:

# %%
square = pl.ModelSpec(layers=1, hidden=64, heads=64, seq_len=64)  # M = K = N = 64
rows = {}
for mode in tensor_costs.PRINTED:
    plan = pl.Plan(tp=64, tp_mode=mode, microbatch_size=1)
    ours = sum(tensor.linear_elements(square, plan, "proj"))
    ours += tensor.depth_elements(square, plan, "proj")
    rows[mode.upper()] = {
        "as printed": float(tensor_costs.as_printed(mode, 64)),
        "counts in (S)": str(tensor_costs.unit(mode, 64)),
        "left out (S)": float(tensor_costs.left_out(mode, 64)),
        "in one unit (S)": float(tensor_costs.in_one_unit(mode, 64)),
        "our formula (S)": float(ours / 64**2),
    }
pd.DataFrame(rows).T

# %% [markdown]
# All three grids send less than half of what 1D does here, not more. (And 2.5D's row forgets
# something: the sum of the weights' gradients over its copies.)
#
# ## Break it
# Forget it too. In 2.5D each grid has a copy of the weights, and the gradient of its own tokens. In
# the program of a rank these are the calls over the axis `tp:depth`:

# %%
pl.program(model, plans["2.5D"]).filter(lane="tp:depth")

# %% [markdown]
# A pass of your own leaves them out:


# %%
def forget_copies(program):
    return program.replace(ins for ins in program.code if ins.lane != "tp:depth")


try:
    pl.run(model, plans["2.5D"].replace(passes=(forget_copies,)), progress=False)
except ValueError as refused:
    print(refused)

# %% [markdown]
# No process starts: the check names the gradient and the axis. A trainer without such a check would
# raise no error, and its loss would fall. After the first update it would train two models, one per
# grid, as lab 07 has shown with norms. Only a comparison tells: of the copies with one another, or
# with one process, as above.
#
# ## Your turn

# %%
exercise = pl.exercises.summa
exercise


# %%
### ANSWER: summa


exercise.check(MySumma)

# %% [markdown]
# Stuck? `exercise.hint()` gives one push at a time, `exercise.solution()` shows an answer.

# %% [markdown]
# ## On your GPUs
# The same cells, with `tp=4` or 8. Watch `report.timeline()`: SUMMA's broadcasts are many and
# small. Where a message's latency counts for more than its bytes, 1D's few large all-reduces win
# although they carry more.
#
# ## Read on
# * Van de Geijn and Watts 1997, «SUMMA: scalable universal matrix multiplication algorithm». Xu and
#   others 2021, [Optimus](https://arxiv.org/abs/2104.05343), algorithms 1 to 3: 2D. Wang and others
#   2021, [Tesseract](https://arxiv.org/abs/2105.14500), sec. 3: 2.5D. Bian and others 2021,
#   [3D](https://arxiv.org/abs/2105.14450).
# * In the package: `paralab/parallel/layouts.py`, who holds what, one table per mode;
#   `paralab/model/grid_ops.py`, the layers of all three grids.
