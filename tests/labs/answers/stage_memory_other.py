"""Lab 12's warm-up, tensor by tensor."""


def stage_parameters(model, plan, stage) -> int:
    h, t = model.hidden, plan.tp
    sharded = {"qkv": (h, 3 * h), "proj": (h, h), "up": (h, 4 * h), "down": (4 * h, h)}
    weights = sum(rows * columns for rows, columns in sharded.values())
    sharded_biases, whole_biases, norms = 3 * h + 4 * h, h + h, 2 * 2 * h
    total = model.layers * ((weights + sharded_biases) // t + whole_biases + norms) // plan.pp
    embedding = model.vocab // t * h + model.seq_len * h
    head = model.vocab // t * h + 2 * h
    return total + embedding * (stage == 0) + head * (stage == plan.pp - 1)


def in_flight(model, plan, stage) -> int:
    before_first_backward = plan.pp - stage - 1
    return min(before_first_backward + 1, plan.microbatches)
