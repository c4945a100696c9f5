"""Pictures of reports: plotly figures, the HTML page, the Perfetto trace. One theme; torch-free.

Every function here returns a `Chart`: a plotly Figure with the numbers behind it (`.table`) and a
line of text (its repr). Names are imported on first use, for plotly is slow to import.

    timelines    several reports on one time scale          losses       several runs' losses
    link_fit     alpha and bandwidth of a link              algorithms   time over tensor size
    bytes_bars   memory by category, against capacity       scaling      throughput over ranks
    seconds_bars   what the time of steps goes to, part by part
    memory_charts   memory of several runs over a step   memory_bars   their peaks by category
    live_activations   micro-batches that a pipeline's ranks keep, over time
    blocks       which tp rank holds which block of X, W and Y in Y = X W: columns, rows, cubes
    multiplication   one such product step by step
    mesh         ranks as a grid, nodes as frames, the groups of one rank and what flows in them
    link_traffic   what a rank sends and copies, link by link; stage_memory: what each stage needs
    stage_time   what each stage does with a step of more boxes than a screen has pixels
    crossover    what 1D, 2D, 2.5D and 3D send, over the tokens
    stuck        how far a schedule gets that deadlocks
    contest      several plans by the time of a step, predicted and found
    pareto       time against memory of every plan of a search
    jobs         a streamed update on the lanes disk and host
    disk_needed  how busy a device is, over the bandwidth of the disk that it offloads to
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

# name: the module it lives in. No module has a function's name, or importing one would hide the
# other.
_HOME = {
    "Chart": "chart",
    "addresses": "address_map",
    "algorithms": "links",
    "blocks": "matrix_blocks",
    "bytes_bars": "memory",
    "contest": "plan_times",
    "data_flow": "schematics",
    "crossover": "tensor_curves",
    "disk_needed": "offload_curves",
    "jobs": "job_times",
    "link_fit": "links",
    "link_traffic": "traffic_bars",
    "live_activations": "live",
    "losses": "loss",
    "memory_bars": "memory_chart",
    "memory_charts": "memory_chart",
    "mesh": "rank_mesh",
    "multiplication": "matrix_steps",
    "pareto": "pareto_front",
    "ring": "schematics",
    "scaling": "throughput",
    "schedules": "pipeline",
    "seconds_bars": "time_bars",
    "simulated_timeline": "pipeline",
    "stage_memory": "stage_bars",
    "stage_time": "stage_stretches",
    "stuck": "standstill",
    "timelines": "timeline",
    "use_theme": "theme",
    "zero_shards": "zero_schematics",
    "zero_unit": "zero_schematics",
}
_MODULES = ("theme", "widgets")

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
