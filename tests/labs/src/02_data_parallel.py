# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 02 · Data parallelism: the same training on more devices
#
# *«I gave my training four devices and it is not four times faster. What do they say to each other,
# what does it cost, and is it still the same training?»*
#
# Data parallelism is the simplest way to split the work: every rank holds the whole model and
# trains on its own part of the batch. Here is all of it, by hand, in one function. `pl.reference`
# is a GPT in plain PyTorch on one process, with its batches and its optimizer. `pl.trace` (lab 01)
# runs the function on four real processes; `group` knows all of them, and `group.index` is a rank's
# number.


# %%
import numpy as np
import pandas as pd

import paralab as pl
from paralab import view

model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)


def by_hand(group, optimizer, lr, steps, divide=True):
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    mine = {"rank": group.index, "ranks": group.size, "device": group.context.device}
    gpt = pl.reference.GPT(model).to(mine["device"])  # the same first weights on every rank
    parameters = list(gpt.parameters())
    update = pl.reference.optimizer(parameters, optimizer, lr)
    losses = []
    for step in range(steps):
        [(tokens, targets)] = pl.reference.batches(model, step=step, microbatch_size=4, **mine)
        loss = gpt(tokens, targets)
        loss.backward()
        gradients = [parameter.grad for parameter in parameters]
        flat = parameters_to_vector(gradients)  # all of them, one after the other
        group.all_reduce(flat).wait()  # the sum over all ranks ...
        if divide:
            flat /= group.size  # ... and the mean
        vector_to_parameters(flat, gradients)
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


losses = np.mean(pl.trace(by_hand, ranks=4, args=("adamw", 1e-3, 8)).results, axis=0)
print("it learns:", losses[-1] < losses[0] - 0.5)

# %% [markdown]
# Every rank comes out of backward with a different gradient, because it saw different text. The
# all-reduce of lab 01 gives every rank the sum, and the division gives the mean. So all ranks make
# the same update, and their weights stay equal.
#
# ## Commit to a guess
# How much does a rank send over the network for that?

# %%
print(
    f"{model.num_params:,} parameters: one copy of the gradients is "
    f"{4 * model.num_params / 1e6:.2f} MB"
)
guess = pl.exercises.guess("MB that each of 4 ranks sends per step", low=0, high=16, unit="MB")
guess

# %% [markdown]
# ## Run it
# Four real processes. `Plan` says how the step is split: `dp=4` is the number of data-parallel
# ranks, and each takes `microbatch_size=4` samples. Gradients travel in *buckets*, several in one
# message: a bucket is closed when it holds `bucket_bytes` bytes. The `Link` has the α and the
# bandwidth of lab 01. It belongs to a `Cluster` of devices that you do not have, for the picture
# below.

# %%
plan = pl.Plan(dp=4, microbatch_size=4, bucket_bytes=2**20)
report = pl.run(model, plan, steps=8)
link = pl.Link(alpha=400e-6, bandwidth=0.6e9)
devices = pl.Cluster(
    name="0.6 GB/s", devices_per_node=64, flops=50e9, memory_bandwidth=10e9, intra=link
)
report

# %% [markdown]
# ## See it
# One row per rank: what it computed, and below it what it had in flight on the network. Grey is a
# rank that waits. Most likely your machine has fewer cores than four ranks need, and then the wall
# clock mostly shows ranks waiting for a core. So this is your run *replayed*: each piece of work
# takes the processor time that it really took, on a device of its own, and links carry 0.6 GB/s.

# %% tags=["measured", "readme-picture"]
report.replay(devices).timeline()

# %% [markdown]
# The gradients leave in buckets while backward is still running, so part of the traffic costs no
# time; the title says how much. (That is why backward is cut into pieces: one ends wherever a
# bucket is complete.) The last bucket is complete only when backward is over. Then only the
# optimizer's work on the other buckets can hide it.
#
# ## Count it
# The ring all-reduce of lab 01 makes each of N ranks send 2(N−1)/N times the tensor. Here the
# tensor is the gradients: Ψ parameters of 4 bytes each.

# %%
N, psi = plan.dp, model.num_params
theory_mb = 2 * (N - 1) / N * psi * 4 / 1e6
sent_mb = report.traffic().set_index("rank")["bytes"] / 1e6
print(f"2(N-1)/N Ψ : {theory_mb:.3f} MB per rank and step")
print(f"recorded   : {sent_mb[0]:.3f} MB per rank and step")
guess.reveal(round(sent_mb[0], 1))

# %% [markdown]
# A rank sends less than two copies of the gradients, however many ranks there are:

# %%
rows = []
for n in (1, 2, 3, 4, 8, 64, 1024):
    each = 2 * (n - 1) / n * psi * 4 / 1e6
    counted = None
    if n <= 4:
        traced = pl.run(model, plan.replace(dp=n), steps=2, progress=False)
        counted = round(float(traced.traffic()["bytes"].mean()) / 1e6, 3)
    rows.append({"ranks": n, "2(N-1)/N Ψ (MB)": round(each, 3), "counted (MB)": counted})
pd.DataFrame(rows).set_index("ranks")

# %%
report.traffic_chart()

# %% [markdown]
# ## Every single call
# People [wish](https://github.com/traceopt-ai/traceml/issues/145) for a summary of all traffic by
# its purpose and for a list of every call with its size and its group, and they want it as [raw
# data](https://github.com/deepspeedai/DeepSpeed/issues/7403). `report.collectives` has one row for
# every call of every rank and step. `axis` is the kind of parallelism that the call serves, `phase`
# is its purpose, `payload_bytes` is the size of the tensor, and `wire_bytes` is what the rank
# sends. The calls of rank 0 in step 3:

# %%
calls = report.collectives.query("step == 3 and rank == 0")
calls[["call", "op", "axis", "ranks", "phase", "payload_bytes", "wire_bytes"]].set_index("call")

# %% [markdown]
# The same calls, added up by their purpose:

# %%
calls.groupby(["axis", "phase", "op"]).agg(
    calls=("call", "count"), payload=("payload_bytes", "sum"), sent=("wire_bytes", "sum")
)

# %% [markdown]
# Rank 0 took part in one more call. Here is everything, in all steps, that is not a sum of
# gradients:

# %%
setup = report.collectives.query("rank == 0 and phase != 'grad_sync'")
setup[["step", "op", "axis", "phase", "payload_bytes", "wire_bytes"]].drop_duplicates()

# %% [markdown]
# When a log shows [small collectives whose purpose is not
# clear](https://github.com/pytorch/torchtitan/issues/1369), this table tells them apart: each row
# says which axis of the plan the call served and for what. Here the one small call is a handshake
# before the first step. In it the ranks check that all of them have the same settings and the same
# text.
#
# ## Three ways to send the same bytes
# `naive` sends the gradient of every parameter in a call of its own, after backward. (The function
# `by_hand` sent all gradients in one call.) `bucketed` collects the gradients in a few large
# buffers and sends each buffer in one call, also after backward. `overlapped` sends each buffer as
# soon as it is full, while backward computes the rest. First the bytes of the three forms, then
# their time on the same link:

# %%
forms = {
    form: pl.run(model, plan.replace(grad_sync=form), steps=6, progress=False)
    for form in ("naive", "bucketed", "overlapped")
}
rows = []
for form, run in forms.items():
    calls = run.collectives.query("step == 3 and rank == 0 and phase == 'grad_sync'")
    sent = round(calls.wire_bytes.sum() / 1e6, 3)
    rows.append({"form": form, "calls": len(calls), "MB sent": sent})
pd.DataFrame(rows).set_index("form")

# %% tags=["measured"]
replays = {form: run.replay(devices) for form, run in forms.items()}
view.timelines(*replays.values(), labels=list(replays), ranks=[0, 1])

# %% tags=["measured"]
for form, replayed in replays.items():
    summary = replayed.summary()["value"]
    print(
        f"{form:<10} {summary['step time']:6.1f} ms per step, of which waiting "
        f"{summary['waiting']:5.1f} ms"
    )

# %% [markdown]
# All three forms send the same bytes. Buckets pay α once per bucket instead of once per parameter.
# (The replay charges α once per call; the ring of lab 01 pays it in each of its steps.) Overlap
# hides most of the rest behind work that has to be done anyway. What remains is the traffic of the
# last buckets, which are complete when backward is nearly over.
#
# ## Theory, replay, wall clock
# `predict` returns the same kind of report as `run`, from formulas and a short measurement of this
# machine. `compare` puts three clocks next to each other, with a sentence on every gap. Prediction
# and replay use the links of this machine here (the cluster `local`), not the 0.6 GB/s above:

# %% tags=["measured"]
expect = pl.predict(model, plan)
pl.compare(expect, report)

# %% tags=["measured"]
view.timelines(
    expect, report.replay(), report, labels=["theory", "replayed", "wall clock"], ranks=[0]
)

# %% [markdown]
# Which clock answers your question? *What would four devices do?* The replay says it. *What did
# this machine do?* The wall clock says it. *What will a machine do that I do not have?* The
# prediction says it, and the table says how far to trust it.
#
# ## When overlap cannot help
# People ask [why their collectives do not
# overlap](https://github.com/deepspeedai/DeepSpeed/issues/5047). Overlap hides traffic behind
# backward. So it fails when there is less backward than traffic: on a slow link, with a small
# batch, or with a bucket as large as the model. The same run is replayed below on slower and slower
# links. (*Hidden* counts only the traffic under forward and backward. A rank can also update other
# buckets while a sum is in flight, so it may wait for nothing although less than 100 % is hidden.)

# %% tags=["measured"]
rows = []
for bandwidth in (8e9, 2e9, 5e8, 1.25e8):
    slow = devices.replace(name="slower", intra=link.replace(bandwidth=bandwidth))
    summary = forms["overlapped"].replay(slow).summary()["value"]
    rows.append(
        {
            "GB/s": bandwidth / 1e9,
            "step (ms)": summary["step time"],
            "waiting (ms)": summary["waiting"],
            "hidden (%)": summary["of it hidden behind compute"],
        }
    )
pd.DataFrame(rows).set_index("GB/s").round(1)

# %% [markdown]
# Find the best bucket size yourself: tiny buckets pay α too often, and one huge bucket starts too
# late. *Run it* starts the real ranks.

# %%
pl.view.widgets.data_parallel(model, plan)

# %% [markdown]
# The same without a mouse, on a network whose messages take 0.4 ms to arrive; an all-reduce has
# several of them, one after the other:

# %%
network = devices.replace(name="a network", intra=pl.Link(alpha=0.4e-3, bandwidth=0.5e9))
for size in (2**14, 2**17, 2**20, 2**23):
    expected = pl.predict(model, plan.replace(bucket_bytes=size), cluster=network)
    waiting = expected.summary().loc["waiting", "value"]
    print(
        f"bucket of {size / 2**20:7.3f} MiB: step {1e3 * expected.step_time:5.1f} ms, "
        f"of it waiting {waiting:4.1f} ms"
    )

# %% [markdown]
# ## Is it the same training?
# One process computes the four quarters of the batch one after the other: the same samples, the
# same first weights. The optimizer is plain SGD, because a wrong gradient shows in its weights at
# once; the next section has an optimizer that hides one.

# %%
proof = {"optimizer": "sgd", "lr": 0.1, "steps": 3, "keep_state": True, "progress": False}
split = pl.run(model, plan, **proof)
alone = pl.run(model, pl.Plan(dp=1, microbatches=4, microbatch_size=4), **proof)

for what in ("gradients", "weights"):
    one, four = getattr(alone, what), getattr(split, what)
    worst = max(np.abs(one[name] - four[name]).max() / np.abs(one[name]).max() for name in one)
    print(f"{what}: {len(one)} tensors, equal to 1e-5 of their largest entry: {worst < 1e-5}")

# %% [markdown]
# ## Break it
# Leave out one line, the division by N. Every gradient is now four times too large. What do you
# expect the loss to do? (The loss is in nats per token: cross-entropy with the natural logarithm.)

# %% tags=["measured"]
curves = {}
for optimizer, lr in (("adamw", 1e-3), ("sgd", 0.1)):
    for divide in (True, False):
        traced = pl.trace(by_hand, ranks=4, args=(optimizer, lr, 8, divide))
        curves[optimizer, divide] = np.mean(traced.results, axis=0)

apart = {}
for optimizer in ("adamw", "sgd"):
    apart[optimizer] = np.abs(curves[optimizer, True] - curves[optimizer, False]).max()
    print(f"{optimizer:<6} largest difference of the loss with and without: {apart[optimizer]:.2f}")

# %% tags=["measured"]
named = {
    f"{optimizer}{'' if divide else ' without the division'}": list(values)
    for (optimizer, divide), values in curves.items()
}
said = ", ".join(f"{worst:.2f} nats under {name}" for name, worst in apart.items())
view.losses(named, title=f"Without the division losses differ by up to {said}")

# %% [markdown]
# Adam divides by the size of the gradient, so a factor cancels: the curve is the same, and the bug
# stays unnoticed until the optimizer is changed or gradients are clipped by their norm. A loss
# curve under Adam therefore does not prove that the gradients are right. Equality with one process
# does prove it, and every form of parallelism in this library is tested that way.
#
# ## Does it scale?
# *Strong scaling*: the same total batch on more ranks, so each rank computes less but sends about
# as much. *Weak scaling*: the same batch per rank, so the total batch grows. These are real runs on
# 1, 2, 4 and 8 ranks. Up to the number of cores the wall clock is shown as well; beyond that only
# the replay says what devices of their own would do.

# %% tags=["measured"]
from paralab.spec.cluster import available_cores

rows = []
for kind, batch in (("weak", lambda n: 4), ("strong", lambda n: 16 // n)):
    for n in (1, 2, 4, 8):
        scaled = pl.Plan(dp=n, microbatch_size=batch(n), bucket_bytes=2**20)
        run = pl.run(model, scaled, steps=4, progress=False)
        rows.append(
            {
                "form": kind,
                "ranks": n,
                "clock": "replayed",
                "samples_per_second": scaled.global_batch / run.replay(devices).step_time,
            }
        )
        if n <= available_cores():
            rows.append(
                {
                    "form": kind,
                    "ranks": n,
                    "clock": "measured",
                    "samples_per_second": scaled.global_batch / run.step_time,
                }
            )
view.scaling(rows)

# %% [markdown]
# Weak scaling keeps more of the ideal: each rank computes as long as before, and the bytes of the
# gradients do not depend on the number of samples. Strong scaling falls further below the ideal: at
# eight ranks each rank has only two samples, so there is little backward to hide the same bytes
# behind. That is the limit of data parallelism in time. It has a limit in memory, too: every rank
# still holds the whole model (lab 00).
#
# ## Your turn: overlap with hooks, as PyTorch does it
# PyTorch does not know beforehand in which order backward completes the gradients. So its
# `DistributedDataParallel` (DDP) registers a *hook* with autograd for every parameter, and autograd
# calls the hook when the gradient is complete. Write the class that these hooks drive: it packs
# gradients into buckets, sends each bucket while backward goes on, and waits at the end. The
# checker trains the reference GPT with your class, compares gradients and weights with one process,
# counts bytes, and simulates the time of a step with given costs. Only buckets *and* overlap
# together are fast enough.

# %%
exercise = pl.exercises.gradient_sync
exercise


# %%
### ANSWER: gradient_sync


exercise.check(MySync)

# %% [markdown]
# Stuck? `exercise.hint()` gives one push at a time, `exercise.solution()` shows an answer.

# %% [markdown] tags=["solution-only"]
# The answer works because `all_reduce` returns at once: the link is busy with one bucket while
# backward fills the next. The common mistakes are a last bucket that is never sent because it is
# never full, a `wait()` in `grad_ready`, which stops backward, and a list that `reset()` does not
# empty.
#
# ## Another answer: gradients that are views of their bucket
# Parameters are assigned to buckets once, before the first step, and each bucket has a buffer. A
# gradient is copied into the buffer when it is complete, and from then on `parameter.grad` is a
# view of the buffer. So nothing is unpacked after the sum. DDP does the same with
# `gradient_as_bucket_view=True`.


# %% tags=["solution-only"]
class SyncViews:
    def __init__(self, parameters, *, group, bucket_bytes):
        self.parameters, self.group = parameters, group
        buckets, self.place = [[]], {}
        for parameter in reversed(parameters):  # backward completes the last one first
            if sum(p.nbytes for p in buckets[-1]) >= bucket_bytes:
                buckets.append([])
            buckets[-1].append(parameter)
        self.sizes = [len(bucket) for bucket in buckets]
        self.flats = [b[0].new_zeros(sum(p.numel() for p in b)) for b in buckets]
        for number, bucket in enumerate(buckets):
            parts = self.flats[number].split([p.numel() for p in bucket])
            for p, part in zip(bucket, parts, strict=True):
                self.place[p] = number, part.view_as(p)
        self.reset()

    def reset(self):
        for parameter in self.parameters:
            parameter.grad = None
        self.missing, self.calls = list(self.sizes), []

    def grad_ready(self, parameter):
        number, view = self.place[parameter]
        parameter.grad = view.copy_(parameter.grad)
        self.missing[number] -= 1
        if not self.missing[number]:
            self.calls.append(self.group.all_reduce(self.flats[number]))

    def finish(self):
        for call in self.calls:
            call.wait()


exercise.check(SyncViews)

# %% [markdown]
# ## The same without hooks: a plan is a list
# `Plan(grad_sync="overlapped")` uses no hooks. This library compiles a plan to a *program*: the
# list of everything that a rank does in a step, written before the step runs. The list shows which
# BACKWARD is the last that adds to a bucket, and the sum of that bucket is placed right after it.
# Below is the list without any sums. A line has a position, what is done, and the part of the
# model; `mb 0` is the first micro-batch, here the only one. `frees` names the values whose memory
# ends with this line: `x` is an activation between two parts, `g` is its gradient, `saved` is what
# forward keeps for backward, and `grad` is the gradients of a bucket. A line with `×` stands for
# several lines. The last line says what is wrong.

# %%
unsummed = pl.program(model, plan.replace(grad_sync=None))
unsummed

# %% [markdown]
# The last line also says after which position the sum of bucket 0 may be placed (“behind position
# 11” means after it), and the lines above it say which parameters each bucket holds. After which
# position may the sum of bucket 3 be placed, at the earliest? The function `completed` then answers
# this for all buckets.

# %%
first = pl.exercises.guess("first position for the sum of bucket 3", low=0, high=21, decimals=0)
first

# %%
from paralab.programs import completed

for position, buckets in sorted(completed(unsummed.code).items()):
    print(f"behind position {position} the gradients of buckets {buckets} are complete")
first.reveal(position)

# %% [markdown]
# Bucket 3 holds the token embedding, whose gradient is complete only when backward is over.
# Wherever the sums are placed, no backward is left to hide this one.
#
# ## Your turn: the same as a pass
# A function that takes a program and returns a changed one is called a *pass*. Each form of
# parallelism in this library is a pass, and your pass is checked, run and predicted like the
# built-in ones.

# %%
pass_exercise = pl.exercises.sync_pass
pass_exercise


# %%
### ANSWER: sync_pass


pass_exercise.check(my_pass)

# %% [markdown]
# `pass_exercise.hint()` and `pass_exercise.solution()` help here, too.

# %% [markdown] tags=["solution-only"]
# The answer works because the list already says when each gradient is complete, and because
# `all_reduce` only begins the sum: the library derives a `WAIT` in front of the `UPDATE` that needs
# the sum. The checks refuse some common mistakes and name them: a bucket that is never summed, or
# that is summed after each micro-batch, so twice. Other mistakes cost time: all sums after
# backward, or a `wait` after each call.
#
# ## Another answer: two halves
# An all-reduce is a reduce-scatter followed by an all-gather (lab 01). A gather needs the result of
# its reduce-scatter, so the rank would wait if one stood right after the other. Here each gather
# stands one bucket later, so its reduce-scatter has had time to finish. The bytes are the same, and
# every bucket pays α twice, once per call.


# %% tags=["solution-only"]
from paralab.programs import all_gather, reduce_scatter


def in_halves(program):
    sums, before = {}, []
    for position, units in sorted(completed(program.code).items()):
        sums[position] = [*map(reduce_scatter, units), *map(all_gather, before)]
        before = units
    sums[position] += map(all_gather, before)
    return program.replace(insert(program.code, sums))


pass_exercise.check(in_halves)


# %% tags=["solution-only"]
def halves_at_once(program):
    sums = {}
    for position, units in completed(program.code).items():
        sums[position] = [call(unit) for unit in units for call in (reduce_scatter, all_gather)]
    return program.replace(insert(program.code, sums))


pass_exercise.check(halves_at_once)

# %% [markdown]
# ## On your GPUs
# The same cells run there. With a GPU per rank the all-reduces run over NCCL on a stream of their
# own, and the measured clock needs no correction: use `report.timeline()` without a replay. Look
# for the last bucket, and see how much of the others lies under backward.
#
# ## Read on
# * Li and others 2020, [PyTorch Distributed](https://arxiv.org/abs/2006.15704), sec. 3.2: the same
#   ladder, naive, bucketed, overlapped.
# * In the package: `paralab/parallel/data_parallel.py` has the three forms, each a pass of a few
#   lines. `pl.program(model, plan)` prints the program that a form makes.
