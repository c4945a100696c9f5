"""Lab 10: one training step of a GPT on a data x pipeline mesh, in plain PyTorch."""

import torch
import torch.distributed as dist


def mesh_step(stage, batches, groups, optimizer, max_norm, hidden):
    """Train one step; return the norm of the whole model's gradient before clipping, a float.

    stage      this rank's torch.nn.Module: stage(x), on the last stage stage(x, targets) -> loss.
               x is tokens (b, s) int64 on the first stage, (b, s, hidden) float32 on the others
    batches    [(tokens, targets)], m micro-batches of this data-parallel rank; the same on all
               stages of its pipeline
    groups     {"dp": ProcessGroup, "pp": ProcessGroup}; ranks of "pp" are in the order of stages
    optimizer  of stage.parameters()
    max_norm   a longer gradient is scaled down to this norm
    """
    ### BEGIN SOLUTION
    ranks = dist.get_process_group_ranks(groups["pp"])
    here = ranks.index(dist.get_rank())
    before = ranks[here - 1] if here > 0 else None
    after = ranks[here + 1] if here < len(ranks) - 1 else None
    share = len(batches) * dist.get_world_size(groups["dp"])

    optimizer.zero_grad()
    kept = []
    for tokens, targets in batches:  # GPipe: all forwards, then all backwards
        x = tokens
        if before is not None:
            x = torch.empty(*tokens.shape, hidden, device=tokens.device)
            dist.recv(x, before, group=groups["pp"])
            x.requires_grad_()
        if after is None:
            y = stage(x, targets) / share
        else:
            y = stage(x)
            dist.send(y.detach(), after, group=groups["pp"])
        kept.append((x, y))
    for x, y in kept:
        if after is None:
            y.backward()
        else:
            gradient = torch.empty_like(y)
            dist.recv(gradient, after, group=groups["pp"])
            y.backward(gradient)
        if before is not None:
            dist.send(x.grad, before, group=groups["pp"])

    gradients = [parameter.grad for parameter in stage.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=groups["dp"])  # a sum of shares: the mean
    square = flat.square().sum()
    dist.all_reduce(square, group=groups["pp"])  # stages have different parameters
    norm = square.sqrt().item()
    flat *= min(1.0, max_norm / (norm + 1e-6))
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
    optimizer.step()
    return norm
    ### END SOLUTION
