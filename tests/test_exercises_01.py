"""Lab 01: a ring all-reduce, and one on two levels of links, in plain torch.distributed."""

import bad_answers_01 as bad
import paralab as pl
from judged import Table, altered

RING, LEVELS = pl.exercises.ring_all_reduce, pl.exercises.hierarchical_all_reduce


ring = altered("ring_all_reduce")
CHUNKS, LEAVING = "chunks = tensor.tensor_split(n)", "chunks[(rank - step) % n]"
FIRST = f"exchange({LEAVING}, partial)"
SECOND = "exchange(chunks[(rank + 1 - step) % n], chunks[(rank - step) % n])"
HALF = ring((SECOND, "pass"))
SENDS_FIRST = ring((FIRST, f"dist.send({LEAVING}, right)\n        dist.recv(partial, left)"))
LONGER = ring(("buffer[: mine.numel()]", "buffer"), ("+= partial", "+= partial[: mine.numel()]"))
RINGS = [  # answer, limits it breaks, words of the verdict
    (bad.by_collective, {"calls"}, "calls all_reduce, required: only sends and receives"),
    (bad.through_rank_0, {"calls", "extra memory", "simulated time"},
     "which is not its neighbour on the ring"),
    (bad.whole_tensor, {"extra memory"},
     "takes 80,008 bytes in addition to the tensor, required: at most 20,004, one chunk"),
    (HALF, {"result", "bytes per rank"}, "in 5,001 of 10,001 elements it is as it was before"),
    (ring(("mine += partial", "mine.copy_(partial)")), {"result"},
     ("N=2: rank 0, element 0: ", "; each element is one term alone, to which no other was added")),
    (ring(("work.wait()", "pass")), {"result"}, "never waits for send"),
    (ring((SECOND, f"{SECOND}\n    tensor /= n")), {"result"},
     "it is the mean, required: the sum"),
    (ring(("    n, rank =", "    tensor = tensor.clone()\n    n, rank =")),
     {"result", "extra memory"}, "it is as it was before"),
    (ring(("    n, rank =", "    tensor = tensor.clone()\n    n, rank ="),
          (SECOND, f"{SECOND}\n    return tensor")), {"result", "extra memory"},
     "it is as it was before; the tensor that it returns is not read: the sum has to be in its"),
    (ring((CHUNKS, "chunks = tensor[: len(tensor) // n * n].tensor_split(n)")),
     {"result", "bytes per rank"}, "element 10,000: "),
    (ring((CHUNKS, "whole = torch.cat([tensor, tensor.new_zeros(-len(tensor) % n)])\n"
                   "    chunks = whole.tensor_split(n)"),
          (SECOND, f"{SECOND}\n    tensor.copy_(whole[: len(tensor)])")),
     {"bytes per rank", "extra memory"},
     "N=2: the ranks send 80,016 bytes together, required: 80,008"),
    (ring(("tensor_split", "chunk"), ("buffer = torch.empty_like(chunks[0])", "kept = []"),
          ("buffer[: mine.numel()]", "torch.empty_like(mine)\n        kept.append(partial)")),
     {"extra memory"}, "N=3: rank 2 takes 26,672 bytes"),
    (ring(("buffer[: mine.numel()]", "torch.empty_like(mine)"),
          ("buffer = torch.empty_like(chunks[0])", "pass")), {"extra memory"},
     ("N=3: rank 2 takes 26,672 bytes in addition to the tensor, required: at most 13,336, "
      "one chunk; one buffer is enough, made before the loop: to make it anew needs room for two")),
    (ring(("tensor_split", "chunk")), {"bytes per rank"},
     "N=4: rank 1 sends 60,012 bytes in chunks that differ by 3 elements, more than one, required"),
    (ring(("mine += partial", "mine += 2 * partial")), {"result"},
     "in 5,000 of 10,001 elements the term of rank 0 is in it twice"),
    (bad.in_pieces, {"simulated time"}, "at most 72.0 µs: rank 0 sends 20 messages, required: 2"),
    (bad.one_rank_receives_first, {"simulated time"},
     "144.0 µs, required: at most 72.0 µs: the messages of one step are sent one after the other"),
    (ring((SECOND, f"{SECOND}\n    exchange(chunks[rank], chunks[left])")), {"bytes per rank"},
     "rank 0 sends 60,008 bytes, required: 40,000 to 40,008 (yours is 1.5 times that)"),
    (ring(("empty_like", "zeros_like"),
          (f"{FIRST}\n        mine += partial",
           f"works = [dist.isend({LEAVING}, right), dist.irecv(partial, left)]\n"
           "        mine += partial\n        [work.wait() for work in works]")),
     {"result"}, "a chunk is read before the wait() of its receive"),
    (LONGER, {"result"},
     "N=2: rank 0 raised OrderError: recv #1 from rank 1 is for 5,001 elements of float32, and "
     "rank 1 sends 5,000 elements of float32 (send #0 to rank 0)"),
    (SENDS_FIRST, {"result"}, "makes progress any more: rank 0 is in send #0 to rank 1, line "),
    (ring(("reduce(tensor", "reduce(group, tensor")), {"result"},
     "yours cannot be called in this way: missing a required argument"),
    (bad.raises, {"result"}, ("raised KeyError: 'chunk 7', line 72 of bad_answers_01.py in raises: "
                              "raise KeyError(")),
]  # fmt: skip
RIGHT_RINGS = [
    ring((CHUNKS, f"rank -= 1  # which ends with chunk r, not r + 1\n    {CHUNKS}")),
    ring((SECOND, "sent = dist.isend(chunks[(rank + 1 + step) % n], left)\n"
                  "        dist.recv(chunks[(rank + 2 + step) % n], right)\n        sent.wait()")),
    ring((SECOND, f"{SECOND}\n    dist.barrier()")),
]  # fmt: skip
ALL_RINGS = Table(RING, RINGS, RIGHT_RINGS, alone=[SENDS_FIRST, LONGER], most=3)
test_a_wrong_ring_is_refused, test_a_right_ring_passes, test_the_stub_of_a_ring = ALL_RINGS.tests()


# ---- two levels ----------------------------------------------------------------------------------
levels = altered("hierarchical_all_reduce")
SCATTER, GATHER = (
    "dist.reduce_scatter_tensor(part, tensor, group=inside)",
    "dist.all_gather_into_tensor(tensor, part, group=inside)",
)
MIDDLE, PART = "dist.all_reduce(part, group=across)", "part = tensor.new_empty(tensor.numel() // k)"


def steps(scatter, middle="pass", gather="pass"):
    return levels((SCATTER, scatter), (MIDDLE, middle), (GATHER, gather))


ALL_INSIDE, ALL_ACROSS = (f"dist.all_reduce(tensor, group={one})" for one in ("inside", "across"))
ALL_GROUPS = """groups = [dist.new_group(ranks) for ranks in rows]  # every rank makes all of them
        return next(group for group, ranks in zip(groups, rows, strict=True) if rank in ranks)"""
LEADER = "rank - rank % k, group=inside)"
TWO_LEVELS = [
    (steps("dist.all_reduce(tensor)"), {"bytes between nodes", "bytes inside nodes"},
     "2 nodes of 2: rank 1 sends 72,000 bytes to other nodes, required: 24,000"),
    (steps(ALL_INSIDE, ALL_ACROSS), {"bytes between nodes"},
     "48,000 bytes to other nodes, required: 24"),
    (steps(ALL_ACROSS, ALL_INSIDE), {"bytes between nodes"},
     "48,000 bytes to other nodes, required: 24,000"),
    (steps(f"dist.reduce(tensor, dst={LEADER}", f"if rank % k == 0:\n        {ALL_ACROSS}",
           f"dist.broadcast(tensor, src={LEADER}"),
     {"bytes between nodes", "bytes inside nodes"}, "48,000 bytes to other n"),
    (steps(ALL_INSIDE), {"result", "bytes between nodes"},
     "rank 0 sends no bytes to other nodes, required: 24,000"),
    (levels((MIDDLE, "pass")), {"result", "bytes between nodes"},
     ("rank 0, element 0: ", "only the terms of rank 0 and of rank 1 are in it")),
    (levels(("inside, across =", "across, inside ="), ("// k", "// (n // k)")),
     {"bytes between nodes"}, ("2 nodes of 2: rank 0 sends 48,000 bytes to",
      "; the groups are exchanged: tensors go between nodes, their parts inside")),
    (levels(("list(range(place, n, k))", "[place, n - 1 - place]"), ("place in range(k)",
             "place in range(n // 2)")), {"result"}, ("2 nodes of 2: rank 0, element 0: ",
      "; the terms of rank 2 and of rank 3 are missing, the terms of rank 2 (from part r + 1) and "
      "of rank 3 (from part r + 1) are in it")),
    (levels((MIDDLE, MIDDLE.replace("across", "inside"))), {"result"},
     " missing, the terms of rank 0 (from part r + 1) and of rank 1 (from part r + 1) are in it"),
    (levels(("    n, rank, k", "    tensor = tensor.clone()\n    n, rank, k")), {"result"},
     "it is as it was before"),
    (levels((MIDDLE, "work = dist.all_reduce(part, group=across, async_op=True)"),
            (GATHER, f"{GATHER}\n    work.wait()")), {"result"},
     "2 nodes of 2: rank 0, element 0: "),
    (levels((SCATTER, f"kept = tensor.repeat(2)\n    {SCATTER}")), {"extra memory"},
     "required: at most 72,000; the tensor has 48,000"),
    (levels((ALL_GROUPS, "return next(dist.new_group(ranks) for ranks in rows if rank in ranks)")),
     {"result"}, "2 nodes of 2: rank 2 makes the group [2, 3] where rank 0 makes the group [0, "),
    (levels(("_rank(), ranks_per_node", "_rank(), 2")), {"bytes between nodes"},
     "2 nodes of 3: rank "),
    (levels(("list(range(place, n, k))", "[place, place + k]")), {"result"}, "3 nodes of 2: "),
    (levels(("(part, tensor, g", "(tensor, part, g")), {"result"},
     "raised ValueError: reduce_scatter of 6,000 elements into 12,000: on 2 ranks the input has "),
    (levels(("(tensor, part, g", "(part, tensor, g")), {"result"},
     "all_gather of 12,000 elements into 6,000: on 2 ranks the output has to be 2 times as long"),
]  # fmt: skip
RIGHT_LEVELS = [
    levels((PART, "parts = list(tensor.chunk(k))\n    part = parts[rank % k].clone()"),
           (SCATTER, "dist.reduce_scatter(part, parts, group=inside)"),
           (GATHER, "dist.all_gather(parts, part, group=inside)")),
    levels(("new_group(ranks)", "new_group(map(int, ranks))")),
]  # fmt: skip
ALL_LEVELS = Table(LEVELS, TWO_LEVELS, RIGHT_LEVELS, most=3)
test_wrong_levels_are_refused, test_right_levels_pass, test_the_stub_of_levels = ALL_LEVELS.tests()
