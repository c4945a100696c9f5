"""Several machines: torchrun starts the ranks, each writes its part, `pl.load` merges them on one
clock.

The two machines are two torchrun agents on this one, so the true clock offset is known: none.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import paralab as pl
from paralab.experiment import run_under_torchrun
from paralab.instruments import between, calibrate, measure
from paralab.launch import launch_program
from paralab.ranks import torchrun
from paralab.ranks.errors import RankError
from paralab.ranks.process import Chosen, joined
from paralab.ranks.torchrun import torchrun_context
from paralab.report import checkpoints
from patience import HANG_S
from stated import LINK
from together import in_turn, reports

MODEL = pl.ModelSpec(layers=2, hidden=40, heads=4, seq_len=24)
SHAPE = ["--layers=2", "--hidden=40", "--heads=4", "--seq-len=24", "--microbatch-size=2",
         "--optimizer=sgd"]  # fmt: skip


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def agent(environment: dict[str, str], at_node: list[list[str]]) -> None:
    """In a rank of ours, which has torch loaded: be torchrun, as if it was started from a shell."""
    from torch.distributed import run

    node = dist.get_rank()
    dist.destroy_process_group()
    os.environ.clear()
    os.environ |= environment
    run.main([f"--nnodes={len(at_node)}", f"--node-rank={node}", *at_node[node]])


def agents(*at_node: list[str]) -> str:
    """torchrun on as many machines as there are words for it, and what each printed."""
    address = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    told = environment, [[*address, *words] for words in at_node]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        pl.launch(agent, len(at_node), told, timeout=HANG_S)
    return said.getvalue()


def test_the_parts_merge_into_the_report_that_one_machine_would_give(tmp_path, text, run):
    """And bytes between machines are told from bytes inside; clock offsets are stated."""
    words = ["-m", "paralab", "run", *SHAPE, "--dp=3", "--steps=3", f"--data={text}"]
    words += [f"--out={tmp_path / 'parts'}", f"--checkpoint={tmp_path / 'shared'}"]
    said = agents(*[[f"--nproc-per-node={n}", *words] for n in (2, 1)])
    assert "[rank 0]   pl.load" in said and said.count("pl.load") == 1
    merged = pl.load(tmp_path / "parts")
    here = run(MODEL, pl.Plan(dp=3, microbatch_size=2), steps=3, optimizer="sgd")
    assert merged.plan == here.plan and merged.model == here.model
    assert {f.name for f in (tmp_path / "shared").iterdir()} == {".lock", "latest", "step-00000003"}
    np.testing.assert_array_equal(merged.losses, here.losses)
    columns = ["call", "rank", "step", "op", "axis", "payload_bytes", "wire_bytes"]
    ours, theirs = (r.collectives.query("phase == 'grad_sync'") for r in (here, merged))
    assert theirs[columns].reset_index(drop=True).equals(ours[columns].reset_index(drop=True))
    assert merged.meta["nodes"] == [0, 0, 1] and set(theirs.level) == {"inter"}
    by_level = merged.traffic(by="level").set_index("level").bytes
    assert by_level["inter"] == 2 * by_level["intra"] > 0  # ring 0-1-2: two of three links cross
    stated = merged.meta["clock_offsets"]
    *here, (offset, uncertainty) = zip(stated["offset_s"], stated["uncertainty_s"], strict=True)
    assert here == [(0.0, 0.0)] * 2 and 0 < uncertainty < 0.05
    assert abs(offset) <= uncertainty  # one machine, one clock: the truth is 0


def test_a_machine_that_was_started_otherwise_is_named(tmp_path, text):
    other, own = tmp_path / "other.txt", tmp_path / "a disk of its own"
    other.write_text("x" * 5000)
    own.mkdir()
    (own / checkpoints.LOCK).touch()  # of an earlier run
    for what, changed in (
        (r"failed: rank \d was started with another model, plan, settings or", {"lr": 0.2}),
        (r"failed: rank \d was started with another model, plan, ", {"plan": pl.Plan(dp=2, pp=2)}),
        (r"failed: rank \d reads another text than rank", {"data": other}),
        ("^save='.*': ranks 2, 3 cannot see in it what rank 0 writes there; l", {"save": str(own)}),
    ):

        def program(context, jobs, changed=changed):
            [(model, plan, settings)] = jobs
            blocks = [lambda spec: torch.nn.Linear(spec.hidden, spec.hidden) for _ in range(4)]
            model = model.replace(block=blocks[context.rank])  # the same, elsewhere in memory
            context = dataclasses.replace(context, nodes=(0, 0, 1, 1))
            own = {"plan": plan} | (changed if context.rank >= 2 else {})
            return in_turn(context, [(model, own.pop("plan"), settings | own)])

        saves = {"lr": 0.1, "save": tmp_path / "checkpoints"}
        with pytest.raises((pl.RankError, ValueError), match=what):
            reports([(MODEL, pl.Plan(dp=4), saves)], text, program=program)


def test_the_rank_that_says_why_goes_first(tmp_path):
    """torchrun ends all ranks of a machine with the first that goes, heard or not; and on every
    machine one says why.
    """

    def rank(number: str, local: str) -> subprocess.Popen:
        started = dict(RANK=number, LOCAL_RANK=local, WORLD_SIZE="2", MASTER_ADDR="localhost")
        command = [sys.executable, "-m", "paralab", "run", "--dp", "3", "--out", str(tmp_path)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | started)

    with rank("1", "1") as silent:
        for number in "01":
            with rank(number, "0") as speaker:
                said = speaker.communicate(timeout=HANG_S)[1]
            assert said.count(b"the plan needs 3 ranks, torchrun started 2") == 1
            assert speaker.returncode
        with pytest.raises(subprocess.TimeoutExpired):
            silent.wait(0.5)  # it began before two that have come to their end
        silent.terminate()


def after_it(port: int, text: str, folder: str, given: str) -> tuple[int, bool, list[str | None]]:
    """Of the only rank on a machine, with this in the environment, once it has trained: threads,
    whether its process group is up, the interface on which NCCL would have listened, and the queues
    that a GPU would have had for its streams.
    """
    for_a_gpu = "NCCL_SOCKET_IFNAME", "CUDA_DEVICE_MAX_CONNECTIONS"
    torch.set_num_threads(3)
    as_torchrun_rank(port, 0, (0, 0, 1), ranks=1)
    for name in ("OMP_NUM_THREADS", *for_a_gpu):
        os.environ.pop(name, None)
    if given:
        os.environ["OMP_NUM_THREADS"] = given
    run_under_torchrun(MODEL, pl.Plan(), folder=folder, data=text, steps=1, device="cpu")
    return torch.get_num_threads(), dist.is_initialized(), [*map(os.environ.get, for_a_gpu)]


def test_the_only_rank_of_a_machine_computes_on_one_core_unless_told_otherwise(tmp_path, text):
    """As predictions have it, and `pl.run`; torchrun says so to several ranks only. NCCL listens to
    this machine alone, and ends with the run: its threads may else hang when the process ends.
    """
    for given, used in (("", 1), ("3", 3)):
        told = free_port(), str(text), str(tmp_path / given), given
        assert pl.launch(after_it, 1, told) == [(used, False, ["lo", "32"])]


# ---- the link between machines ------------------------------------------------------------------
def far_link(context) -> dict:
    """Machines whose clocks differ by an hour, and a link that is slower one way."""

    def rows(group, ops, messages, budget=1):
        now, alpha = 3600.0 * context.rank, 0.05 if group.ranks == (2, 0) else 0.01
        sees_all = group.index == 1  # the other end is done when its bytes are in a buffer
        return [
            {"op": "send", "payload_bytes": size, "marks": [(now, now + seconds)] * 4}
            for size in messages
            for spoilt in [0.02 * (size < 2**19 and budget == 1)]  # with few repetitions
            for seconds in [alpha + size / 1e7 + spoilt if sees_all else 1e-6]
        ]

    between.links_of = rows
    return between.measure_inter(dataclasses.replace(context, nodes=(0, 0, 1)))


def test_the_slowest_link_between_machines_is_the_receiver_s_time_whatever_the_clocks_say():
    found = launch_program(far_link, 3, (), device="cpu")
    assert found[1:] == found[:1] * 2 and found[0]["nodes"] == 2
    assert found[0]["link"] == pytest.approx({"alpha": 0.05, "bandwidth": 1e7})


def calibrates(port: int, cache: str) -> tuple:
    """In each rank, of a job on two machines and then of one on its own machine: the nodes that it
    may speak of, and which devices it had measured.
    """
    rank, done = dist.get_rank(), []
    os.environ["PARALAB_CACHE_DIR"] = f"{cache}/{min(rank, 1)}"
    known = {"format": calibrate.FORMAT, "points": {"links": []}}
    known["cluster"] = pl.Cluster(flops=1e9, memory_bandwidth=1e9, intra=LINK).to_dict()
    calibrate.measured = lambda device: done.append(device) or known
    measure.LINKS_S = 0.0
    as_torchrun_rank(port, rank, ((0, 0, 1), (1, 0, 2), (1, 1, 2))[rank], ranks=3)
    nodes = between.calibrate_nodes("cpu")
    as_one = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": "none is met at"}
    os.environ |= {name: str(value) for name, value in as_one.items()}
    return nodes, between.calibrate_nodes("cpu"), done


def test_every_machine_is_measured_by_one_rank_and_keeps_the_link_between_all(
    tmp_path, monkeypatch
):
    found = pl.launch(calibrates, 3, (free_port(), str(tmp_path)))
    assert found == [(2, 1, ["cpu"] * 2), (2, 0, ["cpu"]), (0, 0, [])]
    kept = []
    for node in "01":
        monkeypatch.setenv("PARALAB_CACHE_DIR", str(tmp_path / node))
        kept.append((calibrate.known()["inter"], pl.Cluster.local().inter))
    assert kept[0] == kept[1] and kept[0][0]["nodes"] == 2
    assert 1e6 < kept[0][1].bandwidth != LINK.bandwidth and 0 <= kept[0][1].alpha < 0.1


# ---- meeting, and a call without an end ---------------------------------------------------------
def as_torchrun_rank(port: int, rank: int, at: tuple[int, int, int] = (0, 0, 2), ranks: int = 2):
    """In a rank of ours: forget its group and say what torchrun would. at: its machine, and which
    of how many ranks it is there.
    """
    dist.barrier()  # else a rank that is still connecting to the others would lose this one
    dist.destroy_process_group()
    node, local, of = at
    said = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": of}
    said |= {"GROUP_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in said.items()}


def meets(port: int, rank: int) -> str:
    as_torchrun_rank(port, rank)
    with pytest.raises(RankError) as caught:
        torchrun_context(join_timeout=0.5)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_port_that_is_taken_ends_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert pl.launch(meets, ranks=1, args=(port, 0))[0] == (
            f"rank 0 could not meet the other ranks at 127.0.0.1:{port}: the port is taken by "
            "another program; give torchrun another --master-port"
        )
        # A rank that finds the other program instead of rank 0: torch itself would wait for ever.
        said = pl.launch(meets, ranks=1, args=(port, 1))[0]
        assert "not all ranks of this job answered within 0.5 s" in said
    said = pl.launch(meets, ranks=1, args=(port, 1))[0]
    assert "Connection refused; check --master-addr" in said


def listens_nowhere(port: int) -> str:
    as_torchrun_rank(port, 0, (0, 0, 1), ranks=1)
    os.environ["GLOO_SOCKET_IFNAME"] = "none0"
    with pytest.raises(RankError) as caught:
        torchrun_context(timeout=3)
    return str(caught.value)


def test_ranks_that_met_and_cannot_connect_are_told_to_name_an_interface() -> None:
    [said] = pl.launch(listens_nowhere, 1, (free_port(),))
    assert said.startswith("rank 0 met the other ranks, but could not connect to them: ")
    assert "set GLOO_SOCKET_IFNAME on each machine" in said and "(here it is none0)" in said
    assert "--master-port" not in said and "\n" not in said


def test_the_machine_whose_own_name_is_a_loopback_address_listens_on_its_way_to_another() -> None:
    """As Debian's and Ubuntu's /etc/hosts has it, where gloo by itself would listen."""
    ways = {"10.77.0.2": "127.0.0.1"}  # the test's only interface that exists everywhere
    with mock.patch.object(torchrun, "_address", ways.__getitem__):
        assert torchrun._interface(["127.0.1.1", "", "10.77.0.2"], "127.0.1.1") == "lo"
    assert torchrun._interface(["127.0.0.1"] * 2, "127.0.0.1") == "lo"
    assert torchrun._interface(["203.0.113.1"] * 2, "203.0.113.1") == ""


def waits_for_rank_0(port: int) -> tuple:
    """What it knows of the job, and the notes of the error that its time is over with."""
    rank = dist.get_rank()
    as_torchrun_rank(port, rank, ((0, 0, 1), (1, 0, 2), (1, 1, 2))[rank], ranks=3)
    del os.environ["GLOO_SOCKET_IFNAME"]
    os.environ["TORCHELASTIC_RUN_ID"] = "the agent's"
    context, total, notes = torchrun_context(timeout=4), torch.ones(1), []
    assert context.limit == 4 and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    ends_with_its_agent = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(ends_with_its_agent))  # PR_GET_PDEATHSIG
    assert ends_with_its_agent.value == signal.SIGTERM
    dist.all_reduce(total)
    if rank == 0:
        context.store.wait(["over 1", "over 2"])
    else:
        context.note("all_reduce #3 on axis dp, ranks 0,1,2, step 1")
        try:
            dist.all_reduce(total.clone())
        except RuntimeError as error:
            sys.excepthook(type(error), error, None)  # as where nobody catches it
            notes = error.__notes__
            assert error.__traceback__ is None  # only lines of this library were in it
        context.store.set(f"over {rank}", "")
    return context.rank, context.nodes, context.backend, total.item(), notes


def test_two_uneven_machines_and_a_timeout_there_that_names_the_call() -> None:
    said = "was in all_reduce #3 on axis dp, ranks 0,1,2, step 1"
    found = pl.launch(waits_for_rank_0, ranks=3, args=(free_port(),))
    for rank, notes in enumerate([[], [f"rank 1 {said}"], [f"rank 2 {said}"]]):
        assert found[rank] == (rank, (0, 1, 1), "gloo", 3.0, notes)


def over_nccl(port: int) -> tuple[float, ...]:
    as_torchrun_rank(port, 0, (0, 0, 1), ranks=1)
    torchrun.take_device = lambda *_: Chosen("cuda:0", "nccl")
    torchrun.joined = lambda chosen, **given: joined(Chosen("cpu", "gloo"), **given)
    context = torchrun_context(timeout=90)
    return context.limit, context.patience, context.store.timeout.total_seconds()


def test_over_nccl_a_rank_loses_patience_with_its_gpu_long_before_torch_ends_a_call() -> None:
    """NCCL counts from when a call is posted, which in a long step is far ahead of the GPU. Before
    its first call there is nothing to be seen of a GPU, and a rank waits for the others' as long.
    """
    assert pl.launch(over_nccl, 1, (free_port(),), device="cpu") == [(960.0, 90.0, 90.0)]
