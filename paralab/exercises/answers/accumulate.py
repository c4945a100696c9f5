"""Lab 00's exercise: one training step over micro-batches."""

import torch
from torch import Tensor, nn


def accumulate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: list[tuple[Tensor, Tensor]],  # tokens, targets: (b, s) int64, b may differ
    clip_norm: float,
) -> tuple[float, float]:
    """One update with the mean gradient over all samples; (mean loss, norm before clipping)."""
    ### BEGIN SOLUTION
    samples = sum(len(tokens) for tokens, _ in microbatches)
    optimizer.zero_grad()
    mean = 0.0
    for tokens, targets in microbatches:
        loss = model(tokens, targets) * (len(tokens) / samples)  # its share of the mean
        loss.backward()  # adds to .grad, and frees this micro-batch's activations
        mean = mean + loss.detach()
    gradients = [p.grad for p in model.parameters()]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    if norm > clip_norm:
        for gradient in gradients:
            gradient.mul_(clip_norm / (norm + 1e-6))
    optimizer.step()
    return float(mean), norm
    ### END SOLUTION
