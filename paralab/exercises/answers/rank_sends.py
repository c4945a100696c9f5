"""Lab 12: bytes that a rank sends per step, axis by axis."""


def rank_sends(model, plan, rank):
    """{"tp": bytes, "pp": bytes, "dp": bytes} that `rank` sends in one step; not on the last stage.

    model   .layers .hidden .seq_len .vocab; linear layers have biases, the head is not tied
    plan    .dp .tp .pp .microbatches .microbatch_size .recompute ("none" or "full")
            .precision ("fp32": 4 bytes, "bf16": 2 bytes for activations and gradients)
    """
    ### BEGIN SOLUTION
    d, p, t, m = plan.dp, plan.pp, plan.tp, plan.microbatches
    s, h, blocks = model.seq_len, model.hidden, model.layers // p
    width = 4 if plan.precision == "fp32" else 2
    stage = rank // (d * t)
    activation = width * plan.microbatch_size * s * h

    reduces = blocks * (6 if plan.recompute == "full" else 4)
    if stage == 0:
        reduces += 1  # the embedding's rows are sharded: partial sums
    tp = m * reduces * 2 * (t - 1) * activation // t

    messages = 1 if stage == 0 else 2  # onward, and the gradient back
    pp = m * messages * activation

    matrices = 12 * h * h // t + (3 * h + 4 * h) // t  # biases of qkv and up are sharded too
    replicated = 2 * h + 4 * h  # biases of proj and down, two norms
    parameters = blocks * (matrices + replicated)
    if stage == 0:
        parameters += model.vocab * h // t + s * h
    dp = 2 * (d - 1) * width * parameters // d
    return {"tp": tp, "pp": pp, "dp": dp}
    ### END SOLUTION
