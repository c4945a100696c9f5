"""What `pl.launch` promises when something goes wrong, each 20 times in a row.

One clear error, nothing left behind, and the next call works. How soon the error comes is claimed
in benchmarks/claims.py.
"""

from __future__ import annotations

import linecache
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from jupyter_client.manager import KernelManager

import paralab as pl
from paralab.launch import _house, launch_program
from paralab.ranks.errors import OutOfMemory

ROUNDS = 20
PATIENCE = 60.0  # seconds, against a hang
HERE = Path(__file__).parent


def living(mark: str) -> list[str]:
    """Processes whose environment holds ``mark``: all that a marked process started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            alive = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
            if alive and mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
        except OSError:
            continue
    return found


def ranks_alive() -> list[str]:
    """Children of the server: ranks, and what they left behind."""
    if _house._server is None or not _house._server.alive():
        return []
    pid = _house._server.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that no other process uses.

    The server that ranks are forked from is up: that it imports torch is no answer to an error.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pl.launch(total, ranks=2)
    return tmp_path


def folders_left() -> list[str]:
    return [str(path) for path in Path(tempfile.gettempdir()).glob("paralab-*")]


def total(_: object = None) -> float:
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()


@contextmanager
def one_clear_error(kind: type[Exception]) -> Iterator[pytest.ExceptionInfo]:
    """The block fails with ``kind``, leaves nothing behind, and the next call works."""
    with pytest.raises(kind) as caught:
        yield caught
    assert ranks_alive() == [] and folders_left() == []
    assert pl.launch(total, ranks=2) == [2.0, 2.0]


def in_a_cell(source: str, name: str) -> Callable:
    """Define a function the way IPython does: its source is in linecache, not in a file."""
    file = f"/tmp/ipykernel_1/{uuid.uuid4().int}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), scope)
    return scope[name]


RAISES = """
import torch, torch.distributed as dist

class Stubborn(Exception):
    def __init__(self, a, b):  # does not unpickle: pickle calls it with one argument
        super().__init__(f"{a} and {b}")

def fail():
    if dist.get_rank() == 2:
        raise Stubborn("one", "two")  # the line to show
    dist.all_reduce(torch.ones(1))
"""


def test_a_rank_that_raises_is_named_with_its_traceback_and_the_cells_line() -> None:
    fail = in_a_cell(RAISES, "fail")
    for _ in range(ROUNDS):
        with one_clear_error(pl.RankError) as caught:
            pl.launch(fail, ranks=4)
        assert caught.value.rank == 2
        said = str(caught.value)
        assert said.startswith("rank 2 raised Stubborn: one and two\n\nTraceback (most recent")
        assert 'raise Stubborn("one", "two")  # the line to show' in said
        assert "ranks/process.py" not in said and caught.value.traceback in said


def test_the_rank_that_failed_first_is_named_not_the_one_that_lost_its_peer(capsys) -> None:
    def fail() -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 3:
            dist.destroy_process_group()  # its peers complain at once, it itself a little later
            time.sleep(0.1)
            raise KeyError("the cause")
        if dist.get_rank() == 0:
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError as error:
                raise ValueError("my step failed") from error
        dist.all_reduce(torch.ones(1))

    for _ in range(5):
        with one_clear_error(pl.RankError) as caught:
            pl.launch(fail, ranks=4)
        assert str(caught.value).startswith("rank 3 raised KeyError: 'the cause'")


@pytest.mark.parametrize(
    "said, later, named", [("rank {} as well", 0.06, 1), ("<Block object at 0x7f{}>", 0.0, 0)]
)
def test_of_two_ranks_that_fail_by_themselves_the_earlier_is_named(
    said, later, named, temporary
) -> None:
    """Of one mistake that both make the lowest, wherever the objects in its words are."""

    def fail(failing: str) -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            Path(failing).touch()
        else:
            while not Path(failing).exists():
                time.sleep(0.001)
            time.sleep(later)
        raise ValueError(said.format(dist.get_rank()))

    with one_clear_error(pl.RankError) as caught:
        pl.launch(fail, ranks=2, args=(str(temporary / "failing"),))
    assert caught.value.rank == named


def test_what_ranks_printed_is_shown_before_their_error(capsys) -> None:
    def fail() -> None:
        print("so far so good")
        raise ValueError

    with one_clear_error(pl.RankError) as caught:
        pl.launch(fail, ranks=1)
    assert capsys.readouterr().out == "[rank 0] so far so good\n"
    assert str(caught.value).startswith("rank 0 raised ValueError\n")


def test_kill_9_of_a_rank_names_the_rank_and_the_signal() -> None:
    def program(context) -> None:
        import torch
        import torch.distributed as dist

        dist.barrier()
        if context.rank == 1:
            context.progress(os.getpid(), 2**62)
            time.sleep(60)
        dist.all_reduce(torch.ones(1))

    for _ in range(ROUNDS):
        with one_clear_error(pl.RankError) as caught:
            launch_program(program, 3, on_progress=lambda rank, pid, _: os.kill(pid, 9))
        assert caught.value.rank == 1
        assert str(caught.value).startswith("rank 1 was killed by signal 9 (SIGKILL)")
        assert "out-of-memory killer" in str(caught.value)


def test_a_rank_that_leaves_says_with_which_code() -> None:
    for leave, said in ((os._exit, "ended with exit code 3"), (sys.exit, r"called sys.exit\(3\)")):
        with pytest.raises(pl.RankError, match=f"rank 0 {said}"):
            pl.launch(leave, ranks=1, args=(3,))


SLEEPS = """
import time, torch, torch.distributed as dist

def sleeps(context):
    dist.barrier()
    if dist.get_rank() == 2:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))
"""


def never_meet(context) -> None:
    import torch
    import torch.distributed as dist

    dist.barrier()
    if context.rank == 0:
        dist.recv(torch.ones(1), src=1)
    elif context.rank in (1, 3):
        context.note("all_reduce #17 on axis dp, ranks 0,1,3, step 2")
        time.sleep(60)


def test_a_hang_says_who_waits_for_whom_and_where_each_rank_stands() -> None:
    sleeps = in_a_cell(SLEEPS, "sleeps")
    for index in range(4):  # each until its limit: ten times what it takes to stand there
        program = never_meet if index % 2 else sleeps
        with one_clear_error(pl.RankTimeout) as caught:
            launch_program(program, 4, timeout=5.0)
        first, *lines = str(caught.value).splitlines()
        waiting = caught.value.waiting
        if program is sleeps:
            assert first == "no sign of life for 5 s: ranks 0, 1, 3 wait in all_reduce for rank 2"
            assert re.search(r"^line 7 of \d+\.py in sleeps: time\.sleep\(1000\)$", waiting[2])
            assert re.search(r"^in all_reduce, line 8 of .*: dist\.all_reduce\(torch", waiting[0])
        else:
            said = "rank 0 waits in recv for its peer; ranks 1, 3 wait in all_reduce #17 for rank 0"
            assert first.endswith(said)
            assert waiting[1].startswith("in all_reduce #17 on axis dp, ranks 0,1,3, step 2, line")
            assert lines[2] == "  rank 2: has returned its result"
        assert lines[:4] == [f"  rank {r}: {waiting.get(r, lines[r][10:])}" for r in range(4)]


def test_output_progress_and_finished_calls_are_signs_of_life() -> None:
    def program(context, sign: str) -> None:
        for step in range(8):
            time.sleep(1.0)
            if sign == "print":
                print(step)
            elif sign == "note":
                context.note(f"all_reduce #{step}")
            else:
                context.progress(step, 8)

    for sign in ("print", "note", "progress"):
        launch_program(program, 1, (sign,), timeout=5.0)
    with pytest.raises(pl.RankTimeout, match="no rank waits for another, rank 0 is busy"):
        pl.launch(time.sleep, ranks=1, args=(1000,), timeout=1.0)


def test_a_stopped_rank_is_reported_as_not_answering() -> None:
    def stop() -> None:
        import signal

        os.kill(os.getpid(), signal.SIGSTOP)

    with one_clear_error(pl.RankTimeout) as caught:
        pl.launch(stop, ranks=1, timeout=0.5)
    assert "rank 0: does not answer: stopped" in str(caught.value)


def test_an_allocation_that_fails_is_out_of_memory_and_names_what_was_asked_for() -> None:
    def torch_asks(_: object) -> None:
        import torch

        torch.empty(2**45)

    def numpy_asks(_: object) -> None:
        np.empty((2**20, 2**22))

    def creeps_up(_: object) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
        kept = []
        while True:
            kept.append(bytearray(2**24))

    def only_on_rank_1(ask: Callable) -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            ask(None)
        total()

    said = {torch_asks: "it asked for 128.0 TiB", numpy_asks: "32.0 TiB", creeps_up: "\n"}
    for index in range(ROUNDS):
        ask = [torch_asks, numpy_asks, creeps_up][index % 3]
        with one_clear_error(OutOfMemory) as caught:
            pl.launch(only_on_rank_1, ranks=2, args=(ask,))
        assert caught.value.rank == 1 and caught.value.table == ""
        first = str(caught.value).splitlines(keepends=True)[0]
        assert first.startswith("rank 1 ran out of memory") and said[ask] in first
        assert ask.__name__ in caught.value.traceback


def test_a_cap_that_a_rank_enforces_brings_its_table_along() -> None:
    def capped() -> None:
        raise OutOfMemory("12 MB over the limit", table="activations 100 MB")

    with one_clear_error(OutOfMemory) as caught:
        pl.launch(capped, ranks=1)
    assert caught.value.table == "activations 100 MB"
    assert "12 MB over the limit\n\nactivations 100 MB\n\nTraceback" in str(caught.value)
    caught.value.explain("another")
    assert caught.value.table == "activations 100 MB"
    plain = OutOfMemory("rank 0 ran out of memory")
    plain.explain("weights 3 GB")
    assert (
        str(plain) == "rank 0 ran out of memory\n\nweights 3 GB" and plain.table == "weights 3 GB"
    )


# ---- the kernel ---------------------------------------------------------------------------------

CELLS = """
import time
import paralab as pl
from paralab.launch import _house

def hang():
    import torch, torch.distributed as dist
    print("up")
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))

def rank():
    import torch.distributed as dist
    return dist.get_rank()

def left():
    pid = _house._server.pid
    return open(f"/proc/{pid}/task/{pid}/children").read().split()
"""


class Kernel:
    """A real Jupyter kernel."""

    def __init__(self) -> None:
        self.manager = KernelManager()
        env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        self.manager.start_kernel(env=env, extra_arguments=["--HistoryManager.enabled=False"])
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str, on_print: Callable[[], None] = lambda: None) -> tuple[str, str, str]:
        """Execute a cell: what it printed, and its error's name and text."""
        message, shown, error = self.client.execute(code), "", ("", "")
        while True:
            got = self.client.get_iopub_msg(timeout=60)
            if got["parent_header"].get("msg_id") != message:
                continue
            kind, content = got["msg_type"], got["content"]
            if kind == "stream":
                shown += content["text"]
                on_print()
            elif kind == "error":
                error = content["ename"], content["evalue"]
            elif kind == "status" and content["execution_state"] == "idle":
                return shown, *error

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    try:
        assert kernel.run(CELLS) == ("", "", "")
        yield kernel
    finally:
        kernel.close()


def test_an_interrupted_kernel_is_free_again(kernel: Kernel) -> None:
    kernel.run("pl.launch(rank, ranks=2)")
    for _ in range(ROUNDS):
        pressed: list[bool] = []

        def press(pressed: list[bool] = pressed) -> None:
            if not pressed:
                pressed.append(True)
                kernel.interrupt()

        _, error, _ = kernel.run("pl.launch(hang, ranks=3, live=True)", press)
        assert error == "KeyboardInterrupt"
        assert kernel.run("print(left(), pl.launch(rank, ranks=2))") == ("[] [0, 1]\n", "", "")


def test_in_a_notebook_the_cell_and_its_line_are_named(kernel: Kernel) -> None:
    kernel.run("def divide(x):\n    print('dividing')\n    return 1 / x  # here")
    shown, error, said = kernel.run("pl.launch(divide, ranks=1, args=(0,))")
    assert (shown, error) == ("[rank 0] dividing\n", "RankError")
    assert re.search(r"\n  Cell In\[\d+\], line 3, in divide\n    return 1 / x  # here\n", said)
    _, error, said = kernel.run("pl.launch(hang, ranks=2, timeout=1)")
    assert error == "RankTimeout" and ": rank 1 waits in all_reduce for rank 0\n" in said
    assert re.search(r"rank 0: line 9 of Cell In\[\d+\] in hang: time.sleep\(600\)\n", said)


def test_nothing_survives_a_kernel_that_is_killed(temporary: Path) -> None:
    slow = temporary / "slow"
    slow.mkdir()
    (slow / "torch.py").write_text("import time; time.sleep(60)")

    def one_round(index: int) -> list[str]:
        mark = f"paralab-test-{uuid.uuid4()}"
        moment = "loading" if index % 4 == 0 else "waiting"
        path = f"{slow}:{HERE.parent}" if moment == "loading" else str(HERE.parent)
        env = {**os.environ, "PYTHONPATH": path, "MARK": mark, "TMPDIR": str(temporary)}
        victim = subprocess.Popen(
            [sys.executable, HERE / "launch_victim.py", moment], env=env, stdout=subprocess.PIPE
        )
        assert victim.stdout.readline() == b"ready\n"
        # itself, server, 3 ranks, sleep: whose environment shows only a moment after its exec
        expected = 2 if moment == "loading" else 6
        give_up = time.monotonic() + PATIENCE
        while len(living(mark)) < expected and time.monotonic() < give_up:
            time.sleep(0.01)
        assert len(living(mark)) >= expected
        victim.kill()
        victim.wait()
        give_up = time.monotonic() + PATIENCE
        while (left := living(mark)) and time.monotonic() < give_up:
            time.sleep(0.05)
        victim.stdout.close()
        return left

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one_round, range(ROUNDS))) == [[]] * ROUNDS
    assert folders_left() == []


# ---- forks, giants and a full folder ------------------------------------------------------------


@pytest.mark.parametrize("how, code", [
    ("return 'child'", 0), ("raise KeyError('the child')", 1), ("sys.exit(7)", 7),
    ("sys.exit()", 0), ("sys.exit('words')", 1),
])  # fmt: skip
def test_of_a_rank_that_forks_the_parent_alone_is_heard(capsys, how: str, code: int) -> None:
    fork = in_a_cell(f"""
import os, sys
def fork(context):
    pid = os.fork()
    context.progress(1 - bool(pid), 7)
    if pid == 0:
        print("printed by the child")
        {how}
    return "parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
""", "fork")  # fmt: skip
    told = []
    for _ in range(ROUNDS):
        found = launch_program(fork, 2, on_progress=lambda *said: told.append(said))
        assert found == [("parent", code)] * 2
    assert sorted(told) == [(0, 0, 7)] * ROUNDS + [(1, 0, 7)] * ROUNDS
    said = capsys.readouterr().out
    assert said.count("printed by the child") == 2 * ROUNDS
    assert ("KeyError: 'the child'" in said) == ("KeyError" in how)


def test_a_limit_that_ends_before_the_ranks_have_started_is_a_timeout() -> None:
    for limit in [1e-4] * ROUNDS + [0.01] * ROUNDS:
        with one_clear_error(pl.RankTimeout) as caught:
            pl.launch(time.sleep, ranks=4, args=(60.0,), timeout=limit)
        assert str(caught.value).count("\n  rank ") == 4 == len(caught.value.waiting)


def test_what_an_error_says_is_cut_and_the_cut_is_stated() -> None:
    def giant(lines: int) -> None:
        raise ValueError("begins " + ("x" * 1000 + "\n" * bool(lines)) * 20_000 + " ends")

    for lines in (0, 1):
        with one_clear_error(pl.RankError) as caught:
            pl.launch(giant, ranks=2, args=(lines,))
        said = str(caught.value)
        assert said.startswith("rank 0 raised ValueError: begins xxx") and said.endswith(" ends")
        assert re.search(r" \.\.\. \d{8} characters left out \.\.\. ", said)
        assert len(caught.value.traceback) < 50_000 and len(said) < 100_000


def test_a_full_folder_for_temporary_files_is_named_with_what_would_help(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=f"No space left.*make room.*TMPDIR.*{temporary}"):
        pl.launch(total, ranks=2)
    monkeypatch.undo()
    assert not list(temporary.glob("paralab-*"))


# ---- torchrun -----------------------------------------------------------------------------------


def as_torchrun_rank(port: int, rank: int) -> str:
    """In a rank of ours: forget its group and join one as torchrun's rank would."""
    import torch.distributed as dist

    from paralab.launch import RankError, torchrun_context

    dist.destroy_process_group()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    try:
        torchrun_context(join_timeout=0.5)
    except RankError as error:
        return str(error)
    return "met"


def test_torchruns_port_taken_ends_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for _ in range(ROUNDS):
            said = pl.launch(as_torchrun_rank, ranks=1, args=(port, 0))[0]
            assert said == (
                f"rank 0 could not meet the other ranks at 127.0.0.1:{port}: the port is taken by "
                "another program; give torchrun another --master-port"
            )
            assert ranks_alive() == []
        # A rank that finds the other program instead of rank 0: torch itself would wait for ever.
        said = pl.launch(as_torchrun_rank, ranks=1, args=(port, 1))[0]
        assert "no rank of this job answered within 0.5 s" in said and "\n" not in said
    said = pl.launch(as_torchrun_rank, ranks=1, args=(port, 1))[0]
    assert "Connection refused; check --master-addr" in said and "\n" not in said


TORCHRUN_RANK = """
import sys, time
from paralab.launch import RankError, torchrun_context
try:
    context = torchrun_context(timeout=2)
except RankError as error:
    sys.exit(f"paralab: {error}")
import torch, torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {context.rank} on {context.nodes} {context.backend} sum {total.item():g};", flush=True)
if context.rank == 0:
    time.sleep(60)
context.note("all_reduce #3 on axis dp, ranks 0,1,2, step 1")
dist.all_reduce(total)
"""


def test_torchrun_on_two_uneven_nodes_and_a_timeout_there_names_the_call(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(TORCHRUN_RANK)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    agents = []
    for node, count in enumerate((1, 2)):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
            f"--nproc-per-node={count}", "--master-addr=127.0.0.1", f"--master-port={port}",
        ]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        agents.append(
            subprocess.Popen(
                [*command, script],
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    out, err = agents[1].communicate(timeout=90)
    agents[0].terminate()  # a static rendezvous does not tell it
    out += agents[0].communicate(timeout=90)[0]
    for rank in range(3):
        assert f"rank {rank} on (0, 1, 1) gloo sum 3;" in out
    assert "was in all_reduce #3 on axis dp, ranks 0,1,2, step 1" in err
    assert agents[1].returncode == 1
