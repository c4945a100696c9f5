"""Plans drawn at random, with a model that they fit: fields, values of a size that makes sense."""

from __future__ import annotations

import random

import paralab as pl
from paralab.spec import SCHEDULE_NAMES

SMALL = {"layers": 4, "hidden": 48, "heads": 4, "seq_len": 16, "vocab": 260}
TIERS = (
    {"activations": "cpu"}, {"activations": "nvme", "optimizer": "cpu"}, {"optimizer": "nvme"},
    {"gradients": "cpu", "optimizer": "cpu", "delayed": True}, {"gradients": "cpu"},
    {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}, {"parameters": "cpu"},
)  # fmt: skip
PLAN = {
    "dp": (1, 2, 3, 4, 8),
    "tp": (1, 2, 3, 4, 8, 9),
    "pp": (1, 2, 3, 4, 5),
    "schedule": SCHEDULE_NAMES,
    "microbatches": (1, 2, 3, 4, 5, 6, 7, 12),
    "microbatch_size": (1, 2, 4),
    "virtual_stages": (1, 2, 3),
    "zero_stage": (0, 1, 2, 3),
    "shard": (None, 1, 2, 3),
    "sequence_parallel": (False, True),
    "recompute": ("none", "selective", "full"),
    "offload": (None, "cpu", "nvme", *TIERS),
    "precision": ("fp32", "bf16", "fp16"),
    "grad_dtype": (None, "fp32"),
    "tp_mode": ("1d", "2d", "2.5d", "3d"),
    "tp_depth": (None, 1, 2),
    "partition_activations": (False, True),
    "partition_messages": (False, True),
    "grad_sync": ("naive", "bucketed", "overlapped"),
    "bucket_bytes": (1, 7_000, 50_000, 10**9),
    "prefetch": (0, 1, 2, 5),
}
MODEL = {
    "layers": (1, 2, 4, 5, 6),
    "heads": (1, 3, 4, 8),
    "hidden": (24, 40, 48),
    "seq_len": (8, 9, 16),
    "vocab": (256, 257, 260, 264),
    "tied": (True, False),
    "dropout": (0.0, 0.1),
    "attention": ("explicit", "sdpa"),
}


def legal(
    chance: random.Random, ranks: int, of_plan: dict = PLAN, of_model: dict = MODEL
) -> tuple[pl.ModelSpec, pl.Plan]:
    """Changes of a plain plan and model, some at a time, as long as they are legal together."""
    model, plan = pl.ModelSpec(**SMALL), pl.Plan()
    for _ in range(60):
        names = chance.sample([*of_plan, *of_model], chance.randint(1, 3))
        more = {name: chance.choice((of_plan | of_model)[name]) for name in names}
        try:
            other = model.replace(**{n: v for n, v in more.items() if n in of_model})
            changed = plan.replace(**{n: v for n, v in more.items() if n in of_plan})
            changed.validate(other)
        except ValueError:
            continue
        if changed.world_size <= ranks:
            model, plan = other, changed
    return model, plan
