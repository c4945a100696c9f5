"""Lab 02's warm-up in one message: all gradients in one flat tensor."""

import torch
import torch.distributed as dist


def average_in_one_message(module):
    gradients = [parameter.grad for parameter in module.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
