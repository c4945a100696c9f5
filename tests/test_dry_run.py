"""Dry runs: what a rank of any plan holds and sends, against real runs and against formulas."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest

import paralab as pl
from paralab import cli
from paralab.dry_run import _program
from paralab.launch import launch_program
from paralab.records.dry import tables_of
from paralab.theory.memory import rank_sizes

MODEL = pl.ModelSpec(layers=4, hidden=64, heads=4, seq_len=32)
PLAN = pl.Plan(microbatches=2, microbatch_size=2, bucket_bytes=2**16)
HOST = {"activations": "cpu", "parameters": "cpu", "gradients": "cpu", "optimizer": "cpu"}
NVME = dict.fromkeys(HOST, "nvme")


def case(name: str, *, model: pl.ModelSpec = MODEL, run: dict | None = None, **plan) -> object:
    return pytest.param((model, PLAN.replace(**plan), run or {}), id=name)


CASES = [
    case("dp, dropout, clipped", model=MODEL.replace(dropout=0.1), dp=3, recompute="full",
         run={"clip_norm": 1.0}),
    case("dp naive, untied, fused attention", dp=2, grad_sync="naive", recompute="selective",
         model=MODEL.replace(tied=False, attention="sdpa")),
    case("tp, bf16", tp=2, dp=2, precision="bf16"),
    case("tp with sequence parallelism, fp16", tp=2, sequence_parallel=True, precision="fp16",
         recompute="selective"),
    case("tp in 2D", tp=4, tp_mode="2d"),
    case("pipeline, all axes", pp=2, tp=2, dp=2, microbatches=4, recompute="full",
         partition_activations=True),
    case("pipeline of three, sgd", pp=3, microbatches=5, run={"optimizer": "sgd"}),
    case("interleaved, zero-1", pp=2, virtual_stages=2, schedule="interleaved", dp=2, zero_stage=1,
         microbatches=4),
    case("zero-bubble", pp=2, schedule="zb-h1", microbatches=4),
    case("zero-2 in copies, bf16", dp=4, shard=2, zero_stage=2, precision="bf16"),
    case("zero-3, frozen", dp=3, zero_stage=3, model=MODEL.replace(frozen=("blocks.0",))),
    case("offload to the host, fp16", dp=2, zero_stage=2, offload="cpu", precision="fp16",
         recompute="full"),
    case("offload to files, clipped", dp=2, zero_stage=3, offload=NVME, recompute="full",
         run={"clip_norm": 1.0}),
    case("relay", zero_stage=3, schedule="l2l", offload=HOST, recompute="full", microbatches=3,
         precision="bf16"),
]  # fmt: skip


def _every_rank(context, cases):
    """Dry runs of all ranks of all cases, one after the other in one process."""
    found = []
    for model, plan, settings in cases:
        asked = {"optimizer": "adamw", "steps": 1, "clip_norm": None, **settings}
        nodes, parts = (0,) * plan.world_size, []
        for rank in range(plan.world_size):
            part = _program(context, model, plan, nodes, {"rank": rank, **asked})
            parts.append({**tables_of(part), "num_params": part["num_params"]})
        found.append(parts)
    return found


@pytest.fixture(scope="module")
def dry():
    """[parts of all ranks] of every case."""
    return launch_program(_every_rank, 1, ([case.values[0] for case in CASES],), device="cpu")[0]


@pytest.fixture(scope="module", params=range(len(CASES)), ids=[case.id for case in CASES])
def both(request, text, dry):
    """(model, plan, what `pl.run` measured, what dry runs of all its ranks found)"""
    model, plan, settings = CASES[request.param].values[0]
    real = pl.run(model, plan, steps=1, data=text, strict=True, progress=False, **settings)
    return model, plan, real, dry[request.param]


def rows(table, *columns):
    return list(zip(*(table[column] for column in columns), strict=True))


def peak(table) -> dict[str, int]:
    """{category: bytes} on the device at the fullest sample."""
    found: dict[tuple, Counter] = {}
    for *moment, tier, category, size in rows(table, "step", "time", "tier", "category", "bytes"):
        if tier == "device":
            found.setdefault(tuple(moment), Counter())[category] += size
    return dict(max(found.values(), key=lambda held: held.total()))


def away(table) -> dict[tuple[str, str], int]:
    found: Counter = Counter()
    for tier, category, size in rows(table, "tier", "category", "bytes"):
        if tier != "device":
            found[tier, category] = max(found[tier, category], size)
    return dict(found)


def test_every_message_is_that_of_a_run(both):
    _, plan, real, parts = both
    columns = ("op", "axis", "ranks", "peer", "level", "phase", "payload_bytes", "wire_bytes")
    calls = real.collectives[real.collectives["phase"] != "setup"]
    for rank, part in enumerate(parts):
        mine = calls[calls["rank"] == rank]
        dry = [(*row[:2], tuple(row[2]), *row[3:]) for row in rows(part["collectives"], *columns)]
        assert dry == rows(mine, *columns)
    assert len(calls) or plan.world_size == 1


def test_memory_is_that_of_a_run(both):
    _, _, real, parts = both
    # How soon a message that was sent is let go, is chance in a run.
    sends = set(real.collectives["op"]) & {"send", "reduce"}
    for rank, part in enumerate(parts):
        mine = real.memory[real.memory["rank"] == rank]
        dry, measured = peak(part["memory"]), peak(mine)
        if not sends:
            assert dry == {**dict.fromkeys(dry, 0), **measured}
        assert sum(dry.values()) == pytest.approx(sum(measured.values()), rel=0.02)
        assert away(part["memory"]) == away(mine)


def test_copies_and_parameters_are_those_of_a_run(both):
    model, plan, real, parts = both
    for rank, part in enumerate(parts):
        columns = ("lane", "op", "category", "bytes")
        mine = real.copies[real.copies["rank"] == rank]
        assert rows(part["copies"], *columns) == rows(mine, *columns)
        assert part["num_params"] == sum(rank_sizes(model, plan, rank).values())


# ---- the face ------------------------------------------------------------------------------------
TRILLION = pl.ModelSpec.preset("ptdp-1t")
BIG = pl.Plan(dp=6, tp=8, pp=64, microbatches=512, microbatch_size=1, recompute="full")
IN_A_KERNEL = """
import json, sys, time
import paralab as pl
pl.dry_run(pl.ModelSpec.preset("laptop"))  # the server has loaded torch
model = pl.ModelSpec.preset("ptdp-1t")
plan = pl.Plan(dp=6, tp=8, pp=64, microbatches=512, microbatch_size=1, recompute="full")
start = time.perf_counter()
report = pl.dry_run(model, plan, rank=3071)
print(json.dumps([time.perf_counter() - start, "torch" in sys.modules, report.peak_memory]))
"""


@pytest.mark.prompt
def test_a_trillion_parameters_take_seconds_and_the_caller_has_no_torch():
    done = subprocess.run([sys.executable, "-c", IN_A_KERNEL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, torch_there, peak_memory = json.loads(done.stdout)
    assert seconds <= 20 and not torch_there and peak_memory > 2**35


@pytest.fixture(scope="module")
def big():
    """A middle rank of the 1T plan; fewer micro-batches, as many alive at once."""
    cluster = pl.Cluster.preset("dgx-a100", nodes=384)
    return pl.dry_run(TRILLION, BIG.replace(microbatches=48), rank=1538, cluster=cluster)


def test_at_scale_bytes_are_those_of_the_formulas(big):
    table, plan = big.peaks(), big.plan
    for name in ("parameters", "gradients", "optimizer", "activations"):
        assert table["dry run"][name] == pytest.approx(table["formula"][name], rel=1e-6)
    message = 4 * TRILLION.seq_len * TRILLION.hidden
    assert table["dry run"]["buffers"] <= 3 * message
    assert table["dry run"]["total"] == pytest.approx(table["formula"]["total"], rel=0.06)
    assert big.meta["num_params"] == sum(rank_sizes(TRILLION, plan, 1538).values())
    sent = big.traffic(by=("axis", "level")).set_index(["axis", "level"])["bytes"]
    assert sent["pp", "inter"] == 2 * plan.microbatches * message
    # Two blocks: two all-reduces forward, two recomputed, two backward, 2 (t-1)/t x each.
    assert sent["tp", "intra"] == plan.microbatches * 2 * 6 * 2 * 7 * message // 8
    assert sent["dp", "inter"] == pytest.approx(2 * 5 / 6 * big.meta["num_params"] * 4, rel=1e-6)


def test_a_report_says_what_needs_no_clock_and_refuses_the_rest(big, tmp_path):
    assert "rank 1538 of 3072 ranks" in repr(big)
    numbers = big.summary()["value"]
    assert numbers["peak memory"] == pytest.approx(big.peak_memory / 1e6, rel=1e-6)
    assert numbers["sent per step"] * 1e6 == pytest.approx(big.traffic()["bytes"].sum(), rel=1e-6)
    for chart in (big.memory_chart(), big.traffic_chart()):
        assert "dry run clock" in chart.layout.title.text
    assert "numbered" in big.memory_chart().layout.xaxis.title.text
    assert (big.memory.groupby("step")["time"].apply(lambda t: t.is_monotonic_increasing)).all()
    refused = [
        lambda: big.timeline(), lambda: big.replay(), lambda: big.bubble, lambda: big.step_time,
        lambda: big.to_perfetto(tmp_path / "trace.json"), lambda: big.bubbles(),
        lambda: big.live_activations(), lambda: pl.compare(big, big),
    ]  # fmt: skip
    for ask in refused:
        with pytest.raises(ValueError, match="clock='dry run'.*needs times.*pl.predict"):
            ask()
    big.save(tmp_path / "dry.json")
    again = pl.load(tmp_path / "dry.json")
    assert again.clock == "dry run" and again.memory.equals(big.memory)
    big.to_html(tmp_path / "dry.html")
    assert "rank 1538" in (tmp_path / "dry.html").read_text()


@pytest.mark.parametrize(("arguments", "said"), [
    ({"rank": 3072}, "rank=3072.*from 0 to 3071"),
    ({"rank": -1}, "rank=-1"),
    ({"plan": BIG.replace(pp=256)}, "pp=256.*up to 128"),
    ({"plan": "all of it"}, "plan='all of it'.*pl.Plan"),
    ({"model": MODEL}, "heads=4.*multiple of 8"),
    ({"optimizer": "lion"}, "optimizer='lion'"),
    ({"steps": 0}, "steps=0"),
    ({"clip_norm": -1.0}, "clip_norm=-1.0"),
    ({"cluster": pl.Cluster.preset("dgx-a100")}, "cluster='dgx-a100'.*needs 3072"),
    ({"timeout": 0}, "timeout=0"),
], ids=str)  # fmt: skip
def test_what_no_run_could_do_is_refused_before_a_process_starts(arguments, said, monkeypatch):
    module = sys.modules["paralab.launch"]
    monkeypatch.setattr(module._House, "turn", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=said):
        pl.dry_run(**{"model": TRILLION, "plan": BIG, **arguments})


def test_views_go_past_the_ledger_until_it_is_left():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from paralab.observe.dry import DryLedger
    from paralab.observe.recorder import Recorder

    seen = []

    class Witness(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with DryLedger(Recorder(rank=0, world_size=1, device="meta"), device="meta") as ledger:
        x = torch.empty(2, 3, device="meta")
        x.view(6)  # the first is seen
        with Witness():
            y = x.view(6)
            assert seen == [] and y.untyped_storage() is x.untyped_storage()
        assert ledger.live == 24
    with Witness():
        x.view(6)
    assert seen == ["view.default"]


def test_what_takes_too_long_is_stopped():
    start = time.monotonic()
    with pytest.raises(pl.RankTimeout, match=r"rank 5 of 3072.*not done after 0.3 s.*longer"):
        pl.dry_run(TRILLION, BIG, rank=5, timeout=0.3)
    assert time.monotonic() - start < 30
    left = [p for p in psutil.Process().children(recursive=True) if len(p.children()) == 0]
    assert len(left) <= 1  # the server that ranks are forked from


def test_an_own_form_that_fails_says_on_which_rank():
    class Broken:
        def __init__(self, parameters, *, group, bucket_bytes): ...
        def grad_ready(self, parameter):
            raise KeyError("lost")

        def finish(self): ...
        def reset(self): ...

    with pytest.raises(pl.RankError, match=r"rank 1 of 4, in a dry run.*lost") as failed:
        pl.dry_run(MODEL, PLAN.replace(dp=4, grad_sync=Broken), rank=1)
    assert failed.value.rank == 1


def test_a_shell_has_it_too(capsys):
    given = ["dry-run", "--layers", "4", "--tp", "2", "--rank", "1", "--optimizer", "sgd"]
    assert cli.main(given) == 0
    assert "rank 1 of 2 ranks" in (said := capsys.readouterr().out) and "peak memory" in said
    with pytest.raises(SystemExit) as exit_:
        cli.main([*given, "--rank", "2"])
    assert exit_.value.code == 2 and "rank=2" in capsys.readouterr().err
