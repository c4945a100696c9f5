"""Lab 04's three targets again: 1F1B taken apart, and one rule for the others."""

from paralab.parallel.schedules import one_f_one_b


def from_1f1b(pp, microbatches):
    """Each backward becomes its input half, and the weight half of `rank` backwards before."""
    lists = []
    for rank, actions in enumerate(one_f_one_b(pp, microbatches)):
        row = []
        for _, kind, i in actions:
            row.append(f"{rank}{'I' if kind == 'B' else 'F'}{i}")
            if kind == "B" and i >= rank:
                row.append(f"{rank}W{i - rank}")
        late = range(max(microbatches - rank, 0), microbatches)
        lists.append(row + [f"{rank}W{i}" for i in late])
    return lists


def by_rule(pp, microbatches, alive, ahead):
    """alive: micro-batches on a rank; ahead: forwards that a rank may be before its backwards."""
    lists, done = [[] for _ in range(pp)], [[0, 0, 0] for _ in range(pp)]  # F, I, W of each rank
    while any(w < microbatches for *_, w in done):
        before = [tuple(row) for row in done]
        for rank, (f, i, w) in enumerate(before):
            returned = f if rank == pp - 1 else before[rank + 1][1]
            arrived = rank == 0 or before[rank - 1][0] > f
            room = f < microbatches and f - w < alive and f - i <= ahead(rank)
            runs = "I" if i < min(returned, f) else "F" if arrived and room else "W" * (w < i)
            if runs:
                at = "FIW".index(runs)
                lists[rank].append(f"{rank}{runs}{before[rank][at]}")
                done[rank][at] += 1
    return lists


def second_by_rule(pp, microbatches):
    return by_rule(pp, microbatches, 2 * pp - 1, lambda rank: 2 * (pp - rank - 1))


def third_by_rule(pp, microbatches):
    return by_rule(pp, microbatches, -(-(2 * pp + 1) // 3), lambda rank: pp)
