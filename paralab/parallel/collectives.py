"""All-reduce from sends and receives: ring, tree, and rings on two levels of links.

Every member holds a tensor of S bytes and needs the sum over the n members. In a *step* a member
exchanges messages with one or two others. Costs (alpha seconds per message, beta per byte;
theory/collectives.py has them as functions):

                     steps               one member sends          time
    ring             2 (n-1)             2 (n-1)/n S               2 (n-1) (alpha + beta S/n)
    tree             2 ceil(log2 n)      up to ceil(log2 n) S      2 ceil(log2 n) (alpha + beta S)
    hierarchical     the ring's in a node, and between nodes on 1/node_size of the tensor

The ring's two halves are collectives of their own: reduce-scatter leaves every member one finished
chunk, all-gather passes the finished chunks round. The ring sends as little as any all-reduce can
(Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", sec.
4); the tree pays alpha less often, so it wins on small messages. (Thakur, Rabenseifner & Gropp
2005, "Optimization of collective communication operations in MPICH", sec. 4, choose by size between
two other algorithms: lab 01 has halving-doubling.) All work in place; beyond the tensor the ring
needs memory for one chunk, the tree for a whole tensor. Lab 01 shows them.

[Note: chunks] The flat tensor is cut into n chunks, as even as can be (the first numel % n have one
element more); chunk c is finished on member (c - 1) % n, so member r owns chunk (r + 1) % n
between the two halves.

    r sends, n = 4       step 0      step 1      step 2
    reduce-scatter       chunk r     r - 1       r - 2       receives and adds r-1, r-2, r-3
    all-gather           chunk r+1   r           r - 1       receives r, r-1, r-2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paralab.checks import illegal, whole
from paralab.comm import Group


def ring_reduce_scatter(group: Group, tensor: Tensor, *, ring: Sequence[int] | None = None) -> None:
    """Make this member's own chunk of ``tensor`` the sum over the members; in place.

    tensor  contiguous, same shape and type on every member; the other chunks are left half summed
    ring    global ranks in ring order, this one among them; default: the whole group

    Member r of n owns chunk (r + 1) % n; see [Note: chunks].
    """
    n, r, left, right = _neighbours(group, ring)
    chunks = split(tensor, n)
    incoming = torch.empty_like(chunks[0]) if n > 1 else None  # the largest: all the extra memory
    for step in range(n - 1):
        leaving, arriving = chunks[(r - step) % n], chunks[(r - step - 1) % n]
        partial = incoming[: arriving.numel()]  # what the members to the left have added up
        group.exchange([("send", leaving, right), ("recv", partial, left)]).wait()
        arriving += partial


def ring_all_gather(group: Group, tensor: Tensor, *, ring: Sequence[int] | None = None) -> None:
    """Pass every member's own chunk of ``tensor`` round, until each member has all; in place.

    Continues where `ring_reduce_scatter` ends. Needs no extra memory, since chunks are received
    into their place.
    """
    n, r, left, right = _neighbours(group, ring)
    chunks = split(tensor, n)
    for step in range(n - 1):
        leaving, arriving = chunks[(r + 1 - step) % n], chunks[(r - step) % n]
        group.exchange([("send", leaving, right), ("recv", arriving, left)]).wait()


def ring_all_reduce(group: Group, tensor: Tensor, *, ring: Sequence[int] | None = None) -> None:
    """Sum ``tensor`` over the members, in place: 2 (n-1)/n S sent by each, in 2 (n-1) steps."""
    ring_reduce_scatter(group, tensor, ring=ring)
    ring_all_gather(group, tensor, ring=ring)


def tree_all_reduce(group: Group, tensor: Tensor) -> None:
    """Sum ``tensor`` over the group, in place: up a binomial tree to member 0, and down again.

    In round k members 2^k apart exchange. There are few steps, but each moves the whole tensor, and
    after round 0 half of the members are idle until the sum comes back down.

        n = 4    round 0: 1 -> 0, 3 -> 2    round 1: 2 -> 0    then the same edges backwards
    """
    n, r = group.size, group.index
    flat = tensor.view(-1)
    rounds = [2**k for k in range((n - 1).bit_length())]  # 1, 2, 4, ... below n
    incoming = None
    for distance in rounds:  # towards member 0, adding up
        if r % (2 * distance) == distance:
            group.send(flat, to=group.ranks[r - distance]).wait()
        elif r % (2 * distance) == 0 and r + distance < n:
            incoming = torch.empty_like(flat) if incoming is None else incoming
            group.recv(incoming, source=group.ranks[r + distance]).wait()
            flat += incoming
    for distance in reversed(rounds):  # away from member 0, the sum
        if r % (2 * distance) == distance:
            group.recv(flat, source=group.ranks[r - distance]).wait()
        elif r % (2 * distance) == 0 and r + distance < n:
            group.send(flat, to=group.ranks[r + distance]).wait()


def hierarchical_all_reduce(group: Group, tensor: Tensor, *, node_size: int) -> None:
    """Sum ``tensor`` over the group, in place, with few messages over the slow links between nodes.

    node_size  members per node, a divisor of the group's size; members i * node_size ... are node i

    Three rings, one after another: reduce-scatter inside the node; all-reduce of the member's own
    chunk among the members at the same place of every node; all-gather inside the node. Over m
    nodes a member sends 2 (m-1)/m S/node_size to other nodes, and a node 2 (m-1)/m S, in 2 (m-1)
    steps. In a flat ring, node after node, one member of each node sends 2 (n-1)/n S to the next
    node, in 2 (n-1) steps: up to twice as much on two nodes, nearly as much on many, and over one
    link instead of node_size.
    """
    ranks, r = group.ranks, group.index
    node_size = whole("node_size", node_size, at_least=1, at_most=group.size)
    if group.size % node_size:
        legal = [d for d in range(1, group.size + 1) if group.size % d == 0]
        why = f"the group's {group.size} ranks cannot be divided into nodes of {node_size}"
        raise illegal("node_size", node_size, why, ", ".join(map(str, legal)))
    first, place = r - r % node_size, r % node_size
    node = ranks[first : first + node_size]
    twins = ranks[place::node_size]  # the members of this place, one per node
    ring_reduce_scatter(group, tensor, ring=node)
    own = split(tensor, node_size)[(place + 1) % node_size]
    ring_all_reduce(group, own, ring=twins)
    ring_all_gather(group, tensor, ring=node)


def split(tensor: Tensor, n: int) -> tuple[Tensor, ...]:
    """The n chunks of the flat tensor, views of it; see [Note: chunks]."""
    return tensor.view(-1).tensor_split(n)


def _neighbours(group: Group, ring: Sequence[int] | None) -> tuple[int, int, int, int]:
    """(n, this member's place on the ring, rank to its left, rank to its right)."""
    ranks = group.ranks if ring is None else tuple(ring)
    n, r = len(ranks), ranks.index(group.context.rank)
    return n, r, ranks[(r - 1) % n], ranks[(r + 1) % n]


ALGORITHMS = {
    function.__name__: function
    for function in (
        ring_reduce_scatter,
        ring_all_gather,
        ring_all_reduce,
        tree_all_reduce,
        hierarchical_all_reduce,
    )
}
