"""`make bench`: every comparison with a peer, both sides timed in turn in one run; writes
bench.json.

python tests/benchmarks/run.py [NAME ...]     all, or those whose name contains one of the words
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import bench_data_parallel
import bench_gpu
import bench_host
import bench_instruments
import bench_launch
import bench_observe
import bench_offload
import bench_pipeline
import bench_predict
import bench_speed
import bench_tensor
import bench_zero

BENCHES: dict[str, Callable[[], list[dict]]] = {
    "launch": bench_launch.rows,
    "host": bench_host.measure,
    "instruments": bench_instruments.measure,
    "observe": bench_observe.measure,
    "data_parallel": bench_data_parallel.measure,
    "pipeline": bench_pipeline.measure,
    "zero": bench_zero.measure,
    "tensor": bench_tensor.measure,
    "offload": bench_offload.measure,
    "predict": bench_predict.measure,
    "speed": bench_speed.measure,
    "gpu": bench_gpu.measure,
}


def main(words: list[str]) -> None:
    rows = []
    for name, measure in BENCHES.items():
        if words and not any(word in name for word in words):
            continue
        for row in measure():
            rows.append(row)
            seconds = f"{row['paralab_s']:.4f} s, {row['peer_s']:.4f} s, ratio {row['ratio']:.3f}"
            print(
                f"{row['name']} against {row['peer']}\n    {seconds}\n    {row['note']}", flush=True
            )
    with open("bench.json", "w") as file:
        json.dump(rows, file, indent=1)
    print(f"{len(rows)} comparisons written to bench.json")


if __name__ == "__main__":
    main(sys.argv[1:])
