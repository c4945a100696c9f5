"""Dry runs: what a rank of any plan holds and sends, against its prediction and arithmetic.

test_interpret_traffic.py and test_composed.py hold both against what ranks do.
"""

from __future__ import annotations

from math import prod

import pytest

import paralab as pl
from refusals import refuses
from stated import TIERS

MODEL = pl.ModelSpec(layers=4, hidden=64, heads=4, seq_len=32)
PLAN = pl.Plan(microbatches=2, microbatch_size=2, bucket_bytes=2**16)
NVME = dict.fromkeys(("activations", "parameters", "gradients", "optimizer"), "nvme")
CPUS = TIERS.replace(cores=8, devices_per_node=8)
COLUMNS = ["lane", "op", "category", "bytes"]


def away(table) -> dict[tuple[str, str], int]:
    """{(tier, category): most bytes} elsewhere than on the device."""
    most = table[table["tier"] != "device"].groupby(["tier", "category"])["bytes"].max()
    return most[most > 0].to_dict()


@pytest.mark.parametrize(("optimizer", "fields"), [
    ("sgd", {"pp": 2, "tp": 2, "dp": 2, "microbatches": 4, "recompute": "full",
             "partition_activations": True}),
    ("adamw", {"dp": 2, "zero_stage": 3, "offload": NVME, "recompute": "full"}),
], ids=["all axes", "files"])  # fmt: skip
def test_a_rank_copies_and_holds_what_is_predicted_of_it(optimizer, fields):
    plan = PLAN.replace(**fields)
    expect = pl.predict(MODEL, plan, CPUS, steps=1, optimizer=optimizer, detail="calls")
    for rank in sorted({0, 1, plan.world_size - 1}):
        dry = pl.dry_run(MODEL, plan, rank=rank, optimizer=optimizer)
        copies = expect.copies[expect.copies["rank"] == rank].sort_values("span", kind="stable")
        assert dry.copies[COLUMNS].values.tolist() == copies[COLUMNS].values.tolist()
        assert dry.peaks()["dry run"].to_dict() == expect.peaks(rank)["predicted"].to_dict()
        assert away(dry.memory) == away(expect.memory[expect.memory["rank"] == rank])


def test_for_gpus_it_holds_what_the_prediction_for_them_does():
    """gloo's buffers are not NCCL's."""
    gpus, plan = pl.Cluster.preset("dgx-a100"), pl.Plan(dp=2, zero_stage=1)
    here, there = (pl.dry_run(MODEL, plan, cluster=one).peak_memory for one in (gpus, None))
    assert here == pl.predict(MODEL, plan, gpus).peak_memory != there


# ---- the face ------------------------------------------------------------------------------------
TRILLION = pl.ModelSpec.preset("ptdp-1t")
BIG = pl.Plan(dp=6, tp=8, pp=64, microbatches=512, microbatch_size=1, recompute="full")


@pytest.fixture(scope="module")
def big():
    """A middle rank of the 1T plan; fewer micro-batches, as many alive at once."""
    cluster = pl.Cluster.preset("dgx-a100", nodes=384)
    return pl.dry_run(TRILLION, BIG.replace(microbatches=48), rank=1538, cluster=cluster)


def test_at_scale_bytes_are_those_of_arithmetic(big):
    held, plan, psi = big.peaks()["dry run"], big.plan, big.meta["num_params"]
    message = 4 * TRILLION.seq_len * TRILLION.hidden
    before = 1538 // 48  # stages in front of this one, of 64 with two blocks each
    block = sum(prod(shape) for name, shape in TRILLION.parameter_shapes().items()
                if name.startswith("blocks.7."))  # fmt: skip
    assert psi == pytest.approx(2 * block / 8, rel=1e-3)
    assert held["parameters"] == 4 * psi
    assert held["gradients"] == pytest.approx(4 * psi, rel=1e-6)
    assert held["optimizer"] == pytest.approx(8 * psi, rel=1e-6)
    # 1F1B: as many micro-batches as stages from here on, of each the inputs of two blocks.
    assert held["activations"] >= (64 - before) * 2 * message
    assert held["total"] == pytest.approx(16 * psi + (64 - before) * 2 * message, rel=0.1)
    sent = big.collectives.groupby(["axis", "level"])["wire_bytes"].sum()
    assert sent["pp", "inter"] == 2 * plan.microbatches * message
    # Two blocks: two all-reduces forward, two recomputed, two backward, 2 (t-1)/t x each.
    assert sent["tp", "intra"] == plan.microbatches * 2 * 6 * 2 * 7 * message // 8
    assert sent["dp", "inter"] == pytest.approx(2 * 5 / 6 * psi * 4, rel=1e-6)


def test_the_step_has_all_moments_and_clipping_sends_more():
    plan = PLAN.replace(dp=2, pp=2)
    one = pl.dry_run(MODEL, plan)
    moments = one.memory.groupby("step")["time"].agg(["min", "max"])
    assert moments.values.tolist() == one.steps[["start", "end"]].values.tolist()
    other = pl.dry_run(MODEL, plan, rank=2)  # of the second stage, with a copy of the embedding
    both = one.meta["num_params"] + other.meta["num_params"]
    assert both == MODEL.num_params + MODEL.vocab * MODEL.hidden
    clipped = pl.dry_run(MODEL, plan, clip_norm=1.0)
    assert len(clipped.collectives) > len(one.collectives)


def test_a_report_says_what_needs_no_clock_and_refuses_the_rest(big, tmp_path):
    assert "rank 1538 of 3072 ranks" in repr(big)
    sharded = pl.dry_run(MODEL, pl.Plan(dp=2, zero_stage=3)).summary()["unit"]["parameters"]
    assert sharded == big.summary()["unit"]["parameters"] + ", before ZeRO shards them"
    numbers = big.summary()["value"]
    assert numbers["peak memory"] == pytest.approx(big.peak_memory / 1e6, rel=1e-6)
    assert numbers["sent per step"] * 1e6 == pytest.approx(big.traffic()["bytes"].sum(), rel=1e-6)
    assert "dry run clock" in big.memory_chart().layout.title.text
    assert big.memory_chart().layout.xaxis.title.text == "events of the step, in order"
    refused = [
        lambda: big.timeline(), lambda: big.replay(), lambda: big.bubble, lambda: big.step_time,
        lambda: big.to_perfetto(tmp_path / "trace.json"), lambda: big.bubbles(),
        lambda: big.live_activations(), lambda: pl.compare(big, big),
    ]  # fmt: skip
    for ask in refused:
        refuses("clock='dry run'.*needs times.*pl.predict", ask)
    big.save(tmp_path / "dry.json")
    again = pl.load(tmp_path / "dry.json")
    assert again.clock == "dry run" and again.memory.equals(big.memory)
    big.to_html(tmp_path / "dry.html")
    assert "rank 1538" in (tmp_path / "dry.html").read_text()


@pytest.mark.parametrize(("arguments", "said"), [
    ({"rank": 3072}, "rank=3072.*from 0 to 3071"),
    ({"plan": BIG.replace(pp=256)}, "pp=256.*up to 128"),
    ({"model": MODEL}, "heads=4.*multiple of 8"),
    ({"clip_norm": -1.0}, "clip_norm=-1.0"),
    ({"cluster": pl.Cluster.preset("dgx-a100")}, "cluster='dgx-a100'.*3072 ranks"),
], ids=str)  # fmt: skip
def test_what_no_run_could_do_is_refused(arguments, said):
    refuses(said, pl.dry_run, **{"model": TRILLION, "plan": BIG, **arguments})
