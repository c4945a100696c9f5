"""Pictures of reports: plotly figures, the HTML page, the Perfetto trace. One theme; torch-free.

Every function here returns a `Chart`: a plotly Figure with the numbers behind it (`.table`) and a
line of text (its repr). Names are imported on first use, for plotly is slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Each row: module, name, what it shows. No module is named like a function: importing it would
# hide the function.
_FIGURES = """
timeline         timelines  several reports on one time scale
stage_stretches  stage_time  how each stage spends a step that has too many boxes for a screen
memory_chart     memory_charts  memory of several runs over a step
memory_chart     memory_bars  the peaks of several runs by category
memory_chart     stage_memory  the peaks of a pipeline's stages
stacked_bars     bytes_bars  memory by category, against capacity
stacked_bars     seconds_bars  what the time of steps goes to, part by part
loss             losses  several runs' losses
throughput       scaling  throughput over ranks
plan_times       contest  step times of several plans, predicted next to replayed or measured
pareto_front     pareto  time against memory of every plan of a search
pipeline         schedules  naive, GPipe, 1F1B, interleaved, ZB, or your own, on one axis
pipeline         simulated_timeline  a schedule as `theory.pipeline.simulate` timed it
live             live_activations  how many micro-batches' activations a pipeline's ranks keep
standstill       stuck  how far a schedule that deadlocks gets
rank_mesh        mesh  ranks as a grid, nodes as frames, one rank's groups and what they send
matrix_blocks    blocks  which tp rank holds which block of X, W and Y in Y = X W
matrix_steps     multiplication  one such product step by step
tensor_curves    crossover  what tensor parallelism in 1D, 2D, 2.5D and 3D sends, over the tokens
zero_schematics  zero_shards  what each rank keeps under ZeRO 0-3
zero_schematics  zero_unit  the life of one of ZeRO-3's units
schematics       data_flow  what offload moves between device, host and files
job_times        jobs  a streamed optimizer update on its two lanes, the disk and the host
address_map      addresses  an address space over a step: fragmentation
schematics       ring  an all-reduce on a ring, chunk by chunk
links            link_fit  alpha and bandwidth of a link
links            algorithms  time over tensor size
chart            Chart  what all of these return
theme            use_theme  "light" | "dark", for figures made from then on
"""
_ROWS = [line.split(maxsplit=2) for line in _FIGURES.strip().splitlines()]
_MODULE_OF = {name: module for module, name, _ in _ROWS}

__all__ = sorted(_MODULE_OF)
__doc__ = "\n    ".join([__doc__ or "", *(f"{name:20}{shows}" for _, name, shows in _ROWS)])


def __getattr__(name: str) -> Any:
    if name not in __dir__():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULE_OF.get(name, name)}")
    return getattr(module, name) if name in _MODULE_OF else module


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF, "theme", "widgets"])
