"""`make bench`: every comparison with a peer, both sides timed in turn in one run; writes
bench.json.

python tests/benchmarks/run.py [NAME ...]     all, or those whose name contains one of the words
"""

from __future__ import annotations

import importlib
import json
import sys

NAMES = ("launch", "torch", "instruments", "offload", "predict", "speed", "gpu")


def main(words: list[str]) -> None:
    rows = []
    for name in NAMES:
        if words and not any(word in name for word in words):
            continue
        for row in importlib.import_module(f"bench_{name}").measure():
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
