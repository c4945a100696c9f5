"""Answers to the exercises that are wrong, each in a way that somebody would be wrong.

A checker that lets one of them pass is broken. Ranks import this module, so it imports nothing.
"""

from __future__ import annotations

import math


# ---- lab 00: model_states, devices_needed --------------------------------------------------------
def states(model, recipe):
    return {state: model.num_params * size for state, size in recipe.items()}


def devices(model, recipe, memory_gb):
    return math.ceil(sum(states(model, recipe).values()) / (memory_gb * 10**9))


def states_without_master(model, recipe):
    return {state: size for state, size in states(model, recipe).items() if state != "master"}


def states_head_twice(model, recipe):
    count = model.num_params + (model.vocab * model.hidden if model.tied else 0)
    return {state: count * size for state, size in recipe.items()}


def states_head_never(model, recipe):
    count = model.num_params - (0 if model.tied else model.vocab * model.hidden)
    return {state: count * size for state, size in recipe.items()}


def states_blocks_only(model, recipe):
    count = 12 * model.layers * model.hidden**2
    return {state: count * size for state, size in recipe.items()}


def states_without_embeddings(model, recipe):
    blocks = model.layers * (12 * model.hidden**2 + 13 * model.hidden)
    return {state: blocks * size for state, size in recipe.items()}


def states_in_gb(model, recipe):
    return {state: size / 1e9 for state, size in states(model, recipe).items()}


def states_always_sixteen(model, recipe):
    share = model.num_params * 16 / len(recipe)
    return dict.fromkeys(recipe, share)


def states_summed(model, recipe):
    return sum(states(model, recipe).values())


def states_raises(model, recipe):
    return {state: model.parameters * size for state, size in recipe.items()}


def states_nothing(model, recipe):
    return None


def devices_gib(model, recipe, memory_gb):
    return math.ceil(sum(states(model, recipe).values()) / (memory_gb * 2**30))


def devices_of_bytes(model, recipe, memory_gb):
    return math.ceil(sum(states(model, recipe).values()) / memory_gb)


def devices_floor(model, recipe, memory_gb):
    return sum(states(model, recipe).values()) // (memory_gb * 10**9)


def devices_round(model, recipe, memory_gb):
    return round(sum(states(model, recipe).values()) / (memory_gb * 10**9))


def devices_one_more(model, recipe, memory_gb):
    return devices(model, recipe, memory_gb) + 1


def devices_fraction(model, recipe, memory_gb):
    return sum(states(model, recipe).values()) / (memory_gb * 10**9)


def devices_weights_only(model, recipe, memory_gb):
    return math.ceil(model.num_params * 2 / (memory_gb * 10**9))


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


def ring_to_the_left(group, tensor):
    """A right answer, the other way round."""
    n, r, left, right, chunks = _around(group, tensor)
    for step in range(n - 1):
        parts = [("send", chunks[(r + 1 + step) % n], left)]
        group.exchange([*parts, ("recv", chunks[(r + 2 + step) % n], right)]).wait()


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


def ring_by_collective(group, tensor):
    n, r, _, _, chunks = _around(group, tensor)
    gathered = tensor.new_empty(tensor.shape)
    group.all_gather(gathered, chunks[(r + 1) % n].clone()).wait()
    tensor.copy_(gathered.roll(gathered.numel() // n))


def ring_plain(group, tensor):
    """With the functions of torch.distributed."""
    import torch.distributed as dist

    n, r, _, _, chunks = _around(group, tensor)
    for owner in range(n):
        dist.broadcast(chunks[(owner + 1) % n], owner)


# ---- lab 04: a schedule --------------------------------------------------------------------------
def _one_f_one_b(pp, m, warmup):
    """1F1B as text, with ``warmup(rank)`` forwards before the first pair."""
    schedule = []
    for rank in range(pp):
        first = min(warmup(rank), m)
        row = [f"{rank}F{i}" for i in range(first)]
        for i in range(m):
            row += [f"{rank}F{first + i}"] * (first + i < m) + [f"{rank}B{i}"]
        schedule.append(row)
    return schedule


def schedule_good(pp, microbatches):
    """A right answer, one text per rank."""
    lists = _one_f_one_b(pp, microbatches, lambda rank: pp - rank - 1)
    return [" ".join(row) for row in lists]


def schedule_halves(pp, microbatches):
    """A right answer, and a faster one: rank r's weight halves wait for r backwards."""
    schedule = []
    for rank, row in enumerate(_one_f_one_b(pp, microbatches, lambda rank: pp - rank - 1)):
        split = []
        for action in row:
            split.append(action.replace("B", "I"))
            done = int(action.partition("B")[2] or -1) - rank
            split += [f"{rank}W{done}"] * (done >= 0)
        late = range(max(microbatches - rank, 0), microbatches)
        schedule.append(split + [f"{rank}W{i}" for i in late])
    return schedule


def schedule_gpipe(pp, microbatches):
    return [[f"{r}{kind}{i}" for kind in "FB" for i in range(microbatches)] for r in range(pp)]


def schedule_naive(pp, microbatches):
    return [[f"{r}{kind}{i}" for i in range(microbatches) for kind in "FB"] for r in range(pp)]


def schedule_short_warmup(pp, microbatches):
    return _one_f_one_b(pp, microbatches, lambda rank: max(pp - rank - 2, 0))


def schedule_long_warmup(pp, microbatches):
    return _one_f_one_b(pp, microbatches, lambda rank: pp - rank)


def schedule_upside_down(pp, microbatches):
    """The warm-up counted from the wrong end: every list is fine, together they stand still."""
    return _one_f_one_b(pp, microbatches, lambda rank: rank)


def schedule_crossed(pp, microbatches):
    """Two ranks that each wait for the other."""
    lists = _one_f_one_b(pp, microbatches, lambda rank: pp - rank - 1)
    if microbatches > 1:
        row = lists[0]
        row.remove("0B0")
        row.insert(row.index("0F1"), "0B0")
    return lists


def schedule_drops_a_backward(pp, microbatches):
    lists = _one_f_one_b(pp, microbatches, lambda rank: pp - rank - 1)
    lists[1].remove(f"1B{microbatches - 1}")
    return lists


def schedule_twice(pp, microbatches):
    lists = _one_f_one_b(pp, microbatches, lambda rank: pp - rank - 1)
    lists[0].append("0B0")
    return lists


def schedule_backward_first(pp, microbatches):
    lists = _one_f_one_b(pp, microbatches, lambda rank: pp - rank - 1)
    last = lists[-1]
    last[0], last[1] = last[1], last[0]
    return lists


def schedule_other_rank(pp, microbatches):
    lists = _one_f_one_b(pp, microbatches, lambda rank: pp - rank - 1)
    lists[0].append(lists[1].pop())
    return lists


def schedule_forgets_a_half(pp, microbatches):
    return [row[:-1] for row in schedule_halves(pp, microbatches)]


def schedule_only_six(pp, microbatches):
    return _one_f_one_b(pp, 6, lambda rank: pp - rank - 1)


def schedule_only_four_ranks(pp, microbatches):
    return _one_f_one_b(pp, microbatches, lambda rank: max(3 - rank, 0))


def schedule_one_list(pp, microbatches):
    return [action for row in schedule_gpipe(pp, microbatches) for action in row]


def schedule_tuples(pp, microbatches):
    return [[("F", i) for i in range(microbatches)] for _ in range(pp)]


def schedule_nothing(pp, microbatches):
    return None


def schedule_raises(pp, microbatches):
    return [[f"{rank}F{i}" for i in range(microbatches)][99] for rank in range(pp)]


def schedule_of_p_alone(pp):
    return []
