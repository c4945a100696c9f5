"""Which part of the model each pipeline stage holds. Torch-free: run and predict share it.

A model is a sequence of parts, "embedding", "blocks.0" ... "head". Stages are contiguous ranges of
it, each with at least one block. A pipeline runs at the pace of its slowest stage, so the partition
is the one whose most expensive stage is cheapest (PTD-P, Narayanan+ 2021, arXiv:2104.04473, sec.
2.2 assumes equal stages; a head of V columns is worth V/(12h) blocks). Since all blocks are alike,
it is enough to give each block to the stage that is cheapest so far. Between equally cheap stages
the last one gets it, since earlier stages hold more activations.

The cost of a stage is the FLOPs of one forward, from the ops (model/build.py); backward takes twice
as many everywhere. The embedding, a lookup, costs none.
"""

from __future__ import annotations

from functools import lru_cache

from paralab.checks import illegal
from paralab.model.build import build
from paralab.spec import ModelSpec, Plan


@lru_cache(maxsize=256)
def partition(model: ModelSpec, stages: int, batch: int = 1) -> list[tuple[str, ...]]:
    """The names of each stage's parts, stage by stage. batch: samples per micro-batch.

    Raises ValueError if there are fewer blocks than stages. The list is cached: do not modify it.
    """
    if not 1 <= stages <= model.layers:
        why = f"the model has {model.layers} blocks, and every stage needs one"
        raise illegal("stages", stages, why, f"1 to {model.layers}")
    small = build(model.replace(layers=1), Plan(microbatch_size=batch))
    cost = {name: sum(op.work[0].flops for op in small.ops[i:j]) for name, i, j in small.parts}
    block = cost["blocks.0"]
    load, blocks = [block] * stages, [1] * stages
    load[0] += cost["embedding"]
    load[-1] += cost["head"]
    for _ in range(model.layers - stages):
        cheapest = min(range(stages), key=lambda s: (load[s], -s))
        load[cheapest] += block
        blocks[cheapest] += 1
    names = iter(f"blocks.{i}" for i in range(model.layers))
    parts = [tuple(next(names) for _ in range(count)) for count in blocks]
    parts[0] = ("embedding", *parts[0])
    parts[-1] = (*parts[-1], "head")
    return parts
