"""Answers to lab 00's exercises: right ones, and wrong ones as people write them.

Ranks import this module.
"""

from __future__ import annotations


def clipped(parameters, clip_norm):
    import torch

    return torch.nn.utils.clip_grad_norm_(parameters, clip_norm).item()


def by_autograd_grad(model, optimizer, microbatches, clip_norm):
    """Unusual and right: .grad is filled by hand, in place, with tensors for numbers."""
    import torch

    parameters = list(model.parameters())
    added = [torch.zeros_like(p) for p in parameters]
    count, total = 0, torch.zeros(())
    for tokens, targets in microbatches:
        loss = model(tokens, targets)
        n = len(tokens)
        for old, new in zip(added, torch.autograd.grad(loss, parameters), strict=True):
            old.mul_(count / (count + n)).add_(new, alpha=n / (count + n))  # a running mean
        total, count = total + n * loss.detach(), count + n
    norm = torch.cat([g.flatten() for g in added]).norm()
    for p, g in zip(parameters, added, strict=True):
        p.grad = g * torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
    optimizer.step()
    return total / count, norm


def clips_each_microbatch(model, optimizer, microbatches, clip_norm):
    import torch

    samples = sum(len(tokens) for tokens, _ in microbatches)
    parameters = list(model.parameters())
    added, mean = [torch.zeros_like(p) for p in parameters], 0.0
    for tokens, targets in microbatches:
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        clipped(parameters, clip_norm)
        for total, p in zip(added, parameters, strict=True):
            total += p.grad * (len(tokens) / samples)
        mean += loss.item() * len(tokens) / samples
    for total, p in zip(added, parameters, strict=True):
        p.grad = total
    norm = clipped(parameters, 1e9)
    optimizer.step()
    return mean, norm


def without_clip(model, optimizer, microbatches):
    return 0.0, 0.0


# ---- peak_estimate -------------------------------------------------------------------------------
def psi_of(model):
    block = 12 * model.hidden**2 + 13 * model.hidden
    outside = (model.vocab + model.seq_len + 2) * model.hidden
    return model.layers * block + outside


def blocks_of(model, b, linear=64, squared=4):
    sbh = model.seq_len * b * model.hidden
    return model.layers * (linear * sbh + squared * model.heads * model.seq_len**2 * b)


def outside_of(model, b):
    return model.seq_len * b * (8 * model.hidden + 4 * model.vocab)


def estimate(model, batch, microbatches, *, leave_out=(), every=False):
    """A right one, of which moments can be left out."""
    psi, tokens = psi_of(model), batch * model.seq_len
    sbh, scores = tokens * model.hidden, model.heads * model.seq_len * tokens
    head, block = model.vocab * model.hidden, 12 * model.hidden**2 + 13 * model.hidden
    blocks = 12 * psi + blocks_of(model, batch)
    later = microbatches > 1 or every
    moments = {
        "output": blocks + outside_of(model, batch) + 4 * tokens * model.vocab
        + 4 * (psi if later else head),
        "mlp": blocks + 20 * sbh + 4 * (psi if later else head + block),
        "scores": blocks + 8 * scores - 40 * sbh + 4 * (psi if later else head + block),
        "update": 16 * psi,
    }  # fmt: skip
    return max(value for name, value in moments.items() if name not in leave_out)


def four_percent_more(model, batch, microbatches):
    """Right: within 5 %."""
    return round(1.02 * estimate(model, batch, microbatches))


def states_only(model, batch, microbatches):
    return 16 * psi_of(model)


def states_and_all(model, batch, microbatches):
    return 16 * psi_of(model) + blocks_of(model, batch) + outside_of(model, batch)


def sixteen_bits(model, batch, microbatches):
    return 16 * psi_of(model) + blocks_of(model, batch, 34, 5)


def without_output(model, batch, microbatches):
    return estimate(model, batch, microbatches, leave_out=("output",))


def without_scores(model, batch, microbatches):
    return estimate(model, batch, microbatches, leave_out=("scores", "mlp"))


def without_update(model, batch, microbatches):
    return estimate(model, batch, microbatches, leave_out=("update",))


def always_one(model, batch, microbatches):
    return estimate(model, batch, 1)


def always_several(model, batch, microbatches):
    return estimate(model, batch, 2)


def multiplied(model, batch, microbatches):
    return microbatches * estimate(model, batch, microbatches)


def in_gb(model, batch, microbatches):
    return estimate(model, batch, microbatches) / 1e9


def in_mib(model, batch, microbatches):
    return estimate(model, batch, microbatches) / 2**20


def as_text(model, batch, microbatches):
    return f"{estimate(model, batch, microbatches) / 1e6:.0f} MB"


def by_asking(model, batch, microbatches):
    import paralab as pl

    spec = pl.ModelSpec(**vars(model), attention="explicit")
    plan = pl.Plan(microbatch_size=batch, microbatches=microbatches)
    return sum(pl.program(spec, plan).peak().values())


def asks_for_more(model, batch, microbatches):
    return 16 * model.num_params


def weights_only(model, batch, microbatches):
    return 12 * psi_of(model) + blocks_of(model, batch)


def never_ends(model, batch, microbatches):
    while True:
        batch += 1
