"""Lab 02: data parallelism as DDP does it, a wrapper whose hooks fill buckets during backward.

The answer trains the model of `average_gradients` (sync.py). In addition, backwards of layers with
the laptop model's sizes run through the wrapper, and their recorded order is replayed with stated
costs, in which packing is free. So the simulated time is the same on every machine, and only
buckets that overlap with backward keep the limit (Li+ 2020, arXiv:2006.15704, sec. 3.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paralab.exercises import sync
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import torch
from paralab.exercises.sync import RANKS
from paralab.exercises.verdict import first, ms
from paralab.spec import Cluster, Link, ModelSpec
from paralab.spec.links import messages

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.report import Report

BUCKET = 48 * 1024
# What is timed: backwards of this model, on these links.
TIMED = ModelSpec.preset("laptop")
TIMED_BUCKET = 512 * 1024
BACKWARDS = 3  # a later one shows what an earlier one leaves in memory, or sums again
BACKWARD_S = 12e-3
CALL_S, LINK = 0.25e-3, Link(alpha=0.25e-3, bandwidth=625e6)
CLUSTER = Cluster(
    name="5 Gbit/s",
    flops=1e12,
    memory_bandwidth=1e11,
    intra=LINK,
    collectives={  # with an α that makes a call cost CALL_S, whatever its number of messages
        op: LINK.replace(alpha=CALL_S / messages(op, RANKS))
        for op in ("all_reduce", "all_gather", "reduce_scatter")
    },
)
LIMIT_S = 15e-3  # buckets without overlap take 21 ms, overlap without buckets as long
EXTRA_COPIES = 1.5
REQUIRED = sync.REQUIRED | {
    sync.BYTES: f"{sync.REQUIRED[sync.BYTES]}; a message is at most bucket_bytes and one gradient",
    "simulated step": f"at most {1e3 * LIMIT_S:.0f} ms, with 12 ms of backward and 8 ms of bytes",
    "extra memory": "tensors: at most one and a half copies of the gradients",
}
GRADIENTS, WEIGHTS, BYTES, TIME, MEMORY = REQUIRED


@exercise(
    Takes("MyDDP(module, bucket_bytes=...)", methods=("no_sync", "finish")), required=REQUIRED
)
def my_ddp(tries: Tries) -> None:
    early = sync.look_at_training(tries, trained, BUCKET)
    sizes = [math.prod(shape) for shape in TIMED.parameter_shapes().values()]
    size, settings = 4 * sum(sizes), {"limit": TIME, "unbroken": (GRADIENTS, WEIGHTS)}
    for notes, outcome in tries.run(backwards, RANKS, sizes, TIMED_BUCKET, **settings):
        if wrong := first(outcome["wrong"]):
            notes.look(GRADIENTS, wrong, "")
        seconds = simulated(outcome.report, sizes) / BACKWARDS
        notes.at_most(TIME, seconds, LIMIT_S, ms, _why_slow(outcome.report, len(sizes)))
        most = int(EXTRA_COPIES * size)
        words, why = "has {} bytes in addition to the gradients", f"; the gradients have {size:,}"
        if max(outcome["left"]) > size:
            kept = f"{max(outcome['left']):,} bytes are still there"
            why += f", and {kept} when {BACKWARDS} backwards are over"
        notes.memory(MEMORY, outcome["extra"], most, words, why)
    for notes, words in early:
        if words and not notes.broke((BYTES,)):
            notes.look(BYTES, words, "")


# ---- what every rank runs ------------------------------------------------------------------------
def trained(watch: Any, answer: tuple, seed: int, steps: int) -> dict[str, Any]:
    """Training through the answer's wrapper; before, weights of rank r are too large by r."""

    def wrap(gpt: Any) -> tuple[Any, Any]:
        watch.label = "weights of rank 0"
        ddp = answer[0](gpt, bucket_bytes=BUCKET)
        watch.label = "data"
        return ddp, ddp.finish

    return sync.training(watch, steps, wrap, shift=watch.group.index)


def backwards(
    watch: Any, answer: tuple, seed: int, sizes: Sequence[int], bucket_bytes: int
) -> dict[str, Any]:
    """Some backwards through the wrapper; gradients complete from the last layer to the first.
    Returns "extra", the bytes beyond gradients, "left", those that are there in the end, and
    "wrong", the first wrong gradient in words.
    """
    from paralab.exercises.timed import timed

    group, draw = watch.group, torch.Generator().manual_seed(seed)
    module, wrong = timed([[size] for size in sizes], watch.recorder), ""
    parameters = list(module.parameters())
    with watch.section() as section:
        ddp = answer[0](module, bucket_bytes=bucket_bytes)
        for backward in range(BACKWARDS):
            with watch.unseen():
                values = torch.rand(len(sizes), generator=draw).tolist()  # rank 0's gradients
            for layer, value in zip(module, values, strict=True):
                layer.gradient = value + group.index
            ddp(torch.zeros(1, requires_grad=True)).backward()
            ddp.finish()
            for number, parameter in enumerate(parameters):
                mean = values[number] + (group.size - 1) / 2
                gradient = parameter.grad
                with watch.unseen():
                    off = math.nan if gradient is None else (gradient - mean).abs().max().item()
                if not off <= 1e-5 * mean:
                    yours = "None" if gradient is None else f"{gradient.flatten()[0]:.5g}"
                    wrong = wrong or (
                        f"in backward {backward + 1} of the timed model, rank {group.index} has "
                        f"{yours} in the gradient of tensor {number}, required: {mean:.5g}"
                    )
                parameter.grad = gradient = None
        left = section.now()
    gradients = 4 * sum(sizes)  # alive at the peak: they are made within the section
    return {"extra": section.peak - gradients, "left": left, "wrong": wrong}


# ---- what the runs show --------------------------------------------------------------------------
def replayed(report: Report, cluster: Cluster, **costs: Sequence[float]) -> pd.DataFrame:
    """Spans of timed layers (timed.py), replayed in their recorded order on ``cluster``. costs:
    {kind: seconds of each layer}; all other work takes no time.
    """
    spans = report.spans.sort_values(["rank", "id"])
    named = zip(spans["kind"], spans["chunk"], strict=True)  # chunk 0: not a layer's span
    cost = [costs[kind][chunk - 1] if chunk and kind in costs else 0.0 for kind, chunk in named]
    return dataclasses.replace(report, spans=spans.assign(cost=cost)).replay(cluster).spans


def simulated(report: Report, sizes: Sequence[int]) -> float:
    """Seconds of all backwards; in each, every gradient takes its share of 12 ms.

    sizes  elements of each parameter, in order of registration
    """
    shares = [BACKWARD_S * size / sum(sizes) for size in sizes]
    spans = replayed(report, CLUSTER, backward=shares)
    return float(spans["end"].max() - spans["start"][spans["kind"] == "backward"].min())


def _why_slow(report: Report, gradients: int) -> str:
    """The reason for a long step, from the recorded order of rank 0's first backward, in words."""
    mine = report.spans[report.spans["rank"] == 0].sort_values("id")
    kinds = mine["kind"].tolist()
    ready = [place for place, kind in enumerate(kinds) if kind == "backward"]
    first, last, following = ready[0], ready[gradients - 1], ready[gradients]
    calls = kinds[first:following].count("comm")
    if "comm" not in kinds[first:last]:
        return ": nothing is sent before backward is over"
    if "wait" in kinds[first:last]:
        return ": backward is idle while the rank waits for a message"
    return f": {calls} messages are sent, and each takes 0.25 ms in addition to its bytes"
