"""`paralab doctor`: every sentence, on machines made up for it, and the real one once."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from paralab import cli, doctor
from paralab.doctor import LABS, diagnose
from paralab.instruments import between, calibrate
from paralab.spec import cluster
from processes import ROOT, python
from refusals import shell_refuses

GB, MB = 10**9, 10**6

TORCH = {"version": "2.13.0", "cuda": None, "gpus": [], "backends": ["gloo"], "error": None}
H100 = {"name": "H100", "memory": 80 * GB}
LAPTOP = dict(
    system="Linux x86_64", python="3.11.7", packages=dict(doctor.OLDEST), cores=2,
    memory=8 * GB, free_memory=5 * GB, torch=TORCH, links=None, shared=64 * MB, temp="/tmp",
    temp_free=90 * GB, forkserver=True, byte_counter=True, load_shown=True, device="cpu",
)  # fmt: skip


def on(**changes: object) -> doctor.Diagnosis:
    return diagnose(doctor.Machine(**LAPTOP | changes))


def says(found: doctor.Diagnosis, what: str) -> str:
    return next(check.finding for check in found.checks if check.name == what)


# ---- a machine that will do ---------------------------------------------------------------------
CUDA = TORCH | {"cuda": "12.8"}
ONE_GPU = CUDA | {"gpus": [H100], "backends": ["gloo", "nccl"]}
TWO_GPUS = CUDA | {"gpus": [H100, H100]}
WELL = [
    ({}, "cores", "2 cores: more ranks than cores take turns, so trust the replayed clock, not"),
    (dict(cores=1), "cores", "1 core: more ranks than cores take turns"),
    (dict(cores=16), "cores", "16 cores: enough for one per rank in every lab"),
    ({}, "memory", "8 GB, 5 GB free: room for 64 ranks"),
    ({}, "GPUs", "torch sees none (this torch is built without CUDA)"),
    (dict(torch=CUDA), "GPUs", "torch sees none; only"),
    (dict(torch=ONE_GPU), "GPUs", "1: H100 with 80 GB\n"),
    (dict(torch=ONE_GPU), "torch", "2.13.0 with gloo and nccl"),
    (dict(torch=TWO_GPUS), "GPUs", "2: H100 with 80 GB, H100 with 80 GB; /dev/shm has 64 MB, too"),
    (dict(torch=TWO_GPUS, shared=8 * GB), "GPUs", "2: H100 with 80 GB, H100 with 80 GB\n"),
    ({}, "links", "not measured yet; to measure (ten to fifteen seconds): paralab doctor --cali"),
    (dict(device="cuda"), "links", "no GPU to measure\n"),
    (dict(device="cuda", torch=ONE_GPU), "links",
     "not measured yet; to measure: paralab doctor --calibrate --device cuda\n"),
    (dict(links="measured 2026"), "links", "measured 2026"),
]  # fmt: skip


@pytest.mark.parametrize("changes, what, sentence", WELL)
def test_a_machine_on_which_all_labs_run_is_told_what_it_has(changes, what, sentence):
    """What is missing without Linux: test_spawn.py."""
    found = on(**changes)
    assert f"{says(found, what)}\n".startswith(sentence)
    assert found.problems == [] and len(found.labs) == 13
    assert found.text().endswith("All labs run here. Open them with: make lab")


def test_little_memory_means_fewer_ranks():
    found = on(free_memory=800 * MB)
    assert says(found, "memory").endswith("room for 4 ranks") and found.problems == []
    assert found.labs == ["00", "01", "03", "04", "05", "06", "07", "09", "11"]
    assert found.text().endswith("Labs that start more: 02, 10, 12 (8 ranks); 08 (16 ranks).")


# ---- machines that will not do ------------------------------------------------------------------
NO_TORCH = TORCH | {"version": None, "backends": [], "error": "ModuleNotFoundError: No module"}
BAD = [
    (dict(torch=NO_TORCH), "torch: cannot be imported: ModuleNotFoundError: No module; "),
    (dict(torch=TORCH | {"backends": []}), "with no backend; ranks on CPUs communicate over gloo"),
    (dict(packages={**LAPTOP["packages"], "plotly": None, "pandas": None}),
     "-m pip install 'pandas>=2.2.2' 'plotly>=7.0'"),
    (dict(packages={**LAPTOP["packages"], "numpy": "10.0.0rc1", "plotly": "6.9.0"}),
     "numpy 10.0.0rc1, pandas 2.2.2, plotly 6.9.0 (too old), "),
    (dict(packages={**LAPTOP["packages"], "safetensors": "0.4.2"}),
     "-m pip install 'safetensors>=0.4.3'"),
    (dict(torch=TORCH | {"version": "2.9.1+cpu"}), "torch: 2.9.1+cpu (too old); "),
    (dict(free_memory=300 * MB), "300 MB free: room for 0 ranks; close other programs"),
    (dict(temp=None, temp_free=None), "temp folder: there is none that can be written to; "),
    (dict(temp_free=5 * MB), "temp folder: /tmp, 5 MB free; make room"),
]  # fmt: skip


@pytest.mark.parametrize("changes, sentence", BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_what_keeps_labs_from_running_is_said_with_what_helps(changes, sentence):
    found = on(**changes)
    [problem] = found.problems
    assert sentence in problem and found.labs == []
    assert f"What has to be fixed first:\n  - {problem}" in found.text()
    assert "All labs run" not in found.text()
    if "torch: cannot" in sentence:
        assert says(found, "GPUs") == "unknown, as torch cannot be imported"


# ---- the facts ----------------------------------------------------------------------------------
def test_torch_is_asked_in_a_process_of_its_own_whatever_becomes_of_it(monkeypatch):
    answer = {"version": "9", "cuda": "13", "gpus": [H100], "backends": ["gloo"], "error": None}
    for code, error in [
        ("import time; time.sleep(60)", "its import took more than 0.5 s"),
        ("import os; os.kill(os.getpid(), 11)", "its process ended with signal 11"),
        ("import no_such_torch", "ModuleNotFoundError: No module named 'no_such_torch'"),
        (f"print('noise'); print({json.dumps(answer)!r})", None),
    ]:
        monkeypatch.setattr(doctor, "_PROBE", code)
        monkeypatch.setattr(doctor, "TORCH_TIMEOUT", 0.5 if "sleep" in code else 120.0)
        told = doctor.ask_torch()
        assert told["error"] == error
    assert told == answer


def test_the_gpus_that_torch_sees_are_told(monkeypatch, capsys):
    """The question as it is, put to a torch that sees two GPUs."""
    import torch

    cards = [SimpleNamespace(name=f"GPU {i}", total_memory=i + 1) for i in range(2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    exec(doctor._PROBE, {})
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"] == [{"name": "GPU 0", "memory": 1}, {"name": "GPU 1", "memory": 2}]


@pytest.mark.parametrize("own", ["", "hub.slice/jupyter-ada.service"])
@pytest.mark.parametrize("folder, most, now, idle", [
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
])  # fmt: skip
def test_a_container_and_a_hub_s_user_have_the_memory_that_their_limit_leaves(
    folder, most, now, idle, own, tmp_path, monkeypatch
):
    group = tmp_path / folder / own
    group.mkdir(exist_ok=True, parents=True)
    (tmp_path / "own").write_text(f"7:cpuset:/x\n4:{folder}:/{own}\n1:name=systemd:/y\n")
    for name, text in {
        most: "3000000",
        now: "2000000",
        "memory.stat": f"anon 5\n{idle} 400000\n",
    }.items():
        (group / name).write_text(text)
    monkeypatch.setattr(cluster, "CGROUP", tmp_path)
    monkeypatch.setattr(cluster, "OWN_GROUPS", tmp_path / "own")
    assert doctor.free_memory() == 1_400_000
    assert calibrate.memory_bytes() == 3_000_000
    (group / most).write_text("9223372036854771712\n")  # version 1's "max"
    monkeypatch.setattr(doctor, "Path", lambda path: tmp_path / "no /proc/meminfo")
    assert doctor.free_memory() is None


def test_where_there_is_no_folder_there_is_no_room():
    assert doctor.room_in("/no/such/folder") is None  # as /dev/shm on macOS


def test_a_calibration_is_read_and_never_made(tmp_path, monkeypatch):
    monkeypatch.setenv("PARALAB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibrate, "measured", lambda device: pytest.fail("measured"))
    assert doctor.calibrated("cpu") is None
    link = {"alpha": 1.5e-3, "bandwidth": 1.25e9}
    cluster = {"flops": 42e9, "memory_bandwidth": 1e9, "intra": {"alpha": 0.0, "bandwidth": 1.0},
               "collectives": {"all_reduce": link}}  # fmt: skip
    known = {"format": calibrate.FORMAT, "cluster": cluster, "made": "2026-01-02T03:04:05Z",
             "points": {"links": []}}  # fmt: skip
    said = (
        "measured 2026-01-02: 42 GFLOP/s on a core; between ranks a latency of 1.5 ms and 1.25 GB/s"
    )
    again = "; other programs were busy then, so it is measured again when they are not"
    far = {"link": {"alpha": 0.042, "bandwidth": 1.2e7}, "nodes": 3, "made": "2026-02-03T04:05:06Z"}
    apart = "; on the slowest link between 3 nodes (measured 2026-02-03) a latency of 42 ms and "
    apart += "12 MB/s"
    for more, words in (
        ({}, said),
        ({"busy": 0.5}, said + again),
        ({"busy": 0.5, "inter": far}, said + again + apart),
    ):
        calibrate.cache_path().write_text(json.dumps(known | more))
        assert doctor.calibrated("cpu") == words


def test_every_lab_is_listed_with_the_ranks_that_it_starts():
    scripts = (ROOT / "tests/labs/src").glob("[0-9]*.py")
    sources = {path.name[:2]: path.read_text() for path in scripts}
    listed = {lab: ranks for ranks, labs in LABS.items() for lab in labs}
    assert set(sources) == set(listed), "paralab/doctor.py lists the labs"
    for lab, ranks in listed.items():
        literal = re.findall(r"\branks=(\d+)\b", sources[lab])
        assert ranks >= max(map(int, literal), default=1)


# ---- the command --------------------------------------------------------------------------------
@pytest.fixture
def fake(monkeypatch):
    """The machine that is examined."""
    machine = doctor.Machine(**LAPTOP)
    monkeypatch.setattr(doctor, "examine", lambda device: machine)
    return machine


def test_the_exit_status_is_0_where_labs_run_and_1_with_the_reason(fake, capsys):
    assert cli.main(["doctor"]) == 0
    assert "All labs run here" in capsys.readouterr().out
    fake.free_memory = 300 * MB
    assert cli.main(["doctor"]) == 1
    assert "300 MB free: room for 0 ranks; close" in capsys.readouterr().out


def test_calibrate_measures_first_and_not_the_gpus_that_there_are_not(fake, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "gpus", lambda: ())
    gpus = ["doctor", "--calibrate", "--device", "cuda"]
    assert "there is no GPU here" in shell_refuses(capsys, *gpus)
    asked = []
    monkeypatch.setattr(cli.Cluster, "local", lambda **how: asked.append(how))
    assert cli.main(["doctor", "--calibrate"]) == cli.main(gpus) == 0
    assert "measuring" in capsys.readouterr().err
    assert asked == [{"device": device, "refresh": True} for device in ("cpu", "cuda")]


def test_under_torchrun_the_first_rank_of_each_machine_speaks_for_it(fake, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    said = shell_refuses(capsys, "doctor", "--calibrate", "--device", "cuda")
    assert "over gloo; legal: 'cpu'" in said
    for nodes, says_one, speaks in ((0, False, False), (1, True, True), (2, False, True)):
        monkeypatch.setattr(between, "calibrate_nodes", lambda device, nodes=nodes: nodes)
        monkeypatch.setenv("LOCAL_RANK", str(int(not nodes)))
        assert cli.main(["doctor", "--calibrate"]) == 0
        out, err = capsys.readouterr()
        assert ("All labs run here" in out) == ("measuring" in err) == speaks
        assert ("there is one node" in err) == says_one


def test_where_torch_breaks_the_doctor_itself_does_not(tmp_path):
    """The whole command, on this machine, with a torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99: no such file')\n")
    ran = python("-m", "paralab", "doctor", cwd=tmp_path, path=[tmp_path])
    assert ran.returncode == 1 and ran.stderr == ""
    assert "cannot be imported: ImportError: libcudart.so.99" in ran.stdout


def test_this_machine_passes_and_the_doctor_leaves_torch_out():
    code = (
        "import sys, paralab.cli; status = paralab.cli.main(['doctor']);"
        "sys.exit(status or 10 * ('torch' in sys.modules))"
    )
    ran = python("-c", code)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " with gloo" in ran.stdout and " free: room for " in ran.stdout
