"""Answers in plain PyTorch: calls of torch.distributed, counted and delivered late."""

import linecache
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import new_group

from judged import defined
from paralab.exercises import tries, watched
from paralab.exercises.tries import Tries, Try
from paralab.exercises.verdict import Notes
from paralab.theory.traffic import wire_bytes
from patience import HANG_S

REQUIRED = {"result": "anything"}


def run(*answers, ranks=4, work=None, nodes=1):
    """[(notes, found)] of functions without arguments."""
    tries = [Try((answer,), Notes("plain", REQUIRED)) for answer in answers]
    found = dict.fromkeys(range(len(tries)))
    for notes, one in Tries(tries, HANG_S).run(work or called, ranks, nodes=nodes):
        found[next(i for i, t in enumerate(tries) if t.notes is notes)] = one
    return [(one.notes, found[i]) for i, one in enumerate(tries)]


def called(watch, answer, seed):
    return answer[0]()


def collectives():
    n, r = dist.get_world_size(), dist.get_rank()
    mine, found = torch.tensor([float(r), 1.0, -float(r), 0.0]), {}
    for name, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
        found[name] = mine.clone()
        dist.all_reduce(found[name], op=op)
    found["root"] = mine.clone()
    dist.reduce(found["root"], dst=1)
    found["broadcast"] = mine.clone()
    dist.broadcast(found["broadcast"], src=2)
    found["gathered"] = torch.empty(4 * n)
    dist.all_gather_into_tensor(found["gathered"], mine)
    parts = [torch.empty(4) for _ in range(n)]
    dist.all_gather(parts, mine)
    found["list"] = torch.cat(parts)
    found["scattered"] = torch.empty(1)
    dist.reduce_scatter_tensor(found["scattered"], mine)
    found["scattered list"] = torch.empty(1)
    dist.reduce_scatter(found["scattered list"], list(mine.chunk(4)))
    found["transposed"] = torch.empty(4)
    dist.all_to_all_single(found["transposed"], mine)
    dist.barrier()
    return {name: tensor.tolist() for name, tensor in found.items()}


def messages():
    """Neighbours on a ring swap what they have, one by one and as a batch; groups of two add up."""
    n, r = dist.get_world_size(), dist.get_rank()
    left, right = torch.empty(1), torch.empty(1)
    sent = dist.isend(torch.tensor([float(r)]), (r + 1) % n)
    dist.recv(left, (r - 1) % n)
    sent.wait()
    mine = torch.tensor([float(r)])
    batch = [dist.P2POp(dist.isend, mine, (r - 1) % n), dist.P2POp(dist.irecv, right, (r + 1) % n)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    groups = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    own = groups[r // 2]
    dist.all_reduce(mine, group=own)
    where = dist.get_rank(own), dist.get_world_size(own), dist.get_rank(groups[1 - r // 2])
    return left.item(), right.item(), mine.item(), where, dist.get_process_group_ranks(own)


def too_early():
    one = torch.ones(1)
    work = dist.all_reduce(one, async_op=True)
    time.sleep(0.2)
    seen = one.item()
    work.wait()
    return seen, one.item()


def never_waits():
    dist.all_reduce(torch.ones(1), async_op=True)


def test_the_functions_of_torch_distributed_do_what_they_say_and_are_counted():
    [(notes, found), (_, pairs)] = run(collectives, messages, nodes=2)
    assert not notes.over, repr(notes.verdict())
    zero, one, two, three = ([float(r), 1.0, -float(r), 0.0] for r in range(4))
    total = [6.0, 4.0, -6.0, 0.0]
    for rank, result in enumerate(found.results):
        assert result["sum"] == total and result["max"] == [3.0, 1.0, 0.0, 0.0]
        assert result["broadcast"] == two
        assert result["gathered"] == result["list"] == zero + one + two + three
        assert result["scattered"] == result["scattered list"] == [total[rank]]
        assert (
            result["transposed"]
            == [[0.0, 1.0, 2.0, 3.0], [1.0] * 4, [0, -1, -2, -3], [0] * 4][rank]
        )
    assert found.results[1]["root"] == total and found.results[0]["root"] == zero
    collective = 2 * 24 + 2 * 48 + 2 * 12 + 12  # all-reduces, gathers, scatters, all-to-all
    assert found.sent()[1] == collective + wire_bytes("broadcast", 16, 4, 1, 2)
    assert found.sent()[3] == collective + 16 + wire_bytes("broadcast", 16, 4, 3, 2)
    for rank, (left, right, pair, where, members) in enumerate(pairs.results):
        assert (left, right) == ((rank - 1) % 4, (rank + 1) % 4)
        assert pair == (1.0 if rank < 2 else 5.0)
        assert where == (rank % 2, 2, -1) and members == ([0, 1] if rank < 2 else [2, 3])
    assert pairs.sent(level="inter") == [4] * 4 and pairs.sent(level="intra") == [8] * 4


def by_other_names():
    """Functions that were imported, in a thread, and an operation that few use."""
    from torch.distributed import ReduceOp, all_gather_object, get_rank
    from torch.distributed.distributed_c10d import all_reduce

    two, names = torch.full((1,), 2.0), [None, None]
    thread = threading.Thread(target=all_reduce, args=(two, ReduceOp.PRODUCT))
    thread.start()
    thread.join()
    all_gather_object(names, f"rank {get_rank()}")
    return two.item(), names


def asked_again():
    one = torch.ones(1)
    for _ in range(3):
        dist.all_reduce(one, group=dist.new_group([0, 1]))
        dist.isend(one, 1).wait() if dist.get_rank() == 0 else dist.irecv(one, 0).wait()
    return one.item()


def made_by_its_member():
    local = {"use_local_synchronization": True}
    return None if dist.get_rank() else dist.get_world_size(dist.new_group([0], **local))


def test_calls_are_seen_by_any_name_groups_are_kept_and_results_arrive_in_wait():
    answers = by_other_names, asked_again, made_by_its_member, too_early, never_waits
    [(notes, found), (again, groups), (_, own), (_, early), (late, _)] = run(*answers, ranks=2)
    assert not notes.over and found.results == [(4.0, ["rank 0", "rank 1"])] * 2
    assert found.report.collectives["op"].tolist() == ["all_reduce", *2 * ["all_gather"]] * 2
    assert not again.over and groups.results == [8.0, 8.0] and own.results == [1, None]
    assert early.results == [(1.0, 2.0)] * 2
    assert "rank 0 never waits for all_reduce #0" in repr(late.verdict())


def alone():
    """Calls that in a group of one send nothing at all."""
    mine, copies = torch.tensor([1.0 + dist.get_rank()]), torch.zeros(3, 1)
    own = [new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    dist.gather(mine, [copies[0]], dst=dist.get_rank(), group=own)
    dist.scatter(copies[1], [mine], src=dist.get_rank(), group=own)
    dist.all_to_all_single(copies[2], mine, [1], [1], group=own)
    return copies.tolist()


def test_calls_of_a_group_of_one_send_nothing_and_are_no_mistake():
    [(notes, found)] = run(alone, ranks=2)
    assert not notes.over, repr(notes.verdict())
    assert found.results == [[[1.0]] * 3, [[2.0]] * 3] and found.sent() == [0, 0]


def in_16_bits(watch, answer, seed):
    return watched.array(answer[0]())


def test_what_an_answer_computes_in_bfloat16_is_judged_like_any_other_number():
    [(notes, found)] = run(lambda: torch.tensor([0.1]).bfloat16(), ranks=1, work=in_16_bits)
    assert not notes.over, repr(notes.verdict())
    assert found.results == [pytest.approx([0.1], rel=1e-2)]


def functional():
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(torch.ones(1), "sum", [0, 1])


def unequal(sent, room):
    def answer():
        dist.recv(room, 0) if dist.get_rank() else dist.send(sent, 1)

    return answer


REFUSED = [
    (functional, "all_reduce is not called by a function of torch.distributed"),
    (lambda: dist.isend(torch.ones(1), 1 - dist.get_rank(), tag=3),
     "tag=3: messages of two ranks are matched in the order in which they are sent"),
    (lambda: dist.all_reduce(torch.ones(2, 2)[:, 0]),
     "all_reduce of a tensor of shape (2,): it is not contiguous in memory, as after a "
     "transpose; legal: tensor = tensor.contiguous() before the call"),
    (lambda: dist.all_reduce(torch.ones(1), async_op=True).get_future().wait(),
     ("rank 0 raised RuntimeError: a future cannot show when its call was waited for: keep "
      "the call, and call its wait()")),
    (lambda: dist.isend(torch.ones(1), dist.get_rank()), "a rank sends nothing to itself"),
    *((lambda call=call: call(torch.ones(1), None), "rank=None: no member of the group; legal: 0 ")
      for call in (dist.isend, dist.irecv)),
    (unequal(torch.ones(5), torch.ones(2, 3)),
     "rank 1 raised OrderError: recv #0 from rank 0 is for 6 elements of float32, and rank 0 sends "
     "5 elements of float32 (send #0 to rank 1)"),
    (unequal(torch.ones(90_000), torch.ones(3)),
     "recv #0 from rank 0 is for 3 elements of float32, and rank 0 sends 90,000"),
    (unequal(torch.ones(3).int(), torch.ones(3)),
     "recv #0 from rank 0 is for 3 elements of float32, and rank 0 sends 3 elements of int32"),
]  # fmt: skip


@pytest.fixture(scope="module")
def refused():
    """{answer: its notes}, of one launch."""
    answers = [answer for answer, _ in REFUSED]
    return {a: notes for a, (notes, _) in zip(answers, run(*answers, ranks=2), strict=True)}


@pytest.mark.parametrize("answer, words", REFUSED)
def test_what_is_not_counted_is_refused(refused, answer, words):
    assert words in repr(refused[answer].verdict()), repr(refused[answer].verdict())


def by_its_own_name():
    return new_group([0, 1] if dist.get_rank() else [0]) is None


@pytest.mark.parametrize("answer, words", [
    (by_its_own_name, "rank 1 makes the group [0, 1] where rank 0 makes the group [0]"),
    (lambda: dist.broadcast(torch.ones(2), src=dist.get_rank()),
     "broadcast of 2 elements of torch.float32 with root="),
])  # fmt: skip
def test_what_ranks_say_differently_is_refused(answer, words):
    """In a launch of its own: each stops the other rank."""
    [(notes, _)] = run(answer, ranks=2)
    assert words in repr(notes.verdict()), repr(notes.verdict())


def test_the_data_of_an_answer_is_decided_by_what_it_says_however_it_is_compiled(monkeypatch):
    """Every Python makes other bytecode of it: a stored verdict would read differently."""
    text = "def answer(x):\n    assert x\n    return x\n"

    def seed(text: str, file: str, *, optimize: int = 0) -> int:
        found: dict = {}
        exec(compile(text, file, "exec", optimize=optimize), found)
        return Try((found["answer"],), Notes("plain", REQUIRED)).seed

    other = text.replace("return x", "return -x")
    for file, lines in (("<a cell>", text), ("<another>", other)):
        kept = len(lines), None, lines.splitlines(True), file
        monkeypatch.setitem(linecache.cache, file, kept)
    assert seed(text, "<a cell>") == seed(text, "<a cell>", optimize=2)
    assert seed(text, "<a cell>") != seed(other, "<another>")


def test_the_data_of_a_class_is_decided_by_what_the_answer_says_not_by_what_torch_does():
    own = "    def forward(self, x):\n        return 2 * x\n"
    text = f"import torch\n\nclass First(torch.nn.Module):\n{own}\nclass Answer(First):\n    pass\n"
    assert list(tries._sources((defined(text, "Answer"),))) == [own]
