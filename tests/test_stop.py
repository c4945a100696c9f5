"""`stop=`: an event that ends a launch at any moment, from any thread, leaving nothing behind."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import paralab as pl
from paralab.launch import _shared_server
from paralab.ranks.server import RankServer
from patience import HANG_S
from processes import below_the_server, until

SMALL = pl.ModelSpec(layers=1, hidden=32, heads=2, seq_len=16)


class Background:
    """A call in a thread of its own, and how it ended."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.thread = threading.Thread(target=self.go, args=(call,), daemon=True)
        self.thread.start()

    def go(self, call: Callable[[], object]) -> None:
        with pytest.raises(pl.Stopped) as self.caught:
            call()

    def stopped(self) -> str:
        self.thread.join(HANG_S)
        assert not self.thread.is_alive(), "it has not ended"
        return str(self.caught.value)


def hang_in_a_collective(path: str) -> None:
    import select

    if dist.get_rank() == 0:
        Path(path).touch()
        select.select([], [], [])
    dist.all_reduce(torch.ones(1))  # waits in C++ for rank 0


def test_stop_ends_the_waiting_of_a_queued_launch_and_ranks_that_hang(tmp_path, monkeypatch):
    """Neither ends another launch, and the next one works."""
    (own := tmp_path / "folders").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    first_stop, stop, begun = threading.Event(), threading.Event(), tmp_path / "begun"
    first = Background(
        lambda: pl.launch(hang_in_a_collective, ranks=3, args=(str(begun),), stop=first_stop)
    )
    assert until(begun.exists)
    queued = Background(lambda: pl.launch(lambda: 1, ranks=1, stop=stop))
    stop.set()
    assert "waiting" in queued.stopped()
    assert first.thread.is_alive() and list(own.iterdir()) and below_the_server()
    first_stop.set()
    assert "3 ranks" in first.stopped()
    assert not below_the_server() and not list(own.iterdir())
    assert pl.launch(lambda: 7, ranks=2, stop=threading.Event()) == [7, 7]


def test_an_event_that_is_set_already_starts_no_rank(tmp_path):
    pl.launch(os.getpid, ranks=1)  # the server is ready: a rank would be born at once
    stop = threading.Event()
    stop.set()
    with pytest.raises(pl.Stopped, match="before the ranks had started"):
        pl.launch((tmp_path / "ran").touch, ranks=1, stop=stop)
    assert not (tmp_path / "ran").exists()


def test_stop_while_torch_still_loads_does_not_wait_for_it():
    with _shared_server.lock:
        _shared_server.close()  # the next launch needs a new server, which takes seconds
    stop = threading.Event()
    call = Background(lambda: pl.launch(lambda: 1, ranks=1, stop=stop))
    assert until(lambda: _shared_server._server is not None)
    stop.set()
    assert call.stopped()
    assert bool(_shared_server._server.loading) == (_shared_server._server.method == "fork")
    assert pl.launch(lambda: 1, ranks=1) == [1]  # the same server, ready by now


def test_a_training_run_says_how_far_it_came_and_calls_back_as_it_goes(run, model):
    stop, seen = threading.Event(), []

    def look(rank: int, done: int, total: int) -> None:
        seen.append((rank, done, total))
        if rank == 0 and done >= 2:
            stop.set()

    with pytest.raises(pl.Stopped, match=r"2 ranks worked; \d+ of 5000 steps done"):
        run(model, pl.Plan(dp=2), steps=5000, progress=look, stop=stop)
    assert not below_the_server()
    assert {rank for rank, _, _ in seen} <= {0, 1} and {total for _, _, total in seen} == {5000}
    seen.clear()
    run(model, pl.Plan(dp=2), steps=2, progress=look)
    assert {(0, 2, 2), (1, 2, 2)} <= set(seen)  # the last step is always reported


def test_an_interrupted_run_says_how_many_steps_were_done_and_shows_no_frame_of_ours():
    """pl.run hides its own frame from a notebook; those below it are gone."""

    def progress(rank: int, done: int, total: int) -> None:
        raise KeyboardInterrupt

    words = r"^interrupted; \d+ of 5000 steps done$"
    with pytest.raises(KeyboardInterrupt, match=words) as caught:
        pl.run(SMALL, pl.Plan(dp=2), steps=5000, progress=progress)
    _, *ours = (frame.f_code for frame, _ in traceback.walk_tb(caught.value.__traceback__))
    assert [code.co_name for code in ours] == ["run"]
    assert "__tracebackhide__" in ours[0].co_varnames
    assert below_the_server() == []


@pytest.mark.parametrize("interrupted_before", [False, True])
def test_an_interrupt_while_the_ranks_end_is_raised_once_they_have_ended(
    monkeypatch, interrupted_before
):
    """A loop of short runs spends much of its time there."""
    end_ranks = RankServer.end_ranks

    def end_ranks_under_interrupt(server: RankServer) -> None:
        signal.raise_signal(signal.SIGINT)
        end_ranks(server)

    def progress(*_: int) -> None:
        if interrupted_before:
            raise KeyboardInterrupt("the first")

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    monkeypatch.setattr(RankServer, "end_ranks", end_ranks_under_interrupt)
    words = "the first; interrupted" if interrupted_before else "interrupted; 1 of 1 steps done"
    with pytest.raises(KeyboardInterrupt, match=f"^{words}") as caught:
        pl.run(SMALL, pl.Plan(), steps=1, progress=progress)
    assert caught.value.__suppress_context__
    assert below_the_server() == []
