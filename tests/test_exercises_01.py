"""Lab 01: a ring all-reduce, one on two levels of links, half a ring; what never ends is ended."""

import torch.distributed as dist

import paralab as pl
from judged import Table, altered
from paralab.exercises import attempts
from paralab.launch import launch_program

RING, LEVELS = pl.exercises.ring_all_reduce, pl.exercises.hierarchical_all_reduce
ring = altered("ring_all_reduce")
CHUNKS, LEAVING = "chunks = tensor.tensor_split(n)", "chunks[(rank - step) % n]"
FIRST = f"exchange({LEAVING}, partial)"
SECOND = "exchange(chunks[(rank + 1 - step) % n], chunks[(rank - step) % n])"
HALF = ring((SECOND, "pass"))
BATCH = "for work in dist.batch_isend_irecv(pair):\n            work.wait()"
HEAD = "    def exchange(leaving: Tensor, arriving: Tensor) -> None:\n"
SENDS_FIRST = ring((FIRST, f"dist.send({LEAVING}, right)\n        dist.recv(partial, left)"))
RINGS = [  # answer, limits it breaks, words of the verdict
    (lambda tensor: dist.all_reduce(tensor), {"calls"},
     "calls all_reduce, required: only sends and receives"),
    (ring(("(rank - 1) % n, (rank + 1) % n", "order[(rank - 1) % n], order[(rank + 1) % n]"),
          ("    left,", "    order = [0, 2, 1, 3] if n == 4 else list(range(n))\n"
           "    rank = order.index(rank)\n    left,")), {"calls"},
     "which is not its neighbour on the ring"),
    (HALF, {"result", "bytes per rank"}, "in 5,001 of 10,001 elements it is as it was before"),
    (ring(("work.wait()", "pass")), {"result"}, "never waits for send"),
    (ring(("    n, rank =", "    tensor = tensor.clone()\n    n, rank ="),
          (SECOND, f"{SECOND}\n    return tensor")), {"result", "extra memory"},
     "it is as it was before; the tensor that it returns is not read: the sum has to be in its"),
    (ring((CHUNKS, "chunks = tensor[: len(tensor) // n * n].tensor_split(n)")),
     {"result", "bytes per rank"}, "element 10,000: "),
    (ring(("buffer[: mine.numel()]", "torch.empty_like(mine)"),
          ("buffer = torch.empty_like(chunks[0])", "pass")), {"extra memory"},
     ("N=3: rank 2 takes 26,672 bytes in addition to the tensor, required: at most 13,336, "
      "one chunk; one buffer is enough, made before the loop: one per step needs room for two")),
    (ring(("tensor_split", "chunk")), {"bytes per rank"},
     "N=4: rank 1 sends 60,012 bytes in chunks that differ by 3 elements, more than one, required"),
    (ring((HEAD, f"{HEAD}        for one in zip(leaving.tensor_split(9), arriving.tensor_split(9)):"
           "\n            piece(*one)\n\n    def piece(leaving, arriving):\n")), {"simulated time"},
     "at most 72.0 µs: rank 0 sends 18 messages, required: 2"),
    (ring((BATCH, "jobs = [(dist.isend, leaving, right), (dist.irecv, arriving, left)]\n"
           "        for call, part, peer in jobs if rank else jobs[::-1]:  # no deadlock\n"
           "            call(part, peer).wait()")), {"simulated time"},
     "144.0 µs, required: at most 72.0 µs: the messages of one step are sent one after the other"),
    (ring(("empty_like", "zeros_like"),
          (f"{FIRST}\n        mine += partial",
           f"works = [dist.isend({LEAVING}, right), dist.irecv(partial, left)]\n"
           "        mine += partial\n        [work.wait() for work in works]")),
     {"result"}, "a chunk is read before the wait() of its receive"),
    (SENDS_FIRST, {"result"}, "makes progress any more: rank 0 is in send #0 to rank 1, line "),
    (ring((CHUNKS, "raise KeyError('chunk 7')")), {"result"},
     ("raised KeyError: 'chunk 7', line ", " in ring_all_reduce: raise KeyError(")),
]  # fmt: skip
RIGHT_RINGS = [
    ring((CHUNKS, f"rank -= 1  # which ends with chunk r, not r + 1\n    {CHUNKS}")),
    ring((SECOND, "sent = dist.isend(chunks[(rank + 1 + step) % n], left)\n"
                  "        dist.recv(chunks[(rank + 2 + step) % n], right)\n        sent.wait()")),
    ring((SECOND, f"{SECOND}\n    dist.barrier()")),
]  # fmt: skip
ALL_RINGS = Table(RING, RINGS, RIGHT_RINGS, alone=[SENDS_FIRST], most=3)
test_a_wrong_ring_is_refused, test_a_right_ring_passes, test_the_stub_of_a_ring = ALL_RINGS.tests()


# ---- two levels ----------------------------------------------------------------------------------
levels = altered("hierarchical_all_reduce")
SCATTER, GATHER = (
    "dist.reduce_scatter_tensor(part, tensor, group=inside)",
    "dist.all_gather_into_tensor(tensor, part, group=inside)",
)
MIDDLE, PART = "dist.all_reduce(part, group=across)", "part = tensor.new_empty(tensor.numel() // k)"

TWO_LEVELS = [
    (levels((SCATTER, "dist.all_reduce(tensor)"), (MIDDLE, "pass"), (GATHER, "pass")),
     {"bytes between nodes", "bytes inside nodes"},
     "2 nodes of 2: rank 1 sends 72,000 bytes to other nodes, required: 24,000"),
    (levels((PART, ""), (SCATTER, "dist.reduce(tensor, rank - rank % k, group=inside)"),
            (MIDDLE, "if rank % k == 0:\n        dist.all_reduce(tensor, group=across)"),
            (GATHER, "dist.broadcast(tensor, rank - rank % k, group=inside)")),
     {"bytes between nodes", "bytes inside nodes"},
     ("rank 0 sends 48,000 bytes to other nodes, required: 24,000; rank 1 sends none: one rank of "
      "each node sends for all of it")),
    (levels((MIDDLE, "pass")), {"result", "bytes between nodes"},
     ("rank 0, element 0: ", "only the terms of rank 0 and of rank 1 are in it")),
    (levels(("inside, across =", "across, inside ="), ("// k", "// (n // k)")),
     {"bytes between nodes"}, ("2 nodes of 2: rank 0 sends 48,000 bytes to",
      "; the groups are exchanged: tensors go between nodes, their parts inside")),
    (levels(("list(range(place, n, k))", "[place, n - 1 - place]"), ("place in range(k)",
             "place in range(n // 2)")), {"result"}, ("2 nodes of 2: rank 0, element 0: ",
      "; the terms of rank 2 and of rank 3 are missing, the terms of rank 2 (from part r + 1) and "
      "of rank 3 (from part r + 1) are in it")),
    (levels((MIDDLE, "dist.all_reduce(part)")),
     {"result", "bytes between nodes", "bytes inside nodes"},
     "it is the sum of all parts: the ranks that add up one part are not a group of their own"),
    (levels((MIDDLE, "work = dist.all_reduce(part, group=across, async_op=True)"),
            (GATHER, f"{GATHER}\n    work.wait()")), {"result"},
     "2 nodes of 2: rank 0, element 0: "),
    (levels((SCATTER, f"kept = tensor.repeat(2)\n    {SCATTER}")), {"extra memory"},
     "required: at most 72,000; the tensor has 48,000"),
    (levels(("_rank(), ranks_per_node", "_rank(), 2")), {"bytes between nodes"},
     "2 nodes of 3: rank "),
    (levels(("list(range(place, n, k))", "[place, place + k]")), {"result"}, "3 nodes of 2: "),
    (levels(("range(first, first + k)", "range(first, k)")), {"result"},
     "ranks=[]: a group without a rank; legal: one rank or more, "),
    (levels(("group=across", "group={0, 1}")), {"result"}, "group={0, 1}: not a process group; "),
    (levels((MIDDLE, "dist.isend(part, 0, [0, 1])")), {"result"},
     "group=[0, 1]: not a process group; legal: what dist.new_group returns, or None"),
    (levels(("(part, tensor, g", "(tensor, part, g")), {"result"},
     "raised ValueError: reduce_scatter of 6,000 elements into 12,000: on 2 ranks the input has "),
]  # fmt: skip
RIGHT_LEVELS = [
    levels((PART, "parts = list(tensor.chunk(k))\n    part = parts[rank % k].clone()"),
           (SCATTER, "dist.reduce_scatter(part, parts, group=inside)"),
           (GATHER, "dist.all_gather(parts, part, group=inside)")),
    levels(("new_group(ranks)", "new_group(map(int, ranks))")),
]  # fmt: skip
ALL_LEVELS = Table(LEVELS, TWO_LEVELS, RIGHT_LEVELS, most=3)
test_wrong_levels_are_refused, test_right_levels_pass, test_the_stub_of_levels = ALL_LEVELS.tests()


# ---- half a ring, with paralab's groups ----------------------------------------------------------
half = altered("all_gather_half")
BEGIN = "    n, r = group.size, group.index"
EXCHANGE = 'group.exchange([("send", leaving, right), ("recv", arriving, left)]).wait()'
POST = EXCHANGE.removesuffix(".wait()")


def instead(change: str):
    """The answer with another exchange in its loop."""
    return half((EXCHANGE, change))


def begins(*lines: str):
    """The answer with these lines before its first one."""
    return half((BEGIN, "\n".join(["    " + line for line in lines] + [BEGIN])))


HALF_FIRST = instead("group.send(leaving, to=right).wait()\n"
                      "        group.recv(arriving, source=left).wait()")  # fmt: skip
WAITS_FOR_NOBODY = begins("if not group.index: return  # never takes part")
COPIED = instead(f"kept, arriving = arriving, arriving.clone()\n        {EXCHANGE}\n"
                 "        kept.copy_(arriving)")  # fmt: skip
HALVES = [  # answer, limits it breaks, words of the verdict
    (instead("other = tensor.clone()\n        "
             'group.exchange([("send", tensor, right), ("recv", other, left)]).wait()\n'
             "        arriving.copy_(other.chunk(n)[(r - step) % n])"),
     {"bytes per rank", "extra memory", "simulated time"}, "40,000 bytes"),
    (half(("(r - 1)", "(r - 1 - n // 4)"), ("group.ranks[(r + 1)", "group.ranks[(r + 1 + n // 4)")),
     {"calls"}, "n=4: rank 0 sends to rank 2, which is not its neighbour on the ring"),
    (half(("range(n - 1)", "range(max(n - 2, 1))")), {"result"}, "n=3: rank 0, chunk 2"),
    (instead("for out, into in zip(leaving.chunk(4), arriving.chunk(4)):\n            "
             'group.exchange([("send", out, right), ("recv", into, left)]).wait()'),
     {"simulated time"},
     ("simulated time (n=2): 96.0 µs, required: at most 36.0 µs: rank 0 sends 4 messages, "
      "required: 1")),
    (instead(f"mine, arriving = arriving, arriving.clone()\n        {EXCHANGE}\n"
             "        mine += arriving"), {"result"},
     "; what is received is added to what was there"),
    (HALF_FIRST, {"result"}, "each waits forever until the other receives: post both"),
    (WAITS_FOR_NOBODY, {"result"}, ("no rank makes progress any more: rank 0 has "
     "returned its result; rank 1 is in")),
    # right by luck
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
ALONE = (WAITS_FOR_NOBODY, HALF_FIRST)
ALL_HALVES = Table(pl.exercises.all_gather_half, HALVES, [COPIED], alone=ALONE, most=3)
test_a_wrong_half_is_refused, test_a_right_half_passes, test_the_stub_of_a_half = ALL_HALVES.tests()


def test_an_answer_that_prints_for_ever_is_ended(monkeypatch):
    monkeypatch.setattr(attempts, "WHOLE", 2)  # is waited for in full
    shows_life = "while True: print('still here', flush=True); time.sleep(0.05)"
    verdict = pl.exercises.all_gather_half.check(begins("import time", shows_life), timeout=1)
    assert "n=2: it has not ended within 2 s, the time that a check may take" in repr(verdict)


def test_an_answer_that_prints_megabytes_does_not_fill_the_notebook(monkeypatch, capsys):
    launch_program(str, 2, (), device="cpu")  # torch is loaded now, for which 2 s may not be enough
    monkeypatch.setattr(attempts, "WHOLE", 2)
    verdict = pl.exercises.all_gather_half.check(
        begins("while True: print('still here' * 10)"), timeout=1
    )
    assert "within 2 s, the time that a check may take" in repr(verdict)
    shown = capsys.readouterr().out
    assert shown.count("bytes left out") == 2 and len(shown) < 2 * 2 * attempts.KEPT + 1000
