"""Lab 12: the bytes of a rank once more, layer by layer and in floats."""


def rank_sends(model, plan, rank):
    """Every linear layer is (rows, columns, whether tp cuts its rows)."""
    w, b = {"fp32": 4.0, "bf16": 2.0}[plan.precision], plan.microbatch_size
    s, h, t = model.seq_len, model.hidden, plan.tp
    first, blocks = rank < plan.dp * t, model.layers / plan.pp
    layers = [(3 * h, h, True), (h, h, False), (4 * h, h, True), (h, 4 * h, False)]
    psi = sum((o * i + o * column) / t + o * (not column) for o, i, column in layers) + 4 * h
    psi = blocks * psi + first * (model.vocab / t + s) * h
    calls = blocks * (6 if plan.recompute == "full" else 4) + first
    one, m = w * b * s * h, plan.microbatches
    return {
        "dp": 2 * (1 - 1 / plan.dp) * w * psi,
        "pp": m * one * (2 - first),
        "tp": m * calls * 2 * (1 - 1 / t) * one,
    }
