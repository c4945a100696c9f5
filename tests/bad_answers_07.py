"""Answers to lab 07's exercises: right ones in another way, and wrong ones, each in its own way."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def hooked(x):
    """A hook on x itself, which is called with the gradient of all uses of x."""

    def summed(grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad

    if x.requires_grad:
        x.register_hook(summed)
    return x


def summed(x, op=dist.ReduceOp.SUM):
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op=op)
    return x


def in_two(x):
    """An all-reduce is a reduce-scatter and an all-gather."""
    x = x.detach().contiguous().view(-1)
    part, whole = x.new_empty(x.numel() // dist.get_world_size()), torch.empty_like(x)
    dist.reduce_scatter_tensor(part, x)
    dist.all_gather_into_tensor(whole, part)
    return whole


def operator(forward, backward):
    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x).view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad).view_as(grad)

    return Operator.apply


def same(x):
    return x


# ---- f_and_g: functions, because an answer travels to its ranks ----------------------------------
def g(x):
    return operator(summed, same)(x)


def f_in_two(x):
    return operator(same, in_two)(x)


def g_in_two(x):
    return operator(in_two, same)(x)


# ---- tensor_attention ----------------------------------------------------------------------------
def own(whole, dim):
    return whole.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


class AttentionGood(nn.Module):
    """A right answer, by sums over named axes."""

    def __init__(self, qkv, proj, *, heads, f, g):
        super().__init__()
        self.f, self.g, self.heads = f, g, heads // dist.get_world_size()
        self.qkv, self.proj = nn.Module(), nn.Module()
        self.qkv.weight = nn.Parameter(self.rows(qkv.weight))
        self.qkv.bias = nn.Parameter(self.rows(qkv.bias))
        self.proj.weight = nn.Parameter(own(proj.weight, 1))
        self.proj.bias = nn.Parameter(proj.bias.detach().clone())

    def rows(self, whole):
        return torch.cat([own(part, 0) for part in whole.detach().chunk(3)])

    def parts(self, x):
        """q, k, v: (b, s, a/t, h/a) each."""
        flat = F.linear(self.f(x), self.qkv.weight, self.qkv.bias)
        return flat.unflatten(-1, (3, self.heads, -1)).unbind(2)

    def mask(self, scores):
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -math.inf)

    def mixed(self, x):
        q, k, v = self.parts(x)
        scores = torch.einsum("bqad,bkad->baqk", q, k) / math.sqrt(q.shape[-1])
        share = self.mask(scores).softmax(-1)
        return torch.einsum("baqk,bkad->bqad", share, v).flatten(2)

    def forward(self, x):
        return self.g(F.linear(self.mixed(x), self.proj.weight)) + self.proj.bias


class AttentionHeadByHead(AttentionGood):
    """A right answer: a loop over heads, each with its own rows of proj."""

    def mixed(self, x):
        q, k, v = self.parts(x)
        return torch.cat([self.head(*(part[:, :, i] for part in (q, k, v)))
                          for i in range(self.heads)], dim=-1)  # fmt: skip

    def head(self, q, k, v):
        return self.mask(q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


# ---- vocab_parallel_loss -------------------------------------------------------------------------
def local_target(logits, targets):
    """(index, whether it is here) of each token's target in the rank's own part."""
    width = logits.shape[1]
    at = targets - dist.get_rank() * width
    here = (at >= 0) & (at < width)
    return at.clamp(0, width - 1), here


def loss_of_log_sums(logits, targets):
    """Right: each rank's own log Σ exp, put together by the maximum of those."""
    at, here = local_target(logits, targets)
    mine = logits.logsumexp(1)
    high = summed(mine, dist.ReduceOp.MAX)
    sums, target = g((mine - high).exp()), g(logits.gather(1, at[:, None])[:, 0] * here)
    return (high + sums.log() - target).mean()


def loss_of_own_part(logits, targets):
    at, here = local_target(logits, targets)
    own_loss = F.cross_entropy(logits, at, reduction="none") * here
    return g(own_loss.mean())


def loss_gathers_the_logits(logits, targets):
    t, rank = dist.get_world_size(), dist.get_rank()
    parts = [torch.empty_like(logits) for _ in range(t)]
    dist.all_gather(parts, logits.detach())
    parts[rank] = logits
    return F.cross_entropy(torch.cat(parts, 1), targets)
