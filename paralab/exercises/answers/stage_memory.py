"""Lab 12's warm-up: what a rank of one pipeline stage holds."""


def stage_parameters(model, plan, stage) -> int:
    """Parameters (a count) on one rank of pipeline stage `stage`, 0 to plan.pp - 1.

    You may use model.layers, .hidden, .vocab, .seq_len and plan.tp, .pp.
    """
    ### BEGIN SOLUTION
    h, t = model.hidden, plan.tp
    block = 12 * h * h // t + 7 * h // t + 6 * h  # weights, sharded biases; what is replicated
    count = model.layers // plan.pp * block
    if stage == 0:
        count += model.vocab * h // t + model.seq_len * h
    if stage == plan.pp - 1:
        count += model.vocab * h // t + 2 * h
    return count
    ### END SOLUTION


def in_flight(model, plan, stage) -> int:
    """Micro-batches whose activations a rank of the stage holds at most, under 1F1B.

    You may use plan.pp and plan.microbatches.
    """
    ### BEGIN SOLUTION
    return min(plan.pp - stage, plan.microbatches)
    ### END SOLUTION
