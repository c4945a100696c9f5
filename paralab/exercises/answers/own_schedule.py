"""Lab 04's exercise: a pipeline schedule of one's own."""


def my_schedule(pp, microbatches):
    """One list per rank; rank r has stage r. "2F0" is stage 2, forward, micro-batch 0."""
    schedule = []
    for rank in range(pp):
        actions = []
        ### BEGIN SOLUTION
        backward = 0  # the next one
        for forward in range(microbatches):
            actions.append(f"{rank}F{forward}")
            if forward >= pp - rank - 1:  # enough are in flight: one forward, one backward
                actions.append(f"{rank}B{backward}")
                backward += 1
        actions += [f"{rank}B{i}" for i in range(backward, microbatches)]
        ### END SOLUTION
        schedule.append(actions)
    return schedule
