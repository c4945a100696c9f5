"""What `pl.launch` promises when nothing goes wrong, and what it refuses before it starts."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import paralab as pl
from paralab.comm import everyone
from paralab.launch import _shared_server, _SharedServer, launch_program
from paralab.ranks.hangs import Standing, sentence
from paralab.ranks.host import RECEIVING
from paralab.ranks.server import ESSENTIAL, START, TO_TRAIN, WHEN_IDLE, kill, start_method
from paralab.ranks.watch import Run
from processes import below_the_server, is_alive, printed, python, until
from refusals import refuses

LAUNCH = sys.modules["paralab.launch"]  # `pl.launch` is the function
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks import no tests
STDOUT = "__stdoutp" if sys.platform == "darwin" else "stdout"  # as C's library calls it
forks = pytest.mark.skipif(start_method() == "spawn", reason="a server that spawns loads nothing")


@pytest.fixture
def house(monkeypatch):
    """A server of the test's own."""
    monkeypatch.setattr(LAUNCH, "_shared_server", house := _SharedServer())
    yield house
    house.close()


def sum_of_ranks() -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


# ---- results ------------------------------------------------------------------------------------
def test_functions_arguments_and_large_results_travel_by_value_in_rank_order() -> None:
    offset = random.random()

    def add(x: float, y: float) -> tuple:
        total = torch.ones(1)
        dist.all_reduce(total)
        return x + y + offset, np.arange(30 * 2**17, dtype=np.float64), total.item()  # 30 MB

    for said, array, ranks in pl.launch(add, ranks=2, args=[1.0, 2.0]):
        assert (said, ranks) == (3.0 + offset, 2.0)
        assert np.array_equal(array, np.arange(30 * 2**17, dtype=np.float64))
    assert pl.launch(sum_of_ranks, ranks=4) == [(rank, 6.0) for rank in range(4)]


def test_a_script_without_a_main_guard_saves_and_resumes_free_of_torch(tmp_path: Path) -> None:
    script = tmp_path / "no_guard.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import paralab as pl

        class Point:
            def __init__(self, x): self.x = x

        def make(x):
            import torch.distributed as dist
            return Point(x + dist.get_rank())

        print("once")
        points = pl.launch(make, ranks=2, args=(10,))
        assert [p.x for p in points] == [10, 11] and all(isinstance(p, Point) for p in points)
        model = pl.ModelSpec(layers=1, hidden=8, heads=1, seq_len=8)
        for resume in (None, "saved"):
            plan = pl.Plan(dp=2)
            pl.run(model, plan, steps=1, save="saved", resume=resume, progress=False)
        assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
        print("done")
        """)
    )
    run = python(script, cwd=tmp_path)
    assert (run.stdout, run.stderr) == ("once\ndone\n", "")
    assert {"step-00000001", "step-00000002"} <= set(os.listdir(tmp_path / "saved"))


def test_ranks_see_what_the_caller_sees_and_its_secrets_are_in_no_file(tmp_path, monkeypatch):
    """Its folder, environment and path, of a server that is older; and each draws its own numbers,
    in one thread. Ranks of one machine listen on no interface that another one could reach.
    """
    pl.warm_up()
    (tmp_path / "mine_alone.py").write_text("value = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_SECRET", secret := uuid.uuid4().hex)
    monkeypatch.syspath_prepend(tmp_path)

    def look() -> tuple:
        import mine_alone

        mine, files, found = os.environ["SOME_SECRET"], [], []
        for folder in Path(tempfile.gettempdir()).glob("paralab-*"):
            with contextlib.suppress(OSError):  # another launch's, which has just ended
                files += folder.iterdir()
        for file in files:
            with contextlib.suppress(OSError):
                found += [str(file)] * (mine.encode() in file.read_bytes())
        seen = os.getcwd(), mine, mine_alone.value, len(files) > 2, found, torch.get_num_threads()
        listens = {os.environ[f"{backend}_SOCKET_IFNAME"] for backend in ("GLOO", "NCCL")}
        return (*seen, listens), np.random.random(), random.random()

    (seen, *drawn), (also, *others) = pl.launch(look, ranks=2)
    loopback = "lo" if sys.platform == "linux" else "lo0"
    assert seen == also == (str(tmp_path), secret, 7, True, [], 1, {loopback})
    assert not set(drawn) & set(others)


def test_the_context_says_who_a_rank_is_and_tells_of_progress_in_the_launching_thread() -> None:
    def program(context, word: str) -> tuple:
        os.kill(0, signal.SIGINT)  # the whole group: it is for the notebook and not for its ranks
        context.store.set(f"said/{context.rank}", word)
        other = context.store.get(f"said/{1 - context.rank}").decode()
        for done in range(20_001):
            context.progress(done, 20_000)
        facts = context.rank, context.world_size, context.nodes
        return *facts, context.device, context.backend, context.strict, other

    calls: list[tuple] = []
    how = {"on_progress": lambda *call: calls.append((*call, threading.get_ident()))}
    found = launch_program(program, 2, ("hello",), device="cpu", strict=True, **how)
    assert found == [(r, 2, (0, 0), "cpu", "gloo", True, "hello") for r in range(2)]
    assert {call[3] for call in calls} == {threading.get_ident()}
    for rank in range(2):
        mine = [call[1] for call in calls if call[0] == rank]
        assert mine == sorted(mine) and mine[-1] == 20_000 and len(mine) < 500


def test_ranks_do_not_fault_pages_in_again_at_every_step() -> None:
    def faults() -> int:
        found: list[int] = []
        for _ in range(15):  # in ten the heap has found its shape
            found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
            kept = [torch.ones(2**20) for _ in range(8)]  # 4 MiB each, 1024 pages
            del kept
        return found[-1] - found[10]

    assert max(pl.launch(faults, ranks=1)) < 4_000  # of 32,768; a busy machine moves a tensor


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own")
def test_threads_that_receive_give_way_to_those_that_send() -> None:
    """Of every group. Else an all-reduce of four ranks on two cores takes twice as long."""

    def priorities() -> tuple[list[int], set[int]]:
        """Of the threads that receive, and of all others."""
        found: list[tuple[bool, int]] = []
        for task in Path("/proc/self/task").iterdir():
            receives = (task / "comm").read_text().strip() == RECEIVING
            found.append((receives, os.getpriority(os.PRIO_PROCESS, int(task.name))))
        return [n for receives, n in found if receives], {
            n for receives, n in found if not receives
        }

    def of_two_groups(context) -> list:
        one = priorities()
        everyone(context).subgroup([0, 1], axis="dp")
        return [one, priorities()]

    def of_a_group_of_its_own() -> tuple[list[int], set[int]]:
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
        return priorities()

    usual = {os.nice(0)}  # as the process that began them
    ours = launch_program(of_two_groups, 2, (), device="cpu")
    assert ours == [[([19], usual), ([19, 19], usual)]] * 2
    observed = pl.observe(of_a_group_of_its_own, ranks=2, memory_steps=0)
    assert observed.results == [([19, 19], usual)] * 2


# ---- output and progress ------------------------------------------------------------------------
def test_prints_arrive_tagged_in_rank_order_c_output_and_unfinished_lines_too(capsys) -> None:
    def talk() -> None:
        time.sleep(0.1 * (2 - dist.get_rank()))  # the last rank speaks first
        print("python")
        os.write(2, b"system\n")
        libc = ctypes.CDLL(None)
        # Fully buffered, as C does with a pipe unless PYTHONUNBUFFERED is set.
        sys.for_c = ctypes.create_string_buffer(4096)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, STDOUT), sys.for_c, 0, ctypes.c_size_t(4096))
        libc.printf(b"from C\n")
        sys.stderr.write("bar 10%\rbar 100%\n")
        sys.stdout.write("unfinished \u00fc")

    pl.launch(talk, ranks=3)
    words = ("python", "system", "bar 100%", "from C", "unfinished \u00fc")
    said = [f"[rank {rank}] {word}" for rank in range(3) for word in words]
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.parametrize("live", [False, True])
def test_only_live_output_comes_before_the_end_and_floods_the_notebook(capsys, live: bool) -> None:
    def program(context) -> None:
        print("early")
        time.sleep(0.2)
        context.progress(1, 1)
        for line in range(60_000):
            print(f"{line:06d} " + "x" * 92)

    seen: list[str] = []
    launch_program(
        program, 1, live=live, on_progress=lambda *_: seen.append(capsys.readouterr().out)
    )
    early = "[rank 0] early\n"
    assert seen[0].startswith(early) if live else seen == [""]
    out = "".join(seen) + capsys.readouterr().out
    assert out.startswith(f"{early}[rank 0] 000000 ") and "059999 xx" in out[-200:]
    assert (out.count("\n") == 60_001) == ("bytes left out" not in out) == live
    assert live or len(out) < 1_100_000


# ---- two at once --------------------------------------------------------------------------------
def test_a_launch_from_another_thread_waits_for_its_turn() -> None:
    def span() -> tuple[float, float]:
        start = time.monotonic()
        time.sleep(0.2)
        return start, time.monotonic()

    with ThreadPoolExecutor() as threads:
        found = sorted(threads.map(lambda _: pl.launch(span, ranks=1)[0], range(3)))
    assert all(a[1] <= b[0] for a, b in zip(found, found[1:], strict=False))


def test_a_launch_from_its_own_callback_or_from_a_rank_is_refused() -> None:
    def again(*_: int) -> None:
        pl.launch(sum_of_ranks, ranks=1)

    with pytest.raises(RuntimeError, match="in progress in this thread"):
        launch_program(lambda context: context.progress(1, 1), 1, on_progress=again)
    with pytest.raises(pl.RankError, match="ranks cannot launch ranks"):
        pl.launch(again, ranks=1)
    assert pl.launch(sum_of_ranks, ranks=1, timeout=2.0**70) == [(0, 0.0)]  # "never"


# ---- refusals -----------------------------------------------------------------------------------

LOCK = threading.Lock()


@pytest.mark.parametrize("settings, named", [
    ({"ranks": 65}, "ranks=65: out of range; legal: a whole number from 1 to 64"),
    ({"ranks": 2.0}, "ranks=2.0"),
    ({"args": 3}, r"args=3: .*legal: args=\(3,\)"),
    ({"args": "ab"}, "args='ab'"),
    ({"timeout": float("nan")}, "timeout=nan"),
    ({"device": "tpu"}, "device='tpu'.*'cuda'"),
    ({"stop": lambda: True}, r"stop=.*legal: None \| threading.Event\(\)"),
    ({"fn": 3}, "fn=3: cannot be called"),
    ({"fn": lambda rank: rank}, r"missing a required argument: 'rank'; legal: .*fn\(\*args\)"),
    ({"fn": lambda: LOCK}, "its global 'LOCK', a lock, cannot be sent"),
    ({"fn": (lambda guard: lambda: guard)(LOCK)}, "its variable 'guard', a lock"),
    ({"args": (1, threading.Lock())}, r"args\[1\], a lock, cannot be sent"),
])  # fmt: skip
def test_a_wrong_argument_is_refused_before_a_process_starts(monkeypatch, settings, named) -> None:
    monkeypatch.setattr(_SharedServer, "server", lambda self: pytest.fail("a process was started"))
    given = {"fn": sum_of_ranks, "ranks": 2, **settings}
    refuses(named, pl.launch, given.pop("fn"), **given)


def test_a_result_that_cannot_be_sent_back_says_so() -> None:
    words = "result cannot be sent back: cannot pickle '_thread.lock' object"
    with pytest.raises(pl.RankError, match=words) as caught:
        pl.launch(threading.Lock, ranks=2)
    assert caught.value.rank == 0
    with pytest.raises(pl.RankError, match="cannot pickle 'generator' object") as caught:
        pl.trace(lambda group: (rank for rank in group.ranks), ranks=1)
    assert "a dict" not in str(caught.value)  # which is around it


# ---- the server ---------------------------------------------------------------------------------
def test_the_users_own_multiprocessing_is_left_alone_and_a_fork_of_the_user_leaves_ours() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    pl.launch(sum_of_ranks, ranks=1)
    assert multiprocessing.get_start_method(allow_none=True) == before
    assert multiprocessing.forkserver._forkserver._forkserver_pid is None
    pid = os.fork()
    if pid == 0:
        os._exit(0 if LAUNCH._shared_server._server is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pl.launch(sum_of_ranks, ranks=2)[1] == (1, 1.0)


@forks
def test_ranks_are_born_with_every_preload_and_cuda_untouched_by_a_server_without_threads() -> None:
    """And they know the operators of a training, and nothing was drawn before them."""

    def look() -> tuple:
        missing = [name for name in WHEN_IDLE if name not in sys.modules]
        fresh = torch.rand(3, generator=torch.Generator().manual_seed(torch.initial_seed()))
        drawn = torch.equal(torch.rand(3), fresh)
        met = "aten::native_layer_norm_backward" in torch._library.simple_registry.singleton._data
        return missing, torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), drawn, met

    def all_there() -> bool:  # what is not essential loads while no launch runs
        [(missing, *facts)] = pl.launch(look, ranks=1)
        assert facts == [False, False, True, True]
        return not missing or bool(time.sleep(1.5))

    assert until(all_there), "never preloaded"
    assert psutil.Process(_shared_server._server.pid).num_threads() == 1


def test_what_the_server_loads_asks_nothing_of_cuda() -> None:
    """A driver that was asked does not survive a fork; a machine without a GPU does not say so."""
    asks = "is_available", "device_count", "_lazy_init", "current_device", "current_stream"
    printed(f"""if True:
        import importlib, torch
        def asked(*_, **__): raise AssertionError("the server asked CUDA")
        for name in {asks}: setattr(torch.cuda, name, asked)
        for name in {ESSENTIAL}: importlib.import_module(name)""")


@forks
def test_ranks_that_may_use_an_optimizer_are_born_with_its_imports_and_those_of_a_run_not(
    house,
) -> None:
    pl.run(pl.ModelSpec(layers=1, hidden=8, heads=1, seq_len=4), pl.Plan(), progress=False)
    server = house.server()
    assert ESSENTIAL in server._requested and TO_TRAIN not in server._requested

    def give_up() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.get_ready(give_up, to_train=True)
    has_compiler = launch_program(lambda context: "torch._dynamo" in sys.modules, ranks=2)
    assert has_compiler == [True, True]  # each would take 1.4 s, whatever was interrupted
    assert house.server() is server


def test_a_failing_import_is_shown_not_hidden(tmp_path: Path, monkeypatch, house) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libwheel.so is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):  # the next call tries again
        with pytest.raises(pl.RankError, match="(?s)ranks cannot start.*libwheel.so is missing"):
            pl.launch(sum_of_ranks, ranks=2)
    said = python("-m", "paralab", "observe", __file__, path=[tmp_path]).stderr
    assert said.startswith("paralab: ranks cannot start") and "paralab/cli.py" not in said


def say_pid_and_wait(context) -> None:
    context.progress(os.getpid(), 2**62)
    threading.Event().wait()


def test_a_server_that_died_takes_its_ranks_along_and_is_replaced(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pl.warm_up()
    pl.warm_up()
    before = _shared_server._server.pid
    died: list[bool] = []

    def kill_server(rank: int, pid: int, _: int) -> None:
        if not died:
            os.kill(before, 9)
            died.append(until(lambda: not is_alive(pid)))  # the launcher still holds its pipe

    with pytest.raises(pl.RankError, match="The next call starts a new one"):
        launch_program(say_pid_and_wait, 2, on_progress=kill_server)
    assert died == [True] and list(tmp_path.iterdir()) == []
    assert pl.launch(sum_of_ranks, ranks=2)[1] == (1, 1.0)
    assert _shared_server._server.pid != before


def test_a_rank_ends_by_itself_when_its_launcher_closes_the_pipe(monkeypatch) -> None:
    runs: list[Run] = []
    monkeypatch.setattr(LAUNCH, "Run", lambda *a, **k: runs.append(Run(*a, **k)) or runs[-1])

    def close_pipe(rank: int, pid: int, _: int) -> None:
        runs[0].ranks[0].control.close()
        raise ZeroDivisionError("died" if until(lambda: not is_alive(pid)) else "lives on")

    with pytest.raises(ZeroDivisionError, match="died"):
        launch_program(say_pid_and_wait, 1, on_progress=close_pipe)
    assert below_the_server() == []


def test_a_rank_is_killed_with_its_process_group() -> None:
    how = {"stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], **how) as group:
        child = int(group.stdout.readline())
        kill(group.pid)
    assert until(lambda: not is_alive(child))


def test_what_a_rank_started_ends_with_it() -> None:
    def start() -> list[int]:
        # With fork, an orphan in a session of its own too: paralab/ranks/server.py, [Note: ends].
        started = ["sleep 600"] + ["setsid sleep 600"] * (start_method() == "fork")
        commands = [f"{each} >/dev/null 2>&1 & echo $!" for each in started]
        return [int(subprocess.check_output(["sh", "-c", command])) for command in commands]

    [pids] = pl.launch(start, ranks=1)
    assert until(lambda: not any(map(is_alive, pids))) and below_the_server() == []


def test_the_start_method_is_the_systems_unless_the_environment_asks(monkeypatch, house) -> None:
    monkeypatch.delenv(START, raising=False)
    with monkeypatch.context() as patch:
        for system, usual in (("linux", "fork"), ("darwin", "spawn"), ("freebsd14", "spawn")):
            patch.setattr(sys, "platform", system)
            assert start_method() == usual
    monkeypatch.setenv(START, "spoon")
    refuses("PARALAB_START='spoon': .*legal: 'fork' | 'spawn'", pl.launch, sum_of_ranks, ranks=1)


@pytest.mark.parametrize("there, said", [
    ("os.name, sys.modules['fcntl'] = 'nt', None", "WSL 2, where everything works"),
    ("sys.version_info = (3, 10, 13)", "it needs Python 3.11 or newer, and the"),
    ("sys.modules['cloudpickle'] = None", "`make lab` there sets up"),
])  # fmt: skip
def test_what_cannot_run_it_is_told_what_can(there: str, said: str) -> None:
    """Where the import itself would fail, at the first module that is missing there."""
    code = f"import os, sys\n{there}\nimport paralab"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said in done.stderr.strip().splitlines()[-1]


# ---- who waits for whom -------------------------------------------------------------------------
@pytest.mark.parametrize("said, standings", [  # others in test_launch_failures.py
    ("rank 0 waits in recv #1 for its peer; rank 1 waits in recv #1 for rank 2",
     [Standing(0, "", "recv #1", (0, 1)), Standing(1, "", "recv #1", (1, 2)), Standing(2, "")]),
    ("rank 0 waits in barrier for rank 1 (rank 1 already returned)",
     [Standing(0, "", "barrier", (0, 1)), Standing(1, "", finished=True)]),
    ("ranks 0, 1 wait in broadcast for one another; do their calls and sizes agree?",
     [Standing(r, "", "broadcast", (0, 1)) for r in range(2)]),
    ("no rank waits for another; ranks 0-7 are busy", [Standing(r, "") for r in range(8)]),
    ("rank 0 waits in barrier for rank 1",
     [Standing(0, "", "barrier", (0, 1)), Standing(1, "", nccl=True)]),
])  # fmt: skip
def test_the_sentence_names_who_waits_for_whom(standings: list[Standing], said: str) -> None:
    assert sentence(standings) == said
