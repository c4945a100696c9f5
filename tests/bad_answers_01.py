"""Answers to lab 01's exercises in plain PyTorch that are not the answer with a line changed.

Ranks import this module.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from written import ring_all_reduce


def one_rank_receives_first(tensor):
    """Calls that block, in an order in which one rank always receives: they come one by one."""
    n, r = dist.get_world_size(), dist.get_rank()
    chunks = tensor.tensor_split(n)
    buffer = torch.empty_like(chunks[0])
    for step in range(2 * n - 2):
        half = step >= n - 1
        t = step - (n - 1) * half
        leaving, arriving = chunks[(r + half - t) % n], chunks[(r + half - t - 1) % n]
        into = arriving if half else buffer[: arriving.numel()]
        first = r > 0  # one rank receives first, so the ring cannot deadlock
        if first:
            sent = dist.isend(leaving, (r + 1) % n)
        dist.recv(into, (r - 1) % n)
        if not first:
            sent = dist.isend(leaving, (r + 1) % n)
        sent.wait()
        if not half:
            arriving.add_(into)


def by_collective(tensor):
    dist.all_reduce(tensor)


def through_rank_0(tensor):
    n, r = dist.get_world_size(), dist.get_rank()
    if r:
        dist.isend(tensor, 0).wait()
        dist.irecv(tensor, 0).wait()
        return
    got = torch.empty_like(tensor)
    for other in range(1, n):
        dist.recv(got, other)
        tensor += got
    for other in range(1, n):
        dist.send(tensor, other)


def whole_tensor(tensor):
    n, r = dist.get_world_size(), dist.get_rank()
    passing = tensor.clone()
    for _ in range(n - 1):
        got = torch.empty_like(tensor)
        sent = dist.isend(passing, (r + 1) % n)
        dist.recv(got, (r - 1) % n)
        sent.wait()
        tensor += got
        passing = got


def in_pieces(tensor):
    """Right, but each chunk goes as ten messages that wait for each other."""
    for piece in tensor.tensor_split(10):
        ring_all_reduce(piece)


def raises(tensor, *more):
    raise KeyError("chunk 7")
