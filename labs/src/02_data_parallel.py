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
# trains on its own share of the batch. Here is all of it, by hand, in a dozen lines.


# %%
import numpy as np
import pandas as pd

import paralab as pl
from paralab import view

model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)


def by_hand(group, optimizer, lr, steps, divide=True):
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    from paralab.data import Corpus
    from paralab.model import GPT
    from paralab.train import load_batches, make_optimizer, to_device

    device = group.context.device
    gpt = GPT(model).to(device)  # the same first weights on every rank
    parameters = list(gpt.parameters())
    update = make_optimizer(parameters, optimizer, lr)
    plan, corpus = pl.Plan(dp=group.size, microbatch_size=4), Corpus()
    losses = []
    for step in range(steps):
        batch = load_batches(corpus, model, plan, step=step, rank=group.index, seed=0)[0]
        loss = gpt(*to_device(batch, device))
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
# Every rank comes out of backward with another gradient, because it saw other text. The all-reduce
# of lab 01 gives all of them the sum, and so the mean. All take the same step, and stay equal for
# ever.
#
# ## Commit to a guess
# What does that cost on the wire?

# %%
print(f"{model.num_params:,} parameters: one copy of the gradients is "
      f"{4 * model.num_params / 1e6:.2f} MB")  # fmt: skip
guess = pl.exercises.guess("MB that each of 4 ranks sends per step", low=0, high=16, unit="MB")
guess

# %% [markdown]
# ## Run it
# Four real processes. `Plan` says how the step is split.

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
# One row per rank: what it computed, and under it what was on the wire. Grey is a rank that waits.
# Most likely your machine has fewer cores than four ranks want, and then the wall clock mostly
# shows ranks waiting for a core. So this is your run *replayed*: each piece of work takes the
# processor time it really took, on a device of its own, and links carry 0.6 GB/s.

# %% tags=["measured", "readme-picture"]
report.replay(devices).timeline()

# %% [markdown]
# The gradients leave in buckets while backward is still running (that is why backward is cut into
# pieces), so part of the traffic costs no time; the title says how much. The last bucket has
# nothing left to hide behind.
#
# ## Count it

# %%
N, psi = plan.dp, model.num_params
theory_mb = 2 * (N - 1) / N * psi * 4 / 1e6
sent_mb = report.traffic().set_index("rank")["bytes"] / 1e6
print(f"2(N-1)/N Ψ : {theory_mb:.3f} MB per rank and step")
print(f"recorded   : {sent_mb[0]:.3f} MB per rank and step")
guess.reveal(round(sent_mb[0], 1))

# %% [markdown]
# Not N copies, and not even two, however many ranks there are:

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
# A summary of all traffic by what it is for, and every call by name, size and group, is what people
# [wish they had](https://github.com/traceopt-ai/traceml/issues/145), and as [raw
# data](https://github.com/deepspeedai/DeepSpeed/issues/7403). `report.collectives` has one row for
# every call of every rank and step. Those of rank 0 in step 3, one by one:

# %%
calls = report.collectives.query("step == 3 and rank == 0")
calls[["call", "op", "axis", "ranks", "phase", "payload_bytes", "wire_bytes"]].set_index("call")

# %% [markdown]
# Summed up by what they are for:

# %%
calls.groupby(["axis", "phase", "op"]).agg(
    calls=("call", "count"), payload=("payload_bytes", "sum"), sent=("wire_bytes", "sum")
)

# %% [markdown]
# And what else rank 0 took part in, in all steps:

# %%
setup = report.collectives.query("rank == 0 and phase != 'grad_sync'")
setup[["step", "op", "axis", "phase", "payload_bytes", "wire_bytes"]].drop_duplicates()

# %% [markdown]
# When a log shows [small collectives that nobody
# ordered](https://github.com/pytorch/torchtitan/issues/1369), this is how to tell them apart: each
# row says which axis of the plan it served and what for. Here the one small call is a handshake
# before the first step: do all ranks have the same settings and the same text?
#
# ## Three ways to send the same bytes
# `naive` sends every parameter's gradient by itself, after backward (the loop by hand sent all of
# them in one). `bucketed` packs gradients into a few large buffers first. `overlapped` sends each
# buffer as soon as it is full, while backward computes the rest. The same link for all three:

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
    print(f"{form:<10} {summary['step time']:6.1f} ms per step, of which waiting "
          f"{summary['waiting']:5.1f} ms")  # fmt: skip

# %% [markdown]
# The same bytes three times. Buckets save α, once per parameter; overlap hides most of the rest
# behind work that has to be done anyway. What the last bucket takes stays.
#
# ## Theory, replay, wall clock
# `predict` returns the same kind of report as `run`, from formulas and a short measurement of this
# machine. Three clocks side by side, and a sentence on every gap:

# %% tags=["measured"]
expect = pl.predict(model, plan)
pl.compare(expect, report)

# %% tags=["measured"]
view.timelines(
    expect, report.replay(), report, labels=["theory", "replayed", "wall clock"], ranks=[0]
)

# %% [markdown]
# Which one answers your question? *What would four devices do?* The replay. *What did this machine
# do?* The wall clock. *What will a machine do that I do not have?* The prediction, and the table
# says how far to trust it.
#
# ## When overlap cannot help
# «[My collectives do not overlap](https://github.com/deepspeedai/DeepSpeed/issues/5047), why?»
# Overlap hides traffic behind backward. So it fails when there is less backward than traffic: on a
# slow link, with a small batch, with a bucket as large as the model. The same run, on slower and
# slower links:

# %% tags=["measured"]
rows = []
for bandwidth in (8e9, 2e9, 5e8, 1.25e8):
    slow = devices.replace(name="slower", intra=link.replace(bandwidth=bandwidth))
    summary = forms["overlapped"].replay(slow).summary()["value"]
    rows.append({
        "GB/s": bandwidth / 1e9,
        "step (ms)": summary["step time"],
        "waiting (ms)": summary["waiting"],
        "hidden (%)": summary["of it hidden behind compute"],
    })  # fmt: skip
pd.DataFrame(rows).set_index("GB/s").round(1)

# %% [markdown]
# Find the best bucket yourself: tiny ones pay α too often, one huge one starts too late. *Run it*
# starts the real ranks.

# %%
pl.view.widgets.data_parallel(model, plan)

# %% [markdown]
# The same without a mouse, on a network that takes two milliseconds to answer:

# %%
network = devices.replace(name="a network", intra=pl.Link(alpha=2e-3, bandwidth=0.5e9))
for size in (2**14, 2**17, 2**20, 2**23):
    expected = pl.predict(model, plan.replace(bucket_bytes=size), cluster=network)
    waiting = expected.summary().loc["waiting", "value"]
    print(f"bucket of {size / 2**20:7.3f} MiB: step {1e3 * expected.step_time:5.1f} ms, "
          f"of it waiting {waiting:4.1f} ms")  # fmt: skip

# %% [markdown]
# ## Is it the same training?
# One process, with the four quarters of the batch one after the other: the same samples, the same
# first weights. Plain SGD, because it hides nothing:

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
# expect the loss to do?

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
# Adam divides by the size of the gradient, so it does not see the factor at all: the curve is the
# same, and the bug lives on until somebody changes the optimizer or clips by norm. A loss curve
# under Adam proves nothing. Equality with one process does, and that is how every paradigm in this
# kit is tested.
#
# ## Does it scale?
# *Strong scaling*: the same total batch on more ranks, so each has less to do but as much to say.
# *Weak scaling*: the same batch per rank, so the total grows. Real runs on 1, 2, 4 and 8 ranks; up
# to the number of cores the wall clock is honest, beyond it the replay is what devices of their own
# would do.

# %% tags=["measured"]
from paralab.cluster import available_cores

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
            rows.append({"form": kind, "ranks": n, "clock": "measured",
                         "samples_per_second": scaled.global_batch / run.step_time})  # fmt: skip
view.scaling(rows)

# %% [markdown]
# Weak scaling keeps more of the ideal, because the gradients do not grow with the number of
# samples. Strong scaling bends: at eight ranks each has two samples left to hide as many bytes
# behind. That is the limit of data parallelism in time. Its limit in memory is plainer: every rank
# still holds the whole model (lab 00).
#
# ## Your turn
# Write the sync yourself: pack gradients into buckets, send each while backward goes on, wait at
# the end. `Plan` takes your class in place of a name, so it runs in the real trainer. The checker
# holds gradients and weights against one process, counts bytes, and times the step on a stated
# link; only buckets *and* overlap together are fast enough.

# %%
exercise = pl.exercises.gradient_sync
exercise


# %%
class MySync:
    """Sum the gradients over the ranks: in buckets, and while backward still runs."""

    def __init__(self, parameters, *, group, bucket_bytes):
        self.parameters, self.group, self.bucket_bytes = parameters, group, bucket_bytes
        self.reset()

    def reset(self):
        """Before the next step's first backward."""
        for parameter in self.parameters:
            parameter.grad = None
        ### BEGIN SOLUTION
        ### STUB: # what else starts anew with every step?
        self.bucket, self.filled = [], 0  # gradients that have not left yet, and their bytes
        self.under_way = []
        ### END SOLUTION

    def grad_ready(self, parameter):
        """parameter.grad is complete on this rank, and backward goes on after this call."""
        ### BEGIN SOLUTION
        ### STUB: raise NotImplementedError("your turn")
        self.bucket.append(parameter)
        self.filled += parameter.grad.nbytes
        if self.filled >= self.bucket_bytes:
            self.send()
        ### END SOLUTION

    def finish(self):
        """Backward is over. When this returns, every gradient is the sum over the ranks."""
        ### BEGIN SOLUTION
        ### STUB: raise NotImplementedError("your turn")
        if self.bucket:
            self.send()
        for flat, parameters, pending in self.under_way:
            pending.wait()
            parts = flat.split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        ### END SOLUTION

    ### BEGIN SOLUTION
    ### STUB: # more methods, if you want some
    def send(self):
        """One message for the whole bucket, and no waiting."""
        import torch  # here, on the rank: the notebook's own process does without

        flat = torch.cat([parameter.grad.flatten() for parameter in self.bucket])
        self.under_way.append((flat, self.bucket, self.group.all_reduce(flat)))
        self.bucket, self.filled = [], 0

    ### END SOLUTION


exercise.check(MySync)

# %% [markdown]
# Stuck? `exercise.hint()` gives one push at a time, `exercise.solution()` shows an answer.

# %% [markdown] tags=["solution-only"]
# ## Another answer
# A subclass of the kit's own: what changes from bucketed to overlapped is *when* a bucket leaves,
# and nothing else. That is `Overlapped` in `paralab/parallel/data_parallel.py`, and it passes too.


# %% tags=["solution-only"]
def the_kits_own(parameters, *, group, bucket_bytes):
    from paralab.parallel.data_parallel import Overlapped

    return Overlapped(parameters, group=group, bucket_bytes=bucket_bytes)


exercise.check(the_kits_own)

# %% [markdown]
# ## On your GPUs
# The same cells. With a GPU per rank the all-reduces run over NCCL on a stream of their own, and
# the measured clock is the honest one: `report.timeline()` needs no replay. Look for the last
# bucket, and for the width of the others under backward.
#
# ## Read on
# * Li and others 2020, [PyTorch Distributed](https://arxiv.org/abs/2006.15704), sec. 3.2: the same
#   ladder, naive, bucketed, overlapped.
# * In the package: `paralab/parallel/data_parallel.py` is all three in one file, `train.py` has the
#   one division that makes the mean, `theory/predict.py` the same step without running it.
