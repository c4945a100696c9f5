"""Lab 04's last exercise: three targets for a schedule with a split backward."""


def delayed(pp, microbatches, ahead, late):
    """1F1B after ahead(rank) forwards, with each weight half late(rank) backwards late."""
    ### BEGIN SOLUTION
    ### STUB: raise NotImplementedError("your turn: a helper for the first two, if you want one")
    lists = []
    for rank in range(pp):
        warmup, wait = min(ahead(rank), microbatches), late(rank)
        row = [f"{rank}F{i}" for i in range(warmup)]
        for i in range(microbatches):
            if warmup + i < microbatches:
                row.append(f"{rank}F{warmup + i}")
            row.append(f"{rank}I{i}")
            if i >= wait:
                row.append(f"{rank}W{i - wait}")
        row += [f"{rank}W{i}" for i in range(max(microbatches - wait, 0), microbatches)]
        lists.append(row)
    return lists
    ### END SOLUTION


def first(pp, microbatches):
    """The step of ZB-H1, with at most pp micro-batches alive on each rank."""
    ### BEGIN SOLUTION
    return delayed(pp, microbatches, lambda rank: pp - rank - 1, lambda rank: rank)
    ### END SOLUTION


def second(pp, microbatches):
    """No rank idle between its first and last action, with at most 2 pp - 1 alive."""
    ### BEGIN SOLUTION
    return delayed(pp, microbatches, lambda rank: 2 * (pp - rank - 1), lambda rank: 2 * rank)
    ### END SOLUTION


def third(pp, microbatches):
    """The step of 1F1B, with at most (2 pp + 1) / 3 alive, rounded up."""
    ### BEGIN SOLUTION
    limit = -(-(2 * pp + 1) // 3)
    lists = [[] for _ in range(pp)]
    count = [dict.fromkeys("FIW", 0) for _ in range(pp)]  # done by each rank
    while any(done["W"] < microbatches for done in count):
        turn = []
        for rank, done in enumerate(count):
            came_down = rank == 0 or count[rank - 1]["F"] > done["F"]
            came_back = done["F"] if rank == pp - 1 else count[rank + 1]["I"]
            if done["I"] < min(came_back, done["F"]):
                turn.append((rank, "I"))
            elif done["F"] < microbatches and came_down and done["F"] - done["W"] < limit:
                turn.append((rank, "F"))
            elif done["W"] < done["I"]:
                turn.append((rank, "W"))
        for rank, kind in turn:  # 10 ms in which all of these run
            lists[rank].append(f"{rank}{kind}{count[rank][kind]}")
            count[rank][kind] += 1
    return lists
    ### END SOLUTION
