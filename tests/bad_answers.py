"""Answers to the exercises that are wrong, each in a way that somebody would be wrong.

A checker that lets one of them pass is broken. Ranks import this module, so it imports nothing.
"""

from __future__ import annotations


# ---- lab 01: ring_all_gather ---------------------------------------------------------------------
def _around(group, tensor):
    """(n, r, left, right, chunks) of this rank."""
    n, r = group.size, group.index
    return n, r, group.ranks[(r - 1) % n], group.ranks[(r + 1) % n], tensor.chunk(n)


def ring_copied(group, tensor):
    """A right answer, with a chunk of memory that it does not need."""
    n, r, left, right, chunks = _around(group, tensor)
    leaving, arriving = chunks[(r + 1) % n], tensor.new_empty(len(chunks[0]))
    for step in range(n - 1):
        group.exchange([("send", leaving, right), ("recv", arriving, left)]).wait()
        leaving = chunks[(r - step) % n]
        leaving.copy_(arriving)


def ring_through_root(group, tensor):
    n, r, _, _, chunks = _around(group, tensor)
    if r:
        group.send(chunks[(r + 1) % n], to=0).wait()
        group.recv(tensor, source=0).wait()
        return
    for other in range(1, n):
        group.recv(chunks[(other + 1) % n], source=other).wait()
    for other in range(1, n):
        group.send(tensor, to=other).wait()


def ring_direct(group, tensor):
    """Everybody to everybody: the same bytes, not on the ring."""
    n, r, _, _, chunks = _around(group, tensor)
    parts = []
    for other in range(n):
        if other != r:
            parts += [("send", chunks[(r + 1) % n], other)]
            parts += [("recv", chunks[(other + 1) % n], other)]
    group.exchange(parts).wait()


def ring_by_collective(group, tensor, **how):
    n, r, _, _, chunks = _around(group, tensor)
    gathered = tensor.new_empty(tensor.shape)
    group.all_gather(gathered, chunks[(r + 1) % n].clone(), **how).wait()
    tensor.copy_(gathered.roll(gathered.numel() // n))


def ring_plain(group, tensor):
    """With the functions of torch.distributed."""
    import torch.distributed as dist

    n, r, _, _, chunks = _around(group, tensor)
    for owner in range(n):
        dist.broadcast(chunks[(owner + 1) % n], owner)


# ---- lab 04: a schedule --------------------------------------------------------------------------
def one_f_one_b(pp, m, warmup=None):
    """1F1B as text, with ``warmup(rank)`` forwards before the first pair."""
    schedule = []
    for rank in range(pp):
        first = min(warmup(rank) if warmup else pp - rank - 1, m)
        row = [f"{rank}F{i}" for i in range(first)]
        for i in range(m):
            row += [f"{rank}F{first + i}"] * (first + i < m) + [f"{rank}B{i}"]
        schedule.append(row)
    return schedule


def schedule_good(pp, microbatches):
    """A right answer, one text per rank."""
    return [" ".join(row) for row in one_f_one_b(pp, microbatches)]


def schedule_halves(pp, microbatches):
    """A right answer, and a faster one: rank r's weight halves wait for r backwards."""
    schedule = []
    for rank, row in enumerate(one_f_one_b(pp, microbatches)):
        split = []
        for action in row:
            split.append(action.replace("B", "I"))
            done = int(action.partition("B")[2] or -1) - rank
            split += [f"{rank}W{done}"] * (done >= 0)
        late = range(max(microbatches - rank, 0), microbatches)
        schedule.append(split + [f"{rank}W{i}" for i in late])
    return schedule


def schedule_forgets_a_half(pp, microbatches):
    return [row[:-1] for row in schedule_halves(pp, microbatches)]


def schedule_upside_down(pp, microbatches):
    """The warm-up counted from the wrong end: every list is fine, together they stand still."""
    return one_f_one_b(pp, microbatches, lambda rank: rank)


def schedule_crossed(pp, microbatches):
    """Two ranks that each wait for the other."""
    lists = one_f_one_b(pp, microbatches)
    if microbatches > 1:
        row = lists[0]
        row.remove("0B0")
        row.insert(row.index("0F1"), "0B0")
    return lists
