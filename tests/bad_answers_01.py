"""Answers to lab 01's exercises in plain PyTorch: right ones, and wrong ones as people write them.

Ranks import this module. ``ring`` is right; its arguments change one thing.
"""

from __future__ import annotations


def ring(tensor, *, own=0, add=True, steps=None, second=True, wait=True, copy=False, whole=False):
    import torch
    import torch.distributed as dist

    n, r = dist.get_world_size(), dist.get_rank()
    chunks = list(tensor.tensor_split(n))
    left, right = (r - 1) % n, (r + 1) % n
    kept = tensor.clone() if copy else None
    steps = n - 1 if steps is None else steps(n)

    def exchange(leaving, arriving):
        pair = [dist.P2POp(dist.isend, leaving, right), dist.P2POp(dist.irecv, arriving, left)]
        for work in dist.batch_isend_irecv(pair):
            if wait:
                work.wait()

    for step in range(steps):
        mine = chunks[(r - step - 1 + own) % n]
        got = torch.empty_like(mine)
        exchange(chunks[(r - step + own) % n], got)
        if add:
            mine += got
        else:
            mine.copy_(got)
        del got
    for step in range(steps if second else 0):
        exchange(chunks[(r + 1 - step + own) % n], chunks[(r - step + own) % n])
    if copy:
        kept.zero_()


def owns_its_number(tensor):
    """Right: rank r ends with chunk r, not r + 1."""
    ring(tensor, own=-1)


def gathers_to_the_left(tensor):
    """Right and unusual: complete sums travel the other way round."""
    import torch.distributed as dist

    n, r = dist.get_world_size(), dist.get_rank()
    ring(tensor, second=False)
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        works = [
            dist.irecv(chunks[(r + 2 + step) % n], (r + 1) % n),
            dist.isend(chunks[(r + 1 + step) % n], (r - 1) % n),
        ]
        for work in works:
            work.wait()


def one_rank_receives_first(tensor):
    """Calls that block, in an order in which one rank always receives: they come one by one."""
    import torch
    import torch.distributed as dist

    n, r = dist.get_world_size(), dist.get_rank()
    chunks = tensor.tensor_split(n)
    buffer = torch.empty_like(chunks[0])
    for step in range(2 * n - 2):
        half = step >= n - 1
        t = step - (n - 1) * half
        leaving, arriving = chunks[(r + half - t) % n], chunks[(r + half - t - 1) % n]
        into = arriving if half else buffer[: arriving.numel()]
        first = r > 0  # one rank receives first, so the ring cannot stand still
        if first:
            sent = dist.isend(leaving, (r + 1) % n)
        dist.recv(into, (r - 1) % n)
        if not first:
            sent = dist.isend(leaving, (r + 1) % n)
        sent.wait()
        if not half:
            arriving.add_(into)


def by_collective(tensor):
    import torch.distributed as dist

    dist.all_reduce(tensor)


def imported_by_name(tensor):
    from torch.distributed.distributed_c10d import all_reduce

    all_reduce(tensor)


def through_rank_0(tensor):
    import torch
    import torch.distributed as dist

    n, r = dist.get_world_size(), dist.get_rank()
    if r:
        dist.isend(tensor, 0).wait()
        dist.irecv(tensor, 0).wait()
        return
    got = torch.empty_like(tensor)
    for other in range(1, n):
        dist.recv(got, other)
        tensor += got
    for other in range(1, n):
        dist.send(tensor, other)


def whole_tensor(tensor):
    import torch
    import torch.distributed as dist

    n, r = dist.get_world_size(), dist.get_rank()
    passing = tensor.clone()
    for _ in range(n - 1):
        got = torch.empty_like(tensor)
        sent = dist.isend(passing, (r + 1) % n)
        dist.recv(got, (r - 1) % n)
        sent.wait()
        tensor += got
        passing = got


def half(tensor):
    ring(tensor, second=False)


def one_step_short(tensor):
    ring(tensor, steps=lambda n: n - 2)


def does_not_add(tensor):
    ring(tensor, add=False)


def never_waits(tensor):
    ring(tensor, wait=False)


def a_copy(tensor):
    ring(tensor, copy=True)


def the_mean(tensor):
    import torch.distributed as dist

    ring(tensor)
    tensor /= dist.get_world_size()


def not_in_place(tensor):
    other = tensor.clone()
    ring(other)
    return other


def equal_chunks_only(tensor):
    """Drops what N does not divide."""
    import torch.distributed as dist

    n = dist.get_world_size()
    ring(tensor[: tensor.numel() // n * n])


def padded(tensor):
    """Pads a copy to N equal chunks."""
    import torch
    import torch.distributed as dist

    n, size = dist.get_world_size(), tensor.numel()
    whole = torch.cat([tensor, tensor.new_zeros(-size % n)])
    ring(whole)
    tensor.copy_(whole[:size])


def torch_chunk(tensor):
    """chunk() makes the last one shorter by more than one element; and the buffers fit all."""
    import torch.distributed as dist

    n, r = dist.get_world_size(), dist.get_rank()
    chunks, buffers = tensor.chunk(n), [None] * n
    for step in range(n - 1):
        mine = chunks[(r - step - 1) % n]
        buffers[step] = mine.new_empty(mine.numel())
        sent = dist.isend(chunks[(r - step) % n], (r + 1) % n)
        dist.recv(buffers[step], (r - 1) % n)
        sent.wait()
        mine += buffers[step]
    for step in range(n - 1):
        sent = dist.isend(chunks[(r + 1 - step) % n], (r + 1) % n)
        dist.recv(chunks[(r - step) % n], (r - 1) % n)
        sent.wait()


def in_pieces(tensor):
    """Right, but each chunk goes as ten messages that wait for each other."""
    for piece in tensor.tensor_split(10):
        ring(piece)


def gathers_twice(tensor):
    ring(tensor)
    import torch.distributed as dist

    n, r = dist.get_world_size(), dist.get_rank()
    chunks = tensor.tensor_split(n)
    sent = dist.isend(chunks[r], (r + 1) % n)
    dist.recv(chunks[(r - 1) % n], (r - 1) % n)
    sent.wait()


def reads_too_early(tensor):
    import torch
    import torch.distributed as dist

    n, r = dist.get_world_size(), dist.get_rank()
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        mine = chunks[(r - step - 1) % n]
        got = torch.zeros_like(mine)
        works = [dist.isend(chunks[(r - step) % n], (r + 1) % n), dist.irecv(got, (r - 1) % n)]
        mine += got
        for work in works:
            work.wait()
    for step in range(n - 1):
        sent = dist.isend(chunks[(r + 1 - step) % n], (r + 1) % n)
        dist.recv(chunks[(r - step) % n], (r - 1) % n)
        sent.wait()


def sends_first(tensor):
    import torch
    import torch.distributed as dist

    n, r = dist.get_world_size(), dist.get_rank()
    chunks = tensor.tensor_split(n)
    buffer = torch.empty_like(chunks[0])
    dist.send(chunks[r], (r + 1) % n)
    dist.recv(buffer, (r - 1) % n)


def with_a_group(group, tensor):
    ring(tensor)


def raises(tensor, *more):
    raise KeyError("chunk 7")


# ---- two levels ----------------------------------------------------------------------------------
def groups(k):
    """(of the own node, of the same place on every node)."""
    import torch.distributed as dist

    n, r = dist.get_world_size(), dist.get_rank()
    found = []
    for rows in (
        [list(range(i, i + k)) for i in range(0, n, k)],
        [list(range(i, n, k)) for i in range(k)],
    ):
        for ranks in rows:
            group = dist.new_group(ranks)
            if r in ranks:
                found.append(group)
    return found


def levels(tensor, ranks_per_node):
    import torch.distributed as dist

    inside, across = groups(ranks_per_node)
    part = tensor.new_empty(tensor.numel() // ranks_per_node)
    dist.reduce_scatter_tensor(part, tensor, group=inside)
    dist.all_reduce(part, group=across)
    dist.all_gather_into_tensor(tensor, part, group=inside)


def levels_by_views(tensor, ranks_per_node):
    """Right and unusual: the part is a view of the tensor, and lists are gathered."""
    import torch.distributed as dist

    inside, across = groups(ranks_per_node)
    parts = list(tensor.chunk(ranks_per_node))
    mine = parts[dist.get_rank() % ranks_per_node].clone()
    dist.reduce_scatter(mine, parts, group=inside)
    dist.all_reduce(mine, group=across, async_op=True).wait()
    dist.all_gather(parts, mine, group=inside)


def levels_flat(tensor, ranks_per_node):
    import torch.distributed as dist

    dist.all_reduce(tensor)


def levels_two_all_reduces(tensor, ranks_per_node):
    import torch.distributed as dist

    inside, across = groups(ranks_per_node)
    dist.all_reduce(tensor, group=inside)
    dist.all_reduce(tensor, group=across)


def levels_across_first(tensor, ranks_per_node):
    import torch.distributed as dist

    inside, across = groups(ranks_per_node)
    dist.all_reduce(tensor, group=across)
    dist.all_reduce(tensor, group=inside)


def levels_by_leaders(tensor, ranks_per_node):
    import torch.distributed as dist

    inside, across = groups(ranks_per_node)
    r, k = dist.get_rank(), ranks_per_node
    dist.reduce(tensor, dst=r - r % k, group=inside)
    if r % k == 0:
        dist.all_reduce(tensor, group=across)
    dist.broadcast(tensor, src=r - r % k, group=inside)


def levels_inside_only(tensor, ranks_per_node):
    import torch.distributed as dist

    dist.all_reduce(tensor, group=groups(ranks_per_node)[0])


def levels_without_the_middle(tensor, ranks_per_node):
    import torch.distributed as dist

    inside, _ = groups(ranks_per_node)
    part = tensor.new_empty(tensor.numel() // ranks_per_node)
    dist.reduce_scatter_tensor(part, tensor, group=inside)
    dist.all_gather_into_tensor(tensor, part, group=inside)


def levels_swapped(tensor, ranks_per_node):
    """The reduce-scatter crosses nodes, which is dear there."""
    import torch.distributed as dist

    inside, across = groups(ranks_per_node)
    part = tensor.new_empty(tensor.numel() // dist.get_world_size(across))
    dist.reduce_scatter_tensor(part, tensor, group=across)
    dist.all_reduce(part, group=inside)
    dist.all_gather_into_tensor(tensor, part, group=across)


def levels_wrong_twins(tensor, ranks_per_node):
    """The group "across" has ranks of two nodes, but of different places."""
    import torch.distributed as dist

    n, r = dist.get_world_size(), dist.get_rank()
    inside, _ = groups(ranks_per_node)
    pairs = [dist.new_group([i, n - 1 - i]) for i in range(n // 2)]
    part = tensor.new_empty(tensor.numel() // ranks_per_node)
    dist.reduce_scatter_tensor(part, tensor, group=inside)
    dist.all_reduce(part, group=pairs[min(r, n - 1 - r)])
    dist.all_gather_into_tensor(tensor, part, group=inside)


def levels_not_in_place(tensor, ranks_per_node):
    other = tensor.clone()
    levels(other, ranks_per_node)
    return other


def levels_no_wait(tensor, ranks_per_node):
    import torch.distributed as dist

    inside, across = groups(ranks_per_node)
    part = tensor.new_empty(tensor.numel() // ranks_per_node)
    dist.reduce_scatter_tensor(part, tensor, group=inside)
    work = dist.all_reduce(part, group=across, async_op=True)
    dist.all_gather_into_tensor(tensor, part, group=inside)
    work.wait()


def levels_many_copies(tensor, ranks_per_node):
    import torch

    kept = torch.cat([tensor, tensor])
    levels(tensor, ranks_per_node)
    del kept


def levels_for_two(tensor, ranks_per_node):
    """Two ranks per node, whatever is said."""
    levels(tensor, 2)
