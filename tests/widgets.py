"""What the tests of widgets share: a stated machine, small models, a widget of each kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import paralab as pl
from paralab.view import widgets

PATIENCE = 300  # seconds that a hang is waited for
LINK = pl.Link(alpha=1e-4, bandwidth=1e9)
CLUSTER = pl.Cluster(
    flops=5e10,
    memory_bandwidth=2e10,
    op_overhead=1e-5,
    intra=LINK,
    cores=2,
    memory=10**10,
    devices_per_node=64,
    host=LINK.replace(bandwidth=4e9),
    disk=LINK,
    host_bandwidth=1e10,
)
TINY = pl.ModelSpec(layers=1, hidden=32, heads=2, seq_len=16)
DEEP = pl.ModelSpec(layers=8, hidden=32, heads=4, seq_len=16)
WIDE = pl.ModelSpec(layers=2, hidden=64, heads=4, seq_len=16)
DATA = pl.Plan(dp=2, bucket_bytes=20_000)
BOTH = pl.Plan(dp=2, pp=2, microbatches=2, microbatch_size=1)
ZERO = pl.Plan(dp=2, zero_stage=2, microbatches=2, microbatch_size=1, bucket_bytes=2**17)

MAKE: dict[str, Callable[[], widgets.Widget]] = {
    "data_parallel": lambda: widgets.data_parallel(TINY, DATA, CLUSTER),
    "memory": lambda: widgets.memory(TINY, cluster=CLUSTER),
    "collective": lambda: widgets.collective(),
    "pipeline": lambda: widgets.pipeline(DEEP.replace(layers=4)),
    "zero": lambda: widgets.zero(DEEP.replace(layers=3, hidden=64, heads=2), ZERO),
    "tensor": lambda: widgets.tensor(),
    "tensor1d": lambda: widgets.tensor1d(WIDE, pl.Plan(tp=2, microbatch_size=2), CLUSTER),
    "offload": lambda: widgets.offload(WIDE, CLUSTER),
    "explore": lambda: pl.explore(DEEP, BOTH, CLUSTER),
}


def numbers(widget: widgets.Widget) -> list[dict[str, str]]:
    """The rows of its table."""
    rows = re.findall(r"<tr>(.*?)</tr>", widget._numbers.value)
    head, *rest = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    return [dict(zip(head, row, strict=True)) for row in rest]


def bars(chart: pl.view.Chart, category: str | None = None) -> dict[str, int]:
    """{bar: bytes} of memory and traffic side by side: those of memory, or of one category."""
    table = chart.table
    kept = table["category"] == category if category else table["category"] != "sent"
    return table[kept].groupby("bar", sort=False)["bytes"].sum().to_dict()


def shown(figure: Any) -> dict[str, Any]:
    """A figure as plain data, without what a screen adds to it."""
    plain = figure.to_plotly_json()
    return {
        "data": [{k: v for k, v in trace.items() if k != "uid"} for trace in plain["data"]],
        "layout": {k: v for k, v in plain["layout"].items() if v != []},
    }
