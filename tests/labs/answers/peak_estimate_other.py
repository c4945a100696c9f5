"""Lab 00's exercise, another way: a dictionary of moments, as fractions of what forward saves."""


def moments(model, batch, microbatches):
    """{moment: bytes alive}: what is saved by then, temporary tensors, gradients."""
    h, tokens = model.hidden, batch * model.seq_len
    block, embedding = 12 * h**2 + 13 * h, model.vocab * h
    psi = model.layers * block + embedding + model.seq_len * h + 2 * h
    scores = 4 * tokens * model.seq_len * model.heads
    blocks = model.layers * (64 * tokens * h + scores)
    logits = 4 * tokens * model.vocab
    early = {
        "output": (blocks + 8 * tokens * h + 2 * logits, embedding),
        "MLP": (blocks + 20 * tokens * h, embedding + block),
        "scores": (blocks + 2 * scores - 40 * tokens * h, embedding + block),
    }
    found = {"lookup": 16 * psi + 4 * embedding}
    for moment, (alive, gradients) in early.items():
        found[moment] = 12 * psi + alive + 4 * (psi if microbatches > 1 else gradients)
    return found


def peak_by_moments(model, batch, microbatches):
    return max(moments(model, batch, microbatches).values())
