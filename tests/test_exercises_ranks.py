"""What runs on ranks: answers that must not pass."""

import re

import pytest

import bad_answers as bad
import bad_attacks as attacks
import paralab as pl
from judged import Table, altered
from paralab.exercises import attempts
from paralab.launch import launch_program


def test_a_plan_takes_no_class_for_the_gradients_sum_and_says_what_it_takes_instead():
    said = r"grad_sync=.*; legal: .*'overlapped' \| None.*passes=\(f,\)"
    with pytest.raises(ValueError, match=said):
        pl.Plan(dp=2, grad_sync=Table)


ring = altered("all_gather_half")
CHUNKS, BEGIN = "chunks = tensor.chunk(n)", "    n, r = group.size, group.index"
EXCHANGE = 'group.exchange([("send", leaving, right), ("recv", arriving, left)]).wait()'
SENDS_FIRST = ring(
    (EXCHANGE, "group.send(leaving, to=right).wait()\n"
               "        group.recv(arriving, source=left).wait()")
)  # fmt: skip
WAITS_FOR_NOBODY = ring(
    (BEGIN, f"    if not group.index:  # never takes part\n        return\n{BEGIN}")
)
RING = [  # answer, limits it breaks, words of the verdict
    (ring((EXCHANGE, "other = tensor.clone()\n        "
           'group.exchange([("send", tensor, right), ("recv", other, left)]).wait()\n'
           "        arriving.copy_(other.chunk(n)[(r - step) % n])")),
     {"bytes per rank", "extra memory", "simulated time"}, "40,000 bytes"),
    (bad.ring_through_root, {"calls", "bytes per rank", "simulated time"},
     "not its neighbour on the ring"),
    (bad.ring_direct, {"calls"},
     "n=4: rank 0 sends to rank 2, which is not its neighbour on the ring"),
    (ring((CHUNKS, "copy = tensor.clone()\n    chunks = copy.chunk(n)"),
          (EXCHANGE, f"{EXCHANGE}\n    tensor.copy_(copy)")), {"extra memory"},
     "n=2: rank 0 takes 40,000 bytes in addition to the tensor, required: at most 20,000, one "
     "chunk"),
    (ring(("chunks[(r - step) % n]", "chunks[(r - step) % n].clone()")), {"result"},
     "n=2: rank 0, chunk 0, element 0: -1, required: "),
    (ring((CHUNKS, f"r -= 1\n    {CHUNKS}")), {"result"},
     "; no finished chunk was received into it"),
    (ring(("r + 1 - step", "r + 1 + step"), ("(r - step)", "(r + 2 + step)")), {"result"},
     "; it is chunk 2's part"),
    (ring(("range(n - 1)", "range(max(n - 2, 1))")), {"result"}, "n=3: rank 0, chunk 2"),
    (bad.ring_by_collective, {"calls", "extra memory"}, "calls group.all_gather"),
    (ring((EXCHANGE, "for out, into in zip(leaving.chunk(4), arriving.chunk(4)):\n            "
           'group.exchange([("send", out, right), ("recv", into, left)]).wait()')),
     {"simulated time"},
     ("simulated time (n=2): 96.0 µs, required: at most 36.0 µs: rank 0 sends 4 messages, "
      "required: 1")),
    (SENDS_FIRST, {"result"}, "each waits forever until the other receives: post both"),
    (WAITS_FOR_NOBODY, {"result"}, ("no rank makes progress any more: rank 0 has "
     "returned its result; rank 1 is in")),
    # right by luck, around the ledger, for one size
    (attacks.ring_waits_at_the_end, {"result"},
     "of send #2 to rank 1 was changed before it was waited for"),
    (attacks.ring_sleeps, {"result"}, "n=2: rank 0 never waits for send #0"),
    (attacks.ring_changes_what_it_sends, {"result"},
     "of send #0 to rank 1 was changed before it was waited for"),
    (attacks.ring_decoy, {"calls", "bytes per rank"}, "n=2: rank 0 calls group.broadcast"),
    (attacks.ring_control, {"calls", "extra memory"}, "calls group.all_gather"),
    (attacks.ring_writes_the_numbers, {"result"}, "n=2: rank 0, chunk 0, element 0: 0, required: "),
    (attacks.ring_resizes, {"result"}, "n=2: rank 0: the tensor has shape (10,) now"),
    (attacks.ring_exits, {"result"}, "n=2: rank 0 called sys.exit(3)"),
    (attacks.ring_generator_exit, {"result"}, "n=2: rank 0 raised GeneratorExit"),
]  # fmt: skip
RING_ALONE = (WAITS_FOR_NOBODY, SENDS_FIRST)
RINGS = Table(pl.exercises.all_gather_half, RING, [bad.ring_copied], alone=RING_ALONE, most=3)
test_a_wrong_ring_is_refused, test_a_right_ring_passes, test_the_stub_of_a_ring = RINGS.tests()


def test_an_answer_that_prints_for_ever_is_ended(monkeypatch):
    monkeypatch.setattr(attempts, "WHOLE", 2)  # is waited for in full
    verdict = pl.exercises.all_gather_half.check(attacks.ring_prints_for_ever, timeout=1)
    assert "n=2: it has not ended within 2 s, the time that a check may take" in repr(verdict)
    assert "it printed" not in repr(verdict)  # a few lines, all of which are shown


def test_an_answer_that_prints_megabytes_is_told_so_and_does_not_fill_the_notebook(
    monkeypatch, capsys
):
    launch_program(str, 2, (), device="cpu")  # torch is loaded now, for which 2 s may not be enough
    monkeypatch.setattr(attempts, "WHOLE", 2)
    verdict = pl.exercises.all_gather_half.check(attacks.ring_prints_megabytes, timeout=1)
    assert re.search(
        r"within 2 s, the time that a check may take; it printed \d[\d,]*\.\d MB", repr(verdict)
    )
    shown = capsys.readouterr().out
    assert shown.count("bytes left out") == 2 and len(shown) < 2 * 2 * attempts.KEPT + 1000
