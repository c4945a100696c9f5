"""Calibration: fits recover what made the numbers, and the cache is never a reason to fail."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import paralab as pl
from paralab import doctor
from paralab.instruments import calibrate, processors
from paralab.interpret.predict import predict
from paralab.theory import fit
from paralab.theory.traffic import wire_bytes
from processes import printed
from refusals import refuses

LINK = pl.Link(alpha=2e-4, bandwidth=2e9)
CLUSTER = pl.Cluster(
    name="local", flops=1e11, memory_bandwidth=3e10, devices_per_node=64, intra=LINK, cores=2,
    products={"bf16": (7e9, 1.5e9, 16e9)}, memory=calibrate.memory_bytes(),
)  # fmt: skip

GPUS = CLUSTER.replace(name="local GPUs", devices_per_node=2, cores=None)


def made_up(cluster=CLUSTER):
    return {
        "format": calibrate.FORMAT,
        "cluster": cluster.to_dict(),
        "points": {"links": []},
        "made": "2026-01-01T00:00:00Z",
    }


@pytest.fixture
def measurements(monkeypatch, tmp_path):
    """The cache in a folder of its own, and a list that grows with every measurement."""
    monkeypatch.setenv("PARALAB_CACHE_DIR", str(tmp_path / "cache"))
    done = []

    def measure(device):
        done.append(made_up(GPUS if device == "cuda" else CLUSTER))
        return done[-1]

    monkeypatch.setattr(calibrate, "measured", measure)
    return done


# ---- fits -----------------------------------------------------------------------------------
@pytest.mark.parametrize("half", [0.0, 1.0, 300.0])
def test_products_say_their_rate_and_at_how_many_tokens_they_reach_half_of_it(half):
    points = [
        {"flops": flops, "tokens": n, "seconds": flops * (1 + half / n) / 7e12 + 4e-6}
        for n, flops in ((32, 1e7), (64, 3e7), (256, 1e9), (1024, 5e8), (4096, 2e10))
    ]
    exact = [{"flops": n, "seconds": n / 7e9} for n in (1e6, 1e8)]
    assert fit.fit_rate(exact) == pytest.approx(7e9)
    assert fit.fit_half_rate(points) == pytest.approx(half, rel=1e-6, abs=1e-6)
    assert fit.fit_rate(points, half) == pytest.approx(7e12)
    assert all(p["fitted"] == pytest.approx(p["seconds"], rel=1e-6) for p in points)


def test_small_messages_weigh_as_much_as_large_ones():
    """An absolute fit would give the large message everything and alpha a hundredfold error."""
    sizes = (1_000, 10_000_000, 10_000_000)
    points = [{"wire_bytes": n, "seconds": LINK.seconds(n)} for n in sizes]
    points[1]["seconds"] *= 1.1
    points[2]["seconds"] /= 1.1
    link, _ = fit.fit_link(points)
    assert link.alpha == pytest.approx(LINK.alpha, rel=0.05)


@pytest.mark.parametrize("power", [-1, 2])
def test_a_rate_is_never_negative(power):
    """Falling with size would ask for a negative slope, faster than linear for a negative alpha."""
    points = [{"wire_bytes": n, "seconds": float(n) ** power} for n in (1, 10, 100)]
    link, accuracy = fit.fit_link(points)
    assert link.alpha >= 0 and link.bandwidth > 0
    assert accuracy["worst"] > 0.5  # and the fit says that it is no fit


def test_a_call_lasts_from_its_last_launch_to_its_last_end():
    """The fastest, and of passes the median: one in which everything is slow is no slow link."""
    call = {"op": "all_reduce", "ranks": 2, "payload_bytes": 8}
    found = []
    for slow in (0.0, 9.0, 0.5):
        early = [(0.0, 5.0 + slow), (10.0, 15.0 + slow)]
        late = [(4.0, 4.5), (14.0, 15.5 + slow)]
        found += [[call | {"marks": early}], [call | {"marks": late}]]
    (row,) = calibrate.from_last_launch(found, 2)
    assert row["seconds"] == 1.5  # of 1.0, 10.0 and 1.5
    assert row["wire_bytes"] == wire_bytes("all_reduce", 8, 2)


def test_an_overhead_is_a_median_over_ranks_and_passes_and_never_negative():
    def rank(post, after):
        rows = {"post": post, "forward": 1.0, "backward": 2.0, "forward after a wait": after,
                "backward after a wait": 3 * after, "product": 0.5,
                "product after a wait": after / 2}  # fmt: skip
        return [{"what": what, "seconds": seconds} for what, seconds in rows.items()]

    typical = calibrate._typical([rank(0.1, 0.5), rank(0.9, -1.0), rank(0.2, 0.25)])
    assert calibrate.overheads(typical) == (0.2, 0.5, 1.5)
    assert calibrate.overheads(calibrate._typical([rank(0.3, -0.1)])) == (0.3, 0.0, 0.0)


# ---- which device ----------------------------------------------------------------------------
MODEL = pl.ModelSpec(layers=1, hidden=16, heads=2, seq_len=8, attention="explicit")


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(calibrate, "gpus", lambda: (("H100", 80 * 10**9),) * 2)


def test_a_prediction_is_for_the_device_that_a_run_would_take(measurements, two_gpus):
    clusters = [predict(MODEL, pl.Plan(dp=dp), steps=1).cluster for dp in (1, 2, 4)]
    assert clusters == [GPUS, GPUS, CLUSTER]


def test_without_gpus_a_prediction_is_for_processors_and_no_rank_is_started(
    measurements, monkeypatch
):
    monkeypatch.setattr(calibrate, "DRIVERS", ("/nowhere",))
    monkeypatch.setattr(calibrate, "_seen", lambda visible: pytest.fail("a rank was asked"))
    assert predict(MODEL, steps=1).cluster == pl.Cluster.local(device="cpu") == CLUSTER


def test_a_rank_asks_torch_for_gpus_once_for_each_choice_of_them(monkeypatch):
    asked = []
    launch = sys.modules["paralab.launch"]

    def seen(program, ranks, args, *, device, optimizers):
        asked.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return [[("H100", 1)] * len(asked)]

    calibrate._seen.cache_clear()
    monkeypatch.setattr(calibrate, "DRIVERS", ("/dev/null",))
    monkeypatch.setattr(launch, "launch_program", seen)
    for visible in ("0", "0,1", "0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(calibrate.gpus()) == (1 if visible == "0" else 2)
    assert asked == ["0", "0,1"]
    calibrate._seen.cache_clear()


@pytest.fixture(scope="module")
def on_gpus(run):
    """A run that says that it was on GPUs."""
    report = run(MODEL, pl.Plan(dp=2), steps=2)
    return dataclasses.replace(report, meta={**report.meta, "device": "cuda:0"})


def test_a_run_on_gpus_is_replayed_and_compared_on_gpus(measurements, two_gpus, on_gpus):
    assert on_gpus.replay().cluster == on_gpus.replay().replay().cluster == GPUS
    found = pl.compare(predict(MODEL, pl.Plan(dp=2)), on_gpus)
    assert found.replayed.cluster == GPUS and found.bytes_agree


def test_without_gpus_a_run_on_gpus_asks_for_a_cluster(measurements, monkeypatch, on_gpus):
    monkeypatch.setattr(calibrate, "gpus", lambda: ())
    refuses(r"device='tpu'.*legal: .*cuda", pl.Cluster.local, device="tpu")
    for ask in (on_gpus.replay, on_gpus.bubbles, lambda: pl.Cluster.local(device="cuda")):
        refuses("no GPU here.* cluster= the machine that has GPUs", ask)
    refuses("run was on GPUs.* cluster=", pl.compare, predict(MODEL, pl.Plan(dp=2)), on_gpus)
    preset = pl.Cluster.preset("dgx-a100")
    assert on_gpus.replay(preset).cluster == preset
    assert pl.compare(predict(MODEL, pl.Plan(dp=2), preset), on_gpus).replayed.cluster == preset
    assert not measurements[1:]  # the processors alone, for the prediction that was refused


# ---- the cache ------------------------------------------------------------------------------
def test_another_machine_version_kind_or_number_of_gpus_has_a_cache_of_its_own(
    measurements, two_gpus, monkeypatch
):
    assert [pl.Cluster.local(device=d) for d in ("cuda", None, "cuda")] == [GPUS, CLUSTER, GPUS]
    with monkeypatch.context() as limited:  # a user's share, which is asked for, not measured
        limited.setattr(calibrate, "memory_bytes", lambda: 10**9)
        assert pl.Cluster.local() == CLUSTER.replace(memory=10**9)
        assert pl.Cluster.local(device="cuda") == GPUS
    assert len(measurements) == 2
    names = {calibrate.fingerprint(), calibrate.fingerprint("cuda")}
    for kind in ("H100", "A100"):
        monkeypatch.setattr(calibrate, "gpus", lambda kind=kind: ((kind, 80 * 10**9),))
        names.add(calibrate.fingerprint("cuda"))
    for name, other in (
        ("available_cores", lambda: 77),
        ("_processor", lambda: "another"),
        ("version_of", lambda package: "9.9"),
        ("__version__", "9.9"),
    ):
        monkeypatch.setattr(calibrate, name, other)
        names.add(calibrate.fingerprint())
    assert len(names) == 8


@pytest.mark.parametrize(
    "what", ["a file in its way", "a folder in its place", "no home", "a full disk"]
)
def test_a_cache_that_cannot_be_written_is_no_error_and_measured_once(
    measurements, monkeypatch, tmp_path, what
):
    (tmp_path / "file").write_text("not a folder")
    if what == "a file in its way":
        monkeypatch.setenv("PARALAB_CACHE_DIR", str(tmp_path / "file" / "cache"))
    elif what == "a folder in its place":
        calibrate.cache_path().mkdir(parents=True)
    elif what == "no home":
        for name in ("PARALAB_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    else:
        monkeypatch.setattr(calibrate.os, "replace", Mock(side_effect=OSError("no space left")))
    assert pl.Cluster.local() == pl.Cluster.local() == CLUSTER
    assert len(measurements) == 1
    assert "; it could not be kept: set PARALAB_CACHE_DIR" in doctor.calibrated("cpu")
    folder = calibrate.cache_path().parent
    assert what != "a full disk" or list(folder.iterdir()) == []  # nothing half-written is left


def test_the_cache_lies_where_the_user_says(monkeypatch, tmp_path):
    for names, folder in (
        (("PARALAB_CACHE_DIR", "XDG_CACHE_HOME"), tmp_path),
        (("XDG_CACHE_HOME",), tmp_path / "paralab"),
        ((), Path.home() / ".cache" / "paralab"),
    ):
        for name in ("PARALAB_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name in names:
            monkeypatch.setenv(name, str(tmp_path))
        assert calibrate.cache_path().parent == folder


def test_refresh_measures_again_and_replaces(measurements):
    pl.Cluster.local()
    before = calibrate.cache_path().read_text()
    calibrate.cache_path().write_text(before.replace("2026", "2025"))
    pl.Cluster.local(refresh=True)
    assert len(measurements) == 2 and calibrate.cache_path().read_text() == before


def test_a_measured_link_between_nodes_is_the_cluster_s_and_outlives_a_new_calibration(
    measurements,
):
    assert pl.Cluster.local().inter == LINK  # until one is measured, as inside the machine
    calibrate.keep_inter({"link": {"alpha": 0.04, "bandwidth": 1.2e7}, "nodes": 2, "made": "2026"})
    for refresh in (False, True):
        cluster = pl.Cluster.local(refresh=refresh).replace(nodes=3, devices_per_node=1)
        assert cluster.intra == LINK and cluster.inter == pl.Link(alpha=0.04, bandwidth=1.2e7)
        calls = predict(MODEL, pl.Plan(dp=3), cluster, steps=1).collectives
        assert (calls["end"] - calls["start"]).min() > 0.04
    assert len(measurements) == 2


def test_what_was_measured_beside_busy_programs_is_measured_again_once_they_are_done(
    measurements, monkeypatch
):
    now = 0.9
    monkeypatch.setattr(calibrate, "processors_busy", lambda: now)
    calibrate._write(calibrate.cache_path(), made_up() | {"busy": 0.9})
    assert calibrate.calibration()["busy"] == 0.9 and not measurements  # nothing better to be had
    now = 0.1
    assert "busy" not in calibrate.calibration() and len(measurements) == 1
    assert "busy" not in calibrate.calibration() and len(measurements) == 1  # and kept


def test_a_machine_that_is_always_busy_now_and_then_is_measured_twice_at_most(
    measurements, monkeypatch
):
    monkeypatch.setattr(calibrate, "processors_busy", lambda: 0.1)
    calibrate._write(calibrate.cache_path(), made_up() | {"busy": 0.9})
    one_more = calibrate.measured
    monkeypatch.setattr(calibrate, "measured", lambda device: one_more(device) | {"busy": 0.8})
    assert [calibrate.calibration()["busy"] for _ in range(3)] == [0.8] * 3
    assert len(measurements) == 1


def test_what_a_hypervisor_gives_to_others_is_busy_too(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    monkeypatch.setattr(processors, "Path", lambda _: stat)
    stat.write_text("cpu  100 0 100 700 100 0 0 50 0 0\ncpu0 1")
    assert processors.spent() == (1050, 800)
    after = "cpu  150 0 150 900 100 0 0 350 0 0\ncpu0 1"
    monkeypatch.setattr(processors.time, "sleep", lambda _: stat.write_text(after))
    assert processors.processors_busy() == pytest.approx(2 / 3)  # 400 of 600
    monkeypatch.setattr(processors, "spent", lambda: (0, 0))  # where nobody tells
    assert processors.processors_busy() == 0.0


OTHERS = ({"format": 999}, {"cluster": {"flops": -1}}, {"cluster": None}, {"points": {}},
          {"inter": {"link": {"alpha": -1.0, "bandwidth": 1.0}}})  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    ["", "\x80 is no UTF-8", "{", "[]", "null", '{"format": 1}']
    + [json.dumps(made_up() | other) for other in OTHERS],
)
def test_a_damaged_cache_is_measured_again(measurements, damage):
    path = calibrate.cache_path()
    path.parent.mkdir(parents=True)
    path.write_text(damage, encoding="latin-1")
    assert pl.Cluster.local() == CLUSTER
    assert len(measurements) == 1
    assert json.loads(path.read_text()) == json.loads(json.dumps(made_up()))


# ---- for real -------------------------------------------------------------------------------
SCRIPT = """
import json, sys
import paralab as pl
from paralab.instruments import calibrate
calibrate.BUSY = 1.0  # other tests run beside this one, or do not
calibrate.PASSES = 1  # how several become one is above
cluster = pl.Cluster.local()
known = calibrate.calibration()
same = pl.Cluster.local() == cluster
print(json.dumps({"torch": "torch" in sys.modules, "known": known, "same": same}))
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A calibration of this machine, in a process of its own."""
    cache = tmp_path_factory.mktemp("calibration")
    return json.loads(printed(SCRIPT, PARALAB_CACHE_DIR=str(cache)))


def test_calibrating_keeps_torch_out_of_the_caller(real):
    assert real["torch"] is False and real["same"] is True


def test_this_machine_comes_out_as_a_machine_could_be(real):
    cluster = pl.Cluster.from_dict(real["known"]["cluster"])
    assert cluster.name == "local" and cluster.cores == calibrate.available_cores()
    assert 1e8 < cluster.flops < 1e13 and 2**27 < cluster.memory < 2**50
    assert cluster.memory_bandwidth > 1e8 and cluster.host_bandwidth > 1e8
    assert 0 <= cluster.op_overhead < 1e-2 and 0 <= cluster.wait_overhead < 1e-2
    assert 1e-6 < cluster.call_overhead < 1e-2
    ops = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"}
    assert ops <= cluster.collectives.keys()
    for link in (cluster.host, cluster.disk, *cluster.collectives.values()):
        assert 0 <= link.alpha < 0.1 and link.bandwidth > 1e6


def test_the_points_of_links_are_kept_beside_their_fit(real):
    links = real["known"]["points"]["links"]
    assert all(point["seconds"] > 0 and point["fitted"] >= 0 for point in links)
    sizes = {point["payload_bytes"] for point in links}
    assert min(sizes) <= 1024 and max(sizes) >= 8_000_000
