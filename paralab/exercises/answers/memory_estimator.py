"""Lab 06: the bytes of a training step by category, right to the byte."""


def my_estimate(spec, b, n, zero_stage, precision):
    """{"parameters", "gradients", "optimizer", "activations"}: bytes on one of n ranks, ints.

    spec: a pl.ModelSpec: layers, hidden, heads, seq_len, vocab, parameter_shapes() -> {name: shape}
    b: samples per micro-batch; n: data-parallel ranks; zero_stage: 0, 1, 2 or 3
    precision: "fp32", or "bf16" (with master weights in fp32)
    """
    ### BEGIN SOLUTION
    import math

    w = 4 if precision == "fp32" else 2
    s, h = spec.seq_len, spec.hidden

    # Units: what is padded to n equal parts together. Without ZeRO every tensor is one.
    sizes = {}
    for name, shape in spec.parameter_shapes().items():
        part, place = name.split(".")[:2]
        block = f"{part}.{place}" if part == "blocks" else part
        unit = {0: name, 1: "all", 2: "all", 3: block}[zero_stage]
        sizes[unit] = sizes.get(unit, 0) + math.prod(shape)
    psi = sum(sizes.values())
    part = sum(-(-size // n) for size in sizes.values()) if zero_stage else psi
    whole = n * part if zero_stage else psi

    per_parameter = 8 if precision == "fp32" else 12  # moments; and master weights
    states = {
        "parameters": w * (part if zero_stage == 3 else whole),
        "gradients": w * part,
        "optimizer": per_parameter * part + 4 * len(sizes),
    }

    block = 16 * w * b * s * h + w * spec.heads * b * s * s + 4 * w * b * s
    tokens = 8 * b * s  # of the embedding
    norm = w * b * s * h + 2 * w * b * s
    head = norm + w * b * s * h
    loss = 4 * b * s * spec.vocab + 8 * b * s  # probabilities in fp32, targets
    return states | {"activations": tokens + spec.layers * block + head + loss}
    ### END SOLUTION
