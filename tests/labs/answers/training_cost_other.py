"""Lab 11's exercise product by product: what one token takes, and what that makes of the rest."""


def per_token(model, blocks, head):
    """FLOPs of one token that takes so many times the forward of the blocks and of the head."""
    s, h = model.seq_len, model.hidden
    matrices = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]  # qkv, proj, up, down
    matrices += [(h, s), (s, h)]  # a token's query with all keys, its scores with all values
    block = sum(2 * rows * columns for rows, columns in matrices)
    return blocks * model.layers * block + head * 2 * h * model.vocab


def step_flops(model, samples):
    return samples * model.seq_len * per_token(model, blocks=4, head=3)


def training_days(model, tokens, devices, flops):
    seconds = tokens * per_token(model, blocks=4, head=3) / (devices * flops)
    return seconds / (24 * 60 * 60)


def utilisation(model, samples, seconds, devices, peak):
    tokens_per_second = samples * model.seq_len / seconds
    could = devices * peak / tokens_per_second  # FLOPs that the devices could spend on a token
    return per_token(model, blocks=3, head=3) / could, per_token(model, blocks=4, head=3) / could
