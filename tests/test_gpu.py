"""The same code on CUDA, for whoever has GPUs: `make gpu` runs it and writes one table, gpu.md.

    one GPU      every pairwise plan, its ranks sharing the GPU through staged calls; offload;
                 every paradigm over NCCL, on ranks that it takes for machines of their own;
                 observed programs of the CPU and of the GPU
    two, four,   every paradigm on NCCL with a GPU per rank; the bubbles of 1F1B and interleaving
    or eight     next to their formulas; the share of ZeRO-3's gathers that hides; a kill, a hang,
                 an out-of-memory. What needs more ranks than there are GPUs runs as on one GPU

A plan is held to one rank of the same GPU with the same micro-batches. Runs are as a user's are:
not in strict order mode, in which the hosts wait for each other at every message.
PARALAB_GPU_TESTS_ON=cpu rehearses on processors what needs no device, as if there were eight.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import one_gpu
import paralab as pl
from equality import TOLERANCE, worst
from foreign_programs import PROGRAMS, theory
from pairwise import cover
from paralab.instruments.calibrate import DRIVERS
from paralab.instruments.measure import OPS
from patience import HANG_S

DEVICE = os.environ.get("PARALAB_GPU_TESTS_ON", "cuda")
REHEARSAL = DEVICE == "cpu"
OWN = "gloo" if REHEARSAL else "nccl"  # backend of ranks that have a device each
TABLE = "gpu.md"


def num_gpus() -> int:
    if REHEARSAL:
        return 8
    if not any(map(os.path.exists, DRIVERS)):  # asking torch takes seconds
        return 0
    import torch

    return torch.cuda.device_count()


NUM_GPUS = num_gpus()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        NUM_GPUS == 0, reason="needs an NVIDIA GPU; the CPU tests cover the same code"
    ),
    pytest.mark.filterwarnings("ignore:zero_stage=3 with pp"),
]
of_a_device = pytest.mark.skipif(REHEARSAL, reason="only a GPU has this")
MODEL = pl.ModelSpec(layers=2, hidden=64, heads=4, seq_len=32)
EVEN = pl.ModelSpec(layers=16, hidden=64, heads=8, seq_len=32, vocab=256)
WIDE = pl.ModelSpec(layers=16, hidden=1024, heads=16, seq_len=512, vocab=256, attention="sdpa")
SGD = {"steps": 2, "optimizer": "sgd", "lr": 0.1, "keep_state": True, "device": DEVICE}
THREE = SGD | {"steps": 3}  # the first warms up, the last keeps its gradients
# Kernels of other shapes add up in another order; in 16 bits both sides are rounded, step by step.
ROUNDING = {"fp32": 1e-3, **{name: 3 * TOLERANCE[name] for name in ("bf16", "fp16")}}


@pytest.fixture(scope="session")
def run(text):
    return functools.partial(pl.run, data=text, progress=False, timeout=HANG_S)


def with_gpus(n: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(n > NUM_GPUS, reason=f"needs {n} GPUs, there are {NUM_GPUS}")


# ---- the table -----------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def figures() -> Iterator[list[tuple]]:
    """Rows of the table: what, of which plan, on how many ranks, measured, by formula."""
    found: list[tuple] = []
    yield found
    import torch

    name = "a rehearsal on processors" if REHEARSAL else torch.cuda.get_device_name(0)
    lines = [
        f"{NUM_GPUS} x {name}, torch {torch.__version__}, paralab {pl.__version__}",
        "",
        "| what | plan | ranks | measured | by formula or asked |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(map(str, row)) + " |" for row in found),
    ]
    with open(TABLE, "w") as file:
        file.write("\n".join(lines) + "\n")


def said(plan: pl.Plan) -> str:
    """The settings of a plan that are not the default."""
    plain = pl.Plan().to_dict()
    return " ".join(f"{k}={v}" for k, v in plan.to_dict().items() if plain.get(k) != v)


# ---- equality ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def alone(run):
    """What one rank of the device trains with all of a plan's micro-batches; equal ones once."""
    known: dict[str, pl.Report] = {}

    def train(model: pl.ModelSpec, plan: pl.Plan, **settings: Any) -> pl.Report:
        same = {
            name: getattr(plan, name) for name in ("microbatch_size", "precision", "grad_dtype")
        }
        one = pl.Plan(microbatches=plan.dp * plan.microbatches, **same)
        key = repr((model, one, settings))
        if key not in known:
            known[key] = run(model, one, **settings)
        return known[key]

    return train


def gap(expected: pl.Report, got: pl.Report) -> float:
    """Largest difference of a gradient or a weight, of the tensor's largest entry."""
    names = ("gradients", "weights")
    return max(worst(getattr(expected, what), getattr(got, what))[0] for what in names)


@pytest.mark.parametrize("one", cover().cases, ids=lambda one: one.name)
def test_gpu_pairwise_plan_trains_what_one_rank_does(run, alone, figures, one):
    settings = {**SGD, "clip_norm": one.clip_norm}
    found = gap(alone(one.model, one.plan, **settings), run(one.model, one.plan, **settings))
    allowed = ROUNDING[one.plan.precision]
    ranks = one.plan.world_size
    figures.append(("largest difference", one.name, ranks, f"{found:.1e}", f"{allowed:.0e}"))
    assert found <= allowed


# Of the dp that is left over, if any, so that each runs on two GPUs and on eight.
PARADIGMS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "data parallel, naive": {"grad_sync": "naive"},
    "ZeRO-1": {"zero_stage": 1},
    "ZeRO-2": {"zero_stage": 2, "microbatches": 2},
    "ZeRO-3": {"zero_stage": 3, "microbatches": 2},
    "tensor parallel": {"tp": 2},
    "sequence parallel": {"tp": 2, "sequence_parallel": True},
    "GPipe": {"pp": 2, "microbatches": 4, "schedule": "gpipe"},
    "1F1B": {"pp": 2, "microbatches": 4},
    "interleaved": {"pp": 2, "microbatches": 4, "schedule": "interleaved", "virtual_stages": 2},
    "ZB-H1": {"pp": 2, "microbatches": 4, "schedule": "zb-h1"},
    "ZB-H2": {"pp": 2, "microbatches": 4, "schedule": "zb-h2"},
    "full recomputation": {"recompute": "full"},
    "offload to the host": {"zero_stage": 3, "offload": "cpu"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
}
OF_EIGHT = {
    "2D": {"tp": 4, "tp_mode": "2d", "microbatch_size": 4},
    "HSDP": {"zero_stage": 3, "shard": 2},
    "hpZ": {"zero_stage": 3, "secondary_shard": 2},
    "2.5D": {"tp": 8, "tp_mode": "2.5d", "microbatch_size": 4},
    "3D": {"tp": 8, "tp_mode": "3d", "microbatch_size": 4},
    "three axes": {"dp": 2, "tp": 2, "pp": 2, "microbatches": 4, "zero_stage": 1},
}
OF_FOUR = {name: more for name, more in OF_EIGHT.items() if more.get("tp", 1) <= 4}
ON_NCCL = [
    *((2, name, settings) for name, settings in PARADIGMS.items()),
    *((4, name, settings) for name, settings in OF_FOUR.items()),
    *((8, name, settings) for name, settings in (PARADIGMS | OF_EIGHT).items()),
]


def as_plan(n: int, settings: dict[str, Any]) -> pl.Plan:
    """Of n ranks: those that no other axis takes are data parallel."""
    axes = {axis: settings.get(axis, 1) for axis in ("tp", "pp")}
    left = n // (axes["tp"] * axes["pp"])
    return pl.Plan(**{"microbatch_size": 2, **settings, "dp": left})


@pytest.mark.parametrize(
    ("n", "name", "settings"),
    [pytest.param(*one, marks=with_gpus(one[0]), id=f"{one[1]} on {one[0]}") for one in ON_NCCL],
)
def test_gpu_paradigm_on_nccl_trains_what_one_rank_does(run, alone, figures, n, name, settings):
    plan = as_plan(n, settings)
    report = run(EVEN, plan, **SGD)
    found, allowed = gap(alone(EVEN, plan, **SGD), report), ROUNDING[plan.precision]
    figures.append(("largest difference", name, n, f"{found:.1e}", f"{allowed:.0e}"))
    assert found <= allowed
    assert report.meta["backend"] == OWN
    assert not report.meta["shared_gpu"]


# Without a GPU per rank: as many machines, each with the same one.
ON_MACHINES = [one for one in ON_NCCL if one[0] < 8]


def without_gpus(n: int) -> pytest.MarkDecorator:
    enough = n <= NUM_GPUS and not REHEARSAL
    return pytest.mark.skipif(enough, reason="ranks have a GPU each here")


@pytest.fixture(scope="module")
def on_machines(text, tmp_path_factory):
    """{name: report} of all of ON_MACHINES that have so many ranks, and what these printed."""
    known: dict[int, tuple[dict[str, pl.Report], str]] = {}

    def trained(n: int) -> tuple[dict[str, pl.Report], str]:
        if n not in known:
            mine = [(name, as_plan(n, more)) for ranks, name, more in ON_MACHINES if ranks == n]
            settings = {name: value for name, value in THREE.items() if name != "device"}
            jobs = [(EVEN, plan, settings) for _, plan in mine]
            how = {"data": text, "device": DEVICE, "seconds": HANG_S}
            found, said = one_gpu.reports(jobs, tmp_path_factory.mktemp("machines"), **how)
            known[n] = {name: r for (name, _), r in zip(mine, found, strict=False)}, said
        return known[n]

    return trained


@pytest.mark.parametrize(
    ("n", "name"),
    [pytest.param(*one[:2], marks=without_gpus(one[0]), id=f"{one[1]} on {one[0]}")
     for one in ON_MACHINES],
)  # fmt: skip
def test_gpu_paradigm_over_nccl_on_machines_that_share_one(on_machines, alone, figures, n, name):
    """Nor does the host wait for the device inside a step."""
    found, said = on_machines(n)
    assert name in found, said
    report = found[name]
    gap_, allowed = gap(alone(EVEN, report.plan, **THREE), report), ROUNDING[report.plan.precision]
    figures.append((f"largest difference, {OWN}", name, n, f"{gap_:.1e}", f"{allowed:.0e}"))
    assert gap_ <= allowed
    assert report.meta["backend"] == OWN and report.meta["nodes"] == list(range(n))
    assert report.meta["meetings"] == [[]] * n


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observed")
    script = str(Path(__file__).with_name("foreign_on_gpu.py"))
    words = ["-m", "paralab", "observe", "--steps", "marked", "--out", str(folder / "parts")]
    said = one_gpu.started([*words, script, *PROGRAMS], folder, 2, HANG_S)
    assert len(list((folder / "parts").glob("rank-*"))) == 2, said
    return pl.load(folder / "parts")


@pytest.mark.parametrize("name", PROGRAMS)
def test_gpu_observed_bytes_over_nccl_are_the_closed_form(observed, figures, name):
    rows = observed.collectives[observed.collectives["step"] == 2 * list(PROGRAMS).index(name) + 1]
    rows = rows[~rows["phase"].isin(("control", "setup")) & (rows["wire_bytes"] > 0)]
    expected = theory(name, 2, OWN)
    found = rows.groupby(["op", "phase"])["wire_bytes"].sum().to_dict()
    figures.append(("bytes observed", f"torch, {name}", 2, sum(found.values()),
                    sum(expected.values())))  # fmt: skip
    assert found == expected


# ---- overlap -------------------------------------------------------------------------------------
@of_a_device
@pytest.mark.parametrize("n", [pytest.param(n, marks=with_gpus(n)) for n in (2, 4, 8)])
@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("interleaved", 2)])
def test_gpu_bubble_is_nearer_to_its_formula_than_to_stages_in_turn(run, figures, n, schedule, v):
    """Predicted for this model on H100s, with links of 10 to 300 GB/s: 0.03 to 0.43."""
    m = 16
    plan = pl.Plan(pp=n, microbatches=m, schedule=schedule, virtual_stages=v, microbatch_size=4)
    report = run(WIDE, plan, steps=6, device=DEVICE)
    formula = (n - 1) / (v * m + n - 1)
    figures.append(("bubble", said(plan), n, f"{report.bubble:.3f}", f"{formula:.3f}"))
    assert 0.0 < report.bubble < (formula + (n - 1) / n) / 2


@of_a_device
@pytest.mark.parametrize("n", [pytest.param(n, marks=with_gpus(n)) for n in (2, 8)])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_gpu_gathers_that_are_prefetched_hide(run, figures, n, prefetch):
    """Predicted for H100s with links of 10 to 300 GB/s: 44 to 95 %, and at most 1 % without."""
    plan = pl.Plan(dp=n, zero_stage=3, prefetch=prefetch, microbatch_size=8)
    value = run(WIDE, plan, steps=6, device=DEVICE).summary()["value"]
    hidden, step = value["of it hidden behind compute"], value["step time"]
    figures.append(("communication that hides", said(plan), n, f"{hidden:.0f} %", ""))
    figures.append(("step", said(plan), n, f"{step:.4g} ms", ""))
    assert 25.0 * prefetch <= hidden <= 100.0


# ---- an observed program -------------------------------------------------------------------------
def trains_on(device: str) -> None:
    """AdamW on one layer; its gradients are summed on its device, and a flag on the host."""
    import torch
    import torch.distributed as dist

    model = torch.nn.Linear(256, 256, bias=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(64, 256).to(device)).sum().backward()
        dist.all_reduce(model.weight.grad)
        dist.all_reduce(torch.ones(300))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("n", [pytest.param(n, marks=with_gpus(n)) for n in (1, 2, 8)])
@pytest.mark.parametrize("device", sorted({"cpu", DEVICE}))
def test_gpu_observed_program_is_of_the_device_that_it_has_its_tensors_on(n, device):
    report = pl.observe(trains_on, n, (device,), timeout=HANG_S)
    on_gpu = device == "cuda"
    assert report.meta["device"] == ("cuda:0" if on_gpu else "cpu")
    assert report.meta["backend"] == ("nccl" if on_gpu else "gloo")
    most, size = report.memory.groupby("category")["bytes"].max(), 4 * 256 * 256
    assert most["parameters"] == most["gradients"] == size
    assert most["optimizer"] == 2 * size + 4 * (not on_gpu)  # the count of steps is on the host
    assert len(report.allocator) == 3 * n * on_gpu
    assert set(report.memory["step"]) == {0, 1}


CHOOSES = """import os, torch, torch.distributed as dist
assert not torch.cuda.is_initialized()
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
dist.init_process_group("nccl")
dist.all_reduce(ones := torch.ones(4, device="cuda:0"))
assert ones.sum().item() == 4 * dist.get_world_size()
"""


@of_a_device
@pytest.mark.parametrize("n", [pytest.param(n, marks=with_gpus(n)) for n in (1, 2)])
def test_gpu_observed_script_may_choose_which_gpu_it_sees(n, tmp_path):
    (script := tmp_path / "train.py").write_text(CHOOSES)
    assert pl.observe(script, n, timeout=HANG_S).meta["backend"] == "nccl"


# ---- faults --------------------------------------------------------------------------------------
def adds_up(group: Any) -> float:
    import torch

    ones = torch.ones(4, device=group.context.device)
    group.all_reduce(ones).wait()
    return ones.sum().item()


def goes_wrong(group: Any, how: str) -> float:
    import signal

    if group.index == 1 and how == "a kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if group.index == 1:
        threading.Event().wait()
    return adds_up(group)


def assert_the_next_call_works() -> None:
    assert pl.trace(adds_up, ranks=2, device=DEVICE).results == [8.0, 8.0]


@with_gpus(2)
@pytest.mark.parametrize(
    ("how", "seconds", "error", "said"),
    [
        ("a kill", 60, pl.RankError, "rank 1 was killed by signal 9"),
        ("a hang", 30, pl.RankTimeout, "rank 0 waits in all_reduce #0 for rank 1"),
    ],
)
def test_gpu_rank_that_is_lost_is_named(figures, how, seconds, error, said):
    with pytest.raises(error, match=said):
        pl.trace(goes_wrong, ranks=2, args=(how,), device=DEVICE, timeout=seconds)
    assert_the_next_call_works()
    figures.append((how, "", 2, "named, and the next call works", ""))


@with_gpus(2)
def test_gpu_rank_that_is_out_of_memory_says_what_filled_it(run, figures):
    with pytest.raises(pl.OutOfMemory, match="parameters"):
        run(EVEN, pl.Plan(dp=2), steps=1, device=DEVICE, memory_limit=2**23)
    assert_the_next_call_works()
    figures.append(("an out-of-memory", "", 2, "says what filled the device", ""))


def fills_the_device() -> None:
    import torch

    torch.empty(2**50, dtype=torch.uint8, device="cuda")


def locks_memory_twice(group: Any) -> None:
    import torch

    from paralab.interpret import host
    from paralab.spec.tiers import Offload

    memory = host.plain((8,), torch.float32)
    host.plain = lambda *given: memory
    away = host.Host(Offload(), context=group.context, recorder=group.recorder, folder=None)
    for _ in range(2):
        away.empty((8,), torch.float32, "optimizer")


def sends_from_the_host(group: Any) -> None:
    import torch

    group.all_reduce(torch.ones(4))


@of_a_device
@pytest.mark.parametrize(
    ("call", "program", "n", "says"),
    [
        (pl.observe, fills_the_device, 1, "CUDA out of memory. Tried to allocate .* is free"),
        (pl.trace, locks_memory_twice, 1, "CUDA cannot lock 32 bytes of host memory in place: "),
        pytest.param(pl.trace, sends_from_the_host, 2, "NCCL sends what is on", marks=with_gpus(2)),
    ],
)
def test_gpu_refusal_is_said_in_one_line(call, program, n, says):
    with pytest.raises((pl.RankError, pl.OutOfMemory)) as raised:
        call(program, n, device=DEVICE)
    assert re.search(says, str(raised.value).splitlines()[0])


# ---- one GPU -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dp", [1, 2])
def test_gpu_gradients_equal_the_cpus(run, dp):
    """With one GPU and two ranks: gloo through pinned buffers. With two: NCCL."""
    settings = {"steps": 2, "optimizer": "sgd", "keep_state": True}
    on_cpu = run(MODEL, pl.Plan(microbatches=dp), device="cpu", **settings)
    on_gpu = run(MODEL, pl.Plan(dp=dp), device=DEVICE, **settings)
    assert gap(on_cpu, on_gpu) < 1e-3
    assert on_gpu.meta["backend"] == (OWN if dp <= NUM_GPUS else "gloo")


@of_a_device
def test_gpu_spans_are_device_time_in_order(run):
    report = run(MODEL, pl.Plan(), steps=4, device=DEVICE)
    spans = report.spans.query("kind in ('forward', 'backward', 'optimizer') and step > 0")
    assert (spans.cost > 0).all()
    ordered = spans.sort_values("id")
    assert (ordered.start.diff().dropna() >= 0).all()
    steps = report.steps.query("step > 0")
    assert spans.start.min() >= steps.start.min() - 1e-4
    assert spans.end.max() <= steps.end.max() + 1e-4


@of_a_device
def test_gpu_tf32_rounds_the_operands_of_products(run):
    settings = {"steps": 1, "optimizer": "sgd", "keep_state": True, "device": DEVICE}
    full, low = (run(MODEL, pl.Plan(tf32=tf32), **settings).gradients for tf32 in (False, True))
    found, name = worst(full, low)
    assert 0 < found < 0.02, name


@of_a_device
def test_gpu_allocators_figures_stand_beside_the_ledgers(run):
    report = run(MODEL, pl.Plan(), steps=3, device=DEVICE)
    table = report.allocator
    assert table["step"].tolist() == [0, 1, 2]
    assert (table["reserved"] >= table["active"]).all()
    assert (table["active"] >= table["allocated"]).all()
    assert (table["largest_free"] <= table["reserved"]).all()
    # Blocks are rounded up, and cuBLAS's workspaces come from the same pool.
    assert report.peak_memory <= table["allocated"][0] < report.peak_memory + 64 * 2**20
    assert "of the allocator: reserved" in report.summary().index


@of_a_device
def test_ranks_that_share_a_gpu_record_their_copies(run, monkeypatch):
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first)  # of several, ranks see one
    report = run(MODEL, pl.Plan(dp=2), steps=2, device=DEVICE)
    assert report.meta["backend"] == "gloo" and report.meta["shared_gpu"]
    copies = report.spans.query("kind == 'copy'")
    assert set(copies.lane) == {"d2h", "h2d"} and (copies.end > copies.start).all()


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gpu_offload_is_the_same_training(run, stage, place):
    """AdamW on the host's processor, and on the device: other kernels, nearly the same bits."""
    settings = {"steps": 3, "keep_state": True, "device": DEVICE}
    plan = pl.Plan(zero_stage=stage, offload=place, microbatches=2)
    away, here = run(MODEL, plan, **settings), run(MODEL, plan.replace(offload=None), **settings)
    assert gap(here, away) < 1e-3


@of_a_device
def test_gpu_copies_are_lanes_of_device_time_and_some_hide_behind_compute(run):
    model = pl.ModelSpec(layers=8, hidden=1024, heads=16, seq_len=512)
    plan = pl.Plan(zero_stage=3, offload="cpu", microbatch_size=8, prefetch=2, recompute="full")
    report = run(model, plan, steps=3, device=DEVICE)
    copies = report.copies
    assert set(copies["lane"]) == {"h2d", "d2h"} and (copies["end"] > copies["start"]).all()
    rates = copies["bytes"].sum() / (copies["end"] - copies["start"]).sum()
    assert rates > 2e9  # page-locked memory; pageable copies block the host and are slower
    assert report.summary()["value"]["of the copies hidden behind compute"] > 20


def test_gpu_offload_trains_what_a_limit_refuses_without(run):
    model = pl.ModelSpec(layers=12, hidden=512, heads=8, seq_len=64)
    limit = 6 * 4 * model.num_params // 4
    with pytest.raises(pl.OutOfMemory):
        run(model, pl.Plan(), steps=1, device=DEVICE, memory_limit=limit)
    plan = pl.Plan(zero_stage=3, offload="cpu", recompute="full")
    assert run(model, plan, steps=1, device=DEVICE, memory_limit=limit).peak_memory <= limit


@of_a_device
def test_gpu_calibration_is_as_a_gpu_could_be_and_is_what_predictions_take():
    cluster = pl.Cluster.local(device="cuda", refresh=True)
    assert cluster.num_devices == NUM_GPUS and cluster.cores is None
    assert 1e12 < cluster.flops < 1e15 and 0 <= cluster.half_rate_tokens < 1e4
    assert all(rate > cluster.flops / 2 for rate in cluster.products["fp16"])
    assert 1e11 < cluster.memory_bandwidth < 2e13 and 1e-7 < cluster.op_overhead < 1e-3
    assert 0 <= cluster.host.alpha < 1e-3 and 2e9 < cluster.host.bandwidth < 1e12
    assert set(cluster.collectives) == (set(OPS) if NUM_GPUS > 1 else set())
    for link in cluster.collectives.values():
        assert 0 <= link.alpha < 1e-2 and link.bandwidth > 1e8
    assert pl.predict(MODEL, pl.Plan(), steps=1).cluster == cluster
    assert pl.run(MODEL, pl.Plan(), steps=2, progress=False).replay().cluster == cluster
