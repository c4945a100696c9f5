"""What `pl.launch` promises when something goes wrong: one clear error, nothing left behind, and
the next call works. What could depend on the moment is done ROUNDS times in a row.

A rank that is to hang is blocked in a wait without an end. How soon an error comes is claimed in
benchmarks/claims.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jupyter_client.manager import KernelManager

import paralab as pl
from paralab.launch import launch_program
from paralab.ranks import watch
from paralab.ranks.errors import OutOfMemory
from paralab.ranks.server import RankServer, start_method
from patience import HANG_S
from processes import below_the_server, marked, python, until

ROUNDS = 2
HERE = Path(__file__).parent
SPAWNS = start_method() == "spawn"
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks import no tests


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that no other process uses. After the test the next call works,
    and nothing is left behind.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert nothing_left()
    assert pl.launch(total, ranks=2) == [2.0, 2.0]


def nothing_left() -> bool:
    folders = list(Path(tempfile.gettempdir()).glob("paralab-*"))
    return (below_the_server(), folders) == ([], [])


def total(_: object = None) -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()


def block() -> None:
    """Wait without an end."""
    import select

    select.select([], [], [])


@contextlib.contextmanager
def one_clear_error(kind: type[Exception]) -> Iterator[pytest.ExceptionInfo]:
    """The block fails with ``kind`` and leaves nothing behind."""
    with pytest.raises(kind) as caught:
        yield caught
    assert nothing_left()


# ---- a rank that fails --------------------------------------------------------------------------
class Stubborn(Exception):
    def __init__(self, a: str, b: str) -> None:  # does not unpickle: pickle gives one argument
        super().__init__(f"{a} and {b}")


def raises() -> None:
    print("so far so good")
    if dist.get_rank() == 2:
        raise Stubborn("one", "two")  # the line to show
    total()


def test_a_rank_that_raises_is_named_with_its_traceback_after_what_ranks_printed(capsys) -> None:
    with one_clear_error(pl.RankError) as caught:
        pl.launch(raises, ranks=4)
    assert caught.value.rank == 2
    said = str(caught.value)
    assert said.startswith("rank 2 raised Stubborn: one and two\n\nTraceback (most recent")
    assert 'raise Stubborn("one", "two")  # the line to show' in said
    assert "ranks/process.py" not in said and caught.value.traceback in said
    assert capsys.readouterr().out == "".join(f"[rank {r}] so far so good\n" for r in range(4))


def loses_its_peers(_: str) -> None:
    """Rank 3 leaves: its peers complain at once, it itself a little later."""
    if dist.get_rank() == 3:
        dist.destroy_process_group()
        time.sleep(0.1)
        raise KeyError("the cause")
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            raise ValueError("my step failed") from error
    dist.all_reduce(torch.ones(1))


def fail_in_turn(said: str, later: float) -> Callable[[str], None]:
    """Two ranks fail by themselves, rank 1 first."""

    def fail(failing: str) -> None:
        if dist.get_rank() == 1:
            Path(failing).touch()
        while not Path(failing).exists():
            time.sleep(0.001)
        if dist.get_rank() == 0:  # no sleep of 0 s for rank 1, which would let rank 0 overtake it
            time.sleep(later)
        raise ValueError(said.format(dist.get_rank()))

    return fail


@pytest.mark.parametrize("ranks, fail, named", [
    (4, loses_its_peers, "rank 3 raised KeyError: 'the cause'"),
    (2, fail_in_turn("rank {} as well", 0.06), "rank 1 raised ValueError"),
    # One mistake that both make: the lowest, wherever the objects in its words are.
    (2, fail_in_turn("<Block object at 0x7f{}>", 0.0), "rank 0 raised ValueError"),
])  # fmt: skip
def test_the_rank_that_failed_first_is_named_not_the_one_that_lost_its_peer(
    ranks: int, fail: Callable, named: str, temporary: Path
) -> None:
    for index in range(ROUNDS):
        with one_clear_error(pl.RankError) as caught:
            pl.launch(fail, ranks=ranks, args=(str(temporary / f"failing-{index}"),))
        assert str(caught.value).startswith(named) and f"rank {caught.value.rank} " in named


def test_kill_9_of_a_rank_names_the_rank_and_the_signal() -> None:
    def program(context) -> None:
        if context.rank == 1:
            context.progress(os.getpid(), 2**62)
            block()
        total()

    for _ in range(ROUNDS):
        with one_clear_error(pl.RankError) as caught:
            launch_program(program, 3, on_progress=lambda rank, pid, _: os.kill(pid, 9))
        assert caught.value.rank == 1
        assert str(caught.value).startswith("rank 1 was killed by signal 9 (SIGKILL)")
        assert "out-of-memory killer" in str(caught.value)
        assert "container's share" in str(caught.value)


def dies() -> None:
    os.kill(os.getpid(), 9)


def dies_with_its_pipes_open() -> None:
    """As on a busy machine, where the kernel may close the connections much earlier."""
    if os.fork() == 0:
        os.setpgid(0, 0)
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # no socket
                if (found := socket.socket(fileno=fd)).family != socket.AF_UNIX:
                    found.close()
                else:
                    pipe = found
        pipe.recv(1)  # until the launch has ended
        os._exit(0)
    dies()


def dies_after_its_connections() -> None:
    dist.destroy_process_group()
    time.sleep(0.1)
    dies()


@pytest.mark.parametrize("die, busy", [
    (dies, False), (dies_after_its_connections, True),
    pytest.param(dies_with_its_pipes_open, False, marks=pytest.mark.skipif(
        sys.platform != "linux", reason="other systems do not show that a process is ending")),
])  # fmt: skip
def test_a_death_that_is_told_late_is_named_before_what_it_made_others_raise(
    die, busy: bool, monkeypatch
) -> None:
    """Late by the kernel, by the server, or as the launching process itself does not run."""

    def program(context) -> None:
        if context.rank == 1:
            die()
        total()

    def late(server) -> dict[int, int]:
        tell_at.append(time.monotonic() + 4 * watch.GRACE_SECONDS)
        if time.monotonic() < tell_at[0]:
            time.sleep(0.02)
            return {}
        return deaths(server)

    def note_and_do_not_run(run, failure) -> None:
        note(run, failure)
        time.sleep(2 * watch.GRACE_SECONDS)

    tell_at: list[float] = []
    deaths, note = RankServer.deaths, watch.Run._failed
    monkeypatch.setattr(RankServer, "deaths", late)
    if busy:
        monkeypatch.setattr(watch.Run, "_failed", note_and_do_not_run)
    with pytest.raises(pl.RankError, match="rank 1 was killed by signal 9"):
        launch_program(program, 3)


def test_a_rank_that_leaves_says_with_which_code_and_one_that_says_too_much_is_cut() -> None:
    def giant(end: str) -> None:
        raise ValueError("begins " + ("x" * 1000 + end) * 20_000 + " ends")

    for leave, said in ((os._exit, "ended with exit code 3"), (sys.exit, r"called sys.exit\(3\)")):
        with pytest.raises(pl.RankError, match=f"rank 0 {said}"):
            pl.launch(leave, ranks=1, args=(3,))
    for end in ("", "\n"):
        with one_clear_error(pl.RankError) as caught:
            pl.launch(giant, ranks=1, args=(end,))
        said = str(caught.value)
        assert said.startswith("rank 0 raised ValueError: begins xxx") and said.endswith(" ends")
        assert re.search(r" \.\.\. \d{8} characters left out \.\.\. ", said)
        assert len(caught.value.traceback) < 50_000 and len(said) < 100_000


# ---- a rank that hangs --------------------------------------------------------------------------
def hangs(context) -> None:
    dist.barrier()
    if context.rank == 2:
        block()
    dist.all_reduce(torch.ones(1))


def never_meet(context) -> None:
    dist.barrier()
    if context.rank == 0:
        dist.recv(torch.ones(1), src=1)
    elif context.rank in (1, 3):
        context.note("all_reduce #17 on axis dp, ranks 0,1,3, step 2")
        block()


@pytest.mark.parametrize("program", [hangs, never_meet])
def test_a_hang_says_who_waits_for_whom_and_where_each_rank_is(program) -> None:
    with one_clear_error(pl.RankTimeout) as caught:
        launch_program(program, 4, timeout=2.0)
    first, *lines = str(caught.value).splitlines()
    waiting = caught.value.waiting
    if program is never_meet:
        said = "rank 0 waits in recv for its peer; ranks 1, 3 wait in all_reduce #17 for rank 0"
        assert first.endswith(said)
        assert waiting[1].startswith("in all_reduce #17 on axis dp, ranks 0,1,3, step 2, line")
        assert lines[2] == "  rank 2: has returned its result"
    else:
        assert first == "no sign of life for 2 s: ranks 0, 1, 3 wait in all_reduce for rank 2"
        assert re.search(r"line \d+ of \S+\.py in block: select\.select\(\[\]", waiting[2])
        assert re.search(r"^in all_reduce, line \d+ of .*: dist\.all_reduce\(torch", waiting[0])
    assert lines[:4] == [f"  rank {r}: {waiting.get(r, lines[r][10:])}" for r in range(4)]


def test_output_progress_and_finished_calls_are_signs_of_life() -> None:
    """One kind after the other, each for longer than the limit and the time between two looks at
    notes, of which the first is from before; those of the program come last.
    """

    def program(context) -> None:
        signs = (
            print,
            lambda step: context.progress(step, 13),
            lambda step: context.note(f"#{step}"),
        )
        for sign in signs:
            for step in range(13):
                time.sleep(0.2)
                sign(step)

    launch_program(program, 1, timeout=2.0)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def crowded() -> None:
    """Faulthandler writes the stacks of the 100 youngest threads, so not the main thread's."""
    for _ in range(100):
        threading.Thread(target=block, daemon=True).start()
    block()


@pytest.mark.parametrize("hang, stack_seconds, words", [
    (block, watch.STACK_SECONDS, ["no rank waits for another; rank 0 is busy"]),
    # waited for to the end
    (stopped, 0.1, ["rank 0 does not answer\n", "rank 0: does not answer: it is stopped"]),
    (crowded, watch.STACK_SECONDS, ["rank 0 does not answer\n", "more than 100 Python threads"]),
])  # fmt: skip
def test_a_rank_that_waits_for_no_other_is_busy_or_does_not_answer(
    hang, stack_seconds: float, words: list[str], monkeypatch
) -> None:
    monkeypatch.setattr(watch, "STACK_SECONDS", stack_seconds)
    with one_clear_error(pl.RankTimeout) as caught:
        pl.launch(hang, ranks=1, timeout=0.5)
    assert [said for said in words if said not in str(caught.value)] == [], caught.value


def test_a_rank_whose_calls_run_on_its_gpu_may_wait_for_it(monkeypatch) -> None:
    """Over NCCL a host is not in the call that hangs, but where it needs the result."""
    receive = watch.Run._receive

    def receive_nccl_too(run, rank) -> None:
        receive(run, rank)
        with mock.patch.object(rank, "control", SimpleNamespace(recv=lambda: ("up", True))):
            receive(run, rank)

    monkeypatch.setattr(watch.Run, "_receive", receive_nccl_too)
    with one_clear_error(pl.RankTimeout) as caught:
        pl.launch(block, ranks=2, timeout=0.5)
    said = "ranks 0, 1 may wait for their GPUs, where a call of NCCL may hang; their hosts wait in "
    assert f"{said}no call" in str(caught.value)


def test_a_limit_that_ends_before_the_ranks_have_started_is_a_timeout(monkeypatch) -> None:
    """The time that they take to start is no silence, for a while: START_SECONDS."""
    with one_clear_error(pl.RankTimeout) as caught:
        pl.launch(block, ranks=2, timeout=1e-4)
    assert "is starting" not in str(caught.value)
    monkeypatch.setattr(watch, "START_SECONDS", 0.0)
    for limit in (1e-4, 0.01):
        with one_clear_error(pl.RankTimeout) as caught:
            pl.launch(block, ranks=4, timeout=limit)
        assert str(caught.value).count("\n  rank ") == 4 == len(caught.value.waiting)


# ---- memory, forks and a full folder ------------------------------------------------------------
def creeps_up() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
    kept = []
    while True:
        kept.append(bytearray(2**24))


@pytest.mark.parametrize("ask, said", [
    (lambda: torch.empty(2**45), "it asked for 134,217,728.0 MiB"),
    (lambda: np.empty((2**20, 2**22)), "32.0 TiB"), (creeps_up, "\n"),
])  # fmt: skip
def test_an_allocation_that_fails_is_out_of_memory_and_names_what_was_asked_for(ask, said) -> None:
    if ask is creeps_up and sys.platform != "linux":
        pytest.skip("RLIMIT_AS holds on Linux alone")

    def only_on_rank_1() -> None:
        if dist.get_rank() == 1:
            ask()
        total()

    with one_clear_error(OutOfMemory) as caught:
        pl.launch(only_on_rank_1, ranks=2)
    assert caught.value.rank == 1 and caught.value.table == ""
    first = str(caught.value).splitlines(keepends=True)[0]
    assert first.startswith("rank 1 ran out of memory") and said in first
    assert ask.__name__ in caught.value.traceback


def test_a_cap_that_a_rank_enforces_brings_its_table_along() -> None:
    def capped() -> None:
        raise OutOfMemory("12 MB over the limit", table="activations 100 MB")

    with one_clear_error(OutOfMemory) as caught:
        pl.launch(capped, ranks=1)
    caught.value.explain("another")
    assert caught.value.table == "activations 100 MB"
    assert "12 MB over the limit\n\nactivations 100 MB\n\nTraceback" in str(caught.value)
    plain = OutOfMemory("rank 0 ran out of memory")
    plain.explain("weights 3 GB")
    assert str(plain) == f"rank 0 ran out of memory\n\n{plain.table}"
    assert plain.table == "weights 3 GB"


WAYS_TO_END = {"returns": 0, "raises": 1, "exits, 7": 7, "exits, None": 0, "exits, words": 1}


def test_of_a_rank_that_forks_the_parent_alone_is_heard(capsys) -> None:
    def forks(context) -> object:
        found = {}
        for number, how in enumerate(WAYS_TO_END):
            pid = os.fork()
            context.progress(number if pid else 99, 99)
            if pid:
                found[how] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                continue
            print("printed by the child that", how)
            if how == "raises":
                raise KeyError("the child")
            return how == "returns" or sys.exit({"7": 7, "words": "words"}.get(how[7:]))
        return found

    told = []
    found = launch_program(forks, 2, on_progress=lambda *said: told.append(said))
    assert found == [WAYS_TO_END] * 2
    assert {done for _, done, _ in told} <= {*range(5)} and {rank for rank, *_ in told} == {0, 1}
    said = capsys.readouterr().out
    assert [said.count(f"printed by the child that {how}\n") for how in WAYS_TO_END] == [2] * 5
    assert said.count("KeyError: 'the child'") == 2


def test_a_full_folder_for_temporary_files_is_named_with_what_would_help(temporary, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match=f"No space left.*make room.*TMPDIR.*{temporary}"):
            pl.launch(total, ranks=2)
    assert nothing_left()


NO_SECOND_FORK = """
import os

def fork(real=os.fork, ranks=[]):
    ranks.append(1)
    if len(ranks) > 1:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return real()

os.fork = fork
"""


def test_a_limit_of_processes_is_named_for_a_rank_and_for_a_thread_of_one(tmp_path) -> None:
    def thread() -> None:
        raise RuntimeError("Resource temporarily unavailable")  # as C++ says it

    (tmp_path / "sitecustomize.py").write_text(NO_SECOND_FORK)
    asked = "import paralab as pl; pl.launch(abs, 2, (1,))"
    said = python("-c", asked, path=[tmp_path]).stderr.splitlines()[-1]
    assert re.search("RankError: rank 1 cannot start: Resource temporarily .*ulimit -u", said)
    with one_clear_error(pl.RankError) as caught:
        pl.launch(thread, ranks=1)
    assert re.search("rank 0 raised RuntimeError: Resource .*ulimit -u", str(caught.value))


def test_a_program_without_standard_streams_launches_ranks() -> None:
    """A daemon; otherwise the server's socket had the number of a stream, and was closed."""
    asked = "import os; os.closerange(0, 2); import paralab as pl; "
    asked += "os.write(2, repr(pl.launch(abs, 1, (-3,))).encode())"
    assert python("-c", asked).stderr == "[3]"


# ---- the kernel ---------------------------------------------------------------------------------
CELLS = """
import select
import psutil
import paralab as pl
from paralab.launch import _shared_server

def hang():
    import torch, torch.distributed as dist
    print("up")
    if dist.get_rank() == 0:
        select.select([], [], [])
    dist.all_reduce(torch.ones(1))

def rank():
    import torch.distributed as dist
    return dist.get_rank()

def left():
    return psutil.Process(_shared_server._server.pid).children()
"""


@pytest.fixture(scope="module")
def cell() -> Iterator[Callable[..., tuple[str, str, str]]]:
    """Executes a cell in a real Jupyter kernel, and says what it printed and its error's name and
    text; ``interrupt``: once it prints.
    """
    env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    own = {"env": env, "extra_arguments": ["--HistoryManager.enabled=False"]}
    manager = KernelManager(transport="ipc")  # files, as a free port may be another's by then
    manager.start_kernel(**own)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=HANG_S)

    def executed(code: str, interrupt: bool = False) -> tuple[str, str, str]:
        shown, error = [], ["", ""]

        def hook(message: dict) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                if interrupt and not shown:  # what is printed comes in pieces
                    manager.interrupt_kernel()
                shown.append(content["text"])
            elif message["msg_type"] == "error":
                error[:] = content["ename"], content["evalue"]

        client.execute_interactive(code, output_hook=hook, timeout=HANG_S)
        return "".join(shown), *error

    try:
        assert executed(CELLS) == ("", "", "")
        yield executed
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_an_interrupted_kernel_is_free_again_and_says_in_which_line_the_rank_was(cell) -> None:
    told = []
    for ranks in (3, 1, 1, 1):  # a machine that is busy may not tell in the time that there is
        _, error, said = cell(f"pl.launch(hang, ranks={ranks}, live=True)", interrupt=True)
        assert error == "KeyboardInterrupt" and said.startswith("interrupted")
        assert cell("print(left(), pl.launch(rank, ranks=2))") == ("[] [0, 1]\n", "", "")
        told.append(said)
    # It may come while what tells of the rank is still being printed, or right behind it.
    line = r"(in \w+, )?line (8|9|10) of Cell In\[\d+\] in hang: .+"
    assert any(re.fullmatch(rf"interrupted; rank 0: {line}", said) for said in told)


def test_in_a_notebook_the_cell_and_its_line_are_named(cell) -> None:
    cell("def divide(x):\n    print('dividing')\n    return 1 / x  # here")
    shown, error, said = cell("pl.launch(divide, ranks=1, args=(0,))")
    assert (shown, error) == ("[rank 0] dividing\n", "RankError")
    assert re.search(r"\n  Cell In\[\d+\], line 3, in divide\n    return 1 / x  # here\n", said)
    _, error, said = cell("pl.launch(hang, ranks=2, timeout=1)")
    assert error == "RankTimeout" and ": rank 1 waits in all_reduce for rank 0\n" in said
    assert re.search(
        r"rank 0: line 10 of Cell In\[\d+\] in hang: select.select\(\[\], \[\], \[\]\)\n", said
    )


VICTIM = """
import subprocess, sys, threading
import paralab as pl
from paralab.launch import launch_program

def wait_for_one_another(context):
    import torch, torch.distributed as dist
    if context.rank == 0:
        subprocess.Popen(["sleep", "600"])
        context.progress(1, 1)
        threading.Event().wait()
    dist.all_reduce(torch.ones(1))

if sys.argv[1] == "loading":  # the server still loads torch
    pl.warm_up()
    print("ready", flush=True)
launch_program(wait_for_one_another, 3, on_progress=lambda *_: print("ready", flush=True))
"""


@pytest.mark.parametrize("moment", ["loading", "waiting"])
def test_nothing_survives_a_kernel_that_is_killed(temporary: Path, moment: str) -> None:
    path, loads = str(HERE.parent), temporary / "loads"
    if moment == "loading":
        if SPAWNS:
            pytest.skip("a server that spawns loads nothing")
        endless = f"open({str(loads)!r}, 'w'); import threading; threading.Event().wait()"
        (temporary / "torch.py").write_text(endless)
        path = f"{temporary}:{path}"
    mark = f"paralab-test-{uuid.uuid4()}"
    env = {**os.environ, "PYTHONPATH": path, "MARK": mark, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", VICTIM, moment]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as victim:
        assert victim.stdout.readline() == b"ready\n"
        # torch loads, or itself, the server and 3 ranks: what a rank started is looked for below.
        assert until(loads.exists if moment == "loading" else lambda: len(marked(mark)) >= 5)
        victim.kill()
    assert until(lambda: not marked(mark))
    assert nothing_left()
