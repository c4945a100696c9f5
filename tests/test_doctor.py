"""`paralab doctor`: every sentence, on machines made up for it, and the real one once."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from paralab import cli, doctor
from paralab.doctor import LABS, diagnose
from paralab.instruments import calibrate
from processes import python

ROOT = Path(__file__).resolve().parent.parent
GB, MB = 10**9, 10**6

TEMP = {"path": "/tmp", "total": 200 * GB, "free": 90 * GB, "kind": "ext4", "writable": True,
        "direct": True}  # fmt: skip
TORCH = {"version": "2.13.0", "cuda": None, "gpus": [], "backends": ["gloo"], "seconds": 1.0,
         "error": None}  # fmt: skip
H100 = {"name": "H100", "memory": 80 * GB}
LAPTOP = dict(
    system="Linux x86_64",
    python="3.11.7",
    versions=dict.fromkeys(doctor.PACKAGES, "1.0"),
    cores=2,
    processor_time=None,
    memory=8 * GB,
    free_memory=5 * GB,
    torch=TORCH,
    links=None,
    open_files=(1024, 4096),
    shm=TEMP | {"path": "/dev/shm", "free": 64 * MB, "total": 64 * MB, "kind": "tmpfs"},
    temp=TEMP,
    forkserver=True,
    private_network=True,
    loopback_counter=True,
    load_shown=True,
    browser="/usr/bin/chromium",
)


def on(**changes: object) -> doctor.Diagnosis:
    return diagnose(doctor.Machine(**LAPTOP | changes))


def says(found: doctor.Diagnosis, what: str) -> str:
    return found.lines[what]


def verdicts(found: doctor.Diagnosis) -> dict[str, tuple[bool, str]]:
    return {lab.name: (ok, said) for lab, ok, said in found.labs}


# ---- a machine that will do ---------------------------------------------------------------------
def test_a_laptop_runs_all_labs_and_is_told_that_ranks_take_turns():
    found = on()
    assert found.runs and found.problems == []
    assert says(found, "cores") == (
        "2 cores: more ranks take turns, so look at the replayed clock, not at the wall's"
    )
    assert says(found, "memory") == "8.0 GB, 5.0 GB free: room for 64 ranks"
    assert verdicts(found)["00"] == (True, "runs here as it is")
    assert verdicts(found)["08"] == (True, "runs here as it is, ranks taking turns on 2 cores")
    text = found.text()
    assert text.endswith("All labs run here. Open them with: make lab")
    assert all(f"{lab.name} {lab.title}" in text for lab in LABS)


def test_one_core_and_a_container_that_may_use_less_than_it_sees():
    assert says(on(cores=1), "cores").startswith("1 core: more ranks take turns")
    assert verdicts(on(cores=1))["01"][1].endswith("ranks taking turns on 1 core")
    found = on(cores=16, processor_time=1.5)
    assert "16 cores, of which this container may use 1.5 at once: more ranks" in says(
        found, "cores"
    )
    assert verdicts(found)["01"][1].endswith("ranks taking turns on 1 core")
    assert says(on(cores=16), "cores") == "16 cores: every rank of every lab has one"
    assert verdicts(on(cores=16))["08"][1] == "runs here as it is"


def test_gpus_one_for_all_one_for_each_and_none():
    assert "none that torch sees (this torch is built without CUDA)" in says(on(), "GPUs")
    with_cuda = TORCH | {"cuda": "12.8"}
    assert says(on(torch=with_cuda), "GPUs").startswith("none that torch sees; only")
    one = on(torch=with_cuda | {"gpus": [H100], "backends": ["gloo", "nccl"]})
    assert says(one, "GPUs") == "1: H100 with 80.0 GB"
    assert says(one, "backends") == "gloo, nccl"
    assert verdicts(one) == verdicts(on())  # labs compute on processors


def test_links_say_what_was_measured_or_how_to_measure():
    assert "paralab doctor --calibrate" in says(on(), "links")
    links = {"on": "core", "made": "2026-01-02T03:04:05Z", "busy": False, "stolen": 0.1,
             "flops": 42e9, "alpha": 1.5e-3, "bandwidth": 1.25e9}  # fmt: skip
    assert says(on(links=links), "links") == (
        "measured 2026-01-02: 42 GFLOP/s on a core, between ranks 1.5 ms and 1.2 GB/s"
    )
    assert "42 GFLOP/s on a GPU, between" in says(on(links=links | {"on": "GPU"}), "links")
    again = says(on(links=links | {"busy": True}), "links")
    assert again.endswith("; other programs were busy, so it is measured again once they are not")
    shared = says(on(links=links | {"stolen": 0.61}), "links")
    assert "61 % of its time went to other machines" in shared and "quieter hour" in shared


def test_remarks_that_keep_nothing_from_running():
    in_memory = TEMP | {"kind": "tmpfs"}
    cached = TEMP | {"direct": False}
    cases = [
        (dict(temp=in_memory), "temp folder", "tmpfs: that is memory"),
        (dict(temp=cached), "temp folder", "without O_DIRECT"),
        (dict(temp=TEMP), "temp folder", "ext4; files go past the page cache"),
        (dict(shm=None), "/dev/shm", "none"),
        (dict(shm=LAPTOP["shm"]), "/dev/shm", "64 MB of 64 MB free, tmpfs"),
        (dict(open_files=(200, 4096)), "open files", "200: few; ulimit -n 256 (at most: 4096)"),
        (dict(open_files=(200, -1)), "open files", "(at most: no limit)"),
        (dict(open_files=(-1, -1)), "open files", "no limit"),
        (dict(open_files=None), "open files", "not known on this system"),
        (dict(forkserver=False), "ranks", "started one by one"),
        (dict(private_network=False), "byte counter", "shared with other programs"),
        (dict(loopback_counter=False), "byte counter", "none that the kernel shows"),
        (dict(browser=None), "browser", "no chromium or Chrome"),
        (
            dict(free_memory=None),
            "memory",
            "8.0 GB, how much of it is free is not shown here: room",
        ),
        (dict(load_shown=False), "links", "how busy other programs are is not shown here"),
    ]
    for changes, what, sentence in cases:
        found = on(**changes)
        assert sentence in says(found, what), changes
        assert found.runs and found.problems == []


def test_little_memory_means_fewer_ranks():
    found = on(free_memory=800 * MB)
    assert says(found, "memory").endswith("room for 4 ranks")
    assert verdicts(found)["05"][0] is True
    assert verdicts(found)["08"] == (False, "with 4 ranks instead: memory has no room for 16")
    assert found.runs and found.problems == []
    assert found.text().endswith("as they are. Open them with: make lab")


def test_a_lab_that_writes_more_than_there_is_room_for():
    found = on(temp=TEMP | {"free": 100 * MB})
    assert verdicts(found)["09"] == (
        False, "not yet: it writes 200 MB to /tmp, which has 100 MB"
    )  # fmt: skip
    assert found.runs and verdicts(found)["05"][0]


# ---- machines that will not do ------------------------------------------------------------------
SILENT = TORCH | {"version": None, "backends": [], "seconds": None}
NO_TORCH = SILENT | {"error": "ModuleNotFoundError: No module named 'torch'"}
BAD = [
    (dict(torch=NO_TORCH, versions={**LAPTOP["versions"], "torch": None}),
     "torch is not installed: "),
    (dict(torch=SILENT | {"error": "ImportError: libfoo.so.1"}),
     "torch is installed and cannot be imported: ImportError: libfoo.so.1"),
    (dict(torch=TORCH | {"backends": []}), "built without gloo"),
    (dict(versions={**LAPTOP["versions"], "plotly": None, "pandas": None}),
     "missing: pandas, plotly; "),
    (dict(python="3.10.4"), "Python 3.10.4 is too old: 3.11 or newer"),
    (dict(free_memory=300 * MB), "300 MB of memory are free, and one rank next to JupyterLab"),
    (dict(temp=None), "no folder for temporary files"),
    (dict(temp=TEMP | {"writable": False}), "no folder for temporary files"),
    (dict(temp=TEMP | {"free": 5 * MB}), "/tmp has 5 MB left"),
    (dict(open_files=(32, 64)), "a process may open 32 files, and ranks need more: ulimit -n 256"),
]  # fmt: skip


@pytest.mark.parametrize("changes, sentence", BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_what_keeps_labs_from_running_is_said_with_what_helps(changes, sentence):
    found = on(**changes)
    assert not found.runs
    [problem] = found.problems
    assert sentence in problem
    assert all(said == (False, "not yet") for said in verdicts(found).values())
    assert f"What has to be mended first:\n  - {problem}" in found.text()
    assert "All labs run" not in found.text()


def test_without_torch_nothing_is_claimed_about_gpus():
    found = on(torch=NO_TORCH)
    assert says(found, "GPUs") == "unknown: torch could not be asked"
    assert says(found, "backends") == "none: torch has to be mended first"


# ---- the facts ----------------------------------------------------------------------------------
def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_torch_is_asked_in_a_process_of_its_own_whatever_becomes_of_it():
    hung = doctor.ask_torch(timeout=0.5, command=command("import time; time.sleep(60)"))
    assert hung["error"] == "importing it took more than 0.5 s"
    crashed = doctor.ask_torch(command=command("import os; os.kill(os.getpid(), 11)"))
    assert crashed["error"] == "its process ended with signal 11"
    missing = doctor.ask_torch(command=command("import no_such_torch"))
    assert missing["error"] == "ModuleNotFoundError: No module named 'no_such_torch'"
    quiet = doctor.ask_torch(command=command(""))
    assert quiet["error"] == "its process did not say what it found"
    assert "No such file" in doctor.ask_torch(command=["/no/such/python"])["error"]
    answer = {"version": "9", "cuda": "13", "gpus": [H100], "backends": ["gloo"], "seconds": 1.0}
    told = doctor.ask_torch(command=command(f"print('noise'); print({json.dumps(answer)!r})"))
    assert told == answer | {"error": None}


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    mounts = tmp_path / "mounts"
    mounts.write_text(f"a / ext4 rw 0 0\nb {tmp_path} xfs rw 0 0\nc {inner} tmpfs rw 0 0\n"
                      f"d {tmp_path}/in nfs rw 0 0\n")  # fmt: skip
    places = (inner, tmp_path / "inside", tmp_path, "/")  # "in" is mounted, "inside" is not in it
    kinds = [doctor.file_system(str(at), str(mounts)) for at in places]
    assert kinds == ["tmpfs", "xfs", "xfs", "ext4"]
    assert doctor.file_system("/", str(tmp_path / "none")) is None


def test_folders_say_what_they_have_room_for(tmp_path):
    found = doctor.folder(str(tmp_path))
    assert found["writable"] and 0 < found["free"] <= found["total"]
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    assert doctor.folder(str(tmp_path / "none")) is None and doctor.folder(None) is None


def test_a_calibration_is_read_and_never_made(tmp_path, monkeypatch):
    monkeypatch.setenv("PARALAB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibrate, "_measure", lambda device: pytest.fail("measured"))
    assert doctor.calibrated() is None
    link = {"alpha": 1e-3, "bandwidth": 1e9}
    cluster = {"flops": 1e9, "memory_bandwidth": 1e9, "intra": {"alpha": 0.0, "bandwidth": 1.0},
               "collectives": {"all_reduce": link}}  # fmt: skip
    points, accuracy = {"links": [], "device": []}, {"device": {"median": 0.1}}
    known = {"format": calibrate.FORMAT, "cluster": cluster, "made": "2026-01-02T03:04:05Z",
             "points": points, "accuracy": accuracy}  # fmt: skip
    calibrate.cache_path().write_text(json.dumps(known))
    assert doctor.calibrated() == {"on": "core", "made": known["made"], "busy": False,
                                    "stolen": 0.0, "flops": 1e9, **link}  # fmt: skip
    calibrate.cache_path().write_text(json.dumps(known | {"busy": 0.5, "stolen": 0.7}))
    assert doctor.calibrated()["busy"] and doctor.calibrated()["stolen"] == 0.7


def test_a_browser_is_the_one_that_is_named_or_the_first_there_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    assert doctor.browser() is None
    chrome = tmp_path / "google-chrome"
    chrome.write_text("#!/bin/sh\n")
    chrome.chmod(0o755)
    assert doctor.browser() == str(chrome)
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "gone"))
    assert doctor.browser() is None
    assert doctor.private_network() is False  # there is no unshare on this PATH


def test_every_lab_is_listed_with_a_title_that_is_its_own():
    scripts = (ROOT / "tests/labs/src").glob("[0-9]*.py")
    sources = {path.name[:2]: path.read_text() for path in scripts}
    assert set(sources) == {lab.name for lab in LABS}, "paralab/doctor.py lists the labs"
    for lab in LABS:
        heading = re.search(r"^# # \d\d · (.*)$", sources[lab.name], re.MULTILINE).group(1)
        assert heading.startswith(lab.title)
        literal = re.findall(r"\branks=(\d+)\b", sources[lab.name])
        assert lab.ranks >= max(map(int, literal), default=1)


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
    fake(torch=NO_TORCH, versions={**LAPTOP["versions"], "torch": None})
    assert cli.main(["doctor"]) == 1
    assert "torch is not installed" in capsys.readouterr().out


def test_json_has_facts_sentences_labs_and_problems(fake, capsys):
    fake(free_memory=300 * MB)
    assert cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] is False and len(found["problems"]) == 1
    assert found["machine"]["free_memory"] == 300 * MB
    assert found["machine"]["temp"]["kind"] == "ext4"
    assert found["says"]["backends"] == "gloo"
    assert [lab["name"] for lab in found["labs"]] == [lab.name for lab in LABS]
    assert found["labs"][8]["ranks"] == 16 and found["labs"][0]["runs"] is False


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
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", "--calibrate", "--device", "cuda"])
    assert end.value.code == 2 and "there is no GPU here" in capsys.readouterr().err


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
    assert found["runs"] and "gloo" in found["machine"]["torch"]["backends"]
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory"] > GB
