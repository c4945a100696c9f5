"""Lab 10's step once more: 1F1B, asynchronous messages, gradients reduced one by one.

For gloo. On NCCL a send and the receive that faces it would have to go into one batch.
"""

import torch
import torch.distributed as dist


def mesh_step(stage, batches, groups, optimizer, max_norm, hidden):
    """Train one step in the order of 1F1B: at most p - i micro-batches are in flight on stage i."""
    dp, pp = groups["dp"], groups["pp"]
    here, stages = dist.get_rank(pp), dist.get_world_size(pp)
    first, last = here == 0, here == stages - 1
    shape, flight, sent = (*batches[0][0].shape, hidden), [], []

    def forward(tokens, targets):
        x = tokens
        if not first:
            x = torch.empty(shape, device=tokens.device)
            dist.irecv(x, group=pp, group_src=here - 1).wait()
            x.requires_grad_()
        y = stage(x, targets) if last else stage(x)
        if not last:
            out = y.detach()
            sent.append(dist.isend(out, group=pp, group_dst=here + 1))
        flight.append((x, y))

    def backward():
        x, y = flight.pop(0)
        if last:
            gradient = torch.full_like(y, 1 / (len(batches) * dist.get_world_size(dp)))
        else:
            gradient = torch.empty_like(y)
            dist.irecv(gradient, group=pp, group_src=here + 1).wait()
        y.backward(gradient)
        if not first:
            sent.append(dist.isend(x.grad, group=pp, group_dst=here - 1))

    optimizer.zero_grad()
    warm_up = min(stages - here - 1, len(batches))
    for k, batch in enumerate(batches):
        forward(*batch)
        if k >= warm_up:
            backward()
    while flight:
        backward()
    for work in sent:
        work.wait()
    calls = [dist.all_reduce(p.grad, group=dp, async_op=True) for p in stage.parameters()]
    for call in calls:
        call.wait()
    norms = torch.nn.utils.get_total_norm([p.grad for p in stage.parameters()])
    square = norms.square()
    dist.all_reduce(square, group=pp)
    norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(stage.parameters(), max_norm, norm)
    optimizer.step()
    return norm.item()
