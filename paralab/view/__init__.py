"""Pictures of reports: plotly figures, the HTML page, the Perfetto trace. One theme; torch-free.

Every function here returns a `Chart`: a plotly Figure with the numbers behind it (`.table`) and a
line of text (its repr). Names are imported on first use, for plotly is slow to import.

    timelines    several reports on one time scale          losses       several runs' losses
    link_fit     alpha and bandwidth of a link              algorithms   time over tensor size
    bytes_bars   memory by category, against capacity       scaling      throughput over ranks
    seconds_bars   what the time of steps goes to, part by part
    memory_charts   memory of several runs over a step   memory_bars   their peaks by category
    stage_memory   the peaks of a pipeline's stages
    live_activations   how many micro-batches' activations a pipeline's ranks keep, over time
    blocks       which tp rank holds which block of X, W and Y in Y = X W: columns, rows, cubes
    multiplication   one such product step by step
    mesh         ranks as a grid, nodes as frames, the groups of one rank and what they send
    stage_time   how each stage spends a step that has more boxes than a screen has pixels
    crossover    what tensor parallelism in 1D, 2D, 2.5D and 3D sends, over the tokens
    stuck        how far a schedule that deadlocks gets
    contest      step times of several plans, predicted next to replayed or measured
    pareto       time against memory of every plan of a search
    jobs         a streamed optimizer update on its two lanes, the disk and the host
    simulated_timeline   a schedule as `theory.pipeline.simulate` timed it
    schedules    naive, GPipe, 1F1B, interleaved, ZB, or your own, on one axis
    zero_shards, zero_unit   what each rank keeps under ZeRO 0-3; the life of one of ZeRO-3's units
    ring         an all-reduce on a ring, chunk by chunk
    addresses    an address space over a step: fragmentation
    data_flow    what offload moves between device, host and files
    use_theme    "light" | "dark", for figures made from then on
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The public names of each module. No module is named like a function: importing it would hide that.
_NAMES = {
    "address_map": "addresses",
    "chart": "Chart",
    "job_times": "jobs",
    "links": "algorithms link_fit",
    "live": "live_activations",
    "loss": "losses",
    "matrix_blocks": "blocks",
    "matrix_steps": "multiplication",
    "memory_chart": "memory_bars memory_charts stage_memory",
    "pareto_front": "pareto",
    "pipeline": "schedules simulated_timeline",
    "plan_times": "contest",
    "rank_mesh": "mesh",
    "schematics": "data_flow ring",
    "stacked_bars": "bytes_bars seconds_bars",
    "stage_stretches": "stage_time",
    "standstill": "stuck",
    "tensor_curves": "crossover",
    "theme": "use_theme",
    "throughput": "scaling",
    "timeline": "timelines",
    "zero_schematics": "zero_shards zero_unit",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in __dir__():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULE_OF.get(name, name)}")
    return getattr(module, name) if name in _MODULE_OF else module


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF, "theme", "widgets"])
