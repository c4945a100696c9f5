"""The widgets: a prediction that follows the sliders, “Run it” for a real run, “Stop”.

    explore     the whole plan: every degree, schedule, ZeRO, offload, recomputation, cluster
    data_parallel   ranks, form of gradient sync, bucket and micro-batch size, link speed
    memory      what training needs on one device: layers, hidden size, batch, bytes per parameter
    collective  ring against tree: ranks, tensor size, latency, bandwidth
    pipeline    schedule, ranks, micro-batches, chunks per rank, a slower stage, link speed
    tensor      tensor parallelism in 1D, 2D, 2.5D, 3D: tokens, hidden size, ranks
    zero        ZeRO's stages: devices, micro-batches, hidden size, precision, recomputation
    tensor1d    tensor parallelism in 1D: ranks, sequence parallelism, micro-batch size, link speed
    offload     how fast a disk must be: its bandwidth, batch, where states are, link to the host

Each is a `Widget`; widget.py has the calls that work without a mouse.
"""

from __future__ import annotations

from paralab.view.widget import Widget
from paralab.view.widget_bars import Tensor as tensor
from paralab.view.widget_bars import Zero as zero
from paralab.view.widget_collective import Collective as collective
from paralab.view.widget_explore import Explore as explore
from paralab.view.widget_memory import Memory as memory
from paralab.view.widget_offload import Offload as offload
from paralab.view.widget_pipeline import Pipeline as pipeline
from paralab.view.widget_steps import DataParallel as data_parallel
from paralab.view.widget_steps import Tensor1D as tensor1d

__all__ = [
    "Widget",
    "collective",
    "data_parallel",
    "explore",
    "memory",
    "offload",
    "pipeline",
    "tensor",
    "tensor1d",
    "zero",
]
