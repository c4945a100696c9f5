"""A rank whose host is not blocked says all the same what its device waits for."""

from __future__ import annotations

from types import SimpleNamespace

from paralab.ranks import lookout as module
from paralab.ranks.hangs import sentence, standing
from paralab.ranks.lookout import Lookout
from paralab.ranks.notes import Notebook


def watching(passed, **reports):
    """A `Lookout` of rank 3, whose reports go nowhere unless ``reports`` says where."""
    nowhere = {"note": lambda text: None, "alive": lambda: None}
    return Lookout(SimpleNamespace(rank=3, patience=120.0, **(nowhere | reports)), passed)


class Event:
    over = False

    def query(self) -> bool:
        return self.over


def test_the_oldest_call_that_is_not_over_is_noted_until_it_is():
    notes, device = [], SimpleNamespace(passed=0)
    lookout = watching(lambda: device.passed, note=notes.append)
    first, second = Event(), Event()
    lookout.look()
    assert notes == []
    lookout.posted("all_gather #7 on axis dp, ranks 0,1", first)
    lookout.posted("all_reduce #8 on axis tp, ranks 0,2", second)
    lookout.look()
    lookout.look()  # the rank's own thread may have wiped it meanwhile
    assert notes == ["all_gather #7 on axis dp, ranks 0,1"] * 2
    first.over = True
    lookout.look()
    assert notes[-1] == "all_reduce #8 on axis tp, ranks 0,2"
    second.over = True
    lookout.look()
    assert notes[-1] == "" and lookout.calls == []


def test_a_device_that_gets_on_is_a_sign_of_life_and_one_that_hangs_is_none():
    device, lives = SimpleNamespace(passed=0), []
    lookout = watching(lambda: device.passed, alive=lambda: lives.append(1))
    lookout.posted("send #1 to rank 1", Event())
    for device.passed in (1, 2, 3):
        lookout.look()
    assert len(lives) == 3  # a long step, computing
    for _ in range(3):
        lookout.look()
    assert len(lives) == 3


def test_without_progress_a_rank_under_torchrun_says_where_it_is_and_ends(monkeypatch, capfd):
    """torchrun shows what it has printed, and ends the others."""
    clock, exits = SimpleNamespace(now=100.0, monotonic=lambda: clock.now), []
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module.os, "_exit", exits.append)
    device = SimpleNamespace(passed=0)
    lookout = watching(lambda: device.passed)
    first, second = Event(), Event()
    lookout.posted("all_gather #7 on axis dp, ranks 0,3, step 2", first)
    lookout.posted("all_reduce #8 on axis tp, ranks 2,3, step 2", second)
    for clock.now in range(100, 500, 50):  # a long step, computing
        device.passed += 1
        lookout.look()
    clock.now = 500.0
    first.over = True
    lookout.look()
    clock.now = 600.0
    lookout.look()
    assert capfd.readouterr().err == "" and not exits
    for clock.now in (609.0, 612.0, 619.0):
        lookout.look()
    said = (
        "paralab: rank 3 has waited 109 s in all_reduce #8 on axis tp, ranks 2,3, step 2; it ends"
    )
    assert capfd.readouterr().err == f"{said} after 120 s\n" and not exits
    clock.now = 620.0
    lookout.look()
    assert exits == [1]


def test_what_it_notes_names_who_waits_for_whom(tmp_path):
    pages = Notebook.create(tmp_path, 3)
    for rank in (0, 1):
        mine = Notebook(tmp_path, rank)
        lookout = watching(lambda: 0, note=mine.write, alive=mine.alive)
        lookout.posted("all_reduce #17 on axis dp, ranks 0,1,2, step 3", Event())
        before = pages.snapshot()
        lookout.look()
        assert pages.snapshot() != before
    found = [standing(rank, 3, pages.read(rank), []) for rank in range(3)]
    assert sentence(found).startswith("ranks 0, 1 wait in all_reduce #17 for rank 2")
    before, said = pages.snapshot(), pages.read(1)
    mine.alive()  # changes the page and not what it says
    assert pages.snapshot() != before and pages.read(1) == said
