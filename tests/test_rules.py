"""The rules of plans: each refuses its example, and a column of plans is judged as each plan is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import paralab as pl
from drawn import PLAN, SMALL
from paralab.spec import rules
from paralab.spec.settings import Columns, Settings
from test_drawn_plans import refused

DRAWN = 6_000
SIZES = (  # of the model that the plans are asked of
    SMALL,
    SMALL | {"layers": 5, "hidden": 40, "heads": 8, "vocab": 257, "seq_len": 9},
    SMALL | {"dropout": 0.1, "attention": "sdpa", "vocab": 264},
)
PIPE = {"pp": 2, "microbatches": 2}
UP = {"zero_stage": 3, "offload": "cpu", "recompute": "full", "schedule": "l2l"}
AWAY = {"offload": {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu"}}
# Of every rule an example that it alone refuses: the field, the plan, what of the model, and of
# some what is legal.
EXAMPLES: list[tuple[Any, ...]] = [
    ("schedule", {"schedule": "own: mine"}, {}),
    ("passes", {"passes": ("own: mine",)}, {}),
    ("dp", {"dp": 2**17}, {}),
    ("microbatch_size", {"microbatch_size": 2**20}, {"seq_len": 2**20}),
    ("tp_depth", {"tp_depth": 1}, {}, "None, or tp_mode='2.5d'"),
    ("tp", {"tp": 6, "tp_mode": "2d"}, {}, "1, 4, 9, 16"),
    ("tp", {"tp": 6, "tp_mode": "2.5d"}, {}, "1, 4, 8, 9"),
    ("tp", {"tp": 8, "tp_mode": "2.5d", "tp_depth": 4}, {}, "4, 16, 36"),
    ("tp", {"tp": 4, "tp_mode": "3d"}, {}, "1, 8, 27"),
    ("sequence_parallel", {"sequence_parallel": True}, {}, "False, or tp_mode='1d' with tp of"),
    ("sequence_parallel", {"sequence_parallel": True, "tp": 4, "tp_mode": "2d"}, {}, "'1d'"),
    ("tp_overlap", {"tp_overlap": False, "tp": 4, "tp_mode": "2d"}, {}),
    ("partition_activations", {"partition_activations": True, "tp": 2}, {}, "recompute='full'"),
    ("partition_activations", {"partition_activations": True, "recompute": "full"}, {},
     "tp of at least 2 and sequence_parallel=False"),
    ("partition_activations", {"partition_activations": True, "recompute": "full", "tp": 2,
     "sequence_parallel": True}, {}, "sequence_parallel=False"),
    ("partition_messages", {"partition_messages": True, "tp": 2}, {}, "tp and pp of at least 2"),
    ("partition_messages", PIPE | {"partition_messages": True}, {}, "tp and pp of at least 2"),
    ("heads", {"tp": 4}, {"hidden": 36, "heads": 6},
     "a multiple of 4 that divides hidden=36, or another tp"),
    ("heads", {"tp": 3}, {"hidden": 128}, "tp such as 2 or 4 (no multiple of 3 divides"),
    ("hidden", {"tp": 8, "tp_mode": "3d", "microbatch_size": 4}, {"hidden": 42, "heads": 6},
     "a multiple of 12, such as 36 or 48"),
    ("hidden", {"tp": 8, "tp_mode": "3d", "microbatch_size": 4}, {"hidden": 42, "heads": 2},
     "a multiple of 4, such as 40 or 44"),
    ("vocab", {"tp": 4}, {"vocab": 257}, "a multiple of 4, such as 256 or 260"),
    ("microbatch_size", {"tp": 4, "tp_mode": "2d", "microbatch_size": 3}, {}, "a multiple of 2"),
    ("microbatch_size", {"tp": 8, "tp_mode": "2.5d", "microbatch_size": 2}, {}, "a multiple of 4"),
    ("microbatch_size", {"tp": 8, "tp_mode": "3d", "microbatch_size": 2}, {}, "a multiple of 4"),
    ("seq_len", {"tp": 2, "sequence_parallel": True}, {"seq_len": 9}, "such as 8 or 10"),
    ("seq_len", PIPE | {"tp": 2, "partition_messages": True}, {"seq_len": 9}, "such as 8 or 10"),
    ("attention", {"tp": 2}, {"dropout": 0.1, "attention": "sdpa"}, "'explicit', or dropout=0"),
    ("pp", UP | {"pp": 2}, {}),
    ("virtual_stages", UP | {"virtual_stages": 2}, {}),
    ("zero_stage", UP | {"zero_stage": 2}, {}),
    ("offload", UP | {"offload": {"optimizer": "cpu"}}, {}),
    ("recompute", UP | {"recompute": "none"}, {}),
    ("virtual_stages", {"virtual_stages": 2, "schedule": "interleaved"}, {}),
    ("virtual_stages", PIPE | {"virtual_stages": 2}, {}),
    ("pp", {"pp": 5}, {}),
    ("virtual_stages", PIPE | {"schedule": "interleaved", "virtual_stages": 3}, {}),
    ("microbatches", {"microbatches": 2**18, "pp": 2}, {}),
    ("microbatches", PIPE | {"schedule": "interleaved", "microbatches": 3, "virtual_stages": 2},
     {"layers": 4}, "schedule='1f1b' with virtual_stages=1"),
    ("schedule", PIPE | {"schedule": lambda pp, microbatches: [["0F0", "0B0"]]}, {}),
    ("grad_dtype", {"grad_dtype": "fp32"}, {}),
    ("tf32", {"tf32": True, "precision": "bf16"}, {}),
    ("shard", {"dp": 2, "shard": 2}, {}),
    ("shard", {"dp": 2, "shard": 3, "zero_stage": 1}, {}),
    ("secondary_shard", {"dp": 4, "secondary_shard": 2}, {}),
    ("secondary_shard", {"dp": 4, "zero_stage": 3, "secondary_shard": 3}, {}),
    ("grad_sync", {"zero_stage": 1, "grad_sync": "naive"}, {}),
    ("zero_stage", {"offload": "cpu"}, {}),
    ("offload", {"offload": {}}, {}),
    ("offload['optimizer']", {"offload": {"optimizer": "cpu"}}, {}),
    ("offload['gradients']", AWAY | {"zero_stage": 1}, {}),
    ("offload['gradients']", {"zero_stage": 2, "offload": {"gradients": "cpu"}}, {}),
    ("offload['parameters']", AWAY | {"zero_stage": 2}, {}),
    ("offload['parameters']", {"zero_stage": 3, "offload": {"parameters": "nvme"}}, {}),
    ("offload['activations']", {"offload": {"activations": "cpu"}}, {}),
    ("offload['delayed']", {"zero_stage": 1, "offload": {"optimizer": "cpu", "delayed": True}}, {}),
]  # fmt: skip


def holds(rule: rules.Rule, settings: Settings) -> bool:
    """A schedule of one's own says itself that it does not."""
    try:
        return bool(rule.holds(settings))
    except ValueError:
        return False


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: str(example)[:60])
def test_every_rule_refuses_its_example_in_words(example):
    field, settings, sizes, *legal = example
    said = refused(lambda: pl.Plan(**settings).validate(pl.ModelSpec(**{**SMALL, **sizes})))
    assert said.startswith(f"{field}=") and "{" not in said.replace("offload={}", "")
    assert "".join(legal) in said.partition("; legal: ")[2]


def test_no_rule_is_without_an_example():
    """Of a block of one's own tests/test_ops.py has them."""
    met = set()
    for _, settings, sizes, *_ in EXAMPLES:
        given = Settings(pl.Plan(**settings), pl.ModelSpec(**{**SMALL, **sizes}))
        met.add(next(id(rule) for rule in rules.RULES if not holds(rule, given)))
    without = [rule.field for rule in rules.RULES if id(rule) not in met]
    assert without == [rule.field for rule in rules.BLOCK]


def drawn(count: int) -> list[pl.Plan]:
    """Plans of a few settings each, legal or not; their values are drawn alike in every run."""
    chance, found = random.Random(0), []
    while len(found) < count:
        names = [name for name in PLAN if chance.random() < 0.3]
        found.append(pl.Plan(**{name: chance.choice(PLAN[name]) for name in names}))
    return found


def columns(plans: Sequence[pl.Plan], model: pl.ModelSpec) -> Columns:
    values, codes = {}, {}
    for name in pl.Plan.__dataclass_fields__:
        of = [getattr(plan, name) for plan in plans]
        values[name] = list(dict.fromkeys(of))
        at = {value: number for number, value in enumerate(values[name])}
        codes[name] = np.array([at[value] for value in of])
    return Columns(model, values, codes)


@pytest.mark.parametrize("sizes", SIZES, ids=range(len(SIZES)))
def test_a_column_is_judged_as_each_of_its_plans(sizes):
    model, plans = pl.ModelSpec(**sizes), drawn(DRAWN // len(SIZES))
    table = columns(plans, model)
    for number, rule in enumerate(rules.RULES):
        together = np.broadcast_to(rule.holds(table), len(plans))
        alone = [bool(rule.holds(Settings(plan, model))) for plan in plans]
        assert together.tolist() == alone, (number, rule.field)
    legal = np.logical_and.reduce([rule.holds(table) for rule in rules.RULES], axis=0)
    assert 20 < legal.sum() < len(plans)
    for plan, so in zip(plans, legal.tolist(), strict=True):
        assert (refused(lambda plan=plan: plan.validate(model)) == "") == so
