"""Lab 00's exercise: the peak of a training step, by formulas."""


def peak_estimate(model, batch: int, microbatches: int) -> float:
    """Bytes at the peak of a step; model has layers, hidden, heads, seq_len and vocab."""
    ### BEGIN SOLUTION
    L, h, s, V, b = model.layers, model.hidden, model.seq_len, model.vocab, batch
    in_block = 12 * h**2 + 13 * h  # parameters
    psi = L * in_block + V * h + s * h + 2 * h
    sbh, scores, logits = s * b * h, model.heads * s**2 * b, s * b * V  # elements
    saved = L * (64 * sbh + 4 * scores)  # bytes, by all blocks
    always = 12 * psi  # weights and moments
    later = microbatches > 1  # then all gradients are there
    at_output = (
        always
        + saved
        + (8 * sbh + 4 * logits)  # saved outside of the blocks
        + 4 * logits  # gradient of the logits
        + 4 * (psi if later else V * h)
    )
    in_last_block = always + saved + 4 * (psi if later else V * h + in_block)
    at_mlp = in_last_block + (36 - 16) * sbh
    at_scores = in_last_block + 8 * scores - 40 * sbh
    at_lookup = 16 * psi + 4 * V * h  # all gradients; that of the lookup is not added yet
    return max(at_output, at_mlp, at_scores, at_lookup)
    ### END SOLUTION
