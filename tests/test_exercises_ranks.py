"""What runs on ranks: answers that must not pass."""

import re

import paralab as pl
from judged import Table, altered
from paralab.exercises import attempts
from paralab.launch import launch_program
from refusals import refuses


def test_a_plan_takes_no_class_for_the_gradients_sum_and_says_what_it_takes_instead():
    said = r"grad_sync=.*; legal: .*'overlapped' \| None.*passes=\(f,\)"
    refuses(said, pl.Plan, dp=2, grad_sync=Table)


ring = altered("all_gather_half")
BEGIN = "    n, r = group.size, group.index"
EXCHANGE = 'group.exchange([("send", leaving, right), ("recv", arriving, left)]).wait()'
POST = EXCHANGE.removesuffix(".wait()")


def instead(change: str):
    """The answer with another exchange in its loop."""
    return ring((EXCHANGE, change))


def begins(*lines: str):
    """The answer with these lines before its first one."""
    return ring((BEGIN, "\n".join(["    " + line for line in lines] + [BEGIN])))


SENDS_FIRST = instead("group.send(leaving, to=right).wait()\n"
                      "        group.recv(arriving, source=left).wait()")  # fmt: skip
WAITS_FOR_NOBODY = begins("if not group.index: return  # never takes part")
COPIED = instead(f"kept, arriving = arriving, arriving.clone()\n        {EXCHANGE}\n"
                 "        kept.copy_(arriving)")  # fmt: skip
RING = [  # answer, limits it breaks, words of the verdict
    (instead("other = tensor.clone()\n        "
             'group.exchange([("send", tensor, right), ("recv", other, left)]).wait()\n'
             "        arriving.copy_(other.chunk(n)[(r - step) % n])"),
     {"bytes per rank", "extra memory", "simulated time"}, "40,000 bytes"),
    (ring(("(r - 1)", "(r - 1 - n // 4)"), ("group.ranks[(r + 1)", "group.ranks[(r + 1 + n // 4)")),
     {"calls"}, "n=4: rank 0 sends to rank 2, which is not its neighbour on the ring"),
    (ring(("range(n - 1)", "range(max(n - 2, 1))")), {"result"}, "n=3: rank 0, chunk 2"),
    (instead("for out, into in zip(leaving.chunk(4), arriving.chunk(4)):\n            "
             'group.exchange([("send", out, right), ("recv", into, left)]).wait()'),
     {"simulated time"},
     ("simulated time (n=2): 96.0 µs, required: at most 36.0 µs: rank 0 sends 4 messages, "
      "required: 1")),
    (instead(f"mine, arriving = arriving, arriving.clone()\n        {EXCHANGE}\n"
             "        mine += arriving"), {"result"},
     "; what is received is added to what was there"),
    (SENDS_FIRST, {"result"}, "each waits forever until the other receives: post both"),
    (WAITS_FOR_NOBODY, {"result"}, ("no rank makes progress any more: rank 0 has "
     "returned its result; rank 1 is in")),
    # right by luck: what is sent is not there yet, is never waited for, or is changed under way
    (ring((BEGIN, f"    flying = []\n{BEGIN}"),
          (EXCHANGE, f"flying.append({POST})\n    [one.wait() for one in flying]")),
     {"result"}, "of send #2 to rank 1 was changed before it was waited for"),
    (instead(f"{POST}\n        __import__('time').sleep(0.05)"),
     {"result"}, "n=2: rank 0 never waits for send #0"),
    (instead(f"leaving = leaving.clone()\n        sent = {POST}\n        leaving.zero_()\n"
             "        sent.wait()"),
     {"result"}, "of send #0 to rank 1 was changed before it was waited for"),
    # around the ledger: by torch.distributed with a decoy, as the program's own call; by heart
    (begins("import torch.distributed as dist", "chunks = tensor.chunk(group.size)",
            "[dist.broadcast(chunks[i - 1], (i - 2) % group.size) for i in range(group.size)]",
            "tensor = tensor.clone()"),
     {"calls", "bytes per rank"}, "n=2: rank 0 calls group.broadcast"),
    (begins("n, gathered = group.size, tensor.new_empty(tensor.shape)",
            "own = tensor.chunk(n)[(group.index + 1) % n].clone()",
            "group.all_gather(gathered, own, phase='control').wait()",
            "tensor.copy_(gathered.roll(gathered.numel() // n))", "return"),
     {"calls", "extra memory"}, "calls group.all_gather"),
    (instead(f"{EXCHANGE}\n    tensor.copy_(tensor.new_ones(len(tensor)).cumsum(0) - 1)"),
     {"result"}, "n=2: rank 0, chunk 0, element 0: 0, required: "),
    # against the checker
    (instead(f"{EXCHANGE}\n    tensor.resize_(10)"),
     {"result"}, "n=2: rank 0: the tensor has shape (10,) now"),
    (begins("raise SystemExit(3)"), {"result"}, "n=2: rank 0 called sys.exit(3)"),
    (begins("raise GeneratorExit"), {"result"}, "n=2: rank 0 raised GeneratorExit"),
]  # fmt: skip
ALONE = (WAITS_FOR_NOBODY, SENDS_FIRST)
RINGS = Table(pl.exercises.all_gather_half, RING, [COPIED], alone=ALONE, most=3)
test_a_wrong_ring_is_refused, test_a_right_ring_passes, test_the_stub_of_a_ring = RINGS.tests()


def test_an_answer_that_prints_for_ever_is_ended(monkeypatch):
    monkeypatch.setattr(attempts, "WHOLE", 2)  # is waited for in full
    shows_life = "while True: print('still here', flush=True); time.sleep(0.05)"
    verdict = pl.exercises.all_gather_half.check(begins("import time", shows_life), timeout=1)
    assert "n=2: it has not ended within 2 s, the time that a check may take" in repr(verdict)
    assert "it printed" not in repr(verdict)  # a few lines, all of which are shown


def test_an_answer_that_prints_megabytes_is_told_so_and_does_not_fill_the_notebook(
    monkeypatch, capsys
):
    launch_program(str, 2, (), device="cpu")  # torch is loaded now, for which 2 s may not be enough
    monkeypatch.setattr(attempts, "WHOLE", 2)
    verdict = pl.exercises.all_gather_half.check(
        begins("while True: print('still here' * 10)"), timeout=1
    )
    assert re.search(
        r"within 2 s, the time that a check may take; it printed \d[\d,]*\.\d MB", repr(verdict)
    )
    shown = capsys.readouterr().out
    assert shown.count("bytes left out") == 2 and len(shown) < 2 * 2 * attempts.KEPT + 1000
