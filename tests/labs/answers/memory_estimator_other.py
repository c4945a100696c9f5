"""Lab 06, a second estimator: a list of what is there, and sums over it."""

import math
from collections import defaultdict


def my_estimate(spec, b, n, zero_stage, precision):
    short = precision != "fp32"
    units = defaultdict(int)
    for name, shape in spec.parameter_shapes().items():
        first, second = name.split(".")[:2]
        by_unit = f"blocks {second}" if first == "blocks" else first
        units[(name, "model", "model", by_unit)[zero_stage]] += math.prod(shape)
    parts = [math.ceil(size / n) if zero_stage else size for size in units.values()]
    copies = n if zero_stage in (1, 2) else 1  # parts that parameters have

    bsh, bs = b * spec.seq_len * spec.hidden, b * spec.seq_len
    elements = [2 * bsh + 2 * bs]  # the head's norm and product
    for _ in range(spec.layers):
        elements += [bsh + 2 * bs, bsh]  # first norm; input of query, key and value
        elements += [3 * bsh, spec.heads * bs * spec.seq_len, bsh]  # attention, projection
        elements += [bsh + 2 * bs, bsh, 4 * bsh, 4 * bsh]  # second norm, up, GELU, down
    fixed = 8 * bs + 8 * bs + 4 * bs * spec.vocab  # tokens, targets, probabilities
    width = 2 if short else 4
    return {
        "parameters": width * copies * sum(parts),
        "gradients": width * sum(parts),
        "optimizer": sum((12 if short else 8) * part + 4 for part in parts),
        "activations": width * sum(elements) + fixed,
    }
