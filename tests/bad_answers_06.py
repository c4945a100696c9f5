"""Answers to lab 06's exercises: some that are right in another way, and many that are wrong."""

from __future__ import annotations

import numpy as np
import torch


# ---- checkpoint: right ---------------------------------------------------------------------------
def through_hooks(block, x):
    """No autograd function: saved tensors are packed into nothing, and recomputed on demand."""
    state, found = torch.get_rng_state(), []

    def pack(_):
        found.append(None)
        return len(found) - 1

    def unpack(place):
        if found[place] is None:
            now, filled = torch.get_rng_state(), []
            torch.set_rng_state(state)

            def keep(tensor):
                filled.append(tensor.detach())
                return len(filled) - 1

            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda i: i):
                block(x.detach().requires_grad_())
            torch.set_rng_state(now)
            found[:] = filled
        return found[place]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return block(x)


class Right(torch.autograd.Function):
    """The parts that the wrong ones change."""

    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.parameters, ctx.x = block, parameters, x.detach()
        ctx.state = torch.get_rng_state()
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        found = again(ctx, gradient)
        return None, *found


def again(ctx, gradient, *, state=None, restore=True, calls=1):
    now, leaf = torch.get_rng_state(), ctx.x.detach().requires_grad_()
    for _ in range(calls):
        if state is not False:
            torch.set_rng_state(ctx.state if state is None else state)
        with torch.enable_grad():
            y = ctx.block(leaf)
    if restore:
        torch.set_rng_state(now)
    return torch.autograd.grad(y, (leaf, *ctx.parameters), gradient)


def made(name="Wrong", forward=Right.forward, backward=Right.backward):
    """A function like the answer, with another forward or backward."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), parts)

    def answer(block, x):
        return function.apply(block, x, *block.parameters())

    return answer


right = made()


# ---- checkpoint: wrong ---------------------------------------------------------------------------
def plain(block, x):
    return block(x)


def torchs_own(block, x):
    import torch.utils.checkpoint

    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def _other_masks(ctx, gradient):
    return None, *again(ctx, gradient, state=False)


def _disturbs(ctx, gradient):
    return None, *again(ctx, gradient, restore=False)


def _thrice(ctx, gradient):
    return None, *again(ctx, gradient, calls=2)


def _twice_as_much(ctx, gradient):
    return None, *(2 * one for one in again(ctx, gradient))


def _input_only(ctx, gradient):
    return None, again(ctx, gradient)[0], *(None for _ in ctx.parameters)


def _no_gradients(ctx, gradient):
    leaf = ctx.x.detach().requires_grad_()
    return None, *torch.autograd.grad(ctx.block(leaf), (leaf, *ctx.parameters), gradient)


def _without_dropout(ctx, gradient):
    ctx.block.eval()
    found = again(ctx, gradient)
    ctx.block.train()
    return None, *found


def _one_too_few(ctx, gradient):
    return tuple(again(ctx, gradient))


def _passes_on(ctx, gradient):
    return None, gradient, *(torch.zeros_like(p) for p in ctx.parameters)


other_masks, disturbs, thrice = (
    made("A", backward=_other_masks),
    made(backward=_disturbs),
    made(backward=_thrice),
)
twice_as_much, input_only = made(backward=_twice_as_much), made(backward=_input_only)
no_gradients, without_dropout = made(backward=_no_gradients), made(backward=_without_dropout)
one_too_few, passes_on = made(backward=_one_too_few), made(backward=_passes_on)


def _late_state(ctx, block, x, *parameters):
    ctx.block, ctx.parameters, ctx.x = block, parameters, x.detach()
    y = block(x)
    ctx.state = torch.get_rng_state()
    return y


def _seeded(ctx, block, x, *parameters):
    torch.manual_seed(1)
    return Right.forward(ctx, block, x, *parameters)


LAST = {}


def _global_state(ctx, block, x, *parameters):
    ctx.block, ctx.parameters, ctx.x = block, parameters, x.detach()
    LAST["state"] = torch.get_rng_state()
    return block(x)


def _from_last(ctx, gradient):
    return None, *again(ctx, gradient, state=LAST["state"])


def _keeps_graph(ctx, block, x, *parameters):
    ctx.parameters, ctx.leaf = parameters, x.detach().requires_grad_()
    with torch.enable_grad():
        ctx.y = block(ctx.leaf)
    return ctx.y.detach()


def _from_graph(ctx, gradient):
    return None, *torch.autograd.grad(ctx.y, (ctx.leaf, *ctx.parameters), gradient)


def _numpy_graph(ctx, block, x, *parameters):
    ctx.kept = [x.detach().numpy().copy() for _ in range(40)]
    return Right.forward(ctx, block, x, *parameters)


late_state, seeded = made(forward=_late_state), made(forward=_seeded)
global_state = made(forward=_global_state, backward=_from_last)
keeps_graph = made(forward=_keeps_graph, backward=_from_graph)
numpy_copies = made(forward=_numpy_graph)


def detached(block, x):
    with torch.no_grad():
        return block(x)


def not_the_block(block, x):
    return x.mean()


# ---- the estimator -------------------------------------------------------------------------------
def estimate(spec, b, n, zero_stage, precision, *, wrong=""):
    """Right, but for the one mistake that ``wrong`` names."""
    w = 4 if precision == "fp32" or wrong == "always fp32" else 2
    h, s, a = spec.hidden, spec.seq_len, spec.heads
    shapes = spec.parameter_shapes().items()
    sizes = {name: int(np.prod(shape)) for name, shape in shapes}
    if zero_stage in (1, 2) or (zero_stage and wrong == "one unit"):
        sizes = {"all": sum(sizes.values())}
    elif zero_stage == 3:
        names = ["embedding", *(f"blocks.{i}" for i in range(spec.layers)), "head"]
        sizes = {u: sum(z for k, z in sizes.items() if k.startswith(f"{u}.")) for u in names}
    ranks = n if zero_stage else 1
    parts = [z / ranks if wrong == "not padded" else -(-z // ranks) for z in sizes.values()]
    part = sum(parts)
    per = 8 if precision == "fp32" or wrong == "no master" else 12
    counts = {"no counts": 0, "counts per tensor": len(shapes)}.get(wrong, len(sizes))
    block = 16 * w * b * s * h + w * a * b * s * s + 4 * w * b * s
    if wrong == "no scores":
        block -= w * a * b * s * s
    if wrong == "no means":
        block -= 4 * w * b * s
    ends = 2 * w * b * s * h + 2 * w * b * s + 16 * b * s
    ends += (w if wrong == "short loss" else 4) * b * s * spec.vocab
    activations = spec.layers * block + (0 if wrong == "no ends" else ends)
    if wrong == "Korthikanti":
        activations = spec.layers * s * b * h * (34 + 5 * a * s / h)
    copies = 1 if zero_stage == 3 or wrong == "all sharded" else ranks
    return {
        "parameters": w * copies * part,
        "gradients": w * part * (ranks if wrong == "whole gradients" else 1),
        "optimizer": per * part + 4 * counts,
        "activations": activations / (b if wrong == "one sample" else 1),
    }


def with_mistake(mistake):
    def answer(spec, b, n, zero_stage, precision):
        return estimate(spec, b, n, zero_stage, precision, wrong=mistake)

    answer.__code__ = answer.__code__.replace(co_name=mistake or "right")
    return answer


ESTIMATES = {
    name: with_mistake(name)
    for name in (
        "", "always fp32", "one unit", "not padded", "no master", "no counts", "counts per tensor",
        "no scores", "no means", "short loss", "no ends", "Korthikanti", "all sharded",
        "whole gradients", "one sample",
    )
}  # fmt: skip


def asks_the_program(spec, b, n, zero_stage, precision):
    import paralab as pl

    return pl.program(spec, pl.Plan(dp=n, zero_stage=zero_stage)).peak()


def no_optimizer(spec, b, n, zero_stage, precision):
    found = estimate(spec, b, n, zero_stage, precision)
    del found["optimizer"]
    return found


def a_sum(spec, b, n, zero_stage, precision):
    return sum(estimate(spec, b, n, zero_stage, precision).values())
