# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 01 · Collectives: what crosses the wire
#
# *«How many bytes leave my node in one step, between which ranks, and how do I read that from the
# log?»* ([asked](https://github.com/NVIDIA/nccl/issues/870) of the library that moves them, and
# still open.)
#
# Nearly everything that parallel training says over the wire is one of a handful of **collectives**
# (the rest are plain sends and receives: lab 03). In this lab you see what each of them moves,
# build the most important one out of sends and receives, and let the operating system confirm the
# byte count.

# %% [markdown]
# ## What each one does
# A *rank* is one process with one device, and its number; a *node* is one machine with some of
# them. A collective is a call that all ranks of a *group* make together. Four ranks, four numbers
# each: rank 2 has 20, 21, 22, 23. `pl.trace` runs a function on real processes, and hands it the
# `group`.


# %%
import pandas as pd

import paralab as pl
from paralab import view


def every_collective(group):
    import torch  # torch lives in the ranks: this notebook's own process never loads it

    device = group.context.device  # of this rank: its GPU, if it has one

    def mine():
        return torch.arange(4.0, device=device) + 10 * group.index

    one, four = torch.empty(1, device=device), torch.empty(4, device=device)
    shown = {"before": mine()}
    group.broadcast(x := mine(), root=0).wait()
    shown["broadcast"] = x
    group.reduce_scatter(one, mine()).wait()
    shown["reduce_scatter"] = one.clone()
    group.all_gather(four, one).wait()
    shown["all_gather of that"] = four.clone()
    group.all_reduce(x := mine()).wait()
    shown["all_reduce"] = x
    group.all_to_all(four, mine()).wait()
    shown["all_to_all"] = four
    return {name: [int(v) for v in tensor] for name, tensor in shown.items()}


report = pl.trace(every_collective, ranks=4)
pd.DataFrame(report.results).rename_axis("rank")

# %% [markdown]
# Read the columns against each other. `reduce_scatter` adds up and leaves every rank one part of
# the sum. `all_gather` puts parts together. One after the other they give what `all_reduce` gives:
# **an all-reduce is a reduce-scatter and an all-gather**. Keep that; half of distributed training
# is about what can be done between the two.
#
# ## Commit to a guess
# Four ranks all-reduce a buffer of 8 MB. Each of them needs the sum over all four. How much does
# *each rank* have to send?

# %%
guess = pl.exercises.guess(
    "MB that each of 4 ranks sends to all-reduce 8 MB", low=0, high=40, unit="MB", decimals=0
)
guess

# %% [markdown]
# ## By hand: half of a ring
# Arrange the ranks in a circle and cut the buffer into N chunks. In each step every rank passes one
# chunk to the right, and adds what comes from the left to its own. After N − 1 steps every chunk
# has been everywhere once, and each rank holds one that is complete.


# %%
def ring_reduce_scatter(group, tensor):
    """Afterwards chunk (rank + 1) % n is the sum over all ranks. tensor: (n * k,), in place."""
    import torch

    n, rank = group.size, group.index
    right, left = group.ranks[(rank + 1) % n], group.ranks[(rank - 1) % n]
    chunks = tensor.chunk(n)  # n views of (k,)
    arrived = torch.empty_like(chunks[0])
    for step in range(n - 1):
        give, take = (rank - step) % n, (rank - step - 1) % n
        group.exchange([("send", chunks[give], right), ("recv", arrived, left)]).wait()
        chunks[take].add_(arrived)


MB = 10**6


def reduce_scatter_8mb(group):
    import torch

    mine = float(10**group.index)  # ranks 0..3 hold 1, 10, 100, 1000
    tensor = torch.full((2 * MB,), mine, device=group.context.device)
    ring_reduce_scatter(group, tensor)
    return [chunk[0].item() for chunk in tensor.chunk(group.size)]


half = pl.trace(reduce_scatter_8mb, ranks=4)
chunks = [f"chunk {i}" for i in range(4)]
pd.DataFrame(half.results, columns=chunks).astype(int).rename_axis("rank")

# %% [markdown]
# Each number shows who has been added up in that chunk so far: 1111 is complete. Rank 0 has its
# complete chunk at 1, rank 1 at 2, and so on around the ring.
#
# Now the same on virtual devices with a link of 1 GB/s, nothing else taking time. Three steps, and
# in each of them every wire carries one chunk:

# %%
link = pl.Link(alpha=50e-6, bandwidth=1e9)
ring_of_four = pl.Cluster(
    name="four devices, 1 GB/s", devices_per_node=4, flops=1e12, memory_bandwidth=1e12, intra=link
)
on_links = half.replay(ring_of_four, compute=0.0)
on_links.timeline()

# %% [markdown]
# This is what the odd sizes in a library's log are: not your tensor, but
# [a chunk of it](https://github.com/NVIDIA/nccl/issues/768), once per step and per rank.

# %%
steps = half.collectives.query("op == 'send' and rank == 0")
print(f"rank 0 sent {len(steps)} times {steps.wire_bytes.iloc[0] / MB:.0f} MB to rank 1")
print(f"together {steps.wire_bytes.sum() / MB:.0f} MB = (N-1)/N of 8 MB")

# %% [markdown]
# The second half, the all-gather, goes around once more with complete chunks: another N − 1 steps,
# the same bytes. That half is yours to write, at the end of this lab. The whole:


# %%
def all_reduce_8mb(group):
    import torch

    from paralab.parallel.collectives import ring_all_reduce

    tensor = torch.full((2 * MB,), float(10**group.index), device=group.context.device)
    ring_all_reduce(group, tensor)
    return tensor.unique().tolist()


whole = pl.trace(all_reduce_8mb, ranks=4)
sent = whole.traffic().set_index("rank")["bytes"]
print(
    "every rank holds", whole.results[0], "everywhere:", all(r == [1111.0] for r in whole.results)
)
guess.reveal(sent[0] / MB)

# %% [markdown]
# **2(N−1)/N times the buffer**, S: never more than 2 S, however many ranks there are. Through one
# rank in the middle, three buffers would have to arrive there and three leave again. Here is who
# sends to whom:

# %%
whole.traffic_chart()

# %% [markdown]
# ## The table behind every paper's «communication volume»
# How a paper arrives at its figures is
# [asked too](https://github.com/mit-han-lab/distrifuser/issues/10). Each collective has one
# formula, for the bytes that a rank sends. The right column was counted while it ran:

# %%
from paralab.theory.traffic import wire_bytes

S = 8 * MB


def one_of_each(group):
    import torch

    whole = torch.ones(S // 4, device=group.context.device)
    part = torch.empty_like(whole[: S // 4 // group.size])
    group.all_reduce(whole).wait()
    group.reduce_scatter(part, whole).wait()
    group.all_gather(whole, part).wait()
    group.all_to_all(torch.empty_like(whole), whole).wait()


counted = pl.trace(one_of_each, ranks=4).collectives.query("rank == 0").set_index("op").wire_bytes
formulas = {
    "all_reduce": "2 (N-1)/N S",
    "reduce_scatter": "(N-1)/N S",
    "all_gather": "(N-1)/N S",
    "all_to_all": "(N-1)/N S",
}
pd.DataFrame(
    {
        "formula": formulas,
        "formula, MB": {op: wire_bytes(op, S, 4) / MB for op in formulas},
        "counted, MB": counted / MB,
    }
).rename_axis("a buffer of 8 MB, 4 ranks")

# %% [markdown]
# ## A witness who knows nothing of formulas
# Our count is made where the call is made. Is it what really crosses the wire? Between processes of
# one machine the wire is the loopback interface, and the kernel counts every byte on it. Ranks stop
# at a gate before and after each call while the counter is read.

# %% tags=["measured"]
from paralab.instruments.witness import witness

seen = witness(
    ranks=4, ops=("all_reduce", "all_gather", "reduce_scatter", "native reduce_scatter"), nbytes=S
)
seen

# %% tags=["measured"]
ratios = seen.set_index("op").ratio
print(
    "ledger and kernel within 2 %:",
    bool((ratios.drop("native reduce_scatter") - 1).abs().max() < 0.02),
)
print(
    f"the backend's own reduce_scatter moves {ratios['native reduce_scatter']:.1f} times its share"
)

# %% [markdown]
# The last row is worth a pause. The backend that torch uses on CPUs, gloo, implements its own
# reduce-scatter as all-reduces: the call says one thing, the wire another. «[The paper says
# reduce-scatter, I observe all-reduce](https://github.com/deepspeedai/DeepSpeed/issues/264)» is a
# question one can answer only by counting. (paralab's reduce-scatter is built from an all-to-all
# and a local sum, which is why its row is right.)
#
# ## How long does it take?
# Two numbers describe a wire roughly: **α**, the seconds before the first byte, and the
# **bandwidth** β. A message of n bytes takes α + n/β (Hockney 1994). Here they are for *your*
# machine, fitted to all-reduces of 1 kB to 8 MB that it ran when it was first measured:

# %% tags=["measured"]
from paralab.instruments.calibrate import calibration_points

view.link_fit(calibration_points()["links"], op="all_reduce")

# %% [markdown]
# (The subtitle says how far the points lie from the line. With fewer free cores than ranks α is
# mostly waiting for a core, so yours will differ.) Left of the knee a call costs the α of its
# messages, one for each that comes after another, whatever its size. This is why it matters into
# how many pieces traffic is cut: [“why are my all-gathers so
# fragmented?”](https://github.com/deepspeedai/DeepSpeed/issues/5047) The same 8 MB, in more and
# more pieces, each of which is one message here:

# %%
gather = pl.Link(alpha=200e-6, bandwidth=1e9)  # a slow start, 1 GB/s
pieces = pd.Series([1, 8, 64, 512, 4096], name="pieces")
wire = wire_bytes("all_gather", S, 4)
pd.DataFrame(
    {
        "bytes sent (MB)": [wire / MB for _ in pieces],
        "alpha (ms)": [1e3 * gather.alpha * k for k in pieces],
        "bytes (ms)": [1e3 * wire / gather.bandwidth for _ in pieces],
        "together (ms)": [1e3 * k * gather.seconds(wire / k) for k in pieces],
    },
    index=pieces,
).round(1)

# %% [markdown]
# And for real on this machine: one all-gather of 4 MB, against 64 of a 64th of that.


# %%
def gathers(group, pieces):
    import torch

    each = 10**6 // pieces // group.size
    part = torch.ones(each, device=group.context.device)
    whole = part.new_empty(each * group.size)
    for _ in range(pieces):
        group.all_gather(whole, part).wait()


once, often = (pl.trace(gathers, ranks=4, args=(k,)) for k in (1, 64))
for report in (once, often):
    rows = report.collectives.query("rank == 0")
    print(f"{len(rows):3} calls, {rows.wire_bytes.sum() / MB:.2f} MB sent")

# %% tags=["measured"]
slower = often.steps.end.max() / once.steps.end.max()
print(f"the same bytes in 64 pieces took {slower:.0f} times as long")

# %% [markdown]
# ## Ring or tree?
# A ring needs 2(N−1) steps, so it pays α that many times. A tree adds up along its branches and
# sends the sum back down: only 2 log₂ N steps, but the whole buffer in each. Which is better
# depends on the size of the message, and libraries switch between them. For 64 ranks on links like
# `link`:

# %%
from paralab.theory import collectives

sizes = [2**k for k in range(10, 31)]
print(f"alpha {1e6 * link.alpha:g} us, {link.bandwidth / 1e9:g} GB/s")
view.algorithms(
    {
        algorithm: [(size, collectives.seconds(algorithm, 64, size, link)) for size in sizes]
        for algorithm in ("ring_all_reduce", "tree_all_reduce")
    }
)

# %% [markdown]
# Turn the knobs: more ranks move the crossing to the right, a larger α too. *Run it* runs the
# algorithm on real processes, counts its messages, and puts it on the link you have set.

# %%
view.widgets.collective()

# %%
for ranks in (4, 16, 64, 256):
    crossing = collectives.crossover(ranks, link)
    print(f"{ranks:3} ranks: below {crossing / 1e3:6,.0f} kB a tree is faster")

# %% [markdown]
# ## Two kinds of wire
# Inside a node devices talk much faster than between nodes. So it is not only *how many* bytes
# that matters, but *which wire* they take. Four ranks on two nodes, and one all-reduce three ways.


# %%
def all_reduce_on_two_nodes(group, how):
    import torch

    from paralab.parallel import collectives

    tensor = torch.full((2 * MB,), float(10**group.index), device=group.context.device)
    if how == "ring":
        collectives.ring_all_reduce(group, tensor)
    elif how == "tree":
        collectives.tree_all_reduce(group, tensor)
    else:
        collectives.hierarchical_all_reduce(group, tensor, node_size=2)
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
    traced = pl.trace(all_reduce_on_two_nodes, ranks=4, args=(how,), nodes=2)
    levels = traced.traffic(by="level").set_index("level")["bytes"] / MB
    replayed = traced.replay(two_nodes, compute=0.0)
    rows[how] = {
        "inside nodes (MB)": levels["intra"],
        "between nodes (MB)": levels["inter"],
        "time on two nodes (ms)": round(1e3 * replayed.step_time, 2),
        "right": all(result == [1111.0] for result in traced.results),
    }
pd.DataFrame(rows).T

# %% [markdown]
# Adding the two columns as if they were alike would hide the point: the hierarchical way
# (reduce-scatter inside the node, all-reduce between nodes, all-gather inside) does not send less
# in total, it sends less where it is slow. (The tree sends as little between the nodes, but one
# rank of each carries all of it, first one way and then the other. In the hierarchical way both
# ranks of a node carry half, both ways at once.) Which rank of one node talks to which of the
# other, for the hierarchical way:

# %%
traced.traffic_chart()

# %% [markdown]
# ## Break it
# Two neighbours swap a buffer. Each sends first, then receives. Looks right? Both wait in their
# send for a receive that comes after it. On a cluster this is the job that stands still at 3 a.m.
# without an error; here it ends after the two seconds that it is given, and says who waits for
# whom:


# %%
def both_send_first(group):
    import torch

    other = group.ranks[1 - group.index]
    mine = torch.full((4,), float(group.index), device=group.context.device)
    theirs = torch.empty_like(mine)
    group.send(mine, to=other).wait()
    group.recv(theirs, source=other).wait()
    return theirs


try:
    pl.trace(both_send_first, ranks=2, strict=False, timeout=2)
except pl.RankTimeout as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# Some deadlocks hide: MPI, say, sends small messages ahead, so the same code works there until the
# messages grow. NCCL, the library that does this between NVIDIA GPUs, runs a pair's calls one after
# the other and matches them by order. `pl.trace` holds every call to that rule by default, without
# a GPU and without waiting:

# %% tags=["measured"]
try:
    pl.trace(both_send_first, ranks=2)
except pl.RankError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# The remedy is in `ring_reduce_scatter` above: what two ranks send each other belongs in **one**
# `exchange`.
#
# ## Your turn
# The ring's second half. After `ring_reduce_scatter` rank r owns the finished chunk (r + 1) % N;
# hand the finished chunks around until everybody has all of them. The checker counts your bytes,
# your memory and your time on stated links.

# %%
exercise = pl.exercises.all_gather_half
exercise


# %%
### ANSWER: all_gather_half


exercise.check(ring_all_gather)

# %% [markdown]
# Stuck? `exercise.hint()` gives one push at a time, `exercise.solution()` shows an answer.

# %% [markdown] tags=["solution-only"]
# ## Another answer
# The ring may as well turn the other way: what is passed on is then the chunk that came from the
# right.


# %% tags=["solution-only"]
def the_other_way_round(group, tensor):
    n, r = group.size, group.index
    left, right = group.ranks[(r - 1) % n], group.ranks[(r + 1) % n]
    chunks = tensor.chunk(n)
    for step in range(n - 1):
        leaving, arriving = chunks[(r + 1 + step) % n], chunks[(r + 2 + step) % n]
        group.exchange([("send", leaving, left), ("recv", arriving, right)]).wait()


exercise.check(the_other_way_round)

# %% [markdown]
# ## On your GPUs
# The same cells: with one GPU per rank the calls go over NCCL. (`link_fit` stays a picture of this
# machine's processors.) The knee of a link is α times its bandwidth. A GPU's links have a much
# smaller α and a much larger bandwidth.
#
# ## Read on
# * Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of workstations*:
#   why 2(N−1)/N is the least there is.
# * Thakur, Rabenseifner and Gropp 2005, *Optimization of collective communication operations in
#   MPICH*, sec. 4: trees, rings and when to switch. Hockney 1994: α and β.
# * In the package: `paralab/parallel/collectives.py` has the three algorithms, `comm.py` is the
#   only door to the wire, `theory/traffic.py` counts its bytes.
#   Next: [lab 02](02_data_parallel.ipynb).
