"""The shell's promises: every setting reachable, every refusal exit 2, every failure one message.

What a run does is tested elsewhere; here `experiment` is replaced by a double that records how it
was called, and only the last tests start ranks.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

import paralab as pl
from paralab import cli, options
from paralab import experiment as the_real_one
from paralab.checks import illegal
from paralab.dry_run import dry_run
from paralab.ranks.errors import OutOfMemory, RankError, RankTimeout
from paralab.ranks.failure import Refused
from paralab.spec import Cluster, ModelSpec, Plan
from processes import ROOT, python
from refusals import shell_refuses as refused

TORCHRUN = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR")


@pytest.fixture
def experiment(monkeypatch):
    """A double of paralab.experiment, which notes how it is called."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    double = mock.Mock()
    double.run.return_value.summary.return_value.to_string.return_value = "step time  1 s"
    double.run_under_torchrun.side_effect = lambda *_, **__: int(os.environ["RANK"])
    monkeypatch.setattr(cli, "experiment", double)
    return double


# ---- settings ------------------------------------------------------------------------------------
OTHER = {  # for every field a legal value that is not its default
    "layers": 2, "hidden": 64, "heads": 8, "seq_len": 32, "vocab": 300, "tied": False,
    "dropout": 0.25, "attention": "sdpa",
    "dp": 3, "tp": 2, "pp": 2, "schedule": "gpipe", "microbatches": 4, "microbatch_size": 1,
    "virtual_stages": 2, "zero_stage": 1, "shard": 2, "sequence_parallel": True,
    "recompute": "full", "offload": "cpu", "precision": "bf16", "tp_mode": "2d",
    "grad_sync": "naive", "bucket_bytes": 12345, "prefetch": 2, "tp_depth": 2,
    "partition_activations": True, "secondary_shard": 2, "grad_dtype": "fp32",
    "tf32": True, "tp_overlap": False, "partition_messages": True,
}  # fmt: skip


FIELDS = [
    (kind, field.name)
    for kind in (ModelSpec, Plan)
    for field in dataclasses.fields(kind)
    if field.name not in options.CODE
]


@pytest.mark.parametrize("kind, name", FIELDS)
def test_every_field_of_a_model_and_a_plan_is_an_option(experiment, monkeypatch, kind, name):
    monkeypatch.setattr(Plan, "validate", lambda self, model: None)  # also what cannot run yet
    value, option = OTHER[name], name.replace("_", "-")
    switch = [f"--{option}" if value else f"--no-{option}"]
    words = switch if isinstance(value, bool) else [f"--{option}", str(value)]
    assert cli.main(["run", *words]) == 0
    found, settings = experiment.run.call_args
    plain = [ModelSpec.preset("laptop"), Plan()]
    expected = [one.replace(**{name: value}) if type(one) is kind else one for one in plain]
    assert list(found) == expected != plain and settings == {}


def test_every_field_is_explained_by_what_the_docstring_says_first():
    for kind, name in FIELDS:
        said = options.explained(kind)[name]
        assert 10 < len(said) < 220 and not set(said) & {'"', "`"}, name


def test_run_settings_reach_the_run_as_numbers_and_unnamed_ones_stay_the_runs_defaults(experiment):
    line = "run --dp 4 --steps 8 --optimizer sgd --lr 0.1 --clip-norm 1 --seed 3 --device cpu"
    words = ["--bucket-bytes", "64 kib", "--timeout", "30", "--data", "my text.txt"]
    kept = "--preset gpt2 --layers 2 --checkpoint to --save-every 2 --resume to "
    kept += "--resume-changes lr,global_batch --attention None --grad-dtype None"
    assert cli.main([*line.split(), *words, *kept.split()]) == 0
    experiment.run.assert_called_once_with(
        ModelSpec.preset("gpt2").replace(layers=2), Plan(dp=4, bucket_bytes=2**16), steps=8, lr=0.1,
        optimizer="sgd", clip_norm=1, seed=3, device="cpu", timeout=30, data="my text.txt",
        save="to", save_every=2, resume="to", resume_changes=["lr", "global_batch"],
    )  # fmt: skip


# ---- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--dp", "-1"], "dp", "-1"),
        (["--dp", "1_0"], "dp", "'1_0'"),
        (["--dp", "٣"], "dp", "'٣'"),
        (["--dp", "two"], "dp", "'two'"),
        (["--dp", "2.0"], "dp", "2.0"),
        (["--dropout", "nan"], "dropout", "nan"),
        (["--tp", "3", "--tp-mode", "2d"], "tp", "3"),
        (["--bucket-bytes", "4 parsecs"], "bucket_bytes", "'4 parsecs'"),
        (["--bucket-bytes", "0.3KB", "--bucket-bytes", "0.0001KB"], "bucket_bytes", "'0.0001KB'"),
        (["--preset", "gpt5"], "preset", "'gpt5'"),
        (["--save", "no/such/folder/run.json"], "save", "'no/such/folder/run.json'"),
        (["--save", "/proc/run.json"], "save", "'/proc/run.json'"),
        (["--perfetto", "/dev/null"], "perfetto", "'/dev/null'"),
        (["--html", "."], "html", "'.'"),
        (["--out", "parts"], "out", "'parts'"),
    ],
)
def test_an_illegal_setting_is_refused_by_name_value_and_what_is_legal(
    experiment, capsys, arguments, field, value
):
    message = refused(capsys, "run", *arguments)
    assert f"{field}={value}: " in message and "; legal: " in message
    assert not experiment.run.called


@pytest.mark.parametrize("command, said", [
    ("observe --html ./in.py in.py", "html='in.py': script is this path already"),
    ("show in.py --html in.py", "html='in.py': path is this path already"),
    ("run --data in.py --save in.py", "save='in.py': data is this path already"),
    ("run --save c --checkpoint c", "save='c': checkpoint is this path already"),
    ("run --save c --html ./c", "html='c': save is this path already; legal: another file"),
])  # fmt: skip
def test_a_file_that_a_command_reads_or_writes_is_not_written_over(
    experiment, capsys, tmp_path, monkeypatch, command, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.py").write_text("print('hello')")
    assert said in refused(capsys, *command.split())
    assert (tmp_path / "in.py").read_text() == "print('hello')" and not experiment.run.called


def test_what_is_refused_of_checkpoints_names_the_option(experiment, capsys, monkeypatch):
    experiment.run.side_effect = illegal(
        "save", "c", "the folder cannot be created", "save=a folder"
    )
    said = "checkpoint='c': the folder cannot be created; legal: checkpoint=a"
    assert said in refused(capsys, "run", "--checkpoint", "c")
    experiment.run.side_effect = Refused(experiment.run.side_effect)  # as of a rank of torchrun
    assert cli.main(["run", "--checkpoint", "c"]) == 1 and said in capsys.readouterr().err
    monkeypatch.setattr(cli, "experiment", the_real_one)
    assert "checkpoint=" not in refused(capsys, "run", "--resume", "nowhere")


def test_what_is_missing_empty_unknown_or_abbreviated_is_refused(experiment, capsys):
    for said, *words in [
        ("required: SCRIPT", "observe"),
        ("op='': unknown choice; legal: 'ADD'", "program", "--op", ""),
        ("--speed", "run", "--speed", "9"),
        ("--bucket", "run", "--bucket", "2"),
        ("COMMAND",),
    ]:
        assert said in refused(capsys, *words)


def test_a_defect_keeps_its_traceback(experiment):
    """A ValueError that is no refusal is a bug of ours: hiding it behind exit 2 blames the user."""
    experiment.run.side_effect = ValueError("operands could not be broadcast")
    with pytest.raises(ValueError, match="broadcast"):
        cli.main(["run"])


# ---- failures ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, status, said", [
    (RankError, 1, "rank 2 failed"), (RankTimeout, 1, "rank 2 failed"),
    (OutOfMemory, 1, "rank 2 failed"), (KeyboardInterrupt, 130, "interrupted; rank 2 failed"),
])  # fmt: skip
def test_a_failed_run_is_one_message_and_exit_1_an_interrupted_one_130(
    experiment, capsys, kind, status, said
):
    experiment.run.side_effect = failure = kind.__new__(kind)
    BaseException.__init__(failure, "rank 2 failed\nits own traceback")
    assert cli.main(["run", "--dp", "2"]) == status
    out, err = capsys.readouterr()
    assert said in err and "Traceback (most" not in err and out == ""


@pytest.mark.parametrize("words", ["doctor", "show x.json"])
def test_in_a_folder_that_was_deleted_a_command_says_so(capsys, tmp_path, monkeypatch, words):
    """No import of torch works there, so doctor advised to install it again."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(words.split()) == 1
    said = "paralab: the current folder was deleted: change to another one\n"
    assert capsys.readouterr() == ("", said)


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def ending(request):
    """A signal that ends a process here, also where these tests run under `nohup`."""
    previous = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, previous)


def test_a_signal_that_ends_a_job_ends_as_ctrl_c_does(experiment, capsys, monkeypatch, ending):
    """What cleans up runs: files of offloaded states would stay."""

    def run(*asked, **settings):
        os.kill(os.getpid(), ending)
        time.sleep(60)  # another thread may be the one that the signal comes to first

    monkeypatch.setattr(cli.experiment, "run", run)
    assert cli.main(["run"]) == 130
    assert "interrupted; the ranks are stopped" in capsys.readouterr().err
    assert signal.getsignal(ending) is signal.SIG_DFL


def test_a_signal_that_nohup_has_switched_off_stays_so(experiment, capsys, monkeypatch, ending):
    monkeypatch.setattr(cli.experiment, "run", lambda *a, **k: os.kill(os.getpid(), ending))
    monkeypatch.setattr(cli, "_print_summary", lambda report: None)
    signal.signal(ending, signal.SIG_IGN)
    assert cli.main(["run"]) == 0
    assert not capsys.readouterr().err and signal.getsignal(ending) is signal.SIG_IGN


@pytest.mark.parametrize("to, status, said", [
    ("", 0, ""), (">&-", 0, ""),
    (">/dev/full", 1, "paralab: [Errno 28] No space left on device\n"),
])  # fmt: skip
def test_an_output_without_letters_or_none_is_no_error_and_a_full_disk_is_one_line(
    to, status, said
):
    asked = f"{shlex.quote(sys.executable)} -m paralab program --dp 2 {to}"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    found = subprocess.run(asked, shell=True, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (status, said)
    assert ("ALL_REDUCE" in found.stdout) == (not to)


def test_a_warning_is_one_line_without_the_librarys_own_code_and_said_once(tmp_path):
    """Three checks find it: of the command, of the run, and of its offloaded states."""
    words = "run --layers 2 --pp 2 --zero-stage 3 --resume nowhere --checkpoint new"
    said = python("-m", "paralab", *words.split(), cwd=tmp_path).stderr.splitlines()
    assert "paralab: warning: zero_stage=3 with pp=2: a stage's parameters" in said[0]
    assert [line for line in said[1:] if "zero_stage" in line or "validate" in line] == []


# ---- what comes out ------------------------------------------------------------------------------
def test_results_go_where_they_were_asked_to(experiment, capsys, tmp_path):
    files = {name: tmp_path / name for name in ("save", "html", "perfetto")}
    assert cli.main(["run", *(f"--{name}={path}" for name, path in files.items())]) == 0
    report, out = experiment.run.return_value, capsys.readouterr().out
    report.save.assert_called_once_with(files["save"])
    report.to_html.assert_called_once_with(files["html"], sections=[])
    report.to_perfetto.assert_called_once_with(files["perfetto"])
    assert "step time  1 s" in out and all(str(path) in out for path in files.values())


def test_a_prediction_is_for_the_device_that_is_named_or_that_a_run_takes(capsys, monkeypatch):
    preset = pl.Cluster.preset("dgx-a100")
    monkeypatch.setattr(pl.Cluster, "local", local := mock.Mock(return_value=preset))
    small = shlex.split("predict --layers 1 --hidden 32 --heads 2 --seq-len 16 --device cuda")
    assert cli.main(small) == cli.main(small[:-2]) == 0
    assert local.call_args_list == [mock.call(device="cuda"), mock.call(device="cpu")]
    capsys.readouterr()
    said = refused(capsys, *small, "--cluster", "dgx-a100")
    assert "the cluster that --cluster names has its own device" in said
    assert "cluster='dgx': unknown" in refused(capsys, *small[:-2], "--cluster", "dgx")


def test_a_dry_run_is_of_the_cluster_that_is_named(capsys):
    """On GPUs no rank writes the s x s scores down."""
    words = "dry-run --preset gpt2 --pp 2 --rank 1 --optimizer sgd"
    for more, device in (("", None), (" --cluster dgx-a100", Cluster.preset("dgx-a100"))):
        assert cli.main(shlex.split(words + more)) == 0
        how = {"cluster": device, "rank": 1, "optimizer": "sgd"}
        report, said = dry_run(ModelSpec.preset("gpt2"), Plan(pp=2), **how), capsys.readouterr().out
        assert f"{round(report.peak_memory / 1e6):,}" in said and "rank 1 of 2 ranks" in said


def test_numbers_are_readable_on_every_scale(capsys, tmp_path):
    """A count is whole, a step of minutes has no exponent; the page has the same numbers. And it is
    said where a plan does not fit.
    """
    page, model = tmp_path / "page.html", ModelSpec.preset("laptop").replace(layers=1)
    assert cli.main(["dry-run", "--layers", "1"]) == 0
    said = capsys.readouterr().out
    [line] = [line for line in said.splitlines() if line.startswith("parameters")]
    assert line.split()[:2] == ["parameters", f"{model.num_params:,}"]
    large = shlex.split("predict --preset gpt3-175b --cluster dgx-a100")
    assert cli.main([*large, "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^step time +\d{3},\d{3} +ms$", said, re.M) and "e+0" not in said
    assert re.search(r"It does not fit: one rank needs .*; the largest category is optimizer", said)
    [took] = re.findall(r"^step time +(\S+)", said, re.M)
    assert f"<td>{took}</td>" in page.read_text(encoding="utf-8")


def test_what_is_predicted_beside_a_run_is_for_its_device(experiment, monkeypatch):
    experiment.run.return_value.meta = {"device": "cuda:0", "optimizer": "sgd"}
    monkeypatch.setattr(pl.Cluster, "local", local := mock.Mock())
    monkeypatch.setattr(cli, "predict", expect := mock.Mock())
    monkeypatch.setattr(cli, "compare", mock.MagicMock())
    assert cli.main(["run", "--predict"]) == 0
    local.assert_called_once_with(device="cuda")
    assert expect.call_args.kwargs == {"optimizer": "sgd"}


def test_show_refuses_what_is_no_report_or_cannot_be_written_so(capsys, tmp_path):
    (tmp_path / "torn.json").write_text('{"paralab')
    small = pl.ModelSpec(layers=1, hidden=32, heads=2, seq_len=16)
    pl.dry_run(small, pl.Plan()).save(tmp_path / "dry.json")
    for name in ("nowhere.json", "torn.json"):
        assert name in refused(capsys, "show", str(tmp_path / name))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["show", str(tmp_path / "dry.json"), "--perfetto", str(tmp_path / "trace.json")])
    assert "a trace needs times" in capsys.readouterr().err


# ---- torchrun ------------------------------------------------------------------------------------
@pytest.fixture
def as_rank(monkeypatch, experiment):
    monkeypatch.setattr(cli, "OTHERS_WAIT", 0.0)
    variables = zip(TORCHRUN, ("a job", 0, 2, "127.0.0.1"), strict=True)
    for name, value in variables:
        monkeypatch.setenv(name, str(value))
    return lambda rank: monkeypatch.setenv("RANK", str(rank))


def test_under_torchrun_a_rank_writes_its_part_and_only_rank_0_speaks(experiment, as_rank, capsys):
    for rank in (0, 1):
        as_rank(rank)
        assert cli.main(shlex.split("run --dp 2 --steps 3 --out parts")) == 0
        (_, plan), settings = experiment.run_under_torchrun.call_args
        assert plan.dp == 2 and settings == {"folder": "parts", "steps": 3}
        assert ("pl.load('parts')" in capsys.readouterr().out) == (rank == 0)


@pytest.mark.parametrize("variables, said", [
    ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "WORLD_SIZE=None: this process is not a"),
    ({"RANK": "0", "WORLD_SIZE": "zero", "MASTER_ADDR": "here"}, "WORLD_SIZE='zero': this proc"),
    ({"RANK": "x", "WORLD_SIZE": "1", "MASTER_ADDR": "here"}, "RANK='x': this process is not a"),
    ({"PARALAB_RANK": "0"}, "rank 0 called a launch: ranks cannot launch ranks; legal: a "),
])  # fmt: skip
def test_variables_that_no_torchrun_has_set_are_one_line_and_exit_2_and_no_folder_is_made(
    experiment, capsys, monkeypatch, tmp_path, variables, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "OTHERS_WAIT", 0.0)
    monkeypatch.setattr(cli, "experiment", the_real_one)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Path("train.py").touch()
    for words in ("run --checkpoint new", "observe train.py"):
        assert said in refused(capsys, *words.split())
    assert os.listdir(tmp_path) == ["train.py"]


def test_under_torchrun_a_refusal_is_said_once_such_as_of_files_for_the_whole(as_rank, capsys):
    for said, words in [("dp=0", "--dp 0")] + [
        ("paralab show", option) for option in ("--save x.json", "--html x.html", "--predict")
    ]:
        as_rank(0)
        assert said in refused(capsys, "run", *words.split())
        as_rank(1)
        with pytest.raises(SystemExit, match="2"):
            cli.main(["run", *words.split()])
        assert capsys.readouterr().err == ""


# ---- the real thing ------------------------------------------------------------------------------
def test_a_run_saved_and_shown_from_the_shell_prints_the_same_twice(tmp_path):
    """What is predicted beside it has its optimizer: with another one it would be refused."""
    small = shlex.split("--dp 2 --layers 1 --hidden 32 --heads 2 --seq-len 16 --steps 3")
    more = shlex.split("--optimizer sgd --predict --save run.json --html run.html")
    ran = python("-m", "paralab", "run", *small, *more, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "predicted" in ran.stdout
    asked = ["show", "run.json", "--perfetto", "trace.json"]
    shown = python("-m", "paralab", *asked, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    summary = [line for line in shown.stdout.splitlines() if "trace.json" not in line]
    assert "\n".join(summary) in ran.stdout and "dp=2" in ran.stdout
    assert {"run.json", "run.html", "trace.json"} <= set(os.listdir(tmp_path))


def test_a_reader_that_has_seen_enough_is_no_error_and_files_are_written(tmp_path):
    asked = [sys.executable, "-m", "paralab", "dry-run", "--dp", "4", "--html", tmp_path / "page"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        program.stdout.close()  # as `head` does
        assert program.stderr.read() == b"" and program.wait(60) == 0
    assert (tmp_path / "page").exists()
