"""The layer relay: the same training, one part of the model on the device, bytes whatever m is.

What it trains: test_programs_equal.py; its copies, row by row: test_programs_offload.py; its boxes:
test_interpret_traffic.py.
"""

import pytest

import paralab as pl
from paralab.interpret import quick
from paralab.parallel.schedules import gpipe, relay
from paralab.theory.schedule_check import validate
from stated import TIERS

SMALL = pl.ModelSpec(layers=3, hidden=96, heads=4, seq_len=48)
RELAY = pl.Plan(schedule="l2l", zero_stage=3, offload="cpu", recompute="full", microbatches=4)


# ---- memory -----------------------------------------------------------------------------------
@pytest.mark.parametrize("prefetch, layers", [(0, 3), (1, 6)])
def test_one_part_at_a_time_is_on_the_device_and_prefetch_more(layers, prefetch):
    """Besides the causal mask, and gradients: a block's, and those on their way down."""
    model, plan = SMALL.replace(layers=layers, tied=False), RELAY.replace(prefetch=prefetch)
    h, mask = model.hidden, model.seq_len**2
    block = 4 * (12 * h * h + 13 * h)
    found, tied = (quick.most(one, plan) for one in (model, model.replace(tied=True)))
    assert found["buffers"] == (1 + prefetch) * block + mask
    assert found["gradients"] == 2 * block
    assert tied["buffers"] == found["buffers"] + 4 * (model.vocab + model.seq_len) * h


def test_what_is_between_two_parts_grows_with_m():
    """One boundary more for each micro-batch, of activations or of their gradients; besides what
    a lookup keeps, and the loss.
    """
    away = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme") | {"activations": "cpu"}
    plan = RELAY.replace(microbatch_size=8, offload=away)
    peaks = [sum(quick.peak(SMALL, plan.replace(microbatches=m)).values()) for m in (3, 5)]
    boundary = 4 * 8 * SMALL.seq_len * SMALL.hidden
    assert peaks[1] - peaks[0] == pytest.approx(2 * boundary, rel=0.05)


# ---- order ------------------------------------------------------------------------------------
def test_on_a_slow_link_it_is_m_times_as_fast():
    slow = TIERS.replace(host=pl.Link(alpha=1e-6, bandwidth=1e6))
    times = {name: pl.predict(SMALL, RELAY.replace(schedule=name, microbatches=8), slow).step_time
             for name in ("l2l", "gpipe")}  # fmt: skip
    assert times["gpipe"] / times["l2l"] == pytest.approx(8, rel=0.1)


def test_its_order_is_a_schedule_whose_stages_are_the_parts():
    validate([relay(4, 3)], microbatches=3, stages=4)
    assert " ".join(map(str, relay(3, 2))) == "0F0 0F1 1F0 1F1 2F0 2B0 2F1 2B1 1B0 1B1 0B0 0B1"
    assert RELAY.actions() == gpipe(1, 4)
