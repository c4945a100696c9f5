"""Bytes on the link: how many each rank sends in a collective, and to which ranks.

With n ranks in the group and a payload of S bytes (S = the full buffer, padding included):

    all_reduce                      2 (n-1)/n S      ring: a reduce-scatter, then an all-gather
    all_gather, reduce_scatter        (n-1)/n S      S = the gathered buffer; the input buffer
    all_to_all                        (n-1)/n S
    broadcast                         (n-1) S from all members together, in a tree from the root
    reduce                            S from every member but the root, directly to the root
    send                              S from the sender, 0 from the receiver

An all-reduce cannot send less (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for
clusters of workstations"); in the next two rows a rank sends only what the others lack. Bytes are
whole numbers: where n does not divide the sum over all members, the first members send one byte
more, so that the sum is exact.

Over gloo the kernel's counters show these bytes. Over NCCL they are a model: an all-reduce uses a
ring or a tree, other collectives but an all-to-all use a ring, and a switch may add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paralab.checks import choice, whole

RING = ("all_reduce", "all_gather")  # each member sends to its right neighbour only
PAIRWISE = ("reduce_scatter", "all_to_all")  # each member sends a part to every other member
ROOTED = ("broadcast", "reduce")
POINT_TO_POINT = ("send", "recv")
OPS = RING + PAIRWISE + ROOTED + POINT_TO_POINT

# Phases of calls that the algorithm does not need: reporting a loss, clocks, the first handshake.
BOOKKEEPING = ("control", "setup")
SURPLUS = "gloo surplus"  # phase of bytes that gloo sends and an observed operation does not need


def share(total: int, n: int, index: int) -> int:
    """Size of part ``index`` of ``total`` bytes or elements in n parts, the larger ones first."""
    return total // n + (index < total % n)


def wire_bytes(op: str, payload: int, n: int, index: int = 0, root: int = 0) -> int:
    """Bytes that member ``index`` of an n-member group sends for ``op`` on ``payload`` bytes.

    index and root are positions in the group, not global ranks. Raises ValueError for an unknown
    op, a position that the group does not have, and a negative payload.
    """
    choice("op", op, OPS)
    whole("n", n, at_least=1)
    whole("payload", payload, at_least=0)
    whole("index", index, at_least=0, at_most=n - 1)
    whole("root", root, at_least=0, at_most=n - 1)
    if op == "send":
        return payload
    if op == "recv" or n == 1:
        return 0
    if op == "all_reduce":
        return share(2 * (n - 1) * payload, n, index)
    if op in ("all_gather", *PAIRWISE):
        return share((n - 1) * payload, n, index)
    if op == "reduce":
        return payload * (index != root)
    return payload * len(_tree_children(n, index, root))  # broadcast


class Row(NamedTuple):
    """One call of one rank: columns of a report's table of collectives (report/tables.py), in which
    ``payload`` and ``wire`` are called payload_bytes and wire_bytes. ``peer`` is the global rank of
    a message's other end, or of a broadcast's or reduce's root; else -1.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    peer: int
    level: str
    phase: str
    payload: int
    wire: int


def row(
    op: str,
    axis: str,
    ranks: tuple[int, ...],
    rank: int,
    *,
    peer: int,
    phase: str,
    payload: int,
    node_of: Callable[[int], int],
) -> Row:
    """The call as ``rank`` makes it; ``node_of``: node by global rank."""
    root = ranks.index(peer) if op in ROOTED else 0
    wire = wire_bytes(op, payload, len(ranks), ranks.index(rank), root)
    return Row(
        op, axis, ranks, peer, level(ends(op, rank, peer, ranks), node_of), phase, payload, wire
    )


def ends(op: str, rank: int, peer: int, ranks: Sequence[int]) -> Sequence[int]:
    """The ranks between which a call is: the two ends of a message, or the whole group."""
    return (rank, peer) if op in POINT_TO_POINT and peer >= 0 else ranks


def level(ranks: Sequence[int], node_of: Callable[[int], int]) -> str:
    """ "inter" if the ranks are on several nodes, else "intra"."""
    return "inter" if len(set(map(node_of, ranks))) > 1 else "intra"


def most_sent(op: str, payload: int, n: int) -> int:
    """The most bytes that one member of the group sends."""
    return wire_bytes(op, payload, n, int(op == "reduce" and n > 1))


def far_share(
    op: str, ranks: Sequence[int], payload: int, peer: int, node_of: Callable[[int], int]
) -> float:
    """The share of the bytes that the members of a group send in a call which leaves a node."""
    nodes = {rank: node_of(rank) for rank in ranks}
    if op in RING:  # every member sends equally much, to the next member
        pairs = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
        return sum(nodes[a] != nodes[b] for a, b in pairs) / len(ranks)
    if op in PAIRWISE:  # every member sends equally much to every other: no walk over n^2 pairs
        n, near = len(ranks), sum(k * k for k in Counter(nodes.values()).values())
        return (n * n - near) / max(1, n * n - n)
    sent = Counter()  # {whether the receiver is on another node: bytes}
    for rank in ranks:
        for receiver, size in edges(op, ranks, rank, payload, peer).items():
            sent[nodes[rank] != nodes[receiver]] += size
    return sent[True] / max(1, sent.total())


def _tree_children(n: int, index: int, root: int) -> list[int]:
    """The members that ``index`` forwards a broadcast to: in round i the first 2^i members, counted
    from the root, each send to the member 2^i further.
    """
    position, children, reach = (index - root) % n, [], 1
    while reach < n:
        if position < reach and position + reach < n:
            children.append((position + reach + root) % n)
        reach *= 2
    return children


def edges(
    op: str,
    ranks: Sequence[int],
    rank: int,
    payload: int,
    peer: int = -1,
    *,
    sent: int | None = None,
) -> dict[int, int]:
    """{receiving rank: bytes} of what ``rank`` sends in a call, for the rank x rank picture.

    ranks   global ranks of the group, in group order, with ``rank``
    peer    global rank of the other end of a send, or of the root of a broadcast or reduce
    sent    bytes that the rank sends, where they are the sum of several calls, each of which was
            rounded to whole bytes; default: `wire_bytes`
    """
    n, index = len(ranks), list(ranks).index(rank)
    if op == "recv" or n == 1:
        return {}
    if op == "send":
        return {peer: payload}
    root = list(ranks).index(peer) if op in ROOTED else 0
    sent = wire_bytes(op, payload, n, index, root) if sent is None else sent
    if op in RING:
        return {ranks[(index + 1) % n]: sent}
    if op in PAIRWISE:
        others = [r for r in ranks if r != rank]
        return {r: share(sent, n - 1, i) for i, r in enumerate(others)}
    if op == "reduce":
        return {peer: sent} if sent else {}
    return {ranks[child]: payload for child in _tree_children(n, index, root)}
