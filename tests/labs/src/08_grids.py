# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 08 · Grids: a matrix cut both ways
#
# **The tensor parallelism of lab 07 replicates a layer's input on all ranks, and its all-reduces do
# not shrink with t. Can every matrix be cut in both directions, and for how many tokens does this
# pay?**
#
# No framework that most GPU users have ships such layouts. They are worth learning for the question
# that they answer: when is it better to send weights, and when activations?
#
# **You will be able to**
# * compute a matrix product from blocks on a q × q grid, forward and backward, in plain PyTorch;
# * derive what 1D, 2D, 2.5D and 3D send, and check it against real ranks to the byte;
# * derive above how many tokens a grid sends less than 1D, and which plan it has to be compared
#   with;
# * make process groups for the rows and columns of a grid.
#
# **You need** labs 01 and 07; products of block matrices. **Minutes**: 90–120, of which 50 for the
# exercises.

# %%
import numpy as np
import pandas as pd

import paralab as pl
from paralab import view
from paralab.theory import tensor, tensor_costs

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
grid = pl.Plan(tp=4, tp_mode="2d", microbatch_size=4)
view.blocks(grid)

# %% [markdown]
# Compare this picture with the first one of lab 07. There each rank had a t-th of the weight and
# *all* of the input. Here rank (i, j) of a q × q grid has one block of every matrix: 1/q² of X,
# of W and of Y. Nothing is replicated. What must be sent so that each rank can compute its block
# of Y?
#
# | symbol | meaning |
# |---|---|
# | q, d | side of a grid; number of grids (2.5D) |
# | t | ranks of the tensor-parallel group: q², d q² or q³ |
# | X, W, Y | input (M × K), weight (K × N) and output (M × N) of a linear layer, Y = X W |
# | b, s, h | samples per micro-batch, tokens per sample, hidden size |
# | M = b s | tokens of a micro-batch (in other labs M stands for bytes of memory) |
# | E | elements that one rank sends, on average: all ranks together send t E |
# | S | elements of a whole matrix where all three are square (in lab 07 S stands for bytes) |
#
# ## Block (i, j) needs a row of X and a column of W
# $$Y_{ij} = \sum_{l=0}^{q-1} X_{il}\,W_{lj}$$
#
# Rank (i, j) needs q blocks of X, those of its row of ranks, and q blocks of W, those of its
# column. SUMMA ([van de Geijn and Watts
# 1997](https://doi.org/10.1002/(SICI)1096-9128(199704)9:4%3C255::AID-CPE250%3E3.0.CO;2-2)) sends
# them one at a time. In step l the ranks of column l broadcast their $X_{il}$ along their rows,
# the ranks of row l broadcast their $W_{lj}$ along their columns, and every rank adds one product
# to its $Y_{ij}$. Move the slider, or press play (the second picture shows the second step; blocks
# that are not sent in a step are pale):

# %%
view.multiplication(grid)

# %%
view.multiplication(grid, step=1)

# %% [markdown]
# Every rank sees all blocks of its row of X and of its column of W, but only one of each at a
# time. So the additional memory is two blocks, and no partial sum is ever sent in forward.

# %%
forward_guess = pl.exercises.guess(
    "elements sent by all 4 ranks in forward, in percent of the elements of X and W together",
    low=0,
    high=400,
    unit="%",
    decimals=0,
)
forward_guess

# %% [markdown]
# ## The groups of a grid
# A broadcast along a row needs a process group of that row. `dist.new_group` is a collective:
# every rank calls it for every group, in the same order. Rank i q + j stands in row i and column
# j.

# %%
warm_up = pl.exercises.grid_groups
warm_up


# %%
### ANSWER: grid_groups


grouped = pl.exercises.grid_groups.check(row_and_column)
grouped

# %% [markdown] tags=["solution-only"]
# **Why it works.** `dist.new_group` is itself a collective: all ranks of the world take part in
# making each group. **Common mistakes**: each rank makes only its own row and column, so that
# ranks wait for each other with different groups; row and column exchanged; lists of ranks
# returned instead of groups. **A second solution**:

# %% tags=["solution-only"]
### ANSWER: grid_groups_other


pl.exercises.grid_groups.check(row_and_column)

# %% [markdown]
# ## SUMMA sends (q−1)(MK + KN) in forward and twice as much in backward
# All ranks together: a block of X has MK/q² elements, and a broadcast to q ranks sends it q − 1
# times. In each of q steps there are q rows of ranks, so
#
# $$\underbrace{q}_{\text{steps}}\cdot\underbrace{q}_{\text{rows}}\cdot(q-1)\frac{MK}{q^2} = (q-1)MK
# \qquad\text{and likewise } (q-1)KN \text{ for } W.$$
#
# Backward starts from ∂Y, the gradient of the loss with respect to Y; ∂X and ∂W are those with
# respect to X and W (`dy`, `dX`, `dW` in the exercise). Take the derivative of $Y = XW$ and write
# it in blocks:
#
# $$\partial X = \partial Y\,W^\top:\quad
# \partial X_{il} = \sum_{j} \partial Y_{ij}\,W_{lj}^\top
# \qquad\qquad \partial W = X^\top \partial Y:\quad
# \partial W_{lj} = \sum_{i} X_{il}^\top\,\partial Y_{ij}$$
#
# In step l, $W_{lj}$ is broadcast along the columns and the terms of $\partial X_{il}$ are
# *reduced* along the rows to rank (i, l): (q−1)(KN + MK) elements over all steps. For ∂W, $X_{il}$
# is broadcast along the rows and the terms of $\partial W_{lj}$ are reduced along the columns to
# rank (l, j): again (q−1)(MK + KN).
#
# $$t\,E_\text{forward} = (q-1)(MK + KN)\qquad t\,E_\text{backward} = 2(q-1)(MK + KN)$$

# %%
q, M, K, N = 2, 128, 64, 256
forward = (q - 1) * (M * K + K * N)
print(f"forward {forward:,} elements, backward {2 * forward:,}, by all {q * q} ranks")
forward_guess.reveal(100 * forward / (M * K + K * N))

# %% [markdown]
# **Implement** it.

# %%
exercise = pl.exercises.summa
exercise


# %%
### ANSWER: summa


verdict = pl.exercises.summa.check(MySumma)
verdict

# %% [markdown] tags=["solution-only"]
# **Why it works.** All three products are one loop; only what is broadcast and what is reduced
# changes. **Common mistakes**: the root given as its number in the group where the global rank is
# meant (`src` against `group_src`); receiving into x or w, which the next step needs; y
# overwritten instead of added to; an all-reduce where only one rank needs the sum; gathering the
# whole row, which sends as much but holds q blocks. **A second solution** starts both broadcasts
# of a step before it waits for either:

# %% tags=["solution-only"]
### ANSWER: summa_other


pl.exercises.summa.check(MySumma)

# %% [markdown]
# ## 2.5D and 3D: copies of W, or a cube
# **2.5D** has d grids, each with a d-th of the tokens and a whole copy of W. It replicates W d
# times; with the same t the grids are smaller (q² = t/d), so less of X is sent: (q−1) MK with a
# smaller q. Here t = 8 is d = 2, q = 2; t = 64 is d = 4, q = 4. The product needs no messages
# between the grids, and the d copies of the gradient of W are all-reduced once per step. (This is
# the 2.5D of [Tesseract](https://arxiv.org/abs/2105.14500). That of [Solomonik and Demmel
# 2011](https://doi.org/10.1007/978-3-642-23397-5_10) divides the terms of the sum among the grids,
# and then adds up Y.) In the picture X′ has the tokens of the second grid:

# %%
deep = pl.Plan(tp=8, tp_mode="2.5d", microbatch_size=4)
view.multiplication(deep, step=1)

# %%
grids = pl.exercises.choose(
    "Compared with the one grid of 4 ranks above, these two grids together send in forward",
    [
        "as many elements of X and twice as many of W",
        "twice as many elements of X and of W",
        "half as many elements of X and as many of W",
    ],
)
grids

# %%
q, M, K, N = 2, 128, 64, 256  # the sizes of the product above
for d in (1, 2):
    of_x, of_w = d * (q - 1) * M // d * K, d * (q - 1) * K * N  # M/d tokens in each of d grids
    print(f"d = {d}: {of_x:,} elements of X, {of_w:,} of W")
grids.reveal(1, "Each grid has half of the tokens, and all of W.")

# %% [markdown]
# **3D** arranges the ranks as a cube of q × q × q, with sides i, j and k: rank i q² + j q + k is at
# (i, j, k). X is gathered along one side, W along another, every rank multiplies once, and Y is
# reduced and scattered along the third side. In the pictures below {0, 2} gather X along j, {0, 4}
# gather W along i, and {0, 1} add Y along k. What has no part in a step is pale:

# %%
cube = pl.Plan(tp=8, tp_mode="3d", microbatch_size=4)
view.multiplication(cube)

# %%
view.multiplication(cube, step=3)

# %%
view.multiplication(cube, step=4)

# %% [markdown]
# The output of a 3D layer has another layout than its input. The next layer uses the transposed
# layout, so no redistribution is needed. Counted as above, all ranks together send in forward
#
# * under 2.5D d times what a grid sends with M/d tokens: d (q−1)(MK/d + KN);
# * under 3D (q−1) MK for X, since each of q³ ranks sends (q−1)/q of a gathered block, which has
#   MK/q² elements; likewise (q−1) KN for W, and (q−1) MN for the sums of Y.
#
# Backward under 3D gathers ∂Y, and reduces and scatters ∂X and ∂W. It needs X and W again: they
# were kept, which takes memory. Under 2D they are broadcast again. So t E, the elements of all
# ranks together, is
#
# | | forward | backward |
# |---|---|---|
# | 1D, column-parallel | $0$ | $2(t-1)MK$ |
# | 1D, row-parallel | $2(t-1)MN$ | $0$ |
# | 2D | $(q-1)(MK+KN)$ | $2(q-1)(MK+KN)$ |
# | 2.5D | $(q-1)(MK+d\,KN)$ | $2(q-1)(MK+d\,KN) + 2(d-1)KN$ |
# | 3D | $(q-1)(MK+KN+MN)$ | $(q-1)(MK+KN+MN)$ |

# %%
doubled = pl.exercises.choose(
    "With twice as many tokens, which of these sends twice as many elements?",
    ["only 1D", "only the grids (2D, 2.5D, 3D)", "all of them"],
)
doubled

# %%
doubled.reveal(1, "Every grid also sends weights, KN, whose number does not grow with M.")

# %% [markdown]
# ## Real ranks send exactly that
# A small GPT on one process, then on 4 and on 8 real ranks. This is what 2D changes in the program
# of a rank, for one block:

# %%
one_block = pl.ModelSpec(layers=1, hidden=64, heads=8, seq_len=32)
in_columns = pl.program(one_block, pl.Plan(tp=4, microbatch_size=4))
in_columns.diff(pl.program(one_block, grid))

# %% [markdown]
# Under 1D a block stops for messages between its pieces. Under 2D it is one instruction. SUMMA
# broadcasts and reduces *inside* each product, and each norm adds up its means over a row of the
# grid, as no rank has all $h$ numbers of a token. The next table counts all these calls, and the
# bytes of the linear layers of blocks. Between the instructions one all-reduce per step is left:
# the norms, the biases and the positions are replicated along the columns of the grid (`tp:col`),
# so their gradients are summed there. First: is it the same training?

# %%
model = pl.ModelSpec(layers=2, hidden=64, heads=8, seq_len=32)
settings = {"optimizer": "sgd", "lr": 0.1, "steps": 2, "keep_state": True, "progress": False}
plans = {
    "1D on 4": pl.Plan(tp=4, microbatch_size=4),
    "2D on 4": grid,
    "1D on 8": pl.Plan(tp=8, microbatch_size=4),
    "2.5D on 8": deep,
    "3D on 8": cube,
}
alone = pl.run(model, pl.Plan(microbatch_size=4), **settings).gradients
reports = {name: pl.run(model, plan, **settings) for name, plan in plans.items()}
for name, report in reports.items():
    worst = max(
        np.abs(alone[n] - report.gradients[n]).max() / np.abs(alone[n]).max() for n in alone
    )
    print(f"{name:<9} gradients equal to 1e-5 of their largest entry: {worst < 1e-5}")


# %%
small = pl.exercises.choose(
    "On four ranks, with hidden size 64 and 128 tokens, 2D sends",
    ["less than half of what 1D sends", "less than 1D, but more than half", "more than 1D"],
)
small


# %%
def formula(plan):
    """(forward, backward) kB per rank and step of all linear layers in the blocks."""
    layers = [tensor.linear_elements(model, plan, role) for role in tensor.ROLES]
    depth = sum(tensor.depth_elements(model, plan, role) for role in tensor.ROLES)
    forward, backward = (sum(way) for way in zip(*layers, strict=True))
    return [4e-3 * model.layers * float(way) for way in (forward, backward + depth)]


rows = {}
for name, report in reports.items():
    calls = report.collectives.query("step == 0")
    sent = calls.groupby("phase")["wire_bytes"].sum() / plans[name].tp / 1e3
    rows[name] = {
        "forward (kB)": sent["linear_forward"],
        "formula, forward": formula(plans[name])[0],
        "backward (kB)": sent["linear_backward"],
        "formula, backward": formula(plans[name])[1],
        "calls per rank": len(calls.query("rank == 0 and phase not in ['control', 'setup']")),
    }
pd.DataFrame(rows).T.round(2)

# %%
small.reveal(3, "With so few tokens the blocks of W are a large part of what it sends.")

# %% [markdown]
# The counts agree with the formulas. The grids make 69 to 124 calls per rank where 1D makes 11,
# each of them small. Where the latency of a call costs more time than its bytes, this decides (lab
# 01).
#
# ## Your SUMMA trains the GPT
# Put it into the reference GPT, on four real ranks. Each of the four linear layers in a block has
# its block of W, and makes its product with your `MySumma`. Everything around the products is
# replicated: a rank cuts its block out of X, and two all-gathers put Y together again on every
# rank. (The library leaves activations cut, and needs no gathers.)

# %%
gathers = pl.exercises.choose(
    "In forward, compared with the broadcasts of SUMMA, the all-gathers of Y send",
    ["about a tenth", "about half", "about twice as much"],
)
gathers


# %%
class OnTheGrid(torch.autograd.Function):
    """Y = X W, where X and Y are whole on every rank, and w is the rank's block of W."""

    @staticmethod
    def forward(ctx, x, w, layer):
        mine, ctx.layer = layer.cut(x), layer
        ctx.save_for_backward(mine, w)
        return layer.joined(layer.summa.forward(mine, w))

    @staticmethod
    def backward(ctx, dy):
        layer = ctx.layer
        dx, dw = layer.summa.backward(*ctx.saved_tensors, layer.cut(dy))
        return layer.joined(dx), dw, None


class GridLinear(torch.nn.Module):
    def __init__(self, whole, row, column):
        super().__init__()
        self.row, self.column, self.summa = row, column, MySumma(row, column)
        self.weight = torch.nn.Parameter(self.cut(whole.weight.detach().t()))
        self.bias = whole.bias

    def forward(self, x):
        y = OnTheGrid.apply(x.flatten(0, 1), self.weight, self)
        return y.unflatten(0, x.shape[:2]) + self.bias

    def cut(self, whole):
        """Block (i, j) of it, which this rank holds."""
        for dim, group in enumerate((self.column, self.row)):
            whole = whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
        return whole.clone(memory_format=torch.contiguous_format)

    def joined(self, block):
        """All blocks as one matrix, on every rank."""
        for dim, group in ((1, self.row), (0, self.column)):
            parts = [torch.empty_like(block) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, block, group=group)
            block = torch.cat(parts, dim)
        return block


# %%
def own_gpt(spec, steps):
    gpt, groups = pl.reference.GPT(spec), row_and_column(2)
    for block in gpt.blocks:
        for part, names in ((block.attention, ("qkv", "proj")), (block.mlp, ("up", "down"))):
            for name in names:
                setattr(part, name, GridLinear(getattr(part, name), *groups))
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(steps):
        [(tokens, targets)] = pl.reference.batches(spec, step=step, microbatch_size=4)
        optimizer.zero_grad()
        loss = gpt(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


both = {"the library": reports["2D on 4"]}
if grouped and verdict:
    both["yours"] = pl.observe(own_gpt, ranks=4, args=(model, 2))
    same = np.allclose(both["yours"].losses, both["the library"].losses, rtol=1e-4)
    print("losses of your GPT and of the library's plan are equal to 1e-4:", same)
else:
    print("write row_and_column and MySumma first")


# %%
def in_layers(report):
    """kB that all ranks send in the blocks' linear layers, in the second step."""
    calls = report.collectives.query("step == 1 and op != 'recv'")
    way = calls["phase"].str.removeprefix("linear_")
    calls = calls[way.isin(["forward", "backward"])]
    return calls.groupby([way, "op"])["wire_bytes"].sum() / 1e3


pd.DataFrame({name: in_layers(report) for name, report in both.items()}).round(1)

# %%
gathers.reveal(3, "That is (t-1) MN = 3 MN elements; the broadcasts are (q-1)(MK + KN) = MK + KN.")

# %%
whole = pl.exercises.choose(
    "The blocks' weights are cut alike in both. What is larger with your layers?",
    ["parameters", "activations", "both", "neither"],
)
whole

# %% tags=["measured"]
view.memory_bars(both, title="The library shards activations between two products, too")

# %%
whole.reveal(3, "Between your products activations are replicated, and so are embedding and head.")

# %% tags=["measured"]
title = "Between two products the library gathers nothing, your ranks do"
view.timelines(*both.values(), labels=list(both), ranks=[0], step=1, title=title)

# %% [markdown]
# Once both exercises are solved, the cells above show your GPT. (*Ranks 0,1* are the row of rank
# 0, and *ranks 0,2* its column. The steps are drawn on this machine's wall clock, on which ranks
# also wait for a core.) Your broadcasts send exactly the bytes of the library's. Your reduces are
# listed as what gloo makes of them: a reduce-scatter, whose parts are then sent to the root.
# Together that is $1 + 1/q$ times the bytes of a reduce, here 1.5 times: gloo's price, not a
# mistake of yours. The all-gathers come on top, and replicated activations with them: a grid pays
# when everything between two products stays sharded as well.
#
# ## Memory: the grids shard the residual stream
# The highest peak of a step, on eight ranks:

# %% tags=["measured"]
ways = {name: reports[name] for name in ("1D on 8", "2.5D on 8", "3D on 8")}
sharded = pl.Plan(tp=8, microbatch_size=4, sequence_parallel=True)
ways["1D on 8, sequence parallel"] = pl.run(model, sharded, **settings)
view.memory_bars(ways, title="Grids and sequence parallelism shard what 1D replicates")

# %% [markdown]
# Under 1D the residual stream is replicated on all ranks. The grids shard it: under 2.5D a rank
# keeps about a third of the activations that it keeps under 1D. Sequence parallelism (lab 07)
# shards it too, and then 1D has the lowest peak of the four, because 2.5D keeps two copies of the
# weights, and 3D keeps blocks that it has gathered for backward.
#
# ## From how many tokens on does a grid send less?
# Now take the two layers of an MLP of GPT-3 (h = 12,288) on 64 ranks, forward and backward. The
# table of formulas is enough to compute the answer, but estimate it first:

# %%
many = pl.exercises.guess(
    "3D's elements per rank in percent of 1D's, with 64 sequences of 2048 tokens",
    low=0,
    high=400,
    unit="%",
    decimals=0,
)
many

# %%
gpt3 = pl.ModelSpec.preset("gpt3-175b")


def of_an_mlp(plan):
    """Million elements that a rank sends for an MLP of GPT-3, forward and backward."""
    each = [
        sum(tensor.linear_elements(gpt3, plan, role)) + tensor.depth_elements(gpt3, plan, role)
        for role in ("up", "down")
    ]
    return float(sum(each)) / 1e6


modes = {"1D": "1d", "2D": "2d", "2.5D": "2.5d", "3D": "3d"}
million = pd.DataFrame(
    {
        f"{batch} × 2048 tokens": {
            name: of_an_mlp(pl.Plan(tp=64, tp_mode=mode, microbatch_size=batch))
            for name, mode in modes.items()
        }
        for batch in (1, 8, 64)
    }
)
million.round().astype(int)

# %%
many.reveal(100 * million.loc["3D"].iloc[-1] / million.loc["1D"].iloc[-1])

# %% [markdown]
# 1D sends activations and nothing else. A grid also sends blocks of W, a cost that does not depend
# on the number of tokens: with one sequence it dominates, with 64 it is amortised. Each of the two
# layers has $MK + MN = 5Mh$ and $KN = 4h^2$, so with t = 64, for 3D q = 4,
#
# $$64\,E_\text{1D} = 4\cdot 63\,Mh = 252\,Mh \qquad
# 64\,E_\text{3D} = 2\cdot 2\cdot 3\,(5Mh + 4h^2) = 60\,Mh + 48\,h^2.$$
#
# They are equal where 192 M = 48 h: above M = h/4 = 3,072 tokens 3D sends less than 1D. Find the
# same number for 2D, where q = 8:

# %%
from_here = pl.exercises.guess(
    "2D sends less than 1D above M = ... h",
    low=0,
    high=4,
    unit="h",
    decimals=2,
)
from_here

# %%
q, t = 8, 64  # 4 (t-1) M h = 3 (q-1) (5 M h + 8 h²)
from_here.reveal(3 * (q - 1) * 8 / (4 * (t - 1) - 3 * (q - 1) * 5))

# %%
view.crossover(gpt3, 64, name="GPT-3")

# %% [markdown]
# The rings are where the lowest curve changes. 2D meets 1D at 1.14 h, 14,000 tokens, above the
# curve of 3D. Move the other parameters yourself; *Run it* starts real ranks:

# %%
view.widgets.tensor()

# %% [markdown]
# ## The plan to compare with: tp = 8 × dp = 8
# 1D is not used on 64 ranks in practice. The usual plan for 64 devices is tensor parallelism
# inside a node of 8 and data parallelism across 8 nodes. Each group of 8 has an eighth of the
# tokens, and the gradients of its weights, $8h^2/8$ elements per rank, are all-reduced across the
# nodes once per step:
#
# $$E_{8\times 8} = \underbrace{\frac{4(t-1)}{t}\cdot\frac{M}{8}\,h}_{t\,=\,8,\ \text{in a node}}
# + \underbrace{\frac{2(8-1)}{8}\cdot\frac{8h^2}{8}}_{\text{across nodes}}$$

# %%
fewest = pl.exercises.choose(
    "With 64 × 2048 tokens, a rank of GPT-3's MLP sends the fewest elements under",
    ["3D on 64 ranks", "2.5D on 64 ranks", "tp = 8 × dp = 8"],
)
fewest

# %%
h, rivals = gpt3.hidden, {}
for batch in (8, 64):
    M = batch * gpt3.seq_len
    inside, across = 4 * 7 / 8 * M / 8 * h / 1e6, 2 * 7 / 8 * h * h / 1e6
    rivals[f"{batch} × 2048 tokens"] = {
        "tp=8 × dp=8": inside + across,
        "of it across nodes": across,
        "best grid on 64": million.loc[["2D", "2.5D", "3D"], f"{batch} × 2048 tokens"].min(),
    }
pd.DataFrame(rivals).round().astype(int)

# %%
fewest.reveal(3, "It sends weights once, as gradients, and activations of an eighth of the tokens.")

# %% [markdown]
# With 64 sequences the usual plan sends less than every grid, and most of it stays inside a node.
# With 8 sequences, and one micro-batch per step, the best grid (3D) sends less in all, in many
# small calls and before the next layer can start, and a part of it through groups that span nodes.
# With two micro-batches of 8 sequences each per step it sends more: a grid sends W for each of
# them, the usual plan its gradients once (per micro-batch 220 million elements, and the grid 302).
# And the gradients across nodes can overlap with backward. What the grids still have is memory: tp
# = 8 × dp = 8 keeps an eighth of the weights per rank, the grids a 64th (2.5D with d = 4 a 16th).
# ZeRO-3 closes this gap (lab 05), but gathers the weights twice and reduce-scatters their gradients
# for every micro-batch. These are three halves of an all-reduce: 396 million elements across nodes
# each time, in place of 264 once per step. Then 8 sequences cost 484 million in all, more than the
# grid's 302, and 64 sequences 1,101, less than the grid's 1,623.
#
# ## Who ships this?
# Neither PyTorch, Megatron-LM nor DeepSpeed has a 2D, 2.5D or 3D tensor parallelism. In JAX one
# writes a layout and the compiler chooses the collectives:
# [MaxText](https://github.com/AI-Hypercomputer/maxtext) can cut a weight along both dimensions (its
# axes `tensor` and `tensor_transpose`), though not with SUMMA's broadcasts. Colossal-AI,
# which published all three, says of its present version: “[Currently the newest version of
# ColossalAI doesn't support 2.5D tensor
# parallelism](https://colossalai.org/docs/features/2p5D_tensor_parallel/)”, and its users
# [ask](https://github.com/hpcaitech/ColossalAI/issues/6380) when it will. The
# [documentation of MindSpore](https://www.mindspore.cn/docs/en/r2.5.0) (under parallel training)
# has a page on high dimension tensor parallelism, with 2D and 3D slices for its Ascend devices. So
# why learn it? SUMMA and Cannon's algorithm are how large matrix products are distributed in
# scientific computing, the rows and columns of a grid are the process groups of every multi-axis
# plan (lab 10), and the argument of the crossover decides whenever one can send either weights or
# activations.
#
# ## A published table in one unit
# The documentation of Colossal-AI prints the costs of a linear layer for
# [1D](https://colossalai.org/docs/features/1D_tensor_parallel),
# [2D](https://colossalai.org/docs/features/2D_tensor_parallel),
# [2.5D](https://colossalai.org/docs/features/2p5D_tensor_parallel/) and
# [3D](https://colossalai.org/docs/features/3D_tensor_parallel/). Its column “Communication
# (bandwidth)” reads, for 64 devices, as if 2D and 2.5D cost more than 1D. P is the number of
# devices there, our t. The page does not state a unit; we read S/q for 2D and 2.5D, and S for the
# others. Put the printed terms next to what the formulas above give for a square layer, M = K =
# N, in units of S per rank:

# %%
square = pl.ModelSpec(layers=1, hidden=64, heads=64, seq_len=64)
rows = {}
for mode, printed in tensor_costs.PRINTED.items():
    plan = pl.Plan(tp=64, tp_mode=mode, microbatch_size=1)
    ours = sum(tensor.linear_elements(square, plan, "proj"))
    ours += tensor.depth_elements(square, plan, "proj")
    rows[mode.upper()] = {
        "printed": printed,
        "value": float(tensor_costs.as_printed(mode, 64)),
        "its unit (S)": str(tensor_costs.unit(mode, 64)),
        "left out (S)": float(tensor_costs.left_out(mode, 64)),
        "in one unit (S)": float(tensor_costs.in_one_unit(mode, 64)),
        "our formula (S)": float(ours / 64**2),
    }
pd.DataFrame(rows).T

# %% [markdown]
# The last two columns agree with this reading of the units. In one unit, all three grids send
# less than half of what 1D does here. The row for 2.5D also leaves out the all-reduce of the
# copies' gradients.
#
# ## Leave out the sum over the copies
# In the program of a rank under 2.5D, these are the calls over the axis `tp:depth`:

# %%
pl.program(model, deep).filter(lane="tp:depth")

# %%
silent = pl.exercises.choose(
    "A trainer that leaves these calls out",
    [
        "stops with an error",
        "trains d different models",
        "trains with a learning rate d times lower",
    ],
)
silent

# %%
silent.reveal(2, "Each grid follows the gradient of its own tokens, like the norms of lab 07.")

# %% [markdown]
# No such trainer raises an error; [lab 07](07_tensor.ipynb) trains one small model with such a sum
# and without it. Here the program is refused before a process starts:


# %%
import textwrap


def forget_copies(program):
    return program.replace(ins for ins in program.code if ins.lane != "tp:depth")


try:
    pl.run(model, deep.replace(passes=(forget_copies,)), progress=False)
except ValueError as refused:
    print(textwrap.fill(str(refused), 100))

# %% [markdown]
# ## No broadcasts: Cannon's algorithm
# **Go further.** SUMMA needs broadcasts. In 1969 Cannon gave an algorithm in which every rank,
# after a first move, sends to its neighbours only. Let rank (i, j) use the terms of its sum in its
# own order, in step s the one with $l = i+j+s$ (here s counts steps, not tokens):
#
# $$Y_{ij} = \sum_{s=0}^{q-1} X_{i,\,i+j+s}\;W_{i+j+s,\,j}$$
#
# (all indices mod q). For step 0, row i of X first moves i places to the left and column j of W j
# places upwards; after that every message goes to a neighbour. From one step to the next each
# rank needs the block of X that its right neighbour has just used, and the block of W that the
# rank below has. So X moves to the left and W upwards:

# %%
q = 3
moves = [
    [f"X{i}{(i + j + s) % q} W{(i + j + s) % q}{j}" for j in range(q)]
    for s in range(q)
    for i in range(q)
]
index = pd.MultiIndex.from_product([range(q), range(q)], names=["step s", "row i"])
pd.DataFrame(moves, index=index, columns=[f"column {j}" for j in range(q)])

# %%
further = pl.exercises.cannon
further


# %%
### ANSWER: cannon


pl.exercises.cannon.check(cannon)

# %% [markdown] tags=["solution-only"]
# **Why it works.** After the first move rank (i, j) has $X_{i,i+j}$ and $W_{i+j,j}$, which have the
# same l, and every move keeps it so. A rank sends q blocks of X and q of W at most, and all ranks
# together (q−1)(1 + 1/q)(MK + KN) elements: half as many again as SUMMA for q = 2, and hardly more
# for a large q. After the first move every message uses one link. **Common mistakes**: no first
# move, or one of the two matrices only; X and W moving in opposite senses; receiving into the
# tensor that is being sent; a last move that no rank needs. **A second solution** moves one matrix
# at a time on rings:

# %% tags=["solution-only"]
### ANSWER: cannon_other


pl.exercises.cannon.check(cannon)

# %% [markdown]
# ## What to remember
# 1. Block (i, j) of a product needs one row of blocks and one column of blocks, one at a time.
# 2. In SUMMA all ranks together send (q−1)(MK + KN) elements in forward, twice as many in backward.
# 3. Grids send weights, whatever the number of tokens; 1D sends activations only.
# 4. Compare with what one would really run: tp = 8 × dp = 8 sends less than a grid on 64 ranks
#    once there are many tokens.
# 5. `dist.new_group` must be called by all ranks, for all groups, in the same order.
#
# | when | use |
# |---|---|
# | one node, or few tokens | 1D with sequence parallelism |
# | many nodes, many tokens | 1D inside a node, data parallelism or ZeRO across |
# | a matrix too large for a node, activations included | a grid |
#
# $$t\,E_\text{2D} = 3(q-1)(MK+KN)\qquad t\,E_\text{3D} = 2(q-1)(MK+KN+MN)\qquad
# t\,E_\text{1D, pair} = 4(t-1)Mh$$
#
# ## In PyTorch, DeepSpeed, Megatron
# In PyTorch a grid is a two-dimensional `DeviceMesh`, and DTensor can hold a matrix in blocks.
# What does it do when two such matrices are multiplied?

# %%
dtensor = pl.exercises.choose(
    "To multiply an X of 128 × 64 and a W of 64 × 256 in blocks, DTensor",
    [
        "broadcasts one block at a time, as SUMMA does",
        "gathers a row of blocks of X and a column of blocks of W",
        "gathers all of X and all of W",
    ],
)
dtensor


# %%
def block_product(q, m, k, n):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (q, q), mesh_dim_names=("column", "row"))
    X, W = torch.randn(m, k), torch.randn(k, n)
    x, w = (distribute_tensor(one, mesh, [Shard(0), Shard(1)]) for one in (X, W))
    y = (x @ w).redistribute(mesh, [Shard(0), Shard(1)])
    return float((y.full_tensor() - X @ W).abs().max()), tuple(y.to_local().shape)


seen = pl.observe(block_product, ranks=4, args=(2, 128, 64, 256))
print("right:", max(error for error, _ in seen.results) < 1e-3, seen.results[0][1])
calls = seen.collectives.query("rank == 0")
calls.assign(kB=calls["wire_bytes"] / 1e3)[["op", "axis", "kB"]]

# %%
dtensor.reveal(2, "These are the calls 4 and 5; then every rank multiplies once.")

# %% [markdown]
# The result is right, and its blocks have the shape that SUMMA's have. For the product each rank
# sends as many bytes as in SUMMA, but then holds q blocks of each matrix, where SUMMA holds one at
# a time. DTensor compares what each way would send, and for this shape it gathers both matrices.
# With many more tokens, such as M = 4096, it leaves X where it is, redistributes W, and gets Y as
# partial sums, which a reduce-scatter adds up. (The sends distribute X and W from rank 0, the last
# two calls gather Y for our comparison.) Megatron-LM and DeepSpeed have no grid for one layer;
# their “2D” and “3D” mean tensor × data (× pipeline) parallelism, the subject of lab 10.
#
# **On your GPUs** write `pl.set_default_device("cuda")` in the first cell. The 2D form was run with
# NCCL on one GPU that four ranks shared; on several GPUs nothing was run yet. Watch
# `report.timeline()`: SUMMA's broadcasts are many and small, and where latency counts for more than
# bytes, the few large all-reduces of 1D win even where they carry more.
#
# ## Read on
# * Van de Geijn and Watts 1997, SUMMA (linked above). Cannon 1969, *A cellular computer to
#   implement the Kalman filter algorithm*, thesis, Montana State University. Xu et al. 2021,
#   [Optimus](https://arxiv.org/abs/2104.05343), algorithms 1 to 3: 2D. Wang et al. 2021,
#   [Tesseract](https://arxiv.org/abs/2105.14500), section 3: 2.5D. Bian et al. 2021,
#   [3D](https://arxiv.org/abs/2105.14450).
# * PyTorch's [DTensor](https://docs.pytorch.org/docs/stable/distributed.tensor.html).
# * In the package: `paralab/parallel/layouts.py` (which rank holds what, one table per mode),
#   `paralab/model/grid_ops.py` (the layers of all three grids), `paralab/theory/tensor.py`.
