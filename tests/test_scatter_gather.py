"""Messages in parts: a t-th of each between stages, gathered by the receivers; nothing else moves.

PTD-P, Narayanan+ 2021, arXiv:2104.04473, sec. 4.1.
"""

from __future__ import annotations

from collections import Counter

import pytest

import paralab as pl
from paralab.interpret.traffic import rows
from paralab.programs.compile import compiled

SPEC = pl.ModelSpec(layers=4, hidden=48, heads=4, seq_len=24, vocab=260)
T = 2
WHOLE = pl.Plan(tp=T, pp=2, microbatches=3)
PLANS = {
    "1F1B": WHOLE,
    "zero bubble, recomputed": WHOLE.replace(schedule="zb-h1", recompute="full"),
    "interleaved, inputs in parts": WHOLE.replace(
        schedule="interleaved", virtual_stages=2, microbatches=4, recompute="full",
        partition_activations=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_bytes_are_the_papers(name):
    """Of x a t-th leaves for the next stage, and (t-1)/t of it goes over tp."""

    def sent(parts: bool) -> Counter:
        program, found = compiled(SPEC, plan.replace(partition_messages=parts)), Counter()
        for rank in range(plan.world_size):
            for row in rows(program, rank):
                found[row.op, row.axis, row.phase] += row.wire
        return found

    plan = PLANS[name]
    whole, parts = sent(False), sent(True)
    [message] = {key for key in whole if key[:2] == ("send", "pp")}
    gathers = ("all_gather", "tp", "activations")
    assert parts[message] * T == whole[message] > 0
    assert parts[gathers] * T == whole[message] * (T - 1) and gathers not in whole
    assert parts - Counter({message: parts[message], gathers: parts[gathers]}) == whole - Counter(
        {message: whole[message]}
    )


def test_it_pays_where_links_between_nodes_are_slow_and_messages_large():
    model = pl.ModelSpec.preset("gpt3-175b")
    plan = pl.Plan(tp=8, pp=8, microbatches=16, precision="fp16", recompute="full")
    nodes = pl.Cluster.preset("dgx-a100", nodes=8)
    slow = nodes.replace(inter=nodes.inter.replace(bandwidth=nodes.inter.bandwidth / 10))
    for cluster in (nodes, slow):
        whole, parts = (
            pl.predict(model, plan.replace(partition_messages=one), cluster, steps=1).step_time
            for one in (False, True)
        )
        assert parts < whole
