"""FLOPs of a step against torch's own count, and the shares of a peak.

Papers' formulas of them are in test_training.py and test_papers_ptdp.py.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import paralab as pl
from paralab.interpret.train import Trainer
from paralab.report.summary import achieved, utilisation
from paralab.theory.needs import step_flops
from refusals import refuses

MODEL = pl.ModelSpec(layers=3, hidden=48, heads=4, seq_len=24, vocab=264, attention="explicit")
LINK = pl.Link(alpha=0.0, bandwidth=1e12)
WIDE = pl.ModelSpec(layers=2, hidden=4096, heads=4, seq_len=64, vocab=264)
# Bytes take no time; of a wide model nearly all FLOPs are products'.
PRODUCTS = pl.Cluster(flops=1e12, memory_bandwidth=1e30, intra=LINK, peak_flops=4e12)
HOW = ("none", "selective", "full")


def counted(group, asked: list[tuple[pl.ModelSpec, str]], samples: int) -> list[int]:
    """FLOPs that torch counts in a step of the program, for each (model, recompute)."""
    found = []
    for spec, recompute in asked:
        plan = pl.Plan(microbatch_size=samples, recompute=recompute)
        trainer = Trainer(group.context, spec, plan)
        with FlopCounterMode(display=False) as counter:
            trainer.step(0)
        found.append(counter.get_total_flops())
    return found


def test_flops_are_those_that_torch_counts_in_a_step():
    asked = [(MODEL.replace(tied=tied), recompute) for tied in (True, False) for recompute in HOW]
    (theirs,) = pl.trace(counted, ranks=1, args=(asked, 2)).results
    assert [step_flops(model, 2, recompute=recompute) for model, recompute in asked] == theirs
    assert step_flops(MODEL, 2) == theirs[0]
    assert step_flops(MODEL, 2, recompute=True) == theirs[2]  # as "full"


def test_a_device_that_does_nothing_but_multiply_uses_all_that_it_reaches():
    plan = pl.Plan(microbatches=3, microbatch_size=2)
    report = pl.predict(WIDE, plan, PRODUCTS, steps=1, optimizer="sgd")
    work = step_flops(WIDE, plan.global_batch)
    assert 1 - 1e-9 <= report.step_time / (work / 1e12) <= 1.02
    assert utilisation(report) == pytest.approx({"model": 0.25, "hardware": 0.25}, rel=0.02)
    said = report.summary()["value"]
    assert said["model FLOPs utilisation"] == pytest.approx(25, rel=0.02)
    assert said["model FLOP/s per device"] == pytest.approx(1000, rel=0.02)  # GFLOP/s


def test_recomputing_is_work_of_the_hardware_and_none_of_the_models():
    plan = pl.Plan(microbatches=2, recompute="full")
    report = pl.predict(WIDE, plan, PRODUCTS, steps=1, optimizer="sgd")
    found = utilisation(report)
    assert found["hardware"] == pytest.approx(0.25, rel=0.02)
    assert found["model"] < 0.8 * found["hardware"]
    rates = achieved(report)
    assert rates["model"] / found["model"] == pytest.approx(4e12)


def test_without_a_peak_or_a_formula_of_flops_there_is_no_utilisation():
    report = pl.predict(MODEL, pl.Plan(), PRODUCTS.replace(peak_flops=None), steps=1)
    assert utilisation(report) == {}
    assert not [name for name in report.summary().index if "utilisation" in name]
    model = MODEL.replace(block=lambda spec: torch.nn.Linear(spec.hidden, spec.hidden))
    refuses("block=.*not a block of your own; legal: ", step_flops, model, 1)
    report = pl.predict(model, pl.Plan(), PRODUCTS)
    assert achieved(report) == utilisation(report) == {}
    assert "FLOP" not in report.summary().to_string() and report.step_time > 0
    refuses("run 0 is refused: block=", pl.fit_cluster, [(model, pl.Plan(), 1.0)], PRODUCTS)


def test_a_replay_with_other_costs_of_compute_uses_no_device_that_there_is(tmp_path):
    report = pl.predict(MODEL, pl.Plan(dp=2), PRODUCTS, steps=2)
    assert utilisation(report.replay(PRODUCTS)) == pytest.approx(utilisation(report))
    for compute in (0.0, 0.25, 2.0):
        scaled = report.replay(PRODUCTS, compute=compute)
        scaled.save(tmp_path / "scaled.json")
        again = scaled.replay(PRODUCTS)  # which keeps the costs that it was given
        for found in (scaled, again, pl.load(tmp_path / "scaled.json")):
            assert achieved(found) == utilisation(found) == {}
            assert "FLOP" not in found.summary().to_string() and found.step_time > 0
    back = report.replay(PRODUCTS, compute=2.0).replay(PRODUCTS, compute=0.5)
    assert utilisation(back) == pytest.approx(utilisation(report))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("detail", [None, "actions"])
def test_products_on_few_tokens_are_slower_by_hockneys_rule(detail, precision):
    fast, tokens = {"bf16": (1e13, 2e13, 3e13)}, MODEL.seq_len
    for size, times in ((1, 2), (4, 1.25)):
        plan = pl.Plan(microbatches=2, microbatch_size=size, precision=precision)
        slow, full = (
            pl.predict(MODEL, plan, PRODUCTS.replace(half_rate_tokens=half, products=fast),
                       steps=1, detail=detail).step_time
            for half in (tokens, 0)
        )  # fmt: skip
        assert slow == pytest.approx(times * full, rel=1e-3)
