# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 01 · Collectives
#
# **The question.** How many bytes leave my node in one step, between which ranks, and how do I
# read that from the log of NCCL, NVIDIA's library of collectives? ([NCCL
# #870](https://github.com/NVIDIA/nccl/issues/870) asks this.)
#
# **You will be able to**
# * say what each collective leaves on each rank, and derive the bytes that a rank sends for it;
# * write a ring all-reduce in plain PyTorch, with nothing but sends and receives;
# * predict the time of a collective from a latency and a bandwidth, and say when a ring is slow;
# * read NCCL's log: what was called, with how many bytes, over which links.
#
# **You need** PyTorch tensors, powers and logarithms; [lab 00](00_one_device.ipynb) for the words.
#
# **Minutes** 80 to 100: 40 of reading, 1 of running, the rest for three exercises.

# %%
import paralab as pl
from paralab import view

pl.set_default_device("cpu")  # "cuda" where every rank has a GPU
view.ring(4)

# %% [markdown]
# Four ranks (a **rank** is one process with one device) each hold a buffer, and all of them need
# the sum of the four. Each cuts its buffer into four chunks. In every step each rank sends one
# chunk to the next rank, and the number in a box says how many ranks' terms the chunk contains by
# then. After six steps every rank has the sum of every chunk. The rest of this lab is about this
# picture: why these steps, how many bytes they are, how long they take, and how PyTorch and NCCL
# use it.
#
# | symbol | meaning |
# |---|---|
# | N | ranks of a group |
# | k | ranks of a node; a **node** is one machine, with one device or several |
# | S | bytes of a tensor, always of the whole: of the gathered output, or of the full input |
# | q | pieces that a tensor is sent in |
# | h | hidden size of a transformer |
# | α | latency: seconds per message |
# | β | seconds per byte; 1/β is the bandwidth |
# | T | time of a call |
#
# ## What each collective leaves on each rank
#
# A **collective** is a call that all ranks of a group make together:
#
# | call | what rank r has afterwards |
# |---|---|
# | broadcast | the tensor of one rank, the source |
# | reduce | on one rank, the root: the sum of the tensors of all ranks |
# | all-reduce | the sum of the tensors of all ranks |
# | reduce-scatter | the r-th part of that sum |
# | all-gather | the parts of all ranks, one after the other |
# | all-to-all | the r-th part of the tensor of every rank |
#
# `pl.observe` runs a function on real processes, in each of which `torch.distributed` is ready, and
# writes down what they send. Here rank r starts with the numbers 10r, 10r + 1, 10r + 2, 10r + 3.

# %%
last = pl.exercises.guess(
    "the last number that rank 2 has after the all-to-all", low=0, high=40, decimals=0
)
last


# %%
def every_collective():
    import torch
    import torch.distributed as dist

    mine = torch.arange(4.0) + 10 * dist.get_rank()
    shown = {"before": mine}
    shown["broadcast"] = mine.clone()
    dist.broadcast(shown["broadcast"], src=0)
    shown["all_reduce"] = mine.clone()
    dist.all_reduce(shown["all_reduce"])
    shown["reduce_scatter"] = torch.empty(1)
    dist.reduce_scatter(shown["reduce_scatter"], list(mine.split(1)))
    parts = [torch.empty(1) for _ in range(4)]
    dist.all_gather(parts, shown["reduce_scatter"])
    shown["all_gather of that"] = torch.cat(parts)
    shown["all_to_all"] = torch.empty(4)
    dist.all_to_all_single(shown["all_to_all"], mine)
    return {name: [int(x) for x in tensor] for name, tensor in shown.items()}


# %%
import pandas as pd

observed = pl.observe(every_collective, ranks=4)
pd.DataFrame(observed.results).rename_axis("rank")

# %%
last.reveal(observed.results[2]["all_to_all"][-1])

# %% [markdown]
# The columns *all_reduce* and *all_gather of that* are equal: an all-reduce is a reduce-scatter,
# then an all-gather. ZeRO (lab 05) and sequence parallelism (lab 07) put work *between* the two
# halves, and so does the last exercise here.
#
# ## What a rank sends in an all-reduce, and why no algorithm sends less
#
# Four ranks all-reduce a buffer of 8 MB. How much does *each* rank have to send?

# %%
guess = pl.exercises.guess(
    "MB that each of 4 ranks sends to all-reduce 8 MB", low=0, high=40, unit="MB", decimals=0
)
guess

# %% [markdown]
# Count in the picture. Each half of the ring has $N-1$ steps, and in each a rank
# sends one chunk of $S/N$ bytes:
#
# $$\text{sent} = \underbrace{(N-1)\frac{S}{N}}_\text{reduce-scatter}
# + \underbrace{(N-1)\frac{S}{N}}_\text{all-gather} = 2\,\frac{N-1}{N}\,S.$$
#
# This is less than $2S$, however many ranks there are. Nor can the ranks send less on average, as
# long as only ranks add (some switches can add too). For each element, $N$ terms must become one,
# so $N-1$ times some rank sends away what it has; and $N-1$ ranks must learn the result, which
# takes $N-1$ more sends. That is $2(N-1)S$ bytes for all elements, $2(N-1)S/N$ per rank; the rank
# that sends the most cannot send less than this average (Patarasuk and Yuan,
# [2009](https://doi.org/10.1016/j.jpdc.2008.09.002), theorem 1).
#
# `pl.trace` runs a function that gets paralab's own `group` of ranks; the library's ring is in
# `paralab/parallel/collectives.py`. The ranks hold 1, 10, 100 and 1000, so 1111 is a complete sum.
# In this ring rank r ends the first half with chunk $(r + 1) \bmod N$. (A reduce-scatter must leave
# chunk r on rank r. For that, rank r would begin by sending chunk r − 1 in place of chunk r.)

# %%
MB = 10**6


def ring_8mb(group):
    import torch

    from paralab.parallel import collectives

    tensor = torch.full((2 * MB,), float(10**group.index))
    collectives.ring_reduce_scatter(group, tensor)
    between = [int(chunk[0]) for chunk in tensor.chunk(4)]
    collectives.ring_all_gather(group, tensor)
    return {"after the reduce-scatter": between, "after the all-gather": tensor.unique().tolist()}


ring = pl.trace(ring_8mb, ranks=4)
pd.DataFrame(ring.results).rename_axis("rank")

# %%
sent = ring.traffic().set_index("rank")["bytes"] / MB
print(f"2 (N-1)/N S = {2 * 3 / 4 * 8:.0f} MB, sent by each rank: {sent.to_list()}")
guess.reveal(sent[0])

# %% [markdown]
# You can write the second half. `warm_up.hint()` gives one hint at a time, `warm_up.solution()`
# shows an answer.

# %%
warm_up = pl.exercises.all_gather_half
warm_up


# %%
### ANSWER: all_gather_half


pl.exercises.all_gather_half.check(ring_all_gather)

# %% [markdown] tags=["solution-only"]
# **Why it works.** In step t a rank passes on what it
# received in step t − 1, so each chunk travels once around the ring. A chunk is a view of the
# tensor: what is received into it is in place.
#
# **Common mistakes.** Starting with chunk r instead of r + 1; a send that is waited for before the
# receive is posted (deadlock); receiving into a buffer and copying, which needs memory; sending the
# whole tensor.
#
# **A second answer** lets the chunks travel to the left.


# %% tags=["solution-only"]
### ANSWER: all_gather_half_other


pl.exercises.all_gather_half.check(the_other_way_round)

# %% [markdown]
# ## The volume of every collective, and what S is
#
# A formula for traffic must say which tensor it is about. S is the *whole*: what an all-gather
# returns, what a reduce-scatter is given. In an all-gather each rank sends $N-1$ *shards* of $S/N$
# bytes: its own to every other rank or, on a ring, its own once and the $N-2$ that it passes on:
#
# $$(N-1)\cdot\frac{S}{N} = \frac{N-1}{N}\,S.$$
#
# [distrifuser #10](https://github.com/mit-han-lab/distrifuser/issues/10) asks how the table of
# communication in a paper was computed. The maintainer counts $s(n-1)\cdot 2$ for a ring all-gather
# on n devices: there, s is the *elements* of one device's shard, with 2 bytes each. For an
# all-reduce the same answer counts with s for the whole tensor. Both agree with the table below,
# whose column *counted* was counted while the calls ran. Before you run it: rank 0 has 8 MB, and
# broadcasts them to three others. How much do the four ranks send, on average?

# %%
average = pl.exercises.guess(
    "MB that each of 4 ranks sends, on average, to broadcast 8 MB", low=0, high=16, unit="MB"
)
average

# %%
from paralab.theory.traffic import wire_bytes

S, N = 8 * MB, 4


def one_of_each(group):
    import torch

    whole = torch.ones(S // 4)
    part = torch.empty(S // 4 // group.size)
    group.all_reduce(whole).wait()
    group.reduce_scatter(part, whole).wait()
    group.all_gather(whole, part).wait()
    group.all_to_all(torch.empty_like(whole), whole).wait()
    group.broadcast(whole, root=0).wait()
    group.reduce(whole, root=0).wait()


calls = pl.trace(one_of_each, ranks=N).collectives
counted = calls.groupby("op")["wire_bytes"].sum() / N / MB
formulas = {
    "all_reduce": "2 (N-1)/N S",
    "reduce_scatter": "(N-1)/N S",
    "all_gather": "(N-1)/N S",
    "all_to_all": "(N-1)/N S",
    "broadcast": "(N-1)/N S on average",
    "reduce": "(N-1)/N S on average",
}
table = pd.DataFrame({"a rank sends": formulas, "counted (MB)": counted}).loc[list(formulas)]
table["formula (MB)"] = [
    sum(wire_bytes(op, S, N, rank, 0) for rank in range(N)) / N / MB for op in formulas
]
print("broadcast:", average.reveal(table.loc["broadcast", "counted (MB)"]))
table

# %%
fp16, n, shard = 2, 8, 1_000_000
by_shard, by_whole = shard * (n - 1) * fp16, wire_bytes("all_gather", n * shard * fp16, n)
print(f"s (n-1) 2 with s = {shard:,} elements: {by_shard:,} bytes; (N-1)/N S: {by_whole:,} bytes")

# %% [markdown]
# ## The call's name is not what is sent
#
# All counts so far were made where a call is made. Is that really what leaves the process? Ranks
# talk over TCP connections, and the kernel counts each byte on them. Ranks are held at a gate
# before and after each call while the counters are read. One call in the table is *native*, that is
# of `torch.distributed` itself; the others are paralab's. (Bytes of all four ranks together; the
# *ledger* is what paralab counts where a call is made; *ratio* is kernel over theory.)

# %%
native = pl.exercises.guess(
    "bytes of a native reduce-scatter on the kernel's counter, as a multiple of the formula's",
    low=0,
    high=5,
    unit="times",
)
native

# %% tags=["measured"]
from paralab.instruments.witness import witness

seen = witness(
    ranks=4, ops=("all_reduce", "all_gather", "reduce_scatter", "native reduce_scatter"), nbytes=S
)
seen

# %% tags=["measured"]
ratios = seen.set_index("op").ratio
within = (ratios.drop("native reduce_scatter") - 1).abs().max() < 0.02
print("the other calls: kernel and formula agree within 2 %:", bool(within))
native.reveal(ratios["native reduce_scatter"])

# %% [markdown]
# The last row: **gloo**, the backend of `torch.distributed` on CPUs, implements its
# reduce-scatter by all-reduces. (paralab's is an all-to-all and a local sum, which is why its row
# is right.)
#
# ### The paper says reduce-scatter, the log says all-reduce
# The same happens one level higher, in libraries. [DeepSpeed
# #264](https://github.com/deepspeedai/DeepSpeed/issues/264) expected one reduce-scatter of the
# gradients and one all-gather of the parameters, and saw in the log of ZeRO stage 1 all-reduces in
# backward and reduce-scatters after it.
# Later threads ([#5758](https://github.com/deepspeedai/DeepSpeed/issues/5758),
# [#7059](https://github.com/deepspeedai/DeepSpeed/issues/7059)) confirm that stages 1 and 2 call
# `all_reduce` there by default (and `reduce` with `"use_multi_rank_bucket_allreduce": false`).
#
# ZeRO stage 1 shards the optimizer states: each rank updates one part of the parameters and then
# needs the other parts (lab 05). The next cell compares two programs for two ranks (`dp=2`): plain
# data parallelism, which all-reduces the gradients (lab 02), and ZeRO-1 with the two calls of the
# paper. (The paper describes the all-gather in section 5.1, for stage 1, and the reduce-scatter in
# section 5.2, where gradients are sharded, too; stage 1 can use it as well. A bucket is what one
# call sends, `gshard` a rank's part of the gradients, `shard` its part of the weights `w`.)

# %%
small = pl.ModelSpec(layers=2, hidden=128, heads=4, seq_len=32)
pl.program(small, pl.Plan(dp=2)).diff(pl.program(small, pl.Plan(dp=2, zero_stage=1)))

# %% [markdown]
# PyTorch's own ZeRO-1 all-reduces the gradients, too, and then broadcasts the new parameters.
# How much more does it send than the two calls of the paper?

# %%
more = pl.exercises.guess(
    "bytes that PyTorch's ZeRO-1 sends, as a multiple of the paper's", low=0, high=4, unit="times"
)
more


# %%
def torch_zero_1(spec, steps):
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(pl.reference.GPT(spec))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in range(steps):
        for batch in pl.reference.batches(spec, step=step, rank=rank, ranks=ranks):
            model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()


gradients = 4 * small.num_params  # bytes
theirs = pl.observe(torch_zero_1, ranks=2, args=(small, 3)).traffic("op")
paper = pl.predict(small, pl.Plan(dp=2, zero_stage=1)).traffic("op")
for name, found in (("PyTorch", theirs), ("the paper", paper)):
    parts = found.set_index("op")["bytes"] / gradients
    print(f"{name}:", ", ".join(f"{op} {share:.2f}" for op, share in parts.items()), end=" ")
    print(f"→ {parts.sum():.2f} times the gradients, both ranks together")
more.reveal(theirs["bytes"].sum() / paper["bytes"].sum())

# %% [markdown]
# With $N = 2$ both ranks together send $2(N-1) = 2$ times the gradients for an all-reduce, and once
# ($N-1$) for the broadcast: 3 instead of 2. Both designs shard the optimizer states over the ranks.
# Which of the two a library has, you see from the calls in its log, not from the name ZeRO-1.
#
# ## How long does it take? Latency and bandwidth
#
# A message takes a fixed time α before its first byte arrives, and then β for each byte
# ([Hockney 1994](https://doi.org/10.1016/S0167-8191%2806%2980021-9); α and β are named as in
# [Thakur et al. 2005](https://doi.org/10.1177/1094342005051521)):
#
# $$T_\text{message} = \alpha + \beta\cdot\text{bytes}.$$
#
# A ring has $2(N-1)$ steps, in each of which all ranks send $S/N$ bytes at the same time:
#
# $$T_\text{ring} = 2(N-1)\left(\alpha + \beta\,\frac{S}{N}\right)
# = \underbrace{2(N-1)\,\alpha}_\text{latency}
# + \underbrace{2\,\frac{N-1}{N}\,\beta S}_\text{bytes}.$$
#
# The recorded messages of the ring above can be put on links of any speed: `replay` does that.

# %%
link = pl.Link(alpha=50e-6, bandwidth=1e9)  # 1/β = 1 GB/s
four = pl.Cluster(
    name="four devices", devices_per_node=4, flops=1e12, memory_bandwidth=1e12, intra=link
)
on_links = ring.replay(four, compute=0.0)  # computing takes no time here
print(f"T_ring = {1e3 * 6 * (link.alpha + S / 4 / link.bandwidth):.2f} ms by the formula")
print(f"         {1e3 * on_links.step_time:.2f} ms for the recorded messages on this link")

# %% [markdown]
# And your own machine? When paralab first measured it, it timed all-reduces of 1 kB to 8 MB; the
# red line is fitted to them. To the left of the circle latency is more than half of the time. (With
# fewer free cores than ranks, α is mostly waiting for a core.)

# %% tags=["measured"]
from paralab.instruments.calibrate import calibration_points

view.link_fit(calibration_points()["links"], op="all_reduce")

# %% [markdown]
# ### algbw and busbw
# `nccl-tests`, the usual benchmark, prints two bandwidths
# ([PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)).
# **algbw** is the bytes of the tensor over the time. Where all ranks send the same number of bytes,
# **busbw** is algbw times the bytes that a rank sends per byte of the tensor: it is the speed at
# which a rank sends, and can be compared with the bandwidth of a link, whatever N is. In a
# broadcast or a reduce the root sends or receives the whole tensor, and the factor is 1. (All this
# holds where the ranks add, as on a ring. Where switches add, as by default on nodes of H100s, a
# rank sends less, and [busbw can exceed](https://github.com/NVIDIA/nccl-tests/issues/212) what its
# links carry; `NCCL_ALGO=Ring` makes it comparable again.)
#
# $$\text{algbw} = \frac{S}{T}, \qquad
# \text{busbw}_\text{all-reduce} = 2\,\frac{N-1}{N}\cdot\frac{S}{T},
# \qquad \text{busbw}_\text{all-gather} = \frac{N-1}{N}\cdot\frac{S}{T}.$$

# %%
bus = pl.exercises.choose(
    "busbw of the replayed all-reduce, on links of 1 GB/s:",
    ["1.5 GB/s", "exactly 1 GB/s", "a little less than 1 GB/s"],
)
bus

# %%
T = on_links.step_time
print(f"algbw {S / T / 1e9:.2f} GB/s, busbw {2 * 3 / 4 * S / T / 1e9:.2f} GB/s, link 1 GB/s")
bus.reveal(3, "In the latencies of its six messages a rank sends nothing.")

# %% [markdown]
# ### Why fragments are slow
# [DeepSpeed #5047](https://github.com/deepspeedai/DeepSpeed/issues/5047) sees all-gathers of
# ZeRO-3 that are small and many, and asks why that is so and how to get fewer, larger ones. ZeRO-3
# gathers parameters as modules need them, so without bucketing there is one gather per module or
# even per tensor. In $q$ pieces the bytes are the same, but latency is paid $q$ times:
#
# $$T_\text{all-gather}(q) = q\,(N-1)\,\alpha + \frac{N-1}{N}\,\beta S.$$
#
# Take one block of a transformer with $h = 4096$: $12h^2$ parameters in 16 bits, which are 403 MB.
# It is gathered over 8 ranks with α = 20 µs and 1/β = 20 GB/s, in one piece, in 12 (one per
# tensor), or in more. Before you run the cell: in how many pieces does latency cost as much as the
# bytes?

# %%
pieces_guess = pl.exercises.guess(
    "pieces of a block of 403 MB until latency costs as much as the bytes",
    low=1,
    high=500,
    decimals=0,
)
pieces_guess

# %%
block, fast, n = 2 * 12 * 4096**2, pl.Link(alpha=20e-6, bandwidth=20e9), 8
latency, transfer = (n - 1) * fast.alpha, (n - 1) / n * block / fast.bandwidth
times = pd.DataFrame({"pieces": [1, 12, 128, 1024]}).set_index("pieces")
times["latency (ms)"] = 1e3 * latency * times.index
times["bytes (ms)"] = 1e3 * transfer
print(times.round(2))
pieces_guess.reveal(transfer / latency)

# %% [markdown]
# The twelve tensors of such a block cost little. A model with $h = 256$ has blocks 256 times
# smaller (0.07 ms of bytes), and there even one gather per block (0.14 ms of latency) is mostly
# latency. What helps in DeepSpeed is `stage3_prefetch_bucket_size` (gather several modules ahead)
# and `stage3_param_persistence_threshold`: tensors below 100,000 elements, by default, are not
# sharded, and those are eight of these twelve. In PyTorch's FSDP2 it is the choice of the modules
# that get `fully_shard`.
#
# ## Ring, tree, halving-doubling
#
# A ring pays α $2(N-1)$ times. A **tree** adds up along its branches and sends the sum down again,
# with the whole tensor in each step. **Halving-doubling** (Rabenseifner; Thakur et al. 2005, sec.
# 4.5) lets ranks at distance 1, 2, 4, … exchange a half, a quarter, an eighth of the tensor, and
# goes back the same way. Each way that is $S/2 + S/4 + \dots + S/N = \frac{N-1}{N}S$. For $N$ a
# power of two:
#
# $$T_\text{tree} = 2\log_2 N\,(\alpha + \beta S), \qquad
# T_\text{halving-doubling} = 2\log_2 N\,\alpha + 2\,\frac{N-1}{N}\,\beta S.$$
#
# On the link from above (α = 50 µs, 1/β = 1 GB/s):

# %%
import math

from paralab.theory import collectives

N = 64
sizes = [2**i for i in range(10, 31)]


def halving_doubling(n, nbytes):
    return 2 * math.log2(n) * link.alpha + 2 * (n - 1) / n * nbytes / link.bandwidth


view.algorithms(
    {
        "ring": [(x, collectives.seconds("ring_all_reduce", N, x, link)) for x in sizes],
        "tree": [(x, collectives.seconds("tree_all_reduce", N, x, link)) for x in sizes],
        "halving-doubling": [(x, halving_doubling(N, x)) for x in sizes],
    },
    title="64 ranks: of these three halving-doubling is the fastest at every size",
)

# %% [markdown]
# So why does anyone use rings? The model leaves out that links are shared. Halving-doubling talks
# to ranks far away, so several of its messages share a link between switches, whereas a ring's
# messages go to neighbours. The model is also unfair to trees. A tree can be better than this one,
# whose root sends $\log_2 N\,S$ bytes. NCCL uses two binary trees, each for one half of the
# tensor, cut into pieces so that all levels send at once. Each rank is a leaf in one of them and
# sends about $2S$, as on a ring ([NVIDIA
# 2019](https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/);
# [Sanders, Speck and Träff 2009](https://doi.org/10.1016/j.parco.2009.09.001)). The left end of
# the picture shows latency alone: 126 α = 6.3 ms on the ring, 12 α = 0.6 ms on the tree. It grows
# with N on a ring, and with log N on a tree. Do not read the crossing as NCCL's switching point.
#
# Which way does the crossing of ring and tree move with more ranks, and which way with a larger α?
# Move the sliders. *Run it* runs the algorithm on real processes and puts its messages on the link
# that you have set.

# %%
view.widgets.collective()

# %% [markdown]
# Both move it to the right: the ring pays more latencies than the tree.
#
# ## Two kinds of links: what leaves the node
#
# Inside a node devices talk much faster than between nodes. So it matters not only how many bytes
# are sent, but over which link. Take four ranks on two nodes, one all-reduce of 8 MB, and three
# algorithms. The ring's link from the last rank of one node to the first of the next carries as
# much as every other link. **Hierarchical** is a reduce-scatter inside the node, an all-reduce of a
# k-th between nodes, and an all-gather inside the node.

# %%
crossing = pl.exercises.guess(
    "MB that the hierarchical all-reduce sends between nodes, all ranks together",
    low=0,
    high=48,
    unit="MB",
    decimals=0,
)
crossing


# %%
def on_two_nodes(group, how):
    import torch

    from paralab.parallel import collectives

    tensor = torch.full((2 * MB,), float(10**group.index))
    more = {"node_size": 2} if how == "hierarchical" else {}
    getattr(collectives, f"{how}_all_reduce")(group, tensor, **more)
    return tensor.unique().tolist()


two_nodes = pl.Cluster(
    name="two nodes of two",
    nodes=2,
    devices_per_node=2,
    flops=1e12,
    memory_bandwidth=1e12,
    intra=pl.Link(alpha=10e-6, bandwidth=10e9),
    inter=pl.Link(alpha=50e-6, bandwidth=1e9),
)
rows = {}
for how in ("ring", "tree", "hierarchical"):
    traced = pl.trace(on_two_nodes, ranks=4, args=(how,), nodes=2)
    levels = traced.traffic(by="level").set_index("level")["bytes"] / MB
    rows[how] = {
        "inside nodes (MB)": levels["intra"],
        "between nodes (MB)": levels["inter"],
        "time on two nodes (ms)": 1e3 * traced.replay(two_nodes, compute=0.0).step_time,
    }
print("hierarchical:", crossing.reveal(rows["hierarchical"]["between nodes (MB)"]))
pd.DataFrame(rows).T.round(2)

# %% [markdown]
# In total the hierarchical all-reduce sends as much as the ring. Over the slow link it sends less,
# here a third less. With $N/k$ nodes that is $2\frac{N-k}{N}S$ per node, against $2\frac{N-1}{N}S$
# on the ring, so with many nodes this difference vanishes. What remains is that all k ranks of a
# node send to the next node at the same time, where this ring has one that does. (For this reason
# NCCL builds several rings, which leave a node through different ports.) The tree sends as little
# between nodes, but one rank of each node carries all of it, first in one direction and then in the
# other. In the hierarchical all-reduce both ranks of a node carry half, in both directions at once.
# The picture is of the hierarchical one. Which ranks talk across nodes?

# %%
traced.traffic_chart().titled("Hierarchical: of 12 MB that a rank sends 4 MB leave its node")

# %% [markdown]
# Ranks 0 and 2, and ranks 1 and 3.
#
# ### A whole training step, between nodes
# [NCCL #870](https://github.com/NVIDIA/nccl/issues/870) asks for the traffic between nodes of a
# training, having found about 1440 MB per update and rank in the log. For plain data parallelism
# everything is known beforehand: gradients of $S$ bytes, all-reduced over N ranks. Each of them
# sends $2(N-1)/N\,S$; on a *flat* ring (one ring over all ranks, node after node) one of the k
# ranks of each node sends this to another node. Hierarchically, each rank all-reduces $S/k$ over
# the nodes. If 1440 MB are what was handed to the calls, as `count` in the log is (below), then the
# gradients have 1440 MB. The thread names neither model nor nodes; suppose two nodes of eight:

# %%
update, ranks, nodes = 1440 * MB, 16, 2
per_rank = 2 * (ranks - 1) / ranks * update
print(f"a rank sends {per_rank / MB:,.0f} MB; a flat ring sends that from each node to the next")
across = 2 * (nodes - 1) / nodes * update / 8
out = f"{across / MB:.0f} MB per rank leave a node, {8 * across / MB:,.0f} MB per node"
print("hierarchical:", out)

report = pl.run(small, pl.Plan(dp=4), steps=2, progress=False)
report.traffic(by="edge")

# %% [markdown]
# The table is of a real step of data parallelism on four ranks: who sent how much to whom. That
# answers between which ranks the bytes go.
#
# ## Reading NCCL's log
#
# With `NCCL_DEBUG=INFO` and `NCCL_DEBUG_SUBSYS=INIT,GRAPH,COLL` each rank prints which links it
# opens and which calls it makes ([NVIDIA's page on
# logging](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html)).
#
# * `Channel 00/0 : 3[3] -> 11[3] [send] via NET/...` says that rank 3 sends to rank 11 over the
#   network; `via P2P/...` is a link within the node. So `grep 'via NET'` answers *which ranks talk
#   across nodes* (a maintainer explains the line in
#   [NCCL #1667](https://github.com/NVIDIA/nccl/issues/1667)).
# * `AllGather: opCount d ... count 2097152 datatype 7 ... [nranks=2]` is one call. `count` is the
#   argument of the call in elements: the whole tensor for AllReduce, but *one rank's part* for
#   AllGather (input) and ReduceScatter (output). So there $S = \text{count} \cdot N \cdot$ bytes
#   per element. `opCount`, the number of the call, is hexadecimal. Datatype 6 is fp16, 7 is fp32, 9
#   is bf16.
#
# These three lines are from [torchtitan #1369](https://github.com/pytorch/torchtitan/issues/1369),
# shortened. How many bytes does each rank send for the first one?

# %%
log = """AllGather: opCount d count 2097152 datatype 7 op 0 root 0 [nranks=2]
ReduceScatter: opCount e count 2097152 datatype 7 op 0 root 0 [nranks=2]
AllReduce: opCount 10 count 1 datatype 7 op 0 root 0 [nranks=2]"""
sent_guess = pl.exercises.guess(
    "MB that each rank sends for the first line", low=0, high=40, unit="MB"
)
sent_guess

# %%
import re

BYTES = {"6": 2, "7": 4, "9": 2}
OPS = {"AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce"}
rows = []
for name, count, kind, n in re.findall(r"(\w+): .*count (\d+) datatype (\d).*nranks=(\d+)", log):
    whole = int(count) * BYTES[kind] * (1 if name == "AllReduce" else int(n))
    sent = wire_bytes(OPS[name], whole, int(n))
    rows.append({"call": name, "S (bytes)": whole, "a rank sends (bytes)": sent})
print(pd.DataFrame(rows))
sent_guess.reveal(rows[0]["a rank sends (bytes)"] / MB)

# %% [markdown]
# ### Why a chunk can have −511 elements
# In debug prints from inside NCCL you meet other numbers than `count`. [NCCL
# #768](https://github.com/NVIDIA/nccl/issues/768) printed the variable `nelem` inside NCCL's ring
# on two GPUs and found −511, 1 and 1048576. These are not arguments of a call, but chunks of the
# ring. In an earlier version of its source
# ([all_reduce.h](https://github.com/NVIDIA/nccl/blob/033d799/src/collectives/device/all_reduce.h)),
# a chunk is at most 4 of the 8 slots of a 4 MiB buffer, at most its share of the tensor, and
# rounded up to a multiple of 8 bytes per working thread (all threads but one warp); chunk c begins
# at c times this size, and what is beyond the end counts as negative and is not sent:
#
# $$\text{nelem}(c) = \min\big(\text{chunk},\ \text{count} - c\cdot\text{chunk}\big).$$
#
# The thread shows no thread count; with 256 working threads the formula gives exactly the three
# numbers.


# %%
def nelem(count, itemsize, ranks=2, channels=1, threads=256):
    """Elements of each rank's chunk in the first round of NCCL's ring; threads: those that work."""
    most = 4 * (4 * 2**20 // 8) // itemsize  # four slots
    step = threads * 8 // itemsize
    chunk = min(most, -(-count // (ranks * channels)))
    chunk = -(-chunk // step) * step
    return [min(chunk, count - c * chunk) for c in range(ranks)]


print("one fp32 number, as a flag of overflow is:", nelem(1, itemsize=4))
print("100 million fp16 gradients:", nelem(100_000_000, itemsize=2))

# %% [markdown]
# ## Both send first: a deadlock
#
# Two neighbours swap a buffer. Each waits for its send, then receives. On a network where a send
# is complete only when its receive has been posted, neither gets further. By default `pl.trace`
# refuses such an order at once; with `strict=False` it lets the ranks wait. Here they are stopped
# after two seconds, and the message says who waits for whom:


# %%
def both_send_first(group):
    import torch

    other = group.ranks[1 - group.index]
    mine, theirs = torch.ones(4), torch.empty(4)
    group.send(mine, to=other).wait()
    group.recv(theirs, source=other).wait()


try:
    pl.trace(both_send_first, ranks=2, strict=False, timeout=2)
except pl.RankTimeout as error:
    print(str(error).splitlines()[0])

# %%
remedy = pl.exercises.choose(
    "Which change ends this deadlock?",
    [
        "rank 0 sends first, rank 1 receives first",
        "both ranks receive first",
        "each rank sends two halves, one after the other",
    ],
)
remedy


# %%
def one_sends_first(group):
    import torch

    other = group.ranks[1 - group.index]
    mine, theirs = torch.full((1,), float(group.index)), torch.empty(1)
    if group.index == 0:
        group.send(mine, to=other).wait()
    group.recv(theirs, source=other).wait()
    if group.index == 1:
        group.send(mine, to=other).wait()
    return theirs.item()


print("received by ranks 0 and 1:", pl.trace(one_sends_first, ranks=2).results)
remedy.reveal(1, "Each send meets a receive. In the other two each rank waits for the other one.")

# %% [markdown]
# MPI sends small messages *eagerly*, before the receive is posted, so the code in which both send
# first works there until a message is larger than the eager limit. NCCL, too, may finish a send
# that fits into its internal buffer, but it need not. It runs the calls between two ranks in order,
# and a larger send waits for a receive that comes only after the other rank's send. A
# remedy that needs no order among the ranks is to post both before waiting for either. In PyTorch,
# `isend` and `irecv` return at once, and `batch_isend_irecv` posts several of them together:
#
# ```python
# works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, right),
#                                 dist.P2POp(dist.irecv, theirs, left)])
# for work in works:
#     work.wait()    # before this, do not read theirs and do not change mine
# ```
#
# With that you can write an all-reduce.

# %%
exercise = pl.exercises.ring_all_reduce
exercise

# %%
### ANSWER: ring_all_reduce


verdict = pl.exercises.ring_all_reduce.check(ring_all_reduce)
verdict

# %% [markdown]
# ### Your all-reduce trains the reference GPT
# Data parallelism in its simplest form: after backward, the gradients of all ranks are summed and
# divided by N (lab 02 does it better). Your function does the sum, on two real ranks, next to the
# library's plan for two ranks. Read the code before you run it: it sends a little more than the
# gradients.

# %%
extra = pl.exercises.guess(
    "bytes that a rank sends per step beyond the gradients", low=0, high=16, decimals=0
)
extra


# %%
def my_data_parallelism(spec, steps):
    import torch
    import torch.distributed as dist

    gpt, rank, ranks = pl.reference.GPT(spec), dist.get_rank(), dist.get_world_size()
    optimizer, losses = pl.reference.optimizer(gpt.parameters()), []
    for step in range(steps):
        [batch] = pl.reference.batches(spec, step=step, rank=rank, ranks=ranks)
        optimizer.zero_grad()
        loss = gpt(*batch)
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in gpt.parameters()] + [loss.detach().view(1)])
        ring_all_reduce(flat)
        flat /= ranks
        sizes = [p.numel() for p in gpt.parameters()]
        for p, grad in zip(gpt.parameters(), flat[:-1].split(sizes), strict=True):
            p.grad = grad.view_as(p)
        optimizer.step()
        losses.append(flat[-1].item())
    return losses


if verdict:
    library = pl.run(small, pl.Plan(dp=2), steps=3, progress=False)
    yours = pl.observe(my_data_parallelism, ranks=2, args=(small, 3))
    pairs = zip(yours.losses, library.losses, strict=True)
    print("the same losses, to four decimals:", all(abs(x - y) < 1e-4 for x, y in pairs))
    for name, report in (("yours", yours), ("library", library)):
        traffic = report.traffic("op").set_index("op")["bytes"] / 2
        peak = f"{report.peak_memory / MB:.1f} MB"
        print(f"{name}: a rank sends {traffic.to_dict()}, its peak is {peak}")
else:
    print("write ring_all_reduce first")

# %% tags=["measured"]
both = {"yours": yours, "library": library} if verdict else {}
title = "After backward your all-reduce sends two halves, one after the other"
if both:
    steps = view.timelines(*both.values(), labels=list(both), title=title)
steps if both else print("write ring_all_reduce first")

# %%
extra.reveal(2 * (2 - 1) / 2 * 4)  # one more fp32 number is all-reduced: the loss

# %% [markdown]
# Once it runs: the gradients cost the same bytes in both, and the peak of your version is higher,
# partly because of the flat copy of all gradients. In the picture each half of your all-reduce is
# two bars, a send and a receive. Plain grey is what your function computes, such as the copies into
# one tensor and the sums. The picture has this machine's wall clock, on which ranks also wait for a
# core, and that stretches all of this: look at the order of things, not at their lengths.

# %% [markdown] tags=["solution-only"]
# **Why it works.** The reduce-scatter lets a partial sum of
# each chunk travel once around the ring and grow; the all-gather lets the complete sums travel
# once more. Whatever N is, a rank sends all chunks but one in each half.
#
# **Common mistakes.** `tensor.chunk(n)`, whose last chunk can be smaller by more than one element
# or missing; a buffer for each step; a send that is waited for before the receive is posted
# (deadlock); padding a copy of the whole tensor; passing whole tensors around, which is right and
# sends N/2 times as much.
#
# **A second answer** goes to the left, with both halves in one loop.


# %% tags=["solution-only"]
### ANSWER: ring_all_reduce_other


pl.exercises.ring_all_reduce.check(ring_to_the_left)

# %% [markdown]
# The last exercise is the hierarchical all-reduce, with process groups. It is judged by the bytes
# that cross nodes.

# %%
further = pl.exercises.hierarchical_all_reduce
further

# %%
### ANSWER: hierarchical_all_reduce


pl.exercises.hierarchical_all_reduce.check(hierarchical_all_reduce)

# %% [markdown] tags=["solution-only"]
# **Why it works.** Between the two halves of the inner
# all-reduce a rank is responsible for a k-th of the tensor, so only that k-th has to be added up
# across nodes, by all k ranks at once.
#
# **Common mistakes.** Calling `new_group` only for the own groups (all ranks must make all
# groups); two all-reduces after one another, which send the whole tensor across; one leader per
# node, which carries everything; groups across nodes whose ranks hold different parts.
#
# **A second answer** makes the inner sum from an all-to-all.


# %% tags=["solution-only"]
### ANSWER: hierarchical_all_reduce_other


pl.exercises.hierarchical_all_reduce.check(by_all_to_all)

# %% [markdown]
# ## What to remember
#
# 1. An all-reduce is a reduce-scatter followed by an all-gather; each costs (N−1)/N of the tensor.
# 2. Say which tensor S is: the whole one, or a shard.
# 3. Latency is paid per message, so few large calls are better than many small ones.
# 4. On a ring no rank sends more than the bound 2(N−1)/N S, and latency is paid 2(N−1) times; on a
#    tree 2 log₂ N times.
# 5. Keep bytes inside nodes apart from bytes between nodes; count, do not trust names.
#
# $$\text{all-reduce: } 2\,\frac{N-1}{N}S \qquad
# T_\text{ring} = 2(N-1)\Big(\alpha + \beta\frac{S}{N}\Big) \qquad
# \text{busbw}_\text{all-reduce} = 2\,\frac{N-1}{N}\cdot\frac{S}{T}$$
#
# | when | use |
# |---|---|
# | large tensors, one kind of link | ring |
# | small tensors, many ranks | tree, halving-doubling |
# | several nodes, fast links inside | hierarchical |
# | each rank needs only a part | reduce-scatter instead of all-reduce |
#
# ## In PyTorch, DeepSpeed, Megatron
#
# | what | PyTorch | DeepSpeed | Megatron-LM |
# |---|---|---|---|
# | groups of a grid | `init_device_mesh("cuda", (2, 8))` | `utils.groups` | `parallel_state` |
# | times of calls | `torch.profiler` | `comms_logger` in the JSON | `--timing-log-level` |
# | NCCL's algorithm | `NCCL_ALGO=Ring`, `Tree`, `NVLS`, … | the same | the same |
# | size of a call | DDP's `bucket_cap_mb` | `reduce_bucket_size` | `--ddp-bucket-size` |
#
# In this lab PyTorch's collectives, `DistributedDataParallel` and `ZeroRedundancyOptimizer` ran
# themselves and were observed. With one GPU per rank calls go over NCCL instead of gloo, and each
# rank's tensors belong on its own GPU, `group.context.device`; this has not been tried on several
# GPUs yet.
#
# ## Read on
# * Patarasuk and Yuan 2009, [Bandwidth optimal all-reduce
#   algorithms](https://doi.org/10.1016/j.jpdc.2008.09.002): the lower bound, and the ring.
# * Thakur, Rabenseifner and Gropp 2005, [Optimization of collective communication operations in
#   MPICH](https://doi.org/10.1177/1094342005051521): trees, halving-doubling, rings and when to
#   switch.
# * NVIDIA, [nccl-tests,
#   PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
# * PyTorch, [torch.distributed](https://pytorch.org/docs/stable/distributed.html).
# * In the package: `paralab/parallel/collectives.py` has the algorithms,
#   `paralab/theory/traffic.py` the bytes of every call. Next: [lab 02](02_data_parallel.ipynb).
