"""Answers to lab 08's exercises: right ones in another way, and wrong ones, each in its own way."""

from __future__ import annotations

import torch
import torch.distributed as dist

from written import MySumma


# ---- summa ---------------------------------------------------------------------------------------
class Base(MySumma):
    def __init__(self, row, column):
        super().__init__(row, column)
        self.q = dist.get_world_size(row)


class OneBuffer(Base):
    """Right too: everything is received into the same two blocks, last step first."""

    def forward(self, x, w):
        here_x, here_w = x.new_empty(x.shape), w.new_empty(w.shape)
        y = x.new_zeros(x.shape[0], w.shape[1])
        for step in reversed(range(self.q)):
            for group, own, here in ((self.row, x, here_x), (self.column, w, here_w)):
                if dist.get_rank(group) == step:
                    here.copy_(own)
                dist.broadcast(here, group_src=step, group=group)
            y.addmm_(here_x, here_w)
        return y


class GathersAll(Base):
    """As many elements, and a whole row and a whole column on every rank."""

    def forward(self, x, w):
        xs, ws = x.new_empty(self.q * x.numel()), w.new_empty(self.q * w.numel())
        dist.all_gather_into_tensor(xs, x.view(-1), group=self.row)
        dist.all_gather_into_tensor(ws, w.view(-1), group=self.column)
        return (xs.view(self.q, *x.shape) @ ws.view(self.q, *w.shape)).sum(0)


# ---- cannon --------------------------------------------------------------------------------------
def moved(block, to, source):
    arriving = torch.empty_like(block)
    calls = [dist.P2POp(dist.isend, block, to), dist.P2POp(dist.irecv, arriving, source)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return arriving


def along(block, q, down=0, right=0):
    """The block moved by so many places; what arrives comes from the other side."""
    i, j = divmod(dist.get_rank(), q)
    if down % q == 0 and right % q == 0:
        return block
    to = (i + down) % q * q + (j + right) % q
    return moved(block, to, (i - down) % q * q + (j - right) % q)


def cannon_by_broadcasts(x, w, q):
    """Right, by broadcasts to all ranks, each of which keeps those of its row and column."""
    (i, j), y = divmod(dist.get_rank(), q), 0
    for step in range(q):
        for rank in range(q * q):
            here_x, here_w = x.clone(), w.clone()
            dist.broadcast(here_x, rank)
            dist.broadcast(here_w, rank)
            if rank == i * q + step:
                left = here_x
            if rank == step * q + j:
                upper = here_w
        y = y + left @ upper
    return y


def cannon_gathers(x, w, q):
    """Every block of the row and of the column at once, by messages."""
    i, j = divmod(dist.get_rank(), q)
    xs, ws = {j: x}, {i: w}
    for step in range(1, q):
        xs[(j + step) % q] = along(x, q, right=-step)
        ws[(i + step) % q] = along(w, q, down=-step)
    return sum(xs[step] @ ws[step] for step in range(q))


def cannon_gathers_w(x, w, q):
    """The column of W at once; X moves as it has to."""
    i, j = divmod(dist.get_rank(), q)
    ws = [along(w, q, down=-step) for step in range(q)]
    x = along(x, q, right=-i)
    y = x @ ws[j]
    for step in range(1, q):
        x = along(x, q, right=-1)
        y = y + x @ ws[(j + step) % q]
    return y


def cannon_fetches(x, w, q):
    """Every step has its blocks from the ranks that own them, whatever the distance."""
    (i, j), y = divmod(dist.get_rank(), q), 0
    for step in range(q):
        y = y + along(x, q, right=-i - step) @ along(w, q, down=-j - step)
    return y


def cannon_in_place(x, w, q):
    """The blocks that arrive are copied into the caller's x and w."""
    (i, j), y = divmod(dist.get_rank(), q), 0
    for step in range(q):
        x.copy_(along(x, q, right=-1 if step else -i))
        w.copy_(along(w, q, down=-1 if step else -j))
        y = y + x @ w
    return y


def cannon_overwrites(x, w, q):
    """Receives into the tensor that is being sent."""

    def over(block, to, source):
        send, receive = dist.isend(block, to), dist.irecv(block, source)
        receive.wait()
        send.wait()

    i, j = divmod(dist.get_rank(), q)
    over(x, i * q + (j - 1) % q, i * q + (j + 1) % q)
    return x @ w
