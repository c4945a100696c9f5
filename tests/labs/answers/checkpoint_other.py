"""Lab 06, a second solution: backward runs inside backward, and fills the parameters' .grad."""

import torch


class MyCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block, ctx.state = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        again = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]):  # puts the generator back at the end
            torch.set_rng_state(ctx.state)
            with torch.enable_grad():
                y = ctx.block(again)
        torch.autograd.backward(y, gradient)  # adds to .grad of every parameter by itself
        return None, again.grad


def my_checkpoint(block, x):
    return MyCheckpoint.apply(block, x)
