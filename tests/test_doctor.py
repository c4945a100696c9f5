"""`paralab doctor`: every sentence, on machines made up for it, and the real one once."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paralab import cli, doctor
from paralab.doctor import LABS, diagnose
from paralab.instruments import calibrate
from processes import python
from refusals import shell_refuses

ROOT = Path(__file__).resolve().parent.parent
GB, MB = 10**9, 10**6

TORCH = {"version": "2.13.0", "cuda": None, "gpus": [], "backends": ["gloo"], "error": None}
H100 = {"name": "H100", "memory": 80 * GB}
LAPTOP = dict(
    system="Linux x86_64",
    python="3.11.7",
    packages=dict.fromkeys(doctor.PACKAGES, "1.0"),
    cores=2,
    memory=8 * GB,
    free_memory=5 * GB,
    torch=TORCH,
    links=None,
    shared=64 * MB,
    temp="/tmp",
    temp_free=90 * GB,
    forkserver=True,
    loopback_counter=True,
    load_shown=True,
)


def on(**changes: object) -> doctor.Diagnosis:
    return diagnose(doctor.Machine(**LAPTOP | changes))


def says(found: doctor.Diagnosis, what: str) -> str:
    return next(check.finding for check in found.checks if check.name == what)


# ---- a machine that will do ---------------------------------------------------------------------
def test_a_laptop_runs_all_labs_and_is_told_that_ranks_take_turns():
    found = on()
    assert found.problems == [] and len(found.labs) == 13
    assert says(found, "cores") == (
        "2 cores: more ranks than cores take turns, so trust the replayed clock, not the wall clock"
    )
    assert says(on(cores=1), "cores").startswith("1 core: more ranks than cores take turns")
    assert says(on(cores=16), "cores") == "16 cores: enough for one per rank in every lab"
    assert says(found, "memory") == "8 GB, 5 GB free: room for 64 ranks"
    assert found.text().endswith("All labs run here. Open them with: make lab")


def test_gpus_one_for_all_one_for_each_and_none():
    assert "torch sees none (this torch is built without CUDA)" in says(on(), "GPUs")
    with_cuda = TORCH | {"cuda": "12.8"}
    assert says(on(torch=with_cuda), "GPUs").startswith("torch sees none; only")
    one = on(torch=with_cuda | {"gpus": [H100], "backends": ["gloo", "nccl"]})
    assert says(one, "GPUs") == "1: H100 with 80 GB"
    assert says(one, "torch") == "2.13.0 with gloo and nccl"
    two = with_cuda | {"gpus": [H100, H100]}
    assert says(on(torch=two), "GPUs").endswith(
        "H100 with 80 GB; /dev/shm has 64 MB, too little for NCCL: give it 1 GB"
    )
    assert says(on(torch=two, shared=8 * GB), "GPUs").endswith("H100 with 80 GB")


def test_remarks_that_keep_nothing_from_running():
    cases = [
        (dict(), "temp folder", "/tmp, 90 GB free"),
        (dict(forkserver=False), "ranks", "started one by one"),
        (dict(loopback_counter=False), "byte counter", "this kernel shows none"),
        (
            dict(free_memory=None),
            "memory",
            "8 GB, this system does not show how much of it is free: room",
        ),
        (
            dict(),
            "links",
            "not measured yet; to measure (ten to fifteen seconds): paralab doctor --calibrate",
        ),
        (dict(links="measured 2026"), "links", "measured 2026"),
        (dict(load_shown=False), "links", "this system does not show how busy other programs are"),
    ]
    for changes, what, sentence in cases:
        found = on(**changes)
        assert sentence in says(found, what), changes
        assert len(found.labs) == 13 and found.problems == []


def test_little_memory_means_fewer_ranks():
    found = on(free_memory=800 * MB)
    assert says(found, "memory").endswith("room for 4 ranks")
    assert found.labs == ["00", "01", "03", "04", "05", "06", "07", "09", "11"]
    assert found.problems == []
    assert found.text().endswith(
        "Memory has room for 4 ranks at once. "
        "Labs that start more: 02, 10, 12 (8 ranks); 08 (16 ranks)."
    )


# ---- machines that will not do ------------------------------------------------------------------
NO_TORCH = TORCH | {"version": None, "backends": [], "error": "ModuleNotFoundError: No module"}
BAD = [
    (dict(torch=NO_TORCH), "torch: cannot be imported: ModuleNotFoundError: No module; "),
    (dict(torch=TORCH | {"backends": []}), "with no backend; ranks on CPUs communicate over gloo"),
    (dict(packages={**LAPTOP["packages"], "plotly": None, "pandas": None}),
     "-m pip install pandas plotly"),
    (dict(python="3.10.4"), "Python: 3.10.4; install Python 3.11 or newer"),
    (dict(free_memory=300 * MB), "300 MB free: room for 0 ranks; close other programs"),
    (dict(temp=None, temp_free=None), "temp folder: there is none that can be written to; "),
    (dict(temp_free=5 * MB), "temp folder: /tmp, 5 MB free; make room"),
]  # fmt: skip


@pytest.mark.parametrize("changes, sentence", BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_what_keeps_labs_from_running_is_said_with_what_helps(changes, sentence):
    found = on(**changes)
    [problem] = found.problems
    assert sentence in problem
    assert found.labs == []
    assert f"What has to be fixed first:\n  - {problem}" in found.text()
    assert "All labs run" not in found.text()


def test_without_torch_nothing_is_claimed_about_gpus():
    assert says(on(torch=NO_TORCH), "GPUs") == "unknown, as torch cannot be imported"


# ---- the facts ----------------------------------------------------------------------------------
def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_torch_is_asked_in_a_process_of_its_own_whatever_becomes_of_it():
    hung = doctor.ask_torch(timeout=0.5, command=command("import time; time.sleep(60)"))
    assert hung["error"] == "its import took more than 0.5 s"
    crashed = doctor.ask_torch(command=command("import os; os.kill(os.getpid(), 11)"))
    assert crashed["error"] == "its process ended with signal 11"
    missing = doctor.ask_torch(command=command("import no_such_torch"))
    assert missing["error"] == "ModuleNotFoundError: No module named 'no_such_torch'"
    answer = {"version": "9", "cuda": "13", "gpus": [H100], "backends": ["gloo"]}
    told = doctor.ask_torch(command=command(f"print('noise'); print({json.dumps(answer)!r})"))
    assert told == answer | {"error": None}


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


def test_folders_say_what_they_have_room_for(tmp_path):
    assert doctor.room_in(str(tmp_path)) > 0
    assert doctor.room_in(str(tmp_path / "none")) is None and doctor.room_in(None) is None


def test_a_calibration_is_read_and_never_made(tmp_path, monkeypatch):
    monkeypatch.setenv("PARALAB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibrate, "measured", lambda device: pytest.fail("measured"))
    assert doctor.calibrated() is None
    link = {"alpha": 1.5e-3, "bandwidth": 1.25e9}
    cluster = {"flops": 42e9, "memory_bandwidth": 1e9, "intra": {"alpha": 0.0, "bandwidth": 1.0},
               "collectives": {"all_reduce": link}}  # fmt: skip
    points, accuracy = {"links": [], "device": []}, {"device": {"median": 0.1}}
    known = {"format": calibrate.FORMAT, "cluster": cluster, "made": "2026-01-02T03:04:05Z",
             "points": points, "accuracy": accuracy}  # fmt: skip
    calibrate.cache_path().write_text(json.dumps(known))
    said = (
        "measured 2026-01-02: 42 GFLOP/s on a core; between ranks a latency of 1.5 ms and 1.25 GB/s"
    )
    assert doctor.calibrated() == said
    calibrate.cache_path().write_text(json.dumps(known | {"busy": 0.5}))
    again = "; other programs were busy then, so it is measured again when they are not"
    assert doctor.calibrated() == said + again


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
    def put(**changes: object) -> None:
        monkeypatch.setattr(doctor, "examine", lambda device: doctor.Machine(**LAPTOP | changes))

    return put


def test_the_exit_status_is_0_where_labs_run_and_1_with_the_reason(fake, capsys):
    fake()
    assert cli.main(["doctor"]) == 0
    assert "All labs run here" in capsys.readouterr().out
    fake(torch=NO_TORCH)
    assert cli.main(["doctor"]) == 1
    assert "torch: cannot be imported" in capsys.readouterr().out


def test_json_has_facts_sentences_labs_and_problems(fake, capsys):
    fake(free_memory=300 * MB)
    assert cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["labs"] == [] and len(found["problems"]) == 1
    assert found["machine"]["free_memory"] == 300 * MB
    assert found["checks"]["torch"] == "2.13.0 with gloo"


def test_calibrate_measures_first(fake, capsys, monkeypatch):
    fake()
    asked = []
    monkeypatch.setattr(doctor.Cluster, "local", lambda **how: asked.append(how))
    assert cli.main(["doctor", "--calibrate", "--json"]) == 0
    assert asked == [{"device": "cpu", "refresh": True}]
    out, err = capsys.readouterr()
    assert json.loads(out) and "measuring" in err  # --json stays JSON
    assert cli.main(["doctor", "--calibrate", "--device", "cuda"]) == 0
    assert asked[1] == {"device": "cuda", "refresh": True}


def test_gpus_are_not_calibrated_where_there_are_none(monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "gpus", lambda: ())
    said = shell_refuses(capsys, "doctor", "--calibrate", "--device", "cuda")
    assert "there is no GPU here" in said


def test_where_torch_breaks_the_doctor_itself_does_not(tmp_path):
    """The whole command, on this machine, with a torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99: no such file')\n")
    ran = python("-m", "paralab", "doctor", cwd=tmp_path, path=[tmp_path])
    assert ran.returncode == 1 and ran.stderr == ""
    assert "cannot be imported: ImportError: libcudart.so.99" in ran.stdout


def test_this_machine_passes_and_the_doctor_leaves_torch_out():
    code = (
        "import sys, paralab.cli; status = paralab.cli.main(['doctor', '--json']);"
        "sys.exit(status or 10 * ('torch' in sys.modules))"
    )
    ran = python("-c", code)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert found["labs"] and "gloo" in found["machine"]["torch"]["backends"]
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory"] > GB
