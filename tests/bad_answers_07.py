"""Answers to lab 07's exercises: right ones in another way, and wrong ones, each in its own way."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


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


def gathered(x):
    x = x.detach().contiguous()
    every = x.new_empty(dist.get_world_size(), *x.shape)
    dist.all_gather_into_tensor(every.view(-1), x.view(-1))
    return every.sum(0)


def unawaited(x):
    x = x.detach().clone()
    dist.all_reduce(x, async_op=True)
    return x


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
def f(x):
    return operator(same, summed)(x)


def g(x):
    return operator(summed, same)(x)


def f_in_two(x):
    return operator(same, in_two)(x)


def g_in_two(x):
    return operator(in_two, same)(x)


def f_averages(x):
    return operator(same, lambda grad: summed(grad) / dist.get_world_size())(x)


def f_sums_both_ways(x):
    return operator(summed, summed)(x)


def g_sums_both_ways(x):
    return operator(summed, summed)(x)


def g_gathers(x):
    return operator(gathered, same)(x)


def g_takes_the_largest(x):
    return operator(lambda x: summed(x, dist.ReduceOp.MAX), same)(x)


def g_without_backward(x):
    return summed(x)


def g_does_not_wait(x):
    return operator(unawaited, same)(x)


def g_returns_nothing(x):
    summed(x)


def g_on_rank_0(x):
    return operator(lambda x: summed(x) if dist.get_rank() == 0 else x, same)(x)


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


def loss_by(largest, total, target, mean=True):
    """A loss from the three numbers per token, by these functions of (logits, ...)."""

    def loss(logits, targets):
        at, here = local_target(logits, targets)
        high = largest(logits)
        sums = total((logits - high[:, None]).exp().sum(1))
        own_target = logits.gather(1, at[:, None])[:, 0]
        losses = high + sums.log() - target(own_target, here)
        return losses.mean() if mean else losses.sum()

    return loss


def common_largest(logits):
    return summed(logits.amax(1), dist.ReduceOp.MAX)


def of_one_rank(own_target, here):
    return g(own_target * here)


def loss_by_autograd(logits, targets):
    """Right: autograd finds the gradient."""
    return loss_by(common_largest, g, of_one_rank)(logits, targets)


def loss_of_log_sums(logits, targets):
    """Right: each rank's own log Σ exp, put together by the maximum of those."""
    at, here = local_target(logits, targets)
    mine = logits.logsumexp(1)
    high = summed(mine, dist.ReduceOp.MAX)
    losses = (
        high + g((mine - high).exp()).log() - of_one_rank(logits.gather(1, at[:, None])[:, 0], here)
    )
    return losses.mean()


def loss_overflows(logits, targets):
    return loss_by(lambda z: torch.zeros(len(z)), g, of_one_rank)(logits, targets)


def loss_of_own_largest(logits, targets):
    return loss_by(lambda z: z.detach().amax(1), g, of_one_rank)(logits, targets)


def loss_of_own_sum(logits, targets):
    return loss_by(common_largest, same, of_one_rank)(logits, targets)


def loss_of_own_part(logits, targets):
    at, here = local_target(logits, targets)
    own_loss = F.cross_entropy(logits, at, reduction="none") * here
    return g(own_loss.mean())


def loss_target_everywhere(logits, targets):
    return loss_by(common_largest, g, lambda own_target, here: g(own_target))(logits, targets)


def loss_target_of_one_rank(logits, targets):
    return loss_by(common_largest, g, lambda own_target, here: own_target * here)(logits, targets)


def loss_is_a_sum(logits, targets):
    return loss_by(common_largest, g, of_one_rank, mean=False)(logits, targets)


def loss_of_a_mean_over_ranks(logits, targets):
    return loss_by_autograd(logits, targets) / dist.get_world_size()


def loss_gathers_the_logits(logits, targets):
    t, rank = dist.get_world_size(), dist.get_rank()
    parts = [torch.empty_like(logits) for _ in range(t)]
    dist.all_gather(parts, logits.detach())
    parts[rank] = logits
    return F.cross_entropy(torch.cat(parts, 1), targets)


def loss_of_sums_both_ways(logits, targets):
    def total(x):
        return operator(summed, summed)(x)

    return loss_by(common_largest, total, lambda mine, here: total(mine * here))(logits, targets)


def loss_in_many_copies(logits, targets):
    copies = [logits.detach().clone() for _ in range(5)]
    return loss_by_autograd(logits + 0 * copies[0], targets)


def loss_has_no_gradient(logits, targets):
    return loss_by_autograd(logits.detach(), targets)


def loss_does_not_wait(logits, targets):
    return loss_by(common_largest, operator(unawaited, same), of_one_rank)(logits, targets)


def loss_indexes_by_the_whole(logits, targets):
    return logits.gather(1, targets[:, None]).mean()


class ByHand(torch.autograd.Function):
    """The gradient by hand, with the target on every rank, or none, or without grad or n."""

    @staticmethod
    def forward(ctx, logits, targets, kind):
        at, here = local_target(logits, targets)
        high = common_largest(logits)
        share = (logits - high[:, None]).exp()
        total, target = summed(share.sum(1)), summed(logits.gather(1, at[:, None])[:, 0] * here)
        ctx.share, ctx.at, ctx.here, ctx.kind = share / total[:, None], at, here, kind
        return (high + total.log() - target).mean()

    @staticmethod
    def backward(ctx, grad):
        found, rows = ctx.share.clone(), torch.arange(len(ctx.at))
        if ctx.kind != "no target":
            found[rows, ctx.at] -= 1.0 if ctx.kind == "every rank" else ctx.here.float()
        found = found * (1.0 if ctx.kind == "no grad" else grad)
        return found / (1 if ctx.kind == "no mean" else len(rows)), None, None


def loss_by_hand(logits, targets):
    return ByHand.apply(logits, targets, "")


def loss_subtracts_everywhere(logits, targets):
    return ByHand.apply(logits, targets, "every rank")


def loss_subtracts_nothing(logits, targets):
    return ByHand.apply(logits, targets, "no target")


def loss_ignores_grad(logits, targets):
    return ByHand.apply(logits, targets, "no grad")


def loss_forgets_the_mean(logits, targets):
    return ByHand.apply(logits, targets, "no mean")
